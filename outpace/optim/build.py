"""Optimizers by name, with the usual groups: weight decay for matrices, none for vectors."""

from collections.abc import Callable, Iterable
from functools import partial
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn

from outpace.nn.compiler_exclusion import leave_alone
from outpace.nn.dtensor import is_spread
from outpace.optim.adafactor import Adafactor
from outpace.optim.low_precision_adamw import LowPrecisionAdamW
from outpace.optim.master import MasterWeights
from outpace.optim.muon import Muon, is_hidden_matrix
from outpace.optim.rounding import Noise
from outpace.optim.state_dtypes import KeepsDtypes
from outpace.records.errors import BadInputError, join_or
from outpace.records.optimizers import OPTIMIZER_TRAITS, OptimizerName, optimizers_that
from outpace.records.settings import TrainSettings

Groups = list[dict[str, Any]]
# A function that creates an optimizer from parameter groups, as torch.optim's classes do.
Build = Callable[[Groups], torch.optim.Optimizer]
_STEPS_COMPLEX = optimizers_that(lambda traits: traits.steps_complex)


def make_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    name: OptimizerName,
    settings: TrainSettings,
    place: Callable[[Groups, Build], torch.optim.Optimizer] = lambda groups, build: build(groups),
    master_weights: bool = False,
    wide_values: dict[str, Tensor] | None = None,
    compiled: bool = False,
) -> torch.optim.Optimizer:
    """Create the optimizer `name` over the parameters that require gradients.

    `place` creates the optimizer from parameter groups and a function that builds one from groups.
    A layout's `make_optimizer` does this so that each rank updates the parameters that it should.
    `master_weights` adds fp32 copies of the parameters (master weights) to the optimizer. They
    start from `wide_values`, which maps parameter names to this rank's parts of the fp32 initial
    values; values are removed from it as they are used. `compiled`: torch.compile fuses the
    update's many operators into a few kernels, if the optimizer supports it.
    """
    trainable = {n: p for n, p in named_parameters if p.requires_grad}
    noise = Noise(settings.seed, {p: n for n, p in trainable.items()})
    build = partial(_build_optimizer, name=name, settings=settings, noise=noise, compiled=compiled)
    groups = _parameter_groups(trainable, name, settings.weight_decay)
    if master_weights:
        made = partial(
            MasterWeights, build=build, initial_state=initial_state, noise=noise, values=wide_values
        )
        return place(groups, made)
    return place(groups, build)


class AdamW(torch.optim.AdamW):
    """torch's AdamW with a step that does not import torch's compiler.

    torch's decorated step asks torch.compile whether it is tracing, which imports the compiler.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Step like torch's AdamW; return the loss of `closure`, if given."""
        return _PLAIN_STEP(self, closure)


_PLAIN_STEP = unwrap(torch.optim.Adam.step)


def leave_compiler_out() -> None:
    """Prevent torch's optimizers from loading its compiler."""
    for method in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        leave_alone(getattr(torch.optim.Optimizer, method))


def _parameter_groups(
    trainable: dict[str, nn.Parameter], name: OptimizerName, decay: float
) -> Groups:
    matrices = {n: p for n, p in trainable.items() if p.ndim >= 2}
    hidden = {n for n, p in matrices.items() if name == "muon" and is_hidden_matrix(n, p)}
    groups: Groups = [
        {"params": [p for n, p in matrices.items() if n not in hidden], "weight_decay": decay},
        {"params": [p for p in trainable.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    if hidden:
        params = [matrices[n] for n in matrices if n in hidden]
        groups.insert(0, {"params": params, "weight_decay": decay, "orthogonal": True})
    return [part for group in groups for part in _split_by_kind(group, name)]


def _split_by_kind(group: dict[str, Any], name: OptimizerName) -> Groups:
    """Split a group by kind of parameter (plain or DTensor, real or complex).

    One operator can update only parameters of one kind. Raises BadInputError for complex parameters
    if the optimizer does not support them.
    """
    kinds: dict[tuple[bool, bool], dict[str, Any]] = {}
    for parameter in group["params"]:
        kind = is_spread(parameter), parameter.is_complex()
        kinds.setdefault(kind, {**group, "params": []})["params"].append(parameter)
    for (_, is_complex), part in kinds.items():
        if is_complex and name not in _STEPS_COMPLEX:
            raise BadInputError(
                f"the model has complex parameters, which optimizer {name} does not support. Use "
                f"--optimizer {join_or(_STEPS_COMPLEX)}."
            )
        if is_complex and name != "sgd":
            part |= {"fused": False, "foreach": False}
    return list(kinds.values())


def _build_optimizer(
    groups: Groups,
    *,
    name: OptimizerName,
    settings: TrainSettings,
    noise: Noise,
    compiled: bool = False,
) -> torch.optim.Optimizer:
    lr, betas = settings.lr, (settings.beta1, settings.beta2)
    assert lr is not None  # resolved before the first step
    kept = OPTIMIZER_TRAITS[name].kept
    if kept is not None:
        return LowPrecisionAdamW(groups, kept, noise, lr=lr, betas=betas, compiled=compiled)
    if name == "adafactor":
        return Adafactor(groups, lr=lr, compiled=compiled, together=steps_together(groups))
    if name == "muon":
        return Muon(groups, lr=lr, betas=betas, together=steps_together(groups))
    if name == "sgd":
        together = steps_together(groups)
        # The fused operator updates all parameters at once; DTensor has no sharding rule for it.
        fused = together and not any(is_spread(p) for group in groups for p in group["params"])
        sgd = torch.optim.SGD(
            groups, lr=lr, momentum=settings.beta1, fused=fused, foreach=together and not fused
        )
        if fused:  # if fp16 skipped the first step, momentum would stay uninitialised
            fill_state(sgd)
        return sgd
    return AdamW(
        groups, lr=lr, betas=betas, fused=name == "adamw-fused", foreach=name == "adamw-foreach"
    )


def steps_together(groups: Groups) -> bool:
    """Return whether multi-tensor operators can update all parameters.

    All must be on a GPU and real, and either all of them or none may be DTensors.
    """
    parameters = [parameter for group in groups for parameter in group["params"]]
    on_gpu = all(p.device.type == "cuda" and not p.is_complex() for p in parameters)
    return on_gpu and len({is_spread(parameter) for parameter in parameters}) == 1


def begin_step(optimizer: torch.optim.Optimizer, number: int, lr: float) -> None:
    """Set an optimizer's learning rate, and the number of its next step (from 1).

    Optimizers that round stochastically derive their random numbers from the step's number.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
        if "number" in group:
            group["number"] = number


def step_alone(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> None:
    """Step the optimizer for one parameter, which changes as in a step of all parameters."""
    groups = optimizer.param_groups
    group = next(g for g in groups if any(p is parameter for p in g["params"]))
    optimizer.param_groups = [{**group, "params": [parameter]}]
    try:
        optimizer.step()
    finally:
        optimizer.param_groups = groups


@torch.no_grad()
def fill_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the initial state of parameters that have not been updated yet.

    A checkpoint then contains the state of all parameters. torch does this by a step with lr 0,
    which would count as a step.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                optimizer.state[parameter] = initial_state(optimizer, group, parameter)


def initial_state(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: nn.Parameter
) -> dict[str, Any]:
    """Return a parameter's state before its first step."""
    if isinstance(optimizer, KeepsDtypes):
        return optimizer.initial_state(parameter, group)
    if isinstance(optimizer, Adafactor):
        return optimizer.initial_state(parameter)
    if isinstance(optimizer, torch.optim.SGD) or group.get("orthogonal"):
        return {"momentum_buffer": torch.zeros_like(parameter)}
    device = parameter.device if group.get("fused") else "cpu"
    # Created from a Python number, which AdamW's for-loop can read in a trace with fake tensors.
    state = {"step": torch.tensor(0.0, dtype=torch.float32, device=device)}
    moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
    return {**state, **moments}
