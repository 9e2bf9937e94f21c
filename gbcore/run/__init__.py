"""Running agents: flags, seeds, logging, checkpoints, episodes, videos."""

from gbcore.run.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from gbcore.run.episodes import (
    ELSEWHERE,
    Replayed,
    RewardsAtStart,
    any_action,
    evaluate,
    evaluate_and_log,
    last_tenth,
    plain,
    play_episodes,
    record_video,
    score_at_random,
    starts_met,
    task_meant,
    write_video,
)  # fmt: skip
from gbcore.run.flags import (
    Count,
    Depth,
    Fraction,
    NonNegative,
    PositiveFloat,
    Prior,
    RunFlags,
    number,
    parse_flags,
)  # fmt: skip
from gbcore.run.learner import LearnerState
from gbcore.run.logger import Logger
from gbcore.run.output import StopSignal, fail, one_line_errors, warn
from gbcore.run.setup import flush_denormals, seed_everything

__all__ = [
    "ELSEWHERE", "Checkpoint", "Count", "Depth", "Fraction", "LearnerState", "Logger",
    "NonNegative", "PositiveFloat", "Prior", "Replayed", "RewardsAtStart", "RunFlags", "StopSignal",
    "any_action", "evaluate", "evaluate_and_log", "fail", "flush_denormals", "last_tenth",
    "load_checkpoint", "number", "one_line_errors", "parse_flags", "plain", "play_episodes",
    "record_video", "save_checkpoint", "score_at_random", "seed_everything", "starts_met",
    "task_meant", "warn", "write_video",
]  # fmt: skip
