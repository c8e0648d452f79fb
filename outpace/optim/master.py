"""fp32 master weights in the optimizer, for 16-bit working weights.

Micikevicius et al., "Mixed Precision Training", ICLR 2018, §3.1.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from outpace.nn.dtensor import as_spread, is_spread, local
from outpace.optim.fused_master import FusedMasterAdamW, gradient_addresses
from outpace.optim.rounding import Noise
from outpace.optim.state_dtypes import KeepsDtypes
from outpace.planner.memory.optimizer_bytes import MASTER_PIECE_BYTES


class MasterWeights(KeepsDtypes):
    """An optimizer that keeps an fp32 master weight for each parameter.

    `build` creates the inner optimizer, which updates the master weights. The parameters, in 16
    bits, are then rounded from them. Gradients may be fp32 (if the parameter's `grad_dtype` says
    so) or in the weights' dtype. A parameter's state has its master weight as "master". `values`
    maps names of parameters (see `noise`) to this rank's parts of the initial fp32 weights, which
    become the master weights and are removed from `values`. Other master weights start from the
    parameters' values.

    `factor` multiplies the gradients of master weights in the next step only. If the inner
    optimizer is fused, its kernels skip the steps that fp16 must skip (`grad_scale` and `found_inf`
    of torch.amp.GradScaler), so the host does not wait.
    """

    grad_scale: Tensor | None
    found_inf: Tensor | None

    def __init__(
        self,
        groups: list[dict[str, Any]],
        build: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        initial_state: Callable[[torch.optim.Optimizer, dict[str, Any], nn.Parameter], Any],
        noise: Noise,
        values: dict[str, Tensor] | None = None,
    ) -> None:
        super().__init__(groups, {})
        values = {} if values is None else values
        self._masters: dict[nn.Parameter, nn.Parameter] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                name = noise.names.get(parameter, "")
                self._masters[parameter] = _make_master(parameter, values.pop(name, None))
                noise.names[self._masters[parameter]] = name
        self._views = {p: master.detach() for p, master in self._masters.items()}
        self._inner = build(
            [{**group, "params": [self._masters[p] for p in group["params"]]} for group in groups]
        )
        self._inner_state = initial_state
        self.factor: Tensor | None = None
        self._fused = FusedMasterAdamW() if isinstance(self._inner, torch.optim.AdamW) else None
        self._step_supports_amp_scaling = _skips_overflow_steps(self._inner)
        for mine, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            mine.update({name: inner[name] for name in inner if name != "params"})

    def initial_state(self, parameter: nn.Parameter, group: dict[str, Any]) -> dict[str, Any]:
        """Return the inner optimizer's initial state, with the master weight."""
        master = self._masters[parameter]
        return {**self._inner_state(self._inner, group, master), "master": self._views[parameter]}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the master weights and then the weights, one chunk of parameters at a time."""
        factor, self.factor = self.factor, None
        with self._pass_on_grad_scaler():
            self._step_groups(factor)

    def _step_groups(self, factor: Tensor | None) -> None:
        scaled = any(hasattr(self, name) for name in ("grad_scale", "found_inf"))
        for group in self.param_groups:
            stepped = [p for p in group["params"] if p.grad is not None]
            if not stepped:
                continue
            if not scaled and self._step_fused(group, stepped, factor):
                continue
            for chunk in _split_into_chunks(stepped):
                masters = [self._prepare_master(parameter, group) for parameter in chunk]
                _pass_gradients(chunk, masters)
                if factor is not None:
                    _multiply_gradients(masters, factor)
                self._inner.param_groups = [{**group, "params": masters}]
                self._inner.step()
                for master in masters:
                    master.grad = None
                _copy_all(map(local, masters), map(local, chunk))

    def _step_fused(
        self, group: dict[str, Any], stepped: list[nn.Parameter], factor: Tensor | None
    ) -> bool:
        """Step a group with one kernel if possible; return whether it has stepped."""
        addresses = None if self._fused is None else gradient_addresses(group, stepped)
        if self._fused is None or addresses is None:
            return False
        states = [self._prepare_state(parameter, group) for parameter in stepped]
        return self._fused.step(group, stepped, states, factor, addresses)

    @contextmanager
    def _pass_on_grad_scaler(self) -> Iterator[None]:
        """Set a GradScaler's tensors on the inner optimizer during the body."""
        tensors = {n: getattr(self, n) for n in ("grad_scale", "found_inf") if hasattr(self, n)}
        for name, value in tensors.items():
            setattr(self._inner, name, value)
        try:
            yield
        finally:
            for name in tensors:
                delattr(self._inner, name)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict, and drop the cached addresses of the old state."""
        super().load_state_dict(state_dict)
        if self._fused is not None:
            self._fused.forget()

    def _prepare_state(self, parameter: nn.Parameter, group: dict[str, Any]) -> dict[str, Any]:
        """Return a parameter's state, in which "master" is this optimizer's master weight.

        An empty state is filled first. If the state was loaded from a checkpoint, the loaded master
        weight is copied into this optimizer's.
        """
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state.update(self.initial_state(parameter, group))
        view = self._views[parameter]
        if state["master"] is not view:  # it was loaded from a checkpoint
            view.copy_(state["master"])
            state["master"] = view
        return state

    def _prepare_master(self, parameter: nn.Parameter, group: dict[str, Any]) -> nn.Parameter:
        """Give the parameter's state to the inner optimizer; return the master weight."""
        master = self._masters[parameter]
        self._inner.state[master] = self._prepare_state(parameter, group)
        return master


def _make_master(parameter: nn.Parameter, value: Tensor | None) -> nn.Parameter:
    """Create a parameter's master weight from `value` (this rank's part), or from the parameter."""
    if value is None:
        return nn.Parameter(parameter.detach().to(torch.float32, copy=True))
    part = value.to(device=local(parameter).device, dtype=torch.float32)
    return nn.Parameter(as_spread(part, tuple(parameter.shape), parameter))


def _split_into_chunks(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield consecutive parameters whose fp32 gradients take at most `MASTER_PIECE_BYTES`.

    A larger parameter gets a chunk alone.
    """
    chunk: list[nn.Parameter] = []
    held = 0
    for parameter in parameters:
        nbytes = local(parameter).numel() * torch.float32.itemsize
        if chunk and held + nbytes > MASTER_PIECE_BYTES:
            yield chunk
            chunk, held = [], 0
        chunk.append(parameter)
        held += nbytes
    if chunk:
        yield chunk


def _pass_gradients(parameters: Iterable[nn.Parameter], masters: Iterable[nn.Parameter]) -> None:
    """Set the gradients of master weights to those of their parameters, in fp32."""
    narrow: list[Tensor] = []
    wide: list[Tensor] = []
    for parameter, master in zip(parameters, masters, strict=True):
        gradient = parameter.grad
        assert gradient is not None
        if gradient.dtype == master.dtype:
            master.grad = gradient
            continue
        master.grad = torch.empty_like(gradient, dtype=master.dtype)
        narrow.append(local(gradient))
        wide.append(local(master.grad))
    _copy_all(narrow, wide)


def _multiply_gradients(masters: Iterable[nn.Parameter], factor: Tensor) -> None:
    gradients = [local(master.grad) for master in masters if master.grad is not None]
    torch._foreach_mul_(gradients, factor.to(gradients[0].device, gradients[0].dtype))


def _skips_overflow_steps(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer's kernels skip a step if a GradScaler's `found_inf` says so.

    All parameters must be plain tensors on one device, because torch copies `found_inf` to another
    device without waiting for the copy.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return not any(is_spread(p) for p in held) and len({p.device for p in held}) <= 1


def _copy_all(sources: Iterable[Tensor], targets: Iterable[Tensor]) -> None:
    """Copy `sources` into `targets`, which may have a different dtype, with one operator."""
    into, of = list(targets), list(sources)
    if into:
        torch._foreach_copy_(into, of)


def masters_within(optimizer: torch.optim.Optimizer | None) -> MasterWeights | None:
    """Return the `MasterWeights` that an optimizer is, or that ZeroRedundancyOptimizer wraps."""
    within = getattr(optimizer, "optim", optimizer)
    return within if isinstance(within, MasterWeights) else None


def master_weights(optimizer: torch.optim.Optimizer | None) -> Mapping[Tensor, Tensor]:
    """Return an optimizer's fp32 master weights by parameter; empty if it keeps none."""
    if not isinstance(optimizer, MasterWeights):
        return {}
    return {parameter: state["master"] for parameter, state in optimizer.state.items() if state}
