"""Activations that are kept elsewhere: same gradients, each once, back before they are needed."""

import pytest
import torch
from torch import nn

from outpace.nn.compilation import compile_forwards, is_compiled, without_compilation
from outpace.nn.model_options import apply_options
from outpace.nn.offload import DiskStore, offload_activations
from outpace.nn.scratch_files import Scratch
from outpace.records.errors import BadInputError
from outpace.records.plan import Plan

BLOCKS = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)
        self.gate = nn.Linear(64, 128)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return x + self.drop(self.down(torch.tanh(self.up(x)) * self.gate(x)))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(BLOCKS)))


def gradients(module, device="cpu", backwards=1):
    torch.manual_seed(1)
    x = torch.randn(32, 64).to(device).requires_grad_()
    loss = module(x).square().sum()
    for number in range(backwards):
        loss.backward(retain_graph=number + 1 < backwards)
    return [x.grad, *(p.grad for p in module.parameters())]


class RecordingStore(DiskStore):
    """Tells what happens to tensors, in its order."""

    def __init__(self, scratch: Scratch) -> None:
        super().__init__(scratch)
        self.events: list[tuple[str, int]] = []
        self.kept: list[object] = []

    def store(self, tensor):
        parcel, number, place = super().store(tensor), len(self.kept), self
        self.kept.append(tensor.shape)

        class Told:
            def prefetch(self):
                place.events.append(("prefetch", number))
                parcel.prefetch()

            def open(self):
                place.events.append(("open", number))
                return parcel.open()

        return Told()


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
@pytest.mark.parametrize("backwards", [1, 2])
def test_gradients_are_the_same_to_the_last_bit(checkpointing, backwards):
    if checkpointing == "selective" and backwards == 2:
        pytest.skip("torch's selective checkpointing has one backward")
    options = {"checkpointing": checkpointing}
    plain, moved, scratch = model(), model(), Scratch()
    apply_options(plain, Plan.parse(options, "test"))
    apply_options(moved, Plan.parse({**options, "offload_activations": "disk"}, "test"),
                 scratch=scratch)  # fmt: skip
    known = gradients(plain, backwards=backwards)
    for _ in range(2):
        moved.zero_grad()
        taken = scratch.taken_bytes
        found = gradients(moved, backwards=backwards)
        assert all(torch.equal(a, b) for a, b in zip(known, found, strict=True))
    assert scratch.taken_bytes == taken > 0  # the second pass used the first one's memory


def test_a_block_is_fetched_while_the_one_after_it_is_computed():
    module = model()
    place = RecordingStore(Scratch())
    offload_activations(list(module), place)
    gradients(module)
    each, left = divmod(len(place.kept), BLOCKS)
    # The input, which two layers save, once; tanh's and the gate's output, their product, the mask.
    assert (each, left) == (5, 0), place.kept
    first_open = {}
    fetched = {}
    for at, (what, number) in enumerate(place.events):
        seen = first_open if what == "open" else fetched
        seen.setdefault(number // each, at)
    for block in range(BLOCKS - 1):
        assert fetched[block] < first_open[block]
        assert fetched[block] < min(
            at for at, (what, number) in enumerate(place.events)
            if what == "open" and number // each == block + 1
        )  # fmt: skip


def test_nothing_is_kept_where_there_is_no_backward_to_come():
    module, scratch = model(), Scratch()
    offload_activations(list(module), DiskStore(scratch))
    with torch.no_grad():
        module(torch.randn(32, 64))
    assert scratch.taken_bytes == 0


def test_host_memory_is_no_other_place_on_a_cpu():
    with pytest.raises(BadInputError, match="Use offload_activations disk"):
        apply_options(model(), Plan.parse({"offload_activations": "cpu"}, "test"))


@pytest.mark.gpu
def test_a_gpu_keeps_less_and_computes_the_same():
    peaks, found = [], []
    for where in ("none", "cpu"):
        module = model().cuda()
        apply_options(module, Plan.parse({"offload_activations": where}, "test"))
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.manual_seed(1)
        x = torch.randn(1 << 16, 64, device="cuda")
        torch.cuda.manual_seed(2)
        module(x).square().sum().backward()
        peaks.append(torch.cuda.max_memory_allocated())
        found.append([p.grad for p in module.parameters()])
    assert peaks[1] < 0.8 * peaks[0]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the compiler warns of its own doings
def test_a_compiled_block_keeps_what_it_saves_elsewhere():
    """Hooks are outside of what is compiled; a model of one block, as compiling takes long."""
    plain, moved = nn.ModuleList([Block()]), nn.ModuleList([Block()])
    moved.load_state_dict(plain.state_dict())
    for drop in (plain[0].drop, moved[0].drop):
        drop.p = 0.0
    place = RecordingStore(Scratch())
    compile_forwards(list(moved))
    offload_activations(list(moved), place)
    assert is_compiled(moved)
    known, found = gradients(plain[0]), gradients(moved[0])
    for one, other in zip(known, found, strict=True):
        torch.testing.assert_close(one, other)
    assert place.kept and {kind for kind, _ in place.events} == {"open"}
    with without_compilation(moved), torch.no_grad():
        moved[0](torch.randn(4, 64))
