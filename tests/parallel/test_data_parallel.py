"""Custom modules with a trap each, under strategies that reduce gradients over ranks."""

import re
import shutil
from pathlib import Path

import pytest

RANKS = Path(__file__).with_name("data_parallel_ranks.py")
KINDS = {"loss", "gradient", "norm", "state", "evaluation"}


def cases(names, strategies, *options):
    return [":".join((n, s, *options)) for n in names.split() for s in strategies.split()]


def assert_equal(found):
    for case, worst in found.items():
        assert set(worst) == KINDS, (case, worst)
        assert max(worst.values()) < 2e-6, (case, worst)


@pytest.mark.gloo
def test_parameters_that_a_rank_does_not_use_equal_one_process(on_ranks):
    """Zeros where a rank has no gradient; none at all, also in Adam's eyes, where no rank has."""
    named = "experts_without_tokens pooler_never_used"
    chosen = cases(named, "ddp zero1 zero2 zero3")
    chosen += cases("experts_without_tokens", "ddp zero3", "accumulate")
    chosen += cases("experts_with_their_own_loss", "zero3")
    assert_equal(on_ranks(2, RANKS, *chosen))


@pytest.mark.gloo
def test_units_that_a_rank_does_not_call_equal_one_process(on_ranks):
    """They are gathered and scattered in one order on all ranks, whatever each of them calls."""
    named = (
        "layers_dropped_by_rank branches_on_raw_inputs blocks_called_several_times "
        "frozen_beside_trained"
    )
    chosen = cases(named, "zero2 zero3")
    chosen += cases("layers_dropped_by_rank", "ddp zero3", "accumulate")
    chosen += cases("layers_dropped_by_rank", "zero3", "checkpointing")
    assert_equal(on_ranks(2, RANKS, *chosen))


@pytest.mark.gloo
def test_parameters_that_cannot_be_split_equal_one_process(on_ranks):
    """Without a dimension, of another dtype, shared by blocks, or made anew in each forward."""
    named = (
        "parameters_without_dimension complex_and_float64_parameters old_weight_norm "
        "parametrized_weight_norm tied_across_blocks one_block_repeated parameters_not_contiguous"
    )
    chosen = [*cases(named, "zero3"), *cases("complex_and_float64_parameters", "ddp zero1 zero2")]
    chosen += cases("complex_and_float64_parameters tied_across_blocks", "zero3", "accumulate")
    assert_equal(on_ranks(2, RANKS, *chosen))


@pytest.mark.gloo
def test_a_loss_goes_through_whole_parameters(on_ranks):
    chosen = cases("penalty_of_parameters", "ddp zero2 zero3")
    chosen += cases("penalty_of_parameters", "zero3", "accumulate")
    assert_equal(on_ranks(2, RANKS, *chosen))


@pytest.mark.gloo
def test_groups_of_replicas_keep_the_order_of_all_ranks(on_ranks):
    assert_equal(
        on_ranks(4, RANKS, *cases("layers_dropped_by_rank experts_without_tokens", "hsdp"))
    )


@pytest.mark.gloo
def test_buffers_are_those_of_rank_0_in_every_strategy(on_ranks):
    """Each step begins with them, as does an evaluation; recomputing moves none twice."""
    named = "running_averages_in_the_forward buffers_moved_without_a_version"
    chosen = [*cases(named, "ddp ring zero1 zero2 zero3"), *cases(named, "zero3", "checkpointing")]
    chosen += cases("buffer_counts_calls", "ddp zero3", "checkpointing")
    assert_equal(on_ranks(2, RANKS, *chosen))


@pytest.mark.gloo
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_runs_with_running_buffers_resume_bit_for_bit(strategy, on_ranks, tmp_path, monkeypatch):
    monkeypatch.setenv("ZOO_ENTRY", "running_averages_in_the_forward")
    monkeypatch.setenv("PYTHONPATH", str(RANKS.parent), prepend=":")
    words = [
        "--model", f"{RANKS.parent / 'zoo' / 'data_parallel_build.py'}:build", "--steps", 4,
        "--strategy", strategy, "--global-batch", 8, "--lr", 0.01, "--save-every", 2, "--json",
        "--eval-batches", 1, "--precision", "fp32", "--device", "cpu", "--out", tmp_path / "run",
    ]  # fmt: skip
    on_ranks(2, "outpace", "train", *words)
    whole = (tmp_path / "run" / "model").rename(tmp_path / "whole")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-4")
    on_ranks(2, "outpace", "train", "--resume", tmp_path / "run", "--json")
    resumed = tmp_path / "run" / "model" / "model.safetensors"
    assert resumed.read_bytes() == (whole / "model.safetensors").read_bytes()


@pytest.mark.gloo
def test_only_buffers_that_move_are_sent(on_ranks):
    """Masks and tables are not, though the check of the first batch puts all buffers back."""
    names = on_ranks(2, RANKS.with_name("shared_buffers_ranks.py"))
    assert names == {"ddp": ["0.average", "0.calls"], "zero3": ["0.average", "0.calls"]}


@pytest.mark.gloo
def test_ranks_that_scatter_different_units_are_refused(on_ranks):
    """Where they read each other's memory; with gloo and NCCL the check of the first batch does."""
    case = "output_left_out_by_a_rank:zero3"
    refused = on_ranks(2, RANKS, case)[case]["refused"]
    assert re.search("communicates a different part of the model from rank .* blocks=", refused)
