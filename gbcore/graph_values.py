"""GraphValues: the nested backup of `targets.py` over the whole graph, at no depth cut off."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gbcore import value_kernels
from gbcore.arrays import Holder, as_indices, check_array, grown
from gbcore.graph import KnownNodes, TransitionGraph
from gbcore.kernels import FREED
from gbcore.leaf_table import LeafTable

CHUNK = 128  # states per evaluation, at most
SWEPT = 1_000  # nodes backed up per update
RENEWED = 30_000  # nodes whose leaf values a `renew` evaluates, in turn; of fewer all
TOLERANCE = 1e-5  # change of a value, relative to itself, that is not followed
BACKUPS = 5_000_000  # of one convergence at most, and 20 per node; updates go on with what is left

Actions = NDArray[np.int64]
Network = Callable[[NDArray[Any]], Actions]  # observations [n, *obs_shape] -> actions [n]


def least_value(rewards: NDArray[np.float64], gamma: float) -> float:
    """The least that a state can be worth with rewards like these [n], and no less than -1e300."""
    return max(float(rewards.min(initial=0.0)) / (1 - gamma), -1e300)


class GraphValues(Holder):
    """Values of all states of a graph: the limit of the rule "greedy" as the depth grows.

    With q the leaf values, c(s, a) the count of a pair and f(T) those of its transitions:

        Q(s, a) = (sum_T f(T) (r + gamma (1 - done) V(s')) + prior q(s, a)) / (c(s, a) + prior)
        V(s)    = max_a Q(s, a)                                 of pairs never seen, Q = q

    This is value iteration on the data, with the network's values at its edge: every known path to
    a reward counts, however long. A prior keeps what was seen once or twice from deciding alone.

    Values are kept, and follow the graph at every `update`, in place: the states whose transitions
    changed are backed up, and SWEPT others in turn, the newest first, since value flows from a
    state to those that came before it. Between two updates nothing is evaluated and nothing
    changes, so that it makes no difference when and how often values are read.

    The network's guesses at pairs never seen are optimism: they draw training to what was not
    tried, which corrects them. An evaluation corrects nothing, and acts on `seen_policy`.

    Threads wait for each other, as those of the graph. `copy.deepcopy` and pickle copy graph and
    leaves, too, unless they are copied together.

    Args:
        graph: the TransitionGraph.
        leaves: its `LeafTable`.
        gamma: the discount, in [0, 1).
        prior: observations that q counts as, in [0, inf).

    Raises:
        ValueError: for a discount or prior out of range, or leaves of another graph.
    """

    def __init__(
        self, graph: TransitionGraph, leaves: LeafTable, gamma: float, prior: float = 0.0
    ) -> None:
        if not 0 <= gamma < 1:
            raise ValueError(f"Require 0 <= gamma < 1, got {gamma}")
        if not 0 <= prior < np.inf:
            raise ValueError(f"Require 0 <= prior < inf, got {prior}")
        if leaves.graph is not graph:
            raise ValueError("Require the leaf table of this graph, got one of another")
        self.graph: TransitionGraph = graph
        self.leaves: LeafTable = leaves
        self.gamma: float = float(gamma)
        self.prior: float = float(prior)
        self._value = np.zeros(graph.capacity)
        self._valued = KnownNodes(graph)
        self._q = np.empty(graph.num_actions)  # scratch
        self._forgotten = leaves.num_forgotten  # as of these values
        self._next = 0  # the id that the sweeps go on below
        self._renewed = 0  # the id that `renew` goes on from
        with graph.lock:
            self._changes = graph.watch()  # pairs of nodes, since they were last followed
            self._enter(self._nodes())
            self._settle(self._value, self._nodes())

    def __repr__(self) -> str:
        return f"GraphValues({self.graph.num_nodes:,} nodes, {len(self._changes):,} changes wait)"

    def update(self) -> None:
        """Follow what changed in the graph, and back up SWEPT further nodes.

        Where leaf values were forgotten, all are evaluated anew, and backed up until they hold.
        """
        with self.graph.lock:
            changed = self._changed()
            self.leaves.knows(changed)  # which looks whether the network is the same
            if is_anew := self._forgotten != self.leaves.num_forgotten:
                self._forgotten, changed = self.leaves.num_forgotten, self._nodes()[::-1]
            self._enter(changed)
            if is_anew:
                self._settle(self._value, changed)
            self._sweep(changed)
            self._changes.clear()
            n = self.graph.num_ids
            if n:
                ids = np.arange(self._next - 1, self._next - 1 - min(SWEPT, n), -1) % n
                self._sweep(ids)
                self._next = int(ids[-1])

    def renew(self) -> None:
        """The network has changed: evaluate leaf values anew, and back up until values hold.

        Of more than RENEWED nodes the leaf values of so many are evaluated, in turn: each copy of a
        network then costs the same, however large the graph.
        """
        with self.graph.lock:
            n = self.graph.num_ids
            turn = np.arange(self._renewed, self._renewed + min(RENEWED, n)) % max(n, 1)
            turn = turn[self.graph.arrays.in_degree[turn] != FREED]
            self.leaves.renew(turn, CHUNK)
            self._forgotten = self.leaves.num_forgotten
            new = self._enter(self._nodes())
            self._settle(self._value, np.concatenate([self._changed(), new, turn]))
            self._changes.clear()
            self._renewed = int((self._renewed + RENEWED) % n) if n > RENEWED else 0

    def values(self, nodes: ArrayLike) -> NDArray[np.float64]:
        """V(s) of node ids int64 [n], as of the last update: float64 [n].

        Raises:
            KeyError: for what is no id of a node.
            ValueError: for a node that came after it.
        """
        with self.graph.lock:
            self._require_followed(nodes := as_indices("nodes", nodes), self._has_value)
            return self._value[nodes]

    def targets(self, nodes: ArrayLike, actions: ArrayLike) -> NDArray[np.float32]:
        """Q(s, a) of pairs [B], the prior left out, as at the roots of `q_targets`: float32 [B].

        Raises as `values`, and ValueError for a node whose transitions changed since the update,
        another number of actions, or one out of range.
        """
        with self.graph.lock:
            nodes, actions = as_indices("nodes", nodes), as_indices("actions", actions)
            self._require_followed(nodes, self._follows)
            if nodes.shape != actions.shape:
                raise ValueError(
                    f"Require an action per node, got {actions.shape} for {nodes.shape}"
                )
            if len(actions) and not 0 <= actions.min() <= actions.max() < self.graph.num_actions:
                raise ValueError(f"Require 0 <= action < {self.graph.num_actions}, got {actions}")
            targets = np.empty(len(nodes), np.float32)
            value_kernels.read_pairs(
                self.graph.arrays, self._value, self.leaves.q, nodes, actions, self.gamma, self._q,
                targets,
            )  # fmt: skip
            return targets

    def actions(self, nodes: ArrayLike) -> Actions:
        """argmax_a Q(s, a) of what `graph.find` returned: int64 [n].

        -1 for -1, for nodes in which nothing was tried, and for those that came, or whose
        transitions changed, since the last update.
        """
        with self.graph.lock:
            nodes = as_indices("nodes", nodes)
            self.graph.require_nodes(nodes[nodes != -1])
            return self._choose(nodes)

    def act(
        self, obs: NDArray[Any], otherwise: Network, keys: NDArray[Any] | None = None
    ) -> Actions:
        """Greedy actions int64 [n] for observations [n, *obs_shape], as training acts.

        Args:
            otherwise: asked for the actions of observations of which `actions` knows none.
            keys: of the states [n, *key_shape], where the graph has keys.
        """
        with self.graph.lock:
            return self._complete(self._choose(self._find(obs, keys)), obs, otherwise)

    def seen_policy(self, otherwise: Network) -> Callable[..., Actions]:
        """The policy that is greedy among what was really seen: function of (obs, keys=None).

        V(s) is the maximum over tried actions alone, and the network's where nothing was tried.
        Values are backed up until they hold, or BACKUPS are made, from the least that the rewards
        allow, and never kept: it makes no difference to training whether and when this is called.
        The policy stays as it is when graph or network change. `otherwise` is asked where nothing
        was tried.
        """
        with self.graph.lock:
            nodes, n = self._nodes(), self.graph.num_ids
            unknown = nodes[~self.leaves.knows(nodes)]
            q = self.leaves.q
            if len(unknown):  # came since the last update
                q = q.copy()
                q[unknown] = self.leaves.evaluated(unknown, min(len(unknown), CHUNK))
            value = np.fmax.reduce(q[:n], axis=1).astype(np.float64)
            least = least_value(self.graph.edges()["reward"], self.gamma)
            value[self.graph.arrays.degree[:n] > 0] = least
            self._settle(value, nodes, q, tried_only=True)
            chosen = np.empty(max(n, 1), np.int64)
            chosen[nodes] = self._best(nodes, value, q, tried_only=True)
            seen = KnownNodes(self.graph)
            seen.add(nodes)

            def policy(obs: NDArray[Any], keys: NDArray[Any] | None = None) -> Actions:
                with self.graph.lock:
                    found = self._find(obs, keys)
                    known = found[found >= 0]
                    actions = np.full(len(found), -1, np.int64)
                    actions[found >= 0] = np.where(seen.has(known), chosen[known % len(chosen)], -1)
                    return self._complete(actions, obs, otherwise)

            return policy

    def _find(self, obs, keys):
        keys = [None] * len(obs) if keys is None else keys
        return np.array(
            [self.graph.find(one, key) for one, key in zip(obs, keys, strict=True)], np.int64
        )

    def _complete(self, actions, obs, otherwise):
        unknown = actions < 0
        if unknown.any():
            actions[unknown] = otherwise(obs[unknown])
        return actions

    def _choose(self, nodes):
        actions = np.full(len(nodes), -1, np.int64)
        rows = np.flatnonzero(nodes >= 0)  # those of which something is known: often few
        rows = rows[self.graph.arrays.degree[nodes[rows]] > 0]
        if len(rows):
            rows = rows[self._follows(nodes[rows])]
        if len(rows):
            actions[rows] = self._best(nodes[rows], self._value, self.leaves.q, tried_only=False)
        return actions

    def _best(self, nodes, value, q, tried_only):
        actions = np.empty(len(nodes), np.int64)
        value_kernels.choose_actions(
            self.graph.arrays, value, q, nodes, self.gamma, self.prior, tried_only, self._q, actions
        )
        return actions

    # ----------------------------------------------------------------------------------------------
    # Storage
    # ----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What `restore` takes back, with the same further behaviour; some are views."""
        with self.graph.lock:
            self._make_room()
            rows = {"value": self._value[: self.graph.num_ids], "valued": self._valued.state()}
            waiting = {"pairs": np.array(self._changes, np.int64).reshape(-1, 2)}
            return {"rows": rows, "waiting": waiting, "next": self._next, "renewed": self._renewed}

    def restore(self, saved: dict[str, Any]) -> None:
        """Go on with what `state` returned, of this graph or of one restored from its state.

        Raises:
            KeyError: for what is missing.
            ValueError: for arrays that do not belong to the graph. Then nothing has changed.
        """
        with self.graph.lock:
            n = self.graph.num_ids
            value, valued = saved["rows"]["value"], saved["rows"]["valued"]
            pairs = saved["waiting"]["pairs"]
            check_array("value", value, np.float64, (n,))
            check_array("valued", valued, np.bool_, (n,))
            check_array("pairs", pairs, np.int64, (np.size(pairs) // 2, 2))
            if len(pairs) and not 0 <= pairs.min() <= pairs.max() < n:
                raise ValueError("Require changes of the graph's nodes")
            places = [int(saved[name]) % max(n, 1) for name in ("next", "renewed")]
            self._make_room()
            self._value[:n] = value
            self._next, self._renewed = places
            self._forgotten = self.leaves.num_forgotten
            self._valued.restore(valued)
            self._changes[:] = map(tuple, pairs.tolist())

    def _nodes(self):
        """All nodes."""
        ids = np.arange(self.graph.num_ids)
        return ids[self.graph.arrays.in_degree[ids] != FREED]

    def _changed(self):
        """Nodes in transitions that changed since the last update, the newest first."""
        changed = np.array(self._changes, np.int64).reshape(-1)[::-1]
        return changed[self.graph.arrays.in_degree[changed] != FREED]

    def _enter(self, nodes):
        """Nodes without a finite value get the network's. Returns them, each once."""
        holds = self._has_value(nodes) & np.isfinite(self._value[nodes])  # a network may give NaN
        new = np.unique(nodes[~holds])
        if len(new):
            leaf_q = self.leaves.values(new, min(len(new), CHUNK))
            value = np.fmax.reduce(leaf_q, axis=1)
            is_read = np.isnan(value) & (self.graph.arrays.degree[new] > 0)
            self._value[new] = np.where(is_read, 0.0, value)  # one that leads to itself forgets 0
            self._valued.add(new)
        return new

    def _has_value(self, nodes):
        self._make_room()
        knows = self.leaves.knows(nodes)
        return self._valued.has(nodes) & knows & (self._forgotten == self.leaves.num_forgotten)

    def _follows(self, nodes):
        """Are the transitions of ids int64 [n] those of the last update? bool [n]

        Others may lead to a state without a value, which kernels do not look at.
        """
        follows = self._has_value(nodes)
        if follows.any():  # none before the first update, when many changes wait
            changed = {node for node, _ in self._changes}
            follows &= np.array([node not in changed for node in nodes.tolist()])
        return follows

    def _require_followed(self, nodes, is_followed):
        self.graph.require_nodes(nodes)
        late = nodes[~is_followed(nodes)]
        if len(late):
            raise ValueError(
                f"Require an update since node {late[0]} was added or changed, or `renew` since "
                "leaf values were forgotten"
            )

    def _sweep(self, nodes):
        value_kernels.sweep_nodes(
            self.graph.arrays, self._value, self.leaves.q, nodes, self.gamma, self.prior, self._q
        )

    def _settle(self, value, nodes, q=None, tried_only=False):
        q = self.leaves.q if q is None else q
        n = self.graph.num_ids
        # Changes that are not followed add up to 1 / (1 - gamma) of one; updates go on with them.
        tolerance = TOLERANCE * (1 - self.gamma) if tried_only else TOLERANCE
        value_kernels.settle_values(
            self.graph.arrays, value[:n], q, nodes, self.gamma, self.prior, tried_only, tolerance,
            BACKUPS + 20 * n, self._q,
        )  # fmt: skip

    def _make_room(self):
        self._value = grown(self._value, self.graph.capacity)
