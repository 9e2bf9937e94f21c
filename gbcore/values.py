"""LeafTable: a network's values by node, each evaluated once.

GraphValues: the nested backup of `subgraph.py` over the whole graph, at no depth cut off.
solve: the same over tried actions alone, without a network.
"""

import contextlib
import copy
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import sparse
from scipy.sparse import csgraph, linalg

from gbcore.arrays import KnownNodes, as_indices, grown
from gbcore.first_tries import FirstTries
from gbcore.graph import TransitionGraph
from gbcore.kernels import sweeps
from gbcore.kernels.edges import FREED
from gbcore.kernels.hashing import EMPTY
from gbcore.kernels.sweeps import Queue, Rule
from gbcore.targets import check_prior, greedy_actions

CHUNK = 32  # states per evaluation, unless the caller asks for another number
EVALUATED_AT_ONCE = 128  # states per evaluation, at most
BUDGET = 3_000  # edges that an update reads, its own changes apart
RENEWED = 30_000  # nodes whose leaf values a `renew` evaluates, in turn; of fewer all
TOLERANCE = 1e-7  # change of a value, of itself or of the smallest reward, that waits for `renew`
LARGE = 3_000  # nodes that lead to each other: more are not solved by elimination
TINY, MAGNIFIED = 1e-280, 1e280  # values below TINY are solved again, so much larger

Actions = NDArray[np.int64]
Network = Callable[[NDArray[Any]], Actions]  # observations [n, *obs_shape] -> actions [n]


class LeafTable:
    """Leaf values of a graph's nodes, evaluated when first needed and kept until forgotten.

    The last bits that a network gives a state depend on the size of its batch, since that decides
    in which order products are summed. So the network is asked for CHUNK states at a time, the last
    one repeated if need be. Then neither the time nor the other states of a batch change a value.
    `GraphValues` promises no such bits, and asks for more states at a time.

    An id that was freed since names another state, whose value is then unknown. One thread at a
    time. `copy.deepcopy` keeps `evaluate`; pickle asks for one that can be pickled.

    Args:
        evaluate: function of observations [n, *obs_shape] that returns float32 [n, A].
        network: the torch.nn.Module that `evaluate` asks, in evaluation mode. All values are
            forgotten where its parameters or buffers have changed since the last look, by whatever
            means. Without it, `forget_all` has to be called.
        first_tries: its no-ops, those known when a state is evaluated, have values of 0 at most.

    Attributes:
        num_forgotten: how often values were forgotten, or evaluated anew.

    Where the network is asked, ids of no node raise KeyError, values of another shape ValueError.
    """

    def __init__(
        self,
        graph: TransitionGraph,
        evaluate: Callable[[NDArray[Any]], NDArray[np.float32]],
        network: Any = None,
        first_tries: FirstTries | None = None,
    ) -> None:
        self.graph: TransitionGraph = graph
        self.first_tries: FirstTries | None = first_tries
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
        """Have node ids int64 [n] a value? bool [n]. KeyError for an id that no node ever had."""
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
        """float32 [n, A] of node ids int64 [n], by the network as it is now. Nothing is kept."""
        if chunk < 1:
            raise ValueError(f"Require chunk >= 1, got {chunk}")
        nodes = as_indices("nodes", nodes)
        found = np.empty((len(nodes), self.graph.num_actions), np.float32)
        padded = np.append(nodes, np.repeat(nodes[-1:], -len(nodes) % chunk))
        with in_evaluation(self.network):
            self.graph.require_nodes(nodes)
            for start in range(0, len(nodes), chunk):
                obs = self.graph.observations_of(padded[start : start + chunk])
                q = self.evaluate(obs)
                if tuple(q.shape) != (shape := (chunk, self.graph.num_actions)):
                    raise ValueError(f"Require values of shape {shape}, got {tuple(q.shape)}")
                if self.first_tries is not None:
                    q = self.first_tries.without_no_ops(q, obs)
                found[start : start + chunk] = q[: len(nodes) - start]
        return found

    def forget_all(self) -> None:
        """The network has changed."""
        self._known.clear()
        self.num_forgotten += 1

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


class GraphValues:
    """Values of all states of a graph: the limit of the rule "greedy" as the depth grows.

    With leaf values q, counts c(s, a) of pairs and f(T) of transitions:

        Q(s, a) = (sum_T f(T) (r + gamma (1 - done) V(s')) + prior q(s, a)) / (c(s, a) + prior)
        V(s)    = max_a Q(s, a)                                 of pairs never seen, Q = q

    This is value iteration on the data, with the network's values at its edge: every known path to
    a reward counts, however long. A prior keeps a rarely seen transition from deciding alone.

    Values are kept, and follow the graph at every `update`: the states whose transitions changed
    are backed up, the newest first, and then the states that lead to one whose value changed, up to
    BUDGET edges. The rest waits for the next update. Between two updates nothing is evaluated and
    nothing changes, so that it makes no difference when and how often values are read.

    The network's guesses at pairs never seen are optimism: they draw training to actions
    never tried, which corrects them. An evaluation corrects nothing, and acts on `seen_policy`.
    One thread at a time.

    Args:
        leaves: of the graph.
        gamma: the discount, in [0, 1).
        prior: observations that q counts as, in [0, inf).

    Raises ValueError for a discount or prior out of range, or leaves of another graph.
    """

    def __init__(
        self, graph: TransitionGraph, leaves: LeafTable, gamma: float, prior: float = 0.0
    ) -> None:
        if not 0 <= gamma < 1:
            raise ValueError(f"Require 0 <= gamma < 1, got {gamma}")
        check_prior(prior)
        if leaves.graph is not graph:
            raise ValueError("Require the leaf table of this graph, got one of another")
        self.graph: TransitionGraph = graph
        self.leaves: LeafTable = leaves
        self.gamma: float = float(gamma)
        self.prior: float = float(prior)
        self._value = np.zeros(graph.capacity)
        self._queue = new_queue(graph.capacity)
        self._followed = -1  # the graph's num_logged at the last update
        self._forgotten = -1  # the leaves' num_forgotten, of these values
        self._smallest = np.inf  # size of a reward, zeros apart
        self._renewed = 0  # the id that `renew` goes on from
        self._tried = Tried()
        self._settle()

    def __repr__(self) -> str:
        return f"GraphValues({self.graph.num_nodes:,} nodes, {self._queue.ends[1]:,} wait)"

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_tried": Tried()}  # an evaluation solves it anew

    def update(self, budget: int = BUDGET) -> None:
        """Follow changes of the graph, and then of values, reading about `budget` edges.

        Where leaf values were forgotten, all are evaluated anew, and all values solved for.
        """
        changed = self.graph.changed(self._followed)
        self.leaves.knows(changed)  # which looks whether the network is the same
        if self._forgotten != self.leaves.num_forgotten:
            self._settle()
            return
        self._enter(changed)
        arrays, rule = self.graph.arrays, rule_of(self.leaves.q, self.gamma, self.prior)
        self._smallest = smallest = sweeps.smallest_reward(arrays, changed, self._smallest)
        if smallest == np.inf:  # no reward is known: the network's values stand in
            sizes = np.abs(self._value[: self.graph.num_ids])
            smallest = float(sizes.max(initial=0.0, where=np.isfinite(sizes)))
        sweeps.sweep(arrays, self._value, rule, self._queue, changed, TOLERANCE, smallest, budget)
        self._followed = self.graph.num_logged

    def renew(self) -> None:
        """The network has changed: evaluate leaf values anew, and solve for all values.

        Of more than RENEWED nodes the leaf values of so many are evaluated, in turn: each copy of a
        network then costs the same, however large the graph. Targets then read values of several
        copies, and MinAtar's scores gain by it (docs/minatar.md).
        """
        n = self.graph.num_ids
        turn = np.arange(self._renewed, self._renewed + min(RENEWED, n)) % max(n, 1)
        turn = turn[self.graph.arrays.in_degree[turn] != FREED]
        self.leaves.renew(turn, EVALUATED_AT_ONCE)
        self._settle()
        self._renewed = int((self._renewed + RENEWED) % n) if n > RENEWED else 0

    def values(self, nodes: ArrayLike) -> NDArray[np.float64]:
        """V(s) of node ids int64 [n], as of the last update: float64 [n].

        Raises KeyError for an id that no node has, ValueError for a node that came after it.
        """
        self.graph.require_nodes(nodes := as_indices("nodes", nodes))
        self._require_followed(nodes, came=True)
        return self._value[nodes]

    def targets(self, nodes: ArrayLike, actions: ArrayLike) -> NDArray[np.float32]:
        """Q(s, a) of pairs [B], the prior left out, as at the roots of `q_targets`: float32 [B].

        Raises as `values`, and ValueError for a node whose transitions changed since the update,
        another number of actions, or one out of range.
        """
        nodes, actions = self.graph._check_pairs(nodes, actions)
        self._require_followed(nodes, came=False)
        q = self._action_values(nodes, prior=0.0)
        return q[np.arange(len(nodes)), actions].astype(np.float32)

    def actions(self, nodes: ArrayLike) -> Actions:
        """argmax_a Q(s, a) of ids that `graph.find` returned: int64 [n].

        -1 for -1, for nodes in which nothing was tried, and for those that came, or whose
        transitions changed, since the last update.
        """
        nodes = as_indices("nodes", nodes)
        actions, known = np.full(len(nodes), EMPTY, np.int64), np.flatnonzero(nodes != EMPTY)
        self.graph.require_nodes(nodes[known])
        known = known[self._follows(nodes[known], came=False)]
        known = known[self.graph.arrays.degree[nodes[known]] > 0]
        actions[known] = greedy_actions(self._action_values(nodes[known], self.prior))
        return actions

    def _action_values(self, nodes, prior):
        """Q(s, a) of nodes int64 [n]: float64 [n, A]."""
        rule = rule_of(self.leaves.q, self.gamma, prior)
        q = np.empty((len(nodes), self.graph.num_actions))
        sweeps.read_actions(self.graph.arrays, self._value, rule, nodes, q)
        return q

    def act(
        self, obs: NDArray[Any], otherwise: Network, keys: NDArray[Any] | None = None
    ) -> Actions:
        """Greedy actions int64 [n] for observations [n, *obs_shape], as training acts.

        Args:
            otherwise: asked where `actions` knows no action.
            keys: of the states [n, *key_shape], where the graph has keys.
        """
        return _complete(self.actions(self.graph.find_all(obs, keys)), obs, otherwise)

    def seen_policy(self, otherwise: Network) -> Callable[..., Actions]:
        """The policy that is greedy among tried actions: function of (obs, keys=None).

        V(s) is the maximum over tried actions alone, and the network's where none was tried; it is
        exact. Of equal actions the policy takes the one tried most often. The next call starts from
        these values and follows later changes. Training does not read them: it makes no difference
        whether and when this is called. The policy stays the same when graph or network change.
        `otherwise` is asked where nothing was tried.
        """
        nodes, n = self.graph.changed(-1)[::-1], self.graph.num_ids
        unknown, q = nodes[~self.leaves.knows(nodes)], self.leaves.q
        if len(unknown):  # came since the last update
            q = q.copy()
            q[unknown] = self.leaves.evaluated(unknown, min(len(unknown), EVALUATED_AT_ONCE))
        q = without_inf(q)
        has_nan = np.isnan(q[:n]).any()  # no choice of before may lead there
        tried = (Tried() if has_nan else self._tried).with_room(n)
        is_void = tried.forgotten != self.leaves.num_forgotten
        changed = self.graph.changed(-1 if is_void else tried.followed)
        changed = None if len(changed) > len(nodes) // 4 else changed
        ends = nodes if changed is None else changed
        ends = ends[self.graph.arrays.degree[ends] == 0]
        tried.value[ends] = np.fmax.reduce(q[ends], axis=1)
        rule = rule_of(q, self.gamma, self.prior, tried_only=True)
        find_tried(self.graph, rule, tried, changed)
        followed = min(self.graph.num_logged, self._followed)
        self._tried = tried._replace(followed=followed, forgotten=self.leaves.num_forgotten)
        chosen = tried.chosen.copy()
        seen = KnownNodes(self.graph)
        seen.add(nodes)

        def policy(obs: NDArray[Any], keys: NDArray[Any] | None = None) -> Actions:
            found = self.graph.find_all(obs, keys)
            known = np.flatnonzero(found >= 0)
            known = known[seen.has(found[known])]
            actions = np.full(len(found), EMPTY, np.int64)
            actions[known] = chosen[found[known]]
            return _complete(actions, obs, otherwise)

        return policy

    def _enter(self, nodes):
        """Nodes without a leaf value or a finite value get the network's."""
        self._make_room()
        # A network may give NaN.
        new = nodes[~(self.leaves.knows(nodes) & np.isfinite(self._value[nodes]))]
        if len(new):
            leaf_q = self.leaves.values(new, min(len(new), EVALUATED_AT_ONCE))
            value = np.fmax.reduce(leaf_q, axis=1)
            is_read = np.isnan(value) & (self.graph.arrays.degree[new] > 0)
            self._value[new] = np.where(is_read, 0.0, value)  # one that leads to itself forgets 0

    def _settle(self):
        self._enter(nodes := self.graph.changed(-1)[::-1])
        self._forgotten = self.leaves.num_forgotten
        q = without_inf(self.leaves.q)
        arrays, rule = self.graph.arrays, rule_of(q, self.gamma, self.prior)
        tried = arrays.degree[nodes] > 0
        ends, nodes = nodes[~tried], nodes[tried][::-1]
        value = self._value[: self.graph.num_ids]
        value[ends] = np.fmax.reduce(q[ends], axis=1)
        choice = np.full(len(value), EMPTY, np.int32)
        if not np.isnan(q).any():  # else values as they are may lead there
            sweeps.choose_greedily(arrays, value, rule, choice, nodes)
        settle(self.graph, rule, value, choice, nodes)
        self._queue = new_queue(self.graph.capacity)
        self._smallest = sweeps.smallest_reward(arrays, nodes, np.inf)
        self._followed = self.graph.num_logged

    def _follows(self, nodes, came):
        """bool [n]: does the last update cover these ids? With `came` it is enough that they were
        there; else their transitions must not have changed since, as they may lead to a state
        without a value, which kernels do not look at.
        """
        self._make_room()
        changed = set(self.graph.changed(self._followed, came).tolist())  # NumPy: 20 us for a few
        late = np.fromiter((node in changed for node in nodes.tolist()), np.bool_, len(nodes))
        knows = self.leaves.knows(nodes)
        return knows & ~late & (self._forgotten == self.leaves.num_forgotten)

    def _require_followed(self, nodes, came):
        late = nodes[~self._follows(nodes, came)]
        if len(late):
            raise ValueError(
                f"Require an update since node {late[0]} was added or changed, or `renew` since "
                "leaf values were forgotten"
            )

    def _make_room(self):
        if len(self._value) < self.graph.capacity:
            self._value = grown(self._value, self.graph.capacity)
            self._queue = new_queue(self.graph.capacity, waiting_in(self._queue))


def _complete(actions, obs, otherwise):
    unknown = actions < 0
    if unknown.any():
        actions[unknown] = otherwise(obs[unknown])
    return actions


def without_inf(leaf_q: NDArray[np.float32]) -> NDArray[np.float32]:
    """Infinite values as the largest finite ones: `settle` adds and subtracts them."""
    return leaf_q if np.isfinite(leaf_q).all() else np.nan_to_num(leaf_q, nan=np.nan)


class Tried(NamedTuple):
    """Values and actions that `find_tried` found, by node id."""

    value: NDArray[np.float64] = np.empty(0)
    choice: NDArray[np.int32] = np.empty(0, np.int32)  # see `settle`
    chosen: NDArray[np.int32] = np.empty(0, np.int32)  # the best action, or EMPTY
    followed: int = -1  # the graph's num_logged
    forgotten: int = -1  # the leaves' num_forgotten

    def with_room(self, num_ids: int) -> "Tried":
        """The same with so many ids; of new ones nothing is known."""
        value, choice, chosen = self[:3]
        choice, chosen = grown(choice, num_ids, EMPTY), grown(chosen, num_ids, EMPTY)
        return self._replace(value=grown(value, num_ids), choice=choice, chosen=chosen)


def settle(
    graph: TransitionGraph,
    rule: Rule,
    value: NDArray[np.float64],
    choice: NDArray[np.int32],
    nodes: NDArray[np.int64],
    changed: NDArray[np.int64] | None = None,
) -> None:
    """V(s) of nodes in which something was tried, exact but for rounding.

    Policy iteration. It takes the time of reading the graph a few times, for any rewards and any
    discount.

    Args:
        value: float64 [num_ids]. In: V(s) of all other nodes. Out: of all.
        choice: int32 [num_ids]. In: an action to begin with, or -1; -1 of all other nodes. Out: a
            best action.
        nodes: int64 [n], those whose value is sought.
        changed: int64 [m], nodes that changed since value and choice were right. Only states whose
            value these change are solved again. Without it, all are.
    """
    arrays, n = graph.arrays, len(value)
    queue, new = new_queue(n), nodes[choice[nodes] == EMPTY]
    sweeps.choose_first(arrays, value, rule, choice, new, queue)
    turns = np.zeros(n, np.int8)
    if changed is None:
        turns[nodes] = sweeps.TURNS
    else:
        near = sweeps.with_leaning(arrays, choice, changed, False)
        sweeps.improve(arrays, value, rule, choice, near, queue, turns, True)
    before = None
    while (turns == sweeps.TURNS).any() and not np.array_equal(choice, before):
        left = sweeps.with_leaning(arrays, choice, np.flatnonzero(turns == sweeps.TURNS), True)
        before, of_left = choice.copy(), np.full(n, EMPTY, np.int32)
        of_left[left] = choice[left]
        evaluate(graph, rule, value, of_left, left)
        left = sweeps.with_leaning(arrays, choice, left, False)
        turns[:] = 0
        sweeps.improve(arrays, value, rule, choice, left, queue, turns, False)


def evaluate(
    graph: TransitionGraph,
    rule: Rule,
    value: NDArray[np.float64],
    choice: NDArray[np.int32],
    nodes: NDArray[np.int64],
) -> None:
    """The value of a policy at int64 [n] nodes, into value [num_ids]: other values are given.

    choice: int32 [num_ids], an action of these nodes, -1 of all others.
    """
    waits, row_of = np.zeros(len(value), np.int32), np.full(len(value), EMPTY, np.int32)
    queue = new_queue(len(value))
    sweeps.evaluate_ends(graph.arrays, value, rule, choice, nodes, waits, queue)
    rest = nodes[waits[nodes] > 0]
    row_of[rest] = np.arange(len(rest))
    b, row, column, weight = sweeps.write_equations(graph.arrays, value, rule, choice, rest, row_of)
    if len(rest):
        value[rest] = solve_equations(sparse.csr_array((weight, (row, column)), 2 * [len(b)]), b)


def solve_equations(weights: sparse.csr_array, b: NDArray[np.float64]) -> NDArray[np.float64]:
    """x = b + weights x, float64 [n]. Weights [n, n] are >= 0, and of each row gamma at most.

    By elimination; but where more than LARGE rows lead to each other, by iteration, as elimination
    may fill in a matrix of them all. Rows that others lead to come before those.
    """
    _, part = csgraph.connected_components(weights, connection="strong")
    order = np.argsort(part, kind="stable")  # none leads to a part of a larger number
    part = np.where(np.bincount(part)[part] > LARGE, part, EMPTY)
    x = np.zeros(len(b))
    for rows in np.split(order, np.flatnonzero(np.diff(part[order])) + 1):
        own, is_large = weights[rows], part[rows[0]] != EMPTY
        right = b[rows] + own @ x
        own = (sparse.eye_array(len(rows)) - own[:, rows]).tocsc()
        if not right.any():
            continue
        if is_large:
            # The diagonal is the pivot: of such a matrix it never is 0, whatever is dropped.
            size = np.abs(right).max()
            rough = linalg.spilu(own, drop_tol=1e-3, fill_factor=3, diag_pivot_thresh=0)
            rough = linalg.LinearOperator(own.shape, rough.solve)
            found, last, failed = rough @ (right / size), None, True
            # Where it breaks down it goes on, but from NaN.
            while failed and np.isfinite(found).all() and not np.array_equal(found, last):
                last = found
                found, failed = linalg.bicgstab(own, right / size, found, rtol=1e-14, M=rough)
            x[rows] = size * found
        if not is_large or failed:
            x[rows] = linalg.splu(own).solve(right)
    return x


def find_tried(
    graph: TransitionGraph, rule: Rule, tried: Tried, changed: NDArray[np.int64] | None = None
) -> None:
    """The best action of each node where only tried ones count, -1 where there are none.

    Of equal actions it is the one that was tried most often.

    Args:
        rule: of tried actions alone; its leaf values are read only with a prior.
        tried: arrays [num_ids]. In: values of states in which nothing was tried, choices of an
            earlier call or -1. Out: all of it.
        changed: int64 [n], nodes that changed since the earlier call. None: all is solved anew.
    """
    arrays, (value, choice, chosen, *_) = graph.arrays, tried
    before = value.copy()
    has_tried = arrays.degree[: len(value)] > 0
    nodes = np.flatnonzero(has_tried)[::-1]  # value flows from a state to those before it
    looked_at = np.arange(len(value)) if changed is None else changed
    is_known = has_tried[looked_at] & (choice[looked_at] >= 0)
    is_known &= arrays.pair_count[looked_at, choice[looked_at]] > 0
    choice[looked_at[~is_known]] = chosen[looked_at] = EMPTY
    settle(graph, rule, value, choice, nodes, changed)
    if changed is not None:
        looked_at = np.append(changed, np.flatnonzero(value != before))
        looked_at = sweeps.with_leaning(arrays, choice, looked_at, False)
    sweeps.choose_last(arrays, value, rule, looked_at[has_tried[looked_at]], chosen)
    while True:  # states so far that float64 gives them 0 are sought again, magnified
        far = nodes[np.abs(value[nodes]) < TINY]
        is_far = np.zeros(len(value), np.bool_)
        is_far[far] = True
        is_new = rule.scale == 1.0 or len(far) < len(nodes)
        if not (len(far) and is_new and sweeps.leads_out(arrays, value, far, is_far)):
            return
        # A scale that is too large hides no sign.
        nodes, rule = far, rule._replace(scale=min(rule.scale * MAGNIFIED, 1e300))
        with np.errstate(over="ignore"):
            value, known = np.clip(value * MAGNIFIED, -1e300, 1e300), choice
        choice = np.full(len(value), EMPTY, np.int32)
        choice[far] = known[far]
        settle(graph, rule, value, choice, nodes)
        sweeps.choose_last(arrays, value, rule, nodes, chosen)


def solve(
    graph: TransitionGraph, gamma: float
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """Values and best actions where only tried actions count, exact but for rounding.

    Q(s, a) is that of `GraphValues`, without a prior. V(s) is its maximum over the tried actions;
    where there are none, the least that the rewards seen allow: min(r, 0) / (1 - gamma).

    Returns:
        V float64 [num_ids]; the best action of each node int64 [num_ids], -1 where there is none;
        how often that was tried int64 [num_ids]. Rows of freed ids mean nothing.

    Raises ValueError for a discount out of [0, 1) or a graph without transitions.
    """
    if not 0 <= gamma < 1:
        raise ValueError(f"Require 0 <= gamma < 1, got {gamma}")
    rewards = graph.edges()["reward"]
    if not len(rewards):
        raise ValueError("Require a graph with transitions, got none")
    n, tried = graph.num_ids, Tried().with_room(graph.num_ids)
    tried.value[:] = max(float(rewards.min(initial=0.0)) / (1 - gamma), -1e300)
    unread = np.zeros((n, graph.num_actions), np.float32)  # a network's guesses
    find_tried(graph, rule_of(unread, gamma, tried_only=True), tried)
    actions = tried.chosen.astype(np.int64)
    counts = np.where(actions < 0, 0, graph.arrays.pair_count[np.arange(n), actions])
    return tried.value, actions, counts.astype(np.int64)


def rule_of(
    leaf_q: NDArray[np.float32], gamma: float, prior: float = 0.0, tried_only: bool = False
) -> Rule:
    """A `Rule` with scratch of its own."""
    num_actions = leaf_q.shape[1]
    return Rule(leaf_q, gamma, prior, 1.0, tried_only, np.empty(num_actions), np.empty(num_actions))


def new_queue(length: int, waiting: NDArray[np.int64] | None = None) -> Queue:
    """A queue of nodes below length, in which int64 [n] nodes wait."""
    queue = Queue(np.zeros(length, np.int32), np.zeros(length, np.bool_), np.zeros(2, np.int64))
    if waiting is not None:
        sweeps.push_all(queue, waiting)
    return queue


def waiting_in(queue: Queue) -> NDArray[np.int64]:
    """The nodes that wait, in their order: int64 [n]."""
    first, number = queue.ends
    return queue.nodes[(first + np.arange(number)) % len(queue.nodes)].astype(np.int64)
