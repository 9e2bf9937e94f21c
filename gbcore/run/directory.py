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
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from gbcore.graph import TransitionGraph
from gbcore.run.flags import fail

LEFT_AT_THE_END = ("result.json", "model.pt", "graph.npz", "episode.mp4")
METRICS, EVALUATIONS = "metrics.csv", "evaluations.csv"
OF_EVALUATIONS = ("global_step", "episode", "episodic_return", "episodic_length")
EPISODE_METRICS = ("charts/episodic_return", "charts/episodic_length")  # charted at each end


class RunDirectory:
    """A folder per run: config, TensorBoard events, metrics.csv, evaluations.csv, result.json.

    It is a new one, with a number appended if the name is taken; or that of a resumed run, locked
    already, with the step and what `state` returned there. With track, W&B gets the run, too.
    OSError where the folder cannot be written to, ValueError where a table is not as it was.
    """

    path: Path

    def __init__(
        self, path: str | Path, config: dict[str, Any], metric_names: Sequence[str],
        resume_step: int | None = None, saved: dict[str, Any] | None = None,
        lock: int | None = None,
    ) -> None:  # fmt: skip
        from torch.utils.tensorboard import SummaryWriter  # 1 s that bad flags need not wait for

        self.path = Path(path) if resume_step is not None else _make_folder(Path(path))
        self._lock = lock_folder(self.path) if lock is None else lock  # ours until we end
        # What may be refused comes before anything in the folder is changed.
        self._metric_names = tuple(metric_names)
        columns = {METRICS: ("global_step", *metric_names), EVALUATIONS: OF_EVALUATIONS}
        headers = {name: f"{','.join(of)}\n".encode() for name, of in columns.items()}
        begins = headers if saved is None else self._kept(headers, saved)
        self._wandb = _begin_tracking(self.path, config) if config.get("track") else None
        for name in LEFT_AT_THE_END:  # those of an end before this one
            (self.path / name).unlink(missing_ok=True)
        self.write_json("config.json", config)
        # TensorBoard's thread raises what stopped it in our next call, and need not print it.
        self._excepthook, threading.excepthook = threading.excepthook, _print_unless_os_error
        purge_step = None if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(self.path, purge_step=purge_step)
        rows = "".join(f"|{key}|{value}|\n" for key, value in config.items())
        rows = f"|param|value|\n|-|-|\n{rows}".encode(errors="replace").decode()
        self._writer.add_text("hyperparameters", rows)
        self._tables = {}
        for name, begin in begins.items():
            with replacing(self.path / name) as new:
                new.write_bytes(begin)
            self._tables[name] = (self.path / name).open("ab", buffering=0)

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

    def log_evaluation(self, step: int, returns: list[float], lengths: list[int]) -> None:
        """One row of evaluations.csv per episode, and their mean to TensorBoard."""
        for episode, measured in enumerate(zip(returns, lengths, strict=True)):
            self._write(EVALUATIONS, (step, episode, *measured))
        self._writer.add_scalar("eval/episodic_return", sum(returns) / len(returns), step)

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

    def state(self) -> dict[str, Any]:
        """Length and checksum of each table: what a resumed run keeps of it."""
        found = {name: (self.path / name).read_bytes() for name in self._tables}
        return {name: {"size": len(t), "crc": zlib.crc32(t)} for name, t in found.items()}

    def _kept(self, headers, saved):
        found = {}
        for name, header in headers.items():
            path, size = self.path / name, saved[name]["size"]
            rows = found[name] = path.read_bytes()[:size] if path.exists() else b""
            if zlib.crc32(rows) != saved[name]["crc"] or not rows.startswith(header):
                raise ValueError(f"Require {name} as its checkpoint knows it, of the same columns")
        return found

    def _write(self, name, values):
        """A row, on disk at once: a killed run loses none."""
        texts = [
            f"{v:.9g}" if isinstance(v, float) else "" if v is None else str(v) for v in values
        ]
        row = f"{','.join(texts)}\n".encode()
        while row:  # a disk that fills up takes a part first, and then raises
            row = row[self._tables[name].write(row) :]

    def close(self) -> None:
        """Flush and close every file."""
        try:
            for table in self._tables.values():
                table.close()
            self._writer.close()
            if self._wandb is not None:
                self._wandb.finish()
        finally:
            threading.excepthook = self._excepthook
            os.close(self._lock)


def lock_folder(path: str | Path) -> int:
    """Take a run's folder, before its checkpoint is read: another process may still write there.

    Returns a descriptor that is closed to give the folder back. OSError if there is no such folder;
    ValueError if another process has it, or links or pipes in it would lead what a run writes
    elsewhere.
    """
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
            **of_run, id=path.name, resume="allow", config=config, sync_tensorboard=True
        )
    except Exception as error:  # no login, no network
        with contextlib.suppress(OSError):
            path.rmdir()  # of a new run
        fail(f"wandb cannot begin: {error}")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to, in place of path: nobody ever sees half a file."""
    new = path.with_name("new." + path.name)  # writers of videos go by the ending
    new.unlink(missing_ok=True)
    try:
        yield new
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def _print_unless_os_error(failure):
    if not isinstance(failure.exc_value, OSError):
        threading.__excepthook__(failure)


def run_name(env_id: str, script: str, backup: str, seed: int) -> str:
    """Folder name <env>__<script>__<backup>__<seed>__<time>; what is no part of a name is -."""
    env_id = re.sub(r"[^\w.-]", "-", env_id)
    return f"{env_id}__{script}__{backup}__{seed}__{time.strftime('%Y%m%d-%H%M%S')}"


def versions(*packages: str) -> dict[str, str | None]:
    """Versions of this code (its commit, where git knows), Python and packages, for result.json."""
    describe = ("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty")
    try:
        commit = subprocess.run(describe, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):  # no git, or a copied folder
        commit = None
    found = {package: metadata.version(package) for package in packages}
    return {"commit": commit, "python": platform.python_version()} | found
