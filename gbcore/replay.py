"""Replay: a ring of transitions that feeds the graph, sampled uniformly or by priority."""

import operator
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gbcore.arrays import as_indices, check_array, copy_rows
from gbcore.graph import MAX_DEPTH, TransitionGraph
from gbcore.kernels import expand, sums
from gbcore.subgraph import Subgraphs


class Batch(NamedTuple):
    """Rows that were drawn from a replay."""

    rows: NDArray[np.int64]  # [B], rows of the replay
    nodes: NDArray[np.int64]  # [B], their states
    actions: NDArray[np.int64]  # [B]
    weights: NDArray[np.float32] | None = None  # [B], importance-sampling weights


class Replay:
    """The last `capacity` transitions. The graph holds the same ones, and forgets with the ring.

    Rows are in time order, `position` is where the next one goes:

        node, next_node int64 | action int64 | reward float64 | terminated bool
        cut bool: the row after it does not continue it; always true of the newest row
        obs: the observations of `node`, kept only where the graph has a key of its own, since
             several observations are then one state, and the network trains on those met

    Threads wait for each other, as those of the graph. A batch is of the rows that were there: hold
    `graph.lock` from `sample` to `subgraphs` where another thread adds.
    """

    COLUMNS: tuple[str, ...] = ("node", "action", "reward", "next_node", "terminated", "cut")

    def __init__(self, graph: TransitionGraph, capacity: SupportsIndex) -> None:
        self.graph: TransitionGraph = graph
        self.capacity: int = operator.index(capacity)
        if self.capacity < 1:
            raise ValueError(f"Require capacity >= 1, got {capacity}")
        self.node: NDArray[np.int64] = np.zeros(self.capacity, np.int64)
        self.action: NDArray[np.int64] = np.zeros(self.capacity, np.int64)
        self.reward: NDArray[np.float64] = np.zeros(self.capacity, np.float64)
        self.next_node: NDArray[np.int64] = np.zeros(self.capacity, np.int64)
        self.terminated: NDArray[np.bool_] = np.zeros(self.capacity, np.bool_)
        self.cut: NDArray[np.bool_] = np.ones(self.capacity, np.bool_)
        self.obs: NDArray[Any] | None = None
        if graph.key_shape is not None:
            self.obs = np.zeros((self.capacity, *graph.obs_shape), graph.obs_dtype)
        self.size: int = 0
        self.position: int = 0
        self._ended = True  # the newest row was an episode's last

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.size:,} of {self.capacity:,} transitions)"

    def record(
        self,
        obs: ArrayLike,
        action: SupportsIndex,
        reward: float,
        next_obs: ArrayLike,
        terminated: bool,
        truncated: bool = False,
        key: ArrayLike | None = None,
        next_key: ArrayLike | None = None,
    ) -> None:
        """Append the transition between two observations, for those who need no ids.

        A step that is terminated or truncated ends the episode. `key` and `next_key` are those of
        the observations, where the graph has keys. Raises as `TransitionGraph.node` and `add`.
        """
        with self.graph.lock:
            node = self.graph.node(obs, key)
            next_node = self.graph.node(next_obs, next_key)
            self.add(node, action, reward, next_node, terminated, obs)
            if terminated or truncated:
                self.end_episode()

    def add(
        self,
        node: SupportsIndex,
        action: SupportsIndex,
        reward: float,
        next_node: SupportsIndex,
        terminated: bool,
        obs: ArrayLike | None = None,
    ) -> None:
        """Append a transition, to the graph as well. The oldest one leaves both when it is full.

        Ids that are then in no transition may be freed, and given to another state. With several
        environments, ask `graph.node` for both states right before; their rows cut each other.

        obs: the observation met in `node`, needed where the graph has keys.

        Raises as `TransitionGraph.add`, and ValueError for another shape or dtype of obs; nothing
        has then changed.
        """
        node, action, next_node = map(operator.index, (node, action, next_node))
        if self.obs is not None:
            obs = np.asarray(obs)
            check_array("obs", obs, self.obs.dtype, self.obs.shape[1:])
        with self.graph.lock:
            i = self.position
            self.graph.add(node, action, reward, next_node, terminated)
            self.cut[i - 1] = self._ended or self.next_node[i - 1] != node
            if self.size == self.capacity:
                columns = (self.node, self.action, self.reward, self.next_node, self.terminated)
                self.graph.remove(*(column.item(i) for column in columns))
            self.node[i], self.action[i], self.reward[i] = node, action, reward
            self.next_node[i], self.terminated[i] = next_node, terminated
            if self.obs is not None:
                self.obs[i] = obs
            self.cut[i] = True
            self._ended = False
            self.position = (i + 1) % self.capacity
            self.size = min(self.size + 1, self.capacity)
            self._prioritize(i)

    def _prioritize(self, row):
        """A row was written. All rows are alike."""

    def end_episode(self) -> None:
        """The next row will not continue the newest one."""
        self._ended = True

    def sample(self, batch_size: int, rng: np.random.Generator) -> Batch:
        """`Batch` of rows, each equally likely. ValueError where there is none."""
        with self.graph.lock:
            if not self.size:
                raise ValueError("Require a transition to sample, got an empty replay")
            return self.batch_of(rng.integers(self.size, size=batch_size))

    def batch_of(
        self, rows: NDArray[np.int64], weights: NDArray[np.float32] | None = None
    ) -> Batch:
        """`Batch` of rows int64 [B]."""
        return Batch(rows, self.node[rows], self.action[rows], weights)

    def observations(self, batch: Batch) -> NDArray[Any]:
        """The observations of a batch: [B, *obs_shape]."""
        if self.obs is None:
            return self.graph.observations_of(batch.nodes)
        return self.obs[batch.rows]

    def subgraphs(
        self,
        batch: Batch,
        source: Literal["trajectory", "graph"],
        depth: SupportsIndex,
        breadth: SupportsIndex = 0,
        rng: np.random.Generator | None = None,
    ) -> Subgraphs:
        """The subgraphs that the targets of a batch are computed over.

        source: "trajectory", the rows that follow each sample, or "graph", its local expansion,
        see `TransitionGraph.expand`; breadth and rng are of the expansion.

        Raises as `trajectory_subgraphs` or `expand`, and ValueError for another source.
        """
        if source == "graph":
            return self.graph.expand(batch.nodes, batch.actions, depth, breadth, rng)
        if source != "trajectory":
            raise ValueError(f"Require source 'trajectory' or 'graph', got {source!r}")
        with self.graph.lock:
            return trajectory_subgraphs(
                batch.rows, depth, self.node, self.action, self.reward, self.next_node,
                self.terminated, self.cut,
            )  # fmt: skip

    def _columns(self):
        """By name, the arrays with a place for each row, those of a subclass too."""
        own = {name: one for name, one in vars(self).items() if isinstance(one, np.ndarray)}
        return {name: one for name, one in own.items() if one.shape[:1] == (self.capacity,)}

    def state(self) -> dict[str, Any]:
        """What `restore` takes back; its arrays are views, to be saved or copied at once."""
        columns = {name: column[: self.size] for name, column in self._columns().items()}
        return {"rows": columns, "position": self.position, "ended": self._ended}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go on from what `state` returned. There may be more room than there was.

        Raises ValueError for rows that cannot be the transitions of the graph.
        """
        rows, position = saved["rows"], saved["position"]
        size = np.size(rows["node"])
        is_full = size == self.capacity and 0 <= position < size
        if not (is_full or (size < self.capacity and position in (0, size))):
            raise ValueError(
                f"Require a ring that goes on in {self.capacity} rows, got {size}, next {position}"
            )
        if size > (most := self.graph.num_transitions):  # which may have others as well
            raise ValueError(f"Require rows of the graph's {most} transitions, got {size}")
        for name, column in self._columns().items():
            copy_rows(name, rows, column, size)
        self.size, self._ended = size, bool(saved["ended"])
        self.position = position if is_full else size


class SumTree:
    """Priorities under a binary tree of sums (Schaul et al. 2016, Appendix B.2.1).

    Sums are float64 and made anew from their two children at every change, so that no error adds
    up over a run. All `capacity` priorities are 0 at first; `largest` is the largest that there can
    be, so that the sum of all is finite.
    """

    def __init__(self, capacity: SupportsIndex) -> None:
        self.capacity: int = operator.index(capacity)
        if self.capacity < 1:
            raise ValueError(f"Require capacity >= 1, got {capacity}")
        self._tree = np.zeros(2 << (self.capacity - 1).bit_length(), np.float64)
        self.largest: float = float(np.finfo(np.float64).max / len(self._tree))

    def __repr__(self) -> str:
        return f"SumTree({self.capacity:,} priorities, total {self.total:.6g})"

    @property
    def total(self) -> float:
        """Sum of all priorities."""
        return float(self._tree[1])

    @property
    def priorities(self) -> NDArray[np.float64]:
        """float64 [capacity], a view, to be read only."""
        priorities = self._tree[len(self._tree) // 2 :][: self.capacity]
        priorities.flags.writeable = False
        return priorities

    def get(self, indices: ArrayLike) -> NDArray[np.float64]:
        """Priorities float64 [n] of int [n]."""
        return self.priorities[self._check(indices)]

    def set(self, indices: ArrayLike, priorities: ArrayLike) -> None:
        """Write priorities [n] at int [n]; of a repeated index the last one stays.

        Raises IndexError for an index out of range, ValueError for a wrong shape or a priority that
        is negative, NaN or above `largest`.
        """
        indices = self._check(indices)
        priorities = np.ascontiguousarray(priorities, np.float64)
        if priorities.shape != indices.shape:
            raise ValueError(f"Require {len(indices)} priorities, got shape {priorities.shape}")
        bad = np.flatnonzero(~((priorities >= 0) & (priorities <= self.largest)))
        if len(bad):
            raise ValueError(
                f"Require 0 <= priority <= {self.largest:.3g}, got {priorities[bad[0]]}"
            )
        sums.set_priorities(self._tree, indices, priorities)

    def find(self, target: float) -> int:
        """Index i with sum(priorities[:i]) <= target < sum(priorities[:i + 1])."""
        total = self.total
        if not 0 <= target < total:
            raise ValueError(f"Require 0 <= target < total, got {target} and {total}")
        return int(self._find(np.array([target], np.float64))[0])

    def sample(self, n: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """Indices int64 [n], one drawn uniformly from each of n equal slices of the total.

        Raises ValueError for n < 1, or if no priority is positive.
        """
        if n < 1:
            raise ValueError(f"Require n >= 1, got {n}")
        total = self.total
        if total <= 0:
            raise ValueError(f"Require a positive priority, got total {total}")
        targets = (np.arange(n) + rng.random(n)) * (total / n)
        # Rounding may reach the total itself, which lies in no slice.
        return self._find(np.minimum(targets, np.nextafter(total, 0)))

    def _find(self, targets):
        indices = np.empty(len(targets), np.int64)
        sums.find_priorities(self._tree, targets, indices)
        return indices

    def _check(self, indices):
        indices = as_indices("indices", indices)
        if len(indices) and not (indices.min() >= 0 and indices.max() < self.capacity):
            bad = indices[(indices < 0) | (indices >= self.capacity)][0]
            raise IndexError(f"Require 0 <= index < {self.capacity}, got {bad}")
        return indices


class PrioritizedReplay(Replay):
    """A replay that draws rows in proportion to their priority (Schaul et al. 2016).

    A row's priority is its error to the power `exponent`, in a sum tree; a new row gets the
    largest one so far. An exponent above 50 is refused: small priorities would become 0.
    """

    def __init__(self, graph: TransitionGraph, capacity: SupportsIndex, exponent: float) -> None:
        super().__init__(graph, capacity)
        if not 0 <= exponent <= 50:
            raise ValueError(f"Require 0 <= exponent <= 50, got {exponent}")
        self.exponent: float = exponent
        self.priorities: SumTree = SumTree(capacity)
        self.max_priority: float = 1.0

    def _prioritize(self, row):
        self.priorities.set([row], [self.max_priority])

    def sample(
        self, batch_size: int, rng: np.random.Generator, importance_exponent: float = 1.0
    ) -> Batch:
        """`Batch` of rows in proportion to priority, with weights (Eq. 1 and 2).

        importance_exponent: in [0, inf); 1 undoes the priorities, 0 leaves them.
        """
        if not 0 <= importance_exponent < np.inf:
            raise ValueError(f"Require 0 <= importance_exponent < inf, got {importance_exponent}")
        with self.graph.lock:
            rows = self.priorities.sample(batch_size, rng)
            priorities = self.priorities.get(rows)
            with np.errstate(over="ignore"):
                weights = (priorities * self.size) ** -importance_exponent
                if not 0 < weights.max() < np.inf:
                    weights = (priorities / priorities.min()) ** -importance_exponent
            return self.batch_of(rows, (weights / weights.max()).astype(np.float32))

    def update_priorities(self, rows: NDArray[np.int64], errors: ArrayLike) -> None:
        """New priorities from the errors [B] of a batch, whose signs do not matter.

        Raises ValueError for one that is not finite, or too large to be added up.
        """
        errors = np.maximum(np.abs(np.asarray(errors, np.float64)), 1e-6)
        # Infinity and NaN stay, to be refused: to the power 0 they would be 1.
        priorities = np.where(np.isfinite(errors), errors**self.exponent, errors)
        with self.graph.lock:
            self.priorities.set(rows, priorities)
            self.max_priority = max(self.max_priority, float(priorities.max(initial=0)))

    def state(self) -> dict[str, Any]:
        """A tree for `restore`."""
        saved = super().state()
        saved["rows"]["priority"] = self.priorities.priorities[: self.size]
        return saved | {"max_priority": self.max_priority}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """As `Replay.restore`. ValueError also for priorities that cannot be."""
        priorities, most = saved["rows"]["priority"], float(saved["max_priority"])
        check_array("priority", priorities, np.float64, np.shape(saved["rows"]["node"]))
        if not (most <= self.priorities.largest and (priorities <= most).all()):
            raise ValueError(f"Require priorities <= {most}, a finite one")
        super().restore(saved)
        rest = np.zeros(self.capacity - self.size)
        self.priorities.set(np.arange(self.capacity), np.concatenate([priorities, rest]))
        self.max_priority = most


def trajectory_subgraphs(
    starts: ArrayLike,
    depth: SupportsIndex,
    node: ArrayLike,
    action: ArrayLike,
    reward: ArrayLike,
    next_node: ArrayLike,
    terminated: ArrayLike,
    cut: ArrayLike,
) -> Subgraphs:
    """Subgraphs that are the trajectories the samples lie on: `tree`, `n-step` and `one-step`.

    A chain ends after depth rows, at a terminated row (nothing to bootstrap from), or at a cut row
    (bootstrap from its next node).

    Args:
        starts: int [B], rows of the replay.
        depth: rows to follow at most, at least 1.
        node, action, reward, next_node, terminated: the replay's arrays [N] in time order, a ring.
            Rewards are not looked at, and node is read at the starts alone, for `pair_nodes`.
        cut: bool [N], row t + 1 does not continue row t: a truncation, an episode left, and always
            the newest row.

    Raises ValueError for depth < 1 or arrays of different length, IndexError for a start out of
    range, or a row on the way that holds a negative action or next node.
    """
    depth = operator.index(depth)
    if depth < 1:
        raise ValueError(f"Require depth >= 1, got {depth}")
    starts = as_indices("starts", starts)
    replay = {
        "node": as_indices("node", node),
        "action": as_indices("action", action),
        "reward": np.ascontiguousarray(reward, np.float64),
        "next_node": as_indices("next_node", next_node),
        "terminated": np.ascontiguousarray(terminated, np.bool_),
        "cut": np.ascontiguousarray(cut, np.bool_),
    }
    length = len(replay["node"])
    for name, column in replay.items():
        if column.shape != (length,):
            raise ValueError(f"Require {name} of shape ({length},), got {column.shape}")
    bad = np.flatnonzero((starts < 0) | (starts >= length))
    if len(bad):
        raise IndexError(f"Require 0 <= start < {length}, got {starts[bad[0]]}")
    if depth > length and (replay["cut"] | replay["terminated"]).any():
        depth = length  # no chain is longer than the ring
    if depth > max(length, MAX_DEPTH):
        raise ValueError(f"Require a row that is cut, as the newest is, for depth {depth}")
    bad_row, subgraphs = expand.follow_trajectories(starts, depth, *replay.values())
    if bad_row >= 0:
        raise IndexError(
            f"Require ids and actions >= 0, got row {bad_row}: "
            f"action {replay['action'][bad_row]}, next {replay['next_node'][bad_row]}"
        )
    return subgraphs
