"""The bottleneck of training, from the measured times of its steps."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from outpace.records.measurement import TimeParts
from outpace.records.pipelines import SCHEDULES
from outpace.records.plan import Strategy
from outpace.records.strategies import TRAITS
from outpace.records.units import show_share
from outpace.records.utilisation import Load, device_utilisation

# Smaller shares are not bottlenecks: without them, steps would be less than a fifth faster.
_LEAST = 1 / 6


@dataclass(frozen=True)
class Bottleneck:
    """Limit of the speed of a step, in a few words, with a sentence of advice.

    It is reported with a share: of the step's time if `of_step`, otherwise of the cores or devices.
    """

    words: str
    advice: str
    of_step: bool = True


@dataclass(frozen=True)
class BottleneckInputs:
    """Measurements of a step. `parts` are rank 0's; `device` is cpu, mps, or a GPU's name or type.

    `loads` are the loads of the hosts at the same time; () if unknown.
    """

    parts: TimeParts
    device: str | None
    strategy: Strategy | None
    processes: int
    loads: Sequence[Load] = ()
    mfu: float | None = None
    hosts: int = 1


def bottleneck(inputs: BottleneckInputs) -> Bottleneck | None:
    """Return what limits the speed of a step; None if unknown.

    It is the largest loss: waiting, the optimizer, or idle cores or devices. If no loss is large,
    the step is compute-bound. The parts of a step are unknown on mps, which is still computing when
    the clock is read.
    """
    if inputs.parts.total_s <= 0 or inputs.device == "mps":
        return None
    share, found = max(_list_losses(inputs), key=lambda pair: pair[0])
    return found if share >= _LEAST else _compute_bottleneck(inputs)


def limits(inputs: BottleneckInputs) -> list[tuple[float, Bottleneck]]:
    """Return the losses of a step that are large enough to report, each with its share, in order.

    The largest is first. There are none if the step is compute-bound, or if its parts are unknown
    (see `bottleneck`).
    """
    if inputs.parts.total_s <= 0 or inputs.device == "mps":
        return []
    found = [pair for pair in _list_losses(inputs) if pair[0] >= _LEAST]
    return sorted(found, key=lambda pair: -pair[0])


def _list_losses(inputs: BottleneckInputs) -> Iterator[tuple[float, Bottleneck]]:
    """Yield each loss of a step with its share.

    Losses are the time of anything except forward and backward passes, idle cores or devices, and
    cores that other programs use.
    """
    parts = inputs.parts
    data, communication = parts.data_s / parts.total_s, parts.communication_s / parts.total_s
    optimizer = parts.optimizer_s / parts.total_s
    sends = "network" if inputs.hosts > 1 else "communication"
    sends = "stages" if inputs.strategy in SCHEDULES else sends
    yield data, _make_bottleneck("data", data)
    yield communication, _make_bottleneck(sends, communication)
    yield optimizer, _make_bottleneck("optimizer", optimizer)
    if inputs.device == "cpu":
        yield from _core_losses(inputs, data + communication)
    elif inputs.device is not None:
        busy = device_utilisation(inputs.loads, inputs.processes)
        if busy is not None:
            # Waiting for data is already counted; a collective keeps a GPU busy.
            yield 1 - busy - data, _make_bottleneck("host", busy)


def _core_losses(
    inputs: BottleneckInputs, waiting_share: float
) -> Iterator[tuple[float, Bottleneck]]:
    """Yield the fractions of cores that were idle and that other programs used.

    Cores may idle while ranks wait for data or communication. `waiting_share` is that part of a
    step's time, and is subtracted, because it is counted elsewhere.
    """
    hosts = [load.host for load in inputs.loads]
    shares = [host.utilisation for host in hosts if host.utilisation is not None]
    if not shares:
        return
    busy = sum(shares) / len(shares)
    yield 1 - busy - waiting_share, _make_bottleneck("cores", busy)
    of_run = [host.run_cores for host in hosts if host.run_cores is not None]
    if len(of_run) == len(hosts):
        others = busy - sum(of_run) / sum(len(host.cores) for host in hosts)
        yield others, _make_bottleneck("others", others)


_COMMUNICATES = (
    "Ranks communicate without computing {} of the time. A larger --global-batch communicates less "
    "per token, --compress-gradients sends less, and `outpace compare` shows which --strategy "
    "waits least."
)
# Words and advice for each loss; {} is the share.
_LIMITS: Mapping[str, tuple[str, str]] = {
    "data": (
        "waits for data {}",
        "Steps wait for data {} of the time. Load data in the background with --workers (outpace "
        "probe loader recommends a number).",
    ),
    "stages": (
        "waits for stages {}",
        "Stages wait for each other {} of the time. Use more micro-batches per step "
        "(--pp-microbatches) or another schedule to reduce the idle time.",
    ),
    "optimizer": (
        "optimizer {}",
        "The optimizer takes {} of the time. A larger --global-batch steps less often per token, "
        "and --strategy zero1 divides its work.",
    ),
    "host": (
        "host-bound: GPU {} busy",
        "GPUs compute {} of the time, and otherwise wait for the host to launch work. Use a "
        "larger --micro-batch or --compile to launch fewer, larger kernels.",
    ),
    "cores": (
        "cores {} busy",
        "Cores are busy {} of the time. Use more --threads or a larger --micro-batch to keep the "
        "others busy.",
    ),
    "others": (
        "others use {} of the cores",
        "Other programs keep {} of the cores busy. End them, or leave cores to them with fewer "
        "--threads.",
    ),
    "network": ("network {}", _COMMUNICATES),
    "communication": ("communication {}", _COMMUNICATES),
}


def _make_bottleneck(kind: str, share: float) -> Bottleneck:
    words, advice = (text.format(_format_percent(share)) for text in _LIMITS[kind])
    return Bottleneck(words, advice, of_step=kind not in ("host", "cores", "others"))


def _compute_bottleneck(inputs: BottleneckInputs) -> Bottleneck:
    share = _format_percent(
        (inputs.parts.forward_s + inputs.parts.backward_s) / inputs.parts.total_s
    )
    if inputs.strategy is not None and TRAITS[inputs.strategy].communicates_within:
        return Bottleneck(
            "compute or communication",
            f"Forward and backward passes take {share} of the time, including their "
            f"communication, which is not timed separately for {inputs.strategy}. Use outpace "
            "compare with another --strategy to see its cost.",
        )
    reached = "" if inputs.mfu is None else f", at an MFU of {show_share(inputs.mfu)}"
    return Bottleneck(
        "compute-bound",
        f"Forward and backward passes take {share} of the time{reached}. outpace plan with --vary "
        "precision,compile shows settings that may make them faster.",
    )


def _format_percent(share: float) -> str:
    return f"{100 * share:.0f} %"
