"""SumTree: prioritised sampling in O(log capacity), in float64."""

import operator
from typing import SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gbcore.arrays import as_indices
from gbcore.kernels import sums


class SumTree:
    """Priorities under a binary tree of sums (Schaul et al. 2016, Appendix B.2.1).

    Sums are float64 and made anew from their two children at every change, so that no error adds
    up over a run. A change and a search are one kernel each, in which other threads wait.

    Args:
        capacity: number of priorities; all are 0 at first.

    Attributes:
        largest: the largest priority that there can be, so that the sum of all is finite.
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

        Raises:
            IndexError: for an index out of range.
            ValueError: for a priority that is negative, NaN or above `largest`, or a wrong shape.
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

        Raises:
            ValueError: for n < 1, or if no priority is positive.
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
