"""Subgraphs of few shapes, for CUDA graphs."""

import numpy as np

from gbcore.subgraph import Subgraphs


def pad(subgraphs: Subgraphs) -> Subgraphs:
    """The same subgraphs with every level filled up: the targets of the roots stay the same.

    There are few shapes: 32, 48, 64, 96, 128 ... nodes, and one such number of vertices, pairs and
    outcomes on every level. Added outcomes have weight 0 and belong to the first pair of their
    level. Added pairs belong to the last vertex of their level, which is always an added one and
    which no outcome leads to. Added nodes repeat the first one, or are 0.
    """
    sub = subgraphs
    width = 1 + np.diff(sub.level_vertices).max(initial=0)  # the last one is padding
    for bounds in (sub.level_pairs[1:], sub.level_outcomes):
        width = max(width, np.diff(bounds).max(initial=0))
    num_nodes, width = _round_up(len(sub.nodes)), _round_up(width)
    num_roots = sub.num_roots
    steps = np.arange(len(sub.level_pairs))
    level_vertices = np.maximum(steps - 1, 0) * width
    level_pairs = np.where(steps > 0, num_roots + (steps - 1) * width, 0)
    level_outcomes = steps * width
    vertex_place = _places(sub.level_vertices, level_vertices)
    pair_place = _places(sub.level_pairs, level_pairs)
    outcome_place = _places(sub.level_outcomes, level_outcomes)

    last_vertex = np.repeat(level_vertices[2:] - 1, width)  # of each pair's level
    pair_vertex = np.concatenate([np.full(num_roots, -1), last_vertex])
    pair_vertex[pair_place[num_roots:]] = vertex_place[sub.pair_vertex]
    pairs_of = np.bincount(pair_vertex[num_roots:], minlength=level_vertices[-1])
    any_node = sub.nodes[0] if len(sub.nodes) else 0
    leaves, end = np.arange(len(sub.nodes)), [num_nodes + level_vertices[-1]]
    vertex_of = np.concatenate([leaves, num_nodes + vertex_place, end])
    of_vertices, of_pairs = (level_vertices[-1], vertex_place), (level_pairs[-1], pair_place)
    of_outcomes = level_outcomes[-1], outcome_place
    first_pair = np.repeat(level_pairs[:-1], width)
    return sub._replace(
        nodes=np.concatenate([sub.nodes, np.full(num_nodes - len(leaves), any_node)]),
        vertex_row=_filled(*of_vertices, sub.vertex_row),
        vertex_pairs=num_roots + np.append(0, np.cumsum(pairs_of)),
        pair_action=_filled(*of_pairs, sub.pair_action),
        pair_count=_filled(*of_pairs, sub.pair_count),
        outcome_pair=_filled(*of_outcomes, pair_place[sub.outcome_pair], first_pair),
        outcome_vertex=_filled(*of_outcomes, vertex_of[sub.outcome_vertex], vertex_of[-1]),
        outcome_weight=_filled(*of_outcomes, sub.outcome_weight),
        outcome_reward=_filled(*of_outcomes, sub.outcome_reward),
        level_vertices=level_vertices,
        level_pairs=level_pairs,
        level_outcomes=level_outcomes,
    )


def _round_up(size):
    power = max(32, 1 << (int(size) - 1).bit_length())
    return 3 * power // 4 if power > 32 and size <= 3 * power // 4 else power


def _places(bounds, new_bounds):
    # New index of every item, when level k moves from bounds[k] to new_bounds[k].
    counts = np.diff(bounds)
    return np.arange(bounds[-1]) + np.repeat(new_bounds[:-1] - bounds[:-1], counts)


def _filled(size, places, values, rest=0):
    array = np.full(size, rest, values.dtype)
    array[places] = values
    return array
