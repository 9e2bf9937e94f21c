"""Run: one run of a script, from its flags to its result."""

import contextlib
import ctypes
import errno
import math
import os
import random
import re
import signal
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch

from gbcore.frontier import FrontierEpisodes
from gbcore.graph import TransitionGraph
from gbcore.graph_values import GraphValues
from gbcore.leaf_table import LeafTable
from gbcore.replay import PrioritizedReplay
from gbcore.run.checkpoint import RandomStates, check_like, load_checkpoint, save_checkpoint
from gbcore.run.directory import RunDirectory, lock_folder, run_name, versions
from gbcore.run.flags import fail
from gbcore.run.progress import Progress
from gbcore.targets import pair_q_values

METRICS = (
    "charts/episodic_return", "charts/episodic_length", "charts/SPS", "charts/epsilon",
    "losses/td_loss", "losses/q_values", "graph/nodes", "graph/edges", "graph/novel_state_ratio",
    "graph/evaluated_per_update",
)  # fmt: skip
# Errors of a disk that is full, broken or read only.
OF_A_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


@dataclass
class Counters:
    """Where a run stands."""

    step: int = 0
    episodic_return: float = 0.0  # of the episode under way
    episodic_length: int = 0
    last_return: float | None = None  # of the last episode that ended
    last_length: int | None = None
    training_seconds: float = 0.0
    logged: list = field(default_factory=lambda: [0, 0, 0, 0.0])  # at the last row of metrics.csv:
    # steps, updates, evaluated states, seconds
    evaluations: list = field(default_factory=list)  # mean return of each
    evaluated_step: int = 0  # of the last evaluation

    def state(self):
        """What `restore` takes back."""
        return asdict(self)

    def restore(self, saved):
        """Go on from what `state` returned. ValueError for numbers that cannot be."""
        for name, value in saved.items():
            setattr(self, name, value)
        steps = (self.episodic_length, self.evaluated_step, self.last_length or 0, self.logged[0])
        if len(self.logged) != 4 or min(*steps, *self.logged) < 0 or max(steps) > self.step:
            raise ValueError("Require counters >= 0, and none above the step")
        if not 0 <= self.training_seconds <= 1e10 or self.logged[3] > 1e10:
            raise ValueError("Require training to have taken less than 1e10 s")
        if (self.last_return is None) != (self.last_length is None):
            raise ValueError("Require return and length of the last episode, or neither")
        if bool(self.evaluations) != (self.evaluated_step > 0):
            raise ValueError("Require returns of evaluations, if and only if there was one")


class Run:
    """Logs and saves between the steps of a training loop, and goes on exactly. The loop is yours:

        run = Run(...)
        with run:
            for step in run.steps():
                if run.evaluation_is_due():  # of the step before
                    run.log_evaluation(evaluate(..., run.stop))
                ...  # act, and add to the replay
                run.count(reward)
                if terminated or truncated:
                    run.end_episode()  # also tells the replay and the frontier
                ...  # learn
            if run.evaluation_is_due():  # after training
                run.log_evaluation(evaluate(..., run.stop))
            run.finish(score_of)

    Args:
        args: the script's flags.
        script: the script's __file__.
        task: the task's own name.
        parts: what a checkpoint holds: at least "graph", "replay", "learner" (with num_updates and
            num_evaluated, and online, its network), "env" (with num_actions, and obs, the
            observation that it is in) and, where training explores with the graph, "frontier". Each
            has `state()` and `restore(state)`.
        rng: the np.random.Generator of all sampling.
        device: torch's device.
        packages: names of packages whose versions the result tells.

    Attributes:
        charts: values of the next row of metrics.csv that the loop knows: epsilon, loss, values.
        stop: `stop.asked` becomes True at Ctrl-C or SIGTERM.
    """

    def __init__(self, args, script, task, parts, rng, device, packages):
        self.args, self.task, self.device = args, task, device
        self.script = Path(script).resolve()
        self.counters, self.charts = Counters(), dict.fromkeys(METRICS[3:6])
        self.graph, self.learner, self.env = parts["graph"], parts["learner"], parts["env"]
        self.frontier = parts.get("frontier")
        self.parts = parts | {"random": RandomStates(rng, device), "counters": self.counters}
        self.versions = versions("numpy", "numba", "torch", *packages)  # files may change later
        self._begin = self._clock = time.perf_counter()
        self._progress, self.stop = None, StopSignal()
        compile_kernels(self.graph)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # see errors_in_one_line
        lock = self._restore() if args.resume else None
        self.directory = self._open_directory(lock)
        print(f"{task}, {args.backup} backup, on {device}; results go to {self.directory.path}")
        # Sparse rewards fill Adam's moments with denormals. Earlier, imports of NumPy would warn.
        torch.set_flush_denormal(True)

    def __enter__(self):
        self.stop.__enter__()
        return self

    def __exit__(self, _, error, __):
        self.stop.__exit__()
        with contextlib.suppress(OSError):
            self.directory.close()
        path = str(self.directory.path)
        if isinstance(error, OSError) and (  # others are the environment's own
            error.errno in OF_A_DISK or path in str(error.filename)
        ):
            fail(
                f"cannot write to {path!r}: {error.strerror}; mend that, and go on with --resume "
                "from its last checkpoint, if there is one",
                status=1,
            )

    # ----------------------------------------------------------------------------------------------
    # In the loop
    # ----------------------------------------------------------------------------------------------

    @property
    def step(self):
        """Number of steps made."""
        return self.counters.step

    def steps(self):
        """Yields the numbers of the steps that are left; logs and saves between two of them.

        Ends early after Ctrl-C or SIGTERM. Leaves a checkpoint.
        """
        args, counters = self.args, self.counters
        self._progress = Progress(counters.step, args.total_timesteps, args.learning_starts)
        self._clock = time.perf_counter() - counters.training_seconds
        while counters.step < args.total_timesteps and not self.stop.asked:
            yield counters.step + 1
            counters.step += 1
            counters.training_seconds = time.perf_counter() - self._clock
            if self._is_due(args.log_frequency) or counters.step == args.total_timesteps:
                self._log()
                self._progress.warn_of_company(args.threads)
                shown = "-" if counters.last_return is None else f"{counters.last_return:g}"
                ratio = self.graph.novel_state_ratio
                self._progress.note = f"return {shown}, states new {ratio:.1%}"
            self._progress.update(counters.step)
            if self._is_due(args.checkpoint_frequency):
                begin = time.perf_counter()
                self._save()
                self._clock += time.perf_counter() - begin
        self._progress.close()
        self._save()
        if self.evaluation_is_due() and not self.stop.asked:
            print(f"Evaluating {args.eval_episodes} episodes ...", flush=True)

    def count(self, reward):
        """A step gave a reward, the environment's own."""
        self.counters.episodic_return += reward
        self.counters.episodic_length += 1

    def end_episode(self):
        """The episode under way is over: log it, and have replay and frontier begin another."""
        counters = self.counters
        counters.last_return = counters.episodic_return
        counters.last_length = counters.episodic_length
        self.directory.log_episode(counters.step + 1, counters.last_return, counters.last_length)
        counters.episodic_return, counters.episodic_length = 0.0, 0
        self.parts["replay"].end_episode()
        if self.frontier is not None:
            self.frontier.end_episode()

    def evaluation_is_due(self):
        """Does --eval-frequency ask for an evaluation of the steps made, or are they all made?

        One that a signal cut short is due again. Until `log_evaluation`, no time is of training.
        """
        self._paused_at, step = time.perf_counter(), self.counters.step
        at_end = step >= self.args.total_timesteps
        return step > self.counters.evaluated_step and bool(
            at_end or self._is_due(self.args.eval_frequency)
        )

    def log_evaluation(self, episodes):
        """Log an evaluation: returns and lengths of its episodes, two lists.

        None, of one that was stopped, ends the program as `finish` ends an interrupted run.
        """
        if episodes is None:
            self._save()
            self._end_interrupted()
        returns, lengths = episodes
        self.directory.log_evaluation(self.counters.step, returns, lengths)
        self.counters.evaluations.append(float(np.mean(returns)))
        self.counters.evaluated_step = self.counters.step
        self._clock += time.perf_counter() - self._paused_at

    def finish(self, score_of, **more):
        """Write what was learned and result.json; say how it went.

        score_of: function of the means of all evaluations that gives the score.
        more: further entries of result.json, functions of the score.

        An interrupted run ends the program with status 130.
        """
        counters = self.counters
        if not counters.evaluated_step == counters.step >= self.args.total_timesteps:
            self._end_interrupted()
        score = score_of(counters.evaluations)
        more = {name: value(score) for name, value in more.items()}
        told = [f"{name.replace('_', ' ')} {v:.3f}" for name, v in more.items() if v is not None]
        self._write_end(", ".join([f"score {score:g}", *told]), self.directory.path, score, **more)
        self.stop.__exit__()  # Ctrl-C ends at once what comes after it

    def replacing(self, name):
        """Context manager: a path to write a file of a finished run to.

        The file gets its name when it is whole. Ctrl-C leaves the run without it.
        """
        return self.directory.replacing(name, unless=KeyboardInterrupt)

    # ----------------------------------------------------------------------------------------------
    # Between two steps
    # ----------------------------------------------------------------------------------------------

    def _is_due(self, frequency):
        return frequency and self.counters.step % frequency == 0

    def _log(self):
        counters, learner, graph = self.counters, self.learner, self.graph
        self.require_finite()
        seconds = time.perf_counter() - self._clock
        now = [counters.step, learner.num_updates, learner.num_evaluated, seconds]
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
        self.directory.log(
            counters.step, row if self.frontier is None else row | self.frontier.metrics()
        )

    def require_finite(self):
        """A network that learned NaN ends the run; its last checkpoint is from before."""
        for name, value in self.charts.items():
            self.charts[name] = None if value is None else float(value)
            if value is not None and not math.isfinite(self.charts[name]):
                fail(
                    f"{name} is {self.charts[name]} after {self.counters.step} steps: nothing more "
                    "can be learned; its last checkpoint, if there is one, is from before. Try a "
                    "smaller --learning-rate",
                    status=1,
                )

    def _end_interrupted(self):
        self._progress.close()
        path = self.directory.path
        self._write_end("interrupted", f"go on with --resume {path}", score=None)
        sys.exit(130)

    def _write_end(self, summary, hint, score, **more):
        args, counters = self.args, self.counters
        if args.save_model:
            self.directory.write_model(self.learner.online, self.graph)
        result = {
            "script": self.script.stem,
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
            "novel_state_ratio": self.graph.novel_state_ratio,
            "device": torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu",
            "versions": self.versions,
        }
        self.directory.write_json("result.json", result)
        print(self._worth_of_graph())
        print(
            f"{self.task} {args.backup} seed {args.seed}: {summary} after {counters.step} steps, "
            f"{result['sps']:.1f} steps/s, {result['wall_seconds']:.0f} s; {hint}"
        )

    def _worth_of_graph(self):
        """One line: how often states come again, and how often a target has more than one path."""
        rng, replay = np.random.default_rng(0), self.parts["replay"]
        rows = rng.integers(max(replay.size, 1), size=256)
        several, depth = 0, min(self.args.depth, 10)  # nothing is sampled: deeper takes long
        for node, action in zip(replay.node[rows], replay.action[rows], strict=True):
            subgraphs = self.graph.expand([node], [action], depth)
            several += (np.diff(subgraphs.level_outcomes) > 1).any()
        return (
            f"The graph: {1 - self.graph.novel_state_ratio:.1%} of the steps acted in a state "
            f"seen before; {several / len(rows):.1%} of the targets of depth {depth} "
            "have more than one path (docs/graphs.md says what that is worth)"
        )

    # ----------------------------------------------------------------------------------------------
    # Start, checkpoint, resume
    # ----------------------------------------------------------------------------------------------

    def state(self):
        """The loop's own part of a checkpoint."""
        self.require_finite()
        return {"charts": dict(self.charts), "obs": np.ascontiguousarray(self.env.obs)}

    def _save(self):
        self.directory.flush()
        save_checkpoint(self.directory.path, self.parts | {"run": self})

    def _restore(self):
        """Take the checkpoint of args.resume. Returns the lock of its folder."""
        path = self.args.resume
        try:
            with lock_folder(path) as lock:
                found = load_checkpoint(path)
                parts = self.parts | {"run": self}
                check_like(found, {name: part.state() for name, part in parts.items()})
                actions = found["env"].get("actions", ())
                if not all(type(a) is int and 0 <= a < self.env.num_actions for a in actions):
                    raise ValueError("Require the environment's own actions")
                if found["counters"]["step"] > self.args.total_timesteps:
                    raise ValueError("Require no step after the last one")
                for name, part in self.parts.items():
                    part.restore(found[name])
                if not np.array_equal(self.env.obs, found["run"]["obs"]):
                    raise ValueError(
                        "the episode under way plays otherwise: other versions of the environment, "
                        "or chance in it that reset(seed) does not govern"
                    )
                self.charts = found["run"]["charts"]
        except MemoryError:
            raise
        except (OSError, ValueError) as error:
            fail(f"cannot resume {path!r}: {error}")
        except Exception as error:  # what the parts' own libraries raise
            fail(f"cannot resume {path!r}: {error!r}")
        return lock

    def _open_directory(self, lock):
        args = self.args
        name = run_name(self.task, self.script.stem, args.backup, args.seed)
        extra = () if self.frontier is None else FrontierEpisodes.METRICS
        try:
            return RunDirectory(
                args.resume or Path(args.run_dir) / name,
                {"script": str(self.script)} | asdict(args) | {"resume": None},
                METRICS + extra,
                resume_step=self.counters.step if args.resume else None,
                evaluated_step=self.counters.evaluated_step if args.resume else None,
                lock=lock,
            )
        except OSError as error:
            fail(f"cannot write to {args.resume or args.run_dir!r}: {error.strerror}")


class StopSignal:
    """Ctrl-C or SIGTERM, noted for the loop to end at a place of its choice.

    As a context manager: `asked` becomes True at the first signal. A second Ctrl-C acts at once; a
    second SIGTERM is ignored for good, since a sweep that ends sends one per thread of a worker.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __enter__(self):
        self.asked = False
        self._previous = {number: signal.signal(number, self._note) for number in self.SIGNALS}
        return self

    def __exit__(self, *_):
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number, _):
        self.asked = True
        if number == signal.SIGTERM:
            self._previous[number] = signal.SIG_IGN
        self.__exit__()


def seed_everything(args):
    """Seed Python and torch, set up torch. Returns the run's NumPy generator, torch's device."""
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    if args.torch_deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # none is read
    args.threads = args.threads or _quickest_threads()
    torch.set_num_threads(args.threads)
    _keep_freed_memory()
    on_gpu = args.cuda and torch.cuda.is_available()  # a run may go on without its GPU
    if on_gpu:  # work is captured on the stream that it was warmed up on, not the default one
        torch.cuda.set_stream(torch.cuda.Stream())
    return np.random.default_rng(args.seed), torch.device("cuda" if on_gpu else "cpu")


def _quickest_threads():
    """Threads for the cores that are really free: all, at most 8, or half as many, and so on.

    Beside other busy processes every operation waits for the thread that has no core: one thread
    is then many times quicker than two. More threads are taken where they save a tenth or more.
    """
    images, weight = torch.zeros(48, 32, 20, 20), torch.zeros(64, 32, 4, 4, requires_grad=True)
    seconds, numbers = {}, [min(len(os.sched_getaffinity(0)), 8)]
    while numbers[-1] > 1:
        numbers.append(numbers[-1] // 2)
    for number in [*numbers, *numbers] * 4:
        torch.set_num_threads(number)
        begin = time.perf_counter()
        for _ in range(8):
            torch.nn.functional.conv2d(images, weight, stride=2).sum().backward()
        seconds.setdefault(number, []).append(time.perf_counter() - begin)
    median = {number: np.median(times) for number, times in seconds.items()}
    return next(n for n in sorted(median) if 0.9 * median[n] <= min(median.values()))


def _keep_freed_memory():
    """Have glibc reuse large freed blocks: given back, they are zeroed page by page each time."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        m_trim_threshold, m_mmap_threshold = -1, -3  # of malloc.h
        mallopt(m_mmap_threshold, 2**25)  # the largest that it takes
        mallopt(m_trim_threshold, 2**30)


def compile_kernels(graph):
    """Compile the kernels of a step on a toy graph of the same kind, before the clock starts."""
    start = time.perf_counter()
    print("Compiling kernels (kept on disk after the first run) ...", end=" ", flush=True)
    rng = np.random.default_rng(0)
    toy = TransitionGraph(
        graph.num_actions, graph.obs_shape, graph.obs_dtype, frame_stack=graph.frame_stack
    )
    frontier, replay = FrontierEpisodes(toy), PrioritizedReplay(toy, 3, 1.0)
    nodes = [toy.node(np.full(graph.obs_shape, i, graph.obs_dtype)) for i in range(2)]
    for i in range(4):
        replay.add(nodes[i % 2], 0, 0.0, nodes[1 - i % 2], False)
        frontier.act(nodes[1 - i % 2], rng)
    frontier.metrics()
    batch = replay.sample(2, rng, 1.0)
    for source in ("trajectory", "graph"):
        subgraphs = replay.subgraphs(batch, source, 3, 1, rng)
        leaf_q = np.zeros((len(subgraphs.nodes), graph.num_actions), np.float32)
        for rule in ("greedy", "behaviour"):
            pair_q_values(subgraphs, leaf_q, 0.5, rule)
    leaves = LeafTable(toy, lambda obs: np.zeros((len(obs), toy.num_actions), np.float32))
    values = GraphValues(toy, leaves, 0.5)
    values.update()
    values.targets(batch.nodes, batch.actions)
    values.actions(batch.nodes)
    print(f"{time.perf_counter() - start:.1f} s")


@contextlib.contextmanager
def errors_in_one_line():
    """Around a script's main: what no step can mend ends it with one line."""

    def interrupted(*_):
        print("\ninterrupted before the run began: nothing was written", file=sys.stderr)
        os._exit(130)  # Numba, while it compiles, takes an exception for one of its own

    previous = signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        of_torch = re.search("(out of|allocate) memory", str(error))
        if isinstance(error, RuntimeError) and not of_torch:
            raise
        smaller = "--batch-size, --buffer-size, --total-timesteps, --depth or --breadth (0: all)"
        fail(f"no memory: {error}; give a smaller {smaller}", 1)
    except KeyboardInterrupt:
        fail("interrupted at once: what is left is the last checkpoint, if there is one", 130)
    finally:
        signal.signal(signal.SIGINT, previous)
