"""Classifiers in Hugging Face directories, such as BertForSequenceClassification.

Tensor names here are those of the transformer, without the classifier's "backbone." prefix.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outpace.interop.atomic_folder import whole_folder
from outpace.interop.config import CONFIG_FILE, read_config
from outpace.interop.config_writer import hf_config
from outpace.interop.model_writer import special_ids, write_config, write_weights
from outpace.interop.tensor_names import Naming, tensor_naming
from outpace.interop.weights import read_tensors, stored_names
from outpace.nn.classifier import Classifier, initial_value
from outpace.nn.transformer import Transformer
from outpace.records.errors import BadInputError, excerpt, shorten
from outpace.records.model import ModelSpec
from outpace.records.model_families import FAMILY_TRAITS

_INSIDE = "backbone."
# Names of stored classification layers that were trained for other tasks or classes.
_OTHER_HEADS = r"^(\w+\.)?(classifier|score)\."


def known_labels(directory: Path) -> tuple[str, ...] | None:
    """Return the class names of a directory with a classifier, in order; None for other models.

    Raises BadInputError if id2label and label2id in config.json contradict each other.
    """
    values = read_config(directory)
    architecture = next(iter(values.get("architectures") or ()), "")
    if not str(architecture).endswith("ForSequenceClassification"):
        return None
    given, count = values.get("id2label"), values.get("num_labels")
    if not given:  # as in transformers, regardless of label2id
        return tuple(f"LABEL_{number}" for number in range(count if type(count) is int else 2))
    names = _parse_id2label(given, directory / CONFIG_FILE)
    numbers = values.get("label2id")
    if isinstance(numbers, Mapping):
        for name, number in numbers.items():
            if str(names.get(str(number), name)) != str(name):
                raise BadInputError(
                    f"{directory / CONFIG_FILE} contradicts itself: label2id has {shorten(name)} "
                    f"as class {number}, but id2label has {shorten(str(names[str(number)]))}. "
                    "Correct the one that is wrong."
                )
    return tuple(names.values())


def _parse_id2label(id2label: Any, where: Path) -> dict[str, str]:
    """Return the class names by class number ("0", "1", and so on), in that order.

    Raises BadInputError unless the numbers are consecutive from 0 and all names differ.
    """
    told = id2label if isinstance(id2label, dict) else {}
    names = {key: str(told[key]) for key in map(str, range(len(told))) if key in told}
    if len(names) != len(told) or len(set(names.values())) != len(names) or not names:
        raise BadInputError(
            f"{where}: id2label = {excerpt(id2label)}; it has to name the classes 0, 1 and so on, "
            "each differently, in the order of the rows of the classification layer"
        )
    return names


def unsupported_task(directory: Path) -> str | None:
    """Describe what a classifier predicts if that is not one class per text; else return None.

    As in transformers, `problem_type` decides, and a single label without it means regression.
    """
    values = read_config(directory)
    labels = known_labels(directory)
    problem = values.get("problem_type")
    if labels is not None and problem == "multi_label_classification":
        return f"several labels of a text (problem_type {problem})"
    if labels is not None and (problem == "regression" or (problem is None and len(labels) == 1)):
        return f"numbers (problem_type {problem or 'not given, and a single label'})"
    return None


def require_layer(directory: Path) -> None:
    """Refuse a classifier whose files lack the classification layer."""
    naming = _classifier_naming(str(read_config(directory).get("model_type")))
    layer = f"{naming.modules['classifier']}.weight"
    if not any(name.endswith(layer) for name in stored_names(directory)):
        raise BadInputError(
            f"{directory} describes a classifier, but its weights have no {layer}: the "
            "classification layer would be random. Restore the complete model, or train it with "
            "outpace train --task classify."
        )


def read_classifier(
    directory: Path, spec: ModelSpec, labels: Sequence[str], seed: int
) -> Classifier:
    """Load a directory's weights into a classifier.

    A missing pooler is initialised from `seed`. So is the classification layer, unless the
    directory has a classifier with the same labels. Raises BadInputError like `read_weights`.
    """
    naming = _classifier_naming(str(read_config(directory).get("model_type")))
    with torch.device("meta"):
        model = Classifier(Transformer(spec), len(labels))
    own = {_strip_backbone_prefix(name): name for name in model.state_dict()}
    shapes = {
        _strip_backbone_prefix(name): tuple(tensor.shape)
        for name, tensor in model.state_dict().items()
    }
    new = {name for name in shapes if name.startswith(("pooler.", "classifier."))}
    keeps = known_labels(directory) == tuple(labels) and unsupported_task(directory) is None
    wanted = shapes if keeps else {n: s for n, s in shapes.items() if "classifier." not in n}
    found = read_tensors(directory, wanted, naming, new, _OTHER_HEADS)
    drawn = {name: initial_value(seed, own[name], shapes[name]) for name in new - found.keys()}
    weights = {own[name]: tensor for name, tensor in (found | drawn).items()}
    model.load_state_dict(weights, assign=True)
    return model


def write_classifier(
    directory: Path,
    model: Classifier,
    state_dict: Mapping[str, Tensor],
    labels: Sequence[str],
    tokenizer_save: Callable[[Path], None],
) -> None:
    """Write a classifier in fp32 for `AutoModelForSequenceClassification.from_pretrained`."""

    def set_labels(config: Any) -> None:
        config.architectures = [FAMILY_TRAITS[config.model_type].classifier]
        config.id2label = dict(enumerate(labels))
        config.label2id = {name: number for number, name in enumerate(labels)}
        config.problem_type = "single_label_classification"

    flat = {_strip_backbone_prefix(name): tensor for name, tensor in state_dict.items()}
    with whole_folder(directory, CONFIG_FILE) as folder:
        tokenizer_save(folder)
        config = write_config(folder, model.spec, special_ids(folder), torch.float32, set_labels)
        assert config is not None  # checked by require_exportable
        write_weights(folder, flat, _classifier_naming(config.model_type), torch.float32)


def _strip_backbone_prefix(name: str) -> str:
    return name.removeprefix(_INSIDE)


def require_exportable(spec: ModelSpec) -> None:
    """Raise BadInputError if no classifier in transformers matches the spec."""
    try:
        hf_config(spec)
    except BadInputError:
        raise BadInputError(
            f"--task classify: no architecture of transformers has all features of this "
            f"{spec.family} model, so outpace could not write its classifier. Use an unmodified "
            "model of one of the families."
        ) from None


def _classifier_naming(model_type: str) -> Naming:
    """Return how a family names tensors in classifier files; other heads are ignored."""
    naming = tensor_naming(model_type)
    assert naming is not None  # checked by require_exportable
    encoder = bool(naming.head_bias)
    layer = "classifier" if encoder else "score"
    own = {"classifier": layer, **({"pooler": "bert.pooler.dense"} if encoder else {})}
    kept = tuple(pattern for pattern in naming.ignored if "pooler" not in pattern)
    others = tuple(rf"^{head}" for head in naming.heads)
    return replace(
        naming,
        modules={**naming.modules, **own},
        heads=(*naming.heads, f"{layer}."),
        ignored=(*kept, *others),
    )
