# /// script
# dependencies = ["numba==0.68.1", "numpy==2.2.6", "torch==2.13.0", "gymnasium==1.4.0", "ale-py==0.12.1", "minigrid==3.2.0", "minatar==1.0.15", "tyro==1.0.17", "tqdm==4.70.1", "tensorboard==2.21.0", "imageio-ffmpeg==0.8.1"]  # noqa: E501
# ///
"""Logged transitions, solved as a graph: how good is what can be stitched together from them?

    python examples/offline.py data.npz
    python examples/offline.py data.npz --env-id FrozenLake-v1 --collect 20000   # write it first
    python examples/offline.py data.npz --env-id breakout --script gb_dqn_minatar
    python examples/offline.py ~/.minari/datasets/D4RL/minigrid/fourrooms-v0 --leave-out direction

DATA is an .npz with observations, actions, rewards, next_observations, terminations, truncations
(one row a transition, in order of time), the folder of a Minari dataset, or the graph.npz of a run.
Only actions that were tried count: no network guesses, and a state in which nothing was tried is
worth the least that the data's rewards allow.
"""

import importlib
import os
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # gbcore, if it is not installed

from gbcore.offline import (
    collect,
    constant_texts,
    follow,
    graph_of,
    load_graph,
    read_transitions,
    solve_tried,
)
from gbcore.run import Amount, Count, fail, flush_denormals, lasting_output, play_episodes, warn
from gbcore.run.environment import maker_of, misfit
from gbcore.run.flags import check_values, read_flags


@dataclass
class Args:
    data: tyro.conf.Positional[Path]
    gamma: Annotated[float, (0, 1 - 1e-9)] = 0.99  # the discount
    round: Annotated[int, (-9, 9)] | None = (
        None  # observations equal to so many decimals are one state
    )
    sign: bool = False  # take the signs of rewards, where their size tells the time (MiniGrid)
    env_id: str | None = None  # the task that the data is of, to play what was found in
    env_kwargs: str | None = None  # of the task: what gymnasium.make takes, as JSON
    time_limit: Count | None = None  # of the task: steps of an episode
    leave_out: str = ""  # parts of observations, as in mission,direction; one constant text is
    script: str | None = None  # the module that makes the task; else gb_dqn_gymnasium
    collect: Amount = 0  # transitions of random actions in the task to write to DATA first
    episodes: Count = 100  # to play
    max_steps: Count = 1_000  # of an episode by the data
    seed: Annotated[int, (0, 2**30 - 1)] = 1  # of the task and of random actions

    def key_of(self, obs):
        return None if self.round is None else np.round(obs.astype(np.float64), self.round) + 0.0

    def check(self):
        check_values(self)
        is_new = self.data.suffix == ".npz" and not self.data.exists()
        if self.collect and not (is_new and self.env_id and os.access(self.data.parent, os.W_OK)):
            fail(f"--collect requires --env-id and a new .npz that can be written, got {self.data}")
        if self.env_id is None:
            played = "script", "episodes", "env_kwargs", "time_limit"
            self.warn_of("without --env-id nothing is played", *played)

    def warn_of(self, why, *names):
        for name in names:
            if getattr(self, name) != getattr(Args, name):
                warn(f"--{name.replace('_', '-')} does nothing: {why}")


def read(args, env, left_out):
    """The graph of the data, the states that trajectories start in, their rewards or None."""
    if zipfile.is_zipfile(args.data) and "edge_count" in np.load(args.data):
        args.warn_of("a graph's states and rewards are those of its run", "round", "sign")
        return load_graph(args.data)
    columns = read_transitions(args.data, getattr(env, "flatten", None), left_out)
    columns["rewards"] = np.sign(columns["rewards"]) if args.sign else columns["rewards"]
    obs, next_obs = columns["observations"], columns["next_observations"]
    if env and obs.shape[1:] != env.obs.shape:  # a Discrete state that env observes as one-hot
        space = getattr(getattr(env, "env", None), "observation_space", None)
        if space is None or any(misfit(space, one) for one in (*obs, *next_obs)):
            raise ValueError(f"Require data of {args.env_id}, got observations {obs.shape[1:]}")
        for name in ("observations", "next_observations"):
            columns[name] = np.stack(list(map(env.flatten, columns[name])))
    first = getattr(env, "first_action", 0)
    own = None if env is None else np.arange(first, first + env.num_actions)
    return graph_of(columns, args.key_of, own)


@lasting_output()
def main():
    args = read_flags(Args, sys.argv[1:], description=__doc__)
    args.check()
    flush_denormals()  # as in the runs that may have recorded the data
    rng = np.random.default_rng(args.seed)
    try:
        constant = [] if args.collect else constant_texts(args.data)
    except Exception as error:  # whatever a damaged file raises
        fail(f"cannot use {args.data}: {error}")
    left_out = [name for name in args.leave_out.split(",") if name] + constant
    make, env = None, None
    if args.env_id:
        own = {"env_kwargs": args.env_kwargs, "time_limit": args.time_limit}
        if args.leave_out or args.script is None:
            own["leave_out"] = ",".join(left_out)
        own = {name: value for name, value in own.items() if value}
        script = args.script or importlib.import_module("examples.gb_dqn_gymnasium")
        make = maker_of(script, args.env_id, args.seed, rng, **own)
        env = make()
        env.reset()
    try:
        if args.collect:
            np.savez_compressed(args.data, **collect(env, args.collect, rng))
        graph, starts, parts = read(args, env, left_out)
        values, actions, counts = solve_tried(graph, args.gamma)
        if env and graph.num_actions > env.num_actions:
            raise ValueError(f"Require actions below {env.num_actions}, as in {args.env_id}")
        _ = env and graph.find(env.obs, args.key_of(env.obs))  # is it a task of the data?
    except Exception as error:  # whatever a damaged file raises
        fail(f"cannot use {args.data}: {error}")
    say = "return {:.3f}, {:.1f} steps, discounted {:.3f}".format
    print(f"{graph.num_transitions:,} transitions of {graph.num_nodes:,} states")
    if parts:
        discounts = args.gamma ** np.arange(max(map(len, parts)))
        rows = np.array([(part.sum(), len(part), part @ discounts[: len(part)]) for part in parts])
        print(f"mean of {len(rows):,} trajectories: {say(*rows.mean(axis=0))}")
        print(f"best of them: {say(*rows[rows[:, 2].argmax()])}")
    found, length, ends, visits = follow(graph, actions, starts, args.max_steps)
    print(f"stitched, by the data: {say(found, length, values[starts].mean())}; {ends:.0%} end")
    thin = np.flatnonzero((visits > 0) & (counts < 5))
    print(f"it passes {(visits > 0).sum():,} states; {len(thin):,} have fewer than 5 transitions")
    for node in thin[np.argsort(-visits[thin])][:3]:
        obs = np.array2string(graph.observations_of([node]).ravel(), 200, threshold=16)
        print(f"  state {node}, {visits[node]:.3f} times per episode, {counts[node]} seen: {obs}")
    if make:

        def act(obs):
            chosen = np.append(actions, -1)[[graph.find(one, args.key_of(one)) for one in obs]]
            return np.where(chosen < 0, rng.integers(graph.num_actions, size=len(obs)), chosen)

        returns, lengths = play_episodes(act, [make() for _ in range(args.episodes)], rng, 0.0)
        print(f"played there: return {np.mean(returns):.3f}, {np.mean(lengths):.1f} steps")


if __name__ == "__main__":
    main()
