"""Atari 100K: its games, their random and human scores, and how an agent is evaluated on them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ale_py.roms
import numpy as np
from ale_py.vector_env import AtariVectorEnv
from numpy.typing import NDArray

from gbcore.run.episodes import plain, task_meant, write_video

Policy = Callable[[NDArray[np.uint8]], NDArray[np.int64]]  # uint8 [n, 4, 84, 84] -> actions [n]

# Random and human scores of the 26 games of Atari 100K (Mnih et al. 2015; van Hasselt et al. 2016).
REFERENCE_SCORES = {
    "alien": (227.8, 7127.7), "amidar": (5.8, 1719.5), "assault": (222.4, 742.0),
    "asterix": (210.0, 8503.3), "bank_heist": (14.2, 753.1), "battle_zone": (2360.0, 37187.5),
    "boxing": (0.1, 12.1), "breakout": (1.7, 30.5), "chopper_command": (811.0, 7387.8),
    "crazy_climber": (10780.5, 35829.4), "demon_attack": (152.1, 1971.0), "freeway": (0.0, 29.6),
    "frostbite": (65.2, 4334.7), "gopher": (257.6, 2412.5), "hero": (1027.0, 30826.4),
    "jamesbond": (29.0, 302.8), "kangaroo": (52.0, 3035.0), "krull": (1598.0, 2665.5),
    "kung_fu_master": (258.5, 22736.3), "ms_pacman": (307.3, 6951.6), "pong": (-20.7, 14.6),
    "private_eye": (24.9, 69571.3), "qbert": (163.9, 13455.0), "road_runner": (11.5, 7845.0),
    "seaquest": (68.4, 42054.7), "up_n_down": (533.4, 11693.2),
}  # fmt: skip


def human_normalized(game: str, score: float) -> float | None:
    """0 for random play, 1 for a human tester; None where neither is known."""
    if game not in REFERENCE_SCORES:
        return None
    random_score, human_score = REFERENCE_SCORES[game]
    return (score - random_score) / (human_score - random_score)


def make_envs(
    game: str, num_envs: int, life_loss_is_done: bool = False, **options: Any
) -> AtariVectorEnv:
    """Atari 100K: 4 grey 84x84 frames, frame skip 4, max of 2, no sticky actions, <= 30 no-ops.

    Autoreset is NEXT_STEP: the step after an end ignores its action and returns the first
    observation of the next episode. With life_loss_is_done a lost life is reported as termination
    and the game goes on, so that not every end is followed by a reset.
    """
    return AtariVectorEnv(
        game,
        num_envs,
        autoreset_mode="NextStep",
        life_loss_info=life_loss_is_done,
        reward_clipping=False,
        use_fire_reset=False,
        **options,
    )


def task_of(env_id: str) -> str:
    """ROM name of a game, from any spelling of it that people use."""
    name = env_id.strip().lower().removeprefix("ale/").split("-v")[0].removesuffix("noframeskip")
    games = {plain(rom): rom for rom in ale_py.roms.get_all_rom_ids()}
    return task_meant(name, games, "game")


def evaluate(
    args: Any, env_id: str, policy: Policy, seed: int, num_episodes: int, stop: Any = None
) -> tuple[list[float], list[int]] | None:
    """Returns and lengths of num_episodes full games, played in parallel environments.

    Each environment plays its share of the episodes from first to last, so that short games are
    not over-represented, and rests after that. policy: uint8 [n, 4, 84, 84] -> actions [n]. None if
    stop, a StopSignal, was asked.
    """
    num_envs = min(args.eval_envs, num_episodes)
    rng = np.random.default_rng(seed)
    # Consecutive seeds, the default, would play the same games for runs of neighbouring seeds.
    seeds = np.random.SeedSequence(seed).generate_state(num_envs).astype(np.int64) >> 1
    # A vector environment would step those that have finished as well: one for each, with a thread.
    envs = [make_envs(env_id, 1, num_threads=1) for _ in range(num_envs)]
    quota = np.full(num_envs, num_episodes // num_envs)
    quota[: num_episodes % num_envs] += 1
    returns, lengths = np.zeros(num_envs), np.zeros(num_envs, np.int64)
    done = np.zeros(num_envs, np.bool_)
    finished = [[] for _ in range(num_envs)]
    obs = np.concatenate([env.reset(seed=int(s))[0] for env, s in zip(envs, seeds, strict=True)])
    while quota.any() and not (stop is not None and stop.asked):
        playing = np.flatnonzero(quota)
        actions = np.zeros(num_envs, np.int64)
        actions[playing] = policy(obs[playing])
        explore = rng.random(num_envs) < args.eval_epsilon
        actions[explore] = rng.integers(envs[0].single_action_space.n, size=explore.sum())
        for i in playing:
            envs[i].send(actions[i : i + 1])
        for i in playing:
            obs[i : i + 1], reward, terminated, truncated, _ = envs[i].recv()
            if done[i]:  # after an end, this step was a reset
                done[i] = False
                continue
            returns[i] += reward[0]
            lengths[i] += 1
            done[i] = terminated[0] or truncated[0]
            if done[i]:
                finished[i].append((float(returns[i]), int(lengths[i])))
                quota[i] -= 1
                returns[i], lengths[i] = 0.0, 0
    for env in envs:
        env.close()
    if quota.any():
        return None
    episodes = [episode for one_env in finished for episode in one_env]
    return [r for r, _ in episodes], [n for _, n in episodes]


def record_video(args: Any, env_id: str, policy: Policy, seed: int, path: Path) -> None:
    """Write one episode in colour, as mp4: a second game follows the first, action by action."""
    rng = np.random.default_rng(seed)
    seed = int(rng.integers(2**31))
    envs = make_envs(env_id, 1)
    screen = make_envs(
        env_id, 1, grayscale=False, stack_num=1, img_height=210, img_width=160, maxpool=False
    )

    def frames():
        obs, done, picture = envs.reset(seed=seed)[0], False, screen.reset(seed=seed)[0]
        while not done:
            yield picture[0, 0]
            action = policy(obs)
            if rng.random() < args.eval_epsilon:
                action = rng.integers(envs.single_action_space.n, size=1)
            obs, _, terminated, truncated, _ = envs.step(action)
            picture = screen.step(action)[0]
            done = terminated[0] or truncated[0]

    write_video(path, frames(), fps=15, zoom=2)
