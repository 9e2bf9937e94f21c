"""Steps until examples/gb_dqn_gymnasium.py scores, on six of Gymnasium's environments.

    python experiments/environments.py --seeds 1 2 3                 # adds to the table's rows
    python experiments/environments.py --seeds                       # the table and the picture

Each run ends with the first evaluation (20 episodes, every 500 steps) whose mean return is at least
the score below, or after the steps below. All flags but these, the key and the backup are the
example's own. Rows that are there are not run again.
"""

import argparse
import csv
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from examples import gb_dqn_gymnasium as example

ROOT = Path(__file__).resolve().parent.parent

# environment: score to reach, steps at most, what "with a key" is
TASKS = {
    "FrozenLake-v1": (0.7, 6_000, "--key-last-action"),
    "CliffWalking-v1": (-15, 6_000, "--key-last-action"),
    "CartPole-v1": (400, 10_000, "--round=1"),
    "Taxi-v4": (5, 15_000, "--key-last-action"),
    "Acrobot-v1": (-100, 10_000, "--round=1"),
    "MountainCar-v0": (-150, 20_000, "--round=2"),
}
BACKUPS = ("one-step", "tree", "graph")
COLUMNS = ("env_id", "backup", "key", "seed", "steps_to_score", "best", "steps", "novel_states")
ROWS = ROOT / "results" / "environments.csv"


def train(flags, log):
    """One run, in a process of its own."""
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = [example.__file__, *flags]
    example.main()


def means(folder):
    """Mean return of each whole evaluation, by its step."""
    returns = {}
    for path in folder.glob("*/evaluations.csv"):
        for step, _, value, _ in list(csv.reader(path.open()))[1:]:
            returns.setdefault(int(step), []).append(float(value))
    return {step: np.mean(values) for step, values in returns.items() if len(values) == 20}


def measure(env_id, backup, key, seed):
    """A row of the table."""
    score, most, _ = TASKS[env_id]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        flags = (
            f"--env-id={env_id}", f"--backup={backup}", f"--seed={seed}", f"--run-dir={name}/runs",
            f"--total-timesteps={most}", "--eval-frequency=500", *([key] if key else ()),
        )  # fmt: skip
        run = multiprocessing.get_context("fork").Process(
            target=train, args=(flags, folder / "log")
        )
        run.start()
        while run.is_alive() and max(means(folder / "runs").values(), default=-np.inf) < score:
            time.sleep(0.5)
        if run.is_alive():
            os.kill(run.pid, signal.SIGTERM)
        run.join()
        found = means(folder / "runs")
        if not found:
            sys.exit((folder / "log").read_text())
        (result,) = (folder / "runs").glob("*/result.json")
        reached = [step for step, mean in found.items() if mean >= score]
        ratio = json.loads(result.read_text())["novel_state_ratio"]
        row = (env_id, backup, key, seed, min(reached, default=""), max(found.values()),
               max(found), f"{ratio:.4f}")  # fmt: skip
        return dict(zip(COLUMNS, row, strict=True))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs="*", default=[1])
    parser.add_argument("--env-ids", nargs="*", default=list(TASKS))
    args = parser.parse_args()
    rows = list(csv.DictReader(ROWS.open())) if ROWS.exists() else []
    for seed in args.seeds:
        for env_id in args.env_ids:
            for key in ("", TASKS[env_id][2]):
                for backup in BACKUPS:
                    wanted = (env_id, backup, key, str(seed))
                    if wanted in [tuple(row[name] for name in COLUMNS[:4]) for row in rows]:
                        continue
                    rows.append(measure(env_id, backup, key, seed))
                    with ROWS.open("w", newline="") as file:
                        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
                        writer.writeheader()
                        writer.writerows(rows)
                    print(*rows[-1].values(), flush=True)


if __name__ == "__main__":
    main()
