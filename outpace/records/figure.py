"""Figure: a property of a machine, either measured with all samples or from the catalog."""

import re
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, FiniteFloat, field_validator, model_validator

from outpace.records.base import Record, entry
from outpace.records.units import show_count, show_seconds, show_share

Unit = Literal["FLOP/s", "B/s", "s", "tokens/s", "samples/s", "ratio"]


# Plausible range of each unit, up to far above the fastest machines; other values are refused.
# Ratios may have any sign.
_POSSIBLE: Mapping[Unit, tuple[float, float]] = {
    "FLOP/s": (1e3, 1e19),
    "B/s": (1.0, 1e16),
    "s": (0.0, 1e7),
    "tokens/s": (1e-6, 1e15),
    "samples/s": (1e-6, 1e15),
    "ratio": (-1e9, 1e9),
}
# What keys in older files call a matmul.
_PRODUCT = re.compile(r"\b(matrix )?product")


class Key(Record):
    """Name of a measured quantity, by which the figures of two probes are matched."""

    kind: str = Field(description="what was probed: matmul, memory, all-reduce, …")
    what: str = Field(description="the quantity: rate, time, latency, …")
    of: dict[str, str | int] = entry("dtype, sizes, axis, …", {})

    @field_validator("what", "of", mode="before")
    @classmethod
    def _read_old_words(cls, value: Any) -> Any:
        """Read older files, in which matmuls are called products."""
        if isinstance(value, Mapping):
            return {name: cls._read_old_words(word) for name, word in value.items()}
        return _PRODUCT.sub("matmul", value) if isinstance(value, str) else value

    def __hash__(self) -> int:
        return hash((self.kind, self.what, tuple(sorted(self.of.items()))))

    def __str__(self) -> str:
        return " ".join([self.kind, self.what, *(f"{k}={v}" for k, v in self.of.items())])

    def number(self, name: str) -> int:
        """Return the integer `of[name]`; 0 if there is none."""
        found = self.of.get(name, 0)
        return found if isinstance(found, int) else 0

    def has(self, **wanted: str | int) -> bool:
        """Return whether `of` has all these values."""
        return all(self.of.get(name) == value for name, value in wanted.items())


class Figure(Record):
    """A property of a machine; `value` is the median of all samples.

    Samples are in order, in rounds spread over the duration of the probe. A probe repeated
    immediately gives a value from `low` to `high` with probability `level`. If the machine was not
    steady enough, `value` is None and `unstable` says why.
    """

    key: Key
    unit: Unit
    value: FiniteFloat | None
    origin: Literal["measured", "catalog"]
    low: FiniteFloat | None = None
    high: FiniteFloat | None = None
    level: FiniteFloat | None = None
    rounds: tuple[tuple[FiniteFloat, ...], ...] = entry("samples of each round", ())
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
                f"{self.key}: {self.value:g} {self.unit} is not possible. The value must be "
                f"between {least:g} and {most:g} {self.unit}. Measure again with outpace probe"
            )
        return self

    @property
    def samples(self) -> list[float]:
        """Return the samples of all rounds, in order."""
        return [sample for samples in self.rounds for sample in samples]

    @property
    def half_width(self) -> float | None:
        """Return half the interval's width relative to the value; None without an interval."""
        if not self.value or self.low is None or self.high is None:
            return None
        return (self.high - self.low) / 2 / self.value

    def __str__(self) -> str:
        if self.value is None:
            return "n/a"
        if self.unit == "s":
            return show_seconds(self.value)
        if self.unit == "ratio":
            return show_share(self.value)
        return show_count(self.value, self.unit)

    def contains(self, other: "Figure") -> bool | None:
        """Return whether another probe's value is in this figure's interval; None if unknown."""
        if self.low is None or self.high is None or other.value is None or self.value is None:
            return None
        return self.low <= other.value <= self.high
