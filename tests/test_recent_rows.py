"""RecentRows: what is read is never `age` updates old, and always of the state that has the id."""

from collections import deque

import numpy as np
import pytest
import torch
from conftest import scaled

from gbcore import TransitionGraph
from gbcore.recent_rows import RecentRows


class Computed:
    """A network whose rows say of which update, and of which state, they are."""

    def __init__(self, age, dtype=torch.float32):
        self.graph, self.update, self.num_evaluated = TransitionGraph(1, (1,), np.int64), 0, 0
        self.recent = RecentRows(self.graph, self.evaluate, age, 2, dtype)
        self.dtype = dtype

    def evaluate(self, nodes):
        self.num_evaluated += len(nodes)
        states = self.graph.observations_of(nodes)[:, 0]
        rows = np.stack([np.full(len(nodes), self.update), states], axis=1)
        return torch.from_numpy(rows).to(self.dtype)

    def read(self, nodes):
        """[n, 2] of an update that asks for the nodes in two parts, as levels do."""
        self.recent.begin_update()
        parts = [part for part in np.array_split(nodes, 2) if len(part)]
        return torch.cat([self.recent.rows(part) for part in parts]).float().numpy()


@pytest.mark.parametrize("age", [1, 2, 5])
def test_rows_are_evaluated_anew_after_their_age_and_go_with_their_state(age):
    """Against a dict that remembers when each state was evaluated. Ids are freed and given again;
    half way another object goes on from what the first one saved.
    """
    rng, computed = np.random.default_rng(0), Computed(age)
    graph, ring, when = computed.graph, deque(), {}
    states_of_id, evaluated, asked = {}, 0, 0
    for number in range(scaled(400, 100)):
        row = graph.node(np.array([number])), 0, 0.0, graph.node(np.array([number + 1])), False
        graph.add(*row)
        ring.append(row)
        states_of_id.setdefault(row[3], set()).add(number + 1)
        if len(ring) > 8:
            graph.remove(*ring.popleft())
        if number == 50:
            again = RecentRows(graph, computed.evaluate, age, 2, torch.float32)
            again.restore(computed.recent.state())
            computed.recent = again
        nodes = rng.permutation(np.unique([[row[0], row[3]] for row in ring]))[:6]
        computed.update = number
        states = graph.observations_of(nodes)[:, 0]
        asked += len(nodes)
        for state in states.tolist():
            if number - when.get(state, -age) >= age:
                when[state] = number
                evaluated += 1
        expected = [(when[state], state) for state in states.tolist()]
        np.testing.assert_array_equal(computed.read(nodes), expected)
        assert len(computed.recent._rows) <= 6 * age
    assert computed.num_evaluated == evaluated
    assert max(map(len, states_of_id.values())) > 5, "ids were given out again"
    assert (evaluated < asked) == (age > 1)


def test_bfloat16_comes_back_as_it_was():
    computed = Computed(3, torch.bfloat16)
    nodes = np.array([computed.graph.node(np.array([k])) for k in (257, 3)])  # 257: rounded to 256
    computed.read(nodes)
    other = RecentRows(computed.graph, computed.evaluate, 3, 2, torch.bfloat16)
    other.restore(computed.recent.state())
    other.begin_update()
    rows = other.rows(nodes)
    assert (rows.dtype, rows.tolist()) == (torch.bfloat16, [[0, 256], [0, 3]])
    assert computed.num_evaluated == 2


def test_what_is_no_node_and_what_cannot_be_restored_is_refused():
    with pytest.raises(ValueError, match="Require age >= 1, got 0"):
        Computed(0)
    computed = Computed(2)
    graph, recent = computed.graph, computed.recent
    nodes = np.array([graph.node(np.array([k])) for k in range(3)])
    graph.add(0, 0, 0.0, 1, False)
    computed.read(nodes)
    saved = recent.state()
    assert recent.rows(nodes[:0]).shape == (0, 2)
    for bad in (-1, 3):
        with pytest.raises(KeyError, match="Require ids of nodes"):
            recent.rows(np.array([bad]))
    graph.remove(0, 0, 0.0, 1, False)  # frees 0 and 1
    assert recent.state()["nodes"].tolist() == [2]
    with pytest.raises(KeyError, match="which was freed"):
        recent.rows(nodes)
    two = {"nodes": nodes[2:], "ages": np.zeros(1, np.int64), "values": np.ones((1, 2), np.float32)}
    for changed, words in (
        (saved, "which was freed"),
        ({"nodes": two["nodes"] + 1}, "Require ids of nodes, got 3"),
        ({"ages": two["ages"] + 2}, r"ages within \[0, 2\)"),
        ({"values": two["values"] * np.nan}, "finite"),
        ({"values": np.ones((1, 3), np.float32)}, r"\(1, 2\)"),
        ({"values": np.ones((1, 2))}, "float64"),
        ({name: np.concatenate([array] * 2) for name, array in two.items()}, "distinct nodes"),
    ):
        error = KeyError if "freed" in words or "ids" in words else ValueError
        with pytest.raises(error, match=words):
            recent.restore(two | changed)
    assert recent.state()["nodes"].tolist() == [2], "nothing has changed"
    recent.restore(two)
    np.testing.assert_array_equal(recent.rows(nodes[2:]), two["values"])
