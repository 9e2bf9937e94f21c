# /// script
# dependencies = ["numba==0.68.1", "numpy==2.2.6", "scipy==1.17.1", "torch==2.13.0", "gymnasium==1.4.0", "ale-py==0.12.1", "minigrid==3.2.0", "minatar==1.0.15", "tyro==1.0.17", "cloudpickle==3.1.3", "tensorboard==2.21.0", "imageio-ffmpeg==0.8.1"]  # noqa: E501
# ///
"""Logged transitions, solved as a graph: how good a policy can be stitched together from them?

    python examples/offline.py data.npz
    python examples/offline.py data.npz --env-id FrozenLake-v1 --collect 20000   # write it first
    python examples/offline.py data.npz --env-id breakout --script gb_dqn_minatar
    python examples/offline.py ~/.minari/datasets/D4RL/minigrid/fourrooms-v0 --leave-out direction

DATA is an .npz with observations, actions, rewards, next_observations, terminations, truncations
(one row a transition, in order of time), the folder of a Minari dataset, or the graph.npz of a run.
Only actions that were tried count: no network guesses, and a state in which nothing was tried is
worth the least that the data's rewards allow.
"""

import functools
import importlib
import os
import re
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # gbcore, if it is not installed

from gbcore import TransitionGraph, solve
from gbcore.run import (
    Count,
    NonNegative,
    fail,
    flush_denormals,
    number,
    one_line_errors,
    play_episodes,
    warn,
)
from gbcore.run.environment import import_module

COLUMNS = (
    "observations", "actions", "rewards", "next_observations", "terminations", "truncations",
)  # fmt: skip


@dataclass
class Args:
    data: tyro.conf.Positional[Path]
    gamma: Annotated[float, number(float, 0, 1 - 1e-9)] = 0.99  # the discount
    round: Annotated[int, number(int, -9, 9)] | None = None
    """observations equal to so many decimals are one state"""
    sign: bool = False  # take the signs of rewards, where their size tells the time (MiniGrid)
    env_id: str | None = None  # the task of the data, to play the policy in
    env_kwargs: str | None = None  # of gymnasium.make, as JSON
    time_limit: Count | None = None  # of the task: steps of an episode
    leave_out: str = ""  # parts of observations, as in mission,direction; one constant text is
    script: str | None = None  # the module that makes the task; else gb_dqn_gymnasium
    collect: NonNegative = 0  # transitions of random actions in the task to write to DATA first
    episodes: Count = 100  # to play
    max_steps: Count = 1_000  # of an episode by the data
    seed: Annotated[int, number(int, 0, 2**30 - 1)] = 1  # of the task and of random actions

    def key_of(self, obs):
        return None if self.round is None else np.round(obs.astype(np.float64), self.round) + 0.0

    def check(self):
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
    for name in ("observations", "next_observations") if env else ():
        columns[name] = as_observed(env, columns[name], args.env_id)
    first = getattr(env, "first_action", 0)
    own = None if env is None else np.arange(first, first + env.num_actions)
    return graph_of(columns, args.key_of, own)


def as_observed(env, obs, env_id):
    """Observations of data in the shape and dtype of the environment's, where no value changes."""
    if np.squeeze(obs[0]).shape == np.squeeze(env.obs).shape:
        obs = obs.reshape(len(obs), *env.obs.shape)
    elif obs.shape[1:] != env.obs.shape:  # a Discrete state that env observes as one-hot
        space = getattr(getattr(env, "env", None), "observation_space", None)
        states = obs[:, 0] if obs.shape[1:] == (1,) and hasattr(space, "n") else obs
        if space is None or not all(map(space.contains, states)):
            raise ValueError(f"Require data of {env_id}, got observations {obs.shape[1:]}")
        obs = np.stack(list(map(env.flatten, states)))
    cast = obs.astype(env.obs.dtype)
    return cast if np.array_equal(cast, obs) else obs


# --------------------------------------------------------------------------------------------------
# Reading
# --------------------------------------------------------------------------------------------------


def read_transitions(
    path: str | Path,
    flatten: Callable[[Any], NDArray[Any]] | None = None,
    leave_out: Sequence[str] = (),
) -> dict[str, NDArray[Any]]:
    """COLUMNS -> arrays [N, ...], one row a transition, in order of time.

    Args:
        path: an .npz with these arrays, or the folder of a Minari dataset (read by minari, or by
            h5py alone).
        flatten: function of an observation that is a dict or a tuple that returns an array, as the
            environment has one; without it, the numbers become one vector, those of a dict in the
            order of its names.
        leave_out: without flatten, names of parts of such observations, a/b for one that lies
            deeper. A text that is the same in all observations is left out in any case.

    Raises:
        OSError: for a file that cannot be read.
        ValueError: for a column that is missing, of another length, or of numbers that no graph
            takes: actions that are not integers, rewards that are not finite; and for a part that
            is no number, by its name.
    """
    path = Path(path)
    if path.is_dir():
        episodes = _episodes_of_minari(path)
        texts = _texts_of(episodes)
        known = dict(_parts_of(episodes[0]["observations"])) if episodes else {}
        _require_parts(leave_out, known)
        constant = [name for name, seen in texts.items() if len(seen) == 1]
        left_out = () if flatten else (*leave_out, *constant)
        parts = [_columns_of(one, flatten or _flat, left_out) for one in episodes]
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    else:
        _require_parts(leave_out, {})
        with path.open("rb") as file:
            if not zipfile.is_zipfile(file):
                raise ValueError(f"Require an .npz with {', '.join(COLUMNS)}, got another file")
        with np.load(path) as file:
            if missing := [name for name in COLUMNS if name not in file]:
                raise ValueError(f"Require an .npz with {', '.join(COLUMNS)}, got no {missing[0]}")
            columns = [file[name] for name in COLUMNS]
    obs, actions, rewards, next_obs, *ends = columns
    _require(obs.ndim and obs.dtype.kind in "biuf", "observations that are numbers", obs)
    for name, column in zip(COLUMNS, columns, strict=True):
        wanted = f"as many {name} as observations {obs.shape}, at least one"
        _require(column.shape[:1] == obs.shape[:1] != (0,), wanted, column)
    is_alike = obs.shape == next_obs.shape and obs.dtype == next_obs.dtype
    _require(is_alike, f"next_observations as {obs.dtype} {obs.shape}", next_obs)
    wanted = "actions [N] that are integers below 2**63"
    _require(actions.ndim == 1 and actions.dtype.kind in "iu", wanted, actions)
    columns[1] = actions.astype(np.int64)  # of the largest unsigned ones: below 0
    _require(actions.dtype.kind == "i" or columns[1].min() >= 0, wanted, actions)
    is_number = rewards.ndim == 1 and rewards.dtype.kind in "biuf"
    columns[2] = rewards.astype(np.float64) if is_number else rewards
    _require(is_number and np.isfinite(columns[2]).all(), "finite rewards [N]", rewards)
    for name, column in zip(COLUMNS[4:], ends, strict=True):
        holds = column.ndim == 1 and np.isin(column, (0, 1)).all()
        _require(holds, f"{name} [N] of True and False", column)
    columns[4:] = (column.astype(np.bool_) for column in ends)
    return dict(zip(COLUMNS, columns, strict=True))


def _require_parts(names, known):
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"Require parts of observations, {', '.join(known) or 'none'}: {unknown}")


def _require(holds, wanted, column, more=""):
    if not holds:
        raise ValueError(f"Require {wanted}, got {column.dtype} {column.shape}{more}")


def _episodes_of_minari(folder):
    if (folder / "config.json").is_file():
        raise ValueError("Require a Minari dataset, got the folder of a run: give its graph.npz")
    try:
        from minari import MinariDataset

        return [vars(one) for one in MinariDataset(folder / "data").iterate_episodes()]
    except ImportError:
        try:
            import h5py
        except ImportError:
            raise OSError("a Minari dataset needs pip install minari or h5py") from None
    file = h5py.File(folder / "data" / "main_data.hdf5")
    return [file[f"episode_{i}"] for i in range(len(file))]


def constant_texts(path: str | Path) -> list[str]:
    """Names of the parts of a Minari dataset's observations that are one text throughout."""
    parts = _texts_of(_episodes_of_minari(Path(path))) if Path(path).is_dir() else {}
    return [name for name, texts in parts.items() if len(texts) == 1]


def _texts_of(episodes):
    """Name -> set of texts, of each part of the observations that is text."""
    texts = {}
    for episode in episodes:
        for name, part in _parts_of(episode["observations"]):
            if _is_text(part := np.asarray(part)):
                texts.setdefault(name, set()).update(map(_text, part))
    return texts


def _is_text(array):
    return array.dtype.kind in "SUO"


def _text(value):
    return value.decode() if isinstance(value, bytes) else str(value)


def _children(tree):
    """Names and parts of a dict, a tuple, or a group of a file; None of an array."""
    if isinstance(tree, tuple):
        return list(enumerate(tree))
    if not hasattr(tree, "keys"):
        return None
    names = list(tree.keys())
    if names and all(re.fullmatch(r"_index_\d+", name) for name in names):  # a tuple in a file
        return [(i, tree[f"_index_{i}"]) for i in range(len(names))]
    return [(name, tree[name]) for name in sorted(names)]


def _parts_of(tree, at="") -> Iterator[tuple[str, Any]]:
    """Names, as `leave_out` has them, and arrays of the parts that a tree ends in."""
    children = _children(tree)
    if children is None and at:
        yield at[:-1], tree
    for name, part in children or ():
        yield from _parts_of(part, f"{at}{name}/")


def _columns_of(episode, flatten, leave_out):
    tree = _loaded(episode["observations"], leave_out)
    if isinstance(tree, dict | tuple):
        number = len(episode["rewards"]) + 1
        obs = np.stack([flatten(_at(tree, t)) for t in range(number)])
    else:
        obs = tree
    ends = (np.asarray(episode[name]) for name in COLUMNS[4:])
    return obs[:-1], np.asarray(episode["actions"]), np.asarray(episode["rewards"]), obs[1:], *ends


def _loaded(tree, leave_out, at=""):
    """The tree as dicts, tuples and arrays, without parts left out."""
    children = _children(tree)
    if children is None:
        array = np.asarray(tree)
        return np.array([_text(one) for one in array]) if _is_text(array) else array
    kept = {
        name: _loaded(part, leave_out, f"{at}{name}/")
        for name, part in children
        if f"{at}{name}" not in leave_out
    }
    return tuple(kept.values()) if children and children[0][0] == 0 else kept


def _at(tree, t):
    """The observation of a time."""
    if isinstance(tree, tuple):
        return tuple(_at(part, t) for part in tree)
    return (
        {name: _at(part, t) for name, part in tree.items()} if isinstance(tree, dict) else tree[t]
    )


def _flat(obs):
    """The numbers of an observation as one vector."""
    numbers = []
    for name, part in _parts_of(obs):
        if _is_text(part := np.asarray(part)):
            got = f"got text in {name}: leave {name} out, or give the environment"
            raise ValueError(f"Require observations that are numbers, {got}")
        numbers.append(part.reshape(-1))
    return np.concatenate(numbers)


def collect(env: Any, number: int, rng: np.random.Generator) -> dict[str, NDArray[Any]]:
    """COLUMNS -> arrays [number, ...] of random actions in a task as the scripts make theirs.

    Actions are those of the environment itself, which may begin at another number than 0.
    """
    rows, over, first = [], True, getattr(env, "first_action", 0)
    while len(rows) < number:
        obs = np.array(env.reset() if over else rows[-1][3])
        next_obs, reward, *ends = env.step(action := int(rng.integers(env.num_actions)))
        rows.append((obs, action + first, reward, np.array(next_obs), *ends))
        over = any(ends)
    return dict(zip(COLUMNS, map(np.array, zip(*rows, strict=True)), strict=True))


def graph_of(
    columns: Mapping[str, NDArray[Any]],
    keys_of: Callable[[NDArray[Any]], NDArray[Any] | None],
    own_actions: NDArray[np.int64] | None = None,
) -> tuple[TransitionGraph, NDArray[np.int64], list[NDArray[np.float64]]]:
    """The graph of transitions of `read_transitions`, cut into trajectories.

    keys_of: function of observations [N, ...] that returns the keys of their states, or None.
    own_actions: int64 [A], the data's own numbers of the graph's actions 0 to A - 1, increasing; by
        default those that are in the data.

    Returns the graph, the nodes that trajectories start in int64 [n], and the rewards of each.
    Raises ValueError for an action that is not among own_actions.
    """
    obs, actions, rewards, next_obs, terminated, truncated = (columns[name] for name in COLUMNS)
    keys, next_keys = keys_of(obs), keys_of(next_obs)
    kind = {} if keys is None else {"key_shape": keys.shape[1:], "key_dtype": keys.dtype}
    own = np.unique(actions) if own_actions is None else own_actions
    taken = np.minimum(np.searchsorted(own, actions), len(own) - 1)
    if (wrong := actions[own[taken] != actions]).size:
        raise ValueError(f"Require actions from {own[0]} to {own[-1]}, got {wrong[0]}")
    graph = TransitionGraph(len(own), obs.shape[1:], obs.dtype, **kind)
    nodes, next_nodes = graph.nodes(obs, keys), graph.nodes(next_obs, next_keys)
    graph.add(nodes, taken, rewards, next_nodes, terminated)
    cuts = np.flatnonzero((terminated | truncated)[:-1] | (nodes[1:] != next_nodes[:-1])) + 1
    return graph, nodes[np.append(0, cuts)], np.split(rewards, cuts)


def load_graph(path: str | Path) -> tuple[TransitionGraph, NDArray[np.int64], None]:
    """The graph.npz of a run as `graph_of` returns one: it starts where nothing led."""
    graph = TransitionGraph.load(path)
    edges = graph.edges()
    starts = np.setdiff1d(edges["source"], edges["next"])
    return graph, starts if len(starts) else edges["source"][:1], None


def follow(
    graph: TransitionGraph, actions: NDArray[np.int64], starts: NDArray[np.int64], steps: int
) -> tuple[float, float, float, NDArray[np.float64]]:
    """A policy's episodes, if the transitions seen were all there are.

    Args:
        graph: the TransitionGraph.
        actions: int64 [num_ids], one of each node, or -1.
        starts: node ids int64 [n], each as likely.
        steps: of an episode, at most.

    Returns:
        Mean return (not discounted), mean length, share of episodes that terminate, and expected
        visits float64 [num_ids]. An episode ends as well where the graph has no such transition.
    """
    edges = graph.edges()
    taken = actions[edges["source"]] == edges["action"]
    edges = {name: column[taken] for name, column in edges.items()}
    share = edges["count"] / np.bincount(edges["source"], edges["count"])[edges["source"]]
    mass = np.bincount(starts, minlength=graph.num_ids) / len(starts)
    totals, visits = np.zeros(3), np.zeros(graph.num_ids)
    for _ in range(steps):
        visits += mass
        flow = mass[edges["source"]] * share
        totals += flow @ edges["reward"], flow.sum(), flow @ edges["terminated"]
        mass = np.bincount(edges["next"], flow * ~edges["terminated"], minlength=graph.num_ids)
    return *totals.tolist(), visits


# --------------------------------------------------------------------------------------------------
# The task
# --------------------------------------------------------------------------------------------------


def maker_of(script, env_id, seed, rng, **flags):
    """Function that makes a task as a script's module does. flags: of the script."""
    if script == "gb_rainbow_atari":
        fail("--script gb_rainbow_atari: require one whose rewards are the task's own")
    message = "--script requires a module with Args, task_of and make_env"
    if script is None:
        module = importlib.import_module("examples.gb_dqn_gymnasium")
    else:
        module = import_module(script, message)
    if not all(hasattr(module, name) for name in ("Args", "task_of", "make_env")):
        fail(message)
    for name in flags:
        if not hasattr(module.Args, name):
            fail(f"--{name.replace('_', '-')} is no flag of {module.__name__}")
    args = module.Args(seed=seed, **flags)
    return functools.partial(module.make_env, args, module.task_of(env_id), rng)


# --------------------------------------------------------------------------------------------------
# Main
# --------------------------------------------------------------------------------------------------


@one_line_errors
def main():
    args = tyro.cli(Args, description=__doc__)
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
        make = maker_of(args.script, args.env_id, args.seed, rng, **own)
        env = make()
        env.reset()
    try:
        if args.collect:
            np.savez_compressed(args.data, **collect(env, args.collect, rng))
        graph, starts, parts = read(args, env, left_out)
        values, actions, counts = solve(graph, args.gamma)
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
    mean, length, ends, visits = follow(graph, actions, starts, args.max_steps)
    print(f"stitched, by the data: {say(mean, length, values[starts].mean())}; {ends:.0%} end")
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
