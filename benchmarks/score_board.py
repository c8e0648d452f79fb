"""Published rows by kind: prediction errors, coverage of intervals, and picks.

A kind is a chip's generation, the software, dense or experts, what is trained and the number of
devices. Memory is scored in the same way; for rows that ran out of memory, this scores whether the
planner says so. Every error is shown next to that of one constant fitted to the same rows of its
kind.
"""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import published
from published import Row, UnstatedError

from outpace.planner.calibration.prediction_interval import LEVEL, WORLDS, QuestionKind, interval
from outpace.planner.memory import peak as memory
from outpace.planner.memory.setup import MemoryQuestion
from outpace.planner.model.outline import parameters

# BLOOM's trials were "getting the memory snapshot with" nvidia-smi (bigscience 9e64edec, train/
# tr11-176B-ml/chronicles-prequel.md), which its rows do not say.
_WHOLE_DEVICE = "bloom-prequel"
# Times of these tiny models repeat only to 29 % (data/README.md).
_LEAST_HIDDEN = 4096
_TINY = "megatron-lm-golden"


def score(table: Sequence[Row], predict: Callable[[Row], Any]) -> dict[str, Any]:
    """Return the scores of some rows. `predict` returns a row's step, or raises UnstatedError."""
    left_out = Counter[tuple[str, str]]()
    times = [one for row in table if (one := _time(row, predict, left_out)) is not None]
    unjudged = Counter[str]()
    sizes = [one for row in table if (one := _memory(row, unjudged)) is not None]
    groups = regrets(times, {row.id: row.layouts for row in table})
    return {
        "rows_of_file": len(table),
        "left_out": [{"source": source, "why": why, "rows": count}
                     for (source, why), count in sorted(left_out.items())],
        **tables(times),
        "memory_kinds": memory_kinds(sizes, ("chip", "stack", "mlp", "trained")),
        "labels": labels(sizes) | {"unjudged": dict(sorted(unjudged.items()))},
        "regret": groups,
        "rows": times,
        # Rows that show only that something which ran is predicted to fit are left out.
        "memory": [one for one in sizes
                   if one["measured_bytes"] or one["oom"] or one["called_oom"]],
    }  # fmt: skip


def tables(
    times: list[dict[str, Any]], intervals: dict[str, dict[str, Any]] | None = None
) -> dict[str, Any]:
    """Return the tables of step times; with `intervals` of kinds, coverage refers to these."""
    for one in times if intervals else ():
        _, spread = question_kind(one).find(intervals or {})
        ratio = one["measured_s"] / one["predicted_s"]
        one["covered"] = bool(spread["low"] <= ratio <= spread["high"])
    return {
        "kinds": kinds(times, ("chip", "stack", "mlp", "trained", "devices")),
        "sources": kinds(times, ("source",)),
        "wholes": kinds(times, ("mlp",)),
    }


def kind_of(row: Row) -> dict[str, str]:
    """Return a row's kind."""
    model = published.outline(row)
    count = row.optional("n_gpus", 1)
    adapters = "lora" in row["task"].casefold()
    return {
        "chip": str(published.chip(row).architecture),
        "stack": row.framework.stack,
        "mlp": "experts" if model.experts else "dense",
        "trained": "LoRA" if adapters else "full",
        "devices": next(name for most, name in WORLDS if count <= most),
        "source": row.source,
        "software": row.framework.software.name,
        "problem": " ".join((model.name, row["layers"], row["hidden"], row["seq"])),
    }


def question_kind(one: Mapping[str, Any]) -> QuestionKind:
    """Return the kind that determines a row's interval."""
    most = next(most for most, name in WORLDS if name == one["devices"])
    return QuestionKind(
        architecture=one["chip"], experts=one["mlp"] == "experts",
        adapters=one["trained"] != "full", software=one["software"], devices=most,
    )  # fmt: skip


def _time(
    row: Row, predict: Callable[[Row], Any], left_out: Counter[tuple[str, str]]
) -> dict[str, Any] | None:
    try:
        if row["outcome"] == "OOM":
            raise UnstatedError("it ran out of memory")
        if row.source == _TINY and row.optional("hidden", 0) < _LEAST_HIDDEN:
            raise UnstatedError("times of tiny models do not repeat")
        found = predict(row)
        kind = kind_of(row)
    except UnstatedError as error:
        left_out[row.source, str(error)] += 1
        return None
    low, high, *_ = interval(False, False, question_kind(kind))
    ratio = found.measured_s / found.predicted_s
    return {
        "row": row.id, "source": row.source, **kind, "plan": found.plan,
        "predicted_s": found.predicted_s, "measured_s": found.measured_s,
        "ideal_s": found.ideal_s, "fits": found.fits, "covered": bool(low <= ratio <= high),
        "parts_s": found.parts_s,
    }  # fmt: skip


def _memory(row: Row, unjudged: Counter[str]) -> dict[str, Any] | None:
    """Return the memory of a row's first layout; None if nothing is known about it.

    Rows that ran, or ran out of memory, but are not judged are counted by reason.
    """
    out = row["outcome"] == "OOM"
    try:
        if row.measured_bytes is None and not out and row.measured_s is None:
            return None
        question = published.question(row)
        if question.adapters is not None:
            unjudged["adapters, for which there is no memory formula"] += 1
            return None
        found = published.plans(row)
        # Whoever ran these chose unstated settings so that they fit; recipes have their own ways to
        # save memory (activations on the host, 16-bit moments) that tables omit.
        if row.framework.recipes and not row["recompute"]:
            unjudged["recipes that do not state recomputation"] += 1
            return None
        if len(found) > 1:
            unjudged["layouts that are only partly stated"] += 1
            return None
        held = published.columns(row, found, question.outline.layers, times=False)
        kind = kind_of(row)
    except UnstatedError:
        unjudged["rows that the planner cannot express"] += 1
        return None
    traits, fused = published.traits(row), not published.keeps_scores(row)
    memory_question = MemoryQuestion(
        question.outline, question.seq_len, fused_attention=fused, traits=traits
    )
    needs = memory.reserved_bytes(memory_question, held)
    measured = row.measured_bytes
    tensors = needs
    if measured is not None:
        tensors = memory.peak_bytes(memory_question, held, rank=_rank(row))
    reserved = any(word in row["peak_mem_kind"] for word in ("reserved", "nvidia-smi"))
    reserved = reserved or row.source == _WHOLE_DEVICE
    held_bytes = memory.held_bytes(memory_question, held, question.device.memory_bytes or math.inf)
    cut = row.optional("tp", 1) * row.optional("pp", 1)
    room = question.device.memory_bytes
    return {
        "row": row.id, "source": row.source, **kind,
        "predicted_bytes": round(float((held_bytes if reserved else tensors)[0])),
        "measured_bytes": None if measured is None or out else round(measured),
        "parameters": parameters(question.outline) / cut,
        "called_oom": bool(room is not None and needs[0] > room), "oom": out,
    }  # fmt: skip


def _rank(row: Row) -> Any:
    """Return the rank whose memory is logged: for Megatron's tests, the last one."""
    return "last" if row.source == _TINY else "fullest"


def kinds(rows: Iterable[dict[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return one line for each kind, those with the most rows first."""
    together: defaultdict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        together[tuple(row[name] for name in names)].append(row)
    lines = []
    for key, own in sorted(together.items(), key=lambda item: (-len(item[1]), item[0])):
        errors = np.array([one["predicted_s"] / one["measured_s"] - 1 for one in own])
        lines.append({
            **dict(zip(names, key, strict=True)), "rows": len(own),
            "mean": _short(np.abs(errors).mean()), "median": _short(np.median(np.abs(errors))),
            "bias": _short(errors.mean()), "p95": _short(np.quantile(np.abs(errors), 0.95)),
            "coverage": _short(np.mean([one["covered"] for one in own])),
            "constant": _short(one_constant([one["ideal_s"] for one in own],
                                            [one["measured_s"] for one in own])),
        })  # fmt: skip
    return lines


def memory_kinds(rows: Iterable[dict[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return one line for each kind with published memory."""
    together: defaultdict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if row["measured_bytes"]:
            together[tuple(row[name] for name in names)].append(row)
    lines = []
    for key, own in sorted(together.items(), key=lambda item: (-len(item[1]), item[0])):
        errors = np.array([one["predicted_bytes"] / one["measured_bytes"] - 1 for one in own])
        each = [one["measured_bytes"] / one["parameters"] for one in own]
        middle = statistics.median(each)
        lines.append({
            **dict(zip(names, key, strict=True)), "rows": len(own),
            "mean": _short(np.abs(errors).mean()), "median": _short(np.median(np.abs(errors))),
            "bias": _short(errors.mean()), "p95": _short(np.quantile(np.abs(errors), 0.95)),
            "constant": _short(statistics.median(abs(middle / one - 1) for one in each)),
        })  # fmt: skip
    return lines


def labels(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return how often the planner is wrong about what fits, for completely stated layouts."""
    ran, ended = [[one for one in rows if one["oom"] == oom] for oom in (False, True)]
    false_no = [one["row"] for one in ran if one["called_oom"]]
    false_yes = [one["row"] for one in ended if not one["called_oom"]]
    return {
        "ran": len(ran), "ran_but_said_not_to_fit": false_no,
        "ran_out": len(ended), "ran_out_but_said_to_fit": false_yes,
    }  # fmt: skip


def regrets(
    times: Sequence[dict[str, Any]], alike: dict[str, tuple[str, ...]]
) -> list[dict[str, Any]]:
    """Return the regret of the pick for each group of layouts of one problem."""
    groups: defaultdict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    for one in times:
        groups[alike[one["row"]]].append(one)
    found = []
    for key, own in groups.items():
        if len({one["plan"] for one in own}) < 2:
            continue
        best = min(own, key=lambda one: one["measured_s"])
        picked = min(own, key=lambda one: one["predicted_s"])
        blind = statistics.fmean(one["measured_s"] / best["measured_s"] - 1 for one in own)
        found.append({
            "source": key[0], "group": " ".join(filter(None, key[1:])), "rows": len(own),
            "regret": _short(picked["measured_s"] / best["measured_s"] - 1),
            "of_any": _short(blind), "picked": picked["row"], "best": best["row"],
        })  # fmt: skip
    return found


def regret_by_source(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the regret of each source's groups."""
    together: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for one in groups:
        together[one["source"]].append(one)
    return [
        {"source": source, "groups": len(own),
         "mean": statistics.fmean(one["regret"] for one in own),
         "p95": float(np.quantile([one["regret"] for one in own], 0.95)),
         "right": statistics.fmean(one["picked"] == one["best"] for one in own),
         "of_any": statistics.fmean(one["of_any"] for one in own)}
        for source, own in sorted(together.items(), key=lambda item: -len(item[1]))
    ]  # fmt: skip


def one_constant(values: Sequence[float], truths: Sequence[float]) -> float:
    """Return the mean error of c × values for the best c: the weighted median of their ratios."""
    ratios = np.array(truths) / np.array(values)
    weights = 1 / ratios
    order = np.argsort(ratios)
    half = np.searchsorted(np.cumsum(weights[order]), weights.sum() / 2)
    best = ratios[order][half]
    return float(np.abs(best / ratios - 1).mean())


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def show(board: dict[str, Any]) -> None:
    """Print every table."""
    for title, names in (
        ("kinds", ("chip", "stack", "mlp", "trained", "devices")), ("sources", ("source",)),
        ("wholes", ("mlp",)), ("memory_kinds", ("chip", "stack", "mlp", "trained")),
    ):  # fmt: skip
        print(f"\n{title}")
        for line in board[title]:
            words = " ".join(f"{line[name]:<18}" for name in names)
            covered = f" covered {line['coverage']:.0%}" if "coverage" in line else ""
            print(f"{words} {line['rows']:5} mean {line['mean']:.1%} median {line['median']:.1%} "
                  f"bias {line['bias']:+.1%} p95 {line['p95']:.1%}{covered} "
                  f"constant {line['constant']:.1%}")  # fmt: skip
    told = board["labels"]
    print(f"\nfits: {len(told['ran_but_said_not_to_fit'])} of {told['ran']} that ran are said not "
          f"to fit; {len(told['ran_out_but_said_to_fit'])} of {told['ran_out']} that ran out of "
          f"memory are said to fit; not judged: {told['unjudged']}")  # fmt: skip
    for one in regret_by_source(board["regret"]):
        print(f"regret {one['source']:<28} {one['groups']:4} groups mean {one['mean']:.1%} "
              f"p95 {one['p95']:.1%} right {one['right']:.0%} any {one['of_any']:.1%}")  # fmt: skip
    print(f"\n{len(board['rows'])} of {board['rows_of_file']} rows are predicted; not:")
    for one in board["left_out"]:
        print(f"{one['rows']:5} {one['source']:<28} {one['why']}")
    print(f"level of the interval: {LEVEL:.0%}")
