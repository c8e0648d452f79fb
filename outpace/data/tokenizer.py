"""Tokenizers: read from files, or trained on the data."""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing

from outpace.data.added_tokens import add_tokens
from outpace.data.interruptible import call_interruptibly
from outpace.data.isolation import call_isolated
from outpace.data.words import words_of
from outpace.records.base import read_object, require_fetched, require_no_pointer
from outpace.records.checksums import require_small_files
from outpace.records.errors import BadInputError, OutpaceError, excerpt, json_error, shorten

END_OF_TEXT = "<|endoftext|>"
MASKED_SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
# More text does not improve the merges, since the counts of frequent pairs have settled.
_LONG_CHARACTERS = 1 << 20  # length of texts that take a tokenizer seconds to encode
TRAINING_CHARACTERS = 32_000_000
# Words are cut at this length before they are counted; runs of symbols in source code are shorter.
_LONG_RUN = re.compile(r"\S{256}|\s{256}")
_MOST_IDS = 1 << 24
_ADDITIONAL = "additional_special_tokens"
_MORE_TEMPLATES = "additional_chat_templates"  # where transformers saves named templates
# Names of the token that ends a text, in different families; the preferred ones first.
_END_NAMES = (
    END_OF_TEXT, "<|end_of_text|>", "</s>", "<|im_end|>", "<eos>", "[SEP]", "<|end|>", "<|eot_id|>",
)  # fmt: skip


# Roles of tokens in a Hugging Face directory, and their default names.
_ROLES = {
    "bos_token": (), "eos_token": (), "unk_token": ("[UNK]",), "pad_token": ("[PAD]", "<pad>"),
    "cls_token": ("[CLS]",), "sep_token": ("[SEP]",), "mask_token": ("[MASK]", "<mask>"),
}  # fmt: skip
# Other settings of such a directory that a copy of the tokenizer must keep.
_KEPT = (
    "chat_template", "model_max_length", "padding_side", "clean_up_tokenization_spaces",
    "model_input_names", "additional_special_tokens", "extra_special_tokens", "truncation_side",
    "split_special_tokens", "spaces_between_special_tokens",
)  # fmt: skip
# Classes of transformers that override parts of tokenizer.json by tokenizer_config.json.
_BERT_CLASSES = frozenset(
    {"BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "MobileBertTokenizer",
     "ConvBertTokenizer", "SqueezeBertTokenizer", "LxmertTokenizer", "FunnelTokenizer",
     "MPNetTokenizer", "RetriBertTokenizer"}
)  # fmt: skip
_GPT2_CLASSES = frozenset(
    {"GPT2Tokenizer", "RobertaTokenizer", "CodeGenTokenizer", "BartTokenizer",
     "LongformerTokenizer", "BlenderbotTokenizer", "LEDTokenizer", "DebertaTokenizer"}
)  # fmt: skip
# Roles whose token occurs in the data, so a different token would change the text.
_NEEDED = ("mask_token", "cls_token", "sep_token")


class Tokenizer:
    """A `tokenizers.Tokenizer`, with the ids that data and models need.

    `eos_id` ends a document. `vocab_size` is one more than the largest id. `cuts_texts`: a text cut
    after a line break, before a letter or digit, or before the blank between two words, has the ids
    of its parts. `chat_template` is the template for conversations that came with it, or the
    default of several; `chat_templates` has all of them by name, and `template_file` is their file.
    `config` holds the values of tokenizer_config.json; `save` writes them again.
    """

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        eos: str | None = None,
        config: Mapping[str, Any] | None = None,
        template_file: Path | None = None,
    ) -> None:
        self.inner = inner
        self.template_file = template_file
        inner.no_truncation()
        inner.no_padding()
        vocab = inner.get_vocab(with_added_tokens=True)
        if not vocab:
            raise BadInputError("the tokenizer has no tokens")
        self.vocab_size = max(vocab.values()) + 1
        if self.vocab_size > _MOST_IDS:  # `tokenizers` would allocate memory for every id
            raise BadInputError(
                f"its ids go up to {self.vocab_size - 1}, with {len(vocab)} tokens; the largest id "
                f"may be {_MOST_IDS - 1}"
            )
        self._vocab = vocab
        self._words = words_of(inner)
        self.cuts_texts = _cuts_texts(inner)
        if eos is not None and eos not in vocab:
            raise BadInputError(_not_in_vocabulary("eos_token", eos))
        self.eos_token = eos or next((n for n in _END_NAMES if n in vocab), None)
        if self.eos_token is None:
            raise BadInputError(
                "the tokenizer has no end-of-text token; give it one of " + ", ".join(_END_NAMES)
            )
        self.eos_id: int = vocab[self.eos_token]
        self._config = dict(config or {})
        self._roles = self._find_roles()
        self.chat_templates = _templates(self._config.get("chat_template"))
        self.chat_template = self.chat_templates.get("default")
        self.mask_id, self.pad_id, self.cls_id, self.sep_id = (
            vocab.get(self._roles.get(f"{role}_token", ""))
            for role in ("mask", "pad", "cls", "sep")
        )
        # The end of text is included, since some tokenizers differ only in it.
        self.fingerprint = hashlib.blake2b(
            f"{self.eos_token}\n{inner.to_str()}".encode(), digest_size=16, person=b"outpace-token"
        ).hexdigest()

    def _find_roles(self) -> dict[str, str]:
        """Return the token of each role that has one."""
        found = {"eos_token": str(self.eos_token)}
        for role, usual in _ROLES.items():
            named = _content(role, self._config)
            if role in _NEEDED and named is not None and named not in self._vocab:
                raise BadInputError(_not_in_vocabulary(role, named))
            names = (named, *usual)
            known = next((name for name in names if name in self._vocab), None)
            if known is not None:
                found.setdefault(role, known)
        return found

    @property
    def opening_ids(self) -> list[int]:
        """Return the bos token if the tokenizer puts it before texts, as Llama's does."""
        bos = self._vocab.get(self._roles.get("bos_token", ""))
        added: list[int] = self.inner.encode("a").ids
        return added[:1] if added[:1] == [bos] else []

    @property
    def unknown_id(self) -> int | None:
        """Id of the token for text outside the vocabulary, if there is one."""
        name = getattr(self.inner.model, "unk_token", None) or self._roles.get("unk_token")
        return self._vocab.get(name or "")

    @property
    def special_tokens(self) -> dict[str, int]:
        """Return the ids of special tokens except the unknown one, by name."""
        added = self.inner.get_added_tokens_decoder()
        return {
            token.content: number
            for number, token in added.items()
            if token.special and number != self.unknown_id
        }

    def known_characters(self) -> frozenset[str] | None:
        """Characters with a token if others are lost (character BPE without [UNK]); else None."""
        told = json.loads(self.inner.to_str())
        model = told["model"]
        bytes_too = model.get("byte_fallback") or "ByteLevel" in json.dumps(
            [told["normalizer"], told["pre_tokenizer"]]
        )
        if model.get("type") != "BPE" or model.get("unk_token") or bytes_too:
            return None
        start, end = (
            model.get(name) or "" for name in ("continuing_subword_prefix", "end_of_word_suffix")
        )
        bare = (name.removeprefix(start).removesuffix(end) for name in self._vocab)
        return frozenset(name for name in bare if len(name) == 1)

    @property
    def truncation_side(self) -> str:
        """The side on which transformers truncates texts that are too long: right or left."""
        return "left" if self._config.get("truncation_side") == "left" else "right"

    @property
    def roles(self) -> dict[str, str]:
        """Tokens with a role, by transformers' names: eos_token, pad_token, …"""
        return dict(self._roles)

    def replace(self, inner: tokenizers.Tokenizer, config: Mapping[str, Any]) -> "Tokenizer":
        """Return a tokenizer of `inner` with this one's configuration, updated by `config`."""
        return Tokenizer(
            inner, self.eos_token, {**self._config, **config},
            None if "chat_template" in config else self.template_file,
        )  # fmt: skip

    def with_length(self, positions: int) -> "Tokenizer":
        """Return the tokenizer with a model's number of positions as maximum length, unless it has
        one. transformers truncates texts only to that length, and a model fails beyond its
        positions.
        """
        if "model_max_length" in self._config:
            return self
        return self.replace(self.inner, {"model_max_length": positions})

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without added tokens. A special token's name becomes that
        token.
        """
        with _refusing_panics():
            if len(text) > _LONG_CHARACTERS:
                (one,) = call_interruptibly(
                    lambda: self.inner.encode_batch_fast([text], add_special_tokens=False)
                )
            else:
                one = self.inner.encode(text, add_special_tokens=False)
        return one.ids

    def encode_batch(self, texts: list[str]) -> list[np.ndarray[Any, np.dtype[np.uint32]]]:
        """Return the ids of many texts, equal to what `encode` returns for each."""
        with _refusing_panics():
            if self._words is not None:
                return self._words.encode_batch(texts)
            encoded = self.inner.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(one.ids, dtype=np.uint32) for one in encoded]

    def decode(self, ids: list[int], *, cut: bool = False) -> str:
        """Return the text of ids, without special tokens.

        With `cut`, the ids may end within a character, which is then left out.
        """
        text = str(self.inner.decode(ids, skip_special_tokens=True))
        return text.rstrip("\ufffd") if cut else text

    def save(self, directory: Path) -> None:
        """Write a Hugging Face tokenizer directory, which AutoTokenizer loads."""
        directory.mkdir(parents=True, exist_ok=True)
        self.inner.save(str(directory / "tokenizer.json"))
        kept = {name: self._config[name] for name in _KEPT if name in self._config}
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **self._roles, **kept}
        _write_json(directory / "tokenizer_config.json", config)
        _write_json(directory / "special_tokens_map.json", self._roles)


def _not_in_vocabulary(role: str, token: str) -> str:
    return (
        f"its {role} {token!r} is not in its vocabulary. Name another one in "
        "tokenizer_config.json, or add the token to tokenizer.json."
    )


def _templates(told: Any) -> dict[str, str]:
    """Return the templates of a configuration, by name. Raises BadInputError."""
    if told is None:
        return {}
    if isinstance(told, str):
        return {"default": told}
    found = {}
    for one in told if isinstance(told, list) else (None,):
        name, text = (
            (one.get("name"), one.get("template")) if isinstance(one, dict) else (None,) * 2
        )
        if not isinstance(name, str) or not isinstance(text, str):
            raise BadInputError(
                f"its chat_template is {excerpt(told)}; it must be a text, or a list of  "
                "templates with name and template"
            )
        found[name] = text
    return found


# Normalizers that never look across a line break.
_LOCAL_NORMALIZERS = frozenset({"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "BertNormalizer"})
# Line and word boundaries between all kinds of characters that pre-tokenizers distinguish.
_BORDERS = (
    (("word\n", "it's.\n", "12\n", "Ж—\n", "}\n"), ("word", "7", "Été", "中")),
    (("word", "it's", "Ж", "中"), (" word", " Été", " 中")),
)


def _cuts_texts(inner: tokenizers.Tokenizer) -> bool:
    told = json.loads(inner.to_str())["normalizer"]
    steps = told["normalizers"] if told and told["type"] == "Sequence" else [told] if told else []
    if any(step["type"] not in _LOCAL_NORMALIZERS for step in steps) or not inner.pre_tokenizer:
        return False
    if any(len(token.content.split()) > 1 for token in inner.get_added_tokens_decoder().values()):
        return False
    cut = inner.pre_tokenizer.pre_tokenize_str
    return all(
        [word for word, _ in cut(end + beginning)]
        == [word for part in (end, beginning) for word, _ in cut(part)]
        for ends, beginnings in _BORDERS
        for end in ends
        for beginning in beginnings
    )


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def train_tokenizer(
    documents: Iterable[str],
    vocab_size: int,
    *,
    masked: bool = False,
    set_pattern: Callable[[tokenizers.Tokenizer], None] | None = None,
) -> Tokenizer:
    """Train a byte-level BPE (Radford et al. 2019, §2.2) on the first 32 M characters.

    `masked` adds the special tokens of masked language models, `set_pattern` replaces GPT-2's
    pre-tokenization before training. Deterministic. Raises BadInputError if there is no text, or
    the vocabulary cannot hold all bytes.
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
    taken = [part for text in _at_most(documents, TRAINING_CHARACTERS) for part in _cut_runs(text)]
    if not taken:
        raise BadInputError("there is no text to train a tokenizer on")
    call_interruptibly(lambda: inner.train_from_iterator(taken, trainer))
    return Tokenizer(inner, END_OF_TEXT)


def _cut_runs(text: str) -> Iterator[str]:
    """Yield the text, cut inside long runs without white space, or of white space only.

    Training time grows with the square of a word's length, so a genome or a base64 file would take
    hours.
    """
    begin = 0
    for run in _LONG_RUN.finditer(text):
        yield text[begin : run.end()]
        begin = run.end()
    if begin < len(text):
        yield text[begin:]


def _at_most(documents: Iterable[str], characters: int) -> Iterator[str]:
    for text in documents:
        if text:
            yield text[:characters]
        characters -= len(text)
        if characters <= 0:
            return


_READ_WHOLE = ("tokenizer.json", "encoder.json", "vocab.json", "vocab.txt")
_SENTENCEPIECE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
_SAMPLE = "A text, 12 of\n them: é 中."


# Far more than a tokenizer needs for a short text, unless its rules never terminate.
_SAMPLE_CPU_S, _SAMPLE_BYTES = 5.0, 1 << 30


def is_panic(error: BaseException) -> bool:
    """Return whether an error is a panic of `tokenizers`, which is a private BaseException."""
    return type(error).__name__ == "PanicException"


@contextmanager
def _refusing_panics() -> Iterator[None]:
    """Refuse a tokenizer whose rules fail on a text, such as a pattern that would never finish."""
    try:
        yield
    except BaseException as error:
        if not is_panic(error):
            raise
        raise BadInputError(
            f"the tokenizer fails on a text of the data: {shorten(str(error), 300)}. A pattern of "
            "its pre-tokenizer or normalizer does not terminate on it: look for a very long "
            "word, or use another tokenizer."
        ) from None


def load_tokenizer(reference: str) -> Tokenizer:
    """Read a tokenizer from a Hugging Face directory, tokenizer.json, GPT-2's encoder.json with
    vocab.bpe (or vocab.json with merges.txt), or BERT's vocab.txt.

    Raises BadInputError if there is none, or it cannot be read.
    """
    path = Path(reference)
    if path.is_dir():
        require_small_files(path)
    _require_files(path)
    try:
        found = _load(path)
        if found is not None:
            # Some fail only now, because a token is missing or a rule never terminates.
            call_isolated(partial(found.encode, _SAMPLE), _SAMPLE_CPU_S, _SAMPLE_BYTES)
    except BaseException as error:
        refused = isinstance(error, BadInputError) or not isinstance(error, OutpaceError)
        if not (isinstance(error, Exception) and refused) and not is_panic(error):
            raise  # reached for signals, too
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
    """Refuse a post-processor that adds ids other than those of its tokens. Such ids remain after a
    vocabulary was replaced, and texts would begin with a wrong token or an unknown id.
    """
    told = json.loads(tokenizer.inner.to_str())["post_processor"]
    vocabulary = tokenizer.inner.get_vocab(with_added_tokens=True)
    for name, number in _added_ids(told):
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


def _added_ids(told: Any) -> Iterator[tuple[str, int]]:
    """Yield the tokens that a post-processor adds, with the ids that it gives them."""
    if not isinstance(told, dict):
        return
    for step in told.get("processors") or ():
        yield from _added_ids(step)
    used = [
        item["SpecialToken"]["id"]
        for name in ("single", "pair")
        for item in told.get(name) or ()
        if "SpecialToken" in item
    ]
    for name in dict.fromkeys(used):
        token = told["special_tokens"][name]
        yield from zip(token["tokens"], token["ids"], strict=True)
    for role in ("sep", "cls"):
        if isinstance(told.get(role), list):
            name, number = told[role]
            yield name, number


def _require_no_dropout(tokenizer: Tokenizer, path: Path) -> None:
    """Refuse merges that are skipped at random (BPE-dropout, arXiv:1910.13267)."""
    dropout = getattr(tokenizer.inner.model, "dropout", None)
    if dropout:
        raise BadInputError(
            f"the tokenizer {path} drops merges at random (dropout {dropout:.3g}), so a text gets "
            "different tokens each time, even in validation; outpace encodes a text once. Set "
            '"dropout" of "model" in tokenizer.json to null.'
        )


def _require_files(path: Path) -> None:
    """Refuse files that were not fetched, and SentencePiece files without a tokenizer.json."""
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
        return _word_pieces(path)
    if path.is_file() and path.suffix == ".json":
        if path.name == "tokenizer.json":  # the files next to it belong to this tokenizer
            return _load(path.parent)
        return Tokenizer(tokenizers.Tokenizer.from_file(str(path)))
    config, template_file = _config_of(path)
    if (path / "tokenizer.json").is_file():
        inner = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
        add_tokens(inner, config, path)
        _follow_config(inner, config)
        return Tokenizer(inner, _content("eos_token", config), config, template_file)
    if "tokenizer_class" in config or (config and (path / "config.json").is_file()):
        return _of_class(path, config, template_file)
    for vocab, merges in (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt")):
        if (path / vocab).is_file() and (path / merges).is_file():
            if _model_type(path) not in ("", "gpt2"):  # its pattern cuts texts differently
                with suppress(ValueError):  # GPT-2's files, which this class does not read
                    return _of_class(path, config, template_file)
            return _byte_pairs(path / vocab, path / merges)
    if (path / "vocab.txt").is_file():
        return _word_pieces(path / "vocab.txt")
    return None


def _follow_config(inner: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Split texts as tokenizer_config.json specifies if its class overrides tokenizer.json.

    As in transformers 4 and 5, BERT's classes take the rules for case, accents and Chinese
    characters from there (or their defaults), and GPT-2's and RoBERTa's the space before a text.
    Raises BadInputError.
    """
    kind = str(config.get("tokenizer_class") or "").removesuffix("Fast")
    if config.get("split_special_tokens") is True:
        raise BadInputError(
            "its tokenizer_config.json has split_special_tokens: true, so special tokens would be "
            "split, including those of a chat template. Remove it there"
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


def _model_type(path: Path) -> str:
    """Return the model_type of a config.json next to a tokenizer, or ''."""
    config = path / "config.json"
    return str(read_object(config).get("model_type") or "") if config.is_file() else ""


def _of_class(path: Path, config: dict[str, Any], template_file: Path | None) -> Tokenizer:
    """Read a tokenizer whose class, rather than its files, defines how texts are split."""
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


def _config_of(directory: Path) -> tuple[dict[str, Any], Path | None]:
    """Read a Hugging Face directory's tokenizer configuration and its chat template's file."""
    config: dict[str, Any] = {}
    template_file = None
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        path = directory / name
        if path.is_file():
            told = json.loads(path.read_text(encoding="utf-8"))
            told = {key: value for key, value in told.items() if value is not None}
            # transformers reads the map of older folders, which have no list of added tokens.
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


def _content(role: str, config: Mapping[str, Any]) -> str | None:
    """Return the text of a role's token, which is stored alone or with its properties."""
    token = config.get(role)
    text = token.get("content") if isinstance(token, dict) else token
    if text is not None and not isinstance(text, str):
        raise BadInputError(f"its {role} is {excerpt(token)}; it must be the token's text")
    return text


def _byte_pairs(vocab: Path, merges: Path) -> Tokenizer:
    """Read GPT-2's format: a JSON of tokens, and one merge per line."""
    inner = tokenizers.Tokenizer(models.BPE.from_file(str(vocab), str(merges)))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    known = json.loads(vocab.read_text(encoding="utf-8"))
    inner.add_special_tokens([name for name in _END_NAMES if name in known] or [END_OF_TEXT])
    return Tokenizer(inner)


def _word_pieces(vocab: Path) -> Tokenizer:
    """Read BERT's format: one token per line; lower-cased unless the vocabulary has capitals."""
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
