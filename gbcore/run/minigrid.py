"""MiniGrid: its tasks, whose levels are drawn by their seeds, and the names that people type."""

import re
from typing import Any

import gymnasium
import numpy as np
from minigrid.core.constants import COLOR_TO_IDX, OBJECT_TO_IDX
from minigrid.minigrid_env import MiniGridEnv
from numpy.typing import NDArray

from gbcore.episode_graph import is_held_out
from gbcore.run.episodes import ELSEWHERE, Replayed, plain, task_meant
from gbcore.run.output import fail

EMPTY: tuple[int, int, int] = OBJECT_TO_IDX["empty"], 0, 0
_levels: dict[str, tuple[bool, bool]] = {}  # task -> are worlds held out? are goals named?


class Task(Replayed):
    """A MiniGrid task, whose levels are drawn by their seeds: all chance is theirs.

    A grid is uint8 [W, H, 3]: object, colour and state of each cell. It is observed. With a partial
    view it is the state's key, and the agent's last four 7x7 views are observed: [7, 7, 4 * 3], the
    newest last. A time limit (the task's own) is a truncation.

    A fifth of all worlds, a world being the first grid without the agent, is held out: training
    draws again when it meets one. Where a task has too few worlds to tell, a fifth of all seeds.

    Where levels change, and the mission says which of several objects counts ("go to the red
    door"), cells have a fourth number: 1 for what the mission names first, 2 for the second, else
    0. Verbs are not observed, nor are places ("on your left").

    Args:
        args: num_levels, view and seed: of the only level, or of all.
        rng: np.random.Generator that draws an episode's level.
        held_out: play held-out levels, in place of those of training?
    """

    obs: NDArray[np.uint8]
    env: Any
    args: Any
    rng: Any
    seed: int
    actions: list[int]

    def __init__(
        self, env_id: str, args: Any, rng: Any, held_out: bool = False,
        render_mode: str | None = None,
    ) -> None:  # fmt: skip
        try:
            env = gymnasium.make(env_id, disable_env_checker=True, render_mode=render_mode)
            env.reset(seed=0)  # some lack a package of theirs not before
        except gymnasium.error.Error as error:
            fail(f"cannot make {env_id}: {error}; {ELSEWHERE}")
        if not isinstance(env.unwrapped, MiniGridEnv):
            fail(f"cannot use {env_id}, which is no MiniGrid grid; {ELSEWHERE}")
        if not isinstance(env.action_space, gymnasium.spaces.Discrete):
            fail(f"cannot use {env_id}: its actions are {env.action_space}, not discrete")
        self.see: Any = env.unwrapped.gen_obs
        env.unwrapped.gen_obs = dict  # the view costs most of a step: leave it out
        self.env, self.args, self.rng = env, args, rng
        self.num_actions: int = int(env.action_space.n)
        self.held_out: bool = held_out
        self.by_world: bool = False
        self.names_goals: bool = False
        if args.num_levels != 1 and env_id not in _levels:  # an evaluation makes many
            self.names_goals = self._names_goals()
            _levels[env_id] = self._has_both_kinds(), self.names_goals
        if args.num_levels != 1:
            self.by_world, self.names_goals = _levels[env_id]

    def reset(self) -> NDArray[np.uint8]:
        """The first observation of an episode."""
        args, rng = self.args, self.rng
        if args.num_levels == 1:
            return self._begin(args.seed)
        if args.num_levels > 1 and not self.held_out:
            rng = np.random.default_rng([args.seed, int(rng.integers(args.num_levels))])
        while True:
            obs = self._begin(int(rng.integers(2**31)))
            if self._is_held_out() == self.held_out:
                return obs

    def _has_both_kinds(self):
        """Are there worlds that are held out, and others?"""
        self.by_world, result = True, set()
        for seed in range(200):
            self._begin(seed)
            result.add(self._is_held_out())
            if len(result) == 2:
                return True
        return False

    def _names_goals(self):
        """Do missions differ, in levels with objects of a kind that they name, of other colours?"""
        missions, has_others = set(), False
        for seed in range(50):
            self._begin(seed)
            kinds, colours, _ = np.moveaxis(self.grid, 2, 0)
            missions.add(mission := self.env.unwrapped.mission)
            for kind, colour in named_in(mission):
                has_others |= colour is not None and (colours[kinds == kind] != colour).any()
            if has_others and len(missions) > 1:
                return True
        return False

    def _is_held_out(self):
        """Is the level that has just begun?"""
        world = self.grid.copy()
        world[world[..., 0] == OBJECT_TO_IDX["agent"], :3] = EMPTY
        return is_held_out(world.tobytes() if self.by_world else str(self.seed).encode())

    def _begin(self, seed):
        self.seed, self.actions = seed, []
        self._views = [np.zeros((7, 7, 3 + self.names_goals), np.uint8)] * 4
        self.env.reset(seed=seed)
        self._named = named_in(self.env.unwrapped.mission) if self.names_goals else None
        return self._observe()

    def _observe(self):
        world = self.env.unwrapped
        cells = [EMPTY if cell is None else cell.encode() for cell in world.grid.grid]
        grid = np.array(cells, np.uint8).reshape(world.height, world.width, 3).swapaxes(0, 1).copy()
        grid[tuple(world.agent_pos)] = OBJECT_TO_IDX["agent"], COLOR_TO_IDX["red"], world.agent_dir
        self.grid: NDArray[np.uint8] = with_marks(grid, self._named)
        self.obs = self.grid
        self.key: NDArray[np.uint8] | None = None
        if self.args.view == "partial":
            self._views = [*self._views[1:], with_marks(self.see()["image"], self._named)]
            self.obs = np.concatenate(self._views, axis=2)
            self.key = self.grid.reshape(-1)
        return self.obs

    def step(self, action: int) -> tuple[NDArray[np.uint8], float, bool, bool]:
        """Observation, the environment's own reward, terminated, truncated."""
        self.actions.append(action)
        _, reward, terminated, truncated, _ = self.env.step(action)
        return self._observe(), float(reward), terminated, truncated and not terminated

    def render(self) -> Any:
        """uint8 [height, width, 3]."""
        return self.env.render()


def named_in(mission: str) -> list[tuple[int, int | None]]:
    """Codes of the objects and colours that a mission names, in its order; None for any colour."""
    words = re.findall("[a-z]+", mission)
    return [
        (OBJECT_TO_IDX[word], COLOR_TO_IDX.get(before))
        for before, word in zip(["", *words], words, strict=False)
        if word in OBJECT_TO_IDX
    ]


def with_marks(
    cells: NDArray[np.uint8], named: list[tuple[int, int | None]] | None
) -> NDArray[np.uint8]:
    """Cells [W, H, 3] -> [W, H, 4], the last number 1 for what is named first; as they are if None.

    Of more than two only the first two count.
    """
    if named is None:
        return cells
    marks = np.zeros(cells.shape[:2], np.uint8)
    for number, (kind, colour) in reversed([*enumerate(named[:2], 1)]):
        is_colour = colour is None or cells[..., 1] == colour
        marks[(cells[..., 0] == kind) & is_colour] = number
    return np.dstack([cells, marks])


def task_of(env_id: str) -> str:
    """Registered id of a task, from any spelling of it that people use; the latest version."""
    if env_id.strip() in gymnasium.registry:
        return env_id.strip()
    names = [name for name in gymnasium.registry if name.startswith(("MiniGrid-", "BabyAI-"))]
    tasks = {}
    for name in sorted(names):  # BabyAI's first: where both have a name it is MiniGrid's
        for key in (plain(name), plain(name.rpartition("-v")[0])):
            tasks[key] = tasks[re.sub("^(minigrid|babyai)", "", key)] = name
    return task_meant(env_id.strip(), tasks, "task")
