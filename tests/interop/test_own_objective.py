"""The loss of a person's own model: what counts as logits, what is refused."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from outpace.interop.own import OwnModel, OwnObjective, build_own, own_positions, own_vocab
from outpace.nn.loss import LanguageModelObjective
from outpace.nn.transformer import Transformer
from outpace.records.errors import BadInputError
from outpace.records.model import ModelSpec

VOCAB = 40


@pytest.fixture
def batch() -> dict[str, Tensor]:
    numbers = torch.randint(VOCAB, (3, 9), generator=torch.Generator().manual_seed(0))
    targets = numbers[:, 1:].clone()
    targets[0, :5] = -100
    return {"tokens": numbers[:, :-1], "targets": targets}


def expected(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


class Plain(nn.Module):
    """Logits from a token's embedding; `config` says the vocabulary where it is given."""

    def __init__(self, width: int = VOCAB, config: Any = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)
        self.places = nn.Embedding(512, 8)
        self.head = nn.Linear(8, width)
        if config is not None:
            self.config = config

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embed(tokens))
        return logits


class WithTargets(Plain):
    """In nanoGPT's manner: (logits, loss), and all positions only if targets are given."""

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Any:
        logits = super().forward(tokens)
        return (logits[:, -1:], None) if targets is None else (logits, logits.mean())


@pytest.mark.parametrize("make", [Plain, WithTargets])
def test_logits_are_scored_over_all_targets(make: type[Plain], batch: dict[str, Tensor]) -> None:
    module = make()
    loss_sum, count = OwnObjective(OwnModel(module))(batch)
    torch.testing.assert_close(
        loss_sum, expected(Plain.forward(module, batch["tokens"]), batch["targets"])
    )
    assert int(count) == 3 * 8 - 5
    loss_sum.backward()
    assert module.head.weight.grad is not None


def test_a_transformers_model_is_scored_by_its_logits(batch: dict[str, Tensor]) -> None:
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=16, n_layer=1, n_head=2, n_positions=24,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    module = transformers.GPT2LMHeadModel(config).eval()
    loss_sum, _ = OwnObjective(OwnModel(module))(batch)
    logits = module(input_ids=batch["tokens"]).logits
    torch.testing.assert_close(loss_sum, expected(logits, batch["targets"]))
    assert (own_vocab(module), own_positions(module)) == (VOCAB, 24)


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_our_transformer_is_scored_by_its_logits_not_its_hidden_states(
    family: str, batch: dict[str, Tensor]
) -> None:
    spec = ModelSpec.parse(
        # As wide as the vocabulary, so that hidden states have the shape of logits.
        {"family": family, "layers": 1, "hidden": VOCAB, "heads": 2, "vocab": VOCAB,
         "max_positions": 16}, "test",
    )  # fmt: skip
    module = Transformer(spec, seed=3).eval()
    loss_sum, count = OwnObjective(build_own(lambda: module))(batch)
    known_sum, known_count = LanguageModelObjective(module, "plain")(batch)
    torch.testing.assert_close(loss_sum, known_sum)
    assert torch.equal(count, known_count)
    torch.testing.assert_close(
        loss_sum, expected(module.logits(module(batch["tokens"])), batch["targets"])
    )
    assert (own_vocab(module), own_positions(module)) == (VOCAB, 16)


def test_hidden_states_are_refused_where_the_vocabulary_is_known(batch: dict[str, Tensor]) -> None:
    narrow = {**batch, "targets": batch["targets"].clamp(max=9)}
    module = Plain(width=10, config=SimpleNamespace(vocab_size=VOCAB))
    with pytest.raises(BadInputError, match=r"10 values per token.*vocabulary of 40"):
        OwnObjective(OwnModel(module))(narrow)


def test_a_large_table_of_positions_is_not_taken_for_a_stated_vocabulary(
    batch: dict[str, Tensor],
) -> None:
    loss_sum, _ = OwnObjective(OwnModel(Plain()))(batch)
    assert own_vocab(Plain()) == 512
    assert loss_sum.isfinite()


def test_a_loss_of_outputs_and_targets_is_refused() -> None:
    with pytest.raises(BadInputError, match=r"CrossEntropyLoss.*loss\(module, batch\)"):
        build_own(lambda: (Plain(), nn.CrossEntropyLoss()))


def test_a_build_that_wants_arguments_names_no_line_of_ours() -> None:
    def build(size: int) -> nn.Module:
        return nn.Linear(size, size)

    with pytest.raises(BadInputError) as caught:
        build_own(build)  # type: ignore[arg-type]
    assert "build() failed at TypeError" in str(caught.value)
    assert "own.py" not in str(caught.value)
