"""Agreement between ranks on which parameters have a gradient.

If an expert gets no tokens, or a branch or layer is skipped, parameters may have a gradient on some
ranks only. Ranks without one then use zeros, so that all ranks reduce the same tensors. But a
parameter without a gradient on any rank must end up without one, as in a single process: optimizers
skip it, whereas a zero gradient would still apply weight decay and momentum.

The same message tells a rank whose forward has written to parameters whether the forwards of all
other ranks have written to parameters too.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from outpace.interop.custom_model import CustomObjective
from outpace.nn.user_warning import warn_user
from outpace.records.errors import first_names


def ranks_may_differ(objective: nn.Module) -> bool:
    """Return whether ranks may use different parameters in a step.

    Ranks may with a custom model, but not with a model that outpace builds.
    """
    return isinstance(objective, CustomObjective)


class GradientUse:
    """A collective in each step that tells which parameters have a gradient on any rank.

    It is an all-reduce of one byte per parameter in `named`. Only a rank that lacks a gradient, or
    that has written to a parameter, waits for the result. `steps` is the number of steps already
    done.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        steps: int = 0,
    ) -> None:
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self.steps = steps
        self._group = group
        # The bytes after those for parameters: whether any rank has written to parameters, and
        # whether any has not.
        self._all = torch.ones(len(self._parameters) + 2, dtype=torch.uint8, device=device)
        self._all[-2] = 0
        self._has_warned = False
        self.find_writes: Callable[[], bool] = lambda: False  # see later_writes.py
        self.all_wrote = False

    def agree(self, used: Sequence[bool]) -> None:
        """Set the gradients of parameters that no rank used in this step to None. Collective.

        `used`: whether this rank used each parameter.
        """
        self.steps += 1
        self.all_wrote = False
        complete, wrote = all(used), self.find_writes()
        flags = self._all.clone()
        if not complete or wrote:
            flags.copy_(torch.tensor([*used, wrote, not wrote], dtype=torch.uint8))
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group)
        if complete and not wrote:
            return
        *on_any_rank, _, one_has_not = [bool(flag) for flag in flags.tolist()]
        self.all_wrote = not one_has_not
        for parameter, on_any in zip(self._parameters, on_any_rank, strict=True):
            if not on_any:
                parameter.grad = None
        pairs = zip(self._names, on_any_rank, used, strict=True)
        self._warn_of_unused([name for name, on_any, mine in pairs if on_any and not mine])

    def _warn_of_unused(self, lacking: Sequence[str]) -> None:
        if not lacking or self._has_warned:
            return
        self._has_warned = True
        warn_user(
            f"from step {self.steps} on, rank {dist.get_rank()} does not use all the trained "
            f"parameters that other ranks use ({len(lacking)} of {len(self._parameters)} in that "
            f"step: {first_names(lacking)}), as happens with branches, dropped layers and experts "
            "without tokens. Their gradients count as zeros on this rank, as in one process with "
            "all samples"
        )
