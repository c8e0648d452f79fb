"""Memory of a weight's gradient as a backward makes it, by the plan's way to keep gradients."""

from dataclasses import dataclass

import numpy as np

from outpace.planner.memory.saved_activations import FP32
from outpace.planner.memory.setup import MemorySetup
from outpace.planner.memory.timeline import MemoryTimeline
from outpace.planner.plan_batch import Bools, Floats


@dataclass(frozen=True)
class GradientBytes:
    """Bytes of a gradient for each of its elements, one entry a plan.

    `product` and `other` are those that it is made in before it is cast, where a matrix product
    makes it and elsewhere. Where ranks have whole weights `kept` stay, or `added` are there until
    they are added to the present ones: both are 0 where parameters are gathered. There `whole` stay
    until they are reduced, or `joined` until they are added to those that wait for a pipeline's
    last micro-batch.
    """

    product: Floats
    other: Floats
    kept: Floats
    added: Floats
    whole: Floats
    joined: Floats


def gradient_bytes(setup: MemorySetup, allocates: Bools, joins: Bools) -> GradientBytes:
    """Return the bytes for every plan.

    `allocates`: a backward allocates gradients that stay; `joins`: there are some that wait for a
    pipeline's last micro-batch.
    """
    s, item, gathers = setup.sizes, setup.sharding.item, setup.sharding.gathers
    cast = np.where(setup.gradients.casts_sums, item, 0.0)
    sums = np.where(gathers, 0.0, added_bytes(setup))
    # Added at once where what waits is of its dtype.
    joins = joins & (s.reduced == item)
    return GradientBytes(
        product=np.where(s.operand < item, s.operand, 0.0) + cast,
        other=cast,
        kept=np.where(allocates, sums, 0.0),
        added=np.where(allocates, 0.0, sums),
        whole=np.where(gathers & ~joins, item, 0.0),
        joined=np.where(gathers & joins, item, 0.0),
    )


def added_bytes(setup: MemorySetup) -> Floats:
    """Return bytes of a gradient as it comes to those that are there, where none are gathered."""
    added: Floats = np.where(setup.gradients.casts_sums, FP32, setup.sharding.item)
    return added


def add_gradient(
    timeline: MemoryTimeline,
    item: GradientBytes,
    elements: Floats,
    product: bool = True,
    copies: Floats | float = 0.0,
) -> None:
    """Add a weight's gradient: kept, added to the present one, or kept for its reduction.

    That of a `product` is made in its dtype, and cast when the weight's copy, of `copies` bytes an
    element, is gone.
    """
    made = elements * (item.product if product else item.other)
    timeline.take("temporary", made)
    timeline.drop("weight copies", copies * elements)
    timeline.moment("gradients", elements * item.added)
    timeline.take("gradients", elements * item.kept)
    timeline.moment("communication", elements * item.joined)
    timeline.take("communication", elements * item.whole)
    timeline.drop("temporary", made)


def offload_gradients(timeline: MemoryTimeline, setup: MemorySetup, nbytes: Floats) -> None:
    """Add gradients that lie where their weights do, in host memory; of others nothing."""
    timeline.offload(np.where(setup.gradients_on_host, nbytes, 0.0), False)
