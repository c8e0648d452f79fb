"""Merging of an adapter into its base model's weights."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from outpace.data.tokenizer_files import load_tokenizer
from outpace.interop.config import read_config, spec_from_hf
from outpace.interop.huggingface import read_weights, write_model
from outpace.interop.models import OpenedModel, open_model
from outpace.interop.origin import tokenizer_writer
from outpace.interop.peft import (
    ADAPTER_CONFIG,
    NOTE,
    adapter_notes,
    merge_into,
    named_base,
    read_note,
)
from outpace.records.base import Record
from outpace.records.errors import BadInputError, shorten
from outpace.records.plan import Base

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class MergedModel(Record):
    """The folder of a merged model, its number of parameters, and notes on the adapter."""

    model: str
    parameters: int
    notes: tuple[str, ...]


def merge_adapter(
    source: Path, out: Path, *, model: Path | None, base: Base | None, dtype: str
) -> MergedModel:
    """Merge an adapter, or that of a run, into its base model; write a Hugging Face directory.

    `model`: folder of the weights to merge into; by default, the base that the adapter names.
    `base`: format of these weights; by default, the one used in training. Raises BadInputError if
    the adapter does not fit the model, or `out` is not empty.
    """
    opened = _open_adapter_over_base(source, model)
    assert opened.spec is not None and opened.weights is not None and opened.adapter is not None
    if out.resolve() in (opened.weights.resolve(), opened.adapter.resolve(), source.resolve()):
        raise BadInputError(
            f"--out {out} is one of the folders to merge. Choose another directory."
        )
    if out.is_dir() and any(out.iterdir()):
        raise BadInputError(f"--out {out} exists and is not empty. Choose another directory.")
    _require_tokenizer_fits(opened)
    weights = read_weights(opened.weights, opened.spec)
    merge_into(weights, opened.adapter, opened.weights, base)
    save = tokenizer_writer(opened.tokenizer) if opened.tokenizer else None
    note = read_note(opened.adapter)
    write_model(
        out, opened.spec, weights, save, DTYPES[dtype], origin=opened.folder,
        stop_ids=() if note is None else note.stop_ids,
    )  # fmt: skip
    return MergedModel(
        model=str(out),
        parameters=sum(tensor.numel() for tensor in weights.values()),
        notes=(*adapter_notes(opened.adapter), *_base_notes(opened)),
    )


def _require_tokenizer_fits(opened: OpenedModel) -> None:
    if opened.tokenizer is None or opened.tokenizer != opened.adapter:
        return
    assert opened.spec is not None
    size = load_tokenizer(str(opened.tokenizer)).vocab_size
    if size > opened.spec.vocab:
        raise BadInputError(
            f"the tokenizer in {opened.adapter} has a vocabulary of {size}, but the model in "
            f"{opened.weights} has {opened.spec.vocab}: the adapter was trained over a larger "
            "embedding, which it does not contain. Merge it into the model with that embedding "
            "(--model DIR)."
        )


def _base_notes(opened: OpenedModel) -> tuple[str, ...]:
    """Return a note if it is unknown whether the adapter was trained on these weights."""
    assert opened.adapter is not None and opened.weights is not None
    named = named_base(opened.adapter)
    config = read_config(opened.weights)
    if (opened.adapter / NOTE).is_file() or not named or named == config.get("_name_or_path"):
        return ()
    with suppress(OSError, RuntimeError):  # not a folder
        if Path(named).expanduser().resolve() == opened.weights.resolve():
            return ()
    return (
        f"the adapter names {shorten(named)} as its base, but was merged into {opened.weights}; "
        "it is unknown whether the adapter was trained on these weights",
    )


def _open_adapter_over_base(source: Path, model: Path | None) -> OpenedModel:
    """Open the adapter over the weights in `model`, or over its named base if `model` is None."""
    inner = source / "model" if (source / "model" / ADAPTER_CONFIG).is_file() else source
    if not (inner / ADAPTER_CONFIG).is_file():
        raise BadInputError(
            f"{source} has no adapter (no {ADAPTER_CONFIG}). Give a run that was trained with "
            "--lora-rank and finished, or a folder that peft wrote."
        )
    if model is None:
        return open_model(str(inner))
    given = open_model(str(model))
    if given.weights is None or given.spec is None or given.adapter is not None:
        raise BadInputError(f"--model {model} has no weights to merge into.")
    tokenizer = inner if (inner / "tokenizer.json").is_file() else given.tokenizer
    return replace(given, spec=spec_from_hf(given.weights), adapter=inner, tokenizer=tokenizer)
