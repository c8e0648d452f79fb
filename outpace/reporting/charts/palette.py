"""Colours that most colour-blind readers can distinguish, each with one meaning."""

from collections.abc import Mapping

# Okabe and Ito, "Color Universal Design" (2008), with two changes: their yellow (#F0E442) has a
# contrast of 1.3 with white, the one here 3.2; and grey replaces black, which is invisible on dark
# pages.
BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
SKY, PINK, YELLOW, GREY = "#56B4E9", "#CC79A7", "#A39100", "#999999"
LIGHT_BLUE, LIGHT_RED, LIGHT_GREY, DARK_GREY = "#8FD3F4", "#F3A683", "#BBBBBB", "#6B6B6B"
PURPLE = "#B07AA1"
_SERIES = (BLUE, ORANGE, GREEN, RED, SKY, PINK, YELLOW, GREY)
_DASHES = ("solid", "dash", "dot", "dashdot")
# Colours of memory by kind, in the order of records.memory.KINDS: these, and lighter shades.
MEMORY = (BLUE, SKY, LIGHT_BLUE, ORANGE, RED, GREEN, PINK, GREY, LIGHT_GREY, YELLOW)
# Colours of the parts of a step's time, by the names of records.measurement.PARTS.
PARTS: Mapping[str, str] = {
    "data": PINK,
    "forward": BLUE,
    "backward": SKY,
    "optimizer": GREEN,
    "communication": RED,
    "other": GREY,
}
# The same for an estimate, by the names of planner.titles.PARTS: blues for computing, reds and
# related colours for communication, and greys for waiting.
ESTIMATED: Mapping[str, str] = {
    "products_s": BLUE,
    "attention_s": SKY,
    "memory_s": LIGHT_BLUE,
    "host_s": LIGHT_GREY,
    "bubble_s": GREY,
    "tensor_s": LIGHT_RED,
    "context_s": YELLOW,
    "pipeline_s": ORANGE,
    "expert_s": PURPLE,
    "data_s": PARTS["communication"],
    "optimizer_s": PARTS["optimizer"],
    "offload_s": DARK_GREY,
    "loading_s": PARTS["data"],
}
# Colours of a pipeline's actions by kind, and of waiting.
ACTIONS: Mapping[str, str] = {"F": BLUE, "B": GREEN, "I": GREEN, "W": ORANGE}
PREDICTED, MEASURED = ORANGE, BLUE


def colour(place: int) -> str:
    """Return the colour of the series with index `place`.

    There are eight colours. Further series repeat them, with another line pattern (see `dash`).
    """
    return _SERIES[place % len(_SERIES)]


def dash(place: int) -> str:
    """Return the line pattern (solid, dashed, …) of the series with index `place`."""
    return _DASHES[place // len(_SERIES) % len(_DASHES)]
