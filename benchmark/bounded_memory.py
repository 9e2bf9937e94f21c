"""Memory and time per step of a replay that forgets: millions of transitions, a small capacity.

    python benchmark/bounded_memory.py --out results/bounded_memory.csv

The environment is synthetic and never repeats itself for long: a random walk over a line without
end, with random numbers of 16 bits in view. Replay, graph and leaf values are those of the scripts;
the network is a stand-in that reads its observation, so that a leaf value of another state shows.
"""

import multiprocessing
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from output import fail, write_rows  # noqa: E402

from gbcore import LeafTable, TransitionGraph, q_targets  # noqa: E402
from gbcore.replay import Replay  # noqa: E402

NUM_ACTIONS = 6
WINDOW = 1_000  # steps; of their CPU times the median is taken: others may use the machine


@dataclass
class Args:
    steps: int = 5_000_000  # transitions
    capacity: int = 100_000  # of the replay
    report_frequency: int = 1_000_000  # transitions between two rows
    frame_stack: bool = False  # observations are stacks of 4 frames, each stored once, as in Atari
    seed: int = 0  # of everything random
    out: str | None = None  # CSV file to write


def resident_mb(pid="self"):
    """MB that a process has now."""
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 1e6


def walk(rng, frame_stack):
    """Observations that drift, rewards and ends: a state is seen a few times, then never again."""
    frames, place = [np.zeros((8, 8), np.uint8)] * 4, 0
    while True:
        place += int(rng.integers(-2, 5))
        noise = int(rng.integers(4))
        number = 4 * place + noise
        numbers = np.array([number, number * 7919 % 65_537, 0, 0, 0, 0, 0, 0])
        frames = [*frames[1:], numbers.view(np.uint8).reshape(8, 8)]
        obs = np.stack(frames) if frame_stack else frames[-1].reshape(64)
        yield obs, float(noise == 0), bool(rng.random() < 0.01)


def values(obs):
    """A stand-in for a network: float32 [n, NUM_ACTIONS], from the newest frame."""
    numbers = np.ascontiguousarray(obs.reshape(len(obs), -1)[:, -64:]).view(np.int64)[:, 1]
    return (numbers[:, None] + np.arange(NUM_ACTIONS)).astype(np.float32)


def faults(graph, leaves):
    """Leaf values that are not those of their states; broken invariants of the graph.

    Counted in a fork of this process, so that its memory does not count here.
    """

    def count():
        known = np.flatnonzero(leaves.known)
        stale = (leaves.values(known) != values(graph.observations_of(known))).any(axis=1).sum()
        sender.send((int(stale), len(graph.check_valid())))

    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=count)
    child.start()
    sender.close()
    found = receiver.recv()
    child.join()
    return found


def main():
    args = tyro.cli(Args)
    if not 1 <= args.report_frequency <= args.steps or args.capacity < 1:
        fail("require 1 <= --report-frequency <= --steps and --capacity >= 1")
    rng = np.random.default_rng(args.seed)
    steps = walk(rng, args.frame_stack)
    obs, _, _ = next(steps)
    graph = TransitionGraph(
        NUM_ACTIONS, obs.shape, frame_stack=args.frame_stack, capacity=2 * args.capacity + 2
    )
    replay, leaves = Replay(graph, args.capacity), LeafTable(graph, values)
    node, at_start = graph.node(obs), resident_mb()
    rows, windows, begin = [], [], time.process_time()
    for step in range(1, args.steps + 1):
        obs, reward, terminated = next(steps)
        next_node = graph.node(obs)
        replay.add(node, int(rng.integers(NUM_ACTIONS)), reward, next_node, terminated)
        if terminated:
            replay.end_episode()
        node = next_node
        if step % 8 == 0 and replay.size >= 32:
            batch = replay.sample(32, rng)
            subgraphs = graph.expand(batch.nodes, batch.actions, 5, 20, rng)
            q_targets(subgraphs, leaves.values(subgraphs.nodes), 0.99)
        if step % WINDOW == 0:
            windows.append((time.process_time() - begin) / WINDOW)
            begin = time.process_time()
        if step % args.report_frequency == 0:
            memory = resident_mb()
            stale, problems = faults(graph, leaves)
            rows.append({
                "transitions": step,
                "resident_mb": round(memory, 1),
                "above_start_mb": round(memory - at_start, 1),
                "us_per_step": round(1e6 * float(np.median(windows)), 2),
                "nodes": graph.num_nodes, "edges": graph.num_edges, "ids": graph.num_ids,
                "ids_given_out": graph.num_ids + int(graph.generations.sum()),
                "frames": graph.num_frames if args.frame_stack else 0,
                "stale_leaf_values": stale, "problems": problems,
            })  # fmt: skip
            print(", ".join(f"{name} {value:,}" for name, value in rows[-1].items()), flush=True)
            windows, begin = [], time.process_time()
        if step % 32_000 == 0:
            leaves.forget_all()  # a new target network
    if args.out:
        write_rows(args.out, rows[0], rows)
    sys.exit(any(row["problems"] or row["stale_leaf_values"] for row in rows))


if __name__ == "__main__":
    main()
