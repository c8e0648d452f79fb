"""What a layer, the embedding and the head take on one rank."""

from dataclasses import replace

import numpy as np
import pytest

from outpace.catalog import efficiency
from outpace.catalog.accelerators import ACCELERATORS
from outpace.catalog.models import PRESETS, preset
from outpace.catalog.outlines import OUTLINES
from outpace.planner.hardware.device import DeviceRates, of_accelerator
from outpace.planner.model.flops import block_weights, head_weights
from outpace.planner.model.outline import Weight, head_in_layers, outline
from outpace.planner.model.outline_flops import forward_flops
from outpace.planner.step_time.adapters import Adapters
from outpace.planner.step_time.layer import (
    Cells,
    _fp8_cast_s,
    _weight_matmuls_s,
    embedding,
    head,
    layer,
)
from outpace.records.outline import AttentionShape, Mlp, Outline, Stack

RATE = 1e14
# Every matmul at RATE, whatever its size; nothing else takes any time.
FLAT = DeviceRates(
    name="flat", kind="cuda", memory_bytes=None, peak_flops_per_s={"bf16": RATE},
    best_flops_per_s={"bf16": RATE}, multiprocessors=1, tiles=((1, 1, 1.0),), fixed_s=0.0,
    memory_bytes_per_s=1e40, operator_s=0.0, attention_forward=1.0, attention_backward=1.25,
    attention_narrow=1.0, host_bytes_per_s=1e40, host_memory_bytes_per_s=1e40,
    disk_bytes_per_s=1e40, curve=((1.0, 1.0), (2.0, 1.0)),
)  # fmt: skip
H100 = of_accelerator(ACCELERATORS["H100 SXM"])
MODELS = [*OUTLINES, "gpt2", "llama-3-8b", "mistral-7b", "bert-base", "qwen3-8b"]


def of(name):
    return OUTLINES[name] if name in OUTLINES else outline(preset(name), name)


def cells(**values):
    given = {"rate": RATE, "item": 2, "wide": 2, "samples": 1, "tp": 1, "cp": 1, "ep": 1,
             "etp": values.get("tp", 1), "norm_split": 1, **values}  # fmt: skip
    compiled = np.array([given.pop("compiled", 0) > 0])
    arrays = {name: np.array([float(value)]) for name, value in given.items()}
    return Cells(**arrays, compiled=compiled)


def works(device, model, seq_len, kernel="unfused", **values):
    shape = cells(**values)
    return [
        (stack.layers, layer(device, model, stack, shape, seq_len, kernel))
        for stack in model.stacks
    ]


def short_encoder():
    t5 = OUTLINES["t5-11b"]
    encoder, decoder = t5.stacks
    return t5.model_copy(update={"stacks": (encoder.model_copy(update={"seq_len": 64}), decoder)})


@pytest.mark.parametrize("name", [*MODELS, "t5-11b, short"])
def test_matmuls_are_the_flops_of_the_outline(name):
    model = short_encoder() if name.endswith("short") else of(name)
    seq_len, samples = min(512, model.max_positions), 3
    shape = cells(samples=samples)
    found = works(FLAT, model, seq_len, samples=samples)
    ends = [part(FLAT, model, shape, seq_len) for part in (embedding, head)]
    ahead = sum(count * work.forward_s for count, work in found) + sum(e.forward_s for e in ends)
    back = sum(count * work.backward_s for count, work in found) + sum(e.backward_s for e in ends)
    if model.vocab:  # a GPU's head is padded (nn.head_loss): gpt2's 50,257 are 50,304
        model = model.model_copy(update={"outputs": -(-model.outputs // 64) * 64})
    flops = forward_flops(model, seq_len, samples)
    assert ahead * RATE == pytest.approx(flops, rel=1e-9)
    assert back * RATE == pytest.approx(2 * flops, rel=1e-9)
    matmuls = sum(n * w.products_s for n, w in found) + sum(e.products_s for e in ends)
    alone = forward_flops(model, seq_len, samples, attention=False)
    assert matmuls * RATE == pytest.approx(alone, rel=1e-9)


def test_written_attention_of_heads_that_are_no_multiple_of_8_is_slow_on_an_a100():
    """BLOOM's trials: 128 heads of 108 took a third longer than 64 of 216 (bigscience 9e64edec,
    train/tr11-176B-ml/chronicles-prequel.md, "NHEADs comparison")."""
    a100 = of_accelerator(ACCELERATORS["A100 SXM 80 GB"])
    model = of("gpt3-175b")
    seconds = {}
    for width in (104, 108, 112):
        attention = model.stacks[0].attention.model_copy(
            update={"heads": 16, "kv_heads": 16, "head_dim": width, "value_dim": width}
        )
        stack = model.stacks[0].model_copy(update={"attention": attention})
        cut = model.model_copy(update={"stacks": (stack,)})
        for kernel in ("unfused", "fused"):
            work = works(a100, cut, 2048, kernel, rate=a100.rate("fp16"), samples=4)[0][1]
            seconds[width, kernel] = work.attention_s + work.attention_back_s
    assert seconds[108, "unfused"] > 4 * seconds[112, "unfused"]
    assert seconds[112, "unfused"] < 1.2 * seconds[104, "unfused"]
    assert seconds[108, "fused"] < seconds[112, "fused"]


def test_fused_causal_attention_is_half_and_a_window_less():
    model = of("llama-3-8b")
    (_, fused), (_, whole) = (works(FLAT, model, 4096, kernel)[0] for kernel in
                              ("fused", "unfused"))  # fmt: skip
    assert fused.attention_s == pytest.approx(whole.attention_s / 2)
    assert fused.attention_back_s == pytest.approx(2 * fused.attention_s)
    triton = works(FLAT, model, 4096, "triton")[0][1]
    assert triton.attention_s > 1.5 * fused.attention_s
    bert = of("bert-base")
    both = [works(FLAT, bert, 512, kernel)[0][1].attention_s for kernel in ("fused", "unfused")]
    assert both[0] == pytest.approx(both[1])
    windowed = of("mistral-7b")
    short = works(FLAT, windowed, 16384, "fused")[0][1].attention_s
    stack = windowed.stacks[0]
    assert stack.attention.window == 4096
    bare = stack.model_copy(update={"attention": stack.attention.model_copy(
        update={"window": None})})  # fmt: skip
    free = layer(FLAT, windowed, bare, cells(), 16384, "fused").attention_s
    # Whole blocks of 128 keys for the 4,096, of 16,384; no half; by FlexAttention on a GPU.
    assert FLAT.kind == "cuda"
    assert short == pytest.approx(free / 2 * 4224 / 4096 / efficiency.FLEX_FORWARD)


@pytest.mark.parametrize("name", ["llama-3-8b", "bloom-176b", "deepseek-v2", "t5-11b"])
def test_tensor_parallel_shares_out_what_it_cuts(name):
    model = of(name)
    for one, four in zip(works(FLAT, model, 1024), works(FLAT, model, 1024, tp=4), strict=True):
        assert four[1].forward_s < one[1].forward_s / 2
        if name in ("llama-3-8b", "bloom-176b"):
            assert four[1].forward_s == pytest.approx(one[1].forward_s / 4)
    ends = [head(FLAT, model, cells(tp=tp), 1024).forward_s for tp in (1, 4)]
    assert ends[1] == pytest.approx(ends[0] / 4)


def test_parts_of_a_sequence_are_shared_out_and_norms_with_them():
    model = of("llama-3-8b")
    one, two = (works(FLAT, model, 8192, cp=cp)[0][1] for cp in (1, 2))
    assert two.forward_s == pytest.approx(one.forward_s / 2)
    moving = replace(FLAT, memory_bytes_per_s=1e12, best_flops_per_s={"bf16": 1e40})
    whole, split = (
        works(moving, model, 8192, "fused", rate=1e40, tp=8, norm_split=n)[0][1] for n in (1, 8)
    )
    assert split.forward_s < 0.6 * whole.forward_s


def test_experts_are_matmuls_of_their_tokens():
    model = of("mixtral-8x7b")
    flat = {ep: works(FLAT, model, 1024, ep=ep)[0][1].forward_s for ep in (1, 8)}
    assert flat[8] == pytest.approx(flat[1])  # as many tokens come as go
    # On a real chip fewer and larger matmuls are faster.
    real = {ep: works(H100, model, 128, "fused", rate=H100.rate("bf16"), ep=ep)[0][1].forward_s
            for ep in (1, 8)}  # fmt: skip
    assert real[8] < real[1]


def test_a_layers_last_matmul_is_left_out_where_nothing_reads_its_result():
    model = of("llama-3-8b")
    stack, flops = model.stacks[0], 2 * 8192 * 4096 * 14336

    def last_s(device=FLAT, changed=stack, **values):
        return float(layer(device, model, changed, cells(**values), 8192, "fused").last_s[0])

    assert last_s() == pytest.approx(flops / RATE)
    assert last_s(tp=4) == pytest.approx(flops / RATE / 4)
    experts = stack.mlp.model_copy(update={"experts": 8, "active": 2})
    for read in ({"dropout": True}, {"norm_last": True}, {"mlp": experts}):
        assert last_s(changed=stack.model_copy(update=read)) == 0


def test_the_host_launches_fewer_operators_when_compiled_or_fused():
    model = of("gpt2")
    eager = works(H100, model, 1024, "fused")[0][1]
    tight = works(H100, model, 1024, "fused", compiled=1)[0][1]
    plain = works(H100, model, 1024, "unfused")[0][1]
    assert tight.forward_operators < eager.forward_operators < plain.forward_operators
    assert eager.backward_operators > eager.forward_operators
    assert tight.forward_s <= eager.forward_s and tight.backward_s <= eager.backward_s
    gated = [works(H100, of("llama-3-8b"), 1024, "fused", compiled=n)[0][1] for n in (0, 1)]
    assert gated[1].forward_s < gated[0].forward_s and gated[1].backward_s < gated[0].backward_s


def test_compiled_passes_are_counted_by_what_they_read_and_write():
    """Of GPT-2 under autocast: a stream of 4 bytes, matmuls of 2; nothing else takes any time."""
    moving = replace(FLAT, memory_bytes_per_s=1e12, best_flops_per_s={"bf16": 1e40})
    model, tokens = of("gpt2"), 1024
    (stack,) = model.stacks
    model = model.model_copy(update={"stacks": (stack.model_copy(update={"dropout": False}),)})
    free = {"attention_forward": 1e40, "attention_backward": 1e40}
    found = {
        tight: works(replace(moving, **free), model, tokens, "fused", rate=1e40, wide=4,
                     compiled=tight)[0][1]
        for tight in (0, 1)
    }  # fmt: skip
    bytes_ = {tight: ((work.forward_s - work.products_s) * 1e12 / tokens,
                      (work.backward_s - 2 * work.products_s) * 1e12 / tokens)
              for tight, work in found.items()}  # fmt: skip
    # Two kernels of sum, norm and cast, and one activation; biases' gradients are sums (2 bytes).
    ahead = 2 * (4 + 2 + 4 + 2) * 768 + 2 * 2 * 3072
    back = 2 * (4 * 3 + 2 * 2 + 4 + 2) * 768 + 3 * 2 * 3072 + 2 * (3 * 768 + 768 + 3072 + 768)
    assert bytes_[1][0] == pytest.approx(ahead)
    assert bytes_[1][1] == pytest.approx(back)
    # By operators of the eager program (aten's calls on fake tensors, 768 numbers a token): norms
    # 16, casts 12, sums 20, GELU 16 bytes; backwards 24 + 24 + 24 + 24, and the biases' 18. Norms
    # take longer than their bytes.
    assert 64 * 768 < bytes_[0][0] < 80 * 768
    assert 114 * 768 < bytes_[0][1] < 160 * 768


def test_float8_pays_for_its_scales_and_dearly_without_a_compiler():
    model, rate = of("llama-3-8b"), H100.rate("fp8")
    low = works(H100, model, 8192, "fused", wide=4, rate=H100.rate("bf16"), compiled=1)[0][1]
    eight, eager = (
        works(H100, model, 8192, "fused", wide=4, rate=rate, compiled=n)[0][1] for n in (1, 0)
    )
    assert 1.0 < low.forward_s / eight.forward_s < 1.5  # where matmuls alone would make it 1.9
    assert eager.forward_s > low.forward_s
    assert eager.forward_operators > 2 * eight.forward_operators
    alone = head(H100, model, cells(rate=rate), 8192).products_s
    assert alone == head(H100, model, cells(rate=H100.rate("bf16")), 8192).products_s


@pytest.mark.parametrize(
    ("chip", "casts", "trained", "copied", "kernels"),
    [
        ("H100 SXM", "delayed", True, 4.0, 1), ("H100 SXM", "current", True, 6.0, 3),
        ("H100 SXM", "delayed", False, 3.0, 1), ("B200", "delayed", True, 3.0, 1),
        ("B200", "current", True, 5.0, 3), ("B200", "blocks", True, 4.0625, 1),
        ("B200", "blocks", False, 3.03125, 1), ("RTX 5090", "current", True, 6.0, 3),
    ],
)  # fmt: skip
def test_transformer_engines_casts_are_one_kernel(chip, casts, trained, copied, kernels):
    """Bytes of a number: 16 bits read, once more for a largest number, one or two copies."""
    device = of_accelerator(ACCELERATORS[chip])
    adapters = None if trained else Adapters(16, {})
    asked = replace(cells(rate=device.rate("fp8")), casts=casts, elementwise="fused",
                    adapters=adapters)  # fmt: skip
    tokens, n, k = (np.array([float(size)]) for size in (8192, 4096, 14336))
    one, inputs, grads = _fp8_cast_s(device, asked, (tokens, n, k))
    share = efficiency.MXFP8_CAST_SHARE if casts == "blocks" else 1.0
    rate = device.memory_bytes_per_s * share
    assert one[0] == pytest.approx(copied * 8192 * 14336 / rate + kernels * device.fixed_s)
    assert inputs[0] == pytest.approx(copied * 8192 * 4096 / rate + kernels * device.fixed_s)
    assert grads[0] == 0


def test_a_model_without_a_head_has_none():
    vit = of("vit-b-16").model_copy(update={"outputs": 0})
    assert all(value == 0 for value in head(H100, vit, cells(), 197))


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_the_head_weighs_what_the_trainer_takes(name):
    spec = preset(name)
    weighed = head_weights(spec) / block_weights(spec)
    assert head_in_layers(outline(spec, name)) == pytest.approx(weighed)


def test_a_head_is_over_the_positions_that_are_predicted():
    t5: Outline = of("t5-11b")
    one = t5.model_copy(update={"predicted": 1})
    ends = [head(FLAT, m, cells(), 512).forward_s for m in (t5, one)]
    assert ends[0] == pytest.approx(512 * ends[1])


def test_tokens_are_put_in_the_order_of_their_experts_and_back():
    """Each more of a token's experts moves the token twice forwards and three times backwards,
    beside its activation; half of the tokens where two ranks of tp have whole experts."""
    slow = replace(FLAT, memory_bytes_per_s=1e9, best_flops_per_s={"bf16": 1e40})

    def moved(active, **values):
        mlp = Mlp(width=512, experts=32, active=active)
        model = Outline(name="experts", hidden=4096, stacks=(Stack(layers=1, mlp=mlp, norms=0),),
                        vocab=0, max_positions=64)  # fmt: skip
        work = layer(slow, model, model.stacks[0], cells(rate=1e40, **values), 1, "fused")
        return np.array([work.forward_s[0], work.backward_s[0]]) * 1e9

    for values, share, cut in (({}, 1, 1), ({"tp": 2}, 1, 2), ({"tp": 2, "etp": 1}, 0.5, 2)):
        more = moved(4, **values) - moved(3, **values)
        token, inner = 2 * 4096 * share, 2 * 512 / cut  # bytes
        matmuls = 2 * (token + inner)  # what both read and write beside their weights
        expected = np.array([2, 3]) * (token + inner) + np.array([1, 2]) * matmuls
        assert more == pytest.approx(expected), values


def experts_work(device, **traits):
    model = Outline(
        name="experts", hidden=1024, vocab=0, max_positions=64,
        stacks=(Stack(layers=1, mlp=Mlp(width=512, experts=32, active=4), norms=0),),
    )  # fmt: skip
    shape = replace(cells(samples=8), **traits)
    return layer(device, model, model.stacks[0], shape, 64, "fused")


def attention_work(device, attention, seq_len=64, **traits):
    model = Outline(
        name="attention", hidden=1024, vocab=0, max_positions=64,
        stacks=(Stack(layers=1, attention=attention, norms=0),),
    )  # fmt: skip
    return layer(
        device, model, model.stacks[0], replace(cells(samples=8), **traits), seq_len, "fused"
    )


def of_norms(attention, without, device, **traits):
    """What norms within attention take of 512 tokens: bytes each way, operators each way."""
    names = ("forward_s", "backward_s", "forward_operators", "backward_operators")
    works = [attention_work(device, one, **traits) for one in (attention, without)]
    more = [float(getattr(works[0], name)[0] - getattr(works[1], name)[0]) for name in names]
    return [part * device.memory_bytes_per_s / 512 for part in more[:2]], more[2:]


HEADS = AttentionShape(heads=8, kv_heads=2, head_dim=128)


def test_norms_of_queries_and_keys_read_and_write_every_head():
    """16-bit numbers, read and written forward, and backward with the gradient, at the norms' share
    of the memory's rate; ranks of tp have a part of the heads."""
    slow = replace(FLAT, memory_bytes_per_s=1e12)
    normed = HEADS.model_copy(update={"qk_norm": True})
    share = 4.15 / 4.8 / np.array([efficiency.NORM_FORWARD, efficiency.NORM_BACKWARD])
    width = (8 + 2) * 128
    for tp in (1, 2):
        moved, launched = of_norms(
            normed, HEADS, slow, elementwise="fused", tp=np.array([float(tp)])
        )
        assert moved == pytest.approx(np.array([2, 3]) * 2 * width / tp * share)
        assert launched == [2, 2 + 2]  # and their weights' gradients are stored
    moved, launched = of_norms(normed, HEADS, slow, elementwise="operators")
    assert moved == pytest.approx(np.array([36, 78]) * width)
    compiled = of_norms(normed, HEADS, slow, compiled=np.array([True]))
    assert compiled[0] == pytest.approx(np.array([0, 3 * 2]) * width)  # rotated by the same kernel


def test_torchs_norms_of_narrow_rows_take_as_long_as_of_wider_ones():
    """NVIDIA/cudnn-frontend 3929da2: 16,384 rows of 128 take 14 and 57 us on GB200."""
    gb200 = of_accelerator(ACCELERATORS["GB200"])
    normed = HEADS.model_copy(update={"qk_norm": True})
    (ahead, back), _ = of_norms(normed, HEADS, gb200)
    rows_us = 16_384 / 10 * 1e6 / gb200.memory_bytes_per_s
    assert ahead * rows_us == pytest.approx(14, rel=0.15)
    assert back * rows_us == pytest.approx(57, rel=0.15)


def test_latents_of_attention_are_normalised():
    slow = replace(FLAT, memory_bytes_per_s=1e12)
    latent = HEADS.model_copy(update={"kv_heads": 8, "query_rank": 256, "kv_rank": 128})
    share = 4.15 / 4.8 / efficiency.NORM_FORWARD

    def forward_bytes(elementwise):
        work = attention_work(slow, latent, elementwise=elementwise)
        return work.forward_s[0] * 1e12 / 512

    rotated = (9 - 4) * 2 * (8 + 8) * 128  # by operators, 9 pieces are read or written, not 4
    apart = forward_bytes("operators") - forward_bytes("fused") - rotated
    assert apart == pytest.approx((36 - 2 * 2 * share) * (256 + 128))


def test_routing_takes_a_kernel_for_each_operator():
    """However few numbers they have: Megatron-Core's 71, of which 14 only count."""
    slow = replace(FLAT, memory_bytes_per_s=1e40)
    fixed = replace(slow, fixed_s=1e-6)

    def launched_kernels(elementwise):
        found = [experts_work(one, elementwise=elementwise) for one in (fixed, slow)]
        return [
            (getattr(found[0], name)[0] - getattr(found[1], name)[0]) * 1e6
            for name in ("forward_s", "backward_s")
        ]

    matmuls = 3  # the router, and experts' two
    assert launched_kernels("kernels") == pytest.approx([20 + matmuls, 20 + 2 * matmuls])
    assert launched_kernels("fused") == pytest.approx([71 + matmuls, 71 - 14 + 2 * matmuls])


def test_routers_are_not_multiplied_in_8_bits():
    def router(rate):
        weight = Weight("router", 4096, 128, "none")
        return _weight_matmuls_s(H100, cells(rate=rate), weight, np.array([4096.0]))

    assert router(H100.rate("fp8")) == router(H100.rate("bf16"))


def test_tokens_are_copied_to_pad_them_for_8_bits():
    """To and from padded rows, each way, unless the dispatcher sends padded ones."""

    def work(**traits):
        found = experts_work(H100, elementwise="fused", ep=np.array([4.0]), **traits)
        return np.array([found.forward_s[0], found.backward_s[0]]) * H100.memory_bytes_per_s

    moved = 8 * 64 * 4 * 4 * 1024 * 2  # tokens' experts, two copies that read and write
    eight = np.array([H100.rate("fp8")])
    for rate, dispatcher, expected in (
        (eight, "alltoall", moved), (eight, "deepep", 0), (np.array([RATE]), "alltoall", 0)
    ):  # fmt: skip
        more = [work(rate=rate, dispatcher=dispatcher, pads_tokens=pads) for pads in (True, False)]
        assert more[0] - more[1] == pytest.approx([expected, expected], rel=1e-3, abs=1.0)


def test_experts_one_after_another_put_gradients_of_slices_together():
    """F.linear(x[i], self.weight[i]): zeros as large as the weight for each expert, added up."""
    slow = replace(FLAT, memory_bytes_per_s=1e12)
    grouped, loop = (experts_work(slow, experts=name) for name in ("grouped", "loop"))
    weight = 32 * 1024 * 512 * 2
    moved = 2 * (32 * weight + 2 * weight + 31 * 3 * weight)
    assert loop.weights_s[0] - grouped.weights_s[0] == pytest.approx(moved / 1e12)
    assert loop.forward_s[0] == pytest.approx(grouped.forward_s[0])
    assert loop.forward_operators[0] - grouped.forward_operators[0] == 2 * 32 * 3
    assert loop.backward_operators[0] - grouped.backward_operators[0] == 2 * 32 * (3 + 7)


def test_biases_of_experts_are_added_apart_from_their_matmuls_in_megatron():
    """And gates and values are clamped by torch's operators, unless all is one CUDA graph."""
    slow = replace(FLAT, memory_bytes_per_s=1e12, best_flops_per_s={"bf16": 1e40})

    def work(bias, elementwise, graphs="none"):
        mlp = Mlp(width=512, gated=True, experts=32, active=4, bias=bias)
        model = Outline(name="experts", hidden=1024, stacks=(Stack(layers=1, mlp=mlp, norms=0),),
                        vocab=0, max_positions=64)  # fmt: skip
        shape = replace(cells(samples=8), elementwise=elementwise, graphs=graphs)
        return layer(slow, model, model.stacks[0], shape, 64, "fused")

    more = [
        [getattr(work(True, *how), part)[0] - getattr(work(False, *how), part)[0]
         for part in ("forward_s", "backward_s")]
        for how in (("kernels",), ("fused", "step"), ("fused",))
    ]  # fmt: skip
    rows, entering = 8 * 64 * 4 * 1024, 8 * 64 * 4 * 2 * 512
    assert more[1][0] - more[0][0] == pytest.approx(28 * rows / 1e12)
    assert more[1][1] - more[0][1] == pytest.approx(40 * rows / 1e12)
    assert more[2][0] - more[1][0] == pytest.approx(8 * entering / 1e12)
    assert more[2][1] - more[1][1] == pytest.approx(15 * entering / 1e12)


def test_megatrons_router_and_dispatcher_are_operators_of_their_own():
    own, megatron = (
        experts_work(FLAT, elementwise=name).forward_operators[0] for name in ("kernels", "fused")
    )
    launched = 2 * 32 / 2  # two matmuls of each of 32 experts, without Python
    assert megatron - own == 71 - 20 + launched
    quarter = experts_work(FLAT, elementwise="fused", ep=np.array([4.0]))
    assert quarter.forward_operators[0] == megatron - launched * 3 / 4


def test_every_expert_has_launches_of_its_own_matmuls_and_casts():
    """Transformer Engine's: 2 and 4 matmuls an expert, in 8 bits 2 casts either way."""

    def launches(device, rate):
        found = [
            experts_work(device, elementwise="fused", ep=np.array([ep]), rate=np.array([rate]))
            for ep in (1.0, 2.0)
        ]
        return [
            (getattr(found[0], name)[0] - getattr(found[1], name)[0]) / 16
            for name in ("forward_operators", "backward_operators")
        ]

    assert launches(FLAT, RATE) == [2 / 2, 4]
    assert launches(H100, H100.rate("fp8")) == [4 / 2, 6]


def test_what_is_a_cuda_graph_is_not_launched():
    """Routers have 37 of Megatron-Core's operators; blocks' graphs leave experts to the host."""
    whole, routers, blocks = (
        experts_work(FLAT, elementwise="fused", graphs=name)
        for name in ("none", "routers", "blocks")
    )
    assert whole.forward_operators - routers.forward_operators == 37
    assert whole.backward_operators - routers.backward_operators == 37
    assert blocks.forward_operators == 71 - 37 + 2 * 32 / 2
    assert blocks.backward_operators == 71 - 37 + 4 * 32
    model = of("llama-3-8b")
    shape = replace(cells(), elementwise="fused", graphs="blocks")
    dense = layer(FLAT, model, model.stacks[0], shape, 64, "fused")
    assert dense.forward_operators == dense.backward_operators == 0


def test_tritons_experts_take_as_much_longer_as_was_measured():
    device = replace(FLAT, triton_experts=1.5)
    grouped, triton = (experts_work(device, experts=name) for name in ("grouped", "triton"))
    router = 2 * 8 * 64 * 1024 * 32 / RATE
    assert triton.products_s[0] - router == pytest.approx(1.5 * (grouped.products_s[0] - router))
    more = triton.forward_operators[0] - grouped.forward_operators[0]
    apart = experts_work(device, experts="triton", ep=np.array([4.0]))
    assert 0 < more < apart.forward_operators[0] - grouped.forward_operators[0]


def attention_s(chip, kernel, length, model="llama-3-8b"):
    """A forward and a backward of one sample's attention in one layer."""
    device = of_accelerator(ACCELERATORS[chip])
    work = works(device, of(model), length, kernel, rate=device.rate("bf16"))[0][1]
    return float(work.attention_s[0]), float(work.attention_back_s[0])


def test_attention_is_as_fast_as_its_kernel_on_the_chip():
    # 2 × 2 × S² × 4096 / 2 FLOPs forward, 2.5 times backward, of one sample of Llama 3 8B.
    flops = 2 * 2 * 8192**2 * 4096 / 2
    # TFLOP/s of causal attention, heads of 128, at 8,192: cuDNN 9.19 on H200 644 and 541, on GB200
    # 1,574 and 1,332; FlashAttention-2 on H100 (16,384) 335 and on A100 200, forwards.
    for chip, kernel, forward, backward in (
        ("H200 SXM", "fused", 644e12, 541e12), ("GB200", "fused", 1574e12, 1332e12),
        ("H100 SXM", "flash2", 325e12, 307e12), ("A100 SXM 80 GB", "fused", 200e12, 178e12),
    ):  # fmt: skip
        ahead, back = attention_s(chip, kernel, 8192)
        assert flops / ahead == pytest.approx(forward, rel=0.08)
        assert 2.5 * flops / back == pytest.approx(backward, rel=0.1)
    cudnn, flash2 = (attention_s("B200", kernel, 16384)[0] for kernel in ("cudnn", "flash2"))
    assert flash2 / cudnn == pytest.approx(1332 / 394, rel=0.1)  # B200, 16,384
    # Of a kernel that the chip has not, what it takes instead.
    assert attention_s("A100 SXM 80 GB", "flash3", 8192) == attention_s(
        "A100 SXM 80 GB", "fused", 8192
    )


def test_short_sequences_reach_less_of_attentions_rate():
    reached = [length**2 / attention_s("H200 SXM", "cudnn", length)[0] for length in (2048, 16384)]
    assert reached[0] / reached[1] == pytest.approx(484 / 673, rel=0.08)  # cuDNN 9.19, causal


def test_fused_casts_and_kept_weights_make_fp8_cheaper():
    rate = H100.rate("fp8")
    eager, fused = (
        layer(H100, of("llama-3-8b"), of("llama-3-8b").stacks[0],
              replace(cells(rate=rate, samples=1), elementwise=how, casts=casts), 8192, "cudnn")
        for how, casts in (("kernels", "separate"), ("fused", "current"))
    )  # fmt: skip
    # Without a compiler a cast is 33 bytes of a number (torchao), fused 6.
    assert fused.products_s[0] < 0.7 * eager.products_s[0]
    bound = 2 * 8192 * 6.98e9 / 32 / (H100.peak_flops_per_s["fp8"])
    assert fused.products_s[0] > bound
