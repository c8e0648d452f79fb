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
from outpace.records.outline import OUTLINE_FORMATS
from outpace.records.units import show_bytes, show_count, show_seconds, show_share, show_size
from outpace.reporting.terminal.defaults import default_words

_BAR = 24
_LEAST_TITLE = 16  # columns; in 80, the widest figures leave 18


def plans_text(answer: Plans) -> Group:
    """Format plans with their reasons, the time and memory of the first, and rejected families."""
    obstacle = common_obstacle(answer.plans)
    parts: list[RenderableType] = [Text(plans_head(answer))]
    parts += [Text(line) for line in _host_need(answer.plans[0].estimate)]
    if obstacle is not None:
        parts.append(Text(_untrained_line(obstacle)))
    parts.append(_ranking_table(answer.plans))
    parts += [Text(line) for line in ties(answer.plans)]
    for number, planned in enumerate(answer.plans, 1):
        own = None if obstacle else planned.untrained
        mark = f" Not trained by outpace: {own}." if own else ""
        budget = _budget(planned.estimate)
        parts.append(_item(f"{number}.", f"{planned.why}.{budget}{mark}"))
    parts += [Text(""), *_detail(answer.plans[0])]
    parts += cases_text(answer.plans[0].cases)
    if answer.insistences:
        parts.append(Text("\nCost of required settings, compared with the best plan without them:"))
        parts += [Text(f"  {one.setting}: {_slower(one.slowdown)}") for one in answer.insistences]
    if answer.rejected:
        parts.append(Text("\nNot taken:"))
        parts += [_item("  •", f"{one.family}: {one.reason}") for one in answer.rejected]
    parts += [Text(""), *(_item("•", note) for note in (*answer.notes, _interval_note(answer)))]
    return Group(*parts)


def cases_text(cases: Sequence[MeasuredCase]) -> list[RenderableType]:
    """Format the nearest published steps with their predictions, one or two lines each."""
    if not cases:
        return []
    lines: list[RenderableType] = [Text("\nNearest published steps:")]
    for one in cases:
        devices = "device" if one.devices == 1 else "devices"
        rate = one.tokens_per_device_s
        each = "" if rate is None else f" ({show_count(rate)} tokens/s a device)"
        lines.append(_item(
            "  •", f"{one.model}, {one.devices:,} {devices} of {one.chip}, {one.seq_len:,} tokens, "
            f"{one.stack}, {one.layout}: measured {show_seconds(one.measured_s)}{each}, predicted "
            f"{show_seconds(one.predicted_s)} ({one.error:+.0%}; {one.source})".replace("%;", " %;")
        ))  # fmt: skip
    return lines


def common_obstacle(plans: Sequence[RankedPlan]) -> str | None:
    """Return the reason why outpace cannot train any of the plans, if it is the same for all."""
    first = plans[0].untrained
    return first if all(planned.untrained == first for planned in plans) else None


def _host_need(one: Estimate) -> list[str]:
    """Return the host memory that the first plan needs, where it is unknown whether there is."""
    if not one.host_offloaded_bytes or one.host_memory_bytes is not None:
        return []
    return [
        f"Plan 1 needs {show_bytes(one.host_offloaded_bytes)} of host memory per node, if the host "
        "has that much: state it with --host-memory."
    ]


def _untrained_line(obstacle: str) -> str:
    return (
        f"Not trained by outpace: {obstacle}. --emit {', '.join(OUTLINE_FORMATS[:-1])} or "
        f"{OUTLINE_FORMATS[-1]} writes a plan for another trainer."
    )


def ties(plans: Sequence[RankedPlan]) -> list[str]:
    """Name the plans that the estimate cannot distinguish from the first."""
    first = plans[0].estimate
    alike = [number for number, one in enumerate(plans, 1)
             if one.estimate.step_time_s <= first.high_s]  # fmt: skip
    if len(alike) < 2:
        return []
    return [
        f"Plans {_range(alike)} are within the {first.level * 100:.0f} % interval of the first: "
        "measure before choosing among them."
    ]


def _range(numbers: Sequence[int]) -> str:
    """Format numbers as "1 to 5", or "1, 2 and 4"."""
    if numbers[-1] - numbers[0] == len(numbers) - 1 and len(numbers) > 2:
        return f"{numbers[0]} to {numbers[-1]}"
    return f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


def _item(mark: str, text: str) -> Table:
    """Format a list item with its further lines indented."""
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row(mark, text)
    return table


def _slower(slowdown: float) -> str:
    return "nothing" if slowdown < 5e-4 else f"{show_share(slowdown)} more time"


_RATES = {
    "probed": "a probe",
    "catalog": "published rates",
    "guessed": "rates that are guessed (outpace probe measures them)",
}


def _interval_note(answer: Plans) -> str:
    first = answer.plans[0].estimate
    return (
        f"Estimated in {answer.took_s:.1f} s from {_RATES[answer.source]}: the true time is "
        f"between {first.low_s / first.step_time_s:.2f} and "
        f"{first.high_s / first.step_time_s:.2f} of the estimate with {first.level * 100:.0f} % "
        "probability (docs/results/accuracy.md). outpace plan --explain N walks through one; "
        "outpace estimate --depth trace checks its memory."
    )


def plans_head(answer: Plans) -> str:
    """Describe the planning question in one to three sentences."""
    world = answer.nodes * answer.devices_per_node
    idle, used = answer.idle_nodes, answer.nodes - answer.idle_nodes
    spare = f" {used} of the {answer.nodes} nodes are used, {idle} stay idle." if idle else ""
    product = f"{answer.nodes} × {answer.devices_per_node} = {world:,} devices"
    sequences = f"sequences of {answer.seq_len:,}, " if answer.reads_tokens else ""
    return (
        f"{answer.model}, {show_count(answer.parameters)} parameters, on "
        f"{'1 device' if world == 1 else product}{_device_memory_words(answer)} "
        f"({answer.machine}); {sequences}"
        f"global batch {answer.global_batch:,}.{spare} "
        f"{answer.considered:,} plans considered.{default_words(answer.defaults)}"
    )


def _device_memory_words(answer: Plans) -> str:
    """Format a device's memory: as advertised, and as left by the driver."""
    memory, nominal = answer.plans[0].estimate.memory_bytes, answer.nominal_memory_bytes
    if memory is None:
        return ""
    if nominal is None or nominal == memory:
        return f" of {show_bytes(memory)}"
    return f" of {show_size(nominal)}, {show_bytes(memory)} of it usable"


def _ranking_table(plans: Sequence[RankedPlan]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("", justify="right")
    table.add_column("plan", overflow="fold", min_width=_LEAST_TITLE)
    columns = _figures([planned.estimate for planned in plans])
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    marked = common_obstacle(plans) is None  # otherwise it is printed above the table
    for number, planned in enumerate(plans, 1):
        title = planned.listed_title + (" †" if marked and planned.untrained else "")
        table.add_row(str(number), title, *(column[number - 1] for column in columns.values()))
    if marked and any(planned.untrained for planned in plans):
        table.caption, table.caption_justify = "† outpace itself does not train it.", "left"
    return table


def _figures(plans: Sequence[Estimate]) -> dict[str, list[str]]:
    """Return the columns of the ranking that distinguish these plans."""
    found = {
        "step": [show_seconds(one.step_time_s) for one in plans],
        plans[0].rate[1]: [show_count(one.rate[0]) for one in plans],
    }
    if any(one.mfu is not None for one in plans):
        found["MFU"] = [show_share(one.mfu) for one in plans]
    if any(one.hfu != one.mfu for one in plans):
        found["HFU"] = [show_share(one.hfu) for one in plans]
    found["memory"] = [show_bytes(one.peak_memory_bytes) for one in plans]
    return found


def _budget(one: Estimate) -> str:
    """Return time and cost for the budget of tokens, if given."""
    if one.tokens is None or one.time_s is None:
        return ""
    days = one.time_s / 86400
    took = f"{days:,.1f} days" if days >= 1 else show_seconds(one.time_s)
    cost = "" if one.cost is None else f", at a cost of {one.cost:,.0f}"
    return f" {show_count(one.tokens)} tokens: {took}{cost}."


def _detail(planned: RankedPlan) -> list[RenderableType]:
    one = planned.estimate
    lines: list[RenderableType] = [
        Text(
            f"{planned.title}\n  {planned.identity}\n  step {show_seconds(one.step_time_s)}, "
            f"{one.level * 100:.0f} % between {show_seconds(one.low_s)} and "
            f"{show_seconds(one.high_s)}"
        ),
        _bars("  where the time goes", {PARTS[k]: v for k, v in one.parts_s.items()}, show_seconds),
        _bars("  where a device's memory goes", _memory(one), show_bytes),
    ]
    return lines + [_item(" ", line) for line in _offload_notes(one)]


def _offloading(one: Estimate) -> list[str]:
    """Return the parts of the offloading time."""
    lines = [
        f"{_OFFLOADED[part.what].format(size=show_bytes(part.nbytes))}: "
        f"{show_seconds(part.exposed_s)}"
        + (" that computing does not hide" if part.what in ("weights", "activations") else "")
        for part in one.offloading
    ]
    if any(part.what == "weights" for part in one.offloading):
        lines.append("fewer, larger micro-batches fetch weights less often")
    return lines


# Of a rank's step; docs/concepts/planner.md says how each is computed.
_OFFLOADED = {
    "weights": "offloading copies {size} of weights, for each micro-batch's forward and backward",
    "activations": "offloading copies {size} of activations, there in the forward and back in the "
    "backward",
    "optimizer": "offloading copies {size} of gradients and new weights",
    "host step": "the optimizer steps on the host",
    "disk": "offloading reads and writes {size} of the optimizer's state and weights on the disk",
}


def _memory(one: Estimate) -> dict[str, float]:
    return {name: float(size) for name, size in one.memory.items()}


def _offload_notes(one: Estimate) -> list[str]:
    """Return notes on the host memory that offloading takes."""
    lines = []
    if one.host_offloaded_bytes:
        has = one.host_memory_bytes
        known = (
            "how much it has is unknown: --host-memory states it"
            if has is None else f"it has {show_bytes(has)}"
        )  # fmt: skip
        needs = f"needs {show_bytes(one.host_offloaded_bytes)} of host memory per node"
        lines.append(f"what is offloaded {needs}; {known}")
    if one.disk_offloaded_bytes:
        needs = f"needs {show_bytes(one.disk_offloaded_bytes)} of disk per node"
        lines.append(f"what is offloaded {needs}")
    return lines


def _bars(title: str, values: dict[str, float], show: object) -> Table:
    """Draw bars of the parts of at least a thousandth, largest first, with their shares."""
    table = Table(box=None, pad_edge=False, padding=(0, 1), title=title, title_justify="left",
                  title_style="", show_header=False)  # fmt: skip
    for _ in range(3):
        table.add_column(no_wrap=True)
    table.add_column(overflow="crop", no_wrap=True)
    whole = sum(values.values()) or 1.0
    for name, value in sorted(values.items(), key=lambda pair: -pair[1]):
        if value / whole < 1e-3:
            continue
        filled = "█" * max(1, round(_BAR * value / whole))
        table.add_row(f"    {name}", show(value), show_share(value / whole), filled)  # type: ignore[operator]
    return table


def _rates(one: Estimate) -> str:
    ranks = "1 rank" if one.ranks == 1 else f"{one.ranks} ranks"
    used = "" if one.mfu is None else (
        f"; MFU {show_share(one.mfu)}, HFU {show_share(one.hfu)} (causal attention not halved; of "
        "windows, only the keys that they reach)"
    )  # fmt: skip
    rate, unit = one.rate
    return f"{show_count(rate)} {unit} on {ranks}{used}"


def explanation_text(answer: Plans, number: int) -> Group:
    """Explain one of the plans in detail."""
    planned = answer.plans[number - 1]
    one = planned.estimate
    fits = "n/a" if one.memory_bytes is None else show_bytes(one.memory_bytes)
    lines: list[RenderableType] = [
        Text(plans_head(answer)),
        Text(f"\nPlan {number} of {len(answer.plans)}: {planned.why}."),
        *_detail(planned),
        Text(
            f"  The fullest rank needs {show_bytes(one.peak_memory_bytes)} of {fits}.\n"
            f"  {_rates(one)}.{_budget(one)}"
        ),
        *(_item("  •", line) for line in _offloading(one)),
        *(_item("  •", f"{axis}: {link}") for axis, link in planned.placement.items()),
    ]
    if planned.untrained:
        lines.append(Text(f"  Not trained by outpace: {planned.untrained}."))
    return Group(*lines)


def plan_text(planned: RankedPlan, notes: Sequence[str] = ()) -> Group:
    """Show a plan given by the user in detail."""
    one = planned.estimate
    lines: list[RenderableType] = [*_detail(planned)]
    if one.memory_bytes is not None:
        verb = "fits" if one.fits else "does NOT fit"
        lines.append(
            Text(
                f"  {verb}: {show_bytes(one.peak_memory_bytes)} of {show_bytes(one.memory_bytes)} "
                f"({one.depth})"
            )
        )
    lines.append(Text(f"  {_rates(one)}."))
    if planned.untrained:
        lines.append(Text(f"  Not trained by outpace: {planned.untrained}."))
    lines += cases_text(planned.cases)
    notes = (*notes, *(f"Extrapolated: {one}." for one in planned.extrapolated))
    return Group(*lines, *(_item("•", note) for note in notes))


def scaling(rows: Sequence[tuple[int, int, RankedPlan | None]], question: PlanningProblem) -> Group:
    """Show throughput by number of nodes: nodes, devices, and the fastest plan for each."""
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
            "More than 100 %: with more devices sharing the states, each has memory for a faster "
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
    return Group(*parts, *(_item("•", note) for note in notes))


_LINEAR = 1.005  # of the first row's rate: above, more than rounding has been gained
_UNTRAINED = "†: outpace cannot train it."


def _marked_title(planned: RankedPlan) -> str:
    return f"{planned.title} †" if planned.untrained else planned.title


_EXCHANGES = ("tensor_s", "context_s", "pipeline_s", "expert_s", "data_s")


def network_share(one: Estimate) -> float:
    """Return the share of a step that is exposed communication."""
    return sum(one.parts_s[name] for name in _EXCHANGES) / one.step_time_s


def _compute_share(one: Estimate) -> float:
    names = ("products_s", "attention_s", "memory_s", "host_s", "optimizer_s")
    return sum(one.parts_s[name] for name in names) / one.step_time_s


def change_text(before: Plans | str, after: Plans | str, changes: str) -> Group:
    """Compare the fastest plan on a changed machine with the fastest on the current one.

    If no plan fits, the reason is shown instead.
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
    """Say how much more or less is processed in the same time."""
    gain = now.step_time_s / then.step_time_s - 1
    if abs(gain) < _SAME_RATE:
        return "the same throughput"
    if gain >= 1:  # factors are easier to read than hundreds of per cent
        return f"{1 + gain:.1f} × the throughput"
    return f"{show_share(abs(gain))} {'more' if gain >= 0 else 'less'} throughput"
