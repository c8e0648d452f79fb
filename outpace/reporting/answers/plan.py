"""Answer of the planner: the request, ranked plans with reasons, and rejected families."""

from collections.abc import Iterator, Sequence

from outpace.records.estimate import MeasuredCase, Plans, RankedPlan
from outpace.records.outline import OUTLINE_FORMATS
from outpace.records.units import show_bytes, show_count, show_seconds, show_share, show_size
from outpace.reporting.answers.defaults import default_words
from outpace.reporting.render.document import Cell, DataTable, Items, Number, Paragraph, Part

_UNTRAINED = "† outpace itself does not train it."
_UTILISATION = (
    "MFU counts the FLOPs that the model needs, HFU also those of recomputation, relative to the "
    "devices' peak."
)


def plans_head(answer: Plans) -> str:
    """Describe the planning request in one to three sentences."""
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
    memory, nominal = answer.plans[0].estimate.memory_bytes, answer.nominal_memory_bytes
    if memory is None:
        return ""
    if nominal is None or nominal == memory:
        return f" of {show_bytes(memory)}"
    return f" of {show_size(nominal)}, {show_bytes(memory)} of it usable"


def common_obstacle(plans: Sequence[RankedPlan]) -> list[str]:
    """Return the reason why outpace cannot train any of the plans, if it is the same for all."""
    obstacle = plans[0].untrained
    if obstacle is None or any(planned.untrained != obstacle for planned in plans):
        return []
    return [
        f"Not trained by outpace: {obstacle}. --emit {', '.join(OUTLINE_FORMATS[:-1])} or "
        f"{OUTLINE_FORMATS[-1]} writes a plan for another trainer."
    ]


def ranking(answer: Plans) -> Iterator[Part]:
    """Yield the table of plans with notes, and the reason for each plan."""
    marks = not common_obstacle(answer.plans)  # these are shown above the table
    marked = marks and any(one.untrained for one in answer.plans)
    yield _plans_table(answer, marked)
    if any(one.estimate.hfu != one.estimate.mfu for one in answer.plans):
        yield Paragraph(_UTILISATION)
    if marked:
        yield Paragraph(_UNTRAINED)
    reasons = []
    for number, planned in enumerate(answer.plans, 1):
        own = planned.untrained if marks else None
        mark = f" Not trained by outpace: {own}." if own else ""
        reasons.append((f"{number}.", f"{planned.why}.{budget_words(planned)}{mark}"))
    yield Items(tuple(reasons))


def _plans_table(answer: Plans, marked: bool) -> DataTable:
    each = [planned.estimate for planned in answer.plans]
    names = ["plan", "step", each[0].rate[1]]
    names += ["MFU"] * any(one.mfu is not None for one in each)
    names += ["HFU"] * any(one.hfu != one.mfu for one in each)
    names.append("memory")

    def row(number: int, planned: RankedPlan) -> tuple[Cell, ...]:
        one = planned.estimate
        title = f"{number}. {planned.listed_title}" + " †" * (marked and bool(planned.untrained))
        cells: dict[str, Cell] = {
            "plan": title,
            "step": Number(one.step_time_s, show_seconds(one.step_time_s)),
            names[2]: Number(one.rate[0], show_count(one.rate[0])),
            "MFU": Number(one.mfu, show_share(one.mfu)),
            "HFU": Number(one.hfu, show_share(one.hfu)),
            "memory": Number(one.peak_memory_bytes, show_bytes(one.peak_memory_bytes)),
        }
        return (*(cells[name] for name in names), planned.identity)

    rows = tuple(row(number, one) for number, one in enumerate(answer.plans, 1))
    return DataTable("The plans", (*names, "batch"), rows, {name: name for name in names})


def ties(plans: Sequence[RankedPlan]) -> list[str]:
    """Name the plans that the estimate cannot distinguish from the first plan."""
    first = plans[0].estimate
    alike = [number for number, one in enumerate(plans, 1)
             if one.estimate.step_time_s <= first.high_s]  # fmt: skip
    if len(alike) < 2:
        return []
    return [
        f"Plans {_format_range(alike)} are within the {first.level * 100:.0f} % interval of the "
        "first: measure before choosing among them."
    ]


def case_lines(cases: Sequence[MeasuredCase]) -> list[str]:
    """Describe steps with published times, each with the planner's prediction."""
    lines = []
    for one in cases:
        devices = "device" if one.devices == 1 else "devices"
        rate, batch = one.tokens_per_device_s, one.global_batch
        each = "" if rate is None else f" ({show_count(rate)} tokens/s a device)"
        asked = f"{one.seq_len:,} tokens" + ("" if batch is None else f" × {batch:,}")
        precision = "" if one.precision is None else f", {one.precision}"
        lines.append(
            f"{one.model}, {one.devices:,} {devices} of {one.chip}, {asked}{precision}, "
            f"{one.stack}, {one.layout}: measured {show_seconds(one.measured_s)}{each}, predicted "
            f"{show_seconds(one.predicted_s)} ({one.error:+.0%}; {one.source})".replace("%;", " %;")
        )
    return lines


def _format_range(numbers: Sequence[int]) -> str:
    """Format numbers as "1 to 5", or "1, 2 and 4"."""
    if numbers[-1] - numbers[0] == len(numbers) - 1 and len(numbers) > 2:
        return f"{numbers[0]} to {numbers[-1]}"
    return f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


def budget_words(planned: RankedPlan) -> str:
    """Return the time and cost of training on the number of tokens that the user gave.

    The sentence begins with a space; it is "" if the user gave no number. The ranges in parentheses
    follow from the interval of the step time.
    """
    one = planned.estimate
    if one.tokens is None or one.time_s is None:
        return ""
    low, high = one.low_s / one.step_time_s, one.high_s / one.step_time_s
    days = one.time_s / 86400
    took = f"{days:,.1f} days" if days >= 1 else show_seconds(one.time_s)
    between = (
        f"{days * low:,.1f} to {days * high:,.1f}" if days >= 1
        else f"{show_seconds(one.time_s * low)} to {show_seconds(one.time_s * high)}"
    )  # fmt: skip
    cost = "" if one.cost is None else (
        f", at a cost of {one.cost:,.0f} ({one.cost * low:,.0f} to {one.cost * high:,.0f})"
    )  # fmt: skip
    return f" {show_count(one.tokens)} tokens: {took} ({between}){cost}."


def rejections(answer: Plans) -> Iterator[DataTable]:
    """Yield the cost of required settings and the rejected families of plans."""
    if answer.insistences:
        costs = tuple(
            (one.setting, Number(one.slowdown, _slower(one.slowdown))) for one in answer.insistences
        )
        title = "Cost of required settings, compared with the best plan without them"
        yield DataTable(title, ("setting", "cost"), costs)
    if answer.rejected:
        rows = tuple((one.family, one.reason) for one in answer.rejected)
        yield DataTable("Rejected", ("family", "reason"), rows)


def _slower(slowdown: float) -> str:
    return "nothing" if slowdown < 5e-4 else f"{show_share(slowdown)} more time"
