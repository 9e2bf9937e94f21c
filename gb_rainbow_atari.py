"""Graph Backup on Atari 100K: Data-Efficient Rainbow with five choices of bootstrap target.

    python gb_rainbow_atari.py --env-id Freeway --backup graph

Graph Backup: Jiang et al. 2022. Agent: Data-Efficient Rainbow (van Hasselt et al. 2019) as in SPR
(Schwarzer et al. 2021): double, duelling, noisy, categorical (C51), prioritised; batch 32, two
updates per step. This file and the folder gbcore are all there is: copy them and change them. What
is not learning (flags of a run, its folder, resume) is in gbcore/run.
"""

import copy
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import ale_py.roms
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from ale_py.vector_env import AtariVectorEnv

from gbcore import (
    FrontierEpisodes,
    GraphValues,
    LeafTable,
    PrioritizedReplay,
    TransitionGraph,
    categorical_targets,
    point_masses,
    prune,
)
from gbcore.categorical import back_up, level_bounds, pack, pad, unpack
from gbcore.recent_rows import RecentRows
from gbcore.run import (
    ELSEWHERE,
    Amount,
    Count,
    LearnerState,
    Run,
    RunFlags,
    Scale,
    Share,
    errors_in_one_line,
    fail,
    nearest,
    parse_flags,
    seed_everything,
    write_video,
)
from gbcore.run.captured import CapturedCalls

# The five backups are two choices: where the subgraph comes from, and how a state's value is read.
BACKUPS = {
    "one-step": ("trajectory", "double"),
    "n-step": ("trajectory", "behaviour"),
    "tree": ("trajectory", "double"),
    "graph": ("graph", "double"),
    "graph-mixed": ("graph", "behaviour"),
}


@dataclass
class Args(RunFlags):
    env_id: str = "Freeway"
    """the game, as in Freeway, freeway or ALE/Freeway-v5"""
    cuda: bool = torch.cuda.is_available()
    """run on the GPU; on by default where there is one"""
    cuda_graphs: bool = True
    """on a GPU, replay each update and choice of actions as a CUDA graph; off: one by one"""
    bf16: bool = False
    """learn in bfloat16, forward and backward; weights, Adam, losses and acting stay float32"""
    threads: Annotated[int, (0, 1024)] = 0
    """CPU threads for torch; 0 = as many, up to 8, as are quickest when the run starts"""
    total_timesteps: Count = 100_000
    """environment steps (of 4 frames each)"""
    learning_rate: Scale = 1e-4
    """step size of Adam"""
    adam_eps: Scale = 1.5e-4
    """epsilon of Adam"""
    max_grad_norm: Scale = 10.0
    """gradients are clipped to this norm"""
    buffer_size: Amount = 0
    """transitions kept in the replay and the graph; 0 = total_timesteps"""
    gamma: Share = 0.99
    """the discount"""
    target_network_frequency: Count = 1
    """updates between two copies of the online network into the target network"""
    batch_size: Count = 32
    """transitions per update"""
    learning_starts: Amount = 2_000
    """steps before the first update"""
    train_frequency: Count = 1
    """steps between updates"""
    updates_per_train: Count = 2
    """updates at a time, each of its own batch"""

    start_e: Share = 1.0
    """epsilon at the start"""
    end_e: Share = 0.0
    """epsilon in the end; the noisy networks explore"""
    exploration_steps: Count = 2_001
    """steps over which epsilon goes from start_e to end_e"""
    noisy_std: Annotated[float, (0, 1e3)] = 0.5
    """initial scale of the noisy layers"""

    exploration: Literal["epsilon-greedy", "frontier"] = "epsilon-greedy"
    """how training acts; frontier: in a share of the episodes, the way to what was never tried"""
    frontier_share: Share = 0.5
    """largest share of frontier episodes; it falls as they find no more than the others"""

    backup: Literal["one-step", "n-step", "tree", "graph", "graph-mixed"] = "graph"
    """the bootstrap target. tree: along the sample's trajectory (one-step: one step of it); graph:
    over all transitions seen; n-step, graph-mixed: the same two, by what was done, not the best"""
    depth: Count = 10
    """nested backups per target, one-step always 1; 0 = no limit: the values of the whole graph"""
    breadth: Amount = 10
    """transitions followed per level of a graph backup; 0 = all"""
    leaf_refresh: Annotated[int, (1, 1_000)] = 1
    """updates for which targets reuse what the convolutions made of a state; 1: none. CPU only"""
    prior: Annotated[float, (0, 1e9)] = 0.0
    """the network's value counts as so many observations of a nested pair; 0: the paper's backup"""
    act_on: Literal["network", "graph"] = "network"
    """what is greedy, in training and evaluation: the network, or the values of the whole graph
    where the state is known"""

    n_atoms: Annotated[int, (2, 10_001)] = 51
    """atoms of the value distribution"""
    v_min: Annotated[float, (-1e9, 1e9)] = -10.0
    """smallest return of the value distribution"""
    v_max: Annotated[float, (-1e9, 1e9)] = 10.0
    """largest return of the value distribution"""
    priority_exponent: Annotated[float, (0, 10)] = 0.5
    """how strongly priorities count in sampling"""
    importance_exponent: Annotated[float, (0, 10)] = 0.4
    """importance-sampling correction at the start; grows to 1 over the run"""

    eval_episodes: Count = 100
    """episodes of the evaluation after training, which gives the score"""
    eval_frequency: Amount = 10_000
    """steps between evaluations in training, for a learning curve; 0 = none"""
    curve_episodes: Count = 5
    """episodes of each evaluation before the last"""
    eval_envs: Count = 16
    """environments that evaluate in parallel"""
    eval_epsilon: Share = 0.001
    """share of random actions in evaluation"""

    IDLE: ClassVar = {  # flags -> where they do nothing
        "breadth": ("backup=one-step|n-step|tree|whole-graph", "depth=1"),
        "depth": ("backup=one-step|whole-graph",),
        "prior": ("backup=one-step", "depth=1 backup=n-step|tree|graph|graph-mixed"),
        "frontier_share": ("exploration=epsilon-greedy",),
        "curve_episodes": ("eval_frequency=0",),
        "cuda_graphs": ("cuda=False",),
    }
    FREE: ClassVar = (*RunFlags.FREE, "cuda_graphs")

    def check(self):
        if not self.v_min < self.v_max:
            fail(f"--v-min must be < --v-max, got {self.v_min} and {self.v_max}")
        if self.leaf_refresh > 1 and (
            self.cuda or self.target_network_frequency > 1 or self.depth == 0
        ):
            fail(
                "--leaf-refresh above 1 requires --no-cuda, --target-network-frequency 1 and a "
                "--depth above 0"
            )


# --------------------------------------------------------------------------------------------------
# Network
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

    def __init__(self, args, num_actions):
        super().__init__()
        n_atoms, std = args.n_atoms, args.noisy_std
        self.num_actions, self.n_atoms = num_actions, n_atoms
        support = torch.linspace(args.v_min, args.v_max, n_atoms)
        self.register_buffer("support", support, persistent=False)
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
        if dtype == torch.float32:
            return self.convolutions(x)
        with torch.autocast(obs.device.type, dtype):
            return self.convolutions(x)

    def layers(self):
        return self.value_hidden, self.value, self.advantage_hidden, self.advantage

    def heads(self, noisy=True, dtype=torch.float32):
        """Weights of the four noisy layers: one draw for all states of a batch, or the means."""
        drawn = [layer.sample() if noisy else (layer.weight, layer.bias) for layer in self.layers()]
        return [(weight.to(dtype), bias.to(dtype)) for weight, bias in drawn]

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

    def values(self, obs, heads=None):
        """uint8 [B, 4, 84, 84] -> expected values [B, num_actions]; without heads, of the means."""
        heads = self.heads(noisy=False) if heads is None else heads
        return self.log_pmf(self.features(obs), heads).exp() @ self.support


def make_network(args, obs_shape, num_actions):
    """The network that these flags ask for."""
    return RainbowNetwork(args, num_actions)


# --------------------------------------------------------------------------------------------------
# Learning
# --------------------------------------------------------------------------------------------------


class Learner(LearnerState):
    """Online and target network, and the update that all five backups share.

    On a CPU the states to evaluate are pruned to those that the greedy paths read. On a GPU, where
    that would be a wait at every level, all are evaluated, in shapes padded to a few sizes. Updates
    of a size seen before are replayed as one CUDA graph, to which indices travel; so is acting.
    With --depth 0 targets read values that are kept: one way on both.
    """

    SAVED = ("num_updates", "num_fresh", "leaves", "graph_values", "recent")

    def __init__(self, args, graph, replay, device):
        self.args, self.graph, self.replay, self.device = args, graph, replay, device
        self.dtype = torch.bfloat16 if args.bf16 else torch.float32  # of layers and activations
        network = make_network(args, graph.obs_shape, graph.num_actions)
        self.online = network.to(device, memory_format=torch.channels_last)
        self.support = self.online.support
        # Copied after every update, the two differ by their noise alone: one network serves both.
        self.shared = args.target_network_frequency == 1
        self.target = self.online
        if not self.shared:
            self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.optimizer = torch.optim.Adam(
            self.online.parameters(), lr=args.learning_rate, eps=args.adam_eps, fused=True,
            capturable=device.type != "cpu",
        )  # fmt: skip
        self.num_updates = self.num_fresh = 0  # states that targets had evaluated, `leaves` aside
        self.leaves = self.graph_values = self.recent = None
        if args.depth == 0 or args.act_on == "graph":
            self.leaves = LeafTable(graph, lambda x: self.values(self.to_device(x)).cpu().numpy())
            self.graph_values = GraphValues(graph, self.leaves, args.gamma, args.prior)
        if args.leaf_refresh > 1:
            width = self.online.value_hidden.weight.shape[1]
            self.recent = RecentRows(graph, self.features_of, args.leaf_refresh, width, self.dtype)
        self.padded = device.type != "cpu" and args.depth > 0
        self.frames = None  # the graph's, on the GPU: uint8 [capacity, 84, 84]
        use_graphs = args.cuda_graphs and device.type != "cpu"
        self.captured = CapturedCalls(self.fixed_update, use_graphs)
        self.captured_act = CapturedCalls(self.best_actions, use_graphs)

    @property
    def num_evaluated(self):
        return self.num_fresh + (0 if self.leaves is None else self.leaves.num_evaluated)

    @torch.no_grad()
    def values(self, obs, noisy=False):
        """Values [n, num_actions] of a uint8 Tensor [n, 4, 84, 84]."""
        # Forming weights moves memory, which is scarce on a CPU, in fewer launches, a GPU's cost.
        factored = noisy and self.device.type == "cpu"
        heads = self.online.factored_heads() if factored else self.online.heads(noisy)
        return self.online.values(obs, heads)

    def best_actions(self, noisy, obs):
        return self.values(obs, noisy).argmax(dim=1)

    def act(self, obs, noisy=False):
        """Greedy actions int64 [n] for uint8 [n, 4, 84, 84]."""

        def of_network(obs):
            best = self.best_actions if self.device.type == "cpu" else self.captured_act
            return best(noisy, self.to_device(obs)).cpu().numpy()

        if self.args.act_on == "graph":
            return self.graph_values.act(obs, otherwise=of_network)
        return of_network(obs)

    def update(self, batch, rng):
        """One gradient step. Returns float32 [B + 2]: errors of the batch, loss, mean value."""
        args = self.args
        if self.graph_values is not None:
            if self.num_updates % 8_000 == 0:
                self.graph_values.renew()
            else:
                self.graph_values.update()
        source, rule = BACKUPS[args.backup]
        depth = 1 if args.backup == "one-step" else args.depth
        subgraphs = None
        if depth > 0:
            subgraphs = self.replay.subgraphs(batch, source, depth, args.breadth, rng)
        result = (self.padded_update if self.padded else self.pruned_update)(batch, subgraphs, rule)
        self.num_updates += 1
        if not self.shared and self.num_updates % args.target_network_frequency == 0:
            with torch.no_grad():
                torch._foreach_copy_(list(self.target.parameters()), list(self.online.parameters()))
        return result

    def draw_heads(self):
        """Noisy weights: the online network's, the same to select actions with, the target's."""
        heads = self.online.heads(dtype=self.dtype)
        fixed = [(weight.detach(), bias.detach()) for weight, bias in heads]
        with torch.no_grad():
            return heads, fixed, self.target.heads(dtype=self.dtype)

    def pruned_update(self, batch, subgraphs, rule):
        """An update that evaluates as few states as the rule can do with.

        With --depth 0 none: it goes towards values of the whole graph, each as a point mass.
        """
        if subgraphs is None:
            heads = self.online.heads(dtype=self.dtype)
            values = torch.from_numpy(self.graph_values.targets(batch.nodes, batch.actions))
            targets = point_masses(values.to(self.device), self.support)
        else:
            heads, fixed_heads, target_heads = self.draw_heads()
            targets = self.pruned_targets(subgraphs, rule, fixed_heads, target_heads)
        obs = self.observations(batch.nodes)
        return self.step(heads, targets, obs, *map(self.to_device, (batch.actions, batch.weights)))

    @torch.no_grad()
    def pruned_targets(self, subgraphs, rule, online_heads, target_heads):
        """Target distributions [B, n_atoms] from the states on the greedy paths, level by level."""
        features, q = [], []  # of the nodes asked for, in that order
        if self.recent is not None:
            self.recent.begin_update()
        features_of = self.features_of if self.recent is None else self.recent.rows

        def choose(nodes):
            features.append(features_of(nodes))
            q.append(self.online.log_pmf(features[-1], online_heads).exp() @ self.support)
            return q[-1].argmax(dim=1).cpu().numpy()

        subgraphs, is_leaf = prune(subgraphs, rule, choose, self.args.prior)
        if rule == "behaviour" or not features:
            choose(subgraphs.nodes)
        read = torch.from_numpy(np.flatnonzero(is_leaf)).to(self.device)
        if self.shared:
            leaf_features = torch.cat(features)[read]
        else:
            obs = self.observations(subgraphs.nodes[is_leaf])
            leaf_features = self.target.features(obs, self.dtype)
        leaf_pmf = self.support.new_zeros(len(is_leaf), self.online.num_actions, len(self.support))
        leaf_pmf[read] = self.target.log_pmf(leaf_features, target_heads).exp()  # [M, A, n_atoms]
        return categorical_targets(
            subgraphs, leaf_pmf, self.support, self.args.gamma, rule, torch.cat(q),
            prior=self.args.prior,
        )  # fmt: skip

    def features_of(self, nodes):
        """Features [n, 3136] of node ids."""
        self.num_fresh += len(nodes)
        return self.online.features(self.observations(nodes), self.dtype)

    def step(self, heads, targets, obs, actions, weights):
        """Loss, gradient and Adam for targets [B, n_atoms]; result as of `update`."""
        log_pmf = self.online.log_pmf(self.online.features(obs, self.dtype), heads)
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

    def padded_update(self, batch, subgraphs, rule):
        """A GPU's update, of one of a few shapes: only indices and a few floats travel there."""
        subgraphs = pad(subgraphs)
        nodes = np.concatenate([subgraphs.nodes, batch.nodes])
        self.num_fresh += len(subgraphs.nodes)
        integers, floats = pack(subgraphs)
        frame_ids = self.graph.frame_ids_of(nodes).reshape(-1)
        integers = np.concatenate([integers, batch.actions, frame_ids])
        floats = np.concatenate([floats, batch.weights]).astype(np.float32)
        shape = len(subgraphs.nodes), level_bounds(subgraphs)
        return self.captured(shape, self.to_device(integers), self.to_device(floats))

    def fixed_update(self, shape, integers, floats):
        """Nothing in here waits for the device or depends on what the two tensors hold.

        shape: M and the subgraphs' `level_bounds`; integers int64: `pack`ed subgraphs, actions [B],
        frame ids [4 (M + B)]; floats: `pack`ed subgraphs, weights [B].
        """
        (num_nodes, levels), batch_size = shape, self.args.batch_size
        num_frames = 4 * (num_nodes + batch_size)
        integers, actions, frames = integers.tensor_split([-batch_size - num_frames, -num_frames])
        floats, weights = floats.tensor_split([-batch_size])
        obs = self.frames[frames].view(-1, 4, 84, 84)
        heads, fixed_heads, target_heads = self.draw_heads()
        with torch.no_grad():
            leaf_obs = obs[:num_nodes]
            features = self.online.features(leaf_obs, self.dtype)  # [M, 3136]
            selector_q = self.online.log_pmf(features, fixed_heads).exp() @ self.support
            if not self.shared:
                features = self.target.features(leaf_obs, self.dtype)
            leaf_pmf = self.target.log_pmf(features, target_heads).exp()  # [M, A, n_atoms]
            _, rule = BACKUPS[self.args.backup]
            targets = back_up(
                unpack(levels, integers, floats), levels, leaf_pmf, self.support, self.args.gamma,
                rule, selector_q, prior=self.args.prior, dense=True,
            )  # fmt: skip
        return self.step(heads, targets, obs[num_nodes:], actions, weights)

    def node(self, obs):
        """Node of an observation uint8 [4, 84, 84], whose frames are sent to the GPU at once."""
        node = self.graph.node(obs)
        if self.padded:
            self.make_room_for_frames()
            frame_ids = self.graph.frame_ids_of(np.array([node]))[0]
            for i, frame in zip(frame_ids, self.to_device(obs), strict=True):  # at once: a sort
                self.frames[i] = frame
        return node

    def make_room_for_frames(self):
        """Grow the GPU's frames as the graph's grow. What was captured names the old place."""
        wanted = self.graph.num_frame_ids
        if self.frames is None or wanted > len(self.frames):
            capacity = max(self.replay.capacity + 1024, 5 * wanted // 4)
            self.frames = torch.zeros((capacity, 84, 84), dtype=torch.uint8, device=self.device)
            self.frames[:wanted] = torch.tensor(self.graph.frames)
            self.captured.plans.clear()

    def to_device(self, array):
        """A tensor of the array, without waiting for the device."""
        tensor = torch.from_numpy(array)
        if self.device.type == "cuda":  # memory that stays put until it was copied
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)

    def observations(self, nodes):
        """uint8 Tensor [n, 4, 84, 84] of node ids."""
        return self.to_device(self.graph.observations_of(nodes))


# --------------------------------------------------------------------------------------------------
# Environment
# --------------------------------------------------------------------------------------------------


# Random and human scores of the 26 games of Atari 100K (Mnih et al. 2015; van Hasselt et al. 2016).
REFERENCE_SCORES = {
    "alien": (227.8, 7127.7), "amidar": (5.8, 1719.5), "assault": (222.4, 742.0),
    "asterix": (210.0, 8503.3), "bank_heist": (14.2, 753.1), "battle_zone": (2360.0, 37187.5),
    "boxing": (0.1, 12.1), "breakout": (1.7, 30.5), "chopper_command": (811.0, 7387.8),
    "crazy_climber": (10780.5, 35829.4), "demon_attack": (152.1, 1971.0), "freeway": (0.0, 29.6),
    "frostbite": (65.2, 4334.7), "gopher": (257.6, 2412.5), "hero": (1027.0, 30826.4),
    "jamesbond": (29.0, 302.8), "kangaroo": (52.0, 3035.0), "krull": (1598.0, 2665.5),
    "kung_fu_master": (258.5, 22736.3), "ms_pacman": (307.3, 6951.6), "pong": (-20.7, 14.6),
    "private_eye": (24.9, 69571.3), "qbert": (163.9, 13455.0), "road_runner": (11.5, 7845.0),
    "seaquest": (68.4, 42054.7), "up_n_down": (533.4, 11693.2),
}  # fmt: skip


def human_normalized(game, score):
    """0 for random play, 1 for a human tester; None where neither is known."""
    if game not in REFERENCE_SCORES:
        return None
    random_score, human_score = REFERENCE_SCORES[game]
    return (score - random_score) / (human_score - random_score)


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


def is_reset(done, frame, next_frame):
    """Did the step after a done one start a new episode? Else its frame counter went on."""
    return done and not frame < next_frame <= frame + 4


class Game:
    """The environment of training: one game after another, each with a seed drawn from rng.

    The emulators of a vector environment cannot be saved. But a seed and the actions since make a
    game what it is, so that it can be played again.
    """

    def __init__(self, name, rng):
        self.envs, self.rng = make_envs(name, 1, life_loss_is_done=True), rng
        self.num_actions = int(self.envs.single_action_space.n)

    def reset(self):
        """Begin a game. Returns uint8 [4, 84, 84]."""
        # Consecutive seeds would play the same games for runs of neighbouring seeds.
        return self._begin(int(self.rng.integers(2**31)))

    def _begin(self, seed):
        self.seed, self.actions = seed, []
        obs, info = self.envs.reset(seed=seed)
        self.frame, self.done, self.obs = int(info["episode_frame_number"][0]), False, obs[0]
        return self.obs

    def step(self, action):
        """Observation, reward, terminated, truncated; or None, where the game is over already."""
        obs, reward, terminated, truncated, info = self.envs.step(np.array([action]))
        frame = int(info["episode_frame_number"][0])
        if is_reset(self.done, self.frame, frame):
            return None
        self.actions.append(action)
        self.frame, self.done = frame, bool(terminated[0] or truncated[0])
        self.obs = obs[0]
        return self.obs, float(reward[0]), bool(terminated[0]), bool(truncated[0])

    def state(self):
        """What `restore` takes back."""
        return {"seed": self.seed, "actions": list(self.actions)}

    def restore(self, state):
        """Play a game again, up to where `state` was called."""
        self._begin(state["seed"] % 2**31)
        for action in state["actions"]:
            if self.step(action) is None:
                raise ValueError("the game ends earlier with this version of its environment")


def task_of(env_id):
    """ROM name of a game, from any spelling of it that people use."""
    name = env_id.strip().lower().removeprefix("ale/").split("-v")[0].removesuffix("noframeskip")
    games = {rom.replace("_", ""): rom for rom in ale_py.roms.get_all_rom_ids()}
    key = name.replace("_", "").replace("-", "").replace(" ", "")
    if key not in games:
        fail(f"unknown game {env_id!r}; nearest: {nearest(key, games)}; {ELSEWHERE}")
    return games[key]


def make_env(args, env_id, rng, render=False):
    """A game of which every reset draws a seed from rng."""
    return Game(env_id, rng)


def evaluate(args, env_id, policy, seed, num_episodes, stop=None):
    """Returns and lengths of num_episodes full games, played in parallel environments.

    Each environment plays its share of the episodes from first to last, so that short games are
    not over-represented, and rests after that. policy: uint8 [n, 4, 84, 84] -> actions [n]. None if
    stop, a StopSignal, was asked.
    """
    num_envs = min(args.eval_envs, num_episodes)
    rng = np.random.default_rng(seed)
    # Consecutive seeds, the default, would play the same games for runs of neighbouring seeds.
    seeds = np.random.SeedSequence(seed).generate_state(num_envs).astype(np.int64) >> 1
    # A vector environment would step those that have finished as well: one for each, with a thread.
    envs = [make_envs(env_id, 1, num_threads=1) for _ in range(num_envs)]
    quota = np.full(num_envs, num_episodes // num_envs)
    quota[: num_episodes % num_envs] += 1
    returns, lengths = np.zeros(num_envs), np.zeros(num_envs, np.int64)
    done = np.zeros(num_envs, np.bool_)
    finished = [[] for _ in range(num_envs)]
    obs = np.concatenate([env.reset(seed=int(s))[0] for env, s in zip(envs, seeds, strict=True)])
    while quota.any() and not (stop is not None and stop.asked):
        playing = np.flatnonzero(quota)
        actions = np.zeros(num_envs, np.int64)
        actions[playing] = policy(obs[playing])
        explore = rng.random(num_envs) < args.eval_epsilon
        actions[explore] = rng.integers(envs[0].single_action_space.n, size=explore.sum())
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


def record_video(args, env_id, policy, seed, path):
    """Write one episode in colour, as mp4: a second game follows the first, action by action."""
    rng = np.random.default_rng(seed)
    seed = int(rng.integers(2**31))
    envs = make_envs(env_id, 1)
    screen = make_envs(
        env_id, 1, grayscale=False, stack_num=1, img_height=210, img_width=160, maxpool=False
    )

    def frames():
        obs, done, picture = envs.reset(seed=seed)[0], False, screen.reset(seed=seed)[0]
        while not done:
            yield picture[0, 0]
            action = policy(obs)
            if rng.random() < args.eval_epsilon:
                action = rng.integers(envs.single_action_space.n, size=1)
            obs, _, terminated, truncated, _ = envs.step(action)
            picture = screen.step(action)[0]
            done = terminated[0] or truncated[0]

    write_video(path, frames(), fps=15, zoom=2)


# --------------------------------------------------------------------------------------------------
# Training
# --------------------------------------------------------------------------------------------------


def train(args, run, env, learner, rng):
    """The agent-environment loop, from where the run stands."""
    replay, frontier = learner.replay, run.frontier

    def act(node, obs, step):
        """The way to what was never tried, in a frontier episode that knows one. Else
        epsilon-greedy at first, noise in the weights throughout.
        """
        action = None if frontier is None else frontier.act(node, rng)
        share = min((step - 1) / args.exploration_steps, 1.0)
        epsilon = run.charts["charts/epsilon"] = args.start_e + share * (args.end_e - args.start_e)
        if action is None and rng.random() < epsilon:
            return int(rng.integers(env.num_actions))
        return int(learner.act(obs[None], noisy=True)[0]) if action is None else action

    obs, node = env.obs, learner.node(env.obs)
    for step in run.steps():
        if run.evaluation_is_due():
            seed, number = args.seed + 10_000, args.curve_episodes
            run.log_evaluation(evaluate(args, run.task, learner.act, seed, number, run.stop))

        action = act(node, obs, step)
        moved = env.step(action)
        if moved is None:  # the game was over, which no lost life tells: the action was ignored
            if frontier is not None:
                frontier.take_back()
            run.end_episode()
            obs = env.reset()
            node = learner.node(obs)
            action = act(node, obs, step)
            moved = env.step(action)
        obs, reward, terminated, _ = moved
        next_node = learner.node(obs)
        replay.add(node, action, float(np.clip(reward, -1, 1)), next_node, terminated)
        run.count(reward)
        node = next_node

        # Learn. All batches of a step are drawn first: the next one is expanded while a GPU works
        # on this one, and priorities are the one thing that the host waits for.
        if step > args.learning_starts and step % args.train_frequency == 0:
            exponent = args.importance_exponent
            exponent += step / args.total_timesteps * (1 - exponent)
            batches = [
                replay.sample(args.batch_size, rng, exponent) for _ in range(args.updates_per_train)
            ]
            results = torch.stack([learner.update(batch, rng) for batch in batches]).cpu().numpy()
            for batch, result in zip(batches, results, strict=True):
                *_, loss, q_values = result
                run.charts |= {"losses/td_loss": loss, "losses/q_values": q_values}
                run.require_finite()
                replay.update_priorities(batch.rows, result[:-2])


def main():
    args = parse_flags(Args, __file__)
    env_id = task_of(args.env_id)
    rng, device = seed_everything(args)
    env = make_env(args, env_id, rng)
    obs = env.reset()
    capacity = args.buffer_size or args.total_timesteps
    graph = TransitionGraph(
        env.num_actions, obs.shape, obs.dtype, frame_stack=True, capacity=2 * capacity + 2
    )
    replay = PrioritizedReplay(graph, capacity, args.priority_exponent)
    learner = Learner(args, graph, replay, device)
    parts = {"graph": graph, "replay": replay, "learner": learner, "env": env}
    if args.exploration == "frontier":
        parts["frontier"] = FrontierEpisodes(graph, args.frontier_share)
    run = Run(args, __file__, env_id, parts, rng, device, packages=("gymnasium", "ale-py"))
    with run:
        train(args, run, env, learner, rng)
        if run.evaluation_is_due():
            seed, number = args.seed + 10_000, args.eval_episodes
            run.log_evaluation(evaluate(args, env_id, learner.act, seed, number, run.stop))
        run.finish(
            score_of=lambda means: means[-1],
            human_normalized_score=lambda score: human_normalized(env_id, score),
        )
        if args.capture_video:
            with run.writing("episode.mp4") as path:
                record_video(args, env_id, learner.act, args.seed + 20_000, path)


if __name__ == "__main__":
    with errors_in_one_line():
        main()
