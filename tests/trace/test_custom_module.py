"""A user's own module is traced without values, as measured; what looks into values is refused."""

import pytest
import torch
from torch import nn

from outpace.interop.custom_model import CustomModel
from outpace.launch.forked_job import run_forked
from outpace.records.errors import BadInputError
from outpace.records.memory import MemoryAccount
from outpace.records.plan import Plan
from outpace.records.ranks import Ranks
from outpace.records.settings import TrainSettings
from outpace.trace.custom_module import ModuleWorkload, account_of_module
from outpace.trace.measure import measure

pytestmark = [
    pytest.mark.fakeworld,
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
]
SETTINGS = TrainSettings(lr=1e-3)
WIDTH = 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return x + self.norm(self.outer(torch.tanh(self.inner(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def entropy(module, batch):
    return nn.functional.cross_entropy(module(batch["x"]), batch["y"])


def samples(count):
    return {"x": torch.ones(count, WIDTH), "y": torch.zeros(count, dtype=torch.int64)}


def plan_of(strategy, world, **changes):
    axis = "dp_shard" if strategy.startswith("zero") else "dp_replicate"
    values = {"strategy": strategy, "precision": "fp32", "micro_batch": 16, axis: world}
    return Plan.parse({**values, **changes}, "test")


def traced(plan, make=Net, loss=entropy, rank=0, accumulation=2):
    own = CustomModel(make(), loss)
    before = {name: tensor.clone() for name, tensor in own.module.state_dict().items()}
    account = account_of_module(
        own, samples, plan, accumulation=accumulation, rank=rank, settings=SETTINGS,
        accelerator=None, ranks_per_host=8,
    )  # fmt: skip
    after = own.module.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    return account


def test_one_process_is_traced_as_it_is_measured():
    plan = plan_of("single", 1)
    work = ModuleWorkload(lambda: CustomModel(Net(), entropy), samples, plan, 2, SETTINGS)
    found, seen = traced(plan), measure(work, Ranks())
    for kind in ("weights", "optimizer state", "gradients", "activations"):
        assert found.peak.by_kind[kind] == pytest.approx(seen.peak.by_kind[kind], abs=64)
    assert found.peak_memory_bytes == pytest.approx(seen.allocated_bytes, rel=0.02)
    assert found.flops == seen.flops > 0


def test_sharded_weights_and_states_are_a_part_on_each_rank():
    whole, part = traced(plan_of("ddp", 4)).peak.by_kind, traced(plan_of("zero3", 4)).peak.by_kind
    for kind in ("weights", "optimizer state"):
        assert part[kind] < 0.4 * whole[kind]
    assert part["unsharded"] > 0 == whole.get("unsharded", 0)


class Branching(Net):
    def forward(self, x):
        return super().forward(x if x.sum() > 0 else -x)


class Masked(Net):
    def forward(self, x):
        return super().forward(x) + x[x > 0].mean()


class Outside(Net):
    def forward(self, x):
        return super().forward(x) * float(x.detach().numpy().mean())


@pytest.mark.parametrize("make", [Branching, Masked, Outside])
def test_what_looks_into_values_is_refused_with_its_line(make):
    with pytest.raises(BadInputError, match=r"test_custom_module\.py:\d+.*outpace train --memory"):
        traced(plan_of("single", 1), make)


class PenaltyBlock(Block):
    """Leaves a penalty on itself, which the loss reads on the last stage."""

    def __init__(self):
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.1)

    def forward(self, x):
        self.penalty = x.square().mean()
        return self.drop(super().forward(x))


class PenaltyNet(Net):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(PenaltyBlock() for _ in range(4))


def penalised(module, batch):
    return entropy(module, batch) + sum(block.penalty for block in module.blocks)


def staged_plan(strategy):
    changes = {"pp": 2, "micro_batch": 256, "pp_microbatches": 4, "precision": "fp32"}
    return Plan.parse({"strategy": strategy, **changes}, "test")


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("strategy", "off"), [("1f1b", 0.05), pytest.param("zbv", 0.08, marks=pytest.mark.slow)]
)
def test_a_stage_is_traced_as_it_is_measured_beside_the_others(tmp_path, strategy, off):
    """One rank alone knows what all stages send each other; the others' values are not there."""
    plan = staged_plan(strategy)

    def act(rank):
        work = ModuleWorkload(
            lambda: CustomModel(PenaltyNet(), penalised), samples, plan, 1, SETTINGS
        )
        seen = measure(work, rank.ranks)
        (tmp_path / f"{rank.ranks.rank}.json").write_text(seen.model_dump_json())

    ends = run_forked(2, act, 240.0, tmp_path / "job")
    assert all(end.fine for end in ends), [end.said for end in ends]
    for rank in range(2):
        seen = MemoryAccount.model_validate_json((tmp_path / f"{rank}.json").read_text())
        found = traced(plan, PenaltyNet, penalised, rank=rank, accumulation=1)
        for kind in ("weights", "optimizer state", "gradients"):
            assert found.peak.by_kind[kind] == pytest.approx(seen.peak.by_kind[kind], rel=0.02)
        # In a trace messages are there at once, and none is on its way.
        assert found.peak_memory_bytes == pytest.approx(seen.allocated_bytes, rel=off)
        assert found.flops == seen.flops > 0


def test_a_compiled_module_saves_less_and_does_as_much():
    eager, compiled = (
        traced(plan_of("single", 1, compile=on, micro_batch=512), Net) for on in (False, True)
    )
    assert compiled.peak_memory_bytes < eager.peak_memory_bytes
    assert compiled.flops == eager.flops


def test_what_a_compiled_block_leaves_on_itself_is_refused_with_a_way_out():
    with pytest.raises(BadInputError, match="leave out --compile for an upper bound"):
        traced(plan_of("single", 1, compile=True), PenaltyNet, penalised)
