"""Training of tokenizers on the data."""

import re
from collections.abc import Callable, Iterable, Iterator

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from outpace.data.interruptible import call_interruptibly
from outpace.data.tokenizer import END_OF_TEXT, MASKED_SPECIALS, Tokenizer
from outpace.records.errors import BadInputError

# More text does not improve the merges, since the counts of frequent pairs have settled.
TRAINING_CHARACTERS = 32_000_000
# Words are cut at this length before they are counted; runs of symbols in source code are shorter.
_LONG_RUN = re.compile(r"\S{256}|\s{256}")


def train_tokenizer(
    documents: Iterable[str],
    vocab_size: int,
    *,
    masked: bool = False,
    set_pattern: Callable[[tokenizers.Tokenizer], None] | None = None,
) -> Tokenizer:
    """Train a byte-level BPE (Radford et al. 2019, §2.2) on the first 32 M characters.

    `masked` adds the special tokens of masked language models; `set_pattern` replaces GPT-2's
    pre-tokenization. The result is deterministic. Raises BadInputError if there is no text, or if
    the vocabulary is too small for all bytes and special tokens.
    """
    specials = [END_OF_TEXT, *(MASKED_SPECIALS if masked else ())]
    least = 256 + len(specials)
    if vocab_size < least:
        raise BadInputError(
            f"a byte-level tokenizer needs a vocabulary of at least {least}, not {vocab_size}; "
            "use a model with a larger vocabulary or give --tokenizer"
        )
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    if set_pattern is not None:
        set_pattern(inner)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=specials,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    taken = [
        part
        for text in _limit_characters(documents, TRAINING_CHARACTERS)
        for part in _split_long_runs(text)
    ]
    if not taken:
        raise BadInputError("there is no text to train a tokenizer on")
    call_interruptibly(lambda: inner.train_from_iterator(taken, trainer))
    return Tokenizer(inner, END_OF_TEXT)


def _split_long_runs(text: str) -> Iterator[str]:
    """Yield the text, cut within long runs of white space or of other characters.

    Training time grows with the square of a word's length, so a genome or a base64 file would take
    hours.
    """
    begin = 0
    for run in _LONG_RUN.finditer(text):
        yield text[begin : run.end()]
        begin = run.end()
    if begin < len(text):
        yield text[begin:]


def _limit_characters(documents: Iterable[str], characters: int) -> Iterator[str]:
    for text in documents:
        if text:
            yield text[:characters]
        characters -= len(text)
        if characters <= 0:
            return
