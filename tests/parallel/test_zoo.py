"""Modules that nobody of the project wrote, under every strategy: as recorded, and never wrong.

benchmarks/zoo.py records; docs/concepts/parity.md has the table. Each cell is equal to one process,
or refused with the recorded sentence, or trains otherwise where one process cuts the batch alike,
or by state that is in no buffer, of which the check of the first batch tells.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from outpace.parallel.parity.counted_buffers import (
    explain_counted_attributes,
    explain_counted_buffers,
)
from outpace.parallel.parity.cut_cause import explain_cut
from outpace.parallel.parity.cut_difference import CountDifference, explain_counts
from outpace.parallel.parity.first_batch_messages import (
    explain_gradient_cut,
    explain_moved_buffers,
    explain_repeated_writes,
)
from outpace.parallel.parity.mixed_samples import MixedDifference

pytestmark = pytest.mark.gloo

ROOT = Path(__file__).parents[2]
RECORDED = json.loads((ROOT / "benchmarks" / "results" / "zoo.json").read_text())["modules"]
# What is tried again, of a few modules: a family of transformers, skips, unused parameters, several
# dtypes. DEFAULT_SAMPLE is what the suite has time for.
SAMPLE = {
    "x_transformer": "zero3,1f1b",
    "unet": "zero2,gpipe",
    "bert_with_unused_pooler": "ddp,hsdp",
    "state_space": "zero1",
    "parameters_not_contiguous": "mp",
    "lists_as_arguments": "hsdp",
    "state_as_argument": "zero3",
    "running_averages_in_the_forward": "1f1b",
    "resnet": "ddp",
    "table_in_a_buffer_of_all_blocks": "1f1b",
    "modules_of_two_names": "gpipe",
    "two_parameters_of_one_storage": "ddp,zero3",
    "parameter_without_elements": "zero3",
    "scripted_blocks": "ddp",
    "frozen_until_a_step": "zero3",
    "cross_correlation_of_the_batch": "ddp",
    "compiled_blocks": "zb",
    "compiled_as_a_whole": "zero3",
    "parameters_overridden": "gpipe",
    "modules_swapped_by_the_forward": "1f1b",
    "nothing_without_positives": "hsdp",
    "copied_by_the_loss": "zero3",
    "t5": "1f1b",
    "gradients_of_samples": "zero3",
    "forces_by_gradients": "gpipe",
    "features_from_the_second_step": "1f1b",
}
DEFAULT_SAMPLE = {
    "x_transformer", "bert_with_unused_pooler", "running_averages_in_the_forward",
    "cross_correlation_of_the_batch", "compiled_as_a_whole", "features_from_the_second_step",
}  # fmt: skip
ADVICE = (
    "use ", "give ", "name ", "let it ", "make it ", "pad ", "run a batch ", "add it",
    "change param", "register th", "choose among", "return the",
    "return 0 times", "pass the", "pass its",
)  # fmt: skip


def load():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        spec = importlib.util.spec_from_file_location("zoo_judge", ROOT / "benchmarks" / "zoo.py")
        judge = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(judge)
    finally:
        sys.path.pop(0)
    return judge


ZOO = load()
ENTRIES = {name: entry for _, name, entry in ZOO.entries()}


def test_every_module_is_recorded_and_nothing_is_wrong():
    installed = {name for name, one in RECORDED.items() if one["file"] != "libraries"}
    assert installed <= set(ENTRIES) and len(RECORDED) >= 130
    cells = {
        (name, strategy): cell
        for name, one in RECORDED.items()
        for strategy, cell in one["cells"].items()
    }
    assert [key for key, cell in cells.items() if cell.startswith("wrong")] == []
    refusals = {cell for cell in cells.values() if cell.startswith("refused")}
    # Each says what else to do.
    assert [cell for cell in refusals if not any(word in cell.lower() for word in ADVICE)] == []


def test_strategies_that_pipelines_name_in_refusals_do_not_refuse():
    """Those of known causes; a refusal without one names zero3, which may refuse another way."""
    to_ddp = (
        "but a pipeline stage", "has only the parameters of its own blocks",
        "inside a torch.func transform",
    )  # fmt: skip
    refusing, seen = [], 0
    for name, cells in ((name, one["cells"]) for name, one in RECORDED.items()):
        for strategy, cell in cells.items():
            named = "ddp" if any(words in cell for words in to_ddp) else None
            named = "mp" if "or use mp, which" in cell else named
            if named is not None:
                seen += 1
                if cells[named].partition(":")[0] not in ("equal", "cut", "state"):
                    refusing.append((name, strategy, cells[named]))
    assert refusing == [] and seen > 50


@pytest.mark.parametrize(
    "name",
    [one if one in DEFAULT_SAMPLE else pytest.param(one, marks=pytest.mark.slow) for one in SAMPLE],
)
def test_a_few_are_as_recorded(name):
    found = ZOO.judge(ENTRIES[name], SAMPLE[name])
    assert found == {strategy: RECORDED[name]["cells"][strategy] for strategy in found}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", [name for name in RECORDED if name in ENTRIES])
def test_all_are_as_recorded(name):
    assert ZOO.judge(ENTRIES[name]) == RECORDED[name]["cells"]


def test_what_the_check_says_of_a_cut_is_known_as_that():
    """Else a cell is recorded as wrong, of which the check tells."""
    said = (
        explain_counts(CountDifference(0.5, 1.0)),
        explain_cut(0.1, "it is cut", "larger micro-batches"),
        explain_gradient_cut(MixedDifference(gradient=0.1, names=("a",))),
        explain_counted_buffers(["a"], 0.5, 2), explain_counted_attributes(["a"], 2),
        explain_moved_buffers(["a"]), explain_repeated_writes(["a"], 2),
    )  # fmt: skip
    assert [one for one in said if not one.startswith(ZOO.OF_THE_CUT)] == []


@pytest.fixture
def last_commits():
    """The numbers of the last commit and of the one before it."""
    git = ["git", "-C", str(ROOT), "rev-list", "-2", "HEAD"]
    found = subprocess.run(git, capture_output=True, text=True, check=False).stdout.split()
    if len(found) < 2:
        pytest.skip("needs a repository with two commits")
    return found


def test_rows_of_a_commit_or_later_ones_are_not_recorded_again(last_commits):
    """What is older, of no known commit, or of some strategies alone is."""
    head, before = last_commits
    whole = dict.fromkeys(ZOO.ALL, "equal")
    assert len(ZOO.ALL) == 15

    def recorded(cells, *commits):
        return {"cells": cells, "commits": dict(zip(cells, commits * len(cells), strict=False))}

    assert ZOO.is_recorded(recorded(whole, head), head)
    assert ZOO.is_recorded(recorded(whole, head), before)
    assert ZOO.is_recorded(recorded({"all": "draws"}, head), before)
    assert not ZOO.is_recorded(recorded(whole, before), head)
    assert not ZOO.is_recorded(recorded(whole, head, before), head)
    assert not ZOO.is_recorded(recorded(whole, "0" * 40), head)
    assert not ZOO.is_recorded(recorded({"ddp": "equal"}, head), head)
    assert not ZOO.is_recorded({}, head)


def test_cells_of_a_kind_are_judged_again_alone(last_commits):
    """Those of refusals, when words have changed: not the equal ones, nor what is as new."""
    head, before = last_commits
    row = {
        "cells": {"ddp": "equal", "zb": "refused: it has two blocks.", "tp": "refused: no plan."},
        "commits": {"ddp": before, "zb": before, "tp": head},
    }
    assert ZOO.cells_to_judge(row, "refused", None) == ["zb", "tp"]
    assert ZOO.cells_to_judge(row, "refused", head) == ["zb"]
    assert ZOO.cells_to_judge(row, "cut", head) == []
    assert ZOO.cells_to_judge({}, "refused", head) == []
