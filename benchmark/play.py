"""Step the tasks of the three scripts, or any Gymnasium environment, as one stream of rows.

Each stream yields (obs, action, reward, next_obs, terminated, starts_episode) without end. Rewards
are those that the scripts train on; of other environments, their own.
"""

import difflib
import warnings

import gymnasium
import numpy as np
import recorded

import gb_dqn_minatar
import gb_dqn_minigrid
import gb_rainbow_atari
from gbcore import TransitionGraph

SUITES = {
    "minigrid": "gb_dqn_minigrid",
    "minatar": "gb_dqn_minatar",
    "atari": "gb_rainbow_atari",
    "gymnasium": None,
}


def suite_of(env_id):
    """The suite of a task, and the task's name there, from any spelling that people use."""
    lower = env_id.strip().lower()
    for prefix, suite in (("minigrid", "minigrid"), ("babyai", "minigrid"),
                          ("minatar/", "minatar"), ("ale/", "atari")):  # fmt: skip
        if lower.startswith(prefix):
            return suite, recorded.task_name(SUITES[suite], env_id)
    if env_id in gymnasium.registry or ":" in env_id:
        return "gymnasium", env_id
    key = lower.split("-v")[0].replace("_", "").replace("-", "").replace(" ", "")
    in_minatar = key in {game.replace("_", "") for game in gb_dqn_minatar.GAMES}
    in_atari = key in {
        game.replace("_", "") for game in gb_rainbow_atari.ale_py.roms.get_all_rom_ids()
    }
    if in_minatar and in_atari:
        recorded.fail(
            f"{env_id} is a MinAtar game and an Atari game; say MinAtar/{key} or ALE/{key}"
        )
    if in_minatar or in_atari:
        suite = "minatar" if in_minatar else "atari"
        return suite, recorded.task_name(SUITES[suite], env_id)
    names = {name.lower(): name for name in gymnasium.registry}
    grids = {
        name.lower().removeprefix("minigrid-").rpartition("-v")[0]: name
        for name in gymnasium.registry
        if name.startswith("MiniGrid-")
    }
    if lower.split("-v")[0] in grids:
        return "minigrid", recorded.task_name("gb_dqn_minigrid", env_id)
    known = names | grids
    close = difflib.get_close_matches(lower, known, n=3, cutoff=0.5)
    nearest = ", ".join(dict.fromkeys(known[name] for name in close)) or "CartPole-v1"
    recorded.fail(f"unknown environment {env_id!r}; nearest: {nearest}")


def stream(suite, task, rng, policy=None, seed=1, config=None):
    """Number of actions, and rows of a task without end.

    Args:
        policy: function of (observation, rng) that returns an action; None: uniformly random.
        seed: of the environment; Atari's games draw theirs from rng.
        config: the flags of a run, where its task is played on.
    """
    if suite == "atari":
        num_actions = gb_rainbow_atari.num_actions_of(task)
        return num_actions, atari_rows(task, policy or uniform(num_actions), rng)
    if suite == "gymnasium":
        env = Environment(task, seed)
    else:
        script = gb_dqn_minigrid if suite == "minigrid" else gb_dqn_minatar
        args = recorded.args_of(script.__name__, config or {"seed": seed})
        if suite == "minigrid":
            script.check_task(task)
        env = script.make_envs(args, task, np.random.default_rng(seed), 1)[0]
    policy = policy or uniform(env.num_actions)
    rows = env_rows(env, policy, rng)
    if suite == "minigrid":
        rows = ((s, a, float(r > 0), n, *rest) for s, a, r, n, *rest in rows)
    return env.num_actions, rows


def uniform(num_actions):
    """The policy that takes every action alike."""
    return lambda obs, rng: int(rng.integers(num_actions))


def env_rows(env, policy, rng):
    """Rows of an environment with the reset and step of the scripts' own."""
    while True:
        obs, starts_episode, over = env.reset(), True, False
        while not over:
            action = policy(obs, rng)
            next_obs, reward, terminated, truncated = env.step(action)
            yield obs, action, reward, next_obs, terminated, starts_episode
            obs, starts_episode, over = next_obs, False, terminated or truncated


def atari_rows(game, policy, rng):
    """Rows of an Atari game by the protocol of its script: a lost life terminates, and goes on."""
    env = gb_rainbow_atari.Game(game)
    while True:
        obs, starts_episode = env.reset(gb_rainbow_atari.draw_seed(rng)), True
        while True:
            action = policy(obs[0], rng)
            moved = env.step(action)
            if moved is None:  # the game was over: the action was ignored
                break
            next_obs, reward, terminated, _ = moved
            clipped = float(np.clip(reward, -1, 1))
            yield obs[0], action, clipped, next_obs[0], terminated, starts_episode
            obs, starts_episode = next_obs, False


class Environment:
    """Any Gymnasium environment with discrete actions whose observations can be made arrays.

    Arrays stay as they are; numbers, tuples and dicts of spaces are flattened where Gymnasium can.
    """

    def __init__(self, env_id, seed):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.env = gymnasium.make(env_id, disable_env_checker=True)
        except Exception as error:  # whatever the environment's own code raises
            recorded.fail(f"cannot make {env_id}: {error}")
        spaces = gymnasium.spaces
        actions, self.space = self.env.action_space, self.env.observation_space
        if not isinstance(actions, spaces.Discrete):
            recorded.fail(f"cannot use {env_id}: its actions, {actions}, are not discrete")
        self.first_action, self.num_actions = int(actions.start), int(actions.n)
        self.plain = isinstance(
            self.space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
        )
        if not self.plain and not self.space.is_np_flattenable:
            recorded.fail(f"cannot use {env_id}: {self.space} cannot be made an array")
        self.seed = seed

    def reset(self):
        obs, _ = self.env.reset(seed=self.seed)  # once; then the environment's own generator
        self.seed = None
        return self._array(obs)

    def step(self, action):
        obs, reward, terminated, truncated, _ = self.env.step(self.first_action + action)
        return self._array(obs), float(reward), bool(terminated), bool(truncated and not terminated)

    def _array(self, obs):
        # A copy: an environment may write the next observation into the same array.
        if not self.plain:
            return np.array(gymnasium.spaces.flatten(self.space, obs))
        return np.atleast_1d(np.array(obs, self.space.dtype))


def record(num_actions, rows, steps, name):
    """`recorded.Recorded` of the first steps rows of a stream, without networks."""
    columns = {column: [] for column in recorded.COLUMNS}
    graph = None
    for step, (obs, action, reward, next_obs, terminated, starts_episode) in enumerate(rows):
        if step == steps:
            break
        if graph is None:
            stack = obs.shape == (4, 84, 84)
            graph = TransitionGraph(num_actions, obs.shape, obs.dtype, stack, steps + 2)
        row = (graph.node(obs), action, reward, graph.node(next_obs), terminated)
        graph.add(*row)
        if starts_episode and step:
            columns["cut"][-1] = True
        for column, value in zip(columns, (*row, step + 1 == steps), strict=True):
            columns[column].append(value)
    kinds = (np.int64, np.int64, np.float64, np.int64, np.bool_, np.bool_)
    replay = {
        column: np.array(values, kind)
        for (column, values), kind in zip(columns.items(), kinds, strict=True)
    }
    return recorded.Recorded(name, graph, replay, steps, None, None, None)
