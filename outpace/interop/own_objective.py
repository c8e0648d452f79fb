"""The loss of a person's own model, in the form that strategies wrap."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outpace.interop.own_model import OwnModel, stated_vocab
from outpace.nn.block import raised
from outpace.nn.loss import IGNORED, LanguageModelObjective
from outpace.nn.transformer import Transformer
from outpace.records.errors import BadInputError


class OwnObjective(nn.Module):
    """A person's module with its loss: what a strategy wraps. The module is `.model`.

    A loss of theirs is called as loss(module, batch) and returns (sum of losses, count), or one
    scalar: the mean over the micro-batch, weighed by its targets that are not −100 where it has
    whole numbers of them for each token (`targets`, or `labels`), else by its samples. Without
    one the module is given the batch's tokens (and whichever other entries of the batch its
    forward names) and may return
    - logits (B, S, V), or something with `.logits`: cross-entropy with the batch's targets;
    - a scalar, or something with `.loss`: the mean over the batch's targets (its samples, where
      it has none).
    """

    def __init__(self, own: OwnModel) -> None:
        super().__init__()
        self.model = own.module
        self.loss = own.loss
        self._vocab = stated_vocab(own.module)
        self._signature = inspect.signature(own.module.forward)

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Sum of the losses (fp32 or fp64, with gradient) and their number (int64), both scalars.

        Raises BadInputError where what the loss or the module returns is none of the above.
        """
        loss_sum, count = self._score(batch)
        if torch.is_grad_enabled() and not loss_sum.requires_grad:
            raise BadInputError(
                "the loss has no gradient: it was detached, or made without the module's output"
            )
        return loss_sum, count

    def _score(self, batch: Any) -> tuple[Tensor, Tensor]:
        if self.loss is None and isinstance(self.model, Transformer):
            # It returns hidden states (B, S, D), which would pass for logits.
            scored: tuple[Tensor, Tensor] = LanguageModelObjective(self.model)(batch)
            return scored
        if self.loss is not None:
            given = self.loss(self.model, batch)
            if isinstance(given, tuple) and len(given) == 2:
                return _pair(_scalar(given[0], "the loss"), given[1])
            mean = _scalar(given, "the loss")
            return _weighed(mean, _mean_over(batch))
        output = self._call(batch)
        targets = batch.get("targets") if isinstance(batch, Mapping) else None
        logits = _logits(output)
        if logits is not None and targets is not None:
            self._check_width(logits)
            return _cross_entropy(logits, targets)
        loss = _part(output, "loss")
        mean = _scalar(output if loss is None else loss, "the module's output")
        count = self._targets(batch)
        return _pair(mean * count, count)

    def _targets(self, batch: Any) -> Tensor | int:
        """How many targets the module's own mean is over."""
        if not isinstance(batch, Mapping):
            return _samples(batch)
        counted = batch.get("targets")
        if counted is None and isinstance(batch.get("labels"), Tensor):
            counted = batch["labels"]
            loss_function = getattr(self.model, "loss_function", None)
            if getattr(loss_function, "__name__", "") == "ForCausalLMLoss":
                counted = counted[..., 1:]  # transformers shifts them: nothing predicts the first
        return _samples(batch) if counted is None else (counted != IGNORED).sum()

    def _check_width(self, logits: Tensor) -> None:
        """Refuse hidden states: cross-entropy would take them for scores of a few tokens."""
        if self._vocab is not None and logits.shape[-1] < self._vocab:
            raise BadInputError(
                f"the model returned {logits.shape[-1]} values per token, fewer than its "
                f"vocabulary of {self._vocab}, so these are no logits. Return logits (batch, "
                "sequence, vocabulary), or a loss function beside the module."
            )

    def _call(self, batch: Any) -> Any:
        """Give the module the batch in the way its forward takes it."""
        if not isinstance(batch, Mapping) or "tokens" not in batch:
            return self._call_with_own(batch)
        accepts = self._signature.parameters
        named = {k: v for k, v in batch.items() if k in accepts and k != "tokens"}
        if "input_ids" in accepts:
            return self.model(input_ids=batch["tokens"], **named)
        return self.model(batch["tokens"], **named)

    def _call_with_own(self, batch: Any) -> Any:
        """A batch of a person's own data: by its names or its order if forward takes it so."""
        if isinstance(batch, Mapping) and self._takes(**batch):
            return self.model(**batch)
        if isinstance(batch, list | tuple) and self._takes(*batch):
            return self.model(*batch)
        if isinstance(batch, Tensor):
            return self.model(batch)
        return self._call_whole(batch)

    def _call_whole(self, batch: Any) -> Any:
        """Give the batch as it is, as its parts are not what forward names."""
        parts = ", ".join(map(str, batch)) if isinstance(batch, Mapping) else len(batch)
        try:
            return self.model(batch)
        except Exception as error:
            raise BadInputError(
                f"forward{self._signature} cannot take a batch of the data set, a "
                f"{type(batch).__name__} of {parts}: {error}. Return a loss function "
                "loss(module, batch) beside the module."
            ) from error

    def _takes(self, *arguments: Any, **keywords: Any) -> bool:
        try:
            self._signature.bind(*arguments, **keywords)
        except TypeError:
            return False
        return True


def _mean_over(batch: Any) -> Tensor | int:
    """What a user's mean over a micro-batch is a mean of: its targets, else its samples.

    torch's own losses leave out −100, so that the mean of a batch with fewer targets is of fewer.
    """
    for name in ("targets", "labels"):
        found = batch.get(name) if isinstance(batch, Mapping) else None
        if isinstance(found, Tensor) and found.dim() > 1 and not found.is_floating_point():
            return (found != IGNORED).sum()
    return _samples(batch)


def _weighed(mean: Tensor, count: Tensor | int) -> tuple[Tensor, Tensor]:
    """A mean times what it is over; nothing of nothing, though its mean is NaN."""
    if isinstance(count, Tensor):
        return _pair(torch.where(count > 0, mean * count, torch.zeros_like(mean)), count)
    return _pair(mean * count, count)


def _part(output: Any, name: str) -> Any:
    """An attribute or an entry of what a module returned."""
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


def _logits(output: Any) -> Tensor | None:
    """Scores (B, S, V) in what a module returned; the first of a tuple."""
    found = _part(output, "logits")
    if found is None:
        found = output[0] if isinstance(output, tuple) and output else output
    return found if isinstance(found, Tensor) and found.dim() == 3 else None


def _cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    if logits.shape[:2] != targets.shape:
        raise BadInputError(
            f"the model returned logits of shape {tuple(logits.shape)} for targets of shape "
            f"{tuple(targets.shape)}; they have to be (batch, sequence, vocabulary)"
        )
    flat = targets.flatten()
    total = F.cross_entropy(
        raised(logits.flatten(0, 1)), flat, ignore_index=IGNORED, reduction="sum"
    )
    return total, (flat != IGNORED).sum()


def _scalar(value: Any, what: str) -> Tensor:
    if isinstance(value, Tensor) and value.numel() == 1:
        return raised(value).reshape(())
    seen = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else None
    raise BadInputError(
        f"{what} is {seen or 'a ' + type(value).__name__}; it has to be a scalar tensor"
        + ("" if what == "the loss" else ", logits (batch, sequence, vocabulary) for a batch with "
           "targets, or have .loss or .logits. Return a loss function beside the module.")
    )  # fmt: skip


def _pair(total: Tensor, count: Any) -> tuple[Tensor, Tensor]:
    number = torch.as_tensor(count, device=total.device)
    return raised(total), number.to(torch.int64).reshape(())


def _samples(batch: Any) -> int:
    """The length of the first tensor found in a batch."""
    for tensor in _tensors(batch):
        return int(tensor.shape[0]) if tensor.dim() else 1
    raise BadInputError(f"a batch of the data set has no tensor in it: {type(batch).__name__}")


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, Sequence) and not isinstance(batch, str):
        for value in batch:
            yield from _tensors(value)
