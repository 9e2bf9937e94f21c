"""What runs agents and is no graph: flags, seeds, a run's folder, its checkpoints and its video."""

from gbcore.run.checkpoint import LearnerState, load_checkpoint, save_checkpoint
from gbcore.run.episodes import ELSEWHERE, film_episode, nearest, play_episodes, write_video
from gbcore.run.flags import (
    Amount,
    Count,
    Depth,
    RunFlags,
    Scale,
    Share,
    fail,
    parse_flags,
    read_json,
    warn,
)
from gbcore.run.output import lasting_output
from gbcore.run.run import Run, errors_in_one_line, flush_denormals, seed_everything

__all__ = [
    "ELSEWHERE",
    "Amount",
    "Count",
    "Depth",
    "LearnerState",
    "Run",
    "RunFlags",
    "Scale",
    "Share",
    "errors_in_one_line",
    "fail",
    "film_episode",
    "flush_denormals",
    "lasting_output",
    "load_checkpoint",
    "nearest",
    "parse_flags",
    "play_episodes",
    "read_json",
    "save_checkpoint",
    "seed_everything",
    "warn",
    "write_video",
]
