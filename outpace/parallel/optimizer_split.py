"""A trial of a user's optimizer: whether it can be given some of the parameters, or shards of them.

Most optimizers update each value by its own gradients, or each parameter by its own. Others compute
with all parameters together (LBFGS, Prodigy, clipping inside of the step). Under zero1 and in
pipelines each rank's optimizer has some of the parameters only, so such an optimizer would train
differently, without any error. Where ranks have shards, it may also fail, or read them as if they
were whole. So before the first step, the optimizer takes a few steps with small parameters of the
same numbers of dimensions and in the same groups: all of them, whole, and as ranks would have them.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count, product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from outpace.nn.compiler_exclusion import run_eagerly
from outpace.nn.dtensor import is_spread, whole
from outpace.parallel.plain import random_state, same_random_state, set_random_state
from outpace.records.plan import Plan

# Gradients of steps are multiplied by these, so that clipping in some of them shows. Prodigy and
# D-Adaptation estimate distances, which takes several steps.
_SCALES = (1.0, 1.0, 30.0, 0.1, 1.0, 300.0, 0.01, 1.0)
_SIZE = 4  # of a dimension that is not split
_TOLERANCE = 1e-6  # relative, of updates in float64
_SEED = 12

Build = Callable[..., torch.optim.Optimizer]
Groups = Sequence[Mapping[str, Any]]


class _Probe(NamedTuple):
    """A small parameter, and its loss in each step, which is a quadratic function of its values.

    It is curvature * (values - target)² / 2 + push * values, with a push for each step.
    """

    parameter: nn.Parameter
    start: Tensor
    target: Tensor
    curvature: Tensor
    pushes: Sequence[Tensor]


class OptimizerTrial:
    """Small parameters like those in `groups`, of which `build` makes optimizers."""

    def __init__(self, build: Build, groups: Groups, device: torch.device) -> None:
        self._build, self._groups, self._device = build, groups, device
        self._kinds = [_kinds_in(group["params"]) for group in groups]
        self.name = getattr(build, "__name__", "the optimizer")

    @property
    def has_shards(self) -> bool:
        """Return whether ranks have parts of any of the parameters."""
        return any(is_spread(like) for kinds in self._kinds for like in kinds.values())

    def explain_parts(self) -> str | None:
        """Return what an optimizer of some of the parameters does differently; None if nothing.

        None, too, if the trial is not possible.
        """
        with self._trial():
            together = self._run(copies=2)
            alone = self._run(copies=1)
        if together is None or alone is None or isinstance(alone, Exception):
            return None
        if isinstance(together, Exception):
            return None
        apart = max((_difference(one, together[key]) for key, one in alone.items()), default=0.0)
        return f"updates change by {100 * apart:.2g} %" if apart > _TOLERANCE else None

    def explain_shards(self) -> str | None:
        """Return what an optimizer of shards does differently; None if nothing. Collective.

        None, too, if the trial is not possible.
        """
        with self._trial():
            plain = self._run(copies=2)
            if plain is None or isinstance(plain, Exception):
                return None
            split = self._run(copies=2, split=True)
        if split is None:
            return None
        if isinstance(split, Exception):
            said = (str(split).strip().splitlines() or [""])[0][:200].removesuffix(".")
            return f"it fails with {type(split).__name__}: {said}"
        apart = max((_difference(split[key], one) for key, one in plain.items()), default=0.0)
        return f"updates change by {100 * apart:.2g} %" if apart > _TOLERANCE else None

    @contextmanager
    def _trial(self) -> Iterator[None]:
        """Restore generators, and run code eagerly that the optimizer compiles."""
        drawn = random_state(self._device)
        try:
            with run_eagerly("torch._dynamo" in sys.modules):
                yield
        finally:
            set_random_state(drawn, self._device)

    def _run(self, copies: int, split: bool = False) -> dict[Any, Tensor] | Exception | None:
        """Return how far each probe has moved after a few steps, or the error of the optimizer.

        Returns None if the optimizer draws random numbers, has no such parameters, or changes
        nothing.
        """
        drawn = random_state(self._device)
        probes, groups = self._make_probes(copies, split)
        if not probes:
            return None
        try:
            optimizer = self._build(groups)
            self.name = type(optimizer).__name__
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            if any(id(one.parameter) not in held for one in probes.values()):
                return None
            for step in range(len(_SCALES)):
                _step(optimizer, list(probes.values()), step)
        except Exception as error:
            return error
        if not same_random_state(drawn, random_state(self._device)):
            return None
        moved = {key: whole(one.parameter.detach()) - one.start for key, one in probes.items()}
        return moved if all(one.isfinite().all() for one in moved.values()) else None

    def _make_probes(
        self, copies: int, split: bool
    ) -> tuple[dict[Any, _Probe], list[dict[str, Any]]]:
        """Return probes by group, kind and copy, and the groups of an optimizer with them."""
        probes: dict[Any, _Probe] = {}
        numbers, groups = count(), []
        for place, (group, kinds) in enumerate(zip(self._groups, self._kinds, strict=True)):
            for copy, (kind, like) in product(range(2), kinds.items()):
                number = next(numbers)  # the same number with one copy as with two
                if copy < copies:
                    probes[place, kind, copy] = self._make_probe(like, number, split)
            held = [one.parameter for key, one in probes.items() if key[0] == place]
            if held:
                groups.append({**group, "params": held})
        return probes, groups

    def _make_probe(self, like: nn.Parameter, number: int, split: bool) -> _Probe:
        """Return a probe with as many dimensions as a parameter, split in the same way."""
        shape = [_SIZE] * like.dim()
        for size, placement in _splits_of(like):
            shape[placement] *= size
        drawn = torch.Generator().manual_seed(_SEED + number)
        dtype = torch.complex128 if like.is_complex() else torch.float64

        def draw() -> Tensor:
            return torch.randn(shape, generator=drawn, dtype=dtype)

        values = [draw(), draw(), draw().abs().to(dtype) + 0.5, *(draw() for _ in _SCALES)]
        start, *others = (one.to(self._device) for one in values)
        given = [start.clone(), *others]
        if split and is_spread(like):
            from torch.distributed.tensor import distribute_tensor

            given = [
                distribute_tensor(one, like.device_mesh, like.placements, src_data_rank=None)
                for one in given
            ]
        parameter = nn.Parameter(given[0])
        named = vars(like).items()
        vars(parameter).update({name: v for name, v in named if not name.startswith("_")})
        return _Probe(parameter, start, given[1], given[2], given[3:])


def _kinds_in(parameters: Sequence[nn.Parameter]) -> dict[Any, nn.Parameter]:
    """Return one floating-point parameter of each number of dimensions and way to be split."""
    kinds: dict[Any, nn.Parameter] = {}
    for parameter in parameters:
        places = str(parameter.placements) if is_spread(parameter) else ""
        kinds.setdefault((parameter.dim(), places, parameter.is_complex()), parameter)
    return kinds


def _splits_of(like: nn.Parameter) -> list[tuple[int, int]]:
    """Return the number of parts, and the dimension, for each axis of a mesh that splits."""
    if not is_spread(like):
        return []
    pairs = zip(like.device_mesh.shape, like.placements, strict=True)
    return [(size, one.dim) for size, one in pairs if hasattr(one, "dim")]


def _step(optimizer: torch.optim.Optimizer, probes: Sequence[_Probe], step: int) -> None:
    """Give the probes gradients and let the optimizer step, with a closure if it needs one."""
    _set_gradients(probes, step)
    before = [one.parameter._version for one in probes]
    try:
        optimizer.step()
    except Exception:
        if [one.parameter._version for one in probes] != before:
            raise
        _set_gradients(probes, step)
        closure: Any = partial(_compute_loss, probes, step)
        optimizer.step(closure)


@torch.no_grad()
def _set_gradients(probes: Sequence[_Probe], step: int) -> None:
    for parameter, _, target, curvature, pushes in probes:
        off = parameter.detach() - target
        parameter.grad = (off * curvature + pushes[step]) * _SCALES[step]


@torch.no_grad()
def _compute_loss(probes: Sequence[_Probe], step: int) -> Tensor:
    """Set the gradients; return the loss of all probes together."""
    _set_gradients(probes, step)
    loss = torch.zeros((), dtype=torch.float64)
    for parameter, _, target, curvature, pushes in probes:
        values = whole(parameter.detach()), whole(target), whole(curvature), whole(pushes[step])
        now, aim, curved, push = (torch.view_as_real(v) if v.is_complex() else v for v in values)
        one = curved * (now - aim).square() / 2 + push * now
        loss += _SCALES[step] * one.sum().cpu()
    return loss


def _difference(one: Tensor, other: Tensor) -> float:
    """Return the relative difference of two updates; 0 if nothing was updated."""
    largest = max(float(one.abs().max()), float(other.abs().max()))
    return float((one - other).abs().max()) / largest if largest else 0.0


def explain_optimizer(build: Build, groups: Groups, plan: Plan, device: torch.device) -> str | None:
    """Return why an optimizer cannot be used under a plan; None if it can.

    Collective if ranks have shards.
    """
    if plan.world_size == 1 or device.type == "mps":  # which lacks float64
        return None
    trial = OptimizerTrial(build, groups, device)
    if plan.strategy == "zero1" or plan.pp > 1:
        found = trial.explain_parts()
        if found is not None:
            return (
                f"{trial.name} computes with all parameters together, but under strategy "
                f"{plan.strategy} each rank's optimizer has only some of them ({found} if it has "
                "half of a few small parameters). Use ddp, zero2 or zero3, or another optimizer."
            )
    if trial.has_shards:
        found = trial.explain_shards()
        if found is not None:
            return (
                f"{trial.name} does not compute with shards, which ranks have under strategy "
                f"{plan.strategy}, what it computes with whole parameters: {found} with a few "
                "small ones. Use ddp, or another optimizer."
            )
    return None
