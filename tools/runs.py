"""What run folders hold: flags, results and learning curves."""

import json
from pathlib import Path

import numpy as np
from output import read_rows
from scipy import stats

# Flags that say where and how a run is computed, not what.
WITHOUT_EFFECT = {
    "run_dir", "resume", "track", "wandb_project_name", "wandb_entity", "capture_video",
    "save_model", "threads", "cuda", "cuda_graphs", "torch_deterministic", "log_frequency",
    "checkpoint_frequency",
}  # fmt: skip


def words_of(flags):
    """Words of a command line that give a script these flags, name -> value."""
    words = []
    for name, value in flags.items():
        flag = name.replace("_", "-")
        switch = {"true": [f"--{flag}"], "false": [f"--no-{flag}"]}
        words += switch.get(str(value).lower(), [f"--{flag}", str(value)])
    return words


def read_json(path):
    """Content of a JSON file; None where there is none, or half of one."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def run_folders(run_dir):
    """run_dir, its folders and theirs that are of a run, in order of their names."""
    places = ("config.json", "*/config.json", "*/*/config.json")
    return sorted(path.parent for place in places for path in Path(run_dir).glob(place))


def read_returns(folder):
    """Step -> returns of the episodes of the evaluation after that step."""
    returns = {}
    for row in read_rows(folder / "evaluations.csv"):
        returns.setdefault(int(row["global_step"]), []).append(float(row["episodic_return"]))
    return dict(sorted(returns.items()))


def band(curves, window=5):
    """Mean and standard error over seeds of running means: steps, mean, error, number of seeds.

    Args:
        curves: one dict step -> return per seed; only steps that all of them have are used.
        window: evaluations that are averaged, this and earlier ones.
    """
    steps = sorted(set.intersection(*map(set, curves)))
    values = np.array([[curve[step] for step in steps] for curve in curves])  # [seeds, steps]
    smooth = np.stack(
        [values[:, max(0, i - window) : i].mean(axis=1) for i in range(1, len(steps) + 1)], axis=1
    )
    return np.array(steps), smooth.mean(axis=0), standard_error(smooth), len(curves)


def standard_error(values):
    """Of the mean over the first axis; nan of one value."""
    values = np.asarray(values)
    return stats.sem(values) if len(values) > 1 else np.full(values.shape[1:], np.nan)
