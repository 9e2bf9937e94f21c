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

INSIDE = 4  # curves whose legend has room in the picture


@dataclass
class Args:
    runs: tyro.conf.Positional[tuple[Path, ...]]  # folders of runs, or folders that hold some
    out: Path  # the picture: .png, .svg, .pdf or what else matplotlib writes


def read_settings(paths):
    """[(flags, {seed: step -> returns})], a setting each: all flags that matter but the seed."""
    folders = {}
    for path in paths:
        folders |= dict.fromkeys(here := run_folders(path))
        if not here:
            warn(f"no run in {path}")
    result = {}
    for folder in folders:
        config, returns = read_config(folder), read_returns(folder)
        seed = config.pop("seed")
        flags = {name: value for name, value in config.items() if name not in WITHOUT_EFFECT}
        flags["script"] = Path(config["script"]).stem
        if returns:
            seeds = result.setdefault(json.dumps(flags, sort_keys=True), (flags, {}))[1]
            seeds[seed] = returns  # of a seed that was run twice, the last
    if not result:
        fail(f"no run with an evaluation in {', '.join(map(str, paths))}")
    return list(result.values())


def labels(settings):
    """A label per setting: task, backup, and the flags in which those of one backup differ."""
    flags = [of_setting for of_setting, _ in settings]
    for of_setting, seeds in settings:
        alike = [item for item in flags if item["backup"] == of_setting["backup"]]
        names = sorted(set().union(*alike) - {"env_id", "backup"})
        differ = [n for n in names if len({json.dumps(item.get(n)) for item in alike}) > 1]
        words = [of_setting["env_id"], of_setting["backup"]]
        words += [f"{name.replace('_', ' ')} {of_setting.get(name)}" for name in differ]
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
    result = {}
    for flags, seeds in settings:
        kwargs = flags.get("env_kwargs", "{}")
        task = flags["env_id"] + (f" {kwargs}" if kwargs != "{}" else "")
        result.setdefault(task, []).append((flags, seeds))
    return {
        task: [
            (wrapped(label, 7, 9), seeds)
            for label, (_, seeds) in zip(labels(alike), alike, strict=True)
        ]
        for task, alike in result.items()
    }


def height_of(curves):
    """Inches of a panel and, below it, of the legend that has no room in it."""
    rows = sum(label.count("\n") + 1 for label, _ in curves)
    return 3.6 + 0.2 * rows * (len(curves) > INSIDE)


def draw_panel(figure, task, curves):
    axis, lines = figure.subplots(), []
    for _, seeds in curves:
        steps, mean, error = curve_of(seeds)
        lines += axis.plot(steps, mean, marker="o" if len(steps) <= 20 else None, markersize=4)
        axis.fill_between(steps, mean - error, mean + error, alpha=0.2, color=lines[-1].get_color())
    axis.set_title(wrapped(task, 7, 10), fontsize=10)
    axis.set_xlabel("environment steps")
    axis.set_ylabel("score (mean, standard error)")
    axis.spines[["top", "right"]].set_visible(False)
    names = [label for label, _ in curves]
    if len(names) > INSIDE:
        figure.legend(lines, names, loc="outside lower left", frameon=False, fontsize=9)
    else:
        axis.legend(lines, names, frameon=False, fontsize=9)


@one_line_errors
def main():
    args = tyro.cli(Args, description=__doc__)
    panels = panels_of(read_settings(args.runs))
    heights = list(map(height_of, panels.values()))
    figure = plt.figure(figsize=(8, sum(heights)), layout="constrained")
    parts = [figure]
    if len(panels) > 1:
        parts = figure.subfigures(len(panels), 1, height_ratios=heights)
    for part, (task, curves) in zip(parts, panels.items(), strict=True):
        draw_panel(part, task, curves)
    write_figure(figure, args.out)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
