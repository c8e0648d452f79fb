"""Check that the same values are split by samples in every batch."""

from typing import Any

from torch import Tensor

from outpace.parallel.batches import cut, splits_by_place
from outpace.parallel.layout import Batch
from outpace.records.errors import BadInputError


class SampleRows:
    """A record of which tensors, arrays and lists in batches are split by samples.

    A tensor is split if it has as many rows as there are samples. A tensor whose rows are not
    samples (boxes of all images, a table) may by chance have as many rows in some batches, and
    would be split in these but not in others.
    """

    def __init__(self) -> None:
        self._known: dict[Any, bool] = {}

    def cut(self, batch: Batch, parts: int) -> list[Batch]:
        """Split a batch by `batches.cut`, after a check by `require_same`.

        Raises BadInputError in the same cases as these two.
        """
        if parts > 1:
            self.require_same(batch)
        return cut(batch, parts)

    def require_same(self, batch: Batch) -> None:
        """Raise BadInputError if a value is split but was not split before, or the reverse."""
        samples, values = splits_by_place(batch)
        if samples < 2:  # any value with one row counts as split
            return
        for place, (value, splits) in values.items():
            if self._known.setdefault(place, splits) == splits:
                continue
            now, before = ("", "not ") if splits else ("no longer ", "")
            if isinstance(value, list | tuple):
                kind = next(type(one).__name__ for one in value if one is not None)
                what, cure = f"a {type(value).__name__} of {len(value)} {kind}s", _CURE_OF_LISTS
            else:
                kind = "a tensor" if isinstance(value, Tensor) else "an array"
                what, cure = f"{kind} of shape {tuple(value.shape)}", _CURE_OF_TENSORS
            raise BadInputError(
                f"{what} in a batch of {samples} samples is {now}split by samples, but in an "
                f"earlier batch it was {before}split. {cure}"
            )


_CURE_OF_TENSORS = (
    "A tensor or array is split if it has as many rows as there are samples, here by chance. Give "
    "a table a first dimension of 1 (table[None]); for boxes or nodes of all samples, pass a list "
    "with one tensor per sample, or pad them into one tensor and add masks."
)
_CURE_OF_LISTS = (
    "A list or tuple is split if it has as many entries as there are samples, and all of one type "
    "(tensors: of one dtype and of one shape except for the first dimension, and not all with a "
    "row per sample). If its entries are not samples, pass dict(enumerate(entries)). If they are, "
    "pad or stack tensors into one, and give other entries one type."
)
