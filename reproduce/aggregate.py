"""From scores to statistics: functions of arrays and dicts, no files and no drawing."""

from typing import NamedTuple

import numpy as np
from scipy import stats

REPETITIONS = 5_000  # of the bootstrap
FEWEST_SEEDS = 5  # of each task, to judge a claim or to have an interval
LEVEL = 0.05  # of a judgement, one-sided
TOLERANCE = 0.01  # of sums of gains, see sign_flip_p


class Estimate(NamedTuple):
    value: float
    low: float  # of the 95% interval; nan with fewer than FEWEST_SEEDS runs per task
    high: float
    seeds: int  # the fewest of any task that went in
    p: float = np.nan  # of a difference, see sign_flip_p
    strict_p: float = np.nan  # the same without its tolerance


def verdict(mean, paper_mean, paper_std):
    """ "inside", "above" or "below" the paper's mean +- std, which have two decimals."""
    gap = mean - paper_mean
    if abs(gap) <= paper_std + 0.005 + 1e-12:
        return "inside"
    return "above" if gap > 0 else "below"


def mean_of_tasks(*found, axis=-1):
    return np.mean([column.mean(axis=axis) for column in found], axis=0)


def interquartile_mean(*found, axis=-1):
    """Mean of the middle half of all runs."""
    return stats.trim_mean(np.concatenate(found, axis=axis), 0.25, axis=axis)


def estimate(statistic, found):
    """A statistic of arrays, one of each task's scores, with its percentile bootstrap interval.

    Each task is resampled by itself. None if one has no score.
    """
    seeds = min(map(len, found))
    if not seeds:
        return None
    value, low, high = float(statistic(*found)), np.nan, np.nan
    if seeds >= FEWEST_SEEDS:
        how = {"n_resamples": REPETITIONS, "method": "percentile", "rng": np.random.default_rng(0)}
        low, high = stats.bootstrap(found, statistic, **how).confidence_interval
    return Estimate(value, float(low), float(high), seeds)


def difference(one, other):
    """Estimate of the mean of the tasks' differences. Runs with the same seed stay together.

    Args:
        one, other: {seed: score} of each task. None where one has no seed that both have.
    """
    gains = [
        np.array([a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())])
        for a, b in zip(one, other, strict=True)
    ]
    found = estimate(mean_of_tasks, gains)
    if found is None:
        return None
    weighted = np.concatenate([gain / len(gain) for gain in gains])
    return found._replace(p=sign_flip_p(weighted), strict_p=sign_flip_p(weighted, tolerance=0.0))


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
    one, other = np.zeros(1), np.zeros(1)
    for gain in gains:
        one, other = other, np.concatenate([one - gain, one + gain])
    number = len(one) * len(other) - np.searchsorted(np.sort(other), least - one).sum()
    return float(number / 2 ** len(gains))


def support(gain):
    """What the Estimate of a difference says about its being > 0; from few seeds, nothing."""
    if gain is None or gain.seeds < FEWEST_SEEDS:
        return "open"
    if not gain.p <= LEVEL:
        return "undecided"
    return "supported" if gain.value > 0 else "contradicted"
