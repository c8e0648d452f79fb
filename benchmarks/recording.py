"""Records of benchmark results: command, versions, machine, every repeat."""

import json
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from outpace.catalog.accelerators import find_accelerator
from outpace.probing.hardware.machine import identify
from outpace.probing.hardware.versions import commit, versions

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"


def circumstances() -> dict[str, Any]:
    """Return the conditions of a measurement: with what, when and where."""
    head, dirty = commit()
    return {
        "command": ["python", program(Path(sys.argv[0])), *sys.argv[1:]],
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": head,
        "uncommitted_changes": dirty,
        "versions": versions(),
        "machine": identify(find_accelerator).model_dump(mode="json"),
    }


def save(name: str, result: Mapping[str, Any]) -> Path:
    """Write results/NAME.json and return its path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    document = {"benchmark": name, **circumstances(), **result}
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path


def program(path: Path) -> str:
    """Return a benchmark's path from the repository's root, wherever that is."""
    whole = path.resolve()
    return f"benchmarks/{whole.relative_to(HERE) if whole.is_relative_to(HERE) else path.name}"
