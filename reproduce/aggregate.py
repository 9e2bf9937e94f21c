"""From scores to statistics: no files and no drawing.

Scores are a table with a row for each seed and a column for each task; NaN where there is no run.
"""

from typing import NamedTuple

import numpy as np
from scipy import stats

REPETITIONS = 5_000  # of the bootstrap
FEWEST_SEEDS = 5  # of each task, to judge a claim or to have an interval
LEVEL = 0.05  # of a judgement, one-sided


class Estimate(NamedTuple):
    value: float
    low: float  # of the 95% interval; nan with fewer than FEWEST_SEEDS runs per task
    high: float
    seeds: int  # the fewest of any task that went in
    p: float = np.nan  # of a difference, see permutation_p


def verdict(mean, paper_mean, paper_std):
    """ "inside", "above" or "below" the paper's mean +- std, which have two decimals."""
    gap = mean - paper_mean
    if abs(gap) <= paper_std + 0.005 + 1e-12:
        return "inside"
    return "above" if gap > 0 else "below"


def mean_of_tasks(*scores, axis=-1):
    return np.mean([column.mean(axis=axis) for column in scores], axis=0)


def interquartile_mean(*scores, axis=-1):
    """Mean of the middle half of all runs."""
    return stats.trim_mean(np.concatenate(scores, axis=axis), 0.25, axis=axis)


def estimate(statistic, scores):
    """A statistic of the tasks' scores with its percentile bootstrap interval.

    Each task is resampled by itself. None if one has no score.
    """
    seeds = scores.count().min()
    if not seeds:
        return None
    columns = [scores[task].dropna().to_numpy() for task in scores]
    value, low, high = float(statistic(*columns)), np.nan, np.nan
    if seeds >= FEWEST_SEEDS:
        how = {"n_resamples": REPETITIONS, "method": "percentile", "rng": np.random.default_rng(0)}
        low, high = stats.bootstrap(columns, statistic, **how).confidence_interval
    return Estimate(value, float(low), float(high), int(seeds))


def difference(gains):
    """Estimate of the mean of the tasks' gains, one's scores less another's; None as `estimate`."""
    result = estimate(mean_of_tasks, gains)
    return result and result._replace(p=permutation_p(gains))


def permutation_p(gains):
    """Chance of so large a mean of gains in its direction, if each had either sign by chance.

    SciPy's paired permutation test, one-sided: exact with up to 15 pairs, else of 49,999 random
    choices. Scores count to two decimals, as the paper's: smaller gains decide nothing.
    """
    weighted = (gains.round(2) / gains.count()).to_numpy().T.ravel()
    weighted = np.append(weighted[~np.isnan(weighted)], 0.0)  # SciPy takes no single pair
    weighted *= np.sign(weighted.sum()) or 1.0
    result = stats.permutation_test(
        (weighted, np.zeros_like(weighted)),
        lambda a, b, axis: (a - b).sum(axis=axis),
        permutation_type="samples", alternative="greater", vectorized=True,
        n_resamples=49_999, batch=5_000, rng=np.random.default_rng(0),
    )  # fmt: skip
    return float(result.pvalue)


def support(gain):
    """What the Estimate of a difference says about its being > 0; from few seeds, nothing."""
    if gain is None or gain.seeds < FEWEST_SEEDS:
        return "open"
    if not gain.p <= LEVEL:
        return "undecided"
    return "supported" if gain.value > 0 else "contradicted"
