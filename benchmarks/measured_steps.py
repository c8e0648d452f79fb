"""Published steps with the planner's predictions: a small table of cases to cite in answers.

    python benchmarks/figures.py    # writes outpace/catalog/measured_steps.json, among others

It joins results/planner_kinds.json (recorded by `planner_accuracy.py --kinds`) with the rows of
data/published*.csv, so that a recorded prediction exists only once.
"""

import json
from pathlib import Path
from typing import Any

import published

HERE = Path(__file__).parent
KINDS = HERE / "results" / "planner_kinds.json"
KEPT = HERE.parent / "outpace" / "catalog" / "measured_steps.json"
COLUMNS = (
    "model", "parameters", "experts", "chip", "architecture", "devices", "seq_len", "global_batch",
    "stack", "layout", "precision", "zero", "tp", "pp", "cp", "ep", "offloads", "measured_s",
    "predicted_s", "source",
)  # fmt: skip


def _cells(one: dict[str, Any], row: published.Row) -> list[Any]:
    """Return the cells of a predicted row, by COLUMNS."""
    axes = [row.optional(name, 1) for name in ("tp", "pp", "cp", "ep")]
    model = row["model"] or row.source
    return [
        model, _parameters(row), one["mlp"] == "experts", published.chip(row).name, one["chip"],
        row.optional("n_gpus", 1), row.number("seq"), row.number("global_batch"), one["stack"],
        one["plan"], _precision(row), published.zero_level(row), *axes,
        row["offload"] not in ("", "none"), one["measured_s"], one["predicted_s"], one["source"],
    ]  # fmt: skip


def _precision(row: published.Row) -> str:
    """Return the published dtype of matmuls: "16 bits" if only this is stated."""
    said = row["precision"].casefold()
    if published.eight(row):
        return "MXFP8" if "mx" in said else "fp8"
    if "bf16" in said or "bfloat16" in said:
        return "bf16"
    return "fp16" if "fp16" in said else "16 bits" if "16" in said else "fp32"


def _parameters(row: published.Row) -> float:
    """Return the number of parameters in billions."""
    from outpace.planner.model.outline import parameters

    return float(f"{parameters(published.outline(row)) / 1e9:.3g}")


def text() -> str:
    """Return the table as JSON, one row per line, of steps that train everything, as plans do."""
    kinds = json.loads(KINDS.read_text(encoding="utf-8"))
    rows = {(row.source, row.id): row for row in published.rows(*published.ALL)}
    lines = [json.dumps(_cells(one, rows[one["source"], one["row"]]), ensure_ascii=False)
             for one in kinds["rows"] if one["trained"] == "full"]  # fmt: skip
    head = json.dumps({"from": "benchmarks/measured_steps.py", "date": kinds["date"]})
    columns = json.dumps(COLUMNS)
    return f'{head[:-1]}, "columns": {columns}, "rows": [\n' + ",\n".join(lines) + "\n]}\n"
