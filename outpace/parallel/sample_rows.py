"""Tensors of a batch that have a row for each sample, the same ones in every batch."""

from outpace.parallel.batches import tensors_by_place
from outpace.parallel.layout import Batch
from outpace.records.errors import BadInputError


class SampleRows:
    """The tensors of batches that are split by samples.

    A tensor is, if it has as many rows as there are samples. If the number is equal by chance in
    some batches (boxes of all images, a table), it is split in these and whole in others.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], bool] = {}

    def require_same(self, batch: Batch) -> None:
        """Raise BadInputError if a tensor is split in this batch and not in an earlier one."""
        samples, tensors = tensors_by_place(batch)
        if samples < 2:  # a table of one row may be split or not
            return
        for place, tensor in tensors.items():
            rows = tensor.size(0)
            splits = rows == samples
            if self._known.setdefault(place, splits) == splits:
                continue
            now, before = ("", "not ") if splits else ("no longer ", "")
            raise BadInputError(
                f"a tensor of shape {tuple(tensor.shape)} in a batch of {samples} samples is {now}"
                f"split by samples, but in an earlier batch it was {before}split. A tensor is "
                "split if it has as many rows as there are samples, here by chance. Give a table a "
                "first dimension of 1 (table[None]); for boxes or nodes of all samples, pass a "
                "list with one tensor per sample, or pad them into one tensor and add masks."
            )
