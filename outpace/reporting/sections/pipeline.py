"""A pipeline's schedule as planned and as measured: when each rank computes, and when it waits."""

from collections.abc import Mapping, Sequence

from outpace.planner.pipeline.schedules import orders
from outpace.planner.pipeline.simulator import (
    Action,
    StageTime,
    Timeline,
    idle_share_formula,
    simulate_stages,
)
from outpace.records.estimate import Estimate
from outpace.records.measurement import TimeParts
from outpace.records.pipelines import SCHEDULES
from outpace.records.plan import Plan
from outpace.records.units import show_seconds, show_share
from outpace.reporting.charts import palette
from outpace.reporting.charts.figures import Unit, axis, rows_axis, seconds
from outpace.reporting.render.document import Chart, DataTable, Number

_MOST_ACTIONS = 3000  # maximum number of actions to draw; with more, fewer ranks are drawn
_NUMBERED = 260  # maximum number of actions labelled with their micro-batches
_ACTIONS: Mapping[str, str] = {
    "F": "forward",
    "B": "backward",
    "I": "backward, inputs",
    "W": "backward, weights",
}
_WAITING = "rgba(128,128,128,0.22)"
# Parts of an estimate that are computation within passes; others are waits, or outside of passes.
_PASSES = ("products_s", "attention_s", "memory_s", "host_s", "tensor_s")


def simulate_schedule(plan: Plan, times: Sequence[StageTime], transfer_s: float = 0.0) -> Timeline:
    """Simulate a plan's schedule, given the times of a micro-batch on each stage.

    Raises BadInputError for sizes that the schedule does not support.
    """
    todo = orders(plan.schedule, plan.pp, plan.pp_microbatches, plan.stages_per_rank)
    return simulate_stages(todo, times, transfer_s)


def equal_stages(plan: Plan, estimate: Estimate, global_batch: int) -> list[StageTime]:
    """Return equal times for all stages. Together, they take the estimate's forward and backward.

    A stage's forward is assumed to take a third of its time.
    """
    passes = plan.accumulation(global_batch) * plan.pp_microbatches * plan.stages_per_rank
    each = sum(estimate.parts_s[name] for name in _PASSES) / passes / 3
    return [StageTime(each, each, each)] * plan.stages


def measured_stages(
    plan: Plan, parts: Sequence[TimeParts], global_batch: int
) -> list[StageTime] | None:
    """Return the time of a micro-batch on each stage, from the measured times of all ranks.

    Return None if a rank's times are missing.
    """
    if len(parts) != plan.world_size:
        return None
    each = plan.accumulation(global_batch) * plan.pp_microbatches * plan.stages_per_rank
    across = (plan.world_size - plan.servers) // plan.pp
    found = []
    for stage in range(plan.stages):
        own = parts[SCHEDULES[plan.schedule].rank_of(stage, plan.pp) * across]
        half = own.backward_s / each / 2
        found.append(StageTime(own.forward_s / each, half, half))
    return found


def timelines(title: str, by_name: Mapping[str, Timeline]) -> Chart:
    """Draw timelines one above the other, on a common time axis."""
    unit = seconds([one.makespan_s for one in by_name.values()])
    names, traces, rows = [], [], []
    legend: set[str] = set()
    for name, timeline in by_name.items():
        for rank in _choose_ranks(timeline):
            names.append(f"{name}: rank {rank}" if len(by_name) > 1 else f"rank {rank}")
            traces += _rank_bars(timeline, rank, len(names) - 1, unit, legend)
            busy_s = timeline.busy_s(rank)
            share = 1 - busy_s / timeline.makespan_s if timeline.makespan_s else 0.0
            rows.append((name, f"rank {rank}", unit.cell(busy_s),
                         unit.cell(timeline.makespan_s - busy_s),
                         Number(share, show_share(share))))  # fmt: skip
    alt = " ".join(
        f"{name.capitalize()}: a pass takes {show_seconds(one.makespan_s)}, of which ranks wait "
        f"{show_share(one.idle_share)}."
        for name, one in by_name.items()
    )
    layout = {
        "barmode": "overlay", "bargap": 0.15, "yaxis": rows_axis(names),
        "xaxis": axis("time", unit, range=[0, _longest_s(by_name) * unit.factor]),
    }  # fmt: skip
    table = DataTable(title, ("", "rank", "computes", "waits", "waits, share"), tuple(rows))
    return Chart(title, alt, tuple(traces), layout, table, 120 + 30 * max(4, len(names)))


def _longest_s(by_name: Mapping[str, Timeline]) -> float:
    return max(one.makespan_s for one in by_name.values())


def _choose_ranks(timeline: Timeline) -> list[int]:
    """Return the ranks to draw: all, or some if there are too many, with the first and last."""
    count = len(timeline.ranks)
    actions = sum(map(len, timeline.ranks))
    if actions <= _MOST_ACTIONS or count <= 2:
        return list(range(count))
    most = max(2, _MOST_ACTIONS * count // actions)
    return sorted({round(place * (count - 1) / (most - 1)) for place in range(most)})


def _rank_bars(
    timeline: Timeline, rank: int, row: int, unit: Unit, legend: set[str]
) -> list[dict[str, object]]:
    """Draw a rank's row: a bar of waiting over the whole time, and its actions on top of it.

    `legend` has the names that earlier rows have added to the legend, and gets those of this row.
    """
    whole: dict[str, object] = {
        "type": "bar", "orientation": "h", "name": "waits", "y": [row], "width": 0.8,
        "x": unit.scale([timeline.makespan_s]), "marker": {"color": _WAITING},
        "legendgroup": "waits", "showlegend": "waits" not in legend, "hoverinfo": "skip",
    }  # fmt: skip
    legend.add("waits")
    found = [whole]
    spans = timeline.ranks[rank]
    numbered = sum(map(len, timeline.ranks)) <= _NUMBERED
    for kind, words in _ACTIONS.items():
        some = [span for span in spans if span.action.kind == kind]
        if not some:
            continue
        found.append({
            "type": "bar", "orientation": "h", "name": words, "legendgroup": words,
            "showlegend": words not in legend, "y": [row] * len(some), "width": 0.8,
            "base": unit.scale([span.begin_s for span in some]),
            "x": unit.scale([span.end_s - span.begin_s for span in some]),
            "marker": {"color": palette.ACTIONS[kind],
                       "line": {"width": 0.5, "color": "rgba(255,255,255,0.7)"}},
            "text": [str(span.action.microbatch) for span in some] if numbered else None,
            "textposition": "inside", "insidetextanchor": "middle", "textangle": 0,
            "insidetextfont": {"color": "#ffffff", "size": 10},
            "customdata": [_describe_action(one.action, one.end_s - one.begin_s) for one in some],
            "hovertemplate": "%{customdata}<extra></extra>",
        })  # fmt: skip
        legend.add(words)
    return found


def _describe_action(action: Action, took_s: float) -> str:
    return (
        f"{_ACTIONS[action.kind]} of micro-batch {action.microbatch} on stage {action.stage}: "
        f"{show_seconds(took_s)}"
    )


def bubbles(
    plan: Plan, by_name: Mapping[str, Timeline], parts: Sequence[TimeParts]
) -> DataTable:  # fmt: skip
    """Tabulate the share of time in which ranks wait for the pipeline.

    The table has the simulated shares, the share by the schedule's published formula, and the
    shares that ranks measured.
    """
    rows: list[tuple[str, Number]] = [
        (f"{name}: all ranks, of a pass", _share(one.idle_share)) for name, one in by_name.items()
    ]
    formula = idle_share_formula(plan.schedule, plan.pp, plan.pp_microbatches, plan.stages_per_rank)
    if formula is not None:
        rows.append(("by formula, for equal stages", _share(formula)))
    for rank, one in enumerate(parts):
        passes_s = one.forward_s + one.backward_s + one.communication_s
        if passes_s:
            rows.append((f"measured: rank {rank} waits or communicates", _share(
                one.communication_s / passes_s
            )))  # fmt: skip
    return DataTable("Share of time in which ranks wait", ("", "share"), tuple(rows))


def _share(value: float) -> Number:
    return Number(value, show_share(value))
