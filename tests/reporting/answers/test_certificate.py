"""A certificate in the terminal: the verdict first, and each reason once."""

import io

import pytest

from outpace.records.certificate import Certificate, ParityVerdict
from outpace.reporting.answers.certificate import certificate_answer
from outpace.reporting.terminal.answer import answer_text
from outpace.reporting.terminal.console import Console

STATE = (
    "the forward or the loss keeps loss.mean in an attribute from step to step, and the loss "
    "depends on it: under strategy {} each rank would keep its own, of its own samples."
)


def verdict(strategy, *, passed=False, refused=False, reason=None, cause=None):
    return ParityVerdict(
        strategy=strategy, mesh="dp_shard 2", precision="fp64", passed=passed, refused=refused,
        reason=reason, cause=cause, worst_relative_difference=None if refused else 1e-16,
        worst_tensor=None, tolerance=1e-9, bytes_on_wire=None, bytes_formula=None, exchanges={},
        exchanges_formula=None, bytes_by_kind={}, bytes_by_kind_formula=None,
    )  # fmt: skip


def shown(verdicts, width, skipped=None):
    certificate = Certificate.model_construct(
        verdicts=tuple(verdicts), model=None, module="mine.py:build", notes=(), processes=2,
        steps=3, global_batch=8, seq_len=None, skipped=skipped or {}, date="2026-11-30",
    )  # fmt: skip
    out = io.StringIO()
    Console(file=out, width=width).print(answer_text(certificate_answer(certificate)))
    return out.getvalue().lstrip()


REFUSED = [
    verdict(name, refused=True, reason=STATE.format(name)) for name in ("ddp", "zero1", "zero3")
]


@pytest.mark.parametrize("width", [80, 120])
def test_the_verdict_comes_first_and_equal_reasons_are_one(width):
    tp = "it has no layouts. Give some as `layouts`."
    told = [*REFUSED, verdict("gpipe", passed=True), verdict("tp", refused=True, reason=tp)]
    text = shown(told, width, {"mp": "it needs two blocks"})
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    counts = "(1 equal, 4 refused, 1 skipped)"
    first, _, _ = text.partition("\n  ")
    verdict_line = f"mine.py:build: equal to one process, or refused {counts}"
    assert " ".join(first.split()) == verdict_line
    assert "– ddp, zero1, zero3 refused:" in text and "– tp refused:" in text
    words = " ".join(text.split())
    assert words.count("the forward or the loss keeps") == 1
    assert "under these strategies each rank would keep its own" in words
    assert f"– tp refused: {tp}" in words and "– mp skipped: it needs two blocks" in words


def test_a_refusal_that_begins_with_the_strategy_is_said_once():
    stages = "{} on 2 ranks has 4 stages, but the model has 2 blocks (a, b). Use gpipe."
    names = ("interleaved", "zb", "dualpipev")
    told = [verdict(name, refused=True, reason=stages.format(name)) for name in names]
    words = " ".join(shown(told, 120).split())
    assert words.count("4 stages") == 1
    assert "– interleaved, zb, dualpipev refused: on 2 ranks they have 4 stages, but the" in words
    assert "– zb refused: zb on 2 ranks has 4 stages" in " ".join(shown(told[1:2], 120).split())


def test_what_differs_is_in_the_verdict_and_keeps_its_strategy_name():
    fault = "the gradient of a.weight is zero"
    told = [verdict("ddp", reason=fault), REFUSED[2]]
    text = shown(told, 120)
    assert text.startswith("mine.py:build: NOT equal to one process: ddp (1 NOT equal, 1 refused)")
    words = " ".join(text.split())
    assert f"✗ ddp: {fault}" in words and "under strategy zero3 each rank" in words
    assert words.index("ddp: the gradient") < words.index("zero3 refused")


def test_nothing_is_equal_where_all_is_refused():
    assert shown(REFUSED, 80).startswith("mine.py:build: nothing was proved (3 refused)")


def test_precisions_stand_beside_their_strategies_where_a_long_mesh_is_folded():
    mesh = "dp_replicate 2 × dp_shard 2 × tp 2 × pp 2 × cp 2"
    told = [verdict("3d", passed=True).model_copy(update={"mesh": mesh, "precision": one})
            for one in ("fp64", "bf16")]  # fmt: skip
    rows = [line.split() for line in shown(told, 60).splitlines()]
    assert [row[:3] for row in rows if row[:1] == ["✓"]] == [
        ["✓", "3d", "fp64"],
        ["✓", "3d", "bf16"],
    ]
    assert ["strategy", "in", "mesh", "off", "by"] in rows
