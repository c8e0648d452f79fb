"""What a step asks of its host: casts, walks over modules, garbage."""

import gc
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from outpace.nn.loss import LanguageModelObjective
from outpace.nn.mixed_precision import make_mixed
from outpace.nn.transformer import Transformer
from outpace.optim.build import make_optimizer
from outpace.parallel import LayoutRequest, apply
from outpace.records.model import ModelSpec
from outpace.records.plan import Plan
from outpace.records.ranks import Ranks
from outpace.records.settings import TrainSettings
from outpace.training.guards import collect_garbage_every
from outpace.training.step import Stepper

CPU = torch.device("cpu")
SPEC = ModelSpec.parse(
    {"family": "gpt2", "layers": 2, "hidden": 16, "heads": 2, "ffn": 32, "vocab": 32,
     "max_positions": 16}, "test",
)  # fmt: skip


class Casts(TorchDispatchMode):
    """Counts casts of parameters, by tensor."""

    def __init__(self, module):
        super().__init__()
        self.counts = {p.data_ptr(): 0 for p in module.parameters()}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default and args[0].data_ptr() in self.counts:
            self.counts[args[0].data_ptr()] += 1
        return func(*args, **(kwargs or {}))


class Run:
    """Steps of three micro-batches in bf16."""

    def __init__(self, group=None, keep=True, **options):
        plan = Plan.parse({"strategy": "single", "precision": "bf16", "micro_batch": 1,
                           "optimizer": "adamw-fused", **options}, "test")  # fmt: skip
        mixed = make_mixed(plan.precision, CPU, False)
        self.model = Transformer(SPEC, 0)
        objective = LanguageModelObjective(self.model, "plain", mixed.dtype)
        self.layout = apply(LayoutRequest(objective, plan, Ranks(), CPU))
        settings = TrainSettings(lr=1e-2)
        optimizer = make_optimizer(self.layout.named_parameters(), plan.optimizer, settings)
        self.stepper = Stepper(
            layout=self.layout, optimizer=optimizer, mixed=mixed, plan=plan, clip=1.0, device=CPU,
            control=group, expected_targets=24, targets_known=True,
        )  # fmt: skip
        self.stepper._keeps_casts &= keep
        self.done = 0

    def step(self):
        self.done += 1
        drawn = torch.Generator().manual_seed(self.done)
        tokens = torch.randint(0, 32, (3, 1, 8), generator=drawn)
        self.stepper.begin()
        batches = [{"tokens": one, "targets": one} for one in tokens]
        return self.stepper.run(self.done, 1e-2, batches, lambda: False).figures()


def test_a_weight_is_cast_once_a_step_however_many_micro_batches():
    kept, anew = Run(), Run(keep=False)
    figures = []
    for run, times in ((kept, 1), (anew, 3)):
        for _ in range(2):  # the second step has other weights
            with Casts(run.model) as casts:
                figures.append(run.step())
            matrix = run.model.blocks[0].mlp.up.weight.data_ptr()
            assert casts.counts[matrix] == times
    assert figures[:2] == figures[2:]
    for one, other in zip(kept.model.parameters(), anew.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_what_is_computed_again_keeps_no_casts():
    assert not Run(checkpointing="full").stepper._keeps_casts


def test_a_step_walks_over_no_modules(monkeypatch):
    run = Run()
    run.step()
    monkeypatch.setattr(run.layout, "named_parameters", lambda: pytest.fail("it walked"))
    run.step()


class Cycle:
    def __init__(self):
        self.own = self


def test_garbage_is_collected_every_few_steps_only():
    with collect_garbage_every(3) as after_step:
        assert not gc.isenabled()
        gone = weakref.ref(Cycle())
        there = []
        for _ in range(3):
            after_step()
            there.append(gone() is not None)
        assert there == [True, True, False]
    assert gc.isenabled()
    with collect_garbage_every(None) as after_step:
        assert gc.isenabled()
        after_step()
