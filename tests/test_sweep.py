"""reproduce/sweep.py: what counts as the same run, what is collected, and what survives a kill."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import plot_runs
import pytest
import run_records
import sweep
import tyro
from conftest import command, is_one_line, jitted
from folders import ROOT
from run_records import SUITES, Key, Records, finished_runs, flags_of, key_of

pytestmark = jitted


def make_run(folder, suite="minigrid", finished=True, returns=(0.0, 0.5, 1.0), **flags):
    """A run's folder as a script leaves it: two evaluation episodes around each mean return."""
    folder.mkdir(parents=True)
    script = run_records.SUITES[suite].script
    config = flags_of(suite, **flags) | {"script": f"{script}.py"}
    (folder / "config.json").write_text(json.dumps(config))
    lines = ["global_step,episode,episodic_return,episodic_length"]
    for i, mean in enumerate(returns, 1):
        lines += [f"{1000 * i},0,{mean - 0.25},7", f"{1000 * i},1,{mean + 0.25},7"]
    (folder / "evaluations.csv").write_text("\n".join(lines) + "\n")
    (folder / "metrics.csv").write_text("global_step,graph/nodes\n500,11\n1000,23\n")
    result = {"script": script, "env_id": config["env_id"], "steps": config["total_timesteps"]}
    result |= {"score": returns[-1] if finished else None, "interrupted": not finished}
    result |= {"sps": 123.456, "training_seconds": 60.0, "wall_seconds": 45.0}
    result |= {"novel_state_ratio": 0.25, "versions": {"commit": "abc1234"}}
    (folder / "result.json").write_text(json.dumps(result))


# --------------------------------------------------------------------------------------------------
# What identifies a run
# --------------------------------------------------------------------------------------------------


def key(suite="minigrid", **flags):
    return key_of(suite, flags_of(suite, **{"env_id": "DoorKey-6x6"} | flags))


def test_a_key_is_of_all_that_can_change_a_result_and_of_nothing_else():
    assert key(run_dir="elsewhere", threads=4, save_model=False, checkpoint_frequency=7) == key()
    assert key(env_id="MiniGrid-DoorKey-6x6-v0") == key()
    others = {"seed": 2, "backup": "tree", "breadth": 0, "depth": 10, "prior": 0.5}
    others |= {"learning_rate": 1e-4, "eval_episodes": 4, "total_timesteps": 5_000}
    for name, value in (others | {"env_id": "Empty-8x8"}).items():
        assert key(**{name: value}) != key()


def test_flags_that_a_backup_does_not_read_do_not_matter():
    assert key(backup="tree", breadth=0) == key(backup="tree")
    assert key(backup="tree", depth=3) != key(backup="tree")
    assert key(backup="one-step", depth=3) == key(backup="one-step")
    assert key(backup="whole-graph", depth=3, breadth=0) == key(backup="whole-graph")
    assert key(backup="whole-graph").variant == "", "its own defaults"
    assert key(depth=1, prior=3.0) == key(depth=1)
    assert key(backup="whole-graph", depth=1, prior=3.0) != key(backup="whole-graph", depth=1)


def test_the_episode_seed_of_minatar_is_part_of_the_key():
    fresh, fixed = (key("minatar", env_id="Freeway", episode_seed=s) for s in ("fresh", "fixed"))
    assert (fresh.episode_seed, fixed.episode_seed) == ("fresh", "fixed")
    assert fresh.variant == fixed.variant == ""
    assert fresh.task == "freeway"


# --------------------------------------------------------------------------------------------------
# Collecting
# --------------------------------------------------------------------------------------------------


def test_a_row_holds_what_the_run_measured(tmp_path):
    make_run(tmp_path / "run", env_id="Empty-8x8", seed=3, breadth=0)
    ((found_key, (row, curve)),) = finished_runs(tmp_path, ["minigrid"]).items()
    assert found_key == ("minigrid", "MiniGrid-Empty-8x8-v0", "graph", "breadth=0", "", 3)
    assert curve == {1000: 0.0, 2000: 0.5, 3000: 1.0}
    assert list(row.values()) == [1.0, 100_000, 60.0, 123.5, 0.25, 23, "abc1234"]
    assert [*Key._fields, *row] == run_records.ROW


def test_collecting_twice_changes_nothing_and_rows_outlive_their_folders(tmp_path, capsys):
    runs, results = tmp_path / "runs", tmp_path / "results"
    flags = ("--collect-only", "--run-dir", runs, "--results-dir", results)
    make_run(runs / "a", env_id="Empty-8x8", seed=1)
    make_run(runs / "again", env_id="Empty-8x8", seed=1, run_dir="x")  # the same run
    make_run(runs / "half", env_id="Empty-8x8", seed=2, finished=False)
    make_run(runs / "nested" / "b", "minatar", env_id="freeway", episode_seed="fixed")
    make_run(runs / "long", "minatar-1m", env_id="freeway")
    make_run(runs / "short", env_id="Empty-8x8", seed=3, total_timesteps=500)  # of no suite
    make_run(runs / "game", "atari100k", env_id="space_invaders")  # none of the 26
    assert command(sweep, *flags) == 0
    out, err = capsys.readouterr()
    assert "left out: 2 finished runs of other scripts, tasks or steps" in out
    assert err == ""
    first = {path.name: path.read_bytes() for path in results.iterdir()}
    suites = {"minigrid", "minatar", "minatar-1m"}
    assert {path.stem.removesuffix("_curves") for path in results.glob("*.csv")} == suites
    assert len(Records(results).rows(*SUITES)) == 3
    assert command(sweep, *flags) == 0
    assert {path.name: path.read_bytes() for path in results.iterdir()} == first
    shutil.rmtree(runs)
    make_run(runs / "c", env_id="Empty-8x8", seed=4, returns=(0.5, 0.5))
    assert command(sweep, *flags) == 0
    curves = Records(results).curves("minigrid")
    assert [key.seed for key in curves] == [1, 4]
    assert list(curves.values()) == [{1000: 0, 2000: 0.5, 3000: 1}, {1000: 0.5, 2000: 0.5}]


DEEP = b'{"a": ' * 100_000
LONG = b"global_step,episode,episodic_return,episodic_length\n1," + b"0" * 200_000 + b",1.0,7\n"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("config.json", text) for text in (b'{"env_id": ', b"{}", b"[1]", b"\xff\xfe", DEEP)),
        *(("config.json", {"env_id": env_id}) for env_id in ("MyOwnGrid-v0", None)),
        *(("config.json", flag) for flag in ({"no_such": 1}, {"seed": "1"}, {"gamma": "high"})),
        ("config.json", {"backup": "nothing"}),
        *(("result.json", flag) for flag in ({"steps": 10**400}, {"versions": None})),
        *(("result.json", {"score": score}) for score in ("1.0", None, float("nan"), [1], True)),
        *(("result.json", text) for text in (b"", b'{"interrupted": false}', DEEP)),
        *(("evaluations.csv", text) for text in (LONG, b"\xff", b"step\n1\n", None)),
        ("metrics.csv", b"global_step,graph/nodes\n500,many\n"),
        ("metrics.csv", None),
    ],
)
def test_a_damaged_run_is_left_out_by_name_and_the_rest_collected(name, content, tmp_path, capsys):
    for number, folder in enumerate(("a", "damaged", "z"), 1):
        make_run(tmp_path / folder, env_id="Empty-8x8", seed=number)
    path, is_one_flag = tmp_path / "damaged" / name, isinstance(content, dict)
    if is_one_flag:
        content = json.dumps(json.loads(path.read_text()) | content).encode()
    path.unlink() if content is None else path.write_bytes(content)
    assert command(sweep, "--collect-only", "--run-dir", tmp_path) == 0
    out, err = capsys.readouterr()
    assert out.startswith("2 rows collected")
    assert f"left out: {tmp_path / 'damaged'}: " in err
    assert err.count("left out") == 1
    if name in ("evaluations.csv", "config.json") and not is_one_flag:
        assert command(plot_runs, path.parent, "--out", tmp_path / "x.png") == 2
        assert is_one_line(capsys, "error: ", name)


def test_a_row_whose_score_is_no_number_is_left_out_by_name(tmp_path, capsys):
    for number in (1, 2):
        make_run(tmp_path / str(number), env_id="Empty-8x8", seed=number)
    assert command(sweep, "--collect-only", "--run-dir", tmp_path) == 0
    rows = tmp_path / "results" / "minigrid.csv"
    rows.write_text(rows.read_text().replace(",1,1.0,", ",1,good,"))
    assert [key.seed for key in Records(rows.parent).rows("minigrid")] == [2]
    assert f"{rows}, line 2" in capsys.readouterr().err
    assert command(sweep, "--collect-only", "--run-dir", tmp_path) == 0  # made good from its run
    assert capsys.readouterr().out.startswith("1 rows collected")
    assert [key.seed for key in Records(rows.parent).rows("minigrid")] == [1, 2]


def test_rows_made_with_other_defaults_are_refused(tmp_path, capsys):
    results = tmp_path / "results"
    make_run(tmp_path / "runs" / "a", env_id="Empty-8x8")
    flags = ("--collect-only", "--run-dir", tmp_path / "runs", "--results-dir", results)
    assert command(sweep, *flags) == 0
    defaults = json.loads((results / "defaults.json").read_text())
    defaults["gb_dqn_minigrid"]["gamma"] = 0.9
    (results / "defaults.json").write_text(json.dumps(defaults))
    # The script's other suite has no rows yet, and would end beside these.
    for words in (("--collect-only",), ("--suites", "minigrid-hard", "--dry-run")):
        capsys.readouterr()
        assert command(sweep, *words, *flags[1:]) == 2
        assert is_one_line(capsys, "--gamma 0.95")


def test_a_dry_run_writes_nothing(tmp_path):
    make_run(tmp_path / "runs" / "a", env_id="Empty-8x8")
    flags = ("--run-dir", tmp_path / "runs", "--results-dir", tmp_path / "results")
    assert command(sweep, "--collect-only", *flags) == 0
    path = tmp_path / "results" / "defaults.json"
    path.write_text(path.read_text().replace('"gamma": 0.95,', ""))  # from before that flag
    before = path.read_bytes()
    assert command(sweep, "--suites", "minigrid", "--dry-run", *flags) == 0
    assert path.read_bytes() == before


def test_an_interruption_between_two_files_loses_nothing(tmp_path, monkeypatch):
    make_run(tmp_path / "run", env_id="Empty-8x8")
    (found_key,) = found = finished_runs(tmp_path, ["minigrid"])
    records, replace, written = Records(tmp_path / "results"), Path.replace, []

    def second_fails(new, path):
        written.append(path.name)
        if len([name for name in written if name.endswith(".csv")]) == 2:
            raise KeyboardInterrupt
        return replace(new, path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", second_fails)
        with pytest.raises(KeyboardInterrupt):
            records.add(found)
    assert records.add(found) == 1
    assert records.rows("minigrid").keys() == records.curves("minigrid").keys() == found.keys()
    assert records.curves("minigrid")[found_key] == found[found_key][1]


# --------------------------------------------------------------------------------------------------
# The grid
# --------------------------------------------------------------------------------------------------


def test_dry_run_prints_what_is_not_finished_and_needs_no_ray(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    make_run(tmp_path / "runs" / "a", "minatar", env_id="Freeway", backup="graph", breadth=0)
    words = "--suites minatar --tasks freeway --seeds 1 2 --backups tree graph --dry-run"
    words = (*words.split(), "--variants", "default", "breadth=0", "--run-dir", tmp_path / "runs")
    assert command(sweep, *words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 * 3 - 1
    assert sum("--breadth 0" in line for line in lines) == 1
    assert all(line.startswith("python gb_dqn_minatar.py --env-id freeway") for line in lines)
    assert "--seed 2" in lines[-1]
    assert not (tmp_path / "runs" / "results").exists()
    assert command(sweep, *words, "--episode-seeds", "fresh", "fixed") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 11
    assert sum("--episode-seed fixed" in line for line in lines) == 6


def test_every_printed_command_is_the_run_that_it_stands_for(tmp_path):
    args = sweep.Args(suites=("minatar", "atari100k"), tasks=("freeway",), seeds=(7,))
    args = replace(args, episode_seeds=("fixed",), variants=("depth=3 breadth=0",))
    for run in sweep.make_grid(args).values():
        script, *words = run.command
        parsed = tyro.cli(run_records.script_of(run.key.suite).Args, args=words)
        assert script == f"{run_records.SUITES[run.key.suite].script}.py"
        assert key_of(run.key.suite, vars(parsed)) == run.key


def test_tasks_are_named_in_any_case_and_with_signs():
    args = sweep.Args(suites=("minatar", "atari100k"), backups=("tree",), seeds=(1,))
    tasks = [*SUITES["minatar"].tasks, *SUITES["atari100k"].tasks]
    assert [key.task for key in sweep.make_grid(args)] == tasks
    args.tasks = ("Q-bert", "Pong", "SpaceInvaders")
    assert [key.task for key in sweep.make_grid(args)] == ["space_invaders", "qbert", "pong"]


def test_exploration_is_a_variant_of_every_backup_and_its_flags_are_idle_without_it():
    variants = ("default", "breadth=0", "breadth=0 exploration=frontier frontier_share=0.1")
    args = sweep.Args(suites=("minigrid-hard",), tasks=("FourRooms",), seeds=(1,))
    args = replace(args, backups=("graph", "tree"), variants=variants)
    runs = {(run.key.backup, run.key.variant): run for run in sweep.make_grid(args).values()}
    frontier = "exploration=frontier frontier_share=0.1"
    graph = [("graph", ""), ("graph", "breadth=0"), ("graph", f"breadth=0 {frontier}")]
    assert set(runs) == {*graph, ("tree", ""), ("tree", frontier)}
    command = " ".join(runs["tree", frontier].command)
    assert "--exploration frontier --frontier-share 0.1" in command
    assert "--total-timesteps 200000" in command
    assert key(frontier_share=0.1) == key()
    assert key(exploration="frontier", frontier_share=0.1) != key(exploration="frontier")


def test_overrides_are_checked_among_the_flags_of_the_runs(tmp_path, monkeypatch, capsys):
    """Of the suite's length, and without the --run-dir that a script has by default."""
    (tmp_path / "runs").touch()
    monkeypatch.chdir(tmp_path)
    words = "--suites minatar-1m --overrides learning_starts=200000 --dry-run --run-dir others"
    assert command(sweep, *words.split()) == 0
    out, err = capsys.readouterr()
    assert "--learning-starts 200000" in out
    assert "--learning-starts" not in err


BAD_INPUT = {  # words -> what the line names
    "": "--suites",
    "--suites minigrid --dry-run --seeds": "--seeds",
    "--suites minigrid --dry-run --backups": "--backups",
    "--suites minigrid --dry-run --variants": "--variants",
    "--suites minigrid --tasks Pong": "'Pong' is none of Empty-8x8",
    "--suites minigrid --backups softmax": "'softmax' is none that minigrid has: one-step",
    "--suites minigrid --overrides dept=3": "nearest: --depth",
    "--suites minigrid --overrides depth=deep": "'deep'",
    "--suites minigrid --overrides depth": "name=value",
    "--suites minigrid --overrides exploration=Frontier": "--exploration",
    "--suites minigrid --overrides seed=9": "seed is no override",
    "--suites minigrid --overrides save-model=true": "save_model is no override",
    "--suites minigrid --overrides gamma=2": "--gamma",
    "--suites minigrid --variants torch_deterministic=2": "--torch-deterministic",
    "--suites minigrid --seeds -1": "--seeds",
    "--suites minigrid --seeds 1073741824": "--seeds",
    "--suites minigrid --threads 0": "--threads",
    "--suites minigrid --gpus-per-run -1": "--gpus-per-run",
    "--collect-only --run-dir /no/such/folder": "--run-dir",
}


@pytest.mark.parametrize(("words", "named"), BAD_INPUT.items())
def test_bad_input_is_one_line_and_status_2(words, named, capsys):
    assert command(sweep, *words.split()) == 2
    assert is_one_line(capsys, named)


# --------------------------------------------------------------------------------------------------
# Kills
# --------------------------------------------------------------------------------------------------


def one_run(tmp_path):
    args = sweep.Args(suites=("minigrid",), tasks=("Empty-8x8",), seeds=(1,), run_dir=tmp_path)
    args.backups = ("graph",)
    return args, *sweep.make_grid(args).values()


def test_rows_of_finished_runs_are_kept_and_what_fails_is_given_up(tmp_path, monkeypatch, capsys):
    args, run = one_run(tmp_path)
    args.seeds = (1, 2)
    todo, records = list(sweep.make_grid(args).values()), Records(tmp_path / "rows")
    ray = Mock()
    ray.exceptions.RayError = RuntimeError
    ray.remote.return_value.options.return_value.remote = lambda run: run.key
    ray.wait = lambda keys, timeout: (keys[:1], keys[1:])
    finished = {"score": 1.0, "steps": 100_000, "wall_seconds": 9.0}, {1000: 1.0}
    ray.get.side_effect = finished, RuntimeError("status 1: Killed")
    monkeypatch.setattr(sweep, "start_ray", lambda args: ray)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert sweep.make_runs(args, records, todo) == todo[1:]
    assert records.rows("minigrid").keys() == {run.key}
    done, given_up = capsys.readouterr().out.splitlines()
    assert f"done {run.key}: score 1, 9 s (1 of 2 runs are left" in done
    assert f"given up {todo[1].key}: status 1: Killed; see {todo[1].folder / 'log.txt'}" in given_up


def test_a_checkpoint_that_cannot_be_used_is_left_behind(tmp_path, monkeypatch):
    """--resume ends with status 2; the run that is then begun anew is the one that is kept."""
    _, run = one_run(tmp_path)
    for name in ("none", "old", "new"):
        (run.folder / name).mkdir(parents=True)
    for time_of, name in enumerate(("old", "new")):
        (run.folder / name / "checkpoint.npz").touch()
        os.utime(run.folder / name / "checkpoint.npz", (time_of, time_of))
    commands = []

    def script(command, **_):
        commands.append(" ".join(map(str, command)))
        if "--resume" not in command:
            make_run(run.folder / "anew", env_id="Empty-8x8")
            (run.folder / "anew" / "checkpoint.npz").touch()
        return SimpleNamespace(wait=lambda: 2 if "--resume" in command else 0)

    monkeypatch.setattr(subprocess, "Popen", script)
    row, _ = sweep.execute(run)
    assert row["score"] == 1.0
    free = "--checkpoint-frequency 10000 --threads 1 --no-cuda"  # of this sweep, not the last
    goes_on = f"--resume {run.folder / 'new'} {free}"
    assert [goes_on in words for words in commands] == [True, False]
    assert not list(run.folder.glob("*/checkpoint.npz"))
    sweep.execute(run)  # it is finished
    assert len(commands) == 2


def wait_until(condition, seconds=240.0):  # kernels may have to be compiled
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
    return found


def processes_of(run_dir):
    """Ids of the processes of scripts that write below run_dir -> their parents."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode().split("\0")
            status = path.with_name("stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if "gb_dqn_minigrid.py" in words and any(word.startswith(str(run_dir)) for word in words):
            found[int(path.parent.name)] = int(status[1])
    return found


def test_a_killed_worker_a_stopped_sweep_and_one_with_nothing_to_do(tmp_path, monkeypatch, capsys):
    pytest.importorskip("ray")
    runs = tmp_path / "runs"
    results = runs / "results"  # by default
    # Nothing is learned: 10,000 steps a second. Ray takes seconds to stop: the run must be longer.
    words = "--suites minigrid --tasks Empty-8x8 --backups graph --seeds 1 --workers 1 --overrides "
    words += "total_timesteps=200000 learning_starts=1000000 eval_frequency=0"
    words = (*words.split(), "--checkpoint-frequency", "5000", "--run-dir", str(runs))

    def start():
        command, pipe = [sys.executable, ROOT / "reproduce" / "sweep.py", *words], subprocess.PIPE
        return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=ROOT)

    first = start()
    wait_until(lambda: list(runs.glob("*/*/checkpoint.npz")))
    ((script, worker),) = processes_of(runs).items()
    os.kill(worker, signal.SIGKILL)  # the script ends with it, and is resumed by another
    wait_until(lambda: processes_of(runs).keys() - {script} and script not in processes_of(runs))
    (log,) = runs.glob("*/log.txt")
    wait_until(lambda: log.read_text().count("results go to") == 2)
    time.sleep(0.5)
    first.send_signal(signal.SIGINT)
    out, err = first.communicate(timeout=60)
    assert first.returncode == 130, out + err
    assert "stopped; 1 of 1 runs are left" in out
    wait_until(lambda: not processes_of(runs))
    assert "interrupted after" in log.read_text().splitlines()[-1]  # with a checkpoint

    second = start()
    out, err = second.communicate(timeout=300)
    assert second.returncode == 0, out + err
    typed = [line for line in log.read_text().splitlines() if line.startswith("$")]
    assert ["--resume" in line for line in typed] == [False, True, True]
    assert "(0 of 1 runs are left, 0 min)" in out
    assert not processes_of(runs)
    (row,) = Records(results).rows("minigrid").values()
    assert (row["seed"], row["steps"]) == ("1", "200000")
    assert len(list(runs.glob("*/*/config.json"))) == 1  # resumed, not begun anew
    assert not list(runs.glob("*/*/checkpoint.npz"))
    assert f"python reproduce/report.py --results-dir {results}" in out

    # Nothing is computed again, even without the folders.
    for folder in runs.glob("minigrid*"):
        shutil.rmtree(folder)
    monkeypatch.setattr(sweep, "start_ray", lambda args: pytest.fail("nothing is to be run"))
    assert command(sweep, *words) == 0
    out, err = capsys.readouterr()
    assert "nothing to do: all 1 runs are finished" in err
    assert [path.name for path in runs.iterdir()] == ["results"]
