"""Horizontal bars in a terminal, in eighths of a cell."""

_EIGHTHS = " ▏▎▍▌▋▊▉"


def bar(share: float, cells: int) -> str:
    """Draw a share as a bar of up to `cells` cells; shares above 0 have at least an eighth."""
    eighths = round(min(max(share, 0.0), 1.0) * cells * 8)
    if share > 0:
        eighths = max(eighths, 1)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()
