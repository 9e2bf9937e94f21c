"""The transition graph of a replay, and nested Bellman targets over it (Jiang et al. 2022)."""

from typing import TYPE_CHECKING

from gbcore.episode_graph import EpisodeGraph, is_held_out
from gbcore.first_tries import FirstTries
from gbcore.frontier import FrontierEpisodes, FrontierPlanner
from gbcore.graph import TransitionGraph
from gbcore.replay import Batch, PrioritizedReplay, Replay, SumTree, trajectory_subgraphs
from gbcore.subgraph import Subgraphs
from gbcore.targets import pair_q_values, q_targets, rows_read
from gbcore.values import GraphValues, LeafTable, solve

if TYPE_CHECKING:
    from gbcore.categorical import categorical_targets

__version__ = "3.1.0"

__all__ = [
    "Batch",
    "EpisodeGraph",
    "FirstTries",
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
    "is_held_out",
    "pair_q_values",
    "q_targets",
    "rows_read",
    "solve",
    "trajectory_subgraphs",
]


def __getattr__(name: str) -> object:
    """Categorical targets when they are first asked for: no others need torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from gbcore import categorical
    except ImportError as error:
        raise ImportError(
            f"Require torch for gbcore.{name}: pip install torch, or graph-backup[torch]"
        ) from error
    return getattr(categorical, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
