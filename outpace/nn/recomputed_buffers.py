"""Buffers of checkpointed blocks, whose forward is recomputed in the backward.

The recomputation must see buffers (running averages, counters) as the forward saw them, and must
not update them a second time.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from outpace.nn.fingerprint import fingerprint
from outpace.records.errors import BadInputError

_Place = tuple[nn.Module, str]


class BufferKeeper:
    """Tracks the buffers that a block's forward changes, to keep them when it is recomputed."""

    def __init__(self, block: nn.Module) -> None:
        self._kind = type(block).__name__
        self._places = [
            (part, name)
            for part in block.modules()
            for name, buffer in part._buffers.items()
            if buffer is not None
        ]
        self._moving: set[_Place] | None = None  # None: no forward has been seen

    @property
    def has_buffers(self) -> bool:
        """Return whether the block has buffers."""
        return bool(self._places)

    def change_once(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a forward that changes buffers at its first call, but not when recomputed."""
        before: dict[_Place, Tensor] | None = None

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal before
            if before is not None:
                return self._recompute(before, forward, args, kwargs)
            copies = {place: _buffer_at(place).clone() for place in self._to_copy()}
            versions = {
                place: (_buffer_at(place), _buffer_at(place)._version) for place in self._places
            }
            output = forward(*args, **kwargs)
            moved = {place for place, seen in versions.items() if _has_changed(place, *seen)}
            if self._moving is None:  # compare values, not only versions
                moved |= {place for place, old in copies.items() if _differs(place, old)}
            before = {place: copies[place] for place in self._changed_buffers(moved)}
            return output

        return run

    def _to_copy(self) -> list[_Place]:
        return self._places if self._moving is None else list(self._moving)

    def _changed_buffers(self, moved: set[_Place]) -> set[_Place]:
        """Return the buffers that change, as seen in the block's first forward.

        Raises BadInputError if others have changed since.
        """
        late = set() if self._moving is None else moved - self._moving
        if late:
            _, name = next(iter(late))
            raise BadInputError(
                f"the forward of {self._kind} now changes its buffer {name!r}, but did not in its "
                "first call, so checkpointing would change it twice. Use checkpointing none."
            )
        if self._moving is None:
            self._moving = moved
        return self._moving

    def _recompute(
        self, before: dict[_Place, Tensor], forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Recompute with copies of the buffers as they were before the first call."""
        now = {place: _buffer_at(place) for place in before}
        for (part, name), buffer in before.items():
            part._buffers[name] = buffer.clone()
        try:
            return forward(*args, **kwargs)
        finally:
            for (part, name), buffer in now.items():
                part._buffers[name] = buffer


def _buffer_at(place: _Place) -> Tensor:
    part, name = place
    buffer = part._buffers[name]
    assert buffer is not None
    return buffer


def _has_changed(place: _Place, seen: Tensor, version: int) -> bool:
    return _buffer_at(place) is not seen or seen._version != version


def _differs(place: _Place, old: Tensor) -> bool:
    return fingerprint(_buffer_at(place)) != fingerprint(old)
