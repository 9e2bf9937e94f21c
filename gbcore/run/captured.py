"""CapturedCalls: functions of tensors of a few shapes, replayed as CUDA graphs."""

from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch

from gbcore.run.flags import fail, warn


class Plan(NamedTuple):
    """Calls of one kind: what they read on the device, and the CUDA graph that repeats them."""

    tensors: tuple[torch.Tensor, ...]
    graph: "torch.cuda.CUDAGraph | None" = None
    result: torch.Tensor | None = None  # overwritten by each replay


class CapturedCalls:
    """Calls function(*tensors), which waits for no device and reads no value from it.

    The first call of a name, a kind and shapes runs as it is, which warms it up; the second one is
    captured; later ones copy their tensors into those of the first and replay the graph. Where
    capture fails, one warning is given and the same operations go on one by one.

    Args:
        device: where the tensors go.
        use_graphs: capture at all; without, the same operations run one by one.

    Attributes:
        plans: by name, kind and shapes; to be cleared where memory that a function reads has moved.
    """

    def __init__(self, device: torch.device, use_graphs: bool) -> None:
        self.device: torch.device = device
        self.use_graphs: bool = use_graphs
        self.plans: dict[Hashable, Plan] = {}
        self._have_run: set[str] = set()

    def __call__(
        self, function: Callable[..., torch.Tensor], kind: Hashable, *tensors: torch.Tensor
    ) -> torch.Tensor:
        """The function's one tensor.

        Args:
            function: of the tensors, on the device; another one may come with each call, if those
                of the same name and kind do the same.
            kind: what the function knows on the host.
            tensors: of the host. A GPU copies them from pinned memory, without being waited for.
        """
        name = function.__name__
        key = (name, kind, *(tensor.shape for tensor in tensors))
        if self.device.type == "cuda":
            tensors = tuple(tensor.pin_memory() for tensor in tensors)
        plan = self.plans.get(key)
        if plan is None:
            moved = tuple(tensor.to(self.device, non_blocking=True) for tensor in tensors)
            self.plans[key] = Plan(moved)
            try:
                result = function(*moved)
            except RuntimeError as error:
                if name in self._have_run:
                    raise
                fail(f"the first {name} on the GPU failed; --no-cuda is the CPU: {error}", 1)
            self._have_run.add(name)
            return result
        for static, tensor in zip(plan.tensors, tensors, strict=True):
            static.copy_(tensor, non_blocking=True)
        if self.use_graphs and plan.graph is None:
            try:
                plan = self.plans[key] = self._captured(function, plan)
            except RuntimeError as error:
                warn(f"no CUDA graph of {name}, operations go on one by one: {error}")
                self.use_graphs = False
        if plan.graph is None or plan.result is None:
            return function(*plan.tensors)
        plan.graph.replay()
        return plan.result.clone()

    def _captured(self, function, plan):
        graph = torch.cuda.CUDAGraph()
        pool = next((other.graph.pool() for other in self.plans.values() if other.graph), None)
        with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.current_stream()):
            result = function(*plan.tensors)
        return plan._replace(graph=graph, result=result)
