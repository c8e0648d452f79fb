"""Loss of a custom model as a module that strategies can wrap."""

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outpace.interop.custom_model.model import CustomModel, stated_vocab
from outpace.interop.user_file import failure
from outpace.nn.block import to_fp32
from outpace.nn.loss import IGNORED, LanguageModelObjective
from outpace.nn.transformer import Transformer
from outpace.records.errors import BadInputError

# dtypes that autocast does not cast; mixing them fails without autocast too
_NOT_CAST = re.compile(
    r"\b(u?int\d*|long|short|byte|char|bool|float64|double|complex\w*)\b", re.IGNORECASE
)


class NoGradientError(BadInputError):
    """Raised if a loss has no gradient. `totals` are the sum and the number of losses."""

    def __init__(self, totals: tuple[Tensor, Tensor]) -> None:
        super().__init__(
            "the loss has no gradient: it was detached, or does not depend on the module's "
            "output. Use the output in it (0 times its sum if there is nothing to learn)."
        )
        self.totals = totals


class CustomObjective(nn.Module):
    """The user's module (`.model`) with its loss, for a strategy to wrap.

    The user's loss is called as loss(module, batch). It returns (sum of losses, count), where the
    count may be a sum of weights, or the mean over the micro-batch as a scalar (or a dict or object
    with `loss`). A mean is weighted by the number of targets other than −100 if the batch has
    integer targets per token (`targets` or `labels`), otherwise by the number of samples. Without a
    loss, the module is called with the batch's tokens (and other entries that are arguments of its
    forward). It may return its own mean loss: a scalar, an object with `.loss`, or a tuple with a
    scalar, such as (logits, loss). It is weighted by the batch's targets, or by its samples if it
    has none. Or it may return logits (B, S, V), or an object with `.logits`: the loss is then the
    cross-entropy with the batch's targets, plus the router loss that a transformers model returns,
    multiplied by the model's coefficient.
    """

    def __init__(self, custom: CustomModel) -> None:
        super().__init__()
        self.model = custom.module
        self.loss = custom.loss
        self._vocab = stated_vocab(custom.module)
        self._signature = inspect.signature(custom.module.forward)

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the sum of losses (fp32 or fp64, with gradient) and their count, both scalars.

        The count is the number of losses (int64), or the sum of weights if the loss returns one.
        Raises BadInputError if the loss or the module returns none of the forms in
        `CustomObjective`, and NoGradientError if the loss has no gradient.
        """
        loss_sum, count = self._compute_loss_under_autocast(batch)
        if torch.is_grad_enabled() and not loss_sum.requires_grad:
            raise NoGradientError((loss_sum, count))
        return loss_sum, count

    def _compute_loss_under_autocast(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Compute the loss. Raises BadInputError if autocast makes an operator mix dtypes."""
        try:
            return self._compute_loss(batch)
        except RuntimeError as error:
            kind = next(self.model.parameters()).device.type
            mixed = "dtype" in str(error) and not _NOT_CAST.search(str(error))
            possible = mixed and torch.amp.is_autocast_available(kind)
            if not possible or not torch.is_autocast_enabled(kind):
                raise
            narrow = str(torch.get_autocast_dtype(kind)).removeprefix("torch.")
            raise BadInputError(
                f"the module fails in mixed precision ({narrow} by torch.autocast): "
                f"{failure(error, None)}. Use precision fp32, or disable autocast for that part "
                f'in the forward (with torch.autocast("{kind}", enabled=False)).'
            ) from error

    def _compute_loss(self, batch: Any) -> tuple[Tensor, Tensor]:
        if self.loss is None and isinstance(self.model, Transformer):
            # It returns hidden states (B, S, D), which would be mistaken for logits.
            scored: tuple[Tensor, Tensor] = LanguageModelObjective(self.model)(batch)
            return scored
        if self.loss is not None:
            given = self.loss(self.model, batch)
            if isinstance(given, tuple | list) and len(given) == 2:
                return _sum_and_count(_require_scalar(given[0], "the loss"), given[1])
            named = _get_part(given, "loss")  # returned by training steps, with numbers for a log
            mean = _require_scalar(given if named is None else named, "the loss")
            return _weight_mean(mean, _count_loss_targets(batch))
        output = self._call_module(batch)
        targets = batch.get("targets") if isinstance(batch, Mapping) else None
        logits, loss = _find_logits(output), _find_loss(output)
        if loss is not None:
            if logits is not None and _get_part(output, "loss") is None:
                self._require_forward_takes_targets(batch)
            return _weight_mean(
                _require_scalar(loss, "the module's loss"), self._count_targets(batch)
            )
        if logits is None or targets is None:
            _require_scalar(output, "the module's output")  # reports the type
        assert logits is not None and targets is not None
        self._require_logits(logits)
        loss_sum, count = _cross_entropy(logits, targets)
        extra = self._router_loss(output)
        return (loss_sum, count) if extra is None else (loss_sum + extra * count, count)

    def _require_forward_takes_targets(self, batch: Any) -> None:
        """Refuse (logits, scalar) from a forward without targets: the scalar is not the loss."""
        if not isinstance(batch, Mapping) or "tokens" not in batch:
            return  # forward used the whole batch
        names = [name for name in ("targets", "labels") if name in batch]
        if names and not any(name in self._signature.parameters for name in names):
            raise BadInputError(
                f"{type(self.model).__name__} returns a scalar next to its logits, but its "
                "forward does not get the targets, so the scalar is not the loss. Let forward "
                "take targets and return (logits, loss), or return, next to the module, a loss "
                "function loss(module, batch) that adds the scalar."
            )

    def _router_loss(self, output: Any) -> Tensor | None:
        """Return the scaled auxiliary loss of a transformers mixture of experts, or None.

        Raises BadInputError if the model does not define the coefficient.
        """
        extra = _get_part(output, "aux_loss")
        if not isinstance(extra, Tensor):
            return None
        holders = (self.model, getattr(self.model, "config", None))
        found = [getattr(holder, "router_aux_loss_coef", None) for holder in holders]
        coefficient = next((value for value in found if isinstance(value, int | float)), None)
        if coefficient is None:
            raise BadInputError(
                f"{type(self.model).__name__} returns an aux_loss without a loss, and has no "
                "router_aux_loss_coef to scale it. Return, next to the module, a loss function "
                "loss(module, batch) that adds it."
            )
        return coefficient * _require_scalar(extra, "aux_loss")

    def _count_targets(self, batch: Any) -> Tensor | int:
        """Return how many targets the module's mean loss covers."""
        if not isinstance(batch, Mapping):
            return _count_samples(batch)
        counted = batch.get("targets")
        if counted is None and isinstance(batch.get("labels"), Tensor):
            counted = batch["labels"]
            loss_function = getattr(self.model, "loss_function", None)
            if getattr(loss_function, "__name__", "") == "ForCausalLMLoss":
                counted = counted[..., 1:]  # transformers shifts them
            else:
                return _count_labels(batch, counted)
        return _count_samples(batch) if counted is None else (counted != IGNORED).sum()

    def _require_logits(self, logits: Tensor) -> None:
        """Refuse hidden states, which cross-entropy would take for logits of a small vocabulary."""
        if self._vocab is not None and logits.shape[-1] < self._vocab:
            raise BadInputError(
                f"the model returned {logits.shape[-1]} values per token, fewer than its "
                f"vocabulary of {self._vocab}, so these are not logits. Return logits (batch, "
                "sequence, vocabulary), or a loss function next to the module."
            )

    def _call_module(self, batch: Any) -> Any:
        if not isinstance(batch, Mapping) or "tokens" not in batch:
            return self._call_with_user_batch(batch)
        accepts = self._signature.parameters
        named = {k: v for k, v in batch.items() if k in accepts and k != "tokens"}
        if "input_ids" in accepts:
            return self.model(input_ids=batch["tokens"], **named)
        return self.model(batch["tokens"], **named)

    def _call_with_user_batch(self, batch: Any) -> Any:
        """Call the module with the user's batch, unpacked if forward accepts its entries."""
        if isinstance(batch, Mapping) and self._forward_accepts(**batch):
            return self.model(**batch)
        if isinstance(batch, list | tuple) and self._forward_accepts(*batch):
            return self.model(*batch)
        if isinstance(batch, Tensor):
            return self.model(batch)
        return self._call_with_whole_batch(batch)

    def _call_with_whole_batch(self, batch: Any) -> Any:
        parts = ", ".join(map(str, batch)) if isinstance(batch, Mapping) else len(batch)
        try:
            return self.model(batch)
        except Exception as error:
            raise BadInputError(
                f"forward{self._signature} cannot take a batch of the data set, a "
                f"{type(batch).__name__} of {parts}: {error}. Return a loss function loss(module, "
                "batch) next to the module."
            ) from error

    def _forward_accepts(self, *arguments: Any, **keywords: Any) -> bool:
        try:
            self._signature.bind(*arguments, **keywords)
        except TypeError:
            return False
        return True


def _count_loss_targets(batch: Any) -> Tensor | int:
    """Return the number of targets over which a user's loss averages, or else of samples.

    Targets of −100 do not count, because torch's losses skip them.
    """
    for name in ("targets", "labels"):
        found = batch.get(name) if isinstance(batch, Mapping) else None
        if isinstance(found, Tensor) and found.dim() > 1 and not found.is_floating_point():
            return _count_labels(batch, found)
    return _count_samples(batch)


def _count_labels(batch: Mapping[str, Any], labels: Tensor) -> Tensor:
    """Return how many labels a model predicts, among those that do not mark ignored positions.

    If the labels equal the batch's tokens, the model shifts them by one, so it does not predict the
    first label.
    """
    there = labels != IGNORED
    for name in ("input_ids", "tokens"):
        tokens = batch.get(name)
        if isinstance(tokens, Tensor) and labels.dim() > 1 and tokens.shape == labels.shape:
            repeat = (~there | (labels == tokens)).all()  # no bool(), which would wait for a GPU
            return torch.where(repeat, there[..., 1:].sum(), there.sum())
    return there.sum()


def _weight_mean(mean: Tensor, count: Tensor | int) -> tuple[Tensor, Tensor]:
    """Return (mean · count, count). If the count is 0, the sum is 0 even if the mean is NaN."""
    if isinstance(count, Tensor):
        return _sum_and_count(torch.where(count > 0, mean * count, torch.zeros_like(mean)), count)
    return _sum_and_count(mean * count, count)


def _get_part(output: Any, name: str) -> Any:
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


def _find_loss(output: Any) -> Tensor | None:
    """Find the loss in a module's output: `.loss`, the output itself, or a scalar in a tuple.

    Only the first two entries of a tuple count: transformers returns (loss, logits, …), and nanoGPT
    (logits, loss).
    """
    loss = _get_part(output, "loss")
    if loss is not None:
        found: Tensor = loss
        return found
    parts = output[:2] if isinstance(output, tuple | list) else [output]
    scalars = [part for part in parts if isinstance(part, Tensor) and part.numel() == 1]
    return next((part for part in scalars if part.is_floating_point()), None)


def _find_logits(output: Any) -> Tensor | None:
    """Find the logits (B, S, V) in a module's output: `.logits`, the output itself, or in a tuple.

    Only the first two entries of a tuple count.
    """
    found = _get_part(output, "logits")
    parts = output[:2] if isinstance(output, tuple | list) else [output]
    candidates = [*parts] if found is None else [found]
    for part in candidates:
        if isinstance(part, Tensor) and part.numel() != 1:
            return part if part.dim() == 3 else None
    return None


def _cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    if logits.shape[:2] != targets.shape:
        raise BadInputError(
            f"the model returned logits of shape {tuple(logits.shape)} for targets of shape "
            f"{tuple(targets.shape)}; they must be (batch, sequence, vocabulary)"
        )
    flat = targets.flatten()
    total = F.cross_entropy(
        to_fp32(logits.flatten(0, 1)), flat, ignore_index=IGNORED, reduction="sum"
    )
    return total, (flat != IGNORED).sum()


def _require_scalar(value: Any, what: str) -> Tensor:
    if isinstance(value, Tensor) and value.numel() == 1:
        # Avoid views, such as those that reshape returns, because FSDP warns about them.
        is_plain = value.dim() == 0 and not value._is_view()
        return to_fp32(value if is_plain else value.sum())
    if value is None and what == "the loss":
        raise BadInputError(
            "the loss is None; it must be a scalar tensor. If there is nothing to learn from a "
            "batch (or from a rank's part of it), return 0 times the sum of the module's output."
        )
    seen = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else None
    others = (
        ", or have .loss or ['loss']. Add up several losses."
        if what == "the loss"
        else ", logits (batch, sequence, vocabulary) for a batch with targets, or have .loss or "
        ".logits. Return a loss function next to the module."
    )
    raise BadInputError(
        f"{what} is {seen or 'a ' + type(value).__name__}; it must be a scalar tensor{others}"
    )


def _sum_and_count(total: Tensor, count: Any) -> tuple[Tensor, Tensor]:
    """Return the sum of losses in fp32, and their count, which weights can make fractional."""
    if not isinstance(count, Tensor | int | float) or (
        isinstance(count, Tensor) and count.numel() != 1
    ):
        raise BadInputError(
            f"the loss returned a {type(count).__name__} as the count; in (sum of losses, count), "
            "the count is the number of summed losses, such as (targets != -100).sum(). If the "
            "second value is only for a log, return the loss alone"
        )
    total = to_fp32(total)
    number = torch.as_tensor(count, device=total.device).detach().reshape(())
    return total, number.to(total.dtype if number.is_floating_point() else torch.int64)


def _count_samples(batch: Any) -> int:
    """Return the number of samples: the first dimension of the first non-scalar tensor, or 1."""
    tensors = list(_iterate_tensors(batch))
    if tensors:
        return next((tensor.size(0) for tensor in tensors if tensor.dim()), 1)
    raise BadInputError(f"a batch of the data set contains no tensor: {type(batch).__name__}")


def _iterate_tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _iterate_tensors(value)
    elif isinstance(batch, Sequence) and not isinstance(batch, str):
        for value in batch:
            yield from _iterate_tensors(value)
    elif is_dataclass(batch):
        for field in fields(batch):
            yield from _iterate_tensors(getattr(batch, field.name))
