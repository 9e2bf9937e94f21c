"""Checkpoints that were changed and signed again: refused in one line, or as good as others."""

import copy
import os
import re
import shutil

import numpy as np
import pytest
import torch
from conftest import command, files_in, jitted, leaves, only_run, write_checkpoint

import gb_dqn_minatar
import gb_dqn_minigrid
import gb_rainbow_atari
from gbcore.run import load_checkpoint
from gbcore.run import run as run_module
from gbcore.run.checkpoint import check_like, save_checkpoint

pytestmark = [jitted, pytest.mark.usefixtures("torch_settings")]

SMALL = [
    "--total-timesteps", "120", "--learning-starts", "30", "--batch-size", "4", "--breadth", "5",
    "--train-frequency", "6", "--log-frequency", "30", "--eval-frequency", "50",
    "--eval-episodes", "1", "--eval-epsilon", "1", "--no-save-model", "--threads", "1", "--no-cuda",
]  # fmt: skip
CASES = {
    "minigrid": (gb_dqn_minigrid, ["--env-id", "Empty-5x5", "--exploration", "frontier"]),
    "minatar": (gb_dqn_minatar, ["--env-id", "breakout", "--buffer-size", "60"]),
    "atari": (gb_rainbow_atari, ["--env-id", "breakout", "--buffer-size", "60", "--n-atoms", "3",
                                 "--curve-episodes", "1"]),
}  # fmt: skip


@pytest.fixture(scope="module")
def run_of(tmp_path_factory):
    """Function of a case and a seed: the folder of a run, made once, that can go on."""
    runs = {}

    def get(case, seed):
        if (case, seed) not in runs:
            script, flags = CASES[case]
            folder = tmp_path_factory.mktemp("run")
            words = (*flags, *SMALL, "--seed", seed, "--run-dir", folder)
            assert command(script, *words) == 0
            runs[case, seed] = only_run(folder)
            (runs[case, seed] / "result.json").unlink()
        return runs[case, seed]

    return get


def put(tree, place, value):
    """A copy of a tree with another value at a place; without the place where value is `GONE`."""
    tree = copy.copy(tree)
    key, *rest = place
    if rest:
        tree[key] = put(tree[key], rest, value)
    elif value is GONE:
        del tree[key]
    else:
        tree[key] = value
    return tree


GONE = object()
OF_ATARI = re.compile(
    r"graph/(frame_uses|(keys|frames)_\w+)|replay/(max_priority|rows/priority)|env/.*"
)
ONE_OF_MANY = "layers.0.bias"  # parameters of a network


def variants_of_array(array, other):
    """(what was done, array) of many changes; other: what another run has there."""
    kinds = {"i": np.float64, "u": np.int64, "f": np.float16, "b": np.uint8, "U": np.bytes_}
    yield "another dtype", array.astype(kinds[array.dtype.kind])
    yield "an axis more", array[None]
    yield "empty", array[..., :0] if array.ndim else np.zeros(0, array.dtype)
    yield "twice as long", np.concatenate([array, array]) if array.ndim else np.stack([array] * 2)
    yield "no array", 0
    yield "a list", array.tolist()
    yield "of another run", other
    if array.size and array.dtype.kind in "iufb":
        values = {"f": (-1, np.nan, 1e300), "b": ()}.get(array.dtype.kind)
        values = (-1, 7, 2**62) if values is None else values
        for where in {array.size // 3, array.size - 1}:
            for value in values:
                changed = array.copy()
                with np.errstate(over="ignore"):
                    changed.reshape(-1)[where] = np.array(value).astype(array.dtype)
                yield f"{value} at {where}", changed
            if array.dtype.kind == "b":
                changed = array.copy()
                changed.reshape(-1)[where] ^= True
                yield f"turned at {where}", changed
        yield "reversed", array.reshape(-1)[::-1].reshape(array.shape).copy()


def variants_of_value(value, other):
    for changed in (None, True, -1, 0, 2**63, 2**200, 1.5, 1e300, float("nan"), "x", [], {}):
        yield repr(changed), changed
    yield "an array", np.array(0)
    yield "of another run", other
    if isinstance(value, list):
        yield "one more", [*value, *value[:1]]
        yield "one less", value[:-1]
        for changed in (-1, 10**6, 2**200, "x", None, [0], True):
            yield f"{changed!r} first", [changed, *value[1:]]


def variants(tree, other):
    """(place, what was done, tree) of many changes to a tree."""
    others = dict(leaves(other))
    for place, value in leaves(tree):
        if place[0] == "learner" and len(place) > 2 and place[2] not in (ONE_OF_MANY, "rows"):
            continue
        if "frame_uses" in tree["graph"] and not OF_ATARI.fullmatch("/".join(place)):
            continue  # as in the others, and slow
        of = variants_of_array if isinstance(value, np.ndarray) else variants_of_value
        for what, changed in of(value, others.get(place)):
            if not is_same(changed, value):
                yield place, what, put(tree, place, changed)
        yield place, "missing", put(tree, place, GONE)
        yield place, "and another", put(tree, (*place[:-1], "another"), value)
    if "frame_uses" in tree["graph"]:
        return
    branches = {place[:i] for place, _ in leaves(tree) for i in range(1, len(place))}
    for branch in sorted(branches):
        found, given = tree, other
        for key in branch:
            found, given = found[key], given[key]
        if not is_same(found, given):
            yield branch, "of another run", put(tree, branch, given)
        yield branch, "missing", put(tree, branch, GONE)
        yield branch, "empty", put(tree, branch, {})
        yield branch, "a number", put(tree, branch, 3)


@pytest.fixture
def some(request):
    """Function of changes: every fifth, two or three of each place; with --all-variants all."""
    step = 1 if request.config.getoption("--all-variants") else 5
    return lambda changes: list(changes)[step // 2 :: step]


def is_same(a, b):
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(is_same(a[key], b[key]) for key in a)
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return (a.dtype, a.shape) == (b.dtype, b.shape) and a.tobytes() == b.tobytes()
    return type(a) is type(b) and repr(a) == repr(b)


# What changes no meaning, or means another run as good as this one: weights, moments, random
# states, observations, unused places of the graph's blocks, and numbers that are only reported.
AS_GOOD = re.compile(
    r"graph/(edge_\w+|keys_rows|frames_rows)|replay/(ended|max_priority|rows/(cut|priority))"
    r"|learner|learner/((online|target|adam)\b.*|num_\w+|leaves/(num_evaluated|rows/.*))"
    r"|env|env/(actions|seed|last_action|begin/(inner|outer)\b.*)"
    r"|frontier/(share|start_value|is_\w+|lately|window|planner/stack)"
    r"|random|random/(torch|numpy\b.*)|counters|counters/(?!step).*|run|run/charts\b.*"
)


def may_be_accepted(place, what):
    if what in ("missing", "and another", "a number", "no array", "a list", "another dtype"):
        return False
    if "nan" in what or "inf" in what:
        return place == ("graph", "edge_reward")
    return AS_GOOD.fullmatch("/".join(place)) is not None


@pytest.mark.parametrize("case", CASES)
def test_a_changed_checkpoint_is_refused_or_as_good(case, run_of, some, monkeypatch):
    """Changes are tried on the part of a start that takes the checkpoint."""
    script, run = CASES[case][0], run_of(case, 1)
    tree, other = load_checkpoint(run), load_checkpoint(run_of(case, 2))
    restore, count, wrong = run_module.Run._restore, {"refused": 0, "accepted": 0}, []

    class AllTried(Exception):
        pass

    if case == "atari":  # megabytes, which are checked as the others' are
        del tree["learner"]

    def restore_each(self):
        self.parts = {name: part for name, part in self.parts.items() if name in tree}
        fresh = {name: as_read(part.state()) for name, part in self.parts.items()}
        restore_graph, touched = self.graph.restore, []
        self.graph.restore = lambda saved: (touched.append(True), restore_graph(saved))
        for place, what, changed in some(variants(tree, other)):
            with monkeypatch.context() as patch:
                patch.setattr(run_module, "load_checkpoint", lambda _, tree=changed: tree)
                patch.setattr(run_module, "fail", refuse)
                try:
                    os.close(restore(self))
                    count["accepted"] += 1
                    if not may_be_accepted(place, what):
                        wrong.append((place, what))
                except Refused:
                    count["refused"] += 1
            if touched:  # a start is tried on nothing that another one has changed
                touched.clear()
                self.counters.__init__()
                self.charts = dict.fromkeys(self.charts)
                for name, part in self.parts.items():
                    if name != "counters":
                        part.restore(fresh[name])
        raise AllTried

    with monkeypatch.context() as patch:
        patch.setattr(run_module.Run, "_restore", restore_each)
        with pytest.raises(AllTried):
            command(script, "--resume", run)
    assert wrong == []
    assert count["refused"] > (20 if case == "atari" else 100)


class Refused(Exception):
    pass


def refuse(message):
    assert message.startswith("cannot resume")
    raise Refused(message)


def as_read(tree):
    """A copy of what `state` returns, with arrays for tensors."""
    if isinstance(tree, dict):
        return {key: as_read(value) for key, value in tree.items()}
    return tree.numpy().copy() if isinstance(tree, torch.Tensor) else copy.deepcopy(tree)


@pytest.mark.parametrize("case", CASES)
def test_a_start_refuses_in_one_line_or_goes_on_to_the_end(case, run_of, tmp_path, capsys):
    """Some of the changes, written to disk and resumed by the command."""
    script, run = CASES[case][0], run_of(case, 1)
    tree, other = load_checkpoint(run), load_checkpoint(run_of(case, 2))
    every = list(variants(tree, other))
    refused = 0
    for place, what, changed in every[:: len(every) // (3 if case == "atari" else 6)]:
        copied = tmp_path / str(len(list(tmp_path.iterdir())))
        shutil.copytree(run, copied)
        write_checkpoint(copied, changed)
        before = files_in(copied)
        capsys.readouterr()
        status = command(script, "--resume", copied, "--total-timesteps", "130")
        _, err = capsys.readouterr()
        if status == 2:
            refused += 1
            assert err.count("\n") == 1, err
            assert err.startswith("error: cannot resume")
            assert files_in(copied) == before
        else:
            assert status == 0, err
            assert may_be_accepted(place, what)
    assert refused > 0


@pytest.mark.parametrize(
    ("case", "place", "value"),
    [
        ("minigrid", "learner adam layers.0.bias exp_avg", np.zeros(3, np.float32)),
        ("minatar", "env begin inner state pos", 2**31),
    ],
)
def test_what_would_break_a_kernel_breaks_no_process(case, place, value, run_of, tmp_path, capsys):
    """This one, if it did."""
    script, run = CASES[case][0], shutil.copytree(run_of(case, 1), tmp_path / "copy")
    write_checkpoint(run, put(load_checkpoint(run), place.split(), value))
    capsys.readouterr()
    assert command(script, "--resume", run, "--total-timesteps", "130") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot resume" in line


def test_numbers_of_numpy_are_numbers(tmp_path):
    class Env:
        def state(self):
            return {"room": np.int64(3), "seen": np.True_, "actions": [np.int64(1), 0]}

    save_checkpoint(tmp_path, {"env": Env()})
    found = load_checkpoint(tmp_path)
    assert found == {"env": {"room": 3, "seen": True, "actions": [1, 0]}}
    check_like(found, {"env": Env().state()})
