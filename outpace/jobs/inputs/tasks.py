"""Data of a task: its rows encoded as samples, and the tokenizer."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import xxhash

from outpace.data import classify
from outpace.data.chat import LEARNED_DATE, ChatFormat, messages_of
from outpace.data.conversation_samples import Conversations, encode_all
from outpace.data.misread_tokens import unknown_hints
from outpace.data.padded_batches import (
    MULTIPLE,
    PaddedDataset,
    RaggedSamples,
    round_up,
    shape_multiple,
)
from outpace.data.paraphrases import COLUMNS, NAME, paraphrases
from outpace.data.row import Row
from outpace.data.rows import (
    Table,
    fingerprint,
    nul_hints,
    overlap_hints,
    read_tables,
    split_rows,
    splits_of,
    unread_file_hints,
)
from outpace.data.sample_cache import load_or_encode
from outpace.data.tokenizer import Tokenizer
from outpace.interop.classifier import known_labels, require_exportable, unsupported_task
from outpace.interop.models import OpenedModel
from outpace.interop.untrained_tokens import untrained_token_hints
from outpace.jobs.defaults import resolve_seq_len
from outpace.jobs.inputs.tokenizers import task_tokenizer
from outpace.records.errors import BadInputError
from outpace.records.model import ModelSpec
from outpace.records.plan import Plan, Strategy
from outpace.records.settings import TrainSettings
from outpace.records.strategies import TRAITS
from outpace.training.callbacks import Callback, notify

# Strategies that cannot train a classifier: why, and what to use instead.
NOT_CLASSIFY: dict[Strategy, str] = {
    "dp": "computes a loss over the vocabulary on rank 0. Use ddp",
    "cp": (
        "has no padding masks, and a single rank would hold the token that is classified. Use ddp"
    ),
    "3d": "splits models with a head over the vocabulary. Use zero3 or hsdp",
}


@dataclass(frozen=True)
class TaskData:
    """A task's samples. `labels` are a classifier's classes; `hints` are notes for the user."""

    tokenizer: Tokenizer
    train: PaddedDataset
    held_out: PaddedDataset
    train_fingerprint: str
    eval_fingerprint: str
    seq_len: int
    labels: tuple[str, ...] | None
    hints: tuple[str, ...]


def name_adapters(rank: int, origins: Mapping[str, str]) -> str:
    """Return how the user requested adapters, such as "--lora-rank 8", for messages."""
    origin = origins.get("lora_rank", "")
    return f"lora_rank {rank} of {origin}" if origin.startswith("plan ") else f"--lora-rank {rank}"


def check_task(settings: TrainSettings, plan: Plan, origins: Mapping[str, str]) -> None:
    """Raise BadInputError if the task cannot be trained with this plan or this padding."""
    task = settings.task
    if task == "classify" and plan.strategy in NOT_CLASSIFY:
        raise BadInputError(
            f"--task classify: strategy {plan.strategy} {NOT_CLASSIFY[plan.strategy]}."
        )
    if task == "classify" and plan.lora_rank is not None:
        asked = name_adapters(plan.lora_rank, origins)
        other = "Leave out --lora-rank" if asked.startswith("-") else "Give a plan without adapters"
        raise BadInputError(
            f"{asked} with --task classify: a classifier's new layers are trained in full, and an "
            f"adapter cannot store them. {other}, or use --task chat."
        )
    if settings.padding == "dynamic" and TRAITS[plan.strategy].one_shape:
        raise BadInputError(
            f"--padding dynamic: strategy {plan.strategy} needs batches of one shape. Use "
            "--padding fixed."
        )


def _has_fixed_length(settings: TrainSettings, plan: Plan | None) -> bool:
    if settings.padding is not None or plan is None:
        return settings.padding == "fixed"
    return TRAITS[plan.strategy].one_shape


@dataclass(frozen=True)
class TaskRows:
    """A task's rows, for training and validation, before tokenization."""

    train: list[Row]
    validation: list[Row]
    table: Table
    hints: tuple[str, ...]
    parts: int = 2  # 1 if both are the same rows


@dataclass(frozen=True)
class TaskModel:
    """The model that a task's data are prepared for. `spec` is None for a custom model."""

    opened: OpenedModel | None
    spec: ModelSpec | None
    positions: int | None
    vocab: int | None

    def check_vocab(self, tokenizer: Tokenizer) -> None:
        """Raise BadInputError for a tokenizer with more tokens than the model's vocabulary."""
        if self.vocab is not None and tokenizer.vocab_size > self.vocab:
            raise BadInputError(
                f"the tokenizer has a vocabulary of {tokenizer.vocab_size}, but the model's has "
                f"only {self.vocab}. Use a model with a vocabulary at least as large, or another "
                "tokenizer."
            )


@dataclass(frozen=True)
class PaddingRule:
    """Rule for padding samples, which have at most `seq_len` tokens.

    With `fixed`, all samples are padded to `padded` tokens. Otherwise each batch is padded to its
    longest sample, rounded up to a multiple of `multiple`.
    """

    seq_len: int
    padded: int
    fixed: bool
    multiple: int


@dataclass(frozen=True)
class TaskRequest:
    """A task's rows, and everything needed to turn them into samples."""

    settings: TrainSettings
    model: TaskModel
    source: TaskRows
    padding: PaddingRule
    cache_dir: Path
    callbacks: Sequence[Callback]

    def tokenizer(self, masked: bool, texts: Callable[[], Iterable[str]]) -> Tokenizer:
        """Return the task's tokenizer; train one on `texts` if there is none."""
        return task_tokenizer(
            self.settings, self.model.opened, self.model.vocab, masked,
            fingerprint(self.source.train), texts, self.cache_dir, self.callbacks,
        )  # fmt: skip

    def dataset(self, samples: RaggedSamples, once_in: int | None, **more: bool) -> PaddedDataset:
        """Return the samples as a data set, padded by this request's rule.

        With `once_in`, each sample comes once and in order, in batches of this size. `more` holds
        further fields of PaddedDataset.
        """
        rule = self.padding
        return PaddedDataset(
            samples, rule.padded, rule.fixed, once_in=once_in, multiple=rule.multiple,
            **more,
        )  # fmt: skip


def load_task_inputs(
    settings: TrainSettings,
    model: TaskModel,
    plan: Plan | None,
    cache_dir: Path,
    callbacks: Sequence[Callback],
    device_type: str = "cpu",
) -> TaskData:
    """Read and encode a task's data. Raises BadInputError if data and model do not fit together."""
    opened, spec, positions = model.opened, model.spec, model.positions
    name = opened.name if opened is not None else "own"
    if settings.task == "chat" and spec is not None and not spec.causal:
        raise BadInputError(
            f"--task chat: {name} predicts masked tokens and cannot generate. Use a causal "
            "model, or --task classify."
        )
    if settings.task == "classify":
        if spec is None:
            raise BadInputError(
                "--task classify adds a classification layer to outpace's and Hugging Face "
                "models. A custom model comes with its own loss and data set: leave --task out."
            )
        if opened is None or opened.kind in ("preset", "spec"):
            require_exportable(spec)  # transformers' models are exportable; the check is slow
    seq_len = resolve_seq_len(settings, positions)
    # All ranks of a tensor-parallel group must see the same lengths.
    tp = 1 if plan is None else plan.tp
    most = round_up(seq_len, math.lcm(MULTIPLE, tp))
    if positions is not None and most > positions:
        most = positions // tp * tp
    seq_len = min(seq_len, most)
    source = read_source(settings)
    if source.parts == 1 and plan is not None:  # for training, not for evaluation
        said = (
            "the validation rows are also training rows, so the validation loss says nothing about "
            "new data"
        )
        source = replace(source, hints=(*source.hints, said))
    fixed = _has_fixed_length(settings, plan)
    compiled = plan is not None and plan.compile
    multiple = math.lcm(shape_multiple(most, device_type, compiled), tp)
    padding = PaddingRule(seq_len, most, fixed, multiple)
    request = TaskRequest(settings, model, source, padding, cache_dir, callbacks)
    if settings.task == "classify":
        return _encode_classified_texts(request)
    return _encode_conversations(request, saved=plan is not None)


def read_source(settings: TrainSettings) -> TaskRows:
    """Return the rows for training and for validation."""
    if settings.task == "classify" and settings.data in (("stdlib",), (NAME,)):
        train, validation = (list(paraphrases(split)) for split in ("train", "validation"))
        if settings.eval_data is not None:
            validation = _collect_rows(read_tables(settings.eval_data))
        return TaskRows(train, validation, Table(NAME, COLUMNS, tuple(train), {}), ())
    if settings.data == ("stdlib",):
        raise BadInputError("--task chat needs conversations. Give them with --data FILE.jsonl.")
    train_names, found = splits_of(settings.data)
    eval_names = settings.eval_data or found
    if settings.eval_data is not None:
        eval_names = splits_of(settings.eval_data)[1] or settings.eval_data
    tables = read_tables(train_names)
    rows = _collect_rows(tables)
    others = read_tables(eval_names) if eval_names is not None else []
    left_out = [where for table in (*tables, *others) for where in table.left_out]
    hints = [hint for table in (*tables, *others) for hint in table.hints]
    hints += unread_file_hints(settings.data)
    if left_out:
        hints.append(
            f"{len(left_out):,} lines have fewer columns than their header and were skipped "
            f"(first {'; '.join(left_out[:3])}). Complete or remove them"
        )
    if eval_names is not None and tuple(train_names) == tuple(eval_names):
        return TaskRows(rows, rows, tables[0], (*hints, *nul_hints(rows)), parts=1)
    hints += nul_hints((*rows, *_collect_rows(others)))
    if others:
        train, validation = rows, _collect_rows(others)
    else:
        train, validation = split_rows(rows, settings.eval_fraction)
    return TaskRows(train, validation, tables[0], (*hints, *overlap_hints(train, validation)))


def _collect_rows(tables: Sequence[Table]) -> list[Row]:
    return [row for table in tables for row in table.rows]


def _encode_conversations(request: TaskRequest, *, saved: bool) -> TaskData:
    """Return samples of conversations. `saved`: whether training saves the tokenizer."""
    settings, source, seq_len = request.settings, request.source, request.padding.seq_len

    def message_texts() -> list[str]:
        return [str(m["content"]) for row in source.train for m in messages_of(row)]

    plain = request.tokenizer(False, message_texts)
    chat = ChatFormat(plain)
    request.model.check_vocab(chat.tokenizer)
    notify(request.callbacks, "on_stage", "encoding conversations")
    parts = [
        encode_all(chat, rows, seq_len, part)
        for rows, part in (
            (source.train, " to train on"), (source.validation, f" {held_out_part(settings)}"),
        )
    ]  # fmt: skip
    hints = [*source.hints, *_chat_hints(chat, parts[: source.parts], seq_len, _row_count(source))]
    opened = request.model.opened
    if settings.lora_rank is not None and settings.init != "random":
        assert opened is not None and opened.weights is not None  # checked with the base model
        encoded = [part.samples for part in parts[:1]]
        hints += untrained_token_hints(opened.weights, chat.tokenizer, encoded)
    if plain.chat_template is None:
        kept = ", and saved with the model" if saved else ""
        hints.append(f"the tokenizer has no chat template, so outpace's is used{kept}")
    train, validation = (part.samples for part in parts)
    return TaskData(
        chat.tokenizer,
        request.dataset(train, None),
        request.dataset(validation, settings.global_batch),
        parts[0].fingerprint,
        parts[1].fingerprint,
        seq_len,
        None,
        tuple(hints),
    )


def held_out_part(settings: TrainSettings) -> str:
    """Return a phrase that describes the validation data, such as "in --eval-data FILE"."""
    if settings.eval_data is not None:
        return f"in --eval-data {' '.join(settings.eval_data)}"
    return "held out for validation (give other data with --eval-data)"


def _chat_hints(
    chat: ChatFormat, parts: Sequence[Conversations], seq_len: int, count: str
) -> list[str]:
    counted = {
        "cut": f"are longer than {seq_len} tokens and were truncated",
        "empty": "have no answer to train on and were skipped",
        "partial": "are rendered differently by the chat template as they grow, so only their last "
        "answer is trained on",
    }
    named = {
        "altered": "have answers that the chat template changes: omitted parts are not trained on",
        "toolless": "have tools that the chat template leaves out: answers are trained on without "
        "them",
        "unwritten": "have messages that the chat template leaves out: answers are trained on "
        "without them",
        "marked": "contain the text of a special token, which is read as that token, such as the "
        "end of an answer",
        "wordless": "have an empty answer, so the model learns to say nothing",
        "joined": "have an answer whose beginning merges into one token with the chat template's "
        "text before it. That token is not trained on, and no prompt ends with it. Let the "
        "template end before the space or line break there",
    }
    hints = []
    for name, what in counted.items():
        if found := sum(getattr(part, name) for part in parts):
            hints.append(f"{found:,} of {count} conversations {what}")
    for name, what in named.items():
        if places := [where for part in parts for where in getattr(part, name)]:
            hints.append(f"{len(places):,} of {count} conversations {what} (first {places[0]})")
    unread = dict.fromkeys(name for part in parts for name in part.unread)
    if unread:
        hints.append(
            f"columns that are not part of a conversation are ignored: {', '.join(unread)}"
        )
    hints += _unknown_token_hints(chat.tokenizer, [part.samples for part in parts])
    if not chat.stops:
        hints.append(
            "the chat template ends answers without a special token (such as "
            f"{chat.tokenizer.eos_token}), so the model does not learn where to stop. Write "
            "{{ eos_token }} after an answer in the template"
        )
    if chat.dated:
        hints.append(
            f"the chat template inserts the date: training always uses {LEARNED_DATE:%d %b %Y}, so "
            "that runs can be repeated and resumed"
        )
    return hints


def _encode_classified_texts(request: TaskRequest) -> TaskData:
    settings, source, seq_len = request.settings, request.source, request.padding.seq_len
    opened, spec = request.model.opened, request.model.spec
    assert spec is not None
    columns = classify.columns_of(source.table, settings.text_fields, settings.label_field)
    classes = source.table.names.get(columns.label, ())
    known, other = None, None
    if opened is not None and opened.weights is not None and settings.init != "random":
        other = unsupported_task(opened.weights)
        known = known_labels(opened.weights) if other is None else None
    rows = (source.train, source.validation)
    parts = classify.examples_of(rows, columns, classes, known or ())
    kept = None if known is None else classify.with_stored_names(parts, known)
    labels = known if kept and known else classify.label_names(parts[0], classes)
    unnamed, parts = parts[0], kept or parts
    encoder = not spec.causal
    plain = request.tokenizer(
        encoder, lambda: [text for example in parts[0] for text in example.texts]
    )
    tokenizer = classify.with_pairs(plain, encoder)
    request.model.check_vocab(tokenizer)
    notify(request.callbacks, "on_stage", "encoding the texts")
    # What samples depend on besides the rows, such as how class names became labels.
    encoding = json.dumps([columns.texts, columns.label, labels, list(classes), tokenizer.pad_id,
                      tokenizer.truncation_side])  # fmt: skip
    fingerprints = _fingerprint_samples(source, tokenizer, encoding)
    segments = spec.segments > 1
    more = json.dumps([2, seq_len, segments, encoder])
    encoded = [
        load_or_encode(
            request.cache_dir,
            xxhash.xxh3_128_hexdigest(f"{of}|{more}".encode()),
            partial(classify.encode, tokenizer, part, labels, seq_len, segments),
        )
        for of, part in zip(fingerprints, parts, strict=True)
    ]
    cut = sum(part.cut for part in encoded[: source.parts])
    hints = [
        *source.hints,
        *classify.columns_hints(
            source.table, columns,
            texts=settings.text_fields is not None, label=settings.label_field is not None,
        ),
        *classify.examples_hints(parts[: source.parts]),
    ]  # fmt: skip
    hints += _label_hints(labels, known, other, kept is not None, parts[0] != unnamed)
    hints += _unknown_token_hints(tokenizer, [part.samples for part in encoded])
    if cut:
        hints.append(
            f"{cut:,} of {_row_count(source)} samples are longer than {seq_len} tokens and "
            "were truncated"
        )
    train, validation = (
        request.dataset(part.samples, once, mask=encoder, last=not encoder)
        for part, once in zip(encoded, (None, settings.global_batch), strict=True)
    )
    return TaskData(tokenizer, train, validation, *fingerprints, seq_len, labels, tuple(hints))


def _label_hints(
    labels: tuple[str, ...],
    known: tuple[str, ...] | None,
    other: str | None,
    kept: bool,
    renamed: bool,
) -> list[str]:
    """Return hints on how a classifier's labels were mapped to classes.

    `known` has the classes of the stored classifier, and `kept` says whether training keeps its
    classification layer. `renamed`: whether labels were replaced by its class names. `other`: what
    the stored classifier predicts, if that is not one class per text.
    """
    hints = []
    if "-1" in labels and known is None:
        hints.append("labels -1 and 1 are read as two classes, in this order")
    if kept and renamed:
        hints.append(
            "labels are read as the classes of the stored classifier: "
            + ", ".join(f"{number} = {name}" for number, name in enumerate(labels))
        )
    if other is not None:
        hints.append(
            f"the stored classifier predicts {other}, but --task classify learns one class per "
            "text, so its classification layer is replaced by a new one"
        )
    if known is not None and not kept:
        hints.append(
            f"the stored classifier has the classes {', '.join(known)}, but the data has "
            f"{', '.join(labels)}, so its classification layer is replaced by a new one. To keep "
            "it, label rows with its class names or numbers"
        )
    return hints


def _unknown_token_hints(tokenizer: Tokenizer, parts: Sequence[RaggedSamples]) -> list[str]:
    tokens = np.concatenate([part.values["tokens"] for part in parts])
    unknown = 0 if tokenizer.unknown_id is None else int((tokens == tokenizer.unknown_id).sum())
    return unknown_hints("of the data", unknown, len(tokens))


def _row_count(source: TaskRows) -> str:
    return f"{len(source.train) + (len(source.validation) if source.parts > 1 else 0):,}"


def _fingerprint_samples(source: TaskRows, tokenizer: Tokenizer, encoding: str) -> tuple[str, str]:
    """Return the fingerprints of the training and of the validation samples.

    `encoding`: all that samples depend on besides their rows and the tokenizer, as text.
    """
    first, second = (
        xxhash.xxh3_128_hexdigest(
            f"{fingerprint(rows)}|{tokenizer.fingerprint}|{encoding}".encode()
        )
        for rows in (source.train, source.validation)
    )
    return first, second
