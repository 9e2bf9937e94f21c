"""GraphDQN: Stable-Baselines3's DQN with Graph Backup's targets (pip install '.[sb3]').

    from gbcore.sb3 import GraphDQN

    model = GraphDQN("MlpPolicy", "CartPole-v1", key=lambda obs: np.rint(10 * obs).astype(int))
    model.learn(20_000)

GraphReplayBuffer keeps its transitions in a graph as well, and GraphDQN's batches come with targets
from there. Policies, callbacks, logging and vector environments are those of Stable-Baselines3.
"""

import copy
import hashlib
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any, Literal

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.wrappers import NormalizeObservation
from numpy.typing import NDArray
from stable_baselines3 import DQN
from stable_baselines3.common.buffers import ReplayBuffer, ReplayBufferSamples
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper, unwrap_vec_normalize

from gbcore.episode_graph import EpisodeGraph, is_held_out
from gbcore.graph import MAX_DEPTH, TransitionGraph
from gbcore.targets import greedy_actions, q_targets
from gbcore.values import GraphValues, LeafTable, in_evaluation

Key = Callable[[NDArray[Any]], NDArray[Any]]
ROWS_AT_ONCE = 1_000  # rows that a graph is rebuilt from at a time


class GraphReplayBuffer(ReplayBuffer):
    """A replay whose rows are the transitions of a graph.

    Args:
        args, kwargs: those of ReplayBuffer, without optimize_memory_usage.
        key: function of observations [n, *obs_shape] that returns an array [n, ...]: observations
            with like keys are one state. By default the observation is its key.
    """

    graph: TransitionGraph
    nodes: NDArray[np.int64]  # [2, rows, environments], each row's states before and after
    num_added: int = 0  # rows ever, overwritten ones included
    rng: np.random.Generator
    key: Key | None
    # GraphDQN's, while it trains: (nodes int64 [B], actions int64 [B], rng) -> float32 [B]
    targets: Callable[..., NDArray[Any]] | None

    def __init__(self, *args: Any, key: Key | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.optimize_memory_usage:
            raise ValueError(
                "Require optimize_memory_usage=False: a graph has both states of a row"
            )
        self.key, self.targets = key, None
        self.graph = self._empty_graph()
        self.nodes = np.zeros((2, self.buffer_size, self.n_envs), np.int64)
        self.rng = np.random.default_rng(torch.randint(2**31, ()).item())  # DQN's seed decides

    def _empty_graph(self):
        obs, kind = self.observations[0], {}
        if self.key is not None:
            like = np.asarray(self.key(obs))
            kind = {"key_shape": like.shape[1:], "key_dtype": like.dtype}
        return TransitionGraph(self.action_space.n, self.obs_shape, obs.dtype, **kind)

    def reset(self) -> None:
        """As ReplayBuffer.reset."""
        super().reset()
        self.graph = self._empty_graph()

    def rebuild(self, key: Key | None) -> None:
        """Make the graph anew from the rows, the oldest first, with another key."""
        self.key = key
        self.graph = graph = self._empty_graph()
        order = np.roll(np.arange(self.size()), -self.pos if self.full else 0)
        for rows in filter(len, np.array_split(order, len(order) // ROWS_AT_ONCE + 1)):
            seen = np.stack([self.observations[rows], self.next_observations[rows]], axis=1)
            seen = seen.reshape(-1, *self.obs_shape)  # in order of time, as ids are given
            nodes = graph.nodes(seen, self.keys_of(seen)).reshape(len(rows), 2, self.n_envs)
            self.nodes[:, rows] = nodes.swapaxes(0, 1)
            graph.add(*(column.reshape(-1) for column in self._transitions(rows)))

    def add(self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, infos: Any) -> None:
        """As ReplayBuffer.add. Where it raises, as a key may, the row stays as it was."""
        row, full = self.pos, self.full
        overwritten = self._transitions(row) if full else None
        parts = (self.observations, self.next_observations, self.actions, self.rewards, self.dones)
        views = [part[row] for part in (*parts, self.timeouts, self.nodes.swapaxes(0, 1))]
        before = [view.copy() for view in views]
        try:
            super().add(obs, next_obs, action, reward, done, infos)
            for column, seen in enumerate(views[:2]):
                self.nodes[column, row] = self.graph.nodes(seen, self.keys_of(seen))
            self.graph.add(*self._transitions(row))
        except BaseException:
            self.pos, self.full = row, full
            for view, old in zip(views, before, strict=True):
                view[...] = old
            raise
        if overwritten is not None:  # last: this may free nodes, and their ids
            self.graph.remove(*overwritten)
        self.num_added += 1

    def __getstate__(self) -> dict[str, Any]:
        """Without the model's own: pickle takes no function that was written in place."""
        return self.__dict__ | {"key": None, "targets": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> "GraphReplayBuffer":
        new = memo[id(self)] = type(self).__new__(type(self))
        new.__dict__ |= copy.deepcopy(self.__dict__ | {"targets": None}, memo)
        return new

    def keys_of(self, obs: NDArray[Any]) -> NDArray[Any] | None:
        """Keys [n, ...] of observations [n, *obs_shape], if states have any."""
        return None if self.key is None else np.asarray(self.key(obs))

    def _transitions(self, row):
        """A row of each environment, as TransitionGraph.add and remove take it."""
        terminated = (self.dones[row] > 0) & (self.timeouts[row] == 0)
        actions = self.actions[row, ..., 0]
        columns = self.nodes[0, row], actions, self.rewards[row], self.nodes[1, row]
        return [np.array(column) for column in (*columns, terminated)]

    def _get_samples(self, batch_inds, env=None) -> ReplayBufferSamples:
        """A batch whose rewards are the targets; their episodes are over: DQN adds nothing."""
        if self.targets is None:
            raise ValueError("Require a GraphDQN that trains: its values are in the targets")
        envs = self.rng.integers(self.n_envs, size=len(batch_inds))
        nodes, actions = self.nodes[0, batch_inds, envs], self.actions[batch_inds, envs]
        targets = self.to_torch(self.targets(nodes, actions[:, 0], self.rng)[:, None])
        obs, over = self.to_torch(self.observations[batch_inds, envs]), torch.ones_like(targets)
        return ReplayBufferSamples(obs, self.to_torch(actions), obs, over, targets)


class GraphDQN(DQN):
    """DQN whose targets are nested backups over the graph of its replay.

    With whole-graph it trains and acts on `GraphValues`, and predictions that are deterministic, as
    those of an evaluation, on tried actions alone. These actions are saved with the model. To learn
    on from the same graph, load the replay buffer as well.

    Args:
        policy, env, args, kwargs: those of DQN, without n_steps and optimize_memory_usage.
        backup: graph, or whole-graph, which has no limit of depth and needs gamma < 1.
        depth: nested backups per target of graph.
        breadth: transitions followed per level of graph; 0 = all.
        prior: the network's value counts as so many observations of a nested pair.
        key: as GraphReplayBuffer's.

    Raises ValueError for VecNormalize, under which a state's observation changes, for Dict
    observations, for actions that do not begin at 0, for another replay buffer than
    GraphReplayBuffer, and for numbers out of their range.
    """

    backup: Literal["graph", "whole-graph"]
    depth: int
    breadth: int
    prior: float
    key: Key | None
    replay_buffer_class: type[ReplayBuffer] | None
    replay_buffer_kwargs: dict[str, Any]
    leaves: LeafTable | None = None  # values of the graph's states by the target network
    graph_values: GraphValues | None = None  # with whole-graph
    _made_of: tuple[Any, ...] = ()  # the buffer and network of these two
    _seen: tuple[Any, Any] = None, None  # changes that it knows, policy on tried actions
    _actions: dict[str, int]  # of the saved model, by digest of a state's key

    def __init__(
        self,
        policy: Any,
        env: Any,
        *args: Any,
        backup: Literal["graph", "whole-graph"] = "graph",
        depth: int = 5,
        breadth: int = 20,
        prior: float = 0.0,
        key: Key | None = None,
        **kwargs: Any,
    ):
        self.backup, self.depth, self.breadth = backup, depth, breadth
        self.prior, self.key, self._actions = prior, key, {}
        super().__init__(policy, env, *args, **kwargs)

    def _setup_model(self) -> None:
        self._require_usable()
        if self.replay_buffer_class is None:
            self.replay_buffer_class = GraphReplayBuffer
        if self.key is None:
            self.key = self.replay_buffer_kwargs.get("key")
        self.replay_buffer_kwargs = self.replay_buffer_kwargs | {"key": self.key}
        super()._setup_model()

    def _setup_learn(self, *args, **kwargs):
        self._require_usable()  # the replay may have been set since
        return super()._setup_learn(*args, **kwargs)

    @staticmethod
    def _wrap_env(env, *args, **kwargs):  # of the constructor, set_env and load
        env = DQN._wrap_env(env, *args, **kwargs)
        if unwrap_vec_normalize(env) or any(env.env_is_wrapped(NormalizeObservation)):
            raise ValueError(
                "Require an environment without VecNormalize and NormalizeObservation: one state, "
                "one observation"
            )
        if isinstance(env.observation_space, spaces.Dict):
            raise ValueError(
                f"Require observations that are arrays, got {env.observation_space}: wrap the "
                "environment in gymnasium.wrappers.FlattenObservation"
            )
        if getattr(env.action_space, "start", 0) != 0:
            raise ValueError(f"Require actions that begin at 0, got {env.action_space}")
        return env

    def _require_usable(self):
        depth, breadth, prior, gamma = self.depth, self.breadth, self.prior, self.gamma
        is_depth = isinstance(depth, Integral) and 1 <= depth <= MAX_DEPTH
        is_breadth = isinstance(breadth, Integral) and breadth >= 0
        is_discount = isinstance(gamma, Real) and 0 <= gamma <= 1
        is_limit = gamma != 1 or self.backup != "whole-graph"
        n_steps = getattr(self, "n_steps", 1)
        for holds, wanted, found in (
            (is_depth, f"an integer depth from 1 to {MAX_DEPTH}", depth),
            (is_breadth, "an integer breadth from 0 on", breadth),
            (isinstance(prior, Real) and 0 <= prior < np.inf, "a finite prior >= 0", prior),
            (is_discount, "0 <= gamma <= 1", gamma),
            (is_limit, "0 <= gamma < 1 for whole-graph", gamma),
            (self.key is None or callable(self.key), "a key that is a function", self.key),
            (not self.optimize_memory_usage, "optimize_memory_usage=False", True),
            (n_steps == 1, "n_steps=1, as depth says how far it looks", n_steps),
            (self.backup in ("graph", "whole-graph"), "backup graph or whole-graph", self.backup),
        ):
            if not holds:
                raise ValueError(f"Require {wanted}, got {found!r}")
        kinds = self.replay_buffer_class, type(self.replay_buffer)
        for kind in set(kinds) - {None, type(None)}:
            if not issubclass(kind, GraphReplayBuffer):
                raise ValueError(f"Require a GraphReplayBuffer, got {kind.__name__}")
        if self.replay_buffer is not None:
            for name in ("observation_space", "action_space", "n_envs"):
                own, found = (getattr(of, name) for of in (self, self.replay_buffer))
                if own != found:
                    raise ValueError(f"Require a replay buffer of {name} {own}, got {found}")

    def load_replay_buffer(self, *args: Any, **kwargs: Any) -> None:
        """As DQN.load_replay_buffer; the graph is made anew of its rows, with this model's key.

        Raises ValueError for another kind of replay buffer, or one of another task.
        """
        super().load_replay_buffer(*args, **kwargs)
        self._require_usable()
        self.replay_buffer.rebuild(self.key)

    def set_random_seed(self, seed: int | None = None) -> None:
        """As DQN's, but environments of neighbouring seeds have no stream in common.

        Stable-Baselines3 seeds environment i with seed + i: with four of them, seeds 1 and 2 would
        share three.
        """
        super().set_random_seed(seed)
        if seed is not None and self.env is not None:
            self.env.seed(int(np.random.SeedSequence(seed).generate_state(1)[0]) >> 1)

    def train(self, gradient_steps: int, batch_size: int = 100) -> None:
        """As DQN.train."""
        self._follow_replay()
        self.replay_buffer.targets = self._targets
        super().train(gradient_steps, batch_size)

    def _follow_replay(self):
        """Leaf values and, with whole-graph, values of the graph of the replay that is there."""
        if self.replay_buffer.key is not self.key:  # either may have been set since
            self.replay_buffer.rebuild(self.key)
        graph = self.replay_buffer.graph
        made_of = graph, self.backup, self.gamma, self.prior, self.q_net_target
        if self.leaves is None or self._made_of != made_of:
            self._made_of, self.graph_values = made_of, None
            self.leaves = LeafTable(graph, self._leaf_values, self.q_net_target)
            if self.backup == "whole-graph":
                self.graph_values = GraphValues(graph, self.leaves, self.gamma, self.prior)

    def _leaf_values(self, obs):
        return self._values_of(self.q_net_target, obs)

    def _act_on_network(self, obs):
        return greedy_actions(self._values_of(self.q_net, obs))

    def _act_as_saved(self, obs):
        """As the model that was loaded did, else as the network says."""
        actions = self._act_on_network(obs)
        if self._actions:
            found = (self._actions.get(name, -1) for name in self._names_of(obs))
            saved = np.fromiter(found, np.int64, len(obs))
            actions = np.where(saved < 0, actions, saved)
        return actions

    def _names_of(self, obs):
        """Digests of the keys of observations [n, *obs_shape]."""
        keys = obs if self.key is None else np.asarray(self.key(obs))
        keys = np.ascontiguousarray(keys)
        return [hashlib.blake2b(one.tobytes(), digest_size=16).hexdigest() for one in keys]

    @torch.no_grad()
    def _values_of(self, network, obs):
        with in_evaluation(network):
            return network(torch.as_tensor(obs, device=self.device)).cpu().numpy()

    def _targets(self, nodes, actions, rng):
        if self.graph_values is not None:
            self.graph_values.update()
            return self.graph_values.targets(nodes, actions)
        subgraphs = self.leaves.graph.expand(nodes, actions, self.depth, self.breadth, rng)
        leaf_q = self.leaves.values(subgraphs.nodes)
        return q_targets(subgraphs, leaf_q, self.gamma, prior=self.prior)

    def predict(
        self,
        observation: Any,
        state: Any = None,
        episode_start: NDArray[Any] | None = None,
        deterministic: bool = False,
    ) -> tuple[NDArray[Any], Any]:
        """As DQN.predict; with whole-graph on its values, where the state is known."""
        if self.backup != "whole-graph" or self.replay_buffer is None:
            return super().predict(observation, state, episode_start, deterministic)
        if isinstance(observation, tuple | dict):  # such as the pair of Gymnasium's reset
            self.policy.predict(observation)  # raises DQN's own errors
        self._follow_replay()
        found, is_many = self.policy.obs_to_tensor(observation)
        like = self.replay_buffer.observations
        obs = found.cpu().numpy().astype(like.dtype).reshape(-1, *like.shape[2:])
        keys = self.replay_buffer.keys_of(obs)
        if deterministic:
            actions = self._seen_policy()(obs, keys)
        else:
            actions = self.graph_values.act(obs, self._act_on_network, keys)
            explore = self.replay_buffer.rng.random(len(obs)) < self.exploration_rate
            actions[explore] = [self.action_space.sample() for _ in range(explore.sum())]
        return (actions if is_many else actions.squeeze(axis=0)), state

    def _seen_policy(self):
        """The policy on tried actions, of the graph and the network as they are."""
        self.leaves.knows(np.zeros(0, np.int64))  # looks whether the network is the same
        changes = self.replay_buffer.num_added, self.leaves.num_forgotten
        now = *changes, id(self.graph_values)  # a copy has others
        if self._seen[0] != now:
            self._seen = now, self.graph_values.seen_policy(self._act_as_saved)
        return self._seen[1]

    def save(self, *args: Any, **kwargs: Any) -> None:
        """As DQN.save; with whole-graph also the greedy tried actions, for `predict`."""
        loaded = self._actions
        if self.backup == "whole-graph" and self.replay_buffer is not None:
            self._follow_replay()
            graph, actions = self.replay_buffer.graph, dict(loaded)
            policy, acted_in = self._seen_policy(), np.unique(graph.edges()["source"])
            for nodes in np.array_split(acted_in, len(acted_in) // ROWS_AT_ONCE + 1):
                obs = graph.observations_of(nodes)
                found = policy(obs, self.replay_buffer.keys_of(obs))
                actions |= dict(zip(self._names_of(obs), found.tolist(), strict=True))
            self._actions = actions
        try:
            super().save(*args, **kwargs)
        finally:
            self._actions = loaded  # its own graph tells it more

    def collect_rollouts(self, *args: Any, **kwargs: Any) -> Any:
        """As DQN.collect_rollouts; after a callback's stop a new episode begins."""
        rollout = super().collect_rollouts(*args, **kwargs)
        if not rollout.continue_training:  # DQN has lost the last step
            self._last_obs = None
        return rollout

    def _on_step(self) -> None:
        super()._on_step()
        interval = max(self.target_update_interval // self.n_envs, 1)
        if self.leaves is not None and self._n_calls % interval == 0:  # another target network
            (self.graph_values.renew if self.graph_values else self.leaves.forget_all)()

    def set_parameters(self, *args: Any, **kwargs: Any) -> None:
        """As DQN.set_parameters."""
        super().set_parameters(*args, **kwargs)
        self.leaves = self.graph_values = None

    def _excluded_save_params(self) -> list[str]:
        return [*super()._excluded_save_params(), "leaves", "graph_values", "_made_of", "_seen"]


class Levels(gymnasium.Wrapper):
    """An environment that names its levels in `info["level"]` of reset: those of one kind.

    held_out: the fifth that only evaluations play, in place of the others?
    """

    def __init__(self, env: gymnasium.Env[Any, Any], held_out: bool):
        super().__init__(env)
        self.held_out = held_out

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """As the environment's, drawn again until the level is of this kind.

        Raises ValueError where 1,000 levels are not, KeyError where none is named.
        """
        for _ in range(1_000):
            obs, info = super().reset(**kwargs)
            if is_held_out(info["level"]) == self.held_out:
                return obs, info
            kwargs["seed"] = None
        raise ValueError(f"Require levels with held_out={self.held_out}, got none in 1,000")


class OwnGraph(VecEnvWrapper):
    """Plays with the Q network of a DQN on a graph of each episode under way (`EpisodeGraph`).

        own = OwnGraph(make_vec_env(make_held_out_level, 20), model)
        mean, deviation = evaluate_policy(own, own, n_eval_episodes=100)

    Its `predict` answers for the observation that reset or step has just returned. The model is a
    DQN or GraphDQN, whose gamma counts.
    """

    def __init__(self, venv: VecEnv, model: DQN):
        super().__init__(venv)
        self.model = model
        self.reset()

    def reset(self) -> Any:
        """First observations; unfinished episodes are forgotten."""
        self._graph = EpisodeGraph(self._values, self.action_space.n, self.model.gamma)
        return self.venv.reset()

    @torch.no_grad()
    def _values(self, obs):
        with in_evaluation(self.model.q_net):
            return self.model.q_net(self.model.policy.obs_to_tensor(obs)[0]).cpu().numpy()

    def predict(
        self, observation: Any, state: Any = None, episode_start: Any = None,
        deterministic: bool = True,
    ) -> tuple[NDArray[Any], Any]:  # fmt: skip
        """Greedy actions int64 [n], and state as it came."""
        return self._graph.act(observation), state

    def step_async(self, actions: NDArray[Any]) -> None:
        """As VecEnv's."""
        self._actions = np.array(actions)
        self.venv.step_async(actions)

    def step_wait(self) -> Any:
        """As VecEnv's; the graph gets the transitions."""
        obs, rewards, dones, infos = self.venv.step_wait()
        after, terminated = obs.copy(), dones.copy()
        for i in np.flatnonzero(dones):
            after[i] = infos[i]["terminal_observation"]
            terminated[i] = not infos[i].get("TimeLimit.truncated", False)
        self._graph.observe(self._actions, rewards, after, terminated, dones)
        return obs, rewards, dones, infos
