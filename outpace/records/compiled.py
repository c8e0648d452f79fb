"""Strategies that train with compiled forward passes, and how large a region is compiled.

`tests/parallel/options.py compile` tries them all: two steps in float64 with Inductor's kernels,
compared with a single process without compilation. docs/concepts/compile.md describes this table.
"""

from collections.abc import Mapping
from typing import Literal, Self

from pydantic import model_validator

from outpace.records.base import Record
from outpace.records.plan import Plan
from outpace.records.strategies import TRAITS, Regions

# Compiled regions: the model's whole forward, or each of its blocks.
Region = Literal["whole", "blocks"]


class CompileTrial(Record):
    """Result of a trial: the same numbers, or an `error` that torch raises.

    `by_default`: compiled on CUDA if the user does not choose. `region`: what is compiled as one
    unit. `breaks`: code that the compiler leaves to Python, which splits a region into several
    graphs. `issue`: the report in torch's issue tracker.
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
            raise ValueError(f"works is {self.works} and error is {self.error!r}. Give one of them")
        return self


_WHOLE = CompileTrial(works=True, region="whole")
# Between blocks, `fully_shard` gathers parameters, pipelines send, and the ring sends gradients.
# The backward of a single region would deliver gradients only at its end.
_BLOCKS = CompileTrial(works=True)
_SENDS = CompileTrial(
    works=True, by_default=False, breaks="torch.distributed.P2POp and batch_isend_irecv"
)
# Do not follow the message's advice: with donated buffers off, it runs, but the gradients of the
# blocks' weights are wrong (after two steps, these weights were off by their whole value).
_SPLIT = CompileTrial(
    works=False,
    by_default=False,
    error="This backward function was compiled with non-empty donated buffers which requires "
    "create_graph=False and retain_graph=False.",
    issue="pytorch#161904",
)

# torch splits DDP's region where its buckets of gradients end. Under tp, a DTensor created before
# the first block reads a tensor's value, which splits the whole model into five graphs.
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
    """Return the region that a plan with `compile` compiles as one unit. Plans that work block by
    block (freeing gradients, fetching parameters or activations) also compile by block.
    """
    elsewhere = plan.offload_parameters != "none" or plan.offload_activations != "none"
    by_block = plan.optimizer_in_backward or elsewhere
    known = COMPILED.get(plan.strategy)
    return "blocks" if by_block or known is None else known.region


def graph_obstacle(plan: Plan, dropout: float = 0.0) -> str | None:
    """Return what prevents capturing a plan's passes as CUDA graphs; None if nothing does.

    A graph does the same work each time, without a break. `dropout`: the model's rate.
    """
    if plan.recomputes and (dropout > 0 or plan.lora_dropout > 0):
        # The second of two graphs would not draw the same numbers as the first.
        return "checkpointing draws the random numbers of dropout again in the backward"
    if plan.strategy != "single":
        return f"strategy {plan.strategy} communicates between its kernels"
    for name in ("offload_activations", "offload_parameters", "offload_optimizer"):
        if getattr(plan, name) != "none":
            return f"{name} {getattr(plan, name)} copies between its kernels"
    for name in ("optimizer_in_backward", "empty_cache"):
        if getattr(plan, name):
            return f"{name} needs work on the host between kernels"
    return None
