"""The nested backup of scalar values over `Subgraphs`; `categorical.back_up` is its twin."""

import numpy as np

from gbcore.jit import jit, jit_in_place

GREEDY, DOUBLE, POLICY, BEHAVIOUR = 0, 1, 2, 3  # how a state's value is read from its actions


@jit
def back_up(sub, leaf_q, best, policy, gamma, rule, prior):
    """Q of every pair [P], the deepest level first: paper Eq. 3 to 8; below the roots with prior.

    best int64 [M] is the online network's action, empty where there is none; policy [M, A], empty
    likewise.
    """
    num_leaves, num_actions = leaf_q.shape
    end = num_leaves + sub.vertex_row.shape[0]
    #   values  [M + V + 1 + P]   leaves | vertices | the end of an episode | pairs
    values = np.zeros(end + 1 + sub.pair_action.shape[0], leaf_q.dtype)
    q = np.empty((1, num_actions), leaf_q.dtype)
    leaf_rule = rule
    if rule == BEHAVIOUR:  # beyond the boundary no action was made
        leaf_rule = GREEDY if best.shape[0] == 0 else DOUBLE
    for row in range(num_leaves):
        values[row] = read_value(leaf_rule, leaf_q, row, best, policy, row)
    of_pairs = values[end + 1 :]
    for level in range(sub.level_pairs.shape[0] - 2, -1, -1):
        o0, o1 = sub.level_outcomes[level], sub.level_outcomes[level + 1]
        add_outcomes(sub, gamma, o0, o1, values, of_pairs)
        v0, v1 = sub.level_vertices[level], sub.level_vertices[level + 1]
        if v0 == v1:
            continue
        if prior > 0:
            add_prior(sub, leaf_q, prior, v0, v1, of_pairs)
        if rule == BEHAVIOUR:
            average_pairs(sub, v0, v1, of_pairs, values[num_leaves:])
        else:
            read_vertices(sub, leaf_q, rule, best, policy, v0, v1, of_pairs, values[num_leaves:], q)
    for i in range(sub.root_row.shape[0]):
        if sub.root_row[i] >= 0:
            of_pairs[i] = leaf_q[sub.root_row[i], sub.pair_action[i]]
    return of_pairs


@jit  # a rule of one's own may make arrays
def read_value(rule, q, i, best, policy, row):
    """Value of the state nodes[row] from its action values q[i] under greedy, double or policy."""
    if rule == DOUBLE:
        return q[i, best[row]]
    if rule == GREEDY:
        value = q[i, 0]
        for a in range(1, q.shape[1]):
            is_more = (q[i, a] > value) | np.isnan(value)
            value = q[i, a] if is_more else value  # a branch would often be guessed wrongly
        return value
    value = policy[row, 0] * q[i, 0]
    for a in range(1, q.shape[1]):
        value += policy[row, a] * q[i, a]
    return value


@jit_in_place
def add_outcomes(sub, gamma, begin, end, values, of_pairs):
    """Each outcome of a level adds to its pair."""
    for k in range(begin, end):
        o = np.uint64(k)  # unsigned: no test for a negative index
        value = sub.outcome_reward[o] + gamma * values[np.uint64(sub.outcome_vertex[o])]
        of_pairs[np.uint64(sub.outcome_pair[o])] += sub.outcome_weight[o] * value


@jit_in_place
def add_prior(sub, leaf_q, prior, begin, end, of_pairs):
    """The pairs of vertices begin .. end go towards the network's value."""
    for v in range(begin, end):
        for p in range(sub.vertex_pairs[v], sub.vertex_pairs[v + 1]):
            share = prior / (sub.pair_count[p] + prior)
            of_pairs[p] += share * (leaf_q[sub.vertex_row[v], sub.pair_action[p]] - of_pairs[p])


@jit_in_place
def average_pairs(sub, begin, end, of_pairs, of_vertices):
    """Vertices begin .. end are worth the mean of their pairs, by count."""
    for v in range(begin, end):
        total, count = 0.0, 0
        for p in range(sub.vertex_pairs[v], sub.vertex_pairs[v + 1]):
            total += sub.pair_count[p] * of_pairs[p]
            count += sub.pair_count[p]
        if not np.isfinite(total):  # the sum overflows where the mean need not
            total = 0.0
            for p in range(sub.vertex_pairs[v], sub.vertex_pairs[v + 1]):
                total += sub.pair_count[p] / count * of_pairs[p]
            count = 1
        of_vertices[v] = total / max(count, 1)


@jit
def read_vertices(sub, leaf_q, rule, best, policy, begin, end, of_pairs, of_vertices, q):
    """Values of vertices begin .. end: the rule reads their pairs, and leaf values of actions
    without a pair. q [1, A] is scratch.
    """
    # Read from the tuple once: in a loop, each read would count a reference up and down.
    vertex_row, vertex_pairs, pair_action = sub.vertex_row, sub.vertex_pairs, sub.pair_action
    for v in range(begin, end):
        row = vertex_row[v]
        for a in range(q.shape[1]):
            q[0, a] = leaf_q[row, a]
        for k in range(vertex_pairs[v], vertex_pairs[v + 1]):
            p = np.uint64(k)
            q[0, np.uint64(pair_action[p])] = of_pairs[p]
        of_vertices[v] = read_value(rule, q, 0, best, policy, row)
