"""State that a module keeps from step to step, wherever it lies; by real forwards and runs."""

import itertools
import json
import random
import shutil
import warnings
from collections import deque
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import outpace
from outpace.cli.main import main
from outpace.interop.custom_model import CustomModel, CustomObjective, build_custom_model
from outpace.parallel.batches import cut, samples_in
from outpace.parallel.layout import StepHooks
from outpace.parallel.parity import module_state
from outpace.parallel.parity.kept_state import find_kept_state
from outpace.parallel.parity.later_attributes import lengthen_lists
from outpace.parallel.parity.module_state import kept_attributes, preserve_state
from outpace.parallel.parity.state_messages import explain_kept_state

MEAN = torch.zeros(3)
BOX = {"mean": torch.zeros(3)}
data = torch.zeros(4)  # which no forward reads, though weights have an attribute of this name
hash = [0]  # a global may have the name of a function of Python's


def moved(mean, y):
    return 0.9 * mean + 0.1 * y.detach().mean(0)


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(5, 3)
        self.set_up()

    def set_up(self):
        pass

    def forward(self, x):
        return self.finish(self.stem(x))

    def finish(self, y):
        return y


class Rebound(Base):
    def set_up(self):
        self.mean = torch.zeros(3)

    def finish(self, y):
        self.mean = moved(self.mean, y)
        return y - self.mean


class InPlace(Rebound):
    def finish(self, y):
        self.mean.copy_(moved(self.mean, y))
        return y - self.mean


class InList(Base):
    def set_up(self):
        self.seen = []

    def finish(self, y):
        self.seen.append(y.detach().mean(0))
        return y - torch.stack(list(self.seen)).mean(0)


class InDeque(InList):
    def set_up(self):
        self.seen = deque(maxlen=3)


class InDict(Base):
    def set_up(self):
        self.seen = {}

    def finish(self, y):
        self.seen["mean"] = moved(self.seen.get("mean", 0), y)
        return y - self.seen["mean"]


class Unsaved(InPlace):
    def set_up(self):
        self.register_buffer("mean", torch.zeros(3), persistent=False)


class Saved(InPlace):
    def set_up(self):
        self.register_buffer("mean", torch.zeros(3))


class InGlobal(Base):
    def finish(self, y):
        global MEAN  # noqa: PLW0603  # which is the case
        MEAN = moved(MEAN, y)
        return y - MEAN


class InGlobalDict(Base):
    def finish(self, y):
        BOX["mean"] = moved(BOX["mean"], y)
        return y - BOX["mean"]


class OfClass(Base):
    mean = torch.zeros(3)

    def finish(self, y):
        OfClass.mean = moved(OfClass.mean, y)
        return y - OfClass.mean


class InDefault(Base):
    def finish(self, y, box={}):  # noqa: B006  # which is the case
        box["mean"] = moved(box.get("mean", 0), y)
        return y - box["mean"]


class FirstMean(Base):
    """Keeps the first batch's mean, and never another one."""

    def set_up(self):
        self.mean = None

    def finish(self, y):
        if self.mean is None:
            self.mean = y.detach().mean(0)
        return y - self.mean


class Counting(Base):
    def set_up(self):
        self.calls = 0

    def finish(self, y):
        self.calls += 1
        return y


class Annealed(Counting):
    def finish(self, y):
        return super().finish(y) * (1 + 0.1 * self.calls)


class LaterHalved(Counting):
    def finish(self, y):
        return super().finish(y) * (0.5 if self.calls > 500 else 1.0)


class BiasTrainedLater(Counting):
    """Trains its bias after some calls, which no loss of a forward shows."""

    def finish(self, y):
        self.stem.bias.requires_grad_(self.calls > 3)
        return super().finish(y)


class Alternating(Base):
    """Scales by a function of its calls, counted in several ways."""

    def set_up(self):
        self.calls, self.log = 0, []

    def count(self):
        self.calls += 1
        return self.calls

    def finish(self, y):
        calls = self.count()
        self.log.append(float(y.detach().sum()))
        return y * (0.5 if self.matters(calls) else 1.0)

    def matters(self, calls):
        return calls > 500


class InTensor(Alternating):
    def set_up(self):
        self.calls, self.log = torch.zeros((), dtype=torch.long), []

    def count(self):
        self.calls += 1
        return self.calls


class InEntry(Alternating):
    def set_up(self):
        self.calls, self.log = {"calls": 0}, []

    def count(self):
        self.calls["calls"] += 1
        return self.calls["calls"]


class EachFourth(Alternating):
    def matters(self, calls):
        return calls % 4 == 0


class EachHundredth(Alternating):
    def matters(self, calls):
        return calls % 100 == 0


class ForSome(Alternating):
    def matters(self, calls):
        return 100 < calls < 200


class Queue(Base):
    """Uses what the last four batches left, once there are four (MoCo)."""

    def set_up(self):
        self.queue = deque(maxlen=4)

    def finish(self, y):
        full = len(self.queue) == 4
        out = y - torch.stack(list(self.queue)).mean(0) if full else y
        self.queue.append(y.detach().mean(0))
        return out


class Memory(Base):
    """Goes on with what each sample's last output was."""

    def set_up(self):
        self.memory = None

    def finish(self, y):
        last, self.memory = self.memory, y.detach()
        return y if last is None else y + 0.5 * last


class MemoryAndCounter(Memory):
    def set_up(self):
        self.memory, self.calls = None, 0

    def finish(self, y):
        self.calls += 1
        return super().finish(y)


class Extra(Rebound):
    def get_extra_state(self):
        return {"mean": self.mean}

    def set_extra_state(self, state):
        self.mean = state["mean"]


class ExtraDict(InDict):
    """Of which a module that was just built has no entries."""

    def get_extra_state(self):
        return self.seen

    def set_extra_state(self, state):
        self.seen = state


class Iterated(Base):
    def set_up(self):
        self.numbers = itertools.count(1)

    def finish(self, y):
        return y * (1 + 0.1 * next(self.numbers))


class Drawing(Base):
    def set_up(self):
        self.drop = nn.Dropout(0.5)

    def finish(self, y):
        scale = random.random() + np.random.rand()
        return self.drop(y) * scale + torch.randn_like(y)


class DrawingAlone(Base):
    def set_up(self):
        self.generator = torch.Generator().manual_seed(1)

    def finish(self, y):
        return y + torch.randn(y.shape, generator=self.generator)


class Cached(Base):
    """Caches and logs, on which no loss depends."""

    def set_up(self):
        self.masks, self.table, self.log = {}, None, []

    def finish(self, y):
        if self.table is None:
            self.table = torch.ones(3)
        self.masks[len(y)] = torch.ones(len(y), 1)
        self.auxiliary = y.square().mean()
        self.log.append(float(self.auxiliary.detach()))
        return y * self.masks[len(y)] * self.table + 0.01 * self.auxiliary


class Normalised(Base):
    def set_up(self):
        self.norm = nn.BatchNorm1d(3)

    def finish(self, y):
        return self.norm(y)


def squares(module, batch):
    return (module(batch[0]) - batch[1]).square().mean()


def loss_that_encloses():
    mean = torch.zeros(3)

    def loss(module, batch):
        nonlocal mean
        out = module(batch[0])
        mean = moved(mean, out)
        return (out - mean - batch[1]).square().mean()

    return loss


class LossModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, module, batch):
        out = module(batch[0])
        self.mean.copy_(moved(self.mean, out))
        return (out - self.mean - batch[1]).square().mean()


def global_batch(samples=8):
    drawn = torch.Generator().manual_seed(1)
    return torch.randn(samples, 5, generator=drawn), torch.randn(samples, 3, generator=drawn)


def objective_of(make, loss=squares):
    return CustomObjective(build_custom_model(lambda: CustomModel(make(), loss)))


KEPT = {
    Rebound: "model.mean",
    InPlace: "model.mean",
    InList: "model.seen",
    InDeque: "model.seen",
    InDict: "model.seen",
    Unsaved: "model.mean (a buffer with persistent=False)",
    InGlobal: "MEAN (a global of test_kept_state.py)",
    InGlobalDict: "BOX (a global of test_kept_state.py)",
    OfClass: "OfClass.mean (of the class)",
    InDefault: "state (a default argument of finish)",
    FirstMean: "model.mean",
    Annealed: "model.calls",
    LaterHalved: "model.calls",
    BiasTrainedLater: "model.calls",
    InTensor: "model.calls",
    InEntry: "model.calls",
    EachFourth: "model.calls",
    EachHundredth: "model.calls",
    ForSome: "model.calls",
    Queue: "model.queue",
    Memory: "model.memory",
    MemoryAndCounter: "model.memory",
}


@pytest.mark.parametrize(
    ("make", "samples"),
    [*((make, 8) for make in KEPT), (Rebound, 1), (FirstMean, 2), (FirstMean, 3), (InList, 1)],
)
def test_state_is_found_and_named_and_nothing_is_moved(make, samples):
    objective = objective_of(make)
    before, drawn = kept_attributes(objective), torch.get_rng_state()
    other = global_batch(2) if samples == 1 else None
    found = find_kept_state(objective, global_batch(samples), StepHooks(), alone=True, other=other)
    assert found.found and found.names == (KEPT[make],) and not found.unseen
    assert kept_attributes(objective) == before and torch.equal(drawn, torch.get_rng_state())
    assert all(parameter.requires_grad for parameter in objective.parameters())


class Loads(Base):
    """Counts that no checkpoint has move a bias that each has; no loss shows it in few steps."""

    def set_up(self):
        self.register_buffer("loads", torch.zeros(3), persistent=False)
        self.register_buffer("bias", torch.zeros(3))

    def finish(self, y):
        with torch.no_grad():
            self.loads += (y > 0).float().mean(0)
            self.bias += 1e-3 * (self.loads.mean() - self.loads)
        return y + self.bias.round()


class Bank(Base):
    def set_up(self):
        self.register_buffer("bank", torch.zeros(1, 3))

    def finish(self, y):
        self.bank = torch.cat([self.bank, y.detach()])[-9:]
        return y + self.bank.mean()


def test_what_moves_saved_buffers_is_state_too():
    found = find_kept_state(objective_of(Loads), global_batch(), StepHooks(), alone=False)
    assert found.found and found.names == ("model.loads (a buffer with persistent=False)",)


def test_buffers_that_change_their_shape_are_named():
    found = find_kept_state(objective_of(Bank), global_batch(), StepHooks(), alone=False)
    assert found.reshaped == ("bank",)
    assert (
        find_kept_state(objective_of(Loads), global_batch(), StepHooks(), alone=False).reshaped
        == ()
    )


class Observed(Bank):
    """Sizes in place, as torch's observers of channels do in their first forward."""

    def finish(self, y):
        self.bank.resize_(5, *y.shape[1:]).fill_(y.detach().abs().max())
        return y + self.bank.mean()


def test_buffers_that_are_resized_in_place_are_put_back():
    objective = objective_of(Observed)
    buffer = objective.model.bank
    before = buffer.clone()
    found = find_kept_state(objective, global_batch(), StepHooks(), alone=False)
    assert found.reshaped == ("bank",) and objective.model.bank is buffer
    assert torch.equal(buffer, before)


class Filled(Base):
    """A saved buffer is None at first, and the forward registers another."""

    def set_up(self):
        self.register_buffer("mask", None)

    def finish(self, y):
        if self.mask is None:
            self.mask = torch.ones(y.shape[-1])
            self.register_buffer("scale", torch.ones(()))
        return y * self.mask * self.scale


def test_saved_buffers_that_a_forward_makes_are_named():
    found = find_kept_state(objective_of(Filled), global_batch(), StepHooks(), alone=False)
    assert found.reshaped == ("mask", "scale")


@pytest.mark.parametrize("make", KEPT)
def test_ranks_that_share_the_look_find_what_one_finds(make):
    found = [
        find_kept_state(
            objective_of(make), global_batch(), StepHooks(), alone=False, in_halves=True,
            share=(number, 3),
        )
        for number in range(3)
    ]  # fmt: skip
    assert {one.names for one in found if one.found} == {(KEPT[make],)}


@pytest.mark.parametrize(
    ("make", "number", "samples"), [(Base, 0, 12), (Counting, 0, 56), (Counting, 1, 48)]
)
def test_forwards_are_few_and_give_the_losses_of_halves(tmp_path, make, number, samples):
    """Of a micro-batch of 8; a step's forward and backward are 24."""
    objective = objective_of(make)
    plain, log = objective.forward, tmp_path / "log"  # a list would be put back

    def count(batch):
        with log.open("a") as file:
            file.write(f"{samples_in(batch)}\n")
        return plain(batch)

    objective.forward = count
    found = find_kept_state(
        objective, global_batch(), StepHooks(), alone=False, in_halves=True, share=(number, 2)
    )
    assert (found.is_any, sum(map(int, log.read_text().split()))) == (False, samples)
    with torch.no_grad():
        wanted = [plain(half)[:2] for half in cut(global_batch(), 2)]
    for known, half in zip(found.halves, wanted, strict=True):
        assert known == pytest.approx(tuple(map(float, half)))


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (loss_that_encloses, "mean (a closure variable of loss)"),
        (LossModule, "loss.mean (a buffer of the loss)"),
    ],
)
def test_state_of_a_loss_is_found(loss, name):
    """The checkpoint has the model alone, so that a loss's buffers are in none."""
    objective = objective_of(Base, loss())
    before = kept_attributes(objective)
    assert find_kept_state(objective, global_batch(), StepHooks(), alone=True).names == (name,)
    assert kept_attributes(objective) == before


@pytest.mark.parametrize(
    "make", [Base, Saved, Extra, ExtraDict, Counting, Cached, Normalised, Drawing]
)
def test_what_is_saved_or_moves_no_loss_is_none(make):
    found = find_kept_state(objective_of(make), global_batch(), StepHooks(), alone=True)
    assert not found.is_any, found


class IteratedAndDropping(Iterated):
    def set_up(self):
        super().set_up()
        self.drop = nn.Dropout(0.1)


@pytest.mark.parametrize("make", [Iterated, IteratedAndDropping])
def test_what_nobody_can_name_is_found_by_its_loss(make):
    found = find_kept_state(objective_of(make), global_batch(), StepHooks(), alone=True)
    assert found.found and found.unseen and found.names == ()
    said = explain_kept_state([found], 1, by_command=True)
    assert "something that outpace cannot name" in said and "generator" in said


def test_a_generator_of_its_own_is_told_apart():
    found = find_kept_state(objective_of(DrawingAlone), global_batch(), StepHooks(), alone=True)
    assert (found.found, found.generators) == (False, ("model.generator",))
    said = explain_kept_state([found], 1, by_command=True)
    assert "draws from generator" in said and "is not bitwise equal" in said


@pytest.mark.parametrize("make", [Rebound, InPlace, InList, Unsaved, InGlobal, Extra])
def test_ranks_are_apart_however_it_is_written(make):
    """Extra state too, of which each rank would have its own."""
    found = find_kept_state(objective_of(make), global_batch(), StepHooks(), alone=False)
    assert found.found and found.apart > 1e-5


@pytest.mark.parametrize("samples", [1, 2, 3, 4, 5])
def test_ranks_are_apart_whatever_the_size_of_a_micro_batch(samples):
    drawn = global_batch(samples + 1)
    piece, other = ([one[part] for one in drawn] for part in (slice(samples), slice(samples, None)))
    other = other if samples == 1 else None
    for make, refused in ((Rebound, True), (FirstMean, True), (Memory, False), (Annealed, False)):
        found = find_kept_state(objective_of(make), piece, StepHooks(), alone=False, other=other)
        assert found.found and (found.apart > 1e-5) == refused, (make, found)


class Trembling(Base):
    """Has rounding that differs from forward to forward; the first and the fourth are alike."""

    differ = (0, 1, 2, 0, 1, 0, 2, 1)

    def set_up(self):
        self.rounding = itertools.cycle(self.differ)

    def finish(self, y):
        return y * (1 + 1e-6 * next(self.rounding))


def test_rounding_that_repeats_by_chance_is_no_state():
    """The forwards: of samples; of others and then the same; of the samples again."""
    found = find_kept_state(objective_of(Trembling), global_batch(), StepHooks(), alone=True)
    assert not found.is_any, found


class Once(Base):
    def set_up(self):
        self.used = False

    def finish(self, y):
        if self.used:
            raise ValueError("call backward first")
        self.used = True
        return y


class Never(Base):
    def finish(self, y):
        raise ValueError("always")


def test_a_look_that_fails_where_training_need_not_is_said():
    found = find_kept_state(objective_of(Once), global_batch(), StepHooks(), alone=True)
    said = explain_kept_state([found], 1, by_command=True)
    assert "could not be determined" in said and "(ValueError: call backward first)" in said
    assert not find_kept_state(objective_of(Never), global_batch(), StepHooks(), alone=True).is_any


@pytest.mark.parametrize(("make", "check", "told"), [(Rebound, "on", 1), (Rebound, "off", 0),
                                                     (Saved, "on", 0)])  # fmt: skip
def test_a_loop_of_ones_own_is_told_once(make, check, told):
    plan = outpace.Plan(strategy="single", micro_batch=4)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always", UserWarning)
        model = outpace.parallelize(make(), plan, loss=squares, check=check)
        losses = [float(model.forward_backward(global_batch())) for _ in range(2)]
    said = [str(one.message) for one in heard if "from step to step" in str(one.message)]
    assert len(said) == told
    assert all("keeps mean in an attribute" in one and "state_dict()" in one for one in said)
    plain, expected = objective_of(make), []
    for _ in range(2):
        x, y = global_batch()
        with torch.no_grad():
            sums = [plain((x[i : i + 4], y[i : i + 4]))[0] for i in (0, 4)]
        expected.append(float(sum(sums)) / 8)
    assert losses == pytest.approx(expected, rel=1e-6)


class ReadingAttribute(Base):
    def finish(self, y):
        hash[0] += 1
        return y + 0 * self.stem.weight.data.sum()


@pytest.mark.parametrize(
    ("reduce", "micro_batch", "told"),
    [
        (lambda errors: errors.sum(), 4, "it seems to be a sum over samples"),
        (lambda errors: errors.sum(), 1, "it seems to be a sum over samples"),
        (lambda errors: errors.mean() ** 2, 4, "the loss is not a mean over samples"),
        (lambda errors: errors.mean(), 4, None),
        (lambda errors: (errors.sum(), errors.numel()), 4, None),
        (lambda errors: errors.sum(), 8, None),  # one micro-batch: nothing is cut
    ],
)
def test_a_loss_that_accumulation_changes_is_told_on_one_process(reduce, micro_batch, told):
    """Eight samples a step; a scalar is taken for the mean of its micro-batch."""
    torch.manual_seed(0)
    plan = outpace.Plan(strategy="single", micro_batch=micro_batch, precision="fp32")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model = outpace.parallelize(
            nn.Linear(5, 1), plan, loss=lambda module, batch: reduce(module(batch[0]).square())
        )
        model.forward_backward((torch.randn(8, 5),))
    sentences = [str(one.message) for one in seen if "is split in two" in str(one.message)]
    assert len(sentences) == (told is not None)
    assert told is None or told in sentences[0]


def draw_mask(errors):
    kept = torch.rand(errors.shape) < 0.5
    return (errors * kept).sum(), kept.sum()


@pytest.mark.parametrize("micro_batch", [8, 4, 1])
@pytest.mark.parametrize(
    ("reduce", "told"),
    [
        (lambda errors: (errors.mean(), (errors < 1).float().mean()), "for their two halves"),
        (lambda errors: (errors.mean(), 0), "for the first samples it is 0. Return"),
        (lambda errors: (errors.sum(), errors.numel()), None),
        # Two of four samples have none, so that one of their halves counts 1 for nothing.
        (lambda errors: (errors[errors < 2].sum(), (errors < 2).sum().clamp(min=1)), None),
        (draw_mask, None),
    ],
    ids=["an accuracy", "nothing right", "a count", "at least one", "drawn at random"],
)
def test_a_pair_whose_second_value_is_no_count_is_told_on_one_process(reduce, micro_batch, told):
    torch.manual_seed(0)
    module, x = nn.Linear(5, 1), torch.randn(8, 5)
    plan = outpace.Plan(strategy="single", micro_batch=micro_batch, precision="fp32")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model = outpace.parallelize(
            module, plan, loss=lambda module, batch: reduce(module(batch[0]).square())
        )
        model.forward_backward((x,))
    sentences = [
        str(one.message) for one in seen if "the second value is not a count" in str(one.message)
    ]
    assert len(sentences) == (told is not None)
    assert told is None or told in sentences[0]


def test_globals_are_those_that_code_reads_as_globals():
    names = kept_attributes(objective_of(ReadingAttribute))
    assert not any(name.startswith("data ") for name in names)
    assert "hash (a global of test_kept_state.py)" in names


def test_large_data_are_neither_hashed_whole_nor_copied_often(tmp_path, monkeypatch):
    """Read-only arrays and files in memory are constants; of a large tensor some is compared."""
    counted = []
    real = module_state.fingerprint
    monkeypatch.setattr(
        module_state, "fingerprint", lambda t: (counted.append(t.numel()), real(t))[1]
    )
    monkeypatch.setattr(module_state, "_MOST_NUMBERS", 100)
    module = Base()
    module.file = np.memmap(tmp_path / "tokens", dtype=np.int64, mode="w+", shape=(1000,))
    module.fixed = np.zeros(1000)
    module.fixed.flags.writeable = False
    module.table, module.array = torch.zeros(64, 64), np.zeros(5000)
    before = kept_attributes(module)
    with preserve_state(module, torch.device("cpu")):
        module.file[0] = 7
        module.table[:, 5] += 1
        module.array[:] = 1
        changed = kept_attributes(module)
    assert {name for name in before if before[name] != changed[name]} == {"table", "array"}
    assert not module.table.any() and not module.array.any() and module.file[0] == 7
    module.table.data[0, 0] = 1
    with preserve_state(module, torch.device("cpu")):
        module.table.data[0, 1] = 1  # which no version tells of
    assert module.table[0, 0] == 1 and module.table.sum() == 1
    assert max(counted) <= 100


FILE = """
import sys
import threading
sys.path.insert(0, {folder!r})
import torch
from torch.utils.data import TensorDataset
from test_kept_state import ExtraDict, Rebound, global_batch, squares

class Thing:
    pass

class Opaque(Rebound):
    def get_extra_state(self):
        return Thing()

    def set_extra_state(self, state):
        pass

class Locked(Opaque):
    def get_extra_state(self):
        return threading.Lock()

def build_of(make):
    data = TensorDataset(*global_batch(16))
    return lambda: (make(), squares, data, data)

kept, extra, opaque = build_of(Rebound), build_of(ExtraDict), build_of(Opaque)
locked = build_of(Locked)
"""


def losses_of(run):
    return [json.loads(row)["loss"] for row in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("function", "told"), [("kept", True), ("extra", False)])
def test_runs_resumes_and_evaluations_tell_it(tmp_path, capfd, function, told):
    """What get_extra_state returns is in checkpoints and models, and nothing is told of it."""
    file = tmp_path / "mine.py"
    file.write_text(FILE.format(folder=str(Path(__file__).parent)))
    run = tmp_path / "run"
    flags = [f"--model={file}:{function}", "--steps=4", "--global-batch=4", "--micro-batch=4",
             "--save-every=2", "--keep=4", "--device=cpu", "--precision=fp32"]  # fmt: skip
    assert main(["train", *flags, f"--out={run}"]) == 0
    words = "keeps mean in an attribute from step to step, and the loss depends on it"
    assert (words in capfd.readouterr().err) == told
    whole = losses_of(run)
    shutil.rmtree(run / "checkpoints" / "step-4")
    assert main(["train", "--resume", f"--out={run}"]) == 0
    said = capfd.readouterr().err
    assert (words in said and "this resumed run starts with its initial value" in said) == told
    assert (losses_of(run) != whole) == told
    assert main(["eval", f"--run={run}", "--json"]) == 0
    assert ("in training the forward or the loss keeps mean" in capfd.readouterr().err) == told
    if not told:
        assert (run / "model" / "extra_state.pt").exists()


@pytest.mark.parametrize("name", ["opaque", "locked"])
def test_extra_state_that_could_not_be_read_is_refused_before_step_1(tmp_path, capfd, name):
    file = tmp_path / "mine.py"
    file.write_text(FILE.format(folder=str(Path(__file__).parent)))
    run = tmp_path / "run"
    assert main(["train", f"--model={file}:{name}", "--steps=1", f"--out={run}"]) == 2
    said = f"get_extra_state of {name.title()} returns something other than plain value"
    assert said in capfd.readouterr().err
    assert not run.exists()


class AnchorKeeper(Base):
    """Pulls to the weights of its first forward."""

    anchor = None

    def finish(self, y):
        if self.anchor is None:
            self.anchor = self.stem.weight.detach().clone()
        return y + (self.stem.weight - self.anchor).square().sum()


class TableKeeper(Base):
    """Makes a table in its first forward, which is the same of all weights."""

    table = None

    def finish(self, y):
        if self.table is None:
            self.table = torch.arange(3.0)
        return y + self.table


@pytest.mark.parametrize(("make", "names"), [(AnchorKeeper, ("model.anchor",)), (TableKeeper, ())])
def test_weights_of_the_first_forward_are_state(make, names):
    def loss(module, batch):
        return module(batch).square().mean()

    objective = CustomObjective(build_custom_model(lambda: CustomModel(make(), loss)))
    before = {name: p.clone() for name, p in objective.named_parameters()}
    found = find_kept_state(objective, torch.randn(4, 5), StepHooks(), alone=False)
    assert found.names == names and found.found == bool(names) and not found.writes
    assert all(torch.equal(p, before[name]) for name, p in objective.named_parameters())


def test_lists_are_lengthened_by_what_memory_holds():
    module = nn.Module()
    module.few, module.large = [1.0], [(torch.zeros(1 << 20), torch.zeros(1 << 20))]
    assert lengthen_lists(module, "few", 1000) and len(module.few) == 1001
    assert lengthen_lists(module, "large", 1000) and len(module.large) == 1 + 32
