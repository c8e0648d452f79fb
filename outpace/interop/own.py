"""Public names of custom models: built, scored, written, read."""

from outpace.interop.custom_model_build import build_own
from outpace.interop.custom_model_files import OWN_FILE, read_own, write_own
from outpace.interop.own_model import OwnModel, own_positions, own_vocab
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
