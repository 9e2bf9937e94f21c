"""Draw the learning curves of runs from their evaluations.csv.

python tools/plot_runs.py results/krull_graph_1 --out docs/krull.png
"""

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import matplotlib.pyplot as plt
import numpy as np
import tyro
from output import fail, read_rows, write_figure


@dataclass
class Args:
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """folders with evaluations.csv and config.json"""
    out: Path
    """the picture, .png or .svg"""
    random_score: float | None = None
    """score of random actions, drawn as a line"""


def read_errors(run):
    """Steps, and the mean and standard error (NaN of one episode) of each evaluation."""
    returns = defaultdict(list)
    for row in read_rows(run / "evaluations.csv"):
        returns[int(row["global_step"])].append(float(row["episodic_return"]))
    steps = sorted(returns)
    means, errors = [], []
    for step in steps:
        found = np.array(returns[step])
        means.append(found.mean())
        errors.append(found.std(ddof=1) / np.sqrt(len(found)) if len(found) > 1 else np.nan)
    return np.array(steps), np.array(means), np.array(errors)


def main():
    args = tyro.cli(Args)
    figure, axis = plt.subplots(figsize=(6.5, 3.4))
    labels = set()
    for run in args.runs:
        try:
            config = json.loads((run / "config.json").read_text())
            steps, means, errors = read_errors(run)
        except (OSError, ValueError, KeyError) as error:
            fail(f"{run} is no run: {error}")
        label = f"{config['env_id']}, {config['backup']}, seed {config['seed']}"
        if label in labels:  # of the same setting, another time
            label = run.resolve().name
        labels.add(label)
        axis.errorbar(steps, means, errors, label=label, marker="o", markersize=4, capsize=2)
    if args.random_score is not None:
        axis.axhline(args.random_score, color="gray", linestyle="--", label="random actions")
    axis.set_xlabel("environment steps")
    axis.set_ylabel("score (mean, standard error)")
    axis.legend()
    axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    write_figure(figure, args.out)


if __name__ == "__main__":
    main()
