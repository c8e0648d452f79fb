"""Inference with a trained model: generate text, or measure the loss on data."""

import math
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outpace.data.chat import ChatFormat
from outpace.data.conversations import Conversation, Message, Tool, conversation_of
from outpace.data.corpus import Corpus, prepare
from outpace.data.file_kinds import form_of
from outpace.data.loader import Batch, Loader
from outpace.data.padded_batches import PaddedDataset
from outpace.data.row_files import read_rows
from outpace.data.samples import TokenDataset
from outpace.data.template_omissions import unwritten_parts
from outpace.data.tokenizer import Tokenizer
from outpace.data.tokenizer_files import load_tokenizer
from outpace.interop.classifier import known_labels, require_layer, unsupported_task
from outpace.interop.config import read_config
from outpace.interop.custom_model import CustomObjective, build_custom_model
from outpace.interop.models import OpenedModel, open_model
from outpace.interop.origin import GENERATION_FILE, ending_ids, ignored_generation_settings
from outpace.interop.tokenizer_class import source_difference
from outpace.jobs.defaults import resolve_device
from outpace.jobs.inputs.hints import foreign_id_hints
from outpace.jobs.inputs.inputs import check_tokenizer, check_vocab, gather
from outpace.jobs.inputs.model import build_objective, load_model
from outpace.nn import generate as generation
from outpace.nn.classifier import ClassificationObjective
from outpace.nn.loss import LanguageModelObjective
from outpace.nn.mixed_precision import MixedPrecision, lower_weights, make_mixed
from outpace.nn.transformer import Transformer
from outpace.parallel import Layout, StepHooks
from outpace.parallel.parity.kept_state import find_kept_state
from outpace.parallel.parity.state_messages import explain_evaluated_state
from outpace.probing.hardware.machine import usable_cores
from outpace.records.cache_folders import cache_folder
from outpace.records.errors import BadInputError, excerpt
from outpace.records.measurement import Evaluation
from outpace.records.plan import Plan
from outpace.records.ranks import Ranks
from outpace.records.run import RUN_FILE, RunRecord
from outpace.records.settings import DEFAULT_SEQ_LEN, Task, TrainSettings
from outpace.training.evaluate import evaluate as measure


@dataclass(frozen=True)
class Sampling:
    """Sampling settings. `temperature` 0 is greedy decoding; `top_k` None allows all tokens."""

    max_new_tokens: int
    temperature: float
    top_k: int | None
    seed: int


class Writer:
    """A text generator: a model and its tokenizer.

    `on_hint` is called with notes for the user. Raises BadInputError if the folder has no model, no
    tokenizer, or a model that cannot generate.
    """

    def __init__(
        self, run: Path, sampling: Sampling, device: str, on_hint: Callable[[str], None]
    ) -> None:
        self._model, self._tokenizer, self._stop_ids = _open_for_generation(run, device, on_hint)
        self._sampling = sampling
        self._on_hint = on_hint
        self._talk: ChatFormat | None = None

    def continue_text(self, prompt: str) -> str:
        """Return the prompt and its continuation by the model."""
        given, ids = self._generate_ids(prompt, self._stop_ids, opens=True)
        return self._tokenizer.decode([*given, *ids], cut=self._hit_token_limit(ids))

    @property
    def _chat(self) -> ChatFormat:
        if self._talk is None:
            self._talk = ChatFormat(self._tokenizer)
        return self._talk

    def answer(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> str:
        """Generate the assistant's next message, with the tokenizer's chat template."""
        chat = self._chat
        prompt = chat.prompt(messages, tools)
        for what in unwritten_parts(messages, tools, prompt, chat.prompt):
            self._on_hint(
                f"the tokenizer's chat template leaves out {what}, so the answer is generated "
                "without them. Put their content into the user's message"
            )
        _, ids = self._generate_ids(prompt, self._stop_ids | {chat.stop_id})
        return self._tokenizer.decode(ids, cut=self._hit_token_limit(ids))

    def questions(self, path: Path) -> list[Conversation]:
        """Read conversations in any format that `outpace train` accepts; leave out final answers.

        The model is to generate these answers. Raises BadInputError if there is no conversation.
        """
        found = []
        for row, _ in read_rows(path):
            talk = conversation_of(row, self._chat.roles)
            messages = talk.messages
            if messages[-1]["role"] == "assistant":
                messages = messages[:-1]
            if messages:
                found.append(replace(talk, messages=messages))
        if not found:
            raise BadInputError(f"{path} contains no conversation to answer.")
        return found

    def _hit_token_limit(self, ids: Sequence[int]) -> bool:
        return len(ids) == self._sampling.max_new_tokens

    def _generate_ids(
        self, prompt: str, stop_ids: Collection[int], *, opens: bool = False
    ) -> tuple[list[int], list[int]]:
        """Return the prompt's tokens and the generated tokens.

        With `opens`, prepend the tokens that the tokenizer puts before every text, such as BOS.
        """
        asked = self._tokenizer.encode(prompt)
        opening = self._tokenizer.missing_opening(asked) if opens else []
        given = [*opening, *asked] or [self._tokenizer.eos_id]
        sampling = self._sampling
        ids = generation.generate(
            self._model,
            given,
            max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            seed=sampling.seed,
            stop_ids=stop_ids,
        )
        self._warn_of_truncation(len(given), len(ids))
        return given, ids[len(given) :]

    def _warn_of_truncation(self, prompt_tokens: int, total_tokens: int) -> None:
        positions = self._model.spec.max_positions
        half = generation.read_length(positions + 1, positions)
        if prompt_tokens > positions:
            self._on_hint(
                f"the prompt has {prompt_tokens:,} tokens, and the model has {positions:,} "
                f"positions: only the last {half:,} tokens were read, so the beginning, such as a "
                "system message, was lost. Use a shorter prompt"
            )
        elif total_tokens > positions:
            self._on_hint(
                f"the text has {total_tokens:,} tokens, and the model has {positions:,} positions: "
                f"the rest was generated from the last {half:,} tokens, without the beginning"
            )


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
    system: str | None = None,
    on_hint: Callable[[str], None],
) -> str:
    """Return the prompt and the text that the run's model generates after it.

    With `chat`, render the `system` message and the prompt, as a user's message, with the
    tokenizer's chat template, and return only the answer. `on_hint` is called with notes on how the
    model was loaded and what it read.

    Raises BadInputError if the run has no tokenizer, or no model that can generate.
    """
    writer = Writer(run, Sampling(max_new_tokens, temperature, top_k, seed), device, on_hint)
    if not chat:
        return writer.continue_text(prompt)
    return writer.answer([*system_message(system), {"role": "user", "content": prompt}])


def system_message(system: str | None) -> list[Message]:
    """Return the system message in a list, or an empty list for None."""
    return [] if system is None else [{"role": "system", "content": system}]


def evaluate(
    run: Path,
    data: tuple[str, ...] | None,
    *,
    batches: int | None,
    batch_size: int | None,
    device: str,
    text_field: str | None = None,
    task: Task | None = None,
    seq_len: int | None = None,
    on_hint: Callable[[str], None],
) -> Evaluation:
    """Measure loss, perplexity and tokens/s of a run, a Hugging Face folder or an adapter.

    By default, `data` is the run's held-out data, `batches` covers all of it, and `task` and
    `seq_len` are the run's. Without a run, the task is chat if the data are conversations, and
    `seq_len` is the default of `outpace train`. `on_hint` is called with notes on how model and
    data were read. Raises BadInputError if the model or the data cannot be read.
    """
    opened = open_model(str(run))
    if opened.build is None and opened.weights is None:
        raise BadInputError(
            f"{run} has no weights, and eval needs them. Download them, or pass the folder of an "
            "outpace run."
        )
    record = _load_run_record(run)
    settings = record.settings if record else TrainSettings()
    if task is None:
        task = settings.task if record or data is None else _guess_task(data, text_field)
    if task != "pretrain" and record is None and data is None:
        raise BadInputError(f"--task {task}: {run} is not a run with held-out data. Give --data.")
    given = {"text_field": text_field, "task": task, "seq_len": seq_len}
    settings = settings.model_copy(update={name: one for name, one in given.items() if one})
    target = resolve_device(TrainSettings.parse({"device": device}, "--device"), Ranks())
    precision = record.plan.precision if record else "fp32"
    mixed = make_mixed(precision, target, True, unknown_code=opened.build is not None)
    objective: LanguageModelObjective | CustomObjective | ClassificationObjective
    dataset: Any
    asked, seq_len, left_over_tokens = seq_len, None, 0
    if settings.task != "pretrain":
        objective, dataset, seq_len = _load_task(
            run, opened, settings, data, batch_size, mixed, on_hint
        )
        data = None
    elif opened.build is not None:
        custom = build_custom_model(opened.build)
        objective = CustomObjective(custom)
        dataset = custom.dataset if custom.eval_dataset is None else custom.eval_dataset
        if custom.eval_dataset is None and custom.dataset is not None and data is None:
            on_hint("there is no eval_dataset, so this is the loss on the training data")
    else:
        assert opened.spec is not None and opened.weights is not None
        model = load_model(opened, opened.spec)
        objective, dataset = LanguageModelObjective(model, "auto", mixed.dtype), None
    if dataset is None or data is not None:
        dataset = _build_token_dataset(opened, record, data, settings, asked, on_hint)
        seq_len, left_over_tokens = dataset.seq_len, dataset.left_over_tokens
    _hint_default_seq_len(run, None if record or asked else seq_len, on_hint)
    size = min(batch_size or settings.global_batch, len(dataset))
    lower_weights(objective.to(target), mixed)
    steps = _load_batches(dataset, size, batches, settings.seed, target)
    if opened.build is not None:
        steps = _report_kept_state(objective, steps, mixed, on_hint)
    found = measure(
        Layout(objective),
        steps,
        step=record.total_steps if record else 0,
        mixed=mixed,
        device=target,
        group=None,
    )
    lengths = {"seq_len": seq_len, "left_over_tokens": left_over_tokens}
    own_data = settings.task == "pretrain" and seq_len is None  # a custom model's, of any loss
    return found.model_copy(update=lengths | ({"perplexity": None} if own_data else {}))


def _report_kept_state(
    objective: nn.Module,
    steps: Iterator[list[Batch]],
    mixed: MixedPrecision,
    on_hint: Callable[[str], None],
) -> Iterator[list[Batch]]:
    """Warn if a custom model keeps state between batches, and return `steps` unchanged.

    The first batch is run to see whether the loss depends on such state. `on_hint` gets the
    warning.
    """
    first = next(steps)
    state = find_kept_state(objective, first[0], StepHooks(mixed.cast), alone=True)
    said = explain_evaluated_state(state)
    if said is not None:
        on_hint(said)
    return chain([first], steps)


def _hint_default_seq_len(run: Path, default: int | None, on_hint: Callable[[str], None]) -> None:
    if default is not None:
        on_hint(
            f"{run} is not a run of outpace, so samples have at most {default} tokens. To compare "
            "it with a run, give that run's length with --seq-len"
        )


def _guess_task(data: tuple[str, ...], text_field: str | None) -> Task:
    """Return "chat" if no text field is given and the first row is a conversation."""
    first = Path(data[0]).expanduser()
    if text_field is not None or not first.is_file() or form_of(first) in ("text", "tokens"):
        return "pretrain"
    row = next((row for row, _ in read_rows(first)), None)
    if row is None or TrainSettings.model_fields["text_field"].default in row.values:
        return "pretrain"
    with suppress(BadInputError):
        conversation_of(row)
        return "chat"
    return "pretrain"


def _load_task(
    run: Path,
    opened: OpenedModel,
    settings: TrainSettings,
    data: tuple[str, ...] | None,
    batch_size: int | None,
    mixed: MixedPrecision,
    on_hint: Callable[[str], None],
) -> tuple[
    LanguageModelObjective | CustomObjective | ClassificationObjective, PaddedDataset, int | None
]:
    """Build the model and the evaluation data of a task other than pretraining.

    Returns the model with its loss, the data set, which contains each sample once, and the number
    of tokens to which samples are truncated.
    """
    # The model's own folder includes its adapters.
    update: dict[str, Any] = {"model": str(run), "init": None, "tokenizer": None, "lora_rank": None}
    if data is not None:
        update |= {"data": data, "eval_data": data}
    if batch_size is not None:
        update["global_batch"] = batch_size
    settings = settings.model_copy(update=update)
    cache_dir = cache_folder(settings.cache_dir, os.environ)
    inputs = gather(settings, None, cache_dir, usable_cores(), ())
    if inputs.labels is not None:
        _require_classifier(opened, inputs.labels)
    for hint in inputs.hints:
        on_hint(hint)
    cpu = torch.device("cpu")
    objective = build_objective(inputs, settings, Plan(loss=settings.loss), mixed.dtype, cpu)
    assert isinstance(inputs.eval_data, PaddedDataset)
    return objective, inputs.eval_data, inputs.seq_len


def _require_classifier(opened: OpenedModel, labels: Sequence[str]) -> None:
    if opened.weights is None:
        raise BadInputError(f"{opened.name} has no weights, so there is nothing to evaluate")
    known = known_labels(opened.weights)
    if known is None:
        raise BadInputError(
            f"{opened.weights} has no classifier (no …ForSequenceClassification), so there is "
            "nothing to evaluate. Train one with outpace train --task classify"
        )
    other = unsupported_task(opened.weights)
    if other is not None:
        raise BadInputError(
            f"the classifier in {opened.weights} predicts {other}, but eval expects one class per "
            "text. Train one with outpace train --task classify"
        )
    if known != tuple(labels):
        raise BadInputError(
            f"the classifier in {opened.weights} has the classes {', '.join(known)}, but the data "
            f"has the labels {', '.join(labels)}. Label rows with these names, or with class "
            "numbers (from 0)."
        )
    require_layer(opened.weights)


def _load_batches(
    dataset: Any, size: int, max_batches: int | None, seed: int, device: torch.device
) -> Iterator[list[Batch]]:
    """Yield every sample once, or `max_batches` batches; the last ones may be small."""
    whole = len(dataset) // size
    left = len(dataset) % size
    small = math.gcd(size, left)
    parts = [(size, 0, min(max_batches or whole, whole))]
    if left and (max_batches is None or max_batches > whole):
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


def _build_token_dataset(
    opened: OpenedModel,
    record: RunRecord | None,
    data: tuple[str, ...] | None,
    settings: TrainSettings,
    seq_len: int | None,
    on_hint: Callable[[str], None],
) -> TokenDataset:
    """Return the given or held-out data, in samples of `seq_len`, by default the run's length."""
    tokenizer = load_tokenizer(str(opened.tokenizer)) if opened.tokenizer else None
    positions = opened.spec.max_positions if opened.spec else DEFAULT_SEQ_LEN
    corpus = _load_corpus(data, settings, tokenizer)
    check_vocab(corpus, tokenizer, opened.spec.vocab if opened.spec else None, opened.name)
    for hint in (*opened.notes, *corpus.hints, *foreign_id_hints(corpus, tokenizer)):
        on_hint(hint)
    if opened.tokenizer is not None and tokenizer is not None:
        _hint_tokenizer_difference(opened.tokenizer, tokenizer, settings.cache_dir, on_hint)
    return TokenDataset(
        corpus,
        seq_len or (record.seq_len if record else None) or min(DEFAULT_SEQ_LEN, positions),
        objective=opened.spec.objective if opened.spec else "causal",
        seed=settings.seed,
        document_attention=settings.document_attention,
        tokenizer=tokenizer,
    )


def _hint_tokenizer_difference(
    folder: Path, tokenizer: Tokenizer, cache_dir: Path | None, on_hint: Callable[[str], None]
) -> None:
    found = source_difference(folder, tokenizer, cache_folder(cache_dir, os.environ))
    if found is not None:
        on_hint(found)


def _load_corpus(
    data: tuple[str, ...] | None, settings: TrainSettings, tokenizer: Tokenizer | None
) -> Corpus:
    """Return all the given data, or else the run's held-out data."""
    named = data or settings.eval_data
    return prepare(
        named or settings.data,
        weights=None if named else settings.data_weights,
        text_field=settings.text_field,
        tokenizer=tokenizer,
        cache_dir=cache_folder(settings.cache_dir, os.environ),
        split="all" if named else "validation",
        eval_fraction=settings.eval_fraction,
        processes=usable_cores(),
    )


def _open_for_generation(
    run: Path, device: str, on_hint: Callable[[str], None]
) -> tuple[Transformer, Tokenizer, frozenset[int]]:
    """Open a run for generation; return its model, its tokenizer and its stop tokens.

    Stop tokens are the tokenizer's end-of-text token and those that the model's folder lists.
    """
    opened = open_model(str(run))
    if opened.spec is None:
        raise BadInputError(
            f"{run} holds a custom model, and outpace cannot generate text with it. Use a run of a "
            "model that outpace builds, or a Hugging Face model"
        )
    record = _load_run_record(run)
    if record is not None and record.settings.task == "classify":
        raise BadInputError(
            f"{run} is a classifier, which returns labels instead of text. Label texts with "
            f"transformers: pipeline('text-classification', model='{run / 'model'}'). Evaluate it "
            f"with outpace eval --run {run}"
        )
    if opened.weights is None or opened.tokenizer is None:
        lacking = "weights" if opened.weights is None else "tokenizer"
        raise BadInputError(f"{run} has no {lacking}, which generate needs")
    tokenizer = load_tokenizer(str(opened.tokenizer))
    check_tokenizer(tokenizer, opened.spec.vocab, opened.name)
    model = load_model(opened, opened.spec)
    for note in opened.notes:
        on_hint(note)
    cache_dir = None if record is None else record.settings.cache_dir
    _hint_tokenizer_difference(opened.tokenizer, tokenizer, cache_dir, on_hint)
    settings = TrainSettings.parse({"device": device}, "--device")
    target = resolve_device(settings, Ranks())
    stop_ids = {tokenizer.eos_id}
    if opened.folder is not None:
        stop_ids |= ending_ids(opened.folder, read_config(opened.folder))
        _hint_ignored_generation_settings(opened.folder, on_hint)
    return model.to(target).eval(), tokenizer, frozenset(stop_ids)


def _hint_ignored_generation_settings(folder: Path, on_hint: Callable[[str], None]) -> None:
    ignored = ignored_generation_settings(folder)
    if ignored:
        told = ", ".join(f"{key} {excerpt(value)}" for key, value in ignored.items())
        on_hint(
            f"`outpace generate` does not apply {told} of {folder / GENERATION_FILE}; transformers "
            "does, so it generates different texts by default"
        )


def _load_run_record(run: Path) -> RunRecord | None:
    path = run / RUN_FILE
    return RunRecord.load(path) if path.is_file() else None
