"""Models by name: presets, each with its source (presets.json), and outlines."""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from outpace.catalog.outlines import OUTLINES
from outpace.catalog.tables import read_table
from outpace.records.base import Record
from outpace.records.errors import BadInputError, nearest_model, suggest
from outpace.records.model import ModelSpec


class Preset(Record):
    """A model's dimensions and their source."""

    spec: ModelSpec
    source: str


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {name: Preset.parse(values, name) for name, values in read_table("presets").items()}
)


def _list_repositories() -> Iterator[tuple[str, str]]:
    """Yield each known Hugging Face repository, in lower case, with the catalog's name for it."""
    for name, one in PRESETS.items():
        for repository in re.findall(r"config\.json of (\S+/\S+) on Hugging Face", one.source):
            yield repository.casefold(), name
    for name, known in OUTLINES.items():
        # OPT-175B is not on the Hub, so a smaller model's name is used below.
        if found := re.match(r"config\.json of (\S+/\S+) on Hugging Face", known.source):
            yield found[1].casefold(), name


_BY_HUB: Mapping[str, str] = MappingProxyType(dict(_list_repositories()))


def named_model(reference: str) -> str:
    """Return the catalog's name for the model `reference`: that of a preset or an outline.

    Outlines are models that outpace plans for but cannot train. Case is ignored, and spaces count
    as "-": "Llama-3.1-8B" and "Mixtral 8x7B" are found. Any other reference is returned unchanged.
    A caller that also accepts files must first check for a file of this name.
    """
    name = reference.casefold().replace(" ", "-")
    return name if name in PRESETS or name in OUTLINES else reference


def name_of_hub(reference: str) -> str | None:
    """Return the catalog's name for the model of a Hugging Face repository ("Qwen/Qwen2.5-7B").

    Returns None if the catalog does not have the model.
    """
    return _BY_HUB.get(reference.casefold())


def without_weights(reference: str) -> str:
    """Return the catalog's name for the model of a Hub repository, which then needs no download.

    This is for callers that need only the model's dimensions, not its weights. Any other reference
    is returned unchanged, and so is the path of an existing file or folder.
    """
    try:
        is_file = Path(reference).expanduser().exists()
    except (OSError, RuntimeError):  # name too long, or no home directory
        is_file = False
    return reference if is_file else name_of_hub(reference) or reference


def unknown_model(reference: str, known: Iterable[str]) -> BadInputError:
    """Return the error for a reference that is neither a known model nor an existing path.

    For a Hub repository, the message says how to download it, and names a preset with the same
    dimensions if there is one.
    """
    message = f"there is no preset, directory or file named {reference!r}."
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", reference):
        message += (
            f"{nearest_model(reference, known)} `outpace models` lists every model known by name."
        )
        return BadInputError(message)
    folder = reference.rpartition("/")[2]
    alike = name_of_hub(reference)
    message += (
        " outpace downloads no models. If it is a model of the Hugging Face Hub: hf download "
        f"{reference} --local-dir {folder}, then --model {folder}."
    )
    if alike is None:
        return BadInputError(f"{message} `outpace models` lists every model known by name.")
    return BadInputError(
        f"{message} If you do not need its weights, use --model {alike}, which has the same "
        "dimensions."
    )


def untrained_model(reference: str) -> BadInputError | None:
    """Return the error for training a model that outpace can only plan for (an outline).

    The same error is for building or tracing such a model. Returns None for all other models.
    """
    name = name_of_hub(reference) or named_model(reference)
    if name not in OUTLINES:
        return None
    return BadInputError(
        f"{OUTLINES[name].untrained}, so it cannot train {name}, nor build or trace it. `outpace "
        "plan` and `outpace estimate` predict its time, memory and layouts: outpace plan --model "
        f"{name} --machine NAME"
    )


def preset(name: str) -> ModelSpec:
    """Return the dimensions of a preset.

    Raises BadInputError, which suggests the closest presets, if there is no such preset.
    """
    try:
        return PRESETS[name].spec
    except KeyError:
        raise BadInputError(
            f"there is no model preset {name!r}.{suggest(name, PRESETS)} `outpace models` lists "
            "every model known by name."
        ) from None
