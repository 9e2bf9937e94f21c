"""Nested Bellman targets over `Subgraphs`: scalar in Numba, categorical in batched torch.

Both evaluators walk the levels from the boundary to the roots (drawn in `kernels/expand.py`) and
differ in nothing but the kind of value that they carry. With V_0 read from the network, for k =
1 .. d:

    G_k(s, a) = sum_T f(T) / c(s, a) * (r + gamma (1 - done) V_{k-1}(s'))     seen pairs, else leaf
    V_k(s)    = max_a G_k(s, a)                                               rule "greedy"
              = G_k(s, argmax_a of the online network at s)                   rule "double"
              = sum_a pi(a | s) G_k(s, a)                                     rule "policy"
              = mean over all transitions of s, weighted by f                 rule "behaviour"

The paper's Equations 5 to 8 of nested and mixed Graph Backup; on trajectories, Tree Backup
(Equation 4: "greedy", "double") and n-step Q (Equation 3: "behaviour").

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
from gbcore.kernels import backup, expand
from gbcore.kernels.backup import BEHAVIOUR, DOUBLE, GREEDY, POLICY
from gbcore.kernels.expand import BAD_ACTION, FITS, Subgraphs

RULES = {"greedy": GREEDY, "double": DOUBLE, "policy": POLICY, "behaviour": BEHAVIOUR}


class PrunedSubgraphs(Subgraphs):
    """What `prune` leaves of `Subgraphs`: enough for targets of one rule and prior, and no others.

    Attributes:
        rule: as in `q_targets`.
        prior: as in `q_targets`.
    """

    rule: str
    prior: float

    @classmethod
    def of(cls, subgraphs: Subgraphs, rule: str, prior: float) -> "PrunedSubgraphs":
        """The same arrays, for this rule and prior alone."""
        pruned = cls(*subgraphs)
        pruned.rule, pruned.prior = rule, prior
        return pruned

    def _replace(self, **arrays: NDArray[Any]) -> "PrunedSubgraphs":
        return self.of(Subgraphs(*self)._replace(**arrays), self.rule, self.prior)


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
            negative or whose rows do not sum to 1, a prior out of range, or subgraphs that were
            pruned for another rule or prior, or whose indices were changed.
        TypeError: for values that are neither float32 nor float64.
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
    """As `q_targets`, for every expanded pair [P]: roots first, then level by level, the latter
    with the prior.

    Their nodes and actions are `subgraphs.pair_nodes` and `subgraphs.pair_action`. A pair met on
    several levels, or under several roots, comes several times.
    """
    leaf_q = np.ascontiguousarray(leaf_q)
    if leaf_q.dtype not in (np.float32, np.float64):
        raise TypeError(f"Require leaf_q of float32 or float64, got {leaf_q.dtype}")
    check_arguments(subgraphs, "leaf_q", leaf_q.shape, 2, gamma, rule, prior)
    best, probabilities = np.empty(0, np.int64), np.empty((0, 0), leaf_q.dtype)
    if needs_selector(rule, selector_q):
        selector_q = None if selector_q is None else np.asarray(selector_q)
        check_companion("selector_q", selector_q, leaf_q.shape)
        best = np.argmax(np.where(np.isnan(selector_q), -np.inf, selector_q), axis=1)
    if rule == "policy":
        policy = None if policy is None else np.ascontiguousarray(policy, leaf_q.dtype)
        check_companion("policy", policy, leaf_q.shape)
        probabilities = policy
        check_policy(probabilities)
    values = np.empty(len(leaf_q) + len(subgraphs.vertex_row) + 1, leaf_q.dtype)
    pair_q = np.empty(len(subgraphs.pair_action), leaf_q.dtype)
    whole = subgraphs if type(subgraphs) is Subgraphs else Subgraphs(*subgraphs)  # for Numba
    misfit = backup.back_up(
        whole, leaf_q, best, probabilities, float(gamma), RULES[rule], float(prior), values, pair_q
    )
    require_fit(misfit, subgraphs, leaf_q.shape[1])
    return pair_q


def prune(
    subgraphs: Subgraphs,
    rule: str,
    best_actions: Callable[[NDArray[np.int64]], ArrayLike] | None = None,
    prior: float = 0.0,
) -> tuple[PrunedSubgraphs, NDArray[np.bool_]]:
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
        prior: as in `q_targets`.

    Returns:
        `PrunedSubgraphs`, which targets of another rule or prior refuse. Their nodes come in the
        order in which they were asked for, those of roots never seen last; and a bool [M] of these
        nodes: is the leaf value itself read there? With "behaviour" and no prior, vertex_row is -1
        for an expanded vertex whose state is not among the nodes.

    Raises:
        ValueError: for another rule, missing best_actions, other than one action >= 0 per node, a
            prior out of range, or subgraphs that were pruned for another rule or prior.
        TypeError: for actions that are no integers.
    """
    check_prior(prior)
    check_pruned_for(subgraphs, rule, prior)
    check_indices(subgraphs, np.iinfo(np.int64).max, rule, prior)
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
    return PrunedSubgraphs.of(pruned, rule, prior), leaf_read


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
    kept = Subgraphs(
        nodes=sub.nodes[rows],
        root_nodes=sub.root_nodes,
        root_row=root_row,
        vertex_row=new_row[sub.vertex_row[vertices]],
        vertex_pairs=num_roots + np.append(0, np.cumsum(num_pairs[vertices])),
        pair_action=sub.pair_action[pairs],
        pair_count=sub.pair_count[pairs],
        outcome_pair=(np.cumsum(pair_read) - 1)[sub.outcome_pair[outcomes]],
        outcome_vertex=outcome_vertex,
        outcome_weight=sub.outcome_weight[outcomes],
        outcome_reward=sub.outcome_reward[outcomes],
        level_vertices=np.searchsorted(vertices, sub.level_vertices),
        level_pairs=np.searchsorted(pairs, sub.level_pairs),
        level_outcomes=np.searchsorted(outcomes, sub.level_outcomes),
    )
    return kept, leaf_read


def needs_selector(rule: str, selector_q: object) -> bool:
    return rule == "double" or (rule == "behaviour" and selector_q is not None)


def check_arguments(
    subgraphs: Subgraphs,
    name: str,
    shape: tuple[int, ...],
    num_axes: int,
    gamma: float,
    rule: str,
    prior: float,
) -> None:
    if rule not in RULES:
        raise ValueError(f"Require a rule of {', '.join(RULES)}; got {rule!r}")
    if len(shape) != num_axes or shape[0] != len(subgraphs.nodes):
        raise ValueError(
            f"Require {name} with {num_axes} axes and {len(subgraphs.nodes)} rows, one per node "
            f"of the subgraphs; got shape {tuple(shape)}"
        )
    if not 0 <= gamma <= 1:
        raise ValueError(f"Require 0 <= gamma <= 1, got {gamma}")
    check_prior(prior)
    check_pruned_for(subgraphs, rule, prior)


def check_prior(prior: float) -> None:
    if not 0 <= prior < np.inf:
        raise ValueError(f"Require 0 <= prior < inf, got {prior}")


def check_pruned_for(subgraphs: Subgraphs, rule: str, prior: float) -> None:
    if isinstance(subgraphs, PrunedSubgraphs):
        made_for = subgraphs.rule, subgraphs.prior
        if made_for != (rule, prior):
            raise ValueError(
                f"Require rule and prior {made_for}, for which the subgraphs were pruned; "
                f"got {(rule, prior)}"
            )


def check_indices(subgraphs: Subgraphs, num_actions: int, rule: str, prior: float) -> None:
    """Raises ValueError for subgraphs whose indices were changed."""
    least_row = -1 if rule == "behaviour" and prior == 0 else 0
    misfit = expand.find_misfit(Subgraphs(*subgraphs), num_actions, least_row)
    require_fit(misfit, subgraphs, num_actions)


def require_fit(misfit: int, subgraphs: Subgraphs, num_actions: int) -> None:
    """Raises ValueError for what `expand.find_misfit` found."""
    if misfit == BAD_ACTION:
        least, most = subgraphs.pair_action.min(), subgraphs.pair_action.max()
        raise ValueError(f"Require 0 <= action < {num_actions}, got actions {least} to {most}")
    if misfit != FITS:
        raise ValueError("Require subgraphs as they were made, got an index out of place")


def check_policy(policy: NDArray[Any]) -> None:
    sums = policy.sum(axis=1)
    wrong = np.flatnonzero(~((policy >= 0).all(axis=1) & (np.abs(sums - 1) <= 1e-3)))
    if len(wrong):
        row = wrong[0]
        raise ValueError(
            f"Require a policy >= 0 whose rows sum to 1, got {policy[row]} in row {row}"
        )


def check_companion(name: str, values: Any, shape: tuple[int, ...]) -> None:
    if values is None:
        raise ValueError(f"Require {name} for this rule, got None")
    if tuple(values.shape) != tuple(shape):
        raise ValueError(f"Require {name} of shape {shape}, got {tuple(values.shape)}")
