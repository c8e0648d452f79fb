"""Report of plans: the recommended plan with its reason, the uncertainty, and rejected plans."""

from collections.abc import Iterable

from outpace.records.errors import BadInputError
from outpace.records.estimate import Plans, RankedPlan
from outpace.records.units import show_bytes, show_count, show_seconds, show_share
from outpace.reporting.answers.plan import (
    case_lines,
    common_obstacle,
    plans_head,
    ranking,
    rejections,
    ties,
)
from outpace.reporting.charts.figures import bars, join_items, seconds
from outpace.reporting.render.document import (
    Chart,
    DataTable,
    Document,
    DocumentSection,
    Items,
    Paragraph,
    Part,
    pairs,
)
from outpace.reporting.sections import memory_anatomy, pipeline
from outpace.reporting.sections.environment import command
from outpace.reporting.sections.estimate import parts_bars


def plan_document(answer: Plans) -> Document:
    """Create the report on the plans that the planner recommends, and those that it rejected."""
    first = answer.plans[0]
    sections = [
        DocumentSection("How they compare", (_times_chart(answer), *ranking(answer))),
        DocumentSection("Where the time goes", (parts_bars(
            "Parts of a step", {_list_title(answer, one): one.estimate for one in answer.plans}
        ),)),
        DocumentSection("Memory", memory_anatomy.at_the_peak(
            {_list_title(answer, one): one.estimate.memory for one in answer.plans},
            first.estimate.memory_bytes,
        )),
        *_pipeline_sections(answer),
        *_nearest_steps_sections(first),
        DocumentSection("Rejected plans", tuple(_rejection_parts(answer))),
        DocumentSection("Links and machine", tuple(_machine_parts(answer))),
    ]  # fmt: skip
    return Document("plan", f"{answer.model} on {answer.machine}", tuple(_verdict(answer)),
                    tuple(_facts(answer)), tuple(sections))  # fmt: skip


def _list_title(answer: Plans, planned: RankedPlan) -> str:
    return f"{answer.plans.index(planned) + 1}. {planned.listed_title}"


def _verdict(answer: Plans) -> list[str]:
    first = answer.plans[0]
    one = first.estimate
    fits = "" if one.fits else " It does NOT fit."
    return [
        f"{first.listed_title}, {show_seconds(one.step_time_s)} per step, "
        f"{show_count(one.rate[0])} {one.rate[1]}.{fits}",
        *common_obstacle(answer.plans),
        *_fastest_sentence(answer),
        f"The true time is between {show_seconds(one.low_s)} and {show_seconds(one.high_s)} with "
        f"{one.level:.0%} probability; nothing was measured here.",
        *ties(answer.plans),
    ]


def _fastest_sentence(answer: Plans) -> list[str]:
    fastest = answer.plan_for("fastest")
    if fastest is None or fastest is answer.plans[0]:
        return []
    return [f"Fastest: {fastest.title}, {show_seconds(fastest.estimate.step_time_s)} per step."]


def _facts(answer: Plans) -> list[tuple[str, str]]:
    one = answer.plans[0].estimate
    found = {
        one.rate[1]: show_count(one.rate[0]),
        "MFU": None if one.mfu is None else show_share(one.mfu),
        "memory of the fullest rank": show_bytes(one.peak_memory_bytes),
        "parameters": show_count(answer.parameters),
        "devices": f"{answer.nodes} × {answer.devices_per_node}",
        "global batch": f"{answer.global_batch:,} × {answer.seq_len:,} tokens"
        if answer.reads_tokens
        else f"{answer.global_batch:,} samples",
        "time to the budget": None if one.time_s is None else show_seconds(one.time_s),
        "cost": None if one.cost is None else f"{one.cost:,.0f}",
    }
    return [(name, value) for name, value in found.items() if value is not None]


def _times_chart(answer: Plans) -> Chart:
    names = [_list_title(answer, one) for one in answer.plans]
    each = [one.estimate for one in answer.plans]
    alt = join_items([
        f"{name}: {show_seconds(one.step_time_s)} ({show_seconds(one.low_s)} to "
        f"{show_seconds(one.high_s)})"
        for name, one in zip(names, each, strict=True)
    ])  # fmt: skip
    return bars(
        f"Time of a step, with the interval of {each[0].level:.0%}", alt, names,
        [one.step_time_s for one in each], seconds([one.high_s for one in each]),
        "time of a step", [(one.low_s, one.high_s) for one in each],
    )  # fmt: skip


def _pipeline_sections(answer: Plans) -> list[DocumentSection]:
    pipelines = [one for one in answer.plans if one.plan.pp > 1]
    if not pipelines:
        return []
    chosen = min(pipelines, key=lambda one: one.estimate.step_time_s)
    plan = chosen.plan
    times = pipeline.equal_stages(plan, chosen.estimate, answer.global_batch)
    try:
        shown = {"planned": pipeline.simulate_schedule(plan, times)}
    except BadInputError as error:
        return [
            DocumentSection("Pipeline", (Paragraph(f"This schedule cannot be drawn: {error}."),))
        ]
    bubble = chosen.estimate.parts_s.get("bubble_s", 0.0) / chosen.estimate.step_time_s
    about = (
        f"One pass of {_list_title(answer, chosen)}, with equal stages whose forward takes a "
        "third of the time. In the estimate, with the actual stages, the bubble is "
        f"{show_share(bubble)} of the step. Nothing was measured."
    )
    figure = pipeline.timelines("The pipeline's timeline: gaps are its bubbles", shown)
    return [
        DocumentSection("Pipeline", (Paragraph(about), figure, pipeline.bubbles(plan, shown, ())))
    ]


def _nearest_steps_sections(first: RankedPlan) -> list[DocumentSection]:
    lines = case_lines(first.cases)
    items = Items(tuple(("•", line) for line in lines))
    return [DocumentSection("Nearest published steps", (items,))] if lines else []


def _rejection_parts(answer: Plans) -> Iterable[Part]:
    yield from rejections(answer)
    if not answer.rejected:
        yield Paragraph("One plan of every family is listed.")


def _machine_parts(answer: Plans) -> Iterable[Part]:
    yield Paragraph(plans_head(answer))
    rows = tuple(
        (_list_title(answer, one), axis, link)
        for one in answer.plans
        for axis, link in one.placement.items()
    )
    if rows:
        yield DataTable("The link that each axis uses", ("plan", "axis", "link"), rows)
    sources = {"probed": "a probe of the machine", "catalog": "the catalog",
               "guessed": "a guess; outpace probe measures them"}  # fmt: skip
    yield pairs("The answer", [
        ("rates from", sources[answer.source]), ("plans considered", f"{answer.considered:,}"),
        ("took", show_seconds(answer.took_s)), ("nodes left idle", str(answer.idle_nodes)),
    ])  # fmt: skip
    for note in answer.notes:
        yield Paragraph(note)
    if answer.source != "probed":
        yield command("The request, without fixed and varied settings", (
            "outpace", "plan", "--model", answer.model, "--machine", answer.machine,
            "--nodes", str(answer.nodes), "--seq-len", str(answer.seq_len),
            "--global-batch", str(answer.global_batch),
        ))  # fmt: skip
