"""Play the trained agent of a run: its score over other episodes than the run's own.

    python tools/evaluate.py runs/RUN
    python tools/evaluate.py runs/RUN --episodes 500 --epsilon 0 --seed 7
    python tools/evaluate.py runs/RUN --video episode.mp4

Environments, levels, action noise and episodes are those of the run's script: MiniGrid plays the
layout of the run's seed or, where levels change, held-out ones; MinAtar with fixed episode seeds
the run's game. What else is random (sticky actions, no-ops, the exploration of epsilon) is drawn
from --seed. A run that goes on plays what its last checkpoint has.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import tyro
from gbtools import recorded
from scipy import stats

from gbcore import EpisodeGraph
from gbcore.run import Count, Fraction, NonNegative, any_action, fail, one_line_errors
from gbcore.run.flags import require_package
from gbcore.run.logger import with_file


@dataclass
class Args:
    run: tyro.conf.Positional[Path]  # a run's folder, with a checkpoint
    episodes: Count = 100  # episodes to play
    epsilon: Fraction | None = None  # share of random actions; default: the run's --eval-epsilon
    seed: NonNegative = 0  # of everything that the script draws in an evaluation
    video: Path | None = None  # write one more episode as mp4
    env_kwargs: str | None = None  # of a run in a Gymnasium environment: others than its own


def play(run, episodes, epsilon, seed, policy=None, **flags):
    """Returns, lengths, and a function of a path that films one more.

    epsilon, policy: None: the run's. flags: others of the script than the run's.
    """
    policy, args = policy or run.policy(), run.args
    if epsilon is not None:
        flags["eval_epsilon"] = epsilon
    for name in flags:
        if not hasattr(args, name):
            fail(f"--{name.replace('_', '-')} is no flag of {run.script}")
    args = replace(args, **flags)
    seeds = [[seed, args.seed, number] for number in range(2)]
    played = run.module.evaluate(args, run.task, policy, seeds[0], episodes)
    return *played, lambda path: run.module.record_video(args, run.task, policy, seeds[1], path)


@one_line_errors
def main():
    args = tyro.cli(Args, description=__doc__)
    if args.video is not None and (args.video.suffix != ".mp4" or not args.video.parent.is_dir()):
        fail(f"--video must be an .mp4 file in a folder that exists, got {str(args.video)!r}")
    if args.video is not None:
        require_package("imageio_ffmpeg")
    run = recorded.read(args.run)
    more = {} if args.env_kwargs is None else {"env_kwargs": args.env_kwargs}
    policy, how = run.policy(), (args.episodes, args.epsilon, args.seed)
    returns, lengths, film = play(run, *how, policy, **more)
    by_chance, *_ = play(run, args.episodes, 1.0, args.seed, any_action, **more)
    alone = ""
    if isinstance(policy, EpisodeGraph):  # docs/levels.md
        on_network, *_ = play(run, *how, run.learner.act_on_network, **more)
        alone = f" on a graph of its own episode, {np.mean(on_network):.4g} on the network alone"
    error = f" (standard error {stats.sem(returns):.2g})" if len(returns) > 1 else ""
    print(
        f"{with_file(run.task)} {run.flags['backup']} seed {run.flags['seed']}: "
        f"mean return {np.mean(returns):.4g}{error}{alone}, number of episodes {len(returns)}; "
        f"median {np.median(returns):.4g}, lowest {np.min(returns):.4g}, highest "
        f"{np.max(returns):.4g}; {np.mean(lengths):.4g} steps per episode; "
        f"random actions {np.mean(by_chance):.4g}"
    )
    if args.video is not None:
        film(args.video)
        print(f"wrote {args.video}")


if __name__ == "__main__":
    main()
