"""Memory in use, change by change, for many plans at once."""

import numpy as np

from outpace.planner.plan_batch import Bools, Floats
from outpace.records.memory import KINDS, Kind

Amount = Floats | float


class MemoryTimeline:
    """Changes of memory in the order of a step; what lived where the most did is asked for after.

    Every change is one number a plan, in bytes. A moment is looked at after what is taken
    (`take`), not after what is given back or moved on by many steps at once (`pass_over`).
    `finds`: whether `by_kind` is going to be asked for. What is offloaded has a maximum of its own,
    in host memory and on disks apart: neither need be at the device's fullest moment.
    """

    def __init__(self, plans: int, finds: bool = True) -> None:
        self._finds = finds
        self.peak: Floats = np.zeros(plans)
        self.host_peak: Floats = np.zeros(plans)
        self.disk_peak: Floats = np.zeros(plans)
        self._host: Floats = np.zeros(plans)
        self._disk: Floats = np.zeros(plans)
        self._live: Floats = np.zeros(plans)
        self._at = np.zeros(plans, dtype=np.int64)
        self._changes: list[tuple[Kind, Amount]] = []

    def take(self, kind: Kind, nbytes: Amount) -> None:
        """Memory that is taken, and a moment that may be the fullest."""
        self.pass_over(kind, nbytes)
        self.look()

    def drop(self, kind: Kind, nbytes: Amount) -> None:
        """Memory that is given back."""
        self.pass_over(kind, -nbytes)

    def pass_over(self, kind: Kind, nbytes: Amount) -> None:
        """A change without a look at what lives then."""
        self._changes.append((kind, nbytes))
        if kind != "offloaded":
            self._live += nbytes

    def offload(self, nbytes: Amount, on_disk: Bools | bool) -> None:
        """Memory that is taken in host memory or on a disk; below 0: given back there."""
        self.pass_over("offloaded", nbytes)
        self._host += np.where(on_disk, 0.0, nbytes)
        self._disk += np.where(on_disk, nbytes, 0.0)
        np.maximum(self.host_peak, self._host, out=self.host_peak)
        np.maximum(self.disk_peak, self._disk, out=self.disk_peak)

    def look(self) -> None:
        """The fullest moment is this one, where it is."""
        if self._finds:
            self._at[self._live > self.peak] = len(self._changes)
        np.maximum(self.peak, self._live, out=self.peak)

    def moment(self, kind: Kind, nbytes: Amount) -> None:
        """Taken, looked at, given back."""
        self.take(kind, nbytes)
        self.drop(kind, nbytes)

    def clear(self, *kinds: Kind, share: Amount = 1.0) -> None:
        """Give back all that is left of some kinds, or a share of it."""
        for kind in kinds:
            left = sum(nbytes for one, nbytes in self._changes if one == kind)
            self.drop(kind, share * left)

    def by_kind(self) -> dict[Kind, Floats]:
        """Bytes by kind at the fullest moment."""
        found: dict[Kind, Floats] = {kind: np.zeros_like(self.peak) for kind in KINDS}
        for number, (kind, nbytes) in enumerate(self._changes, 1):
            found[kind] += np.where(number <= self._at, nbytes, 0.0)
        return found
