"""LeafTable: a network's values by node, each evaluated once."""

import numpy as np

from gbcore.interner import Rows, check_array
from gbcore.kernels import FREED

CHUNK = 32  # states per evaluation, unless the caller asks for another number
UNKNOWN = -1  # a generation that no id has


class LeafTable:
    """Leaf values of a graph's nodes, evaluated when first needed and kept until forgotten.

    The last bits that a network gives a state depend on the size of its batch, since that decides
    in which order products are summed. So the network is asked for CHUNK states at a time, the last
    one repeated if need be: a value is then the state's own, whenever and with whatever other
    states it was evaluated, and a table gives the same bits as no table. `GraphValues`, which
    promises no such thing, asks for as many as it has.

    A value is kept with the generation of its id, see `TransitionGraph.generations`: an id that was
    freed since names another state, whose value is then unknown.

    Args:
        graph: the TransitionGraph.
        evaluate: function of observations [n, *obs_shape] that returns float32 [n, A].

    Methods but `knows` raise KeyError for what is not the id of a node, and ValueError for arrays
    of another shape or actions out of range.
    """

    def __init__(self, graph, evaluate):
        self.graph, self.evaluate = graph, evaluate
        self.q = np.zeros((1024, graph.num_actions), np.float32)
        self._generation = np.full(1024, UNKNOWN, np.int64)  # of the id, when its q was written
        self.num_evaluated = 0  # states sent through the network, repetitions not counted

    @property
    def known(self):
        """Has the id a value? bool [num_ids]"""
        return self.knows(np.arange(self.graph.num_ids))

    def knows(self, nodes):
        """Have node ids int64 [n] a value? bool [n]"""
        self._make_room()
        return self._generation[nodes] == self.graph.generations[nodes]

    def values(self, nodes, chunk=CHUNK):
        """float32 [n, A] of distinct node ids int64 [n], evaluated `chunk` at a time."""
        self.renew(self._unknown(nodes), chunk)
        return self.q[nodes]

    def renew(self, nodes, chunk=CHUNK):
        """Evaluate distinct node ids int64 [n] anew, `chunk` at a time."""
        self.graph.require_nodes(nodes)
        self._make_room()
        for start in range(0, len(nodes), chunk):
            part = nodes[start : start + chunk]
            padded = np.full(chunk, part[-1])
            padded[: len(part)] = part
            q = self.evaluate(self.graph.observations_of(padded))
            if tuple(q.shape) != (chunk, self.q.shape[1]):
                shape = tuple(q.shape)
                raise ValueError(f"Require values of shape {(chunk, self.q.shape[1])}, got {shape}")
            self.q[part] = q[: len(part)]
            self._generation[part] = self.graph.generations[part]
        self.num_evaluated += len(nodes)

    def write(self, nodes, actions, values):
        """Replace the values [n] of pairs, given by nodes and actions int64 [n].

        Where a pair comes twice, the first one stays.
        """
        if not nodes.shape == actions.shape == values.shape == (len(nodes),):
            shapes = f"{nodes.shape}, {actions.shape}, {values.shape}"
            raise ValueError(f"Require as many nodes, actions and values, [n] each; got {shapes}")
        if len(actions) and not 0 <= actions.min() <= actions.max() < self.q.shape[1]:
            raise ValueError(f"Require 0 <= action < {self.q.shape[1]}, got {actions}")
        unknown = np.unique(self._unknown(nodes))
        self.values(unknown)  # else a later evaluation would undo what is written
        # put writes in order, which assignment to an index does not promise.
        np.put(self.q, (nodes * self.q.shape[1] + actions)[::-1], values[::-1])

    def forget_all(self):
        """The network has changed."""
        self._generation[:] = UNKNOWN

    def state(self):
        """What `restore` takes back: q float32 [num_ids, A], a view, and known bool [num_ids]."""
        known = self.known
        rows = Rows(q=self.q[: len(known)], known=known)
        return {"rows": rows, "num_evaluated": self.num_evaluated}

    def restore(self, saved):
        """Go on with what `state` returned, of this graph or of one restored from its state.

        Raises:
            KeyError: for an array that is missing.
            ValueError: for values of other ids than the graph's nodes, or not finite. Then nothing
                has changed.
        """
        self._make_room()
        n, num_evaluated = self.graph.num_ids, saved["num_evaluated"]
        q, known = saved["rows"]["q"], saved["rows"]["known"]
        check_array("q", q, np.float32, (n, self.q.shape[1]))
        check_array("known", known, np.bool_, (n,))
        if not np.isfinite(q).all():
            raise ValueError("Require finite leaf values")
        if (known & (self.graph.arrays.in_degree[:n] == FREED)).any():
            raise ValueError("Require leaf values of nodes, got one of a freed id")
        if not 0 <= num_evaluated < np.inf:
            raise ValueError(f"Require num_evaluated >= 0, got {num_evaluated}")
        self.q[:n] = q
        self._generation[:n] = np.where(known, self.graph.generations, UNKNOWN)
        self._generation[n:] = UNKNOWN
        self.num_evaluated = int(num_evaluated)

    def _unknown(self, nodes):
        self.graph.require_nodes(nodes)
        return nodes[~self.knows(nodes)]

    def _make_room(self):
        old = len(self._generation)
        if self.graph.num_ids > old:
            more = max(old, self.graph.num_ids - old)
            self.q = np.pad(self.q, ((0, more), (0, 0)))
            self._generation = np.pad(self._generation, (0, more), constant_values=UNKNOWN)
