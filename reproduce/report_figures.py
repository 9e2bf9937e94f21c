"""The report's pictures: numbers in, PNG out, nothing computed."""

import folders  # noqa: F401  (the tools)
import numpy as np
from gbtools.picture import plt

plt.rcParams |= {"axes.spines.top": False, "axes.spines.right": False}

# Okabe and Ito's colours and some more: a setting has one colour throughout.
COLOURS = {"one-step": "#999999", "n-step": "#E69F00", "tree": "#56B4E9", "graph": "#D55E00"}
COLOURS |= {"graph-mixed": "#F0E442", "graph, breadth 0": "#009E73"}
COLOURS |= {"graph, frontier": "#0072B2", "one-step, frontier": "#33A02C"}
COLOURS |= {"tree, frontier": "#8C564B", "tree, rate 2.5e-4": "#1F3B73"}
COLOURS |= {"graph, persistent": "#CC79A7", "whole-graph, frontier": "#6A3D9A"}
COLOURS |= {"ppo": "#009E73", "ppo, 7x7 view": "#B2DF8A", "best, by search": "#999999"}
COLOURS["whole-graph, rate 2.5e-4, prior 0.3"] = "#6A3D9A"
OTHERS = ("#000000", "#FB9A99", "#B2DF8A", "#CAB2D6")


def colours(names):
    """name -> colour; of others than COLOURS has, in turn."""
    others = [name for name in names if name not in COLOURS]
    return COLOURS | {name: OTHERS[i % len(OTHERS)] for i, name in enumerate(others)}


def draw_curves(path, tasks, width=10, dots=True, columns=3, **axes_settings):
    """Curves with bands: {task: {setting: (steps, mean, error [n] or [2, n], seeds)}}."""
    rows = -(-len(tasks) // columns)
    size = width, 0.81 * width * rows / columns
    how = {"figsize": size, "squeeze": False, "layout": "constrained"}
    figure, axes = plt.subplots(rows, columns, **how)
    names = list(dict.fromkeys(name for curves in tasks.values() for name in curves))
    handles, colour_of = {}, colours(names)
    for axis, (task, curves) in zip(axes.flat, tasks.items(), strict=False):
        for name, (steps, mean, error, seeds) in curves.items():
            # Dots, since curves of one backup may coincide.
            style = "--" if seeds == 1 else ":" if dots and ", " in name else "-"
            look = {"color": colour_of[name], "zorder": 3 if name == "graph" else 2}
            marker = "." if len(steps) == 1 else ""
            (handles[name],) = axis.plot(steps, mean, style, marker=marker, linewidth=1.4, **look)
            below, above = np.broadcast_to(error, (2, len(steps)))
            axis.fill_between(steps, mean - below, mean + above, alpha=0.2, linewidth=0, **look)
        axis.set(title=task, **axes_settings)
        axis.title.set_fontsize(10)
        axis.xaxis.set_major_formatter(lambda step, _: f"{step / 1000:g}k")
    spare = axes.flat[len(tasks) :]
    for axis in spare:
        axis.axis("off")
    where, place = (spare[0], "center") if len(spare) else (figure, "outside upper center")
    lines, columns = [handles[name] for name in names], 1 if len(spare) else 4
    where.legend(lines, names, frameon=False, loc=place, fontsize=9, ncols=columns)
    figure.supxlabel("environment steps", fontsize=10)
    figure.supylabel("mean return of an evaluation", fontsize=10)
    figure.savefig(path, dpi=110, metadata={"Software": None})  # the same bytes each time
    plt.close(figure)
