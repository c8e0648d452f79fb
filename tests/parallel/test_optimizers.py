"""Optimizers under strategies: equal to one process, stepped in backward, crossing checkpoints."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from outpace.records.errors import BadInputError
from outpace.records.plan import Plan

pytestmark = pytest.mark.gloo

CROSSINGS = Path(__file__).with_name("optimizer_crossings.py")


@pytest.mark.parametrize(
    ("strategies", "options"),
    [
        ("zero3,tp", "optimizer=adafactor"),
        ("single,zero2,zero3", "optimizer_in_backward=true"),
        pytest.param("all", "optimizer=adafactor", marks=pytest.mark.slow),
        pytest.param("all", "optimizer=sgd", marks=pytest.mark.slow),
        pytest.param("all", "optimizer=adamw-foreach", marks=pytest.mark.slow),
        pytest.param(
            "single,zero2,zero3", "optimizer_in_backward=true,checkpointing=full,optimizer=sgd",
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_an_exact_optimizer_equals_one_process(strategies, options, on_ranks):
    flags = ["--json", "--strategy", strategies, "--levers", options]
    for verdict in on_ranks(2, "outpace", "verify", *flags)["verdicts"]:
        assert verdict["passed"] and verdict["worst_relative_difference"] < 1e-9, verdict


FEW = (
    "adamw-8bit,fp32,single,zero3@2", "adamw-bf16,bf16-pure,zero1@2,1f1b@2",
    "adamw-for-loop,bf16-master,zero1@2,tp@2", "adamw-for-loop,bf16-master,servers@2,single",
)  # fmt: skip
MORE = (
    "adamw-4bit,bf16-pure,zero3@2,zero1@2", "adamw-bf16,bf16-pure,ddp@2,ring@2",
    "adamw-for-loop,fp16-master,zero1@2,single",
    "muon,fp32,zero3@2,tp@2", "adafactor,fp64,tp@2,zero3@2", "sgd,fp64,single,1f1b@2",
    "adamw-8bit,bf16-pure,servers@2,dp@2", "muon,bf16,zero1@2,hsdp@4",
    "adamw-for-loop,fp16-master,zero3@2,cp@2",
)  # fmt: skip
# What follows differs by what matmuls and gradients are rounded to.
OFF = {"fp64": 1e-12, "fp32": 1e-4, "bf16": 5e-3, "bf16-pure": 5e-3, "fp16-master": 1e-3,
       "bf16-master": 5e-3}  # fmt: skip


@pytest.mark.parametrize("cases", [FEW, MORE])
@pytest.mark.slow
def test_a_run_goes_on_under_another_strategy(tmp_path, cases):
    done = subprocess.run(
        [sys.executable, str(CROSSINGS), str(tmp_path), *cases],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(said) == len(cases)
    for line in said:
        for rank in line["ranks"]:
            assert rank["changed"] == [], line  # bit for bit what the files hold
            assert rank["off"] < OFF[line["case"][1]], line
        for name in set.intersection(*(set(rank["ends"]) for rank in line["ranks"])):
            # What several ranks hold stays the same: also a tied embedding on two stages.
            assert len({rank["ends"][name] for rank in line["ranks"]}) == 1, name


@pytest.mark.slow
def test_master_weights_equal_one_process_and_exchange_what_is_said(on_ranks):
    """Gradients of several micro-batches are added up in fp32, and exchanged in bf16."""
    strategies = "ddp,zero1,ps,gpipe,tp,cp,zero3"
    flags = ["--json", "--strategy", strategies, "--precision", "bf16-master"]
    for verdict in on_ranks(2, "outpace", "verify", *flags)["verdicts"]:
        assert verdict["passed"], verdict
        assert verdict["bytes_by_kind"] == verdict["bytes_by_kind_formula"], verdict


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        ({"strategy": "ddp", "dp_replicate": 2}, "Use strategy single, zero2, zero3 or hsdp"),
        ({"strategy": "gpipe", "pp": 2, "pp_microbatches": 2}, "keeps all gradients until"),
        ({"precision": "fp16"}, "before precision fp16 detects an overflow"),
    ],
)
def test_the_optimizer_in_backward_is_refused_where_it_cannot_be(plan, why):
    with pytest.raises(BadInputError, match=why):
        Plan.parse({**plan, "optimizer_in_backward": True}, "test")


def test_pure_precisions_and_fp8_are_refused_where_they_cannot_be():
    with pytest.raises(BadInputError, match="Use optimizer adamw-bf16, adamw-8bit or"):
        Plan.parse({"precision": "bf16-pure", "optimizer": "adamw-fused"}, "test")
    with pytest.raises(BadInputError, match="zero3 instead of tp"):
        Plan.parse({"strategy": "tp", "tp": 2, "precision": "fp8"}, "test")
