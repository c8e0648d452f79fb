"""Strategies that the structure of a user's module rules out, found without applying them."""

from outpace.interop.custom_model import CustomModel
from outpace.parallel.custom.stage_blocks import stages_of
from outpace.parallel.custom.tensor import layouts_of
from outpace.parallel.parallel_module import refused_strategy
from outpace.records.errors import BadInputError
from outpace.records.pipelines import SCHEDULES
from outpace.records.plan import Strategy


def find_refused_strategies(model: CustomModel, ranks: int) -> dict[Strategy, str]:
    """Return the strategies that cannot train a custom model on `ranks` ranks, with reasons."""
    others: tuple[Strategy, ...] = ("dp", "cp", "3d")  # only for outpace's own models
    found = {name: str(refused_strategy(name)) for name in others}
    try:
        layouts_of(model.module, model.layouts, ranks)
    except BadInputError as error:
        found["tp"] = str(error)
    for name in SCHEDULES:
        try:
            stages_of(model.module, model.blocks, name, ranks)
        except BadInputError as error:
            found[name] = str(error)  # type: ignore[index]
    return found
