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
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # gbcore, if it is not installed

from gbcore import TransitionGraph
from gbcore.offline import COLUMNS, follow, read_transitions, solve_tried
from gbcore.run import fail, flush_denormals, lasting_output, play_episodes


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
    if args.data.is_file() and "edge_count" in np.load(args.data):
        graph = TransitionGraph.load(args.data)
        edges = graph.edges()
        starts = np.setdiff1d(edges["source"], edges["next"])
        return graph, starts if len(starts) else edges["source"][:1], None
    obs, actions, rewards, next_obs, terminated, truncated = read_transitions(args.data).values()
    rewards = np.sign(rewards) if args.sign else rewards
    if env and obs.shape[1:] != env.obs.shape:  # a Discrete state that env observes as one-hot
        obs, next_obs = (np.stack(list(map(env.flatten, column))) for column in (obs, next_obs))
    kind = {} if args.round is None else {"key_shape": obs.shape[1:], "key_dtype": np.float64}
    graph = TransitionGraph(int(actions.max()) + 1, obs.shape[1:], obs.dtype, **kind)
    nodes, next_nodes = (graph.nodes(x, args.key_of(x)) for x in (obs, next_obs))
    graph.add(nodes, actions, rewards, next_nodes, terminated)
    cuts = np.flatnonzero((terminated | truncated)[:-1] | (nodes[1:] != next_nodes[:-1])) + 1
    return graph, nodes[np.append(0, cuts)], np.split(rewards, cuts)


@lasting_output()
def main():
    args = tyro.cli(Args, description=__doc__)
    flush_denormals()  # as in the runs that may have recorded the data
    rng = np.random.default_rng(args.seed)
    env = None
    if args.env_id:
        script = importlib.import_module(args.script)
        about = script.Args(seed=args.seed), script.task_of(args.env_id), rng
        env = script.make_env(*about)
        env.reset()
    elif args.collect:
        fail("--collect requires --env-id")
    if args.collect:
        np.savez_compressed(args.data, **collect(env, args.collect, rng))
    try:
        graph, starts, parts = read(args, env)
        values, actions, counts = solve_tried(graph, args.gamma)
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

        envs = [script.make_env(*about) for _ in range(args.episodes)]
        returns, lengths = play_episodes(act, envs, rng, 0.0)
        print(f"played there: return {np.mean(returns):.3f}, {np.mean(lengths):.1f} steps")


if __name__ == "__main__":
    main()
