"""Draw the learning curves of runs, a panel a task: mean and standard error over seeds.

python tools/plot_runs.py runs/* --out curves.png
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from gbtools.picture import plt, wrapped, write_figure
from gbtools.runs import (
    WITHOUT_EFFECT,
    band,
    read_config,
    read_returns,
    run_folders,
    standard_error,
)

from gbcore.run import fail, one_line_errors, warn


@dataclass
class Args:
    runs: tyro.conf.Positional[tuple[Path, ...]]  # folders of runs, or folders that hold some
    out: Path  # the picture: .png, .svg, .pdf or what else matplotlib writes


def read_settings(paths):
    """[(flags, {seed: step -> returns})], a setting each: all flags that matter but the seed."""
    result = {}
    for path in paths:
        if not (folders := run_folders(path)):
            warn(f"no run in {path}")
        for folder in folders:
            config, returns = read_config(folder), read_returns(folder)
            seed, script = config.pop("seed"), Path(config["script"]).stem
            flags = {name: value for name, value in config.items() if name not in WITHOUT_EFFECT}
            flags["script"] = script
            if returns:  # of a seed that was run twice, the last
                key = json.dumps(flags, sort_keys=True)
                result.setdefault(key, (flags, {}))[1][seed] = returns
    if not result:
        fail(f"no run with an evaluation in {', '.join(map(str, paths))}")
    return list(result.values())


def labels(settings):
    """A label per setting: task, backup, and the flags in which those of one backup differ."""
    for flags, seeds in settings:
        alike = [other for other, _ in settings if other["backup"] == flags["backup"]]
        names = sorted(set().union(*alike) - {"env_id", "backup"})
        differ = [n for n in names if len({json.dumps(other.get(n)) for other in alike}) > 1]
        words = [flags["env_id"], flags["backup"]]
        words += [f"{name.replace('_', ' ')} {flags.get(name)}" for name in differ]
        number = f"{len(seeds)} seeds" if len(seeds) > 1 else "1 seed: error over episodes"
        yield f"{', '.join(words)} ({number})"


def curve_of(seeds):
    """Steps, mean and error: over seeds, or of one seed over an evaluation's episodes."""
    curves = [{s: np.mean(result) for s, result in returns.items()} for returns in seeds.values()]
    steps, mean, error, number = band(curves, window=1)
    if number == 1:
        (returns,) = seeds.values()
        error = [standard_error(returns[step]) for step in steps]
    return steps, mean, np.asarray(error)


def panels_of(settings):
    """Task -> pairs of a label and the seeds of its settings; other env_kwargs, another task."""
    groups = {}
    for flags, seeds in settings:
        kwargs = flags.get("env_kwargs", "{}")
        task = flags["env_id"] + (f" {kwargs}" if kwargs != "{}" else "")
        groups.setdefault(task, []).append((flags, seeds))
    return {
        task: [
            (wrapped(label, 7, 9), seeds)
            for label, (_, seeds) in zip(labels(group), group, strict=True)
        ]
        for task, group in groups.items()
    }


def draw_panel(figure, task, curves):
    """A task's curves, and a legend below them."""
    axis, lines = figure.subplots(), []
    for _, seeds in curves:
        steps, mean, error = curve_of(seeds)
        lines += axis.plot(steps, mean, marker="o" if len(steps) <= 20 else None, markersize=4)
        axis.fill_between(steps, mean - error, mean + error, alpha=0.2, color=lines[-1].get_color())
    axis.set_title(wrapped(task, 7, 10), fontsize=10)
    axis.set(xlabel="environment steps", ylabel="score (mean, standard error)")
    axis.spines[["top", "right"]].set_visible(False)
    names = [label for label, _ in curves]
    figure.legend(lines, names, loc="outside lower left", frameon=False, fontsize=9)


@one_line_errors
def main():
    args = tyro.cli(Args, description=__doc__)
    panels = panels_of(read_settings(args.runs))
    rows = [sum(label.count("\n") + 1 for label, _ in curves) for curves in panels.values()]
    heights = [3.6 + 0.2 * number for number in rows]  # inches
    figure = plt.figure(figsize=(8, sum(heights)), layout="constrained")
    parts = figure.subfigures(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for part, (task, curves) in zip(parts, panels.items(), strict=True):
        draw_panel(part, task, curves)
    write_figure(figure, args.out)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
