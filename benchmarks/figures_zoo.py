"""What was recorded of custom modules, as Markdown: their outcomes, and what they cost."""

from collections.abc import Callable
from typing import Any

from pages import stand, table

_MARKS = {"equal": "=", "cut": "c", "resumed": "r", "draws": "d"}


def zoo(result: dict[str, Any]) -> str:
    """A row a module, a column a strategy; below it the sentences of refusals."""
    modules = result["modules"]
    strategies = list(dict.fromkeys(s for one in modules.values() for s in one["cells"]))
    strategies = [name for name in strategies if name != "all"]
    sentences: dict[str, int] = {}
    rows = []
    for name, one in modules.items():
        cells = one["cells"]
        shown = [_cell(cells.get(s) or cells.get("all", ""), sentences) for s in strategies]
        rows.append([name.replace("_", " "), *shown])
    everything = [cell for one in modules.values() for cell in one["cells"].values()]
    counted = ", ".join(
        f"{sum(cell.startswith(kind) for cell in everything)} {words}"
        for kind, words in (
            ("equal", "equal (=)"), ("cut", "otherwise by the cut of the batch alone (c)"),
            ("resumed", "equal but for what a checkpoint does not hold (r)"),
            ("draws", "that draw (d)"), ("refused", "refused"), ("wrong", "wrong (✗)"),
        )
    )  # fmt: skip
    said = "".join(f"{number}. {sentence}\n" for sentence, number in sentences.items())
    return (
        f"{len(modules)} modules, two processes, {result['samples']} samples: {counted}. Numbers "
        f"are refusals, below.\n\n{table(['module', *strategies], rows)}\n{said}{stand(result)}"
    )


def _cell(outcome: str, sentences: dict[str, int]) -> str:
    if outcome in _MARKS:
        return _MARKS[outcome]
    kind, _, sentence = outcome.partition(": ")
    if not sentence:
        return ""
    number = sentences.setdefault(sentence, len(sentences) + 1)
    return str(number) if kind == "refused" else f"✗ {number}"


def own_modules(result: dict[str, Any]) -> str:
    """A row a strategy: the look before step 1, and a step beside the commit of before."""
    stack, before = result["stack"], result["before"]
    rows = []
    for strategy, case in result["cases"].items():
        look, price = case["look"], case["price"]
        rows.append([
            strategy,
            f"{look['look_in_steps']:.2f}", f"{look['look_in_steps_of_processor_time']:.2f}",
            f"{look['peak_over_off']:.3f}",
            f"{price['now_over_before']:.3f}", f"{price['now_over_before_in_processor_time']:.3f}",
        ])  # fmt: skip
    columns = ["strategy", "look, in steps", "in steps of processor time", "peak over that without",
               f"step over that of {before[:7]}", "in processor time"]  # fmt: skip
    return (
        f"{stack['layers']} encoder blocks of width {stack['width']}, {stack['global_batch']} "
        f"samples of {stack['seq_len']}, {result['processes']} processes of one thread; medians of "
        f"jobs and turns that alternate.\n\n{table(columns, rows)}{stand(result)}"
    )


WRITERS: dict[str, Callable[[dict[str, Any]], str]] = {"zoo": zoo, "own_modules": own_modules}
