"""Mixed precision: autocast around the forward, and a loss scaler for fp16.

Micikevicius et al., "Mixed Precision Training", ICLR 2018.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from outpace.records.errors import BadInputError
from outpace.records.precisions import (
    MASTERS,
    PRECISION_TRAITS,
    SCALED,
    WEIGHTS,
    LowDtype,
    Precision,
)

_LOW: Mapping[LowDtype, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Dtype of matmuls outside fp8's blocks; None for the weights' dtype.
DTYPES: Mapping[Precision, torch.dtype | None] = {
    name: None if traits.low is None else _LOW[traits.low]
    for name, traits in PRECISION_TRAITS.items()
}


@dataclass(frozen=True)
class MixedPrecision:
    """Mixed precision of a run. Enter `cast()` around each forward.

    `cast(True)` keeps the casts of weights within `casts_kept`. `scaler` is None unless the loss is
    scaled. `weights` is the dtype in which weights are stored, None for that of the model.
    `wide_gradients`: whether 16-bit gradients are cast to fp32 before they are unscaled.
    `wide_sums`: whether the gradients of several micro-batches are summed in fp32.
    """

    dtype: torch.dtype | None
    cast: Callable[..., AbstractContextManager[None]]
    scaler: torch.amp.GradScaler | None
    weights: torch.dtype | None = None
    wide_gradients: bool = False
    wide_sums: bool = False

    @property
    def keeps_masters(self) -> bool:
        """Return whether the optimizer keeps fp32 master weights."""
        return self.wide_gradients or self.wide_sums


@contextmanager
def fp32_matmuls(precision: Precision, device: torch.device) -> Iterator[None]:
    """Let CUDA round the fp32 operands of matmuls to TF32 if the precision is tf32.

    TF32 has fp32's range and 10 of its 23 mantissa bits (NVIDIA, "A100 Tensor Core GPU
    Architecture", 2020). Raises BadInputError on devices without TF32.
    """
    if precision != "tf32":
        yield
        return
    if device.type != "cuda":
        raise BadInputError(
            f"--precision tf32 needs the tensor cores of a CUDA device, but the device is "
            f"{device.type}, which computes in full fp32. Use --precision fp32."
        )
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "tf32"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def weights_dtype(precision: Precision) -> torch.dtype | None:
    """Return the dtype in which weights are stored; None for that of the model."""
    name = WEIGHTS.get(precision)
    return None if name is None else {"bf16": torch.bfloat16, "fp16": torch.float16}[name]


def lower_weights(objective: nn.Module, mixed: MixedPrecision) -> dict[str, Tensor]:
    """Cast an objective's weights in place, as `mixed` specifies.

    Returns the original fp32 values of trained weights, by name in the objective's `model`, if the
    optimizer keeps master weights, which start from them. Empty for a model on the meta device.
    """
    model: nn.Module = objective.model  # type: ignore[assignment]
    before = {
        name: parameter.detach()
        for name, parameter in model.named_parameters()
        if mixed.keeps_masters and parameter.requires_grad and not parameter.is_meta
    }
    if mixed.weights is not None:
        objective.to(mixed.weights)
    return before


def keeps_casts(asked: bool | None, unknown_code: bool) -> bool:
    """Return whether autocast caches the casts of weights during a forward.

    `asked` decides if given. By default, only unknown code has a cache: a transformer uses each
    matrix once per forward, so a cache saves no time, and it holds 16-bit copies of all weights
    even if the backward recomputes or gathers them again.
    """
    return unknown_code if asked is None else asked


@contextmanager
def casts_kept() -> Iterator[None]:
    """Make autocast keep the casts of weights over several forwards, until this context ends.

    Autocast drops casts at the end of its outermost context, so this enters an outer one. Weights
    must not change in the meantime.
    """
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()


def _without_autocast(kept: bool = False) -> AbstractContextManager[None]:
    return nullcontext()


def make_mixed(
    precision: Precision,
    device: torch.device,
    cache: bool,
    unknown_code: bool = False,
    fully_shards: bool = False,
) -> MixedPrecision:
    """Return the casts, loss scaling and weight dtype for `precision` on `device`.

    `cache`: autocast caches weights during a forward. `fully_shards`: weights are sharded and
    gathered in 16 bits, so the fp32 shards are the master weights of "bf16-master"
    (`records.precisions.SHARD_DTYPES`). 16-bit weights need no autocast, except in unknown code,
    which may combine them with tensors of other dtypes.
    """
    dtype = DTYPES[precision]
    if dtype is None:
        return MixedPrecision(None, _without_autocast, None)

    def cast(kept: bool = False) -> AbstractContextManager[None]:
        return torch.autocast(device.type, dtype=dtype, cache_enabled=cache or kept)

    scaler = torch.amp.GradScaler(device.type) if precision in SCALED else None
    weights = weights_dtype(precision)
    alone = weights is not None and not unknown_code
    master = precision in MASTERS
    if fully_shards and precision == "bf16-master":
        weights, master = None, False
    return MixedPrecision(
        dtype,
        _without_autocast if alone else cast,
        scaler,
        weights,
        wide_gradients=master and scaler is not None,
        wide_sums=master and scaler is None,
    )
