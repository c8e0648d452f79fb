"""Conversion of labelled texts and text pairs, as in GLUE, to samples for a classifier."""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.processors import TemplateProcessing

from outpace.data.conversations import describe_form
from outpace.data.padded_batches import RaggedSamples, concatenate_samples
from outpace.data.row import Row, checked_text, nested_rows
from outpace.data.rows import Table
from outpace.data.tokenizer import Tokenizer
from outpace.records.errors import BadInputError, excerpt, quote_names, shorten

# Text columns of common benchmarks. Pairs come before single columns.
_TEXTS = (
    ("sentence1", "sentence2"), ("question1", "question2"), ("premise", "hypothesis"),
    ("question", "sentence"), ("#1 String", "#2 String"), ("text1", "text2"),
    ("text_a", "text_b"), ("sentence",), ("text",),
)  # fmt: skip
_LABELS = ("label", "labels", "gold_label", "Quality", "is_duplicate")
_ENCODED_AT_ONCE = 1000


@dataclass(frozen=True)
class Example:
    """One text or a pair of texts, with a label."""

    texts: tuple[str, ...]
    label: str


@dataclass(frozen=True)
class TextColumns:
    """Names of the one or two text columns and of the label column."""

    texts: tuple[str, ...]
    label: str


def columns_of(table: Table, texts: tuple[str, ...] | None, label: str | None) -> TextColumns:
    """Return the columns that the user named, or else those of a known benchmark.

    Raises BadInputError if the table lacks one of the columns.
    """
    there = quote_names(table.columns)
    if texts is not None and len(texts) not in (1, 2):
        raise BadInputError(f"--text-fields names {len(texts)} columns; a sample has 1 or 2 texts")
    found = texts or next((t for t in _TEXTS if set(t) <= set(table.columns)), None)
    named = label or next((name for name in _LABELS if name in table.columns), None)
    for what, flag, names in (
        ("text", "--text-fields", found),
        ("label", "--label-field", named and (named,)),
    ):
        missing = [name for name in names or () if name not in table.columns]
        if not names or missing:
            wanted = (
                names or [n for n in _LABELS if what == "label"] or [n for t in _TEXTS for n in t]
            )
            _require_in_first_row(table, wanted)
            lacks = f"no column {missing[0]!r}" if missing else f"no known column of {what}"
            form = describe_form(table.columns)
            rows = nested_rows(table.rows[0]) if len(table.rows) == 1 else ""
            folder = _advise_partition_column(table, wanted)
            header = _advise_header(table)
            remedy = f": {form}" if form else rows or folder or f". Name it with {flag}{header}."
            raise BadInputError(f"{table.reference} has {lacks}, but {there}{remedy}")
    assert found is not None and named is not None
    return TextColumns(found, named)


def _advise_header(table: Table) -> str:
    if Path(table.reference).suffix.lower() not in (".csv", ".tsv", ".txt"):
        return ""
    return ", or write a header (such as text and label) before the first line if it is a row"


def _advise_partition_column(table: Table, wanted: Sequence[str]) -> str:
    folders = Path(table.rows[0].where.rpartition(", row ")[0]).parts[:-1]
    for part in folders:
        name = part.partition("=")[0]
        if "=" in part and name in wanted:
            return (
                f". It is in the names of folders ({part}), which are not read: add {name!r} to "
                "the files as a column."
            )
    return ""


def _require_in_first_row(table: Table, wanted: Sequence[str]) -> None:
    """Refuse a table whose first row lacks a wanted column that a later row has.

    The first row determines the columns of the table.
    """
    for row in table.rows:
        name = next((name for name in wanted if name in row.values), None)
        if name is not None and name not in table.rows[0].values:
            raise BadInputError(
                f"{table.rows[0].where} has no {name!r}, which {row.where} has. Add it to the "
                "first row, or remove it everywhere."
            )


def columns_hints(table: Table, columns: TextColumns, *, texts: bool, label: bool) -> list[str]:
    """Return hints about unused columns that look like texts or labels.

    `texts` and `label` say whether the user chose the columns for texts and for labels. There is no
    hint about a choice of the user.
    """
    text_names = [name for names in _TEXTS for name in names]
    known = [
        ("texts are", columns.texts, text_names, "--text-fields", texts),
        ("labels are", (columns.label,), [*_LABELS], "--label-field", label),
    ]
    hints = []
    for what, used, names, flag, named in known:
        there = dict.fromkeys(name for name in names if name in table.columns)
        others = [name for name in there if name not in used]
        if others and not named:
            hints.append(
                f"{what} read from {' and '.join(map(repr, used))}, not from "
                f"{' and '.join(map(repr, others))}; choose others with {flag}"
            )
    return hints


def examples_hints(parts: Sequence[Sequence[Example]]) -> list[str]:
    """Return warnings about labels that may not be distinct classes, and about empty texts."""
    hints = []
    alike: dict[str, set[str]] = {}
    seen = {example.label for example in parts[0]}
    for label in seen:
        plain = " ".join(unicodedata.normalize("NFKC", label).casefold().split())
        plain = "".join(c for c in plain if unicodedata.category(c) != "Cf")  # invisible characters
        alike.setdefault(_normalize_number(plain), set()).add(label)
    same = [" and ".join(map(repr, sorted(names))) for names in alike.values() if len(names) > 1]
    same.sort()
    if same:
        more = f" and {len(same) - 3} more" if len(same) > 3 else ""
        hints.append(
            f"labels {'; '.join(same[:3])}{more} differ only in capitals, spaces, invisible "
            "characters or forms of letters or numbers, and are separate classes: give them one "
            "spelling if they are the same class"
        )
    numbers = sorted(label for label in seen if _is_number(label))
    names = sorted(label for label in seen if not _is_number(label))
    if numbers and names and not same:
        hints.append(
            f"some labels are numbers (such as {numbers[0]!r}) and others names (such as "
            f"{names[0]!r}), and each is a separate class: if files name the same classes in two "
            "ways, give each class one name"
        )
    fractional = [one for one in numbers if Decimal(one) != Decimal(one).to_integral_value()]
    if fractional:
        hints.append(
            f"labels such as {fractional[0]!r} are numbers with a fraction, and are treated as "
            f"{len(seen):,} classes without an order: outpace does not predict numbers on a scale "
            "(regression)"
        )
    count = sum(map(len, parts))
    empty = sum(not any(map(str.strip, one.texts)) for part in parts for one in part)
    if empty:
        hints.append(f"{empty:,} of {count:,} samples have a label and no text")
    return hints


def _is_number(label: str) -> bool:
    return label.removeprefix("-").replace(".", "", 1).isdecimal()


def _normalize_number(label: str) -> str:
    """Return the simplest spelling of a whole number or boolean; other labels are unchanged."""
    if label in ("true", "false"):
        return str(int(label == "true"))
    if not _is_number(label):
        return label
    number = Decimal(label)  # as floats, different ids above 2^53 would become equal
    whole = number.to_integral_value()
    if number != whole:
        return label
    return str(whole) if whole else "0"


def examples_of(
    parts: Sequence[Sequence[Row]],
    columns: TextColumns,
    classes: Sequence[str] = (),
    known: Sequence[str] = (),
) -> list[list[Example]]:
    """Convert the rows of each part to examples; numeric labels become names from `classes`.

    A label of -1 means that the row has no label, as in test sets. However, -1 is a class if there
    are no `classes` and all labels are -1 or 1, and either both values occur or a stored
    classifier's labels (`known`) contain "-1". Raises BadInputError for a missing or invalid text
    or label.
    """
    seen = {_read_signed_label(row.values.get(columns.label)) for part in parts for row in part}
    signed = not classes and (seen == {-1, 1} or (seen <= {-1, 1} and "-1" in known))
    return [
        [
            Example(
                tuple(_read_text(row, name) for name in columns.texts),
                _read_label(row, columns.label, classes, signed),
            )
            for row in part
        ]
        for part in parts
    ]


def _read_signed_label(value: Any) -> Any:
    """Return a label, with "-1", "+1" and "1" converted to numbers; None if it is not a label."""
    if isinstance(value, str) and value.strip() in ("-1", "+1", "1"):
        return int(value)
    return value if isinstance(value, (str, int, float)) else None


def _read_text(row: Row, name: str) -> str:
    text = row.values.get(name)
    if isinstance(text, (list, dict)) and (rows := nested_rows(row)):
        raise BadInputError(f"{row.where}: {name!r} is {type(text).__name__}, not text{rows}")
    return checked_text(text, row.where, name)


def _read_label(row: Row, name: str, classes: Sequence[str], signed: bool) -> str:
    value: Any = row.values.get(name)
    if signed:
        return str(int(value))
    if value is None or _is_missing_label(value):
        raise BadInputError(
            f"{row.where} has no label ({name!r} is {value!r}), as in a benchmark's test set. Give "
            "data with labels; if -1 is one of the classes, give the classes names."
        )
    if isinstance(value, str):
        return checked_text(value, row.where, name).strip()  # blanks make no difference
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int):
        raise BadInputError(
            f"{row.where}: the label {excerpt(value)} is not a class. --task classify needs one "
            "class for each row: a name or a whole number, not a number on a scale or several."
        )
    return classes[value] if 0 <= value < len(classes) else shorten(str(int(value)))


def _is_missing_label(value: Any) -> bool:
    return value == -1 or (isinstance(value, str) and value.strip() in ("", "-", "-1"))


def with_stored_names(
    parts: Sequence[Sequence[Example]], known: Sequence[str]
) -> list[list[Example]] | None:
    """Map labels to the class names of a stored classifier; return None if they do not match.

    All labels of the first part must match: they may be the class names (ignoring case), class
    numbers, or class numbers prefixed with `LABEL_`. Other parts keep labels that do not match.
    """
    if len(known) < 2:
        return None
    seen = {example.label for example in parts[0]}
    meanings = (
        {name: name for name in known},
        {str(number): name for number, name in enumerate(known)},
        {f"LABEL_{number}": name for number, name in enumerate(known)},
        {label: name for name in known for label in seen if label.casefold() == name.casefold()},
    )
    meant = next((names for names in meanings if seen <= names.keys()), None)
    if meant is None:
        return None
    return [
        [replace(example, label=meant.get(example.label, example.label)) for example in part]
        for part in parts
    ]


def label_names(examples: Sequence[Example], classes: Sequence[str]) -> tuple[str, ...]:
    """Return the class names in the order of their class numbers.

    These are `classes` if they contain all labels of the examples, or else the sorted labels.
    Raises BadInputError if there is only one label, or more than half as many labels as examples.
    """
    seen = {example.label for example in examples}
    if len(classes) > 1 and seen <= set(classes):
        return tuple(classes)
    if len(seen) < 2:
        raise BadInputError(
            f"all {len(examples)} samples have the label {excerpt(next(iter(seen)))}, so there is "
            "nothing to distinguish. Give data with at least two labels."
        )
    if len(seen) > max(2, len(examples) // 2):
        raise BadInputError(
            f"{len(examples)} samples have {len(seen)} labels, such as {excerpt(min(seen))}: "
            "these look like numbers on a scale, or like texts. Name the column of classes with "
            "--label-field."
        )
    return tuple(sorted(seen, key=_class_sort_key))


def _class_sort_key(name: str) -> tuple[int, int, str]:
    whole = name.removeprefix("-").isdecimal()
    return (0, int(name), "") if whole else (1, 0, name)


def with_pairs(tokenizer: Tokenizer, encoder: bool) -> Tokenizer:
    """Return the tokenizer with right padding and a post-processor for text pairs.

    Left padding, as used for generation, shifts learned positions and an encoder's first token, so
    a text's scores would depend on the other texts in its batch. An existing post-processor is
    kept. Otherwise, an encoder gets BERT's (Devlin et al., arXiv 1810.04805, §3: [CLS] A [SEP] B
    [SEP]), and a decoder one that puts the end-of-text token between the texts. The padding
    settings and the post-processor are saved with the model, so transformers encodes pairs in the
    same way.
    """
    inner = tokenizers.Tokenizer.from_str(tokenizer.inner.to_str())
    if encoder and (tokenizer.cls_id is None or tokenizer.sep_id is None):
        raise BadInputError(
            "an encoder classifies by its [CLS] token, but the tokenizer has no [CLS] and [SEP]. "
            "Name another tokenizer with --tokenizer."
        )
    if inner.num_special_tokens_to_add(True) == 0:
        inner.post_processor = (
            _bert_post_processor(tokenizer) if encoder else _gpt_post_processor(tokenizer)
        )
    config: dict[str, Any] = {"padding_side": "right"}
    if tokenizer.pad_id is None:
        config["pad_token"] = tokenizer.eos_token
    if encoder:
        config["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    return tokenizer.replace(inner, config)


def _bert_post_processor(tokenizer: Tokenizer) -> Any:
    cls, sep = tokenizer.roles["cls_token"], tokenizer.roles["sep_token"]
    return TemplateProcessing(
        single=f"{cls} $A {sep}",
        pair=f"{cls} $A {sep} $B:1 {sep}:1",
        special_tokens=[(cls, tokenizer.cls_id), (sep, tokenizer.sep_id)],
    )


def _gpt_post_processor(tokenizer: Tokenizer) -> Any:
    eos = tokenizer.eos_token
    return TemplateProcessing(
        single="$A", pair=f"$A {eos} $B", special_tokens=[(eos, tokenizer.eos_id)]
    )


@dataclass(frozen=True)
class EncodedSamples:
    """Encoded samples, and the number of them that were truncated (`cut`)."""

    samples: RaggedSamples
    cut: int


def encode(
    tokenizer: Tokenizer,
    examples: Sequence[Example],
    labels: Sequence[str],
    seq_len: int,
    segments: bool,
) -> EncodedSamples:
    """Tokenize the examples, truncating them to `seq_len`; a pair's longer text is cut first.

    Raises BadInputError for a label that is not in `labels`, or if `seq_len` leaves no room for
    text.
    """
    numbers = {name: number for number, name in enumerate(labels)}
    unknown = next((example for example in examples if example.label not in numbers), None)
    if unknown is not None:
        raise BadInputError(
            f"the validation data has the label {unknown.label!r}, which the training data does "
            f"not have: {quote_names(labels)}"
        )
    pair = max(len(example.texts) for example in examples)
    inner = tokenizer.inner
    if seq_len <= inner.num_special_tokens_to_add(pair == 2) + pair - 1:
        raise BadInputError(f"--seq-len {seq_len} leaves no room for the texts. Use a longer one.")
    found, cut = [], 0
    for first in range(0, len(examples), _ENCODED_AT_ONCE):
        part = examples[first : first + _ENCODED_AT_ONCE]
        texts = [one.texts[0] if pair == 1 else one.texts for one in part]
        for text, encoding in zip(texts, inner.encode_batch(texts), strict=True):
            if len(encoding.ids) > seq_len:
                encoding, cut = _encode_truncated(tokenizer, text, seq_len), cut + 1
            found.append(_make_sample(tokenizer, encoding, segments))
    fill = {"tokens": tokenizer.pad_id or 0, **({"segments": 0} if segments else {})}
    targets = [numbers[example.label] for example in examples]
    return EncodedSamples(concatenate_samples(found, fill, targets), cut)


def _encode_truncated(tokenizer: Tokenizer, text: str | tuple[str, ...], seq_len: int) -> Any:
    inner = tokenizer.inner
    inner.enable_truncation(seq_len, strategy="longest_first", direction=tokenizer.truncation_side)
    try:
        return inner.encode_batch([text])[0]
    finally:
        inner.no_truncation()


def _make_sample(tokenizer: Tokenizer, encoding: Any, segments: bool) -> dict[str, Sequence[int]]:
    ids, types = list(encoding.ids), list(encoding.type_ids)
    # transformers classifies by the last token that is not padding.
    while len(ids) > 1 and ids[-1] == tokenizer.pad_id:
        ids.pop()
    if not ids:
        ids, types = [tokenizer.eos_id], [0]
    return {"tokens": ids, **({"segments": types[: len(ids)]} if segments else {})}
