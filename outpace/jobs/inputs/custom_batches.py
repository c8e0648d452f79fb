"""Batches for a custom model: samples of its data set, or tokens."""

import math
from collections.abc import Callable
from typing import Any

from outpace.records.errors import BadInputError

_TRIAL_TOKENS, _TRIAL_SAMPLES = 16, 8  # size of a batch for verifying strategies


def batch_of(model: Any, samples: int, seq_len: int | None) -> Any:
    """Return a batch from the model's data set, or else samples of `seq_len` zero tokens."""
    import torch

    if model.dataset is not None:
        return _collate_samples(model.dataset, 0, samples)
    _require_vocab_size(model.module)
    assert seq_len is not None
    tokens = torch.zeros((samples, seq_len), dtype=torch.int64)
    return {"tokens": tokens, "targets": tokens}


def _collate_samples(dataset: Any, first: int, count: int) -> Any:
    """Return `count` samples of a data set as a batch, wrapping around at its end."""
    from outpace.data.loader import collate

    if not len(dataset):
        raise BadInputError("the model's data set is empty, so there is nothing to run it on")
    keys = [index % len(dataset) for index in range(first, first + count)]
    if hasattr(dataset, "__getitems__"):
        return collate(dataset.__getitems__(keys))
    return collate([dataset[key] for key in keys])


def _require_vocab_size(module: Any) -> int:
    from outpace.interop.custom_model import read_vocab

    vocab = read_vocab(module)
    if vocab is None:
        raise BadInputError(
            f"a {type(module).__name__} has no token embedding, and its function returned no "
            "data set, so there is no input for it. Return (module, loss, dataset)"
        )
    return vocab


def trial_batches(model: Any, ranks: int, multiple: int = 1) -> Callable[[int], Any]:
    """Return a function that maps a step, counted from 1, to a small global batch.

    The batch's number of samples is a multiple of both `ranks` and `multiple`. Samples come from
    the model's data set. Without one, they are random tokens, and the targets after a random length
    are ignored by the loss.
    """
    import torch

    from outpace.interop.custom_model import read_positions
    from outpace.nn.loss import IGNORED

    samples = max(_TRIAL_SAMPLES, 4 * ranks)
    samples += -samples % math.lcm(ranks, multiple)
    if model.dataset is not None:
        return lambda step: _collate_samples(model.dataset, (step - 1) * samples, samples)
    vocab = _require_vocab_size(model.module)
    length = min(_TRIAL_TOKENS, read_positions(model.module) or _TRIAL_TOKENS)

    def random_tokens(step: int) -> Any:
        drawn = torch.Generator().manual_seed(step)
        ids = torch.randint(vocab, (samples, length + 1), generator=drawn)
        lengths = torch.randint(2, length + 1, (samples, 1), generator=drawn)
        padded = torch.arange(length) >= lengths
        targets = ids[:, 1:].masked_fill(padded, IGNORED)
        return {"tokens": ids[:, :-1].contiguous(), "targets": targets}

    return random_tokens
