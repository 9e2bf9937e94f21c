# /// script
# dependencies = ["numba==0.68.1", "numpy==2.2.6", "scipy==1.17.1", "torch==2.13.0", "gymnasium==1.4.0", "ale-py==0.12.1", "minigrid==3.2.0", "minatar==1.0.15", "tyro==1.0.17", "cloudpickle==3.1.3", "tensorboard==2.21.0", "imageio-ffmpeg==0.8.1"]  # noqa: E501
# ///
"""Graph Backup on Atari 100K: Data-Efficient Rainbow with five choices of bootstrap target.

    python gb_rainbow_atari.py --env-id Freeway --backup graph

Graph Backup: Jiang et al. 2022. Agent: Data-Efficient Rainbow (van Hasselt et al. 2019) as in SPR
(Schwarzer et al. 2021): double, duelling, noisy, categorical (C51), prioritised; batch 32, two
updates per step. This file and the folder gbcore are all there is: copy them and change them. What
is not learning (flags of a run, its folder, resume) is in gbcore/run.
"""

import copy
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

import gbcore.run as gb
from gbcore import FrontierEpisodes, PrioritizedReplay, TransitionGraph
from gbcore.run.atari import evaluate, human_normalized, make_envs, record_video, task_of
from gbcore.run.updates import OnCPU, OnGPU

# The five backups are two choices: where the subgraph comes from, and how a state's value is read.
BACKUPS = {
    "one-step": ("trajectory", "double"),
    "n-step": ("trajectory", "behaviour"),
    "tree": ("trajectory", "double"),
    "graph": ("graph", "double"),
    "graph-mixed": ("graph", "behaviour"),
}


@dataclass
class Args(gb.RunFlags):
    env_id: str = "Freeway"  # the game, as in Freeway, freeway or ALE/Freeway-v5
    cuda: bool = torch.cuda.is_available()  # run on the GPU; on by default where there is one
    cuda_graphs: bool = True
    """on a GPU, replay each update and choice of actions as a CUDA graph; off: one by one"""
    bf16: bool = False
    """learn in bfloat16, forward and backward; weights, Adam, losses and acting stay float32"""
    threads: Annotated[int, gb.number(int, 1, 1024)] = 2
    """CPU threads for torch; give 1 to runs side by side"""
    total_timesteps: gb.Count = 100_000  # environment steps (of 4 frames each)
    learning_rate: gb.PositiveFloat = 1e-4  # step size of Adam
    adam_eps: gb.PositiveFloat = 1.5e-4  # epsilon of Adam
    max_grad_norm: gb.PositiveFloat = 10.0  # gradients are clipped to this norm
    buffer_size: gb.NonNegative = 0
    """transitions kept in the replay and the graph; 0 = total_timesteps"""
    gamma: gb.Fraction = 0.99  # the discount
    target_network_frequency: gb.Count = 1
    """updates between two copies of the online network into the target network"""
    batch_size: gb.Count = 32  # transitions per update
    learning_starts: gb.NonNegative = 2_000  # steps before the first update
    train_frequency: gb.Count = 1  # steps between updates
    updates_per_train: gb.Count = 2  # updates at a time, each of its own batch

    start_e: gb.Fraction = 1.0  # epsilon at the start
    end_e: gb.Fraction = 0.0  # epsilon in the end; the noisy networks explore
    exploration_steps: gb.Count = 2_001  # steps over which epsilon goes from start_e to end_e
    noisy_std: Annotated[float, gb.number(float, 0, 1e3)] = 0.5  # initial scale of the noisy layers

    exploration: Literal["epsilon-greedy", "frontier"] = "epsilon-greedy"
    """how training acts; frontier: in a share of the episodes, the way to actions never tried"""
    frontier_share: gb.Fraction = 0.5
    """largest share of frontier episodes; it falls as they find no more than the others"""

    backup: Literal[*BACKUPS] = "graph"
    """the bootstrap target. tree: along the sample's trajectory (one-step: one step of it); graph:
    over all transitions seen; n-step, graph-mixed: the same two, by actions made, not the best"""
    depth: gb.Depth = 10  # nested backups per target; one-step: always 1
    breadth: gb.NonNegative = 10  # transitions followed per level of a graph backup; 0 = all
    prior: gb.Prior = 0.0
    """the network's value counts as so many observations of a nested pair; 0: the paper's backup"""

    n_atoms: Annotated[int, gb.number(int, 2, 10_001)] = 51  # atoms of the value distribution
    v_min: Annotated[float, gb.number(float, -1e9, 1e9)] = -10.0
    """smallest return of the value distribution"""
    v_max: Annotated[float, gb.number(float, -1e9, 1e9)] = 10.0
    """largest return of the value distribution"""
    priority_exponent: Annotated[float, gb.number(float, 0, 10)] = 0.5
    """how strongly priorities count in sampling"""
    importance_exponent: Annotated[float, gb.number(float, 0, 10)] = 0.4
    """importance-sampling correction at the start; grows to 1 over the run"""

    eval_episodes: gb.Count = 100
    """episodes of the evaluation after training, which gives the score"""
    eval_frequency: gb.NonNegative = 10_000
    """steps between evaluations in training, for a learning curve; 0 = none"""
    curve_episodes: gb.Count = 5  # episodes of each evaluation before the last
    eval_envs: gb.Count = 16  # environments that evaluate in parallel
    eval_epsilon: gb.Fraction = 0.001  # share of random actions in evaluation

    FREE = (*gb.RunFlags.FREE, "cuda_graphs")

    def __post_init__(self):
        super().__post_init__()
        if not self.v_min < self.v_max:
            gb.fail(f"--v-min must be < --v-max, got {self.v_min} and {self.v_max}")


# --- Network ---


class NoisyLinear(nn.Module):
    """Means and scales of a noisy linear layer (Fortunato et al. 2018, Eq. 10)."""

    def __init__(self, num_inputs, num_outputs, std):
        super().__init__()
        bound = num_inputs**-0.5
        self.weight = nn.Parameter(torch.empty(num_outputs, num_inputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(num_outputs).uniform_(-bound, bound))
        self.weight_std = nn.Parameter(torch.full((num_outputs, num_inputs), std * bound))
        self.bias_std = nn.Parameter(torch.full((num_outputs,), std * bound))


class AddNoise(torch.autograd.Function):
    """Means + scales * noise, of all tensors of three lists in one call; and so their gradients."""

    @staticmethod
    def forward(ctx, noise, *parameters):
        ctx.noise = noise
        means, scales = parameters[: len(noise)], parameters[len(noise) :]
        return tuple(torch._foreach_addcmul(means, scales, noise))

    @staticmethod
    def backward(ctx, *gradients):
        return None, *gradients, *torch._foreach_mul(gradients, ctx.noise)


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

    def noise(self, number):
        """So many draws of the factors of all noise: of each layer [num_outputs], [num_inputs]."""
        sizes = [size for layer in self.layers() for size in layer.weight.shape]
        noise = torch.randn(number, sum(sizes), device=self.support.device)
        return [row.split(sizes) for row in torch.copysign(noise.abs().sqrt(), noise)]

    def heads(self, factors=None, dtype=torch.float32):
        """Weights of the four noisy layers under one draw, for all states of a batch; or the means.

        They are formed once: with batches of few states, reading weights is the cost of a pass.
        """
        layers = self.layers()
        weights = [part for layer in layers for part in (layer.weight, layer.bias)]
        if factors is not None:
            scales = [part for layer in layers for part in (layer.weight_std, layer.bias_std)]
            pairs = zip(factors[::2], factors[1::2], strict=True)
            noise = [part for pair in pairs for part in (torch.outer(*pair), pair[0])]
            weights = AddNoise.apply(noise, *weights, *scales)
        weights = [part.to(dtype) for part in weights]
        return list(zip(weights[::2], weights[1::2], strict=True))

    def factored_heads(self, factors):
        """The heads, for one state or few: the same values but for rounding."""
        pairs = zip(self.layers(), factors[::2], factors[1::2], strict=True)
        return [
            (layer.weight, layer.bias + layer.bias_std * out, layer.weight_std, out, to)
            for layer, out, to in pairs
        ]

    def log_pmf(self, features, heads):
        """[B, 3136] and heads of `heads` -> log probabilities [B, num_actions, n_atoms]."""
        value_hidden, value, advantage_hidden, advantage = heads
        value = linear(F.relu(linear(features, *value_hidden)), *value)
        advantage = linear(F.relu(linear(features, *advantage_hidden)), *advantage)
        advantage = advantage.view(-1, self.num_actions, self.n_atoms)
        logits = value[:, None] + advantage - advantage.mean(dim=1, keepdim=True)
        return logits.float().log_softmax(dim=-1)

    def values(self, obs, heads=None):
        """uint8 [B, 4, 84, 84] -> expected values [B, num_actions]; without heads, of the means."""
        heads = self.heads() if heads is None else heads
        return self.log_pmf(self.features(obs), heads).exp() @ self.support


def make_network(args, obs_shape, num_actions):
    """The network that these flags ask for."""
    return RainbowNetwork(args, num_actions)


# --- Learning ---


class Learner(gb.LearnerState):
    """Online and target network, and the update that all five backups share."""

    APART = (*gb.LearnerState.APART, "updates")  # made anew on each device

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
        adam = {"lr": args.learning_rate, "eps": args.adam_eps, "capturable": device.type != "cpu"}
        self.optimizer = torch.optim.Adam(self.online.parameters(), fused=True, **adam)
        self.num_updates = self.num_evaluated = 0  # states that targets had evaluated
        self.frontier = None
        if args.exploration == "frontier":
            self.frontier = FrontierEpisodes(graph, args.frontier_share)
        self.updates = OnCPU(graph)
        if device.type != "cpu":  # room for a frame of each step, and of each episode's start
            self.updates = OnGPU(graph, device, replay.capacity + 1024, args.cuda_graphs)

    @torch.no_grad()
    def best_actions(self, obs, noisy):
        """Greedy actions int64 [n] of a uint8 Tensor [n, 4, 84, 84]."""
        # Forming weights moves memory, which is scarce on a CPU, in fewer launches, a GPU's cost.
        form = self.online.factored_heads if self.device.type == "cpu" else self.online.heads
        heads = form(*self.online.noise(1)) if noisy else None
        return self.online.values(obs, heads).argmax(dim=1)

    def act(self, obs, noisy=False):
        """Greedy actions int64 [n] for uint8 [n, 4, 84, 84]."""
        return self.updates.act(self.best_actions, obs, noisy)

    def update(self, batch, rng):
        """One gradient step. Returns float32 [B + 2]: errors of the batch, loss, mean value."""
        args, online, target, dtype = self.args, self.online, self.target, self.dtype
        source, rule = BACKUPS[args.backup]
        depth = 1 if args.backup == "one-step" else args.depth
        subgraphs = self.replay.subgraphs(batch, source, depth, args.breadth, rng)

        # `updates` calls learn, which calls states.select, which calls values: on a CPU level by
        # level, where the greedy paths lead, on a GPU once. A GPU captures it: wait for nothing in
        # here, and numbers of the host stay as they were.
        def learn(states, obs, actions, weights):
            noise, target_noise = online.noise(2)
            heads = online.heads(noise, dtype)
            with torch.no_grad():  # the online network selects, the target network values leaves
                target_heads = target.heads(target_noise, dtype)

                def values(of_states):
                    features = online.features(of_states, dtype)
                    return features, online.log_pmf(features, heads).exp() @ self.support

                features, selector_q = states.select(values)  # [L, 3136], [M, num_actions]
                if not self.shared:
                    features = target.features(states.leaf_obs(), dtype)
                leaf_pmf = target.log_pmf(features, target_heads).exp()  # [L, num_actions, n_atoms]
                targets = states.targets(leaf_pmf, selector_q, self.support, args.gamma)

            log_pmf = online.log_pmf(online.features(obs, dtype), heads)
            log_pmf = log_pmf[torch.arange(len(obs), device=self.device), actions]  # [B, n_atoms]
            cross_entropy = -(targets * log_pmf).sum(dim=1)  # [B]
            loss = (weights * cross_entropy).mean()
            self.optimizer.zero_grad()
            loss.backward()
            clip_gradients(online.parameters(), args.max_grad_norm)
            self.optimizer.step()
            with torch.no_grad():
                divergence = cross_entropy + torch.special.xlogy(targets, targets).sum(dim=1)
                q_values = (log_pmf.exp() @ self.support).mean()
                return torch.cat([divergence, torch.stack([loss, q_values])])

        result, num_evaluated = self.updates.update(learn, subgraphs, batch, rule, args.prior)
        self.num_evaluated += num_evaluated
        self.num_updates += 1
        if not self.shared and self.num_updates % args.target_network_frequency == 0:
            with torch.no_grad():
                torch._foreach_copy_(list(target.parameters()), list(online.parameters()))
        return result


def clip_gradients(parameters, max_norm):
    """Scale gradients to this norm, if theirs is larger."""
    gradients = [parameter.grad for parameter in parameters]
    norm = torch.stack(torch._foreach_norm(gradients)).norm()
    # A captured update cannot ask for the norm; where one can, megabytes are not scaled by 1.
    if norm.device.type != "cpu" or norm > max_norm:
        torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1))


# --- Environment ---


class Game(gb.Replayed):
    """The environment of training: one game after another, each with a seed drawn from rng.

    To lose a life terminates, and the game goes on until `is_over`. The emulators of a vector
    environment cannot be saved. But a game is its seed and the actions since, so that it can be
    played again.
    """

    def __init__(self, name, rng):
        self.envs, self.rng = make_envs(name, 1, life_loss_is_done=True), rng
        self.num_actions = int(self.envs.single_action_space.n)

    def reset(self):
        """Begin a game. Returns uint8 [4, 84, 84]."""
        # Consecutive seeds would play the same games for runs of neighbouring seeds.
        return self._begin(int(self.rng.integers(2**31)))

    def _begin(self, seed):
        self.seed, self.actions, self.is_over = seed, [], False
        self.obs = self.envs.reset(seed=seed)[0][0]
        return self.obs

    def step(self, action):
        """Observation, reward, terminated, truncated."""
        obs, reward, terminated, truncated, info = self.envs.step(np.array([action]))
        self.actions.append(action)
        self.obs, terminated, truncated = obs[0], bool(terminated[0]), bool(truncated[0])
        self.is_over = truncated or (terminated and info["lives"][0] == 0)
        return self.obs, float(reward[0]), terminated, truncated


def make_env(args, env_id, rng, render=False):
    """A game; every reset draws a seed from rng."""
    return Game(env_id, rng)


# --- Training ---


def train(args, env_id, env, learner, rng, logger, checkpoint, stop):
    """The agent-environment loop, from where the run stands."""
    graph, replay, frontier = learner.graph, learner.replay, learner.frontier
    obs, node = env.obs, graph.node(env.obs)
    while True:
        if logger.evaluation_is_due():  # the last one, after training, gives the score
            is_last = logger.step == args.total_timesteps
            number = args.eval_episodes if is_last else args.curve_episodes
            how = learner.act, args.seed + 10_000, number, stop
            logger.log_evaluation(evaluate(args, env_id, *how))
        if stop.asked or logger.step == args.total_timesteps:
            break
        step = logger.begin_step()

        # Act: the way to actions never tried, in a frontier episode that knows one. Else
        # epsilon-greedy at first, noise in the weights throughout.
        share = min((step - 1) / args.exploration_steps, 1.0)
        epsilon = args.start_e + share * (args.end_e - args.start_e)
        action = None if frontier is None else frontier.act(node, rng)
        if action is None and rng.random() < epsilon:
            action = int(rng.integers(env.num_actions))
        elif action is None:
            action = int(learner.act(obs[None], noisy=True)[0])
        obs, reward, terminated, _ = env.step(action)
        next_node = graph.node(obs)
        replay.add(node, action, float(np.clip(reward, -1, 1)), next_node, terminated)
        node, is_over = next_node, env.is_over
        if is_over:
            replay.end_episode()
            if frontier is not None:
                frontier.end_episode()
            obs = env.reset()
            node = graph.node(obs)

        # Learn. All batches of a step are drawn first: the next one is expanded while a GPU works
        # on this one, and priorities are the one thing that the host waits for.
        logger.charts["charts/epsilon"] = epsilon
        if step > args.learning_starts and step % args.train_frequency == 0:
            exponent = args.importance_exponent
            exponent += step / args.total_timesteps * (1 - exponent)
            batches = [
                replay.sample(args.batch_size, rng, exponent) for _ in range(args.updates_per_train)
            ]
            results = torch.stack([learner.update(batch, rng) for batch in batches]).cpu().numpy()
            for batch, result in zip(batches, results, strict=True):
                *_, loss, q_values = result
                logger.charts |= {"losses/td_loss": loss, "losses/q_values": q_values}
                logger.require_finite()
                replay.update_priorities(batch.rows, result[:-2])

        # Log and save.
        logger.end_step(reward, is_over)
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
    graph = TransitionGraph(
        env.num_actions, obs.shape, obs.dtype, frame_stack=True, capacity=2 * capacity + 2
    )
    replay = PrioritizedReplay(graph, capacity, args.priority_exponent)
    learner = Learner(args, graph, replay, device)
    logger = gb.Logger(args, __file__, env_id, packages=("gymnasium", "ale-py"))
    parts = {"logger": logger, "graph": graph, "replay": replay, "learner": learner, "env": env}
    checkpoint = gb.Checkpoint(args, __file__, rng, logger.path, **parts)
    if args.resume:
        checkpoint.load()
    with logger, gb.StopSignal() as stop:
        train(args, env_id, env, learner, rng, logger, checkpoint, stop)
        if stop.asked:
            logger.finish(learner)  # the program ends
        score = logger.evaluations[-1]
        logger.finish(learner, score, human_normalized_score=human_normalized(env_id, score))
    if args.capture_video:
        path = logger.path / "episode.mp4"
        record_video(args, env_id, learner.act, args.seed + 20_000, path)


if __name__ == "__main__":
    main()
