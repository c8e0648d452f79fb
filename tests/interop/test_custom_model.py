"""A person's own model: what build() may return, real steps, weights on disk."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from outpace.data.tokenizer_training import train_tokenizer
from outpace.interop.custom_model import (
    CustomModel,
    CustomObjective,
    build_custom_model,
    read_custom_model,
    write_custom_model,
)
from outpace.records.checksums import added_names
from outpace.records.errors import BadInputError

Batch = dict[str, Tensor]


def mean_square(module: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.mse_loss(module(x), y)


def summed_square(module: nn.Module, batch: Any) -> tuple[Tensor, int]:
    x, y = batch
    return F.mse_loss(module(x), y, reduction="sum"), y.numel()


class Regression(nn.Module):
    """A module that computes its own loss, of one kind or another."""

    def __init__(self, returns: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.returns = returns

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.returns(F.mse_loss(self.linear(x), y))


def regression_data() -> TensorDataset:
    x = torch.randn(32, 3, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x @ torch.tensor([[1.0, 2.0], [0.5, -1.0], [3.0, 0.0]]))


class Named(Dataset[Batch]):
    """Samples with names of their own."""

    def __init__(self, **columns: Tensor) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> Batch:
        return {name: column[index] for name, column in self.columns.items()}


def gpt2() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=16, n_layer=1, n_head=2, vocab_size=32, n_positions=16,
        bos_token_id=None, eos_token_id=None, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def token_data(*names: str) -> Named:
    start = torch.arange(16).unsqueeze(1)
    rows = (start + torch.arange(9)) % 32
    columns = {"tokens": rows[:, :-1], "targets": rows[:, 1:]}
    columns |= {"input_ids": rows[:, :-1], "labels": rows[:, :-1]}
    return Named(**{name: columns[name] for name in names})


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


TRAINABLE: dict[str, Callable[[], Any]] = {
    "(module, mean loss, data)": lambda: (linear(), mean_square, regression_data()),
    "(module, summed loss, data)": lambda: (linear(), summed_square, regression_data()),
    "module with a scalar": lambda: (Regression(lambda x: x), None, regression_data()),
    "module with .loss": lambda: (
        Regression(lambda x: transformers.utils.ModelOutput(loss=x)),
        None,
        regression_data(),
    ),
    "mapping": lambda: {
        "module": linear(),
        "loss": mean_square,
        "dataset": regression_data(),
        "eval_dataset": regression_data(),
    },
    "transformers, our batches": lambda: (gpt2(), None, token_data("tokens", "targets")),
    "transformers, its own batches": lambda: (gpt2(), None, token_data("input_ids", "labels")),
}


@pytest.mark.parametrize("kind", TRAINABLE)
def test_each_kind_learns(kind: str) -> None:
    torch.manual_seed(0)
    own = build_custom_model(TRAINABLE[kind])
    objective = CustomObjective(own)
    optimizer = torch.optim.AdamW(objective.model.parameters(), lr=0.05)
    means = []
    for _ in range(30):
        for batch in DataLoader(own.dataset, batch_size=16):
            loss_sum, count = objective(batch)
            assert loss_sum.dtype == torch.float32 and loss_sum.shape == ()
            assert count.dtype == torch.int64 and count.shape == () and count > 0
            (loss_sum / count).backward()
            optimizer.step()
            optimizer.zero_grad()
            means.append(float(loss_sum.detach() / count))
    assert means[-1] < 0.5 * means[1], "the last batch, at the end and at first"


def test_a_mean_over_samples_counts_samples() -> None:
    own = build_custom_model(TRAINABLE["(module, mean loss, data)"])
    batch = next(iter(DataLoader(own.dataset, batch_size=5)))
    loss_sum, count = CustomObjective(own)(batch)
    assert count == 5
    torch.testing.assert_close(loss_sum, 5 * mean_square(own.module, batch))


def test_a_sum_comes_with_its_own_count() -> None:
    own = build_custom_model(TRAINABLE["(module, summed loss, data)"])
    batch = next(iter(DataLoader(own.dataset, batch_size=5)))
    loss_sum, count = CustomObjective(own)(batch)
    assert count == 10
    torch.testing.assert_close(loss_sum, summed_square(own.module, batch)[0])


@pytest.mark.parametrize("shape", [(), (1,), (2,)])
def test_a_loss_is_never_a_view(shape: tuple[int, ...]) -> None:
    """FSDP warns of views that its modules return."""

    def pair(module: nn.Module, batch: Any) -> Any:
        losses = module(batch).square().sum() * torch.ones(shape)
        return (losses[0] if shape == (2,) else losses), len(batch)

    own = CustomModel(nn.Linear(3, 1), pair)
    loss_sum, _ = CustomObjective(own)(torch.ones(4, 3))
    assert loss_sum.shape == () and not loss_sum._is_view()
    torch.testing.assert_close(loss_sum, own.module(torch.ones(4, 3)).square().sum())


def test_a_mean_over_labels_counts_labels() -> None:
    module = gpt2().eval()
    labels = torch.full((2, 8), -100)
    labels[:, 1:4] = 5
    batch = {"input_ids": torch.ones(2, 8, dtype=torch.long), "labels": labels}
    loss_sum, count = CustomObjective(CustomModel(module))(batch)
    assert count == 6
    torch.testing.assert_close(loss_sum, 6 * module(**batch).loss)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (3, r"build\(\) returned a int; it must be an nn.Module, \(module, loss\)"),
        ((), "returned a tuple"),
        ((1, 2, 3, 4, 5), "returned a tuple"),
        (("x",), "returned a str as the module"),
        ((nn.Linear(1, 1), 3), r"returned a int as the loss; .* loss\(module, batch\)"),
        ((nn.Linear(1, 1), None, 3), "returned a int as the dataset"),
        ((nn.Linear(1, 1), None, None, iter(())), "as the eval_dataset"),
        ({"modul": nn.Linear(1, 1)}, "unknown key 'modul'. Did you mean 'module'"),
        ({"loss": mean_square}, "a mapping without 'module'"),
    ],
)
def test_what_build_may_not_return(returned: Any, said: str) -> None:
    def build() -> Any:
        return returned

    with pytest.raises(BadInputError, match=said):
        build_custom_model(build)


def test_a_build_that_fails_is_placed(tmp_path: Path) -> None:
    from outpace.interop.user_file import load_function

    path = tmp_path / "failing.py"
    path.write_text("import math\n\ndef build():\n    return math.sqrt(-1)\n")
    with pytest.raises(BadInputError) as caught:
        build_custom_model(load_function(f"{path}:build"))
    assert str(caught.value).startswith(f"build() failed at {path}:4: ValueError: ")


def test_a_file_imports_its_neighbours_and_defines_picklable_things(tmp_path: Path) -> None:
    import pickle

    from outpace.interop.user_file import load_function

    (tmp_path / "own_neighbour.py").write_text("WIDTH = 7\n")
    (tmp_path / "own_here.py").write_text(
        "import torch\nfrom own_neighbour import WIDTH\n"
        "class Net(torch.nn.Linear): ...\n"
        "def build(): return Net(WIDTH, 1)\n"
    )
    module = build_custom_model(load_function(f"{tmp_path}/own_here.py:build")).module
    assert pickle.loads(pickle.dumps(module)).in_features == 7


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda module, batch: module(batch[0]), r"the loss is a tensor of shape \(5, 2\)"),
        (lambda module, batch: 3.0, "the loss is a float"),
        (None, r"the module's output is a tensor of shape \(5, 2\).*a loss function"),
    ],
)
def test_what_is_no_loss(loss: Any, said: str) -> None:
    x, _ = next(iter(DataLoader(regression_data(), batch_size=5)))
    with pytest.raises(BadInputError, match=said):
        CustomObjective(CustomModel(linear(), loss))([x])


def test_logits_of_another_length_are_refused() -> None:
    class Last(nn.Embedding):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input)[:, -1:]

    batch = {"tokens": torch.ones(2, 4, dtype=torch.long), "targets": torch.ones(2, 4).long()}
    with pytest.raises(BadInputError, match=r"logits of shape \(2, 1, 9\) for targets of shape"):
        CustomObjective(CustomModel(Last(9, 9)))(batch)


def test_written_weights_are_read_back(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "def build():\n"
        "    a, b = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)\n"
        "    b.weight = a.weight\n"
        "    return torch.nn.Sequential(a, b), lambda module, batch: module(batch).mean()\n"
    )
    from outpace.interop.user_file import load_function

    reference = f"{tmp_path}/mine.py:build"
    module = build_custom_model(load_function(reference)).module
    write_custom_model(tmp_path / "model", module, reference)
    stored = load_file(tmp_path / "model/model.safetensors")
    assert len(stored) == 3, "the shared weight is stored once"
    described = json.loads((tmp_path / "model/model.json").read_text())
    assert described["reference"] == reference and described["parameters"] == 15
    again = build_custom_model(read_custom_model(tmp_path / "model"))
    assert again.loss is not None and again.module[0].weight is again.module[1].weight
    assert all(map(torch.equal, again.module.parameters(), module.parameters()))


def test_the_tokenizer_belongs_to_the_files_of_a_written_model(tmp_path: Path) -> None:
    """Whatever else is in a run's model/ is taken for the user's, and kept."""
    tokenizer = train_tokenizer(["a text"], 300)
    write_custom_model(tmp_path / "model", linear(), "own", tokenizer.save)
    assert (tmp_path / "model" / "tokenizer.json").is_file()
    assert added_names(tmp_path / "model") == []


def test_what_was_built_in_python_is_not_built_again(tmp_path: Path) -> None:
    write_custom_model(tmp_path / "model", linear(), "own")
    with pytest.raises(BadInputError, match=r"was built in Python \('own'\)"):
        read_custom_model(tmp_path / "model")
    (tmp_path / "model/model.json").write_text("{}")
    with pytest.raises(BadInputError, match=r"model.json cannot be read"):
        read_custom_model(tmp_path / "model")


def test_a_module_that_fails_under_autocast_alone_is_told_to_use_fp32() -> None:
    head = nn.AdaptiveLogSoftmaxWithLoss(4, 20, [5])
    given = torch.randn(6, 4), torch.arange(6) * 3
    objective = CustomObjective(CustomModel(head, lambda module, batch: module(*batch).loss))
    assert torch.isfinite(objective(given)[0])
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(BadInputError, match=r"mixed precision \(bfloat16.*Use precision fp32"),
    ):
        objective(given)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool, torch.float64])
def test_dtypes_that_fail_in_fp32_too_are_not_blamed_on_autocast(dtype: torch.dtype) -> None:
    objective = CustomObjective(CustomModel(nn.Linear(4, 1), lambda m, batch: m(batch).mean()))
    batch = torch.ones(2, 4).to(dtype)
    for enabled in (False, True):
        with (
            torch.autocast("cpu", torch.bfloat16, enabled=enabled),
            pytest.raises(RuntimeError, match=r"the same dtype, but got"),
        ):
            objective(batch)


def test_a_module_on_the_meta_device_fails_with_its_own_error() -> None:
    """torch.is_autocast_enabled("meta") raises."""
    module = nn.Linear(4, 1, device="meta")

    def loss(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("Float and BFloat16 have another dtype")

    with pytest.raises(RuntimeError, match="have another dtype"):
        CustomObjective(CustomModel(module, loss))(torch.ones(2, 4, device="meta"))
