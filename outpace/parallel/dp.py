"""DataParallel: rank 0 has the data and the optimizer, and the others compute for it.

This does with processes on one host what `torch.nn.DataParallel` does with threads. It is also
known as a "single parameter server". Each batch takes five collectives: rank 0 (1) replicates the
current weights, (2) scatters the batch in micro-batches, (3) gathers the outputs, from which it
computes the loss, (4) scatters the loss's gradient, and (5) reduces the parameters' gradients to
itself. The outputs are the last hidden states; rank 0 computes the head and the loss. In a single
process, this strategy is `torch.nn.DataParallel` itself, over all CUDA devices that the process
sees.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from outpace.nn.loss import LanguageModelObjective
from outpace.optim.build import Build
from outpace.parallel.fusion import fuse
from outpace.parallel.layout import Batch, Layout, LayoutRequest, StepHooks
from outpace.parallel.placeholder_parameter import PlaceholderParameter
from outpace.parallel.tensors import by_dtype, concatenate, norm_dtype, spread
from outpace.records.errors import BadInputError

# name, shape and dtype of each tensor of a micro-batch that the model needs
Form = list[tuple[str, torch.Size, torch.dtype]]


class DataParallel(Layout):
    """An objective that all ranks compute, with its batches, loss and optimizer on rank 0.

    `gradients` receives whole batches on rank 0 and None on all others, and leaves the summed
    gradients on rank 0.
    """

    objective: LanguageModelObjective

    def __init__(self, request: LayoutRequest) -> None:
        super().__init__(request.objective)
        self._first = request.ranks.rank == 0
        self._ranks = request.ranks.world_size
        self._on = request.device
        self._placeholder = PlaceholderParameter(request.device)
        self._form: Form | None = None
        trainable = [p for p in request.objective.parameters() if p.requires_grad]
        self._fused = fuse(trainable)

    def make_optimizer(self, groups: list[dict[str, Any]], build: Build) -> torch.optim.Optimizer:
        """Return the optimizer on rank 0. Other ranks get one that updates only a placeholder."""
        return build(groups) if self._first else self._placeholder.optimizer(build)

    def checkpoint_state(
        self, optimizer: torch.optim.Optimizer
    ) -> tuple[nn.Module | None, torch.optim.Optimizer | None]:
        """Return the module and the optimizer on rank 0, and None for both on other ranks.

        The weights of other ranks are those of the last forward, not the updated ones.
        """
        return (self.model, optimizer) if self._first else (None, None)

    def gradients(self, batches: Sequence[Batch], hooks: StepHooks) -> Tensor:
        """Compute the step's gradients, which are summed on rank 0."""
        self._placeholder.set_gradient()
        return super().gradients(batches, hooks)

    def _forward_backward(self, batch: Batch, hooks: StepHooks) -> Tensor:
        output, totals, gradient = self._compute_outputs_and_loss(batch, hooks)
        mine = self._scatter_gradient(gradient, output)
        hooks.mark("communication")
        output.backward(mine)
        hooks.mark("backward")
        for fused in self._fused:
            fused.take_all()
            dist.reduce(fused.buffer, 0)
            if self._first:
                # Other ranks keep no gradients, which the next batch would add to and send again.
                fused.assign_gradients()
        hooks.mark("communication")
        return totals

    def _compute_outputs_and_loss(
        self, batch: Batch, hooks: StepHooks
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return this rank's hidden states, the totals, and the gradient of all hidden states.

        On ranks other than 0, the totals (sum of losses and number of targets) are zeros and the
        gradient is None. Collective.
        """
        self._broadcast_weights()
        part = self._scatter_batch(batch)
        hooks.mark("communication")
        with hooks.cast():
            output = self.objective.hidden_states(part)
        hooks.mark("forward")
        gathered = self._gather_outputs(output.detach())
        hooks.mark("communication")
        if gathered is None:
            # A loss scaler sets its scale in the first call, and this rank has no loss.
            hooks.scale(torch.zeros((), device=self._on))
            return output, torch.zeros(2, dtype=torch.float64, device=self._on), None
        totals, gradient = self._compute_loss(gathered, batch["targets"], hooks)
        return output, totals, gradient

    def _compute_loss(
        self, outputs: Tensor, targets: Tensor, hooks: StepHooks
    ) -> tuple[Tensor, Tensor | None]:
        """Return the totals and, in training, the gradient of `outputs`. Only for rank 0."""
        outputs.requires_grad_(torch.is_grad_enabled())
        with hooks.cast():
            loss_sum, count = self.objective.loss_from_hidden(outputs, targets)
        hooks.mark("forward")
        if outputs.requires_grad:
            hooks.scale(loss_sum).backward()
            hooks.mark("backward")
        return torch.stack((loss_sum.detach().double(), count.double())), outputs.grad

    @torch.no_grad()
    def _broadcast_weights(self) -> None:
        for alike in by_dtype([*self.objective.parameters(), *self.objective.buffers()]):
            message = concatenate(alike)
            dist.broadcast(message, 0)
            if not self._first:
                spread(message, alike)

    def _scatter_batch(self, batch: Batch) -> dict[str, Tensor]:
        form = self._agree_on_form(batch)
        sizes = [math.prod(shape) * dtype.itemsize for _, shape, dtype in form]
        mine = torch.empty(sum(sizes), dtype=torch.uint8, device=self._on)
        dist.scatter(mine, self._pack_shares(batch, form) if self._first else None, 0)
        return {
            name: piece.clone().view(dtype).view(shape)
            for (name, shape, dtype), piece in zip(form, mine.split(sizes), strict=True)
        }

    def _agree_on_form(self, batch: Batch) -> Form:
        """Return the names, shapes and dtypes of tensors in a rank's share of each micro-batch.

        Rank 0 sends this form before the first micro-batch. Raises BadInputError on rank 0 if the
        form of a later micro-batch differs.
        """
        form = self._share_form(batch) if self._first else None
        if self._form is None:
            forms = [form]
            dist.broadcast_object_list(forms, 0)
            assert forms[0] is not None
            self._form = forms[0]
        if form is not None and form != self._form:
            raise BadInputError(
                f"dp expected micro-batches of {_show_form(self._form)}, but got one of "
                f"{_show_form(form)}. Use batches of one shape, or --strategy ddp."
            )
        return self._form

    def set_form(self, batch: dict[str, Tensor]) -> None:
        """Set the form of micro-batches to that of `batch`, so that rank 0 need not send it."""
        self._form = self._share_form(batch)

    def _share_form(self, batch: dict[str, Tensor]) -> Form:
        return [
            (name, torch.Size((len(whole) // self._ranks, *whole.shape[1:])), whole.dtype)
            for name, whole in batch.items()
            if name != "targets"
        ]

    def _pack_shares(self, batch: dict[str, Tensor], form: Form) -> list[Tensor]:
        parts = [batch[name].chunk(self._ranks) for name, _, _ in form]
        return [
            torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in of_rank])
            for of_rank in zip(*parts, strict=True)
        ]

    def _gather_outputs(self, output: Tensor) -> Tensor | None:
        output = output.contiguous()
        if not self._first:
            dist.gather(output, None, 0)
            return None
        whole = output.new_empty(self._ranks * len(output), *output.shape[1:])
        dist.gather(output, list(whole.chunk(self._ranks)), 0)
        return whole

    def _scatter_gradient(self, gradient: Tensor | None, output: Tensor) -> Tensor:
        mine = torch.empty_like(output, memory_format=torch.contiguous_format)
        parts = None if gradient is None else list(gradient.contiguous().chunk(self._ranks))
        dist.scatter(mine, parts, 0)
        return mine

    def evaluate(self, batch: Batch, hooks: StepHooks) -> Tensor:
        """Run only a batch's forward; return the totals on rank 0, zeros elsewhere. Collective."""
        return self._compute_outputs_and_loss(batch, hooks)[1]

    def total_norm(self) -> Tensor:
        """Return the gradient norm, which rank 0 computes and broadcasts."""
        dtype = norm_dtype(self._fused[0].buffer.dtype)
        norm = (
            super().total_norm() if self._first else torch.zeros((), dtype=dtype, device=self._on)
        )
        dist.broadcast(norm, 0)
        return norm

    def sync_found_inf(self, found_inf: Tensor) -> None:
        """Broadcast rank 0's `found_inf`, because only rank 0 has gradients."""
        dist.broadcast(found_inf, 0)


class Outputs(nn.Module):
    """A module that computes an objective's hidden states, for `nn.DataParallel`'s threads."""

    def __init__(self, objective: LanguageModelObjective) -> None:
        super().__init__()
        self.objective = objective

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the hidden states of a micro-batch, (B, S, D)."""
        return self.objective.hidden_states(batch)


class Threads(nn.Module):
    """DataParallel in one process, with a thread per CUDA device.

    The threads compute hidden states, and one device computes the whole loss. With a single device,
    or on a CPU, there are no threads.
    """

    def __init__(self, objective: LanguageModelObjective) -> None:
        super().__init__()
        self.parallel = nn.DataParallel(Outputs(objective))

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the sum of losses and the number of targets of a micro-batch, both scalars."""
        shared = {name: part for name, part in batch.items() if name != "targets"}
        objective: LanguageModelObjective = self.parallel.module.objective
        return objective.loss_from_hidden(self.parallel(shared), batch["targets"])


def _show_form(form: Form) -> str:
    return ", ".join(f"{name} {tuple(shape)}" for name, shape, _ in form)


def apply(request: LayoutRequest) -> Layout:
    """Lay out an objective with its data, loss and optimizer on rank 0.

    Raises BadInputError for ranks on several hosts, for custom models, and for compilation in a
    single process.
    """
    ranks, objective = request.ranks, request.objective
    if ranks.local_world_size != ranks.world_size:
        raise BadInputError(
            f"--strategy dp works on one host, but {ranks.world_size - ranks.local_world_size} of "
            f"{ranks.world_size} processes are on others: weights, outputs and gradients all pass "
            "through rank 0 with every batch. Use --strategy ddp."
        )
    if not isinstance(objective, LanguageModelObjective):
        raise BadInputError(
            "--strategy dp gathers the outputs of all ranks and computes the loss on rank 0, but a "
            "custom model computes its outputs and its loss together. Use --strategy ddp."
        )
    if ranks.world_size == 1:
        if request.plan.compile:
            raise BadInputError(
                "--strategy dp does not support --compile in one process: its threads copy the "
                "model, and copies are not compiled. Use --strategy single, or leave --compile out."
            )
        return Layout(objective, Threads(objective))
    return DataParallel(request)
