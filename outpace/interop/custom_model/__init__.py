"""Custom models: how to build, write and read them, and their training objective."""

from outpace.interop.custom_model.build import build_custom_model
from outpace.interop.custom_model.files import (
    CUSTOM_MODEL_FILE,
    read_custom_model,
    write_custom_model,
)
from outpace.interop.custom_model.model import CustomModel, read_positions, read_vocab
from outpace.interop.custom_model.objective import CustomObjective

__all__ = [
    "CUSTOM_MODEL_FILE",
    "CustomModel",
    "CustomObjective",
    "build_custom_model",
    "read_custom_model",
    "read_positions",
    "read_vocab",
    "write_custom_model",
]
