"""Two shallow models say what a deep one does: synthetic courses of memory, compared one by one."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.trace.depth_extrapolation import Entry, IrregularError, PartTrace, extend, unroll

SIZES = st.sampled_from([4, 64, 256, 4096])
OPERATORS = st.sampled_from(["aten.mm", "aten.add", "aten.gelu"])


def entry(nbytes, operator, block=-1, kind="temporary"):
    module = "" if block < 0 else "blocks.*"
    return Entry(nbytes, kind, operator, module, module, block)


def strip(entries, part="forward"):
    return PartTrace(1, part, tuple(entries), (), 1, len(entries), 0)


@st.composite
def pieces(draw):
    """What is allocated (and mostly freed again) by one layer, and before and after the layers."""

    def changes(least):
        made = draw(st.lists(st.tuples(SIZES, OPERATORS), min_size=least, max_size=6))
        freed = draw(st.integers(0, len(made)))
        return [*made, *((-size, operator) for size, operator in made[:freed])]

    return changes(0), changes(1), changes(0)


def of_depth(before, layer, after, depth, part):
    layers = range(depth) if part == "forward" else reversed(range(depth))
    return strip(
        [
            *(entry(*change) for change in before),
            *(entry(*change, block=number) for number in layers for change in layer),
            *(entry(*change) for change in after),
        ],
        part,
    )


@settings(deadline=None, max_examples=60)
@given(pieces(), st.integers(6, 12), st.sampled_from(["forward", "backward"]))
def test_the_extended_course_is_the_deep_ones(parts, depth, part):
    shallow, deeper, deep = (of_depth(*parts, d, part) for d in (4, 5, depth))
    (extended,) = extend([shallow], [deeper], depth - 5)
    found, expected = unroll([extended]), unroll([deep])
    assert np.array_equal(found.nbytes, expected.nbytes)
    assert np.array_equal(found.live_bytes, expected.live_bytes)


def lists_of_all_layers(depth):
    """An optimizer's: all layers' matrices, all their vectors, and one tensor of all norms."""
    return strip(
        [
            *(entry(size, "aten.zeros", n, "optimizer state") for n in range(depth)
              for size in (4096, 8192)),
            *(entry(64, "aten.zeros", n, "optimizer state") for n in range(depth)),
            entry(4 * 3 * depth, "aten.stack"),
            entry(-4 * 3 * depth, "aten.norm"),
            *(entry(-4, "aten.norm") for _ in range(depth)),
        ],
        "optimizer",
    )  # fmt: skip


def test_lists_over_all_layers_grow_where_they_are():
    shallow, deeper, deep = (lists_of_all_layers(depth) for depth in (4, 5, 11))
    (extended,) = extend([shallow], [deeper], 6)
    assert np.array_equal(unroll([extended]).nbytes, unroll([deep]).nbytes)


def test_what_does_not_repeat_is_not_extended():
    shallow, deeper = lists_of_all_layers(4), lists_of_all_layers(5)
    other = strip([e for e in deeper.entries if e.operator != "aten.stack"], "optimizer")
    with pytest.raises(IrregularError):
        extend([shallow], [other], 6)
    with pytest.raises(IrregularError):
        extend([shallow], [strip(deeper.entries, "backward")], 6)
