"""The size of micro-batches, as given or by default, and their number in a pipeline.

By default, a data-parallel rank's whole share is one micro-batch, or as many as the pipeline's
schedule needs. For `--micro-batch auto`, see `jobs.train.auto_micro_batch`; in a search for plans,
see `planner.search.space`.
"""

import math
from collections.abc import Mapping

from outpace.records.errors import BadInputError, join_or
from outpace.records.pipelines import default_microbatches
from outpace.records.settings import TrainSettings


def resolve_micro_batches(
    settings: TrainSettings, schedule: str, sizes: Mapping[str, int]
) -> dict[str, int]:
    """Return the plan's `micro_batch` and `pp_microbatches`: the given ones, or defaults.

    `sizes`: the sizes of the axes. Raises BadInputError if the global batch cannot be divided among
    the data-parallel ranks.
    """
    # With micro-batch auto, a later search starts from the whole share.
    given = None if settings.micro_batch == "auto" else settings.micro_batch
    if given is None:
        possible = _samples_per_dp_rank(settings, sizes)
    else:
        shares = sizes["dp_replicate"] * sizes["dp_shard"]
        possible = settings.global_batch // (shares * given)
    parts = settings.pp_microbatches or default_microbatches(schedule, sizes["pp"], possible)
    return {"micro_batch": given or max(1, possible // parts), "pp_microbatches": parts}


def _samples_per_dp_rank(settings: TrainSettings, sizes: Mapping[str, int]) -> int:
    shares = sizes["dp_replicate"] * sizes["dp_shard"]
    if settings.global_batch % shares:
        lower = settings.global_batch // shares * shares
        possible = join_or(batch for batch in (lower, lower + shares) if batch)
        fewer = _suggest_fewer_processes(settings, sizes)
        raise BadInputError(
            f"global batch {settings.global_batch} cannot be divided among {shares} "
            f"data-parallel ranks. Use --global-batch {possible}{fewer}."
        )
    return settings.global_batch // shares


def _suggest_fewer_processes(settings: TrainSettings, sizes: Mapping[str, int]) -> str:
    """Return ", or --nproc N" with fewer processes that divide the global batch, or ""."""
    shares = sizes["dp_replicate"] * sizes["dp_shard"]
    if settings.dp_replicate is not None or settings.dp_shard is not None:
        return ""
    fewer = max(share for share in range(1, shares) if settings.global_batch % share == 0)
    processes = math.prod(sizes.values()) // shares * fewer
    is_one_host = settings.nproc == math.prod(sizes.values())
    return f", or --nproc {processes}" if is_one_host and fewer > 1 else ""
