# /// script
# dependencies = ["numba==0.68.1", "numpy==2.2.6", "torch==2.13.0", "gymnasium==1.4.0", "ale-py==0.12.1", "minigrid==3.2.0", "minatar==1.0.15", "tyro==1.0.17", "tqdm==4.70.1", "tensorboard==2.21.0", "imageio-ffmpeg==0.8.1", "stable-baselines3==2.9.2"]  # noqa: E501
# ///
"""Stable-Baselines3's DQN, learning from Graph Backup's targets.

pip install -r requirements-sb3.txt
python examples/sb3_dqn.py --env-id FrozenLake-v1
python examples/sb3_dqn.py --env-id FrozenLake-v1 --depth 0    # as it was, to compare
"""

import argparse
import sys
from pathlib import Path

import torch
from stable_baselines3 import DQN
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # gbcore, if it is not installed

from gbcore.run import lasting_output
from gbcore.sb3 import GraphDQN


@lasting_output()
def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--env-id", default="FrozenLake-v1")
    parser.add_argument("--backup", default="graph", choices=["graph", "whole-graph", "one-step"])
    for name, default in {"total-timesteps": 20_000, "seed": 1, "num-envs": 1}.items():
        parser.add_argument(f"--{name}", default=default, type=int)
    args = parser.parse_args()
    torch.set_num_threads(1)
    env = make_vec_env(args.env_id, args.num_envs)
    settings = {"learning_rate": 1e-3, "learning_starts": 1_000, "target_update_interval": 500}
    if args.backup == "one-step":
        model = DQN("MlpPolicy", env, seed=args.seed, **settings)
    else:
        model = GraphDQN("MlpPolicy", env, seed=args.seed, backup=args.backup, **settings)
    model.learn(args.total_timesteps)
    mean, deviation = evaluate_policy(model, env, n_eval_episodes=50)
    print(f"{args.env_id}, {args.backup}: return {mean:.2f} (deviation {deviation:.2f})")


if __name__ == "__main__":
    main()
