"""The planner's answer in a terminal: ranked plans, one in detail, and scaling."""

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from outpace.planner.explain.titles import PARTS
from outpace.planner.model.outline import parameters
from outpace.planner.problem import PlanningProblem
from outpace.records.estimate import Estimate, MeasuredCase, Plans, RankedPlan
from outpace.records.memory import explain_kinds
from outpace.records.units import show_bytes, show_count, show_seconds, show_share
from outpace.reporting.answers.plan import (
    budget_words,
    case_lines,
    common_obstacle,
    plans_head,
    ranking,
    rejections,
    ties,
)
from outpace.reporting.render.document import Items
from outpace.reporting.terminal.answer import part_text
from outpace.reporting.terminal.bar import bar

_BAR = 24
_LEAST_TITLE = 16  # columns; of 80, the widest figures leave 18


def plans_text(answer: Plans) -> Group:
    """Format the recommended plans with reasons, the details of the first, and rejected plans."""
    parts: list[RenderableType] = [Text(plans_head(answer))]
    notes = [*_host_memory_notes(answer.plans[0].estimate), *common_obstacle(answer.plans)]
    parts += [Text(line) for line in notes]
    parts += [part_text(part, _LEAST_TITLE) for part in ranking(answer)]
    parts += [Text(line) for line in ties(answer.plans)]
    parts += [Text(""), *_plan_details(answer.plans[0])]
    parts += cases_text(answer.plans[0].cases)
    parts += [part_text(part) for part in rejections(answer)]
    parts += [Text(""), _bullets((*answer.notes, _interval_note(answer)))]
    return Group(*parts)


def cases_text(cases: Sequence[MeasuredCase]) -> list[RenderableType]:
    """Format published measurements that are similar to a plan, each with its prediction."""
    if not cases:
        return []
    return [Text("\nNearest published steps:"), _bullets(case_lines(cases), "  •")]


def _host_memory_notes(one: Estimate) -> list[str]:
    if not one.host_offloaded_bytes or one.host_memory_bytes is not None:
        return []
    return [
        f"Plan 1 needs {show_bytes(one.host_offloaded_bytes)} of host memory per node. The host's "
        "memory is unknown: state it with --host-memory."
    ]


def _bullets(lines: Sequence[str], mark: str = "•") -> RenderableType:
    return part_text(Items(tuple((mark, line) for line in lines)))


_RATES = {
    "probed": "a probe",
    "catalog": "published rates",
    "guessed": "guessed rates (outpace probe measures them)",
}


def _interval_note(answer: Plans) -> str:
    first = answer.plans[0].estimate
    return (
        f"Estimated in {answer.took_s:.1f} s from {_RATES[answer.source]}: the true time is "
        f"between {first.low_s / first.step_time_s:.2f} and "
        f"{first.high_s / first.step_time_s:.2f} of the estimate with {first.level * 100:.0f} % "
        "probability (docs/results/accuracy.md). outpace plan --explain N explains a plan; outpace "
        "estimate --depth trace checks its memory."
    )


def _plan_details(planned: RankedPlan) -> list[RenderableType]:
    one = planned.estimate
    lines: list[RenderableType] = [
        Text(
            f"{planned.title}\n  {planned.identity}\n  step {show_seconds(one.step_time_s)}, "
            f"{one.level * 100:.0f} % between {show_seconds(one.low_s)} and "
            f"{show_seconds(one.high_s)}"
        ),
        _bars("  where the time goes", {PARTS[k]: v for k, v in one.parts_s.items()}, show_seconds),
        _bars("  a device's memory by kind", _memory_by_kind(one), show_bytes),
    ]
    notes = [
        *filter(None, [explain_kinds(_largest_parts(_memory_by_kind(one)))]),
        *_offload_memory_notes(one),
    ]
    return [*lines, _bullets(notes, " ")]


def _offloading_lines(estimate: Estimate) -> list[str]:
    lines = [
        f"{_OFFLOADED[part.what].format(size=show_bytes(part.nbytes))}: "
        f"{show_seconds(part.exposed_s)}"
        + (" not hidden by computation" if part.what in ("weights", "activations") else "")
        for part in estimate.offloading
    ]
    if any(part.what == "weights" for part in estimate.offloading):
        lines.append("fewer, larger micro-batches fetch weights less often")
    return lines


# Contributions of offloading to a rank's step; docs/concepts/planner.md says how each is computed.
_OFFLOADED = {
    "weights": "offloading copies {size} of weights, for each micro-batch's forward and backward",
    "activations": "offloading copies {size} of activations, out in the forward and back in the "
    "backward",
    "optimizer": "offloading copies {size} of gradients and new weights",
    "host step": "the optimizer runs on the host",
    "disk": "offloading reads and writes {size} of the optimizer's state and weights on the disk",
}


def _memory_by_kind(estimate: Estimate) -> dict[str, float]:
    return {name: float(size) for name, size in estimate.memory.items()}


def _offload_memory_notes(estimate: Estimate) -> list[str]:
    lines = []
    if estimate.host_offloaded_bytes:
        has = estimate.host_memory_bytes
        known = (
            "the host's memory is unknown: state it with --host-memory"
            if has is None else f"it has {show_bytes(has)}"
        )  # fmt: skip
        needs = f"needs {show_bytes(estimate.host_offloaded_bytes)} of host memory per node"
        lines.append(f"what is offloaded {needs}; {known}")
    if estimate.disk_offloaded_bytes:
        needs = f"needs {show_bytes(estimate.disk_offloaded_bytes)} of disk per node"
        lines.append(f"what is offloaded {needs}")
    return lines


def _bars(title: str, values: dict[str, float], show: object) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1), title=title, title_justify="left",
                  title_style="", show_header=False)  # fmt: skip
    for _ in range(3):
        table.add_column(no_wrap=True)
    table.add_column(overflow="crop", no_wrap=True)
    for name, (value, share) in _largest_parts(values).items():
        table.add_row(f"    {name}", show(value), show_share(share), bar(share, _BAR))  # type: ignore[operator]
    return table


def _largest_parts(values: dict[str, float]) -> dict[str, tuple[float, float]]:
    """Return values with their share of the total, largest first, without shares below 0.1 %."""
    whole = sum(values.values()) or 1.0
    shares = {name: (value, value / whole) for name, value in values.items()}
    return dict(sorted(
        ((name, part) for name, part in shares.items() if part[1] >= 1e-3),
        key=lambda pair: -pair[1][0],
    ))  # fmt: skip


def _format_rates(estimate: Estimate) -> str:
    ranks = "1 rank" if estimate.ranks == 1 else f"{estimate.ranks} ranks"
    used = "" if estimate.mfu is None else (
        f"; MFU {show_share(estimate.mfu)}, HFU {show_share(estimate.hfu)} (HFU includes "
        "recomputation; both count full causal attention, and only the keys within sliding windows)"
    )  # fmt: skip
    rate, unit = estimate.rate
    return f"{show_count(rate)} {unit} on {ranks}{used}"


def explanation_text(answer: Plans, number: int) -> Group:
    """Explain one of the plans in detail."""
    planned = answer.plans[number - 1]
    one = planned.estimate
    fits = "n/a" if one.memory_bytes is None else show_bytes(one.memory_bytes)
    lines: list[RenderableType] = [
        Text(plans_head(answer)),
        Text(f"\nPlan {number} of {len(answer.plans)}: {planned.why}."),
        *_plan_details(planned),
        Text(
            f"  The fullest rank needs {show_bytes(one.peak_memory_bytes)} of {fits}.\n"
            f"  {_format_rates(one)}.{budget_words(planned)}"
        ),
        _bullets(
            [
                *_offloading_lines(one),
                *(f"{axis}: {link}" for axis, link in planned.placement.items()),
            ],
            "  •",
        ),
    ]
    if planned.untrained:
        lines.append(Text(f"  Not trained by outpace: {planned.untrained}."))
    return Group(*lines)


def plan_text(planned: RankedPlan, notes: Sequence[str] = ()) -> Group:
    """Show the details of a plan that the user gave."""
    one = planned.estimate
    lines: list[RenderableType] = [*_plan_details(planned)]
    if one.memory_bytes is not None:
        verb = "fits" if one.fits else "does NOT fit"
        lines.append(
            Text(
                f"  {verb}: {show_bytes(one.peak_memory_bytes)} of {show_bytes(one.memory_bytes)} "
                f"({one.depth})"
            )
        )
    lines.append(Text(f"  {_format_rates(one)}."))
    if planned.untrained:
        lines.append(Text(f"  Not trained by outpace: {planned.untrained}."))
    lines += cases_text(planned.cases)
    notes = (*notes, *(f"Extrapolated: {one}." for one in planned.extrapolated))
    return Group(*lines, _bullets(notes))


def scaling(rows: Sequence[tuple[int, int, RankedPlan | None]], question: PlanningProblem) -> Group:
    """Format a table of the fastest plan and its throughput by number of nodes.

    Each row is (nodes, devices, plan). The plan is None if no plan fits.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    unit = next((one.estimate.rate[1] for _, _, one in rows if one is not None), "tokens/s")
    for name in ("nodes", "devices", unit, "efficiency", "network", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("fastest plan", overflow="fold")
    first: float | None = None
    over, is_above_linear = None, False
    for nodes, devices, planned in rows:
        if planned is None:
            table.add_row(f"{nodes:,}", f"{devices:,}", "–", "", "", "", "no plan fits")
            continue
        one = planned.estimate
        each = one.tokens_per_s / devices
        first = first or each
        is_above_linear |= each > _LINEAR * first
        exposed = network_share(one)
        if exposed > 0.5 * _compute_share(one) and over is None:
            over = nodes
        table.add_row(
            f"{nodes:,}", f"{devices:,}", show_count(one.rate[0]), show_share(each / first),
            show_share(exposed), show_bytes(one.peak_memory_bytes), _marked_title(planned),
        )  # fmt: skip
    caption = [
        f"efficiency: {unit} per device, relative to the first row that fits. network: the exposed "
        "share of a step.",
        f"The network dominates from {over:,} nodes: its exposed time is more than half of "
        "computation." if over
        else "The network never dominates (more than half of computation).",
    ]  # fmt: skip
    if is_above_linear:
        caption.append(
            "More than 100 %: since more devices share the states, each has memory for a faster "
            "plan (a larger micro-batch, less recomputation or offloading)."
        )
    notes = [*question.outline.notes, *question.cluster.notes]
    if any(planned is not None and planned.untrained for *_, planned in rows):
        notes.insert(0, _UNTRAINED)
    outline, wanted = question.outline, question.wanted
    sequences = f"sequences of {wanted.seq_len:,}, " if unit == "tokens/s" else ""
    head = (
        f"{outline.name}, {show_count(parameters(outline))} parameters, on nodes like "
        f"{question.cluster.name}; {sequences}global batch {wanted.global_batch:,} in every row."
    )
    parts = (Text(head), table, Text(" ".join(caption)))
    return Group(*parts, _bullets(notes))


_LINEAR = 1.005  # ratio to the first row's rate above which the gain is more than rounding
_UNTRAINED = "†: outpace cannot train it."


def _marked_title(planned: RankedPlan) -> str:
    return f"{planned.title} †" if planned.untrained else planned.title


_COMMUNICATION = ("tensor_s", "context_s", "pipeline_s", "expert_s", "data_s")


def network_share(estimate: Estimate) -> float:
    """Return the share of a step that is exposed communication."""
    return sum(estimate.parts_s[name] for name in _COMMUNICATION) / estimate.step_time_s


def _compute_share(estimate: Estimate) -> float:
    names = ("products_s", "attention_s", "memory_s", "host_s", "optimizer_s")
    return sum(estimate.parts_s[name] for name in names) / estimate.step_time_s


def change_text(before: Plans | str, after: Plans | str, changes: str) -> Group:
    """Compare the fastest plans before and after a change of the machine.

    Where no plan fits, the reason is shown instead.
    """
    now, then = (
        one if isinstance(one, str) else one.plan_for("fastest") or one.plans[0]
        for one in (before, after)
    )
    if isinstance(now, str):
        verdict = f"the model does not fit now, but with {changes} it does"
    elif isinstance(then, str):
        verdict = f"the model fits now, but with {changes} it does not"
    else:
        verdict = _compare_rates(now.estimate, then.estimate)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("machine", overflow="fold")
    unit = next((p.estimate.rate[1] for p in (now, then) if not isinstance(p, str)), "tokens/s")
    for name in ("step", unit, "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("fastest plan", overflow="fold")
    for name, best in (("now", now), (f"with {changes}", then)):
        if isinstance(best, str):
            table.add_row(name, "–", "–", "–", best)
            continue
        one = best.estimate
        table.add_row(
            name, show_seconds(one.step_time_s), show_count(one.rate[0]),
            show_bytes(one.peak_memory_bytes), _marked_title(best),
        )  # fmt: skip
    marked = any(not isinstance(one, str) and one.untrained for one in (now, then))
    below = [Text(_UNTRAINED)] if marked else []
    return Group(Text(f"What if {changes}: {verdict}."), table, *below)


_SAME_RATE = 5e-4  # shown as 0.0 %


def _compare_rates(now: Estimate, then: Estimate) -> str:
    gain = now.step_time_s / then.step_time_s - 1
    if abs(gain) < _SAME_RATE:
        return "the same throughput"
    if gain >= 1:  # factors are easier to read than hundreds of per cent
        return f"{1 + gain:.1f} × the throughput"
    return f"{show_share(abs(gain))} {'more' if gain >= 0 else 'less'} throughput"
