"""RunDirectory: what a run leaves on disk, the same for every script."""

import contextlib
import fcntl
import io
import itertools
import json
import os
import platform
import re
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gbcore.graph import TransitionGraph
from gbcore.run.checkpoint import replacing
from gbcore.run.flags import fail

LEFT_AT_THE_END = ("result.json", "model.pt", "graph.npz", "episode.mp4")
METRICS, EVALUATIONS = "metrics.csv", "evaluations.csv"
OF_EVALUATIONS = ("global_step", "episode", "episodic_return", "episodic_length", "train_return")
EPISODE_METRICS = ("charts/episodic_return", "charts/episodic_length")  # charted at each end


class RunDirectory:
    """A folder per run: config, TensorBoard events, metrics.csv, evaluations.csv, result.json.

    It is locked: a new one, with a number appended if the name is taken, or that of a run that
    goes on. OSError if there is none; ValueError if another process has it, or links or pipes in it
    would lead elsewhere what a run writes.
    """

    path: Path

    def __init__(self, path: str | Path, is_new: bool = False) -> None:
        self.path = _make_folder(Path(path)) if is_new else Path(path)
        self._closing = contextlib.ExitStack()
        self._closing.callback(os.close, _lock(self.path))

    def begin(
        self, config: dict[str, Any], metric_names: Sequence[str],
        step: int | None = None, saved: Mapping[str, NDArray[np.uint8]] | None = None,
    ) -> None:  # fmt: skip
        """Open its files; of a resumed run with the step and what `state` returned there.

        With config["track"], W&B gets the run, too. ValueError where a table is not as it was.
        """
        from torch.utils.tensorboard import SummaryWriter  # 1 s that bad flags need not wait for

        # What may be refused comes before anything in the folder is changed.
        self._metric_names, begins = tuple(metric_names), {}
        columns = {METRICS: ("global_step", *metric_names), EVALUATIONS: OF_EVALUATIONS}
        for name, of in columns.items():
            begins[name] = header = f"{','.join(of)}\n".encode()
            if saved is not None:
                begins[name], found = saved[name].tobytes(), (self.path / name).read_bytes()
                if not (begins[name].startswith(header) and found.startswith(begins[name])):
                    told = f"Require {name} as its checkpoint knows it, of the same columns"
                    raise ValueError(told)
        if config.get("track"):
            self._closing.callback(_begin_tracking(self.path, config).finish)
        for name in LEFT_AT_THE_END:  # those of an end before this one
            (self.path / name).unlink(missing_ok=True)
        self.write_json("config.json", config)
        # TensorBoard's thread raises what stopped it in our next call, and need not print it.
        self._closing.callback(setattr, threading, "excepthook", threading.excepthook)
        threading.excepthook = _print_unless_os_error
        self._writer = SummaryWriter(self.path, purge_step=None if step is None else step + 1)
        self._closing.callback(self._writer.close)
        shown = {key: str(value).replace("|", "\\|") for key, value in config.items()}
        rows = "".join(f"|{key}|{value}|\n" for key, value in shown.items())
        rows = f"|param|value|\n|-|-|\n{rows}".encode(errors="replace").decode()
        self._writer.add_text("hyperparameters", rows)
        self._tables = {}
        for name, begin in begins.items():
            with replacing(self.path / name) as new:
                new.write_bytes(begin)
            # A line at a time, at once: a killed run loses none.
            table = (self.path / name).open("a", buffering=1)
            self._tables[name] = self._closing.enter_context(table)

    def log(self, step: int, metrics: dict[str, float | None]) -> None:
        """One row of metrics.csv, and one TensorBoard scalar per metric that has a value."""
        self._write(METRICS, (step, *(metrics.get(name) for name in self._metric_names)))
        for name, value in metrics.items():
            if value is not None and name not in EPISODE_METRICS:
                self._writer.add_scalar(name, value, step)

    def log_episode(self, step: int, episodic_return: float, episodic_length: int) -> None:
        """Return and length of a training episode, to TensorBoard."""
        self._writer.add_scalar("charts/episodic_return", episodic_return, step)
        self._writer.add_scalar("charts/episodic_length", episodic_length, step)

    def log_evaluation(
        self, step: int, returns: list[float], lengths: list[int],
        of_training: list[float] | None = None,
    ) -> None:  # fmt: skip
        """One row of evaluations.csv per episode, and their mean to TensorBoard.

        of_training: returns of as many episodes on levels of training.
        """
        rows = zip(returns, lengths, of_training or [None] * len(returns), strict=True)
        for episode, measured in enumerate(rows):
            self._write(EVALUATIONS, (step, episode, *measured))
        for name, found in (("episodic_return", returns), ("train_return", of_training)):
            if found is not None:
                self._writer.add_scalar(f"eval/{name}", sum(found) / len(found), step)

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        """Write a dict as indented JSON."""
        with replacing(self.path / name) as new:
            new.write_text(json.dumps(content, indent=2) + "\n")

    def write_model(self, network: torch.nn.Module, graph: TransitionGraph) -> None:
        """Write model.pt and graph.npz."""
        model = io.BytesIO()  # in memory first: on a full disk torch raises a bare RuntimeError
        torch.save(network.state_dict(), model)
        with replacing(self.path / "model.pt") as new:
            new.write_bytes(model.getbuffer())
        with replacing(self.path / "graph.npz") as new:
            graph.save(new)

    def flush(self) -> None:
        """Write out what is held back: TensorBoard's events; rows of tables, to the disk itself."""
        self._writer.flush()
        for table in self._tables.values():
            os.fsync(table.fileno())

    def state(self) -> dict[str, NDArray[np.uint8]]:
        """The tables as they are: a resumed run goes on from there."""
        found = {name: (self.path / name).read_bytes() for name in self._tables}
        return {name: np.frombuffer(table, np.uint8) for name, table in found.items()}

    def _write(self, name, values):
        """A row."""
        texts = [
            f"{v:.9g}" if isinstance(v, float) else "" if v is None else str(v) for v in values
        ]
        self._tables[name].write(f"{','.join(texts)}\n")

    def close(self) -> None:
        """Flush and close every file; another process may go on."""
        self._closing.close()


def _lock(path):
    """A descriptor, to be closed to give the folder back; see RunDirectory."""
    for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
        if entry.is_symlink() or not (entry.is_file() or entry.is_dir()):
            kind = "a link" if entry.is_symlink() else "a pipe or device"
            raise ValueError(f"{entry.name} in it is {kind}: a run writes through none")
    lock = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise ValueError("another process goes on with this run") from error
    except OSError:
        pass  # a file system without locks
    return lock


def _make_folder(path):
    """A new folder of that name, or with a number appended if there is one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for tries in itertools.count(1):
        new = path if tries == 1 else Path(f"{path}-{tries}")
        with contextlib.suppress(FileExistsError):
            new.mkdir()
            return new


def _begin_tracking(path, config):
    import wandb

    of_run = {"project": config["wandb_project_name"], "entity": config["wandb_entity"]}
    try:
        return wandb.init(
            **of_run, id=path.resolve().name, resume="allow", config=config, sync_tensorboard=True
        )
    except Exception as error:  # no login, no network
        with contextlib.suppress(OSError):
            path.rmdir()  # of a new run
        fail(f"wandb cannot begin: {error}")


def _print_unless_os_error(failure):
    if not isinstance(failure.exc_value, OSError):
        threading.__excepthook__(failure)


def run_name(env_id: str, script: str, backup: str, seed: int) -> str:
    """Folder name <env>__<script>__<backup>__<seed>__<time>; what is no part of a name is -."""
    env_id = re.sub(r"[^\w.-]", "-", env_id)
    return f"{env_id}__{script}__{backup}__{seed}__{time.strftime('%Y%m%d-%H%M%S')}"


def with_file(task: str) -> str:
    """A task's name; of module:Id-v0 with the file that the module was imported from."""
    module = sys.modules.get(task.rpartition(":")[0])
    file = getattr(module, "__file__", None)
    return f"{task} ({file})" if file else task


def versions(*packages: str) -> dict[str, str | None]:
    """Versions of this code (its commit, where git knows), Python and packages, for result.json."""
    describe = ("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty")
    try:
        commit = subprocess.run(describe, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):  # no git, or a copied folder
        commit = None
    found = {package: metadata.version(package) for package in packages}
    return {"commit": commit, "python": platform.python_version()} | found
