r"""Sokoban: push every box onto a goal. A puzzle in an environment of one's own.

    python examples/gb_dqn_gymnasium.py --env-id examples.sokoban:Sokoban-v0 \
        --backup whole-graph --exploration frontier

The reward is 1 when all boxes are on goals, and 0 before. A box that is pushed into a corner stays
there, and the episode goes on to its time limit: nothing tells the agent.
"""

import gymnasium
import numpy as np

LEVELS = (  # wall #, goal ., box $, player @
    ("########", "#  .   #", "# $#$  #", "#  . @ #", "#  #   #", "########"),
    ("########", "###  . #", "#  $ # #", "# #$ @ #", "#  . ###", "########"),
    ("#######", "#. @ .#", "# $#$ #", "#  #  #", "# $ . #", "#     #", "#######"),
)
MOVES = ((-1, 0), (1, 0), (0, -1), (0, 1))  # up, down, left, right


class Sokoban(gymnasium.Env):
    """Observations uint8 [height, width, 4]: wall, goal, box and player of each cell."""

    action_space = gymnasium.spaces.Discrete(len(MOVES))

    def __init__(self, level=0):
        cells = np.array([list(row) for row in LEVELS[level]])
        self.start = np.stack([cells == kind for kind in "#.$@"], axis=-1).astype(np.uint8)
        self.observation_space = gymnasium.spaces.Box(0, 1, self.start.shape, np.uint8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.cells = self.start.copy()
        return self.cells.copy(), {}

    def step(self, action):
        wall, goal, box, player = np.moveaxis(self.cells, -1, 0)  # views
        here = np.argwhere(player)[0]
        there, beyond = tuple(here + MOVES[action]), tuple(here + 2 * np.array(MOVES[action]))
        if box[there] and not wall[beyond] and not box[beyond]:
            box[there], box[beyond] = 0, 1
        if not wall[there] and not box[there]:
            player[tuple(here)], player[there] = 0, 1
        is_solved = bool((box == goal).all())
        return self.cells.copy(), float(is_solved), is_solved, False, {}


gymnasium.register("Sokoban-v0", Sokoban, max_episode_steps=100)
