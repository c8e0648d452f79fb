"""An adapter added to the weights that it was trained beside: a whole model again."""

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from outpace.data.chat import ChatFormat
from outpace.data.tokenizer import load_tokenizer
from outpace.interop.config import read_config, spec_from_hf
from outpace.interop.huggingface import read_weights, write_model
from outpace.interop.models import OpenedModel, open_model
from outpace.interop.origin import tokenizer_writer
from outpace.interop.peft import ADAPTER_CONFIG, NOTE, adapter_notes, merge, named_base
from outpace.records.errors import BadInputError, shorten
from outpace.records.plan import Base
from outpace.records.run import RunRecord
from outpace.training.run_dir import RUN_FILE

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Merged:
    """The number of parameters written, and what should be known of the adapter."""

    parameters: int
    notes: tuple[str, ...]


def merge_adapter(
    source: Path, out: Path, *, model: Path | None, base: Base | None, dtype: str
) -> Merged:
    """Write the Hugging Face directory of an adapter, or a run's, merged.

    `model` are the weights to add it to, by default those that it names; `base` is their form, by
    default the one that it was trained beside. Raises BadInputError.
    """
    opened = _with_base(source, model)
    assert opened.spec is not None and opened.weights is not None and opened.adapter is not None
    if out.resolve() in (opened.weights.resolve(), opened.adapter.resolve(), source.resolve()):
        raise BadInputError(f"--out {out} is what is merged. Name another directory.")
    if out.is_dir() and any(out.iterdir()):
        raise BadInputError(f"--out {out} is there already, and not empty. Name another directory.")
    _require_tokenizer_fits(opened)
    weights = read_weights(opened.weights, opened.spec)
    merge(weights, opened.adapter, opened.spec, opened.weights, base)
    save = tokenizer_writer(opened.tokenizer) if opened.tokenizer else None
    write_model(
        out, opened.spec, weights, save, DTYPES[dtype], origin=opened.folder,
        stop_ids=_stop_ids(opened),
    )  # fmt: skip
    return Merged(
        sum(tensor.numel() for tensor in weights.values()),
        (*adapter_notes(opened.adapter), *_base_notes(opened)),
    )


def _require_tokenizer_fits(opened: OpenedModel) -> None:
    """Refuse an adapter whose own tokenizer has tokens that the base has no embeddings of."""
    if opened.tokenizer is None or opened.tokenizer != opened.adapter:
        return
    assert opened.spec is not None
    size = load_tokenizer(str(opened.tokenizer)).vocab_size
    if size > opened.spec.vocab:
        raise BadInputError(
            f"the tokenizer in {opened.adapter} has a vocabulary of {size}, but the model in "
            f"{opened.weights} {opened.spec.vocab}: the adapter was trained beside longer "
            "embeddings, which it does not hold. Merge it into the model with these (--model DIR)."
        )


def _base_notes(opened: OpenedModel) -> tuple[str, ...]:
    """Say that the weights are not those that the adapter names, where nothing else tells."""
    assert opened.adapter is not None and opened.weights is not None
    named = named_base(opened.adapter)
    config = read_config(opened.weights)
    if (opened.adapter / NOTE).is_file() or not named or named == config.get("_name_or_path"):
        return ()
    with suppress(OSError, RuntimeError):  # no name of a folder
        if Path(named).expanduser().resolve() == opened.weights.resolve():
            return ()
    return (
        f"the adapter names {shorten(named)} as its base, and was added to {opened.weights}: "
        "whether these are the weights that it was trained beside cannot be told from its files",
    )


def _stop_ids(opened: OpenedModel) -> tuple[int, ...]:
    """Return what ends an answer, if a run taught the adapter to answer."""
    assert opened.adapter is not None
    record = opened.adapter.parent / RUN_FILE
    tokenizer = (
        opened.adapter if (opened.adapter / "tokenizer.json").is_file() else opened.tokenizer
    )
    if tokenizer is None or opened.adapter.name != "model" or not record.is_file():
        return ()
    if RunRecord.load(record).settings.task != "chat":
        return ()
    return (ChatFormat(load_tokenizer(str(tokenizer))).stop_id,)


def _with_base(source: Path, model: Path | None) -> OpenedModel:
    """The adapter, opened, with the weights named in the place of those that it names."""
    inner = source / "model" if (source / "model" / ADAPTER_CONFIG).is_file() else source
    if not (inner / ADAPTER_CONFIG).is_file():
        raise BadInputError(
            f"{source} holds no adapter (no {ADAPTER_CONFIG}). Name a run that was trained with "
            "--lora-rank and reached its end, or a folder that peft wrote."
        )
    if model is None:
        return open_model(str(inner))
    given = open_model(str(model))
    if given.weights is None or given.spec is None or given.adapter is not None:
        raise BadInputError(f"--model {model} has no weights of its own to merge into.")
    tokenizer = inner if (inner / "tokenizer.json").is_file() else given.tokenizer
    return replace(given, spec=spec_from_hf(given.weights), adapter=inner, tokenizer=tokenizer)
