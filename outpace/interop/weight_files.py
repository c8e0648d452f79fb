"""Weight files of a Hugging Face model and their tensors."""

import json
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from outpace.records.checksums import require_readable
from outpace.records.errors import BadInputError, excerpt, first_names, shorten

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
BIN_SINGLE, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
NAMES_SHOWN = 5  # in a message
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
_WRAPPED = "module."
_SAMPLE_BYTES = 1 << 20


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file; `read` loads it."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], Tensor]


def has_weights(directory: Path) -> bool:
    """Return whether a directory has weight files that `read_weights` can read."""
    return any((directory / name).is_file() for name in (SINGLE, INDEX, BIN_SINGLE, BIN_INDEX))


def unread_weights(directory: Path) -> list[str]:
    """Return files in a directory and its subfolders that may hold weights but are not read.

    Files of optimizers, schedulers and the like in a trainer's checkpoint are excluded, and so are
    .bin files whose names suggest data.
    """
    found = [*directory.glob("*"), *directory.glob("*/*")]
    return sorted(
        str(path.relative_to(directory))
        for path in found
        if path.suffix in _WEIGHT_SUFFIXES
        and not _NO_WEIGHTS.match(path.name)
        and not (
            path.suffix == ".bin" and _may_be_data(path, in_subfolder=path.parent != directory)
        )
        and path.is_file()
    )


def _may_be_data(path: Path, in_subfolder: bool) -> bool:
    if _MODEL_NAME.search(path.stem.lower()):
        return False
    return in_subfolder or _DATA_NAME.search(path.stem.lower()) is not None


def weight_files(directory: Path) -> list[Path]:
    """Return the files that hold a model's weights. Raises BadInputError if some are missing."""
    for single, index in ((SINGLE, INDEX), (BIN_SINGLE, BIN_INDEX)):
        if (directory / single).is_file():
            _require_one_model(directory / single, directory / index)
            return [directory / single]
        if (directory / index).is_file():
            return _list_shards(directory / index)
    raise BadInputError(
        f"{directory} holds no weights (no {SINGLE} or {INDEX}). Use --init random to start from "
        "random weights."
    )


def _require_one_model(single: Path, index: Path) -> None:
    """Refuse a single-file model next to a sharded one: programs disagree on which one to read.

    An index without its shards is ignored.
    """
    parts: list[Path] = []
    with suppress(BadInputError):
        parts = _list_shards(index)
    if parts and single not in parts:
        raise BadInputError(
            f"{single.parent} holds two models, {single.name}, and {index.name} with "
            f"{parts[0].name} and {len(parts) - 1} more. Remove the one that you do not want."
        )


def fingerprint(directory: Path) -> str:
    """Return the fingerprint (`fingerprint_files`) of a directory's weight files."""
    return fingerprint_files(weight_files(directory), _SAMPLE_BYTES)


def fingerprint_files(files: Sequence[Path], sample_bytes: int) -> str:
    """Return a hash of weight files' names, sizes and samples of their contents.

    Samples are taken from the beginning, which lists the tensors, and from the middle and the end,
    which change when the weights are trained further. Each has `sample_bytes`.
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


def _list_shards(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except OSError as error:
        raise BadInputError(f"cannot read {index}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise BadInputError(f"{index} is corrupt: it has no weight_map of files") from None
    outside = [excerpt(name) for name in names if Path(str(name)).name != name]
    if outside:
        raise BadInputError(
            f"{index} names files outside of its directory: {first_names(outside, NAMES_SHOWN)}"
        )
    there = {path.name for path in index.parent.iterdir() if path.is_file()}
    absent = [shorten(name) for name in names if name not in there]
    if absent:
        raise BadInputError(
            f"{index} names {len(names)} files, but {len(absent)} of them are missing: "
            f"{first_names(absent, NAMES_SHOWN)}. Fetch the model again."
        )
    return [index.parent / name for name in names]


def _open_safetensors(path: Path, stack: ExitStack) -> list[StoredTensor]:
    require_readable(path)
    try:
        file = stack.enter_context(safe_open(str(path), framework="pt"))
        return [_make_stored_tensor(path, file, name) for name in file.keys()]  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError) as error:
        said = shorten(str(error))
        raise BadInputError(f"{path} is corrupt or truncated: {said}. Fetch it again.") from None


def _make_stored_tensor(path: Path, file: Any, name: str) -> StoredTensor:
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
        # torch's format before 1.6 is not a zip file, and is read whole.
        mapped = zipfile.is_zipfile(path)
        values = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        return [
            StoredTensor(
                path, name, tuple(t.shape), kinds.get(t.dtype, str(t.dtype)), partial(_identity, t)
            )
            for name, t in values.items()
        ]
    except pickle.UnpicklingError as error:
        raise BadInputError(_explain_unpickling_error(path, str(error))) from None
    except Exception as error:  # zipfile and torch raise many errors for broken files
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BadInputError(f"{path} cannot be read: {first}") from None


def _explain_unpickling_error(path: Path, torch_message: str) -> str:
    """Explain why a pickle is not loaded; torch's own message suggests running its code."""
    code = re.search(r"GLOBAL ([\w.]+)", torch_message)
    if code is None:
        return f"{path} cannot be read: it holds no weights that torch can read. Fetch it again."
    return (
        f"{path} refers to code, {code[1]}, which would run when the file is loaded. Nothing "
        "was run. Use a copy of the model with model.safetensors, from a source that you trust."
    )


def _identity(tensor: Tensor) -> Tensor:
    return tensor


@contextmanager
def open_tensors(directory: Path) -> Iterator[list[StoredTensor]]:
    """Open a directory's weight files and yield their tensors."""
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
        yield _strip_wrapper_prefixes(tensors)


def _strip_wrapper_prefixes(tensors: Sequence[StoredTensor]) -> list[StoredTensor]:
    """Return the tensors without the name prefixes of wrappers.

    A compiled model is saved with `_orig_mod.` before all names or within each block, and a
    DistributedDataParallel model with `module.` before all names.
    """
    names = [tensor.name.replace("_orig_mod.", "") for tensor in tensors]
    while names and all(name.startswith(_WRAPPED) for name in names):
        names = [name.removeprefix(_WRAPPED) for name in names]
    return [replace(one, name=name) for one, name in zip(tensors, names, strict=True)]


def _filter_by_index(directory: Path, tensors: Sequence[StoredTensor]) -> list[StoredTensor]:
    """Drop tensors that the index assigns to another file.

    Files left over from another version of the model may contain such tensors.
    """
    index = directory / (INDEX if tensors[0].file.suffix == ".safetensors" else BIN_INDEX)
    files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    return [one for one in tensors if files.get(one.name, one.file.name) == one.file.name]
