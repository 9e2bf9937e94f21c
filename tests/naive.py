"""Slow, plain oracles for the tests: dictionaries, lists and recursion in float64, no gbcore.

A transition is the tuple `(state, action, reward, done, next_state)`. States are the integer ids of
a `NaiveGraph`, which never reuses an id, so that tables of leaf values are indexed by state.
"""

from collections import Counter
from itertools import accumulate

import numpy as np


class NaiveGraph:
    """TransitionGraph on dictionaries: `out[state][(action, reward, done, next_state)] = count`."""

    def __init__(self, num_actions, obs_shape, obs_dtype=np.uint8):
        self.num_actions = num_actions
        self.obs_shape, self.obs_dtype = tuple(obs_shape), np.dtype(obs_dtype)
        self.id_of = {}  # bytes of the observation, or of the key -> state
        self.observation, self.key = {}, {}  # of each state
        self.out = {}
        self._uses = Counter()  # state -> distinct edges that lead to it
        self._next_id = 0

    def node(self, obs, key=None):
        """With a key, states are told apart by it, and keep the observation they came with."""
        name = np.ascontiguousarray(obs if key is None else key).tobytes()
        if name not in self.id_of:
            self.id_of[name] = self._next_id
            self.observation[self._next_id] = np.array(obs)
            self.key[self._next_id] = None if key is None else np.array(key)
            self.out[self._next_id] = {}
            self._next_id += 1
        return self.id_of[name]

    def find(self, obs, key=None):
        return self.id_of.get(np.ascontiguousarray(obs if key is None else key).tobytes(), -1)

    def add(self, node, action, reward, next_node, terminated):
        edge = (action, float(reward), bool(terminated), next_node)
        self._uses[next_node] += edge not in self.out[node]
        self.out[node][edge] = self.out[node].get(edge, 0) + 1

    def remove(self, node, action, reward, next_node, terminated):
        """One observation fewer. Forgets, and returns, the states that no edge names any more."""
        edge = (action, float(reward), bool(terminated), next_node)
        if edge not in self.out.get(node, {}):
            raise KeyError(f"no transition {edge} from node {node}")
        self.out[node][edge] -= 1
        if self.out[node][edge] > 0:
            return []
        del self.out[node][edge]
        self._uses[next_node] -= 1
        freed = [s for s in sorted({node, next_node}) if not self.out[s] and not self._uses[s]]
        for s in freed:
            del self.out[s], self._uses[s]
            obs, key = self.observation.pop(s), self.key.pop(s)
            del self.id_of[(obs if key is None else key).tobytes()]
        return freed

    @property
    def num_nodes(self):
        return len(self.out)

    @property
    def num_edges(self):
        return sum(len(edges) for edges in self.out.values())

    @property
    def num_transitions(self):
        return sum(sum(edges.values()) for edges in self.out.values())

    @property
    def novel_state_ratio(self):
        if self.num_transitions == 0:
            return 0.0
        return sum(1 for edges in self.out.values() if edges) / self.num_transitions

    def edges(self):
        """The edges as parallel arrays, like TransitionGraph.edges()."""
        rows = [
            (s, a, r, done, s2, f)
            for s, edges in self.out.items()
            for (a, r, done, s2), f in edges.items()
        ]
        columns = list(zip(*rows, strict=True)) or [()] * 6
        names = ("source", "action", "reward", "terminated", "next", "count")
        dtypes = (np.int64, np.int64, np.float64, np.bool_, np.int64, np.int64)
        return {
            name: np.array(column, dtype)
            for name, column, dtype in zip(names, columns, dtypes, strict=True)
        }

    def transitions(self, state, action=None):
        """{transition: count} of a state, or of one of its actions only."""
        return {
            (state, *edge): count
            for edge, count in self.out[state].items()
            if action is None or edge[0] == action
        }


# --- what a value is: a number, or a distribution on a support ---


class Scalars:
    """Values are floats. leaf_q: [S, A]."""

    def __init__(self, leaf_q, gamma):
        self.leaf_q, self.gamma = leaf_q, gamma

    def leaf(self, state, action):
        return float(self.leaf_q[state][action])

    def back_up(self, reward, done, value):
        return reward if done else reward + self.gamma * value

    def mean(self, weights, values):
        return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)

    def expectation(self, value):
        return value


class Categoricals:
    """Values are lists of probabilities. leaf_pmf: [S, A, n]; support: n evenly spaced atoms."""

    def __init__(self, leaf_pmf, support, gamma):
        self.leaf_pmf, self.support, self.gamma = leaf_pmf, [float(z) for z in support], gamma

    def leaf(self, state, action):
        return [float(p) for p in self.leaf_pmf[state][action]]

    def back_up(self, reward, done, value):
        """Clip reward + gamma Z; an atom at x then gives z_i the share (1 - |x - z_i| / dz)+."""
        z = self.support
        dz = (z[-1] - z[0]) / (len(z) - 1)
        projected = [0.0] * len(z)
        for atom, mass in [(0.0, 1.0)] if done else zip(z, value, strict=True):
            x = min(max(reward + self.gamma * atom, z[0]), z[-1])
            for i, target in enumerate(z):
                projected[i] += mass * max(0.0, 1.0 - abs(x - target) / dz)
        return projected

    def mean(self, weights, values):
        total = sum(weights)
        return [
            sum(w * p for w, p in zip(weights, column, strict=True)) / total
            for column in zip(*values, strict=True)
        ]

    def expectation(self, value):
        return sum(p * z for p, z in zip(value, self.support, strict=True))


# --- nested backups ---


class Oracle:
    """Targets on a NaiveGraph.

    values: Scalars or Categoricals; rule, prior: as in gbcore; selector_q, policy: [S, A] or None.
    """

    def __init__(self, graph, values, rule, selector_q=None, policy=None, prior=0):
        self.graph, self.values, self.rule = graph, values, rule
        self.selector_q, self.policy, self.prior = selector_q, policy, prior
        self.tied = False  # a greedy choice between different values was left to rounding
        self._memo = {}

    def target(self, state, action, depth):
        """G_depth(state, action): exact, synchronous, unlimited breadth."""
        key = (state, action, depth)
        if key not in self._memo:
            outcomes = self.graph.transitions(state, action)
            if depth == 0 or not outcomes:
                self._memo[key] = self.values.leaf(state, action)
            else:
                self._memo[key] = self._average(outcomes, lambda t: self._state(t[4], depth - 1))
        return self._memo[key]

    def _state(self, state, depth):
        """V_depth(state)."""
        key = (state, depth)
        if key not in self._memo:
            counts = [self._count(state, a) for a in self._actions()]
            pairs = [
                self._with_prior(state, a, self.target(state, a, depth), counts[a])
                for a in self._actions()
            ]
            if self.rule != "behaviour":
                self._memo[key] = self._read(state, pairs)
            elif depth == 0 or not any(counts):
                self._memo[key] = self.leaf_state(state)
            else:
                self._memo[key] = self.values.mean(counts, pairs)
        return self._memo[key]

    def limited_target(self, state, action, kept):
        """Breadth-limited target of depth len(kept), given the kept transitions of each level.

        kept[0] must hold all outcomes of (state, action), which is always expanded.
        """
        if not self.graph.transitions(state, action):
            return self.values.leaf(state, action)
        return self._limited_pair(state, action, kept, 0)

    def _limited_pair(self, state, action, kept, level):
        # A pair averages over all its outcomes; those that were not kept end in a leaf, also where
        # the same next state is expanded by way of another transition.
        def next_value(t):
            return (
                self._limited_state(t[4], kept, level + 1)
                if t in kept[level]
                else self.leaf_state(t[4])
            )

        return self._average(self.graph.transitions(state, action), next_value)

    def _limited_state(self, state, kept, level):
        expanded = {t[1] for t in kept[level] if t[0] == state} if level < len(kept) else set()
        if not expanded:
            return self.leaf_state(state)
        counts = {a: self._count(state, a) for a in expanded}
        pairs = {
            a: self._with_prior(state, a, self._limited_pair(state, a, kept, level), counts[a])
            for a in expanded
        }
        if self.rule == "behaviour":
            return self.values.mean(list(counts.values()), list(pairs.values()))
        return self._read(
            state,
            [pairs[a] if a in pairs else self.values.leaf(state, a) for a in self._actions()],
        )

    def trajectory_target(self, start, depth, node, action, reward, next_node, terminated, cut):
        """Target of ring row `start` along its own trajectory; row 0 follows the last row."""

        def pair(t, steps):
            if terminated[t]:
                return self.values.back_up(reward[t], True, None)
            after, s2 = (t + 1) % len(node), next_node[t]
            if steps == 1 or cut[t]:
                value = self.leaf_state(s2)
            else:
                taken = int(action[after])
                value = self._with_prior(s2, taken, pair(after, steps - 1), 1)
                if self.rule != "behaviour":
                    per_action = [self.values.leaf(s2, a) for a in self._actions()]
                    per_action[taken] = value
                    value = self._read(s2, per_action)
            return self.values.back_up(reward[t], False, value)

        return pair(start, depth)

    def leaf_state(self, state):
        """V_0(state)."""
        return self._read(state, [self.values.leaf(state, a) for a in self._actions()])

    def _count(self, state, action):
        return sum(self.graph.transitions(state, action).values())

    def _with_prior(self, state, action, value, count):
        """A nested value, as the mean of count observations and the prior's leaf values."""
        if self.prior == 0 or count == 0:
            return value
        return self.values.mean([count, self.prior], [value, self.values.leaf(state, action)])

    def _read(self, state, per_action):
        """Value of a state from the values of its actions."""
        if self.rule == "policy":
            return self.values.mean(self.policy[state], per_action)
        if self.rule == "double" or (self.rule == "behaviour" and self.selector_q is not None):
            return per_action[int(np.argmax(self.selector_q[state]))]
        best = max(per_action, key=self.values.expectation)
        for value in per_action:
            gap = self.values.expectation(best) - self.values.expectation(value)
            self.tied |= gap < 1e-9 and not np.allclose(value, best, rtol=0, atol=1e-9)
        return best

    def _average(self, transitions, next_value):
        backed_up = [
            self.values.back_up(t[2], t[3], None if t[3] else next_value(t)) for t in transitions
        ]
        return self.values.mean(list(transitions.values()), backed_up)

    def _actions(self):
        return range(self.graph.num_actions)


# --- breadth ---


def next_level(graph, kept):
    """{transition: count} of the distinct states that the kept transitions lead to."""
    level = {}
    for state in sorted({t[4] for t in kept if not t[3]}):
        level.update(graph.transitions(state))
    return level


def enumerate_kept(graph, state, action, depth, breadth):
    """All expansions that breadth-limited sampling can make: (probability, kept) pairs."""

    def extend(probability, kept):
        if len(kept) == depth:
            yield probability, kept
            return
        level = next_level(graph, kept[-1])
        transitions = list(level)
        if breadth == 0 or len(level) <= breadth:
            yield from extend(probability, [*kept, frozenset(transitions)])
            return
        for subset, p in subset_probabilities(list(level.values()), breadth).items():
            yield from extend(probability * p, [*kept, frozenset(transitions[i] for i in subset)])

    yield from extend(1.0, [frozenset(graph.transitions(state, action))])


def subset_probabilities(weights, size):
    """{frozenset of indices: probability} of successive sampling without replacement."""
    layer = {frozenset(): 1.0}
    for _ in range(size):
        following = {}
        for subset, p in layer.items():
            rest = sum(w for i, w in enumerate(weights) if i not in subset)
            for i, w in enumerate(weights):
                if i not in subset:
                    grown = subset | {i}
                    following[grown] = following.get(grown, 0.0) + p * w / rest
        layer = following
    return layer


# --- prioritised sampling ---


class NaiveSumTree:
    """A list of priorities."""

    def __init__(self, capacity):
        self.priorities = [0.0] * capacity

    def set(self, indices, priorities):
        for i, p in zip(indices, priorities, strict=True):
            self.priorities[int(i)] = float(p)

    @property
    def total(self):
        return sum(self.priorities)

    def find(self, target):
        """The index whose half-open interval of the cumulative sum holds target."""
        if not 0 <= target < self.total:
            raise ValueError(f"Require 0 <= target < total, got {target}")
        cumulative = accumulate(self.priorities)
        return next(i for i, end in enumerate(cumulative) if target < end)


# --- values of the whole graph ---


def graph_values(graph, leaf_q, gamma, prior):
    """V(s) of every state of a NaiveGraph, by sweeps over all of them until nothing moves.

    Q(s, a) = (sum_T f(T) (r + gamma (1 - done) V(s')) + prior q(s, a)) / (c(s, a) + prior) of seen
    pairs, else q(s, a); V(s) = max_a Q(s, a). gamma < 1.
    """
    return values_of(
        graph, lambda values, s, a: graph_action_value(graph, values, leaf_q, s, a, gamma, prior)
    )


def values_of(graph, action_value):
    """V(s) = max_a action_value(V, s, a) of every state."""
    values, moved = dict.fromkeys(graph.out, 0.0), 1.0
    while moved > 1e-13:
        new = {
            s: max(action_value(values, s, a) for a in range(graph.num_actions)) for s in graph.out
        }
        moved = max((abs(new[s] - values[s]) for s in new), default=0.0)
        values = new
    return values


def graph_action_value(graph, values, leaf_q, state, action, gamma, prior):
    transitions, leaf = graph.transitions(state, action), float(leaf_q[state][action])
    if not transitions:
        return leaf
    seen = sum(f * (r if done else r + gamma * values[s2])
               for (_, _, r, done, s2), f in transitions.items())  # fmt: skip
    return (seen + prior * leaf) / (sum(transitions.values()) + prior)


class FrontierWorth(dict):
    """w(s) by state of a NaiveGraph: 1 / n of the n-th state found whose cells, sorted, are so."""

    def __init__(self):
        self.found = {}

    def meet(self, state, obs):
        if state not in self and obs is not None:
            kind = tuple(sorted(tuple(np.ravel(cell)) for row in obs for cell in row))
            self.found[kind] = self.found.get(kind, 0) + 1
            self[state] = 1 / self.found[kind]
