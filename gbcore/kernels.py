"""The compiled loops of gbcore: NumPy arrays in, NumPy arrays out; no torch, no gymnasium.

Those of the frontier planner are in `frontier_kernels.py`, of `GraphValues` in `value_kernels.py`.

Arrays that belong together travel as one NamedTuple, which Numba takes apart at no cost. Kernels
do not validate: the modules that call them do, before. Kernels that call each other stay in this
file, because Numba's cache does not notice an edit in another one.
"""

from typing import NamedTuple

import numpy as np
from numba import config
from numpy.typing import NDArray

from gbcore.jit import jit

if config.DISABLE_JIT:  # NumPy scalars warn where the hashes wrap around by design
    np.seterr(over="ignore")

EMPTY = -1  # a hash slot, a block or a free list with nothing in it
SEED_STEP = np.uint64(0x9E3779B97F4A7C15)  # of splitmix64
SQRT_2, LN_2 = 1.4142135623730951, 0.6931471805599453
GREEDY, DOUBLE, POLICY, BEHAVIOUR = 0, 1, 2, 3  # how a state's value is read from its actions


# --------------------------------------------------------------------------------------------------
# Interning: equal bytes, equal id
# --------------------------------------------------------------------------------------------------
#
#   slots  [S]      hash slot -> id or EMPTY; linear probing, at most half full
#   hashes [N]      id -> hash of its key
#   rows   [N, W]   id -> key, as 64-bit words padded with zeros
#   links  [N]      id -> next free id where the id is free, LIVE where it is in use
#   generations [N] id -> how often it was freed: with it, an id names one key for ever
#   totals [3]      keys in use | ids ever given out | first free id or EMPTY

LIVE = -2
TABLE_SIZE, TABLE_IDS, TABLE_FREE = 0, 1, 2


class Table(NamedTuple):
    """The arrays of an `Interner`."""

    slots: NDArray[np.int64]  # [S], S a power of two
    hashes: NDArray[np.uint64]  # [N]
    rows: NDArray[np.uint64]  # [N, W]
    links: NDArray[np.int64]  # [N]
    generations: NDArray[np.int64]  # [N]
    totals: NDArray[np.int64]  # [3]


@jit
def mix(h):
    """Finaliser of splitmix64: every input bit reaches every output bit."""
    h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return h ^ (h >> np.uint64(31))


@jit
def hash_words(key):
    """64-bit hash of a key uint64 [W]: a sum over words and places, in vector instructions."""
    h = np.uint64(0)
    for i in range(key.shape[0]):
        word = key[i] ^ (np.uint64(i + 1) * SEED_STEP)
        word = (word ^ (word >> np.uint64(32))) * np.uint64(0xFF51AFD7ED558CCD)
        h += word ^ (word >> np.uint64(29))
    return mix(h)


@jit
def find_key(table, key, h):
    """Id of a key uint64 [W] with hash h, or EMPTY."""
    mask = table.slots.shape[0] - 1
    slot = np.int64(h & np.uint64(mask))
    while True:
        i = table.slots[slot]
        if i == EMPTY:
            return np.int64(EMPTY)
        if table.hashes[i] == h:
            difference = np.uint64(0)  # all words: vector instructions, and hardly ever in vain
            for w in range(key.shape[0]):
                difference |= table.rows[i, w] ^ key[w]
            if difference == 0:
                return i
        slot = (slot + 1) & mask


@jit
def find_slot(slots, h, entry):
    """First slot of a probe sequence that holds an entry, which is there, or EMPTY."""
    mask = slots.shape[0] - 1
    slot = np.int64(h & np.uint64(mask))
    while slots[slot] != entry:
        slot = (slot + 1) & mask
    return slot


@jit
def rebuild_slots(table):
    """Hash every key in use anew, and fill empty slots with them."""
    for i in range(table.totals[TABLE_IDS]):
        if table.links[i] == LIVE:
            table.hashes[i] = hash_words(table.rows[i])
            table.slots[find_slot(table.slots, table.hashes[i], EMPTY)] = i


@jit
def intern_key(table, key):
    """Id of a key uint64 [W], inserted if new; EMPTY where a new key finds no room."""
    h = hash_words(key)
    i = find_key(table, key, h)
    if i != EMPTY:
        return i
    totals = table.totals
    i = totals[TABLE_FREE]
    if 2 * (totals[TABLE_SIZE] + 1) > table.slots.shape[0]:
        return np.int64(EMPTY)
    if i == EMPTY:
        i = totals[TABLE_IDS]
        if i == table.hashes.shape[0]:
            return np.int64(EMPTY)
        totals[TABLE_IDS] += 1
        table.generations[i] = 0
    else:
        totals[TABLE_FREE] = table.links[i]
    totals[TABLE_SIZE] += 1
    table.links[i] = LIVE
    table.hashes[i] = h
    table.rows[i] = key
    table.slots[find_slot(table.slots, h, EMPTY)] = i
    return i


@jit
def intern_keys(table, keys, first, ids):
    """`intern_key` for uint64 [n, W] from row `first` on, into ids int64 [n].

    Returns the first row that finds no room, or n.
    """
    for k in range(first, keys.shape[0]):
        ids[k] = intern_key(table, keys[k])
        if ids[k] == EMPTY:
            return k
    return keys.shape[0]


@jit
def lookup_key(table, key):
    """Id of a key uint64 [W], or EMPTY."""
    return find_key(table, key, hash_words(key))


@jit
def free_key(table, i):
    """Forget the key of id i and put the id on the free list."""
    slots = table.slots
    mask = slots.shape[0] - 1
    slot = find_slot(slots, table.hashes[i], i)
    slots[slot] = EMPTY
    slot = (slot + 1) & mask
    while slots[slot] != EMPTY:  # the rest of the cluster is entered anew: no tombstones
        j = slots[slot]
        slots[slot] = EMPTY
        slots[find_slot(slots, table.hashes[j], EMPTY)] = j
        slot = (slot + 1) & mask
    table.generations[i] += 1
    table.links[i] = table.totals[TABLE_FREE]
    table.totals[TABLE_FREE] = i
    table.totals[TABLE_SIZE] -= 1


@jit
def release_keys(table, uses, ids):
    """Count one use fewer of each of ids int64 [n] in uses int64 [N], and forget keys without."""
    for i in ids:
        uses[i] -= 1
        if uses[i] == 0:
            free_key(table, i)


@jit
def join_bytes(stacks, words):
    """Stacks uint8 [n, 4, p] as words uint32 [n, p]: the four bytes of a place, in their order in
    the memory of a little-endian machine.
    """
    for i in range(words.shape[0]):
        for k in range(words.shape[1]):
            low = np.uint32(stacks[i, 0, k]) | np.uint32(stacks[i, 1, k]) << np.uint32(8)
            high = np.uint32(stacks[i, 2, k]) | np.uint32(stacks[i, 3, k]) << np.uint32(8)
            words[i, k] = low | high << np.uint32(16)


# --------------------------------------------------------------------------------------------------
# The transition graph: dynamic CSR
# --------------------------------------------------------------------------------------------------
#
#   node n:  block_start[n] -> | edge 0 | edge 1 | ... | edge degree[n]-1 | room |  2**block_log2[n]
#            in the edge arrays: action, next, reward, terminated, count f(T)
#            pair_count[n, a] = c(s, a)
#   A full block moves to one of twice the size; the old one goes on the free list of its size,
#   whose link is kept in edge_next of the block's first edge.
#   edge_slots: hash of (s, a, r, done, s') -> s << 32 | position in the block of s. A block that
#   moves leaves these entries valid.

TOTAL_EDGES, TOTAL_TRANSITIONS, TOTAL_SOURCES, TOTAL_USED = 0, 1, 2, 3
OK, NO_ROOM = 0, 1
FREED = -1  # in_degree of an id that names no node


class GraphArrays(NamedTuple):
    """The arrays of a `TransitionGraph`; N node ids, A actions, E edge positions."""

    block_start: NDArray[np.int64]  # [N], EMPTY without edges
    block_log2: NDArray[np.int64]  # [N], EMPTY without edges
    degree: NDArray[np.int64]  # [N], distinct outgoing transitions
    in_degree: NDArray[np.int64]  # [N], distinct incoming transitions; FREED for an unused id
    pair_count: NDArray[np.int64]  # [N, A], c(s, a)
    edge_action: NDArray[np.int64]  # [E]
    edge_next: NDArray[np.int64]  # [E]
    edge_reward: NDArray[np.float64]  # [E]
    edge_terminated: NDArray[np.bool_]  # [E]
    edge_count: NDArray[np.int64]  # [E], f(T)
    edge_slots: NDArray[np.int64]  # [S], S a power of two, at most half full
    free_blocks: NDArray[np.int64]  # [48], first free block of each size
    totals: NDArray[np.int64]  # [4], edges | transitions | nodes with edges | edge positions used


@jit
def hash_edge(node, action, reward, next_node, terminated):
    """64-bit hash of one transition."""
    reward_bits = np.float64(reward).view(np.uint64)
    h = mix(np.uint64(node) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(next_node))
    h = mix(h ^ reward_bits)
    return mix(h + np.uint64(2 * action + terminated))


@jit
def hash_edge_at(graph, node, e):
    """Hash of the transition that node keeps at edge position e."""
    return hash_edge(
        node,
        graph.edge_action[e],
        graph.edge_reward[e],
        graph.edge_next[e],
        graph.edge_terminated[e],
    )


@jit
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


@jit
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


@jit
def give_block(graph, start, log2):
    """Put a block on the free list of its size."""
    graph.edge_next[start] = graph.free_blocks[log2]
    graph.free_blocks[log2] = start


@jit
def move_block(graph, node, log2):
    """Move the edges of a node into a block of 2**log2; False where there is none."""
    start = take_block(graph, log2)
    if start == EMPTY:
        return False
    old = graph.block_start[node]
    for k in range(graph.degree[node]):
        copy_edge(graph, old + k, start + k)
    if old != EMPTY:
        give_block(graph, old, graph.block_log2[node])
    graph.block_start[node] = start
    graph.block_log2[node] = log2
    return True


@jit
def copy_edge(graph, source, target):
    """Copy the edge at one position to another."""
    graph.edge_action[target] = graph.edge_action[source]
    graph.edge_next[target] = graph.edge_next[source]
    graph.edge_reward[target] = graph.edge_reward[source]
    graph.edge_terminated[target] = graph.edge_terminated[source]
    graph.edge_count[target] = graph.edge_count[source]


@jit
def add_transition(graph, node, action, reward, next_node, terminated):
    """Count one more transition. Returns OK, or NO_ROOM with nothing changed."""
    totals = graph.totals
    slot = find_edge_slot(graph, node, action, reward, next_node, terminated)
    if slot != EMPTY:
        e = graph.block_start[node] + (graph.edge_slots[slot] & 0xFFFFFFFF)
        graph.edge_count[e] += 1
    else:
        if 2 * (totals[TOTAL_EDGES] + 1) > graph.edge_slots.shape[0]:
            return NO_ROOM
        degree = graph.degree[node]
        log2 = graph.block_log2[node]
        if (log2 == EMPTY or degree == 1 << log2) and not move_block(graph, node, log2 + 1):
            return NO_ROOM
        e = graph.block_start[node] + degree
        graph.edge_action[e] = action
        graph.edge_next[e] = next_node
        graph.edge_reward[e] = reward
        graph.edge_terminated[e] = terminated
        graph.edge_count[e] = 1
        slot = find_slot(graph.edge_slots, hash_edge_at(graph, node, e), EMPTY)
        graph.edge_slots[slot] = (node << 32) | degree
        graph.degree[node] += 1
        graph.in_degree[next_node] += 1
        totals[TOTAL_EDGES] += 1
        if degree == 0:
            totals[TOTAL_SOURCES] += 1
    graph.pair_count[node, action] += 1
    totals[TOTAL_TRANSITIONS] += 1
    return OK


@jit
def add_transitions(graph, first, node, action, reward, next_node, terminated):
    """`add_transition` for arrays [n] from row `first` on. Returns the first without room, or n."""
    for i in range(first, node.shape[0]):
        if add_transition(graph, node[i], action[i], reward[i], next_node[i], terminated[i]):
            return i
    return node.shape[0]


@jit
def rebuild_edge_slots(graph, num_ids):
    """Fill empty edge slots with every edge."""
    for node in range(num_ids):
        for k in range(graph.degree[node]):
            h = hash_edge_at(graph, node, graph.block_start[node] + k)
            graph.edge_slots[find_slot(graph.edge_slots, h, EMPTY)] = (node << 32) | k


@jit
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


@jit
def remove_transition(graph, table, node, action, reward, next_node, terminated, freed):
    """Count one transition fewer; at 0 the edge goes, and nodes that no edge names are freed.

    Writes the freed ids into freed int64 [2] and returns how many, or -1 where there is no such
    transition.
    """
    totals = graph.totals
    slot = find_edge_slot(graph, node, action, reward, next_node, terminated)
    if slot == EMPTY:
        return -1
    start = graph.block_start[node]
    k = graph.edge_slots[slot] & 0xFFFFFFFF
    graph.pair_count[node, action] -= 1
    totals[TOTAL_TRANSITIONS] -= 1
    graph.edge_count[start + k] -= 1
    if graph.edge_count[start + k] > 0:
        return 0

    clear_edge_slot(graph, slot)
    last = graph.degree[node] - 1
    if k != last:  # the last edge of the block fills the gap
        h = hash_edge_at(graph, node, start + last)
        slot = find_slot(graph.edge_slots, h, (node << 32) | last)
        graph.edge_slots[slot] = (node << 32) | k
        copy_edge(graph, start + last, start + k)
    graph.degree[node] = last
    graph.in_degree[next_node] -= 1
    totals[TOTAL_EDGES] -= 1
    log2 = graph.block_log2[node]
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
def find_bad_transition(in_degree, num_actions, node, action, reward, next_node):
    """First row of arrays [n] with an id of no node, no action, or a reward not finite; or n."""
    for i in range(node.shape[0]):
        for j in (node[i], next_node[i]):
            if j < 0 or j >= in_degree.shape[0] or in_degree[j] == FREED:
                return i
        if not 0 <= action[i] < num_actions or not np.isfinite(reward[i]):
            return i
    return node.shape[0]


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
    for i in range(node.shape[0] - 1, -1, -1):  # put back what the first loop took
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


# --------------------------------------------------------------------------------------------------
# Subgraphs: what one batch of targets reads
# --------------------------------------------------------------------------------------------------
#
#   level 0      pair 0 .. B-1: the roots                      G_d
#                  | outcomes
#   level 1      vertices -> pairs (one per expanded action)   V_{d-1}, G_{d-1}
#                  | outcomes
#   ...          ...
#   level D-1    vertices -> pairs                             V_1, G_1
#                  | outcomes
#   boundary     leaf vertices                                 V_0
#
# A vertex is a node at one level (of one source, where breadth is limited). Vertices 0 .. M-1 are
# the leaves: vertex i is nodes[i], read from the network. Vertices M .. M+V-1 are expanded, level
# by level. Vertex M+V is the end of the episode, worth 0. Vertices, pairs and outcomes are each
# sorted by level, the pairs of a vertex are contiguous; level k owns [level_x[k], level_x[k+1]).


class Subgraphs(NamedTuple):
    """The subgraphs of a batch of B roots, unrolled level by level, with M distinct nodes."""

    nodes: NDArray[np.int64]  # [M], node ids whose leaf values are needed
    root_nodes: NDArray[np.int64]  # [B], node of each root pair
    root_row: NDArray[np.int64]  # [B], row in nodes of a root pair never seen, -1 for the others
    vertex_row: NDArray[np.int64]  # [V], row in nodes of an expanded vertex
    vertex_pairs: NDArray[np.int64]  # [V + 1], pairs of vertex v: vertex_pairs[v] .. [v + 1]
    pair_action: NDArray[np.int64]  # [P], the first B are the roots'
    pair_count: NDArray[np.int64]  # [P], c(s, a)
    outcome_pair: NDArray[np.int64]  # [O]
    outcome_vertex: NDArray[np.int64]  # [O], in 0 .. M+V
    outcome_weight: NDArray[np.float64]  # [O], f(T) / c(s, a)
    outcome_reward: NDArray[np.float64]  # [O]
    level_vertices: NDArray[np.int64]  # [D + 1]
    level_pairs: NDArray[np.int64]  # [D + 1]
    level_outcomes: NDArray[np.int64]  # [D + 1]

    @property
    def num_roots(self) -> int:
        """B, the number of roots."""
        return len(self.root_row)

    @property
    def pair_vertex(self) -> NDArray[np.int64]:
        """int64 [P - B], the vertex of every pair that is no root, from 0."""
        return np.repeat(np.arange(len(self.vertex_row)), np.diff(self.vertex_pairs))

    @property
    def pair_nodes(self) -> NDArray[np.int64]:
        """int64 [P], the node of every pair, roots first; -1 where `prune` has left it out."""
        rows = self.vertex_row[self.pair_vertex]
        return np.append(self.root_nodes, np.append(self.nodes, -1)[rows])

    def __repr__(self) -> str:
        return (
            f"Subgraphs({self.num_roots} roots, {len(self.level_pairs) - 1} levels, "
            f"{len(self.pair_action)} pairs, {len(self.outcome_pair)} outcomes, "
            f"{len(self.nodes)} nodes)"
        )


FITS, BAD_PLACE, BAD_ACTION = 0, 1, 2


@jit
def are_within(values, begin, stop, low, high):
    """Are values int64 from begin to stop >= low and < high?"""
    size, bad = np.uint64(high - low), 0
    for i in range(np.uint64(begin), np.uint64(stop)):  # unsigned: no test for a negative index
        bad += np.uint64(values[i] - low) >= size
    return bad == 0


@jit
def ascends(values, first, last):
    """Do values int64 [n] ascend from first to last?"""
    size = values.shape[0]
    if size == 0 or values[0] != first or values[size - 1] != last:
        return False
    bad = 0
    for i in range(np.uint64(size - 1)):
        bad += values[i] > values[i + np.uint64(1)]
    return bad == 0


@jit
def find_misfit(sub, num_actions, least_row):
    """Does every index of the subgraphs stay where the drawing above has it? FITS, or what is bad.

    Rows of expanded vertices are at least least_row: -1 where no leaf value of them is read.
    """
    num_leaves, num_roots = sub.nodes.shape[0], sub.root_row.shape[0]
    num_vertices, num_pairs = sub.vertex_row.shape[0], sub.pair_action.shape[0]
    num_outcomes, num_levels = sub.outcome_pair.shape[0], sub.level_pairs.shape[0] - 1
    level_vertices, level_pairs = sub.level_vertices, sub.level_pairs
    level_outcomes, vertex_pairs = sub.level_outcomes, sub.vertex_pairs
    outcome_vertex, end = sub.outcome_vertex, num_leaves + num_vertices
    if (
        num_levels < 1
        or not level_vertices.shape[0] == level_outcomes.shape[0] == num_levels + 1
        or vertex_pairs.shape[0] != num_vertices + 1
        or sub.root_nodes.shape[0] != num_roots
        or sub.pair_count.shape[0] != num_pairs
        or not sub.outcome_weight.shape[0] == sub.outcome_reward.shape[0] == num_outcomes
        or outcome_vertex.shape[0] != num_outcomes
        or not (level_vertices[1] == 0 and level_pairs[1] == num_roots)
        or not ascends(level_vertices, 0, num_vertices)
        or not ascends(level_pairs, 0, num_pairs)
        or not ascends(level_outcomes, 0, num_outcomes)
        or not ascends(vertex_pairs, num_roots, num_pairs)
        or not are_within(sub.vertex_row, 0, num_vertices, least_row, num_leaves)
        or not are_within(sub.root_row, 0, num_roots, -1, num_leaves)
        or not are_within(outcome_vertex, 0, num_outcomes, 0, end + 1)
    ):
        return BAD_PLACE
    if not are_within(sub.pair_action, 0, num_pairs, 0, num_actions):
        return BAD_ACTION
    fits = True
    for k in range(num_levels):
        begin, stop = level_outcomes[k], level_outcomes[k + 1]
        fits &= are_within(sub.outcome_pair, begin, stop, level_pairs[k], level_pairs[k + 1])
        fits &= vertex_pairs[level_vertices[k + 1]] == level_pairs[k + 1]
        above = np.uint64(level_vertices[k + 1])  # vertices whose value is not known yet
        bad = 0
        for o in range(np.uint64(begin), np.uint64(stop)):
            bad += np.uint64(outcome_vertex[o] - num_leaves) < above
        fits &= bad == 0
    return FITS if fits else BAD_PLACE


@jit(error_model="numpy")
def exponential(bits):
    """Standard exponential variate of 64 random bits: -ln((k + 1/2) / 2^52), k their upper 52.

    Exact to 1e-10. With a call of math.log, a loop over it would not become vector instructions.
    """
    word = np.float64(np.float64(np.int64(bits >> np.uint64(12))) + 0.5).view(np.int64)
    exponent = (word >> 52) - 1023
    mantissa = np.int64(word & 0xFFFFFFFFFFFFF | 0x3FF0000000000000).view(np.float64)  # in [1, 2)
    x = (mantissa - SQRT_2) / (mantissa + SQRT_2)  # ln(mantissa / sqrt(2)) = 2 artanh(x)
    y = x * x
    artanh = x * (1 + y * (1 / 3 + y * (1 / 5 + y * (1 / 7 + y * (1 / 9 + y * (1 / 11))))))
    return (51.5 - exponent) * LN_2 - 2 * artanh


@jit(error_model="numpy")
def take_weighted(weights, size, breadth, seed, keys, taken):
    """Sample 0 < breadth < size of weights float64 [>= size], without replacement, each draw in
    proportion to the weights that are left. Out: taken bool [>= size], true for those.

    Each gets an exponential variate over its weight, and those with the smallest are taken
    (Efraimidis and Spirakis 2006). All of it is vector instructions and no branch to guess.
    """
    # The order of positive floats is that of their bits. The last bits become the position: then
    # no two keys int64 are equal, and some bound has exactly breadth of them below it.
    positions = 1
    while positions < size:
        positions *= 2
    low, high = np.int64(0x7FFFFFFFFFFFFFFF), np.int64(0)
    for i in range(size):
        key = exponential(mix(seed + np.uint64(i) * SEED_STEP)) / weights[i]
        keys[i] = np.float64(key).view(np.int64) & -positions | i
        low, high = min(low, keys[i]), max(high, keys[i])
    bound, count = high, size
    while count != breadth:
        bound = low + ((high - low) >> 1)
        count = 0
        for i in range(size):
            count += keys[i] <= bound
        if count > breadth:
            high = bound
        else:
            low = bound
    for i in range(size):
        taken[i] = keys[i] <= bound


@jit
def sample_level(graph, nodes, vertex_row, group_start, breadth, state, limited, taken):
    """Choose the transitions to keep on one level: of groups with more than breadth of them.

    Transitions of a group are counted through its vertices, group_start int64 [groups + 1]. Out:
    limited bool [groups], are there too many? and taken bool [groups, room], for these alone.
    Returns 0, or the size of a group that room is too short for.
    """
    block_start, degrees, edge_count = graph.block_start, graph.degree, graph.edge_count
    weights, keys = np.empty(taken.shape[1]), np.empty(taken.shape[1], np.int64)
    for group in range(limited.shape[0]):
        size = 0
        for v in range(group_start[group], group_start[group + 1]):
            size += degrees[nodes[vertex_row[v]]]
        limited[group] = size > breadth
        if limited[group]:
            if size > taken.shape[1]:
                return size
            i = 0
            for v in range(group_start[group], group_start[group + 1]):
                node = nodes[vertex_row[v]]
                for k in range(degrees[node]):
                    weights[i] = edge_count[block_start[node] + k]
                    i += 1
            take_weighted(weights, size, breadth, state[0], keys, taken[group])
            state[0] += np.uint64(size) * SEED_STEP
    return 0


@jit
def number_of(marks, column, stamp, node, values, value, size):
    """Number of a node under a stamp, and how many have one. A new one gets the next, and its value
    is appended to values.
    """
    if marks[node, column] >> 32 == stamp:
        return marks[node, column] & 0xFFFFFFFF, size
    marks[node, column] = (stamp << 32) | size
    values[size] = value
    return size, size + 1


ROOM_NODES, ROOM_PAIRS, ROOM_OUTCOMES, ROOM_LEVEL = 0, 1, 2, 3
MAX_STAMP = 2**31 - 2  # a mark keeps its stamp in 31 bits
MAX_ROOM = 2**28  # of what a batch of subgraphs lists, 10 GB: before the system ends the process


@jit
def expand_roots(graph, root_nodes, root_actions, depth, breadth, seed, marks, stamps, room):
    """Subgraphs of a batch of roots: paper, Algorithm 1.

    With breadth 0 all roots share the levels below their own; otherwise each root is a group of
    its own, in which at most breadth transitions are kept at each level below the root.

    marks int64 [N, 2] holds, for each node, its row and its vertex, each valid under a stamp;
    stamps int64 [1] is the last one used, up to MAX_STAMP. room int64 [4] is how many rows or
    vertices, pairs, outcomes, and transitions on one level to make room for; it grows as needed.
    """
    num_roots = root_nodes.shape[0]
    while True:
        if stamps[0] > MAX_STAMP - depth * max(num_roots, 1) - 1:
            marks[:] = 0
            stamps[0] = 0
        level_vertices = np.zeros(depth + 1, np.int64)
        level_pairs = np.zeros(depth + 1, np.int64)
        level_outcomes = np.zeros(depth + 1, np.int64)
        num_nodes, num_pairs = room[ROOM_NODES], room[ROOM_PAIRS] + num_roots
        num_outcomes = room[ROOM_OUTCOMES]
        sub = Subgraphs(
            np.empty(num_nodes, np.int64),
            root_nodes,
            np.full(num_roots, -1, np.int64),
            np.empty(num_nodes, np.int64),
            np.empty(num_nodes + 1, np.int64),
            np.empty(num_pairs, np.int64),
            np.empty(num_pairs, np.int64),
            np.empty(num_outcomes, np.int64),
            np.empty(num_outcomes, np.int64),
            np.empty(num_outcomes, np.float64),
            np.empty(num_outcomes, np.float64),
            level_vertices,
            level_pairs,
            level_outcomes,
        )
        state = np.full(1, seed, np.uint64)
        num_rows, num_vertices = fill_subgraphs(
            graph, root_nodes, root_actions, breadth, state, marks, stamps, room, sub
        )
        if num_rows >= 0:
            break
        if room.max() > MAX_ROOM:
            room[:] = 256
            raise MemoryError("Require a smaller depth, breadth or batch for subgraphs that fit")
    num_pairs, num_outcomes = level_pairs[depth], level_outcomes[depth]
    return Subgraphs(
        sub.nodes[:num_rows],
        root_nodes.copy(),
        sub.root_row,
        sub.vertex_row[:num_vertices],
        sub.vertex_pairs[: num_vertices + 1],
        sub.pair_action[:num_pairs],
        sub.pair_count[:num_pairs],
        sub.outcome_pair[:num_outcomes],
        sub.outcome_vertex[:num_outcomes],
        sub.outcome_weight[:num_outcomes],
        sub.outcome_reward[:num_outcomes],
        level_vertices,
        level_pairs,
        level_outcomes,
    )


@jit
def is_short(room, which, wanted, have):
    """Is there less room than wanted? Then twice as much is asked for."""
    if wanted > have:
        room[which] = 2 * wanted
    return wanted > have


@jit
def fill_subgraphs(graph, root_nodes, root_actions, breadth, state, marks, stamps, room, sub):
    """Expand into the arrays of sub. Returns how many rows and vertices there are, or -1 where an
    array was too short: room then asks for more.
    """
    # Read from the tuples once: in a loop, each read would count a reference up and down.
    block_start, degrees = graph.block_start, graph.degree
    edge_action, edge_next, edge_count = graph.edge_action, graph.edge_next, graph.edge_count
    edge_reward, edge_terminated = graph.edge_reward, graph.edge_terminated
    nodes, vertex_row, vertex_pairs = sub.nodes, sub.vertex_row, sub.vertex_pairs
    pair_action, pair_count = sub.pair_action, sub.pair_count
    outcome_pair, outcome_vertex = sub.outcome_pair, sub.outcome_vertex
    outcome_weight, outcome_reward = sub.outcome_weight, sub.outcome_reward

    num_roots = root_nodes.shape[0]
    all_counts = graph.pair_count
    num_actions = all_counts.shape[1]
    num_groups = 1 if breadth == 0 else num_roots
    depth = sub.level_pairs.shape[0] - 1
    # Of each group the first vertex on this level and on the next, in turns. Level 0 has roots.
    group_start = np.zeros((2, num_groups + 1), np.int64)
    for group in range(num_groups):
        group_start[0, group + 1] = num_roots if breadth == 0 else group + 1
    pair_of_action = np.empty(num_actions, np.int64)
    action_vertex = np.empty(num_actions, np.int64)  # whose pair that is
    limited = np.zeros(num_groups, np.bool_)
    taken = np.empty((num_groups, room[ROOM_LEVEL]), np.bool_)

    stamps[0] += 1
    row_stamp = stamps[0]
    num_rows = 0
    num_vertices = 0
    num_pairs = num_roots
    num_outcomes = 0
    for i in range(num_roots):
        pair_action[i] = root_actions[i]
        pair_count[i] = all_counts[root_nodes[i], root_actions[i]]

    for level in range(depth):
        level_end = num_vertices
        this, following = level % 2, (level + 1) % 2
        action_vertex[:] = -1
        if level > 0 and breadth > 0:
            size = sample_level(
                graph, nodes, vertex_row, group_start[this], breadth, state, limited, taken
            )
            if size > 0:
                room[ROOM_LEVEL] = 2 * size
                return -1, -1
        for group in range(num_groups):
            group_start[following, group] = num_vertices
            all_kept = not limited[group]
            stamps[0] += 1
            vertex_stamp = stamps[0]
            offset = 0  # position on the level of the vertex's first transition
            for v in range(group_start[this, group], group_start[this, group + 1]):
                node = root_nodes[v] if level == 0 else nodes[vertex_row[v]]
                start, degree = block_start[node], degrees[node]
                rows_wanted = max(num_rows + 1, num_vertices) + degree
                if (
                    is_short(room, ROOM_NODES, rows_wanted, nodes.shape[0])
                    or is_short(room, ROOM_OUTCOMES, num_outcomes + degree, outcome_pair.shape[0])
                    or is_short(room, ROOM_PAIRS, num_pairs + num_actions, pair_action.shape[0])
                ):
                    return -1, -1
                if level == 0:
                    action_vertex[root_actions[v]] = v
                    pair_of_action[root_actions[v]] = v
                else:
                    vertex_pairs[v] = num_pairs
                    for k in range(degree):
                        action = edge_action[start + k]
                        if action_vertex[action] != v and (all_kept or taken[group, offset + k]):
                            action_vertex[action] = v
                            pair_of_action[action] = num_pairs
                            pair_action[num_pairs] = action
                            pair_count[num_pairs] = all_counts[node, action]
                            num_pairs += 1
                for k in range(degree):
                    e = np.uint64(start + k)  # unsigned: no test for a negative index
                    action = edge_action[e]
                    if action_vertex[action] != v:
                        continue
                    pair = pair_of_action[action]
                    # For now: a row for a leaf, -1 for the end, -2 - v for an expanded vertex.
                    target = -1
                    if not edge_terminated[e]:
                        next_node = edge_next[e]
                        target, num_rows = number_of(
                            marks, 0, row_stamp, next_node, nodes, next_node, num_rows
                        )
                        kept = all_kept or taken[group, offset + k]
                        if kept and level + 1 < depth and degrees[next_node] > 0:
                            vertex, num_vertices = number_of(
                                marks, 1, vertex_stamp, next_node, vertex_row, target, num_vertices
                            )
                            target = -2 - vertex
                    at = np.uint64(num_outcomes)
                    outcome_pair[at] = pair
                    outcome_vertex[at] = target
                    outcome_weight[at] = edge_count[e] / pair_count[np.uint64(pair)]
                    outcome_reward[at] = edge_reward[e]
                    num_outcomes += 1
                if level == 0 and pair_count[v] == 0:
                    sub.root_row[v], num_rows = number_of(
                        marks, 0, row_stamp, node, nodes, node, num_rows
                    )
                offset += degree
        group_start[following, num_groups] = num_vertices
        sub.level_vertices[level + 1] = level_end
        sub.level_pairs[level + 1] = num_pairs
        sub.level_outcomes[level + 1] = num_outcomes

    vertex_pairs[num_vertices] = num_pairs
    for o in range(num_outcomes):
        target = outcome_vertex[o]
        if target == -1:
            outcome_vertex[o] = num_rows + num_vertices
        elif target < -1:
            v = -2 - target
            if vertex_pairs[v] == vertex_pairs[v + 1]:  # none of its transitions was kept: a leaf
                outcome_vertex[o] = vertex_row[v]
            else:
                outcome_vertex[o] = num_rows + v
    return num_rows, num_vertices


class Trajectory(NamedTuple):
    """A replay ring of N transitions in time order."""

    node: NDArray[np.int64]  # [N]
    action: NDArray[np.int64]  # [N]
    reward: NDArray[np.float64]  # [N]
    next_node: NDArray[np.int64]  # [N]
    terminated: NDArray[np.bool_]  # [N]
    cut: NDArray[np.bool_]  # [N], row t + 1 does not continue row t


@jit
def row_in(keys, rows, node, nodes, num_rows):
    """Row of a node in nodes, and how many rows there are, by a hash table of the batch's nodes."""
    mask = keys.shape[0] - 1
    slot = np.int64(mix(np.uint64(node)) & np.uint64(mask))
    while keys[slot] != node:
        if keys[slot] == EMPTY:
            keys[slot] = node
            rows[slot] = num_rows
            nodes[num_rows] = node
            return num_rows, num_rows + 1
        slot = (slot + 1) & mask
    return rows[slot], num_rows


@jit
def follow_trajectories(replay, starts, depth):
    """Subgraphs that are chains: at most depth rows of the ring from each start.

    Returns the last row met that holds a negative action or next node, or else -1, and the
    subgraphs, which mean nothing in the first case.
    """
    bad_row = -1
    num_roots = starts.shape[0]
    size = num_roots * depth
    length = replay.node.shape[0]
    capacity = 16
    while capacity < 2 * size:
        capacity *= 2
    keys = np.full(capacity, EMPTY, np.int64)
    rows = np.empty(capacity, np.int64)

    nodes = np.empty(size, np.int64)
    vertex_row = np.empty(size, np.int64)
    vertex_pairs = np.empty(size + 1, np.int64)
    pair_action = np.empty(size, np.int64)
    outcome_vertex = np.empty(size, np.int64)
    outcome_reward = np.empty(size, np.float64)
    level_vertices = np.zeros(depth + 1, np.int64)
    level_pairs = np.zeros(depth + 1, np.int64)

    current = starts.copy()  # ring row of each chain that goes on
    num_chains = num_roots
    num_rows = 0
    num_vertices = 0
    num_pairs = 0
    for level in range(depth):
        level_end = num_vertices
        chains_left = 0
        for i in range(num_chains):
            t = current[i]
            if replay.action[t] < 0 or replay.next_node[t] < 0:
                bad_row = t
                continue
            if level > 0:
                vertex_pairs[num_pairs - num_roots] = num_pairs
            pair_action[num_pairs] = replay.action[t]
            outcome_reward[num_pairs] = replay.reward[t]
            target = -1  # the same code as in fill_subgraphs, until M is known
            if not replay.terminated[t]:
                target, num_rows = row_in(keys, rows, replay.next_node[t], nodes, num_rows)
                if level + 1 < depth and not replay.cut[t]:
                    vertex_row[num_vertices] = target
                    target = -2 - num_vertices
                    num_vertices += 1
                    current[chains_left] = (t + 1) % length
                    chains_left += 1
            outcome_vertex[num_pairs] = target
            num_pairs += 1
        num_chains = chains_left
        level_vertices[level + 1] = level_end
        level_pairs[level + 1] = num_pairs

    vertex_pairs[num_vertices] = num_pairs
    for o in range(num_pairs):
        target = outcome_vertex[o]
        if target < 0:
            outcome_vertex[o] = num_rows + (num_vertices if target == -1 else -2 - target)
    sub = Subgraphs(
        nodes[:num_rows],
        replay.node[starts],
        np.full(num_roots, -1, np.int64),
        vertex_row[:num_vertices],
        vertex_pairs[: num_vertices + 1],
        pair_action[:num_pairs],
        np.ones(num_pairs, np.int64),
        np.arange(num_pairs),
        outcome_vertex[:num_pairs],
        np.ones(num_pairs, np.float64),
        outcome_reward[:num_pairs],
        level_vertices,
        level_pairs,
        level_pairs,
    )
    return bad_row, sub


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


# --------------------------------------------------------------------------------------------------
# Sum tree: sampling in proportion to priority
# --------------------------------------------------------------------------------------------------
#
#   tree float64 [2 C], C a power of two: node i has children 2i and 2i + 1, the root is node 1,
#   priority j is node C + j.


@jit
def set_priorities(tree, indices, priorities):
    """Write priorities in order, and the sums above each."""
    leaves = tree.shape[0] // 2
    for k in range(indices.shape[0]):
        i = leaves + indices[k]
        tree[i] = priorities[k]
        while i > 1:
            i //= 2
            tree[i] = tree[2 * i] + tree[2 * i + 1]


@jit
def find_priorities(tree, targets, indices):
    """Index of the priority under which each target in [0, total) falls."""
    leaves = tree.shape[0] // 2
    for k in range(targets.shape[0]):
        target = targets[k]
        i = 1
        while i < leaves:
            i *= 2
            # The second test keeps rounding from stepping into a subtree of sum 0.
            if target >= tree[i] and tree[i + 1] > 0.0:
                target -= tree[i]
                i += 1
        indices[k] = i - leaves
