"""Kernels behind `GraphValues`: values of all nodes, float64 [N] by id."""

import numpy as np

from gbcore.jit import jit
from gbcore.kernels import EMPTY, FREED

BLOCK = 1_024  # ids that a sweep passes over at once where none of them waits


@jit
def read_actions(graph, value, leaf_q, node, gamma, prior, q):
    """Q(s, a) of one node from the values of its successors, into q float64 [A]."""
    q[:] = 0.0
    start = graph.block_start[node]
    for e in range(start, start + graph.degree[node]):
        following = 0.0 if graph.edge_terminated[e] else gamma * value[graph.edge_next[e]]
        a = graph.edge_action[e]
        weight = graph.edge_count[e] / (graph.pair_count[node, a] + prior)
        q[a] += weight * (graph.edge_reward[e] + following)  # a weighted sum may overflow later
    for a in range(q.shape[0]):
        count = graph.pair_count[node, a]
        if count == 0:
            q[a] = leaf_q[node, a]
        elif prior > 0:
            q[a] += prior / (count + prior) * leaf_q[node, a]


@jit
def best_action(graph, value, leaf_q, node, gamma, prior, tried_only, q):
    """The first argmax of Q(s, a), also left in q; tried_only: among tried actions, if any.

    NaN is the least of all, see `targets.py`.
    """
    read_actions(graph, value, leaf_q, node, gamma, prior, q)
    among_tried = tried_only and graph.degree[node] > 0
    best = EMPTY
    for a in range(q.shape[0]):
        if among_tried and graph.pair_count[node, a] == 0:
            continue
        if best == EMPTY or q[a] > q[best] or (np.isnan(q[best]) and not np.isnan(q[a])):
            best = a
    return best


@jit
def sweep_nodes(graph, value, leaf_q, nodes, gamma, prior, q):
    """V(s) = max_a Q(s, a) of int64 [n] ids, in their order. Ids that name no node are left out.

    q float64 [A] is scratch.
    """
    for node in nodes:
        if graph.in_degree[node] != FREED:
            value[node] = q[best_action(graph, value, leaf_q, node, gamma, prior, False, q)]


@jit
def settle_values(graph, value, leaf_q, nodes, gamma, prior, tried_only, tolerance, most, q):
    """Back up int64 [n] nodes, and then whatever leads to one that changed.

    Sweeps begin with the newest node and the oldest in turn: value flows along a trajectory in one
    sweep, and from older ones to a newer in the next. It ends after the sweep that reaches `most`
    backups, or when none changes a value of [N] by more than tolerance times its own magnitude.
    One that fades to 0, or with guesses of untried actions any one, may change by tolerance times
    the smallest reward, too. Rewards of 0 do not count; where there are no others, the largest
    value stands in. Returns the number of backups.
    """
    num_ids = value.shape[0]
    scale, unit = 0.0, np.inf
    first = np.zeros(num_ids + 1, np.int64)  # of each node's predecessors
    for node in range(num_ids):
        if graph.in_degree[node] == FREED:
            continue
        if abs(value[node]) > scale:  # of NaN not
            scale = abs(value[node])
        start = graph.block_start[node]
        for e in range(start, start + graph.degree[node]):
            if graph.edge_reward[e] != 0.0:
                unit = min(unit, abs(graph.edge_reward[e]))
            if not graph.edge_terminated[e]:
                first[graph.edge_next[e] + 1] += 1
    unit = scale if unit == np.inf else unit
    for node in range(num_ids):
        first[node + 1] += first[node]
    predecessors = np.empty(first[num_ids], np.int64)
    place = first[:num_ids].copy()
    for node in range(num_ids):
        start = graph.block_start[node]
        for e in range(start, start + graph.degree[node]):
            if not graph.edge_terminated[e]:
                following = graph.edge_next[e]
                predecessors[place[following]] = node
                place[following] += 1

    num_blocks = num_ids // BLOCK + 1
    waits, block_waits = np.zeros(num_ids, np.bool_), np.zeros(num_blocks, np.bool_)
    waits[nodes] = True
    block_waits[nodes // BLOCK] = True
    backups, newest_first = 0, True
    while block_waits.any() and backups < most:
        for i in range(num_blocks):
            block = num_blocks - 1 - i if newest_first else i
            if not block_waits[block]:
                continue
            block_waits[block] = False
            begin, end = block * BLOCK, min((block + 1) * BLOCK, num_ids)
            for j in range(end - begin):
                node = end - 1 - j if newest_first else begin + j
                if not waits[node]:
                    continue
                waits[node] = False
                backups += 1
                new = q[best_action(graph, value, leaf_q, node, gamma, prior, tried_only, q)]
                old = value[node]
                fades = abs(new) < abs(old) and (new > 0.0) == (old > 0.0)
                # Training's own sweeps have no tolerance: what rises less than this waits for them.
                floor = 0.0 if tried_only and not fades else unit
                moves = abs(new - old) > tolerance * max(abs(old), floor)
                if moves or np.isnan(new) != np.isnan(old):
                    value[node] = new
                    for k in range(first[node], first[node + 1]):
                        waits[predecessors[k]] = True
                        block_waits[predecessors[k] // BLOCK] = True
        newest_first = not newest_first
    return backups


@jit
def read_pairs(graph, value, leaf_q, nodes, actions, gamma, q, targets):
    """Q(s, a) of pairs [B] without a prior, into targets [B]."""
    for i in range(nodes.shape[0]):
        read_actions(graph, value, leaf_q, nodes[i], gamma, 0.0, q)
        targets[i] = q[actions[i]]


@jit
def choose_actions(graph, value, leaf_q, nodes, gamma, prior, tried_only, q, actions):
    """argmax_a Q(s, a) of ids [n], into actions [n]; EMPTY for EMPTY or where nothing was tried."""
    for i in range(nodes.shape[0]):
        actions[i] = EMPTY
        if nodes[i] != EMPTY and graph.degree[nodes[i]] > 0:
            actions[i] = best_action(graph, value, leaf_q, nodes[i], gamma, prior, tried_only, q)
