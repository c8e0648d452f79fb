"""Finding: a setting or state of a machine that hurts performance, and what to do about it."""

from typing import ClassVar, Literal, Self

from pydantic import Field, PositiveFloat, model_validator

from outpace.records.base import Record

# Worst first. Findings without a measured cost have the severity of their kind.
Severity = Literal["severe", "high", "moderate", "low"]
SEVERITIES: tuple[Severity, ...] = ("severe", "high", "moderate", "low")


class Slowdown(Record):
    """The factor by which `of` gets slower, as a range if it is not known exactly."""

    low: PositiveFloat
    high: PositiveFloat
    of: str
    source: str = Field(min_length=1)

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low {self.low} is above high {self.high}")
        return self

    def __str__(self) -> str:
        times = f"{self.low:.2g} to {self.high:.2g}"
        if self.low in (1, self.high):
            times = f"{'up to ' * (self.low < self.high)}{self.high:.2g}"
        return f"{times} × the time of {self.of}"


class Finding(Record):
    """One problem: what was seen, what it costs (None: not known), and the remedy."""

    summary_fields: ClassVar[tuple[str, ...]] = ("severity", "what", "seen", "remedy")

    check: str
    what: str
    seen: str
    remedy: str
    severity: Severity
    costs: Slowdown | None = None


class Examination(Record):
    """Result of `outpace doctor`: findings, most costly first, and the checks that were made.

    `not_checked` has the checks that could not be made, each with the reason.
    """

    findings: tuple[Finding, ...]
    checked: tuple[str, ...]
    not_checked: dict[str, str]

    @model_validator(mode="after")
    def _check_order_of_costs(self) -> Self:
        order = [cost_order(finding) for finding in self.findings]
        if order != sorted(order):
            raise ValueError("findings are not ordered by cost")
        return self


def cost_order(finding: Finding) -> tuple[int, float]:
    """Return a key that sorts findings by severity, then by cost, both highest first."""
    known = 0.0 if finding.costs is None else finding.costs.high
    return SEVERITIES.index(finding.severity), -known
