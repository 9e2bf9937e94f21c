"""RecentRows: a network's output for nodes, used again for a few updates."""

from collections import deque

import numpy as np
import torch

from gbcore.interner import Rows, check_array


class RecentRows:
    """Rows of nodes, each read for `age` updates of the network and evaluated anew after that.

    So what is read lags the network by fewer than `age` updates, and what is kept is what the last
    `age` updates evaluated. A row is kept with the generation of its id, see
    `TransitionGraph.generations`: an id that was freed since names another state.

    Args:
        graph: the TransitionGraph.
        evaluate: function of node ids int64 [n] that returns their rows, a Tensor [n, width].
        age: updates, >= 1; with 1 nothing of an earlier update is read.
        width, dtype: of a row.

    Raises:
        ValueError: for an age out of range.
    """

    def __init__(self, graph, evaluate, age, width, dtype):
        if age < 1:
            raise ValueError(f"Require age >= 1, got {age}")
        self.graph, self.evaluate, self.age = graph, evaluate, age
        self.width, self.dtype = width, dtype
        self._rows = {}  # (node, generation) -> Tensor [width]
        self._updates = deque()  # keys of the rows that each update evaluated, the oldest first

    def begin_update(self):
        """Forget what was evaluated `age` updates ago."""
        self._updates.append([])
        if len(self._updates) > self.age:
            for key in self._updates.popleft():
                del self._rows[key]

    def rows(self, nodes):
        """Tensor [n, width] of distinct node ids int64 [n]. To be called within an update.

        Raises:
            KeyError: for what is not the id of a node.
        """
        self.graph.require_nodes(nodes)
        keys = list(zip(nodes.tolist(), self.graph.generations[nodes].tolist(), strict=True))
        missing = [i for i, key in enumerate(keys) if key not in self._rows]
        if missing:
            new = [keys[i] for i in missing]
            self._rows.update(zip(new, self.evaluate(nodes[missing]), strict=True))
            self._updates[-1].extend(new)
        rows = [self._rows[key] for key in keys]
        return torch.stack(rows) if rows else torch.empty(0, self.width, dtype=self.dtype)

    def state(self):
        """What `restore` takes back: int64 nodes and ages [n], float32 values [n, width].

        An age is the number of updates begun since the one that evaluated the row.
        """
        generations = self.graph.generations
        kept = [
            (age, key)
            for age, keys in enumerate(reversed(self._updates))
            for key in keys
            if key[1] == generations[key[0]]
        ]
        values = torch.empty(len(kept), self.width)
        for value, (_, key) in zip(values, kept, strict=True):
            value[:] = self._rows[key]
        return Rows(
            nodes=np.array([node for _, (node, _) in kept], np.int64),
            ages=np.array([age for age, _ in kept], np.int64),
            values=values.numpy(),
        )

    def restore(self, saved):
        """Go on with what `state` returned, of this graph or of one restored from its state.

        Raises:
            KeyError: for an array that is missing, or what is not the id of a node.
            ValueError: for two rows of a node, one of no update that is remembered, or values
                that are not finite. After either nothing has changed.
        """
        nodes, ages, values = saved["nodes"], saved["ages"], saved["values"]
        n = np.size(nodes)
        check_array("nodes", nodes, np.int64, (n,))
        check_array("ages", ages, np.int64, (n,))
        check_array("values", values, np.float32, (n, self.width))
        if not ((ages >= 0) & (ages < self.age)).all() or (np.diff(ages) < 0).any():
            raise ValueError(f"Require ages within [0, {self.age}), the youngest first")
        self.graph.require_nodes(nodes)
        if len(np.unique(nodes)) < n:
            raise ValueError("Require distinct nodes")
        if not np.isfinite(values).all():
            raise ValueError("Require finite values")
        keys = list(zip(nodes.tolist(), self.graph.generations[nodes].tolist(), strict=True))
        rows = torch.from_numpy(values).to(self.dtype)
        self._rows = dict(zip(keys, rows, strict=True))
        self._updates = deque([] for _ in range(max(ages, default=-1) + 1))
        for key, age in zip(keys, ages.tolist(), strict=True):
            self._updates[-1 - age].append(key)
