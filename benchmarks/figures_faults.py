"""What was recorded of trainings that something was done to, as Markdown."""

from collections.abc import Callable
from typing import Any

from pages import stand, table

_ASKED = {"kills": 200, "saves": 50}


def faults(result: dict[str, Any]) -> str:
    """Kills and damage by kind, and the faults that are tests."""
    parts = result["parts"]
    rows = [_killed(name, parts[name]) for name in ("kills", "saves") if name in parts]
    said = ""
    if rows:
        head = ["ranks killed", "asked for", "runs", "as undisturbed, bit for bit", "steps lost",
                "repeated", "while"]  # fmt: skip
        said += table(head, rows) + "\n"
    if "damage" in parts:
        one = parts["damage"]
        said += (
            f"Of {one['damages']} newest checkpoints with a flipped bit or a file cut short "
            f"{one['said']} were named and passed over, and {one['same']} of these runs came to "
            "what an undisturbed one does, bit for bit.\n"
        )
    if "tests" in parts:
        one = parts["tests"]
        head = ["fault", "came out as it must", "took"]
        rows = [[row["fault"].removeprefix("test_").replace("_", " "), row["came"],
                 f"{row['seconds']:.0f} s"] for row in one["rows"]]  # fmt: skip
        said += f"\n{one['passed']} of {one['tests']}:\n\n{table(head, rows)}"
    missing = [name for name in ("kills", "saves", "damage", "tests") if name not in parts]
    if missing:
        said += f"\nNot recorded yet: {', '.join(missing)}.\n"
    return said + stand(result)


def _killed(name: str, part: dict[str, Any]) -> list[str]:
    moments = ", ".join(f"it {moment} {count}" for moment, count in part["moments"].items())
    return [str(part["kills"]), str(_ASKED[name]), str(part["runs"]),
            f"{part['same']} of {part['runs']}", str(part["lost"]), str(part["repeated"]),
            moments]  # fmt: skip


WRITERS: dict[str, Callable[[dict[str, Any]], str]] = {"faults": faults}
