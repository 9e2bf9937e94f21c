"""The small commands behind single figures, pictures and ratios of speed, on small input."""

import json
import os
import shutil
import subprocess
import sys

import plot_runs
import pytest
import speed
import tyro
from conftest import ROOT, command, jitted, spy
from gbtools.play import script_of
from gbtools.runs import flags_in, words_of
from test_sweep import make_run

from benchmark import timings

pytestmark = jitted


def test_a_learning_curve_is_the_mean_of_its_seeds(tmp_path, capsys):
    make_run(krull := tmp_path / "krull", "atari100k", env_id="krull")
    seeds, mean, error = plot_runs.curve_of(plot_runs.read_evaluations([krull]))
    assert (seeds, mean.to_dict()) == (1, {1000: 0.0, 2000: 0.5, 3000: 1.0})
    # Of two episodes, 0.25 from their mean: a deviation of 0.25 * 2 ** 0.5, over 2 ** 0.5.
    assert error.tolist() == pytest.approx([0.25] * 3)
    runs = [tmp_path / f"doorkey_{seed}" for seed in (1, 2, 3)]
    for seed, run in enumerate(runs, 1):
        make_run(run, env_id="DoorKey-6x6", seed=seed, returns=(0.0, float(seed)))
    evaluations = plot_runs.read_evaluations(runs)
    assert evaluations.index.unique("setting").size == 1
    seeds, mean, error = plot_runs.curve_of(evaluations)
    assert (seeds, mean.tolist()) == (3, [0.0, 2.0])
    assert error.tolist() == pytest.approx([0.0, 1 / 3**0.5])  # whose deviation is 1
    picture = tmp_path / "krull.png"
    assert command(plot_runs, krull, *runs, "runs/TYPO", "--out", picture) == 0
    assert capsys.readouterr().out == f"wrote {picture}\n"
    assert picture.stat().st_size > 0


def test_pictures_need_no_backend_of_a_notebook_and_nothing_warns_of_flushed_denormals():
    backend = "module://matplotlib_inline.backend_of_a_notebook"
    code = "import gbcore.run as gb; gb.flush_denormals(); import plot_runs, draw_graph"
    environment = os.environ | {"MPLBACKEND": backend, "PYTHONPATH": f"{ROOT}:{ROOT / 'tools'}"}
    words = [sys.executable, "-W", "error::UserWarning", "-c", code]
    done = subprocess.run(words, env=environment, check=False)
    assert done.returncode == 0


def figure_of(monkeypatch, folder):
    """What plot_runs draws of the runs in a folder."""
    figures = []
    spy(monkeypatch, plot_runs, "write_figure", lambda figure, path: figures.append(figure))
    assert command(plot_runs, folder, "--out", folder / "curves.svg") == 0
    (figure,) = figures
    return figure


@pytest.mark.parametrize("number", [1, 5, 12])
def test_a_legend_leaves_the_curves_their_room(number, monkeypatch, tmp_path):
    for i in range(number):
        make_run(tmp_path / f"run_{i}", env_id="DoorKey-6x6", learning_rate=0.001 * (1 + i))
    figure = figure_of(monkeypatch, tmp_path)
    (part,) = figure.subfigs
    parts = (part.axes[0], part.legends[0], figure)
    axes, of_legend, whole = (part.get_window_extent() for part in parts)
    assert of_legend.width <= whole.width
    assert axes.width > 0.8 * whole.width
    assert axes.height > 240


def test_a_row_that_a_full_disk_cut_is_left_out(tmp_path):
    make_run(run := tmp_path / "run")
    whole = plot_runs.read_evaluations([run])
    with (run / "evaluations.csv").open("a") as file:
        file.write("22000,3")
    assert plot_runs.read_evaluations([run]).equals(whole)


def test_labels_of_curves_are_the_flags_that_differ(tmp_path):
    settings = [
        {"backup": "graph", "depth": 5},
        {"backup": "graph", "depth": 3},
        {"backup": "tree", "depth": 7},
    ]
    labels = plot_runs.labels(map(json.dumps, settings))
    assert list(labels) == ["graph, depth 5", "graph, depth 3", "tree"]
    for name in ("mine", "theirs"):  # copies of a script
        make_run(run := tmp_path / name, env_id="DoorKey-6x6")
        config = json.loads((run / "config.json").read_text())
        (run / "config.json").write_text(json.dumps(config | {"script": f"/a/{name}.py"}))
    labels = plot_runs.labels(plot_runs.read_evaluations([tmp_path]).index.unique("setting"))
    assert list(labels) == ["graph, script mine", "graph, script theirs"]


def test_words_of_flags_are_read_again_as_they_were():
    script = script_of("gymnasium")
    for given in (
        {"run_dir": "true", "wandb_entity": "False", "save_model": True},
        {"wandb_entity": "me", "track": True},
        {"run_dir": "-x", "env_id": "--seed", "env_kwargs": "-1", "save_model": False},
        {"round": -2, "leave_out": "", "seed": 3},
    ):
        args = tyro.cli(script.Args, args=words_of(given))
        assert {name: getattr(args, name) for name in given} == given
    text = "env-id=Taxi-v4 save_model=false learning_rate=2.5e-4"
    args = tyro.cli(script.Args, args=words_of(flags_in(text)))
    assert (args.env_id, args.save_model, args.learning_rate) == ("Taxi-v4", False, 2.5e-4)
    assert flags_in("default") == {}


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


ODD = "_a:#@$$ x_1 $y$"  # of it, matplotlib would leave out _, and read $ as mathematics


def test_every_task_has_a_panel_and_every_text_is_shown_as_it_was_typed(monkeypatch, tmp_path):
    for i, env_id in enumerate(("DoorKey-6x6", "DoorKey-6x6", "Empty-8x8", ODD)):
        make_run(tmp_path / f"run_{i}", env_id=env_id, learning_rate=0.001 * (1 + i))
    figure = figure_of(monkeypatch, tmp_path)
    axes = [part.axes[0] for part in figure.subfigs]
    assert [axis.get_title() for axis in axes] == ["DoorKey-6x6", "Empty-8x8", ODD]
    assert [len(axis.lines) for axis in axes] == [2, 1, 1]
    texts = [axes[2].title, *figure.subfigs[2].legends[0].get_texts()]
    shown = [text.get_text() for text in texts]
    assert shown == [ODD, "graph (1 seed: error over episodes)"]
    for text in texts:
        width = text.get_window_extent().width
        text.set_parse_math(False)
        assert text.get_window_extent().width == width, "shown letter by letter"


def test_a_copy_of_a_script_is_timed(tmp_path, capsys):
    copy = shutil.copy(ROOT / "gb_dqn_minigrid.py", tmp_path)
    (tmp_path / "gbcore").symlink_to(ROOT / "gbcore")
    words = "--env-ids Empty-5x5 --backups graph --variants learning_starts=40 --turns 1 "
    words = (words + "--warm-up-steps 10 --steps 16").split()
    assert command(speed, *words, "--scripts", copy) == 0
    out, err = capsys.readouterr()
    *row, rate = err.split()
    assert row == [copy, "MiniGrid-Empty-5x5-v0", "graph", "learning_starts=40"]
    assert float(rate) > 0
    assert "`gb_dqn_minigrid.py`, MiniGrid-Empty-5x5-v0" in out
    assert f"| graph, learning_starts=40 ({copy}) | **" in out


def test_scripts_and_backups_take_turns(monkeypatch, capsys):
    made = []
    monkeypatch.setattr(speed, "timed", lambda args, *of: (made.append(of), ("x", len(made)))[1])
    assert command(speed, "--scripts", "a", "b", "--backups", "x", "y", "--turns", "2") == 0
    assert made == [(s, "", b, "default") for _ in range(2) for s in "ab" for b in "xy"]
    assert "`b.py`, x\n" in (out := capsys.readouterr().out)
    assert "| y | **4.0** (2.0 to 6.0) |" in out


def test_rates_count_from_a_step_on(tmp_path):
    rates = ((10, 1000), (20, 10), (30, 5), (35, 5))
    lines = ["global_step,charts/SPS", *(f"{step},{rate}" for step, rate in rates)]
    (tmp_path / "metrics.csv").write_text("\n".join(lines))
    assert speed.rate(tmp_path, 10) == pytest.approx(25 / 4)
    assert speed.rate(tmp_path, 11) == pytest.approx(15 / 3)


def test_ratios_are_those_within_turns():
    text = speed.table({"one-step": (100, 10, 50), "graph": (50, 9, 40)})
    assert "| one-step | **50.0** (10.0 to 100.0) | 1.00 (1.00 to 1.00) |" in text
    assert "| graph | **40.0** (9.0 to 50.0) | 0.80 (0.50 to 0.90) |" in text


def test_targets_are_timed(capsys):
    timings.targets(transitions=200, batches=20)
    assert capsys.readouterr().out.count("\n| ") == 5  # and the header
    timings.curve(1_000, 1_000)
    assert "\n| 1,000 | " in capsys.readouterr().out
