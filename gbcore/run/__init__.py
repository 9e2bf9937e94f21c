"""What runs agents and is no graph: flags, seeds, a run's folder, its checkpoints and its video."""

from gbcore.run.checkpoint import LearnerState, load_checkpoint
from gbcore.run.episodes import ELSEWHERE, film_episode, nearest, play_episodes, write_video
from gbcore.run.flags import RunFlags, fail, parse_flags, warn
from gbcore.run.run import Run, errors_in_one_line, seed_everything

__all__ = [
    "ELSEWHERE",
    "LearnerState",
    "Run",
    "RunFlags",
    "errors_in_one_line",
    "fail",
    "film_episode",
    "load_checkpoint",
    "nearest",
    "parse_flags",
    "play_episodes",
    "seed_everything",
    "warn",
    "write_video",
]
