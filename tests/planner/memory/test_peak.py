"""Memory in closed form: the papers' equations, cases by hand, what must hold, and the trace."""

import math

import numpy as np
import pytest

from outpace.catalog.accelerators import ACCELERATORS
from outpace.catalog.outlines import OUTLINES
from outpace.planner.memory.framework_traits import MEGATRON_BF16
from outpace.planner.memory.peak import anatomy, offloaded_bytes, peak_bytes, reserved_bytes
from outpace.planner.memory.saved_activations import layer, shapes
from outpace.planner.memory.setup import MemoryQuestion
from outpace.planner.model.outline import outline, parameters
from outpace.planner.pipeline.in_flight import ranks_of
from outpace.planner.pipeline.stages import representatives
from outpace.planner.plan_columns import PlanBatch, of_plans
from outpace.records.model import ModelSpec
from outpace.records.outline import AttentionShape, Mlp, Outline, Stack
from outpace.records.plan import Plan
from outpace.trace.account import account

H100 = ACCELERATORS["H100 SXM"]
SMALL = ModelSpec.parse(
    {"family": "llama", "layers": 6, "hidden": 256, "heads": 8, "kv_heads": 4, "ffn": 640,
     "vocab": 4096, "max_positions": 512},
    "test",
)  # fmt: skip
GPT = ModelSpec.parse(
    {"family": "gpt2", "layers": 6, "hidden": 256, "heads": 8, "vocab": 4096,
     "max_positions": 512},
    "test",
)  # fmt: skip
# Korthikanti et al., arXiv 2205.05198, table 3: 22B, 175B and 530B, as (layers, hidden, heads).
GPTS = {"22B": (48, 6144, 64), "175B": (96, 12288, 96), "530B": (105, 20480, 128)}
LENGTH = 2048


def gpt(name: str) -> Outline:
    layers, hidden, heads = GPTS[name]
    attention = AttentionShape(
        heads=heads, kv_heads=heads, head_dim=hidden // heads, qkv_bias=True, out_bias=True
    )  # type: ignore[call-arg]  # values as wide as keys
    stack = Stack(
        layers=layers, attention=attention, mlp=Mlp(width=4 * hidden, bias=True), norm_bias=True,
        dropout=True,
    )  # fmt: skip
    return Outline(
        name=name, hidden=hidden, stacks=(stack,), vocab=51200, outputs=51200, tied=True,
        learned_positions=LENGTH, outside_parameters=2 * hidden, max_positions=LENGTH,
    )  # fmt: skip


def columns_of(*plans: Plan, layers: int, passes: int = 1) -> PlanBatch:
    rows = [of_plans([p], p.samples_per_pass * p.data_parallel * passes, layers) for p in plans]
    names = PlanBatch.__dataclass_fields__
    return PlanBatch(**{n: np.concatenate([getattr(row, n) for row in rows]) for n in names})


def kept(name: str, mode: str, fused: bool, **axes) -> float:
    """Bytes that a layer keeps, in units of s·b·h, weights and all in 16 bits."""
    described = gpt(name)
    plan = Plan(precision="fp16-pure", optimizer="adamw-bf16", micro_batch=2, **axes)
    columns = columns_of(plan, layers=described.layers)
    sizes = shapes(described, LENGTH, columns)
    one = layer(described, described.stacks[0], columns, sizes, "cuda", fused)
    return float(one.saved_bytes_in(mode)[0]) / (LENGTH * 2 * described.hidden)


@pytest.mark.parametrize("name", GPTS)
def test_a_layer_keeps_what_korthikanti_counts(name):
    """Eq. 1, sbh(34 + 5as/h); eq. 5, with selective recomputation, is what fused attention keeps.

    They leave out norms' means and deviations, and attention's log-sum-exps: 16 and 4a bytes a
    token.
    """
    _, hidden, heads = GPTS[name]
    small = 16 / hidden
    assert kept(name, "none", fused=False) == pytest.approx(
        34 + 5 * heads * LENGTH / hidden + small
    )
    assert kept(name, "none", fused=True) == pytest.approx(34 + small + 4 * heads / hidden)
    # Table 2, "full activation recomputation": 2sbh.
    assert kept(name, "full", fused=False) == 2


def test_tensor_parallelism_splits_what_korthikanti_splits():
    """Eq. 2, sbh(10 + 24/t + 5as/(ht)). With sequence parallelism (eq. 4) all is split but what is
    gathered for the matmuls, which they gather again and outpace keeps: 4sbh."""
    _, hidden, heads = GPTS["175B"]
    scores = 5 * heads * LENGTH / hidden / 8
    alone = kept("175B", "none", False, strategy="tp", tp=8, sequence_parallel=False)
    assert alone == pytest.approx(10 + 24 / 8 + scores, abs=0.01)
    both = kept("175B", "none", False, strategy="tp", tp=8)
    assert both == pytest.approx(30 / 8 + 4 + scores, abs=0.01)


def test_states_are_those_of_zero():
    """Rajbhandari et al., arXiv 1910.02054, figure 1: 2Ψ + 2Ψ + 12Ψ, over 64 ranks at best 1.9 GB
    of 7.5B parameters; gradients are only counted here when they are there."""
    described = gpt("22B")
    count = parameters(described)
    alone, sharded = (
        anatomy(MemoryQuestion(described, 8, "cpu"), columns_of(plan, layers=48))
        for plan in (
            Plan(precision="fp16-master"),
            Plan(strategy="zero3", dp_shard=64, precision="fp16-master"),
        )
    )
    for held, ranks in ((alone, 1), (sharded, 64)):
        assert held["weights"][0] == pytest.approx(2 * count / ranks, rel=1e-6)
        assert held["optimizer state"][0] == pytest.approx(12 * count / ranks, rel=1e-6)


def test_bf16_shards_are_their_own_masters():
    """2 + 4 + 8 bytes a parameter in one process; split over ranks the weights are the masters."""
    described = gpt("22B")
    count = parameters(described)
    cases = {
        Plan(precision="bf16-master"): (2, 12, 1),
        Plan(strategy="zero3", dp_shard=64, precision="bf16-master"): (4, 8, 64),
    }
    for plan, (weights, states, ranks) in cases.items():
        held = anatomy(MemoryQuestion(described, 8, "cpu"), columns_of(plan, layers=48))
        assert held["weights"][0] == pytest.approx(weights * count / ranks, rel=1e-6)
        assert held["optimizer state"][0] == pytest.approx(states * count / ranks, rel=1e-6)


def test_few_tokens_by_hand():
    """The last gradient is the embedding's: then weights, both moments and all gradients are there,
    the gradient of 8 hidden states, the tokens and their targets."""
    count = parameters(outline(SMALL, "x"))
    columns = columns_of(Plan(), layers=6)
    by_hand = 16 * count + 4 * 8 * 256 + 2 * 8 * 8
    tables = 2 * 4 * 32 * 8  # cosines and sines
    peak = peak_bytes(MemoryQuestion(outline(SMALL, "x"), 8, "cpu"), columns)[0]
    assert by_hand <= peak <= by_hand + tables


def test_many_tokens_by_hand():
    """The logits' gradient: 12 bytes for each, beside what 6 layers of GPT-2 kept."""
    tokens, hidden, vocab = 4 * 64, 256, 4096
    plan = Plan(micro_batch=4, optimizer="sgd")
    held = anatomy(MemoryQuestion(outline(GPT, "x"), 64, "cpu"), columns_of(plan, layers=6))
    each = 16 * hidden * 4 + 2 * 8 + 4 * 8  # 16 tensors, statistics, log-sum-exps of 8 heads
    last = 2 * hidden * 4 + vocab * 4  # what the last norm reads and makes, and log-softmax
    assert held["activations"][0] == pytest.approx(tokens * (6 * each + last), rel=0.001)
    assert held["temporary"][0] == tokens * vocab * 8
    assert held["weights"][0] == held["optimizer state"][0] == 4 * parameters(outline(GPT, "x"))


def test_pipelines_keep_as_many_micro_batches_as_their_schedules_say():
    counts = (3, 3, 3, 3)
    assert [r.chunks for r in ranks_of("gpipe", 4, 1, 8, counts)] == [8, 8, 8]
    # As many as stages follow (Narayanan et al., PipeDream, SOSP 2019, §3.2).
    ranks = ranks_of("1f1b", 4, 1, 8, counts)
    assert [(r.later_chunks, r.first, r.last) for r in ranks] == [
        (4, True, False), (3, False, False), (1, False, True),
    ]  # fmt: skip
    # With p ranks of v stages 1 + (p − 1)/(p·v) times 1F1B's p·v chunks and one more in torch's
    # order (Narayanan et al., arXiv 2104.04473, §2.2.2).
    looped = ranks_of("interleaved", 4, 2, 8, (1,) * 8)
    assert looped[0].later_chunks == 4 + 2 * 3 + 1


SHARDED = [
    [Plan(strategy="zero3", dp_shard=n, micro_batch=2) for n in (2, 4, 8, 16)],
    [Plan(strategy="zero2", dp_shard=n, micro_batch=2) for n in (2, 4, 8, 16)],
    [Plan(strategy="zero1", dp_shard=n, micro_batch=2) for n in (2, 4, 8, 16)],
    [Plan(strategy="tp", tp=n, micro_batch=2) for n in (1, 2, 4)],
    [Plan(strategy="3d", dp_shard=2, tp=n, zero=1, micro_batch=2) for n in (1, 2, 4)],
    [Plan(strategy="3d", dp_shard=2, cp=n, zero=1, micro_batch=2) for n in (1, 2, 4)],
    [Plan(strategy="cp", cp=n, micro_batch=2) for n in (2, 4, 8)],
    [Plan(strategy="gpipe", pp=n, pp_microbatches=4) for n in (2, 3, 6)],
]


@pytest.mark.parametrize("plans", SHARDED, ids=lambda plans: plans[0].strategy)
@pytest.mark.parametrize("seq_len", [64, 512])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_more_shards_never_need_more(plans, seq_len, device):
    columns = columns_of(*plans, layers=6)
    peak = peak_bytes(MemoryQuestion(outline(SMALL, "x"), seq_len, device), columns)
    assert (np.diff(peak) <= 0).all()


MODES = ("none", "selective", "attention", "full")


@pytest.mark.parametrize("spec", [SMALL, GPT], ids=["llama", "gpt2"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_who_recomputes_more_keeps_less(spec, precision):
    plans = [Plan(checkpointing=mode, micro_batch=8, precision=precision) for mode in MODES]
    columns = columns_of(*plans, layers=6)
    described = outline(spec, "x")
    peak = peak_bytes(MemoryQuestion(described, 512, "cpu"), columns)
    assert (np.diff(peak) <= 0).all()
    sizes = shapes(described, 512, columns)
    one = layer(described, described.stacks[0], columns, sizes, "cpu", True)
    amounts = [float(one.saved_bytes_in(mode)[i]) for i, mode in enumerate(MODES)]
    assert amounts == sorted(amounts, reverse=True)


MANY = [
    Plan(), Plan(optimizer_in_backward=True), Plan(offload_optimizer="disk"),
    Plan(offload_activations="disk", micro_batch=4), Plan(checkpointing="full", micro_batch=4),
    Plan(strategy="ddp", dp_replicate=4, precision="bf16"), Plan(strategy="dp", dp_replicate=2),
    Plan(strategy="ps", dp_replicate=2, servers=1), Plan(strategy="horovod", dp_replicate=4),
    Plan(strategy="hsdp", dp_shard=2, dp_replicate=2, optimizer="adamw-8bit"),
    Plan(strategy="1f1b", pp=3, pp_microbatches=6), Plan(strategy="zbv", pp=3, pp_microbatches=6),
    Plan(strategy="zb", pp=2, pp_microbatches=4), Plan(strategy="interleaved", pp=2,
                                                       pp_microbatches=4, checkpointing="full"),
    Plan(strategy="3d", tp=2, pp=2, dp_shard=2, pp_microbatches=4, precision="bf16"),
    Plan(strategy="3d", tp=2, dp_shard=4, zero=1), Plan(strategy="3d", dp_shard=4, zero=2),
    Plan(strategy="3d", dp_shard=2, cp=2, checkpointing="selective"),
    Plan(precision="fp64"), Plan(precision="fp8"), Plan(loss="chunked", micro_batch=4),
]  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_kinds_are_parts_of_the_peak(device):
    columns = columns_of(*MANY, layers=6)
    described = outline(SMALL, "x")
    held = anatomy(MemoryQuestion(described, 256, device), columns)
    for kind, nbytes in held.items():
        assert np.isfinite(nbytes).all(), kind
        assert (nbytes >= -1).all(), kind  # but for rounding
    peak = peak_bytes(MemoryQuestion(described, 256, device), columns)
    total = sum(nbytes for kind, nbytes in held.items() if kind != "offloaded")
    assert np.allclose(total, peak)
    assert (reserved_bytes(MemoryQuestion(described, 256, device), columns) >= peak).all()


@pytest.mark.parametrize(
    ("values", "passes", "host", "disk"),
    [
        # By the shard's fp32 weights p, as docs/guides/offload.md's table has it, activations a and
        # the largest weight's gradient g.
        ({"offload_parameters": "cpu"}, 1, lambda p, a, g: 4 * p, 0),
        ({"offload_parameters": "cpu", "strategy": "zero3", "dp_shard": 4}, 1,
         lambda p, a, g: p, 0),
        ({"offload_parameters": "cpu", "offload_optimizer": "disk"}, 1,
         lambda p, a, g: 2 * p, lambda p, a, g: 2 * p),
        ({"offload_parameters": "cpu", "offload_activations": "cpu"}, 1,
         lambda p, a, g: 3 * p + a, 0),
        # Gradients of the passes before are there when the last forward ends.
        ({"offload_parameters": "cpu", "offload_activations": "cpu"}, 2,
         lambda p, a, g: 4 * p + a, 0),
        ({"offload_parameters": "cpu", "offload_activations": "disk"}, 1,
         lambda p, a, g: 4 * p, lambda p, a, g: a),
        ({"offload_optimizer": "cpu"}, 1, lambda p, a, g: 3 * p + 2 * g, 0),
        ({"offload_optimizer": "disk"}, 1, 0, lambda p, a, g: 3 * p),
    ],
)  # fmt: skip
def test_a_hosts_memory_has_a_fullest_moment_of_its_own(values, passes, host, disk):
    described, acts = outline(SMALL, "x"), Plan(offload_activations="cpu", micro_batch=16)
    saved = offloaded_bytes(MemoryQuestion(described, 512), columns_of(acts, layers=6))[0][0]
    plan = Plan.parse({"micro_batch": 16, **values}, "test")
    columns = columns_of(plan, layers=6, passes=passes)
    found = [float(one[0]) for one in offloaded_bytes(MemoryQuestion(described, 512), columns)]
    weights = 4 * parameters(described)
    assert saved > weights  # else the end of the forward is never fullest
    for have, due in zip(found, (host, disk), strict=True):
        value = due and due(weights, saved, 4 * SMALL.vocab * SMALL.hidden)
        assert have == pytest.approx(value, rel=5e-3)


def test_plans_do_not_depend_on_each_other():
    described = outline(GPT, "x")
    together = peak_bytes(MemoryQuestion(described, 128, "cuda"), columns_of(*MANY, layers=6))
    for plan, peak in zip(MANY, together, strict=True):
        alone = peak_bytes(MemoryQuestion(described, 128, "cuda"), columns_of(plan, layers=6))[0]
        assert math.isclose(alone, peak)


def test_experts_are_shared_out():
    """Weights and states of experts are on ep ranks; activations are of the experts that a token
    goes through."""
    moe = gpt("22B").model_copy(update={"stacks": (
        gpt("22B").stacks[0].model_copy(update={
            "mlp": Mlp(width=4 * 6144, experts=8, active=2)}),
    )})  # fmt: skip
    plans = [Plan(strategy="3d", dp_shard=8, ep=ep) for ep in (1, 8)]
    columns = columns_of(*plans, layers=48)
    whole, shared = layer(
        moe, moe.stacks[0], columns, shapes(moe, LENGTH, columns), "cuda", True
    ).matrices
    experts = 8 * 2 * 4 * 6144 * 6144
    assert whole - shared == pytest.approx(experts * 7 / 8)
    assert (np.diff(peak_bytes(MemoryQuestion(moe, LENGTH, "cuda"), columns)) < 0).all()


def test_gradients_of_weights_on_a_host_are_on_no_device():
    """However many passes there are: the last leaves as little on the device as the others."""
    described = outline(GPT, "x")
    plans = [Plan(offload_parameters="cpu", offload_optimizer="cpu", micro_batch=1)]
    once, twice = (
        anatomy(MemoryQuestion(described, 64, "cuda"), columns_of(*plans, layers=6, passes=passes))
        for passes in (1, 2)
    )
    assert once["gradients"][0] == twice["gradients"][0] == 0


TRACED = [
    (SMALL, Plan(offload_parameters="cpu", checkpointing="full"), 128, 1, H100),
    (
        GPT,
        Plan(
            strategy="zero3", dp_shard=4, precision="bf16", offload_parameters="cpu", micro_batch=4
        ),
        256,
        2,
        H100,
    ),
    (SMALL, Plan(micro_batch=4), 256, 1, None),
    (SMALL, Plan(micro_batch=2, precision="bf16", checkpointing="selective"), 256, 1, H100),
    (GPT, Plan(strategy="zero3", dp_shard=4, checkpointing="full", micro_batch=4), 256, 1, None),
    (GPT, Plan(strategy="ddp", dp_replicate=4), 64, 3, None),
    (GPT, Plan(strategy="1f1b", pp=2, pp_microbatches=4, micro_batch=2), 128, 1, None),
    (SMALL, Plan(strategy="tp", tp=2, micro_batch=4, precision="bf16"), 256, 1, H100),
    pytest.param(
        SMALL, Plan(strategy="zero3", dp_shard=4, precision="bf16"), 32, 2, None,
        marks=pytest.mark.slow,
    ),
    (SMALL, Plan(strategy="zero2", dp_shard=2, micro_batch=4, precision="bf16"), 256, 2, H100),
    (GPT, Plan(strategy="hsdp", dp_replicate=2, dp_shard=4, precision="bf16"), 32, 1, H100),
    pytest.param(
        GPT, Plan(strategy="3d", dp_shard=4, pp=2, pp_microbatches=2, precision="bf16"), 32, 2,
        None, marks=pytest.mark.slow,
    ),
]  # fmt: skip


@pytest.mark.fakeworld
@pytest.mark.parametrize(("spec", "plan", "seq_len", "passes", "accelerator"), TRACED)
def test_as_traced(spec, plan, seq_len, passes, accelerator):
    """benchmarks/planner_memory.py does so with some hundred plans."""
    traced = max(
        account(spec, plan, seq_len=seq_len, accumulation=passes, rank=rank,
                accelerator=accelerator).peak_memory_bytes
        for rank in representatives(plan)
    )  # fmt: skip
    columns = columns_of(plan, layers=6, passes=passes)
    device = "cpu" if accelerator is None else "cuda"
    assert peak_bytes(MemoryQuestion(outline(spec, "x"), seq_len, device), columns)[
        0
    ] == pytest.approx(traced, rel=0.03)


# Weights of 16 bits whose micro-batches add up: with bf16-master in fp32, each cast for it; under
# ddp beside the buckets, until the last one.
ADDED_UP = [
    (Plan(precision="bf16-master"), 2),
    (Plan(strategy="tp", tp=2, precision="bf16-master"), 2),
    (Plan(strategy="zero1", dp_shard=2, precision="bf16-master"), 3),
    (Plan(strategy="dp", dp_replicate=2, precision="bf16-master"), 2),
    (Plan(strategy="1f1b", pp=2, pp_microbatches=2, micro_batch=16, precision="bf16-master"), 1),
    (Plan(strategy="ddp", dp_replicate=2, precision="fp16-master"), 2),
]


@pytest.mark.slow
@pytest.mark.fakeworld
@pytest.mark.parametrize(("plan", "passes"), ADDED_UP)
def test_gradients_that_add_up_as_traced(plan, passes):
    """A tied head of many rows and few tokens: gradients are most of the peak."""
    tied = SMALL.model_copy(update={"layers": 3, "tied": True})
    traced = max(
        account(tied, plan, seq_len=32, accumulation=passes, rank=rank).peak_memory_bytes
        for rank in representatives(plan)
    )
    columns = columns_of(plan, layers=3, passes=passes)
    assert peak_bytes(MemoryQuestion(outline(tied, "x"), 32, "cpu"), columns)[0] == pytest.approx(
        traced, rel=0.03
    )


@pytest.mark.parametrize("ep", [1, 2, 4, 8])
def test_ranks_that_share_out_experts_hold_the_model_once_together(ep):
    model = OUTLINES["mixtral-8x7b"]
    plan = Plan(strategy="3d", dp_shard=16, ep=ep, precision="bf16", checkpointing="full")
    found = anatomy(MemoryQuestion(model, 4096), of_plans([plan], 16, model.layers))
    assert 16 * found["weights"][0] == pytest.approx(4 * parameters(model), rel=1e-6)
    assert 16 * found["optimizer state"][0] == pytest.approx(8 * parameters(model), rel=1e-6)


@pytest.mark.parametrize("precision", ["bf16", "bf16-master"])
@pytest.mark.parametrize("plan", [
    Plan(strategy="zero3", dp_shard=16), Plan(strategy="3d", tp=8, dp_shard=2, zero=1),
    Plan(strategy="3d", tp=2, cp=2, dp_shard=4, zero=1),
], ids=["zero3", "tp", "cp"])  # fmt: skip
def test_two_moments_of_each_parameter_are_on_all_ranks_together(plan, precision):
    """Weights of 4 bytes are the masters, whole or in shards."""
    model = OUTLINES["mixtral-8x7b"]
    plan = plan.model_copy(update={"precision": precision})
    found = anatomy(MemoryQuestion(model, 512), of_plans([plan], 16, model.layers))
    assert 16 * found["optimizer state"][0] == pytest.approx(8 * parameters(model), rel=0.02)


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (1, 8), (2, 4), (2, 16)])
def test_under_zero1_a_rank_keeps_its_own_experts_and_its_share_of_all_states(tp, ep):
    """Weights of 2 bytes and gradients of 4 are of a rank's own experts; masters and moments, 12
    bytes, of all parameters are over all ranks that hold the same ones together."""
    model = OUTLINES["mixtral-8x7b"]
    plan = Plan(strategy="3d", dp_shard=8, tp=tp, ep=min(ep, 8 * tp), zero=1,
                precision="fp16-master", micro_batch=1)  # fmt: skip
    model = model.model_copy(update={"stacks": (model.stacks[0].model_copy(update={
        "mlp": Mlp(width=14336, gated=True, experts=16, active=2)}),)})  # fmt: skip
    found = anatomy(
        MemoryQuestion(model, 256, traits=MEGATRON_BF16), of_plans([plan], 8, model.layers)
    )
    experts = 32 * 16 * 3 * 4096 * 14336
    rest = parameters(model) - experts
    own = experts / (plan.ep * plan.expert_tp) + rest / tp
    assert found["weights"][0] == pytest.approx(2 * own, rel=1e-3)
    assert found["gradients"][0] == pytest.approx(4 * own, rel=0.02)  # one more on its way
    each = 12 * parameters(model) / (8 * tp)
    assert found["optimizer state"][0] == pytest.approx(each, rel=1e-3)


def test_deepseek_v3_fits_the_gpus_that_it_was_trained_on():
    """Megatron-Bridge 067f987df0: 256 GB200, PP 4, EP 64; with whole experts 657 GiB."""
    model = OUTLINES["deepseek-v3"]
    plan = Plan(strategy="3d", dp_shard=64, pp=4, ep=64, zero=1, precision="fp16-master",
                pp_microbatches=64, pp_schedule="interleaved", virtual_stages=4,
                stage_split="even", checkpointing="full")  # fmt: skip
    columns = of_plans([plan], 4096, model.layers)
    needs = reserved_bytes(MemoryQuestion(model, 4096, traits=MEGATRON_BF16), columns)
    assert needs[0] < ACCELERATORS["GB200"].usable_bytes
