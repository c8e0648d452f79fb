"""`outpace report`: what it takes, where it writes, what it refuses."""

import json
import shutil
import stat
import struct
import subprocess
import sys

import pytest

from outpace.cli.main import main
from outpace.interop.training_logs import read_log
from outpace.records.measurement import WARMUP_STEPS
from outpace.reporting.data.run_folder import read_run
from outpace.reporting.documents.run import run_document
from outpace.reporting.render.screenshot import BROWSERS


def refused(capsys, *words):
    assert main(["report", *map(str, words)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "Traceback" not in captured.err
    return captured.err


def test_a_run_becomes_a_page_beside_it(run, capsys, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    assert main(["report", str(copy)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("6 steps, ") and said[-1] == f"report: {copy / 'report.html'}"
    assert (copy / "report.html").read_text().startswith("<!DOCTYPE html>")
    before = {path.name for path in copy.iterdir()}
    assert main(["report", str(copy / "run.json"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["reports"][0]["subject"] == "run" and document["format"] == "html"
    assert {path.name for path in copy.iterdir()} == before


def test_markdown_and_csv_go_to_standard_output_or_a_file(run, capsys, tmp_path):
    assert main(["report", str(run), "--format=md"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("# ") and "\n## Loss\n" in text
    out = tmp_path / "table.csv"
    assert main(["report", str(run), f"--out={out}"]) == 0
    assert out.read_text().startswith("report,section,table,row,column,value,text\n")
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    capsys.readouterr()
    assert main(["report", str(copy), "--format=md", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["out"] == str(copy / "report.md")
    assert (copy / "report.md").read_text().startswith("# ")


def test_several_make_one_page(run, capsys, tmp_path):
    main(["compare", "--runs", str(run), str(copied(run, tmp_path)), f"--out={tmp_path / 'c'}"])
    out = tmp_path / "both.html"
    assert main(["report", str(run), str(tmp_path / "c"), f"--out={out}"]) == 0
    assert out.read_text().count("<article>") == 2


def slow_down(run, factor):
    """Let all steps of a run have taken so many times as long; changed on purpose."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line.pop("xxh3_64")
        if "step_time_s" in line:
            line["step_time_s"] *= factor
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def other_run(run, folder):
    """A copy with other threads, checkpointing and variables, whose steps took twice as long."""
    other = copied(run, folder)
    record = json.loads((other / "run.json").read_text())
    record["threads"] += 3
    record["plan"]["checkpointing"] = "full"
    record["environment"]["NCCL_ALGO"] = "Ring"
    record.pop("xxh3_128")  # changed on purpose
    (other / "run.json").write_text(json.dumps(record))
    slow_down(other, 2)
    result = json.loads((other / "result.json").read_text())
    result.pop("xxh3_128")
    result["parts"]["backward_s"] = 3 * result["parts"]["backward_s"] + 1
    (other / "result.json").write_text(json.dumps(result))
    return other


@pytest.mark.parametrize("words", [["compare"], ["compare", "--runs"]])
def test_two_finished_runs_are_compared_by_what_they_differ_in_first(
    words, run, capsys, tmp_path, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "400")
    other = other_run(run, tmp_path)
    threads = json.loads((run / "run.json").read_text())["threads"]
    assert main([*words, str(run), str(other)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines[0].startswith("They differ in: checkpointing none → full")
    assert f"threads {threads} → {threads + 3}" in lines[0]
    assert "NCCL_ALGO= none → Ring" in lines[0]
    assert lines[1].startswith("The difference is largest in backward: ")
    assert any(
        "a step of " in line
        and "took 100.0 % longer than one of" in line
        and line.endswith("instead of runs.")
        for line in lines
    )


def test_the_part_that_is_named_is_one_that_takes_longer_in_the_slower_run(
    run, capsys, tmp_path, monkeypatch
):
    """The slower run may communicate less; that is not where it loses time."""
    monkeypatch.setenv("COLUMNS", "400")
    first, other = copied(run, tmp_path / "first"), copied(run, tmp_path / "other")
    slow_down(other, 2)
    for folder, more in ((first, {"communication_s": 2}), (other, {"forward_s": 1.4,
                                                                  "backward_s": 1.5})):  # fmt: skip
        result = json.loads((folder / "result.json").read_text())
        result.pop("xxh3_128")
        for part, seconds in more.items():
            result["parts"][part] += seconds
        (folder / "result.json").write_text(json.dumps(result))
    for two in ((first, other), (other, first)):
        assert main(["compare", *map(str, two)]) == 0
        out = capsys.readouterr().out
        assert "The difference is largest in backward: " in out and "largest in comm" not in out


def test_of_a_resumed_run_the_steps_since_are_timed(run, capsys, tmp_path, monkeypatch):
    """Those before may be of another layout than it has now: here they took ten times as long."""
    monkeypatch.setenv("COLUMNS", "400")
    first, resumed = copied(run, tmp_path / "a"), copied(run, tmp_path / "b")
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    last.pop("xxh3_64")  # changed on purpose
    for folder, slow in ((first, 1), (resumed, 10)):
        steps = [
            {**last, "step": step, "step_time_s": 0.5 * (slow if step <= 20 else 1)}
            for step in range(1, 41)
        ]
        text = "".join(json.dumps(one) + "\n" for one in steps)
        (folder / "metrics.jsonl").write_text(text)
        (folder / "result.json").unlink()
        record = json.loads((folder / "run.json").read_text())
        record.pop("xxh3_128")
        record |= {"total_steps": 60, "outpace": f"0.{slow}"}
        record["resumes"] = [{"at": record["started"], "ranks": 1, "step": 20}] if slow > 1 else []
        (folder / "run.json").write_text(json.dumps(record))
    assert main(["compare", str(first), str(resumed), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {one["value"] for one in told["outcomes"]} == {0.5}
    assert any("was resumed after step 20 with another plan" in one for one in told["differences"])
    assert not any("differs between arms" in one for one in told["differing"])
    assert main(["report", str(resumed), "--format=md"]) == 0
    assert "took more than twice the median" not in capsys.readouterr().out
    assert main(["runs", str(resumed), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_time_s"] == 0.5
    logged = read_log(resumed)
    assert (logged.step_time_s, logged.steps) == (0.5, 20 - WARMUP_STEPS)


def resumed_unchanged(run, folders, at, before_s, after_s):
    """Two copies of a run with 40 steps of `before_s`; the other was resumed after step `at`."""
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    last.pop("xxh3_64")  # changed on purpose
    for folder, begin in zip(folders, (40, at), strict=True):
        steps = [
            {**last, "step": step, "step_time_s": before_s if step <= begin else after_s}
            for step in range(1, 41)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in steps))
        result = json.loads((folder / "result.json").read_text())
        result.pop("xxh3_128")
        changes = {"steps": 40} if begin == 40 else {"steps": 40, "start_step": begin}
        changes["step_time_s"] = before_s if begin == 40 else after_s
        (folder / "result.json").write_text(json.dumps({**result, **changes}))
        record = json.loads((folder / "run.json").read_text())
        record.pop("xxh3_128")
        record["total_steps"] = 40
        resume = {"at": record["started"], "ranks": 1, "step": begin, "changed": []}
        record["resumes"] = [resume] if begin < 40 else []
        (folder / "run.json").write_text(json.dumps(record))


def told_of_both(folders, capsys):
    """The comparison of two runs, and of the second one its row and the facts of its report."""
    assert main(["compare", *map(str, folders), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert main(["runs", str(folders[1]), "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    return told, row, dict(run_document(read_run(folders[1])).facts)


def test_of_a_run_whose_steps_since_its_resume_are_warm_up_those_before_are_timed(
    run, capsys, tmp_path, monkeypatch
):
    """Two steps before its end a run was preempted."""
    monkeypatch.setenv("COLUMNS", "400")
    folders = copied(run, tmp_path / "a"), copied(run, tmp_path / "b")
    resumed_unchanged(run, folders, 38, 0.5, 30.0)
    told, row, facts = told_of_both(folders, capsys)
    assert {one["value"] for one in told["outcomes"]} == {0.5}
    assert [arm["step_time_s"] for arm in told["arms"]] == [0.5, 0.5]
    since = "its times are of the steps since then"
    assert not any(since in one for one in told["differences"])
    assert row["step_time_s"] == 0.5 and facts["median step"] == "500.0 ms"
    logged = read_log(folders[1])
    assert (logged.step_time_s, logged.steps) == (0.5, 38 - WARMUP_STEPS)


def test_one_set_of_steps_is_timed_of_a_run_that_was_resumed_unchanged(
    run, capsys, tmp_path, monkeypatch
):
    """Stopped after step 20 on a busy machine, then resumed: its result is of the steps since."""
    monkeypatch.setenv("COLUMNS", "400")
    folders = copied(run, tmp_path / "a"), copied(run, tmp_path / "b")
    resumed_unchanged(run, folders, 20, 2.0, 0.5)
    told, row, facts = told_of_both(folders, capsys)
    assert [arm["step_time_s"] for arm in told["arms"]] == [2.0, 0.5]
    name = told["arms"][1]["arm"]
    assert {one["value"] for one in told["outcomes"] if one["arm"] == name} == {0.5}
    assert told["arms"][1]["verdict"]["slowdown"] == pytest.approx(0.5 / 2.0 - 1)
    assert (
        f"{name} was resumed after step 20: its times are of the steps since then."
        in told["differences"]
    )
    assert not any("went to slower steps" in one for one in told["differences"])
    assert row["step_time_s"] == 0.5 and facts["median step"] == "500.0 ms"
    logged = read_log(folders[1])
    assert (logged.step_time_s, logged.steps) == (0.5, 20 - WARMUP_STEPS)


def test_cores_that_others_used_and_factors_are_told(run, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    other = copied(run, tmp_path)
    slow_down(other, 3)
    result = json.loads((other / "result.json").read_text())
    result.pop("xxh3_128")
    result["utilisation"][0]["host"] |= {"cores": [1.0, 0.9], "run_cores": 0.5}
    (other / "result.json").write_text(json.dumps(result))
    assert main(["compare", str(run), str(other)]) == 0
    said = capsys.readouterr().out
    assert f"{other.name}: other programs kept 1.4 of the 2 cores busy" in said
    assert "took 3.0 times as long as" in said


def test_time_that_went_to_slow_steps_is_told(run, capsys, tmp_path, monkeypatch):
    """80 steps with a median of 61 ms took 14 s: their medians alone do not say so."""
    monkeypatch.setenv("COLUMNS", "400")
    folders = copied(run, tmp_path / "a"), copied(run, tmp_path / "b")
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    last.pop("xxh3_64")  # changed on purpose
    for folder, slow in zip(folders, ((), (20, 30)), strict=True):
        steps = [{**last, "step": step, "step_time_s": 5.0 if step in slow else 0.1}
                 for step in range(1, 41)]  # fmt: skip
        (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in steps))
        result = json.loads((folder / "result.json").read_text())
        result.pop("xxh3_128")
        (folder / "result.json").write_text(json.dumps(result | {"steps": 40, "step_time_s": 0.1}))
    assert main(["compare", *map(str, folders), "--json"]) == 0
    told = [one for one in json.loads(capsys.readouterr().out)["differences"] if "slower st" in one]
    assert len(told) == 1 and told[0].startswith(f"{folders[1]}: its 40 steps add up to 13")
    assert told[0].endswith("they would take 4.00 s. 9.80 s went to slower steps.")


def test_runs_that_are_alike_are_said_to_be(run, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    assert main(["compare", str(run), str(copied(run, tmp_path))]) == 0
    assert "No recorded difference between the runs." in capsys.readouterr().out


def test_a_report_of_two_runs_begins_with_what_they_differ_in(run, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    other = other_run(run, tmp_path)
    assert main(["report", str(run), str(other)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("They differ in: checkpointing none → full")
    assert said[-1] == "report: report.html" and not (other / "report.html").exists()
    assert (tmp_path / "report.html").read_text().count("<article>") == 3
    assert "report.html exists already" in refused(capsys, run, other)


def test_a_run_and_a_strategy_are_not_compared(run, capsys):
    assert main(["compare", str(run), "zero3"]) == 2
    assert "'zero3' is not a finished run" in capsys.readouterr().err


def copied(run, folder):
    shutil.copytree(run, folder / "other")
    return folder / "other"


def test_a_plans_answer_is_reported_and_a_plan_alone_refused(capsys, tmp_path):
    plan = tmp_path / "plan.json"
    words = ["plan", "--model=outpace-tiny", "--machine=2x-titan-rtx", "--json", f"--out={plan}"]
    assert main(words) == 0
    plans = tmp_path / "plans.json"
    plans.write_text(capsys.readouterr().out)
    assert main(["report", str(plans)]) == 0
    assert "Fastest: " in capsys.readouterr().out
    assert (tmp_path / "report.html").is_file()
    assert "outpace plan … --json > plans.json" in refused(capsys, plan)


def test_what_is_nothing_to_report_on_is_refused_with_what_would_be(capsys, tmp_path):
    assert "holds nothing to report on" in refused(capsys, tmp_path)
    for name in ("first", "second", "third", "other"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "run.json").touch()
    (tmp_path / "runs" / "frist").mkdir()  # not a run
    said = refused(capsys, tmp_path / "runs" / "firts")
    assert "there is no file or folder" in said and "Give the folder of a run" in said
    assert f"Runs in {tmp_path / 'runs'}: first, " in said and " and 1 more." in said
    assert "Runs in" not in refused(capsys, tmp_path / "none.json")
    for command in (["generate", "a", "--run"], ["train", "--resume"]):
        assert main([*command, str(tmp_path / "runs" / "firts")]) == 2
        assert "and 1 more." in capsys.readouterr().err
    path = tmp_path / "a.json"
    path.write_text("{")
    assert "is not JSON" in refused(capsys, path)
    path.write_text('{"a": 1}')
    assert "is not a file for a report" in refused(capsys, path)
    for base in ('"node": "hgx-h100"', '"machine": {"host_cores": 2}'):
        path.write_text(f'{{{base}, "runs": [{{}}]}}')
        said = refused(capsys, path)
        assert "calibrate` corrected" in said and f"outpace plan --machine {path}." in said
    path.write_text('{"host_cores": 2, "host_memory_bytes": 1024, "cpu": "a"}')
    assert "describes a machine without measurements" in refused(capsys, path)
    path.write_text('{"host_cores": 0, "host_memory_bytes": 1024, "cpu": "a"}')
    assert "host_cores = 0" in refused(capsys, path)
    assert "the following arguments are required: PATH" in refused(capsys)


def test_formats_and_names_have_to_agree(run, capsys, tmp_path):
    assert "ends with .md" in refused(capsys, run, f"--out={tmp_path / 'a.md'}", "--format=csv")
    assert "there is no folder" in refused(capsys, run, f"--out={tmp_path / 'no' / 'a.html'}")
    assert list(tmp_path.iterdir()) == []


def test_a_picture_needs_a_browser(run, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    said = refused(capsys, run, "--format=png")
    assert "needs Chromium or Chrome" in said and "--format html" in said
    assert "there is no such program" in refused(capsys, run, "--format=png", "--browser=lynx")


def test_a_browser_that_fails_is_named(run, capsys, tmp_path):
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho it is broken >&2\nexit 3\n")
    broken.chmod(broken.stat().st_mode | stat.S_IXUSR)
    out = tmp_path / "a.png"
    said = refused(capsys, run, f"--out={out}", f"--browser={broken}")
    assert "failed with exit code 3: it is broken" in said and not out.exists()
    broken.write_text("#!/bin/sh\necho '<html>'\n")
    assert "did not finish drawing" in refused(capsys, run, f"--out={out}", f"--browser={broken}")


@pytest.mark.slow
@pytest.mark.skipif(
    not any(map(shutil.which, BROWSERS)), reason="NO CHROMIUM ON PATH: no picture is taken"
)
def test_a_picture_shows_the_whole_page(run, tmp_path):
    out = tmp_path / "a.png"
    assert main(["report", str(run), f"--out={out}"]) == 0
    data = out.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width == 1200 and 2000 < height < 16_384


def test_a_report_needs_no_torch(run, tmp_path):
    program = (
        "import sys\nfrom outpace.cli.main import main\n"
        f"assert main(['report', {str(run)!r}, '--out', {str(tmp_path / 'a.html')!r}]) == 0\n"
        "print({'torch', 'transformers', 'datasets', 'plotly'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                          check=True)  # fmt: skip
    assert done.stdout.splitlines()[-1] == "set()"


def test_figures_that_were_changed_are_not_believed(run, capsys, tmp_path):
    other = copied(run, tmp_path)
    metrics, evals = other / "metrics.jsonl", other / "evals.jsonl"
    for path in (metrics, evals):
        lines = path.read_bytes().splitlines(keepends=True)
        lines[1] = lines[1].replace(b'"loss":6', b'"loss":5')
        path.write_bytes(b"".join(lines))
    loads = other / "utilisation" / "host-0.json"
    loads.write_text(loads.read_text().replace('"node":0', '"node":1'))
    assert main(["report", str(other), "--format=md"]) == 0
    shown = capsys.readouterr().out
    assert f"{loads.name} was changed since outpace wrote it" in shown
    for path in (metrics, evals):
        assert f"{path.name}, line 2, was changed since outpace wrote it" in shown
    assert main(["compare", "--runs", str(run), str(other), f"--out={tmp_path / 'c'}"]) == 2
    assert f"{metrics}, line 2: it was changed since outpace wrote it" in capsys.readouterr().err
    (other / "result.json").unlink()
    assert main(["runs", str(other), "--json"]) == 0
    assert "changed since outpace wrote it" in capsys.readouterr().out
