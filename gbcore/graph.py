"""TransitionGraph: the replay data as a graph of states and counted transitions."""

import math
import operator
import os
import sys
import threading
import zipfile
from collections.abc import Iterable, Mapping
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from gbcore.arrays import as_indices, copy_rows, grown, is_many
from gbcore.interner import Interner, slots_for
from gbcore.invariants import problems_of
from gbcore.kernels import edges, expand, hashing
from gbcore.kernels.edges import FREED, MAX_TRANSITIONS, GraphArrays
from gbcore.kernels.hashing import EMPTY
from gbcore.subgraph import Subgraphs

FORMAT_VERSION = 4
MAX_DEPTH = 2**16  # of an expansion
MAX_LISTED = 2**28  # rows of a batch of subgraphs, 20 GB: before the system ends the process
COLUMNS = ("node", "action", "reward", "next_node", "terminated")
KIND = ("num_actions", "obs_shape", "obs_dtype", "key_shape", "key_dtype", "frame_stack")
# The arrays that grow, and their values where nothing was written.
NODE_ARRAYS = {
    "block_start": EMPTY, "block_log2": EMPTY, "degree": 0, "in_degree": FREED, "in_first": EMPTY,
    "pair_count": 0,
}  # fmt: skip
EDGE_ARRAYS = dict.fromkeys(
    ("edge_source", "edge_action", "edge_next", "edge_reward", "edge_terminated", "edge_count",
     "in_next", "in_before"), 0
)  # fmt: skip


class TransitionGraph:
    """All transitions seen, T = (s, a, r, done, s'), with a count f(T) each.

    Nodes are observations, matched by their bytes: -0.0 is another state than 0.0. Edges are
    distinct transitions; those of a node lie together in one block of the edge arrays (dynamic CSR,
    drawn in `kernels/edges.py`). Adding, removing and finding a transition cost O(1), whatever the
    number of nodes and outcomes.

    A node is freed, and its id given out again, when `remove` takes away the last edge that names
    it. So an id is safe until the next `remove`: intern, then add, then remove.

    One or many: `node` and `find` take one observation, `nodes` takes [n]. Methods of ids (`add`,
    `remove`, `expand`) take one or [n]: integers, lists and arrays.

    Threads wait for each other: every method holds `lock`, an RLock, and so does every method of a
    `Replay`. All else that is made with the graph takes one thread at a time. Several calls that
    belong together, as `node` and `add`, or a sample and its subgraphs, are safe from another
    thread's `remove` within `with graph.lock:`.

    `copy.deepcopy` and pickle give a graph of its own. An object that was made with a graph is
    copied with its graph, too; copied together, both still belong together.

    Args:
        num_actions: A, the number of discrete actions.
        obs_shape: shape of an observation.
        obs_dtype: its dtype.
        frame_stack: the first axis of an observation is a stack of frames that observations share
            (Atari). Each distinct frame is then stored once, and a node names its frames.
        capacity: nodes to reserve room for; more than that is possible, and costs a copy.
        key_shape: shape of the keys. By default a state's key is its observation. With keys of
            their own, observations of equal keys are one node, and equal observations of other keys
            are two: a key may be coarser (rounded numbers) or finer (with the last action). The
            node keeps its first observation, which the network values. Keys are compared by their
            bytes, too: round to integers, since -0.0 is not 0.0.
        key_dtype: dtype of the keys.

    Raises ValueError for fewer than one action, or an observation or key without bytes.
    """

    def __init__(
        self,
        num_actions: SupportsIndex,
        obs_shape: Iterable[SupportsIndex],
        obs_dtype: DTypeLike = np.uint8,
        frame_stack: bool = False,
        capacity: int = 1024,
        key_shape: Iterable[SupportsIndex] | None = None,
        key_dtype: DTypeLike = np.uint8,
    ) -> None:
        self.num_actions: int = operator.index(num_actions)
        self.frame_stack: bool = bool(frame_stack)
        self.obs_shape: tuple[int, ...] = tuple(map(operator.index, obs_shape))
        self.obs_dtype: np.dtype[Any] = np.dtype(obs_dtype)
        self.key_shape: tuple[int, ...] | None = None
        self.key_dtype: np.dtype[Any] | None = None
        self.lock: threading.RLock = threading.RLock()
        if self.num_actions < 1:
            raise ValueError(f"Require num_actions >= 1, got {num_actions}")
        for dtype in map(np.dtype, (obs_dtype, key_dtype)):
            if np.dtype(dtype.str) != dtype or dtype.char in "gG":
                # A saved graph could not tell; of long doubles some bytes are unset.
                raise ValueError(f"Require plain dtypes, got {dtype}; view it as np.uint8")
        self.frames: Interner | None = None  # with frame_stack
        self._contents: NDArray[Any] | None = None
        content = self.obs_shape, self.obs_dtype  # of a node; with frames, their ids
        if frame_stack:
            if len(self.obs_shape) < 2:
                raise ValueError(f"Require a stack of frames, got obs_shape {self.obs_shape}")
            self.frames = Interner(self.obs_shape[1:], self.obs_dtype, capacity)
            self._frame_uses = np.zeros(self.frames.capacity, np.int32)
            content = self.obs_shape[:1], np.dtype(np.int32)
        if key_shape is None:  # the content is the key
            self._keys = Interner(*content, capacity)
        else:
            self.key_shape = tuple(map(operator.index, key_shape))
            self.key_dtype = np.dtype(key_dtype)
            self._keys = Interner(self.key_shape, self.key_dtype, capacity)
            self._contents = np.zeros((0, *content[0]), content[1])
        dtypes = {
            "block_log2": np.int8, "edge_action": np.int8 if self.num_actions < 128 else np.int32,
            "edge_reward": np.float64, "edge_terminated": np.bool_, "edge_slots": np.int64,
        }  # fmt: skip
        empty = {name: np.zeros(0, dtypes.get(name, np.int32)) for name in GraphArrays._fields}
        self._arrays = GraphArrays(**empty)._replace(
            pair_count=np.zeros((0, self.num_actions), np.int32),
            free_blocks=np.full(32, EMPTY, np.int32),
            totals=np.zeros(6, np.int64),
        )
        self._freed = np.empty(2, np.int64)
        self._make_room()
        self._resize_edges(self._keys.capacity)

    def __repr__(self) -> str:
        return (
            f"TransitionGraph({self.num_nodes:,} nodes, {self.num_edges:,} edges, "
            f"{self.num_transitions:,} transitions; {self.num_actions} actions, "
            f"observations {self.obs_dtype} {self.obs_shape})"
        )

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, lock=threading.RLock())

    # --- Size ---

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self._keys)

    @property
    def num_ids(self) -> int:
        """Number of node ids ever given out: num_nodes, and the freed ones."""
        return self._keys.num_ids

    @property
    def capacity(self) -> int:
        """Ids that there is room for: the length of arrays by id, until the graph doubles it."""
        return len(self._arrays.degree)

    @property
    def generations(self) -> NDArray[np.int32]:
        """How often each id was freed: int32 [num_ids], a view, to be read only.

        Ids are given out again; an id and its generation together name one state for ever. Keep the
        generation with whatever is cached by id. `load` and `restore` start from 0.
        """
        return self._keys.generations

    @property
    def num_edges(self) -> int:
        """Number of distinct transitions."""
        return int(self._arrays.totals[edges.TOTAL_EDGES])

    @property
    def num_transitions(self) -> int:
        """Number of transitions, each counted as often as it was seen: the sum of f(T)."""
        return int(self._arrays.totals[edges.TOTAL_TRANSITIONS])

    @property
    def novel_state_ratio(self) -> float:
        """Distinct states acted in / transitions: 1 without crossovers (paper, Analysis)."""
        return int(self._arrays.totals[edges.TOTAL_SOURCES]) / max(self.num_transitions, 1)

    @property
    def arrays(self) -> GraphArrays:
        """The GraphArrays, as kernels read them; void after the next `node` or `add`."""
        return self._arrays

    # --- Nodes ---

    def node(self, obs: ArrayLike, key: ArrayLike | None = None) -> int:
        """Id of an observation, inserted if new; with key_shape, of its key.

        Raises ValueError for another shape or dtype than the graph's, and for a key that is missing
        or not asked for.
        """
        return int(self._nodes_of(*self._check_obs(obs, key))[0])

    def nodes(self, obs: ArrayLike, keys: ArrayLike | None = None) -> NDArray[np.int64]:
        """As `node`, of many observations in order: int64 [n] of obs [n, *obs_shape].

        keys: [n, *key_shape], with key_shape.
        """
        return self._nodes_of(*self._check_obs(obs, keys, many=True))

    def _nodes_of(self, obs, keys):
        with self.lock:
            if self.frames is not None and self.key_shape is None:
                keys = self._frame_ids(self.frames.add, obs)
            nodes = self._keys.add(keys)
            rows = np.flatnonzero(self._make_room().in_degree[nodes] == FREED)
            if len(rows):
                if len(rows) > 1:
                    rows = rows[np.sort(np.unique(nodes[rows], return_index=True)[1])]
                new, contents = nodes[rows], obs[rows]
                edges.enter_nodes(self._arrays, new)
                if self._contents is not None:
                    if self.frames is not None:
                        contents = self._frame_ids(self.frames.add, contents)
                    self._contents[new] = contents
                if self.frames is not None:
                    self._frame_uses = grown(self._frame_uses, self.frames.capacity)
                    np.add.at(self._frame_uses, self._contents_of(new), 1)
            return nodes

    def _frame_ids(self, ids_of, obs):
        ids = ids_of(obs.reshape(-1, *self.obs_shape[1:]))
        return ids.reshape(len(obs), self.obs_shape[0]).astype(np.int32)

    def find(self, obs: ArrayLike, key: ArrayLike | None = None) -> int:
        """Id of an observation, or with key_shape of its key; or -1. Raises as `node`."""
        return int(self._find(*self._check_obs(obs, key))[0])

    def find_all(self, obs: ArrayLike, keys: ArrayLike | None = None) -> NDArray[np.int64]:
        """As `find`, of many observations: int64 [n] of obs [n, *obs_shape]."""
        return self._find(*self._check_obs(obs, keys, many=True))

    def _find(self, obs, keys):
        with self.lock:
            if self.frames is not None and self.key_shape is None:
                keys = self._frame_ids(self.frames.find, obs)  # -1 is in no key
            return self._keys.find(keys)

    @property
    def observations(self) -> NDArray[Any]:
        """Observations by node id: [num_ids, *obs_shape], to be read only.

        Rows of freed ids mean nothing; while no node was freed, num_ids is num_nodes.
        """
        observations = self.observations_of(np.arange(self.num_ids))
        observations.flags.writeable = False
        return observations

    def observations_of(self, nodes: ArrayLike) -> NDArray[Any]:
        """Observations of some nodes: [*nodes.shape, *obs_shape]; of a freed id it means nothing.

        Stacks of 4 byte frames lie in memory as convolutions want them: [..., H, W, 4], the order
        that torch calls channels_last. Raises KeyError for an id that no node ever had.
        """
        with self.lock:
            contents = self._contents_of(nodes)
            if self.frames is None:
                return contents
            stacks = self.frames.take(contents)
        if self.obs_dtype.itemsize > 1 or self.obs_shape[0] != 4 or sys.byteorder == "big":
            return stacks
        # As words this takes a tenth of the time of moving byte by byte.
        stacks = stacks.view(np.uint8).reshape(-1, 4, math.prod(self.obs_shape[1:]))
        words = np.empty((len(stacks), stacks.shape[2]), np.uint32)
        hashing.join_bytes(stacks, words)
        stacks = words.view(self.obs_dtype).reshape(*np.shape(nodes), *self.obs_shape[1:], 4)
        return np.moveaxis(stacks, -1, np.ndim(nodes))

    def frame_ids_of(self, nodes: ArrayLike) -> NDArray[np.int64]:
        """int64 [n, stack]: ids in `frames` of those of node ids int64 [n], with frame_stack."""
        return self._contents_of(nodes).astype(np.int64)

    def _contents_of(self, nodes):
        if self._contents is None:
            return self._keys.take(nodes)
        self._keys.require_ids(np.asarray(nodes))
        return self._contents.take(nodes, axis=0)  # never a view

    def _check_obs(self, obs, key, many=False):
        """Observations and keys, of one or many, as arrays [n, ...]; without keys both the same."""
        obs = _checked("observations", obs, self.obs_shape, self.obs_dtype, many)
        if self.key_shape is None:
            if key is not None:
                raise ValueError("Require no key, as the graph was made without key_shape")
            return obs, obs
        if key is None:
            raise ValueError(f"Require a key of shape {self.key_shape}, got none")
        key = _checked("keys", key, self.key_shape, self.key_dtype, many)
        if len(key) != len(obs):
            raise ValueError(f"Require a key of each observation, got {len(key)} of {len(obs)}")
        return obs, key

    def require_node(self, node: SupportsIndex) -> None:
        """Raises KeyError unless it is the id of a node, TypeError unless it is an integer."""
        in_degree = self._arrays.in_degree
        if not (0 <= operator.index(node) < len(in_degree) and in_degree[node] != FREED):
            raise KeyError(f"Require the id of a node, got {node}")

    def require_nodes(self, nodes: NDArray[np.int64]) -> None:
        """As `require_node`, for each of int64 [n]."""
        row = edges.find_no_node(self._arrays.in_degree, nodes)
        if row < len(nodes):
            freed = ", which was freed" if 0 <= nodes[row] < self.num_ids else ""
            raise KeyError(f"Require ids of nodes, got {nodes[row]}{freed}")

    # --- Edges ---

    def add(
        self,
        node: ArrayLike,
        action: ArrayLike,
        reward: ArrayLike,
        next_node: ArrayLike,
        terminated: ArrayLike,
    ) -> None:
        """One more observation of a transition, or of many: then every argument is [n].

        Args:
            node, next_node: ids that `node` or `nodes` returned.
            action: 0 .. num_actions - 1.
            reward: a finite training reward, kept as float64: `remove` needs the same one, which
                the 0.1 of a float32 array is not.
            terminated: the MDP ended here. A time limit is no termination.

        Raises KeyError for an id that names no node, ValueError for another action, a reward that
        is not finite, or arrays of different length. The first row that is wrong is named, and
        nothing has changed.
        """
        with self.lock:
            check = self._check_transitions if (many := is_many(node)) else self._check_transition
            row = check(node, action, reward, next_node, terminated)
            number, done = len(row[0]) if many else 1, 0
            if self.num_transitions + number > MAX_TRANSITIONS:
                raise MemoryError(f"Require at most {MAX_TRANSITIONS:,} transitions")
            while done < number:
                if many:
                    done = edges.add_transitions(self._arrays, done, *row)
                else:
                    done = int(edges.add_transition(self._arrays, *row))
                if done < number:
                    self._resize_edges(2 * len(self._arrays.edge_next))

    def remove(
        self,
        node: ArrayLike,
        action: ArrayLike,
        reward: ArrayLike,
        next_node: ArrayLike,
        terminated: ArrayLike,
    ) -> list[int]:
        """One observation fewer of a transition, or of many: then every argument is [n].

        Returns the ids of the nodes that this freed, at most two for each transition. Raises as
        `add`, and KeyError if there is no such transition.
        """
        with self.lock:
            if is_many(node):
                columns = self._check_transitions(node, action, reward, next_node, terminated)
                row = edges.find_absent_transition(self._arrays, *columns)
                if row < len(columns[0]):
                    raise KeyError(f"Row {row}: {_absent([column[row] for column in columns])}")
                freed = edges.remove_transitions(self._arrays, self._keys.table, *columns).tolist()
            else:
                transition = self._check_transition(node, action, reward, next_node, terminated)
                num_freed = edges.remove_transition(
                    self._arrays, self._keys.table, *transition, self._freed
                )
                if num_freed < 0:
                    raise KeyError(_absent((node, action, reward, next_node, terminated)))
                freed = self._freed[:num_freed].tolist()
            if self.frames is not None and freed:
                frames = self._contents_of(np.array(freed)).reshape(-1)
                hashing.release_keys(self.frames.table, self._frame_uses, frames)
            return freed

    @property
    def num_logged(self) -> int:
        """How often a node came or its transitions changed: where `changed` goes on from."""
        return int(self._arrays.totals[edges.TOTAL_LOGGED])

    def changed(self, since: int, came: bool = False) -> NDArray[np.int64]:
        """Nodes that came, or whose transitions changed, since num_logged was that: int64 [n].

        The newest comes first, each once; freed ones are left out. With `came`, only nodes that
        came. Since -1, or since a time too long ago, all nodes: the graph remembers as many changes
        as it has room for nodes.
        """
        with self.lock:
            in_degree = self._arrays.in_degree
            if since < self._first_logged():
                return np.flatnonzero(in_degree[: self.num_ids] != FREED)[::-1].copy()
            entries = self._logged(since)[::-1]
            entries = entries[entries < 0] if came else entries
            nodes = np.maximum(entries, ~entries)
            nodes = nodes[in_degree[nodes] != FREED]
            return np.array(list(dict.fromkeys(nodes.tolist())), np.int64)

    def _check_transition(self, node, action, reward, next_node, terminated):
        node, next_node = operator.index(node), operator.index(next_node)
        action, reward = operator.index(action), float(reward)
        self.require_node(node)
        self.require_node(next_node)
        if not 0 <= action < self.num_actions:
            raise ValueError(f"Require 0 <= action < {self.num_actions}, got {action}")
        if not math.isfinite(reward):
            raise ValueError(f"Require a finite reward, got {reward}")
        if terminated not in (0, 1):
            raise ValueError(f"Require terminated to be True or False, got {terminated}")
        return node, action, reward + 0.0, next_node, bool(terminated)  # -0.0 becomes 0.0

    def _check_transitions(self, node, action, reward, next_node, terminated):
        """The arguments of `add` as arrays [n]."""
        node, action = as_indices("node", node), as_indices("action", action)
        next_node = as_indices("next_node", next_node)
        reward, ends = np.asarray(reward, np.float64) + 0.0, np.asarray(terminated).astype(np.bool_)
        checked = node, action, reward, next_node, ends
        for name, column in zip(COLUMNS, checked, strict=True):
            if column.shape != node.shape:
                raise ValueError(f"Require {name} of shape {node.shape}, got {column.shape}")
        wrong = np.flatnonzero(~np.isfinite(reward) | (ends != terminated))
        rows = [edges.find_no_node(self._arrays.in_degree, ids) for ids in (node, next_node)]
        row = min(*rows, edges.find_beyond(action, self.num_actions), *wrong[:1])
        if row < len(node):
            try:
                self._check_transition(*(column[row] for column in (*checked[:4], terminated)))
            except (KeyError, ValueError) as error:
                raise type(error)(f"Row {row}: {error.args[0]}") from None
        return checked

    def edges(self) -> dict[str, NDArray[Any]]:
        """All distinct transitions: a dict of arrays [num_edges].

        source, action, next and count are int64, reward float64, terminated bool.
        """
        with self.lock:
            arrays, position = self._arrays, self._positions()
            names = ("source", "action", "reward", "terminated", "next", "count")
            columns = {name: getattr(arrays, f"edge_{name}")[position] for name in names}
            return {n: c.astype(np.int64) if c.dtype.kind == "i" else c for n, c in columns.items()}

    def _positions(self):
        """The places of all edges, node by node: int64 [num_edges]."""
        degree = self._arrays.degree[: self.num_ids].astype(np.int64)
        first = self._arrays.block_start[: self.num_ids] - (np.cumsum(degree) - degree)
        return np.arange(degree.sum()) + np.repeat(first, degree)

    # --- Expansion ---

    def expand(
        self,
        nodes: ArrayLike,
        actions: ArrayLike,
        depth: SupportsIndex,
        breadth: SupportsIndex = 0,
        rng: np.random.Generator | None = None,
    ) -> Subgraphs:
        """Subgraphs for the nested targets of a batch of pairs: paper, Algorithm 1.

        Level 0 is the root pair with all its outcomes. Each further level goes on from the distinct
        states that the level above led to, and follows at most `breadth` of their transitions for
        each root: where there are more, `breadth` are sampled without replacement in proportion to
        f(T). A pair with a sampled transition still averages over all its outcomes; those not
        sampled are leaves. A pair of which no transition was sampled is a leaf itself. With
        breadth 0 nothing is sampled, and the roots share their levels.

        Args:
            nodes: int [B] or one, root states.
            actions: int [B] or one, root actions. A pair never seen is backed up by its leaf value.
            depth: levels of transitions, 1 .. MAX_DEPTH (2**16): the number of nested backups.
            breadth: bound on the transitions followed per level and root; 0 for none.
            rng: np.random.Generator, needed if breadth > 0; one draw is taken from it.

        Raises ValueError for a depth, breadth or action out of range, a missing rng, or shapes that
        differ; KeyError for a root that is no node; MemoryError for subgraphs of more than 2**28
        outcomes or pairs.
        """
        depth, breadth = operator.index(depth), operator.index(breadth)
        if not 1 <= depth <= MAX_DEPTH:
            raise ValueError(f"Require 1 <= depth <= {MAX_DEPTH}, got {depth}")
        if breadth < 0:
            raise ValueError(f"Require breadth >= 0 (0 = no limit), got {breadth}")
        if breadth > 0 and not isinstance(rng, np.random.Generator):
            raise ValueError(f"Require rng, a np.random.Generator, for breadth {breadth}")
        with self.lock:
            pairs = self._check_pairs(nodes, actions)
            seed = np.uint64(rng.bit_generator.random_raw() if breadth > 0 else 0)
            return expand.expand_roots(
                self._arrays, *pairs, depth, min(breadth, MAX_TRANSITIONS), seed, self._row_of,
                self._room, MAX_LISTED,
            )  # fmt: skip

    def _check_pairs(self, nodes, actions):
        """Nodes and actions, one or many, as int64 [n] each. Raises as `expand`."""
        nodes = as_indices("nodes", nodes if is_many(nodes) else [nodes])
        actions = as_indices("actions", actions if is_many(actions) else [actions])
        if nodes.shape != actions.shape:
            raise ValueError(f"Require an action per node, got {actions.shape} for {nodes.shape}")
        self.require_nodes(nodes)
        row = edges.find_beyond(actions, self.num_actions)
        if row < len(actions):
            raise ValueError(f"Require 0 <= action < {self.num_actions}, got {actions[row]}")
        return nodes, actions

    # --- Storage ---

    # A method that makes arrays longer returns them: the old ones may be too short, and kernels do
    # not look at lengths.

    def _make_room(self):
        """The arrays, with room for every id."""
        capacity = self._keys.capacity
        if capacity > len(self._arrays.degree):
            self._row_of, self._room = np.zeros(capacity, np.int32), np.full(1, 256)  # of `expand`
            if self._contents is not None:
                self._contents = grown(self._contents, capacity)
            entries = self._logged(self._first_logged())
            self._grow(NODE_ARRAYS, capacity, log=np.zeros(slots_for(capacity) // 2, np.int32))
            self._enter_log(entries)
        return self._arrays

    def _grow(self, fills, length, **others):
        """Make arrays longer, new rows filled with the value by name, and put others in place."""
        longer = {n: grown(getattr(self._arrays, n), length, fill) for n, fill in fills.items()}
        self._arrays = self._arrays._replace(**longer, **others)

    def _first_logged(self):
        """The place of the oldest entry of the log that is there."""
        forgotten = int(self._arrays.totals[edges.TOTAL_FORGOTTEN])
        return max(forgotten, self.num_logged - len(self._arrays.log))

    def _logged(self, first):
        """The entries of the log from a place on."""
        log = self._arrays.log
        return log[np.arange(first, self.num_logged) & (len(log) - 1)]

    def _enter_log(self, entries):
        totals, log = self._arrays.totals, self._arrays.log
        entries = entries[max(len(entries) - len(log), 0) :]
        first = totals[edges.TOTAL_FORGOTTEN] = totals[edges.TOTAL_LOGGED] - len(entries)
        log[np.arange(first, totals[edges.TOTAL_LOGGED]) & (len(log) - 1)] = entries

    def _resize_edges(self, room):
        """Have room for so many edges, and enter them all into hash slots."""
        used = self._arrays.totals[edges.TOTAL_USED]
        cut = {name: getattr(self._arrays, name)[:used] for name in EDGE_ARRAYS}
        self._arrays = self._arrays._replace(**cut)
        self._grow(EDGE_ARRAYS, room, edge_slots=np.full(slots_for(room), EMPTY, np.int64))
        edges.rebuild_edge_slots(self._arrays, self.num_ids)

    def save(self, path: str | os.PathLike[str], compress: bool = True) -> None:
        """Write the graph to a .npz file, ids and order of edges included.

        NumPy adds the ending .npz to a name without it.
        """
        with self.lock:
            (np.savez_compressed if compress else np.savez)(path, **self.state())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "TransitionGraph":
        """A graph that `save` wrote: same ids, same edges, same further behaviour.

        No code in the file is run, and its arrays are compared with their checksums. `check_valid`
        tells whether they fit together. Raises OSError for a file that cannot be read, ValueError
        for one of another format version, or one that is cut short or damaged.
        """
        try:
            with open(path, "rb") as file:
                if not zipfile.is_zipfile(file):
                    raise ValueError("it is no .npz")
            with np.load(path, allow_pickle=False) as file:
                return cls.from_state(dict(file))
        except (OSError, MemoryError):
            raise
        except Exception as error:  # zipfile and NumPy promise no single one
            raise ValueError(f"Require an undamaged graph, got {path}: {error}") from error

    def state(self) -> dict[str, NDArray[Any]]:
        """Arrays by name, which `from_state` and `restore` take back; views where they can be."""
        saved = {
            "format_version": np.array(FORMAT_VERSION),
            "num_actions": np.array(self.num_actions),
            "obs_shape": np.array(self.obs_shape, np.int64),
            "obs_dtype": np.array(self.obs_dtype.str),
            "edge_room": np.array(len(self._arrays.edge_next)),  # decides whether a block shrinks
            "log": self._logged(self._first_logged()),
        }
        if self.key_shape is not None and self.key_dtype is not None:
            saved["key_shape"] = np.array(self.key_shape, np.int64)
            saved["key_dtype"] = np.array(self.key_dtype.str)
        columns = self._columns(int(self._arrays.totals[edges.TOTAL_USED]))
        saved |= {name: array[:rows] for name, (array, rows) in columns.items()}
        saved |= self._keys.state("keys_")
        if self.frames is not None:
            saved |= self.frames.state("frames_")
        saved["totals"] = self._arrays.totals.copy()
        saved["totals"][edges.TOTAL_FORGOTTEN] = self.num_logged - len(saved["log"])
        return saved

    def _columns(self, used):
        """The arrays to save, by name, each with its number of rows; `used`: of edges."""
        arrays = self._arrays
        rows = dict.fromkeys(NODE_ARRAYS, self.num_ids) | dict.fromkeys(EDGE_ARRAYS, used)
        rows |= {name: len(getattr(arrays, name)) for name in ("free_blocks", "totals")}
        columns = {name: (getattr(arrays, name), number) for name, number in rows.items()}
        if self._contents is not None:
            columns["contents"] = self._contents, self.num_ids
        if self.frames is not None:
            columns["frame_uses"] = self._frame_uses, self.frames.num_ids
        return columns

    def restore(self, saved: Mapping[str, NDArray[Any]]) -> None:
        """Become the graph that `state` described; room for nodes never shrinks.

        Ids may name other states than before: tables by id, as a `LeafTable` or a
        `FrontierPlanner`, have to be restored after. Raises as `from_state`, and ValueError for a
        graph of other actions, observations or keys; then nothing has changed.
        """
        graph = self.from_state(saved, self._keys.capacity)
        for name in KIND:
            wanted, found = getattr(self, name), getattr(graph, name)
            if wanted != found:
                raise ValueError(f"Require a graph whose {name} is {wanted}, got {found}")
        with self.lock:
            del graph.lock
            self.__dict__.update(vars(graph))

    @classmethod
    def from_state(
        cls, saved: Mapping[str, NDArray[Any]], capacity: int = 1024
    ) -> "TransitionGraph":
        """The graph that `state` is of: same ids, same edges, same further behaviour.

        Raises KeyError for a missing array, ValueError for another format version, or arrays of
        another size or dtype.
        """
        if not np.array_equal(version := saved["format_version"], FORMAT_VERSION):
            raise ValueError(f"Require format {FORMAT_VERSION}, got {version}")
        keys = [saved["key_shape"], str(saved["key_dtype"])] if "key_shape" in saved else []
        graph = cls(
            int(saved["num_actions"]), saved["obs_shape"], str(saved["obs_dtype"]),
            "frame_uses" in saved, max(capacity, len(saved["degree"])), *keys,
        )  # fmt: skip
        graph._keys.restore("keys_", saved)
        if graph.frames is not None:
            graph.frames.restore("frames_", saved)
            graph._frame_uses = grown(graph._frame_uses, graph.frames.capacity)
        room = int(saved["edge_room"])
        graph._grow(EDGE_ARRAYS, room)
        for name, (array, rows) in graph._columns(len(saved["edge_next"])).items():
            copy_rows(name, saved, array, rows)
        graph._enter_log(saved["log"])
        graph._resize_edges(room)
        return graph

    def check_valid(self) -> list[str]:
        """A sentence for each broken invariant; none for a whole graph."""
        with self.lock:
            return problems_of(self)


def _checked(name, values, shape, dtype, many):
    values = np.asarray(values)
    rows = values if many else values[None]
    if rows.dtype != dtype or rows.ndim != 1 + len(shape) or rows.shape[1:] != shape:
        wanted = str(("n", *shape)).replace("'", "") if many else shape
        raise ValueError(
            f"Require {name} of shape {wanted} and dtype {dtype}, "
            f"got shape {values.shape} and dtype {values.dtype}"
        )
    return rows


def _absent(transition):
    names = "node {}, action {}, reward {}, next {}, terminated {}"
    return f"Require a transition of the graph, got ({names.format(*transition)})"
