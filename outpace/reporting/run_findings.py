"""Findings of the doctor on a run: what limited its speed, from its records."""

import numpy as np

from outpace.records.finding import Examination, Finding, Slowdown, cost_order
from outpace.records.units import show_seconds, show_share
from outpace.records.utilisation import average
from outpace.reporting.bottleneck import BottleneckInputs, limits
from outpace.reporting.data.run_folder import RunFolder

_SOURCE = "this run's own steps"
_SLOW = 2.0  # times the median step: above this, a step was delayed
_LEAST_LOST = 0.05  # minimum share of the time of all steps


def run_examination(run: RunFolder) -> Examination:
    """Examine a run for bottlenecks, slow steps, an unexpected step time, and an early end."""
    findings: list[Finding] = []
    checked, not_checked = ["parts of a step", "slow steps"], {}
    inputs = _bottleneck_inputs(run)
    if len(run.timed_steps) == 0 or inputs.parts.total_s <= 0:
        checked, not_checked = [], dict.fromkeys(checked, "no step was recorded")
    else:
        findings += _loss_findings(inputs) + _slow_step_findings(run)
    if inputs.device == "mps":
        checked.remove("parts of a step")
        not_checked["parts of a step"] = "an Apple GPU is still computing when the clock is read"
    if inputs.loads:
        checked.append("how busy cores and devices were")
    else:
        not_checked["how busy cores and devices were"] = "the run did not record it"
    check = None if run.measurement is None else run.measurement.step_time_check
    if check is None:
        not_checked["the expected time of a step"] = (
            "no step time was expected, since no plan was measured"
        )
    else:
        checked.append("the expected time of a step")
        if check.slower:
            findings.append(_slower_finding(check.ratio, check.words))
    if run.failure is not None:
        checked.append("how it ended")
        findings.append(_failure_finding(run))
    findings.sort(key=cost_order)
    return Examination(findings=tuple(findings), checked=tuple(checked), not_checked=not_checked)


def _bottleneck_inputs(run: RunFolder) -> BottleneckInputs:
    measured = run.measurement
    loads = tuple(average(one.loads) for one in run.utilisation if one.loads)
    plan = run.record.plan
    return BottleneckInputs(
        parts=run.timed_steps.median_parts() if measured is None else measured.parts,
        device=run.record.device if measured is None else measured.device,
        strategy=plan.strategy,
        processes=plan.world_size,
        loads=loads if measured is None else measured.utilisation or loads,
        mfu=None if measured is None else measured.mfu,
        hosts=run.hosts,
    )


def _loss_findings(inputs: BottleneckInputs) -> list[Finding]:
    return [
        Finding(
            check="speed",
            what=limit.words,
            seen=f"{show_share(share)} of a step of {show_seconds(inputs.parts.total_s)}"
            if limit.of_step
            else f"on average over the run, with steps of {show_seconds(inputs.parts.total_s)}",
            remedy=limit.advice,
            severity="high" if share >= 0.5 else "moderate",
            costs=_slowdown(1 / max(1 - share, 0.01)) if limit.of_step else None,
        )
        for share, limit in limits(inputs)
    ]


def _slow_step_findings(run: RunFolder) -> list[Finding]:
    steps = run.timed_steps
    times = steps.steady("step_time_s")
    median = float(np.median(times))
    slow = times > _SLOW * median
    lost = float((times[slow] - median).sum())
    if lost < _LEAST_LOST * float(times.sum()):
        return []
    numbers = steps.steady("step")[slow].astype(int)[:5]
    more = f" and {int(slow.sum()) - 5:,} more" if slow.sum() > 5 else ""
    return [
        Finding(
            check="slow steps",
            what=f"{int(slow.sum()):,} of {len(times):,} steps took more than twice the median",
            seen=f"steps {', '.join(map(str, numbers))}{more}, {show_seconds(lost)} longer than "
            f"at the median of {show_seconds(median)}",
            remedy="Check which other programs ran during these steps: `outpace report` shows the "
            "load of cores and devices by step. End other programs, and make sure that the disk is "
            "not full.",
            severity="moderate",
            costs=_slowdown(float(times.sum()) / (float(times.sum()) - lost)),
        )
    ]


def _slower_finding(ratio: float, words: str) -> Finding:
    return Finding(
        check="expected time",
        what="slower than expected",
        seen=words,
        remedy="Compare this run with the run that the expected time is from (outpace compare "
        "--runs A B), or tune again (outpace tune) if the machine has changed.",
        severity="moderate",
        costs=_slowdown(ratio),
    )


def _failure_finding(run: RunFolder) -> Finding:
    assert run.failure is not None
    return Finding(
        check="how it ended",
        what="it did not reach its last step",
        seen=run.failure.reason,
        remedy=f"outpace runs show {run.path} shows how to resume it.",
        severity="severe",
    )


def _slowdown(factor: float) -> Slowdown:
    return Slowdown(low=factor, high=factor, of="a step", source=_SOURCE)
