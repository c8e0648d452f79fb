"""The processes of a job as one: process groups, and doing a thing once for all."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from outpace.records.errors import BadInputError, OutpaceError
from outpace.records.ranks import Ranks

Result = TypeVar("Result")
_PATIENCE = timedelta(hours=6)


@dataclass(frozen=True)
class Groups:
    """`control` carries small host messages of each step; `saving` is for checkpoints alone.

    `patient` waits for what rank 0 does alone, however long its disk takes; so does `saving`. The
    death of a rank ends the others' waiting at once all the same.
    """

    ranks: Ranks
    control: dist.ProcessGroup
    saving: dist.ProcessGroup
    patient: dist.ProcessGroup

    def once(self, action: Callable[[], Result]) -> Result:
        """Do `action` on rank 0 and give its result to all; its OutpaceError is raised on all."""
        outcome: list[object] = [None, None]
        if self.ranks.rank == 0:
            try:
                outcome[0] = action()
            except OutpaceError as error:
                outcome[1] = error
        dist.broadcast_object_list(outcome, 0, group=self.patient)
        if isinstance(outcome[1], OutpaceError):
            raise outcome[1]
        return outcome[0]  # type: ignore[return-value]

    def require_same(self, facts: Mapping[str, object]) -> None:
        """Refuse ranks that have settled on different things. Raises BadInputError on all."""
        said: list[Any] = [None] * self.ranks.world_size
        dist.all_gather_object(said, dict(facts), group=self.patient)
        for rank, other in enumerate(said):
            for what, value in said[0].items():
                if other[what] != value:
                    raise BadInputError(
                        f"rank {rank} has another {what} than rank 0: {other[what]} instead of "
                        f"{value}. All ranks need the same data, model and settings, and devices "
                        "that can do the same."
                    )


@contextmanager
def process_groups(
    ranks: Ranks, device: torch.device, timeout_s: float, restart: int
) -> Iterator[Groups]:
    """Join this job's processes and leave them at the end.

    A job of one process gets a group too, so that nothing else has to tell the two apart. Each
    restart gets names of its own in the store, since the addresses of a dead process stay there.
    """
    if dist.is_initialized():
        raise BadInputError(
            "torch.distributed is initialised already in this process; outpace makes its own "
            "process group. Call outpace.train before init_process_group, or in another process."
        )
    timeout = timedelta(seconds=timeout_s)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if ranks.world_size == 1:
        store: Store = HashStore()
        backend = "gloo"
    else:
        joined = rendezvous("env://", ranks.rank, ranks.world_size, timeout=timeout)
        store = PrefixStore(f"outpace-{restart}", next(joined)[0])
    dist.init_process_group(
        backend, store=store, rank=ranks.rank, world_size=ranks.world_size, timeout=timeout
    )
    try:
        yield Groups(
            ranks,
            control=dist.new_group(backend="gloo", timeout=timeout),
            saving=dist.new_group(backend="gloo", timeout=max(timeout, _PATIENCE)),
            patient=dist.new_group(backend="gloo", timeout=max(timeout, _PATIENCE)),
        )
    finally:
        dist.destroy_process_group()
