"""The compiled loops of `frontier.py`: values that follow a changing graph.

No kernel here calls one of `kernels.py`: Numba's cache does not notice an edit in another file.
Nor does it notice a new value of EMPTY: after such an edit, delete `__pycache__`.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gbcore.jit import jit
from gbcore.kernels import EMPTY

FLOOR = 1e-9  # a smaller value is none: no chain of discounts goes on for ever
ROUNDING = 1.0 + 1e-12

# --------------------------------------------------------------------------------------------------
# The arrays
# --------------------------------------------------------------------------------------------------
#
#   value [N]   V(s), 1 for an id that names no node
#   worth [N]   of the node's untried actions, 1 until it is appraised
#
#   The graph has no incoming edges. Here every pair (s, s') with a transition that goes on, s to
#   s', has one cell in two lists: s's own (first_out, next_out), and those that lead to s'
#   (first_in, next_in, previous_in). Unused cells are linked by next_in.
#
#   stack       nodes whose value may have fallen: looked at first
#   heap        nodes whose value may have risen, the highest priority first; place: node -> where

CELLS_GIVEN, FREE_CELL, STACK_SIZE, HEAP_SIZE = 0, 1, 2, 3


class PlanArrays(NamedTuple):
    """The arrays of a `FrontierPlanner`; N node ids, C cells."""

    value: NDArray[np.float64]  # [N]
    worth: NDArray[np.float64]  # [N], in (0, 1]
    first_in: NDArray[np.int64]  # [N]
    first_out: NDArray[np.int64]  # [N]
    cell_source: NDArray[np.int64]  # [C]
    cell_target: NDArray[np.int64]  # [C]
    next_in: NDArray[np.int64]  # [C]
    previous_in: NDArray[np.int64]  # [C]
    next_out: NDArray[np.int64]  # [C]
    stack: NDArray[np.int64]  # [N]
    on_stack: NDArray[np.bool_]  # [N]
    heap: NDArray[np.int64]  # [N]
    place: NDArray[np.int64]  # [N], EMPTY where the node is not in the heap
    priority: NDArray[np.float64]  # [N]
    totals: NDArray[np.int64]  # [4], cells ever given | first free cell | stack size | heap size


# --------------------------------------------------------------------------------------------------
# Values
# --------------------------------------------------------------------------------------------------


@jit
def back_up_actions(graph, plan, node, discount, prior, q):
    """Q(s, a) of one node from the values of its successors, into q float64 [A]."""
    q[:] = 0.0
    start = graph.block_start[node]
    for e in range(start, start + graph.degree[node]):
        if not graph.edge_terminated[e]:
            q[graph.edge_action[e]] += graph.edge_count[e] * plan.value[graph.edge_next[e]]
    worth = plan.worth[node]
    for a in range(q.shape[0]):
        count = graph.pair_count[node, a]
        q[a] = worth if count == 0 else (prior * worth + discount * q[a]) / (prior + count)


@jit
def back_up_state(graph, plan, node, discount, prior, q):
    """V(s) of one node from the values of its successors; q float64 [A] is scratch."""
    if plan.worth[node] == 1.0:  # there is nothing better
        for a in range(q.shape[0]):
            if graph.pair_count[node, a] == 0:
                return 1.0
    back_up_actions(graph, plan, node, discount, prior, q)
    best = q.max()
    return best if best >= FLOOR else 0.0


@jit
def count_untried(graph, num_ids):
    """Pairs never tried of the nodes that an episode was in."""
    entered = graph.degree[:num_ids] > 0
    for node in range(num_ids):
        start = graph.block_start[node]
        for e in range(start, start + graph.degree[node]):
            if not graph.edge_terminated[e]:
                entered[graph.edge_next[e]] = True
    untried = 0
    for node in range(num_ids):
        if entered[node]:
            for a in range(graph.pair_count.shape[1]):
                untried += graph.pair_count[node, a] == 0
    return untried


# --------------------------------------------------------------------------------------------------
# Predecessors
# --------------------------------------------------------------------------------------------------


@jit
def find_cell(plan, node, next_node):
    """The cell of a pair of nodes and the cell before it in the list of the first; or EMPTY."""
    before, cell = EMPTY, plan.first_out[node]
    while cell != EMPTY and plan.cell_target[cell] != next_node:
        before, cell = cell, plan.next_out[cell]
    return before, cell


@jit
def link_nodes(plan, node, next_node):
    """Put a pair of nodes into both lists. There must be room for a cell."""
    cell = plan.totals[FREE_CELL]
    if cell != EMPTY:
        plan.totals[FREE_CELL] = plan.next_in[cell]
    else:
        cell = plan.totals[CELLS_GIVEN]
        plan.totals[CELLS_GIVEN] += 1
    plan.cell_source[cell], plan.cell_target[cell] = node, next_node
    plan.next_out[cell] = plan.first_out[node]
    plan.first_out[node] = cell
    first = plan.first_in[next_node]
    plan.next_in[cell], plan.previous_in[cell] = first, EMPTY
    if first != EMPTY:
        plan.previous_in[first] = cell
    plan.first_in[next_node] = cell


@jit
def unlink_nodes(plan, before, cell):
    """Take a cell out of both lists."""
    node, next_node = plan.cell_source[cell], plan.cell_target[cell]
    if before == EMPTY:
        plan.first_out[node] = plan.next_out[cell]
    else:
        plan.next_out[before] = plan.next_out[cell]
    after, previous = plan.next_in[cell], plan.previous_in[cell]
    if previous == EMPTY:
        plan.first_in[next_node] = after
    else:
        plan.next_in[previous] = after
    if after != EMPTY:
        plan.previous_in[after] = previous
    plan.next_in[cell] = plan.totals[FREE_CELL]
    plan.totals[FREE_CELL] = cell


@jit
def follow_changes(graph, plan, changes):
    """Take note that transitions between pairs of nodes int64 [n, 2] may have changed."""
    for i in range(changes.shape[0]):
        node, next_node = changes[i, 0], changes[i, 1]
        goes_on = False
        start = graph.block_start[node]
        for e in range(start, start + graph.degree[node]):
            if graph.edge_next[e] == next_node and not graph.edge_terminated[e]:
                goes_on = True
                break
        before, cell = find_cell(plan, node, next_node)
        if goes_on and cell == EMPTY:
            link_nodes(plan, node, next_node)
        elif cell != EMPTY and not goes_on:
            unlink_nodes(plan, before, cell)
        push_stack(plan, node)


@jit
def link_listed(plan, number, source):
    """Link what `list_predecessors` wrote, in that order, into lists that are empty."""
    i = source.shape[0]
    for node in range(number.shape[0] - 1, -1, -1):
        for _ in range(number[node]):  # each goes to the front of its list
            i -= 1
            link_nodes(plan, source[i], node)


@jit
def list_predecessors(plan, num_ids, number, source):
    """Predecessors of every node in their order: number int64 [num_ids], source int64 [cells]."""
    i = 0
    for node in range(num_ids):
        first, cell = i, plan.first_in[node]
        while cell != EMPTY:
            source[i] = plan.cell_source[cell]
            i += 1
            cell = plan.next_in[cell]
        number[node] = i - first
    return i


# --------------------------------------------------------------------------------------------------
# What is to be done
# --------------------------------------------------------------------------------------------------


@jit
def push_stack(plan, node):
    """Have a node looked at."""
    if not plan.on_stack[node]:
        plan.on_stack[node] = True
        plan.stack[plan.totals[STACK_SIZE]] = node
        plan.totals[STACK_SIZE] += 1


@jit
def push_heap(plan, node, priority):
    """Put a node into the heap, or raise its priority there."""
    i = plan.place[node]
    if i == EMPTY:
        i = plan.totals[HEAP_SIZE]
        plan.totals[HEAP_SIZE] += 1
    elif plan.priority[node] >= priority:
        return
    plan.priority[node] = priority
    while i > 0:
        parent = plan.heap[(i - 1) // 2]
        if plan.priority[parent] >= priority:
            break
        plan.heap[i], plan.place[parent] = parent, i
        i = (i - 1) // 2
    plan.heap[i], plan.place[node] = node, i


@jit
def pop_heap(plan):
    """The node of the highest priority, which leaves the heap."""
    top = plan.heap[0]
    plan.place[top] = EMPTY
    plan.totals[HEAP_SIZE] -= 1
    size = plan.totals[HEAP_SIZE]
    if size == 0:
        return top
    node, i = plan.heap[size], 0  # the last one fills the gap, further down
    while True:
        child = 2 * i + 1
        if child >= size:
            break
        if (
            child + 1 < size
            and plan.priority[plan.heap[child + 1]] > plan.priority[plan.heap[child]]
        ):
            child += 1
        if plan.priority[plan.heap[child]] <= plan.priority[node]:
            break
        plan.heap[i] = plan.heap[child]
        plan.place[plan.heap[i]] = i
        i = child
    plan.heap[i], plan.place[node] = node, i
    return top


# --------------------------------------------------------------------------------------------------
# Planning
# --------------------------------------------------------------------------------------------------


@jit
def make_plan(graph, plan, changes, discount, prior, tolerance, budget, q):
    """Follow `changes`, then bring values up to date, reading about `budget` edges.

    Returns how many were read.

    Falls come first. States in a cycle would otherwise hold each other up, and lose only a factor
    of the discount at every turn. So a value that falls by the discount or more, as all such values
    do, becomes 0, and so do those that lean on it, until what is left leans on none of them. Then
    the heap raises them again, the highest first, as Dijkstra's algorithm does: in a deterministic
    graph each one once.
    """
    totals, value = plan.totals, plan.value
    follow_changes(graph, plan, changes)
    work = 0
    while work < budget:
        if totals[STACK_SIZE] > 0:
            totals[STACK_SIZE] -= 1
            node = plan.stack[totals[STACK_SIZE]]
            plan.on_stack[node] = False
            old, new = value[node], back_up_state(graph, plan, node, discount, prior, q)
            work += 1 + graph.degree[node]
            if new > old * (1.0 + tolerance):
                push_heap(plan, node, new)
            elif new < old * (1.0 - tolerance):
                value[node] = new if new > discount * old * ROUNDING else 0.0
                if new > value[node]:
                    push_heap(plan, node, new)
                cell = plan.first_in[node]
                while cell != EMPTY:
                    source = plan.cell_source[cell]
                    if 0.0 < value[source] < 1.0:
                        push_stack(plan, source)
                    cell = plan.next_in[cell]
                    work += 1
        elif totals[HEAP_SIZE] > 0:
            node = pop_heap(plan)
            new = back_up_state(graph, plan, node, discount, prior, q)
            work += 1 + graph.degree[node]
            if new <= value[node] * (1.0 + tolerance):
                continue
            if totals[HEAP_SIZE] > 0 and new < plan.priority[plan.heap[0]]:
                push_heap(plan, node, new)  # others come first
                continue
            value[node] = new
            cell = plan.first_in[node]
            while cell != EMPTY:
                source = plan.cell_source[cell]
                if value[source] < 1.0:
                    push_heap(plan, source, discount * new)
                cell = plan.next_in[cell]
                work += 1
        else:
            break
    return work
