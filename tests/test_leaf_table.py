"""LeafTable: what it returns is always the value of the state that has the id now."""

import copy

import numpy as np
import pytest
import torch
from conftest import graph_of, scaled

from gbcore import LeafTable, Replay
from gbcore.values import CHUNK


def value_of(obs):
    """Two numbers that no other observation has. [n, 1] -> float32 [n, 2]"""
    assert len(obs) == CHUNK
    return (obs * [1, -1]).astype(np.float32)


@pytest.mark.parametrize("ahead", [0, 1_500])  # also where the table has to grow
def test_a_reused_id_never_has_the_value_of_its_former_state(ahead):
    """Nobody tells the table what was freed: a value is kept with the generation of its id."""
    rng = np.random.default_rng(0)
    graph = graph_of(0)
    table = LeafTable(graph, value_of)
    graph.nodes(-1 - np.arange(ahead)[:, None])
    replay, states_of_id = Replay(graph, 20), {}
    for number in range(scaled(4_000, 800)):
        replay.record(np.array([number]), 0, 0.0, after := np.array([number + 1]), False)
        states_of_id.setdefault(graph.find(after), set()).add(number + 1)
        if rng.random() < 0.5:
            nodes = np.unique(replay.next_node[: replay.size])
            some = nodes[rng.random(len(nodes)) < 0.7]
            expected = graph.observations_of(some)[:, 0]
            np.testing.assert_array_equal(table.values(some)[:, 0], expected)
    assert min(len(states) for states in states_of_id.values()) > 10, "ids were given out again"
    assert table.num_evaluated < 2 * len(states_of_id) * max(map(len, states_of_id.values()))


def test_what_is_no_node_or_no_value_is_refused():
    graph, nodes = graph_of(2), np.arange(2)
    table = LeafTable(graph, value_of)
    for bad in (-1, 2):
        for ask in (table.values, table.renew, table.evaluated):
            with pytest.raises(KeyError, match="Require ids of nodes"):
                ask(np.array([0, bad]))
        with pytest.raises(KeyError, match="Require 0 <= id < 2"):
            graph.observations_of(np.array([0, bad]))
    graph.add(0, 0, 0.0, 1, False)
    table.values(nodes)
    graph.remove(0, 0, 0.0, 1, False)
    again = np.array([graph.node(np.array([2]))])  # 0 or 1 again, the other one stays free
    for ask in (table.values, table.renew, table.evaluated):
        with pytest.raises(KeyError, match="which was freed"):
            ask(nodes)
    narrow = LeafTable(graph, lambda obs: value_of(obs)[:, :1])
    for ask in (narrow.values, narrow.evaluated):
        with pytest.raises(ValueError, match=r"Require values of shape \(32, 2\), got \(32, 1\)"):
            ask(again)
    assert not narrow.known.any()


class Noisy(torch.nn.Module):
    """A network with whatever keeps values apart: a weight, a buffer, dropout."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 2)
        self.drop = torch.nn.Dropout(0.5)
        self.register_buffer("shift", torch.zeros(2))

    def forward(self, obs):
        return self.drop(self.layer(obs.float())) + self.shift


def adam(network):
    network.layer(torch.ones(1, 1)).sum().backward()  # none is dropped
    torch.optim.Adam(network.parameters(), 0.1, fused=True).step()


WRITES = {
    "load_state_dict": lambda n: n.load_state_dict({k: v + 1 for k, v in n.state_dict().items()}),
    "in place": lambda n: n.layer.bias.detach().add_(1),
    "data": lambda n: n.layer.bias.data.add_(1),
    "NumPy": lambda n: n.layer.bias.detach().numpy().__iadd__(1),
    "buffer": lambda n: n.shift.add_(1),
    "another tensor": lambda n: setattr(n, "shift", torch.ones(2)),
    "fused Adam": adam,
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_table_notices_that_its_network_changed(write):
    graph, nodes, network = graph_of(5), np.arange(5), Noisy()

    def evaluate(obs):
        return network(torch.as_tensor(obs)).detach().numpy()

    table = LeafTable(graph, evaluate, network)
    before = table.values(nodes)
    assert network.drop.training  # and yet nothing is dropped
    np.testing.assert_array_equal(table.values(nodes), before)
    assert table.num_evaluated == 5
    write(network)
    assert not table.known.any()
    network.eval()
    expected = evaluate(graph.observations_of(nodes))
    network.train()
    assert (table.values(nodes) != before).any()
    np.testing.assert_allclose(table.values(nodes), expected, rtol=1e-6)
    assert table.num_evaluated == 10


def test_a_copied_table_watches_the_network_that_it_asks():
    graph, node, network = graph_of(2), np.array([1]), Noisy()
    table = LeafTable(graph, lambda obs: network(torch.as_tensor(obs)).detach().numpy(), network)
    other = copy.deepcopy(table)
    table.values(node), other.values(node)
    adam(network)
    np.testing.assert_array_equal(other.values(node), table.values(node))
    assert other.num_evaluated == table.num_evaluated == 2
