"""The report's pictures: numbers in, PNG out, nothing computed."""

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

# Okabe and Ito's colours, one per backup in every picture.
COLOURS = {
    "one-step": "#999999", "n-step": "#E69F00", "tree": "#56B4E9", "graph": "#D55E00",
    "graph-mixed": "#F0E442", "graph, breadth 0": "#009E73", "graph, persistent": "#CC79A7",
    "graph, frontier": "#0072B2",
}  # fmt: skip


def save(figure, path):
    figure.savefig(path, dpi=110, metadata={"Software": None})  # the same bytes each time
    plt.close(figure)


def bare(axis):
    axis.spines[["top", "right"]].set_visible(False)


def draw_summary(path, panels):
    """Mean score per backup beside the paper's.

    panels: (title, label of the axis, {backup: (Estimate, the paper's, graph's on its seeds)})
    of each; the last two may be None.
    """
    widths = [len(backups) for _, _, backups in panels]
    figure, axes = plt.subplots(
        1, len(panels), figsize=(1.5 + 0.62 * sum(widths), 3.6), squeeze=False,
        width_ratios=widths, layout="constrained",
    )  # fmt: skip
    for axis, (title, label, backups) in zip(axes[0], panels, strict=True):
        for x, (name, (ours, paper, graph)) in enumerate(backups.items()):
            if ours is not None:
                several = np.isfinite(ours.low)
                alpha = 1.0 if several else 0.35
                axis.bar(x, ours.value, width=0.62, color=COLOURS[name], alpha=alpha)
                if several:
                    errors = [[ours.value - ours.low], [ours.high - ours.value]]
                    axis.errorbar(x, ours.value, errors, color="black", capsize=3, linewidth=1)
            if graph is not None:
                axis.hlines(graph, x - 0.4, x + 0.4, COLOURS["graph"], linestyle=":", linewidth=2)
            if paper is not None:
                axis.plot(x, paper, "D", markerfacecolor="white", color="black", markersize=6)
        axis.set_xticks(range(len(backups)), backups, rotation=35, ha="right")
        axis.set_title(title, fontsize=10)
        axis.set_ylabel(label)
        bare(axis)
    for axis, (_, label, _) in zip(axes[0], panels, strict=True):  # one scale per kind of score
        alike = [a for a, (_, other, _) in zip(axes[0], panels, strict=True) if other == label]
        axis.set_ylim(top=max(a.get_ylim()[1] for a in alike))
    axes[0, 0].plot([], [], "D", markerfacecolor="white", color="black", label="the paper")
    axes[0, 0].legend(frameon=False, loc="upper left")
    save(figure, path)


def draw_curves(path, tasks, label):
    """Learning curves of every task.

    tasks: {task: {backup: (steps, mean, error, seeds)}}.
    """
    columns = 3
    rows = -(-(len(tasks) + 1) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(10, 2.7 * rows), squeeze=False, layout="constrained"
    )
    handles = {}
    for axis, (task, backups) in zip(axes.flat, tasks.items(), strict=False):
        for name, (steps, mean, error, seeds) in backups.items():
            style = "--" if seeds == 1 else ":" if ", " in name else "-"  # dots: curves coincide
            on_top = 3 if name == "graph" else 2
            (line,) = axis.plot(
                steps, mean, style, color=COLOURS[name], linewidth=1.4, zorder=on_top
            )
            handles[name] = line if seeds > 1 else handles.get(name, line)
            axis.fill_between(
                steps, mean - error, mean + error, color=COLOURS[name], alpha=0.2, linewidth=0
            )
        axis.set_title(task, fontsize=10)
        axis.ticklabel_format(axis="x", style="plain")
        axis.xaxis.set_major_formatter(lambda step, _: f"{step / 1000:g}k")
        bare(axis)
    for axis in axes.flat[len(tasks) :]:
        axis.axis("off")
    names = [name for name in COLOURS if name in handles]
    axes.flat[len(tasks)].legend(
        [handles[name] for name in names], names, frameon=False, loc="center", fontsize=10
    )
    figure.supxlabel("environment steps", fontsize=10)
    figure.supylabel(label, fontsize=10)
    save(figure, path)


def draw_profiles(path, panels):
    """Performance profiles.

    panels: (title, label of the axis, thresholds, {backup: (values, interval [2, thresholds])}).
    """
    figure, axes = plt.subplots(
        1, len(panels), figsize=(3.9 * len(panels), 3.3), squeeze=False, sharey=True,
        layout="constrained",
    )  # fmt: skip
    handles = {}
    for axis, (title, label, thresholds, backups) in zip(axes[0], panels, strict=True):
        for name, (values, (low, high)) in backups.items():
            (handles[name],) = axis.plot(thresholds, values, color=COLOURS[name])
            axis.fill_between(thresholds, low, high, color=COLOURS[name], alpha=0.15, linewidth=0)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel(label)
        axis.set_ylim(0, 1.02)
        bare(axis)
    axes[0, 0].set_ylabel("share of runs above")
    figure.legend(handles.values(), handles, loc="outside right", frameon=False)
    save(figure, path)
