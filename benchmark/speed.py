"""Time the three scripts: steps per second of every backup, where the time goes, and the limits.

    python benchmark/speed.py
    python benchmark/speed.py --scripts gb_rainbow_atari --atari Freeway Breakout --cuda
    python benchmark/speed.py --scripts gb_rainbow_atari --bf16
    python benchmark/speed.py --scripts gb_rainbow_atari --backups graph --parallel 1 2 4 8

What runs is `train` of a script, with the script's own flags. One agent (graph) first fills the
replay, random steps and then its own. Every backup goes on from a copy of that agent, and they take
turns, a slice of steps each, so that whatever else the machine does slows all of them alike. A
repetition is a whole period of the target network, so that leaf values are evaluated as often as in
a run; each begins with fresh copies. Kernels are compiled before. Two limits take turns with them:
the environment alone, under random actions, and the environment plus the bare gradient step,
towards constant targets.

With --parallel, whole processes train side by side, and their rates are added up.
"""

import contextlib
import copy
import importlib
import multiprocessing
import os
import platform
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
import tyro
from output import fail, read_rows, write_rows
from recorded import task_name
from tether import end_with

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

Script = Literal["gb_dqn_minigrid", "gb_dqn_minatar", "gb_rainbow_atari"]
Backup = Literal["one-step", "n-step", "tree", "graph", "graph-mixed"]
BACKUPS = get_args(Backup)
ATARI = "gb_rainbow_atari"
ENVIRONMENT, GRADIENT = "limit: environment", "limit: + gradient"
BF16 = ", bfloat16"  # after the name of a backup: with --bf16-targets
PHASES = ("environment", "act", "expand", "leaf evaluation", "targets", "gradient", "rest")
COLUMNS = (
    "hardware", "device", "threads", "torch", "script", "task", "backup", "updates_per_step",
    "repetitions", "steps", "steps_per_second", "lowest", "highest", "of_one_step",
    "of_environment", "of_gradient", "evaluated_per_update",
    *(f"microseconds_{phase.replace(' ', '_')}" for phase in PHASES),
)  # fmt: skip
PARALLEL_COLUMNS = (
    "hardware", "device", "threads", "torch", "script", "task", "backup", "processes", "seconds",
    "slowest", "fastest", "steps_per_second",
)  # fmt: skip
PAPER_STEPS = 26 * 5 * 4 * 100_000  # of its Atari100K grid: games, seeds, backups, steps


@dataclass
class Args:
    scripts: tuple[Script, ...] = ("gb_dqn_minigrid", "gb_dqn_minatar", "gb_rainbow_atari")
    """what to time"""
    backups: tuple[Backup, ...] = BACKUPS
    """with which targets; the two limits always run as well"""
    minigrid: tuple[str, ...] = ("Empty-8x8",)
    """tasks of gb_dqn_minigrid"""
    minatar: tuple[str, ...] = ("freeway",)
    """games of gb_dqn_minatar"""
    atari: tuple[str, ...] = ("Freeway",)
    """games of gb_rainbow_atari"""
    bf16: bool = False
    """time its backups with --bf16-targets as well"""
    cuda: bool = torch.cuda.is_available()
    """time gb_rainbow_atari on the GPU; the small networks of the others stay on the CPU"""
    threads: int = -1
    """CPU threads for torch; -1 = each script's default, 0 = all cores"""
    warm_up_steps: int = 0
    """steps in the replay before the clock starts; 0 = 8,000, with Atari 3,000"""
    learning_starts: int = -1
    """of these, random ones; -1 = each script's default"""
    steps: int = 0
    """steps per repetition; 0 = a period of the target network, with Atari 40"""
    repetitions: int = 3
    """repetitions of each backup"""
    parallel: tuple[int, ...] = ()
    """instead, total rate of so many processes side by side"""
    parallel_seconds: float = 60.0
    """how long they train"""
    out: Path | None = None
    """CSV file; by default benchmark/results/speed.csv, or speed_parallel.csv"""


# --------------------------------------------------------------------------------------------------
# One agent of a script, on the clock
# --------------------------------------------------------------------------------------------------


class Agent:
    """A learner in the middle of a run that can be trained a slice of steps at a time."""

    def __init__(self, script, args, task, learner, rng, counters, env, folder):
        self.script, self.args, self.task, self.learner = script, args, task, learner
        self.rng, self.counters, self.env = rng, counters, env
        self.run = script.RunDirectory(Path(folder) / "run", {}, script.METRICS)
        self.seconds, self.on_the_clock = dict.fromkeys(("slices", *PHASES), 0.0), False
        self.unclocked = []  # owner, name and call of all that are clocked

    @property
    def atari(self):
        return self.script.__name__ == ATARI

    def train(self, num_steps):
        """Seconds of so many steps of the script's loop."""
        self.args.total_timesteps = self.counters.step + num_steps
        with quiet(self.script):
            start = time.perf_counter()
            finished = self.script.train(
                self.args, self.task, self.run, self.learner, self.rng, self.counters, self.env
            )
            synchronize(self.learner.device)
            seconds = time.perf_counter() - start
        if not finished:  # Ctrl-C, which `train` takes for itself
            sys.exit(130)
        return seconds

    def clocked_train(self, num_steps):
        """The same, with a clock on every phase; on a GPU each of them is waited for."""
        self.on_the_clock = True
        self.seconds["slices"] += self.train(num_steps)
        self.on_the_clock = False

    def clock(self, owner, name, phase):
        """Have the calls of owner.name add to a phase."""
        call = getattr(owner, name)

        def clocked(*args, **kwargs):
            if not self.on_the_clock:
                return call(*args, **kwargs)
            start = time.perf_counter()
            result = call(*args, **kwargs)
            synchronize(self.learner.device)
            self.seconds[phase] += time.perf_counter() - start
            return result

        self.unclocked.append((owner, name, call))
        setattr(owner, name, clocked)

    def clock_phases(self):
        """The phases contain each other: `phases` takes them apart."""
        learner = self.learner
        self.clock(self.env, "step", "environment")
        self.clock(self.env, "reset", "environment")
        self.clock(learner, "act", "act")
        self.clock(learner, "subgraphs", "expand")
        self.clock(learner, "update", "gradient")
        self.clock(learner, "pruned_targets" if self.atari else "targets", "leaf evaluation")
        self.clock(self.script, "categorical_targets" if self.atari else "pair_q_values", "targets")

    def phases(self):
        """Shares of the time of the clocked slices, in the order of PHASES."""
        seconds = dict(self.seconds)
        total = seconds.pop("slices")
        seconds["gradient"] -= seconds["leaf evaluation"]
        seconds["leaf evaluation"] -= seconds["targets"]
        seconds["rest"] = total - sum(seconds.values())
        return [seconds[phase] / total for phase in PHASES]

    def close(self):
        """Take the clocks off, which a script's own function would wear for ever."""
        for owner, name, call in reversed(self.unclocked):
            setattr(owner, name, call)
        self.run.close()

    @property
    def work_done(self):
        """States evaluated for targets, and updates."""
        counter = self.learner if self.atari else self.learner.leaves
        return np.array([counter.num_evaluated, self.learner.num_updates])


@contextlib.contextmanager
def quiet(script):
    """Meanwhile the script shows no progress bar, nor saves a checkpoint at the end of a slice."""
    save, progress = script.save, script.tqdm
    script.save, script.tqdm = lambda *args: None, partial(progress, disable=True)
    try:
        yield
    finally:
        script.save, script.tqdm = save, progress


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def warm_up_steps(args, name):
    return args.warm_up_steps or (3_000 if name == ATARI else 8_000)


def make_agent(args, name, task, folder):
    """An agent that has played and learned for args.warm_up_steps; its flags are the script's."""
    script = importlib.import_module(name)
    atari = name == ATARI
    task = task_name(name, task)
    agent_args = script.Args(
        backup="graph", eval_frequency=0, cuda=args.cuda and atari, save_model=False
    )
    if args.threads >= 0:
        agent_args.threads = args.threads
    if args.learning_starts >= 0:
        agent_args.learning_starts = args.learning_starts
    torch.manual_seed(agent_args.seed)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    most = 8 if atari else 1024  # as in the scripts' main
    torch.set_num_threads(agent_args.threads or min(len(os.sched_getaffinity(0)), most))
    device = torch.device("cuda" if agent_args.cuda else "cpu")
    rng = np.random.default_rng(agent_args.seed)
    if atari:
        script.keep_freed_memory()
        if agent_args.cuda:
            torch.cuda.set_stream(torch.cuda.Stream())
        env = script.Game(task)
        env.close = lambda: None  # not at the end of a slice
        obs = env.reset(script.draw_seed(rng))[0]
    else:
        env = script.make_envs(agent_args, task, rng, 1)[0]
        obs = env.reset()
    steps = warm_up_steps(args, name)
    graph = script.TransitionGraph(
        env.num_actions, obs.shape, obs.dtype, frame_stack=atari, capacity=2 * steps
    )
    capacity = 100_000 if args.parallel else steps + 100 * (args.steps or 8_000)
    options = (agent_args.priority_exponent,) if atari else ()
    replay = script.Replay(graph, capacity, *options)
    learner = script.Learner(agent_args, graph, replay, env.num_actions, device)
    counters = script.Counters()
    counters.node = learner.node(obs) if atari else graph.node(obs)
    torch.set_flush_denormal(True)
    agent = Agent(script, agent_args, task, learner, rng, counters, env, folder)
    agent.train(steps)
    return agent


def branch(agent, name, folder):
    """A copy of the agent, environment and all, that goes on with another backup, or as a limit."""
    script = agent.script
    backup = name.removesuffix(BF16)
    args = replace(agent.args, backup=backup if backup in BACKUPS else "one-step")
    if name.endswith(BF16):
        args.bf16_targets = True
    counters = copy.deepcopy(agent.counters)
    if agent.atari:
        env = script.Game(agent.task)
        env.close = lambda: None
    else:
        env = script.make_envs(args, agent.task, np.random.default_rng(0), 1)[0]
    env.restore(agent.env.state())
    replay = copy.deepcopy(agent.learner.replay)  # and its graph
    learner = script.Learner(args, replay.graph, replay, env.num_actions, agent.learner.device)
    learner.restore(copy.deepcopy(agent.learner.state()))
    if agent.atari and learner.padded:
        learner.make_room_for_frames()
    rng = np.random.default_rng(1)
    if name == GRADIENT:
        learner.act = lambda *args, **kwargs: rng.integers(env.num_actions, size=1)
        (remove_atari_targets if agent.atari else remove_targets)(learner)
    copied = Agent(script, args, agent.task, learner, rng, counters, env, folder)
    if name == ENVIRONMENT:
        copied.train = lambda num_steps: play(copied, rng, num_steps)
    copied.clock_phases()
    return copied


def remove_targets(learner):
    """Leave a learner constant targets: of the update, nothing but the gradient step."""
    learner.subgraphs = lambda batch, rng: None
    learner.targets = lambda batch, subgraphs: np.zeros(len(batch.nodes), np.float32)


def remove_atari_targets(learner):
    """The same for distributions, on a CPU or in updates of fixed shape."""
    batch_size, num_atoms = learner.args.batch_size, len(learner.support)
    uniform = learner.support.new_full((batch_size, num_atoms), 1 / num_atoms)

    def pruned_update(batch, subgraphs):
        obs, actions = learner.observations(batch.nodes), torch.from_numpy(batch.actions)
        return learner.step(
            learner.online.heads(), uniform, obs, actions, torch.from_numpy(batch.weights)
        )

    def fixed_update(plan):  # of one-step's shape: what is captured holds the gradient step alone
        num_frames = 4 * (len(plan.subgraphs.nodes) + batch_size)
        frame_ids = plan.integers[-4 * batch_size :]
        actions = plan.integers[-num_frames - batch_size : -num_frames]
        obs = learner.frames[frame_ids].view(-1, 4, 84, 84)
        weights = plan.floats[-batch_size:]
        return learner.step(learner.online.heads(), uniform, obs, actions, weights)

    if learner.padded:
        learner.fixed_update = fixed_update
    else:
        learner.subgraphs = lambda batch, rng: None
        learner.pruned_update = pruned_update


def play(agent, rng, num_steps):
    """Seconds of so many steps of the environment alone."""
    env = agent.env
    actions = rng.integers(env.num_actions, size=num_steps).tolist()
    start = time.perf_counter()
    for action in actions:
        moved = env.step(action)
        if moved is None:
            env.reset(agent.script.draw_seed(rng))
        elif not agent.atari and (moved[2] or moved[3]):
            env.reset()
    return time.perf_counter() - start


# --------------------------------------------------------------------------------------------------
# Rates, phases and limits
# --------------------------------------------------------------------------------------------------


class Turns(NamedTuple):
    """What a copy of the agent did in one repetition."""

    seconds: list  # of each slice
    phases: list  # shares of the time, in the order of PHASES
    work_done: np.ndarray  # int64 [2]: states evaluated, updates


def measure(args, name, task, folder):
    """A row of COLUMNS for each limit and backup."""
    agent = make_agent(args, name, task, folder / "warm-up")
    names = [ENVIRONMENT, GRADIENT, *args.backups]
    if args.bf16 and agent.atari:
        names += [backup + BF16 for backup in args.backups]
    steps = args.steps or (40 if agent.atari else agent.args.target_network_frequency)
    bounds = np.linspace(0, steps, 1 + max(1, min(32, steps // 10))).astype(int)
    slices = np.diff(bounds).tolist()
    repetitions = []
    for i in range(args.repetitions):
        first = i % len(names)
        order = names[first:] + names[:first]
        repetitions.append(take_turns(agent, order, slices, folder / str(i)))
    agent.close()

    paired = {name: np.array([turns[name].seconds for turns in repetitions]) for name in names}
    agent_args, rows = agent.args, []
    for backup, seconds in paired.items():  # [repetitions, slices]
        rates = steps / seconds.sum(axis=1)
        row = dict.fromkeys(COLUMNS) | describe(agent)
        row |= {
            "backup": backup,
            "updates_per_step": agent_args.updates_per_train / agent_args.train_frequency,
            "repetitions": args.repetitions,
            "steps": steps,
            "steps_per_second": np.median(rates),
            "lowest": rates.min(),
            "highest": rates.max(),
            "of_environment": np.median(paired[ENVIRONMENT] / seconds),
            "of_gradient": np.median(paired[GRADIENT] / seconds),
        }
        if "one-step" in paired:
            row["of_one_step"] = np.median(paired["one-step"] / seconds)
        if backup == ENVIRONMENT:
            row |= {"updates_per_step": 0.0, "of_one_step": None, "of_gradient": None}
        else:
            evaluated, updates = sum(turns[backup].work_done for turns in repetitions)
            row["evaluated_per_update"] = evaluated / max(updates, 1)
            shares = np.mean([turns[backup].phases for turns in repetitions], axis=0)
            for phase, share in zip(PHASES, shares, strict=True):
                microseconds = 1e6 * share / row["steps_per_second"]
                row[f"microseconds_{phase.replace(' ', '_')}"] = microseconds
        rows.append(row)
    return rows


def take_turns(agent, names, slices, folder):
    """`Turns` of fresh copies of the agent, one for each name: slices of so many steps each.

    Fresh in every repetition, and made in another order: where a copy's arrays happen to lie in
    memory makes its gradient step some percent faster or slower for as long as it lives.
    """
    agents = {name: branch(agent, name, folder / str(i)) for i, name in enumerate(names)}
    for copied in agents.values():  # compiles, and captures
        copied.train(slices[0])
    seconds = {name: [] for name in names}
    before = {name: copied.work_done for name, copied in agents.items()}
    for num_steps in slices:
        for name, copied in agents.items():
            seconds[name].append(copied.train(num_steps))
    done = {name: copied.work_done - before[name] for name, copied in agents.items()}
    for num_steps in slices[: max(1, len(slices) // 8)]:
        for copied in agents.values():
            copied.clocked_train(num_steps)
    for copied in reversed(agents.values()):  # the last clock put on a function comes off first
        copied.close()
    return {name: Turns(seconds[name], agents[name].phases(), done[name]) for name in names}


def describe(agent):
    """What was measured, and where: the first columns."""
    cuda = agent.learner.device.type == "cuda"
    cpu = platform.processor() or platform.machine()
    cpu_info = Path("/proc/cpuinfo")
    if cpu_info.exists():
        names = [row for row in cpu_info.read_text().splitlines() if row.startswith("model name")]
        cpu = names[0].split(": ")[1] if names else cpu
    return {
        "hardware": f"{cpu}, {len(os.sched_getaffinity(0))} cores",
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "script": agent.script.__name__,
        "task": agent.task,
    }


# --------------------------------------------------------------------------------------------------
# Processes side by side
# --------------------------------------------------------------------------------------------------


def work(args, name, task, backup, folder, barrier, rates):
    """One process: fill, wait for the others, train for a while, report the rate."""
    end_with(multiprocessing.parent_process().pid)
    agent = make_agent(args, name, task, Path(folder) / "warm-up")
    agent.learner.args.backup = agent.args.backup = backup
    agent.train(10)
    barrier.wait()
    start, steps = time.perf_counter(), 0
    while time.perf_counter() - start < args.parallel_seconds:
        agent.train(10)
        steps += 10
    rates.put((steps / (time.perf_counter() - start), describe(agent)))


def measure_parallel(args, name, task, backup, folder):
    """A row of PARALLEL_COLUMNS for each number of processes."""
    context = multiprocessing.get_context("spawn")
    rows = []
    for number in args.parallel:
        barrier, queue = context.Barrier(number), context.SimpleQueue()
        workers = []
        for i in range(number):
            place = str(folder / f"{number}-{i}")
            arguments = (args, name, task, backup, place, barrier, queue)
            workers.append(context.Process(target=work, args=arguments, daemon=True))
            workers[-1].start()
        while any(worker.is_alive() for worker in workers):
            time.sleep(0.1)
            if any(worker.exitcode not in (None, 0) for worker in workers):
                fail(f"one of {number} processes of {name} broke down: see above")
        results = [queue.get() for _ in workers]
        rates = [rate for rate, _ in results]
        rows.append(
            results[0][1]
            | {
                "backup": backup,
                "processes": number,
                "seconds": args.parallel_seconds,
                "slowest": min(rates),
                "fastest": max(rates),
                "steps_per_second": sum(rates),
            }
        )
    return rows


# --------------------------------------------------------------------------------------------------
# Tables
# --------------------------------------------------------------------------------------------------


def table(rows):
    """Markdown of rows of COLUMNS, as the file holds them."""
    lines = []
    for first in (row for row in rows if row["backup"] == ENVIRONMENT):
        key = ("hardware", "device", "threads", "torch", "script", "task")
        group = [row for row in rows if all(row[name] == first[name] for name in key)]
        where = f"{first['hardware']}; {first['threads']} thread(s), torch {first['torch']}"
        if first["device"] != "cpu":
            where = f"{first['device']}; {where}"
        updates = float(group[1]["updates_per_step"])
        lines += [
            f"`{first['script']}.py`, {first['task']}, {updates:g} update(s) per step. {where}.",
            "",
            "| backup | steps/s (range) | of one-step | of environment | of env. + gradient | "
            + " | ".join(PHASES)
            + " | states evaluated |",
            "|---" * (len(PHASES) + 6) + "|",
        ]
        for row in group:
            low, high = _short(row["lowest"]), _short(row["highest"])
            cells = [row["backup"], f"**{_short(row['steps_per_second'])}** ({low} to {high})"]
            cells += [_ratio(row[f"of_{name}"]) for name in ("one_step", "environment", "gradient")]
            times = [row[f"microseconds_{phase.replace(' ', '_')}"] for phase in PHASES]
            whole = sum(float(t) for t in times if t)
            cells += [f"{100 * float(t) / whole:.0f}%" if t else "" for t in times]
            evaluated = row["evaluated_per_update"]
            cells.append(_short(evaluated) if evaluated else "")
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def summary(rows):
    """Markdown of the same rows, a line for each task: steps/s, and the share of one-step's."""
    names = [name for name in (GRADIENT, *BACKUPS) if any(row["backup"] == name for row in rows)]
    lines = [
        "| script | task | " + " | ".join(names) + " |",
        "|---" * (len(names) + 2) + "|",
    ]
    for script, task in dict.fromkeys((row["script"], row["task"]) for row in rows):
        cells = [f"`{script}.py`", task]
        for name in names:
            for row in rows:
                if (row["script"], row["task"], row["backup"]) == (script, task, name):
                    ratio = _ratio(row["of_one_step"])
                    cells.append(f"{_short(row['steps_per_second'])} ({ratio})")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def parallel_table(rows):
    """Markdown of rows of PARALLEL_COLUMNS."""
    lines = [
        "| script | task | backup | device | processes | steps/s of each | steps/s in all | "
        "hours for the paper's Atari grid |",
        "|---" * 8 + "|",
    ]
    for row in rows:
        total = float(row["steps_per_second"])
        hours = f"{PAPER_STEPS / total / 3600:.0f}" if row["script"] == ATARI else ""
        each = f"{_short(row['slowest'])} to {_short(row['fastest'])}"
        cells = (row["script"], row["task"], row["backup"], row["device"], str(row["processes"]))
        lines.append(f"| {' | '.join((*cells, each, _short(total), hours))} |")
    return "\n".join(lines)


def _short(value):
    value = float(value)
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _ratio(value):
    if not value:
        return ""
    return f"{float(value):.2f}" if float(value) >= 0.1 else f"{float(value):.2g}"


def check_args(args):
    for name in ("scripts", "backups"):
        if not getattr(args, name):
            fail(f"Require at least one of --{name}")
    if args.repetitions < 1 or args.parallel_seconds <= 0 or min(args.parallel, default=1) < 1:
        fail("Require --repetitions, --parallel-seconds and --parallel > 0")
    if args.cuda and not torch.cuda.is_available():
        fail("--cuda was given, but torch finds no CUDA device")
    if args.steps < 0 or args.warm_up_steps < 0:
        fail("Require --steps and --warm-up-steps >= 0")
    for name in args.scripts:
        most, starts = warm_up_steps(args, name), args.learning_starts
        if starts < 0:
            starts = importlib.import_module(name).Args().learning_starts
        if most <= starts + 32:
            fail(f"Require --warm-up-steps > learning starts + 32 = {starts + 32}, got {most}")


def main():
    args = tyro.cli(Args)
    check_args(args)
    tasks = {
        "gb_dqn_minigrid": args.minigrid,
        "gb_dqn_minatar": args.minatar,
        "gb_rainbow_atari": args.atari,
    }
    columns = PARALLEL_COLUMNS if args.parallel else COLUMNS
    name = "speed_parallel.csv" if args.parallel else "speed.csv"
    out = args.out or ROOT / "benchmark" / "results" / name
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for i, (script, task) in enumerate((s, t) for s in args.scripts for t in tasks[s]):
            place = Path(folder) / str(i)
            if args.parallel:
                for backup in args.backups:
                    rows += measure_parallel(args, script, task, backup, place / backup)
            else:
                rows += measure(args, script, task, place)
            out.parent.mkdir(parents=True, exist_ok=True)
            write_rows(out, columns, rows)  # what there is, if it is stopped
    rows = read_rows(out)  # rounded once, in the file, and not twice
    if args.parallel:
        print(parallel_table(rows))
    else:
        print(table(rows), summary(rows), sep="\n")
    print(f"\nwritten to {out}")


if __name__ == "__main__":
    main()
