"""tools/: what is read from runs, measured on graphs, laid out and drawn."""

import html
import itertools
import re
import shlex
import shutil
import sys
from pathlib import Path
from unittest.mock import Mock

import conftest
import draw_subgraph
import evaluate
import gymnasium
import networkx
import numpy as np
import pytest
import tyro
import would_it_help
from conftest import ROOT, command, is_one_line, jitted, refuses, short_run
from gbtools import measures, play, recorded

import gb_dqn_minatar
import gb_dqn_minigrid
import gb_rainbow_atari
from gbcore import Replay, TransitionGraph
from gbcore.run import load_checkpoint, save_checkpoint
from gbcore.run.flags import check_flags

pytestmark = [jitted, pytest.mark.usefixtures("torch_settings")]


def recorded_rows(rows):
    """`Recorded` of rows (s, a, r, s2, terminated, cut) whose observations are [s]."""
    graph = TransitionGraph(2, (1,), np.int64)
    replay = Replay(graph, len(rows))
    for s, a, r, s2, terminated, cut in rows:
        replay.record([s], a, r, [s2], terminated, cut)
    columns = {name: getattr(replay, name) for name in recorded.COLUMNS}
    return recorded.Recorded("rows", graph, columns)


def played(task, steps):
    """`Recorded` of random steps of a task."""
    suite, name = play.suite_of(task)
    stream = play.stream(suite, name, np.random.default_rng(0))
    return play.record_by_keys(*stream, steps, name, {"": lambda obs, action: obs})[""]


# Two episodes from 0 and from 10 that meet in 2; 3 has a loop that once leads away.
CROSSING = [(s, 0, 0.0, s2, False, False) for s, s2 in ((0, 1), (1, 2), (2, 3), (3, 3))]
CROSSING += [(3, 0, 0.0, 4, False, True)]
CROSSING += [(10, 0, 0.0, 2, False, False), (2, 1, 1.0, 20, True, True)]


def test_crossovers_of_a_small_graph():
    measured = measures.crossovers(recorded_rows(CROSSING).graph)
    for name in ("crossed", "self_loops", "rewarded"):
        assert measured[name] == pytest.approx(1 / 7)  # crossed: state 2 of 0 1 2 3 4 10 20
    measured = measures.crossovers(recorded_rows(CROSSING + CROSSING[:1] * 13).graph)
    assert measured["self_loops"] == measured["rewarded"] == pytest.approx(1 / 20)  # of steps


def test_targets_differ_from_tree_backup_only_through_crossovers():
    rng = np.random.default_rng(0)
    chain = recorded_rows([(i, 0, 0.0, i + 1, False, i == 9) for i in range(10)])
    same = measures.target_changes(chain.graph, chain.replay, 3, 0, rng, num_rows=40)
    assert same == {"unlike_tree": 0, "missed": 0}
    # Rows 0, 1 and 2 meet or leave state 2; only row 0 and 1 hear of the other episode's reward.
    run, rows = recorded_rows(CROSSING), []
    first = Mock(standard_normal=rng.standard_normal)
    first.integers = lambda n, size: np.zeros(size, np.int64)
    for i in range(len(CROSSING)):
        replay = {name: column[i:] for name, column in run.replay.items()}
        rows.append(measures.target_changes(run.graph, replay, 3, 0, first, num_rows=1))
    assert [i for i, row in enumerate(rows) if row["missed"]] == [0, 1]
    assert rows[6]["unlike_tree"] == 0  # the end of an episode
    assert rows[5]["unlike_tree"] == 1


def chain_with_memory(remember):
    """Rows of a walk whose next state depends on the state alone, or on the one before as well."""
    rng = np.random.default_rng(0)
    before, state, rows = 0, 0, []
    for step in range(3_000):
        odd = (before if remember else rng.integers(2)) % 2
        following = (state + 1 + int(odd)) % 6 if rng.random() < 0.9 else int(rng.integers(6))
        following = (state + 1) % 6 if following == state else following
        rows.append((state, 0, 0.0, following, False, step == 2_999))
        before, state = state, following
    return recorded_rows(rows)


def test_markov_is_found_where_there_is_some():
    rng = np.random.default_rng(1)
    hidden = measures.markov_violation(chain_with_memory(True).replay, rng)
    plain = measures.markov_violation(chain_with_memory(False).replay, rng)
    assert hidden["p"] < 0.05
    assert hidden["explained"] > 0.1
    assert plain["p"] > 0.05
    assert abs(plain["explained"]) < 0.02
    deterministic = recorded_rows([(i % 3, 0, 0.0, (i + 1) % 3, False, i == 8) for i in range(9)])
    assert measures.markov_violation(deterministic.replay, rng)["p"] == 1.0


@pytest.mark.parametrize(
    ("task", "verdict", "changes"),
    [
        ("CartPole-v1", "No:", False),
        ("FrozenLake-v1", "Worth trying:", False),
        ("examples.mazes:Maze-v0", "", True),
    ],
)
def test_any_gymnasium_environment_gets_a_verdict_and_levels_that_change_are_told(
    task, verdict, changes
):
    run = played(task, 1_500)
    assert run.graph.num_transitions == len(run.replay["node"]) == 1_500
    assert run.replay["cut"][-1]
    flags = {"depth": 3, "breadth": 10}
    measured = would_it_help.measure(run, flags, 20, np.random.default_rng(0))
    assert measured["levels_change"] == changes
    advised = would_it_help.command(measured, "gymnasium", "Maze-v0", {})
    assert ("--num-levels 0" in advised) == changes
    failing, text = would_it_help.judge(measured)
    assert text.startswith(verdict)
    assert (measured["novel_state_ratio"] > 0.99) == (task == "CartPole-v1")
    assert any("real numbers" in line for line in failing) == (task == "CartPole-v1")
    if verdict == "Worth trying:":
        assert "20.0% are higher" in would_it_help.judge(measured | {"missed": 0.2})[1]


CROSSES = {"unlike_tree": 0.9, "acted_in": 9, "rewarded": 0.0, "levels_change": False}


@pytest.mark.parametrize("suite", play.SUITES)
@pytest.mark.parametrize("changed", [0.9, 0.2, 0.0])
def test_the_advised_command_is_one_that_its_script_takes(suite, changed):
    is_own = suite == "gymnasium"
    more = {"env_kwargs": '{"size": 7}'} if is_own else {}
    measured = CROSSES | {"unlike_tree": changed}
    typed = would_it_help.command(measured, suite, "Task v0", more, "--round=-1" if is_own else "")
    python, script, *words = shlex.split(typed)
    args = tyro.cli(play.script_of(suite).Args, args=words)
    check_flags(args)
    assert (python, args.env_id) == ("python", "Task v0")
    assert (ROOT / script).is_file()
    whole = changed == 0.9 and suite in ("minigrid", "minatar")  # gymnasium: flag is a --round
    assert args.backup == ("whole-graph" if whole else "graph" if changed else "tree")
    explores = args.exploration == "frontier"
    assert explores == (suite in ("minigrid", "gymnasium") and changed == 0.9)
    if is_own:
        assert args.env_kwargs == '{"size": 7}'
        assert args.round == (-1 if changed else None)  # of no use to tree


def test_a_rare_reward_is_still_to_be_found():
    measured = CROSSES | {"rewarded": 0.00005}
    assert "--exploration frontier" in would_it_help.command(measured, "gymnasium", "Lock-v0", {})
    measured["rewarded"] = 0.01
    assert "frontier" not in would_it_help.command(measured, "gymnasium", "Lock-v0", {})


def test_levels_change_where_episodes_share_no_state():
    def told(first_of):
        rows = [
            (first_of(i) + s, first_of(i) + s2, s2) for i in range(12) for s, s2 in ((0, 1), (1, 0))
        ]
        rows = [(s, 0, 0.0, s2, False, cut == 0) for s, s2, cut in rows]
        return measures.levels_change(recorded_rows(rows).replay)

    assert told(lambda i: 2 * i)
    assert not told(lambda i: 2 * (i % 6))  # each comes twice
    assert not told(lambda i: 0)


def test_the_suite_of_a_task_is_told_by_its_name():
    assert play.suite_of("minigrid:MiniGrid-Empty-5x5-v0")[0] == "minigrid"
    assert play.suite_of("ale_py:ALE/Pong-v5") == ("atari", "pong")
    assert play.suite_of("Taxi") == play.suite_of("taxi") == ("gymnasium", "Taxi-v4")
    assert play.suite_of("doorkey_6x6") == ("minigrid", "MiniGrid-DoorKey-6x6-v0")


def test_a_key_passes_where_it_can_be_judged_and_what_was_found_does_not_speak_against_it():
    plain = {"states": 90, "acted_in": 90, "self_loops": 0.3, "judged": 0.9}
    plain |= {"explained": 0.0, "p": 1.0, "transitions": 300, "unlike_tree": 0.0}
    coarse = plain | {"states": 9, "explained": 0.002, "p": 0.001}
    bad = {
        "not Markovian": plain | {"states": 3, "explained": 0.3, "p": 0.001},
        "too few repetitions": plain | {"states": 3, "judged": 0.6},  # 180 rows
        "one state": plain | {"states": 2, "acted_in": 1},
        "too coarse": plain | {"states": 3, "self_loops": 0.6},
    }
    by_key = {would_it_help.PLAIN: plain, "coarse": coarse} | bad
    assert would_it_help.coarsest(by_key) == "coarse"
    assert would_it_help.coarsest(bad | {would_it_help.PLAIN: bad["one state"]}) is None
    assert all(would_it_help.objection(measured) == name for name, measured in bad.items())
    near = {f"of {n}": bad["not Markovian"] | {"states": n, "unlike_tree": 0.9} for n in (50, 40)}
    near["still"] = near["of 40"] | {"self_loops": 0.6, "states": 30}
    near[would_it_help.PLAIN] = plain
    assert would_it_help.coarsest(near, "not Markovian") == "of 40"
    still = {would_it_help.PLAIN: plain | {"self_loops": 0.7}, "coarse": bad["too coarse"]}
    assert would_it_help.coarsest(still) == "coarse"  # states are as still as without a key


def keys_of(*obs):
    """Functions of the keys to try for these observations, one after the other."""
    rows = [(a, 0, 0.0, b, False, False) for a, b in itertools.pairwise(map(np.asarray, obs))]
    return would_it_help.keys_for(rows)


@pytest.mark.parametrize(
    ("most", "dtype", "flags"),
    [
        (0.009, np.float32, ["5", "4", "3"]),
        (2.4, np.float64, ["2", "1", "0"]),
        (4_000, np.float32, ["-1", "-2", "-3"]),
        (4_000, np.int32, []),
    ],
)
def test_rounding_follows_the_range(most, dtype, flags):
    values = np.linspace(0, most, 500).astype(dtype)
    keys = keys_of(*values[:, None])
    assert [key.removeprefix("--round=") for key in keys if "round" in key] == flags
    assert ("--key-last-action" in keys) == (dtype == np.int32)
    if flags:
        coarse = [keys[f"--round={flags[-1]}"](value, 0) for value in values[:, None]]
        assert 3 <= len({key.tobytes() for key in coarse}) <= 11
        assert np.all(np.diff(np.array(coarse).ravel()) >= 0)  # 255 is not rounded to 4
    minus, plus = (
        keys_of([0.0], [2.4], [0.0])["--round=1"](np.array([x]), 0) for x in (-0.01, 0.04)
    )
    assert minus.tobytes() == plus.tobytes()


class Clock(gymnasium.Env):
    """Five hours, written into one array; hidden ones show the same number all the time."""

    observation_space = gymnasium.spaces.Box(0, 5, (1,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, is_hidden):
        self.is_hidden = is_hidden

    def reset(self, seed=None, options=None):
        self.time, self.shown = 0, np.zeros(1, np.float32)
        return self.shown, {}

    def step(self, action):
        self.time += 1
        self.shown += not self.is_hidden
        return self.shown, float(self.time == 4 and action), self.time == 5, False, {}


def test_an_environment_may_write_into_the_observation_that_it_gave():
    gymnasium.register("Clock-v0", Clock, kwargs={"is_hidden": False})
    run = played("Clock-v0", 60)
    assert run.graph.num_nodes == 6
    assert (run.replay["node"] != run.replay["next_node"]).all()


def test_what_never_changes_gets_no_advice_to_try(capsys):
    gymnasium.register("Hidden-v0", Clock, kwargs={"is_hidden": True})
    for task, verdict in (
        ("Hidden-v0", "verdict: No: where all observations are alike"),
        ("CartPole", "verdict: No: at this depth"),
    ):
        assert command(would_it_help, task, "--steps", "300", "--sampled", "20") == 0
        text = capsys.readouterr().out
        assert verdict in text
        assert text.endswith("--backup tree\n")
        assert ("\nkey: " in text) == (task == "CartPole")
        assert "Worth trying" not in text
    assert command(would_it_help, "CartPole", "--steps", "3") == 0
    assert capsys.readouterr().out.endswith("verdict: No verdict: require 200 steps, got 3.\n")
    words = "MinAtar/freeway", "--env-kwargs", "{}"
    assert refuses(capsys, would_it_help, words, "--env-kwargs is for")


def test_streams_of_the_scripts_tasks():
    shapes = {"DoorKey-5x5": (5, 5, 3), "MinAtar/freeway": (10, 10, 7), "ALE/pong": (4, 84, 84)}
    for task, shape in shapes.items():
        run = played(task, 60)
        assert run.graph.obs_shape == shape
        linked = run.replay["next_node"][:-1] == run.replay["node"][1:]
        assert linked[~run.replay["cut"][:-1]].all()


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A finished run of 300 steps."""
    words = "--env-id Empty-5x5 --total-timesteps 300 --learning-starts 200 --train-frequency 20"
    return short_run(gb_dqn_minigrid, tmp_path_factory.mktemp("runs"), *words.split())


def test_a_run_is_read_from_its_checkpoint(run_folder):
    run = recorded.read(run_folder)
    assert run.script == ROOT / "gb_dqn_minigrid.py"
    assert run.task == "MiniGrid-Empty-5x5-v0"
    assert len(run.initial_states) == 1  # one layout, one start
    assert run.graph.num_transitions == run.steps == 300
    assert run.q_values(np.arange(3)).shape == (3, 7)
    assert run.action_names()[2] == "forward"


def test_tools_load_the_script_that_made_a_run(run_folder, tmp_path, capsys):
    """A copy under another name; what there is no whole checkpoint of is one line."""
    script = shutil.copy(ROOT / "gb_dqn_minigrid.py", tmp_path / "my_agent.py")
    copy = shutil.copytree(run_folder, tmp_path / "run")
    tree = load_checkpoint(copy)
    tree["flags"]["script"] = str(script)
    save_checkpoint(copy, tree)
    run, own = recorded.read(copy), recorded.read(run_folder)
    assert (run.action_names()[2], run.module.__file__) == ("forward", str(script))
    assert (run.q_values(np.arange(3)) == own.q_values(np.arange(3))).all()
    (copy / "checkpoint.zip").write_bytes(b"PK nothing")
    for tool in (evaluate, would_it_help, draw_subgraph):
        assert refuses(capsys, tool, [copy], "Require a whole checkpoint")
        missing = "a checkpoint (--checkpoint-frequency), got runs/none"
        assert refuses(capsys, tool, ["runs/none"], missing)


def test_a_trained_network_plays_on(run_folder, tmp_path, capsys, monkeypatch):
    run = recorded.read(run_folder)
    args = evaluate.Args(run_folder, episodes=3, epsilon=0, seed=5)
    returns, lengths = evaluate.play(run, args, run.policy())
    task = gb_dqn_minigrid.Task(run.task, run.args, None)
    obs, rewards, over = task.reset(), [], False
    while not over:
        node = np.array([run.graph.find(obs)])
        action = run.q_values(node)[0].argmax() if node[0] >= 0 else run.policy()(obs[None])[0]
        obs, reward, terminated, truncated = task.step(int(action))
        rewards.append(reward)
        over = terminated or truncated
    assert returns == [sum(rewards)] * 3  # one layout, nothing random
    assert lengths == [len(rewards)] * 3
    ways = [evaluate.Args(run_folder, 2, epsilon=1, seed=seed) for seed in (5, 5, 6)]
    random = [evaluate.play(run, args, run.policy())[1] for args in ways]
    assert random[0] == random[1] != random[2]
    video = tmp_path / "episode.mp4"
    assert command(evaluate, run_folder, "--episodes", "2", "--video", video) == 0
    assert video.stat().st_size > 0
    assert f"{run.task} graph seed 1: mean return" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    for words, named in (
        (["--video", video], ["pip install imageio-ffmpeg"]),
        (["--env-kwargs", "{}"], ["--env-kwargs is no flag of"]),
        (["--video", "none/e.mp4"], ["--video", "none/e.mp4"]),
    ):
        assert refuses(capsys, evaluate, [run_folder, *words], *named)


def test_what_acts_on_its_graph_plays_on_so_and_is_looked_at_at_its_depth(tmp_path, capsys):
    flags = {"env_id": "breakout", "backup": "whole-graph", "learning_starts": 50}
    flags |= {"total_timesteps": 400, "target_network_frequency": 100}
    learner, folder = conftest.play(gb_dqn_minatar, tmp_path, **flags)
    run, nodes = recorded.read(folder), np.unique(learner.replay.node)
    obs = learner.graph.observations_of(nodes)
    np.testing.assert_array_equal(run.policy()(obs), learner.policy()(obs))
    assert (learner.policy()(obs) != learner.act_on_network(obs)).any()
    assert (run.state_values(nodes) != run.q_values(nodes).max(axis=1)).any()
    capsys.readouterr()
    for tool, *words in ((would_it_help, "--sampled", "20"), (draw_subgraph,)):
        assert command(tool, folder, *words) == 0
        out = capsys.readouterr().out
        assert re.search(r"\bdepth 5\b", out)
        assert ("; the run learned from other targets" in out) == (tool is draw_subgraph)


def test_a_trained_rainbow_plays_games_of_their_own_seed(monkeypatch):
    own, instead = gb_rainbow_atari.Args(eval_envs=3), Mock(return_value=([1.0], [1]))
    run = Mock(module=gb_rainbow_atari, task="freeway", args=own)
    monkeypatch.setattr(gb_rainbow_atari, "evaluate", instead)
    for seed in (0, 0, 1):
        evaluate.play(run, evaluate.Args(Path("run"), episodes=7, seed=seed), run.policy())
    one, same, other = (call.args for call in instead.call_args_list)
    assert one == same == (own, "freeway", run.policy(), one[3], 7)
    seeds = one[3], other[3], [own.seed, own.total_timesteps]
    assert len({np.random.default_rng(seed).integers(2**31) for seed in seeds}) == 3


@pytest.fixture
def nested(run_folder):
    """What one target of the run reads."""
    run = recorded.read(run_folder)
    pair = (int(run.replay[name][7]) for name in ("node", "action"))
    return draw_subgraph.Nested(run, draw_subgraph.Args(run_folder, depth=3, breadth=0), *pair)


def test_printed_sums_add_up(nested):
    lines = list(nested.sums())
    assert lines[0].startswith("level 0: G(")
    for line in lines:
        _, value, terms = line.split(" = ", 2)
        numbers = re.findall(r"([\d.e-]+) \+ 0\.95 \w+\(\d+: [\w-]+\) (-?[\d.]+)", terms)
        ((reward, following),) = numbers  # MiniGrid: one outcome each
        assert float(value) == pytest.approx(float(reward) + 0.95 * float(following), abs=2e-4)
    assert len(lines) == 3


def test_texts_are_drawn_as_they_were_typed(nested, tmp_path):
    odd = r"<b>$a_b$</b> \N &amp; \G\\"
    nested.names = [odd] * len(nested.names)
    draw_subgraph.draw(nested, f"{odd}\nmore", tmp_path / "a.svg")
    drawn = html.unescape((tmp_path / "a.svg").read_text()).replace("\xa0", " ")
    assert f">{odd}<" in drawn  # the title's line
    assert f", {odd})" in drawn


def test_a_subgraph_is_drawn_from_the_first_state_or_another(run_folder, tmp_path, capsys):
    pytest.importorskip("pygraphviz", reason="pip install -r requirements-draw.txt")
    picture = tmp_path / "s.png"
    assert command(draw_subgraph, run_folder, "--out", picture) == 0
    start = recorded.read(run_folder).replay["node"][0]
    assert f"graph backup's target of ({start}, " in capsys.readouterr().out
    assert picture.stat().st_size > 5_000
    assert command(draw_subgraph, run_folder, "--state", start, "--action", "toggle") == 0
    assert f"({start}, toggle)" in capsys.readouterr().out
    words = run_folder, "--action", "jump"
    assert refuses(capsys, draw_subgraph, words, "no action 'jump'", "forward")
    assert refuses(capsys, draw_subgraph, [run_folder, "--state", "999"], "no state 999")


def test_the_layouts_and_their_pictures(run_folder, tmp_path, capsys):
    pytest.importorskip("pygraphviz", reason="pip install -r requirements-draw.txt")
    import draw_graph

    run = recorded.read(run_folder)
    layout = draw_graph.lay_out(run, layout="rings")
    edges, nodes = layout.edges, layout.nodes
    ring = np.rint(np.hypot(nodes.x, nodes.y)).astype(int)
    links = networkx.Graph(zip(edges["source"], edges["next"], strict=True))
    lengths = networkx.multi_source_dijkstra_path_length(links, {*nodes.index[nodes.initial]})
    assert ring.to_dict() == {node: 1 + length for node, length in lengths.items()}
    springs = draw_graph.lay_out(run)  # what few states get by themselves
    assert (len(layout.centre), len(springs.centre)) == (1, 0)
    xy = springs.nodes[["x", "y"]]
    gaps = xy.loc[edges["source"]].to_numpy() - xy.loc[edges["next"]].to_numpy()
    far = np.hypot(*(xy.to_numpy()[:, None] - xy.to_numpy()).transpose(2, 0, 1))
    apart = np.hypot(*gaps[edges["source"] != edges["next"]].T)
    assert apart.mean() < 0.5 * far.mean()
    part = draw_graph.lay_out(run, max_states=10)
    assert len(part.nodes) == 10
    assert run.initial_states[0] in part.nodes.index
    assert "the 10 of" in part.title
    outs = [tmp_path / f"graph{suffix}" for suffix in (".png", ".svg", ".graphml")]
    assert command(draw_graph, run_folder, "--out", *outs, "--color-by", "value") == 0
    assert all(path.stat().st_size > 5_000 for path in outs)
    assert "novel state ratio" in capsys.readouterr().out
    assert layout.title.startswith("MiniGrid-Empty-5x5-v0, graph backup: ")
    assert layout.title.endswith("distinct transitions in 300 steps")
    read, known = networkx.read_graphml(outs[2], node_type=int), run.graph.edges()
    assert sorted(read.nodes) == nodes.index.tolist()
    known["action"] = np.array(run.action_names())[known["action"]]
    columns = "action", "reward", "terminated", "count"
    edges = [(s, n, *(about[name] for name in columns)) for s, n, about in read.edges(data=True)]
    expected = zip(*(known[name].tolist() for name in ("source", "next", *columns)), strict=True)
    assert sorted(edges) == sorted(expected)
    value = run.q_values(nodes.index.to_numpy()).max(axis=1)
    written = [read.nodes[state]["value"] for state in nodes.index]
    np.testing.assert_allclose(written, value, rtol=1e-6)


def test_what_no_tool_takes_is_one_line(capsys):
    for call, *words in (
        (lambda: play.suite_of("freeway"), "MinAtar/freeway", "ALE/freeway"),
        (lambda: play.suite_of("CartPol-v1"), "nearest: CartPole-v1"),
        (lambda: play.stream("gymnasium", "Pendulum-v1", None), "Discrete"),
    ):
        with pytest.raises(SystemExit, match="2"):
            call()
        assert is_one_line(capsys, "error: ", *words)
