"""What is planned for: the outline of any model that can be named."""

from pathlib import Path
from typing import Any

from outpace.catalog.models import PRESETS, preset, preset_of_hub
from outpace.catalog.outlines import OUTLINES
from outpace.planner.outlines import outline, parameters
from outpace.records.errors import BadInputError, nearest_model
from outpace.records.model import ModelSpec
from outpace.records.outline import Outline

# A person's own language model is traced with this many tokens, if it takes as many.
_TRACED_TOKENS = 128
_TRACED_SAMPLES = 2


def find_outline(reference: str) -> tuple[str, Outline, ModelSpec | None]:
    """Name, outline and, if outpace builds it, spec of the model that `reference` names.

    As train's --model: a preset comes first (also by its name on the Hugging Face Hub), then the
    catalog's outlines, a Hugging Face directory, a finished run, a spec file (.toml, .json), and
    "file.py:function", which alone runs a person's code and is traced. Raises BadInputError.
    """
    if not Path(reference).expanduser().exists():
        reference = preset_of_hub(reference) or reference
    if reference in PRESETS:
        spec = preset(reference)
        named = outline(spec, reference)
        return reference, named.model_copy(update={"source": PRESETS[reference].source}), spec
    if reference in OUTLINES:
        return reference, OUTLINES[reference], None
    path = Path(reference).expanduser()
    if not path.exists() and not reference.rpartition(":")[0].endswith(".py"):
        known = (*PRESETS, *OUTLINES)
        raise BadInputError(
            f"no preset, directory or file named {reference!r}.{nearest_model(reference, known)} "
            "outpace models lists all that are known by name."
        )
    return _opened(reference, path)


def _opened(reference: str, path: Path) -> tuple[str, Outline, ModelSpec | None]:
    from outpace.interop.models import open_model
    from outpace.interop.outline import described

    config = _config_of(path)
    if config is not None:
        found, spec = described(config)
        return path.name, found.model_copy(update={"name": path.name}), spec
    opened = open_model(reference)
    if opened.spec is not None:
        return opened.name, outline(opened.spec, opened.name), opened.spec
    assert opened.build is not None
    found, spec = _traced(opened.build, opened.name)
    return opened.name, found, spec


def _config_of(path: Path) -> Path | None:
    """The directory whose config.json tells of a model: outpace need not be able to build it."""
    from outpace.interop.config import CONFIG_FILE
    from outpace.interop.own import OWN_FILE
    from outpace.interop.peft import ADAPTER_CONFIG, base_of

    if not path.is_dir() or (path / OWN_FILE).is_file() or (path / "run.json").is_file():
        return None
    if (path / CONFIG_FILE).is_file():
        return path
    return base_of(path) if (path / ADAPTER_CONFIG).is_file() else None


def _traced(build: Any, name: str) -> tuple[Outline, ModelSpec | None]:
    """A person's own model, with its loss on two samples of its data, or on tokens."""
    from outpace.interop.own import OwnObjective, build_own
    from outpace.nn.transformer import Transformer
    from outpace.trace.outline import outline_from_module

    own = build_own(build)
    if isinstance(own.module, Transformer):
        return outline(own.module.spec, name), own.module.spec
    found = _by_config(own.module)
    if found is None:
        found = outline_from_module(OwnObjective(own), (_batch(own),), name)
    return found.model_copy(update={"name": name, "source": name, "untrained": None}), None


def _by_config(module: Any) -> Outline | None:
    """A transformers model of a known architecture: its config says more than a trace can."""
    from outpace.interop.outline import READERS, outline_from_config

    config = getattr(module, "config", None)
    if getattr(config, "model_type", None) not in READERS:
        return None
    try:
        found = outline_from_config(config, "the module's config")
    except (BadInputError, AttributeError):  # another config that has this name
        return None
    own = sum(parameter.numel() for parameter in module.parameters())
    return found if parameters(found) == own else None


def _batch(own: Any) -> Any:
    import torch

    from outpace.data.loader import collate
    from outpace.interop.own import own_positions, own_vocab

    if own.dataset is not None:
        if not len(own.dataset):
            raise BadInputError("the model's own data set is empty, so it cannot be traced")
        keys = [index % len(own.dataset) for index in range(_TRACED_SAMPLES)]
        if hasattr(own.dataset, "__getitems__"):
            return collate(own.dataset.__getitems__(keys))
        return collate([own.dataset[key] for key in keys])
    if own_vocab(own.module) is None:
        raise BadInputError(
            f"a {type(own.module).__name__} has no embedding of tokens, and its function returned "
            "no data set, so what it is to be run on is not known; return (module, loss, dataset)"
        )
    length = min(_TRACED_TOKENS, own_positions(own.module) or _TRACED_TOKENS)
    tokens = torch.zeros((_TRACED_SAMPLES, length), dtype=torch.int64)
    return {"tokens": tokens, "targets": tokens}
