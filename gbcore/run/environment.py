"""GymnasiumTask: any Gymnasium environment with discrete actions, as the scripts know theirs."""

import importlib
import json
import os
import re
import sys
import weakref

import gymnasium
import numpy as np
from gymnasium import spaces

from gbcore.run.episodes import nearest
from gbcore.run.flags import fail


class GymnasiumTask:
    """An environment whose observations are arrays, and whose episodes can be played again.

    A Box is observed as it is, and everything else as `gymnasium.spaces.flatten` writes it: a
    Discrete state is one-hot. A time limit is a truncation. What cannot be used ends the program
    with one line.

    Args:
        env_id: as `gymnasium_id` returns it.
        rng: np.random.Generator from which the seed of every episode is drawn.
        kwargs: what `gymnasium.make` takes, as JSON.
        time_limit: steps of an episode at most; None: the environment's own limit, or 1,000.
        decimals: the key of a state is its observation, rounded to so many decimals.
        key_last_action: the key of a state has the action that led to it.
        render_mode: Gymnasium's.

    Attributes:
        obs: the observation that the environment is in, of one shape and dtype.
        key: what makes it the same state as another one, uint8 [n]; None where obs itself does.
        scale: the largest magnitude of each number of obs; 1 where its space does not tell.
    """

    def __init__(
        self, env_id, rng, kwargs="{}", time_limit=None, decimals=None, key_last_action=False,
        render_mode=None,
    ):  # fmt: skip
        self.env_id, self.rng = env_id, rng
        self.decimals, self.key_last_action = decimals, key_last_action
        try:
            kwargs = json.loads(kwargs) | ({"render_mode": render_mode} if render_mode else {})
            self.env = gymnasium.make(env_id, disable_env_checker=True, **kwargs)
        except Exception as error:  # the environment's own code may raise anything
            fail(f"cannot make {env_id} with {kwargs}: {error}")
        if time_limit or self.env.spec.max_episode_steps is None:
            self.env = gymnasium.wrappers.TimeLimit(self.env, time_limit or 1_000)
        weakref.finalize(self, self.env.close)  # an evaluation makes many, and drops them
        actions, self.space = self.env.action_space, self.env.observation_space
        if not isinstance(actions, spaces.Discrete):
            fail(f"{env_id} has actions {actions}; a graph needs Discrete ones")
        if not self.space.is_np_flattenable:
            fail(f"{env_id} has observations {self.space}, which Gymnasium cannot flatten")
        self.num_actions, self.first_action = int(actions.n), int(actions.start)
        self.is_flat = isinstance(self.space, spaces.Box) and self.space.shape != ()
        box = self.space if self.is_flat else spaces.flatten_space(self.space)
        self.shape, self.dtype = box.shape, box.dtype
        most = np.maximum(np.abs(box.low.astype(np.float64)), np.abs(box.high.astype(np.float64)))
        self.scale = np.where((most > 0) & (most < 1e6), most, 1.0).astype(np.float32)

    def reset(self):
        """The first observation of an episode with a seed of its own."""
        self.seed, self.actions = int(self.rng.integers(2**31)), []
        return self._observe(self.env.reset(seed=self.seed)[0])

    def step(self, action):
        """Observation, reward, terminated, truncated."""
        self.actions.append(action)
        obs, reward, terminated, truncated, _ = self.env.step(action + self.first_action)
        reward, terminated = float(reward), bool(terminated)
        if not np.isfinite(reward):
            fail(f"{self.env_id} gave a reward of {reward}")
        return self._observe(obs), reward, terminated, bool(truncated) and not terminated

    def _observe(self, obs):
        obs = np.asarray(obs if self.is_flat else spaces.flatten(self.space, obs), self.dtype)
        if obs.shape != self.shape:
            fail(f"{self.env_id} gave an observation of shape {obs.shape}, not {self.shape}")
        if obs.dtype.kind == "f" and not np.isfinite(obs).all():
            fail(f"{self.env_id} gave an observation with NaN or infinity")
        self.obs, self.key = np.array(obs), None  # environments may go on writing into theirs
        if self.decimals is not None or self.key_last_action:
            # + 0 makes booleans numbers, and of -0.0 0.0.
            key = obs if self.decimals is None else np.round(obs + 0, self.decimals) + 0
            last = (self.actions or [-1])[-1] if self.key_last_action else -1
            self.key = np.frombuffer(key.tobytes() + np.int64(last).tobytes(), np.uint8)
        return self.obs

    def state(self):
        """What `restore` takes back."""
        return {"seed": self.seed, "actions": list(self.actions)}

    def restore(self, state):
        """Play an episode again, up to where `state` was called."""
        self.seed, self.actions = state["seed"], []
        self._observe(self.env.reset(seed=self.seed)[0])
        for action in state["actions"]:
            self.step(action)

    def render(self):
        """uint8 [height, width, 3]."""
        return self.env.render()


def gymnasium_id(env_id):
    """The registered id that env_id means; of `module:Id-v0` the module is imported first.

    Modules are looked for in the current folder as well. A name without its version means the
    newest one. An unknown name ends the program.
    """
    module, colon, name = env_id.strip().rpartition(":")
    if module:
        sys.path.append(os.getcwd())
        try:
            importlib.import_module(module)
        except Exception as error:  # whatever is wrong with it
            fail(f"cannot import {module!r}, of {env_id}, from {os.getcwd()}: {error!r}")
    if name in gymnasium.registry:
        return f"{module}{colon}{name}"

    def key_of(spelling):
        return re.sub("[-_ ]", "", spelling.lower())

    names = sorted(gymnasium.registry, key=lambda known: gymnasium.registry[known].version or 0)
    known = {key_of(name.rpartition("-v")[0]): name for name in names}
    known |= {key_of(name): name for name in names}
    if key_of(name) not in known:
        fail(f"unknown environment {env_id!r}; nearest: {nearest(key_of(name), known)}")
    return f"{module}{colon}{known[key_of(name)]}"
