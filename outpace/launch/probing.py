"""`outpace probe`: its sections in turns, on one process or on all ranks of a job."""

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from outpace.catalog.accelerators import ACCELERATORS, find_accelerator
from outpace.launch import local
from outpace.launch.collectives import probe_collectives
from outpace.launch.group import Groups, process_groups, resolve_backend
from outpace.launch.probe_settings import misconfigured, peak_notes
from outpace.launch.probe_wishes import Wishes
from outpace.launch.resolve import resolve_device
from outpace.launch.steps import probe_steps
from outpace.probe.bandwidth import probe_memory
from outpace.probe.gpu_watch import GpuWatch, Seen, gpus_disturbed, slowed_words, watch_gpu
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
from outpace.records.python import PYTHON
from outpace.records.ranks import Ranks
from outpace.train.threads import set_threads

# A rank that is waited for longer than this has died or hangs.
_TIMEOUT_S = 60.0
_DRIVER_S = 10.0

T = TypeVar("T")


def probe_here(wishes: Wishes, shown: Shown) -> Machine:
    """Probe this host: its own sections here, those between ranks on processes that are started."""
    begin_s, steady = time.monotonic(), Steady()
    wishes.check()
    device, notes = _device(wishes, Ranks())
    here = _Here(wishes, device, shown, watch_gpu(device, (), _DRIVER_S))
    world_size = _world_size(wishes, device) if wishes.between() else 1
    found = finished(
        together(
            *(_alone(name, here) for name in wishes.alone()),
            *([_started(wishes.between(), here, world_size)] if wishes.between() else []),
        )
    )
    steadiness = judged([[steady.used()]], [*slowed_words(here.seen), *here.slowed])
    section = sum(found, Section(notes=notes))
    return _machine(here, section, steadiness, time.monotonic() - begin_s, world_size)


def probe_ranks(wishes: Wishes, ranks: Ranks, restart: int, shown: Shown) -> Machine | None:
    """Probe as one of a job's ranks; the machine on rank 0, None on others."""
    begin_s, steady = time.monotonic(), Steady()
    wishes.check()
    device, notes = _device(wishes, ranks)
    set_threads(None, usable_cores(), ranks.local_world_size, os.environ)
    backend = resolve_backend(wishes.settings.backend, device)
    with process_groups(ranks, device, _TIMEOUT_S, restart, backend) as groups:
        gpu = watch_gpu(device, _gathered(os.getpid(), groups), _DRIVER_S)
        here = _Here(wishes, device, shown, gpu)
        found = finished(
            together(
                *(_on_first(_alone(name, here), groups) for name in wishes.alone()),
                *(_between(name, here, groups) for name in wishes.between()),
            )
        )
        used = _by_host(steady.used(), groups)
        slowed = slowed_words(_of_all(here.seen, groups))
    if ranks.rank != 0:
        return None
    took_s = time.monotonic() - begin_s
    steadiness = judged(used, slowed)
    section = sum(found, Section(notes=notes))
    return _machine(here, section, steadiness, took_s, ranks.world_size, len(used))


def _device(wishes: Wishes, ranks: Ranks) -> tuple[torch.device, tuple[str, ...]]:
    """What to measure on. Metal devices have no clock here."""
    device = resolve_device(wishes.settings, ranks)
    if device.type != "mps":
        return device, ()
    note = "Metal devices are not measured: all figures are of the processor"
    return torch.device("cpu"), (note,)


@dataclass(frozen=True)
class _Here:
    """What all sections of a process share.

    `seen`: of its GPU, by all of them. `slowed`: what processes that it started say of theirs.
    """

    wishes: Wishes
    device: torch.device
    shown: Shown
    gpu: GpuWatch | None
    seen: list[Seen] = field(default_factory=list)
    slowed: list[str] = field(default_factory=list)


@dataclass
class _Notes:
    """What else the machine did in one section's turns."""

    gpu: GpuWatch | None
    used: list[Used] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)

    @contextmanager
    def taken(self) -> Iterator[None]:
        with noted(self.used), self.gpu.noted(self.seen) if self.gpu else nullcontext():
            yield


def _alone(name: SectionName, here: _Here) -> Turns[Section]:
    """What one process probes by itself."""
    notes = _Notes(here.gpu)
    section = yield from around(_turns(name, here), notes.taken)
    here.shown(name, 1.0)
    here.seen.extend(notes.seen)
    return _judged(name, section, here.device, [[total(notes.used)]], notes.seen)


def _turns(name: SectionName, here: _Here) -> Turns[Section]:
    wishes, device, quick = here.wishes, here.device, here.wishes.quick
    budget_s, progress = wishes.budget_s(name), _progress(name, here.shown)
    if name == "matmul":
        features = identify(find_accelerator).cpu_features
        tokens = wishes.tokens()
        return probe_matmul(device, features, wishes.spec(), quick, budget_s, progress, tokens)
    if name == "memory":
        return probe_memory(device, quick, budget_s, progress)
    if name == "storage":
        return probe_storage(wishes.directories(), quick, budget_s, progress)
    return probe_loader(wishes.loader(), quick, budget_s, progress, device)


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


def _judged(
    name: SectionName, section: Section, device: torch.device, hosts: Sequence[Sequence[Used]],
    seen: Sequence[Seen],
) -> Section:  # fmt: skip
    """As it is, or withdrawn where others used what was measured, or it was slowed down.

    Disks and data loading are the processor's work, whatever the device.
    """
    on_gpu = device.type == "cuda" and name not in ("storage", "loader")
    why = gpus_disturbed(seen) if on_gpu else disturbed(hosts)
    return section if why is None else withdrawn(section, why)


def _progress(name: str, shown: Shown) -> Callable[[float], None]:
    """A part of a section may be done before the section is."""
    return lambda share: shown(name, min(share, 0.99))


def _started(names: Sequence[SectionName], here: _Here, nproc: int) -> Turns[Section]:
    """What lies between ranks, on processes that are started when half of the others is done."""
    wishes, device, shown = here.wishes, here.device, here.shown
    for name in names if nproc < 2 else ():
        if name != "steps":
            shown(name, 1.0)
    lonely = nproc < 2 and any(name != "steps" for name in names)
    notes = ("one device: nothing lies between ranks, and no collective ran",) * lonely
    names = [name for name in names if nproc > 1 or name == "steps"]
    if not names:
        return Section(notes=notes)
    if wishes.alone():
        for _ in range(rounds_of(wishes.quick) // 2):
            yield
    for name in names:
        shown(name, 0.0)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # ranks measure on the same devices
    settings = wishes.settings.model_copy(update={"device": device.type})
    with tempfile.TemporaryDirectory(prefix="outpace-") as folder:
        given, out = Path(folder) / "settings.json", Path(folder) / "machine.json"
        given.write_text(settings.model_dump_json(), encoding="utf-8")
        command = [*PYTHON, "-m", "outpace", "probe", *names]
        command += ["--handed-over", str(given), "--out", str(out)]
        command += ["--budget", str(sum(wishes.budget_s(name) for name in names))]
        local.start(nproc, command + ["--quick"] * wishes.quick, shown.show_stopping)
        probed = Machine.load(out).probed
    assert probed is not None
    for name in names:
        shown(name, 1.0)
    here.slowed.extend(probed.steadiness.throttled)
    # What is published is added once, by the process that writes the record.
    measured = tuple(figure for figure in probed.figures if figure.origin != "catalog")
    return Section(measured, probed.advice, (*notes, *probed.notes), probed.fits)


def _world_size(wishes: Wishes, device: torch.device) -> int:
    """A process for each device, or for each of some cores."""
    return wishes.settings.nproc or _default_nproc(device)


def _default_nproc(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.device_count()
    return min(4, max(2, torch.get_num_threads()))


def _between(name: SectionName, here: _Here, groups: Groups) -> Turns[Section]:
    wishes, progress, device = here.wishes, _progress(name, here.shown), here.device
    quick, budget_s = wishes.quick, wishes.budget_s(name)
    if name == "steps":
        turns = probe_steps(groups, device, quick, budget_s, progress)
    else:
        only = "all-reduce" if name == "allreduce" else None
        turns = probe_collectives(groups, device, quick, budget_s, progress, only)
    notes = _Notes(here.gpu)
    found = yield from around(turns, notes.taken)
    here.shown(name, 1.0)
    here.seen.extend(notes.seen)
    hosts, seen = _by_host(total(notes.used), groups), _of_all(notes.seen, groups)
    return _judged(name, found, device, hosts, seen)


def _gathered(own: T, groups: Groups) -> list[T]:
    """What each rank gives, on all of them."""
    said: list[Any] = [None] * groups.ranks.world_size
    dist.all_gather_object(said, own, group=groups.control)
    return said


def _of_all(seen: Sequence[Seen], groups: Groups) -> list[Seen]:
    """What all ranks saw of their GPUs, each GPU named with its rank: hosts number them alike."""
    rank = groups.ranks.rank
    own = [replace(one, gpu=f"{one.gpu} of rank {rank}") for one in seen]
    return [one for of in _gathered(own, groups) for one in of]


def _by_host(used: Used, groups: Groups) -> list[list[Used]]:
    """What each host's ranks used; a host begins with its local rank 0."""
    hosts: list[list[Used]] = []
    for local_rank, one in _gathered((groups.ranks.local_rank, used), groups):
        if local_rank == 0:
            hosts.append([])
        hosts[-1].append(one)
    return hosts


def _machine(
    here: _Here, found: Section, steadiness: Steadiness, took_s: float, world_size: int,
    hosts: int = 1,
) -> Machine:  # fmt: skip
    machine, wishes = identify(find_accelerator), here.wishes
    topology = read_if_there(_DRIVER_S) if machine.devices else None
    figures = found.figures + tuple(_from_catalog(machine))
    settings = [] if wishes.environ is None else misconfigured(wishes.environ)
    peaks = peak_notes(figures) if here.device.type == "cuda" else ()
    probed = Probed(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=versions(),
        command=wishes.command,
        sections=wishes.sections,
        quick=wishes.quick,
        took_s=took_s,
        world_size=world_size,
        hosts=hosts,
        figures=figures,
        fits=found.fits,
        advice=tuple(sorted(found.advice, key=lambda one: -(one.gain or 0.0))),
        notes=(*settings, *peaks, *found.notes, *found.said),
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
