"""Results of runs and files with injected faults, as Markdown."""

from collections.abc import Callable
from typing import Any

from pages import stand, table

_ASKED = {"kills": 200, "saves": 50}
_MOMENTS = {"computes": "computing", "starts": "starting", "waits": "waiting", "saves": "saving"}


def faults(result: dict[str, Any]) -> str:
    """Write kills and damage by kind, and the faults that the test suite injects."""
    parts = result["parts"]
    rows = [_killed(name, parts[name]) for name in ("kills", "saves") if name in parts]
    said = ""
    if rows:
        head = ["ranks killed", "target", "runs", "bitwise equal to an undisturbed run",
                "steps lost", "steps counted twice", "killed while"]  # fmt: skip
        said += table(head, rows) + "\n"
    if "damage" in parts:
        one = parts["damage"]
        said += (
            f"In {one['damages']} runs, the newest checkpoint was damaged (a flipped bit or a "
            f"truncated file). {one['said']} damaged checkpoints were reported and skipped, and "
            f"{one['same']} of the runs ended bitwise equal to an undisturbed one.\n"
        )
    if "tests" in parts:
        one = parts["tests"]
        head = ["behaviour under a fault", "result", "took"]
        rows = [[row["fault"].removeprefix("test_").replace("_", " "),
                 row["came"] + (" in a second run" if row.get("again") else ""),
                 f"{row['seconds']:.0f} s"] for row in one["rows"]]  # fmt: skip
        said += f"\n{one['passed']} of {one['tests']} tests passed:\n\n{table(head, rows)}"
    missing = [name for name in ("kills", "saves", "damage", "tests") if name not in parts]
    if missing:
        said += f"\nNot recorded yet: {', '.join(missing)}.\n"
    return said + stand(result)


def _killed(name: str, part: dict[str, Any]) -> list[str]:
    moments = ", ".join(
        f"{_MOMENTS.get(moment, moment)} {count}" for moment, count in part["moments"].items()
    )
    return [str(part["kills"]), str(_ASKED[name]), str(part["runs"]),
            f"{part['same']} of {part['runs']}", str(part["lost"]), str(part["repeated"]),
            moments]  # fmt: skip


def fuzz(result: dict[str, Any]) -> str:
    """Write broken files by reader, and how many of its branches they reached."""
    rows = []
    for name, one in result["readers"].items():
        guided = result["guided"].get(name)
        rows.append([
            name, f"{one['cases']:,}", f"{one['covered']} of {one['branches']}",
            f"{one['covered'] / one['branches']:.0%}",
            "" if guided is None else f"{guided['cases']:,}", one["failure"] or "nothing",
        ])  # fmt: skip
    head = ["reader", "broken files", "branches reached", "share", "from atheris", "found"]
    least = result["least_share_of_branches"]
    return (
        f"{result['cases']:,} files in all (target: 10,000, and 1,000 for each reader); "
        f"at least {least:.0%} of each reader's branches (target: 90 %).\n\n"
        f"{table(head, rows)}{stand(result)}"
    )


WRITERS: dict[str, Callable[[dict[str, Any]], str]] = {"faults": faults, "fuzz": fuzz}
