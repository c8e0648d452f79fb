"""What `outpace memory` makes of settings that training would settle on its way."""

import pytest

from outpace.catalog.node_names import find_node
from outpace.jobs.memory.query import question
from outpace.records.errors import BadInputError
from outpace.records.settings import TrainSettings

DEFAULTS = dict.fromkeys(TrainSettings.model_fields, "default")


def test_the_optimizer_in_backward_has_one_micro_batch():
    asked = question(
        TrainSettings(optimizer_in_backward=True, clip=0, nproc=2, strategy="zero3"),
        DEFAULTS,
        None,
        1,
    )
    assert asked.ask.accumulation == 1


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"micro_batch": "auto"}, "Give a number of samples"),
        ({"memory_budget": "8GiB"}, "Choose what to recompute"),
        ({"memory_limit": "1GiB"}, "compares a plan with the memory of --machine"),
        ({"task": "classify"}, "which a classifier does not have"),
        ({"precision": "fp8"}, "which this host's CPU does not have. Choose a --machine"),
    ],
)
def test_what_training_finds_or_has_no_trace_is_refused(values, said):
    with pytest.raises(BadInputError, match=said):
        question(TrainSettings.parse(values, "test"), DEFAULTS, None, 1)


@pytest.mark.fakeworld
def test_fp8_is_traced_for_a_machine_that_has_it(tmp_path):
    """Autocast's copies of the blocks' matrices are not there."""
    described = "family='llama'\nlayers=2\nhidden=256\nheads=4\nvocab=512\nmax_positions=64"
    model = tmp_path / "model.toml"
    model.write_text(described)
    settings = TrainSettings(
        model=str(model), precision="fp8", seq_len=64, micro_batch=1, strategy="ddp"
    )
    with pytest.raises(BadInputError, match="which A100 SXM 80 GB does not have"):
        question(settings, DEFAULTS, find_node("dgx-a100"), 1)
    machine, traced = find_node("hgx-h100"), {}
    for precision in ("bf16", "fp8"):
        asked = settings.model_copy(update={"precision": precision})
        traced[precision] = question(asked, DEFAULTS, machine, 1).trace(0)
    copies = {name: one.peak.by_kind.get("weight copies", 0) for name, one in traced.items()}
    assert copies["fp8"] < copies["bf16"]
    assert traced["fp8"].peak_memory_bytes < traced["bf16"].peak_memory_bytes
    assert traced["fp8"].flops == traced["bf16"].flops


def test_a_laptop_is_a_process_and_a_rack_has_many_hosts():
    settings = TrainSettings(model="outpace-tiny", seq_len=64, strategy="zero3")
    laptop = question(settings, DEFAULTS, find_node("laptop"), 2)
    assert laptop.ask.accelerator is None
    assert (laptop.plan.world_size, laptop.ask.ranks_per_host) == (2, 1)
    assert laptop.plan.precision == "fp32"  # whatever this host's own CPU is good at
    rack = question(settings, DEFAULTS, find_node("gb200-nvl72"), 1)
    assert (rack.plan.world_size, rack.ask.ranks_per_host) == (72, 4)
    with pytest.raises(BadInputError, match="which laptop's CPU does not have"):
        fp8 = settings.model_copy(update={"precision": "fp8"})
        question(fp8, DEFAULTS, find_node("laptop"), 1)
