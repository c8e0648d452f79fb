"""Float8 matmuls in a model's blocks, by torchao.

Micikevicius et al., "FP8 Formats for Deep Learning", arXiv 2209.05433: e4m3 for weights and
activations, e5m2 for gradients. Each tensor is scaled by its largest magnitude, computed for each
matmul ("dynamic" scaling).
"""

from collections.abc import Sequence

import torch
from torch import nn

from outpace.nn.torchao import torchao_module
from outpace.records.errors import BadInputError

_LEAST = (8, 9)  # compute capability: Ada Lovelace and Hopper
_MULTIPLE = 16  # both dimensions of a matrix, as the hardware's kernels require


def require_fp8(device: torch.device) -> None:
    """Raise BadInputError if the device has no float8 matmuls."""
    if device.type != "cuda":
        raise BadInputError(
            f"--precision fp8 needs a GPU with float8 matmuls (NVIDIA, compute capability "
            f"{'.'.join(map(str, _LEAST))} or more), but the device is {device.type}. Use "
            "--precision bf16."
        )
    found = torch.cuda.get_device_capability(device)
    if found < _LEAST:
        raise BadInputError(
            f"--precision fp8 needs a GPU of compute capability {'.'.join(map(str, _LEAST))} or "
            f"more (float8 matmuls); this one has {'.'.join(map(str, found))}. Use "
            "--precision bf16."
        )


def apply_fp8(blocks: Sequence[nn.Module], emulate: bool = False) -> None:
    """Replace the matmuls of the blocks' linear layers by float8 ones; names and weights stay.

    Layers with a dimension that is not a multiple of 16 stay unchanged. `emulate` computes in fp32
    what the hardware would, for tests. Raises BadInputError if no layer is replaced.
    """
    float8 = torchao_module("float8", "--precision fp8")
    # Pad, because reading one position per sample changes the number of rows.
    config = float8.Float8LinearConfig(emulate=emulate, pad_inner_dim=True)
    changed = 0
    for block in blocks:
        float8.convert_to_float8_training(
            block, config=config, module_filter_fn=_has_fp8_dimensions
        )
        changed += sum(
            isinstance(part, float8.float8_linear.Float8Linear) for part in block.modules()
        )
    if not changed:
        raise BadInputError(
            "--precision fp8: no linear layer of the model's blocks has dimensions that are "
            f"multiples of {_MULTIPLE}. Use --precision bf16."
        )


def _has_fp8_dimensions(layer: nn.Module, name: str) -> bool:
    assert isinstance(layer, nn.Linear)
    return layer.in_features % _MULTIPLE == 0 and layer.out_features % _MULTIPLE == 0
