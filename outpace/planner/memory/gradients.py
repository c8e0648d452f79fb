"""Memory of a weight's gradient during the backward, by how the plan stores gradients."""

from dataclasses import dataclass

import numpy as np

from outpace.planner.memory.saved_activations import FP32
from outpace.planner.memory.setup import MemorySetup
from outpace.planner.memory.timeline import MemoryTimeline
from outpace.planner.plan_columns import Bools, Floats


@dataclass(frozen=True)
class GradientBytes:
    """Bytes per element of a gradient, from its computation to its reduction, one entry per plan.

    - `matmul`: temporary bytes before the gradient has its final dtype, if a matmul computes it.
    - `other`: the same, if another operator computes it.
    - `kept`: if weights are not sharded, bytes that stay until the optimizer's step.
    - `added`: if weights are not sharded, bytes that are freed once they are added to a gradient
      that already exists; in this case, `kept` is 0.
    - `whole`: if parameters are gathered, bytes that live until the reduction.
    - `joined`: if parameters are gathered, bytes that are freed once they are added to a gradient
      whose reduction a pipeline delays; in this case, `whole` is 0.
    """

    matmul: Floats
    other: Floats
    kept: Floats
    added: Floats
    whole: Floats
    joined: Floats


def gradient_bytes(setup: MemorySetup, allocates: Bools, joins: Bools) -> GradientBytes:
    """Return the bytes per element of a gradient, for every plan.

    `allocates`: the backward allocates gradients that stay, instead of adding to existing ones.
    `joins`: a pipeline already keeps gradients until its last micro-batch, to which the backward
    adds.
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
    """Return the bytes per element of accumulated gradients, if weights are not sharded."""
    return np.where(setup.gradients.casts_sums, FP32, setup.sharding.item)


def add_gradient(
    timeline: MemoryTimeline,
    item: GradientBytes,
    elements: Floats,
    matmul: bool = True,
    copies: Floats | float = 0.0,
) -> None:
    """Add the memory of a weight's gradient to a timeline, until it is stored or reduced.

    `item` has the gradient's bytes per element, and `elements` their number. If the backward used a
    copy of the weight of `copies` bytes per element, the copy is freed before the gradient is cast
    to its final dtype. `matmul`: a matmul computes the gradient.
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
