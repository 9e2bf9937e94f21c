"""Graph Backup on MinAtar: DQN with five choices of bootstrap target.

    python gb_dqn_minatar.py --env-id Freeway --backup graph

Graph Backup: Jiang et al. 2022. Agent: DQN (Mnih et al. 2015), uniform replay, mean square error;
batch 32, one update every 4 steps. Games: Young and Tian 2019, with sticky actions, difficulty
ramping and all 6 actions. This file and the folder gbcore are all there is: copy them and change
them. For another kind of environment: Game and make_envs, QNetwork, game_of, and the versions that
main asks for.
"""

import contextlib
import copy
import difflib
import json
import os
import random
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from minatar import Environment
from tqdm import tqdm

from gbcore import (
    FrontierEpisodes,
    FrontierPlanner,
    LeafTable,
    TransitionGraph,
    pair_q_values,
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

# The five backups are two choices: where the subgraph comes from, and how a state's value is read.
BACKUPS = {
    "one-step": ("trajectory", "greedy"),
    "n-step": ("trajectory", "behaviour"),
    "tree": ("trajectory", "greedy"),
    "graph": ("graph", "greedy"),
    "graph-mixed": ("graph", "behaviour"),
}

GAMES = ("asterix", "breakout", "freeway", "seaquest", "space_invaders")
MAX_STEPS = 5_000  # of an episode

EXPLORATIONS = ("epsilon-greedy", "frontier")


@dataclass
class Args:
    env_id: str = "Freeway"
    """the game, as in Freeway, freeway or MinAtar/Freeway-v0"""
    seed: int = 1
    """seed of the game, the networks and all sampling"""
    episode_seed: Annotated[str, tyro.conf.arg(metavar="{fresh,fixed}")] = "fresh"
    """fixed: re-seed the game, but not its sticky actions, at every reset"""
    torch_deterministic: bool = True
    """make torch use deterministic algorithms"""
    cuda: bool = False
    """run on the GPU; off by default, the networks are small"""
    threads: int = 1
    """CPU threads for torch; 0 = all cores. More than 1 slow small networks down"""
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
    """environment steps"""
    learning_rate: float = 6.5e-5
    """step size of Adam"""
    adam_eps: float = 1.5e-4
    """epsilon of Adam"""
    buffer_size: int = 0
    """transitions kept in the replay and the graph; 0 = total_timesteps"""
    gamma: float = 0.99
    """the discount"""
    target_network_frequency: int = 8_000
    """steps between two copies of the online network into the target network"""
    batch_size: int = 32
    """transitions per update"""
    learning_starts: int = 1_600
    """steps before the first update"""
    train_frequency: int = 4
    """steps between updates"""
    updates_per_train: int = 1
    """updates each time"""

    start_e: float = 1.0
    """epsilon until learning starts"""
    end_e: float = 0.02
    """epsilon from then on"""

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
    depth: int = 5
    """nested backups per target; one-step always takes 1"""
    breadth: int = 20
    """transitions followed per level of a graph backup; 0 = all"""
    persist_targets: bool = False
    """write nested values into the leaf values until the target network is updated"""

    eval_episodes: int = 3
    """episodes of each evaluation"""
    eval_frequency: int = 1_000
    """steps between evaluations; 0 = only after training"""
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
    """Name of a game, from any spelling of it that people use."""
    name = env_id.strip().removeprefix("MinAtar/").removeprefix("minatar/").split("-v")[0]
    key = name.replace("_", "").replace("-", "").replace(" ", "").lower()
    games = {game.replace("_", ""): game for game in GAMES}
    if key not in games:
        close = difflib.get_close_matches(key, games, n=3, cutoff=0.4)
        nearest = ", ".join(games[k] for k in close) or ", ".join(GAMES)
        fail(f"unknown game {env_id!r}; nearest: {nearest}")
    return games[key]


def check_args(args):
    """Refuse what cannot run, before anything is written."""
    buffer_size = args.buffer_size or args.total_timesteps
    positive = (
        "total_timesteps", "learning_rate", "adam_eps", "batch_size", "depth",
        "target_network_frequency", "train_frequency", "updates_per_train", "eval_episodes",
        "log_frequency", "frontier_budget",
    )  # fmt: skip
    not_negative = (
        "breadth", "seed", "threads", "buffer_size", "learning_starts", "eval_frequency",
        "checkpoint_frequency", "frontier_prior",
    )  # fmt: skip
    shares = ("gamma", "start_e", "end_e", "eval_epsilon", "frontier_share", "frontier_gamma")
    if args.backup not in BACKUPS:
        nearest = difflib.get_close_matches(args.backup, BACKUPS, n=1, cutoff=0.0)[0]
        choices = ", ".join(BACKUPS)
        fail(f"unknown --backup {args.backup!r}; nearest: {nearest} (one of {choices})")
    if args.episode_seed not in ("fresh", "fixed"):
        fail(f"--episode-seed must be fresh or fixed, got {args.episode_seed!r}")
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


class Game:
    """A MinAtar game: sticky actions, difficulty ramping, all 6 actions, at most MAX_STEPS steps.

    Observations are bool [10, 10, C]. A time limit is a truncation: the one of 5,000 steps, and the
    one of freeway (2,500 frames), which MinAtar reports as the end of the game.
    """

    def __init__(self, name, rng, episode_seed=None):
        self.env = Environment(name, sticky_action_prob=0.1, difficulty_ramping=True)
        # Of two random states the outer one repeats actions, the inner one is the game's.
        self.env.random = random_state(rng.integers(2**32))
        self.env.env.random = random_state(rng.integers(2**32))
        self.episode_seed = episode_seed
        self.num_actions = self.env.num_actions()
        self.actions = []  # of this episode

    def reset(self):
        if self.episode_seed is not None:
            self.env.env.random = random_state(self.episode_seed)
        self.actions, self._last_action = [], self.env.last_action
        self._random_states = [of.random.get_state(legacy=False) for of in (self.env, self.env.env)]
        self.env.reset()
        return self.env.state()

    def step(self, action):
        """Observation, reward, terminated, truncated."""
        reward, done = self.env.act(action)
        self.actions.append(action)
        timed_out = done and getattr(self.env.env, "terminate_timer", 0) < 0  # freeway's alone
        terminated = done and not timed_out
        truncated = not terminated and (timed_out or len(self.actions) >= MAX_STEPS)
        return self.env.state(), float(reward), terminated, truncated

    def state(self):
        """What `restore` takes back: how this episode began, and its actions."""
        states = copy.deepcopy(self._random_states)
        for state in states:
            state["state"]["key"] = state["state"]["key"].tolist()
        return {
            "random_states": states, "last_action": self._last_action, "actions": self.actions
        }  # fmt: skip

    def restore(self, state):
        """Play an episode again, up to where `state` was called. Returns the observation there."""
        for of, random_state in zip((self.env, self.env.env), state["random_states"], strict=True):
            of.random.set_state(random_state)
        self.env.last_action = state["last_action"]
        obs = self.reset()
        for action in state["actions"]:
            obs = self.step(action)[0]
        return obs

    def render(self):
        """uint8 [320, 320, 3]: black, or the colour of the last channel that is set."""
        state = self.env.state()
        top = (state * np.arange(1, state.shape[2] + 1)).max(axis=2)  # 0 where none is
        return COLOURS[top].repeat(32, axis=0).repeat(32, axis=1)


def random_state(seed):
    """The legacy generator that MinAtar's games draw from."""
    return np.random.RandomState(seed % 2**32)


COLOURS = np.array(
    [
        (0, 0, 0), (230, 159, 0), (86, 180, 233), (0, 158, 115), (240, 228, 66), (0, 114, 178),
        (213, 94, 0), (204, 121, 167), (255, 255, 255), (128, 128, 128), (148, 103, 189),
    ],
    np.uint8,
)  # fmt: skip


def make_envs(args, game, rng, num_envs):
    """Equal environments with random states of their own."""
    episode_seed = args.seed if args.episode_seed == "fixed" else None
    return [Game(game, rng, episode_seed) for _ in range(num_envs)]


def evaluate(policy, envs, rng, epsilon, stop=None):
    """Returns and lengths of one episode in each environment, played in lockstep.

    policy: observations [n, *obs_shape] -> actions [n]. None if stop, a StopSignal, was asked.
    """
    returns, lengths = np.zeros(len(envs)), np.zeros(len(envs), np.int64)
    running = list(range(len(envs)))
    obs = [env.reset() for env in envs]
    while running:
        if stop is not None and stop.asked:
            return None
        actions = policy(np.stack([obs[i] for i in running]))
        explore = rng.random(len(running)) < epsilon
        actions[explore] = rng.integers(envs[0].num_actions, size=explore.sum())
        for i, action in zip(tuple(running), actions.tolist(), strict=True):
            obs[i], reward, terminated, truncated = envs[i].step(action)
            returns[i] += reward
            lengths[i] += 1
            if terminated or truncated:
                running.remove(i)
    return returns.tolist(), lengths.tolist()


def record_video(policy, env, rng, epsilon, path):
    """Write one episode as mp4."""
    import imageio_ffmpeg

    obs, done = env.reset(), False
    frame = env.render()
    writer = imageio_ffmpeg.write_frames(
        str(path), (frame.shape[1], frame.shape[0]), fps=15, macro_block_size=2
    )
    writer.send(None)
    writer.send(np.ascontiguousarray(frame))
    while not done:
        action = int(policy(obs[None])[0])
        if rng.random() < epsilon:
            action = int(rng.integers(env.num_actions))
        obs, _, terminated, truncated = env.step(action)
        done = terminated or truncated
        writer.send(np.ascontiguousarray(env.render()))
    writer.close()


# --------------------------------------------------------------------------------------------------
# Networks
# --------------------------------------------------------------------------------------------------


class QNetwork(nn.Module):
    """Two convolutions, two dense layers."""

    def __init__(self, obs_shape, num_actions):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(obs_shape[2], 16, 3), nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 128), nn.ReLU(),
            nn.Linear(128, num_actions),
        )  # fmt: skip

    def forward(self, obs):
        """bool [B, 10, 10, C] -> [B, num_actions]."""
        return self.layers(obs.permute(0, 3, 1, 2).float())


# --------------------------------------------------------------------------------------------------
# Replay
# --------------------------------------------------------------------------------------------------


class Batch(NamedTuple):
    rows: np.ndarray  # int64 [B], rows of the replay
    nodes: np.ndarray  # int64 [B], their states
    actions: np.ndarray  # int64 [B]


class Replay:
    """A ring of transitions between nodes of the graph; the graph forgets with it."""

    COLUMNS = ("node", "action", "reward", "next_node", "terminated", "cut")

    def __init__(self, graph, capacity, frontier=None):
        self.graph, self.capacity = graph, capacity
        self.frontier = frontier  # hears of every change of the graph
        self.node = np.zeros(capacity, np.int64)
        self.action = np.zeros(capacity, np.int64)
        self.reward = np.zeros(capacity, np.float64)
        self.next_node = np.zeros(capacity, np.int64)
        self.terminated = np.zeros(capacity, np.bool_)
        self.cut = np.ones(capacity, np.bool_)  # the newest row always is
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
        self.position = (i + 1) % self.capacity
        self.size = min(self.size + 1, self.capacity)

    def sample(self, batch_size, rng):
        """Rows, each equally likely."""
        rows = rng.integers(self.size, size=batch_size)
        return Batch(rows, self.node[rows], self.action[rows])

    def trajectories(self, rows, depth):
        """Subgraphs of the trajectories that the rows lie on."""
        return trajectory_subgraphs(
            rows, depth, self.node, self.action, self.reward, self.next_node, self.terminated,
            self.cut,
        )  # fmt: skip

    def state(self):
        """Arrays that `restore` takes back."""
        columns = {name: getattr(self, name)[: self.size] for name in self.COLUMNS}
        arrays = columns | {"place": np.array([self.size, self.position])}
        return arrays if self.frontier is None else arrays | self.frontier.state()

    def restore(self, arrays):
        """Go on from what `state` returned. There may be more room than there was."""
        self.size, self.position = (int(n) for n in arrays["place"])
        if self.size < self.capacity:
            self.position = self.size
        for name in self.COLUMNS:
            getattr(self, name)[: self.size] = arrays[name]
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
    """Online and target network, and the update that all five backups share."""

    def __init__(self, args, graph, replay, num_actions, device):
        self.args, self.graph, self.replay, self.device = args, graph, replay, device
        network = QNetwork(graph.obs_shape, num_actions)
        self.online = network.to(device, memory_format=torch.channels_last)
        self.target = copy.deepcopy(self.online)
        self.optimizer = torch.optim.Adam(
            self.online.parameters(), lr=args.learning_rate, eps=args.adam_eps, fused=True
        )
        self.leaves = LeafTable(graph, self.evaluate)
        self.num_updates = 0

    def state(self):
        """Tensors that `restore` takes back."""
        leaves = self.leaves.state()
        return {
            "online": self.online.state_dict(),
            "target": self.target.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            # Not to be evaluated anew: with persist_targets they are more than the network's.
            "leaf_q": torch.from_numpy(leaves["q"].copy()),  # a slice: torch would save it whole
            "leaf_known": torch.from_numpy(leaves["known"]),
        }

    def restore(self, tensors):
        self.online.load_state_dict(tensors["online"])
        self.target.load_state_dict(tensors["target"])
        self.optimizer.load_state_dict(tensors["optimizer"])
        self.leaves.restore(
            {"q": tensors["leaf_q"].numpy(), "known": tensors["leaf_known"].numpy()}
        )

    @torch.inference_mode()
    def act(self, obs):
        """Greedy actions int64 [n] for observations [n, *obs_shape]."""
        return self.online(torch.from_numpy(obs).to(self.device)).argmax(dim=1).cpu().numpy()

    @torch.inference_mode()
    def evaluate(self, obs):
        """Values [n, num_actions] under the target network of observations [n, *obs_shape]."""
        return self.target(torch.from_numpy(obs).to(self.device)).cpu().numpy()

    def subgraphs(self, batch, rng):
        """What the batch's targets are computed over: trajectories or local graphs."""
        args, replay = self.args, self.replay
        source, _ = BACKUPS[args.backup]
        if source == "graph":
            return self.graph.expand(batch.nodes, batch.actions, args.depth, args.breadth, rng)
        return replay.trajectories(batch.rows, 1 if args.backup == "one-step" else args.depth)

    def targets(self, batch, subgraphs):
        """Target values float32 [B]: nested backups over what is known of the leaves."""
        _, rule = BACKUPS[self.args.backup]
        leaf_q = self.leaves.values(subgraphs.nodes)
        pair_q = pair_q_values(subgraphs, leaf_q, self.args.gamma, rule)  # roots first
        if self.args.persist_targets:
            rows = np.repeat(subgraphs.vertex_row, np.diff(subgraphs.vertex_pairs))
            nodes = np.concatenate([batch.nodes, subgraphs.nodes[rows]])  # of all pairs
            self.leaves.write(nodes, subgraphs.pair_action, pair_q)
        return pair_q[: subgraphs.num_roots]

    def update(self, batch, subgraphs):
        """One gradient step. Returns the loss and the mean value of the batch, as tensors."""
        targets = torch.from_numpy(self.targets(batch, subgraphs)).to(self.device)
        obs = torch.from_numpy(self.graph.observations_of(batch.nodes)).to(self.device)
        actions = torch.from_numpy(batch.actions).to(self.device)
        q = self.online(obs).gather(1, actions[:, None])[:, 0]  # [B]
        loss = F.mse_loss(q, targets)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.num_updates += 1
        return loss.detach(), q.detach().mean()

    def update_target(self):
        """Copy the online network into the target network: what the leaves held is void."""
        with torch.no_grad():
            torch._foreach_copy_(list(self.target.parameters()), list(self.online.parameters()))
        self.leaves.forget_all()


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
    """Where a run stands."""

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
    evaluations: list = field(default_factory=list)  # mean return of each
    evaluated_step: int = 0  # of the last evaluation


def train(args, game, run, learner, rng, counters, env=None):
    """The agent-environment loop, from counters.step on. Ctrl-C or SIGTERM ends it between two
    steps or in an evaluation. Leaves a checkpoint. Returns whether it ran to the end.

    env: what `restore` returned, in the state counters.node.
    """
    replay, graph, frontier = learner.replay, learner.graph, learner.replay.frontier
    if env is None:
        env = make_envs(args, game, rng, 1)[0]
        counters.node = graph.node(env.reset())
    obs, node = graph.observations_of(counters.node), counters.node
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
            # epsilon-greedy, and at random before learning starts.
            if frontier is not None and starts_episode:
                frontier.begin(node, rng)
            action = None if frontier is None else frontier.act(node, rng)
            epsilon = args.start_e if counters.step < args.learning_starts else args.end_e
            if action is None and rng.random() < epsilon:
                action = int(rng.integers(env.num_actions))
            elif action is None:
                action = int(learner.act(obs[None])[0])
            obs, reward, terminated, truncated = env.step(action)
            next_node = graph.node(obs)
            replay.add(node, action, reward, next_node, terminated, starts_episode)
            counters.episodic_return += reward
            counters.episodic_length += 1
            node, starts_episode = next_node, False
            counters.step += 1
            step = counters.step
            if terminated or truncated:
                counters.last_return = counters.episodic_return
                counters.last_length = counters.episodic_length
                run.log_episode(step, counters.last_return, counters.last_length)
                counters.episodic_return, counters.episodic_length = 0.0, 0
                obs = env.reset()
                node, starts_episode = graph.node(obs), True

            # Learn.
            if step > args.learning_starts and step % args.train_frequency == 0:
                for _ in range(args.updates_per_train):
                    batch = replay.sample(args.batch_size, rng)
                    loss, q_values = learner.update(batch, learner.subgraphs(batch, rng))
            if step % args.target_network_frequency == 0:
                learner.update_target()

            # Report.
            progress.update()
            counters.node, counters.loss, counters.q_values = node, loss, q_values
            counters.training_seconds = clock.seconds()
            if step % args.log_frequency == 0 or step == args.total_timesteps:
                last_step, last_updates, last_evaluated, last_seconds = counters.logged
                updates = learner.num_updates - last_updates
                evaluated = learner.leaves.num_evaluated - last_evaluated
                counters.logged = (
                    step, learner.num_updates, learner.leaves.num_evaluated, clock.seconds()
                )  # fmt: skip
                metrics = {
                    "charts/episodic_return": counters.last_return,
                    "charts/episodic_length": counters.last_length,
                    "charts/SPS": (step - last_step) / (clock.seconds() - last_seconds),
                    "charts/epsilon": epsilon,
                    "losses/td_loss": None if loss is None else float(loss),
                    "losses/q_values": None if q_values is None else float(q_values),
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
    """Evaluate in fresh environments; what they draw depends on the run's seed and the step.

    Where stop was asked it leaves no trace.
    """
    rng = np.random.default_rng([args.seed, counters.step])
    envs = make_envs(args, game, rng, args.eval_episodes)
    episodes = evaluate(learner.act, envs, rng, args.eval_epsilon, stop)
    if episodes is None:
        return
    returns, lengths = episodes
    run.log_evaluation(counters.step, returns, lengths)
    counters.evaluations.append(float(np.mean(returns)))
    counters.evaluated_step = counters.step


def score_of(evaluations):
    """Mean over the last 10% of the evaluations."""
    return float(np.mean(evaluations[-max(1, round(len(evaluations) / 10)) :]))


def save(run, learner, rng, counters, env):
    """Write a checkpoint that `restore` goes on from."""
    run.flush()
    tensors = learner.state() | {"torch_rng": torch.get_rng_state()}
    for name in ("loss", "q_values"):  # tensors, so that no step waits for a device
        value = getattr(counters, name)
        setattr(counters, name, None if value is None else float(value))
    state = asdict(counters) | {
        "environment": env.state(),
        "num_updates": learner.num_updates,
        "num_evaluated": learner.leaves.num_evaluated,
        "rng": rng.bit_generator.state,
    }
    save_checkpoint(run.path, tensors, learner.replay.state(), learner.graph, state)


def restore(args, game, checkpoint, device):
    """Learner, generator, counters and environment as they were when `save` was called."""
    tensors, arrays, graph, state = checkpoint
    counters = Counters(**{name: state[name] for name in asdict(Counters())})
    env = make_envs(args, game, np.random.default_rng(0), 1)[0]
    if graph.find(env.restore(state["environment"])) != counters.node:
        raise ValueError("the environment's versions play the episode under way otherwise")
    capacity = args.buffer_size or args.total_timesteps
    replay = Replay(graph, capacity, make_frontier(args, graph))
    replay.restore(arrays)
    learner = Learner(args, graph, replay, env.num_actions, device)
    learner.restore(tensors)
    learner.num_updates = state["num_updates"]
    learner.leaves.num_evaluated = state["num_evaluated"]
    torch.set_rng_state(tensors["torch_rng"])
    rng = np.random.default_rng()
    rng.bit_generator.state = state["rng"]
    return learner, rng, counters, env


def warm_up(args, obs, num_actions):
    """Compile every kernel on a toy graph, before the clock starts."""
    start = time.perf_counter()
    print("Compiling kernels (kept on disk after the first run) ...", end=" ", flush=True)
    rng = np.random.default_rng(0)
    graph = TransitionGraph(num_actions, obs.shape, obs.dtype)
    replay = Replay(graph, 3, make_frontier(args, graph))
    nodes = [graph.node(np.full_like(obs, i)) for i in range(2)]
    for i in range(4):
        replay.add(nodes[i % 2], 0, 0.0, nodes[1 - i % 2], False, False)
    batch = replay.sample(2, rng)
    for subgraphs in (
        replay.trajectories(batch.rows, 3),
        graph.expand(batch.nodes, batch.actions, 3, 1, rng),
    ):
        leaf_q = np.zeros((len(subgraphs.nodes), num_actions), np.float32)
        for rule in ("greedy", "behaviour"):
            pair_q_values(subgraphs, leaf_q, 0.5, rule)
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
    if args.torch_deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # none is read
    torch.set_num_threads(args.threads or len(os.sched_getaffinity(0)))
    device = torch.device("cuda" if args.cuda else "cpu")

    # Asked for before training, during which files may change.
    used_versions = versions("numpy", "numba", "torch", "minatar")
    script = Path(__file__).stem
    path = Path(args.run_dir) / run_name(game, script, args.backup, args.seed)
    capacity = args.buffer_size or args.total_timesteps
    num_states = 2 * capacity + 2  # a transition names two, and some are on their way
    begin = time.perf_counter()
    counters, env = Counters(), None
    toy = make_envs(args, game, np.random.default_rng(0), 1)[0]
    obs, num_actions = toy.reset(), toy.num_actions
    lock = None
    try:
        if args.resume:
            with readable(args.resume), lock_folder(args.resume) as lock:
                checkpoint = load_checkpoint(args.resume, num_states)
                learner, rng, counters, env = restore(args, game, checkpoint, device)
                del checkpoint  # its arrays have been copied
        else:
            graph = TransitionGraph(num_actions, obs.shape, obs.dtype, capacity=num_states)
            replay = Replay(graph, capacity, make_frontier(args, graph))
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

    warm_up(args, obs, num_actions)
    torch.set_flush_denormal(True)  # not before: NumPy's modules would warn as they are imported
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
        score = score_of(counters.evaluations) if finished else None
        result = {
            "script": script,
            "env_id": game,
            "backup": args.backup,
            "exploration": args.exploration,
            "seed": args.seed,
            "score": score,
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
    print(
        f"{game} {args.backup} seed {args.seed}: {summary} after {counters.step} steps, "
        f"{result['sps']:.1f} steps/s, {result['wall_seconds']:.0f} s; "
        f"{run.path if finished else f'go on with --resume {run.path}'}"
    )
    if not finished:
        sys.exit(130)
    if args.capture_video:
        rng = np.random.default_rng([args.seed, counters.step, 1])
        env = make_envs(args, game, rng, 1)[0]
        interrupt = contextlib.suppress(KeyboardInterrupt)
        with writable(run), interrupt, run.replacing("episode.mp4") as video:
            record_video(learner.act, env, rng, args.eval_epsilon, video)


if __name__ == "__main__":
    main()
