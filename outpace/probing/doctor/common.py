"""Helpers shared by the doctor's checks."""

from outpace.records.finding import Finding, Severity, Slowdown


class UnknownFactError(Exception):
    """Raised if a check lacks a fact; the message says which one, and how to obtain it."""


def make_finding(
    check: str, severity: Severity, what: str, seen: str, remedy: str, costs: Slowdown | None = None
) -> Finding:
    """Create a Finding from positional arguments."""
    return Finding(check=check, severity=severity, what=what, seen=seen, remedy=remedy, costs=costs)


def times(low: float, high: float, of: str, source: str) -> Slowdown | None:
    """Create a Slowdown, or return None if it is negligible."""
    return Slowdown(low=low, high=high, of=of, source=source) if high > 1.001 else None


def join_names(names: list[str]) -> str:
    """Join names for a sentence, as in "0, 1, 2, 3, 4, 5 and 5 more"."""
    if len(names) > 8:
        return f"{', '.join(names[:6])} and {len(names) - 6} more"
    return ", ".join(names)
