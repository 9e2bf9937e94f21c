"""The scripts follow the paper's protocol: flags, when what happens in training, and with what."""

from dataclasses import asdict

import numpy as np
import pytest
import torch
from conftest import jitted, play, read_metrics, spy
from test_dqn_scripts import TASKS, both, make_learner

import gb_dqn_minatar
import gb_dqn_minigrid
import gb_rainbow_atari
from gbcore import FrontierEpisodes, PrioritizedReplay, Replay

pytestmark = [jitted, pytest.mark.usefixtures("torch_settings")]


def test_rainbow_s_backups_are_those_of_dqn_by_double_learning():
    double = {"greedy": "double", "behaviour": "behaviour"}
    backups = gb_dqn_minigrid.BACKUPS.items()
    assert {name: (at, double[rule]) for name, (at, rule) in backups} == gb_rainbow_atari.BACKUPS


# The paper's appendix and the commands that its authors released.
DQN_FLAGS = {
    "total_timesteps": 100_000, "depth": 5, "batch_size": 32, "target_network_frequency": 8000,
    "updates_per_train": 1, "adam_eps": 1.5e-4, "start_e": 1.0, "end_e": 0.02,
    "eval_frequency": 1000, "eval_episodes": 3, "eval_epsilon": 0.001, "buffer_size": 0,
    "act_on": "network", "prior": 0.0, "backup": "graph",
    "exploration": "epsilon-greedy",
}  # fmt: skip


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        (gb_dqn_minigrid, DQN_FLAGS | {
            "breadth": 50, "gamma": 0.95, "learning_rate": 1e-3, "learning_starts": 5000,
            "train_frequency": 1,
        }),
        (gb_dqn_minatar, DQN_FLAGS | {
            "breadth": 20, "gamma": 0.99, "learning_rate": 6.5e-5, "learning_starts": 1600,
            "train_frequency": 4, "episode_seed": "fresh",
        }),
        (gb_rainbow_atari, {
            "total_timesteps": 100_000, "depth": 10, "breadth": 10, "gamma": 0.99,
            "learning_rate": 1e-4, "batch_size": 32, "updates_per_train": 2, "train_frequency": 1,
            "learning_starts": 2000, "target_network_frequency": 1, "start_e": 1.0, "end_e": 0.0,
            "exploration_steps": 2001, "priority_exponent": 0.5, "importance_exponent": 0.4,
            "buffer_size": 0, "adam_eps": 1.5e-4, "max_grad_norm": 10.0, "n_atoms": 51,
            "noisy_std": 0.5,
            "v_min": -10.0, "v_max": 10.0, "eval_episodes": 100, "eval_epsilon": 0.001,
            "eval_frequency": 10_000, "exploration": "epsilon-greedy", "backup": "graph",
        }),
    ],
    ids=["minigrid", "minatar", "atari"],
)  # fmt: skip
def test_the_defaults_are_the_papers_protocol(script, flags):
    defaults = asdict(script.Args())
    assert {name: defaults[name] for name in flags} == flags


@both
def test_when_dqn_acts_learns_and_evaluates(script, task, tmp_path, monkeypatch):
    updates, copies, batches, evaluations = [], [], [], []
    spy(monkeypatch, Replay, "sample", lambda of, size, rng: batches.append((of.capacity, size)))
    spy(monkeypatch, script.Learner, "update", lambda of, *_: updates.append(of.replay.size))
    spy(monkeypatch, script.Learner, "update_target", lambda of: copies.append(of.replay.size))
    spy(monkeypatch, script.gb.episodes, "play_episodes", lambda policy, envs, rng, epsilon, stop:
        epsilon == 1  # random actions, after training
        or evaluations.append((policy.__self__.replay.size, len(envs), epsilon)))  # fmt: skip
    learner, run = play(
        script, tmp_path, script.evaluate, env_id=task, total_timesteps=60, learning_starts=10,
        train_frequency=4, updates_per_train=2, target_network_frequency=15, start_e=0.75,
        end_e=0.25, eval_frequency=25, eval_epsilon=0.5, eval_episodes=2, batch_size=4,
        learning_rate=0.03, adam_eps=0.2, save_model=False,
    )  # fmt: skip
    (group,) = learner.optimizer.param_groups
    assert (group["lr"], group["eps"]) == (0.03, 0.2)
    assert [*map(id, group["params"])] == [*map(id, learner.online.parameters())]
    assert updates == [step for step in range(12, 61, 4) for _ in range(2)]
    assert batches == [(60, 4)] * len(updates)
    assert copies == [15, 30, 45, 60]
    assert evaluations == [(25, 2, 0.5), (50, 2, 0.5), (60, 2, 0.5)]
    epsilons = [float(row["charts/epsilon"]) for row in read_metrics(run)]
    assert epsilons == [0.75] * 10 + [0.25] * 50


@both
@pytest.mark.parametrize("epsilon", [0.0, 1.0])
def test_dqn_acts_by_its_network_or_at_random(script, task, epsilon, tmp_path, monkeypatch):
    monkeypatch.setattr(script.Learner, "act", lambda _, obs, keys=None: np.full(len(obs), 1))
    flags = {"env_id": task, "total_timesteps": 50, "learning_starts": 20, "end_e": epsilon}
    learner, _ = play(script, tmp_path, **flags, start_e=1.0)
    actions = learner.replay.action
    assert len(set(actions[:20])) > 2
    assert (set(actions[20:]) == {1}) == (epsilon == 0.0)


@both
@pytest.mark.parametrize(
    ("backup", "flags", "target"),
    [
        ("one-step", {}, 0.5), ("n-step", {}, -0.75), ("tree", {}, 1.25), ("graph", {}, 4.0),
        ("graph-mixed", {}, 1.625), ("graph", {"prior": 1.0}, 2.25),
        ("whole-graph", {"prior": 1.0}, 2.25),
    ],
)  # fmt: skip
def test_each_backup_has_a_target_of_its_own(script, task, backup, flags, target):
    """0 1 2 3 and the end with rewards 0 2 -9 4; then 5 1 and the end with 0 8, by action 1 in 1.
    The network says 1 of everything.
    """
    flags = {"depth": 4, "breadth": 0, "gamma": 0.5} | flags
    learner = make_learner(script, task, backup=backup, **flags)
    with torch.no_grad():
        for parameter in learner.target.parameters():
            parameter.zero_()
        learner.target.layers[-1].bias.fill_(1)
    obs = np.zeros((6, *learner.graph.obs_shape), learner.graph.obs_dtype)
    obs.reshape(6, -1)[:, :6] = np.eye(6)
    nodes = learner.graph.nodes(obs)
    for s, action, reward, s2, over in (
        (0, 0, 0, 1, 0), (1, 0, 2, 2, 0), (2, 0, -9, 3, 0), (3, 0, 4, 4, 1),
        (5, 0, 0, 1, 0), (1, 1, 8, 4, 1),
    ):  # fmt: skip
        learner.replay.add(nodes[s], action, reward, nodes[s2], over)
        if over:
            learner.replay.end_episode()
    if learner.graph_values is not None:
        learner.graph_values.update()
    targets = learner.targets(learner.replay.batch_of(np.array([0])), None)
    np.testing.assert_array_equal(targets, [target])


@both
def test_the_online_network_acts_and_its_copy_is_learned_from(script, task):
    learner = make_learner(script, task)
    obs = script.make_env(learner.args, task, np.random.default_rng(0)).reset()[None]
    worst = int(learner.values(learner.target, obs).argmin())
    with torch.no_grad():
        learner.online.layers[-1].bias[worst] += 100
    assert learner.act(obs).tolist() == [worst]
    assert learner.values(learner.target, obs)[0, worst] < 50
    learner.update_target()
    assert learner.values(learner.target, obs)[0, worst] > 50


@pytest.mark.parametrize(("script", "task"), [*TASKS, (gb_rainbow_atari, "pong")])
def test_what_the_frontier_says_is_done(script, task, tmp_path, monkeypatch):
    shares = set()
    monkeypatch.setattr(FrontierEpisodes, "act", lambda of, *_, **__: shares.add(of.most) or 1)
    flags = {"exploration": "frontier", "frontier_share": 0.25}
    learner, _ = play(script, tmp_path, env_id=task, save_model=False, **flags)
    assert shares == {0.25}
    assert (learner.replay.action == 1).all()


def test_when_rainbow_acts_learns_and_evaluates(tmp_path, monkeypatch):
    script = gb_rainbow_atari
    updates, exponents, acted, evaluations, errors, priorities = [], [], [], [], [], []
    update = script.Learner.update

    def noted_update(learner, batch, rng):
        updates.append(learner.replay.size)
        result = update(learner, batch, rng)
        errors.append((batch.rows, result[:-2].numpy().copy()))
        return result

    def evaluate(args, game, policy, seed, episodes, stop):
        evaluations.append((policy.__self__.replay.size, episodes, args.eval_epsilon))
        policy(np.zeros((1, 4, 84, 84), np.uint8))
        return [1.0], [1]

    monkeypatch.setattr(script.Learner, "update", noted_update)
    spy(monkeypatch, script.Learner, "act", lambda _, obs, noisy=False: acted.append(noisy))
    spy(monkeypatch, PrioritizedReplay, "sample",
        lambda of, size, rng, exponent: exponents.append((size, exponent)))  # fmt: skip
    spy(monkeypatch, PrioritizedReplay, "update_priorities",
        lambda of, *rest: priorities.append(rest))  # fmt: skip
    learner, run = play(
        script, tmp_path, evaluate, env_id="pong", total_timesteps=40, learning_starts=20,
        train_frequency=5, updates_per_train=3, batch_size=4, exploration_steps=10, start_e=0.5,
        end_e=0.1, importance_exponent=0.2, learning_rate=0.03, adam_eps=0.2, eval_frequency=25,
        eval_episodes=1, curve_episodes=2, eval_epsilon=0.25, backup="one-step", save_model=False,
    )  # fmt: skip
    (group,) = learner.optimizer.param_groups
    assert (group["lr"], group["eps"]) == (0.03, 0.2)
    sizes, exponents = zip(*exponents, strict=True)
    assert updates == [step for step in (25, 30, 35, 40) for _ in range(3)]
    assert sizes == (4,) * 12
    np.testing.assert_allclose(exponents, [0.2 + step / 40 * 0.8 for step in updates])
    for (rows, of_update), (given_rows, given) in zip(errors, priorities, strict=True):
        assert rows is given_rows
        np.testing.assert_array_equal(of_update, given)
    assert evaluations == [(25, 2, 0.25), (40, 1, 0.25)]
    assert acted.count(False) == 2, "evaluations act without noise"
    assert acted.count(True) > 20, "training acts with noise"
    epsilons = [float(row["charts/epsilon"]) for row in read_metrics(run)]
    np.testing.assert_allclose(epsilons, [0.5 - 0.04 * min(step, 10) for step in range(40)])
