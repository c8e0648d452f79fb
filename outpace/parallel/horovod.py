"""Horovod's all-reduce instead of the built-in ring, if Horovod is installed.

Sergeev and Del Balso, "Horovod", arXiv 1802.05799. Gradients go into buffers as under `ring`, and
each full buffer to `horovod.torch.allreduce_async_`, which chooses the algorithm (a ring over MPI
or gloo, or NCCL's). `DistributedOptimizer` is not used: it reduces at the optimizer's step, but
clipping needs the norm earlier, and it cannot distinguish a gradient that no rank has from a zero
gradient.

This follows the documented interface of Horovod 0.28 and is tested with a mock. It has not been run
with Horovod itself, which does not build against supported torch versions without changes.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch import Tensor

from outpace.parallel.layout import Layout, LayoutRequest
from outpace.parallel.ring import RingReplicas
from outpace.records.errors import BadInputError
from outpace.records.ranks import Ranks

_INSTEAD = "use --strategy ring, the same algorithm built in"


def why_not(ranks: Ranks) -> str | None:
    """Explain why these ranks cannot use Horovod; return None if they can. Initialises Horovod."""
    if find_spec("horovod") is None:
        return (
            "Horovod is not installed. Install it for PyTorch (HOROVOD_WITH_PYTORCH=1 pip install "
            f"horovod), or {_INSTEAD}"
        )
    try:
        hvd = import_module("horovod.torch")
    except (ImportError, OSError) as error:
        return (
            f"Horovod is installed but cannot be loaded ({error}). Build it for PyTorch "
            f"(HOROVOD_WITH_PYTORCH=1), or {_INSTEAD}"
        )
    hvd.init()
    if (hvd.rank(), hvd.size()) != (ranks.rank, ranks.world_size):
        return (
            f"Horovod reports rank {hvd.rank()} of {hvd.size()} for this process, but it is rank "
            f"{ranks.rank} of {ranks.world_size}. Start with horovodrun or mpirun instead of "
            f"--nproc or torchrun, or {_INSTEAD}"
        )
    return None


class HorovodReducer:
    """Reducer that sums buffers over all ranks. `hvd` is the initialised module `horovod.torch`."""

    def __init__(self, hvd: Any) -> None:
        self._hvd = hvd
        self._pending: list[Any] = []

    def begin(self, buffer: Tensor) -> None:
        """Start the all-reduce of a buffer.

        Horovod matches buffers across ranks by name, so buffers are named by the order of calls.
        """
        name = f"outpace.{len(self._pending)}"
        handle = self._hvd.allreduce_async_(buffer, name=name, op=self._hvd.Sum)
        self._pending.append(handle)

    def finish(self) -> None:
        """Wait until every buffer is summed."""
        pending, self._pending = self._pending, []
        for handle in pending:
            self._hvd.synchronize(handle)


def apply(request: LayoutRequest) -> Layout:
    """Copy rank 0's weights to all replicas, and reduce their gradients with Horovod.

    Raises BadInputError if Horovod cannot be used.
    """
    reason = why_not(request.ranks)
    if reason is not None:
        raise BadInputError(f"strategy horovod: {reason}.")
    return RingReplicas(request, HorovodReducer(import_module("horovod.torch")))
