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
        merge,
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
    from outpace.parallel.parallel_module import ParallelModule, parallelize
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

# Public names by the module that defines them. A module is imported when one of its names is first
# used, so that `import outpace` does not import torch and `outpace --help` is fast.
_MODULES = {
    "outpace.api": "compare doctor estimate evaluate generate memory merge network plan probe "
    "report runs topology train tune",
    "outpace.experiment.module_verify": "verify",
    "outpace.nn.transformer": "Transformer",
    "outpace.parallel.parallel_module": "ParallelModule parallelize",
    "outpace.records.certificate": "Certificate",
    "outpace.records.errors": "BadInputError DivergedError InterruptedRunError OutpaceError",
    "outpace.records.measurement": "Evaluation Measurement RunInfo StepRecord",
    "outpace.records.model": "ModelSpec",
    "outpace.records.plan": "Plan",
    "outpace.records.settings": "TrainSettings",
    "outpace.training.callbacks": "Callback",
}
_PUBLIC = {name: module for module, names in _MODULES.items() for name in names.split()}

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
    "merge",
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
