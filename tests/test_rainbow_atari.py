"""gb_rainbow_atari.py on real games: what it records, what it computes, what it refuses."""

import csv
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import command, is_one_line, jitted, only_run, play, read_metrics, run_process, spy

import gb_rainbow_atari as script
from gbcore import FrontierEpisodes, PrioritizedReplay, TransitionGraph, categorical_targets

pytestmark = [jitted, pytest.mark.usefixtures("torch_settings")]
SMALL = [
    "--threads", "1", "--learning-starts", "20", "--batch-size", "4", "--eval-episodes", "1",
    "--exploration-steps", "20", "--log-frequency", "10", "--no-cuda", "--curve-episodes", "1",
]  # fmt: skip


def make_learner(num_actions=3, capacity=300, **flags):
    """A learner without transitions."""
    args = script.Args(cuda=False, **flags)
    graph = TransitionGraph(num_actions, (4, 84, 84), frame_stack=True)
    replay = PrioritizedReplay(graph, capacity, args.priority_exponent)
    return script.Learner(args, graph, replay, torch.device("cpu"))


def learner_of(tmp_path, game, steps, **flags):
    """A learner whose replay holds so many random steps of a real game."""
    flags |= {"env_id": game, "total_timesteps": steps, "start_e": 1.0, "end_e": 1.0}
    return play(script, tmp_path, **flags)[0]


# --------------------------------------------------------------------------------------------------
# What is recorded
# --------------------------------------------------------------------------------------------------


def test_no_transition_crosses_a_reset_and_a_lost_life_ends_no_game(tmp_path):
    steps = 900
    learner = learner_of(tmp_path, "breakout", steps)
    replay, graph = learner.replay, learner.graph
    assert graph.check_valid() == []
    assert graph.num_transitions == steps
    before = graph.observations_of(replay.node)  # [steps, 4, 84, 84]
    after = graph.observations_of(replay.next_node)
    # Each observation is the one before, moved on by a frame: a reset would show an empty stack.
    np.testing.assert_array_equal(after[:, :3], before[:, 1:])

    starts = np.append(0, np.flatnonzero(replay.cut[:-1]) + 1)
    assert len(starts) >= 3, "several games were played"
    assert (before[starts, :3] == 0).all(), "a game starts from an empty stack"
    continues = np.flatnonzero(~replay.cut[:-1])
    np.testing.assert_array_equal(replay.next_node[continues], replay.node[continues + 1])

    # Five lives a game: each loss is a done transition, and only the fifth is followed by a cut.
    for first, last in zip(starts[:-1], starts[1:] - 1, strict=True):
        ends = np.flatnonzero(replay.terminated[first : last + 1])
        assert len(ends) == 5
        assert first + ends[-1] == last
        assert not replay.cut[first + ends[:-1]].any()


def test_a_game_that_is_cut_short_is_no_termination(tmp_path, monkeypatch):
    """As at 108,000 frames, but sooner: pong has no score to end a game by then."""
    make_envs = script.make_envs
    monkeypatch.setattr(
        script,
        "make_envs",
        lambda *args, **options: make_envs(*args, max_num_frames_per_episode=400, **options),
    )
    taken = []
    spy(monkeypatch, FrontierEpisodes, "take_back", taken.append)
    replay = learner_of(tmp_path, "pong", 250, exploration="frontier").replay
    assert len(taken) == 2, "the step that was ignored counts for no episode"
    cuts = np.flatnonzero(replay.cut[:-1])
    assert len(cuts) == 2
    assert not replay.terminated.any()
    starts = replay.graph.observations_of(replay.node[cuts + 1])
    assert (starts[:, :3] == 0).all(), "a game starts from an empty stack"


def test_game_without_lives_ends_once(tmp_path):
    learner = learner_of(tmp_path, "pong", 1100)
    replay = learner.replay
    assert replay.terminated.sum() == replay.cut[:-1].sum() == 1
    assert set(np.unique(replay.reward)) <= {-1.0, 0.0, 1.0}
    assert (replay.reward == -1).any()


def test_rewards_are_clipped_for_training_but_reported_raw(tmp_path):
    learner = learner_of(tmp_path, "alien", 400)  # a dot is worth 10 points
    assert learner.replay.reward.max() == 1.0
    returns, _ = script.evaluate(
        script.Args(eval_envs=2, eval_epsilon=0.0), "alien",
        lambda obs: np.random.default_rng(int(obs.sum())).integers(18, size=len(obs)), 3, 2,
    )  # fmt: skip
    assert min(returns) >= 10


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
    monkeypatch.setattr(script, "make_envs", lambda *_, **__: next(games))
    args = script.Args(eval_envs=2, eval_epsilon=0.0)
    found = script.evaluate(args, "", lambda obs: np.ones(len(obs)), 5, 3)
    assert found == ([9, 9, 2], [9, 9, 2])


def test_video_is_written(tmp_path):
    path = tmp_path / "episode.mp4"
    args = script.Args(eval_epsilon=0.0)
    script.record_video(args, "pong", lambda obs: np.full(len(obs), 2), 1, path)
    assert path.stat().st_size > 10_000


@pytest.mark.parametrize("name", ["Freeway", "freeway", "ALE/Freeway-v5", "FreewayNoFrameskip-v4"])
def test_spellings_of_a_game(name):
    assert script.task_of(name) == "freeway"
    assert script.task_of("MsPacman") == script.task_of("ms_pacman") == "ms_pacman"


def test_all_games_of_the_suite_exist():
    assert len(script.REFERENCE_SCORES) == 26
    for game in script.REFERENCE_SCORES:
        assert script.task_of(game) == game


# --------------------------------------------------------------------------------------------------
# What is computed
# --------------------------------------------------------------------------------------------------


@pytest.fixture(params=script.BACKUPS)
def filled(request):
    """Function of flags: a learner over a random graph of 30 states, and a batch."""

    def make(**flags):
        torch.manual_seed(0)
        rng = np.random.default_rng(0)
        learner = make_learner(backup=request.param, depth=4, breadth=3, **flags)
        graph = learner.graph
        obs = rng.integers(256, size=(30, 4, 84, 84), dtype=np.uint8)
        nodes = [graph.node(o) for o in obs]
        node = nodes[0]
        for _ in range(300):
            next_node = nodes[rng.integers(30)]
            terminated = bool(rng.random() < 0.1)
            action, reward = int(rng.integers(3)), float(rng.integers(3) - 1)
            learner.replay.add(node, action, reward, next_node, terminated)
            node = next_node
            if rng.random() < 0.05:
                learner.replay.end_episode()
        batch = learner.replay.sample(16, rng, 0.4)
        source, rule = script.BACKUPS[request.param]
        depth = 1 if request.param == "one-step" else 4
        return learner, batch, learner.replay.subgraphs(batch, source, depth, 3, rng), rule

    return make


graph_alone = pytest.mark.parametrize("filled", ["graph"], indirect=True)


def whole_targets(learner, subgraphs, rule, online_heads, target_heads):
    """Targets as they are written in the paper: every state evaluated by both networks."""
    obs = learner.observations(subgraphs.nodes)
    with torch.no_grad():
        online, target = learner.online, learner.target
        selector_q = online.log_pmf(online.features(obs), online_heads).exp() @ learner.support
        leaf_pmf = target.log_pmf(target.features(obs), target_heads).exp()
    args = learner.args
    return categorical_targets(
        subgraphs, leaf_pmf, learner.support, args.gamma, rule, selector_q, prior=args.prior
    )


@pytest.mark.parametrize(("frequency", "prior"), [(1, 0.0), (7, 2.0)])
def test_pruned_targets_are_the_targets(filled, frequency, prior):
    flags = {"target_network_frequency": frequency, "prior": prior, "gamma": 0.9}
    learner, _, subgraphs, rule = filled(**flags)
    if frequency > 1:
        with torch.no_grad():
            for parameter in learner.target.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))
    with torch.no_grad():
        heads, target_heads = learner.online.heads(), learner.target.heads()
    whole = whole_targets(learner, subgraphs, rule, heads, target_heads)
    pruned = learner.pruned_targets(subgraphs, rule, heads, target_heads)
    torch.testing.assert_close(pruned, whole, rtol=0, atol=1e-6)
    torch.testing.assert_close(whole.sum(1), torch.ones(16), rtol=0, atol=1e-5)
    assert learner.num_evaluated <= len(subgraphs.nodes)


def test_features_are_read_again_for_some_updates(filled):
    """With the network left alone, old features are what new ones would be."""
    learner, _, subgraphs, rule = filled(leaf_refresh=3)
    heads = learner.online.heads()
    evaluated, targets = [0], []
    for _ in range(4):
        targets.append(learner.pruned_targets(subgraphs, rule, heads, heads))
        evaluated.append(learner.num_evaluated)
    assert np.sign(np.diff(evaluated)).tolist() == [1, 0, 0, 1]
    torch.testing.assert_close(targets[1:], targets[:1] * 3, rtol=0, atol=0)
    learner, *_ = filled()
    torch.testing.assert_close(
        learner.pruned_targets(subgraphs, rule, heads, heads), targets[0], rtol=0, atol=1e-6
    )


@pytest.mark.parametrize(("frequency", "prior"), [(1, 0.0), (2, 1.0)])
def test_updates_of_fixed_shape_are_the_updates(filled, frequency, prior, monkeypatch):
    """What a GPU computes, run here without capture, against what a CPU computes."""
    results, weights, sources = [], [], set()
    spy(monkeypatch, PrioritizedReplay, "subgraphs",
        lambda of, batch, source, *_: sources.add(source))  # fmt: skip
    for padded in (False, True):
        flags = {"target_network_frequency": frequency, "prior": prior, "gamma": 0.9}
        learner, *_ = filled(batch_size=16, **flags)
        sources.clear()
        rng = np.random.default_rng(1)
        learner.padded = padded
        if padded:
            learner.make_room_for_frames()
        torch.manual_seed(1)
        for _ in range(5):
            batch = learner.replay.sample(16, rng, 0.4)
            results.append(learner.update(batch, rng))
        weights.append(torch.cat([p.detach().flatten() for p in learner.online.parameters()]))
    torch.testing.assert_close(results[:5], results[5:], rtol=1e-4, atol=1e-5)
    assert sources == {script.BACKUPS[learner.args.backup][0]}
    # Adam divides by a gradient's size: a difference in its last bit may move a weight by 1e-4.
    assert (weights[0] - weights[1]).abs().mean() < 1e-6


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
        learner.make_room_for_frames()
        rng = np.random.default_rng(1)
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(12):
                batch = learner.replay.sample(16, rng, 0.4)
                results.append(learner.update(batch, rng).cpu())
                obs = learner.graph.observations_of(batch.nodes[:1])
                actions.append(int(learner.act(obs, noisy=True)[0]))
        for calls in (learner.captured, learner.captured_act):
            assert any(plan.graph for plan in calls.plans.values()) == cuda_graphs
    assert actions[:12] == actions[12:]
    torch.testing.assert_close(results[:12], results[12:], rtol=1e-4, atol=1e-5)


def test_frames_on_the_device_follow_the_graph(tmp_path):
    """Also where ids are freed and used again: the replay holds 60 of 200 transitions."""
    learner = learner_of(tmp_path, "breakout", 200, buffer_size=60, padded=True)
    nodes = np.unique(learner.replay.node)
    ids = learner.graph.frame_ids_of(nodes)
    expected = learner.graph.observations_of(nodes)
    assert learner.graph.num_frame_ids < 100, "ids were used again"
    np.testing.assert_array_equal(learner.frames[torch.from_numpy(ids)].numpy(), expected)


def test_bfloat16_is_near_and_of_layers_alone(filled):
    learner, batch, subgraphs, rule = filled()
    heads = learner.online.heads()
    exact = learner.pruned_targets(subgraphs, rule, heads, heads) @ learner.support
    learner, *_ = filled(bf16=True)
    heads = [(weight.bfloat16(), bias.bfloat16()) for weight, bias in heads]
    near = learner.pruned_targets(subgraphs, rule, heads, heads) @ learner.support
    assert not torch.equal(near, exact)
    # Where two actions are nearly equal another one may be chosen: look at the typical error.
    assert (near - exact).abs().median() < 0.02
    assert {weight.dtype for weight, _ in learner.draw_heads()[0]} == {torch.bfloat16}
    assert learner.update(batch, np.random.default_rng(0)).isfinite().all()
    assert {parameter.dtype for parameter in learner.online.parameters()} == {torch.float32}


@graph_alone
def test_update_moves_the_prediction_towards_the_target(filled):
    (learner, batch, *_), rng = filled(gamma=0.0), np.random.default_rng(0)
    first = learner.update(batch, rng)[-2]  # the loss
    for _ in range(15):
        last = learner.update(batch, rng)[-2]  # the loss
    assert last < first


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("max_grad_norm", [10.0, 1e9])
def test_gradients_are_clipped_to_the_norm_and_left_alone_below_it(max_grad_norm, padded):
    torch.manual_seed(0)
    learner = make_learner(max_grad_norm=max_grad_norm)
    learner.padded, online = padded, learner.online
    parameters, heads = list(online.parameters()), online.heads()
    obs = torch.randint(256, (4, 4, 84, 84), dtype=torch.uint8)
    targets, actions = torch.eye(51)[:4], torch.tensor([0, 1, 2, 0])
    weights = torch.full((4,), 1e4)
    log_pmf = online.log_pmf(online.features(obs), heads)[torch.arange(4), actions]
    loss = (weights * -(targets * log_pmf).sum(dim=1)).mean()
    whole = torch.autograd.grad(loss, parameters, retain_graph=True)
    norm = sum(gradient.double().square().sum().item() for gradient in whole) ** 0.5
    learner.step(heads, targets, obs, actions, weights)
    clipped = [parameter.grad for parameter in parameters]
    assert 10 < norm < 1e9
    if norm < max_grad_norm:
        assert all(map(torch.equal, clipped, whole))
    else:  # torch sums millions of squares in float32
        expected = [gradient * (max_grad_norm / norm) for gradient in whole]
        torch.testing.assert_close(clipped, expected, rtol=1e-5, atol=0)


@graph_alone
def test_target_network_is_copied_when_due(filled):
    (learner, batch, *_), rng = filled(target_network_frequency=2), np.random.default_rng(0)

    def same():
        pairs = zip(learner.online.parameters(), learner.target.parameters(), strict=True)
        return all(torch.equal(a, b) for a, b in pairs)

    learner.update(batch, rng)
    assert not same()
    learner.update(batch, rng)
    assert same()


def test_acting_on_the_graph_where_it_knows_the_state():
    learner = make_learner(act_on="graph", gamma=0.9)
    graph, replay, network_says = learner.graph, learner.replay, learner.values
    obs = np.random.default_rng(0).integers(256, size=(4, 4, 84, 84), dtype=np.uint8)
    nodes = [graph.node(one) for one in obs]
    for action, reward in enumerate((-5.0, 5.0, -5.0)):
        replay.add(nodes[0], action, reward, nodes[1], True)
    asked = []
    learner.values = lambda obs, noisy=False: asked.append(len(obs)) or network_says(obs, noisy)
    learner.act(obs)
    assert asked == [4], "before an update nothing is known"
    learner.graph_values.update()
    asked.clear()
    assert learner.act(obs)[0] == 1
    assert asked == [3], "where nothing was tried, the network decides"


def test_targets_of_the_whole_graph_are_point_masses_at_its_values(monkeypatch):
    """Four steps to a reward: further than a target of one step, or the network, sees."""
    learner = make_learner(depth=0, gamma=0.5, prior=0.0)
    graph, replay, rng = learner.graph, learner.replay, np.random.default_rng(0)
    obs = rng.integers(256, size=(5, 4, 84, 84), dtype=np.uint8)
    nodes = [graph.node(one) for one in obs]
    for i in range(4):
        for action in range(3):  # nothing is left to the network
            replay.add(nodes[i], action, float(i == 3), nodes[i + 1], i == 3)
    seen = []
    step = learner.step
    monkeypatch.setattr(learner, "step", lambda *args: seen.append(args[1]) or step(*args))
    batch = replay.sample(64, rng, 1.0)
    errors = learner.update(batch, rng)[:-2]
    expected = 0.5 ** (3.0 - batch.nodes)
    torch.testing.assert_close(seen[0] @ learner.support, torch.tensor(expected).float())
    assert ((seen[0] > 0).sum(dim=1) <= 2).all(), "a point between two atoms, or on one"
    assert (errors > 0).all()
    assert learner.num_evaluated == 5
    learner.num_updates = 8_000
    learner.update(batch, rng)
    assert learner.num_evaluated == 10, "leaf values are taken anew"


@pytest.mark.parametrize("leaf_refresh", [1, 3])
def test_batch_without_a_state_to_evaluate(leaf_refresh):
    learner = make_learner(leaf_refresh=leaf_refresh)
    node = learner.graph.node(np.zeros((4, 84, 84), np.uint8))
    learner.replay.add(node, 0, 1.0, node, True)
    batch = learner.replay.sample(4, np.random.default_rng(0), 1.0)
    subgraphs = learner.replay.subgraphs(batch, "graph", 3)
    heads = learner.online.heads()
    targets = learner.pruned_targets(subgraphs, "double", heads, heads)
    expectation = targets @ learner.support
    torch.testing.assert_close(expectation, torch.ones(4), rtol=0, atol=1e-5)


def test_noisy_layer_is_factorised_noise_on_its_means():
    torch.manual_seed(0)
    layer = script.NoisyLinear(50, 40, 0.5)
    draws = [layer.sample() for _ in range(400)]
    weights = torch.stack([weight for weight, _ in draws]).detach()
    noise = (weights - layer.weight) / layer.weight_std
    assert torch.linalg.matrix_rank(noise[0]) == 1
    # E[f(x)^2] = E|x| for each factor: the variance of a product of two is 2 / pi.
    assert noise.mean().abs() < 0.02
    assert abs(noise.var().item() - 2 / np.pi) < 0.05


def test_noise_in_factors_is_the_noise_in_the_weights():
    network = script.RainbowNetwork(script.Args(), 3)
    features = torch.rand(5, 3136)
    with torch.no_grad():
        torch.manual_seed(0)
        formed = network.log_pmf(features, network.heads())
        state = torch.get_rng_state()
        torch.manual_seed(0)
        factored = network.log_pmf(features, network.factored_heads())
    assert torch.equal(torch.get_rng_state(), state), "as many draws, in the same order"
    torch.testing.assert_close(factored, formed, rtol=0, atol=1e-5)
    assert not torch.allclose(formed, network.log_pmf(features, network.heads(False)), atol=1e-3)


def test_duelling_heads_subtract_the_mean_advantage():
    network = script.RainbowNetwork(script.Args(n_atoms=5), 3)
    features = network.features(torch.randint(256, (2, 4, 84, 84), dtype=torch.uint8))
    assert features.shape == (2, 3136)
    pmf = network.log_pmf(features, network.heads(noisy=False)).exp()
    assert pmf.shape == (2, 3, 5)
    torch.testing.assert_close(pmf.sum(-1), torch.ones(2, 3))
    with torch.no_grad():
        network.advantage.bias.add_(7.0)  # the same for every action: no change
    again = network.log_pmf(features, network.heads(noisy=False)).exp()
    torch.testing.assert_close(again, pmf)


# --------------------------------------------------------------------------------------------------
# The command
# --------------------------------------------------------------------------------------------------


RUN = [
    "--env-id", "Breakout", "--total-timesteps", "40", *SMALL, "--eval-frequency", "20",
    "--eval-epsilon", "1",
]  # fmt: skip


@pytest.mark.parametrize("backup", ["one-step", "n-step", "tree", "graph-mixed"])
def test_same_seed_same_metrics(backup, tmp_path):
    runs = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        assert command(script, *RUN, "--backup", *backup.split(), "--run-dir", folder) == 0
        runs.append(only_run(folder))
    assert read_metrics(runs[0]) == read_metrics(runs[1])
    assert len(read_metrics(runs[0])) == 4
    result = json.loads((runs[0] / "result.json").read_text())
    assert result["steps"] == 40
    assert result["human_normalized_score"] == (result["score"] - 1.7) / 28.8
    with (runs[0] / "evaluations.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["global_step"] for row in rows] == ["20", "40"], "the last one is not done twice"
    assert result["score"] == float(rows[-1]["episodic_return"])
    names = {path.name for path in runs[0].iterdir()}
    assert {"config.json", "evaluations.csv", "model.pt", "graph.npz"} <= names
    assert any(name.startswith("events.out.tfevents") for name in names)
    graph = TransitionGraph.load(runs[0] / "graph.npz")
    assert graph.num_transitions == 40
    assert graph.check_valid() == []


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--env-id", "Freewy"], ["Freewy", "freeway"]),
        (["--n-atoms", "1"], ["--n-atoms", "1"]),
        (["--v-min", "3", "--v-max", "3"], ["--v-min", "3.0"]),
        (
            ["--leaf-refresh", "2", "--target-network-frequency", "2"],
            ["--leaf-refresh", "--target-network-frequency 1"],
        ),
        (["--leaf-refresh", "0"], ["--leaf-refresh", "at least 1"]),
    ],
)
def test_bad_input_is_one_line_and_status_2(flags, words, capsys):
    assert command(script, *flags) == 2
    assert is_one_line(capsys, *words)


def test_a_gpu_reads_no_old_features(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert command(script, "--cuda", "--leaf-refresh", "2") == 2
    assert is_one_line(capsys, "--leaf-refresh", "--no-cuda")


def test_a_process_of_its_own(tmp_path):
    """It learns what this process learns."""
    assert command(script, *RUN, "--run-dir", tmp_path / "here") == 0
    run_process(script, *RUN, "--run-dir", tmp_path / "there")
    here, there = (read_metrics(only_run(tmp_path / folder)) for folder in ("here", "there"))
    assert here == there
