"""RunDirectory: what a run leaves on disk, the same for every script."""

import contextlib
import errno
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
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from gbcore.graph import TransitionGraph
from gbcore.run.flags import fail

LEFT_AT_THE_END = ("result.json", "model.pt", "graph.npz", "episode.mp4")
OF_EVALUATIONS = ("global_step", "episode", "episodic_return", "episodic_length")
EPISODE_METRICS = ("charts/episodic_return", "charts/episodic_length")  # charted at each end


class RunDirectory:
    """A folder per run: config, TensorBoard events, metrics.csv, evaluations.csv, result.json.

    It is a new one, with a number appended if the name is taken; or that of a resumed run, locked
    already, whose tables keep the rows that its checkpoint knows: of each, the last step and the
    number of rows. With track, W&B gets the run, too. OSError where the folder cannot be written
    to, or a table has other columns or lacks rows.
    """

    path: Path

    def __init__(
        self, path: str | Path, config: dict[str, Any], metric_names: Sequence[str],
        resume_step: int | None = None, kept_metrics: tuple[int, int] | None = None,
        kept_evaluations: tuple[int, int] | None = None, lock: int | None = None,
    ) -> None:  # fmt: skip
        from torch.utils.tensorboard import SummaryWriter  # 1 s that bad flags need not wait for

        self.path = Path(path)
        if resume_step is None:
            self.path = _make_folder(self.path)
        self._lock = lock_folder(self.path) if lock is None else lock  # ours until we end
        # What may be refused comes before anything in the folder is changed.
        of_metrics = ("global_step", *metric_names)
        metrics = _kept_rows(self.path / "metrics.csv", of_metrics, kept_metrics)
        evaluations = _kept_rows(self.path / "evaluations.csv", OF_EVALUATIONS, kept_evaluations)
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
        self._metrics = _Table(self.path / "metrics.csv", of_metrics, metrics)
        self._evaluations = _Table(self.path / "evaluations.csv", OF_EVALUATIONS, evaluations)

    def log(self, step: int, metrics: dict[str, float | None]) -> None:
        """One row of metrics.csv, and one TensorBoard scalar per metric that has a value."""
        self._metrics.write({"global_step": step, **metrics})
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
            row = dict(zip(OF_EVALUATIONS, (step, episode, *measured), strict=True))
            self._evaluations.write(row)
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
        self._metrics.sync()
        self._evaluations.sync()

    def close(self) -> None:
        """Flush and close every file."""
        try:
            self._metrics.close()
            self._evaluations.close()
            self._writer.close()
            if self._wandb is not None:
                self._wandb.finish()
        finally:
            threading.excepthook = self._excepthook
            os.close(self._lock)


def lock_folder(path: str | Path) -> int:
    """Take a run's folder, before its checkpoint is read: another process may still write there.

    Returns a descriptor that is closed to give the folder back. OSError if there is no such folder,
    another process has it, or links or pipes in it would lead what a run writes elsewhere.
    """
    for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
        if entry.is_symlink() or not (entry.is_file() or entry.is_dir()):
            kind = "a link" if entry.is_symlink() else "a pipe or device"
            raise OSError(errno.ELOOP, f"{entry.name} in it is {kind}: a run writes through none")
    lock = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise OSError(error.errno, "another process goes on with this run") from error
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


def _kept_rows(path, columns, known):
    """Rows of a table up to a step, as texts; none of a new run.

    known: that step, and the number of rows. OSError for other columns or fewer rows.
    """
    if known is None:
        return []
    last_step, num_rows = known
    text = path.read_text(errors="replace") if path.exists() else ""
    whole = text.rpartition("\n")[0]  # a full disk may cut the last
    header, *rows = (whole or ",".join(columns)).split("\n")
    if header != ",".join(columns):
        raise OSError(errno.EINVAL, f"{path.name} has other columns than this version's")
    cells = [row.split(",") for row in rows]  # of numbers: none is quoted
    kept = [
        row for row in cells
        if len(row) == len(columns) and row[0].isdecimal() and float(row[0]) <= last_step
        and all(map(_is_number_or_empty, row))
    ]  # fmt: skip
    if len(kept) < num_rows:
        told = f"Require the {num_rows} rows up to step {last_step} in {path.name}, got {len(kept)}"
        raise OSError(errno.EINVAL, told)
    return kept


def _is_number_or_empty(text):
    with contextlib.suppress(ValueError):
        return text == "" or float(text) is not None
    return False


class _Table:
    """A CSV file of which every row is on disk at once: a killed run loses none."""

    def __init__(self, path, columns, rows):
        self._columns = columns
        with replacing(path) as new:
            new.write_text("".join(",".join(row) + "\n" for row in (columns, *rows)))
        self._file = path.open("ab", buffering=0)

    def write(self, row):
        values = [row.get(name) for name in self._columns]
        texts = [
            f"{v:.9g}" if isinstance(v, float) else "" if v is None else str(v) for v in values
        ]
        rest = f"{','.join(texts)}\n".encode()
        while rest:  # a disk that fills up takes a part first, and then raises
            rest = rest[self._file.write(rest) :]

    def sync(self):
        os.fsync(self._file.fileno())

    def close(self):
        self._file.close()


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
