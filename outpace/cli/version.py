"""`outpace version`: versions of packages, without importing them."""

import json
import platform
from collections.abc import Mapping
from importlib import metadata
from importlib.util import find_spec

from outpace.cli.parser import Parser
from outpace.records.version import __version__

_SHOWN = ("torch", "transformers", "tokenizers", "datasets", "safetensors", "numpy")


def run(argv: list[str], environ: Mapping[str, str]) -> int:
    """Print the versions; returns 0."""
    parser = Parser("version", "Show the versions of outpace and its dependencies.")
    parser.add_json()
    arguments = parser.read(argv)
    versions: dict[str, str | None] = {"outpace": __version__, "python": platform.python_version()}
    for name in _SHOWN:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # may still be on PYTHONPATH
            versions[name] = "unknown version" if find_spec(name) is not None else None
    if arguments.json:
        print(json.dumps(versions, indent=2))
    else:
        for name, version in versions.items():
            print(f"{name:<13} {version or 'not installed'}")
    return 0
