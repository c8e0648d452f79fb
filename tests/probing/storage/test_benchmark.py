import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from outpace.probing.storage.advice import advice_of
from outpace.probing.storage.benchmark import probe_storage, storage_cases
from outpace.probing.storage.disk import BLOCK_PAGES, PAGE_BYTES, PageFile, in_memory, require_room
from outpace.probing.timing.interleave import run_turns
from outpace.probing.timing.measure import WrongResultError
from outpace.records.errors import BadInputError
from outpace.records.figure import Figure, Key

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="direct I/O of Linux")
MEMORY = Path("/dev/shm")


def names(directory):
    return [path.name for path in directory.iterdir()]


@pytest.fixture
def pages(tmp_path):
    file = PageFile(tmp_path, 2 * BLOCK_PAGES, 0.0, lanes=2)
    yield file
    file.close()


def test_each_case_moves_what_it_says_and_nothing_is_left(tmp_path):
    with storage_cases(tmp_path, "checkpoints", quick=True) as disk:
        (there,) = names(tmp_path)
        assert there.startswith(".outpace-probe-")
        for case in disk.cases:
            assert case.check(case.make()()) is None
            assert str(tmp_path) not in str(case.key)
            assert case.key.has(directory="checkpoints")
    assert names(tmp_path) == []
    whats = {case.key.what for case in disk.cases}
    assert whats == {
        "sequential read", "sequential write", "random read", "random write",
        "buffered write and fsync", "fsync", "create and rename",
    }  # fmt: skip
    assert {case.key.of["queue"] for case in disk.cases if "queue" in case.key.of} == {1, 4, 16}


def test_it_goes_past_the_cache_or_says_that_it_does_not(pages):
    direct = bool(fcntl.fcntl(pages.descriptor, fcntl.F_GETFL) & os.O_DIRECT)
    assert pages.direct == direct
    if not direct:
        pytest.skip("this file system has no direct I/O")
    before = fetched_bytes()
    for _ in range(3):
        pages.read(0, 0, BLOCK_PAGES)
    assert fetched_bytes() - before == 3 * BLOCK_PAGES * PAGE_BYTES


def fetched_bytes():
    """What this process had the storage layer fetch."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


def test_pages_that_are_wrong_are_found_out(tmp_path, pages):
    pages.read(0, 0, BLOCK_PAGES)
    pages.read(1, BLOCK_PAGES + 7, 1)
    number = pages.write(0, 3, 4)
    assert pages.find_error(1, 3, 4, number) is None
    assert "earlier write" in pages.find_error(1, 3, 5, number)
    plain = os.open(f"/proc/self/fd/{pages.descriptor}", os.O_RDWR)
    try:
        page = os.pread(plain, PAGE_BYTES, 5 * PAGE_BYTES)
        os.pwrite(plain, page, 9 * PAGE_BYTES)  # at another page's place
        os.pwrite(plain, bytes(PAGE_BYTES), 20 * PAGE_BYTES)  # never written
        os.pwrite(plain, b"\1", 30 * PAGE_BYTES + 4000)  # a byte of it
        os.fsync(plain)
    finally:
        os.close(plain)
    for bad in (9, 20):
        with pytest.raises(
            WrongResultError, match=f"reading pages {bad} to {bad} returned other pages"
        ):
            pages.read(0, bad, 1)
    pages.read(0, 30, 1)
    assert "differ from the written data" in pages.find_error(0, 30, 1)


def test_where_direct_io_is_refused_it_is_done_without_and_said(tmp_path, monkeypatch):
    real = os.open

    def refusing(path, flags, *more, **named):
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", refusing)
    with storage_cases(tmp_path, "offload", quick=True) as disk:
        moved = [case for case in disk.cases if "queue" in case.key.of]
        assert {case.key.of["direct"] for case in moved} == {"no"}
        assert all(case.check(case.make()()) is None for case in moved)
    if in_memory(tmp_path) is None:
        assert "refuses direct I/O" in disk.notes[0]


@pytest.mark.skipif(
    not MEMORY.is_dir() or in_memory(MEMORY) is None, reason="no file system in memory"
)
def test_memory_is_not_taken_for_a_disk(tmp_path):
    with storage_cases(MEMORY, "offload", quick=True) as disk:
        assert "is in memory (tmpfs)" in disk.notes[0]
        assert all(case.key.of.get("direct", "no") == "no" for case in disk.cases)


def test_what_cannot_be_probed_is_refused(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    require_room(tmp_path, 1)
    with pytest.raises(BadInputError, match="of which a probe uses at most half"):
        require_room(tmp_path, free * 2 // 3)
    with pytest.raises(BadInputError, match="/proc"):
        run_turns(probe_storage({"checkpoints": Path("/proc")}, True, 1.0))


@pytest.mark.slow
def test_a_whole_probe_of_directories_on_one_disk(tmp_path):
    shares = []
    places = {"checkpoints": tmp_path / "runs" / "new", "offload": tmp_path}
    section = run_turns(probe_storage(places, True, 0.1, shares.append))
    assert names(tmp_path) == []
    assert len(section.figures) == 11
    assert all(f.key.of["directory"] == "checkpoints and offload" for f in section.figures)
    assert all(len(f.rounds) >= 5 and min(map(min, f.rounds)) > 0 for f in section.figures)
    assert shares == sorted(shares) and shares[-1] <= 1
    assert any("256.00 MiB" in note or "MiB;" in note for note in section.notes)
    assert section.advice or any("was not steady" in note for note in section.notes)


@pytest.mark.parametrize("quick", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_nothing_is_left_when_it_is_interrupted(tmp_path, quick):
    program = (
        "import sys; from pathlib import Path\n"
        "from outpace.probing.storage.benchmark import probe_storage\n"
        f"list(probe_storage({{'checkpoints': Path(sys.argv[1])}}, {quick}, 60.0))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stderr=subprocess.PIPE, text=True
    )
    try:
        while not names(tmp_path):
            assert process.poll() is None
            time.sleep(0.05)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate()
    finally:
        process.kill()
    assert "KeyboardInterrupt" in said
    assert names(tmp_path) == []


def figure(what, value, unit="B/s", **of):
    of = {"directory": "checkpoints and offload", **of}
    rounds = tuple((value * share,) for share in (0.99, 1.01, 1.0, 0.995, 1.005))
    return Figure(
        key=Key(kind="storage", what=what, of=of), unit=unit, value=value, origin="measured",
        rounds=rounds, low=value * 0.99, high=value * 1.01, level=0.95,
    )  # fmt: skip


def test_advice_says_what_figures_mean():
    figures = [
        figure("buffered write and fsync", 100e6),
        figure("sequential read", 200e6, block_bytes=4 << 20, queue=1),
        figure("sequential read", 400e6, block_bytes=4 << 20, queue=4),
        figure("sequential write", 160e6, block_bytes=4 << 20, queue=1),
        figure("sequential write", 161e6, block_bytes=4 << 20, queue=4),
        figure("fsync", 0.03, "s"),
    ]
    checkpoint, offload, several, fsync = advice_of("checkpoints and offload", figures)
    assert "written in 2 min 0 s" in checkpoint.text and "read in 30.00 s" in checkpoint.text
    # 8 GB at 400 MB/s and 8 GB at 161 MB/s
    assert "1 min 10 s of each step" in offload.text
    assert several.gain == pytest.approx(1.0) and several.of == (figures[1].key, figures[2].key)
    assert "read 400.00 MB/s" in several.text
    assert "30.0 ms" in fsync.text
    unsure = [f.model_copy(update={"value": None, "unstable": "it drifted"}) for f in figures]
    assert advice_of("checkpoints and offload", unsure) == ()
