"""A step that trains low-rank adapters beside frozen weights."""

from dataclasses import fields, replace

import numpy as np
import pytest

from outpace.catalog.models import PRESETS
from outpace.catalog.node_names import find_node
from outpace.catalog.stacks import STACKS
from outpace.planner.calibration.cluster import of_catalog
from outpace.planner.hardware.device import DeviceRates
from outpace.planner.hardware.links import Fabric, Protocol
from outpace.planner.model.adapters import NF4_BYTES
from outpace.planner.model.outline import outline, parameters
from outpace.planner.plan_columns import of_plans
from outpace.planner.step_time.adapters import Adapters, Target
from outpace.planner.step_time.estimate import StepTimes, estimate
from outpace.planner.step_time.parameters import weight_traffic_s
from outpace.planner.step_time.setup import StepTimeQuestion, set_up
from outpace.records.outline import AttentionShape, Mlp, Outline, Stack
from outpace.records.plan import Plan

RATE, NEVER, MOVED = 1e15, 1e30, 1e12
FLAT = DeviceRates(
    name="flat", kind="cuda", memory_bytes=None, peak_flops_per_s={"bf16": RATE},
    best_flops_per_s={"bf16": RATE}, multiprocessors=1, tiles=((1, 1, 1.0),), fixed_s=0.0,
    memory_bytes_per_s=NEVER, operator_s=0.0, attention_forward=1.0, attention_backward=1.25,
    attention_narrow=1.0, host_bytes_per_s=NEVER, host_memory_bytes_per_s=NEVER,
    disk_bytes_per_s=NEVER, curve=((1.0, 1.0), (2.0, 1.0)),
)  # fmt: skip
WIRED = Fabric(8, 100e9, 80e9, 50e9, (Protocol(0.0, 0.0, 0.0, 1.0),))
BLOCKS = Outline(
    name="blocks", hidden=1024, stacks=(Stack(layers=16, mlp=Mlp(width=4096), norms=0),),
    vocab=0, max_positions=1 << 20,
)  # fmt: skip
ON_UP = Adapters(8, {"up": Target(1)})
ATTENTION = AttentionShape(heads=8, kv_heads=8, head_dim=128, value_dim=128)


def step(question, samples=8, **values):
    plan = Plan.parse({"precision": "bf16-pure", "optimizer": "adamw-bf16", **values}, "test")
    times = estimate(question, of_plans([plan], samples, question.outline.layers))
    return {f.name: float(getattr(times, f.name)[0]) for f in fields(StepTimes)}


def test_frozen_weights_have_two_matmuls_and_adapters_three():
    question = StepTimeQuestion(BLOCKS, 512, FLAT, WIRED, other_program=True)
    tokens, frozen = 8 * 512, 16 * 2 * 1024 * 4096
    adapter = 16 * 8 * (1024 + 4096)
    everything = step(question, micro_batch=8)["products_s"]
    assert everything == pytest.approx(3 * 2 * tokens * frozen / RATE)
    found = step(replace(question, adapters=ON_UP), micro_batch=8)
    expected = 2 * tokens * (2 * frozen + 3 * adapter) / RATE
    assert sum(found.values()) - found["optimizer_s"] == pytest.approx(expected, rel=1e-6)
    again = step(replace(question, adapters=ON_UP), micro_batch=8, checkpointing="full")
    assert again["products_s"] == pytest.approx(
        # Of the blocks' second forward, the last matmul is left out.
        2 * tokens * (2.5 * frozen + 4 * adapter) / RATE,
        rel=0.01,
    )


def test_inputs_and_results_of_packed_matmuls_are_cast_if_the_stream_is_in_fp32():
    """Of an MLP, 1,024 and 4,096 numbers each way, and its activation moves twice the bytes."""
    slow = replace(FLAT, best_flops_per_s={"bf16": NEVER}, memory_bytes_per_s=MOVED)
    packed = replace(ON_UP, base_bytes=0.5, drops_inputs=False, scales_outputs=False)
    seconds = [
        sum(step(StepTimeQuestion(BLOCKS, 512, slow, WIRED, other_program=True, adapters=adapters),
                 micro_batch=8).values())
        for adapters in (packed, replace(packed, widened={"up": 1, "down": 1}))
    ]  # fmt: skip
    # Casts in both passes; activation, sums of the branch, and the adapter's sums twice as wide.
    casts = 2 * 6 * 2 * (1024 + 4096)
    wider = (2 + 3) * 4096 * 2 + 2 * 3 * 1024 * 2
    adapter = 2 * 6 * 1024 + 4096 * (6 + 4) + 1024 * 6
    moved = 16 * 8 * 512 * (casts + wider + adapter)
    assert seconds[1] - seconds[0] == pytest.approx(moved / MOVED, rel=0.05)


def test_results_of_packed_matmuls_are_copied_before_an_adapters_is_added():
    """Read and written in each forward, in fp32 if the stream is."""
    slow = replace(FLAT, best_flops_per_s={"bf16": NEVER}, memory_bytes_per_s=MOVED)
    for widened, item in (({}, 2), ({"up": 1, "down": 1}, 4)):
        packed = replace(ON_UP, base_bytes=0.5, widened=widened)
        seconds = [
            sum(step(StepTimeQuestion(BLOCKS, 512, slow, WIRED, other_program=True,
                                      adapters=replace(packed, copies_results=copies)),
                     micro_batch=8, checkpointing="full").values())
            for copies in (False, True)
        ]  # fmt: skip
        moved = 16 * 8 * 512 * 2 * 2 * item * 4096
        assert seconds[1] - seconds[0] == pytest.approx(moved / MOVED)


def test_a_device_waits_for_the_host_at_adapters_that_are_units_of_their_own():
    """Two units of an adapter in each pass, and no more than the frozen matmul leaves exposed."""
    slow = replace(FLAT, operator_s=30e-6)
    wraps = STACKS["outpace"].model_copy(update={"wraps_adapters": True})
    question = StepTimeQuestion(BLOCKS, 512, slow, WIRED, other_program=True, adapters=ON_UP)
    spread = {"strategy": "zero3", "dp_shard": 8, "checkpointing": "full"}

    def seconds(wrapped, samples):
        stack = wraps if wrapped else STACKS["outpace"]
        found = step(replace(question, stack=stack), 8 * samples, micro_batch=samples, **spread)
        return sum(found.values())

    tokens, frozen, low_rank = 512, 2 * 1024 * 4096, 2 * 8 * (1024 + 4096)
    ahead, back = tokens * (frozen + low_rank) / RATE, tokens * (frozen + 2 * low_rank) / RATE
    waits = 16 * (2 * (2 * 20 * 30e-6 - ahead) + 2 * 22 * 30e-6 - back)
    host = step(question, 8, micro_batch=1, **spread)["host_s"]
    assert seconds(True, 1) - seconds(False, 1) == pytest.approx(waits - host, rel=0.1)
    long = 1 + round(2 * 22 * 30e-6 / ahead)
    assert seconds(True, 2 * long) == pytest.approx(seconds(False, 2 * long))
    whole = step(replace(question, stack=wraps), 8, micro_batch=1)
    assert whole == step(question, 8, micro_batch=1)  # nothing is sharded


def test_adapters_alone_are_summed_and_stepped_while_shards_are_still_gathered():
    slow = replace(FLAT, memory_bytes_per_s=MOVED, hides=0.0)
    question = StepTimeQuestion(BLOCKS, 512, slow, WIRED, other_program=True)
    adapted = replace(question, adapters=ON_UP)
    few = 16 * 8 * (1024 + 4096)
    assert ON_UP.parameters(BLOCKS) == few
    whole = parameters(BLOCKS)
    for name, plan, part in (
        ("data_s", {"strategy": "ddp", "dp_replicate": 8}, few / whole),
        ("data_s", {"strategy": "3d", "dp_shard": 8, "zero": 1}, few / whole),
    ):
        one, other = step(question, **plan)[name], step(adapted, **plan)[name]
        assert other == pytest.approx(part * one, rel=1e-6), plan
    spread = {"strategy": "zero3", "dp_shard": 8}
    all_of, adapters = step(question, **spread)["data_s"], step(adapted, **spread)["data_s"]
    # Gathered twice and summed once; then gathered twice, and hardly anything summed.
    assert adapters / all_of == pytest.approx(2 / 3, rel=0.02)
    assert step(adapted)["optimizer_s"] < 0.01 * step(question)["optimizer_s"]


def test_weights_of_four_bits_are_unpacked_for_each_matmul():
    slow = replace(FLAT, memory_bytes_per_s=MOVED)
    plain = StepTimeQuestion(BLOCKS, 512, slow, WIRED, other_program=True, adapters=ON_UP)
    packed = replace(plain, adapters=replace(ON_UP, base_bytes=0.5))
    more = sum(step(packed).values()) - sum(step(plain).values())
    weights = 16 * 2 * 1024 * 4096
    passes = 8  # micro-batches of one sample
    assert more == pytest.approx(passes * 2 * weights * (0.5 + 2) / MOVED, rel=1e-3)


def test_weights_that_operators_unpack_move_more_and_are_kept_for_the_backward():
    """AutoGPTQ's operators: shifted to int32, cast to int8, masked, less its zero, scaled."""
    slow = replace(FLAT, memory_bytes_per_s=MOVED)
    plain = StepTimeQuestion(BLOCKS, 512, slow, WIRED, other_program=True, adapters=ON_UP)
    eager = replace(ON_UP, base_bytes=0.5, unpacks_by_operators=True)
    more = sum(step(replace(plain, adapters=eager)).values()) - sum(step(plain).values())
    moved = 0.5 + 4 + (4 + 1) + (1 + 1) + (1 + 1) + 1 + 2
    assert more == pytest.approx(8 * 16 * 2 * 1024 * 4096 * moved / MOVED, rel=1e-3)


def test_adapters_kept_in_fp32_cast_their_inputs_twice_either_way():
    slow = replace(FLAT, memory_bytes_per_s=MOVED)
    low = StepTimeQuestion(BLOCKS, 512, slow, WIRED, other_program=True, adapters=ON_UP)
    cast = replace(low, adapters=replace(ON_UP, kept="cast"))
    more = sum(step(cast, micro_batch=8).values()) - sum(step(low, micro_batch=8).values())
    # Cast up and down, and dropout in fp32 with its mask in place of 16 bits.
    wider = 2 * (2 + 4) + (4 + 4 + 1) - (2 + 2 + 1)
    assert more == pytest.approx(16 * 8 * 512 * 1024 * 2 * wider / MOVED, rel=1e-6)
    whole = replace(low, adapters=replace(ON_UP, kept="fp32"))
    fast = replace(slow, best_flops_per_s={"bf16": RATE, "fp32": NEVER})
    found = step(replace(whole, device=fast), micro_batch=8)
    assert sum(found.values()) > sum(step(cast, micro_batch=8).values())


def test_outpace_s_adapters_have_a_dropout_if_asked_and_scale_the_low_rank_matmul():
    slow = replace(FLAT, memory_bytes_per_s=MOVED)
    peft = StepTimeQuestion(BLOCKS, 512, slow, WIRED, other_program=True, adapters=ON_UP)
    own = replace(peft, adapters=replace(ON_UP, drops_inputs=False, scales_outputs=False))
    less = sum(step(peft, micro_batch=8).values()) - sum(step(own, micro_batch=8).values())
    tokens = 16 * 8 * 512
    # Dropout reads, writes and masks, and scaling reads and writes, either way.
    moved = 2 * (1024 * (2 + 2 + 1) + 4096 * 2 * 2 - 8 * 2 * 2)
    assert less == pytest.approx(tokens * moved / MOVED, rel=1e-6)
    wide, few = own.adapters.operators, peft.adapters.operators
    assert (few[0] - wide[0], few[1] - wide[1]) == (1, 1)


TIED = BLOCKS.model_copy(update={"vocab": 8192, "outputs": 8192, "tied": True})
LORA = {"lora_rank": 8, "lora_targets": ("up",), "optimizer": "adamw-fused"}


def planned(device=FLAT, **values):
    layer = Stack(layers=16, mlp=Mlp(width=4096), norms=0, attention=ATTENTION)
    model = TIED.model_copy(update={"stacks": (layer,)})
    return StepTimeQuestion(model, 512, device, WIRED), {**LORA, **values}


@pytest.mark.parametrize("base", ["fp32", "nf4"])
def test_frozen_weights_that_are_not_packed_are_cast_whole_or_by_shards(base):
    slow = replace(FLAT, memory_bytes_per_s=MOVED, best_flops_per_s={"bf16": NEVER, "fp32": NEVER})
    table, matrices = 8192 * 1024, 16 * (2 * 1024 * 4096 + 4 * 1024 * 1024)
    cast = 6 * (table + (0 if base == "nf4" else matrices)) / MOVED

    def cast_s(**values):
        question, settings = planned(slow, base=base, precision="bf16", **values)
        plan = Plan.parse(settings, "test")
        return weight_traffic_s(set_up(question, of_plans([plan], 8, 16)))[0]

    assert cast_s() == pytest.approx(cast, rel=1e-6)
    # Twice a micro-batch what is gathered is read and written once more.
    packed = NF4_BYTES * matrices if base == "nf4" else 2 * matrices
    copied = 2 * 2 * (2 * table + packed) / MOVED
    assert cast_s(strategy="zero3", dp_shard=8) == pytest.approx(cast / 8 + copied, rel=1e-6)


def test_packed_blocks_gather_what_is_not_packed_in_16_bits():
    slow = replace(FLAT, hides=0.0)
    spread = {"strategy": "zero3", "dp_shard": 8, "precision": "bf16"}
    table, matrices = 8192 * 1024, 16 * (2 * 1024 * 4096 + 4 * 1024 * 1024)
    adapters = 16 * 8 * (1024 + 4096)
    packed, plain = (
        step(question, **values)["data_s"]
        for question, values in (planned(slow, base=base, **spread) for base in ("nf4", "fp32"))
    )
    part = 7 / 8 / 100e9
    assert packed == pytest.approx(part * (2 * (NF4_BYTES * matrices + 2 * table) + 4 * adapters))
    assert plain == pytest.approx(part * (2 * 2 * (matrices + table) + 4 * adapters))


def test_adapters_of_an_fp32_plan_are_multiplied_at_its_rate():
    slow = replace(FLAT, best_flops_per_s={"bf16": RATE, "fp32": RATE / 16})
    low, full = (
        step(question, **values)["products_s"]
        for question, values in (
            planned(slow, precision="bf16-pure", optimizer="adamw-bf16"),
            planned(slow, precision="fp32"),
        )
    )
    assert full == pytest.approx(16 * low, rel=1e-6)


def test_matmuls_of_adapters_in_fp32_have_tiles_of_32():
    """Six matmuls of a rank of 8, of which four have it as an edge of their result."""
    rate = 1e9
    device = replace(FLAT, best_flops_per_s={"bf16": RATE, "fp32": rate})
    adapters = replace(ON_UP, kept="fp32")
    question = StepTimeQuestion(BLOCKS, 512, device, WIRED, other_program=True, adapters=adapters)
    found = sum(step(question, micro_batch=8).values())
    tokens = 8 * 512
    frozen = 2 * tokens * 2 * 16 * 2 * 1024 * 4096 / RATE
    edges = 16 * 2 * tokens * (2 * 32 + 8) * (1024 + 4096)
    assert found - frozen == pytest.approx(edges / rate, rel=1e-3)


def test_adapters_gather_their_inputs_where_the_matmuls_gather_is_overlapped():
    """NeMo: return_layernorm_output_gathered, unless TP communication overlap is used."""
    megatron = STACKS["megatron"]
    question = StepTimeQuestion(
        BLOCKS, 512, FLAT, WIRED, other_program=True, adapters=ON_UP, stack=megatron
    )
    shared = replace(question, stack=megatron.model_copy(update={"gathers_for_adapters": False}))
    plan = {"strategy": "tp", "tp": 4, "sequence_parallel": True, "micro_batch": 8}
    own, other = (step(one, async_tp=True, **plan)["tensor_s"] for one in (question, shared))
    whole = 8 * 512 * 1024 * 2
    assert own - other == pytest.approx(16 * 2 * whole * 3 / 4 / 100e9)
    assert step(question, **plan) == step(shared, **plan)


def test_parameters_are_those_that_trainers_print():
    """litgpt, tutorials/resource-tables.md: Llama 2 7B, rank 8 on queries and values."""
    model = outline(PRESETS["llama-2-7b"].spec, "llama-2-7b")
    assert Adapters(8, {"qkv": Target(2, 2 / 3)}).parameters(model) == 4_194_304


def test_adapters_save_less_than_their_share_of_what_is_trained():
    """The forward and the gradients of inputs are left: about a third of a step is saved."""
    cluster = of_catalog(find_node("dgx-a100"), 1)
    model = outline(PRESETS["llama-2-7b"].spec, "llama-2-7b")
    question = StepTimeQuestion(model, 4096, cluster.device, cluster.fabric, other_program=True)
    adapters = Adapters(16, {"qkv": Target(3), "out": Target(1)})
    plan = {"strategy": "zero3", "dp_shard": 8}
    whole = sum(step(question, **plan).values())
    found = sum(step(replace(question, adapters=adapters), **plan).values())
    assert 0.62 < found / whole < 0.85
    assert np.isfinite(found)
