"""outpace: predict the fastest way to train a transformer, prove it, and train with it."""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from outpace.records.version import __version__ as __version__

if TYPE_CHECKING:
    from outpace.cli.python import evaluate, generate, train
    from outpace.experiment.module_verify import verify
    from outpace.nn.transformer import Transformer
    from outpace.parallel.own import Parallelized, parallelize
    from outpace.records.certificate import Certificate
    from outpace.records.errors import (
        BadInputError,
        DivergedError,
        InterruptedRunError,
        OutpaceError,
    )
    from outpace.records.measurement import Evaluation, Measurement, RunInfo, StepRecord
    from outpace.records.model import ModelSpec
    from outpace.records.plan import Plan
    from outpace.records.settings import TrainSettings
    from outpace.train.callbacks import Callback

# Public name -> its module. Loaded when first asked for, so that importing outpace imports no
# torch and `outpace --help` answers at once.
_PUBLIC = {
    "BadInputError": "outpace.records.errors",
    "Callback": "outpace.train.callbacks",
    "Certificate": "outpace.records.certificate",
    "DivergedError": "outpace.records.errors",
    "Evaluation": "outpace.records.measurement",
    "InterruptedRunError": "outpace.records.errors",
    "Measurement": "outpace.records.measurement",
    "ModelSpec": "outpace.records.model",
    "OutpaceError": "outpace.records.errors",
    "Parallelized": "outpace.parallel.own",
    "Plan": "outpace.records.plan",
    "RunInfo": "outpace.records.measurement",
    "StepRecord": "outpace.records.measurement",
    "TrainSettings": "outpace.records.settings",
    "Transformer": "outpace.nn.transformer",
    "evaluate": "outpace.cli.python",
    "generate": "outpace.cli.python",
    "parallelize": "outpace.parallel.own",
    "verify": "outpace.experiment.module_verify",
}

__all__ = [
    "BadInputError",
    "Callback",
    "Certificate",
    "DivergedError",
    "Evaluation",
    "InterruptedRunError",
    "Measurement",
    "ModelSpec",
    "OutpaceError",
    "Parallelized",
    "Plan",
    "RunInfo",
    "StepRecord",
    "TrainSettings",
    "Transformer",
    "__version__",
    "evaluate",
    "generate",
    "parallelize",
    "train",
    "verify",
]


class _Room(ModuleType):
    """`outpace.train` is a room of this house and also its front door: a package to be called."""

    def __call__(self, *arguments: Any, **keywords: Any) -> "Measurement":
        from outpace.cli import python

        return python.train(*arguments, **keywords)


class _House(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        # The import system binds a subpackage here when somebody first imports it.
        if name == "train" and isinstance(value, ModuleType):
            value.__class__ = _Room
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _House


def __getattr__(name: str) -> Any:
    if name == "train":
        return importlib.import_module("outpace.train")
    if name not in _PUBLIC:
        raise AttributeError(f"module 'outpace' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
