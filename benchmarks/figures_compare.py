"""What was recorded of comparisons, as Markdown."""

from collections.abc import Callable
from statistics import median
from typing import Any

from pages import stand, table


def false_claims(result: dict[str, Any]) -> str:
    """Claims where nothing differs, and where something does."""
    head = ["the second does", "comparisons", "a difference was claimed of", "the right way",
            "rounds to the claim, median", "interval holds the true difference"]  # fmt: skip
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
        f"\nAsked: at most {result['most_false']:g} false claims in "
        f"{result['kinds'][0]['comparisons']} comparisons of what is the same, each looked at "
        f"after every one of up to {result['rounds']} rounds. {verdict}, in "
        f"{result['took_s'] / 60:.0f} min.\n"
    )
    return table(head, rows) + about + stand(result)


WRITERS: dict[str, Callable[[dict[str, Any]], str]] = {"false_claims": false_claims}
