"""Notes below the list of plans: assumptions, and options that would change the result."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from outpace.planner.calibration.measured_cases import faster_case, spread_beyond
from outpace.planner.explain.hints import hint
from outpace.planner.model.adapters import ADAPTER_STRATEGIES, can_plan_adapters
from outpace.planner.model.outline import parameters
from outpace.planner.plan_estimate import likeness
from outpace.planner.plan_search import add_alternatives, least_seconds, search_plans
from outpace.planner.problem import PlanningProblem
from outpace.planner.search.branch_and_bound import SearchResult, fits
from outpace.planner.search.space import to_plan
from outpace.records.estimate import RankedPlan
from outpace.records.optimizers import LOW, OptimizerName
from outpace.records.precisions import PRECISION_TRAITS
from outpace.records.units import show_bytes, show_count, show_seconds


def uncertainties(planned: Sequence[RankedPlan]) -> list[str]:
    """Return notes on estimates whose error the prediction interval does not cover."""
    told = []
    if any(one.plan.precision == "fp8" for one in planned):
        told.append(
            "fp8: the time to compute scales is not counted; MFU is relative to the fp8 peak."
        )
    if any(one.plan.compile for one in planned):
        told.append(
            "compile: the gain is estimated from the memory traffic and kernel launches that it "
            "saves (docs/concepts/planner.md)."
        )
    return told


def extrapolated_note(planned: RankedPlan) -> list[str]:
    """Return a note on features of the first plan that are outside of all measured cases."""
    if not planned.extrapolated:
        return []
    wider = ", so the interval is wider" if spread_beyond(planned.extrapolated) > 1 else ""
    return [f"Extrapolated: {'; '.join(planned.extrapolated)}{wider}."]


def faster_case_note(job: PlanningProblem, result: SearchResult, planned: RankedPlan) -> list[str]:
    """Return a note if a published step time is shorter than the plan's due to faster matmuls.

    This is the case if the published run used matmuls in a lower precision. `planned` has the
    published steps that are shown with the plan.
    """
    plan, least_s = to_plan(result.columns, result.fastest), least_seconds(result)
    batch = job.wanted.global_batch
    case = faster_case(likeness(job, plan), planned.cases, batch, least_s)
    if case is None:
        return []
    return [
        f"The published step of {case.stack} ({show_seconds(case.measured_s)}) is faster than the "
        f"fastest plan ({show_seconds(least_s)}) because its matmuls are in {case.precision}; the "
        f"plan's are in {PRECISION_TRAITS[plan.precision].matmuls}."
    ]


def host_memory_note(job: PlanningProblem, used: PlanningProblem) -> list[str]:
    """Return a note if the host memory is unknown and offloading to it would be possible."""
    if len(job.by_assumption()) == 1:
        return []
    unknown = f"The host memory of {job.cluster.name} is not known"
    state = "Give a node's host memory, as in --host-memory 512GiB"
    if not used.wanted.offloads:
        return [f"{unknown}, so no plan offloads. {state}: plans that offload may be faster."]
    return [
        f"{unknown}, and with these options nothing fits without offloading, so the host is "
        f"assumed to have enough. {state}."
    ]


def uneven_batch_note(job: PlanningProblem) -> list[str]:
    """Return a note if the global batch is not a multiple of the number of devices.

    No plan can then divide the batch among all devices.
    """
    batch, devices = job.wanted.global_batch, job.cluster.devices
    if batch % devices == 0:
        return []
    larger = devices * (batch // devices + 1)
    return [
        f"Global batch {batch} is not a multiple of the {devices} devices, so no plan splits it "
        "among all of them: DDP, ZeRO and HSDP over all devices are left out. They may be faster, "
        f"and simpler: try --global-batch {larger}."
    ]


def adapter_notes(
    job: PlanningProblem, used: PlanningProblem, planned: Sequence[RankedPlan]
) -> list[str]:
    """Return notes on adapters.

    With adapters, the notes tell what is trained and what 4-bit weights would save. Otherwise, a
    note suggests adapters if the first plan offloads weights.
    """
    adapters = job.wanted.adapters
    if adapters is not None:
        trained, count = adapters.trained_parameters(job.outline), parameters(job.outline)
        strategies = ", ".join(ADAPTER_STRATEGIES)
        return [
            f"{adapters.title}: {show_count(trained)} parameters are trained, with "
            f"{show_count(count)} frozen ones. Plans use strategy {strategies}, without "
            "offloading. outpace also trains adapters with other strategies: trace their memory "
            "with `outpace memory`.",
            *_four_bit_weights_note(used, planned[0]),
        ]
    values = {"precision": job.wanted.precision, **job.wanted.keep}
    known = can_plan_adapters(job.outline, values) and not job.question.other_program
    if planned[0].plan.offload_parameters in (None, "none") or not known:
        return []
    return [
        "Every step fetches the weights from the host. Adapters need far less memory: plan them "
        "with --lora-rank 16 (and --base nf4)."
    ]


def _four_bit_weights_note(job: PlanningProblem, planned: RankedPlan) -> list[str]:
    """Return a note on frozen 4-bit weights, unless the user chose a format or they do not help."""
    wanted = job.wanted
    if "base" in wanted.keep or wanted.on_host:
        return []
    packed = replace(job, wanted=replace(wanted, keep={**wanted.keep, "base": "nf4"}), count=1)
    result = search_plans(packed)
    if not len(result.ranked):
        return []
    result = add_alternatives(packed, result)
    needs, took = float(result.needs[result.simplest]), float(result.times.step_s[result.simplest])
    now = planned.estimate
    if needs >= now.peak_memory_bytes and took >= now.step_time_s:
        return []
    return [
        f"With --base nf4 (QLoRA), the recommended plan needs {show_bytes(round(needs))} and takes "
        f"{show_seconds(took)} a step, against plan 1's {show_bytes(now.peak_memory_bytes)} and "
        f"{show_seconds(now.step_time_s)}. Weights in 4 bits are less exact."
    ]


# Options with the smallest optimizer states, those closest to fp32 AdamW first.
_SMALL_STATES: tuple[tuple[OptimizerName, bool], ...] = tuple(
    (name, in_backward) for in_backward in (False, True) for name in LOW
)


def small_states_note(job: PlanningProblem, planned: RankedPlan) -> list[str]:
    """Suggest low-bit weights and optimizer states if the first plan offloads its own.

    Returns a note that compares memory and step time with and without them, or no note if they do
    not fit or the user has chosen precision, optimizer or offloading.
    """
    wanted, plan = job.wanted, planned.plan
    decided = {*wanted.keep, *wanted.vary} & {
        "precision", "optimizer", "optimizer_in_backward", "offload_parameters",
        "offload_optimizer",
    }  # fmt: skip
    offloads = {plan.offload_parameters, plan.offload_optimizer} != {"none"}
    bf16 = "bf16" in job.cluster.device.peak_flops_per_s
    if not offloads or decided or not bf16 or job.question.other_program:
        return []
    for optimizer, in_backward in _SMALL_STATES:
        options: dict[str, Any] = {"precision": "bf16-pure", "optimizer": optimizer}
        if in_backward:
            options["optimizer_in_backward"] = True
        kept = replace(wanted, keep={**wanted.keep, **options}, offloads=False)
        small = replace(job, wanted=kept, count=1)
        if not fits(kept, small.checked_bytes, small.least_bytes, small.limit):
            continue
        result = search_plans(small)
        words = ",".join(f"{name}={str(value).lower()}" for name, value in options.items())
        return [
            f"Without offloading, --keep {words} fits: "
            f"{show_bytes(round(float(result.needs[result.fastest])))} and "
            f"{show_seconds(least_seconds(result))} a step, against plan 1's "
            f"{show_seconds(planned.estimate.step_time_s)}. Weights and states in fewer bits "
            "change the results of training (docs/concepts/optimizers.md)."
        ]
    return []


_MUCH_OF_STEP = 0.25  # of the step time


def batch_note(planned: RankedPlan) -> list[str]:
    """Return a note if offloading the optimizer takes much of the step.

    Its time does not depend on the batch, so that a larger batch is suggested.
    """
    one = planned.estimate
    fixed_s = sum(
        part.exposed_s for part in one.offloading if part.what in ("optimizer", "host step", "disk")
    )
    if fixed_s < _MUCH_OF_STEP * one.step_time_s:
        return []
    return [
        f"Offloading the optimizer takes {show_seconds(fixed_s)} of plan 1's step, whatever the "
        "batch: the update runs outside the device, and gradients and new weights are copied. A "
        "larger --global-batch (more accumulation) spreads this over more tokens."
    ]


def list_hints(job: PlanningProblem, result: SearchResult) -> list[str]:
    """Suggest helpful options that are not searched by default, if hints are requested."""
    if not job.hints or job.wanted.on_host:
        return []
    best = to_plan(result.columns, result.fastest)
    told = hint(
        job.question, job.wanted, job.checked_bytes, job.least_bytes, job.limit, best,
        least_seconds(result),
    )  # fmt: skip
    return [] if told is None else [told]
