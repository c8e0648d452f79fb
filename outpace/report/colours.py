"""Colours that most colour-blind people tell apart, the same thing in the same one everywhere."""

from collections.abc import Mapping

# Okabe and Ito, "Color Universal Design" (2008); grey in the place of black, which dark pages hide.
OKABE_ITO = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#F0E442", "#999999",
)  # fmt: skip
# Of memory by kind, in the order of records.memory.KINDS: these, and lighter ones of them.
MEMORY = (
    "#0072B2", "#56B4E9", "#8FD3F4", "#E69F00", "#D55E00", "#009E73", "#CC79A7", "#999999",
    "#BBBBBB", "#F0E442",
)  # fmt: skip
# Of a step's time by part, as records.measurement.PARTS names them.
PARTS: Mapping[str, str] = {
    "data": "#CC79A7",
    "forward": "#0072B2",
    "backward": "#56B4E9",
    "optimizer": "#009E73",
    "communication": "#D55E00",
    "other": "#999999",
}
# Of a pipeline's actions, by their kind; and of waiting.
ACTIONS: Mapping[str, str] = {"F": "#0072B2", "B": "#009E73", "I": "#009E73", "W": "#E69F00"}
PREDICTED, MEASURED = "#E69F00", "#0072B2"


def colour(place: int) -> str:
    """Of the series at `place`; after eight they begin again."""
    return OKABE_ITO[place % len(OKABE_ITO)]
