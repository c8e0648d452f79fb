"""Each run's memory predicted by the trace, and its time by a probe's measurements."""

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from gpu.check import Check, measured
from gpu.commands import MACHINE_FILE
from gpu.shapes import shape_of
from gpu.training import predicted, run_folder
from outpace.catalog.accelerators import find_accelerator
from outpace.records.machine import Machine

_AT_ONCE = 4  # number of single-threaded processes
_SECTIONS = ("gpt2", "llama-3.2-1b", "gpt2 batch 4", "lora", "llama-3.2-1b batch 8",
             "gpt2 batch 48")  # fmt: skip


def traced_memory(check: Check) -> None:
    """Trace every measured row of the throughput sections, several in parallel; uses no GPU."""
    rows = {f"{section}: {name}": (section, row) for section, name, row in _runs(check)}
    if check.small:
        rows = dict(list(rows.items())[:1])
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        futures = {name: pool.submit(_traced, check, *one) for name, one in rows.items()}
        for name, future in futures.items():
            check.row(name, 5.0, future.result)


def probed_time(check: Check) -> None:
    """Predict every run of this call from the machine.json of this call's probe."""
    if not (check.folder / MACHINE_FILE).is_file():
        check.put("probe", {"left_out": "no probe of 'first use' is in this call"})
        return
    machine = Machine.load(check.folder / MACHINE_FILE)
    for section, name, row in _runs(check):
        folder = run_folder(check.at(section), name)
        if folder.is_dir():
            made = partial(_beside, row["step_time_s"], folder, machine)
            check.row(f"{section}: {name}", 1.0, made)


def _beside(step_time_s: float, folder: Path, machine: Machine) -> dict[str, Any]:
    said = predicted(folder, machine)
    if "step_time_s" not in said:
        return said
    return {**said, "off_signed": said["step_time_s"] / step_time_s - 1}


def _runs(check: Check) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield section, name and figures of each timed run of outpace."""
    for section in _SECTIONS:
        for name, row in check.earlier.get(section, {}).get("rows", {}).items():
            if measured(row) and "plan" in row:
                yield section, name, row


def _traced(check: Check, section: str, row: dict[str, Any]) -> dict[str, Any]:
    """Trace the trained plan with `outpace memory`."""
    shape, plan = shape_of(check, section), row["plan"]
    words = [sys.executable, "-m", "outpace", "memory", "--json", "--model", shape.model,
             "--init", "random", "--dropout", "0", "--seq-len", str(shape.seq_len),
             "--global-batch", str(shape.batch), "--precision", plan["precision"],
             "--optimizer", plan["optimizer"],
             "--compile" if plan["compile"] else "--no-compile"]  # fmt: skip
    if plan["lora_rank"] is not None:
        words += ["--lora-rank", str(plan["lora_rank"])]
    if check.cuda:
        words += ["--machine", _accelerator(check)]
    done = subprocess.run(words, capture_output=True, text=True, check=False,
                          timeout=max(1.0, check.left_s() - 2))  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(f"exit code {done.returncode}: {done.stderr.strip()[-500:]}")
    traced = json.loads(done.stdout)["peak_memory_bytes"]
    said = {"traced_bytes": traced, "measured_bytes": row["peak_bytes"]}
    if row["peak_bytes"] is not None:
        signed = traced / row["peak_bytes"] - 1
        said |= {"off_signed": signed, "off": abs(signed)}
    return said


def _accelerator(check: Check) -> str:
    """Return the catalog's name of the measured GPU."""
    device = check.earlier.get("environment", {}).get("rows", {}).get("device")
    if device is None:
        raise RuntimeError("which GPU it is was not measured: add the section 'environment'")
    known = find_accelerator(device["name"], device["memory_bytes"])
    if known is None:
        raise RuntimeError(f"the catalog has no {device['name']}, whose memory could be traced")
    return known.name
