"""Slow, plain oracles for the tests: dictionaries, lists and recursion in float64, no gbcore.

A transition is the tuple `(state, action, reward, done, next_state)`. States are the integer ids of
a `NaiveGraph`, which never reuses an id, so that tables of leaf values are indexed by state.
"""

import copy
import functools
import itertools
from collections import Counter

import numpy as np


class NaiveGraph:
    """TransitionGraph on dictionaries: `out[state][(action, reward, done, next_state)] = count`."""

    def __init__(self, num_actions):
        self.num_actions, self._ids = num_actions, itertools.count()
        self.id_of = {}  # bytes of the observation, or of the key -> state
        self.observation, self.key, self.out = {}, {}, {}  # of each state

    def node(self, obs, key=None):
        """With a key, states are told apart by it, and keep the observation they came with."""
        name = np.ascontiguousarray(obs if key is None else key).tobytes()
        if name not in self.id_of:
            self.id_of[name] = state = next(self._ids)
            self.observation[state], self.key[state] = np.array(obs), copy.copy(key)
            self.out[state] = Counter()
        return self.id_of[name]

    def find(self, obs, key=None):
        return self.id_of.get(np.ascontiguousarray(obs if key is None else key).tobytes(), -1)

    def add(self, node, action, reward, next_node, terminated):
        self.out[node][action, float(reward), bool(terminated), next_node] += 1

    def remove(self, node, action, reward, next_node, terminated):
        """One observation fewer. Forgets, and returns, the states that no edge names any more."""
        edge = action, float(reward), bool(terminated), next_node
        self.out[node][edge] -= 1
        self.out[node] += Counter()  # without what came to 0
        named = {s for row in self.edges() for s in (row[0], row[4])}
        freed = sorted({node, next_node} - named)
        for state in freed:
            del self.out[state], self.observation[state], self.key[state]
        self.id_of = {name: state for name, state in self.id_of.items() if state in self.out}
        return freed

    def edges(self):
        """Rows (state, action, reward, done, next state, count)."""
        return [(s, *edge, count) for s, edges in self.out.items() for edge, count in edges.items()]

    def transitions(self, state, action=None):
        """{transition: count} of a state, or of one of its actions only."""
        return {
            (state, *edge): count
            for edge, count in self.out[state].items()
            if action is None or edge[0] == action
        }


class Scalars:
    """Values are floats. leaves: [S, A]."""

    def __init__(self, leaves, gamma):
        self.leaves, self.gamma = leaves, gamma

    def back_up(self, reward, done, value):
        return reward + self.gamma * (not done) * value

    def expectation(self, value):
        return value


class Categoricals:
    """Values are distributions [n] on a support of n evenly spaced atoms. leaves: [S, A, n]."""

    def __init__(self, leaves, support, gamma):
        self.leaves, self.support, self.gamma = leaves, support, gamma

    def back_up(self, reward, done, value):
        """Clip reward + gamma Z; an atom at x then gives z_i the share (1 - |x - z_i| / dz)+."""
        z = self.support
        x = np.clip(reward + self.gamma * (not done) * z, z[0], z[-1])
        dz = (z[-1] - z[0]) / (len(z) - 1)
        return value @ np.maximum(0, 1 - abs(x[:, None] - z) / dz)

    def expectation(self, value):
        return value @ self.support


def mean(weights, values):
    """Of floats or distributions."""
    return np.average(values, axis=0, weights=weights)


class Oracle:
    """Targets on a NaiveGraph, of Scalars or Categoricals; selector_q, policy: [S, A] or None."""

    def __init__(self, graph, values, rule, selector_q=None, policy=None, prior=0):
        self.graph, self.values, self.rule = graph, values, rule
        self.selector_q, self.policy, self.prior = selector_q, policy, prior
        self.tied = False  # a greedy choice between different values was left to rounding

    def target(self, state, action, depth):
        """G_depth(state, action): exact, all transitions are kept."""
        ((_, kept),) = enumerate_kept(self.graph, state, action, depth, 0)
        return self.limited_target(state, action, kept)

    def limited_target(self, state, action, kept):
        """The target given the transitions kept on each level: on the first, all that there are."""

        @functools.cache
        def of_state(state, level):
            expanded = {t[1] for t in kept[level] if t[0] == state} if level < len(kept) else ()
            if not expanded:
                return self.leaf_state(state)
            counts, pairs = [], list(self.values.leaves[state])
            for a in expanded:
                counts.append(sum(self.graph.transitions(state, a).values()))
                pairs[a] = self._with_prior(state, a, of_pair(state, a, level), counts[-1])
            if self.rule == "behaviour":
                return mean(counts, [pairs[a] for a in expanded])
            return self._read(state, pairs)

        def of_pair(state, action, level):
            # A pair averages over all its outcomes; those that were not kept end in a leaf, also
            # where the same next state is expanded by way of another transition.
            def backed_up(t):
                is_leaf = t[3] or t not in kept[level]
                value = self.leaf_state(t[4]) if is_leaf else of_state(t[4], level + 1)
                return self.values.back_up(t[2], t[3], value)

            outcomes = self.graph.transitions(state, action)
            return mean(list(outcomes.values()), [backed_up(t) for t in outcomes])

        is_seen = self.graph.transitions(state, action)
        return of_pair(state, action, 0) if is_seen else self.values.leaves[state][action]

    def trajectory_target(self, start, depth, node, action, reward, next_node, terminated, cut):
        """Target of ring row `start` along its own trajectory; row 0 follows the last row."""

        def pair(t, steps):
            after, s2 = (t + 1) % len(node), next_node[t]
            value = self.leaf_state(s2)
            if not (terminated[t] or cut[t] or steps == 1):
                taken, pairs = int(action[after]), list(self.values.leaves[s2])
                pairs[taken] = value = self._with_prior(s2, taken, pair(after, steps - 1), 1)
                if self.rule != "behaviour":
                    value = self._read(s2, pairs)
            return self.values.back_up(reward[t], terminated[t], value)

        return pair(start, depth)

    def leaf_state(self, state):
        """V_0(state)."""
        return self._read(state, list(self.values.leaves[state]))

    def _with_prior(self, state, action, value, count):
        """A nested value, as the mean of count observations and the prior's leaf values."""
        return mean([count, self.prior], [value, self.values.leaves[state][action]])

    def _read(self, state, per_action):
        """Value of a state from the values of its actions."""
        if self.rule == "policy":
            return mean(self.policy[state], per_action)
        if self.rule == "double" or (self.rule == "behaviour" and self.selector_q is not None):
            return per_action[int(np.argmax(self.selector_q[state]))]
        best = max(per_action, key=self.values.expectation)
        for value in per_action:
            gap = self.values.expectation(best) - self.values.expectation(value)
            self.tied |= gap < 1e-9 and not np.allclose(value, best, rtol=0, atol=1e-9)
        return best


def enumerate_kept(graph, state, action, depth, breadth):
    """All expansions that breadth-limited sampling can make: (probability, kept) pairs."""

    def extend(probability, kept):
        if len(kept) == depth:
            yield probability, kept
            return
        level = {}  # count of each transition of the states that the kept ones lead to
        for after in sorted({t[4] for t in kept[-1] if not t[3]}):
            level.update(graph.transitions(after))
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
