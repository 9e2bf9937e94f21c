"""The flags that all scripts share: how they are read, checked, and taken from a run to go on with.

Ranges stand with the types of flags, and a table of what does nothing with the flags of a class:

    class Args(RunFlags):
        depth: Amount = 5
        IDLE: ClassVar = {"depth": ("backup=one-step|tree",)}  # where all pairs of a text hold
"""

import contextlib
import importlib
import io
import itertools
import json
import os
import re
import shlex
import sys
import typing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, NoReturn, TypeVar

import torch
import tyro

from gbcore.graph import MAX_DEPTH
from gbcore.run.checkpoint import load_checkpoint

# Numbers with their least and most.
Count = Annotated[int, (1, 2**31 - 1)]
Amount = Annotated[int, (0, 2**31 - 1)]
Share = Annotated[float, (0, 1)]
Scale = Annotated[float, (1e-12, 1e3)]
Depth = Annotated[int, (1, MAX_DEPTH)]  # nested backups per target


@dataclass
class RunFlags:
    """How a run is made and what it leaves; what it learns is in the script's own flags."""

    seed: Annotated[int, (0, 2**30 - 1)] = 1  # of the environment, the networks and all sampling
    torch_deterministic: bool = True  # make torch use deterministic algorithms
    cuda: bool = False  # run on the GPU
    threads: Annotated[int, (1, 1024)] = 1  # CPU threads for torch
    track: bool = False  # log to Weights and Biases as well (pip install wandb)
    wandb_project_name: str = "graph-backup"  # the W&B project
    wandb_entity: str | None = None  # the W&B entity (team)
    capture_video: bool = False
    """write a video of one episode after training (pip install imageio-ffmpeg)"""
    save_model: bool = True  # write the online network and the transition graph at the end
    run_dir: str = "runs"  # folder in which each run gets a folder of its own
    log_frequency: Count = 500  # steps between rows of metrics.csv
    checkpoint_frequency: Amount = 0
    """steps between checkpoints; there is one after training in any case"""
    resume: str | None = None
    """folder of a run to go on with, under its own flags; --total-timesteps may be raised, and
    those change that only say how it is run: docs/runs.md"""

    IDLE: ClassVar[dict[str, tuple[str, ...]]] = {}  # flags -> where they do nothing
    # These may be given with --resume. They do not change what a run learns, but for a raised
    # --total-timesteps on Atari: the importance exponent is a share of it.
    FREE: ClassVar = (
        "total_timesteps", "checkpoint_frequency", "cuda", "threads", "track",
        "wandb_project_name", "wandb_entity", "capture_video", "save_model",
    )  # fmt: skip

    # flag that is None -> its default, and the one with whole-graph
    DEFAULTS: ClassVar[dict[str, tuple[Any, Any]]] = {}

    def __post_init__(self) -> None:
        self.run_dir = os.path.expanduser(self.run_dir)
        self.resume = self.resume and os.path.expanduser(self.resume)
        for name, pair in self.DEFAULTS.items():
            if getattr(self, name) is None:
                setattr(self, name, pair[self.backup == "whole-graph"])

    def check(self) -> None:
        """End the program where flags of a script do not fit together."""


Flags = TypeVar("Flags", bound=RunFlags)


def warn(message: object) -> None:
    """One line on stderr."""
    print(f"warning: {' '.join(str(message).split())}", file=sys.stderr)


def fail(message: object, status: int = 2) -> NoReturn:
    """One line on stderr, and the end."""
    print(f"error: {' '.join(str(message).split())}", file=sys.stderr)
    sys.exit(status)


def parse_flags(flags_class: type[Flags], script: str) -> Flags:
    """Flags of the command line, or of the run that --resume names; bad ones end the program.

    Args:
        flags_class: the script's Args, a dataclass on top of `RunFlags`.
        script: the script's __file__.
    """
    about = sys.modules[flags_class.__module__].__doc__
    args = read_flags(flags_class, sys.argv[1:], description=about)
    if args.resume is not None:
        args = _flags_of_run(flags_class, Path(script), args.resume)
    check_flags(args)
    return args


def read_flags(flags_class: type[Flags], arguments: list[str], **options: Any) -> Flags:
    """tyro.cli, but 1e5 is an integer, and flags that cannot be read are one line, not a box."""
    shown = io.StringIO()
    try:
        with contextlib.redirect_stderr(shown), _rules:
            return tyro.cli(flags_class, args=arguments, **options)
    except SystemExit as end:
        if end.code != 2:  # the end of --help
            raise
    lines = [line.strip("│╰╯ ") for line in shown.getvalue().splitlines()[1:]]
    lines = [line if line.strip("─-") else "" for line in lines]  # rules
    message = " ".join(itertools.takewhile(bool, itertools.dropwhile(lambda line: not line, lines)))
    if message.startswith("Unrecognized"):
        near = [line.split()[0] for line in lines if line.startswith("--")]
        words = [part for word in arguments for part in word.split("=", 1)]
        for flag, value in itertools.pairwise(words):
            if flag.startswith("--") and message == f"Unrecognized options: {value}":
                name = flag.removeprefix("--").removeprefix("no-")
                message = f"{flag} takes no value, got {value}: give --{name} or --no-{name}"
        message += f"; nearest: {', '.join(near)}" if near else ""
    found, reaches = re.match(r"Error parsing --([\w-]+): .*('.*')", message), spans(flags_class)
    if found and (span := reaches.get(name := found[1].replace("-", "_"))):
        is_integer = "int" in str(typing.get_type_hints(flags_class)[name])
        kind = "an integer" if is_integer else "a number"
        reach = f"of at least {span[0]} and at most {span[1]}"
        message = f"--{found[1]} must be {kind} {reach}, got {found[2]}"
    fail(message)


_rules = tyro.constructors.ConstructorRegistry()


@_rules.primitive_rule
def _integers(info):
    """1e5 is an integer."""
    if info.type is not int:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        1, "INT", lambda words: _integer(*words), lambda of: type(of) is int, lambda of: [str(of)]
    )


@_rules.primitive_rule
def _paths(info):
    """~ is the user's own folder, also in --out=~/x, where no shell says so."""
    if info.type is not Path:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        1,
        "PATH",
        lambda words: Path(words[0]).expanduser(),
        lambda of: isinstance(of, Path),
        lambda of: [str(of)],
    )


def _integer(text):
    is_power = re.fullmatch(r"\d+(\.\d+)?[eE]\+?\d{1,2}", text) and float(text).is_integer()
    try:
        return int(float(text) if is_power else text)
    except ValueError:
        raise ValueError(f"require an integer, got {text!r}") from None


def spans(flags_class: type[Any]) -> dict[str, tuple[float, float] | None]:
    """Least and most of each flag by name; None where its type tells none."""
    found = {}
    for name, hint in typing.get_type_hints(flags_class, include_extras=True).items():
        parts = (hint, *typing.get_args(hint))  # of a union
        about = [of for part in parts for of in getattr(part, "__metadata__", ())]
        found[name] = next((of for of in about if isinstance(of, tuple)), None)
    return found


def fixed_flags(args: RunFlags) -> str:
    """JSON of the flags that a run keeps for good: all but FREE, and those of its folder."""
    kept = {n: v for n, v in asdict(args).items() if n not in (*args.FREE, "run_dir", "resume")}
    return json.dumps(kept)


def idle_flags(args: RunFlags) -> dict[str, str]:
    """Flags that do nothing, given the others: name -> where, one of its places in IDLE."""
    found = {}
    for name, places in args.IDLE.items():
        for place in places:
            pairs = [pair.split("=") for pair in place.split()]
            if all(str(getattr(args, flag)) in value.split("|") for flag, value in pairs):
                found[name] = place
    return found


def check_values(args: Any) -> None:
    """Refuse flags of a dataclass that are out of their range."""
    of_types = spans(type(args))
    for name, value in vars(args).items():
        span = of_types[name]
        if span and value is not None and not span[0] <= value <= span[1]:  # NaN is in no range
            fail(f"{_flag(name)} must be at least {span[0]} and at most {span[1]}, got {value}")
        if isinstance(value, str) and value != value.encode(errors="replace").decode():
            fail(f"{_flag(name)} must be UTF-8, got {value!r}")


def _flag(name):
    return f"--{name.replace('_', '-')}"


def check_flags(args: RunFlags) -> None:
    """Refuse what cannot run, before anything is written; name what does nothing."""
    check_values(args)
    for name in ("buffer_size", "total_timesteps"):
        if 0 < (number := getattr(args, name)) < args.batch_size:
            fail(f"{_flag(name)} {number} is smaller than --batch-size {args.batch_size}")
    if args.learning_starts >= args.total_timesteps:
        warn("--learning-starts is not below --total-timesteps: the network is never trained")
    args.check()
    if args.backup != "whole-graph" and getattr(args, "act_on", None) == "graph":
        fail("--act-on graph requires --backup whole-graph")
    if args.backup == "whole-graph":
        if args.gamma == 1:
            fail("--gamma must be below 1 for --backup whole-graph")
        if args.act_on == "graph" and args.end_e == 0:
            warn("whole-graph repeats itself where all is known; --end-e 0.02 tries other actions")
    default = type(args)(backup=args.backup)
    for name, place in idle_flags(args).items():
        if getattr(args, name) != getattr(default, name):
            warn(f"{_flag(name)} does nothing where {place}")
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
        if importlib.import_module(name).__file__ is None:
            fail(f"this needs the package {name}, which a folder of that name hides")
    except ImportError:
        fail(f"this needs another package: pip install {name.replace('_', '-')}")


def read_json(path: Path) -> dict[str, Any]:
    """What a JSON file of a run holds. OSError where it cannot be read, ValueError for others."""
    if path.exists() and not path.is_file():  # reading a pipe would wait for a writer
        raise ValueError(f"{path} is of no run: require a regular file")
    try:
        content = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is of no run: {error!r}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is of no run: require a dict")
    return content


def _flags_of_run(flags_class, script, path):
    """The run's own flags, and those of FREE that are given. One that is finished ends here."""
    folder = Path(path)
    try:
        config = read_json(folder / "config.json")
        made_by = config.pop("script", None)
        if not isinstance(made_by, str):
            raise ValueError("config.json is of no run: it names no script")
        if Path(made_by).stem != script.stem:
            command = shlex.join(["python", made_by, "--resume", path])
            raise ValueError(f"it is a run of {Path(made_by).name}: {command}")
        own = json.loads(load_checkpoint(folder, arrays=False)["run"]["flags"])
        if not isinstance(own, dict):
            raise ValueError(f"Require flags by name in the checkpoint, got {own!r}")
        for name, default in asdict(flags_class()).items():
            value, of_run = config.get(name), own.get(name)
            is_other = default is not None and type(value) is not type(default)
            if is_other or (name in own and value != of_run):
                told = f"got {name} {value!r}" + f", not {of_run!r}" * (name in own)
                raise ValueError(f"config.json is not that of its checkpoint: {told}")
        saved = flags_class(**config | own)
        module, place = saved.env_id.rpartition(":")[0].replace(".", "/"), folder.resolve()
        for file in (Path(base, module).resolve() for base in (folder, "", *sys.path) if module):
            if place in file.parents and any(file.parent.glob(f"{file.name}*")):
                told = f"the module of its environment is in the run's own folder: {file}"
                raise ValueError(told)
        saved.resume = path
        args = read_flags(flags_class, sys.argv[1:], default=saved)
        for name, value in asdict(saved).items():
            if (given := getattr(args, name)) != value and name not in args.FREE:
                told = f"Require {_flag(name)} {value!r}, which the run has, got {given!r}"
                raise ValueError(told)
        if args.total_timesteps < (least := saved.total_timesteps):
            raise ValueError(f"Require --total-timesteps of {least} or more: it can only be raised")
        left = ["model.pt"] * args.save_model + ["episode.mp4"] * args.capture_video
        if all((folder / name).exists() for name in ("result.json", *left)):
            result = read_json(folder / "result.json")
            if (result.get("interrupted"), result.get("steps")) == (False, args.total_timesteps):
                told = "a larger --total-timesteps goes on with it"
                print(f"{path} is finished: score {result.get('score')}; {told}")
                sys.exit()
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        known = isinstance(error, (OSError, ValueError))
        fail(f"cannot resume {path!r}: {error if known else repr(error)}")
    return args
