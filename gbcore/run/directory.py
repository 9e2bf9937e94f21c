"""RunDirectory: what a run leaves on disk, the same for every script."""

import contextlib
import csv
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
from importlib import metadata
from pathlib import Path

import torch

LEFT_AT_THE_END = ("result.json", "model.pt", "graph.npz", "episode.mp4")
OF_EVALUATIONS = ("global_step", "episode", "episodic_return", "episodic_length")
EPISODE_METRICS = ("charts/episodic_return", "charts/episodic_length")  # charted at each end


class RunDirectory:
    """A folder per run: config, TensorBoard events, metrics.csv, evaluations.csv, result.json.

    Args:
        path: the folder; a number is appended if it exists, unless the run is resumed.
        config: a dict of flags, written to config.json; with track, W&B gets the run, too.
        metric_names: columns of metrics.csv, after global_step.
        resume_step: step to go on after, in a folder that exists; rows after it are dropped.
        evaluated_step: step of the last evaluation before that; later ones are dropped.
        lock: what `lock_folder` gave, where the folder is locked already.

    Every method raises OSError where the folder cannot be written to. So does the constructor, and
    also while another process has the folder, or where its tables have other columns.
    """

    def __init__(
        self, path, config, metric_names, resume_step=None, evaluated_step=None, lock=None
    ):
        from torch.utils.tensorboard import SummaryWriter  # 1 s that bad flags need not wait for

        self.path = Path(path)
        if resume_step is None:
            self.path = _make_folder(self.path)
        self._lock = _lock(self.path) if lock is None else lock  # the folder is ours until we end
        # What may be refused comes before anything in the folder is changed.
        of_metrics = ("global_step", *metric_names)
        metrics = _kept_rows(self.path / "metrics.csv", of_metrics, resume_step)
        evaluations = _kept_rows(self.path / "evaluations.csv", OF_EVALUATIONS, evaluated_step)
        self.wandb = None
        if config.get("track"):
            import wandb

            self.wandb = wandb.init(
                project=config["wandb_project_name"], entity=config["wandb_entity"],
                id=self.path.name, resume="allow", config=config, sync_tensorboard=True,
            )  # fmt: skip
        for name in LEFT_AT_THE_END:  # those of an end before this one
            (self.path / name).unlink(missing_ok=True)
        self.write_json("config.json", config)
        # TensorBoard's thread raises what stopped it in our next call, and need not print it.
        self._excepthook = threading.excepthook
        threading.excepthook = _print_unless_os_error
        self._writer = SummaryWriter(
            self.path, purge_step=None if resume_step is None else resume_step + 1
        )
        rows = "\n".join(f"|{key}|{value}|" for key, value in config.items())
        self._writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{rows}")
        self._metrics = _Table(self.path / "metrics.csv", of_metrics, metrics)
        self._evaluations = _Table(self.path / "evaluations.csv", OF_EVALUATIONS, evaluations)

    def log(self, step, metrics):
        """One row of metrics.csv, and one TensorBoard scalar per metric that has a value."""
        self._metrics.write({"global_step": step, **metrics})
        for name, value in metrics.items():
            if value is not None and name not in EPISODE_METRICS:
                self._writer.add_scalar(name, value, step)

    def log_episode(self, step, episodic_return, episodic_length):
        """Return and length of a training episode, to TensorBoard."""
        self._writer.add_scalar("charts/episodic_return", episodic_return, step)
        self._writer.add_scalar("charts/episodic_length", episodic_length, step)

    def log_evaluation(self, step, returns, lengths):
        """One row of evaluations.csv per episode, and their mean to TensorBoard."""
        for episode, measured in enumerate(zip(returns, lengths, strict=True)):
            row = dict(zip(OF_EVALUATIONS, (step, episode, *measured), strict=True))
            self._evaluations.write(row)
        self._writer.add_scalar("eval/episodic_return", sum(returns) / len(returns), step)

    def write_json(self, name, content):
        """Write a dict as indented JSON."""
        with self.replacing(name) as new:
            new.write_text(json.dumps(content, indent=2) + "\n")

    def write_model(self, network, graph):
        """Write model.pt and graph.npz."""
        model = io.BytesIO()  # in memory first: on a full disk torch raises a bare RuntimeError
        torch.save(network.state_dict(), model)
        with self.replacing("model.pt") as new:
            new.write_bytes(model.getbuffer())
        with self.replacing("graph.npz") as new:
            graph.save(new)

    def replacing(self, name, unless=()):
        """Context manager: a path to write a file of the run to, which gets its name if whole.

        unless: kinds of exceptions that leave it unwritten and go no further.
        """
        return _replacing(self.path / name, unless)

    def flush(self):
        """Write out what is held back: TensorBoard's events; rows of tables never are."""
        self._writer.flush()

    def close(self):
        """Flush and close every file."""
        try:
            self._metrics.close()
            self._evaluations.close()
            self._writer.close()
            if self.wandb is not None:
                self.wandb.finish()
        finally:
            threading.excepthook = self._excepthook
            os.close(self._lock)


@contextlib.contextmanager
def lock_folder(path):
    """Take a run's folder before its checkpoint is read: another process may still write there.

    As a context manager: what it gives is for RunDirectory, which then has the folder; an error in
    the body gives it back.

    Raises:
        OSError: if there is no such folder, or another process has it.
    """
    lock = _lock(path)
    try:
        yield lock
    except BaseException:
        os.close(lock)
        raise


def _lock(path):
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


def _kept_rows(path, columns, last_step):
    """Rows of a table up to a step, as dicts; none of a new run. OSError for other columns."""
    if last_step is None or not path.exists():
        return []
    text = path.read_text(errors="replace")
    whole = text[: text.rfind("\n") + 1]  # a full disk may have cut the last row
    header, *rows = csv.reader(io.StringIO(whole, newline="")) if whole else [columns]
    if tuple(header) != tuple(columns):
        raise OSError(errno.EINVAL, f"{path.name} has other columns than this version's")
    return [
        dict(zip(columns, row, strict=True)) for row in rows
        if len(row) == len(columns) and row[0].isdigit() and int(row[0]) <= last_step
    ]  # fmt: skip


class _Table:
    """A CSV file of which every row is on disk at once: a killed run loses none."""

    def __init__(self, path, columns, rows):
        self._columns = columns
        with _replacing(path) as new:
            header = dict(zip(columns, columns, strict=True))
            new.write_text("".join(self._line(row) for row in (header, *rows)))
        self._file = path.open("ab", buffering=0)

    def write(self, row):
        row = {k: f"{v:.9g}" if isinstance(v, float) else v for k, v in row.items()}
        rest = self._line(row).encode()
        while rest:  # a disk that fills up takes a part first, and then raises
            rest = rest[self._file.write(rest) :]

    def close(self):
        self._file.close()

    def _line(self, row):
        line = io.StringIO(newline="")
        csv.DictWriter(line, self._columns, lineterminator="\n").writerow(row)
        return line.getvalue()


@contextlib.contextmanager
def _replacing(path, unless=()):
    """A path to write to, in place of path: nobody ever sees half a file."""
    new = path.with_name("new." + path.name)  # writers of videos go by the ending
    try:
        with contextlib.suppress(unless):
            yield new
            new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def _print_unless_os_error(failure):
    if not isinstance(failure.exc_value, OSError):
        threading.__excepthook__(failure)


def run_name(env_id, script, backup, seed):
    """Folder name <env>__<script>__<backup>__<seed>__<time>; what is no part of a name is -."""
    env_id = re.sub(r"[^\w.-]", "-", env_id)
    return f"{env_id}__{script}__{backup}__{seed}__{time.strftime('%Y%m%d-%H%M%S')}"


def versions(*packages):
    """Versions of this code (its commit, where git knows), Python and packages, for result.json."""
    describe = ("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty")
    try:
        commit = subprocess.run(describe, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):  # no git, or a copied folder
        commit = None
    found = {package: metadata.version(package) for package in packages}
    return {"commit": commit, "python": platform.python_version()} | found
