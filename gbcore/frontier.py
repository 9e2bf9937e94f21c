"""FrontierPlanner: the way to actions never tried. FrontierEpisodes: when to go there."""

import operator
from collections.abc import Callable
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gbcore.arrays import KnownNodes, grown
from gbcore.first_tries import FirstTries, LevelFrontier
from gbcore.graph import TransitionGraph
from gbcore.kernels import sweeps
from gbcore.kernels.edges import FREED
from gbcore.kernels.hashing import EMPTY
from gbcore.kernels.sweeps import Plan
from gbcore.targets import check_prior
from gbcore.values import new_queue, waiting_in

UNLIMITED = 2**62  # edges
MEMORY = 10_000  # steps over which a rate is taken
WORTHWHILE = 1e-3  # states found per planned step
EPISODES = 20  # over which success is taken
BUDGET = 2_000  # edges read per `plan`, of which an episode's first step makes two
KINDS_AT_ONCE = 1_000  # states whose kinds are told at a time
DISCOUNT, LEVEL_DISCOUNT = 0.95, 0.85  # of the way to an untried action; in levels never met

Kinds = Callable[[NDArray[Any]], NDArray[Any]]  # observations [n, *obs_shape] -> integers [n]


class FrontierPlanner:
    """Values of a graph's states whose only reward is to try something for the first time.

    With counts c(s, a) of pairs and f(T) of transitions, and V(s) = max_a Q(s, a):

        Q(s, a) = w(s, a)                                                         if c(s, a) = 0
        Q(s, a) = (prior w(s, a) + discount sum_T f(T) (1 - done) V(s')) / (prior + c(s, a))  else

    w is 1, or by kind 1 / n for the n-th state found of its kind, and stays so; or it is set by
    `set_worths`. Of kinds, as of states, there is a bounded memory: those without a state may be
    counted anew.

    With prior 0 and w = 1 (the defaults) this is the expected discount ** (steps to an untried
    pair) of the best policy on the graph. With a prior a pair tried seldom stays attractive: its
    bonus shrinks as 1 / count. Values are kept as steps, log V / log discount: however far, the way
    is known.

    The graph tells which transitions changed, and `plan` follows the consequences, a bounded number
    of edges at a time. The rest waits. Where nothing waits, every state satisfies the equation to
    within the tolerance. One thread at a time.

    Args:
        graph: the TransitionGraph; transitions that it holds already are planned over, too.
        discount: of the way, in (0, 1).
        prior: observations of the unknown that a tried pair is credited with, >= 0.
        tolerance: relative change of a value that is not followed; (1 - discount) / 50 if None.
        kinds_of: function of observations [n, *obs_shape] that returns an integer of each, int or
            uint64 [n]: the same for states that are of a kind.

    Raises ValueError for a discount, prior or tolerance out of range.
    """

    def __init__(
        self,
        graph: TransitionGraph,
        discount: float = DISCOUNT,
        prior: float = 0.0,
        tolerance: float | None = None,
        kinds_of: Kinds | None = None,
    ) -> None:
        if not 0 < discount < 1:
            raise ValueError(f"Require 0 < discount < 1, got {discount}")
        check_prior(prior)
        tolerance = (1 - discount) / 50 if tolerance is None else tolerance
        if not 0 < tolerance < 1 - discount:
            raise ValueError(f"Require 0 < tolerance < 1 - discount, got {tolerance}")
        self.graph: TransitionGraph = graph
        self.discount: float = float(discount)
        self.prior: float = float(prior)
        self.tolerance: float = float(tolerance)
        self.kinds_of: Kinds | None = kinds_of
        self._log = float(np.log(self.discount))
        self._kinds: dict[int, int] = {}  # -> number of states found
        self._appraised = KnownNodes(graph)
        room, costs = graph.capacity, (graph.capacity if kinds_of else 1, 1)
        scratch = (np.zeros(graph.num_actions) for _ in range(3))
        self._plan = Plan(
            np.zeros(room), np.zeros(costs), new_queue(room), new_queue(room), self._log,
            self.prior, *scratch,
        )  # fmt: skip
        self._followed = -1  # the graph's num_logged at the last plan

    def __repr__(self) -> str:
        return f"FrontierPlanner({self.graph.num_nodes:,} nodes, {self.num_waiting:,} waiting)"

    def plan(self, budget: SupportsIndex | None = None) -> int:
        """Bring values up to date, reading about so many edges; all that it takes if None.

        Returns the number of edges that were read. Raises ValueError for a budget < 1.
        """
        budget = UNLIMITED if budget is None else min(operator.index(budget), UNLIMITED)
        if budget < 1:
            raise ValueError(f"Require budget >= 1, got {budget}")
        plan = self._make_room()
        if self.kinds_of is not None:
            self._appraise(self.graph.changed(self._followed, came=True)[::-1])
        changed = self._changed()
        slack = -np.log1p(self.tolerance) / self._log
        num_read = sweeps.make_plan(self.graph.arrays, plan, changed, slack, budget)
        self._followed = self.graph.num_logged
        return num_read

    def set_worths(self, nodes: ArrayLike, worths: ArrayLike) -> None:
        """From now on, w(s, a) of states int64 [n]: float [n, A], or [n, 1] alike for all actions.

        Values follow at the next `plan`. Raises KeyError for an id that no node has, ValueError for
        worths of another shape or out of (0, 1], and where the planner has kinds.
        """
        nodes, worths = np.asarray(nodes, np.int64), np.asarray(worths, np.float64)
        self.graph.require_nodes(nodes)
        plan, columns = self._make_room(), worths.shape[-1]
        if worths.shape != (len(nodes), columns) or columns not in (1, self.graph.num_actions):
            raise ValueError(f"Require worths [n, A] or [n, 1], got shape {worths.shape}")
        if self.kinds_of is not None or not ((worths > 0) & (worths <= 1)).all():
            raise ValueError("Require worths in (0, 1], and a planner without kinds")
        if len(plan.costs) < len(plan.steps) or columns > plan.costs.shape[1]:
            costs = np.zeros((len(plan.steps), max(columns, plan.costs.shape[1])))
            costs[: len(plan.costs)] = plan.costs
            plan = self._plan = plan._replace(costs=costs)
        plan.costs[nodes] = np.log(worths) / self._log
        sweeps.push_all(plan.falls, nodes)

    @property
    def num_waiting(self) -> int:
        """Number of states, and of changes, that wait for a further `plan`."""
        waiting = int(self._plan.falls.ends[1] + self._plan.rises.ends[1])
        return waiting + len(self._changed())

    def _changed(self):
        """Nodes that changed since the last plan, but for those that are new, as all begin."""
        plan, changed = self._make_room(), self.graph.changed(self._followed)
        costs = plan.costs[changed % len(plan.costs), 0]
        is_as_new = (self.graph.arrays.degree[changed] == 0) & (plan.steps[changed] == costs)
        return changed[~is_as_new]

    @property
    def steps(self) -> NDArray[np.float64]:
        """log V(s) / log discount by node id, float64 [num_ids]: steps to an action never tried;
        inf where none can be reached; 0 for ids not in use.
        """
        steps = self._make_room().steps[: self.graph.num_ids]
        return np.where(self.graph.arrays.in_degree[: len(steps)] == FREED, 0.0, steps)

    @property
    def values(self) -> NDArray[np.float64]:
        """V(s) by node id: float64 [num_ids]; 1 for ids not in use."""
        return self.discount**self.steps

    def action_values(self, node: SupportsIndex) -> NDArray[np.float64]:
        """Q(s, a) of a node: float64 [A]. Raises KeyError for another id."""
        return self.discount ** self._action_steps(node)

    def _action_steps(self, node):
        self.graph.require_node(node)
        plan = self._make_room()
        sweeps.back_up_steps(self.graph.arrays, plan, operator.index(node), False)
        return plan.q.copy()

    def act(self, node: SupportsIndex, rng: np.random.Generator) -> int | None:
        """A greedy action of a node, ties at random; None where nothing untried can be reached.

        One draw is taken from rng unless the result is None. Raises KeyError for another id.
        """
        steps = self._action_steps(node)
        least = steps.min()
        if least == np.inf:
            return None
        ties = np.flatnonzero(steps <= least + np.log1p(-self.tolerance) / self._log)
        return int(ties[rng.integers(len(ties))])

    def num_untried(self) -> int:
        """Number of pairs never tried, of all states but those that only end episodes."""
        arrays, n = self.graph.arrays, self.graph.num_ids
        was_in = (arrays.degree[:n] > 0) | (arrays.in_first[:n] != EMPTY)
        return int(np.count_nonzero(arrays.pair_count[:n][was_in] == 0))

    def check_valid(self) -> list[str]:
        """Faults, one sentence each; none where no state waits and all satisfy the equation."""
        problems = []
        if self.num_waiting == 0:
            for node in np.flatnonzero(self.graph.arrays.in_degree[: self.graph.num_ids] != FREED):
                steps, found = self._plan.steps[node], self._action_steps(node).min()
                if steps != found and not abs(found - steps) <= -2 * self.tolerance / self._log:
                    problems.append(f"node {node}: {steps} steps, {found} by its actions")
        return problems

    def _make_room(self):
        """The arrays, with room for every id: those that were read before may be too short."""
        plan, room = self._plan, self.graph.capacity
        if len(plan.steps) < room:
            self._plan = plan._replace(
                steps=grown(plan.steps, room),
                costs=plan.costs if len(plan.costs) == 1 else grown(plan.costs, room),
                falls=new_queue(room, waiting_in(plan.falls)),
                rises=new_queue(room, waiting_in(plan.rises)),
            )
        return self._plan

    def _appraise(self, nodes):
        """Give nodes int64 [n] their worth if they are new: 1 / k to the k-th of a kind."""
        nodes = nodes[~self._appraised.has(nodes)]
        for node, kind in self._kinds_of(nodes):
            self._kinds[kind] = number = self._kinds.get(kind, 0) + 1
            self._plan.costs[node] = -np.log(number) / self._log
        self._appraised.add(nodes)
        if len(self._kinds) > 2 * self.graph.num_ids:  # most are of states that are gone
            kept = {kind for _, kind in self._kinds_of(self._appraised.nodes())}
            self._kinds = {kind: n for kind, n in self._kinds.items() if kind in kept}

    def _kinds_of(self, nodes):
        """Pairs of a node and its kind, of ids int64 [n]."""
        for first in range(0, len(nodes), KINDS_AT_ONCE):
            part = nodes[first : first + KINDS_AT_ONCE]
            kinds = np.asarray(self.kinds_of(self.graph.observations_of(part)))
            if kinds.shape != part.shape or kinds.dtype.kind not in "iu":
                raise ValueError(
                    f"Require integers [{len(part)}] of kinds_of, got {kinds.dtype} {kinds.shape}"
                )
            yield from zip(part.tolist(), kinds.astype(np.uint64).tolist(), strict=True)


class FrontierEpisodes:
    """Lets a share of the episodes act on a FrontierPlanner; the other ones are left alone.

    The share of the next episode is

        share * max(0, 1 - r / r_planned) * min(1, r_planned / WORTHWHILE)

    with the rates at which steps found states that were never acted in, over the last MEMORY steps
    or so: r_planned of planned steps, r of all others. A rate is (found + 1) / (steps + 1): without
    recent steps it is high, and the planner is tried again. The share is 0 where the plan is
    complete and nothing untried can be reached from the start.

    Where levels change every episode finds new states, and the share is

        share * (1 - success) * (1 + frontier_success) / 2

    with the means of "had a reward > 0" over the last EPISODES episodes that were left alone, and
    over the others. Where neither meets a reward, half of them look elsewhere. `FirstTries` says
    which actions are worth trying in a new level. The planner's discount is then 0.85: what is near
    is tried first.

    In a frontier episode, too, a step is left alone where nothing untried can be reached. The first
    `act`, and the first one after `end_episode`, starts an episode.

    Args:
        graph: the TransitionGraph. A `FrontierPlanner` of its own plans over it.
        share: of the episodes at most, in [0, 1].
        kinds_of: as of `FrontierPlanner`.
        first_tries: the FirstTries of all levels, where episodes play levels that were never met.
            Needs `observe`, and no kinds.

    Raises ValueError for a share out of range, or kinds beside first tries.
    """

    def __init__(
        self, graph: TransitionGraph, share: float = 0.5, kinds_of: Kinds | None = None,
        first_tries: FirstTries | None = None,
    ) -> None:  # fmt: skip
        if not 0 <= share <= 1:
            raise ValueError(f"Require 0 <= share <= 1, got {share}")
        discount = DISCOUNT if first_tries is None else LEVEL_DISCOUNT
        self.planner: FrontierPlanner = FrontierPlanner(graph, discount, kinds_of=kinds_of)
        self.levels: LevelFrontier | None = None
        if first_tries is not None:
            self.levels = LevelFrontier(self.planner, first_tries)
        self.most: float = float(share)
        self.success: float = 0.0  # of the episodes left alone
        self.frontier_success: float = 1.0  # of the others: until they fail, most are frontier's
        self.had_reward: bool = False  # in the episode under way
        self.share: float = 0.0  # at the last start of an episode
        self.start_value: float = 1.0
        self.is_frontier: bool = False
        self.is_planned: bool = False
        self.is_underway: bool = False
        self._lately = np.zeros((2, 2))  # steps left alone, planned x states found, steps
        self._window = np.zeros(2)  # states found, steps since `metrics`

    def act(self, node: SupportsIndex, rng: np.random.Generator) -> int | None:
        """The planner's action, or None where the step is left alone. To be called every step.

        Where an episode starts, one draw from rng decides its kind. Raises KeyError for another id.
        """
        with self.planner.graph.lock:
            self.planner.graph.require_node(node)
            if self.is_underway:
                self._count(self.planner.graph.arrays.degree[node] == 0)
            else:
                self._begin(node, rng)
            self.is_underway = True
            self.planner.plan(BUDGET)
            action = self.planner.act(node, rng) if self.is_frontier else None
            self.is_planned = action is not None
            return action

    def observe(
        self, obs: NDArray[Any], node: SupportsIndex, action: int, reward: float,
        next_obs: NDArray[Any], next_node: SupportsIndex, terminated: bool,
    ) -> None:  # fmt: skip
        """The step after `act`, which the graph has got: both states, as grids or planes."""
        self.had_reward |= bool(reward > 0)
        if self.levels is not None:
            self.levels.observe(obs, node, action, reward, next_obs, next_node, terminated)

    def end_episode(self) -> None:
        """The next `act` starts an episode."""
        if self.is_underway:
            self._count(False)  # where an episode ends nothing is found to act in
            if self.is_frontier:
                self.frontier_success += (self.had_reward - self.frontier_success) / EPISODES
            else:
                self.success += (self.had_reward - self.success) / EPISODES
        self.is_underway = self.had_reward = False

    def _count(self, is_new):
        """The step after the last `act` led to a state."""
        self._lately *= 1 - 1 / MEMORY
        self._lately[int(self.is_planned)] += (is_new, 1)
        self._window += (is_new, 1)

    def _begin(self, node, rng):
        if self.levels is not None:
            self.levels.begin(int(node))
        self.planner.plan(BUDGET)
        steps = self.planner._action_steps(node)
        self.start_value = float((self.planner.discount**steps).max())
        left_alone, planned = ((self._lately[:, 0] + 1) / (self._lately[:, 1] + 1)).tolist()
        wanted = max(0.0, 1 - left_alone / planned) * min(1.0, planned / WORTHWHILE)
        if self.levels is not None:
            wanted = (1 - self.success) * (1 + self.frontier_success) / 2
        self.share = self.most * wanted
        if self.planner.num_waiting == 0 and steps.min() == np.inf:
            self.share = 0.0
        self.is_frontier = bool(rng.random() < self.share)

    def metrics(self) -> dict[str, float | None]:
        """Charts by name; rates are those since the last call."""
        found, steps = self._window.tolist()
        self._window[:] = 0
        return {
            "frontier/untried": self.planner.num_untried(), "frontier/share": self.share,
            "frontier/start_value": self.start_value,
            "frontier/waiting": self.planner.num_waiting,  # the last step included
            "frontier/states_per_1000": 1000 * found / steps if steps else None,
        }  # fmt: skip
