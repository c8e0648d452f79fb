"""Messages between the stages of a custom model's pipeline, each sent after its form."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd.forward_ad import unpack_dual
from torch.utils._pytree import tree_leaves

from outpace.parallel.custom.block_values import Form, Key
from outpace.records.errors import BadInputError

_DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip


@dataclass
class Message:
    """A message between stages: the output of the last block, and attributes that blocks set.

    `returned` has the output of each block so far as meta tensors, from which later stages learn
    structure, shapes and dtypes.
    """

    form: Form
    tensors: list[Tensor]
    values: dict[Key, tuple[Form, list[Tensor]]] = field(default_factory=dict)
    returned: list[Any] = field(default_factory=list)

    def flat(self) -> list[Tensor]:
        """Return all tensors, in order."""
        return [*self.tensors, *(t for _, tensors in self.values.values() for t in tensors)]

    def select(self, keys: Sequence[Key]) -> "Message":
        """Return the form of a message that has only the values of `keys`, with meta tensors."""
        values = {key: self.values[key] for key in keys}
        return Message(self.form, self.tensors, values, self.returned).to_meta()

    def to_meta(self) -> "Message":
        """Return the message with tensors on the meta device."""
        return self.replace_tensors([t.detach().to("meta") for t in self.flat()])

    def replace_tensors(self, tensors: Sequence[Tensor]) -> "Message":
        """Return a message of the same structure with other tensors."""
        given = iter(tensors)
        sent = [next(given) for _ in self.tensors]
        values = {
            key: (form, [next(given) for _ in some]) for key, (form, some) in self.values.items()
        }
        return Message(self.form, sent, values, self.returned)


class _DetachableCopy(torch.autograd.Function):
    """An identity function whose output torch's split backward may detach in place.

    The input itself must not be detached: it may be a view, a parameter, or saved for a backward.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def make_sendable(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor with the values of `tensor`, to send to another stage.

    If the tensor requires gradients, the result is a separate node of the autograd graph.
    """
    tensor = tensor.contiguous()
    if not tensor.requires_grad:
        return tensor
    handed: Tensor = _DetachableCopy.apply(tensor)  # type: ignore[no-untyped-call]
    return handed


def refuse_dtypes(message: Message, name: str) -> BadInputError | None:
    """Return an error about a dtype that cannot be sent between processes; None if all can be."""
    for tensor in message.flat():
        if tensor.dtype not in _DTYPES:
            return BadInputError(
                f"block {name!r} returns or stores a tensor of {tensor.dtype} that is needed "
                f"outside of it, but pipeline stages can only send {', '.join(map(str, _DTYPES))} "
                "and complex numbers of these. Use one of these dtypes, or zero3."
            )
    return None


def refuse_transforms(name: str, output: Any) -> None:
    """Refuse a block's output inside a torch.func transform, outside of which it is invalid.

    Outputs with tangents of forward-mode derivatives are refused as well.
    """
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor) and (
            is_functorch_wrapped_tensor(leaf) or unpack_dual(leaf).tangent is not None
        ):
            raise BadInputError(
                f"block {name!r} runs inside a torch.func transform (jvp, grad, vmap) or a "
                "forward-mode derivative that spans all blocks, but each pipeline stage runs only "
                "some of them. Apply the transform inside a block, or use ddp."
            )


def bytes_of(tensor: Tensor) -> Tensor:
    """View a contiguous tensor of any dtype as bytes."""
    return tensor.view(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0).byte()


def send(message: Message | None, group: dist.ProcessGroup, to: int) -> None:
    """Send a message's structure, shapes and dtypes to rank `to` of the group, then its tensors.

    None instead of a message tells the receiver that this rank has failed.
    """
    form = None if message is None else message.to_meta()
    dist.send_object_list([form], group=group, group_dst=to)
    if message is not None:
        for tensor in message.flat():
            dist.send(bytes_of(tensor.detach().contiguous()), group=group, group_dst=to)


def receive(device: torch.device, group: dist.ProcessGroup, source: int) -> Message | None:
    """Receive a message from rank `source` of the group; None if the sender has failed."""
    told: list[Message | None] = [None]
    with warnings.catch_warnings():  # torch warns when it unpickles its own types
        warnings.simplefilter("ignore", FutureWarning)
        dist.recv_object_list(told, group=group, group_src=source)
    form = told[0]
    if form is None:
        return None
    tensors = [
        torch.empty(tensor.shape, dtype=tensor.dtype, device=device) for tensor in form.flat()
    ]
    for tensor in tensors:
        dist.recv(bytes_of(tensor), group=group, group_src=source)
    return form.replace_tensors(tensors)
