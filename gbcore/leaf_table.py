"""LeafTable: a network's values by node, each evaluated once."""

import contextlib
import copy
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gbcore.arrays import as_indices, copy_rows, grown
from gbcore.graph import KnownNodes, TransitionGraph

CHUNK = 32  # states per evaluation, unless the caller asks for another number


class LeafTable:
    """Leaf values of a graph's nodes, evaluated when first needed and kept until forgotten.

    The last bits that a network gives a state depend on the size of its batch, since that decides
    in which order products are summed. So the network is asked for CHUNK states at a time, the last
    one repeated if need be: a value is then the state's own, whenever and with whatever other
    states it was evaluated, and a table gives the same bits as no table. `GraphValues`, which
    promises no such thing, asks for more at a time.

    A value is kept with the generation of its id, see `TransitionGraph.generations`: an id that was
    freed since names another state, whose value is then unknown.

    One thread at a time, as whatever writes to the graph. `copy.deepcopy` copies the graph, too,
    and keeps `evaluate`; pickle asks for one that can be pickled.

    Args:
        graph: the TransitionGraph.
        evaluate: function of observations [n, *obs_shape] that returns float32 [n, A].
        network: the torch.nn.Module that `evaluate` asks. All values are forgotten where its
            parameters or buffers are no longer those of the last look, whatever wrote into them;
            it is asked in evaluation mode. Without it, `forget_all` has to be called.

    Attributes:
        num_forgotten: how often values were forgotten, or evaluated anew.

    Where the network is asked, ids of no node raise KeyError, values of another shape ValueError.
    """

    def __init__(
        self,
        graph: TransitionGraph,
        evaluate: Callable[[NDArray[Any]], NDArray[np.float32]],
        network: Any = None,
    ) -> None:
        self.graph: TransitionGraph = graph
        self.evaluate: Callable[[NDArray[Any]], NDArray[np.float32]] = evaluate
        self.network: Any = network
        self.num_forgotten: int = 0
        self._weights = weights_of(network)
        self.q: NDArray[np.float32] = np.zeros((graph.capacity, graph.num_actions), np.float32)
        self._known = KnownNodes(graph)
        self.num_evaluated: int = 0  # states sent through the network, repetitions not counted

    def __deepcopy__(self, memo: dict[int, Any]) -> "LeafTable":
        new = memo[id(self)] = type(self).__new__(type(self))
        evaluate = copy.deepcopy(self.evaluate, memo)
        memo_of = memo if evaluate is not self.evaluate else {id(self.network): self.network}
        network = copy.deepcopy(self.network, memo_of)  # the one that `evaluate` asks
        parts = {n: v for n, v in vars(self).items() if n not in ("evaluate", "network")}
        vars(new).update(copy.deepcopy(parts, memo), evaluate=evaluate, network=network)
        return new

    def __repr__(self) -> str:
        return f"LeafTable({np.count_nonzero(self.known):,} of {self.graph.num_nodes:,} nodes)"

    @property
    def known(self) -> NDArray[np.bool_]:
        """Has the id a value? bool [num_ids]"""
        return self.knows(np.arange(self.graph.num_ids))

    def knows(self, nodes: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Have node ids int64 [n] a value? bool [n]. KeyError for what never was an id."""
        if self._weights != (now := weights_of(self.network)):
            self.forget_all()
            self._weights = now
        self.q = grown(self.q, self.graph.capacity)
        return self._known.has(nodes)

    def values(self, nodes: ArrayLike, chunk: int = CHUNK) -> NDArray[np.float32]:
        """float32 [n, A] of distinct node ids int64 [n], evaluated `chunk` at a time."""
        nodes = as_indices("nodes", nodes)
        self.graph.require_nodes(nodes)
        missing = nodes[~self.knows(nodes)]
        if len(missing):
            self._keep(missing, chunk)
        return self.q[nodes]

    def renew(self, nodes: ArrayLike, chunk: int = CHUNK) -> None:
        """Evaluate distinct node ids int64 [n] anew, `chunk` at a time. Others stay as they are."""
        self._weights = weights_of(self.network)
        self._keep(as_indices("nodes", nodes), chunk)
        self.num_forgotten += 1

    def evaluated(self, nodes: ArrayLike, chunk: int = CHUNK) -> NDArray[np.float32]:
        """float32 [n, A] of node ids int64 [n], by the network as it is now; none is kept."""
        if chunk < 1:
            raise ValueError(f"Require chunk >= 1, got {chunk}")
        nodes = as_indices("nodes", nodes)
        found = np.empty((len(nodes), self.graph.num_actions), np.float32)
        padded = np.append(nodes, np.repeat(nodes[-1:], -len(nodes) % chunk))
        with in_evaluation(self.network):
            self.graph.require_nodes(nodes)
            for start in range(0, len(nodes), chunk):
                q = self.evaluate(self.graph.observations_of(padded[start : start + chunk]))
                if tuple(q.shape) != (shape := (chunk, self.graph.num_actions)):
                    raise ValueError(f"Require values of shape {shape}, got {tuple(q.shape)}")
                found[start : start + chunk] = q[: len(nodes) - start]
        return found

    def forget_all(self) -> None:
        """The network has changed."""
        self._known.clear()
        self.num_forgotten += 1

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
        self.q = grown(self.q, self.graph.capacity)
        copy_rows("q", saved["rows"], self.q, self.graph.num_ids)
        self._known.restore(saved["rows"]["known"])
        self._weights = weights_of(self.network)
        self.num_evaluated = int(saved["num_evaluated"])

    def _keep(self, nodes, chunk):
        found = self.evaluated(nodes, chunk)
        self.q = grown(self.q, self.graph.capacity)
        self.q[nodes] = found
        self._known.add(nodes)
        self.num_evaluated += len(nodes)


def weights_of(network: Any) -> int:
    """A checksum of a torch.nn.Module's parameters and buffers; 0 of None.

    Tensors count some writes themselves, but not those of fused optimizers or through `.data`.
    """
    code = 0
    for tensor in () if network is None else (*network.parameters(), *network.buffers()):
        number = tensor.detach().cpu()
        number = number.float() if number.dtype.itemsize < 4 else number  # bfloat16
        code = zlib.crc32(np.ascontiguousarray(number.numpy()), code)
    return code


@contextlib.contextmanager
def in_evaluation(network: Any) -> Iterator[None]:
    """A torch.nn.Module (or None) in evaluation mode: dropout and batch norm learn nothing."""
    parts = [] if network is None else [part for part in network.modules() if part.training]
    try:
        for part in parts:
            part.training = False
        yield
    finally:
        for part in parts:
            part.training = True
