"""A certificate as a table for the terminal."""

import re
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from outpace.records.certificate import Certificate, ParityVerdict
from outpace.records.units import show_bytes


def certificate_table(certificate: Certificate) -> Group:
    """Return the verdict, a row for each plan, and each reason once.

    A row shows how closely the plan agrees with the reference, and the bytes that the busiest rank
    sends.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    several = len({verdict.precision for verdict in certificate.verdicts}) > 1
    counted = certificate.module is None  # bytes on the wire
    wire = ["sends", "by formula"] if counted else []
    for name in ("", "strategy", "mesh", *["in"] * several, "off by", *wire):
        table.add_column(name, no_wrap=name != "mesh")  # the only long column
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
    result = Text(_verdict(certificate), style="bold")
    return Group(result, table, *_notes(certificate), Text(_trial(certificate), style="dim"))


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


def _notes(certificate: Certificate) -> list[Table]:
    """Return notes on failures and on refusals, each reason once."""
    verdicts = certificate.verdicts
    wrong = [one for one in verdicts if one.reason and not one.refused]
    refused = [one for one in verdicts if one.refused]
    moved = [one for one in verdicts if one.cause and not one.reason]
    return [
        *_explain(Text("✗", style="red"), "", [(v.strategy, v.reason or "") for v in wrong]),
        *_explain(
            Text("–", style="yellow"), " refused", [(v.strategy, v.reason or "") for v in refused]
        ),
        *_explain(Text("✓", style="green"), "", [(v.strategy, v.cause or "") for v in moved]),
        *_explain(Text("–", style="dim"), " skipped", list(certificate.skipped.items())),
    ]


def _explain(mark: Text, what: str, reasons: Sequence[tuple[str, str]]) -> Iterator[Table]:
    """Yield a paragraph for each reason, under the strategies that have it."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for strategy, reason in reasons:
        groups.setdefault(_without_name(strategy, reason), []).append((strategy, reason))
    for shared, alike in groups.items():
        names = dict.fromkeys(strategy for strategy, _ in alike)
        paragraph = Table.grid(padding=(0, 1))
        paragraph.add_column(width=1)
        paragraph.add_column()
        paragraph.add_row(mark, Text(f"{', '.join(names)}{what}:"))
        paragraph.add_row("", Text(shared if len(names) > 1 else alike[0][1]))
        yield paragraph


def _without_name(strategy: str, reason: str) -> str:
    """Return a reason without the strategy's name, for use with several strategies."""
    name = rf"strategy {re.escape(strategy)}"
    named = re.sub(rf"\bunder {name}\b", "under these strategies", reason)
    return re.sub(rf"^{name} does not\b", "these strategies do not", named)


def _verdict(certificate: Certificate) -> str:
    """Return the result in a line: the numbers of equal, different and refused plans."""
    verdicts = certificate.verdicts
    counts = {
        "equal": sum(one.passed for one in verdicts),
        "NOT equal": sum(not one.passed and not one.refused for one in verdicts),
        "refused": sum(one.refused for one in verdicts),
        "skipped": len(certificate.skipped),
    }
    found = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    whole = "NOT equal to one process" if counts["NOT equal"] else "equal to one process"
    if not counts["equal"] and certificate.passed:
        whole = "nothing was proved"
    elif certificate.passed and counts["refused"]:
        whole += ", or refused"
    subject = "" if certificate.module is None else f"{certificate.module}: "
    return f"{subject}{whole} ({found})"


def _trial(certificate: Certificate) -> str:
    """Describe the trial that the verdicts are based on."""
    tolerances = {verdict.precision: verdict.tolerance for verdict in certificate.verdicts}
    allowed = ", ".join(f"{name} {tolerance:.1g}" for name, tolerance in tolerances.items())
    parts = [f"{certificate.processes} processes", f"tolerance {allowed}"]
    parts += [f"{certificate.steps} steps of {batch_in_words(certificate)}", *certificate.notes]
    return " · ".join(parts)


def batch_in_words(certificate: Certificate) -> str:
    """Format a global batch, in samples or in tokens."""
    samples, length = certificate.global_batch, certificate.seq_len
    return f"{samples} samples" if length is None else f"{samples} × {length} tokens"
