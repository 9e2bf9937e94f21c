"""What the tests share: graphs built twice (gbcore and naive), strategies, runs."""

import collections
import json
import os
import re
import signal
import sys
from pathlib import Path

import numba
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also from another folder
sys.path.insert(1, f"{sys.path[0]}/tools")
sys.path.insert(2, f"{sys.path[0]}/reproduce")

from gbtools.runs import read_rows, words_of
from naive import Categoricals, NaiveGraph, Oracle, Scalars

from gbcore import Replay, TransitionGraph, categorical_targets, q_targets
from gbcore.arrays import KnownNodes
from gbcore.run import LearnerState

ROOT = Path(__file__).resolve().parents[1]

# The same examples in every run: a failure in CI is a failure at the desk.
slow = {"suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
settings.register_profile("deterministic", derandomize=True, deadline=None, **slow)
settings.register_profile("long", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "deterministic"))
IS_LONG = "HYPOTHESIS_PROFILE" in os.environ  # =long: a hundred times as many random operations

JIT = not numba.config.DISABLE_JIT
# For tests of what is the same with and without compiled kernels: each runs in one of the suites,
# that in which it is quicker. A new process without JIT has no kernels to load.
jitted = pytest.mark.skipif(not JIT, reason="runs with the jitted suite")
interpreted = pytest.mark.skipif(JIT, reason="runs with the suite without JIT")
if not JIT:  # what all of a file is marked with is not imported for nothing
    collect_ignore = [
        path.name
        for path in Path(__file__).parent.glob("test_*.py")
        if re.search(r"^pytestmark = \[?jitted", path.read_text(), re.MULTILINE)
    ]


def scaled(jitted, interpreted=None):
    """A number of repetitions: fewer where the kernels run as plain Python."""
    jitted *= 100 if IS_LONG else 1
    if JIT:
        return jitted
    return max(1, jitted // 4) if interpreted is None else interpreted


# Every way to read a state: name -> (rule, is the online network given?)
RULES = {
    "greedy": ("greedy", False),
    "double": ("double", True),
    "policy": ("policy", False),
    "behaviour": ("behaviour", False),
    "behaviour, double": ("behaviour", True),
}
TOLERANCE = 1e-9


class Leaves:
    """Leaf values by state, for a class with num_actions, gamma, naive, state_of: id -> state."""

    prior = 0.0  # of all targets; a test may set it

    def draw_leaves(self, rng, num_states):
        shape = (num_states, self.num_actions)
        self.leaf_q, self.selector_q = rng.normal(size=shape), rng.normal(size=shape)
        self.policy = rng.dirichlet(np.ones(self.num_actions), size=num_states)
        self.leaf_pmf = rng.dirichlet(np.ones(5), size=shape)
        self.support = np.linspace(-2.0, 2.0, 5)

    def rows(self, sub):
        """State of every leaf row. int[M]"""
        return np.array([self.state_of[int(n)] for n in sub.nodes], np.int64)

    def q_targets(self, sub, name, dtype=np.float64):
        leaf_q = self.leaf_q[self.rows(sub)].astype(dtype)
        return q_targets(sub, leaf_q, self.gamma, **self._rule(sub, name, dtype))

    def categorical_targets(self, sub, name, dtype=np.float64):
        """As q_targets, but with torch in and NumPy out. [B, n_atoms]"""

        def tensor(array):
            return torch.from_numpy(np.ascontiguousarray(array.astype(dtype)))

        rule = self._rule(sub, name, dtype)
        rule |= {k: tensor(x) for k, x in rule.items() if isinstance(x, np.ndarray)}
        leaf_pmf, support = tensor(self.leaf_pmf[self.rows(sub)]), tensor(self.support)
        out = categorical_targets(sub, leaf_pmf, support, self.gamma, **rule)
        assert out.dtype == support.dtype
        return out.numpy()

    def _rule(self, sub, name, dtype):
        rows, (rule, online) = self.rows(sub), RULES[name]
        found = {"rule": rule, "prior": self.prior}
        if online:
            found["selector_q"] = self.selector_q[rows].astype(dtype)
        if rule == "policy":
            found["policy"] = self.policy[rows].astype(dtype)
        return found

    def oracle(self, name, categorical=False):
        rule, online = RULES[name]
        values = Scalars(self.leaf_q, self.gamma)
        if categorical:
            values = Categoricals(self.leaf_pmf, self.support, self.gamma)
        selector_q = self.selector_q if online else None
        return Oracle(self.naive, values, rule, selector_q, self.policy, self.prior)


class Twins:
    """One graph twice. Nodes are named by their observation, since the ids need not agree."""

    def __init__(self, num_actions, obs_shape, obs_dtype=np.uint8, **options):
        self.graph = TransitionGraph(num_actions, obs_shape, obs_dtype, **options)
        self.naive, self.kind = NaiveGraph(num_actions), (obs_shape, obs_dtype)

    def ids(self, state):
        """The ids of a naive state in both graphs."""
        return self.graph.find(self.naive.observation[state], self.naive.key[state]), state

    def node(self, obs, key=None):
        before, known = (of.find(obs, key) for of in (self.graph, self.naive))
        got, state = self.graph.node(obs, key), self.naive.node(obs, key)
        assert isinstance(got, int | np.integer)
        assert (before, known) in ((-1, -1), (got, state))
        assert self.graph.find(obs, key) == got
        return state

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
        graph, naive, expected = self.graph, self.naive, self.naive.edges()
        assert graph.check_valid() == []
        num_transitions = sum(row[-1] for row in expected)
        ratio = len({row[0] for row in expected}) / max(num_transitions, 1)
        assert (graph.num_nodes, graph.num_edges) == (len(naive.out), len(expected))
        assert (graph.num_transitions, graph.novel_state_ratio) == (num_transitions, ratio)
        observations = graph.observations
        assert (observations.shape[1:], observations.dtype) == self.kind
        state_of = {self.ids(state)[0]: state for state in naive.out}
        assert len(state_of) == len(naive.out)  # no two states share an id
        for node, state in state_of.items():
            assert node >= 0
            assert observations[node].tobytes() == naive.observation[state].tobytes()
        edges = graph.edges()
        dtypes = [(name, column.dtype, column.ndim) for name, column in edges.items()]
        assert dtypes == [(name, dtype, 1) for name, dtype in COLUMNS.items()]
        for name in ("source", "next"):
            edges[name] = np.array([state_of[int(i)] for i in edges[name]], np.int64)
        assert sorted(rows(edges)) == sorted(expected)


COLUMNS = {"source": np.int64, "action": np.int64, "reward": np.float64, "terminated": np.bool_}
COLUMNS |= {"next": np.int64, "count": np.int64}


def rows(edges):
    return list(zip(*(edges[name].tolist() for name in COLUMNS), strict=True))


class Case(Leaves):
    """The same transitions in a TransitionGraph and in a NaiveGraph, with leaf values for both.

    transitions: rows (s, a, r, done, s2) or (s, a, r, done, s2, count); the observation of state s
    is [s]. removals: positions in the list of single observations, taken away again at the end.
    Node ids differ from states on purpose, so that mixing them up shows.
    """

    def __init__(self, num_actions, transitions, removals=(), num_states=0, gamma=0.9, seed=0):
        self.arguments = (num_actions, transitions, removals, num_states, gamma, seed)
        self.num_actions, self.gamma = num_actions, gamma
        self.num_states = 1 + max([num_states - 1, *(max(t[0], t[4]) for t in transitions)])
        twins = Twins(num_actions, (1,), np.int64)
        self.graph, self.naive = twins.graph, twins.naive
        for s in range(self.num_states):
            assert self.naive.node([s]) == s
        self.graph.nodes(np.arange(self.num_states)[::-1, None])

        rng = np.random.default_rng(seed)
        single = [t[:5] for t in transitions for _ in range(t[5] if len(t) > 5 else 1)]
        single = [single[i] for i in rng.permutation(len(single))]
        for s, a, r, done, s2 in single:
            twins.add(s, a, r, s2, bool(done))
        for i in sorted({i % len(single) for i in removals} if single else (), reverse=True):
            s, a, r, done, s2 = single.pop(i)
            twins.remove(s, a, r, s2, bool(done))

        self.states = sorted(self.naive.out)
        self.id_of = {s: twins.ids(s)[0] for s in self.states}
        self.state_of = {node: s for s, node in self.id_of.items()}
        self.draw_leaves(rng, self.num_states)

    def __repr__(self):
        return f"Case{self.arguments}"

    @property
    def pairs(self):
        """Every pair of a living state and an action, also the pairs that were never seen."""
        return [(s, a) for s in self.states for a in range(self.num_actions)]

    def expand(self, pairs, depth, breadth=0, rng=None):
        nodes = np.array([self.id_of[s] for s, _ in pairs], np.int64)
        actions = np.array([a for _, a in pairs], np.int64)
        return self.graph.expand(nodes, actions, depth, breadth=breadth, rng=rng)


@st.composite
def cases(draw, max_states=5, max_actions=3, max_transitions=14, removals=True):
    """Small random graphs: cycles, self-loops, stochastic pairs, frontier states, done edges."""
    num_states = draw(st.integers(1, max_states))
    num_actions = draw(st.integers(1, max_actions))
    state, action = st.integers(0, num_states - 1), st.integers(0, num_actions - 1)
    reward = st.sampled_from([0.0, 1.0, -0.75, 0.3, 2.6])
    done = st.sampled_from([False, False, False, True])
    row = st.tuples(state, action, reward, done, state, st.integers(1, 3))
    least = draw(st.sampled_from([6, 3, 1, 0]))  # or half of all examples have no transition
    rows = st.lists(row, min_size=least, max_size=max_transitions, unique_by=lambda t: t[:5])
    rows, positions = draw(rows), st.lists(st.integers(0, 40), max_size=6)
    positions = draw(positions) if removals else ()
    gamma, seed = draw(st.sampled_from([0.9, 1.0, 0.5, 0.0])), draw(st.integers(0, 1000))
    case = Case(num_actions, rows, positions, num_states, gamma, seed)
    case.prior = draw(st.sampled_from([0.0, 0.0, 0.5, 3.0]))
    return case


@pytest.fixture
def torch_settings():
    """What the scripts set for the whole process is taken back."""
    torch.set_num_threads(1)
    yield
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    torch.set_flush_denormal(False)
    torch.use_deterministic_algorithms(False)


def graph_of(num_states, rows=(), num_actions=2):
    """A graph of transitions (s, a, r, s2, done), each an observation [s]; ids are the states."""
    graph = TransitionGraph(num_actions, (1,), np.int64)
    graph.nodes(np.arange(num_states)[:, None])
    for row in rows:
        graph.add(*row)
    return graph


def raises_naming(value, kinds=(IndexError, KeyError, ValueError, TypeError)):
    """Bad input must raise one of these errors, with the offending value in its text."""
    return pytest.raises(kinds, match=re.escape(str(value)))


def command(script, *flags):
    """Exit status of a script or a tool, run in this process as its last lines run it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [script.__file__, *map(str, flags)])
        try:
            script.main()
        except SystemExit as stop:
            return stop.code or 0
    return 0


def is_one_line(capsys, *words):
    """One line was written, on stderr, with all these words."""
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1), out + err
    for word in words:
        assert word in err
    return True


def refuses(capsys, script, flags, *words):
    """A command ends with status 2 and one line, which has all these words."""
    capsys.readouterr()
    assert command(script, *flags) == 2
    return is_one_line(capsys, "error: ", *words)


def play(script, folder, evaluate=lambda *_: ([0.0], [1]), **flags):
    """The learner of a run in this process, of 200 random steps by default, and its folder."""
    usual = {"learning_starts": 10**6, "log_frequency": 1, "threads": 1, "cuda": False}
    usual |= {"total_timesteps": 200, "eval_frequency": 0, "batch_size": 8, "breadth": 5}
    learners, make = [], script.Learner
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            script, "Learner", lambda *parts: learners.append(make(*parts)) or learners[0]
        )
        patch.setattr(script, "evaluate", evaluate)
        assert command(script, *words_of(usual | flags), "--run-dir", folder) == 0
    return learners[0], only_run(folder)


SHORT = (  # flags of a run that takes a moment, for every script; a flag given again counts
    "--total-timesteps 60 --learning-starts 30 --batch-size 4 --breadth 5 --log-frequency 10 "
    "--eval-frequency 0 --eval-episodes 1 --eval-epsilon 1"
).split()


def short_run(script, folder, *flags):
    """The folder of a run with these flags, otherwise SHORT."""
    assert command(script, *SHORT, "--run-dir", folder, *flags) == 0
    return only_run(folder)


def spy(monkeypatch, owner, name, note):
    """Have note(*arguments) called before owner.name."""
    call = getattr(owner, name)

    def noted(*args, **kwargs):
        note(*args, **kwargs)
        return call(*args, **kwargs)

    monkeypatch.setattr(owner, name, noted)


def only_run(folder):
    (run,) = folder.iterdir()
    return run


def result_of(run):
    return json.loads((run / "result.json").read_text())


def read_metrics(folder):
    """Rows of a run's metrics.csv, but for the one column that is a time."""
    rows = read_rows(folder / "metrics.csv")
    for row in rows:
        row.pop("charts/SPS")
    return rows


def as_bytes(tree):
    """A tree whose arrays and tensors are compared by their bytes."""
    if isinstance(tree, dict):
        return {name: as_bytes(one) for name, one in tree.items()}
    if isinstance(tree, (list, tuple, collections.deque)):
        return [as_bytes(one) for one in tree]
    if isinstance(tree, torch.Tensor):
        tree = tree.numpy(force=True)
    if isinstance(tree, np.ndarray):
        return tree.shape, str(tree.dtype), tree.tobytes()
    if isinstance(tree, np.random.Generator):
        return tree.bit_generator.state
    if isinstance(tree, np.random.SeedSequence):
        return tree.state
    if isinstance(tree, torch.Generator):
        return as_bytes(tree.get_state())
    if isinstance(tree, (LearnerState, type)):
        return type(tree).__name__
    if isinstance(tree, KnownNodes):
        return tree.nodes().tolist()
    if isinstance(tree, (TransitionGraph, Replay)):
        return as_bytes(tree.state())
    return as_bytes(vars(tree)) if hasattr(tree, "__dict__") else tree
