"""Fingerprints of tensors, to detect changes that a tensor's version counter misses.

torch counts in-place changes of a tensor in `_version`, except updates of running averages by fused
batch normalisation, and changes through `.data`.
"""

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

_PIECE = 1 << 18  # values hashed at a time: 2 MiB of int64
# Odd, so that multiplication by them is invertible modulo 2^64. From splitmix64 (Steele, Lea and
# Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014), as signed numbers.
_STEP, _MIX = -7046029254386353131, -4658895280553007687
_LOW_HALF = (1 << 32) - 1
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def fingerprint(tensor: Tensor) -> int | None:
    """Return a 64-bit hash of a tensor's values, independent of strides.

    Returns None if there are no values (meta and fake tensors, compilation), or if they are not
    dense in memory (sparse, nested and quantized tensors, subclasses that cannot be reinterpreted).
    """
    has_no_data = tensor.is_meta or isinstance(tensor, FakeTensor) or torch.compiler.is_compiling()
    if has_no_data or tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        return None
    try:
        return _hash_values(tensor)
    except (NotImplementedError, RuntimeError, TypeError):
        if type(tensor) is Tensor or type(tensor) is nn.Parameter:
            raise
        return None


def _hash_values(tensor: Tensor) -> int:
    values = tensor.detach().resolve_conj().resolve_neg()
    if values.is_complex():
        values = torch.view_as_real(values)
    bits = values.reshape(-1).view(_INTEGERS[values.itemsize])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for number, piece in enumerate(bits.split(_PIECE)):
        begin = number * _PIECE + 1
        place = torch.arange(begin, begin + len(piece), device=tensor.device)
        mixed = (piece.long() ^ (place * _STEP)) * _MIX
        mixed ^= (mixed >> 32) & _LOW_HALF
        total += (mixed * _STEP).sum()
    return int(total)
