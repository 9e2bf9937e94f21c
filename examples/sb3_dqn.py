"""Stable-Baselines3's DQN, learning from Graph Backup's targets.

    pip install -r requirements-sb3.txt
    python examples/sb3_dqn.py --env-id FrozenLake-v1
    python examples/sb3_dqn.py --env-id FrozenLake-v1 --depth 0    # as it was, to compare

GraphReplayBuffer keeps its transitions in a graph as well, and GraphDQN's batches come with targets
from there. Policies, callbacks, logging and vector environments are those of Stable-Baselines3.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from stable_baselines3 import DQN
from stable_baselines3.common.buffers import ReplayBuffer, ReplayBufferSamples
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # gbcore, if it is not installed

from gbcore import LeafTable, TransitionGraph, q_targets


class GraphReplayBuffer(ReplayBuffer):
    """A replay whose rows are the transitions of a graph; for environments not normalised.

    key: function of observations [n, *obs_shape] that returns what makes two of them one state,
    bytes [n, ...]; without it the observation is.
    """

    def __init__(self, *args, depth=5, breadth=20, key=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.depth, self.breadth, self.key = depth, breadth, key
        obs = self.observations
        kind = {} if key is None else {"key_shape": key(obs[0]).shape[1:]}
        self.graph = TransitionGraph(self.action_space.n, self.obs_shape, obs.dtype, **kind)
        self.nodes = np.zeros((2, self.buffer_size, self.n_envs), np.int64)  # before and after
        self.rng = np.random.default_rng(torch.randint(2**31, ()).item())  # DQN's seed decides
        self.leaves = self.gamma = None  # the model's, while it trains

    def _transitions(self, row):
        """What a row holds of each environment, as TransitionGraph.add and remove take it."""
        terminated = (self.dones[row] > 0) & (self.timeouts[row] == 0)
        columns = self.nodes[0, row], self.actions[row, :, 0], self.rewards[row], self.nodes[1, row]
        return [np.array(column) for column in (*columns, terminated)]

    def add(self, obs, next_obs, action, reward, done, infos):
        """As ReplayBuffer.add."""
        row, overwritten = self.pos, self._transitions(self.pos) if self.full else None
        super().add(obs, next_obs, action, reward, done, infos)
        for column, seen in enumerate((self.observations[row], self.next_observations[row])):
            self.nodes[column, row] = self.graph.nodes(seen, self.key and self.key(seen))
        self.graph.add(*self._transitions(row))
        if overwritten is not None:  # last: this may free nodes, and their ids
            self.graph.remove(*overwritten)

    def _get_samples(self, batch_inds, env=None):
        """A batch whose rewards are the targets; their episodes are over: DQN adds nothing."""
        envs = self.rng.integers(self.n_envs, size=len(batch_inds))
        nodes, actions = self.nodes[0, batch_inds, envs], self.actions[batch_inds, envs]
        subgraphs = self.graph.expand(nodes, actions[:, 0], self.depth, self.breadth, self.rng)
        targets = q_targets(subgraphs, self.leaves.values(subgraphs.nodes), self.gamma)
        obs = self.to_torch(self.observations[batch_inds, envs])
        targets = self.to_torch(targets[:, None])
        batch = obs, self.to_torch(actions), obs, torch.ones_like(targets), targets
        return ReplayBufferSamples(*batch)


class GraphDQN(DQN):
    """DQN for a GraphReplayBuffer."""

    leaves = None  # what the target network gives the states of the graph

    def _target_values(self, obs):
        with torch.no_grad():
            return self.q_net_target(torch.as_tensor(obs, device=self.device)).cpu().numpy()

    def train(self, gradient_steps, batch_size=100):
        buffer = self.replay_buffer
        if self.leaves is None or self.leaves.graph is not buffer.graph:
            self.leaves = LeafTable(buffer.graph, self._target_values)
        buffer.leaves, buffer.gamma = self.leaves, self.gamma
        super().train(gradient_steps, batch_size)
        buffer.leaves = None

    def _on_step(self):
        super()._on_step()
        interval = max(self.target_update_interval // self.n_envs, 1)
        if self.leaves is not None and self._n_calls % interval == 0:
            self.leaves.forget_all()  # the target network has changed

    def _excluded_save_params(self):
        return [*super()._excluded_save_params(), "leaves"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--env-id", default="FrozenLake-v1")
    for name, default in {"total-timesteps": 20_000, "seed": 1, "num-envs": 1, "depth": 5}.items():
        parser.add_argument(f"--{name}", default=default, type=int)
    args = parser.parse_args()
    torch.set_num_threads(1)
    env = make_vec_env(args.env_id, args.num_envs, seed=args.seed)
    settings = {"learning_rate": 1e-3, "learning_starts": 1_000, "target_update_interval": 500}
    if args.depth > 0:
        settings["replay_buffer_class"] = GraphReplayBuffer
        settings["replay_buffer_kwargs"] = {"depth": args.depth}
    model = (GraphDQN if args.depth > 0 else DQN)("MlpPolicy", env, seed=args.seed, **settings)
    model.learn(args.total_timesteps)
    mean, deviation = evaluate_policy(model, env, n_eval_episodes=50)
    print(f"{args.env_id}, depth {args.depth}: return {mean:.2f} (deviation {deviation:.2f})")


if __name__ == "__main__":
    main()
