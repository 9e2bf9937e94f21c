"""Logged transitions: read, solved and followed without a network. Only tried actions count."""

import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gbcore.graph import TransitionGraph
from gbcore.kernels.hashing import EMPTY
from gbcore.values import find_tried

COLUMNS = (
    "observations", "actions", "rewards", "next_observations", "terminations", "truncations",
)  # fmt: skip


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
        OSError: for what cannot be read.
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
        constant = [name for name, found in texts.items() if len(found) == 1]
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
    found = _texts_of(_episodes_of_minari(Path(path))) if Path(path).is_dir() else {}
    return [name for name, texts in found.items() if len(texts) == 1]


def _texts_of(episodes):
    """Name -> set of texts, of each part of the observations that is text."""
    found = {}
    for episode in episodes:
        for name, part in _parts_of(episode["observations"]):
            if _is_text(part := np.asarray(part)):
                found.setdefault(name, set()).update(map(_text, part))
    return found


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
    """The tree as dicts, tuples and arrays, without what is left out."""
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
    found = []
    for name, part in _parts_of(obs):
        if _is_text(part := np.asarray(part)):
            told = f"got text in {name}: leave {name} out, or give the environment"
            raise ValueError(f"Require observations that are numbers, {told}")
        found.append(part.reshape(-1))
    return np.concatenate(found)


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
    """The graph of what `read_transitions` returned, cut into trajectories.

    keys_of: function of observations [N, ...] that returns the keys of their states, or None.
    own_actions: int64 [A], what the data calls the graph's actions 0 to A - 1, increasing; by
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


def solve_tried(
    graph: TransitionGraph, gamma: float
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """Values and best actions where only tried actions count, exact but for rounding.

    With c(s, a) the count of a pair and f(T) those of its transitions:

        Q(s, a) = sum_T f(T) (r + gamma (1 - done) V(s')) / c(s, a)
        V(s)    = max of Q(s, a) over the tried actions; where there are none,
                  the least that the rewards seen allow: min(r, 0) / (1 - gamma)

    Args:
        graph: the TransitionGraph, with at least one transition.
        gamma: the discount, in [0, 1).

    Returns:
        V float64 [num_ids]; the best action of each node int64 [num_ids], -1 where there is none;
        how often that was tried int64 [num_ids]. Rows of freed ids mean nothing.

    Raises:
        ValueError: for a discount out of range or a graph without transitions.
    """
    if not 0 <= gamma < 1:
        raise ValueError(f"Require 0 <= gamma < 1, got {gamma}")
    edges = graph.edges()
    if not len(edges["source"]):
        raise ValueError("Require a graph with transitions, got none")
    n = graph.num_ids
    least = max(float(edges["reward"].min(initial=0.0)) / (1 - gamma), -1e300)
    values, choice = np.full(n, least), np.full(n, EMPTY, np.int32)
    unread = np.zeros((n, graph.num_actions), np.float32)  # a network's guesses
    actions = find_tried(graph, unread, gamma, 0.0, values, choice)
    counts = np.where(actions < 0, 0, graph.arrays.pair_count[np.arange(n), actions])
    return values, actions, counts


def follow(
    graph: TransitionGraph, actions: NDArray[np.int64], starts: NDArray[np.int64], steps: int
) -> tuple[float, float, float, NDArray[np.float64]]:
    """What a policy's episodes would be if the transitions seen were all there are.

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
    found, visits = np.zeros(3), np.zeros(graph.num_ids)
    for _ in range(steps):
        visits += mass
        flow = mass[edges["source"]] * share
        found += flow @ edges["reward"], flow.sum(), flow @ edges["terminated"]
        mass = np.bincount(edges["next"], flow * ~edges["terminated"], minlength=graph.num_ids)
    return *found.tolist(), visits
