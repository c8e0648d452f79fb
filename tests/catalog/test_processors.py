import pytest

from outpace.catalog.accelerators import find_accelerator
from outpace.catalog.processors import PROCESSORS, flops_per_cycle
from outpace.probing.hardware.machine import identify
from outpace.records.hardware import ValueRange

CASCADE_LAKE = ("avx2", "avx512f", "avx512_vnni")
SAPPHIRE_RAPIDS = (*CASCADE_LAKE, "avx512_bf16", "amx_bf16", "amx_int8")


def test_the_widest_extension_counts():
    assert flops_per_cycle(("avx2",), "fp32") == ValueRange(least=16, most=32)
    assert flops_per_cycle(CASCADE_LAKE, "fp32") == ValueRange(least=32, most=64)
    assert flops_per_cycle(SAPPHIRE_RAPIDS, "bf16") == ValueRange(least=1024, most=1024)
    assert flops_per_cycle(SAPPHIRE_RAPIDS[::-1], "int8") == ValueRange(least=2048, most=2048)
    assert flops_per_cycle(SAPPHIRE_RAPIDS[::-1], "fp32") == ValueRange(least=32, most=64)


def test_what_a_processor_cannot_is_none():
    assert flops_per_cycle(CASCADE_LAKE, "bf16") is None
    assert flops_per_cycle(("asimd", "sve"), "int8") is None
    assert flops_per_cycle((), "fp32") is None
    assert flops_per_cycle(SAPPHIRE_RAPIDS, "fp8") is None


def test_every_extension_has_a_source_and_a_span():
    for processor in PROCESSORS:
        assert processor.source
        assert all(span.least <= span.most for span in processor.flops_per_cycle.values())


def test_what_the_probe_reports_of_this_host_is_understood():
    features = identify(find_accelerator).cpu_features
    if not {"avx2", "asimd"} & set(features):
        pytest.skip("this host's processor reports no vector extension of the catalog")
    span = flops_per_cycle(features, "fp32")
    assert span is not None and span.least >= 8
