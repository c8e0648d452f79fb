"""Weights of a Hugging Face model directory, read one tensor at a time under outpace's names."""

import json
import pickle
import re
import zipfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from outpace.interop.config import CONFIG_FILE, read_config
from outpace.interop.tensor_names import Naming, group, tensor_naming
from outpace.nn.transformer import Transformer
from outpace.records.checksums import require_readable
from outpace.records.errors import BadInputError, excerpt, first_names, shorten
from outpace.records.model import ModelSpec

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
BIN_SINGLE, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_FLOATS = ("F64", "F32", "BF16", "F16")
_SHOWN = 5
# Weight files under any name, and files that trainers save next to them.
_WEIGHT_SUFFIXES = frozenset(
    {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".ot", ".distcp"}
)
_NO_WEIGHTS = re.compile(
    r"(training_args|optimizer|scheduler|scaler|rng_state|random_states|state)(_\d+)*\."
)
_MODEL_NAME = re.compile(r"model|consolidated|adapter|weights")
# Names of token files from nanoGPT and its successors (fineweb_train_000001.bin).
_DATA_NAME = re.compile(r"(^|[_.-])(train|val|valid|validation|dev|test|tokens?|data)([_.-]|$)")
_HEAD_NAME = re.compile(r"lm_head\.|cls\.predictions\.")
_WRAPPED = "module."
_BLOCK = "blocks.0."
_SAMPLE_BYTES = 1 << 20


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, which is read only on request."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], Tensor]


def expected_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor of the spec's model, under outpace's names.

    Its blocks are equal, so only one is built.
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
    """Read the directory's weights under outpace's names, fp32, on the CPU, for `load_state_dict`.

    Reads safetensors, single or sharded, or else .bin files (nothing in them is executed). At most
    one stored tensor is in memory in addition to the result. Raises BadInputError for files that
    are missing or corrupt, and for tensors that are missing, unexpected or of another shape.
    """
    used = tensor_naming(str(read_config(directory).get("model_type")))
    shapes = expected_shapes(spec)
    groups = group(shapes, used)
    with _open_tensors(directory) as tensors:
        found = _by_canonical_name(tensors, used)
        _check_tied(found, spec, used, directory)
        weights = _convert_all(found, groups, shapes, used, directory)
    return {name: weights[name] for name in shapes}


def read_tensors(
    directory: Path,
    shapes: dict[str, tuple[int, ...]],
    used: Naming | None,
    optional: Collection[str],
    passed_over: str,
) -> dict[str, Tensor]:
    """Read tensors of these shapes like `read_weights`; the `optional` ones may be missing.

    All other tensors in the files must match the pattern `passed_over`.
    """
    groups = group(shapes, used)
    with _open_tensors(directory) as tensors:
        found = _by_canonical_name(tensors, used)
        found = {n: t for n, t in found.items() if n in groups or not re.search(passed_over, n)}
        groups = {
            stored: names
            for stored, names in groups.items()
            if stored in found or not all(name in optional for name in names)
        }
        return _convert_all(found, groups, shapes, used, directory)


def _convert_all(
    found: dict[str, StoredTensor],
    groups: dict[str, list[str]],
    shapes: dict[str, tuple[int, ...]],
    used: Naming | None,
    directory: Path,
) -> dict[str, Tensor]:
    """Check that the files hold exactly the model's tensors, and convert them to outpace's."""
    _check(found, groups, shapes, used, directory)
    weights: dict[str, Tensor] = {}
    for stored, names in groups.items():
        weights.update(_convert(found[stored], names, shapes, used, stored, directory))
    return weights


def _by_canonical_name(
    tensors: Sequence[StoredTensor], used: Naming | None
) -> dict[str, StoredTensor]:
    named: dict[str, StoredTensor] = {}
    for tensor in tensors:
        name = tensor.name if used is None else used.current_name(tensor.name)
        if used is not None and used.is_ignored(name):
            continue
        other = named.setdefault(name, tensor)
        if other is not tensor and not _equal(other, tensor):
            raise BadInputError(
                f"{other.file} and {tensor.file} both hold {tensor.name}, with different values, "
                "so it is unknown which to use. Fetch the model again, or leave only one of them."
                if other.name == tensor.name
                else f"{tensor.file} holds {other.name} and {tensor.name}, which are the same "
                "tensor under an old and a new name, with different values. Leave only one of them."
            )
    return named


def _check_tied(
    found: dict[str, StoredTensor], spec: ModelSpec, used: Naming | None, directory: Path
) -> None:
    """Drop the duplicate of a tied head. Raises BadInputError if head and embedding differ."""
    if used is None:
        return
    bias = used.tied_head.replace("weight", "bias")
    if used.head_bias and bias in found:
        # An untied BERT uses the decoder's bias.
        if not spec.tied or used.head_bias not in found:
            found[used.head_bias] = found[bias]
        del found[bias]
    head = found.get(used.tied_head)
    if not spec.tied or head is None:
        return
    # Some programs store a tied matrix only under the head's name.
    embedding = found.setdefault(used.stored_name("embed.tokens.weight"), head)
    if not _equal(head, embedding):
        raise BadInputError(
            f"{directory / CONFIG_FILE} says that the head is tied to the embedding, but "
            f"{head.name} and {embedding.name} differ. Set tie_word_embeddings to false."
        )
    del found[used.tied_head]


def _equal(one: StoredTensor, other: StoredTensor) -> bool:
    alike = (one.shape, one.dtype) == (other.shape, other.dtype)
    return alike and torch.equal(one.read(), other.read())


def _check(
    found: dict[str, StoredTensor],
    groups: dict[str, list[str]],
    shapes: dict[str, tuple[int, ...]],
    used: Naming | None,
    directory: Path,
) -> None:
    """Refuse files with missing or additional tensors, naming them."""
    missing = [name for name in groups if name not in found]
    unexpected = [tensor.name for name, tensor in found.items() if name not in groups]
    wrong = []
    for name, ours in groups.items():
        tensor, shape = found.get(name), _stored_shape(name, ours, shapes, used)
        if tensor is None:
            continue
        if tensor.shape != shape:
            wrong.append(f"{tensor.name} is {_show(tensor.shape)}, not {_show(shape)}")
        elif tensor.dtype not in _FLOATS:
            wrong.append(f"{tensor.name} is stored as {tensor.dtype}, not as floating point")
    sentences = [
        f"{directory}: {what}: {first_names(names, _SHOWN)}."
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
    elif (prefix := _common_prefix(missing, unexpected)) is not None:
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


def _common_prefix(missing: list[str], unexpected: list[str]) -> str | None:
    """Return the prefix behind which the files have all missing tensors, if there is one."""
    if not missing:
        return None
    first, there = missing[0], set(unexpected)
    for name in unexpected:
        prefix = name.removesuffix(first)
        if name != prefix and all(prefix + one in there for one in missing):
            return prefix
    return None


def _stored_shape(
    stored: str, names: list[str], shapes: dict[str, tuple[int, ...]], used: Naming | None
) -> tuple[int, ...]:
    """Return the shape of a stored tensor that joins outpace's tensors `names`."""
    first, *rest = shapes[names[0]]
    shape = (first * len(names), *rest)
    return shape[::-1] if used is not None and used.is_transposed(stored) else shape


def _convert(
    tensor: StoredTensor,
    names: list[str],
    shapes: dict[str, tuple[int, ...]],
    used: Naming | None,
    stored: str,
    directory: Path,
) -> dict[str, Tensor]:
    """Convert a stored tensor to outpace's: transposed, split, in fp32, in separate memory."""
    whole = tensor.read()
    require_numbers(whole, f"{directory}: {tensor.name}")
    if used is not None and used.is_transposed(stored):
        whole = whole.t()
    parts = whole.split([shapes[name][0] for name in names])
    return {
        name: part.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        for name, part in zip(names, parts, strict=True)
    }


def require_numbers(tensor: Tensor, name: str) -> None:
    """Refuse weights with NaN or infinite values. Raises BadInputError."""
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


@contextmanager
def _open_tensors(directory: Path) -> Iterator[list[StoredTensor]]:
    """Open the directory's weight files and yield all their tensors."""
    paths = weight_files(directory)
    with ExitStack() as stack:
        tensors = []
        for path in paths:
            if path.suffix == ".safetensors":
                tensors += _open_safetensors(path, stack)
            else:
                tensors += _open_bin(path)
        if len(paths) > 1:
            tensors = _filter_by_index(directory, tensors)
        yield _without_wrappers(tensors)


def _without_wrappers(tensors: Sequence[StoredTensor]) -> list[StoredTensor]:
    """Return the tensors under the model's names, without the prefixes of wrappers.

    Compiled models are saved with `_orig_mod.` before all names or before the names in each block,
    and models in DistributedDataParallel with `module.` before all.
    """
    names = [tensor.name.replace("_orig_mod.", "") for tensor in tensors]
    while names and all(name.startswith(_WRAPPED) for name in names):
        names = [name.removeprefix(_WRAPPED) for name in names]
    return [replace(one, name=name) for one, name in zip(tensors, names, strict=True)]


def _filter_by_index(directory: Path, tensors: Sequence[StoredTensor]) -> list[StoredTensor]:
    """Drop tensors that the index assigns to another file.

    Files that remain from another format of the model may contain additional tensors.
    """
    index = directory / (INDEX if tensors[0].file.suffix == ".safetensors" else BIN_INDEX)
    files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    return [one for one in tensors if files.get(one.name, one.file.name) == one.file.name]


def read_token_rows(directory: Path, numbers: Sequence[int]) -> list[Tensor]:
    """Return these tokens' rows of the embedding, and of an untied head, in fp32. Ids beyond the
    last row are left out. Raises BadInputError.
    """
    used = tensor_naming(str(read_config(directory).get("model_type")))
    found = []
    with _open_tensors(directory) as tensors:
        named = _by_canonical_name(tensors, used)
        for name in ("embed.tokens.weight", "head.weight"):
            tensor = named.get(name if used is None else used.stored_name(name))
            if tensor is not None:
                rows = [number for number in numbers if number < tensor.shape[0]]
                found.append(tensor.read()[rows].float())
    return found


def stored_names(directory: Path) -> frozenset[str]:
    """Return the names of the tensors in a directory, as stored. Raises BadInputError."""
    with _open_tensors(directory) as tensors:
        return frozenset(tensor.name for tensor in tensors)


def has_weights(directory: Path) -> bool:
    """Return whether there are files that `read_weights` reads."""
    return any((directory / name).is_file() for name in (SINGLE, INDEX, BIN_SINGLE, BIN_INDEX))


def unread_weights(directory: Path) -> list[str]:
    """Return files in and below a directory that may be weights, but that `read_weights` ignores.

    For a trainer's checkpoint, only files with the model itself are returned. Data files may be
    .bin, too; they are recognised by name.
    """
    found = [*directory.glob("*"), *directory.glob("*/*")]
    return sorted(
        str(path.relative_to(directory))
        for path in found
        if path.suffix in _WEIGHT_SUFFIXES
        and not _NO_WEIGHTS.match(path.name)
        and not (path.suffix == ".bin" and _may_be_data(path, below=path.parent != directory))
        and path.is_file()
    )


def _may_be_data(path: Path, below: bool) -> bool:
    """Return whether a .bin file's name suggests data; `below`: it is in a subfolder."""
    if _MODEL_NAME.search(path.stem.lower()):
        return False
    return below or _DATA_NAME.search(path.stem.lower()) is not None


def weight_files(directory: Path) -> list[Path]:
    """Return the files that hold the weights. Raises BadInputError if some are missing."""
    for single, index in ((SINGLE, INDEX), (BIN_SINGLE, BIN_INDEX)):
        if (directory / single).is_file():
            _require_one_model(directory / single, directory / index)
            return [directory / single]
        if (directory / index).is_file():
            return _shards(directory / index)
    raise BadInputError(
        f"{directory} holds no weights (no {SINGLE} or {INDEX}). Use --init random to start from "
        "random weights."
    )


def _require_one_model(single: Path, index: Path) -> None:
    """Refuse a complete model next to a sharded one, since programs differ in which they read. An
    index without its parts is ignored.
    """
    parts: list[Path] = []
    with suppress(BadInputError):
        parts = _shards(index)
    if parts and single not in parts:
        raise BadInputError(
            f"{single.parent} holds two models, {single.name}, and {index.name} with "
            f"{parts[0].name} and {len(parts) - 1} more. Remove the one that you do not want."
        )


def fingerprint(directory: Path) -> str:
    """Return the fingerprint (`fingerprint_files`) of the weight files in a directory."""
    return fingerprint_files(weight_files(directory), _SAMPLE_BYTES)


def fingerprint_files(files: Sequence[Path], sample_bytes: int) -> str:
    """Return a fingerprint of files with weights: names, sizes, and parts of their contents.

    The parts are the first bytes, which list the tensors, the last bytes, and some bytes in the
    middle, which change if the weights are trained further.
    """
    digest = xxhash.xxh3_128()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for start in sorted({0, size // 2, max(0, size - sample_bytes)}):
                file.seek(start)
                digest.update(file.read(sample_bytes))
    return digest.hexdigest()


def _shards(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except OSError as error:
        raise BadInputError(f"cannot read {index}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise BadInputError(f"{index} is corrupt: it has no weight_map of files") from None
    outside = [excerpt(name) for name in names if Path(str(name)).name != name]
    if outside:
        raise BadInputError(
            f"{index} names files outside of its directory: {first_names(outside, _SHOWN)}"
        )
    there = {path.name for path in index.parent.iterdir() if path.is_file()}
    absent = [shorten(name) for name in names if name not in there]
    if absent:
        raise BadInputError(
            f"{index} names {len(names)} files, but {len(absent)} of them are missing:  "
            f"{first_names(absent, _SHOWN)}. Fetch the model again."
        )
    return [index.parent / name for name in names]


def _open_safetensors(path: Path, stack: ExitStack) -> list[StoredTensor]:
    require_readable(path)
    try:
        file = stack.enter_context(safe_open(str(path), framework="pt"))
        return [_entry(path, file, name) for name in file.keys()]  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError) as error:
        said = shorten(str(error))
        raise BadInputError(f"{path} is corrupt or cut short: {said}. Fetch it again.") from None


def _entry(path: Path, file: Any, name: str) -> StoredTensor:
    part = file.get_slice(name)
    shape, dtype = tuple(part.get_shape()), part.get_dtype()
    return StoredTensor(path, name, shape, dtype, lambda: file.get_tensor(name))


def _open_bin(path: Path) -> list[StoredTensor]:
    kinds = {
        torch.float64: "F64",
        torch.float32: "F32",
        torch.bfloat16: "BF16",
        torch.float16: "F16",
    }
    require_readable(path)
    try:
        mapped = zipfile.is_zipfile(
            path
        )  # torch's format before 1.6 is not a zip file, and is read whole
        values = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        return [
            StoredTensor(
                path, name, tuple(t.shape), kinds.get(t.dtype, str(t.dtype)), partial(_same, t)
            )
            for name, t in values.items()
        ]
    except pickle.UnpicklingError as error:
        raise BadInputError(_unsafe(path, str(error))) from None
    except Exception as error:  # zipfile and torch raise many errors for broken files
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BadInputError(f"{path} cannot be read: {first}") from None


def _unsafe(path: Path, said: str) -> str:
    """Explain why a pickle is not read; torch's own message suggests running its code."""
    code = re.search(r"GLOBAL ([\w.]+)", said)
    if code is None:
        return f"{path} cannot be read: it holds no weights that torch can read. Fetch it again."
    return (
        f"{path} names code, {code[1]}, which would run when the file is loaded. Nothing was run. "
        "Use a "
        "copy of the model with model.safetensors, from a source that you trust."
    )


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _show(shape: tuple[int, ...]) -> str:
    return " × ".join(str(size) for size in shape) or "a scalar"
