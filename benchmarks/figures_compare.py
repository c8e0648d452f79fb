"""Recorded results of comparisons and tunings, as Markdown."""

from collections.abc import Callable
from statistics import median
from typing import Any

from pages import stand, table


def false_claims(result: dict[str, Any]) -> str:
    """Write the claims of comparisons without and with a real difference."""
    head = ["the second arm does", "comparisons", "differences claimed", "in the right direction",
            "median rounds to the claim", "interval contains the true difference"]  # fmt: skip
    rows = [
        [
            f"{100 * one['more']:.0f} % more" if one["more"] else "the same",
            str(one["comparisons"]),
            str(one["claims"]),
            str(one["right_way"]) if one["more"] else "–",
            f"{median(one['rounds_to_claim']):.0f}" if one["rounds_to_claim"] else "–",
            f"{one['covered']} of {one['bounded']}",
        ]
        for one in result["kinds"]
    ]
    verdict = "Reached" if result["reached"] else "Not reached"
    about = (
        f"\nTarget: at most {result['most_false']:g} false claims in "
        f"{result['kinds'][0]['comparisons']} comparisons of equal arms, evaluated after "
        f"each of up to {result['rounds']} rounds. {verdict}, in "
        f"{result['took_s'] / 60:.0f} min.\n"
    )
    return table(head, rows) + about + stand(result)


def tune(result: dict[str, Any]) -> str:
    """Write the results of few trials compared with whole grids."""
    head = ["problem", "grid", "regret", "mean regret of the grid", "trials",
            "share of the grid's time", "gain over the default", "recorded on"]  # fmt: skip
    rows = [
        [
            row["problem"],
            f"{row['configurations']} plans, {row['strategies']} strategies",
            f"{row['regret']:.1%}",
            f"{row['any']:.0%}",
            str(row["trials"]),
            f"{row['share']:.1%}",
            "n/a" if row["default"] is None else f"{row['default']:.0%}",
            f"{row['machine']['cpu']}, {row['date'][:10]}",
        ]
        for row in result["rows"]
    ]
    missing = result["problems"] - len(result["rows"])
    worst = {
        name: max(row[name] for row in result["rows"]) for name in ("regret", "trials", "share")
    }
    reached = worst["regret"] <= 0.02 and worst["trials"] <= 8 and worst["share"] <= 0.15
    about = (
        "\nTarget for every problem: at most 2 % regret, 8 trials and 15 % of the grid's time. "
        f"{'Reached' if reached else 'Not reached'}: at worst, {worst['regret']:.1%} regret, "
        f"{worst['trials']} trials and {worst['share']:.1%} of the grid's time."
        f"{f' {missing} problems are not recorded yet.' if missing else ''}\n"
    )
    return table(head, rows) + about + stand(result)


WRITERS: dict[str, Callable[[dict[str, Any]], str]] = {"false_claims": false_claims, "tune": tune}
