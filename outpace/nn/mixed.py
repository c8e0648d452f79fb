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
# Of matrix products outside of fp8's blocks, None for that of the weights.
DTYPES: Mapping[Precision, torch.dtype | None] = {
    name: None if traits.low is None else _LOW[traits.low]
    for name, traits in PRECISION_TRAITS.items()
}


@dataclass(frozen=True)
class MixedPrecision:
    """`cast()` is entered around each forward; `scaler` is None unless the loss is scaled.

    `cast(True)` is the same within `casts_kept`.

    `weights` is the dtype to keep weights in, None for as they are. `wide_gradients`: whether
    gradients of 16 bits are to be made fp32 before their scale is taken from them. `wide_sums`:
    whether those of several micro-batches are to be added up in fp32.
    """

    dtype: torch.dtype | None
    cast: Callable[..., AbstractContextManager[None]]
    scaler: torch.amp.GradScaler | None
    weights: torch.dtype | None = None
    wide_gradients: bool = False
    wide_sums: bool = False

    @property
    def keeps_masters(self) -> bool:
        """Whether the optimizer is to keep the weights in fp32 too."""
        return self.wide_gradients or self.wide_sums


@contextmanager
def fp32_products(precision: Precision, device: torch.device) -> Iterator[None]:
    """Let CUDA round operands in fp32 to TF32 for their products, where a precision asks for it.

    TF32 has fp32's range and 10 bits of its 23 (NVIDIA, "A100 Tensor Core GPU Architecture", 2020).
    Raises BadInputError on devices that have no such products.
    """
    if precision != "tf32":
        yield
        return
    if device.type != "cuda":
        raise BadInputError(
            f"--precision tf32 is how tensor cores of a CUDA device multiply fp32 numbers; the "
            f"device is {device.type}, which computes fp32 as it is. Use --precision fp32."
        )
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "tf32"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def weights_dtype(precision: Precision) -> torch.dtype | None:
    """The dtype in which weights are kept, None where it is the model's own."""
    name = WEIGHTS.get(precision)
    return None if name is None else {"bf16": torch.bfloat16, "fp16": torch.float16}[name]


def lower_weights(objective: nn.Module, mixed: MixedPrecision) -> dict[str, Tensor]:
    """Cast an objective's weights as `mixed` says, in their place.

    Returns the weights that train as they were, in fp32, by their names in the objective's `model`,
    where the optimizer's masters are to begin with them. Of a model without memory there are none.
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
    """Whether autocast keeps the casts of weights until a forward ends: as asked, or where it pays.

    A transformer uses each matrix once in a forward: kept, casts save no time, and hold the memory
    of all weights in 16 bits where backward computes them again or gathers them again.
    """
    return unknown_code if asked is None else asked


@contextmanager
def casts_kept() -> Iterator[None]:
    """Autocast keeps casts of weights until this ends, over forwards whose `cast` is "kept".

    Autocast drops them when its outermost context ends: so it is told that there is one outside of
    all. Weights must not change in the meantime.
    """
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()


def _no_cast(kept: bool = False) -> AbstractContextManager[None]:
    return nullcontext()


def make_mixed(
    precision: Precision,
    device: torch.device,
    cache: bool,
    unknown_code: bool = False,
    fully_shards: bool = False,
) -> MixedPrecision:
    """Autocast for `device`; `cache` keeps a weight's cast for the rest of one forward.

    `fully_shards`: shards of weights are gathered in 16 bits, so that they, in fp32, are the master
    weights of "bf16-master" (`records.precisions.SHARD_DTYPES`).

    With weights of 16 bits all is computed in their dtype, without autocast; but under it where
    code is unknown, which may bring tensors of other dtypes to them.
    """
    dtype = DTYPES[precision]
    if dtype is None:
        return MixedPrecision(None, _no_cast, None)

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
        _no_cast if alone else cast,
        scaler,
        weights,
        wide_gradients=master and scaler is not None,
        wide_sums=master and scaler is None,
    )
