"""Updates and actions on a CPU and on a GPU: one interface, two ways to be quick.

A CPU pays for arithmetic. Of a batch's states it evaluates those on the greedy paths alone, level
by level: `OnCPU`. A GPU pays for launches, and for being waited for. It evaluates all states, in
shapes padded to a few sizes, from frames that it keeps. A call of shapes met before is replayed as
one CUDA graph: `OnGPU`.
"""

from collections.abc import Callable, Hashable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from gbcore.categorical import (
    Levels,
    SubgraphTensors,
    back_up,
    best_actions,
    categorical_targets,
    level_bounds,
    pack,
    unpack,
)
from gbcore.graph import TransitionGraph
from gbcore.replay import Batch
from gbcore.run.output import warn
from gbcore.run.padding import pad
from gbcore.subgraph import Subgraphs
from gbcore.targets import rows_read

Evaluate = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


# --- CPU: as few states as the rule can do with ---


class OnCPU:
    """Updates that evaluate states where the greedy paths lead, and no others."""

    def __init__(self, graph: TransitionGraph) -> None:
        self.graph: TransitionGraph = graph

    def update(
        self, learn: Callable[..., torch.Tensor], subgraphs: Subgraphs, batch: Batch, rule: str,
        prior: float,
    ) -> tuple[torch.Tensor, int]:  # fmt: skip
        """The result of learn, and the number of states evaluated for the targets, with padding.

        Args:
            learn: function of the subgraphs' states (`PathStates`, `PaddedStates`) and of the
                batch's observations [B, *obs_shape], actions int64 [B] and weights float32 [B]. It
                makes an update and returns one torch.Tensor. It must not wait for a GPU.
            subgraphs: of the batch.
            rule, prior: as in `categorical_targets`.
        """
        states = PathStates(self.graph, subgraphs, rule, prior)
        obs = torch.from_numpy(self.graph.observations_of(batch.nodes))
        actions, weights = torch.from_numpy(batch.actions), torch.from_numpy(batch.weights)
        result = learn(states, obs, actions, weights)
        return result, states.num_evaluated

    def act(
        self, policy: Callable[..., torch.Tensor], obs: NDArray[np.uint8], noisy: bool
    ) -> NDArray[np.int64]:
        """policy(obs, noisy), of observations [n, *obs_shape]; as learn, it must not wait."""
        return policy(torch.from_numpy(obs), noisy).numpy()


class PathStates:
    """The states that the targets of a batch read: R of M, of which L are read as leaves."""

    def __init__(
        self, graph: TransitionGraph, subgraphs: Subgraphs, rule: str, prior: float
    ) -> None:
        self._graph, self._subgraphs, self._rule, self._prior = graph, subgraphs, rule, prior
        self._leaves = np.empty(0, np.int64)  # rows of the nodes, known once selected
        self.num_evaluated: int = 0

    def select(self, evaluate: Evaluate) -> tuple[torch.Tensor, torch.Tensor]:
        """Features and values by which the online network selects actions.

        Args:
            evaluate: function of observations [n, *obs_shape] that returns the online network's
                features [n, F] and values [n, A].

        Returns:
            features of the leaves [L, F], values of all states [M, A], 0 where they are not read.
        """
        result, nodes = [], self._subgraphs.nodes

        def choose(asked):
            self.num_evaluated += len(asked)
            result.append(evaluate(torch.from_numpy(self._graph.observations_of(asked))))
            return best_actions(result[-1][1]).numpy()

        rows, leaf_read = rows_read(self._subgraphs, self._rule, choose, self._prior)
        if not result or self.num_evaluated < len(rows):  # read, without a choice
            choose(nodes[rows[self.num_evaluated :]])
        self._leaves = rows[leaf_read]
        features, values = map(torch.cat, zip(*result, strict=True))
        selector_q = values.new_zeros(len(nodes), values.shape[1])
        selector_q[torch.from_numpy(rows)] = values
        return features[torch.from_numpy(leaf_read)], selector_q

    def leaf_obs(self) -> torch.Tensor:
        """Observations of the leaves [L, *obs_shape], once actions are selected."""
        return torch.from_numpy(self._graph.observations_of(self._subgraphs.nodes[self._leaves]))

    def targets(
        self, leaf_pmf: torch.Tensor, selector_q: torch.Tensor, support: torch.Tensor, gamma: float
    ) -> torch.Tensor:
        """`categorical_targets` [B, n_atoms] from the pmfs of the leaves [L, A, n_atoms]."""
        pmf = leaf_pmf.new_zeros(len(selector_q), *leaf_pmf.shape[1:])
        pmf[torch.from_numpy(self._leaves)] = leaf_pmf
        return categorical_targets(
            self._subgraphs, pmf, support, gamma, self._rule, selector_q, prior=self._prior
        )


# --- GPU: all states, in fixed shapes ---


class OnGPU:
    """Updates of a few shapes, which are captured; only indices and a few floats travel there.

    Args:
        graph: with frame_stack.
        device: torch's.
        num_frames: frames for which there is room from the start.
        cuda_graphs: capture at all.
    """

    def __init__(
        self, graph: TransitionGraph, device: torch.device, num_frames: int, cuda_graphs: bool
    ) -> None:
        self.graph: TransitionGraph = graph
        self.captured: CapturedCalls = CapturedCalls(device, cuda_graphs)
        self.frames: torch.Tensor = torch.empty(0)  # the graph's: uint8 [capacity, *frame_shape]
        self._device, self._num_frames = device, num_frames
        self._sent = np.empty(0, np.int64)  # generation of each when it was sent, [capacity]

    def update(
        self, learn: Callable[..., torch.Tensor], subgraphs: Subgraphs, batch: Batch, rule: str,
        prior: float,
    ) -> tuple[torch.Tensor, int]:  # fmt: skip
        """As `OnCPU.update`."""
        subgraphs, batch_size = pad(subgraphs), len(batch.nodes)
        num_nodes, levels = len(subgraphs.nodes), level_bounds(subgraphs)
        ids = self.graph.frame_ids_of(np.concatenate([subgraphs.nodes, batch.nodes]))
        self.send(np.unique(ids))

        def update(integers, floats):
            of_graph, actions, frames = integers.tensor_split([-ids.size - batch_size, -ids.size])
            weighted, weights = floats.tensor_split([-batch_size])
            obs = self.frames[frames].view(*ids.shape, *self.frames.shape[1:])
            sub = unpack(levels, of_graph, weighted)
            states = PaddedStates(sub, levels, obs[:num_nodes], rule, prior)
            return learn(states, obs[num_nodes:], actions, weights)

        integers, floats = pack(subgraphs)
        integers = np.concatenate([integers, batch.actions, ids.reshape(-1)])
        floats = np.concatenate([floats, batch.weights]).astype(np.float32)
        tensors = torch.from_numpy(integers), torch.from_numpy(floats)
        return self.captured(update, (num_nodes, levels, rule, prior), *tensors), num_nodes

    def act(
        self, policy: Callable[..., torch.Tensor], obs: NDArray[np.uint8], noisy: bool
    ) -> NDArray[np.int64]:
        """As `OnCPU.act`."""

        def act(obs):
            return policy(obs, noisy)

        return self.captured(act, noisy, torch.from_numpy(obs)).cpu().numpy()

    def send(self, frame_ids: NDArray[np.int64]) -> None:
        """Have these frames of the graph on the GPU, distinct ids int64 [n]."""
        frames = self.graph.frames
        if frames.num_ids > len(self._sent):
            capacity = max(self._num_frames, 5 * frames.num_ids // 4)
            shape = (capacity, *frames.shape)
            self.frames = torch.zeros(shape, dtype=torch.uint8, device=self._device)
            self._sent = np.full(capacity, -1)
            self.captured.plans.clear()  # they name the old place
        generations = frames.generations[frame_ids]
        missing = frame_ids[self._sent[frame_ids] != generations]
        if len(missing):
            new = torch.from_numpy(frames.take(missing)).to(self._device)
            for i, frame in zip(missing.tolist(), new, strict=True):  # at once: a sort
                self.frames[i] = frame
            self._sent[frame_ids] = generations


class PaddedStates:
    """As `PathStates`, of padded subgraphs on a device: all states are leaves."""

    def __init__(
        self, sub: SubgraphTensors, levels: Levels, obs: torch.Tensor, rule: str, prior: float
    ) -> None:
        self._sub, self._levels, self._obs, self._rule, self._prior = sub, levels, obs, rule, prior

    def select(self, evaluate: Evaluate) -> tuple[torch.Tensor, torch.Tensor]:
        """As `PathStates.select`."""
        return evaluate(self._obs)

    def leaf_obs(self) -> torch.Tensor:
        """As `PathStates.leaf_obs`."""
        return self._obs

    def targets(
        self, leaf_pmf: torch.Tensor, selector_q: torch.Tensor, support: torch.Tensor, gamma: float
    ) -> torch.Tensor:
        """As `PathStates.targets`."""
        of_batch = self._sub, self._levels, leaf_pmf, support, gamma, self._rule, selector_q
        return back_up(*of_batch, prior=self._prior, dense=True)


class Plan(NamedTuple):
    """Calls of one kind: their tensors on the device, and the CUDA graph that repeats them."""

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

    def __call__(
        self, function: Callable[..., torch.Tensor], kind: Hashable, *tensors: torch.Tensor
    ) -> torch.Tensor:
        """The function's one tensor.

        Args:
            function: of the tensors, on the device; another one may come with each call, if those
                of the same name and kind do the same.
            kind: values that the function knows on the host.
            tensors: of the host. A GPU copies them from pinned memory, without being waited for.
        """
        key = (function.__name__, kind, *(tensor.shape for tensor in tensors))
        if self.device.type == "cuda":
            tensors = tuple(tensor.pin_memory() for tensor in tensors)
        plan = self.plans.get(key)
        if plan is None:
            moved = tuple(tensor.to(self.device, non_blocking=True) for tensor in tensors)
            self.plans[key] = Plan(moved)
            return function(*moved)
        for static, tensor in zip(plan.tensors, tensors, strict=True):
            static.copy_(tensor, non_blocking=True)
        if self.use_graphs and plan.graph is None:
            try:
                plan = self.plans[key] = self._captured(function, plan)
            except RuntimeError as error:
                name = function.__name__
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
