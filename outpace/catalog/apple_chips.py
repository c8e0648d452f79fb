"""Apple chips for Macs, with all GPU cores enabled, by memory size (apple_chips.json).

Rates are in fp32 TFLOP/s. The rates of M1 and M2 come from Apple's press releases. Apple publishes
none for later chips, so their rates are cores x 256 operations x about 1.38 (M3), 1.68 (M4) or 1.6
(M5) GHz. 16-bit matmuls are no faster than fp32. M1's GPUs emulate bf16 in software, so M1 has no
bf16 rate. The matrix units of M5 are ignored because Apple does not publish their rate.
"""

from collections.abc import Iterator
from typing import NamedTuple

from outpace.catalog.tables import read_rows, read_table

SOURCE = (
    "Apple's technical specifications (memory, bandwidth, GPU cores) and press releases (fp32 of "
    "M1 and M2; later chips: cores x 256 x clock)"
)
# The fraction of memory that Metal recommends as a GPU's maximum: 11.84 of 16 GB, 17.76 of 24. It
# is larger for chips with 128 GB (107.5).
USABLE_SHARE = 0.74
USABLE_SOURCE = (
    "Metal's recommendedMaxWorkingSetSize: 11.84 of 16 GB (AlexsJones/llmfit pull request 754), "
    "17.76 of 24 GB (sgl-project/sglang pull request 29949)"
)


class AppleChip(NamedTuple):
    """An Apple chip with one of the memory sizes in which it is sold."""

    name: str
    memory_gb: int
    gb_per_s: float
    fp32: float
    cores: int
    has_bf16: bool


def _read_chips() -> Iterator[AppleChip]:
    for row in read_rows(read_table("apple_chips")):
        name, cores, fp32, gb_per_s, sizes = row.values()
        for size in sizes:
            yield AppleChip(name, size, gb_per_s, fp32, cores, not name.startswith("M1"))


CHIPS = tuple(_read_chips())
