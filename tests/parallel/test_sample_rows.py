from dataclasses import dataclass

import pytest
import torch

import outpace
from outpace.parallel.batches import cut
from outpace.parallel.sample_rows import SampleRows
from outpace.records.errors import BadInputError
from outpace.records.plan import Plan


def batch(samples, boxes, table=3):
    return {"x": torch.ones(samples, 2), "boxes": torch.ones(boxes, 4), "t": torch.ones(table)}


def test_tensors_that_have_a_row_per_sample_by_chance_are_refused():
    rows = SampleRows()
    rows.require_same(batch(8, 8))
    rows.require_same(batch(4, 4))
    rows.require_same(batch(1, 5, table=1))
    with pytest.raises(BadInputError, match=r"shape \(11, 4\) in a batch of 8 .*no longer split"):
        rows.require_same(batch(8, 11))
    with pytest.raises(BadInputError, match=r"shape \(8,\) .* it was not split.*table.None."):
        rows.require_same(batch(8, 8, table=8))


@dataclass
class Scene:
    x: torch.Tensor
    names: list[str]
    boxes: list[torch.Tensor]


def test_parts_with_lists_of_samples_are_as_their_batch():
    rows = SampleRows()
    whole = Scene(torch.ones(8, 2), list("abcdefgh"), [torch.ones(n + 1, 4) for n in range(8)])
    for given in (whole, *cut(whole, 2)):
        rows.require_same(given)


def test_a_loop_with_as_many_boxes_as_images_by_chance_ends():
    """Each part had the boxes of other images, silently."""
    plan = Plan(strategy="single", micro_batch=4)

    def loss(module, given):
        return module(given["x"]).square().mean() + given["boxes"].mean()

    model = outpace.parallelize(torch.nn.Linear(2, 1), plan, loss=loss, check="off")
    model.forward_backward(batch(8, 8))
    with pytest.raises(BadInputError, match=r"shape .11, 4. in a batch of 8 samples"):
        model.forward_backward(batch(8, 11))


def test_a_table_as_long_as_a_ranks_share_is_refused():
    """It is whole in the global batch."""
    plan = Plan(strategy="single", micro_batch=2)
    model = outpace.parallelize(torch.nn.Linear(2, 1), plan, loss=lambda m, b: m(b["x"]).mean())
    model._rows.require_same(batch(8, 5, table=4))
    with pytest.raises(BadInputError, match=r"shape .4,. in a batch of 4 samples"):
        model.forward_backward(batch(4, 5, table=4))
