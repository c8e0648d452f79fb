"""AdamW with moments of few bits: the formats are torchao's, the steps are AdamW's."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from outpace.optim.build import begin_step
from outpace.optim.low_precision_adamw import LowPrecisionAdamW
from outpace.optim.low_precision_moments import CodeTable
from outpace.optim.rounding import Noise, field_of, make_streams, random_words, round_to_bf16
from outpace.planner.memory.optimizer_bytes import LONGEST_BLOCK, scale_block_length

CPU = torch.device("cpu")
HOW = {"lr": 1e-2, "betas": (0.9, 0.95)}


@pytest.mark.parametrize("signed", [True, False])
def test_codes_and_values_are_torchaos(signed):
    from torchao.optim.quant_utils import quantize_4bit_with_qmap, quantize_8bit_with_qmap

    x = torch.rand(8, 256) * (2 if signed else 1) - int(signed)
    x[0, 0] = 1.0
    eight, four = CodeTable(8, signed, CPU), CodeTable(4, signed, CPU)
    theirs = quantize_8bit_with_qmap(x, eight.values), quantize_4bit_with_qmap(x, four.values)
    assert four.codes(x).shape == (8, 128)  # two in a byte
    for table, numbers in zip((eight, four), theirs, strict=True):
        ours, other = table.read(table.codes(x)), table.values[numbers.int()]
        # Midway between two values, either is right: 3 in 100 draws of 2,048 have such a number.
        assert (ours != other).sum() <= 3
        torch.testing.assert_close((ours - x).abs(), (other - x).abs(), rtol=0, atol=1e-7)


def pair(kept, shape=(64, 128), dtype=torch.float32):
    torch.manual_seed(0)
    start = torch.randn(shape)
    known, found = nn.Parameter(start.clone()), nn.Parameter(start.to(dtype))
    low = LowPrecisionAdamW([{"params": [found], "weight_decay": 0.1}], kept, Noise(), **HOW)
    return known, found, torch.optim.AdamW([known], weight_decay=0.1, **HOW), low


# torch 2.12 says of torchao's own step, which is eager here, that nothing was compiled.
@pytest.mark.filterwarnings("ignore:torch.compile with fullgraph=True found no compiled frames")
def test_steps_are_torchaos_where_its_blocks_are_rows():
    from torchao.optim import AdamW4bit, AdamW8bit

    for kept, theirs in (("8bit", AdamW8bit), ("4bit", AdamW4bit)):
        width = LONGEST_BLOCK[kept]
        known, found, _, low = pair(kept, (64, width))
        other = theirs([known], weight_decay=0.1, **HOW)
        for step in range(1, 4):
            known.grad = torch.randn_like(known)
            found.grad = known.grad.clone()
            with torch.compiler.set_stance("force_eager"):
                other.step()
            begin_step(low, step, HOW["lr"])
            low.step()
        torch.testing.assert_close(found.detach(), known.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("kept", "after"), [("bf16", 5e-3), ("8bit", 0.03), ("4bit", 0.3)])
def test_the_first_step_is_adamws_and_the_next_ones_nearly(kept, after):
    known, found, adamw, low = pair(kept)
    moved = known.detach().clone()
    for step in range(1, 11):
        known.grad = torch.randn_like(known)
        found.grad = known.grad.clone()
        adamw.step()
        begin_step(low, step, HOW["lr"])
        low.step()
        if step == 1:
            # What is kept of the moments is rounded, what is stepped by is not.
            torch.testing.assert_close(found, known, rtol=1e-6, atol=1e-7)
    apart = float((found - known).detach().norm() / (known - moved).detach().norm())
    assert apart < after


def test_blocks_are_parts_of_rows_and_small_tensors_stay_fp32():
    assert scale_block_length((64, 256), "8bit") == 256
    assert scale_block_length((64, 384), "8bit") == 128  # 384 = 3 · 128
    assert scale_block_length((64, 256), "4bit") == 128
    assert scale_block_length((64, 256), "8bit", split=8) == 32  # each rank has 32 columns
    assert scale_block_length((64, 48), "8bit") is None
    assert scale_block_length((4096,), "8bit") is None
    assert scale_block_length((8, 256), "8bit") is None  # 2,048 values


def test_rounding_is_right_on_average_and_keeps_what_bf16_has():
    drawn = torch.Generator().manual_seed(0)
    last = 2.0**-7  # of 1 in bf16
    x = torch.full((200_000,), 1 + 0.25 * last)
    up = round_to_bf16(x, drawn)
    assert set(up.unique().tolist()) == {1.0, 1 + last}
    assert float((up > 1).float().mean()) == pytest.approx(0.25, abs=0.005)
    special = torch.tensor([0.0, -1.5, math.inf, -math.inf, math.nan])
    torch.testing.assert_close(round_to_bf16(special, drawn).float(), special, equal_nan=True)


def test_small_updates_of_bf16_weights_are_not_lost():
    weight = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
    low = LowPrecisionAdamW([{"params": [weight]}], "bf16", Noise(), lr=1e-4, betas=(0.9, 0.95))
    for step in range(1, 21):
        weight.grad = torch.ones_like(weight)
        begin_step(low, step, 1e-4)
        low.step()
    # Each step is 1e-4, and half of the last bit below 1 is 2e-3.
    assert float(weight.detach().float().mean()) == pytest.approx(1 - 20 * 1e-4, abs=5e-4)


def test_what_is_drawn_depends_on_seed_name_step_and_kind_only():
    one, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    noise = Noise(1, {one: "a.weight", other: "a.weight"})

    def drawn(noise, parameter, *key):
        return torch.rand(4, generator=noise.generator(parameter, *key)).tolist()

    known = drawn(noise, one, 3, "weight")
    assert drawn(noise, other, 3, "weight") == known
    for wrong in (
        drawn(noise, one, 4, "weight"),
        drawn(noise, one, 3, "exp_avg"),
        drawn(Noise(2, {one: "a.weight"}), one, 3, "weight"),
        drawn(Noise(1, {one: "b.weight"}), one, 3, "weight"),
    ):
        assert wrong != known


def counted(keys, sizes):
    return random_words(make_streams(keys, sizes, CPU), sum(sizes))


def test_counted_numbers_are_uniform_and_each_parameters_own():
    one, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    noise = Noise(1, {one: "a.weight", other: "b.weight"})
    keys = [noise.key(one), noise.key(other)]
    assert noise.key(one) == Noise(1, {other: "a.weight"}).key(other)  # a replica's
    assert len({*keys, Noise(2, noise.names).key(one)}) == 3
    assert len({noise.step_key(step) for step in range(99)}) == 99
    words = counted(keys, [50_000, 50_001])
    assert torch.equal(words, torch.cat([counted(keys[:1], [50_000]), counted(keys[1:], [50_001])]))
    fields = torch.stack([field_of(words, number) for number in range(3)]).double() / 65536
    assert fields.min() >= 0 and fields.max() < 1
    # Of uniform numbers, and of those beside each other, within five standard errors of 300,000.
    assert float(fields.mean()) == pytest.approx(0.5, abs=5 * 0.289 / 300_000**0.5)
    centered = fields - 0.5
    for product in (centered[0] * centered[1], centered[1] * centered[2],
                    centered[:, 1:] * centered[:, :-1], centered[:, :50_000] * centered[:, 50_001:]
                    ):  # fmt: skip
        assert float(product.mean()) == pytest.approx(0, abs=5 / 12 / product.numel() ** 0.5)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_compiled_step_counts_the_same_numbers():
    """One function for many parameters and for one, whose weights it rounds to the same bits."""

    def stepped(compiled):
        torch.manual_seed(0)
        held = [nn.Parameter(torch.randn(n).bfloat16()) for n in (300, 77, 40_000)]
        noise = Noise(3, {one: str(number) for number, one in enumerate(held)})
        low = LowPrecisionAdamW([{"params": held}], "bf16", noise, compiled=compiled, **HOW)
        for step in (1, 2):
            for one in held:
                one.grad = torch.randn(one.shape).bfloat16()
            begin_step(low, step, HOW["lr"])
            low.step()
        return torch.cat([one.detach() for one in held[:2]])

    compiled, single = stepped(True), stepped(False)
    # An ulp of an update may carry a bit, or not.
    assert float((compiled != single).float().mean()) < 0.01


@pytest.mark.gpu
def test_numbers_that_a_gpu_counts_are_a_cpus():
    """By operators and by the compiled kernel."""
    keys, sizes = [5, -(1 << 62), 77], [1000, 70_001, 9]
    known = counted(keys, sizes)
    streams = make_streams(keys, sizes, torch.device("cuda"))
    for function in (random_words, torch.compile(random_words, fullgraph=True, dynamic=True)):
        assert torch.equal(function(streams, sum(sizes)).cpu(), known)


class Operators(TorchDispatchMode):
    """Counts operators while it is entered."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("kept", "dtype"), [("bf16", torch.bfloat16), ("8bit", torch.float32),
                                             ("4bit", torch.float32)])  # fmt: skip
def test_small_parameters_are_stepped_together_as_each_alone(kept, dtype, monkeypatch):
    """Bit for bit; one of them has missed a step, and an empty one is another rank's."""

    def trained():
        torch.manual_seed(0)
        shapes = [(32, 256)] * 12 + [(64, 128)] * 6 + [(7,)] * 12 + [(512, 256), (0, 256)]
        held = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
        noise = Noise(3, {one: str(number) for number, one in enumerate(held)})
        low = LowPrecisionAdamW([{"params": held, "weight_decay": 0.1}], kept, noise, **HOW)
        for step in range(1, 4):
            for number, one in enumerate(held):
                one.grad = None if (step, number) == (2, 5) else torch.randn(one.shape).to(dtype)
            begin_step(low, step, HOW["lr"])
            with Operators() as operators:
                low.step()
        states = [value for one in held for _, value in sorted(low.state[one].items())]
        return [one.detach() for one in held] + states, operators.count

    together, fewer = trained()
    monkeypatch.setattr("outpace.optim.multi_tensor.JOINED_VALUES", {})
    alone, count = trained()
    assert all(map(torch.equal, together, alone)) and len(together) == len(alone)
    assert fewer < 0.45 * count


def small_step(kept, count):
    """A small model's parameters, and a step of theirs."""
    torch.manual_seed(0)
    held = [nn.Parameter(torch.randn(8, 128)) for _ in range(count)]
    noise = Noise(3, {one: str(number) for number, one in enumerate(held)})
    low = LowPrecisionAdamW([{"params": held}], kept, noise, **HOW)

    def step(number):
        drawn = torch.Generator().manual_seed(number)
        for one in held:
            one.grad = torch.randn(one.shape, generator=drawn)
        begin_step(low, number, HOW["lr"])
        low.step()

    return held, low, step


@pytest.mark.parametrize("kept", ["bf16", "8bit"])
@pytest.mark.parametrize("what", ["weight", "exp_avg", "step"])
def test_what_is_put_in_the_place_of_weights_or_states_is_stepped(kept, what):
    known, untouched, step_known = small_step(kept, 4)
    found, low, step = small_step(kept, 4)
    for number in (1, 2, 3):
        step_known(number)
        step(number)
        replaced = found[number]
        if what == "weight":
            replaced.data = replaced.detach().clone()
        else:
            low.state[replaced][what] = low.state[replaced][what].clone()
    assert all(map(torch.equal, known, found))
    assert [float(low.state[one]["step"]) for one in found] == [3.0] * 4
    for one, other in zip(known, found, strict=True):
        assert all(map(torch.equal, untouched.state[one].values(), low.state[other].values()))


def test_a_step_calls_little_python_for_each_parameter(command):
    done = command(Path(__file__).with_name("count_calls.py"), 4, 20, check=True)
    few, many = json.loads(done.stdout)
    assert 0 < (many - few) / 16 < 12
