"""Trial of a user's optimizer: can it train with only some of the parameters, or with shards?

Most optimizers update each value, or each parameter, from its own gradients. Others combine all
parameters (LBFGS, Prodigy, clipping inside the step). Under zero1 and in pipelines, each rank's
optimizer has only some of the parameters, so such an optimizer would silently train differently. If
ranks have shards, an optimizer may also fail, or treat shards as whole parameters. So when the
optimizer is created, it first takes a few steps on small parameters with the same numbers of
dimensions, in the same groups: once with all of them whole, and once as a rank would have them.
"""

import copy
import io
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import partial
from itertools import count, product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from outpace.nn.compiler_exclusion import run_eagerly
from outpace.nn.dtensor import is_spread, whole
from outpace.parallel.plain import random_state, same_random_state, set_random_state
from outpace.parallel.rank_objects import gather_objects
from outpace.records.plan import Plan

# Factor of the gradients in each step; large gradients reveal clipping. There are several steps,
# because Prodigy and D-Adaptation need some to estimate distances.
_SCALES = (1.0, 1.0, 30.0, 0.1, 1.0, 300.0, 0.01, 1.0)
_SIZE = 4  # size of each dimension on one rank
_TOLERANCE = 1e-6  # relative, of updates in float64
# Muon orthogonalises in bf16, whose rounding changes updates by up to 1.5 % on 2 and 4 ranks. An
# optimizer that takes shards for whole parameters changes them by 11 % or more.
_SHARD_TOLERANCE = 0.03
_MOST_GROUPS = 8  # because a trial takes time for each
_SEED = 12

Build = Callable[..., torch.optim.Optimizer]
Groups = Sequence[Mapping[str, Any]]


class _Probe(NamedTuple):
    """A small parameter on which an optimizer is tried, with a quadratic loss for each step.

    The loss is curvature * (values - target)² / 2 + push * values, with one push per step.
    """

    parameter: nn.Parameter
    start: Tensor
    target: Tensor
    curvature: Tensor
    pushes: Sequence[Tensor]


class OptimizerTrial:
    """A trial of the optimizer that `build` creates, on small parameters like those in `groups`."""

    def __init__(self, build: Build, groups: Groups, device: torch.device) -> None:
        self._build, self._device = build, device
        alike = _merge_similar_groups(groups)
        self._options = [_options_of(some[0]) for some in alike]
        self._kinds = [
            _parameters_by_kind(p for one in some for p in parameters_in(one)) for some in alike
        ]
        self.name = getattr(build, "__name__", "the optimizer")

    def explain_subset(self) -> str | None:
        """Explain how much updates change if the optimizer has only some of the parameters.

        Returns None if they do not change, or if the trial is impossible.
        """
        with self._quiet_trial():
            together = self._run_probes(copies=2)
            alone = self._run_probes(copies=1)
        if together is None or alone is None or isinstance(alone, Exception):
            return None
        if isinstance(together, Exception):
            return None
        apart = max((_difference(one, together[key]) for key, one in alone.items()), default=0.0)
        return f"updates change by {100 * apart:.2g} %" if apart > _TOLERANCE else None

    def explain_shards(self) -> str | None:
        """Explain how updates change if the optimizer has shards, or why it fails. Collective.

        Returns None if they do not differ, or if the trial is impossible.
        """
        with self._quiet_trial():
            plain = self._run_probes(copies=2)
            usable = gather_objects(isinstance(plain, dict))  # else other ranks would wait
            if not all(usable) or not isinstance(plain, dict):
                return None
            split = self._run_probes(copies=2, split=True)
        if split is None:
            return None
        if isinstance(split, Exception):
            said = (str(split).strip().splitlines() or [""])[0][:200].removesuffix(".")
            return f"it fails with {type(split).__name__}: {said}"
        apart = max((_difference(split[key], one) for key, one in plain.items()), default=0.0)
        return f"updates change by {100 * apart:.2g} %" if apart > _SHARD_TOLERANCE else None

    @contextmanager
    def _quiet_trial(self) -> Iterator[None]:
        drawn, eager = random_state(self._device), run_eagerly("torch._dynamo" in sys.modules)
        try:
            with eager, redirect_stdout(io.StringIO()), warnings.catch_warnings(action="ignore"):
                yield
        finally:
            set_random_state(drawn, self._device)

    def _run_probes(self, copies: int, split: bool = False) -> dict[Any, Tensor] | Exception | None:
        """Return each probe's change over the steps of a trial, or the optimizer's exception.

        Returns None if there are no probes, or if the optimizer does not hold all of them, draws
        random numbers or computes values that are not finite.
        """
        drawn = random_state(self._device)
        try:
            probes, groups = self._make_probes(copies, split)
            if not probes:
                return None
            optimizer = self._build(groups)
            self.name = type(optimizer).__name__
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            if any(id(one.parameter) not in held for one in probes.values()):
                return None
            for step in range(len(_SCALES)):
                _step_with_gradients(optimizer, list(probes.values()), step)
        except Exception as error:
            return error
        if not same_random_state(drawn, random_state(self._device)):
            return None
        moved = {key: whole(one.parameter.detach()) - one.start for key, one in probes.items()}
        return moved if all(one.isfinite().all() for one in moved.values()) else None

    def _make_probes(
        self, copies: int, split: bool
    ) -> tuple[dict[Any, _Probe], list[dict[str, Any]]]:
        """Return small parameters to try, by (group, kind of parameter, copy), and their groups."""
        probes: dict[Any, _Probe] = {}
        numbers, groups = count(), []
        for place, (options, kinds) in enumerate(zip(self._options, self._kinds, strict=True)):
            for number_of_copy, (kind, like) in product(range(2), kinds.items()):
                number = next(numbers)  # the same number with one copy as with two
                if number_of_copy < copies:
                    probes[place, kind, number_of_copy] = self._make_probe(like, number, split)
            held = [one.parameter for key, one in probes.items() if key[0] == place]
            if held:
                groups.append({**copy.deepcopy(options), "params": held})
        return probes, groups

    def _make_probe(self, like: nn.Parameter, number: int, split: bool) -> _Probe:
        shape = [_SIZE] * like.dim()
        for size, placement in _split_dimensions(like):
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


def parameters_in(group: Mapping[str, Any]) -> list[nn.Parameter]:
    """Return a group's parameters, which may be given as (name, parameter)."""
    return [one[1] if isinstance(one, tuple) else one for one in group["params"]]


def _options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: v for key, v in group.items() if key not in ("params", "param_names")}


def _merge_similar_groups(groups: Groups) -> list[list[Mapping[str, Any]]]:
    """Return lists of similar groups: at most 8 lists, from each of which a trial takes one group.

    Groups are similar if their settings are equal, except that numbers may differ if none of them
    is 0. A loop may have a group for each parameter, so a trial with all groups could take long.
    """
    alike: dict[Any, list[Mapping[str, Any]]] = {}
    for group in groups:
        kind = frozenset((key, _setting_kind(value)) for key, value in _options_of(group).items())
        alike.setdefault(kind, []).append(group)
    return list(alike.values())[:_MOST_GROUPS]


def _setting_kind(value: Any) -> Any:
    """Return what must be equal in two settings for their groups to be similar.

    This is the type and, for a flag or string, the value; for a number, whether it is 0.
    """
    if isinstance(value, bool | str):
        return type(value), value
    return type(value), bool(value) if isinstance(value, int | float) else None


def _parameters_by_kind(parameters: Iterable[nn.Parameter]) -> dict[Any, nn.Parameter]:
    kinds: dict[Any, nn.Parameter] = {}
    for parameter in parameters:
        places = str(parameter.placements) if is_spread(parameter) else ""
        kinds.setdefault((parameter.dim(), places, parameter.is_complex()), parameter)
    return kinds


def _split_dimensions(like: nn.Parameter) -> list[tuple[int, int]]:
    """Return (number of shards, dimension) for each mesh axis over which a parameter is sharded."""
    if not is_spread(like):
        return []
    pairs = zip(like.device_mesh.shape, like.placements, strict=True)
    return [(size, one.dim) for size, one in pairs if hasattr(one, "dim")]


def _step_with_gradients(
    optimizer: torch.optim.Optimizer, probes: Sequence[_Probe], step: int
) -> None:
    """Set the probes' gradients and step the optimizer; pass a closure if it needs one."""
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
    """Return the sum of the probes' losses in a step, and set the probes' gradients.

    An optimizer that needs a closure calls this.
    """
    _set_gradients(probes, step)
    loss = torch.zeros((), dtype=torch.float64)
    for parameter, _, target, curvature, pushes in probes:
        values = whole(parameter.detach()), whole(target), whole(curvature), whole(pushes[step])
        now, aim, curved, push = (torch.view_as_real(v) if v.is_complex() else v for v in values)
        one = curved * (now - aim).square() / 2 + push * now
        loss += _SCALES[step] * one.sum().cpu()
    return loss


def _difference(one: Tensor, other: Tensor) -> float:
    largest = max(float(one.abs().max()), float(other.abs().max()))
    return float((one - other).abs().max()) / largest if largest else 0.0


def explain_optimizer(build: Build, groups: Groups, plan: Plan, device: torch.device) -> str | None:
    """Return why an optimizer cannot be used under a plan; None if it can.

    Collective if ranks have shards.
    """
    if plan.world_size == 1 or device.type == "mps":  # which lacks float64
        return None
    has_parts = plan.strategy == "zero1" or plan.pp > 1
    has_shards = any(is_spread(p) for group in groups for p in parameters_in(group))
    if not (has_parts or has_shards):
        return None
    trial = OptimizerTrial(build, groups, device)
    if has_parts:
        found = trial.explain_subset()
        if found is not None:
            return (
                f"{trial.name} computes with all parameters together, but under strategy "
                f"{plan.strategy} each rank's optimizer has only some of them ({found} if it has "
                "half of a few small parameters). Use ddp, zero2 or zero3, or another optimizer."
            )
    if has_shards:
        found = trial.explain_shards()
        if found is not None:
            return (
                f"{trial.name} computes different updates from shards, which ranks hold under "
                f"strategy {plan.strategy}, than from whole parameters: {found} with a few small "
                "ones. Use ddp, or another optimizer."
            )
    return None
