"""zero1: the optimizer's state lies on one rank each, and any strategy finds it again."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.gloo

RANKS = Path(__file__).with_name("states_ranks.py")


def all_right(said):
    return all(apart < 1e-9 for one in said for apart in one["worst"].values())


def test_each_rank_keeps_its_part_of_the_state_and_one_process_finds_all(tmp_path, on_ranks):
    parts = on_ranks(4, RANKS, "save", "zero1", tmp_path)
    (whole,) = on_ranks(1, RANKS, "load", "single", tmp_path)
    assert all_right([*parts, whole])
    held = [part["state_bytes"] for part in parts]
    assert sum(held) == whole["state_bytes"]
    assert max(held) < 1.05 * whole["state_bytes"] / 4


@pytest.mark.slow
def test_replicas_keep_all_of_the_state_and_zero1_shares_it(tmp_path, on_ranks):
    alike = on_ranks(2, RANKS, "save", "ddp", tmp_path)
    parts = on_ranks(4, RANKS, "load", "zero1", tmp_path)
    assert all_right([*alike, *parts])
    assert alike[0]["state_bytes"] == alike[1]["state_bytes"]
    assert sum(part["state_bytes"] for part in parts) == alike[0]["state_bytes"]


def test_a_rank_may_have_no_parameter_to_step(tmp_path, on_ranks):
    said = on_ranks(3, RANKS, "few", "zero1", tmp_path)
    assert [one["held"] for one in said] == [1, 1, 0]
    assert all(one["same"] for one in said)
