"""What is planned for: the outline of any model that can be named."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from outpace.catalog.models import PRESETS, preset, preset_of_hub, unknown_model
from outpace.catalog.outlines import OUTLINES
from outpace.planner.outlines import outline, parameters
from outpace.records.errors import BadInputError
from outpace.records.model import ModelSpec
from outpace.records.outline import Outline

# A person's own language model is traced with this many tokens, if it takes as many.
_TRACED_TOKENS = 128
_TRACED_SAMPLES = 2
# What it is proved on.
_TRIAL_TOKENS, _TRIAL_SAMPLES = 16, 8


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
        raise unknown_model(reference, known)
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
    from outpace.interop.own import own_positions

    length = min(_TRACED_TOKENS, own_positions(own.module) or _TRACED_TOKENS)
    return batch_of(own, _TRACED_SAMPLES, length)


def batch_of(model: Any, samples: int, seq_len: int | None) -> Any:
    """Return samples of a user's data set, or of `seq_len` tokens, which are all 0."""
    import torch

    if model.dataset is not None:
        return _samples_of(model.dataset, 0, samples)
    _require_tokens(model.module)
    assert seq_len is not None
    tokens = torch.zeros((samples, seq_len), dtype=torch.int64)
    return {"tokens": tokens, "targets": tokens}


def _samples_of(dataset: Any, first: int, count: int) -> Any:
    """A batch of a user's data set, from its beginning again where it ends."""
    from outpace.data.loader import collate

    if not len(dataset):
        raise BadInputError("the model's own data set is empty, so there is nothing to run it on")
    keys = [index % len(dataset) for index in range(first, first + count)]
    if hasattr(dataset, "__getitems__"):
        return collate(dataset.__getitems__(keys))
    return collate([dataset[key] for key in keys])


def _require_tokens(module: Any) -> int:
    """The vocabulary of a module that reads tokens."""
    from outpace.interop.own import own_vocab

    vocab = own_vocab(module)
    if vocab is None:
        raise BadInputError(
            f"a {type(module).__name__} has no embedding of tokens, and its function returned no "
            "data set, so what it is to be run on is not known; return (module, loss, dataset)"
        )
    return vocab


def trial_batches(own: Any, ranks: int, multiple: int = 1) -> Callable[[int], Any]:
    """Small global batches of a user's model for `ranks` processes, by the step from 1.

    Of a number of samples that `ranks` and `multiple` divide.

    Of its data set, or of random tokens, of which the ends of samples are padding, unevenly.
    """
    import torch

    from outpace.interop.own import own_positions
    from outpace.nn.loss import IGNORED

    samples = max(_TRIAL_SAMPLES, 4 * ranks)
    samples += -samples % math.lcm(ranks, multiple)
    if own.dataset is not None:
        return lambda step: _samples_of(own.dataset, (step - 1) * samples, samples)
    vocab = _require_tokens(own.module)
    length = min(_TRIAL_TOKENS, own_positions(own.module) or _TRIAL_TOKENS)

    def tokens(step: int) -> Any:
        drawn = torch.Generator().manual_seed(step)
        ids = torch.randint(vocab, (samples, length + 1), generator=drawn)
        lengths = torch.randint(2, length + 1, (samples, 1), generator=drawn)
        padded = torch.arange(length) >= lengths
        targets = ids[:, 1:].masked_fill(padded, IGNORED)
        return {"tokens": ids[:, :-1].contiguous(), "targets": targets}

    return tokens
