"""Candidate networks and device links, slowest first, and a parser for their names."""

import re
from collections.abc import Iterable

from outpace.catalog.accelerators import ACCELERATORS
from outpace.catalog.links import LINKS, bytes_per_s, find_link
from outpace.records.errors import BadInputError
from outpace.records.hardware import Accelerator, Node
from outpace.records.network import Network

_KINDS = ("ethernet", "infiniband", "omni-path", "efa", "slingshot")
# Numbers of cards in nodes on the market. Slow links are left out: several equal a faster one.
_MANY = (("InfiniBand NDR", 2), ("InfiniBand NDR", 4), ("InfiniBand NDR", 8), ("InfiniBand XDR", 8))
_RATE = re.compile(r"([0-9.]+)\s*(Gbit/s|Gbps|GB/s|MB/s|Mbit/s)", re.IGNORECASE)
_NUMBER = re.compile(r"(?=[0-9.]*[1-9])[0-9]+\.?[0-9]*|\.[0-9]*[1-9][0-9]*")
_RATES = "a rate must be a number above 0, such as 50Gbit/s or 12.5GB/s."
_LIKE_A_RATE = re.compile(r"bit/s|bps|B/s|^\s*[-+0-9.]*\s*$", re.IGNORECASE)
_UNITS = {"gbit/s": 1e9 / 8, "gbps": 1e9 / 8, "gb/s": 1e9, "mb/s": 1e6, "mbit/s": 1e6 / 8}
_BUNDLE = re.compile(r"(?:([0-9]+)\s*[x×]\s*)?(.+)")


def ladder() -> list[Network]:
    """Return the catalog's networks, slowest first, with equally fast ones grouped."""
    single = [(link.name, 1) for link in LINKS.values() if link.kind in _KINDS]
    return by_rate(
        Network(
            name=name if count == 1 else f"{count} × {name}", origin="catalog",
            bytes_per_s=LINKS[name].bytes_per_s * count, source=LINKS[name].source,
        )
        for name, count in (*single, *_MANY)
    )  # fmt: skip


def device_ladder(chip: Accelerator | None) -> list[Network]:
    """Return the links that a device could have to others in its node, slowest first.

    The links are a slot of each PCIe generation and the NVLink bundles (for AMD, Infinity Fabric)
    of the catalog's accelerators. Equally fast links are merged, with the device's own first.
    Without an accelerator, the list is empty: on CPUs, ranks communicate through memory.
    """
    if chip is None:
        return []
    own = chip.device_link
    kind = "nvlink" if own is None else LINKS[own.link].kind
    found = [
        Network(name=link.name, bytes_per_s=link.bytes_per_s, origin="catalog", source=link.source)
        for link in LINKS.values() if link.kind == "pcie"
    ]  # fmt: skip
    for one in (chip, *ACCELERATORS.values()):
        bundle, rate = one.device_link, bytes_per_s(one.device_link)
        if bundle is not None and rate is not None and LINKS[bundle.link].kind == kind:
            found.append(Network(name=f"{bundle.count} × {bundle.link}", bytes_per_s=rate,
                                 origin="catalog", source=LINKS[bundle.link].source))  # fmt: skip
    return by_rate(found)


def by_rate(networks: Iterable[Network]) -> list[Network]:
    """Sort networks, slowest first, and merge equally fast ones into one with all their names."""
    together: dict[float, list[Network]] = {}
    for one in networks:
        together.setdefault(one.bytes_per_s, []).append(one)
    return [
        of[0].model_copy(update={"name": ", ".join(dict.fromkeys(one.name for one in of))})
        for _, of in sorted(together.items())
    ]


def of_node(node: Node) -> Network | None:
    """Return the combined network of a node's cards in the catalog; None if unknown."""
    if not node.nics:
        return None
    rate = sum(LINKS[bundle.link].bytes_per_s * bundle.count for bundle in node.nics)
    name = " + ".join(f"{bundle.count} × {bundle.link}" for bundle in node.nics)
    return Network(name=name, bytes_per_s=rate, origin="catalog", source=node.source)


def read_network(text: str, option: str = "--network ") -> Network:
    """Parse a node's network: "4 x omni-path-100", "infiniband-ndr", "50Gbit/s", "12.5GB/s".

    Error messages start with `option` and the text. Raises BadInputError if the text cannot be
    parsed or names an unknown link.
    """
    rate = _RATE.fullmatch(text.strip())
    if rate is not None:
        return _parse_rate(text, rate[1], rate[2], option)
    found = _BUNDLE.fullmatch(text.strip())
    count = int(found[1] or 1) if found else 0
    if _NUMBER.fullmatch(text.strip()):
        raise BadInputError(
            f"{option}{text}: its unit is missing. Write {text.strip()}Gbit/s or "
            f"{text.strip()}GB/s."
        )
    if found is None or count < 1:
        raise BadInputError(f"{option}{text}: write 4 x omni-path-100, or a rate such as 50Gbit/s.")
    if _LIKE_A_RATE.search(text):
        raise BadInputError(f"{option}{text}: {_RATES}")
    try:
        link = find_link(found[2].strip())
    except BadInputError as error:
        raise BadInputError(f"{option}{text}: {error}") from None
    return Network(
        name=f"{count} × {link.name}",
        bytes_per_s=link.bytes_per_s * count,
        origin="catalog",
        source=link.source,
    )


def _parse_rate(text: str, number: str, unit: str, option: str) -> Network:
    try:
        value = float(number) * _UNITS[unit.lower()]
    except ValueError:
        value = 0.0
    if not value > 0:
        raise BadInputError(f"{option}{text}: {_RATES}")
    return Network(name=text.strip(), bytes_per_s=value, origin="asked", source="as asked")
