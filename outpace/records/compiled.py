"""Strategies that can compile the forward pass, and the region that each compiles.

`tests/parallel/options.py compile` tries them all: two steps in fp64 with Inductor, compared with
an uncompiled single process. docs/concepts/compile.md describes this table.
"""

from collections.abc import Mapping
from typing import Literal, Self

from pydantic import model_validator

from outpace.records.base import Record
from outpace.records.plan import Plan
from outpace.records.strategies import TRAITS, Regions

# What is compiled as one unit: the model's whole forward, or each of its blocks.
Region = Literal["whole", "blocks"]


class CompileTrial(Record):
    """Result of training with torch.compile, compared with training in eager mode.

    `works`: whether both give equal numbers; otherwise, `error` is what torch raises. `by_default`:
    whether to compile on CUDA by default. `breaks`: calls that break a region into several graphs.
    `issue`: the error's entry in torch's issue tracker.
    """

    works: bool
    by_default: bool = True
    region: Region = "blocks"
    breaks: str | None = None
    error: str | None = None
    issue: str | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.works == (self.error is not None):
            raise ValueError(
                f"works is {self.works} and error is {self.error!r}. Give an error if and only if "
                "works is False"
            )
        return self


_WHOLE = CompileTrial(works=True, region="whole")
# Between blocks, `fully_shard` gathers parameters, pipelines send activations, and the ring sends
# gradients. With a single region, all gradients would arrive at the end of its backward.
_BLOCKS = CompileTrial(works=True)
_SENDS = CompileTrial(
    works=True, by_default=False, breaks="torch.distributed.P2POp and batch_isend_irecv"
)
# Do not follow the error's advice: with donated buffers off, training runs, but the gradients of
# the blocks' weights are wrong (after two steps, these weights were off by their whole value).
_SPLIT = CompileTrial(
    works=False,
    by_default=False,
    error="This backward function was compiled with non-empty donated buffers which requires "
    "create_graph=False and retain_graph=False.",
    issue="pytorch#161904",
)

# torch splits DDP's region at the boundaries of its gradient buckets. Under tp, a DTensor created
# before the first block reads a tensor's value, which splits the whole model into five graphs.
_KINDS: Mapping[Regions, CompileTrial] = {
    "whole": _WHOLE, "blocks": _BLOCKS, "sends": _SENDS, "split": _SPLIT,
}  # fmt: skip
COMPILED: Mapping[str, CompileTrial] = {
    **{
        name: _KINDS[traits.compiled]
        for name, traits in TRAITS.items()
        if traits.compiled is not None
    },
    "dp": _WHOLE.model_copy(update={"by_default": False}),  # a baseline for comparisons
}


def compiled_region(plan: Plan) -> Region:
    """Return the region that a plan with `compile` compiles as one unit.

    Plans that offload parameters or activations, or update in the backward, work block by block,
    so they compile by block.
    """
    offloads = plan.offload_parameters != "none" or plan.offload_activations != "none"
    by_block = plan.optimizer_in_backward or offloads
    known = COMPILED.get(plan.strategy)
    return "blocks" if by_block or known is None else known.region


def graph_obstacle(plan: Plan, dropout: float = 0.0) -> str | None:
    """Return why a plan's forward and backward cannot be captured as CUDA graphs, or None.

    A graph replays the same kernels without host code in between. `dropout`: the model's rate.
    """
    if plan.recomputes and (dropout > 0 or plan.lora_dropout > 0):
        # The graph of the backward would not draw the same numbers as that of the forward.
        return "activation checkpointing must draw dropout's random numbers again in the backward"
    if plan.strategy != "single":
        return f"strategy {plan.strategy} communicates between its kernels"
    for name in ("offload_activations", "offload_parameters", "offload_optimizer"):
        if getattr(plan, name) != "none":
            return f"{name} {getattr(plan, name)} copies between its kernels"
    for name in ("optimizer_in_backward", "empty_cache"):
        if getattr(plan, name):
            return f"{name} needs work on the host between kernels"
    return None
