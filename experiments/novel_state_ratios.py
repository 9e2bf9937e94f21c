"""Novel state ratios of runs, beside the paper's averages: distinct states acted in / transitions.

    python experiments/novel_state_ratios.py runs/* --csv results/novel_state_ratios.csv
    python experiments/novel_state_ratios.py --csv results/novel_state_ratios.csv

The first reads runs and writes the table's numbers, the second prints the table of a file. Runs of
one task under one protocol are averaged.
"""

import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

import measures
import numpy as np
import recorded
import tyro
from output import read_rows, write_rows

PAPER = {"MiniGrid": 0.006, "MinAtar": 0.298, "Atari": 0.927}
GROUPS = {"gb_dqn_minigrid": "MiniGrid", "gb_dqn_minatar": "MinAtar", "gb_rainbow_atari": "Atari"}
COLUMNS = ("group", "task", "backup", "protocol", "seed", "steps", "states", "novel_state_ratio",
           "crossed", "self_loops")  # fmt: skip


@dataclass
class Args:
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    """folders of runs"""
    csv: Path | None = None
    """file to write, or to read where no runs are given"""


def row_of(path):
    """One row of the file: a dict."""
    run = recorded.read(path)
    if run.script is None or run.steps is None:
        recorded.fail(f"{path} does not say which script made it, or has no checkpoint")
    if run.config["learning_starts"] >= run.steps:
        protocol = "random actions"
    elif run.config["updates_per_train"] / run.config["train_frequency"] < 0.25:
        rate = run.config["train_frequency"] / run.config["updates_per_train"]
        protocol = f"one update per {rate:g} steps"
    else:
        protocol = "learning"
    if "episode_seed" in run.config:
        protocol += f", {run.config['episode_seed']} episode seeds"
    shares = measures.crossovers(run.graph)
    return {
        "group": GROUPS[run.script],
        "task": run.task,
        "backup": run.config["backup"],
        "protocol": protocol,
        "seed": run.config["seed"],
        "steps": run.steps,
        "states": run.graph.num_nodes,
        "novel_state_ratio": run.graph.novel_state_ratio,
        "crossed": shares["crossed"],
        "self_loops": shares["self_loops"],
    }


def table(rows):
    """The rows as Markdown, and the average of each group beside the paper's."""
    lines = [
        "| task | actions | steps | runs | states | novel state ratio | states with several "
        "predecessors | self-loops |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for group, average in PAPER.items():
        tasks = defaultdict(list)
        for row in rows:
            if row["group"] == group:
                tasks[row["protocol"], int(row["steps"]), row["task"]].append(row)
        means = defaultdict(list)
        for (protocol, steps, task), same in sorted(tasks.items()):
            mean = {
                name: np.mean([float(row[name]) for row in same])
                for name in ("states", "novel_state_ratio", "crossed", "self_loops")
            }
            means[protocol, steps].append(mean["novel_state_ratio"])
            ratio = mean["novel_state_ratio"]
            lines.append(
                f"| {task} | {protocol} | {steps:,} | {len(same)} | {mean['states']:,.0f} "
                f"| {ratio:.4f} | {mean['crossed']:.1%} | {mean['self_loops']:.1%} |"
            )
        for (protocol, steps), ratios in means.items():
            number = "1 task" if len(ratios) == 1 else f"{len(ratios)} tasks"
            lines.append(
                f"| **{group}, {number}** | {protocol} | {steps:,} | | "
                f"| **{np.mean(ratios):.3f}** (paper: {average}, all tasks, 100,000 steps) | | |"
            )
    return "\n".join(lines)


def main():
    args = tyro.cli(Args)
    if args.runs:
        rows = [row_of(path) for path in args.runs]
        rows.sort(key=lambda row: tuple(str(row[name]) for name in COLUMNS))
        if args.csv:
            write_rows(args.csv, COLUMNS, rows)
    elif args.csv:
        try:
            rows = read_rows(args.csv)
        except OSError as error:
            recorded.fail(f"cannot read {args.csv}: {error.strerror}")
        if not rows or set(COLUMNS) - set(rows[0]):
            recorded.fail(f"{args.csv} is no file of this command")
    else:
        recorded.fail("require folders of runs, or --csv with a file to read")
    print(table(rows))


if __name__ == "__main__":
    main()
