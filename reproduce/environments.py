"""Steps until examples/gb_dqn_gymnasium.py scores, on six of Gymnasium's environments and Sokoban.

    python reproduce/environments.py 1 2 3    # runs of these seeds without a row; then the table

A run ends with the first evaluation (20 episodes, every 500 steps) whose mean return is at least
the score below, or after the steps below. All flags but the one below are the example's own.
"""

import csv
import itertools
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import tyro
from folders import RESULTS, ROOT
from gbtools.output import markdown
from gbtools.runs import read_returns

ROWS = RESULTS / "environments.csv"
COLUMNS = ("env_id", "backup", "key", "seed", "steps_to_score", "best", "steps", "novel_states")
# environment: score to reach, steps at most, a flag to run with and without: a key, but in Sokoban
TASKS = {
    "FrozenLake-v1": (0.7, 6_000, "--key-last-action"),
    "CliffWalking-v1": (-15, 6_000, "--key-last-action"),
    "Taxi-v4": (5, 15_000, "--key-last-action"),
    "CartPole-v1": (400, 10_000, "--round=1"),
    "Acrobot-v1": (-100, 10_000, "--round=0"),
    "MountainCar-v0": (-150, 20_000, "--round=2"),
    "examples.sokoban:Sokoban-v0": (0.9, 10_000, "--exploration=frontier"),
}
WAYS = list(itertools.product(("", "key"), ("one-step", "tree", "graph", "whole-graph")))


def evaluations(folder):
    """Mean return of each whole evaluation, by its step."""
    found = [read_returns(path.parent) for path in folder.glob("*/evaluations.csv")]
    return {
        step: np.mean(values) for of in found for step, values in of.items() if len(values) == 20
    }


def measure(env_id, backup, key, seed):
    """A row, of a run in a process of its own."""
    score, most, flag = TASKS[env_id]
    flags = [f"--env-id={env_id}", f"--backup={backup}", f"--seed={seed}", flag][: 4 if key else 3]
    flags += [f"--total-timesteps={most}", "--eval-frequency=500", "--run-dir"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, ROOT / "examples/gb_dqn_gymnasium.py", *flags, name]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as run:
            while run.poll() is None and max(evaluations(folder).values(), default=-np.inf) < score:
                time.sleep(0.5)
            run.terminate()
        found = evaluations(folder)
        (result,) = folder.glob("*/result.json")
        ratio = json.loads(result.read_text())["novel_state_ratio"]
    reached = min((step for step, mean in found.items() if mean >= score), default="")
    return env_id, backup, key, seed, reached, max(found.values()), max(found), round(ratio, 4)


def report(rows):
    """The table of docs/environments.md."""
    titles = [backup + (", with it" if key else "") for key, backup in WAYS]
    lines = []
    for env_id, (score, most, flag) in TASKS.items():
        lines.append([f"{env_id.split(':')[-1]}: {score}", f"`{flag}`"])
        for key, backup in WAYS:
            steps = [float(r[4] or np.inf) for r in rows if tuple(r[:3]) == (env_id, backup, key)]
            told = f"{np.median(steps):,.0f}".replace("inf", f"> {most:,}")
            lines[-1].append(f"{told} ({np.isfinite(steps).sum()} of {len(steps)})")
    page = ROOT / "docs" / "environments.md"
    table = markdown(["environment: score", "flag", *titles], lines)
    page.write_text(re.sub(r"(?m)^\| environment(.*\n)+?(?!\|)", table + "\n", page.read_text()))


def main(seeds: tyro.conf.Positional[tuple[int, ...]]):
    """Make the runs of these seeds that have no row; write the table of all rows."""
    rows = [*csv.reader(ROWS.open())][1:] if ROWS.exists() else []
    for seed, env_id, (key, backup) in itertools.product(map(str, seeds), TASKS, WAYS):
        if [env_id, backup, key, seed] not in [row[:4] for row in rows]:
            rows.append([*map(str, measure(env_id, backup, key, seed))])
            with ROWS.open("w") as file:
                csv.writer(file, lineterminator="\n").writerows([COLUMNS, *sorted(rows)])
            print(*rows[-1], flush=True)
    report(rows)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
