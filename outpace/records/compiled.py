"""Which strategies train with blocks compiled by torch.compile, as tried with torch 2.13.

`tests/parallel/levers.py compile` tries them all: two steps in float64 against a single process
that compiles nothing, with Inductor's own kernels. docs/compile.md is this table in words.
"""

from collections.abc import Mapping
from typing import Self

from pydantic import model_validator

from outpace.records.base import Record
from outpace.records.pipelines import SCHEDULES


class Compiled(Record):
    """What came of it: the same numbers, or an `error` that torch raises.

    `breaks`: what the compiler leaves to Python, so that a block is more than one graph. `issue`:
    where torch's own people know of it.
    """

    works: bool
    breaks: str | None = None
    error: str | None = None
    issue: str | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.works == (self.error is not None):
            raise ValueError(f"works is {self.works} and the error {self.error!r}; give one")
        return self


_ONE_GRAPH = Compiled(works=True)
_SENDS = Compiled(works=True, breaks="torch.distributed.P2POp and batch_isend_irecv")
# What the message advises makes it worse: with donated buffers off it runs, and the gradients of
# the blocks' weights are wrong (their weights were off by their whole value after two steps).
_SPLIT = Compiled(
    works=False,
    error="This backward function was compiled with non-empty donated buffers which requires "
    "create_graph=False and retain_graph=False.",
    issue="pytorch#161904",
)

COMPILED: Mapping[str, Compiled] = {
    **dict.fromkeys(("single", "dp", "ps", "ddp", "ring"), _ONE_GRAPH),
    **dict.fromkeys(("zero1", "zero2", "zero3", "hsdp", "tp", "3d"), _ONE_GRAPH),
    "cp": _SENDS,
    **{name: _SPLIT if kind.splits_backward else _ONE_GRAPH for name, kind in SCHEDULES.items()},
}
