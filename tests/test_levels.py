"""Levels that change: EpisodeGraph, FirstTries, held-out levels, and runs on them."""

import itertools
from collections import Counter

import evaluate
import naive
import numpy as np
import pytest
import torch
from conftest import as_bytes, command, interpreted, jitted, result_of, short_run
from gbtools.runs import read_rows
from minigrid.core.constants import OBJECT_TO_IDX

import gb_dqn_minigrid
import gbcore.run as gb
from examples import gb_dqn_gymnasium
from gbcore import EpisodeGraph, FirstTries, FrontierEpisodes, FrontierPlanner, TransitionGraph
from gbcore.episode_graph import is_held_out
from gbcore.first_tries import NO_OP_TRIES, LevelFrontier, cell_contents, place_of

ROBOT = OBJECT_TO_IDX["agent"]
GAMMA = 0.9


class Corridor:
    """Cells 0 to n - 1; action 1 goes right, 0 left, 2 stays. The last cell gives 1 and ends."""

    def __init__(self, n, limit):
        self.n, self.limit = n, limit

    def reset(self):
        self.cell, self.time = 0, 0
        return np.array([self.cell], np.int64)

    def step(self, action):
        self.time += 1
        self.cell = max(0, self.cell + (0, 1, 0)[action] - (action == 0))
        is_end = self.cell == self.n - 1
        return np.array([self.cell], np.int64), float(is_end), is_end, self.time >= self.limit


def network_of(*values):
    """A network that gives every state these values."""
    return lambda obs: np.tile(np.float32(values), (len(obs), 1))


stuck = network_of(0.5, 0.7, 0.8)  # would rather stay than go, and go rather than turn back


def test_an_episode_leaves_a_place_where_the_network_stays_for_ever():
    """Its actions are greedy on values of the whole graph of what it has seen."""
    env, episode = Corridor(6, limit=60), EpisodeGraph(stuck, num_actions=3, gamma=GAMMA)
    obs, over, seen = env.reset(), False, naive.NaiveGraph(3)
    leaf_q = stuck(range(6))
    assert leaf_q[0].argmax() == 2  # greedy on the network stays
    while not over:
        action, state = int(episode.act(obs[None])[0]), seen.node(obs)
        rule = naive.graph_values(seen, leaf_q, GAMMA, 0), leaf_q
        q = [naive.graph_action_value(seen, *rule, state, a, GAMMA, 0) for a in range(3)]
        assert action == np.argmax(q)
        obs, reward, is_end, is_cut = env.step(action)
        over = is_end or is_cut
        episode.observe([action], [reward], obs[None], [is_end], [over])
        seen.add(state, action, reward, seen.node(obs), is_end)
    assert is_end


def play(episode, lengths):
    """Actions of episodes that are played at once, in corridors of these lengths: by their ids."""
    envs = {i: Corridor(length, limit=25) for i, length in lengths.items()}
    obs, played = {i: env.reset() for i, env in envs.items()}, {i: [] for i in envs}
    while running := list(obs):
        actions = episode.act(np.stack([*obs.values()]), running).tolist()
        steps = [envs[i].step(action) for i, action in zip(running, actions, strict=True)]
        after, rewards, ends, cuts = map(list, zip(*steps, strict=True))
        over = np.logical_or(ends, cuts)
        episode.observe(actions, rewards, np.stack(after), ends, over, running)
        for i, action in zip(running, actions, strict=True):
            played[i].append(action)
        obs = {i: x for i, x, is_over in zip(running, after, over, strict=True) if not is_over}
    return played


def test_episodes_share_nothing_and_leave_nothing():
    at_once, in_turn = (EpisodeGraph(stuck, num_actions=3, gamma=GAMMA) for _ in range(2))
    lengths, alone = {0: 3, 1: 5, 2: 4, 3: 5}, {}
    together = play(at_once, lengths)
    for i, length in lengths.items():
        alone |= play(in_turn, {i: length})
    assert together == alone
    assert together[1] == together[3]  # the second of two alike learns nothing from the first
    assert at_once.values.graph.num_transitions == 0
    assert at_once.values.graph.num_nodes == 0


# --- First tries ---

FLOOR, WALL, LAVA, AGENT = 0, 1, 2, 9


def room(agent, lava=(), turned=0):
    """uint8 [4, 4, 1]: floor, lava and the agent."""
    grid = np.full((4, 4, 1), FLOOR, np.uint8)
    for cell in lava:
        grid[cell] = LAVA
    grid[agent] = AGENT + turned
    return grid


def make_first_tries(num_actions=2, agent=()):
    graph = TransitionGraph(num_actions, (4, 4, 1))
    planner = FrontierPlanner(graph)
    return graph, planner, LevelFrontier(planner, FirstTries(num_actions, agent))


def step(graph, tries, obs, action, after, reward=0.0, terminated=False):
    node, next_node = graph.node(obs), graph.node(after)
    graph.add(node, action, reward, next_node, terminated)
    tries.observe(obs, node, action, reward, after, next_node, terminated)
    return next_node


class NaiveFirstTries:
    """FirstTries by its definition, of rooms and 4 actions: a list of all first tries, no sums."""

    def __init__(self):
        self.history, self.met, self.tried = [], {}, set()

    def begin(self, obs):
        self.first, self.found = obs, Counter()
        self.met[obs.tobytes()] = []

    def observe(self, obs, action, reward, after, terminated):
        """The worths of a state that is new, else None."""
        contexts, gain, worths = self.met[obs.tobytes()], float(reward > 0), None
        if after.tobytes() not in self.met and not terminated:
            changed = map(tuple, np.argwhere((obs != after).any(axis=2)))
            place = min(changed, key=lambda cell: np.count_nonzero(after == after[cell]))
            self.found[place] += 1
            number = self.found[place]
            gain = max(gain, 1 / number)
            beside = self.met[after.tobytes()] = self.contexts(after, *place)
            worths = [self.worth(beside, a) / number**0.5 for a in range(4)]
        if (obs.tobytes(), action) not in self.tried:
            self.history.append((contexts, action, gain))
        self.tried.add((obs.tobytes(), action))
        return worths

    def contexts(self, obs, row, column):
        """Eight tuples (kind, content, ...)."""
        has_changed, result = np.sum((obs != self.first).any(axis=2)) > 2, []
        for side, (down, right) in enumerate([(-1, 0), (1, 0), (0, -1), (0, 1)]):
            x, y = row + down, column + right
            content = int(obs[row, column, 0])
            beside = int(obs[x, y, 0]) if 0 <= x < 4 and 0 <= y < 4 else None
            result += [(side, content, beside), (4 + side, content, beside, has_changed)]
        return result

    def gains(self, context, action):
        return [gain for known, made, gain in self.history if made == action and context in known]

    def explained(self, context, action):
        kind = {one for known, *_ in self.history for one in known if one[:2] == context[:2]}
        gains = [self.gains(one, action) for one in kind]
        return sum(sum(of_one) ** 2 / len(of_one) for of_one in gains if of_one)

    def worth(self, contexts, action):
        explained = [self.explained(one, action) for one in contexts]
        are_best = [share > max(explained) - 1e-9 for share in explained]
        gains = [self.gains(one, action) for one in itertools.compress(contexts, are_best)]
        return np.prod([(1 + sum(g)) / (1 + len(g)) for g in gains]) ** (1 / len(gains))


def test_worths_are_those_of_their_definition():
    rng = np.random.default_rng(0)
    graph, planner, tries = make_first_tries(num_actions=4)
    twin, num_compared = NaiveFirstTries(), 0
    for _ in range(40):
        lava, at, turned = [tuple(rng.integers(4, size=2)) for _ in range(3)], (0, 0), 0
        obs = room(at, lava)
        is_new = obs.tobytes() not in twin.met
        tries.begin(start := graph.node(obs))
        twin.begin(obs)
        planner.plan()
        assert not is_new or (planner.action_values(start) == 1).all()
        for time in range(8):
            action, terminated = int(rng.integers(4)), False
            if action == 2:  # clears lava, once some steps were made
                lava = lava[1:] if time > 2 else lava
            elif action == 3:
                turned = 1 - turned
            else:  # 0 goes right, 1 down
                at = (min(3, at[0] + action), min(3, at[1] + 1 - action))
                terminated = at in lava
            after, reward = room(at, lava, turned), float(rng.random() < 0.2)
            node = step(graph, tries, obs, action, after, reward, terminated)
            worths = twin.observe(obs, action, reward, after, terminated)
            if worths is not None:
                planner.plan()
                np.testing.assert_allclose(planner.action_values(node), worths)
                num_compared += min(worths) < 1
            if terminated:
                break
            obs = after
    assert num_compared > 50


def test_a_step_from_a_state_that_was_not_met_is_no_first_try():
    graph, _, tries = make_first_tries()
    graph.nodes(np.random.default_rng(0).integers(9, 99, (graph.capacity, 4, 4, 1), np.uint8))
    step(graph, tries, room((0, 0)), 0, room((0, 1)))  # an id beyond those there was room for
    assert not tries.first_tries._tries.any()


def test_no_ops_are_what_never_changed_anything_beside_the_like():
    """0 steps down, not into lava; 1 does nothing, 2 costs, and 3 ends the episode."""
    graph, _, tries = make_first_tries(4, agent=[(0, AGENT)])
    q = np.float32([[1, 1, 1, 1], [2, -2, 2, 2]])
    seen = np.array(
        [room((1, 1)), room((1, 1), [(2, 1)]), room((1, 1), [(1, 2)]), room((0, 0)) * 0]
    )
    for number, far in enumerate([(3, 0), (3, 2), (3, 3), (0, 3), (0, 0)], 1):
        for lava in ([far], [far, (2, 1)]):
            obs = room((1, 1), lava)
            tries.begin(graph.node(obs))
            step(graph, tries, obs, 0, obs if len(lava) > 1 else room((2, 1), lava))
            for action, reward in ((1, 0.0), (1, 0.0), (2, -0.1), (3, 0.0)):  # 1 twice: one try
                step(graph, tries, obs, action, obs, reward, terminated=action == 3)
        values = tries.first_tries.without_no_ops(q[[0, 1, 0, 0]], seen)
        is_no_op = number == NO_OP_TRIES
        assert values.tolist() == [
            [1, 1 - is_no_op, 1, 1], [2 - 2 * is_no_op, -2, 2, 2],
            [1, 1, 1, 1],  # lava to the right was never met, and nothing tells the sides apart
            [1, 1, 1, 1],  # no agent
        ]  # fmt: skip


def test_an_evaluation_doubts_what_was_never_worth_a_try():
    graph, _, tries = make_first_tries()
    for number in range(3):  # three levels in which action 1, into lava below, gained nothing
        lava = [(2, 1), (3, number)]
        start, beside = room((0, 0), lava), room((1, 1), lava)
        tries.begin(graph.node(start))
        step(graph, tries, start, 0, beside)
        step(graph, tries, beside, 1, room((2, 1), lava), terminated=True)
    known = as_bytes(tries.first_tries)
    start, beside = (room(at, [(2, 1), (0, 3)])[None] for at in ((0, 0), (1, 1)))
    for first_tries, found in ((None, 1), (tries.first_tries, 0)):
        episode = EpisodeGraph(network_of(0.5, 0.52), 2, GAMMA, first_tries=first_tries)
        assert episode.act(start) == [1]  # in the first state all is worth a try
        episode.observe([1], [0.0], beside, [False], [False])
        assert episode.act(beside) == [found]
    leaves = episode.values.leaves
    assert leaves.q[:2].ravel() == pytest.approx([0.5, 0.52, 0.5, 0.52 * (1 - 0.15 * 0.75)])
    assert leaves.worths == {}
    assert as_bytes(tries.first_tries) == known


@pytest.mark.parametrize("values", [(0.5, 0.05), (-10.0, -19.0)])
def test_what_is_doubted_is_tried_before_what_leads_nowhere(values):
    first_tries, start, inside = FirstTries(2), room((0, 0)), room((1, 1))
    _, contexts = first_tries.contexts_after(cell_contents(start), start, inside)
    for _ in range(9):
        first_tries.learn(first_tries.rows_of(contexts), 1, 0.0)  # in vain
    episode = EpisodeGraph(network_of(*values), 2, 0.95, first_tries=first_tries)
    actions = [0]
    episode.act(start[None])
    for _ in range(60):  # action 0 stays
        reward = min(values[0], 0) / 10
        episode.observe(actions[-1:], [reward], inside[None], [False], [False])
        actions.append(int(episode.act(inside[None])[0]))
    assert 1 in actions


@pytest.mark.parametrize(
    ("before", "after", "place"),
    [
        (((1, 1), (3, 3)), ((1, 2), (3, 2)), 6),  # both move, alike rare
        (((1, 1), (0, 3)), ((1, 2), (0, 2)), 6),  # the guard comes beside the agent
        (((1, 1), (3, 3)), ((1, 1), (3, 2)), 5),  # a step into a wall: the agent's own cell
        (((1, 1), (3, 3)), ((1, 1), (3, 3)), 5),
    ],
)
def test_of_a_known_agent_the_place_is_near(before, after, place):
    first_tries, grids = FirstTries(2, agent=[(0, AGENT)]), []
    for agent, guard in (before, after):
        grids.append(room(agent))
        grids[-1][guard] = 7
    cells = [*map(cell_contents, grids)]
    agent = np.ravel_multi_index(after[0], (4, 4))
    assert place_of(*cells, int(agent)) == place
    assert first_tries.contexts_after(cells[0], *grids)[0] == place


@pytest.mark.parametrize("values", [(0.5, np.nan), (np.nan, 0.5), (-1.0, np.nan)])
def test_an_evaluation_takes_no_nan_for_the_best_value(values):
    episode = EpisodeGraph(network_of(*values), 2, 0.95)
    assert episode.act(np.zeros((1, 2), np.float32)) == np.nanargmax(values)


def test_planes_have_the_contexts_and_no_ops_of_the_grid():
    grids = np.array([room(at, [(2, 1), (0, 3)]) for at in ((1, 1), (1, 2), (3, 3))])[..., 0]
    last = (grids[..., None] == np.array([LAVA, AGENT, WALL])).astype(np.uint8)
    first = np.moveaxis(last, 3, 1)
    contexts = []
    for before, after, _ in (last, first):
        cells = cell_contents(before), cell_contents(after)
        assert (cells[0].shape, place_of(*cells)) == ((4, 4), 6)
        contexts.append(FirstTries(2).contexts_after(cells[0], before, after))
    assert contexts[0] == contexts[1]
    assert cell_contents(first, num_axes=1).shape == (3, 4, 4)
    assert np.array_equal(*(cell_contents(np.full((2, 2), zero)) for zero in (0.0, -0.0)))
    q = np.ones((3, 2), np.float32)
    for obs, agent, values in (
        (grids, [(0, AGENT)], [[1, 0], [1, 1], [1, 1]]),
        (first, [(1, 1)], [[1, 0], [1, 1], [1, 1]]),
        (first, [], q.tolist()),
    ):
        tries = FirstTries(2, agent)
        for number in range(NO_OP_TRIES + 1):
            expected = values if number == NO_OP_TRIES else q.tolist()
            assert tries.without_no_ops(q, obs).tolist() == expected
            episode = EpisodeGraph(network_of(0.5, 0.7), 2, GAMMA, first_tries=tries)
            assert episode.act(obs[:1]) == [int(expected[0][1])]  # as an evaluation chooses
            tries.learn_change(obs[0], 1, False)
        assert tries.without_no_ops(q[:0], obs[:0]).shape == (0, 2)


@pytest.mark.parametrize(
    ("who_succeeds", "last"), [("nobody", 0.4), ("frontier", 0.8), ("others", 0.0)]
)
def test_the_share_follows_the_rewards_of_both_kinds_of_episode(who_succeeds, last):
    graph = TransitionGraph(2, (4, 4, 1))
    frontier = FrontierEpisodes(graph, share=0.8, first_tries=FirstTries(2))
    rng, shares, success = np.random.default_rng(1), [], {True: 1.0, False: 0.0}
    for episode in range(1_000):
        obs, after = room((0, 0), [(3, episode % 4)]), room((0, 1), [(3, episode % 4)])
        node = graph.node(obs)
        frontier.act(node, rng)
        shares.append(frontier.share)
        wanted = (1 - success[False]) * (1 + success[True]) / 2
        assert frontier.share == pytest.approx(0.8 * wanted, rel=1e-12)
        next_node, kind = graph.node(after), frontier.is_frontier
        reward = float(who_succeeds == ("frontier" if kind else "others"))
        graph.add(node, 0, reward, next_node, True)
        frontier.observe(obs, node, 0, reward, after, next_node, True)
        frontier.end_episode()
        success[kind] += (reward - success[kind]) / 20
    assert (shares[0], shares[-1]) == (0.8, pytest.approx(last, abs=0.02))


# --- Levels of MiniGrid ---


def make_env(task, rng=0, held_out=False, **flags):
    args = gb_dqn_minigrid.Args(**{"num_levels": 0} | flags)
    name = gb_dqn_minigrid.task_of(task)
    return gb_dqn_minigrid.make_env(args, name, np.random.default_rng(rng), held_out=held_out)


def worlds(task, seed, num, held_out=False, **flags):
    """First grids without the agent, of so many episodes."""
    env, found = make_env(task, seed, held_out, seed=seed, **flags), set()
    for _ in range(num):
        world = env.reset().copy()
        world[world[..., 0] == ROBOT] = 1, 0, 0
        found.add(world.tobytes())
    return found


@interpreted
@pytest.mark.parametrize("task", ["DoorKey-6x6", "LavaCrossingS9N2"])
def test_held_out_worlds_are_never_trained_on(task):
    training, held_out = worlds(task, 1, 150), worlds(task, 1, 150, held_out=True)
    assert (len(training) > 20, len(held_out) > 3) == (True, True)
    assert not training & (held_out | worlds(task, 2, 150, held_out=True))  # of any run's seed


@interpreted
def test_n_levels_are_n_and_those_of_the_seed():
    assert len(worlds("LavaCrossingS9N2", 1, 200, num_levels=5)) == 5
    one, other, again = (worlds("FourRooms", seed, 60, num_levels=5) for seed in (1, 2, 1))
    assert one == again
    assert not one & other
    assert len(worlds("DoorKey-6x6", 3, 20, held_out=True, num_levels=1)) == 1


@interpreted
@pytest.mark.parametrize(
    ("task", "left_out", "least"),
    [
        ("MiniGrid-Empty-Random-5x5-v0", "mission", 5),
        ("MiniGrid-Dynamic-Obstacles-5x5-v0", "mission", 0),  # -1 is no reward to look for
        ("examples.mazes:Maze-v0", "", 5),
    ],
)
def test_a_level_comes_again_until_an_episode_meets_a_reward(task, left_out, least):
    """So a run that is interrupted anywhere, too."""
    args = gb_dqn_gymnasium.Args(num_levels=0, level_tries=3, leave_out=left_out)
    rng, acts = np.random.default_rng(3), np.random.default_rng(4)
    env, seeds, is_met, in_a_row = gb_dqn_gymnasium.make_env(args, task, rng), [], [], 1
    for episode in range(40):
        env.reset()
        seeds.append(env.seed)
        rewards, over = [], False
        while not over:
            _, reward, *ends = env.step(int(acts.integers(min(env.num_actions, 4))))
            rewards, over = [*rewards, reward], any(ends)
            if episode % 7 == 0 and len(env.actions) % 5 == 0:  # a run goes on here
                saved, env = env.state(), gb_dqn_gymnasium.make_env(args, task, rng)
                env.restore(saved)
        is_met.append(max(rewards) > 0)
    assert least <= sum(is_met) < 35
    for (seed, next_seed), met in zip(itertools.pairwise(seeds), is_met, strict=False):
        assert (next_seed == seed) == (not met and in_a_row < 3)
        in_a_row = in_a_row + 1 if next_seed == seed else 1
    held_out = gb_dqn_gymnasium.make_env(args, task, rng, held_out=True)
    assert len({held_out.reset() is not None and held_out.seed for _ in range(20)}) == 20


@interpreted
def test_levels_that_differ_in_the_middle_of_a_large_array_are_not_one():
    levels, walls = [], np.zeros((50, 40, 40), np.uint8)
    walls[:, 20, 20] = np.arange(50)
    for level in walls:
        levels.append((is_held_out(level), is_held_out({"walls": (level,)})))
    assert len(set(levels)) == 4


def test_a_level_with_another_repr_in_each_process_is_refused():
    for level in ({1}, (frozenset("ab"), 2), {"walls": [object()]}):
        with pytest.raises(ValueError, match="Require a level with a repr that is always the same"):
            is_held_out(level)


def test_where_all_worlds_are_alike_seeds_are_held_out():
    seeds = []
    for held_out in (False, True):
        env = make_env("Empty-5x5", held_out=held_out)
        seeds.append({env.reset() is not None and env.seed for _ in range(100)})
    assert len(seeds[1]) > 50
    assert not seeds[0] & seeds[1]


def test_the_share_of_starts_that_training_met_is_counted():
    args, task = gb_dqn_minigrid.Args(num_levels=0), "MiniGrid-Empty-Random-6x6-v0"
    env = make_env(task, args.seed, held_out=True)
    starts = np.array([env.reset() for _ in range(100)])
    graph = TransitionGraph(env.num_actions, env.obs.shape, env.obs.dtype)
    graph.nodes(starts[:5])
    share = np.mean([graph.find(obs) >= 0 for obs in starts])
    assert gb.starts_met(gb_dqn_minigrid.make_env, args, task, graph) == share > 0.05
    args.num_levels = 1
    assert gb.starts_met(gb_dqn_minigrid.make_env, args, task, graph) is None


@pytest.mark.parametrize("view", ["grid", "partial"])
@pytest.mark.parametrize("task", ["GoToDoor-6x6", "PutNear-6x6-N2"])
def test_what_a_mission_names_is_marked(task, view):
    """By the environment's own word: PutNear knows both places, GoToDoor one."""
    env = make_env(task, view=view)
    for _ in range(20):
        obs, world = env.reset(), env.env.unwrapped
        first = getattr(world, "move_pos", world.target_pos)
        marks = {tuple(cell): mark for cell, mark in zip(*marked(env.grid), strict=True)}
        assert marks == {tuple(world.target_pos): 2, tuple(first): 1}
        assert obs.shape[2] == (4 if view == "grid" else 16)
        num_seen = len(marked(obs[..., -4:])[1])
        assert num_seen == sum(view == "grid" or world.in_view(*cell) for cell in marks)
        network = gb_dqn_minigrid.make_network(env.args, obs.shape, env.num_actions)
        unmarked = np.where(np.arange(obs.shape[2]) % 4 == 3, 0, obs)
        values = network(torch.from_numpy(np.stack([obs, unmarked]).astype(np.uint8)))
        assert torch.equal(*values) == (num_seen == 0)


def marked(cells):
    """Cells [n, 2] whose last number is not 0, and these numbers."""
    marks = cells[..., 3]
    return np.argwhere(marks), marks[marks > 0]


@pytest.mark.parametrize(
    ("task", "num_levels", "depth"),
    [("UnlockPickup", 0, 3), ("GoToDoor-6x6", 1, 3), ("GoToDoor-6x6", 3, 4), ("GoToLocal", 0, 4)],
)
def test_marks_are_there_where_missions_choose(task, num_levels, depth):
    assert make_env(task, num_levels=num_levels).reset().shape[2] == depth


def test_a_view_shows_no_more_than_the_agent_sees_and_the_key_is_the_grid():
    env = make_env("DoorKey-6x6", view="partial")
    obs, view = env.reset(), env.see()["image"]
    np.testing.assert_array_equal(obs, np.dstack([np.zeros((7, 7, 9)), view]))
    np.testing.assert_array_equal(env.step(0)[0][..., 6:9], view)
    np.testing.assert_array_equal(env.key, env.grid.reshape(-1))


LEVELS = "--env-id DoorKey-5x5 --backup whole-graph --exploration frontier --total-timesteps 200"
LEVELS = f"{LEVELS} --eval-frequency 100 --eval-episodes 2 --target-network-frequency 70".split()


def naive_view(grid):
    """The grid from the agent's place: [i, j] is i - N // 2 cells ahead of it, j - N // 2 right."""
    width, height, _ = grid.shape
    size = max(width, height)
    (x, y), result = np.argwhere(grid[..., 0] == ROBOT)[0], np.zeros((size, size, 3), np.uint8)
    dx, dy = ((1, 0), (0, 1), (-1, 0), (0, -1))[grid[x, y, 2]]
    for i, j in np.ndindex(size, size):
        ahead, right = i - size // 2, j - size // 2
        at = (x + dx * ahead - dy * right) % size, (y + dy * ahead + dx * right) % size
        is_self, is_inside = ahead == right == 0, at[0] < width and at[1] < height
        result[i, j] = 0 if is_self else grid[at] if is_inside else grid[0, 0]
    return result


@pytest.mark.parametrize("task", ["DoorKey-6x6", "KeyCorridorS3R1"])  # a square, and none
def test_where_levels_change_the_network_sees_the_grid_from_the_agent(task):
    """A level that is turned has the same values."""
    env, rng = make_env(task), np.random.default_rng(0)
    grids, directions = [env.reset()], set()
    for action in rng.integers(3, size=60):
        grids.append(env.step(action)[0])
        directions.add(env.env.unwrapped.agent_dir)
    network = gb_dqn_minigrid.make_network(env.args, env.obs.shape, env.num_actions)
    moved = network.move_to_agent(torch.from_numpy(np.array(grids)))
    assert directions == {0, 1, 2, 3}
    np.testing.assert_array_equal(moved, [naive_view(grid) for grid in grids])
    if task == "DoorKey-6x6":
        turned = np.rot90(env.obs).copy()  # x, y -> W - 1 - y, x: right becomes down
        x, y = np.argwhere(turned[..., 0] == ROBOT)[0]
        turned[x, y, 2] = (turned[x, y, 2] + 1) % 4
        values = network(torch.from_numpy(np.stack([env.obs, turned])))
        torch.testing.assert_close(values[0], values[1])


@jitted
def test_the_network_alone_and_its_own_graph_are_two_scores_in_both_kinds_of_levels(
    tmp_path, capsys
):
    """Training is the same."""
    flags = (*LEVELS, "--num-levels", "3", "--eval-act-on")
    runs = [short_run(gb_dqn_minigrid, tmp_path / on, *flags, on) for on in ("graph", "network")]
    rows = [(run / "metrics.csv").read_text().splitlines() for run in runs]
    graph, network = ([line.split(",")[4:] for line in of_run] for of_run in rows)
    assert graph == network
    evaluations = read_rows(runs[0] / "evaluations.csv")
    assert [bool(row["train_return"]) for row in evaluations] == [True] * 4
    assert "train_score" in (result := result_of(runs[0]))
    assert 0 <= result["starts_met"] <= 1
    assert command(evaluate, runs[0], "--episodes", "2") == 0
    assert " on a graph of its own episode, " in capsys.readouterr().out.splitlines()[-1]


# --- Rewards that fall with time ---


@pytest.mark.parametrize(
    ("most", "fall", "limit"), [(1.0, 0.9, 100), (10.0, 10.0, 27), (1.0, 0.5, 1_000)]
)
def test_a_reward_that_falls_with_time_is_learned_from_as_of_the_start(most, fall, limit):
    rewards, rng = gb.RewardsAtStart(), np.random.default_rng(0)
    times = rng.integers(1, limit, size=500).tolist()
    paid = [most - fall * t / limit for t in times]
    learned = [rewards.of(r, t) for r, t in zip(paid, times, strict=True)]
    assert learned[:4] == paid[:4]
    np.testing.assert_allclose(learned[4:], most)
    assert rewards.of(-1.0, 5) == -1.0


@pytest.mark.parametrize(
    "reward_of",
    [lambda t, rng: 0.1, lambda t, rng: rng.choice([0.5, 1.0]), lambda t, rng: 1 + t / 100,
     lambda t, rng: 1 - 0.9 * t / 100 + rng.normal(0, 0.01)],
    ids=["constant", "two sizes", "grows", "falls but for chance"],
)  # fmt: skip
def test_other_rewards_are_learned_from_as_they_are(reward_of):
    rewards, rng = gb.RewardsAtStart(), np.random.default_rng(0)
    for t in rng.integers(1, 100, size=500).tolist():
        reward = float(reward_of(t, rng))
        assert rewards.of(reward, t) == reward
