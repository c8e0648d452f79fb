"""A loop of one's own that uses parameters between steps equals one process, or is refused."""

import math
import re

import pytest
import torch

from outpace.launch.forked_job import run_forked
from outpace.nn.spread import whole
from tests.parallel.user_loops import LOOPS, train_parallel, train_plain

pytestmark = pytest.mark.gloo
WHOLE = ("ddp", "ring", "zero1")
SHARDED = ("zero2", "zero3", "hsdp", "tp")
PIPELINES = ("mp", "gpipe", "1f1b", "interleaved", "loopedbfs", "zb", "zbv", "dualpipev")
SEVERAL = PIPELINES[3:]  # stages on each rank, of which the user's module holds the last
VALUELESS = ("Plain", "Walk", "ClipGradValue")  # loops that need no values of other stages
LOST = "were replaced between steps"
ABSENT = r"belongs to .*stage.* of the pipeline, which rank \d runs"
COPIED = f"{ABSENT}|is copied .copy.deepcopy."
# Loops that need values of all parameters, through the user's own module.
REFUSED = {
    **{(one, "DecayData"): LOST for one in SHARDED},
    **{(one, "WeightNormRank0"): "rank 0 alone reads a number" for one in SHARDED},
    **{(one, "TargetCopy"): "is copied .copy.deepcopy." for one in ("zero2", "zero3", "hsdp")},
    **{(one, loop): ABSENT for one in PIPELINES for loop in LOOPS if loop not in VALUELESS},
    **{(one, loop): ABSENT for one in SEVERAL for loop in ("Walk", "ClipGradValue")},
    **{(one, "TargetCopy"): COPIED for one in PIPELINES},
}


def run(tmp_path, strategy, *loops, **options):
    """How both ranks ended, and what they found in each loop."""

    def act(rank):
        told = {}
        for name in loops:
            found, state = train_parallel(LOOPS[name](), strategy, **options)
            if isinstance(found, dict):
                found = {n: whole(t.detach()).clone() for n, t in found.items()}
            told[name] = found, state
        torch.save(told, tmp_path / f"{rank.ranks.rank}.pt")

    ends = run_forked(2, act, 240.0, tmp_path / "job")
    files = [tmp_path / f"{rank}.pt" for rank in range(2)]
    return ends, [torch.load(file) if file.exists() else {} for file in files]


def difference(found, expected):
    """The largest difference; infinite if a value is missing or NaN."""
    if isinstance(expected, dict):
        pairs = [(found[name], value) for name, value in expected.items() if name in found]
        worst = [float((one.detach() - other.detach()).abs().max()) for one, other in pairs]
    else:
        worst = [abs(a - b) for a, b in zip(found, expected, strict=True)]
    return max((math.inf if math.isnan(one) else one for one in worst), default=0.0)


def require_equal(tmp_path, strategy, *loops, **options):
    ends, told = run(tmp_path, strategy, *loops, **options)
    assert all(end.fine for end in ends), (strategy, loops, [end.said for end in ends])
    for loop in loops:
        expected, state = train_plain(LOOPS[loop]())
        ranks = [one[loop] for one in told]
        for found, _ in ranks:
            assert found is None or difference(found, expected) < 1e-9, (strategy, loop)
        if isinstance(expected, dict):
            assert set().union(*(found for found, _ in ranks)) == set(expected), (strategy, loop)
        assert difference(ranks[0][1], state) < 1e-9, (strategy, loop)


def require_refused(tmp_path, strategy, loop, pattern, **options):
    ends, _ = run(tmp_path, strategy, loop, **options)
    for end in ends:
        assert end.refused, (strategy, loop, end)
        assert re.search(pattern, end.said), end.said


def test_shards_are_read_and_written_as_whole_parameters(tmp_path):
    loops = ("Ema", "Decay", "GradientNorm", "WeightNorm", "Largest", "Clamp", "Target", "Restore")
    require_equal(tmp_path, "zero3", *loops)


@pytest.mark.parametrize(
    ("loop", "pattern"),
    [
        ("DecayData", r"stem.weight.*Write to it in place"),
        ("WeightNormRank0", "rank 0 alone reads a number .* while rank 1 does not"),
        ("TargetCopy", REFUSED["zero3", "TargetCopy"]),
    ],
)
def test_what_shards_cannot_do_is_refused_on_all_ranks(tmp_path, loop, pattern):
    require_refused(tmp_path, "zero3", loop, pattern)


@pytest.mark.parametrize(
    ("loop", "pattern"),
    [
        ("Ema", r"blocks\.[02]\.scale was read or written between steps.*named_parameters\(\)"),
        ("Decay", ABSENT),
        ("GradientNorm", "the gradient of blocks.*clip_grad_norm of what parallelize returned"),
        ("WeightNormRank0", r"stage 1 of the pipeline, which rank 1 runs, so rank 0 has no values"),
        ("RestoreState", ABSENT),
    ],
)
def test_parameters_of_other_stages_are_refused_on_all_ranks(tmp_path, loop, pattern):
    require_refused(tmp_path, "1f1b", loop, pattern)


def test_each_stage_updates_its_own_parameters(tmp_path):
    """By the names of what parallelize returned; the optimizer may be given all parameters."""
    require_equal(tmp_path, "1f1b", "Ema", "Decay", "Clamp", "ClipGradValue", by="model")
    require_equal(tmp_path, "1f1b", "ClipGradValue", "Walk", direct=True)


def test_an_optimizer_that_would_miss_stages_of_this_rank_is_refused(tmp_path):
    require_refused(tmp_path, "interleaved", "Plain", "make_optimizer", direct=True)


@pytest.mark.slow
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("strategy", [*WHOLE, *SHARDED, *PIPELINES])
def test_loops_equal_one_process_or_are_refused(tmp_path, strategy, loop):
    pattern = REFUSED.get((strategy, loop))
    if pattern is None:
        require_equal(tmp_path, strategy, loop)
    else:
        require_refused(tmp_path, strategy, loop, pattern)
