"""Records as notebooks show them."""

import re

from outpace.records.figure import Figure, Key
from outpace.records.measurement import Measurement, TimeParts
from outpace.records.plan import Plan
from outpace.records.probe_results import ProbeRecord


def measurement(**changes):
    unknown = dict.fromkeys(
        ("samples_per_s", "model_flops_per_s", "hardware_flops_per_s", "mfu", "hfu", "first_loss",
         "final_loss", "train_loss")
    )  # fmt: skip
    known = {"run": "runs/first", "steps": 70, "tokens": 286_720, "samples": 1120, "world_size": 2,
             "parameters": 1_840_000, "step_time_s": 0.2379, "tokens_per_s": 17_218.4,
             "peak_memory_bytes": 3 * 2**29, "parts": TimeParts(forward_s=0.08),
             "train_runtime": 17.5, "train_samples_per_second": 64.0,
             "train_steps_per_second": 4.0}  # fmt: skip
    return Measurement(**{**unknown, **known, **changes})


def rows(html):
    """The names and values of a table's rows, as text."""
    return re.findall(r"<tr><th>([^<]*)</th><td>(.*?)</td></tr>", html)


def test_values_have_units_and_defaults_are_left_out():
    found = dict(rows(measurement()._repr_html_()))
    assert found["tokens_per_s"] == "17.22 k" and found["step_time_s"] == "237.9 ms"
    assert found["peak_memory_bytes"] == "1.50 GiB" and found["tokens"] == "286,720"
    assert found["mfu"] == "n/a" and found["run"] == "runs/first"
    assert not {"sample", "task", "skipped_steps", "device"} & found.keys()
    assert "<summary>TimeParts</summary>" in measurement()._repr_html_()
    assert dict(rows(measurement(mfu=0.417)._repr_html_()))["mfu"] == "41.7 %"
    assert dict(rows(Plan(tp=2, strategy="tp", compile=True)._repr_html_())) == {
        "strategy": "tp", "tp": "2", "compile": "yes",
    }  # fmt: skip


def test_text_is_no_markup():
    html = measurement(sample="<script>alert(1)</script>", run="a & <b>")._repr_html_()
    assert "<script>" not in html and "&lt;script&gt;" in html and "a &amp; &lt;b&gt;" in html


def test_long_lists_are_cut():
    key = Key(kind="matmul", what="curve", of={"dtype": "fp32"})
    figures = tuple(
        Figure(key=key, unit="s", value=float(n), origin="measured") for n in range(1, 1001)
    )
    probed = ProbeRecord(date="", versions={}, command="", sections=("matmul", "memory") * 6,
                         quick=True, took_s=1.0, figures=figures, fits=(), world_size=1,
                         hosts=1)  # fmt: skip
    html = probed._repr_html_()
    assert "<summary>1,000</summary>" in html and "and 980 more" in html
    assert f"<td>{'matmul, memory, ' * 4}and 4 more</td>" in html
    assert len(html) < 20_000
