"""How long a device takes for a matmul."""

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.catalog.accelerators import ACCELERATORS
from outpace.planner.hardware.device import (
    DeviceRates,
    dtype_of,
    items,
    matmul_s,
    of_accelerator,
    sustained_matmul_s,
)
from outpace.planner.plan_columns import PRECISIONS

# 100 multiprocessors of tiles of 128 × 128, one TFLOP/s each; memory is no obstacle.
DEVICE = DeviceRates(
    name="test", kind="cuda", memory_bytes=2**30, peak_flops_per_s={"bf16": 1e14},
    best_flops_per_s={"bf16": 1e14}, multiprocessors=100, tiles=((128, 128, 1.0),), fixed_s=0.0,
    memory_bytes_per_s=1e30, operator_s=0.0, attention_forward=1.0, attention_backward=1.0,
    attention_narrow=1.0, host_bytes_per_s=1e9, host_memory_bytes_per_s=1e9, disk_bytes_per_s=1e9,
)  # fmt: skip
SIDES = st.integers(1, 20_000)
ROWS = st.integers(1, 2_500).map(lambda count: 8 * count)  # in 16 bits, multiples of 16 bytes


def took(device, m, n, k, batch=1.0, item=2.0):
    arrays = (np.asarray([x], float) for x in (m, n, k))
    rate = np.asarray([device.best_flops_per_s["bf16"]])
    return float(matmul_s(device, rate, *arrays, np.asarray([item]), batch)[0])


def test_waves_make_a_saw():
    wave_s = 2 * 128 * 128 * 4096 / 1e12  # a tile on one multiprocessor
    tiles = [90, 99, 100, 101, 150, 200, 201]
    seconds = [took(DEVICE, 128 * count, 128, 4096) for count in tiles]
    # A wave of 100 tiles takes as long as one of 90. With one tile more, each is split into 8 parts
    # over k, whose sums take a microsecond: 808 parts are 9 waves of an eighth.
    assert seconds[:3] == pytest.approx([wave_s] * 3)
    assert seconds[3] == pytest.approx(9 / 8 * wave_s + 1e-6)
    assert seconds[5] == pytest.approx(2 * wave_s)
    reached = [2 * 128 * 128 * 4096 * count / s for count, s in zip(tiles, seconds, strict=True)]
    assert reached[2] == pytest.approx(1e14)
    assert reached[2] > reached[1] > reached[0] and reached[2] > 1.1 * reached[3]
    assert reached[3] < reached[4] < reached[5] > reached[6]


def test_tiles_at_the_edge_are_whole_ones():
    assert took(DEVICE, 12801, 128, 4096) == pytest.approx(took(DEVICE, 12928, 128, 4096))
    assert took(DEVICE, 128, 128, 65) == pytest.approx(took(DEVICE, 128, 128, 128))


def test_a_matmul_is_bound_by_what_it_moves():
    slow = replace(DEVICE, memory_bytes_per_s=1e9, fixed_s=5e-6)
    moved = 2 * (128 * 64 + 64 * 128 + 128 * 128)
    assert took(slow, 128, 128, 64) == pytest.approx(5e-6 + moved / 1e9)


def test_a_measured_curve_says_what_small_matmuls_reach():
    device = replace(DEVICE, curve=((1e6, 0.1), (1e8, 0.5), (1e10, 1.0)))
    flops = 2 * 100 * 50 * 1000  # 1e7: half way between the points, in logarithms
    assert took(device, 100, 50, 1000) == pytest.approx(flops / (0.3 * 1e14))
    assert took(device, 100, 5, 100) == pytest.approx(1e5 / (0.1 * 1e14))
    assert took(device, 10_000, 5_000, 1000) == pytest.approx(1e11 / 1e14)
    # Of a batch each is by itself.
    assert took(device, 100, 50, 1000, batch=4.0) == pytest.approx(4 * flops / (0.3 * 1e14))


@given(m=SIDES, n=SIDES, k=SIDES, chip=st.sampled_from(sorted(ACCELERATORS)))
def test_no_matmul_is_faster_than_the_best_rate_or_the_memory(m, n, k, chip):
    device = of_accelerator(ACCELERATORS[chip])
    device = replace(device, best_flops_per_s={"bf16": device.rate("bf16")})
    seconds = took(device, m, n, k)
    assert np.isfinite(seconds)
    assert seconds >= 2 * m * n * k / device.best_flops_per_s["bf16"]
    assert seconds >= 2 * (m * n + n * k + m * k) / device.memory_bytes_per_s


@given(m=SIDES, n=ROWS, k=ROWS, more=st.integers(0, 400))
def test_a_larger_matmul_never_takes_less(m, n, k, more):
    device = of_accelerator(ACCELERATORS["H100 SXM"])
    seconds = took(device, m, n, k)
    assert took(device, m + more, n, k) >= seconds
    assert took(device, m, n + 8 * more, k) >= seconds
    assert took(device, m, n, k + 8 * more) >= seconds


def test_rows_that_are_no_multiple_of_16_bytes_cost():
    device = replace(DEVICE, unaligned=0.5)
    even, odd = (took(device, 12800, 1024, k) for k in (4096, 4095))
    assert odd == pytest.approx(2 * even)
    assert took(device, 12799, 1024, 4096) == pytest.approx(even)  # no row is longer for it
    assert took(device, 12800, 1020, 4096, item=4.0) == pytest.approx(even)


@pytest.mark.parametrize(
    ("shapes", "softmax", "phase", "measured_s"),
    [
        # Written attention in fp16 with 197 keys on an A100 (xformers pull requests 434 and 530):
        # scores and weighted sum; then the gradients of values, weights, queries and keys.
        ([(197, 197, 64), (197, 64, 197)], 2, 0, 1731.0e-6),
        ([(197, 197, 64), *3 * [(197, 64, 197)]], 3, 1, 4737.1e-6),
    ],
    ids=["forward", "backward"],
)  # fmt: skip
def test_batched_matmuls_of_unaligned_rows_on_an_a100(shapes, softmax, phase, measured_s):
    """Also (384, 1024, 1024) by (384, 1024, 140) in bf16 (pytorch issue 83272)."""
    device = of_accelerator(ACCELERATORS["A100 SXM 40 GB"])
    device = replace(device, unaligned=device.unaligned_batches[phase])
    seconds = sum(took(device, *shape, batch=1024.0) for shape in shapes)
    seconds += 1024 * 197 * 197 * 2 * softmax / device.memory_bytes_per_s
    assert seconds == pytest.approx(measured_s, rel=0.3)
    assert took(device, 1024, 140, 1024, batch=384.0) == pytest.approx(9.232e-3, rel=0.3)


def test_a_dtype_that_a_chip_has_not_is_computed_in_the_next_wider():
    pascal = of_accelerator(ACCELERATORS["GTX 1080 Ti"])
    assert pascal.rate("bf16") == pascal.rate("fp32")
    turing = of_accelerator(ACCELERATORS["TITAN RTX"])
    assert turing.rate("bf16") == turing.rate("fp16") > turing.rate("fp32")
    with pytest.raises(KeyError):
        replace(DEVICE, best_flops_per_s={"fp8": 1.0}).rate("bf16")


# The half of the shapes that no curve was fitted to, every few of them (README there).
TABLE = Path(__file__).parents[3] / "benchmarks" / "data" / "matmuls.csv"
CHIPS = ("A100 SXM 80 GB", "H100 SXM", "H200 SXM", "B200", "GB200", "GB300", "B300", "L40S",
         "RTX PRO 6000 Blackwell Server")  # fmt: skip


@pytest.mark.parametrize("chip", CHIPS)
def test_matmuls_take_what_was_measured(chip):
    with TABLE.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["chip"] == chip]
    device = of_accelerator(ACCELERATORS[chip])
    m, n, k, seconds = (
        np.array([float(row[name]) for row in rows]) for name in ("m", "n", "k", "latency_us")
    )
    rate = np.full(len(rows), device.rate("bf16"))
    found = matmul_s(device, rate, m, n, k, np.full(len(rows), 2.0)) * 1e6
    assert len(rows) == 40 and np.abs(found / seconds - 1).mean() <= 0.12
    assert abs((found / seconds - 1).mean()) <= 0.06


def test_a_training_load_holds_matmuls_down():
    # For a second and more, aiconfigurator 095f58a5, vllm 0.22.0: H200 4096 × 7168 × 12288 in
    # 1,016.5 µs, B200 32768 × 2560 × 2048 in 263 µs; a small one is not slower.
    for chip, shape, taken_us in (
        ("H200 SXM", (4096, 7168, 12288), 1016.5), ("B200", (32768, 2560, 2048), 263.0)
    ):  # fmt: skip
        device = of_accelerator(ACCELERATORS[chip])
        asked = [np.array([float(side)]) for side in shape]
        rate, item = np.array([device.rate("bf16")]), np.array([2.0])
        held = sustained_matmul_s(device, rate, *asked, item)[0]
        assert held == pytest.approx(taken_us * 1e-6, rel=0.08)
        assert held > 1.05 * matmul_s(device, rate, *asked, item)[0]
        small = [np.array([512.0])] * 3
        both = (
            matmul_s(device, rate, *small, item),
            sustained_matmul_s(device, rate, *small, item),
        )
        assert both[0] == both[1]


def test_a_board_of_less_power_sustains_less():
    full, less = (
        of_accelerator(ACCELERATORS[name]) for name in ("H100 SXM", "H100 SXM 96 GB 500 W")
    )
    assert less.rate("bf16") == full.rate("bf16")  # for a moment
    assert less.sustained / full.sustained == pytest.approx((500 / 700) ** (1 / 3))
    assert of_accelerator(ACCELERATORS["H100 PCIe"]).sustained == full.sustained
    # Attention also draws as much as the board may.
    ratio = less.attention_rates["bf16"] / full.attention_rates["bf16"]
    assert ratio == pytest.approx((500 / 700) ** (1 / 3))


def test_measured_matmuls_correct_those_near_them():
    point = (12800.0, 1024.0, 4096.0, 1.5)
    device = replace(DEVICE, measured_ratios={"bf16": (point, (128.0, 128.0, 128.0, 1.0))})
    assert took(device, 12800, 1024, 4096) == pytest.approx(
        1.5 * took(DEVICE, 12800, 1024, 4096), rel=1e-3
    )
    assert took(device, 128, 128, 128) == pytest.approx(took(DEVICE, 128, 128, 128), rel=1e-3)
    near = took(device, 12800, 2048, 4096) / took(DEVICE, 12800, 2048, 4096)
    assert 1.4 < near < 1.5


def test_numbers_have_the_bytes_of_their_precision():
    sizes = dict(zip(PRECISIONS, items(np.arange(len(PRECISIONS))), strict=True))
    assert (sizes["fp64"], sizes["fp32"], sizes["bf16"], sizes["fp16-master"]) == (8, 4, 2, 2)
    assert dtype_of("bf16-pure") == "bf16" and dtype_of("fp64") == "fp32"


@pytest.mark.parametrize("name", sorted(ACCELERATORS))
def test_every_chip_of_the_catalog_has_rates(name):
    device = of_accelerator(ACCELERATORS[name])
    assert device.sources and device.memory_bytes
    for dtype, best in device.best_flops_per_s.items():
        assert 0.3 < best / device.peak_flops_per_s[dtype] <= 1
    for rate in (device.memory_bytes_per_s, device.host_bytes_per_s, device.disk_bytes_per_s):
        assert 1e8 < rate < ACCELERATORS[name].memory_bytes_per_s


@pytest.mark.parametrize(
    ("chip", "alone", "apart"),
    [("H100 SXM", 1.1, 1.9), ("B200", 1.07, 1.7), ("RTX 5090", 1.07, 1.9), ("L40S", 1.05, 2.1)],
)
def test_uneven_loads_slow_experts_as_measured_on_their_chip(chip, alone, apart):
    """CUTLASS's grouped matmuls, by a power law of 1.2 over a balanced load."""
    assert of_accelerator(ACCELERATORS[chip]).uneven_experts == (alone, apart)


def test_only_blackwell_of_data_centers_multiplies_fp8_in_any_layout():
    chips = ("H100 SXM", "RTX 5090", "MI300X", "B200", "GB300")
    found = [of_accelerator(ACCELERATORS[chip]).any_fp8_layout for chip in chips]
    assert found == [False, False, False, True, True]
