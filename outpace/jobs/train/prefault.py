"""Prefaulting of memory that training will need, while modules are loaded.

This runs before torch is imported, so nothing here may import torch.
"""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from outpace.catalog.models import PRESETS, named_model
from outpace.planner.model.flops import parameter_count
from outpace.probing.hardware.cpus import usable_cpus
from outpace.probing.hardware.process_memory import free_bytes
from outpace.records.optimizers import PLAIN_ADAMW
from outpace.records.precisions import LEVELS, WEIGHTS
from outpace.records.ranks import Ranks
from outpace.records.settings import TrainSettings
from outpace.training.heap import PagePrefaulter

_FP32_BYTES = 4
# Multiples of the fp32 weights: for weights, gradients and AdamW's two moments; bf16 operands.
_OF_WEIGHTS, _OF_CASTS = 4, 0.5
_OF_FREE = 0.5
_ACCELERATORS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg", "/dev/dri")


def prefault_memory(
    settings: TrainSettings, ranks: Ranks, environment: Mapping[str, str]
) -> PagePrefaulter | None:
    """Start touching the memory that training in this process will need.

    This is only done on a CPU, and only if a core would otherwise be idle, so not with several
    ranks per host.
    """
    if ranks.world_size > 1 or len(usable_cpus()) < 2 or not _trains_on_cpu(settings):
        return None
    needed, free = needed_bytes(settings), free_bytes()
    if needed == 0 or needed > free:  # training will refuse it with advice
        return None
    return PagePrefaulter(min(needed, int(_OF_FREE * free)), environment).start()


def needed_bytes(settings: TrainSettings) -> int:
    """Return the bytes of weights, gradients and AdamW's moments in fp32; 0 for other settings.

    With bf16, the weights' casts are added. The model must be a preset, or a directory with weights
    in fp32 or smaller. The language model's head is counted even if a classifier does not use it.
    """
    precision = settings.precision or "fp32"
    others = (
        settings.optimizer not in (None, *PLAIN_ADAMW),
        LEVELS.get(precision, precision) in WEIGHTS,
        settings.optimizer_in_backward,
        settings.lora_rank is not None,
        {settings.offload, settings.offload_parameters, settings.offload_optimizer}
        - {None, "none"},
        settings.memory_limit is not None,  # unused memory would count towards it
        settings.micro_batch == "auto",  # trials are processes that need the memory
        settings.workers > 0,  # forks share touched memory, and then copy it
        settings.memory,
        settings.empty_cache,
    )
    if any(others):
        return 0
    times = _OF_WEIGHTS + _OF_CASTS * (precision == "bf16")
    return int(times * _weights_bytes(settings.model))


def _weights_bytes(reference: str) -> int:
    name = reference if Path(reference).exists() else named_model(reference)
    if name in PRESETS:
        return _FP32_BYTES * parameter_count(PRESETS[name].spec)
    # Errors are reported later, when the model is opened.
    with suppress(OSError):
        single = Path(reference) / "model.safetensors"
        files = [single] if single.is_file() else Path(reference).glob("model-*.safetensors")
        return sum(path.stat().st_size for path in files)
    return 0


def _trains_on_cpu(settings: TrainSettings) -> bool:
    """Return whether training will run on the CPU, as far as known before importing torch."""
    found = any(Path(one).exists() for one in _ACCELERATORS)
    return settings.device == "cpu" or (settings.device == "auto" and not found)
