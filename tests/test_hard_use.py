"""Copies, threads, changed subgraphs, sizes out of range, caches that cannot be used."""

import copy
import os
import pickle
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from conftest import ROOT, Case, as_bytes, jitted, scaled

import gbcore
from gbcore.interner import Interner
from gbcore.kernels import sweeps
from gbcore.run import LearnerState
from gbcore.run.padding import pad

TRANSITIONS = [(0, 0, 1.0, 0, 1), (1, 0, 0.5, 0, 2), (1, 1, 2.0, 0, 0), (2, 0, 0.0, 1, 0)]


def changes(sub):
    """Every index array of subgraphs with each entry far off, and a little off, and cut short."""
    for name, array in sub._asdict().items():
        if name in ("nodes", "root_nodes", "outcome_weight", "outcome_reward"):
            continue
        for i in range(len(array)):
            beyond = len(sub.nodes) + len(sub.vertex_row) + 1
            for value in (-(2**40), 2**40, -2, beyond if name == "outcome_vertex" else 2**62):
                changed = array.copy()
                changed[i] = value
                if name != "pair_count":  # a count only weighs
                    yield sub._replace(**{name: changed})
        yield sub._replace(**{name: array[:-1]})
    yield sub._replace(outcome_weight=sub.outcome_weight[1:])
    yield sub._replace(outcome_reward=sub.outcome_reward[1:])


def test_an_index_out_of_place_is_found_in_subgraphs_made_by_hand():
    case = Case(2, TRANSITIONS)
    sub = case.expand(case.pairs[:3], depth=3)
    assert sub.check_valid() == pad(sub).check_valid() == []
    for changed in changes(sub):
        problems = changed.check_valid()
        assert problems
        assert all("\n" not in problem for problem in problems)
    # Within all arrays, but to a vertex whose value is not known yet.
    case = Case(1, [(0, 0, 1.0, 0, 1), (1, 0, 1.0, 0, 2), (2, 0, 1.0, 0, 3), (3, 0, 1.0, 0, 0)])
    sub = case.expand(case.pairs[:1], depth=3)
    vertex = sub.outcome_vertex.copy()
    vertex[1] = vertex[0]
    changed = sub._replace(outcome_vertex=vertex)
    assert changed.check_valid() == ["an outcome that does not lead down"]


def test_a_mean_of_large_values_is_no_infinity():
    case = Case(2, [(0, 0, 0.0, 0, 1), (1, 0, 1.5e308, 1, 2, 3), (1, 1, 1.5e308, 1, 2)])
    sub = case.expand([(0, 0)], depth=2)
    got = gbcore.q_targets(sub, np.zeros((len(sub.nodes), 2)), 1.0, "behaviour")
    np.testing.assert_allclose(got, 1.5e308)


def by_pickle(parts):
    return pickle.loads(pickle.dumps(parts))


def values_of(obs):
    """Stands in for a network; pickle finds it by its name."""
    return obs.reshape(len(obs), -1)[:, :2].astype(np.float32)


def kinds_of(obs):
    """A third of all states are of a kind."""
    return obs[:, 0, 0] % 3


class Parts:
    """A graph and what is made with it, all in use."""

    def __init__(self, keyed, frame_stack):
        key = {"key_shape": (1,), "key_dtype": np.int64} if keyed else {}
        self.keyed = keyed
        self.graph = gbcore.TransitionGraph(2, (2, 3), np.int16, frame_stack, 16, **key)
        self.replay = gbcore.PrioritizedReplay(self.graph, 40, 0.5)
        self.leaves = gbcore.LeafTable(self.graph, values_of)
        self.planner = gbcore.FrontierPlanner(self.graph)
        self.episodes = gbcore.FrontierEpisodes(self.graph, kinds_of=kinds_of)
        self.values = gbcore.GraphValues(self.graph, self.leaves, 0.9)
        self.use(range(70))

    def obs(self, state):
        return np.arange(6).reshape(2, 3).astype(np.int16) + np.int16([[state], [state // 2]])

    def find(self, state):
        return self.graph.find(self.obs(state), np.array([state]) if self.keyed else None)

    def use(self, steps):
        """Act, forget and plan, leaving changes that nobody followed. What was seen meanwhile."""
        seen, rng = [], np.random.default_rng(len(steps))
        for i in steps:
            s, s2 = rng.integers(30, size=2)
            keys = {"key": np.array([s]), "next_key": np.array([s2])} if self.keyed else {}
            row = self.obs(s), i % 2, float(i % 3), self.obs(s2), i % 7 == 0, i % 5 == 0
            self.replay.record(*row, **keys)
            node = self.find(s)
            seen += [node, self.episodes.act(node, rng), self.planner.plan(5)]
            if self.episodes.act(node, rng) is None:
                self.episodes.end_episode()
            batch = self.replay.sample(4, rng, 0.4)
            sub = self.replay.subgraphs(batch, "graph", 3, 2, rng)
            seen += [*gbcore.q_targets(sub, self.leaves.values(sub.nodes), 0.9), *batch.weights]
            self.replay.update_priorities(batch.rows, rng.random(4))
            if i % 4 == 0:
                self.values.update(5)  # the rest waits
                seen += self.values.values(batch.nodes).tolist()
        return seen

    def all(self):
        names = ("graph", "replay", "leaves", "planner", "episodes", "values")
        return {name: getattr(self, name) for name in names}

    def held(self):
        """All that the parts hold."""
        return {name: as_bytes(part) for name, part in self.all().items()}

    def check(self):
        return self.graph.check_valid() + self.planner.check_valid()


class Held(LearnerState):
    """Parts as a checkpoint holds them: graph and replay apart."""

    def __init__(self, parts):
        vars(self).update(parts.all())


def restored(parts):
    """The same from a checkpoint, in parts that were used otherwise."""
    again = Parts(parts.keyed, parts.graph.frame_stack)
    again.use(range(200, 250))
    again.graph.restore(parts.graph.state())
    again.replay.restore(parts.replay.state())
    held = Held(again)
    held.restore(Held(parts).state())
    vars(again).update(vars(held))
    return again


@pytest.mark.parametrize("frame_stack", [False, True])
@pytest.mark.parametrize("keyed", [False, True])
def test_what_is_copied_or_restored_goes_on_the_same_and_apart(keyed, frame_stack):
    parts = Parts(keyed, frame_stack)
    before, seen = parts.held(), []
    assert parts.values._followed < parts.graph.num_logged, "a change waits"
    copies = [copied(parts) for copied in (copy.deepcopy, by_pickle, restored)]
    for again in copies:
        assert again.held() == before
        assert again.planner.graph is again.replay.graph is again.values.leaves.graph is again.graph
        seen.append(again.use(range(70, 140)))  # rooms grow, ids are freed and given out again
    assert parts.held() == before, "the original follows its copy"
    assert seen == 3 * [parts.use(range(70, 140))]
    assert parts.check() == []
    for again in copies:
        assert again.held() == parts.held()
        assert again.check() == []
    assert len({again.find(s) for s in range(30)} - {-1}) == again.graph.num_nodes


def test_copies_of_what_stands_alone():
    tree = gbcore.SumTree(3)
    tree.set([0, 2], [1.0, 3.0])
    interner = Interner((3,), np.uint8)
    interner.add(np.array([[1, 2, 3]], np.uint8))
    sub = Case(2, TRANSITIONS).expand([(0, 0)], 2)
    for copied in (copy.deepcopy, by_pickle):
        assert [copied(tree).find(x) for x in (0.5, 2.0)] == [0, 2]
        again = copied(interner)
        assert again.add(np.array([[5] * 3, [6] * 3, [5] * 3], np.uint8)).tolist() == [1, 2, 1]
        assert again.check_valid() == []
        for one, other in zip(sub, copied(sub), strict=True):
            np.testing.assert_array_equal(one, other)
            assert not np.shares_memory(one, other)


def test_a_graph_and_a_replay_print_their_sizes():
    parts = Parts(False, False)
    assert repr(parts.graph).startswith(f"TransitionGraph({parts.graph.num_nodes} nodes, ")
    assert repr(parts.replay) == "PrioritizedReplay(40 of 40 transitions)"
    for part in (parts.leaves, parts.planner, gbcore.SumTree(2), parts.graph.expand([0], [0], 1)):
        assert repr(part).startswith(type(part).__name__ + "(")
        assert "\n" not in repr(part)


def in_threads(*functions):
    """Run them at once, with as many switches between them as there can be; raise what one did."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(len(functions)) as pool:
            for done in [pool.submit(function) for function in functions]:
                done.result()
    finally:
        sys.setswitchinterval(interval)


@jitted
def test_threads_find_what_they_added_and_expand_what_is_there():
    graph = gbcore.TransitionGraph(2, (2,), np.int64, capacity=16)

    def work(first):
        rng = np.random.default_rng(first)
        obs = np.stack([np.arange(first, first + 400), np.zeros(400, np.int64)], axis=1)
        nodes = [graph.node(one) for one in obs]
        assert [graph.find(one) for one in obs] == nodes
        assert graph.nodes(obs).tolist() == nodes
        for i in range(scaled(1_000)):
            a, b = rng.integers(400, size=2)
            graph.add(nodes[a], 0, 1.0, nodes[b], False)
            sub = graph.expand([nodes[a], nodes[b]], [0, 0], 3)
            assert len(set(sub.nodes.tolist())) == len(sub.nodes)
            own = graph.observations_of(sub.nodes)[:, 0]
            assert ((own >= first) & (own < first + 400)).all(), "a state of the other thread"
            if i % 3 == 0:
                graph.add(nodes[a], 1, 1.0, nodes[a], False)  # else both might be freed
                graph.remove(nodes[a], 0, 1.0, nodes[b], False)
                graph.node(obs[b])
                nodes[b] = graph.find(obs[b])

    in_threads(lambda: work(0), lambda: work(10_000))
    assert graph.check_valid() == []


@jitted
def test_threads_feed_one_replay():
    """One acts, one learns: as the lock is held from sample to subgraphs, every root is known."""
    graph = gbcore.TransitionGraph(2, (1,), np.int64, capacity=16)
    replay, steps = gbcore.PrioritizedReplay(graph, 50, 0.5), scaled(2_000)
    replay.record(np.array([0]), 0, 0.0, np.array([1]), False)

    def act(seed):
        rng = np.random.default_rng(seed)
        for _ in range(steps):
            s, s2 = rng.integers(40, size=(2, 1))
            replay.record(s, int(rng.integers(2)), float(s[0]), s2, False, rng.random() < 0.1)

    def learn():
        rng = np.random.default_rng(1)
        for _ in range(steps):
            with graph.lock:
                batch = replay.sample(8, rng)
                sub = replay.subgraphs(batch, "graph", 1)
                rewards = graph.observations_of(batch.nodes)[:, 0]
            targets = gbcore.q_targets(sub, np.zeros((len(sub.nodes), 2)), 0.9)
            np.testing.assert_allclose(targets, rewards)
            replay.update_priorities(batch.rows, rng.random(8))

    in_threads(lambda: act(2), learn, lambda: act(3))
    assert graph.check_valid() == []
    assert graph.num_transitions == replay.size == 50


HUGE = (2**60, 2**62, 2**63, 2**64)


@pytest.mark.parametrize("size", HUGE)
def test_sizes_that_no_array_has_are_refused_or_mean_all(size):
    case = Case(2, TRANSITIONS)
    graph, roots, rng = case.graph, [case.id_of[0]], np.random.default_rng(0)
    with pytest.raises(ValueError, match=f"Require 1 <= depth <= .*{size}"):
        graph.expand(roots, [0], size)
    assert len(graph.expand(roots, [0], 3, size, rng).nodes) == 3
    column = np.zeros(4, np.int64)
    columns = (*[column] * 4, column > 0)
    chain = gbcore.trajectory_subgraphs([0], size, *columns, np.arange(4) == 3)
    assert len(chain.pair_action) == 4, "no chain is longer than its ring"
    with pytest.raises(ValueError, match="Require a row that is cut"):
        gbcore.trajectory_subgraphs([0], size, *columns, column > 0)
    planner = gbcore.FrontierPlanner(graph)
    assert planner.plan(size) > 0
    assert planner.num_waiting == 0
    for make in (
        lambda: gbcore.SumTree(size), lambda: gbcore.SumTree(4).sample(size, rng),
        lambda: gbcore.Replay(graph, size), lambda: graph.node(np.zeros(size, np.int64)),
        lambda: gbcore.TransitionGraph(size, (1,)), lambda: gbcore.TransitionGraph(2, (size, size)),
        lambda: gbcore.TransitionGraph(2, (1,), capacity=size),
        lambda: gbcore.TransitionGraph(2, (-size, -8)),
    ):  # fmt: skip
        with pytest.raises((ValueError, MemoryError, OverflowError, KeyError)):
            make()


def test_subgraphs_that_no_memory_holds_are_given_up(monkeypatch):
    case = Case(2, TRANSITIONS)
    monkeypatch.setattr("gbcore.graph.MAX_LISTED", 1_000)
    with pytest.raises(MemoryError, match="Require a smaller depth"):
        case.graph.expand([case.id_of[0]], [0], 2_000)
    monkeypatch.undo()
    assert case.graph.expand([case.id_of[0]], [0], 2_000).num_roots == 1
    with pytest.raises(ValueError, match="Require chunk >= 1, got -1"):
        gbcore.LeafTable(case.graph, values_of).values([0], chunk=-1)


def test_priorities_whose_sum_overflows_are_refused():
    tree = gbcore.SumTree(4)
    with pytest.raises(ValueError, match="Require 0 <= priority <= "):
        tree.set(range(4), [1e308] * 4)
    tree.set(range(4), [tree.largest] * 4)
    assert sorted(tree.sample(4, np.random.default_rng(0))) == [0, 1, 2, 3]
    parts = Parts(False, False)
    with pytest.raises(ValueError, match="Require 0 <= priority"):
        parts.replay.update_priorities(np.arange(2), [np.inf, 1.0])
    for error in (np.inf, np.nan):
        with pytest.raises(ValueError, match="Require 0 <= priority"):
            gbcore.PrioritizedReplay(parts.graph, 4, 0.0).update_priorities([0], [error])
    assert parts.replay.max_priority < 2
    parts.replay.update_priorities(np.arange(40), np.full(40, 1e-6))
    weights = parts.replay.sample(8, np.random.default_rng(0), 200.0).weights
    np.testing.assert_array_equal(weights, 1)  # each 1e-3 ** -200, over their largest


def test_changes_wait_until_they_were_followed(monkeypatch):
    parts = Parts(False, False)
    parts.graph.add(0, 0, 5.0, 1, False)
    waiting = parts.planner.num_waiting
    monkeypatch.setattr(sweeps, "make_plan", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        parts.planner.plan()
    monkeypatch.undo()
    assert parts.planner.num_waiting == waiting
    parts.planner.plan()
    assert parts.planner.check_valid() == []


PROGRAM = """
import warnings
import numpy as np
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from gbcore import replay
    tree = replay.SumTree(4)
    tree.set([1], [2.0])
    assert tree.find(1.0) == 1
print([str(one.message) for one in caught if "gbcore" in str(one.message) or "Numba" in str(one)])
"""


def output_of(program, folder, path, **variables):
    """What a process writes that works in a folder, with its cache, and imports from a path."""
    variables |= {"NUMBA_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": str(path)}
    command, env = [sys.executable, "-c", program], os.environ | variables
    return subprocess.check_output(command, cwd=folder, env=env, text=True)


@jitted
def test_where_no_folder_can_be_written_kernels_compile_after_one_warning(tmp_path):
    """A file takes the place of every folder of a cache."""
    tree = shutil.copytree(
        ROOT / "gbcore", tmp_path / "tree" / "gbcore", ignore=shutil.ignore_patterns("__pycache__")
    ).parent
    for path in tree.rglob("__init__.py"):
        (path.parent / "__pycache__").write_text("")
    (tmp_path / "cache").write_text("no folder")
    nobody = dict.fromkeys(("HOME", "XDG_CACHE_HOME"), "/proc/nobody")
    (warning,) = eval(output_of(PROGRAM, tmp_path, tree, **nobody, TORCH_LOGS=""))
    assert "NUMBA_CACHE_DIR" in warning


FILES = {
    "helpers.py": "from gbcore.jit import jit\nfrom deep import ONE\n"
    "@jit\ndef helped(x):\n    return x + ONE\n",
    "deep.py": "from typing import NamedTuple\nONE, TEN = 1, (10, 20)\n"
    "class Pair(NamedTuple):\n    first: int\n    second: int\n",
    "kernel.py": "import deep\nimport helpers as h\nfrom gbcore.jit import jit\n"
    "@jit\ndef kernel(x):\n    return last(x) + deep.TEN[0] + deep.Pair(100, 0).first\n"
    "@jit\ndef last(x):\n    return h.helped(x)\n",
}


@jitted
def test_an_edit_in_another_file_reaches_the_kernels_that_use_it(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / ".#kernel.py").symlink_to("an editor's lock")

    def result():
        program = "from kernel import kernel as k; print(k(0), sum(k.stats.cache_hits.values()))"
        return tuple(map(int, output_of(program, tmp_path, ROOT).split()))

    assert result() == (111, 0)
    assert result() == (111, 1), "it is kept"
    for name, old, new, expected in (
        ("helpers.py", "x + ONE", "x + 2 * ONE", 112),
        ("deep.py", "ONE, TEN = 1, (10", "ONE, TEN = 1, (30", 132),
        ("deep.py", "ONE, TEN = 1", "ONE, TEN = 2", 134),
        ("deep.py", "first: int\n    second", "second: int\n    first", 34),
    ):
        (tmp_path / name).write_text((tmp_path / name).read_text().replace(old, new))
        assert result() == (expected, 0)
