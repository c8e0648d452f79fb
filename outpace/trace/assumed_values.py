"""Values for forwards that read tensors while weights and activations are on the meta device.

Integers that depend only on tokens and sizes are computed. A router is assumed to send equally many
tokens to each expert.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

_aten = torch.ops.aten
_EMPTY = (_aten.empty, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided)
# Maximum number of elements of a float tensor that is computed: a mask of 65,536 tokens, which some
# families build from floats. Larger tensors, such as initial states, are never read, and computing
# them would take time and memory.
_MOST_FLOATS = 2**16


class AssumedValues:
    """Runner of operators for a model whose tensors have no values (meta tensors).

    Where code reads values, as routing to experts does, it assumes that experts are used equally.
    Results that depend only on CPU tensors are computed.
    """

    def __init__(self) -> None:
        # The router's last decision: the number of experts, and the number of tokens sent to them.
        self.experts = 0
        self._choices = 0
        self._reads = 0

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator. torch raises an error if this would read the values of meta tensors."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not any(tensor.is_meta for tensor in tensors):
            return self._run_with_values(func, args, kwargs)
        packet = func.overloadpacket
        if packet in (_aten.topk, _aten.argmax):
            self._record_routing(packet, args, kwargs)
        elif packet is _aten.nonzero:
            return self._assume_indices(args[0])
        elif packet is _aten._to_copy and _is_cpu(kwargs.get("device")):
            return self._assume_counts(func, args, kwargs)
        args, kwargs = tree_map_only(Tensor, lambda one: one.to("meta"), (args, kwargs))
        return func(*args, **kwargs)

    def _run_with_values(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator without meta inputs; on the CPU if code may read its result.

        Code may read integers, booleans and small tensors of other types. Random tensors stay on
        the meta device and uninitialised memory is zeroed, so results are reproducible.
        """
        made = func(*args, **kwargs)
        if (
            isinstance(made, Tensor)
            and made.is_meta
            and (not made.dtype.is_floating_point or made.numel() <= _MOST_FLOATS)
            and torch.Tag.nondeterministic_seeded not in func.tags
        ):
            made = func(*args, **{**kwargs, "device": torch.device("cpu")})
        if func.overloadpacket in _EMPTY and not made.is_meta:
            made.zero_()
        return made

    def _record_routing(self, packet: Any, args: Any, kwargs: Any) -> None:
        scores = args[0]
        dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
        each = args[1] if packet is _aten.topk else 1
        self.experts = int(scores.shape[-1 if dim is None else dim])
        self._choices = scores.numel() // max(1, self.experts) * int(each)

    def _assume_indices(self, mask: Tensor) -> Tensor:
        """Return the indices at which a mask is assumed to be nonzero.

        After a routing decision, a 1-D mask over experts selects all experts. Each later mask
        selects an equal share of the tokens, for the next expert. Before any decision, masks have
        values, and the indices are computed.
        """
        if mask.dim() == 1 and 0 < self.experts <= len(mask):
            self._reads = 0
            return torch.arange(self.experts, device="cpu").unsqueeze(1)
        if not self.experts:
            return mask.nonzero()
        rows = _part_size(mask.numel(), self.experts, self._reads % self.experts)
        self._reads += 1
        return torch.empty((rows, mask.dim()), dtype=torch.int64, device="meta")

    def _assume_counts(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        """Move counts of tokens per expert to the CPU, with assumed values: equal for all experts.

        Other tensors stay on the meta device.
        """
        counts = args[0]
        if counts.is_floating_point() or counts.shape != (self.experts,):
            moved: Tensor = func(*args, **{**kwargs, "device": torch.device("meta")})
            return moved
        shares = [_part_size(self._choices, self.experts, i) for i in range(self.experts)]
        return torch.tensor(shares, dtype=counts.dtype, device="cpu")


def _part_size(many: int, parts: int, number: int) -> int:
    """Return the size of part `number` if `many` items are divided as equally as possible."""
    return many * (number + 1) // parts - many * number // parts


def _is_cpu(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cpu"
