# /// script
# dependencies = ["numba==0.68.1", "numpy==2.2.6", "scipy==1.17.1", "torch==2.13.0", "gymnasium==1.4.0", "ale-py==0.12.1", "minigrid==3.2.0", "minatar==1.0.15", "tyro==1.0.17", "cloudpickle==3.1.3", "tensorboard==2.21.0", "imageio-ffmpeg==0.8.1"]  # noqa: E501
# ///
"""Graph Backup on MinAtar: DQN with six choices of bootstrap target.

    python gb_dqn_minatar.py --env-id Freeway --backup graph

Graph Backup: Jiang et al. 2022. Agent: DQN (Mnih et al. 2015), uniform replay, mean square error;
batch 32, one update every 4 steps. Games: Young and Tian 2019, with sticky actions, difficulty
ramping and all 6 actions. This file and the folder gbcore are all there is: copy them and change
them. All but learning (a run's flags, evaluations, folder, resume) is in gbcore/run.
"""

import copy
import functools
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from minatar import Environment

import gbcore.run as gb
from gbcore import FrontierEpisodes, GraphValues, LeafTable, Replay, TransitionGraph, q_targets

# The paper's backups are two choices: where the subgraph comes from, and how a state's value is
# read. The sixth, whole-graph, keeps values of all states: its subgraph is the graph.
BACKUPS = {
    "one-step": ("trajectory", "greedy"),
    "n-step": ("trajectory", "behaviour"),
    "tree": ("trajectory", "greedy"),
    "graph": ("graph", "greedy"),
    "graph-mixed": ("graph", "behaviour"),
}

GAMES = ("asterix", "breakout", "freeway", "seaquest", "space_invaders")
MAX_STEPS = 5_000  # of an episode


@dataclass
class Args(gb.RunFlags):
    env_id: str = "Freeway"  # the game, as in Freeway, freeway or MinAtar/Freeway-v0
    episode_seed: Literal["fresh", "fixed"] = "fresh"
    """fixed: re-seed the game, but not its sticky actions, at every reset"""
    total_timesteps: gb.Count = 100_000  # environment steps
    learning_rate: gb.PositiveFloat = 6.5e-5  # step size of Adam
    adam_eps: gb.PositiveFloat = 1.5e-4  # epsilon of Adam
    buffer_size: gb.NonNegative = 0
    """transitions kept in the replay and the graph; 0 = total_timesteps"""
    gamma: gb.Fraction = 0.99  # the discount
    target_network_frequency: gb.Count = 8_000
    """steps between two copies of the online network into the target network"""
    batch_size: gb.Count = 32  # transitions per update
    learning_starts: gb.NonNegative = 1_600  # steps before the first update
    train_frequency: gb.Count = 4  # steps between updates
    updates_per_train: gb.Count = 1  # updates at a time, each of its own batch
    start_e: gb.Fraction = 1.0  # epsilon until learning starts
    end_e: gb.Fraction = 0.02  # epsilon once learning starts
    exploration: Literal["epsilon-greedy", "frontier"] = "epsilon-greedy"
    """how training acts; frontier: in a share of the episodes, the way to actions never tried"""
    frontier_share: gb.Fraction = 0.5
    """largest share of frontier episodes; it falls as they find no more than the others"""
    backup: Literal[*BACKUPS, "whole-graph"] = "graph"
    """the bootstrap target. tree: along the sample's trajectory (one-step: one step of it); graph:
    over all transitions seen; n-step, graph-mixed: the same two, by the actions made, not the best;
    whole-graph: as graph, with no limit of depth, and the agent acts on its values"""
    depth: gb.Depth = 5  # nested backups per target, one-step always 1
    breadth: gb.NonNegative = 20  # transitions followed per level of a graph backup; 0 = all
    prior: gb.Prior = 0.0
    """the network's value counts as so many observations of a nested pair; 0: the paper's backup"""
    act_on: Literal["graph", "network"] | None = None
    """acts greedily: by default the network, with whole-graph its values"""
    eval_episodes: gb.Count = 3  # episodes of each evaluation
    eval_frequency: gb.NonNegative = 1_000  # steps between evaluations; 0 = only after training
    eval_epsilon: gb.Fraction = 0.001  # share of random actions in evaluation

    def __post_init__(self):
        super().__post_init__()
        self.default(act_on="graph" if self.backup == "whole-graph" else "network")


# --- Network ---


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
        """bool [B, 10, 10, C] -> values [B, num_actions]."""
        return self.layers(obs.permute(0, 3, 1, 2).float())


def make_network(args, obs_shape, num_actions):
    """The network that these flags ask for."""
    return QNetwork(obs_shape, num_actions)


# --- Learning ---


class Learner(gb.LearnerState):
    """Online and target network, and the update that all six backups share."""

    num_evaluated = property(lambda self: self.leaves.num_evaluated)  # states, for targets

    def __init__(self, args, graph, replay, device):
        self.args, self.graph, self.replay, self.device = args, graph, replay, device
        network = make_network(args, graph.obs_shape, graph.num_actions)
        self.online = network.to(device, memory_format=torch.channels_last)
        self.target = copy.deepcopy(self.online)
        self.optimizer = torch.optim.Adam(
            self.online.parameters(), lr=args.learning_rate, eps=args.adam_eps, fused=True
        )
        self.leaves = LeafTable(graph, lambda obs: self.values(self.target, obs))
        self.graph_values, self.frontier = None, None
        if args.backup == "whole-graph":
            self.graph_values = GraphValues(graph, self.leaves, args.gamma, args.prior)
        if args.exploration == "frontier":
            self.frontier = FrontierEpisodes(graph, args.frontier_share)
        self.num_updates = 0

    @torch.inference_mode()
    def values(self, network, obs):
        """Values float32 [n, num_actions] of observations [n, *obs_shape]."""
        return network(torch.from_numpy(obs).to(self.device)).cpu().numpy()

    def act_on_network(self, obs, keys=None):
        """Greedy actions int64 [n] for observations [n, *obs_shape]."""
        return self.values(self.online, obs).argmax(axis=1)

    def act(self, obs):
        """As training acts: with whole-graph on its values, the network's guesses among them."""
        if self.args.act_on == "graph":
            return self.graph_values.act(obs, otherwise=self.act_on_network)
        return self.act_on_network(obs)

    def policy(self):
        """As evaluations act: with whole-graph on tried actions alone."""
        if self.args.act_on == "graph":
            return self.graph_values.seen_policy(otherwise=self.act_on_network)
        return self.act_on_network

    def targets(self, batch, rng):
        """Target values float32 [B]: nested backups over the leaf values."""
        args = self.args
        if self.graph_values is not None:
            self.graph_values.update()
            return self.graph_values.targets(batch.nodes, batch.actions)
        source, rule = BACKUPS[args.backup]
        depth = 1 if args.backup == "one-step" else args.depth
        subgraphs = self.replay.subgraphs(batch, source, depth, args.breadth, rng)
        leaf_q = self.leaves.values(subgraphs.nodes)  # [M, num_actions]
        return q_targets(subgraphs, leaf_q, args.gamma, rule, prior=args.prior)

    def update(self, batch, rng):
        """One gradient step. Returns the loss and the mean value of the batch, as tensors."""
        targets = torch.from_numpy(self.targets(batch, rng)).to(self.device)
        obs = torch.from_numpy(self.replay.observations(batch)).to(self.device)
        actions = torch.from_numpy(batch.actions).to(self.device)
        q = self.online(obs).gather(1, actions[:, None])[:, 0]  # [B]
        loss = F.mse_loss(q, targets)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.num_updates += 1
        return loss.detach(), q.detach().mean()

    def update_target(self):
        """Copy the online network into the target network: leaf values are void."""
        self.target.load_state_dict(self.online.state_dict())
        if self.graph_values is None:
            self.leaves.forget_all()
        else:
            self.graph_values.renew()


# --- Environment ---


class Game(gb.Replayed):
    """A MinAtar game: sticky actions, difficulty ramping, all 6 actions, at most MAX_STEPS steps.

    Observations are bool [10, 10, C]. A time limit is a truncation: the one of 5,000 steps, and the
    one of freeway (2,500 frames), which MinAtar reports as the end of the game. Each episode draws
    a seed from rng; with episode_seed that is the game's, and the sticky actions' alone is drawn.
    """

    def __init__(self, name, rng, episode_seed=None):
        self.env = Environment(name, sticky_action_prob=0.1, difficulty_ramping=True)
        self.rng, self.episode_seed = rng, episode_seed
        self.num_actions = self.env.num_actions()

    def reset(self):
        return self._begin(int(self.rng.integers(2**31)))

    def _begin(self, seed):
        self.seed, self.actions = seed, []
        # Of two legacy generators the outer one repeats actions, the inner one is the game's.
        game = [seed, 1] if self.episode_seed is None else self.episode_seed
        self.env.random = np.random.RandomState([seed, 0])
        self.env.env.random = np.random.RandomState(game)
        self.env.last_action = 0
        self.env.reset()
        self.obs = self.env.state()
        return self.obs

    def step(self, action):
        """Observation, reward, terminated, truncated."""
        reward, done = self.env.act(action)
        self.actions.append(action)
        timed_out = done and getattr(self.env.env, "terminate_timer", 0) < 0  # freeway's alone
        terminated = done and not timed_out
        truncated = not terminated and (timed_out or len(self.actions) >= MAX_STEPS)
        self.obs = self.env.state()
        return self.obs, float(reward), terminated, truncated

    def render(self):
        """uint8 [320, 320, 3]: black, or the colour of the last channel that is set."""
        top = (self.obs * np.arange(1, self.obs.shape[2] + 1)).max(axis=2)  # 0 where none is
        return COLOURS[top].repeat(32, axis=0).repeat(32, axis=1)


COLOURS = np.array(
    [
        (0, 0, 0), (230, 159, 0), (86, 180, 233), (0, 158, 115), (240, 228, 66), (0, 114, 178),
        (213, 94, 0), (204, 121, 167), (255, 255, 255), (128, 128, 128), (148, 103, 189),
    ],
    np.uint8,
)  # fmt: skip


def task_of(env_id):
    """Name of a game, from any spelling of it that people use."""
    name = env_id.strip().lower().removeprefix("minatar/").split("-v")[0]
    return gb.task_meant(name, {gb.plain(game): game for game in GAMES}, "game")


def make_env(args, env_id, rng, render=False):
    """A game whose seeds are drawn from rng; it can always be rendered."""
    return Game(env_id, rng, args.seed if args.episode_seed == "fixed" else None)


# (args, env_id, policy, seed, num_episodes, stop=None) -> returns, lengths of episodes
evaluate = functools.partial(gb.evaluate, make_env)
record_video = functools.partial(gb.record_video, make_env, fps=15)


# --- Training ---


def train(args, env_id, env, learner, rng, logger, checkpoint, stop):
    """The agent-environment loop, from where the run stands."""
    graph, replay, frontier = learner.graph, learner.replay, learner.frontier
    obs, node = env.obs, graph.node(env.obs)
    while True:
        if logger.evaluation_is_due():
            gb.evaluate_and_log(evaluate, args, env_id, logger, learner, stop)
        if stop.asked or logger.step == args.total_timesteps:
            break
        step = logger.begin_step()

        # Act: in a frontier episode on the way to actions never tried, else epsilon-greedy.
        epsilon = args.start_e if step <= args.learning_starts else args.end_e
        action = None if frontier is None else frontier.act(node, rng)
        if action is None and rng.random() < epsilon:
            action = int(rng.integers(env.num_actions))
        elif action is None:
            action = int(learner.act(obs[None])[0])
        obs, reward, terminated, truncated = env.step(action)
        next_node = graph.node(obs)
        replay.add(node, action, reward, next_node, terminated)
        node = next_node
        if terminated or truncated:
            replay.end_episode()
            if frontier is not None:
                frontier.end_episode()
            obs = env.reset()
            node = graph.node(obs)

        # Learn.
        logger.charts["charts/epsilon"] = epsilon
        if step > args.learning_starts and step % args.train_frequency == 0:
            for _ in range(args.updates_per_train):
                loss, q_values = learner.update(replay.sample(args.batch_size, rng), rng)
            logger.charts |= {"losses/td_loss": loss, "losses/q_values": q_values}
        if step % args.target_network_frequency == 0:
            learner.update_target()

        # Log and save.
        logger.end_step(reward, terminated or truncated)
        if logger.is_due(args.log_frequency):
            logger.log(learner, **(frontier.metrics() if frontier else {}))
        if logger.is_due(args.checkpoint_frequency):
            checkpoint.save()
    if logger.step < args.total_timesteps:
        checkpoint.save()


@gb.one_line_errors
def main():
    args = gb.parse_flags(Args, __file__)
    env_id = task_of(args.env_id)
    rng, device = gb.seed_everything(args)
    env = make_env(args, env_id, rng)
    obs = env.reset()
    capacity = args.buffer_size or args.total_timesteps
    graph = TransitionGraph(env.num_actions, obs.shape, obs.dtype, capacity=2 * capacity + 2)
    replay = Replay(graph, capacity)
    learner = Learner(args, graph, replay, device)
    logger = gb.Logger(args, __file__, env_id, packages=("minatar",))
    parts = {"logger": logger, "graph": graph, "replay": replay, "learner": learner, "env": env}
    checkpoint = gb.Checkpoint(args, __file__, rng, logger.path, **parts)
    if args.resume:
        checkpoint.load()
    with logger, gb.StopSignal() as stop:
        train(args, env_id, env, learner, rng, logger, checkpoint, stop)
        random_actions = gb.score_at_random(evaluate, args, env_id, logger.step, stop)
        if stop.asked:
            logger.finish(learner)  # the program ends
        logger.finish(
            learner,
            score=gb.last_tenth(logger.evaluations),
            random_actions=random_actions,
        )
    if args.capture_video:
        seed = [args.seed, args.total_timesteps, 1]
        record_video(args, env_id, learner.policy(), seed, logger.path / "episode.mp4")


if __name__ == "__main__":
    main()
