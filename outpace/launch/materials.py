"""What a run is made from: the model, the tokenizer, the data, the objective."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from outpace.data.corpus import Corpus, prepare
from outpace.data.samples import PREDICTED, TokenDataset
from outpace.data.tokenizer import Tokenizer
from outpace.interop.huggingface import read_weights
from outpace.interop.models import OpenedModel, open_model
from outpace.interop.own import OwnModel, OwnObjective, build_own, own_positions, own_vocab
from outpace.launch.resolve import resolve_seq_len
from outpace.launch.tokenizers import tokenizer_for
from outpace.nn.loss import LanguageModelObjective, LossKind
from outpace.nn.mixed import Mixed
from outpace.nn.transformer import Transformer
from outpace.records.errors import BadInputError
from outpace.records.model import ModelSpec
from outpace.records.settings import TrainSettings
from outpace.train.callbacks import Callback, tell

Split = Literal["train", "validation", "all"]


@dataclass(frozen=True)
class Materials:
    """`spec` is None for a person's own model; `seq_len` None for a data set of their own."""

    name: str
    opened: OpenedModel | None
    own: OwnModel | None
    spec: ModelSpec | None
    tokenizer: Tokenizer | None
    train_data: Any
    eval_data: Any | None
    train_fingerprint: str
    eval_fingerprint: str | None
    eval_corpus: Corpus | None
    seq_len: int | None

    def starts_from_stored(self, settings: TrainSettings) -> bool:
        """Whether training begins with weights that were trained before."""
        return self.opened is not None and (
            _starts_pretrained(self.opened, settings)
            if self.own is None
            else self.opened.kind == "run"
        )

    @property
    def targets_per_sample(self) -> int | None:
        """Targets in every sample, None where they differ (masked tokens, a person's own data)."""
        causal = self.spec is not None and self.spec.causal
        return self.seq_len if causal else None

    @property
    def likely_targets(self) -> int:
        """About as many targets as a sample has: those that are masked, or one."""
        if self.spec is None or self.seq_len is None:
            return 1
        return max(1, round(PREDICTED * self.seq_len))


def gather(
    settings: TrainSettings,
    live: nn.Module | Callable[[], Any] | None,
    cache_dir: Path,
    processes: int,
    callbacks: Sequence[Callback],
) -> Materials:
    """Open the model and prepare the data. Raises BadInputError for whatever does not fit."""
    opened = None if live is not None else open_model(settings.model)
    own = _own_model(opened, live)
    spec = None if opened is None or opened.spec is None else _with_dropout(opened.spec, settings)
    name = opened.name if opened is not None else "own"
    if own is not None and settings.init is not None:
        raise BadInputError(
            f"--init {settings.init}: the weights of a person's own model come from its own "
            "function. Leave --init out; to start from stored weights, name a run's directory."
        )
    if own is not None and own.dataset is not None:
        if settings.data != ("stdlib",):
            raise BadInputError(f"{name} brings its own data set, so --data cannot be given too.")
        return Materials(
            name, opened, own, None, None, own.dataset, own.eval_dataset, "own", None, None, None
        )
    assert spec is not None or own is not None
    positions = spec.max_positions if spec is not None else own_positions(_module(own))
    vocab = spec.vocab if spec is not None else own_vocab(_module(own))
    seq_len = resolve_seq_len(settings, positions)
    objective = "causal" if spec is None else spec.objective
    tokenizer = tokenizer_for(settings, opened, vocab, objective, cache_dir, callbacks)
    corpora = [
        _corpus(settings, sources, split, tokenizer, cache_dir, processes, callbacks)
        for sources, split in _splits(settings)
    ]
    for corpus in corpora:
        check_vocab(corpus, tokenizer, vocab, name)
    train, held_out = (
        TokenDataset(
            corpus,
            seq_len,
            objective=objective,
            seed=settings.seed,
            document_attention=settings.document_attention,
            tokenizer=tokenizer,
        )
        for corpus in corpora
    )
    return Materials(
        name, opened, own, spec, tokenizer, train, held_out,
        corpora[0].fingerprint, corpora[1].fingerprint, corpora[1], seq_len,
    )  # fmt: skip


def _splits(settings: TrainSettings) -> list[tuple[tuple[str, ...], Split]]:
    if settings.eval_data is not None:
        return [(settings.data, "all"), (settings.eval_data, "all")]
    return [(settings.data, "train"), (settings.data, "validation")]


def _own_model(
    opened: OpenedModel | None, live: nn.Module | Callable[[], Any] | None
) -> OwnModel | None:
    if isinstance(live, nn.Module):
        return build_own(lambda: live)
    if live is not None:
        return build_own(live)
    if opened is not None and opened.build is not None:
        return build_own(opened.build)
    return None


def _module(own: OwnModel | None) -> nn.Module:
    assert own is not None
    return own.module


def _with_dropout(spec: ModelSpec, settings: TrainSettings) -> ModelSpec:
    if settings.dropout is None:
        return spec
    return spec.model_copy(update={"dropout": settings.dropout})


def _corpus(
    settings: TrainSettings,
    sources: tuple[str, ...],
    split: Split,
    tokenizer: Tokenizer | None,
    cache_dir: Path,
    processes: int,
    callbacks: Sequence[Callback],
) -> Corpus:
    def progress(what: str, done: int, total: int | None) -> None:
        tell(callbacks, "on_progress", what, done, total)

    return prepare(
        sources,
        weights=settings.data_weights if sources is settings.data else None,
        text_field=settings.text_field,
        tokenizer=tokenizer,
        cache_dir=cache_dir,
        split=split,
        eval_fraction=settings.eval_fraction,
        processes=processes,
        progress=progress,
    )


def check_vocab(corpus: Corpus, tokenizer: Tokenizer | None, vocab: int | None, name: str) -> None:
    """Refuse ids that the model's embedding does not have. Raises BadInputError."""
    in_tokenizer = tokenizer.vocab_size if tokenizer else 0
    in_data = corpus.vocab_needed
    needed = max(in_tokenizer, in_data)
    what = "the data's largest token id needs" if in_data > in_tokenizer else "the tokenizer has"
    if vocab is not None and needed > vocab:
        raise BadInputError(
            f"{what} a vocabulary of {needed}, but {name} has {vocab}. Use a model with a "
            "vocabulary at least as large, or another tokenizer."
        )


def build_objective(
    materials: Materials,
    settings: TrainSettings,
    loss: LossKind,
    mixed: Mixed,
    device: torch.device,
) -> LanguageModelObjective | OwnObjective:
    """The model with its loss, on the device, with the weights to start from."""
    if materials.own is not None:
        return OwnObjective(materials.own).to(device, mixed.weights)
    assert materials.spec is not None and materials.opened is not None
    model = initial_model(materials.opened, materials.spec, settings)
    return LanguageModelObjective(model, loss, mixed.dtype).to(device, mixed.weights)


def initial_model(opened: OpenedModel, spec: ModelSpec, settings: TrainSettings) -> Transformer:
    """The model with its stored weights, or with weights drawn from the seed."""
    if not _starts_pretrained(opened, settings):
        return Transformer(spec, settings.seed)
    assert opened.weights is not None
    return load_model(opened.weights, spec)


def load_model(directory: Path, spec: ModelSpec) -> Transformer:
    """A Hugging Face directory's weights in our model, without drawing random ones first."""
    with torch.device("meta"):
        model = Transformer(spec)
    model.load_state_dict(read_weights(directory, spec), assign=True)
    return model


def _starts_pretrained(opened: OpenedModel, settings: TrainSettings) -> bool:
    if settings.init == "pretrained" and opened.weights is None:
        raise BadInputError(
            f"--init pretrained: {opened.name} is a {opened.kind} and has no weights. Name a "
            "Hugging Face directory or a run, or use --init random."
        )
    return settings.init != "random" and opened.weights is not None
