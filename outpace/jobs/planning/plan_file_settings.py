"""Settings of a --plan file, for commands that trace a plan."""

from collections.abc import Mapping
from pathlib import Path

from outpace.jobs.planning.auto_plan import apply_settings_plan
from outpace.records.errors import BadInputError
from outpace.records.hardware import Node
from outpace.records.plan import PlanFile
from outpace.records.settings import TrainSettings


def follow_plan(
    settings: TrainSettings, origins: Mapping[str, str], node: Node | None, nodes: int
) -> tuple[TrainSettings, dict[str, str]]:
    """Apply the settings of the --plan file. Return all settings and the origin of each.

    Other settings must agree with the file, except sequence length and batch. Raises BadInputError
    if they do not, or if the file is for another number of devices.
    """
    if settings.plan is None:
        return settings, dict(origins)
    if settings.plan == "auto":
        raise BadInputError(
            "--plan auto: `outpace memory` does not choose plans. Pass a file that `outpace plan "
            "--out` wrote, or leave out --plan."
        )
    there = None if node is None else node.processes * nodes
    world = PlanFile.load(Path(settings.plan).expanduser(), option="--plan ").world_size
    if node is not None and world != there:
        raise BadInputError(
            f"--plan {settings.plan} is for {world} devices, but {nodes} × {node.processes} = "
            f"{there} are requested. Change --nodes, or choose another --machine."
        )
    settled, told = apply_settings_plan(settings, origins, None, lambda _: None)
    if node is not None:
        settled = settled.model_copy(update={"nproc": None})
    return settled, told
