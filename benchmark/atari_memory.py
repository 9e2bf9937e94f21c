"""Memory of the Atari replay and graph: resident bytes per transition of a real game.

python benchmark/atari_memory.py
"""

from dataclasses import dataclass

import numpy as np
import play
import tyro
from output import fail
from resident import resident_mb

import gb_rainbow_atari as script


@dataclass
class Args:
    env_id: str = "Freeway"
    """the game"""
    steps: int = 20_000
    """transitions to record, of random actions"""
    capacity: int = 100_000
    """of the replay; memory is taken only as it fills"""


def main():
    args = tyro.cli(Args)
    if not 1 <= args.steps <= args.capacity:
        fail(f"require 1 <= --steps <= --capacity, got {args.steps} and {args.capacity}")
    game = script.game_of(args.env_id)
    num_actions, rows = play.stream("atari", game, np.random.default_rng(0))
    script.warm_up(script.Args(), num_actions)
    next(rows)  # the emulator's memory is there before it is measured
    before = resident_mb()
    graph = script.TransitionGraph(
        num_actions, (4, 84, 84), frame_stack=True, capacity=args.capacity + 2
    )
    replay = script.Replay(graph, args.capacity, 0.5)
    while replay.size < args.steps:
        obs, action, reward, next_obs, terminated, starts_episode = next(rows)
        row = graph.node(obs), action, reward, graph.node(next_obs), terminated
        replay.add(*row, starts_episode)
    used = 1e6 * (resident_mb() - before)
    print(
        f"{game}: {args.steps:,} transitions, {graph.num_nodes:,} states, "
        f"{graph.num_frames:,} frames: {used / 1e6:.0f} MB, {used / args.steps:.0f} bytes each"
    )


if __name__ == "__main__":
    main()
