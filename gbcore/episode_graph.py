"""EpisodeGraph: acts on values of a graph that holds nothing but the episode under way."""

import hashlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gbcore.first_tries import FirstTries, cell_contents
from gbcore.frontier import UNLIMITED
from gbcore.graph import TransitionGraph
from gbcore.targets import greedy_actions
from gbcore.values import GraphValues, LeafTable

DOUBT = 0.15  # share of its value that an action loses where no first try of it gained anything


class EpisodeGraph:
    """Greedy on `GraphValues` over the transitions of the episode under way.

    A network that meets a level for the first time is wrong somewhere, and a greedy agent that is
    stuck stays stuck. Here each step adds its transition to a graph, with the network's values at
    its edge, and values are backed up until they hold:

        V(s) = max over ALL actions of Q(s, a), Q of a tried pair from the graph, else the network's

    So a way that led nowhere loses its value, and the next best guess is tried (real-time dynamic
    programming, Barto et al. 1995). Nothing of training is needed but the network. With the
    `FirstTries` of training, an action that was seldom worth a try in other levels, by w(s, a), is
    tried later:

        Q(s, a) = q(s, a) (1 - DOUBT (1 - w(s, a)))         of an untried pair with q(s, a) > 0

    The network's value of an action that they know to change nothing counts as 0 at most.

        episode = EpisodeGraph(values, num_actions=7, gamma=0.95)
        action = episode.act(obs[None])[0]
        next_obs, reward, terminated, truncated, _ = env.step(action)
        episode.observe([action], [reward], next_obs[None], [terminated], [terminated or truncated])

    Several episodes at once share network calls and no state. An episode's transitions are dropped
    at its end, which `observe` has to be told.

    Args:
        evaluate: function of observations [n, *obs_shape] that returns float32 [n, A].
        num_actions: A, the number of discrete actions.
        gamma: the discount, in [0, 1).
        prior: observations that the network's value of a tried pair counts as.
        first_tries: of training, for observations that are grids.
    """

    def __init__(
        self,
        evaluate: Callable[[NDArray[Any]], NDArray[np.float32]],
        num_actions: int,
        gamma: float,
        prior: float = 0.0,
        first_tries: FirstTries | None = None,
    ) -> None:
        self.evaluate, self.first_tries = evaluate, first_tries
        self.num_actions, self.gamma, self.prior = num_actions, gamma, prior
        self.values: GraphValues | None = None  # made at the first observation, which has a shape
        self._rows: dict[int, list[tuple[int, int, float, int, bool]]] = {}  # of an episode
        self._node: dict[int, int] = {}  # where an episode is
        self._first: dict[int, NDArray[np.uint64]] = {}  # contents of its first grid

    def act(self, obs: NDArray[Any], episodes: ArrayLike | None = None) -> NDArray[np.int64]:
        """Greedy actions int64 [n] for observations [n, *obs_shape] of n episodes.

        episodes: their numbers int64 [n], 0 to n - 1 if None.
        """
        episodes, nodes = self._nodes(obs, episodes)
        for episode, node, one in zip(episodes, nodes.tolist(), obs, strict=True):
            if episode not in self._rows and self.first_tries is not None and one.ndim > 1:
                self._first[episode] = cell_contents(one)
            self._node[episode] = node
        self.values.update(budget=UNLIMITED)
        actions = self.values.actions(nodes)
        untried = actions < 0
        if untried.any():
            actions[untried] = greedy_actions(self.values.leaves.values(nodes[untried]))
        return actions

    def observe(
        self, actions: ArrayLike, rewards: ArrayLike, next_obs: NDArray[Any],
        terminated: ArrayLike, over: ArrayLike, episodes: ArrayLike | None = None,
    ) -> None:  # fmt: skip
        """The actions [n] were made where `act` was asked, and led to next_obs [n, *obs_shape].

        over: bool [n], terminated or truncated; such an episode is forgotten.
        """
        if self.values is None:
            raise ValueError("Require `act` before `observe` (OwnGraph: `predict` before `step`)")
        graph, leaves = self.values.graph, self.values.leaves
        episodes, nodes = self._nodes(next_obs, episodes)
        nodes = nodes.tolist()
        rows = zip(episodes, actions, rewards, nodes, terminated, over, next_obs, strict=True)
        for episode, action, reward, next_node, is_end, is_over, one in rows:
            row = self._node[episode], int(action), float(reward), next_node, bool(is_end)
            if episode in self._first and not (is_over or leaves.knows(np.array([next_node]))[0]):
                obs = graph.observations_of(row[0])
                _, contexts = self.first_tries.contexts_after(self._first[episode], obs, one)
                leaves.worths[next_node] = self.first_tries.worths(contexts)
            graph.add(*row)
            self._rows.setdefault(episode, []).append(row)
            if is_over:
                graph.remove(*map(np.array, zip(*self._rows.pop(episode), strict=True)))
                self._first.pop(episode, None)

    def _nodes(self, obs, episodes):
        """Numbers of episodes, and ids [n] of observations, which these tell apart."""
        obs = np.ascontiguousarray(obs)
        episodes = np.array(np.arange(len(obs)) if episodes is None else episodes, np.int64)
        numbers = episodes.reshape(-1, 1).view(np.uint8)
        keys = np.concatenate([numbers, obs.reshape(len(obs), -1).view(np.uint8)], axis=1)
        if self.values is None:
            graph = TransitionGraph(
                self.num_actions, obs.shape[1:], obs.dtype, key_shape=keys.shape[1:]
            )
            leaves = DoubtfulLeaves(graph, self.evaluate, first_tries=self.first_tries)
            self.values = GraphValues(graph, leaves, self.gamma, self.prior)
        return episodes.tolist(), self.values.graph.nodes(obs, keys)


class DoubtfulLeaves(LeafTable):
    """Leaf values, of which those above 0 lose a share for doubt.

    They stay above 0. So what is doubted is tried in the end: a way round and round comes to 0.
    `worths` has w(s, a) float64 [A] by node until the node is evaluated, 1 of others.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.worths: dict[int, NDArray[np.float64]] = {}

    def _keep(self, nodes, chunk):
        super()._keep(nodes, chunk)
        for node in nodes.tolist():
            if node in self.worths:
                q, worths = self.q[node], self.worths.pop(node)
                q *= np.where(q > 0, 1 - DOUBT * (1 - worths), 1)


def is_held_out(level: Any) -> bool:
    """Is a level of the fifth that only evaluations play? By a hash of its bytes, or its repr.

    Raises ValueError for a set, or an object without a repr of its own: in the next process they
    have another one.
    """
    parts = [level]
    for part in parts:
        if isinstance(part, (tuple, list, dict)):
            parts += part.items() if isinstance(part, dict) else part
        if isinstance(part, (set, frozenset)) or type(part).__repr__ is object.__repr__:
            raise ValueError(f"Require a level with a repr that is always the same, got {part!r}")
    with np.printoptions(threshold=sys.maxsize):  # else of a large array the corners alone
        name = level if isinstance(level, bytes) else repr(level).encode()
    return hashlib.blake2b(name, digest_size=1).digest()[0] % 5 == 0
