"""RunDirectory: what a run leaves on disk, the same for every script."""

import csv
import json
import platform
import time
from importlib import metadata
from pathlib import Path


class RunDirectory:
    """A folder per run: config, TensorBoard events, metrics.csv, evaluations.csv, result.json.

    Args:
        root: the folder of all runs.
        name: the folder of this one; a number is appended if it exists.
        config: a dict of flags, written to config.json.
        metric_names: columns of metrics.csv, after global_step.
        wandb_options: arguments of wandb.init where the run is tracked there, else None.

    Raises:
        OSError: where root cannot be written to.
    """

    def __init__(self, root, name, config, metric_names, wandb_options=None):
        from torch.utils.tensorboard import SummaryWriter  # 1 s that bad flags need not wait for

        self.path = Path(root) / name
        tries = 1
        while self.path.exists():
            tries += 1
            self.path = Path(root) / f"{name}-{tries}"
        self.path.mkdir(parents=True)
        self.wandb = None
        if wandb_options is not None:
            import wandb

            self.wandb = wandb.init(
                name=self.path.name, config=config, sync_tensorboard=True, **wandb_options
            )
        self._writer = SummaryWriter(self.path)
        self.write_json("config.json", config)
        rows = "\n".join(f"|{key}|{value}|" for key, value in config.items())
        self._writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{rows}")
        self._metrics = _Table(self.path / "metrics.csv", ("global_step", *metric_names))
        self._evaluations = _Table(
            self.path / "evaluations.csv",
            ("global_step", "episode", "episodic_return", "episodic_length"),
        )

    def log(self, step, metrics):
        """One row of metrics.csv, and one TensorBoard scalar per metric that has a value."""
        self._metrics.write({"global_step": step, **metrics})
        for name, value in metrics.items():
            if value is not None:
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

    def __init__(self, path, columns):
        self._file = path.open("w", newline="")
        self._rows = csv.DictWriter(self._file, columns, lineterminator="\n")
        self._rows.writeheader()

    def write(self, row):
        self._rows.writerow({key: _short(value) for key, value in row.items()})
        self._file.flush()

    def close(self):
        self._file.close()


def _short(value):
    return f"{value:.9g}" if isinstance(value, float) else value


def run_name(env_id, script, backup, seed):
    """Folder name <env>__<script>__<backup>__<seed>__<time>."""
    return f"{env_id}__{script}__{backup}__{seed}__{time.strftime('%Y%m%d-%H%M%S')}"


def versions(*packages):
    """Versions of Python and of installed packages, for result.json."""
    found = {"python": platform.python_version()}
    for package in packages:
        found[package] = metadata.version(package)
    return found
