"""A console for what others have named: nothing of it reaches the terminal as a command."""

from collections.abc import Iterable

from rich import console
from rich.segment import Segment

from outpace.records.errors import harmless


class Console(console.Console):
    """rich's, showing control characters of a text instead of sending them."""

    def render(
        self, renderable: console.RenderableType, options: console.ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """What is to be written, piece by piece."""
        for one in super().render(renderable, options):
            yield one if one.control else Segment(harmless(one.text), one.style)
