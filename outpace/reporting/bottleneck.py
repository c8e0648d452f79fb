"""The part that limits training most, from the measured times of its steps."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from outpace.records.measurement import TimeParts
from outpace.records.pipelines import SCHEDULES
from outpace.records.plan import Strategy
from outpace.records.strategies import TRAITS
from outpace.records.units import show_share
from outpace.records.utilisation import Load, device_utilisation

# What takes less of a step holds nothing up: without it, steps were less than a fifth faster.
_LEAST = 1 / 6


@dataclass(frozen=True)
class Bottleneck:
    """The limit of a step in a word or two, and a sentence on what to do about it.

    `of_step`: its share is a share of a step's time, not of cores or devices.
    """

    words: str
    advice: str
    of_step: bool = True


@dataclass(frozen=True)
class BottleneckInputs:
    """Measurements of a step. `parts` are rank 0's; `device` is cpu, mps, or a GPU's name or kind.

    `loads` are those of the hosts at the time; () if nothing is known about them.
    """

    parts: TimeParts
    device: str | None
    strategy: Strategy | None
    processes: int
    loads: Sequence[Load] = ()
    mfu: float | None = None
    hosts: int = 1


def bottleneck(seen: BottleneckInputs) -> Bottleneck | None:
    """Return the largest part of a step's lost time, or computing; None if parts are unknown.

    They are unknown on mps, which computes while the clock is read.
    """
    if seen.parts.total_s <= 0 or seen.device == "mps":
        return None
    share, found = max(_losses(seen), key=lambda pair: pair[0])
    return found if share >= _LEAST else _compute_bound(seen)


def limits(seen: BottleneckInputs) -> list[tuple[float, Bottleneck]]:
    """Return the parts that noticeably delay a step, largest first; none if it only computes."""
    if seen.parts.total_s <= 0 or seen.device == "mps":
        return []
    found = [pair for pair in _losses(seen) if pair[0] >= _LEAST]
    return sorted(found, key=lambda pair: -pair[0])


def _losses(seen: BottleneckInputs) -> Iterator[tuple[float, Bottleneck]]:
    """Return the shares of a step not spent on forwards and backwards."""
    parts = seen.parts
    data, communication = parts.data_s / parts.total_s, parts.communication_s / parts.total_s
    optimizer = parts.optimizer_s / parts.total_s
    yield data, _waiting_for_data(data)
    yield communication, _communication(seen.strategy, communication, seen.hosts)
    yield optimizer, _optimizer(optimizer)
    if seen.device == "cpu":
        yield from _cores(seen, data + communication)
    elif seen.device is not None:
        busy = device_utilisation(seen.loads, seen.processes)
        if busy is not None:
            # What waits for data is known already; a collective keeps a GPU busy.
            yield 1 - busy - data, _host(busy)


def _cores(seen: BottleneckInputs, waiting: float) -> Iterator[tuple[float, Bottleneck]]:
    """Yield the share of cores that idle while nothing waits, and the share that others use."""
    hosts = [load.host for load in seen.loads]
    shares = [host.utilisation for host in hosts if host.utilisation is not None]
    if not shares:
        return
    busy = sum(shares) / len(shares)
    yield 1 - busy - waiting, _idle_cores(busy)
    of_run = [host.run_cores for host in hosts if host.run_cores is not None]
    if len(of_run) == len(hosts):
        others = busy - sum(of_run) / sum(len(host.cores) for host in hosts)
        yield others, _other_programs(others)


def _waiting_for_data(share: float) -> Bottleneck:
    return Bottleneck(
        f"waits for data {_percent(share)}",
        f"Steps wait for data {_percent(share)} of the time. Load data in the background with "
        "--workers (outpace probe loader recommends a number).",
    )


def _communication(strategy: Strategy | None, share: float, hosts: int) -> Bottleneck:
    if strategy in SCHEDULES:
        return Bottleneck(
            f"waits for stages {_percent(share)}",
            f"Stages wait for each other {_percent(share)} of the time. Use more micro-batches "
            "per step (--pp-microbatches) or another schedule to reduce the idle time.",
        )
    return Bottleneck(
        f"{'network' if hosts > 1 else 'communication'} {_percent(share)}",
        f"Ranks communicate without computing {_percent(share)} of the time. A larger "
        "--global-batch communicates less per token, --compress-gradients sends less, and "
        "outpace compare shows which --strategy waits least.",
    )


def _optimizer(share: float) -> Bottleneck:
    return Bottleneck(
        f"optimizer {_percent(share)}",
        f"The optimizer takes {_percent(share)} of the time. A larger --global-batch steps "
        "less often per token, and --strategy zero1 divides its work.",
    )


def _host(busy: float) -> Bottleneck:
    return Bottleneck(
        f"host-bound: GPU {_percent(busy)} busy",
        f"GPUs compute {_percent(busy)} of the time, and otherwise wait for the host to launch "
        "work. Use a larger --micro-batch or --compile to launch fewer, larger kernels.",
        of_step=False,
    )


def _idle_cores(busy: float) -> Bottleneck:
    return Bottleneck(
        f"cores {_percent(busy)} busy",
        f"Cores are busy {_percent(busy)} of the time. Use more --threads or a larger "
        "--micro-batch to keep the others busy.",
        of_step=False,
    )


def _other_programs(share: float) -> Bottleneck:
    return Bottleneck(
        f"others use {_percent(share)} of the cores",
        f"Other programs keep {_percent(share)} of the cores busy. End them, or leave cores to "
        "them with fewer --threads.",
        of_step=False,
    )


def _compute_bound(seen: BottleneckInputs) -> Bottleneck:
    """Return the finding that forwards and backwards take nearly all of a step."""
    share = _percent((seen.parts.forward_s + seen.parts.backward_s) / seen.parts.total_s)
    if seen.strategy is not None and TRAITS[seen.strategy].communicates_within:
        return Bottleneck(
            "compute or communication",
            f"Forward and backward passes take {share} of the time, including their "
            f"communication, which is not timed separately for {seen.strategy}. Use outpace "
            "compare with another --strategy to see its cost.",
        )
    reached = "" if seen.mfu is None else f", at an MFU of {show_share(seen.mfu)}"
    return Bottleneck(
        "compute-bound",
        f"Forward and backward passes take {share} of the time{reached}. outpace plan with "
        "--vary precision,compile shows what may make them faster.",
    )


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
