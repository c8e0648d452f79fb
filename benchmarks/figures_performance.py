"""Speed results as Markdown: peer benchmarks, a GPU, and how costs grow."""

from collections.abc import Callable, Iterator
from typing import Any

from pages import stand, table

OURS = "outpace"
# Targets of the peer benchmarks: tokens/s, memory and time to the first step, compared with peers;
# the share of the best matmul; two processes compared with one.
FASTER, LEANER, SOONER, SHARE, TWO = 1.15, 0.70, 0.6, 0.70, 0.95
# Best matmuls of machines that are equally fast.
ALIKE = 1.1
# Maximum time of a pick compared with the best manual choice; late steps compared with early ones.
PICKED, FLAT = 1.02, 1.02
_WITH = {"": "", "zero3": ", ZeRO-3", "offload": ", ZeRO-3 offloaded"}


def heat_title(heat: dict[str, Any]) -> str:
    """Return the case, its processes and its settings."""
    count = heat["processes"]
    processes = "1 process" if count == 1 else f"{count} processes"
    what = f"({heat['case']}) {heat['title']}, {processes}{_WITH[heat['kind']]}"
    return f"{what}, {heat['precision']}"


def ran(heat: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the entrants that finished with the plain loop's losses."""
    return {
        name: one
        for name, one in heat["entrants"].items()
        if "failure" not in one and one["same_losses"]
    }


def best_peer(heat: dict[str, Any], measure: str, largest: bool = True) -> tuple[str, float] | None:
    """Return the peer with the largest value of a measure, or the smallest."""
    peers = {name: one[measure] for name, one in ran(heat).items() if name != OURS}
    if not peers:
        return None
    name = (max if largest else min)(peers, key=lambda key: peers[key])
    return name, peers[name]


def beside(heat: dict[str, Any], measure: str, largest: bool = True) -> float | None:
    """Return outpace's figure as a multiple of the best peer's."""
    own, best = ran(heat).get(OURS), best_peer(heat, measure, largest)
    return None if own is None or best is None else own[measure] / best[1]


def share_of_best_matmul(heat: dict[str, Any]) -> float | None:
    """Return the share of the machine's best matmul; None if that was not steady."""
    own, best = ran(heat).get(OURS), heat["best_product_flops_per_s"]
    if own is None or best is None:
        return None
    share: float = heat["model_flops"] / own["step_time_s"] / best
    return share


def peers(result: dict[str, Any]) -> str:
    """Write one table per heat."""
    heats = result["heats"]
    return "\n".join(_heats(heats)) + _versions(heats) + as_recorded(result)


def _heats(heats: dict[str, Any]) -> Iterator[str]:
    head = [
        "",
        "tokens/s",
        "relative to outpace",
        "memory",
        "first step after",
        "loss reached after",
    ]
    for heat in heats.values():
        own = ran(heat).get(OURS)
        rows = [
            _row(name, one, own)
            for name, one in sorted(
                heat["entrants"].items(), key=lambda pair: -pair[1].get("tokens_per_s", 0.0)
            )
        ]
        rows += [[name, why, "", "", "", ""] for name, why in heat["cannot"].items()]
        yield f"**{heat_title(heat)}**{_when(heat)}\n\n{table(head, rows)}"


def _when(heat: dict[str, Any]) -> str:
    """Return the day, and how fast the machine was."""
    best = heat["best_product_flops_per_s"]
    rate = "" if best is None else f", best matmul {best / 1e9:,.0f} GFLOP/s"
    return f" ({heat['date'][:10]}{rate})"


def _row(name: str, one: dict[str, Any], own: dict[str, Any] | None) -> list[str]:
    if "failure" in one:
        return [name, "failed", "", "", "", ""]
    reached = one["loss_reached_s"]
    same = "" if one["same_losses"] else " (other losses)"
    return [
        f"**{name}**" if name == OURS else name + same,
        f"{one['tokens_per_s']:,.0f}",
        "" if own is None else f"{one['tokens_per_s'] / own['tokens_per_s']:.2f}",
        f"{one['rank_bytes'] / 2**20:,.0f} MiB",
        f"{one['first_step_s']:.1f} s",
        "–" if reached is None else f"{reached:.1f} s",
    ]


def targets(result: dict[str, Any]) -> str:
    """Write targets next to the results."""
    heats = result["heats"]
    rows = [*_speed(heats), *_shares(heats), *_memory(heats), *_starts(heats), *_two(heats)]
    return table(["goal", "case", "measured"], rows) + as_recorded(result)


def tokens_range(result: dict[str, Any]) -> str:
    """Return outpace's tokens/s relative to the best peer's, and the missed goals."""
    heats = [(heat, beside(heat, "tokens_per_s")) for heat in result["heats"].values()]
    found = {heat_title(heat): ratio for heat, ratio in heats if ratio is not None}
    return say_range(found, heats[0][0]["precision"])


def say_range(found: dict[str, float], precision: str) -> str:
    """Return a sentence with the smallest and largest ratio, and those that are too small."""
    short = [
        f"{name.partition(') ')[2]} ({ratio:.2f} ×)"
        for name, ratio in found.items()
        if ratio < FASTER
    ]
    misses = f"Below the goal: {'; '.join(short)}" if short else "All cases reach the goal"
    return (
        f"In {precision}, outpace trains {min(found.values()):.2f} to {max(found.values()):.2f} × "
        f"as many tokens/s as the fastest other program in {len(found)} cases (goal: {FASTER} ×). "
        f"{misses}.\n"
    )


def as_recorded(result: dict[str, Any]) -> str:
    """Return the command without the options of single heats, from the last heat."""
    last = max(result["heats"].values(), key=lambda heat: heat["date"])
    return stand({**last, "command": last["command"][:2]})


def _versions(heats: dict[str, Any]) -> str:
    """Return the versions of all entrants in the newest heat that has them."""
    found: dict[str, str] = {}
    for heat in sorted(heats.values(), key=lambda heat: heat["date"]):
        for packages in heat.get("environments", {}).values():
            found |= packages
    return f"\nWith {', '.join(f'{name} {found[name]}' for name in sorted(found))}.\n"


def _speed(heats: dict[str, Any]) -> Iterator[list[str]]:
    for heat in heats.values():
        ratio, best = beside(heat, "tokens_per_s"), best_peer(heat, "tokens_per_s")
        if ratio is not None and best is not None:
            yield [f"tokens/s ≥ {FASTER:.2f} × the best peer's", heat_title(heat),
                   f"{ratio:.2f} × {best[0]}{mark(ratio >= FASTER)}"]  # fmt: skip


def _shares(heats: dict[str, Any]) -> Iterator[list[str]]:
    for heat in heats.values():
        share = share_of_best_matmul(heat)
        if share is not None and heat["case"] in "abc" and heat["processes"] == 1:
            yield [f"≥ {SHARE:.2f} of the best matmul", heat_title(heat),
                   f"{share:.3f}{mark(share >= SHARE)}"]  # fmt: skip


def _memory(heats: dict[str, Any]) -> Iterator[list[str]]:
    heat = heats.get("b-1")
    ratio = None if heat is None else beside(heat, "rank_bytes", largest=False)
    if heat is not None and ratio is not None:
        yield [f"memory ≤ {LEANER:.2f} × the best peer's", heat_title(heat),
               f"{ratio:.2f} ×{mark(ratio <= LEANER)}"]  # fmt: skip


def _starts(heats: dict[str, Any]) -> Iterator[list[str]]:
    for heat in heats.values():
        own, trainer = ran(heat).get(OURS), ran(heat).get("Trainer")
        if own is not None and trainer is not None:
            ratio = own["first_step_s"] / trainer["first_step_s"]
            yield [f"first step after ≤ {SOONER} × Trainer's", heat_title(heat),
                   f"{ratio:.2f} ×{mark(ratio <= SOONER)}"]  # fmt: skip


def _two(heats: dict[str, Any]) -> Iterator[list[str]]:
    for name, heat in heats.items():
        two = heats.get(f"{heat['case']}-2")
        if not name.endswith("-1") or two is None or not _as_fast(heat, two):
            continue
        if OURS in ran(heat) and OURS in ran(two):
            ratio = ran(two)[OURS]["tokens_per_s"] / ran(heat)[OURS]["tokens_per_s"]
            yield [f"tokens/s of 2 processes ≥ {TWO} × those of 1",
                   f"({heat['case']}) {heat['title']}",
                   f"{ratio:.3f} ×{mark(ratio >= TWO)}"]  # fmt: skip


def _as_fast(heat: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether the machine was equally fast: a virtual one may vary from day to day."""
    rates = [one["best_product_flops_per_s"] for one in (heat, other)]
    return None not in rates and max(rates) <= ALIKE * min(rates)


MEMORY = {"at hand": "memory touched before", "as it is": "memory not touched"}


def mark(reached: bool) -> str:
    return "" if reached else ", **not reached**"


def lasting(result: dict[str, Any]) -> str:
    """Write the costs of a checkpoint, a long run and the planner's pick."""
    rows, parts = [], {name: part["found"] for name, part in result["parts"].items()}
    if "checkpoint" in parts:
        for which, places in parts["checkpoint"]["lost_steps"].items():
            for place, lost in places.items():
                rows.append(["an asynchronous checkpoint costs ≤ 1 step",
                             f"(b) GPT-2 124M, 1 process, {which} save, {MEMORY[place]}",
                             f"{lost:.2f} steps{mark(lost <= 1)}"])  # fmt: skip
    if "long" in parts:
        long = parts["long"]
        grown, ratio = long["memory_growth_bytes"] / 2**20, long["time_ratio"]
        of = f"{long['steps']:,} small steps, last quarter relative to the second"
        rows.append(["memory stays constant", of, f"{grown:+.1f} MiB"])
        rows.append(["step time stays constant", of, f"{ratio:.3f} ×{mark(ratio <= FLAT)}"])
    for name, case in parts.get("auto", {}).items():
        ratio = case["ratio"]
        rows.append(["the chosen plan takes ≤ 1.02 × the best found by hand",
                     f"({name}) {case['title']}",
                     f"{ratio:.3f} × {case['best']}{mark(ratio <= PICKED)}"])  # fmt: skip
    latest = max(result["parts"].values(), key=lambda part: part["date"])
    return table(["goal", "case", "measured"], rows) + stand(latest)


def scaling(result: dict[str, Any]) -> str:
    """Write one row per cost."""
    rows = [
        [
            curve["of"],
            f"{curve['sizes'][0]:,} – {curve['sizes'][-1]:,}",
            f"{_cost(cost, one['medians'][0])} – {_cost(cost, one['medians'][-1])}",
            f"{one['exponent']:.2f}",
            f"{one['most']:g}{'' if one['within'] else ', **more**'}",
            curve["because"],
        ]
        for curve in result["curves"].values()
        for cost, one in curve["costs"].items()
    ]
    head = ["cost", "sizes", "from – to", "exponent", "at most", "reason"]
    return table(head, rows) + stand(result)


def _cost(name: str, value: float) -> str:
    return f"{value / 2**20:,.0f} MiB" if name == "bytes" else f"{value:,.3g} s"


WRITERS: dict[str, Callable[[dict[str, Any]], str]] = {
    "lasting": lasting,
    "peers-bf16": peers,
    "peers-bf16--range": tokens_range,
    "peers-bf16--targets": targets,
    "peers-fp32": peers,
    "peers-fp32--targets": targets,
    "scaling": scaling,
}
