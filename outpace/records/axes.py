"""Sizes of the mesh axes for a given world size, and the text that describes a layout."""

import math
from collections.abc import Mapping
from typing import Literal

from outpace.records.errors import BadInputError
from outpace.records.strategies import AXES, TRAITS, Axis, Strategy

# Pipeline schedules of strategy 3d. outpace plans those that split the backward, but cannot train
# with them under 3d.
ProductSchedule = Literal[
    "gpipe", "1f1b", "interleaved", "loopedbfs", "zb", "zbv", "dualpipev"
]  # fmt: skip
# Axes that each strategy splits. The last takes the remaining ranks; the others get 2 if possible.
SPLITS: Mapping[Strategy, tuple[Axis, ...]] = {name: traits.axes for name, traits in TRAITS.items()}


def layout_words(strategy: Strategy, mesh: str, processes: int) -> str:
    """Format a layout as "ddp 4", or with its mesh if several axes are split."""
    if processes == 1:
        return strategy
    several = "," in mesh or len(TRAITS[strategy].axes) > 1
    return f"{strategy} ({mesh})" if several else f"{strategy} {processes}"


def schedule_of(strategy: Strategy, pp: int, pp_schedule: ProductSchedule) -> str:
    """Return the name of a strategy's pipeline schedule: `pp_schedule` if the strategy is 3d.

    Other pipeline strategies are named after their schedule. Without a pipeline, the strategy is
    returned.
    """
    return pp_schedule if strategy == "3d" and pp > 1 else strategy


def count_servers(strategy: Strategy, world_size: int, asked: int | None) -> int:
    """Return the number of parameter servers among `world_size` ranks: as requested, or one.

    It is 0 for a strategy without parameter servers. Raises BadInputError if they are requested for
    such a strategy, or if no rank would be left as a worker.
    """
    if strategy != "ps":
        if asked is not None:
            raise BadInputError(
                f"servers {asked}: strategy {strategy} has no parameter servers. Leave out "
                "servers, or use strategy ps."
            )
        return 0
    servers = asked or 1
    if servers >= world_size:
        fewer = f", or use at most {world_size - 1} as servers" if world_size > 1 else ""
        raise BadInputError(
            f"parameter servers: {servers} of {world_size} processes leave no worker. Start at "
            f"least {servers + 1} processes{fewer}."
        )
    return servers


def fill_axes(
    strategy: Strategy, world_size: int, asked: Mapping[str, int | None]
) -> dict[str, int]:
    """Return the size of every mesh axis for `world_size` ranks, not counting parameter servers.

    `asked` has the user's sizes; −1 means all remaining ranks. Other axes get the strategy's
    default, or else 1. Raises BadInputError if the product differs from the world size.
    """
    given = any(asked.get(axis) is not None for axis in AXES)
    # Under 3d, dp_shard takes the remaining ranks. If no axis is given, pp and tp are split, too.
    product: tuple[Axis, ...] = ("pp", "tp", "dp_shard")
    open_axes = [axis for axis in AXES if asked.get(axis) == -1]
    if given:
        product = () if open_axes else ("dp_shard",)
    own = product if strategy == "3d" else SPLITS[strategy]
    sizes: dict[str, int] = {axis: max(1, asked.get(axis) or 1) for axis in AXES}
    unset = [axis for axis in own if asked.get(axis) is None]
    if not open_axes and unset:
        open_axes = [unset.pop()]
    for axis in unset:
        if world_size // math.prod(sizes.values()) % 2 == 0:
            sizes[axis] = 2
    if len(open_axes) > 1:
        raise BadInputError(
            f"{' and '.join(open_axes)} are -1, but only one axis can take the remaining ranks. "
            "Give the other a size."
        )
    fixed = math.prod(size for axis, size in sizes.items() if axis not in open_axes)
    for axis in open_axes:
        sizes[axis] = max(1, world_size // fixed)
    if math.prod(sizes.values()) != world_size:
        split = [f"{axis} {size}" for axis, size in sizes.items() if size > 1]
        needed = math.prod(sizes.values())
        are = "is 1" if world_size == 1 else f"are {world_size}"
        if not own and split:
            flags = " and ".join(f"--{axis.replace('_', '-')}" for axis in AXES if sizes[axis] > 1)
            raise BadInputError(
                f"{' × '.join(split)} needs {needed} processes, but there {are}. Start {needed} "
                f"(--nproc {needed}), or leave {flags} out."
            )
        if not own:
            raise BadInputError(
                f"strategy {strategy} is for one process, but there are {world_size}. Start one, "
                "or use ddp."
            )
        axes = " × ".join(split) or "all axes are 1"
        raise BadInputError(
            f"{axes}: the number of processes must be {needed}, but there {are}. Start {needed} "
            f"(--nproc {needed}), or use other axis sizes."
        )
    return sizes
