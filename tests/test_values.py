"""GraphValues: value iteration on the data, kept up to date while the graph changes."""

import itertools

import naive
import numpy as np
import pytest
import torch
from conftest import as_bytes, cases, graph_of, raises_naming, scaled
from hypothesis import given, settings
from scipy import sparse

import gbcore
from gbcore import GraphValues, LeafTable, Replay, TransitionGraph, solve
from gbcore.kernels import sweeps
from gbcore.values import Tried


def seen_oracle(graph, leaf_q, gamma, prior):
    """V(s) over tried actions alone; the leaves' where nothing was tried."""

    def action_value(values, s, a):
        if graph.out[s] and not graph.transitions(s, a):
            return -np.inf
        return naive.graph_action_value(graph, values, leaf_q, s, a, gamma, prior)

    return naive.values_of(graph, action_value), action_value


def unknown(obs):
    """The action of a network that nobody asked for one."""
    return np.full(len(obs), -7)


def zeros(obs):
    """Leaf values of a network that says nothing."""
    return np.zeros((len(obs), 2), np.float32)


def evaluated(graph, gamma, leaf=zeros):
    """The policy of an evaluation, of tried actions alone."""
    return GraphValues(graph, LeafTable(graph, leaf), gamma).seen_policy(otherwise=None)


@given(cases())
@settings(max_examples=scaled(200, 40))
def test_values_targets_and_evaluations_are_those_of_the_oracle(case):
    gamma, leaf_q = min(case.gamma, 0.9), case.leaf_q.astype(np.float32)
    table = LeafTable(case.graph, lambda obs: leaf_q[obs[:, 0]])
    values = GraphValues(case.graph, table, gamma, case.prior)
    before = as_bytes(values.__getstate__())
    obs = np.array(case.states, case.graph.obs_dtype).reshape(-1, 1)
    seen = values.seen_policy(unknown)(obs)
    assert as_bytes(values.__getstate__()) == before
    for _ in range(200):
        values.update()
    expected = naive.graph_values(case.naive, leaf_q, gamma, case.prior)
    nodes = [case.id_of[s] for s in case.states]
    np.testing.assert_allclose(values.values(nodes), [expected[s] for s in case.states], atol=1e-6)
    found = values.actions(nodes)

    def of_pairs(prior):
        return [
            naive.graph_action_value(case.naive, expected, leaf_q, s, a, gamma, prior)
            for s, a in case.pairs
        ]

    nodes, actions = [case.id_of[s] for s, _ in case.pairs], [a for _, a in case.pairs]
    np.testing.assert_allclose(values.targets(nodes, actions), of_pairs(0), atol=1e-5)
    best = np.reshape(of_pairs(case.prior), (-1, case.num_actions))
    of_seen, seen_value = seen_oracle(case.naive, leaf_q, gamma, case.prior)
    for state, q, action, other in zip(case.states, best, found, seen.tolist(), strict=True):
        if case.naive.out[state]:
            assert q[action] >= q.max() - 1e-6
            most = max(seen_value(of_seen, state, a) for a in range(case.num_actions))
            assert seen_value(of_seen, state, other) >= most - 1e-3
        else:
            assert (action, other) == (-1, -7)


def leaf_of(obs):
    """Leaf values that no other observation has: float32 [n, 2]."""
    return np.sin(np.stack([obs[:, 0], 7.0 * obs[:, 0] + 1], axis=1)).astype(np.float32)


def graph_that_forgets(capacity=40):
    graph = TransitionGraph(2, (1,), np.int64)
    return graph, Replay(graph, capacity), LeafTable(graph, leaf_of)


def test_values_follow_a_graph_that_forgets():
    """Random steps on a ring of 12 states that drifts on, so that ids are freed and reused."""
    graph, replay, table = graph_that_forgets()
    values, rng, after = GraphValues(graph, table, 0.8, 0.5), np.random.default_rng(1), [0]
    for step in range(scaled(2_000, 400)):
        state, action = after, int(rng.integers(2))
        after = step // 30 * 5 + rng.integers(12, size=1)
        replay.record(np.array(state), action, float(rng.integers(3)), after, rng.random() < 0.1)
        if step % 4 == 0:
            values.update(10)  # of some 100 edges: the rest waits
        if step % 20:
            continue
        for _ in range(300):
            values.update()
        twin = naive.NaiveGraph(2)
        for t in range(replay.size):
            ends = [twin.node(graph.observations_of(column[t : t + 1])[0])
                    for column in (replay.node, replay.next_node)]  # fmt: skip
            twin.add(ends[0], replay.action[t], replay.reward[t], ends[1], replay.terminated[t])
        leaf_q = leaf_of(np.array([twin.observation[s] for s in twin.out]))
        expected = naive.graph_values(twin, leaf_q, 0.8, 0.5)
        nodes = [graph.find(twin.observation[s]) for s in expected]
        np.testing.assert_allclose(values.values(nodes), list(expected.values()), atol=1e-5)
    assert graph.generations.max() > 3, "ids were given out again"


def test_reading_changes_nothing_and_what_came_or_changed_since_is_not_known():
    graph, replay, table = graph_that_forgets()
    values = GraphValues(graph, table, 0.9)
    known, same = graph.node(np.array([0])), graph.node(np.array([1]))
    replay.add(known, 0, 1.0, known, False)
    replay.add(same, 1, 1.0, same, False)
    values.update()
    before = values.values([known])[0]
    graph.nodes(np.arange(2, 3_000)[:, None])  # more ids than there was room for
    new = graph.node(np.array([3_000]))
    replay.add(known, 1, 5.0, new, False)
    assert values.actions([known, same, new, -1]).tolist() == [-1, 1, -1, -1]
    values.targets([same], [0])
    for read, node in ((values.values, new), (lambda nodes: values.targets(nodes, [0]), known)):
        with pytest.raises(ValueError, match=f"Require an update since node {node} was"):
            read([node])
    assert values.values([known])[0] == before
    assert graph.changed(values._followed).tolist()[:2] == [known, new]


def test_a_leaf_that_another_reader_evaluated_first_is_no_value():
    graph, replay, table = graph_that_forgets(capacity=2)
    values = GraphValues(graph, table, 0.9)
    nodes = [graph.node(np.array([s])) for s in range(2)]
    replay.add(nodes[0], 0, 100.0, nodes[1], False)
    values.update()
    for s in (2, 3, 4):  # ids are freed and given out again
        nodes.append(graph.node(np.array([s])))
        replay.add(nodes[-2], 0, 0.0, nodes[-1], False)
    assert graph.generations.max() > 0
    table.values(np.unique(nodes[-2:]))
    with pytest.raises(ValueError, match="Require an update since node"):
        values.values(nodes[-1:])
    values.update()
    best = leaf_of(np.array([[4]])).max()
    assert values.values(nodes[-1:])[0] == pytest.approx(best)


def test_bad_arguments_are_named():
    graph, _, table = graph_that_forgets()
    for bad in (1.0, -0.1, np.nan):
        with raises_naming(bad):
            GraphValues(graph, table, bad)
    for bad in (-1.0, np.inf):
        with raises_naming(bad):
            GraphValues(graph, table, 0.9, bad)
    with raises_naming("Require the leaf table of this graph", ValueError):
        GraphValues(TransitionGraph(2, (1,)), table, 0.9)
    values = GraphValues(graph, table, 0.9)
    node = graph.node(np.array([0]))
    graph.add(node, 0, 1.0, node, True)
    values.update()
    assert values.values([node]) == max(1, leaf_of(np.zeros((1, 1)))[0, 1])
    for read in (values.values, values.actions):
        with raises_naming(7, KeyError):
            read([7])
    with pytest.raises(ValueError, match="Require an action per node"):
        values.targets([node], [0, 1])
    for action in (-1, 2):
        with pytest.raises(ValueError, match="Require 0 <= action < 2"):
            values.targets([node], [action])


def corridor(length, gamma=0.95):
    """A way of many states to a reward, tried by one of two actions."""
    rows = [(s, 0, float(s == length - 1), s + 1, s == length - 1) for s in range(length)]
    graph, leaf = graph_of(length + 1, rows), {"q": 0.0}
    table = LeafTable(graph, lambda obs: np.full((len(obs), 2), leaf["q"], np.float32))
    return graph, GraphValues(graph, table, gamma), leaf, [*range(length + 1)]


@pytest.mark.parametrize("fine", [0.0, 10.0, 1e5, 1e9])
@pytest.mark.parametrize("gamma", [0.99, 0.999])
def test_a_large_penalty_hides_no_small_reward_from_an_evaluation(fine, gamma):
    door, shop, end = range(3)
    rows = [(door, 0, 0.0, shop, False), (door, 1, 50.0, end, True)]  # less than 1 a step for ever
    rows += [(shop, 0, 1.0, shop, False), (shop, 1, -fine, end, True)]
    policy = evaluated(graph_of(3, rows), gamma)
    assert policy(np.array([[0], [1]])).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("length", "gamma"), [(60, 0.5), (300, 0.9), (1_000, 0.97), (1_100, 0.5), (900, 0.05)]
)
def test_a_reward_is_seen_from_however_far(length, gamma):
    graph, last = graph_of(length), length - 1
    for s in range(length):
        graph.add(s, 0, 0.0, s, False)
        graph.add(s, 1, float(s == last), min(s + 1, last), s == last)
    assert (evaluated(graph, gamma, leaf_of)(np.arange(length)[:, None]) == 1).all()
    assert (solve(graph, gamma)[1][:length] == 1).all()


@pytest.mark.parametrize("gamma", [0.9, 0.999, 0.9999])
@pytest.mark.parametrize("ring", ["itself", "next", "shuffled"])
def test_an_evaluation_waits_at_0_rather_than_take_a_penalty(ring, gamma):
    n = scaled(20_000, 200)
    states, after = np.arange(n), np.arange(n)
    if ring == "next":
        after = np.roll(states, -1)
    elif ring == "shuffled":
        way = np.random.default_rng(0).permutation(n)
        after[way] = np.roll(way, -1)
    none, one = np.zeros(n, np.int64), np.ones(n, np.int64)
    rows = (states, one, -1.0 * one, one * n, one), (states, none, 0.0 * one, after, none)
    graph = graph_of(n + 1, rows)
    assert (evaluated(graph, gamma)(states[::7, None]) == 0).all()
    values, actions, _ = solve(graph, gamma)
    assert (actions[:n] == 0).all()
    np.testing.assert_allclose(values[:n], 0, atol=1e-300)


@pytest.mark.parametrize("large", [1, gbcore.values.LARGE])
@pytest.mark.parametrize("seed", range(scaled(30, 8)))
def test_exact_values_are_those_of_linear_equations(seed, large, monkeypatch):
    """Random graphs with penalties, rewards and rings, most of them stochastic; gamma 0.9999."""
    monkeypatch.setattr(gbcore.values, "LARGE", large)  # of more, equations are iterated
    rng, gamma = np.random.default_rng(seed), 0.9999
    n, num_actions = int(rng.integers(2, 60)), int(rng.integers(1, 4))
    m = int(rng.integers(n, 6 * n))
    rewards = rng.choice([0.0, 0.0, -0.01, 1.0, -5.0], m)
    columns = (rng.integers(n, size=m), rng.integers(num_actions, size=m), rewards,
               rng.integers(n, size=m), rng.random(m) < 0.05)  # fmt: skip
    values, actions, _ = solve(graph_of(n, [columns], num_actions), gamma)
    # The policy's own value, by dense equations, and no action is better.
    weights, (reward, count) = np.zeros((n, num_actions, n)), np.zeros((2, n, num_actions))
    for s, a, r, s2, over in zip(*columns, strict=True):
        weights[s, a, s2] += gamma * (not over)
        reward[s, a] += r
        count[s, a] += 1
    weights, reward = weights / count.clip(1)[:, :, None], reward / count.clip(1)
    known, own, given = np.flatnonzero(actions >= 0), np.zeros((n, n)), values.copy()
    own[known], given[known] = (of[known, actions[known]] for of in (weights, reward))
    expected = np.linalg.solve(np.eye(n) - own, given)
    np.testing.assert_allclose(values, expected, rtol=1e-8, atol=1e-8)
    q = np.where(count > 0, reward + weights @ expected, -np.inf)
    assert (q[known].max(axis=1) <= expected[known] + 1e-7).all()


def test_few_rewards_among_many_states_that_lead_to_each_other():
    n, rng = scaled(5_000, 300), np.random.default_rng(0)
    states, after = np.repeat(np.arange(n), 2), rng.integers(n, size=2 * n)
    rewards = (rng.random(2 * n) < 5 / n) * 1.0
    values, _, _ = solve(graph_of(n, [(states, 0 * states, rewards, after, 0 * states)], 1), 0.99)
    expected = (rewards + 0.99 * values[after]).reshape(n, 2).mean(axis=1)
    np.testing.assert_allclose(values, expected, rtol=1e-9)


@pytest.mark.parametrize("gamma", [0.99, 0.9999])
def test_many_states_that_lead_to_each_other_and_stay(gamma):
    """Some stay with a chance near 1, or go to and fro: their pivots are small."""
    for seed in range(scaled(4, 2)):
        n, rng = 4_000, np.random.default_rng(seed)
        states, steps = np.tile(np.arange(n), 3), rng.integers(-2, 3, (3, n))
        steps[0] = 1
        chance = rng.integers(0, 4, (3, n)) + (steps == 1)
        weights = gamma * chance / chance.sum(axis=0)
        places = states, (np.arange(n) + steps).ravel() % n
        weights = sparse.csr_array((weights.ravel(), places), (n, n))
        right = rng.normal(size=n) * (rng.random(n) < 0.05)
        x = gbcore.values.solve_equations(weights, right)
        np.testing.assert_allclose(x, right + weights @ x, atol=1e-9 * abs(x).max())


@pytest.mark.parametrize("cost", [0.0, -0.1])
def test_an_evaluation_that_follows_changes_finds_what_a_fresh_one_finds(cost):
    """With ways round, ends that get a way on, ways that go, and ids that are given out again."""
    rng, rows, n = np.random.default_rng(0), [], 150
    graph = TransitionGraph(3, (1,), np.int64)
    values = GraphValues(graph, LeafTable(graph, lambda obs: np.sin(obs * [1, 2, 3])), 0.99, 0.5)
    for step in range(scaled(60, 20)):
        for _ in range(300 if step == 0 else int(rng.integers(1, 9))):
            s, s2 = (graph.node([int(k)]) for k in rng.integers(n, size=2))
            rows.append(
                (s, int(rng.integers(3)), cost + (rng.random() < 0.05), s2, rng.random() < 0.1)
            )
            graph.add(*rows[-1])
        while len(rows) > 300:
            graph.remove(*rows.pop(int(rng.integers(len(rows)))))
        values.update()
        if step % 7 == 6:
            values.leaves.forget_all()
        values.seen_policy(None)
        found, values._tried = values._tried, Tried()
        values.seen_policy(None)
        alive = graph.arrays.in_degree[: graph.num_ids] != -1
        np.testing.assert_allclose(found.value[alive], values._tried.value[alive], 1e-9, 1e-12)
        np.testing.assert_array_equal(found.chosen[alive], values._tried.chosen[alive])
        values._tried = found


@pytest.mark.parametrize("wrong", [np.nan, 1e10, -1e30])
def test_values_recover_from_a_network_that_was_wrong(wrong):
    graph, values, leaf, nodes = corridor(5)
    for node in nodes[:-1]:
        graph.add(node, 1, 0.0, node, False)
    leaf["q"] = wrong
    values.renew()
    leaf["q"] = 0.5
    values.renew()
    np.testing.assert_allclose(values.values(nodes[:-1]), 0.95 ** np.arange(4.0, -1, -1), atol=1e-3)


def test_the_policy_of_an_empty_graph_asks_the_network_later_too():
    graph = TransitionGraph(2, (1,), np.int64)
    values = GraphValues(graph, LeafTable(graph, zeros), 0.9)
    policy = values.seen_policy(otherwise=lambda obs: obs[:, 0])
    graph.node(obs := np.array([1]))
    assert policy(obs[None]).tolist() == [1]


WAY = np.arange(1_200)
SHUFFLED = np.random.default_rng(3).permutation(WAY)
WAYS = {"newest last": WAY, "newest first": WAY[::-1], "shuffled": SHUFFLED}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_value_flows_along_a_way_by_two_backups_of_each_state(way):
    n = len(way)
    rows = [(s, 0, 0.0, following, False) for s, following in itertools.pairwise(way.tolist())]
    graph = graph_of(n, [*rows, (way[-1], 0, 1.0, way[-1], True)], num_actions=1)
    value, rule = np.zeros(n), gbcore.values.rule_of(np.zeros((n, 1), np.float32), 0.999)
    queue = gbcore.values.new_queue(n)
    work = sweeps.sweep(graph.arrays, value, rule, queue, np.arange(n), 0.0, 0.0, 10**6)
    np.testing.assert_allclose(value[way], 0.999 ** np.arange(n - 1, -1, -1), rtol=1e-12)
    assert work <= 5 * n  # of a backup and its edge, 2, and a way back, 1


@pytest.mark.parametrize("gamma", [0.9, 0.999])
def test_renewed_values_hold(gamma):
    _, values, leaf, nodes = corridor(300, gamma)
    for q in (0.5, 0.0, -1.0):
        leaf["q"] = q
        values.renew()
        before = values.values(nodes)
        expected = [max(q, gamma ** (299 - s)) for s in range(300)]
        np.testing.assert_allclose(before[:-1], expected, atol=1e-3)
        for _ in range(5):
            values.update()
        np.testing.assert_allclose(values.values(nodes), before, atol=1e-4)


def test_of_a_large_graph_leaf_values_are_renewed_in_turn(monkeypatch):
    monkeypatch.setattr(gbcore.values, "RENEWED", 20)
    _, values, leaf, nodes = corridor(49)
    values.update()
    for evaluated in (20, 40, 50):
        leaf["q"] += 1.0
        before = values.leaves.num_evaluated
        values.renew()
        assert values.leaves.num_evaluated == before + 20
        assert np.count_nonzero(values.leaves.q[: len(nodes), 0] > 0) == evaluated
    values.leaves.forget_all()
    values.renew()
    assert (values.leaves.q[: len(nodes)] == leaf["q"]).all(), "what is not known is evaluated, too"


def test_a_change_waits_until_it_was_followed():
    graph, values, _, nodes = corridor(5)
    values.update()
    new = graph.node(np.array([99]))
    graph.add(nodes[0], 1, 5.0, new, False)
    table, evaluate = values.leaves, values.leaves.evaluate
    table.evaluate = lambda obs: 1 / 0
    for follow in (values.update, values.renew):
        with pytest.raises(ZeroDivisionError):
            follow()
    table.evaluate = evaluate
    values.update()
    assert values.targets([nodes[0]], [1]).tolist() == [5.0]
    assert values.actions(nodes[:1]).tolist() == [1]


def test_large_rewards_do_not_overflow_where_their_mean_does_not():
    graph = graph_of(2, 2 * [(0, 0, 1e308, 1, True)])
    assert GraphValues(graph, LeafTable(graph, leaf_of), 0.9).values([0]).tolist() == [1e308]
    assert evaluated(graph, 0.9, leaf_of)(np.array([[0]])).tolist() == [0]


def test_with_keys_the_graph_is_asked_by_key():
    graph = TransitionGraph(2, (1,), np.float32, key_shape=(1,), key_dtype=np.int64)
    values = GraphValues(graph, LeafTable(graph, zeros), 0.9)
    obs = np.array([[0.1], [0.2], [3.0]], np.float32)
    keys = np.array([[0], [1], [7]])
    nodes = graph.nodes(obs[:2], keys[:2])
    graph.add(nodes, [0, 1], [1.0, 1.0], nodes, [True, True])
    values.update()
    near = obs + 0.01  # another observation of the same state
    assert values.act(near, unknown, keys).tolist() == [0, 1, -7]
    assert values.seen_policy(unknown)(near, keys).tolist() == [0, 1, -7]
    with pytest.raises(ValueError, match="Require a key"):
        values.act(near, unknown)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("prior", [0.0, 0.5])
def test_nan_is_the_least_value_for_training_and_evaluation(first, prior):
    """Where the network gives NaN, what was seen decides, in whatever order."""
    sure = 1 - first  # the other action leads into a state that was never left
    rows = [(0, first, 0.0, 2, False), (0, sure, 1.0, 1, True), (3, first, 0.0, 0, False)]
    graph, leaf_q = graph_of(4, rows), np.full((4, 2), np.nan, np.float32)
    leaf_q[0, sure] = 0.0
    table = LeafTable(graph, lambda obs: leaf_q[obs[:, 0]])
    values = GraphValues(graph, table, 0.5, prior)
    for _ in range(3):
        values.update()
        values.renew()
    value = 1 / (1 + prior)
    np.testing.assert_allclose(values.values([0]), [value])
    np.testing.assert_allclose(values.targets([3], [first]), [0.5 * value])
    assert np.isnan(values.values([2])).all()
    obs = np.arange(4)[:, None]
    assert values.act(obs, unknown)[0] == sure
    assert values.seen_policy(unknown)(obs).tolist() == [sure, -7, -7, first]


def test_a_state_whose_own_guess_is_nan_has_the_value_of_what_was_seen():
    graph = graph_of(2, [(s, 0, 1.0, 1 - s, False) for s in range(2)], num_actions=1)
    leaf_q = np.array([[np.nan], [2.0]], np.float32)
    for order in (leaf_q, leaf_q[::-1]):
        values = GraphValues(graph, LeafTable(graph, lambda obs, q=order: q[obs[:, 0]]), 0.5)
        for _ in range(40):
            values.update()
        np.testing.assert_allclose(values.values([0, 1]), [2, 2], rtol=1e-5)


def test_values_follow_a_network_that_somebody_wrote_into():
    graph, nodes = graph_of(3, [(0, 0, 0.0, 1, False), (1, 0, 0.0, 2, False)]), [0, 1, 2]
    network = torch.nn.Linear(1, 2)

    def evaluate(obs):
        return network(torch.as_tensor(obs).float()).detach().numpy()

    values = GraphValues(graph, LeafTable(graph, evaluate, network), 0.5)
    for number in (1.0, -1.0):
        for part in network.parameters():
            part.data.fill_(number)
        with pytest.raises(ValueError, match="Require an update"):
            values.values(nodes)
        assert values.actions(nodes).tolist() == [-1] * 3
        values.update()
        # Weight and bias are the number: q(s, a) = number * (s + 1), of the third state 3.
        second = max(number * 2, 0.5 * number * 3)
        best = [max(number, 0.5 * second), second, number * 3]
        np.testing.assert_allclose(values.values(nodes), best, rtol=1e-5)
        policy = values.seen_policy(lambda obs: np.full(len(obs), 1))
        assert policy(np.arange(3)[:, None]).tolist() == [0, 0, 1]


@pytest.mark.parametrize("first", [0, 1])
def test_a_way_round_is_chosen_rather_than_one_that_ends_in_nan(first):
    rows = [(0, first, 0.0, 2, False)]  # to a state that leads to the end alone
    rows += [(0, 1 - first, 1.0, 1, False)]  # a ring of two
    for a in range(2):
        rows += [(1, a, 1.0, 0, False), (2, a, 0.0, 3, False)]
    graph, table = graph_of(4, rows), {"end": 9.0}
    leaves = LeafTable(graph, lambda obs: np.full((len(obs), 2), table["end"], np.float32))
    values, states = GraphValues(graph, leaves, 0.5), np.arange(4)[:, None]
    for end, best in ((9.0, first), (np.nan, 1 - first), (9.0, first)):
        table["end"] = end
        leaves.forget_all()
        values.update()
        ring = [0.25 * end, 1 + 0.125 * end] if best == first else [2, 2]
        np.testing.assert_allclose(values.values(range(4)), [*ring, 0.5 * end, end])
        assert values.seen_policy(unknown)(states).tolist() == [best, 0, 0, -7]
        assert values.actions(range(4)).tolist() == [best, 0, 0, -1]
