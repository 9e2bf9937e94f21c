"""gbcore.sb3 and its example, where Stable-Baselines3 is installed: requirements-sb3.txt."""

import copy
import re

import gymnasium
import numpy as np
import pytest
import torch
from conftest import ROOT, command, jitted, refuses
from gymnasium.wrappers import NormalizeObservation, TransformAction, TransformObservation

pytest.importorskip("stable_baselines3", reason="pip install -r requirements-sb3.txt")

from stable_baselines3 import DQN
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.callbacks import CheckpointCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import VecNormalize

from examples import mazes, sb3_dqn  # noqa: F401
from gbcore import GraphValues
from gbcore.sb3 import GraphDQN, GraphReplayBuffer, Levels, OwnGraph
from gbcore.values import weights_of

pytestmark = [jitted, pytest.mark.usefixtures("torch_settings")]
SMALL = {"buffer_size": 80, "learning_starts": 20, "target_update_interval": 40, "batch_size": 8}
both = pytest.mark.parametrize("backup", ["graph", "whole-graph"])
keyed = pytest.mark.parametrize("key", [None, lambda obs: tenths(obs)], ids=["obs", "key"])


def make_model(env_id="CartPole-v1", num_envs=2, seed=0, **flags):
    return GraphDQN("MlpPolicy", make_vec_env(env_id, num_envs), seed=seed, **SMALL | flags)


def cart_pole():
    return make_vec_env("CartPole-v1")


def tenths(obs):
    return np.round(10 * obs).astype(np.int32)


def is_valid(buffer, num_transitions=None):
    """The graph has the rows' transitions, and their nodes are those of their observations."""
    graph, size = buffer.graph, buffer.size()
    assert graph.check_valid() == []
    assert graph.num_transitions == size * buffer.n_envs
    columns = buffer.observations, buffer.next_observations
    for nodes, column in zip(buffer.nodes, columns, strict=True):
        obs = column[:size].reshape(-1, *buffer.obs_shape)
        keys = [None] * len(obs) if buffer.key is None else buffer.key(obs)
        found = [graph.find(*pair) for pair in zip(obs, keys, strict=True)]
        assert found == nodes[:size].ravel().tolist()
    return num_transitions in (None, graph.num_transitions)


@keyed
@pytest.mark.parametrize("env_id", ["FrozenLake-v1", "CartPole-v1"])
def test_the_graph_is_the_replay(env_id, key):
    model = make_model(env_id, key=key)
    before = model.q_net.state_dict()["q_net.0.weight"].clone()
    model.learn(300)
    assert is_valid(model.replay_buffer, 80)
    assert model.replay_buffer.graph.key_dtype == (None if key is None else np.int32)
    assert not torch.equal(before, model.q_net.state_dict()["q_net.0.weight"])


def test_at_depth_1_where_pairs_have_one_outcome_targets_are_those_of_dqn():
    model = make_model(num_envs=1, depth=1)
    model.learn(60)
    buffer, rows = model.replay_buffer, np.arange(50)
    buffer.targets = model._targets
    batch = buffer._get_samples(rows)
    assert (batch.dones == 1).all()
    with torch.no_grad():
        following = model.q_net_target(torch.as_tensor(buffer.next_observations[rows, 0]))
    goes_on = 1 - buffer.dones[rows, 0] * (1 - buffer.timeouts[rows, 0])
    expected = buffer.rewards[rows, 0] + model.gamma * goes_on * following.max(1).values.numpy()
    np.testing.assert_allclose(batch.rewards[:, 0], expected, rtol=1e-5)


def test_a_model_and_its_replay_are_saved_and_go_on(tmp_path):
    model = make_model(key=lambda obs: tenths(obs), depth=3)
    model.learn(96, callback=CheckpointCallback(48, str(tmp_path), "at", save_replay_buffer=True))
    other = GraphDQN.load(tmp_path / "at_96_steps", env=model.env)
    assert (other.depth, other.breadth) == (3, 20)
    other.load_replay_buffer(tmp_path / "at_replay_buffer_96_steps")
    assert is_valid(other.replay_buffer)
    other.learn(64, reset_num_timesteps=False)
    assert is_valid(other.replay_buffer)
    assert other.leaves.graph is other.replay_buffer.graph
    assert other.num_timesteps == 160


def test_whole_graph_acts_on_what_was_seen():
    lake = make_vec_env("FrozenLake-v1", 2, env_kwargs={"is_slippery": False})
    flags = SMALL | {"buffer_size": 5_000, "learning_starts": 1_500, "train_freq": 8}
    flags |= {"exploration_initial_eps": 0.3, "exploration_fraction": 1.0, "seed": 1}
    model = GraphDQN("MlpPolicy", lake, backup="whole-graph", **flags).learn(3_000)
    assert evaluate_policy(model, lake, n_eval_episodes=2) == (1, 0)
    start = model.graph_values.values(model.replay_buffer.graph.nodes(np.array([[0]])))
    assert start == pytest.approx(0.99**5, abs=0.01)
    assert model.predict(np.array(14), deterministic=True)[0] == 2  # one step from the goal


@keyed
def test_a_copy_predicts_and_learns_by_itself(key):
    model, obs = make_model("FrozenLake-v1", backup="whole-graph", key=key), np.arange(16)
    model.learn(100)
    model.predict(obs, deterministic=True)
    other = copy.deepcopy(model)
    before = other.predict(obs, deterministic=True)[0]
    with torch.no_grad():
        for parameter in model.q_net.parameters():
            parameter.zero_()
        parameter[-1] = 1.0
    assert (other.predict(obs, deterministic=True)[0] == before).all()
    other.learn(20, reset_num_timesteps=False)
    assert other.replay_buffer.num_added > model.replay_buffer.num_added
    assert is_valid(other.replay_buffer)
    assert is_valid(model.replay_buffer)


def test_predictions_follow_every_row_that_is_added():
    lake = make_vec_env("FrozenLake-v1", 1, env_kwargs={"is_slippery": False})
    model = GraphDQN("MlpPolicy", lake, backup="whole-graph", **SMALL | {"learning_starts": 10**6})
    for i in range(2 * SMALL["buffer_size"]):  # the two actions are the better one in turn
        if i % SMALL["buffer_size"] == 0:
            model.learn(1)  # however often, it ends at the same number of steps
        row = [[14]], [[15]], [[i % 2]], [float(i**2)], [True]
        model.replay_buffer.add(*map(np.array, row), [{}])
        assert model.predict(np.array(14), deterministic=True)[0] == i % 2


def test_a_row_that_cannot_be_added_changes_nothing_and_a_reset_begins_anew():
    model = make_model(num_envs=1, key=lambda obs: tenths(obs) if obs[0, 0] < 9 else 1 / 0)
    model.learn(130)  # the ring has wrapped
    buffer, good = model.replay_buffer, np.zeros((1, 4), np.float32)
    rest = np.array([1]), np.array([1.0]), np.array([False]), [{}]
    before = buffer.pos, buffer.nodes.copy(), buffer.rewards.copy(), buffer.observations.copy()
    for row in ((good, good + 9, *rest), (good, good, rest[0], np.array([np.nan]), *rest[2:])):
        with pytest.raises((ZeroDivisionError, ValueError)):
            buffer.add(*row)
        after = buffer.pos, buffer.nodes, buffer.rewards, buffer.observations
        for one, two in zip(before, after, strict=True):
            np.testing.assert_array_equal(one, two)
    for _ in range(2 * buffer.buffer_size):
        buffer.add(good, good, *rest)
    assert is_valid(buffer, 80)
    buffer.reset()
    assert buffer.graph.num_transitions == 0
    model.learn(130)
    assert is_valid(buffer, 80)


def test_what_is_set_between_two_trainings_counts():
    model = make_model(num_envs=1, backup="whole-graph")
    model.learn(60)
    for gamma in (0.9, 0.5):
        model.gamma = gamma
        model.learn(40)
        assert model.graph_values.gamma == gamma
    for backup, kind in (("graph", type(None)), ("whole-graph", GraphValues)):
        model.backup = backup
        model.learn(40)
        assert isinstance(model.graph_values, kind)
    model.policy = (other := make_model(num_envs=1, seed=1)).policy
    model._create_aliases()
    model._follow_replay()
    nodes = np.unique(model.replay_buffer.nodes[0])
    expected = model._values_of(
        other.q_net_target, model.replay_buffer.graph.observations_of(nodes)
    )
    np.testing.assert_allclose(model.leaves.values(nodes), expected, rtol=1e-5)
    with pytest.raises(ValueError, match="without VecNormalize"):
        model.set_env(VecNormalize(cart_pole()))
    with pytest.raises(ValueError, match="Require a GraphDQN that trains"):
        DQN("MlpPolicy", "CartPole-v1", replay_buffer_class=GraphReplayBuffer).learn(120)


def test_whole_graph_finds_states_by_their_keys():
    model = make_model(key=tenths, backup="whole-graph", exploration_final_eps=0.0)
    model.learn(300)
    buffer = model.replay_buffer
    seen = buffer.observations[:, 0]
    chosen = model.graph_values.actions(buffer.nodes[0, :, 0])
    model.exploration_rate = 0.0
    assert (chosen >= 0).any()
    actions = model.predict(seen)[0]
    np.testing.assert_array_equal(actions[chosen >= 0], chosen[chosen >= 0])
    near = np.where(np.round(10 * (seen + 1e-4)) == np.round(10 * seen), seen + 1e-4, seen)
    np.testing.assert_array_equal(model.predict(near)[0], actions)


def test_a_model_that_was_loaded_without_its_replay_predicts_as_before(tmp_path):
    model = make_model("FrozenLake-v1", backup="whole-graph", buffer_size=1_000)
    model.learn(600)
    obs = np.arange(16)
    before = model.predict(obs, deterministic=True)[0]
    network = model.policy.predict(obs, deterministic=True)[0]
    assert (before != network).any()
    model.save(tmp_path / "model")
    assert model._actions == {}
    other = GraphDQN.load(tmp_path / "model", env=model.env)
    np.testing.assert_array_equal(other.predict(obs, deterministic=True)[0], before)
    other.save(tmp_path / "again")
    again = GraphDQN.load(tmp_path / "again")
    np.testing.assert_array_equal(again.predict(obs, deterministic=True)[0], before)
    again.set_env(model.env)
    again.learn(100)  # its own graph comes first
    start = again.graph_values.seen_policy(again._act_on_network)(np.array([[0]]))
    assert again.predict(np.array([0]), deterministic=True)[0] == start


@both
def test_a_write_into_the_target_network_counts_at_once(backup):
    """By whatever means, as test_leaf_table.py shows: here by one that tensors do not notice."""
    model = make_model("FrozenLake-v1", backup=backup, target_update_interval=10**6)
    model.learn(100)
    nodes, actions = model.replay_buffer.nodes[0, :, 0], model.replay_buffer.actions[:, 0, 0]

    def targets_and_actions():
        targets = model._targets(nodes, actions, np.random.default_rng(0))
        return targets, model.predict(np.arange(16), deterministic=True)[0]

    old, _ = targets_and_actions()
    for part in model.q_net_target.parameters():
        part.data.add_(1)
    new, acted = targets_and_actions()
    assert np.abs(new - old).max() > 1
    model.leaves, model._seen = None, (None, None)  # anew
    model._follow_replay()
    right, right_actions = targets_and_actions()
    np.testing.assert_allclose(new, right, rtol=1e-4, atol=1e-3)
    np.testing.assert_array_equal(acted, right_actions)


class Dropping(BaseFeaturesExtractor):
    def __init__(self, space):
        super().__init__(space, 16)
        self.parts = torch.nn.Sequential(
            torch.nn.Linear(space.shape[0], 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.5)
        )

    def forward(self, obs):
        return self.parts(obs)


@both
def test_networks_are_asked_in_evaluation_mode_and_learn_in_training_mode(backup):
    model = make_model(backup=backup, policy_kwargs={"features_extractor_class": Dropping})
    model.learn(60)
    model.policy.set_training_mode(True)
    model.q_net_target.train()
    obs = model.replay_buffer.observations[:20, 0]
    for network in (model.q_net, model.q_net_target):
        before = weights_of(network)
        values = model._values_of(network, obs)
        np.testing.assert_array_equal(values, model._values_of(network, obs))
        np.testing.assert_allclose(values[:1], model._values_of(network, obs[:1]), rtol=1e-5)
        assert weights_of(network) == before
        assert all(part.training for part in network.modules())
    evaluated = model.leaves.evaluated(model.replay_buffer.nodes[0, :20, 0])
    np.testing.assert_allclose(evaluated, values, rtol=1e-5)


@pytest.mark.parametrize("backup", ["graph", "whole-graph"])
def test_predict_takes_and_refuses_what_dqn_does(backup):
    model, plain = make_model(backup=backup), DQN("MlpPolicy", "CartPole-v1")
    obs = np.full(4, 0.01, np.float32)
    for one in (obs, obs.tolist(), tuple(obs.tolist()), obs.astype(np.float64)):
        for given in (one, [one, one]):
            shape = plain.predict(given, deterministic=True)[0].shape
            assert model.predict(given, deterministic=True)[0].shape == shape
    for bad in ((obs, {}), {"obs": obs}, obs[:3]):
        with pytest.raises((ValueError, AssertionError)) as refused:
            plain.predict(bad, deterministic=True)
        with pytest.raises(refused.type, match=re.escape(str(refused.value).splitlines()[0])):
            model.predict(bad, deterministic=True)


@pytest.mark.parametrize("learned", [70, 200])
def test_a_replay_that_is_loaded_has_the_key_of_its_model(learned, tmp_path):
    model, other = make_model(key=tenths), make_model(key=lambda obs: np.rint(obs).astype(int))
    model.learn(learned)
    model.save_replay_buffer(tmp_path / "replay")
    other.load_replay_buffer(tmp_path / "replay")
    assert is_valid(other.replay_buffer, model.replay_buffer.graph.num_transitions)
    other.key = tenths  # as the buffer is when it was filled so
    other.learn(100)
    assert other.replay_buffer.graph.key_dtype == np.int32
    assert is_valid(other.replay_buffer, 80)


@pytest.mark.parametrize(
    ("env_id", "num_envs", "named"),
    [("FrozenLake-v1", 2, "of observation_space"), ("CartPole-v1", 1, "of n_envs"),
     (None, 1, "GraphReplayBuffer, got ReplayBuffer")],
)  # fmt: skip
def test_a_replay_of_another_task_or_kind_is_refused(env_id, num_envs, named, tmp_path):
    other = make_model(env_id, num_envs) if env_id else DQN("MlpPolicy", "CartPole-v1")
    other.save_replay_buffer(tmp_path / "replay.pkl")
    with pytest.raises(ValueError, match=f"Require a .*{named}"):
        make_model().load_replay_buffer(tmp_path / "replay.pkl")


def test_environments_of_neighbouring_seeds_have_no_first_state_in_common():
    one, two, three, same = (
        {obs.tobytes() for obs in make_model(num_envs=4, seed=seed).env.reset()}
        for seed in (1, 2, 3, 1)
    )
    assert len(one | two | three) == 12
    assert one == same


def late_actions():
    space = gymnasium.spaces.Discrete(2, start=5)
    return TransformAction(gymnasium.make("CartPole-v1"), lambda action: action - 5, space)


def normalized():
    return NormalizeObservation(gymnasium.make("CartPole-v1"))


def dict_observation():
    env = gymnasium.make("CartPole-v1")
    space = gymnasium.spaces.Dict(state=env.observation_space)
    return TransformObservation(env, lambda obs: {"state": obs}, space)


@pytest.mark.parametrize(
    ("policy", "env", "flags", "named"),
    [
        ("MlpPolicy", late_actions, {}, "actions that begin at 0, got Discrete"),
        ("MlpPolicy", normalized, {}, "and NormalizeObservation"),
        ("MultiInputPolicy", dict_observation, {}, "FlattenObservation"),
        ("MlpPolicy", dict_observation, {}, "FlattenObservation"),
        ("MlpPolicy", cart_pole, {"depth": 1.5}, "integer depth from 1 to 65536, got 1.5"),
        ("MlpPolicy", cart_pole, {"breadth": -1}, "integer breadth from 0 .*got -1"),
        ("MlpPolicy", cart_pole, {"prior": -0.5}, "finite prior >= 0, got -0.5"),
        ("MlpPolicy", cart_pole, {"gamma": 1.5}, "0 <= gamma <= 1, got 1.5"),
        ("MlpPolicy", cart_pole, {"key": 2}, "a key that is a function, got 2"),
        ("MlpPolicy", cart_pole, {"optimize_memory_usage": True}, "optimize_memory_usage"),
        ("MlpPolicy", cart_pole, {"n_steps": 3}, "n_steps=1, .*got 3"),
        ("MlpPolicy", cart_pole, {"backup": "tree"}, "got 'tree'"),
        ("MlpPolicy", cart_pole, {"backup": "whole-graph", "gamma": 1}, "gamma < 1 .*got 1"),
        ("MlpPolicy", cart_pole, {"replay_buffer_class": ReplayBuffer}, "got ReplayBuffer"),
    ],
)
def test_what_a_graph_cannot_learn_from_is_refused(policy, env, flags, named):
    with pytest.raises(ValueError, match=f"^Require .*{named}[^\n]*$"):
        GraphDQN(policy, env(), **flags)


def test_the_page_s_lines_learn():
    page = (ROOT / "docs" / "your_agent.md").read_text()
    learn, levels = re.findall(r"```python\n([^`]*gbcore.sb3 .*?)```", page, re.DOTALL)
    exec(learn.replace("2_000", "300"), namespace := {})
    assert namespace["model"].leaves.graph.novel_state_ratio < 0.9
    exec(levels.replace("2_000", "300"), namespace)
    assert 0 <= namespace["mean"] <= 1


def test_the_example_runs(capsys):
    """A flag that it cannot take is one line."""
    for backup in ("graph", "whole-graph", "one-step"):
        flags = ("--total-timesteps", 1200, "--num-envs", 2, "--backup", backup)
        assert command(sb3_dqn, *flags) == 0
        assert f"FrozenLake-v1, {backup}: return" in capsys.readouterr().out
    for flags, named in (
        (("--env-id", "Frozen Lakes"), "unknown environment"),
        (("--num-envs", 0), "--num-envs >= 1"),
        (("--env-id", "Pendulum-v1"), "cannot use Pendulum-v1: "),
    ):
        assert refuses(capsys, sb3_dqn, flags, named)


def test_a_model_plays_held_out_levels_on_a_graph_of_its_own_episode():
    def make(held_out=True):
        return Levels(gymnasium.make("Maze-v0", size=5), held_out)

    trained, held_out = (
        {make(kind).reset(seed=seed)[1]["level"] for seed in range(30)} for kind in (False, True)
    )
    assert min(len(trained), len(held_out)) > 2
    assert not trained & held_out
    model = GraphDQN("MlpPolicy", make_vec_env(make), seed=1, gamma=0.95, buffer_size=100)
    alone = evaluate_policy(model, make_vec_env(make, 4, seed=2), n_eval_episodes=20)[0]
    own = OwnGraph(make_vec_env(make, 4, seed=2), model)
    mean = evaluate_policy(own, own, n_eval_episodes=20)[0]
    assert mean > alone + 0.2  # an untrained network repeats itself; its graph does not
    graph = own._graph.values.graph
    own.reset()
    assert graph.num_transitions < 4 * 100
    with pytest.raises(ValueError, match="Require `act` before `observe`"):
        evaluate_policy(model, own)  # which acts by itself


def test_a_training_that_a_callback_ended_goes_on_with_a_new_episode():
    env = gymnasium.make("FrozenLake-v1", is_slippery=False)
    model, of_task = make_model(lambda: env, 1), env.unwrapped.P
    for _ in range(10):
        model.learn(50, lambda found, _: found["self"].num_timesteps % 7, reset_num_timesteps=False)
    edges = model.replay_buffer.graph.edges()
    states = model.replay_buffer.graph.observations.reshape(-1)
    assert edges["count"].sum() > 30
    for source, action, after in zip(edges["source"], edges["action"], edges["next"], strict=True):
        assert states[after] == of_task[states[source]][action][0][1]
