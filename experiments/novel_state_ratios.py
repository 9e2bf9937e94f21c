"""Novel state ratios of runs, beside the paper's averages: distinct states acted in / transitions.

    python experiments/novel_state_ratios.py runs/* --csv results/novel_state_ratios.csv
    python experiments/novel_state_ratios.py --csv results/novel_state_ratios.csv

The first reads runs and writes the table's numbers, the second prints the table of a file. Runs of
one task under one protocol are averaged.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

import measures
import numpy as np
import recorded
import tyro
from output import fail, read_rows, write_rows
from tables import count, markdown

PAPER = {"MiniGrid": 0.006, "MinAtar": 0.298, "Atari": 0.927}
GROUPS = {"minigrid": "MiniGrid", "minatar": "MinAtar", "atari": "Atari"}
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
    if run.config is None or run.steps is None or run.suite not in GROUPS:
        fail(f"{path} is no run of a known suite, or has no checkpoint")
    interval = run.config["train_frequency"] / run.config["updates_per_train"]
    protocol = "learning" if interval <= 4 else f"one update per {interval:g} steps"
    if run.config["learning_starts"] >= run.steps:
        protocol = "random actions"
    if "episode_seed" in run.config:
        protocol += f", {run.config['episode_seed']} episode seeds"
    shares = measures.crossovers(run.graph)
    values = (GROUPS[run.suite], run.task, run.config["backup"], protocol, run.config["seed"],
              run.steps, run.graph.num_nodes, run.graph.novel_state_ratio, shares["crossed"],
              shares["self_loops"])  # fmt: skip
    return dict(zip(COLUMNS, values, strict=True))


def table(rows):
    """The rows as Markdown, and the average of each group beside the paper's."""
    lines = []
    for group, average in PAPER.items():
        tasks, ratios = {}, {}
        for row in (row for row in rows if row["group"] == group):
            tasks.setdefault((row["protocol"], int(row["steps"]), row["task"]), []).append(
                [float(row[name]) for name in COLUMNS[-4:]]
            )
        for (protocol, steps, task), found in sorted(tasks.items()):
            states, ratio, crossed, loops = np.mean(found, axis=0)
            ratios.setdefault((protocol, f"{steps:,}"), []).append(ratio)
            lines.append([task, protocol, f"{steps:,}", str(len(found)), f"{states:,.0f}",
                          f"{ratio:.4f}", f"{crossed:.1%}", f"{loops:.1%}"])  # fmt: skip
        for about, found in ratios.items():
            mean = f"**{np.mean(found):.3f}** (paper: {average}, all tasks, 100,000 steps)"
            lines.append(
                [f"**{group}, {count(len(found), 'task')}**", *about, "", "", mean, "", ""]
            )
    header = ["task", "actions", "steps", "runs", "states", "novel state ratio",
              "states with several predecessors", "self-loops"]  # fmt: skip
    return markdown(header, lines)


def main():
    args = tyro.cli(Args)
    if not args.runs and args.csv is None:
        fail("require folders of runs, or --csv with a file to read")
    try:
        rows = list(map(row_of, args.runs)) or read_rows(args.csv)
        rows.sort(key=lambda row: tuple(str(row[name]) for name in COLUMNS))
    except (OSError, KeyError) as error:
        fail(f"{args.csv} is no file of this command: {error!r}")
    if args.runs and args.csv:
        write_rows(args.csv, COLUMNS, rows)
    print(table(rows))


if __name__ == "__main__":
    main()
