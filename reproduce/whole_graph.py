"""Picture and table of docs/whole_graph.md, from rows.

python reproduce/whole_graph.py
"""

import numpy as np
from folders import RESULTS, ROOT
from output import markdown
from picture import plt
from report_figures import COLOURS, save
from run_records import Records

OWN = "exploration=frontier total_timesteps=20000"
SETTINGS = {  # backup, variant -> name
    ("one-step", ""): "one-step",
    ("tree", ""): "tree",
    ("graph", ""): "graph",
    ("graph", "exploration=frontier"): "graph, frontier",
    ("whole-graph", OWN): "graph, whole",
}

LABELS = {"graph, whole": "whole-graph, frontier"}


def main():
    curves = Records(RESULTS).curves("minigrid") | Records(RESULTS / "whole_graph").curves(
        "minigrid"
    )
    own = {key: curve for key, curve in curves.items() if key.backup == "whole-graph"}
    tasks = list(dict.fromkeys(key.task for key in own))
    figure, axes = plt.subplots(2, 3, figsize=(8, 5), layout="constrained", sharey=True)
    *axes, last = axes.flat  # five tasks; the last place is the legend's
    for axis, task in zip(axes, tasks, strict=True):
        for (backup, variant), name in SETTINGS.items():
            colour = COLOURS[name]
            found = [c for k, c in curves.items() if k[1:4] == (task, backup, variant)]
            steps = sorted(set.intersection(*map(set, found)))
            means = np.array([[curve[step] for step in steps] for curve in found])
            axis.plot(steps, means.mean(axis=0), color=colour, label=LABELS.get(name, name))
            axis.fill_between(steps, means.min(axis=0), means.max(axis=0), color=colour, alpha=0.1)
        axis.set(xscale="log", title=task.removeprefix("MiniGrid-").removesuffix("-v0"))
    figure.supylabel("mean return of an evaluation")
    figure.supxlabel("steps (band: least to most of the seeds)")
    last.axis("off")
    last.legend(*axes[0].get_legend_handles_labels(), loc="center", frameon=False)
    save(figure, ROOT / "docs" / "whole_graph_curves.png")
    rows = []
    for task in tasks:
        found = [curve for key, curve in own.items() if key.task == task]
        runs = [np.array([curve[step] for step in sorted(curve)]) for curve in found]
        first = [int((run >= 0.9).argmax()) for run in runs]
        assert all(run.max() >= 0.9 for run in runs)
        steps = sorted(1000 * (k + 1) for k in first)
        least = min(run[k:].min() for run, k in zip(runs, first, strict=True))
        last = [run[-2:].mean() for run in runs]
        found = f"{steps[0]:,} to {steps[-1]:,}, median {np.median(steps):,.0f}"
        rows.append([task, str(len(runs)), found, f"{least:.2f}"])
        rows[-1].append(f"{min(last):.2f} to {max(last):.2f}")
    header = ["", "seeds", "first evaluation of 0.9 or more", "least after it", "at the end"]
    print(markdown(header, rows))


if __name__ == "__main__":
    main()
