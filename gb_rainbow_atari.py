"""Graph Backup on Atari 100K: Data-Efficient Rainbow with five choices of bootstrap target.

    python gb_rainbow_atari.py --env-id Freeway --backup graph

Graph Backup: Jiang et al. 2022. Agent: Data-Efficient Rainbow (van Hasselt et al. 2019) as in SPR
(Schwarzer et al. 2021): double, duelling, noisy, categorical (C51), prioritised; batch 32, two
updates per step. This file and the folder gbcore are all there is: copy them and change them.
"""

import contextlib
import copy
import ctypes
import difflib
import json
import os
import random
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import ale_py.roms
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from ale_py.vector_env import AtariVectorEnv
from tqdm import tqdm

from gbcore import (
    FrontierEpisodes,
    FrontierPlanner,
    Subgraphs,
    SumTree,
    TransitionGraph,
    categorical_targets,
    prune,
    trajectory_subgraphs,
)
from gbcore.run_directory import (
    RunDirectory,
    StopSignal,
    load_checkpoint,
    lock_folder,
    run_name,
    save_checkpoint,
    versions,
)
from gbcore.targets import back_up_laws, level_bounds, pack, pad, padded_sizes, unpack

# The five backups are two choices: where the subgraph comes from, and how a state's value is read.
BACKUPS = {
    "one-step": ("trajectory", "double"),
    "n-step": ("trajectory", "behaviour"),
    "tree": ("trajectory", "double"),
    "graph": ("graph", "double"),
    "graph-mixed": ("graph", "behaviour"),
}

EXPLORATIONS = ("epsilon-greedy", "frontier")

# Random and human scores of the 26 games of Atari 100K (Mnih et al. 2015; van Hasselt et al. 2016).
REFERENCE_SCORES = {
    "alien": (227.8, 7127.7),
    "amidar": (5.8, 1719.5),
    "assault": (222.4, 742.0),
    "asterix": (210.0, 8503.3),
    "bank_heist": (14.2, 753.1),
    "battle_zone": (2360.0, 37187.5),
    "boxing": (0.1, 12.1),
    "breakout": (1.7, 30.5),
    "chopper_command": (811.0, 7387.8),
    "crazy_climber": (10780.5, 35829.4),
    "demon_attack": (152.1, 1971.0),
    "freeway": (0.0, 29.6),
    "frostbite": (65.2, 4334.7),
    "gopher": (257.6, 2412.5),
    "hero": (1027.0, 30826.4),
    "jamesbond": (29.0, 302.8),
    "kangaroo": (52.0, 3035.0),
    "krull": (1598.0, 2665.5),
    "kung_fu_master": (258.5, 22736.3),
    "ms_pacman": (307.3, 6951.6),
    "pong": (-20.7, 14.6),
    "private_eye": (24.9, 69571.3),
    "qbert": (163.9, 13455.0),
    "road_runner": (11.5, 7845.0),
    "seaquest": (68.4, 42054.7),
    "up_n_down": (533.4, 11693.2),
}


@dataclass
class Args:
    env_id: str = "Freeway"
    """the game, as in Freeway, freeway or ALE/Freeway-v5"""
    seed: int = 1
    """seed of the environment, the networks and all sampling"""
    torch_deterministic: bool = True
    """make torch use deterministic algorithms"""
    cuda: bool = torch.cuda.is_available()
    """run on the GPU; on by default where there is one"""
    cuda_graphs: bool = True
    """on a GPU, replay each update as one CUDA graph; off: the same operations one by one"""
    bf16_targets: bool = False
    """evaluate target values in bfloat16"""
    threads: int = 0
    """CPU threads for torch; 0 = all cores, at most 8"""
    track: bool = False
    """log to Weights and Biases as well (pip install wandb)"""
    wandb_project_name: str = "graph-backup"
    """the W&B project"""
    wandb_entity: str | None = None
    """the W&B entity (team)"""
    capture_video: bool = False
    """write a video of one episode after training (pip install imageio-ffmpeg)"""
    save_model: bool = True
    """write the online network and the transition graph at the end"""
    run_dir: str = "runs"
    """folder in which each run gets a folder of its own"""

    total_timesteps: int = 100_000
    """environment steps (of 4 frames each)"""
    learning_rate: float = 1e-4
    """step size of Adam"""
    adam_eps: float = 1.5e-4
    """epsilon of Adam"""
    max_grad_norm: float = 10.0
    """gradients are clipped to this norm"""
    buffer_size: int = 0
    """transitions kept in the replay and the graph; 0 = total_timesteps"""
    gamma: float = 0.99
    """the discount"""
    target_network_frequency: int = 1
    """updates between two copies of the online network into the target network"""
    batch_size: int = 32
    """transitions per update"""
    learning_starts: int = 2_000
    """steps before the first update"""
    train_frequency: int = 1
    """steps between updates"""
    updates_per_train: int = 2
    """updates each time"""

    start_e: float = 1.0
    """epsilon at the start"""
    end_e: float = 0.0
    """epsilon in the end; the noisy networks explore"""
    exploration_steps: int = 2_001
    """steps over which epsilon goes from start_e to end_e"""
    noisy_std: float = 0.5
    """initial scale of the noisy layers"""

    exploration: Annotated[str, tyro.conf.arg(metavar="{epsilon-greedy,frontier}")] = (
        "epsilon-greedy"
    )
    """how training acts; frontier: in a share of the episodes, the way to what was never tried"""
    frontier_share: float = 0.5
    """share of these episodes at most; it falls as they find no more than the others"""
    frontier_gamma: float = 0.95
    """discount of the way there"""
    frontier_prior: float = 0.0
    """observations of the unknown that a pair tried before is credited with"""
    frontier_budget: int = 2_000
    """edges of the graph that the planner reads per step at most"""

    backup: Annotated[str, tyro.conf.arg(metavar="{one-step,n-step,tree,graph,graph-mixed}")] = (
        "graph"
    )
    """the bootstrap target. tree: along the sample's trajectory (one-step: one step of it); graph:
    over all transitions seen; n-step, graph-mixed: the same two, by what was done, not the best"""
    depth: int = 10
    """nested backups per target; one-step always takes 1"""
    breadth: int = 10
    """transitions followed per level of a graph backup; 0 = all"""

    n_atoms: int = 51
    """atoms of the value distribution"""
    v_min: float = -10.0
    """its smallest return"""
    v_max: float = 10.0
    """its largest return"""
    priority_exponent: float = 0.5
    """how strongly priorities count in sampling"""
    importance_exponent: float = 0.4
    """importance-sampling correction at the start; grows to 1 over the run"""

    eval_episodes: int = 100
    """episodes of each evaluation"""
    eval_frequency: int = 0
    """steps between evaluations; 0 = only after training"""
    eval_envs: int = 16
    """environments that evaluate in parallel"""
    eval_epsilon: float = 0.001
    """share of random actions in evaluation"""
    log_frequency: int = 500
    """steps between rows of metrics.csv"""
    checkpoint_frequency: int = 0
    """steps between checkpoints; there is one after training in any case"""
    resume: str | None = None
    """folder of a run to go on with, under its own flags; of these, --total-timesteps may be raised
    and what leaves the learning alone changed"""


# --------------------------------------------------------------------------------------------------
# Bad input: one line, exit status 2
# --------------------------------------------------------------------------------------------------


def warn(message):
    print(f"warning: {message}", file=sys.stderr)


def fail(message, status=2):
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(status)


def game_of(env_id):
    """ROM name of a game, from any spelling of it that people use."""
    name = env_id.strip().lower().removeprefix("ale/").split("-v")[0].removesuffix("noframeskip")
    key = name.replace("_", "").replace("-", "").replace(" ", "")
    games = {rom.replace("_", ""): rom for rom in ale_py.roms.get_all_rom_ids()}
    if key not in games:
        close = difflib.get_close_matches(key, games, n=3, cutoff=0.4)
        nearest = ", ".join(games[k] for k in close) or ", ".join(sorted(REFERENCE_SCORES))
        fail(f"unknown game {env_id!r}; nearest: {nearest}")
    return games[key]


def check_args(args):
    """Refuse what cannot run, before anything is written."""
    buffer_size = args.buffer_size or args.total_timesteps
    positive = (
        "total_timesteps", "learning_rate", "adam_eps", "max_grad_norm", "batch_size", "depth",
        "target_network_frequency", "train_frequency", "updates_per_train", "exploration_steps",
        "eval_episodes", "eval_envs", "log_frequency", "frontier_budget",
    )  # fmt: skip
    not_negative = (
        "breadth", "seed", "threads", "buffer_size", "learning_starts", "noisy_std",
        "eval_frequency", "checkpoint_frequency", "priority_exponent", "importance_exponent",
        "frontier_prior",
    )  # fmt: skip
    shares = ("gamma", "start_e", "end_e", "eval_epsilon", "frontier_share", "frontier_gamma")
    if args.backup not in BACKUPS:
        nearest = difflib.get_close_matches(args.backup, BACKUPS, n=1, cutoff=0.0)[0]
        choices = ", ".join(BACKUPS)
        fail(f"unknown --backup {args.backup!r}; nearest: {nearest} (one of {choices})")
    if args.exploration not in EXPLORATIONS:
        fail(f"--exploration must be {' or '.join(EXPLORATIONS)}, got {args.exploration!r}")
    for name, value in asdict(args).items():
        if isinstance(value, float) and not np.isfinite(value):
            fail(f"--{name.replace('_', '-')} must be finite, got {value}")
    for name in positive:
        if not getattr(args, name) > 0:
            fail(f"--{name.replace('_', '-')} must be > 0, got {getattr(args, name)}")
    for name in not_negative:
        if not getattr(args, name) >= 0:
            fail(f"--{name.replace('_', '-')} must be >= 0, got {getattr(args, name)}")
    for name in shares:
        if not 0 <= getattr(args, name) <= 1:
            fail(f"--{name.replace('_', '-')} must be in [0, 1], got {getattr(args, name)}")
    if not 0 < args.frontier_gamma < 1:
        fail(f"--frontier-gamma must be in (0, 1), got {args.frontier_gamma}")
    if buffer_size < args.batch_size:
        flag = "--buffer-size" if args.buffer_size else "--total-timesteps"
        fail(f"{flag} {buffer_size} is smaller than --batch-size {args.batch_size}")
    if args.seed >= 2**30:
        fail(f"--seed must be < 2**30, got {args.seed}")
    if args.n_atoms < 2:
        fail(f"--n-atoms must be >= 2, got {args.n_atoms}")
    if not args.v_min < args.v_max:
        fail(f"--v-min must be < --v-max, got {args.v_min} and {args.v_max}")
    if args.learning_starts >= args.total_timesteps:
        warn("--learning-starts is not below --total-timesteps: nothing is learned")
    if BACKUPS[args.backup][0] == "trajectory" and args.breadth != Args.breadth:
        warn(f"--breadth does nothing with --backup {args.backup}")
    if args.backup == "one-step" and args.depth != Args.depth:
        warn("--depth does nothing with --backup one-step")
    if args.exploration != "frontier":
        for name, value in asdict(Args()).items():
            if name.startswith("frontier_") and getattr(args, name) != value:
                warn(f"--{name.replace('_', '-')} does nothing without --exploration frontier")
    if args.cuda and not torch.cuda.is_available():
        fail("--cuda was given, but torch finds no CUDA device; leave it out to run on the CPU")
    for wanted, package in ((args.track, "wandb"), (args.capture_video, "imageio_ffmpeg")):
        if wanted:
            try:
                __import__(package)
            except ImportError:
                fail(f"this needs another package: pip install {package.replace('_', '-')}")


# What does not change what a run is: these may be given with --resume.
RESUME_FLAGS = (
    "total_timesteps", "checkpoint_frequency", "cuda", "threads", "track", "wandb_project_name",
    "wandb_entity", "capture_video", "save_model",
)  # fmt: skip


@contextlib.contextmanager
def readable(path):
    """What is wrong with the files of a run to go on with becomes one line."""
    try:
        yield
    except (OSError, ValueError, TypeError, KeyError, RuntimeError) as error:
        fail(f"cannot resume {path!r}: {error}")


@contextlib.contextmanager
def writable(run):
    """A disk that is full, or gone, ends a run with one line."""
    try:
        yield
    except OSError as error:
        with contextlib.suppress(OSError):
            run.close()
        fail(
            f"cannot write to {str(run.path)!r}: {error.strerror or error}; "
            "its last checkpoint is whole: mend that, and go on with --resume",
            status=1,
        )


def resumed(path):
    """Flags of a run to go on with: its own, and those of RESUME_FLAGS that are given."""
    if not (Path(path) / "config.json").is_file():
        fail(f"cannot resume {path!r}: no config.json there; give the folder that a run printed")
    with readable(path):
        config = json.loads((Path(path) / "config.json").read_text())
        unknown = sorted(config.keys() - asdict(Args()).keys())
        if unknown:
            raise ValueError(f"{unknown[0]} is no flag of {Path(__file__).name}")
        for name, default in asdict(Args()).items():
            value = config.get(name, default)
            if default is not None and type(value) is not type(default):
                raise ValueError(f"Require {name} like {default!r}, got {value!r}")
        saved = Args(**config)
    saved.resume = path
    args = tyro.cli(Args, default=saved)
    for name, value in asdict(saved).items():
        given = getattr(args, name)
        if given != value and name not in RESUME_FLAGS:
            flag = f"--{name.replace('_', '-')}"
            fail(f"{flag} cannot be changed with --resume: the run has {value!r}, got {given!r}")
    if args.total_timesteps < saved.total_timesteps:
        fail(
            "--total-timesteps can only be raised with --resume: "
            f"the run has {saved.total_timesteps}, got {args.total_timesteps}"
        )
    result = Path(path) / "result.json"
    if result.exists():
        with readable(path):
            result = json.loads(result.read_text())
            steps, score, interrupted = (result[k] for k in ("steps", "score", "interrupted"))
            if result["script"] != Path(__file__).stem:
                raise ValueError(f"it is a run of {result['script']}.py")
        asked = ["model.pt"] * args.save_model + ["episode.mp4"] * args.capture_video
        is_whole = all((Path(path) / name).exists() for name in asked)
        if not interrupted and steps >= args.total_timesteps and is_whole:
            print(
                f"{path} is finished: score {score:g} after {steps} steps; "
                "a larger --total-timesteps goes on with it"
            )
            sys.exit()
    return args


# --------------------------------------------------------------------------------------------------
# Environment
# --------------------------------------------------------------------------------------------------


def make_envs(game, num_envs, life_loss_is_done=False, **options):
    """Atari 100K: 4 grey 84x84 frames, frame skip 4, max of 2, no sticky actions, <= 30 no-ops.

    Autoreset is NEXT_STEP: the step after an end ignores its action and returns the first
    observation of the next episode. With life_loss_is_done a lost life is reported as termination
    and the game goes on, so that not every end is followed by a reset: see `is_reset`.
    """
    return AtariVectorEnv(
        game,
        num_envs,
        autoreset_mode="NextStep",
        life_loss_info=life_loss_is_done,
        reward_clipping=False,
        use_fire_reset=False,
        **options,
    )


def num_actions_of(game):
    """Size of the game's minimal action set."""
    envs = make_envs(game, 1)
    envs.close()
    return int(envs.single_action_space.n)


def is_reset(done, frame, next_frame):
    """Did the step after a done one start a new episode? Else its frame counter went on."""
    return done and not frame < next_frame <= frame + 4


class Game:
    """The environment of training: one game after another, each with a seed of its own.

    The emulators of a vector environment cannot be saved. But a seed and the actions since make a
    game what it is, so that it can be played again.
    """

    def __init__(self, name):
        self.envs = make_envs(name, 1, life_loss_is_done=True)
        self.num_actions = int(self.envs.single_action_space.n)

    def reset(self, seed):
        """Begin a game. Returns uint8 [1, 4, 84, 84]."""
        self.seed, self.actions = seed, []
        obs, info = self.envs.reset(seed=seed)
        self.frame, self.done = int(info["episode_frame_number"][0]), False
        return obs

    def step(self, action):
        """Observation, reward, terminated, truncated; or None, where the game is over already."""
        obs, reward, terminated, truncated, info = self.envs.step(np.array([action]))
        frame = int(info["episode_frame_number"][0])
        if is_reset(self.done, self.frame, frame):
            return None
        self.actions.append(action)
        self.frame, self.done = frame, bool(terminated[0] or truncated[0])
        return obs, float(reward[0]), bool(terminated[0]), bool(truncated[0])

    def state(self):
        """What `restore` takes back."""
        return {"seed": self.seed, "actions": self.actions}

    def restore(self, state):
        """Play a game again, up to where `state` was called. Returns the observation there.

        None where the game ends before.
        """
        obs = self.reset(state["seed"])
        for action in state["actions"]:
            result = self.step(action)
            if result is None:
                return None
            obs = result[0]
        return obs

    def close(self):
        self.envs.close()


def draw_seed(rng):
    """Of a game. Consecutive seeds would play the same games for runs of neighbouring seeds."""
    return int(rng.integers(2**31))


def evaluate(policy, game, seed, num_episodes, num_envs, epsilon, stop=None):
    """Returns and lengths of num_episodes full games, played in parallel environments.

    Each environment plays its share of the episodes from first to last, so that short games are
    not over-represented, and rests after that. policy: uint8 [n, 4, 84, 84] -> actions [n]. None if
    stop, a StopSignal, was asked.
    """
    num_envs = min(num_envs, num_episodes)
    rng = np.random.default_rng(seed)
    # Consecutive seeds, the default, would play the same games for runs of neighbouring seeds.
    env_seeds = np.random.SeedSequence(seed).generate_state(num_envs).astype(np.int64) >> 1
    # A vector environment would step those that have finished as well: one for each, with a thread.
    envs = [make_envs(game, 1, num_threads=1) for _ in range(num_envs)]
    num_actions = envs[0].single_action_space.n
    quota = np.full(num_envs, num_episodes // num_envs)
    quota[: num_episodes % num_envs] += 1
    returns, lengths = np.zeros(num_envs), np.zeros(num_envs, np.int64)
    done = np.zeros(num_envs, np.bool_)
    finished = [[] for _ in range(num_envs)]
    obs = [env.reset(seed=int(s))[0] for env, s in zip(envs, env_seeds, strict=True)]
    obs = np.concatenate(obs)
    while quota.any() and not (stop is not None and stop.asked):
        playing = np.flatnonzero(quota)
        actions = np.zeros(num_envs, np.int64)
        actions[playing] = policy(obs[playing])
        explore = rng.random(num_envs) < epsilon
        actions[explore] = rng.integers(num_actions, size=explore.sum())
        for i in playing:
            envs[i].send(actions[i : i + 1])
        for i in playing:
            obs[i : i + 1], reward, terminated, truncated, _ = envs[i].recv()
            if done[i]:  # after an end, this step was a reset
                done[i] = False
                continue
            returns[i] += reward[0]
            lengths[i] += 1
            done[i] = terminated[0] or truncated[0]
            if done[i]:
                finished[i].append((float(returns[i]), int(lengths[i])))
                quota[i] -= 1
                returns[i], lengths[i] = 0.0, 0
    for env in envs:
        env.close()
    if quota.any():
        return None
    episodes = [episode for one_env in finished for episode in one_env]
    return [r for r, _ in episodes], [n for _, n in episodes]


def record_video(policy, game, seed, epsilon, path):
    """Write one episode in colour, as mp4: a second game follows the first, action by action."""
    import imageio_ffmpeg

    rng = np.random.default_rng(seed)
    envs = make_envs(game, 1)
    screen = make_envs(
        game, 1, grayscale=False, stack_num=1, img_height=210, img_width=160, maxpool=False
    )
    obs, _ = envs.reset(seed=seed)
    frame, _ = screen.reset(seed=seed)
    writer = imageio_ffmpeg.write_frames(
        str(path), (160, 210), fps=15, macro_block_size=2, output_params=["-vf", "scale=320:420"]
    )
    writer.send(None)
    done = False
    while not done:
        writer.send(np.ascontiguousarray(frame[0, 0]))
        action = policy(obs)
        if rng.random() < epsilon:
            action = rng.integers(envs.single_action_space.n, size=1)
        obs, _, terminated, truncated, _ = envs.step(action)
        frame = screen.step(action)[0]
        done = terminated[0] or truncated[0]
    writer.close()
    envs.close()
    screen.close()


# --------------------------------------------------------------------------------------------------
# Networks
# --------------------------------------------------------------------------------------------------


class NoisyLinear(nn.Module):
    """A linear layer with factorised Gaussian noise on its weights (Fortunato et al. 2018, Eq. 10).

    The noisy weights are formed once for each draw of the noise: with batches of few states,
    reading weights is what a forward pass costs. For one state forming them costs more: see
    `linear`.
    """

    def __init__(self, num_inputs, num_outputs, std):
        super().__init__()
        bound = num_inputs**-0.5
        self.weight = nn.Parameter(torch.empty(num_outputs, num_inputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(num_outputs).uniform_(-bound, bound))
        self.weight_std = nn.Parameter(torch.full((num_outputs, num_inputs), std * bound))
        self.bias_std = nn.Parameter(torch.full((num_outputs,), std * bound))

    def noise(self):
        """One draw of the two factors, [num_outputs] and [num_inputs]."""
        num_outputs, num_inputs = self.weight.shape
        noise = torch.randn(num_outputs + num_inputs, device=self.weight.device)
        return (noise.sign() * noise.abs().sqrt()).split([num_outputs, num_inputs])

    def sample(self):
        """Weights and biases under one draw of the noise: the two arguments of F.linear."""
        noise_out, noise_in = self.noise()
        weight = torch.addcmul(self.weight, self.weight_std, torch.outer(noise_out, noise_in))
        return weight, torch.addcmul(self.bias, self.bias_std, noise_out)

    def sample_factors(self):
        """The same draw for `linear`, with weights that are not formed."""
        noise_out, noise_in = self.noise()
        bias = torch.addcmul(self.bias, self.bias_std, noise_out)
        return self.weight, bias, self.weight_std, noise_out, noise_in


def linear(x, weight, bias, weight_std=None, noise_out=None, noise_in=None):
    """F.linear; with factors, (W + S * (out in^T)) x as W x + out * (S (in * x))."""
    y = F.linear(x, weight, bias)
    return y if weight_std is None else y + noise_out * F.linear(x * noise_in, weight_std)


class RainbowNetwork(nn.Module):
    """Convolutions, then noisy duelling heads over the atoms of each action's value."""

    def __init__(self, num_actions, n_atoms, std):
        super().__init__()
        self.num_actions, self.n_atoms = num_actions, n_atoms
        self.convolutions = nn.Sequential(
            nn.Conv2d(4, 32, 8, stride=4), nn.ReLU(),
            nn.Conv2d(32, 64, 4, stride=2), nn.ReLU(),
            nn.Conv2d(64, 64, 3, stride=1), nn.ReLU(),
            nn.Flatten(),
        )  # fmt: skip
        self.value_hidden = NoisyLinear(3136, 256, std)
        self.value = NoisyLinear(256, n_atoms, std)
        self.advantage_hidden = NoisyLinear(3136, 256, std)
        self.advantage = NoisyLinear(256, num_actions * n_atoms, std)

    def features(self, obs, dtype=torch.float32):
        """uint8 [B, 4, 84, 84] -> [B, 3136], computed in float32 or bfloat16."""
        x = obs.contiguous(memory_format=torch.channels_last).to(dtype).div_(255)
        with torch.autocast(obs.device.type, dtype, enabled=dtype != torch.float32):
            return self.convolutions(x)

    def layers(self):
        return self.value_hidden, self.value, self.advantage_hidden, self.advantage

    def heads(self, noisy=True):
        """Weights of the four noisy layers: one draw for all states of a batch, or the means."""
        return [layer.sample() if noisy else (layer.weight, layer.bias) for layer in self.layers()]

    def factored_heads(self):
        """What `heads` draws, for one state or few: the same values but for rounding."""
        return [layer.sample_factors() for layer in self.layers()]

    def log_pmf(self, features, heads):
        """[B, 3136] and what `heads` returned -> log probabilities [B, num_actions, n_atoms]."""
        value_hidden, value, advantage_hidden, advantage = heads
        value = linear(F.relu(linear(features, *value_hidden)), *value)
        advantage = linear(F.relu(linear(features, *advantage_hidden)), *advantage)
        advantage = advantage.view(-1, self.num_actions, self.n_atoms)
        logits = value[:, None] + advantage - advantage.mean(dim=1, keepdim=True)
        return logits.float().log_softmax(dim=-1)


# --------------------------------------------------------------------------------------------------
# Replay
# --------------------------------------------------------------------------------------------------


class Batch(NamedTuple):
    rows: np.ndarray  # int64 [B], rows of the replay
    nodes: np.ndarray  # int64 [B], their states
    actions: np.ndarray  # int64 [B]
    weights: np.ndarray  # float32 [B], importance-sampling weights


class Replay:
    """A ring of transitions between nodes of the graph, prioritised; the graph forgets with it."""

    COLUMNS = ("node", "action", "reward", "next_node", "terminated", "cut")

    def __init__(self, graph, capacity, priority_exponent, frontier=None):
        self.graph, self.capacity, self.priority_exponent = graph, capacity, priority_exponent
        self.frontier = frontier  # hears of every change of the graph
        self.node = np.zeros(capacity, np.int64)
        self.action = np.zeros(capacity, np.int64)
        self.reward = np.zeros(capacity, np.float64)
        self.next_node = np.zeros(capacity, np.int64)
        self.terminated = np.zeros(capacity, np.bool_)
        self.cut = np.ones(capacity, np.bool_)  # the newest row always is
        self.priorities = SumTree(capacity)
        self.max_priority = 1.0
        self.size = 0
        self.position = 0

    def add(self, node, action, reward, next_node, terminated, starts_episode):
        """Append a transition, to the graph as well; the oldest one leaves both when it is full."""
        i, last = self.position, self.position - 1
        self.graph.add(node, action, reward, next_node, terminated)
        if self.frontier is not None:
            self.frontier.planner.changed(node, next_node)
        if self.size == self.capacity:
            self.graph.remove(
                self.node[i], self.action[i], self.reward[i], self.next_node[i], self.terminated[i]
            )
            if self.frontier is not None:
                self.frontier.planner.changed(self.node[i], self.next_node[i])
        self.node[i], self.action[i], self.reward[i] = node, action, reward
        self.next_node[i], self.terminated[i] = next_node, terminated
        self.cut[last] = starts_episode
        self.cut[i] = True
        self.priorities.set([i], [self.max_priority])
        self.position = (i + 1) % self.capacity
        self.size = min(self.size + 1, self.capacity)

    def sample(self, batch_size, importance_exponent, rng):
        """Rows in proportion to priority ** priority_exponent (Schaul et al. 2016, Eq. 1 and 2)."""
        rows = self.priorities.sample(batch_size, rng)
        weights = (self.priorities.get(rows) * self.size) ** -importance_exponent
        weights = (weights / weights.max()).astype(np.float32)
        return Batch(rows, self.node[rows], self.action[rows], weights)

    def trajectories(self, rows, depth):
        """Subgraphs of the trajectories that the rows lie on."""
        return trajectory_subgraphs(
            rows, depth, self.node, self.action, self.reward, self.next_node, self.terminated,
            self.cut,
        )  # fmt: skip

    def update_priorities(self, rows, errors):
        """New priorities from the errors of a batch."""
        priorities = np.maximum(errors.astype(np.float64), 1e-6) ** self.priority_exponent
        self.priorities.set(rows, priorities)
        self.max_priority = max(self.max_priority, float(priorities.max()))

    def state(self):
        """Arrays that `restore` takes back."""
        columns = {name: getattr(self, name)[: self.size] for name in self.COLUMNS}
        place = np.array([self.size, self.position, self.max_priority])
        arrays = columns | {"priorities": self.priorities.priorities[: self.size], "place": place}
        return arrays if self.frontier is None else arrays | self.frontier.state()

    def restore(self, arrays):
        """Go on from what `state` returned. There may be more room than there was."""
        self.size, self.position = (int(n) for n in arrays["place"][:2])
        self.max_priority = float(arrays["place"][2])
        if self.size < self.capacity:
            self.position = self.size
        for name in self.COLUMNS:
            getattr(self, name)[: self.size] = arrays[name]
        self.priorities.set(np.arange(self.size), arrays["priorities"])
        if self.frontier is not None:
            self.frontier.restore(arrays)


def make_frontier(args, graph):
    """What explores in a share of the episodes; None if they are all left as they are."""
    if args.exploration != "frontier":
        return None
    planner = FrontierPlanner(graph, args.frontier_gamma, args.frontier_prior)
    return FrontierEpisodes(planner, args.frontier_share, args.frontier_budget)


# --------------------------------------------------------------------------------------------------
# Learning
# --------------------------------------------------------------------------------------------------


class Learner:
    """Online and target network, and the update that all five backups share.

    On a CPU the states to evaluate are pruned to those that the greedy paths read. On a GPU, where
    that would be a wait at every level, all are evaluated, in shapes padded to a few sizes, and an
    update of a size seen before is replayed as one CUDA graph. Only indices travel to it then.
    """

    def __init__(self, args, graph, replay, num_actions, device):
        self.args, self.graph, self.replay, self.device = args, graph, replay, device
        self.support = torch.linspace(args.v_min, args.v_max, args.n_atoms, device=device)
        self.target_dtype = torch.bfloat16 if args.bf16_targets else torch.float32

        network = RainbowNetwork(num_actions, args.n_atoms, args.noisy_std)
        self.online = network.to(device, memory_format=torch.channels_last)
        # Copied after every update, the two differ by their noise alone: one network serves both.
        self.shared = args.target_network_frequency == 1
        self.target = self.online
        if not self.shared:
            self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.optimizer = torch.optim.Adam(
            self.online.parameters(), lr=args.learning_rate, eps=args.adam_eps, fused=True,
            capturable=device.type == "cuda",
        )  # fmt: skip
        self.num_updates = 0
        self.num_evaluated = 0  # states that target computation sent through the convolutions
        self.padded = device.type == "cuda"
        self.frames = None  # the graph's, on the GPU: uint8 [capacity, 84, 84]
        self.plans = {}  # of padded updates, by size

    def state(self):
        """Tensors that `restore` takes back."""
        return {
            "online": self.online.state_dict(),
            "target": self.target.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def restore(self, tensors):
        self.online.load_state_dict(tensors["online"])
        self.target.load_state_dict(tensors["target"])
        self.optimizer.load_state_dict(tensors["optimizer"])
        for group in self.optimizer.param_groups:  # the checkpoint may be of another device
            group["capturable"] = self.device.type == "cuda"

    def node(self, obs):
        """Node of an observation uint8 [4, 84, 84], whose frames are sent to the GPU at once."""
        node = self.graph.node(obs)
        if self.padded:
            self.make_room_for_frames()
            frame_ids = self.graph.frame_ids_of(np.array([node]))[0]
            self.frames[self.to_device(frame_ids)] = self.to_device(obs)
        return node

    def make_room_for_frames(self):
        """Grow the GPU's frames as the graph's grow. What was captured names the old place."""
        wanted = self.graph.num_frame_ids
        if self.frames is None or wanted > len(self.frames):
            capacity = max(self.replay.capacity + 1024, 5 * wanted // 4)
            self.frames = torch.zeros((capacity, 84, 84), dtype=torch.uint8, device=self.device)
            self.frames[:wanted] = torch.tensor(self.graph.frames)
            self.plans.clear()

    def to_device(self, array):
        """A tensor of the array, without waiting for the device."""
        tensor = torch.from_numpy(array)
        if self.device.type == "cuda":  # memory that stays put until it was copied
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)

    def observations(self, nodes):
        """uint8 Tensor [n, 4, 84, 84] of node ids."""
        return torch.from_numpy(self.graph.observations_of(nodes)).to(self.device)

    @torch.no_grad()
    def act(self, obs, noisy=False):
        """Greedy actions int64 [n] for uint8 [n, 4, 84, 84]."""
        obs = torch.from_numpy(obs).to(self.device)
        # Forming weights moves memory, which is scarce on a CPU, in fewer launches, a GPU's cost.
        factored = noisy and self.device.type == "cpu"
        heads = self.online.factored_heads() if factored else self.online.heads(noisy)
        pmf = self.online.log_pmf(self.online.features(obs), heads).exp()
        return (pmf @ self.support).argmax(dim=1).cpu().numpy()

    def subgraphs(self, batch, rng):
        """What the batch's targets are computed over: trajectories or local graphs."""
        args, replay = self.args, self.replay
        source, _ = BACKUPS[args.backup]
        if source == "graph":
            return self.graph.expand(batch.nodes, batch.actions, args.depth, args.breadth, rng)
        return replay.trajectories(batch.rows, 1 if args.backup == "one-step" else args.depth)

    def update(self, batch, subgraphs):
        """One gradient step. Returns float32 [B + 2]: errors of the batch, loss, mean value."""
        result = (self.padded_update if self.padded else self.pruned_update)(batch, subgraphs)
        self.num_updates += 1
        if not self.shared and self.num_updates % self.args.target_network_frequency == 0:
            with torch.no_grad():
                torch._foreach_copy_(list(self.target.parameters()), list(self.online.parameters()))
        return result

    def draw_heads(self):
        """Noisy weights: the online network's, the same to select actions with, the target's."""
        heads = self.online.heads()
        with torch.no_grad():
            fixed, target = (
                [(weight.to(self.target_dtype), bias.to(self.target_dtype)) for weight, bias in h]
                for h in ([(w.detach(), b.detach()) for w, b in heads], self.target.heads())
            )
        return heads, fixed, target

    def pruned_update(self, batch, subgraphs):
        heads, fixed_heads, target_heads = self.draw_heads()
        targets = self.pruned_targets(subgraphs, fixed_heads, target_heads)
        obs, actions = self.observations(batch.nodes), torch.from_numpy(batch.actions)
        weights = torch.from_numpy(batch.weights)
        return self.step(heads, targets, obs, actions.to(self.device), weights.to(self.device))

    @torch.no_grad()
    def pruned_targets(self, subgraphs, online_heads, target_heads):
        """Target distributions [B, n_atoms] from the states on the greedy paths, level by level."""
        features, q = [], []  # of the nodes asked for, in that order

        def best_actions(nodes):
            obs = self.observations(nodes)
            features.append(self.online.features(obs, self.target_dtype))
            q.append(self.online.log_pmf(features[-1], online_heads).exp() @ self.support)
            self.num_evaluated += len(nodes)
            return q[-1].argmax(dim=1).cpu().numpy()

        _, rule = BACKUPS[self.args.backup]
        subgraphs, is_leaf = prune(subgraphs, rule, best_actions)
        if rule == "behaviour" or not features:
            best_actions(subgraphs.nodes)
        leaves = torch.from_numpy(np.flatnonzero(is_leaf)).to(self.device)
        if self.shared:
            features = torch.cat(features)[leaves]
        else:
            obs = self.observations(subgraphs.nodes[is_leaf])
            features = self.target.features(obs, self.target_dtype)
        leaf_pmf = self.support.new_zeros(len(is_leaf), self.online.num_actions, len(self.support))
        leaf_pmf[leaves] = self.target.log_pmf(features, target_heads).exp()
        return categorical_targets(
            subgraphs, leaf_pmf, self.support, self.args.gamma, rule, torch.cat(q)
        )

    def padded_update(self, batch, subgraphs):
        """An update of fixed shape: its second one is captured, all later ones are replayed."""
        subgraphs = pad(subgraphs, padded_sizes(subgraphs))
        nodes = np.concatenate([subgraphs.nodes, batch.nodes])
        self.num_evaluated += len(subgraphs.nodes)
        integers, floats = pack(subgraphs)
        frame_ids = self.graph.frame_ids_of(nodes).reshape(-1)
        integers = self.to_device(np.concatenate([integers, batch.actions, frame_ids]))
        floats = self.to_device(np.concatenate([floats, batch.weights]).astype(np.float32))
        key = (len(subgraphs.nodes), len(integers), len(floats))
        plan = self.plans.get(key)
        if plan is None:
            self.plans[key] = Plan(subgraphs, integers, floats)
            return self.fixed_update(self.plans[key])
        plan.integers.copy_(integers)
        plan.floats.copy_(floats)
        if self.device.type != "cuda" or not self.args.cuda_graphs:
            return self.fixed_update(plan)
        if plan.graph is None:
            graph = torch.cuda.CUDAGraph()
            pool = next((other.graph.pool() for other in self.plans.values() if other.graph), None)
            with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.current_stream()):
                result = self.fixed_update(plan)
            plan = self.plans[key] = plan._replace(graph=graph, result=result)
        plan.graph.replay()
        return plan.result.clone()

    def fixed_update(self, plan):
        """Nothing in here waits for the device or depends on what the plan's tensors hold."""
        subgraphs, batch_size = plan.subgraphs, self.args.batch_size
        num_nodes, num_outcomes = len(subgraphs.nodes), len(subgraphs.outcome_pair)
        num_frames = 4 * (num_nodes + batch_size)
        lengths = (len(plan.integers) - batch_size - num_frames, batch_size, num_frames)
        integers, actions, frame_ids = plan.integers.split(lengths)
        floats, weights = plan.floats.split([2 * num_outcomes, batch_size])
        obs = self.frames[frame_ids].view(-1, 4, 84, 84)
        heads, fixed_heads, target_heads = self.draw_heads()
        with torch.no_grad():
            leaf_obs = obs[:num_nodes]
            features = self.online.features(leaf_obs, self.target_dtype)  # [M, 3136]
            selector_q = self.online.log_pmf(features, fixed_heads).exp() @ self.support
            if not self.shared:
                features = self.target.features(leaf_obs, self.target_dtype)
            leaf_pmf = self.target.log_pmf(features, target_heads).exp()  # [M, A, n_atoms]
            _, rule = BACKUPS[self.args.backup]
            targets = back_up_laws(
                unpack(subgraphs, integers, floats), level_bounds(subgraphs), leaf_pmf,
                self.support, self.args.gamma, rule, selector_q,
            )  # fmt: skip
        return self.step(heads, targets, obs[num_nodes:], actions, weights)

    def step(self, heads, targets, obs, actions, weights):
        """Loss, gradient and Adam for targets [B, n_atoms]; result as of `update`."""
        log_pmf = self.online.log_pmf(self.online.features(obs), heads)
        log_pmf = log_pmf[torch.arange(len(actions), device=self.device), actions]  # [B, n_atoms]
        cross_entropy = -(targets * log_pmf).sum(dim=1)  # [B]
        loss = (weights * cross_entropy).mean()
        self.optimizer.zero_grad()
        loss.backward()
        parameters, max_norm = list(self.online.parameters()), self.args.max_grad_norm
        norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters])
        # A captured update cannot ask for the norm; where one can, megabytes are not scaled by 1.
        if self.padded or norm > max_norm:
            nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        self.optimizer.step()
        with torch.no_grad():
            divergence = cross_entropy + torch.special.xlogy(targets, targets).sum(dim=1)
            q_values = (log_pmf.exp() @ self.support).mean()
            return torch.cat([divergence, torch.stack([loss, q_values])])


class Plan(NamedTuple):
    """A padded update: what it reads on the GPU, and the CUDA graph that repeats it."""

    subgraphs: Subgraphs  # of this shape; what it holds is not read
    integers: torch.Tensor  # int64: `pack`ed subgraphs, actions [B], frame ids [4 (M + B)]
    floats: torch.Tensor  # float32: `pack`ed subgraphs, weights [B]
    graph: "torch.cuda.CUDAGraph | None" = None
    result: torch.Tensor | None = None  # of `update`, overwritten by each replay


# --------------------------------------------------------------------------------------------------
# Training
# --------------------------------------------------------------------------------------------------

METRICS = (
    "charts/episodic_return", "charts/episodic_length", "charts/SPS", "charts/epsilon",
    "losses/td_loss", "losses/q_values", "graph/nodes", "graph/edges", "graph/novel_state_ratio",
    "graph/evaluated_per_update",
)  # fmt: skip


@dataclass
class Counters:
    """Where a run stands; what a checkpoint keeps beside networks, replay and graph."""

    step: int = 0
    node: int | None = None  # the state that the environment is in
    episodic_return: float = 0.0  # of the episode under way
    episodic_length: int = 0
    last_return: float | None = None  # of the last episode that ended
    last_length: int | None = None
    loss: float | None = None  # of the last update
    q_values: float | None = None
    training_seconds: float = 0.0
    logged: tuple = (0, 0, 0, 0.0)  # steps, updates, evaluated states, seconds at the last row
    score: float | None = None  # of the last evaluation
    evaluated_step: int = 0  # its step


def train(args, game, run, learner, rng, counters, env=None):
    """The agent-environment loop, from counters.step on. Ctrl-C or SIGTERM ends it between two
    steps or in an evaluation. Leaves a checkpoint. Returns whether it ran to the end.

    env: what `restore` returned, in the state counters.node.
    """
    replay, graph, frontier = learner.replay, learner.graph, learner.replay.frontier
    if env is None:
        env = Game(game)
        counters.node = learner.node(env.reset(draw_seed(rng))[0])
    obs, node = graph.observations_of(np.array([counters.node])), counters.node
    starts_episode = counters.episodic_length == 0
    loss, q_values = counters.loss, counters.q_values
    clock = Stopwatch(counters.training_seconds)
    progress = tqdm(total=args.total_timesteps, initial=counters.step, unit="step", mininterval=0.5)
    with progress, StopSignal() as stop:
        if is_evaluation_due(args, counters):  # the signal came during it
            with clock.paused():
                log_evaluation(args, game, run, learner, counters, stop)
        while counters.step < args.total_timesteps and not stop.asked:
            # Act: the way to what was never tried, in a frontier episode that knows one. Else
            # epsilon-greedy at first, noise in the weights throughout.
            if frontier is not None and starts_episode:
                frontier.begin(node, rng)
            action = None if frontier is None else frontier.act(node, rng)
            share = min(counters.step / args.exploration_steps, 1.0)
            epsilon = args.start_e + share * (args.end_e - args.start_e)
            if action is None and rng.random() < epsilon:
                action = int(rng.integers(env.num_actions))
            elif action is None:
                action = int(learner.act(obs, noisy=True)[0])
            moved = env.step(action)
            if moved is None:  # no transition: the action was ignored
                counters.last_return = counters.episodic_return
                counters.last_length = counters.episodic_length
                run.log_episode(counters.step, counters.last_return, counters.last_length)
                counters.episodic_return, counters.episodic_length = 0.0, 0
                if frontier is not None:
                    frontier.take_back()
                obs = env.reset(draw_seed(rng))
                node, starts_episode = learner.node(obs[0]), True
                counters.node = node  # a checkpoint may be due now
                continue

            obs, reward, terminated, _ = moved
            next_node = learner.node(obs[0])
            clipped = float(np.clip(reward, -1, 1))
            replay.add(node, action, clipped, next_node, terminated, starts_episode)
            counters.episodic_return += reward
            counters.episodic_length += 1
            node, starts_episode = next_node, False
            counters.step += 1
            step = counters.step

            # Learn.
            if step > args.learning_starts and step % args.train_frequency == 0:
                share = step / args.total_timesteps
                exponent = args.importance_exponent + share * (1 - args.importance_exponent)
                # All batches of a step are drawn first: the next one is expanded while a GPU works
                # on this one, and priorities are the one thing that the host waits for.
                batches = [
                    replay.sample(args.batch_size, exponent, rng)
                    for _ in range(args.updates_per_train)
                ]
                results = [
                    learner.update(batch, learner.subgraphs(batch, rng)) for batch in batches
                ]
                for batch, result in zip(batches, torch.stack(results).cpu().numpy(), strict=True):
                    replay.update_priorities(batch.rows, result[:-2])
                    loss, q_values = result[-2:].tolist()

            # Report.
            progress.update()
            counters.node, counters.loss, counters.q_values = node, loss, q_values
            counters.training_seconds = clock.seconds()
            if step % args.log_frequency == 0 or step == args.total_timesteps:
                last_step, last_updates, last_evaluated, last_seconds = counters.logged
                updates = learner.num_updates - last_updates
                evaluated = learner.num_evaluated - last_evaluated
                counters.logged = (
                    step, learner.num_updates, learner.num_evaluated, clock.seconds()
                )  # fmt: skip
                metrics = {
                    "charts/episodic_return": counters.last_return,
                    "charts/episodic_length": counters.last_length,
                    "charts/SPS": (step - last_step) / (clock.seconds() - last_seconds),
                    "charts/epsilon": epsilon,
                    "losses/td_loss": loss,
                    "losses/q_values": q_values,
                    "graph/nodes": graph.num_nodes,
                    "graph/edges": graph.num_edges,
                    "graph/novel_state_ratio": graph.novel_state_ratio,
                    "graph/evaluated_per_update": evaluated / updates if updates else None,
                }
                run.log(step, metrics if frontier is None else metrics | frontier.metrics())
                shown = "-" if counters.last_return is None else f"{counters.last_return:g}"
                progress.set_postfix_str(
                    f"return {shown}, novel {graph.novel_state_ratio:.3f}", refresh=False
                )
            if is_evaluation_due(args, counters):
                with clock.paused():
                    log_evaluation(args, game, run, learner, counters, stop)
            if args.checkpoint_frequency and step % args.checkpoint_frequency == 0:
                with clock.paused():
                    save(run, learner, rng, counters, env)
    save(run, learner, rng, counters, env)
    env.close()
    return counters.step >= args.total_timesteps and not stop.asked


class Stopwatch:
    """Seconds of training: what is done while it is paused does not count."""

    def __init__(self, seconds=0.0):
        self._start = time.perf_counter() - seconds

    def seconds(self):
        return time.perf_counter() - self._start

    @contextlib.contextmanager
    def paused(self):
        begin = time.perf_counter()
        yield
        self._start += time.perf_counter() - begin


def is_evaluation_due(args, counters):
    """Is there an evaluation at this step, and was it not made yet?"""
    step = counters.step
    return (
        args.eval_frequency and step % args.eval_frequency == 0 and step > counters.evaluated_step
    )


def log_evaluation(args, game, run, learner, counters, stop):
    """Evaluate without noise. Where stop was asked it leaves no trace."""
    episodes = evaluate(
        learner.act, game, args.seed + 10_000, args.eval_episodes, args.eval_envs,
        args.eval_epsilon, stop,
    )  # fmt: skip
    if episodes is None:
        return
    returns, lengths = episodes
    run.log_evaluation(counters.step, returns, lengths)
    counters.score = float(np.mean(returns))
    counters.evaluated_step = counters.step


def save(run, learner, rng, counters, env):
    """Write a checkpoint that `restore` goes on from."""
    run.flush()
    tensors = learner.state() | {"torch_rng": torch.get_rng_state()}
    if learner.device.type == "cuda":
        tensors["cuda_rng"] = torch.cuda.get_rng_state()
    state = asdict(counters) | {
        "environment": env.state(),
        "num_updates": learner.num_updates,
        "num_evaluated": learner.num_evaluated,
        "rng": rng.bit_generator.state,
    }
    save_checkpoint(run.path, tensors, learner.replay.state(), learner.graph, state)


def restore(args, game, checkpoint, device):
    """Learner, generator, counters and environment as they were when `save` was called."""
    tensors, arrays, graph, state = checkpoint
    counters = Counters(**{name: state[name] for name in asdict(Counters())})
    env = Game(game)
    obs = env.restore(state["environment"])
    if obs is None or graph.find(obs[0]) != counters.node:
        raise ValueError("the environment's versions play the episode under way otherwise")
    capacity = args.buffer_size or args.total_timesteps
    replay = Replay(graph, capacity, args.priority_exponent, make_frontier(args, graph))
    replay.restore(arrays)
    learner = Learner(args, graph, replay, env.num_actions, device)
    learner.restore(tensors)
    learner.num_updates = state["num_updates"]
    learner.num_evaluated = state["num_evaluated"]
    torch.set_rng_state(tensors["torch_rng"])
    if device.type == "cuda" and "cuda_rng" in tensors:
        torch.cuda.set_rng_state(tensors["cuda_rng"])
    rng = np.random.default_rng()
    rng.bit_generator.state = state["rng"]
    return learner, rng, counters, env


def keep_freed_memory():
    """Have glibc reuse large freed blocks: given back, they are zeroed page by page each time."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        m_trim_threshold, m_mmap_threshold = -1, -3  # of malloc.h
        mallopt(m_mmap_threshold, 2**25)  # the largest that it takes
        mallopt(m_trim_threshold, 2**30)


def warm_up(args, num_actions):
    """Compile every kernel on a toy graph, before the clock starts."""
    start = time.perf_counter()
    print("Compiling kernels (kept on disk after the first run) ...", end=" ", flush=True)
    rng = np.random.default_rng(0)
    graph = TransitionGraph(num_actions, (4, 84, 84), frame_stack=True)
    replay = Replay(graph, 3, 1.0, make_frontier(args, graph))
    nodes = [graph.node(np.full((4, 84, 84), i, np.uint8)) for i in range(2)]
    for i in range(4):
        replay.add(nodes[i % 2], 0, 0.0, nodes[1 - i % 2], False, False)
    batch = replay.sample(2, 1.0, rng)
    for subgraphs in (
        replay.trajectories(batch.rows, 3),
        graph.expand(batch.nodes, batch.actions, 3, 1, rng),
    ):
        for rule in ("double", "behaviour"):
            prune(subgraphs, rule, np.zeros_like)
    if replay.frontier is not None:
        replay.frontier.begin(nodes[0], rng)
        replay.frontier.planner.plan()
        replay.frontier.planner.act(nodes[0], rng)
        replay.frontier.metrics()
    print(f"{time.perf_counter() - start:.1f} s")


def main():
    args = tyro.cli(Args)
    if args.resume is not None:
        args = resumed(args.resume)
    config = asdict(args) | {"resume": None}
    if args.resume and args.cuda and not torch.cuda.is_available():
        warn("torch finds no CUDA device here: the run goes on on the CPU")
        args.cuda = False
    check_args(args)
    game = game_of(args.env_id)
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    keep_freed_memory()
    if args.torch_deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # none is read
    torch.set_num_threads(args.threads or min(len(os.sched_getaffinity(0)), 8))
    device = torch.device("cuda" if args.cuda else "cpu")
    if args.cuda:  # work is captured on the stream that it was warmed up on, not the default one
        torch.cuda.set_stream(torch.cuda.Stream())

    # Asked for before training, during which files may change.
    used_versions = versions("numpy", "numba", "torch", "gymnasium", "ale-py")
    script = Path(__file__).stem
    path = Path(args.run_dir) / run_name(game, script, args.backup, args.seed)
    capacity = args.buffer_size or args.total_timesteps
    num_states = 2 * capacity + 2  # a transition names two, and some are on their way
    begin = time.perf_counter()
    counters, env, num_actions = Counters(), None, num_actions_of(game)
    lock = None
    try:
        if args.resume:
            with readable(args.resume), lock_folder(args.resume) as lock:
                checkpoint = load_checkpoint(args.resume, num_states)
                learner, rng, counters, env = restore(args, game, checkpoint, device)
                del checkpoint  # its arrays have been copied
        else:
            graph = TransitionGraph(num_actions, (4, 84, 84), frame_stack=True, capacity=num_states)
            replay = Replay(graph, capacity, args.priority_exponent, make_frontier(args, graph))
            learner = Learner(args, graph, replay, num_actions, device)
    except MemoryError as error:
        fail(
            f"no memory for {capacity:,} transitions: {error}; "
            "give a smaller --buffer-size or --total-timesteps"
        )
    try:
        run = RunDirectory(
            args.resume or path,
            config,
            METRICS + (FrontierEpisodes.METRICS if args.exploration == "frontier" else ()),
            resume_step=counters.step if args.resume else None,
            evaluated_step=counters.evaluated_step if args.resume else None,
            lock=lock,
            wandb_options=(
                {"project": args.wandb_project_name, "entity": args.wandb_entity}
                if args.track
                else None
            ),
        )
    except OSError as error:
        fail(f"cannot write to {args.resume or args.run_dir!r}: {error.strerror}")
    print(f"{game}, {args.backup} backup, on {device}; results go to {run.path}")

    warm_up(args, num_actions)
    torch.set_flush_denormal(True)  # sparse rewards fill Adam's moments with denormals
    with writable(run):
        finished = train(args, game, run, learner, rng, counters, env)
        # Leave what was learned, then measure it.
        if args.save_model:
            run.write_model(learner.online, learner.graph)
        if finished and counters.evaluated_step < counters.step:
            print(f"Evaluating {args.eval_episodes} episodes ...", flush=True)
            with StopSignal() as stop:
                log_evaluation(args, game, run, learner, counters, stop)
            finished = counters.evaluated_step == counters.step
        score = counters.score if finished else None
        human = None
        if score is not None and game in REFERENCE_SCORES:
            low, high = REFERENCE_SCORES[game]
            human = (score - low) / (high - low)
        result = {
            "script": script,
            "env_id": game,
            "backup": args.backup,
            "exploration": args.exploration,
            "seed": args.seed,
            "score": score,
            "human_normalized_score": human,
            "eval_episodes": args.eval_episodes,
            "steps": counters.step,
            "interrupted": not finished,
            "sps": counters.step / max(counters.training_seconds, 1e-9),
            "training_seconds": counters.training_seconds,
            "wall_seconds": time.perf_counter() - begin,
            "novel_state_ratio": learner.graph.novel_state_ratio,
            "device": torch.cuda.get_device_name() if args.cuda else "cpu",
            "versions": used_versions,
        }
        run.write_json("result.json", result)
        run.close()
    summary = f"score {score:g}" if finished else "interrupted"
    if human is not None:
        summary += f" ({100 * human:.1f}% of human)"
    print(
        f"{game} {args.backup} seed {args.seed}: {summary} after {counters.step} steps, "
        f"{result['sps']:.1f} steps/s, {result['wall_seconds']:.0f} s; "
        f"{run.path if finished else f'go on with --resume {run.path}'}"
    )
    if not finished:
        sys.exit(130)
    if args.capture_video:
        interrupt = contextlib.suppress(KeyboardInterrupt)
        with writable(run), interrupt, run.replacing("episode.mp4") as video:
            record_video(learner.act, game, args.seed + 20_000, args.eval_epsilon, video)


if __name__ == "__main__":
    main()
