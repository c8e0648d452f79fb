"""A number about a machine: measured here, with all its samples, or from the catalog."""

import re
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, FiniteFloat, field_validator, model_validator

from outpace.records.base import Record, entry
from outpace.records.units import show_count, show_seconds, show_share

Unit = Literal["FLOP/s", "B/s", "s", "tokens/s", "samples/s", "ratio"]


# Range of plausible figures, up to far above the fastest machines; the planner ignores all others.
# Shares may have any size and sign.
_POSSIBLE: Mapping[Unit, tuple[float, float]] = {
    "FLOP/s": (1e3, 1e19),
    "B/s": (1.0, 1e16),
    "s": (0.0, 1e7),
    "tokens/s": (1e-6, 1e15),
    "samples/s": (1e-6, 1e15),
    "ratio": (-1e9, 1e9),
}
# Words for matmuls in the keys of older files.
_PRODUCT = re.compile(r"\b(matrix )?product")


class Key(Record):
    """Identity of a figure, by which two probes of a machine are compared."""

    kind: str = Field(description="what was probed: matmul, memory, all-reduce, …")
    what: str = Field(description="the quantity: rate, time, latency, …")
    of: dict[str, str | int] = entry("dtype, sizes, axis, …", {})

    @field_validator("what", "of", mode="before")
    @classmethod
    def _read_old_words(cls, value: Any) -> Any:
        """Read a key of a file in which matmuls are called products."""
        if isinstance(value, Mapping):
            return {name: cls._read_old_words(word) for name, word in value.items()}
        return _PRODUCT.sub("matmul", value) if isinstance(value, str) else value

    def __hash__(self) -> int:
        return hash((self.kind, self.what, tuple(sorted(self.of.items()))))

    def __str__(self) -> str:
        return " ".join([self.kind, self.what, *(f"{k}={v}" for k, v in self.of.items())])

    def number(self, name: str) -> int:
        """Return a number by its name; 0 if it is not given."""
        found = self.of.get(name, 0)
        return found if isinstance(found, int) else 0

    def has(self, **wanted: str | int) -> bool:
        """Return whether the key has all these values."""
        return all(self.of.get(name) == value for name, value in wanted.items())


class Figure(Record):
    """A figure of a machine; `value` is the median of all samples, which are in order.

    Rounds of samples are spread over the time of the probe. A probe that is repeated immediately
    gives a value from `low` to `high` with probability `level`. If the machine was not steady
    enough, `value` is None and `unstable` says why.
    """

    key: Key
    unit: Unit
    value: FiniteFloat | None
    origin: Literal["measured", "catalog"]
    low: FiniteFloat | None = None
    high: FiniteFloat | None = None
    level: FiniteFloat | None = None
    rounds: tuple[tuple[FiniteFloat, ...], ...] = entry("of samples", ())
    unstable: str | None = None
    source: str | None = entry("source of a catalog figure")

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if self.origin == "catalog" and (self.source is None or self.value is None):
            raise ValueError(f"{self.key}: a figure from the catalog needs a value and a source")
        if self.origin == "measured" and self.source is not None:
            raise ValueError(f"{self.key}: the source of a measured figure is this machine")
        if self.value is None and self.unstable is None:
            raise ValueError(f"{self.key}: without a value, it needs a reason")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"{self.key}: low {self.low} is above high {self.high}")
        least, most = _POSSIBLE[self.unit]
        if self.value is not None and not least <= self.value <= most:
            raise ValueError(
                f"{self.key}: {self.value:g} {self.unit} is not possible: machines have "
                f"between {least:g} and {most:g} {self.unit}. Measure again with outpace probe"
            )
        return self

    @property
    def samples(self) -> list[float]:
        """Return the samples of all rounds, in order."""
        return [sample for samples in self.rounds for sample in samples]

    @property
    def half_width(self) -> float | None:
        """Return half the interval's width as a share of the value; None without an interval."""
        if not self.value or self.low is None or self.high is None:
            return None
        return (self.high - self.low) / 2 / self.value

    def __str__(self) -> str:
        """Format the value with its unit."""
        if self.value is None:
            return "n/a"
        if self.unit == "s":
            return show_seconds(self.value)
        if self.unit == "ratio":
            return show_share(self.value)
        return show_count(self.value, self.unit)

    def contains(self, other: "Figure") -> bool | None:
        """Return whether a repeated probe's value is in the interval; None if either is missing."""
        if self.low is None or self.high is None or other.value is None or self.value is None:
            return None
        return self.low <= other.value <= self.high
