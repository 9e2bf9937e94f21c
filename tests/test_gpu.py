"""The update of a GPU, where there is none: on torch's meta device, and with captures that fail."""

from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import jitted
from test_rainbow_atari import fill, make_learner, on_gpu
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gb_rainbow_atari as script
from gbcore.run import updates

pytestmark = [jitted, pytest.mark.usefixtures("torch_settings")]


def filled_learner(monkeypatch, **flags):
    """A learner on the meta device, which takes no steps, and a batch of a replay of few states."""
    learner = make_learner(device="meta", batch_size=8, breadth=5, **flags)
    monkeypatch.setattr(learner.optimizer, "step", lambda: None)
    return fill(learner, 8)


class NothingFromTheHost(TorchDispatchMode):
    """Raises where a tensor of the host is read, which capture refuses. On a GPU `x[i, j] = 1`
    makes one of its number. Here it is a scalar_tensor, as others are that a GPU would take."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, torch.Tensor)]
        if operation is torch.ops.aten.scalar_tensor.default or any(
            tensor.device.type == "cpu" for tensor in tensors
        ):
            raise RuntimeError(f"{operation} takes something from the host")
        return result


def test_a_number_that_capture_refuses_is_noticed():
    x = torch.ones(2, 2).to("meta")
    with NothingFromTheHost(), pytest.raises(RuntimeError, match="from the host"):
        x[0, 1] = 1


def watched(calls, function, kind, *tensors, call=updates.CapturedCalls.__call__):
    def within(*tensors):
        with NothingFromTheHost():
            return function(*tensors)

    within.__name__ = function.__name__
    return call(calls, within, kind, *tensors)


@pytest.mark.parametrize("flags", [{}, {"prior": 2.0}, {"target_network_frequency": 2}])
@pytest.mark.parametrize("backup", script.BACKUPS)
def test_the_padded_update_waits_for_no_device_and_mixes_none(backup, flags, monkeypatch):
    """Meta tensors hold no values: what reads one, or joins it with a CPU's, raises. So does what
    takes anything from the host where CUDA graphs are captured.

    Covers transfers, frames, both networks, heads, acting, targets, loss, gradients and clipping,
    of every backup. Not covered: Adam's fused kernel, replays, bfloat16 and arithmetic.
    """
    learner, batch = filled_learner(monkeypatch, backup=backup, **flags)
    rng = np.random.default_rng(0)
    monkeypatch.setattr(updates.CapturedCalls, "__call__", watched)
    for _ in range(2):
        result = learner.update(batch, rng)
        assert (result.device.type, tuple(result.shape)) == ("meta", (8 + 2,))
    seen = []
    monkeypatch.setattr(torch.Tensor, "cpu", lambda actions: seen.append(actions) or torch.ones(5))
    for noisy in (False, True):
        learner.act(np.zeros((5, 4, 84, 84), np.uint8), noisy)
    assert [(actions.device.type, *actions.shape) for actions in seen] == [("meta", 5)] * 2
    assert all(p.grad.device.type == "meta" for p in learner.online.parameters())


class Counted(TorchDispatchMode):
    """Counts operations that a device would run: views and memory that is handed out are none."""

    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        schema = operation._schema
        is_view = bool(schema.returns) and all(
            returned.alias_info is not None and not returned.alias_info.is_write
            for returned in schema.returns
        )
        is_none = ("_unsafe_view", "_reshape_alias", "empty", "profiler")
        self.number += not (is_view or any(name in schema.name for name in is_none))
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("backup", "most"),
    [("one-step", 160), ("tree", 240), ("graph", 240), ("n-step", 320), ("graph-mixed", 320)],
)
def test_operations_of_an_update(backup, most, monkeypatch):
    """Forward, backward and clipping, without Adam, which is one: a GPU's time goes by these."""
    (learner, batch), numbers = filled_learner(monkeypatch, backup=backup), []

    def count(calls, function, kind, *tensors):
        moved = [tensor.to("meta") for tensor in tensors]
        with Counted() as counted:
            result = function(*moved)
        numbers.append(counted.number)
        return result

    monkeypatch.setattr(updates.CapturedCalls, "__call__", count)
    learner.update(batch, np.random.default_rng(0))
    assert max(numbers) <= most


def test_where_capture_fails_the_same_operations_go_on_one_by_one(capsys):
    results = []
    for use_graphs in (False, True):  # on a CPU every capture fails
        torch.manual_seed(0)
        learner, batch = fill(on_gpu(make_learner(batch_size=8, breadth=5)), 8)
        learner.updates.captured.use_graphs = use_graphs
        rng = np.random.default_rng(1)
        results.append([learner.update(batch, rng).numpy() for _ in range(4)])
    np.testing.assert_array_equal(*results)
    (line,) = capsys.readouterr().err.splitlines()
    assert "no CUDA graph of update" in line


def test_a_captured_call_is_replayed(monkeypatch):
    """The order of warm-up, capture and replays, with a stand-in for the CUDA graph."""
    calls, graph = [], Mock()
    monkeypatch.setattr(
        updates.CapturedCalls, "_captured",
        lambda self, function, plan: plan._replace(graph=graph, result=plan.tensors[0]),
    )  # fmt: skip
    call = updates.CapturedCalls(torch.device("cpu"), True)

    def double(x):
        calls.append(len(x))
        return 2 * x

    outputs = [call(double, "a", torch.full((2,), i)) for i in range(3)]
    assert (calls, graph.replay.call_count) == ([2], 2)
    assert [o.tolist() for o in outputs] == [[0, 0], [1, 1], [2, 2]]
    call(double, "b", torch.zeros(2))
    call(double, "a", torch.zeros(3))
    assert calls == [2, 2, 3]
