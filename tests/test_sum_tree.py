"""SumTree against a plain list of priorities."""

from itertools import accumulate

import numpy as np
import pytest
from conftest import raises_naming, scaled
from hypothesis import given, settings
from hypothesis import strategies as st

from gbcore import SumTree

# Whole priorities have exact sums, so that the naive search and the tree must agree everywhere.
whole = st.integers(0, 9)


@st.composite
def filled_trees(draw, priority):
    """A tree and its priorities after rounds of writing, also of one index twice in a round."""
    capacity = draw(st.integers(1, 20))
    tree, written = SumTree(capacity), [0.0] * capacity
    pairs = st.tuples(st.integers(0, capacity - 1), priority)
    for batch in draw(st.lists(st.lists(pairs, max_size=8), max_size=4)):
        indices = np.array([i for i, _ in batch], np.int64)
        tree.set(indices, np.array([p for _, p in batch], np.float64))
        for i, priority in batch:
            written[i] = float(priority)
    return tree, written


def find(priorities, target):
    """The index whose half-open interval of the cumulative sum holds target."""
    return next(i for i, end in enumerate(accumulate(priorities)) if target < end)


@settings(max_examples=scaled(200))
@given(filled_trees(whole), st.integers(1, 30), st.integers(0, 1000))
def test_priorities_their_total_find_everywhere_and_a_draw_from_each_slice(trees, n, seed):
    (tree, priorities), total = trees, sum(trees[1])
    got = tree.get(np.arange(tree.capacity))
    assert got.dtype == np.float64
    np.testing.assert_array_equal(got, priorities)
    assert isinstance(tree.total, float)
    assert tree.total == total
    for target in np.arange(0, total, 0.5):
        assert tree.find(target) == find(priorities, target)
    if total == 0:
        return
    got = tree.sample(n, np.random.default_rng(seed))
    assert got.dtype == np.int64
    assert got.shape == (n,)
    # Draw k falls somewhere in slice k, so it lies between what the two ends of the slice find.
    width = total / n
    below = [find(priorities, k * width * (1 - 1e-12)) for k in range(n)]
    above = [find(priorities, min((k + 1) * width, total - 1e-9)) for k in range(n)]
    got = np.sort(got)
    assert (below <= got).all()
    assert (got <= above).all()
    assert all(priorities[i] > 0 for i in got)


@settings(max_examples=scaled(200))
@given(filled_trees(st.sampled_from([0.0, 0.1, 0.3, 1e-8, 1e8, 7.7])))
def test_rounding_never_finds_a_priority_of_zero(trees):
    """Sums of these priorities are inexact; the search must still end at something drawable."""
    tree, priorities = trees
    np.testing.assert_array_equal(tree.priorities, priorities)
    assert tree.total == pytest.approx(sum(priorities), rel=1e-12)
    if tree.total == 0:
        return
    edges = np.cumsum(priorities)
    near = np.concatenate([edges, np.nextafter(edges, 0), [0.0, np.nextafter(tree.total, 0)]])
    for target in near[(near >= 0) & (near < tree.total)]:
        found = tree.find(target)
        assert 0 <= found < tree.capacity
        assert priorities[found] > 0
        start = edges[found] - priorities[found]
        slack = 1e-9 * tree.total
        assert start - slack <= target <= edges[found] + slack


def test_rounding_by_hand():
    """The sum is rounded up to 1.5, the target less 1.5 ulp up to b: past b, where nothing lies."""
    ulp = 2.0**-52
    a, b = 1.5 * ulp, 1.5 - 2 * ulp
    tree = SumTree(4)
    tree.set(np.arange(4), np.array([a, 0.0, b, 0.0]))
    assert tree.total == 1.5
    assert tree.find(1.5 - ulp) == 2


def test_draws_are_uniform_within_a_slice_and_follow_priorities():
    """Shares of the four priorities, over many samples of 3 slices: each within 5 sigma."""
    tree, priorities = SumTree(4), np.array([1.0, 0.0, 2.0, 4.0])
    tree.set(np.arange(4), priorities)
    rng, rounds = np.random.default_rng(0), scaled(20_000, 4_000)
    drawn = np.stack([np.sort(tree.sample(3, rng)) for _ in range(rounds)])
    # Slices of 7/3: the first holds 1 of index 0 and 4/3 of index 2, the second 2/3 and 5/3 of
    # indices 2 and 3, the third index 3 alone.
    shares = [{0: 3 / 7, 2: 4 / 7}, {2: 2 / 7, 3: 5 / 7}, {3: 1.0}]
    for k, share in enumerate(shares):
        for i in range(4):
            p = share.get(i, 0.0)
            assert abs((drawn[:, k] == i).mean() - p) <= 5 * np.sqrt(p * (1 - p) / rounds)


def test_sums_do_not_drift():
    """A tree that adds differences to its sums would keep the rounding of large ones for ever."""
    rng, capacity = np.random.default_rng(0), 37
    tree = SumTree(capacity)
    for _ in range(scaled(1000, 50)):
        indices = rng.integers(capacity, size=100)
        tree.set(indices, 10.0 ** rng.uniform(-6, 6, size=100))
    priorities = rng.uniform(1e-6, 2e-6, size=capacity)
    tree.set(np.arange(capacity), priorities)
    assert tree.total == pytest.approx(priorities.sum(), rel=1e-12)


def test_rejects_and_stays_as_it_was():
    tree = SumTree(6)
    tree.set(np.arange(6), np.arange(6.0))
    for bad in (-0.5, 15.0, 1e9, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="Require 0 <= target < total"):
            tree.find(bad)
        with raises_naming(bad, ValueError):
            tree.find(bad)
    for bad in (-1, 6, 2**40):
        with raises_naming(bad):
            tree.set(np.array([0, bad]), np.array([5.0, 5.0]))
        with raises_naming(bad):
            tree.get(np.array([0, bad]))
    for bad in (-1.5, float("nan"), float("inf")):
        with raises_naming(bad, ValueError):
            tree.set(np.array([0, 1]), np.array([5.0, bad]))
    with raises_naming(3, ValueError):
        tree.set(np.array([0, 1]), np.ones(3))
    for bad in (0, -4):
        with raises_naming(bad, ValueError):
            SumTree(bad)
        with raises_naming(bad, ValueError):
            tree.sample(bad, np.random.default_rng(0))
    np.testing.assert_array_equal(tree.priorities, np.arange(6.0))
    assert tree.total == 15.0
    empty = SumTree(8)
    for call in (lambda: empty.find(0.0), lambda: empty.sample(4, np.random.default_rng(0))):
        with raises_naming(0.0, ValueError):
            call()
