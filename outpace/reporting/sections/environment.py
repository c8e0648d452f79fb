"""Sections on the environment of a result: machine, versions, commands, links of devices."""

import shlex
from collections.abc import Mapping, Sequence

from outpace.probing.hardware.gpu_placement import advise_placement
from outpace.records.machine import Machine
from outpace.records.run import RunRecord
from outpace.records.units import show_bytes
from outpace.reporting.render.document import (
    Code,
    DataTable,
    DocumentSection,
    Paragraph,
    Part,
    Picture,
    in_words,
    pairs,
)
from outpace.reporting.sections.topology_svg import topology_svg
from outpace.reporting.terminal.topology import advice

_DEFAULT = "default"


def machine_table(machine: Machine) -> DataTable:
    """Return a table of the host and its devices."""
    devices = [
        one.name if one.memory_bytes is None else f"{one.name}, {show_bytes(one.memory_bytes)}"
        for one in machine.devices
    ]
    return pairs(
        "Machine",
        [
            ("processor", machine.cpu),
            ("cores", str(machine.host_cores)),
            ("vector units", ", ".join(machine.cpu_features) or None),
            ("memory", show_bytes(machine.host_memory_bytes)),
            ("devices", "; ".join(devices) or "none except the CPU"),
            ("system", machine.system or None),
        ],
    )


def topology(machine: Machine, probe: Machine | None = None) -> DocumentSection:
    """Draw the links between devices, if the record or a probe of the machine has them."""
    if machine.topology is None and probe is not None and not machine.differences(probe):
        machine = probe
    if machine.topology is None:
        why = "The record has no links between devices"
        if not machine.devices:
            why += f": the processor ({machine.host_cores} cores) is the only device"
        elif len(machine.devices) > 1:
            why += ": also give the machine.json of outpace probe"
        return DocumentSection("Topology", (Paragraph(f"{why}."),))
    placement = advise_placement(machine.topology)
    sentences = advice(placement, machine.topology)
    notes = [Paragraph(f"Caution: {note}.") for note in machine.topology.notes]
    picture = Picture(
        "Links between devices", " ".join(sentences), topology_svg(machine.topology, placement)
    )
    return DocumentSection("Topology", (picture, *notes))


def run_environment(record: RunRecord) -> DocumentSection:
    """Show the run's command, and what its results depend on: settings, versions and hardware."""
    state = {True: ", with changes that were not committed", False: "", None: ""}
    commit = None if record.commit is None else record.commit + state[record.uncommitted_changes]
    about = pairs(
        "The run",
        [
            ("started", record.started),
            ("outpace", record.outpace),
            ("commit", commit),
            ("hash of its changes", record.changes),
            ("model", record.settings.model),
            ("parameters", f"{record.parameters:,}"),
            ("device", record.device),
            ("threads of each process", str(record.threads)),
            ("load of the host before", _format_load(record.load_before)),
            ("batch", record.identity),
            ("tokens of a sample", None if record.seq_len is None else f"{record.seq_len:,}"),
            ("training data", record.train_data),
            ("validation data", record.eval_data),
            ("tokenizer", record.tokenizer),
            ("weights from", record.base_weights),
            ("resumed", f"{len(record.resumes)} times" if record.resumes else None),
        ],
    )
    parts: list[Part] = [
        command("The command", record.command),
        about,
        machine_table(record.machine),
        versions(record.versions),
        _settings_table(record),
    ]
    if record.environment:
        parts.append(pairs("Variables", sorted(record.environment.items())))
    return DocumentSection("Environment and command", tuple(parts))


def _format_load(processes: float | None) -> str | None:
    return None if processes is None else f"{processes:.1f} processes on average over a minute"


def command(title: str, words: Sequence[str]) -> Code:
    """Return a command as a line that users can paste."""
    return Code(
        title, shlex.join(words) if words else ("not recorded, since it was called from Python")
    )


def versions(by_package: Mapping[str, str]) -> DataTable:
    """Return a table of the versions of outpace's dependencies."""
    return pairs("Versions", sorted(by_package.items()))


def _settings_table(record: RunRecord) -> DataTable:
    rows = tuple(
        (name, in_words(getattr(record.settings, name)), origin)
        for name, origin in record.origins.items()
        if origin != _DEFAULT and hasattr(record.settings, name)
    )
    return DataTable("Settings that were given", ("setting", "value", "given by"), rows)
