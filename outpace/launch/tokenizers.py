"""Which tokenizer a run uses: the one named, the model's own, or one trained on the data."""

import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal

import xxhash

from outpace.data.corpus import content_fingerprint, is_tokens, read_documents
from outpace.data.entry_lock import entry_lock
from outpace.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from outpace.interop.models import OpenedModel
from outpace.records.checksums import write_checksums
from outpace.records.errors import BadInputError
from outpace.records.settings import TrainSettings
from outpace.train.callbacks import Callback, tell

# A byte-level BPE for a model whose vocabulary is not known.
DEFAULT_VOCAB = 8192


def tokenizer_for(
    settings: TrainSettings,
    opened: OpenedModel | None,
    vocab: int | None,
    objective: Literal["causal", "masked"],
    cache_dir: Path,
    callbacks: Sequence[Callback],
) -> Tokenizer | None:
    """The run's tokenizer; None where all data is tokens already and none is named."""
    if settings.tokenizer is not None:
        return load_tokenizer(settings.tokenizer)
    encoded = [source for source in settings.data if is_tokens(source)]
    if len(encoded) == len(settings.data):
        return None
    if opened is not None and opened.tokenizer is not None:
        return load_tokenizer(str(opened.tokenizer))
    if encoded:
        raise BadInputError(
            f"{encoded[0]} holds the ids of some tokenizer, and other data is text: name that "
            "tokenizer with --tokenizer."
        )
    _require_no_weights(settings, opened)
    return _trained(settings, vocab or DEFAULT_VOCAB, objective == "masked", cache_dir, callbacks)


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
    """As `tokenizer_for`, of data whose `texts` are known and have the hash `content`."""
    if settings.tokenizer is not None:
        return load_tokenizer(settings.tokenizer)
    if opened is not None and opened.tokenizer is not None:
        return load_tokenizer(str(opened.tokenizer))
    _require_no_weights(settings, opened)
    size = vocab or DEFAULT_VOCAB
    key = xxhash.xxh3_128_hexdigest(f"{content}|{settings.task}|{size}|{masked}".encode())
    return _learnt(key, texts, size, masked, cache_dir, callbacks)


def _require_no_weights(settings: TrainSettings, opened: OpenedModel | None) -> None:
    if opened is not None and opened.weights is not None and settings.init != "random":
        raise BadInputError(
            f"{opened.name} has weights but no tokenizer, and weights mean nothing to another "
            "tokenizer's ids. Name its own with --tokenizer, or use --init random."
        )


def _trained(
    settings: TrainSettings,
    vocab: int,
    masked: bool,
    cache_dir: Path,
    callbacks: Sequence[Callback],
) -> Tokenizer:
    """A tokenizer learnt from the training data, kept in the cache beside the tokens."""
    content = content_fingerprint(settings.data, settings.text_field, cache_dir)
    split: Literal["all", "train"] = "all" if settings.eval_data is not None else "train"
    held_out = f"{split}|{settings.eval_fraction!r}"
    key = xxhash.xxh3_128_hexdigest(
        f"{content}|{held_out}|{vocab}|{masked}|{settings.text_field}".encode()
    )
    return _learnt(
        key,
        lambda: read_documents(settings.data, settings.text_field, split, settings.eval_fraction),
        vocab,
        masked,
        cache_dir,
        callbacks,
    )


def _learnt(
    key: str,
    texts: Callable[[], Iterable[str]],
    vocab: int,
    masked: bool,
    cache_dir: Path,
    callbacks: Sequence[Callback],
) -> Tokenizer:
    """The tokenizer of this key in the cache, learnt where it is not there whole."""
    folder = cache_dir / "tokenizers" / key
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with entry_lock(folder.with_suffix(".lock")):
            if (known := _known(folder)) is not None:
                return known
            tell(callbacks, "on_stage", f"learning a tokenizer of {vocab} tokens")
            learnt = train_tokenizer(texts(), vocab, masked=masked)
            temporary = folder.with_suffix(".tmp")
            for left in (temporary, folder):  # damaged, or of a process that was killed
                _remove(left)
            learnt.save(temporary)
            write_checksums(temporary)
            temporary.replace(folder)
    except OSError as error:
        raise BadInputError(
            f"the cache {cache_dir} cannot be written ({error.strerror}). Free some space, or name "
            "another place with --cache-dir."
        ) from None
    return load_tokenizer(str(folder))


def _known(folder: Path) -> Tokenizer | None:
    """What the cache has; None where that is not what was written there."""
    try:
        return load_tokenizer(str(folder))
    except BadInputError:
        return None


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
