"""Step the tasks of the three scripts, or any Gymnasium environment, as one stream of rows.

Each stream yields (obs, action, reward, next_obs, terminated, starts_episode) without end. Rewards
are those that the scripts train on; of other environments, their own.
"""

import itertools
import re

import ale_py
import gymnasium
import numpy as np

from gbcore import Replay, TransitionGraph
from gbcore.run import fail
from gbtools import recorded

# Suite -> its script, and the reward that the script trains on.
SUITES = {
    "minigrid": ("gb_dqn_minigrid", lambda reward: float(np.sign(reward))),
    "minatar": ("gb_dqn_minatar", float),
    "atari": ("gb_rainbow_atari", lambda reward: float(np.clip(reward, -1, 1))),
    "gymnasium": ("examples/gb_dqn_gymnasium.py", float),
}
PREFIXES = {"(minigrid|babyai)[^:]*$": "minigrid", "minatar/": "minatar", "ale/": "atari"}


def plain(name):
    """A task's name without version and signs: taxi of Taxi-v4, spaceinvaders of space_invaders."""
    return "".join(c for c in name.lower().partition("-v")[0] if c.isalnum())


def suite_of(env_id):
    """The suite of a task, and the task's name there, from any spelling that people use."""
    module, _, name = (env_id := env_id.strip()).rpartition(":")
    env_id = name if module in ("minigrid", "ale_py") else env_id  # any other module is a user's
    names = {"minatar": script_of("minatar").GAMES, "atari": ale_py.roms.get_all_rom_ids()}
    script_of("minigrid")  # registers its tasks
    names["minigrid"] = [name[9:] for name in gymnasium.registry if name.startswith("MiniGrid-")]
    result = [suite for start, suite in PREFIXES.items() if re.match(start, env_id.lower())]
    if not result and env_id not in gymnasium.registry:
        result = [suite for suite in names if plain(env_id) in map(plain, names[suite])]
    if len(result) > 1:
        fail(f"{env_id} is a MinAtar game and an Atari game; say MinAtar/{env_id} or ALE/{env_id}")
    suite = result[0] if result else "gymnasium"
    return suite, script_of(suite).task_of(env_id)


def script_of(suite):
    """The module of a suite's script."""
    return recorded.load_script(SUITES[suite][0])


def stream(suite, task, rng, seed=1, **flags):
    """Number of actions, and rows of a task under random actions; flags: more of the script's."""
    script, reward_of = script_of(suite), SUITES[suite][1]
    env = script.make_env(script.Args(seed=seed, **flags), task, np.random.default_rng(seed))

    def rows():
        while True:
            obs, starts_episode, over = env.reset(), True, False
            while not over:
                action = int(rng.integers(env.num_actions))
                next_obs, reward, terminated, truncated = env.step(action)
                yield obs, action, reward_of(reward), next_obs, terminated, starts_episode
                # In Atari to lose a life terminates, and the game goes on until it is over.
                over = getattr(env, "is_over", terminated or truncated)
                obs, starts_episode = next_obs, False

    return env.num_actions, rows()


def record_by_keys(num_actions, rows, steps, name, keys):
    """`Recorded` of the same rows for every key: two observations of one key are one state.

    keys: name -> function of (observation, action before it or -1) to an array.
    """
    replays, before = {}, -1
    for obs, action, reward, next_obs, terminated, starts in itertools.islice(rows, steps):
        for key, key_of in keys.items():
            state, next_state = key_of(obs, -1 if starts else before), key_of(next_obs, action)
            if key not in replays:
                kind = state.shape, state.dtype, state.shape == (4, 84, 84), steps + 2
                replays[key] = Replay(TransitionGraph(num_actions, *kind), steps)
            if starts:
                replays[key].end_episode()
            replays[key].record(state, action, reward, next_state, terminated)
        before = action
    rows = {key: {c: getattr(of, c) for c in recorded.COLUMNS} for key, of in replays.items()}
    return {key: recorded.Recorded(name, of.graph, rows[key]) for key, of in replays.items()}
