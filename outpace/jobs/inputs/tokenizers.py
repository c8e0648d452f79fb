"""Tokenizer of a run: the given one, the model's, or one trained on the data."""

import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import xxhash

from outpace.data.corpus import content_fingerprint, is_tokens, read_documents
from outpace.data.entry_lock import entry_lock
from outpace.data.tokenizer import Tokenizer
from outpace.data.tokenizer_files import load_tokenizer
from outpace.data.tokenizer_training import train_tokenizer
from outpace.interop.config_writer import exported_type
from outpace.interop.models import OpenedModel
from outpace.interop.tokenizer_class import cut_as_qwen2, has_class_by_family
from outpace.records.checksums import write_checksums
from outpace.records.errors import BadInputError
from outpace.records.settings import TrainSettings
from outpace.training.callbacks import Callback, notify

# Vocabulary size of a byte-level BPE trained for a model whose vocabulary is unknown.
DEFAULT_VOCAB = 8192


def tokenizer_for(
    settings: TrainSettings,
    opened: OpenedModel | None,
    vocab: int | None,
    objective: Literal["causal", "masked"],
    cache_dir: Path,
    callbacks: Sequence[Callback],
) -> Tokenizer | None:
    """Return the run's tokenizer; None if all data are already tokens and none is given."""
    if settings.tokenizer is not None:
        return load_tokenizer(settings.tokenizer)
    encoded = [source for source in settings.data if is_tokens(source)]
    if len(encoded) == len(settings.data):
        return None
    if opened is not None and opened.tokenizer is not None:
        return load_tokenizer(str(opened.tokenizer))
    if encoded:
        raise BadInputError(
            f"{encoded[0]} holds the ids of a tokenizer, but other data is text. Pass that "
            "tokenizer with --tokenizer."
        )
    _require_no_weights(settings, opened)
    masked, family = objective == "masked", _exported_family(opened)
    learner = _TokenizerTrainer(vocab or DEFAULT_VOCAB, masked, family, cache_dir, callbacks)
    content = content_fingerprint(settings.data, settings.text_field, cache_dir)
    split: Literal["all", "train"] = "all" if settings.eval_data is not None else "train"
    told = f"{content}|{split}|{settings.eval_fraction!r}|{learner.vocab}|{masked}"
    return learner.load_or_train(
        f"{told}|{settings.text_field}",
        lambda: read_documents(settings.data, settings.text_field, split, settings.eval_fraction),
    )


def task_tokenizer(
    settings: TrainSettings,
    opened: OpenedModel | None,
    vocab: int | None,
    masked: bool,
    content: str,
    texts: Callable[[], Iterable[str]],
    cache_dir: Path,
    callbacks: Sequence[Callback],
) -> Tokenizer:
    """Return a task's tokenizer: the given one, the model's, or one trained on `texts`."""
    if settings.tokenizer is not None:
        return load_tokenizer(settings.tokenizer)
    if opened is not None and opened.tokenizer is not None:
        return load_tokenizer(str(opened.tokenizer))
    _require_no_weights(settings, opened)
    learner = _TokenizerTrainer(
        vocab or DEFAULT_VOCAB, masked, _exported_family(opened), cache_dir, callbacks
    )
    return learner.load_or_train(f"{content}|{settings.task}|{learner.vocab}|{masked}", texts)


def _exported_family(opened: OpenedModel | None) -> str | None:
    return None if opened is None or opened.spec is None else exported_type(opened.spec)


def _require_no_weights(settings: TrainSettings, opened: OpenedModel | None) -> None:
    if opened is not None and opened.weights is not None and settings.init != "random":
        raise BadInputError(
            f"{opened.name} has weights but no tokenizer, and other tokenizers' ids do not suit "
            "its weights. Pass its tokenizer with --tokenizer, or use --init random."
        )


@dataclass(frozen=True)
class _TokenizerTrainer:
    vocab: int
    masked: bool
    family: str | None
    cache_dir: Path
    callbacks: Sequence[Callback]

    def load_or_train(self, identity: str, texts: Callable[[], Iterable[str]]) -> Tokenizer:
        """Return the tokenizer cached under `identity`, training and caching it if there is none.

        `identity` is a text that differs whenever the trained tokenizer would.
        """
        by_family = has_class_by_family(self.family)
        identity += f"|{self.family}" if by_family else ""
        key = xxhash.xxh3_128_hexdigest(identity.encode())
        folder = self.cache_dir / "tokenizers" / key
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with entry_lock(folder.with_suffix(".lock")):
                if (known := _load_cached(folder)) is not None:
                    return known
                notify(self.callbacks, "on_stage", f"training a tokenizer of {self.vocab} tokens")
                pattern = cut_as_qwen2 if by_family else None
                trained = train_tokenizer(
                    texts(), self.vocab, masked=self.masked, set_pattern=pattern
                )
                temporary = folder.with_suffix(".tmp")
                for left in (temporary, folder):  # damaged, or left by a killed process
                    _remove(left)
                trained.save(temporary)
                write_checksums(temporary)
                temporary.replace(folder)
        except OSError as error:
            raise BadInputError(
                f"the cache {self.cache_dir} cannot be written ({error.strerror}). Free some "
                "space, or choose another folder with --cache-dir."
            ) from None
        return load_tokenizer(str(folder))


def _load_cached(folder: Path) -> Tokenizer | None:
    try:
        return load_tokenizer(str(folder))
    except BadInputError:
        return None


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
