"""Accelerators: dense peak rates by dtype, memory and bandwidth, each from the maker's datasheet.

The peaks are without sparsity: where a datasheet prints figures "with sparsity", half of them
stand here. 16-bit rates are those with fp32 accumulation, as matrix products in training use it.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType

from outpace.records.machine import Accelerator, Architecture, Dtype, Peak

_T = 1e12
_GB_PER_S = 1e9
# Datasheets write GB for 2^30 bytes of memory, as what drivers report shows.
_GB = 2**30
Rates = dict[Dtype, float]

# TFLOP/s.
_V100_SXM2: Rates = {"fp32": 15.7, "fp16": 125}
_V100_PCIE: Rates = {"fp32": 14, "fp16": 112}
_V100S: Rates = {"fp32": 16.4, "fp16": 130}
_A100: Rates = {"fp32": 19.5, "tf32": 156, "bf16": 312, "fp16": 312, "int8": 624}
_HOPPER_SXM: Rates = {
    "fp32": 67, "tf32": 494.5, "bf16": 989.5, "fp16": 989.5, "fp8": 1979, "int8": 1979,
}  # fmt: skip
_H100_PCIE: Rates = {
    "fp32": 51, "tf32": 378, "bf16": 756.5, "fp16": 756.5, "fp8": 1513, "int8": 1513,
}  # fmt: skip
_HOPPER_NVL: Rates = {
    "fp32": 60, "tf32": 417.5, "bf16": 835.5, "fp16": 835.5, "fp8": 1670.5, "int8": 1670.5,
}  # fmt: skip
_RTX_4090: Rates = {
    "fp32": 82.6, "tf32": 82.6, "bf16": 165.2, "fp16": 165.2, "fp8": 330.3, "int8": 660.6,
}  # fmt: skip
_T4: Rates = {"fp32": 8.1, "fp16": 65, "int8": 130}

_V100_SHEET = "NVIDIA V100 Tensor Core GPU datasheet, January 2020"
_A100_SHEET = "NVIDIA A100 Tensor Core GPU datasheet, dense"
_H100_SHEET = "NVIDIA H100 Tensor Core GPU datasheet, dense (half of the figures with sparsity)"
_H200_SHEET = "NVIDIA H200 Tensor Core GPU datasheet, dense (half of the figures with sparsity)"
_ADA_PAPER = "NVIDIA Ada GPU Architecture whitepaper, appendix A, dense, fp32 accumulation"
_T4_SHEET = "NVIDIA T4 Tensor Core GPU datasheet; bandwidth: Turing whitepaper, table 4"

# By how names begin.
_ARCHITECTURES: dict[str, Architecture] = {
    "V100": "volta", "T4": "turing", "A100": "ampere", "RTX 40": "ada", "H": "hopper",
}  # fmt: skip

# Name, what the driver calls it, memory in GB, bandwidth in GB/s, rates in TFLOP/s, source.
_TABLE: tuple[tuple[str, str, int, float, Rates, str], ...] = (
    ("V100 SXM2 16 GB", "V100-SXM2-16GB", 16, 900, _V100_SXM2, _V100_SHEET),
    ("V100 SXM2 32 GB", "V100-SXM2-32GB", 32, 900, _V100_SXM2, _V100_SHEET),
    ("V100 PCIe 16 GB", "V100-PCIE-16GB", 16, 900, _V100_PCIE, _V100_SHEET),
    ("V100 PCIe 32 GB", "V100-PCIE-32GB", 32, 900, _V100_PCIE, _V100_SHEET),
    ("V100S PCIe 32 GB", "V100S-PCIE-32GB", 32, 1134, _V100S, _V100_SHEET),
    ("A100 SXM 40 GB", "A100-SXM4-40GB", 40, 1555, _A100, _A100_SHEET),
    ("A100 SXM 80 GB", "A100-SXM4-80GB", 80, 2039, _A100, _A100_SHEET),
    ("A100 PCIe 40 GB", "A100-PCIE-40GB", 40, 1555, _A100, _A100_SHEET),
    ("A100 PCIe 80 GB", "A100 80GB PCIe", 80, 1935, _A100, _A100_SHEET),
    ("H100 SXM", "H100 80GB HBM3", 80, 3350, _HOPPER_SXM, _H100_SHEET),
    ("H100 PCIe", "H100 PCIe", 80, 2000, _H100_PCIE, _H100_SHEET),
    ("H100 NVL", "H100 NVL", 94, 3900, _HOPPER_NVL, _H100_SHEET),
    ("H200 SXM", "H200", 141, 4800, _HOPPER_SXM, _H200_SHEET),
    ("H200 NVL", "H200 NVL", 141, 4800, _HOPPER_NVL, _H200_SHEET),
    ("RTX 4090", "RTX 4090", 24, 1008, _RTX_4090, _ADA_PAPER),
    ("T4", "T4", 16, 320, _T4, _T4_SHEET),
)

ACCELERATORS: Mapping[str, Accelerator] = MappingProxyType(
    {
        name: Accelerator(
            name=name,
            driver_name=driver_name,
            architecture=next(a for start, a in _ARCHITECTURES.items() if name.startswith(start)),
            memory_bytes=memory * _GB,
            memory_bytes_per_s=bandwidth * _GB_PER_S,
            peak=Peak(
                flops_per_s={dtype: rate * _T for dtype, rate in rates.items()}, source=source
            ),
        )
        for name, driver_name, memory, bandwidth, rates, source in _TABLE
    }
)

# Words before a product's name. Any other word makes it another product ("4090 D", "Laptop GPU").
_MAKERS = re.compile(r"\b(nvidia|tesla|geforce)\b", re.IGNORECASE)
# Firmware and error correction take their part of the memory; a slice of a device (MIG) has far
# less of it, and other peaks.
_LEAST_MEMORY, _MOST_MEMORY = 0.85, 1.02


def find_accelerator(driver_name: str, memory_bytes: int | None) -> Accelerator | None:
    """The catalog's entry for a device, or None: unknown is not guessed.

    `driver_name` is what the driver reports ("NVIDIA H100 80GB HBM3"). `memory_bytes`, if known,
    has to fit the entry's.
    """
    wanted = " ".join(_MAKERS.sub(" ", driver_name).split()).casefold()
    for accelerator in ACCELERATORS.values():
        if wanted == accelerator.driver_name.casefold():
            share = 1.0 if memory_bytes is None else memory_bytes / accelerator.memory_bytes
            return accelerator if _LEAST_MEMORY <= share <= _MOST_MEMORY else None
    return None
