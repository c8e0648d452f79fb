"""A finished run, put to use: text from it, and its loss on other data."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from outpace.data.chat import ChatFormat
from outpace.data.corpus import Corpus, prepare
from outpace.data.loader import Batch, Loader
from outpace.data.padded import PaddedDataset
from outpace.data.samples import TokenDataset
from outpace.data.tokenizer import Tokenizer, load_tokenizer
from outpace.interop.models import OpenedModel, open_model
from outpace.interop.own import OwnObjective, build_own
from outpace.launch.materials import build_objective, check_vocab, gather, load_model
from outpace.launch.resolve import DEFAULT_SEQ_LEN, resolve_device
from outpace.nn import generate as generation
from outpace.nn.classifier import ClassificationObjective
from outpace.nn.loss import LanguageModelObjective
from outpace.nn.mixed import Mixed, lower_weights, make_mixed
from outpace.nn.transformer import Transformer
from outpace.parallel import Layout
from outpace.probe.machine import usable_cores
from outpace.records.errors import BadInputError
from outpace.records.measurement import Evaluation
from outpace.records.plan import Plan
from outpace.records.ranks import Ranks
from outpace.records.run import RunRecord
from outpace.records.settings import TrainSettings
from outpace.train.evaluate import evaluate as measure
from outpace.train.run_dir import RUN_FILE


def generate(
    run: Path,
    prompt: str,
    *,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    seed: int,
    device: str,
    chat: bool = False,
) -> str:
    """Text that the run's model writes after `prompt`, the prompt included.

    With `chat` the prompt is what a user says, put into the tokenizer's chat template, and the text
    is the answer alone.

    Raises BadInputError when the run has no model, no tokenizer, or one that cannot write.
    """
    model, tokenizer = _open(run, device)
    stop_id, asked = tokenizer.eos_id, prompt
    if chat:
        talk = ChatFormat(tokenizer)
        stop_id, asked = talk.stop_id, talk.prompt([{"role": "user", "content": prompt}])
    given = tokenizer.encode(asked) or [tokenizer.eos_id]
    ids = generation.generate(
        model,
        given,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
        stop_id=stop_id,
    )
    return tokenizer.decode(ids[len(given) :] if chat else ids)


def evaluate(
    run: Path,
    data: tuple[str, ...] | None,
    *,
    batches: int | None,
    batch_size: int | None,
    device: str,
    text_field: str | None = None,
) -> Evaluation:
    """Loss, perplexity and tokens/s of the run's model.

    `data` defaults to what the run held out; `batches` to all of it. Raises BadInputError.
    """
    opened = open_model(str(run))
    record = _record(run)
    settings = record.settings if record else TrainSettings()
    settings = settings.model_copy(update={"text_field": text_field or settings.text_field})
    target = resolve_device(TrainSettings.parse({"device": device}, "--device"), Ranks())
    precision = record.plan.precision if record else "fp32"
    mixed = make_mixed(precision, target, True, unknown_code=opened.build is not None)
    objective: LanguageModelObjective | OwnObjective | ClassificationObjective
    dataset: Any
    if settings.task != "pretrain":
        objective, dataset = _task(run, opened, settings, data, batch_size, mixed)
        data = None
    elif opened.build is not None:
        own = build_own(opened.build)
        objective, dataset = OwnObjective(own), own.eval_dataset or own.dataset
    else:
        assert opened.spec is not None and opened.weights is not None
        model = load_model(opened, opened.spec)
        objective, dataset = LanguageModelObjective(model, "auto", mixed.dtype), None
    if dataset is None or data is not None:
        dataset = _samples(opened, record, data, settings)
    size = min(batch_size or settings.global_batch, len(dataset))
    lower_weights(objective.to(target), mixed)
    return measure(
        Layout(objective),
        _batches(dataset, size, batches, settings.seed, target),
        step=record.total_steps if record else 0,
        mixed=mixed,
        device=target,
        group=None,
    )


def _task(
    run: Path,
    opened: OpenedModel,
    settings: TrainSettings,
    data: tuple[str, ...] | None,
    batch_size: int | None,
    mixed: Mixed,
) -> tuple[LanguageModelObjective | OwnObjective | ClassificationObjective, PaddedDataset]:
    """The model of a run that was trained for a task, and all samples of the data, each once."""
    update: dict[str, Any] = {
        "model": str(run),
        "init": None,
        "tokenizer": None,
        "lora_rank": None,
    }  # its adapters are in its model
    if data is not None:
        update |= {"data": data, "eval_data": data}
    if batch_size is not None:
        update["global_batch"] = batch_size
    settings = settings.model_copy(update=update)
    cache_dir = settings.cache_dir or Path.home() / ".cache" / "outpace"
    materials = gather(settings, None, cache_dir, usable_cores(), ())
    cpu = torch.device("cpu")
    objective = build_objective(materials, settings, Plan(loss=settings.loss), mixed.dtype, cpu)
    assert isinstance(materials.eval_data, PaddedDataset)
    return objective, materials.eval_data


def _batches(
    dataset: Any, size: int, most: int | None, seed: int, device: torch.device
) -> Iterator[list[Batch]]:
    """Every sample once, or `most` batches of `size`; what is left over comes in smaller ones."""
    whole = len(dataset) // size
    left = len(dataset) % size
    small = math.gcd(size, left)
    parts = [(size, 0, min(most or whole, whole))]
    if left and (most is None or most > whole):
        parts.append((small, whole * size // small, len(dataset) // small))
    for batch_size, start, stop in parts:
        yield from Loader(
            dataset,
            seed=seed,
            global_batch=batch_size,
            micro_batch=batch_size,
            rank=0,
            data_parallel=1,
            start_step=start,
            total_steps=stop,
            workers=0,
            pin_memory=False,
            device=device,
        )


def _samples(
    opened: OpenedModel,
    record: RunRecord | None,
    data: tuple[str, ...] | None,
    settings: TrainSettings,
) -> TokenDataset:
    """The data named, or what the run held out, in samples as long as the run's."""
    tokenizer = load_tokenizer(str(opened.tokenizer)) if opened.tokenizer else None
    positions = opened.spec.max_positions if opened.spec else DEFAULT_SEQ_LEN
    corpus = _held_out(data, settings, tokenizer)
    check_vocab(corpus, tokenizer, opened.spec.vocab if opened.spec else None, opened.name)
    return TokenDataset(
        corpus,
        (record.seq_len if record else None) or min(DEFAULT_SEQ_LEN, positions),
        objective=opened.spec.objective if opened.spec else "causal",
        seed=settings.seed,
        document_attention=settings.document_attention,
        tokenizer=tokenizer,
    )


def _held_out(
    data: tuple[str, ...] | None, settings: TrainSettings, tokenizer: Tokenizer | None
) -> Corpus:
    """The data named, whole; else what the run held out."""
    named = data or settings.eval_data
    return prepare(
        named or settings.data,
        weights=None if named else settings.data_weights,
        text_field=settings.text_field,
        tokenizer=tokenizer,
        cache_dir=settings.cache_dir or Path.home() / ".cache" / "outpace",
        split="all" if named else "validation",
        eval_fraction=settings.eval_fraction,
        processes=usable_cores(),
    )


def _open(run: Path, device: str) -> tuple[Transformer, Tokenizer]:
    """A model that writes, with its tokenizer."""
    opened = open_model(str(run))
    if opened.spec is None:
        raise BadInputError(
            f"{run} holds a person's own model, which outpace cannot make write; "
            "generate works with outpace's and Hugging Face models"
        )
    record = _record(run)
    if record is not None and record.settings.task == "classify":
        raise BadInputError(
            f"{run} is a classifier, which gives labels and writes no text. See how good it is "
            f"with outpace eval --run {run}"
        )
    if opened.weights is None or opened.tokenizer is None:
        lacking = "weights" if opened.weights is None else "tokenizer"
        raise BadInputError(f"{run} has no {lacking}, so there is nothing to generate with")
    model = load_model(opened, opened.spec)
    settings = TrainSettings.parse({"device": device}, "--device")
    target = resolve_device(settings, Ranks())
    return model.to(target).eval(), load_tokenizer(str(opened.tokenizer))


def _record(run: Path) -> RunRecord | None:
    path = run / RUN_FILE
    return RunRecord.load(path) if path.is_file() else None
