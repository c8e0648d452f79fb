"""Warnings that point to the user's line of code."""

import sys
import warnings
from pathlib import Path

import torch

_LIBRARIES = tuple(f"{path}/" for path in (Path(__file__).parents[1], *torch.__path__))


def warn_user(sentence: str) -> None:
    """Warn at the innermost line on the stack that is in neither outpace nor torch."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame, level = frame.f_back, level + 1
    warnings.warn(sentence, UserWarning, stacklevel=level)
