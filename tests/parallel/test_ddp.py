"""ddp's options: when it exchanges gradients, and what PowerSGD leaves out of them."""

from pathlib import Path

import pytest

from outpace.jobs.defaults import with_powersgd_start
from outpace.records.errors import BadInputError
from outpace.records.plan import Plan
from outpace.records.settings import TrainSettings

RANKS = Path(__file__).with_name("ddp_ranks.py")


@pytest.fixture(scope="module")
def said(on_ranks):
    return on_ranks(2, RANKS)


@pytest.mark.gloo
def test_gradients_are_exchanged_once_a_step_however_many_micro_batches(said):
    exchanges = said["exchanges"]
    once = exchanges["no_sync, 2"]
    assert once[0] == 2  # buckets of 1 MiB, a matrix each
    assert exchanges["no_sync, 4"] == once
    assert exchanges["every time, 2"] == [2 * each for each in once]
    assert exchanges["every time, 4"] == [4 * each for each in once]


@pytest.mark.gloo
def test_powersgd_makes_up_for_what_it_leaves_out(said):
    found = said["low_rank"]
    assert found["off"][:2] == [0, 0]  # steps before it begins
    assert min(found["off"][2:]) > 0.1
    assert found["alike"] and found["buckets"] == 2 and found["compression"] > 40
    # Vogels et al. 2019, algorithm 2: what was applied and what is kept add up to all gradients.
    assert found["left_out"] > 0.1 and found["balance"] < 1e-10


@pytest.mark.gloo
def test_the_wait_for_exchanges_is_no_backward(said):
    parts = said["marks"]["parts"]
    assert parts[:4] == ["forward", "backward", "forward", "backward"]
    assert parts[-1] == "communication" and set(parts[4:-1]) == {"in time"}


def plan(**options):
    return Plan.parse({"strategy": "ddp", "dp_replicate": 2, **options}, "plan")


def test_powersgd_begins_after_a_tenth_of_the_run_and_the_warm_up():
    low_rank = plan(compress_gradients="powersgd")

    def start(total_steps, **asked):
        settings = TrainSettings.parse(asked, "test")
        return with_powersgd_start(low_rank, settings, total_steps).powersgd_start

    assert start(1000) == 100
    assert start(12) == 2
    assert start(1000, warmup=300) == 300
    assert start(1000, powersgd_start=7) == 7
    with pytest.raises(BadInputError, match="starts after 2 steps, but the run has 2"):
        start(2)
    assert with_powersgd_start(plan(), TrainSettings(), 2).powersgd_start is None


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"strategy": "zero3", "dp_replicate": 1, "dp_shard": 2}, "ddp, zero1 or cp"),
        ({"strategy": "horovod", "compress_gradients": "bf16"}, "ddp, ring, zero1 or cp"),
        ({"precision": "fp16"}, "Use precision bf16 or fp32"),
        ({"powersgd_start": 1}, "greater than or equal to 2"),
    ],
)
def test_compression_is_refused_where_it_goes_wrong(options, sentence):
    with pytest.raises(BadInputError, match=sentence):
        plan(**{"compress_gradients": "powersgd", **options})


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("kind", ["bf16", "powersgd"])
def test_what_leaves_out_a_part_of_the_gradients_is_not_verified(kind, command, tmp_path):
    plan(compress_gradients=kind, micro_batch=4, precision="fp64").save(tmp_path / "plan.json")
    done = command("outpace", "verify", "--plan", tmp_path / "plan.json")
    assert done.returncode == 2
    assert f"compress_gradients {kind} drops part of the gradients" in done.stderr
