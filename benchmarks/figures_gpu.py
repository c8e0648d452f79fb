"""GPU measurements as Markdown: predictions next to measurements, missed targets first."""

import csv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gpu.check import measured
from gpu.targets import shown
from pages import stand, table

_THROUGHPUT = {
    "gpt2": "GPT-2, 16 × 1,024",
    "gpt2 batch 4": "GPT-2, 4 × 1,024",
    "gpt2 batch 48": "GPT-2, 48 × 1,024",
    "llama-3.2-1b": "Llama-3.2-1B, 4 × 2,048",
    "llama-3.2-1b batch 8": "Llama-3.2-1B, 8 × 2,048",
    "lora": "LoRA of Llama-3.2-1B, 4 × 2,048",
}
_GIB = 2**30
# Names of sections whose key is not a term of the glossary.
_SECTIONS = {"levers": "options, one at a time"}


def gpu(result: dict[str, Any]) -> str:
    """Write targets, throughput next to the handwritten loop and the prediction, and the rest."""
    sections = result["sections"]
    parts = [
        _targets(result["targets"]), _steps(sections), _kernels(sections), _levers(sections),
        _ceilings(sections), _left(sections), _card(sections),
    ]  # fmt: skip
    return "\n".join(part for part in parts if part) + stand(result)


def _targets(judged: list[dict[str, Any]]) -> str:
    words = {False: "**missed**", None: "not measured", True: "reached"}
    rows = [[words[one["met"]], one["target"], one["bound"], shown(one)] for one in judged]
    return table(["", "target", "bound", "measured"], rows)


def _steps(sections: dict[str, Any]) -> str:
    traced, probed = _rows(sections, "traced memory"), _rows(sections, "probed time")
    rows = [
        [shape, _shown_name(name), _ms(row.get("step_time_s")), _tokens(row), _speed(row),
         _share(row),
         _predicted_time(row, row.get("predicted")),
         _predicted_time(row, probed.get(f"{section}: {name}")), _gib(row.get("peak_bytes")),
         _traced(traced.get(f"{section}: {name}"))]
        for section, shape in _THROUGHPUT.items()
        for name, row in _rows(sections, section).items()
    ]  # fmt: skip
    if not rows:
        return ""
    head = ["model, batch", "", "step", "tokens/s", "speed / handwritten loop",
            "MFU, share of best matmul", "predicted step, by the catalog", "by the probe",
            "memory", "traced"]  # fmt: skip
    return table(head, rows)


def _shown_name(name: str) -> str:
    return name.replace("hand loop", "handwritten loop")


def _tokens(row: dict[str, Any]) -> str:
    if not measured(row):
        return "failed" if "failure" in row else "skipped"
    return f"{row['tokens_per_s']:,.0f}" if "tokens_per_s" in row else "–"


def _speed(row: dict[str, Any]) -> str:
    if "ratio" not in row:
        return "–"
    ratios = row.get("ratios")
    spread = f" ({min(ratios):.2f} – {max(ratios):.2f})" if ratios else ""
    return f"{row['ratio']:.2f} ×{spread}"


def _share(row: dict[str, Any]) -> str:
    if row.get("mfu") is None:
        return "–"
    best = row.get("of_best_product")
    return f"{row['mfu']:.0%}, {'n/a' if best is None else f'{best:.0%}'}"


def _predicted_time(row: dict[str, Any], said: dict[str, Any] | None) -> str:
    if said is None or not measured(row):
        return "–"
    if "step_time_s" not in said:
        return "n/a"
    off = said["step_time_s"] / row["step_time_s"] - 1
    inside = said["low_s"] <= row["step_time_s"] <= said["high_s"]
    return (
        f"{_ms(said['step_time_s'])} ({off:+.0%}), {said['low_s'] * 1e3:.1f} – "
        f"{said['high_s'] * 1e3:.1f} at {said['level']:.0%}: {'inside' if inside else 'outside'}"
    )


def _traced(row: dict[str, Any] | None) -> str:
    if row is None or not measured(row):
        return "–"
    off = f" ({row['off_signed']:+.1%})" if "off_signed" in row else ""
    return f"{_gib(row['traced_bytes'])}{off}"


def _kernels(sections: dict[str, Any]) -> str:
    """Write times of the loss, attention and other optimizers, and their ratios."""
    over = {"over_causal": "causal", "over_fused": "adamw-fused"}
    rows = [
        [section, name, _ms(row["step_time_s"]), _gib(row.get("peak_bytes")),
         next((f"{row[key]:.2f} × {what}" for key, what in over.items() if key in row), "–")]
        for section in ("loss", "attention", "optimizers", "documents")
        for name, row in _rows(sections, section).items()
        if measured(row) and "step_time_s" in row
    ]  # fmt: skip
    return table(["", "", "time", "memory", "over"], rows) if rows else ""


def _levers(sections: dict[str, Any]) -> str:
    """Write losses and times of all options."""
    rows = [
        [name, _ms(row["step_time_s"]), "–" if row["off"] is None else f"{row['off']:.1e}",
         _gib(row["peak_bytes"])]
        for name, row in _rows(sections, "levers").items()
        if measured(row) and "step_time_s" in row
    ]  # fmt: skip
    head = ["option, on a model of 4 layers and width 256", "step", "loss difference from plain",
            "memory"]  # fmt: skip
    return table(head, rows) if rows else ""


def _ceilings(sections: dict[str, Any]) -> str:
    """Write the waits and busy time of a step, the first step, and first uses."""
    lines = []
    for name, row in _rows(sections, "first step").items():
        if measured(row) and row["first_step_s"] is not None:
            lines.append(f"first step after {row['first_step_s']:.1f} s: {name}")
    waits = _rows(sections, "waits")
    if waits.get("waits", {}).get("of_a_step") is not None:
        places = ", ".join(f"{place} ({count})" for place, count in waits["waits"]["places"])
        lines.append(f"waits per step: {waits['waits']['of_a_step']:g} {places}".rstrip())
    if waits.get("profile", {}).get("busy_share") is not None:
        lines.append(f"the device is busy {waits['profile']['busy_share']:.1%} of a step")
    for name, row in _rows(sections, "first use").items():
        if measured(row):
            lines.append(f"`outpace {name}` took {row['took_s']:.1f} s")
    return "".join(f"- {line}\n" for line in lines)


def _rows(sections: dict[str, Any], section: str) -> dict[str, Any]:
    rows: dict[str, Any] = sections.get(section, {}).get("rows", {})
    return rows


def _left(sections: dict[str, Any]) -> str:
    return "".join(f"- {line}\n" for line in _unfinished(sections))


def _unfinished(sections: dict[str, Any]) -> Iterator[str]:
    for name, told in sections.items():
        shown_name = _SECTIONS.get(name, name)
        if told["status"] != "done":
            status = told["status"].replace("out of time", "not finished, because time was up")
            yield f"{shown_name}: {status}."
        for row, value in _rows(sections, name).items():
            if isinstance(value, dict) and "failure" in value:
                yield f"{shown_name}, {row}: {value['failure']}"


def _card(sections: dict[str, Any]) -> str:
    device = _rows(sections, "environment").get("device")
    if device is None:
        return ""
    best = _rows(sections, "ceilings").get("bf16 products", {})
    rate = best.get("best_flops_per_s")
    matmul = "" if rate is None else f" Its best matmul in bf16: {rate / 1e12:.0f} TFLOP/s."
    return (
        f"{device['name']}, {device['memory_bytes'] / _GIB:.0f} GiB, power limit "
        f"{device.get('power.limit', 'n/a')}, driver {device.get('driver_version', 'n/a')}, cuDNN "
        f"{device['cudnn']}.{matmul}\n"
    )


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:.1f} ms"


def _gib(size: float | None) -> str:
    return "–" if size is None else f"{size / _GIB:.2f} GiB"


def first_h200(path: Path) -> str:
    """Write what the code of that day measured, and the result of trying corrections."""
    head = ["model, batch", "", "compiled", "precision, optimizer", "step", "tokens/s",
            "memory of tensors"]  # fmt: skip
    with path.open(newline="", encoding="utf-8") as file:
        rows = [
            [f"{row['model']}, {row['global_batch']} × {int(row['seq_len']):,}",
             _shown_name(row["variant"]),
             row["compile"], f"{row['precision']}, {row['optimizer']}", f"{row['wall_ms']} ms",
             f"{int(row['tokens_per_s']):,}", f"{float(row['peak_tensors_gib']):.2f} GiB"]
            for row in csv.DictReader(file)
        ]  # fmt: skip
    return table(head, rows)


WRITERS: dict[str, Callable[[dict[str, Any]], str]] = {
    "gpu-h100-sxm": gpu,
    "gpu-h200-sxm": gpu,
}
# Written from data/NAME.csv.
DATA: dict[str, Callable[[Path], str]] = {"h200-2026-11-27": first_h200}
