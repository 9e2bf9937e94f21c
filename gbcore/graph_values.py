"""GraphValues: the nested backup of `targets.py` over the whole graph, at no depth cut off."""

import weakref

import numpy as np

from gbcore import kernels
from gbcore.graph import as_indices
from gbcore.interner import Rows, check_array
from gbcore.kernels import FREED
from gbcore.leaf_table import UNKNOWN

CHUNK = 128  # states per evaluation, at most
SWEPT = 2_000  # nodes backed up per update
TOLERANCE = 1e-3  # largest change of a value in a sweep after which `renew` is done
SWEEPS = 30  # of `renew` at most; what is left comes with the updates


class GraphValues:
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

    Args:
        graph: the TransitionGraph.
        leaves: its `LeafTable`.
        gamma: the discount, in [0, 1).
        prior: observations that q counts as, in [0, inf).

    Raises:
        ValueError: for a discount or prior out of range.
    """

    def __init__(self, graph, leaves, gamma, prior=0.0):
        if not 0 <= gamma < 1:
            raise ValueError(f"Require 0 <= gamma < 1, got {gamma}")
        if not 0 <= prior < np.inf:
            raise ValueError(f"Require 0 <= prior < inf, got {prior}")
        self.graph, self.leaves, self.gamma, self.prior = graph, leaves, float(gamma), float(prior)
        self._value = np.zeros(1024)
        self._generation = np.full(1024, UNKNOWN, np.int64)  # of the id, since it has a value
        self._q = np.empty(graph.num_actions)  # scratch
        self._next = 0  # the id that the sweeps go on below
        self._changes = graph.watch()  # pairs of nodes, since the last time they were followed
        weakref.finalize(self, graph.unwatch, self._changes)
        self._converge()

    def update(self):
        """Follow what changed in the graph, and back up SWEPT further nodes."""
        changed = np.array(self._changes, np.int64).reshape(-1)[::-1]  # the newest first
        self._changes.clear()
        changed = changed[self.graph.arrays.in_degree[changed] != FREED]
        self._make_room()
        new = np.unique(changed[~self._has_value(changed)])
        if len(new):
            self._value[new] = self.leaves.values(new, min(len(new), CHUNK)).max(axis=1)
            self._generation[new] = self.graph.generations[new]
        self._sweep(changed)
        n = self.graph.num_ids
        if n:
            ids = np.arange(self._next - 1, self._next - 1 - min(SWEPT, n), -1) % n
            self._sweep(ids)
            self._next = int(ids[-1])

    def renew(self):
        """The network has changed: evaluate all leaf values anew, and sweep until values stay."""
        self.leaves.forget_all()
        self._converge()

    def _converge(self):
        self._changes.clear()
        ids = np.arange(self.graph.num_ids - 1, -1, -1)
        nodes = ids[self.graph.arrays.in_degree[ids] != FREED]
        self.leaves.values(nodes, CHUNK)
        self._make_room()
        self._generation[nodes] = self.graph.generations[nodes]
        for _ in range(SWEEPS):
            if self._sweep(ids) <= TOLERANCE:
                break

    def values(self, nodes):
        """V(s) of node ids int64 [n], as of the last update: float64 [n].

        Raises:
            KeyError: for what is no id of a node.
            ValueError: for a node that came after it.
        """
        self._require_followed(nodes := as_indices("nodes", nodes), self._has_value)
        return self._value[nodes]

    def targets(self, nodes, actions):
        """Q(s, a) of pairs [B], the prior left out, as at the roots of `q_targets`: float32 [B].

        Raises as `values`, and ValueError for a node whose transitions changed since the update,
        another number of actions, or one out of range.
        """
        nodes, actions = as_indices("nodes", nodes), as_indices("actions", actions)
        self._require_followed(nodes, self._follows)
        if nodes.shape != actions.shape:
            raise ValueError(f"Require an action per node, got {actions.shape} for {nodes.shape}")
        if len(actions) and not 0 <= actions.min() <= actions.max() < self.graph.num_actions:
            raise ValueError(f"Require 0 <= action < {self.graph.num_actions}, got {actions}")
        targets = np.empty(len(nodes), np.float32)
        kernels.read_pairs(
            self.graph.arrays, self._value, self.leaves.q, nodes, actions, self.gamma, self._q,
            targets,
        )  # fmt: skip
        return targets

    def actions(self, nodes):
        """argmax_a Q(s, a) of what `graph.find` returned: int64 [n].

        -1 for -1, for nodes in which nothing was tried, and for those that came, or whose
        transitions changed, since the last update.
        """
        nodes = as_indices("nodes", nodes)
        self.graph.require_nodes(nodes[nodes >= 0])
        return self._choose(nodes)

    def act(self, obs, otherwise):
        """Greedy actions int64 [n] for observations [n, *obs_shape].

        `otherwise`, a function of such observations, is asked where `actions` knows none. Where the
        graph has keys, ask `graph.find` and `actions` instead.
        """
        actions = self._choose(np.array([self.graph.find(one) for one in obs], np.int64))
        unknown = actions < 0
        if unknown.any():
            actions[unknown] = otherwise(obs[unknown])
        return actions

    def _choose(self, nodes):
        known = nodes >= 0
        known[known] = self._follows(nodes[known])
        actions = np.empty(len(nodes), np.int64)
        kernels.choose_actions(
            self.graph.arrays, self._value, self.leaves.q, np.where(known, nodes, -1),
            self.gamma, self.prior, self._q, actions,
        )  # fmt: skip
        return actions

    # ----------------------------------------------------------------------------------------------
    # Storage
    # ----------------------------------------------------------------------------------------------

    def state(self):
        """What `restore` takes back, with the same further behaviour; some are views."""
        self._make_room()
        waiting = np.array(self._changes, np.int64).reshape(-1, 2)
        n = self.graph.num_ids
        rows = Rows(value=self._value[:n], valued=self._generation[:n] == self.graph.generations)
        return {"rows": rows, "waiting": Rows(pairs=waiting), "next": self._next}

    def restore(self, saved):
        """Go on with what `state` returned, of this graph or of one restored from its state.

        Raises:
            KeyError: for what is missing.
            ValueError: for values of another graph, or not finite. Then nothing has changed.
        """
        n = self.graph.num_ids
        value, valued = saved["rows"]["value"], saved["rows"]["valued"]
        pairs = saved["waiting"]["pairs"]
        check_array("value", value, np.float64, (n,))
        check_array("valued", valued, np.bool_, (n,))
        check_array("pairs", pairs, np.int64, (len(pairs), 2))
        if not np.isfinite(value).all():
            raise ValueError("Require finite values")
        if len(pairs) and not 0 <= pairs.min() <= pairs.max() < n:
            raise ValueError("Require changes of the graph's nodes")
        wanted = (self.graph.arrays.degree[:n] > 0) | (self.graph.arrays.in_degree[:n] > 0)
        wanted[pairs] = False
        if (wanted & ~valued).any():
            raise ValueError("Require a value of every node in a transition, or a change of it")
        if not 0 <= saved["next"] < max(n, 1):
            raise ValueError(f"Require 0 <= next < {n}, got {saved['next']}")
        self._make_room()
        self._value[:n], self._next = value, int(saved["next"])
        self._generation[:n] = np.where(valued, self.graph.generations, UNKNOWN)
        self._generation[n:] = UNKNOWN
        self._changes[:] = map(tuple, pairs.tolist())

    def _has_value(self, nodes):
        self._make_room()
        is_this_state = self._generation[nodes] == self.graph.generations[nodes]
        return is_this_state & self.leaves.knows(nodes)

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
        return kernels.sweep_nodes(
            self.graph.arrays, self._value, self.leaves.q, nodes, self.gamma, self.prior, self._q
        )

    def _make_room(self):
        more = len(self.graph.arrays.degree) - len(self._value)
        if more > 0:
            self._value = np.pad(self._value, (0, more))
            self._generation = np.pad(self._generation, (0, more), constant_values=UNKNOWN)
