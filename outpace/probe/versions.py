"""Versions and commits: what has to be the same for a result to be the same."""

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version

import torch

_PACKAGES = ("outpace", "torch", "transformers", "tokenizers", "datasets", "safetensors", "numpy")


def versions() -> dict[str, str]:
    """Versions of Python, of the packages that matter, and of CUDA where it is."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def commit() -> tuple[str | None, bool | None]:
    """Commit of the working directory and whether it has changes; None outside a repository."""
    head = _git("rev-parse", "HEAD")
    if head is None:
        return None, None
    changes = _git("status", "--porcelain", "--untracked-files=no")
    return head.strip(), bool((changes or "").strip())


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
