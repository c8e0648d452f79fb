"""What ranks of a loop must have alike is compared: samples, gradients, weights, and steps."""

import os
import re
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import outpace
from outpace.experiment.module_verify import plan_for_module
from outpace.launch.forked_job import run_forked
from outpace.nn.fingerprint import fingerprint
from outpace.parallel import rank_agreement
from outpace.parallel.rank_agreement import RankAgreement, RankRecord, _find_difference
from outpace.records.errors import BadInputError
from outpace.records.ranks import Ranks
from tests.parallel.user_loops import SAMPLES, ParallelRun, Stack, batches, squares

pytestmark = pytest.mark.gloo


def ignore(*_):
    """Change nothing."""


def train(run, gradients=ignore, weights=ignore, steps=lambda number: True, settings=ignore):
    optimizer = run.make_optimizer()
    for number, batch in enumerate(batches()):
        run.backward(batch)
        gradients(run)
        settings(run, optimizer)
        if steps(number):
            optimizer.step()
        optimizer.zero_grad()
        weights(run)


def parameters(run):
    return [p for _, p in run.named_parameters()]


def clip_norm(run):
    nn.utils.clip_grad_norm_(parameters(run), 0.01)


def clip_values(run):
    nn.utils.clip_grad_value_(parameters(run), 1e-4)


def decay(run):
    for p in parameters(run):
        p.data.mul_(0.9)


def scale_by_rank(run):
    for p in parameters(run):
        if p.grad is not None:
            p.grad.mul_(1 + dist.get_rank())


def rate_by_rank(run, optimizer):
    optimizer.param_groups[0]["lr"] = 0.01 + 0.01 * dist.get_rank()


def on_rank_0(change):
    return lambda run: change(run) if dist.get_rank() == 0 else None


GRADIENTS = r"the gradient of blocks\.0\..* differs between ranks .* when the optimizer steps"
WEIGHTS = r"the value of blocks\.0\..* differs between ranks"
HIDDEN = "the {} of most shards changed on rank 0, but none on rank 1"


@pytest.mark.parametrize(
    ("strategy", "loop", "pattern"),
    [
        ("ddp", {"gradients": on_rank_0(clip_norm)}, GRADIENTS),
        ("ddp", {"gradients": scale_by_rank}, GRADIENTS),
        ("ddp", {"weights": on_rank_0(decay)}, WEIGHTS),
        (
            "ddp",
            {"steps": lambda number: dist.get_rank() == 0},
            "rank 0 .* step once, but rank 1 0 times",
        ),
        ("zero1", {"gradients": on_rank_0(clip_norm)}, GRADIENTS),
        ("zero1", {"gradients": on_rank_0(decay)}, WEIGHTS),
        ("zero3", {"gradients": on_rank_0(clip_values)}, HIDDEN.format("gradient")),
        ("zero3", {"weights": on_rank_0(decay)}, HIDDEN.format("value")),
        ("zero1", {"settings": rate_by_rank}, "optimizer's lr differs between ranks"),
        ("zero3", {"settings": rate_by_rank}, "optimizer's lr differs between ranks"),
        ("zero3", {"gradients": on_rank_0(clip_norm)}, "rank 0 alone computes with whole values"),
    ],
)
def test_changes_on_some_ranks_are_refused_on_all(tmp_path, strategy, loop, pattern):
    def act(rank):
        train(ParallelRun(Stack, strategy, by="model"), **loop)

    for end in run_forked(2, act, 240.0, tmp_path / "job"):
        assert end.refused and re.search(pattern, end.said), end


def test_the_same_changes_on_all_ranks_are_accepted(tmp_path):
    def act(rank):
        for strategy in ("ddp", "zero1", "zero3"):
            train(ParallelRun(Stack, strategy, by="model"), clip_norm, decay)

    ends = run_forked(2, act, 240.0, tmp_path / "job")
    assert all(end.fine for end in ends), ends


class Fives(nn.Sequential):
    """Of 4 ranks, the last one has no row of any parameter."""

    def __init__(self):
        super().__init__(*(nn.Linear(5, 5) for _ in range(4)))


class Critic(nn.Sequential):
    """The second half of each parameter's rows stays within a clamp."""

    def __init__(self):
        super().__init__(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 5))
        with torch.no_grad():
            for p in self.parameters():
                p.fill_(1e-3)[: (len(p) + 1) // 2] = 1.0


def clamp(run):
    for p in parameters(run):
        p.data.clamp_(-0.5, 0.5)


def test_ranks_with_empty_or_with_few_shards_are_not_judged(tmp_path):
    """The same change on all ranks changes no value on some."""

    def act(rank):
        for module, change in (Fives(), decay), (Critic(), clamp):
            plan = plan_for_module("zero3", 4, SAMPLES)
            model = outpace.parallelize(module, plan, loss=squares, blocks=["0"], check="on")
            for batch in batches():
                model.forward_backward(model.share([one.float() for one in batch]))
                change(model)

    ends = run_forked(4, act, 240.0, tmp_path / "job")
    assert all(end.fine for end in ends), ends


def plan_of(**changes):
    return SimpleNamespace(**{"strategy": "ddp", "pp": 1, **changes})


def test_steps_are_compared_within_a_stage():
    told = [RankRecord(0, steps=n) for n in (1, 1, 2, 2)]
    assert _find_difference(told, plan_of(pp=2)) is None
    assert "rank 0 has called an optimizer's step once, but rank 2 2 times" in _find_difference(
        told, plan_of()
    )


def test_settings_that_are_nan_are_equal():
    told = [RankRecord(0, steps=1, settings={("lr", 0): float("nan")}) for _ in range(2)]
    assert _find_difference(told, plan_of()) is None
    told[1].settings["lr", 0] = 0.1
    assert "check=" in _find_difference(told, plan_of())


@pytest.mark.parametrize(("factor", "refused"), [(1 + 1e-9, False), (1.001, True)])
def test_weights_that_differ_by_rounding_are_only_told(tmp_path, factor, refused):
    def act(rank):
        run = ParallelRun(Stack, "ddp", by="model")
        with warnings.catch_warnings(record=True, action="always") as told:
            train(run, weights=lambda run: rank.ranks.rank and change(run))
        said = [str(one.message) for one in told if "round differently" in str(one.message)]
        assert len(said) == (rank.ranks.rank == 0)

    def change(run):
        for p in parameters(run):
            p.data.mul_(factor)

    for end in run_forked(2, act, 240.0, tmp_path / "job"):
        assert end.refused == refused and end.fine == (not refused), end


def test_gradients_of_tensor_parallel_ranks_may_round_differently(tmp_path):
    def act(rank):
        def change(run):
            for name, p in run.named_parameters():
                if "norm" in name:
                    p.grad.mul_(1 + 1e-12 * rank.ranks.rank)

        train(ParallelRun(Stack, "tp", by="model"), gradients=change)

    ends = run_forked(2, act, 240.0, tmp_path / "job")
    assert all(end.fine for end in ends), ends


def test_frozen_weights_are_read_again_only_after_writes(monkeypatch):
    layer = nn.Linear(2, 2).requires_grad_(False)
    layout = SimpleNamespace(named_parameters=lambda: list(layer.named_parameters()))
    plan = plan_of(tp=1, data_rank=lambda rank: rank)
    one = RankAgreement(layout, plan, SimpleNamespace(rank=0, world_size=2))
    read = []
    monkeypatch.setattr(rank_agreement, "fingerprint", lambda t: read.append(t) or fingerprint(t))
    first = one._fingerprint_weights()
    assert one._fingerprint_weights() == first and len(read) == 2
    layer.bias.add_(1)
    assert one._fingerprint_weights() != first and len(read) == 3


def test_a_part_that_is_shared_again_stays_the_same(tmp_path):
    """In another structure too; ranks that read their own samples, or other ones, are told."""

    def act(rank):
        run = ParallelRun(Stack, "ddp", by="model")
        whole = batches()[0]
        part = run.model.share(whole)
        assert run.model.share(part) is part and len(part[0]) == len(whole[0]) // 2
        again = run.model.share({"x": part[0], "y": part[1]})
        assert again["x"] is part[0]
        with pytest.raises(BadInputError, match=r"a part of 4 samples .* with a tensor of 8"):
            run.model.share((part[0], whole[1]))
        other = [one + rank.ranks.rank for one in whole]
        table = whole[0][:1]  # which parts share
        said = []
        for batch in ((*whole, table), (whole[0] + rank.ranks.rank, whole[1]), other):
            with warnings.catch_warnings(record=True, action="always") as told:
                run.model.forward_backward(run.model.share(batch)[:2])
            said.append([str(one.message) for one in told if "gave to share" in str(one.message)])
        assert said[:2] == [[], []] and len(said[2]) == (rank.ranks.rank == 0)

    ends = run_forked(2, act, 240.0, tmp_path / "job")
    assert all(end.fine for end in ends), ends


def test_a_copy_of_a_part_that_is_shared_is_told(tmp_path):
    """The global batch was shared before it, and is the same on all ranks."""

    def act(rank):
        run = ParallelRun(Stack, "ddp", by="model")
        copied = [one.clone() for one in run.model.share(batches()[0])]
        with warnings.catch_warnings(record=True, action="always") as told:
            run.model.forward_backward(run.model.share(copied))
        said = [one for one in told if "gave to share" in str(one.message)]
        assert len(said) == (rank.ranks.rank == 0)

    ends = run_forked(2, act, 240.0, tmp_path / "job")
    assert all(end.fine for end in ends), ends


def test_ranks_of_one_share_need_the_same_samples(tmp_path):
    def act(rank):
        run = ParallelRun(Stack, "1f1b", by="model", check="on")
        run.model.forward_backward([one + rank.ranks.rank for one in batches()[0]])

    for end in run_forked(2, act, 240.0, tmp_path / "job"):
        assert end.refused and "ranks 0 and 1 have been given different samples" in end.said, end


def test_a_step_that_one_rank_refuses_counts_on_all():
    """Else ranks would compare in different calls."""
    plan = plan_for_module("single", 1, SAMPLES)
    laid = outpace.parallelize(Stack().double(), plan, loss=squares, check="off")
    counted = []
    laid._agreement = SimpleNamespace(begin_call=counted.append)
    laid._frozen = {"stem.weight"}
    with pytest.raises(BadInputError, match="did not require gradients"):
        laid.forward_backward(batches()[0])
    assert len(counted) == 1


@pytest.mark.filterwarnings("ignore")
def test_compiled_steps_are_not_compiled_again():
    plan = plan_for_module("single", 1, SAMPLES)
    laid = outpace.parallelize(Stack().double(), plan, loss=squares, check="off")
    laid._agreement = RankAgreement(laid.layout, plan, Ranks())
    laid._agreement._calls = 1
    torch.compiler.reset()  # loads the compiler
    optimizer = laid.make_optimizer(torch.optim.SGD, lr=0.1)
    compiled, graphs = [], []

    def count(graph, inputs):
        compiled.append(graph)
        return graph.forward

    step = torch.compile(optimizer.step, backend=count)
    for _ in range(4):
        for _, parameter in laid.named_parameters():
            parameter.grad = torch.ones_like(parameter)
        step()
        graphs.append(len(compiled))
    assert graphs[1:] == graphs[1:2] * 3


def fail(exit_code, run):
    os._exit(exit_code)


@pytest.mark.parametrize("ended", [0, 1])
def test_a_rank_does_not_wait_for_one_that_has_ended(tmp_path, ended):
    """It would wait for 600 s."""

    def act(rank):
        run = ParallelRun(Stack, "zero3", by="model", check="off")
        run.backward(batches()[0])
        if rank.ranks.rank == ended:
            fail(7, run)
        float(run.named_parameters()[0][1].grad.norm())

    ends = run_forked(2, act, 240.0, tmp_path / "job")
    assert ends[ended].exit_code == 7
    other = ends[1 - ended]
    assert other.refused and f"but rank {ended} has ended" in other.said, other
