"""Read what a run recorded: its graph, replay, networks and task, of a finished or a running run.

A run folder is read from its checkpoint, which is at least as new as the files beside it; without
one from `graph.npz`. A path to a graph file alone, one that `TransitionGraph.save` wrote, will do:
it has no replay and no values.

Initial states, to which the meta-initial state of a picture points: with a replay, the state of its
oldest row and of every row that follows a cut (an episode's end or a time limit; the loss of a life
is no cut). Without one, the states that no other state leads to; and where some states cannot be
reached from these, the earliest of them (ids are given in the order of first visits).
"""

import json
import sys
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path

import numpy as np
import torch
from output import fail

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from gbcore import TransitionGraph  # noqa: E402
from gbcore.run_directory import load_checkpoint  # noqa: E402

COLUMNS = ("node", "action", "reward", "next_node", "terminated", "cut")
SCRIPTS = ("gb_dqn_minigrid", "gb_dqn_minatar", "gb_rainbow_atari")
ACTIONS = {
    "gb_dqn_minigrid": ("left", "right", "forward", "pickup", "drop", "toggle", "done"),
    "gb_dqn_minatar": ("no-op", "left", "up", "right", "down", "fire"),
}


@dataclass
class Recorded:
    """A recorded graph, and what is known about it.

    Arguments that a bare graph file does not have are None.
    """

    name: str
    graph: TransitionGraph
    replay: dict | None  # COLUMNS -> arrays [N] in time order, the last row cut
    steps: int | None  # environment steps of the run
    config: dict | None
    script: str | None  # one of SCRIPTS
    tensors: dict | None  # of the checkpoint, or model.pt as both networks

    @cached_property
    def initial_states(self):
        """Node ids int64 [n]: see the head of this file."""
        if self.replay is not None and len(self.replay["node"]):
            starts = np.append(True, self.replay["cut"][:-1])
            return np.unique(self.replay["node"][starts])
        edges = self.graph.edges()
        source, target = edges["source"], edges["next"]
        entered = np.zeros(self.graph.num_ids, np.bool_)
        entered[target[source != target]] = True
        states = np.unique(np.concatenate([source, target]))
        starts = states[~entered[states]]
        while True:
            reached = distances(self.graph.num_ids, source, target, starts) >= 0
            missing = states[~reached[states]]
            if not len(missing):
                return np.sort(starts)
            starts = np.append(starts, missing[0])

    @cached_property
    def task(self):
        """The task's name, as its script writes it."""
        if self.script is None:
            return None
        return task_name(self.script, self.config["env_id"])

    def action_names(self):
        """Names of the actions, where the task has any, else their numbers."""
        names = ACTIONS.get(self.script, ())
        if self.script == "gb_rainbow_atari":
            names = atari_actions(self.task)
        numbers = [str(a) for a in range(self.graph.num_actions)]
        return [*names, *numbers[len(names) :]][: self.graph.num_actions]

    def network(self, which="online"):
        """Function of observations [n, *obs_shape] to values float32 [n, A], without noise.

        which: "online" or "target". Of a distribution it is the expectation. None without networks.
        """
        if self.tensors is None:
            return None
        script, support = import_module(self.script), None
        if self.script == "gb_rainbow_atari":
            config = self.config
            network = script.RainbowNetwork(
                self.graph.num_actions, config["n_atoms"], config["noisy_std"]
            )
            support = torch.linspace(config["v_min"], config["v_max"], config["n_atoms"])
            heads = network.heads(noisy=False)
        else:
            network = script.QNetwork(self.graph.obs_shape, self.graph.num_actions)
        network.load_state_dict(self.tensors[which])

        @torch.inference_mode()
        def values(obs):
            obs = torch.from_numpy(obs)
            if support is None:
                return network(obs).numpy()
            return (network.log_pmf(network.features(obs), heads).exp() @ support).numpy()

        return values

    def q_values(self, nodes, which="online"):
        """Values float32 [n, A] of states; None without networks."""
        network = self.network(which)
        if network is None:
            return None
        if len(nodes) == 0:  # of a subgraph in which every outcome ends the episode
            return np.zeros((0, self.graph.num_actions), np.float32)
        parts = [nodes[i : i + 256] for i in range(0, len(nodes), 256)]
        return np.concatenate([network(self.graph.observations_of(part)) for part in parts])


def read(path):
    """`Recorded` of a run folder or a graph file; what cannot be read ends the program."""
    path = Path(path)
    if not path.exists():
        fail(f"no run and no graph file: {path}")
    if path.is_file():
        return Recorded(path.stem, load_graph(path), None, None, None, None, None)
    if not (path / "config.json").exists():
        fail(f"{path} is no run: it has no config.json")
    try:
        config = json.loads((path / "config.json").read_text())
        script = script_of(path)
    except ValueError as error:
        fail(f"{path}: config.json or result.json is corrupt: {error}")
    try:  # with room for no more states: the graph is only read
        tensors, arrays, graph, state = load_checkpoint(path, capacity=1)
    except FileNotFoundError:
        if not (path / "graph.npz").exists():
            fail(
                f"{path} has no graph: a running run needs --checkpoint-frequency, "
                "a sweep --keep-checkpoints"
            )
        tensors = None
        if script is not None and (path / "model.pt").exists():
            tensors = dict.fromkeys(("online", "target"), load_tensors(path / "model.pt"))
        graph = load_graph(path / "graph.npz")
        return Recorded(path.name, graph, None, None, config, script, tensors)
    except (OSError, ValueError) as error:
        fail(error)
    if graph.num_edges == 0:
        fail(f"{path} has no transitions yet")
    columns = {name: arrays[name] for name in COLUMNS}
    if state["step"] > len(columns["node"]):  # the ring is full: its oldest row comes first
        position = int(arrays["place"][1])
        columns = {name: np.roll(column, -position) for name, column in columns.items()}
    tensors = None if script is None else tensors
    return Recorded(path.name, graph, columns, state["step"], config, script, tensors)


def load_graph(path):
    """A graph file; what is no graph ends the program."""
    try:
        if path.stat().st_size == 0:
            fail(f"{path} is empty")
        graph = TransitionGraph.load(path)
    except (OSError, ValueError) as error:
        fail(f"{path} is no graph, or a corrupt one: {error}")
    if graph.num_edges == 0:
        fail(f"the graph in {path} has no transitions")
    return graph


def load_tensors(path):
    """What torch.save wrote; no code in the file is run."""
    try:
        return torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # torch raises whatever the broken part raises
        fail(f"cannot read the networks in {path}: {error}")


def script_of(path):
    """Which script made a run: result.json says it, and the folder's name before that exists."""
    if (path / "result.json").exists():
        name = json.loads((path / "result.json").read_text()).get("script")
    else:
        folder = path.resolve().name
        name = next((script for script in SCRIPTS if f"__{script}__" in folder), None)
    return name if name in SCRIPTS else None


def args_of(script, config):
    """The script's Args of a run."""
    try:
        return import_module(script).Args(**config)
    except TypeError as error:
        fail(f"config.json has other flags than {script}.py: {error}")


def task_name(script, env_id):
    """The task's own name, from any spelling."""
    module = import_module(script)
    return module.task_of(env_id) if script == "gb_dqn_minigrid" else module.game_of(env_id)


def atari_actions(game):
    """Names of a game's minimal action set."""
    import ale_py

    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    ale = ale_py.ALEInterface()
    ale.loadROM(ale_py.roms.get_rom_path(game))
    return [action.name.lower() for action in ale.getMinimalActionSet()]


def distances(num_ids, source, target, starts, limit=None):
    """Transitions from the nearest of some states to each: int64 [num_ids], -1 if there is no way.

    source, target: int64 [E]; limit: states farther away than this are -1 as well.
    """
    order = np.argsort(source, kind="stable")
    target = target[order]
    first = np.searchsorted(source[order], np.arange(num_ids + 1))
    distance = np.full(num_ids, -1, np.int64)
    distance[starts] = 0
    front, steps = np.unique(starts), 0
    while len(front) and steps != limit:
        steps += 1
        counts = first[front + 1] - first[front]
        offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        reached = np.unique(target[np.repeat(first[front], counts) + offsets])
        front = reached[distance[reached] < 0]
        distance[front] = steps
    return distance
