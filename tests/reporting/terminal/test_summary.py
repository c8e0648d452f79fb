import io
from typing import Any

import pytest
from rich.console import Console, RenderableType

from outpace.records.measurement import PARTS, Evaluation, Measurement, TimeParts
from outpace.reporting.terminal.summary import evaluation_table, summary


def shown(renderable: RenderableType, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(renderable)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(len(line) <= width for line in text.splitlines())
    return str(text)


def evaluation(loss: float) -> Evaluation:
    return Evaluation(step=0, loss=loss, perplexity=2.0, tokens=100, tokens_per_s=5e4)


def measurement(**changes: Any) -> Measurement:
    values: dict[str, Any] = {
        "run": "runs/first",
        "steps": 150,
        "tokens": 614_400,
        "samples": 2400,
        "parameters": 1_840_000,
        "world_size": 1,
        "step_time_s": 0.2,
        "tokens_per_s": 20_480.4,
        "samples_per_s": 80.0,
        "model_flops_per_s": 2.4e11,
        "hardware_flops_per_s": None,
        "mfu": None,
        "hfu": None,
        "peak_memory_bytes": 3 * 2**30,
        "parts": TimeParts(data_s=0.01, forward_s=0.06, backward_s=0.12, optimizer_s=0.01),
        "first_loss": 8.25,
        "final_loss": 3.5,
        "initial_eval": evaluation(8.125),
        "final_eval": evaluation(3.625),
        "unigram_entropy": 5.875,
        "sample": "def f():",
        "train_runtime": 95.0,
        "train_samples_per_second": 25.3,
        "train_steps_per_second": 1.6,
        "train_loss": 4.5,
    }
    return Measurement(**{**values, **changes})


def row(text: str, name: str) -> str:
    return next(line for line in text.splitlines() if name in line)


def test_the_figures_of_the_run_are_all_there() -> None:
    text = shown(summary(measurement()))
    assert "8.2500" in row(text, "first step")
    assert "3.5000" in row(text, "last step")
    assert "8.1250" in row(text, "validation before")
    assert "3.6250" in row(text, "validation after")
    assert "5.8750" in row(text, "unigram entropy")
    assert "20,480 tokens/s" in row(text, "median throughput")
    assert "240.00 GFLOP/s" in row(text, "FLOP/s")
    assert "3.00 GiB" in row(text, "peak memory")
    assert "1 min 35 s" in row(text, "training time")
    assert "runs/first" in row(text, "Run ")


def test_a_loss_above_that_of_frequencies_alone_is_said() -> None:
    assert "above the unigram" not in shown(summary(measurement()))
    text = " ".join(shown(summary(measurement(unigram_entropy=3.5))).split())
    assert "The validation loss of 3.6250 is above the unigram entropy of 3.5000" in text
    assert "above the" not in shown(summary(measurement(unigram_entropy=3.5, final_eval=None)))


def test_the_time_until_the_first_step_is_shown_and_how_much_was_compiling() -> None:
    text = shown(summary(measurement(first_step_s=31.0, compile_s=19.0)))
    assert "31.00 s" in row(text, "time to step 1") and "19.00 s" in row(text, "compiling")
    assert "compiling" not in shown(summary(measurement(first_step_s=4.0)))


def test_times_of_a_resumed_run_are_named_by_its_last_part() -> None:
    text = shown(summary(measurement(start_step=50, first_step_s=4.0)))
    assert "4.00 s" in row(text, "time to step 51") and "time to step 1 " not in text
    assert "1 min 35 s" in row(text, "training since step 50") and "training time" not in text
    assert "Times and rates are of the steps after step 50." in text
    assert "steps after" not in shown(summary(measurement(first_step_s=4.0)))


def test_shares_of_the_time_add_up_and_bars_grow_with_them() -> None:
    text = shown(summary(measurement()))
    rows = [next(ln for ln in text.splitlines() if ln.strip().startswith(part)) for part in PARTS]
    shares = [float(line.split(" %")[0].split()[-1]) for line in rows]
    assert sum(shares) == pytest.approx(100)
    bars = [line.count("█") for line in rows]
    assert bars[PARTS.index("backward")] == 2 * bars[PARTS.index("forward")] > 0
    assert bars[PARTS.index("communication")] == 0


def test_unknown_is_n_a() -> None:
    text = shown(summary(measurement()))
    assert row(text, "MFU").split()[-1] == "n/a"
    assert "38.2 %" in row(shown(summary(measurement(mfu=0.382))), "MFU")
    nothing = dict.fromkeys(("step_time_s", "tokens_per_s", "model_flops_per_s", "tokens"))
    text = shown(summary(measurement(**nothing, parts=TimeParts(), sample=None, final_eval=None)))
    assert row(text, "median throughput").split()[-2:] == ["80", "samples/s"]
    assert "Where the time went" not in text
    assert "Sample" not in text
    of_samples = shown(summary(measurement(**nothing)))  # its loss may be of any unit
    assert "nats per token" in shown(summary(measurement())) and "nats" not in of_samples
    assert "validation after" in of_samples and "perplexity" not in of_samples


def test_generated_text_and_paths_are_no_markup() -> None:
    text = shown(summary(measurement(sample="[red]x[/red] [/nope]\n\tend", run="runs/[bold]b")))
    assert "[red]x[/red] [/nope]" in text
    assert "runs/[bold]b" in text


def test_processes_and_skipped_steps_are_named_when_there_are_any() -> None:
    assert "skipped" not in shown(summary(measurement()))
    text = shown(summary(measurement(world_size=2, skipped_steps=3)))
    assert "3" in row(text, "skipped steps")
    assert row(text, "processes").split()[-1] == "2"


def test_an_evaluation_alone() -> None:
    text = shown(evaluation_table(evaluation(3.25)))
    assert "3.2500" in row(text, "loss")
    assert "2.0" in row(text, "perplexity")
    assert "50,000 tokens/s" in row(text, "speed")
    assert "left over" not in text and "sequence length" not in text
    of_own_data = evaluation(3.25).model_copy(update={"perplexity": None})  # its loss may be any
    text = shown(evaluation_table(of_own_data))
    assert row(text, "loss").split()[-1] == "3.2500" and "perplexity" not in text
    assert row(text, "targets").split()[-1] == "100" and "targets/s" in row(text, "speed")
    more = {"seq_len": 64, "left_over_tokens": 192}
    text = shown(evaluation_table(evaluation(3.25).model_copy(update=more)))
    assert row(text, "sequence length").split()[-1] == "64"
    assert row(text, "left over").split()[-1] == "192"


def test_the_bottleneck_is_told_with_what_to_do_about_it() -> None:
    text = " ".join(shown(summary(measurement(device="cpu"))).split())
    assert "Forward and backward passes take 90 % of the time. outpace plan with" in text
    slow = TimeParts(data_s=0.1, forward_s=0.06, backward_s=0.12)
    text = " ".join(shown(summary(measurement(device="cuda", parts=slow))).split())
    assert "Steps wait for data 36 % of the time. Load data in the background with" in text
    assert "of the time" not in shown(summary(measurement(device="mps")))


def test_an_evaluation_of_no_run_has_no_step() -> None:
    assert "after step" in shown(evaluation_table(evaluation(3.5).model_copy(update={"step": 7})))
    assert "after step" not in shown(
        evaluation_table(evaluation(3.5).model_copy(update={"step": 0}))
    )
