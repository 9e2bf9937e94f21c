"""Draw the learning curves of runs, a panel a task: mean and standard error over seeds.

pip install -r requirements-draw.txt
python tools/plot_runs.py runs/* --out curves.png
"""

import json
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import tyro
from gbtools.picture import plt, wrapped, write_figure
from gbtools.runs import WITHOUT_EFFECT, read_config, read_rows, run_folders

from gbcore.run import fail, one_line_errors, warn

COLUMNS = ["global_step", "episodic_return"]  # of evaluations.csv


@dataclass
class Args:
    runs: tyro.conf.Positional[tuple[Path, ...]]  # folders of runs, or folders that hold some
    out: Path  # the picture: .png, .svg, .pdf or what else matplotlib writes


def read_evaluations(paths):
    """COLUMNS of all runs by task, setting (text of all other flags that matter) and seed."""
    result = {}
    for path in paths:
        if not (folders := run_folders(path)):
            warn(f"no run in {path}")
        for folder in folders:
            config, rows = read_config(folder), read_rows(folder / "evaluations.csv")
            flags = {name: value for name, value in config.items() if name not in WITHOUT_EFFECT}
            seed, flags["script"] = flags.pop("seed"), Path(config["script"]).stem
            kwargs = flags.get("env_kwargs", "{}")
            task = flags["env_id"] + (f" {kwargs}" if kwargs != "{}" else "")
            if rows:  # of a seed that was run twice, the last
                key = task, json.dumps(flags, sort_keys=True), seed
                result[key] = pd.DataFrame(rows, columns=COLUMNS).astype(float)
    if not result:
        fail(f"no run with an evaluation in {', '.join(map(str, paths))}")
    return pd.concat(result, names=["task", "setting", "seed"])


def labels(settings):
    """Of each setting its backup, and the flags in which those of a backup differ."""
    table = pd.DataFrame(map(json.loads, settings), dtype=object).astype(str)
    for _, flags in table.iterrows():
        alike = table[table.backup == flags.backup]
        differ = alike.columns[alike.nunique() > 1]
        yield ", ".join([flags.backup, *(f"{n.replace('_', ' ')} {flags[n]}" for n in differ)])


def curve_of(evaluations):
    """Number of seeds, mean and error by step: over seeds, or of one seed over episodes."""
    means = evaluations.groupby(["global_step", "seed"]).episodic_return.mean().unstack().dropna()
    if means.shape[1] == 1:
        returns = evaluations.groupby("global_step").episodic_return
        return 1, returns.mean(), returns.sem()
    return means.shape[1], means.mean(axis=1), means.sem(axis=1)


def draw_panel(figure, task, evaluations):
    """A task's curves, and a legend below them."""
    axis, lines, names = figure.subplots(), [], []
    settings = dict(list(evaluations.groupby("setting", sort=False)))
    for label, part in zip(labels(settings), settings.values(), strict=True):
        seeds, mean, error = curve_of(part)
        lines += axis.plot(mean, marker="o" if len(mean) <= 20 else None, markersize=4)
        look = {"alpha": 0.2, "color": lines[-1].get_color()}
        axis.fill_between(mean.index, mean - error, mean + error, **look)
        number = f"{seeds} seeds" if seeds > 1 else "1 seed: error over episodes"
        names.append(wrapped(f"{label} ({number})", 7, 9))
    axis.set_title(wrapped(task, 7, 10), fontsize=10)
    axis.set(xlabel="environment steps", ylabel="score (mean, standard error)")
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(lines, names, loc="outside lower left", frameon=False, fontsize=9)


@one_line_errors
def main():
    args = tyro.cli(Args, description=__doc__)
    panels = dict(list(read_evaluations(args.runs).groupby("task", sort=False)))
    heights = [3.6 + 0.4 * part.index.unique("setting").size for part in panels.values()]  # inches
    figure = plt.figure(figsize=(8, sum(heights)), layout="constrained")
    parts = figure.subfigures(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for part, (task, evaluations) in zip(parts, panels.items(), strict=True):
        draw_panel(part, task, evaluations)
    write_figure(figure, args.out)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
