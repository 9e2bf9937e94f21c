"""Measures of a transition graph: how often trajectories cross, and whether it can be Markovian."""

import numpy as np

from gbcore import q_targets, trajectory_subgraphs
from gbtools import recorded

GAMMA = 0.99  # of the targets compared
PERMUTATIONS = 200


def crossovers(graph):
    """What a graph is like, and how trajectories cross in it: a dict of numbers and shares.

    crossed: states with several predecessors; a state is no predecessor of itself. Of all
    transitions counted, self_loops lead back to their own state.
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
        "rewarded": float(share[edges["reward"] != 0].sum()),
        "crossed": float(crossed.sum() / graph.num_nodes),
        "self_loops": float(share[loop].sum()),
    }


def levels_change(replay):
    """Do ten episodes or more begin in states of their own, and hardly ever meet those of others?

    False, too, where they hardly ever meet their own again. replay: columns, the oldest row first.
    """
    over = replay["terminated"] | replay["cut"]
    begins, episode = np.append(True, over[:-1]), np.append(0, np.cumsum(over)[:-1])
    starts = replay["node"][begins]
    visits = np.append(episode[begins], episode), np.append(starts, replay["next_node"])
    met = np.unique(np.stack(visits), axis=1)  # pairs of an episode and a state
    is_apart = (np.unique(starts, return_counts=True)[1] == 1).sum() >= max(10, 0.9 * len(starts))
    again = 1 - (met.shape[1] - len(starts)) / len(episode)
    return bool(is_apart and again >= 0.2 and len(np.unique(met[1])) > 0.9 * met.shape[1])


def target_changes(graph, replay, depth, breadth, rng, num_rows=2_000):
    """How graph targets differ from tree targets of the same rows, drawn with replacement: a dict.

    unlike_tree: share of rows whose two subgraphs differ under the uniform policy with random leaf
    values, where every outcome has its weight in the result. missed: share of rows whose greedy
    graph target is higher where all leaf values are 0: by rewards that tree backup does not see.
    """
    rows = rng.integers(len(replay["node"]), size=num_rows)
    noise = rng.standard_normal((graph.num_ids, graph.num_actions))
    uniform = np.full(noise.shape, 1 / graph.num_actions)
    columns = [replay[name] for name in recorded.COLUMNS]

    def targets(sub):
        leaf_q = noise[sub.nodes]
        read = q_targets(sub, leaf_q, GAMMA, "policy", policy=uniform[sub.nodes])
        return np.stack([read, q_targets(sub, np.zeros_like(leaf_q), GAMMA)])

    of_tree = targets(trajectory_subgraphs(rows, depth, *columns))
    roots = replay["node"][rows], replay["action"][rows]
    gaps = targets(graph.expand(*roots, depth, breadth, rng)) - of_tree
    gaps[0] = abs(gaps[0])
    unlike, missed = (gaps > 1e-9 * np.maximum(1.0, abs(of_tree))).mean(axis=1).tolist()
    return {"unlike_tree": unlike, "missed": missed}


def markov_violation(replay, rng):
    """Does the past help to tell what a pair (s, a) leads to? It does not where states are Markov.

    Mutual information, given the pair, between the (state, action) before and the outcome (reward,
    next state, terminated), beside that of outcomes permuted within each pair. Of rows that arrive
    from another state: how often a state loops ends its own rows.

    Returns:
        judged: share of the replay's rows of pairs that came again: where it is low, nothing is
        said; explained: share of the outcomes' entropy that the past explains beyond chance; p:
        share of permutations that explain as much. Where no pair has several outcomes, 0 and 1.
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
    judged = float((np.bincount(pair)[pair] > 1).sum() / len(replay["node"]))
    outcomes_of_pair = np.bincount(np.unique(np.stack([pair, outcome], 1), axis=0)[:, 0])
    kept = np.flatnonzero(outcomes_of_pair[pair] > 1)
    if not len(kept):
        return {"judged": judged, "explained": 0.0, "p": 1.0}
    kept = kept[np.argsort(pair[kept], kind="stable")]
    pair, outcome = pair[kept], outcome[kept]
    past = code(pair, past[kept])
    uncertainty = entropy(outcome) - entropy(pair)  # H(outcome | pair) * rows

    def information(outcome):
        return uncertainty - (entropy(code(past, outcome)) - entropy(past))

    observed = information(outcome)
    draws = (np.lexsort((rng.random(len(pair)), pair)) for _ in range(PERMUTATIONS))
    chance = np.array([information(outcome[order]) for order in draws])
    explained = float((observed - chance.mean()) / uncertainty)
    p = float((1 + (chance >= observed - 1e-9).sum()) / (1 + PERMUTATIONS))
    return {"judged": judged, "explained": explained, "p": p}
