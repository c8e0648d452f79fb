import pytest
from pytest import approx

from outpace.catalog.accelerators import ACCELERATORS, find_accelerator
from outpace.catalog.links import LINKS, bytes_per_s


@pytest.mark.parametrize(
    ("driver_name", "memory_bytes", "name"),
    [
        ("Tesla V100-SXM2-16GB", 16_945_512_448, "V100 SXM2 16 GB"),
        ("Tesla V100-SXM2-32GB", 34_089_730_048, "V100 SXM2 32 GB"),
        ("Tesla V100-PCIE-16GB", 16_945_512_448, "V100 PCIe 16 GB"),
        ("NVIDIA A100-SXM4-40GB", 42_298_834_944, "A100 SXM 40 GB"),
        ("A100-SXM4-40GB", None, "A100 SXM 40 GB"),
        ("NVIDIA A100-SXM4-80GB", 84_974_239_744, "A100 SXM 80 GB"),
        ("NVIDIA A100 80GB PCIe", 84_974_239_744, "A100 PCIe 80 GB"),
        ("NVIDIA H100 80GB HBM3", 85_017_624_576, "H100 SXM"),
        ("NVIDIA H100 PCIe", 85_028_896_768, "H100 PCIe"),
        ("NVIDIA H100 NVL", 99_949_740_032, "H100 NVL"),
        ("NVIDIA H200", 150_110_011_392, "H200 SXM"),
        ("NVIDIA GeForce RTX 4090", 25_386_352_640, "RTX 4090"),
        ("Tesla T4", 15_843_721_216, "T4"),
        ("NVIDIA GeForce GTX 1080 Ti", 11_714_691_072, "GTX 1080 Ti"),  # 11,172 MiB
        ("TITAN RTX", 25_396_969_472, "TITAN RTX"),
        ("NVIDIA TITAN RTX", None, "TITAN RTX"),
        ("NVIDIA A10G", 23_609_475_072, "A10G"),  # 22,516 MiB: error correction takes its part
        ("NVIDIA GeForce RTX 3090", 25_438_126_080, "RTX 3090"),
        ("NVIDIA L4", 23_580_639_232, "L4"),
        ("NVIDIA L40S", 47_697_362_944, "L40S"),
        ("NVIDIA GeForce RTX 5090", 34_190_917_632, "RTX 5090"),  # 32,607 MiB
        ("NVIDIA B200", 192_265_846_784, "B200"),  # 183,359 MiB
        ("NVIDIA GB200", 198_674_743_296, "GB200"),  # 189,471 MiB
        ("NVIDIA GeForce RTX 4090 D", None, "RTX 4090 D"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 17_171_480_576, "RTX 4090 Laptop"),  # 16,376 MiB
        ("NVIDIA GeForce RTX 3060", 12_884_901_888, "RTX 3060 12 GB"),
        ("NVIDIA GeForce RTX 3060", 8_589_934_592, "RTX 3060 8 GB"),
        ("NVIDIA RTX A6000", 51_527_024_640, "RTX A6000"),  # 49,140 MiB
        ("NVIDIA RTX 6000 Ada Generation", 51_527_024_640, "RTX 6000 Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", None, "RTX PRO 6000 Blackwell Server"),
        ("NVIDIA GB300", 298_013_687_808, "GB300"),  # 284,208 MiB
        ("NVIDIA B300 SXM6 AC", 288_400_343_040, "B300"),  # 275,040 MiB
        ("NVIDIA GB10", None, "GB10"),
        ("AMD Instinct MI250X", 68_702_699_520, "MI250X GCD"),
        ("AMD Instinct MI300X", 206_141_652_992, "MI300X"),
        ("Apple M3 Max", 68_719_476_736, "M3 Max 64 GB"),
        ("Apple M1", 8_589_934_592, "M1 8 GB"),
    ],
)
def test_what_drivers_report_is_found(driver_name, memory_bytes, name):
    found = find_accelerator(driver_name, memory_bytes)
    assert found is not None and found.name == name and found is ACCELERATORS[name]


@pytest.mark.parametrize(
    ("driver_name", "memory_bytes"),
    [
        ("NVIDIA GH200 480GB", 20_000_000_000),  # has H200 in its name; a slice
        ("NVIDIA GeForce RTX 4090 D Laptop GPU", None),
        ("NVIDIA GeForce RTX 3060", 4_294_967_296),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 42_000_000_000),
        ("NVIDIA B200", 96_000_000_000),  # a slice
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA A100-SXM4-80GB", 10_000_000_000),  # a slice
        ("NVIDIA H100", None),  # which one?
        ("", None),
    ],
)
def test_unknown_is_none(driver_name, memory_bytes):
    assert find_accelerator(driver_name, memory_bytes) is None


def test_peaks_are_dense_and_have_a_source():
    assert ACCELERATORS["V100 SXM2 16 GB"].peak.flops_per_s["fp16"] == 125e12
    assert ACCELERATORS["A100 SXM 80 GB"].peak.flops_per_s["bf16"] == 312e12
    assert ACCELERATORS["H100 SXM"].peak.flops_per_s["bf16"] == 989.5e12
    assert ACCELERATORS["RTX 4090"].peak.flops_per_s["bf16"] == 165.2e12
    assert ACCELERATORS["T4"].peak.flops_per_s["fp16"] == 65e12
    for accelerator in ACCELERATORS.values():
        peaks = accelerator.peak.flops_per_s
        assert accelerator.peak.source in accelerator.source
        if accelerator.architecture == "apple":  # no matrix units that are faster in 16 bits
            assert set(peaks.values()) == {peaks["fp32"]} and {"fp32", "fp16"} <= set(peaks)
            continue
        assert "datasheet" in accelerator.peak.source or "whitepaper" in accelerator.peak.source
        if "fp16" in peaks:  # tensor cores
            assert peaks["fp32"] < peaks["fp16"]
        if "bf16" in peaks:
            assert peaks["bf16"] == peaks["fp16"]
            # Makers round: 183 of 362.05, 1.1 of 2.25 peta.
            assert peaks.get("tf32", peaks["bf16"] / 2) == approx(peaks["bf16"] / 2, rel=0.025)
        if "fp8" in peaks:
            assert peaks["fp8"] == approx(2 * peaks["bf16"], rel=0.015)
        if "int8" in peaks and "B300" not in accelerator.name:  # which left int8 behind
            assert peaks["int8"] / peaks["fp16"] in (
                approx(1),
                approx(2, rel=0.015),
                approx(4, rel=0.005),  # of 13.5 a card's 54.2
            )


def test_chips_before_ampere_and_m2_have_no_bf16():
    for name in ("GTX 1080 Ti", "V100 SXM2 16 GB", "TITAN RTX", "T4", "M1 Ultra 64 GB"):
        assert "bf16" not in ACCELERATORS[name].peak.flops_per_s


def test_half_of_what_is_printed_with_sparsity():
    printed = {  # bf16, with sparsity, TFLOP/s
        "H100 SXM": 1979, "H100 PCIe": 1513, "L4": 242, "L40S": 733, "B200": 4500, "GB200": 5000,
        "RTX 5090": 419, "RTX 3090": 142,
    }  # fmt: skip
    for name, sparse in printed.items():
        dense = ACCELERATORS[name].peak.flops_per_s["bf16"]
        assert dense == approx(sparse / 2 * 1e12, rel=0.015), name
    # 5.76 and 360 (with sparsity) PFLOP/s in a rack of 72, 13.4 TB and 576 TB/s.
    rack = ACCELERATORS["GB200"]
    assert 72 * rack.peak.flops_per_s["fp32"] == approx(5.76e15)
    assert 2 * 72 * rack.peak.flops_per_s["bf16"] == approx(360e15)
    assert 72 * rack.memory_bytes_per_s == approx(576e12)


def test_dense_rates_of_each_family_as_makers_print_them():
    printed = {  # 16-bit matmuls with fp32 accumulation, TFLOP/s
        "V100S PCIe 32 GB": 130, "T4": 65, "TITAN RTX": 130.5, "RTX 2080 Ti": 53.8,
        "Quadro RTX 6000": 130.5, "A100 SXM 80 GB": 312, "A800 SXM 80 GB": 312, "A30": 165,
        "A10": 125, "A10G": 70, "A2": 18, "RTX 3080 10 GB": 59.5, "RTX 3090 Ti": 80,
        "RTX 3080 Ti Laptop": 37.4, "RTX A4000": 76.7, "RTX A6000": 154.8, "L4": 121, "L20": 119.5,
        "L40": 181.05, "L40S": 362.05, "RTX 4060": 30.2, "RTX 4090": 165.2, "RTX 4090 D": 147.1,
        "RTX 4090 Laptop": 66, "RTX 4000 SFF Ada": 76.7, "RTX 6000 Ada": 364.25,
        "H100 SXM": 989.5, "H100 PCIe": 756.5, "H100 NVL": 835.5, "H100 SXM 64 GB": 989.5,
        "H800 SXM": 989.5, "H20": 148, "H200 SXM": 989.5, "H200 NVL": 835.5, "GH200 96 GB": 989.5,
        "B200": 2250, "GB200": 2500, "B300": 2250, "GB300": 2500, "GB10": 119, "RTX 5070": 61.75,
        "RTX 5090": 209.5, "RTX 5090 D": 148.4, "RTX 5090 D v2": 148.4, "RTX 5090 Laptop": 63.6,
        "RTX PRO 4000 Blackwell": 147, "RTX PRO 6000 Blackwell Server": 504,
        "RTX PRO 6000 Blackwell Max-Q": 438.9, "MI250X GCD": 191.5, "MI300X": 1307.4,
        "MI325X": 1307.4, "MI350X": 2306.9, "MI355X": 2516.6,
    }  # fmt: skip
    for name, rate in printed.items():
        peaks = ACCELERATORS[name].peak.flops_per_s
        assert peaks["fp16"] == approx(rate * 1e12, rel=0.01), name  # makers round: 18 of 18.1
    # fp8 and int8 of NVIDIA's L40 datasheet, without sparsity; of 2,375 of 3,352 AI TOPS.
    limited = 2375 / 3352 * ACCELERATORS["RTX 5090"].peak.flops_per_s["int8"]
    for name, dtype, rate in (
        ("L40", "tf32", 90.5e12), ("L40", "fp8", 362e12), ("L40", "int8", 362e12),
        ("RTX 5090 D", "int8", limited), ("RTX 5090 D v2", "int8", limited),
    ):  # fmt: skip
        assert ACCELERATORS[name].peak.flops_per_s[dtype] == approx(rate, rel=0.005), name


def test_sisters_of_a_chip_differ_by_clock_and_cores():
    """Workstations' and servers' cards have twice a GeForce's 16-bit rate for their fp32."""
    for name, chip in ACCELERATORS.items():
        peaks = chip.peak.flops_per_s
        if chip.architecture in ("turing", "ampere", "ada", "blackwell") and name[:3] == "RTX":
            works = "PRO" in name or "Ada" in name or name[:5] == "RTX A"
            limited = "5090 D" in name
            ratio = peaks["fp16"] / peaks["fp32"]
            turing = chip.architecture == "turing"
            wanted = 148.4 / 104.8 if limited else 4 if works or turing else 2
            assert ratio == approx(wanted, rel=0.02), name


def test_fp32_is_two_flop_a_lane_and_clock():
    """Multiprocessors, their fp32 lanes, boost clock in MHz: the makers' figures agree."""
    published = {
        "GTX 1080 Ti": (128, 1582), "V100 SXM2 32 GB": (64, 1530), "TITAN RTX": (64, 1770),
        "T4": (64, 1590), "A100 SXM 80 GB": (64, 1410), "A10": (128, 1695), "A10G": (128, 1710),
        "RTX 3090": (128, 1695), "L4": (128, 2040), "L40S": (128, 2520), "RTX 4090": (128, 2520),
        "RTX 5090": (128, 2407), "H100 SXM": (128, 1980), "MI300X": (128, 2100),
        "MI250X GCD": (128, 1700),
    }  # fmt: skip
    for name, (lanes, megahertz) in published.items():
        chip = ACCELERATORS[name]
        assert chip.multiprocessors is not None
        rate = 2 * chip.multiprocessors * lanes * megahertz * 1e6
        assert chip.peak.flops_per_s["fp32"] == approx(rate, rel=0.015), name


def test_links_power_and_memory():
    printed = {  # GB/s in both directions
        "V100 SXM2 16 GB": 300, "TITAN RTX": 100, "RTX 3090": 112.5, "A100 SXM 40 GB": 600,
        "H100 SXM": 900, "H100 PCIe": 600, "H200 SXM": 900, "B200": 1800, "GB200": 1800,
        "MI300X": 896,
    }  # fmt: skip
    for name, both in printed.items():
        assert bytes_per_s(ACCELERATORS[name].device_link) == both / 2 * 1e9, name
    for chip in ACCELERATORS.values():
        assert chip.host_link in LINKS
        apple = chip.architecture == "apple"  # no power is published, and macOS keeps a quarter
        assert apple if chip.power_w is None else 40 < chip.power_w <= 1400
        assert chip.power_w not in chip.power_variants_w
        assert chip.memory_bytes % 2**30 == 0
        assert (0.7 if apple else 0.9) < chip.usable_bytes / chip.memory_bytes < 1
        assert chip.usable_source
        assert 10 < chip.memory_bytes / chip.memory_bytes_per_s * 1000 < 700  # ms to read it all
    assert ACCELERATORS["H100 PCIe"].power_variants_w == (300,)
    assert ACCELERATORS["A100 SXM 80 GB"].power_variants_w == (500,)
    for name in ("GTX 1080 Ti", "RTX 4090", "RTX 5090", "A10G", "L4", "L40S", "V100 PCIe 32 GB"):
        assert ACCELERATORS[name].device_link is None, name


def test_what_a_driver_leaves_is_what_torch_quotes():
    quoted = {"A100 SXM 80 GB": 79.25, "H100 SXM": 79.11, "RTX 4090": 23.64, "T4": 14.56}
    for name, gib in quoted.items():
        chip = ACCELERATORS[name]
        assert chip.usable_bytes == approx(gib * 2**30)
        assert f"{gib:g} GiB capacity, github.com/" in chip.usable_source
    unknown = ACCELERATORS["MI300X"]
    assert (
        unknown.usable_bytes == approx(0.985 * 192 * 2**30) and "assumed" in unknown.usable_source
    )
