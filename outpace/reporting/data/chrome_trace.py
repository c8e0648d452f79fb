"""Timeline of a pipeline's ranks, from the Chrome traces that `--profile` writes."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from outpace.planner.pipeline.simulator import Action, Span, Timeline
from outpace.records.pipelines import Kind, traced_action
from outpace.records.plan import Plan
from outpace.records.units import show_bytes
from outpace.reporting.charts.figures import join_items

_LARGEST_BYTES = 256 << 20  # limit on the size of all traces together
_STEP = "ProfilerStep#"


@dataclass(frozen=True)
class _TracedAction:
    """An action that a rank traced, with times in seconds of its profiler's clock."""

    kind: Kind
    stage: int
    begin_s: float
    end_s: float


def measured_timeline(folder: Path, plan: Plan, global_batch: int) -> Timeline | str:
    """Return when each rank of the first pipeline computed, or a sentence on why this is unknown.

    The times are those of the last forwards and backwards in the traces of `--profile`. Ranks on
    several hosts are aligned only as well as the hosts' clocks.
    """
    across = (plan.world_size - plan.servers) // plan.pp
    paths = [folder / f"trace-rank{place * across}.json" for place in range(plan.pp)]
    missing = [path.name for path in paths if not path.is_file()]
    if len(missing) == len(paths):
        return "Without --profile, the times of actions are not recorded."
    if missing:
        return f"These traces of --profile are not in this folder: {join_items(missing)}"
    size = sum(path.stat().st_size for path in paths)
    if size > _LARGEST_BYTES:
        return (
            f"The traces of --profile are {show_bytes(size)} in size; more than "
            f"{show_bytes(_LARGEST_BYTES)} are not read."
        )
    accumulation = plan.accumulation(global_batch)
    ranks = [_read_last_pass(path, accumulation) for path in paths]
    cut = [path.name for path, done in zip(paths, ranks, strict=True) if not done]
    if cut:
        return f"These traces contain no complete step, as after a killed run: {join_items(cut)}"
    begin_s = min(done.begin_s for done_by in ranks for done in done_by)
    return Timeline(
        tuple(_number_microbatches(done_by, begin_s, plan.pp_microbatches) for done_by in ranks)
    )


def _read_last_pass(path: Path, accumulation: int) -> list[_TracedAction]:
    """Return a rank's actions in the last pipeline pass of its trace, in order.

    The list is empty if the trace has no actions, or is incomplete because the run was killed.
    """
    try:
        document = from_json(path.read_bytes())
        events, base_s = (
            document["traceEvents"],
            float(document.get("baseTimeNanoseconds", 0)) / 1e9,
        )
        done = [one for event in events if (one := _read_action(event, base_s)) is not None]
        steps = len({event["name"] for event in events
                     if str(event.get("name", "")).startswith(_STEP)})  # fmt: skip
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return []  # truncated by a killed run
    if not done or not steps:
        return []
    # On a GPU, annotations on the GPU's clock show when work ran, not when it was launched.
    category = "gpu_user_annotation" if any(c == "gpu_user_annotation" for c, _ in done) else None
    own = [one for c, one in done if category in (None, c)]
    own.sort(key=lambda one: one.begin_s)
    count = len(own) // (steps * accumulation)
    return own[-count:] if count else []


def _read_action(event: Any, base_s: float) -> tuple[str, _TracedAction] | None:
    if event.get("ph") != "X" or "annotation" not in str(event.get("cat")):
        return None
    found = traced_action(str(event.get("name")))
    if found is None:
        return None
    begin_s = base_s + float(event["ts"]) / 1e6
    kind, stage = found
    return str(event["cat"]), _TracedAction(
        kind, stage, begin_s, begin_s + float(event["dur"]) / 1e6
    )


def _number_microbatches(
    actions: list[_TracedAction], begin_s: float, microbatches: int
) -> tuple[Span, ...]:
    """Convert traced actions to spans, with micro-batch numbers, which the trace does not contain.

    Micro-batches are assumed to pass through each stage in order.
    """
    seen: Counter[tuple[str, int]] = Counter()
    spans = []
    for one in actions:
        number = seen[one.kind, one.stage] % microbatches
        seen[one.kind, one.stage] += 1
        action = Action(one.kind, one.stage, number)
        spans.append(Span(action, one.begin_s - begin_s, one.end_s - begin_s))
    return tuple(spans)
