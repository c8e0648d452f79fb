"""The check of the first batch with tensor-parallel ranks, dropout and collectives of users."""

import json
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import outpace
from outpace.experiment.module_verify import plan_for_module
from outpace.launch.forked_job import run_forked
from outpace.nn.dtensor import local
from tests.parallel.parity.first_batch_cases import (
    SAMPLES,
    Quiet,
    Wide,
    contrast,
    drop_a_term,
    global_batch,
    run_first_step,
    squares,
    with_term,
)

pytestmark = pytest.mark.gloo


def gathered(module, batch):
    """Contrast with the samples of all ranks, which the loss gathers."""
    made = module(batch[0]).flatten(1)
    parts = [torch.empty_like(made) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, batch[1].flatten(1))
    wanted = dist.get_rank() * len(made) + torch.arange(len(made))
    return nn.functional.cross_entropy(made @ torch.cat(parts).T, wanted)


@pytest.mark.parametrize("strategy", ["ddp", "1f1b", "tp"])
def test_collectives_in_user_code_are_reported_or_refused(tmp_path, strategy):
    """They hang where one rank alone computes the loss."""
    layouts = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
    options = {"layouts": layouts} if strategy == "tp" else {}
    first, second = run_first_step(tmp_path, strategy, Wide, gathered, **options)
    if strategy == "ddp":  # two micro-batches, each with the samples of all ranks
        assert "refused" not in first and "split in two" in first["warnings"][0]
    else:
        assert first["refused"] == second["refused"]
        assert "calls a collective of torch.distributed (allgather)" in first["refused"]


def test_a_loss_that_gathers_all_samples_equals_one_process(tmp_path):
    """With one micro-batch, nothing is split: halves of a rank's samples show nothing."""
    whole = {"micro_batch": SAMPLES // 2}
    first, _ = run_first_step(tmp_path, "ddp", Wide, gathered, change=whole)
    assert first["warnings"] == [] and "refused" not in first
    alone = Wide()
    made, wanted = alone(global_batch()[0]).flatten(1), global_batch()[1].flatten(1)
    expected = nn.functional.cross_entropy(made @ wanted.T, torch.arange(SAMPLES)).item()
    assert first["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", ["own", "sum"])
def test_a_loss_that_gathers_is_compared_with_swapped_samples(tmp_path, kind):
    """Negatives of this rank alone, or a sum, are told although the loss communicates."""

    def loss(module, batch):
        count = torch.ones(())
        dist.all_reduce(count)
        if kind == "own":
            return contrast(module, batch)
        return squares(module, batch) * len(batch[0])

    first, _ = run_first_step(tmp_path, "ddp", Wide, loss, change={"micro_batch": SAMPLES // 2})
    said = "ranks swap some of their samples" if kind == "own" else "seems to be a sum over"
    assert said in first["warnings"][0]


class Noisy(Quiet):
    """Adds noise to its inputs."""

    def forward(self, x):
        return super().forward(x + 0.1 * torch.randn_like(x))


def test_random_numbers_of_a_forward_are_told_once(tmp_path):
    """Not those of dropout."""
    first, second = run_first_step(tmp_path, "ddp", Noisy)
    [said] = first["warnings"]
    assert "draws random numbers" in said and "the same numbers for different samples" in said
    assert second["warnings"] == [] and "refused" not in first
    [said] = run_first_step(tmp_path, "1f1b", Noisy)[0]["warnings"]
    assert "draws random numbers" in said and "numbers of its own" in said
    assert run_first_step(tmp_path, "ddp", Dropping)[0]["warnings"] == []


class GroupOfOne(Quiet):
    """Gathers from a group of its own rank alone, in which no other rank can take its place."""

    groups = None

    def forward(self, x):
        y = super().forward(x)
        if self.groups is None:
            type(self).groups = [dist.new_group([rank]) for rank in range(2)]
        gathered = [torch.zeros_like(y)]
        dist.all_gather(gathered, y.detach(), group=self.groups[dist.get_rank()])
        return y + gathered[0]


def test_a_process_group_of_one_rank_is_accepted(tmp_path):
    for said in run_first_step(tmp_path, "ddp", GroupOfOne):
        assert "refused" not in said


class GroupOfTwo(Quiet):
    """Communicates on two ranks of four, and not on the others."""

    group = None

    def forward(self, x):
        y = super().forward(x)
        if self.group is None:
            type(self).group = dist.new_group([0, 1])
        if dist.get_rank() < 2:
            dist.all_reduce(y.detach().clone(), group=self.group)
        return y


def test_collectives_of_some_ranks_leave_all_ranks_the_same_tests(tmp_path):
    """Each rank would decide by itself what to compare, and wait for what others do not send."""
    for said in run_first_step(tmp_path, "ddp", GroupOfTwo, processes=4):
        assert "refused" not in said and said["warnings"] == []


class Dropping(nn.Module):
    """Blocks in which half of the features are split by tp, and drop what is whole."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(DroppingBlock() for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x[..., :3]


class DroppingBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(5, 64), nn.Linear(64, 5)
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        return x + self.drop(self.down(self.drop(torch.tanh(self.up(x)))))


class Matmuls(TorchDispatchMode):
    """Counts multiplications of matmuls, those of this rank's parts of tensors."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        made = func(*args, **(kwargs or {}))
        if any(issubclass(kind, FakeTensor) for kind in types):
            return made  # of which DTensor learns placements
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.count += made.numel() * args[-2].shape[-1]
        return made


SPLIT = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


@pytest.mark.parametrize(
    ("strategy", "change"),
    [
        ("gpipe", {}),
        ("tp", {}),
        pytest.param("tp", {"micro_batch": 16}, marks=pytest.mark.slow),
        *(pytest.param(one, {}, marks=pytest.mark.slow) for one in ("1f1b", "interleaved", "zb")),
    ],
)
def test_the_check_with_dropout_costs_at_most_two_steps(tmp_path, strategy, change):
    """By multiplications of the rank that has most, in checks and in steps."""

    def act(rank):
        plan = plan_for_module(strategy, 2, 16).model_copy(update=change)
        options = {"layouts": SPLIT} if strategy == "tp" else {}
        counts = {}
        for check in ("on", "off"):
            model = outpace.parallelize(Dropping(), plan, loss=squares, check=check, **options)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                with Matmuls() as matmuls:
                    model.forward_backward(model.share(global_batch(16)))
            counts[check] = matmuls.count
        with Matmuls() as matmuls:
            model.forward_backward(model.share(global_batch(16)))
        found = [counts["on"] - counts["off"], matmuls.count]
        (tmp_path / f"{rank.ranks.rank}").write_text(json.dumps(found))

    ends = run_forked(2, act, 240.0, tmp_path / "job")
    assert all(end.fine for end in ends), [end.said for end in ends]
    found = [json.loads((tmp_path / f"{one}").read_text()) for one in range(2)]
    checks, steps = zip(*found, strict=True)
    assert 1 <= max(checks) / max(steps) <= 2


def drop_one_gradient(layout):
    given = layout.gradients

    def gradients(passes, how):
        totals = given(passes, how)
        local(layout.model.blocks[1].up.weight.grad).zero_()
        return totals

    layout.gradients = gradients


def round_the_loss(layout):
    """By 3e-5, as parts of matmuls may in fp32, but not a batch that is cut."""
    given = layout.gradients
    layout.gradients = lambda passes, how: given(passes, how) * torch.tensor([1 + 3e-5, 1.0])


@pytest.mark.parametrize(
    ("fault", "loss", "refused", "told"),
    [
        (round_the_loss, squares, "", ""),
        (drop_one_gradient, squares, "blocks.1.up.weight has no gradient", ""),
        (None, contrast, "", "when the batch is split in two"),
        pytest.param(drop_a_term, with_term, "the loss is", "", marks=pytest.mark.slow),
    ],
)
def test_tensor_parallel_faults_are_refused_and_effects_of_the_cut_reported(
    tmp_path, fault, loss, refused, told
):
    """Also where samples were taken together otherwise first."""
    both = run_first_step(tmp_path, "tp", Dropping, loss, fault, layouts=SPLIT)
    assert all(refused in said.get("refused", "") for said in both)
    assert all(("refused" in said) == bool(refused) for said in both)
    assert [told in one for one in both[0]["warnings"]] == [True] * bool(told)


class OneMask(Quiet):
    """One mask, drawn before the blocks, of what each of them returns."""

    def forward(self, x):
        x = self.stem(x)
        mask = nn.functional.dropout(torch.ones_like(x), 0.3, self.training)
        for block in self.blocks:
            x = block(x) * mask
        return self.head(x)


class LateNoise(Quiet):
    """What is drawn after the first block is read after all of them."""

    def forward(self, x):
        x = self.stem(x)
        for number, block in enumerate(self.blocks):
            x = block(nn.functional.dropout(x, 0.2, self.training))
            if not number:
                noise = torch.randn_like(x)
        return self.head(x + noise)


class EncoderOutside(Quiet):
    """Blocks take what an encoder outside of them drops, within checkpoints."""

    def __init__(self):
        super().__init__()
        self.encoder, self.drop = nn.Linear(5, 6), nn.Dropout(0.3)

    def forward(self, x):
        encoded, x = self.drop(self.encoder(x)), self.stem(x)
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x + encoded, use_reentrant=False)
        return self.head(x)


@pytest.mark.parametrize(
    ("make", "strategy"),
    [
        (OneMask, "1f1b"),
        (LateNoise, "1f1b"),
        (EncoderOutside, "1f1b"),  # an encoder outside of blocks is at the first and the last stage
        pytest.param(OneMask, "interleaved", marks=pytest.mark.slow),
        pytest.param(LateNoise, "interleaved", marks=pytest.mark.slow),
    ],
)
def test_random_numbers_outside_of_blocks_are_the_same_on_all_stages(tmp_path, make, strategy):
    """The layout's pass equals one process, which draws it once, and is the first step's.

    Numbers other than dropout's are told.
    """
    draws = [make is LateNoise, False]
    for said, told in zip(run_first_step(tmp_path, strategy, make), draws, strict=True):
        assert ["draws random numbers" in one for one in said["warnings"]] == [True] * told
        assert "refused" not in said and said["passes"] == 1
