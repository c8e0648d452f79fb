"""Products of axes on real processes, equal to one process; and which axes a person gets."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.records.axes import fill_axes
from outpace.records.errors import BadInputError
from outpace.records.plan import AXES, Plan

MICRO = {"micro_batch": 1, "precision": "fp64"}


@pytest.mark.gloo
@pytest.mark.parametrize(
    "axes",
    [
        {"pp": 2, "tp": 2, "pp_microbatches": 4},
        pytest.param(
            {"pp": 2, "dp_shard": 2, "tp": 2, "pp_microbatches": 4}, marks=pytest.mark.slow
        ),
        pytest.param(
            {"dp_replicate": 2, "cp": 2, "tp": 2, "micro_batch": 4}, marks=pytest.mark.slow
        ),
    ],
    ids=["pp-tp", "pp-dp_shard-tp", "dp_replicate-cp-tp"],
)
def test_products_of_two_equal_one_process(tmp_path, axes, on_ranks):
    (tmp_path / "plan.json").write_text(json.dumps({"strategy": "3d", **MICRO, **axes}))
    sizes = [axes[axis] for axis in AXES if axis in axes]
    said = on_ranks(
        math.prod(sizes), "outpace", "verify", "--json", f"--plan={tmp_path / 'plan.json'}"
    )
    (verdict,) = said["verdicts"]
    assert verdict["passed"] and verdict["strategy"] == "3d"
    assert verdict["mesh"].count("2") == len(sizes)


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("nproc", [4, 8])
def test_every_choice_of_axes_equals_one_process(nproc, on_ranks):
    verdicts = on_ranks(nproc, "outpace", "verify", "--json", "--strategy=3d")["verdicts"]
    assert len(verdicts) == math.comb(5, nproc.bit_length() - 1)
    assert all(verdict["passed"] for verdict in verdicts)


@pytest.mark.gloo
@pytest.mark.slow
def test_stages_that_go_round_the_ranks_can_be_sharded(tmp_path, on_ranks):
    plan = {"strategy": "3d", "pp": 2, "dp_shard": 2, "pp_schedule": "interleaved",
            "pp_microbatches": 4, **MICRO}  # fmt: skip
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    said = on_ranks(4, "outpace", "verify", "--json", f"--plan={tmp_path / 'plan.json'}")
    (verdict,) = said["verdicts"]
    assert verdict["passed"]


@pytest.mark.parametrize(
    ("world", "asked", "sizes"),
    [
        (2, {}, {"pp": 2}),
        (4, {}, {"pp": 2, "tp": 2}),
        (8, {}, {"pp": 2, "tp": 2, "dp_shard": 2}),
        (24, {}, {"pp": 2, "tp": 2, "dp_shard": 6}),
        (8, {"cp": 2}, {"cp": 2, "dp_shard": 4}),
        (8, {"dp_replicate": -1, "tp": 4}, {"dp_replicate": 2, "tp": 4}),
    ],
)
def test_axes_that_are_not_given_are_chosen(world, asked, sizes):
    filled = fill_axes("3d", world, asked)
    assert {axis: size for axis, size in filled.items() if size > 1} == sizes


@given(st.fixed_dictionaries({}, optional={axis: st.integers(1, 4) for axis in AXES}))
def test_axes_make_up_the_world_or_are_refused(asked):
    try:
        filled = fill_axes("3d", 24, asked)
    except BadInputError as refused:
        assert "but there are 24. Start" in str(refused)
        return
    assert math.prod(filled.values()) == 24
    assert all(filled[axis] == size for axis, size in asked.items())


def test_a_strategy_of_one_axis_names_the_one_that_splits_any():
    with pytest.raises(BadInputError, match=r"dp_replicate is 2.*strategy 3d"):
        Plan.parse({"strategy": "gpipe", "pp": 2, "dp_replicate": 2}, "test")
