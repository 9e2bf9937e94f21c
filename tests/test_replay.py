"""gbcore.replay: rows in time order, and their priorities; the graph holds the same rows."""

import copy

import numpy as np
import pytest
from conftest import graph_of

from gbcore import PrioritizedReplay, Replay, TransitionGraph


def replay_of(capacity, kind=Replay, *arguments, ways=0):
    """A replay of the nodes 0 to 4, and of steps from one to the next."""
    replay = kind(graph_of(5, num_actions=3), capacity, *arguments)
    for node in range(ways):
        replay.add(node, 0, 0.0, node + 1, False)
    return replay


def test_rows_are_cut_where_the_next_one_does_not_go_on():
    replay = replay_of(4, ways=2)
    replay.end_episode()
    for node, next_node, cut in (
        (2, 3, [False, True, True, True]), (3, 4, [False, True, False, True]),
        (4, 0, [True, True, False, False]),  # in place of the oldest row
        (2, 3, [True, True, False, False]),  # nobody said that an episode ended
        (3, 4, [True, False, True, False]),
    ):  # fmt: skip
        replay.add(node, 0, 0.0, next_node, False)
        assert replay.cut.tolist() == cut
    assert (replay.position, replay.size, replay.graph.num_transitions) == (3, 4, 4)
    alone = replay_of(1)
    for _ in range(3):
        alone.add(0, 0, 1.0, 0, False)
        assert alone.cut.all()


def test_rows_after_a_state_have_no_priority_once_it_is_restored():
    replay = replay_of(6, PrioritizedReplay, 0.5, ways=1)
    before = copy.deepcopy((replay.graph.state(), replay.state()))
    for node in range(1, 4):
        replay.add(node, 0, 0.0, node + 1, False)
    replay.graph.restore(before[0])
    replay.restore(before[1])
    assert not replay.sample(64, np.random.default_rng(0), 0.5).rows.any()


def test_rows_that_are_there_are_equally_likely():
    replay = replay_of(9, ways=4)
    rows = replay.sample(4_000, np.random.default_rng(0)).rows
    shares = np.bincount(rows, minlength=9) / 4_000
    np.testing.assert_allclose(shares, [0.25] * 4 + [0] * 5, atol=0.03)


def test_what_the_graph_refuses_is_no_row():
    replay = replay_of(4)
    with pytest.raises(ValueError, match="action"):
        replay.add(0, 7, 0.0, 1, False)
    with pytest.raises(TypeError, match="integer"):  # several at once, as the graph takes them
        replay.add(np.arange(2), [0, 0], [0, 0], np.arange(1, 3), [False, False])
    assert (replay.size, replay.position, replay.graph.num_transitions) == (0, 0, 0)
    with pytest.raises(ValueError, match="capacity"):
        Replay(replay.graph, 0)


def test_a_row_can_be_recorded_without_ids():
    """As by ids: observations are interned, keys kept, an end of the episode cuts."""
    for key in ({}, {"key_shape": (1,), "key_dtype": np.int64}):
        graphs = [TransitionGraph(3, (1,), np.int64, **key) for _ in range(2)]
        by_obs, by_id = (Replay(graph, 5) for graph in graphs)
        rng = np.random.default_rng(0)
        for i in range(12):
            obs, next_obs = rng.integers(4, size=(2, 1))
            keys = {"key": obs // 2, "next_key": next_obs // 2} if key else {}
            ends = {"terminated": i % 4 == 0, "truncated": i % 3 == 0}
            by_obs.record(obs, i % 3, float(i), next_obs, **ends, **keys)
            node = graphs[1].node(obs, keys.get("key"))
            next_node = graphs[1].node(next_obs, keys.get("next_key"))
            by_id.add(node, i % 3, float(i), next_node, ends["terminated"], obs)
            if any(ends.values()):
                by_id.end_episode()
        for name, column in by_obs.state()["rows"].items():
            np.testing.assert_array_equal(column, by_id.state()["rows"][name])
        assert graphs[0].check_valid() == []
    with pytest.raises(ValueError, match="Require source 'trajectory' or 'graph', got 'tree'"):
        by_obs.subgraphs(by_obs.sample(2, rng), "tree", 2)
    with pytest.raises(ValueError, match="Require a transition to sample"):
        Replay(graphs[0], 2).sample(1, rng)


def test_rows_of_another_graph_change_nothing():
    """A graph that has more may have got the others elsewhere."""
    replay, other = replay_of(4), replay_of(4)
    other.add(0, 2, 0.0, 1, False)
    saved = copy.deepcopy(other.state())
    with pytest.raises(ValueError, match=f"Require rows of the graph's {replay.size} transitions"):
        replay.restore(saved)
    assert replay.size == other.size - 1
    replay.graph.add(0, 2, 0.0, 1, False)
    replay.restore(saved)
    assert replay.size == other.size


class Marked(PrioritizedReplay):
    """With a number for each row."""

    def __init__(self, *args):
        super().__init__(*args)
        self.mark = np.zeros(self.capacity)


@pytest.mark.parametrize("num_rows", [0, 2, 4, 6])
def test_a_restored_replay_goes_on_the_same(num_rows):
    """Also in a ring with more room, where there was still room."""
    rng = np.random.default_rng(0)
    replay = replay_of(4, Marked, 0.5)

    def walk(replay, steps):
        for _ in range(steps):
            node, next_node = rng.integers(5, size=2)
            for _ in range(2):  # it comes twice: the first removal frees no node
                replay.end_episode()
                replay.mark[replay.position] = rng.random()
                replay.add(node, int(rng.integers(3)), 1.0, next_node, False)
            replay.update_priorities(np.arange(replay.size), rng.random(replay.size) * 9)

    walk(replay, num_rows // 2)
    other = replay_of(9 if num_rows < 4 else 4, Marked, 0.5)
    other.graph.restore(replay.graph.state())
    other.restore(replay.state())
    for of in (replay, other):
        rng = np.random.default_rng(1)
        walk(of, 1)
    for name in (*replay.COLUMNS, "mark"):
        np.testing.assert_array_equal(getattr(replay, name)[:4], getattr(other, name)[:4])
    np.testing.assert_array_equal(replay.priorities.get(range(4)), other.priorities.get(range(4)))
    assert replay.position % 4 == other.position % 4
    assert replay.max_priority == other.max_priority


def test_priorities_are_errors_to_the_exponent_and_weights_undo_them():
    """Schaul et al. 2016: P(i) of p_i ** alpha, weights (N P(i)) ** -beta over their largest."""
    replay = replay_of(5, PrioritizedReplay, 0.5, ways=4)
    replay.update_priorities(np.arange(4), np.array([-1.0, 4.0, -9.0, 16.0], np.float32))
    np.testing.assert_allclose(replay.priorities.get(np.arange(4)), [1, 2, 3, 4])
    batch = replay.sample(4000, np.random.default_rng(0), importance_exponent=0.7)
    share = np.bincount(batch.rows, minlength=4) / 4000
    np.testing.assert_allclose(share, [0.1, 0.2, 0.3, 0.4], atol=1e-3)  # drawn in slices
    weights = (np.array([1, 2, 3, 4]) / 10 * 4) ** -0.7
    np.testing.assert_allclose(batch.weights, (weights / weights[0])[batch.rows], rtol=1e-5)
    replay.add(4, 0, 0.0, 0, False)
    assert replay.priorities.get([4]) == 4, "a new transition gets the largest priority so far"
