"""The small commands behind single figures and pictures, on small input."""

import functools
import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import plot_runs
import pytest
import released_updates
import report
import speed
import sweep
import timings
from conftest import command, jitted, run_process, spy
from folders import ROOT
from gbtools.output import read_rows
from gbtools.play import script_of
from gbtools.runs import read_returns, words_of
from run_records import SUITES
from test_dqn_scripts import make_learner
from test_sweep import make_run

import gb_dqn_minigrid as minigrid
from gbcore import Replay, TransitionGraph
from gbcore.run.flags import read_flags


def test_a_learning_curve_is_the_mean_of_its_seeds(tmp_path, capsys):
    make_run(krull := tmp_path / "krull", "atari100k", env_id="krull")
    ((_, seeds),) = plot_runs.read_settings([krull])
    steps, means, errors = plot_runs.curve_of(seeds)
    assert steps.tolist() == [1000, 2000, 3000]
    assert means.tolist() == [0.0, 0.5, 1.0]
    # Of two episodes, 0.25 from their mean: a deviation of 0.25 * 2 ** 0.5, over 2 ** 0.5.
    assert errors == pytest.approx([0.25] * 3)
    runs = [tmp_path / f"doorkey_{seed}" for seed in (1, 2, 3)]
    for seed, run in enumerate(runs, 1):
        make_run(run, env_id="DoorKey-6x6", seed=seed, returns=(0.0, float(seed)))
    ((_, seeds),) = plot_runs.read_settings(runs)
    assert sorted(seeds) == [1, 2, 3]
    steps, means, errors = plot_runs.curve_of(seeds)
    assert means.tolist() == [0.0, 2.0]
    assert errors == pytest.approx([0.0, 1 / 3**0.5])  # of three seeds, whose deviation is 1
    picture = tmp_path / "krull.png"
    assert command(plot_runs, krull, *runs, "runs/TYPO", "--out", picture) == 0
    assert capsys.readouterr().out == f"wrote {picture}\n"
    assert picture.stat().st_size > 0


@pytest.mark.parametrize("tool", ["plot_runs", "draw_graph", "draw_subgraph"])
def test_pictures_need_no_backend_of_a_notebook(tool):
    backend = "module://matplotlib_inline.backend_of_a_notebook"
    run_process(ROOT / "tools" / f"{tool}.py", "--help", MPLBACKEND=backend)


@pytest.mark.parametrize("number", [1, 4, 5, 12])
def test_a_legend_leaves_the_curves_their_room(number, monkeypatch, tmp_path):
    for i in range(number):
        make_run(tmp_path / f"run_{i}", env_id="DoorKey-6x6", learning_rate=0.001 * (1 + i))
    figures = []
    spy(monkeypatch, plot_runs, "write_figure", lambda figure, path: figures.append(figure))
    assert command(plot_runs, tmp_path, "--out", tmp_path / "curves.png") == 0
    (figure,) = figures
    legend = figure.legends[0] if figure.legends else figure.axes[0].get_legend()
    boxes = [part.get_window_extent() for part in (figure.axes[0], legend, figure)]
    axes, of_legend, whole = boxes
    assert bool(figure.legends) == (number > plot_runs.INSIDE)
    assert of_legend.width <= whole.width
    assert axes.width > 0.8 * whole.width
    assert axes.height > 240


def test_a_row_that_a_full_disk_cut_is_left_out(tmp_path):
    make_run(run := tmp_path / "run")
    whole = read_returns(run)
    with (run / "evaluations.csv").open("a") as file:
        file.write("22000,3")
    assert read_returns(run) == whole


def test_labels_of_curves_are_the_flags_that_differ(tmp_path):
    one = {"env_id": "Empty", "backup": "graph", "depth": 5}
    settings = [
        (one, {1: 0, 2: 0}),
        (one | {"depth": 3}, {1: 0}),
        (one | {"env_id": "Door"}, {1: 0}),
    ]
    single = "(1 seed: error over episodes)"
    assert list(plot_runs.labels(settings)) == [
        "Empty, graph, depth 5 (2 seeds)",
        f"Empty, graph, depth 3 {single}",
        f"Door, graph, depth 5 {single}",
    ]
    assert list(plot_runs.labels(settings[:1])) == ["Empty, graph (2 seeds)"]
    for name in plot_runs.OF_BACKUPS:  # told where it is not the backup's alone
        settings = [({"env_id": "E", "backup": b, name: n}, {1: 0}) for n, b in enumerate("ab")]
        assert list(plot_runs.labels(settings)) == [f"E, a {single}", f"E, b {single}"]
        settings.append(({"env_id": "E", "backup": "b", name: 7}, {1: 0}))
        *_, last = plot_runs.labels(settings)
        assert last == f"E, b, {name.replace('_', ' ')} 7 {single}"
    scripts = map(script_of, ("minigrid", "minatar", "gymnasium"))
    assert set().union(*(script.Args.DEFAULTS for script in scripts)) == plot_runs.OF_BACKUPS
    for name in ("mine", "theirs"):  # copies of a script
        make_run(run := tmp_path / name, env_id="DoorKey-6x6")
        config = json.loads((run / "config.json").read_text())
        (run / "config.json").write_text(json.dumps(config | {"script": f"/a/{name}.py"}))
    found = plot_runs.labels(plot_runs.read_settings([tmp_path]))
    names = [label.split(" (")[0] for label in found]
    assert names == [f"DoorKey-6x6, graph, script {name}" for name in ("mine", "theirs")]


def test_what_cannot_be_plotted_is_one_line(tmp_path, capsys):
    make_run(run := tmp_path / "run")
    (empty := tmp_path / "empty").mkdir()
    for words, named in (
        ((empty, "--out", tmp_path / "x.png"), f"no run with an evaluation in {empty}"),
        ((run, "--out", tmp_path / "x.bmp"), "supported formats: "),
        ((run, "--out", tmp_path / "mine"), "require the name of a picture"),
        ((run, "--out", empty), "require the name of a picture"),
    ):
        assert command(plot_runs, *words) == 2
        *warned, line = capsys.readouterr().err.splitlines()
        assert named in line
        assert warned == [f"warning: no run in {empty}"] * (words[0] == empty)


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        ("--round 1.5", "an integer of at least -9 and at most 9"),
        ("--round=x", "an integer of at least -9 and at most 9"),
        ("--depth 2.5", "an integer of at least 1 and at most 65536"),
        ("--learning-starts 1e-1", "an integer of at least 0 and at most 2147483647"),
        ("--gamma high", "a number of at least 0 and at most 1"),
    ],
)
def test_a_value_that_is_no_number_is_told_with_the_range(words, asked, capsys):
    with pytest.raises(SystemExit) as stopped:
        read_flags(script_of("gymnasium").Args, words.split())
    flag, value = words.replace("=", " ").split()
    told = f"error: {flag} must be {asked}, got {value!r}\n"
    assert (stopped.value.code, capsys.readouterr().err) == (2, told)


@pytest.mark.parametrize("folder", ["tools", "reproduce", "benchmark", "examples"])
def test_commands_outlive_their_output(folder):
    for path in (ROOT / folder).glob("*.py"):
        text = path.read_text()
        if "arguments(Args" in text or "read_flags(Args" in text:
            assert "\n@lasting_output()\ndef main():\n" in text, path
    typed = f"({sys.executable} {ROOT}/tools/evaluate.py --help; echo $? >&2) | true"
    done = subprocess.run(["bash", "-c", typed], capture_output=True, text=True, check=False)
    assert done.stderr == "0\n"


@jitted
def test_targets_are_timed(capsys):
    timings.targets(transitions=200, batches=20)
    assert capsys.readouterr().out.count("\n| ") == 5  # and the header
    timings.curve(1_000, 1_000)
    assert "\n| 1,000 | " in capsys.readouterr().out


def test_values_that_persist_reach_beyond_the_depth():
    """States 0 to 9 in a chain with reward 1 at its end, two levels of which a target reads."""
    learner = make_learner(minigrid, "MiniGrid-Empty-5x5-v0", depth=2, breadth=0)
    shape = learner.graph.obs_shape
    nodes = [learner.graph.node(np.full(shape, i, np.uint8)) for i in range(10)]
    for i in range(9):
        learner.replay.add(nodes[i], 2, float(i == 8), nodes[i + 1], i == 8)
    for parameter in learner.target.parameters():
        parameter.data.zero_()
    batch, rng = learner.replay.batch_of(np.arange(9)), np.random.default_rng(0)
    for _ in range(10):
        _, targets = released_updates.persistent_graph(learner, batch, rng, False)
    np.testing.assert_allclose(targets, 0.95 ** (8 - np.arange(9)), rtol=1e-5)
    learner.update_target()
    np.testing.assert_array_equal(learner.leaves.known, False)


def test_the_released_update_moves_the_last_pair_also_across_a_time_limit():
    replay = Replay(TransitionGraph(2, (1,), np.int64), 5)
    for node, (action, reward) in enumerate(((0, 1.0), (1, 3.0), (0, 0.0), (1, 0.5), (0, 4.0))):
        ends = [replay.graph.node(np.array([n])) for n in (node, (node + 1) % 5)]
        replay.add(ends[0], action, reward, ends[1], node == 4)
        if node == 2:
            replay.end_episode()
    learner = SimpleNamespace(args=SimpleNamespace(depth=2, gamma=0.5), replay=replay)
    learner.graph, learner.leaves = replay.graph, SimpleNamespace()
    learner.leaves.values = lambda nodes: np.stack([nodes, 2.0 * nodes], axis=1)
    sampled = replay.batch_of(np.arange(4))
    moved, targets = released_updates.released_n_step(learner, sampled, None, False)
    assert [column.tolist() for column in moved[:3]] == [[1, 2, 3, 4], [1, 2, 3, 4], [1, 0, 1, 0]]
    # From state 2; at the limit from the highest value, of state 4; across it; of the end.
    assert targets.tolist() == [2.5 + 0.25 * 4, 3 + 0.25 * 8, 0.25 + 0.25 * 8, 0.5 + 0.5 * 4]
    moved, targets = released_updates.released_n_step(learner, sampled, None, True)
    assert moved[0].tolist() == [1, 2, 2, 4]  # MinAtar: the limit is an end
    assert targets.tolist() == [2.5 + 0.25 * 4, 3, 0, 0.5 + 0.5 * 4]


def one_action_graph(*transitions):
    """Of integer states, and a table of zeros: state, reward, next state, how often."""
    graph = TransitionGraph(1, (1,), np.int64)
    for state, reward, next_state, times in transitions:
        ends = [graph.node(np.array([s])) for s in (state, next_state)]
        for _ in range(times):
            graph.add(ends[0], 0, reward, ends[1], False)
    return graph, np.zeros((graph.num_ids, 1), np.float32)


def backed_up_in_place(graph, q, states, draws):
    """Targets of samples of these states, two levels deep, discount 0.5."""
    nodes = np.array([graph.find(np.array([s])) for s in states])
    targets = np.empty(len(nodes), np.float32)
    released_updates.back_up_in_place(
        graph.arrays, q, nodes, np.zeros_like(nodes), 2, 0.5, draws, targets
    )
    return targets.tolist()


def test_a_released_graph_target_stays_in_the_table_for_the_next_sample():
    graph, q = one_action_graph((0, 0.0, 1, 1), (1, 1.0, 0, 1))
    # State 1 first, 1 + 0.5 * 0, then 0: 0.5. For the second sample 0 is 0.5 before, 1 is 1.25.
    assert backed_up_in_place(graph, q, [0, 1], np.zeros((2, 2, 9))) == [0.5, 1.25]
    graph, q = one_action_graph((0, 1.0, 1, 1))
    q[1] = 8.0  # nothing was tried there: an end
    assert backed_up_in_place(graph, q, [0], np.zeros((1, 2, 9))) == [1.0]


def test_a_released_graph_level_draws_transitions_in_proportion_to_counts():
    graph, table = one_action_graph((0, 0.0, 1, 1), (0, 0.0, 2, 3), (1, 4.0, 3, 1), (2, 4.0, 3, 1))
    # The one drawn first decides whose 4 is seen: that of state 1 counts 1/4, of state 2 3/4.
    for draw, target in ((0.2, 0.5), (0.3, 1.5), (0.9, 1.5)):
        q = table.copy()
        assert backed_up_in_place(graph, q, [0], np.full((1, 2, 1), draw)) == [target]


@jitted
@pytest.mark.usefixtures("torch_settings")
@pytest.mark.parametrize("change", released_updates.UPDATES)
def test_a_run_with_a_released_update_adds_its_row(monkeypatch, tmp_path, change):
    short = {name: suite._replace(total_timesteps=1_700) for name, suite in SUITES.items()}
    monkeypatch.setattr(released_updates, "SUITES", short)
    moved, update = [], released_updates.UPDATES[change]
    spied = lambda *args: moved.append(args) or update(*args)  # noqa: E731
    monkeypatch.setitem(released_updates.UPDATES, change, spied)
    out = tmp_path / "rows.csv"
    out.write_text(",".join(released_updates.COLUMNS) + "\n" + "minigrid,,x,graph,5,paper,1,0,,\n")
    words = change, "minatar", "Freeway", "--seed", 7, "--out", out
    assert command(released_updates, *words) == 0
    older, row = map(list, (one.values() for one in read_rows(out)))
    assert older == ["minigrid", "", "x", "graph", "5", "paper", "1", "0", "", ""]
    backup = "n-step" if change == "n-step" else "graph"
    told = "persistent" if change == "persistent" else "released"
    assert row[:7] == ["minatar", "fixed", "freeway", backup, "5", told, "7"]
    assert float(row[7]) >= 0
    assert len(moved) == 25  # every fourth step from 1,600 on
    assert {args[3] for args in moved} == {True}


ODD = "_a:#@$$ x_1 $y$"  # of it, matplotlib would leave out _, and read $ as mathematics


def test_every_task_has_a_panel_and_every_text_is_shown_as_it_was_typed(monkeypatch, tmp_path):
    env_ids = ("DoorKey-6x6", "DoorKey-6x6", "Empty-8x8", ODD)
    for i, env_id in enumerate(env_ids):
        make_run(tmp_path / f"run_{i}", env_id=env_id, learning_rate=0.001 * (1 + i))
    figures = []
    spy(monkeypatch, plot_runs, "write_figure", lambda figure, path: figures.append(figure))
    assert command(plot_runs, tmp_path, "--out", tmp_path / "curves.svg") == 0
    (figure,) = figures
    axes = [part.axes[0] for part in figure.subfigs]
    assert [axis.get_title() for axis in axes] == ["DoorKey-6x6", "Empty-8x8", ODD]
    assert [len(axis.lines) for axis in axes] == [2, 1, 1]
    shown = [text.get_text() for text in axes[2].get_legend().get_texts()]
    assert shown == [f"{ODD}, graph (1 seed: error over episodes)"]
    texts = [axes[2].title, *axes[2].get_legend().get_texts()]
    for text in texts:
        boxes = [text.get_window_extent()]
        text.set_parse_math(False)
        boxes.append(text.get_window_extent())
        assert boxes[0].width == boxes[1].width, "shown letter by letter"


def test_words_of_flags_are_read_again_as_they_were():
    flags = script_of("gymnasium").Args
    for given in (
        {"run_dir": "true", "env_id": "False", "wandb_entity": "TRUE", "track": True},
        {"run_dir": "-x", "env_id": "--seed", "env_kwargs": "-1", "save_model": False},
        {"round": -2, "leave_out": "", "seed": 3},
    ):
        found = read_flags(flags, words_of(given))
        assert {name: getattr(found, name) for name in given} == given
        texts = {name: str(value) for name, value in given.items()}
        assert words_of(texts, flags) == words_of(given)


def test_paths_begin_in_the_user_s_own_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    read = functools.partial(read_flags, arguments=["--run-dir=~/runs", "--resume=~/x"])
    found = read(script_of("minigrid").Args)
    assert (found.run_dir, found.resume) == (f"{tmp_path}/runs", f"{tmp_path}/x")
    make_run(tmp_path / "run", env_id="DoorKey-6x6")
    assert command(plot_runs, "~/run", "--out=~/curves.png") == 0
    assert (tmp_path / "curves.png").exists()
    for args_class, flags in ((sweep.Args, "--run-dir=~/a"), (report.Args, "--results-dir=~/a")):
        args = read_flags(args_class, [flags])
        assert tmp_path / "a" in vars(args).values()
    args = read_flags(speed.Args, ["--out=~/a"])
    assert args.out == tmp_path / "a"
