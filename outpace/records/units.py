"""Numbers as a person reads them: memory binary (GiB), rates and counts decimal (GB/s, TFLOP/s)."""

_DECIMAL = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_BINARY = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def show_bytes(count: float | None) -> str:
    """Memory, binary: 1536 -> '1.50 KiB'. None -> 'n/a'."""
    if count is None:
        return "n/a"
    for factor, name in _BINARY:
        if abs(count) >= factor:
            return f"{count / factor:.2f} {name}"
    return f"{count:.0f} B"


def show_count(count: float | None, unit: str = "") -> str:
    """A count or a rate, decimal: 1.5e12, 'FLOP/s' -> '1.50 TFLOP/s'. None -> 'n/a'."""
    if count is None:
        return "n/a"
    for factor, prefix in _DECIMAL:
        if abs(count) >= factor:
            return f"{count / factor:.2f} {prefix}{unit}".rstrip()
    return f"{count:.4g} {unit}".rstrip()


def show_share(share: float | None) -> str:
    """A share of one, in percent: 0.417 -> '41.7 %'. None -> 'n/a'."""
    return "n/a" if share is None else f"{100 * share:.1f} %"


def show_seconds(seconds: float | None) -> str:
    """A duration: 0.0123 -> '12.3 ms', 95 -> '1 min 35 s'. None -> 'n/a'."""
    if seconds is None:
        return "n/a"
    if seconds < 1:
        return f"{1000 * seconds:.1f} ms"
    if seconds < 60:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
