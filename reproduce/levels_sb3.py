"""PPO of Stable-Baselines3 on the levels of `gb_dqn_minigrid.py --num-levels 0`.

    python reproduce/levels_sb3.py --env-id DoorKey-6x6 --seed 1

Levels, held-out worlds, observations and network (all but its last layer) are those of the script.
An evaluation is of 20 held-out levels, and PPO draws its actions. Training ends where `--enough` is
reached, with 100 levels more, by the network alone and on a graph of each episode. Each evaluation
is a row of results/levels.csv.
"""

import functools
import time
from dataclasses import dataclass
from typing import Literal

import gymnasium
import numpy as np
import torch
import tyro
from levels import LAST, row_of, same_of, write_rows
from stable_baselines3 import PPO
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
    view: Literal["grid", "partial"] = "grid"
    seed: int = 1
    total_timesteps: int = 1_000_000
    eval_frequency: int = 25_000
    enough: float = 0.9  # mean return at which training ends


class TrainingLevels(gymnasium.Env):
    """The script's training levels, with MiniGrid's own reward."""

    def __init__(self, flags, task, rng):
        self.task = gb_dqn_minigrid.make_env(flags, task, rng)
        shape = self.task.reset().shape
        self.observation_space = gymnasium.spaces.Box(0, 15, shape, np.uint8)  # codes, no image
        self.action_space = gymnasium.spaces.Discrete(self.task.num_actions)

    def reset(self, *, seed=None, options=None):
        return self.task.reset(), {}

    def step(self, action):
        return *self.task.step(int(action)), {}


class Features(BaseFeaturesExtractor):
    """The script's network without its last layer: uint8 [B, *obs_shape] -> [B, 128]."""

    def __init__(self, space):
        super().__init__(space, features_dim=128)
        self.network = gb_dqn_minigrid.QNetwork(space.shape, 1, levels_change=True)
        self.network.layers, self.network.is_dueling = self.network.layers[:-1], False

    def forward(self, obs):
        return self.network(obs)


def make_model(args, flags, task):
    """Untrained PPO with the numbers of rl-starter-files."""
    rngs = np.random.default_rng(args.seed).spawn(8)
    envs = DummyVecEnv([lambda rng=rng: TrainingLevels(flags, task, rng) for rng in rngs])
    how = {"features_extractor_class": Features, "net_arch": [], "normalize_images": False}
    return PPO(
        "MlpPolicy", envs, 1e-3, n_steps=128, batch_size=256, n_epochs=4, ent_coef=0.01,
        policy_kwargs=how, seed=args.seed, device="cpu",
    )  # fmt: skip


def action_values(model, obs):
    """V(s) + alpha log pi(a | s), float32 [n, A], of observations [n, *obs_shape].

    alpha is PPO's weight of entropy. Of a policy that is best with its entropy among the rewards,
    these are its action values (Schulman et al. 2017).
    """
    obs = torch.from_numpy(obs)
    with torch.inference_mode():
        log_pi = model.policy.get_distribution(obs).distribution.logits  # [n, A]
        return (model.policy.predict_values(obs) + model.ent_coef * log_pi).numpy()


@one_line_errors
def main():
    args = tyro.cli(Args, description=__doc__)
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    flags = gb_dqn_minigrid.Args(env_id=args.env_id, view=args.view, seed=args.seed, num_levels=0)
    task = gb_dqn_minigrid.task_of(args.env_id)
    model = make_model(args, flags, task)
    begin, mean = time.perf_counter(), 0.0

    def policy(obs, keys=None):
        return model.predict(obs)[0]

    def play(act_on, policy, episodes):
        seed = [args.seed, model.num_timesteps]
        returns, _ = gb_dqn_minigrid.evaluate(flags, task, policy, seed, episodes)
        how = task, "ppo", flags, versions()["commit"], time.perf_counter() - begin
        row = row_of(same_of(*how), act_on, model.num_timesteps, returns)
        print(row, flush=True)
        write_rows([row])
        return row["mean_return"]

    while model.num_timesteps < args.total_timesteps and mean < args.enough:
        model.learn(args.eval_frequency, reset_num_timesteps=False)
        mean = play("network", policy, EPISODES)
    play("network", policy, LAST)
    q = functools.partial(action_values, model)
    play("graph", EpisodeGraph(q, model.action_space.n, model.gamma), LAST)


if __name__ == "__main__":
    main()
