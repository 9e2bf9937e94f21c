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


def flags_of(run, args, **given):
    """The script's Args of a run, with what this command was given."""
    given = {"eval_epsilon": args.epsilon, "env_kwargs": args.env_kwargs} | given
    given = {name: value for name, value in given.items() if value is not None}
    for name in given:
        if not hasattr(run.args, name):
            fail(f"--{name.replace('_', '-')} is no flag of {run.script}")
    return replace(run.args, **given)


def play(run, args, policy, **given):
    """Returns and lengths of episodes. given: flags of the script."""
    flags = flags_of(run, args, **given)
    seed = [args.seed, flags.seed, 0]
    return run.module.evaluate(flags, run.task, policy, seed, args.episodes)[:2]


@one_line_errors
def main():
    args = tyro.cli(Args, description=__doc__)
    if args.video is not None:
        if args.video.suffix != ".mp4" or not args.video.parent.is_dir():
            fail(f"--video must be an .mp4 file in a folder that exists, got {str(args.video)!r}")
        require_package("imageio_ffmpeg")
    run = recorded.read(args.run)
    if args.env_kwargs is not None:
        env = run.module.make_env(flags_of(run, args), run.task, np.random.default_rng())
        if env.shape != run.graph.obs_shape:
            fail(f"--env-kwargs gives observations {env.shape}, the run has {run.graph.obs_shape}")
    policy, alone = run.policy(), ""
    returns, lengths = play(run, args, policy)
    by_chance, _ = play(run, args, any_action, eval_epsilon=1.0)
    if isinstance(policy, EpisodeGraph):  # docs/levels.md
        on_network, _ = play(run, args, run.learner.act_on_network)
        alone = f" on a graph of its own episode, {np.mean(on_network):.4g} on the network alone"
    error = f" (standard error {stats.sem(returns):.2g})" if len(returns) > 1 else ""
    print(
        f"{with_file(run.task)} {run.flags['backup']} seed {run.flags['seed']}: "
        f"mean return {np.mean(returns):.4g}{error}{alone}, number of episodes {len(returns)}; "
        f"lowest {min(returns):.4g}, highest {max(returns):.4g}; {np.mean(lengths):.4g} steps per "
        f"episode; random actions {np.mean(by_chance):.4g}"
    )
    if args.video is not None:
        seed = [args.seed, run.args.seed, 1]
        run.module.record_video(flags_of(run, args), run.task, policy, seed, args.video)
        print(f"wrote {args.video}")


if __name__ == "__main__":
    main()
