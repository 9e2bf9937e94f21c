"""Draw the learning curves of runs: mean and standard error over the seeds of each setting.

python tools/plot_runs.py runs/* --out curves.png
"""

import json
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import tyro
from output import fail, warn, write_figure
from runs import WITHOUT_EFFECT, band, read_returns, run_folders, standard_error


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
    found = {}
    for folder in folders:
        try:
            config = json.loads((folder / "config.json").read_text())
            returns, seed = read_returns(folder), config.pop("seed")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            fail(f"{folder} cannot be read: {error!r}")
        flags = {name: value for name, value in config.items() if name not in WITHOUT_EFFECT}
        flags["script"] = Path(config.get("script", "")).stem
        if returns:
            seeds = found.setdefault(json.dumps(flags, sort_keys=True), (flags, {}))[1]
            seeds[seed] = returns  # of a seed that was run twice, the last
    if not found:
        fail(f"no run with an evaluation in {', '.join(map(str, paths))}")
    return list(found.values())


def labels(settings):
    """A label per setting: the flags in which those of one task differ, or else the backup."""
    flags = [of_setting for of_setting, _ in settings]
    names = sorted(set().union(*flags) - {"env_id", "backup"})
    differ = [
        name for name in names for task in {f["env_id"] for f in flags}
        if len({json.dumps(f[name]) for f in flags if f["env_id"] == task and name in f}) > 1
    ]  # fmt: skip
    for of_setting, seeds in settings:
        words = [of_setting["env_id"], of_setting["backup"]]
        names = [name for name in dict.fromkeys(differ) if name in of_setting]
        words += [f"{name.replace('_', ' ')} {of_setting[name]}" for name in names]
        number = f"{len(seeds)} seeds" if len(seeds) > 1 else "1 seed: error over episodes"
        yield f"{', '.join(words)} ({number})"


def curve_of(seeds):
    """Steps, mean and error: over seeds, or of one seed over an evaluation's episodes."""
    curves = [{s: np.mean(found) for s, found in returns.items()} for returns in seeds.values()]
    steps, mean, error, number = band(curves, window=1)
    if number == 1:
        (returns,) = seeds.values()
        error = [standard_error(returns[step]) for step in steps]
    return steps, mean, np.asarray(error)


def main():
    args = tyro.cli(Args, description=__doc__)
    settings = read_settings(args.runs)
    figure, axis = plt.subplots(figsize=(8, 3.6), layout="constrained")
    for (_, seeds), label in zip(settings, labels(settings), strict=True):
        steps, mean, error = curve_of(seeds)
        (line,) = axis.plot(steps, mean, marker="o" if len(steps) <= 20 else None, markersize=4)
        line.set_label(label)
        axis.fill_between(steps, mean - error, mean + error, alpha=0.2, color=line.get_color())
    axis.set_xlabel("environment steps")
    axis.set_ylabel("score (mean, standard error)")
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right", frameon=False, fontsize=9)
    write_figure(figure, args.out)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
