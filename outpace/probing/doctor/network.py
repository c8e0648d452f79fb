"""The doctor's checks of communication between GPUs, within and between hosts."""

from collections import Counter
from collections.abc import Iterator
from itertools import combinations

from outpace.probing.doctor.common import UnknownFactError, join_names, make_finding
from outpace.probing.hardware.gpu_placement import group_gpus
from outpace.records.finding import Finding, Slowdown
from outpace.records.inventory import Inventory, NetworkPort
from outpace.records.topology import goodness, nvlinks
from outpace.records.units import show_bytes

# Two TITAN RTX with NV2, DDP: 131.4 s without peer access, 101.9 s with it.
_WITHOUT_P2P = Slowdown(
    low=1.29,
    high=1.29,
    of="DDP on two GPUs with NVLink",
    source="Hugging Face transformers documentation, Performance and Scalability: 2× TITAN RTX "
    "with NV2, 131.4 s with NCCL_P2P_DISABLE=1 against 101.9 s",
)


def peer_access(inventory: Inventory) -> Iterator[Finding]:
    """Find environment variables like NCCL_P2P_DISABLE that make GPUs send through host memory."""
    name, settings = "NCCL_P2P_DISABLE", inventory.settings
    off = settings.get(name) not in (None, "", "0")
    level = settings.get("NCCL_P2P_LEVEL", "").upper()
    if not off and level not in ("LOC", "0"):
        return
    if len(inventory.gpus) == 1:
        return
    known = inventory.topology
    bonded = known is not None and any(
        nvlinks(known.link_between(*pair)) for pair in combinations(known.gpus, 2)
    )
    which = f"{name}={settings[name]}" if off else f"NCCL_P2P_LEVEL={level}"
    yield make_finding(
        name,
        "severe" if bonded else "high",
        "GPUs are not allowed to send to each other directly"
        + (", though NVLink joins them" if bonded else ""),
        which,
        f"unset {which.partition('=')[0]}; if a consumer card hangs without it, keep it, and "
        "prefer a few large transfers (ZeRO-1, pipeline) to many small ones",
        _WITHOUT_P2P if bonded else None,
    )


def variables(inventory: Inventory) -> Iterator[Finding]:
    """Find environment variables that were set for debugging and now slow down training."""
    settings = inventory.settings

    def is_set(name: str) -> bool:
        return settings.get(name, "") not in ("", "0")

    name = "variables left from debugging"
    if is_set("CUDA_LAUNCH_BLOCKING"):
        yield make_finding(
            name,
            "severe",
            "the CPU waits for every kernel",
            "CUDA_LAUNCH_BLOCKING=1",
            "unset CUDA_LAUNCH_BLOCKING",
        )
    if settings.get("NVIDIA_TF32_OVERRIDE") == "0":
        yield make_finding(name, "high", "fp32 matmuls are not allowed to use TF32",
                    "NVIDIA_TF32_OVERRIDE=0",
                    "unset NVIDIA_TF32_OVERRIDE, unless you need every bit of fp32")  # fmt: skip
    if is_set("NCCL_SHM_DISABLE"):
        yield make_finding(
            name,
            "high",
            "GPUs without direct access send through the network stack",
            f"NCCL_SHM_DISABLE={settings['NCCL_SHM_DISABLE']}",
            "unset NCCL_SHM_DISABLE",
        )
    if settings.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        yield make_finding(name, "high",
            "every collective is preceded by another that checks it"
        ,
                    "TORCH_DISTRIBUTED_DEBUG=DETAIL", "unset TORCH_DISTRIBUTED_DEBUG")  # fmt: skip
    if settings.get("NCCL_NVLS_ENABLE") == "0":
        yield make_finding(name, "moderate", "NVSwitch is not allowed to do reductions",
                    "NCCL_NVLS_ENABLE=0", "unset NCCL_NVLS_ENABLE")  # fmt: skip
    for pinned in ("NCCL_ALGO", "NCCL_PROTO"):
        if settings.get(pinned):
            yield make_finding(name, "low",
                "NCCL is not allowed to choose the fastest algorithm for each size"
            ,
                        f"{pinned}={settings[pinned]}",
                        f"unset {pinned}, or measure both: outpace probe collectives")  # fmt: skip
    if settings.get("NCCL_DEBUG", "").upper() == "TRACE":
        yield make_finding(name, "low", "NCCL logs every call", "NCCL_DEBUG=TRACE",
                    "NCCL_DEBUG=WARN")  # fmt: skip


def network(inventory: Inventory) -> Iterator[Finding]:
    """Find an InfiniBand or RoCE network that is unused, down or badly configured."""
    name, settings = "InfiniBand", inventory.settings
    if not inventory.ports:
        return
    active = [port for port in inventory.ports if port.active]
    kinds = "/".join(sorted({port.link_layer or "unknown" for port in inventory.ports}))
    off = settings.get("NCCL_IB_DISABLE", "") not in ("", "0")
    sockets = settings.get("NCCL_NET", "").lower() == "socket"
    if active and (off or sockets):
        which = "NCCL_IB_DISABLE" if off else "NCCL_NET"
        yield make_finding(name, "severe",
                    "there is a fast network, but NCCL is not allowed to use it",
                    f"{which}={settings[which]}; ports with a link: {len(active)} ({kinds}, "
                    f"{active[0].rate or 'rate unknown'})", f"unset {which}")  # fmt: skip
    yield from _find_unusable_ports(inventory, active)
    down = [port for port in inventory.ports if port.active is False]
    if down:
        yield make_finding(
            name,
            "high" if not active else "moderate",
            "ports without a link" if active else "no port has a link",
            join_names([f"{port.device}:{port.port} {port.state}" for port in down]),
            "check the cable, the switch's port, or, for InfiniBand, the subnet manager (ibstat, "
            "sminfo); ignore unused ports",
        )
    slower = _describe_slower_ports(active)
    if slower:
        yield make_finding(name, "moderate", "ports slower than others of their kind", slower,
                    "reseat or replace the cable; compare mlxlink's output for both")  # fmt: skip
    if active and inventory.gpus and inventory.gpu_direct is False:
        yield make_finding(
            name,
            "moderate",
            "GPUs may have to send through the host's memory: nvidia_peermem is not loaded",
            "no module nvidia_peermem",
            "modprobe nvidia_peermem as root; with the open kernel modules NCCL uses DMA-BUF "
            "instead: NCCL_DEBUG=INFO says GDRDMA where direct access works",
        )
    locked = inventory.locked_memory_limit_bytes
    if active and locked is not None and 0 <= locked < 2**30:
        yield make_finding(
            name, "high", "the limit on locked memory is too low for the network card",
            f"{show_bytes(locked)}", "ulimit -l unlimited; docker run --ulimit memlock=-1",
        )  # fmt: skip


def _find_unusable_ports(inventory: Inventory, active: list[NetworkPort]) -> Iterator[Finding]:
    """Find active ports that NCCL cannot open or is not allowed to use."""
    if not active:
        return
    name, ib_hca = "InfiniBand", inventory.settings.get("NCCL_IB_HCA", "")
    if ib_hca and not any(_nccl_includes_port(ib_hca, port) for port in active):
        ports = join_names([f"{port.device}:{port.port}" for port in active])
        yield make_finding(name, "severe", "NCCL_IB_HCA excludes every port with a link",
                    f"NCCL_IB_HCA={ib_hca}; ports with a link: {ports}",
                    "unset NCCL_IB_HCA, or name existing ports")  # fmt: skip
    if inventory.verbs_devices is False:
        yield make_finding(
            name, "severe", "ports have a link, but programs cannot open them",
            "/dev/infiniband does not exist",
            "in a container: docker run --device /dev/infiniband; else modprobe ib_uverbs as root",
        )  # fmt: skip
    if inventory.verbs_library is False:
        yield make_finding(
            name, "severe", "ports have a link, but NCCL lacks the library for them",
            "libibverbs cannot be loaded",
            "apt install libibverbs1 ibverbs-providers, in the container that trains",
        )  # fmt: skip


def _nccl_includes_port(ib_hca: str, port: NetworkPort) -> bool:
    """Return whether NCCL_IB_HCA includes a port.

    The variable lists prefixes of device names, with or without a port, separated by commas. A
    leading = requires full names, and ^ excludes (NVIDIA, NCCL documentation, "NCCL_IB_HCA").
    """
    others, exact = ib_hca.startswith("^"), ib_hca.lstrip("^").startswith("=")
    listed = False
    for one in ib_hca.lstrip("^=").split(","):
        device, _, number = one.strip().partition(":")
        named = port.device == device if exact else port.device.startswith(device)
        listed = listed or (bool(device) and named and number in ("", str(port.port)))
    return listed != others


def _describe_slower_ports(active: list[NetworkPort]) -> str:
    rates = {f"{port.device}:{port.port}": port.rate for port in active if port.rate}
    kinds = {f"{port.device}:{port.port}": port.link_layer for port in active}
    slow = []
    for port, rate in rates.items():
        like = Counter(r for other, r in rates.items() if kinds[other] == kinds[port])
        usual = like.most_common(1)[0][0]
        if float(rate.split()[0]) < float(usual.split()[0]):
            slow.append(f"{port} {rate} (others {usual})")
    return join_names(slow)


def gpu_choice(inventory: Inventory) -> Iterator[Finding]:
    """Find a CUDA_VISIBLE_DEVICES whose GPUs have slower links than other GPUs of this host."""
    known = inventory.topology
    if known is None:
        raise UnknownFactError(inventory.topology_unknown or "there is no topology")
    numbers = inventory.settings.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = [f"GPU{number.strip()}" for number in numbers]
    if len(names) < 2 or not set(names) <= set(known.gpus) or len(names) >= len(known.gpus):
        return
    if len({*names}) < len(names):  # reported by another check
        return
    worst = min((known.link_between(*pair) for pair in combinations(names, 2)), key=goodness)
    best = group_gpus(known, len(names))
    if best.groups and goodness(best.worst_link) > goodness(worst):
        better = ",".join(name.removeprefix("GPU") for name in best.groups[0])
        yield make_finding(
            "choice of GPUs", "high" if nvlinks(best.worst_link) else "moderate",
            "the chosen GPUs have worse connections than others",
            f"CUDA_VISIBLE_DEVICES={','.join(numbers)}: {worst}",
            f"CUDA_VISIBLE_DEVICES={better}: {best.worst_link}",
        )  # fmt: skip


NETWORK_CHECKS = {
    "NCCL_P2P_DISABLE": peer_access,
    "variables left from debugging": variables,
    "InfiniBand": network,
    "choice of GPUs": gpu_choice,
}
