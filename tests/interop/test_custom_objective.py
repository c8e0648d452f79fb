"""The loss of a person's own model: what counts as logits, what is refused."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from outpace.interop.custom_model import (
    CustomModel,
    CustomObjective,
    build_custom_model,
    read_custom_model,
    read_positions,
    read_vocab,
    write_custom_model,
)
from outpace.interop.user_file import load_function
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

    smoothing, extra = 0.0, 0.0

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Any:
        logits = super().forward(tokens)
        if targets is None:
            return logits[:, -1:], None
        flat = logits.flatten(0, 1), targets.flatten()
        return logits, F.cross_entropy(*flat, label_smoothing=self.smoothing) + self.extra


@pytest.mark.parametrize("make", [Plain, WithTargets])
def test_logits_are_scored_over_all_targets(make: type[Plain], batch: dict[str, Tensor]) -> None:
    module = make()
    loss_sum, count = CustomObjective(CustomModel(module))(batch)
    torch.testing.assert_close(
        loss_sum, expected(Plain.forward(module, batch["tokens"]), batch["targets"])
    )
    assert int(count) == 3 * 8 - 5
    loss_sum.backward()
    assert module.head.weight.grad is not None


class Named(WithTargets):
    """As transformers' models: something with `.loss` and `.logits`."""

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Any:
        logits, loss = super().forward(tokens, targets)
        return SimpleNamespace(logits=logits, loss=loss)


class Keyed(WithTargets):
    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Any:
        logits, loss = super().forward(tokens, targets)
        return {"logits": logits, "loss": loss}


class LossFirst(WithTargets):
    """As transformers' tuples."""

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Any:
        return super().forward(tokens, targets)[::-1]


@pytest.mark.parametrize("make", [WithTargets, Named, Keyed, LossFirst])
def test_the_loss_that_a_module_returns_is_its_loss(
    make: type[WithTargets], batch: dict[str, Tensor]
) -> None:
    module = make()
    module.smoothing, module.extra = 0.1, 0.5
    loss_sum, count = CustomObjective(CustomModel(module))(batch)
    logits = Plain.forward(module, batch["tokens"])
    mean = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), label_smoothing=0.1)
    torch.testing.assert_close(loss_sum / count, mean + 0.5)
    assert int(count) == 3 * 8 - 5
    nothing = {**batch, "targets": torch.full_like(batch["targets"], -100)}
    loss_sum, count = CustomObjective(CustomModel(module))(nothing)  # whose mean is NaN
    assert (float(loss_sum.detach()), int(count)) == (0.0, 0)


@pytest.mark.parametrize("named", [False, True])
def test_a_term_beside_logits_without_a_loss_is_refused(
    named: bool, batch: dict[str, Tensor]
) -> None:
    class WithTerm(Plain):
        def forward(self, tokens: Tensor) -> Any:
            logits = super().forward(tokens)
            term = logits.square().mean()
            return {"logits": logits, "aux_loss": term} if named else (logits, term)

    said = r"aux_loss without a loss" if named else r"does not get the targets.*\(logits, loss\)"
    with pytest.raises(BadInputError, match=said):
        CustomObjective(CustomModel(WithTerm()))(batch)


def test_a_mixture_of_experts_of_transformers_is_scored_with_its_router_loss(
    batch: dict[str, Tensor],
) -> None:
    config = transformers.MixtralConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, num_local_experts=4, use_cache=False,
        output_router_logits=True, router_aux_loss_coef=0.3,
    )  # fmt: skip
    module = transformers.MixtralForCausalLM(config)
    loss_sum, count = CustomObjective(CustomModel(module))(batch)
    output = module(batch["tokens"], labels=batch["targets"], shift_labels=batch["targets"])
    assert output.aux_loss > 0.5
    torch.testing.assert_close(loss_sum / count, output.loss)


def test_a_sum_of_weights_is_what_a_mean_is_over() -> None:
    x, weights = torch.ones(3, 2), torch.tensor([0.25, 0.0, 0.125])
    module = nn.Linear(2, 1)

    def loss(m: nn.Module, batch: Any) -> Any:
        return (m(batch["x"])[:, 0] * batch["weights"]).sum(), batch["weights"].sum()

    _, count = CustomObjective(CustomModel(module, loss))({"x": x, "weights": weights})
    assert float(count) == 0.375
    with pytest.raises(BadInputError, match=r"a dict as the count"):
        CustomObjective(CustomModel(module, lambda m, b: (m(b).sum(), {"accuracy": 1.0})))(x)


def test_a_transformers_model_is_scored_by_its_logits(batch: dict[str, Tensor]) -> None:
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=16, n_layer=1, n_head=2, n_positions=24,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    module = transformers.GPT2LMHeadModel(config).eval()
    loss_sum, _ = CustomObjective(CustomModel(module))(batch)
    logits = module(input_ids=batch["tokens"]).logits
    torch.testing.assert_close(loss_sum, expected(logits, batch["targets"]))
    assert (read_vocab(module), read_positions(module)) == (VOCAB, 24)


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
    loss_sum, count = CustomObjective(build_custom_model(lambda: module))(batch)
    known_sum, known_count = LanguageModelObjective(module, "plain")(batch)
    torch.testing.assert_close(loss_sum, known_sum)
    assert torch.equal(count, known_count)
    torch.testing.assert_close(
        loss_sum, expected(module.logits(module(batch["tokens"])), batch["targets"])
    )
    assert (read_vocab(module), read_positions(module)) == (VOCAB, 16)


def test_hidden_states_are_refused_where_the_vocabulary_is_known(batch: dict[str, Tensor]) -> None:
    narrow = {**batch, "targets": batch["targets"].clamp(max=9)}
    module = Plain(width=10, config=SimpleNamespace(vocab_size=VOCAB))
    with pytest.raises(BadInputError, match=r"10 values per token.*vocabulary of 40"):
        CustomObjective(CustomModel(module))(narrow)


def test_a_large_table_of_positions_is_not_taken_for_a_stated_vocabulary(
    batch: dict[str, Tensor],
) -> None:
    loss_sum, _ = CustomObjective(CustomModel(Plain()))(batch)
    assert read_vocab(Plain()) == 512
    assert loss_sum.isfinite()


def test_transformers_predicts_nothing_for_the_first_label(batch: dict[str, Tensor]) -> None:
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=16, n_layer=1, n_head=2, n_positions=24,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    module = transformers.GPT2LMHeadModel(config).eval()
    own = {"input_ids": batch["tokens"], "labels": batch["tokens"]}
    loss_sum, count = CustomObjective(CustomModel(module))(own)
    assert int(count) == 3 * 7
    torch.testing.assert_close(
        loss_sum, expected(module(batch["tokens"]).logits[:, :-1], batch["tokens"][:, 1:])
    )


class TakesBatch(nn.Module):
    """Its forward takes the whole batch and returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 1)

    def forward(self, batch: Any) -> Tensor:
        inputs, targets = batch.values() if isinstance(batch, dict) else batch
        loss: Tensor = (self.inner(inputs) - targets).square().mean()
        return loss


class TakesParts(TakesBatch):
    """Its forward takes the parts by name or order."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward((x, y))


@pytest.mark.parametrize("make", [TakesBatch, TakesParts])
@pytest.mark.parametrize("kind", [dict, tuple, list])
def test_batches_of_own_data(make: type[nn.Module], kind: Any) -> None:
    x, y = torch.ones(5, 2), torch.zeros(5, 1)
    module = make()
    loss_sum, count = CustomObjective(CustomModel(module))(
        {"x": x, "y": y} if kind is dict else kind((x, y))
    )
    torch.testing.assert_close(loss_sum, 5 * module.inner(x).square().mean())
    assert int(count) == 5


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ((torch.zeros(4, 2), torch.zeros(4)), "a tuple of 2"),
        ({"x": torch.zeros(4, 2), "y": torch.zeros(4)}, "a dict of x, y"),
    ],
)
def test_a_batch_that_forward_cannot_take(batch: Any, said: str) -> None:
    with pytest.raises(BadInputError, match=rf"{said}: .* Return a loss function"):
        CustomObjective(CustomModel(nn.Linear(2, 3)))(batch)


def test_a_mapping_with_logits_is_scored(batch: dict[str, Tensor]) -> None:
    class Mapped(Plain):
        def forward(self, tokens: Tensor) -> Any:
            return {"logits": super().forward(tokens)}

    module = Mapped()
    loss_sum, _ = CustomObjective(CustomModel(module))(batch)
    torch.testing.assert_close(loss_sum, expected(module(batch["tokens"])["logits"],
                                                  batch["targets"]))  # fmt: skip


def test_a_loss_function_may_return_a_dict_with_the_loss() -> None:
    """As training steps do, with numbers for a log; one with several losses is refused."""
    x, module = torch.ones(3, 2), nn.Linear(2, 1)
    total, count = CustomObjective(
        CustomModel(module, lambda m, b: {"loss": m(b).mean(), "log": 1.0})
    )(x)
    torch.testing.assert_close(total / count, module(x).mean())
    mixed = CustomObjective(CustomModel(module, lambda m, b: m(b["x"]).mean()))
    assert int(mixed({"share": torch.tensor(0.3), "x": x})[1]) == 3  # not of the number before
    with pytest.raises(BadInputError, match=r"a dict; .* Add up several losses"):
        CustomObjective(CustomModel(module, lambda m, b: {"boxes": m(b).mean()}))(x)


def test_a_loss_without_gradient_is_refused_in_training_only() -> None:
    objective = CustomObjective(
        CustomModel(nn.Linear(2, 1), lambda module, x: module(x).mean().detach())
    )
    with pytest.raises(BadInputError, match="no gradient"):
        objective(torch.ones(3, 2))
    with torch.no_grad():
        assert int(objective(torch.ones(3, 2))[1]) == 3


def test_nothing_to_train_is_refused() -> None:
    with pytest.raises(BadInputError, match="ReLU without a parameter"):
        build_custom_model(nn.ReLU)
    with pytest.raises(BadInputError, match="nothing to train"):
        build_custom_model(lambda: nn.Linear(2, 2).requires_grad_(False))


def test_parameters_of_the_loss_are_trained_only_inside_the_module() -> None:
    module = Plain()
    with pytest.raises(BadInputError, match="Make the loss an attribute of the module"):
        build_custom_model(lambda: (module, nn.Linear(2, 1)))
    assert build_custom_model(lambda: (module, module.head)).loss is module.head


def test_weights_that_overlap_and_other_state_survive(tmp_path: Path) -> None:
    source = tmp_path / "odd.py"
    source.write_text(ODD, encoding="utf-8")
    build = load_function(f"{source}:build")
    module = build_custom_model(build).module
    with torch.no_grad():
        module.get_parameter("weight").fill_(7.0)
        module.get_buffer("whole").fill_(3.0)
    write_custom_model(tmp_path / "model", module, f"{source}:build")
    again = read_custom_model(tmp_path / "model")().module
    assert (again.get_parameter("weight") == 7.0).all()
    assert (again.get_buffer("late") == 3.0).all()


ODD = """
import torch


class Odd(torch.nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
        numbers = torch.arange(8.0)
        self.register_buffer("whole", numbers[:5])
        self.register_buffer("late", numbers[3:5])
        self.register_buffer("beyond", numbers[4:])

    def get_extra_state(self):
        return {"not": "a tensor"}

    def set_extra_state(self, state):
        pass


def build():
    return Odd()
"""


def test_a_loss_of_outputs_and_targets_is_refused() -> None:
    with pytest.raises(BadInputError, match=r"CrossEntropyLoss.*loss\(module, batch\)"):
        build_custom_model(lambda: (Plain(), nn.CrossEntropyLoss()))


def test_a_build_that_wants_arguments_names_no_line_of_ours() -> None:
    def build(size: int) -> nn.Module:
        return nn.Linear(size, size)

    with pytest.raises(BadInputError) as caught:
        build_custom_model(build)  # type: ignore[arg-type]
    assert "build() failed at TypeError" in str(caught.value)
    assert "own.py" not in str(caught.value)


@pytest.mark.parametrize("name", ["targets", "labels"])
def test_a_mean_over_targets_counts_those_of_each_micro_batch(
    batch: dict[str, Tensor], name: str
) -> None:
    given = {"tokens": batch["tokens"], name: batch["targets"]}

    def loss(module: nn.Module, part: dict[str, Tensor]) -> Tensor:
        flat = module(part["tokens"]).flatten(0, 1), part[name].flatten()
        return F.cross_entropy(*flat, ignore_index=-100)

    model = Plain()
    objective = CustomObjective(build_custom_model(lambda: (model, loss)))
    whole = expected(model(batch["tokens"]), batch["targets"])
    parts = [objective({key: value[n : n + 1] for key, value in given.items()}) for n in range(3)]
    assert [int(count) for _, count in parts] == [3, 8, 8]
    assert float(sum(total.detach() for total, _ in parts)) == pytest.approx(
        float(whole.detach()), rel=1e-6
    )
    empty = {**given, name: torch.full_like(batch["targets"], -100)}
    total, count = objective(empty)
    assert (float(total.detach()), int(count)) == (0.0, 0)


@pytest.mark.parametrize("own", [False, True])
def test_labels_that_repeat_the_tokens_are_counted_without_the_first(
    batch: dict[str, Tensor], own: bool
) -> None:
    """As models that shift labels themselves have them; transformers' own are known by name."""

    def loss(module: nn.Module, part: Any) -> Tensor:
        scores = module(part["input_ids"])[:, :-1]
        return F.cross_entropy(scores.flatten(0, 1), part["labels"][:, 1:].flatten())

    class Shifting(Plain):
        def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:  # type: ignore[override]
            if labels is None:
                return super().forward(input_ids)
            return {"loss": loss(self, {"input_ids": input_ids, "labels": labels})}

    padded = torch.arange(8) >= torch.tensor([[3], [5], [8]])
    given = {"input_ids": batch["tokens"], "labels": batch["tokens"].masked_fill(padded, -100)}
    model = Shifting()
    objective = CustomObjective(CustomModel(model, None if own else loss))
    parts = [objective({k: v[n : n + 1] for k, v in given.items()}) for n in range(3)]
    assert [int(count) for _, count in parts] == [2, 4, 7]
    whole, count = objective(given)
    torch.testing.assert_close(sum(total for total, _ in parts) / 13, whole / count)


def test_a_mean_without_targets_for_tokens_is_of_samples(batch: dict[str, Tensor]) -> None:
    objective = CustomObjective(
        build_custom_model(lambda: (Plain(), lambda m, b: m(b["tokens"]).mean()))
    )
    for labels in (torch.tensor([1, 0, -100]), torch.rand(3, 8)):
        assert int(objective({"tokens": batch["tokens"], "labels": labels})[1]) == 3
