"""Loading of tokenizers from Hugging Face directories and from files of GPT-2 and BERT."""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from outpace.data.added_tokens import add_tokens
from outpace.data.isolation import call_isolated
from outpace.data.tokenizer import (
    END_NAMES,
    END_OF_TEXT,
    MASKED_SPECIALS,
    Tokenizer,
    is_panic,
    token_text,
)
from outpace.records.base import read_object, require_fetched, require_no_pointer
from outpace.records.checksums import require_small_files
from outpace.records.errors import BadInputError, OutpaceError, excerpt, json_error, shorten

_ADDITIONAL = "additional_special_tokens"
_MORE_TEMPLATES = "additional_chat_templates"  # where transformers saves named templates
# transformers classes for which tokenizer_config.json overrides parts of tokenizer.json.
_BERT_CLASSES = frozenset(
    {"BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "MobileBertTokenizer",
     "ConvBertTokenizer", "SqueezeBertTokenizer", "LxmertTokenizer", "FunnelTokenizer",
     "MPNetTokenizer", "RetriBertTokenizer"}
)  # fmt: skip
_GPT2_CLASSES = frozenset(
    {"GPT2Tokenizer", "RobertaTokenizer", "CodeGenTokenizer", "BartTokenizer",
     "LongformerTokenizer", "BlenderbotTokenizer", "LEDTokenizer", "DebertaTokenizer"}
)  # fmt: skip
_READ_WHOLE = ("tokenizer.json", "encoder.json", "vocab.json", "vocab.txt")
_SENTENCEPIECE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
_SAMPLE = "A text, 12 of\n them: é 中."
# Far more than a tokenizer needs for a short text, unless its rules never terminate.
_SAMPLE_CPU_S, _SAMPLE_BYTES = 5.0, 1 << 30


def load_tokenizer(reference: str) -> Tokenizer:
    """Load a tokenizer from a Hugging Face directory or from files of GPT-2 or BERT.

    The files may be tokenizer.json, GPT-2's encoder.json with vocab.bpe (or vocab.json with
    merges.txt), or BERT's vocab.txt. Raises BadInputError if none of them exists or can be read.
    """
    path = Path(reference)
    if path.is_dir():
        require_small_files(path)
    _require_readable_files(path)
    try:
        found = _load(path)
        if found is not None:
            # Some tokenizers fail only when they encode: a token is missing, or a rule never
            # terminates.
            call_isolated(partial(found.encode, _SAMPLE), _SAMPLE_CPU_S, _SAMPLE_BYTES)
    except BaseException as error:
        refused = isinstance(error, BadInputError) or not isinstance(error, OutpaceError)
        if not (isinstance(error, Exception) and refused) and not is_panic(error):
            raise  # such as signals
        said = json_error(error) if isinstance(error, Exception) else str(error)
        said = shorten(said, 1000)
        raise BadInputError(f"the tokenizer {path} cannot be read: {said}") from None
    if found is None:
        raise BadInputError(
            f"no tokenizer at {path}: expected tokenizer.json, encoder.json with vocab.bpe, "
            "vocab.json with merges.txt, or vocab.txt"
        )
    _require_no_dropout(found, path)
    _require_added_ids(found, path)
    return found


def _require_added_ids(tokenizer: Tokenizer, path: Path) -> None:
    """Refuse a post-processor that adds tokens under other ids than the vocabulary's.

    This happens when a vocabulary was replaced: texts would begin with a wrong token or an unknown
    id.
    """
    told = json.loads(tokenizer.inner.to_str())["post_processor"]
    vocabulary = tokenizer.inner.get_vocab(with_added_tokens=True)
    for name, number in _iterate_added_ids(told):
        if vocabulary.get(name) != number:
            raise BadInputError(
                f"the tokenizer {path} adds {excerpt(name)} to texts under the id {number}, but "
                + (
                    f"that token's id is {vocabulary[name]}"
                    if name in vocabulary
                    else "it has no such token"
                )
                + ": its post_processor belongs to another vocabulary. Correct the ids in "
                "post_processor of tokenizer.json."
            )


def _iterate_added_ids(post_processor: Any) -> Iterator[tuple[str, int]]:
    if not isinstance(post_processor, dict):
        return
    for step in post_processor.get("processors") or ():
        yield from _iterate_added_ids(step)
    used = [
        item["SpecialToken"]["id"]
        for name in ("single", "pair")
        for item in post_processor.get(name) or ()
        if "SpecialToken" in item
    ]
    for name in dict.fromkeys(used):
        token = post_processor["special_tokens"][name]
        yield from zip(token["tokens"], token["ids"], strict=True)
    for role in ("sep", "cls"):
        if isinstance(post_processor.get(role), list):
            name, number = post_processor[role]
            yield name, number


def _require_no_dropout(tokenizer: Tokenizer, path: Path) -> None:
    """Refuse a tokenizer that skips merges at random (BPE-dropout, arXiv:1910.13267)."""
    dropout = getattr(tokenizer.inner.model, "dropout", None)
    if dropout:
        raise BadInputError(
            f"the tokenizer {path} drops merges at random (dropout {dropout:.3g}), so a text gets "
            "different tokens each time, even in validation; outpace encodes a text once. Set "
            '"dropout" of "model" in tokenizer.json to null.'
        )


def _require_readable_files(path: Path) -> None:
    """Refuse Git LFS pointers, and SentencePiece files without a tokenizer.json."""
    folder = path if path.is_dir() else path.parent
    if path.is_dir():
        require_fetched(path)
    for file in sorted(folder.glob("*.json")) if path.is_dir() else [path]:
        if file.is_file():
            require_no_pointer(file)
    pieces = path if path.suffix == ".model" and path.is_file() else None
    if path.is_dir() and not any((path / name).is_file() for name in _READ_WHOLE):
        pieces = next((one for name in _SENTENCEPIECE if (one := path / name).is_file()), None)
    if pieces is not None:
        raise BadInputError(
            f"{pieces} is a SentencePiece model, which outpace does not read. Let transformers "
            f"convert it to tokenizer.json: AutoTokenizer.from_pretrained({str(folder)!r})"
            f".save_pretrained({str(folder)!r})"
        )


def _load(path: Path) -> Tokenizer | None:
    if path.is_file() and path.name == "vocab.txt":
        return _load_word_pieces(path)
    if path.is_file() and path.suffix == ".json":
        if path.name == "tokenizer.json":  # the files next to it belong to this tokenizer
            return _load(path.parent)
        return Tokenizer(tokenizers.Tokenizer.from_file(str(path)))
    config, template_file = _read_config(path)
    if (path / "tokenizer.json").is_file():
        inner = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
        add_tokens(inner, config, path)
        _apply_config(inner, config)
        return Tokenizer(inner, token_text("eos_token", config), config, template_file)
    if "tokenizer_class" in config or (config and (path / "config.json").is_file()):
        return _load_by_class(path, config, template_file)
    for vocab, merges in (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt")):
        if (path / vocab).is_file() and (path / merges).is_file():
            if _read_model_type(path) not in ("", "gpt2"):  # its pattern cuts texts differently
                with suppress(ValueError):  # GPT-2's files, which this class does not read
                    return _load_by_class(path, config, template_file)
            return _load_byte_pairs(path / vocab, path / merges)
    if (path / "vocab.txt").is_file():
        return _load_word_pieces(path / "vocab.txt")
    return None


def _apply_config(inner: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Apply the settings of tokenizer_config.json that override tokenizer.json in transformers.

    As in transformers 4 and 5, BERT's classes take the rules for case, accents and Chinese
    characters from tokenizer_config.json (or their defaults). The classes of GPT-2 and RoBERTa take
    from it whether a space is put before a text. Raises BadInputError if special tokens would be
    split.
    """
    kind = str(config.get("tokenizer_class") or "").removesuffix("Fast")
    if config.get("split_special_tokens") is True:
        raise BadInputError(
            "its tokenizer_config.json has split_special_tokens: true, so special tokens would be "
            "split, including those of a chat template. Remove that entry"
        )
    if kind in _BERT_CLASSES and isinstance(inner.normalizer, normalizers.BertNormalizer):
        inner.normalizer = normalizers.BertNormalizer(
            clean_text=inner.normalizer.clean_text,
            handle_chinese_chars=config.get("tokenize_chinese_chars", True),
            strip_accents=config.get("strip_accents"),
            lowercase=config.get("do_lower_case", True),
        )
    prefix, cut = config.get("add_prefix_space"), inner.pre_tokenizer
    if kind in _GPT2_CLASSES and isinstance(cut, pre_tokenizers.ByteLevel) and prefix is not None:
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(
            add_prefix_space=bool(prefix), trim_offsets=cut.trim_offsets, use_regex=cut.use_regex
        )


def _read_model_type(path: Path) -> str:
    config = path / "config.json"
    return str(read_object(config).get("model_type") or "") if config.is_file() else ""


def _load_by_class(path: Path, config: dict[str, Any], template_file: Path | None) -> Tokenizer:
    """Load a tokenizer whose class, rather than a file, defines how texts are split."""
    from transformers import AutoTokenizer

    try:
        slow = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise BadInputError(
            f"the tokenizer {path} uses its own code (auto_map), which outpace does not run. "
            "If you trust it, let transformers convert it to tokenizer.json: load it "
            "there with trust_remote_code=True, and save it with save_pretrained."
        ) from None
    return Tokenizer(slow.backend_tokenizer, slow.eos_token, config, template_file)


def _read_config(directory: Path) -> tuple[dict[str, Any], Path | None]:
    """Return a directory's tokenizer configuration, and the file of its chat template, if any."""
    config: dict[str, Any] = {}
    template_file = None
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        path = directory / name
        if path.is_file():
            told = json.loads(path.read_text(encoding="utf-8"))
            told = {key: value for key, value in told.items() if value is not None}
            # In older folders, without added_tokens_decoder, the map takes precedence in
            # transformers.
            older = name != "special_tokens_map.json" and "added_tokens_decoder" not in told
            config = {**told, **config} if older else {**config, **told}
            if _ADDITIONAL in told:
                config[_ADDITIONAL] = told[_ADDITIONAL]
            template_file = path if "chat_template" in told else template_file
    named = {"default": directory / "chat_template.jinja"}
    named |= {file.stem: file for file in sorted((directory / _MORE_TEMPLATES).glob("*.jinja"))}
    found = {
        name: file.read_text(encoding="utf-8") for name, file in named.items() if file.is_file()
    }
    if found:
        template_file = next(file for file in named.values() if file.is_file())
        config["chat_template"] = [{"name": name, "template": text} for name, text in found.items()]
        if found.keys() == {"default"}:
            config["chat_template"] = found["default"]
    return config, template_file


def _load_byte_pairs(vocab: Path, merges: Path) -> Tokenizer:
    """Load files in GPT-2's format: a JSON vocabulary, and one merge per line."""
    inner = tokenizers.Tokenizer(models.BPE.from_file(str(vocab), str(merges)))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    known = json.loads(vocab.read_text(encoding="utf-8"))
    inner.add_special_tokens([name for name in END_NAMES if name in known] or [END_OF_TEXT])
    return Tokenizer(inner)


def _load_word_pieces(vocab: Path) -> Tokenizer:
    """Load a vocabulary in BERT's format, one token per line.

    Texts are lower-cased unless the vocabulary contains capitals.
    """
    known = vocab.read_text(encoding="utf-8").splitlines()
    cased = any(token != token.lower() and not token.startswith("[") for token in known)
    inner = tokenizers.Tokenizer(models.WordPiece.from_file(str(vocab), unk_token="[UNK]"))
    inner.normalizer = normalizers.BertNormalizer(lowercase=not cased)
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece()
    specials = [token for token in MASKED_SPECIALS if token in known]
    inner.add_special_tokens(specials)
    tokenizer = Tokenizer(inner, "[SEP]")
    if tokenizer.cls_id is not None and tokenizer.sep_id is not None:
        inner.post_processor = TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", tokenizer.cls_id), ("[SEP]", tokenizer.sep_id)],
        )
    return tokenizer
