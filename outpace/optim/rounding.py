"""Stochastic rounding to bf16, with equal results on all ranks that have the same values."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import accumulate

import torch
from torch import Tensor, nn

from outpace.nn.dtensor import is_spread
from outpace.nn.random_values import GAMMA, mix, wrap_64_bits

_LOST_BITS = 16  # bf16 keeps the upper 16 of fp32's 32 bits
_KEPT = -(1 << _LOST_BITS)
_LOST = (1 << _LOST_BITS) - 1

# Random streams of joined parameters: for each parameter its key, the end of its values, its size.
Streams = tuple[Tensor, Tensor, Tensor]


def draw_bits(shape: torch.Size, noise: torch.Generator, device: torch.device) -> Tensor:
    """Return a random int32 per value, with one random bit for each bit that rounding drops."""
    return torch.randint(
        0, 1 << _LOST_BITS, shape, generator=noise, device=device, dtype=torch.int32
    )


def round_to_bf16(x: Tensor, noise: torch.Generator | Tensor) -> Tensor:
    """Round fp32 values up or down to bf16, at random, so that the expected value is `x`.

    Gupta et al., "Deep Learning with Limited Numerical Precision", ICML 2015, §3.1. Dropping the
    lower bits rounds towards zero. If a uniform integer of as many bits is added first, it carries
    over with a probability equal to the dropped fraction. `noise` is a tensor of such integers,
    which is overwritten, or a generator that draws them.
    """
    if isinstance(noise, torch.Generator):
        noise = draw_bits(x.shape, noise, x.device)
    bits = noise.add_(x.view(torch.int32)).bitwise_and_(_KEPT)
    return bits.view(torch.float32).bfloat16()


@dataclass(frozen=True)
class Noise:
    """Random numbers that depend only on the seed, the step, and a value's place in the model.

    The place is the parameter's name and the value's position in it. So replicas draw the same
    numbers, shards of a tensor draw different numbers, and a resumed run draws the numbers of an
    uninterrupted run. `names` are the parameters' names in a single process.
    """

    seed: int = 0
    names: dict[Tensor, str] = field(default_factory=dict)

    def generator(self, parameter: nn.Parameter, step: int, what: str) -> torch.Generator:
        """Return the generator for rounding `what` (a moment or the weight) in a step."""
        key = (self.seed, self.names.get(parameter, ""), step, _shard_offset(parameter), what)
        device = "cpu" if parameter.device.type == "meta" else parameter.device
        return torch.Generator(device).manual_seed(_stable_hash(key) >> 1)

    def key(self, parameter: nn.Parameter) -> int:
        """Return the 64-bit key of a parameter's random numbers; see `random_words`."""
        return _stable_hash((self.seed, self.names.get(parameter, ""), _shard_offset(parameter)))

    def step_key(self, step: int) -> int:
        """Return the number to add to all keys in a step, as a signed 64-bit integer."""
        return wrap_64_bits(_stable_hash((self.seed, step)))


def make_streams(keys: Sequence[int], sizes: Sequence[int], device: torch.device) -> Streams:
    """Create the random streams of parameters that are updated as one. The host does not wait.

    Each tensor of the result has at least two entries, so that compiled code does not depend on the
    number of parameters.
    """
    ends = list(accumulate(sizes))
    # Positions run over all joined values, so each key is shifted to make its parameter start at 0.
    each = zip(keys, ends, sizes, strict=True)
    first = [wrap_64_bits(key - end + size) for key, end, size in each]
    rows = [first, ends, list(sizes)]
    if len(sizes) == 1:
        rows = [first * 2, ends * 2, [*sizes, 0]]
    on_host = torch.tensor(rows, dtype=torch.int64, pin_memory=device.type == "cuda")
    keys_P, ends_P, sizes_P = on_host.to(device, non_blocking=True).unbind()
    return keys_P, ends_P, sizes_P


def random_words(streams: Streams, count: int) -> Tensor:
    """Return a word of 64 random bits for each of `count` values, (count,) int64.

    A parameter's words are consecutive terms of the SplitMix64 sequence (see `random_values`) that
    its key selects. So they do not depend on the parameters with which it is joined.
    """
    keys_P, ends_P, sizes_P = streams
    place_N = torch.arange(count, device=keys_P.device)
    if torch.compiler.is_compiling():  # the lookup of each value's parameter fuses into the kernel
        owner_N = torch.bucketize(place_N, ends_P, out_int32=True, right=True)
        key_N = keys_P.index_select(0, owner_N)
    else:
        key_N = keys_P.repeat_interleave(sizes_P, output_size=count)
    return mix(key_N.add_(place_N).mul_(GAMMA))


def field_of(words: Tensor, number: int) -> Tensor:
    """Return 16-bit field `number` (0 to 3) of each 64-bit word, as int32.

    These are the random bits that `round_to_bf16` takes.
    """
    return (words >> (_LOST_BITS * number)).bitwise_and_(_LOST).int()


def _stable_hash(key: tuple[object, ...]) -> int:
    """Return a 64-bit hash that is the same in every process."""
    return int.from_bytes(blake2b(repr(key).encode(), digest_size=8).digest(), "big")


def _shard_offset(parameter: Tensor) -> tuple[int, ...]:
    if not is_spread(parameter):
        return ()
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return tuple(offset)
