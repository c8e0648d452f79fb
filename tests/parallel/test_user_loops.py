"""A loop of one's own equals one process, or is refused: what it does between steps, and around."""

import gc
import math
import re
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store
from torch.nn.utils import clip_grad

import outpace
from outpace.interop.custom_model import CustomModel, CustomObjective
from outpace.launch.forked_job import run_forked
from outpace.nn.dtensor import whole
from outpace.parallel.layout import SpreadLayout
from outpace.records.errors import BadInputError
from tests.parallel.user_loops import (
    LOOPS,
    WRONG,
    ParallelRun,
    PlainRun,
    Stack,
    batches,
    squares,
    train_parallel,
    train_plain,
)
from tests.parallel.user_trainings import TRAININGS

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
ALONE = "forward is called between steps"
OF_A_STAGE = ("vector", "clip_by_hand")  # the norm of parameters that one rank has
FORWARDS = ("eval_first_rank", "eval_all_ranks", "eval_before")
# Whole trainings; in pipelines, by the names of what parallelize returned.
REFUSED_TRAININGS = {
    **{(one, "unfreeze"): "did not require gradients when" for one in (*WHOLE, *SHARDED)},
    **{(one, "unfreeze"): "did not require gradients when" for one in PIPELINES},
    **{(one, loop): ALONE for one in ("zero2", "zero3", *PIPELINES) for loop in FORWARDS},
    **{(one, "block_first_rank"): ALONE for one in ("zero2", "zero3", *PIPELINES)},
    **{("tp", loop): "rank 0 alone calls the module's forward"
       for loop in ("eval_first_rank", "block_first_rank")},
    **{(one, "log_norms_first_rank"): "rank 0 alone reads a number" for one in SHARDED},
    **{(one, "swa"): "is copied .copy.deepcopy." for one in ("zero2", "zero3")},
    **{(one, "swa"): COPIED for one in PIPELINES},
    **{(one, loop): ABSENT for one in PIPELINES
       for loop in ("save_module", "swa_of_copy", "ema_of_copy")},
    **{(one, loop): "LBFGS computes with all parameters" for one in ("zero1", *PIPELINES)
       for loop in ("lbfgs", "lbfgs_by_partial")},
    **{(one, loop): "norm of some gradients of a pipeline" for one in PIPELINES
       for loop in ("clip_layers", "clip_groups")},
    **{(one, "frozen_batchnorm"): "BatchNorm outside of" for one in PIPELINES},
    ("zero1", "reload_optimizer"): r"consolidate_state_dict\(\) on all ranks",
}  # fmt: skip
TRAINED = ("ddp", "zero1", "zero2", "zero3", "tp", "1f1b", "interleaved")


def run(tmp_path, strategy, *loops, limit_s=240.0, **options):
    """How both ranks ended, and what they found in each loop."""

    def act(rank):
        told = {}
        for name in loops:
            rank.note_phase(name)
            found, state = train_parallel((LOOPS | TRAININGS | WRONG)[name](), strategy, **options)
            if isinstance(found, dict):
                found = {n: whole(t.detach()).clone() for n, t in found.items()}
            told[name] = found, state
        torch.save(told, tmp_path / f"{rank.ranks.rank}.pt")

    ends = run_forked(2, act, limit_s, tmp_path / "job")
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
    assert all(end.fine for end in ends), (strategy, [(end.said, end.at) for end in ends])
    for loop in loops:
        expected, state = train_plain((LOOPS | TRAININGS)[loop]())
        ranks = [one[loop] for one in told]
        for found, _ in ranks:
            assert found is None or difference(found, expected) < 1e-9, (strategy, loop)
        if isinstance(expected, dict) and all(found is not None for found, _ in ranks):
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
        ("DecayData", r"stem.weight.*Write in place"),
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


def test_stages_are_clipped_by_the_norm_of_all(tmp_path):
    """By torch; the first and the last stage share a matrix, which counts once."""
    require_equal(tmp_path, "1f1b", "ClipGradNorm", "clip_infinity", by="model")
    require_equal(tmp_path, "interleaved", "ClipGradNorm", by="model", check="off")


def test_parameters_clipped_one_at_a_time_have_their_own_norms(tmp_path):
    require_equal(tmp_path, "1f1b", "clip_each", by="model", check="off")


@pytest.mark.parametrize(
    ("loop", "named"),
    [
        ("clip_layers", "those of blocks.0.up.weight, .* on rank 0"),
        ("clip_groups", "those of stem.weight, .* on rank 0"),
    ],
)
def test_a_norm_of_some_gradients_of_a_pipeline_is_refused(tmp_path, loop, named):
    """Also of a list with one of them: ranks cannot know whether others select the same."""
    require_refused(tmp_path, "1f1b", loop, f"{named}.*clip_grad_norm of", by="model", check="off")


def norm_of(run, *others):
    return float(nn.utils.clip_grad_norm_([*dict(run.named_parameters()).values(), *others], 1e9))


def weighted(gradient):
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    weight.grad = torch.tensor([gradient], dtype=torch.float64)
    return weight


def test_gradients_of_other_modules_count_once_in_a_norm(tmp_path):
    """Whether all ranks have them or one; refused if they differ."""

    def act(rank):
        run = ParallelRun(Stack, "1f1b", by="model", check="off")
        run.backward(batches()[0])
        norm = float(run.model.clip_grad_norm(math.inf))
        mine = [weighted(3.0)] if rank.ranks.rank else []
        assert norm_of(run) == pytest.approx(norm, rel=1e-12)
        assert norm_of(run, weighted(100.0)) == pytest.approx(math.hypot(norm, 100), rel=1e-12)
        assert norm_of(run, *mine) == pytest.approx(math.hypot(norm, 3), rel=1e-12)
        assert math.isnan(norm_of(run, weighted(math.nan)))
        assert norm_of(PlainRun(Stack), *mine) == 3.0 * len(mine)  # of no pipeline
        with pytest.raises(BadInputError, match=r"differ by rank .norms from 1 to 2"):
            norm_of(run, weighted(1.0 + rank.ranks.rank))

    ends = run_forked(2, act, 240.0, tmp_path / "job")
    assert all(end.fine for end in ends), ends


def test_pipelines_of_one_process_have_their_own_norms(tmp_path):
    """Torch's functions return with the last of them."""

    def compare():
        first, second = (ParallelRun(Stack, "1f1b", by="model", check="off") for _ in range(2))
        first.backward(batches()[0])
        norm = float(first.model.clip_grad_norm(math.inf))
        assert norm_of(first) == pytest.approx(norm, rel=1e-12)
        second.backward(batches()[1])
        other = float(second.model.clip_grad_norm(math.inf))
        both = math.hypot(norm, other)
        assert norm_of(second) == pytest.approx(other, rel=1e-12)
        assert norm_of(first, *dict(second.named_parameters()).values()) == pytest.approx(both)
        for _, p in second.named_parameters():
            p.grad = None
        return first, second

    def act(rank):
        plain = clip_grad._get_total_norm
        compare()
        gc.collect()
        assert clip_grad._get_total_norm is nn.utils.get_total_norm is plain
        first, _ = compare()
        if rank.ranks.rank == 0:
            nn.utils.clip_grad_norm_([], 1.0)
        first.backward(batches()[0])

    for end in run_forked(2, act, 240.0, tmp_path / "job"):
        assert end.refused and "rank 0 alone computes a norm of an empty list" in end.said, end


@pytest.mark.parametrize("order", [0.0, -1.0])
def test_orders_that_cannot_be_joined_are_refused_and_leave_nothing(tmp_path, order):
    """The next call has no refusal of an earlier one to report."""

    def act(rank):
        run = ParallelRun(Stack, "1f1b", by="model", check="off")
        run.backward(batches()[0])
        with pytest.raises(BadInputError, match=rf"norm of order {order:g}"):
            nn.utils.clip_grad_norm_([p for _, p in run.named_parameters()], 1.0, order)
        assert not _get_default_store().check(["outpace/refusal"])
        with pytest.raises(BadInputError, match="LBFGS"):
            run.make_optimizer(build=partial(torch.optim.LBFGS, max_iter=1))
        run.backward(batches()[1])

    ends = run_forked(2, act, 240.0, tmp_path / "job")
    assert all(end.fine for end in ends), ends


@pytest.mark.parametrize("loop", ["lbfgs", "lbfgs_by_partial"])
@pytest.mark.parametrize("strategy", ["zero1", "1f1b"])
def test_an_optimizer_of_all_parameters_together_is_refused(tmp_path, strategy, loop):
    said = REFUSED_TRAININGS[strategy, loop]
    require_refused(tmp_path, strategy, loop, said, by="model", check="off")


def test_stages_that_a_loop_clips_by_their_own_norms_are_told(tmp_path):
    """Not those that it clips by the norm of all, or each parameter by its own."""

    def act(rank):
        told = {}
        for name in ("ClipGradNorm", "clip_each", "clip_by_hand"):
            with warnings.catch_warnings(record=True, action="always") as said:
                train_parallel((LOOPS | TRAININGS)[name](), "1f1b", by="model", check="off")
            told[name] = [str(one.message) for one in said if "scaled" in str(one.message)]
        torch.save(told, tmp_path / f"{rank.ranks.rank}.pt")

    ends = run_forked(2, act, 240.0, tmp_path / "job")
    assert all(end.fine for end in ends), ends
    for rank in range(2):
        told = torch.load(tmp_path / f"{rank}.pt")
        assert told["ClipGradNorm"] == told["clip_each"] == []
        [said] = told["clip_by_hand"]
        assert "by different factors, from 0." in said and "clip_grad_norm of what" in said


def test_clipping_on_one_stage_alone_is_refused_on_all_ranks(tmp_path):
    said = "rank 0 alone computes a norm of gradients"
    require_refused(tmp_path, "1f1b", "ClippingRank0", said, by="model", check="off")


def test_weights_of_nan_are_not_taken_for_a_forward_that_writes_to_them(tmp_path):
    require_equal(tmp_path, "1f1b", "diverged", by="model", check="off")


def test_an_optimizer_that_would_miss_stages_of_this_rank_is_refused(tmp_path):
    require_refused(tmp_path, "interleaved", "Plain", "make_optimizer", direct=True)


def test_optimizers_have_the_groups_that_the_loop_gave(tmp_path):
    """With split and whole tensors in one group, which torch's clipping takes together, too."""
    require_equal(tmp_path, "tp", "two_groups", "ClipGradNorm", "ClipGradValue", check="off")


def test_parameters_frozen_since_the_backward_are_updated_on_all_ranks(tmp_path):
    require_equal(tmp_path, "zero1", "freeze_before_step", "freeze_at_first")


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_parameters_frozen_when_the_optimizer_is_made_are_updated_once_they_train(
    tmp_path, strategy
):
    require_equal(tmp_path, strategy, "unfreeze_after_optimizer")


def test_modes_and_rates_that_a_loop_sets_reach_all_stages(tmp_path):
    """Also the first batch's check, and stages that are copies of the module."""
    require_equal(tmp_path, "interleaved", "dropout_rate", "numbers", by="model")


def test_whole_averages_take_shards(tmp_path):
    require_equal(tmp_path, "zero3", "whole_average", "ema_of_copy", check="off")


@pytest.mark.parametrize(("strategy", "loop"), [("zero3", "Decay"), ("zero1", "DecayData")])
def test_an_offloaded_optimizer_begins_with_what_the_loop_wrote(tmp_path, strategy, loop):
    """Its copies would undo it: versions of shards do not count it, nor those of `.data`."""
    require_equal(tmp_path, strategy, loop, change={"offload_optimizer": "cpu"})


@pytest.mark.parametrize(
    "strategy", ["ddp", *(pytest.param(one, marks=pytest.mark.slow) for one in ("zero1", "zero3"))]
)
def test_groups_are_added_to_an_offloaded_optimizer(tmp_path, strategy):
    offloaded = {"change": {"offload_optimizer": "cpu"}, "check": "off"}
    require_equal(tmp_path, strategy, "add_group", **offloaded)


def test_an_optimizer_that_needs_a_closure_is_not_offloaded(tmp_path):
    offloaded = {"change": {"offload_optimizer": "cpu"}, "check": "off"}
    require_refused(tmp_path, "zero3", "lbfgs", "LBFGS evaluates the loss", **offloaded)


@pytest.mark.parametrize(
    ("strategy", "loop"),
    [("ddp", "unfreeze"), ("zero3", "eval_first_rank"), ("zero3", "block_first_rank")],
)
def test_what_a_training_cannot_do_is_refused_on_all_ranks(tmp_path, strategy, loop):
    require_refused(tmp_path, strategy, loop, REFUSED_TRAININGS[strategy, loop], check="off")


def test_forwards_are_watched_between_calls_alone():
    """In a step, no hook runs before a forward."""
    objective = CustomObjective(CustomModel(nn.Sequential(nn.Linear(2, 2)), None))
    layout = SpreadLayout(objective, None)
    layout.guard()
    for _ in range(2):
        with pytest.raises(BadInputError, match=ALONE):
            objective.model(torch.ones(1, 2))
        with layout.in_call():
            assert not objective.model._forward_pre_hooks
            objective.model(torch.ones(1, 2))


def test_gradients_that_the_next_call_drops_are_told(recwarn):
    """Not those of a step that was skipped because its loss was infinite."""
    plan = outpace.Plan(strategy="single", micro_batch=4)
    model = outpace.parallelize(Stack().double(), plan, loss=squares, check="off")
    optimizer = model.make_optimizer(torch.optim.SGD, lr=0.1)
    x, y = batches()[0]
    model.forward_backward((x * math.inf, y))
    model.forward_backward((x, y))
    optimizer.step()
    model.forward_backward((x, y))
    assert [str(one.message) for one in recwarn if "drops" in str(one.message)] == []
    model.forward_backward((x, y))
    model.forward_backward((x, y))
    [said] = [one for one in recwarn if "drops" in str(one.message)]
    assert "pass all samples in one call" in str(said.message) and said.filename == __file__


@pytest.mark.slow
@pytest.mark.parametrize("strategy", TRAINED)
def test_trainings_equal_one_process(tmp_path, strategy):
    options = {"by": "model"} if strategy in PIPELINES else {}
    left_out = OF_A_STAGE if strategy in PIPELINES else ()
    loops = [n for n in TRAININGS if (strategy, n) not in REFUSED_TRAININGS and n not in left_out]
    require_equal(tmp_path, strategy, *loops, limit_s=1200.0, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "loop"), [one for one in REFUSED_TRAININGS if one[0] in TRAINED]
)
def test_trainings_are_refused_on_all_ranks(tmp_path, strategy, loop):
    options = {"by": "model"} if strategy in PIPELINES else {}
    require_refused(tmp_path, strategy, loop, REFUSED_TRAININGS[strategy, loop], **options)


@pytest.mark.slow
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("strategy", [*WHOLE, *SHARDED, *PIPELINES])
def test_loops_equal_one_process_or_are_refused(tmp_path, strategy, loop):
    pattern = REFUSED.get((strategy, loop))
    if pattern is None:
        require_equal(tmp_path, strategy, loop)
    else:
        require_refused(tmp_path, strategy, loop, pattern)
