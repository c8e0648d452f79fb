"""A table of the versions of torch and Python that outpace was tested with."""

from collections.abc import Iterable
from typing import Any

from pages import table


def torch_versions(result: dict[str, Any]) -> str:
    """Write one row per torch and Python, and failures below the table."""
    head = ["torch", "Python", "transformers", "modules imported", "plans equal to one process",
            "training runs", "tests", "recorded"]  # fmt: skip
    entries = result["entries"]
    rows = [
        [
            one["torch"],
            one["python"],
            one["versions"].get("transformers", "n/a"),
            _imports(one["imports"]),
            _plans(one["verify"]),
            _trainings(one["trainings"]),
            _tests(one["tests"]),
            _recorded(one["recorded"].values()),
        ]
        for one in entries
    ]
    cpus = sorted({one["machine"]["cpu"] for one in entries})
    notes = [f"- {_title(one)}: {text}\n" for one in entries for text in _notes(one)]
    return (
        table(head, rows)
        + f"\nOn {' and '.join(cpus)}, without a GPU. Commands: `scripts/test-torch VERSION`.\n"
        + ("\n" + "".join(notes) if notes else "")
    )


def _recorded(parts: Iterable[dict[str, Any]]) -> str:
    """Return days and commits, which may differ between parts."""
    said = []
    for part in parts:
        dirty = " with uncommitted changes" if part["uncommitted_changes"] else ""
        said.append(f"{part['date'][:10]}, {str(part['commit'])[:10]}{dirty}")
    return "; ".join(dict.fromkeys(said))


def _title(one: dict[str, Any]) -> str:
    return f"torch {one['torch']}, Python {one['python']}"


def _imports(part: dict[str, Any] | None) -> str:
    if part is None:
        return "not run"
    return f"{part['modules'] - len(part['failures'])} of {part['modules']}"


def _plans(part: dict[str, Any] | None) -> str:
    if part is None:
        return "not run"
    if "plans" not in part:
        return "failed"
    equal = part["plans"] - len(part["failures"])
    return f"{equal} of {part['plans']}, to {part['worst_relative_difference']:.0e}"


def _trainings(part: dict[str, Any] | None) -> str:
    if part is None:
        return "not run"
    return f"{sum(one['passed'] for one in part.values())} of {len(part)}"


def _tests(part: dict[str, Any] | None) -> str:
    if part is None:
        return "not run"
    run = sum(one.get("run", 0) for one in part.values())
    wrong = sum(len(one["failures"]) for one in part.values())
    return f"{run - wrong:,} of {run:,} ({', '.join(part)})"


def _notes(one: dict[str, Any]) -> list[str]:
    """Return what did not pass, and the strategies that this torch lacks."""
    found = []
    verify = one["verify"] or {}
    left_out = [name for name in verify.get("skipped", {}) if name != "horovod"]
    if left_out:
        found.append(f"{', '.join(left_out)} are refused on a CPU")
    for part in ("imports", "verify"):
        found += (one[part] or {}).get("failures", [])
    for part in ("trainings", "tests"):
        for name, its in (one[part] or {}).items():
            found += [f"{name}: {why}" for why in its["failures"]]
    return found
