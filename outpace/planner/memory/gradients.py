"""Memory of a weight's gradient during the backward, by how the plan stores gradients."""

from dataclasses import dataclass

import numpy as np

from outpace.planner.memory.saved_activations import FP32
from outpace.planner.memory.setup import MemorySetup
from outpace.planner.memory.timeline import MemoryTimeline
from outpace.planner.plan_columns import Bools, Floats


@dataclass(frozen=True)
class GradientBytes:
    """Bytes per element of a gradient, one entry per plan.

    A gradient first has `matmul` or `other` bytes, before a cast, depending on the operator that
    computes it. On ranks with unsharded weights, `kept` bytes stay, or `added` bytes live until
    they are added to existing gradients. On ranks that gather parameters, both are 0; `whole` bytes
    live until the reduction, or `joined` bytes until they are added to gradients with a delayed
    reduction.
    """

    matmul: Floats
    other: Floats
    kept: Floats
    added: Floats
    whole: Floats
    joined: Floats


def gradient_bytes(setup: MemorySetup, allocates: Bools, joins: Bools) -> GradientBytes:
    """Return the bytes per element of a gradient, for every plan.

    `allocates`: the backward allocates gradients that stay. `joins`: a pipeline already holds
    gradients that wait for its last micro-batch.
    """
    s, item, gathers = setup.sizes, setup.sharding.item, setup.sharding.gathers
    cast = np.where(setup.gradients.casts_sums, item, 0.0)
    sums = np.where(gathers, 0.0, added_bytes(setup))
    # Added immediately if the kept gradients have the same dtype.
    joins = joins & (s.reduced == item)
    return GradientBytes(
        matmul=np.where(s.operand < item, s.operand, 0.0) + cast,
        other=cast,
        kept=np.where(allocates, sums, 0.0),
        added=np.where(allocates, 0.0, sums),
        whole=np.where(gathers & ~joins, item, 0.0),
        joined=np.where(gathers & joins, item, 0.0),
    )


def added_bytes(setup: MemorySetup) -> Floats:
    """Return the bytes per element of a gradient that ranks without sharded weights accumulate."""
    return np.where(setup.gradients.casts_sums, FP32, setup.sharding.item)


def add_gradient(
    timeline: MemoryTimeline,
    item: GradientBytes,
    elements: Floats,
    matmul: bool = True,
    copies: Floats | float = 0.0,
) -> None:
    """Add a weight's gradient: stored, accumulated, or kept until its reduction.

    A gradient from a `matmul` is cast when the weight's copy, of `copies` bytes per element, is
    freed.
    """
    made = elements * (item.matmul if matmul else item.other)
    timeline.allocate("temporary", made)
    timeline.free("weight copies", copies * elements)
    timeline.moment("gradients", elements * item.added)
    timeline.allocate("gradients", elements * item.kept)
    timeline.moment("communication", elements * item.joined)
    timeline.allocate("communication", elements * item.whole)
    timeline.free("temporary", made)


def offload_gradients(timeline: MemoryTimeline, setup: MemorySetup, nbytes: Floats) -> None:
    """Add gradients to host memory, for plans that keep their weights there."""
    timeline.offload(np.where(setup.gradients_on_host, nbytes, 0.0), False)
