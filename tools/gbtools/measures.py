"""Measures of a transition graph: how often trajectories cross, and whether it can be Markovian."""

import numpy as np

from gbcore import q_targets, trajectory_subgraphs
from gbtools import recorded


def crossovers(graph):
    """What a graph is like, and how trajectories cross in it: a dict of numbers and shares.

    acted_in: states that something was done in. crossed: states with more than one predecessor; a
    state is no predecessor of itself. Of all transitions counted, rewarded are those with a reward,
    and self_loops those that lead back to their own state.
    """
    edges = graph.edges()
    loop, share = edges["source"] == edges["next"], edges["count"] / graph.num_transitions
    pairs = np.unique(np.stack([edges["source"], edges["next"]])[:, ~loop], axis=1)
    crossed = np.bincount(pairs[1], minlength=1) > 1
    return {
        "states": graph.num_nodes,
        "acted_in": len(np.unique(edges["source"])),
        "transitions": graph.num_transitions,
        "novel_state_ratio": graph.novel_state_ratio,
        "real_numbers": graph.obs_dtype.kind == "f",
        "rewarded": float(share[edges["reward"] != 0].sum()),
        "crossed": float(crossed.sum() / graph.num_nodes),
        "self_loops": float(share[loop].sum()),
    }


def recurrence(replay):
    """Do episodes share a level? How often states come again, in one and in others: a dict.

    replay: columns of rows, the oldest first. starts: share of the episodes that begin where no
    other one does. within: share of the steps that lead to a state of the same episode. across:
    share of an episode's states that an earlier episode met.
    """
    over = replay["terminated"] | replay["cut"]
    begins, episode = np.append(True, over[:-1]), np.append(0, np.cumsum(over)[:-1])
    starts = replay["node"][begins]
    visits = np.append(episode[begins], episode), np.append(starts, replay["next_node"])
    met = np.unique(np.stack(visits), axis=1)  # pairs of an episode and a state
    return {
        "episodes": len(starts),
        "starts": (np.unique(starts, return_counts=True)[1] == 1).sum() / len(starts),
        "within": 1 - (met.shape[1] - len(starts)) / len(episode),
        "across": 1 - len(np.unique(met[1])) / met.shape[1],
    }


def target_changes(graph, replay, depth, breadth, gamma, rng, num_rows=2_000):
    """How graph targets differ from tree targets of the same rows: a dict.

    num_rows rows, drawn with replacement, are backed up over their own trajectory (tree backup) and
    over the graph. read: share of rows whose two subgraphs differ in what a target reads: both are
    evaluated under the uniform policy with random leaf values and rewards kept, where every outcome
    has its weight in the result. value: share of rows whose greedy targets differ, with the same
    leaf values. zero: share of rows whose greedy graph target is the higher one where all leaf
    values are 0, that is, by rewards that tree backup does not see. mean_size, max_size:
    transitions of a row's subgraph.
    """
    rows = rng.integers(len(replay["node"]), size=num_rows)
    noise = rng.standard_normal((graph.num_ids, graph.num_actions))
    uniform = np.full(noise.shape, 1 / graph.num_actions)
    columns = [replay[name] for name in recorded.COLUMNS]

    def targets(sub):
        leaf_q, policy = noise[sub.nodes], uniform[sub.nodes]
        read = q_targets(sub, leaf_q, gamma, "policy", policy=policy)
        zero = q_targets(sub, np.zeros_like(leaf_q), gamma)
        return np.concatenate([read, q_targets(sub, leaf_q, gamma), zero])

    sizes, changes = [], []
    for row in np.split(rows, num_rows):
        local = graph.expand(replay["node"][row], replay["action"][row], depth, breadth, rng)
        of_tree = targets(trajectory_subgraphs(row, depth, *columns))
        gaps = targets(local) - of_tree
        gaps[:2] = abs(gaps[:2])
        changes.append(gaps > 1e-9 * np.maximum(1.0, abs(of_tree)))
        sizes.append(len(local.outcome_pair))
    result = dict(zip(("read", "value", "zero"), np.mean(changes, axis=0).tolist(), strict=True))
    return result | {"mean_size": float(np.mean(sizes)), "max_size": max(sizes)}


def markov_violation(replay, rng, num_permutations=200):
    """Does the past help to tell what a pair (s, a) leads to? It does not where states are Markov.

    Rows that arrive from another state (how often a state loops ends its own rows, so that rows
    after a loop are no fair sample), of pairs seen at least twice, each with the row before it. The
    statistic is the mutual information, given the pair, between that row's (state, action) and the
    outcome (reward, next state, terminated); it is compared with permutations of the outcomes
    within each pair, which change nothing if the pair alone decides the law of its outcome.

    Returns:
        judged: share of the replay's rows that are of such pairs: where it is low, nothing is said;
        explained: share of the outcomes' entropy that the past explains beyond chance; p: share of
        permutations that explain as much. Both are None where no pair has several outcomes.
    """
    moved = replay["node"][1:] != replay["node"][:-1]
    follows = np.flatnonzero(~replay["cut"][:-1] & moved) + 1

    def code(*columns):
        return np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)[1].reshape(-1)

    def entropy(labels):
        """Sum over rows of -log of the label's count: entropies, up to what all cases share."""
        return -np.log(np.bincount(labels)[labels]).sum()

    pair = code(replay["node"], replay["action"])
    reward = np.unique(replay["reward"], return_inverse=True)[1]
    outcome = code(pair, reward, replay["next_node"], replay["terminated"].astype(np.int64))
    pair, past, outcome = pair[follows], pair[follows - 1], outcome[follows]
    outcomes_of_pair = np.bincount(np.unique(np.stack([pair, outcome], 1), axis=0)[:, 0])
    kept = np.flatnonzero(outcomes_of_pair[pair] > 1)
    judged = {"judged": float((np.bincount(pair)[pair] > 1).sum() / len(replay["node"]))}
    if not len(kept):
        return judged | {"explained": None, "p": None}
    kept = kept[np.argsort(pair[kept], kind="stable")]
    pair, outcome = pair[kept], outcome[kept]
    past = code(pair, past[kept])
    uncertainty = entropy(outcome) - entropy(pair)  # H(outcome | pair) * rows

    def information(outcome):
        return uncertainty - (entropy(code(past, outcome)) - entropy(past))

    observed = information(outcome)
    draws = (np.lexsort((rng.random(len(pair)), pair)) for _ in range(num_permutations))
    chance = np.array([information(outcome[order]) for order in draws])
    return judged | {
        "explained": float((observed - chance.mean()) / uncertainty),
        "p": float((1 + (chance >= observed - 1e-9).sum()) / (1 + num_permutations)),
    }
