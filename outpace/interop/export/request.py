"""Request to export a plan, with values that all formats need, and the exported plan.

Only this module converts ranks, shards and micro-batches to the way other trainers count them.
"""

import math
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

from outpace.planner.pipeline.stages import even, layers_per_stage
from outpace.records.errors import BadInputError
from outpace.records.model import ModelSpec
from outpace.records.outline import OUTLINE_FORMATS, Outline
from outpace.records.plan import Checkpointing, Plan
from outpace.records.strategies import TRAITS

Stage = Literal[0, 1, 2, 3]
# Devices per host in commands, because a plan has ranks but no hosts.
HOST = 8


class Note(str):
    """A remark on an export that does not mean that it differs from the plan.

    It may name settings that plans do not contain.
    """

    __slots__ = ()


class ScriptEdit(Note):
    """A remark on an edit to the user's script that is needed for the plan's time and memory."""

    __slots__ = ()


class Replacement(str):
    """A sentence that says what an export has instead of a part of the plan.

    `fields` holds the plan's fields that are replaced, with their exported values. Fields that the
    configuration omits have the trainer's defaults.
    """

    fields: Mapping[str, Any]

    def __new__(cls, sentence: str, **fields: Any) -> Self:
        found = super().__new__(cls, sentence)
        found.fields = fields
        return found


@dataclass(frozen=True)
class ExportedPlan:
    """A plan, exported as the configuration of another trainer.

    `text` is the content of the file `file_name`, and `command` starts training with it. `notes`
    are sentences on parts of the plan that the configuration cannot express; formats with comments
    also contain them in `text`. Notes that are not of the class Note mean that the export differs
    from the plan (`differences`). `compose` writes the text when it is first needed, because a
    search reads only the notes of many plans.
    """

    compose: Callable[[], str]
    file_name: str
    command: str
    notes: tuple[str, ...]

    @cached_property
    def text(self) -> str:
        """Content of the configuration file."""
        return self.compose()

    @property
    def differences(self) -> tuple[str, ...]:
        """Sentences on how the export differs from the plan in ways that change memory or time."""
        return tuple(sentence for sentence in self.notes if not isinstance(sentence, Note))

    @property
    def edits(self) -> tuple[str, ...]:
        """Sentences on changes that the user's script needs before it trains as planned."""
        return tuple(sentence for sentence in self.notes if isinstance(sentence, ScriptEdit))

    def written_plan(self, plan: Plan) -> tuple[Plan | None, bool]:
        """Return the plan that the configuration describes, and whether it describes everything.

        The second value is False if the export differs in ways that no field of a plan can express.
        The plan is None if the exported values are not a valid plan.
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
        """Return the export with another file path, which also replaces the one in its command."""
        there = str(path)
        return replace(
            self, file_name=there, command=self.command.replace(self.file_name, shlex.quote(there))
        )

    @property
    def commented(self) -> bool:
        """Return whether `text` contains the notes as comments; JSON has none."""
        return not self.text.startswith("{")


@dataclass(frozen=True)
class RecomputedBlocks:
    """The blocks that recompute activations, in a form that trainers with one mode can express.

    `count` blocks recompute. `mode` is the mode of most of them, and of all if `alike` is set.
    `every` is K if they are every K-th block, starting with the first, and None otherwise.
    """

    mode: Checkpointing
    count: int
    every: int | None
    alike: bool


@dataclass(frozen=True)
class ExportRequest:
    """A plan for a model and a batch, to be exported for another trainer.

    `model` is an outline if only its dimensions are known; `reference` is the user's name for it.
    """

    plan: Plan
    model: ModelSpec | Outline
    global_batch: int
    seq_len: int
    reference: str | None = None

    @property
    def spec(self) -> ModelSpec:
        """The model's spec. Raises BadInputError if only its outline is known."""
        if isinstance(self.model, Outline):
            raise BadInputError(
                f"only the dimensions of {self.model.name} are known, which is enough for "
                "planning, but not for this format. Use a format that does not describe the "
                "model: "
                f"{', '.join(OUTLINE_FORMATS)}, outpace."
            )
        return self.model

    @property
    def layers(self) -> int:
        """Number of blocks of the model."""
        return self.model.layers

    @property
    def accumulation(self) -> int:
        """Number of gradient accumulation steps.

        Raises BadInputError if the plan does not divide the global batch.
        """
        return self.plan.accumulation(self.global_batch)

    @property
    def passes(self) -> int:
        """Number of micro-batches per step on a data-parallel rank, including the pipeline's."""
        return self.plan.pp_microbatches * self.accumulation

    def split_layers(self, stages: int) -> tuple[int, ...]:
        """Return the number of layers in each stage.

        Raises BadInputError if there are fewer layers than stages.
        """
        counts = layers_per_stage(self.spec, stages)
        return even(self.layers, stages) if self.plan.stage_split == "even" else counts

    @property
    def workers(self) -> int:
        """Number of ranks except parameter servers."""
        return self.plan.world_size - self.plan.servers

    @property
    def stage(self) -> Stage:
        """ZeRO stage: 0 shards nothing, 1 optimizer state, 2 also gradients, 3 also parameters."""
        if self.plan.strategy != "3d":
            return TRAITS[self.plan.strategy].zero
        return self.plan.zero if self.plan.dp_shard * self.plan.cp > 1 else 0

    @property
    def recomputed_blocks(self) -> RecomputedBlocks:
        """The plan's checkpointing. Raises BadInputError if it is for another number of layers."""
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
        """Whether every block is fully recomputed. Raises errors like `recomputed_blocks`."""
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
    """Return the number of hosts and of ranks on each, which is at most `HOST`."""
    each = next(size for size in range(min(HOST, ranks), 0, -1) if ranks % size == 0)
    return ranks // each, each


def fold_pipeline(request: ExportRequest, over: int) -> tuple[int, int, int]:
    """Replace a pipeline over `over` ranks with data parallelism, and keep the global batch.

    Returns the number of ranks, which is the largest that divides the batch, the micro-batch and
    the number of gradient accumulation steps. Raises BadInputError if the global batch does not
    match the plan.
    """
    plan = request.plan
    share = plan.micro_batch * request.passes
    ranks = math.gcd(over, share)
    each = share // ranks
    micro = next(size for size in range(min(plan.micro_batch, each), 0, -1) if each % size == 0)
    return ranks, micro, each // micro
