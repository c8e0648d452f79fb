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
    """Keeps a block's buffers unchanged when its forward is recomputed in the backward."""

    def __init__(self, block: nn.Module) -> None:
        self._kind = type(block).__name__
        self._places = [
            (part, name)
            for part in block.modules()
            for name, buffer in part._buffers.items()
            if buffer is not None
        ]
        self._changing: set[_Place] | None = None  # None: no forward has been seen

    @property
    def has_buffers(self) -> bool:
        """Return whether the block has buffers."""
        return bool(self._places)

    def change_once(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a forward so that only its first call changes buffers.

        The second call, which recomputes it in the backward, sees the buffers as the first did.
        """
        before: dict[_Place, Tensor] | None = None

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal before
            if before is not None:
                return self._run_with_old_buffers(before, forward, args, kwargs)
            copies = {place: _buffer_at(place).clone() for place in self._buffers_to_copy()}
            versions = {
                place: (_buffer_at(place), _buffer_at(place)._version) for place in self._places
            }
            output = forward(*args, **kwargs)
            moved = {place for place, seen in versions.items() if _was_written(place, *seen)}
            if self._changing is None:  # compare values, not only versions
                moved |= {place for place, old in copies.items() if _values_differ(place, old)}
            before = {place: copies[place] for place in self._note_changed_buffers(moved)}
            return output

        return run

    def _buffers_to_copy(self) -> list[_Place]:
        return self._places if self._changing is None else list(self._changing)

    def _note_changed_buffers(self, changed: set[_Place]) -> set[_Place]:
        """Return the buffers that the block's forward changed in its first call.

        `changed`: the buffers that the current call changed, which are recorded if it is the first.
        Raises BadInputError if there are others among them.
        """
        late = set() if self._changing is None else changed - self._changing
        if late:
            _, name = next(iter(late))
            raise BadInputError(
                f"the forward of {self._kind} now changes its buffer {name!r}, but did not in its "
                "first call, so checkpointing would change it twice. Use checkpointing none."
            )
        if self._changing is None:
            self._changing = changed
        return self._changing

    def _run_with_old_buffers(
        self, old_buffers: dict[_Place, Tensor], forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        now = {place: _buffer_at(place) for place in old_buffers}
        for (part, name), buffer in old_buffers.items():
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


def _was_written(place: _Place, seen: Tensor, version: int) -> bool:
    return _buffer_at(place) is not seen or seen._version != version


def _values_differ(place: _Place, old: Tensor) -> bool:
    return fingerprint(_buffer_at(place)) != fingerprint(old)
