"""Time the DQN scripts: steps per second of every backup, and where the time goes.

    python benchmark/dqn_speed.py --script gb_dqn_minatar --env-id freeway

Every backup has its own agent, which first fills its replay with random steps. Then they train in
turns, a slice of steps each, so that whatever else the machine does slows all of them alike; one
target-network period in all, so that leaf values are evaluated as often as in a run.
"""

import importlib
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


@dataclass
class Args:
    script: str = "gb_dqn_minigrid"
    """gb_dqn_minigrid or gb_dqn_minatar"""
    env_id: str | None = None
    """the task; the script's default if left out"""
    random_steps: int = 10_000
    """random steps in the replay before the clock starts"""
    steps: int = 8_000
    """steps that are timed: one period of the target network"""
    slice: int = 250
    """steps of one backup before it is the next one's turn"""


class Agent:
    """What `train` of a script does, a slice at a time, with a clock on every phase."""

    def __init__(self, script, agent_args, task):
        self.args = agent_args
        self.rng = np.random.default_rng(0)
        self.env = script.make_envs(agent_args, task, self.rng, 1)[0]
        self.obs = self.env.reset()
        num_actions = self.env.num_actions
        capacity = agent_args.total_timesteps
        self.graph = script.TransitionGraph(
            num_actions, self.obs.shape, self.obs.dtype, capacity=capacity + 2
        )
        self.replay = script.Replay(self.graph, capacity)
        torch.manual_seed(0)
        device = torch.device("cpu")
        self.learner = script.Learner(agent_args, self.graph, self.replay, num_actions, device)
        self.learner.leaves.evaluate = self.clocked("evaluate", self.learner.leaves.evaluate)
        self.learner.targets = self.clocked("targets in all", self.learner.targets)
        self.node, self.starts_episode = self.graph.node(self.obs), True
        self.seconds, self.slices = {}, []

    def clocked(self, phase, call):
        def timed(*args):
            start = time.perf_counter()
            result = call(*args)
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start
            return result

        return timed

    def move(self, action):
        self.obs, reward, terminated, truncated = self.env.step(action)
        next_node = self.graph.node(self.obs)
        self.replay.add(self.node, action, reward, next_node, terminated, self.starts_episode)
        self.node, self.starts_episode = next_node, False
        if terminated or truncated:
            self.obs = self.env.reset()
            self.node, self.starts_episode = self.graph.node(self.obs), True

    def play(self, num_steps):
        for _ in range(num_steps):
            self.move(int(self.rng.integers(self.env.num_actions)))

    def train(self, num_steps):
        args, rng, learner = self.args, self.rng, self.learner
        move, act = self.clocked("environment", self.move), self.clocked("act", learner.act)
        expand = self.clocked("expand", learner.subgraphs)
        update = self.clocked("update", learner.update)
        begin = time.perf_counter()
        for step in range(num_steps):
            if rng.random() < args.end_e:
                action = int(rng.integers(self.env.num_actions))
            else:
                action = int(act(self.obs[None])[0])
            move(action)
            if step % args.train_frequency == 0:
                batch = self.replay.sample(args.batch_size, rng)
                update(batch, expand(batch, rng))
        self.slices.append(time.perf_counter() - begin)


def main():
    args = tyro.cli(Args)
    script = importlib.import_module(args.script)
    task_of = getattr(script, "task_of", None) or script.game_of
    task = task_of(args.env_id or script.Args().env_id)
    torch.set_num_threads(1)
    agents = {name: Agent(script, script.Args(backup=name), task) for name in script.BACKUPS}
    torch.set_flush_denormal(True)
    for agent in agents.values():
        agent.play(args.random_steps)
        agent.train(args.slice)  # compiles
        agent.learner.update_target()
        agent.learner.leaves.num_evaluated = 0
        agent.seconds.clear()
        agent.slices.clear()
    for _ in range(args.steps // args.slice):
        for agent in agents.values():
            agent.train(args.slice)

    print(f"{task}, 1 CPU thread, torch {torch.__version__}, Python {platform.python_version()}")
    print("microseconds per step by phase")
    print()
    phases = ("environment", "act", "expand", "evaluate", "nested backup", "gradient", "other")
    print("| backup | steps/s | of one-step | evaluated per update | ", " | ".join(phases), " |")
    print("|---" * (len(phases) + 4) + "|")
    steps = args.steps // args.slice * args.slice
    base = np.array(agents["one-step"].slices)
    for name, agent in agents.items():
        times, total = agent.seconds, sum(agent.slices)
        known = {phase: times.get(phase, 0.0) for phase in phases}
        known["nested backup"] = times["targets in all"] - known["evaluate"]
        known["gradient"] = times["update"] - times["targets in all"]
        known["other"] = total - sum(known.values())
        updates = steps / agent.args.train_frequency
        print(
            f"| {name} | {steps / total:.0f} | {np.median(base / np.array(agent.slices)):.2f} | "
            f"{agent.learner.leaves.num_evaluated / updates:.2f} | "
            + " | ".join(f"{1e6 * seconds / steps:.0f}" for seconds in known.values())
            + " |"
        )


if __name__ == "__main__":
    main()
