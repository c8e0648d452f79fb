"""Outlines of models for planning, from the user's reference."""

from pathlib import Path
from typing import Any

from outpace.catalog.models import PRESETS, name_of_hub, named_model, preset, unknown_model
from outpace.catalog.outlines import OUTLINES
from outpace.jobs.inputs.custom_batches import batch_of
from outpace.planner.model.outline import outline, parameters
from outpace.records.errors import BadInputError
from outpace.records.model import ModelSpec
from outpace.records.outline import Outline

# Sequence length for tracing a custom language model, unless its maximum is shorter.
_TRACED_TOKENS = 128
_TRACED_SAMPLES = 2


def find_outline(reference: str) -> tuple[str, Outline, ModelSpec | None]:
    """Return name and outline of the model `reference`, and its spec if outpace can build it.

    As for --model of `outpace train`, a reference names a preset or an outline in the catalog, a
    Hugging Face directory, a finished run, a spec file (.toml, .json), or "file.py:function", whose
    code is run and traced. Catalog names are case-insensitive and may be those of the Hugging Face
    Hub; an existing file takes precedence. Raises BadInputError if none matches.
    """
    if not Path(reference).expanduser().exists():
        reference = name_of_hub(reference) or named_model(reference)
    if reference in PRESETS:
        spec = preset(reference)
        named = outline(spec, reference)
        return reference, named.model_copy(update={"source": PRESETS[reference].source}), spec
    if reference in OUTLINES:
        return reference, OUTLINES[reference], None
    path = Path(reference).expanduser()
    if not path.exists() and not reference.rpartition(":")[0].endswith(".py"):
        known = (*PRESETS, *OUTLINES)
        raise unknown_model(reference, known)
    return _open_outline(reference, path)


def _open_outline(reference: str, path: Path) -> tuple[str, Outline, ModelSpec | None]:
    from outpace.interop.models import open_model
    from outpace.interop.outline import needs_trace, read_outline_and_spec

    config = _find_config_folder(path)
    if config is not None:
        if needs_trace(config):
            from outpace.trace.transformers_outline import outline_from_folder

            traced = outline_from_folder(config)
            return path.name, traced.model_copy(update={"name": path.name}), None
        found, spec = read_outline_and_spec(config)
        return path.name, found.model_copy(update={"name": path.name}), spec
    opened = open_model(reference)
    if opened.spec is not None:
        return opened.name, outline(opened.spec, opened.name), opened.spec
    assert opened.build is not None
    found, spec = _trace_custom_model(opened.build, opened.name)
    return opened.name, found, spec


def _find_config_folder(path: Path) -> Path | None:
    """Return the directory with the config.json of a model or an adapter's base, or None."""
    from outpace.interop.config import CONFIG_FILE
    from outpace.interop.custom_model import CUSTOM_MODEL_FILE
    from outpace.interop.peft import ADAPTER_CONFIG, base_of

    if not path.is_dir() or (path / CUSTOM_MODEL_FILE).is_file() or (path / "run.json").is_file():
        return None
    if (path / CONFIG_FILE).is_file():
        return path
    return base_of(path) if (path / ADAPTER_CONFIG).is_file() else None


def _trace_custom_model(build: Any, name: str) -> tuple[Outline, ModelSpec | None]:
    """Trace a custom model and its loss, on two samples of its data set or on token ids."""
    from outpace.interop.custom_model import CustomObjective, build_custom_model
    from outpace.nn.transformer import Transformer
    from outpace.trace.outline import outline_from_module

    own = build_custom_model(build)
    if isinstance(own.module, Transformer):
        return outline(own.module.spec, name), own.module.spec
    found = _outline_of_module_config(own.module)
    if found is None:
        found = outline_from_module(CustomObjective(own), (_make_trace_batch(own),), name)
    return found.model_copy(update={"name": name, "source": name, "untrained": None}), None


def _outline_of_module_config(module: Any) -> Outline | None:
    """Return the outline from a transformers config; None if the architecture is unknown.

    A config gives more detail than a trace.
    """
    from outpace.interop.outline import outline_from_config
    from outpace.interop.outline_readers import READERS

    config = getattr(module, "config", None)
    if getattr(config, "model_type", None) not in READERS:
        return None
    try:
        found = outline_from_config(config, "the module's config")
    except (BadInputError, AttributeError):  # another architecture's config that has this name
        return None
    own = sum(parameter.numel() for parameter in module.parameters())
    return found if parameters(found) == own else None


def _make_trace_batch(custom: Any) -> Any:
    from outpace.interop.custom_model import read_positions

    length = min(_TRACED_TOKENS, read_positions(custom.module) or _TRACED_TOKENS)
    return batch_of(custom, _TRACED_SAMPLES, length)
