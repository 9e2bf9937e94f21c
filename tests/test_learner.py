"""What a user may put into a learner: a copy that is restored goes on as the original does."""

import collections
import copy
import dataclasses
import enum
import io

import numpy as np
import pytest
import torch
from conftest import jitted
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from gbcore import GraphValues, LeafTable, TransitionGraph
from gbcore.run import LearnerState, load_checkpoint, save_checkpoint

pytestmark = jitted


class Learner(LearnerState):
    def __init__(self, make):
        torch.manual_seed(0)
        self.args, self.online, self.number = object(), nn.Linear(2, 1), 0
        self.optimizer = torch.optim.Adam(self.online.parameters(), lr=0.1)
        make(self)

    def learn(self, change):
        """An update, and what a user makes of it."""
        self.number += 1
        loss = self.online(torch.full((3, 2), float(self.number))).square().mean()
        loss.backward()
        change(self, loss.item())
        return loss.item()


class Phase(enum.Enum):
    FIRST, SECOND = 1, 2


Point = collections.namedtuple("Point", "x y")


@dataclasses.dataclass
class Mean:
    value: float = 0.0

    def add(self, number):
        self.value = 0.9 * self.value + number
        return self.value


class Slots:
    __slots__ = ("value",)


class Helper:
    def __init__(self, learner):
        self.learner, self.rng = learner, np.random.default_rng(3)


class OwnOptimizer(torch.optim.SGD):
    calls = 0

    def step(self, closure=None):
        self.calls += 1
        if self.calls % 2:
            super().step(closure)


def step(learner):
    learner.optimizer.step()
    learner.optimizer.zero_grad()


def make_networks(learner):
    learner.best, learner.past = None, []
    learner.heads = nn.ModuleList(nn.Linear(2, 1) for _ in range(3))
    learner.active = learner.heads[0]


def use_networks(learner, loss):
    """Keeps a copy of the second, all those before, and trains one of several heads."""
    step(learner)
    learner.best = copy.deepcopy(learner.online) if learner.number == 2 else learner.best
    learner.past.append(copy.deepcopy(learner.online))
    learner.active.weight.data += loss
    learner.online.step = getattr(learner.online, "step", 0) + 1  # a number of the user's own
    learner.active = learner.heads[learner.number % 3]
    known = [one for one in (learner.best, *learner.past, *learner.heads) if one is not None]
    learner.seen = [[p.tolist() for p in one.parameters()] for one in known], learner.online.step


def swap_optimizer(learner, loss):
    step(learner)
    if learner.number == 2:
        learner.optimizer = torch.optim.RMSprop(learner.online.parameters(), lr=0.05)


def accumulate(learner, loss):
    if learner.number % 5 == 0:
        step(learner)


def schedule(learner, loss):
    step(learner)
    learner.schedule.step()
    learner.seen = learner.schedule.get_last_lr()


def use_many(learner, loss):
    step(learner)
    learner.phase = Phase.SECOND
    learner.late = learner.late or np.random.Generator(np.random.MT19937(9))
    learner.points.append(Point(loss, learner.phase))
    learner.slots.value = learner.slots.value * 0.5 + loss
    learner.counts[round(loss) % 3] += 1
    learner.view += loss  # of learner.whole
    learner.single = learner.single / np.float32(3) + np.float32(loss)
    learner.signs.add(round(loss))
    learner.both[1] += (loss,)
    learner.a = dataclasses.replace(learner.a, value=0.5 * learner.a.value + loss)  # which was b
    learner.b = dataclasses.replace(learner.b, value=0.5 * learner.b.value - loss)
    learner.mean = 0.5 * learner.mean + loss  # an integer at first
    learner.helper.learner.mean_of = learner.means["loss"].add(learner.helper.rng.random())
    learner.seen = (
        learner.draw(), learner.late.random(), learner.points[-1], learner.slots.value,
        sorted(learner.counts.items()), learner.whole.tolist(), float(learner.mean),
        torch.rand(1, generator=learner.generator).item(), learner.mean_of, learner.online.training,
        learner.chance[0].random(), torch.rand(1, generator=learner.chance[1]).item(),
        learner.single, learner.signs.copy(), learner.both[0].rng.random(), learner.both[1],
        learner.a.value, learner.b.value,
    )  # fmt: skip
    learner.online.eval()


def make_many(learner):
    learner.phase, learner.slots, learner.counts = Phase.FIRST, Slots(), collections.Counter()
    learner.slots.value, learner.points = 1.0, collections.deque(maxlen=2)
    learner.whole = torch.zeros(4)
    learner.view, learner.mean = learner.whole[1:3], torch.tensor(0)
    learner.helper, learner.me = Helper(learner), learner
    learner.a = learner.b = Mean()
    learner.both, learner.signs, learner.single = [learner.helper, ()], {0}, np.float32(0)
    learner.chance = np.random.default_rng(1), torch.Generator()
    learner.means = collections.defaultdict(Mean)
    learner.draw = np.random.default_rng(5).random  # a bound method
    learner.generator, learner.late = torch.Generator(), None


def make_counter(learner):
    number = 0

    def count():
        nonlocal number
        number += 1
        return number

    learner.count, learner.sparse = count, torch.ones(1, 2).to_sparse()


def count(learner, loss):
    step(learner)
    learner.sparse = learner.sparse * loss
    learner.seen = learner.count(), learner.sparse.to_dense().tolist()


def make_room(learner):
    learner.room = np.full((50_000, 2), -1.0), np.zeros(50_000), np.arange(50_000), np.ones(50_000)


def fill_room(learner, loss):
    step(learner)
    for one in learner.room[:3]:
        one[learner.number] = loss
    learner.seen = [(one.sum(), one.shape, one[:9].tobytes()) for one in learner.room]


def make_normed(learner):
    learner.online = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(2, 1)))
    learner.optimizer = torch.optim.Adam(learner.online.parameters(), lr=0.1)


def make_graph(learner):
    learner.own = TransitionGraph(1, (1,), np.int64)
    leaves = LeafTable(learner.own, lambda obs: obs.astype(np.float32))
    learner.worth = GraphValues(learner.own, leaves, 0.5)


def use_graph(learner, loss):
    step(learner)
    nodes = learner.own.nodes(np.array([[learner.number], [learner.number + 1]]))
    learner.own.add(nodes[0], 0, 1.0, nodes[1], False)
    learner.worth.update()
    learner.seen = learner.worth.values(nodes).tolist()


def spawn(learner, loss):
    step(learner)
    learner.late = getattr(learner, "late", None) or np.random.default_rng(2)
    learner.seen = [one.spawn(1)[0].random() for one in (learner.rng, learner.late)]


def keep(name, make):
    """Function that gives a learner an attribute made from it."""
    return lambda learner: setattr(learner, name, make(learner))


CASES = {
    "networks": (make_networks, use_networks),
    "another optimizer": (lambda learner: None, swap_optimizer),
    "gradients that wait": (lambda learner: None, accumulate),
    "a schedule with a lambda": (
        keep("schedule", lambda learner: LambdaLR(learner.optimizer, lambda n: 0.9**n)),
        schedule,
    ),
    "a closure that counts, a sparse tensor": (make_counter, count),
    "large arrays with room": (make_room, fill_room),
    "an optimizer of one's own": (
        keep("optimizer", lambda learner: OwnOptimizer(learner.online.parameters(), lr=0.1)),
        lambda learner, loss: step(learner),
    ),
    "many objects": (make_many, use_many),
    "a network that refuses to be pickled": (make_normed, lambda learner, loss: step(learner)),
    "a graph and its values": (make_graph, use_graph),
    "generators that spawn": (keep("rng", lambda _: np.random.default_rng(4)), spawn),
}


@pytest.mark.parametrize(("make", "change"), CASES.values(), ids=CASES)
def test_what_is_restored_goes_on_alike(make, change, tmp_path):
    learner, other = Learner(make), Learner(make)
    losses = [learner.learn(change) for _ in range(3)]
    save_checkpoint(tmp_path, {"learner": learner.state()})
    assert (tmp_path / "checkpoint.zip").stat().st_size < 1_000_000, "room takes none"
    own, optimizer = other.online, other.optimizer
    other.restore(load_checkpoint(tmp_path)["learner"])
    assert other.online is own, "others may hold it"
    assert other.optimizer is optimizer or change is swap_optimizer
    for _ in range(5):
        losses.append(learner.learn(change))
        assert other.learn(change) == losses[-1]
        assert getattr(other, "seen", None) == getattr(learner, "seen", None)
    assert len(set(losses)) > 1


def test_what_cannot_be_saved_is_told_once_and_the_rest_is_saved(capsys):
    def make(learner):
        learner.file, learner.lines = io.TextIOWrapper(io.BytesIO()), (line for line in "ab")

    learner, other = Learner(make), Learner(make)
    learner.learn(lambda *_: None)
    for _ in range(2):
        tree = learner.state()
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[1].rpartition(".")[2] for line in lines] == ["file", "lines"]
    other.restore(tree)
    assert other.number == 1
    assert torch.equal(other.online.weight.grad, learner.online.weight.grad)


def test_a_network_that_cannot_be_saved_is_refused():
    learner = Learner(keep("head", lambda _: nn.LazyLinear(3)))
    with pytest.raises(ValueError, match=r"cannot save learner\.head: .* name it in APART"):
        learner.state()


def test_what_lies_in_an_earlier_part_is_that_part_s():
    """What lies in a later one is restored as it was: that part is not yet."""

    def make(learner):
        mean, env = Mean([1]), Mean([2])
        learner.outside = {"mean": mean, "slots": Slots(), "learner": learner, "env": env}
        learner.scores, learner.obs = mean.value, env.value

    learner, other = Learner(make), Learner(make)
    learner.scores.append(3)
    other.restore(learner.state())
    assert other.scores is other.outside["mean"].value
    assert other.scores == [1], "the part restores it"
    assert other.obs == [2]
    assert other.obs is not other.outside["env"].value


def test_a_learner_of_a_gpu_goes_on_on_the_device_that_there_is():
    def make(learner):
        learner.device = torch.device("cuda")
        learner.devices = [torch.device("cuda:0"), torch.device("cpu")]

    learner, other = Learner(make), Learner(lambda learner: None)
    other.device = torch.device("cpu")
    other.restore(learner.state())
    assert [other.device, *other.devices] == 3 * [torch.device("cpu")]
