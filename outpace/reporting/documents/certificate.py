"""Report of a certificate: which plans equal a single process, and how closely."""

from outpace.records.certificate import Certificate
from outpace.reporting.answers.certificate import certificate_answer
from outpace.reporting.render.document import Document, DocumentSection
from outpace.reporting.sections.environment import machine_table, versions


def certificate_document(certificate: Certificate) -> Document:
    """Create the report on a certificate: the proof that plans compute what one process does."""
    known = {name: str(value) for name, value in certificate.versions.items()}
    environment = (machine_table(certificate.machine), versions(known))
    return Document(
        "certificate", "Comparison with a single process", certificate_answer(certificate).verdict,
        (), (section(certificate), DocumentSection("Environment", environment)),
    )  # fmt: skip


def section(certificate: Certificate) -> DocumentSection:
    """Return the section with the certificate's table of plans, and the conditions of the proof."""
    return DocumentSection("Proof", certificate_answer(certificate).parts)
