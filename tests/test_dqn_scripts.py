"""gb_dqn_minigrid.py and gb_dqn_minatar.py: what they record, compute, leave behind and refuse."""

import gymnasium
import numpy as np
import pytest
import torch
from conftest import JIT, jitted, play, read_metrics, refuses, scaled
from gymnasium.envs.registration import EnvSpec
from minigrid.envs import EmptyEnv
from minigrid.wrappers import FullyObsWrapper

import gb_dqn_minatar as minatar_script
import gb_dqn_minigrid as minigrid_script
from gbcore import Replay, TransitionGraph
from gbcore.run import last_tenth

TASKS = [(minigrid_script, "MiniGrid-DoorKey-5x5-v0"), (minatar_script, "breakout")]
both = pytest.mark.parametrize(("script", "task"), TASKS, ids=["minigrid", "minatar"])
pytestmark = pytest.mark.usefixtures("torch_settings")


def make_learner(script, task, **flags):
    """A learner without transitions, which test_protocol.py looks at too."""
    args = script.Args(**{"batch_size": 8, "breadth": 5, "total_timesteps": 200} | flags)
    env = script.make_env(args, task, np.random.default_rng(0))
    obs = env.reset()
    graph = TransitionGraph(env.num_actions, obs.shape, obs.dtype)
    torch.manual_seed(args.seed)
    return script.Learner(args, graph, Replay(graph, args.total_timesteps), torch.device("cpu"))


@both
@pytest.mark.parametrize("buffer_size", [0, 150])
def test_the_replay_is_the_trajectory_and_the_graph_its_counts(script, task, buffer_size, tmp_path):
    flags = {"env_id": task, "total_timesteps": 700, "buffer_size": buffer_size}
    learner, _ = play(script, tmp_path, **flags)
    replay, graph = learner.replay, learner.graph
    assert graph.check_valid() == []
    assert graph.num_transitions == replay.size == (buffer_size or 700)
    continued = np.flatnonzero(~replay.cut)
    after = (continued + 1) % replay.capacity
    assert (replay.next_node[continued] == replay.node[after]).all()
    assert not replay.terminated[continued].any()
    assert replay.terminated.sum() <= replay.cut.sum() < replay.size / 2
    newest = (replay.position - 1) % replay.capacity
    assert replay.cut[newest]

    env = script.make_env(learner.args, task, np.random.default_rng(learner.args.seed))
    starts = {graph.find(env.reset()) for _ in range(20)}
    (ends,) = np.nonzero(replay.cut)
    begins = (ends[ends != newest] + 1) % replay.capacity
    assert len(begins) > 0 or buffer_size
    assert set(replay.node[begins]) <= starts


@jitted
def test_minigrid_observations_are_the_full_grid_in_a_fixed_layout():
    for name in ("DoorKey-6x6", "KeyCorridorS3R1", "LavaCrossingS9N2", "Dynamic-Obstacles-5x5"):
        name = minigrid_script.task_of(name)
        task = minigrid_script.Task(name, minigrid_script.Args(seed=3), None)
        reference, rng = FullyObsWrapper(gymnasium.make(name)), np.random.default_rng(0)
        for _ in range(3):
            np.testing.assert_array_equal(task.reset(), reference.reset(seed=3)[0]["image"])
            ends = [False, False]
            while not any(ends):
                action = int(rng.integers(task.num_actions))
                obs, _, *ends = task.step(action)
                seen, _, *expected, _ = reference.step(action)
                np.testing.assert_array_equal(obs, seen["image"])
                assert ends == expected
    tasks = [minigrid_script.Task(name, minigrid_script.Args(seed=i), None) for i in range(5)]
    assert len({task.reset().tobytes() for task in tasks}) > 1


@pytest.mark.skipif(not JIT, reason="thousands of steps")
def test_frontier_episodes_try_everything_and_ordinary_ones_do_not(tmp_path):
    """Nothing is learned: what is found is exploration's alone."""
    flags = {"env_id": "LavaCrossingS9N2", "total_timesteps": 4_000, "log_frequency": 500}
    (ordinary, _), (learner, run) = (
        play(minigrid_script, tmp_path / exploration, exploration=exploration, **flags)
        for exploration in ("epsilon-greedy", "frontier")
    )
    assert learner.replay.reward.max() == 1.0
    assert ordinary.graph.num_nodes < 0.7 * learner.graph.num_nodes
    rows = read_metrics(run)
    assert max(float(row["frontier/share"]) for row in rows) > 0.25
    assert [float(rows[-1][f"frontier/{name}"]) for name in ("untried", "share")] == [0, 0]


@jitted
def test_minigrid_trains_on_success_and_collisions_and_reports_returns(tmp_path):
    flags = {"env_id": "Empty-5x5", "total_timesteps": 1_000}
    learner, run = play(minigrid_script, tmp_path / "success", **flags)
    assert set(learner.replay.reward) == {0.0, 1.0}
    assert (learner.replay.terminated == (learner.replay.reward > 0)).all()
    assert 0 < float(read_metrics(run)[-1]["charts/episodic_return"]) < 1
    learner, _ = play(minigrid_script, tmp_path / "collisions", env_id="Dynamic-Obstacles-5x5")
    assert set(learner.replay.terminated[learner.replay.reward == -1.0]) == {True}


def test_minigrid_timeout_is_truncation_with_return_0():
    name, args = "MiniGrid-Empty-5x5-v0", minigrid_script.Args(eval_epsilon=0.0)
    task = minigrid_script.Task(name, args, None)
    most = task.env.unwrapped.max_steps
    still = minigrid_script.evaluate(args, name, lambda obs: np.zeros(len(obs), np.int64), 0, 1)
    assert still == ([0.0], [most])
    task.reset()
    assert [task.step(0)[2:] for _ in range(most)][-1] == (False, True)


@jitted
@pytest.mark.parametrize("name", minatar_script.GAMES)
def test_minatar_time_limits_are_truncations(name):
    """Freeway alone has a limit of its own, and reports it as the end of the game."""
    rng = np.random.default_rng(0)
    game = minatar_script.Game(name, rng)
    game.reset()
    if name == "freeway":
        ends = [game.step(0)[2:] for _ in range(2_501)]
        assert ends == [(False, False)] * 2_500 + [(False, True)]
        assert game.env.env.terminal  # what MinAtar itself says
        return
    for _ in range(3):
        ends = [False, False]
        while not any(ends):
            _, _, *ends = game.step(int(rng.integers(6)))
        assert ends == [True, False]
        game.reset()


@jitted
def test_minatar_episodes_are_cut_at_the_cap(tmp_path, monkeypatch):
    monkeypatch.setattr(minatar_script, "MAX_STEPS", 50)
    replay = play(minatar_script, tmp_path, env_id="freeway", total_timesteps=160)[0].replay
    assert not replay.terminated.any()
    assert np.flatnonzero(replay.cut).tolist() == [49, 99, 149, 159]


@jitted
def test_minatar_sticky_actions():
    game = minatar_script.Game("asterix", np.random.default_rng(0))
    assert game.env.env.ramping
    game.reset()
    acted = []
    game.env.env.act = lambda action: acted.append(action) or (0, False)
    for step in range(5_000):
        game.step(step % 2)
    repeated = np.mean(np.array(acted[1:]) == np.array(acted[:-1]))
    # Of the actions that alternate, 10% repeat the last; the next one then looks repeated as well.
    assert 0.16 < repeated < 0.2


def episodes(episode_seed, actions_seed=0):
    """First screens of several asterix episodes, and the sticky actions' draws at each start."""
    args = minatar_script.Args(episode_seed=episode_seed)
    game = minatar_script.make_env(args, "asterix", np.random.default_rng(actions_seed))
    screens, sticky = [], []
    for _ in range(3):
        game.reset()
        sticky.append(game.env.random.get_state()[1].tobytes())
        screens.append([game.step(0)[0].tobytes() for _ in range(40)])
    return screens, sticky


def test_minatar_episode_seed():
    fixed, sticky = episodes("fixed")
    assert fixed[0] == fixed[1] == fixed[2] == episodes("fixed", actions_seed=1)[0][0]
    assert len(set(sticky)) == 3  # these are drawn anew
    fresh, _ = episodes("fresh")
    assert fresh[0] != fresh[1]
    assert fresh[0] != episodes("fresh", actions_seed=1)[0][0]
    assert fresh == episodes("fresh")[0]


@jitted
def test_score_is_the_mean_over_the_last_tenth_of_the_evaluations():
    """That a run's score is this mean is in test_run.py."""
    scores = [last_tenth([*range(1, number + 1)]) for number in (100, 12, 1, 0)]
    assert scores == [95.5, 12, 1, None]


@jitted
def test_every_cell_of_a_grid_has_a_code_of_its_own():
    cells = [(o, c, s) for o in range(1, 11) for c in range(6) for s in range(4)]
    grids = np.tile(np.array(cells, np.uint8)[:, None, None], (1, 3, 3, 1))
    network = minigrid_script.QNetwork((3, 3, 3), 7)
    network.layers = torch.nn.Flatten()
    assert len(torch.unique(network(torch.from_numpy(grids)), dim=0)) == len(cells)


@both
def test_targets_are_bit_identical_with_and_without_the_table(script, task, tmp_path):
    learners, targets = {}, {True: [], False: []}
    for remember in targets:
        learner, _ = play(script, tmp_path / str(remember), env_id=task)
        learners[remember], rng = learner, np.random.default_rng(1)
        for update in range(scaled(40, 10)):
            if not remember:
                learner.leaves.forget_all()
            batch = learner.replay.sample(8, rng)
            targets[remember].append(learner.targets(batch, rng).tobytes())
            learner.update(batch, rng)
            if update % 15 == 14:
                learner.update_target()
    assert targets[True] == targets[False]
    assert learners[True].leaves.num_evaluated < learners[False].leaves.num_evaluated
    ours, theirs = (learners[remember].online.state_dict() for remember in targets)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@both
@jitted
def test_update_moves_the_prediction_towards_the_target(script, task, tmp_path):
    learner, _ = play(script, tmp_path, env_id=task, learning_rate=1e-3)
    rng = np.random.default_rng(0)
    batch = learner.replay.sample(8, rng)
    losses = [learner.update(batch, rng)[0].item() for _ in range(30)]
    assert losses[-1] < losses[0] / 2


def test_a_grid_that_cannot_be_used_is_one_line(capsys, monkeypatch):
    class WheelEnv(EmptyEnv):
        def __init__(self, **options):
            super().__init__(**options)
            self.action_space = gymnasium.spaces.Box(-1, 1, (1,))

    def reset(self, **_):
        raise gymnasium.error.DependencyNotInstalled("networkx is missing")

    name = "MiniGrid-Wheel-v0"
    monkeypatch.setitem(gymnasium.registry, name, EnvSpec(name, WheelEnv))
    assert refuses(capsys, minigrid_script, ["--env-id", name], "Box", "not discrete")
    monkeypatch.setattr(EmptyEnv, "reset", reset)
    words = ["--env-id", "Empty-5x5", "--num-levels", "0"]
    message = "cannot make MiniGrid-Empty-5x5-v0: networkx is missing"
    assert refuses(capsys, minigrid_script, words, message)
