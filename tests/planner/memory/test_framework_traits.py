"""What each trait of a trainer changes in the memory formula, by papers and programs."""

from dataclasses import replace

import numpy as np
import pytest

from outpace.catalog.models import PRESETS
from outpace.planner.memory.framework_traits import (
    DEEPSPEED_FP16,
    DEEPSPEED_FP16_ZERO1,
    LIGHTNING_FSDP,
    MEGATRON_BF16,
    MEGATRON_FP16,
    OUTPACE,
    FrameworkTraits,
)
from outpace.planner.memory.fullest_rank import fullest_ranks
from outpace.planner.memory.peak import anatomy, held_bytes, peak_bytes, reserved_bytes
from outpace.planner.memory.saved_activations import layer, shapes
from outpace.planner.memory.setup import MemoryQuestion
from outpace.planner.model.outline import outline, parameters
from outpace.planner.plan_columns import PlanBatch, of_plans
from outpace.records.outline import AttentionShape, Mlp, Outline, Stack
from outpace.records.plan import Checkpointing, Plan

LENGTH, HIDDEN, HEADS, VOCAB = 1024, 512, 8, 50304
PLANS = (
    Plan(micro_batch=2), Plan(strategy="zero1", dp_shard=4), Plan(strategy="zero3", dp_shard=4),
    Plan(strategy="3d", tp=2, dp_shard=4, zero=1, precision="fp16-master"),
    Plan(strategy="tp", tp=4, checkpointing="selective", precision="bf16"),
    Plan(strategy="1f1b", pp=4, pp_microbatches=8),
)  # fmt: skip


def gpt() -> Outline:
    attention = AttentionShape(
        heads=HEADS, kv_heads=HEADS, head_dim=HIDDEN // HEADS, qkv_bias=True, out_bias=True
    )  # type: ignore[call-arg]  # values as wide as keys
    stack = Stack(
        layers=12, attention=attention, mlp=Mlp(width=4 * HIDDEN, bias=True), norm_bias=True,
        dropout=True,
    )  # fmt: skip
    return Outline(
        name="gpt", hidden=HIDDEN, stacks=(stack,), vocab=VOCAB, outputs=VOCAB, tied=True,
        learned_positions=LENGTH, outside_parameters=2 * HIDDEN, max_positions=LENGTH,
    )  # fmt: skip


def columns_of(plan: Plan, passes: int = 1) -> PlanBatch:
    return of_plans([plan], plan.samples_per_pass * plan.data_parallel * passes, 12)


def megatron(**axes) -> Plan:
    return Plan(strategy="3d", precision="fp16-master", **axes)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.strategy)
def test_outpace_is_who_is_asked_of_where_nothing_is_said(plan):
    for ask in (peak_bytes, reserved_bytes):
        said = ask(MemoryQuestion(gpt(), LENGTH, traits=OUTPACE), columns_of(plan))
        assert said == ask(MemoryQuestion(gpt(), LENGTH), columns_of(plan))


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_inputs_that_are_gathered_again_are_kept_in_shares(tp):
    """Korthikanti et al., arXiv 2205.05198, eq. 4: sbh(34/t + 5as/(ht)); outpace 4(1 - 1/t) more.

    They leave out norms' means and deviations, 16 bytes a token.
    """
    columns = columns_of(megatron(tp=tp, sequence_parallel=True))
    sizes = shapes(gpt(), LENGTH, columns)
    unit, scores = LENGTH * HIDDEN, 5 * HEADS * LENGTH / HIDDEN / tp
    kept, own = (
        layer(gpt(), gpt().stacks[0], columns, sizes, "cuda", False, traits).saved_bytes[0] / unit
        for traits in (MEGATRON_BF16, OUTPACE)
    )
    assert kept == pytest.approx(34 / tp + scores + 16 / HIDDEN / tp)
    assert own - kept == pytest.approx(4 * (1 - 1 / tp))


def llama_bytes(traits: FrameworkTraits, mode: Checkpointing, **axes) -> float:
    """Return the bytes a token that a block of Llama 3 8B saves."""
    model = outline(PRESETS["llama-3-8b"].spec, "llama-3-8b")
    columns = columns_of(megatron(sequence_parallel=True, **axes))
    sizes = shapes(model, LENGTH, columns)
    block = layer(model, model.stacks[0], columns, sizes, "cuda", True, traits)
    return float(block.saved_bytes_in(mode)[0]) / LENGTH


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_megatrons_block_saves_no_intermediate_results_of_norms_or_gates(tp):
    """Transformer Engine's norms and SwiGLUFunction: inputs alone. Two inputs and two results of
    norms, queries, keys and values, attention's result, and three inner tensors; numbers of norms
    and attention's sums in fp32. outpace under tp has norms in fp32 by several operators.
    """
    h, kv, f, heads = 4096, 1024, 14336, 32
    hand = 2 * (2 * h + 2 * h + h + 2 * kv + h + 3 * f) + 2 * 4 + 4 * heads
    saved = llama_bytes(MEGATRON_BF16, "none", tp=tp)
    assert saved == pytest.approx(hand / tp)
    own = llama_bytes(OUTPACE, "none", tp=tp)
    norms = 2 * h * (4 + 4 - 2) / tp if tp > 1 else 0
    assert own - saved == pytest.approx(norms + 2 * f / tp + 2 * 2 * h * (1 - 1 / tp))


def test_selective_recomputation_saves_the_matmuls_that_it_does_not_repeat():
    """torchtitan: of q, k, v, out, w1, w3 and w2 every second; in 8 bits none of them."""
    h, kv, f = 4096, 1024, 14336
    every, second, none = (
        llama_bytes(replace(OUTPACE, repeats_matmuls=one), "selective")
        for one in ("none", "second", "all")
    )
    assert every - none == 2 * (h + 2 * kv + h + 2 * f + h)
    assert second - none == 2 * (h + kv + f + h)


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize(
    ("traits", "whole", "shared"),
    [(MEGATRON_BF16, 6, 12), (MEGATRON_FP16, 4, 16)],
    ids=["bf16", "fp16"],
)
def test_bytes_of_a_parameter_are_those_of_the_distributed_optimizer(traits, whole, shared, ranks):
    """Megatron Core, "Distributed Optimizer": 6 + 12/d with fp32 gradients, 4 + 16/d without.

    18 and 20 where it is not distributed. Of 8 tokens little counts but a gradient that is made.
    """
    plan = megatron(dp_shard=ranks, zero=1) if ranks > 1 else megatron()
    model = gpt().model_copy(update={"vocab": 256, "outputs": 256})
    held = anatomy(MemoryQuestion(model, 8, traits=traits), columns_of(plan))
    told = sum(held[kind][0] for kind in ("weights", "gradients", "optimizer state"))
    assert told / parameters(model) == pytest.approx(whole + shared / ranks, rel=0.01)


@pytest.mark.parametrize(
    ("traits", "zero", "step"), [(DEEPSPEED_FP16, 0, 24), (DEEPSPEED_FP16_ZERO1, 1, 22)]
)
def test_a_step_of_deepspeed_copies_all_gradients_at_once(traits, zero, step):
    """Of 4 + 4 bytes of its own, fp16 weights and gradients, 12 of states: FP16_Optimizer.step
    (list and flat tensor in fp32 after the gradients), stage_1_and_2.py, step (flat in 16 bits).
    """
    plan = megatron(zero=zero) if zero else megatron()
    model = gpt().model_copy(update={"vocab": 256, "outputs": 256})
    held = anatomy(MemoryQuestion(model, 8, traits=traits), columns_of(plan))
    told = sum(held[kind][0] for kind in ("weights", "gradients", "optimizer state", "temporary"))
    assert told / parameters(model) == pytest.approx(step, rel=0.01)


@pytest.mark.parametrize("ranks", [4, 8])
def test_a_pipeline_of_deepspeed_holds_blocks_for_the_step(ranks):
    """6 bytes of each parameter that a rank updates, and a bucket, as long as there is room."""
    plan = megatron(pp=4, pp_schedule="1f1b", pp_microbatches=8, dp_shard=ranks, zero=1)
    question = MemoryQuestion(gpt(), LENGTH, traits=DEEPSPEED_FP16_ZERO1)
    columns = columns_of(plan)
    needs = reserved_bytes(question, columns)[0]
    block = 12 * HIDDEN**2 + 13 * HIDDEN
    first = 3 * block + (VOCAB + LENGTH) * HIDDEN
    added = held_bytes(question, columns, 80e9)[0] - needs
    assert added == pytest.approx(6 * first / ranks + 1e9, rel=0.01)
    assert held_bytes(question, columns, needs + 1e8)[0] == pytest.approx(needs + 1e8)
    plain = MemoryQuestion(gpt(), LENGTH, traits=MEGATRON_FP16)
    assert held_bytes(plain, columns, 80e9) == reserved_bytes(plain, columns)


def test_without_sharding_no_rank_gathers():
    """outpace's 3d has fully_shard's copies beside the weights, Megatron's DDP none."""
    columns = columns_of(megatron(dp_replicate=4, tp=2))
    assert (
        anatomy(MemoryQuestion(gpt(), LENGTH, traits=MEGATRON_BF16), columns)["unsharded"][0] == 0
    )
    assert anatomy(MemoryQuestion(gpt(), LENGTH), columns)["unsharded"][0] > 0


@pytest.mark.parametrize("tp", [1, 4])
def test_logits_are_there_twice(tp):
    """In 16 bits and, in place, in fp32: 6 bytes for each, whatever their number."""
    traits = replace(OUTPACE, chunks_loss=False, softmax_in_place=True)
    axes = {"strategy": "tp", "tp": tp} if tp > 1 else {"strategy": "single"}
    fewer, more = (
        peak_bytes(
            MemoryQuestion(
                gpt().model_copy(update={"vocab": rows, "outputs": rows}), LENGTH, traits=traits
            ),
            columns_of(Plan(precision="bf16-pure", optimizer="adamw-bf16", micro_batch=16, **axes)),
        )[0]
        for rows in (VOCAB, 2 * VOCAB)
    )  # fmt: skip
    weights = (2 + 4) * VOCAB * HIDDEN / tp  # the embedding and its moments in 16 bits
    assert more - fewer - weights == pytest.approx(6 * 16 * LENGTH * VOCAB / tp, rel=1e-3)


def test_a_pipeline_that_receives_anew_has_no_buffer_for_each_micro_batch():
    few, many = (
        anatomy(
            MemoryQuestion(gpt(), LENGTH, traits=MEGATRON_BF16),
            columns_of(megatron(pp=4, pp_schedule="1f1b", pp_microbatches=count)),
        )["communication"][0]
        for count in (8, 32)
    )  # fmt: skip
    assert few == many


@pytest.mark.parametrize(("passes", "share"), [(1, 4), (8, 1)])
def test_gradients_that_are_summed_under_no_sync_are_whole(passes, share):
    """FSDP.no_sync: the full gradients of micro-batches before the last; else shards."""
    plan = Plan(
        strategy="zero3", dp_shard=4, precision="bf16-pure", optimizer="adamw-bf16",
        checkpointing="full",
    )  # fmt: skip
    held = anatomy(MemoryQuestion(gpt(), LENGTH, traits=LIGHTNING_FSDP), columns_of(plan, passes))
    assert held["gradients"][0] <= 2 * parameters(gpt()) / share * (1 + 1e-6)
    if passes > 1:
        assert held["gradients"][0] == pytest.approx(2 * parameters(gpt()))
    else:
        assert held == anatomy(MemoryQuestion(gpt(), LENGTH), columns_of(plan, passes))


def test_stages_of_equal_numbers_of_blocks_are_equal():
    """The head is worth eight of these blocks, for which outpace's last stage has one alone."""
    axes = {"pp": 4, "pp_schedule": "1f1b", "pp_microbatches": 8}
    counts = [
        [
            place.layers[0]
            for place in fullest_ranks(gpt(), columns_of(megatron(stage_split=cut, **axes)))
        ]
        for cut in ("even", "cost")
    ]
    assert counts[0] == [3, 3, 3]
    assert counts[1][-1] == 1
    assert np.isclose(counts[1][0], 4, atol=1)
