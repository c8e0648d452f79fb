"""Memory of adapters in closed form: parameters by hand, what must hold, and the trace."""

from dataclasses import replace

import numpy as np
import pytest

from outpace.catalog.accelerators import ACCELERATORS
from outpace.catalog.models import PRESETS
from outpace.jobs.planning.model_outline import find_outline
from outpace.planner.memory.peak import anatomy, least_bytes, peak_bytes, reserved_bytes
from outpace.planner.memory.setup import MemoryQuestion
from outpace.planner.model.adapters import AdapterSettings, can_plan_adapters, nf4_bytes
from outpace.planner.model.outline import outline, parameters
from outpace.planner.pipeline.stages import representatives
from outpace.planner.plan_columns import PlanBatch, of_plans
from outpace.records.errors import BadInputError
from outpace.records.model import ModelSpec
from outpace.records.plan import Plan
from outpace.trace.account import account

H100 = ACCELERATORS["H100 SXM"]
LLAMA = ModelSpec.parse(
    {"family": "llama", "layers": 4, "hidden": 256, "heads": 8, "kv_heads": 4, "ffn": 640,
     "vocab": 512, "max_positions": 512},
    "test",
)  # fmt: skip
GPT = ModelSpec.parse(
    {"family": "gpt2", "layers": 4, "hidden": 256, "heads": 8, "vocab": 512,
     "max_positions": 512},
    "test",
)  # fmt: skip
ZERO3 = {"strategy": "zero3", "dp_shard": 4}
DDP = {"strategy": "ddp", "dp_replicate": 4}
PURE = {"precision": "bf16-pure", "optimizer": "adamw-bf16"}


def columns_of(plan: Plan, layers: int = 4, passes: int = 1) -> PlanBatch:
    return of_plans([plan], plan.samples_per_pass * plan.data_parallel * passes, layers)


def lora(**values) -> Plan:
    return Plan(**{"lora_rank": 8, "micro_batch": 4, **values})


@pytest.mark.parametrize("base", ["fp32", "nf4"])
def test_weights_and_states_by_hand(base):
    """Frozen weights in their format, adapters, and 8 bytes of state for each of theirs."""
    described = outline(LLAMA, "x")
    held = anatomy(MemoryQuestion(described, 8, "cuda"), columns_of(lora(base=base, micro_batch=1)))
    shapes = [(256, 256)] * 2 + [(256, 128)] * 2 + [(256, 640)] * 3
    sizes = [rows * width for rows, width in shapes]
    adapters = 4 * 8 * sum(rows + width for rows, width in shapes)
    rest = parameters(described) - 4 * sum(sizes)
    frozen = 4 * (sum(map(nf4_bytes, sizes)) if base == "nf4" else 4 * sum(sizes))
    assert held["weights"][0] == frozen + 4 * rest + 4 * adapters
    assert held["optimizer state"][0] == 8 * adapters
    assert AdapterSettings(8).trained_parameters(described) == adapters


def test_a_matrix_in_4_bits_takes_what_qlora_says():
    """Dettmers et al., arXiv 2305.14314, §3: 4 + 8/64 + 32/(64 · 256) = 4.127 bits a value."""
    assert 8 * nf4_bytes(1 << 24) / (1 << 24) == pytest.approx(4.127, abs=1e-3)


def test_llama_8b_with_qlora_fits_a_consumer_gpu_where_all_weights_do_not():
    model = outline(PRESETS["llama-3.1-8b"].spec, "llama-3.1-8b")
    card = ACCELERATORS["RTX 4090"]
    plan = lora(base="nf4", lora_rank=16, precision="bf16-master", micro_batch=1,
                checkpointing="full")  # fmt: skip
    columns = columns_of(plan, model.layers)
    assert reserved_bytes(MemoryQuestion(model, 2048), columns)[0] < card.usable_bytes
    whole = replace(columns, adapters=np.array([None], dtype=object))
    assert reserved_bytes(MemoryQuestion(model, 2048), whole)[0] > card.usable_bytes


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("axes", [{}, DDP, ZERO3, {**ZERO3, "strategy": "hsdp"}], ids=str)
def test_kinds_are_parts_of_the_peak(axes, device):
    for plan in (lora(**axes), lora(**axes, base="nf4", precision="bf16", lora_dropout=0.1)):
        for targets in (("all",), ("q", "v"), ("down",), ("out", "up")):
            columns = columns_of(plan.model_copy(update={"lora_targets": targets}))
            held = anatomy(MemoryQuestion(outline(LLAMA, "x"), 128, device), columns)
            for kind, nbytes in held.items():
                assert np.isfinite(nbytes).all() and (nbytes >= -1).all(), kind
            peak = peak_bytes(MemoryQuestion(outline(LLAMA, "x"), 128, device), columns)
            assert np.allclose(sum(held.values()), peak)
            assert least_bytes(
                MemoryQuestion(outline(LLAMA, "x"), 128, device), columns
            ) <= reserved_bytes(MemoryQuestion(outline(LLAMA, "x"), 128, device), columns)


@pytest.mark.parametrize(
    ("smaller", "larger"),
    [
        (lora(base="nf4"), lora()), (lora(lora_rank=2), lora()), (lora(**ZERO3), lora()),
        (lora(lora_targets=("q", "v")), lora()), (lora(checkpointing="full"), lora()),
        (lora(), lora(lora_dropout=0.1)), (lora(micro_batch=1), lora()),
        (lora(), Plan(micro_batch=4)),
    ],
)  # fmt: skip
def test_what_takes_less(smaller, larger):
    few, many = (
        peak_bytes(MemoryQuestion(outline(LLAMA, "x"), 256, "cuda"), columns_of(plan))[0]
        for plan in (smaller, larger)
    )
    assert few < many


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (lora(strategy="tp", tp=2), "adapters with strategy tp"),
        (lora(offload_optimizer="cpu"), "adapters with offload_optimizer cpu"),
        (lora(optimizer_in_backward=True), "adapters with optimizer_in_backward True"),
        (lora(precision="fp64"), "adapters with precision fp64"),
        (lora(optimizer="muon"), "adapters with optimizer muon"),
    ],
)
def test_what_is_not_known_is_refused(plan, words):
    with pytest.raises(BadInputError, match=words):
        peak_bytes(MemoryQuestion(outline(LLAMA, "x"), 64), columns_of(plan))


def test_what_can_be_planned_with_adapters():
    assert can_plan_adapters(outline(LLAMA, "x"), {"precision": "bf16", "strategy": "ddp", "tp": 1})
    for values in ({"offload_parameters": "cpu"}, {"precision": "fp8"}, {"tp": 2}):
        assert not can_plan_adapters(outline(LLAMA, "x"), values)
    assert not can_plan_adapters(find_outline("mixtral-8x7b")[1], {})


def test_a_target_that_the_model_lacks_is_named():
    with pytest.raises(BadInputError, match=r"lora_targets gate: .* Use any of q, k, v, out, up"):
        peak_bytes(MemoryQuestion(outline(GPT, "x"), 64), columns_of(lora(lora_targets=("gate",))))


def as_traced(spec, plan, seq_len=256, passes=1, accelerator=None):
    traced = max(
        account(spec, plan, seq_len=seq_len, accumulation=passes, rank=rank,
                accelerator=accelerator).peak_memory_bytes
        for rank in representatives(plan)
    )  # fmt: skip
    device = "cpu" if accelerator is None else "cuda"
    columns = columns_of(plan, spec.layers, passes)
    found = peak_bytes(MemoryQuestion(outline(spec, "x"), seq_len, device), columns)[0]
    assert found == pytest.approx(traced, rel=0.02)


@pytest.mark.fakeworld
@pytest.mark.parametrize(
    ("spec", "plan", "accelerator"),
    [
        (LLAMA, lora(base="nf4", precision="bf16-master", checkpointing="full"), H100),
        (GPT, lora(**ZERO3, precision="bf16"), None),
        (LLAMA, lora(**DDP, lora_targets=("q", "v"), lora_dropout=0.1), H100),
    ],
)
def test_as_traced(spec, plan, accelerator):
    as_traced(spec, plan, accelerator=accelerator)


@pytest.mark.fakeworld
def test_ddp_sends_all_weights_before_the_first_step():
    """With few tokens the copy that it sends is more than gradients, state and activations."""
    as_traced(LLAMA, lora(**DDP, lora_rank=64, micro_batch=1), seq_len=16)


MODES = ("none", "selective", "full")
PRECISIONS = ({}, {"precision": "bf16"}, {"precision": "bf16-master"}, PURE)


@pytest.mark.slow
@pytest.mark.fakeworld
@pytest.mark.parametrize("accelerator", [None, H100], ids=["cpu", "h100"])
@pytest.mark.parametrize("spec", [LLAMA, GPT], ids=["llama", "gpt2"])
@pytest.mark.parametrize("axes", [{}, DDP, ZERO3], ids=["single", "ddp", "zero3"])
@pytest.mark.parametrize("number", range(6))
def test_every_base_precision_and_mode_as_traced(number, axes, spec, accelerator):
    """Of 24 combinations of base, precision and mode six for each model, device and strategy."""
    kind = number + 6 * (spec is GPT) + 12 * (accelerator is None)
    base, (precision, mode) = ("fp32", "nf4")[kind % 2], divmod(kind // 2, 3)
    values = {**axes, **PRECISIONS[precision], "checkpointing": MODES[mode], "base": base}
    as_traced(spec, lora(**values), accelerator=accelerator)


@pytest.mark.slow
@pytest.mark.fakeworld
@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("axes", [{}, DDP, ZERO3], ids=["single", "ddp", "zero3"])
def test_few_tokens_as_traced(axes, passes):
    """Weights, gradients and states are most of the peak."""
    as_traced(LLAMA, lora(**axes, lora_rank=64, micro_batch=1), seq_len=16, passes=passes)
