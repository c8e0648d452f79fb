"""Recorder of the matmuls, convolutions and attention calls in one forward."""

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from outpace.nn.evaluation_mode import evaluation_mode
from outpace.records.errors import BadInputError
from outpace.trace.assumed_values import AssumedValues
from outpace.trace.fake import fake_tensor_mode

_aten = torch.ops.aten
# Positions of the two operands among the arguments.
_FACTORS: dict[Any, int] = {
    _aten.mm: 0,
    _aten.addmm: 1,
    _aten.bmm: 0,
    _aten.baddbmm: 1,
    _aten._scaled_mm: 0,
    _aten._grouped_mm: 0,
}
_GROUPED = "transformers.grouped_mm_fallback"  # used where torch has no grouped matmul
_ATTENTION = ("_scaled_dot_product_", "_flash_attention_forward", "_efficient_attention_forward")


class MatmulCall(NamedTuple):
    """Matmul of (rows, inputs) by (inputs, outputs) in `module`; `weight` names the parameter.

    If `weight` is None, both operands are activations: `batch` matmuls that have `rows` together.
    """

    module: str
    weight: str | None
    rows: int
    inputs: int
    outputs: int
    batch: int = 1


class AttentionCall(NamedTuple):
    """Fused attention in `module`; `queries` and `keys` are numbers of positions."""

    module: str
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    value_dim: int
    causal: bool


@dataclass
class Forward:
    """Record of a forward: operations in execution order, and each module's last output shape."""

    done: list[MatmulCall | AttentionCall] = field(default_factory=list)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)


def record(module: nn.Module, inputs: Any) -> Forward:
    """Run a copy of `module` once and record its operations.

    It runs without values if possible. `inputs`: a tuple of arguments, a mapping of keyword
    arguments, or one argument. Raises BadInputError if the forward cannot run.
    """
    if all(parameter.is_meta for parameter in module.parameters()):
        for assumed in (None, AssumedValues()):  # much faster than fake tensors
            with _silence_fake_tensors(), suppress(BadInputError):
                return _record_forward(module, inputs, None, assumed)
    try:
        with _silence_fake_tensors():
            return _record_forward(module, inputs, fake_tensor_mode())
    except BadInputError as error:
        if any(parameter.is_meta for parameter in module.parameters()):
            raise BadInputError(
                f"{error}. The module's parameters are on the meta device, so they have no values. "
                "Build the module on the CPU if its forward reads values"
            ) from error
    return _record_forward(module, inputs, None)


@contextmanager
def _silence_fake_tensors() -> Iterator[None]:
    """Suppress torch's log of operators that need values, since the forward is run again."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


@contextmanager
def _without_onednn() -> Iterator[None]:
    """Disable oneDNN, which would run an LSTM as one opaque operator."""
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


def _record_forward(
    module: nn.Module, inputs: Any, fake: Any, assumed: AssumedValues | None = None
) -> Forward:
    with ExitStack() as stack:
        # Without gradients, nn.TransformerEncoderLayer would run as one opaque operator.
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(_without_onednn())
        copied = _copy_module(module, fake)
        if assumed is None and any(parameter.is_meta for parameter in module.parameters()):
            inputs = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), inputs)
            stack.enter_context(torch.device("meta"))
        if fake is None:
            stack.enter_context(evaluation_mode(copied))  # the copy may be the user's module itself
        else:
            inputs = tree_map_only(Tensor, fake.from_tensor, inputs)
            stack.enter_context(fake)
        watch = _OperationRecorder(copied, assumed)
        stack.enter_context(watch.module_hooks(copied))
        stack.enter_context(watch)
        _run_forward(copied, inputs)
        return watch.forward


def _copy_module(module: nn.Module, fake: Any) -> nn.Module:
    """Return a copy, which the forward may modify, or the module itself if it cannot be copied."""
    try:
        if fake is None:
            return copy.deepcopy(module)
        with FakeCopyMode(fake):
            return copy.deepcopy(module)
    except (RuntimeError, TypeError, NotImplementedError):
        return module


def _run_forward(module: nn.Module, inputs: Any) -> None:
    call: Callable[[], Any]
    if isinstance(inputs, Mapping):
        call = partial(module, **inputs)
    elif isinstance(inputs, tuple):
        call = partial(module, *inputs)
    else:
        call = partial(module, inputs)
    try:
        call()
    except BadInputError:
        raise
    except Exception as error:
        raise BadInputError(
            f"the forward of {type(module).__name__} failed on the example: "
            f"{type(error).__name__}: {error}"
        ) from error


class _OperationRecorder(TorchDispatchMode):
    """Dispatch mode that records operations; it recognises weights, even cast ones, by storage."""

    def __init__(self, module: nn.Module, assumed: AssumedValues | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run = _call_operator if assumed is None else assumed.run
        self.forward = Forward()
        self._inside: list[str] = []
        # kept alive, since a new storage could have the address of a freed one
        self._kept: list[Any] = []
        self._weights: dict[int, str] = {}
        for name, parameter in module.named_parameters():
            self._name_weight(parameter, name)

    def _name_weight(self, tensor: Tensor, name: str) -> None:
        storage = tensor.untyped_storage()
        self._kept.append(storage)
        self._weights.setdefault(storage._cdata, name)

    def _weight_name(self, tensor: Tensor) -> str | None:
        return self._weights.get(tensor.untyped_storage()._cdata)

    @contextmanager
    def module_hooks(self, module: nn.Module) -> Iterator[None]:
        """Track which module is running, with hooks that are removed on exit."""
        handles = []
        for name, part in module.named_modules():
            handles += [
                part.register_forward_pre_hook(partial(self._enter_module, name)),
                part.register_forward_hook(partial(self._leave_module, name), always_call=True),
            ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter_module(self, name: str, *_: Any) -> None:
        self._inside.append(name)

    def _leave_module(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        self._inside.pop()
        found = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        if found:
            self.forward.shapes[name] = tuple(found[0].shape)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = self._run(func, args, kwargs or {})
        packet = func.overloadpacket
        if packet in _FACTORS:
            first = _FACTORS[packet]
            self._record_matmul(args[first], args[first + 1])
        elif str(packet) == _GROUPED:
            self._record_matmul(args[0], args[1])
        elif packet is _aten.convolution:
            self._record_convolution(args, made)
        elif packet is _aten._to_copy and isinstance(made, Tensor):
            name = self._weight_name(args[0])
            if name is not None:
                self._name_weight(made, name)
        elif packet.__name__.startswith(_ATTENTION) and "backward" not in packet.__name__:
            self._record_attention(func, args, kwargs or {})
        return made

    @property
    def _module(self) -> str:
        return self._inside[-1] if self._inside else ""

    def _record_matmul(self, left: Tensor, right: Tensor) -> None:
        outputs, inputs = int(right.shape[-1]), int(right.shape[-2])
        rows = left.numel() // inputs
        if left.dim() == 2 and right.dim() == 2 and self._weight_name(right) is None:
            name = self._weight_name(left)
            if name is not None:  # weight @ input
                made = MatmulCall(self._module, name, outputs, inputs, int(left.shape[0]))
                self.forward.done.append(made)
                return
        batch = int(left.shape[0]) if left.dim() == 3 else 1
        name = self._weight_name(right)
        self.forward.done.append(MatmulCall(self._module, name, rows, inputs, outputs, batch))

    def _record_convolution(self, args: Any, made: Tensor) -> None:
        image, weight, transposed = args[0], args[1], args[6]
        # (outputs, inputs of a group, …); transposed (inputs, outputs of a group, …).
        side = image if transposed else made
        rows = int(side.shape[0]) * _count_elements(side.shape[2:])
        inside = _count_elements(weight.shape[1:])
        first = int(weight.shape[0])
        inputs, outputs = (first, inside) if transposed else (inside, first)
        self.forward.done.append(
            MatmulCall(self._module, self._weight_name(weight), rows, inputs, outputs)
        )

    def _record_attention(self, func: Any, args: Any, kwargs: Any) -> None:
        names = [argument.name for argument in func._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        queries, keys, values = args[:3]
        if not func.overloadpacket.__name__.startswith("_scaled"):  # (B, S, H, C)
            queries, keys, values = (one.transpose(1, 2) for one in (queries, keys, values))
        self.forward.done.append(
            AttentionCall(
                self._module,
                batch=int(queries.shape[0]),
                heads=int(queries.shape[1]),
                kv_heads=int(keys.shape[1]),
                queries=int(queries.shape[2]),
                keys=int(keys.shape[2]),
                head_dim=int(queries.shape[3]),
                value_dim=int(values.shape[3]),
                causal=bool(given.get("is_causal", False)),
            )
        )


def _call_operator(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


def _count_elements(shape: Any) -> int:
    total = 1
    for length in shape:
        total *= int(length)
    return total
