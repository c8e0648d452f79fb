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


def hang_document(found: HangReport) -> Document:
    """Show everything that the ranks reported."""
    sections = [DocumentSection("Ranks", (_ranks(found),))]
    sections += [DocumentSection(f"Rank {one.rank}", tuple(_parts(one))) for one in found.ranks
                 if one.stacks or one.collectives]  # fmt: skip
    return Document("standstill", "Ranks that waited until the time limit", (_sentence(found),),
                    (("when, UTC", found.when[:16].replace("T", " ")),
                     ("ranks", str(len(found.ranks)))),
                    tuple(sections))  # fmt: skip


def _sentence(found: HangReport) -> str:
    return f"{found.sentence[:1].upper()}{found.sentence[1:].rstrip('.')}."


def _ranks(found: HangReport) -> DataTable:
    rows = tuple(
        (Number(one.rank, str(one.rank)), one.host, Number(one.pid, str(one.pid)), one.doing,
         _STATES[one.state], one.place)
        for one in found.ranks
    )  # fmt: skip
    return DataTable("State of each rank", ("rank", "host", "process", "in", "state", "at"), rows)


def _parts(one: RankSnapshot) -> list[Part]:
    parts: list[Part] = []
    if one.collectives:
        rows = tuple(
            (Number(each.number, str(each.number)), each.group, each.name, each.state)
            for each in one.collectives
        )
        parts.append(DataTable("Its latest collectives, from torch's flight recorder",
                           ("number", "group", "what", "state"), rows))  # fmt: skip
    if one.stacks:
        parts.append(Code("Its threads", one.stacks))
    return parts
