"""Episodes that are played and not learned from: evaluations and videos. Names people mistype."""

import contextlib
import difflib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gbcore.episode_graph import EpisodeGraph
from gbcore.run.flags import fail

ELSEWHERE = "for another environment see examples/ and docs/your_own.md"
# Observations [n, *obs_shape] -> actions int64 [n]; with keys= [n, *key_shape] if states have any.
Policy = Callable[..., NDArray[Any]]


def play_episodes(
    policy: Policy, envs: list[Any], rng: np.random.Generator, epsilon: float, stop: Any = None
) -> tuple[list[float], list[int]] | None:
    """Returns and lengths of one episode in each environment, played in lockstep.

    policy: a function, or an `EpisodeGraph`, which is told how each step went.
    epsilon: share of random actions. None if stop, a StopSignal, was asked.
    """
    own = policy if isinstance(policy, EpisodeGraph) else None
    returns, lengths = np.zeros(len(envs)), np.zeros(len(envs), np.int64)
    running = list(range(len(envs)))
    for env in envs:
        env.reset()
    while running:
        if stop is not None and stop.asked:
            return None
        playing = [envs[i] for i in running]
        actions = _ask(policy, playing) if own is None else own.act(_observed(playing), running)
        explore = rng.random(len(running)) < epsilon
        actions[explore] = rng.integers(envs[0].num_actions, size=explore.sum())
        steps = [env.step(action) for env, action in zip(playing, actions.tolist(), strict=True)]
        _, rewards, terminated, truncated = map(list, zip(*steps, strict=True))
        over = np.logical_or(terminated, truncated)
        if own is not None:
            own.observe(actions, rewards, _observed(playing), terminated, over, running)
        returns[running] += rewards
        lengths[running] += 1
        running = [i for i, is_over in zip(running, over, strict=True) if not is_over]
    return returns.tolist(), lengths.tolist()


def _ask(policy, envs):
    """The policy's actions int64 [n] in the states that environments are in."""
    obs = _observed(envs)
    if getattr(envs[0], "key", None) is None:
        return policy(obs)
    return policy(obs, keys=np.stack([env.key for env in envs]))


def _observed(envs):
    return np.stack([env.obs for env in envs])


def film_episode(
    policy: Policy, env: Any, rng: np.random.Generator, epsilon: float
) -> Iterator[Any]:
    """Yields the frames of one episode, as the environment renders them."""
    env.reset()
    own = policy if isinstance(policy, EpisodeGraph) else None
    done = False
    yield env.render()
    while not done:
        action = int((_ask(policy, [env]) if own is None else own.act(_observed([env])))[0])
        if rng.random() < epsilon:
            action = int(rng.integers(env.num_actions))
        _, reward, terminated, truncated = env.step(action)
        done = terminated or truncated
        if own is not None:
            own.observe([action], [reward], _observed([env]), [terminated], [done])
        yield env.render()


def as_rgb(frame: Any) -> NDArray[Any]:
    """A rendered frame as uint8 [height, width, 3].

    Args:
        frame: grey [H, W] or [H, W, 1], RGB [H, W, 3], or RGBA [H, W, 4], which is laid over black;
            integers from 0 to 255, reals from 0 to 1, or booleans.

    Raises:
        ValueError: for anything else.
    """
    found = None if isinstance(frame, list | tuple) else np.asarray(frame)
    if found is None or found.dtype.kind not in "biuf":
        raise ValueError(f"require render() to return an array, got {type(frame).__name__}")
    image = found[..., None] if found.ndim == 2 else found
    if image.ndim != 3 or image.shape[2] not in (1, 3, 4) or image.size == 0:
        raise ValueError(f"require a frame [height, width(, 1, 3 or 4)], got {found.shape}")
    if image.dtype.kind in "bf":
        if not ((image >= 0) & (image <= 1)).all():
            raise ValueError(f"require reals from 0 to 1, got {image.min()} to {image.max()}")
        image = np.rint(image * 255.0)
    elif not 0 <= image.min() <= image.max() <= 255:
        raise ValueError(f"require numbers from 0 to 255, got {image.min()} to {image.max()}")
    image = image.astype(np.uint8)
    if image.shape[2] == 4:
        image = np.rint(image[..., :3] * (image[..., 3:] / 255)).astype(np.uint8)
    return np.broadcast_to(image, (*image.shape[:2], 3))


def write_video(path: str | Path, frames: Iterable[Any], fps: int, zoom: int = 1) -> None:
    """Write frames, each as `as_rgb` takes it, as mp4, each pixel zoom x zoom.

    A full disk, a frame that is none or of another size, or whatever an environment raises when it
    draws, ends the program with status 1, and leaves no file.
    """
    import imageio_ffmpeg

    writer, size, number = None, None, 0
    try:
        for frame in map(as_rgb, frames):
            number += 1
            size = size or frame.shape
            if frame.shape != size:
                raise ValueError(f"require frames of one size, got {frame.shape} after {size}")
            frame = frame.repeat(zoom, axis=0).repeat(zoom, axis=1)
            odd = [(0, side % 2) for side in frame.shape[:2]]  # the codec halves both sides
            frame = np.pad(frame, (*odd, (0, 0)), mode="edge")
            if writer is None:
                how = {"fps": fps, "macro_block_size": 2, "ffmpeg_log_level": "quiet"}
                writer = imageio_ffmpeg.write_frames(str(path), frame.shape[1::-1], **how)
                writer.send(None)
            writer.send(np.ascontiguousarray(frame))
        if number == 0:
            raise ValueError("require at least one frame, got none")
        writer.close()
        if imageio_ffmpeg.count_frames_and_secs(str(path))[0] != number:
            raise ValueError("require room for all frames, got fewer into the file")
        writer = None
    except MemoryError:
        raise
    except Exception as error:  # an environment that draws may raise anything
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        reason = str(error).strip().partition("\n")[0]  # ffmpeg's are long
        fail(f"cannot write {path}: {kind}{reason}", 1)
    finally:
        if writer is not None:  # it came to no end
            writer.close()
            with contextlib.suppress(OSError):
                os.unlink(path)


def nearest(name: str, known: dict[str, str]) -> str:
    """What of known, spellings to names, a name may mean; all where nothing is near."""
    close = difflib.get_close_matches(name, known, n=6, cutoff=0.4)
    names = list(dict.fromkeys(known[key] for key in close or known))
    return ", ".join(names[:3] if close else names)
