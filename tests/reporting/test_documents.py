"""What each kind of report says, of real runs, comparisons, plans and probes."""

import io
import json
import os
import random
import shutil
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from rich.console import Console

from outpace.planner.pipeline.simulator import StageTime
from outpace.records.comparison import Comparison
from outpace.records.estimate import Plans
from outpace.records.machine import Device, Machine
from outpace.records.measurement import Measurement, StepTimeCheck
from outpace.records.plan import Plan
from outpace.records.topology import Endpoint, Topology
from outpace.records.tuning import Tuning
from outpace.records.units import show_seconds
from outpace.records.utilisation import HostLoad, Load
from outpace.reporting.answers.tuning import tuning_answer
from outpace.reporting.data import chrome_trace as trace
from outpace.reporting.data.prediction import predict
from outpace.reporting.data.run_folder import read_run
from outpace.reporting.documents.certificate import certificate_document
from outpace.reporting.documents.comparison import comparison_document
from outpace.reporting.documents.plan import plan_document
from outpace.reporting.documents.probe import probe_document
from outpace.reporting.documents.run import run_document
from outpace.reporting.documents.tuning import tuning_document
from outpace.reporting.page import page
from outpace.reporting.render.document import (
    Chart,
    DataTable,
    Items,
    Number,
    Paragraph,
    Picture,
    cell_text,
)
from outpace.reporting.sections import pipeline
from outpace.reporting.sections.environment import topology
from outpace.reporting.terminal.answer import answer_text
from outpace.training.run_dir import RunDir


def parts(document, kind):
    return [part for section in document.sections for part in section.parts
            if isinstance(part, kind)]  # fmt: skip


def section(document, title):
    (found,) = [one for one in document.sections if one.title == title]
    return found.parts


def words(document):
    return " ".join(part.text for part in parts(document, Paragraph))


def figure(document, start):
    return next(one for one in parts(document, Chart) if one.title.startswith(start))


def cells(table):
    return [[cell_text(cell) for cell in row] for row in table.rows]


@pytest.fixture(scope="module")
def of_run(run):
    return run_document(read_run(run))


@pytest.fixture(scope="module")
def of_pipeline(pipeline_run):
    return run_document(read_run(pipeline_run))


def test_a_run_has_a_verdict_first_and_every_section(of_run):
    assert of_run.verdict[0].startswith("8 steps, ")
    assert "held-out loss" in of_run.verdict[0]
    assert "tokens/s" in of_run.verdict[1] and "of it in forwards" in of_run.verdict[1]
    titles = [one.title for one in of_run.sections]
    assert titles == ["Loss", "Time of a step", "Memory", "Predicted against measured",
                      "Utilisation", "Topology", "Sample", "Environment and command"]  # fmt: skip
    assert dict(of_run.facts)["steps"] == "8 of 8"


def test_a_run_cites_one_prediction_which_is_what_was_measured_before_it(run):
    found = read_run(run)
    check = StepTimeCheck(expected_s=0.53, step_time_s=0.47, steps=100, kept=False)
    measured = found.measurement.model_copy(update={"step_time_check": check})
    document = run_document(replace(found, measurement=measured))
    sentence = "Faster than expected: the first 100 steps took 470.0 ms (median); 530.0 ms was"
    assert any(line.startswith(sentence) for line in document.verdict)
    assert "planner predicts" not in " ".join([*document.verdict, words(document)])
    assert dict(document.facts)["measured to expected"] == "-11.3%"


def test_a_guess_that_most_times_confirm_is_no_verdict_but_where_it_fails(run):
    """This machine was not probed: the interval is of a factor of some ten."""
    found = read_run(run)
    interval = predict(found.record, found.hosts, None).planned.estimate
    for seconds, outside in ((interval.step_time_s, False), (2 * interval.high_s, True)):
        measured = found.measurement.model_copy(update={"step_time_s": seconds})
        verdict = run_document(replace(found, measurement=measured)).verdict
        said = [line for line in verdict if "planner predicts" in line]
        assert ["the measurement is outside that range." in line for line in said] == [
            True
        ] * outside


def test_cores_that_other_programs_had_are_in_the_verdict(run):
    found = read_run(run)
    for run_cores, told in ((0.4, True), (1.9, False)):
        load = Load(duration_s=9.0, host=HostLoad(cores=(1.0, 1.0), run_cores=run_cores))
        measured = found.measurement.model_copy(update={"utilisation": (load,)})
        verdict = run_document(replace(found, measurement=measured)).verdict
        sentence = "Other programs kept 1.6 of the 2 cores busy meanwhile, so steps took longer"
        assert any(line.startswith(sentence) for line in verdict) is told
        slow = measured.model_copy(update={"step_time_s": 1e3})
        *_, last = run_document(replace(found, measurement=slow)).verdict
        assert ("outside that range. Predictions assume that no other program" in last) is told


def test_times_of_a_resumed_run_are_named_by_its_last_part(run, of_run):
    assert "time to step 1" in dict(of_run.facts)
    found = read_run(run)
    measured = found.measurement.model_copy(update={"start_step": 4})
    changed = found.record.model_copy(update={"resumes": ({"step": 4, "changed": ["plan"]},)})
    resumed = run_document(replace(found, measurement=measured, record=changed))
    assert {"time to step 5", "training since step 4"} <= {name for name, _ in resumed.facts}
    assert " a step since it was resumed after step 4: " in resumed.verdict[1]


def resumed_as_it_was(run, step):
    """A run whose result has a step of 1000 s and a token each second after `step` of 8 steps."""
    found = read_run(run)
    record = found.record.model_copy(update={"resumes": ({"step": step, "changed": []},)})
    last = {"start_step": step, "step_time_s": 1e3, "tokens_per_s": 1.0}
    return replace(found, record=record, measurement=found.measurement.model_copy(update=last))


def test_speed_of_a_run_resumed_as_it_was_is_that_of_its_result(run):
    """The training's summary and `outpace runs` show the steps after the last resume, too."""
    resumed = resumed_as_it_was(run, 4)
    assert list(resumed.timed_steps["step"]) == [5, 6, 7, 8]
    document = run_document(resumed)
    facts = dict(document.facts)
    assert facts["median step"] == show_seconds(1e3)
    assert facts["median throughput"].split() == ["1", "tokens/s"]
    assert " a step since it was resumed after step 4: " in document.verdict[1]


def test_speed_of_a_run_with_only_warm_up_since_its_resume_is_that_of_all_its_steps(run):
    resumed = resumed_as_it_was(run, 6)
    of_all = run_document(resumed)
    middle_s = float(np.median(resumed.timed_steps.steady("step_time_s")))
    assert list(resumed.timed_steps["step"])[:6] == [1, 2, 3, 4, 5, 6]
    facts = dict(of_all.facts)
    assert facts["median step"] == show_seconds(middle_s) != show_seconds(1e3)
    assert facts["median throughput"].split()[0] != "1" and "since it" not in of_all.verdict[1]


def test_a_report_has_one_median_step_and_one_set_of_its_parts(run, of_run):
    parts_of = section(of_run, "Time of a step")
    (every,) = (one for one in parts_of if getattr(one, "title", "") == "Time of every step")
    assert f"median {dict(of_run.facts)['median step']};" in every.alt
    (each,) = (one for one in parts_of if getattr(one, "title", "").startswith("Each part"))
    own = read_run(run).measurement.parts
    for part in ("forward", "backward", "optimizer"):
        assert f"{part}: {show_seconds(getattr(own, f'{part}_s'))}, 90 %" in each.alt


def test_the_layout_is_named_by_strategy_and_axes(run, of_run):
    assert dict(of_run.facts)["layout"] == "single"
    found = read_run(run)
    plan = Plan(strategy="hsdp", dp_replicate=2, dp_shard=2)
    document = run_document(replace(found, record=found.record.model_copy(update={"plan": plan})))
    assert dict(document.facts)["layout"] == "hsdp (dp_replicate 2 × dp_shard 2)"


def test_held_out_data_have_a_column_of_metrics_where_there_are_some(run, of_run):
    held_out = next(one for one in section(of_run, "Loss") if isinstance(one, DataTable))
    assert held_out.columns == ("after step", "loss", "perplexity")
    found = read_run(run)
    classified = found.evaluations[0].model_copy(update={"metrics": {"accuracy": 0.5}})
    document = run_document(replace(found, evaluations=(classified,)))
    table = next(one for one in section(document, "Loss") if isinstance(one, DataTable))
    assert table.columns[-1] == "metrics" and table.rows[0][-1] == "accuracy 0.5000"


def test_an_unknown_perplexity_is_not_available_beside_known_ones(run):
    found = read_run(run)
    unknown = found.evaluations[0].model_copy(update={"perplexity": None})
    for evaluations, columns in (((unknown,), 2), ((unknown, found.evaluations[-1]), 3)):
        document = run_document(replace(found, evaluations=evaluations))
        table = next(one for one in section(document, "Loss") if isinstance(one, DataTable))
        assert len(table.columns) == columns
    assert table.rows[0][2].text == "n/a"


def test_losses_can_be_seen_by_step_tokens_and_time(of_run):
    loss = figure(of_run, "Loss")
    assert [one.label for one in loss.choices] == ["step", "tokens", "time"]
    names = [trace["name"] for trace in loss.traces]
    assert names == ["each step", "held-out data"]
    assert all(len(one.values) == 2 for one in loss.choices)
    assert loss.choices[0].values[0] == list(range(1, 9))
    assert loss.choices[1].values[0][-1] == 8 * 8 * 32
    assert loss.choices[0].values[1] == [0, 4, 8]  # before the first step, half-way, at the end


def test_memory_of_a_run_is_over_a_step_and_at_the_peak(of_run, run):
    over = figure(of_run, "Memory over a step, measured")
    assert {"weights", "activations", "optimizer state"} <= {t["name"] for t in over.traces}
    assert figure(of_run, "Memory at the peak").table.rows[1][0] == "traced"
    assert "estimated" in [row[0] for row in figure(of_run, "Memory at the peak").table.rows]
    assert "emporary: allocated and freed within a pass." in words(of_run)


def test_a_run_is_beside_its_prediction(of_run, run, probe):
    beside = figure_in(of_run, "Predicted against measured", "Time of a step")
    measured = Measurement.load(run / "result.json")
    columns = ("", "predicted", "predicted, from", "predicted, to", "measured", "measured is")
    assert beside.table.columns == columns
    _, said, low, high, seen, above = (
        getattr(cell, "value", cell) for cell in beside.table.rows[0]
    )
    assert low < said < high and seen == measured.step_time_s
    assert above == pytest.approx(seen / said - 1)
    assert "guessed from its vector width" in words(of_run)
    better = run_document(read_run(run), Machine.load(probe))
    assert "outpace probe measured" in words(better)
    other = figure_in(better, "Predicted against measured", "Time of a step")
    assert other.table.rows[0][1].value != beside.table.rows[0][1].value


def test_a_run_on_the_processor_is_predicted_as_one_whatever_else_is_there(run):
    """And a probe of another machine predicts nothing."""
    found = read_run(run)
    gpu = Device(name="NVIDIA H100 80GB HBM3", memory_bytes=80 * 2**30)
    machine = found.record.machine.model_copy(update={"devices": (gpu,)})
    beside = replace(found, record=found.record.model_copy(update={"machine": machine}))
    assert "guessed from its vector width" in words(run_document(beside))
    other = machine.model_copy(update={"cpu": "another one"})
    said = words(run_document(beside, other))
    assert "The probe is from another machine: cpu is another one there" in said


def figure_in(document, title, start):
    return next(one for one in section(document, title)
                if isinstance(one, Chart) and one.title.startswith(start))  # fmt: skip


def test_a_run_that_goes_on_is_reported_as_far_as_it_is(run, tmp_path):
    (tmp_path / "run.json").write_text((run / "run.json").read_text())
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join(lines[:3]) + lines[3][:40])
    document = run_document(read_run(tmp_path))
    assert document.verdict[0].startswith("Not finished: 3 of 8 steps")
    assert "No process of this host trains it" in document.verdict[1]
    with (tmp_path / "metrics.jsonl").open("a"):
        assert run_document(read_run(tmp_path)).verdict[0].startswith("In progress: 3 of 8 steps")
    RunDir(tmp_path).end_early("the loss became nan at step 4")
    said = run_document(read_run(tmp_path)).verdict[1]
    assert said == "It ended early: the loss became nan at step 4"
    assert "is not recorded; `outpace train --memory`" in words(document)
    (tmp_path / "metrics.jsonl").unlink()
    assert run_document(read_run(tmp_path)).verdict[0].startswith("No step was done")


def edited(run, place, name, **changes):
    """A copy of a run with values changed in one of its files."""
    shutil.copytree(run, place)
    document = json.loads((place / name).read_text()) | changes
    (place / name).write_text(json.dumps(document))
    return run_document(read_run(place))


def test_a_finished_run_that_goes_further_is_not_finished(run, tmp_path):
    document = edited(run, tmp_path / "run", "run.json", total_steps=16)
    assert document.verdict[0].startswith("Not finished: 8 of 16 steps")
    assert dict(document.facts)["steps"] == "8 of 16" and "training time" not in dict(
        document.facts
    )


def test_the_largest_of_what_is_not_computing_is_named_whatever_it_is(run, tmp_path):
    times = {"forward_s": 0.4, "data_s": 0.1, "communication_s": 0.1, "other_s": 0.4}
    document = edited(run, tmp_path / "run", "result.json", parts=times)
    said = "40.0 % of it in forwards, backwards and the optimizer; most of the rest is other work"
    assert f"{said}, 40.0 %" in document.verdict[1]


def test_a_loss_above_that_of_frequencies_alone_is_said(run, tmp_path):
    held_out = Measurement.load(run / "result.json").final_eval.loss
    for entropy, is_said in ((held_out - 0.5, True), (held_out + 0.5, False)):
        document = edited(run, tmp_path / str(entropy), "result.json", unigram_entropy=entropy)
        assert ("above the unigram entropy" in document.verdict[0]) == is_said


def test_steps_that_fp16_skipped_are_a_fact(of_run, run, tmp_path):
    assert "skipped steps" not in dict(of_run.facts)
    document = edited(run, tmp_path / "run", "result.json", skipped_steps=3)
    assert dict(document.facts)["skipped steps"] == "3, for overflow in fp16"


def test_a_long_runs_page_is_small_and_has_every_spike(run, tmp_path):
    steps, chance = 100_000, random.Random(0)
    spikes = set(chance.sample(range(1, steps), 12))
    known = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    for name in ("step", "loss", "step_time_s", "grad_norm"):
        del known[name]
    rest = json.dumps(known)[1:]
    document = json.loads((run / "run.json").read_text()) | {"total_steps": steps}
    (tmp_path / "run.json").write_text(json.dumps(document))
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            loss = 20.0 if step in spikes else 2.5 + chance.random()
            file.write(f'{{"step": {step}, "loss": {loss}, "step_time_s": {chance.random()}, '
                       f'"grad_norm": {chance.random()}, {rest}\n')  # fmt: skip
    long = run_document(read_run(tmp_path))
    (drawn, *_) = figure(long, "Loss").traces
    assert {x for x, y in zip(drawn["x"], drawn["y"], strict=True) if y == 20.0} == spikes
    assert len(page([long]).encode()) < 10e6


@pytest.mark.slow
def test_times_are_by_part_and_by_rank(of_pipeline, pipeline_run):
    by_rank = figure(of_pipeline, "Time of a step by part and by rank")
    assert [row[0] for row in by_rank.table.rows] == ["rank 0", "rank 1"]
    ranks = Measurement.load(pipeline_run / "result.json").parts_by_rank
    assert len(ranks) == 2 and ranks[0] != ranks[1]
    assert by_rank.table.rows[1][-1].value == pytest.approx(ranks[1].total_s)


def test_memory_is_by_rank_where_there_are_several(of_pipeline, pipeline_run, of_run):
    measured = Measurement.load(pipeline_run / "result.json")
    (table,) = [one for one in section(of_pipeline, "Memory")
                if isinstance(one, DataTable) and one.title == "Peak memory by rank"]  # fmt: skip
    assert [row[0] for row in table.rows] == ["rank 0", "rank 1"]
    assert tuple(row[1].value for row in table.rows) == measured.peak_memory_by_rank
    assert max(measured.peak_memory_by_rank) == measured.peak_memory_bytes
    titles = [getattr(one, "title", "") for one in section(of_run, "Memory")]
    assert "Peak memory by rank" not in titles


def test_a_pipelines_plan_stands_above_what_was_traced(of_pipeline, pipeline_run):
    timeline = figure(of_pipeline, "The pipeline's timeline")
    rows = [(row[0], row[1]) for row in timeline.table.rows]
    assert rows == [("planned", "rank 0"), ("planned", "rank 1"), ("measured", "rank 0"),
                    ("measured", "rank 1")]  # fmt: skip
    assert "the last pass that --profile traced" in words(of_pipeline)
    record = read_run(pipeline_run).record
    plan, batch = record.plan, record.settings.global_batch
    assert plan.accumulation(batch) == 2  # one pass is planned, so of two one is shown
    seen = trace.measured_timeline(pipeline_run, plan, batch)
    for rank, spans in enumerate(seen.ranks):
        said = [(one.action.kind, one.action.stage, one.action.microbatch) for one in spans]
        todo = pipeline.simulate_schedule(plan, [StageTime(1.0, 1.0, 1.0)] * 2).ranks[rank]
        assert said == [tuple(one.action) for one in todo]
        assert all(a.end_s <= b.begin_s for a, b in pairwise(spans))
    assert 0 < seen.idle_share < 1


def test_without_a_trace_the_schedule_is_replayed_and_says_so(pipeline_run, tmp_path):
    for name in ("run.json", "metrics.jsonl", "result.json"):
        (tmp_path / name).write_text((pipeline_run / name).read_text())
    document = run_document(read_run(tmp_path))
    timeline = figure(document, "The pipeline's timeline")
    assert {row[0] for row in timeline.table.rows} == {"planned", "replayed"}
    assert "Without --profile" in words(document)
    (tmp_path / "result.json").unlink()
    assert "The times of each rank's passes are not recorded" in words(
        run_document(read_run(tmp_path))
    )


def test_a_trace_that_is_cut_short_too_large_or_missing_is_none_and_it_is_said_why(
    pipeline_run, tmp_path
):
    plan = read_run(pipeline_run).record.plan
    for rank in range(2):
        text = (pipeline_run / f"trace-rank{rank}.json").read_text()
        (tmp_path / f"trace-rank{rank}.json").write_text(text[: len(text) // (1 + rank)])
    told = trace.measured_timeline(tmp_path, plan, 8)
    assert "no complete step" in told and "trace-rank1.json" in told and "rank0" not in told
    os.truncate(tmp_path / "trace-rank0.json", 300 << 20)
    assert "more than 256.00 MiB are not read" in trace.measured_timeline(tmp_path, plan, 8)
    (tmp_path / "trace-rank1.json").unlink()
    told = trace.measured_timeline(tmp_path, plan, 8)
    assert "not in this folder: trace-rank1.json" in told


@pytest.mark.parametrize(
    ("strategy", "microbatches"), [("gpipe", 4), ("1f1b", 4), ("interleaved", 4), ("zbv", 8)]
)
def test_bubbles_of_equal_stages_are_as_the_papers_say(strategy, microbatches):
    plan = Plan(strategy=strategy, pp=2, pp_microbatches=microbatches)
    timeline = pipeline.simulate_schedule(plan, [StageTime(1.0, 1.0, 1.0)] * plan.stages)
    table = pipeline.bubbles(plan, {"planned": timeline}, ())
    found = {row[0]: row[1].value for row in table.rows}
    planned = found["planned: all ranks, of a pass"]
    assert planned == pytest.approx(found.get("by formula, for equal stages", planned))
    drawn = pipeline.timelines("a pipeline", {"planned": timeline})
    assert drawn.table.rows[0][4].value + drawn.table.rows[1][4].value == pytest.approx(2 * planned)


def test_a_large_pipeline_is_drawn_in_part():
    plan = Plan(strategy="1f1b", pp=64, pp_microbatches=128)
    timeline = pipeline.simulate_schedule(plan, [StageTime(1.0, 1.0, 1.0)] * 64)
    drawn = pipeline.timelines("a pipeline", {"planned": timeline})
    actions = sum(len(one["x"]) for one in drawn.traces if one["name"] != "waits")
    assert actions <= 3000
    assert [row[1] for row in (drawn.table.rows[0], drawn.table.rows[-1])] == ["rank 0", "rank 63"]


def test_a_comparison_says_what_may_be_claimed_with_intervals(comparison):
    record = Comparison.load(comparison / "comparison.json")
    document = comparison_document(record, comparison)
    (verdict,) = record.verdicts().values()
    assert document.verdict[0].startswith("They differ in: strategy single → 1f1b")
    assert f"{verdict.words('pipeline', 'alone')}." in document.verdict
    difference = figure(document, "Difference from alone")
    (row,) = difference.table.rows
    assert [cell.value for cell in row[1:]] == [verdict.slowdown, verdict.low, verdict.high]
    rounds = figure(document, "Every part")  # of runs that were over
    assert len(rounds.traces) == 2
    assert rounds.alt == f"{len(record.outcomes)} measurements in 2 runs, 0 of them failed."
    arms = next(one for one in parts(document, DataTable) if one.title == "The arms")
    assert {"step", "ratio", "memory"} <= set(arms.columns)
    assert all(isinstance(cell, Number) for row in arms.rows for cell in row[1:])
    made = next(one for one in parts(document, DataTable) if one.title == "Versions")
    assert "torch" in [name for name, _ in made.rows]
    by_rank = next(one for one in parts(document, DataTable) if one.title == "Peak memory by rank")
    assert [row[0] for row in by_rank.rows] == ["pipeline, rank 0", "pipeline, rank 1"]
    losses = figure(document, "Loss by arm")
    assert [row[0] for row in losses.table.rows] == ["alone", "pipeline"]
    assert [row[0] for row in figure(document, "Time of a step").table.rows]


def test_a_comparisons_prediction_is_beside_the_medians_of_its_rounds(comparison):
    record = Comparison.load(comparison / "comparison.json")
    first, other = (arm.model_copy(update={"step_time_s": 0.5, "sent_bytes": sent})
                    for arm, sent in zip(record.arms, (900, 2**20), strict=True))  # fmt: skip
    changed = record.model_copy(update={"arms": (first, other)})
    document = comparison_document(changed, comparison)
    arms = next(one for one in parts(document, DataTable) if one.title == "The arms")
    sent = arms.columns.index("sent per step")
    assert [row[sent].value for row in arms.rows] == [900, 2**20]  # by which it is sorted
    beside = figure_in(document, "Predicted against measured", "Time of a step")
    columns = dict(zip(beside.table.columns, beside.table.rows[0], strict=True))
    assert columns["measured"].value == 0.5
    values = [one.value for one in record.outcomes if one.arm == first.arm]
    low, high = columns["measured, from"].value, columns["measured, to"].value
    assert min(values) <= low <= high <= max(values)


def test_a_comparison_without_its_runs_says_what_is_not_there(comparison):
    record = Comparison.load(comparison / "comparison.json")
    assert "The steps of these runs are not available." in words(comparison_document(record))
    assert "which are not available" in words(comparison_document(record))


def test_plans_have_their_pipelines_timeline_and_intervals(plans):
    answer = Plans.load(plans)
    document = plan_document(answer)
    assert answer.plans[0].title in document.verdict[0]
    assert any("nothing was measured here" in line for line in document.verdict)
    times = figure(document, "Time of a step, with the interval")
    assert len(times.table.rows) == len(answer.plans)
    planned = figure(document, "The pipeline's timeline")
    assert planned.table.rows[0][0] == "planned"
    costs = next(
        one for one in parts(document, DataTable) if one.title.startswith("Cost of required")
    )
    assert [row[0] for row in costs.rows] == [one.setting for one in answer.insistences]
    reasons = [one for one in parts(document, DataTable) if one.title == "Rejected"]
    assert sum(len(one.rows) for one in reasons) == len(answer.rejected)
    (steps,) = [one for one in document.sections if one.title == "Nearest published steps"]
    for case, (_, line) in zip(answer.plans[0].cases, steps.parts[0].rows, strict=True):
        assert line.startswith(f"{case.model}, ") and f", {case.precision}, " in line


def test_a_recommended_plan_is_not_said_to_be_the_fastest(plans):
    answer = Plans.load(plans)
    first, second = answer.plans[:2]
    slower = first.estimate.model_copy(
        update={"step_time_s": 1.01 * second.estimate.step_time_s, "high_s": 9.0}
    )
    listed = (
        first.model_copy(update={"roles": ("recommended", "leanest"), "estimate": slower}),
        second.model_copy(update={"roles": ("fastest",)}),
    )
    document = plan_document(answer.model_copy(update={"plans": listed}))
    assert document.verdict[0].startswith(f"Recommended and leanest: {first.title}, ")
    assert document.verdict[1].startswith(f"Fastest: {second.title}, ")
    shown = figure(document, "Time of a step, with the interval").alt
    assert f"1. Recommended and leanest: {first.title}" in shown
    assert f"One pass of 2. Fastest: {second.title}, with equal stages" in words(document)


def test_a_probe_shows_every_figure_with_its_interval(probe):
    machine = Machine.load(probe)
    document = probe_document(machine, machine.probed)
    listed = sum(len(one.rows) for one in parts(document, DataTable) if ": all " in one.title)
    assert listed == len(machine.probed.figures)
    rates = figure(document, "Rates, with the interval of a repeat (95%)")
    assert rates.traces[0]["error_x"]["array"] == [1e11]  # of what a line has the best alone
    assert len(figure(document, "Rate of matmuls").table.rows) == 5
    fitted = figure(document, "Collectives on axis all")
    for _, size, measured, said in fitted.table.rows:
        assert said.value == pytest.approx(1e-4 + size.value / 1e9)
        assert measured.value == pytest.approx(said.value)
    assert "1 of 14 figures is unstable" in document.verdict[1]


def test_a_tuning_shows_what_was_predicted_and_what_won(tuning):
    record = Tuning.load(tuning)
    document = tuning_document(record, tuning.parent)
    assert document.verdict[0].startswith("Fastest: plan 1, 150.0 ms a step (it ran in one trial")
    assert "takes 50.0 % less time" in document.verdict[1]
    times = figure(document, "Time of a step, as predicted")
    assert cells(times.table)[1][3] == "n/a"
    assert cells(times.table)[0][3] == "+25.0 %"
    console = Console(width=100, file=io.StringIO())
    console.print(answer_text(tuning_answer(record)))
    assert "+25.0 %" in console.file.getvalue()  # the same sign in a terminal
    trials = next(one for one in parts(document, DataTable) if one.title == "The trials")
    assert cells(trials)[0][0] == "1. plan 1 (fastest)" and cells(trials)[1][1] == "failed"
    assert "plan 2 failed: out of memory" in words(document)
    assert trials.columns[2] == "tokens/s"
    assert cells(trials)[0][2] == "5,000" and "5,000" in console.file.getvalue()
    progress = figure(document, "The fastest step")
    assert [row[3].value for row in progress.table.rows] == [0.15, 0.15, 0.15]
    again = tuple(record.trials[of].model_copy(update={"number": number, "raced": True})
                  for of, number in ((0, 4), (2, 5)))  # fmt: skip
    raced = record.model_copy(update={"trials": (*record.trials, *again)})
    assert tuning_document(raced).verdict[0] == "Fastest: plan 1, 150.0 ms a step."
    console.print(answer_text(tuning_answer(raced)))
    assert "4. plan 1 (again, as trial 1)" in console.file.getvalue()
    by_samples = tuple(one.model_copy(update={"tokens_per_s": None, "samples_per_s": 12.34})
                       for one in record.trials)  # fmt: skip
    console.print(answer_text(tuning_answer(record.model_copy(update={"trials": by_samples}))))
    assert "samples/s" in console.file.getvalue() and "12.3" in console.file.getvalue()
    nothing = record.model_copy(update={"best": None, "trials": record.trials[1:2]})
    assert tuning_document(nothing).verdict[0].startswith("The only trial did not finish")


def test_a_tunings_page_names_the_default_model_and_cores_that_others_used(tuning):
    record = Tuning.load(tuning)
    used = (0.6, None, 1.24)
    trials = tuple(one.model_copy(update={"other_cores": cores})
                   for one, cores in zip(record.trials, used, strict=True))  # fmt: skip
    shared = record.model_copy(update={"trials": trials, "settings": {}})
    document = tuning_document(shared, tuning.parent)
    assert document.title == "outpace-tiny: 3 trials"
    assert tuning_document(shared).title == "a model: 3 trials"  # its runs are not there
    sentence = "trials 1, 3: other processes kept 0.6 to 1.2 cores busy meanwhile"
    assert any(one.text.startswith(sentence) for one in parts(document, Paragraph))
    console = Console(width=100, file=io.StringIO())
    console.print(answer_text(tuning_answer(shared)))
    assert sentence in " ".join(console.file.getvalue().split())
    assert not any(
        "other processes" in one.text for one in parts(tuning_document(record), Paragraph)
    )


@pytest.mark.slow
def test_a_certificate_names_what_is_not_equal(certificate):
    document = certificate_document(certificate)
    assert document.verdict[0] == f"equal to one process ({len(certificate.verdicts)} equal)"
    broken = certificate.verdicts[0].model_copy(update={"passed": False, "reason": "a fault"})
    wrong = certificate_document(certificate.model_copy(update={"verdicts": (broken,)}))
    assert wrong.verdict[0].startswith("NOT equal to one process: ddp")
    table, reasons, _ = wrong.sections[0].parts
    assert cell_text(table.rows[0][0]) == "NOT equal" and isinstance(reasons, Items)
    assert reasons.rows[0][1] == "ddp: a fault"


def test_links_are_drawn_where_they_are_known(run):
    machine = Machine.parse(json.loads((run / "run.json").read_text())["machine"], "run.json")
    (why,) = topology(machine.model_copy(update={"topology": None})).parts
    assert "no links" in why.text
    devices = tuple(Endpoint(name=f"GPU{n}", kind="gpu") for n in range(2))
    links = Topology(devices=devices, links=(("X", "NV4"), ("NV4", "X")), source="a test")
    (picture, *_) = topology(machine.model_copy(update={"topology": links})).parts
    assert isinstance(picture, Picture) and "NV4" in picture.svg and picture.alt


def test_every_figure_is_one_that_plotly_knows(
    of_run, of_pipeline, comparison, plans, probe, tuning
):
    import plotly.graph_objects as go

    machine = Machine.load(probe)
    documents = [
        of_run, of_pipeline, plan_document(Plans.load(plans)),
        comparison_document(Comparison.load(comparison / "comparison.json"), comparison),
        probe_document(machine, machine.probed),
        tuning_document(Tuning.load(tuning), tuning.parent),
    ]  # fmt: skip
    for document in documents:
        for one in parts(document, Chart):
            go.Figure({"data": [*one.traces], "layout": one.layout})  # raises for what it has not
            assert one.alt.endswith(".") and one.table.rows, one.title
            assert all(len(choice.values) == len(one.traces) for choice in one.choices)


def test_a_page_of_plans_that_outpace_does_not_train_says_why_once(plans):
    answer = Plans.load(plans)
    listed = [one.model_copy(update={"untrained": "no such model"}) for one in answer.plans]
    document = plan_document(answer.model_copy(update={"plans": tuple(listed)}))
    (told,) = [line for line in document.verdict if "Not trained by outpace" in line]
    assert "no such model. --emit" in told
    reasons = [text for _, text in parts(document, Items)[0].rows]  # published steps follow
    assert len(reasons) == len(listed) and "no such model" not in " ".join(reasons)
    first = answer.plans[0].model_copy(update={"untrained": None})
    some = plan_document(answer.model_copy(update={"plans": (first, listed[1])}))
    one, other = [text for _, text in parts(some, Items)[0].rows]
    assert "Not trained" not in one and other.endswith("Not trained by outpace: no such model.")
