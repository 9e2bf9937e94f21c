"""The invariants of a `TransitionGraph`, for `check_valid`."""

from typing import TYPE_CHECKING

import numpy as np

from gbcore.kernels import edges, hashing
from gbcore.kernels.edges import FREED, TOTAL_USED
from gbcore.kernels.hashing import EMPTY

if TYPE_CHECKING:
    from gbcore.graph import TransitionGraph


def problems_of(graph: "TransitionGraph") -> list[str]:
    """A sentence for each broken invariant."""
    problems = [f"nodes: {problem}" for problem in graph._keys.check_valid()]
    if graph.frames is not None:
        problems += [f"frames: {problem}" for problem in graph.frames.check_valid()]
    problems += _check_blocks(graph)
    return problems or _check_edges(graph) + _check_frames(graph)


def _check_blocks(graph):
    """Do the blocks of nodes, and those that are free, fill the used positions?"""
    arrays, n, problems = graph._arrays, graph.num_ids, []
    alive = graph._keys.table.links[:n] == hashing.LIVE
    log2, degree = arrays.block_log2[:n].astype(np.int64), arrays.degree[:n]
    room = np.where(log2 == EMPTY, 0, 1 << np.maximum(log2, 0))
    for holds, problem in (
        ((arrays.in_degree[:n] != FREED) == alive, "in use by one array, free by another"),
        (alive | (degree == 0), "free, but has edges"),
        ((degree > 0) == (room > 0), "a block without edges, or edges without a block"),
        ((degree >= 0) & (degree <= room), "more edges than its block has room for"),
    ):
        problems += [f"node {node}: {problem}" for node in np.flatnonzero(~holds)[:3]]
    begins, sizes = arrays.block_start[:n][room > 0].tolist(), room[room > 0].tolist()
    used = int(arrays.totals[TOTAL_USED])
    for size, first in enumerate(arrays.free_blocks.tolist()):
        while first != EMPTY and len(begins) <= used:
            begins.append(first)
            sizes.append(1 << size)
            first = int(arrays.edge_next[first])
    order = np.argsort(begins, kind="stable")
    ends = np.append(0, np.cumsum(np.array(sizes, np.int64)[order]))
    if not np.array_equal(np.append(np.array(begins, np.int64)[order], used), ends):
        problems.append("an edge position is in two blocks, in none, or outside")
    return problems


def _check_edges(graph):
    """Are the edges as the rest of the arrays has them?"""
    arrays, n, listed, position = graph._arrays, graph.num_ids, graph.edges(), graph._positions()
    source, action, target = listed["source"], listed["action"], listed["next"]
    problems, alive = [], np.append(arrays.in_degree[:n] != FREED, False)
    if not alive[np.clip(target, -1, n)].all() or not (action < graph.num_actions).all():
        return ["an edge leads to no node, or has an action out of range"]
    pair_count = np.zeros((n, graph.num_actions), np.int64)
    np.add.at(pair_count, (source, action), listed["count"])
    totals = [len(source), pair_count.sum(), np.count_nonzero(arrays.degree)]
    goes_on = position[~listed["terminated"]]
    node, before = arrays.edge_next[goes_on], arrays.in_before[goes_on]
    is_first = before == EMPTY
    linked = np.where(is_first, arrays.in_first[node], arrays.in_next[before]) == goes_on
    num_first = np.count_nonzero(arrays.in_first[:n] != EMPTY)
    for holds, problem in (
        (source == np.repeat(np.arange(n), arrays.degree[:n]), "an edge in another's block"),
        (np.isfinite(listed["reward"]), "a reward that is NaN or infinite"),
        (listed["count"] >= 1, "an edge with a count < 1"),
        (pair_count == arrays.pair_count[:n], "c(s, a) is not the sum of f(T)"),
        (
            (np.bincount(target, minlength=n) == arrays.in_degree[:n]) | ~alive[:n],
            "in_degree is not the number of edges that lead to a node",
        ),
        (np.array(totals) == arrays.totals[:3], f"totals are not {totals}"),
        (
            linked & (is_first | (arrays.edge_next[before] == node)),
            "an edge that goes on to a node is not in its list",
        ),
        (num_first == np.count_nonzero(is_first), "a list begins with no edge"),
        (
            np.count_nonzero(arrays.edge_slots != EMPTY) == graph.num_edges,
            "the edge slots do not hold each edge exactly once",
        ),
    ):
        problems += [] if np.all(holds) else [problem]
    names = ("source", "action", "reward", "next", "terminated")
    for edge in zip(*(listed[name].tolist() for name in names), strict=True):
        if edges.find_edge_slot(arrays, *edge) == EMPTY:
            problems.append(f"edge {edge} is not found by its hash")
    return problems


def _check_frames(graph):
    """Is each frame used as often as its count has it?"""
    if graph.frames is None:
        return []
    frames = graph._contents_of(np.flatnonzero(graph._arrays.in_degree[: graph.num_ids] != FREED))
    uses = np.zeros_like(graph._frame_uses)
    in_range = (frames >= 0) & (frames < len(uses))
    np.add.at(uses, frames[in_range], 1)
    holds = in_range.all() and (uses == graph._frame_uses).all()
    return [] if holds else ["frame uses are not those of the nodes"]
