"""Rates that measured steps put right."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outpace.catalog.references import references
from outpace.planner.calibration.fit_rates import RateFit, SeenStep, calibrate
from outpace.planner.hardware.device import DeviceRates
from outpace.planner.hardware.links import Fabric, Protocol
from outpace.planner.model.outline import outline
from outpace.planner.plan_columns import of_plans
from outpace.planner.search.finalists import simulate_pipelines
from outpace.planner.step_time.estimate import estimate
from outpace.planner.step_time.setup import StepTimeQuestion

ASSUMED = RateFit(
    DeviceRates(
        name="a CPU", kind="cpu", memory_bytes=None, peak_flops_per_s={},
        best_flops_per_s={"fp32": 100e9, "bf16": 200e9}, multiprocessors=1,
        tiles=((64, 64, 1.0),), fixed_s=0.0, memory_bytes_per_s=10e9, operator_s=7e-6,
        attention_forward=0.5, attention_backward=0.5, attention_narrow=1.0,
        host_bytes_per_s=10e9, host_memory_bytes_per_s=10e9, disk_bytes_per_s=1e9,
        hides=0.0, unit_s=300e-6, curve=((1e4, 0.2), (1e8, 1.0)),
    ),
    Fabric(2, 2e9, 2e9, 2e9, (Protocol(1e-4, 1e-4, 1e-3, 1.0),)),
)  # fmt: skip
SETTINGS = settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))


def step_s(rates, one):
    question = StepTimeQuestion(
        outline(one.spec, one.name), one.seq_len, rates.device, rates.fabric
    )
    columns = of_plans([one.plan], one.global_batch, one.spec.layers)
    times = simulate_pipelines(question, columns, estimate(question, columns), np.array([0]))
    return float(times.step_s[0])


def steps_of(rates, ranks=2, spoiled=(), kept=lambda one: True):
    return [
        SeenStep(outline(one.spec, "m"), one.seq_len, one.global_batch, one.plan,
                 step_s(rates, one) * (4.0 if place in spoiled else 1.0))
        for place, one in enumerate(references(ranks, "cpu").values()) if kept(one)
    ]  # fmt: skip


def really(matmuls=1.0, memory=1.0, operators=1.0, units=1.0, links=1.0, gathers=1.0):
    """A machine whose rates are so many times slower than is assumed."""
    device, fabric = ASSUMED.device, ASSUMED.fabric
    best = {dtype: rate / matmuls for dtype, rate in device.best_flops_per_s.items()}
    return RateFit(
        replace(device, best_flops_per_s=best,
                memory_bytes_per_s=device.memory_bytes_per_s / memory,
                operator_s=device.operator_s * operators, unit_s=device.unit_s * units),
        replace(fabric, inside_bytes_per_s=fabric.inside_bytes_per_s / links,
                across_bytes_per_s=fabric.across_bytes_per_s / links,
                pair_bytes_per_s=fabric.pair_bytes_per_s / links, gather_share=1 / gathers),
    )  # fmt: skip


def on_two(seen):
    found = calibrate({2: ASSUMED}, seen)
    return found.rates[2], found.off


slower = st.floats(0.5, 4.0)


@pytest.mark.slow
@SETTINGS
@given(slower, slower, st.floats(0.5, 10.0), slower, slower, slower)
def test_what_the_machine_really_is_comes_out(matmuls, memory, operators, units, links, gathers):
    truth = really(matmuls, memory, operators, units, links, gathers)
    found, off = on_two(steps_of(truth))
    assert off < 0.01
    for one in references(2, "cpu").values():  # and of what was not seen
        other = replace(one, global_batch=2 * one.global_batch)
        assert step_s(found, other) == pytest.approx(step_s(truth, other), rel=0.03)


def test_what_no_step_tells_of_stays_as_it_was_measured():
    truth = really(matmuls=2.0)
    seen = steps_of(truth, 1, kept=lambda one: one.plan.precision == "fp32")
    found = calibrate({1: ASSUMED}, seen).rates[1]
    assert found.device.rate("fp32") == pytest.approx(50e9, rel=0.1)
    assert found.device.rate("bf16") == pytest.approx(200e9, rel=1e-3)
    assert found.fabric.inside_bytes_per_s == pytest.approx(2e9, rel=1e-3)


def test_a_disturbed_step_does_not_spoil_the_others():
    truth = really(matmuls=1.5, memory=2.0)
    found, off = on_two(steps_of(truth, spoiled=(8,)))
    assert off < 0.03
    for place, one in enumerate(references(2, "cpu").values()):
        if place != 8:
            assert step_s(found, one) == pytest.approx(step_s(truth, one), rel=0.12)


def test_steps_of_one_rank_tell_of_two_that_share_the_machine():
    truth = really(matmuls=2.0)
    found = calibrate({1: ASSUMED, 2: ASSUMED}, steps_of(truth, 1)).rates
    assert found[2].device.rate("fp32") == pytest.approx(50e9, rel=0.1)


def test_rates_that_are_known_well_are_changed_less():
    seen = steps_of(really(matmuls=2.0), 1)[:1]
    unsure, sure = (calibrate({1: ASSUMED}, seen, spread).rates[1].device for spread in (1, 0.01))
    assert unsure.rate("fp32") < sure.rate("fp32") < 100e9


@pytest.mark.slow
def test_how_sure_a_time_is_depends_on_what_was_seen():
    truth = really(matmuls=2.0, links=3.0)
    steps = {ranks: steps_of(truth, ranks) for ranks in (1, 2)}
    one = next(of for of in references(2, "cpu").values() if of.plan.strategy == "ddp")

    def spread(*seen):
        found = calibrate({1: ASSUMED, 2: ASSUMED}, [step for of in seen for step in of])
        return found.spreads(found.slopes(2, lambda rates: np.array([step_s(rates, one)])))[0]

    nothing, alone, both = spread(), spread(steps[1]), spread(steps[1], steps[2])
    assert nothing > 0.5 > alone > 2 * both and both < 0.05
