"""FirstTries: the worth of an action never tried, by its gains in places alike."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from gbcore.arrays import KnownNodes, grown

if TYPE_CHECKING:
    from gbcore.frontier import FrontierPlanner

MOST = 100_000  # contexts
LOCAL = 16  # cells that a step changes at most, for it to have a place
SIDES = (0, 0), (-1, 0), (1, 0), (0, -1), (0, 1)  # of a cell: itself, and those beside it
NUM_KINDS = 2 * (len(SIDES) - 1)
NONE = -1
NO_OP_TRIES = 5  # that changed nothing, of an action that never does

# A kind 0 to 7, the content of a place and of the cell beside it, has the grid changed?
Context = tuple[int, int, int, int]


class ContextGains:
    """Tells the mean gain of an action in a state by those of its contexts that explain most.

    In context k, n(k, a) tries of action a were made, and m(k, a) is the sum of their gains. One
    kind of context tells more than another: of a step, the cell ahead. For each action those kinds
    are asked that predicted its gains best at places with this content. Their sum of
    m(k, a)^2 / n(k, a) is the largest, which leaves the least squared error.

        w(s, a) = geometric mean over these k of (1 + m(k, a)) / (1 + n(k, a))

    It is 1 for a state without contexts; a context beyond the first 100,000 counts as 1.

    Args:
        num_actions: A.

    Raises ValueError for no actions.
    """

    def __init__(self, num_actions: int) -> None:
        if num_actions < 1:
            raise ValueError(f"Require num_actions >= 1, got {num_actions}")
        self.num_actions: int = num_actions
        self._rows: dict[Context, int] = {}  # of contexts, in three arrays:
        self._tries = np.zeros((256, num_actions))
        self._gains = np.zeros((256, num_actions))
        self._group = np.zeros(256, np.int32)  # row of a context's kind and content, below
        self._groups: dict[tuple[int, int], int] = {}  # kind and content -> row
        self._explained = np.zeros((256, num_actions))  # no more rows than contexts

    def __repr__(self) -> str:
        name = type(self).__name__
        return f"{name}({len(self._rows):,} contexts, {self._tries.sum():,.0f} tries)"

    def worths(self, contexts: Sequence[Context]) -> NDArray[np.float64]:
        """w(s, a) of all actions of a state with these contexts, float64 [A]; 1 without any."""
        if not contexts:
            return np.ones(self.num_actions)
        rows, is_best = (found[0] for found in self._explaining([contexts]))
        shares = (1 + self._gains[rows]) / (1 + self._tries[rows])  # [contexts, A]
        shares[rows == NONE] = 1.0
        return np.exp(np.log(shares).mean(axis=0, where=is_best))

    def gained_nothing(self, states: Sequence[Sequence[Context]], tries: int) -> NDArray[np.bool_]:
        """Did an action gain nothing in so many tries, in each context that explains it best?

        states: n with as many contexts each, at least one. Returns bool [n, A].
        """
        rows, is_best = self._explaining(states)
        gained_none = (self._tries[rows] >= tries) & (self._gains[rows] == 0)
        gained_none[rows == NONE] = False
        return (gained_none | ~is_best).all(axis=1)

    def _explaining(self, states):
        """Rows of contexts [n, contexts], -1 of unknown ones; which explain best? [.., .., A]"""
        known = [
            [(self._rows.get(one, NONE), self._groups.get(one[:2], NONE)) for one in contexts]
            for contexts in states
        ]
        rows, groups = np.moveaxis(np.array(known), 2, 0)
        explained = self._explained[groups]
        explained[groups == NONE] = 0.0
        return rows, explained >= explained.max(axis=1, keepdims=True) - 1e-9  # sums of floats

    def rows_of(self, contexts: Sequence[Context]) -> NDArray[np.int32]:
        """Numbers of contexts, int32 [n], kept from now on; -1 of those beyond MOST."""
        for context in contexts:
            if (row := len(self._rows)) < MOST and context not in self._rows:
                self._rows[context] = row
                if row == len(self._tries):
                    for name in ("_tries", "_gains", "_group", "_explained"):
                        setattr(self, name, grown(getattr(self, name), 2 * row))
                self._group[row] = self._groups.setdefault(context[:2], len(self._groups))
        return np.array([self._rows.get(context, NONE) for context in contexts], np.int32)

    def learn(self, rows: NDArray[np.int32], action: int, gain: float) -> None:
        """A try of an action gained so much, in a state with contexts of these numbers."""
        rows = rows[rows != NONE]
        groups = self._group[rows]
        self._explained[groups, action] -= self._explains(rows, action)
        self._tries[rows, action] += 1
        self._gains[rows, action] += gain
        self._explained[groups, action] += self._explains(rows, action)

    def _explains(self, rows, action):
        """m^2 / n of each."""
        return self._gains[rows, action] ** 2 / np.maximum(self._tries[rows, action], 1)


class FirstTries(ContextGains):
    """Tells the worth of an action that was never tried in a state, in levels never met.

    In a new level all is untried, and most of it is worthless: a step into a wall or into lava. In
    other levels the same was tried. A state's place is the cell changed by the step that first
    reached it; of several the one whose content is rarest in the grid: the agent, or a door that
    opened. Where the agent's cell is known, only changes at most one cell from it count; without
    one, the place is the agent's cell. A place has eight contexts: its content and that of one of
    the four cells beside it, each once alone and once with whether more than two cells differ from
    the episode's first grid. (The agent and where it began are two, a key that is gone is a third.)

    A gain is 1 for a reward, and 1 / i for the i-th new state that an episode found at one place,
    else 0; 1 for a new state without a place. In training the untried actions of that state are
    worth w / sqrt(i), w as `ContextGains` has it. So a step into another cell is worth more than a
    turn in the same one, and an agent does not walk a room again after each key that it moves.

    Where the agent's cell is known, it also tells actions that change nothing: `without_no_ops`.

    This holds for grids [H, W, ...] or planes [C, H, W] in which a step changes a few cells.
    Elsewhere, and in an episode's first state, w is 1.

    In training a `LevelFrontier` gathers this, and has a planner go where it is worth it. An
    `EpisodeGraph` reads it. One thread at a time.

    Args:
        num_actions: A.
        agent: pairs of a channel and a code, of which the agent's cell has one, alone, such as one
            pair for each way it may look; none if that is not known.

    Raises ValueError for no actions.
    """

    def __init__(self, num_actions: int, agent: Sequence[tuple[int, float]] = ()) -> None:
        super().__init__(num_actions)
        self._agent = agent
        self._changes = ContextGains(num_actions)  # gain 1 of a try that changed something

    def contexts_after(
        self, first: NDArray[np.uint64] | None, obs: NDArray[Any], next_obs: NDArray[Any]
    ) -> tuple[int, list[Context]]:
        """Place and contexts of the state that a step led to; -1 and none where it has no place.

        first: the contents in which the episode began; None of observations that are no grids.
        """
        if first is None:
            return NONE, []
        cells, (agent,) = cell_contents(next_obs), self._agents_in(next_obs[None]).tolist()
        place = place_of(cell_contents(obs), cells, agent)
        if place == NONE:
            return NONE, []
        row, column = divmod(place, cells.shape[1])
        padded = np.zeros(np.add(cells.shape, 2), np.uint64)  # np.pad is slow
        padded[1:-1, 1:-1] = cells
        around = [int(padded[row + 1 + down, column + 1 + right]) for down, right in SIDES]
        has_changed = int(np.count_nonzero(cells != first) > 2)  # more than the agent's two cells
        alone = sides_of(around)
        return place, alone + [(len(alone) + i, *pair, has_changed) for i, *pair, _ in alone]

    def without_no_ops(
        self, q: NDArray[np.floating[Any]], obs: NDArray[Any]
    ) -> NDArray[np.floating[Any]]:
        """q [n, A] of observations [n, ...], in which values above 0 of no-ops become 0.

        A no-op leaves the state as it is and has no reward: Q(s, a) = gamma V(s), never more than
        the best other action. A network that overrates it would raise V(s). For each action those
        sides of the agent are asked that explain best whether it changes anything; all four, until
        it has changed something. It is a no-op where each of them was met, with the same contents,
        in at least NO_OP_TRIES first tries, none of which changed the state or met a reward. So an
        action that always costs is none, nor is one where the state's key tells the last action.
        """
        agents = self._agents_in(obs)
        if (agents == NONE).all():
            return q
        kinds, which = np.unique(contents_around(obs, agents), axis=0, return_inverse=True)
        contexts = [sides_of(kind) for kind in kinds.tolist()]
        are_no_ops = self._changes.gained_nothing(contexts, NO_OP_TRIES)
        is_no_op = are_no_ops[which.reshape(-1)] & (agents != NONE)[:, None]
        return np.where(is_no_op, np.minimum(q, 0), q)

    def learn_change(self, obs: NDArray[Any], action: int, has_changed: bool) -> None:
        """A first try of an action in a grid or planes has changed something, or nothing."""
        agents = self._agents_in(obs[None])
        if agents[0] != NONE:
            (around,) = contents_around(obs[None], agents).tolist()
            self._changes.learn(self._changes.rows_of(sides_of(around)), action, float(has_changed))

    def _agents_in(self, obs):
        """The agent's cell in each of observations [n, ...]: int64 [n], -1 where none is known."""
        if not self._agent or obs.ndim < 3 or not len(obs):
            return np.full(len(obs), NONE)
        grids = as_grids(obs, 1)
        cells = grids.reshape(len(obs), grids.shape[1] * grids.shape[2], -1)
        has_pairs = [cells[..., channel] == code for channel, code in self._agent]
        is_agent = np.logical_or.reduce(has_pairs)
        return np.where(is_agent.any(axis=1), is_agent.argmax(axis=1), NONE)


class LevelFrontier:
    """Tells a `FrontierPlanner` the worths of untried actions, and `FirstTries` their gains.

    Raises ValueError for a planner with kinds.
    """

    def __init__(self, planner: "FrontierPlanner", first_tries: FirstTries) -> None:
        if planner.kinds_of is not None:
            raise ValueError("Require a planner without kinds")
        self.planner: FrontierPlanner = planner
        self.first_tries: FirstTries = first_tries
        self._met = KnownNodes(planner.graph)
        self._rows = np.full((planner.graph.capacity, NUM_KINDS), NONE, np.int32)  # of contexts
        self._found: dict[int, int] = {}  # place -> its new states in this episode
        self._first: NDArray[np.uint64] | None = None  # the cells in which the episode began

    def begin(self, node: int) -> None:
        """An episode begins in a node. One that was never met has no place: all worths are 1."""
        self._found.clear()
        self._first = None
        if not self._met.has(np.array([node]))[0]:
            self._meet(node, (), 1.0)

    def observe(
        self, obs: NDArray[Any], node: SupportsIndex, action: int, reward: float,
        next_obs: NDArray[Any], next_node: SupportsIndex, terminated: bool,
    ) -> None:  # fmt: skip
        """The graph has got a transition. obs, next_obs: both states, as grids or planes."""
        node, next_node = int(node), int(next_node)
        is_grid = np.ndim(obs) > 1
        if self._first is None and is_grid:
            self._first = cell_contents(obs)
        has_met = self._met.has(np.array([node, next_node]))
        is_first = has_met[0] and self.planner.graph.arrays.pair_count[node, action] == 1
        if is_first and is_grid:
            changed = terminated or next_node != node or reward != 0
            self.first_tries.learn_change(obs, action, changed)
        gain = float(reward > 0)
        if not (has_met[1] or terminated):
            place, contexts = self.first_tries.contexts_after(self._first, obs, next_obs)
            if place != NONE:
                self._found[place] = self._found.get(place, 0) + 1
            number = self._found.get(place, 1)
            gain = max(gain, 1 / number)
            self._meet(next_node, contexts, 1 / math.sqrt(number))
        if is_first:
            self.first_tries.learn(self._rows[node], action, gain)

    def _meet(self, node, contexts, novelty):
        self._met.add(np.array([node]))
        self._rows = grown(self._rows, self.planner.graph.capacity, NONE)
        self._rows[node] = self.first_tries.rows_of(contexts) if contexts else NONE
        self.planner.set_worths([node], novelty * self.first_tries.worths(contexts)[None])


def place_of(cells: NDArray[np.uint64], next_cells: NDArray[np.uint64], agent: int = NONE) -> int:
    """The cell that a step changed, of several the one whose content is rarest after it; -1 of a
    step that changed none, or more than LOCAL. Contents [H, W]; row * W + column.

    With the agent's cell: of those at most one cell from it, the nearest of alike ones; else it.
    """
    changed = np.flatnonzero(cells != next_cells)
    if agent != NONE:
        row, column = np.divmod(changed, cells.shape[1])
        distance = abs(row - agent // cells.shape[1]) + abs(column - agent % cells.shape[1])
        near = np.argsort(distance, kind="stable")[: np.count_nonzero(distance <= 1)]
        changed = changed[near] if len(near) else np.array([agent])
    if not 0 < len(changed) <= LOCAL:
        return NONE
    return int(min(changed, key=lambda i: np.count_nonzero(next_cells == next_cells.flat[i])))


def sides_of(cells: Sequence[int]) -> list[Context]:
    """The four contexts of a cell's content and those of the cells beside it."""
    return [(side, cells[0], beside, 0) for side, beside in enumerate(cells[1:])]


def contents_around(obs: NDArray[Any], cells: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Contents of a cell of each of grids or planes [n, ...] and of the four beside it, [n, 5]."""
    grids, sides = as_grids(obs, 1), np.array(SIDES)
    row, column = np.divmod(cells, grids.shape[2])
    rows, columns = row[:, None] + sides[:, 0], column[:, None] + sides[:, 1]
    is_inside = (rows >= 0) & (columns >= 0)
    is_inside &= (rows < grids.shape[1]) & (columns < grids.shape[2])
    n = np.arange(len(grids))[:, None]
    around = grids[n, np.where(is_inside, rows, 0), np.where(is_inside, columns, 0)]
    return np.where(is_inside, contents(around, 2), np.uint64(0))


def are_planes(shape: Sequence[int]) -> bool:
    """Is it the shape [C, H, W] of planes? They are fewer than rows and columns, or these alone are
    as many.
    """
    return len(shape) == 3 and (shape[0] < min(shape[1:]) or shape[0] != shape[1] == shape[2])


def as_grids(obs: NDArray[Any], num_axes: int = 0) -> NDArray[Any]:
    """Planes [C, H, W] as a grid [H, W, C]; others as they are. num_axes: axes in front."""
    return np.moveaxis(obs, num_axes, -1) if are_planes(obs.shape[num_axes:]) else obs


def cell_contents(grids: NDArray[Any], num_axes: int = 0) -> NDArray[np.uint64]:
    """A number of each cell's content, uint64: of grids [H, W, ...] or [C, H, W] [H, W].

    num_axes: axes in front, which stay.
    """
    return contents(as_grids(grids, num_axes), num_axes + 2)


def kinds_of_grids(obs: NDArray[Any]) -> NDArray[np.uint64]:
    """Kinds uint64 [n] of grids or planes [n, ...]: those with like cells, wherever these lie.

    So an object that is carried elsewhere makes no new kind, and an open door does.
    """
    return cell_contents(obs, num_axes=1).sum(axis=(1, 2))


def contents(cells: NDArray[Any], num_axes: int) -> NDArray[np.uint64]:
    """A number of each cell's content, uint64 of the first num_axes axes' shape."""
    cells = cells + cells.dtype.type(0) if cells.dtype.kind == "f" else cells  # no -0.0
    kept = cells.shape[:num_axes]
    cells = np.ascontiguousarray(cells).reshape(*kept, -1).view(np.uint8)
    mixed = np.full(kept, 0xCBF29CE484222325, np.uint64)
    for byte in np.moveaxis(cells, -1, 0):
        mixed = (mixed ^ byte) * np.uint64(0xFF51AFD7ED558CCD)
        mixed ^= mixed >> np.uint64(32)
    return mixed
