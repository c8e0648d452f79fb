"""Report of a hang: the ranks that delayed the others, and the state of every rank."""

from outpace.records.hang_report import HangReport, RankSnapshot
from outpace.reporting.render.document import (
    Code,
    DataTable,
    Document,
    DocumentSection,
    Number,
    Part,
)

_STATES = {"waits": "waits", "works": "does not wait", "silent": "does not answer"}


def hang_document(report: HangReport) -> Document:
    """Create the report on ranks that hung, with the stacks and collectives that each reported."""
    sections = [DocumentSection("Ranks", (_ranks_table(report),))]
    sections += [DocumentSection(f"Rank {one.rank}", tuple(_rank_parts(one)))
                 for one in report.ranks if one.stacks or one.collectives]  # fmt: skip
    return Document("standstill", "Ranks that waited until the time limit", (_sentence(report),),
                    (("when, UTC", report.when[:16].replace("T", " ")),
                     ("ranks", str(len(report.ranks)))),
                    tuple(sections))  # fmt: skip


def _sentence(report: HangReport) -> str:
    return f"{report.sentence[:1].upper()}{report.sentence[1:].rstrip('.')}."


def _ranks_table(report: HangReport) -> DataTable:
    rows = tuple(
        (Number(one.rank, str(one.rank)), one.host, Number(one.pid, str(one.pid)), one.doing,
         _STATES[one.state], one.place)
        for one in report.ranks
    )  # fmt: skip
    return DataTable("State of each rank", ("rank", "host", "process", "in", "state", "at"), rows)


def _rank_parts(snapshot: RankSnapshot) -> list[Part]:
    parts: list[Part] = []
    if snapshot.collectives:
        rows = tuple(
            (
                Number(one.number, str(one.number)),
                one.group,
                one.name,
                one.state,
            )
            for one in snapshot.collectives
        )
        parts.append(DataTable("Its latest collectives, from torch's flight recorder",
                           ("number", "group", "what", "state"), rows))  # fmt: skip
    if snapshot.stacks:
        parts.append(Code("Its threads", snapshot.stacks))
    return parts
