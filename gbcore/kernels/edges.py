"""The transition graph: dynamic CSR."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gbcore.jit import jit, jit_in_place
from gbcore.kernels.hashing import EMPTY, SEED_STEP, find_slot, free_key, mix

#   node n:  block_start[n] -> | edge 0 | edge 1 | ... | edge degree[n]-1 | room |  2**block_log2[n]
#            in the edge arrays: source, action, next, reward, terminated, count f(T)
#            pair_count[n, a] = c(s, a)
#   A full block moves to one of twice the size; the old one goes on the free list of its size,
#   whose link is kept in edge_next of the block's first edge.
#   edge_slots: hash of (s, a, r, done, s') -> s << 32 | position in the block of s. A block that
#   moves leaves these entries valid.
#   Edges that lead to a node and do not end the episode are a list: in_first[n], then in_next[e];
#   in_before[e] goes back. So values find the states that lean on one.
#   log: nodes whose transitions changed, and ~n for those that are new, in order, a ring.

TOTAL_EDGES, TOTAL_TRANSITIONS, TOTAL_SOURCES, TOTAL_USED = 0, 1, 2, 3
TOTAL_LOGGED, TOTAL_FORGOTTEN = 4, 5
MAX_TRANSITIONS = 2**31 - 1  # ids, counts and places are int32
FREED = -1  # in_degree of an id that names no node


class GraphArrays(NamedTuple):
    """The arrays of a `TransitionGraph`; N node ids, A actions, E edge positions."""

    block_start: NDArray[np.int32]  # [N], EMPTY without edges
    block_log2: NDArray[np.int8]  # [N], EMPTY without edges
    degree: NDArray[np.int32]  # [N], distinct outgoing transitions
    in_degree: NDArray[np.int32]  # [N], distinct incoming transitions; FREED for an unused id
    in_first: NDArray[np.int32]  # [N], first edge that goes on to the node, or EMPTY
    pair_count: NDArray[np.int32]  # [N, A], c(s, a)
    edge_source: NDArray[np.int32]  # [E]
    edge_action: NDArray[np.int8]  # [E]; int32 with more than 127 actions
    edge_next: NDArray[np.int32]  # [E]
    edge_reward: NDArray[np.float64]  # [E]
    edge_terminated: NDArray[np.bool_]  # [E]
    edge_count: NDArray[np.int32]  # [E], f(T)
    in_next: NDArray[np.int32]  # [E], next edge that goes on to the same node, or EMPTY
    in_before: NDArray[np.int32]  # [E], the one before it, or EMPTY
    edge_slots: NDArray[np.int64]  # [S], S a power of two >= 2 E
    log: NDArray[np.int32]  # [L], L a power of two >= N
    free_blocks: NDArray[np.int32]  # [32], first free block of each size
    totals: NDArray[np.int64]  # [6], edges | transitions | nodes with edges | edge positions
    # used | log entries ever | those that the log has not


@jit_in_place
def log_node(graph, node):
    """Note that the transitions of a node changed; that it is new, for ~node."""
    totals, log = graph.totals, graph.log
    log[totals[TOTAL_LOGGED] & (log.shape[0] - 1)] = node
    totals[TOTAL_LOGGED] += 1


@jit_in_place
def find_no_node(in_degree, ids):
    """The first row of ids int64 [n] that names no node, or n."""
    for row in range(ids.shape[0]):
        if not 0 <= ids[row] < in_degree.shape[0] or in_degree[ids[row]] == FREED:
            return row
    return ids.shape[0]


@jit_in_place
def find_beyond(actions, num_actions):
    """The first row of int64 [n] that is none of 0 .. num_actions - 1, or n."""
    for row in range(actions.shape[0]):
        if not 0 <= actions[row] < num_actions:
            return row
    return actions.shape[0]


@jit_in_place
def enter_nodes(graph, nodes):
    """Make nodes int64 [n] of distinct ids that were just given out."""
    for node in nodes:
        graph.in_degree[node] = 0
        log_node(graph, ~node)


@jit_in_place
def link_edge(graph, e):
    """Enter the edge at a position into the list of those that go on to its next node."""
    graph.in_next[e] = graph.in_before[e] = EMPTY
    if graph.edge_terminated[e]:
        return
    first = graph.in_first[graph.edge_next[e]]
    graph.in_next[e] = first
    if first != EMPTY:
        graph.in_before[first] = e
    graph.in_first[graph.edge_next[e]] = e


@jit_in_place
def unlink_edge(graph, e):
    """Take the edge at a position out of its list."""
    if graph.edge_terminated[e]:
        return
    before, after = graph.in_before[e], graph.in_next[e]
    if before == EMPTY:
        graph.in_first[graph.edge_next[e]] = after
    else:
        graph.in_next[before] = after
    if after != EMPTY:
        graph.in_before[after] = before


@jit_in_place
def hash_edge(node, action, reward, next_node, terminated):
    """64-bit hash of one transition."""
    h = mix(np.uint64(node) * SEED_STEP + np.uint64(next_node))
    h = mix(h ^ np.float64(reward).view(np.uint64))
    return mix(h + np.uint64(2 * np.int64(action) + terminated))


@jit_in_place
def hash_edge_at(graph, node, e):
    """Hash of the transition that node keeps at edge position e."""
    return hash_edge(
        node,
        graph.edge_action[e],
        graph.edge_reward[e],
        graph.edge_next[e],
        graph.edge_terminated[e],
    )


@jit_in_place
def find_edge_slot(graph, node, action, reward, next_node, terminated):
    """Hash slot of a transition, or EMPTY."""
    mask = graph.edge_slots.shape[0] - 1
    slot = np.int64(hash_edge(node, action, reward, next_node, terminated) & np.uint64(mask))
    while True:
        packed = graph.edge_slots[slot]
        if packed == EMPTY:
            return np.int64(EMPTY)
        if packed >> 32 == node:
            e = graph.block_start[node] + (packed & 0xFFFFFFFF)
            if (
                graph.edge_next[e] == next_node
                and graph.edge_action[e] == action
                and graph.edge_reward[e] == reward
                and graph.edge_terminated[e] == terminated
            ):
                return slot
        slot = (slot + 1) & mask


@jit_in_place
def take_block(graph, log2):
    """Start of an unused block of 2**log2 edges, or EMPTY where the edge arrays are full."""
    start = graph.free_blocks[log2]
    if start != EMPTY:
        graph.free_blocks[log2] = graph.edge_next[start]
        return start
    start = graph.totals[TOTAL_USED]
    if start + (1 << log2) > graph.edge_next.shape[0]:
        return np.int64(EMPTY)
    graph.totals[TOTAL_USED] += 1 << log2
    return start


@jit_in_place
def give_block(graph, start, log2):
    """Put a block on the free list of its size."""
    graph.edge_next[start] = graph.free_blocks[log2]
    graph.free_blocks[log2] = start


@jit_in_place
def move_block(graph, node, log2):
    """Move the edges of a node into a block of 2**log2; False where there is none."""
    start = take_block(graph, log2)
    if start == EMPTY:
        return False
    old = graph.block_start[node]
    for k in range(graph.degree[node]):
        move_edge(graph, old + k, start + k)
    if old != EMPTY:
        give_block(graph, old, graph.block_log2[node])
    graph.block_start[node] = start
    graph.block_log2[node] = log2
    return True


@jit_in_place
def move_edge(graph, source, target):
    """Move the edge at one position to another."""
    graph.edge_source[target] = graph.edge_source[source]
    graph.edge_action[target] = graph.edge_action[source]
    graph.edge_next[target] = graph.edge_next[source]
    graph.edge_reward[target] = graph.edge_reward[source]
    graph.edge_terminated[target] = graph.edge_terminated[source]
    graph.edge_count[target] = graph.edge_count[source]
    before, after = graph.in_before[source], graph.in_next[source]
    graph.in_before[target], graph.in_next[target] = before, after
    if not graph.edge_terminated[target]:
        if before == EMPTY:
            graph.in_first[graph.edge_next[target]] = target
        else:
            graph.in_next[before] = target
        if after != EMPTY:
            graph.in_before[after] = target


@jit_in_place
def add_transition(graph, node, action, reward, next_node, terminated):
    """Count one more transition. False where there is no room for it: then nothing changed."""
    totals = graph.totals
    slot = find_edge_slot(graph, node, action, reward, next_node, terminated)
    if slot != EMPTY:
        e = graph.block_start[node] + (graph.edge_slots[slot] & 0xFFFFFFFF)
        graph.edge_count[e] += 1
    else:
        degree = np.int64(graph.degree[node])
        log2 = np.int64(graph.block_log2[node])
        if (log2 == EMPTY or degree == 1 << log2) and not move_block(graph, node, log2 + 1):
            return False
        e = graph.block_start[node] + degree
        graph.edge_source[e] = node
        graph.edge_action[e] = action
        graph.edge_next[e] = next_node
        graph.edge_reward[e] = reward
        graph.edge_terminated[e] = terminated
        graph.edge_count[e] = 1
        link_edge(graph, e)
        slot = find_slot(graph.edge_slots, hash_edge_at(graph, node, e), EMPTY)
        graph.edge_slots[slot] = (np.int64(node) << 32) | degree
        graph.degree[node] += 1
        graph.in_degree[next_node] += 1
        totals[TOTAL_EDGES] += 1
        if degree == 0:
            totals[TOTAL_SOURCES] += 1
    graph.pair_count[node, action] += 1
    totals[TOTAL_TRANSITIONS] += 1
    log_node(graph, node)
    return True


@jit_in_place
def add_transitions(graph, first, node, action, reward, next_node, terminated):
    """`add_transition` for arrays [n] from row `first` on. Returns the first without room, or n."""
    for i in range(first, node.shape[0]):
        if not add_transition(graph, node[i], action[i], reward[i], next_node[i], terminated[i]):
            return i
    return node.shape[0]


@jit_in_place
def rebuild_edge_slots(graph, num_ids):
    """Fill empty edge slots with every edge."""
    for node in range(num_ids):
        for k in range(graph.degree[node]):
            h = hash_edge_at(graph, node, graph.block_start[node] + k)
            graph.edge_slots[find_slot(graph.edge_slots, h, EMPTY)] = (np.int64(node) << 32) | k


@jit_in_place
def clear_edge_slot(graph, hole):
    """Empty a hash slot, and enter the rest of its cluster anew."""
    slots = graph.edge_slots
    mask = slots.shape[0] - 1
    slots[hole] = EMPTY
    slot = (hole + 1) & mask
    while slots[slot] != EMPTY:
        packed = slots[slot]
        node = packed >> 32
        h = hash_edge_at(graph, node, graph.block_start[node] + (packed & 0xFFFFFFFF))
        slots[slot] = EMPTY
        slots[find_slot(slots, h, EMPTY)] = packed
        slot = (slot + 1) & mask


@jit_in_place
def remove_transition(graph, table, node, action, reward, next_node, terminated, freed):
    """Count one transition fewer; at 0 the edge goes, and nodes that no edge names are freed.

    Writes the freed ids into freed int64 [2]. Returns their number, or -1 for a transition that is
    not there.
    """
    totals = graph.totals
    slot = find_edge_slot(graph, node, action, reward, next_node, terminated)
    if slot == EMPTY:
        return -1
    start = graph.block_start[node]
    k = graph.edge_slots[slot] & 0xFFFFFFFF
    graph.pair_count[node, action] -= 1
    totals[TOTAL_TRANSITIONS] -= 1
    log_node(graph, node)
    graph.edge_count[start + k] -= 1
    if graph.edge_count[start + k] > 0:
        return 0

    clear_edge_slot(graph, slot)
    unlink_edge(graph, start + k)
    last = np.int64(graph.degree[node]) - 1
    if k != last:  # the last edge of the block fills the gap
        h = hash_edge_at(graph, node, start + last)
        slot = find_slot(graph.edge_slots, h, (np.int64(node) << 32) | last)
        graph.edge_slots[slot] = (np.int64(node) << 32) | k
        move_edge(graph, start + last, start + k)
    graph.degree[node] = last
    graph.in_degree[next_node] -= 1
    totals[TOTAL_EDGES] -= 1
    log2 = np.int64(graph.block_log2[node])
    if last == 0:
        give_block(graph, start, log2)
        graph.block_start[node] = EMPTY
        graph.block_log2[node] = EMPTY
        totals[TOTAL_SOURCES] -= 1
    elif 4 * last <= 1 << log2:  # stays where it is if the edge arrays are full
        move_block(graph, node, log2 - 1)

    num_freed = 0
    for i in (node, next_node):
        if graph.degree[i] == 0 and graph.in_degree[i] == 0:
            graph.in_degree[i] = FREED
            free_key(table, i)
            freed[num_freed] = i
            num_freed += 1
    return num_freed


@jit
def find_absent_transition(graph, node, action, reward, next_node, terminated):
    """First row of arrays [n] that is not there once the rows before it are removed; or n."""
    edges = np.empty(node.shape[0], np.int64)
    for i in range(node.shape[0]):
        slot = find_edge_slot(graph, node[i], action[i], reward[i], next_node[i], terminated[i])
        edges[i] = EMPTY
        if slot != EMPTY:
            edges[i] = graph.block_start[node[i]] + (graph.edge_slots[slot] & 0xFFFFFFFF)
            graph.edge_count[edges[i]] -= 1
    absent = node.shape[0]
    for i in range(node.shape[0] - 1, -1, -1):  # undo the first loop
        if edges[i] != EMPTY:
            graph.edge_count[edges[i]] += 1
        if edges[i] == EMPTY or graph.edge_count[edges[i]] < 1:
            absent = i
    return absent


@jit
def remove_transitions(graph, table, node, action, reward, next_node, terminated):
    """`remove_transition` for arrays [n] of transitions that are there. Returns the freed ids."""
    freed = np.empty(2 * node.shape[0] + 1, np.int64)
    size = 0
    for i in range(node.shape[0]):
        size += remove_transition(
            graph, table, node[i], action[i], reward[i], next_node[i], terminated[i], freed[size:]
        )
    return freed[:size]
