"""Heartbeats of ranks in their shared store."""

from typing import Any

LISTEN_S = 0.5  # seconds between calls of `Heartbeats.send_and_check`
# Heartbeats per time limit, and the longest pause between two in seconds.
_BEATS, _MOST_BETWEEN_S = 8, 10.0
_ENDED = b"ended"


class Heartbeats:
    """Heartbeats in the store: each rank writes its own, and checks the next rank's.

    Queries thus grow linearly with the number of ranks. Seconds count only while this process runs,
    so it does not suspect others after it was suspended itself.
    """

    def __init__(self, rank: int, world_size: int, timeout_s: float) -> None:
        self._own, self._next = (f"alive/beat/{one % world_size}" for one in (rank, rank + 1))
        self._alone = world_size == 1
        self._limit_s = timeout_s
        self._every_s = min(timeout_s / _BEATS, _MOST_BETWEEN_S)
        self._number, self._since_own_s, self._since_next_s = 0, self._every_s, 0.0
        self._last: bytes | None = None

    def send_and_check(self, store: Any) -> bool:
        """Send this rank's heartbeat when due; return whether the next rank's is overdue."""
        if self._alone:
            return False
        self._since_own_s += LISTEN_S
        self._since_next_s += LISTEN_S
        if self._since_own_s >= self._every_s:
            self._since_own_s = 0.0
            self._number += 1
            store.set(self._own, str(self._number))
            found = store.get(self._next) if store.check([self._next]) else None
            if found != self._last or found == _ENDED:
                self._last = found
                self.reset()
        return self._since_next_s >= self._limit_s

    def reset(self) -> None:
        """Set the time since the next rank's last heartbeat to zero."""
        self._since_next_s = 0.0

    def end(self, store: Any) -> None:
        """Announce that this rank ends normally and sends no more heartbeats."""
        if not self._alone:
            store.set(self._own, _ENDED)
