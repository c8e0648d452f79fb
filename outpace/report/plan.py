"""The planner's answer in a terminal: ranked plans, one in detail, and how they scale."""

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from outpace.planner.plans import PARTS
from outpace.records.estimate import Estimate, Planned, Plans
from outpace.records.units import show_bytes, show_count, show_seconds, show_share

_BAR = 24


def plans_text(answer: Plans) -> Group:
    """Plans, fastest first; why; where the fastest one's time and memory go; what was rejected."""
    parts: list[RenderableType] = [Text(_head(answer)), _ranked(answer.plans)]
    for number, planned in enumerate(answer.plans, 1):
        mark = f" Not trained by outpace: {planned.untrained}." if planned.untrained else ""
        parts.append(Text(f"{number}. {planned.title}: {planned.why}.{mark}"))
    parts += [Text(""), *_detail(answer.plans[0])]
    if answer.insistences:
        parts.append(Text("\nWhat is insisted on costs, against the optimum without it:"))
        parts += [
            Text(f"  {one.setting}: {'nothing' if one.slowdown < 5e-4 else f'{one.slowdown:.1%}'}")
            for one in answer.insistences
        ]
    if answer.rejected:
        parts.append(Text("\nNot taken:"))
        parts += [Text(f"  {one.family}: {one.reason}") for one in answer.rejected]
    parts += [Text(f"• {note}") for note in answer.notes]
    parts.append(Text(f"• {_surely(answer)}"))
    return Group(*parts)


def _surely(answer: Plans) -> str:
    first = answer.plans[0].estimate
    return (
        f"Estimated in {answer.took_s:.1f} s from "
        f"{'a probe' if answer.source == 'probed' else 'published rates'}: the true time lies "
        f"between {first.low_s / first.step_time_s:.2f} and {first.high_s / first.step_time_s:.2f} "
        f"of the estimate with {first.level:.0%} (docs/accuracy.md). outpace plan --explain N "
        "walks through one; outpace estimate --depth trace checks its memory."
    )


def _head(answer: Plans) -> str:
    world = answer.nodes * answer.devices_per_node
    return (
        f"{answer.model}, {show_count(answer.parameters)} parameters, on {answer.nodes} × "
        f"{answer.devices_per_node} = {world} devices ({answer.machine}); sequences of "
        f"{answer.seq_len:,}, global batch {answer.global_batch:,}. "
        f"{answer.considered:,} plans considered."
    )


def _ranked(plans: Sequence[Planned]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("", justify="right")
    table.add_column("plan", overflow="fold")
    names = ["step", "tokens/s", "MFU", "HFU", "memory"]
    budget = any(planned.estimate.time_s is not None for planned in plans)
    costs = any(planned.estimate.cost is not None for planned in plans)
    for name in [*names, *(["days"] if budget else []), *(["cost"] if costs else [])]:
        table.add_column(name, justify="right", no_wrap=True)
    for number, planned in enumerate(plans, 1):
        one = planned.estimate
        row = [
            str(number),
            planned.title + (" †" if planned.untrained else ""),
            show_seconds(one.step_time_s),
            show_count(one.tokens_per_s),
            show_share(one.mfu),
            show_share(one.hfu),
            show_bytes(one.peak_memory_bytes),
        ]
        if budget:
            row.append("n/a" if one.time_s is None else f"{one.time_s / 86400:,.1f}")
        if costs:
            row.append("n/a" if one.cost is None else f"{one.cost:,.0f}")
        table.add_row(*row)
    if any(planned.untrained for planned in plans):
        table.caption, table.caption_justify = "† outpace itself does not train it.", "left"
    return table


def _detail(planned: Planned) -> list[RenderableType]:
    one = planned.estimate
    lines: list[RenderableType] = [
        Text(
            f"{planned.title}\n  {planned.identity}\n  step {show_seconds(one.step_time_s)}, "
            f"{one.level:.0%} between {show_seconds(one.low_s)} and {show_seconds(one.high_s)}"
        ),
        _bars("  where the time goes", {PARTS[k]: v for k, v in one.parts_s.items()}, show_seconds),
        _bars("  where the memory goes", _memory(one), show_bytes),
    ]
    return lines


def _memory(one: Estimate) -> dict[str, float]:
    return {name: float(size) for name, size in one.memory.items()}


def _bars(title: str, values: dict[str, float], show: object) -> Table:
    """The parts that are a thousandth of the whole or more, largest first, with their shares."""
    table = Table(box=None, pad_edge=False, padding=(0, 1), title=title, title_justify="left",
                  title_style="", show_header=False)  # fmt: skip
    whole = sum(values.values()) or 1.0
    for name, value in sorted(values.items(), key=lambda pair: -pair[1]):
        if value / whole < 1e-3:
            continue
        filled = "█" * max(1, round(_BAR * value / whole))
        table.add_row(f"    {name}", show(value), show_share(value / whole), filled)  # type: ignore[operator]
    return table


def explained(answer: Plans, number: int) -> Group:
    """One of the plans, walked through."""
    planned = answer.plans[number - 1]
    one = planned.estimate
    fits = "n/a" if one.memory_bytes is None else show_bytes(one.memory_bytes)
    lines: list[RenderableType] = [
        Text(_head(answer)),
        Text(f"\nPlan {number} of {len(answer.plans)}: {planned.why}."),
        *_detail(planned),
        Text(
            f"  The fullest rank needs {show_bytes(one.peak_memory_bytes)} of {fits}.\n"
            f"  {show_count(one.tokens_per_s)} tokens/s on {one.ranks} ranks; MFU "
            f"{show_share(one.mfu)}, HFU {show_share(one.hfu)} (attention in full)."
        ),
    ]
    if planned.untrained:
        lines.append(Text(f"  Not trained by outpace: {planned.untrained}."))
    return Group(*lines)


def one_plan(planned: Planned) -> Group:
    """A plan that a person gave, in detail."""
    one = planned.estimate
    lines: list[RenderableType] = [*_detail(planned)]
    if one.memory_bytes is not None:
        verb = "fits" if one.peak_memory_bytes <= one.memory_bytes else "does NOT fit"
        lines.append(
            Text(
                f"  {verb}: {show_bytes(one.peak_memory_bytes)} of {show_bytes(one.memory_bytes)} "
                f"({one.depth})"
            )
        )
    lines.append(
        Text(
            f"  {show_count(one.tokens_per_s)} tokens/s; MFU {show_share(one.mfu)}, HFU "
            f"{show_share(one.hfu)}"
        )
    )
    if planned.untrained:
        lines.append(Text(f"  Not trained by outpace: {planned.untrained}."))
    return Group(*lines)


def scaling(rows: Sequence[tuple[int, int, Planned | None]]) -> Table:
    """Throughput on so many nodes: nodes, devices, and the best plan there."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for name in ("nodes", "devices", "tokens/s", "efficiency", "network"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("best plan", overflow="fold")
    first: float | None = None
    over = None
    for nodes, devices, planned in rows:
        if planned is None:
            table.add_row(f"{nodes:,}", f"{devices:,}", "does not fit", "", "", "")
            continue
        one = planned.estimate
        each = one.tokens_per_s / devices
        first = first or each
        exposed = network_share(one)
        if exposed > 0.5 * _computed(one) and over is None:
            over = nodes
        table.add_row(
            f"{nodes:,}", f"{devices:,}", show_count(one.tokens_per_s), show_share(each / first),
            show_share(exposed), planned.title,
        )  # fmt: skip
    table.caption = (
        "efficiency: of a device, against the first row. network: the exposed share of a step."
        + (f" The network takes over at {over:,} nodes: more than half of computing." if over
           else " Nowhere does the network take over (half of computing).")
    )  # fmt: skip
    table.caption_justify = "left"
    return table


_EXCHANGES = ("tensor_s", "context_s", "pipeline_s", "expert_s", "data_s")


def network_share(one: Estimate) -> float:
    """Of a step, what is exposed of all exchanges."""
    return sum(one.parts_s[name] for name in _EXCHANGES) / one.step_time_s


def _computed(one: Estimate) -> float:
    names = ("products_s", "attention_s", "memory_s", "host_s", "optimizer_s")
    return sum(one.parts_s[name] for name in names) / one.step_time_s


def compared(before: Planned, after: Planned, changes: str) -> Group:
    """The best plan with something of the machine changed, beside the best without."""
    gain = before.estimate.step_time_s / after.estimate.step_time_s - 1
    word = f"{gain:.1%} faster" if gain >= 0 else f"{-gain:.1%} slower"
    return Group(
        Text(f"What if {changes}: {word}."),
        Text(f"  now:  {show_seconds(before.estimate.step_time_s)}  {before.title}"),
        Text(f"  then: {show_seconds(after.estimate.step_time_s)}  {after.title}"),
    )
