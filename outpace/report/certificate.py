"""A certificate as a table for the terminal."""

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from outpace.records.certificate import Certificate, Verdict
from outpace.records.units import show_bytes


def certificate_table(certificate: Certificate) -> Group:
    """One row a plan: whether it is equal, how closely, what the busiest rank sends a step."""
    tolerances = {verdict.precision: verdict.tolerance for verdict in certificate.verdicts}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    several = len(tolerances) > 1
    for name in ("", "strategy", "mesh", *["in"] * several, "off by", "sends", "by formula"):
        table.add_column(name, no_wrap=name != "mesh")  # the one that may be long
    for verdict in certificate.verdicts:
        worst = verdict.worst_relative_difference
        table.add_row(
            Text("✓", style="green") if verdict.passed else Text("✗", style="red"),
            verdict.strategy,
            Text(verdict.mesh, style="dim"),
            *[verdict.precision] * several,
            "n/a" if worst is None else f"{worst:.1e}",
            "n/a" if verdict.bytes_on_wire is None else show_bytes(verdict.bytes_on_wire),
            Text(_formula(verdict), style="dim"),
        )
    return Group(table, *_notes(certificate), Text(_about(certificate, tolerances), style="dim"))


def _formula(verdict: Verdict) -> str:
    if verdict.bytes_formula is None:
        return "n/a"
    equal = verdict.bytes_formula == verdict.bytes_on_wire
    return "the same" if equal else show_bytes(verdict.bytes_formula)


def _notes(certificate: Certificate) -> list[Text]:
    """What is wrong, and what could not be tried."""
    wrong = [
        Text(f"✗ {verdict.strategy}: {verdict.reason}", style="red")
        for verdict in certificate.verdicts
        if verdict.reason
    ]
    skipped = [
        Text(f"{strategy} skipped: {reason}", style="dim")
        for strategy, reason in certificate.skipped.items()
    ]
    return [*wrong, *skipped]


def _about(certificate: Certificate, tolerances: dict[str, float]) -> str:
    allowed = ", ".join(f"{name} {tolerance:.1g}" for name, tolerance in tolerances.items())
    verdict = "equal to one process" if certificate.passed else "NOT equal to one process"
    return (
        f"{verdict} · {certificate.processes} processes · tolerance {allowed} · "
        f"{certificate.steps} steps of {certificate.global_batch} × {certificate.seq_len} tokens"
    )
