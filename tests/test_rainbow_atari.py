"""gb_rainbow_atari.py on real games: what it records, what it computes, what it refuses."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import jitted, play, spy

import gb_rainbow_atari as script
from gbcore import PrioritizedReplay, TransitionGraph, categorical_targets
from gbcore.run import atari, updates

pytestmark = [jitted, pytest.mark.usefixtures("torch_settings")]


def make_learner(device="cpu", **flags):
    """A learner without transitions."""
    args = script.Args(cuda=False, **flags)
    graph = TransitionGraph(3, (4, 84, 84), frame_stack=True)
    replay = PrioritizedReplay(graph, 300, args.priority_exponent)
    return script.Learner(args, graph, replay, torch.device(device))


def learner_of(tmp_path, game, steps, **flags):
    """A learner whose replay holds so many random steps of a real game."""
    flags |= {"env_id": game, "total_timesteps": steps, "start_e": 1.0, "end_e": 1.0}
    return play(script, tmp_path, **flags)[0]


def test_no_transition_crosses_a_reset_and_a_lost_life_ends_no_game(tmp_path):
    replay = learner_of(tmp_path, "breakout", 900).replay
    graph = replay.graph
    assert graph.check_valid() == []
    assert graph.num_transitions == 900
    before, after = (graph.observations_of(nodes) for nodes in (replay.node, replay.next_node))
    # Each observation is the one before, moved on by a frame: a reset would show an empty stack.
    np.testing.assert_array_equal(after[:, :3], before[:, 1:])
    starts = np.append(0, np.flatnonzero(replay.cut[:-1]) + 1)
    assert len(starts) >= 3, "several games were played"
    assert (before[starts, :3] == 0).all(), "a game starts from an empty stack"
    continues = np.flatnonzero(~replay.cut[:-1])
    np.testing.assert_array_equal(replay.next_node[continues], replay.node[continues + 1])
    # Five lives a game: each loss is a done transition, and only the fifth is followed by a cut.
    for first, last in zip(starts[:-1], starts[1:] - 1, strict=True):
        ends = first + np.flatnonzero(replay.terminated[first : last + 1])
        assert (len(ends), ends[-1]) == (5, last)
        assert not replay.cut[ends[:-1]].any()


def short_games(*args, make=atari.make_envs, **options):
    """Cut as at 108,000 frames, but sooner: pong has no score to end a game by then."""
    return make(*args, max_num_frames_per_episode=400, **options)


def test_a_game_that_is_cut_short_is_no_termination(tmp_path, monkeypatch):
    monkeypatch.setattr(script, "make_envs", short_games)
    replay = learner_of(tmp_path, "pong", 250).replay
    assert (replay.cut[:-1].sum(), replay.terminated.any()) == (2, False)
    starts = replay.graph.observations_of(replay.node[np.flatnonzero(replay.cut[:-1]) + 1])
    assert (starts[:, :3] == 0).all(), "a game starts from an empty stack"


def test_game_without_lives_ends_once(tmp_path):
    replay = learner_of(tmp_path, "pong", 1100).replay
    assert replay.terminated.sum() == replay.cut[:-1].sum() == 1
    assert {-1.0, 0.0} <= set(replay.reward) <= {-1.0, 0.0, 1.0}


def test_rewards_are_clipped_for_training_but_reported_raw(tmp_path):
    learner = learner_of(tmp_path, "alien", 400)  # a dot is worth 10 points
    assert learner.replay.reward.max() == 1.0
    args, rng = script.Args(eval_envs=2, eval_epsilon=0.0), np.random.default_rng(0)
    policy = lambda obs: rng.integers(18, size=len(obs))  # noqa: E731
    assert min(atari.evaluate(args, "alien", policy, 3, 2)[0]) >= 10


class Timed:
    """A game of so many steps, each with reward 1; the step after an end is a reset."""

    single_action_space = SimpleNamespace(n=3)

    def __init__(self, length):
        self.length, self.step = length, 0

    def reset(self, seed):
        return np.zeros((1, 2)), {}

    def send(self, _):
        self.step = self.step % (self.length + 1) + 1

    def recv(self):
        reward = 100.0 if self.step > self.length else 1.0  # of a reset: not to be counted
        return np.zeros((1, 2)), [reward], [self.step == self.length], [False], {}

    def close(self):
        pass


def test_evaluate_plays_each_environment_its_share(monkeypatch):
    """The short game does not get more episodes for being over first."""
    games = iter([Timed(9), Timed(2)])
    monkeypatch.setattr(atari, "make_envs", lambda *_, **__: next(games))
    args = script.Args(eval_envs=2, eval_epsilon=0.0)
    episodes = atari.evaluate(args, "", lambda obs: np.ones(len(obs)), 5, 3)
    assert episodes == ([9, 9, 2], [9, 9, 2])


def test_video_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(atari, "make_envs", short_games)
    path = tmp_path / "episode.mp4"
    args = script.Args(eval_epsilon=0.0)
    atari.record_video(args, "pong", lambda obs: np.full(len(obs), 2), 1, path)
    assert path.stat().st_size > 5_000


def test_all_games_of_the_suite_exist():
    assert len(atari.REFERENCE_SCORES) == 26
    for game in atari.REFERENCE_SCORES:
        assert atari.task_of(game) == game


def fill(learner, batch_size):
    """Random steps among 30 states; the learner, and a batch."""
    rng = np.random.default_rng(0)
    nodes = learner.graph.nodes(rng.integers(256, size=(30, 4, 84, 84), dtype=np.uint8))
    for node, next_node in itertools.pairwise(rng.choice(nodes, 301)):
        action, reward, terminated = rng.integers(3), rng.integers(3) - 1.0, rng.random() < 0.1
        learner.replay.add(node, action, reward, next_node, terminated)
        if rng.random() < 0.05:
            learner.replay.end_episode()
    return learner, learner.replay.sample(batch_size, rng, 0.4)


@pytest.fixture(params=script.BACKUPS)
def filled(request):
    """Function of flags: a learner over a random graph, and a batch."""

    def make(**flags):
        torch.manual_seed(0)
        return fill(make_learner(backup=request.param, depth=4, breadth=3, **flags), 16)

    return make


graph_alone = pytest.mark.parametrize("filled", ["graph"], indirect=True)


def on_cpu(learner):
    return learner


def on_gpu(learner):
    """The learner, which updates as on a GPU, but here."""
    learner.updates = updates.OnGPU(learner.graph, torch.device("cpu"), 0, False)
    return learner


def updated(learner, batch):
    """What an update returns, and its targets; always of the same noise and subgraphs."""
    targets = []
    torch.manual_seed(1)
    with pytest.MonkeyPatch.context() as patch:
        for states in (updates.PathStates, updates.PaddedStates):

            def noted(*args, call=states.targets):
                targets.append(call(*args))
                return targets[-1]

            patch.setattr(states, "targets", noted)
        result = learner.update(batch, np.random.default_rng(1))
    return result, *targets


def whole_targets(learner, batch):
    """Targets as they are written in the paper: every state evaluated by both networks."""
    args, online, target = learner.args, learner.online, learner.target
    source, rule = script.BACKUPS[args.backup]
    depth, rng = (1 if args.backup == "one-step" else args.depth), np.random.default_rng(1)
    subgraphs = learner.replay.subgraphs(batch, source, depth, args.breadth, rng)
    obs = torch.from_numpy(learner.graph.observations_of(subgraphs.nodes))
    torch.manual_seed(1)
    with torch.no_grad():
        noise, target_noise = online.noise(2)
        heads, target_heads = online.heads(noise), target.heads(target_noise)
        selector_q = online.log_pmf(online.features(obs), heads).exp() @ learner.support
        leaf_pmf = target.log_pmf(target.features(obs), target_heads).exp()
    return subgraphs, categorical_targets(
        subgraphs, leaf_pmf, learner.support, args.gamma, rule, selector_q, prior=args.prior
    )


@pytest.mark.parametrize(("frequency", "prior"), [(1, 0.0), (7, 2.0)])
@pytest.mark.parametrize("on", [on_cpu, on_gpu])
def test_targets_of_an_update_are_the_targets(filled, frequency, prior, on):
    learner, batch = filled(target_network_frequency=frequency, prior=prior, gamma=0.9)
    if frequency > 1:
        with torch.no_grad():
            for parameter in learner.target.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))
    subgraphs, whole = whole_targets(learner, batch)
    _, targets = updated(on(learner), batch)
    torch.testing.assert_close(targets, whole, rtol=0, atol=1e-6)
    torch.testing.assert_close(whole.sum(1), torch.ones(16), rtol=0, atol=1e-5)
    if on is on_cpu:
        assert learner.num_evaluated <= len(subgraphs.nodes)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_captured_updates_and_actions_are_the_same(filled):
    """Without noise, and with steps too small to bring any in, nothing random is left."""
    results, actions = [], []
    for cuda_graphs in (False, True):
        learner, *_ = filled(
            cuda_graphs=cuda_graphs, batch_size=16, noisy_std=0.0, learning_rate=1e-12
        )
        device = torch.device("cuda")
        learner = script.Learner(learner.args, learner.graph, learner.replay, device)
        rng = np.random.default_rng(1)
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(12):
                batch = learner.replay.sample(16, rng, 0.4)
                results.append(learner.update(batch, rng).cpu())
                obs = learner.graph.observations_of(batch.nodes[:1])
                actions.append(int(learner.act(obs, noisy=True)[0]))
        captured = {key[0] for key, plan in learner.updates.captured.plans.items() if plan.graph}
        assert captured == ({"update", "act"} if cuda_graphs else set())
    assert actions[:12] == actions[12:]
    torch.testing.assert_close(results[:12], results[12:], rtol=1e-4, atol=1e-5)


def test_frames_on_the_device_follow_the_graph(tmp_path):
    """Also where ids are freed and used again: the replay holds 60 of 200 transitions."""
    learner = on_gpu(learner_of(tmp_path, "breakout", 200, buffer_size=60))
    graph, replay, on = learner.graph, learner.replay, learner.updates
    others = np.random.default_rng(0).integers(256, size=(3, 20, 4, 84, 84), dtype=np.uint8)
    for more in others:
        nodes = np.unique(replay.node)
        ids = graph.frame_ids_of(nodes)
        on.send(np.unique(ids))
        expected = graph.observations_of(nodes)
        np.testing.assert_array_equal(on.frames[torch.from_numpy(ids)].numpy(), expected)
        for obs in more:
            replay.add(graph.node(obs), 0, 0.0, graph.node(obs), False)
    assert graph.frames.num_ids < 300, "ids were used again"
    assert (graph.frames.generations > 0).any()


def test_bfloat16_is_near_and_of_layers_alone(filled, monkeypatch):
    learner, batch = filled()
    exact = updated(learner, batch)[1] @ learner.support
    learner, batch = filled(bf16=True)
    heads = []
    spy(monkeypatch, learner.online, "log_pmf", lambda _, heads_: heads.extend(heads_))
    result, near = updated(learner, batch)
    near = near @ learner.support
    assert not torch.equal(near, exact)
    # Where two actions are nearly equal another one may be chosen: look at the typical error.
    assert (near - exact).abs().median() < 0.02
    assert {weight.dtype for weight, *_ in heads} == {torch.bfloat16}
    assert result.isfinite().all()
    assert {parameter.dtype for parameter in learner.online.parameters()} == {torch.float32}


@graph_alone
@pytest.mark.parametrize("max_grad_norm", [1e-3, 1e9])
def test_gradients_are_clipped_to_the_norm_and_left_alone_below_it(
    filled, max_grad_norm, monkeypatch
):
    learner, batch = filled(max_grad_norm=max_grad_norm)
    parameters, whole = list(learner.online.parameters()), []
    spy(monkeypatch, script, "clip_gradients",
        lambda *_: whole.extend(p.grad.clone() for p in parameters))  # fmt: skip
    learner.update(batch, np.random.default_rng(0))
    norm = sum(gradient.double().square().sum().item() for gradient in whole) ** 0.5
    assert 1e-3 < norm < 1e9
    share = min(max_grad_norm / norm, 1)  # torch sums millions of squares in float32
    clipped, expected = [p.grad for p in parameters], [gradient * share for gradient in whole]
    torch.testing.assert_close(clipped, expected, rtol=1e-5 if share < 1 else 0, atol=0)


@graph_alone
def test_an_update_moves_the_prediction_to_the_target_which_is_copied_when_due(filled):
    flags = {"gamma": 0.0, "target_network_frequency": 2}
    (learner, batch), rng = filled(**flags), np.random.default_rng(0)
    losses, is_copied = [], []
    for _ in range(16):
        *errors, loss, _ = learner.update(batch, rng).tolist()
        assert min(errors) > -1e-5, "a divergence is never below 0"
        losses.append(loss)
        pairs = zip(learner.online.parameters(), learner.target.parameters(), strict=True)
        is_copied.append(all(torch.equal(a, b) for a, b in pairs))
    assert losses[-1] < losses[0]
    assert is_copied == [False, True] * 8


@pytest.mark.parametrize("on", [on_cpu, on_gpu])
def test_batch_without_a_state_to_evaluate(on):
    learner = make_learner()
    node = learner.graph.node(np.zeros((4, 84, 84), np.uint8))
    learner.replay.add(node, 0, 1.0, node, True)
    batch = learner.replay.sample(4, np.random.default_rng(0), 1.0)
    _, targets = updated(on(learner), batch)
    torch.testing.assert_close(targets @ learner.support, torch.ones(4), rtol=0, atol=1e-5)


def test_noisy_layers_are_factorised_noise_on_their_means():
    torch.manual_seed(0)
    network = script.RainbowNetwork(script.Args(), 3)
    layers = network.layers()
    drawn = [network.heads(factors) for factors in network.noise(100)]
    biases = []
    for i, layer in enumerate(layers):
        of_layer = torch.stack([(heads[i][0] - layer.weight) / layer.weight_std for heads in drawn])
        # E[f(x)^2] = E|x| for each factor: the variance of a product of two is 2 / pi.
        assert of_layer.mean().abs() < 0.02
        assert abs(of_layer.var().item() - 2 / np.pi) < 0.06
        assert i != 1 or torch.linalg.matrix_rank(of_layer[0]) == 1  # 51 x 256
        biases.append(torch.cat([(one[i][1] - layer.bias) / layer.bias_std for one in drawn]))
    correlation = torch.corrcoef(torch.stack([biases[0].flatten(), biases[2].flatten()]))
    assert abs(correlation[0, 1]) < 0.05, "each layer has its own"


def test_noise_is_that_of_its_formula_in_weights_in_factors_and_in_gradients():
    network = script.RainbowNetwork(script.Args(), 3)
    (factors,) = network.noise(1)
    features, losses = torch.rand(5, 3136), []
    formula = [
        (layer.weight + layer.weight_std * torch.outer(out, to), layer.bias + layer.bias_std * out)
        for layer, out, to in zip(network.layers(), factors[::2], factors[1::2], strict=True)
    ]
    parameters = [p for layer in network.layers() for p in layer.parameters()]
    for heads in (formula, network.heads(factors)):
        loss = network.log_pmf(features, heads).square().mean()
        losses.append(torch.autograd.grad(loss, parameters, retain_graph=True))
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=1e-7)
    noisy = network.log_pmf(features, formula)
    for heads in (network.heads(factors), network.factored_heads(factors)):
        torch.testing.assert_close(network.log_pmf(features, heads), noisy, rtol=0, atol=1e-5)
    assert not torch.allclose(noisy, network.log_pmf(features, network.heads()), atol=1e-3)


def test_duelling_heads_subtract_the_mean_advantage():
    network = script.RainbowNetwork(script.Args(n_atoms=5), 3)
    features = network.features(torch.randint(256, (2, 4, 84, 84), dtype=torch.uint8))
    assert features.shape == (2, 3136)
    pmf = network.log_pmf(features, network.heads()).exp()
    assert pmf.shape == (2, 3, 5)
    torch.testing.assert_close(pmf.sum(-1), torch.ones(2, 3))
    with torch.no_grad():
        network.advantage.bias.add_(7.0)  # the same for every action: no change
    again = network.log_pmf(features, network.heads()).exp()
    torch.testing.assert_close(again, pmf)
