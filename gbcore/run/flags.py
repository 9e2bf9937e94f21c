"""The flags that all scripts share, ranges of all flags, and those of a run to go on with."""

import contextlib
import io
import itertools
import json
import math
import os
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args, get_type_hints

import torch
import tyro


@dataclass
class RunFlags:
    """How a run is made and what it leaves; what it learns is in the script's own flags."""

    seed: int = 1
    """seed of the environment, the networks and all sampling"""
    torch_deterministic: bool = True
    """make torch use deterministic algorithms"""
    cuda: bool = False
    """run on the GPU"""
    threads: int = 1
    """CPU threads for torch; 0 = as many, up to 8, as are quickest when the run starts"""
    track: bool = False
    """log to Weights and Biases as well (pip install wandb)"""
    wandb_project_name: str = "graph-backup"
    """the W&B project"""
    wandb_entity: str | None = None
    """the W&B entity (team)"""
    capture_video: bool = False
    """write a video of one episode after training (pip install imageio-ffmpeg)"""
    save_model: bool = True
    """write the online network and the transition graph at the end"""
    run_dir: str = "runs"
    """folder in which each run gets a folder of its own"""
    log_frequency: int = 500
    """steps between rows of metrics.csv"""
    checkpoint_frequency: int = 0
    """steps between checkpoints; there is one after training in any case"""
    resume: str | None = None
    """folder of a run to go on with, under its own flags; --total-timesteps may be raised, and
    those change that only say how it is run: docs/runs.md"""


# These may be given with --resume. They do not change what a run learns, but for a raised
# --total-timesteps on Atari: the importance exponent is a share of it.
FREE_WITH_RESUME = (
    "total_timesteps", "checkpoint_frequency", "cuda", "cuda_graphs", "threads", "track",
    "wandb_project_name", "wandb_entity", "capture_video", "save_model",
)  # fmt: skip

# Least and most of every flag that is a number, where a script has it.
COUNT, AMOUNT, SHARE, SCALE = (1, 2**31 - 1), (0, 2**31 - 1), (0, 1), (1e-12, 1e3)
RANGES = {
    **dict.fromkeys(
        (
            "total_timesteps", "batch_size", "depth", "target_network_frequency", "train_frequency",
            "updates_per_train", "exploration_steps", "eval_episodes",
            "eval_envs", "curve_episodes", "log_frequency", "time_limit",
        ),
        COUNT,
    ),
    **dict.fromkeys(
        (
            "breadth", "buffer_size", "learning_starts", "eval_frequency",
            "checkpoint_frequency",
        ),
        AMOUNT,
    ),
    **dict.fromkeys(("gamma", "start_e", "end_e", "eval_epsilon", "frontier_share"), SHARE),
    **dict.fromkeys(("learning_rate", "adam_eps", "max_grad_norm"), SCALE),
    "seed": (0, 2**30 - 1),
    "threads": (0, 1024),
    "n_atoms": (2, 10_001),
    "v_min": (-1e9, 1e9),
    "v_max": (-1e9, 1e9),
    "noisy_std": (0, 1e3),
    "priority_exponent": (0, 10),  # above 53 a priority becomes 0
    "importance_exponent": (0, 10),
    "prior": (0, 1e9),
    "leaf_refresh": (1, 1_000),
    "round": (-9, 9),
}  # fmt: skip


def warn(message):
    """One line on stderr."""
    print(f"warning: {' '.join(str(message).split())}", file=sys.stderr)


def fail(message, status=2):
    """One line on stderr, and the end."""
    print(f"error: {' '.join(str(message).split())}", file=sys.stderr)
    sys.exit(status)


def parse_flags(flags_class, script):
    """Flags of the command line, or of the run that --resume names; bad ones end the program.

    Args:
        flags_class: the script's Args, a dataclass on top of `RunFlags`.
        script: the script's __file__.
    """
    about = sys.modules[flags_class.__module__].__doc__
    args = read_flags(flags_class, sys.argv[1:], description=about)
    if args.resume is not None:
        args = _flags_of_run(flags_class, Path(script), args.resume, sys.argv[1:])
    check_flags(args)
    folder = Path(args.resume or args.run_dir).absolute()
    while not os.path.lexists(folder):
        folder = folder.parent
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        fail(f"cannot write to {str(folder)!r}: require a folder that can be written to")
    return args


def read_flags(flags_class, arguments, **options):
    """tyro.cli, but 1e5 is an integer, and a flag that cannot be read one line, not a box."""
    arguments, shown = _plain_integers(arguments, flags_class), io.StringIO()
    try:
        with contextlib.redirect_stderr(shown):
            return tyro.cli(flags_class, args=arguments, **options)
    except SystemExit as end:
        if end.code != 2:  # the end of --help
            raise
    lines = [line.strip("│╰╯ ") for line in shown.getvalue().splitlines()[1:]]
    parts = itertools.groupby(lines, lambda line: line.strip("─-") == "")
    message, *more = [list(part) for is_rule, part in parts if not is_rule]
    near = [line.split()[0] for part in more[:-1] for line in part if line.startswith("--")]
    hint = f"; nearest: {', '.join(near)}" if message[0].startswith("Unrec") and near else ""
    fail(" ".join(message) + hint)


def _plain_integers(arguments, flags_class):
    """1e5 as 100000, where the flag before it takes an integer."""
    integers = {f"--{name}" for name, allowed in _types(flags_class).items() if int in allowed}
    plain = []
    for argument in arguments:
        name, equals, value = argument.rpartition("=")
        flag = name if equals else (plain[-1] if plain else "")
        if flag.replace("-", "_").replace("__", "--", 1) in integers and re.fullmatch(
            r"\d+(\.\d+)?[eE]\+?\d{1,2}", value
        ):
            number = float(value)
            argument = f"{name}{equals}{int(number)}" if number.is_integer() else argument
        plain.append(argument)
    return plain


def _types(flags_class):
    """The types, or the choices, of each flag by name."""

    def parts(hint):
        return tuple(part for arg in get_args(hint) for part in parts(arg)) or (hint,)

    return {name: parts(hint) for name, hint in get_type_hints(flags_class).items()}


def idle_flags(args):
    """Flags that do nothing, given the others: name -> why, as in "on a CPU"."""
    found = {}
    if args.exploration != "frontier":
        found["frontier_share"] = "without --exploration frontier"
    if not args.track:
        found |= dict.fromkeys(("wandb_project_name", "wandb_entity"), "without --track")
    if not args.cuda:
        found["cuda_graphs"] = "on a CPU"
    is_whole = args.backup == "whole-graph"
    if not args.backup.startswith("graph"):
        found["breadth"] = f"with --backup {args.backup}"
    elif args.depth == 1:
        found["breadth"] = "with --depth 1"
    if args.backup == "one-step" or is_whole:
        found["depth"] = f"with --backup {args.backup}"
    if args.eval_frequency == 0:
        found["curve_episodes"] = "with --eval-frequency 0"
    if args.backup == "one-step" or (args.depth == 1 and not is_whole):
        found["prior"] = "where a target nests nothing"
    return found


def check_flags(args):
    """Refuse what cannot run, before anything is written; name what does nothing."""
    for name, value in asdict(args).items():
        flag = f"--{name.replace('_', '-')}"
        if name in RANGES and value is not None:
            least, most = RANGES[name]
            if not least <= value <= most:  # NaN is in no range
                fail(f"{flag} must be at least {least} and at most {most}, got {value}")
        elif isinstance(value, float) and not math.isfinite(value):
            fail(f"{flag} must be finite, got {value}")
    default = type(args)(backup=args.backup)
    if hasattr(args, "v_min") and not args.v_min < args.v_max:
        fail(f"--v-min must be < --v-max, got {args.v_min} and {args.v_max}")
    if 0 < args.buffer_size < args.batch_size:
        fail(f"--buffer-size {args.buffer_size} is smaller than --batch-size {args.batch_size}")
    if args.total_timesteps < args.batch_size:
        fail(
            f"--total-timesteps {args.total_timesteps} is smaller than "
            f"--batch-size {args.batch_size}"
        )
    if args.learning_starts >= args.total_timesteps:
        warn("--learning-starts is not below --total-timesteps: nothing is learned")
    for name, where in idle_flags(args).items():
        if getattr(args, name, None) != getattr(default, name, None):
            warn(f"--{name.replace('_', '-')} does nothing {where}")
    if args.backup != "whole-graph" and getattr(args, "act_on", None) == "graph":
        fail("--act-on graph requires --backup whole-graph")
    if args.backup == "whole-graph":
        if args.gamma == 1:
            fail("--gamma must be below 1 for --backup whole-graph")
        if args.act_on == "graph" and args.end_e == 0:
            warn("whole-graph repeats itself where all is known; --end-e 0.02 tries other actions")
        if getattr(args, "persist_targets", False):
            fail("--persist-targets writes into the leaf values that --backup whole-graph reads")
    if args.cuda and not torch.cuda.is_available():
        if args.resume is None:
            fail("--cuda was given, but torch finds no CUDA device; leave it out to run on the CPU")
        warn("torch finds no CUDA device here: the run goes on on the CPU")
    if getattr(args, "leaf_refresh", 1) > 1 and (args.cuda or args.target_network_frequency > 1):
        fail("--leaf-refresh above 1 requires --no-cuda and --target-network-frequency 1")
    for wanted, package in ((args.track, "wandb"), (args.capture_video, "imageio_ffmpeg")):
        if wanted:
            try:
                __import__(package)
            except ImportError:
                fail(f"this needs another package: pip install {package.replace('_', '-')}")


# --------------------------------------------------------------------------------------------------
# Of a run to go on with
# --------------------------------------------------------------------------------------------------


def _flags_of_run(flags_class, script, path, arguments):
    """The run's own flags, and those of FREE_WITH_RESUME that are given."""
    saved = _saved_flags(flags_class, script, path)
    saved.resume = path
    args = read_flags(flags_class, arguments, default=saved)
    for name, value in asdict(saved).items():
        given = getattr(args, name)
        if given != value and name not in FREE_WITH_RESUME:
            flag = f"--{name.replace('_', '-')}"
            fail(f"{flag} cannot be changed with --resume: the run has {value!r}, got {given!r}")
    if args.total_timesteps < saved.total_timesteps:
        fail(
            "--total-timesteps can only be raised with --resume: "
            f"the run has {saved.total_timesteps}, got {args.total_timesteps}"
        )
    _end_if_finished(args)
    return args


def _saved_flags(flags_class, script, path):
    try:
        config = json.loads((Path(path) / "config.json").read_text())
        made_by = Path(config.pop("script"))
    except FileNotFoundError:
        fail(f"cannot resume {path!r}: no config.json there; give the folder that a run printed")
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        fail(f"cannot resume {path!r}: config.json is of no run: {error!r}")
    if made_by.stem != script.stem:
        fail(f"{path!r} is a run of {made_by.name}: python {made_by} --resume {path}")
    types, default = _types(flags_class), flags_class()
    for name, allowed in types.items():  # types, or the words of a Literal
        value = config.get(name, getattr(default, name))
        fits = (value if isinstance(allowed[0], str) else type(value)) in allowed
        if not (fits or (type(value) is int and float in allowed)):
            fail(f"cannot resume {path!r}: Require {name} of {allowed}, got {value!r}")
    unknown = sorted(config.keys() - types.keys())
    if unknown:
        fail(f"cannot resume {path!r}: {unknown[0]} is no flag of {script.name}")
    return flags_class(**config)


def _end_if_finished(args):
    """A run that has come to its end, with all that it shall leave, is not run again."""
    path = Path(args.resume)
    try:
        result = json.loads((path / "result.json").read_text())
        is_finished = not result["interrupted"] and result["steps"] >= args.total_timesteps
        score, steps = result["score"], result["steps"]
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError) as error:
        fail(f"cannot resume {args.resume!r}: result.json is of no run: {error!r}")
    asked = ["model.pt"] * args.save_model + ["episode.mp4"] * args.capture_video
    if is_finished and all((path / name).exists() for name in asked):
        print(
            f"{path} is finished: score {score:g} after {steps} steps; "
            "a larger --total-timesteps goes on with it"
        )
        sys.exit()
