"""Versions and commits, which must match for two results to be comparable."""

import hashlib
import platform
import re
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.cuda.nccl
import torch.distributed as dist

from outpace.nn.torch_versions import VERSION
from outpace.probing.hardware.procfs import read_text
from outpace.records.version import __version__

# Version of the driver's kernel module. The file is missing on Windows and without a driver.
_DRIVER = Path("/sys/module/nvidia/version")
_PACKAGES = ("transformers", "tokenizers", "datasets", "safetensors", "numpy")
_TELLING = (
    "NCCL_", "CUDA_", "CUBLAS_", "CUDNN_", "NVIDIA_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_",
    "GLOO_", "UCX_", "FI_", "TORCH", "PYTORCH_", "MALLOC_", "LD_PRELOAD",
)  # fmt: skip
# Variables that differ between launches, or that only the launcher sets.
_OF_LAUNCHERS = ("TORCHELASTIC_", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_CPP_LOG_LEVEL")
# Names of variables with secrets. Addresses that contain a user are secret too: the user may be a
# token.
_SECRET = re.compile(
    r"TOKEN|SECRET|PASS(W|P|C|_|$)|PWD|(^|_)PW(_|$)|KEY|CRED|AUTH|COOKIE|BEARER|SIGNATURE",
    re.IGNORECASE,
)
_ADDRESS_WITH_USER = re.compile(r"://[^/\s@]+@")


def versions() -> dict[str, str]:
    """Return the versions of Python, relevant packages, CUDA, its driver, NCCL and gloo.

    The driver is not queried, because a broken one may hang. outpace and torch report their own
    versions, because packages on PYTHONPATH have no metadata.
    """
    found = {"python": platform.python_version(), "outpace": __version__, "torch": VERSION}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    driver = read_text(_DRIVER)
    if driver:
        found["nvidia driver"] = driver
    return found | _backend_versions()


def _backend_versions() -> dict[str, str]:
    found = {}
    if dist.is_available() and dist.is_nccl_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    if dist.is_available() and dist.is_gloo_available():
        found["gloo"] = f"of torch {VERSION}"
    return found


def commit() -> tuple[str | None, bool | None]:
    """Return the checked-out commit, and whether there are changes; None without a repository."""
    head = _run_git("rev-parse", "HEAD")
    if head is None:
        return None, None
    status = _run_git("status", "--porcelain", "--untracked-files=no")
    return head.strip(), bool((status or "").strip())


def changes() -> str | None:
    """Return a hash of all uncommitted changes; None without changes or without a repository."""
    found = _run_git("diff", "--no-ext-diff", "--no-textconv", "HEAD")
    return hashlib.sha256(found.encode()).hexdigest()[:16] if found else None


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that affect computation or communication.

    Variables that launchers set are left out. So are variables that may contain a secret: those
    with a telling name, and addresses with a user name.
    """
    return {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith(_TELLING)
        and not name.startswith(_OF_LAUNCHERS)
        and not _SECRET.search(name)
        and not _ADDRESS_WITH_USER.search(value)
    }


def _run_git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-c", "core.fsmonitor=false", *arguments], capture_output=True, text=True,
            errors="replace", timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
