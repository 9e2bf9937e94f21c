"""How many times as fast `nodes`, `add` and `remove` are with arrays as in a loop of single calls.

python benchmark/vector_calls.py

Observations are those of n environments, 4 frames each, the newest one new. All are met twice, and
all that was added is removed at the end. Seconds of the process, the least of all rounds.
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gbcore import TransitionGraph


@dataclass
class Args:
    steps: int = 2_048
    """observations of a round"""
    rounds: int = 5
    """rounds, of which the quickest counts"""


def seconds(frames, steps, n, frame_stack, as_arrays):
    """Seconds of nodes, add, remove."""
    graph = TransitionGraph(4, (4, *frames.shape[1:]), np.uint8, frame_stack, capacity=steps + 16)
    each, transitions, taken = steps // n // 2, [], np.zeros(3)
    for t in range(2 * each):
        starts = np.arange(n) * each + t % each
        obs = frames[starts[:, None] + np.arange(4)]
        begin = time.process_time()
        nodes = graph.nodes(obs) if as_arrays else np.array([graph.node(one) for one in obs])
        taken[0] += time.process_time() - begin
        transitions.append((nodes, nodes % 4, starts / 7, np.roll(nodes, 1), starts < 0))
    for i, method in ((1, graph.add), (2, graph.remove)):
        for columns in transitions:
            rows = [columns] if as_arrays else zip(*(c.tolist() for c in columns), strict=True)
            begin = time.process_time()
            for row in rows:
                method(*row)
            taken[i] += time.process_time() - begin
    return taken


def main():
    args, rng = tyro.cli(Args), np.random.default_rng(0)
    print("kind, n: nodes, add, remove, times as fast as single calls")
    for kind, shape in (("plain", (10, 10)), ("frame stack", (84, 84))):
        frames = rng.integers(0, 256, (args.steps // 2 + 3, *shape), np.uint8)
        for n in (16, 64, 256):
            ways = [(frames, args.steps, n, kind != "plain", way) for way in (False, True)]
            rounds = [[seconds(*way) for way in ways] for _ in range(args.rounds)]
            single, arrays = np.min(rounds, axis=0)
            print(f"{kind}, {n}:", *(f"{ratio:.1f}" for ratio in single / arrays))


if __name__ == "__main__":
    main()
