"""Whether a job fits, and what would: memory as accounted for, time as the planner has it."""

from dataclasses import replace

import pytest
import torch

from outpace.catalog.accelerators import find_accelerator
from outpace.catalog.models import preset
from outpace.jobs.memory.fit import MemoryFit
from outpace.jobs.memory.trace_worker import AccountSummary, time_of
from outpace.jobs.ranks.oom_guard import Shortage
from outpace.planner.calibration.cluster import of_host
from outpace.planner.fit.proposals import change_plan
from outpace.planner.model.outline import outline
from outpace.planner.plan_batch import of_plans
from outpace.planner.step_time.adapters import Adapters, Target
from outpace.planner.step_time.estimate import estimate
from outpace.planner.step_time.setup import StepTimeQuestion
from outpace.probing.hardware.machine import identify
from outpace.records.plan import Plan
from outpace.records.ranks import Ranks
from outpace.records.settings import TrainSettings

GIB = 2**30
SPEC = preset("outpace-tiny")
SETTINGS = TrainSettings(model="outpace-tiny", global_batch=16, seq_len=64)
KEEPS = {"none": 1.0, "selective": 0.7, "attention": 0.4, "full": 0.2}


def account(ask):
    """A gibibyte a sample, less what blocks recompute."""
    share = sum(KEEPS[mode] for mode in ask.plan.modes(SPEC.layers)) / SPEC.layers
    size = round(ask.plan.micro_batch * share * GIB)
    return AccountSummary(
        peak_memory_bytes=size, needed_bytes=size, by_kind={"activations": size},
        step_s=time_of(ask),
    )  # fmt: skip


def fitting(machine, settings=SETTINGS):
    return MemoryFit(settings, Ranks(), torch.device("cpu"), machine, SPEC, 64, account)


def planned_s(machine, plan, adapters=None):
    question = StepTimeQuestion(
        outline(SPEC, "tiny"), 64, of_host(machine, 1).device, of_host(machine, 1).fabric,
        adapters=adapters,
    )  # fmt: skip
    return float(estimate(question, of_plans([plan], 16, SPEC.layers)).step_s[0])


@pytest.fixture
def machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where no probe's file is
    return identify(find_accelerator)


def test_a_proposal_is_as_much_slower_as_the_planner_says(machine):
    plan = Plan(micro_batch=16)
    fit = fitting(machine)
    short = Shortage(0, "short", fit.predict(plan).peak_memory_bytes)
    fit.limit = replace(fit.limit, bytes=short.used_bytes - 2 * GIB)
    proposals = fit.proposals(plan, short)
    assert {"checkpointing": "selective"} in [dict(one.settings) for one in proposals]
    base = planned_s(machine, plan)
    for one in proposals:
        took = planned_s(machine, change_plan(plan, one.settings))
        assert one.slowdown == pytest.approx(took / base - 1)
    slowdowns = [one.slowdown for one in proposals]
    assert slowdowns == sorted(slowdowns)


def test_a_budget_recomputes_what_takes_the_planner_s_least_time(machine):
    plan, fit = Plan(micro_batch=16), fitting(machine)
    whole = fit.predict(plan).peak_memory_bytes
    found = fit.fit_budget(plan, whole - 3 * GIB)
    assert fit.predict(found).peak_memory_bytes <= whole - 3 * GIB
    full = change_plan(plan, {"checkpointing": "full"})
    assert planned_s(machine, plan) < planned_s(machine, found) < planned_s(machine, full)


@pytest.mark.parametrize(
    ("targets", "adapters"),
    [
        # Of 4 heads, 2 of keys and 2 of values, and of two matrices that make one product.
        (("q", "v"), {"qkv": Target(2, 6 / 8)}),
        (("all",), {"qkv": Target(3), "out": Target(1), "up": Target(2), "down": Target(1)}),
    ],
)
def test_adapters_take_the_planner_s_time_of_adapters(machine, targets, adapters):
    plan = Plan(micro_batch=16, lora_rank=8, lora_targets=targets)
    took, whole = fitting(machine).predict(plan).step_s, Plan(micro_batch=16)
    assert took == pytest.approx(planned_s(machine, whole, Adapters(8, adapters)))
    assert took != pytest.approx(planned_s(machine, whole))
