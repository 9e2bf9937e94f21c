"""Replay: a ring of transitions that feeds the graph, sampled uniformly or by priority."""

import operator
from typing import NamedTuple

import numpy as np

from gbcore.graph import trajectory_subgraphs
from gbcore.interner import Rows, check_array
from gbcore.sum_tree import SumTree


class Batch(NamedTuple):
    rows: np.ndarray  # int64 [B], rows of the replay
    nodes: np.ndarray  # int64 [B], their states
    actions: np.ndarray  # int64 [B]
    weights: np.ndarray | None = None  # float32 [B], importance-sampling weights


class Replay:
    """The last `capacity` transitions. The graph holds the same ones, and forgets with the ring.

    Rows are in time order, `position` is where the next one goes:

        node, next_node int64 | action int64 | reward float64 | terminated bool
        cut bool: the row after it does not continue it; always true of the newest row
        obs: the observations of `node`, kept only where the graph has a key of its own, since
             several observations are then one state, and the network trains on what was met

    Args:
        graph: the TransitionGraph.
        capacity: number of rows, at least 1.
    """

    COLUMNS = ("node", "action", "reward", "next_node", "terminated", "cut")

    def __init__(self, graph, capacity):
        if capacity < 1:
            raise ValueError(f"Require capacity >= 1, got {capacity}")
        self.graph, self.capacity = graph, int(capacity)
        self.node = np.zeros(capacity, np.int64)
        self.action = np.zeros(capacity, np.int64)
        self.reward = np.zeros(capacity, np.float64)
        self.next_node = np.zeros(capacity, np.int64)
        self.terminated = np.zeros(capacity, np.bool_)
        self.cut = np.ones(capacity, np.bool_)
        self.obs = None
        if graph.key_shape is not None:
            self.COLUMNS = (*self.COLUMNS, "obs")
            self.obs = np.zeros((capacity, *graph.obs_shape), graph.obs_dtype)
        self.size = self.position = 0
        self._ended = True  # the newest row was an episode's last

    def add(self, node, action, reward, next_node, terminated, obs=None):
        """Append a transition, to the graph as well. The oldest one leaves both when it is full.

        Ids that are then in no transition may be freed, and given to another state. With several
        environments, ask `graph.node` for both states right before; their rows cut each other.

        obs: the observation met in `node`, needed where the graph has keys.

        Raises as `TransitionGraph.add`, and ValueError for another shape or dtype of obs; nothing
        has then changed.
        """
        i = self.position
        node, action, next_node = map(operator.index, (node, action, next_node))
        if self.obs is not None:
            obs = np.asarray(obs)
            check_array("obs", obs, self.obs.dtype, self.obs.shape[1:])
        self.graph.add(node, action, reward, next_node, terminated)
        self.cut[i - 1] = self._ended or self.next_node[i - 1] != node
        if self.size == self.capacity:
            self.graph.remove(
                self.node[i], self.action[i], self.reward[i], self.next_node[i], self.terminated[i]
            )
        self.node[i], self.action[i], self.reward[i] = node, action, reward
        self.next_node[i], self.terminated[i] = next_node, terminated
        if self.obs is not None:
            self.obs[i] = obs
        self.cut[i] = True
        self._ended = False
        self.position = (i + 1) % self.capacity
        self.size = min(self.size + 1, self.capacity)

    def end_episode(self):
        """The next row will not continue the newest one."""
        self._ended = True

    def sample(self, batch_size, rng):
        """`Batch` of rows, each equally likely."""
        return self.batch_of(rng.integers(self.size, size=batch_size))

    def batch_of(self, rows, weights=None):
        """`Batch` of rows int64 [B]."""
        return Batch(rows, self.node[rows], self.action[rows], weights)

    def observations(self, batch):
        """What was observed in the rows of a batch: [B, *obs_shape]."""
        if self.obs is None:
            return self.graph.observations_of(batch.nodes)
        return self.obs[batch.rows]

    def subgraphs(self, batch, source, depth, breadth=0, rng=None):
        """What the targets of a batch are computed over.

        source: "trajectory", the rows that follow each sample, or "graph", its local expansion,
        see `TransitionGraph.expand`; breadth and rng are of the expansion.
        """
        if source == "graph":
            return self.graph.expand(batch.nodes, batch.actions, depth, breadth, rng)
        return trajectory_subgraphs(
            batch.rows, depth, self.node, self.action, self.reward, self.next_node,
            self.terminated, self.cut,
        )  # fmt: skip

    def state(self):
        """What `restore` takes back; its arrays are views, to be saved or copied at once."""
        columns = Rows({name: getattr(self, name)[: self.size] for name in self.COLUMNS})
        return {"rows": columns, "position": self.position, "ended": self._ended}

    def restore(self, saved):
        """Go on from what `state` returned. There may be more room than there was.

        Raises:
            ValueError: for rows that are not the transitions of the graph; nothing has changed.
        """
        rows = saved["rows"]
        size, position = len(rows["node"]), saved["position"]
        is_full = size == self.capacity and 0 <= position < max(size, 1)
        if not (is_full or (size < self.capacity and position in (0, size))):
            raise ValueError(
                f"Require a ring that goes on in {self.capacity} rows, got {size}, next {position}"
            )
        for name in self.COLUMNS:
            column = getattr(self, name)
            check_array(name, rows[name], column.dtype, (size, *column.shape[1:]))
        after = np.roll(rows["node"], -1)
        if (
            not (rows["cut"] | (rows["next_node"] == after)).all()
            or not rows["cut"][position - 1 :][:1].all()
        ):
            raise ValueError("Require rows that go on where they are not cut, as the newest is")
        self._check_rows_are_the_graph(rows)
        for name in self.COLUMNS:
            getattr(self, name)[:size] = rows[name]
        self.size, self._ended = size, bool(saved["ended"])
        self.position = position if is_full else size

    def _check_rows_are_the_graph(self, rows):
        columns = ("node", "action", "next_node", "reward", "terminated")
        rows = np.rec.fromarrays([rows[name] for name in columns])
        rows, counts = np.unique(rows, return_counts=True)
        edges = self.graph.edges()
        names = ("source", "action", "next", "reward", "terminated")
        edges_of_graph = np.rec.fromarrays([edges[name] for name in names])
        order = np.argsort(edges_of_graph)
        if not (
            len(rows) == len(order)
            and np.array_equal(rows, edges_of_graph[order])
            and np.array_equal(counts, edges["count"][order])
        ):
            raise ValueError("Require a replay whose rows are the transitions of the graph")


class PrioritizedReplay(Replay):
    """A replay of which rows are drawn in proportion to their priority (Schaul et al. 2016).

    A row's priority is its error to the power `exponent`, in a sum tree; a new row gets the
    largest one so far.
    """

    def __init__(self, graph, capacity, exponent):
        super().__init__(graph, capacity)
        self.exponent = exponent
        self.priorities = SumTree(capacity)
        self.max_priority = 1.0

    def add(self, node, action, reward, next_node, terminated, obs=None):
        """As `Replay.add`."""
        i = self.position
        super().add(node, action, reward, next_node, terminated, obs)
        self.priorities.set([i], [self.max_priority])

    def sample(self, batch_size, importance_exponent, rng):
        """`Batch` of rows in proportion to priority, with weights (Eq. 1 and 2)."""
        rows = self.priorities.sample(batch_size, rng)
        weights = (self.priorities.get(rows) * self.size) ** -importance_exponent
        return self.batch_of(rows, (weights / weights.max()).astype(np.float32))

    def update_priorities(self, rows, errors):
        """New priorities from the errors [B] of a batch. ValueError for one that is not finite."""
        priorities = np.maximum(errors.astype(np.float64), 1e-6) ** self.exponent
        self.priorities.set(rows, priorities)
        self.max_priority = max(self.max_priority, float(priorities.max()))

    def state(self):
        """What `restore` takes back."""
        saved = super().state()
        saved["rows"]["priority"] = self.priorities.priorities[: self.size]
        return saved | {"max_priority": self.max_priority}

    def restore(self, saved):
        """As `Replay.restore`. ValueError also for priorities that cannot be."""
        priorities = saved["rows"]["priority"]
        check_array("priority", priorities, np.float64, (len(saved["rows"]["node"]),))
        most = saved["max_priority"]
        if not (most < np.inf and (priorities > 0).all() and (priorities <= most).all()):
            raise ValueError(f"Require 0 < priority <= {most}, got others")
        super().restore(saved)
        self.priorities.set(
            np.arange(self.capacity), np.pad(priorities, (0, self.capacity - self.size))
        )
        self.max_priority = most
