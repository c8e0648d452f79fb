"""Recorded results as Markdown."""

from typing import Any


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def stand(result: dict[str, Any]) -> str:
    """Return when, where and with what a result was recorded."""
    machine, versions = result["machine"], result["versions"]
    cores = machine["host_cores"]
    dirty = " with uncommitted changes" if result["uncommitted_changes"] else ""
    devices = "".join(f"{device['name']}, " for device in machine["devices"])
    return (
        f"\nRecorded {result['date'][:10]} at commit {str(result['commit'])[:10]}{dirty}: "
        f"{cores} core{'s' * (cores > 1)} of {machine['cpu']}, {devices}torch {versions['torch']}, "
        f"Python {versions['python']}. Command: `{' '.join(result['command'])}`.\n"
    )
