"""What the trace says of compiled forwards: what the compiler saves, which is less than eager."""

import pytest

from outpace.catalog.accelerators import ACCELERATORS
from outpace.records.model import ModelSpec
from outpace.records.plan import Plan
from outpace.records.settings import TrainSettings
from outpace.trace.account import account, record_parts, summarise_parts
from outpace.trace.device import Rules
from outpace.trace.steps import Workload

pytestmark = [
    pytest.mark.fakeworld,
    pytest.mark.filterwarnings("default"),  # the compiler warns of its own doings
]
H100 = ACCELERATORS["H100 SXM"]
SPEC = ModelSpec(
    family="gpt2", layers=3, hidden=256, heads=4, vocab=64, max_positions=128, dropout=0.0
)
SAMPLES, LENGTH = 16, 128
# The compiled loss keeps logits and hidden states until its backward, the eager one does not.
LOSS_BYTES = SAMPLES * LENGTH * (2 * (SPEC.vocab + SPEC.hidden) + 16)


def forward(spec, **options):
    """Bytes by kind at the end of the last forward, traced without extending layers."""
    plan = Plan(micro_batch=SAMPLES, precision="bf16", **options)
    work = Workload(spec, plan, LENGTH, 1, TrainSettings(lr=1e-3))
    traces = record_parts(work, 0, Rules(H100), 1)
    return summarise_parts(traces, plan, 0, Rules(H100))


def test_a_compiled_block_saves_the_sum_before_its_mlp_in_16_bits(monkeypatch):
    """The matmul that was added is saved rather than the sum of fp32: 25 MB for each block of
    GPT-2 at 16 × 1,024, as one H200 showed (7.46 GiB eager, 7.18 by compiled blocks)."""
    monkeypatch.setattr("outpace.nn.model_options.compiled_region", lambda plan: "blocks")
    eager, compiled = forward(SPEC), forward(SPEC, compile=True)
    less = eager.peak.by_kind["activations"] - compiled.peak.by_kind["activations"]
    hidden_bytes = 2 * SAMPLES * LENGTH * SPEC.hidden
    assert less + LOSS_BYTES >= SPEC.layers * hidden_bytes
    assert compiled.flops == eager.flops


def test_a_whole_compiled_forward_frees_what_its_backward_has_read():
    eager, compiled = forward(SPEC), forward(SPEC, compile=True)
    assert compiled.peak_memory_bytes <= eager.peak_memory_bytes + LOSS_BYTES
    assert compiled.flops == eager.flops


def test_what_is_recomputed_is_traced_as_it_is_eagerly():
    eager, compiled = (
        forward(SPEC, checkpointing="full", compile=on).peak_memory_bytes for on in (False, True)
    )
    assert compiled == pytest.approx(eager, abs=LOSS_BYTES)


@pytest.mark.slow
def test_a_deep_compiled_model_is_extended_from_shallow_ones():
    deep = SPEC.model_copy(update={"layers": 9})
    plan = Plan(micro_batch=SAMPLES, precision="bf16", compile=True)
    found = account(deep, plan, seq_len=LENGTH, accumulation=1, accelerator=H100)
    whole = forward(deep, compile=True)
    assert found.peak_memory_bytes == pytest.approx(whole.peak_memory_bytes, rel=0.01)
