"""Tensors whose rows are split over ranks, gathered on each."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from outpace.launch.forked_job import run_forked
from outpace.nn import dtensor

pytestmark = pytest.mark.gloo


def test_rows_are_gathered_in_any_size(tmp_path):
    """Large and small, in equal parts, unequal ones, and none on the last rank."""

    def act(rank):
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (2,))
        sizes = [(6, 4), (7, 4), (1, 3), (1000, 200), (1001, 200), (8,), (400_000,)]
        wholes = [torch.randn(size) for size in sizes]
        split = [distribute_tensor(one, mesh, [Shard(0)]) for one in wholes]
        for found, whole, part in zip(dtensor.gather_rows(split), wholes, split, strict=True):
            torch.distributed.broadcast(whole, 0)
            assert torch.equal(found, whole) and found.is_contiguous()
            assert found.data_ptr() != part.to_local().data_ptr()

    ends = run_forked(2, act, 240.0, tmp_path / "job")
    assert all(end.fine for end in ends), [end.said for end in ends]
