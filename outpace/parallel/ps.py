"""Parameter servers and workers.

Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014, §2.2 and §3:
workers read the data and push gradients; the parameters are split over servers, each of which sums
the workers' gradients for its part. Here all ranks wait for each other in every step (§3.4,
"sequential"). Either the servers send the sums back and each worker steps the optimizer, or
(`server_updates`) the servers step the optimizer and send parameters back.

A worker may have several devices. Their gradients are summed on its first device, and only this
device communicates with the servers. A server with several devices acts as several servers: its
share is split again.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from outpace.optim.build import Build
from outpace.parallel.fusion import FusedGradients, fuse
from outpace.parallel.layout import Batch, Layout, LayoutRequest, StepHooks
from outpace.parallel.placeholder_parameter import PlaceholderParameter
from outpace.parallel.tensors import (
    by_dtype,
    concatenate,
    drop_all_but,
    make_equal,
    norm_dtype,
    spread,
)
from outpace.planner.communication.volume import share_by_size
from outpace.records.errors import BadInputError
from outpace.records.plan import Plan


def split_by_size(parameters: Iterable[nn.Parameter], servers: int) -> list[list[nn.Parameter]]:
    """Assign whole parameters to servers, balanced by size."""
    held = list(parameters)
    shares = share_by_size([parameter.numel() for parameter in held], servers)
    return [[held[index] for index in share] for share in shares]


class Role(Layout):
    """Base class of workers and servers.

    The gradient norm is computed where parameters are updated: on every worker, or in parts on the
    servers.
    """

    steps: bool  # whether this rank steps parameters

    def __init__(self, request: LayoutRequest) -> None:
        super().__init__(request.objective)
        self._plan = request.plan
        self._on = request.device
        self._dtype = norm_dtype(next(request.objective.parameters()).dtype)
        self._placeholder = PlaceholderParameter(request.device)
        self._devices = request.plan.worker_devices
        # The ranks of the workers' first devices.
        self._workers = range(0, request.plan.data_parallel, self._devices)
        self._servers = range(request.plan.data_parallel, request.plan.world_size)

    @property
    def has_sums(self) -> bool:  # type: ignore[override]
        """Return whether this rank ends with summed gradients, as all that update parameters do."""
        return self.steps

    def _device(self) -> torch.device:
        return self._on  # a server may have no parameters

    def make_optimizer(self, groups: list[dict[str, Any]], build: Build) -> torch.optim.Optimizer:
        optimizer = build(groups) if self.steps else self._placeholder.optimizer(build)
        if self._plan.server_updates:
            # Synchronise even after a skipped fp16 step, because only the optimizer knows of it.
            optimizer.register_step_post_hook(lambda *_: self._sync_parameters())
        return optimizer

    def _sync_parameters(self) -> None:
        """Copy the parameters from servers to workers after the servers' step."""
        raise NotImplementedError

    def total_norm(self) -> Tensor:
        """Return the gradient norm, broadcast by worker 0 or combined from the servers' parts."""
        norm = torch.zeros((), dtype=self._dtype, device=self._on)
        if self.steps:
            norm = norm + super().total_norm()
        if not self._plan.server_updates:
            dist.broadcast(norm, 0)
            return norm
        square = norm.square()
        dist.all_reduce(square)
        return square.sqrt()

    def sync_found_inf(self, found_inf: Tensor) -> None:
        """Make all ranks skip the step if any rank has found infinite or NaN gradients.

        A server sees only the gradients of its share of parameters.
        """
        dist.all_reduce(found_inf, dist.ReduceOp.MAX)


class Worker(Role):
    """A rank with all weights and a share of the data."""

    def __init__(
        self,
        request: LayoutRequest,
        shares: Sequence[Sequence[nn.Parameter]],
        devices: dist.ProcessGroup | None,
    ) -> None:
        super().__init__(request)
        self._group = devices
        self._speaks = request.ranks.rank in self._workers
        self.steps = not request.plan.server_updates
        self._shares = shares
        self._fused = [fuse(share) for share in shares]

    def checkpoint_state(
        self, optimizer: torch.optim.Optimizer
    ) -> tuple[nn.Module | None, torch.optim.Optimizer | None]:
        """Return the module, and the optimizer (None if the servers update parameters)."""
        return self.model, optimizer if self.steps else None

    def gradients(self, batches: Sequence[Batch], hooks: StepHooks) -> Tensor:
        """Compute gradients and push them to the servers.

        If workers update the parameters, also receive the gradient sums.
        """
        self._placeholder.set_gradient()
        totals = super().gradients(batches, hooks)
        for share in self._fused:
            for fused in share:
                fused.take_all()
                if self._group is not None:
                    dist.reduce(fused.buffer, group=self._group, group_dst=0)
        if self._speaks:
            _wait_all(dist.isend(buffer, server) for server, buffer in self._buffers_by_server())
        if not self._plan.server_updates:
            self._pull_sums()
        return totals

    def _buffers_by_server(self) -> list[tuple[int, Tensor]]:
        pairs = zip(self._servers, self._fused, strict=True)
        return [(server, fused.buffer) for server, share in pairs for fused in share]

    def _pull_sums(self) -> None:
        if self._speaks:
            _wait_all(dist.irecv(buffer, server) for server, buffer in self._buffers_by_server())
        for share in self._fused:
            for fused in share:
                self._broadcast_to_devices(fused.buffer)
                fused.assign_gradients()

    def _broadcast_to_devices(self, message: Tensor) -> None:
        if self._group is not None:
            dist.broadcast(message, group=self._group, group_src=0)

    @torch.no_grad()
    def raise_weights(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace weights with master weights, which the servers send if they update parameters."""
        if self.steps:
            super().raise_weights(optimizer)
            return
        for parameter in (parameter for share in self._shares for parameter in share):
            if parameter.itemsize == 2:
                parameter.data = torch.empty_like(parameter, dtype=torch.float32)
        self._sync_parameters()

    def _sync_parameters(self) -> None:
        for server, share in zip(self._servers, self._shares, strict=True):
            for alike in by_dtype(share):
                message = torch.empty_like(concatenate(alike))
                if self._speaks:
                    dist.recv(message, server)
                self._broadcast_to_devices(message)
                spread(message, alike)


class Server(Role):
    """A rank that sums the workers' gradients for its share of parameters, and may update them."""

    def __init__(self, request: LayoutRequest, share: Sequence[nn.Parameter]) -> None:
        super().__init__(request)
        self.steps = request.plan.server_updates
        self._share = share if self.steps else []
        fused = fuse(share)
        self._fused: list[FusedGradients] = fused if self.steps else []
        self._sums = [one.buffer for one in fused]
        drop_all_but(self._share, request.objective)

    def checkpoint_state(
        self, optimizer: torch.optim.Optimizer
    ) -> tuple[nn.Module | None, torch.optim.Optimizer | None]:
        """Return this server's parameters and optimizer; None for both if workers update them."""
        return (self.model, optimizer) if self.steps else (None, None)

    def gradients(self, batches: Sequence[Batch], hooks: StepHooks) -> Tensor:
        """Sum the workers' gradients in the order of their ranks.

        Returns zeros for the loss and the number of targets, because a server has no samples.
        """
        self._placeholder.set_gradient()
        # A loss scaler sets its scale in the first call, and this rank has no loss.
        hooks.scale(torch.zeros((), device=self._on))
        for number, worker in enumerate(self._workers):
            for total in self._sums:
                received = torch.empty_like(total) if number else total
                dist.recv(received, worker)
                if number:
                    total += received
        for fused in self._fused:
            fused.assign_gradients()
        if not self.steps:
            self._send_to_workers(self._sums)
        return self._zero_totals()

    def raise_weights(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace this server's share with master weights, and send it to the workers."""
        super().raise_weights(optimizer)
        if self.steps:
            self._sync_parameters()

    def _send_to_workers(self, messages: Sequence[Tensor]) -> None:
        _wait_all([dist.isend(message, worker) for worker in self._workers for message in messages])

    def _sync_parameters(self) -> None:
        self._send_to_workers([concatenate(alike) for alike in by_dtype(self._share)])

    def _zero_totals(self) -> Tensor:
        return torch.zeros(2, dtype=torch.float64, device=self._on)

    def evaluate(self, batch: Batch, hooks: StepHooks) -> Tensor:
        """Do nothing: servers do not evaluate."""
        return self._zero_totals()


def _wait_all(works: Iterable[Any]) -> None:
    for work in list(works):  # all are started before the first wait
        work.wait()


def _device_groups(plan: Plan) -> dict[int, dist.ProcessGroup]:
    """Create a process group for the devices of each worker. Collective.

    The result is empty if each worker has a single device.
    """
    each = plan.worker_devices
    if each == 1:
        return {}
    return {
        worker: dist.new_group(range(worker * each, (worker + 1) * each))
        for worker in range(plan.data_parallel // each)
    }


def apply(request: LayoutRequest) -> Layout:
    """Make the first ranks workers and the last ranks servers.

    Raises BadInputError if there are fewer parameters to train than servers.
    """
    plan, objective = request.plan, request.objective
    make_equal(objective)
    trainable = [p for p in objective.parameters() if p.requires_grad]
    if plan.servers > len(trainable):
        raise BadInputError(
            f"{plan.servers} parameter servers, but the model has {len(trainable)} parameters to "
            f"train: a server needs at least one. Use --servers {len(trainable)} or less."
        )
    shares = split_by_size(trainable, plan.servers)
    devices = _device_groups(plan)
    if request.ranks.rank < plan.data_parallel:
        return Worker(request, shares, devices.get(request.ranks.rank // plan.worker_devices))
    return Server(request, shares[request.ranks.rank - plan.data_parallel])
