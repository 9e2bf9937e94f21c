"""reproduce/target_bias.py on replays that can be worked by hand."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import target_bias
from target_bias import BACKUPS

from gbcore import TransitionGraph

GAMMA = 0.5
EPISODE = [(0, 0, 1.0, 1, False, False), (1, 0, 2.0, 2, False, False), (2, 0, 4.0, 3, True, True)]


def run_of(steps, values=None):
    """A recorded run of steps (state, action, reward, next state, terminated, cut), two actions."""
    graph = TransitionGraph(2, obs_shape=(1,), obs_dtype=np.int64)
    for state in (3, 2, 1, 0):
        graph.node(np.array([state]))
    states, actions, rewards, following, terminated, cut = map(np.array, zip(*steps, strict=True))
    ids = np.array([graph.find(np.array([state])) for state in range(4)])
    columns = (ids[states], actions, rewards, ids[following], terminated, cut)
    replay = dict(zip(target_bias.recorded.COLUMNS, columns, strict=True))
    for transition in zip(*columns[:5], strict=True):
        graph.add(*transition)

    def network(which):
        assert which == "target"
        return lambda obs: np.array([values[int(state)] for (state,) in obs], np.float32)

    return SimpleNamespace(graph=graph, replay=replay, network=network)


def test_returns_stop_at_ends():
    """A truncation and the newest row give no return."""
    truncated = [(0, 0, 1.0, 1, False, False), (1, 1, 1.0, 0, False, True)]
    run = run_of([*EPISODE, *truncated, (2, 0, 4.0, 3, True, True), (0, 0, 1.0, 1, False, True)])
    returns = target_bias.returns_of(run.replay, GAMMA)
    np.testing.assert_array_equal(returns, [3, 4, 4, np.nan, np.nan, 4, np.nan])


def test_the_network_error_is_discounted_by_depth():
    """A network that is 8 too high in a chain, whose other action it takes for bad."""
    values = {0: (11.0, -99.0), 1: (12.0, -99.0), 2: (12.0, -99.0), 3: (0.0, 0.0)}
    run = run_of(EPISODE * 10, values)
    table = target_bias.bias_of(run, GAMMA)
    assert {row["count"] for row in table} == {"all", "from 10"}
    bias = {(row["target"], row["depth"]): row["bias"] for row in table if row["count"] == "all"}
    for name, (of_trajectory, *_) in BACKUPS.items():  # three steps reach the end from everywhere
        assert of_trajectory or bias[name, 0] == pytest.approx(bias[name, 3], abs=1e-3)
    for row in table:
        if row["count"] != "all" or row["depth"] not in (1, 2):
            continue
        assert row["pairs"] == target_bias.SAMPLE
        assert row["return"] == pytest.approx((3 + 4 + 4) / 3, abs=0.1)
        prior = BACKUPS[row["target"]][2]
        first = second = 4.0  # of states 0 and 1; the third one's target does not bootstrap
        if row["depth"] == 2:  # their next pairs were seen 10 times, and are 4 and 0 too high
            first = GAMMA * (10 * 4 + prior * 8) / (10 + prior)
            second = GAMMA * (10 * 0 + prior * 8) / (10 + prior)
        assert row["bias"] == pytest.approx((first + second) / 3, abs=0.15)


def test_the_command_prints_a_table_and_keeps_all_numbers(monkeypatch, capsys, tmp_path):
    run, runs = run_of(EPISODE * 10, np.zeros((4, 2))), (Path("runs/one"),)
    run.task, run.networks = "chain", {}
    run.config = {"backup": "tree", "seed": 7, "gamma": GAMMA, "depth": 5}
    monkeypatch.setattr(target_bias.recorded, "read", lambda path: run)
    file = tmp_path / "bias.csv"
    target_bias.main(runs, file)
    printed = capsys.readouterr().out.splitlines()
    assert [line[:20] for line in printed].count("| chain | tree | 7 |") == len(BACKUPS)
    numbers = (len(BACKUPS) * len(target_bias.DEPTHS) - 2) * 2  # all, and from 10
    assert len(file.read_text().splitlines()) == 1 + numbers
    run.replay = None
    with pytest.raises(SystemExit):
        target_bias.main(runs)
    assert capsys.readouterr().err == "error: runs/one has no checkpoint\n"
