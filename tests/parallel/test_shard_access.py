"""Writes to shards between steps: torch's results, mostly without torch's dispatch."""

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from outpace.launch.forked_job import run_forked
from outpace.nn.dtensor import whole
from outpace.parallel import shard_access
from outpace.parallel.refusals import LoopPosition

pytestmark = pytest.mark.gloo
OPERATORS = shard_access._WRITES
SHAPE = 5, 3  # rows that two ranks cannot share evenly


def drawn(seed):
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)).abs() + 0.5


def arguments(operator, mesh, source):
    """The arguments of a write: tensors split by rows, and a `source` of another kind."""

    def split(tensor):
        return distribute_tensor(tensor, mesh, [Shard(0)])

    others = {
        "alike": split(drawn(1)),
        "whole": distribute_tensor(drawn(1), mesh, [Replicate()]),
        "partial": DTensor.from_local(drawn(1), mesh, [Partial()]),
        "row": split(drawn(1))[:1],
        "column": distribute_tensor(drawn(1)[:, :1], mesh, [Shard(0)]),
        "plain": drawn(1),
        "number": torch.tensor(0.7),
    }
    given = [split(drawn(0)), others[source]]
    if operator is torch.ops.aten.lerp_.Scalar:
        given.append(0.3)
    elif len(operator._schema.arguments) - operator._schema.arguments[-1].kwarg_only > 2:
        given.append(split(drawn(2)))
    return given


def written(operator, mesh, source):
    """The whole tensor after a write, and how often it counts as written; or torch's error."""
    given = arguments(operator, mesh, source)
    try:
        result = operator(*given)
    except RuntimeError:
        return "refused"
    assert result is given[0]
    return whole(given[0]), given[0]._version


SOURCES = "alike", "whole", "partial", "row", "column", "plain", "number"


def test_writes_to_shards_are_those_of_torch(tmp_path):
    def act(rank):
        mesh = init_device_mesh("cpu", (2,))
        shard_access.combine_with_whole(True)
        cases = [(operator, source) for operator in OPERATORS for source in SOURCES]
        with torch.no_grad():
            expected = [written(operator, mesh, source) for operator, source in cases]
            shard_access.read_whole_values(LoopPosition())
            for (operator, source), value in zip(cases, expected, strict=True):
                rank.note_phase(f"{operator} {source}")
                found = written(operator, mesh, source)
                if value == "refused":
                    assert found == "refused"
                else:
                    assert torch.equal(found[0], value[0]) and found[1] == value[1]

    ends = run_forked(2, act, 120.0, tmp_path / "job")
    assert all(end.fine for end in ends), ends


def test_optimizers_do_not_dispatch_writes_twice(tmp_path, monkeypatch):
    def act(rank):
        mesh = init_device_mesh("cpu", (2,))
        shard_access.read_whole_values(LoopPosition())
        monkeypatch.setattr(shard_access, "_run_without_handler", None)
        plain = torch.nn.Parameter(drawn(0))
        parts = torch.nn.Parameter(distribute_tensor(drawn(0), mesh, [Shard(0)]))
        for parameter in (plain, parts):
            optimizer = torch.optim.AdamW([parameter], lr=0.1)
            for seed in range(3):
                gradient = drawn(seed)
                if parameter is parts:
                    gradient = distribute_tensor(gradient, mesh, [Shard(0)])
                parameter.grad = gradient
                optimizer.step()
        assert torch.equal(whole(parts.detach()), plain)

    ends = run_forked(2, act, 120.0, tmp_path / "job")
    assert all(end.fine for end in ends), ends


def test_ranks_wait_once_for_a_read_or_a_step_and_not_for_other_meshes(tmp_path):
    """A step may gather thousands of times; a mesh of some ranks is none that others read."""

    def act(rank):
        waits = []

        class Place(LoopPosition):
            def wait_for_all(self, what):
                waits.append(what)

        place = Place()
        mesh = init_device_mesh("cpu", (2,))
        shard_access.read_whole_values(place)
        shard_access.wait_before_communication(place)
        tensor = distribute_tensor(drawn(0), mesh, [Shard(0)])
        assert float(tensor.sum()) == float(drawn(0).sum()) and len(waits) == 1
        tensor.full_tensor(), tensor.full_tensor()
        assert len(waits) == 3
        shard_access.wait_before_communication(place, once=True)
        tensor.full_tensor(), tensor.full_tensor()
        assert len(waits) == 4
        shard_access.wait_before_communication(place)
        alone = DTensor.from_local(drawn(0), DeviceMesh("cpu", [rank.ranks.rank]), [Shard(0)])
        alone.full_tensor(), alone.sum().item()
        assert len(waits) == 4

    ends = run_forked(2, act, 60.0, tmp_path / "job")
    assert all(end.fine for end in ends), ends
