"""The transition graph of a replay, and nested Bellman targets over it (Jiang et al. 2022)."""

from typing import TYPE_CHECKING

from gbcore.frontier import FrontierEpisodes, FrontierPlanner
from gbcore.graph import TransitionGraph, trajectory_subgraphs
from gbcore.graph_values import GraphValues
from gbcore.kernels import Subgraphs
from gbcore.leaf_table import LeafTable
from gbcore.replay import Batch, PrioritizedReplay, Replay
from gbcore.sum_tree import SumTree

if TYPE_CHECKING:
    from gbcore.targets import categorical_targets, pair_q_values, point_masses, prune, q_targets

__version__ = "1.0.0"

__all__ = [
    "Batch",
    "FrontierEpisodes",
    "FrontierPlanner",
    "GraphValues",
    "LeafTable",
    "PrioritizedReplay",
    "Replay",
    "Subgraphs",
    "SumTree",
    "TransitionGraph",
    "categorical_targets",
    "pair_q_values",
    "point_masses",
    "prune",
    "q_targets",
    "trajectory_subgraphs",
]


def __getattr__(name):
    """Targets when they are first asked for: they import torch, which a graph does not need."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from gbcore import targets

    return getattr(targets, name)
