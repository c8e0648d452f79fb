"""The text of a source, document by document, with long documents in pieces."""

import codecs
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from outpace.data.conversations import conversation_of, describe_form
from outpace.data.file_reader import readable
from outpace.data.hf_datasets import open_dataset
from outpace.data.row import Row, checked_text, nested_rows
from outpace.data.row_files import read_rows
from outpace.data.sources import Source
from outpace.data.text_checks import require_text, require_whole
from outpace.records.errors import BadInputError, quote_names

# Longer texts are passed on in pieces, to keep memory use constant.
PIECE_BYTES = 1 << 20
_LEAST_PIECE = 1 << 14


@dataclass(frozen=True)
class Piece:
    """Part of a document, read from `consumed` bytes of the source.

    `first` and `last` mark the first and the last piece of a document.
    """

    text: str
    first: bool
    last: bool
    consumed: int


def pieces(source: Source, text_field: str, cut: bool = True) -> Iterator[Piece]:
    """Yield all text of a source in order, skipping empty documents.

    With `cut`, long documents are split into pieces at positions where a tokenizer with
    `cuts_texts` ends a token anyway. Raises BadInputError if the source cannot be read.
    """
    if source.kind == "dataset":
        yield from _split_documents(_read_dataset_documents(source.reference, text_field), cut)
    for file in source.files:
        if source.kind == "rows":
            yield from _split_documents(_read_documents(file, text_field), cut)
        else:
            yield from _read_plain_file(file, cut)


def _read_plain_file(file: Path, cut: bool) -> Iterator[Piece]:
    """Yield a file as one document, in pieces if it is long, without loading the whole file."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    kept, first, read, told = "", True, 0, 0
    with readable(file) as stream:
        while block := stream.read(PIECE_BYTES):
            if read == 0:
                require_text(file, block)
            require_whole(file, block, read)
            kept += _decode(decoder, block, file, read)
            if read == 0:
                kept = kept.removeprefix("\ufeff")  # the byte order mark is not text
            read += len(block)
            # Earlier blocks have already been searched.
            border = _find_border(kept, max(_LEAST_PIECE, len(kept) - len(block) - 2), len(kept))
            if cut and border:
                yield Piece(kept[:border], first, False, read - told)
                kept, first, told = kept[border:], False, read
    kept += _decode(decoder, b"", file, read)
    if kept:
        yield Piece(kept, first, True, read - told)


def _decode(decoder: codecs.IncrementalDecoder, block: bytes, file: Path, read: int) -> str:
    try:
        return decoder.decode(block, final=not block)
    except UnicodeDecodeError as error:
        # The decoder has kept the first bytes of a character that the end of the previous block
        # cut.
        offset = read - len(decoder.getstate()[0]) + error.start
        raise BadInputError(
            f"{file} is not UTF-8 text: byte {error.object[error.start]:#04x} at offset {offset}. "
            "Convert it, or leave it out."
        ) from None


def _find_border(text: str, begin: int, end: int) -> int:
    """Return the last position in [begin, end) at which a text can be split; 0 if there is none.

    The preferred position is after a single line break between a printable character and a letter
    or digit: tokenizers may join white space across lines, or a line break with punctuation, but
    never a line break with a letter or digit. Otherwise, it is before the space between two words.
    """
    place = end - 1
    while (place := text.rfind("\n", begin, place)) > 0:
        before = text[place - 1]
        if before != " " and before.isprintable() and text[place + 1].isalnum():
            return place + 1
    place = end - 1
    while (place := text.rfind(" ", begin, place)) > 0:
        if text[place - 1].isalpha() and text[place + 1].isalpha():
            return place
    return 0


def _split_documents(documents: Iterator[tuple[str, int]], cut: bool) -> Iterator[Piece]:
    for text, consumed in documents:
        if text:
            yield from _split_document(text, consumed, cut)


def _split_document(text: str, consumed: int, cut: bool) -> Iterator[Piece]:
    begin = 0
    while cut and len(text) - begin > PIECE_BYTES:
        border = _find_border(text, begin + _LEAST_PIECE, begin + PIECE_BYTES)
        if not border:
            break
        yield Piece(text[begin:border], begin == 0, False, 0)
        begin = border
    yield Piece(text[begin:], begin == 0, True, consumed)


def _read_documents(file: Path, field: str) -> Iterator[tuple[str, int]]:
    for number, (row, consumed) in enumerate(read_rows(file, columns=[field])):
        if field not in row.values:
            there = quote_names(row.values) or "no fields"
            remedy = _advise_on_missing_field(row, number)
            raise BadInputError(f"{row.where} has no field {field!r}, but {there}{remedy}")
        text = row.values[field]
        if isinstance(text, (list, dict)) and (rows := nested_rows(row)):
            raise BadInputError(f"{row.where}: {field!r} is {type(text).__name__}, not text{rows}")
        yield checked_text(text, row.where, field), consumed


def _advise_on_missing_field(row: Row, earlier_records: int) -> str:
    if (form := describe_form(row.values)) is not None:
        return f": {form}"
    try:
        conversation_of(row)
    except BadInputError:
        return nested_rows(row) or (
            ". Records before it have it: correct this one, or remove it."
            if earlier_records
            else ". Name it with --text-field."
        )
    return ". They are conversations: --task chat trains on them."


def _read_dataset_documents(reference: str, field: str) -> Iterator[tuple[str, int]]:
    dataset = open_dataset(reference)
    if field not in dataset.column_names:
        form = describe_form(dataset.column_names)
        remedy = f": {form}" if form else ". Name it with --text-field."
        there = quote_names(dataset.column_names)
        raise BadInputError(f"{reference} has no column {field!r}, but {there}{remedy}")
    batches = dataset.select_columns([field]).iter(batch_size=1000)
    texts = chain.from_iterable(batch[field] for batch in batches)
    for row, text in enumerate(texts, 1):
        yield (found := checked_text(text, f"{reference}, row {row}", field)), len(found)
