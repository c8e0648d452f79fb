"""Recognition of errors and other tools' output where `nvidia-smi topo -m` is expected."""

import re

_SAVE = "Save the output of `nvidia-smi topo -m`, from the line with GPU0 on."
# A pattern, and what the text is and what to do. The first match counts.
_KNOWN = (
    (r"Driver/library version mismatch",
     "nvidia-smi failed: the driver's kernel module and library have different versions, as "
     "after an update. Reboot (or reload the nvidia modules), and save its output again."),
    (r"Failed to initialize NVML|Couldn't communicate with the NVIDIA driver|has failed because"
     r"|NVIDIA-SMI couldn't find"
     r"|Unable to determine the device handle|GPU is lost|No devices were found"
     r"|Insufficient Permissions|Failed to run topology matrix",
     "nvidia-smi failed. Fix what it reports (see `outpace doctor` on that host), and save "
     "its output again."),
    (r"(?i)command not found|not recognized as an internal|no such file or directory",
     "nvidia-smi was not found on that host: install the NVIDIA driver, or put its tools on PATH."),
    (r"ROCm System Management Interface|\bXGMI\b|rocm-smi|amd-smi|^(LINK TYPE|HOPS|ACCESS) TABLE",
     "it is the output of rocm-smi or amd-smi for AMD GPUs; outpace reads only topologies of "
     "NVIDIA GPUs."),
    (r"\bPPU\d|\bICN\d*\b",
     (
         "it is a matrix of PPUs (connected by ICN), which are not NVIDIA GPUs; outpace does "
         "not read it."
     )),
    (r"\bNPU\d|\bHCCS\b|npu-smi",
     "it is a matrix of Ascend NPUs (npu-smi), which outpace does not read."),
    (r"xpu-smi|\bXL\d|^\s*GPU \d+/\d+",
     "it is a matrix of Intel GPUs (xpu-smi), which outpace does not read."),
    (r"\bMX\d|mx-smi|MetaXLink|mthreads|MTLink|hl-smi|cnmon|\b(MLU|GCU|HCU|DCU|HPU|XPU|NEURON)\d",
     "it is for another maker's accelerators, which outpace does not read."),
    (r"\b(CNS|NS|GNS|TNS|DR)\s+=|\btopo\s+-p2p\b",
     "it is the output of `nvidia-smi topo -p2p`, which shows whether GPUs reach each other but "
     f"not how. {_SAVE}"),
    (r"\bis connected to (device|GPU) ?\d",
     f"it is the output of `nvidia-smi topo -p`, which describes a single pair. {_SAVE}"),
    (r"\|\s*NVIDIA-SMI \d|=NVSMI LOG=",
     f"it is the output of `nvidia-smi` without topo -m. {_SAVE}"),
    (r"^\s*GPU \d+: .*\(UUID", f"it is the output of `nvidia-smi -L` or `nvlink`. {_SAVE}"),
)  # fmt: skip


def describe_foreign(text: str) -> str | None:
    """Describe a text that is not a topology, and say what to do about it.

    The text was given in place of the output of `nvidia-smi topo -m`. If it is an error of
    nvidia-smi, the error is quoted. Returns None if the text is not recognised.
    """
    for pattern, sentence in _KNOWN:
        found = re.search(pattern, text, re.MULTILINE)
        if found is not None:
            line = text[: found.end()].count("\n")
            words = " ".join(text.splitlines()[line].split())[:120]
            return f"{sentence} It says: {words!r}" if "failed" in sentence else sentence
    return None
