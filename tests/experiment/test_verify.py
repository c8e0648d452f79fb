"""The verifier passes what is right and names what is wrong."""

import json
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from outpace.records.plan import Strategy

pytestmark = pytest.mark.gloo

FAULTS = Path(__file__).with_name("faults.py")


def do(*arguments):
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


def test_every_strategy_equals_one_process(tmp_path):
    kept = tmp_path / "certificate.json"
    done = do("-m", "outpace", "verify", "--nproc", 2, "--json", "--out", kept)
    assert done.returncode == 0, done.stderr
    certificate = json.loads(done.stdout)
    assert json.loads(kept.read_text()) == certificate
    verdicts = {verdict["strategy"]: verdict for verdict in certificate["verdicts"]}
    assert list(verdicts) == list(get_args(Strategy))
    for verdict in verdicts.values():
        assert verdict["passed"] and verdict["worst_relative_difference"] < 1e-9
    assert verdicts["single"]["bytes_on_wire"] == 0
    # An all-reduce takes the gradients once; what else is sent is the totals.
    spec = certificate["model"]
    assert spec["tied"] and spec["kv_heads"] < spec["heads"] and spec["layers"] == 5
    assert verdicts["ddp"]["exchanges"]["allreduce"] >= 2


def test_hybrid_shards_equal_one_process():
    done = do("-m", "outpace", "verify", "--nproc", 4, "--json", "--strategy", "hsdp")
    assert done.returncode == 0, done.stderr
    (verdict,) = json.loads(done.stdout)["verdicts"]
    assert verdict["mesh"] == "dp_replicate 2 × dp_shard 2" and verdict["passed"]


FAMILIES = {
    "gpt2": {"family": "gpt2", "heads": 4},
    "bert": {"family": "bert", "heads": 4},
    "qwen3": {"family": "qwen3", "heads": 8, "kv_heads": 4, "ffn": 48, "tied": False},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_equals_one_process(tmp_path, family):
    """Of some gradients are truly zero: those of key projections' biases."""
    spec = {"layers": 3, "hidden": 32, "vocab": 97, "max_positions": 64, **FAMILIES[family]}
    model = tmp_path / "model.json"
    model.write_text(json.dumps(spec))
    done = do(
        "-m", "outpace", "verify", "--model", model, "--json",
        "--strategy", "single,dp,ddp,zero3,1f1b,tp,cp",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    verdicts = json.loads(done.stdout)["verdicts"]
    assert len(verdicts) == 7
    for verdict in verdicts:
        assert verdict["passed"] and verdict["worst_relative_difference"] < 1e-10


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_every_planted_fault_is_caught_and_named(strategy):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = do(*launcher, FAULTS, strategy)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert [name for name, verdict in said.items() if verdict["passed"]] == []
    reasons = {name: verdict["reason"] for name, verdict in said.items()}
    assert reasons["scaled_by_world_size"].startswith("gradient ")
    assert reasons["scaled_by_world_size"].endswith("(step 1) is off by 1 of its scale")
    assert reasons["norm_counts_replicas_twice"].startswith("norm before clipping (step 1)")
    named = "blocks.2.mlp.up.weight"
    assert reasons["one_gradient_doubled"].startswith(f"gradient {named} (step 1)")
    assert reasons["stale_all_gather"].startswith(f"used parameter {named} (step 2)")
    assert reasons["skipped_micro_batch"].startswith("loss ")
    assert named in reasons["gone"]
    if strategy == "ddp":
        assert "head.weight, which one process has not" in reasons["untied_embedding"]


def test_what_is_wrong_ends_with_1_and_a_sentence(tmp_path):
    done = do("-m", "outpace", "verify", "--strategy", "zero9")
    assert done.returncode == 2
    assert "there is no such strategy" in done.stderr and "'zero3'" in done.stderr
