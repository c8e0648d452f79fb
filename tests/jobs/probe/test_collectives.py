"""Probing between ranks over gloo: what is measured, checked, and said when a rank dies."""

import json
import re
import subprocess
import sys
from itertools import chain
from pathlib import Path
from statistics import median

import pytest

from outpace.probing.collectives.overlap import OVERLAPPED
from outpace.probing.timing.link_model import COLLECTIVES, bus_factor
from outpace.records.figure import Figure

RANKS = Path(__file__).with_name("collectives_ranks.py")
FORKED = Path(__file__).parents[2] / "parallel" / "forked.py"

pytestmark = pytest.mark.gloo


@pytest.mark.slow
def test_two_nodes_of_two_ranks_are_measured_on_every_axis(on_ranks):
    said = on_ranks(4, RANKS, "probe", 2, "-")
    figures = [Figure.parse(one, "a figure") for one in said["figures"]]
    times = [f for f in figures if f.key.what == "time"]
    for axis, ranks in (("all", 4), ("node", 2), ("across", 2)):
        for name in COLLECTIVES:
            of = [f for f in times if f.key.kind == name and f.key.has(axis=axis)]
            sizes = [int(f.key.of["bytes"]) for f in of]
            assert len(set(sizes)) == len(sizes) >= 3, (axis, name)
            # 4 B, or as many as there are ranks, where each has a part
            assert sizes[0] == 4 * (ranks if name in COLLECTIVES[1:4] else 1)
            assert all(f.key.has(ranks=ranks, backend="gloo", device="cpu") for f in of)
            assert all(f.unit == "s" and len(f.rounds) >= 5 for f in of)
    pairs = {f.key.of["axis"] for f in times if f.key.kind == "send/recv"} - {
        "all",
        "node",
        "across",
    }
    assert pairs == {"pair 0-1", "pair 2-3", "pair 0-2"}
    hidden = [f for f in figures if f.key.what == "hidden share"]
    assert [f.key.of["collective"] for f in hidden] == list(OVERLAPPED)
    for of in hidden:
        name = of.key.of["collective"]
        took = {
            f.key.what: f
            for f in figures
            if f.key.kind == "overlap" and name in (f.key.what, f.key.of.get("collective"))
        }
        parts = [chain(*took[what].rounds) for what in ("computing", name, "both")]
        for computing, alone, both, share in zip(*parts, chain(*of.rounds), strict=True):
            assert min(computing, alone, both) > 0
            assert share == pytest.approx((computing + alone - both) / min(computing, alone))
        if all(took[what].value for what in ("computing", name, "both")):
            assert any(f"ms of {name} take" in word for word in said["said"])
    own = {(f.key.what, f.key.of["rank"]) for f in figures if f.key.kind == "ranks"}
    assert own == {(what, rank) for what in ("matmuls", "memory") for rank in range(4)}
    assert any("400 Gbit/s" in text or "is unknown" in text for text in said["advice"])
    assert any("at least 4" in note for note in said["notes"])
    assert said["told"] == sorted(said["told"]) and said["told"][-1] == 1.0
    assert said["fits"]


@pytest.mark.slow
def test_only_one_collective_is_measured_when_it_is_asked_for(on_ranks):
    said = on_ranks(2, RANKS, "probe", 1, "all-reduce")
    assert {one["key"]["kind"] for one in said["figures"]} == {"all-reduce"}
    assert [fit["collective"] for fit in said["fits"]] == ["all-reduce"]
    (fit,) = said["fits"]
    assert fit["bandwidth"]["rounds"] and fit["latency"]["rounds"]
    assert any("one node" in note for note in said["notes"])


def test_a_wrong_value_on_one_rank_is_said_by_all(on_ranks):
    for said in on_ranks(3, RANKS, "spoil"):
        after = said.pop("after")
        assert set(after) == set(COLLECTIVES)
        for name, wrong in after.items():
            assert wrong.startswith(name) and "wrong after the timing: rank 1: element" in wrong
        assert set(said) == set(COLLECTIVES)  # nothing is wrong where nothing is spoilt
        for name, wrong in said.items():
            assert set(wrong) == {name}
            assert "rank 1: element" in wrong[name]


def lost(how, folder):
    """What the ranks say when something happens to rank 2, by rank; and what is on stderr."""
    command = [sys.executable, str(FORKED), "4", str(RANKS), "die", str(folder), how]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = {
        int(path.name): json.loads(path.read_text(encoding="utf-8")) for path in folder.iterdir()
    }
    return said, done.stderr


@pytest.mark.parametrize(
    ("how", "said_of_it"),
    [
        ("die", "rank 2 on .* is gone: check its last output"),
        pytest.param(
            "hang",
            "rank 2 on .* has not arrived: .* in deadly: time.sleep",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_lost_rank_is_said_by_the_others_with_what_they_were_at(how, said_of_it, tmp_path):
    """A dead rank at once, long before the 600 s that ranks wait for others; a hung one then."""
    found, stderr = lost(how, tmp_path)
    assert "rank 2: died without a word" in stderr
    assert set(found) == {0, 1, 3}
    for said in found.values():
        assert said["text"].startswith("RankLostError: all-reduce"), said
        assert "over the axis all" in said["text"]
        assert re.search(said_of_it, said["text"])
        assert said["after_s"] < 300


@pytest.mark.slow
def test_what_fails_by_itself_is_not_taken_for_a_lost_rank(tmp_path):
    found, _ = lost("fail", tmp_path)
    assert [said["text"] for said in found.values()] == 4 * [
        "RuntimeError: the backend cannot do this"
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "size", "seconds"),
    [(2, 1 << 20, 8), (2, 1 << 16, 100), (4, 1 << 16, 100), (4, 1 << 20, 100)],
)
def test_busbw_is_what_a_plain_loop_by_hand_gives(on_ranks, ranks, size, seconds):
    """The figure that is recorded; both are timed by turns, so that what disturbs one does both."""
    said = on_ranks(ranks, RANKS, "beside", size, seconds)
    figure = Figure.parse(said["figure"], "a figure")
    if figure.value is None or said["half_width"] > 0.035:
        pytest.skip(
            f"this machine is too busy to tell 5 %: rounds' ratio is known to "
            f"± {said['half_width']:.1%}; {figure.unstable or 'the figure is stable'}"
        )
    # nccl-tests, doc/PERFORMANCE.md
    by_hand = size / median(said["by_hand_s"]) * 2 * (ranks - 1) / ranks
    recorded = bus_factor("all-reduce", ranks) * int(figure.key.of["bytes"]) / figure.value
    assert recorded == pytest.approx(by_hand, rel=0.05)
