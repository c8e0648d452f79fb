"""Normal random values that are a pure function of a seed, a name and an index.

Each value is computed from its index alone (Salmon et al., "Parallel random numbers: as easy as 1,
2, 3", SC 2011), so every device, and every rank with a shard of a tensor, draws the same values in
place. The bits are SplitMix64's (Steele, Lea & Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014, fig. 17): each group of 16 bits selects one of 65,536 quantiles of the
normal distribution, up to 4.3 standard deviations. Only integer arithmetic and a lookup are
involved, so results are equal on all devices.
"""

import hashlib
from functools import cache

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

_QUANTILES, _VALUES = 1 << 16, 4  # _QUANTILES of the distribution; _VALUES per 64-bit word


def wrap_64_bits(number: int) -> int:
    """Return the lower 64 bits of `number` as a signed integer."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


# The constants of SplitMix64, as signed numbers.
GAMMA, _FIRST, _SECOND = map(
    wrap_64_bits, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
# Values drawn per chunk, so that their bits stay in a processor's cache.
_AT_ONCE_CPU, _AT_ONCE = 1 << 18, 1 << 26


def stream_key(seed: int, name: str) -> int:
    """Return the key of a stream for a seed and a name, 64 bits as a signed integer."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


@torch.no_grad()
def fill_normal(out: Tensor, seed: int, name: str, std: float, start: int = 0) -> Tensor:
    """Fill `out` (contiguous) in place with values `start`, `start` + 1, … of a stream; return it.

    Values are N(0, std²), drawn on the tensor's device in fp32 before rounding to its dtype.
    Tensors without values (meta, fake tensors) stay unchanged.
    """
    if out.is_meta or isinstance(out, FakeTensor):
        return out
    key, flat = stream_key(seed, name), out.view(-1)
    table = _normal_quantiles(out.device) * std
    at_once = _AT_ONCE_CPU if out.device.type == "cpu" else _AT_ONCE
    for begin in range(0, flat.numel(), at_once):
        part = flat[begin : begin + at_once]
        first, before = divmod(start + begin, _VALUES)
        words = _splitmix64_words(key, first, -(-(before + part.numel()) // _VALUES), out.device)
        places = words.view(torch.int16)[before : before + part.numel()].int()
        part.copy_(table.index_select(0, places.add_(_QUANTILES // 2)))
    return out


def _splitmix64_words(key: int, first: int, count: int, device: torch.device) -> Tensor:
    """Return words `first`, `first` + 1, … of SplitMix64 seeded with `key`, (count,) int64."""
    return mix(torch.arange(first + 1, first + 1 + count, device=device).mul_(GAMMA).add_(key))


def mix(state: Tensor) -> Tensor:
    """Apply SplitMix64's output function to states, int64, in place."""
    state = _xor_shift_right_(state, 30).mul_(_FIRST)
    state = _xor_shift_right_(state, 27).mul_(_SECOND)
    return _xor_shift_right_(state, 31)


def _xor_shift_right_(state: Tensor, bits: int) -> Tensor:
    # The mask makes torch's arithmetic shift an unsigned one.
    return state.bitwise_xor_((state >> bits).bitwise_and_((1 << (64 - bits)) - 1))


@cache
def _normal_quantiles(device: torch.device) -> Tensor:
    """Return 65,536 equally probable quantiles of N(0, 1), fp32, ascending."""
    with unset_fake_temporarily(), torch.device("cpu"):
        shares = (torch.arange(_QUANTILES // 2, dtype=torch.float64) + 0.5) / _QUANTILES
        below = torch.special.ndtri(shares)
        return torch.cat([below, -below.flip(0)]).float().to(device)
