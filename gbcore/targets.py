"""Nested Bellman targets over `Subgraphs`: scalar in Numba, categorical in batched torch.

Both evaluators walk the levels from the boundary to the roots (drawn in `kernels.py`) and differ in
nothing but the kind of value that they carry. With V_0 read from the network, for k = 1 .. d:

    G_k(s, a) = sum_T f(T) / c(s, a) * (r + gamma (1 - done) V_{k-1}(s'))     seen pairs, else leaf
    V_k(s)    = max_a G_k(s, a)                                               rule "greedy"
              = G_k(s, argmax_a of the online network at s)                   rule "double"
              = sum_a pi(a | s) G_k(s, a)                                     rule "policy"
              = mean over all transitions of s, weighted by f                 rule "behaviour"

The paper's Equations 5 to 8 of nested and mixed Graph Backup; on trajectories, Tree Backup
(Equation 4: "greedy", "double") and n-step Q (Equation 3: "behaviour").

With prior = p > 0 the network's value counts as p observations of every seen pair below the root:
V_k reads (c(s, a) G_k(s, a) + p q(s, a)) / (c(s, a) + p) in place of G_k(s, a), as laws the same
mixture. So the fewer outcomes of a pair are known, the less a lucky one counts.
"""

from typing import NamedTuple

import numpy as np
import torch

from gbcore import kernels
from gbcore.graph import as_indices
from gbcore.kernels import BEHAVIOUR, DOUBLE, GREEDY, POLICY, Subgraphs

RULES = {"greedy": GREEDY, "double": DOUBLE, "policy": POLICY, "behaviour": BEHAVIOUR}


def q_targets(subgraphs, leaf_q, gamma, rule="greedy", selector_q=None, policy=None, prior=0.0):
    """Scalar targets of the roots.

    Args:
        subgraphs: what `TransitionGraph.expand` or `trajectory_subgraphs` returned.
        leaf_q: float32 or float64 [M, A], the target network's values of `subgraphs.nodes`.
        gamma: the discount, in [0, 1].
        rule: "greedy", "double", "policy" or "behaviour".
        selector_q: [M, A], the online network's values: needed by "double"; with "behaviour" the
            boundary is read as in "double" rather than by its maximum.
        policy: [M, A], probabilities: needed by "policy".
        prior: observations that the network's value of a seen pair below the root counts as, in
            [0, inf). With "behaviour" each pair of the mean is read so, and weighs what it weighs.

    Returns:
        [B], of the dtype of leaf_q.

    Raises:
        ValueError: for an unknown rule, a missing argument, a wrong shape, a policy that is
            negative or whose rows do not sum to 1, a prior out of range, or subgraphs that lack
            what the rule reads, see `prune`.
        TypeError: for values that are neither float32 nor float64.
    """
    pair_q = pair_q_values(subgraphs, leaf_q, gamma, rule, selector_q, policy, prior)
    return pair_q[: subgraphs.num_roots]


def pair_q_values(subgraphs, leaf_q, gamma, rule="greedy", selector_q=None, policy=None, prior=0.0):
    """As `q_targets`, for every expanded pair [P]: roots first, then level by level, the latter
    with the prior.

    Their nodes and actions are `subgraphs.pair_nodes` and `subgraphs.pair_action`. A pair met on
    several levels, or under several roots, comes several times.
    """
    leaf_q = np.ascontiguousarray(leaf_q)
    if leaf_q.dtype not in (np.float32, np.float64):
        raise TypeError(f"Require leaf_q of float32 or float64, got {leaf_q.dtype}")
    _check_arguments(subgraphs, "leaf_q", leaf_q.shape, 2, gamma, rule, prior)
    best, probabilities = np.empty(0, np.int64), np.empty((0, 0), leaf_q.dtype)
    if _needs_selector(rule, selector_q):
        _check_companion("selector_q", selector_q, leaf_q.shape)
        best = np.argmax(np.asarray(selector_q), axis=1)
    if rule == "policy":
        _check_companion("policy", policy, leaf_q.shape)
        probabilities = np.ascontiguousarray(policy, leaf_q.dtype)
        _check_policy(probabilities)
    values = np.empty(len(leaf_q) + len(subgraphs.vertex_row) + 1, leaf_q.dtype)
    pair_q = np.empty(len(subgraphs.pair_action), leaf_q.dtype)
    kernels.back_up(
        subgraphs, leaf_q, best, probabilities, float(gamma), RULES[rule], float(prior),
        values, pair_q,
    )  # fmt: skip
    return pair_q


@torch.no_grad()
def categorical_targets(
    subgraphs, leaf_pmf, support, gamma, rule="double", selector_q=None, policy=None, prior=0.0
):
    """Categorical (C51) targets of the roots: paper, Algorithm 2, made synchronous.

    At every pair the law of r + gamma (1 - done) Z is clipped to the support's range and projected
    on its atoms (Bellemare et al. 2017, Eq. 7). Everything runs on the device of leaf_pmf, and
    nothing is read back from it.

    Args:
        subgraphs: as in `q_targets`.
        leaf_pmf: float Tensor [M, A, n_atoms], the target network's distributions.
        support: Tensor [n_atoms], equally spaced and increasing.
        gamma, rule: as in `q_targets`; "greedy" takes the argmax of the expectation of the nested
            distributions.
        selector_q: Tensor [M, A], as in `q_targets`.
        policy: Tensor [M, A], as in `q_targets`.
        prior: as in `q_targets`.

    Returns:
        Tensor [B, n_atoms], of the dtype and on the device of leaf_pmf; rows sum to 1.

    Raises:
        ValueError: for an unknown rule, a missing argument, a wrong shape, or a prior out of range.
            On the CPU also for a support that is not equally spaced and increasing, a policy as in
            `q_targets`, and targets that do not sum to 1, since what they read of leaf_pmf does
            not.
    """
    _check_arguments(subgraphs, "leaf_pmf", tuple(leaf_pmf.shape), 3, gamma, rule, prior)
    num_leaves, num_actions, num_atoms = leaf_pmf.shape
    if tuple(support.shape) != (num_atoms,) or num_atoms < 2:
        raise ValueError(f"Require support of shape ({num_atoms},), got {tuple(support.shape)}")
    if support.device.type == "cpu":  # elsewhere one would have to wait for it
        atoms = support.detach().double().numpy()  # NumPy: half of torch's time
        steps = np.diff(atoms)
        step = steps.mean()
        rounding = torch.finfo(support.dtype).eps if support.is_floating_point() else 0
        tolerance = 0.01 * step + rounding * np.abs(atoms).max()
        if not (step > 0 and np.abs(steps - step).max() <= tolerance):
            raise ValueError(f"Require a support equally spaced and increasing, got {support}")
    if _needs_selector(rule, selector_q):
        _check_companion("selector_q", selector_q, (num_leaves, num_actions))
    if rule == "policy":
        _check_companion("policy", policy, (num_leaves, num_actions))
        if policy.device.type == "cpu":
            _check_policy(policy.detach().double().numpy())
    device, dtype = leaf_pmf.device, leaf_pmf.dtype
    integers, floats = (torch.from_numpy(part).to(device) for part in pack(subgraphs))
    levels = level_bounds(subgraphs)
    targets = back_up_laws(
        unpack(levels, integers, floats.to(dtype)),
        levels,
        leaf_pmf,
        support.to(device, dtype),
        gamma,
        rule,
        None if selector_q is None else selector_q.to(device),
        None if policy is None else policy.to(device, dtype),
        prior,
        dense=device.type != "cpu",
    )
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


def point_masses(values, support):
    """Laws with all mass at values Tensor [B], clipped and projected as in `categorical_targets`.

    Returns a Tensor [B, n_atoms] whose rows sum to 1 and have the values as their expectations.
    """
    width = (support[-1] - support[0]) / (len(support) - 1)
    values = values.clamp(support[0], support[-1])
    return (1 - (values[:, None] - support).abs() / width).clamp(min=0)


# --------------------------------------------------------------------------------------------------
# Fixed shapes, for CUDA graphs: pad, pack, unpack, back_up_laws
# --------------------------------------------------------------------------------------------------


def pad(subgraphs):
    """The same subgraphs with every level filled up: the targets of the roots stay what they are.

    There are few shapes: 32, 48, 64, 96, 128 ... nodes, and one such number of vertices, pairs and
    outcomes on every level. Added outcomes have weight 0 and belong to the first pair of their
    level. Added pairs belong to the last vertex of their level, which is always an added one and
    which no outcome leads to. Added nodes repeat the first one, or are 0.
    """
    width = 1 + np.diff(subgraphs.level_vertices).max(initial=0)  # the last one is padding
    for bounds in (subgraphs.level_pairs[1:], subgraphs.level_outcomes):
        width = max(width, np.diff(bounds).max(initial=0))
    num_nodes, width = _round_up(len(subgraphs.nodes)), _round_up(width)
    num_roots = subgraphs.num_roots
    steps = np.arange(len(subgraphs.level_pairs))
    level_vertices = np.maximum(steps - 1, 0) * width
    level_pairs = np.where(steps > 0, num_roots + (steps - 1) * width, 0)
    level_outcomes = steps * width
    vertex_place = _places(subgraphs.level_vertices, level_vertices)
    pair_place = _places(subgraphs.level_pairs, level_pairs)
    outcome_place = _places(subgraphs.level_outcomes, level_outcomes)

    last_vertex = np.repeat(level_vertices[2:] - 1, width)  # of each pair's level
    pair_vertex = np.concatenate([np.full(num_roots, -1), last_vertex])
    pair_vertex[pair_place[num_roots:]] = vertex_place[subgraphs.pair_vertex]
    pairs_of = np.bincount(pair_vertex[num_roots:], minlength=level_vertices[-1])
    any_node = subgraphs.nodes[0] if len(subgraphs.nodes) else 0
    leaves, end = np.arange(len(subgraphs.nodes)), [num_nodes + level_vertices[-1]]
    vertex_of = np.concatenate([leaves, num_nodes + vertex_place, end])
    num_outcomes, num_pairs = level_outcomes[-1], level_pairs[-1]
    return Subgraphs(
        nodes=np.concatenate([subgraphs.nodes, np.full(num_nodes - len(leaves), any_node)]),
        root_nodes=subgraphs.root_nodes,
        root_row=subgraphs.root_row,
        vertex_row=_filled(level_vertices[-1], vertex_place, subgraphs.vertex_row, 0),
        vertex_pairs=num_roots + np.append(0, np.cumsum(pairs_of)),
        pair_action=_filled(num_pairs, pair_place, subgraphs.pair_action, 0),
        pair_count=_filled(num_pairs, pair_place, subgraphs.pair_count, 0),
        outcome_pair=_filled(
            num_outcomes,
            outcome_place,
            pair_place[subgraphs.outcome_pair],
            np.repeat(level_pairs[:-1], width),
        ),
        outcome_vertex=_filled(
            num_outcomes, outcome_place, vertex_of[subgraphs.outcome_vertex], vertex_of[-1]
        ),
        outcome_weight=_filled(num_outcomes, outcome_place, subgraphs.outcome_weight, 0.0),
        outcome_reward=_filled(num_outcomes, outcome_place, subgraphs.outcome_reward, 0.0),
        level_vertices=level_vertices,
        level_pairs=level_pairs,
        level_outcomes=level_outcomes,
    )


class SubgraphTensors(NamedTuple):
    """What `back_up_laws` reads of `Subgraphs`, on a device."""

    vertex_row: torch.Tensor  # int64 [V]
    pair_action: torch.Tensor  # int64 [P]
    pair_count: torch.Tensor  # int64 [P]
    pair_vertex: torch.Tensor  # int64 [P - B], vertex of a pair that is no root
    outcome_pair: torch.Tensor  # int64 [O]
    outcome_vertex: torch.Tensor  # int64 [O]
    outcome_weight: torch.Tensor  # float [O]
    outcome_reward: torch.Tensor  # float [O]


def pack(subgraphs):
    """Two flat arrays, int64 and float64, so that two transfers take all to a device."""
    integers = (
        subgraphs.vertex_row, subgraphs.pair_action, subgraphs.pair_count, subgraphs.pair_vertex,
        subgraphs.outcome_pair, subgraphs.outcome_vertex,
    )  # fmt: skip
    floats = (subgraphs.outcome_weight, subgraphs.outcome_reward)
    return np.concatenate(integers), np.concatenate(floats)


def unpack(levels, integers, floats):
    """`SubgraphTensors`: views of what `pack` made of subgraphs of these levels."""
    num_roots, (num_outcomes, num_pairs, num_vertices) = levels[1][1], levels[-1]
    num_nested = num_pairs - num_roots
    lengths = (num_vertices, num_pairs, num_pairs, num_nested, num_outcomes, num_outcomes)
    return SubgraphTensors(*integers.split(lengths), *floats.split([num_outcomes] * 2))


def level_bounds(subgraphs):
    """The first outcome, pair and vertex of each level, and where the last one ends: ints."""
    levels = (subgraphs.level_outcomes, subgraphs.level_pairs, subgraphs.level_vertices)
    return tuple(map(tuple, np.stack(levels, axis=1).tolist()))


@torch.no_grad()
def back_up_laws(
    sub, levels, leaf_pmf, support, gamma, rule, selector_q=None, policy=None, prior=0.0,
    dense=True,
):  # fmt: skip
    """`categorical_targets` of roots that were all seen, from tensors on one device.

    Waits for nothing and reads no shape from the device: with fixed shapes it can be captured.

    Args:
        sub: `SubgraphTensors`.
        levels: what `level_bounds` returned.
        leaf_pmf, support, gamma, rule, selector_q, policy, prior: as in `categorical_targets`.
        dense: sum by products with 0/1 matrices. A GPU would first sort the indices, so that sums
            repeat, which takes far longer; a CPU adds in place. For each level it takes memory of
            [outcomes, n_atoms, n_atoms] and [pairs, outcomes].
    """
    num_leaves, _, num_atoms = leaf_pmf.shape
    num_roots, num_pairs, num_vertices = levels[1][1], levels[-1][1], levels[-1][2]
    end = num_leaves + num_vertices
    leaf_rule, best = ("greedy" if rule == "behaviour" else rule), None
    if _needs_selector(rule, selector_q):
        leaf_rule, best = "double", selector_q.argmax(dim=1)  # [M]
    law = leaf_pmf.new_zeros(end + 1, num_atoms)  # of all vertices
    law[:num_leaves] = _read_laws(leaf_rule, leaf_pmf, support, best, policy)
    law[end, :1].fill_(1)  # the end of an episode, only ever scaled by 0
    pair_law = leaf_pmf.new_zeros(num_pairs, num_atoms)
    position = _positions(sub, end, support, gamma)
    if rule == "double" and num_vertices:
        chosen = _chosen_pairs(sub, best, num_roots)
        vertex_leaf = law[sub.vertex_row]
    if prior > 0:
        prior_share = prior / (sub.pair_count[num_roots:, None].to(leaf_pmf.dtype) + prior)
        prior_law = leaf_pmf[sub.vertex_row[sub.pair_vertex], sub.pair_action[num_roots:]]
    for (o0, p0, v0), (o1, p1, v1) in zip(levels[-2::-1], levels[:0:-1], strict=True):
        if o0 == o1:
            continue
        mass = sub.outcome_weight[o0:o1, None] * law[sub.outcome_vertex[o0:o1]]
        projected = _project(mass, position[o0:o1], dense)
        pair_law[p0:p1] = _sum_groups(projected, sub.outcome_pair[o0:o1] - p0, p1 - p0, dense)
        if v0 == v1:
            continue
        here, pairs, rows = slice(num_leaves + v0, num_leaves + v1), pair_law[p0:p1], slice(v0, v1)
        below = slice(p0 - num_roots, p1 - num_roots)  # pairs of the level, the roots not counted
        if prior > 0:
            pairs.lerp_(prior_law[below], prior_share[below])
        if rule == "double":
            nested = pair_law[chosen[rows, 0]]
            law[here] = torch.where(chosen[rows] >= 0, nested, vertex_leaf[rows])
            continue
        vertex = sub.pair_vertex[below] - v0
        if rule == "behaviour":
            count = sub.pair_count[p0:p1, None].to(pairs.dtype)
            sums = _sum_groups(torch.cat([count * pairs, count], dim=1), vertex, v1 - v0, dense)
            law[here] = sums[:, :-1] / sums[:, -1:].clamp(min=1)
        else:
            leaves = sub.vertex_row[rows]
            nested = leaf_pmf[leaves]  # [v, A, n_atoms]
            nested[vertex, sub.pair_action[p0:p1]] = pairs
            of_leaves = policy[leaves] if rule == "policy" else None
            law[here] = _read_laws(rule, nested, support, None, of_leaves)
    return pair_law[:num_roots]


def _read_laws(rule, pmf, support, best, policy):
    """Laws [n, n_atoms] of states from those of their actions [n, A, n_atoms]."""
    if rule == "policy":
        return torch.einsum("va,vaz->vz", policy, pmf)
    if rule == "greedy":
        best = (pmf @ support).argmax(dim=1)
    return pmf[torch.arange(len(pmf), device=pmf.device), best]


def _positions(sub, end, support, gamma):
    """Where each atom of each outcome's target falls, clipped: [O, n_atoms], in atoms from 0."""
    alive = (sub.outcome_vertex < end).to(support.dtype)
    atom = sub.outcome_reward[:, None] + gamma * alive[:, None] * support
    last = len(support) - 1
    return ((atom - support[0]) / (support[-1] - support[0]) * last).clamp(0, last)


def _project(mass, position, dense):
    """Laws [o, n_atoms] of mass [o, n_atoms] at these positions: the two atoms beside share it."""
    if dense:
        atoms = torch.arange(mass.shape[1], device=mass.device)
        shares = (1 - (position[:, :, None] - atoms).abs()).clamp(min=0)  # [o, n_atoms, n_atoms]
        return (mass[:, None] @ shares)[:, 0]
    lower = position.long().clamp(max=mass.shape[1] - 2)  # an atom on the last point has share 1
    upper_mass = mass * (position - lower)
    law = torch.zeros_like(mass).scatter_add_(1, lower, mass - upper_mass)
    return law.scatter_add_(1, lower + 1, upper_mass)


def _sum_groups(rows, group, num_groups, dense):
    """[num_groups, n]: the sums of those rows [o, n] that are of a group int64 [o]."""
    if dense:
        groups = torch.arange(num_groups, device=rows.device)
        return (group == groups[:, None]).to(rows.dtype) @ rows
    return rows.new_zeros(num_groups, rows.shape[1]).index_add_(0, group, rows)


def _chosen_pairs(sub, best, num_roots):
    """int64 [V, 1]: the pair of the online network's action at every vertex, -1 for its leaf."""
    num_vertices = len(sub.vertex_row)
    is_best = sub.pair_action[num_roots:] == best[sub.vertex_row][sub.pair_vertex]
    is_best &= sub.pair_count[num_roots:] > 0  # no padding
    pair = torch.arange(len(is_best), device=best.device)
    chosen = torch.full((num_vertices + len(is_best),), -1, device=best.device)
    # The others go behind, each to its own place: a GPU writes to one place one after another.
    chosen[torch.where(is_best, sub.pair_vertex, num_vertices + pair)] = num_roots + pair
    return chosen[:num_vertices, None]


def prune(subgraphs, rule, best_actions=None, prior=0.0):
    """The part of the subgraphs that a "double" or "behaviour" target reads.

    With "double" the action at a state is the online network's, whatever the nested values are: of
    each state only that one pair can matter. Targets over the pruned subgraphs equal those over the
    whole ones, and need the target network only where that path leaves the graph, the online
    network only along it. With "behaviour" they need the boundary alone. A prior reads the leaf
    values of every pair that is kept, too.

    Args:
        subgraphs: as in `q_targets`.
        rule: "double" or "behaviour".
        best_actions: function of node ids int64 [n] that returns the online network's actions
            int64 [n]; needed by "double". It is called once per level, never twice for a node.
        prior: as in `q_targets`, which must be given the same one and the same rule: not every
            mistake can be noticed there.

    Returns:
        The pruned `Subgraphs`, whose nodes come in the order in which they were asked for, those
        of roots never seen last; and a bool [M] of these nodes: is the leaf value itself read
        there? With "behaviour" and no prior, vertex_row is -1 for an expanded vertex whose state is
        not among the nodes.

    Raises:
        ValueError: for another rule, missing best_actions, other than one action >= 0 per node, or
            a prior out of range.
        TypeError: for actions that are no integers.
    """
    _check_prior(prior)
    num_leaves = len(subgraphs.nodes)
    pair_read = np.ones(len(subgraphs.pair_action), np.bool_)
    if rule == "behaviour":
        rows = subgraphs.outcome_vertex[subgraphs.outcome_vertex < num_leaves]
        rows = np.unique(rows) if prior == 0 else np.union1d(rows, subgraphs.vertex_row)
    elif rule == "double" and best_actions is not None:
        rows = _follow_paths(subgraphs, best_actions, pair_read)
    else:
        raise ValueError(f"Require rule 'behaviour', or 'double' with best_actions; got {rule!r}")
    unseen_roots = np.setdiff1d(subgraphs.root_row[subgraphs.root_row >= 0], rows)
    rows = np.concatenate([rows, unseen_roots])
    pruned, leaf_read = _kept(subgraphs, rows, pair_read)
    if prior > 0:
        leaf_read[pruned.vertex_row] = True
    return pruned, leaf_read


def _follow_paths(sub, best_actions, pair_read):
    """Rows of the nodes on the paths of the best actions, in the order in which they are asked for.

    Out: pair_read bool [P], True for the roots and the pairs on these paths.
    """
    num_roots, num_leaves = sub.num_roots, len(sub.nodes)
    row_of = np.append(np.arange(num_leaves), sub.vertex_row)  # of every vertex but the end
    end = len(row_of)
    pair_vertex = sub.pair_vertex
    pair_row = sub.vertex_row[pair_vertex]
    met = np.zeros(end + 1, np.bool_)
    best, rows = np.full(num_leaves, -1), np.empty(0, np.int64)
    pair_read[num_roots:] = False
    for _ in sub.level_pairs[1:]:  # each time the paths are one level longer
        vertices = sub.outcome_vertex[pair_read[sub.outcome_pair]]
        new = row_of[vertices[vertices < end]]
        new = new[best[new] < 0]
        new = new[np.sort(np.unique(new, return_index=True)[1])]  # each once, in their order
        if len(new):
            chosen = as_indices("best_actions", best_actions(sub.nodes[new]))
            if chosen.shape != new.shape or chosen.min() < 0:
                raise ValueError(f"Require {len(new)} best actions >= 0, got {chosen}")
            best[new], rows = chosen, np.append(rows, new)
        met[vertices] = True
        is_best = best[pair_row] == sub.pair_action[num_roots:]
        pair_read[num_roots:] = met[num_leaves + pair_vertex] & is_best
    return rows


def _kept(sub, rows, pair_read):
    """The subgraphs with only some rows, in that order, the pairs that are read, and no empty
    vertices; and bool [K]: is the leaf value of the row itself read?
    """
    num_leaves, num_roots = len(sub.nodes), sub.num_roots
    new_row = np.full(num_leaves + 1, -1)  # the last one: of a row -1
    new_row[rows] = np.arange(len(rows))
    read = sub.pair_vertex[pair_read[num_roots:]]
    num_pairs = np.bincount(read, minlength=len(sub.vertex_row))
    vertices, pairs = np.flatnonzero(num_pairs), np.flatnonzero(pair_read)
    outcomes = np.flatnonzero(pair_read[sub.outcome_pair])
    end = len(rows) + len(vertices)
    # Where each vertex is now: one of which no pair is read is a leaf.
    place = np.concatenate([new_row[:-1], new_row[sub.vertex_row], [end]])
    place[num_leaves + vertices] = np.arange(len(rows), end)
    outcome_vertex, root_row = place[sub.outcome_vertex[outcomes]], new_row[sub.root_row]
    leaf_read = np.zeros(len(rows), np.bool_)
    leaf_read[outcome_vertex[outcome_vertex < len(rows)]] = True
    leaf_read[root_row[root_row >= 0]] = True
    return Subgraphs(
        nodes=sub.nodes[rows], root_nodes=sub.root_nodes, root_row=root_row,
        vertex_row=new_row[sub.vertex_row[vertices]],
        vertex_pairs=num_roots + np.append(0, np.cumsum(num_pairs[vertices])),
        pair_action=sub.pair_action[pairs], pair_count=sub.pair_count[pairs],
        outcome_pair=(np.cumsum(pair_read) - 1)[sub.outcome_pair[outcomes]],
        outcome_vertex=outcome_vertex, outcome_weight=sub.outcome_weight[outcomes],
        outcome_reward=sub.outcome_reward[outcomes],
        level_vertices=np.searchsorted(vertices, sub.level_vertices),
        level_pairs=np.searchsorted(pairs, sub.level_pairs),
        level_outcomes=np.searchsorted(outcomes, sub.level_outcomes),
    ), leaf_read  # fmt: skip


def _round_up(size):
    power = max(32, 1 << (int(size) - 1).bit_length())
    return 3 * power // 4 if power > 32 and size <= 3 * power // 4 else power


def _places(bounds, new_bounds):
    # New index of every item, when level k moves from bounds[k] to new_bounds[k].
    counts = np.diff(bounds)
    return np.arange(bounds[-1]) + np.repeat(new_bounds[:-1] - bounds[:-1], counts)


def _filled(size, places, values, rest):
    array = np.full(size, rest, values.dtype)
    array[places] = values
    return array


def _needs_selector(rule, selector_q):
    return rule == "double" or (rule == "behaviour" and selector_q is not None)


def _check_arguments(subgraphs, name, shape, num_axes, gamma, rule, prior):
    if rule not in RULES:
        raise ValueError(f"Require a rule of {', '.join(RULES)}; got {rule!r}")
    if len(shape) != num_axes or shape[0] != len(subgraphs.nodes):
        raise ValueError(
            f"Require {name} with {num_axes} axes and {len(subgraphs.nodes)} rows, one per node "
            f"of the subgraphs; got shape {tuple(shape)}"
        )
    largest = subgraphs.pair_action.max(initial=-1)
    if largest >= shape[1]:
        raise ValueError(f"Require {name} with all actions, got {shape[1]} for action {largest}")
    if not 0 <= gamma <= 1:
        raise ValueError(f"Require 0 <= gamma <= 1, got {gamma}")
    _check_prior(prior)
    if (rule != "behaviour" or prior > 0) and subgraphs.vertex_row.min(initial=0) < 0:
        raise ValueError(
            "Require subgraphs that were pruned for this rule and prior, or whole ones"
        )


def _check_prior(prior):
    if not 0 <= prior < np.inf:
        raise ValueError(f"Require 0 <= prior < inf, got {prior}")


def _check_policy(policy):
    sums = policy.sum(axis=1)
    wrong = np.flatnonzero(~((policy >= 0).all(axis=1) & (np.abs(sums - 1) <= 1e-3)))
    if len(wrong):
        row = wrong[0]
        raise ValueError(
            f"Require a policy >= 0 whose rows sum to 1, got {policy[row]} in row {row}"
        )


def _check_companion(name, values, shape):
    if values is None:
        raise ValueError(f"Require {name} for this rule, got None")
    if tuple(values.shape) != tuple(shape):
        raise ValueError(f"Require {name} of shape {shape}, got {tuple(values.shape)}")
