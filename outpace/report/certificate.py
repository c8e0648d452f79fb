"""A certificate as a table for the terminal."""

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from outpace.records.certificate import Certificate
from outpace.records.units import show_bytes


def certificate_table(certificate: Certificate) -> Group:
    """One row a plan: whether it is equal, how closely, what the busiest rank sends a step."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for name in ("strategy", "mesh", "in", "", "off by", "sends", "formula"):
        table.add_column(name, no_wrap=name != "mesh")  # the one that may be long
    for verdict in certificate.verdicts:
        worst, formula = verdict.worst_relative_difference, verdict.bytes_formula
        table.add_row(
            verdict.strategy,
            Text(verdict.mesh, style="dim"),
            verdict.precision,
            Text("✓ equal", style="green") if verdict.passed else Text("✗ wrong", style="red"),
            "n/a" if worst is None else f"{worst:.1e}",
            show_bytes(verdict.bytes_on_wire),
            Text("n/a" if formula is None else show_bytes(formula), style="dim"),
        )
    reasons = [
        Text(f"✗ {verdict.strategy}: {verdict.reason}", style="red")
        for verdict in certificate.verdicts
        if verdict.reason
    ]
    reasons += [
        Text(f"{strategy} skipped: {reason}", style="dim")
        for strategy, reason in certificate.skipped.items()
    ]
    tolerances = {verdict.precision: verdict.tolerance for verdict in certificate.verdicts}
    allowed = ", ".join(f"{name} {tolerance:.1g}" for name, tolerance in tolerances.items())
    about = (
        f"{certificate.processes} processes · tolerance: {allowed} · {certificate.steps} steps of "
        f"{certificate.global_batch} × {certificate.seq_len} tokens"
    )
    return Group(table, *reasons, Text(about, style="dim"))
