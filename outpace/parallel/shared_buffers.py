"""Synchronisation of a user module's buffers: all data-parallel ranks use rank 0's values.

Every step, evaluation and checkpoint starts with rank 0's buffers, as under
DistributedDataParallel. So a run does not depend on when it is evaluated or saved, and every rank
resumes with the checkpoint's buffers. Only buffers that a forward changes are sent: running
averages and counters, not masks and tables. Ranks agree on the changed buffers after each of the
first steps. They agree again for each evaluation and checkpoint, because later forwards may change
further buffers.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from outpace.nn.fingerprint import fingerprint
from outpace.parallel.tensors import as_numbers, by_dtype, concatenate, spread

_FIRST_STEPS = 2  # one may be the check of the first batch, which restores buffers


class SharedBuffers:
    """Synchronises the buffers of `module` over the ranks of `group`."""

    def __init__(
        self, module: nn.Module, device: torch.device, group: dist.ProcessGroup | None = None
    ) -> None:
        self._module, self._device, self._group = module, device, group
        self._names = [name for name, _ in module.named_buffers()]
        self._shared: set[str] = set()
        self._steps = 0
        self._trained = self._evaluated = False  # since buffers were last equal on all ranks
        self._seen: dict[str, tuple[Tensor, int, int | None]] = {}

    def begin_step(self) -> None:
        """Make buffers equal to rank 0's before the forward of a step. Collective."""
        if self._trained or self._evaluated:
            if self._steps <= _FIRST_STEPS or self._evaluated:
                self._agree_on_changes()
            self._broadcast_shared()
        self._note_initial_values()
        self._trained, self._evaluated = True, False
        self._steps += 1

    def begin_evaluation(self) -> None:
        """Make buffers equal to rank 0's before an evaluation. Collective."""
        if self._trained:
            self.make_equal()
        self._note_initial_values()
        self._evaluated = True

    def make_equal(self) -> None:
        """Make buffers equal to rank 0's, for example before a checkpoint. Collective."""
        if self._trained or self._evaluated:
            self._agree_on_changes()
            self._broadcast_shared()
        self._trained = self._evaluated = False

    def _note_initial_values(self) -> None:
        if self._names and not self._seen:
            self._seen = {n: (b, b._version, fingerprint(b)) for n, b in self._initial_buffers()}

    def _initial_buffers(self) -> Iterator[tuple[str, Tensor]]:
        found = dict(self._module.named_buffers())
        for name in self._names:
            if name in found:
                yield name, found[name]

    def _agree_on_changes(self) -> None:
        """Find buffers that have changed on any rank, and share them from now on. Collective."""
        if not self._names:
            return
        saved = self._persistent_names()
        flags = torch.zeros(len(self._names), dtype=torch.uint8)
        held = dict(self._initial_buffers())
        for number, name in enumerate(self._names):
            if name in self._shared:
                continue
            first, version, values = self._seen.get(name, (None, 0, None))
            buffer = held.get(name, first)
            if buffer is not None and buffer is first:
                flags[number] = buffer._version != version or fingerprint(buffer) != values
            else:  # a non-persistent buffer that forwards replace is a cache of any length
                flags[number] = name in saved
        flags = flags.to(self._device)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group)
        flagged = zip(self._names, flags.tolist(), strict=True)
        self._shared.update(name for name, flag in flagged if flag)

    def _persistent_names(self) -> set[str]:
        return {
            f"{prefix}.{name}" if prefix else name
            for prefix, part in self._module.named_modules()
            for name in part._buffers.keys() - part._non_persistent_buffers_set
        }

    @torch.no_grad()
    def _broadcast_shared(self) -> None:
        if not self._shared:  # walking all modules in each step would take time
            return
        held = [
            as_numbers(b)
            for name, b in self._initial_buffers()
            if name in self._shared and b.numel()
        ]
        for alike in by_dtype(held):
            message = concatenate(alike)
            dist.broadcast(message, group=self._group, group_src=0)
            spread(message, alike)
