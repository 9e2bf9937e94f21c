"""FirstTries: the worth of an action never tried, by what it led to in places alike."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from gbcore.arrays import KnownNodes, check_array, grown

if TYPE_CHECKING:
    from gbcore.frontier import FrontierPlanner

MOST = 100_000  # contexts
LOCAL = 16  # cells that a step changes at most, for it to have a place
NEIGHBOURS = (-1, 0), (1, 0), (0, -1), (0, 1)
NUM_KINDS = 2 * len(NEIGHBOURS)
NONE = -1


class FirstTries:
    """Tells a `FrontierPlanner` which untried actions are worth it, in levels never met.

    In a new level all is untried, and most of it is worthless: a step into a wall or into lava. In
    other levels the same was tried. A state's place is the cell changed by the step that first
    reached it; of several the one whose content is rarest in the grid: the agent, or a door that
    opened. Its eight contexts are its content and that of one of the four cells beside it, each
    once alone and once with whether more than two cells differ from the episode's first grid: the
    agent and where it began are two, a key that is gone is a third.

    In context k, n(k, a) first tries of action a were made, and m(k, a) is the sum of their gains.
    One kind of context tells more than another: of a step, the cell ahead. So those are asked that
    have explained the gains of this action best, where a place had this content: of their kind the
    sum of m(k, a)^2 / n(k, a) is the largest. (It leaves the least squared error.)

        w(s, a) = geometric mean over these k of (1 + m(k, a)) / (1 + n(k, a))

    A gain is 1 for a reward, and 1 / sqrt(i) for the i-th new state that an episode found at one
    place, else 0. So a step into another cell is worth more than a turn in the same one, and an
    agent does not walk a room again after each key that it moves.

    This holds for grids [H, W, ...], channels last, of which a step changes a few cells. Elsewhere,
    in an episode's first state, and of contexts beyond 100,000, w is 1. One thread at a time.

    Args:
        planner: the FrontierPlanner, without kinds.

    Raises:
        ValueError: for a planner with kinds.
    """

    def __init__(self, planner: "FrontierPlanner") -> None:
        if planner.kinds_of is not None:
            raise ValueError("Require a planner without kinds")
        self.planner: FrontierPlanner = planner
        graph = planner.graph
        self._met = KnownNodes(graph)
        self._place = np.full((graph.capacity, NUM_KINDS), NONE, np.int32)  # contexts
        self._rows: dict[tuple[int, int, int, int], int] = {}  # of contexts, in three arrays:
        self._tries = np.zeros((256, graph.num_actions))
        self._gains = np.zeros((256, graph.num_actions))
        self._group = np.zeros(256, np.int32)  # row of a context's kind and content, below
        self._groups: dict[tuple[int, int], int] = {}  # kind and content -> row
        self._explained = np.zeros((256, graph.num_actions))  # no more rows than contexts
        self._found: dict[int, int] = {}  # place -> its new states in this episode
        self._first: NDArray[np.uint64] | None = None  # the cells in which the episode began

    def begin(self, node: int) -> None:
        """An episode begins in a node. One that was never met has no place, and is worth all."""
        self._found.clear()
        self._first = None
        if not self._met.has(np.array([node]))[0]:
            self._meet(node)
            self.planner.set_worths([node], np.ones((1, self.planner.graph.num_actions)))

    def observe(
        self, obs: NDArray[Any], node: SupportsIndex, action: int, reward: float,
        next_obs: NDArray[Any], next_node: SupportsIndex, terminated: bool,
    ) -> None:  # fmt: skip
        """The graph has got a transition. obs, next_obs: the grids [H, W, ...] of both states."""
        node, next_node = int(node), int(next_node)
        graph = self.planner.graph
        if self._first is None and np.ndim(obs) > 1:
            self._first = cell_contents(obs)
        is_new = not self._met.has(np.array([next_node]))[0]
        is_first = graph.arrays.pair_count[node, action] == 1 and self._met.has(np.array([node]))[0]
        contexts, gain = self._contexts(node), float(reward > 0)
        if is_new and not terminated:
            self._meet(next_node)
            gain = max(gain, 1 / math.sqrt(self._locate(obs, next_obs, next_node)))
            self.planner.set_worths([next_node], self._worths(self._contexts(next_node))[None])
        if is_first:
            groups = self._group[contexts]
            self._explained[groups, action] -= self._explains(contexts, action)
            self._tries[contexts, action] += 1
            self._gains[contexts, action] += gain
            self._explained[groups, action] += self._explains(contexts, action)

    def _explains(self, contexts, action):
        """m^2 / n of each."""
        return self._gains[contexts, action] ** 2 / np.maximum(self._tries[contexts, action], 1)

    def _worths(self, contexts):
        """w of all actions, float64 [A]; 1 without contexts."""
        if not len(contexts):
            return np.ones(self.planner.graph.num_actions)
        shares = (1 + self._gains[contexts]) / (1 + self._tries[contexts])
        explained = self._explained[self._group[contexts]]
        is_best = explained >= explained.max(axis=0) - 1e-9  # sums of floats
        return np.exp(np.log(shares).mean(axis=0, where=is_best))

    def _meet(self, node):
        self._place = grown(self._place, self.planner.graph.capacity, NONE)
        self._met.add(np.array([node]))
        self._place[node] = NONE

    def _contexts(self, node):
        """Rows of a node's contexts, int32 [8], or [0] of a start."""
        return self._place[node][self._place[node] != NONE]

    def _locate(self, obs, next_obs, node):
        """Set the contexts of a node that is new. Returns how many new ones its place has."""
        if np.ndim(obs) < 2:
            return 1
        cells = cell_contents(next_obs)
        changed = np.flatnonzero(cell_contents(obs) != cells)
        if not 0 < len(changed) <= LOCAL:
            return 1
        place = int(min(changed, key=lambda i: np.count_nonzero(cells == cells.flat[i])))
        content, (row, column) = int(cells.flat[place]), divmod(place, cells.shape[1])
        has_changed = int(np.count_nonzero(cells != self._first) > 2)  # more than these two cells
        for side, (down, right) in enumerate(NEIGHBOURS):
            x, y = row + down, column + right
            is_inside = 0 <= x < cells.shape[0] and 0 <= y < cells.shape[1]
            beside = int(cells[x, y]) if is_inside else 0
            self._place[node, side] = self._row_of((side, content, beside, 0))
            kind = len(NEIGHBOURS) + side
            self._place[node, kind] = self._row_of((kind, content, beside, has_changed))
        self._found[place] = self._found.get(place, 0) + 1
        return self._found[place]

    def _row_of(self, context):
        row = self._rows.get(context, NONE)
        if row == NONE and len(self._rows) < MOST:
            row = self._rows[context] = len(self._rows)
            if row == len(self._tries):
                for name in ("_tries", "_gains", "_group", "_explained"):
                    setattr(self, name, grown(getattr(self, name), 2 * row))
            self._group[row] = self._groups.setdefault(context[:2], len(self._groups))
        return row

    def state(self) -> dict[str, Any]:
        """What `restore` takes back."""
        n, num_ids = len(self._rows), self.planner.graph.num_ids
        self._place = grown(self._place, self.planner.graph.capacity, NONE)
        return {
            "met": self._met.state(),
            "place": self._place[:num_ids],
            "contexts": np.array(list(self._rows), np.uint64).reshape(-1, 4),
            "tries": self._tries[:n],
            "gains": self._gains[:n],
            "explained": self._explained[: len(self._groups)],
            "found": np.array(list(self._found.items()), np.int64).reshape(-1, 2),
            "first": self._first,
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go on with what `state` returned, of this graph or of one restored from its state.

        Raises:
            KeyError: for what is missing.
            ValueError: for arrays that do not belong to the graph.
        """
        graph, n = self.planner.graph, len(saved["contexts"])
        check_array("met", saved["met"], np.bool_, (graph.num_ids,))
        check_array("place", saved["place"], np.int32, (graph.num_ids, NUM_KINDS))
        for name in ("tries", "gains"):
            check_array(name, saved[name], np.float64, (n, graph.num_actions))
        self._met.restore(saved["met"])
        self._place = grown(saved["place"].copy(), graph.capacity, NONE)
        self._rows, self._groups = {}, {}
        for context in saved["contexts"].tolist():
            self._row_of(tuple(context))
        for name in ("tries", "gains", "explained"):
            own = getattr(self, f"_{name}")
            own[: len(saved[name])], own[len(saved[name]) :] = saved[name], 0
        self._found = dict(saved["found"].tolist())
        self._first = saved["first"]


def cell_contents(grids: NDArray[Any], num_axes: int = 2) -> NDArray[np.uint64]:
    """A number of each cell's content, uint64: of [H, W, ...] [H, W]; more axes may come first.

    num_axes: those that are kept, in front.
    """
    kept = grids.shape[:num_axes]
    cells = np.ascontiguousarray(grids).reshape(*kept, -1).view(np.uint8)
    mixed = np.full(kept, 0xCBF29CE484222325, np.uint64)
    for byte in np.moveaxis(cells, -1, 0):
        mixed = (mixed ^ byte) * np.uint64(0xFF51AFD7ED558CCD)
        mixed ^= mixed >> np.uint64(32)
    return mixed
