"""Targets of gbcore against the recursion of naive.py, and against cases worked by hand."""

import doctest
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import RULES, TOLERANCE, Case, Leaves, cases, graph_of, raises_naming, scaled
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from naive import NaiveGraph, enumerate_kept

from gbcore import Replay, categorical_targets, q_targets, rows_read, trajectory_subgraphs
from gbcore import subgraph as worked_example
from gbcore.categorical import back_up
from gbcore.kernels import expand
from gbcore.run.padding import pad
from gbcore.targets import pair_q_values

depths = st.integers(1, 5)

# Transitions (s, a, r, done, s2, count) of small graphs.
TWO_CYCLE = [(0, 0, 1.0, False, 1, 1), (1, 0, -0.5, False, 0, 2)]
CHAIN = [(k, k % 2, 0.1 * k, k == 5, k + 1, 1) for k in range(6)]
MANY_OUTCOMES = [(0, 0, 0.1 * k, k % 3 == 0, k, 1 + k % 4) for k in range(8)] + [
    (k, k % 2, -0.2, False, 7 - k, 1) for k in range(1, 8)
]


def assert_distributions(pmf, tolerance=1e-12):
    """Rows of non-negative numbers that sum to 1."""
    assert pmf.min(initial=0.0) >= -tolerance
    np.testing.assert_allclose(pmf.sum(1), 1.0, rtol=0, atol=tolerance)


def assert_targets(case, sub, targets_of):
    """Every rule, scalar and categorical, over sub, against targets_of(oracle)."""
    for name in RULES:
        for categorical in (False, True):
            oracle = case.oracle(name, categorical)
            expected = targets_of(oracle)
            got = (case.categorical_targets if categorical else case.q_targets)(sub, name)
            assert got.dtype == np.float64
            assert got.shape == (len(expected), *[len(case.support)] * categorical)
            if categorical:
                assert_distributions(got)
            if not oracle.tied:
                expected = np.reshape(expected, got.shape)  # also where there are no pairs
                np.testing.assert_allclose(got, expected, 0, TOLERANCE, err_msg=name)


def assert_exact(case, depth):
    """From every pair of the case, of whatever else is in the batch."""
    pairs = case.pairs + case.pairs[::-2]  # some twice
    sub = case.expand(pairs, depth)
    assert sub.num_roots == len(pairs)
    assert sub.nodes.dtype == np.int64
    assert len(np.unique(sub.nodes)) == len(sub.nodes)
    assert_targets(case, sub, lambda oracle: [oracle.target(s, a, depth) for s, a in pairs])


@settings(max_examples=scaled(300, 100))
@given(cases() | cases(max_actions=1), depths)
def test_random_graphs(case, depth):
    assert_exact(case, depth)


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
def test_leaves_are_within_reach(case, depth):
    """From one root: nothing but the root and what lies within depth steps of it."""
    for s, a in case.pairs[len(case.pairs) // 2 :][:1]:
        within, frontier = {s}, case.naive.transitions(s, a)
        for _ in range(depth):
            reached = {t[4] for t in frontier}
            within |= reached
            frontier = [t for state in reached for t in case.naive.transitions(state)]
        assert set(case.rows(case.expand([(s, a)], depth)).tolist()) <= within


def test_the_graph_may_change_after_expand():
    """A subgraph is a snapshot: targets are often computed after the replay has moved on."""
    case = Case(2, CHAIN)
    sub = case.expand([(0, 0)], 4)
    rows = case.rows(sub)
    before = q_targets(sub, case.leaf_q[rows], case.gamma)
    case.graph.add(case.id_of[1], 0, 100.0, case.id_of[0], False)
    case.graph.add(case.id_of[1], 1, 100.0, case.id_of[0], False)
    assert q_targets(sub, case.leaf_q[rows], case.gamma) == before


def test_the_worked_example():
    assert doctest.testmod(worked_example).failed == 0
    assert "max(2.5, 1) = 2.5" in worked_example.__doc__


def test_inputs_may_be_views_which_are_not_written_to_and_carry_no_gradient():
    """A network's output is often a transposed or strided view."""
    case = Case(2, MANY_OUTCOMES)
    sub = case.expand(case.pairs, 2)
    q, selector, pmf = (x[case.rows(sub)] for x in (case.leaf_q, case.selector_q, case.leaf_pmf))
    tensor, online = torch.from_numpy(pmf), torch.from_numpy(selector)
    for view in (q, np.asfortranarray(q), np.repeat(q, 2, axis=1)[:, ::2]):
        got = q_targets(sub, view, case.gamma, "double", online)
        np.testing.assert_array_equal(got, case.q_targets(sub, "double"))
    expected = case.categorical_targets(sub, "double")
    for view in (tensor, tensor.permute(2, 0, 1).contiguous().permute(1, 2, 0).requires_grad_()):
        online = online.t().contiguous().t()
        support = torch.from_numpy(case.support)
        got = categorical_targets(sub, view, support, case.gamma, selector_q=online)
        assert not got.requires_grad
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12)
    for x, kept in ((q, case.leaf_q), (selector, case.selector_q), (pmf, case.leaf_pmf)):
        np.testing.assert_array_equal(x, kept[case.rows(sub)])


FEW = [(0, 0, 1.0, False, 1, 3), (0, 0, -2.0, False, 2, 1), (0, 0, 8.0, True, 3, 4)]
BAD = [(0, 0, 0.0, False, 1), (1, 0, -5.0, True, 2)]
END = [  # the episode ended in state 1, which goes on when it is reached otherwise
    (0, 0, 1.0, True, 1, 2), (0, 1, 0.0, False, 1, 1), (1, 0, 5.0, False, 2, 1),
    (1, 1, -1.0, False, 0, 1),
]  # fmt: skip


@pytest.mark.parametrize(
    ("transitions", "num_actions", "depth", "names", "expected"),
    [
        (TWO_CYCLE, 1, 1, RULES, 1 + 0.5 * 10),
        (TWO_CYCLE, 1, 2, RULES, 1 + 0.5 * (-0.5 + 0.5 * 2)),
        (TWO_CYCLE, 1, 3, RULES, 1 + 0.5 * (-0.5 + 0.5 * (1 + 0.5 * 10))),
        (FEW, 1, 1, RULES, (3 * (1 + 0.5 * 10) + (-2 + 0.5 * 3) + 4 * 8) / 8),
        (END, 2, 1, RULES, 1.0),  # a done transition does not look behind the end
        (END, 2, 5, RULES, 1.0),
        # The network overestimates action 0 of state 1; nested it does not hide the unseen one.
        (BAD, 2, 1, ["greedy"], 0.5 * 10),
        (BAD, 2, 2, ["greedy"], 0.5 * 1),
        (BAD, 2, 2, ["behaviour"], 0.5 * -5),
    ],
)
def test_targets_by_hand(transitions, num_actions, depth, names, expected):
    """Of action 0 in state 0."""
    case = Case(num_actions, transitions, gamma=0.5)
    leaves = np.array([[2.0, 2.0], [10.0, 1.0], [3.0, 3.0], [7.0, 7.0]])
    case.leaf_q = leaves[: case.num_states, :num_actions]
    for name in names:
        got = case.q_targets(case.expand([(0, 0)], depth), name)
        np.testing.assert_allclose(got, [expected], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("pmf", "reward", "gamma", "done", "expected"),
    [
        # Atoms land exactly on support points: a shift by one.
        ([0, 0.25, 0.5, 0.25, 0], 1.0, 1.0, False, [0, 0, 0.25, 0.5, 0.25]),
        # Halved: -1, -0.5, 0, 0.5, 1.
        ([0.2, 0.2, 0.2, 0.2, 0.2], 0.0, 0.5, False, [0, 0.3, 0.4, 0.3, 0]),
        # -0.5, 0.5, 1.5, and 2.5 and 3.5 which are clipped.
        ([0.1, 0.2, 0.3, 0.2, 0.2], 1.5, 1.0, False, [0, 0.05, 0.15, 0.25, 0.55]),
        # Done: the pmf of the reward alone.
        ([0.2, 0.2, 0.2, 0.2, 0.2], -0.25, 0.9, True, [0, 0.25, 0.75, 0, 0]),
    ],
)
def test_projection_by_hand(pmf, reward, gamma, done, expected):
    """Of a pair with one outcome that leads to the distribution pmf, on -2, -1, 0, 1, 2."""
    case = Case(1, [(0, 0, reward, done, 1)], gamma=gamma)
    case.leaf_pmf[1] = pmf
    got = case.categorical_targets(case.expand([(0, 0)], 1), "greedy")
    np.testing.assert_allclose(got, [expected], rtol=0, atol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-12), (np.float32, 1e-5)])
def test_mass_is_kept_on_the_support_of_rainbow(dtype, tolerance):
    """51 atoms on [-10, 10] are 0.4 apart, not exact in binary: rounding decides what is on one."""
    rng = np.random.default_rng(1)
    rewards = [-0.8, -0.4, 0.0, 0.4, 0.8, 1.0]
    pairs = 2 * [(s, a) for s in range(10) for a in range(3)]
    transitions = {(*p, float(rng.choice(rewards)), False, int(rng.integers(10)), 2) for p in pairs}
    case = Case(3, sorted(transitions), gamma=1.0)
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
    assert padded.pair_nodes.shape == padded.pair_action.shape
    np.testing.assert_array_equal(padded.pair_nodes[: sub.num_roots], sub.root_nodes)
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


# --- limited breadth ---


def all_samples(case, pair, depth, breadth):
    """Probabilities [N] of all expansions of a pair; what every rule makes of them, scalars [N, 5]
    and then distributions [N, 5 * n_atoms]; and whether rounding decided some greedy choice.
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
            assert distance <= TOLERANCE, f"no sample explains the targets of {pair}"


# Hub 1 has seven transitions that differ in count, action and outcome; some lead on.
BUSY = [
    (0, 0, 0.1, False, 1, 2), (0, 0, 0.4, False, 2, 1), (1, 0, 1.0, False, 2, 1),
    (1, 0, 0.2, False, 3, 4), (1, 0, -0.3, True, 3, 2), (1, 1, 0.6, False, 1, 3),
    (2, 0, 0.5, False, 1, 6), (2, 1, -0.7, False, 3, 1), (3, 1, 0.9, False, 2, 2),
]  # fmt: skip


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


def test_exponential_variates_are_minus_a_logarithm():
    random = np.random.default_rng(0).integers(2**64, size=scaled(20_000), dtype=np.uint64)
    corners = [0, 1 << 12, 2**63, 2**63 - 1, 2**64 - 1]
    bits = np.append(random, np.array(corners, np.uint64))
    found = np.array([expand.exponential(word) for word in bits])
    exact = -np.log1p(((bits >> np.uint64(12)).astype(np.float64) + 0.5) / 2.0**52 - 1)
    assert (found > 0).all()
    np.testing.assert_allclose(found, exact, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("size", "breadth"), [(2, 1), (64, 63), (65, 1), (65, 64), (3_000, 1_234)])
def test_a_sample_has_its_size_whatever_the_weights(size, breadth):
    keys, taken = np.empty(size + 3, np.int64), np.zeros(size + 3, np.bool_)
    for weights in (np.ones(size), np.full(size, 2.0**40), np.logspace(0, 15, size)):
        for seed in range(scaled(50, 2)):
            expand.take_weighted(weights, size, breadth, np.uint64(seed), keys, taken)
            assert taken.sum() == breadth
            assert not taken[size:].any()


def test_a_sample_depends_on_its_generator_alone():
    """Not on what was expanded in between, which leaves larger arrays to work in."""
    case, rng = Case(2, BUSY), np.random.default_rng(0)

    def draw(num_roots, rng):
        return case.q_targets(case.expand([(0, 0)] * num_roots, 4, 2, rng), "greedy")

    first, many = (draw(n, np.random.default_rng(0)) for n in (10, 1000))
    np.testing.assert_array_equal(draw(1000, rng), many)
    assert (draw(1000, rng) != many).any(), "a generator moves on"
    np.testing.assert_array_equal(draw(10, np.random.default_rng(0)), first)


@settings(max_examples=scaled(60, 15))
@given(cases(), depths)
def test_every_expanded_pair_has_the_target_of_its_depth(case, depth):
    """pair_q_values: pairs of level k are worth G_{depth - k}, those below the roots with prior."""
    sub = case.expand(case.pairs, depth)
    values = pair_q_values(sub, case.leaf_q[case.rows(sub)], case.gamma, prior=case.prior)
    oracle, rows = case.oracle("greedy"), case.rows(sub)
    assert values.shape == sub.pair_action.shape
    assert sub.check_valid() == []
    nodes = sub.pair_nodes
    assert nodes.tolist()[: sub.num_roots] == [case.id_of[s] for s, _ in case.pairs]
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
                assert (nodes[p], sub.pair_count[p]) == (case.id_of[s], count)
                assert values[p] == pytest.approx(expected, abs=TOLERANCE)


def assert_other_rows_are_not_read(case, sub):
    """Scalar and categorical targets stay, bit for bit, with 0 in all rows that go unread."""
    asked = []

    def best_actions(nodes):
        asked.extend(nodes.tolist())
        return case.selector_q[[case.state_of[int(n)] for n in nodes]].argmax(1)

    for name in ("double", "behaviour", "behaviour, double"):
        asked.clear()
        best = best_actions if name == "double" else None
        rows, leaf_read = rows_read(sub, RULES[name][0], best, case.prior)
        assert len(set(asked)) == len(asked)  # no state is evaluated twice
        assert asked == sub.nodes[rows[: len(asked)]].tolist()
        assert leaf_read.shape == rows.shape == np.unique(rows).shape
        expected = case.q_targets(sub, name), case.categorical_targets(sub, name)
        states = case.rows(sub)
        read, unread = states[rows[leaf_read]], np.setdiff1d(states, states[rows])
        whole = case.leaf_q, case.leaf_pmf, case.selector_q
        case.leaf_q, case.leaf_pmf, case.selector_q = (np.zeros_like(leaf) for leaf in whole)
        case.leaf_q[read], case.leaf_pmf[read] = whole[0][read], whole[1][read]
        case.selector_q[:] = whole[2]
        if name == "double":
            case.selector_q[unread] = 0
        got = case.q_targets(sub, name), case.categorical_targets(sub, name)
        case.leaf_q, case.leaf_pmf, case.selector_q = whole
        for one, other in zip(got, expected, strict=True):
            np.testing.assert_array_equal(one, other)


@settings(max_examples=scaled(100, 20))
@given(cases(), depths, st.integers(0, 2), st.integers(0, 1000))
def test_rows_that_go_unread_change_no_target(case, depth, breadth, seed):
    few = case.pairs[:: 1 + seed % 7]  # of all pairs, few rows go unread
    sub = case.expand(few, depth, breadth, np.random.default_rng(seed))
    assert_other_rows_are_not_read(case, sub)


def test_rows_read_by_hand():
    """0 -> 1 -> 2 -> 3 by action 0, with a side branch from 1 by action 1 to 4."""
    chain = [(0, 0, 0.0, False, 1), (1, 0, 0.0, False, 2), (2, 0, 0.0, False, 3)]
    case = Case(2, [*chain, (1, 1, 0.0, False, 4), (4, 0, 0.0, False, 5)])
    sub = case.expand([(0, 0)], 3)
    states = case.rows(sub)
    for online, path, read in (
        ([0, 0, 0, 0, 0, 0], [1, 2, 3], [3]),  # along the chain, to its end
        ([0, 0, 1, 0, 0, 0], [1, 2], [2]),  # action 1 was never seen at 2
        ([0, 1, 0, 0, 0, 0], [1, 4, 5], [5]),  # along the branch
    ):
        rows, leaf_read = rows_read(
            sub, "double", lambda ids, b=online: np.array([b[case.state_of[int(i)]] for i in ids])
        )
        assert states[rows].tolist() == path
        assert states[rows[leaf_read]].tolist() == read
    rows, leaf_read = rows_read(sub, "behaviour")
    assert sorted(states[rows].tolist()) == [3, 5]
    assert leaf_read.all()


def test_rows_read_rejects():
    sub = Case(2, TWO_CYCLE).expand([(0, 0)], 2)
    for bad in (-0.5, np.inf, np.nan):
        with raises_naming(f"Require 0 <= prior < inf, got {bad}", ValueError):
            rows_read(sub, "behaviour", prior=bad)
    for bad in ("greedy", "policy", "best"):
        with raises_naming(bad, ValueError):
            rows_read(sub, bad, lambda nodes: nodes * 0)
    with raises_naming("best_actions", ValueError):
        rows_read(sub, "double")
    for wrong in (lambda nodes: -1 - nodes, lambda nodes: nodes[:0], lambda nodes: nodes[:, None]):
        with raises_naming("best", ValueError):
            rows_read(sub, "double", wrong)
    with raises_naming("integers for best_actions", TypeError):
        rows_read(sub, "double", lambda nodes: nodes * 0.5)


# --- trajectories ---


class Ring(Leaves):
    """A replay ring of `capacity` rows after a stream of steps; state s is node 7 s + 3.

    steps: (action, reward, end, next state, state after a reset); end is "", "done" or "cut".
    """

    num_actions = 3

    def __init__(self, steps, capacity, gamma=0.9, seed=0):
        self.arguments, self.gamma = (steps, capacity, gamma, seed), gamma
        loops = [(s, 0, 0.0, s, False) for s in range(4)]  # no state is forgotten
        replay, state = Replay(graph_of(4, loops, self.num_actions), capacity), 0
        for action, reward, end, next_state, reset_state in steps:
            replay.add(state, action, reward, next_state, end == "done")
            if end:
                replay.end_episode()
            state = reset_state if end else next_state
        self.ring = [getattr(replay, name) for name in replay.COLUMNS]
        self.filled = np.arange(replay.size)
        self.naive = NaiveGraph(3)
        self.state_of = {7 * s + 3: s for s in range(4)}
        self.draw_leaves(np.random.default_rng(seed), 4)

    def __repr__(self):
        return f"Ring{self.arguments}"

    def columns(self):
        state, action, reward, next_state, *ends = self.ring
        return 7 * state + 3, action, reward, 7 * next_state + 3, *ends

    def expand(self, starts, depth):
        sub = trajectory_subgraphs(np.asarray(starts), depth, *self.columns())
        assert sub.num_roots == len(starts)
        assert sub.nodes.dtype == np.int64
        assert len(np.unique(sub.nodes)) == len(sub.nodes)
        return sub

    def targets(self, starts, depth):
        return self.q_targets(self.expand(starts, depth), "behaviour")


@st.composite
def rings(draw):
    reward, state = st.sampled_from([0.0, 1.0, -0.75, 0.3, 2.6]), st.integers(0, 3)
    end = st.sampled_from(["", "", "", "done", "cut"])
    step = st.tuples(st.integers(0, 2), reward, end, state, state)
    steps, capacity = draw(st.lists(step, min_size=1, max_size=20)), draw(st.integers(1, 9))
    gamma, seed = draw(st.sampled_from([0.9, 1.0, 0.5])), draw(st.integers(0, 1000))
    ring = Ring(steps, capacity, gamma, seed)
    ring.prior = draw(st.sampled_from([0.0, 0.0, 0.5, 3.0]))
    *_, done, cut = ring.ring
    cut[draw(st.sampled_from([slice(0), done, slice(None)]))] = False  # an end needs no cut
    return ring


@settings(max_examples=scaled(300, 100))
@given(rings(), st.integers(1, 6))
def test_random_trajectories(ring, depth):
    def targets_of(oracle):
        return [oracle.trajectory_target(int(t), depth, *ring.ring) for t in ring.filled]

    sub = ring.expand(ring.filled, depth)
    assert_targets(ring, sub, targets_of)
    assert_other_rows_are_not_read(ring, sub)


# By action 0, 1 ... with reward 1, 2 ... to state 1, 2 ...
STEPS = [(k % 3, 2.0**k, "", after, 0) for k, after in enumerate((1, 2, 3, 0, 2))]


def test_repeated_and_no_starts_and_a_replay_of_small_dtypes():
    ring, starts = Ring(STEPS, 8), np.array([2, 0, 2, 2])
    single = [ring.targets([t], 3)[0] for t in starts]
    np.testing.assert_array_equal(ring.targets(starts, 3), single)
    assert ring.targets(starts[:0], 3).shape == (0,)
    assert ring.categorical_targets(ring.expand(starts[:0], 3), "greedy").shape == (0, 5)
    dtypes = (np.int32, np.uint8, np.float32, np.int32, np.uint8, np.bool_)
    small = map(np.ndarray.astype, ring.columns(), dtypes)
    sub = trajectory_subgraphs(starts.astype(np.int32), 3, *small)
    np.testing.assert_array_equal(ring.q_targets(sub, "behaviour"), single)


def test_expand_rejects():
    case = Case(2, TWO_CYCLE)
    good = {"nodes": [case.id_of[0]], "actions": [0], "depth": 2, "rng": np.random.default_rng(0)}
    for bad, named in (
        ({"depth": 0}, "got 0"),
        ({"depth": -3}, "got -3"),
        ({"breadth": -2}, "got -2"),
        ({"breadth": 17, "rng": None}, "Require rng, a np.random.Generator, for breadth 17"),
        ({"nodes": [case.id_of[0]] * 3}, "(1,) for (3,)"),
    ):
        with raises_naming(named, ValueError):
            case.graph.expand(**good | bad)


def test_targets_reject():
    case = Case(2, MANY_OUTCOMES)
    sub = case.expand(case.pairs, 2)
    rows, even = case.rows(sub), torch.from_numpy(case.support)
    q, selector, policy = case.leaf_q[rows], case.selector_q[rows], case.policy[rows]

    def scalar(leaf=q, **options):
        return q_targets(sub, leaf, 0.9, **options)

    def categorical(leaf=q, support=even, mass=0.2, rule="greedy", prior=0.0, **companions):
        pmf = torch.full((*leaf.shape, 5), mass)
        companions = {name: torch.from_numpy(x) for name, x in companions.items()}
        return categorical_targets(sub, pmf, support, 0.9, rule, **companions, prior=prior)

    for call in (scalar, categorical):
        with raises_naming("best", ValueError):
            call(rule="best")
        for bad in (-0.5, np.inf, np.nan):
            with raises_naming(f"Require 0 <= prior < inf, got {bad}", ValueError):
                call(prior=bad)
        for rule, name, good in (("double", "selector_q", selector), ("policy", "policy", policy)):
            with raises_naming(name, ValueError):
                call(rule=rule)
            for bad in (good[:-1], np.vstack([good, good]), np.hstack([good, good])):
                with raises_naming(f"got {bad.shape}", ValueError):
                    call(rule=rule, **{name: bad})
        for bad in (policy * 2, policy - 1, policy * 0 + [1.5, -0.5]):
            with raises_naming("Require a policy >= 0 whose rows sum to 1", ValueError):
                call(rule="policy", policy=bad)
        for bad in (q[:-1], np.vstack([q, q]), q.ravel()):
            with raises_naming(f"got shape ({len(bad)},", ValueError):
                call(bad)
        with raises_naming("Require 0 <= action < 1, got actions 0 to 1", ValueError):
            call(q[:, :1])
    with raises_naming("float16", TypeError):
        scalar(q.astype(np.float16))
    uneven = even * torch.tensor([1, 1, 1, 1, 3])
    for bad in (uneven, even.flip(0), even * 0, even * torch.nan):
        with raises_naming("equally spaced and increasing", ValueError):
            categorical(support=bad)
    with raises_naming("got (4,)", ValueError):
        categorical(support=even[:4])
    for mass in (-1.6, 0.4, 0.0):  # logarithms, for example
        with raises_naming("Require leaf_pmf whose rows sum to 1", ValueError):
            categorical(mass=mass)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16, torch.float16, torch.float32])
def test_a_support_may_be_of_any_dtype(dtype):
    sub = Case(2, TWO_CYCLE).expand([(0, 0)], 2)
    pmf, most = torch.full((len(sub.nodes), 2, 51), 1 / 51), 25 if dtype == torch.int64 else 10
    support = torch.linspace(-most, most, 51).to(dtype)
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


@pytest.mark.parametrize("name", ["greedy", "double", "behaviour", "behaviour, double"])
@pytest.mark.parametrize("categorical", [False, True])
def test_nan_is_the_least_value_in_whatever_order_actions_come(name, categorical):
    """State 1 was reached and never left: of its three actions one or two are NaN, or all."""
    for nan in ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)):
        for order in ((0, 1, 2), (1, 2, 0), (2, 1, 0)):
            case = Case(3, [(0, 0, 0.5, False, 1, 1)], gamma=0.9)
            case.support = np.linspace(-8, 8, 5)
            actions = np.argsort(order)
            q = np.where(np.isin(np.arange(3), nan), np.nan, [1.0, 3.0, 2.0])[actions]
            case.leaf_q[1] = case.selector_q[1] = q
            case.leaf_pmf[1] = np.stack([0 * q, 0 * q, 1 - q / 8, 0 * q, q / 8], axis=1)
            sub = case.expand([(0, 0)], 2)
            (found,) = (case.categorical_targets if categorical else case.q_targets)(sub, name)
            found = found @ case.support if categorical else found
            expected = 0.5 + 0.9 * np.fmax.reduce(q)
            np.testing.assert_allclose(found, expected, rtol=1e-9, err_msg=f"{nan} {order}")


@pytest.mark.parametrize("name", ["greedy", "double"])
def test_nan_is_the_least_value_among_nested_ones(name):
    """A sure reward, and actions never tried of which the network knows nothing."""
    for first in (0, 1):
        sure = 1 - first
        case = Case(2, [(0, 0, 0.0, False, 1, 1), (1, sure, 1.0, True, 0, 1)], gamma=0.5)
        case.leaf_q[1, first] = case.selector_q[1, first] = np.nan
        case.leaf_pmf[1, first] = np.nan
        sub = case.expand([(0, 0)], 2)
        assert case.q_targets(sub, name).tolist() == [0.5]
        (pmf,) = case.categorical_targets(sub, name)
        assert pmf @ case.support == pytest.approx(0.5)
