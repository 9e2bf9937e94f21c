r"""Small worlds, drawn anew at each reset. Every level can be solved.

    python examples/gb_dqn_gymnasium.py --env-id examples.worlds:Coins-v0 \
        --backup whole-graph --exploration frontier --num-levels 0

The reward is 1 at the end of a level that is solved, and 0 else. docs/levels.md says how many steps
agents need. One of your own is a subclass of `World` with two functions, `draw` and `move`; all of
its state is in its cells.
"""

import gymnasium
import numpy as np

FLOOR, WALL, GOAL, PLAYER = range(4)
MOVES = ((-1, 0), (1, 0), (0, -1), (0, 1))  # up, down, left, right


class World(gymnasium.Env):
    """Observations uint8 [8, 8]: the code of each cell, one of them PLAYER."""

    action_space = gymnasium.spaces.Discrete(len(MOVES))
    observation_space = gymnasium.spaces.Box(0, 15, (8, 8), np.uint8)  # the example takes 16 codes

    def draw(self, cells, free, rng):
        """Write a level into cells [8, 8]. free: all but the outer walls, in random order."""
        raise NotImplementedError

    def move(self, cells, there, code):
        """The player wants to step to the cell `there`, which has this code.

        Other cells may be changed. If the step is made, `act` moves the player, and leaves FLOOR.
        Returns reward, end, and whether it is made.
        """
        raise NotImplementedError

    def act(self, cells, action):
        """One step, in cells [8, 8]. Returns reward and end."""
        here = tuple(np.argwhere(cells == PLAYER)[0])
        there = tuple(np.add(here, MOVES[action]))
        reward, end, is_made = self.move(cells, there, cells[there])
        if is_made:
            cells[here], cells[there] = FLOOR, PLAYER
        return float(reward), bool(end)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        for _ in range(1_000):
            self.cells = np.full((8, 8), WALL, np.uint8)
            self.cells[1:-1, 1:-1] = FLOOR
            free = map(tuple, self.np_random.permutation(np.argwhere(self.cells == FLOOR)))
            self.draw(self.cells, list(free), self.np_random)
            if self.is_solvable():  # a level is the same wherever the player starts
                level = np.where(self.cells == PLAYER, FLOOR, self.cells).tobytes()
                return self.cells.copy(), {"level": level}
        raise ValueError(f"Require levels that can be solved, {type(self).__name__} drew none")

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


def put(cells, codes, free):
    """Write codes into as many of the free cells."""
    for code, cell in zip(codes, free[: len(codes)], strict=True):
        cells[cell] = code


class Tiles(World):
    """Three tiles are to be trodden in their order; a wrong one ends the episode."""

    TILES = 4, 5, 6

    def draw(self, cells, free, rng):
        put(cells, [PLAYER, *self.TILES, *6 * [WALL]], free)

    def move(self, cells, there, code):
        if code not in self.TILES:
            return 0, False, code == FLOOR
        is_next = code == min(tile for tile in self.TILES if tile in cells)
        reward = is_next and code == max(self.TILES)
        return reward, reward or not is_next, True


class Coins(World):
    """The goal gives a reward once all three coins are gathered; before, it ends the episode."""

    COIN = 4

    def draw(self, cells, free, rng):
        put(cells, [PLAYER, GOAL, *3 * [self.COIN], *8 * [WALL]], free)

    def move(self, cells, there, code):
        return code == GOAL and self.COIN not in cells, code == GOAL, code != WALL


class Block(World):
    """A block pushed onto a plate, where nobody walks, opens the gate to the room with the goal."""

    BLOCK, PLATE, GATE = 4, 5, 6

    def draw(self, cells, free, rng):
        cells[1:-1, 5] = WALL
        cells[rng.integers(1, 7), 5] = self.GATE
        cells[rng.integers(1, 7), 6] = GOAL
        put(cells, [PLAYER, self.BLOCK, self.PLATE], [cell for cell in free if cell[1] < 5])

    def move(self, cells, there, code):
        beyond = tuple(2 * np.array(there) - np.argwhere(cells == PLAYER)[0])
        if code == self.BLOCK and cells[beyond] in (FLOOR, self.PLATE):
            if cells[beyond] == self.PLATE:
                cells[cells == self.GATE] = FLOOR
            cells[beyond], code = self.BLOCK, FLOOR
        return code == GOAL, code == GOAL, code in (FLOOR, GOAL)


class Lever(World):
    """A lever, pulled by a step into it, opens the door to the room with the goal."""

    LEVER, DOOR = 4, 5

    def draw(self, cells, free, rng):
        column = int(rng.integers(3, 5))
        cells[1:-1, column] = WALL
        cells[rng.integers(1, 7), column] = self.DOOR
        put(cells, [PLAYER, self.LEVER, WALL], [cell for cell in free if cell[1] < column])
        put(cells, [GOAL, WALL, WALL], [cell for cell in free if cell[1] > column])

    def move(self, cells, there, code):
        if code == self.LEVER:
            cells[there] = WALL
            cells[cells == self.DOOR] = FLOOR
        return code == GOAL, code == GOAL, code in (FLOOR, GOAL)


class Guard(World):
    """A key opens a door, and a guard walks up and down: to meet him ends the episode."""

    KEY, DOOR, DOWN, UP = 4, 5, 6, 7

    def draw(self, cells, free, rng):
        cells[1:-1, 5] = WALL
        cells[rng.integers(1, 7), 5] = self.DOOR
        cells[rng.integers(1, 7), 6] = GOAL
        column = int(rng.integers(2, 4))
        room = [cell for cell in free if cell[1] < 5 and cell[1] != column]
        put(cells, [PLAYER, self.KEY, WALL], room)
        cells[rng.integers(1, 7), column] = self.DOWN

    def move(self, cells, there, code):
        opens = code == self.DOOR and self.KEY not in cells
        is_end = code in (GOAL, self.DOWN, self.UP)
        return code == GOAL, is_end, opens or code in (FLOOR, self.KEY, GOAL)

    def act(self, cells, action):
        reward, end = super().act(cells, action)
        row, column = np.argwhere(cells >= self.DOWN)[0]
        way = 1 if cells[row, column] == self.DOWN else -1
        way = way if 1 <= row + way <= 6 else -way
        is_met = cells[row + way, column] == PLAYER
        cells[row, column], cells[row + way, column] = FLOOR, self.DOWN if way > 0 else self.UP
        return reward, end or is_met


class Turner(Tiles):
    """As Tiles, but the player turns left or right, or steps ahead, as his code tells."""

    action_space = gymnasium.spaces.Discrete(3)
    WAYS = PLAYER, 7, 8, 9  # up, right, down, left

    def act(self, cells, action):
        here = tuple(np.argwhere(np.isin(cells, self.WAYS))[0])
        way = self.WAYS.index(cells[here])
        if action < 2:
            cells[here] = self.WAYS[(way + (-1, 1)[action]) % 4]
            return 0.0, False
        cells[here] = PLAYER
        result = super().act(cells, (0, 3, 1, 2)[way])
        cells[cells == PLAYER] = self.WAYS[way]
        return result


for world in (Tiles, Coins, Block, Lever, Guard, Turner):
    gymnasium.register(f"{world.__name__}-v0", world, max_episode_steps=100)
