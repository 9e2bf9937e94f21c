"""The transition graph of a replay, and nested Bellman targets over it (Jiang et al. 2022)."""

from gbcore.frontier import FrontierEpisodes, FrontierPlanner
from gbcore.graph import TransitionGraph, trajectory_subgraphs
from gbcore.kernels import Subgraphs
from gbcore.leaf_table import LeafTable
from gbcore.replay import Batch, PrioritizedReplay, Replay
from gbcore.sum_tree import SumTree
from gbcore.targets import categorical_targets, pair_q_values, prune, q_targets

__all__ = [
    "Batch",
    "FrontierEpisodes",
    "FrontierPlanner",
    "LeafTable",
    "PrioritizedReplay",
    "Replay",
    "Subgraphs",
    "SumTree",
    "TransitionGraph",
    "categorical_targets",
    "pair_q_values",
    "prune",
    "q_targets",
    "trajectory_subgraphs",
]
