"""What a GPU that is lent for ten minutes should tell, in order of worth.

    git worktree add ../before a65aed0
    python benchmark/on_a_gpu.py --before ../before --out gpu
    python benchmark/on_a_gpu.py --out try --tiny --seconds 3000      # try all of it, on a CPU

Does it compute what a CPU computes? Steps per second before and after; the update of graph under
torch.compile; 2, 4 and 8 runs side by side; Freeway as far as the time goes, and on with it in a
second call. Each part has a time limit, and prints to a file of its own in --out.
"""

import functools
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from output import lasting_output  # noqa: E402


@dataclass
class Args:
    out: Path = Path("gpu")  # folder of all files
    before: Path | None = None  # folder with the code of an older commit
    seconds: float = 590.0  # for everything
    tiny: bool = False  # a few steps of each, where there is no GPU
    trial: bool = False  # the part `compiled` itself


def commands(args):
    """Name, seconds at most, and words of each command."""
    tiny, python = args.tiny, sys.executable
    device = ["--device", "cpu", "--states", "40"] if tiny else []
    yield "check", 120, [python, ROOT / "tools/check_gpu.py", *device, "--steps", 3 if tiny else 60]
    flags = "bf16=true threads=1" + " learning_starts=40 batch_size=4" * tiny
    sizes = ["--warm-up-steps", 8 if tiny else 300, "--steps", 8 if tiny else 1_000]
    rates = ["--scripts", "gb_rainbow_atari", "--variants", flags, "--turns", 1, *sizes]
    for turn in range(1 if tiny else 2):
        for name, root in (("before", args.before), ("after", ROOT)):
            if root is not None:
                words = [python, root.resolve() / "tools/speed.py", *rates]
                yield f"speed_{name}_{turn}", 90, [*words, "--backups", "one-step", "graph"]
    yield "compiled", 90, [python, __file__, "--trial", *(["--tiny"] if tiny else [])]
    for number in (2,) if tiny else (2, 4, 8):
        speed = shlex.join(
            map(str, [python, ROOT / "tools/speed.py", *rates, "--backups", "graph"])
        )
        yield f"parallel_{number}", 60, ["bash", "-c", f"{speed} & " * number + "wait"]
    runs = args.out.resolve() / "runs"
    words = ["--env-id", "Freeway", "--bf16", "--run-dir", runs]
    few = ["--total-timesteps", 60, "--learning-starts", 40, "--eval-episodes", 1]
    words = ["--resume", next(runs.iterdir())] if runs.is_dir() else words + few * tiny
    yield "freeway", args.seconds, [python, ROOT / "gb_rainbow_atari.py", *words]


def run(words, seconds, path):
    """Run a command, all that it prints to a file; how it ended. At the limit it may save first."""
    with path.open("w") as file:
        process = subprocess.Popen(
            list(map(str, words)), stdout=file, stderr=file, cwd=path.parent, start_new_session=True
        )
        for limit, number in ((seconds, signal.SIGTERM), (15, signal.SIGKILL), (None, 0)):
            try:
                return f"status {process.wait(limit)}"
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, number)


def trial(tiny):
    """Steps per second of graph's updates with and without torch.compile, and what it takes first.

    The functions of the network and the backup are compiled, and captured with the rest.
    """
    import check_gpu
    import torch

    from gbcore.run import seed_everything, updates

    device = "cpu" if tiny else "cuda"
    seed_everything(check_gpu.script.Args(cuda=not tiny, threads=1))
    number = 2 if tiny else 200
    for backend in (None, "eager" if tiny else "inductor"):
        args = check_gpu.Args(device, states=40 if tiny else 2_000)
        learner = check_gpu.make_learner(args, device, backup="graph", bf16=True)
        if backend:
            compiled = functools.partial(torch.compile, backend=backend, dynamic=False)
            updates.back_up, online = compiled(updates.back_up), learner.online
            online.features, online.log_pmf = compiled(online.features), compiled(online.log_pmf)
        for what in ("first", "then"):
            begin = time.perf_counter()
            check_gpu.some_steps(learner, number)
            seconds = time.perf_counter() - begin
            rate = f"{number / seconds:.1f} steps/s, {seconds:.1f} s"
            print(f"{backend or 'not compiled'}, {what}: {rate}", flush=True)


@lasting_output()
def main():
    args = tyro.cli(Args, description=__doc__)
    if args.trial:
        return trial(args.tiny)
    args.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + args.seconds
    for name, seconds, words in commands(args):
        left = end - time.monotonic() - 20  # to end the last part in
        if left > 0:
            begin, file = time.monotonic(), args.out.resolve() / f"{name}.txt"
            ended = run(words, min(seconds * (4 if args.tiny else 1), left), file)
            print(f"{name}: {ended} after {time.monotonic() - begin:.0f} s, see {file}", flush=True)


if __name__ == "__main__":
    main()
