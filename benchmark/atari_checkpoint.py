"""Cost of a checkpoint of a long Atari run: seconds to write and to read, size, and peak memory.

python benchmark/atari_checkpoint.py
"""

import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro
from resident import Peak, resident_mb

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import gb_rainbow_atari as script  # noqa: E402
from gbcore.run_directory import RunDirectory, load_checkpoint  # noqa: E402


@dataclass
class Args:
    transitions: int = 100_000
    """in the replay, each with a frame of its own, of random bytes"""
    repetitions: int = 3
    """checkpoints to write"""
    folder: str | None = None
    """where; default: the folder for temporary files"""


def filled(args):
    """A learner after one update, over a replay of distinct random frames."""
    n, rng = args.transitions, np.random.default_rng(0)
    flags = script.Args(total_timesteps=n, cuda=False, learning_starts=0)
    graph = script.TransitionGraph(4, (4, 84, 84), frame_stack=True, capacity=2 * n + 2)
    replay = script.Replay(graph, n, flags.priority_exponent)
    obs = np.zeros((4, 84, 84), np.uint8)
    node = graph.node(obs)
    for i in range(n):
        obs = np.concatenate([obs[1:], rng.integers(256, size=(1, 84, 84), dtype=np.uint8)])
        next_node = graph.node(obs)
        replay.add(node, i % 4, float(i % 3 - 1), next_node, i % 1000 == 999, i % 1000 == 0)
        node = next_node
    learner = script.Learner(flags, graph, replay, 4, torch.device("cpu"))
    batch = replay.sample(32, 0.4, rng)
    learner.update(batch, learner.subgraphs(batch, rng))
    env = script.Game("breakout")
    env.reset(1)
    return learner, rng, script.Counters(step=n, node=node), env


def main():
    args = tyro.cli(Args)
    torch.set_num_threads(1)
    learner, rng, counters, env = filled(args)
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    run = RunDirectory(folder / "run", {}, script.METRICS)
    before = resident_mb()
    for _ in range(args.repetitions):
        begin = time.perf_counter()
        with Peak() as peak:
            script.save(run, learner, rng, counters, env)
        seconds = time.perf_counter() - begin
        print(f"written in {seconds:.1f} s, at most {peak.mb - before:.0f} MB more memory")
    size = sum(path.stat().st_size for path in (run.path / "checkpoint").iterdir()) / 1e6
    print(f"{args.transitions:,} transitions: {size:.0f} MB on disk, {before:.0f} MB in memory")
    run.close()
    del learner
    begin, before = time.perf_counter(), resident_mb()
    with Peak() as peak:
        graph = load_checkpoint(run.path, 2 * args.transitions + 2)[2]
    print(
        f"read and checked in {time.perf_counter() - begin:.1f} s, "
        f"at most {peak.mb - before:.0f} MB, then {resident_mb() - before:.0f} MB more memory"
    )
    assert graph.num_transitions == args.transitions
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
