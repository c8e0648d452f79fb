"""A comparison in a terminal of any width, its headline, and pages of commands and few rounds."""

import io
import json

import pytest
from rich.console import Console

from outpace.cli.main import main
from outpace.experiment.sequential import verdict
from outpace.records.comparison import Arm, ArmResult, Comparison, Experiment, Outcome
from outpace.records.machine import Machine
from outpace.records.measurement import TimeParts
from outpace.reporting.answers.comparison import comparison_answer
from outpace.reporting.documents.comparison import comparison_document
from outpace.reporting.render.document import Chart, Paragraph
from outpace.reporting.terminal.answer import answer_text


def compared(steps_s, rounds=12):
    """Arms by name, with what a step takes; the first is what others are compared with."""
    names = list(steps_s)
    first_s = steps_s[names[0]]
    arms = []
    for name, step_s in steps_s.items():
        found = verdict([step_s] * rounds, [first_s] * rounds, 0.01 / (len(names) - 1), 0.95)
        arms.append(
            ArmResult(
                arm=name, step_time_s=step_s, tokens_per_s=1e4 / step_s, model_flops_per_s=1e11,
                mfu=0.417, peak_memory_bytes=385351680, final_loss=8.1234,
                verdict=None if name == names[0] else found, sent_bytes=2**20, idle_share=0.1,
                core_utilisation=0.9, parts=TimeParts(forward_s=step_s / 2, other_s=step_s / 2),
            )
        )  # fmt: skip
    outcomes = tuple(Outcome(arm=name, round=number, value=steps_s[name])
                     for number in range(rounds) for name in names)  # fmt: skip
    return Comparison(
        experiment=Experiment(arms=tuple(Arm(name=name) for name in names)), command=("outpace",),
        arms=tuple(arms), outcomes=outcomes, losses="", stopped="all rounds are done", took_s=60.0,
        machine=Machine(host_cores=2, host_memory_bytes=2**30, cpu="x"), started="2026-01-01",
    )  # fmt: skip


def printed(comparison, width):
    console = Console(width=width, file=io.StringIO())
    console.print(answer_text(comparison_answer(comparison)))
    return console.file.getvalue()


LONG = {"ddp, micro_batch=2, precision=bf16": 0.2, "ddp, micro_batch=4, precision=bf16": 0.25,
        "zero3, micro_batch=4, precision=fp32": 0.3}  # fmt: skip


@pytest.mark.parametrize("width", [60, 80, 100, 160, 240])
def test_names_and_figures_are_whole_at_any_width(width):
    said = printed(compared(LONG), width)
    assert "…" not in said and max(map(len, said.splitlines())) <= width
    for figure in ("367.50 MiB", "100.00 GFLOP/s", "41.7 %", "250.0 ms", "1.00 MiB", "cores busy"):
        assert figure in said.replace("100.00 G", "100.00 GFLOP/s")
    for word in ("micro_batch=2,", "micro_batch=4,", "precision=bf16", "precision=fp32", "zero3,"):
        assert word in said
    assert "GPU" not in said  # of what is not there nothing is said
    whole = " ".join(said.split())
    assert "ratio: to ddp, micro_batch=2, precision=bf16; the median of the rounds' ratios" in whole


@pytest.mark.parametrize(
    ("arms", "width", "tables"), [(2, 60, 2), (4, 80, 2), (5, 80, 3), (2, 240, 2)]
)
def test_few_arms_are_side_by_side_where_columns_do_not_fit(arms, width, tables):
    """In one table, beside that of a step's parts; more arms have a row each, in two."""
    said = printed(compared({f"arm {n}": 1 + n for n in range(arms)}), width).splitlines()
    assert max(map(len, said)) <= width
    assert sum("───" in line for line in said) == tables
    rows = [line.split() for line in said]
    turned = ["MFU", *(["41.7", "%"] * arms)] in rows
    assert turned is (arms <= 4 and width < 240)


@pytest.mark.parametrize(
    ("steps_s", "rounds", "line"),
    [
        ({"a": 1.0, "b": 1.2, "c": 1.1}, 12, "Fastest: a, claimed against every other arm."),
        ({"a": 1.0, "b": 1.2, "c": 1.1}, 3,
         "No arm is claimed to be the fastest. By the median ratio, it is a. Only differences "
         "from a are tested."),
        ({"a": 1.0, "b": 0.9, "c": 0.8}, 12,
         "Fastest: c, 20.0 % faster than a. Only differences from a are tested."),
        ({"a": 1.0, "c": 0.8, "d": 1.0}, 3,
         "No arm is claimed to be the fastest. By the median ratio, it is c, 20.0 % ahead of a. "
         "Only differences from a are tested."),
        ({"a": 1.0, "b": 1.2, "c": 1.0}, 12,
         "No arm is claimed to be the fastest. By the median ratio, it is a. b: claimed to be "
         "slower than a. Only differences from a are tested."),
    ],
)  # fmt: skip
def test_of_several_arms_the_fastest_comes_first(steps_s, rounds, line):
    comparison = compared(steps_s, rounds)
    assert " ".join(printed(comparison, 100).split()).startswith(line)
    document = comparison_document(comparison)
    assert document.verdict[0] == line and len(document.verdict) == 3
    assert "astest" not in printed(compared({"a": 1.0, "b": 1.2}, rounds), 100)


def words_of(document):
    """All sentences between a document's figures and tables."""
    return " ".join(part.text for section in document.sections for part in section.parts
                    if isinstance(part, Paragraph))  # fmt: skip


def test_cores_that_other_processes_used_are_told_in_a_sentence():
    alone = compared({"a": 1.0, "b": 1.2})
    assert "Other processes" not in printed(alone, 100) + words_of(comparison_document(alone))
    arms = [one.model_copy(update={"other_cores": cores})
            for one, cores in zip(alone.arms, (0.9, 1.52), strict=True)]  # fmt: skip
    shared = alone.model_copy(update={"arms": tuple(arms)})
    sentence = "Other processes kept 0.9 to 1.5 cores busy meanwhile"
    assert sentence in " ".join(printed(shared, 100).split())
    assert sentence in words_of(comparison_document(shared))


def figure(document, start):
    return next(part for one in document.sections for part in one.parts
                if isinstance(part, Chart) and part.title.startswith(start))  # fmt: skip


def test_few_rounds_have_no_whiskers_and_rounds_are_whole_numbers():
    for rounds, dtick in ((2, 1), (12, 2)):
        document = comparison_document(compared({"a": 1.0, "b": 1.2}, rounds))
        values = figure(document, "Time of a step")
        whiskers = values.traces[0]["error_x"]["array"]
        assert (whiskers == [None, None]) is (rounds == 2)
        assert ("quartiles" in values.title) is (rounds > 2)
        assert figure(document, "Every round").layout["xaxis"]["dtick"] == dtick


def test_a_page_of_commands_has_no_sections_of_what_they_do_not_tell(tmp_path, capsys):
    words = ["--command=echo t=1", "--command=echo t=2", "--metric=t=(.*)", "--rounds=2", "--json"]
    assert main(["compare", *words, f"--out={tmp_path / 'c'}"]) == 0
    capsys.readouterr()
    comparison = Comparison.load(tmp_path / "c" / "comparison.json")
    document = comparison_document(comparison, tmp_path / "c")
    titles = [one.title for one in document.sections]
    assert titles == ["How they compare", "Topology", "Environment and command"]
    assert main(["report", str(tmp_path / "c"), "--format=md"]) == 0
    said = capsys.readouterr().out
    assert "None" not in said and "{}" not in said and "are not available" not in said


def test_a_report_of_an_experiments_file_says_what_to_do(tmp_path, capsys):
    path = tmp_path / "experiment.toml"
    path.write_text("rounds = 2\n")
    assert main(["report", str(path)]) == 2
    assert (
        f"outpace compare {path}, then call outpace report with the directory"
        in capsys.readouterr().err
    )


def test_all_verdicts_are_printed_with_the_page(tmp_path, capsys):
    (tmp_path / "comparison.json").write_text(compared(LONG).model_dump_json())
    assert main(["report", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("Fastest: ddp") and said.count("slower than ddp") == 2
    assert json.loads((tmp_path / "comparison.json").read_text())["stopped"]
