"""Whether a job fits, and what would: memory as accounted for, time as the planner has it."""

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch

from outpace.catalog.accelerators import ACCELERATORS, find_accelerator
from outpace.catalog.models import preset
from outpace.jobs.memory import plan_costs
from outpace.jobs.memory.fit import MemoryFit
from outpace.jobs.memory.step_time import step_time_s
from outpace.jobs.memory.trace_worker import (
    AccountSummary,
    TraceRequest,
    account_of,
    serve,
    time_of,
)
from outpace.jobs.ranks.oom_guard import Shortage
from outpace.planner.calibration.cluster import of_host
from outpace.planner.fit.proposals import change_plan
from outpace.planner.model.outline import outline
from outpace.planner.plan_columns import of_plans
from outpace.planner.step_time.adapters import Adapters, Target
from outpace.planner.step_time.estimate import estimate
from outpace.planner.step_time.setup import StepTimeQuestion
from outpace.probing.hardware.machine import identify
from outpace.records.errors import BadInputError
from outpace.records.machine import Device
from outpace.records.memory import MemoryAccount, Moment
from outpace.records.plan import Plan
from outpace.records.probe_results import ProbeRecord
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


def planned_s(machine, plan, adapters=None, batch=16):
    question = StepTimeQuestion(
        outline(SPEC, "tiny"), 64, of_host(machine, 1).device, of_host(machine, 1).fabric,
        adapters=adapters,
    )  # fmt: skip
    return float(estimate(question, of_plans([plan], batch, SPEC.layers)).step_s[0])


@pytest.fixture
def machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where no probe's file is
    return identify(find_accelerator)


def test_a_trace_of_many_samples_takes_no_longer_than_one_of_few(machine):
    """A micro-batch of a million samples had half a million chunks of logits to trace."""
    traced = []

    def recorded(ask):
        traced.append(ask.plan.micro_batch * ask.seq_len)
        return account(ask)

    settings = SETTINGS.model_copy(update={"global_batch": 10**6})
    fit = MemoryFit(settings, Ranks(), torch.device("cpu"), machine, SPEC, 64, recorded)
    cost = fit.predict(Plan(micro_batch=10**6))
    assert 0 < max(traced) <= 2**15 and len(traced) == 2
    assert cost.tensor_bytes == 10**6 * GIB
    of_all = planned_s(machine, Plan(micro_batch=10**6), batch=10**6)
    assert cost.step_s == pytest.approx(of_all, rel=0.02)


def test_an_account_extended_from_fewer_samples_is_that_of_the_trace(monkeypatch):
    def traced(ask):
        found = account_of(ask)
        return AccountSummary(
            peak_memory_bytes=found.peak_memory_bytes, needed_bytes=found.needed_bytes,
            by_kind=found.peak.by_kind, step_s=None,
        )  # fmt: skip

    ask = TraceRequest(
        spec=SPEC, plan=Plan(micro_batch=192), seq_len=64, accumulation=2, rank=0,
        settings=SETTINGS, accelerator=None, ranks_per_host=1,
    )  # fmt: skip
    monkeypatch.setattr(plan_costs, "_MOST_TOKENS_CPU", 64 * 64)
    extended, whole = plan_costs.account_of_samples(traced, ask), traced(ask)
    assert extended.peak_memory_bytes == pytest.approx(whole.peak_memory_bytes, rel=0.01)
    assert extended.needed_bytes == pytest.approx(whole.needed_bytes, rel=0.01)
    assert extended.by_kind.keys() == whole.by_kind.keys()
    for kind, size in whole.by_kind.items():
        assert extended.by_kind[kind] == pytest.approx(size, rel=0.02), kind


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
        # Of 4 heads, 2 of keys and 2 of values, and of two matrices that make one matmul.
        (("q", "v"), {"qkv": Target(2, 6 / 8)}),
        (("all",), {"qkv": Target(3), "out": Target(1), "up": Target(2), "down": Target(1)}),
    ],
)
def test_adapters_take_the_planner_s_time_of_adapters(machine, targets, adapters):
    plan = Plan(micro_batch=16, lora_rank=8, lora_targets=targets)
    took, whole = fitting(machine).predict(plan).step_s, Plan(micro_batch=16)
    # Without dropout, and scaled at the low rank, as nn.lora does.
    own = Adapters(8, adapters, drops_inputs=False, scales_outputs=False)
    assert took == pytest.approx(planned_s(machine, whole, own))
    assert took != pytest.approx(planned_s(machine, whole))


def test_memory_is_known_where_the_time_is_not(monkeypatch):
    """A step's time that cannot be estimated leaves the trace of its memory as it is."""

    def refuse(*_):
        raise BadInputError("no time")

    held = Moment(step=1, part="forward", module="", operator="", by_kind={"weights": 7})
    traced = MemoryAccount(
        source="traced", device="cpu", rank=0, world_size=1, peak=held, timeline=(held,),
        activations_by_module={},
    )  # fmt: skip
    monkeypatch.setattr("outpace.jobs.memory.trace_worker.account_of", lambda ask: traced)
    monkeypatch.setattr("outpace.jobs.memory.step_time.step_time_s", refuse)
    ask = TraceRequest(
        spec=SPEC, plan=Plan(micro_batch=2), seq_len=8, accumulation=1, rank=0,
        settings=SETTINGS, accelerator=None, ranks_per_host=1,
    )  # fmt: skip
    told, asks = StringIO(), (ask, ask.model_copy(update={"whole": True}))
    serve(StringIO("".join(one.model_dump_json() + "\n" for one in asks)), told)
    short, whole = map(json.loads, told.getvalue().splitlines())
    assert AccountSummary.model_validate(short) == AccountSummary(
        peak_memory_bytes=7, needed_bytes=7, by_kind={"weights": 7}, step_s=None
    )
    assert MemoryAccount.model_validate(whole) == traced


def of_ranks(plan, ranks, device):
    settings = SETTINGS.model_copy(update={"global_batch": 16 * ranks})
    return step_time_s(settings, SPEC, plan, 64, ranks, device)


def test_a_probe_that_is_of_no_use_leaves_what_is_known_of_the_device(machine, monkeypatch):
    """Without a figure of its matmuls, or a file that can be read, a GPU is the catalog's."""
    chip = ACCELERATORS["H200 SXM"]
    gpu = Device(name="NVIDIA H200", memory_bytes=chip.memory_bytes, accelerator=chip.name)
    known = machine.model_copy(update={"devices": (gpu,)})
    monkeypatch.setattr("outpace.jobs.memory.step_time.identify", lambda _: known)
    plan = Plan(micro_batch=16)
    record = ProbeRecord(date="", versions={}, command="", sections=(), quick=True, took_s=1.0)
    files = {5: None, 6: known.model_copy(update={"probed": record}).as_file(), 7: "{"}
    took = {}
    for ranks, text in files.items():  # the host is found once for a number of ranks
        if text is not None:
            Path("machine.json").write_text(text)
        cluster = of_host(known, ranks)
        question = StepTimeQuestion(outline(SPEC, "tiny"), 64, cluster.device, cluster.fabric)
        own = Plan(micro_batch=16, strategy="ddp", dp_replicate=ranks)
        columns = of_plans([own], 16 * ranks, SPEC.layers)
        took[ranks] = of_ranks(own, ranks, "cuda") / float(estimate(question, columns).step_s[0])
    assert took == pytest.approx(dict.fromkeys(files, 1.0))
    assert of_ranks(plan, 7, "cpu") > 10 * of_ranks(plan, 7, "cuda")
