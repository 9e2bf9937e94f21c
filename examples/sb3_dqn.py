# /// script
# dependencies = ["numba==0.68.1", "numpy==2.2.6", "scipy==1.17.1", "torch==2.13.0", "gymnasium==1.4.0", "ale-py==0.12.1", "minigrid==3.2.0", "minatar==1.0.15", "tyro==1.0.17", "cloudpickle==3.1.3", "tensorboard==2.21.0", "imageio-ffmpeg==0.8.1", "stable-baselines3==2.9.2"]  # noqa: E501
# ///
"""Stable-Baselines3's DQN, learning from Graph Backup's targets.

pip install -r requirements-sb3.txt    # of this file; of programs elsewhere: pip install '.[sb3]'
python examples/sb3_dqn.py --env-id FrozenLake-v1
python examples/sb3_dqn.py --env-id FrozenLake-v1 --backup one-step    # as it was, to compare
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro
from stable_baselines3 import DQN
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # gbcore, if it is not installed

from gbcore.run import fail, one_line_errors
from gbcore.run.environment import gymnasium_id
from gbcore.run.logger import with_file
from gbcore.sb3 import GraphDQN


@dataclass
class Args:
    env_id: str = "FrozenLake-v1"
    backup: Literal["graph", "whole-graph", "one-step"] = "graph"
    total_timesteps: int = 20_000
    seed: int = 1
    num_envs: int = 1


@one_line_errors
def main():
    args = tyro.cli(Args, description=__doc__.partition("\n")[0])
    if min(args.total_timesteps, args.num_envs) < 1 or not 0 <= args.seed < 2**31:
        fail("require --total-timesteps and --num-envs >= 1, and --seed >= 0 and below 2**31")
    torch.set_num_threads(1)
    settings = {"learning_rate": 1e-3, "learning_starts": 1_000, "target_update_interval": 500}
    try:
        env = make_vec_env(env_id := gymnasium_id(args.env_id), args.num_envs)
        if args.backup == "one-step":
            model = DQN("MlpPolicy", env, seed=args.seed, **settings)
        else:
            model = GraphDQN("MlpPolicy", env, seed=args.seed, backup=args.backup, **settings)
    except Exception as error:  # DQN takes some spaces, an environment's code may raise anything
        fail(f"cannot use {args.env_id}: {' '.join(str(error).split()) or repr(error)}")
    model.learn(args.total_timesteps)
    mean, deviation = evaluate_policy(model, env, n_eval_episodes=50)
    print(f"{with_file(env_id)}, {args.backup}: return {mean:.2f} (deviation {deviation:.2f})")


if __name__ == "__main__":
    main()
