"""Step the tasks of the three scripts, or any Gymnasium environment, as one stream of rows.

Each stream yields (obs, action, reward, next_obs, terminated, starts_episode) without end. Rewards
are those that the scripts train on; of other environments, their own.
"""

import ale_py
import gymnasium
import numpy as np
import recorded
from output import fail

from gbcore import TransitionGraph

# Suite -> its script, and the reward that the script trains on.
SUITES = {
    "minigrid": ("gb_dqn_minigrid", lambda reward: float(reward > 0)),
    "minatar": ("gb_dqn_minatar", float),
    "atari": ("gb_rainbow_atari", lambda reward: float(np.clip(reward, -1, 1))),
    "gymnasium": ("examples/gb_dqn_gymnasium.py", float),
}
PREFIXES = {"minigrid": "minigrid", "babyai": "minigrid", "minatar/": "minatar", "ale/": "atari"}


def plain(name):
    """A task's name without version and signs: taxi of Taxi-v4, spaceinvaders of space_invaders."""
    return "".join(c for c in name.lower().partition("-v")[0] if c.isalnum())


def suite_of(env_id):
    """The suite of a task, and the task's name there, from any spelling that people use."""
    for prefix, suite in PREFIXES.items():
        if env_id.strip().lower().startswith(prefix):
            return suite, script_of(suite).task_of(env_id)
    script_of("minigrid")  # registers its tasks
    if env_id in gymnasium.registry:
        return "gymnasium", env_id
    games = {"minatar": script_of("minatar").GAMES, "atari": ale_py.roms.get_all_rom_ids()}
    found = [suite for suite, names in games.items() if plain(env_id) in map(plain, names)]
    if len(found) > 1:
        fail(f"{env_id} is a MinAtar game and an Atari game; say MinAtar/{env_id} or ALE/{env_id}")
    if found:
        return found[0], script_of(found[0]).task_of(env_id)
    grids = [plain(name[9:]) for name in gymnasium.registry if name.startswith("MiniGrid-")]
    suite = "minigrid" if plain(env_id) in grids else "gymnasium"
    return suite, script_of(suite).task_of(env_id)


def script_of(suite):
    """The module of a suite's script."""
    return recorded.load_script(SUITES[suite][0])


def stream(suite, task, rng, policy=None, seed=1, run=None):
    """Number of actions, and rows of a task without end.

    Args:
        policy: function of (observation, rng) that returns an action; None: uniformly random.
        seed: of the environment.
        run: `Recorded`, to play its task on, by its script and its flags.
    """
    reward_of = SUITES[suite][1] if suite in SUITES else float  # a run of another's script
    script = run.module if run else script_of(suite)
    args = recorded.args_of(script, run.config) if run else script.Args(seed=seed)
    env = script.make_env(args, task, np.random.default_rng(seed))
    if policy is None:

        def policy(obs, rng):
            return int(rng.integers(env.num_actions))

    return env.num_actions, rows_of(env, policy, reward_of, rng, lives=suite == "atari")


def rows_of(env, policy, reward_of, rng, lives):
    """Rows of an environment with the reset and step of the scripts' own.

    lives: to lose one terminates, and the game goes on until a step is ignored.
    """
    while True:
        obs, starts_episode, over = env.reset(), True, False
        while not over:
            action = policy(obs, rng)
            moved = env.step(action)
            if moved is None:
                break
            next_obs, reward, terminated, truncated = moved
            yield obs, action, reward_of(reward), next_obs, terminated, starts_episode
            over = (terminated or truncated) and not lives
            obs, starts_episode = next_obs, False


def record(num_actions, rows, steps, name):
    """`recorded.Recorded` of the first rows of a stream, without networks."""
    return record_by_keys(num_actions, rows, steps, name, {"": lambda obs, action: obs})[""]


def record_by_keys(num_actions, rows, steps, name, keys):
    """`Recorded` of the same rows for every key: two observations of one key are one state.

    keys: name -> function of (observation, action before it or -1) to an array.
    """
    graphs, nodes = {}, {key: [] for key in keys}
    others, before = [], -1
    for step, (obs, action, reward, next_obs, terminated, starts) in enumerate(rows):
        if step == steps:
            break
        for key, key_of in keys.items():
            pair = key_of(obs, -1 if starts else before), key_of(next_obs, action)
            if key not in graphs:
                shape, dtype = pair[0].shape, pair[0].dtype
                stack = shape == (4, 84, 84)
                graphs[key] = TransitionGraph(num_actions, shape, dtype, stack, steps + 2)
            node, next_node = (graphs[key].node(one) for one in pair)
            graphs[key].add(node, action, reward, next_node, terminated)
            nodes[key].append((node, next_node))
        others.append((action, reward, terminated, starts))
        before = action
    action, reward, terminated, starts = map(np.array, zip(*others, strict=True))
    cut = np.append(starts[1:], True)
    found = {}
    for key, graph in graphs.items():
        node, next_node = np.array(nodes[key]).T
        columns = (node, action, reward, next_node, terminated, cut)
        replay = dict(zip(recorded.COLUMNS, columns, strict=True))
        found[key] = recorded.Recorded(name, graph, replay, len(others))
    return found
