"""Hugging Face datasets, from the Hub or from folders written by `save_to_disk`."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from outpace.records.errors import BadInputError


def is_saved_dataset(path: Path) -> bool:
    """Return whether `save_to_disk` wrote this folder."""
    return (path / "dataset_dict.json").is_file() or (
        (path / "dataset_info.json").is_file() and (path / "state.json").is_file()
    )


def dataset_files(dataset: Any) -> tuple[Path, ...]:
    """Return the files that hold the rows of an opened dataset."""
    return tuple(Path(one["filename"]) for one in dataset.cache_files)


def open_dataset(reference: str) -> Any:
    """Open a Hugging Face dataset: hf:NAME[:CONFIG[:SPLIT]], where NAME may be a local path.

    Rows contain plain Python values, whatever format the dataset was saved with. Images and audio
    are not decoded.
    """
    name, config, split = dataset_name(reference)
    try:
        return _disable_formatting(_open_split(reference, name, config, split))
    except BadInputError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise BadInputError(f"the dataset {reference} cannot be opened: {reason}") from None


def _open_split(reference: str, name: str, config: str, split: str) -> Any:
    import datasets

    if not is_saved_dataset(Path(name)):
        return datasets.load_dataset(name, config or None, split=split)
    found = datasets.load_from_disk(name)
    if not isinstance(found, datasets.DatasetDict):
        if split != "train":  # only the training rows were requested
            raise BadInputError(
                f"the dataset {reference} has no splits, so no {split!r}; write hf:{name}"
            )
        return found
    if split not in found:
        raise BadInputError(
            f"the dataset {reference} has no split {split!r}, but "
            f"{', '.join(map(repr, found))}; write hf:{name}::SPLIT"
        )
    return found[split]


def _disable_formatting(dataset: Any) -> Any:
    """Return the dataset with plain Python values and without decoding of media."""
    import datasets

    features = {name: _disable_decoding(kind) for name, kind in dataset.features.items()}
    formatted = dataset.format["type"] is not None or dataset.format["columns"] != [*features]
    if not formatted and features == dict(dataset.features):
        return dataset
    dataset = dataset.with_format(None)  # a copy
    dataset.info.features = datasets.Features(features)
    return dataset


def _disable_decoding(feature: Any) -> Any:
    if isinstance(feature, dict):
        return {name: _disable_decoding(inner) for name, inner in feature.items()}
    if hasattr(feature, "feature"):  # a list
        inner = _disable_decoding(feature.feature)
        return feature if inner == feature.feature else replace(feature, feature=inner)
    if getattr(feature, "decode", False) and type(feature).__name__ != "Json":
        return replace(feature, decode=False)
    return feature


def dataset_name(reference: str) -> tuple[str, str, str]:
    """Split hf:NAME[:CONFIG[:SPLIT]] into its parts; SPLIT defaults to "train".

    The path of a saved dataset may contain colons.
    """
    whole = reference.removeprefix("hf:")
    if is_saved_dataset(Path(whole)):
        return whole, "", "train"
    name, *rest = whole.split(":")
    if not name or len(rest) > 2:
        raise BadInputError(f"{reference!r}: expected hf:NAME[:CONFIG[:SPLIT]]")
    config, split = (*rest, "", "")[:2]
    return name, config, split or "train"
