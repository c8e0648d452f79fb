"""Apple's chips for Macs, in the variants with all GPU cores, by memory size.

Rates in TFLOP/s are for fp32. Those of M1 and M2 are from Apple's press releases. Apple publishes
none for later chips, so they are cores x 256 operations x about 1.38 (M3), 1.68 (M4) and 1.6 (M5)
GHz. Matmuls in 16 bits are not faster. M1's GPUs convert bf16 to fp32 in software, so they have no
rate for it; the matrix units of M5 are left out, since their rate is not published.
"""

from collections.abc import Iterator
from typing import NamedTuple

SOURCE = (
    "Apple's technical specifications (memory, bandwidth, GPU cores) and press releases (fp32 of "
    "M1 and M2; later chips: cores x 256 x clock)"
)
# The share of memory that Metal recommends as a GPU's maximum: 11.84 of 16 GB, 17.76 of 24. For
# chips with 128 GB it is more (107.5).
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


# Name, GPU cores, fp32 TFLOP/s, GB/s, sizes in GB.
_TABLE: tuple[tuple[str, int, float, float, tuple[int, ...]], ...] = (
    ("M1", 8, 2.6, 68.3, (8, 16)),
    ("M1 Pro", 16, 5.2, 200, (16, 32)),
    ("M1 Max", 32, 10.4, 400, (32, 64)),
    ("M1 Ultra", 64, 20.8, 800, (64, 128)),
    ("M2", 10, 3.6, 100, (8, 16, 24)),
    ("M2 Pro", 19, 6.8, 200, (16, 32)),
    ("M2 Max", 38, 13.6, 400, (32, 64, 96)),
    ("M2 Ultra", 76, 27.2, 800, (64, 128, 192)),
    ("M3", 10, 3.5, 100, (8, 16, 24)),
    ("M3 Pro", 18, 6.4, 150, (18, 36)),
    ("M3 Max", 40, 14.1, 400, (48, 64, 128)),
    ("M3 Ultra", 80, 28.2, 819, (96, 256, 512)),
    ("M4", 10, 4.3, 120, (16, 24, 32)),
    ("M4 Pro", 20, 8.6, 273, (24, 48, 64)),
    ("M4 Max", 40, 17.2, 546, (48, 64, 128)),
    ("M5", 10, 4.2, 153, (16, 24, 32)),
)


def _chips() -> Iterator[AppleChip]:
    for name, cores, fp32, gb_per_s, sizes in _TABLE:
        for size in sizes:
            yield AppleChip(name, size, gb_per_s, fp32, cores, not name.startswith("M1"))


CHIPS = tuple(_chips())
