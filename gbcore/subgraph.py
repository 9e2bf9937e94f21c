"""Subgraphs: the part of a graph that one batch of targets reads, and how it is read.

With V_0 from the network, and counts c(s, a) of pairs and f(T) of transitions:

    G_k(s, a) = sum_T f(T) / c(s, a) * (r + gamma (1 - done) V_{k-1}(s'))     seen pairs, else q
    V_k(s)    = max_a G_k(s, a)                                               rule "greedy"
              = G_k(s, argmax_a of the online network at s)                   rule "double"
              = sum_a pi(a | s) G_k(s, a)                                     rule "policy"
              = mean over all transitions of s, weighted by f                 rule "behaviour"

The roots are pairs, worth G_d. The levels below them hold the states that they lead to:

    level 0      pair 0 .. B-1: the roots                      G_d
                   | outcomes
    level 1      vertices -> pairs (one per expanded action)   V_{d-1}, G_{d-1}
                   | outcomes
    ...          ...
    level d-1    vertices -> pairs                             V_1, G_1
                   | outcomes
    boundary     leaves                                        V_0

A vertex is a node on one level (of one root, where breadth is limited). Values of the whole batch
are one flat array, a number or a pmf in each row:

    M leaves | V vertices | the end of the episode, worth 0 | P pairs, the roots first

An outcome adds its weight times (reward + gamma * row outcome_vertex) to the row of its pair. So
levels are worked off from the last one to the first: pairs from outcomes, vertices from pairs.

Example. Action 0 leads from state 0 to 1, and from 1 twice to 2 with a reward of 1, once back to 0:

>>> import numpy as np
>>> from gbcore import TransitionGraph, pair_q_values
>>> graph = TransitionGraph(num_actions=2, obs_shape=(1,))
>>> s0, s1, s2 = graph.nodes(np.array([[0], [1], [2]], np.uint8))
>>> graph.add([s0, s1, s1, s1], [0] * 4, [0, 1, 1, 0], [s1, s2, s2, s0], [False] * 4)
>>> sub = graph.expand(s0, 0, depth=2)
>>> sub.nodes                                # M = 3 leaves: the states in the order they are met
array([1, 2, 0])
>>> sub.vertex_row, sub.vertex_pairs         # V = 1 vertex, row 3: state nodes[0], it has pair 1
(array([0]), array([1, 2]))
>>> sub.pair_action, sub.pair_count          # P = 2 pairs, rows 5 and 6
(array([0, 0]), array([1, 3]))
>>> sub.outcome_pair, sub.outcome_vertex     # pair 0 leads to the vertex, pair 1 to two leaves
(array([0, 1, 1]), array([3, 1, 2]))
>>> leaf_q = np.array([[5.0, 1.0], [2.0, 4.0], [3.0, 0.0]])      # of states 1, 2 and 0
>>> pair_q_values(sub, leaf_q, gamma=0.5).tolist()
[1.25, 2.5]

Leaves are worth 5, 4 and 3. Pair 1 is worth 2/3 (1 + 0.5 * 4) + 1/3 (0.5 * 3) = 2.5, the vertex
max(2.5, 1) = 2.5, and the root 0.5 * 2.5 = 1.25.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Subgraphs(NamedTuple):
    """The subgraphs of a batch of B roots, on D levels, with M distinct nodes; see `subgraph.py`.

    Vertices, pairs and outcomes are each sorted by level: level k has level_x[k] .. [k + 1].
    """

    nodes: NDArray[np.int64]  # [M], node ids whose leaf values are needed
    root_nodes: NDArray[np.int64]  # [B], node of each root pair
    root_row: NDArray[np.int64]  # [B], row in nodes of a root pair never seen, -1 for the others
    vertex_row: NDArray[np.int64]  # [V], row in nodes of a vertex
    vertex_pairs: NDArray[np.int64]  # [V + 1], pairs of vertex v: vertex_pairs[v] .. [v + 1]
    pair_action: NDArray[np.int64]  # [P], the first B are the roots'
    pair_count: NDArray[np.int64]  # [P], c(s, a)
    outcome_pair: NDArray[np.int64]  # [O]
    outcome_vertex: NDArray[np.int64]  # [O]: i a leaf, M + v a vertex, M + V the end
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
        """int64 [P - B], the vertex of every pair below the roots, from 0."""
        return np.repeat(np.arange(len(self.vertex_row)), np.diff(self.vertex_pairs))

    @property
    def pair_nodes(self) -> NDArray[np.int64]:
        """int64 [P], the node of every pair, roots first."""
        return np.append(self.root_nodes, self.nodes[self.vertex_row[self.pair_vertex]])

    def check_valid(self) -> list[str]:
        """A sentence for each index out of place. Call it for subgraphs made by hand: targets do
        not look at indices, and read memory beside an array where one is out of place.
        """
        num_leaves, num_roots, num_vertices = len(self.nodes), self.num_roots, len(self.vertex_row)
        num_pairs, num_outcomes = len(self.pair_action), len(self.outcome_pair)
        depth, end = len(self.level_pairs) - 1, num_leaves + num_vertices
        lengths = {
            "root_nodes": num_roots, "vertex_pairs": num_vertices + 1, "pair_count": num_pairs,
            "outcome_vertex": num_outcomes, "outcome_weight": num_outcomes,
            "outcome_reward": num_outcomes, "level_vertices": depth + 1,
            "level_outcomes": depth + 1,
        }  # fmt: skip
        ascending = {
            "level_vertices": (0, num_vertices), "level_pairs": (0, num_pairs),
            "level_outcomes": (0, num_outcomes), "vertex_pairs": (num_roots, num_pairs),
        }  # fmt: skip
        within = {
            "root_row": (-1, num_leaves), "vertex_row": (0, num_leaves), "pair_action": (0, 2**31),
            "outcome_pair": (0, num_pairs), "outcome_vertex": (0, end + 1),
        }  # fmt: skip
        columns = self._asdict()
        problems = [
            f"{name} is not {n} long" for name, n in lengths.items() if len(columns[name]) != n
        ]
        if depth < 1 or problems:
            return problems or ["there is no level"]
        for name, (first, last) in ascending.items():
            column = columns[name]
            if column[0] != first or column[-1] != last or (np.diff(column) < 0).any():
                problems.append(f"{name} does not ascend from {first} to {last}")
        for name, (low, high) in within.items():
            if not ((columns[name] >= low) & (columns[name] < high)).all():
                problems.append(f"{name} is not within {low} and {high - 1}")
        if problems:
            return problems
        vertex_level, pair_level, outcome_level = (
            np.repeat(np.arange(depth), np.diff(columns[name]))
            for name in ("level_vertices", "level_pairs", "level_outcomes")
        )
        inner = (self.outcome_vertex >= num_leaves) & (self.outcome_vertex < end)
        below = vertex_level[self.outcome_vertex[inner] - num_leaves]
        for holds, problem in (
            (pair_level[:num_roots] == 0, "a root below level 0"),
            (vertex_level > 0, "a vertex on level 0"),
            (pair_level[num_roots:] == vertex_level[self.pair_vertex], "a pair beside its vertex"),
            (pair_level[self.outcome_pair] == outcome_level, "an outcome beside its pair"),
            (below > outcome_level[inner], "an outcome that does not lead down"),
        ):
            problems += [] if holds.all() else [problem]
        return problems

    def __repr__(self) -> str:
        return (
            f"Subgraphs({self.num_roots} roots, {len(self.level_pairs) - 1} levels, "
            f"{len(self.pair_action)} pairs, {len(self.outcome_pair)} outcomes, "
            f"{len(self.nodes)} nodes)"
        )
