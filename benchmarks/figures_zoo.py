"""Results of custom modules as Markdown: their outcomes and costs."""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from pages import stand, table

_MARKS = {"equal": "=", "cut": "c", "draws": "d"}
_OUTCOMES = {  # misses first
    "wrong": "wrong (✗)", "state": "with state outside buffers, which is reported (s)",
    "cut": "that differ only because the batch is split (c)",
    "draws": "that draw random numbers (d)", "refused": "refused", "equal": "equal (=)",
}  # fmt: skip
# Parts of a sentence that depend on the module, the strategy or the batch: quoted or parenthesised
# text, figures, and names with dots or capitals.
_DETAILS = (
    (r"\([^()]*\)", "(…)"), (r"'[^']*'", "…"), (r"\{[^{}]*\}", "…"),
    (r"\b(ddp|ring|zero\d|hsdp|mp|gpipe|1f1b|interleaved|loopedbfs|zbv?|dualpipev|tp)\b", "…"),
    (r"\S*[\w*]\.[\w*]\S*", "…"), (r"(?<=[a-z] )_?[A-Z]\w+|^\w+(?= has no )", "…"),
    (r"[\d.]+", "…"), (r"…(?:,? (?:and )?…)+", "…"),
)  # fmt: skip


def zoo(result: dict[str, Any]) -> str:
    """Write a row per module and a column per strategy, then the kinds of refusals by frequency."""
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
        f"{len(modules)} modules, two processes, {result['samples']} samples: {counted}. "
        "Numbers refer to the sentences below: the first of each kind, with its module's names and "
        "figures."
        f"\n\n{table(['module', *strategies], rows)}\n{said}{_commits(modules)}{stand(result)}"
    )


def count_sentences(cells: Iterable[str]) -> dict[str, list[str]]:
    """Return sentences by kind (equal except for names and figures), most frequent first."""
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
    """Return how many cells were recorded at each commit if there are several."""
    counts = Counter(commit[:10] for one in modules.values() for commit in one["commits"].values())
    if len(counts) == 1:
        return ""
    named = ", ".join(f"{count} at {commit}" for commit, count in counts.most_common())
    return f"\nCells were recorded at several commits: {named}.\n"


def own_modules(result: dict[str, Any]) -> str:
    """Write a row per strategy: the check before step 1, and a step compared with an old commit."""
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
    columns = ["strategy", "check, in steps", "in steps of CPU time", "peak / peak without it",
               f"step / step at {before[:7]}", "in CPU time"]  # fmt: skip
    return (
        f"{stack['layers']} encoder blocks of width {stack['width']}, {stack['global_batch']} "
        f"samples of {stack['seq_len']}, {result['processes']} processes with one thread each; "
        f"medians of alternating jobs and steps.\n\n{table(columns, rows)}{stand(result)}"
    )


WRITERS: dict[str, Callable[[dict[str, Any]], str]] = {"zoo": zoo, "own_modules": own_modules}
