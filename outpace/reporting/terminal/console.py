"""A console for untrusted text, whose control characters do not reach the terminal."""

from collections.abc import Iterable

from rich import console
from rich.segment import Segment

from outpace.records.errors import escape_controls

# Wider than any screen. Lines are filled up to the width, so a huge COLUMNS must be limited.
_MOST_COLUMNS, _MOST_LINES = 1000, 1000


class Console(console.Console):
    """rich's console, with control characters in texts replaced."""

    @property
    def size(self) -> console.ConsoleDimensions:
        """Return the size of the terminal, or COLUMNS and LINES, within limits."""
        width, height = super().size
        return console.ConsoleDimensions(min(width, _MOST_COLUMNS), min(height, _MOST_LINES))

    @size.setter
    def size(self, size: tuple[int, int]) -> None:
        self._width, self._height = size

    def render(
        self, renderable: console.RenderableType, options: console.ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Yield the segments of the output, with control characters in texts replaced."""
        for one in super().render(renderable, options):
            yield one if one.control else Segment(escape_controls(one.text), one.style)
