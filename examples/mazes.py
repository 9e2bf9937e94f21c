r"""Mazes that are drawn anew at each reset: a world that no episode met before.

    python examples/gb_dqn_gymnasium.py --env-id examples.mazes:Maze-v0 \
        --backup whole-graph --exploration frontier --num-levels 0

The reward is 1 at the goal, and 0 before. `info["level"]` names the maze, so that evaluations play
mazes that training never does.
"""

import gymnasium
import numpy as np

FLOOR, WALL, GOAL, PLAYER = range(4)
MOVES = ((-1, 0), (1, 0), (0, -1), (0, 1))  # up, down, left, right


class Maze(gymnasium.Env):
    """Observations uint8 [size, size]: floor, wall, goal or player in each cell."""

    action_space = gymnasium.spaces.Discrete(len(MOVES))

    def __init__(self, size=7):
        if size < 5 or size % 2 == 0:
            raise ValueError(f"Require an odd size of 5 or more, got {size}")
        self.observation_space = gymnasium.spaces.Box(FLOOR, PLAYER, (size, size), np.uint8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.cells = carve(self.observation_space.shape[0], self.np_random)
        free = np.argwhere(self.cells == FLOOR)
        start, goal = self.np_random.choice(len(free), 2, replace=False)
        self.cells[tuple(free[goal])] = GOAL
        level = self.cells.tobytes()  # the maze without the player
        self.cells[tuple(free[start])] = PLAYER
        return self.cells.copy(), {"level": level}

    def step(self, action):
        here = np.argwhere(self.cells == PLAYER)[0]
        there = tuple(here + MOVES[action])
        is_goal = self.cells[there] == GOAL
        if self.cells[there] != WALL:
            self.cells[tuple(here)], self.cells[there] = FLOOR, PLAYER
        return self.cells.copy(), float(is_goal), bool(is_goal), False, {}


def carve(size, rng):
    """A maze without loops, uint8 [size, size]: passages between cells of odd row and column."""
    cells = np.full((size, size), WALL, np.uint8)
    cells[1, 1], way = FLOOR, [(1, 1)]
    while way:
        row, column = way[-1]
        walls = [
            (down, right)
            for down, right in MOVES
            if 0 < row + 2 * down < size
            and 0 < column + 2 * right < size
            and cells[row + 2 * down, column + 2 * right] == WALL
        ]
        if not walls:
            way.pop()
            continue
        down, right = walls[rng.integers(len(walls))]
        way.append((row + 2 * down, column + 2 * right))
        cells[row + down, column + right] = cells[way[-1]] = FLOOR
    return cells


gymnasium.register("Maze-v0", Maze, max_episode_steps=100)
