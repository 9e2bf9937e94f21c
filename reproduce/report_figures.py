"""The report's pictures: numbers in, PNG out, nothing computed."""

import folders  # noqa: F401  (the tools)
import numpy as np
from gbtools.picture import plt

plt.rcParams |= {"axes.spines.top": False, "axes.spines.right": False}

# Of settings that a picture has by these names; Okabe and Ito's. Others take turns.
COLOURS = {"one-step": "#999999", "n-step": "#E69F00", "tree": "#56B4E9", "graph": "#D55E00"}
COLOURS |= {"graph, frontier": "#0072B2", "whole-graph, frontier": "#6A3D9A", "ppo": "#009E73"}
OTHERS = plt.get_cmap("tab20").colors


def draw_curves(path, tasks, width=10, dots=True, columns=3, **axes_settings):
    """Curves with bands: {task: {setting: (mean by step, error [n] or [2, n], seeds)}}."""
    rows = -(-len(tasks) // columns)
    size = width, 0.81 * width * rows / columns
    how = {"figsize": size, "squeeze": False, "layout": "constrained"}
    figure, axes = plt.subplots(rows, columns, **how)
    names = list(dict.fromkeys(name for curves in tasks.values() for name in curves))
    handles, colour_of = {}, dict(zip(names, OTHERS * len(names), strict=False)) | COLOURS
    for axis, (task, curves) in zip(axes.flat, tasks.items(), strict=False):
        for name, (mean, error, seeds) in curves.items():
            # Dots, since curves of one backup may coincide.
            style = "--" if seeds == 1 else ":" if dots and ", " in name else "-"
            look = {"color": colour_of[name], "zorder": 3 if name == "graph" else 2}
            marker = "." if len(mean) == 1 else ""
            (handles[name],) = axis.plot(mean, style, marker=marker, linewidth=1.4, **look)
            below, above = np.broadcast_to(error, (2, len(mean)))
            axis.fill_between(
                mean.index, mean - below, mean + above, alpha=0.2, linewidth=0, **look
            )
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
