"""`outpace probe`: its sections, interleaved, in one process or on all ranks of a job."""

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from outpace.catalog.accelerators import ACCELERATORS, find_accelerator
from outpace.jobs.defaults import resolve_device
from outpace.jobs.probe.collectives import probe_collectives
from outpace.jobs.probe.notes import find_misconfiguration, peak_notes
from outpace.jobs.probe.request import ProbeRequest
from outpace.jobs.probe.steps import probe_steps
from outpace.jobs.ranks.process_groups import Groups, process_groups, resolve_backend
from outpace.launch import local
from outpace.parallel.rank_objects import gather_objects
from outpace.probing.compute.benchmark import probe_matmul
from outpace.probing.hardware.machine import identify, usable_cores
from outpace.probing.hardware.nvidia_smi import read_if_there
from outpace.probing.hardware.versions import versions
from outpace.probing.loader.benchmark import probe_loader
from outpace.probing.memory.bandwidth import probe_memory
from outpace.probing.storage.benchmark import probe_storage
from outpace.probing.timing.interference import (
    CoreSeconds,
    InterferenceWatch,
    disturbance,
    judge_use,
    record_use,
    total,
    withdraw_values,
)
from outpace.probing.timing.interleave import Turns, interleave_turns, run_turns, wrap_turns
from outpace.probing.timing.measure import rounds_of
from outpace.probing.timing.section import ProbeSection
from outpace.probing.utilisation.gpu_throttling import (
    GpuObservation,
    GpuWatch,
    gpus_disturbed,
    slowed_words,
    watch_gpu,
)
from outpace.records.figure import Figure, Key
from outpace.records.interpreter import PYTHON
from outpace.records.machine import Machine
from outpace.records.probe_results import ProbeRecord, ProgressDisplay, SectionName, Steadiness
from outpace.records.ranks import Ranks
from outpace.training.threads import set_threads

# A rank that is silent for longer is dead or hanging.
_TIMEOUT_S = 60.0
_DRIVER_S = 10.0


def probe_here(request: ProbeRequest, shown: ProgressDisplay) -> Machine:
    """Probe this host, and return the machine with what all sections of the probe measured.

    Sections that need several ranks run in new processes, the others in this process.
    """
    begin_s, steady = time.monotonic(), InterferenceWatch()
    request.check()
    device, notes = _choose_device(request, Ranks())
    here = _ProcessState(request, device, shown, watch_gpu(device, (), _DRIVER_S))
    world_size = _resolve_world_size(request, device) if request.rank_sections() else 1
    found = run_turns(
        interleave_turns(
            *(_probe_local_section(name, here) for name in request.local_sections()),
            *(
                [_probe_in_new_ranks(request.rank_sections(), here, world_size)]
                if request.rank_sections()
                else []
            ),
        )
    )
    steadiness = judge_use([[steady.read_use()]], [*slowed_words(here.seen), *here.slowed])
    section = sum(found, ProbeSection(notes=notes))
    return _build_machine(here, section, steadiness, time.monotonic() - begin_s, world_size)


def probe_ranks(request: ProbeRequest, ranks: Ranks, shown: ProgressDisplay) -> Machine | None:
    """Probe as one of a job's ranks. Return the machine on rank 0, None on others."""
    begin_s, steady = time.monotonic(), InterferenceWatch()
    request.check()
    device, notes = _choose_device(request, ranks)
    set_threads(None, usable_cores(), ranks.local_world_size, os.environ)
    backend = resolve_backend(request.settings.backend, device)
    with process_groups(ranks, device, _TIMEOUT_S, backend) as groups:
        groups.require_one_job()
        gpu = watch_gpu(device, gather_objects(os.getpid(), groups.control), _DRIVER_S)
        here = _ProcessState(request, device, shown, gpu)
        found = run_turns(
            interleave_turns(
                *(
                    _run_turns_on_rank_0(_probe_local_section(name, here), groups)
                    for name in request.local_sections()
                ),
                *(_probe_between_ranks(name, here, groups) for name in request.rank_sections()),
            )
        )
        used = _gather_use_by_host(steady.read_use(), groups)
        slowed = slowed_words(_gather_observations(here.seen, groups))
    if ranks.rank != 0:
        return None
    took_s = time.monotonic() - begin_s
    steadiness = judge_use(used, slowed)
    section = sum(found, ProbeSection(notes=notes))
    return _build_machine(here, section, steadiness, took_s, ranks.world_size, len(used))


def _choose_device(request: ProbeRequest, ranks: Ranks) -> tuple[torch.device, tuple[str, ...]]:
    """Return the device to measure, and notes. Metal has no clock here, so the CPU replaces it."""
    device = resolve_device(request.settings, ranks)
    if device.type != "mps":
        return device, ()
    note = "Metal devices are not measured: all figures are for the CPU"
    return torch.device("cpu"), (note,)


@dataclass(frozen=True)
class _ProcessState:
    """State that all sections of the probe share in one process.

    `seen`: observations of the process's GPU. `slowed`: throttling reported by the ranks that this
    process started.
    """

    request: ProbeRequest
    device: torch.device
    shown: ProgressDisplay
    gpu: GpuWatch | None
    seen: list[GpuObservation] = field(default_factory=list)
    slowed: list[str] = field(default_factory=list)


@dataclass
class _SectionObservations:
    """CPU use and GPU observations, recorded while one section of the probe measures."""

    gpu: GpuWatch | None
    used: list[CoreSeconds] = field(default_factory=list)
    seen: list[GpuObservation] = field(default_factory=list)

    @contextmanager
    def record(self) -> Iterator[None]:
        with record_use(self.used), self.gpu.record(self.seen) if self.gpu else nullcontext():
            yield


def _probe_local_section(name: SectionName, here: _ProcessState) -> Turns[ProbeSection]:
    notes = _SectionObservations(here.gpu)
    section = yield from wrap_turns(_local_turns(name, here), notes.record)
    here.shown(name, 1.0)
    here.seen.extend(notes.seen)
    return _withdraw_if_disturbed(name, section, here.device, [[total(notes.used)]], notes.seen)


def _local_turns(name: SectionName, here: _ProcessState) -> Turns[ProbeSection]:
    request, device, quick = here.request, here.device, here.request.quick
    budget_s, progress = request.budget_s(name), _section_progress(name, here.shown)
    if name == "matmul":
        features = identify(find_accelerator).cpu_features
        tokens = request.tokens()
        return probe_matmul(device, features, request.spec(), quick, budget_s, progress, tokens)
    if name == "memory":
        return probe_memory(device, quick, budget_s, progress)
    if name == "storage":
        return probe_storage(request.directories(), quick, budget_s, progress)
    return probe_loader(request.loader(), quick, budget_s, progress, device)


def _run_turns_on_rank_0(turns: Turns[ProbeSection], groups: Groups) -> Turns[ProbeSection]:
    """Run a section's turns on rank 0 alone, and return the section on all ranks.

    All ranks must call this.
    """
    try:
        while True:
            found = groups.run_on_rank_0(lambda: _take_turn(turns))
            if found is not None:
                return found
            yield
    finally:
        turns.close()


def _take_turn(turns: Turns[ProbeSection]) -> ProbeSection | None:
    """Run one turn of a section; return the section after its last turn, and None before."""
    try:
        next(turns)
    except StopIteration as end:
        found: ProbeSection = end.value
        return found
    return None


def _withdraw_if_disturbed(
    name: SectionName, section: ProbeSection, device: torch.device,
    hosts: Sequence[Sequence[CoreSeconds]], seen: Sequence[GpuObservation],
) -> ProbeSection:  # fmt: skip
    """Withdraw the section's figures if other programs used the hardware or it was throttled.

    Storage and data loading run on the CPU, whatever the device.
    """
    on_gpu = device.type == "cuda" and name not in ("storage", "loader")
    why = gpus_disturbed(seen) if on_gpu else disturbance(hosts)
    return section if why is None else withdraw_values(section, why)


def _section_progress(name: str, shown: ProgressDisplay) -> Callable[[float], None]:
    return lambda share: shown(name, min(share, 0.99))


def _probe_in_new_ranks(
    names: Sequence[SectionName], here: _ProcessState, nproc: int
) -> Turns[ProbeSection]:
    """Probe the sections `names` on `nproc` new ranks of this host.

    The ranks start when the local sections have done half of their rounds. A single rank measures
    only steps.
    """
    request, device, shown = here.request, here.device, here.shown
    for name in names if nproc < 2 else ():
        if name != "steps":
            shown(name, 1.0)
    lonely = nproc < 2 and any(name != "steps" for name in names)
    notes = (
        "one device: no collectives were measured, since there is nothing to communicate",
    ) * lonely
    names = [name for name in names if nproc > 1 or name == "steps"]
    if not names:
        return ProbeSection(notes=notes)
    if request.local_sections():
        for _ in range(rounds_of(request.quick) // 2):
            yield
    for name in names:
        shown(name, 0.0)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the started ranks use the same devices
    settings = request.settings.model_copy(update={"device": device.type})
    with tempfile.TemporaryDirectory(prefix="outpace-") as folder:
        given, out = Path(folder) / "settings.json", Path(folder) / "machine.json"
        given.write_text(settings.model_dump_json(), encoding="utf-8")
        command = [*PYTHON, "-m", "outpace", "probe", *names]
        command += ["--handed-over", str(given), "--out", str(out)]
        command += ["--budget", str(sum(request.budget_s(name) for name in names))]
        local.start(nproc, command + ["--quick"] * request.quick, shown.show_stopping)
        probed = Machine.load(out).probed
    assert probed is not None
    for name in names:
        shown(name, 1.0)
    here.slowed.extend(probed.steadiness.throttled)
    # Published figures are added once, by the process that writes the record.
    measured = tuple(figure for figure in probed.figures if figure.origin != "catalog")
    return ProbeSection(measured, probed.advice, (*notes, *probed.notes), probed.fits)


def _resolve_world_size(request: ProbeRequest, device: torch.device) -> int:
    return request.settings.nproc or _default_nproc(device)


def _default_nproc(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.device_count()
    return min(4, max(2, torch.get_num_threads()))


def _probe_between_ranks(
    name: SectionName, here: _ProcessState, groups: Groups
) -> Turns[ProbeSection]:
    request, progress, device = here.request, _section_progress(name, here.shown), here.device
    quick, budget_s = request.quick, request.budget_s(name)
    if name == "steps":
        turns = probe_steps(groups, device, quick, budget_s, progress)
    else:
        only = "all-reduce" if name == "allreduce" else None
        turns = probe_collectives(groups, device, quick, budget_s, progress, only)
    notes = _SectionObservations(here.gpu)
    found = yield from wrap_turns(turns, notes.record)
    here.shown(name, 1.0)
    here.seen.extend(notes.seen)
    hosts = _gather_use_by_host(total(notes.used), groups)
    seen = _gather_observations(notes.seen, groups)
    return _withdraw_if_disturbed(name, found, device, hosts, seen)


def _gather_observations(seen: Sequence[GpuObservation], groups: Groups) -> list[GpuObservation]:
    """Gather all ranks' GPU observations, labelled by rank: GPU numbers repeat across hosts."""
    rank = groups.ranks.rank
    own = [replace(one, gpu=f"{one.gpu} of rank {rank}") for one in seen]
    return [one for of in gather_objects(own, groups.control) for one in of]


def _gather_use_by_host(used: CoreSeconds, groups: Groups) -> list[list[CoreSeconds]]:
    """Gather all ranks' CPU use, one list per host, by local rank. Collective."""
    hosts: list[list[CoreSeconds]] = []
    for local_rank, one in gather_objects((groups.ranks.local_rank, used), groups.control):
        if local_rank == 0:
            hosts.append([])
        hosts[-1].append(one)
    return hosts


def _build_machine(
    here: _ProcessState, section: ProbeSection, steadiness: Steadiness, took_s: float,
    world_size: int, hosts: int = 1,
) -> Machine:  # fmt: skip
    machine, request = identify(find_accelerator), here.request
    topology = read_if_there(_DRIVER_S) if machine.devices else None
    figures = section.figures + tuple(_catalog_figures(machine))
    settings = [] if request.environ is None else find_misconfiguration(request.environ)
    peaks = peak_notes(figures) if here.device.type == "cuda" else ()
    probed = ProbeRecord(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=versions(),
        command=request.command,
        sections=request.sections,
        quick=request.quick,
        took_s=took_s,
        world_size=world_size,
        hosts=hosts,
        figures=figures,
        fits=section.fits,
        advice=tuple(sorted(section.advice, key=lambda one: -(one.gain or 0.0))),
        notes=(*settings, *peaks, *section.notes, *section.said),
        steadiness=steadiness,
    )
    return machine.model_copy(update={"topology": topology, "probed": probed})


def _catalog_figures(machine: Machine) -> list[Figure]:
    """Return published figures of the first device for comparison: peaks and memory bandwidth."""
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
