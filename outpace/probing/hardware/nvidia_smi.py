"""Topology of GPUs and network cards, from the output of `nvidia-smi topo -m`.

The output comes from a file or from the driver's tool, which may be missing, fail, or hang.
"""

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from outpace.probing.hardware.foreign_output import describe_foreign
from outpace.records.errors import BadInputError, OutpaceError
from outpace.records.topology import Endpoint, Topology, nvlinks

TOOL = "nvidia-smi"
_ANSI = re.compile(
    r"\x1b\[[0-9;]*[A-Za-z]|\[[0-9;]*m"
)  # the second form if a paste lost the escape character
_LABELS = re.compile(r"CPU\s*Affinity|NUMA\s*Affinity|GPU\s*NUMA\s*ID")
_GLUED = re.compile(r"(?<=\d)(?=(?:GPU|NIC|mlx)\d)")
_TERM = re.compile(r"NODE|SYS|SOC|PHB|PXB|PIX|NV\d+|X")
_TERMS = re.compile(rf"(?:{_TERM.pattern})+")
_NIC_LEGEND = re.compile(r"^\s*(NIC\d+):\s*(\S+)\s*$")
_TAB = 8


class ToolError(OutpaceError):
    """Raised if a driver tool is missing, fails, or times out."""


def read_live(timeout_s: float = 20.0) -> Topology:
    """Return this host's topology from `nvidia-smi`. Raises ToolError if that fails or hangs."""
    text = run_tool([TOOL, "topo", "-m"], timeout_s)
    try:
        return parse(text, "nvidia-smi topo -m")
    except BadInputError as error:
        first = next((line.strip() for line in text.splitlines() if line.strip()), "nothing")
        raise ToolError(
            f"{TOOL} topo -m printed something other than a topology: {first!r} ({error})"
        ) from None


def read_if_there(timeout_s: float = 20.0) -> Topology | None:
    """Return this host's topology; None if `nvidia-smi` is missing, fails or hangs."""
    try:
        return read_live(timeout_s)
    except ToolError:
        return None


def run_tool(command: list[str], timeout_s: float) -> str:
    """Return the output of a tool. On a timeout, the tool and its child processes are killed.

    Raises ToolError if the tool is missing, fails or times out.
    """
    name = command[0]
    if shutil.which(name) is None:
        raise ToolError(
            f"{name} is not on PATH: there is no NVIDIA driver, or a container was started "
            "without its tools. With a driver, start the container with --gpus all."
        )
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # so that its child processes can be killed
        )
    except OSError as error:
        raise ToolError(f"{name} cannot be started: {error.strerror}") from None
    with process:
        try:
            text, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            _kill_tool(process)
            raise ToolError(
                f"{' '.join(command)} has not answered in {timeout_s:g} s and was stopped. A "
                "driver in this state also hangs other programs: look for NVRM or Xid in the "
                "kernel's log (dmesg); a reboot usually helps."
            ) from None
    if process.returncode != 0:
        said = text.strip() or "nothing"
        raise ToolError(f"{' '.join(command)} failed (exit code {process.returncode}): {said}")
    return text


def _kill_tool(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    # Do not wait for the process: one that is blocked in the kernel cannot be killed.
    with suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=1)


@dataclass(frozen=True)
class _MatrixHeader:
    names: tuple[str, ...]
    columns: tuple[str, ...]
    starts: tuple[int, ...]


def parse(text: str, source: str) -> Topology:
    """Parse the topology that `nvidia-smi topo -m` prints, anywhere in `text`.

    Cells that a terminal merged are separated. If the cell of a link is missing in one device's
    row, it is taken from the row of the device at the other end. Raises BadInputError if there is
    no matrix, or if a link between GPUs is unknown.
    """
    lines = [_ANSI.sub("", line).rstrip() for line in text.splitlines()]
    at, header = _find_header(lines, source)
    _refuse_foreign_matrix(lines, source)
    rows: dict[str, list[str | None]] = {}
    about: dict[str, dict[str, str]] = {}
    notes: list[str] = []
    for line in lines[at + 1 :]:
        name, _, rest = line.strip().partition("\t" if "\t" in line.strip() else " ")
        if name.split()[:1] and (name := name.split()[0]) in header.names:
            rows[name], about[name] = _parse_row(line, name, header, notes, source)
        elif rows and rest and not line.strip().startswith("NIC"):
            break
    missing = [name for name in header.names if name.startswith("GPU") and name not in rows]
    if missing:
        raise BadInputError(f"{source}: the matrix has no row for {', '.join(missing)}")
    matches = (_NIC_LEGEND.match(line) for line in lines)
    labels = {found[1]: found[2] for found in matches if found}
    devices = tuple(
        Endpoint(
            name=name,
            kind="gpu" if re.fullmatch(r"GPU\d+", name) else "nic",
            label=labels.get(name),
            **about.get(name, {}),
        )
        for name in header.names
    )
    links = _complete_matrix(header.names, rows, source, notes)
    return Topology.parse(
        {
            "devices": devices,
            "links": links,
            "source": source,
            "notes": tuple(notes),
            "pcie_only": _shows_only_pcie(lines, rows),
        },
        source,
    )


def _find_header(lines: list[str], source: str) -> tuple[int, _MatrixHeader]:
    for at, line in enumerate(lines):
        expanded = line.expandtabs(_TAB)
        plain = _LABELS.sub(" ", expanded)
        names = tuple(word for part in plain.split() for word in _GLUED.split(part))
        if not names or not re.fullmatch(r"GPU\d+", names[0]):
            continue
        if any(_TERMS.fullmatch(name) for name in names):
            continue  # a row
        found = list(_LABELS.finditer(expanded))
        # If the header lacks its empty first cell, its columns are shifted left of those in rows.
        shift = _TAB if not line[:1].isspace() else 0
        columns = tuple("".join(match[0].split()) for match in found)
        return at, _MatrixHeader(names, columns, tuple(match.start() + shift for match in found))
    description = describe_foreign("\n".join(lines))
    raise BadInputError(
        f"{source}: "
        + (
            description
            or "it contains no matrix of GPUs. Save the output of `nvidia-smi topo -m`, from the "
            "line with GPU0 on."
        )
    )


def _refuse_foreign_matrix(lines: list[str], source: str) -> None:
    """Refuse a matrix that is not from nvidia-smi: it has GPU columns, but no names of links."""
    cells = [word for line in lines for word in line.split() if _TERMS.fullmatch(word)]
    if all(cell == "X" for cell in cells):
        description = describe_foreign("\n".join(lines))
        if description is not None:
            raise BadInputError(f"{source}: {description}")


def _shows_only_pcie(lines: list[str], rows: Mapping[str, Sequence[str | None]]) -> bool:
    """Return whether the matrix is from `topo -mp`, which shows only PCIe links.

    It is recognised by the command in the text, or by a legend without NVLinks.
    """
    if any(nvlinks(link) for row in rows.values() for link in row):
        return False
    text = "\n".join(lines)
    if re.search(r"topo\s+(-mp|--matrix_pci)\b", text):
        return True
    return re.search(r"^\s*X\s+=", text, re.MULTILINE) is not None and "NV#" not in text


def _parse_row(
    line: str, name: str, header: _MatrixHeader, notes: list[str], source: str
) -> tuple[list[str | None], dict[str, str]]:
    """Return a device's links in the order of the columns, and its CPU and NUMA fields by name."""
    expanded = line.expandtabs(_TAB)
    words = list(re.finditer(r"\S+", expanded))[1:]
    cells: list[str | None] = []
    used = 0
    for word in words:
        if len(cells) >= len(header.names) or not _TERMS.fullmatch(word[0]):
            break
        cells.extend(_TERM.findall(word[0]))
        used += 1
    rest = words[used:]
    whole = len(cells) == len(header.names)
    if len(cells) > len(header.names):
        raise BadInputError(
            f"{source}: row {name} has {len(cells)} links, but there are {len(header.names)} "
            "devices"
        )
    if not whole:
        unread = rest[0][0] if rest else "its end"
        notes.append(
            f"row {name}: {unread!r} is not a link; missing links are taken from other rows"
        )
        rest = rest[1:]
        cells += [None] * (len(header.names) - len(cells))
    return cells, _parse_last_fields(rest, header, whole)


_FIELDS = {
    "CPUAffinity": "cpu_affinity",
    "NUMAAffinity": "numa_affinity",
    "GPUNUMAID": "gpu_numa_id",
}


def _parse_last_fields(
    words: list[re.Match[str]], header: _MatrixHeader, whole: bool
) -> dict[str, str]:
    """Return the fields that follow the links in a row, by name, without empty ones."""
    names = [_FIELDS[column] for column in header.columns]
    free = len(names) - len(words)
    if free > 0 and names and words:
        # The first cell is not empty if the first word begins at or left of its column.
        at_first = whole and words[0].start() <= header.starts[0]
        last_given = words[-1][0] == "N/A" or not at_first
        if at_first:
            names = [names[0], *(names[1 + free :] if last_given else names[1:])]
        else:
            names = names[free:]
    return {name: word[0] for name, word in zip(names, words, strict=False) if word[0] != "N/A"}


def _complete_matrix(
    names: tuple[str, ...], rows: dict[str, list[str | None]], source: str, notes: list[str]
) -> list[list[str | None]]:
    """Complete the matrix: a link missing from one row is taken from the other device's row."""
    place = {name: at for at, name in enumerate(names)}
    unknown = []
    links: list[list[str | None]] = [["X" if a == b else None for b in names] for a in names]
    for name, row in rows.items():
        if row[place[name]] not in ("X", None):
            raise BadInputError(
                f"{source}: {name} to itself is {row[place[name]]}, not X: columns are missing"
            )
    for a, b in ((a, b) for a in names for b in names if a != b):
        mine = rows[a][place[b]] if a in rows else None
        theirs = rows[b][place[a]] if b in rows else None
        if mine is not None and theirs is not None and mine != theirs:
            raise BadInputError(
                f"{source}: {a} to {b} is {mine}, but {b} to {a} is {theirs}: the matrix is damaged"
            )
        links[place[a]][place[b]] = mine or theirs
        if mine is None and theirs is None and place[a] < place[b]:
            unknown.append((a, b))
    between_gpus = [pair for pair in unknown if all(name.startswith("GPU") for name in pair)]
    if between_gpus:
        pairs = ", ".join(f"{a}–{b}" for a, b in between_gpus)
        unread = f" ({notes[0]})" if notes else ""
        raise BadInputError(f"{source}: the link of {pairs} cannot be read{unread}")
    absent = [name for name in names if name not in rows]
    if len(absent) > 1:
        notes.append(f"no rows for {', '.join(absent)}: links between them are unknown")
    return links


def render(topology: Topology) -> str:
    """Format a topology like the output of `nvidia-smi topo -m`, so that `parse` can read it."""
    with_numa = any(device.numa_affinity for device in topology.devices)
    with_id = any(device.gpu_numa_id for device in topology.devices)
    header = ["", *(device.name for device in topology.devices), "CPU Affinity"]
    header += ["NUMA Affinity"] * (with_numa or with_id) + ["GPU NUMA ID"] * with_id
    lines = ["\t".join(header)]
    for device, row in zip(topology.devices, topology.links, strict=True):
        cells = [device.name, *((f" {link} " if link == "X" else link or "") for link in row)]
        if device.kind == "gpu":
            cells.append(device.cpu_affinity or "N/A")
            if with_numa or with_id:
                cells += [device.numa_affinity or "N/A"]
            if with_id:
                cells += ["", device.gpu_numa_id or "N/A"]
        lines.append("\t".join(cells))
    labels = [f"  {one.name}: {one.label}" for one in topology.devices if one.label]
    return "\n".join([*lines, *(["", "NIC Legend:", "", *labels] if labels else [])]) + "\n"
