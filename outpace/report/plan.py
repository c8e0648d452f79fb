"""The planner's answer in a terminal: ranked plans, one in detail, and how they scale."""

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from outpace.planner.titles import PARTS
from outpace.records.estimate import Estimate, Planned, Plans
from outpace.records.units import show_bytes, show_count, show_seconds, show_share, show_size

_BAR = 24


def plans_text(answer: Plans) -> Group:
    """Plans, fastest first; why; where the fastest one's time and memory go; what was rejected."""
    parts: list[RenderableType] = [Text(plans_head(answer)), _ranked(answer.plans)]
    parts += [Text(line) for line in ties(answer.plans)]
    for number, planned in enumerate(answer.plans, 1):
        mark = f" Not trained by outpace: {planned.untrained}." if planned.untrained else ""
        budget = _budget(planned.estimate)
        parts.append(_item(f"{number}.", f"{planned.why}.{budget}{mark}"))
    parts += [Text(""), *_detail(answer.plans[0])]
    if answer.insistences:
        parts.append(Text("\nWhat is insisted on costs, against the optimum without it:"))
        parts += [Text(f"  {one.setting}: {_slower(one.slowdown)}") for one in answer.insistences]
    if answer.rejected:
        parts.append(Text("\nNot taken:"))
        parts += [_item("  •", f"{one.family}: {one.reason}") for one in answer.rejected]
    parts += [Text(""), *(_item("•", note) for note in (*answer.notes, _surely(answer)))]
    return Group(*parts)


def ties(plans: Sequence[Planned]) -> list[str]:
    """Which plans the estimate does not tell apart from the first."""
    first = plans[0].estimate
    alike = [one for one in plans if one.estimate.step_time_s <= first.high_s]
    if len(alike) < 2:
        return []
    return [
        f"Plans 1 to {len(alike)} lie within the {first.level * 100:.0f} % interval of the first: "
        "measure before choosing among them."
    ]


def _item(mark: str, text: str) -> Table:
    """A mark, and a text whose further lines begin below its first."""
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


def _surely(answer: Plans) -> str:
    first = answer.plans[0].estimate
    return (
        f"Estimated in {answer.took_s:.1f} s from "
        f"{_RATES[answer.source]}: the true time lies "
        f"between {first.low_s / first.step_time_s:.2f} and {first.high_s / first.step_time_s:.2f} "
        f"of the estimate with {first.level * 100:.0f} % (docs/accuracy.md). "
        "outpace plan --explain N walks through one; outpace estimate --depth trace checks its "
        "memory."
    )


def plans_head(answer: Plans) -> str:
    """What was planned for, in a sentence or three."""
    world = answer.nodes * answer.devices_per_node
    idle, used = answer.idle_nodes, answer.nodes - answer.idle_nodes
    spare = f" {used} of the {answer.nodes} nodes are used, {idle} stay idle." if idle else ""
    product = f"{answer.nodes} × {answer.devices_per_node} = {world:,} devices"
    sequences = f"sequences of {answer.seq_len:,}, " if answer.reads_tokens else ""
    return (
        f"{answer.model}, {show_count(answer.parameters)} parameters, on "
        f"{'1 device' if world == 1 else product}{_each(answer)} ({answer.machine}); {sequences}"
        f"global batch {answer.global_batch:,}.{spare} "
        f"{answer.considered:,} plans considered."
    )


def _each(answer: Plans) -> str:
    """A device's memory: what its maker prints, and what its driver leaves."""
    memory, nominal = answer.plans[0].estimate.memory_bytes, answer.nominal_memory_bytes
    if memory is None:
        return ""
    if nominal is None or nominal == memory:
        return f" of {show_bytes(memory)}"
    return f" of {show_size(nominal)}, {show_bytes(memory)} of it usable"


def _ranked(plans: Sequence[Planned]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("", justify="right")
    table.add_column("plan", overflow="fold", min_width=24)
    columns = _figures([planned.estimate for planned in plans])
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for number, planned in enumerate(plans, 1):
        title = planned.title + (" †" if planned.untrained else "")
        table.add_row(str(number), title, *(column[number - 1] for column in columns.values()))
    if any(planned.untrained for planned in plans):
        table.caption, table.caption_justify = "† outpace itself does not train it.", "left"
    return table


def _figures(plans: Sequence[Estimate]) -> dict[str, list[str]]:
    """Columns of the ranking: those that tell something of these plans."""
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
    """Time and cost to a budget of tokens, where one was given."""
    if one.tokens is None or one.time_s is None:
        return ""
    days = one.time_s / 86400
    took = f"{days:,.1f} days" if days >= 1 else show_seconds(one.time_s)
    cost = "" if one.cost is None else f", at a cost of {one.cost:,.0f}"
    return f" {show_count(one.tokens)} tokens: {took}{cost}."


def _detail(planned: Planned) -> list[RenderableType]:
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
    return lines + [Text(f"  {line}") for line in _beside(one)]


def _offloading(one: Estimate) -> list[str]:
    """What the time of offloading is made of."""
    lines = [
        f"{_OFFLOADED[part.what].format(size=show_bytes(part.nbytes))}: "
        f"{show_seconds(part.exposed_s)}"
        + (" that computing does not hide" if part.what in ("weights", "activations") else "")
        for part in one.offloading
    ]
    if any(part.what == "weights" for part in one.offloading):
        lines.append("fewer, larger micro-batches fetch weights less often")
    return lines


# Of a rank's step; docs/planner.md says how each is reckoned.
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


def _beside(one: Estimate) -> list[str]:
    """What is offloaded, of a node."""
    lines = []
    if one.host_offloaded_bytes:
        has = one.host_memory_bytes
        known = "how much it has is not known" if has is None else f"it has {show_bytes(has)}"
        needs = f"needs {show_bytes(one.host_offloaded_bytes)} of host memory per node"
        lines.append(f"what is offloaded {needs}; {known}")
    if one.disk_offloaded_bytes:
        needs = f"needs {show_bytes(one.disk_offloaded_bytes)} of disk per node"
        lines.append(f"what is offloaded {needs}")
    return lines


def _bars(title: str, values: dict[str, float], show: object) -> Table:
    """The parts that are a thousandth of the whole or more, largest first, with their shares."""
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
        f"; MFU {show_share(one.mfu)}, HFU {show_share(one.hfu)} (causal "
        "attention not halved, of windows what they reach)"
    )  # fmt: skip
    rate, unit = one.rate
    return f"{show_count(rate)} {unit} on {ranks}{used}"


def explained(answer: Plans, number: int) -> Group:
    """One of the plans, walked through."""
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


def one_plan(planned: Planned, notes: Sequence[str] = ()) -> Group:
    """A plan that a person gave, in detail."""
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
    return Group(*lines, *(_item("•", note) for note in notes))


def scaling(
    rows: Sequence[tuple[int, int, Planned | None]], global_batch: int, notes: Sequence[str]
) -> Group:
    """Throughput on so many nodes: nodes, devices, and the best plan there."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    unit = next((one.estimate.rate[1] for _, _, one in rows if one is not None), "tokens/s")
    for name in ("nodes", "devices", unit, "efficiency", "network", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("best plan", overflow="fold")
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
        if exposed > 0.5 * _computed(one) and over is None:
            over = nodes
        table.add_row(
            f"{nodes:,}", f"{devices:,}", show_count(one.rate[0]), show_share(each / first),
            show_share(exposed), show_bytes(one.peak_memory_bytes), _marked(planned),
        )  # fmt: skip
    caption = (
        f"Global batch {global_batch:,} throughout. efficiency: {unit} of a device, against the "
        "first row that fits. network: the exposed share of a step."
        + (f" The network takes over at {over:,} nodes: more than half of computing." if over
           else " Nowhere does the network take over (half of computing).")
        + (" More than 100 %: where more devices share the states, each has memory for a faster "
           "plan (a larger micro-batch, less recomputed or offloaded)." if is_above_linear else "")
    )  # fmt: skip
    if any(planned is not None and planned.untrained for *_, planned in rows):
        notes = (_UNTRAINED, *notes)
    return Group(table, Text(caption), *(_item("•", note) for note in notes))


_LINEAR = 1.005  # of the first row's rate: above, more than rounding has been gained
_UNTRAINED = "†: outpace itself does not train it."


def _marked(planned: Planned) -> str:
    return f"{planned.title} †" if planned.untrained else planned.title


_EXCHANGES = ("tensor_s", "context_s", "pipeline_s", "expert_s", "data_s")


def network_share(one: Estimate) -> float:
    """Of a step, what is exposed of all exchanges."""
    return sum(one.parts_s[name] for name in _EXCHANGES) / one.step_time_s


def _computed(one: Estimate) -> float:
    names = ("products_s", "attention_s", "memory_s", "host_s", "optimizer_s")
    return sum(one.parts_s[name] for name in names) / one.step_time_s


def compared(now: Planned | str, then: Planned | str, changes: str) -> Group:
    """The best plan with something of the machine changed, beside the best without.

    In the place of a plan, the reason why none fits.
    """
    if isinstance(now, str):
        verdict = f"the model does not fit now, and with {changes} it does"
    elif isinstance(then, str):
        verdict = f"the model fits now, and with {changes} it does not"
    else:
        gain = now.estimate.step_time_s / then.estimate.step_time_s - 1
        verdict = f"{show_share(abs(gain))} {'more' if gain >= 0 else 'less'} throughput"
        if gain >= 1:  # as a factor, which is easier to read than hundreds of per cent
            verdict = f"{1 + gain:.1f} × the throughput"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("machine", overflow="fold")
    unit = next((p.estimate.rate[1] for p in (now, then) if not isinstance(p, str)), "tokens/s")
    for name in ("step", unit, "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("best plan", overflow="fold")
    for name, best in (("now", now), (f"with {changes}", then)):
        if isinstance(best, str):
            table.add_row(name, "–", "–", "–", best)
            continue
        one = best.estimate
        table.add_row(
            name, show_seconds(one.step_time_s), show_count(one.rate[0]),
            show_bytes(one.peak_memory_bytes), _marked(best),
        )  # fmt: skip
    marked = any(not isinstance(one, str) and one.untrained for one in (now, then))
    below = [Text(_UNTRAINED)] if marked else []
    return Group(Text(f"What if {changes}: {verdict}."), table, *below)
