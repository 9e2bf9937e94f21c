"""FrontierPlanner: the way to what was never tried. FrontierEpisodes: when to go there."""

import operator
from collections.abc import Mapping
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from gbcore import frontier_kernels
from gbcore.arrays import Holder, all_grown, check_array, copy_rows
from gbcore.frontier_kernels import CELLS_GIVEN, HEAP_SIZE, STACK_SIZE, PlanArrays
from gbcore.graph import KnownNodes, TransitionGraph
from gbcore.kernels import EMPTY, FREED

UNLIMITED = 2**62  # edges
MEMORY = 10_000  # steps over which a rate is taken
WORTHWHILE = 1e-3  # states found per planned step
BUDGET = 2_000  # edges read per `plan`, of which an episode's first step makes two
CHUNK = 1_000  # states whose kinds are told at a time
# The arrays that grow, and what is in them where nothing was written.
NODE_ARRAYS = {
    "value": 1, "worth": 1, "first_in": EMPTY, "first_out": EMPTY, "place": EMPTY, "stack": 0,
    "on_stack": 0, "heap": 0, "priority": 0,
}  # fmt: skip
CELL_ARRAYS = dict.fromkeys(("cell_source", "cell_target", "next_in", "previous_in", "next_out"), 0)


class FrontierPlanner(Holder):
    """Values of a graph's states whose only reward is to try something for the first time.

    With c(s, a) the count of a pair, f(T) those of its transitions, and V(s) = max_a Q(s, a):

        Q(s, a) = w(s)                                                            if c(s, a) = 0
        Q(s, a) = (prior w(s) + discount sum_T f(T) (1 - done) V(s')) / (prior + c(s, a))   else

    w(s) is 1, or by kind 1 / n for the n-th state that was found of its kind, and stays so. States
    [H, W, ...] are of a kind if they have the same cells, wherever these are. So what combines
    known things anew is worth little: an object that lies elsewhere leads to no new kind, a door
    that opens does. Where observations have one axis, each is a kind of its own. Of kinds, as of
    states, there is a bounded memory: those without a state may be counted anew.

    With prior 0 and w = 1 (the defaults) this is the expected discount ** (steps to an untried
    pair) of the best policy on the graph. A prior counts as so many observations in which the pair
    led into the unknown: what was tried seldom stays attractive, with a bonus that shrinks as
    1 / count.

    Values are kept up to date by prioritised sweeping: the graph tells which transitions changed,
    `plan` follows the consequences through the predecessors, a bounded number of edges at a time.
    The rest waits. Where nothing waits, every state satisfies the equation to within the tolerance.
    The smallest slice is one state with its edges, outgoing and incoming.

    Threads wait for each other, as those of the graph. `copy.deepcopy` copies the graph, too; a
    planner that is copied or pickled with its graph follows the copy.

    Args:
        graph: the TransitionGraph; what it holds already is planned over, too.
        discount: of the way, in (0, 1).
        prior: observations of the unknown that a tried pair is credited with, >= 0.
        tolerance: relative change of a value that is not followed; (1 - discount) / 50 if None.
        by_kind: is an untried pair worth less, the more states of the kind were found before?

    Raises:
        ValueError: for a discount, prior or tolerance out of range.
    """

    def __init__(
        self,
        graph: TransitionGraph,
        discount: float = 0.95,
        prior: float = 0.0,
        tolerance: float | None = None,
        by_kind: bool = False,
    ) -> None:
        if not 0 < discount < 1:
            raise ValueError(f"Require 0 < discount < 1, got {discount}")
        if not 0 <= prior < np.inf:
            raise ValueError(f"Require a finite prior >= 0, got {prior}")
        if tolerance is None:
            tolerance = (1 - discount) / 50
        if not 0 < tolerance < 1 - discount:
            raise ValueError(f"Require 0 < tolerance < 1 - discount, got {tolerance}")
        self.graph: TransitionGraph = graph
        self.discount: float = float(discount)
        self.prior: float = float(prior)
        self.tolerance: float = float(tolerance)
        self.by_kind: bool = by_kind and len(graph.obs_shape) > 1
        self._q = np.zeros(graph.num_actions)
        with graph.lock:
            self._changes = graph.watch()  # pairs of nodes, since the last plan
            self._clear(num_cells=graph.num_edges)
            edges = graph.edges()
            pairs = np.stack([edges["source"], edges["next"]], axis=1)
            self._appraise(np.unique(pairs))
            frontier_kernels.follow_changes(graph.arrays, self._plan, pairs)

    def __repr__(self) -> str:
        return f"FrontierPlanner({self.graph.num_nodes:,} nodes, {self.num_waiting:,} waiting)"

    def _clear(self, num_cells):
        room, num_cells = self.graph.capacity, max(num_cells, 1024)
        self._changes.clear()
        self._kinds: dict[int, int] = {}  # -> number of states found
        self._appraised = KnownNodes(self.graph)
        self._plan = PlanArrays(
            value=np.ones(room),
            worth=np.ones(room),
            first_in=np.full(room, EMPTY, np.int64),
            first_out=np.full(room, EMPTY, np.int64),
            cell_source=np.empty(num_cells, np.int64),
            cell_target=np.empty(num_cells, np.int64),
            next_in=np.empty(num_cells, np.int64),
            previous_in=np.empty(num_cells, np.int64),
            next_out=np.empty(num_cells, np.int64),
            stack=np.empty(room, np.int64),
            on_stack=np.zeros(room, np.bool_),
            heap=np.empty(room, np.int64),
            place=np.full(room, EMPTY, np.int64),
            priority=np.zeros(room),
            totals=np.array([0, EMPTY, 0, 0], np.int64),
        )

    # ----------------------------------------------------------------------------------------------
    # Planning
    # ----------------------------------------------------------------------------------------------

    def plan(self, budget: SupportsIndex | None = None) -> int:
        """Bring values up to date, reading about so many edges; all that it takes if None.

        Returns the number of edges that were read. Raises ValueError for a budget < 1.
        """
        budget = UNLIMITED if budget is None else min(operator.index(budget), UNLIMITED)
        if budget < 1:
            raise ValueError(f"Require budget >= 1, got {budget}")
        with self.graph.lock:
            plan, changes = self._changes_with_room()
            num_read = frontier_kernels.make_plan(
                self.graph.arrays, plan, changes, self.discount, self.prior, self.tolerance,
                budget, self._q,
            )  # fmt: skip
            self._changes.clear()
            return num_read

    @property
    def num_waiting(self) -> int:
        """Number of states, and of changes, that wait for a further `plan`."""
        stack, heap = self._plan.totals[[STACK_SIZE, HEAP_SIZE]].tolist()
        return stack + heap + len(self._changes)

    @property
    def values(self) -> NDArray[np.float64]:
        """V(s) by node id: float64 [num_ids], a view, to be read only. 1 for ids not in use."""
        with self.graph.lock:
            values = self._make_room().value[: self.graph.num_ids]
        values.flags.writeable = False
        return values

    def action_values(self, node: SupportsIndex) -> NDArray[np.float64]:
        """Q(s, a) of a node: float64 [A]. Raises KeyError for another id."""
        q = np.empty(self.graph.num_actions)
        with self.graph.lock:
            self.graph.require_node(node)
            plan = self._make_room()
            frontier_kernels.back_up_actions(
                self.graph.arrays, plan, operator.index(node), self.discount, self.prior, q
            )
        return q

    def act(self, node: SupportsIndex, rng: np.random.Generator) -> int | None:
        """A greedy action of a node, ties at random; None where nothing untried can be reached.

        Args:
            node: the id that `graph.node` returned for the state.
            rng: np.random.Generator; one draw is taken from it unless the result is None.

        Raises:
            KeyError: for what is not the id of a node.
        """
        q = self.action_values(node)
        best = q.max()
        if best < frontier_kernels.FLOOR:
            return None
        ties = np.flatnonzero(q >= best * (1 - self.tolerance))
        return int(ties[rng.integers(len(ties))])

    def num_untried(self) -> int:
        """Number of pairs never tried, of all states but those that only end episodes."""
        with self.graph.lock:
            return int(frontier_kernels.count_untried(self.graph.arrays, self.graph.num_ids))

    # ----------------------------------------------------------------------------------------------
    # Storage
    # ----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, NDArray[Any]]:
        """Arrays that `restore` takes back, with the same further behaviour; some are views."""
        with self.graph.lock:
            plan, changes = self._changes_with_room()
            frontier_kernels.follow_changes(self.graph.arrays, plan, changes)
            self._changes.clear()
            n = self.graph.num_ids
            number = np.empty(n, np.int64)
            source = np.empty(plan.totals[CELLS_GIVEN], np.int64)
            source = source[: frontier_kernels.list_predecessors(plan, n, number, source)]
            heap = plan.heap[: plan.totals[HEAP_SIZE]]
            rows = {
                "value": plan.value[:n],
                "num_predecessors": number,
                "predecessors": source,
                "stack": plan.stack[: plan.totals[STACK_SIZE]],
                "heap": heap,
                "priority": plan.priority[heap],
            }
            if self.by_kind:
                rows["worth"] = np.where(self._appraised.state(), plan.worth[:n], 0)
                rows["kinds"] = np.array(list(self._kinds.items()), np.uint64).reshape(-1, 2)
            return rows

    def restore(self, saved: Mapping[str, NDArray[Any]]) -> None:
        """Go on with what `state` returned, of this graph or of one restored from its state.

        Raises:
            KeyError: for an array that is missing.
            ValueError: for arrays that lead out of the graph. Then nothing has changed.
        """
        n = self.graph.num_ids
        value, number = saved["value"], saved["num_predecessors"]
        check_array("value", value, np.float64, (n,))
        check_array("num_predecessors", number, np.int64, (n,))
        for name in ("predecessors", "stack", "heap"):
            check_array(name, saved[name], np.int64, (np.size(saved[name]),))
            if not ((saved[name] >= 0) & (saved[name] < n)).all():
                raise ValueError(f"Require nodes of the graph in the {name}")
        source, stack, heap = saved["predecessors"], saved["stack"], saved["heap"]
        check_array("priority", saved["priority"], np.float64, heap.shape)
        if (number < 0).any() or number.sum(dtype=np.float64) != len(source):
            raise ValueError("Require as many predecessors as are counted")
        if len(np.unique(stack)) < len(stack) or len(np.unique(heap)) < len(heap):
            raise ValueError("Require each node once in the stack, and once in the heap")
        if self.by_kind:
            worth, kinds = saved["worth"], saved["kinds"]  # worth 0: not found yet
            check_array("worth", worth, np.float64, (n,))
            check_array("kinds", kinds, np.uint64, (np.size(kinds) // 2, 2))
            if not ((worth >= 0) & (worth <= 1)).all():
                raise ValueError("Require 0 <= worth <= 1")

        with self.graph.lock:
            self._clear(num_cells=len(source))
            plan = self._plan
            plan.value[:n] = value
            frontier_kernels.link_listed(plan, number, source)
            plan.stack[: len(stack)], plan.on_stack[stack] = stack, True
            plan.heap[: len(heap)], plan.place[heap] = heap, np.arange(len(heap))
            plan.priority[heap] = saved["priority"]
            if self.by_kind:
                plan.worth[:n] = np.where(worth > 0, worth, 1)
                self._appraised.restore(worth > 0)
                self._kinds = dict(kinds.tolist())
            plan.totals[[STACK_SIZE, HEAP_SIZE]] = len(stack), len(heap)

    def check_valid(self) -> list[str]:
        """What is broken, one sentence each; empty if every invariant holds."""
        with self.graph.lock:
            state, problems = self.state(), []
            n, totals = self.graph.num_ids, self._plan.totals
            if not self._are_predecessors(state["predecessors"], state["num_predecessors"]):
                problems.append("the predecessors are not those of the graph")
            unused, cell = 0, totals[frontier_kernels.FREE_CELL]
            while cell != EMPTY:
                unused, cell = unused + 1, self._plan.next_in[cell]
            if unused + len(state["predecessors"]) != totals[CELLS_GIVEN]:
                problems.append("a cell is neither in use nor free")
            on_stack = np.flatnonzero(self._plan.on_stack)
            if not np.array_equal(np.sort(state["stack"]), on_stack):
                problems.append("the stack and its marks differ")
            place = self._plan.place[state["heap"]]
            if not np.array_equal(place, np.arange(len(place))) or (
                np.count_nonzero(self._plan.place != EMPTY) != len(place)
            ):
                problems.append("the heap and its places differ")
            if self.num_waiting == 0:
                arrays, q = self.graph.arrays, self._q
                for node in np.flatnonzero(arrays.degree[:n] > 0):
                    value = self._plan.value[node]
                    backed_up = frontier_kernels.back_up_state(
                        arrays, self._plan, node, self.discount, self.prior, q
                    )
                    if abs(backed_up - value) > self.tolerance * max(backed_up, value):
                        problems.append(f"node {node}: value {value}, {backed_up} by its actions")
            return problems

    def _are_predecessors(self, source, number):
        """Are these the pairs (node, next node) of all transitions that go on, each once?"""
        pairs = np.stack([source, np.repeat(np.arange(len(number)), number)], axis=1)
        edges = self.graph.edges()
        linked = np.stack([edges["source"], edges["next"]], axis=1)[~edges["terminated"]]
        return np.array_equal(pairs[np.lexsort(pairs.T[::-1])], np.unique(linked, axis=0))

    # What grows the arrays returns them: arrays that were read before may be too short.

    def _changes_with_room(self):
        """The arrays, with room for what the changes bring, and those not followed yet [n, 2]."""
        plan = self._make_room()
        changes = np.array(self._changes, np.int64).reshape(-1, 2)
        self._appraise(changes.reshape(-1))
        room = plan.totals[CELLS_GIVEN] + len(changes)
        if room > len(plan.cell_source):
            room = max(room, 2 * len(plan.cell_source))
            self._plan = plan = all_grown(plan, CELL_ARRAYS, room)
        return plan, changes

    def _make_room(self):
        if len(self._plan.value) < self.graph.capacity:
            self._plan = all_grown(self._plan, NODE_ARRAYS, self.graph.capacity)
        return self._plan

    def _appraise(self, nodes):
        """Worth of the nodes that are new: 1 / n for the n-th of its kind."""
        if not self.by_kind:
            return
        plan, nodes = self._plan, np.array(list(dict.fromkeys(nodes.tolist())), np.int64)
        nodes = nodes[~self._appraised.has(nodes)]
        in_use = self.graph.arrays.in_degree[nodes] != FREED
        plan.worth[nodes] = 1
        for node, kind in self._kinds_of(nodes[in_use]):
            self._kinds[kind] = number = self._kinds.get(kind, 0) + 1
            plan.worth[node] = 1 / number
        self._appraised.add(nodes[in_use])
        if len(self._kinds) > 2 * self.graph.num_ids:  # most are of states that are gone
            kept = {kind for _, kind in self._kinds_of(np.flatnonzero(self._appraised.state()))}
            self._kinds = {kind: n for kind, n in self._kinds.items() if kind in kept}
        for node in nodes:
            frontier_kernels.push_stack(plan, node)

    def _kinds_of(self, nodes):
        """Pairs of a node and a hash of its cells in whatever order, of ids int64 [n]."""
        for first in range(0, len(nodes), CHUNK):
            part = nodes[first : first + CHUNK]
            obs = self.graph.observations_of(part)  # [n, H, W, ...]
            cells = np.ascontiguousarray(obs).reshape(*obs.shape[:3], -1).view(np.uint8)
            mixed = np.full(cells.shape[:3], 0xCBF29CE484222325, np.uint64)
            for byte in np.moveaxis(cells, 3, 0):
                mixed = (mixed ^ byte) * np.uint64(0xFF51AFD7ED558CCD)
                mixed ^= mixed >> np.uint64(32)
            yield from zip(part.tolist(), mixed.sum(axis=(1, 2)).tolist(), strict=True)


class FrontierEpisodes(Holder):
    """Lets a share of the episodes act on a FrontierPlanner; the other ones are left alone.

    The share of the next episode is

        share * max(0, 1 - r / r_planned) * min(1, r_planned / WORTHWHILE)

    with the rates r at which steps lately (see MEMORY) found states that were never acted in:
    r_planned of planned steps, r of all others. So it is small where planned steps find no more
    than others do, as where every state is new anyway, and where they find next to nothing. It is
    0 where the plan is complete and nothing untried can be reached from the start. A rate is
    (found + 1) / (steps + 1): without recent steps it is high, so that the planner is given a try
    again.

    In a frontier episode, too, a step is left alone where nothing untried can be reached. The first
    `act`, and the first one after `end_episode`, starts an episode.

    Args:
        graph: the TransitionGraph. A `FrontierPlanner` of its own plans over it.
        share: of the episodes at most, in [0, 1].
        by_kind: as of `FrontierPlanner`.

    Raises:
        ValueError: for a share out of range.
    """

    METRICS: tuple[str, ...] = (
        "frontier/untried", "frontier/share", "frontier/start_value", "frontier/waiting",
        "frontier/states_per_1000",
    )  # fmt: skip
    SAVED: tuple[str, ...] = "share", "start_value", "is_frontier", "is_planned", "is_underway"

    def __init__(self, graph: TransitionGraph, share: float = 0.5, by_kind: bool = False) -> None:
        if not 0 <= share <= 1:
            raise ValueError(f"Require 0 <= share <= 1, got {share}")
        self.planner: FrontierPlanner = FrontierPlanner(graph, by_kind=by_kind)
        self.most: float = float(share)
        self.share: float = 0.0  # at the last start of an episode
        self.start_value: float = 1.0
        self.is_frontier: bool = False
        self.is_planned: bool = False
        self.is_underway: bool = False
        self._lately = np.zeros((2, 2))  # steps left alone, planned x states found, steps
        self._window = np.zeros(2)  # states found, steps since `metrics`

    def act(self, node: SupportsIndex, rng: np.random.Generator) -> int | None:
        """The planner's action, or None where the step is left alone. To be called every step.

        Where an episode starts, as told by `end_episode`, one draw from rng decides what it is.

        Raises:
            KeyError: for what is not the id of a node.
        """
        with self.planner.graph.lock:
            self.planner.graph.require_node(node)
            if self.is_underway:  # count the step that led here
                is_new = self.planner.graph.arrays.degree[node] == 0
                self._lately *= 1 - 1 / MEMORY
                self._lately[int(self.is_planned)] += (is_new, 1)
                self._window += (is_new, 1)
            else:
                self._begin(node, rng)
            self.is_underway = True
            self.planner.plan(BUDGET)
            action = self.planner.act(node, rng) if self.is_frontier else None
            self.is_planned = action is not None
            return action

    def end_episode(self) -> None:
        """The next `act` starts an episode."""
        self.is_underway = False

    def _begin(self, node, rng):
        self.planner.plan(BUDGET)
        self.start_value = float(self.planner.values[node])
        left_alone, planned = ((self._lately[:, 0] + 1) / (self._lately[:, 1] + 1)).tolist()
        self.share = self.most * max(0.0, 1 - left_alone / planned) * min(1.0, planned / WORTHWHILE)
        if self.start_value == 0 and self.planner.num_waiting == 0:
            self.share = 0.0
        self.is_frontier = bool(rng.random() < self.share)

    def metrics(self) -> dict[str, float | None]:
        """Values of METRICS, rates since the last call."""
        found, steps = self._window.tolist()
        values = (
            self.planner.num_untried(), self.share, self.start_value,
            self.planner.num_waiting,  # the last step included
            1000 * found / steps if steps else None,
        )  # fmt: skip
        self._window[:] = 0
        return dict(zip(self.METRICS, values, strict=True))

    def state(self) -> dict[str, Any]:
        """What `restore` takes back."""
        return {name: getattr(self, name) for name in self.SAVED} | {
            "lately": self._lately.copy(),
            "window": self._window.copy(),
            "planner": self.planner.state(),
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go on with what `state` returned, of this graph or of one restored from its state.

        Raises:
            KeyError: for what is missing.
            ValueError: for arrays that do not belong to the graph.
        """
        for name in self.SAVED:
            if not isinstance(saved[name], (bool, int, float, type(None))):
                raise ValueError(f"Require a number or None as {name}, got {saved[name]!r}")
        copy_rows("lately", saved, self._lately, 2)
        copy_rows("window", saved, self._window, 2)
        self.planner.restore(saved["planner"])
        self.__dict__.update({name: saved[name] for name in self.SAVED})
