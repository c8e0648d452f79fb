"""From what was asked for to a layout."""

import pytest
import torch

from outpace.catalog.accelerators import find_accelerator
from outpace.jobs.defaults import note_passes, resolve_plan, with_axes_that_fit
from outpace.probing.hardware.machine import identify
from outpace.records.axes import fill_axes
from outpace.records.errors import BadInputError
from outpace.records.plan import AXES
from outpace.records.ranks import Ranks
from outpace.records.settings import TrainSettings


@pytest.mark.parametrize("axis", ["tp", "pp", "cp", "dp_shard"])
@pytest.mark.parametrize(("world_size", "now"), [(1, "single"), (3, "ddp")])
def test_a_layout_for_other_ranks_is_left_when_a_run_is_resumed(axis, world_size, now):
    settings = TrainSettings.parse(
        {axis: 2, "resume": True, "out": "run", "micro_batch": 4, "strategy": None}, "test"
    )
    said = []
    recorded = {axis: "run.json", "micro_batch": "run.json"}
    ranks = Ranks(world_size=world_size, local_world_size=world_size)
    found = with_axes_that_fit(settings, ranks, recorded, said.append)
    assert getattr(found, axis) is None and found.micro_batch is None
    assert said == [
        f"the run's layout was {axis} 2, which is not possible on {world_size} "
        f"process{'es' if world_size > 1 else ''}; the run resumes with {now}"
    ]
    # What is asked for now, and what fits, stays.
    for origins, size in (({axis: "command line"}, world_size), (recorded, 2)):
        ranks = Ranks(world_size=size, local_world_size=size)
        assert with_axes_that_fit(settings, ranks, origins, said.append) is settings
    assert len(said) == 1


@pytest.mark.parametrize("axis", ["tp", "pp", "cp", "dp_shard"])
def test_axes_of_more_ranks_than_there_are(axis):
    asked = {one: 2 if one == axis else None for one in AXES}
    flag = f"--{axis.replace('_', '-')}"
    said = rf"{axis} 2 needs 2 processes, but there is 1\. Start 2 \(--nproc 2\), or leave {flag}"
    with pytest.raises(BadInputError, match=said):
        fill_axes("single", 1, asked)


@pytest.mark.parametrize(
    ("asked", "remedy"),
    [
        ({"global_batch": 16}, "--global-batch 64, or --nproc 16."),
        ({"global_batch": 100}, "--global-batch 64 or 128, or --nproc 50."),
        ({"global_batch": 12, "tp": 2, "strategy": "3d"}, "--global-batch 32, or --nproc 24."),
        ({"global_batch": 1}, "--global-batch 64."),
        ({"global_batch": 16, "dp_shard": 64}, "--global-batch 64."),
        ({"global_batch": 16, "nproc": 32}, "--global-batch 64."),  # of two hosts
    ],
)
def test_a_batch_that_ranks_cannot_share_is_refused_with_what_divides(asked, remedy):
    settings = TrainSettings.parse({"nproc": 64, **asked}, "test")
    ranks = Ranks(world_size=64, local_world_size=settings.nproc)
    with pytest.raises(BadInputError) as refused:
        resolve_plan(settings, ranks, torch.device("cpu"), identify(find_accelerator))
    assert str(refused.value).endswith(f"data-parallel ranks. Use {remedy}")


def test_a_step_that_reads_the_data_many_times_is_noted():
    assert note_passes(10**6, 535) == (
        "each step reads the 535 samples of the data 1,869 times (--global-batch 1000000)"
    )
    assert note_passes(99, 10) is None and note_passes(100, 10) is not None
