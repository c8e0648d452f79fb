"""Figures and clocks of a device that computes behind its host, which a stand-in does here."""

import gc
import math
from dataclasses import dataclass, field

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from outpace.nn.loss import LanguageModelObjective
from outpace.nn.mixed_precision import lower_weights, make_mixed
from outpace.nn.transformer import Transformer
from outpace.optim.build import make_optimizer
from outpace.parallel import LayoutRequest, apply
from outpace.records.errors import DivergedError
from outpace.records.model import ModelSpec
from outpace.records.plan import Plan
from outpace.records.ranks import Ranks
from outpace.records.settings import TrainSettings
from outpace.training.accounting import Costs, Ledger
from outpace.training.callbacks import Callback
from outpace.training.checkpoint import Checkpointer, whole_checkpoints
from outpace.training.device_queue import DeviceFigures
from outpace.training.guards import StopSignal
from outpace.training.loop import Loop
from outpace.training.step import Stepper
from outpace.training.synthetic import SyntheticTraining

CPU = torch.device("cpu")
SPEC = ModelSpec.parse(
    {"family": "gpt2", "layers": 1, "hidden": 16, "heads": 2, "ffn": 32, "vocab": 32,
     "max_positions": 16}, "test",
)  # fmt: skip
COURSE = SyntheticTraining(SPEC, global_batch=2, seq_len=8)


@dataclass
class Behind:
    """A queue whose device has done nothing until it is waited for, or as soon as `fast`.

    Its clock goes on by one with each mark. Copies hold no number before they have arrived.
    """

    fast: bool = False
    steps_behind: int = 2
    done: int = -1  # the last mark to which the device has come
    marks: int = 0
    clock_ms: float = 0.0
    waits: list[int] = field(default_factory=list)  # for which mark
    copies: list[tuple[int, torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def mark(self):
        self.clock_ms += 1
        self.marks += 1
        return BehindMark(self, self.marks - 1, self.clock_ms)

    def copy_to_host(self, tensor):
        there = torch.full_like(tensor, math.nan, requires_grad=False)
        self.copies.append((self.marks, there, tensor.detach().clone()))
        return there

    def come_to(self, mark: int):
        self.done = max(self.done, mark)
        for after, there, tensor in self.copies:
            if after <= self.done:
                there.copy_(tensor)
        self.copies = [copy for copy in self.copies if copy[0] > self.done]


@dataclass
class BehindMark:
    queue: Behind
    number: int
    time_ms: float

    def query(self):
        if self.queue.fast:
            self.queue.come_to(self.number)
        return self.number <= self.queue.done

    def synchronize(self):
        if not self.query():
            self.queue.waits.append(self.number)
            self.queue.come_to(self.number)

    def elapsed_time(self, end):
        assert self.query() and end.query(), "a clock was read of what is not done"
        return end.time_ms - self.time_ms


class Seen(Callback):
    def __init__(self, queue):
        self.queue, self.records, self.queued = queue, [], []

    def on_step(self, record):
        self.records.append(record)
        self.queued.append(self.queue.marks)  # how much had been queued when it was told
        self.queue.clock_ms += 5  # logging takes its time


class HostReads(TorchDispatchMode):
    """Counts operators that make a host wait for a number of the device's."""

    reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        waits = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select"}
        self.reads += func._schema.name in waits
        return func(*args, **(kwargs or {}))


@pytest.fixture
def train(group, tmp_path):
    def start(queue, steps, spoil_at=None, world_size=1, **changes):
        settings = TrainSettings(steps=steps, lr=1e-3, global_batch=2, seq_len=8, **changes)
        plan = Plan.parse({"strategy": "single", "precision": settings.precision or "fp32",
                           "optimizer": "adamw-fused", "micro_batch": 2}, "test")  # fmt: skip
        mixed = make_mixed(plan.precision, CPU, True)
        objective = LanguageModelObjective(Transformer(SPEC, 0), "plain", mixed.dtype)
        wide = lower_weights(objective, mixed)
        layout = apply(LayoutRequest(objective, plan, Ranks(), CPU))
        optimizer = make_optimizer(
            layout.named_parameters(), plan.optimizer, settings,
            master_weights=mixed.keeps_masters, wide_values=wide,
        )  # fmt: skip
        stepper = Stepper(
            layout=layout, optimizer=optimizer, mixed=mixed, plan=plan, clip=1.0, device=CPU,
            control=group, expected_targets=COURSE.targets, targets_known=True, queue=queue,
        )  # fmt: skip

        def batches():
            for step in range(1, steps + 1):
                if step == spoil_at:
                    with torch.no_grad():
                        next(objective.model.parameters()).fill_(math.nan)
                yield [COURSE.batch()]

        seen = Seen(queue)
        loop = Loop(
            settings=settings, stepper=stepper, layout=layout, optimizer=optimizer,
            steps=batches(), ledger=Ledger(Costs(2, 16, None, None, None), 0, 0),
            checkpointer=Checkpointer(tmp_path, 3, 0, group, lambda path: None, pytest.fail),
            evaluate=lambda step: None, callbacks=[seen], stop=StopSignal(), random_rank=0,
            world_size=world_size, total_steps=steps, start_step=0, device=CPU,
        )  # fmt: skip
        return loop, seen

    return start


def test_the_newest_steps_are_never_waited_for(train):
    queue = Behind()
    loop, seen = train(queue, 8)
    ends = []  # the last mark of each step
    waited = []  # after each step, how many had been waited for
    for _ in loop.iterate():
        ends.append(queue.marks - 1)
        waited.append(len(queue.waits))
    # After step 3 is queued, step 1 is waited for, and so on; after the last, those that are left.
    assert waited == [0, 0, 1, 2, 3, 4, 5, 8]
    assert queue.waits == ends
    # Each was told when two more had been queued.
    assert seen.queued[:6] == [end + 1 for end in ends[2:]]
    assert [record.step for record in seen.records] == list(range(1, 9))
    assert all(math.isfinite(record.loss) for record in seen.records)


def test_a_step_that_is_done_is_told_at_once(train):
    queue = Behind(fast=True)
    loop, seen = train(queue, 3)
    told = []
    for _ in loop.iterate():
        told.append(len(seen.records))
    assert told == [1, 2, 3] and not queue.waits


def test_several_ranks_find_a_loss_that_is_no_number_at_the_same_step(train):
    for fast in (True, False):
        loop, _ = train(Behind(fast=fast), 8, spoil_at=3, world_size=2)
        done = []
        with pytest.raises(DivergedError):
            for step in loop.iterate():
                done.append(step)
        assert done == [1, 2, 3, 4]


def test_figures_are_those_of_a_device_that_is_not_behind(train):
    told = []
    for queue in (Behind(), Behind(fast=True), Behind(fast=True, steps_behind=0)):
        loop, seen = train(queue, 5)
        loop.run()
        told.append([(r.loss, r.grad_norm, r.samples) for r in seen.records])
    assert told[0] == told[1] == told[2]


def test_no_state_is_saved_whose_loss_is_no_number(train, tmp_path):
    loop, seen = train(Behind(), 9, spoil_at=4, save_every=5)
    with pytest.raises(DivergedError, match="the loss became nan at step 4"):
        loop.run()
    assert [record.step for record in seen.records] == [1, 2, 3]
    assert whole_checkpoints(tmp_path) == []


def test_the_times_of_steps_leave_nothing_out(train):
    queue = Behind(steps_behind=0, fast=True)
    loop, seen = train(queue, 6)
    loop.run()
    # From the first mark to the last one, but for what was told after the last step.
    assert sum(record.step_time_s for record in seen.records) == pytest.approx(
        (queue.clock_ms - 5 - 1) / 1000
    )
    # What was done between two steps is of the second, and no waiting for data.
    assert [record.other_s for record in seen.records] == pytest.approx([0, *[0.006] * 5])
    assert [record.data_s for record in seen.records] == pytest.approx([0.001] * 6)


def test_an_evaluation_is_of_no_step(train):
    queue = Behind(steps_behind=0, fast=True)
    loop, seen = train(queue, 4, eval_every=2)
    loop.evaluate = lambda step: setattr(queue, "clock_ms", queue.clock_ms + 1000)
    loop.run()
    assert max(record.step_time_s for record in seen.records) < 0.1


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-master", "fp16", "fp16-master"])
def test_a_step_reads_nothing_from_the_device(train, precision):
    loop, seen = train(Behind(), 4, precision=precision)
    steps = loop.iterate()
    next(steps)
    with HostReads() as host:
        next(steps)
    assert host.reads == 0
    for _ in steps:
        pass
    assert [record.loss_scale for record in seen.records] == (
        [65536.0] * 4 if precision.startswith("fp16") else [None] * 4
    )


def test_one_process_holds_no_events_of_steps_that_were_told(train):
    loop, _ = train(Behind(), 8)
    held = {}
    for step, _ in enumerate(loop.iterate()):
        if step in (3, 6):
            gc.collect()
            held[step] = sum(type(one) is BehindMark for one in gc.get_objects())
    assert held[6] == held[3]  # of steps before the last one, at which all are read


def test_a_figure_is_read_when_it_has_arrived():
    queue, loss = Behind(), torch.tensor([3.0, 4.0])
    figures = DeviceFigures(queue, {"loss": loss})
    end = queue.mark()
    loss.zero_()  # the next step's
    assert figures.read(end) == {"loss": [3.0, 4.0]}
    assert queue.waits == [0]
