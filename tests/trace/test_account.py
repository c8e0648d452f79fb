"""The account of memory: what lies there, extended against recorded, traced against measured."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from outpace.catalog.accelerators import ACCELERATORS
from outpace.experiment.verify import plan_for
from outpace.parallel.ring_kernels import Flash
from outpace.planner.model.flops import parameter_count
from outpace.records.model import ModelSpec
from outpace.records.plan import Plan
from outpace.records.ranks import Ranks
from outpace.records.settings import TrainSettings
from outpace.trace.account import account, record_parts, shallow_depths, summarise_parts
from outpace.trace.device import Rules, attention_backward_bytes
from outpace.trace.measure import measure
from outpace.trace.steps import Workload

pytestmark = pytest.mark.fakeworld

DEEP = ModelSpec.parse(
    {"family": "llama", "layers": 13, "hidden": 64, "heads": 4, "kv_heads": 4, "vocab": 512,
     "max_positions": 256, "tied": True},
    "test",
)  # fmt: skip
SHALLOW = DEEP.model_copy(update={"layers": 3})
SETTINGS = TrainSettings(lr=1e-3)
SLOW = pytest.mark.slow


def plan_of(strategy, **options):
    plan = plan_for(strategy, 1 if strategy == "single" else 4, "fp32")
    return Plan.parse({**plan.model_dump(), **options}, "test")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("single", {"precision": "bf16", "checkpointing": "selective"}),
        pytest.param("single", {"checkpointing": "full", "checkpoint_every": 2}, marks=SLOW),
        pytest.param("ddp", {"optimizer": "adamw-foreach"}, marks=SLOW),
        pytest.param("zero3", {"checkpointing": "full"}, marks=SLOW),
        pytest.param("tp", {"optimizer": "adamw-for-loop"}, marks=SLOW),
    ],
)
def test_equal_layers_are_extended_exactly(strategy, options):
    plan = plan_of(strategy, **options)
    assert shallow_depths(DEEP, plan) is not None
    rules = Rules(ACCELERATORS["H100 SXM"])
    extended = account(DEEP, plan, seq_len=64, accumulation=2, accelerator=rules.accelerator)
    work = Workload(DEEP, plan, 64, 2, SETTINGS)
    whole = summarise_parts(record_parts(work, 0, rules, 8), plan, 0, rules)
    assert extended.peak == whole.peak
    assert extended.activations_by_module == whole.activations_by_module
    assert (extended.flops, extended.bytes_moved) == (whole.flops, whole.bytes_moved)
    assert extended.reserved_bytes == whole.reserved_bytes


def test_a_played_device_is_full_at_what_its_driver_leaves():
    words = {"family": "llama", "layers": 2, "hidden": 1024, "heads": 16, "kv_heads": 4,
             "vocab": 32000, "max_positions": 1024, "tied": False}  # fmt: skip
    spec, chip = ModelSpec.parse(words, "test"), ACCELERATORS["RTX 4090"]
    plan = Plan(precision="bf16-master", micro_batch=4, checkpointing="full")
    traces = record_parts(Workload(spec, plan, 1024, 1, SETTINGS), 0, Rules(chip), 8)

    def summarise(usable_bytes):
        card = chip.model_copy(update={"usable_bytes": usable_bytes})
        return summarise_parts(traces, plan, 0, Rules(card))

    roomy = summarise(chip.usable_bytes)
    assert roomy.device_bytes == roomy.reserved_bytes + roomy.library_bytes
    # One byte short of all, empty segments go back, though the printed memory is far from full.
    tight = summarise(roomy.device_bytes - 1)
    assert tight.peak == roomy.peak and tight.device_bytes < roomy.device_bytes


def test_a_broadcast_that_is_cut_by_bytes_is_recorded_of_all_layers():
    wide = {"layers": 10, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 32000,
            "gated": True}  # fmt: skip
    spec = ModelSpec.parse({**DEEP.model_dump(), **wide, "head_dim": 128, "tied": False}, "test")
    plan = Plan(strategy="ddp", dp_replicate=2, precision="bf16-master", optimizer="adamw-fused")
    assert shallow_depths(spec, plan) is not None
    found = account(spec, plan, seq_len=16, accelerator=ACCELERATORS["H100 SXM"])
    # Weights and gradients in 16 bits, master weights and two moments in fp32.
    assert found.reserved_bytes > found.peak_memory_bytes > 16 * parameter_count(spec)


@pytest.mark.parametrize(
    "options",
    [{}, {"precision": "bf16"}, {"checkpointing": "full"},
     pytest.param({"optimizer": "adamw-8bit"}, marks=SLOW),
     {"precision": "bf16-pure", "optimizer": "adamw-8bit", "loss": "plain"},
     {"offload_optimizer": "disk"}],
    ids=str,
)  # fmt: skip
def test_the_trace_is_what_two_real_steps_take(options):
    plan = Plan(micro_batch=4, **options)
    traced = account(SHALLOW, plan, seq_len=128)
    measured = measure(Workload(SHALLOW, plan, 128, 1, SETTINGS), Ranks())
    assert measured.source == "measured"
    assert measured.resident_bytes > 0
    assert traced.peak_memory_bytes == pytest.approx(measured.allocated_bytes, rel=1e-3)
    if "offload_optimizer" not in options:  # files that are mapped are tensors too
        assert dict(traced.peak.by_kind) == pytest.approx(dict(measured.peak.by_kind), rel=0.01)


def test_weights_in_4_bits_come_from_the_host():
    """On a device the peak is of training, not of the fp32 weights that 4 bits are made of."""
    plan = Plan(lora_rank=4, base="nf4", loss="chunked")
    device, spec = ACCELERATORS["H100 SXM"], DEEP.model_copy(update={"hidden": 512, "layers": 4})
    on_host, on_device = (
        account(spec, plan, seq_len=8, accelerator=where) for where in (None, device)
    )
    assert on_host.peak.part == "prepare"
    assert on_device.peak.part != "prepare"
    assert on_device.peak.nbytes < on_host.peak.nbytes + sum(Rules(device).workspaces())


@pytest.mark.slow
def test_a_trace_leaves_nothing_behind_that_weights_in_4_bits_are_made_with():
    """In a process of its own: bitsandbytes computes its levels once, in whatever comes first."""
    script = """
import torch
from tests.trace.test_account import DEEP, Plan, account
from outpace.nn.nf4 import dequantize, quantize

account(DEEP, Plan(lora_rank=4, base="nf4"), seq_len=8)
weight = torch.randn(96, 64, generator=torch.Generator().manual_seed(0))
made = dequantize(list(quantize(weight).values()), weight.shape, weight.dtype)
assert (made - weight).norm() < 0.11 * weight.norm(), (made - weight).norm() / weight.norm()
"""
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", script], cwd=root, check=True)


def test_weights_and_states_are_what_the_plan_says():
    parameters = parameter_count(SHALLOW)
    alone = account(SHALLOW, Plan(), seq_len=32).peak.by_kind
    assert alone["weights"] == 4 * parameters
    assert alone["optimizer state"] == pytest.approx(8 * parameters, rel=1e-3)
    on_host = account(SHALLOW, Plan(offload_parameters="cpu"), seq_len=32).peak.by_kind
    assert on_host["weights"] == 4 * parameters
    away = account(
        SHALLOW, Plan(offload_parameters="cpu"), seq_len=32, accelerator=ACCELERATORS["H100 SXM"]
    ).peak  # weights, moments and gradients are the host's
    assert away.by_kind["offloaded"] >= 4 * parameters
    assert "weights" not in away.by_kind and away.by_kind.get("optimizer state", 0) < 4096
    shared = account(SHALLOW, Plan(strategy="zero3", dp_shard=16), seq_len=32).peak.by_kind
    assert shared["weights"] == pytest.approx(4 * parameters / 16, rel=0.02)
    disk = account(SHALLOW, Plan(offload_optimizer="disk", micro_batch=4), seq_len=256)
    assert disk.peak.by_kind["offloaded"] == 8 * parameters
    assert disk.peak_memory_bytes == sum(disk.peak.by_kind.values()) - 8 * parameters


def test_no_rank_ever_has_all_weights_of_a_sharded_model():
    deep = DEEP.model_copy(update={"layers": 60})
    traced = account(deep, Plan(strategy="zero3", dp_shard=64, checkpointing="full"), seq_len=16)
    assert traced.peak_memory_bytes < 4 * parameter_count(deep)


def test_a_pipelines_first_stage_keeps_more_than_its_last():
    plan = Plan(strategy="1f1b", pp=3, pp_microbatches=6)
    first, last = (account(SHALLOW, plan, seq_len=64, rank=rank) for rank in (0, 2))
    kept = [one.activations_by_module for one in (first, last)]
    in_blocks = [sum(n for name, n in one.items() if "blocks" in name) for one in kept]
    assert in_blocks[0] > 2 * in_blocks[1]


def test_cuda_takes_memory_by_its_rules():
    hopper = ACCELERATORS["H100 SXM"]
    plan = Plan(precision="bf16", micro_batch=2)
    cuda = account(SHALLOW, plan, seq_len=128, accelerator=hopper)
    assert cuda.device == "cuda"
    assert cuda.peak.by_kind["workspaces"] == 2 * 32 * 2**20
    assert all(nbytes % 512 == 0 for nbytes in cuda.peak.by_kind.values())
    # B 2, H 8, S 100 → 128, C 64: fp32 sums and one more a query; K 2 < H: two of (B, H, T, C).
    query, key = torch.empty(2, 8, 100, 64), torch.empty(2, 2, 50, 64, dtype=torch.bfloat16)
    assert attention_backward_bytes(query, key) == 4 * 2 * 8 * 128 * 65 + 2 * 2 * 8 * 50 * 64 * 2


def test_documents_on_a_gpu_need_no_mask():
    """Lists of blocks, and what causal attention keeps: S × S values would be 256 KiB."""
    hopper, plan = ACCELERATORS["H100 SXM"], Plan(precision="bf16", micro_batch=2)
    inside = TrainSettings(lr=1e-3, document_attention=True)
    uncompiled = inside.model_copy(update={"compile": False})
    # Positions count from each document's start, so that rotary tables are a sample's own.
    tables = 2 * 2 * 256 * 16 * 4
    for accelerator, mask in ((hopper, 0), (None, 2 * 256 * 256)):
        on = {"seq_len": 256, "accelerator": accelerator}
        causal = account(SHALLOW, plan, settings=SETTINGS, **on).peak.nbytes
        documents = account(SHALLOW, plan, settings=inside, **on).peak.nbytes
        if accelerator is not None:  # then nothing is compiled for masks either
            assert account(SHALLOW, plan, settings=uncompiled, **on).peak.nbytes > documents + 2**17
        assert mask <= documents - causal < mask + tables + 2 * 256 * 4 + 64 * 1024


def test_a_ring_on_a_gpu_is_traced_with_its_kernel(monkeypatch):
    taken = []
    forward = Flash.forward
    monkeypatch.setattr(Flash, "forward", lambda *args: taken.append(1) or forward(*args))
    plan = Plan(strategy="cp", cp=2, precision="bf16")
    for accelerator in (ACCELERATORS["H100 SXM"], None):
        account(SHALLOW, plan, seq_len=64, accelerator=accelerator)
        assert bool(taken) == (accelerator is not None)
        taken.clear()


def test_dropout_keeps_a_byte_an_element_on_an_accelerator():
    """The CPU's keeps factors in the dtype of its input, twice as much in bf16."""
    dropped = DEEP.model_copy(update={"dropout": 0.1})
    plan = Plan(micro_batch=8, precision="bf16")
    rules = Rules(ACCELERATORS["H100 SXM"])
    kept = [
        account(spec, plan, seq_len=64, accumulation=1, accelerator=rules.accelerator).peak.by_kind[
            "activations"
        ]
        for spec in (DEEP, dropped)
    ]
    assert kept[1] - kept[0] == (2 * DEEP.layers + 1) * 8 * 64 * DEEP.hidden
