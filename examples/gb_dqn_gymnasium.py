# /// script
# dependencies = ["numba==0.68.1", "numpy==2.2.6", "scipy==1.17.1", "torch==2.13.0", "gymnasium==1.4.0", "ale-py==0.12.1", "minigrid==3.2.0", "minatar==1.0.15", "tyro==1.0.17", "cloudpickle==3.1.3", "tensorboard==2.21.0", "imageio-ffmpeg==0.8.1"]  # noqa: E501
# ///
"""Graph Backup on any Gymnasium environment with discrete actions: the file to copy first.

    python examples/gb_dqn_gymnasium.py --env-id FrozenLake-v1
    python examples/gb_dqn_gymnasium.py --env-id my_module:MyGrid-v0 --env-kwargs '{"size": 7}'

DQN with six choices of bootstrap target. docs/your_own.md says which lines to change for yours.
"""

import copy
import functools
import itertools
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # gbcore, if it is not installed

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
from gbcore.first_tries import are_planes, as_grids, kinds_of_grids
from gbcore.run.environment import GymnasiumTask, warn_unless_repeatable
from gbcore.run.environment import gymnasium_id as task_of

NUM_CODES = 16  # of a grid's cells, where levels change
WAYS = (-1, 0), (0, 1), (1, 0), (0, -1)  # up, right, down, left
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
    env_id: str = "FrozenLake-v1"  # also module:Id-v0, of a module in the current folder
    env_kwargs: str = "{}"  # of gymnasium.make, as JSON: '{"is_slippery": false}'
    time_limit: gb.Count | None = None  # steps of an episode; by default its own limit, or 1,000
    leave_out: str = ""  # parts of a Dict or Tuple not to observe, as in mission,direction
    round: Annotated[int, gb.number(int, -9, 9)] | None = None
    """states are told apart by so many decimals"""
    key_last_action: bool = False  # the last action is part of a state
    num_levels: gb.NonNegative | None = None
    """levels that training plays: 1, one in every episode; N, one of N; 0, a new one each. But for
    1, evaluations play levels that training does not, on a graph of their own episode. By default
    seeds as they come, and evaluations act on training's graph where it knows the state"""
    level_tries: gb.Count = 4
    """where levels change: episodes in a row in one level, at most, until one meets a reward > 0"""
    total_timesteps: gb.Count = 20_000  # environment steps
    learning_rate: gb.PositiveFloat = 1e-3  # step size of Adam
    buffer_size: gb.NonNegative = 0
    """transitions kept in the replay and the graph; 0 = total_timesteps"""
    gamma: gb.Fraction | None = None  # the discount: 0.99, where levels change 0.95
    target_network_frequency: gb.Count | None = None
    """steps between two copies into the target network: 500, where levels change 1,000"""
    batch_size: gb.Count | None = None  # transitions per update: 32, where levels change 128
    learning_starts: gb.NonNegative | None = None
    """steps before the first update: 1,000, whole-graph 0"""
    train_frequency: gb.Count = 2  # steps between updates
    exploration_steps: gb.Count | None = None  # of epsilon's fall from 1: 5,000, whole-graph 500
    end_e: gb.Fraction = 0.05  # epsilon in the end
    exploration: Literal["epsilon-greedy", "frontier"] = "epsilon-greedy"  # docs/frontier.md
    frontier_share: gb.Fraction | None = None
    """share of frontier episodes, at most: 0.5, where levels change 0.9"""
    backup: Literal[*BACKUPS, "whole-graph"] = "graph"
    act_on: Literal["graph", "network"] | None = None
    """acts greedily: by default the network; with whole-graph and no --round its values"""
    depth: gb.Depth = 5  # nested backups per target; one-step always takes 1
    breadth: gb.NonNegative = 20  # transitions followed per level of a graph backup; 0 = all
    prior: gb.Prior = 0.0  # observations that the network's value counts as
    guess_weight: gb.PositiveFloat = 0.2
    """weight, with whole-graph where levels change, of targets that lead to no reward or end yet"""
    eval_act_on: Literal["graph", "network"] | None = None  # in evaluations; by default as act_on
    eval_episodes: gb.Count = 20  # episodes of each evaluation
    eval_frequency: gb.NonNegative | None = None
    """steps between evaluations, 0 = only after training: 1,000, where levels change 5,000"""
    eval_epsilon: gb.Fraction = 0.001  # share of random actions in evaluation

    def __post_init__(self):
        super().__post_init__()
        if self.backup == "whole-graph" and self.round is None:  # the graph knows first, and acts
            self.default(learning_starts=0, exploration_steps=500, act_on="graph")
        if self.levels_change:
            self.default(gamma=0.95, target_network_frequency=1_000, batch_size=128)
            self.default(frontier_share=0.9, eval_frequency=5_000)
        # The network acts where states are rounded: it tells apart those that rounding merges.
        self.default(learning_starts=1_000, exploration_steps=5_000, act_on="network")
        self.default(gamma=0.99, target_network_frequency=500, batch_size=32)
        self.default(frontier_share=0.5, eval_frequency=1_000, eval_act_on=self.act_on)

    @property
    def levels_change(self):
        """Is an episode's level one that may never come again?"""
        return self.num_levels not in (None, 1)


class QNetwork(nn.Module):
    """Convolutions for images [C, H, W] or [H, W, C], dense layers for everything else.

    Where levels change a grid [H, W], [H, W, C] or [C, H, W] has a channel for each of `codes`,
    float64 [16], NaN before so many were met. The last layer gives a value of the state and an
    advantage of each action (dueling, Wang et al. 2016). A grid is moved until the agent is in the
    middle: a wall beside it is then a wall beside it, wherever the agent is. `agent` is pairs of a
    channel and a code, of which its cell has one, then NaN; `look` four such pairs that say where
    it looks, in the order of WAYS: a grid is turned until that is up. Every cell is told which
    codes the grid has anywhere: a gate may be open where a coin is gone.
    """

    def __init__(self, args, obs_shape, num_actions):
        super().__init__()
        self.register_buffer("scale", torch.ones(obs_shape))  # observations are divided by it
        self.channels_first = are_planes(obs_shape)
        self.channels_last = len(obs_shape) == 3 and not self.channels_first
        self.is_grid = sees_grids(args, obs_shape)
        self.register_buffer("codes", torch.full((NUM_CODES,), torch.nan).double())
        self.register_buffer("agent", torch.full((NUM_CODES, 2), torch.nan).double())
        self.register_buffer("look", torch.full((len(WAYS), 2), torch.nan).double())
        self.register_buffer("ways", torch.tensor(WAYS).float())
        if self.is_grid:
            height, width, depth = [*np.roll(obs_shape, -self.channels_first).tolist(), 1][:3]
            size = 32 * ((height + 1) // 2) * ((width + 1) // 2)
            self.layers = nn.Sequential(
                nn.Conv2d(2 * NUM_CODES * depth, 16, 3, padding=1), nn.ReLU(),
                nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
                nn.Flatten(), nn.Linear(size, 128), nn.ReLU(), nn.Linear(128, 1 + num_actions),
            )  # fmt: skip
            return
        layers, size = [], int(np.prod(obs_shape))
        if len(obs_shape) == 3:
            channels, *sides = np.roll(obs_shape, 1) if self.channels_last else obs_shape
            while not layers or max(sides) > 10:
                layers += [nn.Conv2d(int(channels), 32, 3, stride=2, padding=1), nn.ReLU()]
                channels, sides = 32, [-(-side // 2) for side in sides]
            size = int(channels * np.prod(sides))
        layers += [nn.Flatten(), nn.Linear(size, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(128, num_actions))

    def forward(self, obs):
        """Any dtype [B, *obs_shape] -> values float32 [B, num_actions]."""
        if self.is_grid:
            if torch.is_grad_enabled():  # an update's
                self.meet(obs)
            obs = obs.permute(0, 2, 3, 1) if self.channels_first else obs
            obs = self.move_to_agent(obs.reshape(*obs.shape[:3], -1))
            x = obs[..., None] == self.codes  # [B, H, W, C, NUM_CODES]
            x = x.flatten(3).permute(0, 3, 1, 2)
            met = x.flatten(2).any(2).any(0)  # the others add 0: of planes, nearly all
            met[0] = True
            x = x[:, met].float()
            is_there = x.amax((2, 3), keepdim=True).expand_as(x)  # in any cell
            first = self.layers[0]
            weight = first.weight[:, torch.cat([met, met])]
            x = F.conv2d(torch.cat([x, is_there], 1), weight, first.bias, padding=1)
            x = self.layers[1:](x)
            return x[:, :1] + x[:, 1:] - x[:, 1:].mean(1, keepdim=True)
        obs = obs.float() / self.scale
        return self.layers(obs.permute(0, 3, 1, 2) if self.channels_last else obs)

    def meet(self, obs):
        """Give each code that is new in grids [B, ...] a channel; too many end the program."""
        cells = obs.double()
        new = cells[~torch.isin(cells, self.codes)].unique()
        free = self.codes.isnan().nonzero()[:, 0]
        if len(new) > len(free):
            got = NUM_CODES - len(free) + len(new)
            gb.fail(
                f"where levels change a grid has at most {NUM_CODES} codes, got {got}: give fewer"
            )
        self.codes[free[: len(new)]] = new

    def move_to_agent(self, obs):
        """Grids [B, H, W, C] that go on beyond each side with the other one.

        An agent that turns looks up then. Without an agent a grid stays as it is.
        """
        height, width, depth = obs.shape[1:]
        middle, every = (height // 2, width // 2), torch.arange(len(obs), device=obs.device)
        cells = obs.flatten(1, 2)  # [B, H * W, C]
        is_agent = has_pairs(cells, self.agent[~self.agent[:, 0].isnan()]).any(2)  # [B, H * W]
        is_there = is_agent.any(1)
        at = torch.where(is_there, is_agent.int().argmax(1), middle[0] * width + middle[1])
        looks = has_pairs(cells[every, at], self.look) & is_there[:, None]  # [B, 4]
        turns, ahead = looks.any(1), looks.float() @ self.ways  # [B, 2]
        ahead[:, 0] -= (~turns).float()  # up
        at, (down, right) = at[:, None, None], ahead.long().T[..., None, None]
        forward = middle[0] - torch.arange(height, device=obs.device)[:, None]
        beside = torch.arange(width, device=obs.device) - middle[1]
        rows = (at // width + forward * down + beside * right) % height  # [B, H, W]
        columns = (at % width + forward * right - beside * down) % width
        moved = obs[every[:, None, None], rows, columns]
        # The way it looks is then up: where each way has a channel, they change places.
        channels = self.look[:, 0].nan_to_num().long()
        up, own = channels[0], channels[looks.int().argmax(1)]
        order = torch.arange(depth, device=obs.device).repeat(len(obs), 1)
        order[:, up], order[every, own] = own, up
        moved = moved.take_along_dim(order[:, None, None], 3)
        code = moved[:, *middle, up]
        moved[:, *middle, up] = torch.where(turns, self.look[0, 1].to(code.dtype), code)
        return moved


def has_pairs(cells, pairs):
    """Has a cell [..., C] the code of a pair float64 [n, 2] in its channel? bool [..., n]"""
    channels, codes = pairs.unbind(1)
    return cells[..., channels.nan_to_num().long()] == codes


make_network = QNetwork


def sees_grids(args, obs_shape):
    """Does the network see a channel for each code of a cell?"""
    return args.levels_change and len(obs_shape) in (2, 3) and max(obs_shape) <= 32


def look_at_grids(env, rng, num_steps=300):
    """Codes float64 [n] of the cells of grids [H, W] or [H, W, C], or of planes; pairs of a channel
    and a code of which the agent's cell has one; those that say where it looks, as `look_of` has
    them. Empty where there are none.

    Every grid has one cell with one of the agent's pairs, and its moves depend on the actions more
    than others do. Enemies move by themselves.
    """
    env.reset()
    grids, actions, goes_on = [], rng.integers(env.num_actions, size=num_steps), []
    for action in actions.tolist():
        grid = as_grids(env.obs)
        grids.append(grid.reshape(*grid.shape[:2], -1))
        goes_on.append(not any(env.step(action)[2:]))
        if not goes_on[-1]:
            env.reset()
    grids, goes_on = np.array(grids), np.flatnonzero(goes_on[:-1])
    cells = grids.reshape(num_steps, -1, grids.shape[3])  # [num_steps, H * W, C]
    codes, agent, look, most = np.unique(grids).astype(np.float64), [], [], 0.1
    if not len(goes_on) or len(codes) > NUM_CODES:
        return codes, agent, look
    pairs, numbers = pairs_in(cells, codes)
    for group in itertools.islice(one_in_each(numbers), 1_000):
        own = sorted(pairs[i] for i in group)
        at = np.any([cells[..., c] == code for c, code in own], axis=0).argmax(axis=1)
        score = dependence(actions[goes_on], np.diff(at)[goes_on])
        if score > most and len(own) <= NUM_CODES:
            most, agent = score, own
            look = look_of(cells, at, codes, goes_on, grids.shape[1:3])
    return codes, agent, look


def pairs_in(cells, codes):
    """Pairs of a channel and a code that one cell at most has in each of [n, N, C]: a list; in how
    many cells each is, int [n, pairs].
    """
    numbers = np.stack([(cells == code).sum(axis=1) for code in codes], axis=2)  # [n, C, codes]
    kept = np.argwhere(numbers.max(axis=0) == 1)
    return [(c, float(codes[i])) for c, i in kept.tolist()], numbers[:, *kept.T]


def look_of(cells, at, codes, goes_on, size):
    """Four pairs of which the agent's cell has one, in the order of WAYS: all steps made with it
    lead that way. Empty for other agents and in grids that are no squares.
    """
    if size[0] != size[1]:
        return []
    moves = np.diff(np.stack(np.divmod(at, size[1]), axis=1), axis=0)[goes_on]
    pairs, numbers = pairs_in(cells[goes_on, at[goes_on]][:, None], codes)
    ways = []
    for has in numbers.T == 1:
        made = np.unique(moves[has & moves.any(axis=1)], axis=0)
        ways.append(tuple(made[0].tolist()) if len(made) == 1 else None)
    kept = [i for i, way in enumerate(ways) if way in WAYS]
    for group in itertools.islice(one_in_each(numbers[:, kept]), 1_000):
        of_way = {ways[kept[i]]: pairs[kept[i]] for i in group}
        if len(group) == len(of_way) == len(WAYS):
            return [of_way[way] for way in WAYS]
    return []


def one_in_each(numbers, group=()):
    """Groups of columns of int [n, k] whose numbers add up to 1 in each row."""
    sums = numbers[:, group].sum(axis=1)
    if (sums == 1).all():
        yield group
    elif sums.max(initial=0) <= 1:
        first = sums.argmin()  # a row whose sum is 0: which column has its 1?
        for column in np.flatnonzero(numbers[first] == 1):
            yield from one_in_each(numbers, (*group, int(column)))


def dependence(a, b):
    """Pearson's phi squared of two columns int [n], less its mean by chance."""
    (_, rows), (_, columns) = (np.unique(one, return_inverse=True) for one in (a, b))
    table = np.zeros((rows.max() + 1, columns.max() + 1))
    np.add.at(table, (rows, columns), 1)
    phi = (table**2 / np.outer(table.sum(axis=1), table.sum(axis=0))).sum() - 1
    return phi - rows.max() * columns.max() / max(len(a) - 1, 1)


class Learner(gb.LearnerState):
    """Online and target network, and the update that all six backups share."""

    num_evaluated = property(lambda self: self.leaves.num_evaluated)  # states, for targets

    def __init__(self, args, graph, replay, device, scale=None, codes=None, agent=None, look=None):
        self.args, self.graph, self.replay, self.device = args, graph, replay, device
        self.online = make_network(args, graph.obs_shape, graph.num_actions).to(device)
        if scale is not None:  # else a checkpoint's
            self.online.scale.copy_(torch.from_numpy(scale))
        if codes is not None:
            self.online.meet(torch.from_numpy(codes))
            self.online.agent[: len(agent)] = torch.tensor(agent).reshape(-1, 2)
            self.online.look[: len(look)] = torch.tensor(look).reshape(-1, 2)
        self.target = copy.deepcopy(self.online)
        self.optimizer = torch.optim.Adam(self.online.parameters(), args.learning_rate, fused=True)
        self.first_tries, self.frontier, self.graph_values, self.found = None, None, None, None
        self.rewards = gb.RewardsAtStart()
        if args.exploration == "frontier":
            if args.levels_change:
                self.first_tries = FirstTries(graph.num_actions, agent)
            is_grid = len(graph.obs_shape) > 1 and not args.levels_change
            kinds_of = kinds_of_grids if args.backup == "whole-graph" and is_grid else None
            how = args.frontier_share, kinds_of, self.first_tries
            self.frontier = FrontierEpisodes(graph, *how)
        self.leaves = LeafTable(
            graph, lambda obs: self.values(self.target, obs), first_tries=self.first_tries
        )
        if args.backup == "whole-graph":
            self.graph_values = GraphValues(graph, self.leaves, args.gamma, args.prior)
        if args.backup == "whole-graph" and args.levels_change:
            # With 0 for all guesses, a value above 0 says that tried actions lead to a reward.
            size = graph.num_actions
            self.zeros = LeafTable(graph, lambda obs: np.zeros((len(obs), size), np.float32))
            self.found = GraphValues(graph, self.zeros, args.gamma)
        self.num_updates = 0

    @torch.inference_mode()
    def values(self, network, obs):
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
        in other levels, and by a key that only training knows, on a graph of the episode under way.
        """
        args = self.args
        if args.eval_act_on == "network":
            return self.act_on_network
        is_known = args.round is not None or args.key_last_action or self.graph.key_shape is None
        is_elsewhere = args.levels_change and held_out
        if is_elsewhere or not is_known or self.graph_values is None:
            q = functools.partial(self.values, self.online)
            how = args.gamma, args.prior, self.first_tries
            return EpisodeGraph(q, self.graph.num_actions, *how)
        return self.graph_values.seen_policy(self.act_on_network)

    def targets(self, batch, rng):
        """Target values float32 [B]: nested backups over the target network's values of leaves."""
        if self.graph_values is not None:
            self.graph_values.update()
            return self.graph_values.targets(batch.nodes, batch.actions)
        source, rule = BACKUPS[self.args.backup]
        depth = 1 if self.args.backup == "one-step" else self.args.depth
        subgraphs = self.replay.subgraphs(batch, source, depth, self.args.breadth, rng)
        leaf_q = self.leaves.values(subgraphs.nodes)
        return q_targets(subgraphs, leaf_q, self.args.gamma, rule, prior=self.args.prior)

    def update(self, batch, rng):
        """One gradient step. Returns the loss and the mean value of the batch, as tensors."""
        targets = torch.from_numpy(self.targets(batch, rng)).to(self.device)
        obs = torch.from_numpy(self.replay.observations(batch)).to(self.device)
        actions = torch.from_numpy(batch.actions).to(self.device)
        q, weight = self.online(obs).gather(1, actions[:, None])[:, 0], None
        if self.found is not None:
            self.found.update()
            is_known = self.found.targets(batch.nodes, batch.actions) > 0
            is_known = torch.from_numpy(is_known | self.replay.terminated[batch.rows])
            weight = torch.where(is_known.to(self.device), 1.0, self.args.guess_weight)
        loss = F.mse_loss(q, targets, weight=weight)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.num_updates += 1
        return loss.detach(), q.detach().mean()

    def update_target(self):
        self.target.load_state_dict(self.online.state_dict())
        if self.graph_values is None:
            self.leaves.forget_all()
        else:
            self.graph_values.renew()


def make_env(args, env_id, rng, render=False, held_out=False):
    return GymnasiumTask(
        env_id, rng, args.env_kwargs, args.time_limit, args.round, args.key_last_action,
        "rgb_array" if render else None, args.leave_out, args.num_levels, args.seed, held_out,
        args.level_tries,
    )  # fmt: skip


# (args, env_id, policy, seed, num_episodes, stop=None, held_out) -> returns, lengths of episodes
evaluate = functools.partial(gb.evaluate, make_env, held_out=True)
record_video = functools.partial(gb.record_video, make_env, held_out=True)


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

        # Act.
        obs, epsilon = env.obs, max(1 - step / args.exploration_steps, args.end_e)
        action = None if frontier is None else frontier.act(node, rng)
        if action is None and rng.random() < epsilon:
            action = int(rng.integers(env.num_actions))
        elif action is None:
            action = int(learner.act(obs[None], None if env.key is None else env.key[None])[0])
        _, reward, terminated, truncated = env.step(action)
        next_node, learned = graph.node(env.obs, env.key), reward
        if args.levels_change and terminated:
            learned = learner.rewards.of(reward, len(env.actions))
        replay.add(node, action, learned, next_node, terminated, obs)
        if frontier is not None:
            frontier.observe(obs, node, action, learned, env.obs, next_node, terminated)
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
    if args.capture_video:
        make_env(args, env_id, rng, render=True)  # refused now, not when all is learned
    warn_unless_repeatable(make_env(args, env_id, rng))
    obs, capacity = env.reset(), args.buffer_size or args.total_timesteps
    graph = TransitionGraph(
        env.num_actions, obs.shape, obs.dtype, capacity=2 * capacity + 2,
        key_shape=None if env.key is None else env.key.shape,
    )  # fmt: skip
    replay = Replay(graph, capacity)
    seen = None, None, None
    if sees_grids(args, obs.shape) and args.resume is None:  # else a checkpoint's
        new_each = replace(args, level_tries=1)  # many levels show which cell is the agent's
        other = make_env(new_each, env_id, np.random.default_rng(args.seed))
        seen = look_at_grids(other, np.random.default_rng(args.seed))
    learner = Learner(args, graph, replay, device, env.scale, *seen)
    if args.levels_change and args.resume is None and not seen[1]:
        gb.warn(
            f"no agent's cell is seen in observations {list(obs.shape)}: what is learned at one "
            "place is not known at others; observe a grid that shows it (docs/your_own.md)"
        )
    logger = gb.Logger(args, __file__, env_id, packages=("gymnasium",))
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
