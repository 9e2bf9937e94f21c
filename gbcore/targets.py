"""Targets of `Subgraphs`: scalar ones, by a kernel, and the checks of all.

The equations, a drawing and an example are in `subgraph.py`. Rules, from the paper: nested and
mixed Graph Backup are Equations 5 to 8; on trajectories, Tree Backup is Equation 4 ("greedy",
"double") and n-step Q Equation 3 ("behaviour").

With prior = p > 0 the network's value counts as p observations of every seen pair below the root:
V_k reads (c(s, a) G_k(s, a) + p q(s, a)) / (c(s, a) + p) in place of G_k(s, a), as pmfs the same
mixture. So the fewer outcomes of a pair are known, the less a lucky one counts.

NaN is the least of all values: a maximum or argmax, here and in `GraphValues`, is over the other
actions, and NaN where there is no other. So no result depends on the order of actions, no policy
prefers NaN to a number, and an agent whose network gives nothing else has a NaN loss.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gbcore.arrays import as_indices
from gbcore.kernels import backup
from gbcore.kernels.backup import BEHAVIOUR, DOUBLE, GREEDY, POLICY
from gbcore.subgraph import Subgraphs

RULES = {"greedy": GREEDY, "double": DOUBLE, "policy": POLICY, "behaviour": BEHAVIOUR}


def q_targets(
    subgraphs: Subgraphs,
    leaf_q: ArrayLike,
    gamma: float,
    rule: str = "greedy",
    selector_q: ArrayLike | None = None,
    policy: ArrayLike | None = None,
    prior: float = 0.0,
) -> NDArray[Any]:
    """Scalar targets of the roots.

    Args:
        subgraphs: of `TransitionGraph.expand` or `trajectory_subgraphs`.
        leaf_q: float32 or float64 [M, A], the target network's values of `subgraphs.nodes`.
        gamma: the discount, in [0, 1].
        rule: "greedy", "double", "policy" or "behaviour".
        selector_q: [M, A], the online network's values: needed by "double"; with "behaviour" the
            boundary is read as in "double" rather than by its maximum.
        policy: [M, A], probabilities: needed by "policy".
        prior: observations that the network's value of a seen pair below the root counts as, in
            [0, inf). With "behaviour" each pair of the mean is read so, and keeps its weight.

    Returns [B], of the dtype of leaf_q. Raises TypeError for another dtype, ValueError for an
    unknown rule, a missing argument, a wrong shape, a policy that is negative or whose rows do not
    sum to 1, a prior out of range, or fewer actions than the subgraphs have.
    """
    pair_q = pair_q_values(subgraphs, leaf_q, gamma, rule, selector_q, policy, prior)
    return pair_q[: subgraphs.num_roots]


def pair_q_values(
    subgraphs: Subgraphs,
    leaf_q: ArrayLike,
    gamma: float,
    rule: str = "greedy",
    selector_q: ArrayLike | None = None,
    policy: ArrayLike | None = None,
    prior: float = 0.0,
) -> NDArray[Any]:
    """As `q_targets`, for every expanded pair [P]: the roots, then level by level all others, with
    the prior.

    Their nodes and actions are `subgraphs.pair_nodes` and `subgraphs.pair_action`. A pair met on
    several levels, or under several roots, comes several times.
    """
    leaf_q = np.ascontiguousarray(leaf_q)
    if leaf_q.dtype not in (np.float32, np.float64):
        raise TypeError(f"Require leaf_q of float32 or float64, got {leaf_q.dtype}")
    check_arguments(subgraphs, "leaf_q", leaf_q.shape, 2, gamma, rule, selector_q, policy, prior)
    best, probabilities = np.empty(0, np.int64), np.empty((0, 0), leaf_q.dtype)
    if needs_selector(rule, selector_q):
        best = greedy_actions(np.asarray(selector_q))
    if rule == "policy":
        probabilities = np.ascontiguousarray(policy, leaf_q.dtype)
        check_policy(probabilities)
    rule_number, gamma, prior = RULES[rule], float(gamma), float(prior)
    return backup.back_up(subgraphs, leaf_q, best, probabilities, gamma, rule_number, prior)


def rows_read(
    subgraphs: Subgraphs,
    rule: str,
    best_actions: Callable[[NDArray[np.int64]], ArrayLike] | None = None,
    prior: float = 0.0,
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The rows of `subgraphs.nodes` that a "double" or "behaviour" target reads.

    With "double" the online network chooses the action at a state, whatever the nested values: one
    pair of each state is read. The online network is needed along that path alone, and the target
    network where the path leaves the graph. With "behaviour" only the boundary matters.
    A prior reads the leaf values of every state on the way, too. Other rows may hold any finite
    number: the targets stay the same.

    Args:
        subgraphs: as in `q_targets`.
        rule: "double" or "behaviour".
        best_actions: function of node ids int64 [n] that returns the online network's actions
            int64 [n]; needed by "double". It is called once per level, never twice for a node.
        prior: as in `q_targets`.

    Returns:
        rows int64 [R]: first those that best_actions was asked for, in that order, then those of
        roots never seen; and bool [R]: is the leaf value itself read there?

    Raises ValueError for another rule, missing best_actions, other than one action >= 0 per node,
    or a prior out of range; TypeError for actions that are no integers.
    """
    check_prior(prior)
    leaf_read = np.zeros(len(subgraphs.nodes), np.bool_)
    unseen_roots = np.unique(subgraphs.root_row[subgraphs.root_row >= 0])
    if rule == "behaviour":
        boundary = subgraphs.outcome_vertex[subgraphs.outcome_vertex < len(leaf_read)]
        rows = np.union1d(boundary, subgraphs.vertex_row if prior > 0 else ()).astype(np.int64)
        leaf_read[rows] = True
    elif rule == "double" and best_actions is not None:
        rows = _follow_paths(subgraphs, best_actions, prior, leaf_read)
    else:
        raise ValueError(f"Require rule 'behaviour', or 'double' with best_actions; got {rule!r}")
    leaf_read[unseen_roots] = True
    rows = np.concatenate([rows, np.setdiff1d(unseen_roots, rows)])
    return rows, leaf_read[rows]


def _follow_paths(sub, best_actions, prior, leaf_read):
    """Rows on the paths of the best actions, in the order in which they are asked for.

    Out: leaf_read bool [M], True for those whose leaf value is read.
    """
    num_leaves, num_roots, num_pairs = len(sub.nodes), sub.num_roots, len(sub.pair_action)
    end = num_leaves + len(sub.vertex_row)
    row_of = np.append(np.arange(num_leaves), sub.vertex_row)  # of every vertex but the end
    vertex_of = np.append(np.zeros(num_roots, np.int64), sub.pair_vertex)  # of every pair
    ends = np.append(sub.level_pairs, num_pairs)
    is_met, pair_read = np.zeros(end + 1, np.bool_), np.arange(num_pairs) < num_roots
    best, rows = np.full(num_leaves, -1), [np.empty(0, np.int64)]
    for level in range(len(sub.level_pairs) - 1):
        of_level = slice(*sub.level_outcomes[level : level + 2])
        vertices = sub.outcome_vertex[of_level][pair_read[sub.outcome_pair[of_level]]]
        is_met[vertices] = True
        new = row_of[vertices[vertices < end]]
        new = new[best[new] < 0]
        new = new[np.sort(np.unique(new, return_index=True)[1])]  # each once, in their order
        if len(new):
            chosen = as_indices("best_actions", best_actions(sub.nodes[new]))
            if chosen.shape != new.shape or chosen.min() < 0:
                raise ValueError(f"Require {len(new)} best actions >= 0, got {chosen}")
            best[new] = chosen
            rows.append(new)
        below = slice(*ends[level + 1 : level + 3])
        is_best = best[sub.vertex_row[vertex_of[below]]] == sub.pair_action[below]
        pair_read[below] = is_best & is_met[num_leaves + vertex_of[below]]
    is_left = is_met[num_leaves:end].copy()  # a vertex whose best action was never tried
    if prior == 0:  # else its leaf value counts beside what was tried
        is_left[vertex_of[num_roots:][pair_read[num_roots:]]] = False
    leaf_read[:] = is_met[:num_leaves]
    leaf_read[sub.vertex_row[is_left]] = True
    return np.concatenate(rows)


def greedy_actions(q: NDArray[Any]) -> NDArray[np.int64]:
    """argmax int64 [n] of values [n, A]; NaN is the least."""
    return np.where(np.isnan(q), -np.inf, q).argmax(axis=1)


def needs_selector(rule: str, selector_q: object) -> bool:
    return rule == "double" or (rule == "behaviour" and selector_q is not None)


def check_arguments(
    subgraphs: Subgraphs,
    name: str,
    shape: tuple[int, ...],
    num_axes: int,
    gamma: float,
    rule: str,
    selector_q: Any,
    policy: Any,
    prior: float,
) -> None:
    if rule not in RULES:
        raise ValueError(f"Require a rule of {', '.join(RULES)}; got {rule!r}")
    if len(shape) != num_axes or shape[0] != len(subgraphs.nodes):
        raise ValueError(
            f"Require {name} with {num_axes} axes and {len(subgraphs.nodes)} rows, one per node "
            f"of the subgraphs; got shape {shape}"
        )
    if not 0 <= gamma <= 1:
        raise ValueError(f"Require 0 <= gamma <= 1, got {gamma}")
    check_prior(prior)
    actions = subgraphs.pair_action
    if len(actions) and actions.max() >= shape[1]:
        raise ValueError(
            f"Require 0 <= action < {shape[1]}, got actions {actions.min()} to {actions.max()}"
        )
    for name, values, is_needed in (
        ("selector_q", selector_q, needs_selector(rule, selector_q)),
        ("policy", policy, rule == "policy"),
    ):
        found = None if values is None else tuple(np.shape(values))
        if is_needed and found != shape[:2]:
            raise ValueError(f"Require {name} of shape {shape[:2]} for this rule, got {found}")


def check_prior(prior: float) -> None:
    if not 0 <= prior < np.inf:
        raise ValueError(f"Require 0 <= prior < inf, got {prior}")


def check_policy(policy: NDArray[Any]) -> None:
    sums = policy.sum(axis=1)
    wrong = np.flatnonzero(~((policy >= 0).all(axis=1) & (np.abs(sums - 1) <= 1e-3)))
    if len(wrong):
        row = wrong[0]
        raise ValueError(
            f"Require a policy >= 0 whose rows sum to 1, got {policy[row]} in row {row}"
        )
