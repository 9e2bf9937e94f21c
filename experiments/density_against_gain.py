"""Does a dense graph mean a larger gain? Relative performance of graph over tree, by task.

    python experiments/density_against_gain.py --out docs/density.png

A point is a task under one protocol: across, the novel state ratio of its graph runs; up, the
relative gain (graph - tree) / max(graph, tree) of the mean scores (Atari: human-normalised,
negative ones as 0), over the seeds that both have. It orders tasks as the paper's graph / tree
does, and stays finite where tree backup scores nothing: +1. p is that of gains dealt out to the
tasks anew. The paper found a correlation of -0.29 over all tasks and -0.22 over Atari.
"""

import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

import aggregate
import matplotlib.pyplot as plt
import numpy as np
import tyro
from output import fail, write_figure
from run_records import RESULTS
from scipy import stats
from tables import markdown, read_protocols, short_task

COLOURS = {"minigrid": "#2b8a3e", "minatar": "#1864ab", "minatar-1m": "#9c36b5",
           "atari100k": "#d9480f"}  # fmt: skip


@dataclass
class Args:
    results_dir: Path = RESULTS
    """where the rows are"""
    out: Path | None = None
    """the picture"""


class Point(NamedTuple):
    suite: str
    task: str
    episode_seed: str
    seeds: int
    ratio: float
    graph: float
    tree: float
    gain: float


def points(protocols):
    """A Point per task that graph and tree have seeds of; not where both score nothing."""
    for p in protocols:
        graph, tree = aggregate.on_the_same_seeds(p.scores("graph"), p.scores("tree"))
        for task in (task for task in p.tasks if graph.get(task)):
            scores = [max(0.0, float(np.mean(list(of[task].values())))) for of in (graph, tree)]
            if max(scores) > 0:
                gain = (scores[0] - scores[1]) / max(scores)
                yield Point(p.suite, task, p.episode_seed, len(graph[task]), p.novel_ratio(task),
                            *scores, gain)  # fmt: skip


def correlation(x, y):
    """-0.48 (p 0.135), Pearson's; a dash where it is not defined."""
    if len(x) < 3 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return "-"
    by_chance = stats.PermutationMethod(n_resamples=20_000, rng=np.random.default_rng(0))
    found = stats.pearsonr(x, y, method=by_chance)
    return f"{found.statistic:+.2f} (p {found.pvalue:.3f})"


def correlations(found):
    """A line for each protocol of episode seeds, with the suites that have none."""
    for protocol in sorted({point.episode_seed for point in found} - {""}) or [""]:
        chosen = [point for point in found if point.episode_seed in ("", protocol)]
        x, y = (np.array([getattr(point, name) for point in chosen]) for name in ("ratio", "gain"))
        ranks = correlation(stats.rankdata(x), stats.rankdata(y))
        texts = [f"Pearson {correlation(x, y)}", f"of ranks {ranks}"]
        for suite in sorted({point.suite for point in chosen}):
            here = np.array([point.suite == suite for point in chosen])
            if here.sum() > 2 and np.ptp(x[here]) and np.ptp(y[here]):
                texts.append(f"within {suite} {np.corrcoef(x[here], y[here])[0, 1]:+.2f}")
        label = f"{protocol} episode seeds: " if protocol else ""
        yield f"{label}{len(chosen)} tasks: {', '.join(texts)}"


def draw(found, lines, path):
    figure, axis = plt.subplots(figsize=(8.2, 4.6), layout="constrained")
    axis.axhline(0, color="#adb5bd", linewidth=1)
    labels = {}
    for point in found:
        fixed, colour = point.episode_seed == "fixed", COLOURS.get(point.suite, "#212529")
        name = ", ".join(filter(None, (point.suite, point.episode_seed)))
        axis.scatter(
            point.ratio, point.gain, s=34, marker="s" if fixed else "o", edgecolor=colour,
            facecolor="none" if fixed else colour, label=name if name not in labels else "",
        )  # fmt: skip
        labels[name] = True
        # One label for points that coincide.
        place = round(point.ratio, 2), round(point.gain, 1)
        texts = labels.setdefault(place, [point.ratio, point.gain])
        texts += [short_task(point.task)] if short_task(point.task) not in texts else []
    for place, texts in labels.items():
        if isinstance(place, tuple):
            axis.annotate(
                "\n".join(texts[2:]), texts[:2], (6, 0), va="center", fontsize=7,
                textcoords="offset points", color="#5c636a",
            )  # fmt: skip
    axis.set(xlim=(-0.03, 1.03), ylim=(-1.1, 1.15), xlabel="novel state ratio (graph runs)")
    axis.set_ylabel("(graph - tree) / max(graph, tree)")
    axis.set_title("\n".join(textwrap.fill(line, 120) for line in lines), fontsize=8, loc="left")
    axis.legend(fontsize=8, loc="lower right")
    axis.spines[["top", "right"]].set_visible(False)
    write_figure(figure, path)


def main():
    args = tyro.cli(Args)
    found = list(points(read_protocols(args.results_dir)))
    if not found:
        fail(f"no task has both graph and tree rows in {args.results_dir}")
    lines = list(correlations(found))
    if args.out:
        draw(found, lines, args.out)
    rows = [[p.suite, short_task(p.task), p.episode_seed or "-", str(p.seeds), f"{p.ratio:.3f}",
             f"{p.graph:.3g}", f"{p.tree:.3g}", f"{p.gain:+.2f}"] for p in found]  # fmt: skip
    print(markdown(["suite", "task", "episode seeds", "seeds", "novel state ratio", "graph", "tree",
                    "gain"], rows))  # fmt: skip
    print("\n".join(lines))


if __name__ == "__main__":
    main()
