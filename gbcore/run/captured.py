"""CapturedCalls: a function of tensors of a few shapes, replayed as CUDA graphs."""

from typing import Any, NamedTuple

import torch

from gbcore.run.flags import fail, warn


class Plan(NamedTuple):
    """A call of one shape: what it reads on the device, and the CUDA graph that repeats it."""

    template: Any
    tensors: tuple
    graph: "torch.cuda.CUDAGraph | None" = None
    result: torch.Tensor | None = None  # overwritten by each replay


class CapturedCalls:
    """Calls function(template, *tensors), which waits for no device and reads no value from it.

    The first call of a shape runs as it is, which warms it up; the second one is captured; later
    ones copy their tensors into those of the first and replay the graph. Where capture fails, one
    warning is given and the same operations go on one by one.

    Args:
        function: returns one tensor; its template is whatever it knows of a shape on the host.
        use_graphs: capture at all; without, the same operations run one by one.
    """

    def __init__(self, function, use_graphs):
        self.function, self.use_graphs = function, use_graphs
        self.plans = {}  # by shape; to be cleared where memory that the function names has moved
        self.has_run = False

    def __call__(self, template, *tensors):
        key = tuple(tensor.shape for tensor in tensors)
        plan = self.plans.get(key)
        if plan is None:
            self.plans[key] = Plan(template, tensors)
            try:
                result = self.function(template, *tensors)
            except RuntimeError as error:
                if self.has_run:
                    raise
                fail(f"the first update on the GPU failed; --no-cuda runs on the CPU: {error}", 1)
            self.has_run = True
            return result
        for static, tensor in zip(plan.tensors, tensors, strict=True):
            static.copy_(tensor)
        if self.use_graphs and plan.graph is None:
            try:
                plan = self.plans[key] = self._captured(plan)
            except RuntimeError as error:
                warn(f"no CUDA graphs here, operations go on one by one: {error}")
                self.use_graphs = False
        if plan.graph is None:
            return self.function(plan.template, *plan.tensors)
        plan.graph.replay()
        return plan.result.clone()

    def _captured(self, plan):
        graph = torch.cuda.CUDAGraph()
        pool = next((other.graph.pool() for other in self.plans.values() if other.graph), None)
        with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.current_stream()):
            result = self.function(plan.template, *plan.tensors)
        return plan._replace(graph=graph, result=result)
