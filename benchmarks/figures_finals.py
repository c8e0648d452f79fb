"""Results of the final rounds of the peer benchmarks, as Markdown."""

from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

from figures_performance import (
    FASTER,
    OURS,
    SHARE,
    SOONER,
    TWO,
    as_recorded,
    heat_title,
    mark,
    say_range,
)
from pages import table

ALONE, RIVAL = f"{OURS} on one process", "Trainer"


def finals(result: dict[str, Any]) -> str:
    """Write speed targets next to the results of alternating runs."""
    heats = result["heats"].values()
    rows = [
        row for rows in (_speed, _shares, _starts, _two) for heat in heats for row in rows(heat)
    ]
    head = ["goal", "case", "measured (range over turns)"]
    return table(head, rows) + as_recorded(result)


def ratios(heat: dict[str, Any], name: str) -> list[float]:
    """Return an entrant's median step time relative to outpace's, for each turn."""
    pairs = zip(heat["turns_s"][name], heat["turns_s"][OURS], strict=True)
    return [median(its) / median(own) for its, own in pairs]


def shares(heat: dict[str, Any]) -> list[float]:
    """Return the share of the best matmul for each turn in which the matmul was steady."""
    pairs = zip(heat["turns_s"][OURS], heat["best_products_flops_per_s"], strict=False)
    return [heat["model_flops"] / median(own) / best for own, best in pairs if best is not None]


def tokens_range(result: dict[str, Any]) -> str:
    """Return outpace's tokens/s relative to the best peer's, and the missed goals."""
    heats = [(heat, _best_peer(heat)) for heat in result["heats"].values()]
    found = {heat_title(heat): median(ratios(heat, best)) for heat, best in heats if best}
    return say_range(found, heats[0][0]["precision"])


def _best_peer(heat: dict[str, Any]) -> str | None:
    """Return the peer with the plain loop's losses and the fastest steps relative to outpace's."""
    same = heat["same_losses"]
    peers = [name for name in same if same[name] and name not in (OURS, ALONE)]
    return min(peers, key=lambda name: median(ratios(heat, name)), default=None)


def _speed(heat: dict[str, Any]) -> Iterator[list[str]]:
    best = _best_peer(heat)
    if best is None:
        return
    found = ratios(heat, best)
    yield [f"tokens/s ≥ {FASTER:.2f} × the best peer's", heat_title(heat),
           f"{_told(found, 2, f' × {best}')}{mark(median(found) >= FASTER)}"]  # fmt: skip


def _shares(heat: dict[str, Any]) -> Iterator[list[str]]:
    found = shares(heat)
    if found:
        yield [f"≥ {SHARE:.2f} of the best matmul", heat_title(heat),
               f"{_told(found, 3)}{mark(median(found) >= SHARE)}"]  # fmt: skip


def _starts(heat: dict[str, Any]) -> Iterator[list[str]]:
    if RIVAL in heat["first_steps_s"]:
        own, its = (median(heat["first_steps_s"][name]) for name in (OURS, RIVAL))
        yield [f"first step after ≤ {SOONER} × Trainer's", heat_title(heat),
               f"{own / its:.2f} × ({own:.1f} s and {its:.1f} s)"
               f"{mark(own <= SOONER * its)}"]  # fmt: skip


def _two(heat: dict[str, Any]) -> Iterator[list[str]]:
    if heat["same_losses"].get(ALONE):
        found = ratios(heat, ALONE)
        yield [f"tokens/s of 2 processes ≥ {TWO} × those of 1", f"({heat['case']}) {heat['title']}",
               f"{_told(found, 3, ' ×')}{mark(median(found) >= TWO)}"]  # fmt: skip


def _told(values: list[float], digits: int, of: str = "") -> str:
    """Return the median and the range."""
    least, middle, most = (
        f"{one:.{digits}f}" for one in (min(values), median(values), max(values))
    )
    return f"{middle}{of} ({least} – {most})"


WRITERS: dict[str, Callable[[dict[str, Any]], str]] = {
    "finals-bf16": finals,
    "finals-fp32": finals,
    "finals-fp32--range": tokens_range,
}
