"""Values that depend on their index alone: the same bits by any part, in any dtype's rounding."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.nn import random_values
from outpace.nn.random_values import fill_normal, stream_key
from outpace.nn.transformer import Transformer, drawn_transformer, initial_value
from outpace.planner.model.shapes import parameter_shapes
from outpace.records.model import ModelSpec

CPU = torch.device("cpu")
SPEC = ModelSpec(
    family="llama", layers=2, hidden=32, heads=4, kv_heads=2, vocab=61, max_positions=16, tied=False
)
# The first five outputs for the seed 1234567, as the generator's authors publish them.
SPLITMIX64 = (
    6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431,
    16408922859458223821,
)  # fmt: skip


def test_the_bits_are_splitmix64s():
    words = random_values._splitmix64_words(1234567, 0, 5, CPU)
    assert tuple(int(word) % 2**64 for word in words) == SPLITMIX64


@settings(max_examples=60, deadline=None)
@given(start=st.integers(0, 5000), count=st.integers(1, 3000), at_once=st.integers(1, 900))
def test_any_part_of_a_tensor_draws_its_own_values(start, count, at_once):
    whole = fill_normal(torch.empty(8000), 7, "blocks.0.mlp.up.weight", 0.02)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(random_values, "_AT_ONCE_CPU", at_once)
        part = fill_normal(torch.empty(count), 7, "blocks.0.mlp.up.weight", 0.02, start)
    assert torch.equal(part, whole[start : start + count])


def test_values_are_normal_and_streams_apart():
    one, other = (fill_normal(torch.empty(2**20), 1, name, 1.0).double() for name in "ab")
    assert abs(one.mean()) < 4 / 2**10 and abs(one.var() - 1) < 4 * 2**0.5 / 2**10
    assert abs((one**4).mean() - 3) < 4 * 96**0.5 / 2**10
    for lag in (1, 2, 3, 4, 32):
        assert abs((one[:-lag] * one[lag:]).mean()) < 4 / 2**10
    assert abs((one * other).mean()) < 4 / 2**10
    assert len({stream_key(seed, name) for seed in range(50) for name in "abc"}) == 150


def test_what_is_kept_in_16_bits_is_rounded_once_from_fp32():
    wide = fill_normal(torch.empty(999), 3, "x", 0.02)
    low = fill_normal(torch.empty(999, dtype=torch.bfloat16), 3, "x", 0.02)
    assert torch.equal(low, wide.bfloat16())


def test_a_model_is_the_same_however_it_is_drawn():
    whole = Transformer(SPEC, seed=5).state_dict()
    placed = drawn_transformer(SPEC, 5, CPU, torch.bfloat16).state_dict()
    shapes = parameter_shapes(SPEC)
    for name, value in whole.items():
        assert torch.equal(placed[name], value.bfloat16()), name
        assert torch.equal(initial_value(SPEC, 5, name, shapes[name]), value), name


@pytest.mark.gpu
def test_a_gpu_draws_what_a_processor_does():
    there = drawn_transformer(SPEC, 5, torch.device("cuda"), torch.float32).state_dict()
    for name, value in Transformer(SPEC, seed=5).state_dict().items():
        assert torch.equal(there[name].cpu(), value), name
