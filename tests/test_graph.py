"""TransitionGraph against NaiveGraph: the same operations, the same graph."""

import sys
import tempfile
from collections import deque
from itertools import pairwise
from pathlib import Path

import memory
import numpy as np
import pytest
import random_operations
from conftest import JIT, raises_naming, scaled
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from naive import NaiveGraph, Oracle, Scalars

from gbcore import FrontierPlanner, TransitionGraph, prune, q_targets, trajectory_subgraphs
from gbcore.categorical import pad

BIG = 2**40


class Twins:
    """One graph twice. Nodes are named by their observation, since the ids need not agree."""

    def __init__(self, num_actions, obs_shape, obs_dtype=np.uint8, **options):
        self.graph = TransitionGraph(num_actions, obs_shape, obs_dtype, **options)
        self.naive = NaiveGraph(num_actions, obs_shape, obs_dtype)

    def ids(self, state):
        """The ids of a naive state in both graphs."""
        return self.graph.find(self.naive.observation[state], self.naive.key[state]), state

    def node(self, obs, key=None):
        before = self.naive.find(obs, key) >= 0
        got, state = self.graph.node(obs, key), self.naive.node(obs, key)
        assert isinstance(got, int | np.integer)
        assert (self.graph.find(obs, key), self.naive.find(obs, key)) == (got, state)
        if before:
            assert self.graph.node(obs, key) == got
        return state

    def nodes(self, obs, keys=None):
        """Many observations at once, like one after the other."""
        got = self.graph.nodes(np.array(obs), None if keys is None else np.array(keys))
        states = [
            self.naive.node(*each) for each in zip(obs, keys or [None] * len(obs), strict=True)
        ]
        assert got.tolist() == [self.ids(state)[0] for state in states]
        return states

    def change_all(self, method, transitions):
        """`add` or `remove` many transitions at once."""
        s, action, reward, s2, done = zip(*transitions, strict=True)
        s, s2 = (np.array([self.ids(state)[0] for state in column]) for column in (s, s2))
        columns = s, np.array(action), np.array(reward), s2, np.array(done)
        freed = getattr(self.graph, method)(*columns)
        expected = [getattr(self.naive, method)(*transition) for transition in transitions]
        if method == "remove":
            assert len(freed) == sum(map(len, expected))

    def add(self, s, action, reward, s2, done):
        self.graph.add(self.ids(s)[0], action, reward, self.ids(s2)[0], done)
        self.naive.add(s, action, reward, s2, done)

    def remove(self, s, action, reward, s2, done):
        names = {self.ids(state)[0]: state for state in (s, s2)}
        freed = self.graph.remove(self.ids(s)[0], action, reward, self.ids(s2)[0], done)
        expected = self.naive.remove(s, action, reward, s2, done)
        assert sorted(names[i] for i in freed) == expected

    def check(self):
        """Everything that can be seen from outside agrees."""
        graph, naive = self.graph, self.naive
        assert graph.check_valid() == []
        assert graph.num_nodes == naive.num_nodes
        assert graph.num_edges == naive.num_edges
        assert graph.num_transitions == naive.num_transitions
        assert graph.novel_state_ratio == naive.novel_state_ratio

        observations, state_of = graph.observations, {}
        assert observations.dtype == naive.obs_dtype
        assert observations.shape[1:] == naive.obs_shape
        for state, obs in naive.observation.items():
            node = self.ids(state)[0]
            assert node >= 0
            assert observations[node].tobytes() == obs.tobytes()
            state_of[node] = state
        assert len(state_of) == naive.num_nodes  # no two states share an id

        got, expected = graph.edges(), naive.edges()
        assert list(got) == list(expected)
        for name in expected:
            assert got[name].dtype == expected[name].dtype
            assert got[name].shape == (naive.num_edges,)
        for name in ("source", "next"):
            got[name] = np.array([state_of[int(i)] for i in got[name]], np.int64)
        assert sorted(rows(got)) == sorted(rows(expected))


def rows(edges):
    return list(zip(*(column.tolist() for column in edges.values()), strict=True))


# --- random operations ---


class GraphMachine(RuleBasedStateMachine):
    """Observations are two bytes; the few values make crossovers, removals and reuse frequent.

    Saving and loading between any two operations changes nothing.
    """

    def make(self):
        return Twins(3, (2,))

    def obs(self, k):
        return np.array([k, 7 * k % 5], np.uint8)

    def keyed(self, k):
        """The observation, and its key where there are keys."""
        return (self.obs(k),)

    @initialize()
    def start(self):
        self.twins = self.make()
        self.freed = []  # ids that were freed and not given out since

    def live_freed(self):
        current = {self.twins.ids(state)[0] for state in self.twins.naive.out}
        return [i for i in self.freed if i not in current]

    @rule(k=st.integers(0, 9))
    def node(self, k):
        self.twins.node(*self.keyed(k))

    @rule(
        k=st.integers(0, 9),
        action=st.integers(0, 2),
        reward=st.sampled_from([0.0, -0.0, 1.0, 0.1]),
        k2=st.integers(0, 9),
        done=st.booleans(),
        times=st.integers(1, 3),
    )
    def add(self, k, action, reward, k2, done, times):
        s, s2 = self.twins.node(*self.keyed(k)), self.twins.node(*self.keyed(k2))
        for _ in range(times):
            self.twins.add(s, action, reward, s2, done)

    @rule(ks=st.lists(st.integers(0, 9), min_size=1, max_size=8), done=st.booleans())
    def add_many(self, ks, done):
        states = self.twins.nodes(*map(list, zip(*map(self.keyed, ks), strict=True)))
        rows = zip(states, ks, [s / 3 for s in ks], states[::-1], [done] * len(ks), strict=True)
        self.twins.change_all("add", [(s, k % 3, r, s2, d) for s, k, r, s2, d in rows])

    @precondition(lambda self: self.twins.naive.num_edges > 0)
    @rule(which=st.lists(st.integers(0, 10_000), min_size=1, max_size=8))
    def remove_many(self, which):
        """Each edge as often as it is there, at most; then the ids that went are freed."""
        edges, left, taken = rows(self.twins.naive.edges()), {}, []
        for i in which:
            s, action, reward, done, s2, count = edges[i % len(edges)]
            edge = s, action, reward, s2, done
            left[edge] = left.get(edge, count) - 1
            if left[edge] >= 0:
                taken.append(edge)
        before = {self.twins.ids(state)[0] for state in self.twins.naive.out}
        self.twins.change_all("remove", taken)
        self.freed += before - {self.twins.ids(state)[0] for state in self.twins.naive.out}

    @precondition(lambda self: self.twins.naive.num_edges > 0)
    @rule(which=st.integers(0, 10_000), all_of_it=st.booleans())
    def remove(self, which, all_of_it):
        edges = rows(self.twins.naive.edges())
        s, action, reward, done, s2, count = edges[which % len(edges)]
        ids = {self.twins.ids(state)[0] for state in (s, s2)}
        for _ in range(count if all_of_it else 1):
            self.twins.remove(s, action, reward, s2, done)
        living = {self.twins.ids(state)[0] for state in self.twins.naive.out}
        self.freed += sorted(ids - living)

    @precondition(lambda self: self.twins.naive.num_edges > 0)
    @rule(which=st.integers(0, 10_000), change=st.integers(0, 3))
    def remove_what_is_not_there(self, which, change):
        """An edge that differs in one part from one that exists."""
        edges = rows(self.twins.naive.edges())
        s, action, reward, done, s2, _ = edges[which % len(edges)]
        if change == 0:
            action = (action + 1) % 3
        elif change == 1:
            reward += 0.25
        elif change == 2:
            done = not done
        else:
            s, s2 = s2, s
        if (action, reward, done, s2) in self.twins.naive.out[s]:
            return
        with raises_naming(reward, KeyError):
            self.twins.graph.remove(
                self.twins.ids(s)[0], action, reward, self.twins.ids(s2)[0], done
            )

    @precondition(lambda self: self.live_freed() and self.twins.naive.num_nodes)
    @rule(which=st.integers(0, 10_000))
    def use_a_freed_id(self, which):
        graph, freed = self.twins.graph, self.live_freed()
        bad = freed[which % len(freed)]
        good = self.twins.ids(next(iter(self.twins.naive.out)))[0]
        for call in (graph.add, graph.remove):
            for nodes in ((bad, good), (good, bad)):
                with raises_naming(bad):
                    call(nodes[0], 0, 0.0, nodes[1], False)

    @rule(k=st.integers(0, 12))
    def find(self, k):
        keyed = self.keyed(k)
        found, state = self.twins.graph.find(*keyed), self.twins.naive.find(*keyed)
        assert (found == -1) == (state == -1)

    @rule()
    def save_and_load(self):
        self.twins.graph = reloaded(self.twins.graph)

    @rule()
    def restore_into_another_graph(self):
        other = self.make().graph
        other.add(other.node(*self.keyed(1)), 0, 0.0, other.node(*self.keyed(8)), False)
        other.restore(self.twins.graph.state())
        self.twins.graph = other

    @invariant()
    def agree(self):
        self.twins.check()


class FrameStackMachine(GraphMachine):
    """Observations are stacks of 4 frames out of 3: frames are shared, also within one stack."""

    def make(self):
        return Twins(3, (4, 3, 3), frame_stack=True)

    def obs(self, k):
        frames = [k % 3, k // 3 % 3, k % 2, k // 3 % 3]
        return np.stack([np.full((3, 3), f, np.uint8) for f in frames])

    @invariant()
    def frames_are_stored_once(self):
        living = self.twins.naive.observation.values()
        frames = {frame.tobytes() for obs in living for frame in obs}
        assert self.twins.graph.num_frames == len(frames)


class KeyMachine(GraphMachine):
    """Of 10 observations 4 are met under two keys each, and 3 keys have two observations each."""

    def make(self):
        return Twins(3, (2,), key_shape=(3,), key_dtype=np.int16)

    def obs(self, k):
        return super().obs(k % 6)

    def keyed(self, k):
        return self.obs(k), np.array([k % 7, 300, -1], np.int16)


class KeyFrameStackMachine(KeyMachine, FrameStackMachine):
    def make(self):
        return Twins(3, (4, 3, 3), frame_stack=True, key_shape=(3,), key_dtype=np.int16)

    def obs(self, k):
        return FrameStackMachine.obs(self, k % 6)


def reloaded(graph):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graph.npz"
        graph.save(path)
        return TransitionGraph.load(path)


for machine in (GraphMachine, FrameStackMachine, KeyMachine, KeyFrameStackMachine):
    machine.TestCase.settings = settings(
        max_examples=scaled(80, 16), stateful_step_count=scaled(40, 25)
    )
TestGraphMachine = GraphMachine.TestCase
TestFrameStackMachine = FrameStackMachine.TestCase
TestKeyMachine = KeyMachine.TestCase
TestKeyFrameStackMachine = KeyFrameStackMachine.TestCase


# --- larger, and longer ---


def test_a_node_with_hundreds_of_outcomes():
    """One block grows and shrinks; finding an edge again may not depend on its length."""
    n = scaled(600, 300)
    twins = Twins(2, (2,), np.int32)
    hub = twins.node(np.array([-1, 0], np.int32))
    far = [twins.node(np.array([k, k], np.int32)) for k in range(n)]
    for k in range(n):
        twins.add(hub, k % 2, k / 7, far[k], k % 3 == 0)
    for k in range(0, n, 5):
        twins.add(hub, k % 2, k / 7, far[k], k % 3 == 0)
    twins.check()
    for k in np.random.default_rng(0).permutation(n)[: n - 20]:
        for _ in range(2 if k % 5 == 0 else 1):
            twins.graph.remove(
                twins.graph.find(np.array([-1, 0], np.int32)),
                int(k % 2),
                k / 7,
                twins.graph.find(np.array([k, k], np.int32)),
                bool(k % 3 == 0),
            )
        del twins.naive.out[hub][(int(k % 2), k / 7, bool(k % 3 == 0), far[k])]
        twins.naive.id_of.pop(twins.naive.observation.pop(far[k]).tobytes())
        del twins.naive.out[far[k]]
    twins.check()


def nbytes(thing, seen=None):
    """Bytes of all NumPy arrays that an object holds, however nested."""
    seen = set() if seen is None else seen
    if id(thing) in seen:
        return 0
    seen.add(id(thing))
    if isinstance(thing, np.ndarray):
        return thing.nbytes
    if isinstance(thing, dict):
        parts = thing.values()
    elif isinstance(thing, (list, tuple, set)):
        parts = thing
    else:
        parts = getattr(thing, "__dict__", {}).values()
    return sum(nbytes(part, seen) for part in parts)


@pytest.mark.parametrize("options", [[], ["--frame-stack"]])
def test_random_operations_against_dictionaries(options, monkeypatch, capsys):
    """The small version of benchmark/random_operations.py: many checks, a small graph."""
    command = ["--operations", str(scaled(30_000, 6_000)), "--states", "300", "--wave", "4000"]
    command += ["--check-frequency", "1500", *options]
    monkeypatch.setattr(sys, "argv", ["random_operations.py", *command])
    random_operations.main()
    assert "no difference" in capsys.readouterr().out


@pytest.mark.parametrize("frame_stack", [False, True])
def test_nothing_is_stale_in_a_replay_that_forgets(frame_stack, capsys):
    """The small version of benchmark/memory.py."""
    steps = scaled(30_000, 1_500)
    with pytest.raises(SystemExit) as end:
        memory.forgetting(steps, capacity=500, report_frequency=steps // 2, frame_stack=frame_stack)
    out, _ = capsys.readouterr()
    assert not end.value.code, out
    assert out.count("stale_leaf_values 0, problems 0") == 2


@pytest.mark.parametrize("frame_stack", [False, True])
@pytest.mark.parametrize("keyed", [False, True])
def test_memory_is_bounded_by_the_replay(frame_stack, keyed):
    """A ring of 200 transitions that are almost all new: nothing accumulates."""
    rng = np.random.default_rng(0)
    shape = (4, 2, 2) if frame_stack else (8,)
    key_shape = (6,) if keyed else None
    graph = TransitionGraph(3, obs_shape=shape, frame_stack=frame_stack, key_shape=key_shape)
    ring, capacity, sizes, ids = deque(), 200, [], set()

    def fresh(obs):
        if frame_stack:  # one new frame a step, as in a game
            return np.concatenate([obs[1:], rng.integers(0, 256, (1, *shape[1:]), np.uint8)])
        return rng.integers(0, 256, shape, np.uint8)

    obs = fresh(np.zeros(shape, np.uint8))
    for step in range(scaled(20_000, 3_000)):
        next_obs = obs if rng.random() < 0.1 else fresh(obs)
        node, next_node = (
            graph.node(o, o.reshape(-1)[-6:] if keyed else None) for o in (obs, next_obs)
        )
        ids.update((node, next_node))
        row = (node, int(rng.integers(3)), float(rng.integers(2)), next_node, bool(step % 50 == 0))
        graph.add(*row)
        ring.append(row)
        if len(ring) > capacity:
            graph.remove(*ring.popleft())
        obs = next_obs
        if (step + 1) % 1000 == 0:
            sizes.append(nbytes(graph))
            assert graph.num_transitions == capacity
            assert graph.num_nodes <= capacity + 1
            if frame_stack:
                assert graph.num_frames <= capacity + 4
    assert max(ids) <= capacity + 2  # ids are dense, and given out again
    assert sizes[-1] == sizes[0]
    assert graph.check_valid() == []
    while ring:
        graph.remove(*ring.popleft())
    assert (graph.num_nodes, graph.num_edges, graph.num_transitions) == (0, 0, 0)
    assert graph.check_valid() == []
    if frame_stack:
        assert graph.num_frames == 0


def test_the_size_of_blocks_does_not_leak():
    """Each node in turn has 60 edges and then one again: its block shrinks, and is reused."""
    graph = TransitionGraph(1, obs_shape=(1,), obs_dtype=np.int64)
    nodes = [graph.node(np.array([k])) for k in range(100)]
    for node in nodes:  # keeps all nodes alive
        graph.add(node, 0, -1.0, node, False)
    sizes = []
    for hub in nodes * scaled(3, 1):
        for k in range(60):
            graph.add(hub, 0, float(k), nodes[k], False)
        sizes.append(nbytes(graph))
        for k in range(60):
            graph.remove(hub, 0, float(k), nodes[k], False)
        assert graph.num_edges == 100
    assert graph.check_valid() == []
    assert sizes[-1] == sizes[10]  # 100 blocks of 64 would be several times the first arrays


# --- observations ---


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((1,), np.uint8),
        ((3,), np.uint8),
        ((8,), np.uint8),
        ((10, 10, 4), np.bool_),
        ((7, 7, 3), np.int32),
        ((5,), np.float32),
        ((), np.int64),
    ],
)
def test_observations_of_any_shape_and_dtype(shape, dtype):
    rng = np.random.default_rng(0)
    twins = Twins(2, shape, dtype)
    for _ in range(20):
        s, s2 = (twins.node(np.asarray(rng.integers(0, 2, shape)).astype(dtype)) for _ in range(2))
        twins.add(s, 1, 0.5, s2, False)
    twins.check()


def test_one_byte_makes_another_node():
    graph = TransitionGraph(1, obs_shape=(9, 9), obs_dtype=np.uint8)
    obs = np.zeros((9, 9), np.uint8)
    ids = {graph.node(obs)}
    for i in range(81):
        other = obs.copy()
        other.flat[i] = 1
        ids.add(graph.node(other))
    assert ids == set(range(82))


def test_non_contiguous_observations():
    graph = TransitionGraph(1, obs_shape=(4, 6), obs_dtype=np.uint8)
    base = np.random.default_rng(0).integers(0, 256, (12, 8), np.uint8)
    node = graph.node(np.ascontiguousarray(base[::2, ::2].T))
    assert graph.node(base[::2, ::2].T) == node
    assert graph.find(np.asfortranarray(base[::2, ::2].T)) == node
    assert graph.node(base[::2, ::2].T[::-1]) != node
    np.testing.assert_array_equal(graph.observations[node], base[::2, ::2].T)


def test_an_observation_is_copied_in():
    """Environments write the next observation into the same buffer."""
    for options in ({}, {"frame_stack": True}):
        graph = TransitionGraph(1, obs_shape=(4, 2, 2), obs_dtype=np.uint8, **options)
        buffer = np.zeros((4, 2, 2), np.uint8)
        first = graph.node(buffer)
        buffer[:] = 1
        second = graph.node(buffer)
        assert first != second
        assert graph.observations[first].max() == 0
        assert graph.observations[second].min() == 1


def test_a_dtype_that_no_file_could_name_is_refused():
    mixed = np.dtype([("position", "i4"), ("has_key", "?")])
    for kind in ({"obs_dtype": mixed}, {"key_shape": (1,), "key_dtype": mixed}):
        with raises_naming("plain dtypes", ValueError):
            TransitionGraph(2, (1,), **kind)


@pytest.mark.parametrize("shape", [(8,), (3,)])  # a whole number of 64-bit words, and not
def test_observations_cannot_be_changed_from_outside(shape):
    graph = TransitionGraph(1, obs_shape=shape, obs_dtype=np.uint8)
    node = graph.node(np.zeros(shape, np.uint8))
    with pytest.raises(ValueError, match="read-only"):
        graph.observations[node] = 9
    graph.observations_of(np.array([node]))[:] = 9  # a copy
    assert graph.find(np.zeros(shape, np.uint8)) == node
    assert graph.check_valid() == []


def test_observations_of_stacked_frames_are_copies():
    graph = TransitionGraph(1, obs_shape=(4, 3, 3), obs_dtype=np.uint8, frame_stack=True)
    node = graph.node(np.zeros((4, 3, 3), np.uint8))
    graph.observations[node] = 9
    with pytest.raises(ValueError, match="read-only"):
        graph.frames[0] = 9
    assert graph.find(np.zeros((4, 3, 3), np.uint8)) == node
    assert graph.check_valid() == []


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.bool_, np.int16])
@pytest.mark.parametrize("stack", [1, 3, 4, 8])
def test_observations_of_stacks_have_the_frames_asked_for(stack, dtype):
    """Also where the memory is arranged for convolutions: 4 frames of bytes."""
    graph = TransitionGraph(1, obs_shape=(stack, 3, 5), obs_dtype=dtype, frame_stack=True)
    frames = np.random.default_rng(0).integers(-100, 100, (20, 3, 5)).astype(dtype)
    expected = np.stack([frames[t : t + stack] for t in range(12)])
    nodes = np.array([graph.node(obs) for obs in expected])
    asked = np.array([7, 0, 7, 11])
    result = graph.observations_of(nodes[asked])
    assert result.dtype == dtype
    np.testing.assert_array_equal(result, expected[asked])
    if stack == 4 and dtype != np.int16:
        assert np.moveaxis(result, 1, -1).flags.c_contiguous
    np.testing.assert_array_equal(
        graph.observations_of(nodes[asked].reshape(2, 2))[1, 0], expected[7]
    )
    np.testing.assert_array_equal(graph.observations_of(nodes[11]), expected[11])
    assert graph.observations_of(nodes[:0]).shape == (0, stack, 3, 5)


def test_frames_are_stored_once():
    """A game of 50 frames makes 47 stacks out of 50 stored frames, not 188."""
    graph = TransitionGraph(2, obs_shape=(4, 3, 3), obs_dtype=np.uint8, frame_stack=True)
    frames = np.random.default_rng(0).integers(0, 256, (50, 3, 3), np.uint8)
    nodes = [graph.node(frames[t : t + 4]) for t in range(47)]
    assert len(set(nodes)) == 47
    assert graph.num_frames == 50
    for t, node in enumerate(nodes):
        np.testing.assert_array_equal(graph.observations[node], frames[t : t + 4])
    # The order of the frames matters, and looking does not store.
    assert graph.find(frames[3::-1]) == -1
    assert graph.find(frames[:4] + 1) == -1
    assert graph.num_frames == 50
    for a, b in pairwise(nodes):
        graph.add(a, 0, 0.0, b, False)
    freed = graph.remove(nodes[0], 0, 0.0, nodes[1], False)
    assert freed == [nodes[0]]
    assert graph.num_frames == 49
    assert graph.check_valid() == []


# --- keys ---


def test_a_coarser_key_merges_states_that_keep_their_first_observation():
    graph = TransitionGraph(1, obs_shape=(2,), obs_dtype=np.float32, **KEYED)
    key = np.zeros(2, np.int16)
    first, later = np.array([0.25, np.nan], np.float32), np.array([0.5, -0.0], np.float32)
    node = graph.node(first, key)
    assert graph.node(later, key) == node == graph.find(later, key)
    np.testing.assert_array_equal(graph.observations[node], first)
    with pytest.raises(ValueError, match="read-only"):
        graph.observations[node] = 9
    other = graph.node(later, key + np.int16(1))  # a finer key: the same observation twice
    assert graph.node(later, key + np.int16(2)) not in (node, other)
    np.testing.assert_array_equal(graph.observations_of(np.array([[node, other]]))[0, 1], later)
    graph.observations_of(node)[:] = 9  # a copy
    np.testing.assert_array_equal(graph.observations[node], first)
    graph.add(node, 0, 0.0, node, False)
    assert graph.remove(node, 0, 0.0, node, False) == [node]
    assert graph.find(first, key) == -1
    assert graph.node(later, key) == node  # the id is given out again, and the state is new
    np.testing.assert_array_equal(graph.observations[node], later)
    with raises_naming(99, KeyError):
        graph.observations_of(np.array([99]))
    assert graph.check_valid() == []


def test_equality_is_that_of_bytes():
    """NaN is equal to itself where its bytes are, and -0.0 is not 0.0: in observations and keys."""
    for options in ({}, {"key_shape": (1,), "key_dtype": np.float64}):
        graph = TransitionGraph(1, obs_shape=(1,), obs_dtype=np.float64, **options)
        nodes = [
            graph.node(value, value if options else None)
            for value in np.array([[np.nan], [0.0], [-0.0], [np.nan]])
        ]
        assert nodes == [0, 1, 2, 0]


@pytest.mark.parametrize("frame_stack", [False, True])
def test_rejects_keys(frame_stack):
    plain = TransitionGraph(1, obs_shape=(4, 1, 1), frame_stack=frame_stack)
    graph = TransitionGraph(1, obs_shape=(4, 1, 1), frame_stack=frame_stack, **KEYED)
    obs, key = np.zeros((4, 1, 1), np.uint8), np.zeros(2, np.int16)
    for call, many in (("node", False), ("find", False), ("nodes", True)):
        observations, keys = (obs[None], key[None]) if many else (obs, key)
        with raises_naming("Require no key", ValueError):
            getattr(plain, call)(observations, keys)
        with raises_naming("Require a key of shape (2,)", ValueError):
            getattr(graph, call)(observations)
        for bad, named in (
            (keys[..., :1], str(keys[..., :1].shape)), (keys.astype(np.int64), "int64"),
            ("word", "<U4"), (3, "()"), (keys.tolist(), "int64"),
        ):  # fmt: skip
            with raises_naming(named, ValueError):
                getattr(graph, call)(observations, bad)
        for bad in (observations[..., 0], observations.astype(np.int16)):
            with raises_naming("observations", ValueError):
                getattr(graph, call)(bad, keys)
    for observations, keys in ((obs, key), (obs[None], key), (obs, key[None])):
        with raises_naming("Require", ValueError):
            graph.nodes(observations, keys)
    with raises_naming("got 2 of 1", ValueError):
        graph.nodes(obs[None], np.stack([key, key]))
    for bad in ({"key_shape": (0,)}, {"key_shape": (1,), "key_dtype": object}):
        with raises_naming("Require arrays of fixed size", ValueError):
            TransitionGraph(1, obs_shape=(4,), **bad)
    for each in (plain, graph):
        assert (each.num_nodes, each.check_valid()) == (0, [])
        assert not frame_stack or each.num_frames == 0


@pytest.mark.parametrize("rule", ["greedy", "double", "behaviour"])
def test_targets_of_a_graph_with_keys_are_those_of_the_oracle(rule):
    """After removals: the key is coarser in one number of the observation, finer by the action."""
    rng, ring = np.random.default_rng(0), deque()
    twins = Twins(3, (2,), np.int64, **KEYED)
    s = twins.node(np.array([0, 0]), np.zeros(2, np.int16))
    for _ in range(scaled(600, 200)):
        action, obs = int(rng.integers(3)), rng.integers(0, 5, 2)
        s2 = twins.node(obs, np.array([obs[0], action], np.int16))
        ring.append((s, action, float(rng.integers(3)), s2, bool(rng.random() < 0.1)))
        twins.add(*ring[-1])
        if len(ring) > 60:
            twins.remove(*ring.popleft())
        s = s2
    twins.check()
    values = rng.normal(size=(2, twins.naive._next_id, 3))
    oracle = Oracle(twins.naive, Scalars(values[0], 0.9), rule, values[1])
    state_of = {twins.ids(state)[0]: state for state in twins.naive.out}
    pairs = [t[:2] for t in ring] + [(state, 0) for state in twins.naive.out]
    nodes, actions = zip(*((twins.ids(s)[0], a) for s, a in pairs), strict=True)
    sub = twins.graph.expand(nodes, actions, depth=4)
    leaves = values[:, [state_of[i] for i in sub.nodes.tolist()]]
    got = q_targets(sub, leaves[0], 0.9, rule, leaves[1])
    np.testing.assert_allclose(got, [oracle.target(*pair, 4) for pair in pairs], atol=1e-9)


# --- many at once ---


@pytest.mark.parametrize("kind", ["plain", "frames", "keys", "keys and frames"])
def test_many_at_once_are_like_one_after_the_other(kind):
    """Bit for bit, ids and free lists included, through every doubling from the smallest room."""
    options = {"frame_stack": "frames" in kind} | (KEYED if "keys" in kind else {})
    many, single = (TransitionGraph(3, (4, 1, 2), capacity=16, **options) for _ in range(2))
    watched, rng, rows = (many.watch(), single.watch()), np.random.default_rng(0), []
    for step in range(scaled(150, 60)):
        n = int(rng.integers(0, 40))
        obs = rng.integers(0, 2 + step % 2 * 200, (n, 4, 1, 2), np.uint8)[:, ::-1]
        keys = rng.integers(0, 20, (n, 2)).astype(np.int16) if "keys" in kind else None
        ids = many.nodes(obs, keys)
        assert ids.dtype == np.int64
        alone = [single.node(obs[i], None if keys is None else keys[i]) for i in range(n)]
        assert ids.tolist() == alone
        new = ids, rng.integers(0, 3, n), rng.integers(0, 3, n) / 7, ids[::-1], rng.random(n) < 0.2
        many.add(*new)
        for row in zip(*new, strict=True):
            single.add(*row)
            rows.append(row)
        while len(rows) > 100:
            k = int(rng.integers(1, 30))
            oldest, rows = rows[:k], rows[k:]
            freed = many.remove(*(np.array(column) for column in zip(*oldest, strict=True)))
            assert freed == [i for row in oldest for i in single.remove(*row)]
        np.testing.assert_equal(many.state(), single.state())
        assert watched[0] == watched[1]
    assert many.check_valid() == []


@pytest.mark.parametrize("frame_stack", [False, True])
def test_room_that_runs_out_at_any_row_is_made(frame_stack):
    """Room doubles from 16: for nodes, frames, edge slots and edges, wherever in the array."""
    for first in range(0, 40, 3):
        graph = TransitionGraph(1, (2, 4), capacity=16, frame_stack=frame_stack)
        obs = np.arange(300 * 8, dtype=np.uint64).view(np.uint8)[: 300 * 8].reshape(300, 2, 4)
        obs[:, 0, :2] = np.arange(300, dtype=np.uint16).view(np.uint8).reshape(300, 2)
        one, rest = graph.nodes(obs[:first]), graph.nodes(obs[first:])
        assert np.append(one, rest).tolist() == list(range(300))
        np.testing.assert_array_equal(graph.observations, obs)
        zeros = np.zeros(300, np.int64)
        for part in (slice(0, first), slice(first, 300)):
            ids = np.arange(300)[part]
            graph.add(ids, zeros[part], ids / 7, np.arange(300)[::-1][part], zeros[part])
        assert graph.check_valid() == []
        assert graph.num_edges == 300


def test_rows_that_are_wrong_are_named_and_nothing_changes(small):
    graph, a, b = small
    good = np.array([a, a]), np.array([1, 1]), np.array([0.5, 0.5]), np.array([b, b]), [0, 0]
    for place, bad, named in (
        (0, [a, 2], "Row 1: Require the id of a node, got 2"),
        (3, [-1, b], "Row 0: Require the id of a node, got -1"),
        (1, [1, 7], "Row 1: Require 0 <= action < 2, got 7"),
        (2, [0.5, np.nan], "Row 1: Require a finite reward, got nan"),
        (4, [0, 2], "Row 1: Require terminated to be True or False, got 2"),
        (2, [0.5], "Require reward of shape (2,), got (1,)"),
        (0, [0.0, 0.0], "Require integers for node"),
    ):
        columns = list(good)
        columns[place] = np.array(bad)
        for method in (graph.add, graph.remove):
            with raises_naming(named):
                method(*columns)
    with raises_naming("Row 1: Require a transition of the graph, got (node 0", KeyError):
        graph.remove(*good)  # it is there once
    with raises_naming("Require observations of shape (n, 3)", ValueError):
        graph.nodes(np.zeros(3, np.uint8))


# --- ids ---


def test_freed_ids_are_used_again():
    graph = TransitionGraph(1, obs_shape=(1,), obs_dtype=np.int64)
    a, b, c = (graph.node(np.array([k])) for k in range(3))
    graph.add(a, 0, 0.0, b, False)
    graph.add(c, 0, 0.0, c, False)
    assert sorted(graph.remove(a, 0, 0.0, b, False)) == sorted([a, b])
    assert graph.find(np.array([0])) == graph.find(np.array([1])) == -1
    again = [graph.node(np.array([k])) for k in (10, 11)]
    assert sorted(again) == sorted([a, b])
    assert graph.num_nodes == 3
    # The new owners inherit nothing.
    assert graph.edges()["source"].tolist() == [c]
    for node, k in zip(again, (10, 11), strict=True):
        assert graph.observations[node] == k
    assert graph.check_valid() == []


def test_what_frees_a_node_and_what_does_not():
    graph = TransitionGraph(1, obs_shape=(1,), obs_dtype=np.int64)
    a, b, alone = (graph.node(np.array([k])) for k in range(3))
    graph.add(a, 0, 0.0, b, False)
    graph.add(a, 0, 0.0, b, False)
    graph.add(a, 0, 1.0, a, False)
    assert graph.remove(a, 0, 0.0, b, False) == []  # the count goes from 2 to 1
    assert graph.remove(a, 0, 0.0, b, False) == [b]  # a has a self-loop left
    assert graph.remove(a, 0, 1.0, a, False) == [a]  # a self-loop names its node twice: freed once
    assert graph.num_nodes == 1  # a node that no edge ever named stays
    assert graph.find(np.array([2])) == alone


def test_a_node_that_is_only_reached_is_kept():
    graph = TransitionGraph(1, obs_shape=(1,), obs_dtype=np.int64)
    a, b, c = (graph.node(np.array([k])) for k in range(3))
    graph.add(a, 0, 0.0, b, True)
    graph.add(b, 0, 0.0, c, False)
    assert graph.remove(b, 0, 0.0, c, False) == [c]
    assert graph.find(np.array([1])) == b
    assert graph.novel_state_ratio == 1.0


def test_novel_state_ratio():
    graph = TransitionGraph(2, obs_shape=(1,), obs_dtype=np.int64)
    assert graph.novel_state_ratio == 0.0
    a, b = (graph.node(np.array([k])) for k in range(2))
    assert graph.novel_state_ratio == 0.0
    for expected in (1.0, 0.5, 1 / 3):
        graph.add(a, 0, 0.0, b, False)
        assert graph.novel_state_ratio == pytest.approx(expected)
    graph.add(b, 1, 0.0, a, False)
    assert graph.novel_state_ratio == pytest.approx(0.5)


def test_rewards_are_told_apart_exactly_and_zero_has_no_sign():
    graph = TransitionGraph(1, obs_shape=(1,), obs_dtype=np.int64)
    a = graph.node(np.array([0]))
    for reward in (0.1, 0.1, np.float32(0.1), np.nextafter(0.1, 1), 0.0, -0.0):
        graph.add(a, 0, reward, a, False)
    edges = graph.edges()
    assert dict(zip(edges["reward"].tolist(), edges["count"].tolist(), strict=True)) == {
        0.1: 2,
        float(np.float32(0.1)): 1,
        float(np.nextafter(0.1, 1)): 1,
        0.0: 2,
    }
    graph.remove(a, 0, -0.0, a, False)
    graph.remove(a, 0, 0.0, a, False)
    with raises_naming(0.0, KeyError):
        graph.remove(a, 0, 0.0, a, False)


def test_numpy_scalars_are_accepted():
    """Replays hand out elements of arrays."""
    graph = TransitionGraph(3, obs_shape=(1,), obs_dtype=np.int64)
    a, b = graph.node(np.array([0])), graph.node(np.array([1]))
    graph.add(np.int32(a), np.uint8(2), np.float32(0.5), np.int64(b), np.bool_(True))
    graph.add(a, 2, 0.5, b, True)
    assert graph.edges()["count"].tolist() == [2]
    assert (
        graph.remove(np.int64(a), np.int64(2), np.float64(0.5), np.int32(b), np.bool_(True)) == []
    )
    assert sorted(graph.remove(a, 2, 0.5, b, 1)) == sorted([a, b])


# --- colliding hashes ---


def collide(monkeypatch, kind):
    """Let keys and edges hash to one value, or to three that are next to each other."""
    from gbcore import kernels

    def few(original):
        return lambda *parts: np.uint64(int(original(*parts)) % 3)

    def one(*parts):
        return np.uint64(2**64 - 1)  # the last slot, from where probing goes on at slot 0

    for name in ("hash_words", "hash_edge"):
        replacement = one if kind == "one" else few(getattr(kernels, name))
        monkeypatch.setattr(kernels, name, replacement)


@pytest.mark.skipif(JIT, reason="compiled kernels keep their hash; see run_all.py")
@pytest.mark.parametrize("frame_stack", [False, True])
@pytest.mark.parametrize("kind", ["one", "few"])
def test_colliding_hashes(monkeypatch, kind, frame_stack):
    """The same random operations where all hashes collide: only bytes decide what is equal."""
    collide(monkeypatch, kind)
    rng = np.random.default_rng(0)
    twins = Twins(2, (4, 1, 1), frame_stack=True) if frame_stack else Twins(2, (4, 1, 1))
    for step in range(300):
        edges = rows(twins.naive.edges())
        if edges and rng.random() < 0.5:
            s, action, reward, done, s2, _ = edges[rng.integers(len(edges))]
            twins.remove(s, action, reward, s2, done)
        else:
            s, s2 = (twins.node(rng.integers(0, 2, (4, 1, 1), np.uint8)) for _ in range(2))
            twins.add(s, int(rng.integers(2)), float(rng.integers(2)), s2, bool(rng.integers(2)))
        if step % 10 == 0:
            twins.check()
    twins.check()
    absent = np.full((4, 1, 1), 7, np.uint8)
    assert twins.graph.find(absent) == -1


# --- saving ---


KEYED = {"key_shape": (2,), "key_dtype": np.int16}


def busy_graph(steps=400, **options):
    """A graph that has seen removals and reuse, and the operations that made it."""
    rng = np.random.default_rng(1)
    graph = TransitionGraph(3, obs_shape=(4, 1, 1), obs_dtype=np.uint8, **options)
    drive(graph, rng, deque(), steps)
    return graph


def drive(graph, rng, ring, steps):
    """Random transitions through a ring of 60. Returns every id that was given out or freed."""

    def met():
        obs = rng.integers(0, 4, (4, 1, 1), np.uint8)
        key = None if graph.key_shape is None else rng.integers(0, 9, 2).astype(np.int16)
        return graph.node(obs, key)

    trace = []
    for _ in range(steps):
        node, next_node = met(), met()
        row = (node, int(rng.integers(3)), float(rng.integers(3)), next_node, bool(rng.integers(2)))
        graph.add(*row)
        ring.append(row)
        trace += [node, next_node]
        if len(ring) > 60:
            trace += graph.remove(*ring.popleft())
    return trace


@pytest.mark.parametrize("frame_stack", [False, True])
@pytest.mark.parametrize("keyed", [False, True])
def test_a_loaded_graph_is_the_same_and_goes_on_the_same(tmp_path, frame_stack, keyed):
    options = {"frame_stack": frame_stack} | (KEYED if keyed else {})
    graph = TransitionGraph(3, obs_shape=(4, 1, 1), obs_dtype=np.uint8, **options)
    rng, ring = np.random.default_rng(1), deque()
    drive(graph, rng, ring, scaled(400, 200))
    path = tmp_path / "graph.npz"
    graph.save(path)
    loaded = TransitionGraph.load(path)

    assert loaded.check_valid() == []
    assert (loaded.num_actions, loaded.obs_shape) == (3, (4, 1, 1))
    assert rows(loaded.edges()) == rows(graph.edges())
    for i in set(graph.edges()["source"].tolist() + graph.edges()["next"].tolist()):
        np.testing.assert_array_equal(loaded.observations[i], graph.observations[i])
        assert keyed or loaded.find(graph.observations[i]) == i
    for name in ("num_nodes", "num_edges", "num_transitions", "novel_state_ratio"):
        assert getattr(loaded, name) == getattr(graph, name)
    if frame_stack:
        assert loaded.num_frames == graph.num_frames

    # The same further operations give the same ids, edges, and samples of an expansion.
    state = rng.bit_generator.state
    more = drive(graph, rng, deque(ring), scaled(400, 200))
    rng.bit_generator.state = state
    assert drive(loaded, rng, deque(ring), scaled(400, 200)) == more
    assert loaded.check_valid() == []
    assert rows(loaded.edges()) == rows(graph.edges())
    roots = graph.edges()["source"][:20], graph.edges()["action"][:20]
    subs = [g.expand(*roots, 4, breadth=5, rng=np.random.default_rng(0)) for g in (graph, loaded)]
    for a, b in zip(*subs, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("num_nodes", [0, 3_000])  # and more than the default capacity
@pytest.mark.parametrize("options", [{}, {"frame_stack": True}, {"key_shape": (4,)}])
def test_graphs_of_any_size_can_be_saved(tmp_path, num_nodes, options):
    graph = TransitionGraph(1, (4, 1, 1), **options)
    obs = np.arange(3_001, dtype=np.uint32).view(np.uint8).reshape(-1, 4, 1, 1)
    keys = obs[:, :, 0, 0] if "key_shape" in options else None
    nodes = graph.nodes(obs[:num_nodes], None if keys is None else keys[:num_nodes])
    zeros = np.zeros(len(nodes), np.int64)
    graph.add(nodes, zeros, zeros, nodes[::-1], zeros)
    graph.save(tmp_path / "graph.npz")
    loaded = TransitionGraph.load(tmp_path / "graph.npz")
    assert loaded.check_valid() == []
    assert rows(loaded.edges()) == rows(graph.edges())
    assert loaded.node(obs[num_nodes], None if keys is None else keys[num_nodes]) == num_nodes


# --- check_valid ---


NODE, EDGE, HELD = "its node", "its first edge", "the first that is held"
CORRUPT = [
    *((name, NODE, None) for name in ("block_start", "block_log2", "degree", "in_degree")),
    ("edge_action", EDGE, 99), ("edge_action", EDGE, -1), ("edge_next", EDGE, BIG),
    ("edge_next", EDGE, -5), ("edge_reward", EDGE, 123.0), ("edge_reward", EDGE, np.nan),
    ("edge_count", EDGE, 77), ("edge_count", EDGE, 0), ("edge_terminated", EDGE, None),
    ("pair_count", NODE, None), ("edge_slots", HELD, -1), ("free_blocks", HELD, -1),
    *(("totals", i, None) for i in range(4)), ("table.totals", 0, None),
    ("table.rows", NODE, None), ("table.hashes", NODE, None), ("table.slots", HELD, -1),
    ("table.links", NODE, -1), ("frames.rows", 0, None), ("frame_uses", 0, None),
    ("contents", NODE, BIG),
]  # fmt: skip


@pytest.mark.parametrize(("name", "at", "value"), CORRUPT)
def test_check_valid_reports_a_corrupt_array(name, at, value):
    """Of a graph in use one element is changed, by one where no value is given."""
    framed = name in ("frames.rows", "frame_uses", "contents")
    graph = busy_graph(steps=200, **({"frame_stack": True} | KEYED if framed else {}))
    assert graph.check_valid() == []
    tables = {"table": graph._keys.table}
    arrays = graph._arrays._asdict() | {"contents": graph._contents}
    if framed:
        tables["frames"] = graph._frames.table
        arrays["frame_uses"] = graph._frame_uses
    for table in tables:
        arrays |= {f"{table}.{key}": array for key, array in tables[table]._asdict().items()}
    array, node = arrays[name], int(np.argmax(graph._arrays.degree))
    at = {NODE: node, EDGE: graph._arrays.block_start[node]}.get(at, at)
    at = np.flatnonzero(array >= 0)[0] if at == HELD else at
    if value is None:
        array[at] = ~array[at] if array.dtype == np.bool_ else array[at] + array.dtype.type(1)
    else:
        assert (array[at] != value).all()
        array[at] = value
    problems = graph.check_valid()
    assert problems
    assert all(isinstance(problem, str) and problem for problem in problems)


# --- the pairs of subgraphs ---


@pytest.mark.parametrize("breadth", [0, 3])
def test_pairs_know_their_nodes(breadth):
    """Each pair has the count, and the next nodes, of that node and action in the graph."""
    graph, rng = busy_graph(), np.random.default_rng(0)
    edges = graph.edges()
    roots = np.append(edges["source"][:7], edges["next"][:3]), np.array([0, 1] * 5)
    sub = graph.expand(*roots, 4, breadth=breadth, rng=rng)
    for case in (sub, prune(sub, "double", lambda nodes: nodes % 3)[0]):
        assert case.pair_nodes.shape == case.pair_action.shape
        np.testing.assert_array_equal(case.pair_nodes[:10], roots[0])
        vertex = np.append(np.append(case.nodes, case.nodes[case.vertex_row]), -1)
        for pair, (node, action) in enumerate(zip(case.pair_nodes, case.pair_action, strict=True)):
            here = (edges["source"] == node) & (edges["action"] == action)
            assert case.pair_count[pair] == edges["count"][here].sum()
            led_to = np.where(edges["terminated"][here], -1, edges["next"][here])
            assert set(vertex[case.outcome_vertex[case.outcome_pair == pair]]) == set(led_to)
    pruned = prune(sub, "behaviour")[0]  # its nodes are the leaves, and it keeps all pairs
    is_read = np.isin(sub.pair_nodes, pruned.nodes) | (np.arange(len(sub.pair_action)) < 10)
    assert not is_read.all()
    np.testing.assert_array_equal(pruned.pair_nodes, np.where(is_read, sub.pair_nodes, -1))
    padded = pad(sub)
    np.testing.assert_array_equal(padded.pair_nodes[:10], roots[0])
    assert padded.pair_nodes.shape == padded.pair_action.shape


def test_pairs_of_trajectories_know_their_nodes():
    node, next_node = np.arange(5, 15), np.arange(6, 16)
    zeros = np.zeros(10)
    cut = np.arange(10) == 9
    sub = trajectory_subgraphs([3, 8], 4, node, zeros.astype(int), zeros, next_node, zeros, cut)
    assert sub.pair_nodes.tolist() == [8, 13, 9, 14, 10, 11]


# --- invalid arguments ---


@pytest.fixture
def small():
    """A graph with the edge 0 -> 1, and the two ids."""
    graph = TransitionGraph(2, obs_shape=(3,), obs_dtype=np.uint8)
    a, b = (graph.node(np.full(3, k, np.uint8)) for k in range(2))
    graph.add(a, 1, 0.5, b, False)
    yield graph, a, b
    # Whatever was refused has left no trace.
    assert graph.check_valid() == []
    assert (graph.num_nodes, graph.num_edges, graph.num_transitions) == (2, 1, 1)
    assert rows(graph.edges()) == [(a, 1, 0.5, False, b, 1)]


def test_rejects_observations(small):
    graph = small[0]
    for method in (graph.node, graph.find):
        with raises_naming("(4,)"):
            method(np.zeros(4, np.uint8))
        with raises_naming("(1, 3)"):
            method(np.zeros((1, 3), np.uint8))
        with raises_naming("float32"):
            method(np.zeros(3, np.float32))
        with raises_naming("int64"):
            method(np.zeros(3, np.int64))


def test_frame_stack_rejects_observations():
    graph = TransitionGraph(2, obs_shape=(4, 3, 3), obs_dtype=np.uint8, frame_stack=True)
    for method in (graph.node, graph.find):
        with raises_naming("(3, 3, 3)"):
            method(np.zeros((3, 3, 3), np.uint8))
        with raises_naming("float32"):
            method(np.zeros((4, 3, 3), np.float32))
    assert graph.num_frames == 0
    assert graph.check_valid() == []


def test_one_rule_for_one_and_many_and_one_error_for_a_mistake(small):
    """Integers, lists and arrays; a bad id is a KeyError and a bad action a ValueError anywhere."""
    graph, a, b = small
    for many in (list, tuple, np.array):
        columns = [many(column) for column in ([a, b], [0, 1], [0.5, 1.0], [b, b], [False, True])]
        graph.add(*columns)
        assert graph.num_transitions == 3
        assert graph.remove(*columns) == []
        alike = [graph.expand(many([a]), many([1]), 1), graph.expand(np.int64(a), 1, 1)]
        for sub in alike:
            assert (sub.root_nodes.tolist(), sub.pair_action.tolist()) == ([a], [1])
    planner = FrontierPlanner(graph)
    for bad in (-1, 2, 1000, BIG, -BIG):
        for call in (
            lambda bad: graph.add(bad, 1, 0.5, b, False),
            lambda bad: graph.add(a, 1, 0.5, bad, False),
            lambda bad: graph.add([a, bad], [1, 1], [0.5, 0.5], [b, b], [False, False]),
            lambda bad: graph.remove(a, 1, 0.5, bad, False),
            lambda bad: graph.remove([bad], [1], [0.5], [b], [False]),
            lambda bad: graph.expand(bad, 1, 1),
            lambda bad: graph.expand([a, bad], [1, 1], 1),
            lambda bad: graph.require_node(bad),
            lambda bad: planner.action_values(bad),
        ):
            with raises_naming(bad, KeyError):
                call(bad)
    for bad in (-1, 2, 77, BIG):
        for call in (
            lambda bad: graph.add(a, bad, 0.5, b, False),
            lambda bad: graph.add([a], [bad], [0.5], [b], [False]),
            lambda bad: graph.remove(a, bad, 0.5, b, False),
            lambda bad: graph.remove([a], [bad], [0.5], [b], [False]),
            lambda bad: graph.expand(a, bad, 1),
        ):
            with raises_naming(bad, ValueError):
                call(bad)


def test_rejects_rewards(small):
    graph, a, b = small
    for bad in (float("nan"), float("inf"), -float("inf"), np.float32("nan")):
        with raises_naming(bad, ValueError):
            graph.add(a, 1, bad, b, False)
        with raises_naming(bad, (ValueError, KeyError)):
            graph.remove(a, 1, bad, b, False)


def test_rejects_the_removal_of_what_is_not_there(small):
    graph, a, b = small
    for bad in ((a, 0, 0.5, b, False), (a, 1, 0.75, b, False), (a, 1, 0.5, a, False)):
        with raises_naming(bad[2], KeyError):
            graph.remove(*bad)
    with raises_naming("True", KeyError):
        graph.remove(a, 1, 0.5, b, True)
    with raises_naming(b, KeyError):
        graph.remove(b, 1, 0.5, a, False)


def test_rejects_constructor_arguments():
    for bad in (0, -3):
        with raises_naming(bad, ValueError):
            TransitionGraph(bad, obs_shape=(1,))
    with raises_naming("(0,)", ValueError):
        TransitionGraph(2, obs_shape=(0,))
    with raises_naming("object", (ValueError, TypeError)):
        TransitionGraph(2, obs_shape=(1,), obs_dtype=object)


@pytest.mark.skipif(not JIT, reason="minutes without compiled kernels")
def test_a_node_with_100_000_outcomes():
    n, graph = 100_000, TransitionGraph(2, obs_shape=(1,), obs_dtype=np.int64)
    nodes = [graph.node(np.array([k])) for k in range(n + 1)]
    for k in range(n):
        graph.add(nodes[0], k % 2, 0.5, nodes[k + 1], k % 3 == 0)
    graph.add(nodes[0], 0, 0.5, nodes[1], True)
    assert (graph.num_edges, graph.num_transitions) == (n, n + 1)
    sub = graph.expand(nodes[:1], [0], depth=3, breadth=10, rng=np.random.default_rng(0))
    assert len(sub.nodes) <= n // 2
    for k in range(n - 1, 0, -1):
        assert graph.remove(nodes[0], k % 2, 0.5, nodes[k + 1], k % 3 == 0) == [nodes[k + 1]]
    assert graph.edges()["count"].tolist() == [2]
    assert graph.check_valid() == []


def test_counts_beyond_32_bits(tmp_path):
    """Written into a file, since nobody can wait for 2**40 additions; then they go on."""
    graph = TransitionGraph(2, obs_shape=(1,), obs_dtype=np.int64)
    a, b, before = (graph.node(np.array([k])) for k in range(3))
    graph.add(before, 0, 0.0, a, False)
    for action, reward in ((0, 0.0), (0, 1.0), (1, 0.0)):
        graph.add(a, action, reward, b, True)
    path = tmp_path / "graph.npz"
    graph.save(path)
    saved = dict(np.load(path))
    first = saved["block_start"][a]
    saved["edge_count"][first : first + 3] = 5 * BIG, BIG, 2 * BIG
    saved["pair_count"][a] = 6 * BIG, 2 * BIG
    saved["totals"][1] = 8 * BIG + 1
    np.savez(path, **saved)
    graph = TransitionGraph.load(path)
    assert graph.check_valid() == []
    graph.add(a, 0, 0.0, b, True)
    assert graph.edges()["count"].tolist() == [5 * BIG + 1, BIG, 2 * BIG, 1]
    assert graph.num_transitions == 8 * BIG + 2
    graph.remove(a, 0, 0.0, b, True)
    sub = graph.expand([a], [0], depth=1)
    leaf_q = np.zeros((len(sub.nodes), 2))
    np.testing.assert_allclose(q_targets(sub, leaf_q, 0.9), [1 / 6])
    # Of the three transitions of a one is kept, in proportion to its count: 6 of 8 are action 0.
    rng, kept = np.random.default_rng(0), []
    for _ in range(scaled(2_000)):
        sub = graph.expand([before], [0], depth=2, breadth=1, rng=rng)
        kept.append(sub.pair_action[1])
    assert abs(np.mean(kept) - 0.25) < 0.07
    assert graph.check_valid() == []


DAMAGE = {
    "edge_next": (-1, BIG),
    "edge_action": (-1, 99),
    "edge_count": (0, -1),
    "edge_reward": (np.nan, np.inf),
    "block_start": (-7, BIG),
    "block_log2": (-2, 48, 62, BIG),
    "degree": (-1, BIG),
    "in_degree": (-1, BIG),
    "pair_count": (-1, BIG),
    "totals": (-1, 1, BIG),
    "free_blocks": (0, -2, BIG),
    "edge_room": (-1, 3),
    "keys_links": (-1, 0, -3, BIG),
    "keys_totals": (-1, 0, BIG),
    "keys_rows": (),
    "num_actions": (0, 2, -1),
    "obs_shape": (0, 7, -1),
    "obs_dtype": ("|O", "<U9", "nonsense"),
    "frames_links": (-1, 0, -3, BIG),
    "frames_totals": (-1, 0, BIG),
    "frame_uses": (-1, BIG),
    "contents": (-1, BIG),
    "key_shape": (0, 7, -1),
    "key_dtype": ("|O", "<U9", "nonsense"),
}


def test_a_graph_without_edges_has_room_for_one():
    saved = TransitionGraph(2, (1,)).state()
    with pytest.raises(ValueError, match="Require room for 0 edges, got 0"):
        TransitionGraph.from_state({**saved, "edge_room": np.array(0)})


@pytest.mark.parametrize("name", DAMAGE)
def test_load_refuses_damaged_arrays(name, tmp_path):
    """Every array in turn: a wrong element, too short, of another dtype, missing."""
    path = tmp_path / "graph.npz"
    graph = busy_graph(frame_stack=True, steps=200, **KEYED)
    graph.save(path)
    whole = dict(np.load(path))
    node = graph.edges()["source"][0]
    of_nodes = ("keys_links", "block_start", "block_log2", "degree", "in_degree", "pair_count")
    index = node if name in (*of_nodes, "contents") else 0
    if name.startswith("edge_"):
        index = whole["block_start"][node]
    variants = [{k: v for k, v in whole.items() if k != name}]
    for value in DAMAGE[name]:
        array = whole[name].copy()
        if array.ndim:
            assert not np.array_equal(array[index], value)
            array[index] = value
        else:
            array = np.array(value) if array.dtype.kind == "U" else array.dtype.type(value)
        variants.append(whole | {name: array})
    if whole[name].ndim and name not in ("obs_shape", "key_shape"):
        variants += [whole | {name: whole[name][:-1]}, whole | {name: whole[name][:0]}]
    if whole[name].dtype.kind in "iu" and whole[name].ndim:
        variants.append(whole | {name: whole[name].astype(np.int16)})
    if name == "frame_uses":  # without it, the file is of a graph without frames
        variants = variants[1:]
    variants.append(whole | {name: 7})  # no array
    other = TransitionGraph(3, (4, 1, 1), frame_stack=True, **KEYED)
    keyed = np.zeros((4, 1, 1), np.uint8), np.zeros(2, np.int16)
    node = other.node(*keyed)
    for variant in variants:
        np.savez(path, **variant)
        with raises_naming("graph.npz", ValueError):
            TransitionGraph.load(path)
        with pytest.raises((ValueError, KeyError)):
            other.restore(variant)
    assert (other.num_nodes, other.find(*keyed)) == (1, node)
    assert other.check_valid() == []


def test_a_graph_is_restored_into_one_of_its_kind_alone():
    state = busy_graph(steps=100).state()
    for kind, named in (
        ((2, (4, 1, 1)), "num_actions"), ((3, (2, 2, 1)), "obs_shape"),
        ((3, (4, 1, 1), np.int8), "obs_dtype"), ((3, (4, 1, 1), np.uint8, True), "frame_stack"),
        ((3, (4, 1, 1), np.uint8, False, 16, (4, 1, 1)), "key_shape"),
    ):  # fmt: skip
        with raises_naming(named, ValueError):
            TransitionGraph(*kind).restore(state)
    large = TransitionGraph(3, (4, 1, 1), capacity=5_000)
    large.restore(state)
    room = nbytes(large)
    for k in range(4_000):
        large.node(np.array([k], np.uint32).view(np.uint8).reshape(4, 1, 1))
    assert nbytes(large) == room


def test_load_rejects_other_files(tmp_path):
    path = tmp_path / "other.npz"
    np.savez(path, something=np.zeros(3))
    with raises_naming("other.npz", ValueError):
        TransitionGraph.load(path)
    with pytest.raises(FileNotFoundError):
        TransitionGraph.load(tmp_path / "missing.npz")
