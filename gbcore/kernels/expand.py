"""Expansion: from roots to `Subgraphs`, drawn in `subgraph.py`."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gbcore.jit import jit, jit_in_place
from gbcore.kernels.hashing import EMPTY, SEED_STEP, mix
from gbcore.subgraph import Subgraphs

SQRT_2, LN_2 = 1.4142135623730951, 0.6931471805599453


# --- Sampling ---


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
    # Positive floats are in the order of their bits. The last bits become the position: then
    # no two keys int64 are equal, and exactly breadth of them are not above some bound.
    positions = 1
    while positions < size:
        positions *= 2
    low, high = np.int64(0x7FFFFFFFFFFFFFFF), np.int64(0)
    for i in range(size):
        key = exponential(mix(seed + np.uint64(i) * SEED_STEP)) / weights[i]
        keys[i] = (np.float64(key).view(np.int64) & -positions) | i
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
def sample_level(graph, level_nodes, starts, breadth, state, kept):
    """Of the transitions of each group of a level, keep at most breadth: bool [n], in their order.

    Group g is level_nodes[starts[g]] .. [starts[g + 1]]. state uint64 [1] is of the random numbers.
    """
    block_start, degree, edge_count = graph.block_start, graph.degree, graph.edge_count
    weights, keys = np.empty(kept.shape[0]), np.empty(kept.shape[0], np.int64)
    first = 0
    for group in range(starts.shape[0] - 1):
        size = 0
        for node in level_nodes[starts[group] : starts[group + 1]]:
            for e in range(block_start[node], block_start[node] + degree[node]):
                weights[size] = edge_count[e]
                size += 1
        if size > breadth:
            take_weighted(weights, size, breadth, state[0], keys, kept[first : first + size])
            state[0] += np.uint64(size) * SEED_STEP
        first += size


# --- From the graph ---


class Lists(NamedTuple):
    """The columns of `Subgraphs`, with room to write, and the arrays that writing them needs.

    Until all rows are known, outcome_vertex holds the row of a leaf, END, or -2 - v of a vertex.
    """

    integers: NDArray[np.int64]  # [8, L], the columns up to row_vertex
    numbers: NDArray[np.float64]  # [2, L], the two columns after it
    nodes: NDArray[np.int64]
    vertex_row: NDArray[np.int64]
    vertex_pairs: NDArray[np.int64]
    pair_action: NDArray[np.int64]
    pair_count: NDArray[np.int64]
    outcome_pair: NDArray[np.int64]
    outcome_vertex: NDArray[np.int64]
    row_vertex: NDArray[np.int64]  # the newest vertex of each row in nodes
    outcome_weight: NDArray[np.float64]
    outcome_reward: NDArray[np.float64]
    sizes: NDArray[np.int64]  # [4], how many ROWS, VERTICES, PAIRS, OUTCOMES were written
    pair_of: NDArray[np.int64]  # [A], the pair of each action of one vertex, or EMPTY
    row_of: NDArray[np.int32]  # [N], row of a node, if nodes[row] is the node; else anything


END = -1
ROWS, VERTICES, PAIRS, OUTCOMES = 0, 1, 2, 3


@jit
def expand_roots(graph, root_nodes, root_actions, depth, breadth, seed, row_of, room, most):
    """Subgraphs of a batch of roots: paper, Algorithm 1.

    With breadth 0 all roots share the levels below their own; otherwise each root is a group of
    its own, in which at most breadth transitions are kept at each level below the root.

    row_of int32 [N] is scratch. room int64 [1] is how long to make lists at first, and how long
    they had to be; no more than most.
    """
    num_roots = root_nodes.shape[0]
    levels = np.zeros((3, depth + 1), np.int64)  # of vertices, pairs and outcomes
    root_row, state = np.full(num_roots, -1, np.int64), np.full(1, seed, np.uint64)
    # Of groups, each with levels of its own: all roots, or each alone.
    starts = np.array([0, num_roots]) if breadth == 0 else np.arange(num_roots + 1)
    pair_of = np.empty(graph.pair_count.shape[1], np.int64)
    lists = new_lists(max(room[0], num_roots), np.zeros(4, np.int64), pair_of, row_of)
    sizes, level_nodes = lists.sizes, root_nodes
    for level in range(depth):
        num_edges = 0
        for node in level_nodes:
            num_edges += graph.degree[node]
        kept, wanted = np.ones(num_edges, np.bool_), sizes.max() + num_edges + num_roots + 1
        if lists.nodes.shape[0] < wanted:
            lists = longer(lists, wanted, most)
        if level > 0 and breadth > 0:
            sample_level(graph, level_nodes, starts, breadth, state, kept)
        end, is_inner = sizes[VERTICES], level + 1 < depth  # of the level's vertices
        expand_level(
            graph, lists, level, levels[0, level], level_nodes, starts, kept, is_inner,
            root_actions, root_row,
        )  # fmt: skip
        levels[0, level + 1] = end
        levels[1:, level + 1] = sizes[PAIRS:]
        level_nodes = lists.nodes[lists.vertex_row[end : sizes[VERTICES]]]
    room[0] = lists.nodes.shape[0]
    return finished(lists, root_nodes.copy(), root_row, levels)


@jit
def new_lists(length, sizes, pair_of, row_of):
    """`Lists` whose columns hold nothing yet."""
    i, x = np.empty((8, length), np.int64), np.empty((2, length), np.float64)
    columns = i, x, i[0], i[1], i[2], i[3], i[4], i[5], i[6], i[7], x[0], x[1]
    return Lists(*columns, sizes, pair_of, row_of)


@jit
def longer(lists, wanted, most):
    """Copies of lists, twice as long as wanted. MemoryError where that is more than most."""
    if wanted > most:
        raise MemoryError("Require a smaller depth, breadth or batch for subgraphs that fit")
    length = lists.nodes.shape[0]
    copies = new_lists(2 * wanted, lists.sizes, lists.pair_of, lists.row_of)
    copies.integers[:, :length] = lists.integers
    copies.numbers[:, :length] = lists.numbers
    return copies


@jit_in_place
def expand_level(
    graph, lists, level, vertex, nodes, starts, kept, is_inner, root_actions, root_row
):  # fmt: skip
    """Write the pairs and outcomes of a level, and the vertices of the next one if that is_inner.

    vertex: the first one of the level. nodes: of its vertices. kept: of its transitions. starts: as
    `sample_level` has it; out: the same of the next level. On level 0 nodes and root_actions int64
    [B] are the roots'; out: root_row int64 [B], row of a root never seen.
    """
    begin, place, next_level = 0, 0, lists.sizes[VERTICES]
    for group in range(starts.shape[0] - 1):
        end, first = starts[group + 1], lists.sizes[VERTICES]
        for i in range(begin, end):
            node = nodes[i]
            lists.pair_of[:] = EMPTY
            if level > 0:
                write_pairs(graph, lists, node, vertex + i, kept, place)
            else:
                action = root_actions[i]
                lists.pair_of[action], lists.pair_action[i] = i, action
                lists.pair_count[i] = graph.pair_count[node, action]
                lists.sizes[PAIRS] = i + 1
            write_outcomes(graph, lists, node, kept, place, first, is_inner)
            if level == 0 and lists.pair_count[i] == 0:
                root_row[i] = row_for(lists, node)
            place += graph.degree[node]
        starts[group + 1] = lists.sizes[VERTICES] - next_level  # what stood there was read: end
        begin = end


@jit_in_place(forceinline=True)
def write_pairs(graph, lists, node, vertex, kept, place):
    """Write the pairs of a vertex: actions with a transition that is kept, by kept[place ..]."""
    pair_of, pair = lists.pair_of, lists.sizes[PAIRS]
    lists.vertex_pairs[vertex] = pair
    start = graph.block_start[node]
    for k in range(graph.degree[node]):
        action = graph.edge_action[start + k]
        if kept[place + k] and pair_of[action] == EMPTY:
            pair_of[action] = pair
            lists.pair_action[pair] = action
            lists.pair_count[pair] = graph.pair_count[node, action]
            pair += 1
    lists.sizes[PAIRS] = pair


@jit_in_place(forceinline=True)
def write_outcomes(graph, lists, node, kept, place, first, is_inner):
    """The outcomes of the pairs of a node. Those kept lead to a vertex, where is_inner; of the
    vertices of the next level the group has those from `first` on.
    """
    start, outcome = graph.block_start[node], lists.sizes[OUTCOMES]
    for k in range(graph.degree[node]):
        e = np.uint64(start + k)  # unsigned: no test for a negative index
        pair = lists.pair_of[graph.edge_action[e]]
        if pair == EMPTY:
            continue
        to = END
        if not graph.edge_terminated[e]:
            after = graph.edge_next[e]
            to = row_for(lists, after)
            if kept[place + k] and is_inner and graph.degree[after] > 0:
                to = -2 - vertex_for(lists, to, first)
        at = np.uint64(outcome)
        lists.outcome_pair[at] = pair
        lists.outcome_vertex[at] = to
        lists.outcome_weight[at] = graph.edge_count[e] / lists.pair_count[np.uint64(pair)]
        lists.outcome_reward[at] = graph.edge_reward[e]
        outcome += 1
    lists.sizes[OUTCOMES] = outcome


@jit_in_place(forceinline=True)
def row_for(lists, node):
    """The row of a node in nodes, a new one if it has none."""
    row, size = np.int64(lists.row_of[node]), lists.sizes[ROWS]
    if not 0 <= row < size or lists.nodes[row] != node:
        row = size
        lists.row_of[node], lists.nodes[row] = row, node
        lists.row_vertex[row] = EMPTY
        lists.sizes[ROWS] += 1
    return row


@jit_in_place(forceinline=True)
def vertex_for(lists, row, first):
    """The vertex from `first` on of a row, a new one if it has none."""
    vertex = lists.row_vertex[row]
    if vertex < first:
        vertex = lists.sizes[VERTICES]
        lists.row_vertex[row], lists.vertex_row[vertex] = vertex, row
        lists.sizes[VERTICES] += 1
    return vertex


@jit_in_place
def place_vertices(lists):
    """Have outcome_vertex say rows of the flat array. A vertex without pairs is a leaf."""
    num_rows, num_vertices, num_pairs, num_outcomes = lists.sizes
    lists.vertex_pairs[num_vertices] = num_pairs
    for o in range(num_outcomes):
        to = lists.outcome_vertex[o]
        if to == END:
            lists.outcome_vertex[o] = num_rows + num_vertices
        elif to < END:
            v = -2 - to
            has_pairs = lists.vertex_pairs[v] < lists.vertex_pairs[v + 1]
            lists.outcome_vertex[o] = num_rows + v if has_pairs else lists.vertex_row[v]


@jit
def finished(lists, root_nodes, root_row, levels):
    """`Subgraphs` of the lists. levels int64 [3, D + 1]: of vertices, pairs and outcomes."""
    place_vertices(lists)
    num_rows, num_vertices, num_pairs, num_outcomes = lists.sizes
    return Subgraphs(
        lists.nodes[:num_rows],
        root_nodes,
        root_row,
        lists.vertex_row[:num_vertices],
        lists.vertex_pairs[: num_vertices + 1],
        lists.pair_action[:num_pairs],
        lists.pair_count[:num_pairs],
        lists.outcome_pair[:num_outcomes],
        lists.outcome_vertex[:num_outcomes],
        lists.outcome_weight[:num_outcomes],
        lists.outcome_reward[:num_outcomes],
        levels[0].copy(),
        levels[1].copy(),
        levels[2].copy(),
    )


# --- From a trajectory ---


@jit
def follow_trajectories(starts, depth, node, action, reward, next_node, terminated, cut):
    """Subgraphs that are chains: at most depth rows of the ring from each start.

    Returns the last row met that holds a negative action or next node, or else -1, and the
    subgraphs, which mean nothing in the first case.
    """
    num_roots, bad_row, num_slots = starts.shape[0], EMPTY, 16
    while num_slots < 2 * num_roots * depth:
        num_slots *= 2
    levels, sizes = np.zeros((3, depth + 1), np.int64), np.zeros(4, np.int64)
    row_of, no_actions = np.full(num_slots, EMPTY, np.int32), np.empty(0, np.int64)
    lists = new_lists(num_roots * depth + 1, sizes, no_actions, row_of)
    current, num_chains = starts.copy(), num_roots  # ring row of each chain that goes on
    for level in range(depth):
        levels[0, level + 1], pair = sizes[VERTICES], sizes[PAIRS]
        num_left = 0
        for t in current[:num_chains]:
            if action[t] < 0 or next_node[t] < 0:
                bad_row = t
                continue
            if level > 0:
                lists.vertex_pairs[pair - num_roots] = pair
            lists.pair_action[pair], lists.pair_count[pair] = action[t], 1
            lists.outcome_reward[pair], lists.outcome_weight[pair] = reward[t], 1.0
            lists.outcome_pair[pair], to = pair, END
            if not terminated[t]:
                to = row_by_hash(lists, next_node[t])
                if level + 1 < depth and not cut[t]:
                    lists.vertex_row[sizes[VERTICES]] = to
                    to = -2 - sizes[VERTICES]
                    sizes[VERTICES] += 1
                    current[num_left] = (t + 1) % node.shape[0]
                    num_left += 1
            lists.outcome_vertex[pair] = to
            pair += 1
        num_chains, sizes[PAIRS], sizes[OUTCOMES] = num_left, pair, pair
        levels[1:, level + 1] = pair
    root_row = np.full(num_roots, -1, np.int64)
    return bad_row, finished(lists, node[starts], root_row, levels)


@jit_in_place
def row_by_hash(lists, node):
    """As `row_for`, for ids without a bound: row_of is a hash table of rows, at first EMPTY."""
    mask = lists.row_of.shape[0] - 1
    slot = np.int64(mix(np.uint64(node)) & np.uint64(mask))
    while lists.row_of[slot] != EMPTY:
        if lists.nodes[lists.row_of[slot]] == node:
            return np.int64(lists.row_of[slot])
        slot = (slot + 1) & mask
    row = lists.sizes[ROWS]
    lists.row_of[slot], lists.nodes[row] = row, node
    lists.sizes[ROWS] += 1
    return row
