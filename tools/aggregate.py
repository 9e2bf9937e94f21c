"""From scores to statistics: functions of arrays and dicts, no files and no drawing.

A score table is a dict task -> {seed: score}. Columns are arrays, one per task, with a number per
seed: tasks may have different numbers of seeds.
"""

from typing import NamedTuple

import numpy as np
from scipy import stats

REPETITIONS = 5_000  # of the bootstrap
FEWEST_SEEDS = 5  # of each task, to judge a claim or to have an interval
LEVEL = 0.05  # of a judgement, one-sided
TOLERANCE = 0.01  # of sums of gains, see sign_flip_p
SOLVED = 0.9  # of the best evaluation that any run had on the same task and seed


class Summary(NamedTuple):
    mean: float
    std: float  # of the population, as the paper's: 0.38 +- 0.47 are two of five at 0.96
    number: int


class Estimate(NamedTuple):
    value: float
    low: float  # of the 95% interval; nan with fewer than FEWEST_SEEDS runs per task
    high: float
    seeds: int  # the fewest of any task that went in
    p: float = np.nan  # of a difference, see sign_flip_p
    strict_p: float = np.nan  # the same without its tolerance


def summary(scores):
    """Mean, standard deviation and number of some scores; None of none."""
    values = np.asarray(list(scores), np.float64)
    return Summary(float(values.mean()), float(values.std()), len(values)) if len(values) else None


def verdict(mean, paper_mean, paper_std):
    """ "inside", "above" or "below" the paper's mean +- std, which have two decimals."""
    gap = mean - paper_mean
    if abs(gap) <= paper_std + 0.005 + 1e-12:
        return "inside"
    return "above" if gap > 0 else "below"


def columns(table, tasks, scales):
    """Scores / scale of each task; None if a task has none."""
    found = [np.array([s for _, s in sorted(table.get(t, {}).items())]) / scales[t] for t in tasks]
    return found if all(map(len, found)) else None


def on_the_same_seeds(one, other):
    """Two score tables without the seeds that only one has: a seed may be a layout, too."""
    seeds = {task: one[task].keys() & other[task].keys() for task in one.keys() & other.keys()}
    return [
        {task: {seed: table[task][seed] for seed in found} for task, found in seeds.items()}
        for table in (one, other)
    ]


def mean_of_tasks(*found, axis=-1):
    return np.mean([column.mean(axis=axis) for column in found], axis=0)


def interquartile_mean(*found, axis=-1):
    """Mean of the middle half of all runs."""
    return stats.trim_mean(np.concatenate(found, axis=axis), 0.25, axis=axis)


def estimate(statistic, found):
    """A statistic of columns with its percentile bootstrap interval, each resampled by itself."""
    seeds, value = min(map(len, found)), float(statistic(*found))
    if seeds < FEWEST_SEEDS:
        return Estimate(value, np.nan, np.nan, seeds)
    low, high = stats.bootstrap(
        found, statistic, n_resamples=REPETITIONS, method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval  # fmt: skip
    return Estimate(value, float(low), float(high), seeds)


def difference(one, other, tasks, scales):
    """Estimate of the mean of the tasks' differences. Runs with the same seed stay together.

    None where a task has no seed that both tables have.
    """
    pair = [columns(table, tasks, scales) for table in on_the_same_seeds(one, other)]
    if None in pair:
        return None
    gains = [a - b for a, b in zip(*pair, strict=True)]
    weighted = np.concatenate([gain / len(gain) for gain in gains])
    p, strict_p = (sign_flip_p(weighted, tolerance) for tolerance in (TOLERANCE, 0.0))
    return estimate(mean_of_tasks, gains)._replace(p=p, strict_p=strict_p)


def sign_flip_p(gains, tolerance=TOLERANCE):
    """Chance of so large a sum of gains in its direction, if each had either sign by chance.

    The exact one-sided paired permutation test: five gains that agree have 1/32. With more than
    40 gains, of 10,000 random choices of signs.

    Args:
        gains: one per pair; those that are 0 have no say.
        tolerance: sums that are smaller by up to this share count as being as large, so that
            gains that are next to nothing decide nothing.
    """
    gains = gains[gains != 0]
    least = (1 - tolerance) * abs(gains.sum()) - 1e-12
    if len(gains) > 40:
        signs = np.random.default_rng(0).choice([-1, 1], (10_000, len(gains)))
        return float((np.count_nonzero(signs @ gains >= least) + 1) / (len(signs) + 1))
    # Meet in the middle: for each sum of one half, how many of the other half make up the rest.
    halves = []
    for half in np.array_split(gains, 2):
        sums = np.zeros(1)
        for gain in half:
            sums = np.concatenate([sums - gain, sums + gain])
        halves.append(np.sort(sums))
    one, other = halves
    number = len(one) * len(other) - np.searchsorted(other, least - one).sum()
    return float(number / 2 ** len(gains))


def support(gain):
    """What the Estimate of a difference says about its being > 0; from few seeds, nothing."""
    if gain is None or gain.seeds < FEWEST_SEEDS:
        return "open"
    if not gain.p <= LEVEL:
        return "undecided"
    return "supported" if gain.value > 0 else "contradicted"


def band(curves, window=5):
    """Mean and standard error over seeds of running means: steps, mean, error, number of seeds.

    Args:
        curves: one dict step -> return per seed; only steps that all of them have are used.
        window: evaluations that are averaged, this and earlier ones.
    """
    steps = sorted(set.intersection(*map(set, curves)))
    values = np.array([[curve[step] for step in steps] for curve in curves])  # [seeds, steps]
    smooth = np.stack(
        [values[:, max(0, i - window) : i].mean(axis=1) for i in range(1, len(steps) + 1)], axis=1
    )
    return np.array(steps), smooth.mean(axis=0), standard_error(smooth), len(curves)


def standard_error(values):
    """Of the mean over the first axis; nan of one value."""
    values = np.asarray(values)
    return stats.sem(values) if len(values) > 1 else np.full(values.shape[1:], np.nan)


def score_at(curve, step):
    """Mean over the last 10% of the evaluations until a step, as a run's score; None without."""
    means = [mean for s, mean in sorted(curve.items()) if s <= step]
    if not means or max(curve) < step:
        return None
    return float(np.mean(means[-max(1, round(len(means) / 10)) :]))


def shortfall(runs, wanted):
    """How many runs of a cell met no reward, met one and never learned, and lost what they knew.

    Args:
        runs: dicts with score, first_reward_step (None if none) and curve, one per seed.
        wanted: the score that was to be reached, by a mean of five evaluations too.
    """
    short = [run for run in runs if run["first_reward_step"] is None or run["score"] < wanted]
    met = [run for run in short if run["first_reward_step"] is not None]
    lost = [run for run in met if run["curve"] and band([run["curve"]])[1].max() >= wanted]
    return len(short) - len(met), len(met) - len(lost), len(lost)
