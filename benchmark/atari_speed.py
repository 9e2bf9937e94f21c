"""Time the Atari script: updates and steps per second of every backup, and where the time goes.

    python benchmark/atari_speed.py --threads 2

One agent (graph backup) plays and learns first, so that its replay holds what a run's holds: random
steps, then those of a greedy policy. Every backup is then timed on that replay and that network, in
turns, several times over.
"""

import copy
import platform
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import tyro

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import gb_rainbow_atari as script  # noqa: E402


@dataclass
class Args:
    env_id: str = "Freeway"
    """the game"""
    threads: int = 2
    """CPU threads for torch"""
    cuda: bool = torch.cuda.is_available()
    """time the GPU"""
    random_steps: int = 1_000
    """steps of random actions in the replay"""
    steps: int = 3_000
    """steps in the replay; those after the random ones are the agent's, one update each"""
    updates: int = 20
    """updates per repetition"""
    repetitions: int = 5
    """repetitions of each backup"""
    bf16_targets: bool = False
    """evaluate target values in bfloat16"""


class Clock:
    """Adds up the time of functions under names of phases."""

    def __init__(self, device):
        self.device, self.seconds = device, {}

    def time(self, phase, call, *args):
        start = time.perf_counter()
        result = call(*args)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start
        return result

    def wrap(self, phase, call):
        return lambda *args: self.time(phase, call, *args)


def fill(args, agent_args, device):
    """A learner that played and learned; seconds of one environment step and of one action."""
    rng = np.random.default_rng(0)
    game = script.game_of(args.env_id)
    envs = script.make_envs(game, 1, life_loss_is_done=True)
    num_actions = int(envs.single_action_space.n)
    graph = script.TransitionGraph(num_actions, (4, 84, 84), frame_stack=True)
    replay = script.Replay(graph, args.steps, agent_args.priority_exponent)
    learner = script.Learner(agent_args, graph, replay, num_actions, device)
    clock = Clock(device)
    obs, info = envs.reset(seed=1)
    node, frame = learner.node(obs[0]), info["episode_frame_number"][0]
    done, starts_episode = False, True
    while replay.size < args.steps:
        if replay.size < args.random_steps:
            action = rng.integers(num_actions, size=1)
        else:
            action = clock.time("act", learner.act, obs, True)
        obs, reward, terminated, truncated, info = clock.time("environment", envs.step, action)
        next_node = clock.time("intern", learner.node, obs[0])
        next_frame = info["episode_frame_number"][0]
        if script.is_reset(done, frame, next_frame):
            node, frame, done, starts_episode = next_node, next_frame, False, True
            continue
        reward = float(np.clip(reward[0], -1, 1))
        replay.add(node, int(action[0]), reward, next_node, bool(terminated[0]), starts_episode)
        node, frame, starts_episode = next_node, next_frame, False
        done = bool(terminated[0] or truncated[0])
        if replay.size > args.random_steps:
            batch = replay.sample(agent_args.batch_size, 0.5, rng)
            result = learner.update(batch, learner.subgraphs(batch, rng)).cpu().numpy()
            replay.update_priorities(batch.rows, result[:-2])
    envs.close()
    per_step = {name: seconds / args.steps for name, seconds in clock.seconds.items()}
    per_step["act"] = clock.seconds["act"] / (args.steps - args.random_steps)
    return learner, per_step


def timed_updates(args, learner, backup, rng):
    """Milliseconds per update by phase, and states evaluated per update."""
    learner.args = replace(learner.args, backup=backup)
    clock = Clock(learner.device)
    before = learner.num_evaluated
    learner.pruned_targets = clock.wrap("targets in all", learner.pruned_targets)
    plain = script.categorical_targets
    script.categorical_targets = clock.wrap("nested backup", plain)
    start = time.perf_counter()
    for _ in range(args.updates):
        batch = learner.replay.sample(learner.args.batch_size, 0.5, rng)
        subgraphs = clock.time("expand", learner.subgraphs, batch, rng)
        result = clock.time("update", learner.update, batch, subgraphs).cpu().numpy()
        clock.time("expand", learner.replay.update_priorities, batch.rows, result[:-2])
    total = time.perf_counter() - start
    script.categorical_targets = plain
    del learner.pruned_targets
    seconds = {"targets in all": 0.0, "nested backup": 0.0} | clock.seconds
    phases = {
        "update": total,
        "expand": seconds["expand"],
        "evaluate": seconds["targets in all"] - seconds["nested backup"],
        "nested backup": seconds["nested backup"],
        "gradient": seconds["update"] - seconds["targets in all"],
    }
    evaluated = (learner.num_evaluated - before) / args.updates
    return {name: 1e3 * value / args.updates for name, value in phases.items()}, evaluated


def main():
    args = tyro.cli(Args)
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    script.keep_freed_memory()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    if args.cuda:
        torch.cuda.set_stream(torch.cuda.Stream())
    torch.manual_seed(0)
    device = torch.device("cuda" if args.cuda else "cpu")
    agent_args = script.Args(backup="graph", cuda=args.cuda, bf16_targets=args.bf16_targets)
    learner, per_step = fill(args, agent_args, device)
    other = 1e3 * sum(per_step.values())
    rng = np.random.default_rng(1)
    state = copy.deepcopy(learner.state())
    rows = {backup: [] for backup in script.BACKUPS}
    for repetition in range(args.repetitions + 1):
        for backup in rows:
            learner.restore(copy.deepcopy(state))
            measured = timed_updates(args, learner, backup, rng)
            if repetition:  # the first is a warm-up
                rows[backup].append(measured)

    where = torch.cuda.get_device_name() if args.cuda else f"{args.threads} CPU threads"
    print(f"{args.env_id}, {where}, torch {torch.__version__}, Python {platform.python_version()}")
    print(f"per step: {', '.join(f'{k} {1e3 * v:.2f} ms' for k, v in per_step.items())}; 2 updates")
    print()
    phases = ("expand", "evaluate", "nested backup", "gradient")
    print("| backup | states evaluated | ms per update | " + " | ".join(phases), end="")
    print(" | steps/s | of one-step |")
    print("|---" * (len(phases) + 5) + "|")
    base = None
    for backup, measured in rows.items():
        evaluated = np.mean([count for _, count in measured])
        update = np.array([times["update"] for times, _ in measured])
        shares = [np.median([times[phase] for times, _ in measured]) for phase in phases]
        steps = 1e3 / (other + 2 * np.median(update))
        base = base or steps
        print(
            f"| {backup} | {evaluated:.0f} | {np.median(update):.1f} "
            f"({update.min():.1f} to {update.max():.1f}) | "
            + " | ".join(f"{share:.1f}" for share in shares)
            + f" | {steps:.1f} | {steps / base:.2f} |"
        )


if __name__ == "__main__":
    main()
