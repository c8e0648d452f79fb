"""The picture of a load: what a person reads must be what was seen."""

import io

from rich.console import Console

from outpace.records.utilisation import DeviceLoad, HostLoad, Load, series
from outpace.reporting.terminal.utilisation import View, averages_table, closing_text, sparkline

GIB = 2**30


def load(busy: float, **of_second) -> Load:
    first = DeviceLoad(
        index=0, name="NVIDIA A", memory_total_bytes=80 * GIB, utilisation=busy,
        run_utilisation=0.5, memory_bytes=61 * GIB, run_memory_bytes=60 * GIB, power_w=612.0,
        pcie_rx_bytes_per_s=1.2e9, pcie_tx_bytes_per_s=3e8,
    )  # fmt: skip
    second = DeviceLoad(index=1, name="NVIDIA B", utilisation=0.97, **of_second)
    host = HostLoad(cores=(0.25, 0.75), run_cores=1.25, memory_total_bytes=16 * GIB,
                    memory_bytes=4 * GIB)  # fmt: skip
    return Load(duration_s=1.0, devices=(first, second), host=host)


def shown(what, width: int = 80) -> str:
    console = Console(width=width)
    with console.capture() as seen:
        console.print(what)
    return seen.get()


def test_a_sparkline_averages_evenly_and_leaves_gaps_where_nothing_is_known():
    assert sparkline([0.0, 0.5, 1.0], 8) == "▁▅█"
    assert sparkline([0.0, 1.0, 1.0, 1.0, 0.0, 0.0], 3) == "▅█▁"
    assert sparkline([None, 1.0, None, None], 4) == " █  "
    assert len(sparkline([0.3] * 1000, 24)) == 24
    assert sparkline([], 8) == ""


def test_a_device_that_the_run_does_not_use_is_counted_and_not_listed():
    text = shown(averages_table([load(0.9, run_memory_bytes=0)]))
    assert "GPU 0" in text and "90.0 %" in text and "NVIDIA B" not in text
    assert "1 more device, not used by the run" in text
    assert "GPU 0: PCIe in 1.20, out 0.30 GB/s; NVLink n/a; NVIDIA A" in text
    assert "NVIDIA B" in shown(averages_table([load(0.9)]))  # cannot be told apart: it is shown


def test_the_whole_device_and_the_run_stand_beside_each_other_in_80_columns():
    lines = shown(averages_table([load(0.9), load(0.9).model_copy(update={"node": 1})]))
    assert "…" not in lines
    row = next(line for line in lines.splitlines() if line.startswith("host 0: GPU 0"))
    assert row.split() == [
        "host", "0:", "GPU", "0", "90.0", "%", "50.0", "%", "61.0", "/", "80.0", "GiB", "60.00",
        "GiB", "612", "W",
    ]  # fmt: skip
    assert "host 1: 2 cores" in lines and "1.25 cores" in lines


def test_the_closing_table_has_the_course_and_what_the_watching_took():
    seen = series(
        [load(0.0), load(0.5), load(1.0)],
        started="2026-01-01T00:00:00+00:00",
        period_s=1.0,
        sampler_cpu_s=0.003,
    )
    text = shown(closing_text(seen, 100), 100)
    assert "▁▅█" in text and "50.0 %" in text
    assert "over 3.00 s, a sample every 1.00 s; watching took 0.10 % of one core" in text


def test_where_nobody_watches_live_there_are_plain_lines_now_and_then():
    console = Console(width=200, force_terminal=False)
    with console.capture() as seen:
        view = View(console, 1.0)
        for _ in range(5):  # at once: too soon for a second line
            view.show(load(0.9), "step 3/7")
        view.close()
    assert seen.get().splitlines() == [
        "0:00  GPU 0 90.0 % (run 50.0 %) 61.0 / 80.0 GiB (run 60.00 GiB) 612 W  "
        "GPU 1 97.0 % n/a  2 cores 50.0 % (run 1.25 cores) 4.0 / 16.0 GiB  step 3/7"
    ]


def test_the_live_picture_is_not_cut_in_100_columns_and_is_taken_away():
    terminal = io.StringIO()
    console = Console(width=100, force_terminal=True, color_system=None, file=terminal)
    view = View(console, 1.0)
    view.show(load(0.2))
    terminal.seek(0), terminal.truncate()
    view.show(load(0.8), "step 3/7  loss 1.0", "bar 37")
    picture = terminal.getvalue()
    view.close()
    ended = terminal.getvalue()[len(picture) :]
    assert ended.count("\x1b[2K") >= picture.count("\n")  # each line is cleared
    for words in ("GPU 0", "80.0 %", "50.0 %", "core 1", "75.0 %", "step 3/7", "bar 37", "612 W"):
        assert words in picture
    assert "…" not in picture
