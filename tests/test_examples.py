"""examples/: what they learn, leave behind and refuse; any environment as GymnasiumTask has it."""

import importlib
import itertools
import json
import pickle
import re
import runpy
import shlex
import sys
import types
from pathlib import Path

import evaluate
import gymnasium
import imageio_ffmpeg
import numpy as np
import pytest
import torch
import would_it_help
from conftest import ROOT, command, is_one_line, jitted, refuses, result_of, short_run, spy
from gymnasium import spaces, wrappers
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.utils.env_checker import check_env

import gbcore
from examples import gb_dqn_gymnasium as example
from examples import mazes, offline, sokoban, worlds
from gbcore import FrontierEpisodes, Replay, TransitionGraph
from gbcore.first_tries import as_grids
from gbcore.run import load_checkpoint, write_video
from gbcore.run.environment import GymnasiumTask, as_numbers, has_grid, warn_unless_repeatable

pytestmark = [jitted, pytest.mark.usefixtures("torch_settings")]
FLAGS = (
    "--total-timesteps 300 --learning-starts 100 --eval-episodes 2 --eval-frequency 150 "
    "--log-frequency 100 --exploration-steps 200 --time-limit 50"
).split()

SPACES = {
    "number": spaces.Discrete(5),
    "scalar": spaces.Box(-1, 1, (), np.float64),
    "vector": spaces.Box(-np.inf, np.inf, (3,), np.float32),
    "bits": spaces.MultiBinary(4),
    "matrix": spaces.Box(0, 9, (4, 5), np.int32),
    "image": spaces.Box(0, 255, (20, 16, 3), np.uint8),
    "frames": spaces.Box(0, 255, (2, 36, 36), np.uint8),
    "small image": spaces.Box(0, 1, (5, 5, 2), np.bool_),
    "dict": spaces.Dict(at=spaces.Box(0, 1, (2,), np.float32), has_key=spaces.Discrete(2)),
    "tuple": spaces.Tuple((spaces.Discrete(3), spaces.MultiDiscrete([2, 2]))),
    "text": spaces.Text(3),
    "one of": spaces.OneOf([spaces.Discrete(3), spaces.Box(0, 1, (2,), np.float32)]),
}
REFUSED = {
    "text and reals": spaces.Dict(at=spaces.Box(0, 1, (2,), np.float32), word=spaces.Text(3)),
    "sequence": spaces.Sequence(spaces.Discrete(2)),
    "nothing": spaces.Box(0, 1, (0,)),
}


class Sampled(gymnasium.Env):
    """Observations drawn from a space."""

    def __init__(self, space="vector", actions=3, start=0, render_mode=None):
        self.observation_space = (SPACES | REFUSED)[space]
        self.action_space = spaces.Discrete(actions, start=start)

    def observation(self):
        self.observation_space.seed(int(self.np_random.integers(1000)))
        return self.observation_space.sample()

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.observation(), {}

    def step(self, action):
        assert action in self.action_space
        self.steps += 1
        return self.observation(), self.steps / 10, bool(self.steps == 30), False, {}


gymnasium.register("Sampled-v0", Sampled)
gymnasium.register("Unseen-v0", lambda: Sampled())  # cannot be rendered


def run_example(folder, *flags):
    return short_run(example, folder, *FLAGS, *flags)


def sampled(**kwargs):
    return "--env-id", "Sampled-v0", "--env-kwargs", json.dumps(kwargs)


def task_of(env_id="Sampled-v0", kwargs=None, **flags):
    return GymnasiumTask(env_id, np.random.default_rng(0), json.dumps(kwargs or {}), **flags)


# --- The environment ---


@pytest.mark.parametrize("space", SPACES)
def test_any_space_is_one_shape_and_dtype_and_is_played_again(space):
    kwargs = {"space": space, "start": -1}
    task = task_of(kwargs=kwargs)
    first = task.reset()
    assert first.shape == task.shape == task.scale.shape != ()
    for action in (0, 2, 1):
        obs, *outcome = task.step(action)
        assert obs is task.obs
        assert (obs.shape, obs.dtype) == (first.shape, first.dtype)
    assert outcome == [0.3, False, False]
    other = GymnasiumTask("Sampled-v0", np.random.default_rng(9), json.dumps(kwargs), decimals=1)
    other.reset()
    other.restore(pickle.loads(pickle.dumps(task.state())))
    np.testing.assert_array_equal(other.obs, obs)
    np.testing.assert_array_equal(other.step(0)[0], task.step(0)[0])
    other.reset(), task.reset()
    assert other.seed == task.seed  # its generator goes on, too


def test_numbers_are_one_hot_and_bounds_are_the_scale():
    assert task_of("FrozenLake-v1").reset().tolist() == [1] + [0] * 15
    np.testing.assert_allclose(task_of("CartPole-v1").scale, [4.8, 1, np.deg2rad(24), 1], 1e-6)
    assert (task_of(kwargs={"space": "image"}).scale == 255).all()
    assert task_of(kwargs={"space": "tuple"}, leave_out=" 1 ").shape == (3,)


def small(*shape, most=255, dtype=np.uint8):
    return spaces.Box(0, most, shape, dtype)


GRIDS = {  # a space; grid [H, W, C] and other numbers of an observation; dtype where levels change
    "a heading": (
        spaces.Dict(at=small(4, 6), way=spaces.Discrete(4, start=-1)),
        lambda obs: (obs["at"][..., None], [obs["way"]]), np.int16,
    ),
    "of codes": (
        spaces.MultiDiscrete(np.full((4, 5), 16)), lambda obs: (obs[..., None], []), np.int64,
    ),
    "planes": (
        spaces.Tuple((spaces.MultiBinary(2), small(2, 6, 5, most=1, dtype=np.bool_))),
        lambda obs: (np.moveaxis(obs[1], 0, 2), obs[0]), np.uint8,
    ),
    "deeper, below 0": (
        spaces.Dict(a=spaces.Dict(at=small(4, 4)), b=spaces.Box(-3, 4, (2,), np.int64)),
        lambda obs: (obs["a"]["at"][..., None], obs["b"]), np.int16,
    ),
}  # fmt: skip
NO_GRIDS = [
    spaces.Dict(a=small(4, 6), b=small(4, 6)),
    spaces.Dict(at=small(4, 6), left=small(1, most=16)),  # 17 values
    spaces.Dict(at=small(4, 6), left=spaces.Box(0, 1, (1,))),  # reals
    spaces.Dict(at=small(6, 9), left=spaces.Box(0, 1, (8,), np.int8)),  # [6, 9, 9], of planes
    spaces.Dict(at=small(4, 6), left=spaces.Sequence(spaces.Discrete(3))),  # no array
    spaces.MultiDiscrete(np.full((4, 6), 17)),
]


@pytest.mark.parametrize(("space", "parts_of", "dtype"), GRIDS.values(), ids=GRIDS)
def test_where_levels_change_a_grid_stays_one_and_has_the_few_integers_beside(
    space, parts_of, dtype, monkeypatch
):
    monkeypatch.setitem(SPACES, "made", space)
    one, many = (task_of(kwargs={"space": "made"}, num_levels=n) for n in (1, 0))
    assert one.shape == (spaces.flatdim(space),)
    assert (many.reset().shape, many.dtype) == (many.shape, dtype)
    obs = space.sample()
    (grid, numbers), seen = parts_of(obs), many.flatten(obs)
    assert (seen.shape, seen.dtype) == (many.scale.shape, dtype)
    seen = as_grids(seen).reshape(*grid.shape[:2], -1)
    for row, column in np.ndindex(*grid.shape[:2]):
        np.testing.assert_array_equal(seen[row, column], [*grid[row, column], *numbers])


def test_other_parts_are_one_row_of_numbers():
    assert [has_grid(as_numbers(space)) for space in NO_GRIDS] == [False] * len(NO_GRIDS)


def test_environments_of_an_evaluation_are_closed(monkeypatch):
    closed = []
    monkeypatch.setattr(CartPoleEnv, "close", lambda env: closed.append(1))
    example.evaluate(example.Args(), "CartPole-v1", lambda obs: np.zeros(len(obs), np.int64), 0, 3)
    assert len(closed) == 3


def make_task(space="vector", limit=50, **otherwise):
    """A task that samples a space, and has or does something otherwise."""
    env = Sampled(space)
    for name, value in otherwise.items():
        setattr(env, name, value)
    gymnasium.registry.pop("Made-v0", None)
    gymnasium.register("Made-v0", lambda **_: env, max_episode_steps=limit)
    return task_of("Made-v0", render_mode="rgb_array")


NESTED = spaces.Dict(at=spaces.Tuple((spaces.Discrete(3), small(2))))


@pytest.mark.parametrize(
    ("space", "obs"),
    [
        (small(2), np.array([0.5, 1])),
        (small(2, dtype=np.int64), np.array([1, np.nan])),
        (small(dtype=np.float32), 2**24 + 1),
        (small(2, dtype=np.float32), np.array([0, -np.inf])),
        (small(2, dtype=np.float32), np.zeros(7)),
        (spaces.Discrete(5), -1),
        (NESTED, {"at": (2, np.array([0.5, 0]))}),
    ],
    ids=str,
)
def test_an_observation_that_its_space_does_not_hold_is_refused(space, obs):
    task = make_task(observation_space=space, reset=lambda **_: (obs, {}))
    with pytest.raises(ValueError, match="Made-v0: require observations of "):
        task.reset()


def test_reals_are_rounded_to_the_space_s_dtype_and_bounds_are_not_looked_at():
    obs = {"at": np.array([0.1, 7.0]), "has_key": 1}
    task = make_task("dict", reset=lambda **_: (obs, {}))
    np.testing.assert_array_equal(task.reset(), np.array([0.1, 7, 0, 1], np.float32))


@pytest.mark.parametrize("method", ["reset", "step", "render"])
def test_what_an_environment_raises_is_shown_as_it_is(method, capsys):
    def fails(*_, **__):
        raise ValueError("the door is stuck")

    task = make_task(**{method: fails})
    with pytest.raises(SystemExit, match="1"):
        task.reset(), task.step(0), task.render()
    err = capsys.readouterr().err
    assert f'File "{__file__}"' in err
    assert err.endswith("ValueError: the door is stuck\n")


def test_what_is_slow_or_cut_is_said_once(capsys):
    long = {"observation_space": spaces.Discrete(20_000), "reset": lambda **_: (0, {})}
    long["step"] = lambda _: (0, 0.0, False, False, {})
    make_task(limit=None, **long)
    for _ in range(2):
        task = task_of("Made-v0")
        task.reset()
        ends = [task.step(0)[3] for _ in range(1_000)]
        assert ends == [False] * 999 + [True]
    slow, cut = capsys.readouterr().err.splitlines()
    assert "becomes 20,000 numbers" in slow
    assert "cut after 1,000 steps" in cut


def test_limits_are_truncations_and_the_one_that_was_asked_for_holds():
    for env_id, limit, most in (
        ("CliffWalking-v1", 7, 7),  # that it is cut after 1,000 is in the test above
        ("MountainCar-v0", None, 200),
        ("MountainCar-v0", 300, 300),  # registered with 200
        ("Sampled-v0", 30, 30),  # an end at the limit is an end and no truncation
    ):
        task = task_of(env_id, time_limit=limit)
        task.reset()
        ends = [task.step(0)[2:] for _ in range(most)]
        is_end = env_id == "Sampled-v0"
        assert ends == [(False, False)] * (most - 1) + [(is_end, not is_end)]


def test_keys_merge_what_rounds_alike_and_tell_last_actions_apart():
    def keys(obs, **flags):
        task, result = task_of(**flags), []
        task.reset()
        for values, task.actions in obs:
            task._observe(np.array(values, np.float32), {})
            result.append(None if task.key is None else task.key.tobytes())
        return result

    near = [([0.01, 2.0, -0.04], []), ([-0.02, 1.96, 0.0], [1]), ([0.06, 2.0, 0.0], [1])]
    assert keys(near) == [None] * 3
    a, b, c = keys(near, decimals=1)
    assert a == b != c
    a, b, c = keys(near, decimals=1, key_last_action=True)
    assert a != b != c
    a, b, c, d = keys([([1.0] * 3, actions) for actions in ([], [0], [2, 0], [1])],
                      key_last_action=True)  # fmt: skip
    assert a != b == c != d


@pytest.mark.parametrize(
    ("before", "last"),
    [
        *(([], {"key": key}) for key in ({"x": 1}, None, [[1], [2, 3]], [])),
        *(([{"key": [1]}], info) for info in ({}, {"key": [1.0]}, {"key": [1, 2]})),
        ([{}], {"key": [1]}),
    ],
    ids=str,
)
def test_a_key_that_is_no_array_or_unlike_the_first_ends_the_program(before, last, capsys):
    task, obs = task_of(), np.zeros(3, np.float32)
    for info in before:
        task._observe(obs, info)
    with pytest.raises(SystemExit):
        task._observe(obs, last)
    assert is_one_line(capsys, 'error: Sampled-v0: require info["key"], an array of one shape')


def test_in_keys_minus_zero_is_zero():
    task, keys = task_of(), []
    for zero in (0.0, -0.0):
        task._observe(np.zeros(3, np.float32), {"key": [zero, 1.0]})
        keys.append(task.key.tobytes())
    assert keys[0] == keys[1]


def test_what_an_episode_hands_on_to_the_next_is_told(capsys):
    warn_unless_repeatable(task_of())
    assert capsys.readouterr().err == ""
    outcome, total = (False, False, {}), itertools.count()
    warn_unless_repeatable(make_task(step=lambda _: (np.zeros(3), next(total), *outcome)))
    assert is_one_line(capsys, "warning: two episodes of one seed", "kept between episodes")


OWN_WORLD = """
import gymnasium

class World(gymnasium.Env):
    observation_space, action_space = gymnasium.spaces.Discrete(2), gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return 0, {}

    def step(self, action):
        return 1, 1.0, True, False, {}

gymnasium.register("Sokoban-v0", "%s:World", max_episode_steps=5)
"""


def test_a_module_of_the_user_s_comes_first_for_scripts_and_tools(tmp_path, monkeypatch, capsys):
    """Before this repository's own of that name."""
    (tmp_path / "sokoban.py").write_text(OWN_WORLD % "sokoban")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(ROOT / "examples"), *sys.path])
    monkeypatch.setitem(sys.modules, "sokoban", None)  # as it was, in the end
    monkeypatch.delitem(sys.modules, "sokoban")
    monkeypatch.setitem(gymnasium.registry, "Sokoban-v0", None)
    monkeypatch.delitem(gymnasium.registry, "Sokoban-v0")
    env_id = "sokoban:Sokoban-v0"
    own = f"{env_id} ({tmp_path / 'sokoban.py'})"
    for script, words, printed in (
        (example, f"--env-id {env_id} --total-timesteps 40 --eval-episodes 1", own),
        (would_it_help, f"{env_id} --steps 20", own),
        (offline, f"data.npz --env-id {env_id} --collect 9 --episodes 1", "return 1.000, 1.0 step"),
    ):
        assert command(script, *words.split()) == 0
        assert printed in capsys.readouterr().out


@pytest.mark.parametrize("file", ["random.py", "examples/__init__.py"])
def test_a_module_whose_name_is_taken_is_refused(file, tmp_path, monkeypatch, capsys):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    words = "--env-id", f"{re.match('[a-z]+', file)[0]}:Mine-v0"
    assert refuses(capsys, example, words, f"{tmp_path / file} another name")


def test_a_run_goes_on_in_the_folder_of_its_own_module(tmp_path, monkeypatch, capsys):
    own = (OWN_WORLD % "world_of_mine").replace("Sokoban-v0", "Mine-v0")
    for folder in ("mine", "other"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "world_of_mine.py").write_text(own)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path / "mine")
    run = short_run(example, tmp_path / "runs", "--env-id", "world_of_mine:Mine-v0")
    monkeypatch.delitem(sys.modules, "world_of_mine")
    monkeypatch.chdir(tmp_path / "other")
    for main, flags in ((example, ("--resume", run, "--total-timesteps", 70)), (evaluate, (run,))):
        file = f"Require {tmp_path}/mine/world_of_mine.py"
        assert refuses(capsys, main, flags, file, "go to its folder")
    (tmp_path / "mine").rename(tmp_path / "moved")  # the file is gone: this is it, for all we know
    assert command(evaluate, run, "--episodes", 1) == 0


# --- Videos ---


def test_a_video_has_the_frames_and_what_is_none_leaves_no_file(tmp_path):
    rgb = np.full((9, 16, 3), (200, 100, 0), np.uint8)
    write_video(tmp_path / "v.mp4", [rgb] * 3, fps=10)
    about, *frames = imageio_ffmpeg.read_frames(str(tmp_path / "v.mp4"))
    assert (about["size"], len(frames)) == ((16, 10), 3)  # an even number of rows
    last = np.frombuffer(frames[-1], np.uint8).reshape(10, 16, 3)
    np.testing.assert_allclose(last[[0, -1], [0, -1]], [(200, 100, 0)] * 2, atol=4)
    for frame in (rgb / 255, rgb[..., 0], [None]):
        with pytest.raises(ValueError, match="require"):
            write_video(tmp_path / "none.mp4", [rgb, frame], fps=10)
    assert [path.name for path in tmp_path.iterdir()] == ["v.mp4"]


# --- gb_dqn_gymnasium.py ---


def test_frozen_lake_is_learned_and_evaluated_elsewhere_and_beside_chance(tmp_path, capsys):
    words = (*FLAGS, "--env-kwargs", '{"is_slippery": false}', "--total-timesteps", "2000")
    assert command(example, *words, "--run-dir", tmp_path) == 0
    (run,) = tmp_path.iterdir()
    assert (result_of(run)["score"], result_of(run)["random_actions"]) == (1, 0)
    assert "score 1, random actions 0 after 2000 steps" in capsys.readouterr().out
    for more, mean in (((), "mean return 1,"), (("--env-kwargs", "{}"), "mean return 0")):
        assert command(evaluate, run, "--episodes", 20, "--epsilon", 0, *more) == 0
        out = capsys.readouterr().out
        assert mean in out.replace(" (standard error 0)", "")
        assert "random actions 0" in out
    larger = ("--env-kwargs", '{"map_name": "8x8"}')
    assert refuses(capsys, evaluate, (run, *larger), "gives observations (64,), the run has (16,)")


def test_whole_graph_explores_by_kind_where_observations_are_grids(tmp_path, monkeypatch):
    kinds = []
    made = lambda *args: kinds.append(args[2]) or FrontierEpisodes(*args)  # noqa: E731
    monkeypatch.setattr(example, "FrontierEpisodes", made)
    for backup in ("whole-graph", "graph"):
        words = ("--backup", backup, "--exploration", "frontier", "--train-frequency", "50")
        run_example(tmp_path / backup, "--env-id", "examples.sokoban:Sokoban-v0", *words)
    assert [of is not None for of in kinds] == [True, False]


@pytest.mark.parametrize("space", ["vector", "matrix", "image", "frames", "small image"])
def test_a_network_for_every_space(space, tmp_path):
    few = ("--total-timesteps=150", "--train-frequency=20")
    network = torch.load(run_example(tmp_path, *sampled(space=space, start=2), *few) / "model.pt")
    is_image = space in ("image", "frames", "small image")
    assert any(array.ndim == 4 and array.shape[1] <= 3 for array in network.values()) == is_image


@pytest.mark.parametrize("flags", [(), ("--round", "1"), ("--key-last-action",)], ids=str)
def test_the_replay_holds_the_observations_of_the_run(flags, tmp_path):
    run = run_example(tmp_path, "--env-id", "CartPole-v1", "--train-frequency", "50", *flags)
    tree = load_checkpoint(run)
    rows, graph = tree["replay"]["rows"], TransitionGraph.from_state(tree["graph"])
    assert graph.num_transitions == len(rows["node"]) == 300
    assert (graph.novel_state_ratio < 1) == ("--round" in flags)
    seen = rows["obs"] if flags else graph.observations_of(rows["node"])
    env = gymnasium.make("CartPole-v1").unwrapped
    env.reset()
    continued = np.flatnonzero(~rows["cut"])
    assert len(continued) > 250
    for i in continued:
        env.state = seen[i].astype(np.float64)
        after = env.step(int(rows["action"][i]))[0]
        np.testing.assert_allclose(after, seen[i + 1], atol=1e-5)


BAD = {
    "continuous actions": (("--env-id", "Pendulum-v1"), "a graph needs Discrete ones"),
    "unknown id": (("--env-id", "FrozenLke-v1"), "nearest: FrozenLake"),
    "path": (("--env-id", "no/such.py:Grid-v0"), "typed as Python imports it"),
    "unknown module": (("--env-id", "no_such_module:Grid-v0"), "cannot import 'no_such_module'"),
    "no JSON": (("--env-kwargs", "{is_slippery}"), "cannot make FrozenLake-v1 with {is_slippery}"),
    "no module": (("--env-id", "ALE/Freeway-v5"), "as in ale_py:ALE/Pong-v5"),
    "no pictures": (("--env-id", "Unseen-v0", "--capture-video"), "Unseen-v0 cannot be rendered"),
    "text": (("--env-id", "minigrid:MiniGrid-Empty-5x5-v0"), "mission; --leave-out mission does"),
    "text and reals": (sampled(space="text and reals"), "word; --leave-out word does"),
    "sequence": (sampled(space="sequence"), "which Gymnasium cannot flatten"),
    "nothing": (sampled(space="nothing"), "at least one number"),
    "codes": ((*sampled(space="image"), "--num-levels", "0"), "at most 16 codes"),
    "no part": ((*sampled(space="dict"), "--leave-out", "key"), "observed, at, has_key; got"),
}


@pytest.mark.parametrize(("flags", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_one_line(flags, message, tmp_path, capsys, monkeypatch):
    for name in [name for name in gymnasium.registry if name.startswith("ALE/")]:
        monkeypatch.delitem(gymnasium.registry, name)  # which another test's ale_py registered
    assert refuses(capsys, example, [*FLAGS, "--run-dir", tmp_path, *flags], message)


def env_of(shown, task="mazes:Maze-v0", seed=0):
    """An environment shown as shown(cells, time), and its generator."""

    class Env(GymnasiumTask):
        def flatten(self, obs):
            return shown(obs.copy(), len(self.actions))

    rng = np.random.default_rng(seed)
    return Env(example.task_of(f"examples.{task}"), rng, num_levels=0), rng


WAYS = worlds.Turner.WAYS


def with_look_apart(cells, time):
    """As MiniGrid has it: the player has one code, and where he looks is another channel's."""
    is_player = np.isin(cells, WAYS)
    return np.stack([np.where(is_player, worlds.PLAYER, cells), cells * is_player], axis=2)


def with_look_everywhere(cells, time):
    """The player has one code. Each cell has where he looks, one-hot, as of a Discrete beside."""
    is_player = np.isin(cells, WAYS)
    looks = (cells[is_player] == WAYS) & np.full((8, 8, 1), True)
    return np.dstack([np.where(is_player, worlds.PLAYER, cells), looks]).astype(np.uint8)


def planes(num, dtype):
    """A plane for each code, first."""
    return lambda cells, time: (cells == np.arange(num)[:, None, None]).astype(dtype)


SEEN = {  # a world, how it is shown; pairs of the agent's cell, those that say where it looks
    "codes": ("mazes:Maze", lambda cells, time: cells, [(0, mazes.PLAYER)], []),
    "planes last": (
        "mazes:Maze", lambda cells, time: (cells[..., None] == np.arange(5)) * 1,
        [(mazes.PLAYER, 1)], [],
    ),
    "more planes than rows": ("mazes:Maze", planes(9, np.float32), [(mazes.PLAYER, 1)], []),
    "ways of one code": (
        "worlds:Turner", lambda cells, time: np.minimum(cells, 7), [(0, 3), (0, 7)], [],
    ),
    "no square": (
        "worlds:Turner", lambda cells, time: cells[:, :7], [(0, code) for code in WAYS], [],
    ),
    "ways": (
        "worlds:Turner", lambda cells, time: cells[..., None],
        *2 * [[(0, code) for code in WAYS]],
    ),
    "a channel of its own": (
        "worlds:Turner", with_look_apart, [(0, worlds.PLAYER)], [(1, code) for code in WAYS],
    ),
    "planes of ways": ("worlds:Turner", planes(10, np.uint8), *2 * [[(c, 1) for c in WAYS]]),
    "everywhere": (
        "worlds:Turner", with_look_everywhere, [(0, worlds.PLAYER)], [(i, 1) for i in range(1, 5)],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("world", "shown", "agent", "look"), SEEN.values(), ids=SEEN)
def test_where_levels_change_a_grid_is_seen_from_the_agent(world, shown, agent, look):
    """It is moved until the agent is in the middle, and turned until it looks up."""
    env, rng = env_of(shown, f"{world}-v0")
    graph = TransitionGraph(env.num_actions, env.reset().shape, env.obs.dtype)
    seen = example.look_at_grids(env, rng)
    assert seen[1:] == (agent, look)
    learner = graph, Replay(graph, 9), torch.device("cpu"), np.ones(graph.obs_shape), *seen
    network = example.Learner(example.Args(num_levels=0), *learner).online
    for action in rng.integers(env.num_actions, size=60):
        looks_up = turned = cells = env.env.unwrapped.cells  # as the world has them
        ((row, column),) = np.argwhere(np.isin(cells, WAYS))
        ahead, right = np.array(example.WAYS)[:2]
        if look:
            way = WAYS.index(cells[row, column])
            ahead, right = np.array(example.WAYS)[[way, (way + 1) % 4]]
            looks_up, turned = cells.copy(), np.rot90(cells, -1).copy()  # seen from beside
            looks_up[row, column] = worlds.PLAYER
            turned[column, 7 - row] = WAYS[(way + 1) % 4]
        grid, expected = (as_grids(one) for one in (env.obs, shown(looks_up, 0)))
        height, width = grid.shape[:2]
        (moved,) = network.move_to_agent(torch.from_numpy(grid.reshape(1, height, width, -1)))
        for forward, beside in np.ndindex(3, 3):  # what lies there for whom looks that way
            x, y = (row, column) + forward * ahead + beside * right
            there = moved[height // 2 - forward, width // 2 + beside]
            np.testing.assert_array_equal(there, expected[x % height, y % width].reshape(-1))
        with torch.inference_mode():
            values = network(torch.from_numpy(np.array([env.obs, shown(turned, 0)])))
        assert values.shape == (2, env.num_actions)
        np.testing.assert_array_equal(values[0], values[1])
        if any(env.step(int(action))[2:]):
            env.reset()


GUARD = 4


def with_guard(maze, time):
    """One that walks to and fro, and a lamp that goes on and off."""
    maze[0, 1 + min(time % 8, -time % 8)] = GUARD
    maze[2, 0] = 8 + time // 2 % 2
    return maze


def with_spark(maze, time):
    """One that is anywhere, and a player that is not seen at each fifth step."""
    maze = np.where((maze == mazes.PLAYER) & (time % 5 == 4), mazes.FLOOR, maze)
    maze.flat[np.random.default_rng(time).choice(np.flatnonzero(maze == mazes.WALL))] = GUARD
    return maze


def as_shares_of_ten(maze, time):
    """Reals of 64 bits, which no real of 32 bits is equal to."""
    return maze / 10


SHOWN = {  # codes of the cells, those of the agent
    "guard": (with_guard, [*range(5), 8, 9], [(0, mazes.PLAYER)]),
    "spark": (with_spark, range(5), []),
    "reals": (as_shares_of_ten, np.arange(4) / 10, [(0, 0.3)]),
}


@pytest.mark.parametrize(("shown", "codes", "agent"), SHOWN.values(), ids=SHOWN)
def test_the_agent_is_what_actions_move(shown, codes, agent):
    for seed in range(3):
        found_codes, found_agent, _ = example.look_at_grids(*env_of(shown, seed=seed))
        assert (found_codes.tolist(), found_agent) == ([*codes], agent)


def test_a_run_says_that_no_agent_is_seen(tmp_path, capsys):
    run_example(tmp_path, *sampled(space="matrix"), "--num-levels", "0")
    assert "no agent's cell is seen in observations [4, 5]" in capsys.readouterr().err


def test_each_code_has_a_channel_also_one_that_comes_later(capsys):
    network, other = (example.make_network(example.Args(num_levels=0), (4, 4), 2) for _ in range(2))
    grids = torch.from_numpy(as_shares_of_ten(np.arange(3).repeat(16).reshape(-1, 4, 4), 0))
    with torch.inference_mode():
        before = network(grids)
        assert torch.equal(before[0], before[1])  # no update has met them
    network.meet(grids[:2])
    assert network(grids).isfinite().all()  # an update's
    values = network(grids).detach()
    assert len(values.unique(dim=0)) == 3
    other.load_state_dict(network.state_dict())
    assert torch.equal(other(grids), values)
    with pytest.raises(SystemExit):
        network.meet(torch.arange(100, 117))
    assert "at most 16 codes, got 20" in capsys.readouterr().err


def test_targets_that_lead_to_no_reward_and_no_end_weigh_less(monkeypatch):
    args = example.Args(num_levels=0, backup="whole-graph", guess_weight=0.3)
    graph, weights = TransitionGraph(2, (1,), np.float32), []
    replay = Replay(graph, 10)
    learner = example.Learner(args, graph, replay, torch.device("cpu"))
    weight_of = {}
    for state, action, reward, after, is_end, weight in (
        (0, 1, 0, 1, False, 1), (1, 0, 1, 2, True, 1), (1, 1, 0, 3, False, 0.3),
        (3, 0, 0, 4, False, 0.3), (4, 1, -1, 5, True, 1),
    ):  # fmt: skip
        ends = graph.nodes(np.float32([[state], [after]]))
        replay.add(ends[0], action, reward, ends[1], is_end)
        weight_of[ends[0], action] = weight
    spy(monkeypatch, example.F, "mse_loss", lambda q, targets, weight: weights.append(weight))
    batch = replay.sample(64, rng := np.random.default_rng(0))
    learner.update(batch, rng)
    expected = [weight_of[pair] for pair in zip(batch.nodes, batch.actions, strict=True)]
    np.testing.assert_allclose(weights[0], expected)


def test_a_checkpoint_of_an_environment_that_changed_is_refused(monkeypatch, tmp_path, capsys):
    run = run_example(tmp_path, *sampled(space="vector"))
    monkeypatch.setattr(Sampled, "observation", lambda self: np.zeros(3, np.float32))
    words = "--resume", run, "--total-timesteps", 400
    assert refuses(capsys, example, words, "the episode under way plays otherwise")


@pytest.mark.parametrize("name", ["Tiles", "Coins", "Block", "Lever", "Guard", "Turner"])
def test_worlds_are_drawn_anew_and_can_be_solved(name):
    env = gymnasium.make(f"{name}-v0", disable_env_checker=True).unwrapped
    check_env(env, skip_render_check=True)
    levels = [env.reset(seed=seed)[1]["level"] for seed in [*range(10), 0]]
    assert (len({*levels}), levels[0]) == (10, levels[-1])
    for action in env.np_random.integers(env.action_space.n, size=1_000).tolist():
        cells, reward, terminated, *_ = env.step(action)
        assert reward in ({0, 1} if terminated else {0})
        players = getattr(env, "WAYS", [worlds.PLAYER])
        assert np.isin(cells, players).sum() == 1 or terminated
        assert (np.pad(cells[1:-1, 1:-1], 1, constant_values=worlds.WALL) == cells).all()
        assert not terminated or env.reset()[1]["level"] not in levels
    env.reset(seed=0)
    assert env.is_solvable()
    env.cells[env.cells == worlds.FLOOR] = worlds.WALL
    assert not env.is_solvable()


# --- tabular.py ---


@pytest.mark.parametrize(("level", "steps"), [(0, 17), (1, 15)])
def test_a_level_of_sokoban_is_solved_by_breadth_first_search(level, steps):
    env = sokoban.Sokoban(level)
    start, _ = env.reset(seed=0)
    length, queue = {start.tobytes(): 0}, [start]
    for cells, action in ((cells, action) for cells in queue for action in range(4)):  # it grows
        env.cells = cells.copy()
        obs, reward, terminated, _, _ = env.step(action)
        assert env.observation_space.contains(obs)
        assert (obs.sum(axis=(0, 1)) == start.sum(axis=(0, 1))).all(), "nothing is lost"
        assert (obs[..., 0] + obs[..., 2] + obs[..., 3] <= 1).all(), "one thing in a cell"
        if terminated:
            assert (reward, length[cells.tobytes()] + 1) == (1, steps)
            return
        if obs.tobytes() not in length:
            length[obs.tobytes()] = length[cells.tobytes()] + 1
            queue.append(obs)
    raise AssertionError("no way")


def test_the_tabular_agent_of_the_readme_finds_the_shortest_path(capsys):
    path = ROOT / "examples" / "tabular.py"
    runpy.run_path(str(path))
    assert capsys.readouterr().out == ("value of the start: 0.774; the shortest path gives 0.774\n")
    code = path.read_text()
    assert code[code.index("env = ") :] in (ROOT / "README.md").read_text()


# --- docs/your_own.md, docs/your_agent.md ---

OWN, AGENT = ((ROOT / "docs" / f"your_{name}.md").read_text() for name in ("own", "agent"))
SB3, LEVELS, KEY, DICT, NEXT_STEP, SAME_STEP, *CLEANRL, WHOLE = re.findall(
    r"```python\n(.*?)```", AGENT, re.DOTALL
)


def test_each_step_of_the_page_is_typed_and_the_advice_is_its_next_command(
    tmp_path, monkeypatch, capsys
):
    (world,) = re.findall(r"```python\n(.*?)```", OWN, re.DOTALL)
    (tmp_path / "my_world.py").write_text(world)
    monkeypatch.chdir(tmp_path)
    short = {
        "tools/would_it_help.py": ("--steps", 2000, "--sampled", 50),
        "examples/gb_dqn_gymnasium.py": FLAGS,
    }
    typed, printed = "".join(re.findall(r"```bash\n(.*?)```", OWN, re.DOTALL)).splitlines(), []
    for line in typed:
        line = line.replace("runs/*", " ".join(map(str, Path("runs").glob("*"))))
        python, path, *words = shlex.split(line, comments=True)
        module = path.removesuffix(".py").removeprefix("tools/").replace("/", ".")
        words += short.get(path, ())
        words += ("--total-timesteps", "900") if len(printed) == 2 else ()  # to be solved
        assert (python, command(importlib.import_module(module), *words)) == ("python", 0)
        printed.append(capsys.readouterr().out)
    assert "Worth trying" in printed[0]
    assert "exploration has to find a reward: none was met" in printed[0]
    assert printed[0].replace(f"{ROOT}/", "").splitlines()[-1] == f"try: {typed[2]}"
    runs = sorted((tmp_path / "runs").iterdir(), key=lambda run: run.stat().st_ctime)
    assert [run.name.split("__")[0] for run in runs] == ["my_world-Lock-v0"] * 4
    assert "score 1, random actions 0 after 900 steps" in printed[2]
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def names(**more):
    """What the page's snippets start from."""
    public = {name: getattr(gbcore, name) for name in gbcore.__all__}
    return public | {"np": np, "torch": torch, "gymnasium": gymnasium, **more}


def graph_of_the_page():
    """The namespace after the page's first snippet: key_of, graph and replay."""
    obs, next_obs = np.float32([[0.0, -0.01, 0.32, 1], [0.01, 0.0, 0.33, 1]])
    namespace = names(obs=obs, next_obs=next_obs, action=1, reward=1.0, terminated=False)
    exec(KEY, namespace)
    return namespace


def test_the_page_s_key_merges_and_its_replay_keeps_what_was_seen():
    """And refuses what is no observation."""
    namespace = graph_of_the_page()
    graph, replay, node = (namespace[name] for name in ("graph", "replay", "node"))
    assert node == namespace["next_node"]
    replay.add(node, 0, 0.0, node, False, namespace["next_obs"])
    for bad in (None, np.zeros(3, np.float32), np.zeros(4), [0.0] * 4):
        with pytest.raises(ValueError, match=r"Require obs of float32 \(4,\)"):
            replay.add(node, 0, 0.0, node, False, bad)
    assert replay.size == graph.num_transitions == 2
    seen = replay.observations(replay.batch_of(np.array([0, 1])))
    np.testing.assert_array_equal(seen, [namespace["obs"], namespace["next_obs"]])
    np.testing.assert_array_equal(graph.observations_of([node]), [namespace["obs"]])


def test_the_page_s_dict_observation_is_an_array():
    space = spaces.Dict(position=spaces.Box(0, 1, (2,)), has_key=spaces.Discrete(2))
    exec(DICT, namespace := names(space=space))
    np.testing.assert_allclose(namespace["obs"], [0.1, 0.2, 0, 1], rtol=1e-6)


class Clock(gymnasium.Env):
    """Observes its episode and step; episodes end after 5 steps, every second is cut after 3."""

    observation_space = spaces.Box(0, 100, (4,), np.float32)
    action_space = spaces.Discrete(2)
    episode = 0

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.time = self.episode + 1, 0
        return np.float32([self.episode, 0, 0, 0]), {}

    def step(self, action):
        self.time += 1
        obs = np.float32([self.episode, self.time, 0, 0])
        return obs, float(self.time), self.time == 5, self.episode % 2 == 1 and self.time == 3, {}


@pytest.mark.parametrize(
    # An episode of 3 and one of 5 take 8 steps, and 2 more where resets take a step each.
    ("mode", "loop", "steps"), [("NEXT_STEP", "", 80), ("SAME_STEP", SAME_STEP, 100)],
)  # fmt: skip
def test_the_page_s_loops_record_every_transition_and_no_reset(mode, loop, steps):
    namespace = graph_of_the_page()
    namespace["graph"] = graph = TransitionGraph(
        2, (4,), np.float32, key_shape=(4,), key_dtype=np.int32
    )
    mode_of = getattr(gymnasium.vector.AutoresetMode, mode)
    namespace["envs"] = gymnasium.vector.SyncVectorEnv([Clock] * 3, autoreset_mode=mode_of)
    start = NEXT_STEP.split("    obs, rewards")[0]
    exec(start + loop if loop else NEXT_STEP, namespace)
    edges = graph.edges()
    before = graph.observations_of(edges["source"])[:, :2]
    after = graph.observations_of(edges["next"])[:, :2]
    np.testing.assert_array_equal(after - before, [[0, 1]] * len(before))
    np.testing.assert_array_equal(edges["reward"], after[:, 1])
    np.testing.assert_array_equal(edges["terminated"], after[:, 1] == 5)
    assert (after[after[:, 0] % 2 == 1, 1] <= 3).all()
    assert graph.num_transitions == 3 * steps


def test_the_page_s_ten_lines_make_dqn_learn_from_the_graph():
    """A loop with the names of CleanRL's dqn.py, around the page's lines."""
    assert sum(len(lines.splitlines()) for lines in CLEANRL) == 10
    begin, add, learn = CLEANRL
    torch.manual_seed(0)
    lake = gymnasium.make("FrozenLake-v1", is_slippery=False, max_episode_steps=20)
    one_hot = wrappers.DtypeObservation(wrappers.FlattenObservation(lake), np.float32)
    mode = gymnasium.vector.AutoresetMode.SAME_STEP
    envs = gymnasium.vector.SyncVectorEnv([lambda: one_hot], autoreset_mode=mode)
    q_network, target_network = torch.nn.Linear(16, 4), torch.nn.Linear(16, 4)
    optimizer = torch.optim.Adam(q_network.parameters(), lr=0.01)
    args = types.SimpleNamespace(buffer_size=500, seed=0, batch_size=16, gamma=0.9)
    own = {"args": args, "envs": envs, "q_network": q_network, "target_network": target_network}
    namespace = names(obs=envs.reset(seed=0)[0], **own)
    exec(begin, namespace)
    rng, num_truncated = np.random.default_rng(0), 0
    for step in range(3500):
        actions = rng.integers(4, size=1)
        next_obs, rewards, terminations, truncations, infos = envs.step(actions)
        real_next_obs = next_obs.copy()
        if truncations[0]:
            real_next_obs[0] = infos["final_obs"][0]
            num_truncated += 1
        namespace |= {"actions": actions, "rewards": rewards, "terminations": terminations}
        exec(add, namespace | {"real_next_obs": real_next_obs})
        namespace["obs"] = next_obs
        if step % 4 == 3:
            exec(learn, namespace)
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(namespace["td_target"], namespace["old_val"]).backward()
            optimizer.step()
        if step % 100 == 99:
            target_network.load_state_dict(q_network.state_dict())
            assert not namespace["leaves"].known.any()
    start = q_network(torch.eye(16)[0]).max().item()
    assert start == pytest.approx(0.9**5, abs=0.05)
    exec(WHOLE, namespace | {"obs": np.eye(16, dtype=np.float32)[:1]})
    edges, states = namespace["graph"].edges(), namespace["graph"].observations.argmax(axis=1)
    assert num_truncated > 5
    columns = (edges[name] for name in ("source", "action", "next", "terminated"))
    for source, action, after, over in zip(*columns, strict=True):
        ((_, expected, _, ends),) = lake.unwrapped.P[states[source]][action]
        assert over == ends
        assert over or states[after] == expected, "a reset is no transition"
