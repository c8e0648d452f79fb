"""A probe as a person sees it."""

import io

from rich.console import Console

from outpace.probing.timing.measure import figure_of
from outpace.records.figure import Figure, Key
from outpace.records.machine import Machine
from outpace.records.probe_results import Advice, LinkFit, ProbeRecord, Steadiness
from outpace.reporting.terminal.probe import parts_of


def figure(kind, what, value, unit="s", unstable=None, **of):
    return Figure(
        key=Key(kind=kind, what=what, of=of), unit=unit, value=None if unstable else value,
        origin="measured", low=0.9 * value, high=1.1 * value, level=0.95, rounds=((value,),) * 5,
        unstable=unstable,
    )  # fmt: skip


def shown(*figures, **more):
    probed = ProbeRecord(
        date="2026-11-22", versions={}, command="outpace probe", sections=("matmul",), quick=True,
        took_s=1.0, figures=figures, **more,
    )  # fmt: skip
    machine = Machine(host_cores=2, host_memory_bytes=2**34, cpu="a processor", probed=probed)
    console = Console(file=io.StringIO(), width=100)
    for part in parts_of(machine, probed):
        console.print(part)
    return console.file.getvalue()


def test_matmuls_stand_by_shape_and_dtype_with_what_is_published():
    peak = Figure(
        key=Key(kind="matmul", what="peak", of={"dtype": "bf16"}), unit="FLOP/s", value=989e12,
        origin="catalog", source="a datasheet",
    )  # fmt: skip
    of = {"m": 64, "n": 64, "k": 64}
    text = shown(
        figure("matmul", "curve", 2e9, "FLOP/s", dtype="fp32", **of),
        figure("matmul", "curve", 3e9, "FLOP/s", dtype="bf16", unstable="it drifted", **of),
        peak,
    )
    (line,) = [line for line in text.splitlines() if line.startswith("64 × 64 × 64")]
    assert " ".join(line.split()) == "64 × 64 × 64 2.00 GFLOP/s ±10 % unstable"
    assert "989.00 TFLOP/s catalog" in text
    assert "was not steady enough. Of 1 figures: they drifted" in text


def test_figures_that_are_unstable_for_the_same_reason_are_counted_together():
    """The reasons are those that a probe writes now; recorded ones say "may lie"."""
    key = Key(kind="memory", what="copy", of={})
    rounds = ([[1.0], [1.0 + by], [1.0 - by], [1.0], [1.0 + by]] for by in (0.3, 0.4))
    reasons = [figure_of(key, "s", samples).unstable for samples in rounds]
    assert reasons[0] == "a repeat may differ by 249% of its median"
    assert reasons[1] == "a repeat may differ by 331% of its median"
    reasons.append("a repeat may lie 30% of its median away")
    text = shown(*(figure("memory", "copy", 1.0, unstable=why, bytes=number)
                   for number, why in enumerate(reasons)))  # fmt: skip
    assert "Of 3 figures: a repeat may differ by more than a quarter" in " ".join(text.split())
    points = figure("overlap", "hidden share", 1.0, unstable="a repeat may differ by 18 points")
    assert "Of 1 figures: a repeat may differ by more than 15 points" in " ".join(
        shown(points).split()
    )


def test_collectives_stand_by_size_with_both_bandwidths():
    of = {"axis": "all", "backend": "gloo", "device": "cpu", "ranks": 4}
    text = shown(*(figure("all-reduce", "time", size / 1e9, bytes=size, **of)
                   for size in (10**6, 10**9)))  # fmt: skip
    rows = [line for line in text.splitlines() if "GB/s" in line]
    assert len(rows) == 2
    assert all("1.00 GB/s" in row and "1.50 GB/s" in row for row in rows)


def test_what_hides_stands_by_collective():
    figures = [
        figure("overlap", what, 1e-3, axis="all", backend="gloo", bytes=4 << 20, **of)
        for name in ("all-reduce", "all-gather")
        for what, of in (("both", {"collective": name}), (name, {}))
    ]
    said = shown(*figures)
    assert "both, all-reduce, 4 MiB" in said and "all-gather, 4 MiB" in said


def test_how_far_points_are_from_a_withdrawn_fit_is_not_said():
    def fit(unstable):
        latency, bandwidth = (
            figure("all-reduce", what, 1.0, unit, unstable)
            for what, unit in (("latency", "s"), ("bandwidth", "B/s"))
        )
        return LinkFit(collective="all-reduce", axis="all", backend="gloo", device="cpu", ranks=2,
                       latency=latency, bandwidth=bandwidth, residual=0.123)  # fmt: skip

    assert "12.3 %" in shown(fits=(fit(None),))
    assert "12.3 %" not in shown(fits=(fit("others used it"),))


def test_of_many_ranks_the_slowest_are_shown():
    text = shown(*(figure("ranks", "memory", 1 + rank, rank=rank) for rank in range(64)))
    assert "rank 63 " in text
    assert "rank 3 " not in text


def test_disturbance_and_advice_are_said():
    text = shown(
        figure("memory", "copy", 1e9, "B/s", bytes=2**20),
        advice=(Advice(about="heads", text="25 heads of 64 → 20 of 80"),),
        steadiness=Steadiness(warnings=("other programs used 0.7 cores",), throttled=("GPU 0",)),
    )
    assert "! other programs used 0.7 cores" in text
    assert "! GPU 0" in text
    assert "25 heads of 64 → 20 of 80" in text


def test_two_figures_of_one_cell_are_both_shown_and_equal_ones_once():
    """A record that has them is shown all the same: what was measured is not lost over it."""
    one, other = (figure("memory", "copy", rate, "B/s", bytes=2**20) for rate in (1e9, 2e9))
    assert shown(one, one).count("1.00 GB/s") == 1
    assert "1.00 GB/s ±10 % / 2.00 GB/s ±10 %" in " ".join(shown(one, other).split())
