"""Results of one part of a probe: figures, advice based on them, and notes."""

from dataclasses import dataclass

from outpace.records.figure import Figure
from outpace.records.probe_results import Advice, LinkFit


@dataclass(frozen=True)
class ProbeSection:
    """A section of `outpace probe`.

    `notes`: omissions and changes, with the reasons. `said`: the figures in words; empty if their
    values were withdrawn because the machine was disturbed.
    """

    figures: tuple[Figure, ...] = ()
    advice: tuple[Advice, ...] = ()
    notes: tuple[str, ...] = ()
    fits: tuple[LinkFit, ...] = ()
    said: tuple[str, ...] = ()

    def __add__(self, other: "ProbeSection") -> "ProbeSection":
        return ProbeSection(
            self.figures + other.figures, self.advice + other.advice, self.notes + other.notes,
            self.fits + other.fits, self.said + other.said,
        )  # fmt: skip
