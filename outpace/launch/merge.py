"""An adapter added to the weights that it was trained beside: a whole model again."""

from dataclasses import replace
from pathlib import Path

import torch

from outpace.data.chat import ChatFormat
from outpace.data.tokenizer import load_tokenizer
from outpace.interop.config import spec_from_hf
from outpace.interop.huggingface import read_weights, write_model
from outpace.interop.models import OpenedModel, open_model
from outpace.interop.origin import tokenizer_writer
from outpace.interop.peft import ADAPTER_CONFIG, merge
from outpace.records.errors import BadInputError
from outpace.records.plan import Base
from outpace.records.run import RunRecord
from outpace.train.run_dir import RUN_FILE

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def merge_adapter(
    source: Path, out: Path, *, model: Path | None, base: Base | None, dtype: str
) -> int:
    """Write the Hugging Face directory of an adapter, or a run's, merged; returns its parameters.

    `model` are the weights to add it to, by default those that it names; `base` is their form, by
    default the one that it was trained beside. Raises BadInputError.
    """
    opened = _with_base(source, model)
    assert opened.spec is not None and opened.weights is not None and opened.adapter is not None
    if out.resolve() in (opened.weights.resolve(), opened.adapter.resolve(), source.resolve()):
        raise BadInputError(f"--out {out} is what is merged. Name another directory.")
    if out.is_dir() and any(out.iterdir()):
        raise BadInputError(f"--out {out} is there already, and not empty. Name another directory.")
    weights = read_weights(opened.weights, opened.spec)
    merge(weights, opened.adapter, opened.spec, opened.weights, base)
    save = tokenizer_writer(opened.tokenizer) if opened.tokenizer else None
    write_model(
        out, opened.spec, weights, save, DTYPES[dtype], origin=opened.folder,
        stop_ids=_stop_ids(opened),
    )  # fmt: skip
    return sum(tensor.numel() for tensor in weights.values())


def _stop_ids(opened: OpenedModel) -> tuple[int, ...]:
    """What ends an answer, where a run taught the adapter to answer."""
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
    return replace(given, spec=spec_from_hf(given.weights), adapter=inner)
