"""Users' own modules are proved equal to one process, or what differs is named."""

import json
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import outpace
from outpace.cli.main import main
from outpace.experiment.module_verdict import CUT_ALIKE
from outpace.experiment.module_verify import STRATEGIES, plan_for_module, verify_custom
from outpace.interop.custom_model import CustomModel
from outpace.nn.dtensor import local
from outpace.parallel.parallel_module import refused_strategy
from outpace.records.certificate import WITHOUT_DROPOUT, Certificate
from outpace.records.errors import BadInputError
from outpace.records.plan import Plan, PlanFile
from outpace.records.run import RunRecord

pytestmark = pytest.mark.gloo


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("scale", torch.tensor(0.5))
        self.register_buffer("unused", torch.zeros(()))

    def forward(self, x):
        return x + self.scale * torch.tanh(self.linear(x))


class Stack(nn.Module):
    def __init__(self, blocks=4):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(5, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(6, 3)
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = self.drop(block(x))
        return self.head(x)


def squares(module, batch):
    inputs, targets = batch
    return (module(inputs) - targets).square().mean()


def batch(step, samples=8):
    drawn = torch.Generator().manual_seed(step)
    shape = (samples, 4)
    return torch.randn(*shape, 5, generator=drawn), torch.randn(*shape, 3, generator=drawn)


def verdict_of(module, strategy, loss=squares, given=batch, **options):
    [verdict] = outpace.verify(module, loss=loss, batch=given, plans=[strategy], **options).verdicts
    return verdict


@pytest.mark.slow
def test_every_strategy_of_a_plain_stack_equals_one_process():
    module = Stack()
    before = {name: t.clone() for name, t in module.state_dict().items()}
    certificate = outpace.verify(module, loss=squares, batch=batch)
    assert certificate.passed and certificate.module == "Stack" and certificate.model is None
    by_name = {verdict.strategy: verdict for verdict in certificate.verdicts}
    assert set(by_name) | set(certificate.skipped) | {"single"} == set(STRATEGIES)
    for verdict in by_name.values():
        if verdict.strategy == "tp":
            assert verdict.refused and "Pass layouts" in verdict.reason
            continue
        assert verdict.passed and verdict.precision == "fp64"
        assert verdict.worst_relative_difference < 1e-12
    assert WITHOUT_DROPOUT in certificate.notes
    for name, tensor in module.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)
    assert module.drop.p == 0.2


class NeedsFloat32(Stack):
    def forward(self, x):
        return super().forward(x.float() @ torch.eye(5, dtype=torch.float32))


class NormsInFloat32(Stack):
    def forward(self, x):
        return super().forward((x.float() * 1.1).to(x.dtype))


@pytest.mark.parametrize(
    ("kind", "note"),
    [(NeedsFloat32, "in fp32, since"), (NormsInFloat32, "partly computed in fp32")],
)
def test_modules_that_compute_in_fp32_have_its_tolerance(kind, note):
    certificate = outpace.verify(kind(), loss=squares, batch=batch, plans="ddp")
    assert certificate.passed and note in certificate.notes[0]
    assert certificate.verdicts[0].tolerance == 3e-4


def lose_a_gradient(layout):
    given = layout.gradients

    def gradients(passes, how):
        totals = given(passes, how)
        for name, parameter in layout.named_parameters():
            if name == "blocks.1.linear.weight" and parameter.grad is not None:
                local(parameter.grad).zero_()
        return totals

    layout.gradients = gradients


def drop_a_term(layout):
    for part in layout.objective.modules():
        if callable(vars(part).get("loss")):
            part.loss = squares


def swap_buffers(layout):
    first, second = (layout.model.blocks[number].scale for number in (0, 1))
    with torch.no_grad():
        for scale, value in ((first, 1.5), (second, 0.0)):  # as of others: these are alike
            if scale is not None:  # which other stages have
                scale.fill_(value)


def with_term(module, batch):
    made = module(batch[0])
    return (made - batch[1]).square().mean() + made.abs().mean()


NOT_ALIKE = "The loss on the ranks differs from that of one process"


@pytest.mark.parametrize("strategy", ["ddp", "zero3", "1f1b"])
@pytest.mark.parametrize(
    ("fault", "loss", "kinds", "words"),
    [
        (lose_a_gradient, squares, {"gradient"}, "blocks.1.linear.weight is zero"),
        (drop_a_term, with_term, {"loss"}, NOT_ALIKE),
        (swap_buffers, squares, {"loss"}, NOT_ALIKE),
    ],
)
def test_planted_faults_are_caught_and_named(strategy, fault, loss, kinds, words):
    own = CustomModel(Stack(), loss)
    [verdict] = verify_custom(own, batch, plans=[strategy], spoil=fault).verdicts
    assert not verdict.passed and not verdict.refused
    assert verdict.differences[0].kind in kinds
    if strategy == "1f1b" and words == NOT_ALIKE:
        words = "The loss reads something that stages do not send"
    assert words in verdict.reason


def fail_on_ranks(layout):
    def fail(*given):
        raise RuntimeError("a fault of the strategy")

    layout.model.register_forward_pre_hook(fail)


def numbered(step):
    """Samples, and a tensor of another length that names them."""
    return (*batch(step), torch.arange(8).repeat(2))


def test_what_fails_on_ranks_alone_is_no_refusal_though_tensors_are_not_cut_alike():
    own = CustomModel(Stack(), lambda module, given: squares(module, given[:2]))
    certificate = verify_custom(own, numbered, plans=["ddp"], spoil=fail_on_ranks)
    [verdict] = certificate.verdicts
    assert not certificate.passed and not verdict.refused
    assert "a fault of the strategy" in verdict.reason and "is split along" not in verdict.reason


def test_what_fails_in_one_process_on_a_part_of_the_batch_is_refused():
    own = CustomModel(Stack(), lambda module, given: module(given[0][given[2]]).square().mean())
    [verdict] = verify_custom(own, numbered, plans=["ddp"]).verdicts
    assert verdict.refused and "tensors with 16 entries stay whole in each part" in verdict.reason


@pytest.mark.parametrize("first", [nn.Tanh(), nn.Linear(5, 5).requires_grad_(False)])
def test_a_stage_that_trains_nothing_equals_one_process(first):
    """It has no parameter groups at all; the stage failed in unpacking them."""
    module = nn.Sequential(first, nn.Linear(5, 3))
    verdict = verdict_of(module, "gpipe", blocks=[["0"], ["1"]])
    assert verdict.passed, verdict.reason


class CountingStack(Stack):
    """Counts samples in a dict; logs and what each forward sets again count nothing."""

    def __init__(self):
        super().__init__()
        self.totals, self.log, self.last = {}, [], [0.0]

    def forward(self, x):
        self.totals["seen"] = self.totals.get("seen", 0) + len(x)
        self.log.append(float(x.mean()))
        self.last[0] = float(x.max())
        return super().forward(x)


def test_counts_in_attributes_are_named_although_all_is_equal():
    own = CustomModel(CountingStack(), squares)
    ddp, pipeline = verify_custom(own, batch, plans=["ddp", "1f1b"]).verdicts
    assert ddp.passed and pipeline.passed and pipeline.cause is None
    assert "A step counts or averages samples in totals (a plain attribute)" in ddp.cause


def test_groups_of_a_fixed_number_of_samples_are_refused_where_they_are_split():
    """All tensors are split alike, so only one process with the whole batch tells."""

    def loss(module, given):
        made = module(given[0])
        return (made - made.view(-1, 8, *made.shape[1:]).mean(0)).square().mean()

    [verdict] = verify_custom(CustomModel(Stack(), loss), batch, plans=["ddp"]).verdicts
    assert verdict.refused and "runs on the whole batch, but not on a micro-batch" in verdict.reason


def test_targets_that_name_their_images_by_places_are_refused():
    """The module never fails on a part: other images' targets are taken there."""

    def loss(module, batch):
        made, of = module(batch["images"]).mean(1), batch["of"]
        sums = [(one - batch["wanted"][of == n]).square().sum() for n, one in enumerate(made)]
        return torch.stack(sums).mean()

    of = torch.arange(8).repeat_interleave(torch.arange(8) % 3 + 1)
    given = {"images": batch(1)[0], "of": of, "wanted": torch.randn(len(of), 3)}
    verdict = verdict_of(Stack(), "ddp", loss, given)
    assert verdict.refused and "refer to samples by their position" in verdict.reason


class TiedScaled(Stack):
    """What shards cannot hold: a weight of two blocks, and a scalar."""

    def __init__(self):
        super().__init__()
        self.blocks[3].linear.weight = self.blocks[0].linear.weight
        self.factor = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return super().forward(x) * self.factor


def penalised(module, batch):
    return squares(module, batch) + 1e-3 * sum(p.square().sum() for p in module.parameters())


@pytest.mark.parametrize(
    ("strategy", "changed"),
    [
        ("zero3", {"offload_optimizer": "cpu"}),
        ("zero1", {"offload_parameters": "disk"}),
        ("single", {"offload_parameters": "cpu"}),
    ],
)
def test_offloaded_plans_equal_one_process_and_resume(strategy, changed):
    plan = plan_for_module(strategy, 1 if strategy == "single" else 2, 8)
    plan = Plan.model_validate({**plan.model_dump(), **changed})
    verdict = verdict_of(TiedScaled(), plan, penalised)
    assert verdict.passed, verdict.reason


def test_a_difference_by_buffers_that_move_is_explained_by_them():
    """It is no loss that counts something other than samples."""
    module = Stack()
    module.stem = nn.utils.parametrizations.spectral_norm(module.stem)
    verdict = verdict_of(module, "ddp")
    assert CUT_ALIKE in verdict.cause and "(sum, count)" not in verdict.cause
    assert verdict.cause.startswith("The forward changes stem.parametrizations.weight.0._")


class Predicting(Block):
    """Its predictor learns from a detached input, and keeps its loss on the block."""

    def __init__(self):
        super().__init__()
        self.predict = nn.Linear(6, 1)

    def forward(self, x):
        wanted = x.detach().norm(dim=-1, keepdim=True)
        self.aux = (self.predict(x.detach()) - wanted).square().mean()
        return super().forward(x)


def test_weights_that_a_split_backward_misses_are_explained():
    """Their loss needs no gradient of the input of their stage."""

    def loss(module, batch):
        return squares(module, batch) + module.blocks[1].aux

    module = Stack()
    module.blocks[1] = Predicting()
    verdict = verdict_of(module, "zb", loss)
    assert "blocks.1.predict" in verdict.cause and "one process, but on no rank" in verdict.cause
    assert verdict.cause.endswith("Use 1f1b, which does not split the backward")


def test_a_buffer_that_nothing_reads_is_compared_too():
    def move(layout):
        layout.model.blocks[2].unused.add_(1)

    [verdict] = verify_custom(
        CustomModel(Stack(), squares), batch, plans=["ddp"], spoil=move
    ).verdicts
    assert [d.name for d in verdict.differences if d.kind == "buffer"] == ["blocks.2.unused"]
    assert "buffers are not" in verdict.cause


class CountingBuffer(Stack):
    """Its buffer moves with each forward, so that it depends on the number of micro-batches."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        return super().forward(x)


def test_buffers_that_move_with_each_micro_batch_are_told_from_faults():
    verdict = verdict_of(CountingBuffer(), "zero1")
    assert verdict.passed and "each forward changes (seen)" in verdict.cause


class CountingTwice(CountingBuffer):
    """Counts forwards in a buffer, and samples in an attribute."""

    samples = 0

    def forward(self, x):
        self.samples += len(x)
        return super().forward(x)


def test_counts_in_attributes_are_named_beside_buffers_that_move():
    verdict = verdict_of(CountingTwice(), "zero1")
    assert verdict.passed and "each forward changes (seen)" in verdict.cause
    assert "A step counts or averages samples in samples (a plain attribute)" in verdict.cause


class CountedSamples(Stack):
    """Counts samples for its loop in buffers, one of which no checkpoint contains."""

    sums = False  # over the ranks

    def __init__(self):
        super().__init__()
        self.register_buffer("load", torch.zeros(5))
        self.register_buffer("usage", torch.zeros(5), persistent=False)

    def forward(self, x):
        with torch.no_grad():
            wins = nn.functional.one_hot(x.argmax(-1), 5).sum((0, 1)).to(self.load.dtype)
            if self.sums and dist.is_initialized():
                dist.all_reduce(wins)
            self.load += wins
            self.usage += wins
        return super().forward(x)


def test_buffers_in_which_ranks_count_their_own_samples_are_not_equal():
    """In a pipeline without replicas they are; the zoo takes the others for effects of the cut."""
    ddp, pipeline = outpace.verify(
        CountedSamples(), loss=squares, batch=batch, plans="ddp,1f1b"
    ).verdicts
    assert not ddp.passed and pipeline.passed and pipeline.cause is None
    assert {d.name for d in ddp.differences} == {"load", "usage"}
    assert CUT_ALIKE in ddp.cause and "samples in load, usage" in ddp.cause
    assert "cover 1/2 of each batch" in ddp.cause and "all_reduce(counts)" in ddp.cause


def test_buffers_in_which_ranks_sum_their_counts_are_equal():
    module = CountedSamples()
    module.sums = True
    verdict = verdict_of(module, "zero3")
    assert verdict.passed and verdict.cause is None


def test_averages_of_batch_normalisations_in_pipelines_are_of_the_whole_step():
    normalised = [nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(4)) for _ in range(4)]
    verdict = verdict_of(nn.Sequential(*normalised, nn.Linear(5, 3)), "gpipe")
    assert CUT_ALIKE in verdict.cause and "BatchNorm" in verdict.cause
    assert "use one micro-batch per step" in verdict.cause and "sync" not in verdict.cause


class Normalised(Stack):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return super().forward(self.norm(x))


ACCUMULATED = Plan(strategy="ddp", dp_replicate=2, micro_batch=2)


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_shared_statistics_of_whole_steps_equal_one_process(strategy):
    verdict = verdict_of(Normalised(), strategy, sync_batchnorm=True)
    assert verdict.passed, verdict.reason


def test_shared_statistics_of_micro_batches_are_why_a_split_batch_differs():
    verdict = verdict_of(Normalised(), ACCUMULATED, sync_batchnorm=True)
    assert not verdict.passed and CUT_ALIKE in verdict.cause
    assert "use one micro-batch per step, because" in verdict.cause
    assert "statistics of norm cover one micro-batch" in verdict.cause
    assert f"; the worst, {verdict.worst_tensor}, is off by " in verdict.reason


def test_statistics_of_each_rank_are_why_a_split_batch_differs():
    verdict = verdict_of(Normalised(), "ddp")
    assert not verdict.passed and CUT_ALIKE in verdict.cause
    assert "sync_batchnorm=True and one micro-batch per step" in verdict.cause


def test_shared_statistics_without_batch_normalisation_change_nothing():
    assert verdict_of(Stack(), ACCUMULATED, sync_batchnorm=True).passed


@pytest.mark.parametrize("plan", ["ddp", ACCUMULATED])
def test_samples_that_are_mixed_beside_shared_statistics_are_the_cause(plan):
    def apart(module, batch):
        return (module(batch[0]) - batch[1]).std(0).mean()

    verdict = verdict_of(Normalised(), plan, loss=apart, sync_batchnorm=True)
    assert not verdict.passed and "BatchNorm's statistics, but nothing else" in verdict.cause
    assert "samples affect each other" in verdict.cause


class Counting(Stack):
    """Has state that no checkpoint holds."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * (1 + self.calls // 3)


def test_what_a_checkpoint_does_not_hold_is_found_by_the_resume():
    verdict = verdict_of(Counting(), "ddp", given=lambda step: batch(step, samples=2))
    assert not verdict.passed and "after resuming" in verdict.differences[0].kind
    assert "the checkpoint does not contain" in verdict.cause
    assert "keeps calls in an attribute from step to step" in verdict.cause


def require_scale(block, *_):
    assert block.scale.shape == ()


class SavingBlock(Block):
    """Saves by code of its own, as torch's FakeQuantize does, in which its buffers are used."""

    def __init__(self):
        super().__init__()
        self.register_state_dict_post_hook(require_scale)
        self.register_load_state_dict_post_hook(require_scale)

    def forward(self, x):
        with torch.no_grad():
            self.scale.lerp_(x.mean(), 0.1)
        return super().forward(x)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}scale"] = self.scale

    def _load_from_state_dict(self, state, prefix, *given):
        self.scale.copy_(state[f"{prefix}scale"])
        super()._load_from_state_dict(state, prefix, *given)

    def get_extra_state(self):
        return {"size": len(self.linear.weight)}

    def set_extra_state(self, state):
        assert state["size"] == len(self.linear.weight)


class Saving(Stack):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(SavingBlock() for _ in range(4))


def test_blocks_that_save_by_code_of_their_own_resume_in_a_pipeline():
    """Each rank saves and loads its own blocks alone; of the others' it has no tensors."""
    verdict = verdict_of(Saving(), "mp")
    assert verdict.passed, verdict.reason


class Counts(nn.Module):
    """Scales by a number of calls that is in checkpoints alone, as extra state."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * (1 + 0.1 * self.calls)

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]


class CountsThroughout(Stack):
    """Counts in blocks, before them and after."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.linear = nn.Sequential(block.linear, Counts())
        self.stem, self.head = (nn.Sequential(one, Counts()) for one in (self.stem, self.head))


@pytest.mark.parametrize("plan", ["mp", "interleaved"])
def test_extra_state_is_saved_by_the_stages_that_run(plan):
    if plan == "interleaved":
        plan = Plan(strategy=plan, micro_batch=4, pp=2, pp_microbatches=2)
    verdict = verdict_of(CountsThroughout(), plan)
    assert verdict.passed or "after resuming" not in verdict.reason, verdict.reason
    assert verdict.passed == (plan == "mp"), verdict.reason  # others count micro-batches


class Averaging(Stack):
    """Has a running mean in an attribute, of each rank's own samples."""

    def __init__(self):
        super().__init__()
        self.mean = torch.zeros(3)

    def forward(self, x):
        made = super().forward(x)
        self.mean = 0.5 * self.mean + 0.5 * made.detach().mean((0, 1))
        return made - self.mean


def test_state_of_ranks_is_the_cause_and_the_worst_is_named():
    verdict = verdict_of(Averaging(), "ddp")
    assert not verdict.passed and "depends on mean in an attribute" in verdict.cause
    worst = verdict.worst_tensor
    assert f"; the worst, {worst}, is off by " in verdict.reason
    assert "add up" not in verdict.reason
    assert f"{verdict.worst_relative_difference:.2g} of its scale" in verdict.reason


class Tied(nn.Module):
    """An embedding whose forward shortens long rows, and which is the head's weight, too."""

    def __init__(self, longest=0.5):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(16, 6, max_norm=longest)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(6, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def next_token(module, batch):
    return nn.functional.cross_entropy(module(batch[0]).flatten(0, 1), batch[1].flatten())


def tokens(step, samples=4):
    drawn = torch.Generator().manual_seed(step)
    return torch.randint(16, (2, samples, 3), generator=drawn).unbind()


def test_max_norm_with_a_tied_head_is_of_the_cut_in_1f1b_and_refused_in_gpipe():
    plans = ["1f1b", "gpipe"]
    found = outpace.verify(Tied(), loss=next_token, batch=tokens, plans=plans).verdicts
    by_cut, refused = found
    assert "writes to embedding.weight with each micro-batch" in by_cut.cause
    assert refused.refused and "in flight need the old value" in refused.reason
    assert "embedding.weight" in refused.reason and "RuntimeError" not in refused.reason


def contrast(module, batch):
    made = module(batch[0]).mean(1)
    scores = made @ made.T
    return nn.functional.cross_entropy(scores, torch.arange(len(made)))


def test_where_only_the_cut_differs_the_cure_is_named():
    verdict = verdict_of(Stack(), "zero3", loss=contrast)
    assert not verdict.passed and "or accept the difference" in verdict.reason
    # Neither helps here, and the check does not refuse it.
    assert not any(one in verdict.reason for one in ("(sum, count)", "sync_", "check off"))
    assert verdict.differences[0].kind == "loss"


def weighted(module, given):
    inputs, targets, weights = given
    off = (module(inputs) - targets).square().mean((1, 2))
    return (off * weights).sum(), weights.sum()


def test_weights_may_sum_to_less_than_one():
    verdict = verdict_of(
        Stack(), "ddp", weighted, given=lambda step: (*batch(step), torch.full((8,), 0.05))
    )
    assert verdict.passed, verdict.reason


def test_a_module_is_compared_in_the_modes_of_its_parts_and_stays_in_them():
    module = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3))
    module.train()[1].eval()

    def given(step):
        drawn = torch.Generator().manual_seed(step)
        return torch.randn(8, 5, generator=drawn), torch.randn(8, 3, generator=drawn)

    # In training mode the running averages would be those of a process that cuts the batch alike.
    verdict = verdict_of(module, "ddp", given=given)
    assert verdict.passed and verdict.cause is None
    assert [part.training for part in module] == [True, False, True, True]
    certificate = outpace.verify(module.eval(), loss=squares, batch=given, plans="ddp")
    assert certificate.passed and "in evaluation mode, as given" in certificate.notes[-1]
    assert not any(part.training for part in module.modules())


def lose_it_altogether(layout):
    whole_step = layout.gradients

    def gradients(batches, given):
        totals = whole_step(batches, given)
        dict(layout.named_parameters())["head.bias"].grad = None
        return totals

    layout.gradients = gradients


def add_one(layout):
    whole_step = layout.gradients

    def gradients(batches, given):
        totals = whole_step(batches, given)
        parameter = dict(layout.named_parameters())["spare"]
        parameter.grad = torch.ones_like(parameter)
        return totals

    layout.gradients = gradients


class Spare(Stack):
    def __init__(self):
        super().__init__()
        self.spare = nn.Parameter(torch.zeros(2))


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lose_it_altogether, "gradient head.bias (step 1) is missing, but exists in one process"),
        (add_one, "gradient spare (step 1) exists, but does not in one process"),
    ],
)
def test_a_gradient_that_only_one_of_the_two_has_is_said_to_be_where(fault, words):
    [verdict] = verify_custom(
        CustomModel(Spare(), squares), batch, plans=["ddp"], spoil=fault
    ).verdicts
    assert words in verdict.reason


class Hanging(Stack):
    def forward(self, x):
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            time.sleep(600)
        return super().forward(x)


class Crashing(Stack):
    def forward(self, x):
        if torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().forward(x)


class Raising(Stack):
    def forward(self, x):
        if torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
            raise ValueError("not on rank 1")
        return super().forward(x)


def test_hangs_crashes_and_errors_are_results():
    verdict = verdict_of(Hanging(), "ddp", time_limit_s=30)
    assert "no end within 30 s (rank 0 was in step 1; rank 1 was in step 1)" in verdict.reason
    verdict = verdict_of(Crashing(), "ddp")
    assert "rank 1 failed in step 1: ended by SIGSEGV" in verdict.reason
    verdict = verdict_of(Raising(), "ddp")
    assert "rank 1 failed in step 1: ValueError: not on rank 1" in verdict.reason


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"plans": "zero4"}, "there is no strategy 'zero4'. Did you mean"),
        ({"plans": "cp"}, "only outpace's own attention"),
        ({"plans": "ddp", "nproc": 3}, "cannot be divided among 3"),
        ({"plans": [outpace.Plan(strategy="ddp", dp_replicate=2, micro_batch=3)]}, "multiple"),
        ({"loss": lambda m, b: m(b[0])}, "^the loss is a tensor of shape .8, 4, 3.; it must be"),
        ({"loss": lambda m, b: m(b)}, "^one process cannot train Stack on this batch: TypeError"),
        ({"loss": lambda m, b: m(b[0]).mean() * torch.rand(())}, "draws random numbers"),
        ({"loss": nn.Linear(2, 2)}, "Linear as the loss, with parameters that the module does not"),
    ],
)
def test_what_cannot_be_verified_is_refused(options, why):
    with pytest.raises(BadInputError, match=why.replace("(", r"\(")):
        outpace.verify(Stack(), **{"loss": squares, "batch": batch, "plans": "ddp", **options})


FILE = """
import torch
import torch.distributed as dist
from torch import nn

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 12
    def __getitem__(self, index):
        return torch.randn(5, generator=torch.Generator().manual_seed(index)), torch.ones(3)

def loss(module, batch):
    return (module(batch[0]) - batch[1]).square().mean()

def build():
    torch.manual_seed(0)
    layers = [nn.Linear(5, 5) for _ in range(3)]
    return {"module": nn.Sequential(*layers, nn.Linear(5, 3)), "loss": loss, "dataset": Data(),
            "layouts": {"0": "colwise_gather_output"}}

def largest(module, batch):
    return (module(batch[0]) - batch[1]).square().amax()

def wrong():
    return {**build(), "loss": largest}
"""


SPARSE = """
import torch
import torch.distributed as dist
from torch import nn

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return torch.tensor(index), torch.ones(3)

def loss(module, batch):
    return (module(batch[0]) - batch[1]).square().mean()

def build():
    return nn.Sequential(nn.Embedding(8, 3, sparse=True), nn.Linear(3, 3)), loss, Data()
"""


def test_sparse_gradients_are_refused_by_both_commands(tmp_path, capfd):
    file = tmp_path / "mine.py"
    file.write_text(SPARSE)
    model = f"--model={file}:build"
    assert main(["verify", model]) == 2
    assert main(["train", model, "--global-batch=4", "--steps=1", f"--out={tmp_path}/run"]) == 2
    said = capfd.readouterr().err
    assert said.count("0.weight has sparse gradients") == said.count("Use sparse=False.") == 2


def test_the_command_proves_a_file_and_keeps_a_certificate(tmp_path, capfd, monkeypatch):
    file, kept = tmp_path / "mine.py", tmp_path / "certificate.json"
    file.write_text(FILE)

    def verify(function, *more):
        code = main(["verify", "--model", f"{file}:{function}", *more])
        said = capfd.readouterr()
        return code, said.out, said.err

    asked = ("--strategy", "zero2", "tp", "mp")  # with commas, or without
    code, out, err = verify("build", *asked, "--out", str(kept), "--json")
    # 5 rows cannot be shared by two: a refusal is no difference.
    assert code == 0, err
    certificate = Certificate.load(kept)
    written = json.loads(kept.read_text())
    assert written.pop("xxh3_128") and json.loads(out) == written
    assert certificate.module == f"{file}:build" and certificate.seq_len is None
    verdicts = {verdict.strategy: verdict for verdict in certificate.verdicts}
    assert verdicts["zero2"].passed and verdicts["mp"].passed
    assert verdicts["tp"].refused and "cannot share evenly" in verdicts["tp"].reason
    code, out, err = verify("wrong", "--strategy", "ddp")
    assert code == 1 and "ddp: results differ from those of a single process" in err
    assert "(sum, count)" in " ".join(out.split())
    code, _, err = verify("nothing", "--strategy", "ddp")
    assert code == 2 and "no function 'nothing'" in err
    failed = verdicts["zero2"].model_copy(update={"passed": False, "reason": "it is off"})
    given = certificate.model_copy(update={"verdicts": (failed,)})
    monkeypatch.setattr("outpace.experiment.module_verify.verify_custom", lambda *a, **k: given)
    code, out, err = verify("build", "--strategy", "zero2", "--json")
    assert code == 1 and "zero2: results differ from those" in err
    assert json.loads(out)["verdicts"][0]["reason"] == "it is off"  # and nothing else


def test_a_run_is_proved_whatever_its_micro_batch_is(tmp_path, capfd):
    file, kept = tmp_path / "mine.py", tmp_path / "run"
    file.write_text(FILE)
    code = main(
        ["train", "--model", f"{file}:build", "--out", str(kept), "--device", "cpu", "--steps", "1",
         "--micro-batch", "16", "--global-batch", "16", "--precision", "fp32"]
    )  # fmt: skip
    assert code == 0, capfd.readouterr().err
    trained = RunRecord.load(kept / "run.json")
    plan = Plan(strategy="ddp", dp_replicate=2, micro_batch=16)
    trained.model_copy(update={"plan": plan}).save(kept / "run.json")
    code = main(["verify", "--run", str(kept), "--nproc", "3"])
    assert code == 0, capfd.readouterr().err
    certificate = Certificate.load(kept / "certificate.json")
    assert certificate.passed and certificate.processes == 2
    PlanFile.from_plan(plan, None, None).save(tmp_path / "plan.json")
    out = tmp_path / "certificate.json"
    code = main(
        ["verify", "--model", f"{file}:build", "--plan", str(tmp_path / "plan.json"),
         "--out", str(out)]
    )  # fmt: skip
    assert code == 0, capfd.readouterr().err
    assert Certificate.load(out).global_batch == 32  # the plan is proved as it is


def test_every_strategy_is_taken_or_refused_with_a_reason():
    assert {name for name in STRATEGIES if refused_strategy(name)} == {"dp", "ps", "cp", "3d"}
