"""Values of all nodes of a graph that changes: the equation of `GraphValues`.

It is solved in three ways, each for the nodes that a change reaches and no others:

  `sweep`    to within a tolerance, a bounded number of edges at a time: training
  `improve`  in turn with linear equations, exactly: evaluations, offline data, another network
  `make_plan` with r = 0, in steps = log V / log gamma, which no distance makes vanish: the frontier

A transition of a node to itself is solved for: where V(s) = b + w V(s), it is b / (1 - w).
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gbcore.jit import jit, jit_in_place
from gbcore.kernels.edges import FREED
from gbcore.kernels.hashing import EMPTY

EXACT = 1e-12  # share of a value's terms that is rounding
UNKNOWN = -np.inf  # a value, before one is known


# --- Nodes that wait ---


class Queue(NamedTuple):
    """Nodes that wait for a backup, each once, the first one first."""

    nodes: NDArray[np.int32]  # [N], a ring
    waits: NDArray[np.bool_]  # [N]
    ends: NDArray[np.int64]  # [2], where the first one is | how many there are


@jit_in_place(forceinline=True)
def push(queue, node):
    """Have a node wait."""
    if not queue.waits[node]:
        queue.waits[node] = True
        i = queue.ends[0] + queue.ends[1]
        size = queue.nodes.shape[0]
        queue.nodes[i if i < size else i - size] = node
        queue.ends[1] += 1


@jit_in_place
def push_all(queue, nodes):
    """Have nodes int64 [n] wait, in their order."""
    for node in nodes:
        push(queue, node)


@jit_in_place(forceinline=True)
def pop(queue):
    """The node that waited longest."""
    i = queue.ends[0]
    node = np.int64(queue.nodes[i])
    queue.waits[node] = False
    queue.ends[0] = i + 1 if i + 1 < queue.nodes.shape[0] else 0
    queue.ends[1] -= 1
    return node


# --- One backup ---


class Rule(NamedTuple):
    """The equation's constants and leaf values, and scratch."""

    leaf_q: NDArray[np.float32]  # [N, A]
    gamma: float
    prior: float
    scale: float  # of rewards and leaf values, so that none vanishes
    tried_only: bool  # V(s) is the maximum over tried actions
    q: NDArray[np.float64]  # [A], scratch
    own: NDArray[np.float64]  # [A], scratch


@jit_in_place(forceinline=True)
def back_up_actions(graph, value, rule, node):
    """Q(s, a) of a node without its transitions to itself, into rule.q [A], and the weights that
    these give V(s), into rule.own [A].
    """
    gamma, prior, scale, q, own = rule.gamma, rule.prior, rule.scale, rule.q, rule.own
    for a in range(q.shape[0]):
        q[a] = own[a] = 0.0
    start = graph.block_start[node]
    for e in range(start, start + graph.degree[node]):
        a, after = graph.edge_action[e], graph.edge_next[e]
        weight = graph.edge_count[e] / (graph.pair_count[node, a] + prior)
        reward = scale * graph.edge_reward[e]
        if graph.edge_terminated[e] or gamma == 0.0:
            q[a] += weight * reward  # a weighted sum overflows later than the sum
        elif after == node:
            q[a] += weight * reward
            own[a] += weight * gamma
        else:
            q[a] += weight * (reward + gamma * value[after])
    for a in range(q.shape[0]):
        count = graph.pair_count[node, a]
        if count == 0:
            q[a] = scale * rule.leaf_q[node, a]
        elif prior > 0.0:
            q[a] += prior / (count + prior) * scale * rule.leaf_q[node, a]


@jit_in_place(forceinline=True)
def is_more(new, old):
    """Is a value greater than another? NaN is the least of all, see `targets.py`."""
    return new > old or (old != old and new == new)


@jit_in_place(forceinline=True)
def back_up(graph, value, rule, node):
    """The first best action of a node, or EMPTY, and V(s)."""
    back_up_actions(graph, value, rule, node)
    q, best, most = rule.q, EMPTY, UNKNOWN
    for a in range(q.shape[0]):
        q[a] /= 1.0 - rule.own[a]
        if (not rule.tried_only or graph.pair_count[node, a] > 0) and (
            best == EMPTY or is_more(q[a], most)
        ):
            best, most = a, q[a]
    return best, most


@jit_in_place
def read_actions(graph, value, rule, nodes, q):
    """Q(s, a) of nodes int64 [n], into q [n, A], by values as they are."""
    for i in range(nodes.shape[0]):
        back_up_actions(graph, value, rule, nodes[i])
        for a in range(q.shape[1]):
            own = rule.own[a]
            q[i, a] = rule.q[a] + own * value[nodes[i]] if own > 0.0 else rule.q[a]


# --- To within a tolerance ---


@jit_in_place
def smallest_reward(graph, nodes, least):
    """The smallest size of a reward, zeros apart, of transitions of int64 [n] nodes, or least."""
    for node in nodes:
        start = graph.block_start[node]
        for e in range(start, start + graph.degree[node]):
            size = abs(graph.edge_reward[e])
            least = size if 0.0 < size < least else least
    return least


@jit_in_place
def sweep(graph, value, rule, queue, first, tolerance, smallest, budget):
    """Back up the nodes int64 [n] of `first`, then those that wait, then predecessors of those that
    changed, reading about `budget` edges. The rest waits. Returns the number read.

    A change of a value is followed if it is more than tolerance times its size or `smallest`.
    """
    work, i = 0, 0
    while i < first.shape[0] or (queue.ends[1] > 0 and work < budget):
        if i < first.shape[0]:
            node = first[i]
            i += 1
        else:
            node = pop(queue)
        if graph.in_degree[node] == FREED:
            continue
        work += 1 + graph.degree[node]
        old = value[node]
        _, new = back_up(graph, value, rule, node)
        if abs(new - old) > tolerance * max(abs(old), smallest) or (old != old) != (new != new):
            value[node] = new
            e = graph.in_first[node]
            while e != EMPTY:
                push(queue, graph.edge_source[e])
                e = graph.in_next[e]
                work += 1
    return work


# --- Exactly: policy iteration over tried actions ---
#
#   choice [N] is a policy: a tried action of each node whose value is sought, EMPTY for those whose
#   value is given. `values.evaluate` finds the value of the policy: along ways by backups, round
#   and round by linear equations. `improve` then sweeps, as value iteration does, and notes better
#   actions, so that value flows along a way in one turn. It leaves a node where it has risen TURNS
#   times, as where a reward is met round and round, to the next evaluation.

TURNS = 4


@jit_in_place
def choose_greedily(graph, value, rule, choice, nodes):
    """Choose the best action by values as they are, of those int64 [n] nodes without a choice."""
    for node in nodes:
        if choice[node] == EMPTY:
            choice[node], _ = back_up(graph, value, rule, node)


@jit_in_place
def choose_first(graph, value, rule, choice, nodes, queue):
    """Choose for nodes int64 [n] that have no choice: a way out, where there is one.

    NaN is the value of those alone whose every action leads to NaN.
    """
    for node in nodes:
        value[node] = UNKNOWN
        push(queue, node)
    while queue.ends[1] > 0:
        node = pop(queue)
        best, new = back_up(graph, value, rule, node)
        if value[node] == UNKNOWN and new != UNKNOWN:
            value[node], choice[node] = new, best
            e = graph.in_first[node]
            while e != EMPTY:
                if value[graph.edge_source[e]] == UNKNOWN:
                    push(queue, graph.edge_source[e])
                e = graph.in_next[e]
    choose_greedily(graph, value, rule, choice, nodes)  # those that lead round and round


@jit_in_place
def size_of_terms(graph, value, rule, node, action):
    """The sum of the sizes of the terms of Q(s, a): its rounding is EXACT of that at most."""
    start, size = graph.block_start[node], 0.0
    if graph.pair_count[node, action] == 0:
        return rule.scale * abs(rule.leaf_q[node, action])
    if rule.prior > 0.0:
        size = rule.prior * rule.scale * abs(rule.leaf_q[node, action])
    for e in range(start, start + graph.degree[node]):
        if graph.edge_action[e] == action:
            size += graph.edge_count[e] * rule.scale * abs(graph.edge_reward[e])
            if not graph.edge_terminated[e]:
                size += graph.edge_count[e] * rule.gamma * abs(value[graph.edge_next[e]])
    return size / (graph.pair_count[node, action] + rule.prior)


@jit_in_place
def improve(graph, value, rule, choice, nodes, queue, turns, may_fall):
    """Back up int64 [n] nodes. Where a value rises, go on with the nodes that lead there.

    may_fall: transitions changed, so that values may fall, too. Out: turns int8 [N], how often a
    node changed, zeros at first; one with TURNS is left, and may change further.
    """
    push_all(queue, nodes)
    while queue.ends[1] > 0:
        node = pop(queue)
        if choice[node] == EMPTY:
            continue
        old, before = value[node], choice[node]
        best, new = back_up(graph, value, rule, node)
        best = before if rule.q[before] == new else best
        if may_fall:
            choice[node] = best
        if not (new > old or (may_fall and new < old)):
            continue
        if abs(new - old) <= EXACT * (size_of_terms(graph, value, rule, node, best) + abs(old)):
            continue
        value[node], choice[node] = new, best
        if turns[node] < TURNS:
            turns[node] += 1
            e = graph.in_first[node]
            while e != EMPTY:
                push(queue, graph.edge_source[e])
                e = graph.in_next[e]


@jit
def with_leaning(graph, choice, nodes, by_choice):
    """Nodes int64 [n] and those with a choice that lead to one, each once: int64 [m].

    by_choice: in any number of steps of their choice; else in one step of any action.
    """
    inside, found = np.zeros(choice.shape[0], np.bool_), np.empty(choice.shape[0], np.int64)
    size = 0
    for node in nodes:
        if not inside[node]:
            inside[node], found[size] = True, node
            size += 1
    i, end = 0, size
    while i < end:
        e = graph.in_first[found[i]]
        while e != EMPTY:
            source = graph.edge_source[e]
            leads = choice[source] == graph.edge_action[e] if by_choice else choice[source] >= 0
            if leads and not inside[source]:
                inside[source], found[size] = True, source
                size += 1
            e = graph.in_next[e]
        i += 1
        end = size if by_choice else end
    return found[:size]


@jit_in_place
def choose_last(graph, value, rule, nodes, chosen):
    """The best tried action of int64 [n] nodes into chosen [N]; of those that differ by rounding
    alone, the one that was tried most often.
    """
    q, rounding = rule.q, 20 * EXACT / (1.0 - rule.gamma)
    for node in nodes:
        best, most = back_up(graph, value, rule, node)
        chosen[node], most_often, size = best, graph.pair_count[node, best], 0.0
        for a in range(q.shape[0]):
            count = graph.pair_count[node, a]
            if count > 0 and a != best and q[a] >= most - 1e-6 * abs(most):  # often there is none
                if size == 0.0:
                    size = size_of_terms(graph, value, rule, node, best)
                if q[a] >= most - rounding * size and (
                    count > most_often or (count == most_often and a < chosen[node])
                ):
                    chosen[node], most_often = a, count


@jit_in_place
def leads_out(graph, value, nodes, inside):
    """Does a transition of int64 [n] nodes bring a reward, or lead to another that has a value?

    inside: bool [N], of these nodes.
    """
    found = False
    for node in nodes:
        start = graph.block_start[node]
        for e in range(start, start + graph.degree[node]):
            after = graph.edge_next[e]
            found |= graph.edge_reward[e] != 0.0
            found |= not (graph.edge_terminated[e] or inside[after] or value[after] == 0.0)
    return found


@jit_in_place
def evaluate_ends(graph, value, rule, choice, nodes, waits, queue):
    """The value of a policy at int64 [n] nodes, successors first, but for those that it leads round
    and round. Where a value is not finite, nor are those of all nodes that lead there.

    choice: of other nodes EMPTY, their values are given. Out: waits int32 [N], zeros at first: on
    how many transitions a node still waits. The value of one that waits is 0.
    """
    for node in nodes:
        value[node] = 0.0
    for node in nodes:
        start = graph.block_start[node]
        for e in range(start, start + graph.degree[node]):
            after = graph.edge_next[e]
            if graph.edge_action[e] == choice[node] and not graph.edge_terminated[e]:
                waits[node] += choice[after] != EMPTY and after != node
        back_up_actions(graph, value, rule, node)
        if waits[node] == 0 or not np.isfinite(rule.q[choice[node]]):
            push(queue, node)
    while queue.ends[1] > 0:
        node = pop(queue)
        back_up_actions(graph, value, rule, node)
        value[node], waits[node] = rule.q[choice[node]] / (1.0 - rule.own[choice[node]]), 0
        e = graph.in_first[node]
        while e != EMPTY:
            source = graph.edge_source[e]
            if choice[source] == graph.edge_action[e] and waits[source] > 0:
                waits[source] -= 1
                if waits[source] == 0 or not np.isfinite(value[node]):
                    push(queue, source)
            e = graph.in_next[e]


@jit
def write_equations(graph, value, rule, choice, nodes, row_of):
    """x_i = b_i + the sum of weight * x_column over the terms of row i: a policy's values.

    nodes: int64 [n], those of the rows, whose value is 0. row_of: int32 [N], EMPTY for others.
    Returns b float64 [n], and row, column and weight of each term.
    """
    size, b = 0, np.empty(nodes.shape[0])
    for node in nodes:
        size += graph.degree[node]
    row, column, weight = np.empty(size, np.int32), np.empty(size, np.int32), np.empty(size)
    size = 0
    for i in range(nodes.shape[0]):
        node = nodes[i]
        a = choice[node]
        back_up_actions(graph, value, rule, node)
        b[i], count = rule.q[a], graph.pair_count[node, a] + rule.prior
        start = graph.block_start[node]
        for e in range(start, start + graph.degree[node]):
            after = row_of[graph.edge_next[e]]
            if graph.edge_action[e] == a and not graph.edge_terminated[e] and after != EMPTY:
                row[size], column[size] = i, after
                weight[size] = rule.gamma * graph.edge_count[e] / count
                size += 1
    return b, row[:size], column[:size], weight[:size]


# --- In steps: the frontier ---


class Plan(NamedTuple):
    """The arrays of a `FrontierPlanner`, N node ids. A row or column of costs may stand for all."""

    steps: NDArray[np.float64]  # [N], log V / log discount; inf where nothing untried is reached
    costs: NDArray[np.float64]  # [N or 1, A or 1], log w / log discount of untried pairs
    falls: Queue  # of nodes whose value may have fallen: these come first
    rises: Queue
    log_discount: float
    prior: float
    q: NDArray[np.float64]  # [A], scratch
    total: NDArray[np.float64]  # [A], scratch
    own: NDArray[np.float64]  # [A], scratch


@jit_in_place(forceinline=True)
def back_up_steps(graph, plan, node, solved):
    """log Q(s, a) / log discount of a node, into plan.q; V(s) is solved for, or as it is."""
    steps, costs, log_discount, prior = plan.steps, plan.costs, plan.log_discount, plan.prior
    q, total, own = plan.q, plan.total, plan.own
    row, columns = node % costs.shape[0], costs.shape[1]
    own[:] = 0.0
    for a in range(q.shape[0]):
        count = graph.pair_count[node, a]
        q[a] = costs[row, a % columns] if count == 0 or prior > 0.0 else np.inf
        total[a] = prior / (count + prior) if count > 0 else 1.0
    start = graph.block_start[node]
    for e in range(start, start + graph.degree[node]):
        a, after = graph.edge_action[e], graph.edge_next[e]
        if graph.edge_terminated[e]:
            continue
        weight = graph.edge_count[e] / (graph.pair_count[node, a] + prior)
        if solved and after == node:
            own[a] += weight * np.exp(log_discount)
        elif steps[after] < np.inf:
            way = steps[after] + 1.0
            if way < q[a]:  # the sum counts from the nearest
                total[a] *= np.exp((q[a] - way) * log_discount)
                q[a] = way
            total[a] += weight * np.exp((way - q[a]) * log_discount)
    for a in range(q.shape[0]):
        if graph.pair_count[node, a] > 0 and q[a] < np.inf:
            q[a] += np.log(total[a] / (1.0 - own[a])) / log_discount


@jit_in_place
def make_plan(graph, plan, changed, slack, budget):
    """Follow nodes int64 [n] that changed, then bring steps up to date, reading about `budget`
    edges. Returns how many were read. A change of more than `slack` steps is followed.

    Falls come first. States in a ring would otherwise hold each other up, and lose only a step at
    every turn. So a value that falls by a step or more, as all such values do, becomes nothing, and
    so do those that lean on it, until the rest lean on none of them. Then rises go on.
    """
    steps, falls, rises = plan.steps, plan.falls, plan.rises
    push_all(falls, changed)
    work = 0
    while work < budget and falls.ends[1] + rises.ends[1] > 0:
        falling = falls.ends[1] > 0
        node = pop(falls) if falling else pop(rises)
        if graph.in_degree[node] == FREED:
            continue
        old, new = steps[node], np.inf
        back_up_steps(graph, plan, node, True)
        for found in plan.q:
            new = min(new, found)
        work += 1 + graph.degree[node]
        if new < old - slack:
            if falling:
                push(rises, node)
                continue
            steps[node] = new
        elif falling and new > old + slack:
            steps[node] = new if new < old + 1.0 - 1e-9 else np.inf
            if new < steps[node]:
                push(rises, node)
        else:
            continue
        e = graph.in_first[node]
        while e != EMPTY:
            source = graph.edge_source[e]
            if falling and steps[source] < np.inf:
                push(falls, source)
            elif not falling and steps[source] > 0.0:
                push(rises, source)
            e = graph.in_next[e]
            work += 1
    return work
