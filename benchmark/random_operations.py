"""Millions of random operations on a TransitionGraph and on dictionaries, compared along the way.

python benchmark/random_operations.py                  # ten million
python benchmark/random_operations.py --frame-stack

Of every thousand operations about 490 add a transition, 480 remove one, 20 try what must be
refused, and ten expand a pair, to the depth of one backup, and compare it with the dictionaries.
The graph grows and shrinks in waves, so that its arrays grow and its ids and blocks are used again.
Every --check-frequency operations everything is compared and check_valid called, and every second
time the graph is saved and goes on from the file. Exit status 1 at the first difference.
"""

import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from output import fail

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from gbcore import TransitionGraph, q_targets  # noqa: E402

NUM_ACTIONS = 3
BATCH = 100_000  # random numbers drawn at once


@dataclass
class Args:
    operations: int = 10_000_000
    """random operations"""
    states: int = 20_000
    """distinct observations to choose from"""
    wave: int = 400_000
    """operations in which the graph grows and shrinks once"""
    check_frequency: int = 250_000
    """operations between two comparisons of everything"""
    frame_stack: bool = False
    """observations are stacks of 4 frames"""
    seed: int = 0
    """of the operations"""


class Dictionaries:
    """What the graph should hold: counts of transitions between states, by name."""

    def __init__(self):
        self.count = {}  # (s, action, reward, s2, done) -> f(T)
        self.pair = defaultdict(dict)  # (s, action) -> {transition: None}
        self.uses = Counter()  # state -> distinct transitions that name it
        self.order = []  # transitions, to draw from
        self.place = {}  # transition -> its place in order

    def add(self, t):
        self.count[t] = self.count.get(t, 0) + 1
        if self.count[t] == 1:
            self.pair[t[:2]][t] = None
            self.place[t] = len(self.order)
            self.order.append(t)
            for state in {t[0], t[3]}:
                self.uses[state] += 1

    def remove(self, t):
        """Returns the states that no transition names any more."""
        self.count[t] -= 1
        if self.count[t]:
            return set()
        del self.count[t], self.pair[t[:2]][t]
        place, last = self.place.pop(t), self.order.pop()
        if last is not t:
            self.order[place], self.place[last] = last, place
        freed = set()
        for state in {t[0], t[3]}:
            self.uses[state] -= 1
            if not self.uses[state]:
                del self.uses[state]
                freed.add(state)
        return freed

    def target(self, state, action, value, gamma):
        """One backup over all outcomes of a pair."""
        total = weights = 0.0
        for t in self.pair[state, action]:
            total += self.count[t] * (t[2] + gamma * (not t[4]) * value(t[3]))
            weights += self.count[t]
        return total / weights


def observation(state, frame_stack):
    """uint8 [4, 2, 2], different for each state; stacked frames come in several states."""
    if frame_stack:
        digits = [state % 29, state // 29 % 29, state // 841 % 29, state // 24_389]
        return np.repeat(np.array(digits, np.uint8), 4).reshape(4, 2, 2)
    return np.array([state, state * 31], np.uint64).view(np.uint8).reshape(4, 2, 2)


def leaf_value(state):
    return (state * 37 % 101) / 7.0


def compare(graph, model, observations):
    """Everything that the graph holds, with what it should hold."""
    problems = graph.check_valid()
    if problems:
        raise AssertionError(f"check_valid: {problems[0]}")
    id_of = {graph.find(observations[state]): state for state in model.uses}
    assert -1 not in id_of, "a state is missing"
    assert len(id_of) == len(model.uses), "two states share an id"
    assert graph.num_nodes == len(model.uses), "a state too many"
    edges = graph.edges()
    columns = (
        edges[name].tolist() for name in ("source", "action", "reward", "next", "terminated")
    )
    found = {
        (id_of[s], a, r, id_of[s2], done): count
        for s, a, r, s2, done, count in zip(*columns, edges["count"].tolist(), strict=True)
    }
    assert found == model.count, "other transitions or counts"
    assert graph.num_transitions == sum(model.count.values()), "another number of transitions"


def expanded(graph, model, t, observations):
    """Compare the target of a pair with that of the dictionaries."""
    node = graph.find(observations[t[0]])
    sub = graph.expand([node], [t[1]], depth=1)
    state_of = {graph.find(observations[u[3]]): u[3] for u in model.pair[t[:2]]}
    values = [leaf_value(state_of[int(i)]) for i in sub.nodes]
    leaf_q = np.repeat(np.array(values, np.float64)[:, None], NUM_ACTIONS, axis=1)
    got = float(q_targets(sub, leaf_q, 0.9)[0])
    expected = model.target(t[0], t[1], leaf_value, 0.9)
    assert abs(got - expected) < 1e-9 * max(1, abs(expected)), f"target {got}, not {expected}"


def refused(graph, t, observations):
    """What is not there cannot be removed, and what is no number cannot be added."""
    node, next_node = (graph.find(observations[state]) for state in (t[0], t[3]))
    before = (graph.num_nodes, graph.num_edges, graph.num_transitions)
    absent = (t[0], t[1], t[2] + 0.5, t[3], t[4])
    for method, reward, error in (
        (graph.remove, absent[2], KeyError),
        (graph.add, float("nan"), ValueError),
        (graph.add, float("inf"), ValueError),
    ):
        try:
            method(node, t[1], reward, next_node, t[4])
        except error:
            continue
        raise AssertionError(f"{method.__name__} took reward {reward}")
    assert before == (graph.num_nodes, graph.num_edges, graph.num_transitions)


def main():
    args = tyro.cli(Args)
    for name in ("states", "wave", "check_frequency"):
        if getattr(args, name) < 1:
            fail(f"--{name.replace('_', '-')} must be >= 1, got {getattr(args, name)}")
    rng = np.random.default_rng(args.seed)
    observations = [observation(s, args.frame_stack) for s in range(args.states)]
    options = {"frame_stack": args.frame_stack}
    graph, model = TransitionGraph(NUM_ACTIONS, (4, 2, 2), **options), Dictionaries()
    done, most, begin = Counter(), 0, time.perf_counter()
    for i in range(args.operations):
        if i % BATCH == 0:
            shape = min(BATCH, args.operations - i)
            kinds, picks = rng.random(shape), rng.random(shape)
            # Most states are rare and some are hubs: outcomes by the hundreds.
            sources = (args.states * rng.random(shape) ** 3).astype(np.int64).tolist()
            targets = (args.states * rng.random(shape) ** 2).astype(np.int64).tolist()
            others = rng.integers([NUM_ACTIONS, 3, 8], size=(shape, 3)).tolist()
        k = i % BATCH
        kind, pick = kinds[k], picks[k]
        growing = i % args.wave < args.wave // 2
        if kind < 0.03 and model.order:
            t = model.order[int(pick * len(model.order))]
            if kind < 0.01:
                expanded(graph, model, t, observations)
                done["expand"] += 1
            else:
                refused(graph, t, observations)
                done["refuse"] += 1
        elif model.order and kind < (0.3 if growing else 0.76):
            t = model.order[int(pick * len(model.order))]
            node, next_node = (graph.find(observations[state]) for state in (t[0], t[3]))
            names = {node: t[0], next_node: t[3]}
            freed = graph.remove(node, t[1], t[2], next_node, t[4])
            assert {names[n] for n in freed} == model.remove(t), "other states were freed"
            done["remove"] += 1
        else:
            action, reward, terminated = others[k]
            t = (sources[k], action, float(reward), targets[k], terminated == 0)
            node, next_node = graph.node(observations[t[0]]), graph.node(observations[t[3]])
            graph.add(node, t[1], t[2], next_node, t[4])
            model.add(t)
            done["add"] += 1
        if (i + 1) % args.check_frequency == 0 or i + 1 == args.operations:
            compare(graph, model, observations)
            done["check_valid"] += 1
            most = max(most, graph.num_edges)
            if done["check_valid"] % 2:
                with tempfile.TemporaryDirectory() as folder:
                    path = Path(folder) / "graph.npz"
                    graph.save(path, compress=False)
                    graph = TransitionGraph.load(path)
                done["save and load"] += 1
    counts = ", ".join(f"{n:,} {name}" for name, n in done.items())
    print(
        f"{args.operations:,} operations ({counts}), at most {most:,} edges, "
        f"{graph.num_ids:,} ids: no difference in {time.perf_counter() - begin:.0f} s"
    )


if __name__ == "__main__":
    main()
