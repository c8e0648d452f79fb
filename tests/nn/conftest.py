import platform
from collections.abc import Callable

import pytest
import torch

from outpace.nn.transformer import Transformer
from outpace.records.model import ModelSpec

# What of a family the shared dimensions leave open; a window shorter than the sequences used.
PECULIAR = {
    "gpt2": {"kv_heads": 4},
    "llama": {
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_positions": 16,
        }
    },
    "mistral": {"sliding_window": 7},
    "qwen2": {"tied": True, "sliding_window": 5, "window_layers": (1,)},
    "qwen3": {"head_dim": 12},
    "bert": {"kv_heads": 4},
}


@pytest.fixture
def make_spec() -> Callable[..., ModelSpec]:
    def make(family: str = "llama", **values: object) -> ModelSpec:
        small = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48}
        rest = {"vocab": 61, "max_positions": 40}
        return ModelSpec.model_validate(
            {"family": family, **small, **rest, **PECULIAR[family], **values}
        )

    return make


@pytest.fixture
def make_model(make_spec: Callable[..., ModelSpec]) -> Callable[..., Transformer]:
    """A model with weights large enough for attention to matter."""

    def make(family: str = "llama", **values: object) -> Transformer:
        model = Transformer(make_spec(family, **values))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 2:
                    parameter.mul_(8)
        return model.eval()

    return make


@pytest.fixture
def tokens() -> torch.Tensor:
    """(3, 24) token numbers below 61."""
    return torch.randint(61, (3, 24), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def native_bf16() -> None:
    """Skip a test where the CPU has no bf16 units.

    There, oneDNN multiplies 16-bit matrices as copies in fp32, which take memory of their own.
    """
    arm = platform.machine() in ("aarch64", "arm64")
    supported = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if not (supported and (arm or torch.cpu._is_avx512_bf16_supported())):
        pytest.skip("this CPU has no bf16 units, so matmuls in 16 bits take memory of their own")
