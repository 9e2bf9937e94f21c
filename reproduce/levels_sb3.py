"""PPO and DQN of Stable-Baselines3 on the levels of `gb_dqn_minigrid.py --num-levels 0`.

    python reproduce/levels_sb3.py --env-id DoorKey-6x6 --algorithm ppo --seed 1

Levels, held-out worlds, observations and network (all but its last layer) are those of the script.
An evaluation is of 20 held-out levels; PPO draws its actions, DQN takes the best one, alone and on
a graph of its own episode. Training ends where `--enough` is reached. Each evaluation is a row of
results/levels.csv.
"""

import time
from dataclasses import dataclass
from typing import Literal

import gymnasium
import numpy as np
import torch
import tyro
from levels import row_of, write_rows
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import DummyVecEnv

import gb_dqn_minigrid
from gbcore import EpisodeGraph
from gbcore.run import one_line_errors
from gbcore.run.logger import versions

EPISODES = 20


@dataclass
class Args:
    env_id: str = "DoorKey-6x6"
    algorithm: Literal["ppo", "dqn"] = "ppo"
    seed: int = 1
    total_timesteps: int = 1_000_000
    eval_frequency: int = 25_000
    enough: float = 0.9  # mean return at which training ends
    view: Literal["grid", "partial"] = "grid"  # what the network sees
    num_levels: int = 0  # levels that training plays; 0: a new one each


class TrainingLevels(gymnasium.Env):
    """The script's training levels, with MiniGrid's own reward or, for DQN, its sign."""

    def __init__(self, flags, task, rng, is_sign):
        self.task, self.is_sign = gb_dqn_minigrid.make_env(flags, task, rng), is_sign
        shape = self.task.reset().shape
        self.observation_space = gymnasium.spaces.Box(0, 15, shape, np.uint8)  # codes, no image
        self.action_space = gymnasium.spaces.Discrete(self.task.num_actions)

    def reset(self, *, seed=None, options=None):
        return self.task.reset(), {}

    def step(self, action):
        obs, reward, terminated, truncated = self.task.step(int(action))
        return obs, np.sign(reward) if self.is_sign else reward, terminated, truncated, {}


class Features(BaseFeaturesExtractor):
    """The script's network without its last layer: uint8 [B, *obs_shape] -> [B, 128]."""

    def __init__(self, space):
        super().__init__(space, features_dim=128)
        self.network = gb_dqn_minigrid.QNetwork(space.shape, 1, levels_change=True)
        self.network.layers, self.network.is_dueling = self.network.layers[:-1], False

    def forward(self, obs):
        return self.network(obs)


def make_model(args, flags, task):
    how = {"features_extractor_class": Features, "net_arch": [], "normalize_images": False}
    rng = np.random.default_rng(args.seed)
    is_ppo = args.algorithm == "ppo"
    envs = [TrainingLevels(flags, task, one, not is_ppo) for one in rng.spawn(8 if is_ppo else 1)]
    if is_ppo:  # as rl-starter-files trains MiniGrid
        vec = DummyVecEnv([lambda env=env: env for env in envs])
        return PPO(
            "MlpPolicy", vec, 1e-3, n_steps=128, batch_size=256, n_epochs=4, ent_coef=0.01,
            policy_kwargs=how, seed=args.seed, device="cpu",
        )  # fmt: skip
    return DQN(  # the script's own numbers, and SB3's exploration
        "MlpPolicy", envs[0], flags.learning_rate, buffer_size=flags.total_timesteps,
        batch_size=flags.batch_size, gamma=flags.gamma, train_freq=flags.train_frequency,
        target_update_interval=flags.target_network_frequency, exploration_fraction=0.1,
        exploration_final_eps=flags.end_e, policy_kwargs=how, seed=args.seed, device="cpu",
    )  # fmt: skip


def policies(model):
    """How an evaluation acts -> its policy."""
    if isinstance(model, PPO):
        return {"network": lambda obs, keys=None: model.predict(obs)[0]}

    @torch.inference_mode()
    def values(obs):
        return model.q_net(torch.from_numpy(obs)).numpy()

    return {
        "network": lambda obs, keys=None: values(obs).argmax(axis=1),
        "graph": EpisodeGraph(values, model.action_space.n, model.gamma),
    }


@one_line_errors
def main():
    args = tyro.cli(Args, description=__doc__)
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    flags = gb_dqn_minigrid.Args(
        env_id=args.env_id, seed=args.seed, num_levels=args.num_levels, view=args.view
    )
    task = gb_dqn_minigrid.task_of(args.env_id)
    model = make_model(args, flags, task)
    same = {
        "task": task, "agent": args.algorithm, "exploration": "", "view": args.view,
        "num_levels": args.num_levels, "seed": args.seed, "commit": versions()["commit"],
    }  # fmt: skip
    begin, best = time.perf_counter(), 0.0
    while model.num_timesteps < args.total_timesteps and best < args.enough:
        model.learn(args.eval_frequency, reset_num_timesteps=False)
        rows = []
        for act_on, policy in policies(model).items():
            seed = [args.seed, model.num_timesteps]
            returns, _ = gb_dqn_minigrid.evaluate(flags, task, policy, seed, EPISODES)
            same["wall_seconds"] = round(time.perf_counter() - begin, 1)
            rows.append(row_of(same, act_on, model.num_timesteps, returns))
            print(rows[-1], flush=True)
        write_rows(rows)
        best = max(row["mean_return"] for row in rows)


if __name__ == "__main__":
    main()
