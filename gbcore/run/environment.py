"""GymnasiumTask: any Gymnasium environment with discrete actions, as the scripts know theirs."""

import contextlib
import functools
import importlib
import json
import math
import os
import sys
import traceback
import weakref
from collections.abc import Iterator, Mapping
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from gbcore.episode_graph import is_held_out
from gbcore.first_tries import are_planes, as_grids
from gbcore.run.episodes import Replayed, plain, task_meant
from gbcore.run.output import fail, warn

LONG = 10_000  # numbers in an observation that was no array; more are slow
FEW = 16  # numbers beside a grid, and their values, that each of its cells can have
_warn_once = functools.cache(warn)  # an evaluation makes an environment for each of its episodes


class GymnasiumTask(Replayed):
    """An environment whose observations are arrays, and whose episodes can be played again.

    A Box is observed as it is, and everything else as `gymnasium.spaces.flatten` writes it: a
    Discrete state is one-hot. Where levels change, a grid stays one, also as a MultiDiscrete, and
    beside a few small integers: every cell has these, too (`grid_among`). A time limit is a
    truncation. An environment that cannot be used ends the program with one line; errors of an
    environment's own code are shown as they are.

    Args:
        env_id: as `gymnasium_id` returns it.
        rng: np.random.Generator from which the seed of every episode is drawn.
        kwargs: of `gymnasium.make`, as JSON.
        time_limit: steps of an episode, in place of the environment's registered limit; None: that
            limit, or 1,000.
        decimals: the key of a state is its observation, rounded to so many decimals.
        key_last_action: the key of a state has the action that led to it.
        render_mode: Gymnasium's.
        leave_out: names of parts of a Dict or Tuple, with commas, that are not observed: of one
            that lies deeper a/b, of a Tuple its number.
        num_levels: of N an episode plays one, by its seed; 0: a new one each, as None.
        seed: of the run, which says which levels the N are.
        held_out: play levels that training does not: where `info["level"]` of reset names an
            episode's level, a fifth of them, by a hash; else seeds that are hardly ever drawn
            twice.
        level_tries: episodes that training plays in a row in a level, at most, until one meets a
            reward above 0: all by the same seed.

    An environment may give `info["key"]`, an array of one shape and dtype, at every reset and step.
    Observations with like keys are one state: the graph may know more than the network sees.

    Attributes:
        env: Gymnasium's environment.
        first_action: the environment's own number of action 0.
        obs: the observation that the environment is in, of one shape and dtype.
        key: uint8 [n], like in like states; None where obs itself is.
        level: the environment's own name of the episode's level, or None.
        scale: the largest magnitude of each number of obs; 1 where its space does not tell.
    """

    env: gymnasium.Env[Any, Any]
    scale: NDArray[np.float32]
    seed: int
    actions: list[int]

    def __init__(
        self,
        env_id: str,
        rng: np.random.Generator,
        kwargs: str = "{}",
        time_limit: int | None = None,
        decimals: int | None = None,
        key_last_action: bool = False,
        render_mode: str | None = None,
        leave_out: str = "",
        num_levels: int | None = None,
        seed: int = 0,
        held_out: bool = False,
        level_tries: int = 1,
    ):
        self._num_levels, self._run_seed, self._held_out = num_levels, seed, held_out
        self._level_tries, self._tries = level_tries, 0
        self._env_id, self._rng = env_id, rng
        self._decimals, self._key_last_action = decimals, key_last_action
        self._key_kind = ()  # dtype and shape of the environment's own keys
        with contextlib.suppress(ValueError):
            kwargs = json.loads(kwargs)
        if not isinstance(kwargs, dict):
            fail(f"cannot make {env_id} with {kwargs}: require a JSON object")
        if render_mode:
            kwargs["render_mode"] = render_mode
        if time_limit:
            kwargs["max_episode_steps"] = time_limit
        with own_code():
            try:
                self.env = gymnasium.make(env_id, **{"disable_env_checker": True} | kwargs)
            except TypeError as error:
                if not (render_mode and "'render_mode'" in f"{error}"):
                    raise
                fail(f"{env_id} cannot be rendered: its __init__ takes no render_mode")
        actions, self._space = self.env.action_space, self.env.observation_space
        weakref.finalize(self, _close, self.env)  # an evaluation makes many, and drops them
        self._assumed_limit = None if self.env.spec.max_episode_steps else 1_000
        if self._assumed_limit:
            self.env = gymnasium.wrappers.TimeLimit(self.env, self._assumed_limit)
        if not (isinstance(actions, spaces.Discrete) and actions.n > 0):
            fail(f"{env_id} has actions {actions}; a graph needs Discrete ones, at least one")
        self.num_actions: int = int(actions.n)
        self.first_action: int = int(actions.start)
        self._left_out = [name.strip() for name in leave_out.split(",") if name.strip()]
        known = part_names(self._space)
        if unknown := [name for name in self._left_out if name not in known]:
            names = ", ".join(known) or "none"
            fail(
                f"{env_id}: require --leave-out of parts that are observed, {names}; got {unknown}"
            )
        self._space = without(self._space, self._left_out)
        if num_levels not in (None, 1) and has_grid(numbers := as_numbers(self._space)):
            self._space = numbers
        self._is_flat = isinstance(self._space, spaces.Box) and self._space.shape != ()
        message = (
            f"{env_id} has observations {self._space}, which Gymnasium cannot flatten to one array "
            "of at least one number; leave out other parts, or encode them in a wrapper"
        )
        flat = flat_box(self._space)
        is_real = flat is not None and flat.dtype.kind == "f"  # text beside reals cannot be read
        odd = [
            name
            for name, part in part_names(self._space).items()
            if flat_box(part) is None or (is_real and isinstance(part, spaces.Text))
        ]
        if odd:
            message += f": {', '.join(odd)}; --leave-out {','.join(odd)} does"
        if odd or flat is None:
            fail(message)
        self._box = self._space if self._is_flat else flat
        self._grid = None if num_levels in (None, 1) else grid_among(self._space)
        low, high = self._as_grid(self._box.low), self._as_grid(self._box.high)
        self.shape: tuple[int, ...] = low.shape
        self.dtype: np.dtype[Any] = low.dtype
        if (size := np.prod(self.shape)) > LONG and not self._is_flat:
            _warn_once(
                f"{env_id}: an observation in {self._space} becomes {size:,} numbers, one-hot, "
                "which is slow; a wrapper that observes a Box, such as the digits of a state's "
                "number or its coordinates, is quicker"
            )
        most = np.maximum(abs(low.astype(np.float64)), abs(high.astype(np.float64)))
        self.scale = np.where((most > 0) & (most < 1e6), most, 1.0).astype(np.float32)

    def reset(self) -> NDArray[Any]:
        """The first observation of an episode with a seed of its own."""
        levels, rng = self._num_levels, self._rng
        # The graph remembers a level without a reward so far: exploration goes on there.
        again = levels not in (None, 1) and 0 < self._tries < self._level_tries
        again = again and not self._met_reward and not self._held_out
        self._tries = self._tries + 1 if again else 1
        if levels and (levels == 1 or not self._held_out):
            number = 0 if levels == 1 else int(rng.integers(levels))
            rng = np.random.default_rng([self._run_seed, number])
        for draw in range(1_000):
            obs = self._begin(self.seed if again and draw == 0 else int(rng.integers(2**31)))
            is_free = levels in (None, 1) or self.level is None
            if is_free or is_held_out(self.level) == self._held_out:
                return obs
        kind = "held out" if self._held_out else "not held out"
        fail(f"{self._env_id}: of 1,000 levels none is {kind}; --num-levels 1 plays one level")

    def step(self, action: int) -> tuple[NDArray[Any], float, bool, bool]:
        """Observation, reward, terminated, truncated."""
        self.actions.append(action)
        with own_code():
            obs, reward, terminated, truncated, info = self.env.step(action + self.first_action)
        reward, terminated, truncated = float(reward), bool(terminated), bool(truncated)
        self._met_reward |= reward > 0
        truncated = truncated and not terminated
        if truncated and len(self.actions) == self._assumed_limit:
            _warn_once(
                f"{self._env_id} is registered without a time limit: its episodes are cut after "
                f"{self._assumed_limit:,} steps; --time-limit sets another one"
            )
        return self._observe(obs, info), reward, terminated, truncated

    def render(self) -> Any:
        """The environment's own picture."""
        with own_code():
            return self.env.render()

    def state(self) -> dict[str, Any]:
        """A tree for `restore`."""
        return super().state() | {"tries": self._tries}

    def restore(self, state: dict[str, Any]) -> None:
        """Play an episode again, up to where `state` was called."""
        super().restore(state)
        self._tries = state["tries"]

    def _begin(self, seed):
        self.seed, self.actions, self._met_reward = seed, [], False
        with own_code():
            obs, info = self.env.reset(seed=seed)
        self.level: Any = info.get("level")
        return self._observe(obs, info)

    def flatten(self, obs: Any) -> NDArray[Any]:
        """An observation of the environment's own as the array that a run observes.

        Raises:
            ValueError: where a cast to the space's dtype would change it, but for reals rounded.
        """
        obs, box = without(obs, self._left_out), self._box
        with own_code(), np.errstate(all="ignore"):
            if self._is_flat:
                flat = cast = np.array(obs, box.dtype)  # environments may write on into theirs
            else:
                flat = np.array(spaces.flatten(self._space, obs), box.dtype)
                cast = spaces.unflatten(self._space, flat)
        if flat.shape != box.shape or not _is_same(cast, obs):
            message = f"require observations of {self._space}, got {obs}"
            raise ValueError(f"{self._env_id}: {message:.400}")
        return self._as_grid(flat)

    def _as_grid(self, flat):
        """The grid [H, W, C] in an observation's numbers, as `grid_among` found it."""
        if self._grid is None:
            return flat
        part, shape, dtype = self._grid
        grid, others = as_grids(flat[part].reshape(shape)), np.delete(flat, part)
        grid = grid.reshape(*grid.shape[:2], -1)
        in_cells = np.broadcast_to(others, (*grid.shape[:2], len(others)))
        return np.concatenate([grid, in_cells], axis=2).astype(dtype)

    def _observe(self, obs, info):
        self.obs: NDArray[Any] = (obs := self.flatten(obs))
        self.key: NDArray[np.uint8] | None = self._own_key(info)
        if self.key is None and (self._decimals is not None or self._key_last_action):
            key = obs if self._decimals is None else rounded(obs, self._decimals)
            last = (self.actions or [-1])[-1] if self._key_last_action else -1
            self.key = np.frombuffer(key.tobytes() + np.int64(last).tobytes(), np.uint8)
        return self.obs

    def _own_key(self, info):
        """`info["key"]` as uint8 [n]; None where the environment gives none."""
        key, is_given = np.empty(0), "key" in info
        with contextlib.suppress(ValueError):  # of a ragged list
            key = np.asarray(info.get("key", key))
        kind, is_array = (key.dtype, key.shape), key.dtype.kind in "biufSU"
        self._key_kind = self._key_kind or kind
        if kind != self._key_kind or not is_array or (is_given and not key.size):
            fail(
                f'{self._env_id}: require info["key"], an array of one shape and dtype at every '
                f"reset and step, got {info.get('key')!r:.200}"
            )
        key = key + 0 if key.dtype.kind == "f" else key  # -0 is 0
        return np.frombuffer(key.tobytes(), np.uint8) if key.size else None


def warn_unless_repeatable(env: GymnasiumTask, num_steps: int = 20) -> None:
    """Warn where an episode of the same seed and actions is another one the second time."""
    actions, seen = np.random.default_rng(0).integers(env.num_actions, size=num_steps).tolist(), []
    for _ in range(2):
        seen.append([env._begin(0).tobytes()])
        for action in actions:
            obs, *outcome = env.step(action)
            seen[-1].append((obs.tobytes(), *outcome))
            if any(outcome[1:]):
                break
    if seen[0] != seen[1]:
        warn(
            "two episodes of one seed and the same actions differ, by chance that reset(seed) does "
            "not govern, or by numbers kept between episodes: --resume will not go on as before, "
            "and evaluations, which play fresh copies, may not play the same task"
        )


@contextlib.contextmanager
def own_code() -> Iterator[None]:
    """Around calls of a user's code: an error is shown as it is, and ends the program."""
    try:
        yield
    except Exception:
        traceback.print_exc()
        sys.exit(1)


def _is_same(cast, obs):
    """Are all values still those of an observation, reals but for rounding, and finite?"""
    if isinstance(obs, Mapping):
        return all(_is_same(cast[name], part) for name, part in obs.items())
    if isinstance(obs, tuple):
        return all(map(_is_same, cast, obs))
    cast, obs = np.asarray(cast), np.asarray(obs)
    are_real = cast.dtype.kind == obs.dtype.kind == "f"
    return cast.shape == obs.shape and bool(np.all(np.isfinite(cast) if are_real else cast == obs))


def part_names(space: gymnasium.Space[Any], at: str = "") -> dict[str, gymnasium.Space[Any]]:
    """Name -> space of the parts that a Dict or Tuple ends in; of another space none."""
    if isinstance(space, spaces.Dict):
        parts = space.spaces.items()
    elif isinstance(space, spaces.Tuple):
        parts = enumerate(space.spaces)
    else:
        return {}
    result = {}
    for name, part in parts:
        result |= part_names(part, f"{at}{name}/") or {f"{at}{name}": part}
    return result


def without(item: Any, left_out: list[str], at: str = "") -> Any:
    """A space, or an observation in it, without the parts of these names."""
    is_dict = isinstance(item, spaces.Dict | Mapping)
    is_tuple = isinstance(item, spaces.Tuple | tuple)
    if not left_out or not (is_dict or is_tuple):
        return item
    kept = [
        (name, without(part, left_out, f"{at}{name}/"))
        for name, part in (item.items() if is_dict else enumerate(item))
        if f"{at}{name}" not in left_out
    ]
    parts = dict(kept) if is_dict else tuple(part for _, part in kept)
    if isinstance(item, spaces.Space):  # a list of pairs keeps its order
        return spaces.Dict(kept) if is_dict else spaces.Tuple(parts)
    return parts


def flat_box(space: gymnasium.Space[Any]) -> spaces.Box | None:
    """The space of the one array of numbers that Gymnasium makes of it; None if it makes none."""
    try:
        box = spaces.flatten_space(space)
    except Exception:
        return None
    is_array = isinstance(box, spaces.Box) and box.dtype.kind in "biuf" and 0 not in box.shape
    return box if is_array else None


def as_numbers(space: gymnasium.Space[Any]) -> gymnasium.Space[Any]:
    """A space in which Discrete and MultiDiscrete parts of few values are numbers, not one-hot."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict([(name, as_numbers(part)) for name, part in space.items()])
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([as_numbers(part) for part in space])
    if isinstance(space, spaces.MultiBinary):
        return spaces.Box(0, 1, space.shape, np.int8)
    if not isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        return space
    size = np.asarray(space.n if isinstance(space, spaces.Discrete) else space.nvec)
    if size.max() > FEW:
        return space
    low = np.asarray(space.start)
    return spaces.Box(low, low + size - 1, size.shape, np.int64)


def has_grid(space: gymnasium.Space[Any]) -> bool:
    """Is it a Box of a grid's shape, or a Dict or Tuple with a grid, as `grid_among` finds it?"""
    is_grid = isinstance(space, spaces.Box) and len(space.shape) in (2, 3)
    return is_grid or grid_among(space) is not None


def grid_among(space: gymnasium.Space[Any]) -> tuple[slice, tuple[int, ...], Any] | None:
    """Place, shape and dtype of the one grid in a flattened Dict or Tuple of integers; None if the
    numbers beside it are more than FEW, or of more than FEW values.
    """
    found, first, box = [], 0, flat_box(space)
    if box is None or box.dtype.kind not in "biu":
        return None
    for part in part_names(space).values():
        last = first + spaces.flatdim(part)
        if isinstance(part, spaces.Box) and len(part.shape) in (2, 3):
            found.append((slice(first, last), part.shape))
        first = last
    if len(found) != 1:
        return None
    ((place, shape),) = found
    low, high = (np.delete(bound, place) for bound in (box.low, box.high))
    height, width, *_ = as_grids(np.empty(shape)).shape
    if (
        len(low) > FEW
        or int(high.max(initial=0)) - int(low.min(initial=0)) >= FEW
        or are_planes((height, width, math.prod(shape) // (height * width) + len(low)))
    ):
        return None
    bounds = int(box.low.min()), int(box.high.max())
    kind = np.promote_types(*map(np.min_scalar_type, bounds))
    return place, shape, box.dtype if box.dtype.kind == "b" else kind


def rounded(obs: NDArray[Any], decimals: int) -> NDArray[Any]:
    """An observation as the key of --round: int64, or reals without -0.0, whose bytes differ."""
    wide = obs if obs.dtype.kind == "f" else obs.astype(np.int64)  # 255 to tens is 260
    return np.round(wide, decimals) + wide.dtype.type(0)


def _close(env):
    with contextlib.suppress(BaseException):  # nothing is wanted of it any more
        env.close()


def import_module(name: str, message: str) -> ModuleType:
    """The module that a user typed: the current folder's, if it has one, else as Python finds it.

    The program ends, with the message, where there is none, and where another one has its name.
    """
    if not all(part.isidentifier() for part in name.split(".")):
        fail(f"{message}: no module can have this name")
    top = name.partition(".")[0]
    sys.path.insert(0, os.getcwd())
    importlib.invalidate_caches()
    own = PathFinder.find_spec(top, sys.path[:1])
    with own_code():
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            fail(f"{message}: {error}")
    file = getattr(sys.modules[top], "__file__", None)
    if own and own.origin and own.origin != file:
        fail(f"{message}: Python's {top} is {file or 'its own'}; give {own.origin} another name")
    return module


def gymnasium_id(env_id: str) -> str:
    """The registered id that env_id means; of `module:Id-v0` the module is imported first.

    Modules are looked for in the current folder first. A name without its version means the newest
    one. An unknown name ends the program.
    """
    module, colon, name = env_id.strip().rpartition(":")
    if module:
        message = f"cannot import {module!r}, typed as Python imports it, from {os.getcwd()}"
        import_module(module, message)
    if name not in gymnasium.registry:
        specs = sorted(gymnasium.registry.values(), key=lambda spec: spec.version or 0)
        known = {plain(spec.id.rpartition("-v")[0]): spec.id for spec in specs}
        known |= {plain(spec.id): spec.id for spec in specs}
        own = "one that a module registers is typed module:Id-v0, as in ale_py:ALE/Pong-v5"
        name = task_meant(name, known, "environment", own)
    return f"{module}{colon}{name}"
