"""Accelerators: dense peak rates by dtype, memory, power and links, from vendors' datasheets.

The figures are in `accelerators.json`, `consumer_gpus.json` and `apple_chips.json`: add one there.
Peaks are without sparsity: half of the figures that a datasheet prints "with sparsity". 16-bit
rates assume fp32 accumulation, which training uses. An AMD Instinct MI250X appears as two devices
(GCDs), with one process each: its figures are per GCD (half of the module's), except the power,
which is the whole module's. AMD's fp32 rate is the rate of its matrix cores.
"""

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from outpace.catalog import apple_chips
from outpace.catalog.consumer_gpus import CARDS, PAPERS, SOURCE, Card
from outpace.catalog.tables import read_rows, read_table
from outpace.records.hardware import Accelerator, Bundle, Dtype, Peak

_T = 1e12
_GB_PER_S = 1e9
# Datasheets write GB for 2^30 bytes of memory, as the values of drivers show.
_GB = 2**30

# GiB that torch reports as a device's capacity in out-of-memory errors, quoted in public issues:
# firmware, error correction (a sixteenth of GDDR6) and the driver take the rest. It differs by 0.01
# to 0.1 GiB between drivers and boards (`usable_gib`).
_ISSUE = "torch's message of {} GiB capacity, github.com/{}"
# Assumed for other devices: the middle of their shares, from 98.0 % (RTX 5090) to 99.2 % (V100).
# GDDR6 cards that use error correction are left out.
_USABLE_SHARE = 0.985
_ASSUMED = "assumed: 98.5 % of the datasheet's"


def _read_accelerators() -> Iterator[Accelerator]:
    """Yield the accelerators of accelerators.json.

    Each row of the file names its chip and its table of peak rates. These rates are for the first
    of the row's power limits, `powers_w`.
    """
    table = read_table("accelerators")
    for row in read_rows(table):
        chip, source = table["chips"][row["chip"]], row["source"]
        power_w, *others_w = row["powers_w"]
        links = "" if chip["source"] == source else f"; {chip['source']}"
        rates = {dtype: rate * _T for dtype, rate in table["teraflops"][row["teraflops"]].items()}
        known = table["usable_gib"].get(row["name"])
        yield Accelerator(
            name=row["name"],
            driver_name=row["driver_name"],
            memory_bytes=row["memory_gb"] * _GB,
            usable_bytes=round((known[0] if known else row["memory_gb"] * _USABLE_SHARE) * _GB),
            usable_source=_ISSUE.format(*known) if known else _ASSUMED,
            memory_bytes_per_s=row["gb_per_s"] * _GB_PER_S,
            peak=Peak(flops_per_s=rates, source=source),
            power_w=power_w,
            power_variants_w=tuple(others_w),
            **chip | {"source": source + links},
        )


def _make_card(card: Card) -> Accelerator:
    """Return the accelerator for a row of the table of consumer GPUs.

    On Turing, the 16-bit rate is for fp16 only; there is no rate for bf16 or tf32.
    """
    source = SOURCE.format(PAPERS[card.architecture])
    rates: dict[Dtype, float] = {"fp32": card.fp32, "fp16": card.low}
    if card.architecture != "turing":
        rates |= {"tf32": card.low / 2, "bf16": card.low}
    rates |= {} if card.fp8 is None else {"fp8": card.fp8}
    rates |= {} if card.int8 is None else {"int8": card.int8}
    reported = min(card.memory_gb * _GB, (card.reported_mib or card.memory_gb * 1024) * 2**20)
    return Accelerator(
        name=card.name,
        driver_name=card.driver_name,
        architecture=card.architecture,
        memory_bytes=card.memory_gb * _GB,
        usable_bytes=round(reported * _USABLE_SHARE),
        usable_source=_ASSUMED,
        memory_bytes_per_s=card.gb_per_s * _GB_PER_S,
        peak=Peak(flops_per_s={dtype: rate * _T for dtype, rate in rates.items()}, source=source),
        power_w=card.power_w,
        multiprocessors=card.multiprocessors,
        host_link=card.host_link,
        device_link=card.bridge and Bundle(link=card.bridge[0], count=card.bridge[1]),
        source=source,
    )


def _make_apple_chip(chip: apple_chips.AppleChip) -> Accelerator:
    dtypes: tuple[Dtype, ...] = ("fp32", "fp16", "bf16") if chip.has_bf16 else ("fp32", "fp16")
    rates = dict.fromkeys(dtypes, chip.fp32 * _T)
    return Accelerator(
        name=f"{chip.name} {chip.memory_gb} GB",
        driver_name=chip.name,
        architecture="apple",
        memory_bytes=chip.memory_gb * _GB,
        usable_bytes=round(chip.memory_gb * _GB * apple_chips.USABLE_SHARE),
        usable_source=apple_chips.USABLE_SOURCE,
        memory_bytes_per_s=chip.gb_per_s * _GB_PER_S,
        peak=Peak(flops_per_s=rates, source=apple_chips.SOURCE),
        power_w=None,
        multiprocessors=chip.cores,
        host_link="unified memory",
        has_collectives=False,
        compiles=False,
        shares_host_memory=True,
        source=apple_chips.SOURCE,
    )


ACCELERATORS: Mapping[str, Accelerator] = MappingProxyType(
    {one.name: one for one in _read_accelerators()}
    | {card.name: _make_card(card) for card in CARDS}
    | {chip.name: chip for chip in map(_make_apple_chip, apple_chips.CHIPS)}
)

# Words before a product's name. Any other word makes it another product ("4090 D", "Laptop GPU").
_MAKERS = re.compile(r"\b(nvidia|tesla|geforce|amd|instinct|apple)\b", re.IGNORECASE)
# Firmware and error correction reduce the memory slightly; a slice of a device (MIG) has far less,
# and lower peaks.
_LEAST_MEMORY, _MOST_MEMORY = 0.85, 1.02


def find_accelerator(driver_name: str, memory_bytes: int | None) -> Accelerator | None:
    """Return the catalog's entry for a device, or None if the catalog has none.

    `driver_name` is the name that the driver reports ("NVIDIA H100 80GB HBM3"). If `memory_bytes`
    is given, it must be close to the entry's memory.
    """
    wanted = " ".join(_MAKERS.sub(" ", driver_name).split()).casefold()
    for accelerator in ACCELERATORS.values():
        if wanted == accelerator.driver_name.casefold():
            share = 1.0 if memory_bytes is None else memory_bytes / accelerator.memory_bytes
            if _LEAST_MEMORY <= share <= _MOST_MEMORY:
                return accelerator
    return None
