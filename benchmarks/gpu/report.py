"""The results of a check: written after every section, extended by later calls."""

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from recording import commit, program

from gpu.targets import judge, table
from outpace.records.base import write_atomic


class Report:
    """The results file. If it exists, its sections are kept, except those that run again."""

    def __init__(self, out: Path | None, small: bool, results: Path) -> None:
        self._small, self._results, self._out = small, results, out
        if out is None and small:
            self._out = Path("gpu-check-cpu.json")
        self.sections: dict[str, Any] = {}
        self._about: dict[str, Any] = {}
        if self._out is not None and self._out.is_file():
            known = json.loads(self._out.read_text())
            self.sections = known.pop("sections")
            self._about = known
        self._call = {"command": ["python", program(Path(sys.argv[0])), *sys.argv[1:]],
                      "date": datetime.now(UTC).isoformat(timespec="seconds")}  # fmt: skip

        self._commit = commit()[0]

    @property
    def folder(self) -> Path:
        """Return the folder for additional files, next to the results."""
        return (self._out or self._results / "x").resolve().parent

    @property
    def path(self) -> Path:
        """Return the file; named after the card if no name was given."""
        if self._out is not None:
            return self._out
        return self._results / f"gpu-{card(self._about) or 'unknown'}.json"

    def save(self, sections: dict[str, Any]) -> None:
        """Write all sections that have ended so far."""
        self.sections = sections
        found = sections.get("environment", {}).get("rows", {}).get("circumstances")
        if found is not None:
            self._about |= found
        self._about["command"] = self._call["command"]
        for told in sections.values():
            told.setdefault("call", {**self._call, "commit": self._commit})
        targets = [] if self._small else judge(sections)
        document = {"benchmark": "gpu", "small": self._small, **self._about, "targets": targets,
                    "sections": sections}  # fmt: skip
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self.path, json.dumps(document, indent=1) + "\n")

    def summary(self) -> str:
        """Return targets, missed ones first, and sections that are not done."""
        small = ["Everything was small, on a CPU: no target is judged."]
        lines = small if self._small else list(table(judge(self.sections)))
        lines += [f"{name}: {told['status']}" for name, told in self.sections.items()
                  if told["status"] != "done"]  # fmt: skip
        again = [name for name, told in self.sections.items() if told["status"] == "left out"]
        if again:
            lines.append(f"To add them: scripts/gpu-check --only '{','.join(again)}' "
                         f"--out {self.path}")  # fmt: skip
        return "\n".join(lines)


def card(about: dict[str, Any]) -> str | None:
    """Return the first GPU's name for a file: h200-sxm."""
    from outpace.catalog.accelerators import find_accelerator

    devices = about.get("machine", {}).get("devices", [])
    if not devices:
        return None
    known = find_accelerator(devices[0]["name"], devices[0].get("memory_bytes"))
    name = str(devices[0]["name"] if known is None else known.name)
    return name.lower().removeprefix("nvidia ").replace(" ", "-")
