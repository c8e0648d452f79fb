"""Inputs of a run: the model, the tokenizer, the data, the objective."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from torch import nn

from outpace.data.corpus import Corpus, prepare
from outpace.data.padded_batches import PaddedDataset
from outpace.data.samples import PREDICTED, TokenDataset
from outpace.data.seeding import seed_generators
from outpace.data.tokenizer import Tokenizer
from outpace.interop.custom_model import CustomModel, build_custom_model, read_positions, read_vocab
from outpace.interop.models import OpenedModel, open_model
from outpace.interop.weight_files import unread_weights
from outpace.jobs.defaults import resolve_seq_len
from outpace.jobs.inputs.hints import (
    class_hints,
    foreign_id_hints,
    mode_hints,
    model_tokenizer,
    other_tokenizer_hints,
    reading_notes,
    repeated_file_hints,
    shared_file_hints,
)
from outpace.jobs.inputs.tasks import TaskModel, held_out_part, load_task_inputs, name_adapters
from outpace.jobs.inputs.tokenizers import tokenizer_for
from outpace.nn.nf4 import require_nf4
from outpace.probing.hardware.machine import usable_cores
from outpace.records.cache_folders import cache_folder
from outpace.records.errors import BadInputError
from outpace.records.model import ModelSpec
from outpace.records.plan import Plan
from outpace.records.settings import TrainSettings
from outpace.training.callbacks import Callback, notify

Split = Literal["train", "validation", "all"]


@dataclass(frozen=True)
class TrainingInputs:
    """Model, tokenizer and data of a run.

    `spec` is None for a custom model, and `seq_len` for a custom model with its own data set.
    """

    name: str
    opened: OpenedModel | None
    custom_model: CustomModel | None
    spec: ModelSpec | None
    tokenizer: Tokenizer | None
    train_data: Any
    eval_data: Any | None
    train_fingerprint: str
    eval_fingerprint: str | None = None
    eval_corpus: Corpus | None = None
    seq_len: int | None = None
    labels: tuple[str, ...] | None = None  # a classifier's classes
    hints: tuple[str, ...] = ()

    def starts_from_stored(self, settings: TrainSettings) -> bool:
        """Return whether training starts from trained weights."""
        return self.opened is not None and (
            starts_pretrained(self.opened, settings)
            if self.custom_model is None
            else self.opened.kind == "run"
        )

    @property
    def is_transformer(self) -> bool:
        """Whether the model is outpace's transformer with its language-model head."""
        return self.custom_model is None and self.labels is None

    @property
    def targets_per_sample(self) -> int | None:
        """Number of targets per sample; None if it varies (masked tokens, a user's data set)."""
        if isinstance(self.train_data, PaddedDataset):
            return None if self.labels is None else 1
        causal = self.spec is not None and self.spec.causal
        return self.seq_len if causal else None

    @property
    def likely_targets(self) -> int:
        """Estimated number of targets per sample.

        It is the mean of a padded data set, or else the expected number of masked tokens.
        """
        if isinstance(self.train_data, PaddedDataset):
            return self.train_data.mean_targets
        if self.spec is None or self.seq_len is None:
            return 1
        return max(1, round(PREDICTED * self.seq_len))


def gather(
    settings: TrainSettings,
    live: nn.Module | Callable[[], Any] | None,
    cache_dir: Path,
    processes: int,
    callbacks: Sequence[Callback],
    plan: Plan | None = None,
    device_type: str = "cpu",
    origins: Mapping[str, str] = MappingProxyType({}),
) -> TrainingInputs:
    """Open a run's model, prepare its data, and return both with the tokenizer.

    `live` is a custom model that the user passed as an object or function. `origins` has the origin
    of each setting, for messages. Raises BadInputError if model and data do not fit together.
    """
    opened = None if live is not None else open_model(settings.model, cache_dir)
    custom_model = _make_custom_model(opened, live, settings.seed)
    _require_readable_weights(opened, settings)
    if settings.lora_rank is not None:
        asked = name_adapters(settings.lora_rank, origins)
        _require_adapter_base(settings, opened, custom_model, asked)
    spec = None if opened is None or opened.spec is None else _with_dropout(opened.spec, settings)
    name = opened.name if opened is not None else "own"
    if custom_model is not None and settings.init is not None:
        raise BadInputError(
            f"--init {settings.init}: a custom model gets its weights from its own function. "
            "Leave out --init; to start from stored weights, give a run's directory."
        )
    if custom_model is not None and custom_model.dataset is not None:
        if settings.data != ("stdlib",) or settings.task != "pretrain":
            raise BadInputError(f"{name} comes with its own data set. Leave out --data and --task.")
        own, held_out = custom_model.dataset, custom_model.eval_dataset
        hints = tuple(mode_hints(custom_model))
        return TrainingInputs(
            name, opened, custom_model, None, None, own, held_out, "own", hints=hints
        )
    assert spec is not None or custom_model is not None
    positions = spec.max_positions if spec is not None else read_positions(_module_of(custom_model))
    vocab = spec.vocab if spec is not None else read_vocab(_module_of(custom_model))
    found = _DataRequest(settings, opened, custom_model, spec, name, positions, vocab, cache_dir)
    if settings.task != "pretrain":
        return _gather_task_inputs(found, plan, callbacks, device_type)
    return _gather_pretraining_inputs(found, processes, callbacks)


@dataclass(frozen=True)
class _DataRequest:
    """The model and the settings for which data is prepared.

    `positions` is None if sequences may have any length, `vocab` if the model has no token
    embedding.
    """

    settings: TrainSettings
    opened: OpenedModel | None
    custom_model: CustomModel | None
    spec: ModelSpec | None
    name: str
    positions: int | None
    vocab: int | None
    cache_dir: Path

    def hints(self, tokenizer: Tokenizer | None, exported: bool = True) -> tuple[str, ...]:
        """Return hints about the model's folder and the tokenizer.

        `exported`: whether the trained model will be exported for transformers.
        """
        return (
            *reading_notes(self.opened, self.settings),
            *mode_hints(self.custom_model),
            *other_tokenizer_hints(self.opened, self.settings, tokenizer),
            *class_hints(self.opened, self.settings, tokenizer, self.cache_dir, exported),
        )


def _gather_task_inputs(
    model: _DataRequest, plan: Plan | None, callbacks: Sequence[Callback], device_type: str
) -> TrainingInputs:
    m, settings = model, model.settings
    found = load_task_inputs(
        settings, TaskModel(m.opened, m.spec, m.positions, m.vocab), plan, m.cache_dir, callbacks,
        device_type,
    )  # fmt: skip
    return TrainingInputs(
        m.name, m.opened, m.custom_model, m.spec, found.tokenizer, found.train, found.held_out,
        found.train_fingerprint, found.eval_fingerprint, None, found.seq_len, found.labels,
        (
            *m.hints(found.tokenizer, plan is not None),
            *found.hints,
            *repeated_file_hints(settings),
        ),
    )  # fmt: skip


def _gather_pretraining_inputs(
    model: _DataRequest, processes: int, callbacks: Sequence[Callback]
) -> TrainingInputs:
    settings, opened, spec = model.settings, model.opened, model.spec
    name, vocab, cache_dir = model.name, model.vocab, model.cache_dir
    seq_len = resolve_seq_len(settings, model.positions)
    objective = "causal" if spec is None else spec.objective
    tokenizer = tokenizer_for(settings, opened, vocab, objective, cache_dir, callbacks)
    corpora = [
        _prepare_corpus(settings, sources, split, tokenizer, cache_dir, processes, callbacks)
        for sources, split in _train_and_eval_splits(settings)
    ]
    for corpus in corpora:
        check_vocab(corpus, tokenizer, vocab, name)
    theirs = tokenizer or model_tokenizer(opened)
    foreign = [hint for corpus in corpora for hint in foreign_id_hints(corpus, theirs)]
    # Held-out data may be shorter than a sample if it is never evaluated.
    unread = settings.eval_batches == 0 and any(len(one) <= seq_len for one in corpora[1].streams)
    train, held_out = (
        None
        if unread and part
        else TokenDataset(
            corpus,
            seq_len,
            objective=objective,
            seed=settings.seed,
            document_attention=settings.document_attention,
            tokenizer=tokenizer,
            part=part,
        )
        for corpus, part in zip(corpora, ("", f" {held_out_part(settings)}"), strict=True)
    )
    return TrainingInputs(
        name, opened, model.custom_model, spec, tokenizer, train, held_out,
        corpora[0].fingerprint, corpora[1].fingerprint, corpora[1], seq_len,
        hints=(
            *model.hints(tokenizer),
            *shared_file_hints(settings),
            *repeated_file_hints(settings),
            *dict.fromkeys((*corpora[0].hints, *corpora[1].hints, *foreign[:1])),
        ),
    )  # fmt: skip


def prepare_data(settings: TrainSettings, callbacks: Sequence[Callback]) -> None:
    """Prepare and cache the data that training with these settings reads.

    Custom models are skipped, since their code runs only where they train. Raises BadInputError if
    the data cannot be read.
    """
    cache_dir = cache_folder(settings.cache_dir, os.environ)
    if open_model(settings.model, cache_dir).build is not None:
        return
    notify(callbacks, "on_stage", "preparing data")
    try:
        gather(settings, None, cache_dir, usable_cores(), callbacks)
    finally:
        notify(callbacks, "close")


def _require_readable_weights(opened: OpenedModel | None, settings: TrainSettings) -> None:
    if opened is None or opened.folder is None or opened.weights is not None:
        return
    found = unread_weights(opened.folder)
    if found and settings.init != "random":
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        raise BadInputError(
            f"{opened.folder} has weights in {found[0]}{more}, but none in the files that outpace "
            "reads (model.safetensors or pytorch_model.bin, or their .index.json with its "
            "shards). Save the model with transformers' save_pretrained, or start with random "
            "weights: --init random."
        )


def _require_adapter_base(
    settings: TrainSettings,
    opened: OpenedModel | None,
    custom_model: CustomModel | None,
    option: str,
) -> None:
    """Raise BadInputError if the base model does not support adapters.

    `option` is the setting that requests adapters, for messages.
    """
    if custom_model is not None or opened is None:
        raise BadInputError(
            f"{option} applies to outpace's and Hugging Face models. In a custom model, freeze "
            "the weights that should not be trained (requires_grad)."
        )
    if not starts_pretrained(opened, settings) and settings.init != "random":
        other = "" if option.startswith("-") else ", or a plan without adapters"
        raise BadInputError(
            f"{option} trains adapters over pretrained weights, but {opened.name} would start with "
            "random ones, which stay frozen. Give a Hugging Face directory or a run with "
            f"--model{other}; to measure only speed or memory, add --init random."
        )
    if opened.adapter is not None:
        raise BadInputError(
            f"{option}: {opened.name} is already an adapter, and a second one cannot be stacked on "
            f"it. Merge it first: outpace merge {opened.adapter} --out DIR, then --model DIR."
        )
    if settings.base == "nf4":
        require_nf4()


def _train_and_eval_splits(settings: TrainSettings) -> list[tuple[tuple[str, ...], Split]]:
    if settings.eval_data is not None:
        return [(settings.data, "all"), (settings.eval_data, "all")]
    return [(settings.data, "train"), (settings.data, "validation")]


def _make_custom_model(
    opened: OpenedModel | None, live: nn.Module | Callable[[], Any] | None, seed: int
) -> CustomModel | None:
    """Return the custom model, if any, seeding first so that all ranks draw the same weights.

    Raises BadInputError if the user's function returns an optimizer, which would not be used.
    """
    if isinstance(live, nn.Module):
        return build_custom_model(lambda: live)
    seed_generators(seed)
    build = live if live is not None or opened is None else opened.build
    custom = None if build is None else build_custom_model(build)
    if custom is not None and custom.optimizer is not None:
        raise BadInputError(
            "the function that builds the model returns an optimizer, but `outpace train` makes "
            "its own (--optimizer). Leave it out, or use it in your own loop: "
            "outpace.parallelize(…).make_optimizer. `outpace verify` tests the model with it."
        )
    return custom


def _module_of(custom_model: CustomModel | None) -> nn.Module:
    assert custom_model is not None
    return custom_model.module


def _with_dropout(spec: ModelSpec, settings: TrainSettings) -> ModelSpec:
    if settings.dropout is None:
        return spec
    return spec.model_copy(update={"dropout": settings.dropout})


def _prepare_corpus(
    settings: TrainSettings,
    sources: tuple[str, ...],
    split: Split,
    tokenizer: Tokenizer | None,
    cache_dir: Path,
    processes: int,
    callbacks: Sequence[Callback],
) -> Corpus:
    def report_progress(what: str, done: int, total: int | None) -> None:
        notify(callbacks, "on_progress", what, done, total)

    return prepare(
        sources,
        weights=settings.data_weights if sources is settings.data else None,
        text_field=settings.text_field,
        tokenizer=tokenizer,
        cache_dir=cache_dir,
        split=split,
        eval_fraction=settings.eval_fraction,
        processes=processes,
        progress=report_progress,
    )


def check_vocab(corpus: Corpus, tokenizer: Tokenizer | None, vocab: int | None, name: str) -> None:
    """Raise BadInputError if the data has token IDs beyond the model's vocabulary."""
    if vocab is None:
        return
    over = next((stream for stream in corpus.streams if stream.largest() >= vocab), None)
    if over is not None:
        path, place, found = over.first_above(vocab - 1)
        raise BadInputError(
            f"the data's largest token id needs a vocabulary of {corpus.vocab_needed}, but "
            f"{name} has {vocab}: token {place:,} of {path} is {found}. Use a model with a "
            "vocabulary at least as large, or data tokenized for this model."
        )
    if tokenizer is not None:
        check_tokenizer(tokenizer, vocab, name)


def check_tokenizer(tokenizer: Tokenizer, vocab: int, name: str) -> None:
    """Raise BadInputError if the tokenizer has more tokens than the model's vocabulary."""
    if tokenizer.vocab_size > vocab:
        raise BadInputError(
            f"the tokenizer has a vocabulary of {tokenizer.vocab_size}, but {name} has {vocab}. "
            "Use a model with a vocabulary at least as large, or another tokenizer."
        )


def starts_pretrained(opened: OpenedModel, settings: TrainSettings) -> bool:
    """Return whether training starts from stored weights.

    Raises BadInputError for --init pretrained without stored weights.
    """
    if settings.init == "pretrained" and opened.weights is None:
        raise BadInputError(
            f"--init pretrained: {opened.name} is a {opened.kind} and has no weights. Pass a "
            "Hugging Face directory or a run, or use --init random."
        )
    return settings.init != "random" and opened.weights is not None
