"""A separate virtual environment for each peer, with pinned versions."""

import hashlib
import os
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
CONSTRAINTS = HERE.parents[1] / "constraints.txt"
# Packages in addition to torch and transformers, which all peers have.
NEEDS = {
    "torch": [],
    "trainer": ["accelerate==1.15.0"],
    "accelerate": ["accelerate==1.15.0"],
    "lightning": ["lightning==2.6.6"],
    "deepspeed": ["deepspeed==0.19.8", "ninja==1.13.2"],
}
_ALL = ["torch==2.13.0", "transformers==5.23.0", "numpy"]


def python_of(name: str, folder: Path) -> Path:
    """Return the interpreter of a peer's environment, which is created if it does not exist."""
    where = folder / name
    interpreter = where / "bin" / "python"
    needs = [*_ALL, *NEEDS[name]]
    wanted = hashlib.sha256("\n".join([*needs, CONSTRAINTS.read_text()]).encode()).hexdigest()
    mark = where / "made"
    if mark.is_file() and mark.read_text() == wanted:
        return interpreter
    print(f"making the environment of {name} …", file=sys.stderr, flush=True)
    venv.create(where, with_pip=True, clear=True)
    subprocess.run(
        [interpreter, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c",
         CONSTRAINTS, *needs],
        check=True, env={**os.environ, "DS_BUILD_OPS": "0"},
    )  # fmt: skip
    mark.write_text(wanted)
    return interpreter


def versions(interpreter: Path) -> dict[str, str]:
    """Return the versions of all packages installed there."""
    words = [interpreter, "-m", "pip", "list", "--format=freeze", "--disable-pip-version-check"]
    said = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    pairs = (line.split("==") for line in said.splitlines() if line.count("==") == 1)
    kept = ("torch", "transformers", "accelerate", "lightning", "deepspeed", "numpy")
    return {name: version for name, version in pairs if name in kept}
