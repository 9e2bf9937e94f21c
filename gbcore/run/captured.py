"""CapturedCalls: a function of tensors of a few shapes, replayed as CUDA graphs."""

from typing import NamedTuple

import torch

from gbcore.run.flags import fail, warn


class Plan(NamedTuple):
    """Calls of one kind: what they read on the device, and the CUDA graph that repeats them."""

    tensors: tuple
    graph: "torch.cuda.CUDAGraph | None" = None
    result: torch.Tensor | None = None  # overwritten by each replay


class CapturedCalls:
    """Calls function(kind, *tensors), which waits for no device and reads no value from it.

    The first call of a kind and of shapes runs as it is, which warms it up; the second one is
    captured; later ones copy their tensors into those of the first and replay the graph. Where
    capture fails, one warning is given and the same operations go on one by one.

    Args:
        function: returns one tensor; its kind is whatever it knows on the host, hashable.
        use_graphs: capture at all; without, the same operations run one by one.
    """

    def __init__(self, function, use_graphs):
        self.function, self.name, self.use_graphs = function, function.__name__, use_graphs
        self.plans = {}  # by kind and shapes; clear where memory that the function reads has moved
        self.has_run = False

    def __call__(self, kind, *tensors):
        key = (kind, *(tensor.shape for tensor in tensors))
        plan = self.plans.get(key)
        if plan is None:
            self.plans[key] = Plan(tensors)
            try:
                result = self.function(kind, *tensors)
            except RuntimeError as error:
                if self.has_run:
                    raise
                fail(f"the first {self.name} on the GPU failed; --no-cuda is the CPU: {error}", 1)
            self.has_run = True
            return result
        for static, tensor in zip(plan.tensors, tensors, strict=True):
            static.copy_(tensor)
        if self.use_graphs and plan.graph is None:
            try:
                plan = self.plans[key] = self._captured(kind, plan)
            except RuntimeError as error:
                warn(f"no CUDA graph of {self.name}, operations go on one by one: {error}")
                self.use_graphs = False
        if plan.graph is None:
            return self.function(kind, *plan.tensors)
        plan.graph.replay()
        return plan.result.clone()

    def _captured(self, kind, plan):
        graph = torch.cuda.CUDAGraph()
        pool = next((other.graph.pool() for other in self.plans.values() if other.graph), None)
        with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.current_stream()):
            result = self.function(kind, *plan.tensors)
        return plan._replace(graph=graph, result=result)
