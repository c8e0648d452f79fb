import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import (
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from outpace.catalog.models import PRESETS
from outpace.nn.classifier import ClassificationObjective, Classifier
from outpace.nn.loss import LanguageModelObjective, linear_loss_sum
from outpace.nn.model_options import apply_checkpointing
from outpace.nn.transformer import Transformer
from outpace.planner.model.flops import (
    forward_flops,
    parameter_count,
    step_flops,
)
from outpace.planner.model.outline import outline
from outpace.planner.model.outline_flops import forward_flops as outline_flops
from outpace.records.model import ModelSpec

SEQ_LEN, SAMPLES = 24, 3
SMALL = {"layers": 3, "hidden": 32, "heads": 4, "ffn": 56, "vocab": 71, "max_positions": 32}
SPECS = {
    "gpt2": {},
    "llama": {"kv_heads": 2},  # grouped queries
    "mistral": {"kv_heads": 1, "sliding_window": 5},
    "qwen2": {"kv_heads": 2, "tied": True},
    "qwen3": {"kv_heads": 2, "head_dim": 12},
    "bert": {},
}


@pytest.fixture(params=SPECS)
def spec(request):
    return ModelSpec.model_validate({"family": request.param, **SMALL, **SPECS[request.param]})


def _fused_forward(query, key, value, *args, out_val=None, **kwargs):
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def _fused_backward(grad, query, key, value, *args, out_val=None, **kwargs):
    return sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape)


for _formula in (_fused_forward, _fused_backward):
    _formula._get_raw = True  # given tensors, not shapes

# torch 2.13 counts the fused attention of GPUs but has no entry for the CPU's, which does the
# same work: it gets the GPU's formulas.
_ATEN = torch.ops.aten
CPU_ATTENTION = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _fused_forward,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _fused_backward,
}


def _counted(spec, mode="none", backend=SDPBackend.FLASH_ATTENTION, backward=True, classes=None):
    """What torch counts in a forward, or a forward and backward, really run."""
    tokens = targets = torch.zeros(SAMPLES, SEQ_LEN, dtype=torch.int64)
    if classes is None:
        objective = LanguageModelObjective(Transformer(spec), "plain", None)
    else:
        objective, targets = (
            ClassificationObjective(Classifier(Transformer(spec), classes)),
            tokens[:, 0],
        )
    apply_checkpointing(objective.model, mode)
    with (
        sdpa_kernel(backend),
        FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION) as counter,
        torch.set_grad_enabled(backward),
    ):
        loss_sum, _ = objective({"tokens": tokens, "targets": targets})
        if backward:
            loss_sum.backward()
    return counter.get_total_flops()


def _beyond_windows(spec, matmuls, layers=None, queries=SEQ_LEN):
    """What torch counts of masked attention beyond the windows, of so many matmuls."""
    beyond = sum(
        SEQ_LEN - min(SEQ_LEN, spec.layer_window(layer) or SEQ_LEN)
        for layer in (range(spec.layers) if layers is None else layers)
    )
    return matmuls * SAMPLES * 2 * spec.heads * spec.head_dim * queries * beyond


def test_forward_is_what_torch_counts(spec):
    counted = _counted(spec, backward=False) - _beyond_windows(spec, 2)
    assert forward_flops(spec, SEQ_LEN, SAMPLES) == counted


def test_a_models_step_is_what_torch_counts_without_fusion(spec):
    """Unfused, the backward of attention has four matmuls: what the model needs."""
    counted = _counted(spec, backend=SDPBackend.MATH) - _beyond_windows(spec, 6)
    assert step_flops(spec, SEQ_LEN, SAMPLES) == counted


@pytest.mark.parametrize(
    "mode", ["none", "selective", "attention", "full", ["full", "attention", "none"]]
)
def test_the_hardwares_step_is_what_torch_counts(spec, mode):
    counted = _counted(spec, mode) - _beyond_windows(spec, 7)
    modes = mode if isinstance(mode, list) else [mode] * spec.layers
    counted -= _beyond_windows(spec, 2, [at for at, one in enumerate(modes) if one == "full"])
    assert step_flops(spec, SEQ_LEN, SAMPLES, mode) == counted


@pytest.mark.parametrize(
    "mode", [None, "none", "selective", "attention", "full", ["full", "attention", "none"]]
)
def test_a_classifiers_last_block_is_counted_where_it_is_read(spec, mode):
    """Pooler and classes, which see one place, are counted by whoever knows them."""
    unfused = {"backend": SDPBackend.MATH} if mode is None else {}
    counted = _counted(spec, mode or "none", classes=3, **unfused)
    pooler = 0 if spec.causal else spec.hidden**2
    beside = 6 * SAMPLES * (pooler + 3 * spec.hidden)
    modes = mode if isinstance(mode, list) else [mode] * spec.layers
    for at, one in enumerate(modes):
        matmuls = (6 if mode is None else 7) + 2 * (one == "full")
        queries = 1 if at == spec.layers - 1 else SEQ_LEN
        counted -= _beyond_windows(spec, matmuls, [at], queries)
    assert step_flops(spec, SEQ_LEN, SAMPLES, mode, head=False) + beside == counted


def _profiled(loss_kind):
    """FLOPs of the matmuls in a loss and its backward, from the shapes that the profiler saw.

    `FlopCounterMode` does not look into torch's chunked operator; the profiler does.
    """
    hidden = torch.randn(1100, 16, requires_grad=True)
    weight = torch.randn(40, 16, requires_grad=True)
    targets = torch.zeros(1100, dtype=torch.int64)
    with torch.profiler.profile(record_shapes=True, acc_events=True) as profile:
        linear_loss_sum(hidden, weight, None, targets, loss_kind).backward()
    first_factor = {"aten::mm": 0, "aten::addmm": 1, "aten::addmm_": 1}
    flops = 0
    for event in profile.events():
        if event.name in first_factor:
            (m, k), (_, n) = event.input_shapes[first_factor[event.name] :][:2]
            flops += 2 * m * k * n
    return flops


def test_the_chunked_loss_costs_what_the_plain_one_costs():
    assert _profiled("chunked") == _profiled("plain") == 3 * 2 * 1100 * 16 * 40


def test_full_recomputation_with_dropout_repeats_the_last_matmul_too():
    spec = ModelSpec.model_validate({"family": "gpt2", **SMALL, "dropout": 0.1})
    # On CPU attention with dropout is not fused: four matmuls backward, and two again.
    fused_extra = step_flops(spec, SEQ_LEN, SAMPLES, "none") - step_flops(spec, SEQ_LEN, SAMPLES)
    wanted = step_flops(spec, SEQ_LEN, SAMPLES, "full") - fused_extra
    assert wanted == _counted(spec, "full", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])


def test_a_window_counts_what_it_reaches():
    """Of a long sequence each token has the window's keys; a window as long as it changes nothing.

    Gemma's and Qwen's windows are of some layers.
    """
    full = PRESETS["llama-3.2-1b"].spec
    for layers in (None, (0, 3)):
        windowed = full.model_copy(update={"sliding_window": 512, "window_layers": layers})
        spared = (16 if layers is None else 2) * 12 * 2048 * 8192 * (8192 - 512)
        assert step_flops(full, 8192, 1) - step_flops(windowed, 8192, 1) == spared
        assert step_flops(full, 512, 1) == step_flops(windowed, 512, 1)
        assert outline_flops(outline(windowed, "x"), 8192, 2) == forward_flops(windowed, 8192, 2)


@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 5))
def test_flops_are_linear_in_samples_and_quadratic_in_length(seq_len, samples, times):
    spec = PRESETS["llama-3.2-1b"].spec
    once = step_flops(spec, seq_len, samples)
    assert step_flops(spec, seq_len, samples * times) == times * once
    linear = 6 * samples * seq_len * (parameter_count(spec) - 33 * 2048)  # all but the norms
    assert once - linear == 12 * samples * 16 * 2048 * seq_len**2  # PaLM, appendix B


def test_published_counts():
    # Brown et al., arXiv 2005.14165, table D.1: GPT-3 175B, 3.14E+23 training FLOPs for 300e9
    # tokens at 2,048, counted as 6·N with N = 174,600 million, without attention.
    gpt3 = PRESETS["gpt3-175b"].spec
    per_token = step_flops(gpt3, 2048, 1) / 2048
    attention = 12 * 96 * 12288 * 2048
    assert (per_token - attention) * 300e9 == pytest.approx(3.14e23, rel=0.005)
    # Narayanan et al., arXiv 2104.04473, §5.1, eq. 3 with full recomputation:
    # F = 96·B·s·l·h²·(1 + s/(6h) + V/(16·l·h)), which repeats the last matmul too.
    s, layers, h, v = 2048, 96, 12288, 50257
    published = 96 * 8 * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    last_matmul, scores_again = 2 * 8 * s * layers * h * 4 * h, 2 * 8 * layers * h * s**2
    ours = step_flops(gpt3, s, 8, "full") + last_matmul - scores_again
    assert math.isclose(ours, published, rel_tol=1e-9)


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_are_those_of_the_module(name):
    spec = PRESETS[name].spec
    with torch.device("meta"):
        model = Transformer(spec)
    assert parameter_count(spec) == sum(parameter.numel() for parameter in model.parameters())


def test_planning_needs_no_torch():
    program = (
        "import sys, outpace.planner.model.flops, outpace.catalog.models;"
        "import outpace.catalog.accelerators;"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
