"""Modules that hold one thing in two places, and losses and batches that are no plain tensors.

An entry `name(seed)` gives a module, its loss (None: the module's own), and a function that makes a
batch of so many samples with a generator. `MODULES` lists all entries.
"""

import functools
from collections import UserDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from zoo.common import (
    LAYERS,
    VOCAB,
    WIDTH,
    Batch,
    BlockStack,
    Entry,
    ResidualBlock,
    build_seeded,
    squared_error,
    token_batch,
    vector_batch,
)


def two_parameters_of_one_storage(seed: int) -> Entry:
    """A decoder's weight is a parameter of its own, and a view of the encoder's memory."""

    class Model(BlockStack):
        def __init__(self) -> None:
            super().__init__()
            self.head.weight = nn.Parameter(self.stem.weight.t())

    return build_seeded(seed, Model), squared_error, vector_batch


def parts_of_one_flat_parameter(seed: int) -> Entry:
    """Query, key and value are parameters that are views of one flat tensor."""

    class Block(ResidualBlock):
        def __init__(self) -> None:
            super().__init__()
            flat = 0.4 * torch.randn(3 * WIDTH, WIDTH)
            self.query, self.key, self.value = (nn.Parameter(part) for part in flat.chunk(3))

        def forward(self, x: Tensor) -> Tensor:
            gate = (x @ self.query * (x @ self.key)).sigmoid()
            return super().forward(x) + gate * (x @ self.value)

    return build_seeded(seed, lambda: BlockStack(Block)), squared_error, vector_batch


def buffer_of_a_parameters_storage(seed: int) -> Entry:
    """An anchor that was to be a copy of a weight, and is its memory: it moves with the weight."""

    class Model(BlockStack):
        anchor: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("anchor", self.stem.weight.data)

        def forward(self, x: Tensor) -> Tensor:
            return self.run(x) + 0.5 * x @ self.anchor

    return build_seeded(seed, Model), squared_error, vector_batch


def attribute_of_a_parameters_storage(seed: int) -> Entry:
    """The same in a plain attribute: a detached view of a weight, which the forward uses."""

    class Model(BlockStack):
        def __init__(self) -> None:
            super().__init__()
            self.anchor = self.stem.weight.detach()

        def forward(self, x: Tensor) -> Tensor:
            return self.run(x) + 0.5 * x @ self.anchor.to(x.dtype)

    return build_seeded(seed, Model), squared_error, vector_batch


def buffer_of_two_names(seed: int) -> Entry:
    """One tensor is a buffer of two blocks, and both write to it."""

    class Block(ResidualBlock):
        level: Tensor

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.level.mul_(0.9).add_(0.1)
            return super().forward(x) * self.level.clone()

    class Model(BlockStack):
        def __init__(self) -> None:
            super().__init__(Block)
            level = torch.full((), 0.5)  # of one tensor
            for layer in self.layers:
                layer.register_buffer("level", level)

    return build_seeded(seed, Model), squared_error, vector_batch


def table_in_a_buffer_of_all_blocks(seed: int) -> Entry:
    """One table, as of rotary positions, is a buffer of every block, and nothing changes it."""

    class Block(ResidualBlock):
        table: Tensor

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.table

    class Model(BlockStack):
        def __init__(self) -> None:
            super().__init__(Block)
            table = torch.linspace(0.5, 1, WIDTH)
            for layer in self.layers:
                layer.register_buffer("table", table)

    return build_seeded(seed, Model), squared_error, vector_batch


def penalty_by_a_list_of_parameters(seed: int) -> Entry:
    """A penalty of parameters that `__init__` has put in a plain list."""

    class Model(BlockStack):
        def __init__(self) -> None:
            super().__init__()
            self.decayed = [p for p in self.parameters() if p.dim() > 1]

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.run(x), sum(p.square().sum() for p in self.decayed)  # type: ignore

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        made, penalty = module(batch[0])
        return (made - batch[1]).square().mean() + 0.01 * penalty

    return build_seeded(seed, Model), loss, vector_batch


def lambdas_of_weights(seed: int) -> Entry:
    """Blocks call a lambda that `__init__` has made, and that holds the block."""

    class Block(ResidualBlock):
        def __init__(self) -> None:
            super().__init__()
            self.function = lambda x: torch.tanh(F.linear(x, self.up.weight, self.up.bias))
            self.scaled = functools.partial(self.by, 0.5)

        def by(self, factor: float, x: Tensor) -> Tensor:
            return factor * self.norm(x)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.function(self.scaled(x))

    return build_seeded(seed, lambda: BlockStack(Block)), squared_error, vector_batch


def parts_that_know_their_model(seed: int) -> Entry:
    """Blocks hold the model in a list, and read a parameter of it."""

    class Block(ResidualBlock):
        def __init__(self, parent: nn.Module) -> None:
            super().__init__()
            self.parent = [parent]

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.parent[0].scale  # type: ignore[operator]

    class Model(BlockStack):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(WIDTH))
            self.layers = nn.ModuleList(Block(self) for _ in range(LAYERS))

    return build_seeded(seed, Model), squared_error, vector_batch


def modules_of_two_names(seed: int) -> Entry:
    """The embedding is a part of the encoder, and of the model under another name."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Module()
            self.encoder.embed = nn.Embedding(VOCAB, WIDTH)
            self.encoder.layers = nn.ModuleList(ResidualBlock() for _ in range(LAYERS))
            self.shared = self.encoder.embed
            self.last = self.encoder.layers[-1]
            self.head = nn.Linear(WIDTH, VOCAB, bias=False)

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.shared(tokens)
            for layer in list(self.encoder.layers)[:-1]:  # type: ignore[arg-type]
                x = layer(x)
            return self.head(self.last(x))

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(module(batch["tokens"]).flatten(0, 1), batch["targets"].flatten())

    return build_seeded(seed, Model), loss, token_batch


def states_of_trained_parts_alone(seed: int) -> Entry:
    """`state_dict` leaves out the frozen encoder, and `load_state_dict` does without it."""

    class Model(BlockStack):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            held = super().state_dict(*args, **kwargs)
            return {name: one for name, one in held.items() if "encoder" not in name}

        def load_state_dict(
            self, state_dict: Any, strict: bool = True, assign: bool = False
        ) -> Any:
            return super().load_state_dict(state_dict, strict=False, assign=assign)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x = self.encoder(x)
            return self.run(x)

    return build_seeded(seed, Model), squared_error, vector_batch


def states_under_other_names(seed: int) -> Entry:
    """Hooks that rename entries of the state when it is saved, and back when it is loaded."""

    class Model(BlockStack):
        def __init__(self) -> None:
            super().__init__()
            self.register_state_dict_post_hook(self.rename)
            self.register_load_state_dict_pre_hook(self.rename_back)

        @staticmethod
        def rename(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
            for name in [one for one in state if one.startswith(f"{prefix}layers.")]:
                state[name.replace("layers.", "h.", 1)] = state.pop(name)

        @staticmethod
        def rename_back(module: nn.Module, state: Any, prefix: str, *rest: Any) -> None:
            for name in [one for one in state if one.startswith(f"{prefix}h.")]:
                state[name.replace("h.", "layers.", 1)] = state.pop(name)

    return build_seeded(seed, Model), squared_error, vector_batch


def averaged_model_inside(seed: int) -> Entry:
    """torch's AveragedModel is a part, which the forward updates, and whose outputs are targets."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student = BlockStack()
            self.teacher = AveragedModel(self.student, multi_avg_fn=get_ema_multi_avg_fn(0.9))
            self.teacher.requires_grad_(False)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            if self.training:
                self.teacher.update_parameters(self.student)
            with torch.no_grad():
                wanted = self.teacher(x)
            return self.student(x), wanted

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        made, wanted = module(batch[0])
        return (made - batch[1]).square().mean() + 0.1 * (made - wanted).square().mean()

    return build_seeded(seed, Model), loss, vector_batch


def weights_moved_and_put_back(seed: int) -> Entry:
    """SAM in the loss: weights go along the gradient, the loss is taken there, and they go back."""

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        if not torch.is_grad_enabled():
            return squared_error(module, batch)
        held = [p for p in module.parameters() if p.requires_grad]
        slopes = torch.autograd.grad(squared_error(module, batch), held)
        norm = torch.stack([one.norm() for one in slopes]).norm() + 1e-6
        with torch.no_grad():
            for parameter, slope in zip(held, slopes, strict=True):
                parameter.data.add_(0.05 * slope / norm)
        value = squared_error(module, batch)
        with torch.no_grad():
            for parameter, slope in zip(held, slopes, strict=True):
                parameter.data.sub_(0.05 * slope / norm)
        return value

    return build_seeded(seed, BlockStack), loss, vector_batch


def temperature_clamped_as_data(seed: int) -> Entry:
    """CLIP's: the learned temperature is clamped through `.data` in each forward."""

    class Model(BlockStack):
        def __init__(self) -> None:
            super().__init__()
            self.heat = nn.Parameter(torch.tensor(4.0))

        def forward(self, x: Tensor) -> Tensor:
            self.heat.data = torch.clamp(self.heat.data, 0, 2.0)
            return self.run(x) * self.heat.exp() / 5

    return build_seeded(seed, Model), squared_error, vector_batch


def blocks_that_write_to_their_input(seed: int) -> Entry:
    """Blocks scale what they are given in place, as `x *= …` and ReLU(inplace=True) do."""

    class Block(ResidualBlock):
        def forward(self, x: Tensor) -> Tensor:
            x *= 0.9
            return super().forward(x)

    return build_seeded(seed, lambda: BlockStack(Block)), squared_error, vector_batch


def batch_that_the_loss_empties(seed: int) -> Entry:
    """The loss takes its targets out of the batch by `pop`, as many training loops do."""

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        targets = batch.pop("targets")
        return (module(**batch) - targets).square().mean()

    def make(drawn: torch.Generator, samples: int) -> Batch:
        inputs, targets = vector_batch(drawn, samples)
        return {"x": inputs, "targets": targets}

    return build_seeded(seed, BlockStack), loss, make


def batch_that_the_forward_changes(seed: int) -> Entry:
    """The forward normalises its input in place, and masks tokens of the batch in place."""

    class Model(BlockStack):
        def forward(self, x: Tensor) -> Tensor:
            x -= 0.5
            x /= 2.0
            return self.run(x)

    return build_seeded(seed, Model), squared_error, vector_batch


def batch_with_texts_and_arrays(seed: int) -> Entry:
    """A list of texts and an array of NumPy, with an entry for each sample, beside tensors."""

    class Model(BlockStack):
        def forward(self, x: Tensor, texts: list[str]) -> Tensor:
            lengths = torch.tensor([len(text) for text in texts], dtype=x.dtype)
            return self.run(x * (1 + 0.1 * lengths[:, None]))

    def make(drawn: torch.Generator, samples: int) -> Batch:
        inputs, targets = vector_batch(drawn, samples)
        texts = ["a" * (1 + number % 5) for number in range(samples)]
        weights = np.linspace(0.5, 1.5, samples)
        return {"x": inputs, "targets": targets, "texts": texts, "weights": weights}

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        errors = (module(batch["x"], batch["texts"]) - batch["targets"]).square().mean(-1)
        return (errors * torch.from_numpy(batch["weights"])).mean()

    return build_seeded(seed, Model), loss, make


def weights_in_a_list_of_numbers(seed: int) -> Entry:
    """The sum of a list of numbers, one for each sample, is a factor of the loss."""

    def make(drawn: torch.Generator, samples: int) -> Batch:
        inputs, targets = vector_batch(drawn, samples)
        return inputs, targets, [0.5 + 0.1 * number for number in range(samples)]

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        inputs, targets, weights = batch
        errors = (module(inputs) - targets).square().mean(-1)
        return sum(w * e for w, e in zip(weights, errors, strict=False)) / len(errors)  # type: ignore

    return build_seeded(seed, BlockStack), loss, make


def batch_in_a_user_dict(seed: int) -> Entry:
    """A dict-like batch in a tuple, as tokenizers give it, and a number for all samples."""

    def make(drawn: torch.Generator, samples: int) -> Batch:
        inputs, targets = vector_batch(drawn, samples)
        return UserDict({"x": inputs, "scale": torch.tensor(0.7)}), targets

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        given, targets = batch
        return (module(given["x"]) * given["scale"] - targets).square().mean()

    return build_seeded(seed, BlockStack), loss, make


def records_of_samples(seed: int) -> Entry:
    """A detector's batch: images in one tensor, and a list of dicts, one for each sample."""

    class Model(BlockStack):
        def forward(self, images: Tensor) -> Tensor:
            return self.run(images.mean((2, 3)))

    def make(drawn: torch.Generator, samples: int) -> Batch:
        images = torch.randn(samples, WIDTH, 4, 4, generator=drawn)
        boxes = [torch.randn(1 + n % 3, WIDTH, generator=drawn) for n in range(samples)]
        return images, [{"boxes": one, "image_id": n} for n, one in enumerate(boxes)]

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        pairs = zip(module(batch[0]), batch[1], strict=True)
        return torch.stack([(made - of["boxes"]).square().mean() for made, of in pairs]).mean()

    return build_seeded(seed, Model), loss, make


class _Fields(dict[str, Any]):
    """A dict whose entries are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


def batch_with_attributes(seed: int) -> Entry:
    """A batch of a class of dicts whose entries the loss reads as attributes."""

    def make(drawn: torch.Generator, samples: int) -> Batch:
        inputs, targets = vector_batch(drawn, samples)
        return _Fields(inputs=inputs, targets=targets, scale=0.5)

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        return (module(batch.inputs * batch.scale) - batch.targets).square().mean()

    return build_seeded(seed, BlockStack), loss, make


def images_in_a_list(seed: int) -> Entry:
    """Images of one size in a list: nothing tells a list of samples from one of other tensors."""

    def make(drawn: torch.Generator, samples: int) -> Batch:
        images = [torch.randn(WIDTH, 4, 4, generator=drawn) for _ in range(samples)]
        return {"images": images, "targets": torch.randn(samples, WIDTH, generator=drawn)}

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        made = module(torch.stack(batch["images"]).mean((2, 3)))
        return (made - batch["targets"]).square().mean()

    return build_seeded(seed, BlockStack), loss, make


def table_as_long_as_the_batch(seed: int) -> Entry:
    """Positions for all samples have by chance as many entries as the batch has samples."""

    def make(drawn: torch.Generator, samples: int) -> Batch:
        x = torch.randn(samples, 8, WIDTH, generator=drawn)
        return {"x": x, "places": torch.linspace(-1, 1, 8)}

    class Model(BlockStack):
        def forward(self, x: Tensor, places: Tensor) -> Tensor:
            hidden = self.run(x)
            near = (places[:, None] - places).square().neg().exp().sum(-1)
            return hidden * near.mean()

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        return (module(**batch) - 1).square().mean()

    return build_seeded(seed, Model), loss, make


def loss_of_one_entry(seed: int) -> Entry:
    """The loss is a vector of one entry."""

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        return squared_error(module, batch)[None]

    return build_seeded(seed, BlockStack), loss, vector_batch


def loss_summed_over_samples(seed: int) -> Entry:
    """The loss is a sum over the batch's samples, divided by a number of the settings."""

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        return (module(batch[0]) - batch[1]).square().mean(-1).sum() / 16

    return build_seeded(seed, BlockStack), loss, vector_batch


def losses_by_name(seed: int) -> Entry:
    """A detector's: in training the module returns a dict of losses that are added up."""

    class Model(BlockStack):
        def __init__(self) -> None:
            super().__init__()
            self.boxes = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
            hidden = self.run(x)
            if y is None:
                return hidden
            return {
                "loss_classes": (hidden - y).square().mean(),
                "loss_boxes": F.smooth_l1_loss(self.boxes(hidden), y),
            }

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        return torch.stack(list(module(*batch).values())).sum()

    return build_seeded(seed, Model), loss, vector_batch


def compiled_blocks(seed: int) -> Entry:
    """Blocks that torch.compile has wrapped, with names of its own."""

    class Model(BlockStack):
        def __init__(self) -> None:
            super().__init__()
            compiled = [torch.compile(layer, backend="eager") for layer in self.layers]
            self.layers = nn.ModuleList(compiled)  # type: ignore[arg-type]

    return build_seeded(seed, Model), squared_error, vector_batch


def wrapped_for_several_devices(seed: int) -> Entry:
    """A module in nn.DataParallel, whose names begin with `module.`."""
    return build_seeded(seed, lambda: nn.DataParallel(BlockStack())), squared_error, vector_batch


def centred_over_the_batch(seed: int) -> Entry:
    """Samples weigh each other by a softmax over the first dimension, as by mistake."""

    class Block(ResidualBlock):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (1 + x.softmax(0))

    return build_seeded(seed, lambda: BlockStack(Block)), squared_error, vector_batch


def logs_in_lists(seed: int) -> Entry:
    """Losses and norms of activations are appended to lists, for plots."""

    class Model(BlockStack):
        def __init__(self) -> None:
            super().__init__()
            self.norms: list[float] = []
            self.last: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            made = self.run(x)
            self.norms.append(made.detach().norm().item())
            self.last = made
            return made

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        module(batch[0])
        return (module.last - batch[1]).square().mean()  # type: ignore[operator]

    return build_seeded(seed, Model), loss, vector_batch


MODULES: tuple[Callable[[int], Entry], ...] = (
    two_parameters_of_one_storage, parts_of_one_flat_parameter, buffer_of_a_parameters_storage,
    attribute_of_a_parameters_storage, buffer_of_two_names, table_in_a_buffer_of_all_blocks,
    penalty_by_a_list_of_parameters,
    lambdas_of_weights, parts_that_know_their_model, modules_of_two_names,
    states_of_trained_parts_alone, states_under_other_names, averaged_model_inside,
    weights_moved_and_put_back, temperature_clamped_as_data, blocks_that_write_to_their_input,
    batch_that_the_loss_empties, batch_that_the_forward_changes, batch_with_texts_and_arrays,
    weights_in_a_list_of_numbers, batch_in_a_user_dict,
    records_of_samples, batch_with_attributes, images_in_a_list, table_as_long_as_the_batch,
    loss_of_one_entry, loss_summed_over_samples,
    losses_by_name, compiled_blocks, wrapped_for_several_devices, centred_over_the_batch,
    logs_in_lists,
)  # fmt: skip
