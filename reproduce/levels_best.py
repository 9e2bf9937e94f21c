"""Best returns on held-out levels of MiniGrid, by breadth-first search over their states.

    python reproduce/levels_best.py --env-id DoorKey-6x6

One row of results/levels.csv. The search knows the level and its rules; no agent does.
"""

import time
from dataclasses import dataclass

import numpy as np
import tyro
from levels import LAST, row_of, same_of, write_rows

import gb_dqn_minigrid
from gbcore.run import one_line_errors
from gbcore.run.logger import versions


@dataclass
class Args:
    env_id: str = "DoorKey-6x6"
    seed: int = 1


def state_of(world):
    """All that differs between states of a level. Only doors change in place."""
    doors = [cell for cell in world.grid.grid if cell is not None and cell.type == "door"]
    of_doors = tuple((door, door.is_open, door.is_locked) for door in doors)
    return *world.agent_pos, world.agent_dir, world.carrying, tuple(world.grid.grid), of_doors


def enter(world, state):
    """Put a level into one of its states."""
    x, y, world.agent_dir, world.carrying, cells, doors = state
    world.agent_pos, world.grid.grid[:] = (x, y), cells
    for door, is_open, is_locked in doors:
        door.is_open, door.is_locked = is_open, is_locked
    world.step_count = 0


def fewest_steps(world):
    """Steps to the reward of a level from the state that it is in."""
    level, steps = [state_of(world)], 0
    met = set(level)
    while level:
        steps, following = steps + 1, []
        for state in level:
            for action in world.actions:
                enter(world, state)
                ahead = world.grid.get(*world.front_pos)
                if action == world.actions.toggle and getattr(ahead, "is_open", False):
                    continue  # to close a door opens no way
                _, reward, terminated, _, _ = world.step(action)
                if reward > 0:
                    return steps
                if not terminated and (new := state_of(world)) not in met:
                    met.add(new)
                    following.append(new)
        level = following
    raise ValueError("Require a level that can be solved")


@one_line_errors
def main():
    args = tyro.cli(Args, description=__doc__)
    flags = gb_dqn_minigrid.Args(env_id=args.env_id, seed=args.seed, num_levels=0)
    task, returns = gb_dqn_minigrid.task_of(args.env_id), []
    env = gb_dqn_minigrid.make_env(flags, task, np.random.default_rng(args.seed), held_out=True)
    begin = time.perf_counter()
    world = env.env.unwrapped
    for _ in range(LAST):
        env.reset()
        returns.append(1 - 0.9 * fewest_steps(world) / world.max_steps)  # MiniGrid's reward
    same = same_of(task, "search", flags, versions()["commit"], time.perf_counter() - begin)
    row = row_of(same, "", 0, returns)
    print(row)
    write_rows([row])


if __name__ == "__main__":
    main()
