"""Read what a run recorded: its graph, replay, learner and task, from its checkpoint.

The learner and the task are those of the script that made the run, which is loaded from where it
was, also if it is a copy under another name.
"""

import importlib.util
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from minigrid.core.actions import Actions

from gbcore import LeafTable, Replay, TransitionGraph
from gbcore.graph import KIND
from gbcore.run import LearnerState, fail, flush_denormals, load_checkpoint
from gbcore.run.checkpoint import require_module
from gbtools import ROOT

COLUMNS = Replay.COLUMNS
MINATAR = ("no-op", "left", "up", "right", "down", "fire")


@dataclass
class Recorded:
    """A recorded graph; of a run with its flags, script and learner."""

    name: str
    graph: TransitionGraph
    replay: dict  # COLUMNS -> arrays [N] in time order, the last row cut
    steps: int = 0  # environment steps of the run
    flags: dict | None = None
    script: Path | None = None
    learner_state: dict | None = None
    module_file: str | None = None  # of a task of the user's own

    @cached_property
    def initial_states(self):
        """Node ids int64 [n]: of the replay's oldest row, and of every row that follows a cut."""
        starts = np.append(True, self.replay["cut"][:-1])
        return np.unique(self.replay["node"][starts])

    @cached_property
    def module(self):
        """The script."""
        return load_script(self.script)

    @cached_property
    def args(self):
        """The script's Args of the run."""
        return self.module.Args(**self.flags | {"resume": None, "cuda": False})

    @cached_property
    def task(self):
        """The task's name, as its script writes it."""
        task = self.module.task_of(self.flags["env_id"])
        require_module(self.name, task, self.module_file)
        return task

    def action_names(self):
        """Names of the actions in MiniGrid and MinAtar, else their numbers; of copies, too."""
        names, num_actions = (), self.graph.num_actions
        if self.task.startswith(("MiniGrid-", "BabyAI-")):
            names = [action.name for action in Actions]
        elif not self.graph.frame_stack and self.task in load_script("gb_dqn_minatar").GAMES:
            names = MINATAR
        return [*names, *map(str, range(len(names), num_actions))][:num_actions]

    @cached_property
    def learner(self):
        """The script's learner, its last class on top of LearnerState, as it was saved."""
        classes = [one for one in vars(self.module).values() if isinstance(one, type)]
        learners = [one for one in classes if issubclass(one, LearnerState)]
        if not learners:
            fail(f"{self.script} has no class on top of LearnerState")
        graph = TransitionGraph(**{name: getattr(self.graph, name) for name in KIND})
        # On an empty graph there is nothing that an untrained network would be asked for.
        parts = self.args, graph, Replay(graph, 1), torch.device("cpu")
        try:
            learner = learners[-1](*parts)
        except TypeError:  # it takes more: a checkpoint has all but APART
            learner = learners[-1].__new__(learners[-1])
            learner.args, learner.graph, learner.replay, learner.device = parts
        graph.restore(self.graph.state())
        learner.restore(self.learner_state)
        return learner

    def policy(self):
        """As the run's evaluations act: function of observations to actions, or an EpisodeGraph."""
        return getattr(self.learner, "policy", lambda: self.learner.act)()

    @torch.inference_mode()
    def q_values(self, nodes, which="online"):
        """A network's values float32 [n, A] of states; of a distribution, its expectation."""
        network = getattr(self.learner, which)
        values = getattr(network, "values", network)  # of Rainbow's distributions
        leaves = LeafTable(self.graph, lambda obs: values(torch.from_numpy(obs)).numpy())
        return leaves.evaluated(nodes)

    def state_values(self, nodes):
        """Values [n] of states, by which the run acts: the network's or the graph's."""
        if self.flags.get("act_on") != "graph":
            return self.q_values(nodes).max(axis=1)
        self.learner.graph_values.update()
        return self.learner.graph_values.values(nodes)


def read(path):
    """`Recorded` of a run's folder. OSError or ValueError where it has no whole checkpoint."""
    tree = load_checkpoint(path)
    flags, position = tree["flags"], tree["replay"]["position"]
    replay = {name: np.roll(tree["replay"]["rows"][name], -position) for name in COLUMNS}
    graph, made_by = TransitionGraph.from_state(tree["graph"]), Path(flags.pop("script"))
    places = (made_by, ROOT / made_by.name, ROOT / "examples" / made_by.name)
    script = next((place for place in places if place.is_file()), made_by)
    name, steps = Path(path).resolve().name, tree["logger"]["step"]
    return Recorded(name, graph, replay, steps, flags, script, tree["learner"], tree["module"])


def load_script(script):
    """The module of a script: a path, or the name of one of the repository."""
    flush_denormals()  # as in its runs, for what is played and evaluated
    here = ROOT / f"{str(script).removesuffix('.py')}.py"
    path = here if here.is_file() else Path(script).resolve()
    if not path.is_file():
        fail(f"no script {script}")
    if path.parent == ROOT:
        return importlib.import_module(path.stem)
    if str(path) not in sys.modules:
        sys.path.insert(0, str(path.parent))  # modules beside it, as where Python runs it
        spec = importlib.util.spec_from_file_location(str(path), path)
        module = sys.modules[str(path)] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[str(path)]
