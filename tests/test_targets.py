"""Targets of gbcore against the recursion of naive.py, and against cases worked by hand."""

import copy
import pickle
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import CORNERS, RULES, TOLERANCE, Case, cases, raises_naming, scaled
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from naive import (
    Categoricals,
    NaiveGraph,
    Oracle,
    Scalars,
    enumerate_kept,
    subset_probabilities,
)

from gbcore import (
    TransitionGraph,
    categorical_targets,
    kernels,
    point_masses,
    prune,
    q_targets,
    trajectory_subgraphs,
)
from gbcore.categorical import back_up, pad
from gbcore.kernels import MAX_STAMP
from gbcore.targets import pair_q_values

depths = st.integers(1, 5)


def assert_distributions(pmf, tolerance=1e-12):
    """Rows of non-negative numbers that sum to 1."""
    assert pmf.min(initial=0.0) >= -tolerance
    np.testing.assert_allclose(pmf.sum(1), 1.0, rtol=0, atol=tolerance)


def assert_exact(case, depth):
    """Every rule, scalar and categorical, from every pair of the case, against the oracle."""
    pairs = case.pairs
    sub = case.expand(pairs, depth)
    assert sub.num_roots == len(pairs)
    for name in RULES:
        oracle = case.oracle(name)
        expected = [oracle.target(s, a, depth) for s, a in pairs]
        got = case.q_targets(sub, name)
        assert got.dtype == np.float64
        assert got.shape == (len(pairs),)
        np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE, err_msg=name)

        oracle = case.oracle(name, categorical=True)
        expected = [oracle.target(s, a, depth) for s, a in pairs]
        got = case.categorical_targets(sub, name)
        assert got.shape == (len(pairs), len(case.support))
        assert_distributions(got)
        if not oracle.tied:
            expected = np.reshape(expected, got.shape)  # also where there are no pairs
            np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE, err_msg=name)


# --- exact targets ---


@settings(max_examples=scaled(300, 30))
@given(cases(), depths)
def test_random_graphs(case, depth):
    assert_exact(case, depth)


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_corner_cases(corner, depth):
    assert_exact(corner, depth)


@settings(max_examples=scaled(40, 10))
@given(cases(), depths)
def test_float32_gives_float32(case, depth):
    sub = case.expand(case.pairs, depth)
    for name in RULES:
        exact, got = case.q_targets(sub, name), case.q_targets(sub, name, np.float32)
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, exact, rtol=0, atol=2e-5)
        if name == "greedy":  # near-ties may be decided differently in float32
            continue
        exact = case.categorical_targets(sub, name)
        got = case.categorical_targets(sub, name, np.float32)
        assert_distributions(got, 1e-5)
        np.testing.assert_allclose(got, exact, rtol=0, atol=2e-5)


@settings(max_examples=scaled(60))
@given(cases(), depths)
def test_leaf_rows_are_distinct_nodes_within_reach(case, depth):
    pairs = case.pairs
    sub = case.expand(pairs, depth)
    nodes = np.asarray(sub.nodes)
    assert nodes.dtype == np.int64
    assert nodes.ndim == 1
    assert len(set(nodes.tolist())) == len(nodes)
    assert set(nodes.tolist()) <= set(case.state_of)

    # From one root: nothing but the root and what lies within depth steps of it.
    s, a = pairs[len(pairs) // 2] if pairs else (None, None)
    if s is not None:
        within, frontier = {s}, case.naive.transitions(s, a)
        for _ in range(depth):
            reached = {t[4] for t in frontier}
            within |= reached
            frontier = [t for state in reached for t in case.naive.transitions(state)]
        assert set(case.rows(case.expand([(s, a)], depth)).tolist()) <= within


@settings(max_examples=scaled(40, 10))
@given(cases(), depths, st.integers(0, 1000))
def test_a_target_does_not_depend_on_the_rest_of_the_batch(case, depth, seed):
    rng = np.random.default_rng(seed)
    pairs = case.pairs
    batch = [pairs[i] for i in rng.integers(len(pairs), size=7)] if pairs else []  # with duplicates
    whole = case.q_targets(case.expand(pairs, depth), "greedy")
    expected = [whole[pairs.index(pair)] for pair in batch]
    got = case.q_targets(case.expand(batch, depth), "greedy")
    np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE)
    alone = [case.q_targets(case.expand([pair], depth), "greedy")[0] for pair in batch]
    np.testing.assert_allclose(alone, expected, rtol=0, atol=TOLERANCE)


def test_the_graph_may_change_after_expand():
    """A subgraph is a snapshot: targets are often computed after the replay has moved on."""
    case = Case(2, CORNERS["chain"][1])
    sub = case.expand([(0, 0)], 4)
    rows = case.rows(sub)
    before = q_targets(sub, case.leaf_q[rows], case.gamma)
    case.graph.add(case.id_of[1], 0, 100.0, case.id_of[0], False)
    case.graph.add(case.id_of[1], 1, 100.0, case.id_of[0], False)
    assert q_targets(sub, case.leaf_q[rows], case.gamma) == before


def test_marks_start_anew_before_their_stamps_run_out():
    case = Case(2, CORNERS["many outcomes per pair"][1])
    first = case.expand(case.pairs, 3)  # leaves marks with the lowest stamps
    case.graph._stamps[0] = MAX_STAMP + 1
    for column, again in zip(first, case.expand(case.pairs, 3), strict=True):
        np.testing.assert_array_equal(again, column)
    assert case.graph._stamps[0] < 1000


def test_inputs_are_not_written_to():
    case = Case(2, CORNERS["many outcomes per pair"][1])
    sub = case.expand(case.pairs, 3)
    rows = case.rows(sub)
    leaf_q, leaf_pmf = case.leaf_q[rows], torch.from_numpy(case.leaf_pmf[rows])
    kept_q, kept_pmf = leaf_q.copy(), leaf_pmf.clone()
    q_targets(sub, leaf_q, 0.9)
    categorical_targets(sub, leaf_pmf, torch.from_numpy(case.support), 0.9, rule="greedy")
    np.testing.assert_array_equal(leaf_q, kept_q)
    assert torch.equal(leaf_pmf, kept_pmf)


# --- cases that can be worked by hand ---


def test_two_cycle_by_hand():
    """0 -> 1 with reward 1, 1 -> 0 with reward -0.5, gamma 0.9, one action."""
    case = Case(1, CORNERS["two-cycle"][1])
    q0, q1 = case.leaf_q[0, 0], case.leaf_q[1, 0]
    by_depth = {
        1: 1 + 0.9 * q1,
        2: 1 + 0.9 * (-0.5 + 0.9 * q0),
        3: 1 + 0.9 * (-0.5 + 0.9 * (1 + 0.9 * q1)),
    }
    for depth, expected in by_depth.items():
        got = case.q_targets(case.expand([(0, 0)], depth), "greedy")
        np.testing.assert_allclose(got, [expected], rtol=0, atol=TOLERANCE)


def test_a_seen_action_with_a_bad_outcome_does_not_hide_an_unseen_one():
    """Greedy reads the leaf of unseen actions, and the nested value, not the leaf, of seen ones."""
    case = Case(2, [(0, 0, 0.0, False, 1), (1, 0, -5.0, True, 2)], gamma=1.0)
    case.leaf_q[1] = [10.0, 1.0]  # action 0 is overestimated by the network; the data say -5
    assert case.q_targets(case.expand([(0, 0)], 1), "greedy")[0] == pytest.approx(10.0)
    assert case.q_targets(case.expand([(0, 0)], 2), "greedy")[0] == pytest.approx(1.0)
    assert case.q_targets(case.expand([(0, 0)], 2), "behaviour")[0] == pytest.approx(-5.0)


def test_depth_one_averages_one_backup_over_the_outcomes():
    case = Case(1, [(0, 0, 1.0, False, 1, 3), (0, 0, -2.0, False, 2, 1), (0, 0, 8.0, True, 3, 4)])
    v1, v2 = case.leaf_q[1].max(), case.leaf_q[2].max()
    expected = (3 * (1 + 0.9 * v1) + (-2 + 0.9 * v2) + 4 * 8) / 8
    for name in RULES:
        got = case.q_targets(case.expand([(0, 0)], 1), name)
        np.testing.assert_allclose(got, [expected], rtol=0, atol=TOLERANCE)


def test_counts_follow_repeated_and_removed_observations():
    transitions = [(0, 0, 1.0, True, 1, 3), (0, 0, 0.0, True, 1, 1)]
    case = Case(1, transitions)
    assert case.q_targets(case.expand([(0, 0)], 1), "greedy")[0] == pytest.approx(0.75)
    zero, one = case.id_of[0], case.id_of[1]
    for expected in (2 / 3, 1 / 2, 0.0):
        case.graph.remove(zero, 0, 1.0, one, True)
        got = case.q_targets(case.expand([(0, 0)], 1), "greedy")
        assert got[0] == pytest.approx(expected)


def test_an_unseen_root_reads_its_leaf():
    case = Case(2, [(0, 0, 1.0, False, 1), (1, 0, 1.0, True, 0)], num_states=3)
    pairs = [(0, 1), (1, 1), (2, 0), (2, 1)]  # state 2 is an isolated node
    for depth in (1, 3):
        sub = case.expand(pairs, depth)
        for name in RULES:
            expected = [case.leaf_q[s, a] for s, a in pairs]
            np.testing.assert_allclose(case.q_targets(sub, name), expected, rtol=0, atol=TOLERANCE)
            expected = [case.leaf_pmf[s, a] for s, a in pairs]
            got = case.categorical_targets(sub, name)
            np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE)


def test_a_batch_of_terminal_transitions():
    case = Case(2, [(s, a, s - 0.5 * a, True, 2) for s in range(2) for a in range(2)])
    pairs = [(0, 0), (0, 1), (1, 0), (1, 1)]
    for depth in (1, 4):
        sub = case.expand(pairs, depth)
        for name in RULES:
            np.testing.assert_allclose(case.q_targets(sub, name), [0.0, -0.5, 1.0, 0.5])
            expected = np.eye(5)[[2, 2, 3, 3]]  # the support is -2, -1, 0, 1, 2
            expected[1] = [0, 0.5, 0.5, 0, 0]
            expected[3] = [0, 0, 0.5, 0.5, 0]
            got = case.categorical_targets(sub, name)
            np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE)


def test_a_done_transition_does_not_look_behind_the_end():
    case = Case(2, CORNERS["done into a state with edges"][1])
    for depth in (1, 2, 5):
        for name in RULES:
            got = case.q_targets(case.expand([(0, 0)], depth), name)
            np.testing.assert_allclose(got, [1.0], rtol=0, atol=TOLERANCE)


def test_an_empty_batch():
    case = Case(2, CORNERS["two-cycle"][1])
    sub = case.expand([], 2)
    assert sub.num_roots == 0
    for name in RULES:
        assert case.q_targets(sub, name).shape == (0,)
        assert case.categorical_targets(sub, name).shape == (0, 5)


# --- relations between the rules ---


@settings(max_examples=scaled(40, 10))
@given(cases(), depths)
def test_double_is_the_policy_that_puts_all_mass_on_the_online_argmax(case, depth):
    sub = case.expand(case.pairs, depth)
    double = case.q_targets(sub, "double")
    case.policy = np.eye(case.num_actions)[case.selector_q.argmax(1)]
    np.testing.assert_allclose(case.q_targets(sub, "policy"), double, rtol=0, atol=TOLERANCE)


@settings(max_examples=scaled(40, 10))
@given(cases(), depths)
def test_double_with_the_target_network_is_at_most_greedy(case, depth):
    """One backup deep the two rules agree; nested, greedy looks at nested values."""
    case.selector_q = case.leaf_q
    sub = case.expand(case.pairs, 1)
    greedy, double = case.q_targets(sub, "greedy"), case.q_targets(sub, "double")
    np.testing.assert_allclose(double, greedy, rtol=0, atol=TOLERANCE)
    sub = case.expand(case.pairs, depth)
    greedy = case.q_targets(sub, "greedy")
    for name in ("double", "policy"):
        assert (case.q_targets(sub, name) <= greedy + TOLERANCE).all()


@settings(max_examples=scaled(40, 10))
@given(cases(max_actions=1), depths)
def test_with_one_action_all_rules_agree(case, depth):
    sub = case.expand(case.pairs, depth)
    greedy = case.q_targets(sub, "greedy")
    for name in RULES:
        np.testing.assert_allclose(case.q_targets(sub, name), greedy, rtol=0, atol=TOLERANCE)


# --- categorical projection ---


def one_backup(pmf, reward, gamma, done=False):
    """Target of a pair with one outcome that leads to the distribution pmf, on -2, -1, 0, 1, 2."""
    graph = TransitionGraph(1, obs_shape=(1,), obs_dtype=np.int64)
    first, second = graph.node(np.array([0])), graph.node(np.array([1]))
    graph.add(first, 0, reward, second, done)
    sub = graph.expand(np.array([first]), np.array([0]), 1)
    leaf = np.array([[pmf if n == second else [1, 0, 0, 0, 0]] for n in sub.nodes], np.float64)
    support = torch.linspace(-2, 2, 5, dtype=torch.float64)
    out = categorical_targets(
        sub, torch.from_numpy(leaf.reshape(-1, 1, 5)), support, gamma, rule="greedy"
    )
    return out.numpy()[0]


@pytest.mark.parametrize(
    ("pmf", "reward", "gamma", "done", "expected"),
    [
        # Atoms land exactly on support points: a shift by one.
        ([0, 0.25, 0.5, 0.25, 0], 1.0, 1.0, False, [0, 0, 0.25, 0.5, 0.25]),
        ([0, 0.25, 0.5, 0.25, 0], -1.0, 1.0, False, [0.25, 0.5, 0.25, 0, 0]),
        ([0.2, 0.2, 0.2, 0.2, 0.2], 0.0, 1.0, False, [0.2, 0.2, 0.2, 0.2, 0.2]),
        # Halved: -1, -0.5, 0, 0.5, 1.
        ([0.2, 0.2, 0.2, 0.2, 0.2], 0.0, 0.5, False, [0, 0.3, 0.4, 0.3, 0]),
        # -0.5, 0.5, 1.5, and 2.5 and 3.5 which are clipped.
        ([0.1, 0.2, 0.3, 0.2, 0.2], 1.5, 1.0, False, [0, 0.05, 0.15, 0.25, 0.55]),
        # Everything is clipped, at either end.
        ([0.2, 0.2, 0.2, 0.2, 0.2], 9.0, 1.0, False, [0, 0, 0, 0, 1]),
        ([0.2, 0.2, 0.2, 0.2, 0.2], -9.0, 1.0, False, [1, 0, 0, 0, 0]),
        # gamma = 0 and done: the pmf of the reward alone.
        ([0.2, 0.2, 0.2, 0.2, 0.2], 0.25, 0.0, False, [0, 0, 0.75, 0.25, 0]),
        ([0.2, 0.2, 0.2, 0.2, 0.2], -0.25, 0.9, True, [0, 0.25, 0.75, 0, 0]),
        ([0.2, 0.2, 0.2, 0.2, 0.2], 7.0, 0.9, True, [0, 0, 0, 0, 1]),
        ([0.2, 0.2, 0.2, 0.2, 0.2], -2.0, 0.9, True, [1, 0, 0, 0, 0]),
    ],
)
def test_projection_by_hand(pmf, reward, gamma, done, expected):
    got = one_backup(pmf, reward, gamma, done)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_point_masses_are_the_pmfs_of_ends_with_these_rewards(dtype):
    values = [-9.0, -2.0, -0.25, 0.0, 0.4, 1.0, 2.0, 9.0]
    support = torch.linspace(-2, 2, 5, dtype=dtype)
    naive = Categoricals([], support, gamma=0.9)
    expected = [naive.back_up(value, True, None) for value in values]
    found = point_masses(torch.tensor(values, dtype=dtype), support)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    assert found.dtype == dtype


def test_projection_of_a_mixture_by_hand():
    """Three ends with reward 1 and one with -0.5: 3/4 at 1, and 1/4 shared by -1 and 0."""
    case = Case(1, [(0, 0, 1.0, True, 1, 3), (0, 0, -0.5, True, 1, 1)])
    got = case.categorical_targets(case.expand([(0, 0)], 1), "greedy")
    np.testing.assert_allclose(got, [[0, 0.125, 0.125, 0.75, 0]], rtol=0, atol=1e-12)


def test_clipping_happens_at_every_node():
    """5 is clipped to 2 before the -1 of the step before is added: 1, and not min(4, 2)."""
    case = Case(1, [(0, 0, -1.0, False, 1), (1, 0, 5.0, True, 2)], gamma=1.0)
    got = case.categorical_targets(case.expand([(0, 0)], 2), "greedy")
    np.testing.assert_allclose(got, [[0, 0, 0, 1, 0]], rtol=0, atol=1e-12)


@settings(max_examples=scaled(40, 10))
@given(cases(), depths)
def test_where_nothing_is_clipped_the_expectation_is_the_scalar_target(case, depth):
    """Projection keeps the mean inside the support, and every rule reads expectations.

    Mass starts on the middle 3 of 15 atoms, and spreads by one atom per backup, at most.
    """
    case.support = np.linspace(-70, 70, 15)  # rewards are smaller than the gap of 10
    middle = case.leaf_pmf[..., 1:4] / case.leaf_pmf[..., 1:4].sum(-1, keepdims=True)
    case.leaf_pmf = np.zeros((*middle.shape[:2], 15))
    case.leaf_pmf[..., 6:9] = middle
    case.leaf_q = case.leaf_pmf @ case.support
    sub = case.expand(case.pairs, depth)
    for name in RULES:
        got = case.categorical_targets(sub, name) @ case.support
        np.testing.assert_allclose(got, case.q_targets(sub, name), rtol=0, atol=1e-8)


def test_point_masses_on_the_grid_stay_point_masses():
    """gamma 1, whole rewards, deterministic steps: the target is one-hot at the scalar target."""
    rng = np.random.default_rng(0)
    transitions = [
        (s, a, float(rng.integers(-1, 2)), bool(rng.random() < 0.2), int(rng.integers(8)))
        for s in range(8)
        for a in range(2)
    ]
    case = Case(2, transitions, gamma=1.0)
    case.support = np.linspace(-12, 12, 25)
    position = rng.integers(8, 17, size=(8, 2))
    case.leaf_pmf, case.leaf_q = np.eye(25)[position], case.support[position]
    for depth in (1, 2, 5):
        sub = case.expand(case.pairs, depth)
        for name in ("greedy", "double", "behaviour, double"):
            pmf, scalar = case.categorical_targets(sub, name), case.q_targets(sub, name)
            assert_distributions(pmf)
            if name != "behaviour, double":  # which mixes what the two actions did
                np.testing.assert_allclose(pmf.max(1), 1.0, rtol=0, atol=1e-12)
            np.testing.assert_allclose(pmf @ case.support, scalar, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-12), (np.float32, 1e-5)])
def test_mass_is_kept_on_the_support_of_rainbow(dtype, tolerance):
    """51 atoms on [-10, 10] are 0.4 apart, not exact in binary: rounding decides what is on one."""
    rng = np.random.default_rng(1)
    transitions = [
        (s, a, float(rng.choice([-0.8, -0.4, 0.0, 0.4, 0.8, 1.0])), False, int(rng.integers(10)), 2)
        for s in range(10)
        for a in range(3)
        for _ in range(2)
    ]
    case = Case(3, sorted(set(transitions)), gamma=1.0)
    case.support = np.linspace(-10, 10, 51)
    case.leaf_pmf = np.eye(51)[rng.integers(51, size=(10, 3))]
    for depth in (1, 2, 5, 10):
        sub = case.expand(case.pairs, depth)
        for name in RULES:
            assert_distributions(case.categorical_targets(sub, name, dtype), tolerance)


@given(cases(), depths, st.sampled_from(list(RULES)))
def test_padding_changes_no_target(case, depth, rule):
    sub = case.expand(case.pairs, depth)
    assume(len(sub.nodes))  # the padding of no nodes is no node of the case
    padded = pad(sub)
    (width,) = set(np.diff(padded.level_outcomes))
    assert {*np.diff(padded.level_pairs[1:]), *np.diff(padded.level_vertices[1:])} <= {width}
    assert len(padded.nodes) >= len(sub.nodes)
    few = {n << k for n in (2, 3) for k in range(4, 20)}  # 32, 48, 64, 96 ...
    assert {len(padded.nodes), int(width)} <= few
    np.testing.assert_array_equal(case.q_targets(padded, rule), case.q_targets(sub, rule))
    expected = case.categorical_targets(sub, rule)
    np.testing.assert_allclose(case.categorical_targets(padded, rule), expected, rtol=0, atol=1e-12)

    def on_gpu(*arguments, **settings):
        return back_up(*arguments, **settings | {"dense": True})

    with mock.patch("gbcore.categorical.back_up", on_gpu):
        got = case.categorical_targets(padded, rule)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12)


def test_categorical_inputs_may_be_views():
    """A network's output is often a transposed or strided view."""
    case = Case(2, CORNERS["many outcomes per pair"][1])
    sub = case.expand(case.pairs, 2)
    expected = case.categorical_targets(sub, "double")
    rows = case.rows(sub)
    leaf = torch.from_numpy(case.leaf_pmf[rows]).permute(2, 0, 1).contiguous().permute(1, 2, 0)
    selector = torch.from_numpy(case.selector_q[rows]).t().contiguous().t()
    support = torch.from_numpy(case.support)
    got = categorical_targets(sub, leaf, support, case.gamma, rule="double", selector_q=selector)
    np.testing.assert_allclose(got.numpy(), expected, rtol=0, atol=1e-12)


def test_scalar_inputs_may_be_views():
    case = Case(2, CORNERS["many outcomes per pair"][1])
    sub = case.expand(case.pairs, 2)
    rows = case.rows(sub)
    wide = np.repeat(case.leaf_q[rows], 2, axis=1)
    got = q_targets(sub, wide[:, ::2], case.gamma)
    np.testing.assert_array_equal(got, case.q_targets(sub, "greedy"))
    got = q_targets(sub, np.asfortranarray(case.leaf_q[rows]), case.gamma)
    np.testing.assert_array_equal(got, case.q_targets(sub, "greedy"))


def test_targets_carry_no_gradient():
    case = Case(2, CORNERS["two-cycle"][1])
    sub = case.expand([(0, 0)], 2)
    rows = case.rows(sub)
    leaf = torch.from_numpy(case.leaf_pmf[rows]).requires_grad_()
    out = categorical_targets(sub, leaf, torch.from_numpy(case.support), 0.9, rule="greedy")
    assert not out.requires_grad


# --- limited breadth ---


def all_samples(case, pair, depth, breadth):
    """All expansions of a pair, and what every rule makes of them.

    Returns probabilities float[N]; targets float[N, 5 + 5 * n_atoms], five numbers and then five
    distributions; and whether rounding decided some greedy choice.
    """
    samples = list(enumerate_kept(case.naive, *pair, depth, breadth))
    oracles = [case.oracle(name, categorical) for categorical in (False, True) for name in RULES]
    table = [
        np.hstack([oracle.limited_target(*pair, kept) for oracle in oracles]) for _, kept in samples
    ]
    tied = any(oracle.tied for oracle in oracles)
    return np.array([p for p, _ in samples]), np.array(table), tied


def all_targets(case, sub):
    """The same row of numbers from gbcore, for every root. float[B, 5 + 5 * n_atoms]"""
    scalar = [case.q_targets(sub, name)[:, None] for name in RULES]
    categorical = [case.categorical_targets(sub, name) for name in RULES]
    return np.hstack(scalar + categorical)


@settings(max_examples=scaled(60, 15))
@given(
    cases(max_states=3, max_actions=2, max_transitions=6, removals=False),
    st.integers(1, 3),
    st.integers(1, 2),
    st.integers(0, 1000),
)
def test_every_limited_target_belongs_to_one_possible_sample(case, depth, breadth, seed):
    """All ten targets of a root must be explained by ONE set of kept transitions."""
    pairs = [pair for pair in case.pairs for _ in range(3)]
    rng = np.random.default_rng(seed)
    sub = case.expand(pairs, depth, breadth=breadth, rng=rng)
    targets = all_targets(case, sub)
    for pair in case.pairs:
        _, table, tied = all_samples(case, pair, depth, breadth)
        if tied:
            continue
        for row in (i for i, p in enumerate(pairs) if p == pair):
            distance = np.abs(table - targets[row]).max(1).min()
            assert distance <= TOLERANCE, (
                f"root {pair} in row {row}: no sample explains its targets"
            )


# Hub 1 has seven transitions that differ in count, action and outcome; some lead on.
BUSY = [
    (0, 0, 0.1, False, 1, 2),
    (0, 0, 0.4, False, 2, 1),
    (1, 0, 1.0, False, 2, 1),
    (1, 0, 0.2, False, 3, 4),
    (1, 0, -0.3, True, 3, 2),
    (1, 1, 0.6, False, 1, 3),
    (2, 0, 0.5, False, 1, 6),
    (2, 1, -0.7, False, 3, 1),
    (3, 1, 0.9, False, 2, 2),
]


def test_frequencies_of_whole_samples():
    """Chi-square of which expansion was drawn, over two sampled levels, against exact odds."""
    case, pair, depth, breadth = Case(2, BUSY), (0, 0), 3, 2
    probability, table, _ = all_samples(case, pair, depth, breadth)
    # Samples with equal targets cannot be told apart: add them up.
    scalars = table[:, : len(RULES)].round(7)
    keys, group = np.unique(scalars, axis=0, return_inverse=True)
    probability = np.bincount(group.ravel(), probability)
    assert probability.sum() == pytest.approx(1.0)
    assert len(keys) > 30

    n = scaled(20_000, 2_000)
    sub = case.expand([pair] * n, depth, breadth=breadth, rng=np.random.default_rng(3))
    drawn = np.hstack([case.q_targets(sub, name)[:, None] for name in RULES])
    distance = np.abs(drawn[:, None] - keys[None]).max(2)
    assert distance.min(1).max() < 1e-6
    observed = np.bincount(distance.argmin(1), minlength=len(keys))
    common = probability * n >= 5
    expected = np.append(probability[common], probability[~common].sum()) * n
    observed = np.append(observed[common], observed[~common].sum())
    chi2 = ((observed - expected) ** 2 / np.maximum(expected, 1e-9)).sum()
    freedom = common.sum()
    assert chi2 < freedom + 5 * np.sqrt(2 * freedom)


COUNTS = [1, 1, 2, 3, 5, 8, 13]


def kept_of_the_hub(breadth, n, seed=0):
    """Draws `breadth` of the seven transitions of a hub, n times. bool[n, 7]: which were kept.

    Each is an end with reward 2^k under its own action and leaf values are 0, so that the binary
    digits of 7 * (mean over the actions) tell what was kept.
    """
    hub = [(1, k, 2.0**k, True, 2, count) for k, count in enumerate(COUNTS)]
    case = Case(7, [(0, 0, 0.0, False, 1), *hub], gamma=1.0)
    case.leaf_q[:], case.policy[:] = 0.0, 1 / 7
    sub = case.expand([(0, 0)] * n, 2, breadth=breadth, rng=np.random.default_rng(seed))
    digits = np.rint(case.q_targets(sub, "policy") * 7).astype(np.int64)
    return (digits[:, None] >> np.arange(7)) & 1 == 1


@pytest.mark.parametrize("breadth", [1, 3, 6])
def test_transitions_are_kept_by_successive_sampling(breadth):
    n = scaled(20_000, 2_000)
    kept = kept_of_the_hub(breadth, n)
    assert (kept.sum(1) == breadth).all()
    odds = subset_probabilities(COUNTS, breadth)
    exact = np.array([sum(p for subset, p in odds.items() if i in subset) for i in range(7)])
    assert (np.abs(kept.mean(0) - exact) < 5 * np.sqrt(exact * (1 - exact) / n) + 1e-9).all()
    for subset, p in odds.items():
        chosen = kept[:, sorted(subset)].all(1).mean()
        assert abs(chosen - p) < 5 * np.sqrt(p * (1 - p) / n) + 2 / n


def test_successive_sampling_by_hand():
    """Of the weights 1, 2 and 3 the first two: 1 and then 2, or 2 and then 1."""
    odds = subset_probabilities([1, 2, 3], 2)
    assert odds[frozenset({0, 1})] == pytest.approx(1 / 6 * 2 / 5 + 2 / 6 * 1 / 4)
    assert sum(odds.values()) == pytest.approx(1.0)


def test_exponential_variates_are_minus_a_logarithm():
    random = np.random.default_rng(0).integers(2**64, size=scaled(20_000), dtype=np.uint64)
    corners = [0, 1 << 12, 2**63, 2**63 - 1, 2**64 - 1]
    bits = np.append(random, np.array(corners, np.uint64))
    found = np.array([kernels.exponential(word) for word in bits])
    exact = -np.log1p(((bits >> np.uint64(12)).astype(np.float64) + 0.5) / 2.0**52 - 1)
    assert (found > 0).all()
    np.testing.assert_allclose(found, exact, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("size", "breadth"), [(2, 1), (64, 63), (65, 1), (65, 64), (3_000, 1_234)])
def test_a_sample_has_its_size_whatever_the_weights(size, breadth):
    keys, taken = np.empty(size + 3, np.int64), np.zeros(size + 3, np.bool_)
    for weights in (np.ones(size), np.full(size, 2.0**40), np.logspace(0, 15, size)):
        for seed in range(scaled(50, 2)):
            kernels.take_weighted(weights, size, breadth, np.uint64(seed), keys, taken)
            assert taken.sum() == breadth
            assert not taken[size:].any()


def test_breadth_at_the_size_of_a_level_is_no_limit():
    for breadth in (7, 8, 1000):
        assert kept_of_the_hub(breadth, 20).all()
    assert not kept_of_the_hub(6, 20).all(1).any()


@settings(max_examples=scaled(40, 10))
@given(cases(), depths)
def test_breadth_of_all_transitions_equals_no_limit(case, depth):
    exact = all_targets(case, case.expand(case.pairs, depth))
    breadth = max(1, case.graph.num_edges)
    rng = np.random.default_rng(0)
    limited = all_targets(case, case.expand(case.pairs, depth, breadth=breadth, rng=rng))
    np.testing.assert_allclose(limited, exact, rtol=0, atol=TOLERANCE)


def test_the_source_pair_is_expanded_whatever_the_breadth():
    case = Case(2, CORNERS["many outcomes per pair"][1])
    exact = case.q_targets(case.expand([(0, 0)] * 20, 1), "greedy")
    sub = case.expand([(0, 0)] * 20, 1, breadth=1, rng=np.random.default_rng(0))
    np.testing.assert_allclose(case.q_targets(sub, "greedy"), exact, rtol=0, atol=TOLERANCE)


def test_a_kept_pair_averages_over_all_its_outcomes():
    """One transition of one pair with three outcomes is kept: the other two outcomes are leaves."""
    hub = [(1, 0, 1.0, False, 2, 1), (1, 0, 2.0, False, 3, 1), (1, 0, 3.0, False, 4, 2)]
    far = [(2, 0, 10.0, True, 0), (3, 0, 20.0, True, 0), (4, 0, 40.0, True, 0)]
    case = Case(1, [(0, 0, 0.0, False, 1), *hub, *far], gamma=1.0)
    case.leaf_q[:] = 0.0
    sub = case.expand([(0, 0)] * 60, 3, breadth=1, rng=np.random.default_rng(0))
    got = case.q_targets(sub, "greedy")
    expected = {(1 + 2 + 3 * 2 + nested) / 4 for nested in (10, 20, 2 * 40)}
    assert {round(float(g), 6) for g in got} == expected


def test_rows_of_a_batch_are_sampled_independently():
    n = scaled(4_000, 800)
    first = kept_of_the_hub(1, n)[:, 6]  # probability 13/33
    p = 13 / 33
    both = (first[1:] & first[:-1]).mean()
    assert abs(both - p * p) < 5 * np.sqrt(p * p * (1 - p * p) / n)


def test_a_sample_depends_on_the_seed_alone():
    """Not on what was expanded in between, which leaves larger arrays to work in."""
    case = Case(2, BUSY)

    def draw(num_roots):
        sub = case.expand([(0, 0)] * num_roots, 4, 2, np.random.default_rng(0))
        return case.q_targets(sub, "greedy")

    first = draw(10)
    many = draw(1000)
    np.testing.assert_array_equal(draw(1000), many)
    np.testing.assert_array_equal(draw(10), first)


def test_a_generator_moves_on_between_calls():
    case = Case(2, BUSY)
    rng = np.random.default_rng(0)
    pairs = [(0, 0)] * 50
    first, second = (
        case.q_targets(case.expand(pairs, 3, breadth=2, rng=rng), "greedy") for _ in range(2)
    )
    assert (first != second).any()


def test_thousands_of_outcomes_with_small_breadth():
    case = Case(*CORNERS["thousands of outcomes"])
    sub = case.expand([(1, 1)] * 5, 4, breadth=10, rng=np.random.default_rng(0))
    # (1, 1) leads to the hub 0, which is expanded by 10 of its 3000 transitions, all of one pair.
    assert np.isfinite(case.q_targets(sub, "greedy")).all()
    hub = case.naive.transitions(0, 0)
    mean_reward = sum(t[2] * f for t, f in hub.items()) / sum(hub.values())
    case.leaf_q[:] = 0.0
    flat = case.expand([(1, 1)] * 5, 2, breadth=10, rng=np.random.default_rng(0))
    got = case.q_targets(flat, "behaviour")
    np.testing.assert_allclose(got, 0.5 + 0.9 * mean_reward, rtol=0, atol=TOLERANCE)


@settings(max_examples=scaled(30, 10))
@given(cases(), depths)
def test_the_limited_oracle_without_a_limit_is_the_exact_one(case, depth):
    for s, a in case.pairs[:4]:
        ((_, kept),) = enumerate_kept(case.naive, s, a, min(depth, 3), 0)
        for name in RULES:
            oracle = case.oracle(name)
            exact = oracle.target(s, a, min(depth, 3))
            assert oracle.limited_target(s, a, kept) == pytest.approx(exact, abs=TOLERANCE)


# --- the prior ---


def test_prior_by_hand():
    """0 -> 1; at 1 an outcome of 8 was met once, and one of 4 and 0 half of 6 times; q is 1 and 2.

    Prior 2 makes of them (8 + 2 * 1) / 3 and (6 * 2 + 2 * 2) / 8; at the root, 5 and 1 times 3.5
    are a mean of two outcomes, as ever.
    """
    hub = [(1, 0, 8.0, True, 2, 1), (1, 1, 4.0, True, 2, 3), (1, 1, 0.0, True, 2, 3)]
    case = Case(2, [(0, 0, 0.0, False, 1, 1), (0, 0, 5.0, True, 2, 1), *hub], gamma=1.0)
    case.leaf_q[0], case.leaf_q[1], case.prior = [100.0, 100.0], [1.0, 2.0], 2.0
    case.selector_q[1], case.policy[1] = [0.0, 1.0], [0.25, 0.75]
    sub = case.expand([(0, 0)], 2)
    lucky, usual = 10 / 3, 2.0
    for name, value in (
        ("greedy", lucky),
        ("double", usual),
        ("policy", 0.25 * lucky + 0.75 * usual),
        ("behaviour", (1 * lucky + 6 * usual) / 7),
    ):
        np.testing.assert_allclose(case.q_targets(sub, name), [(5 + value) / 2], rtol=1e-12)
    one_deep = case.expand([(0, 0)], 1)  # whose pairs are roots: nothing is mixed in
    np.testing.assert_allclose(case.q_targets(one_deep, "greedy"), [(5 + 2.0) / 2])


def test_prior_of_pmfs_by_hand():
    """On -2 .. 2: an end with reward 2 met once, and a prior of 3 that has its mass on -1 and 0."""
    case = Case(1, [(0, 0, 0.0, False, 1, 1), (1, 0, 2.0, True, 2, 1)], gamma=1.0)
    case.leaf_pmf[0], case.leaf_pmf[1], case.prior = [1, 0, 0, 0, 0], [0, 0.5, 0.5, 0, 0], 3.0
    sub = case.expand([(0, 0)], 2)
    for name in RULES:
        got = case.categorical_targets(sub, name)
        np.testing.assert_allclose(got, [[0, 3 / 8, 3 / 8, 0, 1 / 4]], rtol=0, atol=1e-12)


@settings(max_examples=scaled(40, 10))
@given(cases(), depths)
def test_without_a_prior_every_bit_stays(case, depth):
    """Left out, 0 and one too small to move a float64 give the same scalars, bit for bit."""
    sub = case.expand(case.pairs, depth)
    leaf = case.leaf_q[case.rows(sub)]
    plain = q_targets(sub, leaf, case.gamma)
    np.testing.assert_array_equal(q_targets(sub, leaf, case.gamma, prior=0.0), plain)
    np.testing.assert_array_equal(q_targets(sub, leaf, case.gamma, prior=1e-300), plain)


@settings(max_examples=scaled(40, 10))
@given(cases(), depths)
def test_a_large_prior_leaves_the_network_below_the_root(case, depth):
    case.prior = 1e12
    deep, flat = case.expand(case.pairs, depth), case.expand(case.pairs, 1)
    for name in ("greedy", "double", "policy"):
        expected = case.q_targets(flat, name)
        np.testing.assert_allclose(case.q_targets(deep, name), expected, rtol=0, atol=1e-9)


def test_a_prior_out_of_range_is_refused():
    case = Case(2, CORNERS["many outcomes per pair"][1])
    sub = case.expand(case.pairs, 2)
    for bad in (-0.5, np.inf, np.nan):
        case.prior = bad
        for call in (case.q_targets, case.categorical_targets):
            with raises_naming(bad, ValueError):
                call(sub, "greedy")
        with raises_naming(bad, ValueError):
            prune(sub, "behaviour", prior=bad)


# --- inside of a subgraph ---


@settings(max_examples=scaled(60, 15))
@given(cases(), depths)
def test_every_expanded_pair_has_the_target_of_its_depth(case, depth):
    """pair_q_values: pairs of level k are worth G_{depth - k}, those below the roots with prior."""
    sub = case.expand(case.pairs, depth)
    values = pair_q_values(sub, case.leaf_q[case.rows(sub)], case.gamma, prior=case.prior)
    oracle, rows = case.oracle("greedy"), case.rows(sub)
    assert values.shape == sub.pair_action.shape
    nodes = np.repeat(sub.nodes[sub.vertex_row], np.diff(sub.vertex_pairs))  # as documented
    assert len(nodes) == len(values) - sub.num_roots
    np.testing.assert_array_equal(values[: sub.num_roots], case.q_targets(sub, "greedy"))
    for level in range(1, depth):
        for v in range(sub.level_vertices[level], sub.level_vertices[level + 1]):
            s = int(rows[sub.vertex_row[v]])
            for p in range(sub.vertex_pairs[v], sub.vertex_pairs[v + 1]):
                action = int(sub.pair_action[p])
                count = sum(case.naive.transitions(s, action).values())
                expected = oracle.target(s, action, depth - level)
                expected = count * expected + case.prior * case.leaf_q[s, action]
                expected /= count + case.prior
                assert nodes[p - sub.num_roots] == sub.nodes[sub.vertex_row[v]]
                assert values[p] == pytest.approx(expected, abs=TOLERANCE)


def pruned_targets(case, sub, name):
    """Scalar and categorical targets over what is left of sub, NaN in all leaves that go unread."""
    asked = []

    def best_actions(nodes):
        asked.extend(nodes.tolist())
        states = [case.state_of[int(n)] for n in nodes]
        return case.selector_q[states].argmax(1)

    pruned, leaf_read = prune(
        sub, RULES[name][0], best_actions if name == "double" else None, case.prior
    )
    assert len(set(asked)) == len(asked)  # no state is evaluated twice
    assert leaf_read.dtype == np.bool_
    assert leaf_read.shape == pruned.nodes.shape
    assert len(np.unique(pruned.nodes)) == len(pruned.nodes)
    assert set(pruned.nodes.tolist()) <= set(sub.nodes.tolist())

    whole_q, whole_pmf = case.leaf_q, case.leaf_pmf
    unread = case.rows(pruned)[~leaf_read]
    case.leaf_q, case.leaf_pmf = whole_q.copy(), whole_pmf.copy()
    case.leaf_q[unread], case.leaf_pmf[unread] = np.nan, np.nan
    targets = case.q_targets(pruned, name), case.categorical_targets(pruned, name)
    case.leaf_q, case.leaf_pmf = whole_q, whole_pmf
    return targets


@settings(max_examples=scaled(100, 20))
@given(cases(), depths, st.integers(0, 2), st.integers(0, 1000))
def test_pruning_changes_no_target(case, depth, breadth, seed):
    sub = case.expand(case.pairs, depth, breadth, np.random.default_rng(seed))
    for name in ("double", "behaviour", "behaviour, double"):
        scalar, categorical = pruned_targets(case, sub, name)
        np.testing.assert_allclose(scalar, case.q_targets(sub, name), rtol=0, atol=1e-12)
        expected = case.categorical_targets(sub, name)
        np.testing.assert_allclose(categorical, expected, rtol=0, atol=1e-12)


def test_pruning_by_hand():
    """0 -> 1 -> 2 -> 3 by action 0, with a side branch from 1 by action 1 to 4."""
    chain = [(0, 0, 0.0, False, 1), (1, 0, 0.0, False, 2), (2, 0, 0.0, False, 3)]
    case = Case(2, [*chain, (1, 1, 0.0, False, 4), (4, 0, 0.0, False, 5)])
    sub = case.expand([(0, 0)], 3)
    for online, path, read in (
        ([0, 0, 0, 0, 0, 0], [1, 2, 3], [3]),  # along the chain, to its end
        ([0, 0, 1, 0, 0, 0], [1, 2], [2]),  # action 1 was never seen at 2
        ([0, 1, 0, 0, 0, 0], [1, 4, 5], [5]),  # along the branch
    ):
        best = dict(enumerate(online))
        pruned, leaf_read = prune(
            sub, "double", lambda ids, b=best: np.array([b[case.state_of[int(i)]] for i in ids])
        )
        assert sorted(case.rows(pruned).tolist()) == path
        assert case.rows(pruned)[leaf_read].tolist() == read
    pruned, leaf_read = prune(sub, "behaviour")
    assert sorted(case.rows(pruned).tolist()) == [3, 5]
    assert leaf_read.all()


def copied_by_pickle(subgraphs):
    return pickle.loads(pickle.dumps(subgraphs))


def test_prune_rejects():
    sub = Case(2, CORNERS["two-cycle"][1]).expand([(0, 0)], 2)
    for bad in ("greedy", "policy", "best"):
        with raises_naming(bad, ValueError):
            prune(sub, bad, lambda nodes: nodes * 0)
    with raises_naming("best_actions", ValueError):
        prune(sub, "double")
    for wrong in (
        lambda nodes: nodes * 0 - 1,
        lambda nodes: nodes[:0],
        lambda nodes: nodes[:, None],
    ):
        with raises_naming("best", ValueError):
            prune(sub, "double", wrong)
    with raises_naming("integers for best_actions", TypeError):
        prune(sub, "double", lambda nodes: nodes * 0.5)


@pytest.mark.parametrize("change", [lambda pruned: pruned, pad, copy.copy, copied_by_pickle])
@pytest.mark.parametrize("made_for", [("double", 0.0), ("behaviour", 0.0), ("behaviour", 2.0)])
def test_pruned_subgraphs_are_for_one_rule_and_prior(made_for, change):
    case = Case(2, CORNERS["many outcomes per pair"][1])
    sub = case.expand(case.pairs, 3)
    best = case.selector_q[case.rows(sub)].argmax(1)
    row_of = {node: row for row, node in enumerate(sub.nodes)}
    rule, prior = made_for
    pruned, _ = prune(sub, rule, lambda nodes: best[[row_of[n] for n in nodes]], prior)
    pruned = change(pruned)
    for other in RULES:
        for case.prior in (0.0, 2.0):
            calls = [case.q_targets, case.categorical_targets]
            if RULES[other][0] in ("double", "behaviour"):
                calls.append(lambda pruned, other: prune(pruned, RULES[other][0], prior=case.prior))
            for call in calls[: 2 if (RULES[other][0], case.prior) == made_for else 3]:
                if (RULES[other][0], case.prior) == made_for:
                    np.testing.assert_allclose(
                        call(pruned, other), call(sub, other), rtol=0, atol=1e-12
                    )
                else:
                    with raises_naming(f"Require rule and prior {made_for}", ValueError):
                        call(pruned, other)


def test_a_tensor_selects_and_a_policy_sums_to_1():
    case = Case(2, CORNERS["two-cycle"][1])
    sub = case.expand([(0, 0)], 2)
    rows = case.rows(sub)
    leaf_q, selector = case.leaf_q[rows], case.selector_q[rows]
    np.testing.assert_array_equal(
        q_targets(sub, leaf_q, 0.9, "double", torch.from_numpy(selector)),
        q_targets(sub, leaf_q, 0.9, "double", selector),
    )
    policy = case.policy[rows]
    policy[-1] *= 15
    with raises_naming("rows sum to 1", ValueError):
        q_targets(sub, leaf_q, 0.9, "policy", policy=policy)


# --- trajectories ---


class Ring:
    """A replay ring of `capacity` rows after a stream of steps; state s is node 7 s + 3.

    steps: (action, reward, end, next state, state after a reset); end is "", "done" or "cut".
    """

    prior = 0.0  # of all targets; a test may set it

    def __init__(self, steps, capacity, num_states=4, num_actions=3, gamma=0.9, seed=0):
        self.arguments = (steps, capacity, num_states, num_actions, gamma, seed)
        self.num_actions, self.gamma = num_actions, gamma
        self.state, self.action, self.next_state = (np.zeros(capacity, np.int64) for _ in range(3))
        self.reward = np.zeros(capacity)
        self.done, self.cut = np.zeros(capacity, bool), np.zeros(capacity, bool)
        state = 0
        for i, (action, reward, end, next_state, reset_state) in enumerate(steps):
            t = i % capacity
            self.state[t], self.action[t], self.reward[t] = state, action, reward
            self.next_state[t], self.done[t] = next_state, end == "done"
            # The newest row is always cut; the cut is lifted when its successor arrives.
            self.cut[t] = True
            if i > 0 and steps[i - 1][2] == "":
                self.cut[(i - 1) % capacity] = False
            state = reset_state if end else next_state
        self.filled = np.arange(min(len(steps), capacity))

        rng = np.random.default_rng(seed)
        shape = (num_states, num_actions)
        self.leaf_q, self.selector_q = rng.normal(size=shape), rng.normal(size=shape)
        self.policy = rng.dirichlet(np.ones(num_actions), size=num_states)
        self.leaf_pmf = rng.dirichlet(np.ones(5), size=shape)
        self.support = np.linspace(-2, 2, 5)

    def __repr__(self):
        return f"Ring{self.arguments}"

    def columns(self):
        return (
            7 * self.state + 3,
            self.action,
            self.reward,
            7 * self.next_state + 3,
            self.done,
            self.cut,
        )

    def targets(self, starts, depth, name, categorical=False):
        rule, online = RULES[name]
        sub = trajectory_subgraphs(np.asarray(starts), depth, *self.columns())
        assert sub.num_roots == len(starts)
        assert sub.nodes.dtype == np.int64
        assert len(np.unique(sub.nodes)) == len(sub.nodes)
        rows = (np.asarray(sub.nodes) - 3) // 7
        selector = self.selector_q[rows] if online else None
        policy = self.policy[rows] if rule == "policy" else None
        if not categorical:
            return q_targets(sub, self.leaf_q[rows], self.gamma, rule, selector, policy, self.prior)
        return categorical_targets(
            sub,
            torch.from_numpy(self.leaf_pmf[rows]),
            torch.from_numpy(self.support),
            self.gamma,
            rule=rule,
            selector_q=None if selector is None else torch.from_numpy(selector),
            policy=None if policy is None else torch.from_numpy(policy),
            prior=self.prior,
        ).numpy()

    def expected(self, starts, depth, name, categorical=False):
        rule, online = RULES[name]
        values = (
            Categoricals(self.leaf_pmf, self.support, self.gamma)
            if categorical
            else Scalars(self.leaf_q, self.gamma)
        )
        oracle = Oracle(
            NaiveGraph(self.num_actions, (1,)),
            values,
            rule,
            self.selector_q if online else None,
            self.policy,
            self.prior,
        )
        rows = (self.state, self.action, self.reward, self.next_state, self.done, self.cut)
        targets = [oracle.trajectory_target(int(t), depth, *rows) for t in starts]
        return targets, oracle.tied

    def assert_matches(self, depth):
        for name in RULES:
            for categorical in (False, True):
                expected, tied = self.expected(self.filled, depth, name, categorical)
                got = self.targets(self.filled, depth, name, categorical)
                if categorical:
                    assert_distributions(got)
                if not tied:
                    np.testing.assert_allclose(got, expected, 0, TOLERANCE, err_msg=name)


@st.composite
def rings(draw):
    step = st.tuples(
        st.integers(0, 2),
        st.sampled_from([0.0, 1.0, -0.75, 0.3, 2.6]),
        st.sampled_from(["", "", "", "done", "cut"]),
        st.integers(0, 3),
        st.integers(0, 3),
    )
    ring = Ring(
        draw(st.lists(step, min_size=1, max_size=20)),
        draw(st.integers(1, 9)),
        gamma=draw(st.sampled_from([0.9, 1.0, 0.5])),
        seed=draw(st.integers(0, 1000)),
    )
    ring.prior = draw(st.sampled_from([0.0, 0.0, 0.5, 3.0]))
    return ring


@settings(max_examples=scaled(300, 30))
@given(rings(), st.integers(1, 6))
def test_random_trajectories(ring, depth):
    ring.assert_matches(depth)


@settings(max_examples=scaled(60, 15))
@given(rings(), st.integers(1, 6))
def test_pruning_a_trajectory_changes_no_target(ring, depth):
    sub = trajectory_subgraphs(ring.filled, depth, *ring.columns())
    whole = (sub.nodes - 3) // 7
    online = ring.selector_q.argmax(1)
    pruned, leaf_read = prune(sub, "double", lambda n: online[(n - 3) // 7], ring.prior)
    rows = (pruned.nodes - 3) // 7
    leaf = np.where(leaf_read[:, None], ring.leaf_q[rows], np.nan)
    got = q_targets(pruned, leaf, ring.gamma, "double", ring.selector_q[rows], prior=ring.prior)
    expected = q_targets(
        sub, ring.leaf_q[whole], ring.gamma, "double", ring.selector_q[whole], prior=ring.prior
    )
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12)


STEPS = [
    (0, 1.0, "", 1, 0),
    (1, 2.0, "", 2, 0),
    (2, 4.0, "", 3, 0),
    (0, 8.0, "", 0, 0),
    (1, 16.0, "", 2, 0),
]


def test_n_step_and_tree_by_hand():
    ring = Ring(STEPS, 8, gamma=0.5)
    q = ring.leaf_q
    n_step = 1 + 0.5 * 2 + 0.25 * 4 + 0.125 * q[3].max()
    assert ring.targets([0], 3, "behaviour")[0] == pytest.approx(n_step)
    inner = max(4 + 0.5 * q[3].max(), q[2, 0], q[2, 1])
    middle = max(2 + 0.5 * inner, q[1, 0], q[1, 2])
    assert ring.targets([0], 3, "greedy")[0] == pytest.approx(1 + 0.5 * middle)
    boundary = q[3, ring.selector_q[3].argmax()]
    n_step = 1 + 0.5 * 2 + 0.25 * 4 + 0.125 * boundary
    assert ring.targets([0], 3, "behaviour, double")[0] == pytest.approx(n_step)


@pytest.mark.parametrize("depth", [3, 4, 9])
def test_a_cut_bootstraps_with_the_steps_that_were_summed(depth):
    steps = [STEPS[0], (*STEPS[1][:2], "cut", 2, 0), *STEPS[2:]]
    ring = Ring(steps, 8, gamma=0.5)
    expected = 1 + 0.5 * 2 + 0.25 * ring.leaf_q[2].max()
    assert ring.targets([0], depth, "behaviour")[0] == pytest.approx(expected)


@pytest.mark.parametrize("cut_too", [False, True])
def test_done_does_not_bootstrap_whether_it_is_cut_or_not(cut_too):
    steps = [STEPS[0], (*STEPS[1][:2], "done", 2, 2), *STEPS[2:]]
    ring = Ring(steps, 8, gamma=0.5)
    ring.cut[1] = cut_too
    for depth in (2, 3, 9):
        assert ring.targets([0], depth, "behaviour")[0] == pytest.approx(1 + 0.5 * 2)
        assert ring.targets([1], depth, "greedy")[0] == pytest.approx(2.0)


def test_the_newest_row_bootstraps():
    ring = Ring(STEPS, 8, gamma=0.5)
    expected = 8 + 0.5 * 16 + 0.25 * ring.leaf_q[2].max()
    assert ring.targets([3], 4, "behaviour")[0] == pytest.approx(expected)


def test_a_trajectory_goes_round_the_end_of_the_ring():
    """Capacity 3: rows 0 and 1 hold steps 3 and 4, row 2 still holds step 2."""
    ring = Ring(STEPS, 3, gamma=0.5)
    np.testing.assert_array_equal(ring.reward, [8.0, 16.0, 4.0])
    expected = 4 + 0.5 * 8 + 0.25 * 16 + 0.125 * ring.leaf_q[2].max()
    assert ring.targets([2], 9, "behaviour")[0] == pytest.approx(expected)
    ring.assert_matches(9)


def test_repeated_and_no_starts():
    ring = Ring(STEPS, 8)
    single = [ring.targets([t], 3, "greedy")[0] for t in (2, 0, 2, 2)]
    np.testing.assert_array_equal(ring.targets([2, 0, 2, 2], 3, "greedy"), single)
    assert ring.targets(np.zeros(0, np.int64), 3, "greedy").shape == (0,)
    assert ring.targets(np.zeros(0, np.int64), 3, "greedy", categorical=True).shape == (0, 5)


def test_a_replay_may_keep_small_dtypes():
    ring = Ring(STEPS, 8)
    expected = ring.targets([0, 3], 3, "greedy")
    node, action, reward, next_node, done, cut = ring.columns()
    small = (
        node.astype(np.int32),
        action.astype(np.uint8),
        reward.astype(np.float32),
        next_node.astype(np.int32),
        done.astype(np.uint8),
        cut,
    )
    sub = trajectory_subgraphs(np.array([0, 3], np.int32), 3, *small)
    rows = (np.asarray(sub.nodes) - 3) // 7
    np.testing.assert_allclose(q_targets(sub, ring.leaf_q[rows], ring.gamma), expected)


@pytest.mark.parametrize("depth", [1, 2, 4, 9])
def test_on_a_pure_chain_the_graph_is_the_trajectory(depth):
    """graph = tree and graph-mixed = n-step where every state was visited once."""
    transitions = CORNERS["chain"][1]
    case = Case(2, transitions)
    sub = case.expand([t[:2] for t in transitions], depth)
    steps = [(a, r, "done" if done else "", s2, 0) for _, a, r, done, s2, _ in transitions]
    ring = Ring(steps, 10, num_states=7, num_actions=2)
    ring.leaf_q, ring.selector_q, ring.policy = case.leaf_q, case.selector_q, case.policy
    ring.leaf_pmf = case.leaf_pmf
    starts = np.arange(len(transitions))
    for name in RULES:
        on_graph, on_ring = case.q_targets(sub, name), ring.targets(starts, depth, name)
        np.testing.assert_allclose(on_graph, on_ring, rtol=0, atol=TOLERANCE)
        on_graph = case.categorical_targets(sub, name)
        on_ring = ring.targets(starts, depth, name, categorical=True)
        np.testing.assert_allclose(on_graph, on_ring, rtol=0, atol=TOLERANCE)


# --- invalid arguments ---


def test_expand_rejects():
    case = Case(2, CORNERS["two-cycle"][1])
    graph, node = case.graph, case.id_of[0]
    one, zero = np.array([node]), np.array([0])
    rng = np.random.default_rng(0)
    for depth in (0, -3):
        with raises_naming(depth, ValueError):
            graph.expand(one, zero, depth)
    with raises_naming(-2, ValueError):
        graph.expand(one, zero, 2, breadth=-2, rng=rng)
    with raises_naming("rng", ValueError):
        graph.expand(one, zero, 2, breadth=17)
    with raises_naming(17, ValueError):
        graph.expand(one, zero, 2, breadth=17)
    for bad in (-1, 99, 2**40):
        with raises_naming(bad):
            graph.expand(np.array([node, bad]), np.array([0, 0]), 2)
    for bad in (-1, 2, 77):
        with raises_naming(bad):
            graph.expand(np.array([node, node]), np.array([0, bad]), 2)
    with raises_naming(3, ValueError):
        graph.expand(np.full(3, node), zero, 2)
    assert graph.check_valid() == []


def test_expand_rejects_a_freed_node():
    case = Case(1, [(0, 0, 1.0, False, 1), (1, 0, 0.0, False, 0)], num_states=3)
    graph, isolated = case.graph, case.id_of[2]
    graph.add(case.id_of[0], 0, 9.0, isolated, False)
    assert isolated in graph.remove(case.id_of[0], 0, 9.0, isolated, False)
    with raises_naming(isolated):
        graph.expand(np.array([isolated]), np.array([0]), 1)


def test_q_targets_rejects():
    case = Case(2, CORNERS["many outcomes per pair"][1])
    sub = case.expand(case.pairs, 2)
    leaf = case.leaf_q[case.rows(sub)]
    with raises_naming("best", ValueError):
        q_targets(sub, leaf, 0.9, rule="best")
    with raises_naming("selector_q", ValueError):
        q_targets(sub, leaf, 0.9, rule="double")
    with raises_naming("policy", ValueError):
        q_targets(sub, leaf, 0.9, rule="policy")
    for bad in (leaf[:-1], np.vstack([leaf, leaf])):
        with raises_naming(len(bad), ValueError):
            q_targets(sub, bad, 0.9)
        with raises_naming(len(bad), ValueError):
            q_targets(sub, leaf, 0.9, rule="double", selector_q=bad)
        with raises_naming(len(bad), ValueError):
            q_targets(sub, leaf, 0.9, rule="policy", policy=bad)
    wide = np.hstack([leaf, leaf])
    with raises_naming(4, ValueError):
        q_targets(sub, leaf, 0.9, rule="double", selector_q=wide)
    with pytest.raises((ValueError, TypeError)):
        q_targets(sub, leaf.ravel(), 0.9)


def test_categorical_targets_rejects():
    case = Case(2, CORNERS["many outcomes per pair"][1])
    sub = case.expand(case.pairs, 2)
    rows = case.rows(sub)
    pmf, selector = torch.from_numpy(case.leaf_pmf[rows]), torch.from_numpy(case.selector_q[rows])
    support = torch.from_numpy(case.support)
    with raises_naming("best", ValueError):
        categorical_targets(sub, pmf, support, 0.9, rule="best")
    with raises_naming("selector_q", ValueError):
        categorical_targets(sub, pmf, support, 0.9, rule="double")
    with raises_naming("policy", ValueError):
        categorical_targets(sub, pmf, support, 0.9, rule="policy")
    with raises_naming(len(rows) - 1, ValueError):
        categorical_targets(sub, pmf[:-1], support, 0.9, rule="greedy")
    with raises_naming(len(rows) - 1, ValueError):
        categorical_targets(sub, pmf, support, 0.9, rule="double", selector_q=selector[:-1])
    with raises_naming(4, ValueError):
        categorical_targets(sub, pmf, support[:4], 0.9, rule="greedy")
    uneven = support.clone()
    uneven[-1] *= 3
    for wrong in (uneven, support.flip(0), support * 0, support * torch.nan):
        with raises_naming("equally spaced and increasing", ValueError):
            categorical_targets(sub, pmf, wrong, 0.9, rule="greedy")
    policy = torch.full(pmf.shape[:2], 1 / pmf.shape[1])
    for wrong in (policy * 2, policy - 1, policy * torch.tensor([3.0, -1.0])):
        with raises_naming("Require a policy >= 0 whose rows sum to 1", ValueError):
            categorical_targets(sub, pmf, support, 0.9, rule="policy", policy=wrong)
    for wrong in (pmf.log(), pmf * 2, pmf * 0):
        with raises_naming("Require leaf_pmf whose rows sum to 1", ValueError):
            categorical_targets(sub, wrong, support, 0.9, rule="policy", policy=policy)


@pytest.mark.parametrize(
    ("dtype", "v_max"),
    [(torch.int64, 25), (torch.bfloat16, 10), (torch.float16, 10), (torch.float32, 10)],
)
def test_a_support_may_be_of_any_dtype(dtype, v_max):
    case = Case(2, CORNERS["two-cycle"][1])
    sub = case.expand([(0, 0)], 2)
    pmf = torch.full((len(sub.nodes), 2, 51), 1 / 51)
    support = torch.linspace(-v_max, v_max, 51).to(dtype)
    targets = categorical_targets(sub, pmf, support, 0.9, rule="greedy")
    np.testing.assert_allclose(targets.sum(1), 1, rtol=1e-5)


def test_trajectory_subgraphs_rejects():
    columns = Ring(STEPS, 8).columns()
    starts = np.array([0])
    for depth in (0, -3):
        with raises_naming(depth, ValueError):
            trajectory_subgraphs(starts, depth, *columns)
    for bad in (-1, 8, 1000):
        with raises_naming(bad):
            trajectory_subgraphs(np.array([0, bad]), 2, *columns)
    for i in range(6):
        short = [c[:5] if i == k else c for k, c in enumerate(columns)]
        with raises_naming(5, ValueError):
            trajectory_subgraphs(starts, 2, *short)


def test_targets_reject_a_network_with_too_few_actions():
    """Pairs of action 1 and leaf values of action 0 alone: going on would read and write wildly."""
    case = Case(2, CORNERS["many outcomes per pair"][1])
    for depth in (1, 2):
        sub = case.expand([(0, 0), (1, 1), (0, 1)], depth)  # the last was never seen
        rows = case.rows(sub)
        with raises_naming(1, (ValueError, IndexError)):
            q_targets(sub, case.leaf_q[rows][:, :1], 0.9)
        pmf, support = torch.from_numpy(case.leaf_pmf[rows]), torch.from_numpy(case.support)
        with raises_naming(1, (ValueError, IndexError)):
            categorical_targets(sub, pmf[:, :1], support, 0.9, rule="greedy")


def test_targets_reject_a_trajectory_with_more_actions_than_the_network():
    """STEPS take action 2; a network with two actions has no third column."""
    sub = trajectory_subgraphs(np.array([0]), 4, *Ring(STEPS, 8).columns())
    with raises_naming(2, (ValueError, IndexError)):
        q_targets(sub, np.zeros((len(sub.nodes), 2)), 0.9)


@pytest.mark.parametrize("column", [1, 3])
def test_a_trajectory_through_an_unfilled_row_is_rejected(column):
    """-1 as an action or a next node of a row that is followed; in other rows it does no harm."""
    columns = [c.copy() for c in Ring(STEPS, 8).columns()]
    columns[column][2] = -1
    sub = trajectory_subgraphs(np.array([3]), 2, *columns)
    assert np.isfinite(q_targets(sub, np.zeros((len(sub.nodes), 3)), 0.9)).all()
    with raises_naming(-1):
        sub = trajectory_subgraphs(np.array([0]), 4, *columns)
        q_targets(sub, np.zeros((len(sub.nodes), 3)), 0.9)
