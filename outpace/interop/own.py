"""A person's own model: built, scored, written, read. The doors; the rooms are own_*.py."""

from outpace.interop.own_model import (
    OWN_FILE,
    OwnModel,
    build_own,
    own_positions,
    own_vocab,
    read_own,
    write_own,
)
from outpace.interop.own_objective import OwnObjective

__all__ = [
    "OWN_FILE",
    "OwnModel",
    "OwnObjective",
    "build_own",
    "own_positions",
    "own_vocab",
    "read_own",
    "write_own",
]
