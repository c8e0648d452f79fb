"""Formatting of numbers: memory in binary units (GiB), rates and counts in decimal ones (GB/s)."""

import re

_DECIMAL = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_BINARY = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def show_bytes(count: float | None) -> str:
    """Format memory in binary units: 1536 -> '1.50 KiB'. None -> 'n/a'."""
    if count is None:
        return "n/a"
    for factor, name in _BINARY:
        if abs(count) >= factor:
            return f"{count / factor:.2f} {name}"
    return f"{count:.0f} B"


def show_size(count: int) -> str:
    """Format a size like `show_bytes`, without zero decimals: 65536 -> '64 KiB'."""
    return show_bytes(count).replace(".00 ", " ")


def show_count(count: float | None, unit: str = "") -> str:
    """Format a count or a rate, decimal: 1.5e12, 'FLOP/s' -> '1.50 TFLOP/s'. None -> 'n/a'."""
    if count is None:
        return "n/a"
    for factor, prefix in _DECIMAL:
        if abs(count) >= factor:
            return f"{count / factor:.2f} {prefix}{unit}".rstrip()
    return f"{count:.4g} {unit}".rstrip()


def show_share(share: float | None) -> str:
    """Format a fraction in percent: 0.417 -> '41.7 %'. None -> 'n/a'."""
    return "n/a" if share is None else f"{100 * share:.1f} %"


def show_seconds(seconds: float | None) -> str:
    """Format a duration: 0.0123 -> '12.3 ms', 95 -> '1 min 35 s'. None -> 'n/a'."""
    if seconds is None:
        return "n/a"
    if seconds < 1e-3:
        return f"{1e6 * seconds:.1f} µs"
    if seconds < 1:
        return f"{1000 * seconds:.1f} ms"
    if seconds < 60:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


_SIZE = re.compile(r"([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)")
_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{p}ib": 2 ** (10 * n) for n, p in enumerate("kmgt", 1)}
_UNITS |= {f"{p}b": 10 ** (3 * n) for n, p in enumerate("kmgt", 1)}


def read_bytes(text: str) -> int:
    """Parse bytes: '8GiB', '900 MiB', '8 GB', '2e9'. Raises ValueError with a user message."""
    found = _SIZE.fullmatch(text.strip())
    factor = _UNITS.get(found[2].lower()) if found else None
    try:
        count = float(found[1]) * factor if found and factor else 0.0
    except ValueError:
        count = 0.0
    if not 1 <= count < 2**63:
        raise ValueError(
            f"{text!r} is not a number of bytes. Write 8GiB or 900MiB (powers of 1024), 8GB or 2e9"
        )
    return round(count)


def write_bytes(count: int) -> str:
    """Format a size exactly, for `read_bytes`: 8589934592 -> '8GiB'."""
    for factor, name in _BINARY:
        if count % factor == 0:
            return f"{count // factor}{name}"
    return str(count)


def show_number(count: int, one: str, many: str | None = None) -> str:
    """Format a count with its noun: (1, "step") -> '1 step', (2000, "step") -> '2,000 steps'."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"
