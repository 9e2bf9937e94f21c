# /// script
# dependencies = ["numba==0.68.1", "numpy==2.2.6", "scipy==1.17.1", "torch==2.13.0", "gymnasium==1.4.0", "ale-py==0.12.1", "minigrid==3.2.0", "minatar==1.0.15", "tyro==1.0.17", "cloudpickle==3.1.3", "tensorboard==2.21.0", "imageio-ffmpeg==0.8.1"]  # noqa: E501
# ///
"""Graph Backup on MiniGrid: DQN with six choices of bootstrap target.

    python gb_dqn_minigrid.py --env-id DoorKey-6x6 --backup graph

Graph Backup: Jiang et al. 2022. Agent: DQN (Mnih et al. 2015), uniform replay, mean square error;
batch 32, one update per step. The whole grid is observed, and its layout is the same in every
episode, unless --num-levels 0 draws a new one each. This file and the folder gbcore are all there
is: copy them and change them. All but learning (a run's flags, evaluations, folder, resume) is in
gbcore/run.
"""

import copy
import functools
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from minigrid.core.constants import COLOR_TO_IDX, OBJECT_TO_IDX

import gbcore.run as gb
from gbcore import (
    EpisodeGraph,
    FirstTries,
    FrontierEpisodes,
    GraphValues,
    LeafTable,
    Replay,
    TransitionGraph,
    q_targets,
)
from gbcore.first_tries import kinds_of_grids
from gbcore.run.minigrid import Task, task_of

# The paper's backups are two choices: where the subgraph comes from, and how a state's value is
# read. The sixth, whole-graph, keeps values of all states: its subgraph is the graph.
BACKUPS = {
    "one-step": ("trajectory", "greedy"),
    "n-step": ("trajectory", "behaviour"),
    "tree": ("trajectory", "greedy"),
    "graph": ("graph", "greedy"),
    "graph-mixed": ("graph", "behaviour"),
}


@dataclass
class Args(gb.RunFlags):
    env_id: str = "DoorKey-6x6"  # the task, as in DoorKey-6x6 or MiniGrid-DoorKey-6x6-v0
    num_levels: gb.NonNegative = 1
    """levels that training plays: 1, one in every episode; N, one of N; 0, a new one each. But for
    1, evaluations play levels that training never meets"""
    view: Literal["grid", "partial"] = "grid"
    """seen by the network: the whole grid, or the last four 7x7 views of the agent"""
    total_timesteps: gb.Count = 100_000  # environment steps
    learning_rate: gb.PositiveFloat = 1e-3  # step size of Adam
    adam_eps: gb.PositiveFloat = 1.5e-4  # epsilon of Adam
    buffer_size: gb.NonNegative = 0  # transitions kept in replay and graph; 0 = total_timesteps
    gamma: gb.Fraction = 0.95  # the discount
    target_network_frequency: gb.Count | None = None
    """steps between copies of the network: 8,000, whole-graph 2,000, levels that change 1,000"""
    batch_size: gb.Count | None = None  # transitions per update: 32, where levels change 128
    learning_starts: gb.NonNegative | None = None  # random steps first: 5,000, whole-graph 0
    train_frequency: gb.Count | None = None  # steps an update: 1, whole-graph 4, levels change 2
    updates_per_train: gb.Count = 1  # updates at a time, each of its own batch
    start_e: gb.Fraction = 1.0  # epsilon until learning starts
    end_e: gb.Fraction = 0.02  # epsilon once learning starts
    exploration: Literal["epsilon-greedy", "frontier"] = "epsilon-greedy"
    """how training acts; frontier: in a share of the episodes, the way to actions never tried"""
    frontier_share: gb.Fraction | None = None  # of frontier episodes, at most: 0.5, whole-graph 0.9
    backup: Literal[*BACKUPS, "whole-graph"] = "graph"
    """the bootstrap target. tree: along the sample's trajectory (one-step: one step of it); graph:
    over all transitions seen; n-step, graph-mixed: the same two, by the actions made, not the best;
    whole-graph: as graph, with no limit of depth, and the agent acts on its values"""
    depth: gb.Depth = 5  # nested backups per target, one-step always 1
    breadth: gb.NonNegative = 50  # transitions followed per level of a graph backup; 0 = all
    prior: gb.Prior = 0.0
    """the network's value counts as so many observations of a nested pair; 0: the paper's backup"""
    act_on: Literal["graph", "network"] | None = None
    """acts greedily: by default the network, with whole-graph its values"""
    eval_act_on: Literal["graph", "network"] | None = None
    """the same in evaluations, by default as --act-on; where levels change, or the view is partial,
    graph is that of the evaluation's own episode"""
    eval_episodes: gb.Count | None = None  # of each evaluation: 3, where levels change 20
    eval_frequency: gb.NonNegative | None = None
    """steps between evaluations, 0 = only after training: 1,000, where levels change 5,000"""
    eval_epsilon: gb.Fraction = 0.001  # share of random actions in evaluation

    def __post_init__(self):
        super().__post_init__()
        if self.num_levels != 1:
            self.default(train_frequency=2, target_network_frequency=1_000, batch_size=128)
            self.default(eval_episodes=20, eval_frequency=5_000)
        if self.backup == "whole-graph":  # the graph knows before the network does
            self.default(learning_starts=0, train_frequency=4, target_network_frequency=2_000)
            self.default(frontier_share=0.9, act_on="graph")
        self.default(learning_starts=5_000, train_frequency=1, target_network_frequency=8_000)
        self.default(frontier_share=0.5, act_on="network")
        self.default(batch_size=32, eval_episodes=3, eval_frequency=1_000)
        self.default(eval_act_on=self.act_on)


# --- Network ---


class QNetwork(nn.Module):
    """One channel per object, colour, state and mark; two convolutions, two dense layers.

    Where levels change, the last layer gives a value of the state and an advantage of each action
    (dueling, Wang et al. 2016), and a whole grid is moved and turned until the agent is in the
    middle and looks along the first axis. A door ahead is then a door ahead, wherever the agent is.
    """

    def __init__(self, obs_shape, num_actions, levels_change=False):
        super().__init__()
        self.is_dueling = levels_change
        width, height, depth = obs_shape
        # Of each, the first (empty, red, open or right, not named) is where all channels are 0.
        numbers = [
            range(OBJECT_TO_IDX["empty"] + 1, len(OBJECT_TO_IDX)),
            range(1, len(COLOR_TO_IDX)), range(1, 4), range(1, 3),
        ][: 4 if depth in (4, 4 * 4) else 3]  # fmt: skip
        # depth: of one grid, or of the views that are stacked.
        codes = [(i, code) for i in range(depth) for code in numbers[i % len(numbers)]]
        which, code = torch.tensor(codes).unbind(1)
        self.register_buffer("which", which, persistent=False)
        self.register_buffer("code", code.to(torch.uint8), persistent=False)
        around = None
        if levels_change and depth == len(numbers):  # not the agent's own views
            around, width, height = cells_around_agent(width, height), *2 * [max(width, height)]
        self.register_buffer("around", around, persistent=False)
        self.layers = nn.Sequential(
            nn.Conv2d(len(codes), 16, 3), nn.ReLU(),  # the border of a grid is wall
            nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * ((width - 1) // 2) * ((height - 1) // 2), 128), nn.ReLU(),
            nn.Linear(128, num_actions + levels_change),
        )  # fmt: skip

    def forward(self, obs):
        """uint8 [B, *obs_shape], as `Task` has it -> values [B, num_actions]."""
        if self.around is not None:
            obs = self.move_to_agent(obs)
        x = obs.index_select(3, self.which) == self.code
        values = self.layers(x.permute(0, 3, 1, 2).float())
        if not self.is_dueling:
            return values
        return values[:, :1] + values[:, 1:] - values[:, 1:].mean(1, keepdim=True)

    def move_to_agent(self, obs):
        """uint8 [B, W, H, C] -> [B, N, N, C], N = max(W, H), without the agent itself."""
        cells, size = obs.flatten(1, 2), max(obs.shape[1:3])
        agent = (cells[..., 0] == OBJECT_TO_IDX["agent"]).int().argmax(1)  # [B]
        direction = cells[torch.arange(len(obs), device=obs.device), agent, 2].long()
        around = self.around[agent, direction]  # [B, N * N]
        moved = cells.take_along_dim(around[..., None], 1).unflatten(1, (size, size))
        moved[:, size // 2, size // 2] = 0
        return moved


def cells_around_agent(width, height):
    """Cells in the order in which an agent sees them, by its cell and direction.

    Returns int64 [W * H, 4, N * N], N = max(W, H). The grid goes on beyond each side with the other
    one; where it is not square, cells that it lacks are its corner, a wall.
    """
    size = max(width, height)
    ahead, right = torch.meshgrid(*[torch.arange(size) - size // 2] * 2, indexing="ij")
    dx, dy = torch.tensor([[1, 0, -1, 0], [0, 1, 0, -1]])[..., None, None]  # right, down, left, up
    cell = torch.arange(width * height)[:, None, None, None]
    x = (cell // height + dx * ahead - dy * right) % size
    y = (cell % height + dy * ahead + dx * right) % size
    return torch.where((x < width) & (y < height), x * height + y, 0).flatten(2)


def make_network(args, obs_shape, num_actions):
    """The network that these flags ask for."""
    return QNetwork(obs_shape, num_actions, args.num_levels != 1)


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
        self.first_tries, self.frontier, self.graph_values = None, None, None
        if args.exploration == "frontier":
            if args.num_levels != 1:
                self.first_tries = FirstTries(graph.num_actions, [(0, OBJECT_TO_IDX["agent"])])
            by_kind = args.backup == "whole-graph" and args.num_levels == 1 and args.view == "grid"
            how = args.frontier_share, kinds_of_grids if by_kind else None, self.first_tries
            self.frontier = FrontierEpisodes(graph, *how)
        seen = self.first_tries if args.view == "grid" else None
        self.leaves = LeafTable(graph, lambda obs: self.values(self.target, obs), first_tries=seen)
        if args.backup == "whole-graph":
            self.graph_values = GraphValues(graph, self.leaves, args.gamma, args.prior)
        self.num_updates = 0

    @torch.inference_mode()
    def values(self, network, obs):
        """Values float32 [n, num_actions] of observations [n, *obs_shape]."""
        return network(torch.from_numpy(obs).to(self.device)).cpu().numpy()

    def act_on_network(self, obs, keys=None):
        """Greedy actions int64 [n] for observations [n, *obs_shape]."""
        return self.values(self.online, obs).argmax(axis=1)

    def act(self, obs, keys=None):
        """As training acts: with whole-graph on its values, the network's guesses among them."""
        if self.args.act_on == "graph":
            return self.graph_values.act(obs, self.act_on_network, keys)
        return self.act_on_network(obs)

    def policy(self, held_out=True):
        """As evaluations act: with whole-graph on tried actions alone, where training was there;
        in held-out levels, and with a view alone, on a graph of the episode under way.
        """
        args = self.args
        if args.eval_act_on == "network":
            return self.act_on_network
        is_there = args.view == "grid" and not (held_out and args.num_levels != 1)
        if self.graph_values is not None and is_there:
            return self.graph_values.seen_policy(otherwise=self.act_on_network)
        q = functools.partial(self.values, self.online)
        how = args.gamma, args.prior, self.leaves.first_tries
        return EpisodeGraph(q, self.graph.num_actions, *how)

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


def make_env(args, env_id, rng, render=False, held_out=False):
    """With one level the run's seed fixes all that is random: rng is not drawn from."""
    return Task(env_id, args, rng, held_out, "rgb_array" if render else None)


# (args, env_id, policy, seed, num_episodes, stop=None, held_out) -> returns, lengths of episodes
evaluate = functools.partial(gb.evaluate, make_env, held_out=True)
record_video = functools.partial(gb.record_video, make_env, held_out=True)


# --- Training ---


def train(args, env_id, env, learner, rng, logger, checkpoint, stop):
    """The agent-environment loop, from where the run stands."""
    graph, replay, frontier = learner.graph, learner.replay, learner.frontier
    node = graph.node(env.obs, env.key)
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
            action = int(learner.act(env.obs[None], None if env.key is None else env.key[None])[0])
        obs, grid = env.obs, env.grid
        _, reward, terminated, truncated = env.step(action)
        next_node = graph.node(env.obs, env.key)
        sign = float(np.sign(reward))  # MiniGrid's reward falls with time, which no state shows
        replay.add(node, action, sign, next_node, terminated, obs)
        if frontier is not None:
            frontier.observe(grid, node, action, sign, env.grid, next_node, terminated)
        node = next_node
        if terminated or truncated:
            replay.end_episode()
            if frontier is not None:
                frontier.end_episode()
            env.reset()
            node = graph.node(env.obs, env.key)

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
    obs, capacity = env.reset(), args.buffer_size or args.total_timesteps
    graph = TransitionGraph(
        env.num_actions, obs.shape, obs.dtype, capacity=2 * capacity + 2,
        key_shape=None if env.key is None else env.key.shape,
    )  # fmt: skip
    replay = Replay(graph, capacity)
    learner = Learner(args, graph, replay, device)
    logger = gb.Logger(args, __file__, env_id, packages=("gymnasium", "minigrid"))
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
            starts_met=gb.starts_met(make_env, args, env_id, graph),
        )
    if args.capture_video:
        seed = [args.seed, args.total_timesteps, 1]
        record_video(args, env_id, learner.policy(), seed, logger.path / "episode.mp4")


if __name__ == "__main__":
    main()
