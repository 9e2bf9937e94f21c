"""From scores to statistics: pure functions of arrays and tables, no files and no drawing.

A score table is a dict task -> {seed: score}. A score matrix is float [runs, tasks], as rliable
takes it: run i of one task has nothing to do with run i of another. Where two matrices are
subtracted, run i of a task has the same seed in both.
"""

import contextlib
from typing import NamedTuple

import numpy as np
from rliable import library, metrics

REPETITIONS = 5_000  # of the bootstrap
SIGNIFICANCE = 0.95
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
    rounding = 0.005
    if mean > paper_mean + paper_std + rounding + 1e-12:
        return "above"
    if mean < paper_mean - paper_std - rounding - 1e-12:
        return "below"
    return "inside"


def on_the_same_seeds(one, other):
    """Two score tables without the seeds that only one has: a seed may be a layout, too."""
    seeds = {task: one[task].keys() & other[task].keys() for task in one.keys() & other.keys()}
    return [
        {task: {seed: table[task][seed] for seed in found} for task, found in seeds.items()}
        for table in (one, other)
    ]


def score_matrix(table, tasks, scales):
    """Scores / scales of the tasks, float [runs, tasks]; None if a task has none.

    Where tasks have different numbers of seeds, the first ones of each count.

    Args:
        table: task -> {seed: score}.
        tasks: the columns.
        scales: task -> (zero, one): the scores that become 0 and 1.
    """
    number = min(len(table.get(task, ())) for task in tasks)
    if number == 0:
        return None
    columns = []
    for task in tasks:
        zero, one = scales[task]
        first = [table[task][seed] for seed in sorted(table[task])[:number]]
        columns.append((np.asarray(first, np.float64) - zero) / (one - zero))
    return np.stack(columns, axis=1)


def estimate(statistic, *matrices):
    """A statistic of one or two unpaired score matrices, with its stratified bootstrap interval."""
    seeds = min(len(matrix) for matrix in matrices)

    def as_array(*samples):
        return np.array([statistic(*samples)])

    if seeds < FEWEST_SEEDS:
        return Estimate(float(statistic(*matrices)), np.nan, np.nan, seeds)
    given = matrices[0] if len(matrices) == 1 else list(matrices)
    with seeded():
        points, intervals = library.get_interval_estimates(
            {"": given}, as_array, reps=REPETITIONS, confidence_interval_size=SIGNIFICANCE
        )
    low, high = intervals[""][:, 0]
    return Estimate(float(points[""][0]), float(low), float(high), seeds)


def mean(matrix):
    """Mean of the tasks' means."""
    return metrics.aggregate_mean(matrix)


def interquartile_mean(matrix):
    """Mean of the middle half of all runs."""
    return metrics.aggregate_iqm(matrix)


def probability_of_improvement(matrix, other):
    """Chance that a run is better than one of the other, over tasks; a tie counts half.

    The same number as rliable's, which makes a Mann-Whitney test per task: 160 times slower.
    """
    pairs = matrix[:, None], other[None]  # [runs, other runs, tasks]
    return np.mean(np.greater(*pairs) + 0.5 * np.equal(*pairs))


def difference(matrix, other, weights=None):
    """Estimate of the mean of the tasks' differences. Runs with the same seed stay together.

    Args:
        matrix, other: scores [runs, tasks], whose runs have the same seeds.
        weights: of the tasks; default: 1 / tasks each.
    """
    gains = matrix - other
    weights = np.full(gains.shape[1], 1 / gains.shape[1]) if weights is None else weights

    def total(gains):
        return gains.mean(axis=0) @ weights

    p, strict_p = (sign_flip_p(gains * weights, tolerance) for tolerance in (TOLERANCE, 0.0))
    return estimate(total, gains)._replace(p=p, strict_p=strict_p)


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
    one, other = (sums_of_signed(half) for half in np.array_split(gains, 2))
    number = len(one) * len(other) - np.searchsorted(other, least - one).sum()
    return float(number / 2 ** len(gains))


def sums_of_signed(gains):
    """The 2^n sums of n gains under every choice of signs, ascending."""
    sums = np.zeros(1)
    for gain in gains:
        sums = np.concatenate([sums - gain, sums + gain])
    return np.sort(sums)


def profiles(matrices, thresholds):
    """Share of runs above each threshold: name -> (values, interval [2, thresholds])."""
    with seeded():
        values, intervals = library.create_performance_profile(
            matrices, thresholds, reps=REPETITIONS // 10
        )
    return {name: (values[name], intervals[name]) for name in matrices}


@contextlib.contextmanager
def seeded():
    """rliable draws from NumPy's global generator: seed it, and give it back as it was."""
    state = np.random.get_state()  # noqa: NPY002
    np.random.seed(0)  # noqa: NPY002
    try:
        yield
    finally:
        np.random.set_state(state)  # noqa: NPY002


def band(curves, window=5):
    """Mean and standard error over seeds of running means: steps, mean, error, number of seeds.

    Args:
        curves: one dict step -> return per seed; only steps that all of them have are used.
        window: evaluations that are averaged, this and earlier ones.
    """
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    values = np.array([[curve[step] for step in steps] for curve in curves])  # [seeds, steps]
    total = np.cumsum(np.pad(values, ((0, 0), (1, 0))), axis=1)
    last = np.arange(1, len(steps) + 1)
    first = np.maximum(last - window, 0)
    smooth = (total[:, last] - total[:, first]) / (last - first)
    error = np.full(len(steps), np.nan)  # of one curve
    if len(curves) > 1:
        error = smooth.std(axis=0, ddof=1) / np.sqrt(len(curves))
    return np.array(steps), smooth.mean(axis=0), error, len(curves)


def support(gain):
    """What the Estimate of a difference says about its being > 0; from few seeds, nothing."""
    if gain.seeds < FEWEST_SEEDS:
        return "open"
    if not gain.p <= LEVEL:
        return "undecided"
    return "supported" if gain.value > 0 else "contradicted"


def best_evaluations(runs):
    """(task, seed) -> the best evaluation of any run. runs: (task, seed, curve) of each."""
    best = {}
    for task, seed, curve in runs:
        best[task, seed] = max(best.get((task, seed), 0.0), max(curve.values(), default=0.0))
    return best


def median_step(steps):
    """Median of steps, of which None is later than all; inf if that is None."""
    return float(np.median([np.inf if step is None else step for step in steps]))


class Shortfall(NamedTuple):
    """Why runs of one cell scored less than was wanted, by the stage that failed."""

    no_reward: int  # no training episode had a return above 0
    never_learned: int  # rewards, but no smoothed evaluation reached what was wanted
    lost: int  # reached it, and ended below it
    fine: int  # ended at or above it
    first_reward: float  # median step of the first reward, inf where half of the runs have none
    states: float  # median number of states found


def shortfall(rows, curves, wanted):
    """Sort the runs of a cell by where they fell short.

    Args:
        rows: dicts with score, first_reward_step (None if none) and states, one per seed.
        curves: step -> return, one per row.
        wanted: the score that was to be reached.
    """
    counts = {"no_reward": 0, "never_learned": 0, "lost": 0, "fine": 0}
    for row, curve in zip(rows, curves, strict=True):
        if row["first_reward_step"] is None:
            counts["no_reward"] += 1
        elif row["score"] >= wanted:
            counts["fine"] += 1
        elif curve and band([curve])[1].max() >= wanted:
            counts["lost"] += 1
        else:
            counts["never_learned"] += 1
    return Shortfall(
        **counts,
        first_reward=median_step(row["first_reward_step"] for row in rows),
        states=float(np.median([row["states"] for row in rows])),
    )
