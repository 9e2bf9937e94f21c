"""What run folders hold: flags, results and learning curves.

All tools read them here. A file that cannot be read is an OSError, one that is damaged or of no run
a ValueError; both name it.
"""

from pathlib import Path
from typing import get_type_hints

import numpy as np
from scipy import stats

from gbcore.run import read_json
from gbtools.output import read_rows

# Flags that say where and how a run is computed, not what.
WITHOUT_EFFECT = set(
    "run_dir resume track wandb_project_name wandb_entity capture_video save_model threads cuda "
    "cuda_graphs torch_deterministic log_frequency checkpoint_frequency".split()
)
# Flags whose default is the backup's.
OF_BACKUPS = set(
    "act_on exploration_steps frontier_share learning_starts target_network_frequency "
    "train_frequency".split()
)
REQUIRED = {"script": str, "env_id": str, "backup": str, "seed": int}
NUMBERS = {"depth": int, "breadth": int, "total_timesteps": int, "gamma": float}


def words_of(flags, flags_class=None):
    """Words of a command line that give a script these flags, name -> value.

    flags_class: whose types tell what is true or false, where all values are text.
    """
    types, words = get_type_hints(flags_class) if flags_class else {}, []
    for name, value in flags.items():
        flag, text = name.replace("_", "-"), str(value)
        is_switch = isinstance(value, bool) or types.get(name) is bool
        switch = {"true": [f"--{flag}"], "false": [f"--no-{flag}"]} if is_switch else {}
        of_text = [f"--{flag}={text}"] if text.startswith("-") else [f"--{flag}", text]
        words += switch.get(text.lower(), of_text)
    return words


def read_config(folder):
    """All flags of a run, and the script that made it."""
    path = Path(folder) / "config.json"
    config = read_json(path)
    for name, kind in (REQUIRED | NUMBERS).items():
        value = config.get(name, None if name in REQUIRED else kind())
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise ValueError(f"{path} is of no run: Require {name}: {kind.__name__}, got {value!r}")
    return config


def read_result(folder):
    """What a run measured that went to its end; None of another. result.json is written last."""
    path = Path(folder) / "result.json"
    result = read_json(path) if path.exists() else {}
    if result.get("interrupted") is not False:
        return None
    for name in "score steps wall_seconds training_seconds sps novel_state_ratio".split():
        value = result.get(name)
        if type(value) not in (int, float) or not abs(value) < 1e300:
            raise ValueError(f"{path} is damaged: Require a finite {name}, got {value!r}")
    return result


def run_folders(run_dir):
    """run_dir, its folders and theirs that are of a run, in order of their names."""
    places = ("config.json", "*/config.json", "*/*/config.json")
    return sorted(path.parent for place in places for path in Path(run_dir).glob(place))


def read_columns(path, name):
    """Steps and numbers of a column of a run's CSV file: pairs of int and float."""
    rows = read_rows(path)
    try:
        return [(int(row["global_step"]), float(row[name])) for row in rows]
    except (KeyError, ValueError, OverflowError) as error:
        raise ValueError(f"{path} is damaged: {error!r}") from None


def read_metrics(folder):
    """Rows of a run's metrics.csv, but for the one column that is a time."""
    rows = read_rows(Path(folder) / "metrics.csv")
    for row in rows:
        row.pop("charts/SPS")
    return rows


def read_returns(folder):
    """Step -> returns of the episodes of the evaluation after that step."""
    returns = {}
    for step, value in read_columns(Path(folder) / "evaluations.csv", "episodic_return"):
        returns.setdefault(step, []).append(value)
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
