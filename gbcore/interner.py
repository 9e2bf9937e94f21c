"""Interner: arrays of one shape and dtype to dense ids; equal bytes, equal id."""

import math
import operator
from collections.abc import Iterable, Mapping
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from gbcore.arrays import copy_rows, grown
from gbcore.kernels import hashing
from gbcore.kernels.hashing import EMPTY, TABLE_FREE, TABLE_IDS, TABLE_SIZE, Table


class Interner:
    """Gives equal arrays the same small integer, and freed integers out again.

    Matching is exact: a hash finds the candidates, their bytes decide. Ids are dense: the next new
    array gets the last freed id, or else the number of ids given out so far. Arrays of bool take a
    bit for each element.

    Args:
        shape, dtype: of every array; anything of fixed size > 0, else ValueError.
        capacity: ids to reserve room for. More ids double the room, at the price of a copy.
    """

    def __init__(
        self, shape: Iterable[SupportsIndex], dtype: DTypeLike, capacity: int = 1024
    ) -> None:
        self.shape: tuple[int, ...] = tuple(map(operator.index, shape))
        self.dtype: np.dtype[Any] = np.dtype(dtype)
        self._is_packed, self._size = self.dtype == np.bool_, math.prod(self.shape)
        self._num_bytes = (
            -(-self._size // 8) if self._is_packed else self.dtype.itemsize * self._size
        )
        if min((self._num_bytes, *self.shape)) < 1 or self.dtype.hasobject:
            raise ValueError(f"Require arrays of fixed size > 0, got {self.shape} of {self.dtype}")
        # A key is padded to whole 64-bit words: hashing and comparing go word by word.
        self._num_words = -(-self._num_bytes // 8)
        self.table: Table = Table(
            slots=np.zeros(0, np.int32),
            hashes=np.zeros(0, np.uint64),
            rows=np.zeros((0, self._num_words), np.uint64),
            links=np.zeros(0, np.int32),
            generations=np.zeros(0, np.int32),
            totals=np.array([0, 0, EMPTY], np.int64),
        )
        self._make_room(max(int(capacity), 16))

    def __len__(self) -> int:
        """Number of ids in use."""
        return int(self.table.totals[TABLE_SIZE])

    @property
    def num_ids(self) -> int:
        """Number of ids ever given out: every id in use is below it."""
        return int(self.table.totals[TABLE_IDS])

    @property
    def capacity(self) -> int:
        """Ids that there is room for."""
        return len(self.table.hashes)

    @property
    def generations(self) -> NDArray[np.int32]:
        """How often each id was freed: int32 [num_ids], a view, read-only."""
        generations = self.table.generations[: self.num_ids]
        generations.flags.writeable = False
        return generations

    def take(self, ids: ArrayLike) -> NDArray[Any]:
        """The interned arrays of some ids: [*ids.shape, *shape]; void for freed ids.

        Raises KeyError for an id that no node ever had.
        """
        ids = np.asarray(ids)
        self.require_ids(ids)
        rows = self.table.rows[ids.reshape(-1)].view(np.uint8)[:, : self._num_bytes]
        if self._is_packed:
            arrays = np.unpackbits(rows, axis=1, count=self._size).view(np.bool_)
        else:
            arrays = np.ascontiguousarray(rows).view(self.dtype)
        return arrays.reshape((*ids.shape, *self.shape))

    def require_ids(self, ids: NDArray[np.int64]) -> None:
        """Raises KeyError for an array of ids in which one never was an id."""
        least, most = (ids.min(), ids.max()) if ids.size else (0, -1)
        if least < 0 or most >= self.num_ids:
            raise KeyError(f"Require 0 <= id < {self.num_ids}, got {least} to {most}")

    def add(self, arrays: NDArray[Any]) -> NDArray[np.int64]:
        """Ids int64 [n] of arrays [n, *shape] of the dtype, in their order inserted where new."""
        keys, ids, done = self._keys_of(arrays), np.empty(len(arrays), np.int64), 0
        while (done := hashing.intern_keys(self.table, keys, done, ids)) < len(keys):
            self._make_room(2 * self.capacity)
        return ids

    def find(self, arrays: NDArray[Any]) -> NDArray[np.int64]:
        """Ids int64 [n] of arrays [n, *shape] of the dtype, -1 for unknown ones."""
        ids = np.empty(len(arrays), np.int64)
        hashing.find_keys(self.table, self._keys_of(arrays), ids)
        return ids

    def _keys_of(self, arrays):
        """Keys uint64 [n, words] of arrays [n, *shape]."""
        flat = np.ascontiguousarray(arrays).reshape(len(arrays), self._size)
        flat = np.packbits(flat, axis=1) if self._is_packed else flat.view(np.uint8)
        if self._num_bytes % 8 == 0:  # writeable, so that there is one compiled kernel
            return np.require(flat.view(np.uint64), requirements=["ALIGNED", "WRITEABLE"])
        keys = np.zeros((len(arrays), self._num_words), np.uint64)
        keys.view(np.uint8)[:, : self._num_bytes] = flat
        return keys

    def _make_room(self, capacity):  # the old table is void
        slots = np.full(slots_for(capacity), EMPTY, np.int32)
        arrays = (grown(array, capacity) for array in self.table[1:-1])
        self.table = Table(slots, *arrays, self.table.totals)
        hashing.rebuild_slots(self.table)

    def state(self, prefix: str) -> dict[str, NDArray[Any]]:
        """Arrays for `restore`, by their names with a prefix; views."""
        table, n = self.table, self.num_ids
        columns = {"rows": table.rows[:n], "links": table.links[:n], "totals": table.totals}
        return {prefix + name: column for name, column in columns.items()}

    def restore(self, prefix: str, saved: Mapping[str, NDArray[Any]]) -> None:
        """Go on from arrays of `state`: same ids, of generation 0. Raises as `copy_rows`."""
        n = len(saved[f"{prefix}links"])
        while self.capacity < n:
            self._make_room(2 * self.capacity)
        for name, rows in (("rows", n), ("links", n), ("totals", 3)):
            copy_rows(prefix + name, saved, getattr(self.table, name), rows)
        self.table.generations[:n] = 0
        self.table.slots[:] = EMPTY
        hashing.rebuild_slots(self.table)

    def check_valid(self) -> list[str]:
        """A sentence for each broken invariant."""
        table, links, problems = self.table, self.table.links[: self.num_ids], []
        live = np.flatnonzero(links == hashing.LIVE)
        held, free = table.slots[table.slots != EMPTY], int(table.totals[TABLE_FREE])
        if sorted(held.tolist()) != live.tolist():
            problems.append("the hash slots do not hold each id in use exactly once")
        freed = set()
        while 0 <= free < len(links) and free not in freed:
            freed.add(free)
            free = int(links[free])
        if free != EMPTY or len(freed) + len(live) != len(links) or len(live) != len(self):
            problems.append("an id is neither in use nor free, or both")
        found = np.empty(len(live), np.int64)
        hashing.find_keys(table, table.rows[live], found)
        problems += [f"id {i} is not found by its key" for i in live[found != live]]
        return problems


def slots_for(capacity: int) -> int:
    """Hash slots for so many keys: a power of two, at most half full."""
    return 1 << (2 * capacity - 1).bit_length()
