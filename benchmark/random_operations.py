"""Random operations on a TransitionGraph and on the tests' oracle, compared on the way.

    python benchmark/random_operations.py                  # a million
    python benchmark/random_operations.py --frame-stack

Of every thousand operations about 490 add a transition, 500 remove one, and ten expand a pair, to
the depth of one backup, and compare it with the oracle's. The graph grows and shrinks in waves, so
that its arrays grow and its ids and blocks are used again. A frontier planner follows all changes.
Whenever the graph has grown by a half, and every --check-frequency operations, everything is
compared; the operations go on with graph and planner as they are, as saved and loaded, as a deep
copy and as unpickled, in turn. In every second wave nothing is planned in between, so that taking
the planner's state has to make room itself. Exit status 1 at the first difference.
"""

import copy
import pickle
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from gbtools.output import arguments, lasting_output
from naive import NaiveGraph, Oracle, Scalars

from gbcore import FrontierPlanner, TransitionGraph, q_targets
from gbcore.run import Amount, Count

NUM_ACTIONS = 3


@dataclass
class Args:
    operations: Count = 1_000_000  # random operations
    states: Count = 20_000  # distinct observations to choose from
    wave: Count = 400_000  # operations in which the graph grows and shrinks once
    check_frequency: Count = 250_000  # operations between two comparisons of everything
    frame_stack: bool = False  # observations are stacks of 4 frames
    seed: Amount = 0  # of the operations


def observation(state, frame_stack):
    """uint8 [4, 2, 2], different for each state; stacked frames come in several states."""
    if frame_stack:
        digits = [state % 29, state // 29 % 29, state // 841 % 29, state // 24_389]
        return np.repeat(np.array(digits, np.uint8), 4).reshape(4, 2, 2)
    return np.array([state, state * 31], np.uint64).view(np.uint8).reshape(4, 2, 2)


class Twins:
    """The graph with its planner, and the oracle, under the same operations.

    An observation is a number; a transition is (obs, action, reward, next obs, terminated).
    """

    def __init__(self, args):
        self.observations = [observation(s, args.frame_stack) for s in range(args.states)]
        self.graph = TransitionGraph(NUM_ACTIONS, (4, 2, 2), frame_stack=args.frame_stack)
        self.planner = FrontierPlanner(self.graph)
        self.naive = NaiveGraph(NUM_ACTIONS, (4, 2, 2))
        self.held = []  # every single observation of a transition
        self.num_checks = self.largest = 0

    def rows(self, t, of="find"):
        """A transition with the ids of its states in the graph, and in the oracle."""
        for store in (self.graph, self.naive):
            node, next_node = (getattr(store, of)(self.observations[s]) for s in (t[0], t[3]))
            yield node, t[1], t[2], next_node, t[4]

    def add(self, t):
        ours, theirs = self.rows(t, "node")
        self.graph.add(*ours)
        self.naive.add(*theirs)
        self.held.append(t)

    def remove(self, place):
        self.held[place], self.held[-1] = self.held[-1], self.held[place]
        ours, theirs = self.rows(self.held.pop())
        name = dict(zip(ours[::3], theirs[::3], strict=True))
        freed = {name[node] for node in self.graph.remove(*ours)}
        assert freed == set(self.naive.remove(*theirs)), "other states were freed"

    def expand(self, t):
        """Compare one backup over all outcomes of a pair with the oracle's."""
        (node, action, *_), (state, *_) = self.rows(t)
        sub = self.graph.expand([node], [action], depth=1)
        names = [self.naive.find(obs) for obs in self.graph.observations_of(sub.nodes)]
        leaf_q = np.array([[(37 * (s + a) % 101) / 7 for a in range(NUM_ACTIONS)] for s in names])
        leaf_q = leaf_q.reshape(-1, NUM_ACTIONS)
        got = q_targets(sub, leaf_q, 0.9)[0]
        values = Scalars(dict(zip(names, leaf_q, strict=True)), 0.9)
        expected = Oracle(self.naive, values, "greedy").target(state, action, depth=1)
        assert abs(got - expected) < 1e-9 * max(1, abs(expected)), f"{got}, not {expected}"

    def loaded(self):
        """Graph and planner as they are restored from what was saved."""
        state = self.planner.state()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "graph.npz"
            self.graph.save(path, compress=False)
            planner = FrontierPlanner(TransitionGraph.load(path))
        planner.restore(state)
        return planner.graph, planner

    def compare(self):
        """Everything that graph and planner hold, with what they should hold; go on with a copy."""
        pair, loaded = (self.graph, self.planner), self.loaded()
        for one in (*pair, *loaded):
            assert not one.check_valid(), one.check_valid()[0]
        copied = copy.deepcopy(pair), pickle.loads(pickle.dumps(pair))
        self.graph, self.planner = (pair, loaded, *copied)[self.num_checks % 4]
        name_of = np.full(self.graph.num_ids, -1)
        for state, obs in self.naive.observation.items():
            node = self.graph.find(obs)
            assert node >= 0, "a state is missing"
            assert name_of[node] == -1, "two states share an id"
            name_of[node] = state
        assert self.graph.num_nodes == self.naive.num_nodes, "a state too many"
        ours, theirs = self.graph.edges(), self.naive.edges()
        ours |= {name: name_of[ours[name]] for name in ("source", "next")}
        found, expected = (
            set(zip(*(edges[name].tolist() for name in theirs), strict=True))
            for edges in (ours, theirs)
        )
        assert found == expected, "other transitions or counts"
        assert len(found) == self.graph.num_edges, "a transition twice"
        assert self.graph.num_transitions == len(self.held), "another number of transitions"
        self.num_checks += 1
        self.largest = max(self.largest, self.graph.num_edges)


@lasting_output()
def main():
    args = arguments(Args, __doc__)
    rng, twins = np.random.default_rng(args.seed), Twins(args)
    begin, next_size = time.perf_counter(), 8
    for i in range(args.operations):
        kind, pick, source, target = rng.random(4)
        place, is_growing = int(pick * len(twins.held)), i % args.wave < args.wave // 2
        if twins.held and kind < 0.01:
            twins.expand(twins.held[place])
        elif twins.held and kind < (0.3 if is_growing else 0.76):
            twins.remove(place)
        else:  # most states are rare and some are hubs: outcomes by the hundreds
            action, reward, terminated = rng.integers([NUM_ACTIONS, 3, 8]).tolist()
            states = int(args.states * source**3), int(args.states * target**2)
            twins.add((states[0], action, float(reward), states[1], terminated == 0))
        if grown := twins.graph.num_ids >= next_size:
            next_size = 1 + next_size * 3 // 2
        if grown or (i + 1) % args.check_frequency == 0 or i + 1 == args.operations:
            twins.compare()
        elif i // args.wave % 2 and i % 50 == 0:
            twins.planner.plan(200)  # never in the first wave: growth is left to state()
    print(
        f"{args.operations:,} operations, everything compared {twins.num_checks} times, at most "
        f"{twins.largest:,} edges, {twins.graph.num_ids:,} ids: no difference in "
        f"{time.perf_counter() - begin:.0f} s"
    )


if __name__ == "__main__":
    main()
