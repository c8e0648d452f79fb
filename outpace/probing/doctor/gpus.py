"""The doctor's checks of GPUs, based on data from the driver."""

import re
from collections.abc import Iterator, Sequence

from outpace.probing.doctor.common import UnknownFactError, join_names, make_finding, times
from outpace.records.finding import Finding
from outpace.records.inventory import GpuState, Inventory
from outpace.records.topology import cpu_set
from outpace.records.units import show_bytes

# Prefixes of UUIDs (of GPUs and MIG instances), and numbers as C's strtoul parses them.
_UUIDS, _NUMBER = ("GPU-", "MIG-"), re.compile(r"\+?[0-9]+")
_HEAT = ("temperature (driver)", "temperature (hardware)", "hardware slowdown", "power brake")


def _require_gpus(inventory: Inventory) -> tuple[GpuState, ...]:
    if not inventory.gpus:
        raise UnknownFactError(inventory.gpus_unknown or "there is no GPU")
    return inventory.gpus


def _gpu_names(gpus: list[GpuState]) -> str:
    return "GPU " + join_names([str(gpu.index) for gpu in gpus])


def pcie(inventory: Inventory) -> Iterator[Finding]:
    """Find cards whose slot or riser has fewer lanes or an older PCIe generation than the card."""
    name = "PCIe width"
    gpus = _require_gpus(inventory)
    known = [gpu for gpu in gpus if gpu.pcie_width and gpu.pcie_width_max]
    if not known:
        raise UnknownFactError(_describe_refusal(gpus, "CurrPcieLinkWidth"))
    for width, most in sorted({(gpu.pcie_width or 0, gpu.pcie_width_max or 0) for gpu in known}):
        if width >= most:
            continue
        these_gpus = [gpu for gpu in known if (gpu.pcie_width, gpu.pcie_width_max) == (width, most)]
        yield make_finding(
            name,
            "high",
            "a card uses fewer PCIe lanes than it could",
            f"{_gpu_names(these_gpus)}: ×{width} of ×{most}",
            "reseat the card, use a slot with all lanes, check the riser and the lane split "
            "in the BIOS",
            times(most / width, most / width, "transfers over PCIe",
                  "the rate is proportional to the lanes"),
        )  # fmt: skip
    held = [
        gpu
        for gpu in gpus
        if gpu.pcie_generation_card and gpu.pcie_generation_max
        and gpu.pcie_generation_max < gpu.pcie_generation_card
    ]  # fmt: skip
    if held:
        now, can = held[0].pcie_generation_max or 1, held[0].pcie_generation_card or 1
        yield make_finding(
            name, "low", "the slot has an older PCIe generation than the card",
            f"{_gpu_names(held)}: {now} of {can}",
            "use a slot of that generation; set the slot's link speed to Auto in the BIOS",
            times(2 ** (can - now), 2 ** (can - now), "transfers over PCIe",
                  "PCI-SIG: each generation has twice the rate of the previous one"),
        )  # fmt: skip
    # An idle card lowers its PCIe generation to save power, so only busy cards are checked.
    slow = [
        gpu
        for gpu in gpus
        if gpu.performance_state == 0 and (gpu.utilisation or 0) > 0.5
        and gpu.pcie_generation and gpu.pcie_generation_max
        and gpu.pcie_generation < gpu.pcie_generation_max
    ]  # fmt: skip
    if slow:
        yield make_finding(
            name, "high", "a busy card runs at a lower PCIe generation than it could",
            f"{_gpu_names(slow)}: {slow[0].pcie_generation} of {slow[0].pcie_generation_max}",
            "reseat the card; look for PCIe errors (dmesg | grep AER)",
        )  # fmt: skip


def _describe_refusal(gpus: tuple[GpuState, ...], question: str) -> str:
    reasons = {gpu.not_told[question] for gpu in gpus if question in gpu.not_told}
    return (
        f"the driver does not report it: {join_names(sorted(reasons))}"
        if reasons
        else "not reported"
    )


def power(inventory: Inventory) -> Iterator[Finding]:
    """Find a power limit below the card's default."""
    gpus = _require_gpus(inventory)
    known = [gpu for gpu in gpus if gpu.power_limit_w and gpu.power_limit_default_w]
    if not known:
        raise UnknownFactError(_describe_refusal(gpus, "EnforcedPowerLimit"))
    low = [g for g in known if (g.power_limit_w or 0) < 0.98 * (g.power_limit_default_w or 0)]
    if low:
        one = low[0]
        yield make_finding(
            "power cap", "moderate", "the power limit is below the card's default",
            f"{_gpu_names(low)}: {one.power_limit_w:.0f} W instead of "
            f"{one.power_limit_default_w:.0f} W",
            f"nvidia-smi -pl {one.power_limit_default_w:.0f} as root, if cooling and power supply "
            "allow it; outpace probe matmul at both limits shows the cost",
        )  # fmt: skip


def throttling(inventory: Inventory) -> Iterator[Finding]:
    """Find GPUs whose clocks are currently throttled or were fixed by a user."""
    gpus = _require_gpus(inventory)
    if all(gpu.throttled_by is None for gpu in gpus):
        raise UnknownFactError(_describe_refusal(gpus, "CurrentClocksEventReasons"))
    hot = [gpu for gpu in gpus if set(gpu.throttled_by or ()) & set(_HEAT)]
    if hot:
        why = sorted({reason for gpu in hot for reason in gpu.throttled_by or ()} & set(_HEAT))
        clocks = [
            f"{(gpu.sm_clock_hz or 0) / 1e6:.0f} of {gpu.sm_clock_max_hz / 1e6:.0f} MHz"
            for gpu in hot if gpu.sm_clock_max_hz
        ][:1]  # fmt: skip
        yield make_finding(
            "throttling", "severe", "clocks are throttled now",
            f"{_gpu_names(hot)}: {', '.join([*why, *clocks])}",
            "check air flow, dust and room temperature; if the power brake is on, check the power "
            "supply",
        )  # fmt: skip
    fixed = [gpu for gpu in gpus if "clocks set by a user" in (gpu.throttled_by or ())]
    if fixed:
        yield make_finding("throttling", "moderate", "clocks were set by a user", _gpu_names(fixed),
                    "reset them as root with nvidia-smi -rgc and -rac")  # fmt: skip


def ecc(inventory: Inventory) -> Iterator[Finding]:
    """Find memory errors, pending row remapping, and disabled or changing ECC."""
    gpus = _require_gpus(inventory)
    if all(gpu.ecc is None for gpu in gpus):
        raise UnknownFactError(_describe_refusal(gpus, "EccMode"))
    bad = [gpu for gpu in gpus if gpu.ecc_uncorrected]
    if bad:
        yield make_finding(
            "ECC", "severe", "memory errors that could not be corrected",
            f"{_gpu_names(bad)}: {sum(gpu.ecc_uncorrected or 0 for gpu in bad)} since boot",
            "take the GPU out of the job, reset it (nvidia-smi -r), and run dcgmi diag -r 3",
        )  # fmt: skip
    rows = [gpu for gpu in gpus if gpu.remap_pending]
    if rows:
        yield make_finding("ECC", "moderate",
            "memory rows are waiting to be remapped"
        , _gpu_names(rows),
                    "reset the GPU when it is free: nvidia-smi -r")  # fmt: skip
    off = [gpu for gpu in gpus if gpu.ecc is False]
    if off:
        yield make_finding(
            "ECC", "low", "memory errors go unnoticed, since ECC is off", _gpu_names(off),
            "run nvidia-smi -e 1 as root and reset; on cards with GDDR memory it costs some "
            "memory bandwidth",
        )  # fmt: skip
    changing = [gpu for gpu in gpus if None not in (gpu.ecc, gpu.ecc_pending)
                and gpu.ecc != gpu.ecc_pending]  # fmt: skip
    if changing:
        yield make_finding("ECC", "low", "a new ECC mode takes effect after a reset",
                    _gpu_names(changing), "nvidia-smi -r when it is free")  # fmt: skip


def links(inventory: Inventory) -> Iterator[Finding]:
    """Find GPUs with fewer NVLinks up than others, or hosts where none is up."""
    gpus = _require_gpus(inventory)
    if all(gpu.nvlinks is None for gpu in gpus):
        raise UnknownFactError(_describe_refusal(gpus, "NvLinkState"))
    most = max((gpu.nvlinks_active or 0 for gpu in gpus), default=0)
    fewer = [gpu for gpu in gpus if gpu.nvlinks and (gpu.nvlinks_active or 0) < most]
    if fewer:
        least = min(gpu.nvlinks_active or 0 for gpu in fewer)
        yield make_finding(
            "NVLink", "severe", "some GPUs have fewer NVLinks up than others",
            f"{_gpu_names(fewer)}: {least} of {most}",
            "nvidia-smi nvlink -s; with NVSwitch: systemctl status nvidia-fabricmanager",
        )  # fmt: skip
    elif most == 0 and len(gpus) > 1 and any(gpu.nvlinks for gpu in gpus):
        yield make_finding(
            "NVLink", "high", "the cards have NVLinks, but none is up",
            _gpu_names([gpu for gpu in gpus if gpu.nvlinks]),
            "install the bridge; with NVSwitch: systemctl start nvidia-fabricmanager",
        )  # fmt: skip


def gpu_sharing(inventory: Inventory) -> Iterator[Finding]:
    """Find GPUs that other programs use, MIG slices, and a driver that unloads when idle."""
    gpus = _require_gpus(inventory)
    used = [gpu for gpu in gpus if gpu.other_processes]
    if used:
        one = used[0]
        yield make_finding(
            "GPU sharing", "high", "other programs are using the GPU",
            f"{_gpu_names(used)}: {sum(gpu.other_processes or 0 for gpu in used)} processes, "
            f"{show_bytes(one.memory_used_bytes)} in use on GPU {one.index}",

                "wait, end them (nvidia-smi lists them), or choose other GPUs with "
                "CUDA_VISIBLE_DEVICES"
            ,
        )  # fmt: skip
    sliced = [gpu for gpu in gpus if gpu.mig]
    if sliced:
        yield make_finding(
            "GPU sharing", "high", "GPUs are divided into MIG slices, which communicate neither by "
                                   "NVLink nor directly over PCIe", _gpu_names(sliced),
            "for one large training run: nvidia-smi -mig 0 as root, and a reset",
        )  # fmt: skip
    unloading = [gpu for gpu in gpus if gpu.persistence is False]
    if unloading:
        yield make_finding(
            "GPU sharing",
            "low",
            "the driver unloads between programs, which then start more slowly",
            _gpu_names(unloading),
            "systemctl enable --now nvidia-persistenced",
        )


def binding(inventory: Inventory) -> Iterator[Finding]:
    """Find a rank on CPUs far from its GPU, whose memory traffic crosses sockets."""
    gpus, rank = _require_gpus(inventory), inventory.local_rank
    if rank is None:
        raise UnknownFactError(
            "not started as a rank: start outpace doctor in the same way as the training"
        )
    if rank >= len(gpus) or inventory.settings.get("CUDA_VISIBLE_DEVICES"):
        raise UnknownFactError("it is unknown which GPU this rank will use")
    # By default, CUDA numbers devices fastest first, and NVML by position on the bus.
    ordered = inventory.settings.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    if not ordered and len({gpu.name for gpu in gpus}) > 1:
        raise UnknownFactError(
            "the GPUs differ, and CUDA orders them by speed, so it is unknown which one this "
            "rank will use. Set CUDA_DEVICE_ORDER=PCI_BUS_ID"
        )
    near = gpus[rank].cpu_affinity
    if near is None:
        raise UnknownFactError(_describe_refusal(gpus, "CpuAffinity"))
    if not cpu_set(inventory.usable_cpus) & cpu_set(near):
        yield make_finding(
            "GPU and CPU", "high", "the rank is bound to CPUs far from its GPU",
            f"rank {rank} on CPUs {inventory.usable_cpus}, GPU {rank} is near {near}",
            f"taskset -c {near}, or numactl --cpunodebind of the GPU's node",
        )  # fmt: skip


def visible(inventory: Inventory) -> Iterator[Finding]:
    """Find a CUDA_VISIBLE_DEVICES that hides more GPUs than intended."""
    gpus, text = _require_gpus(inventory), inventory.settings.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return
    count = max(len(gpus), len(inventory.topology.gpus) if inventory.topology else 0)
    words = [word.strip() for word in text.split(",")]
    shown = read_visible(words, count)
    said = f"CUDA_VISIBLE_DEVICES={text}"
    remedy = (
        f"use numbers from 0 to {count - 1} separated by commas, or the GPU-… names of "
        "nvidia-smi -L"
    )
    if len({*shown}) < len(shown):
        yield make_finding(
            "visible GPUs", "severe", "a GPU is named twice, so none is visible", said, remedy
        )
    elif not shown:
        yield make_finding(
            "visible GPUs",
            "high",
            "all GPUs are hidden, so training runs on the CPU",
            said,
            f"unset CUDA_VISIBLE_DEVICES, or {remedy}",
        )
    elif len(shown) > 1 and shown[0].startswith("MIG-"):
        # MIG User Guide, "CUDA Device Enumeration".
        yield make_finding(
            "visible GPUs",
            "high",
            "CUDA uses only the first of several MIG slices",
            said,
            "start one run for each slice, or train on whole GPUs (nvidia-smi -mig 0 as root)",
        )
    elif len(shown) < len(words):
        odd = words[len(shown)]
        other = odd.startswith(_UUIDS) or (words[0].startswith(_UUIDS) and odd.isdigit())
        problem = "has a different form from the first" if other else "is not a GPU of this host"
        why = f"{len(shown)} of {len(words)} entries are read: {odd!r} {problem}"
        yield make_finding(
            "visible GPUs",
            "high",
            "the list of GPUs is read only up to its first mistake",
            f"{said}: {why}",
            remedy,
        )


def read_visible(words: Sequence[str], count: int) -> list[str]:
    """Return the devices that CUDA uses from a list: all entries before the first invalid one.

    Entries must be numbers, or all have the same form as the first (CUDA C++ Programming Guide,
    "CUDA Environment Variables"). torch.cuda._parse_visible_devices finds no device if one is
    listed twice, and parses numbers like C's strtoul.
    """
    shown = []
    form = next((begin for begin in _UUIDS if words[0].startswith(begin)), None)
    for word in words:
        number = _NUMBER.match(word)
        if form is not None and word.startswith(form):
            shown.append(word)
        elif form is None and number is not None and int(number[0]) < count:
            shown.append(str(int(number[0])))
        else:
            break
    return shown


GPU_CHECKS = {
    "visible GPUs": visible,
    "PCIe width": pcie,
    "NVLink": links,
    "throttling": throttling,
    "power cap": power,
    "ECC": ecc,
    "GPU sharing": gpu_sharing,
    "GPU and CPU": binding,
}
