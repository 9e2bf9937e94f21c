"""Read what a run recorded: its graph, replay, networks and task, of a finished or a running run.

A run folder is read from its checkpoint, which is at least as new as the files beside it; without
one from `graph.npz` and `model.pt`. A graph file alone, one that `TransitionGraph.save` wrote, will
do as well: it has no replay and no values. Networks and tasks are those of the script that made the
run, which is loaded from where it was, also if it is a copy under another name.

Initial states, to which the meta-initial state of a picture points: with a replay, the state of its
oldest row and of every row that follows a cut (an episode's end or a time limit; the loss of a life
is no cut). Without one, the states that no other state leads to; and where some states cannot be
reached from these, the earliest of them (ids are given in the order of first visits).
"""

import importlib.util
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import ale_py
import numpy as np
import torch
from scipy import sparse

from gbcore import Replay, TransitionGraph
from gbcore.run import flush_denormals, load_checkpoint
from gbcore.run.flags import read_flags
from gbtools import ROOT
from gbtools.output import fail, warn
from gbtools.runs import read_config, words_of

COLUMNS = Replay.COLUMNS
ACTIONS = {
    "minigrid": ("left", "right", "forward", "pickup", "drop", "toggle", "done"),
    "minatar": ("no-op", "left", "up", "right", "down", "fire"),
}


@dataclass
class Recorded:
    """A recorded graph, and what is known about it; of a bare graph file not more than that."""

    name: str
    graph: TransitionGraph
    replay: dict | None = None  # COLUMNS -> arrays [N] in time order, the last row cut
    steps: int | None = None  # environment steps of the run
    config: dict | None = None
    script: Path | None = None  # what made it, where that is now
    networks: dict | None = None  # "online" and "target" -> name -> array
    learner: dict | None = None  # state of a learner that acts on the values of the whole graph
    missing: str = ""  # why there are no networks, or no script

    @cached_property
    def initial_states(self):
        """Node ids int64 [n]: see the head of this file."""
        if self.replay is not None and len(self.replay["node"]):
            starts = np.append(True, self.replay["cut"][:-1])
            return np.unique(self.replay["node"][starts])
        source, target = (self.graph.edges()[name] for name in ("source", "next"))
        states = np.unique(np.concatenate([source, target]))
        starts = np.setdiff1d(states, target[source != target])
        while (far := distances(self.graph.num_ids, source, target, starts)[states] < 0).any():
            starts = np.append(starts, states[far.argmax()])
        return np.sort(starts)

    @cached_property
    def module(self):
        """The script; where it cannot be had, the program ends."""
        return load_script(self.script) if self.script else fail(self.missing)

    @cached_property
    def task(self):
        """The task's name, as its script writes it; without one, as it was typed, or ""."""
        typed = self.config["env_id"] if self.config else ""
        return self.module.task_of(typed) if self.script else typed

    @property
    def suite(self):
        """minigrid, minatar, atari or "": by the task, so that copies of a script are known too."""
        shape = self.graph.obs_shape
        if self.task.startswith(("MiniGrid-", "BabyAI-")):
            return "minigrid"
        if self.task and shape == (4, 84, 84) and self.graph.obs_dtype == np.uint8:
            return "atari"
        return "minatar" if self.task in load_script("gb_dqn_minatar").GAMES else ""

    def action_names(self):
        """Names of the actions, where the task has any, else their numbers."""
        names = ACTIONS.get(self.suite, ())
        if self.suite == "atari" and self.task in ale_py.roms.get_all_rom_ids():
            ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
            ale = ale_py.ALEInterface()
            ale.loadROM(ale_py.roms.get_rom_path(self.task))
            names = [action.name.lower() for action in ale.getMinimalActionSet()]
        numbers = map(str, range(len(names), self.graph.num_actions))
        return [*names, *numbers][: self.graph.num_actions]

    def network(self, which="online"):
        """Function of observations [n, *obs_shape] to values float32 [n, A], without noise.

        which: "online" or "target". Of a distribution it is the expectation. Without networks the
        program ends, with the reason.
        """
        if self.missing:
            fail(self.missing)
        args = args_of(self.module, self.config)
        network = self.module.make_network(args, self.graph.obs_shape, self.graph.num_actions)
        try:
            network.load_state_dict(
                {name: torch.as_tensor(array) for name, array in self.networks[which].items()}
            )
        except RuntimeError:
            fail(f"the network of {self.name} is not that of {self.script} as it is now")

        @torch.inference_mode()
        def values(obs):
            return network.values(torch.from_numpy(obs)).numpy()

        return values

    def policy(self):
        """Function of observations [n, *obs_shape] to the run's own greedy actions int64 [n]."""
        network = self.network()
        if self.config["backup"] != "whole-graph" or self.config["act_on"] != "graph":
            return lambda obs, keys=None: network(obs).argmax(axis=1)
        return self.restored_learner().policy()

    def restored_learner(self):
        """The learner of a run of whole-graph, as its checkpoint left it."""
        if self.missing:
            fail(self.missing)
        if self.learner is None:
            fail(f"{self.name} acts on values of its graph, which a checkpoint has: there is none")
        if not hasattr(self.module, "Learner"):
            fail(f"{self.script} has no Learner, which has the values of the graph of {self.name}")
        args = args_of(self.module, self.config)
        kind = ("num_actions", "obs_shape", "obs_dtype", "frame_stack", "key_shape", "key_dtype")
        graph = TransitionGraph(**{name: getattr(self.graph, name) for name in kind})
        try:
            # On an empty graph there is nothing that an untrained network would be asked for.
            learner = self.module.Learner(args, graph, None, torch.device("cpu"))
            graph.restore(self.graph.state())
            learner.restore(self.learner)
        except Exception as error:  # whatever a changed script raises
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            fail(f"{self.script} as it is now cannot restore the learner of {self.name}: {reason}")
        return learner

    def graph_values(self):
        """`GraphValues` of a run of whole-graph, as its next update would leave them."""
        values = self.restored_learner().graph_values
        values.update()
        return values

    def acting_values(self, nodes):
        """Values float [n, A] by which the run acts in states, and whose they are.

        With whole-graph they are those of its graph, the prior left out; else the network's.
        """
        if self.learner is None or self.config["act_on"] != "graph":
            return self.q_values(nodes), "network"
        values, actions = self.graph_values(), range(self.graph.num_actions)
        columns = [values.targets(nodes, np.full(len(nodes), a)) for a in actions]
        return np.stack(columns, axis=1), "graph"

    def q_values(self, nodes, which="online"):
        """Values float32 [n, A] of states."""
        network = self.network(which)
        if len(nodes) == 0:  # of a subgraph in which every outcome ends the episode
            return np.zeros((0, self.graph.num_actions), np.float32)
        parts = [nodes[i : i + 256] for i in range(0, len(nodes), 256)]
        return np.concatenate([network(self.graph.observations_of(part)) for part in parts])


def read(path):
    """`Recorded` of a run folder or a graph file; what cannot be read ends the program."""
    path = Path(path)
    try:
        run = _of_file(path) if path.is_file() else _of_folder(path)
        if run.graph.num_edges == 0:
            raise ValueError("it has no transitions")
    except Exception as error:  # damaged files raise whatever NumPy, torch and zipfile raise
        fail(f"cannot read {path}: {str(error) or repr(error)}")
    return run


def _of_file(path):
    graph = TransitionGraph.load(path)
    return Recorded(path.stem, graph, missing=f"{path} is a graph without a network")


def _of_folder(path):
    if not (path / "config.json").exists():
        raise ValueError("no run, which has a config.json" if path.exists() else "nothing is there")
    config = read_config(path)
    script = Path(config.pop("script"))
    places = (script, ROOT / script.name, ROOT / "examples" / script.name)
    run = Recorded(path.resolve().name, None, config=config)
    run.script = next((place for place in places if place.is_file()), None)
    if run.script is None:
        run.missing = f"the script that made {path} is gone: {script}"
    elif run.script.resolve().is_relative_to(path.resolve()):
        run.script, run.missing = None, f"{script} lies in the run's own folder and is not executed"
    if (path / "checkpoint.npz").exists():
        tree = load_checkpoint(path)
        run.graph, run.steps = TransitionGraph.from_state(tree["graph"]), tree["counters"]["step"]
        rows, position = tree["replay"]["rows"], tree["replay"]["position"]
        run.replay = {name: np.roll(rows[name], -position) for name in COLUMNS}  # the oldest first
        run.networks = {name: tree["learner"][name] for name in ("online", "target")}
        run.learner = tree["learner"] if "graph_values" in tree["learner"] else None
    elif (path / "graph.npz").exists():
        run.graph = TransitionGraph.load(path / "graph.npz")
        run.steps = config.get("total_timesteps")
        # No code in the file is run.
        model = torch.load(path / "model.pt", weights_only=True, map_location="cpu")
        run.networks = {"online": model, "target": model}
    else:
        raise ValueError("it has no graph: a running run needs --checkpoint-frequency")
    return run


def load_script(script):
    """The module of a script: a path, or the name of one of the repository."""
    flush_denormals()  # as in its runs, for what is played and evaluated
    here = ROOT / f"{str(script).removesuffix('.py')}.py"
    path = here if here.is_file() else Path(script).expanduser().resolve()
    if not path.is_file():
        fail(f"no script {script}")
    is_own = path.parent == ROOT
    name = path.stem if is_own else str(path)
    if is_own and getattr(sys.modules.get(name), "__file__", None) == str(path):
        return sys.modules[name]
    if not is_own:
        sys.path.append(str(path.parent))  # modules beside it, as where Python runs it
        if (path.parent / "gbcore").exists():
            warn(f"{path} is read with {ROOT / 'gbcore'}; copy tools/ beside it for its own")
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        for part in ("Args", "task_of", "make_env", "make_network", "evaluate"):
            getattr(module, part)
    except Exception as error:  # whatever the copy's own code raises
        fail(f"cannot load the script {path}: {type(error).__name__}: {error}")
    return module


def args_of(module, config):
    """The script's Args of a run."""
    given = {name: value for name, value in config.items() if value is not None}
    return read_flags(module.Args, words_of(given))


def distances(num_ids, source, target, starts):
    """Transitions from the nearest of some states to each: int64 [num_ids], -1 if there is no way.

    source, target: int64 [E].
    """
    # One more vertex leads to the starts: as many as they may be, also none.
    extra = np.full(len(starts), num_ids)
    links = np.append(source, extra), np.append(target, starts)
    links = sparse.csr_array((np.ones(len(links[0])), links), shape=(num_ids + 1,) * 2)
    steps = sparse.csgraph.dijkstra(links, indices=num_ids, unweighted=True)[:-1]
    return np.where(np.isfinite(steps), steps - 1, -1).astype(np.int64)
