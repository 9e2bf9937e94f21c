"""Arrays that grow with their graph, marks of nodes, and checks of outside arrays."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

if TYPE_CHECKING:
    from gbcore.graph import TransitionGraph

UNKNOWN = -1  # a generation that no id has


def grown(array: NDArray[Any], length: int, fill: float = 0) -> NDArray[Any]:
    """The array, or a longer copy where it has fewer than `length` rows; new rows hold `fill`.

    By node id the length is `graph.capacity`: it doubles, so that copies cost O(1) per node.
    """
    if len(array) >= length:
        return array
    bigger = np.zeros((length, *array.shape[1:]), array.dtype)  # pages come as they are written
    if fill:
        bigger[len(array) :] = fill
    bigger[: len(array)] = array
    return bigger


def check_array(name: str, array: object, dtype: DTypeLike, shape: tuple[int, ...]) -> None:
    """Raise ValueError, naming the array, unless it is one of the dtype and shape."""
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.shape != shape:
        kind = f"{getattr(array, 'dtype', type(array))} {np.shape(array)}"  # type: ignore[arg-type]
        raise ValueError(f"Require {name} of {np.dtype(dtype)} {shape}, got {kind}")


def copy_rows(
    name: str, saved: Mapping[str, NDArray[Any]], target: NDArray[Any], num_rows: int
) -> None:
    """Write the saved array of a name into the first rows of one of its dtype and shape.

    Raises as `check_array`, and KeyError where there is none of the name.
    """
    check_array(name, saved[name], target.dtype, (num_rows, *target.shape[1:]))
    target[:num_rows] = saved[name]


def as_indices(name: str, values: ArrayLike) -> NDArray[np.int64]:
    """A contiguous int64 [n]. Raises TypeError or ValueError, naming the argument."""
    if isinstance(values, np.ndarray) and values.dtype == np.int64 and values.ndim == 1:
        return np.ascontiguousarray(values)
    values = np.asarray(values)
    if values.dtype.kind not in "iu" and values.size:
        raise TypeError(f"Require integers for {name}, got dtype {values.dtype}")
    if values.ndim != 1:
        raise ValueError(f"Require {name} of one axis, got shape {values.shape}")
    if values.dtype.kind == "u" and values.dtype.itemsize == 8:
        values = np.minimum(values, np.iinfo(np.int64).max)  # none of an id or action; not -1
    return np.ascontiguousarray(values, np.int64)


def is_many(values: object) -> bool:
    """Is it [n] rather than one number? Integers, lists and arrays alike."""
    if isinstance(values, np.ndarray):
        return values.ndim > 0
    return not isinstance(values, int) and np.ndim(values) > 0  # type: ignore[arg-type]


class KnownNodes:
    """Marks of nodes, by id. A node that is freed loses its mark."""

    def __init__(self, graph: "TransitionGraph") -> None:
        self._graph = graph
        self._generation = np.full(graph.capacity, UNKNOWN, np.int32)  # of the id, once added

    def has(self, nodes: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Are ids int64 [n] known? bool [n]. KeyError for an id that no node ever had."""
        self._graph._keys.require_ids(nodes)
        return self._with_room()[nodes] == self._graph.generations[nodes]

    def add(self, nodes: NDArray[np.int64]) -> None:
        """Ids int64 [n] are known from now on."""
        self._with_room()[nodes] = self._graph.generations[nodes]

    def nodes(self) -> NDArray[np.int64]:
        """The known ids, int64 [n]."""
        return np.flatnonzero(self.has(np.arange(self._graph.num_ids)))

    def __getstate__(self) -> tuple["TransitionGraph", NDArray[np.int64]]:
        return self._graph, self.nodes()  # a restored graph counts generations anew

    def __setstate__(self, state: tuple["TransitionGraph", NDArray[np.int64]]) -> None:
        self._graph, known = state
        self._generation = np.full(self._graph.capacity, UNKNOWN, np.int32)
        self.add(known)

    def clear(self) -> None:
        """None is known."""
        self._generation[:] = UNKNOWN

    def _with_room(self):
        self._generation = grown(self._generation, self._graph.capacity, UNKNOWN)
        return self._generation
