"""Inputs of a run: the model, the tokenizer, the data, the objective."""

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import nn

from outpace.data.corpus import Corpus, prepare
from outpace.data.padded import PaddedDataset
from outpace.data.samples import PREDICTED, TokenDataset
from outpace.data.seeding import seed_generators
from outpace.data.sources import files_in_both, open_source, repeated_files
from outpace.data.tokenizer import Tokenizer, load_tokenizer
from outpace.interop.classifier import read_classifier
from outpace.interop.config import read_config
from outpace.interop.config_out import exported_type
from outpace.interop.custom_model import (
    CustomModel,
    CustomObjective,
    build_custom_model,
    read_positions,
    read_vocab,
)
from outpace.interop.huggingface import read_weights
from outpace.interop.models import OpenedModel, open_model
from outpace.interop.peft import merge_into
from outpace.interop.tokenizer_class import export_difference, source_difference
from outpace.interop.weights import unread_weights
from outpace.jobs.defaults import resolve_seq_len
from outpace.jobs.inputs.tasks import TaskModel, held_out_part, load_task_inputs, name_adapters
from outpace.jobs.inputs.tokenizers import tokenizer_for
from outpace.nn.classifier import ClassificationObjective, Classifier
from outpace.nn.lora import add_adapters, first_value
from outpace.nn.loss import LanguageModelObjective
from outpace.nn.mixed import weights_dtype
from outpace.nn.nf4 import require_nf4
from outpace.nn.transformer import INIT_STD, Transformer, drawn_transformer, initial_value
from outpace.parallel.deferred_init import fills_later
from outpace.planner.model.shapes import parameter_shapes
from outpace.probing.hardware.machine import usable_cores
from outpace.records.errors import BadInputError, excerpt
from outpace.records.model import ModelSpec
from outpace.records.places import cache_folder
from outpace.records.plan import Plan
from outpace.records.precisions import PURE
from outpace.records.settings import TrainSettings
from outpace.training.callbacks import Callback, notify

Split = Literal["train", "validation", "all"]


_NARROW_IDS, _WIDE_BYTES = 1 << 16, 4  # number of 2-byte IDs; the next width


@dataclass(frozen=True)
class TrainingInputs:
    """Inputs of a run. `spec` is None for a custom model, `seq_len` for a user's data set."""

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
            _starts_pretrained(self.opened, settings)
            if self.custom_model is None
            else self.opened.kind == "run"
        )

    @property
    def is_transformer(self) -> bool:
        """Return whether the model is outpace's transformer with its head, not a classifier."""
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
        """Estimated number of targets per sample: the masked tokens, or one."""
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
    """Open the model and prepare the data. Raises BadInputError if they do not fit together.

    `origins`: where settings come from, for messages.
    """
    opened = None if live is not None else open_model(settings.model, cache_dir)
    custom_model = _custom_model(opened, live, settings.seed)
    _require_read_weights(opened, settings)
    if settings.lora_rank is not None:
        asked = name_adapters(settings.lora_rank, origins)
        _require_base(settings, opened, custom_model, asked)
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
        return TrainingInputs(name, opened, custom_model, None, None, own, held_out, "own")
    assert spec is not None or custom_model is not None
    positions = spec.max_positions if spec is not None else read_positions(_module(custom_model))
    vocab = spec.vocab if spec is not None else read_vocab(_module(custom_model))
    if settings.task != "pretrain":
        model = TaskModel(opened, spec, positions, vocab)
        found = load_task_inputs(settings, model, plan, cache_dir, callbacks, device_type)
        return TrainingInputs(
            name, opened, custom_model, spec, found.tokenizer, found.train, found.held_out,
            found.train_fingerprint, found.eval_fingerprint, None, found.seq_len, found.labels,
            (
                *_reading_notes(opened, settings),
                *_other_tokenizer_hints(opened, settings, found.tokenizer),
                *_class_hints(opened, settings, found.tokenizer, cache_dir, plan is not None),
                *found.hints,
                *_repeated_file_hints(settings),
            ),
        )  # fmt: skip
    seq_len = resolve_seq_len(settings, positions)
    objective = "causal" if spec is None else spec.objective
    tokenizer = tokenizer_for(settings, opened, vocab, objective, cache_dir, callbacks)
    corpora = [
        _corpus(settings, sources, split, tokenizer, cache_dir, processes, callbacks)
        for sources, split in _splits(settings)
    ]
    for corpus in corpora:
        check_vocab(corpus, tokenizer, vocab, name)
    theirs = tokenizer or _model_tokenizer(opened)
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
        name, opened, custom_model, spec, tokenizer, train, held_out,
        corpora[0].fingerprint, corpora[1].fingerprint, corpora[1], seq_len,
        hints=(
            *_reading_notes(opened, settings),
            *_other_tokenizer_hints(opened, settings, tokenizer),
            *_class_hints(opened, settings, tokenizer, cache_dir),
            *_shared_file_hints(settings),
            *_repeated_file_hints(settings),
            *dict.fromkeys((*corpora[0].hints, *corpora[1].hints, *foreign[:1])),
        ),
    )  # fmt: skip


def prepare_data(settings: TrainSettings, callbacks: Sequence[Callback]) -> None:
    """Prepare and cache the data that training with these settings reads. Raises BadInputError.

    Custom models are skipped, since their code runs only where they train.
    """
    cache_dir = cache_folder(settings.cache_dir, os.environ)
    if open_model(settings.model, cache_dir).build is not None:
        return
    notify(callbacks, "on_stage", "preparing data")
    try:
        gather(settings, None, cache_dir, usable_cores(), callbacks)
    finally:
        notify(callbacks, "close")


def _reading_notes(opened: OpenedModel | None, settings: TrainSettings) -> tuple[str, ...]:
    """Return notes on how the model's folder was read."""
    if opened is None:
        return ()
    notes = list(opened.notes)
    if opened.kind == "huggingface" and opened.weights is None and settings.init is None:
        notes.append(
            f"{opened.folder} has no weights: the model starts with random ones (--init random)"
        )
    if opened.folder is not None and (opened.weights is None or settings.init == "random"):
        std = read_config(opened.folder).get("initializer_range", INIT_STD)
        if std != INIT_STD:
            notes.append(
                f"{opened.folder}: initializer_range {excerpt(std)} is ignored: random weights "
                f"have a standard deviation of {INIT_STD}, and less for projections into the "
                "residual stream"
            )
    return tuple(notes)


def _other_tokenizer_hints(
    opened: OpenedModel | None, settings: TrainSettings, tokenizer: Tokenizer | None
) -> list[str]:
    """Return a hint if stored weights would be trained on IDs from a different tokenizer."""
    if settings.tokenizer is None or tokenizer is None or opened is None:
        return []
    if opened.weights is None or settings.init == "random":
        return []
    if (stored := _model_tokenizer(opened)) is None:
        return []
    names = {number: name for name, number in tokenizer.inner.get_vocab().items()}
    known = stored.inner.get_vocab()
    others = sum(names.get(number) != name for name, number in known.items())
    if not others:
        return []
    return [
        f"--tokenizer {settings.tokenizer} differs from {opened.name}'s tokenizer in {others:,} "
        f"of {len(known):,} ids, for which the stored weights learned other tokens. Leave out "
        "--tokenizer to train with the model's tokenizer"
    ]


def _class_hints(
    opened: OpenedModel | None,
    settings: TrainSettings,
    tokenizer: Tokenizer | None,
    cache_dir: Path,
    exported: bool = True,
) -> list[str]:
    """Note where transformers reads the tokenizer, or its export, differently from outpace."""
    folder = settings.tokenizer or (None if opened is None else opened.tokenizer)
    if tokenizer is None:
        return []
    found = None if folder is None else source_difference(Path(folder), tokenizer, cache_dir)
    if exported and found is None and opened is not None and opened.spec is not None:
        found = export_difference(tokenizer, exported_type(opened.spec), cache_dir)
    return [] if found is None else [found]


def _shared_file_hints(settings: TrainSettings) -> list[str]:
    """Return a hint if validation files are also training files."""
    if settings.eval_data is None:
        return []
    train, held_out = (map(open_source, names) for names in (settings.data, settings.eval_data))
    pairs = itertools.product(list(train), list(held_out))
    found = list(dict.fromkeys(file for pair in pairs for file in files_in_both(*pair)))
    if not found:
        return []
    more = (
        f" and {len(found) - 1} more of --eval-data are" if len(found) > 1 else " of --eval-data is"
    )
    return [
        f"{found[0]}{more} also in --data, so the validation loss would be measured on training "
        "text. Leave it out of one of them"
    ]


def _repeated_file_hints(settings: TrainSettings) -> list[str]:
    """Return hints if sources of --data or --eval-data share files, including copies."""
    hints = []
    for option, names in (("--data", settings.data), ("--eval-data", settings.eval_data or ())):
        sources = [open_source(name) for name in names]
        pairs = itertools.combinations(sources, 2)
        within = [file for source in sources for file in repeated_files(source)]
        between = [file for pair in pairs for file in files_in_both(*pair)]
        found = list(dict.fromkeys((*within, *between)))
        if found:
            more = f" and {len(found) - 1} more files are" if len(found) > 1 else " is"
            hints.append(
                f"{found[0]}{more} in {option} more than once, and counts each time. Leave one "
                "out, unless it is meant to weigh more (--data-weights)"
            )
    return hints


def _require_read_weights(opened: OpenedModel | None, settings: TrainSettings) -> None:
    """Raise BadInputError for a folder whose weights are in unknown files, unless --init random."""
    if opened is None or opened.folder is None or opened.weights is not None:
        return
    found = unread_weights(opened.folder)
    if found and settings.init != "random":
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        raise BadInputError(
            f"{opened.folder} has weights in {found[0]}{more}, but none in the files that outpace "
            "reads (model.safetensors or pytorch_model.bin, or their .index.json with its "
            "parts). Save the model with transformers' save_pretrained, or start with random "
            "weights: --init random."
        )


def _require_base(
    settings: TrainSettings,
    opened: OpenedModel | None,
    custom_model: CustomModel | None,
    asked: str,
) -> None:
    """Raise BadInputError for a base model that does not support adapters.

    `asked` names the setting that requests them.
    """
    if custom_model is not None or opened is None:
        raise BadInputError(
            f"{asked} applies to outpace's and Hugging Face models. In a custom model, freeze "
            "the weights that should not be trained (requires_grad)."
        )
    if not _starts_pretrained(opened, settings) and settings.init != "random":
        other = "" if asked.startswith("-") else ", or a plan without adapters"
        raise BadInputError(
            f"{asked} trains adapters over pretrained weights, but {opened.name} would start with "
            "random ones, which stay frozen. Give a Hugging Face directory or a run with "
            f"--model{other}; to measure only speed or memory, add --init random."
        )
    if opened.adapter is not None:
        raise BadInputError(
            f"{asked}: {opened.name} is already an adapter, and a second one cannot be stacked on "
            f"it. Merge it first: outpace merge {opened.adapter} --out DIR, then --model DIR."
        )
    if settings.base == "nf4":
        require_nf4()


def _splits(settings: TrainSettings) -> list[tuple[tuple[str, ...], Split]]:
    if settings.eval_data is not None:
        return [(settings.data, "all"), (settings.eval_data, "all")]
    return [(settings.data, "train"), (settings.data, "validation")]


def _custom_model(
    opened: OpenedModel | None, live: nn.Module | Callable[[], Any] | None, seed: int
) -> CustomModel | None:
    """Return the user's model, built after seeding so that every rank draws the same weights."""
    if isinstance(live, nn.Module):
        return build_custom_model(lambda: live)
    seed_generators(seed)
    if live is not None:
        return build_custom_model(live)
    if opened is not None and opened.build is not None:
        return build_custom_model(opened.build)
    return None


def _module(custom_model: CustomModel | None) -> nn.Module:
    assert custom_model is not None
    return custom_model.module


def _with_dropout(spec: ModelSpec, settings: TrainSettings) -> ModelSpec:
    if settings.dropout is None:
        return spec
    return spec.model_copy(update={"dropout": settings.dropout})


def _corpus(
    settings: TrainSettings,
    sources: tuple[str, ...],
    split: Split,
    tokenizer: Tokenizer | None,
    cache_dir: Path,
    processes: int,
    callbacks: Sequence[Callback],
) -> Corpus:
    def progress(what: str, done: int, total: int | None) -> None:
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
        progress=progress,
    )


def check_vocab(corpus: Corpus, tokenizer: Tokenizer | None, vocab: int | None, name: str) -> None:
    """Raise BadInputError for IDs in the data that the model has no embedding for."""
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
    """Raise BadInputError for a tokenizer whose tokens exceed the model's embedding."""
    if tokenizer.vocab_size > vocab:
        raise BadInputError(
            f"the tokenizer has a vocabulary of {tokenizer.vocab_size}, but {name} has {vocab}. "
            "Use a model with a vocabulary at least as large, or another tokenizer."
        )


def _model_tokenizer(opened: OpenedModel | None) -> Tokenizer | None:
    """Return the tokenizer stored with a model, if any; it may have encoded the data."""
    if opened is None or opened.tokenizer is None:
        return None
    try:
        return load_tokenizer(str(opened.tokenizer))
    except BadInputError:
        return None


def foreign_id_hints(corpus: Corpus, tokenizer: Tokenizer | None) -> list[str]:
    """Return a note if the data's IDs are probably another tokenizer's, or if some were lost."""
    if tokenizer is None:
        return []
    narrow = any(stream.id_bytes < _WIDE_BYTES for stream in corpus.streams)
    if narrow and tokenizer.vocab_size > _NARROW_IDS:
        return [
            f"the data has token ids of 2 bytes, up to {_NARROW_IDS - 1:,}, but the tokenizer has "
            f"{tokenizer.vocab_size:,} tokens. Larger ids, if there were any, wrapped around by "
            f"{_NARROW_IDS:,}. Write ids as uint32, or give texts"
        ]
    if corpus.vocab_needed <= tokenizer.vocab_size:
        return []
    return [
        f"the data has token ids up to {corpus.vocab_needed - 1}, but the model's tokenizer has "
        f"{tokenizer.vocab_size} tokens. They were probably made with another tokenizer, whose "
        "ids have other meanings. Give texts, or ids of this tokenizer"
    ]


def build_objective(
    inputs: TrainingInputs,
    settings: TrainSettings,
    plan: Plan,
    compute_dtype: torch.dtype | None,
    device: torch.device,
) -> LanguageModelObjective | CustomObjective | ClassificationObjective:
    """Build the model with its loss on the device, with its initial weights in fp32.

    `compute_dtype` is the dtype of a language model's matmuls (see `LanguageModelObjective`). If no
    rank holds the whole model, it is on the meta device: lay it out, then `fill` it.
    """
    if inputs.custom_model is not None:
        return CustomObjective(inputs.custom_model).to(device)
    assert inputs.spec is not None and inputs.opened is not None
    place = _drawing_place(plan, device)
    if inputs.labels is not None:
        classifier = _initial_classifier(inputs.opened, inputs.spec, inputs.labels, settings, place)
        return ClassificationObjective(classifier).to(device)
    if inputs.is_transformer and fills_later(plan):
        with torch.device("meta"):
            empty = add_adapters(Transformer(inputs.spec), plan, settings.seed)
        return LanguageModelObjective(empty, plan.loss, compute_dtype, plan.compile)
    model = initial_model(inputs.opened, inputs.spec, settings, place)
    add_adapters(model, plan, settings.seed, device)
    return LanguageModelObjective(model, plan.loss, compute_dtype, plan.compile).to(device)


def _drawing_place(plan: Plan, device: torch.device) -> "DrawingPlace":
    """Return the device and dtype for drawing random weights: on the GPU, if there is one.

    Weights that will be quantized to 4 bits are drawn in host memory.
    """
    if device.type != "cuda" or plan.base == "nf4":
        return DrawingPlace()
    pure = weights_dtype(plan.precision) if plan.precision in PURE else None
    return DrawingPlace(device, pure or torch.float32)


def weights_of(
    inputs: TrainingInputs, settings: TrainSettings, plan: Plan, device: torch.device
) -> Callable[[str], torch.Tensor]:
    """Return a function that maps a name to the whole initial weight, stored or newly drawn."""
    spec, opened = inputs.spec, inputs.opened
    assert spec is not None and opened is not None
    shapes, seed = parameter_shapes(spec), settings.seed
    stored = stored_weights(opened, spec) if _starts_pretrained(opened, settings) else None

    def value_of(name: str) -> torch.Tensor:
        adapter = first_value(name, shapes, plan.lora_rank, seed)
        if adapter is not None:
            return adapter
        if stored is not None:
            return stored.pop(name)
        return initial_value(spec, seed, name, shapes[name], device)

    return value_of


@dataclass(frozen=True)
class DrawingPlace:
    """The device and dtype in which random weights are drawn."""

    device: torch.device = torch.device("cpu")  # noqa: RUF009 (a constant)
    dtype: torch.dtype = torch.float32


def initial_model(
    opened: OpenedModel, spec: ModelSpec, settings: TrainSettings, place: DrawingPlace
) -> Transformer:
    """Return the model with its stored weights, or with weights drawn from the seed."""
    if not _starts_pretrained(opened, settings):
        return drawn_transformer(spec, settings.seed, place.device, place.dtype)
    return load_model(opened, spec)


def _initial_classifier(
    opened: OpenedModel,
    spec: ModelSpec,
    labels: Sequence[str],
    settings: TrainSettings,
    place: DrawingPlace,
) -> Classifier:
    """Build a classifier like `initial_model`, with a layer over the labels."""
    if not _starts_pretrained(opened, settings):
        model = drawn_transformer(spec, settings.seed, place.device, place.dtype)
        return Classifier(model, len(labels), settings.seed)
    assert opened.weights is not None
    return read_classifier(opened.weights, spec, labels, settings.seed)


def load_model(opened: OpenedModel, spec: ModelSpec) -> Transformer:
    """Load stored weights into outpace's model, without drawing random ones first."""
    with torch.device("meta"):
        model = Transformer(spec)
    model.load_state_dict(stored_weights(opened, spec), assign=True)
    return model


def stored_weights(opened: OpenedModel, spec: ModelSpec) -> dict[str, torch.Tensor]:
    """Return the stored weights under outpace's names, with any adapter merged in."""
    assert opened.weights is not None
    weights = read_weights(opened.weights, spec)
    if opened.adapter is not None:
        merge_into(weights, opened.adapter, spec, opened.weights)
    return weights


def _starts_pretrained(opened: OpenedModel, settings: TrainSettings) -> bool:
    if settings.init == "pretrained" and opened.weights is None:
        raise BadInputError(
            f"--init pretrained: {opened.name} is a {opened.kind} and has no weights. Pass a "
            "Hugging Face directory or a run, or use --init random."
        )
    return settings.init != "random" and opened.weights is not None
