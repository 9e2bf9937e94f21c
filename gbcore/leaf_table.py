"""LeafTable: a network's values by node, each evaluated once."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gbcore.arrays import Holder, as_indices, copy_rows, grown
from gbcore.graph import KnownNodes, TransitionGraph

CHUNK = 32  # states per evaluation, unless the caller asks for another number


class LeafTable(Holder):
    """Leaf values of a graph's nodes, evaluated when first needed and kept until forgotten.

    The last bits that a network gives a state depend on the size of its batch, since that decides
    in which order products are summed. So the network is asked for CHUNK states at a time, the last
    one repeated if need be: a value is then the state's own, whenever and with whatever other
    states it was evaluated, and a table gives the same bits as no table. `GraphValues`, which
    promises no such thing, asks for more at a time.

    A value is kept with the generation of its id, see `TransitionGraph.generations`: an id that was
    freed since names another state, whose value is then unknown.

    Threads wait for each other, and for an evaluation, as those of the graph. `copy.deepcopy`
    copies the graph, too, and keeps `evaluate`; pickle asks for one that can be pickled.

    Args:
        graph: the TransitionGraph.
        evaluate: function of observations [n, *obs_shape] that returns float32 [n, A].

    Where the network is asked, ids of no node raise KeyError, values of another shape ValueError.
    """

    def __init__(
        self, graph: TransitionGraph, evaluate: Callable[[NDArray[Any]], NDArray[np.float32]]
    ) -> None:
        self.graph: TransitionGraph = graph
        self.evaluate: Callable[[NDArray[Any]], NDArray[np.float32]] = evaluate
        self.q: NDArray[np.float32] = np.zeros((graph.capacity, graph.num_actions), np.float32)
        self._known = KnownNodes(graph)
        self.num_evaluated: int = 0  # states sent through the network, repetitions not counted

    def __repr__(self) -> str:
        return f"LeafTable({np.count_nonzero(self.known):,} of {self.graph.num_nodes:,} nodes)"

    @property
    def known(self) -> NDArray[np.bool_]:
        """Has the id a value? bool [num_ids]"""
        with self.graph.lock:
            return self.knows(np.arange(self.graph.num_ids))

    def knows(self, nodes: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Have node ids int64 [n] a value? bool [n]. KeyError for what never was an id."""
        with self.graph.lock:
            self.q = grown(self.q, self.graph.capacity)
            return self._known.has(nodes)

    def values(self, nodes: ArrayLike, chunk: int = CHUNK) -> NDArray[np.float32]:
        """float32 [n, A] of distinct node ids int64 [n], evaluated `chunk` at a time."""
        nodes = as_indices("nodes", nodes)
        with self.graph.lock:
            self.graph.require_nodes(nodes)
            missing = nodes[~self.knows(nodes)]
            if len(missing):
                self._keep(missing, chunk)
            return self.q[nodes]

    def renew(self, nodes: ArrayLike, chunk: int = CHUNK) -> None:
        """Evaluate distinct node ids int64 [n] anew, `chunk` at a time."""
        with self.graph.lock:
            self._keep(as_indices("nodes", nodes), chunk)

    def evaluated(self, nodes: ArrayLike, chunk: int = CHUNK) -> NDArray[np.float32]:
        """float32 [n, A] of node ids int64 [n], by the network as it is now; none is kept."""
        if chunk < 1:
            raise ValueError(f"Require chunk >= 1, got {chunk}")
        nodes = as_indices("nodes", nodes)
        found = np.empty((len(nodes), self.graph.num_actions), np.float32)
        padded = np.append(nodes, np.repeat(nodes[-1:], -len(nodes) % chunk))
        with self.graph.lock:
            self.graph.require_nodes(nodes)
            for start in range(0, len(nodes), chunk):
                q = self.evaluate(self.graph.observations_of(padded[start : start + chunk]))
                if tuple(q.shape) != (shape := (chunk, self.graph.num_actions)):
                    raise ValueError(f"Require values of shape {shape}, got {tuple(q.shape)}")
                found[start : start + chunk] = q[: len(nodes) - start]
        return found

    def forget_all(self) -> None:
        """The network has changed."""
        with self.graph.lock:
            self._known.clear()

    def state(self) -> dict[str, Any]:
        """What `restore` takes back: q float32 [num_ids, A], a view, and known bool [num_ids]."""
        known = self.known
        rows = {"q": self.q[: len(known)], "known": known}
        return {"rows": rows, "num_evaluated": self.num_evaluated}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go on with what `state` returned, of this graph or of one restored from its state.

        Raises:
            KeyError: for an array that is missing.
            ValueError: for values of another number of ids or actions.
        """
        rows, n = saved["rows"], self.graph.num_ids
        known = np.zeros(n, np.bool_)
        copy_rows("known", rows, known, n)
        with self.graph.lock:
            self.q = grown(self.q, self.graph.capacity)
            copy_rows("q", rows, self.q, n)
            self._known.restore(known)
            self.num_evaluated = int(saved["num_evaluated"])

    def _keep(self, nodes, chunk):
        found = self.evaluated(nodes, chunk)
        self.q = grown(self.q, self.graph.capacity)
        self.q[nodes] = found
        self._known.add(nodes)
        self.num_evaluated += len(nodes)
