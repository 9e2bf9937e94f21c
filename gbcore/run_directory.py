"""RunDirectory: what a run leaves on disk, the same for every script."""

import csv
import json
import os
import platform
import shutil
import signal
import subprocess
import time
from importlib import metadata
from pathlib import Path

import numpy as np
import torch

from gbcore.graph import TransitionGraph

FORMAT_VERSION = 1  # of checkpoints
EPISODE_METRICS = ("charts/episodic_return", "charts/episodic_length")  # charted at each end


class RunDirectory:
    """A folder per run: config, TensorBoard events, metrics.csv, evaluations.csv, result.json.

    Args:
        path: the folder; a number is appended if it exists, unless the run is resumed.
        config: a dict of flags, written to config.json.
        metric_names: columns of metrics.csv, after global_step.
        resume_step: step to go on after, in a folder that exists; rows after it are dropped.
        wandb_options: arguments of wandb.init where the run is tracked there, else None.

    Raises:
        OSError: where path cannot be written to.
    """

    def __init__(self, path, config, metric_names, resume_step=None, wandb_options=None):
        from torch.utils.tensorboard import SummaryWriter  # 1 s that bad flags need not wait for

        self.path = Path(path)
        if resume_step is None:
            tries = 1
            while self.path.exists():
                tries += 1
                self.path = Path(f"{path}-{tries}")
            self.path.mkdir(parents=True)
            self.write_json("config.json", config)
        self.wandb = None
        if wandb_options is not None:
            import wandb

            self.wandb = wandb.init(
                id=self.path.name, resume="allow", config=config, sync_tensorboard=True,
                **wandb_options,
            )  # fmt: skip
        self._writer = SummaryWriter(
            self.path, purge_step=None if resume_step is None else resume_step + 1
        )
        rows = "\n".join(f"|{key}|{value}|" for key, value in config.items())
        self._writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{rows}")
        columns = ("global_step", *metric_names)
        self._metrics = _Table(self.path / "metrics.csv", columns, resume_step)
        columns = ("global_step", "episode", "episodic_return", "episodic_length")
        self._evaluations = _Table(self.path / "evaluations.csv", columns, resume_step)

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
        for episode, (episodic_return, length) in enumerate(zip(returns, lengths, strict=True)):
            self._evaluations.write(
                {
                    "global_step": step,
                    "episode": episode,
                    "episodic_return": episodic_return,
                    "episodic_length": length,
                }
            )
        self._writer.add_scalar("eval/episodic_return", sum(returns) / len(returns), step)

    def write_json(self, name, content):
        """Write a dict as indented JSON."""
        (self.path / name).write_text(json.dumps(content, indent=2) + "\n")

    def close(self):
        """Flush and close every file."""
        self._metrics.close()
        self._evaluations.close()
        self._writer.close()
        if self.wandb is not None:
            self.wandb.finish()


class _Table:
    """A CSV file of which every row is on disk at once: a killed run loses none."""

    def __init__(self, path, columns, resume_step):
        kept = []
        if resume_step is not None and path.exists():
            with path.open(newline="") as file:
                kept = [row for row in csv.DictReader(file) if _is_until(row, resume_step)]
        new = path.with_suffix(".new")
        with new.open("w", newline="") as file:
            rows = csv.DictWriter(file, columns, lineterminator="\n")
            rows.writeheader()
            rows.writerows(kept)
        new.replace(path)
        self._file = path.open("a", newline="")
        self._rows = csv.DictWriter(self._file, columns, lineterminator="\n")

    def write(self, row):
        self._rows.writerow({key: _short(value) for key, value in row.items()})
        self._file.flush()

    def close(self):
        self._file.close()


def _is_until(row, step):
    return row["global_step"].isdigit() and int(row["global_step"]) <= step


def _short(value):
    return f"{value:.9g}" if isinstance(value, float) else value


class StopSignal:
    """Ctrl-C or SIGTERM, noted for the loop to end at a place of its choice.

    As a context manager: `asked` becomes True at the first signal; the second one acts at once.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __enter__(self):
        self.asked = False
        self._previous = [signal.signal(number, self._note) for number in self.SIGNALS]
        return self

    def __exit__(self, *_):
        for number, handler in zip(self.SIGNALS, self._previous, strict=True):
            signal.signal(number, handler)

    def _note(self, *_):
        self.asked = True
        self.__exit__()


def run_name(env_id, script, backup, seed):
    """Folder name <env>__<script>__<backup>__<seed>__<time>."""
    return f"{env_id}__{script}__{backup}__{seed}__{time.strftime('%Y%m%d-%H%M%S')}"


def versions(*packages):
    """Versions of this code (its commit, where git knows), Python and packages, for result.json."""
    describe = ("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty")
    try:
        commit = subprocess.run(describe, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):  # no git, or a copied folder
        commit = None
    found = {"commit": commit, "python": platform.python_version()}
    for package in packages:
        found[package] = metadata.version(package)
    return found


# --------------------------------------------------------------------------------------------------
# Checkpoints
# --------------------------------------------------------------------------------------------------


def save_checkpoint(run_path, tensors, arrays, graph, state):
    """Write everything that a run needs to go on, to RUN/checkpoint.

    The new checkpoint is complete and on disk before it takes the place of the old one.

    Args:
        run_path: the run's folder.
        tensors: what torch.save takes and torch.load gives back with weights_only.
        arrays: a dict of NumPy arrays.
        graph: the TransitionGraph.
        state: what JSON can hold.
    """
    target = Path(run_path) / "checkpoint"
    new, old = target.with_name("checkpoint.new"), target.with_name("checkpoint.old")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    torch.save(tensors, new / "tensors.pt")
    np.savez(new / "arrays.npz", **arrays)
    graph.save(new / "graph.npz", compress=False)
    content = {"format_version": FORMAT_VERSION, **state}
    (new / "state.json").write_text(json.dumps(content) + "\n")
    for path in (*new.iterdir(), new):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
    new.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def load_checkpoint(run_path, capacity):
    """What `save_checkpoint` wrote: tensors, arrays, graph, state. Runs no code from the files.

    Args:
        run_path: the run's folder.
        capacity: nodes that the graph shall have room for.

    Raises:
        FileNotFoundError: if there is no checkpoint.
        ValueError: for another format version.
    """
    path = Path(run_path) / "checkpoint"
    if not path.exists():  # killed between the two renames
        path = path.with_name("checkpoint.old")
    state = json.loads((path / "state.json").read_text())
    if state.get("format_version") != FORMAT_VERSION:
        version = state.get("format_version")
        raise ValueError(f"Require a checkpoint of format {FORMAT_VERSION}, got {version}: {path}")
    tensors = torch.load(path / "tensors.pt", weights_only=True, map_location="cpu")
    with np.load(path / "arrays.npz", allow_pickle=False) as file:
        arrays = dict(file)
    return tensors, arrays, TransitionGraph.load(path / "graph.npz", capacity), state
