"""Logger: the output and the folder of a run, alike for every script."""

import contextlib
import csv
import fcntl
import io
import itertools
import json
import math
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gbcore.run.checkpoint import module_file, replacing
from gbcore.run.episodes import last_tenth
from gbcore.run.output import fail

METRICS, EVALUATIONS = "metrics.csv", "evaluations.csv"
RESULTS = ("result.json", "model.pt", "graph.npz", "episode.mp4")  # left at the end


class Logger:
    """A run's folder, RUN_DIR/<env>__<script>__<backup>__<seed>__<time> or the one of --resume.

    It gets config.json, TensorBoard's events, metrics.csv and evaluations.csv, in the end
    result.json, model.pt and graph.npz. As a context manager it opens them. It is a part of a
    checkpoint, which holds the tables as well: a resumed run cuts off later rows.

    Args:
        args: the script's flags.
        script: the script's __file__.
        task: the task's own name.
        packages: names of packages whose versions the result tells.

    Attributes:
        path: the folder. It is locked: ValueError where another process goes on with the run.
        step: number of steps begun.
        charts: the numbers of the script's own that the next row of metrics.csv has; any name.
        evaluations: mean return of each evaluation; train_evaluations: on levels of training.
    """

    path: Path
    step: int

    COUNTERS: tuple[str, ...] = (
        "step", "charts", "evaluations", "train_evaluations", "evaluated_step", "training_seconds",
        "_episode", "_last_episode", "_rewarded", "_logged", "_tables",
    )  # fmt: skip

    def __init__(self, args: Any, script: str, task: str, packages: tuple[str, ...] = ()) -> None:
        self._args, self._script, self._task = args, Path(script).resolve(), task
        self.step = self._rewarded = 0
        self.charts: dict[str, Any] = {}
        self.evaluations: list[float] = []
        self.train_evaluations: list[float] = []
        self.evaluated_step: int = 0
        self.training_seconds: float = 0.0
        self._episode, self._last_episode = [0.0, 0], [None, None]  # return and length
        self._logged = [0, 0, 0, 0.0]  # at the last row: steps, updates, evaluated states, seconds
        self._versions = versions("numpy", "numba", "torch", *packages)  # files may change later
        self._begin = time.perf_counter()
        self._tables = {METRICS: ([], []), EVALUATIONS: ([], [])}  # columns, rows
        self._open = contextlib.ExitStack()
        if args.resume is None:
            name = f"{task}__{self._script.stem}__{args.backup}__{args.seed}"
            name = re.sub(r"[^\w.-]", "-", f"{name}__{time.strftime('%Y%m%d-%H%M%S')}")
            self.path = _make_folder(Path(args.run_dir) / name)
        else:
            self.path = Path(args.resume)
        self._open.callback(os.close, _lock(self.path))

    def __enter__(self) -> "Logger":
        from torch.utils.tensorboard import SummaryWriter  # 1 s that bad flags need not wait for

        args, is_new = self._args, self._args.resume is None
        config = {"script": str(self._script)} | vars(args) | {"resume": None}
        if args.track:
            self._open.callback(_begin_tracking(self.path, config).finish)
        for name in RESULTS:  # those of an end before this one
            (self.path / name).unlink(missing_ok=True)
        self.write_json("config.json", config)
        for name in self._tables:
            self._write_table(name)
        self._writer = SummaryWriter(self.path, purge_step=None if is_new else self.step + 1)
        self._open.callback(self._writer.close)
        rows = "".join(f"|{key}|{value}|\n" for key, value in config.items())
        self._writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{rows}")
        device = "cuda" if args.cuda and torch.cuda.is_available() else "cpu"
        about = f"{with_file(self._task)}, {args.backup} backup, on {device}"
        start = "" if is_new else f", from step {self.step:,} on"
        print(f"{about}{start}; results go to {self.path}")
        print(
            "In a first run kernels are compiled, for about a minute, and kept on disk", flush=True
        )
        return self

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> None:
        with contextlib.suppress(OSError):
            self._open.close()
        if isinstance(error, OSError):
            fail(
                f"{error}; mend that, and go on from the last checkpoint, if any: {self._command()}"
            )
        if isinstance(error, ValueError):  # of the algorithm, which its author wants to see whole
            sys.excepthook(type(error), error, error.__traceback__)
            sys.exit(1)

    def begin_step(self) -> int:
        """The number of the step. From here to its end time counts as training."""
        self.step += 1
        self._step_begin = time.perf_counter()
        return self.step

    def end_step(self, reward: float, is_over: bool) -> None:
        """A step gave a reward, the environment's own, and an episode may be over."""
        self.training_seconds += time.perf_counter() - self._step_begin
        self._rewarded += bool(reward)
        self._episode = [self._episode[0] + reward, self._episode[1] + 1]
        if is_over:
            self._last_episode, self._episode = self._episode, [0.0, 0]
            for name, value in zip(("return", "length"), self._last_episode, strict=True):
                self._writer.add_scalar(f"charts/episodic_{name}", value, self.step)

    def is_due(self, frequency: int) -> bool:
        """Is it after so many steps (0: never), or after the last one?"""
        at_end = self.step >= self._args.total_timesteps
        return at_end or (frequency > 0 and self.step % frequency == 0)

    def evaluation_is_due(self) -> bool:
        """By --eval-frequency, or after the last step. One that a signal cut short is due again."""
        return self.step > self.evaluated_step and self.is_due(self._args.eval_frequency)

    def log(self, learner: Any, **more: float | None) -> None:
        """A row of metrics.csv, and one TensorBoard scalar per number: charts, and more.

        learner: with graph, num_updates and num_evaluated.
        """
        self.require_finite()
        graph = learner.graph
        now = [self.step, learner.num_updates, learner.num_evaluated, self.training_seconds]
        steps, updates, evaluated, seconds = np.subtract(now, self._logged).tolist()
        self._logged, (last_return, last_length) = now, self._last_episode
        row = {
            "charts/episodic_return": last_return,
            "charts/episodic_length": last_length,
            "charts/SPS": max(steps, 1) / max(seconds, 1e-9),
            **self.charts,
            "graph/nodes": graph.num_nodes,
            "graph/edges": graph.num_edges,
            "graph/novel_state_ratio": graph.novel_state_ratio,
            "graph/evaluated_per_update": evaluated / updates if updates else None,
            **_numbers(more),
        }
        self._write(METRICS, {"global_step": self.step, **row})
        for name in row.keys() - {"charts/episodic_return", "charts/episodic_length"}:
            if row[name] is not None:
                self._writer.add_scalar(name, row[name], self.step)
        self._tell(row["charts/SPS"], last_return, graph.novel_state_ratio)

    def log_evaluation(
        self,
        episodes: tuple[list[float], list[int]] | None,
        training: tuple[list[float], list[int]] | None = None,
        **more: Any,
    ) -> None:
        """Log an evaluation: returns and lengths of its episodes; None, of one that was stopped.

        training: the same of levels of training, where evaluations play others. more: numbers of
        the evaluation, or functions of returns and lengths that give them: further columns of
        evaluations.csv and scalars `eval/NAME`.
        """
        self.require_finite()
        if episodes is None:
            return
        returns, lengths = episodes[:2]
        more = {n: one(returns, lengths) if callable(one) else one for n, one in more.items()}
        more = _numbers(more)
        train_returns = training[0] if training else [None] * len(returns)
        rows = zip(returns, lengths, train_returns, strict=True)
        for number, (of_episode, length, of_training) in enumerate(rows):
            row = {"episode": number, "episodic_return": of_episode, "episodic_length": length}
            row |= {"train_return": of_training, **more}
            self._write(EVALUATIONS, {"global_step": self.step, **row})
        self.evaluated_step = self.step
        self.evaluations.append(float(np.mean(returns)))
        for name, value in {"episodic_return": self.evaluations[-1], **more}.items():
            if value is not None:
                self._writer.add_scalar(f"eval/{name}", value, self.step)
        if training:
            self.train_evaluations.append(float(np.mean(train_returns)))
            self._writer.add_scalar("eval/train_return", self.train_evaluations[-1], self.step)

    def finish(self, learner: Any, score: float | None = None, **more: float | None) -> None:
        """Write model, graph and result.json; print one line about the run.

        Without a score, of a run that was interrupted, the program ends with status 130.
        """
        args = self._args
        if score is not None:
            more = {"train_score": last_tenth(self.train_evaluations), **more}
        more = {name: value for name, value in more.items() if value is not None}
        if args.save_model:
            _write_model(self.path, learner.online, learner.graph)
        seconds = self.training_seconds
        on_gpu = args.cuda and torch.cuda.is_available()
        result = {
            "script": self._script.stem, "env_id": self._task, "backup": args.backup,
            "exploration": getattr(args, "exploration", None), "seed": args.seed, "score": score,
            **more, "eval_episodes": getattr(args, "eval_episodes", None), "steps": self.step,
            "interrupted": score is None,
            "sps": self.step / max(seconds, 1e-9), "training_seconds": seconds,
            "wall_seconds": time.perf_counter() - self._begin,
            "novel_state_ratio": learner.graph.novel_state_ratio,
            "device": torch.cuda.get_device_name() if on_gpu else "cpu",
            "versions": self._versions,
        }  # fmt: skip
        self.write_json("result.json", result)
        if score is not None and not self._rewarded:
            frontier = "--exploration frontier (docs/frontier.md), "
            print(
                f"No reward was seen in {self.step} steps: is there one? To find it: "
                f"{frontier * (result['exploration'] != 'frontier')}more --total-timesteps"
            )
        values = {"score": score, **more}.items()
        results = [f"{name.replace('_', ' ')} {v:g}" for name, v in values if v is not None]
        print(
            f"{self._task} {args.backup} seed {args.seed}: {', '.join(results) or 'interrupted'} "
            f"after {self.step} steps, {result['sps']:.1f} steps/s, "
            f"{result['wall_seconds']:.0f} s; {self.path if results else self._command()}"
        )
        if score is None:
            sys.exit(130)

    def require_finite(self) -> None:
        """Make charts plain numbers. A loss of NaN ends the run; its last checkpoint is older."""
        self.charts.update(_numbers(self.charts))
        for name, value in self.charts.items():
            if value is not None and name.startswith("losses/") and not math.isfinite(value):
                fail(
                    f"{name} is {value} after {self.step} steps: nothing more can be "
                    "learned; the last checkpoint, if there is one, is from before. Try a smaller "
                    "--learning-rate, or scale the rewards", 1,
                )  # fmt: skip

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        """Write a dict as indented JSON."""
        with replacing(self.path / name) as new:
            new.write_text(json.dumps(content, indent=2, default=str) + "\n")

    def state(self) -> dict[str, Any]:
        """A tree for `restore`."""
        self.require_finite()
        self._writer.flush()
        return {name: getattr(self, name) for name in self.COUNTERS}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what `state` returned; before the logger is entered."""
        for name in self.COUNTERS:
            setattr(self, name, state[name])

    def _write(self, table, row):
        """A row, at once: a killed run loses none. A new column widens the table."""
        columns, rows = self._tables[table]
        rows.append({n: f"{v:.9g}" if isinstance(v, float) else v for n, v in row.items()})
        if new := [name for name in row if name not in columns]:
            columns += new
            self._write_table(table)
        else:
            with (self.path / table).open("a") as file:
                csv.DictWriter(file, columns, lineterminator="\n").writerow(rows[-1])

    def _write_table(self, table):
        columns, rows = self._tables[table]
        with replacing(self.path / table) as new, new.open("w") as file:
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            if columns:
                writer.writeheader()
            writer.writerows(rows)

    def _tell(self, rate, last_return, ratio):
        shown = "-" if last_return is None else f"{last_return:g}"
        total, speed = self._args.total_timesteps, f"{round(rate, None if rate >= 100 else 1):,}"
        line = f"{self.step:,} of {total:,} steps, {speed} steps/s, "
        if self.step > getattr(self._args, "learning_starts", 0):  # before, steps are quicker
            line += f"{timedelta(seconds=round((total - self.step) / rate))} left, "
        print(f"{line}return {shown}, states new {ratio:.1%}", flush=True)

    def _command(self):
        """How to go on: the line to type."""
        words = [sys.executable, str(self._script), "--resume", str(self.path.resolve())]
        folder = f"cd {shlex.quote(os.getcwd())} && " if ":" in self._task else ""  # its module's
        return f"go on with: {folder}{shlex.join(words)}"


def _numbers(values):
    """Numbers, tensors and None by name -> float or None."""
    result = {}
    for name, value in values.items():
        try:
            result[name] = None if value is None else float(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"Require a number as {name}, got {value!r}") from error
    return result


def _write_model(path, network, graph):
    model = io.BytesIO()  # in memory first: on a full disk torch raises a bare RuntimeError
    torch.save(network.state_dict(), model)
    with replacing(path / "model.pt") as new:
        new.write_bytes(model.getbuffer())
    with replacing(path / "graph.npz") as new:
        graph.save(new)


def _make_folder(path):
    """A new folder of that name, or with a number appended if there is one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for tries in itertools.count(1):
        new = path if tries == 1 else Path(f"{path}-{tries}")
        with contextlib.suppress(FileExistsError):
            new.mkdir()
            return new


def _lock(path):
    """A descriptor of a folder, to be closed to give it back."""
    lock = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise ValueError(f"another process goes on with the run {path}") from error
    except OSError:
        pass  # a file system without locks
    return lock


def _begin_tracking(path, config):
    import wandb

    run = {"project": config["wandb_project_name"], "entity": config["wandb_entity"]}
    run |= {"id": path.resolve().name, "resume": "allow", "sync_tensorboard": True}
    return wandb.init(**run, config=config)


def with_file(task: str) -> str:
    """A task's name; of module:Id-v0 with the file that the module was imported from."""
    file = module_file(task)
    return f"{task} ({file})" if file else task


def versions(*packages: str) -> dict[str, str | None]:
    """Of this code (its commit, where git knows), Python and packages, for result.json."""
    describe = ("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty")
    try:
        commit = subprocess.run(describe, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):  # no git, or a copied folder
        commit = None
    result = {package: metadata.version(package) for package in packages}
    return {"commit": commit, "python": platform.python_version()} | result
