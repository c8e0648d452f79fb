"""Detection of ranks that stay slower in training than others with the same work."""

import socket
from dataclasses import dataclass
from statistics import median

import torch

from outpace.jobs.train.context import Job
from outpace.jobs.train.utilisation import Recording
from outpace.parallel.rank_objects import gather_objects
from outpace.probing.collectives.stragglers import Slowness, slow_ranks
from outpace.records.plan import Plan
from outpace.records.utilisation import Load
from outpace.training.callbacks import notify
from outpace.training.step import RankReports

# A check takes the median of `_STEPS` steps; `_LOOKS` checks are judged together, then dropped. A
# rank is reported if it is slow in two consecutive judgements: in a long run, some rank would be
# slow once by chance alone.
_STEPS, _LOOKS = 5, 8
_MORE_CORES = 0.25  # cores used by other programs, beyond those on other hosts
_SLOWER_CLOCK = 0.93


@dataclass(frozen=True)
class Facts:
    """Facts that may explain why a rank is slow.

    `others_cores`: number of cores that other programs use.
    """

    host: str
    processor: str
    threads: int
    others_cores: float | None = None
    clock_hz: float | None = None


class Stragglers:
    """Detects stragglers in one run. All ranks see the same times and get the same result."""

    def __init__(self, job: Job, recording: Recording) -> None:
        self._job = job
        self._recording = recording
        self._alike = equal_ranks(job.plan)
        self._steps: list[tuple[float, ...]] = []
        self._looks: list[tuple[float, ...]] = []
        self._before: set[int] = set()
        self._told: set[int] = set()

    def after_step(self, heard: RankReports | None) -> None:
        """Check times after a step. Collective if a straggler is found."""
        if heard is None or not heard.busy_s or not self._alike:
            return
        self._steps.append(heard.busy_s)
        if len(self._steps) < _STEPS:
            return
        self._looks.append(tuple(map(median, zip(*self._steps, strict=True))))
        self._steps = []
        if len(self._looks) < _LOOKS:
            return
        looks, self._looks = self._looks, []
        now: set[int] = set()
        for ranks in self._alike:
            for slow in slow_ranks({rank: [look[rank] for look in looks] for rank in ranks}):
                now.add(slow.who)
                if slow.who in self._before - self._told:
                    self._told.add(slow.who)
                    self._report(slow, ranks)
        self._before = now

    def _report(self, slow: Slowness[int], ranks: tuple[int, ...]) -> None:
        mine = self._facts(), self._recording.latest
        known = _with_loads(gather_objects(mine, self._job.groups.control))
        others = [known[rank] for rank in ranks if rank != slow.who]
        its = known[slow.who]
        notify(
            self._job.callbacks, "on_hint",
            f"rank {slow.who} on {its.host} is a straggler: its own work in a step takes "
            f"{slow.times:.2g} times as long as the others', so they wait for it. "
            f"{cause(its, others)}.",
        )  # fmt: skip

    def _facts(self) -> Facts:
        machine, device = self._job.machine, self._job.device
        at = machine.cpu or "an unknown processor"
        if device.type == "cuda":
            at = machine.devices[device.index or 0].name
        return Facts(socket.gethostname(), at, torch.get_num_threads())


def equal_ranks(plan: Plan) -> list[tuple[int, ...]]:
    """Return groups of ranks that do the same work: pipeline stages with several ranks.

    With parameter servers, there are no such groups.
    """
    if plan.servers:
        return []
    size = plan.world_size // plan.pp
    stages = [tuple(range(stage * size, (stage + 1) * size)) for stage in range(plan.pp)]
    return [ranks for ranks in stages if len(ranks) > 1]


def _with_loads(gathered: list[tuple[Facts, Load | None]]) -> list[Facts]:
    """Add to each rank's facts the clock rate and the cores that other programs use on its host.

    One rank per host reports the host's load for all of the host's ranks.
    """
    loads = {facts.host: load for facts, load in gathered if load is not None}
    found = []
    for facts, _ in gathered:
        load = loads.get(facts.host)
        if load is None:
            found.append(facts)
            continue
        host = load.host
        busy = None if host.utilisation is None else host.utilisation * len(host.cores)
        others = None if busy is None or host.run_cores is None else busy - host.run_cores
        found.append(Facts(facts.host, facts.processor, facts.threads, others, host.clock_hz))
    return found


def cause(its: Facts, others: list[Facts]) -> str:
    """Describe the likely cause of a slow rank: how its host differs from other hosts."""
    used = its.others_cores
    elsewhere = [one.others_cores for one in others if one.others_cores is not None]
    if used is not None and elsewhere and used > median(elsewhere) + _MORE_CORES:
        return f"Other programs use {used:.1f} cores of its host. End them"
    clocks = [one.clock_hz for one in others if one.clock_hz is not None]
    if its.clock_hz is not None and clocks and its.clock_hz < _SLOWER_CLOCK * median(clocks):
        return (
            f"Its cores run at {its.clock_hz / 1e9:.2f} GHz, the others' at "
            f"{median(clocks) / 1e9:.2f}. Check its cooling and its power settings"
        )
    if its.threads < min((one.threads for one in others), default=its.threads):
        return f"It computes with {its.threads} threads, but the other ranks use more"
    if all(one.processor != its.processor for one in others):
        return f"It has a different processor: {its.processor}"
    return (
        "Nothing observed on its host explains this. Run `outpace doctor` there, or `outpace probe "
        "--nproc`, which measures each part alone"
    )
