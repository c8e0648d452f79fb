"""A rank's memory in words: what fits is judged by what the allocator reserves."""

from rich.console import Console

from outpace.catalog.accelerators import ACCELERATORS
from outpace.records.memory import MemoryAccount, Moment
from outpace.records.plan import Plan
from outpace.records.units import show_bytes
from outpace.reporting.terminal.memory import document, memory_table

DEVICE = ACCELERATORS["H100 SXM"]
GIB = 2**30


def account(reserved_bytes, source="traced", **more):
    peak = Moment(step=2, part="backward", module="blocks.1", operator="aten.mm",
                  by_kind={"weights": 60 * GIB, "activations": 10 * GIB})  # fmt: skip
    return MemoryAccount(
        source=source, device="cuda", rank=0, world_size=1, peak=peak, timeline=(peak,),
        activations_by_module={"blocks.*": 10 * GIB}, reserved_bytes=reserved_bytes, **more,
    )  # fmt: skip


def shown(traced, measured=None):
    console = Console(width=120)
    with console.capture() as seen:
        console.print(memory_table(Plan(), traced, measured, DEVICE))
    return seen.get()


def said(traced):
    return document(
        traced, None, plan=Plan(), model="a", seq_len=8, global_batch=1, accelerator=DEVICE
    )


def test_tensors_that_fit_in_pieces_that_do_not_are_too_much():
    small, large = account(75 * GIB), account(DEVICE.usable_bytes + 3 * GIB)
    assert said(small)["fits"] and not said(large)["fits"]
    assert said(large)["reserved_memory_bytes"] == large.reserved_bytes
    assert ": 3.00 GiB too much" in " ".join(shown(large).split())
    assert " is left;" in " ".join(shown(small).split())


def test_libraries_count_and_the_device_has_what_its_driver_leaves():
    rest = DEVICE.usable_bytes - 75 * GIB
    fits, not_quite = (account(75 * GIB, library_bytes=rest + more) for more in (0, 1))
    assert said(fits)["fits"] and not said(not_quite)["fits"]
    assert said(fits)["device_memory_bytes"] == DEVICE.usable_bytes < DEVICE.memory_bytes
    assert f"Of the {show_bytes(DEVICE.usable_bytes)} available to a process" in shown(fits)


def test_measured_figures_stand_beside_the_traced_ones():
    measured = account(72 * GIB, "measured", allocated_bytes=71 * GIB, unseen_bytes=GIB)
    lines = shown(account(75 * GIB), measured).splitlines()
    rows = {line.split()[0]: line for line in lines if line.strip()}
    assert "70.00 GiB" in rows["tensors"] and "71.00 GiB" in rows["tensors"]
    assert "75.00 GiB" in rows["allocator"] and "72.00 GiB" in rows["allocator"]
    assert rows["unseen"].split()[1:3] == ["1.00", "GiB"]
    assert "The trace is off by -1.41 %." in lines[-1]
