import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from outpace.records.measurement import Evaluation, RunInfo, StepRecord
from outpace.records.plan import Plan
from outpace.records.utilisation import DeviceLoad, HostLoad, Load
from outpace.reporting.terminal.progress import TrainingProgress, smooth_rates


def step(number: int, **changes: Any) -> StepRecord:
    values: dict[str, Any] = {
        "step": number,
        "tokens": 4096 * number,
        "samples": 16 * number,
        "loss": 8.0 - number / 100,
        "lr": 1e-3,
        "grad_norm": 1.0,
        "step_time_s": 2.0,
        "data_s": 0.0,
        "forward_s": 0.5,
        "backward_s": 1.0,
        "optimizer_s": 0.5,
        "communication_s": 0.0,
        "other_s": 0.0,
        "tokens_per_s": 2048.0,
        "samples_per_s": 8.0,
        "model_flops_per_s": 1e9,
        "hardware_flops_per_s": 1e9,
        "mfu": None,
        "peak_memory_bytes": 2**30,
        "loss_scale": None,
        "skipped_steps": 0,
    }
    return StepRecord(**{**values, **changes})


def info(**changes: Any) -> RunInfo:
    plan = Plan(micro_batch=16)
    values: dict[str, Any] = {
        "run": "runs/first",
        "plan": plan,
        "identity": plan.identity(16),
        "model": "outpace-small",
        "parameters": 1_840_000,
        "device": "cpu",
        "total_steps": 100,
    }
    return RunInfo(**{**values, **changes})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in its only element."""
    now = [1000.0]
    monkeypatch.setattr("outpace.reporting.terminal.progress.time.monotonic", lambda: now[0])
    return now


def watched(terminal: bool) -> tuple[TrainingProgress, io.StringIO]:
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=terminal, color_system=None)
    return TrainingProgress(console), file


def test_without_a_terminal_there_is_a_line_every_few_seconds(clock: list[float]) -> None:
    progress, file = watched(terminal=False)
    progress.on_start(info())
    for number in range(1, 101):
        clock[0] += 1.0
        progress.on_step(step(number))
    lines = [line for line in file.getvalue().splitlines() if "step " in line]
    assert 18 <= len(lines) <= 22
    assert lines[0].strip() == (
        "step   1/100  loss 7.990  2,048 tokens/s  1.00 GiB"  # nothing is known of the others
    )
    assert "step 100/100" in lines[-1]
    assert "0:00 left" in lines[-1]


def test_the_run_is_described_before_it_begins() -> None:
    progress, file = watched(terminal=False)
    progress.on_start(info(start_step=40, hints=("vocabulary 50,257: 50,304 is better",)))
    text = file.getvalue()
    assert "outpace-small, 1.84 M parameters, on cpu (fp32)" in text
    assert "global batch 16 = micro-batch 16 × accumulation 1 × data-parallel 1" in text
    assert "100 steps, from step 40, into runs/first" in text
    assert "hint: vocabulary 50,257" in text


def test_the_rate_and_the_time_left_are_of_the_latest_steps() -> None:
    """One step that others' programs hold up does not make a rate that is nobody's."""
    latest = [step(number, step_time_s=1.0) for number in range(2, 20)]
    slow = step(20, step_time_s=10.0)
    slow = slow.model_copy(update={"tokens_per_s": latest[0].tokens_per_s / 10})
    found = smooth_rates(slow, [*latest, slow])
    assert found.tokens_per_s == pytest.approx(latest[0].tokens_per_s * 19 / 28)
    assert found.loss == slow.loss and found.step_time_s == 10.0
    assert smooth_rates(slow, []) == slow


def test_a_slow_first_step_does_not_set_the_time_left(clock: list[float]) -> None:
    progress, file = watched(terminal=False)
    progress.on_start(info(total_steps=10))
    progress.on_step(step(1, step_time_s=60.0))
    for number in range(2, 10):
        clock[0] += 10.0
        progress.on_step(step(number, step_time_s=1.0))
    assert "0:01 left" in file.getvalue().splitlines()[-1]


def test_a_stage_is_ticked_off_with_its_time(clock: list[float]) -> None:
    progress, file = watched(terminal=False)
    progress.on_stage("preparing data")
    progress.on_progress("tokenising", 500_000, 1_000_000)
    clock[0] += 2.5
    progress.on_stage("building the model")
    assert "tokenising: 500.00 k of 1.00 M, 50 %" in file.getvalue()
    assert "✓ preparing data  2.50 s" in file.getvalue()
    assert "✓ building" not in file.getvalue()


def test_hints_are_said_once_and_are_no_markup() -> None:
    progress, file = watched(terminal=False)
    for _ in range(3):
        progress.on_hint("[red]look[/red]")
    assert file.getvalue() == "  hint: [red]look[/red]\n"


def test_evaluations_and_checkpoints_are_lines() -> None:
    progress, file = watched(terminal=False)
    evaluation = Evaluation(step=50, loss=3.5, perplexity=33.1, tokens=100, tokens_per_s=1.0)
    progress.on_eval(evaluation, False)
    progress.on_checkpoint(Path("runs/first/checkpoints/step-50"))
    assert "validation after step 50: loss 3.5000, perplexity 33.1" in file.getvalue()
    assert "saved runs/first/checkpoints/step-50" in file.getvalue()


def test_in_a_terminal_the_line_is_live_and_goes_away(clock: list[float]) -> None:
    progress, file = watched(terminal=True)
    progress.on_stage("preparing data")
    progress.on_progress("tokenising", 5, 10)
    progress.on_start(info(plan=Plan(micro_batch=16, precision="bf16", compile=True)))
    progress.on_stage("measuring the initial loss")
    progress.on_stage("training")
    progress.on_step(step(7, mfu=0.41))
    assert progress._bars is not None
    progress._bars.refresh()
    text = file.getvalue()
    assert "step   7/100" in text
    assert "loss 7.930  2,048 tok/s  MFU 41.0 %" in text
    progress.on_step(step(8, tokens_per_s=None))
    progress._bars.refresh()
    assert "loss 7.920  8 samples/s" in file.getvalue()
    assert "(bf16, compiled)" in text
    progress.close()
    assert file.getvalue().endswith("\x1b[2K")  # the line is erased
    progress.close()  # twice is fine


def test_what_holds_steps_up_is_told_once_a_few_are_done(clock: list[float]) -> None:
    progress, file = watched(terminal=False)
    progress.on_start(info())
    for number in range(1, 8):
        clock[0] += 10.0
        progress.on_step(step(number, data_s=1.0, step_time_s=3.0))
    lines = [line for line in file.getvalue().splitlines() if "step " in line]
    assert not any("waits" in line for line in lines[:4])
    assert lines[-1].endswith("tokens/s  1.00 GiB  waits for data 33 %  4:39 left")


def test_in_a_narrow_terminal_it_stands_below_the_other_figures() -> None:
    for width, below in ((80, True), (120, False)):
        file = io.StringIO()
        console = Console(file=file, width=width, force_terminal=True, color_system=None)
        progress = TrainingProgress(console)
        progress.on_start(info(device="NVIDIA H200"))
        progress.on_stage("training")
        device = DeviceLoad(index=0, name="NVIDIA H200", utilisation=0.5, run_memory_bytes=1)
        progress.on_load(Load(duration_s=1.0, devices=(device,), host=HostLoad()), 1)
        for number in range(1, 8):
            progress.on_step(step(number, mfu=0.1, optimizer_s=0.1))
        assert progress._bars is not None
        progress._bars.refresh()
        (last, *_) = [line for line in reversed(file.getvalue().split("\r")) if "left" in line]
        lines = [line for line in last.splitlines() if line.strip()]
        assert ("host-bound: GPU 50 % busy" in lines[0]) != below
        assert ("host-bound: GPU 50 % busy" in lines[-1]) and "left" in lines[0]
        progress.close()
