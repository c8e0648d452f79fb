from dataclasses import dataclass
from pathlib import Path

import numpy as np
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


def vectors(samples, rows=lambda number: number + 2):
    return [torch.ones(rows(number), 4) for number in range(samples)]


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        (list("abcd"), list("abcd"), "a list of 4 strs in a batch of 4 samples is split"),
        (tuple("abcd"), tuple("abcd"), "a tuple of 4 strs in a batch of 4 samples is split"),
        (vectors(4), vectors(4), "a list of 4 Tensors in a batch of 4 samples is split"),
        (vectors(8), vectors(4, lambda _: 4), "no longer split.*not all with a row per sample"),
        (list("abcdefgh"), ["a", 1, "c", "d"], "no longer split.*all of one type"),
        (vectors(8), vectors(5), "a list of 5 Tensors in a batch of 4 samples is no longer"),
        (np.ones((4, 2)), np.ones((4, 2)), r"an array of shape \(4, 2\) .*is split by samples"),
        ([np.ones(8)], [np.ones(9)], r"array of shape \(9,\) .*is no longer split"),
    ],
)
def test_lists_and_arrays_with_an_entry_per_sample_by_chance_are_refused(before, now, told):
    """Names of classes were cut to those of half of the classes, silently."""
    rows = SampleRows()
    rows.require_same({"x": torch.ones(8, 2), "names": before})
    with pytest.raises(BadInputError, match=told):
        rows.require_same({"x": torch.ones(4, 2), "names": now})


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (torch.ones(8), torch.ones(1)),  # broadcast
        (list("abcdefgh"), [None] * 4),
        (list("abcdefgh"), ["a", None, "c", "d"]),
        (vectors(8), vectors(4)),
        ([8, 4], [4, 4, 4, 4]),
        (dict(enumerate("abcd")), dict(enumerate("abcd"))),
        ([torch.ones(8), torch.ones(8)], [torch.ones(4), torch.ones(4)]),
        ([torch.ones(8), ["a"] * 8], [torch.ones(4), ["a"] * 4]),
    ],
)
def test_values_that_are_split_alike_are_not_refused(before, now):
    rows = SampleRows()
    rows.require_same({"x": torch.ones(8, 2), "names": before})
    rows.require_same({"x": torch.ones(4, 2), "names": now})
    rows.require_same({"x": torch.ones(8, 2), "names": before})


def test_batches_of_other_forms_are_not_compared():
    """Such as those of several tasks in turn."""
    rows = SampleRows()
    for _ in range(2):
        rows.require_same({"x": torch.ones(8, 2), "labels": list("abcd")})
        rows.require_same({"x": torch.ones(4, 2), "labels": list("abcd"), "boxes": torch.ones(7)})


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


@pytest.mark.gloo
@pytest.mark.parametrize("call", ["forward_backward", "evaluate"])
def test_a_table_as_long_as_a_pass_of_a_pipeline_is_refused(on_ranks, call):
    """It is whole in the batch, and the pipeline would split it in each pass."""
    told = on_ranks(2, Path(__file__).with_name("sample_rows_ranks.py"), call)
    assert "shape (4,) in a batch of 4 samples is split by samples" in told
