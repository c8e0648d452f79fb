"""What can be asked for beside a strategy: it works, or it is refused with a way that does."""

import json
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from outpace.records.compiled import COMPILED, CompileTrial
from outpace.records.errors import BadInputError
from outpace.records.pipelines import SCHEDULES, refusal
from outpace.records.plan import GATHERS, Strategy

OPTIONS = Path(__file__).with_name("options.py")
DOCS = Path(__file__).parents[2] / "docs" / "concepts" / "compile.md"
SPLIT = {name for name, schedule in SCHEDULES.items() if schedule.splits_backward}
ONE_BACKWARD = ("checkpointing selective", "checkpointing full", "checkpointing some",
                "recomputed dropout", "loss chunked", "compile")  # fmt: skip
REFUSED = {(strategy, option) for strategy in SPLIT for option in ONE_BACKWARD}
REFUSED |= {("tp", "loss chunked")}
REFUSED |= {(strategy, "offload parameters") for strategy in (*get_args(Strategy), "servers")
            if strategy not in GATHERS}  # fmt: skip
# Of losses in 16 bits; all else is float64.
LOW = {"bf16": 2e-3, "fp16": 1e-3}


def tried(options, *strategies):
    done = subprocess.run(
        [sys.executable, str(OPTIONS), options, *strategies],
        capture_output=True, text=True, timeout=2900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(found):
    assert found.get("crashed") is None, found
    case = (found["strategy"], found["option"])
    assert ("refused" in found) == (case in REFUSED), found
    if "refused" in found:
        assert "Use " in found["refused"] or "Leave " in found["refused"], found
    else:
        assert found["apart"] < LOW.get(found["option"], 1e-9), found


@pytest.mark.gloo
@pytest.mark.slow
def test_an_overflow_on_one_rank_is_a_skipped_step_on_all(runnable):
    strategies = runnable(("dp", "ps", "servers", "ddp", "zero3", "gpipe", "zbv", "tp"))
    found = tried("overflow", *strategies)
    assert [line["strategy"] for line in found] == list(strategies)
    for line in found:
        check(line)


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_every_lever_works_under_every_strategy_or_is_refused():
    found = tried("all")
    assert {line["strategy"] for line in found} >= set(get_args(Strategy)) - {"single", "horovod"}
    for line in found:
        check(line)


def test_the_table_of_compilation_has_every_strategy_and_is_what_refuses():
    assert set(get_args(Strategy)) - {"horovod"} <= set(COMPILED)
    for strategy in SPLIT:
        why_not = refusal(strategy, pp=2, microbatches=4, compiled=True)
        assert COMPILED[strategy].issue in why_not
    assert {name for name, compiled in COMPILED.items() if not compiled.works} == SPLIT


def test_a_no_has_its_error():
    with pytest.raises(BadInputError, match="Give an error if and only if"):
        CompileTrial.parse({"works": False}, "test")


def test_the_docs_have_the_table():
    text = DOCS.read_text(encoding="utf-8")
    for strategy, compiled in COMPILED.items():
        (row,) = [line for line in text.splitlines() if line.startswith(f"| `{strategy}` |")]
        assert ("| yes |" in row) == compiled.works, row
        assert (f"| {compiled.region} |" in row) == compiled.works, row
        assert compiled.issue is None or compiled.issue in row
    assert all(compiled.error in text for compiled in COMPILED.values() if compiled.error)
