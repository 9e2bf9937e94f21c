"""Suites of tasks, and one table of all finished runs: a row each, read from what a run leaves.

A run is one script with one set of flags: a suite, a task, a backup, a variant, an episode seed and
a seed. The variant names every flag that can change a result and is not at its default. On one
machine, with one number of threads, two runs of one row compute the same digits.
"""

import functools
import importlib
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import folders  # noqa: F401  (the tools)
import pandas as pd
from gbtools.runs import WITHOUT_EFFECT, read_config, read_result, run_folders


class Suite(NamedTuple):
    script: str
    tasks: list
    total_timesteps: int


MINIGRID = "Empty-8x8 DoorKey-6x6 KeyCorridorS3R1 SimpleCrossingS9N2 LavaCrossingS9N2".split()
HARD = "KeyCorridorS3R3 MultiRoom-N4-S5 DoorKey-8x8 LavaCrossingS9N3 FourRooms".split()
MINATAR = "seaquest breakout asterix freeway space_invaders".split()
ATARI = (
    "freeway breakout kangaroo krull qbert "  # on these backups differ most
    "alien amidar assault asterix bank_heist battle_zone boxing chopper_command crazy_climber "
    "demon_attack frostbite gopher hero jamesbond kung_fu_master ms_pacman pong private_eye "
    "road_runner seaquest up_n_down"
).split()
GYMNASIUM = "FrozenLake-v1 CliffWalking-v1 Taxi-v4 CartPole-v1 Acrobot-v1 MountainCar-v0".split()
SUITES = {
    "minigrid": Suite("gb_dqn_minigrid", MINIGRID, 100_000),
    "minigrid-hard": Suite("gb_dqn_minigrid", HARD, 200_000),
    "minatar": Suite("gb_dqn_minatar", MINATAR, 100_000),
    "minatar-1m": Suite("gb_dqn_minatar", MINATAR, 1_000_000),
    "atari100k": Suite("gb_rainbow_atari", ATARI, 100_000),
    "gymnasium": Suite("examples.gb_dqn_gymnasium", GYMNASIUM, 20_000),
}
KEY = ["suite", "task", "backup", "variant", "episode_seed", "seed"]
TABLE = "results.csv"


def script_of(suite):
    """The script's module."""
    return importlib.import_module(SUITES[suite].script)


@functools.cache
def tasks_of(suite):
    """Names of a suite's tasks, as its script writes them."""
    return tuple(map(script_of(suite).task_of, SUITES[suite].tasks))


def variant_of(suite, flags):
    """The flags of a run that can change its result and are not at the backup's defaults: text."""
    decide = {name: flags[name] for name in ("backup", "num_levels") if name in flags}
    normal = asdict(script_of(suite).Args(**decide))
    normal |= {"total_timesteps": SUITES[suite].total_timesteps}
    apart = WITHOUT_EFFECT | {"env_id", "seed", "backup", "episode_seed", "script"}
    changed = [n for n in sorted(normal.keys() - apart) if flags.get(n, normal[n]) != normal[n]]
    if flags.get("num_levels") not in (None, 1):  # it decides other defaults, and is told itself
        changed.append("num_levels")
    return " ".join(f"{name}={flags[name]}" for name in changed)


def suite_of(flags):
    """The suite of a run with these flags, or None: its script and task, and best its steps."""
    script = Path(flags["script"]).stem
    result = [
        name
        for name, suite in SUITES.items()
        if suite.script.rpartition(".")[2] == script
        and script_of(name).task_of(flags["env_id"]) in tasks_of(name)
    ]
    result.sort(key=lambda name: SUITES[name].total_timesteps != flags["total_timesteps"])
    return result[0] if result else None


def row_of(folder):
    """The row of a finished run of a suite; None of another."""
    result = read_result(folder)
    if result is None or (suite := suite_of(flags := read_config(folder))) is None:
        return None
    states = pd.read_csv(folder / "metrics.csv")["graph/nodes"]
    curve = pd.read_csv(folder / "evaluations.csv").groupby("global_step").episodic_return.mean()
    return {
        "suite": suite,
        "task": script_of(suite).task_of(flags["env_id"]),
        "backup": flags["backup"],
        "variant": variant_of(suite, flags),
        "episode_seed": flags.get("episode_seed", ""),
        "seed": flags["seed"],
        "score": result["score"],
        "steps": result["steps"],
        # Of a resumed run, result.json has the last part's wall time but all of the training's.
        "wall_seconds": round(max(result["wall_seconds"], result["training_seconds"]), 1),
        "steps_per_second": round(result["sps"], 1),
        "novel_state_ratio": round(result["novel_state_ratio"], 5),
        "states": states.iloc[-1] if len(states) else None,
        "commit": result["versions"]["commit"],
        "curve": " ".join(f"{step}:{mean:.4g}" for step, mean in curve.items()),
    }


def collect(run_dir, results_dir):
    """Add the rows of run_dir's finished runs to results_dir/results.csv; returns how many."""
    rows = pd.DataFrame(filter(None, map(row_of, run_folders(run_dir))))
    path = Path(results_dir) / TABLE
    table = read_table(results_dir) if path.exists() else pd.DataFrame()
    both = pd.concat([table, rows])
    if len(both):
        both = both.drop_duplicates(KEY).sort_values(KEY).convert_dtypes()  # no 24937.0 beside gaps
        path.parent.mkdir(parents=True, exist_ok=True)
        both.to_csv(path, index=False, lineterminator="\n")
    return len(both) - len(table)


def read_table(results_dir):
    """The rows of a folder of results; text that is not there is ""."""
    text = ["variant", "episode_seed", "commit", "curve"]
    table = pd.read_csv(Path(results_dir) / TABLE, dtype=dict.fromkeys(text, str))
    return table.fillna(dict.fromkeys(text, ""))


def curve_of(text):
    """Mean return by step, of a row's curve."""
    pairs = (pair.split(":") for pair in text.split())
    return pd.Series({int(step): float(mean) for step, mean in pairs})
