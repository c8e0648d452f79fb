"""Which parameters get a gradient on any rank, where ranks may use different ones.

Experts without tokens, branches and dropped layers leave a rank without a gradient for parameters
that others have one for. A strategy then puts zeros in their place, so that all ranks exchange the
same tensors; and what has a gradient on no rank is to have none at the end, as in one process:
optimizers pass it over, where zeros would still decay weights and move by momentum.
"""

import warnings
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from outpace.interop.own import OwnObjective


def ranks_may_differ(objective: nn.Module) -> bool:
    """Whether ranks may use different parameters: a user's module can, outpace's own do not."""
    return isinstance(objective, OwnObjective)


class GradientUse:
    """Tells ranks which of `parameters` have a gradient on any of them.

    One message of a byte for each parameter. Only a rank that lacks a gradient looks at the answer,
    so no other waits for its device.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        device: torch.device,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._parameters = list(parameters)
        self._group = group
        self._all = torch.ones(len(self._parameters), dtype=torch.uint8, device=device)
        self._told = False

    def agree(self, used: Sequence[bool]) -> None:
        """Drop the gradients of what is `used` on no rank. Collective."""
        complete = all(used)
        flags = self._all.clone()
        if not complete:
            flags.copy_(torch.tensor(used, dtype=torch.uint8))
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group)
        if complete:
            return
        on_any_rank = [bool(flag) for flag in flags.tolist()]
        for parameter, on_any in zip(self._parameters, on_any_rank, strict=True):
            if not on_any:
                parameter.grad = None
        self._tell(sum(on_any and not mine for on_any, mine in zip(on_any_rank, used, strict=True)))

    def _tell(self, lacking: int) -> None:
        """Say once that this rank left out what others used."""
        if not lacking or self._told:
            return
        self._told = True
        warnings.warn(
            f"rank {dist.get_rank()} did not use {lacking} of {len(self._parameters)} trained "
            "parameters in a step in which other ranks did (experts without tokens, branches, "
            "dropped layers): zeros stand in for its gradients, as in one process over all samples",
            UserWarning,
            stacklevel=2,
        )
