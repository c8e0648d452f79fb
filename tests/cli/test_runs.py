"""`outpace runs`: what lies in folders, whole or not; conditions, order, and one run in full."""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from outpace.cli.main import main
from outpace.records.base import read_object
from outpace.training.run_dir import RunDir


def edited(run: Path, place: Path, **changes):
    """A copy of a run, with values of run.json and result.json changed by their names."""
    shutil.copytree(run, place)
    for name in ("run.json", "result.json"):
        document = json.loads((place / name).read_text())
        document |= {key: value for key, value in changes.items() if key in document}
        (place / name).write_text(json.dumps(document))
    return place


@pytest.fixture(scope="module")
def home(run, tmp_path_factory):
    """Three runs that are done, one that is not, and two that nothing can be said of."""
    home = tmp_path_factory.mktemp("home")
    edited(run, home / "runs" / "old", started="2026-01-01T10:00:00+00:00", final_loss=3.0)
    # This process may have grown beyond a GiB by other tests, before it trained.
    edited(run, home / "runs" / "new", started="2026-03-01T10:00:00+00:00", final_loss=2.0,
           peak_memory_bytes=300 << 20)  # fmt: skip
    record = json.loads((run / "run.json").read_text())
    plan = record["plan"] | {"strategy": "zero3", "dp_shard": 2}
    edited(run, home / "comparisons" / "a" / "runs" / "zero3-000", plan=plan, final_loss=2.5,
           started="2026-02-01T10:00:00+00:00", step_time_s=None)  # fmt: skip
    cut = edited(run, home / "runs" / "cut", started="2026-02-15T10:00:00+00:00", total_steps=9)
    (cut / "result.json").unlink()
    lines = (cut / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (cut / "metrics.jsonl").write_bytes(b"".join(lines[:4]) + lines[4][:40])
    broken = edited(run, home / "runs" / "broken", started="2026-02-20T10:00:00+00:00")
    (broken / "result.json").write_text('{"steps": ')
    (home / "runs" / "lost").mkdir()
    (home / "runs" / "lost" / "metrics.jsonl").write_text("")
    return home


@pytest.fixture
def listed(home, monkeypatch, capsys):
    """The names that `outpace runs` lists with these words, or its rows by name."""
    monkeypatch.chdir(home)

    def rows(*words):
        assert main(["runs", *words, "--all", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)["runs"]
        return {Path(one["path"]).name: one for one in found}

    return rows


def test_all_runs_are_listed_newest_first_and_damaged_ones_as_such(listed):
    rows = listed()
    assert list(rows) == ["new", "broken", "cut", "zero3-000", "old", "lost"]
    assert {name: row["state"] for name, row in rows.items()} == {
        "new": "done", "old": "done", "zero3-000": "done",
        "cut": "unfinished", "broken": "damaged", "lost": "damaged",
    }  # fmt: skip
    assert "result.json is not JSON" in rows["broken"]["damage"]
    assert rows["broken"]["strategy"] == "single" and rows["lost"]["strategy"] is None
    assert "cannot read" in rows["lost"]["damage"] and "run.json" in rows["lost"]["damage"]
    assert rows["cut"]["steps"] == 4 and rows["cut"]["total_steps"] == 9  # the fifth line is torn
    assert rows["cut"]["step_time_s"] > 0 and rows["cut"]["final_loss"] > 0
    assert rows["zero3-000"]["mesh"] == "dp_shard 2" and rows["zero3-000"]["processes"] == 2
    assert rows["new"]["final_loss"] == 2.0 and rows["new"]["steps"] == 6


def test_those_of_experiments_are_listed_where_they_are_asked_for(home, monkeypatch, capsys):
    monkeypatch.chdir(home)
    for words, names in (([], False), (["--all"], True), (["comparisons"], True)):
        monkeypatch.setenv("COLUMNS", "120")  # a slow step's figure is wider
        assert main(["runs", *words]) == 0
        shown = capsys.readouterr().out
        assert ("zero3-000" in shown) is names
        assert ("1 more from comparisons and tunings: outpace runs --all" in shown) is not names


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_a_list_keeps_its_figures_whole_at_any_width(width, home, monkeypatch, capsys):
    monkeypatch.chdir(home)
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["runs"]) == 0
    shown = capsys.readouterr().out
    assert "…" not in shown and max(map(len, shown.splitlines())) <= width
    assert "2026-03-01 10:00" in shown and "6/6" in shown
    if width >= 120:
        assert re.search(r"\d MiB", shown) and "Hidden" not in shown
    else:
        assert "Hidden because the terminal is too narrow" in shown and "memory" in shown


@pytest.mark.parametrize(
    ("conditions", "names"),
    [
        (["state=done"], ["new", "zero3-000", "old"]),
        (["strategy=zero3"], ["zero3-000"]),
        (["strategy==single", "final_loss<=2"], ["new"]),
        (["final_loss < 2.75", "state=done"], ["new", "zero3-000"]),
        (["final-loss>2", "state!=unfinished"], ["zero3-000", "old"]),
        (["strategy=none"], ["lost"]),
        (["started<2026-02-10"], ["zero3-000", "old"]),
        (["global_batch=8", "seq_len=32", "started>=2026-03"], ["new"]),
        (["dp_shard>1"], ["zero3-000"]),
        (["peak_memory_bytes<1MiB"], []),
        (["compile=true"], []),
        (["step_time_s=none", "state=done"], ["zero3-000"]),
        (["total_steps>6"], ["cut"]),
    ],
)
def test_conditions_keep_the_runs_of_which_they_hold(conditions, names, listed):
    assert list(listed("--where", *conditions)) == names


def test_data_that_is_one_of_several_is_found(run, listed):
    (folder,) = json.loads((run / "run.json").read_text())["settings"]["data"]
    assert len(listed("--where", f"data={folder}")) == 5
    assert not listed("--where", "data=elsewhere")


def test_runs_are_sorted_by_what_is_known_of_them(listed):
    order = ["new", "zero3-000", "old"]
    assert list(listed("--where", "state=done", "--sort", "final_loss")) == order
    turned = listed("--where", "state=done", "--sort", "final_loss", "--reverse")
    assert list(turned) == order[::-1]
    assert list(listed("--reverse"))[-2:] == ["broken", "new"]
    by_time = listed("--where", "state=done", "--sort", "step_time_s", "--reverse")
    assert list(by_time)[-1] == "zero3-000"  # unknown is neither slow nor fast


def test_folders_may_be_named_and_overlap(listed, home):
    assert len(listed("runs", ".", str(home / "runs"))) == 6
    assert list(listed("comparisons")) == ["zero3-000"]


def test_a_run_that_a_process_of_this_host_writes_goes_on(listed, home):
    with (home / "runs" / "cut" / "metrics.jsonl").open("a") as file:
        writer = subprocess.Popen(["sleep", "60"], stdout=file)
    try:
        assert listed("--where", "state=going on").keys() == {"cut"}
    finally:
        writer.kill()
        writer.wait()
    assert not listed("--where", "state=going on")


def test_a_result_of_fewer_steps_than_the_run_has_now_is_no_end(run, listed, tmp_path):
    edited(run, tmp_path / "further", total_steps=9)
    row = listed(str(tmp_path))["further"]
    assert (row["state"], row["steps"], row["total_steps"]) == ("unfinished", 6, 9)


@pytest.mark.parametrize("columns", ["80", "200"])
def test_a_person_sees_a_table_in_which_nothing_is_markup(
    columns, home, monkeypatch, capsys, tmp_path
):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.chdir(home)
    assert main(["runs"]) == 0
    shown = capsys.readouterr().out
    assert all(len(line) <= int(columns) for line in shown.splitlines())
    for words in ("2026-03-01 10:00", "6/6", "4/9", "unfinished", "damaged", "2.0000", "tokens/s"):
        assert words in shown
    assert "MFU" not in shown  # of no run is it known
    edited(home / "runs" / "new", tmp_path / "[red]x[/red]")
    monkeypatch.chdir(tmp_path)
    for words in (["."], ["show", "[red]x[/red]"]):
        assert main(["runs", *words]) == 0
        assert "[red]x[/red]" in capsys.readouterr().out


def test_a_row_names_the_settings_in_which_the_listed_runs_differ(
    run, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "200")
    record = json.loads((run / "run.json").read_text())
    for name, changes in (("one", {"lr": 5e-4, "clip": 0.5}), ("two", {"clip": 0.5})):
        origins = record["origins"] | dict.fromkeys(changes, "command line")
        settings = record["settings"] | changes
        edited(run, tmp_path / name, settings=settings, origins=origins)
    assert main(["runs", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "lr 0.0005" in shown and "clip" not in shown  # both have the same
    assert main(["runs", str(tmp_path), "--json"]) == 0
    rows = {
        Path(row["path"]).name: row["asked"] for row in json.loads(capsys.readouterr().out)["runs"]
    }
    assert rows["one"]["lr"] == 5e-4 and rows["two"]["clip"] == 0.5 and "lr" not in rows["two"]


def test_where_there_is_nothing_it_says_so(tmp_path, monkeypatch, capsys, home):
    monkeypatch.chdir(tmp_path)
    assert main(["runs"]) == 0
    assert "no runs in a subfolder runs of this one" in capsys.readouterr().out
    assert main(["runs", str(home), "--where", "strategy=tp"]) == 0
    assert "none of the 6 runs" in capsys.readouterr().out


def test_one_run_is_shown_with_what_was_asked_and_what_came_of_it(run, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["runs", str(run)]) == 0
    shown = capsys.readouterr().out
    words = " ".join(shown.split())
    for said in (
        "done, 6 of 6 steps", "global-batch 8 command line", "seq-len 32 command line",
        "global batch 8 = micro-batch 8", "validation after", "throughput",
        "checkpoints", "for generate, eval and --model", "step-6", "torch 2.",
    ):  # fmt: skip
        assert said in words, said
    assert "weight-decay" not in shown and "eval-fraction" not in shown  # as by default
    assert main(["runs", "show", str(run), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["record"] == read_object(run / "run.json")
    assert document["result"] == read_object(run / "result.json")
    assert document["bytes"]["run.json"] == (run / "run.json").stat().st_size
    assert document["bytes"]["model"] > 1000


def test_a_run_is_shown_with_its_layout_in_the_words_of_the_list(run, tmp_path, capsys):
    plan = json.loads((run / "run.json").read_text())["plan"]
    split = edited(run, tmp_path / "split", plan=plan | {"strategy": "3d", "tp": 2})
    for words in ([str(split)], [str(tmp_path)]):
        assert main(["runs", *words]) == 0
        assert "3d (tp 2)" in capsys.readouterr().out, words


def test_the_command_that_is_shown_repeats_the_run(run, capsys, tmp_path):
    assert main(["runs", "show", str(run), "--json"]) == 0
    program, *words = shlex.split(json.loads(capsys.readouterr().out)["again"])
    assert program == "outpace" and not any(word.startswith("--out") for word in words)
    again = tmp_path / "again"
    assert main([*words, f"--out={again}"]) == 0
    first, second = (json.loads((one / "result.json").read_text()) for one in (run, again))
    assert second["train_loss"] == first["train_loss"]
    assert second["final_eval"]["loss"] == first["final_eval"]["loss"]


def test_an_unfinished_run_says_how_it_goes_on_where_it_can(home, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    cut = home / "runs" / "cut"
    assert main(["runs", "show", str(cut)]) == 0
    shown = capsys.readouterr().out
    assert "unfinished, 4 of 9 steps; last written 20" in shown
    assert f"Resume it with outpace train --resume {cut}" in shown and "latest steps" in shown
    moved = cut.rename(cut.with_name("a cut's"))
    assert main(["runs", "show", str(moved)]) == 0
    shown = capsys.readouterr().out
    assert f"Resume it with outpace train --resume {shlex.quote(str(moved))}" in shown
    moved.rename(cut)
    RunDir(cut).end_early("the loss became nan at step 5")
    assert main(["runs", "show", str(cut)]) == 0
    assert "It ended early: the loss became nan at step 5" in capsys.readouterr().out
    (cut / "checkpoints" / "step-6" / "complete.json").rename(cut / "kept")
    try:
        assert main(["runs", "show", str(cut)]) == 0
    finally:
        (cut / "kept").rename(cut / "checkpoints" / "step-6" / "complete.json")
    assert "--resume" not in capsys.readouterr().out


def test_of_a_damaged_run_is_shown_what_there_is(home, capsys):
    for name, said in (("broken", "is not JSON"), ("lost", "cannot read")):
        assert main(["runs", "show", str(home / "runs" / name)]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert "damaged" in shown and said in shown and "metrics.jsonl" in shown


@pytest.mark.parametrize(
    "spoil",
    [
        lambda run: (run / "run.json").write_bytes(b"\xff\xfe\x00"),
        lambda run: (run / "run.json").write_text("[]"),
        lambda run: (run / "run.json").write_text('{"unknown": 1}'),
        lambda run: ((run / "run.json").unlink(), (run / "run.json").mkdir()),
        lambda run: (run / "result.json").write_text("null"),
        lambda run: ((run / "result.json").unlink(),
                     (run / "metrics.jsonl").write_bytes(b"\x00" * 300 + b"\n")),
        lambda run: ((run / "result.json").unlink(),
                     (run / "metrics.jsonl").write_text('[1]\n{"step": 2}\n')),
    ],
)  # fmt: skip
def test_no_damage_ends_the_listing(spoil, run, listed, tmp_path):
    edited(run, tmp_path / "whole")
    spoil(edited(run, tmp_path / "spoilt"))
    rows = listed(str(tmp_path))
    assert {name: row["state"] for name, row in rows.items()} == {
        "whole": "done", "spoilt": "damaged",
    }  # fmt: skip
    assert rows["spoilt"]["damage"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "there is no folder nowhere"),
        (["show"], "shows one run, but 0 are given"),
        (["show", "runs/new", "runs/old"], "shows one run, but 2 are given"),
        (["show", "runs"], "Runs in runs: "),
        (["show", "runs/newest"], "there is no folder runs/newest"),
        (["show", "runs/newest"], "Runs in runs: new, "),
        (["diff", "runs/new", "runs/old"], "compare runs/new runs/old` shows how runs"),
        (["--where", "fast"], "'fast' is not a condition"),
        (["--where", "final_los<2"], "runs have no field 'final_los'. Did you mean 'final_loss'"),
        (["--where", "final_loss<low"], "final_loss must be a number; 'low' is not"),
        (["--where", "peak_memory_bytes<2 apples"], "a number, such as 900MiB; '2 apples' is not"),
        (["--where", "strategy=dpp"], "Did you mean 'dp' or 'ddp'"),
        (["--where", "strategy<ddp"], "strategy cannot be ordered"),
        (["--where", "data<a"], "data cannot be ordered"),
        (["--where", "compile=perhaps"], "compile is one of true, on"),
        (["--sort", "speed"], "--sort: runs have no field 'speed'"),
    ],
)
def test_mistakes_are_said(words, said, home, monkeypatch, capsys):
    monkeypatch.chdir(home)
    assert main(["runs", *words]) == 2
    output = capsys.readouterr()
    assert said in output.err and not output.out


def test_a_run_whose_command_is_not_known_is_shown_by_its_settings(run, tmp_path, capsys):
    edited(run, tmp_path / "r", command=[])
    assert main(["runs", "show", str(tmp_path / "r")]) == 0
    assert "Again: outpace train --" in capsys.readouterr().out


def test_what_is_shown_at_80_columns_keeps_its_units(run, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["runs", "show", str(run)]) == 0
    shown = capsys.readouterr().out
    assert "Where the time went" in shown and "per step" in shown
    assert "…" not in shown.partition("Where the time went")[2].partition("How busy")[0]


def test_what_was_given_is_given_again_where_it_is_the_default(run, tmp_path, capsys):
    origins = {**read_object(run / "run.json")["origins"], "model": "command line"}
    edited(run, tmp_path / "r", origins=origins)
    assert main(["runs", "show", str(tmp_path / "r"), "--json"]) == 0
    assert "--model " in json.loads(capsys.readouterr().out)["again"]
