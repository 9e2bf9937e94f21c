# /// script
# dependencies = ["numba==0.68.1", "numpy==2.2.6", "torch==2.13.0", "gymnasium==1.4.0", "ale-py==0.12.1", "minigrid==3.2.0", "minatar==1.0.15", "tyro==1.0.17", "tqdm==4.70.1", "tensorboard==2.21.0", "imageio-ffmpeg==0.8.1"]  # noqa: E501
# ///
"""Logged transitions, solved as a graph: how good is what can be stitched together from them?

    python examples/offline.py data.npz
    python examples/offline.py data.npz --env-id FrozenLake-v1 --collect 20000   # write them first
    python examples/offline.py data.npz --env-id breakout --script gb_dqn_minatar

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

import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # gbcore, if it is not installed

from gbcore import TransitionGraph
from gbcore.offline import COLUMNS, follow, read_transitions, solve_tried
from gbcore.run import fail, flush_denormals, lasting_output, play_episodes
from gbcore.run.environment import misfit
from gbcore.run.flags import read_flags

RANGES = {"gamma": (0, 1 - 1e-9), "round": (-9, 9), "seed": (0, 2**30 - 1)}
RANGES |= {"collect": (0, 2**31), "episodes": (1, 2**31), "max_steps": (1, 2**31)}


@dataclass
class Args:
    data: tyro.conf.Positional[Path]
    gamma: float = 0.99  # the discount
    round: int | None = None  # observations equal to so many decimals are one state
    sign: bool = False  # take the signs of rewards, where their size tells the time (MiniGrid)
    env_id: str | None = None  # the task that the data is of, to play what was found in
    script: str = "examples.gb_dqn_gymnasium"  # the module that makes the task
    collect: int = 0  # transitions of random actions in the task to write to DATA first
    episodes: int = 100  # to play
    max_steps: int = 1_000  # of an episode by the data
    seed: int = 1  # of the task and of random actions

    def key_of(self, obs):
        return None if self.round is None else np.round(obs.astype(np.float64), self.round) + 0.0

    def check(self):
        for name, (least, most) in RANGES.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                fail(f"require --{name.replace('_', '-')} from {least} to {most}, got {value}")
        folder, place = self.data.parent, self.data if self.data.is_file() else self.data.parent
        is_file = self.data.suffix == ".npz" and not self.data.is_dir() and folder.is_dir()
        if self.collect and not (is_file and self.env_id and os.access(place, os.W_OK)):
            fail(f"--collect requires --env-id and an .npz that can be written, got {self.data}")


def collect(env, number, rng):
    """Columns of random transitions."""
    rows, over = [], True
    while len(rows) < number:
        obs = np.array(env.reset() if over else rows[-1][3])
        next_obs, reward, *ends = env.step(action := int(rng.integers(env.num_actions)))
        rows.append((obs, action, reward, np.array(next_obs), *ends))
        over = any(ends)
    return dict(zip(COLUMNS, map(np.array, zip(*rows, strict=True)), strict=True))


def read(args, env):
    """The graph of the data, the states that trajectories start in, their rewards or None."""
    if zipfile.is_zipfile(args.data) and "edge_count" in np.load(args.data):
        graph = TransitionGraph.load(args.data)
        edges = graph.edges()
        starts = np.setdiff1d(edges["source"], edges["next"])
        return graph, starts if len(starts) else edges["source"][:1], None
    obs, actions, rewards, next_obs, terminated, truncated = read_transitions(args.data).values()
    rewards = np.sign(rewards) if args.sign else rewards
    if env and obs.shape[1:] != env.obs.shape:  # a Discrete state that env observes as one-hot
        space = getattr(getattr(env, "env", None), "observation_space", None)
        if space is None or any(misfit(space, one) for one in (*obs, *next_obs)):
            raise ValueError(f"Require data of {args.env_id}, got observations {obs.shape[1:]}")
        obs, next_obs = (np.stack(list(map(env.flatten, column))) for column in (obs, next_obs))
    kind = {} if args.round is None else {"key_shape": obs.shape[1:], "key_dtype": np.float64}
    graph = TransitionGraph(int(actions.max()) + 1, obs.shape[1:], obs.dtype, **kind)
    nodes, next_nodes = (graph.nodes(x, args.key_of(x)) for x in (obs, next_obs))
    graph.add(nodes, actions, rewards, next_nodes, terminated)
    cuts = np.flatnonzero((terminated | truncated)[:-1] | (nodes[1:] != next_nodes[:-1])) + 1
    return graph, nodes[np.append(0, cuts)], np.split(rewards, cuts)


@lasting_output()
def main():
    args = read_flags(Args, sys.argv[1:], description=__doc__)
    args.check()
    flush_denormals()  # as in the runs that may have recorded the data
    rng = np.random.default_rng(args.seed)
    env = None
    if args.env_id:
        try:
            script = importlib.import_module(args.script)
            make, args_of, task_of = script.make_env, script.Args, script.task_of
        except Exception as error:  # whatever is wrong with it
            fail(f"--script requires a module with Args, task_of and make_env: {error!r}")
        if script.__name__ == "gb_rainbow_atari":
            fail("--script gb_rainbow_atari: require one whose rewards are the task's own")
        about = args_of(seed=args.seed), task_of(args.env_id), rng
        env = make(*about)
        env.reset()
    try:
        if args.collect:
            np.savez_compressed(args.data, **collect(env, args.collect, rng))
        graph, starts, parts = read(args, env)
        values, actions, counts = solve_tried(graph, args.gamma)
        if env and graph.num_actions > env.num_actions:
            raise ValueError(f"Require actions below {env.num_actions}, as in {args.env_id}")
        _ = env and graph.find(env.obs, args.key_of(env.obs))  # is it a task of the data?
    except Exception as error:  # whatever a damaged file raises
        fail(f"cannot use {args.data}: {error}")
    say = "return {:.3f}, {:.1f} steps, discounted {:.3f}".format
    print(f"{graph.num_transitions:,} transitions of {graph.num_nodes:,} states")
    if parts:
        discounted = [part @ args.gamma ** np.arange(len(part)) for part in parts]
        rows = [(part.sum(), len(part), d) for part, d in zip(parts, discounted, strict=True)]
        print(f"mean of {len(rows):,} trajectories: {say(*np.mean(rows, axis=0))}")
        print(f"best of them: {say(*rows[np.argmax(discounted)])}")
    found, length, ends, visits = follow(graph, actions, starts, args.max_steps)
    print(f"stitched, by the data: {say(found, length, values[starts].mean())}; {ends:.0%} end")
    thin = np.flatnonzero((visits > 0) & (counts < 5))
    print(f"it passes {(visits > 0).sum():,} states; {len(thin):,} have fewer than 5 transitions")
    for node in thin[np.argsort(-visits[thin])][:3]:
        obs = np.array2string(graph.observations_of([node]).ravel(), 200, threshold=16)
        print(f"  state {node}, {visits[node]:.3f} times per episode, {counts[node]} seen: {obs}")
    if args.env_id:

        def act(obs):
            chosen = np.append(actions, -1)[[graph.find(one, args.key_of(one)) for one in obs]]
            return np.where(chosen < 0, rng.integers(graph.num_actions, size=len(obs)), chosen)

        envs = [make(*about) for _ in range(args.episodes)]
        returns, lengths = play_episodes(act, envs, rng, 0.0)
        print(f"played there: return {np.mean(returns):.3f}, {np.mean(lengths):.1f} steps")


if __name__ == "__main__":
    main()
