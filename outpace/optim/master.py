"""fp32 master weights in the optimizer, for 16-bit working weights.

Micikevicius et al., "Mixed Precision Training", ICLR 2018, §3.1.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from outpace.nn.spread import as_spread, local
from outpace.optim.rounding import Noise
from outpace.optim.stored import OwnDtypes
from outpace.planner.optimizer_bytes import MASTER_PIECE_BYTES


class MasterWeights(OwnDtypes):
    """Any optimizer, over fp32 copies of the weights; the weights are rounded from them.

    Gradients may be fp32 (of a parameter whose `grad_dtype` says so) or of the weights' dtype.
    A copy is a part of its parameter's state, "master". `values` are the parts of fp32 weights on
    this rank from which training begins, by the parameters' names in `noise`; a copy of others
    begins as its weight is. They become the copies, and are taken out of `values`.
    """

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
                self._masters[parameter] = _master(parameter, values.pop(name, None))
                noise.names[self._masters[parameter]] = name
        self._views = {p: master.detach() for p, master in self._masters.items()}
        self._inner = build(
            [{**group, "params": [self._masters[p] for p in group["params"]]} for group in groups]
        )
        self._inner_state = initial_state
        for mine, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            mine.update({name: inner[name] for name in inner if name != "params"})

    def initial_state(self, parameter: nn.Parameter, group: dict[str, Any]) -> dict[str, Any]:
        """The inner optimizer's, and the copy."""
        master = self._masters[parameter]
        return {**self._inner_state(self._inner, group, master), "master": self._views[parameter]}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step the copies, and round the weights from them, in pieces."""
        for group in self.param_groups:
            stepped = [p for p in group["params"] if p.grad is not None]
            for piece in _pieces(stepped):
                masters = [self._prepared(parameter, group) for parameter in piece]
                _give_gradients(piece, masters)
                self._inner.param_groups = [{**group, "params": masters}]
                self._inner.step()
                for master in masters:
                    master.grad = None
                _copy(map(local, masters), map(local, piece))

    def _prepared(self, parameter: nn.Parameter, group: dict[str, Any]) -> nn.Parameter:
        """A parameter's copy, its state being the parameter's."""
        master, state = self._masters[parameter], self.state[parameter]
        if not state:
            state.update(self.initial_state(parameter, group))
        if state["master"] is not self._views[parameter]:  # but loaded
            master.copy_(state["master"])
            state["master"] = self._views[parameter]
        self._inner.state[master] = state
        return master


def _master(parameter: nn.Parameter, value: Tensor | None) -> nn.Parameter:
    """An fp32 copy of a parameter, which begins as `value`, this rank's part of it, if given."""
    if value is None:
        return nn.Parameter(parameter.detach().to(torch.float32, copy=True))
    part = value.to(device=local(parameter).device, dtype=torch.float32)
    return nn.Parameter(as_spread(part, tuple(parameter.shape), parameter))


def _pieces(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Parameters in their order, with at most `MASTER_PIECE_BYTES` of fp32 gradients each time."""
    piece: list[nn.Parameter] = []
    held = 0
    for parameter in parameters:
        nbytes = local(parameter).numel() * torch.float32.itemsize
        if piece and held + nbytes > MASTER_PIECE_BYTES:
            yield piece
            piece, held = [], 0
        piece.append(parameter)
        held += nbytes
    if piece:
        yield piece


def _give_gradients(parameters: Iterable[nn.Parameter], masters: Iterable[nn.Parameter]) -> None:
    """Let the copies' gradients be the parameters', in fp32."""
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
    _copy(narrow, wide)


def _copy(sources: Iterable[Tensor], targets: Iterable[Tensor]) -> None:
    """Copy tensors into those of another dtype, in one pass over all of them."""
    into, of = list(targets), list(sources)
    if into:
        torch._foreach_copy_(into, of)


def rounded_from(optimizer: torch.optim.Optimizer | None) -> Mapping[Tensor, Tensor]:
    """The fp32 copies that an optimizer keeps, by their parameters; none of another optimizer."""
    if not isinstance(optimizer, MasterWeights):
        return {}
    return {parameter: state["master"] for parameter, state in optimizer.state.items() if state}
