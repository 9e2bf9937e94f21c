"""Episodes that are played and not learned from: evaluations and videos. Names of tasks."""

import contextlib
import difflib
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gbcore.episode_graph import EpisodeGraph
from gbcore.graph import TransitionGraph
from gbcore.run.checkpoint import replacing
from gbcore.run.output import fail

ELSEWHERE = "for another environment see examples/ and docs/your_own.md"
# Observations [n, *obs_shape] -> actions int64 [n]; with keys= [n, *key_shape] if states have any.
Policy = Callable[..., NDArray[Any]]


class Replayed:
    """An environment whose episode is its seed and its actions: it can be played again.

    A subclass begins an episode with `_begin(seed)`, which sets `seed` and an empty list `actions`,
    to which `step(action)` appends.
    """

    seed: int
    actions: list[int]

    def state(self) -> dict[str, Any]:
        """A tree for `restore`."""
        rngs = {n: one for n, one in vars(self).items() if isinstance(one, np.random.Generator)}
        rngs = {name: rng.bit_generator.__getstate__() for name, rng in rngs.items()}
        return {"seed": self.seed, "actions": list(self.actions), "rngs": rngs}

    def restore(self, state: dict[str, Any]) -> None:
        """Play an episode again, up to where `state` was called."""
        self._begin(state["seed"])
        for action in state["actions"]:
            self.step(action)
        for name, rng in state["rngs"].items():
            getattr(self, name).bit_generator.__setstate__(rng)


class RewardsAtStart:
    """Rewards that fall with the length of an episode, as of its start.

    MiniGrid and others pay 1 - 0.9 t / T for an end after t of T steps. No state shows t: states
    that are alike in two levels then differ in value by how late each end was found. Where positive
    rewards of ends, at least five, lie on one falling line of t, they are learned from as of t = 0.
    All others stay as they are. Scores are of the environment's own.
    """

    def __init__(self) -> None:
        self._sums = np.zeros(5)  # of t, r, t^2, t r and r^2
        self._number = 0

    def of(self, reward: float, num_steps: int) -> float:
        """The reward to learn from, of the one that ended an episode of so many steps."""
        if reward <= 0:
            return reward
        t, r = num_steps, reward
        self._number += 1
        self._sums += t, r, t * t, t * r, r * r
        t, r, tt, tr, rr = (self._sums / self._number).tolist()
        spread_t, together, spread_r = tt - t * t, tr - t * r, rr - r * r
        is_line = together**2 > (1 - 1e-6) * spread_t * spread_r
        if self._number < 5 or not is_line or together >= 0 or spread_r < 1e-9 * rr:
            return reward
        return reward - together / spread_t * num_steps


def evaluate(
    make_env: Callable[..., Any], args: Any, env_id: str, policy: Policy, seed: Any,
    num_episodes: int, stop: Any = None, **of_env: Any,
) -> tuple[list[float], list[int]] | None:  # fmt: skip
    """Returns and lengths of so many episodes; None if stop, a StopSignal, was asked.

    make_env: the script's; of_env: more of its arguments.
    """
    rng = np.random.default_rng(seed)
    envs = [make_env(args, env_id, rng, **of_env) for _ in range(num_episodes)]
    return play_episodes(policy, envs, rng, args.eval_epsilon, stop)


def evaluate_and_log(
    play: Callable[..., Any], args: Any, env_id: str, logger: Any, learner: Any, stop: Any,
    **more: Any,
) -> None:  # fmt: skip
    """Play and log an evaluation of the run as it is; of N levels, those of training as well.

    play: the script's `evaluate`. more: as `Logger.log_evaluation` has it.
    """
    how = [args.seed, logger.step], args.eval_episodes, stop
    played, training = play(args, env_id, learner.policy(), *how), None
    if getattr(args, "num_levels", None) not in (None, 0, 1):  # MinAtar has no levels
        training = play(args, env_id, learner.policy(held_out=False), *how, held_out=False)
        played = training and played  # a signal has cut it short
    logger.log_evaluation(played, training, **more)


def record_video(
    make_env: Callable[..., Any], args: Any, env_id: str, policy: Policy, seed: Any,
    path: str | Path, fps: int = 10, **of_env: Any,
) -> None:  # fmt: skip
    """Write one episode as mp4; make_env and of_env as `evaluate` has them."""
    rng = np.random.default_rng(seed)
    env = make_env(args, env_id, rng, render=True, **of_env)
    frames = (env.render() for _ in _steps(policy, [env], rng, args.eval_epsilon))
    write_video(path, frames, fps)


def play_episodes(
    policy: Policy, envs: list[Any], rng: np.random.Generator, epsilon: float, stop: Any = None
) -> tuple[list[float], list[int]] | None:
    """Returns and lengths of one episode in each environment, played in lockstep.

    policy: a function, or an `EpisodeGraph`, which is told how each step went.
    epsilon: share of random actions. None if stop, a StopSignal, was asked.
    """
    returns, lengths = np.zeros(len(envs)), np.zeros(len(envs), np.int64)
    for played, rewards in _steps(policy, envs, rng, epsilon):
        returns[played] += rewards
        lengths[played] += 1
        if stop is not None and stop.asked:
            return None
    return returns.tolist(), lengths.tolist()


def _steps(policy, envs, rng, epsilon):
    """Yields which environments made a step, and their rewards; none first, once all are reset."""
    for env in envs:
        env.reset()
    running = list(range(len(envs)))
    yield [], []
    while running:
        playing = [envs[i] for i in running]
        obs = np.stack([env.obs for env in playing])
        if isinstance(policy, EpisodeGraph):
            actions = policy.act(obs, running)
        elif getattr(envs[0], "key", None) is None:
            actions = policy(obs)
        else:
            actions = policy(obs, keys=np.stack([env.key for env in playing]))
        explore = rng.random(len(running)) < epsilon
        actions[explore] = rng.integers(envs[0].num_actions, size=explore.sum())
        steps = [env.step(action) for env, action in zip(playing, actions.tolist(), strict=True)]
        _, rewards, terminated, truncated = map(list, zip(*steps, strict=True))
        over = np.logical_or(terminated, truncated)
        if isinstance(policy, EpisodeGraph):
            obs = np.stack([env.obs for env in playing])
            policy.observe(actions, rewards, obs, terminated, over, running)
        yield running, rewards
        running = [i for i, is_over in zip(running, over, strict=True) if not is_over]


def score_at_random(
    evaluate: Callable[..., Any], args: Any, env_id: str, step: int, stop: Any
) -> float | None:
    """Mean return of random actions in a script's evaluation; None if stop was asked."""
    how = replace(args, eval_epsilon=1.0), env_id, any_action, [args.seed, step]
    played = None if stop.asked else evaluate(*how, args.eval_episodes, stop)
    return None if played is None else float(np.mean(played[0]))


def starts_met(
    make_env: Callable[..., Any], args: Any, env_id: str, graph: TransitionGraph
) -> float | None:
    """Share of 100 held-out episodes that begin in a state of the training graph.

    make_env: the script's. None where levels do not change.
    """
    if args.num_levels in (None, 1):
        return None
    env, met = make_env(args, env_id, np.random.default_rng(args.seed), held_out=True), 0
    for _ in range(100):
        env.reset()
        met += graph.find(env.obs, env.key) >= 0
    return met / 100


def any_action(obs: NDArray[Any], keys: NDArray[Any] | None = None) -> NDArray[np.int64]:
    """A policy for episodes whose actions are all random."""
    return np.zeros(len(obs), np.int64)


def last_tenth(means: list[float]) -> float | None:
    """Mean over the last 10% of evaluations, at least one: the score. None without any."""
    return float(np.mean(means[-max(1, round(len(means) / 10)) :])) if means else None


def write_video(path: str | Path, frames: Iterable[Any], fps: int, zoom: int = 1) -> None:
    """Write frames uint8 [height, width, 3] as mp4, each pixel zoom x zoom.

    Raises:
        ValueError: for a frame of another shape or dtype.
        OSError: where the file cannot be written.
    """
    import imageio_ffmpeg

    with replacing(Path(path)) as new, contextlib.ExitStack() as closing:
        writer = None
        for frame in map(np.asarray, frames):
            if frame.dtype != np.uint8 or frame.shape[2:] != (3,):
                got = f"{frame.dtype} {frame.shape}"
                raise ValueError(f"{path}: require frames uint8 [height, width, 3], got {got}")
            frame = np.ascontiguousarray(frame.repeat(zoom, axis=0).repeat(zoom, axis=1))
            if writer is None:  # the codec halves both sides
                how = {"fps": fps, "macro_block_size": 2, "ffmpeg_log_level": "quiet"}
                writer = imageio_ffmpeg.write_frames(str(new), frame.shape[1::-1], **how)
                closing.callback(writer.close)
                writer.send(None)
            writer.send(frame)


def plain(name: str) -> str:
    """A task's name as all its spellings have it."""
    return re.sub("[-_ ]", "", name.lower())


def task_meant(typed: str, known: dict[str, str], kind: str, more: str = ELSEWHERE) -> str:
    """The name typed, of known, plain spellings to names; else the program ends and names some."""
    if (key := plain(typed)) not in known:
        close = difflib.get_close_matches(key, known, n=6, cutoff=0.4) or known
        near = ", ".join([*dict.fromkeys(known[key] for key in close)][:5])
        fail(f"unknown {kind} {typed!r}; nearest: {near}; {more}")
    return known[key]
