"""gb_dqn_minigrid.py and gb_dqn_minatar.py: what they record, compute, leave behind and refuse."""

import gymnasium
import numpy as np
import pytest
import torch
from conftest import JIT, jitted, play, read_metrics, refuses, result_of, scaled
from gymnasium.envs.registration import EnvSpec
from minigrid.envs import EmptyEnv
from minigrid.wrappers import FullyObsWrapper

import gb_dqn_minatar as minatar_script
import gb_dqn_minigrid as minigrid_script
from gbcore import Replay, TransitionGraph

TASKS = [(minigrid_script, "MiniGrid-DoorKey-5x5-v0"), (minatar_script, "breakout")]
both = pytest.mark.parametrize(("script", "task"), TASKS, ids=["minigrid", "minatar"])
pytestmark = pytest.mark.usefixtures("torch_settings")


def make_learner(script, task, **flags):
    """A learner without transitions."""
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
    newest = replay.position - 1
    continued = np.flatnonzero(~replay.cut)
    after = (continued + 1) % replay.capacity
    assert (replay.next_node[continued] == replay.node[after]).all()
    assert not replay.terminated[continued].any()
    assert replay.cut[newest]
    assert replay.terminated.sum() <= replay.cut.sum() < replay.size / 2

    env = script.make_env(learner.args, task, np.random.default_rng(learner.args.seed))
    starts = {graph.find(env.reset()) for _ in range(20)}
    (ends,) = np.nonzero(replay.cut)
    begins = (ends[ends != newest % replay.capacity] + 1) % replay.capacity
    assert len(begins) > 0 or buffer_size
    assert set(replay.node[begins]) <= starts


@jitted
def test_minigrid_observations_are_the_full_grid_in_a_fixed_layout():
    for name in ("DoorKey-6x6", "KeyCorridorS3R1", "LavaCrossingS9N2", "Dynamic-Obstacles-5x5"):
        name = minigrid_script.task_of(name)
        task = minigrid_script.Task(name, minigrid_script.Args(seed=3), None)
        reference, rng = FullyObsWrapper(gymnasium.make(name)), np.random.default_rng(0)
        for _ in range(3):
            obs = task.reset()
            np.testing.assert_array_equal(obs, reference.reset(seed=3)[0]["image"])
            done = False
            while not done:
                action = int(rng.integers(task.num_actions))
                obs, *ends = task.step(action)
                seen, *expected, _ = reference.step(action)
                np.testing.assert_array_equal(obs, seen["image"])
                done = ends[1] or ends[2]
                assert (ends[:2], done) == (expected[:2], expected[1] or expected[2])
    layouts = {
        minigrid_script.Task(name, minigrid_script.Args(seed=seed), None).reset().tobytes()
        for seed in range(5)
    }
    assert len(layouts) > 1


@pytest.mark.skipif(not JIT, reason="thousands of steps")
def test_frontier_episodes_try_everything_and_ordinary_ones_do_not(tmp_path):
    """Nothing is learned: what is found is exploration's alone."""
    num_states = {}
    for exploration in ("epsilon-greedy", "frontier"):
        flags = {"total_timesteps": 4_000, "exploration": exploration, "log_frequency": 500}
        flags["env_id"] = "LavaCrossingS9N2"
        learner, run = play(minigrid_script, tmp_path / exploration, **flags)
        num_states[exploration] = learner.graph.num_nodes
    assert learner.replay.reward.max() == 1.0
    assert num_states["epsilon-greedy"] < 0.7 * num_states["frontier"]
    rows = read_metrics(run)
    assert max(float(row["frontier/share"]) for row in rows) > 0.25
    assert [float(rows[-1][f"frontier/{name}"]) for name in ("untried", "share")] == [0, 0]


@jitted
def test_minigrid_trains_on_success_and_collisions_and_reports_returns(tmp_path):
    flags = {"env_id": "Empty-5x5", "total_timesteps": 1_000}
    learner, run = play(minigrid_script, tmp_path / "success", **flags)
    replay = learner.replay
    assert set(replay.reward) == {0.0, 1.0}
    assert (replay.terminated == (replay.reward > 0)).all()
    (*_, row) = read_metrics(run)
    assert 0 < float(row["charts/episodic_return"]) < 1
    learner, _ = play(minigrid_script, tmp_path / "collisions", env_id="Dynamic-Obstacles-5x5")
    replay = learner.replay
    assert -1.0 in replay.reward
    assert replay.terminated[replay.reward == -1.0].all()


def test_minigrid_timeout_is_truncation_with_return_0():
    name = "MiniGrid-Empty-5x5-v0"
    args = minigrid_script.Args(eval_epsilon=0.0)
    task = minigrid_script.Task(name, args, None)
    still = minigrid_script.evaluate(args, name, lambda obs: np.zeros(len(obs), np.int64), 0, 1)
    assert still == ([0.0], [task.env.unwrapped.max_steps])
    task.reset()
    for _ in range(task.env.unwrapped.max_steps):
        *_, terminated, truncated = task.step(0)
    assert (terminated, truncated) == (False, True)


@jitted
@pytest.mark.parametrize("name", minatar_script.GAMES)
def test_minatar_time_limits_are_truncations(name):
    """Freeway alone has a limit of its own, and reports it as the end of the game."""
    rng = np.random.default_rng(0)
    game = minatar_script.Game(name, rng)
    assert hasattr(game.env.env, "terminate_timer") == (name == "freeway")
    game.reset()
    if name == "freeway":
        ends = [game.step(0)[2:] for _ in range(2_501)]
        assert ends == [(False, False)] * 2_500 + [(False, True)]
        assert game.env.env.terminal  # what MinAtar itself says
    else:
        for _ in range(3):
            terminated = False
            while not terminated:
                _, _, terminated, truncated = game.step(int(rng.integers(6)))
                assert not truncated
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
@pytest.mark.parametrize(("steps", "score"), [(100, 95.5), (12, 12.0)])
def test_score_is_the_mean_over_the_last_tenth_of_the_evaluations(steps, score, tmp_path):
    returns = iter(range(1, steps + 1))

    def evaluate(args, *_):
        return [-3.0 if args.eval_epsilon == 1 else float(next(returns))], [1]

    flags = {"env_id": "breakout", "total_timesteps": steps, "eval_frequency": 1}
    result = result_of(play(minatar_script, tmp_path, evaluate, **flags)[1])
    assert (result["score"], result["random_actions"]) == (score, -3)


@jitted
def test_every_cell_of_a_grid_has_a_code_of_its_own():
    cells = [(o, c, s) for o in range(1, 11) for c in range(6) for s in range(4)]
    grids = np.tile(np.array(cells, np.uint8)[:, None, None], (1, 3, 3, 1))
    network = minigrid_script.QNetwork((3, 3, 3), 7)
    network.layers = torch.nn.Flatten()
    assert len(torch.unique(network(torch.from_numpy(grids)), dim=0)) == len(cells)


@both
def test_targets_are_bit_identical_with_and_without_the_table(script, task, tmp_path):
    def run(remember):
        learner, _ = play(script, tmp_path / str(remember), env_id=task)
        rng = np.random.default_rng(1)
        targets = []
        for update in range(scaled(40, 10)):
            if not remember:
                learner.leaves.forget_all()
            batch = learner.replay.sample(8, rng)
            targets.append(learner.targets(batch, rng))
            learner.update(batch, rng)
            if update % 15 == 14:
                learner.update_target()
        return np.array(targets), learner

    with_table, learner = run(True)
    without, forgetful = run(False)
    assert with_table.tobytes() == without.tobytes()
    assert learner.leaves.num_evaluated < forgetful.leaves.num_evaluated
    ours, theirs = learner.online.state_dict(), forgetful.online.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@both
@jitted
def test_update_moves_the_prediction_towards_the_target(script, task, tmp_path):
    learner, _ = play(script, tmp_path, env_id=task, learning_rate=1e-3)
    rng = np.random.default_rng(0)
    batch = learner.replay.sample(8, rng)
    losses = [learner.update(batch, rng)[0].item() for _ in range(30)]
    assert losses[-1] < losses[0] / 2


def test_a_grid_with_other_actions_is_one_line(capsys, monkeypatch):
    class WheelEnv(EmptyEnv):
        def __init__(self, **options):
            super().__init__(**options)
            self.action_space = gymnasium.spaces.Box(-1, 1, (1,))

    name = "MiniGrid-Wheel-v0"
    monkeypatch.setitem(gymnasium.registry, name, EnvSpec(name, WheelEnv))
    assert refuses(capsys, minigrid_script, ["--env-id", name], "Box", "not discrete")
