"""gbcore/frontier.py against value iteration on dictionaries; what it costs; what it does."""

import copy
import itertools

import numpy as np
import pytest
from conftest import Twins, graph_of, interpreted, raises_naming, scaled
from naive import FrontierWorth, graph_action_value, graph_values

from gb_dqn_minigrid import kinds_of_grids as kinds_of
from gbcore import FrontierEpisodes, FrontierPlanner, LeafTable, TransitionGraph
from gbcore.frontier import MEMORY, WORTHWHILE


def kinds_of_grids(obs):
    """Grids [n, H, W] or [n, H, W, C] of any numbers, as the script takes bytes."""
    return kinds_of(np.ascontiguousarray(obs).reshape(*obs.shape[:3], -1).view(np.uint8))


class World:
    """Transitions among integers, in a TransitionGraph with its planner and in a NaiveGraph.

    By kind an integer is a grid of its four ternary digits: 5 = 0012 and 7 = 0021 are of a kind.
    """

    def __init__(self, num_actions, capacity=4, by_kind=False, discount=0.9, **options):
        shape = (2, 2) if by_kind else (1,)
        self.twins = Twins(num_actions, shape, np.int64, capacity=capacity)
        self.graph, self.naive = self.twins.graph, self.twins.naive
        options["kinds_of"] = kinds_of_grids if by_kind else None
        self.planner = FrontierPlanner(self.graph, discount, **options)
        self.worth = FrontierWorth() if by_kind else None

    def observation(self, s):
        digits = [[s // 27 % 3, s // 9 % 3], [s // 3 % 3, s % 3]]
        return np.array([s] if self.worth is None else digits, np.int64)

    def change(self, method, s, a, s2, done=False):
        """`add` or `remove` a transition; a state is interned first, and may be forgotten after."""
        states = [self.twins.node(self.observation(i)) for i in (s, s2)]
        getattr(self.twins, method)(states[0], a, 0.0, states[1], done)
        if self.worth is not None:
            for state in states:
                self.worth.meet(state, self.naive.observation.get(state))

    def add(self, *transition):
        self.change("add", *transition)

    def id(self, s):
        return self.graph.find(self.observation(s))

    def check(self, rtol):
        """All values are those of the oracle: no rewards, and worths in place of leaf values."""
        planner, num_actions = self.planner, self.graph.num_actions
        assert planner.check_valid() == []
        worths = dict.fromkeys(self.naive.out, 1.0) if self.worth is None else self.worth
        leaf_q = {s: [worths[s]] * num_actions for s in self.naive.out}
        rule = planner.discount, planner.prior
        values = graph_values(self.naive, leaf_q, *rule)
        for state, value in values.items():
            node, _ = self.twins.ids(state)
            np.testing.assert_allclose(planner.values[node], value, rtol, 1e-8)
            expected = [
                graph_action_value(self.naive, values, leaf_q, state, action, *rule)
                for action in range(num_actions)
            ]
            np.testing.assert_allclose(planner.action_values(node), expected, rtol, 1e-8)


def random_world(seed, check=None, **options):
    """A ring of random transitions, stochastic and not, of which the oldest is forgotten."""
    rng = np.random.default_rng(seed)
    num_actions, num_states = int(rng.integers(1, 4)), int(rng.integers(1, 20))
    discount, prior = float(rng.choice([0.5, 0.9, 0.95])), float(rng.choice([0, 0, 0.3, 2]))
    world = World(num_actions, **{"discount": discount, "prior": prior} | options)
    usual = rng.integers(num_states, size=(num_states, num_actions))
    noise, ring, capacity = rng.choice([0, 0.2, 1]), [], int(rng.integers(5, 120))
    for i in range(200):
        s, a = int(rng.integers(num_states)), int(rng.integers(num_actions))
        s2 = int(rng.integers(num_states)) if rng.random() < noise else int(usual[s, a])
        ring.append((s, a, s2, bool(rng.random() < 0.1)))
        world.add(*ring[-1])
        if len(ring) > capacity:
            world.change("remove", *ring.pop(0))
        world.planner.plan(int(rng.integers(1, 60)))
        if check is not None and i % 50 == 49:
            check(world)
    return world


@pytest.mark.parametrize("by_kind", [False, True])
@pytest.mark.parametrize("seed", range(scaled(40, 8)))
def test_values_are_those_of_value_iteration(seed, by_kind):
    def check(world):
        assert world.planner.check_valid() == []  # also while changes wait
        world.planner.plan()
        assert world.planner.num_waiting == 0
        world.check(rtol=1e-7)
        if not by_kind:  # of a graph that is there already the same is found
            late = FrontierPlanner(world.graph, world.planner.discount, world.planner.prior, 1e-10)
            late.plan()
            np.testing.assert_allclose(late.values, world.planner.values, rtol=1e-7, atol=1e-9)

    random_world(seed, check=check, tolerance=1e-10, by_kind=by_kind)


@pytest.mark.parametrize("seed", range(scaled(20, 4)))
def test_the_usual_tolerance_costs_little_accuracy(seed):
    world = random_world(seed)
    world.planner.plan()
    world.check(rtol=1 / 20)  # (1 - discount) / 50 of a value, at every step of the way


def test_kinds_without_a_state_are_forgotten():
    """At most twice as many as there are ids stay, and among them all that have a state."""
    graph = TransitionGraph(1, (2, 1), np.int64, capacity=16)
    planner = FrontierPlanner(graph, kinds_of=kinds_of_grids)
    often, *rare = graph.nodes([[[0], [1]], [[1], [0]]])
    graph.add(often, 0, 0.0, rare[0], False)
    for k in range(200):
        graph.add(often, 0, 0.0, node := graph.node(np.array([[k], [-1]])), False)
        planner.plan()
        assert planner._plan.costs[node] == 0
        graph.remove(often, 0, 0.0, node, False)
        assert len(planner._kinds) <= 2 * graph.num_ids
    np.testing.assert_allclose(0.95 ** planner._plan.costs[[often, *rare], 0], [1, 1 / 2])
    assert 2 in planner._kinds.values(), "the number of a kind that has states stays"
    assert planner.check_valid() == []


def test_kinds_are_told_apart_by_all_bytes_of_their_cells():
    grids = ([[[1, 2]], [[3, 4]]], [[[3, 4]], [[1, 2]]], [[[1, 4]], [[3, 2]]], [[[2, 1]], [[3, 4]]])
    first, same, *others = kinds_of_grids(np.array(grids, np.float32)).tolist()
    assert first == same
    assert len({first, *others}) == 3
    pairs = list(itertools.combinations_with_replacement(range(48), 2))
    kinds = kinds_of_grids(np.array(pairs, np.uint8).reshape(-1, 2, 1))
    assert len(set(kinds.tolist())) == len(pairs)


@pytest.mark.parametrize("kinds", [np.zeros(3, np.int64), np.zeros(1), None])
def test_kinds_that_are_none_are_refused(kinds):
    graph = TransitionGraph(1, (1,))
    planner = FrontierPlanner(graph, kinds_of=lambda obs: kinds)
    graph.node(np.zeros(1, np.uint8))
    with pytest.raises(ValueError, match="Require integers"):
        planner.plan()


def test_worths_of_untried_pairs_may_be_given():
    world = World(2)
    world.add(0, 0, 1)
    world.planner.plan()
    nodes = [world.id(0), world.id(1)]
    world.planner.set_worths(nodes, [[1.0, 0.1], [0.5, 0.25]])
    world.planner.plan()
    assert world.planner.action_values(nodes[0]) == pytest.approx([0.45, 0.1])
    assert world.planner.action_values(nodes[1]) == pytest.approx([0.5, 0.25])
    world.add(1, 0, 2)  # of which nothing is said: worth 1
    world.planner.plan()
    assert world.planner.action_values(nodes[1]) == pytest.approx([0.9, 0.25])
    world.planner.set_worths(nodes, [[0.2], [0.3]])  # alike for all actions
    assert world.planner.action_values(nodes[1]) == pytest.approx([0.9, 0.3])
    for bad in ([[0.5]], [[0.0], [1.0]], [[2.0], [1.0]], [[1.0, 1.0, 1.0]] * 2):
        with pytest.raises(ValueError, match="Require worths"):
            world.planner.set_worths(nodes, bad)


def test_what_is_far_is_reached():
    """A lock of 600 tumblers, of which a wrong action leads back to the start; by kind, too."""
    n = scaled(600, 80)
    for discount in (0.5, 0.95):
        world = World(2, discount=discount, capacity=n)
        for s in range(n):
            world.add(s, 0, s + 1)
            world.add(s, 1, 0)
            if s % 7 == 0:
                world.planner.plan(50)
        world.planner.plan()
        rng, at = np.random.default_rng(0), world.id(0)
        assert world.planner.act(at, rng) == 0
        assert world.planner.steps[at] == n
        world.add(n, 0, 0)
        world.add(n, 1, 0)  # the last untried pairs
        world.planner.plan()
        assert world.planner.act(at, rng) is None
        assert not world.planner.values.any()


@pytest.mark.parametrize(("share", "expected"), [(0.5, 49), (0.0, 0)])
def test_episodes_of_one_step_go_to_the_frontier_until_everything_was_tried(share, expected):
    graph, rng = graph_of(2, num_actions=50), np.random.default_rng(0)
    episodes, shares, planned, start, end = FrontierEpisodes(graph, share), [], 0, 0, 1
    for _ in range(400):
        action = episodes.act(start, rng)
        shares.append(episodes.share)
        assert shares[-1] > 0 or not episodes.is_frontier
        planned += action is not None
        graph.add(start, 0 if action is None else action, 0.0, end, True)
        episodes.end_episode()
    assert planned == expected
    assert episodes.metrics()["frontier/untried"] == 49 - expected
    assert shares[-1] == 0
    assert (max(shares) > 0.2) == (share > 0)


def test_untried_pairs_of_states_that_were_entered_are_counted():
    world = World(3)
    assert world.planner.num_untried() == 0
    world.add(0, 0, 1)
    world.add(0, 1, 2, True)  # nothing can be tried in 2
    assert world.planner.num_untried() == 1 + 3
    world.change("remove", 0, 0, 1)
    assert world.planner.num_untried() == 2


def test_states_that_hold_each_other_up_fall_at_once():
    """A ring whose last untried pair is tried: discounts round it would take 400 turns."""
    n = scaled(2000, 200)
    world = World(1, discount=0.95, capacity=n)
    for s in range(n):
        world.add(s, 0, (s + 1) % n)
        world.planner.plan(20)
    assert world.planner.plan() <= 10 * n
    assert not world.planner.values.any()


@pytest.mark.parametrize("node", [0.0, np.zeros(1, np.int64), None])
def test_what_is_no_integer_is_refused_and_leaves_nothing_behind(node):
    graph = graph_of(1, num_actions=1)
    planner = FrontierPlanner(graph)
    for call in (
        lambda: graph.add(0, 0, 0.0, node, False), lambda: graph.add(0, node, 0.0, 0, False),
        lambda: planner.act(node, np.random.default_rng(0)), lambda: graph.require_node(node),
        lambda: planner.plan("much" if node is None else node + 0.5),
    ):  # fmt: skip
        with pytest.raises(TypeError):
            call()
    assert planner.num_waiting == 0
    with pytest.raises(ValueError, match="Require budget >= 1"):
        planner.plan(0)
    assert planner.plan() == 0


def test_what_did_not_change_is_not_read():
    n = scaled(5_000, 500)
    world = World(2, capacity=n)
    for s in range(n):
        world.add(s, 0, s + 1)
        world.add(s, 1, max(s - 1, 0))
    world.planner.plan()
    assert world.planner.steps[world.id(0)] == n
    world.add(n, 0, n)  # not the last untried pair of n
    assert world.planner.plan() <= 2
    world.add(5, 1, 4)  # seen before
    assert world.planner.plan() <= 4


def test_a_budget_bounds_the_edges_read_and_the_rest_waits():
    rng = np.random.default_rng(0)
    world = World(2, tolerance=1e-4)
    for _ in range(scaled(300, 60)):
        world.add(*rng.integers([40, 2, 40]).tolist())
    edges = world.graph.edges()
    both_ways = np.bincount(np.concatenate([edges["source"], edges["next"]]))
    slices = []
    while world.planner.num_waiting:
        slices.append(world.planner.plan(10))
        assert 0 < slices[-1] < 10 + 1 + both_ways.max()  # the last state is read to its end
    assert len(slices) > 5
    world.check(rtol=1e-2)


def test_actions_are_greedy_and_ties_are_broken_at_random_where_something_is_left():
    world = World(4)
    for a, s2 in enumerate((1, 2, 0, 3)):
        world.add(0, a, s2, a == 3)
    world.planner.plan()
    rng = np.random.default_rng(0)
    drawn = {world.planner.act(world.id(0), rng) for _ in range(60)}
    assert drawn == {0, 1}  # to 1 and 2, whose actions are untried; 2 stays, 3 ends
    assert {world.planner.act(world.id(1), rng) for _ in range(100)} == {0, 1, 2, 3}
    for s, action in itertools.product((1, 2, 3), range(4)):
        world.add(s, action, s)  # nothing is left to try
    world.planner.plan()
    before = rng.bit_generator.state
    assert world.planner.act(world.id(0), rng) is None
    assert rng.bit_generator.state == before, "no draw is taken"


def test_the_share_is_what_planned_steps_find_more_than_others():
    episodes, rng = FrontierEpisodes(graph_of(1), share=0.5), np.random.default_rng(0)
    for found, steps, planned_found, planned_steps, expected in (
        (0, 0, 0, 0, 0.0),
        (99, 99, 99, 99, 0.0),  # everything is new, to all
        (9, 99, 39, 99, 0.5 * (1 - 10 / 40)),
        (39, 99, 9, 99, 0.0),
        (0, 9_999, 0, 1_999, 0.5 * (1 - 2_000 / 10_000) * (1 / 2_000) / WORTHWHILE),
    ):
        episodes._lately[:] = [[found, steps], [planned_found, planned_steps]]
        episodes.act(0, rng)
        episodes.end_episode()
        assert episodes.share == pytest.approx(expected)


def test_rates_are_of_the_last_steps():
    graph, rng = graph_of(2, [(0, 0, 0.0, 1, False)], num_actions=1), np.random.default_rng(0)
    episodes = FrontierEpisodes(graph)
    for node in (0, 1, 0, 0):
        episodes.act(node, rng)
    keep = 1 - 1 / MEMORY  # of three steps the first found a state without actions
    np.testing.assert_allclose(episodes._lately[0], [keep**2, 1 + keep + keep**2])
    assert episodes.metrics()["frontier/states_per_1000"] == pytest.approx(1000 / 3)
    assert episodes.metrics()["frontier/states_per_1000"] is None


def test_a_plan_that_contradicts_itself_is_found():
    planner = random_world(0, by_kind=True).planner
    planner.plan(10**6)
    assert planner.check_valid() == []
    planner._plan.steps[:] += 0.3
    assert any("by its actions" in problem for problem in planner.check_valid())


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [(FrontierPlanner, "discount", 0), (FrontierPlanner, "discount", 1.0),
     (FrontierPlanner, "prior", -1), (FrontierPlanner, "prior", np.inf),
     (FrontierPlanner, "tolerance", 0.2), (FrontierEpisodes, "share", 1.5),
     (FrontierEpisodes, "share", -1)],
)  # fmt: skip
def test_bad_arguments(kind, name, value):
    with raises_naming(value):
        kind(TransitionGraph(1, (1,)), **{name: value})


@interpreted
@pytest.mark.parametrize("frame_stack", [False, True])
@pytest.mark.parametrize("keyed", [False, True])
def test_whatever_asks_first_after_a_doubling_has_room(frame_stack, keyed):
    """Too short an array raises where kernels run as plain Python; compiled, they write past it."""
    options = {"key_shape": (8,) if keyed else None, "frame_stack": frame_stack}
    sizes = [n for power in (16, 32, 64, 128) for n in (power - 1, power, power + 1)]
    frames = np.arange(3_000).view(np.uint8).reshape(-1, 8)
    calls = (
        lambda graph, planner, leaves: planner.plan(),
        lambda graph, planner, leaves: copy.deepcopy(planner).plan(),
        lambda graph, planner, leaves: planner.values,
        lambda graph, planner, leaves: planner.action_values(graph.num_ids - 1),
        lambda graph, planner, leaves: leaves.values(np.arange(graph.num_ids)),
        lambda graph, planner, leaves: leaves.known,
        lambda graph, planner, leaves: leaves.renew(np.arange(graph.num_ids)),
        lambda graph, planner, leaves: graph.expand([graph.num_ids - 2], [0], 3),
    )
    for first in calls:
        graph = TransitionGraph(1, (2, 8), capacity=16, **options)
        planner = FrontierPlanner(graph)
        leaves = LeafTable(graph, lambda obs: np.zeros((len(obs), 1), np.float32))
        for i in range(sizes[-1]):
            assert graph.node(frames[i : i + 2], frames[i] if keyed else None) == i
            graph.add(max(i - 1, 0), 0, 0.0, i, False)
            if i + 1 in sizes:
                for call in (first, *calls):
                    call(graph, planner, leaves)
        again = TransitionGraph.from_state(graph.state(), capacity=16)
        for part in (graph, again, planner, copy.deepcopy(planner)):
            assert part.check_valid() == []
        expected = np.stack([frames[: i + 1], frames[1 : i + 2]], axis=1)
        np.testing.assert_array_equal(graph.observations, expected)
