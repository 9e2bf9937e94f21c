"""Categorical (C51) targets over `Subgraphs`, in batched torch. The equations are in `subgraph.py`.

At every pair the pmf of r + gamma (1 - done) Z is clipped to the support's range and projected on
its atoms (Bellemare et al. 2017, Eq. 7): the paper's Algorithm 2, made synchronous.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from gbcore.subgraph import Subgraphs
from gbcore.targets import check_arguments, check_policy, needs_selector

Levels = tuple[tuple[int, int, int], ...]  # see `level_bounds`


@torch.no_grad()
def categorical_targets(
    subgraphs: Subgraphs,
    leaf_pmf: torch.Tensor,
    support: torch.Tensor,
    gamma: float,
    rule: str = "double",
    selector_q: torch.Tensor | None = None,
    policy: torch.Tensor | None = None,
    prior: float = 0.0,
) -> torch.Tensor:
    """Categorical targets of the roots.

    Everything runs on the device of leaf_pmf, and nothing is read back from it.

    Args:
        subgraphs: as in `q_targets`.
        leaf_pmf: float Tensor [M, A, n_atoms], the target network's pmfs.
        support: Tensor [n_atoms], equally spaced and increasing.
        gamma, rule, prior: as in `q_targets`; "greedy" takes the argmax of the expectation of the
            nested pmfs.
        selector_q, policy: Tensors [M, A], as in `q_targets`.

    Returns a Tensor [B, n_atoms], of the dtype and on the device of leaf_pmf; rows sum to 1.

    Raises ValueError for an unknown rule, a missing argument, a wrong shape, a prior out of range,
    or fewer actions than the subgraphs have. On the CPU also for a support that is not equally
    spaced and increasing, a policy as in `q_targets`, and targets that do not sum to 1, since rows
    of leaf_pmf that they read do not.
    """
    shape = tuple(leaf_pmf.shape)
    check_arguments(subgraphs, "leaf_pmf", shape, 3, gamma, rule, selector_q, policy, prior)
    num_atoms = shape[2]
    if tuple(support.shape) != (num_atoms,) or num_atoms < 2:
        raise ValueError(f"Require support of shape ({num_atoms},), got {tuple(support.shape)}")
    if support.device.type == "cpu":  # elsewhere one would have to wait for it
        _check_support(support)
    if rule == "policy" and policy.device.type == "cpu":
        check_policy(policy.detach().double().numpy())
    device, dtype = leaf_pmf.device, leaf_pmf.dtype
    integers, floats = (torch.from_numpy(part).to(device) for part in pack(subgraphs))
    levels = level_bounds(subgraphs)
    sub, support = unpack(levels, integers, floats.to(dtype)), support.to(device, dtype)
    selector_q = None if selector_q is None else selector_q.to(device)
    policy = None if policy is None else policy.to(device, dtype)
    targets = back_up(sub, levels, leaf_pmf, support, gamma, rule, selector_q, policy, prior)
    unseen = np.flatnonzero(subgraphs.root_row >= 0)
    if len(unseen):
        rows = torch.as_tensor(subgraphs.root_row[unseen], device=device)
        actions = torch.as_tensor(subgraphs.pair_action[unseen], device=device)
        targets[torch.as_tensor(unseen, device=device)] = leaf_pmf[rows, actions]
    if device.type == "cpu":
        sums = targets.sum(dim=1, dtype=torch.float64).numpy()
        # bfloat16 drifts by 0.004 in ten levels. NaN passes: an agent that diverged has a NaN loss.
        wrong = np.flatnonzero(np.abs(sums - 1) > 0.05)
        if len(wrong):
            raise ValueError(
                "Require leaf_pmf whose rows sum to 1, "
                f"got a target of sum {sums[wrong[0]]:.3g} for root {wrong[0]}"
            )
    return targets


def _check_support(support):
    atoms = support.detach().double().numpy()  # NumPy: half of torch's time
    steps = np.diff(atoms)
    step = steps.mean()
    rounding = torch.finfo(support.dtype).eps if support.is_floating_point() else 0
    tolerance = 0.01 * step + rounding * np.abs(atoms).max()
    if not (step > 0 and np.abs(steps - step).max() <= tolerance):
        raise ValueError(f"Require a support equally spaced and increasing, got {support}")


# --- On a device: pack, unpack, back_up ---


class SubgraphTensors(NamedTuple):
    """The columns of `Subgraphs` that `back_up` reads, on a device."""

    vertex_row: torch.Tensor  # int64 [V]
    pair_action: torch.Tensor  # int64 [P]
    pair_count: torch.Tensor  # int64 [P]
    pair_vertex: torch.Tensor  # int64 [P - B], vertex of each pair below the roots
    outcome_pair: torch.Tensor  # int64 [O]
    outcome_vertex: torch.Tensor  # int64 [O]
    outcome_weight: torch.Tensor  # float [O]
    outcome_reward: torch.Tensor  # float [O]


def pack(subgraphs: Subgraphs) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Two flat arrays, int64 and float64, so that two transfers take all to a device."""
    sub = subgraphs
    integers = (sub.vertex_row, sub.pair_action, sub.pair_count, sub.pair_vertex)
    integers = (*integers, sub.outcome_pair, sub.outcome_vertex)
    return np.concatenate(integers), np.concatenate([sub.outcome_weight, sub.outcome_reward])


def unpack(levels: Levels, integers: torch.Tensor, floats: torch.Tensor) -> SubgraphTensors:
    """`SubgraphTensors`: views of the tensors of `pack`, for subgraphs of these levels."""
    num_roots, (num_outcomes, num_pairs, num_vertices) = levels[1][1], levels[-1]
    num_nested = num_pairs - num_roots
    lengths = (num_vertices, num_pairs, num_pairs, num_nested, num_outcomes, num_outcomes)
    return SubgraphTensors(*integers.split(lengths), *floats.split([num_outcomes] * 2))


def level_bounds(subgraphs: Subgraphs) -> Levels:
    """The first outcome, pair and vertex of each level, and where the last one ends: ints."""
    levels = (subgraphs.level_outcomes, subgraphs.level_pairs, subgraphs.level_vertices)
    return tuple(map(tuple, np.stack(levels, axis=1).tolist()))


@torch.no_grad()
def back_up(
    sub: SubgraphTensors,
    levels: Levels,
    leaf_pmf: torch.Tensor,
    support: torch.Tensor,
    gamma: float,
    rule: str,
    selector_q: torch.Tensor | None = None,
    policy: torch.Tensor | None = None,
    prior: float = 0.0,
    dense: bool | None = None,
) -> torch.Tensor:
    """`categorical_targets` of roots that were all seen, from tensors on one device.

    Waits for nothing and reads no shape from the device: with fixed shapes it can be captured.

    Args:
        sub: `SubgraphTensors`.
        levels: of `level_bounds`.
        leaf_pmf, support, gamma, rule, selector_q, policy, prior: as in `categorical_targets`.
        dense: sum by products with 0/1 matrices, by default everywhere but on a CPU. A GPU would
            first sort the indices, so that sums repeat, which takes far longer; a CPU adds in
            place. It takes memory of [O, n_atoms, n_atoms], and of [pairs, outcomes] of a level.

    Returns a Tensor [B, n_atoms].
    """
    num_leaves, _, num_atoms = leaf_pmf.shape
    num_roots, (_, num_pairs, num_vertices) = levels[1][1], levels[-1]
    dense = leaf_pmf.device.type != "cpu" if dense is None else dense
    leaf_rule, best = ("greedy" if rule == "behaviour" else rule), None
    if needs_selector(rule, selector_q):
        leaf_rule, best = "double", best_actions(selector_q)  # [M]
    #   pmf  [M + V + 1 + P, n_atoms]   leaves | vertices | the end of an episode | pairs
    end = num_leaves + num_vertices
    pmf = leaf_pmf.new_zeros(end + 1 + num_pairs, num_atoms)
    pmf[:num_leaves] = _read(leaf_rule, leaf_pmf, support, best, policy)
    pmf[end, :1].fill_(1)  # at any atom: it is moved to the reward
    of_pairs = pmf[end + 1 :]
    read = sub.outcome_vertex
    if rule == "double" and num_vertices:  # a vertex is a row that is there: a pair's, or a leaf's
        read = _chosen_rows(sub, best, num_leaves, end)[read]
    position = _positions(sub, end, support, gamma)
    if dense:
        atoms = torch.arange(num_atoms, device=position.device)  # of each atom's mass, to each:
        shares = (1 - (position[:, :, None] - atoms).abs()).clamp(min=0)
        shares = sub.outcome_weight[:, None, None] * shares  # [O, n_atoms, n_atoms]
    if prior > 0:
        prior_share = prior / (sub.pair_count[num_roots:, None].to(leaf_pmf.dtype) + prior)
        prior_pmf = leaf_pmf[sub.vertex_row[sub.pair_vertex], sub.pair_action[num_roots:]]
    for level in reversed(range(len(levels) - 1)):
        (o0, p0, v0), (o1, p1, v1) = levels[level : level + 2]
        if o0 == o1:
            continue
        outcomes = pmf[read[o0:o1]]
        if dense:
            outcomes = (outcomes[:, None] @ shares[o0:o1])[:, 0]
        else:
            outcomes = _project(sub.outcome_weight[o0:o1, None] * outcomes, position[o0:o1])
        of_pairs[p0:p1] = _sum_groups(outcomes, sub.outcome_pair[o0:o1], p0, p1, dense)
        if v0 == v1:
            continue
        pairs = of_pairs[p0:p1]
        below = slice(p0 - num_roots, p1 - num_roots)  # pairs of the level, the roots not counted
        if prior > 0:
            pairs.lerp_(prior_pmf[below], prior_share[below])
        if rule == "double":
            continue
        vertex, vertices = sub.pair_vertex[below], pmf[num_leaves + v0 : num_leaves + v1]
        if rule == "behaviour":
            count = sub.pair_count[p0:p1, None].to(pairs.dtype)
            sums = _sum_groups(torch.cat([count * pairs, count], dim=1), vertex, v0, v1, dense)
            vertices.copy_(sums[:, :-1] / sums[:, -1:].clamp(min=1))
        else:
            leaves = sub.vertex_row[v0:v1]
            nested = leaf_pmf[leaves]  # [v, A, n_atoms]
            nested[vertex - v0, sub.pair_action[p0:p1]] = pairs
            of_leaves = policy[leaves] if rule == "policy" else None
            vertices.copy_(_read(rule, nested, support, None, of_leaves))
    return of_pairs[:num_roots]


def _read(rule, pmf, support, best, policy):
    """Pmfs [n, n_atoms] of states from those of their actions [n, A, n_atoms]."""
    if rule == "policy":
        return torch.einsum("va,vaz->vz", policy, pmf)
    if rule == "greedy":
        best = best_actions(pmf @ support)
    return pmf[torch.arange(len(pmf), device=pmf.device), best]


def best_actions(q: torch.Tensor) -> torch.Tensor:
    """argmax int64 [n] of values [n, A]; NaN is the least, as in `targets.py`."""
    return q.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).argmax(dim=1)


def _chosen_rows(sub, best, num_leaves, end):
    """The row that each row of pmfs is read from: int64 [M + V + 1 + P].

    A vertex is read from the pair of the online network's action, or from its leaf where that pair
    was never seen. All others are read from themselves.
    """
    num_nested, first_nested = len(sub.pair_vertex), len(sub.pair_action) - len(sub.pair_vertex)
    is_best = sub.pair_action[first_nested:] == best[sub.vertex_row][sub.pair_vertex]
    is_best &= sub.pair_count[first_nested:] > 0  # no padding
    row = torch.arange(end + 1 + len(sub.pair_action), device=best.device)
    pair = row[len(row) - num_nested :]
    chosen = row.clone()
    chosen[num_leaves:end] = sub.vertex_row
    # A best pair is written at its vertex, the others at themselves: a GPU writes to one place one
    # after another.
    chosen[torch.where(is_best, num_leaves + sub.pair_vertex, pair)] = pair
    return chosen


def _positions(sub, end, support, gamma):
    """Where each atom of each outcome's target falls, clipped: [O, n_atoms], in atoms from 0."""
    alive = (sub.outcome_vertex < end).to(support.dtype)
    atom = sub.outcome_reward[:, None] + gamma * alive[:, None] * support
    last = len(support) - 1
    return ((atom - support[0]) / (support[-1] - support[0]) * last).clamp(0, last)


def _project(mass, position):
    """Pmfs of mass [o, n_atoms] at these positions: the two atoms beside share it."""
    lower = position.long().clamp(max=mass.shape[1] - 2)  # an atom on the last point has share 1
    upper_mass = mass * (position - lower)
    pmf = torch.zeros_like(mass).scatter_add_(1, lower, mass - upper_mass)
    return pmf.scatter_add_(1, lower + 1, upper_mass)


def _sum_groups(rows, group, first, last, dense):
    """[last - first, n]: the sums of those rows [o, n] that are of a group int64 [o]."""
    if dense:
        groups = torch.arange(first, last, device=rows.device)
        return (group == groups[:, None]).to(rows.dtype) @ rows
    return rows.new_zeros(last - first, rows.shape[1]).index_add_(0, group - first, rows)
