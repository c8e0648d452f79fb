"""The plan that a format writes, with the numbers that all formats need, and the result.

Ranks, shards and micro-batches as other trainers count them are derived here, once.
"""

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

from outpace.records.errors import BadInputError
from outpace.records.model import ModelSpec
from outpace.records.outline import OUTLINE_FORMATS, Outline
from outpace.records.plan import Checkpointing, Plan
from outpace.records.strategies import TRAITS

Stage = Literal[0, 1, 2, 3]
# Devices of a host, where a command has to name both: a plan knows ranks only.
HOST = 8


class Note(str):
    """A sentence on something that the plan does not cover or leaves to a script; it stays the
    same.
    """

    __slots__ = ()


class ScriptEdit(Note):
    """A Note on an edit of the user's script: the plan's time and memory hold after this edit."""

    __slots__ = ()


class Replacement(str):
    """A sentence on a replacement for a part of the plan.

    `fields` are the fields of the plan that the configuration describes instead; an option that
    is left out has its default there.
    """

    fields: Mapping[str, Any]

    def __new__(cls, sentence: str, **fields: Any) -> Self:
        """Return the sentence, with the plan's fields as they are written."""
        found = super().__new__(cls, sentence)
        found.fields = fields
        return found


@dataclass(frozen=True)
class ExportedPlan:
    """A plan as the configuration of another trainer.

    `text` is the content of a file called `file_name`, with which `command` starts training.
    `notes` are sentences on what the configuration cannot express; formats with comments have them
    in `text` too. Those that are not a Note change the plan: `differences`.
    """

    text: str
    file_name: str
    command: str
    notes: tuple[str, ...]

    @property
    def differences(self) -> tuple[str, ...]:
        """Sentences on parts of the plan that are not expressed: memory or time would differ."""
        return tuple(sentence for sentence in self.notes if not isinstance(sentence, Note))

    @property
    def edits(self) -> tuple[str, ...]:
        """Sentences on what the user's script has to do before it trains as planned."""
        return tuple(sentence for sentence in self.notes if isinstance(sentence, ScriptEdit))

    def written_plan(self, plan: Plan) -> tuple[Plan | None, bool]:
        """Return the plan that `text` describes, and whether all that was replaced is known.

        The plan is None if what is known of it is not a valid plan.
        """
        values = plan.model_dump()
        for sentence in self.differences:
            values |= getattr(sentence, "fields", {})
        known = all(isinstance(sentence, Replacement) for sentence in self.differences)
        try:
            return Plan.parse(values, "plan"), known
        except BadInputError:
            return None, False

    def with_path(self, path: Path) -> Self:
        """Return the same in a file of another name, in text and command."""
        there = str(path)
        return replace(
            self,
            file_name=there,
            command=self.command.replace(self.file_name, shlex.quote(there)),
        )

    @property
    def commented(self) -> bool:
        """Return whether `text` has the sentences too: JSON has no comments."""
        return not self.text.startswith("{")


@dataclass(frozen=True)
class RecomputedBlocks:
    """The blocks that recompute their activations, as well as one mode can express them.

    `mode` is what most of these blocks do, `count` the number of them, `every` K where these are
    each K-th from the first, None if they lie otherwise.
    """

    mode: Checkpointing
    count: int
    every: int | None
    alike: bool


@dataclass(frozen=True)
class ExportRequest:
    """A plan for a model and a batch, to be written down for another trainer.

    `model` is an outline where outpace knows only its dimensions; `reference` is what the user
    named the model by.
    """

    plan: Plan
    model: ModelSpec | Outline
    global_batch: int
    seq_len: int
    reference: str | None = None

    @property
    def spec(self) -> ModelSpec:
        """The model as outpace builds it. Raises BadInputError if only its outline is known."""
        if isinstance(self.model, Outline):
            raise BadInputError(
                f"of {self.model.name} the dimensions are known to plan with, but not all that "
                "this format has to say of a model. Use one that holds none: "
                f"{', '.join(OUTLINE_FORMATS)}, outpace."
            )
        return self.model

    @property
    def layers(self) -> int:
        """Blocks of the model."""
        return self.model.layers

    @property
    def accumulation(self) -> int:
        """Passes of a data-parallel share in a step. Raises BadInputError."""
        return self.plan.accumulation(self.global_batch)

    @property
    def passes(self) -> int:
        """Micro-batches of a data-parallel share in a step, of a pipeline or one by one."""
        return self.plan.pp_microbatches * self.accumulation

    @property
    def workers(self) -> int:
        """Ranks that compute: all but parameter servers."""
        return self.plan.world_size - self.plan.servers

    @property
    def stage(self) -> Stage:
        """ZeRO stage: 0 shards nothing, 1 optimizer state, 2 gradients too, 3 parameters too."""
        if self.plan.strategy != "3d":
            return TRAITS[self.plan.strategy].zero
        return self.plan.zero if self.plan.dp_shard * self.plan.cp > 1 else 0

    @property
    def recomputed_blocks(self) -> RecomputedBlocks:
        """The plan's checkpointing. Raises BadInputError if it is of another depth."""
        modes = self.plan.modes(self.layers)
        at = [index for index, mode in enumerate(modes) if mode != "none"]
        if not at:
            return RecomputedBlocks("none", 0, 1, alike=True)
        kinds = [modes[index] for index in at]
        mode = max(dict.fromkeys(kinds), key=kinds.count)
        every = at[1] - at[0] if len(at) > 1 else len(modes)
        regular = at == list(range(0, len(modes), every))
        return RecomputedBlocks(
            mode, len(at), every if regular else None, alike=len(set(kinds)) == 1
        )

    @property
    def recomputes_all(self) -> bool:
        """Whether every block is recomputed whole. Raises as `recomputed_blocks`."""
        done = self.recomputed_blocks
        return done.mode == "full" and done.alike and done.count == self.layers

    @property
    def title(self) -> str:
        """The plan in one line: the model, the ranks and the batch."""
        model, plan = self.model, self.plan
        name = model.name if isinstance(model, Outline) else model.family
        return (
            f"{name}, {model.layers} layers × {model.hidden}, sequences of {self.seq_len}: "
            f"{plan.strategy}, {plan.mesh}; {plan.identity(self.global_batch)}"
        )


def hosts(ranks: int) -> tuple[int, int]:
    """Return the number of hosts, and of ranks on each, for hosts of up to HOST devices."""
    each = next(size for size in range(min(HOST, ranks), 0, -1) if ranks % size == 0)
    return ranks // each, each


def fold_pipeline(request: ExportRequest, over: int) -> tuple[int, int, int]:
    """Replace a pipeline over `over` ranks by data parallelism, for the same global batch.

    Returns the number of ranks (as many of them as the batch can be divided over), the
    micro-batch and the accumulation. Raises BadInputError.
    """
    plan = request.plan
    share = plan.micro_batch * request.passes
    ranks = math.gcd(over, share)
    each = share // ranks
    micro = next(size for size in range(min(plan.micro_batch, each), 0, -1) if each % size == 0)
    return ranks, micro, each // micro
