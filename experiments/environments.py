"""Steps until examples/gb_dqn_gymnasium.py scores, on six of Gymnasium's environments.

    python experiments/environments.py 1 2 3      # runs of these seeds that have no row; the table

A run ends with the first evaluation (20 episodes, every 500 steps) whose mean return is at least
the score below, or after the steps below. All other flags are the example's own.
"""

import itertools
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

ROOT = Path(__file__).resolve().parent.parent
ROWS = ROOT / "results" / "environments.csv"
# environment: score to reach, steps at most, what "with a key" is
TASKS = {
    "FrozenLake-v1": (0.7, 6_000, "--key-last-action"),
    "CliffWalking-v1": (-15, 6_000, "--key-last-action"),
    "Taxi-v4": (5, 15_000, "--key-last-action"),
    "CartPole-v1": (400, 10_000, "--round=1"),
    "Acrobot-v1": (-100, 10_000, "--round=0"),
    "MountainCar-v0": (-150, 20_000, "--round=2"),
}
COLOURS = {"one-step": "tab:gray", "tree": "tab:blue", "graph": "tab:orange"}
WAYS = list(itertools.product(("", "key"), COLOURS))


def evaluations(folder):
    """Mean return of each whole evaluation, by its step."""
    for path in folder.glob("*/evaluations.csv"):
        returns = pd.read_csv(path).groupby("global_step").episodic_return
        return returns.mean()[returns.count() == 20]
    return pd.Series()


def measure(env_id, backup, key, seed):
    """A row, of a run in a process of its own."""
    score, most, flag = TASKS[env_id]
    flags = [f"--env-id={env_id}", f"--backup={backup}", f"--seed={seed}", flag][: 4 if key else 3]
    flags += [f"--total-timesteps={most}", "--eval-frequency=500", "--run-dir"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, ROOT / "examples/gb_dqn_gymnasium.py", *flags, name]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as run:
            while run.poll() is None and not (evaluations(folder) >= score).any():
                time.sleep(0.5)
            run.terminate()
        found = evaluations(folder)
        (result,) = folder.glob("*/result.json")
        ratio = json.loads(result.read_text())["novel_state_ratio"]
    reached = found.index[found >= score].min()
    return env_id, backup, key, seed, reached, found.max(), found.index.max(), round(ratio, 4)


def report(rows):
    """The table of docs/your_own.md, and its picture."""
    titles = [", ".join(filter(None, (backup, key))) for key, backup in WAYS]
    lines = [f"| environment: score | key | {' | '.join(titles)} |", "|---" * 8 + "|"]
    figure, axes = plt.subplots(2, 3, figsize=(11, 5), layout="constrained", sharey=True)
    for plot, (env_id, (score, most, flag)) in zip(axes.flat, TASKS.items(), strict=True):
        cells = []
        for at, (key, backup) in enumerate(WAYS):
            chosen = (rows.env_id == env_id) & (rows.backup == backup) & (rows.key == key)
            steps = rows.steps_to_score[chosen]
            told = f"{steps.fillna(np.inf).median():,.0f}".replace("inf", f"> {most:,}")
            cells.append(f"{told} ({steps.count()} of {len(steps)})")
            plot.plot(steps, 0 * steps + at, "o", color=COLOURS[backup], alpha=0.5)
            plot.plot([most] * steps.hasnans, [at] * steps.hasnans, "x", color=COLOURS[backup])
        lines.append(f"| {env_id}: {score} | `{flag}` | {' | '.join(cells)} |")
        plot.set(title=f"{env_id}: {score}", yticks=range(6), yticklabels=titles, xlim=(0, None))
    axes[0, 0].invert_yaxis()
    figure.supxlabel("steps to the score; a cross: not reached in so many by all seeds")
    figure.savefig(ROOT / "docs" / "environments.png", dpi=100)
    page, table = ROOT / "docs" / "your_own.md", "\n".join(lines)
    page.write_text(re.sub(r"(?m)^\| environment(.*\n)+?(?!\|)", table + "\n", page.read_text()))


def main():
    columns = "env_id", "backup", "key", "seed", "steps_to_score", "best", "steps", "novel_states"
    rows = pd.read_csv(ROWS).fillna({"key": ""}) if ROWS.exists() else pd.DataFrame(columns=columns)
    for seed, env_id, (key, backup) in itertools.product(map(int, sys.argv[1:]), TASKS, WAYS):
        wanted = (env_id, backup, key, seed)
        if not (rows[[*columns[:4]]] == wanted).all(axis=1).any():
            rows.loc[len(rows)] = measure(*wanted)
            rows.sort_values([*columns[:4]]).to_csv(ROWS, index=False)
            print(*rows.iloc[-1], flush=True)
    report(rows)


if __name__ == "__main__":
    main()
