"""The flags that all scripts share; how they are read, checked, and taken from a run."""

import importlib
import json
import os
import shlex
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import torch
import tyro

from gbcore.graph import MAX_DEPTH
from gbcore.run.checkpoint import load_checkpoint
from gbcore.run.output import fail, warn


class _Spec(tyro.constructors.PrimitiveConstructorSpec[Any]):
    def __repr__(self) -> str:  # tyro prints it where a flag may be None
        return self.metavar


def number(kind: type[int] | type[float], least: float, most: float) -> Any:
    """How a flag is read: an int or float within a range, which --help shows; 1e5 is an integer.

    seed: Annotated[int, number(int, 0, 2**30 - 1)] = 1
    """

    def parse(words):
        value = float(words[0])
        if not least <= value <= most or kind(value) != value:  # NaN is in no range
            message = "an integer" if kind is int else "a number"
            raise ValueError(
                f"require {message}, at least {least} and at most {most}, got {words[0]}"
            )
        return kind(value)

    checks = (lambda value: isinstance(value, int | float)), (lambda value: [str(value)])
    return _Spec(1, f"{least}..{most}", parse, *checks)


Count = Annotated[int, number(int, 1, 2**31 - 1)]
NonNegative = Annotated[int, number(int, 0, 2**31 - 1)]
Fraction = Annotated[float, number(float, 0, 1)]
PositiveFloat = Annotated[float, number(float, 1e-12, 1e3)]
Depth = Annotated[int, number(int, 1, MAX_DEPTH)]  # nested backups per target
Prior = Annotated[float, number(float, 0, 1e9)]  # observations a network's value counts as


@dataclass
class RunFlags:
    """How a run is made and which files it leaves; learning is in the script's own flags."""

    seed: Annotated[int, number(int, 0, 2**30 - 1)] = 1
    """of the environment, the networks and all sampling"""
    torch_deterministic: bool = True  # make torch use deterministic algorithms
    cuda: bool = False  # run on the GPU
    threads: Annotated[int, number(int, 1, 1024)] = 1  # CPU threads for torch
    track: bool = False  # log to Weights and Biases as well (pip install wandb)
    wandb_project_name: str = "graph-backup"  # the W&B project
    wandb_entity: str | None = None  # the W&B entity (team)
    capture_video: bool = False
    """write a video of one episode after training (pip install imageio-ffmpeg)"""
    save_model: bool = True  # write the online network and the transition graph at the end
    run_dir: str = "runs"  # folder in which each run gets a folder of its own
    log_frequency: Count = 500  # steps between rows of metrics.csv
    checkpoint_frequency: NonNegative = 0
    """steps between checkpoints; there is one after training in any case"""
    resume: str | None = None
    """folder of a run to go on with, under its own flags; --total-timesteps may be raised, and
    those change that only say how it is run: docs/runs.md"""

    # These may be given with --resume. They do not change learning, but for a raised
    # --total-timesteps on Atari: the importance exponent is a share of it.
    FREE: ClassVar = (
        "total_timesteps", "checkpoint_frequency", "cuda", "threads", "track",
        "wandb_project_name", "wandb_entity", "capture_video", "save_model", "run_dir", "resume",
    )  # fmt: skip

    def __post_init__(self) -> None:
        self.run_dir = os.path.expanduser(self.run_dir)
        self.resume = self.resume and os.path.expanduser(self.resume)

    def default(self, **values: Any) -> None:
        """Set the flags that are None."""
        for name, value in values.items():
            if getattr(self, name) is None:
                setattr(self, name, value)


Flags = TypeVar("Flags", bound=RunFlags)


def parse_flags(flags_class: type[Flags], script: str) -> Flags:
    """Flags of the command line, or of the run that --resume names; bad ones end the program.

    Args:
        flags_class: the script's Args, a dataclass on top of `RunFlags`.
        script: the script's __file__.

    Raises:
        OSError, ValueError: for a run that cannot be gone on with.
    """
    about = sys.modules[flags_class.__module__].__doc__
    args = tyro.cli(flags_class, description=about)
    if args.resume is not None:
        args = _flags_of_run(flags_class, Path(script), Path(args.resume))
    check_flags(args)
    return args


def check_flags(args: Any) -> None:
    """Refuse flags that cannot run, before anything is written."""
    for name, value in vars(args).items():  # a pickle makes another class of the script's own
        if type(value).__module__ == type(args).__module__:
            fail(f"{_flag(name)}: no run can be resumed with a {type(value).__name__}; use Literal")
    for name in ("buffer_size", "total_timesteps"):
        if 0 < (number := getattr(args, name)) < args.batch_size:
            fail(f"{_flag(name)} {number} is smaller than --batch-size {args.batch_size}")
    if args.learning_starts >= args.total_timesteps:
        warn("--learning-starts is not below --total-timesteps: the network is never trained")
    if args.backup == "whole-graph":
        if args.gamma == 1:
            fail("--gamma must be below 1 for --backup whole-graph")
        if args.act_on == "graph" and args.end_e == 0:
            warn("whole-graph repeats itself where all is known; --end-e 0.02 tries other actions")
    elif getattr(args, "act_on", None) == "graph":
        fail("--act-on graph requires --backup whole-graph")
    if args.cuda and not torch.cuda.is_available():
        if args.resume is None:
            fail("--cuda was given, but torch finds no CUDA device; leave it out to run on the CPU")
        warn("torch finds no CUDA device here: the run goes on on the CPU")
    for wanted, package in ((args.track, "wandb"), (args.capture_video, "imageio_ffmpeg")):
        if wanted:
            require_package(package)


def require_package(name: str) -> None:
    """End the program where a package that only some flags need cannot be imported."""
    try:
        importlib.import_module(name)
    except ImportError:
        fail(f"this needs another package: pip install {name.replace('_', '-')}")


def _flag(name):
    return f"--{name.replace('_', '-')}"


def _flags_of_run(flags_class, script, folder):
    """The run's own flags, and those of FREE that are given."""
    own = load_checkpoint(folder, "flags")["flags"]
    if (stem := Path(made_by := own.pop("script")).stem) != script.stem:
        command = shlex.join(["python", made_by, "--resume", str(folder)])
        raise ValueError(f"{folder} is a run of {stem}.py: {command}")
    if gone := own.keys() - {field.name for field in fields(flags_class)}:
        raise ValueError(f"Require the flags of {folder}, got a script without {sorted(gone)}")
    saved = flags_class(**own | {"resume": str(folder)})
    args = tyro.cli(flags_class, default=saved)
    for name, value in vars(saved).items():
        given = getattr(args, name)
        if name in own and name not in args.FREE and str(given) != str(value):  # NaN is no NaN
            raise ValueError(f"Require {_flag(name)} {value!r}, which the run has, got {given!r}")
    if args.total_timesteps < saved.total_timesteps:
        least = saved.total_timesteps
        raise ValueError(f"Require --total-timesteps of {least} or more: it can only be raised")
    if all((folder / n).exists() for n in ["result.json"] + ["episode.mp4"] * args.capture_video):
        result = json.loads((folder / "result.json").read_text())
        if not result["interrupted"] and result["steps"] == args.total_timesteps:
            print(f"{folder} is finished: a larger --total-timesteps goes on with it")
            sys.exit()
    return args
