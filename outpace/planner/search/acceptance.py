"""Restriction of the search to plans that another trainer can express."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from outpace.planner.plan_columns import Bools, Ints, PlanBatch
from outpace.planner.search.space import to_plan
from outpace.records.plan import Plan


@dataclass(frozen=True)
class Acceptance:
    """The plans that a trainer other than outpace can express.

    `obstacle` takes a plan and its global batch, and returns what the trainer `name` lacks for it,
    or "". Its answers are cached and shared by all plans with the same layout or options.
    """

    name: str
    obstacle: Callable[[Plan, int], str]
    _known: dict[tuple[str, bytes], bool] = field(default_factory=dict, compare=False, repr=False)

    def accepts_layouts(self, columns: PlanBatch) -> Bools:
        """Return which layouts are accepted, regardless of options."""
        return self._accepted_mask(columns, "layout", _layout_keys(columns))

    def accepts_options(self, columns: PlanBatch) -> Bools:
        """Return which plans are accepted, assuming that their layouts are."""
        return self._accepted_mask(columns, "options", _option_keys(columns))

    def describe_obstacle(self, columns: PlanBatch, place: int) -> str:
        """Return what a plan has that the trainer lacks; "" if the plan is accepted."""
        row = columns.select([place])
        batch = row.micro_batch * row.microbatches * row.passes * row.data_parallel
        return self.obstacle(to_plan(row, 0), int(batch[0]))

    def _accepted_mask(self, columns: PlanBatch, kind: str, keys: Ints) -> Bools:
        rows, first, back = np.unique(keys, axis=0, return_index=True, return_inverse=True)
        answers = []
        for row, at in zip(rows, first, strict=True):
            key = kind, row.tobytes()
            if key not in self._known:
                self._known[key] = not self.describe_obstacle(columns, int(at))
            answers.append(self._known[key])
        return np.array(answers, bool)[back.reshape(-1)]


def _layout_keys(c: PlanBatch) -> Ints:
    """Return one row per layout, with everything that decides whether the trainer can express it.

    Batch sizes and exact numbers of replicas and shards are left out, so that many layouts share a
    row.
    """
    columns = [
        c.strategy, c.zero, c.dp_replicate > 1, c.dp_shard > 1, c.tp, c.cp > 1, c.pp > 1,
        c.pp * c.stages_per_rank, c.ep > 1, c.schedule, c.stages_per_rank, c.even_stages,
        c.sequence_parallel, c.async_tp, c.microbatches * c.passes % c.pp > 0, c.precision,
        c.optimizer, c.compile, c.bucket_bytes, c.servers,
    ]  # fmt: skip
    return _join_columns(columns)


def _option_keys(c: PlanBatch) -> Ints:
    """Return one row per plan, with everything that decides whether the trainer has its options."""
    columns = [
        c.strategy, c.zero, c.dp_replicate > 1, c.dp_shard > 1, c.tp > 1, c.cp > 1, c.pp > 1,
        c.ep > 1, c.precision, c.optimizer, c.compile, c.offload_activations,
        c.offload_parameters, c.offload_optimizer, c.chunked_loss, c.in_backward,
        *(c.modes * 1024).T,
    ]  # fmt: skip
    return _join_columns(columns)


def _join_columns(columns: Sequence[object]) -> Ints:
    return np.stack([np.asarray(one, np.int64) for one in columns], axis=1)
