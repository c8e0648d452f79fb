"""Results of probes as Markdown."""

from collections import defaultdict
from collections.abc import Callable
from statistics import median
from typing import Any

from pages import stand, table


def repeat(result: dict[str, Any]) -> str:
    """Write how many figures of a first probe the second confirmed, by kind."""
    kinds: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for pair in result["pairs"]:
        kinds[pair["figure"].split()[0]].append(pair)
    rows = [_row(kind, pairs) for kind, pairs in kinds.items()]
    rows.append(_row("all", result["pairs"]))
    targets = result["targets"]
    took = " and ".join(f"{took_s:.0f} s" for took_s in result["took_s"])
    about = (
        f"\nTarget: {targets['held']:.0%} confirmed, a median half-width of at most "
        f"{targets['median_half_width']:.0%}, each probe within {result['within_s']:.0f} s "
        f"(they took {took}). {'Reached' if result['reached'] else 'Not reached'}."
        f"{_disturbed(result)}\n"
    )
    head = ["kind", "figures", "not stable enough", "confirmed by the second", "median half-width"]
    shown = "\n".join(result["shown"])
    return table(head, rows) + about + stand(result) + f"\n```text\n{shown}\n```\n"


def _row(kind: str, pairs: list[dict[str, Any]]) -> list[str]:
    told = [pair["held"] for pair in pairs if pair["held"] is not None]
    widths = [pair["half_width"] for pair in pairs if pair["half_width"] is not None]
    return [
        kind,
        str(len(pairs)),
        str(len(pairs) - len(told)),
        f"{sum(told) / len(told):.1%}" if told else "n/a",
        f"{median(widths):.1%}" if widths else "n/a",
    ]


def _disturbed(result: dict[str, Any]) -> str:
    others = max(one["other_cores"] or 0.0 for one in result["steadiness"])
    stolen = max(one["stolen"] or 0.0 for one in result["steadiness"])
    return (
        f" Other programs used up to {others:.2f} cores, and the hypervisor took {stolen:.1%} of "
        "the time."
    )


WRITERS: dict[str, Callable[[dict[str, Any]], str]] = {
    "probe_repeat": repeat,
    "probe_repeat_quick": repeat,
}
