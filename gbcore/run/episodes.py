"""Episodes that are played and not learned from: evaluations and videos. Names people mistype."""

import difflib

import numpy as np

from gbcore.run.flags import fail

ELSEWHERE = "for another environment see examples/ and the README's 'Your own environment'"


def play_episodes(policy, envs, rng, epsilon, stop=None):
    """Returns and lengths of one episode in each environment, played in lockstep.

    policy: observations [n, *obs_shape] -> actions [n]; epsilon: share of random actions. None if
    stop, a StopSignal, was asked.
    """
    returns, lengths = np.zeros(len(envs)), np.zeros(len(envs), np.int64)
    running = list(range(len(envs)))
    obs = [env.reset() for env in envs]
    while running:
        if stop is not None and stop.asked:
            return None
        actions = policy(np.stack([obs[i] for i in running]))
        explore = rng.random(len(running)) < epsilon
        actions[explore] = rng.integers(envs[0].num_actions, size=explore.sum())
        for i, action in zip(tuple(running), actions.tolist(), strict=True):
            obs[i], reward, terminated, truncated = envs[i].step(action)
            returns[i] += reward
            lengths[i] += 1
            if terminated or truncated:
                running.remove(i)
    return returns.tolist(), lengths.tolist()


def film_episode(policy, env, rng, epsilon):
    """Yields the frames uint8 [height, width, 3] of one episode."""
    obs, done = env.reset(), False
    yield env.render()
    while not done:
        action = int(policy(obs[None])[0])
        if rng.random() < epsilon:
            action = int(rng.integers(env.num_actions))
        obs, _, terminated, truncated = env.step(action)
        done = terminated or truncated
        yield env.render()


def write_video(path, frames, fps, zoom=1):
    """Write frames uint8 [height, width, 3] as mp4, each pixel zoom x zoom.

    A full disk, or an environment that draws nothing, ends the program with status 1.
    """
    import imageio_ffmpeg

    writer = None
    try:
        for frame in frames:
            if frame is None:
                raise NotImplementedError("render() returned None")
            frame = np.ascontiguousarray(frame.repeat(zoom, axis=0).repeat(zoom, axis=1))
            if writer is None:
                size = (frame.shape[1], frame.shape[0])
                writer = imageio_ffmpeg.write_frames(str(path), size, fps=fps, macro_block_size=2)
                writer.send(None)
            writer.send(frame)
        writer.close()
    except (OSError, NotImplementedError) as error:
        fail(f"cannot write {path}: {error!r}", 1)


def nearest(name, known):
    """What of known, a dict of spellings to names, name may mean; all where nothing is near."""
    close = difflib.get_close_matches(name, known, n=6, cutoff=0.4)
    names = list(dict.fromkeys(known[key] for key in close or known))
    return ", ".join(names[:3] if close else names)
