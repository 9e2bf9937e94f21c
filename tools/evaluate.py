"""Play the trained agent of a run: its score over other episodes than the run's own.

    python tools/evaluate.py runs/RUN
    python tools/evaluate.py runs/RUN --episodes 500 --epsilon 0 --seed 7
    python tools/evaluate.py runs/RUN --video episode.mp4

Environments, action noise and episodes are those of the run's script: MiniGrid plays the layout of
the run's seed, MinAtar with fixed episode seeds the run's game. What else is random (sticky
actions, no-ops, the exploration of epsilon) is drawn from --seed. A run that is not finished, or
was interrupted, plays what its checkpoint has.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import tyro
from gbtools import recorded
from gbtools.output import arguments, fail, lasting_output
from scipy import stats

from gbcore.run import Amount, Count, Share
from gbcore.run.directory import with_file


@dataclass
class Args:
    run: tyro.conf.Positional[Path]  # a run's folder, with model.pt or a checkpoint
    episodes: Count = 100  # episodes to play
    epsilon: Share | None = None  # share of random actions; default: the run's --eval-epsilon
    seed: Amount = 0  # of everything that the script draws in an evaluation
    video: Path | None = None  # write one more episode as mp4


def play(run, episodes, epsilon, seed):
    """Returns, lengths, and a function of a path that films one more; epsilon None: the run's."""
    policy, args = run.policy(), recorded.args_of(run.module, run.config)
    if epsilon is not None:
        args = replace(args, eval_epsilon=epsilon)
    seeds = [[seed, args.seed, number] for number in range(2)]
    played = run.module.evaluate(args, run.task, policy, seeds[0], episodes)
    return *played, lambda path: run.module.record_video(args, run.task, policy, seeds[1], path)


@lasting_output()
def main():
    args = arguments(Args, __doc__)
    if args.video is not None and (args.video.suffix != ".mp4" or not args.video.parent.is_dir()):
        fail(f"--video must be an .mp4 file in a folder that exists, got {str(args.video)!r}")
    run = recorded.read(args.run)
    returns, lengths, film = play(run, args.episodes, args.epsilon, args.seed)
    error = f" (standard error {stats.sem(returns):.2g})" if len(returns) > 1 else ""
    print(
        f"{with_file(run.task)} {run.config['backup']} seed {run.config['seed']}: "
        f"mean return {np.mean(returns):.4g}{error}, number of episodes {len(returns)}; median "
        f"{np.median(returns):.4g}, lowest {np.min(returns):.4g}, highest "
        f"{np.max(returns):.4g}; {np.mean(lengths):.4g} steps per episode"
    )
    if args.video is not None:
        film(args.video)
        print(f"wrote {args.video}")


if __name__ == "__main__":
    main()
