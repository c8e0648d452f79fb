"""The optimizer's step in backward: gradients are never all alive."""

import torch

from outpace.nn.loss import LanguageModelObjective
from outpace.nn.transformer import Transformer
from outpace.optim.build import make_optimizer
from outpace.parallel import LayoutRequest, StepHooks, apply
from outpace.records.model import ModelSpec
from outpace.records.plan import Plan
from outpace.records.ranks import Ranks
from outpace.records.settings import TrainSettings
from outpace.trace.allocations import Allocations

SPEC = ModelSpec.parse(
    {"family": "llama", "layers": 8, "hidden": 64, "heads": 2, "kv_heads": 2, "ffn": 256,
     "vocab": 64, "max_positions": 16},
    "test",
)  # fmt: skip


def peak_bytes(in_backward: bool) -> tuple[int, int, float]:
    """Of the second step of plain SGD, which keeps no state; bytes of gradients; the norm."""
    objective = LanguageModelObjective(Transformer(SPEC))
    plan = Plan(optimizer="sgd", optimizer_in_backward=in_backward)
    layout = apply(LayoutRequest(objective, plan, Ranks(), torch.device("cpu")))
    settings = TrainSettings(lr=1e-3, clip=0)
    optimizer = make_optimizer(layout.named_parameters(), "sgd", settings, layout.make_optimizer)
    if in_backward:
        layout.step_in_backward(optimizer)
    tokens = torch.arange(8).view(1, 8)
    batch = {"tokens": tokens, "targets": tokens}
    for step in (1, 2):
        with Allocations() as allocated:
            layout.gradients([batch], StepHooks())
            norm = float(layout.clip(0))
            optimizer.step()
            optimizer.zero_grad()
        assert step or allocated
    return allocated.peak_bytes, sum(p.nbytes for p in layout.model.parameters()), norm


def test_gradients_are_never_all_alive():
    (usual, gradients, norm), (fused, _, same_norm) = peak_bytes(False), peak_bytes(True)
    assert usual > gradients
    # A block's gradients and what its backward needs, of eight blocks.
    assert fused < usual - gradients / 2
    assert abs(same_norm / norm - 1) < 1e-5
