"""Does a dense graph mean a larger gain? Relative performance of graph over tree, by task.

    python experiments/density_against_gain.py --out docs/density.png --csv docs/density.csv

Reads the committed result files (columns suite, task, backup, seed, score, novel_state_ratio; where
they have them, variant and episode_seed). A point is a task under one protocol: across, the novel
state ratio of its graph runs; up, the relative gain (graph - tree) / max(graph, tree) of the mean
scores (Atari: human-normalised, negative ones as 0), over the seeds that both have. It orders tasks
as the paper's graph / tree does, and stays finite where tree backup scores nothing: +1. Tasks in
which neither scores are left out. Intervals resample tasks, and in each the seeds; p is that of
gains dealt out to the tasks anew. The paper found a correlation of -0.29 over all tasks and -0.22
over Atari.
"""

import sys
import textwrap
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

import matplotlib
import numpy as np
import recorded
import tyro
from output import read_rows, write_figure, write_rows

from gb_rainbow_atari import REFERENCE_SCORES

RESULTS = Path(__file__).resolve().parents[1] / "results"
NEEDED = {"suite", "task", "backup", "seed", "score", "novel_state_ratio"}
COLUMNS = ("suite", "task", "episode_seed", "seeds", "novel_state_ratio", "graph", "tree", "ratio",
           "relative_gain")  # fmt: skip
COLOURS = {"minigrid": "#2b8a3e", "minatar": "#1864ab", "minatar-1m": "#9c36b5",
           "atari100k": "#d9480f"}  # fmt: skip


@dataclass
class Args:
    results: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    """result files; default: those in results"""
    out: Path | None = None
    """the picture, .png or .svg"""
    csv: Path | None = None
    """the points"""
    repetitions: int = 5_000
    """of the bootstrap"""
    seed: int = 0
    """of the bootstrap"""


def read_scores(paths):
    """Scores {(suite, task, episode_seed): {backup: [one per seed]}}, and ratios of graph runs.

    Of the seeds that graph and tree both have: the lists are empty where there is none.
    """
    found = defaultdict(lambda: {"graph": {}, "tree": {}})
    for path in paths:
        try:
            rows = read_rows(path)
        except OSError as error:
            recorded.fail(f"cannot read {path}: {error.strerror}")
        if not rows or NEEDED - set(rows[0]):
            continue  # curves, or another command's file
        for row in rows:
            if row.get("variant") or row["backup"] not in ("graph", "tree") or not row["score"]:
                continue
            key = row["suite"], row["task"], row.get("episode_seed") or ""
            try:
                run = normalised(row), float(row["novel_state_ratio"] or "nan")
            except ValueError as error:
                recorded.fail(f"{path}: {error}")
            found[key][row["backup"]][row["seed"]] = run
    scores, ratios = {}, {}
    for key, runs in found.items():
        seeds = sorted(runs["graph"].keys() & runs["tree"].keys())
        scores[key] = {backup: [runs[backup][seed][0] for seed in seeds] for backup in runs}
        ratios[key] = [runs["graph"][seed][1] for seed in seeds]
    return scores, ratios


def normalised(row):
    """A score as its suite counts it; only Atari's zero is not the game's."""
    score = float(row["score"])
    if row["suite"].startswith("atari") and row["task"] in REFERENCE_SCORES:
        low, high = REFERENCE_SCORES[row["task"]]
        score = (score - low) / (high - low)
    return max(score, 0.0)


def gain(graph, tree):
    """(graph - tree) / max(graph, tree); nan where both are 0."""
    top = max(graph, tree)
    return (graph - tree) / top if top > 0 else np.nan


def points(scores, ratios):
    """Rows of the CSV: dicts; a task needs a seed with both backups, and ratios."""
    rows = []
    for key in sorted(scores):
        both = scores[key]
        if not both["graph"] or np.isnan(ratios[key]).any():
            continue
        graph, tree = np.mean(both["graph"]), np.mean(both["tree"])
        values = (
            *key, len(both["graph"]), np.mean(ratios[key]), graph, tree,
            graph / tree if tree > 0 else np.inf if graph > 0 else np.nan, gain(graph, tree),
        )  # fmt: skip
        rows.append(dict(zip(COLUMNS, values, strict=True)))
    return rows


def correlation(x, y, ranks):
    """Pearson's, or Spearman's with ranks; nan where one of the two does not vary."""
    if ranks:
        x, y = (rank(values) for values in (x, y))
    if len(x) < 3 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return np.nan
    return float(np.corrcoef(x, y)[0, 1])


def rank(values):
    """Ranks, equal ones averaged."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[inverse]


def permutation_p(x, y, ranks, repetitions, rng):
    """Chance of a correlation as far from 0, if gains belonged to tasks by chance."""
    found = abs(correlation(x, y, ranks))
    others = [abs(correlation(x, rng.permutation(y), ranks)) for _ in range(repetitions)]
    return (np.count_nonzero(np.array(others) >= found - 1e-12) + 1) / (repetitions + 1)


def interval(keys, scores, ratios, ranks, repetitions, rng):
    """95% bootstrap interval of the correlation over tasks, too narrow for few: (low, high)."""
    pairs = {key: np.array([scores[key]["graph"], scores[key]["tree"]]) for key in keys}
    densities = {key: np.mean(ratios[key]) for key in keys}
    found = []
    for _ in range(repetitions):
        x, y = [], []
        for i in rng.integers(len(keys), size=len(keys)):
            both = pairs[keys[i]]
            graph, tree = both[:, rng.integers(both.shape[1], size=both.shape[1])].mean(axis=1)
            value = gain(graph, tree)
            if np.isfinite(value):
                x.append(densities[keys[i]])
                y.append(value)
        found.append(correlation(np.array(x), np.array(y), ranks))
    found = np.array(found)
    found = found[np.isfinite(found)]
    return tuple(np.quantile(found, [0.025, 0.975])) if len(found) else (np.nan, np.nan)


def correlations(rows, scores, ratios, repetitions, rng):
    """Lines: Pearson and Spearman, for each protocol of episode seeds, and within each suite."""
    protocols = sorted({row["episode_seed"] for row in rows} - {""}) or [""]
    for protocol in protocols:
        chosen = [
            row for row in rows
            if row["episode_seed"] in ("", protocol) and np.isfinite(row["relative_gain"])
        ]  # fmt: skip
        keys = [tuple(row[name] for name in COLUMNS[:3]) for row in chosen]
        x = np.array([row["novel_state_ratio"] for row in chosen])
        y = np.array([row["relative_gain"] for row in chosen])
        texts = []
        for name, ranks in (("Pearson", False), ("Spearman", True)):
            value = correlation(x, y, ranks)
            if np.isnan(value):
                texts.append(f"{name} - (too few tasks, or all alike)")
                continue
            low, high = interval(keys, scores, ratios, ranks, repetitions, rng)
            p = permutation_p(x, y, ranks, repetitions, rng)
            texts.append(f"{name} {value:+.2f} (95% {low:+.2f} to {high:+.2f}, p {p:.3f})")
        for suite in sorted({row["suite"] for row in chosen}):
            here = np.array([row["suite"] == suite for row in chosen])
            value = correlation(x[here], y[here], ranks=False)
            if not here.all() and np.isfinite(value):
                texts.append(f"within {suite} Pearson {value:+.2f}")
        seeds = min((row["seeds"] for row in chosen), default=0)
        label = f"{protocol} episode seeds: " if protocol else ""
        yield f"{label}{len(chosen)} tasks, at least {seeds} seeds each: {', '.join(texts)}"


def draw(rows, lines, path):
    """A point per task."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8.2, 4.6))
    axis.axhline(0, color="#adb5bd", linewidth=1)
    seen, names = set(), defaultdict(list)
    for row in rows:
        if not np.isfinite(row["relative_gain"]):
            continue
        suite, fixed = row["suite"], row["episode_seed"] == "fixed"
        label = ", ".join(filter(None, (suite, row["episode_seed"])))
        colour = COLOURS.get(suite, "#212529")
        x, y = row["novel_state_ratio"], row["relative_gain"]
        axis.scatter(
            x, y, s=34, marker="s" if fixed else "o", edgecolor=colour,
            facecolor="none" if fixed else colour, label="" if label in seen else label,
        )  # fmt: skip
        seen.add(label)
        task = row["task"].removeprefix("MiniGrid-").removesuffix("-v0")
        names[round(x, 2), round(y, 1)].append((task, x, y))
    for same in names.values():  # one label for points that coincide
        text, (x, y) = "\n".join(dict.fromkeys(task for task, _, _ in same)), same[0][1:]
        # To the left of a point that has a neighbour on its right, where the axis leaves room.
        crowded = x > 0.2 and any(0 < other - x < 0.1 and abs(up - y) < 0.1
                      for points in names.values() for _, other, up in points)  # fmt: skip
        axis.annotate(
            text, (x, y), (-6 if crowded else 6, 0), ha="right" if crowded else "left",
            va="center", textcoords="offset points", fontsize=7, color="#5c636a",
        )  # fmt: skip
    axis.set(xlim=(-0.03, 1.03), ylim=(-1.1, 1.15), xlabel="novel state ratio (graph runs)")
    axis.set_ylabel("(graph - tree) / max(graph, tree)")
    axis.set_title("\n".join(textwrap.fill(line, 120) for line in lines), fontsize=8, loc="left")
    axis.legend(fontsize=8, loc="lower right")
    axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    write_figure(figure, path)


def main():
    args = tyro.cli(Args)
    if args.repetitions < 1:
        recorded.fail(f"--repetitions must be >= 1, got {args.repetitions}")
    paths = args.results or sorted(RESULTS.glob("*.csv"))
    scores, ratios = read_scores(paths)
    rows = points(scores, ratios)
    missing = sum(not both["graph"] for both in scores.values())
    if not rows:
        recorded.fail(
            "no task has both graph and tree results: require files with the columns "
            f"{', '.join(sorted(NEEDED))}"
        )
    lines = list(
        correlations(rows, scores, ratios, args.repetitions, np.random.default_rng(args.seed))
    )
    if args.csv:
        write_rows(args.csv, COLUMNS, rows)
    if args.out:
        draw(rows, lines, args.out)
    print("| suite | task | episode seeds | seeds | novel state ratio | graph | tree | gain |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['suite']} | {row['task']} | {row['episode_seed'] or '-'} | {row['seeds']} "
            f"| {row['novel_state_ratio']:.3f} | {row['graph']:.3g} | {row['tree']:.3g} "
            f"| {row['relative_gain']:+.2f} |"
        )
    print("\n".join(lines))
    if missing:
        print(f"left out, no seed has graph and tree: {missing} tasks", file=sys.stderr)


if __name__ == "__main__":
    main()
