"""A new layout for a run that resumes on a different number of ranks."""

from collections.abc import Callable, Mapping, Sequence

from outpace.catalog.accelerators import find_accelerator
from outpace.jobs.defaults import resolve_device, resolve_plan
from outpace.jobs.planning import auto_plan
from outpace.parallel import why_not
from outpace.probing.hardware.machine import identify
from outpace.records.errors import BadInputError
from outpace.records.plan import AXES
from outpace.records.ranks import Ranks
from outpace.records.run import RUN_FILE
from outpace.records.settings import TrainSettings
from outpace.training.run_dir import RunDir

# Settings that divide a step among ranks without changing numerics or samples.
_LAYOUT = (*AXES, "strategy", "servers", "pp_microbatches", "pp_schedule", "micro_batch")


def replan(
    settings: TrainSettings, origins: Mapping[str, str], ranks: Ranks, say: Callable[[str], None]
) -> auto_plan.Settings:
    """Return settings and origins with which the run in `settings.out` resumes on these ranks.

    The layout that the user requested is kept if these ranks allow it. Otherwise the planner
    chooses one, with the same global batch, samples and precision. `origins`: where each setting
    comes from. `say` shows a message. Raises BadInputError if no layout suits these ranks.
    """
    assert settings.out is not None
    before = RunDir(settings.out).require_run().plan.world_size
    if before == ranks.world_size or not settings.resume:
        return settings, dict(origins)
    moved = f"the run had {before} ranks and resumes with {ranks.world_size}"
    # What the user passes now takes precedence over the run's last settings.
    of_run = [name for name in _LAYOUT if origins.get(name) == RUN_FILE]
    typed = any(origins.get(name) not in (None, auto_plan.DEFAULT, RUN_FILE) for name in _LAYOUT)
    why = None
    for asked in [settings, *([_reset_settings(settings, of_run)] if typed else [])]:
        found = _find_layout_obstacle(asked, ranks)
        if found is None:
            say(f"{moved}: the requested layout is kept")
            return asked, dict(origins)
        why = why or found
    say(f"{moved}: the layout is planned again ({why})")
    opened = _reset_settings(settings, _LAYOUT).model_copy(update={"plan": "auto"})
    left = {**origins, **dict.fromkeys(_LAYOUT, auto_plan.DEFAULT)}
    return auto_plan.apply_settings_plan(opened, left, ranks, say)


def _reset_settings(settings: TrainSettings, names: Sequence[str]) -> TrainSettings:
    defaults = {name: TrainSettings.model_fields[name].default for name in names}
    return settings.model_copy(update=defaults)


def _find_layout_obstacle(settings: TrainSettings, ranks: Ranks) -> str | None:
    try:
        machine = identify(find_accelerator)
        device = resolve_device(settings, ranks)
        plan = resolve_plan(settings, ranks, device, machine)
        return why_not(plan.strategy, ranks, device)
    except BadInputError as error:
        return str(error)
