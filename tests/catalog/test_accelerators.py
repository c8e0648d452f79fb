import pytest

from outpace.catalog.accelerators import ACCELERATORS, find_accelerator


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
    ],
)
def test_what_drivers_report_is_found(driver_name, memory_bytes, name):
    found = find_accelerator(driver_name, memory_bytes)
    assert found is not None and found.name == name and found is ACCELERATORS[name]


@pytest.mark.parametrize(
    ("driver_name", "memory_bytes"),
    [
        ("NVIDIA GH200 480GB", None),  # has H200 in its name
        ("NVIDIA GeForce RTX 4090 D", None),  # fewer units
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3090", None),
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
        assert "datasheet" in accelerator.peak.source or "whitepaper" in accelerator.peak.source
        assert peaks["fp32"] < peaks["fp16"]
        if "bf16" in peaks:
            assert peaks["bf16"] == peaks["fp16"]
            assert peaks["tf32"] == pytest.approx(peaks["bf16"] / 2, rel=0.001)


def test_chips_before_ampere_have_no_bf16():
    for name in ("V100 SXM2 16 GB", "T4"):
        assert "bf16" not in ACCELERATORS[name].peak.flops_per_s
