"""The nested Bellman backup of scalar values over `Subgraphs`."""

import numpy as np

from gbcore.jit import jit
from gbcore.kernels.expand import FITS, find_misfit

GREEDY, DOUBLE, POLICY, BEHAVIOUR = 0, 1, 2, 3  # how a state's value is read from its actions


@jit
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


@jit
def back_up(sub, leaf_q, best, policy, gamma, rule, prior, values, pair_q):
    """Nested Bellman backup of every pair, deepest level first: paper Eq. 3 to 8.

    best int64 [M] is the online network's action, empty where there is none; policy [M, A], empty
    likewise. Out: values [M + V + 1] of all vertices, pair_q [P], below the roots with the prior.
    Returns FITS, or nothing is written and `find_misfit` says why.
    """
    least_row = -1 if rule == BEHAVIOUR and prior == 0 else 0
    misfit = find_misfit(sub, leaf_q.shape[1], least_row)
    if misfit != FITS:
        return misfit
    vertex_row, vertex_pairs = sub.vertex_row, sub.vertex_pairs
    pair_action, pair_count = sub.pair_action, sub.pair_count
    outcome_pair, outcome_vertex = sub.outcome_pair, sub.outcome_vertex
    outcome_weight, outcome_reward = sub.outcome_weight, sub.outcome_reward
    num_leaves, num_actions = leaf_q.shape
    num_vertices = vertex_row.shape[0]
    q = np.empty((1, num_actions), leaf_q.dtype)
    leaf_rule = rule
    if rule == BEHAVIOUR:  # what would be done beyond the boundary is not known
        leaf_rule = GREEDY if best.shape[0] == 0 else DOUBLE
    for row in range(num_leaves):
        values[row] = read_value(leaf_rule, leaf_q, row, best, policy, row)
    values[num_leaves + num_vertices] = 0.0
    pair_q[:] = 0.0
    for level in range(sub.level_pairs.shape[0] - 2, -1, -1):
        for k in range(sub.level_outcomes[level], sub.level_outcomes[level + 1]):
            o = np.uint64(k)  # unsigned: no test for a negative index
            value = outcome_reward[o] + gamma * values[np.uint64(outcome_vertex[o])]
            pair_q[np.uint64(outcome_pair[o])] += outcome_weight[o] * value
        for v in range(sub.level_vertices[level], sub.level_vertices[level + 1]):
            row = vertex_row[v]
            first, last = vertex_pairs[v], vertex_pairs[v + 1]
            if prior > 0:
                for p in range(first, last):
                    share = prior / (pair_count[p] + prior)
                    pair_q[p] += share * (leaf_q[row, pair_action[p]] - pair_q[p])
            if rule == BEHAVIOUR:
                total = 0.0
                count = 0
                for p in range(first, last):
                    total += pair_count[p] * pair_q[p]
                    count += pair_count[p]
                if not np.isfinite(total):  # the sum overflows where the mean need not
                    total = 0.0
                    for p in range(first, last):
                        total += pair_count[p] / count * pair_q[p]
                    count = 1
                values[num_leaves + v] = total / max(count, 1)
            else:
                for a in range(num_actions):
                    q[0, a] = leaf_q[row, a]
                for k in range(first, last):
                    p = np.uint64(k)
                    q[0, np.uint64(pair_action[p])] = pair_q[p]
                values[num_leaves + v] = read_value(rule, q, 0, best, policy, row)
    for i in range(sub.root_row.shape[0]):
        if sub.root_row[i] >= 0:
            pair_q[i] = leaf_q[sub.root_row[i], pair_action[i]]
    return FITS
