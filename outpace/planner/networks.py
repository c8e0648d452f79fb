"""Networks to choose from: what a node can have, slowest first, and reading one that is named."""

import re

from outpace.catalog.links import LINKS, find_link
from outpace.records.errors import BadInputError
from outpace.records.hardware import Node
from outpace.records.network import Network

_KINDS = ("ethernet", "infiniband", "omni-path", "efa", "slingshot")
# So many cards as nodes are sold with: of the faster links, since the slower are one faster one.
_MANY = (("InfiniBand NDR", 2), ("InfiniBand NDR", 4), ("InfiniBand NDR", 8), ("InfiniBand XDR", 8))
_RATE = re.compile(r"([0-9.]+)\s*(Gbit/s|Gbps|GB/s|MB/s|Mbit/s)", re.IGNORECASE)
_LIKE_A_RATE = re.compile(r"bit/s|bps|B/s|^\s*[-+0-9.]*\s*$", re.IGNORECASE)
_UNITS = {"gbit/s": 1e9 / 8, "gbps": 1e9 / 8, "gb/s": 1e9, "mb/s": 1e6, "mbit/s": 1e6 / 8}
_BUNDLE = re.compile(r"(?:([0-9]+)\s*[x×]\s*)?(.+)")


def ladder() -> list[Network]:
    """Networks of the catalog by what they carry, slowest first; equally fast ones together."""
    by_rate: dict[float, list[str]] = {}
    sources: dict[float, str] = {}
    for link in LINKS.values():
        if link.kind in _KINDS:
            by_rate.setdefault(link.bytes_per_s, []).append(link.name)
            sources.setdefault(link.bytes_per_s, link.source)
    for name, count in _MANY:
        rate = LINKS[name].bytes_per_s * count
        by_rate.setdefault(rate, []).append(f"{count} × {name}")
        sources.setdefault(rate, LINKS[name].source)
    return [
        Network(name=", ".join(by_rate[rate]), bytes_per_s=rate, origin="catalog",
                source=sources[rate])
        for rate in sorted(by_rate)
    ]  # fmt: skip


def of_node(node: Node) -> Network | None:
    """All network cards of a machine of the catalog together; None where they are not known."""
    if not node.nics:
        return None
    rate = sum(LINKS[bundle.link].bytes_per_s * bundle.count for bundle in node.nics)
    name = " + ".join(f"{bundle.count} × {bundle.link}" for bundle in node.nics)
    return Network(name=name, bytes_per_s=rate, origin="catalog", source=node.source)


def read_network(text: str) -> Network:
    """A node's network from words: "4 x omni-path-100", "infiniband-ndr", "50Gbit/s", "12.5GB/s".

    Raises BadInputError.
    """
    rate = _RATE.fullmatch(text.strip())
    if rate is not None:
        return _asked(text, rate[1], rate[2])
    found = _BUNDLE.fullmatch(text.strip())
    count = int(found[1] or 1) if found else 0
    if found is None or count < 1:
        raise BadInputError(f"--network {text}: write 4 x omni-path-100, or a rate as 50Gbit/s.")
    if _LIKE_A_RATE.search(text):
        raise BadInputError(f"{text}: a rate is a number above 0, as in 50Gbit/s or 12.5GB/s.")
    link = find_link(found[2].strip())
    return Network(
        name=f"{count} × {link.name}",
        bytes_per_s=link.bytes_per_s * count,
        origin="catalog",
        source=link.source,
    )


def _asked(text: str, number: str, unit: str) -> Network:
    try:
        value = float(number) * _UNITS[unit.lower()]
    except ValueError:
        value = 0.0
    if not value > 0:
        raise BadInputError(f"{text}: a rate is a number above 0, as in 50Gbit/s or 12.5GB/s.")
    return Network(name=text.strip(), bytes_per_s=value, origin="asked", source="as asked")
