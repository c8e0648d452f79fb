"""Tables by kind in docs/results/accuracy.md, from score_board.py's results for published rows."""

from collections.abc import Callable
from typing import Any

import score_board
from pages import stand, table

_LEAST = 3  # minimum number of rows of a kind that is shown separately


def kinds(result: dict[str, Any]) -> str:
    """Write step times: each kind with enough rows, then all dense models and all with experts."""
    names = ("chip", "stack", "mlp", "trained", "devices")
    shown = [one for one in result["kinds"] if one["rows"] >= _LEAST]
    fewer = [one for one in result["kinds"] if one["rows"] < _LEAST]
    head = ["generation", "software", "MLPs", "trained", "devices", "rows", "mean", "median",
            "bias", "p95", "in the interval", "one constant"]  # fmt: skip
    rows = [[*(one[name] for name in names), *_figures(one)] for one in shown]
    rows += [[f"all {one['mlp']}", "", "", "", "", *_figures(one)] for one in result["wholes"]]
    few = sum(one["rows"] for one in fewer)
    return (
        table(head, rows)
        + f"\n{len(fewer)} further kinds have fewer than {_LEAST} rows each, and {few} together.\n"
        + stand(result)
    )


def _figures(one: dict[str, Any]) -> list[str]:
    covered = [f"{one['coverage']:.0%}"] if "coverage" in one else []
    return [
        str(one["rows"]), f"{one['mean']:.1%}", f"{one['median']:.1%}", f"{one['bias']:+.1%}",
        f"{one['p95']:.0%}", *covered, f"{one['constant']:.1%}",
    ]  # fmt: skip


def sources(result: dict[str, Any]) -> str:
    """Write step times by source."""
    head = ["source", "rows", "mean", "median", "bias", "p95", "in the interval", "one constant"]
    return table(head, [[one["source"], *_figures(one)] for one in result["sources"]])


def intervals(result: dict[str, Any]) -> str:
    """Write the intervals that `outpace plan` prints by kind of chip and model, with their data."""
    head = ["kind", "rows", "sources", "measured / predicted", "coverage of sources left out"]
    rows = [
        [name, str(one["rows"]), str(len(one["sources"])), f"{one['low']:.2f} to {one['high']:.2f}",
         f"{one['coverage']:.0%} (at least {min(one['left_out'].values()):.0%})"]
        for name, one in result["intervals"].items()
    ]  # fmt: skip
    return table(head, rows)


def memory(result: dict[str, Any]) -> str:
    """Write peak memory by kind, and which layouts are predicted to fit."""
    names = ("chip", "stack", "mlp", "trained")
    head = ["generation", "software", "MLPs", "trained", "rows", "mean", "median", "bias", "p95",
            "one constant"]  # fmt: skip
    rows = [[*(one[name] for name in names), *_figures(one)] for one in result["memory_kinds"]]
    told = result["labels"]
    fits = len(told["ran_out_but_said_to_fit"])
    return (
        table(head, rows)
        + f"\nOf {told['ran']:,} layouts that ran, {len(told['ran_but_said_not_to_fit'])} are "
        f"predicted not to fit; of {told['ran_out']} that ran out of memory, "
        f"{fits} {'is' if fits == 1 else 'are'} predicted to fit. "
        + "Rows without a verdict, by reason: "
        + "; ".join(f"{why} ({count:,})" for why, count in told["unjudged"].items())
        + ".\n"
    )


def regret(result: dict[str, Any]) -> str:
    """Write the regret of the planner's pick among the published layouts of a problem."""
    head = ["source", "groups", "mean regret", "p95", "best picked", "of any"]
    rows = [
        [one["source"], str(one["groups"]), f"{one['mean']:.1%}", f"{one['p95']:.1%}",
         f"{one['right']:.0%}", f"{one['of_any']:.1%}"]
        for one in score_board.regret_by_source(result["regret"])
    ]  # fmt: skip
    return table(head, rows)


def left_out(result: dict[str, Any]) -> str:
    """Write the rows without a predicted step, with reasons."""
    rows = [[one["source"], str(one["rows"]), one["why"]] for one in result["left_out"]]
    return table(["source", "rows", "why"], rows)


WRITERS: dict[str, Callable[[dict[str, Any]], str]] = {
    "planner_kinds": kinds,
    "planner_kinds--sources": sources,
    "planner_kinds--intervals": intervals,
    "planner_kinds--memory": memory,
    "planner_kinds--regret": regret,
    "planner_kinds--left-out": left_out,
}
