"""The report of a run."""

from collections.abc import Mapping

import numpy as np

from outpace.planner.pipeline.simulator import Timeline
from outpace.records.estimate import Estimate
from outpace.records.machine import Machine
from outpace.records.measurement import Measurement, StepTimeCheck, TimeParts
from outpace.records.units import show_bytes, show_count, show_seconds, show_share
from outpace.reporting.charts.figures import counts, prediction_bars, seconds, sizes
from outpace.reporting.data import chrome_trace
from outpace.reporting.data.prediction import Prediction, predict
from outpace.reporting.data.run_folder import RunFolder
from outpace.reporting.documents import certificate
from outpace.reporting.render.document import (
    Code,
    DataTable,
    Document,
    DocumentSection,
    Number,
    Paragraph,
    Part,
)
from outpace.reporting.sections import (
    curves,
    memory_anatomy,
    pipeline,
    runs,
    step_breakdown,
    utilisation,
)
from outpace.reporting.sections.environment import run_environment, topology
from outpace.reporting.sections.estimate import parts_bars
from outpace.reporting.terminal.summary import runtime_name
from outpace.training.run_dir import METRICS_FILE

# An interval that is wider, of a machine that was never measured, confirms any time.
_WIDEST = 4.0


def run_document(run: RunFolder, probe: Machine | None = None) -> Document:
    """Show what a run did, where its time and memory went, and how that was predicted."""
    said = predict(run.record, run.hosts, probe)
    sections = [_losses(run), _time(run)]
    if run.record.plan.pp > 1:
        sections.append(_pipeline(run, said))
    sections += [
        _memory(run, said),
        _prediction_section(run, said),
        _utilisation(run),
        topology(run.record.machine, probe),
    ]
    if run.certificate is not None:
        sections.append(certificate.section(run.certificate))
    if run.measurement is not None and run.measurement.sample:
        sections.append(
            DocumentSection("Sample", (Code("What the model wrote", run.measurement.sample),))
        )
    return Document(
        "run", f"{run.record.settings.model}: {run.name}", tuple(_verdict(run, said)),
        tuple(_facts(run)), (*sections, run_environment(run.record)),
    )  # fmt: skip


def _verdict(run: RunFolder, said: Prediction | str) -> list[str]:
    changed = [f"{sentence}, so do not rely on what it says." for sentence in run.changed]
    return [_outcome(run), *_failure_sentences(run), *_speed(run), *_right(run, said), *changed]


def _outcome(run: RunFolder) -> str:
    """Whether it came to its end, and what it learnt."""
    record, done = run.record, int(run.steps["step"][-1]) if len(run.steps) else 0
    ranks = record.plan.world_size
    what = f"{show_count(record.parameters)} parameters on {ranks} × {record.device}"
    if not done and run.measurement is not None:
        return f"{run.measurement.steps:,} steps, {what}; {METRICS_FILE} holds none of them."
    if not done:
        return f"No step {'is done yet' if run.state == 'going on' else 'was done'}: {what}."
    first, last = float(run.steps["loss"][0]), float(run.steps["loss"][-1])
    learnt = f"loss {first:.4f} → {last:.4f}"
    if len(run.evaluations) > 1:
        one, other = run.evaluations[0], run.evaluations[-1]
        learnt = f"held-out loss {one.loss:.4f} → {other.loss:.4f}"
    if run.measurement is not None:
        return f"{done:,} steps, {what}: {learnt}."
    begin = "In progress" if run.state == "going on" else "Not finished"
    if done >= record.total_steps and run.state != "going on":
        begin = "Without a result of its end"
    return f"{begin}: {done:,} of {record.total_steps:,} steps, {what}; {learnt}."


def _failure_sentences(run: RunFolder) -> list[str]:
    """Say why a run that no process of this host trains ended early, as far as it is known."""
    if run.state != "unfinished":
        return []
    if run.failure is not None:
        return [f"It ended early: {run.failure.reason}"]
    return ["No process of this host trains it, and why it ended is not written down."]


def _speed(run: RunFolder) -> list[str]:
    step_time_s, parts = step_time(run), median_parts(run)
    if step_time_s is None or parts is None:
        return []
    share = show_share(parts.computing_s / (parts.total_s or 1.0))
    rest = {"communication": parts.communication_s, "waiting for data": parts.data_s,
            "other work": parts.other_s}  # fmt: skip
    what, most_s = max(rest.items(), key=lambda pair: pair[1])
    lost = f"; most of the rest is {what}, {show_share(most_s / (parts.total_s or 1.0))}"
    tokens = tokens_per_s(run)
    speed = f"{show_seconds(step_time_s)} a step"
    if tokens is not None:
        speed = f"{show_count(tokens)} tokens/s, {speed}"
    return [f"{speed}: {share} of it computing{lost if most_s > 0.01 * parts.total_s else ''}."]


def _expected_step_time(run: RunFolder) -> StepTimeCheck | None:
    """Return the check of the step time against what was expected by earlier measurements."""
    return None if run.measurement is None else run.measurement.step_time_check


def _right(run: RunFolder, said: Prediction | str) -> list[str]:
    """One prediction: what was measured before the run, else the planner's where it says enough."""
    check, step_time_s = _expected_step_time(run), step_time(run)
    if check is not None:
        return [f"{check.verdict}: {check.words}."]
    if isinstance(said, str) or step_time_s is None:
        return []
    one = said.planned.estimate
    if one.high_s > _WIDEST * one.low_s:
        return []
    inside = one.low_s <= step_time_s <= one.high_s
    return [
        f"The planner says {show_seconds(one.step_time_s)} a step, {show_seconds(one.low_s)} to "
        f"{show_seconds(one.high_s)} with {one.level:.0%}: what was measured lies "
        f"{'within' if inside else 'outside'}."
    ]


def _facts(run: RunFolder) -> list[tuple[str, str]]:
    measured, tokens, skipped = run.measurement, tokens_per_s(run), skipped_steps(run)
    check = _expected_step_time(run)
    found = {
        "throughput": None if tokens is None else f"{show_count(tokens)} tokens/s",
        "time of a step": None if step_time(run) is None else show_seconds(step_time(run)),
        "steps": f"{len(run.steps):,} of {run.record.total_steps:,}",
        "skipped steps": f"{skipped:,}, for overflow in fp16" if skipped else None,
        "MFU": None if measured is None or measured.mfu is None else show_share(measured.mfu),
        "model FLOP/s": None
        if measured is None or measured.model_flops_per_s is None
        else show_count(measured.model_flops_per_s, "FLOP/s"),
        "expected time of a step": None if check is None else show_seconds(check.expected_s),
        "measured to expected": None if check is None else f"{check.ratio - 1:+.1%}",
        "peak memory": None if peak_memory(run) is None else show_bytes(peak_memory(run)),
        "layout": run.record.plan.mesh,
        "precision": run.record.plan.precision,
        **(
            {}
            if measured is None
            else {runtime_name(measured): show_seconds(measured.train_runtime)}
        ),
        "until the first step": first_step_words(measured),
    }
    return [(name, value) for name, value in found.items() if value]


def first_step_words(measured: Measurement | None) -> str | None:
    """Return the time until the end of the first step; None where that is not known."""
    if measured is None or measured.first_step_s is None:
        return None
    compiling = f", of which {show_seconds(measured.compile_s)} compiling"
    return show_seconds(measured.first_step_s) + (compiling if measured.compile_s else "")


def step_time(run: RunFolder) -> float | None:
    """Return the median step time, seconds; of an unfinished run, so far."""
    if run.measurement is not None:
        return run.measurement.step_time_s
    return _median(run, "step_time_s")


def tokens_per_s(run: RunFolder) -> float | None:
    """All ranks together."""
    return run.measurement.tokens_per_s if run.measurement else _median(run, "tokens_per_s")


def median_parts(run: RunFolder) -> TimeParts | None:
    """Return the median parts of a step on rank 0; None where no step was recorded."""
    if run.measurement is not None:
        return run.measurement.parts if run.measurement.parts.total_s else None
    found = {name: _median(run, name) for name in TimeParts.model_fields}
    if not len(run.steps):
        return None
    return TimeParts(**{name: value or 0.0 for name, value in found.items()})


def peak_memory(run: RunFolder) -> int | None:
    """Return the peak memory of the fullest rank, bytes."""
    if run.measurement is not None:
        return run.measurement.peak_memory_bytes
    return _last(run, "peak_memory_bytes")


def skipped_steps(run: RunFolder) -> int | None:
    """Return the number of steps skipped for overflow in fp16."""
    return run.measurement.skipped_steps if run.measurement else _last(run, "skipped_steps")


def _last(run: RunFolder, name: str) -> int | None:
    known = run.steps[name][np.isfinite(run.steps[name])]
    return int(known[-1]) if len(known) else None


def _median(run: RunFolder, name: str) -> float | None:
    values = run.steps.steady(name)
    values = values[np.isfinite(values)]
    return float(np.median(values)) if len(values) else None


def _losses(run: RunFolder) -> DocumentSection:
    if not len(run.steps):
        return DocumentSection("Loss", (Paragraph("No step was recorded."),))
    parts: list[Part] = [curves.losses(run.steps, run.evaluations), curves.norms(run.steps)]
    if run.evaluations:
        rows = tuple(
            (Number(one.step, f"{one.step:,}"), Number(one.loss, f"{one.loss:.4f}"),
             Number(one.perplexity, f"{one.perplexity:,.4g}"),
             ", ".join(f"{name} {value:.4f}" for name, value in one.metrics.items()))
            for one in run.evaluations
        )  # fmt: skip
        columns = ("after step", "loss", "perplexity", "metrics")
        parts.append(DataTable("On held-out data", columns, rows))
    return DocumentSection("Loss", tuple(parts))


def _time(run: RunFolder) -> DocumentSection:
    title = "Time of a step"
    if not len(run.steps):
        return DocumentSection(title, (Paragraph("No step was recorded."),))
    ranks = run.measurement.parts_by_rank if run.measurement is not None else ()
    own = median_parts(run)
    parts: list[Part] = []
    if ranks:
        parts.append(step_breakdown.by_rank(ranks))
    elif own is not None:
        parts.append(step_breakdown.parts_figure("Time of a step by part", {"rank 0": own}))
        if run.record.plan.world_size > 1:
            parts.append(Paragraph("This run recorded the times of rank 0 alone."))
    return DocumentSection(
        title, (*parts, step_breakdown.spread(run.steps), curves.step_times(run.steps))
    )


def _pipeline(run: RunFolder, said: Prediction | str) -> DocumentSection:
    plan, batch = run.record.plan, run.record.settings.global_batch
    shown, notes = {}, []
    if isinstance(said, str):
        notes.append(f"There is no plan to compare with. {said}")
    elif said.stages is not None:
        shown["planned"] = pipeline.simulate_schedule(
            plan, said.stages.times, said.stages.transfer_s
        )
    ranks = run.measurement.parts_by_rank if run.measurement is not None else ()
    seen = chrome_trace.measured_timeline(run.path, plan, batch)
    times = pipeline.measured_stages(plan, ranks, batch)
    if isinstance(seen, Timeline):
        shown["measured"] = seen
        notes.append("Measured: the last pass that --profile traced, by each rank's own clock.")
    elif times is not None:
        shown["replayed"] = pipeline.simulate_schedule(plan, times)
        notes.append(
            f"{seen} Replayed is the same schedule with the times that each rank's forwards and "
            "backwards took."
        )
    else:
        notes.append(f"{seen} How long actions took on each rank is not in this run, either.")
    parts: list[Part] = []
    if shown:
        parts.append(pipeline.timelines("The pipeline's timeline: gaps are its bubbles", shown))
        parts.append(pipeline.bubbles(plan, shown, ranks))
    return DocumentSection("Pipeline", (*parts, *map(Paragraph, notes)))


def _memory(run: RunFolder, said: Prediction | str) -> DocumentSection:
    parts: list[Part] = []
    at_peak: dict[str, Mapping[str, int]] = {}
    limit = None
    if not isinstance(said, str):
        at_peak["estimated"] = said.planned.estimate.memory
        limit = said.planned.estimate.memory_bytes
    if run.memory is not None:
        at_peak |= memory_anatomy.peak_by_source(run.memory)
        account = run.memory.measured or run.memory.traced
        if account is not None and account.timeline:
            parts.append(memory_anatomy.over_a_step(account))
    if at_peak:
        parts.append(memory_anatomy.at_the_peak(at_peak, limit))
    peak = peak_memory(run)
    if peak is not None:
        parts.append(Paragraph(_whole(peak, run.record.device)))
    if run.measurement is not None:
        parts += runs.memory_by_rank({"": run.measurement.peak_memory_by_rank})
    if run.memory is None:
        parts.append(Paragraph(
            "What lay in memory over a step is not recorded: outpace train --memory does."
        ))  # fmt: skip
    return DocumentSection("Memory", tuple(parts))


def _whole(peak: float, device: str) -> str:
    """The peak of what a rank took in all, and what that has besides tensors."""
    if device == "cpu":
        return (
            f"The fullest rank's process took {show_bytes(peak)} in all: Python and its libraries "
            "are in it, which an estimate of tensors does not have."
        )
    return f"The fullest rank's allocator took {show_bytes(peak)} in all."


def _prediction_section(run: RunFolder, said: Prediction | str) -> DocumentSection:
    title, check = "Predicted against measured", _expected_step_time(run)
    if check is not None:
        unit = seconds([check.expected_s, check.compared_s])
        both = [check.expected_s], [check.compared_s]
        figure = prediction_bars("Time of a step", ["Time of a step"], *both, unit, "time")
        return DocumentSection(
            title, (Paragraph(f"By what was measured before: {check.words}."), figure)
        )
    if isinstance(said, str):
        return DocumentSection(title, (Paragraph(f"There is no prediction. {said}"),))
    one = said.planned.estimate
    bars = parts_bars("Where the planner says that the time goes", {"predicted": one})
    return DocumentSection(title, (Paragraph(said.basis), *_prediction_figures(one, run), bars))


def _prediction_figures(one: Estimate, run: RunFolder) -> list[Part]:
    """The planner's figures and the run's, each kind on an axis of its own."""
    took_s, tokens = step_time(run), tokens_per_s(run)
    parts: list[Part] = []
    if took_s is not None:
        title, unit = "Time of a step", seconds([one.high_s, took_s])
        parts.append(prediction_bars(
            title, [title], [one.step_time_s], [took_s], unit, "time", [(one.low_s, one.high_s)]
        ))  # fmt: skip
    if tokens is not None:
        title, unit = "Throughput", counts("tokens/s")
        parts.append(prediction_bars(title, [title], [one.tokens_per_s], [tokens], unit, "rate"))
    return [*parts, *_memory_beside(float(one.peak_memory_bytes), run)]


def _memory_beside(predicted: float, run: RunFolder) -> list[Part]:
    """A GPU's peak is of its allocator; a CPU's of the process, which has more than tensors."""
    measured, title = peak_memory(run), "Peak memory"
    if run.record.device == "cpu":
        account = run.memory.measured if run.memory is not None else None
        if account is None:
            return [Paragraph(
                "Memory is not compared: on a CPU a run records that of the whole process, and the "
                "planner says that of tensors. outpace train --memory records both."
            )]  # fmt: skip
        measured, title = account.allocated_bytes or account.peak_memory_bytes, "Peak of tensors"
    if measured is None:
        return []
    both = predicted, float(measured)
    return [prediction_bars(title, [title], both[:1], both[1:], sizes(both), "memory")]


def _utilisation(run: RunFolder) -> DocumentSection:
    figures: list[Part] = [*utilisation.utilisation(run.utilisation)]
    if run.measurement is not None and run.measurement.utilisation:
        figures.append(utilisation.averages_table(run.measurement.utilisation))
    if not figures:
        figures.append(Paragraph("How busy devices were is not recorded in this run."))
    return DocumentSection("Utilisation", tuple(figures))
