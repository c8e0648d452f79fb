"""float8 matmuls of blocks, emulated; on hardware that has them, with it."""

import pytest
import torch

from outpace.nn.fp8 import apply_fp8, require_fp8
from outpace.nn.loss import LanguageModelObjective
from outpace.nn.model_options import find_blocks
from outpace.nn.transformer import Transformer
from outpace.records.errors import BadInputError
from outpace.records.model import ModelSpec

SPEC = {"family": "llama", "layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 96,
        "vocab": 96, "max_positions": 64}  # fmt: skip


def gradients(objective):
    tokens = torch.randint(0, 96, (2, 17), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}
    objective.zero_grad()
    loss, count = objective(batch)
    (loss / count).backward()
    named = objective.model.named_parameters()
    return float(loss.detach() / count), {n: p.grad.clone() for n, p in named}


def test_matmuls_are_rounded_to_float8_and_names_stay():
    objective = LanguageModelObjective(Transformer(ModelSpec.parse(SPEC, "test")))
    loss, known = gradients(objective)
    apply_fp8(find_blocks(objective.model), emulate=True)
    rounded, found = gradients(objective)
    assert list(found) == list(known)
    assert rounded != loss and rounded == pytest.approx(loss, rel=1e-3)
    up = "blocks.0.mlp.up.weight"
    apart = float((found[up] - known[up]).norm() / known[up].norm())
    assert 1e-3 < apart < 0.2  # e5m2 has 2 bits, e4m3 has 3


def test_matmuls_fit_the_hardware_where_one_place_of_each_sample_is_read(monkeypatch):
    """The gradient of a weight sums over a batch's 7 places, which are padded to 16."""
    inner, multiply = [], torch._scaled_mm

    def seen(left, right, *args, **kwargs):
        inner.append(left.shape[1])
        return multiply(left, right, *args, **kwargs)

    monkeypatch.setattr(torch, "_scaled_mm", seen)
    block = torch.nn.Sequential(torch.nn.Linear(64, 96, bias=False)).to(torch.bfloat16)
    apply_fp8([block])
    block(torch.randn(7, 64, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
    assert len(inner) == 3 and all(size % 16 == 0 for size in inner)


def test_fp8_is_refused_without_hardware_and_without_fitting_layers():
    with pytest.raises(BadInputError, match=r"but the device is cpu\. Use"):
        require_fp8(torch.device("cpu"))
    odd = Transformer(ModelSpec.parse({**SPEC, "hidden": 40, "ffn": 52}, "test"))
    with pytest.raises(BadInputError, match="multiples of 16"):
        apply_fp8(find_blocks(odd))


@pytest.mark.gpu
def test_fp8_trains_on_a_gpu():
    device = torch.device("cuda")
    require_fp8(device)
    objective = LanguageModelObjective(Transformer(ModelSpec.parse(SPEC, "test"))).to(device)
    apply_fp8(find_blocks(objective.model))
    with torch.device(device), torch.autocast("cuda", torch.bfloat16):
        tokens = torch.randint(0, 96, (2, 16))
        loss, _ = objective({"tokens": tokens, "targets": tokens})
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in objective.parameters())
