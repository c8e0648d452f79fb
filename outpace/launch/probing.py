"""`outpace probe`: its sections in turns, on one process or on all ranks of a job."""

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from outpace.catalog.accelerators import ACCELERATORS, find_accelerator
from outpace.launch import local
from outpace.launch.collectives import probe_collectives
from outpace.launch.group import Groups, process_groups, resolve_backend
from outpace.launch.probe_wishes import Wishes
from outpace.launch.resolve import resolve_device
from outpace.probe import nvml
from outpace.probe.bandwidth import probe_memory
from outpace.probe.loader import probe_loader
from outpace.probe.machine import identify, usable_cores
from outpace.probe.measure import rounds_of
from outpace.probe.products import probe_matmul
from outpace.probe.section import Section
from outpace.probe.steady import Steady, Used, disturbed, judged, noted, total, withdrawn
from outpace.probe.storage import probe_storage
from outpace.probe.topology import read_if_there
from outpace.probe.turns import Turns, around, finished, together
from outpace.probe.versions import versions
from outpace.records.figure import Figure, Key
from outpace.records.machine import Machine
from outpace.records.probed import Probed, SectionName, Shown, Steadiness
from outpace.records.ranks import Ranks
from outpace.train.threads import set_threads

# A rank that is waited for longer than this has died or hangs.
_TIMEOUT_S = 60.0
_DRIVER_S = 10.0


def probe_here(wishes: Wishes, shown: Shown) -> Machine:
    """Probe this host: its own sections here, those between ranks on processes that are started."""
    begin_s, steady = time.monotonic(), Steady()
    wishes.check()
    device, notes = _device(wishes, Ranks())
    world_size = _world_size(wishes, device) if wishes.between() else 1
    found = finished(
        together(
            *(_alone(name, wishes, device, shown) for name in wishes.alone()),
            *(_started(name, wishes, device, world_size, shown) for name in wishes.between()),
        )
    )
    steadiness = judged([[steady.used()]], _throttled(device))
    section = sum(found, Section(notes=notes))
    return _machine(wishes, section, steadiness, time.monotonic() - begin_s, world_size)


def probe_ranks(wishes: Wishes, ranks: Ranks, restart: int, shown: Shown) -> Machine | None:
    """Probe as one of a job's ranks; the machine on rank 0, None on others."""
    begin_s, steady = time.monotonic(), Steady()
    wishes.check()
    device, notes = _device(wishes, ranks)
    set_threads(None, usable_cores(), ranks.local_world_size)
    backend = resolve_backend(wishes.settings.backend, device)
    with process_groups(ranks, device, _TIMEOUT_S, restart, backend) as groups:
        alone = (_alone(name, wishes, device, shown) for name in wishes.alone())
        found = finished(
            together(
                *(_on_first(turns, groups) for turns in alone),
                *(_between(name, wishes, device, groups, shown) for name in wishes.between()),
            )
        )
        used = _by_host(steady.used(), groups)
    if ranks.rank != 0:
        return None
    took_s = time.monotonic() - begin_s
    steadiness = judged(used, _throttled(device))
    section = sum(found, Section(notes=notes))
    return _machine(wishes, section, steadiness, took_s, ranks.world_size, len(used))


def _device(wishes: Wishes, ranks: Ranks) -> tuple[torch.device, tuple[str, ...]]:
    """What to measure on. Metal devices have no clock here."""
    device = resolve_device(wishes.settings, ranks)
    if device.type != "mps":
        return device, ()
    note = "Metal devices are not measured: all figures are of the processor"
    return torch.device("cpu"), (note,)


def _alone(name: SectionName, wishes: Wishes, device: torch.device, shown: Shown) -> Turns[Section]:
    """What one process probes by itself."""
    budget_s, progress, quick = wishes.budget_s(name), _progress(name, shown), wishes.quick
    if name == "matmul":
        features = identify(find_accelerator).cpu_features
        turns = probe_matmul(device, features, wishes.spec(), quick, budget_s, progress)
    elif name == "memory":
        turns = probe_memory(device, quick, budget_s, progress)
    elif name == "storage":
        turns = probe_storage(wishes.directories(), quick, budget_s, progress)
    else:
        turns = probe_loader(wishes.loader(), quick, budget_s, progress, device)
    used: list[Used] = []
    section = yield from around(turns, lambda: noted(used))
    shown(name, 1.0)
    return _judged(section, device, [[total(used)]])


def _on_first(turns: Turns[Section], groups: Groups) -> Turns[Section]:
    """What rank 0 finds; the others wait, and are given it."""
    try:
        while True:
            found = groups.once(lambda: _next(turns))
            if found is not None:
                return found
            yield
    finally:
        turns.close()


def _next(turns: Turns[Section]) -> Section | None:
    try:
        next(turns)
    except StopIteration as end:
        found: Section = end.value
        return found
    return None


def _judged(section: Section, device: torch.device, hosts: Sequence[Sequence[Used]]) -> Section:
    """As it is, or withdrawn where others used the processor that was measured."""
    why = disturbed(hosts) if device.type == "cpu" else None
    return section if why is None else withdrawn(section, why)


def _progress(name: str, shown: Shown) -> Callable[[float], None]:
    """A part of a section may be done before the section is."""
    return lambda share: shown(name, min(share, 0.99))


def _started(
    name: SectionName, wishes: Wishes, device: torch.device, nproc: int, shown: Shown
) -> Turns[Section]:
    """What lies between ranks, on processes that are started when half of the others is done."""
    if nproc < 2:
        shown(name, 1.0)
        note = "one device: nothing lies between ranks, and no collective ran"
        return Section(notes=(note,))
    if wishes.alone():
        for _ in range(rounds_of(wishes.quick) // 2):
            yield
    shown(name, 0.0)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # ranks measure on the same devices
    settings = wishes.settings.model_copy(update={"device": device.type})
    with tempfile.TemporaryDirectory(prefix="outpace-") as folder:
        given, out = Path(folder) / "settings.json", Path(folder) / "machine.json"
        given.write_text(settings.model_dump_json(), encoding="utf-8")
        command = [sys.executable, "-m", "outpace", "probe", name]
        command += ["--handed-over", str(given), "--out", str(out)]
        command += ["--budget", str(wishes.budget_s(name))]
        local.start(nproc, command + ["--quick"] * wishes.quick, shown.stopping)
        probed = Machine.load(out).probed
    assert probed is not None
    shown(name, 1.0)
    return Section(probed.figures, probed.advice, probed.notes, probed.fits)


def _world_size(wishes: Wishes, device: torch.device) -> int:
    """A process for each device, or for each of some cores."""
    return wishes.settings.nproc or _default_nproc(device)


def _default_nproc(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.device_count()
    return min(4, max(2, torch.get_num_threads()))


def _between(
    name: SectionName, wishes: Wishes, device: torch.device, groups: Groups, shown: Shown
) -> Turns[Section]:
    only = "all-reduce" if name == "allreduce" else None
    turns = probe_collectives(
        groups, device, wishes.quick, wishes.budget_s(name), _progress(name, shown), only
    )
    used: list[Used] = []
    found = yield from around(turns, lambda: noted(used))
    return _judged(found, device, _by_host(total(used), groups))


def _by_host(used: Used, groups: Groups) -> list[list[Used]]:
    """What each host's ranks used; a host begins with its local rank 0."""
    said: list[Any] = [None] * groups.ranks.world_size
    dist.all_gather_object(said, (groups.ranks.local_rank, used), group=groups.control)
    hosts: list[list[Used]] = []
    for local_rank, one in said:
        if local_rank == 0:
            hosts.append([])
        hosts[-1].append(one)
    return hosts


def _throttled(device: torch.device) -> Sequence[str]:
    """Devices of this host that their driver slows down now, after the work."""
    if device.type != "cuda":
        return ()
    gpus, _ = nvml.query(_DRIVER_S)
    return [f"GPU {gpu.index} is slowed down: {', '.join(gpu.throttled_by)}"
            for gpu in gpus if gpu.throttled_by]  # fmt: skip


def _machine(
    wishes: Wishes, found: Section, steadiness: Steadiness, took_s: float, world_size: int,
    hosts: int = 1,
) -> Machine:  # fmt: skip
    machine = identify(find_accelerator)
    topology = read_if_there(_DRIVER_S) if machine.devices else None
    probed = Probed(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=versions(),
        command=wishes.command,
        sections=wishes.sections,
        quick=wishes.quick,
        took_s=took_s,
        world_size=world_size,
        hosts=hosts,
        figures=found.figures + tuple(_from_catalog(machine)),
        fits=found.fits,
        advice=tuple(sorted(found.advice, key=lambda one: -(one.gain or 0.0))),
        notes=found.notes,
        steadiness=steadiness,
    )
    return machine.model_copy(update={"topology": topology, "probed": probed})


def _from_catalog(machine: Machine) -> list[Figure]:
    """What is published of the first device: peaks and memory bandwidth, to stand beside."""
    if not machine.devices or machine.devices[0].accelerator is None:
        return []
    known = ACCELERATORS[machine.devices[0].accelerator]
    figures = [
        Figure(
            key=Key(kind="matmul", what="peak", of={"dtype": dtype}), unit="FLOP/s", value=rate,
            origin="catalog", source=known.peak.source,
        )
        for dtype, rate in known.peak.flops_per_s.items()
    ]  # fmt: skip
    key = Key(kind="memory", what="bandwidth")
    return [*figures, Figure(key=key, unit="B/s", value=known.memory_bytes_per_s, origin="catalog",
                             source=known.source)]  # fmt: skip
