"""Memory in use after each change, for many plans at once."""

from copy import copy

import numpy as np

from outpace.planner.plan_columns import Bools, Floats
from outpace.records.memory import KINDS, Kind

Amount = Floats | float


class MemoryTimeline:
    """Memory during a step, as a sequence of changes, and its peak, for many plans at once.

    A change is one number of bytes per plan. `allocate` checks for a new peak; `free` and
    `pass_over`, whose changes may stand for many, do not. To use `by_kind`, set `records_kinds`.
    Offloaded bytes have their own peaks in host memory and on disk, at times that may differ from
    the device's. `kept` is the bytes of memory blocks that an allocator adds for tensors larger
    than any freed block.
    """

    def __init__(self, plans: int, records_kinds: bool = True) -> None:
        self._records_kinds = records_kinds
        self._plans: Bools | None = None
        self.peak: Floats = np.zeros(plans)
        self.kept: Floats = np.zeros(plans)
        self.host_peak: Floats = np.zeros(plans)
        self.disk_peak: Floats = np.zeros(plans)
        self._host: Floats = np.zeros(plans)
        self._disk: Floats = np.zeros(plans)
        self._live: Floats = np.zeros(plans)
        self._at = np.zeros(plans, dtype=np.int64)
        self._changes: list[tuple[Kind, Amount]] = []

    def select(self, plans: Bools) -> "MemoryTimeline":
        """Return a view of this timeline whose changes apply only to the selected plans."""
        if plans.all():
            return self
        view = copy(self)  # part of the same arrays
        view._plans = plans if self._plans is None else self._plans & plans
        return view

    def allocate(self, kind: Kind, nbytes: Amount) -> None:
        """Allocate memory and check for a new peak."""
        self.pass_over(kind, nbytes)
        self.record_peak()

    def free(self, kind: Kind, nbytes: Amount) -> None:
        """Free `nbytes` of a kind of memory in each plan."""
        self.pass_over(kind, -nbytes)

    def pass_over(self, kind: Kind, nbytes: Amount) -> None:
        """Change the memory in use without checking for a new peak; negative values free memory."""
        self._record_change(kind, self._mask_unselected(nbytes))

    def offload(self, nbytes: Amount, on_disk: Bools | bool) -> None:
        """Allocate memory on the host or on disk; negative values free it."""
        nbytes = self._mask_unselected(nbytes)
        self._record_change("offloaded", nbytes)
        self._host += np.where(on_disk, 0.0, nbytes)
        self._disk += np.where(on_disk, nbytes, 0.0)
        np.maximum(self.host_peak, self._host, out=self.host_peak)
        np.maximum(self.disk_peak, self._disk, out=self.disk_peak)

    def record_peak(self) -> None:
        """Update the peak from the memory now in use."""
        if self._records_kinds:
            self._at[self._live > self.peak] = len(self._changes)
        np.maximum(self.peak, self._live, out=self.peak)

    def moment(self, kind: Kind, nbytes: Amount) -> None:
        """Allocate memory, check for a new peak, and free the memory again."""
        nbytes = self._mask_unselected(nbytes)
        if not self._records_kinds:
            np.maximum(self.peak, self._live + nbytes, out=self.peak)
            return
        self._record_change(kind, nbytes)
        self.record_peak()
        self._record_change(kind, -nbytes)

    def clear(self, *kinds: Kind) -> None:
        """Free all memory of these kinds."""
        for kind in kinds:
            self.free(kind, sum(nbytes for one, nbytes in self._changes if one == kind))

    def by_kind(self) -> dict[Kind, Floats]:
        """Return the memory at the peak, by kind."""
        found: dict[Kind, Floats] = {kind: np.zeros_like(self.peak) for kind in KINDS}
        for number, (kind, nbytes) in enumerate(self._changes, 1):
            found[kind] += np.where(number <= self._at, nbytes, 0.0)
        return found

    def _mask_unselected(self, nbytes: Amount) -> Amount:
        return nbytes if self._plans is None else np.where(self._plans, nbytes, 0.0)

    def _record_change(self, kind: Kind, nbytes: Amount) -> None:
        self._changes.append((kind, nbytes))
        if kind != "offloaded":
            self._live += nbytes
