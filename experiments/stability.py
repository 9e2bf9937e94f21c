"""How stable are the targets of a state? The paper's appendix, "Stable Value Estimate".

    python experiments/stability.py --out docs/stability.png --csv results/stability.csv

5,000 random transitions of MiniGrid-Empty-5x5; each backup learns from these alone. Whenever a pair
(s, a) is sampled its target is one more estimate. Of the last 10 estimates of each pair: their mean
and standard deviation, averaged over the pairs that have 10, as optimisation goes on. The paper
does not say how often the target network was updated, and its own MiniGrid setting, every 8,000
steps, is longer than its curves: so several intervals are tried. The line q* is the mean over all
pairs of the data, by value iteration on them; at first not all pairs have 10 estimates.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

import numpy as np
import play
import recorded
import report_figures
import torch
import tyro
from output import read_rows, write_figure, write_rows
from tqdm import tqdm

import gb_dqn_minigrid as script
from gbcore import TransitionGraph

LAST = 10  # estimates
VARIANTS = {
    "one-step": {"backup": "one-step"},
    "n-step": {"backup": "n-step"},
    "tree": {"backup": "tree"},
    "graph": {"backup": "graph"},
    "graph, all transitions": {"backup": "graph", "breadth": 0},
}


@dataclass
class Args:
    out: Path | None = None
    """the picture, .png or .svg"""
    csv: Path | None = None
    """the numbers"""
    draw: Annotated[Path | None, tyro.conf.arg(metavar="CSV")] = None
    """compute nothing: draw the numbers of this file"""
    env_id: str = "Empty-5x5"
    """a MiniGrid task"""
    transitions: int = 5_000
    """random transitions to learn from"""
    updates: int = 3_000
    """optimisation steps"""
    intervals: tuple[int, ...] = (1, 100, 8_000)
    """updates between two copies of the online network into the target network"""
    seeds: int = 3
    """runs of each, with data and networks of their own"""
    every: int = 25
    """updates between two rows"""


def fixed_data(task, seed, transitions):
    """`Recorded` random transitions."""
    rng = np.random.default_rng(seed)
    rows = play.stream("minigrid", task, rng, seed=seed)
    return play.record(*rows, transitions, task)


def optimal_values(graph, gamma):
    """q* of the MDP that the data are, pairs never seen left out: [num_ids, A]."""
    edges = graph.edges()
    pair = edges["source"] * graph.num_actions + edges["action"]
    size = graph.num_ids * graph.num_actions
    total = np.bincount(pair, edges["count"], size)
    q = np.where(total > 0, 0.0, -np.inf).reshape(graph.num_ids, -1)
    for _ in range(10_000):
        v = np.where(np.isinf(q.max(axis=1)), 0.0, q.max(axis=1))
        outcome = edges["reward"] + gamma * ~edges["terminated"] * v[edges["next"]]
        mean = np.bincount(pair, edges["count"] * outcome, size) / np.maximum(total, 1)
        new = np.where(total > 0, mean, -np.inf).reshape(q.shape)
        change = np.abs(np.where(np.isinf(new), 0, new) - np.where(np.isinf(q), 0, q)).max()
        q = new
        if change < 1e-12:
            break
    return q


def estimates(data, variant, interval, updates, every, seed):
    """Learn from the data; yields (update, mean, standard deviation, pairs) over the pairs."""
    args = script.Args(seed=seed, **VARIANTS[variant])
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    source = data.graph
    graph = TransitionGraph(source.num_actions, source.obs_shape, source.obs_dtype)
    replay = script.Replay(graph, len(data.replay["node"]))
    for node in range(source.num_ids):  # same ids
        graph.node(source.observations[node])
    columns = [data.replay[name].tolist() for name in recorded.COLUMNS]
    starts = [True, *columns[-1][:-1]]
    for row, start in zip(zip(*columns[:-1], strict=True), starts, strict=True):
        replay.add(*row, start)
    learner = script.Learner(args, graph, replay, graph.num_actions, torch.device("cpu"))
    last = np.full((graph.num_ids * graph.num_actions, LAST), np.nan)
    times = np.zeros(len(last), np.int64)
    for update in range(1, updates + 1):
        batch = replay.sample(args.batch_size, rng)
        subgraphs = learner.subgraphs(batch, rng)
        targets = learner.targets(batch, subgraphs)
        pairs = batch.nodes * graph.num_actions + batch.actions
        for pair, target in zip(pairs.tolist(), targets.tolist(), strict=True):
            last[pair, times[pair] % LAST] = target
            times[pair] += 1
        learner.update(batch, subgraphs)
        if update % interval == 0:
            learner.update_target()
        if update % every == 0:
            full = last[times >= LAST]
            if len(full):
                yield update, full.mean(), full.std(axis=1).mean(), len(full)


def compute(args, task):
    """Rows of the CSV: dicts."""
    rows = []
    total = args.seeds * len(args.intervals) * len(VARIANTS) * args.updates
    progress = tqdm(total=total, unit="update", disable=not sys.stderr.isatty())
    for seed in range(1, args.seeds + 1):
        data = fixed_data(task, seed, args.transitions)
        q = optimal_values(data.graph, script.Args().gamma)
        optimum = float(q[np.isfinite(q)].mean())
        for interval in args.intervals:
            for variant in VARIANTS:
                for update, mean, deviation, pairs in estimates(
                    data, variant, interval, args.updates, args.every, seed
                ):
                    row = (interval, variant, seed, update, mean, deviation, pairs, optimum)
                    rows.append(dict(zip(COLUMNS, row, strict=True)))
                progress.update(args.updates)
    return rows


COLUMNS = ("interval", "backup", "seed", "update", "mean", "std", "pairs", "optimum")
COLOURS = {
    **{name: report_figures.COLOURS[name] for name in ("one-step", "n-step", "tree", "graph")},
    "graph, all transitions": report_figures.COLOURS["graph, breadth 0"],
}


def draw(rows, path):
    """Means above, standard deviations below; a column for each interval."""
    import matplotlib.pyplot as plt

    intervals = sorted({row["interval"] for row in rows})
    figure, axes = plt.subplots(
        2, len(intervals), figsize=(3.6 * len(intervals), 5.2), sharex=True, sharey="row",
        squeeze=False,
    )  # fmt: skip
    for column, interval in enumerate(intervals):
        for variant, colour in COLOURS.items():
            curves = {}
            for row in rows:
                if row["interval"] == interval and row["backup"] == variant:
                    curves.setdefault(row["update"], []).append((row["mean"], row["std"]))
            if not curves:
                continue
            updates = sorted(curves)
            for axis, k in ((axes[0, column], 0), (axes[1, column], 1)):
                values = [[pair[k] for pair in curves[update]] for update in updates]
                middle = [np.mean(v) for v in values]
                axis.fill_between(
                    updates, [min(v) for v in values], [max(v) for v in values], color=colour,
                    alpha=0.15, linewidth=0,
                )  # fmt: skip
                axis.plot(updates, middle, color=colour, linewidth=1.4, label=variant)
        optimum = np.mean([row["optimum"] for row in rows if row["interval"] == interval])
        axes[0, column].axhline(optimum, color="black", linestyle="--", linewidth=1, label="q*")
        axes[0, column].set_title(f"target network every {interval:,}", fontsize=10)
        axes[1, column].set_xlabel("optimisation steps")
    axes[0, 0].set_ylabel("mean of the estimates")
    axes[1, 0].set_ylabel("their standard deviation")
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncols=6, frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0, 1, 0.94))
    write_figure(figure, path)


def summary(rows):
    """Markdown: of the last fifth of the steps, mean over seeds."""
    last = max(row["update"] for row in rows)
    lines = [
        "| target network every | backup | mean - q* | standard deviation |",
        "|---|---|---|---|",
    ]
    for interval in sorted({row["interval"] for row in rows}):
        for variant in COLOURS:
            late = [
                row for row in rows
                if row["interval"] == interval and row["backup"] == variant
                and row["update"] > 0.8 * last
            ]  # fmt: skip
            if late:
                bias = np.mean([row["mean"] - row["optimum"] for row in late])
                deviation = np.mean([row["std"] for row in late])
                lines.append(f"| {interval:,} | {variant} | {bias:+.4f} | {deviation:.5f} |")
    return "\n".join(lines)


def read_numbers(path):
    """Rows of the CSV that an earlier call wrote."""
    kinds = dict.fromkeys(COLUMNS, float) | {"interval": int, "backup": str, "update": int}
    try:
        rows = [{name: kind(row[name]) for name, kind in kinds.items()} for row in read_rows(path)]
    except (OSError, ValueError, KeyError) as error:
        recorded.fail(f"{path} is no file of this command: {error!r}")
    if not rows:
        recorded.fail(f"{path} has no rows")
    return rows


def main():
    args = tyro.cli(Args)
    for name in ("transitions", "updates", "seeds", "every"):
        if getattr(args, name) < 1:
            recorded.fail(f"--{name} must be >= 1, got {getattr(args, name)}")
    if not args.intervals or min(args.intervals) < 1:
        recorded.fail(f"--intervals must be >= 1, got {args.intervals}")
    torch.set_num_threads(1)
    if args.draw:
        rows = read_numbers(args.draw)
    else:
        task = script.task_of(args.env_id)
        script.check_task(task)
        rows = compute(args, task)
        if not rows:
            recorded.fail("no pair has 10 estimates yet: require more --updates")
    if args.csv:
        write_rows(args.csv, COLUMNS, rows)
    if args.out:
        draw(rows, args.out)
    print(summary(rows))


if __name__ == "__main__":
    main()
