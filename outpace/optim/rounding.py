"""Stochastic rounding to bf16, the same on every rank that holds the same values."""

from dataclasses import dataclass, field
from hashlib import blake2b

import torch
from torch import Tensor, nn

from outpace.nn.spread import is_spread

_LOST_BITS = 16  # of fp32's 32, bf16 has the upper ones
_KEPT = -(1 << _LOST_BITS)


def drawn(shape: torch.Size, noise: torch.Generator, device: torch.device) -> Tensor:
    """A uniform number of as many bits as rounding drops, int32, for each value."""
    return torch.randint(
        0, 1 << _LOST_BITS, shape, generator=noise, device=device, dtype=torch.int32
    )


def rounded(x: Tensor, noise: torch.Generator | Tensor) -> Tensor:
    """fp32 to bf16, up or down with probabilities that make the expected result `x`.

    Gupta et al., "Deep Learning with Limited Numerical Precision", ICML 2015, §3.1. To round
    towards zero is to drop the lower bits; a uniform number of as many bits is added before, and
    carries over with the probability that the dropped bits are of the last one kept. `noise` are
    these numbers, which are used up, or what draws them.
    """
    if isinstance(noise, torch.Generator):
        noise = drawn(x.shape, noise, x.device)
    bits = noise.add_(x.view(torch.int32)).bitwise_and_(_KEPT)
    return bits.view(torch.float32).bfloat16()


@dataclass(frozen=True)
class Noise:
    """Random numbers for a parameter's step: a function of seed, name, step and place.

    So replicas draw alike, the shards of a tensor apart, and a resumed run what it would have
    drawn. `names` are the parameters' in a single process.
    """

    seed: int = 0
    names: dict[Tensor, str] = field(default_factory=dict)

    def of(self, parameter: nn.Parameter, step: int, what: str) -> torch.Generator:
        """For `what` is rounded of a parameter in a step."""
        key = (self.seed, self.names.get(parameter, ""), step, _place(parameter), what)
        digest = blake2b(repr(key).encode(), digest_size=8).digest()
        device = "cpu" if parameter.device.type == "meta" else parameter.device
        return torch.Generator(device).manual_seed(int.from_bytes(digest, "big") >> 1)


def _place(parameter: Tensor) -> tuple[int, ...]:
    """Where in the whole tensor this rank's part begins."""
    if not is_spread(parameter):
        return ()
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return tuple(offset)
