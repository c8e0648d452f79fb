"""Mixed precision: autocast around the forward, and a loss scaler for fp16.

Micikevicius et al., "Mixed Precision Training", ICLR 2018.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from outpace.records.plan import Precision

DTYPES = {"fp64": None, "fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Mixed:
    """`cast()` is entered around each forward; `scaler` is None unless the precision is fp16."""

    dtype: torch.dtype | None
    cast: Callable[[], AbstractContextManager[None]]
    scaler: torch.amp.GradScaler | None


def make_mixed(precision: Precision, device: torch.device, cache: bool) -> Mixed:
    """Autocast for `device`; `cache` keeps a weight's cast for the rest of one forward."""
    dtype = DTYPES[precision]
    if dtype is None:
        return Mixed(None, nullcontext, None)

    def cast() -> AbstractContextManager[None]:
        return torch.autocast(device.type, dtype=dtype, cache_enabled=cache)

    scaler = torch.amp.GradScaler(device.type) if precision == "fp16" else None
    return Mixed(dtype, cast, scaler)
