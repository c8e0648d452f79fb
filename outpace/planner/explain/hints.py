"""Notes on options that are not searched by default, and on causal MFU."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from outpace.planner.hardware.device import DeviceRates
from outpace.planner.model.outline import parameters
from outpace.planner.model.outline_flops import masked_flops, step_flops
from outpace.planner.plan_columns import Floats
from outpace.planner.search.branch_and_bound import search
from outpace.planner.search.finalists import simulate_pipelines
from outpace.planner.search.known_bytes import Needs
from outpace.planner.search.search_request import SearchRequest
from outpace.planner.step_time.setup import StepTimeQuestion
from outpace.records.outline import Outline
from outpace.records.plan import Plan

_ASKED: tuple[tuple[str, Any, str], ...] = (
    ("precision", "fp8", "fp8"), ("compile", True, "compile"),
    ("optimizer", "adamw-8bit", "adamw-8bit"),
)  # fmt: skip
# Below this, scaling takes longer than matmuls save: 1.17 times as fast at about 1 billion, slower
# at 124 million (karpathy/nanochat, dev/LOG.md, H100, compiled).
FP8_PARAMETERS = 0.9e9
_LEAST = 1.02  # minimum speed-up to report
_LEAST_MASKED = 0.05  # minimum share of masked FLOPs to report


def hint(
    question: StepTimeQuestion,
    wanted: SearchRequest,
    needs: Needs,
    floors: Needs,
    limit: float,
    best: Plan,
    step_s: float,
) -> str | None:
    """Return a sentence with options worth adding to --vary, or None if no option is.

    The search for faster plans takes `needs`, the bytes that plans need, `floors`, lower bounds on
    them, and `limit`, the memory of a device. To save time, only the best plan's tp, cp, pp and ep
    sizes are searched (for fp8, only tp 1 if the best plan has more), so --vary may find faster
    plans.
    """
    gains = []
    for name, beside in _requests_with_hinted_options(question.device, wanted, best):
        found = search(question, beside, needs, floors, limit, 1)
        if len(found.ranked):
            times = simulate_pipelines(question, found.columns, found.times, found.ranked)
            seconds: Floats = times.step_s[found.ranked]
            gains.append((step_s / float(seconds.min()), name, beside))
    told = [one for one in sorted(gains, key=lambda one: -one[0]) if one[0] >= _LEAST]
    if not told:
        return None
    words = [f"{_option_label(name)} would be {gain:.2f} times as fast" for gain, name, _ in told]
    names = ",".join(name for _, name, _ in told)
    own = " (fp8 without the time to compute its scales)" if "precision" in names else ""
    return f"Not searched by default: {', '.join(words)}{own}: --vary {names}."


def causal_notes(outline: Outline, wanted: SearchRequest, mfu: float | None) -> list[str]:
    """Return a note on the first plan's MFU if masked attention did not count as work.

    Returns no note if the MFU hardly differs.
    """
    if mfu is None or wanted.adapters is not None:
        return []
    step = outline, wanted.seq_len, wanted.global_batch
    masked = masked_flops(*step) / step_flops(*step)
    if masked < _LEAST_MASKED:
        return []
    return [
        "MFU counts causal attention in full, as is usual. Without the masked half, plan 1's MFU "
        f"is {100 * mfu * (1 - masked):.1f} % instead of {100 * mfu:.1f} %."
    ]


def _option_label(name: str) -> str:
    return next(word for one, _, word in _ASKED if one == name)


def _requests_with_hinted_options(
    device: DeviceRates, wanted: SearchRequest, best: Plan
) -> Iterator[tuple[str, SearchRequest]]:
    """Yield each option that is not searched by default, with a request that requires it.

    To save time, the request also requires the best plan's axis sizes.
    """
    for name, value, _ in _ASKED:
        if (
            name in wanted.keep
            or name in wanted.vary
            or (name == "compile" and not device.compiles)
        ):
            continue
        if wanted.adapters is not None and name != "compile":
            continue  # fp8 does not support adapters, and their states are small anyway
        axes: Mapping[str, int] = {"tp": best.tp, "cp": best.cp, "pp": best.pp, "ep": best.ep}
        if name == "precision":
            if (
                wanted.precision not in ("bf16", "bf16-master")
                or "fp8" not in device.best_flops_per_s
            ):
                continue
            if parameters(wanted.outline) < FP8_PARAMETERS:
                continue
            axes = axes if best.tp == 1 else {"tp": 1}
        yield name, replace(wanted, keep={**axes, **wanted.keep, name: value})
