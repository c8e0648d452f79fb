"""A unique name for the joining ranks, in a store that earlier ranks may have used.

A launcher's store outlives groups of ranks: those of an earlier run in the same processes, from
before a restart, or from before hosts joined or left. A restart count cannot distinguish them,
since each host's elastic agent counts only the restarts that its own ranks caused.
"""

import time
import uuid
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from outpace.records.ranks import Ranks

# Pause between two checks for arriving ranks; it grows while none arrives.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5


def agree_on_session(store: Store, ranks: Ranks, timeout_s: float) -> str:
    """Return a name that only these ranks share. Collective.

    Each rank publishes a token, and uses the name that rank 0 returns for it, which no earlier rank
    0 can have done. Rank 0 waits until all ranks have received it, since a token that it finds may
    be an old one. Rank 0 queries the store a few times per rank, and each rank a few times in
    total, however long they wait. Raises RuntimeError if a rank does not arrive within `timeout_s`.
    """
    token = uuid.uuid4().hex
    if ranks.rank == 0:
        _publish_session(store, token, ranks.world_size, timeout_s)
        return token
    store.set(f"token/{store.add('tokens', 1)}", token)
    invitation = f"session/{token}"
    try:
        store.wait([invitation], timedelta(seconds=timeout_s))
    except dist.DistStoreError:
        raise RuntimeError("rank 0 did not come") from None
    name = store.get(invitation).decode()
    if store.add(f"joined/{name}/{ranks.rank}", 1) == 1:
        store.add(f"joined/{name}", 1)
    return name


def _publish_session(store: Store, name: str, world_size: int, timeout_s: float) -> None:
    """Send the session's name to every rank that publishes a token, until all ranks have joined."""
    seen, waiting = 0, set[int]()  # token numbers; a rank first counts, then shows its own
    pause_s, until_s = _FIRST_PAUSE_S, time.monotonic() + timeout_s
    while store.add(f"joined/{name}", 0) < world_size - 1:
        count = store.add("tokens", 0)
        waiting |= {*range(seen + 1, count + 1)}
        shown = {number for number in waiting if store.check([f"token/{number}"])}
        for number in shown:
            store.set(f"session/{store.get(f'token/{number}').decode()}", name)
        waiting -= shown
        if time.monotonic() > until_s:
            raise RuntimeError(_describe_missing(store, name, world_size))
        pause_s = _FIRST_PAUSE_S if count > seen else min(2 * pause_s, _LONGEST_PAUSE_S)
        seen = count
        time.sleep(pause_s)


def _describe_missing(store: Store, name: str, world_size: int) -> str:
    missing = (rank for rank in range(1, world_size) if not store.check([f"joined/{name}/{rank}"]))
    return f"rank {next(missing, world_size - 1)} did not come"
