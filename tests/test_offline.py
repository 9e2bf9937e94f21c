"""gbcore.solve and examples/offline.py: logged transitions, solved by the actions tried."""

import functools
import json
import sys
import types
from typing import ClassVar

import gymnasium
import numpy as np
import pytest
from conftest import command, graph_of, interpreted, jitted, refuses, scaled
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from minigrid.core.mission import MissionSpace

from examples import offline
from examples.offline import COLUMNS, follow, read_transitions
from gbcore import TransitionGraph, solve

# Two trajectories that meet in 2: one gets there in one step, the other knows the way to the end.
CROSSING = [
    (0, 0, 0.0, 1, False), (1, 0, 0.0, 3, False), (3, 0, 0.0, 2, False), (2, 0, 1.0, 9, True),
    (0, 1, 0.0, 2, False), (2, 1, 0.0, 5, False),
]  # fmt: skip


@settings(max_examples=scaled(100))
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 1), st.sampled_from([0.0, 1.0, -2.0]),
                          st.integers(0, 4), st.booleans()), min_size=1, max_size=30))  # fmt: skip
def test_values_are_the_fixed_point_and_following_them_gets_them(rows):
    graph = graph_of(5, rows)
    values, actions, counts = solve(graph, 0.5)
    least = min(min(row[2] for row in rows), 0) / 0.5

    def backed_up(s, action):
        seen = [row for row in rows if row[:2] == (s, action)]
        return np.mean([r + 0.5 * (not over) * values[s2] for _, _, r, s2, over in seen])

    for s in range(5):
        tried = sorted({row[1] for row in rows if row[0] == s})
        best = max((backed_up(s, action) for action in tried), default=least)
        assert values[s] == pytest.approx(best, abs=1e-7)
        assert (actions[s] in tried) if tried else (actions[s] == -1)
        if tried:
            assert backed_up(s, actions[s]) == pytest.approx(best, abs=1e-7)
        assert counts[s] == sum(row[:2] == (s, actions[s]) for row in rows)

    @functools.cache
    def followed(s, steps):  # mean return and length of the policy's episodes
        seen = [row for row in rows if row[:2] == (s, actions[s])] if steps else []
        of_rows = [(r, 1) + (not over) * followed(s2, steps - 1) for _, _, r, s2, over in seen]
        return np.mean(of_rows or [(0, 0)], axis=0)

    found = follow(graph, actions, np.array([rows[0][0]]), 6)
    np.testing.assert_allclose(found[:2], followed(rows[0][0], 6), atol=1e-9)


def test_a_graph_without_transitions_and_a_discount_of_one_are_refused():
    with pytest.raises(ValueError, match="Require a graph with transitions"):
        solve(TransitionGraph(2, (1,)), 0.5)
    with pytest.raises(ValueError, match="Require 0 <= gamma < 1, got 1"):
        solve(graph_of(10, CROSSING), 1)


OBS, ACTIONS, REWARDS, AFTER, ENDS = map(np.array, zip(*CROSSING, strict=True))
GOOD = OBS[:, None], ACTIONS, REWARDS, AFTER[:, None], ENDS, np.zeros_like(ENDS)
GOOD = dict(zip(COLUMNS, GOOD, strict=True))
GOOD = OBS[:, None], ACTIONS, REWARDS, AFTER[:, None], ENDS, np.zeros_like(ENDS)
GOOD = dict(zip(COLUMNS, GOOD, strict=True))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"actions": ACTIONS[:3]}, "Require as many actions as observations"),
        ({"actions": ACTIONS / 2}, "actions [N] that are integers below 2**63, got float"),
        ({"actions": np.full(6, 2**63, np.uint64)}, "below 2**63, got uint64 (6,)"),
        ({"observations": np.array(3)}, "observations that are numbers, got int64 ()"),
        ({"observations": OBS[:, None].astype(str)}, "observations that are numbers"),
        ({"rewards": np.full(6, np.inf)}, "Require finite rewards"),
        ({"rewards": REWARDS.astype(str)}, "Require finite rewards"),
        ({"next_observations": np.zeros((6, 2), int)}, "Require next_observations as int64 (6, 1)"),
        ({"terminations": np.full(6, 2)}, "Require terminations [N] of True and False"),
        ({"rewards": None}, "got no rewards"),
    ],
)
def test_what_is_no_table_of_transitions_is_one_line(changed, named, tmp_path, capsys):
    table = {name: x for name, x in (GOOD | changed).items() if x is not None}
    np.savez(tmp_path / "data.npz", **table)
    assert refuses(capsys, offline, [tmp_path / "data.npz"], "cannot use ", named)


LAKE_ID = ("--env-id", "FrozenLake-v1")


@pytest.mark.parametrize(
    ("data", "flags", "named"),
    [
        ("none/data.npz", (*LAKE_ID, "--collect", 9), ".npz that can be written"),
        ("data", (*LAKE_ID, "--collect", 9), ".npz that can be written"),
        ("more.npz", (*LAKE_ID, "--collect", 9), "a new .npz"),
        ("new.npz", ("--collect", 9), "--collect requires --env-id"),
        ("data.npz", (*LAKE_ID, "--script", "nope"), "--script requires a module with Args"),
        ("data.npz", (*LAKE_ID, "--script", "json"), "--script requires a module with Args"),
        ("data.npz", ("--env-id", "Pong", "--script", "gb_rainbow_atari"), "gb_rainbow_atari"),
        ("run", (), "got the folder of a run: give its graph.npz"),
        ("text.npz", (), "Require an .npz with observations"),
        ("more.npz", LAKE_ID, "Require actions from 0 to 3, got 7"),
        ("good.npz", ("--env-id", "CartPole-v1"), "good.npz: Require data of CartPole-v1"),
        ("damaged.npz", (), "cannot use "),
    ],
)
def test_bad_flags_and_other_files_are_one_line(data, flags, named, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    np.savez(tmp_path / "good.npz", **GOOD)
    (tmp_path / "damaged.npz").write_bytes((tmp_path / "good.npz").read_bytes()[:200])
    (tmp_path / "text.npz").write_text("a text")
    columns = {"observations": OBS, "next_observations": AFTER, "actions": np.full(6, 7)}
    np.savez(tmp_path / "more.npz", **GOOD | columns)
    assert refuses(capsys, offline, [tmp_path / data, *flags], named)


def printed(capsys, *flags):
    assert command(offline, *flags) == 0
    lines = capsys.readouterr().out.splitlines()
    return {line.partition(":")[0]: line.partition(": ")[2] for line in lines}


def test_the_example_tells_mean_best_and_stitched_of_rows_and_of_a_graph(tmp_path, capsys):
    np.savez(tmp_path / "data.npz", **GOOD)
    found = printed(capsys, tmp_path / "data.npz", "--gamma", 0.5, "--sign")
    assert found["mean of 2 trajectories"] == "return 0.500, 3.0 steps, discounted 0.062"
    assert found["best of them"] == "return 1.000, 4.0 steps, discounted 0.125"
    assert found["stitched, by the data"] == "return 1.000, 2.0 steps, discounted 0.500; 100% end"
    assert "it passes 2 states; 2 have fewer than 5 transitions" in found
    graph_of(10, CROSSING).save(tmp_path / "graph.npz")
    same = printed(capsys, tmp_path / "graph.npz", "--gamma", 0.5)
    assert same["stitched, by the data"] == found["stitched, by the data"]
    assert "best of them" not in same


@jitted
@pytest.mark.parametrize(
    ("flags", "least"),
    [
        (LAKE_ID, 0.5),
        (("--env-id", "DoorKey-5x5", "--script", "gb_dqn_minigrid", "--sign"), 0.9),
        (("--env-id", "CartPole-v1", "--round", "1"), 30),
    ],
    ids=["lake", "door", "pole"],
)
def test_what_is_stitched_from_random_steps_is_better_where_it_is_played(
    flags, least, tmp_path, capsys
):
    words = (tmp_path / "data.npz", *flags, "--episodes", "20")
    found = printed(capsys, *words, "--collect", 12_000)
    mean, *_, played = [float(x.split()[1].strip(",")) for x in found.values() if "return" in x]
    assert played > max(least, 2 * mean)
    assert printed(capsys, *words)["best of them"] == found["best of them"]


class Chain(gymnasium.Env):
    """Four states in a row: one action goes on, the others begin anew; the end of it is worth 1."""

    SPACES: ClassVar = {
        "number": spaces.Discrete(4),
        "tuple": spaces.Tuple([spaces.Box(0, 99, (1,), np.int64)] * 12),
        "dict": spaces.Dict(
            z=spaces.Discrete(4), a=spaces.Tuple((spaces.Box(0, 1), spaces.Discrete(2)))
        ),
        "text": spaces.Dict(step=spaces.Discrete(4), mission=MissionSpace(lambda: "go on")),
        "texts": spaces.Dict(step=spaces.Discrete(4), mission=MissionSpace(lambda: "go on")),
    }
    OBSERVED: ClassVar = {
        "number": lambda s: s,
        "tuple": lambda s: tuple(np.array([(s + 2) * i % 7]) for i in range(12)),
        "dict": lambda s: {"z": s, "a": (np.array([s / 4], np.float32), 1)},
        "text": lambda s: {"step": s, "mission": "go on"},
        "texts": lambda s: {"step": s, "mission": f"go on {s}"},
    }

    def __init__(self, kind="number", start=0):
        self.observed, self.observation_space = self.OBSERVED[kind], self.SPACES[kind]
        self.action_space = spaces.Discrete(3, start=start)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.state = 0
        return self.observed(0), {}

    def step(self, action):
        assert action in self.action_space
        self.state = self.state + 1 if action == self.action_space.start + 1 else 0
        over = self.state == 3
        return self.observed(self.state), float(over), over, False, {}


gymnasium.register("Chain-v0", Chain, max_episode_steps=30)


def stacked(observations):
    """Observations as one, each part with all its times first, as Minari has them."""
    if isinstance(observations[0], dict):
        return {n: stacked([one[n] for one in observations]) for n in observations[0]}
    if isinstance(observations[0], tuple):
        return tuple(stacked(part) for part in zip(*observations, strict=True))
    is_text = isinstance(observations[0], str)
    return observations if is_text else np.array(observations)


def in_a_file(tree):
    """As in HDF5: groups, the parts of a tuple by the text of their number, text as bytes."""
    if isinstance(tree, tuple):
        tree = {f"_index_{i}": part for i, part in enumerate(tree)}
    if isinstance(tree, dict):
        return {name: in_a_file(tree[name]) for name in sorted(tree)}
    return np.array([x.encode() for x in tree], object) if isinstance(tree, list) else tree


def episodes_of(env):
    rng = np.random.default_rng(0)
    for _ in range(40):
        rows, seen, over = [], [env.reset()[0]], False
        while not over and len(rows) < 30:
            action = env.action_space.start + int(rng.integers(3))
            obs, reward, over, _, _ = env.step(action)
            seen.append(obs)
            rows.append((action, reward, over, len(rows) == 29 and not over))
        columns = map(np.array, zip(*rows, strict=True))
        names = "actions", "rewards", "terminations", "truncations"
        yield {"observations": stacked(seen), **dict(zip(names, columns, strict=True))}


def write_minari(monkeypatch, episodes, as_file):
    """What reads a Minari dataset finds these."""
    if not as_file:
        found = [types.SimpleNamespace(**episode) for episode in episodes]
        dataset = types.SimpleNamespace(iterate_episodes=lambda: found)
        minari = types.SimpleNamespace(MinariDataset=lambda path: {"data": dataset}[path.name])
        monkeypatch.setitem(sys.modules, "minari", minari)
        return
    file = {f"episode_{i}": in_a_file(episode) for i, episode in enumerate(episodes)}
    monkeypatch.setitem(sys.modules, "minari", None)
    monkeypatch.setitem(sys.modules, "h5py", types.SimpleNamespace(File=lambda path: file))


def test_a_minari_dataset_that_nothing_can_read_says_what_it_needs(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "minari", None)
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(OSError, match="needs pip install minari or h5py"):
        read_transitions(tmp_path)


@pytest.mark.parametrize("start", [-1, 0, 10**9])
def test_actions_are_the_environment_s_own_where_they_are_read_and_played(start, tmp_path, capsys):
    path, own = tmp_path / "data.npz", ("--env-kwargs", json.dumps({"start": start}))
    words = (path, "--env-id", "Chain-v0", *own, "--episodes", "5")
    found = printed(capsys, *words, "--collect", 600)
    assert set(np.load(path)["actions"]) == {start, start + 1, start + 2}
    for of in (found, printed(capsys, path)):
        assert of["stitched, by the data"].startswith("return 1.000, 3.0 steps")
    assert found["played there"] == "return 1.000, 3.0 steps"
    columns = dict(np.load(path))
    columns["actions"][7] = start + 3
    np.savez(path, **columns)
    told = f"Require actions from {start} to {start + 2}, got {start + 3}"
    assert refuses(capsys, offline, words, told)


@pytest.mark.parametrize("dtype", [np.float64, np.int8])
def test_observations_of_another_dtype_are_cast_where_no_value_changes(dtype, tmp_path, capsys):
    columns = {"observations": OBS, "next_observations": AFTER}
    columns = {name: x[:, None].repeat(4, axis=1).astype(dtype) for name, x in columns.items()}
    np.savez(tmp_path / "data.npz", **GOOD | columns | {"actions": ACTIONS % 2})
    words = tmp_path / "data.npz", "--env-id", "CartPole-v1", "--episodes", 2
    assert "played there" in printed(capsys, *words)


def test_states_may_be_numbers_or_rows_of_one_number(tmp_path, capsys):
    found = []
    for number, shape in enumerate([(-1,), (-1, 1)]):
        columns = {"observations": OBS.reshape(shape), "next_observations": AFTER.reshape(shape)}
        np.savez(path := tmp_path / f"{number}.npz", **GOOD | columns | {"actions": ACTIONS % 4})
        found.append(printed(capsys, path, *LAKE_ID, "--episodes", 2))
    assert found[0] == found[1]
    assert "played there" in found[0]


def test_a_large_action_takes_no_memory(tmp_path):
    np.savez(path := tmp_path / "data.npz", **GOOD | {"actions": np.array([0, 9, 0, 1, 9, 2**62])})
    columns = read_transitions(path)
    assert offline.graph_of(columns, lambda obs: None)[0].num_actions == 4


@interpreted
@pytest.mark.parametrize("as_file", [False, True])
@pytest.mark.parametrize("kind", ["number", "tuple", "dict", "text"])
def test_observations_of_minari_are_flattened_as_they_are_played(
    kind, as_file, monkeypatch, tmp_path, capsys
):
    """Whether minari or h5py reads them."""
    write_minari(monkeypatch, list(episodes_of(Chain(kind, start=2))), as_file)
    own = ("--env-kwargs", json.dumps({"kind": kind, "start": 2}))
    found = printed(capsys, tmp_path, "--env-id", "Chain-v0", *own, "--episodes", 3)
    assert "mean of 40 trajectories" in found
    assert found["stitched, by the data"].startswith("return 1.000, 3.0 steps")
    assert found["played there"].startswith("return 1.000, 3.0 steps")
    assert printed(capsys, tmp_path)["stitched, by the data"] == found["stitched, by the data"]


@pytest.mark.parametrize("as_file", [False, True])
def test_a_part_that_is_no_number_is_named_and_can_be_left_out(
    as_file, monkeypatch, tmp_path, capsys
):
    write_minari(monkeypatch, list(episodes_of(Chain("texts"))), as_file)
    task = ("--env-id", "Chain-v0", "--env-kwargs", '{"kind": "texts"}', "--episodes", 3)
    for words, named in (
        ((), "got text in mission: leave mission out"),
        (task, "--leave-out mission"),
        (("--leave-out", "misson"), "Require parts of observations, mission, step: ['misson']"),
        ((*task, "--leave-out", "misson"), "require --leave-out of parts"),
    ):
        assert refuses(capsys, offline, [tmp_path, *words], named)
    for words in ((), task):
        found = printed(capsys, tmp_path, *words, "--leave-out", "mission")
        assert found["stitched, by the data"].startswith("return 1.000, 3.0 steps")
    assert found["played there"].startswith("return 1.000, 3.0 steps")
    np.savez(path := tmp_path / "rows.npz", **GOOD)
    words, named = [path, "--leave-out", "mission"], "parts of observations, none: ['mission']"
    assert refuses(capsys, offline, words, named)
