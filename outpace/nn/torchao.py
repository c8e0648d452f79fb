"""torchao, an optional package: low-bit formats and float8 matmuls."""

import logging
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from outpace.records.errors import BadInputError

# At import, these loggers report kernels of torchao that do not fit this machine. outpace uses none
# of these kernels.
CHATTY_LOGGERS = ("torchao", "torch.utils._pytree")


def torchao_module(name: str, asked: str) -> Any:
    """Import `torchao.NAME`. Raises BadInputError, which names `asked`, if it is not installed."""
    if find_spec("torchao") is None:
        raise BadInputError(
            f"{asked} needs torchao, which is not installed. Install it with pip install "
            "'outpace[lowbit]'."
        )
    loggers = [logging.getLogger(one) for one in CHATTY_LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        return import_module(f"torchao.{name}")
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
