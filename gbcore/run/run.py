"""Run: one run of a script, from its flags to its result."""

import contextlib
import ctypes
import errno
import math
import os
import random
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from gbcore.frontier import FrontierEpisodes
from gbcore.run.checkpoint import check_numbers, load_checkpoint, replacing, save_checkpoint
from gbcore.run.directory import RunDirectory, run_name, versions, with_file
from gbcore.run.flags import RunFlags, fail, fixed_flags
from gbcore.run.output import lasting_output

CHARTS = ("charts/epsilon", "losses/td_loss", "losses/q_values")  # which the script's loop knows
METRICS = (
    "charts/episodic_return", "charts/episodic_length", "charts/SPS", *CHARTS, "graph/nodes",
    "graph/edges", "graph/novel_state_ratio", "graph/evaluated_per_update",
)  # fmt: skip
# Errors of a disk that is full, broken or read only.
OF_A_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


@dataclass
class Counters:
    """Where a run stands."""

    step: int = 0
    episodic_return: float = 0.0  # of the episode under way
    episodic_length: int = 0
    rewarded: int = 0  # steps with a reward
    last_return: float | None = None  # of the last episode that ended
    last_length: int | None = None
    training_seconds: float = 0.0
    # At the last row of metrics.csv: steps, updates, evaluated states, seconds.
    logged: list[float] = field(default_factory=lambda: [0, 0, 0, 0.0])
    evaluations: list[float] = field(default_factory=list)  # mean return of each
    of_training: list[float] = field(default_factory=list)  # the same on levels of training
    evaluated_step: int = 0  # of the last evaluation

    def state(self) -> dict[str, Any]:
        """What `restore` takes back."""
        return asdict(self)

    def restore(self, saved: dict[str, Any]) -> None:
        """Go on from what `state` returned."""
        check_numbers("counters", saved, self.state())
        vars(self).update(saved)


class Run:
    """Logs and saves between the steps of a script's own loop, and goes on exactly.

    Args:
        args: the script's flags.
        script: the script's __file__.
        task: the task's own name.
        parts: what a checkpoint holds, each with `state()` and `restore(state)`: "graph", "replay",
            "learner" (with num_updates, num_evaluated and its network, online), "env" (with
            num_actions, and obs, the observation that it is in), and "frontier", if any.
        rng: the np.random.Generator of all sampling.
        device: torch's device.
        packages: names of packages whose versions the result tells.

    Attributes:
        charts: CHARTS of the next row of metrics.csv: epsilon, loss, mean value.
        frontier: the part of that name, or None.
        stop: `stop.asked` becomes True at Ctrl-C, SIGTERM or SIGHUP.
    """

    task: str
    charts: dict[str, Any]
    frontier: Any
    stop: "StopSignal"

    def __init__(
        self, args: RunFlags, script: str, task: str, parts: Mapping[str, Any],
        rng: np.random.Generator, device: torch.device, packages: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        self._args, self.task, self._device = args, task, device
        self._script = Path(script).resolve()
        self._counters = Counters()
        self.charts = dict.fromkeys(CHARTS)
        self._graph, self._learner, self._env = parts["graph"], parts["learner"], parts["env"]
        self._replay, self.frontier = parts["replay"], parts.get("frontier")
        self._parts, self._rng = {**parts, "counters": self._counters, "run": self}, rng
        self._versions = versions("numpy", "numba", "torch", *packages)  # files may change later
        self._begin = self._clock = time.perf_counter()
        self.stop = StopSignal()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # see errors_in_one_line
        self._directory = self._open_directory()
        total = args.total_timesteps
        self._bar = tqdm(  # on a terminal alone
            total=total, initial=self.step, unit="step", mininterval=0.5, smoothing=0.02,
            disable=None,
        )  # fmt: skip
        told = f"{with_file(task)}, {args.backup} backup, on {device}"
        print(f"{told}; results go to {self._directory.path}")
        print(
            "In a first run kernels are compiled, for about a minute, and kept on disk", flush=True
        )

    def __enter__(self) -> "Run":
        self.stop.__enter__()
        return self

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> None:
        self.stop.restore()
        self._bar.close()
        with contextlib.suppress(OSError):
            self._directory.close()
        path = str(self._directory.path)
        of_folder = isinstance(error, OSError) and path in str(error.filename)
        if of_folder or (isinstance(error, OSError) and error.errno in OF_A_DISK):
            told = f"cannot write to {path!r}: {error.strerror}; mend that, and go on from its last"
            fail(f"{told} checkpoint, if there is one: {self._command()}", 1)

    @property
    def step(self) -> int:
        """Number of steps made."""
        return self._counters.step

    def steps(self) -> Iterator[int]:
        """Yields the numbers of the steps that are left; logs and saves between two of them.

        Ends early after Ctrl-C, SIGTERM or SIGHUP. Leaves a checkpoint.
        """
        args, counters = self._args, self._counters
        self._train_on()
        while counters.step < args.total_timesteps and not self.stop.asked:
            yield counters.step + 1
            counters.step += 1
            counters.training_seconds = time.perf_counter() - self._clock
            if self._is_due(args.log_frequency) or counters.step == args.total_timesteps:
                self._log()
            self._bar.update()
            if self._is_due(args.checkpoint_frequency):
                self._save()
                self._train_on()
        self._bar.close()
        self._save()
        if self.evaluation_is_due() and not self.stop.asked:
            print(f"Evaluating {args.eval_episodes} episodes ...", flush=True)

    def count(self, reward: float) -> None:
        """A step gave a reward, the environment's own."""
        self._counters.episodic_return += reward
        self._counters.rewarded += bool(reward)
        self._counters.episodic_length += 1

    def end_episode(self) -> None:
        """The episode under way is over: log it, and have replay and frontier begin another."""
        counters = self._counters
        counters.last_return = counters.episodic_return
        counters.last_length = counters.episodic_length
        self._directory.log_episode(counters.step + 1, counters.last_return, counters.last_length)
        counters.episodic_return, counters.episodic_length = 0.0, 0
        self._replay.end_episode()
        if self.frontier is not None:
            self.frontier.end_episode()

    def evaluation_is_due(self) -> bool:
        """Does --eval-frequency ask for an evaluation of the steps made, or are they all made?

        One that a signal cut short is due again.
        """
        at_end = self.step >= self._args.total_timesteps
        is_due = at_end or self._is_due(self._args.eval_frequency)
        return is_due and self.step > self._counters.evaluated_step

    def log_evaluation(
        self,
        episodes: tuple[list[float], list[int]] | None,
        training: tuple[list[float], list[int]] | None = None,
    ) -> None:
        """Log an evaluation: returns and lengths of its episodes, two lists.

        training: the same of levels of training, where evaluations play others.

        The time since the last step is none of training: evaluations come first in a step.
        None, of one that was stopped, ends the program as `finish` ends an interrupted run.
        """
        self.require_finite()
        if episodes is None:
            self._save()
            self._end(score=None)
        returns, lengths = episodes
        of_training = None if training is None else training[0]
        self._directory.log_evaluation(self._counters.step, returns, lengths, of_training)
        self._counters.evaluations.append(float(np.mean(returns)))
        if of_training is not None:
            self._counters.of_training.append(float(np.mean(of_training)))
        self._counters.evaluated_step = self._counters.step
        self._train_on()

    def finish(
        self,
        evaluate: Callable[..., Any] | None = None,
        *,
        score_of: Callable[[list[float]], float],
        **more: Callable[[float], Any],
    ) -> None:
        """Write what was learned and result.json; say how it went.

        evaluate: the script's, to play an evaluation of random actions: what the score is more
            than.
        score_of: function of the means of all evaluations that gives the score.
        more: further entries of result.json, functions of the score.

        An interrupted run ends the program with status 130.
        """
        args = self._args
        if self.step < args.total_timesteps or self.step != self._counters.evaluated_step:
            self._end(score=None)
        score = score_of(self._counters.evaluations)
        found = {name: value(score) for name, value in more.items()}
        if self._counters.of_training:
            found["train_score"] = score_of(self._counters.of_training)
        if evaluate is not None:
            at_random = replace(args, eval_epsilon=1.0)
            how = _any_action, [args.seed, self.step], args.eval_episodes, self.stop
            if (played := evaluate(at_random, self.task, *how)) is not None:
                found["random_actions"] = float(np.mean(played[0]))
        self._end(score, **found)
        self.stop.restore()  # Ctrl-C ends at once what comes after it

    def film(self, record: Callable[..., None], policy: Callable[..., Any], seed: Any) -> None:
        """Have record(args, task, policy, seed, path) write a finished run's episode.mp4.

        The file gets its name when it is whole. Ctrl-C leaves the run without it.
        """
        path = self._directory.path / "episode.mp4"
        with contextlib.suppress(KeyboardInterrupt), replacing(path) as new:
            record(self._args, self.task, policy, seed, new)

    def _is_due(self, frequency):
        return frequency > 0 and self.step % frequency == 0

    def _train_on(self):
        """No time since the last step was of training."""
        self._clock = time.perf_counter() - self._counters.training_seconds

    def _log(self):
        counters, learner, graph = self._counters, self._learner, self._graph
        self.require_finite()
        updated = learner.num_updates, learner.num_evaluated
        now = [counters.step, *updated, counters.training_seconds]
        steps, updates, evaluated, seconds = np.subtract(now, counters.logged).tolist()
        counters.logged = now
        row = {
            "charts/episodic_return": counters.last_return,
            "charts/episodic_length": counters.last_length,
            "charts/SPS": steps / seconds,
            **self.charts,
            "graph/nodes": graph.num_nodes,
            "graph/edges": graph.num_edges,
            "graph/novel_state_ratio": graph.novel_state_ratio,
            "graph/evaluated_per_update": evaluated / updates if updates else None,
        }
        row |= {} if self.frontier is None else self.frontier.metrics()
        self._directory.log(counters.step, row)
        last = "-" if counters.last_return is None else f"{counters.last_return:g}"
        note = f"return {last}, states new {graph.novel_state_ratio:.1%}"
        if self._bar.disable:  # no terminal
            total, rate = self._args.total_timesteps, row["charts/SPS"]
            shown = round(rate, None if rate >= 100 else 1)
            told = f"{self.step:,} of {total:,} steps, {shown:,} steps/s, "
            if self.step > self._args.learning_starts:  # steps before are many times quicker
                told += f"{timedelta(seconds=round((total - self.step) / rate))} left, "
            print(told + note, flush=True)
        self._bar.set_postfix_str(note, refresh=False)

    def require_finite(self) -> None:
        """Make charts plain numbers. NaN ends the run; its last checkpoint is from before."""
        for name, value in self.charts.items():
            self.charts[name] = None if value is None else float(value)
            if value is not None and not math.isfinite(self.charts[name]):
                largest = np.abs(self._replay.reward[: self._replay.size]).max(initial=0)
                fail(
                    f"{name} is {self.charts[name]} after {self.step} steps: nothing more can be "
                    "learned; its last checkpoint, if there is one, is from before. Try a smaller "
                    f"--learning-rate, or scale the rewards, which are up to {largest:g}", 1,
                )  # fmt: skip

    def _end(self, score, **more):
        """Write what was learned, and say so; without a score the program ends, interrupted."""
        args, counters, path = self._args, self._counters, self._directory.path
        self._bar.close()
        if args.save_model:
            self._directory.write_model(self._learner.online, self._graph)
        result = {
            "script": self._script.stem,
            "env_id": self.task,
            "backup": args.backup,
            "exploration": args.exploration,
            "seed": args.seed,
            "score": score,
            **more,
            "eval_episodes": args.eval_episodes,
            "steps": counters.step,
            "interrupted": score is None,
            "sps": counters.step / max(counters.training_seconds, 1e-9),
            "training_seconds": counters.training_seconds,
            "wall_seconds": time.perf_counter() - self._begin,
            "novel_state_ratio": self._graph.novel_state_ratio,
            "device": torch.cuda.get_device_name() if self._device.type == "cuda" else "cpu",
            "versions": self._versions,
        }
        self._directory.write_json("result.json", result)
        if score is not None and not counters.rewarded:
            frontier = "" if self.frontier else "--exploration frontier (docs/frontier.md), "
            print(
                f"No reward was seen in {counters.step} steps: is there one? What may find it: "
                f"{frontier}more --total-timesteps"
            )
        values = {"score": score, **more}.items()
        told = [f"{name.replace('_', ' ')} {v:g}" for name, v in values if v is not None]
        print(
            f"{self.task} {args.backup} seed {args.seed}: {', '.join(told) or 'interrupted'} after "
            f"{counters.step} steps, {result['sps']:.1f} steps/s, {result['wall_seconds']:.0f} s; "
            f"{path if told else f'go on with: {self._command()}'}"
        )
        if score is None:
            sys.exit(130)

    def _command(self):
        """The line to type to go on."""
        here = Path.cwd()
        files = [Path(sys.executable), self._script, Path(self._directory.path)]
        python, script, path = (
            str(file.relative_to(here) if file.is_relative_to(here) else file) for file in files
        )
        return shlex.join([python, script, "--resume", path])

    def state(self) -> dict[str, Any]:
        """The loop's own part of a checkpoint."""
        self.require_finite()
        on_gpu = self._device.type == "cuda"
        return {
            "charts": dict(self.charts),
            "obs": np.ascontiguousarray(self._env.obs),
            "flags": fixed_flags(self._args),
            "numpy": self._rng.bit_generator.state,
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state() if on_gpu else torch.zeros(0).byte(),
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Go on from what `state` returned, once all other parts do.

        ValueError where the environment is in another state, or steps are more than all. On another
        device the GPU's own generator is kept.
        """
        if not 0 <= self.step <= self._args.total_timesteps:
            raise ValueError(f"Require 0 to {self._args.total_timesteps} steps, got {self.step}")
        if not np.array_equal(self._env.obs, saved["obs"]):
            raise ValueError(
                "the episode under way plays otherwise: other versions of the environment, "
                "or chance in it that reset(seed) does not govern"
            )
        check_numbers("charts", saved["charts"], self.charts)
        self.charts = saved["charts"]
        self._rng.bit_generator.state = saved["numpy"]
        torch.set_rng_state(torch.from_numpy(saved["torch"]))
        of_gpu = torch.from_numpy(saved["cuda"])
        if self._device.type == "cuda" and len(of_gpu):
            torch.cuda.set_rng_state(of_gpu)

    def _save(self):
        self._directory.flush()
        save_checkpoint(self._directory.path, {"tables": self._directory} | self._parts)

    def _open_directory(self):
        """A new folder, or that of args.resume, whose checkpoint is taken."""
        args, metrics = self._args, METRICS
        if self.frontier is not None:
            metrics += FrontierEpisodes.METRICS
        config = {"script": str(self._script)} | asdict(args) | {"resume": None}
        if args.resume is None:
            try:
                name = run_name(self.task, self._script.stem, args.backup, args.seed)
                directory = RunDirectory(Path(args.run_dir) / name, is_new=True)
                directory.begin(config, metrics)
                return directory
            except OSError as error:
                fail(f"cannot write to {args.run_dir!r}: {error.strerror}")
        with contextlib.ExitStack() as if_refused:
            try:
                directory = RunDirectory(args.resume)
                if_refused.callback(directory.close)
                found = load_checkpoint(args.resume)
                tables = found.pop("tables")
                for name, part in self._parts.items():
                    part.restore(found[name])
                directory.begin(config, metrics, self.step, tables)
            except MemoryError:
                raise
            except Exception as error:  # whatever a part raises for what is not its own
                told = str(error) if isinstance(error, (OSError, ValueError)) else repr(error)
                fail(f"cannot resume {args.resume!r}: {told}")
            if_refused.pop_all()
            return directory


def _any_action(obs, keys=None):
    """A policy that is not asked, where all actions are random."""
    return np.zeros(len(obs), np.int64)


class StopSignal:
    """Ctrl-C, SIGTERM or SIGHUP, noted for the loop to end at a place of its choice.

    As a context manager: `asked` becomes True at the first signal. A second Ctrl-C acts at once;
    after SIGTERM or SIGHUP both are ignored for good, since a sweep that ends sends one per thread
    of a worker. A run that began without SIGHUP, as with nohup, goes on without it.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    asked: bool

    def __init__(self) -> None:
        self.asked = False
        self._previous = {}

    def __enter__(self) -> "StopSignal":
        for number in self.SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._note)
        return self

    def restore(self, *_: Any) -> None:
        """Signals do again what they did before."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    __exit__ = restore

    def _note(self, number, _):
        self.asked = True
        if number != signal.SIGINT:
            self._previous |= dict.fromkeys((signal.SIGTERM, signal.SIGHUP), signal.SIG_IGN)
        self.restore()


def seed_everything(args: RunFlags) -> tuple[np.random.Generator, torch.device]:
    """Seed Python and torch, set up torch. Returns the run's NumPy generator, torch's device."""
    flush_denormals()
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    if args.torch_deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # none is read
    torch.set_num_threads(args.threads)
    _keep_freed_memory()
    on_gpu = args.cuda and torch.cuda.is_available()  # a run may go on without its GPU
    if on_gpu:  # work is captured on the stream that it was warmed up on, not the default one
        torch.cuda.set_stream(torch.cuda.Stream())
    return np.random.default_rng(args.seed), torch.device("cuda" if on_gpu else "cpu")


def flush_denormals() -> None:
    """Set the arithmetic of this process: before anything is played, evaluated or restored.

    Sparse rewards fill Adam's moments with denormals, which are slow. An environment in float32
    with friction has other states with them than without.
    """
    for dtype in (np.float16, np.float32, np.float64, np.longdouble):
        np.finfo(dtype)  # found and kept with denormals: without, imports of NumPy's would warn
    torch.set_flush_denormal(True)


def _keep_freed_memory():
    """Have glibc reuse large freed blocks: given back, they are zeroed page by page each time."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        m_trim_threshold, m_mmap_threshold = -1, -3  # of malloc.h
        mallopt(m_mmap_threshold, 2**25)  # the largest that it takes
        mallopt(m_trim_threshold, 2**30)


@contextlib.contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Around a script's main: what no step can mend ends it with one line; see lasting_output."""

    def interrupted(*_):
        print("\ninterrupted before the run began: nothing was written", file=sys.stderr)
        os._exit(130)  # Numba, while it compiles, takes an exception for one of its own

    previous = signal.signal(signal.SIGINT, interrupted)
    with lasting_output():
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            of_torch = re.search("(out of|allocate) memory", str(error))
            if isinstance(error, RuntimeError) and not of_torch:
                raise
            flags = "--batch-size, --buffer-size, --total-timesteps, --depth or --breadth (0: all)"
            told = f"no memory: {error}" if str(error) else "no memory"
            fail(f"{told}; give a smaller {flags}", 1)
        except KeyboardInterrupt:
            fail("interrupted at once: what is left is the last checkpoint, if there is one", 130)
        finally:
            signal.signal(signal.SIGINT, previous)
