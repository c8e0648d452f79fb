"""Report of a certificate: what was proved equal to a single process, and how closely."""

from outpace.records.certificate import Certificate, ParityVerdict
from outpace.records.units import show_bytes
from outpace.reporting.render.document import (
    DataTable,
    Document,
    DocumentSection,
    Number,
    Paragraph,
)
from outpace.reporting.sections.environment import machine_table, versions
from outpace.reporting.terminal.certificate import batch_in_words


def certificate_document(certificate: Certificate) -> Document:
    """Create a document that shows only a certificate."""
    return Document(
        "certificate", "Comparison with a single process", (_verdict(certificate),), (),
        (section(certificate), DocumentSection("Environment", (
            machine_table(certificate.machine),
            versions({name: str(value) for name, value in certificate.versions.items()}),
        ))),
    )  # fmt: skip


def _verdict(certificate: Certificate) -> str:
    failed = [one.strategy for one in certificate.verdicts if not one.passed and not one.refused]
    refused = [one.strategy for one in certificate.verdicts if one.refused]
    count = len(certificate.verdicts)
    if failed:
        return f"NOT equal to a single process: {', '.join(failed)}, of {count} plans."
    if refused:
        return (
            f"{count - len(refused)} of {count} plans are equal to a single process within their "
            f"tolerances; {', '.join(refused)} are refused."
        )
    return f"All {count} plans are equal to a single process within their tolerances."


def section(certificate: Certificate) -> DocumentSection:
    """Return a section with the table of plans, and how they were tested."""
    rows = tuple(
        (
            _outcome(one),
            one.strategy, one.mesh, one.precision, _power(one.worst_relative_difference),
            _power(one.tolerance), Number(one.bytes_on_wire, show_bytes(one.bytes_on_wire)),
            Number(one.bytes_formula, show_bytes(one.bytes_formula)),
        )
        for one in certificate.verdicts
    )  # fmt: skip
    columns = ("verdict", "strategy", "mesh", "precision", "off by", "allowed",
               "busiest rank sends", "by formula")  # fmt: skip
    about = (
        f"{certificate.processes} processes, {certificate.steps} steps of "
        f"{batch_in_words(certificate)}, {', '.join((*certificate.notes, certificate.date))}."
    )
    skipped = [
        Paragraph(f"{name} was left out: {why}") for name, why in certificate.skipped.items()
    ]
    table = DataTable("Plans compared with a single process", columns, rows)
    return DocumentSection("Proof", (table, Paragraph(about), *skipped))


def _outcome(one: ParityVerdict) -> str:
    if one.refused:
        return f"refused: {one.reason}"
    return "equal" if one.passed else f"NOT equal: {one.reason or 'beyond its tolerance'}"


def _power(value: float | None) -> Number:
    return Number(value, "n/a" if value is None else f"{value:.1e}")
