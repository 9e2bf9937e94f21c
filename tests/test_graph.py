"""TransitionGraph against NaiveGraph: the same operations, the same graph."""

import copy
import pickle
import tempfile
from pathlib import Path

import numpy as np
import pytest
from conftest import JIT, Twins, graph_of, raises_naming, rows, scaled
from hypothesis import settings, stateful
from hypothesis import strategies as st

from gbcore import FrontierEpisodes, FrontierPlanner, Replay, TransitionGraph, q_targets
from gbcore.kernels import edges, hashing

BIG = 2**40


@st.composite
def kinds(draw):
    """Function of a number that is an observation (and its key), and what a graph of them takes.

    Observations are two bytes, or stacks of 4 frames out of 3: frames are shared, also within one
    stack. Of 10 with keys 4 are met under two keys each, and 3 keys have two observations each.
    """
    has_frames, keyed = draw(st.booleans()), draw(st.booleans())

    def met(k):
        obs = k % 6 if keyed else k
        frames = [obs % 3, obs // 3 % 3, obs % 2, obs // 3 % 3]
        obs = np.array([obs, 7 * obs % 5], np.uint8)
        obs = np.tile(np.array(frames, np.uint8)[:, None, None], (3, 3)) if has_frames else obs
        return (obs, np.array([k % 7, 300, -1], np.int16)) if keyed else (obs,)

    options = {"key_shape": (3,), "key_dtype": np.int16} if keyed else {}
    return met, ((4, 3, 3) if has_frames else (2,), {"frame_stack": has_frames} | options)


class GraphMachine(stateful.RuleBasedStateMachine):
    """Saving and loading between any two operations changes nothing."""

    def make(self):
        shape, options = self.kind
        return Twins(3, shape, **options)

    @stateful.initialize(kind=kinds())
    def start(self, kind):
        self.keyed, self.kind = kind
        self.twins = self.make()

    @stateful.rule(k=st.integers(0, 9))
    def node(self, k):
        self.twins.node(*self.keyed(k))

    @stateful.rule(
        k=st.integers(0, 9),
        action=st.integers(0, 2),
        rewards=st.sampled_from([(0.0, -0.0), (0.1, float(np.float32(0.1))), (1.0,)]),
        k2=st.integers(0, 9),
        done=st.booleans(),
        times=st.integers(1, 3),
    )
    def add(self, k, action, rewards, k2, done, times):
        """One reward several times, or in turn two that are told apart exactly; 0 has no sign."""
        s, s2 = self.twins.node(*self.keyed(k)), self.twins.node(*self.keyed(k2))
        for i in range(times):
            self.twins.add(s, action, rewards[i % len(rewards)], s2, done)

    @stateful.precondition(lambda self: self.twins.naive.edges())
    @stateful.rule(which=st.integers(0, 10_000), all_of_it=st.booleans())
    def remove(self, which, all_of_it):
        edges = self.twins.naive.edges()
        s, action, reward, done, s2, count = edges[which % len(edges)]
        for _ in range(count if all_of_it else 1):
            self.twins.remove(s, action, reward, s2, done)

    @stateful.precondition(lambda self: self.twins.naive.edges())
    @stateful.rule(which=st.integers(0, 10_000), change=st.integers(0, 3))
    def remove_what_is_not_there(self, which, change):
        """An edge that differs in one part from one that exists."""
        edges, id_of = self.twins.naive.edges(), lambda state: self.twins.ids(state)[0]
        s, action, reward, done, s2, _ = edges[which % len(edges)]
        s, action, reward, done, s2 = (
            (s, (action + 1) % 3, reward, done, s2), (s, action, reward + 0.25, done, s2),
            (s, action, reward, not done, s2), (s2, action, reward, done, s),
        )[change]  # fmt: skip
        if (action, reward, done, s2) not in self.twins.naive.out[s]:
            with raises_naming(reward, KeyError):
                self.twins.graph.remove(id_of(s), action, reward, id_of(s2), done)

    @stateful.rule(k=st.integers(0, 12))
    def find(self, k):
        keyed = self.keyed(k)
        found, state = self.twins.graph.find(*keyed), self.twins.naive.find(*keyed)
        assert (found == -1) == (state == -1)

    @stateful.rule()
    def save_and_load(self):
        self.twins.graph = reloaded(self.twins.graph)

    @stateful.rule()
    def restore_into_another_graph(self):
        other = self.make().graph
        other.add(other.node(*self.keyed(1)), 0, 0.0, other.node(*self.keyed(8)), False)
        other.restore(self.twins.graph.state())
        self.twins.graph = other

    @stateful.invariant()
    def agree(self):
        self.twins.check()
        if self.twins.graph.frame_stack:  # each frame is stored once
            living = self.twins.naive.observation.values()
            frames = {frame.tobytes() for obs in living for frame in obs}
            assert len(self.twins.graph.frames) == len(frames)


def reloaded(graph):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graph.npz"
        graph.save(path)
        return TransitionGraph.load(path)


GraphMachine.TestCase.settings = settings(
    max_examples=scaled(80, 50), stateful_step_count=scaled(30, 25)
)
TestGraphMachine = GraphMachine.TestCase


def nbytes(graph):
    """Bytes of all that a graph holds."""
    return len(pickle.dumps(graph))


@pytest.mark.parametrize("frame_stack", [False, True])
@pytest.mark.parametrize("keyed", [False, True])
def test_memory_is_bounded_by_the_replay(frame_stack, keyed):
    """A ring of 200 transitions that are almost all new: nothing accumulates."""
    rng, capacity, sizes, ids = np.random.default_rng(0), 200, [], set()
    key_shape = (6,) if keyed else None
    graph = TransitionGraph(3, (4, 2, 2), frame_stack=frame_stack, key_shape=key_shape)
    replay, obs = Replay(graph, capacity), np.zeros((4, 2, 2), np.uint8)
    for step in range(scaled(8_000, 3_000)):
        new_frame = rng.integers(0, 256, (1, 2, 2), np.uint8)
        next_obs = obs if rng.random() < 0.1 else np.concatenate([obs[1:], new_frame])
        row = obs, int(rng.integers(3)), float(rng.integers(2)), next_obs, step % 50 == 0, False
        replay.record(*row, *((o.reshape(-1)[-6:] if keyed else None) for o in (obs, next_obs)))
        ids.update((replay.node[step % capacity], replay.next_node[step % capacity]))
        obs = next_obs
        if (step + 1) % 1000 == 0:
            sizes.append(nbytes(graph))
            assert graph.num_transitions == capacity
            assert graph.num_nodes <= capacity + 1
            if frame_stack:
                assert len(graph.frames) <= capacity + 4
    assert max(ids) <= capacity + 2  # ids are dense, and given out again
    assert sizes[-1] == sizes[0]
    assert graph.check_valid() == []
    graph.remove(*(getattr(replay, name) for name in replay.COLUMNS[:5]))
    assert (graph.num_nodes, graph.num_edges, graph.num_transitions) == (0, 0, 0)
    assert graph.check_valid() == []
    assert not reloaded(graph).generations.any()
    if frame_stack:
        assert len(graph.frames) == 0


def test_the_size_of_blocks_does_not_leak():
    """Each node in turn has 60 edges and then one again: its block shrinks, and is reused."""
    loops = [(node, 0, -1.0, node, False) for node in range(100)]  # they keep all nodes alive
    graph, sizes = graph_of(100, loops, num_actions=1), []
    for hub in [*range(100)] * scaled(3, 1):
        for k in range(60):
            graph.add(hub, 0, float(k), k, False)
        sizes.append(nbytes(graph))
        for k in range(60):
            graph.remove(hub, 0, float(k), k, False)
        assert graph.num_edges == 100
    assert graph.check_valid() == []
    assert sizes[-1] == sizes[10]  # 100 blocks of 64 would be several times the first arrays


SHAPES = {
    np.uint8: [(1,), (3,), (8,), (9, 9)],
    np.bool_: [(5, 5, 4), (9,), ()],
    np.int32: [(7, 7, 3)],
    np.float32: [(5,)],
    np.int64: [()],
}


@pytest.mark.parametrize("dtype", SHAPES)
def test_observations_of_any_shape_and_dtype(dtype):
    """One element makes another node."""
    for shape in SHAPES[dtype]:
        twins, zero = Twins(2, shape, dtype), np.zeros(shape, dtype)
        first = twins.node(zero)
        for i in range(zero.size):
            obs = zero.copy()
            obs.flat[i] = 1
            twins.add(first, 1, 0.5, twins.node(obs), False)
        assert twins.graph.num_nodes == zero.size + 1
        twins.check()


def test_a_boolean_takes_a_bit():
    graph = TransitionGraph(2, (10, 10, 4), np.bool_)
    obs = np.random.default_rng(0).random((500, 10, 10, 4)) < 0.1
    np.testing.assert_array_equal(graph.observations_of(graph.nodes(obs)), obs)
    assert graph._keys.table.rows[0].nbytes == 56  # 400 bits, in whole words


KEYED = {"key_shape": (2,), "key_dtype": np.int16}


@pytest.mark.parametrize("shape", [(8,), (3,), (4, 3, 5)])  # whole 64-bit words, and not
@pytest.mark.parametrize("options", [{}, KEYED, {"frame_stack": True}])
def test_observations_are_copied_in_and_out(shape, options):
    """Environments write the next observation into the same buffer, which may be strided."""
    if "frame_stack" in options and len(shape) < 2:
        return
    graph = TransitionGraph(1, shape, **options)
    buffer = np.zeros((*shape[::-1], 2), np.uint8).T[0]
    keys = [np.full(2, k, np.int16) if "key_shape" in options else None for k in range(2)]
    seen = np.random.default_rng(0).integers(256, size=(2, *shape), dtype=np.uint8)
    for k in range(2):
        buffer[:] = seen[k]
        assert graph.node(buffer, keys[k]) == k == graph.node(seen[k], keys[k])
        assert graph.find(np.asfortranarray(buffer), keys[k]) == k
    if keys[0] is not None:
        assert graph.node(seen[1], keys[0]) == 0, "the first observation of a key stays"
    with pytest.raises(ValueError, match="read-only"):
        graph.observations[0] = 9
    graph.observations_of(np.array([0, 1]))[:] = 9  # copies
    np.testing.assert_array_equal(graph.observations, seen)
    with raises_naming(99, KeyError):
        graph.observations_of([99])
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


def test_equality_is_that_of_bytes():
    """NaN is equal to itself where its bytes are, and -0.0 is not 0.0: in observations and keys."""
    for options in ({}, {"key_shape": (1,), "key_dtype": np.float64}):
        graph = TransitionGraph(1, obs_shape=(1,), obs_dtype=np.float64, **options)
        values = np.array([[np.nan], [0.0], [-0.0], [np.nan]])
        nodes = [graph.node(value, value if options else None) for value in values]
        assert nodes == [0, 1, 2, 0]


@pytest.mark.parametrize("frame_stack", [False, True])
def test_rejects_observations_and_keys(frame_stack):
    plain = TransitionGraph(1, obs_shape=(4, 1, 1), frame_stack=frame_stack)
    graph = TransitionGraph(1, obs_shape=(4, 1, 1), frame_stack=frame_stack, **KEYED)
    obs, key = np.zeros((4, 1, 1), np.uint8), np.zeros(2, np.int16)
    for call, many in (("node", False), ("find", False), ("nodes", True)):
        observations, keys = (obs[None], key[None]) if many else (obs, key)
        for bad, named in (
            (obs[:3], "(3, 1, 1)"), (obs[None, None], "(1, 1, 4, 1, 1)"),
            (observations.astype(np.float32), "float32"), (observations.astype(np.int8), "int8"),
        ):  # fmt: skip
            for each, *with_key in ((plain,), (graph, keys)):
                with raises_naming(named, ValueError):
                    getattr(each, call)(bad, *with_key)
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
    for observations, keys in ((obs, key), (obs[None], key), (obs, key[None])):
        with raises_naming("Require", ValueError):
            graph.nodes(observations, keys)
    with raises_naming("got 2 of 1", ValueError):
        graph.nodes(obs[None], np.stack([key, key]))
    for each in (plain, graph):
        assert (each.num_nodes, each.check_valid()) == (0, [])
        assert not frame_stack or len(each.frames) == 0


def test_rejects_constructor_arguments():
    mixed = np.dtype([("position", "i4"), ("has_key", "?")])
    for bad, named in (
        ({"num_actions": 0}, 0), ({"num_actions": -3}, -3), ({"obs_shape": (0,)}, "(0,)"),
        ({"obs_dtype": object}, "object"), ({"obs_dtype": mixed}, "plain dtypes"),
        ({"key_shape": (0,)}, "(0,)"), ({"key_shape": (1,), "key_dtype": object}, "object"),
        ({"key_shape": (1,), "key_dtype": mixed}, "plain dtypes"),
    ):  # fmt: skip
        with raises_naming(named, ValueError):
            TransitionGraph(**{"num_actions": 2, "obs_shape": (1,)} | bad)


@pytest.mark.parametrize("kind", ["plain", "frames", "keys", "keys and frames"])
def test_many_at_once_are_like_one_after_the_other(kind):
    """Bit for bit, ids and free lists included: what the machines show of one holds for many."""
    options = {"frame_stack": "frames" in kind} | (KEYED if "keys" in kind else {})
    many, single = (TransitionGraph(3, (4, 1, 2), capacity=16, **options) for _ in range(2))
    rng, rows, since = np.random.default_rng(0), [], 0
    for step in range(scaled(150, 60)):
        n = int(rng.integers(0, 40))
        obs = rng.integers(0, 2 + step % 2 * 200, (n, 4, 1, 2), np.uint8)[:, ::-1]
        keys = rng.integers(0, 20, (n, 2)).astype(np.int16) if "keys" in kind else None
        ids = many.nodes(obs, keys)
        assert ids.dtype == np.int64
        alone = [single.node(obs[i], None if keys is None else keys[i]) for i in range(n)]
        assert ids.tolist() == alone
        rewards = rng.choice([0.0, -0.0, 0.3], n)
        new = ids, rng.integers(0, 3, n), rewards, ids[::-1], rng.random(n) < 0.2
        many.add(*new)
        for row in zip(*new, strict=True):
            single.add(*row)
            rows.append(row)
        many_freed = []
        while len(rows) > 100:
            k = int(rng.integers(1, 30))
            oldest, rows = rows[:k], rows[k:]
            freed = many.remove(*(np.array(column) for column in zip(*oldest, strict=True)))
            assert freed == [i for row in oldest for i in single.remove(*row)]
            many_freed += freed
        states = many.state(), single.state()
        logs = [state.pop("log") for state in states]  # one that grows earlier forgets less
        for state in states:
            state["totals"][edges.TOTAL_FORGOTTEN] = 0
        np.testing.assert_equal(*states)
        np.testing.assert_array_equal(logs[0][len(logs[0]) - len(logs[1]) :], logs[1])
        assert set(many.changed(since).tolist()) >= set(new[0].tolist()) - set(many_freed)
        since = many.num_logged
    assert many.check_valid() == []


def test_rows_that_are_wrong_are_named_and_nothing_changes(small):
    graph, a, b = small
    good = np.array([a, a]), np.array([1, 1]), np.array([0.5, 0.5]), np.array([b, b]), [0, 0]
    for place, bad, named in (
        (0, [a, 2], "Row 1: Require the id of a node, got 2"),
        (3, [-1, b], "Row 0: Require the id of a node, got -1"),
        (3, np.array([2**64 - 1, b], "<u8"), "Row 0: Require the id of a node, got 922"),
        (3, np.array([2**64 - 1, b], ">u8"), "Row 0: Require the id of a node, got 922"),
        (1, [1, 7], "Row 1: Require 0 <= action < 2, got 7"),
        (2, [0.5, np.nan], "Row 1: Require a finite reward, got nan"),
        (4, [0, 2], "Row 1: Require terminated to be True or False, got 2"),
        (2, [0.5], "Require reward of shape (2,), got (1,)"),
        (0, [0.0, 0.0], "Require integers for node"),
    ):
        columns = list(good)
        columns[place] = np.array(bad)
        for method in (graph.add, graph.remove):
            with raises_naming(named, KeyError if "id of" in named else (ValueError, TypeError)):
                method(*columns)
    with raises_naming("Row 1: Require a transition of the graph, got (node 0", KeyError):
        graph.remove(*good)  # it is there once
    with raises_naming("Row 0: Require a transition of the graph, got (node 1", KeyError):
        graph.remove([b, a], *good[1:])
    with raises_naming("Require observations of shape (n, 3)", ValueError):
        graph.nodes(np.zeros(3, np.uint8))


def test_an_id_that_was_freed_is_refused():
    graph = graph_of(3, [(0, 1, 0.5, 1, False), (2, 1, 0.5, 2, False)])
    assert graph.remove(0, 1, 0.5, 1, False) == [0, 1]
    for call in (graph.add, graph.remove):
        for nodes in ((1, 2), (2, 1)):
            with raises_naming("got 1", KeyError):
                call(nodes[0], 1, 0.5, nodes[1], False)
    with raises_naming("got 1", KeyError):
        graph.expand([2, 1], [1, 1], 1)


@pytest.mark.skipif(JIT, reason="compiled kernels keep their hash; see run_all.py")
@pytest.mark.parametrize("num_hashes", [1, 3])
def test_colliding_hashes(monkeypatch, num_hashes):
    """All hash to the last slots, from where probing goes on at slot 0: only bytes decide."""

    def colliding(hash_of):
        return lambda *parts: np.uint64(2**64 - 1 - int(hash_of(*parts)) % num_hashes)

    for module, name in ((hashing, "hash_words"), (edges, "hash_edge")):
        monkeypatch.setattr(module, name, colliding(getattr(module, name)))
    added = [(s, action, 0.5, 1, False) for s in (0, 2) for action in (0, 1)]
    graph = graph_of(3, added)
    graph.remove(*added[-1])
    with raises_naming("Require a transition", KeyError):  # of state 0 there is one in its place
        graph.remove(*added[-1])
    stateful.run_state_machine_as_test(
        GraphMachine, settings=settings(max_examples=16, stateful_step_count=25)
    )


def busy_graph(steps=400, **options):
    """A graph after random transitions through a ring of 60: ids were freed and used again."""
    rng, graph = np.random.default_rng(1), TransitionGraph(3, obs_shape=(4, 1, 1), **options)
    replay = Replay(graph, 60)
    for _ in range(steps):
        obs, next_obs = rng.integers(0, 4, (2, 4, 1, 1), np.uint8)
        keys = rng.integers(0, 9, (2, 2)).astype(np.int16) if graph.key_shape else (None, None)
        action, reward, over = rng.integers([3, 3, 2]).tolist()
        replay.record(obs, action, float(reward), next_obs, bool(over), False, *keys)
    return graph


@pytest.mark.parametrize("num_nodes", [0, 3_000])  # and more than the default capacity
def test_graphs_of_any_size_can_be_saved(tmp_path, num_nodes):
    graph = TransitionGraph(1, (4, 1, 1), frame_stack=True, key_shape=(4,))
    obs = np.arange(3_001, dtype=np.uint32).view(np.uint8).reshape(-1, 4, 1, 1)
    nodes = graph.nodes(obs[:num_nodes], obs[:num_nodes, :, 0, 0])
    zeros = np.zeros(len(nodes), np.int64)
    graph.add(nodes, zeros, zeros, nodes[::-1], zeros)
    graph.save(tmp_path / "graph.npz")
    loaded = TransitionGraph.load(tmp_path / "graph.npz")
    assert loaded.check_valid() == []
    np.testing.assert_equal(loaded.state(), graph.state())
    assert loaded.node(obs[num_nodes], obs[num_nodes, :, 0, 0]) == num_nodes


@pytest.fixture(scope="module")
def busy():
    return busy_graph(steps=200, frame_stack=True, **KEYED)


NODE, EDGE, HELD = "its node", "its first edge", "the first that is held"


@pytest.mark.parametrize(
    ("name", "at", "value"),
    [
        ("edge_reward", EDGE, 123.0), ("edge_terminated", EDGE, None), ("edge_slots", HELD, -1),
        ("degree", NODE, None), ("pair_count", NODE, None), ("contents", NODE, 2**31 - 1),
        ("edge_next", EDGE, 10**6), ("edge_action", EDGE, 99), ("edge_count", EDGE, 0),
        ("edge_source", EDGE, None), ("in_degree", NODE, None), ("in_first", HELD, -1),
        ("in_next", HELD, -1), ("block_start", NODE, None), ("block_log2", NODE, None),
        ("free_blocks", 0, 0), ("totals", 0, None), ("totals", 1, None), ("totals", 3, None),
        ("table.totals", 0, None), ("table.rows", NODE, None), ("table.hashes", NODE, None),
        ("table.slots", HELD, -1), ("frames.rows", 0, None), ("frame_uses", 0, None),
        ("table.links", NODE, -1),
    ],
)  # fmt: skip
def test_check_valid_reports_a_corrupt_array(name, at, value, busy):
    """Of a graph in use one element is changed, by one where no value is given."""
    graph = copy.deepcopy(busy)
    assert graph.check_valid() == []
    arrays = graph._arrays._asdict()
    arrays |= {"contents": graph._contents, "frame_uses": graph._frame_uses}
    for table, interner in (("table", graph._keys), ("frames", graph.frames)):
        arrays |= {f"{table}.{key}": array for key, array in interner.table._asdict().items()}
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


def test_one_rule_for_one_and_many_and_one_error_for_a_mistake(small):
    """Integers, lists and arrays; a bad id is a KeyError and a bad action a ValueError anywhere."""
    graph, a, b = small
    graph.add(np.int32(a), np.uint8(1), np.float32(0.5), np.int64(b), np.bool_(True))
    assert graph.remove(np.int64(a), np.int64(1), np.float64(0.5), np.int32(b), 1) == []
    for many in (list, tuple, np.array):
        columns = [many(column) for column in ([a, b], [0, 1], [0.5, 1.0], [b, b], [False, True])]
        graph.add(*columns)
        assert graph.num_transitions == 3
        assert graph.remove(*columns) == []
        alike = [graph.expand(many([a]), many([1]), 1), graph.expand(np.int64(a), 1, 1)]
        for sub in alike:
            assert (sub.root_nodes.tolist(), sub.pair_action.tolist()) == ([a], [1])
    graph.add([a], [0], [-0.0], [b], [False])  # zero has no sign
    assert graph.remove(a, 0, 0.0, b, False) == []
    planner, episodes, rng = FrontierPlanner(graph), FrontierEpisodes(graph), None
    for bad in (-1, 2, 1000, BIG, -BIG):
        for call in (
            lambda bad: graph.add(bad, 1, 0.5, b, False),
            lambda bad: graph.add(a, 1, 0.5, bad, False),
            lambda bad: graph.remove(a, 1, 0.5, bad, False),
            lambda bad: graph.expand(bad, 1, 1),
            lambda bad: graph.expand([a, bad], [1, 1], 1),
            lambda bad: graph.require_node(bad),
            lambda bad: planner.action_values(bad),
            lambda bad: planner.act(bad, rng),
            lambda bad: episodes.act(bad, rng),
        ):
            with raises_naming(bad, KeyError):
                call(bad)
    for bad in (-1, 2, 77, BIG):
        for call in (
            lambda bad: graph.add(a, bad, 0.5, b, False),
            lambda bad: graph.remove(a, bad, 0.5, b, False),
            lambda bad: graph.expand(a, bad, 1),
        ):
            with raises_naming(bad, ValueError):
                call(bad)
    for bad in (np.nan, np.inf, -np.inf, np.float32("nan")):
        for call in (graph.add, graph.remove):
            with raises_naming(bad, ValueError):
                call(a, 1, bad, b, False)


def test_a_node_with_40_000_outcomes():
    n, graph = scaled(40_000, 600), TransitionGraph(2, obs_shape=(1,), obs_dtype=np.int64)
    hub, *nodes = graph.nodes(np.arange(n + 1)[:, None])
    k, half = np.arange(n), np.full(n, 0.5)
    columns = np.full(n, hub), k % 2, half, np.array(nodes), k % 3 == 0
    graph.add(*columns)
    graph.add(hub, 0, 0.5, nodes[0], True)
    graph.add(nodes[0], 1, 0.25, hub, False)  # from where 10 of them are sampled
    sub = graph.expand(nodes[0], 1, depth=3, breadth=10, rng=np.random.default_rng(0))
    targets = q_targets(sub, np.zeros((len(sub.nodes), 2)), 1.0, "behaviour")
    assert targets == pytest.approx([0.75])
    graph.remove(nodes[0], 1, 0.25, hub, False)
    assert graph.remove(*columns) == nodes[1:]
    assert graph.edges()["count"].tolist() == [1]
    assert graph.check_valid() == []


def test_counts_up_to_the_most_that_columns_hold():
    """Written into a state, since nobody can wait for 2**31 additions; then they go on."""
    a, b, before = range(3)
    rows = [(a, action, reward, b, True) for action, reward in ((0, 0.0), (0, 1.0), (1, 0.0))]
    graph = graph_of(3, [(before, 0, 0.0, a, False), *rows])
    saved, part = copy.deepcopy(graph.state()), (2**31 - 4) // 8  # sums of two parts pass 2**29
    first = saved["block_start"][a]
    saved["edge_count"][first : first + 3] = 5 * part, part, 2 * part
    saved["pair_count"][a] = 6 * part, 2 * part
    saved["totals"][1] = 8 * part + 1
    graph = TransitionGraph.from_state(saved)
    assert graph.check_valid() == []
    room = 2**31 - 1 - graph.num_transitions
    more = [a] * room, [0] * room, [0.0] * room, [b] * room, [True] * room
    graph.add(*more)
    assert graph.num_transitions == 2**31 - 1
    for refused in (graph.add, lambda *row: graph.add(*([one] for one in row))):
        with pytest.raises(MemoryError, match="Require at most 2,147,483,647 transitions"):
            refused(a, 0, 0.0, b, True)
    assert graph.num_transitions == 2**31 - 1
    graph.remove(*more)
    assert graph.edges()["count"].tolist() == [5 * part, part, 2 * part, 1]
    sub = graph.expand([a], [0], depth=1)
    leaf_q = np.zeros((len(sub.nodes), 2))
    np.testing.assert_allclose(q_targets(sub, leaf_q, 0.9), [1 / 6])
    # Of the three transitions of a one is kept, in proportion to its count: 6 of 8 are action 0.
    n, rng = scaled(2_000), np.random.default_rng(0)
    kept = graph.expand([before] * n, [0] * n, depth=2, breadth=1, rng=rng).pair_action[n:]
    assert len(kept) == n
    assert abs(np.mean(kept) - 0.25) < 0.07
    assert graph.check_valid() == []


def test_load_refuses_a_damaged_file_and_arrays_of_another_kind(busy, tmp_path):
    """Every array in turn: missing, too short, of another dtype; and bytes that changed."""
    path, graph = tmp_path / "graph.npz", busy
    graph.save(path, compress=False)
    data, rng = path.read_bytes(), np.random.default_rng(0)
    other = TransitionGraph(3, (4, 1, 1), frame_stack=True, **KEYED)
    keyed = np.zeros((4, 1, 1), np.uint8), np.zeros(2, np.int16)
    node = other.node(*keyed)
    whole = dict(np.load(path))
    variants = [{"something": np.zeros(3)}, whole | {"format_version": np.int64(99)}]
    for name, array in whole.items():
        if name not in ("frame_uses", "key_shape"):  # without it a file is of another kind of graph
            variants.append({k: v for k, v in whole.items() if k != name})
        if array.ndim and name not in ("obs_shape", "key_shape", "log"):
            variants += [whole | {name: array[:-1]}, whole | {name: array.astype(np.complex128)}]
    for variant in variants:
        np.savez(path, **variant)
        with raises_naming("graph.npz", ValueError):
            TransitionGraph.load(path)
        with pytest.raises((ValueError, KeyError)):
            other.restore(variant)
    rows = data.index(graph._keys.table.rows[: graph.num_ids].tobytes())
    places = rows, rows + int(rng.integers(graph.num_ids * 8)), len(data) // 2
    changed = [data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :] for at in places]
    for damaged in (*changed, data[: len(data) // 2]):
        path.write_bytes(damaged)
        with raises_naming("graph.npz", ValueError):
            TransitionGraph.load(path)
    with pytest.raises(FileNotFoundError):
        TransitionGraph.load(tmp_path / "missing.npz")
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
