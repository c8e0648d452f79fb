"""What was recorded of custom modules, as Markdown: their outcomes, and what they cost."""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from pages import stand, table

_MARKS = {"equal": "=", "cut": "c", "draws": "d"}
_OUTCOMES = {  # misses first
    "wrong": "wrong (✗)", "state": "with state in no buffer, which is told (s)",
    "cut": "otherwise by the cut of the batch alone (c)", "draws": "that draw (d)",
    "refused": "refused", "equal": "equal (=)",
}  # fmt: skip
# What of a sentence is of the module, the strategy or the batch: quoted, in parentheses, figures,
# and names with dots or capitals.
_DETAILS = (
    (r"\([^()]*\)", "(…)"), (r"'[^']*'", "…"), (r"\{[^{}]*\}", "…"),
    (r"\b(ddp|ring|zero\d|hsdp|mp|gpipe|1f1b|interleaved|loopedbfs|zbv?|dualpipev|tp)\b", "…"),
    (r"\S*[\w*]\.[\w*]\S*", "…"), (r"(?<=[a-z] )_?[A-Z]\w+|^\w+(?= has no )", "…"),
    (r"[\d.]+", "…"), (r"…(?:,? (?:and )?…)+", "…"),
)  # fmt: skip


def zoo(result: dict[str, Any]) -> str:
    """A row a module, a column a strategy; below it the kinds of refusals, by frequency."""
    modules = dict(sorted(result["modules"].items(), key=_by_misses))
    strategies = list(dict.fromkeys(s for one in modules.values() for s in one["cells"]))
    strategies = [name for name in strategies if name != "all"]
    everything = [cell for one in modules.values() for cell in one["cells"].values()]
    kinds = count_sentences(everything)
    numbers = {kind: number for number, kind in enumerate(kinds, start=1)}
    rows = []
    for name, one in modules.items():
        cells = one["cells"]
        shown = [_cell(cells.get(s) or cells.get("all", ""), numbers) for s in strategies]
        rows.append([name.replace("_", " "), *shown])
    counted = ", ".join(
        f"{sum(_outcome(cell) == outcome for cell in everything)} {words}"
        for outcome, words in reversed(_OUTCOMES.items())
    )
    said = "".join(
        f"{numbers[kind]}. ({len(cells)} cells) {cells[0]}\n" for kind, cells in kinds.items()
    )
    return (
        f"{len(modules)} modules, two processes, {result['samples']} samples: {counted}. Numbers "
        "are sentences, below: of each kind the first, with the names and figures of its module."
        f"\n\n{table(['module', *strategies], rows)}\n{said}{_commits(modules)}{stand(result)}"
    )


def count_sentences(cells: Iterable[str]) -> dict[str, list[str]]:
    """The sentences of cells by kind, that is but for names and figures: most frequent first."""
    kinds: dict[str, list[str]] = {}
    for cell in cells:
        sentence = cell.partition(": ")[2]
        if sentence:
            kinds.setdefault(_kind(sentence), []).append(sentence)
    return dict(sorted(kinds.items(), key=lambda one: -len(one[1])))


def _kind(sentence: str) -> str:
    for pattern, shown in _DETAILS:
        sentence = re.sub(pattern, shown, sentence)
    return sentence


def _outcome(cell: str) -> str:
    return cell.partition(":")[0]


def _by_misses(module: tuple[str, dict[str, Any]]) -> list[int]:
    cells = [_outcome(cell) for cell in module[1]["cells"].values()]
    return [-cells.count(outcome) for outcome in _OUTCOMES]


def _cell(cell: str, numbers: dict[str, int]) -> str:
    outcome, _, sentence = cell.partition(": ")
    number = f"{numbers[_kind(sentence)]}" if sentence else ""
    marks = {**_MARKS, "refused": number, "state": f"s {number}", "wrong": f"✗ {number}"}
    return marks.get(outcome, "")


def _commits(modules: dict[str, Any]) -> str:
    """Say how many cells are of which commit, where they are of several."""
    counts = Counter(commit[:10] for one in modules.values() for commit in one["commits"].values())
    if len(counts) == 1:
        return ""
    named = ", ".join(f"{count} of {commit}" for commit, count in counts.most_common())
    return f"\nCells were made at several commits: {named}.\n"


def own_modules(result: dict[str, Any]) -> str:
    """A row a strategy: the look before step 1, and a step beside the commit of before."""
    stack, before = result["stack"], result["before"]
    rows = []
    for strategy, case in result["cases"].items():
        look, price = case["look"], case.get("price")
        beside = ("now_over_before", "now_over_before_in_processor_time")
        rows.append([
            strategy,
            f"{look['look_in_steps']:.2f}", f"{look['look_in_steps_of_processor_time']:.2f}",
            f"{look['peak_over_off']:.3f}",
            *(f"{price[name]:.3f}" if price else "n/a" for name in beside),
        ])  # fmt: skip
    columns = ["strategy", "look, in steps", "in steps of processor time", "peak over that without",
               f"step over that of {before[:7]}", "in processor time"]  # fmt: skip
    return (
        f"{stack['layers']} encoder blocks of width {stack['width']}, {stack['global_batch']} "
        f"samples of {stack['seq_len']}, {result['processes']} processes of one thread; medians of "
        f"jobs and turns that alternate.\n\n{table(columns, rows)}{stand(result)}"
    )


WRITERS: dict[str, Callable[[dict[str, Any]], str]] = {"zoo": zoo, "own_modules": own_modules}
