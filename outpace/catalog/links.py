"""Links, with their unidirectional rates after line coding, by standard or vendor (links.json).

Latencies are omitted: published values are measurements of one machine, not specifications.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from outpace.catalog.tables import read_rows, read_table
from outpace.records.errors import BadInputError, nearest_of, suggest
from outpace.records.hardware import Bundle, Link

_GIGA = 1e9


def _make_link(gb_per_s: float, **values: Any) -> Link:
    return Link(bytes_per_s=gb_per_s * _GIGA, **values)


LINKS: Mapping[str, Link] = MappingProxyType(
    {row["name"]: _make_link(**row) for row in read_rows(read_table("links"))}
)


def find_link(name: str) -> Link:
    """Return a link by its name ("InfiniBand NDR" or "infiniband-ndr").

    Raises BadInputError, which suggests the closest names, if there is no such link.
    """
    plain = {known.casefold().replace(" ", "-"): known for known in LINKS}
    wanted = name.casefold().replace(" ", "-")
    if wanted in plain:
        return LINKS[plain[wanted]]
    raise BadInputError(
        f"link {name!r} is not in the catalog.{suggest(wanted, plain)} It has "
        f"{nearest_of(wanted, plain)}; docs/reference/catalog.md lists all."
    )


def bytes_per_s(bundle: Bundle | None) -> float | None:
    """Return the rate of a bundle of equal links in bytes/s, in one direction.

    Returns None if there is no bundle.
    """
    return None if bundle is None else LINKS[bundle.link].bytes_per_s * bundle.count
