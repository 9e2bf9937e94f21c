"""Does the GPU compute what the CPU computes, and how quickly? A table to paste into a bug report.

    python tools/check_gpu.py

On a replay of random pictures: each backup's update on the GPU, padded, against the CPU's, pruned,
both without noise in the heads; CUDA graphs against the same operations one by one; the same seed
twice; memory; steps per second of an action and two updates each, without the game and its storing.
Two minutes. Exit status 1 if anything differs.
"""

import functools
import platform
import sys
import time
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from gbtools.output import arguments, fail, lasting_output

import gb_rainbow_atari as script
from gbcore import PrioritizedReplay, TransitionGraph
from gbcore.run import Count, seed_everything, updates
from gbcore.run.updates import OnGPU

TOLERANCE = 2e-3  # of errors and losses: TF32 is off, sums are taken in another order


@dataclass
class Args:
    device: Literal["cuda", "cpu"] = "cuda"
    """cpu: try this program itself, padded updates included"""
    states: Count = 2_000  # pictures in the graph
    steps: Count = 150  # steps that are timed, for each backup
    compile: bool = False  # time graph's updates under torch.compile, too


def make_learner(args, device, padded=True, **flags):
    """A learner, and a replay in which states come again; alike on every device.

    padded: as on a GPU, also on a CPU.
    """
    torch.manual_seed(1)
    rng = np.random.default_rng(1)
    flags = script.Args(cuda=False, **flags)
    graph = TransitionGraph(6, (4, 84, 84), frame_stack=True)
    replay = PrioritizedReplay(graph, 2 * args.states, flags.priority_exponent)
    learner = script.Learner(flags, graph, replay, torch.device(device))
    pictures = rng.integers(256, size=(args.states, 84, 84), dtype=np.uint8)
    state = 0
    for _ in range(2 * args.states):  # on to the next state, or to any
        following = state + 1 if rng.random() < 0.5 else int(rng.integers(args.states))
        node, next_node = (
            graph.node(pictures[np.arange(s, s + 4) % args.states]) for s in (state, following)
        )
        reward, terminated = float(rng.integers(-1, 2)), bool(rng.random() < 0.01)
        replay.add(node, int(rng.integers(6)), reward, next_node, terminated)
        state = following % args.states
    if padded:
        learner.updates = OnGPU(graph, learner.device, 0, flags.cuda_graphs)
    return learner


def some_steps(learner, number):
    """Results of updates, [2 * number, B + 2], and actions [number]; always of the same batches."""
    torch.manual_seed(2)
    rng, results, actions = np.random.default_rng(2), [], []
    for _ in range(number):
        batches = [learner.replay.sample(32, rng, 0.5) for _ in range(2)]
        obs = learner.graph.observations_of(batches[0].nodes[:1])
        actions.append(learner.act(obs, noisy=True))
        updates = [learner.update(batch, rng) for batch in batches]
        results.append(torch.stack(updates).cpu().numpy())
    return np.concatenate(results), np.concatenate(actions)


def rate(args, learner):
    """Steps per second, and the seconds of a third of the steps before, which compile."""
    seconds = []
    for number in (max(args.steps // 3, 1), args.steps):
        begin = time.perf_counter()
        some_steps(learner, number)
        seconds.append(time.perf_counter() - begin)
    return args.steps / seconds[1], seconds[0]


def compile_functions(learner, backend):
    """The functions of the network and the backup are compiled, and captured with the rest."""
    whole = functools.partial(torch.compile, backend=backend, dynamic=False)
    updates.back_up, online = whole(updates.back_up), learner.online
    online.features, online.log_pmf = whole(online.features), whole(online.log_pmf)
    learner.updates.captured.plans.clear()


def check(args):
    """Yields rows of the table: what, figure, verdict."""
    for backup in script.BACKUPS:
        flags = {"backup": backup, "noisy_std": 0.0, "cuda_graphs": False}
        on_cpu, _ = some_steps(make_learner(args, "cpu", padded=False, **flags), 2)
        on_gpu, _ = some_steps(make_learner(args, args.device, **flags), 2)
        difference = float(np.abs(on_cpu - on_gpu).max())
        yield f"{backup}: GPU and CPU", f"{difference:.1e}", difference < TOLERANCE
    runs = {}
    for name, graphs in (("captured", True), ("again", True), ("one by one", False)):
        learner = make_learner(args, args.device, cuda_graphs=graphs and args.device == "cuda")
        runs[name] = some_steps(learner, min(20, args.steps))
        if name == "captured":
            calls = learner.updates.captured
            names = [key[0] for key, plan in calls.plans.items() if plan.graph is not None]
            kept = calls.use_graphs and {*names} == {"update", "act"}
            yield "CUDA graphs are captured", len(names), kept or args.device == "cpu"
    (updates, actions), again, (one_by_one, others) = runs.values()
    same = np.array_equal(updates, again[0]) and np.array_equal(actions, again[1])
    yield "the same seed twice, bit for bit", "", same
    difference = float(np.abs(updates - one_by_one).max())
    same = difference < TOLERANCE and np.array_equal(actions, others)
    yield "captured and one by one", f"{difference:.1e}", same
    torch.backends.cudnn.allow_tf32 = True  # torch's default, and so a run's
    rates = {}
    for backup in script.BACKUPS:
        rates[backup], _ = rate(args, make_learner(args, args.device, backup=backup))
        share = rates[backup] / rates["one-step"]
        yield f"{backup}: steps/s", f"{rates[backup]:.0f}, {share:.2f} of one-step", True
        yield f"{backup}: 100,000 steps", f"{1e5 / rates[backup] / 60:.0f} minutes", True
    if args.compile:
        learner = make_learner(args, args.device, backup="graph", bf16=True)
        one_by_one, _ = rate(args, learner)
        compile_functions(learner, "inductor" if args.device == "cuda" else "eager")
        compiled, first = rate(args, learner)
        figure = f"{compiled:.0f}, {compiled / one_by_one:.2f} of before; {first:.0f} s at first"
        yield "graph, bfloat16, compiled: steps/s", figure, True
    if args.device == "cuda":
        yield "memory", f"{torch.cuda.max_memory_allocated() / 2**20:.0f} MiB", True


@lasting_output()
def main():
    args = arguments(Args, __doc__)
    if args.device == "cuda" and not torch.cuda.is_available():
        fail(f"torch {torch.__version__} finds no CUDA device")
    seed_everything(script.Args(cuda=args.device == "cuda", threads=torch.get_num_threads()))
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, Python {platform.python_version()}")
    print("| what | figure | |\n|---|---|---|")
    fine = True
    for what, figure, verdict in check(args):
        fine = fine and verdict
        print(f"| {what} | {figure} | {'as it should be' if verdict else 'DIFFERS'} |", flush=True)
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
