"""Parameters of other pipeline stages, which a user's loop can neither read nor write.

During a step they are NaN, so that the inspection reveals a stage that uses them. Between steps,
anything that needs their values is refused.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import has_torch_function_unary
from torch.utils._pytree import tree_iter

from outpace.parallel.refusals import refuse_between_steps
from outpace.records.errors import BadInputError

# Functions that need no values. For properties, `_WITH_VALUES` lists those that do need values.
_WITHOUT_VALUES = frozenset({
    "size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset",
    "is_floating_point", "is_complex", "is_signed", "is_contiguous", "get_device", "has_names",
    "requires_grad_", "retain_grad", "register_hook", "register_post_accumulate_grad_hook",
    "is_pinned", "is_shared", "is_same_size", "is_inference", "__len__", "_is_view",
    "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like",
    "new_zeros", "new_ones", "new_empty", "new_full", "new_tensor",
})  # fmt: skip
_VIEWS = frozenset({"detach", "detach_", "alias", "view_as", "requires_grad_"})
_WITH_VALUES = frozenset({"T", "mT", "H", "mH", "real", "imag"})
# Functions of nn.Module that save or load values, and what each calls first, outside any `try`.
_STATE = {"_save_to_state_dict": "detach", "_load_from_state_dict": "shape"}
_MOST_FRAMES = 12  # from an optimizer's method to where it reads a gradient


class Owner(NamedTuple):
    """The pipeline stage and the rank that hold a parameter, and the parameter's name.

    `outside`: the parameter is in no block, so the first and the last stage both hold it.
    """

    name: str
    stage: int
    rank: int
    outside: bool = False


class AbsentParameters:
    """The parameters that this rank's stages do not have.

    `owners` maps the `id` of each parameter of the model to its owner. Absent parameters may be
    used until `refuse_use` is called, and afterwards only inside `allow`.
    """

    def __init__(self, owners: Mapping[int, Owner], rank: int) -> None:
        self.owners, self.rank = owners, rank
        self.refused = False

    def refuse_use(self) -> None:
        """Refuse, from now on, all uses of absent parameters that need their values."""
        self.refused = True

    @contextmanager
    def allow(self) -> Iterator[None]:
        """Allow any use inside the context, where values are NaN."""
        before, self.refused = self.refused, False
        try:
            yield
        finally:
            self.refused = before

    def make_refusal(self, sentence: str) -> BadInputError:
        """Return an error about a use of an absent parameter, for this rank to raise.

        Between steps, this also publishes the error, which other ranks raise in their next call.
        """
        return refuse_between_steps(sentence) if self.refused else BadInputError(sentence)

    def replace(self, stub: nn.Parameter, parameter: Tensor) -> nn.Parameter:
        """Return `stub`, the stand-in for `parameter`, in a class that refuses uses of its values.

        Returns `stub` itself if `parameter` has no owner, or if the stub is a tensor subclass.
        """
        owner = self.owners.get(id(parameter))
        if owner is None or has_torch_function_unary(stub) or isinstance(stub, FakeTensor):
            return stub
        kind = _add_absent_mixin(type(stub))
        made: nn.Parameter = Tensor._make_subclass(kind, stub.detach(), stub.requires_grad)
        vars(made).update(vars(stub), _absent=(self, owner))
        return made

    def explain(self, owner: Owner, gradient: bool) -> str:
        """Return a message about a use of a parameter between steps."""
        where = f"stage {owner.stage} of the pipeline"
        if owner.outside:
            where = "the first and the last stage of the pipeline"
        if owner.rank == self.rank:
            why = f"which rank {owner.rank} runs in a copy of the module"
            lacks = "so the module's own parameter has no values"
        else:
            why = f"which rank {owner.rank} runs"
            lacks = f"so rank {self.rank} has no values of it"
        what = f"the gradient of {owner.name} was" if gradient else f"{owner.name} was"
        instead = (
            "Use make_optimizer and clip_grad_norm of what parallelize returned (math.inf only "
            "measures the norm over all stages), and loop over its named_parameters()"
            if gradient
            else "Loop over named_parameters() of what parallelize returned, which gives this "
            "rank's parameters by the same names, or use its state_dict(), which has all of them "
            "on rank 0"
        )
        return (
            f"{what} read or written between steps, but it belongs to {where}, {why}, {lacks}. "
            f"{instead}. Under strategy ddp or zero1, each rank has all parameters."
        )


class _AbsentTensor(Tensor):
    """A mixin that makes a parameter class refuse uses of values that this rank does not have."""

    _absent: tuple[AbsentParameters, Owner] | None = None

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = (one for one in tree_iter((args, kwargs)) if isinstance(one, _AbsentTensor))
        found = next((one._absent for one in given if one._absent is not None), None)
        if found is not None and found[0].refused:
            return _call_unless_values_needed(func, args, kwargs or {}, *found)
        return _call_without_override(func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        if self._absent is None:
            return f"<NaN: {self.dtype} of shape {tuple(self.shape)}>"
        name = self._absent[1].name
        return f"<{name} of another pipeline stage: {self.dtype} of shape {tuple(self.shape)}>"


@cache
def _add_absent_mixin(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    return type(kind.__name__, (_AbsentTensor, kind), {})


def _call_without_override(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _call_unless_values_needed(
    func: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    absent: AbsentParameters,
    owner: Owner,
) -> Any:
    name = getattr(func, "__name__", "")
    of_property = name in ("__get__", "__set__", "__delete__")
    attribute = func.__self__.__name__ if of_property else ""
    caller, here = sys._getframe(2), owner.rank == absent.rank
    if of_property:
        known = _needs_no_value(attribute, name == "__get__", caller, here)
    else:
        known = name in _WITHOUT_VALUES or name in _VIEWS
        known &= not (here and name == "requires_grad_")
    if not known or _STATE.get(caller.f_code.co_name) == (attribute or name):
        raise absent.make_refusal(absent.explain(owner, attribute == "grad"))
    found = _call_without_override(func, args, kwargs)
    if (name in _VIEWS or attribute == "data") and found is not None:
        return _mark_view_absent(found, args[0])
    return found


def _needs_no_value(attribute: str, reads: bool, caller: FrameType, trained_here: bool) -> bool:
    """Return whether an absent parameter's attribute can be read without the parameter's value.

    If `reads` is False, the attribute is set instead. `trained_here`: a stage of this rank owns the
    parameter.
    """
    if attribute == "grad" and reads:
        return _needs_no_gradient(caller, trained_here)
    if attribute == "data":
        return reads
    if attribute == "requires_grad":
        return reads or not trained_here
    return attribute not in _WITH_VALUES


def _mark_view_absent(view: Tensor, absent: Tensor) -> Tensor:
    if view is absent:
        return view
    made: Tensor = Tensor._make_subclass(_AbsentTensor, view, False)
    made._absent = absent._absent  # type: ignore[attr-defined]
    return made


def _needs_no_gradient(frame: FrameType | None, trained_here: bool) -> bool:
    """Return whether the code that reads a gradient also works without it.

    Optimizers skip parameters without a gradient, so on each rank they update only its own stages.
    If the parameter is `trained_here`, an optimizer would wrongly skip it.
    """
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return False
        name = frame.f_code.co_name
        if name in ("zero_grad", "clip_grad_value_"):
            return name == "zero_grad" or not trained_here
        if isinstance(frame.f_locals.get("self"), torch.optim.Optimizer):
            return not trained_here
        frame = frame.f_back
    return False
