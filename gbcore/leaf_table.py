"""LeafTable: the target network's values by node, each evaluated once."""

import numpy as np

CHUNK = 32  # states per evaluation


class LeafTable:
    """Leaf values of a graph's nodes, evaluated when first needed and kept until forgotten.

    The last bits that a network gives a state depend on the size of its batch, since that decides
    in which order products are summed. So the network is always asked for CHUNK states, the last
    ones repeated if need be: a value is then the state's own, whenever and with whatever other
    states it was evaluated, and a table gives the same bits as no table.

    Args:
        graph: the TransitionGraph.
        evaluate: function of observations [CHUNK, *obs_shape] that returns float32 [CHUNK, A].
    """

    def __init__(self, graph, evaluate):
        self.graph, self.evaluate = graph, evaluate
        self.q = np.zeros((1024, graph.num_actions), np.float32)
        self.known = np.zeros(1024, np.bool_)
        self.num_evaluated = 0  # states sent through the network, repetitions not counted

    def values(self, nodes):
        """float32 [n, A] of distinct node ids int64 [n]."""
        if self.graph.num_ids > len(self.known):
            self._grow()
        missing = nodes[~self.known[nodes]]
        for start in range(0, len(missing), CHUNK):
            part = missing[start : start + CHUNK]
            padded = np.full(CHUNK, part[-1])
            padded[: len(part)] = part
            self.q[part] = self.evaluate(self.graph.observations_of(padded))[: len(part)]
            self.known[part] = True
        self.num_evaluated += len(missing)
        return self.q[nodes]

    def write(self, nodes, actions, values):
        """Replace the values of some pairs; where a pair comes twice, the first one stays."""
        if self.graph.num_ids > len(self.known):
            self._grow()
        unknown = nodes[~self.known[nodes]]
        self.values(np.unique(unknown))  # else a later evaluation would undo what is written
        # put writes in order, which assignment to an index does not promise.
        np.put(self.q, (nodes * self.q.shape[1] + actions)[::-1], values[::-1])

    def forget(self, nodes):
        """These ids were freed: another state may get them."""
        for node in nodes:
            if node < len(self.known):
                self.known[node] = False

    def forget_all(self):
        """The network has changed."""
        self.known[:] = False

    def _grow(self):
        capacity = max(2 * len(self.known), self.graph.num_ids)
        for name in ("q", "known"):
            old = getattr(self, name)
            bigger = np.zeros((capacity, *old.shape[1:]), old.dtype)
            bigger[: len(old)] = old
            setattr(self, name, bigger)
