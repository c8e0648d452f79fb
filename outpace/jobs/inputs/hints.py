"""Notes on how the model, its tokenizer and the data were read."""

import itertools
from pathlib import Path

from outpace.data.corpus import Corpus
from outpace.data.repeated_files import files_in_both, repeated_files
from outpace.data.sources import open_source
from outpace.data.tokenizer import Tokenizer
from outpace.data.tokenizer_files import load_tokenizer
from outpace.interop.config import read_config
from outpace.interop.config_writer import exported_type
from outpace.interop.custom_model import CustomModel
from outpace.interop.models import OpenedModel
from outpace.interop.tokenizer_class import export_difference, source_difference
from outpace.nn.evaluation_mode import explain_modes
from outpace.nn.transformer import INIT_STD
from outpace.records.errors import BadInputError, excerpt
from outpace.records.settings import TrainSettings

_NARROW_IDS, _WIDE_BYTES = 1 << 16, 4  # number of IDs that fit in 2 bytes; width of others


def reading_notes(opened: OpenedModel | None, settings: TrainSettings) -> tuple[str, ...]:
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


def mode_hints(custom: CustomModel | None) -> list[str]:
    """Return a hint if a custom model's modules are not in the mode that `train()` would set."""
    said = None if custom is None else explain_modes(custom.module)
    return [] if said is None else [said]


def other_tokenizer_hints(
    opened: OpenedModel | None, settings: TrainSettings, tokenizer: Tokenizer | None
) -> list[str]:
    """Return a hint if stored weights would be trained on IDs from a different tokenizer."""
    if settings.tokenizer is None or tokenizer is None or opened is None:
        return []
    if opened.weights is None or settings.init == "random":
        return []
    if (stored := model_tokenizer(opened)) is None:
        return []
    names = {number: name for name, number in tokenizer.inner.get_vocab().items()}
    known = stored.inner.get_vocab()
    others = sum(names.get(number) != name for name, number in known.items())
    if not others:
        return []
    return [
        f"--tokenizer {settings.tokenizer} differs from {opened.name}'s tokenizer in {others:,} "
        f"of {len(known):,} ids: the stored weights learned other tokens for them. Leave out "
        "--tokenizer to train with the model's tokenizer"
    ]


def class_hints(
    opened: OpenedModel | None,
    settings: TrainSettings,
    tokenizer: Tokenizer | None,
    cache_dir: Path,
    exported: bool,
) -> list[str]:
    """Return a hint if transformers reads the tokenizer or its export differently from outpace."""
    folder = settings.tokenizer or (None if opened is None else opened.tokenizer)
    if tokenizer is None:
        return []
    found = None if folder is None else source_difference(Path(folder), tokenizer, cache_dir)
    if exported and found is None and opened is not None and opened.spec is not None:
        found = export_difference(tokenizer, exported_type(opened.spec), cache_dir)
    return [] if found is None else [found]


def shared_file_hints(settings: TrainSettings) -> list[str]:
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
        "text. Remove what both contain from one of them"
    ]


def repeated_file_hints(settings: TrainSettings) -> list[str]:
    """Return hints about files that --data or --eval-data contains twice, even as copies."""
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
                f"{found[0]}{more} in {option} more than once, and counts each time. Leave out "
                "duplicates; to give data more weight, use --data-weights"
            )
    return hints


def model_tokenizer(opened: OpenedModel | None) -> Tokenizer | None:
    """Return the tokenizer stored with a model, if any."""
    if opened is None or opened.tokenizer is None:
        return None
    try:
        return load_tokenizer(str(opened.tokenizer))
    except BadInputError:
        return None


def foreign_id_hints(corpus: Corpus, tokenizer: Tokenizer | None) -> list[str]:
    """Return a hint if token IDs seem to be another tokenizer's, or may have overflowed 2 bytes."""
    if tokenizer is None:
        return []
    narrow = any(stream.id_bytes < _WIDE_BYTES for stream in corpus.streams)
    if narrow and tokenizer.vocab_size > _NARROW_IDS:
        return [
            f"the data has token ids of 2 bytes, up to {_NARROW_IDS - 1:,}, but the tokenizer has "
            f"{tokenizer.vocab_size:,} tokens. Larger ids, if there were any, wrapped around at "
            f"{_NARROW_IDS:,}. Write ids as uint32, or give texts"
        ]
    if corpus.vocab_needed <= tokenizer.vocab_size:
        return []
    return [
        f"the data has token ids up to {corpus.vocab_needed - 1}, but the model's tokenizer has "
        f"{tokenizer.vocab_size} tokens. They were probably made with another tokenizer, whose "
        "ids have other meanings. Give texts, or ids of this tokenizer"
    ]
