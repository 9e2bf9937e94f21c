"""Memory of the Atari replay and graph: resident bytes per transition of a real game.

python benchmark/atari_memory.py
"""

import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import gb_rainbow_atari as script  # noqa: E402


@dataclass
class Args:
    env_id: str = "Freeway"
    """the game"""
    steps: int = 20_000
    """transitions to record, of random actions"""
    capacity: int = 100_000
    """of the replay; memory is taken only as it fills"""


def resident_bytes():
    """Memory of this process now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def main():
    args = tyro.cli(Args)
    game = script.game_of(args.env_id)
    envs = script.make_envs(game, 1, life_loss_is_done=True)
    num_actions = int(envs.single_action_space.n)
    script.warm_up(num_actions)
    rng = np.random.default_rng(0)
    obs, info = envs.reset(seed=1)
    for _ in range(100):
        envs.step(np.zeros(1, np.int64))
    obs, info = envs.reset(seed=1)
    before = resident_bytes()
    graph = script.TransitionGraph(
        num_actions, (4, 84, 84), frame_stack=True, capacity=args.capacity + 2
    )
    replay = script.Replay(graph, args.capacity, 0.5)
    node, frame = graph.node(obs[0]), info["episode_frame_number"][0]
    done, starts_episode = False, True
    while replay.size < args.steps:
        action = rng.integers(num_actions, size=1)
        obs, reward, terminated, truncated, info = envs.step(action)
        next_node, next_frame = graph.node(obs[0]), info["episode_frame_number"][0]
        if script.is_reset(done, frame, next_frame):
            node, frame, done, starts_episode = next_node, next_frame, False, True
            continue
        reward = float(np.clip(reward[0], -1, 1))
        replay.add(node, int(action[0]), reward, next_node, bool(terminated[0]), starts_episode)
        node, frame, starts_episode = next_node, next_frame, False
        done = bool(terminated[0] or truncated[0])
    used = resident_bytes() - before
    print(
        f"{game}: {args.steps:,} transitions, {graph.num_nodes:,} states, "
        f"{graph.num_frames:,} frames: {used / 1e6:.0f} MB, {used / args.steps:.0f} bytes each"
    )


if __name__ == "__main__":
    main()
