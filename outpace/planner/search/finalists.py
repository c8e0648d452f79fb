"""Simulation of the finalists' pipelines, event by event, with their unequal stages.

The closed forms that rank all plans assume average or slowest stages; the simulation computes the
actual waits. The difference is added to the bubble.
"""

from dataclasses import fields

import numpy as np

from outpace.planner.pipeline.schedules import schedule_graph
from outpace.planner.plan_columns import SCHEDULE_NAMES, Ints, PlanBatch
from outpace.planner.step_time.estimate import StepTimes, stages_of
from outpace.planner.step_time.setup import StepTimeQuestion

# The components of a pipeline's passes.
_PASSES = (
    "products_s", "attention_s", "memory_s", "host_s", "bubble_s", "tensor_s", "pipeline_s",
)  # fmt: skip
_MOST_ACTIONS = 400_000  # limit for a simulation; with more, there is almost no bubble


def simulate_pipelines(
    question: StepTimeQuestion, columns: PlanBatch, times: StepTimes, places: Ints
) -> StepTimes:
    """Return `times` with simulated times for the pipelines at `places`."""
    found = {f.name: getattr(times, f.name).copy() for f in fields(StepTimes)}
    for place in places:
        row = columns.select([int(place)])
        if row.pp[0] == 1 or row.schedule_in("mp")[0] or _count_actions(row) > _MOST_ACTIONS:
            continue
        pipeline = stages_of(question, row)
        table = schedule_graph(
            SCHEDULE_NAMES[row.schedule[0]], int(row.pp[0]), int(row.microbatches[0]),
            int(row.stages_per_rank[0]),
        )  # fmt: skip
        passes = float(row.passes[0])
        whole = table.makespan_s(pipeline.times, pipeline.transfer_s) / question.device.sharers
        # Ranks that share a core run faster while others wait, but in total do the work of all.
        work = sum(one.seconds("F") + one.seconds("B") for one in pipeline.times) / int(row.pp[0])
        busy = float(row.microbatches[0]) * work
        whole = passes * (max(whole, busy) + pipeline.posted_s)
        known = {name: float(found[name][place]) for name in _PASSES}
        waits = whole - sum(known.values()) + known["bubble_s"] + known["pipeline_s"]
        sends = min(known["pipeline_s"], max(waits, 0.0))
        found["pipeline_s"][place] = sends
        found["bubble_s"][place] = max(waits - sends, 0.0)
        if waits < 0:  # the estimate assumed all stages to be as slow as the slowest
            found["host_s"][place] = max(known["host_s"] + waits, 0.0)
    return StepTimes(**found)


def _count_actions(row: PlanBatch) -> int:
    return int(3 * row.pp[0] * row.stages_per_rank[0] * row.microbatches[0])


def order(times: StepTimes, places: Ints) -> Ints:
    """Return `places` sorted by step time, fastest first."""
    return places[np.argsort(times.step_s[places], kind="stable")]
