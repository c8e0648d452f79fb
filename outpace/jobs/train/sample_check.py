"""A comparison of the ranks' data sets before step 1, by a few samples of each."""

from collections.abc import Sequence
from typing import Any

from outpace.data.sample_digests import SampleDigests, digest_samples, find_difference
from outpace.interop.custom_model import CustomModel
from outpace.jobs.ranks.process_groups import Groups
from outpace.parallel.rank_objects import gather_objects
from outpace.records.errors import BadInputError
from outpace.records.settings import TrainSettings
from outpace.training.callbacks import Callback, notify


def check_samples(
    groups: Groups, settings: TrainSettings, custom: CustomModel | None, heard: Sequence[Callback]
) -> None:
    """Raise BadInputError on all ranks if most compared samples of their data sets differ.

    The callbacks `heard` get a hint if only a few samples differ, or if samples change from one
    read to the next. Ranks wait for each other, however long reading takes. All ranks must call
    this.
    """
    if custom is None or custom.dataset is None or settings.check != "on":
        return
    for name, dataset in (("dataset", custom.dataset), ("eval_dataset", custom.eval_dataset)):
        if dataset is not None:
            _check_dataset(groups, settings, name, dataset, heard)


def _check_dataset(
    groups: Groups, settings: TrainSettings, name: str, dataset: Any, callbacks: Sequence[Callback]
) -> None:
    mine = digest_samples(dataset, settings.seed, settings.workers, settings.comm_timeout_s)
    found = [mine] if groups.ranks.world_size == 1 else gather_objects(mine, groups.patient)
    difference = find_difference(found)
    if difference is not None and difference.most:
        error = BadInputError(
            f"sample {difference.index} of the {name} differs between rank {difference.rank} and "
            f"rank 0, as do most of those compared, though both have {len(dataset)} samples. Give "
            "every rank the same complete data set, not a part of it: outpace itself divides "
            "each step's samples among the ranks. If they must differ, --check model accepts "
            "them (and still compares the first batch)."
        )
        error.on_all_ranks = True
        raise error
    if difference is not None:
        said = (
            f"sample {difference.index} of the {name} differs between rank {difference.rank} "
            "and rank 0, though most of those compared are equal. Ranks should have the same "
            "data set"
        )
        notify(callbacks, "on_hint", said)
    if any(one.unsteady for one in found):
        notify(callbacks, "on_hint", describe_unsteady(name, found))
    unread = [(rank, one.unread) for rank, one in enumerate(found) if one.unread]
    if unread and len(found) > 1:
        rank, why = unread[0]
        said = f"samples of the {name} were not compared between ranks: on rank {rank}, {why}"
        notify(callbacks, "on_hint", said)


def describe_unsteady(name: str, found: Sequence[SampleDigests]) -> str:
    """Describe samples that change from one read to the next."""
    index = min(one.unsteady[0] for one in found if one.unsteady)
    ranks = ", and cannot be compared between ranks" if len(found) > 1 else ""
    return (
        f"sample {index} of the {name} differs each time it is read{ranks}: it depends on a "
        "separate random generator, on the time or on earlier reads. A resumed run then trains "
        "on samples that differ from an uninterrupted run's, and ranks and loading processes may "
        "draw the same ones. Draw from torch's, NumPy's or random's functions, which outpace "
        "seeds for each sample"
    )
