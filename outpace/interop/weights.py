"""Loading of weights from a Hugging Face directory, one tensor at a time, under outpace's names."""

import re
from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from torch import Tensor

from outpace.interop.config import CONFIG_FILE, read_config
from outpace.interop.tensor_names import Naming, group, tensor_naming
from outpace.interop.weight_files import NAMES_SHOWN, StoredTensor, open_tensors
from outpace.nn.transformer import Transformer
from outpace.records.errors import BadInputError, first_names
from outpace.records.model import ModelSpec

_FLOATS = ("F64", "F32", "BF16", "F16")
_HEAD_NAME = re.compile(r"lm_head\.|cls\.predictions\.")
_BLOCK = "blocks.0."


def expected_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a spec's model, by outpace's names.

    All blocks have the same shapes, so only one is built.
    """
    with torch.device("meta"):
        model = Transformer(spec.model_copy(update={"layers": 1, "window_layers": None}))
    one = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    block = {name: shape for name, shape in one.items() if name.startswith(_BLOCK)}
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in one.items():
        if name not in block:
            found[name] = shape
        elif name not in found:
            found |= {
                f"blocks.{layer}.{inner.removeprefix(_BLOCK)}": of
                for layer in range(spec.layers)
                for inner, of in block.items()
            }
    return found


def read_weights(directory: Path, spec: ModelSpec) -> dict[str, Tensor]:
    """Load a directory's weights for `load_state_dict`: outpace's names, in fp32 on the CPU.

    Reads safetensors files, single or sharded, or else .bin files, without executing code in them.
    At most one stored tensor is in memory in addition to the result. Raises BadInputError for
    missing or corrupt files, and for tensors that are missing, unexpected or of the wrong shape.
    """
    naming = tensor_naming(str(read_config(directory).get("model_type")))
    shapes = expected_shapes(spec)
    groups = group(shapes, naming)
    with open_tensors(directory) as tensors:
        found = _index_by_current_name(tensors, naming)
        _remove_tied_head(found, spec, naming, directory)
        weights = _convert_all(found, groups, shapes, naming, directory)
    return {name: weights[name] for name in shapes}


def read_tensors(
    directory: Path,
    shapes: dict[str, tuple[int, ...]],
    naming: Naming | None,
    optional: Collection[str],
    ignored_pattern: str,
) -> dict[str, Tensor]:
    """Load tensors of these shapes like `read_weights`; tensors in `optional` may be missing.

    All other stored tensors must match `ignored_pattern`.
    """
    groups = group(shapes, naming)
    with open_tensors(directory) as tensors:
        found = _index_by_current_name(tensors, naming)
        found = {n: t for n, t in found.items() if n in groups or not re.search(ignored_pattern, n)}
        groups = {
            stored: names
            for stored, names in groups.items()
            if stored in found or not all(name in optional for name in names)
        }
        return _convert_all(found, groups, shapes, naming, directory)


def _convert_all(
    found: dict[str, StoredTensor],
    groups: dict[str, list[str]],
    shapes: dict[str, tuple[int, ...]],
    naming: Naming | None,
    directory: Path,
) -> dict[str, Tensor]:
    """Check that the files hold exactly the expected tensors, and convert these to outpace's."""
    _require_expected_tensors(found, groups, shapes, naming, directory)
    weights: dict[str, Tensor] = {}
    for stored, names in groups.items():
        weights.update(_split_stored(found[stored], names, shapes, naming, stored, directory))
    return weights


def _index_by_current_name(
    tensors: Sequence[StoredTensor], naming: Naming | None
) -> dict[str, StoredTensor]:
    named: dict[str, StoredTensor] = {}
    for tensor in tensors:
        name = tensor.name if naming is None else naming.current_name(tensor.name)
        if naming is not None and naming.is_ignored(name):
            continue
        other = named.setdefault(name, tensor)
        if other is not tensor and not _are_equal(other, tensor):
            raise BadInputError(
                f"{other.file} and {tensor.file} both hold {tensor.name}, with different values, "
                "so it is unknown which to use. Fetch the model again, or leave only one of them."
                if other.name == tensor.name
                else f"{tensor.file} holds {other.name} and {tensor.name}, which are the same "
                "tensor under an old and a new name, with different values. Leave only one of them."
            )
    return named


def _remove_tied_head(
    found: dict[str, StoredTensor], spec: ModelSpec, naming: Naming | None, directory: Path
) -> None:
    """Remove the stored copy of a tied head, which repeats the embedding.

    Raises BadInputError if the two differ.
    """
    if naming is None:
        return
    bias = naming.tied_head.replace("weight", "bias")
    if naming.head_bias and bias in found:
        # An untied BERT uses the decoder's bias.
        if not spec.tied or naming.head_bias not in found:
            found[naming.head_bias] = found[bias]
        del found[bias]
    head = found.get(naming.tied_head)
    if not spec.tied or head is None:
        return
    # Some programs store a tied matrix only under the head's name.
    embedding = found.setdefault(naming.stored_name("embed.tokens.weight"), head)
    if not _are_equal(head, embedding):
        raise BadInputError(
            f"{directory / CONFIG_FILE} says that the head is tied to the embedding, but "
            f"{head.name} and {embedding.name} differ. Set tie_word_embeddings to false."
        )
    del found[naming.tied_head]


def _are_equal(one: StoredTensor, other: StoredTensor) -> bool:
    alike = (one.shape, one.dtype) == (other.shape, other.dtype)
    return alike and torch.equal(one.read(), other.read())


def _require_expected_tensors(
    found: dict[str, StoredTensor],
    groups: dict[str, list[str]],
    shapes: dict[str, tuple[int, ...]],
    naming: Naming | None,
    directory: Path,
) -> None:
    missing = [name for name in groups if name not in found]
    unexpected = [tensor.name for name, tensor in found.items() if name not in groups]
    wrong = []
    for name, ours in groups.items():
        tensor, shape = found.get(name), _stored_shape(name, ours, shapes, naming)
        if tensor is None:
            continue
        if tensor.shape != shape:
            wrong.append(f"{tensor.name} is {_show_shape(tensor.shape)}, not {_show_shape(shape)}")
        elif tensor.dtype not in _FLOATS:
            wrong.append(f"{tensor.name} is stored as {tensor.dtype}, not as floating point")
    sentences = [
        f"{directory}: {what}: {first_names(names, NAMES_SHOWN)}."
        for what, names in (
            ("missing tensors", missing),
            ("tensors that do not fit config.json", wrong),
            ("tensors that the model does not have", unexpected),
        )
        if names
    ]
    if missing and not (wrong or unexpected) and all(map(_HEAD_NAME.match, missing)):
        sentences.append(
            "It was saved without its head over the vocabulary, as transformers' AutoModel does. "
            "Save the whole model (AutoModelForCausalLM, AutoModelForMaskedLM); a classifier needs "
            "no such head (--task classify)."
        )
    elif (prefix := _find_wrapper_prefix(missing, unexpected)) is not None:
        sentences.append(
            f"The files have these tensors under names that begin with {prefix!r}, as a wrapper's "
            "state_dict names them. Save the model that is inside the wrapper (after peft's "
            "merge_and_unload, for adapters)."
        )
    elif sentences:
        sentences.append(
            "The weights are not those of the model in config.json; use --init random to train it "
            "from scratch."
        )
    if sentences:
        raise BadInputError("\n".join(sentences))


def _find_wrapper_prefix(missing: list[str], unexpected: list[str]) -> str | None:
    if not missing:
        return None
    first, there = missing[0], set(unexpected)
    for name in unexpected:
        prefix = name.removesuffix(first)
        if name != prefix and all(prefix + one in there for one in missing):
            return prefix
    return None


def _stored_shape(
    stored: str, names: list[str], shapes: dict[str, tuple[int, ...]], naming: Naming | None
) -> tuple[int, ...]:
    """Return the shape of a stored tensor that joins outpace's tensors `names`."""
    first, *rest = shapes[names[0]]
    shape = (first * len(names), *rest)
    return shape[::-1] if naming is not None and naming.is_transposed(stored) else shape


def _split_stored(
    tensor: StoredTensor,
    names: list[str],
    shapes: dict[str, tuple[int, ...]],
    naming: Naming | None,
    stored: str,
    directory: Path,
) -> dict[str, Tensor]:
    """Return outpace's tensors that are stored as one: transposed if needed, split, in fp32."""
    whole = tensor.read()
    require_numbers(whole, f"{directory}: {tensor.name}")
    if naming is not None and naming.is_transposed(stored):
        whole = whole.t()
    parts = whole.split([shapes[name][0] for name in names])
    return {
        name: part.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        for name, part in zip(names, parts, strict=True)
    }


def require_numbers(tensor: Tensor, name: str) -> None:
    """Refuse weights that contain NaN or infinity."""
    if not tensor.is_floating_point() or not tensor.numel():
        return
    low, high = torch.aminmax(tensor.detach())  # both are NaN if any value is NaN
    if bool(torch.isfinite(low)) and bool(torch.isfinite(high)):
        return
    count = int((~torch.isfinite(tensor)).sum())
    raise BadInputError(
        f"{name} holds {count} values that are NaN or infinite, of {tensor.numel()}: the weights "
        "are damaged, or from a run that diverged. Use another copy, or an earlier "
        "checkpoint."
    )


def read_token_rows(directory: Path, numbers: Sequence[int]) -> list[Tensor]:
    """Return the rows of these tokens in the embedding, and in an untied head, in fp32.

    Ids beyond the last row are skipped. Raises BadInputError if the files cannot be read.
    """
    naming = tensor_naming(str(read_config(directory).get("model_type")))
    found = []
    with open_tensors(directory) as tensors:
        named = _index_by_current_name(tensors, naming)
        for name in ("embed.tokens.weight", "head.weight"):
            tensor = named.get(name if naming is None else naming.stored_name(name))
            if tensor is not None:
                rows = [number for number in numbers if number < tensor.shape[0]]
                found.append(tensor.read()[rows].float())
    return found


def stored_names(directory: Path) -> frozenset[str]:
    """Return the names of all tensors stored in a directory.

    Raises BadInputError if the files cannot be read.
    """
    with open_tensors(directory) as tensors:
        return frozenset(tensor.name for tensor in tensors)


def _show_shape(shape: tuple[int, ...]) -> str:
    return " × ".join(str(size) for size in shape) or "a scalar"
