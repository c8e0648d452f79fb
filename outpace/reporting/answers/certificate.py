"""Answer of a certificate: the verdict, a row for each plan, and each reason once."""

import re
from collections.abc import Iterator

from outpace.records.certificate import Certificate, ParityVerdict
from outpace.records.units import show_bytes
from outpace.reporting.render.document import (
    Answer,
    DataTable,
    Items,
    Number,
    Paragraph,
    Part,
    Style,
    StyledText,
)


def certificate_answer(certificate: Certificate) -> Answer:
    """Show which plans match a single process, how closely, and under which conditions.

    A plan's row has its largest difference, and the bytes that the busiest rank sends.
    """
    reasons = tuple(_group_reasons(certificate))
    parts: list[Part] = [_plans_table(certificate), *([Items(reasons)] if reasons else [])]
    return Answer(
        (_verdict(certificate),),
        (),
        (*parts, Paragraph(_conditions(certificate), style="dim")),
    )


def _plans_table(certificate: Certificate) -> DataTable:
    heads = {"verdict": "", "strategy": "strategy", "mesh": "mesh", "off by": "off by"}
    if len({verdict.precision for verdict in certificate.verdicts}) > 1:
        heads["precision"] = "in"
    if certificate.module is None:  # bytes on the wire were counted
        heads |= {"busiest rank sends": "sends", "by formula": "by formula"}
    rows = tuple(
        (
            _outcome_cell(one), one.strategy, one.precision, StyledText(one.mesh, "dim"),
            _difference_cell(one.worst_relative_difference), _difference_cell(one.tolerance),
            Number(one.bytes_on_wire, show_bytes(one.bytes_on_wire)), _formula_cell(one),
        )
        for one in certificate.verdicts
    )  # fmt: skip
    columns = ("verdict", "strategy", "precision", "mesh", "off by", "allowed",
               "busiest rank sends", "by formula")  # fmt: skip
    return DataTable("Plans compared with a single process", columns, rows, heads)


def _outcome_cell(verdict: ParityVerdict) -> StyledText:
    if verdict.refused:
        return StyledText("refused", "yellow", "–")
    return (
        StyledText("equal", "green", "✓") if verdict.passed else StyledText("NOT equal", "red", "✗")
    )


def _difference_cell(value: float | None) -> Number:
    return Number(value, "n/a" if value is None else f"{value:.1e}")


def _formula_cell(verdict: ParityVerdict) -> Number:
    nbytes = verdict.bytes_formula
    same = nbytes is not None and nbytes == verdict.bytes_on_wire
    return Number(nbytes, "the same" if same else show_bytes(nbytes))


def _group_reasons(certificate: Certificate) -> Iterator[tuple[StyledText, str]]:
    """Yield each reason once, with a coloured mark (✗, –, ✓) and the strategies it applies to."""
    verdicts = certificate.verdicts
    kinds: tuple[tuple[str, Style, str, list[tuple[str, str | None]]], ...] = (
        ("✗", "red", "", [(v.strategy, v.reason) for v in verdicts if not v.refused]),
        ("–", "yellow", " refused", [(v.strategy, v.reason) for v in verdicts if v.refused]),
        ("✓", "green", "", [(v.strategy, v.cause) for v in verdicts
                            if not v.reason and not v.refused]),
        ("–", "dim", " skipped", [*certificate.skipped.items()]),
    )  # fmt: skip
    for sign, style, what, reasons in kinds:
        groups: dict[str, list[tuple[str, str]]] = {}
        for strategy, reason in reasons:
            if reason:
                groups.setdefault(_generalise_reason(strategy, reason), []).append(
                    (strategy, reason)
                )
        for shared, alike in groups.items():
            names = dict.fromkeys(strategy for strategy, _ in alike)
            text = shared if len(names) > 1 else alike[0][1]
            yield StyledText(sign, style), f"{', '.join(names)}{what}: {text}"


def _generalise_reason(strategy: str, reason: str) -> str:
    """Reword a reason that names one strategy so that it applies to several."""
    name = rf"strategy {re.escape(strategy)}"
    named = re.sub(rf"\bunder {name}\b", "under these strategies", reason)
    named = re.sub(rf"^{name} does not\b", "these strategies do not", named)
    return re.sub(rf"^{re.escape(strategy)} on (\d+) ranks has\b", r"on \1 ranks they have", named)


def _verdict(certificate: Certificate) -> str:
    verdicts = certificate.verdicts
    wrong = [one.strategy for one in verdicts if not one.passed and not one.refused]
    counts = {
        "equal": sum(one.passed for one in verdicts),
        "NOT equal": len(wrong),
        "refused": sum(one.refused for one in verdicts),
        "skipped": len(certificate.skipped),
    }
    found = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    whole = "equal to one process"
    if wrong:
        whole = f"NOT equal to one process: {', '.join(dict.fromkeys(wrong))}"
    elif not counts["equal"]:
        whole = "nothing was proved"
    elif counts["refused"]:
        whole += ", or refused"
    subject = "" if certificate.module is None else f"{certificate.module}: "
    return f"{subject}{whole} ({found})"


def _conditions(certificate: Certificate) -> str:
    tolerances = {verdict.precision: verdict.tolerance for verdict in certificate.verdicts}
    allowed = ", ".join(f"{name} {tolerance:.1g}" for name, tolerance in tolerances.items())
    samples, length = certificate.global_batch, certificate.seq_len
    batch = f"{samples} samples" if length is None else f"{samples} × {length} tokens"
    parts = [f"{certificate.processes} processes", f"tolerance {allowed}"]
    parts += [f"{certificate.steps} steps of {batch}", *certificate.notes, certificate.date]
    return " · ".join(parts)
