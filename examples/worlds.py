"""Small worlds, drawn anew at each reset: copy one for yours. Every level can be solved.

    python examples/gb_dqn_gymnasium.py --env-id examples.worlds:Coins-v0 \\
        --backup whole-graph --exploration frontier --num-levels 0

The reward is 1 at the end of a level that is solved, and 0 else. docs/levels.md says how many steps
agents need. A world has two functions, `draw` and `move`; all of its state is in its cells.
"""

import gymnasium
import numpy as np

FLOOR, WALL, GOAL, PLAYER = range(4)
MOVES = ((-1, 0), (1, 0), (0, -1), (0, 1))  # up, down, left, right


class World(gymnasium.Env):
    """Observations uint8 [8, 8]: the code of each cell, of which PLAYER is one."""

    action_space = gymnasium.spaces.Discrete(len(MOVES))
    observation_space = gymnasium.spaces.Box(0, 15, (8, 8), np.uint8)

    def draw(self, cells, free, rng):
        """Write a level into cells [8, 8]. free: all but the outer walls, in random order."""
        raise NotImplementedError

    def move(self, cells, here, there, content):
        """The player wants to step from here to there, where the content is this.

        Writes into cells what else changes. Returns reward, end, and whether the step is made.
        """
        raise NotImplementedError

    def act(self, cells, action):
        """One step, in cells [8, 8]. Returns reward and end."""
        here = tuple(np.argwhere(cells == PLAYER)[0])
        there = tuple(np.add(here, MOVES[action]))
        reward, end, is_made = self.move(cells, here, there, cells[there])
        if is_made:
            cells[here], cells[there] = FLOOR, PLAYER
        return float(reward), bool(end)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        while True:
            self.cells = np.full((8, 8), WALL, np.uint8)
            self.cells[1:-1, 1:-1] = FLOOR
            free = map(tuple, self.np_random.permutation(np.argwhere(self.cells == FLOOR)))
            self.draw(self.cells, list(free), self.np_random)
            if self.is_solvable():
                level = np.where(self.cells == PLAYER, FLOOR, self.cells).tobytes()
                return self.cells.copy(), {"level": level}

    def step(self, action):
        reward, end = self.act(self.cells, action)
        return self.cells.copy(), reward, end, False, {}

    def is_solvable(self):
        """By breadth-first search."""
        met, waiting = {self.cells.tobytes()}, [self.cells]
        for cells in waiting:
            for action in range(self.action_space.n):
                after = cells.copy()
                reward, end = self.act(after, action)
                if reward > 0:
                    return True
                if not end and after.tobytes() not in met:
                    met.add(after.tobytes())
                    waiting.append(after)
        return False


class Tiles(World):
    """Three tiles are to be trodden in their order; a wrong one ends the episode."""

    TILES = 4, 5, 6

    def draw(self, cells, free, rng):
        for code, cell in zip((PLAYER, *self.TILES), free, strict=False):
            cells[cell] = code
        for cell in free[4:10]:
            cells[cell] = WALL

    def move(self, cells, here, there, content):
        if content not in self.TILES:
            return 0, False, content == FLOOR
        is_next = content == min(tile for tile in self.TILES if tile in cells)
        is_last = content == max(self.TILES)
        return is_next and is_last, is_last or not is_next, True


class Coins(World):
    """The goal gives a reward once all three coins are gathered; before, it ends the episode."""

    COIN = 4

    def draw(self, cells, free, rng):
        codes = PLAYER, GOAL, *3 * [self.COIN], *8 * [WALL]
        for code, cell in zip(codes, free, strict=False):
            cells[cell] = code

    def move(self, cells, here, there, content):
        return content == GOAL and self.COIN not in cells, content == GOAL, content != WALL


class Block(World):
    """A block that is pushed onto a plate opens the gate to the room with the goal."""

    BLOCK, PLATE, GATE = 4, 5, 6

    def draw(self, cells, free, rng):
        cells[1:-1, 5], cells[rng.integers(1, 7), 5] = WALL, self.GATE
        cells[rng.integers(1, 7), 6] = GOAL
        room = [cell for cell in free if cell[1] < 5]
        for code, cell in zip((PLAYER, self.BLOCK, self.PLATE), room, strict=False):
            cells[cell] = code

    def move(self, cells, here, there, content):
        beyond = tuple(2 * np.array(there) - here)
        if content == self.BLOCK and cells[beyond] in (FLOOR, self.PLATE):
            if cells[beyond] == self.PLATE:
                cells[cells == self.GATE] = FLOOR
            cells[beyond], content = self.BLOCK, FLOOR
        return content == GOAL, content == GOAL, content in (FLOOR, GOAL)


class Lever(World):
    """A lever, pulled by a step into it, opens the door to the room with the goal."""

    LEVER, DOOR = 4, 5

    def draw(self, cells, free, rng):
        wall = int(rng.integers(3, 5))
        left = [cell for cell in free if cell[1] < wall]
        right = [cell for cell in free if cell[1] > wall]
        cells[1:-1, wall], cells[rng.integers(1, 7), wall] = WALL, self.DOOR
        codes = PLAYER, self.LEVER, WALL, GOAL, WALL, WALL
        for code, cell in zip(codes, left[:3] + right[:3], strict=True):
            cells[cell] = code

    def move(self, cells, here, there, content):
        if content == self.LEVER:
            cells[there], cells[cells == self.DOOR] = WALL, FLOOR
        return content == GOAL, content == GOAL, content in (FLOOR, GOAL)


class Guard(World):
    """A key opens a door, and a guard walks up and down: to meet him ends the episode."""

    KEY, DOOR, DOWN, UP = 4, 5, 6, 7

    def draw(self, cells, free, rng):
        cells[1:-1, 5], cells[rng.integers(1, 7), 5] = WALL, self.DOOR
        cells[rng.integers(1, 7), 6] = GOAL
        column = int(rng.integers(2, 4))
        room = [cell for cell in free if cell[1] < 5 and cell[1] != column]
        for code, cell in zip((PLAYER, self.KEY, WALL), room, strict=False):
            cells[cell] = code
        cells[rng.integers(1, 7), column] = self.DOWN

    def move(self, cells, here, there, content):
        opens = content == self.DOOR and self.KEY not in cells
        is_end = content in (GOAL, self.DOWN, self.UP)
        return content == GOAL, is_end, opens or content in (FLOOR, self.KEY, GOAL)

    def act(self, cells, action):
        reward, end = super().act(cells, action)
        row, column = np.argwhere(cells >= self.DOWN)[0]
        way = 1 if cells[row, column] == self.DOWN else -1
        way = way if 1 <= row + way <= 6 else -way
        is_met = cells[row + way, column] == PLAYER
        cells[row, column], cells[row + way, column] = FLOOR, self.DOWN if way > 0 else self.UP
        return reward, end or is_met


for world in (Tiles, Coins, Block, Lever, Guard):
    gymnasium.register(f"{world.__name__}-v0", world, max_episode_steps=100)
