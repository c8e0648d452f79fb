"""outpace: predict the fastest way to train a transformer, prove it, and train with it."""

import importlib
from typing import TYPE_CHECKING, Any

from outpace.records.version import __version__ as __version__

if TYPE_CHECKING:
    from outpace.api import (
        compare,
        doctor,
        estimate,
        evaluate,
        generate,
        memory,
        network,
        plan,
        probe,
        report,
        runs,
        topology,
        train,
        tune,
    )
    from outpace.experiment.module_verify import verify
    from outpace.nn.transformer import Transformer
    from outpace.parallel.parallelize import ParallelModule, parallelize
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
    from outpace.training.callbacks import Callback

# Public name -> its module, which is loaded on first access, so that importing outpace imports no
# torch and `outpace --help` is fast.
_PUBLIC = {
    "BadInputError": "outpace.records.errors",
    "Callback": "outpace.training.callbacks",
    "Certificate": "outpace.records.certificate",
    "DivergedError": "outpace.records.errors",
    "Evaluation": "outpace.records.measurement",
    "InterruptedRunError": "outpace.records.errors",
    "Measurement": "outpace.records.measurement",
    "ModelSpec": "outpace.records.model",
    "OutpaceError": "outpace.records.errors",
    "ParallelModule": "outpace.parallel.parallelize",
    "Plan": "outpace.records.plan",
    "RunInfo": "outpace.records.measurement",
    "StepRecord": "outpace.records.measurement",
    "TrainSettings": "outpace.records.settings",
    "Transformer": "outpace.nn.transformer",
    "compare": "outpace.api",
    "doctor": "outpace.api",
    "estimate": "outpace.api",
    "evaluate": "outpace.api",
    "generate": "outpace.api",
    "memory": "outpace.api",
    "network": "outpace.api",
    "parallelize": "outpace.parallel.parallelize",
    "plan": "outpace.api",
    "probe": "outpace.api",
    "report": "outpace.api",
    "runs": "outpace.api",
    "topology": "outpace.api",
    "train": "outpace.api",
    "tune": "outpace.api",
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
    "ParallelModule",
    "Plan",
    "RunInfo",
    "StepRecord",
    "TrainSettings",
    "Transformer",
    "__version__",
    "compare",
    "doctor",
    "estimate",
    "evaluate",
    "generate",
    "memory",
    "network",
    "parallelize",
    "plan",
    "probe",
    "report",
    "runs",
    "topology",
    "train",
    "tune",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'outpace' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
