"""Links: their rates in one direction after line coding, according to the standard or the maker.

Latencies are left out: published ones were measured on one machine, not specified.
"""

from collections.abc import Mapping
from types import MappingProxyType

from outpace.records.errors import BadInputError, nearest_of, suggest
from outpace.records.hardware import Bundle, Link, LinkKind

_GIGA = 1e9
_PCIE = "PCI Express Base Specification {}: {} on each of 16 lanes, {}"
_NVLINK = "NVIDIA {}: {} GB/s of a link in both directions, half of it in one"
_IB = "InfiniBand Trade Association roadmap: {} is {} Gbit/s of data on 4 lanes"
_ETHERNET = "IEEE 802.3{}: MAC data rate of {} Gbit/s"
_EFA = "Amazon EC2 instance network specifications: {} Gbit/s of a network card of {}"

# Columns: Gbit/s of data, standard.
_ETHERNETS = {
    10: "ae-2002", 25: "by-2016", 40: "ba-2010", 50: "cd-2018", 100: "ba-2010", 200: "bs-2017",
    400: "bs-2017", 800: "df-2024",
}  # fmt: skip
_INFINIBANDS = {"EDR": 100, "HDR": 200, "NDR": 400, "XDR": 800}

# Columns: name, kind, GB/s in one direction, source.
_TABLE: tuple[tuple[str, LinkKind, float, str], ...] = (
    ("PCIe 3 x16", "pcie", 8 * 16 / 8 * 128 / 130, _PCIE.format("3.0", "8 GT/s", "128b/130b")),
    ("PCIe 4 x16", "pcie", 16 * 16 / 8 * 128 / 130, _PCIE.format("4.0", "16 GT/s", "128b/130b")),
    ("PCIe 5 x16", "pcie", 32 * 16 / 8 * 128 / 130, _PCIE.format("5.0", "32 GT/s", "128b/130b")),
    ("PCIe 6 x16", "pcie", 64 * 16 / 8 * 242 / 256,
     _PCIE.format("6.0", "64 GT/s", "242 of a flit's 256 bytes; the rest is CRC and FEC")),
    *((f"PCIe {generation} x8", "pcie", rate * 8 / 8 * 128 / 130,
       _PCIE.format(f"{generation}.0", f"{rate} GT/s", "128b/130b").replace("16 lanes", "8 lanes"))
      for generation, rate in ((3, 8), (4, 16), (5, 32))),
    ("NVLink 2", "nvlink", 25, _NVLINK.format("Tesla V100 whitepaper", 50)),
    ("NVLink 3", "nvlink", 25, _NVLINK.format("A100 whitepaper", 50)),
    ("NVLink 3 GA102", "nvlink", 14.0625, _NVLINK.format("Ampere GA102 whitepaper", 28.125)),
    ("NVLink 4", "nvlink", 25, _NVLINK.format("H100 whitepaper", 50)),
    ("NVLink 5", "nvlink", 50, _NVLINK.format("Blackwell architecture technical brief", 100)),
    ("NVLink-C2C", "nvlink", 450,
     "NVIDIA GB200 NVL72 datasheet: 900 GB/s in both directions, to a superchip's two GPUs"),
    ("unified memory", "memory", 819,
     "Apple technical specifications: memory of an M3 Ultra, the fastest; other chips are slower"),
    ("Infinity Fabric CDNA 2", "infinity-fabric", 50,
     "AMD ROCm documentation, MI250 microarchitecture: 25 GT/s, 16 wide, 50 GB/s"),
    ("Infinity Fabric CDNA 2 host", "infinity-fabric", 36,
     "OLCF Frontier user guide: 36 + 36 GB/s between the CPU and a GCD"),
    ("Infinity Fabric CDNA 3", "infinity-fabric", 64,
     "AMD Instinct MI300X datasheet: 128 GB/s of a link in both directions, half of it in one"),
    ("Infinity Fabric CDNA 4", "infinity-fabric", 76.8,
     "AMD Instinct MI350 series platform datasheet: 153.6 GB/s of a link in both directions"),
    *((f"InfiniBand {name}", "infiniband", rate / 8, _IB.format(name, rate))
      for name, rate in _INFINIBANDS.items()),
    ("Omni-Path 100", "omni-path", 12.5,
     "Intel Omni-Path Host Fabric Adapter 100 Series product brief: 100 Gbit/s"),
    *((f"Ethernet {rate}", "ethernet", rate / 8, _ETHERNET.format(standard, rate))
      for rate, standard in _ETHERNETS.items()),
    ("EFA 100", "efa", 12.5, _EFA.format(100, "p4d, p4de and p5")),
    ("EFA 200", "efa", 25, _EFA.format(200, "p5en")),
    ("Slingshot 11", "slingshot", 25,
     "De Sensi et al. 2020, arXiv 2008.08886: 200 Gbit/s a port"),
)  # fmt: skip

LINKS: Mapping[str, Link] = MappingProxyType(
    {
        name: Link(name=name, kind=kind, bytes_per_s=rate * _GIGA, source=source)
        for name, kind, rate, source in _TABLE
    }
)


def find_link(name: str) -> Link:
    """Find a link by its name ("InfiniBand NDR", "infiniband-ndr").

    Raises BadInputError, which names the closest links, if there is none.
    """
    plain = {known.casefold().replace(" ", "-"): known for known in LINKS}
    wanted = name.casefold().replace(" ", "-")
    if wanted in plain:
        return LINKS[plain[wanted]]
    raise BadInputError(
        f"link {name!r} is not in the catalog.{suggest(wanted, plain)} It has "
        f"{nearest_of(wanted, plain)}; docs/reference/catalog.md has all."
    )


def bytes_per_s(bundle: Bundle | None) -> float | None:
    """Return a bundle's rate in one direction, in bytes/s; None if there is no bundle."""
    return None if bundle is None else LINKS[bundle.link].bytes_per_s * bundle.count
