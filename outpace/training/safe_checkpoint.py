"""Reader of checkpoints that never runs code from them, since they may come from anyone.

torch's reader unpickles `.metadata`, and values other than tensors, without restrictions. This one
allows only plain values and the classes of DCP's metadata.
"""

import io
import pickle
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from outpace.records.errors import BadInputError
from outpace.training.checkpoint_metadata import METADATA_FILE

# What the metadata that torch writes refers to, by module.
_NAMES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "WindowsPath"},
    "pathlib._local": {"PosixPath", "WindowsPath"},
}  # fmt: skip


class RestrictedReader(FileSystemReader):
    """DCP's reader of a folder, with restricted unpickling. Raises BadInputError if refused."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._metadata = read_metadata(folder)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata, which were read at construction."""
        about = self._metadata.storage_meta or StorageMeta()
        about.load_id = self.load_id
        self._metadata.storage_meta = about
        return self._metadata


class PlainLoadPlanner(DefaultLoadPlanner):
    """DCP's load planner, restricted to tensors and plain values."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load a value into the state. Raises BadInputError if loading it could run code."""
        name = read_item.dest_index.fqn
        try:
            found = torch.load(value, weights_only=True)
        except pickle.UnpicklingError:
            raise BadInputError(
                f"{name} is not a plain value. outpace does not load it, since that could run code"
            ) from None
        set_element(self.original_state_dict, self.mappings[name], found)


_IN_PYTHON: Any = pickle._Unpickler


def _load_build(unpickler: Any) -> None:
    """Set the state of an unpickled dataclass; refuse to modify anything else, such as a class."""
    made = unpickler.stack[-2]
    if isinstance(made, type) or not is_dataclass(made):
        raise pickle.UnpicklingError(f"it would modify {made!r}")
    _IN_PYTHON.load_build(unpickler)


class _Unpickler(_IN_PYTHON):  # type: ignore[misc]
    """Unpickler in pure Python, so that single instructions can be refused."""

    dispatch: ClassVar = {**_IN_PYTHON.dispatch, pickle.BUILD[0]: _load_build}

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(vars(torch).get(name), torch.dtype)
        if is_dtype or name in _NAMES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which no checkpoint needs")


def read_metadata(folder: Path) -> Metadata:
    """Return a checkpoint's metadata.

    Raises BadInputError if they cannot be read, would run code, or refer to files outside the
    folder.
    """
    path = folder / METADATA_FILE
    try:
        with path.open("rb") as file:
            found = _Unpickler(file).load()
        files = {info.relative_path for info in (found.storage_data or {}).values()}
    except OSError as error:
        raise BadInputError(f"cannot read {path}: {error.strerror}") from None
    except Exception as error:  # damaged pickles raise many types of errors
        raise BadInputError(f"{path} cannot be read (no code in it was run): {error}") from None
    outside = [name for name in files if Path(str(name)).name != name]
    if not isinstance(found, Metadata) or outside:
        raise BadInputError(f"{path} refers to files outside its folder: {sorted(outside)[:3]}")
    return found
