"""Pipeline schedules: the placement of stages on ranks, and the micro-batches they support."""

import re
from collections.abc import Mapping
from typing import Literal

from pydantic import PositiveInt

from outpace.records.base import Record


class Schedule(Record):
    """A schedule's placement of stages, and whether it splits the backward.

    "loop": stage s is on rank s mod p. "v": the ranks' second stages are in reverse order, so rank
    0 has the first and the last stage. `splits_backward`: gradients of inputs are computed first,
    and gradients of weights later, when the pipeline would be idle (Qi et al., arXiv 2401.10241,
    §2).
    """

    stages_per_rank: PositiveInt = 1
    placement: Literal["loop", "v"] = "loop"
    splits_backward: bool = False

    def rank_of(self, stage: int, pp: int) -> int:
        """Return the pipeline rank of a stage."""
        lap, place = divmod(stage, pp)
        return pp - 1 - place if self.placement == "v" and lap % 2 else place


SCHEDULES: Mapping[str, Schedule] = {
    "mp": Schedule(),
    "gpipe": Schedule(),
    "1f1b": Schedule(),
    "interleaved": Schedule(stages_per_rank=2),
    "loopedbfs": Schedule(stages_per_rank=2),
    "zb": Schedule(stages_per_rank=2, splits_backward=True),
    "zbv": Schedule(stages_per_rank=2, placement="v", splits_backward=True),
    "dualpipev": Schedule(stages_per_rank=2, placement="v", splits_backward=True),
}

# Work of a stage: forward, whole backward, or the backward for inputs or for weights alone.
Kind = Literal["F", "B", "I", "W"]
_TRACED = re.compile(r"stage (\d+): ([FBIW])")


def traced_name(kind: Kind, stage: int) -> str:
    """Return the name that a stage's work has in a trace: "stage 2: F"."""
    return f"stage {stage}: {kind}"


def traced_action(name: str) -> tuple[Kind, int] | None:
    """Parse the kind and stage from a `traced_name`; None for other names in a trace."""
    found = _TRACED.fullmatch(name)
    if found is None:
        return None
    kinds: dict[str, Kind] = {"F": "F", "B": "B", "I": "I", "W": "W"}
    return kinds[found[2]], int(found[1])


# Why a split backward does not support an option, and what to use instead.
_SPLIT_REPLICAS = (
    "so replicas would average gradients before they are complete (pytorch#144530). Set "
    "dp_replicate to 1, or use 1f1b"
)
_SPLIT_CHECKPOINTING = (
    "so checkpointing would recompute a block for each of its weights. Use checkpointing "
    "none, or interleaved"
)
_SPLIT_COMPILED = (
    "but a compiled block has a single backward (pytorch#161904). Leave compile out, or use "
    "interleaved"
)
_SPLIT_CHUNKED = "but the chunked loss has a single backward. Use loss plain, or interleaved"


def refusal(
    strategy: str,
    *,
    pp: int,
    microbatches: int,
    replicas: int = 1,
    checkpointing: bool = False,
    compiled: bool = False,
    chunked: bool = False,
) -> str | None:
    """Return why a schedule does not support these options, and an alternative; None if it does."""
    schedule = SCHEDULES.get(strategy)
    if schedule is None:
        if microbatches > 1:
            return (
                f"strategy {strategy} is not a pipeline, but pp_microbatches is "
                f"{microbatches}. Use micro_batch alone: the rest of the global batch is "
                "accumulated"
            )
        return None
    number = _microbatches_refusal(strategy, schedule, pp, microbatches)
    if number is not None or not schedule.splits_backward:
        return number
    reasons = {
        _SPLIT_REPLICAS: replicas > 1,
        _SPLIT_CHECKPOINTING: checkpointing,
        _SPLIT_COMPILED: compiled,
        _SPLIT_CHUNKED: chunked,
    }
    why_not = next((reason for reason, holds in reasons.items() if holds), None)
    return why_not and (
        f"{strategy} splits the backward into parts for inputs and for weights, {why_not}"
    )


def _microbatches_refusal(
    strategy: str, schedule: Schedule, pp: int, microbatches: int
) -> str | None:
    stages = pp * schedule.stages_per_rank
    asked = f"pp_microbatches is {microbatches}"
    if strategy == "mp" and microbatches > 1:
        return f"mp has one micro-batch in flight, but {asked}. Use 1, or strategy gpipe"
    if strategy == "1f1b" and microbatches < stages:
        return f"1f1b needs a micro-batch for each of {stages} stages, but {asked}. Use gpipe"
    if strategy == "dualpipev" and microbatches < stages:
        return f"dualpipev needs a micro-batch for each of {stages} stages, but {asked}. Use zbv"
    rounds = max(1, microbatches // pp)
    if strategy in ("interleaved", "zb") and microbatches % rounds:
        return (
            f"{strategy} works in rounds of about {pp} micro-batches, but {asked}, which cannot be "
            f"divided into {rounds} rounds. Use {microbatches - microbatches % pp}"
        )
    return None


def default_microbatches(strategy: str, pp: int, samples: int) -> int:
    """Return the default number of micro-batches for a rank's `samples`.

    It is the smallest supported divisor of `samples` that is at least the number of stages, or else
    the largest supported divisor.
    """
    schedule = SCHEDULES.get(strategy)
    if schedule is None or strategy == "mp":
        return 1
    stages = pp * schedule.stages_per_rank
    possible = [
        count
        for count in range(1, samples + 1)
        if samples % count == 0 and refusal(strategy, pp=pp, microbatches=count) is None
    ]
    return next((n for n in possible if n >= stages), max(possible, default=max(1, samples)))
