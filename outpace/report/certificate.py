"""A certificate as a table for the terminal."""

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from outpace.records.certificate import Certificate, ParityVerdict
from outpace.records.units import show_bytes


def certificate_table(certificate: Certificate) -> Group:
    """One row a plan: whether it is equal, how closely, what the busiest rank sends a step."""
    tolerances = {verdict.precision: verdict.tolerance for verdict in certificate.verdicts}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    several = len(tolerances) > 1
    counted = certificate.module is None  # what crosses the wire
    wire = ["sends", "by formula"] if counted else []
    for name in ("", "strategy", "mesh", *["in"] * several, "off by", *wire):
        table.add_column(name, no_wrap=name != "mesh")  # the one that may be long
    for verdict in certificate.verdicts:
        worst = verdict.worst_relative_difference
        table.add_row(
            _mark(verdict),
            verdict.strategy,
            Text(verdict.mesh, style="dim"),
            *[verdict.precision] * several,
            "n/a" if worst is None else f"{worst:.1e}",
            *_on_wire(verdict, counted),
        )
    return Group(table, *_notes(certificate), Text(_about(certificate, tolerances), style="dim"))


def _mark(verdict: ParityVerdict) -> Text:
    if verdict.refused:
        return Text("–", style="yellow")
    return Text("✓", style="green") if verdict.passed else Text("✗", style="red")


def _on_wire(verdict: ParityVerdict, counted: bool) -> list[str | Text]:
    if not counted:
        return []
    sent = verdict.bytes_on_wire
    shown = "n/a" if sent is None else show_bytes(sent)
    return [shown, Text(_formula(verdict), style="dim")]


def _formula(verdict: ParityVerdict) -> str:
    if verdict.bytes_formula is None:
        return "n/a"
    equal = verdict.bytes_formula == verdict.bytes_on_wire
    return "the same" if equal else show_bytes(verdict.bytes_formula)


def _notes(certificate: Certificate) -> list[Text]:
    """What is wrong, and what could not be tried."""
    wrong = [
        Text(f"– {verdict.strategy} is refused: {verdict.reason}", style="yellow")
        if verdict.refused
        else Text(f"✗ {verdict.strategy}: {verdict.reason}", style="red")
        for verdict in certificate.verdicts
        if verdict.reason
    ]
    moved = [
        Text(f"{verdict.strategy}: {verdict.cause}", style="dim")
        for verdict in certificate.verdicts
        if verdict.cause and not verdict.reason
    ]
    skipped = [
        Text(f"{strategy} skipped: {reason}", style="dim")
        for strategy, reason in certificate.skipped.items()
    ]
    return [*wrong, *moved, *skipped]


def _about(certificate: Certificate, tolerances: dict[str, float]) -> str:
    allowed = ", ".join(f"{name} {tolerance:.1g}" for name, tolerance in tolerances.items())
    verdict = "equal to one process" if certificate.passed else "NOT equal to one process"
    if certificate.passed and any(one.refused for one in certificate.verdicts):
        verdict = "equal to one process, or refused"
    parts = [verdict, f"{certificate.processes} processes", f"tolerance {allowed}"]
    if certificate.module is not None:
        parts.insert(0, certificate.module)
    parts += [f"{certificate.steps} steps of {batch_in_words(certificate)}", *certificate.notes]
    return " · ".join(parts)


def batch_in_words(certificate: Certificate) -> str:
    """A global batch, in samples or in tokens."""
    samples, length = certificate.global_batch, certificate.seq_len
    return f"{samples} samples" if length is None else f"{samples} × {length} tokens"
