"""Logs of trainers, in the formats that their code writes."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from outpace.interop.training_logs import read_log
from outpace.records.errors import BadInputError
from outpace.records.measurement import WARMUP_STEPS

GIB, MIB = 2**30, 2**20
# torchtitan 0.2, components/metrics.py (MetricsProcessor.log), train.py and parallel_dims.py.
TORCHTITAN = """\
[titan] 2025-11-01 10:00:00 - root - INFO - Building device mesh with parallelism: pp=1, \
dp_replicate=1, dp_shard=4, cp=1, tp=2, ep=1, etp=1
[titan] 2025-11-01 10:00:01 - root - INFO - Trainer is initialized with local batch size 2, global \
batch size 8, gradient accumulation steps 1, sequence length 8192, total steps 1000 (warmup 200)
[titan] 2025-11-01 10:00:02 - root - INFO - \x1b[31mstep:  1  \x1b[32mloss: 12.2691  \
\x1b[38;2;180;60;0mgrad_norm:  1.9000  \x1b[36mmemory: 36.56GiB(38.50%)  \x1b[34mtps: 812  \
\x1b[36mtflops: 40.10  \x1b[35mmfu: 4.01%\x1b[39m
[titan] 2025-11-01 10:00:09 - root - INFO - \x1b[31mstep: 10  \x1b[32mloss: 10.2691  \
\x1b[38;2;180;60;0mgrad_norm:  1.9000  \x1b[36mmemory: 47.50GiB(50.06%)  \x1b[34mtps: 6,012  \
\x1b[36mtflops: 348.10  \x1b[35mmfu: 35.01%\x1b[39m
"""
OLDER_MESH = "[titan] - Building 2-D device mesh with ['dp_shard', 'tp'], [4, 2]\n"
# Megatron-LM, training/training.py (training_log), arguments.py (_print_args), report_memory.
MEGATRON = """\
  micro_batch_size ................................ 1
  seq_length ...................................... 4096
  tensor_model_parallel_size ...................... 2
  world_size ...................................... 16
 [2025-04-13 23:41:12] iteration       10/    1000 | consumed samples:          160 | elapsed time \
per iteration (ms): 1147.6 | learning rate: 0.000000E+00 | global batch size:    16 | loss scale: \
1.0 | number of skipped iterations:   0 |
[Rank 0] (after 10 iterations) memory (MB) | allocated: 1464.0 | max allocated: 1465.0 | \
reserved: 1576.0 | max reserved: 1576.0
 [2025-04-13 23:41:20] iteration       20/    1000 | consumed samples:          320 | elapsed time \
per iteration (ms): 820.5 | learning rate: 4.000000E-05 | global batch size:    16 | lm loss: \
1.072453E+01 |
"""
# DeepSpeed 0.19, utils/timer.py (ThroughputTimer.stop), runtime/config.py (print).
DEEPSPEED = """\
[2025-01-01 00:00:00,000] [INFO] [config.py:1003:print]   train_batch_size ............. 32
[2025-01-01 00:00:00,000] [INFO] [config.py:1003:print]   world_size ................... 8
[2025-01-01 00:00:00,000] [INFO] [config.py:1003:print]   zero_config .................. \
stage=<ZeroStageEnum.weights: 3> contiguous_gradients=True
[2025-01-01 00:00:00,000] [INFO] [timer.py:264:stop] epoch=0/micro_step=10/global_step=10, \
RunningAvgSamplesPerSec=20.1, CurrSamplesPerSec=20.25, MemAllocated=4.2GB, MaxMemAllocated=17.5GB
[2025-01-01 00:00:00,000] [INFO] [timer.py:264:stop] epoch=0/micro_step=20/global_step=20, \
RunningAvgSamplesPerSec=30.1, CurrSamplesPerSec=31.25, MemAllocated=4.2GB, MaxMemAllocated=18.5GB
"""
# nanotron, trainer.py (train_step_logs), logging (human_format).
NANOTRON = """\
01/01/2025 00:00:00 [INFO|DP=0|PP=0|TP=0|node]: iteration: 1 / 100 | consumed_tokens: 1.05M | \
elapsed_time_per_iteration_ms: 4.2K | tokens_per_sec: 250K | tokens_per_sec_per_gpu: 31.2K | \
global_batch_size: 256 | lm_loss: 11
01/01/2025 00:00:04 [INFO|DP=0|PP=0|TP=0|node]: iteration: 2 / 100 | consumed_tokens: 2.1M | \
elapsed_time_per_iteration_ms: 2.1K | tokens_per_sec: 499K | tokens_per_sec_per_gpu: 62.4K | \
global_batch_size: 256 | lm_loss: 11
"""
# transformers 5, trainer_utils.speed_metrics, as PrinterCallback and tqdm leave it.
TRAINER = """\
{'loss': '4.135', 'grad_norm': '0.5', 'learning_rate': '0', 'epoch': '1'}
{'train_runtime': '3.0', 'train_samples_per_second': '21.333', 'train_steps_per_second': '2.667', \
'train_loss': '4.1', 'epoch': '1'}
"""
FOUND: dict[str, tuple[str, dict[str, Any]]] = {
    "torchtitan": (TORCHTITAN, {
        "trainer": "torchtitan", "tokens_per_s_per_device": 6012, "seq_len": 8192,
        "global_batch": 8, "micro_batch": 2, "world_size": 8, "dp_shard": 4, "tp": 2,
        "peak_memory_bytes": int(47.5 * GIB),
    }),
    "torchtitan, older": (OLDER_MESH + TORCHTITAN.split("\n", 1)[1], {
        "trainer": "torchtitan", "world_size": 8, "dp_shard": 4, "tp": 2,
    }),
    "megatron": (MEGATRON, {
        "trainer": "megatron", "step_time_s": 0.8205, "global_batch": 16, "seq_len": 4096,
        "tp": 2, "world_size": 16, "peak_memory_bytes": 1465 * MIB,
    }),
    "deepspeed": (DEEPSPEED, {
        "trainer": "deepspeed", "samples_per_s": 31.25, "global_batch": 32, "world_size": 8,
        "zero": 3, "peak_memory_bytes": int(18.5 * GIB),
    }),
    "nanotron": (NANOTRON, {
        "trainer": "nanotron", "step_time_s": 2.1, "world_size": 8, "global_batch": 256,
    }),
    "trainer": (TRAINER, {"trainer": "trainer", "step_time_s": 1 / 2.667, "global_batch": 8}),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_what_a_log_says(name: str, tmp_path: Path) -> None:
    text, values = FOUND[name]
    log = tmp_path / "console.log"
    log.write_text(text)
    found = read_log(log).model_dump()
    assert {key: found[key] for key in values} == pytest.approx(values)


def test_a_finished_trainer_state(tmp_path: Path) -> None:
    last = {"train_runtime": 12.0, "train_samples_per_second": 26.667, "step": 40}
    state = {"global_step": 40, "train_batch_size": 4, "log_history": [{"loss": 4.0}, last]}
    path = tmp_path / "checkpoint-40" / "trainer_state.json"
    path.parent.mkdir()
    path.write_text(json.dumps(state))
    for given in (path, tmp_path):
        found = read_log(given)
        assert (found.step_time_s, found.global_batch, found.micro_batch) == (0.3, 8, 4)
        assert "a step of a resumed run takes longer" in found.notes[0]
    assert read_log(tmp_path).log == f"{tmp_path.name}/checkpoint-40"
    # Continued after its end: the last time is of the last 40 of 80 steps.
    longer = {"train_runtime": 16.0, "train_samples_per_second": 40.0, "step": 80}
    history = [last, longer]
    path.write_text(json.dumps({**state, "global_step": 80, "log_history": history}))
    found = read_log(path)
    assert (found.step_time_s, found.steps, found.global_batch) == (0.4, 40, 8)
    for damage in ("Infinity", "1e999", "NaN", "-3"):
        path.write_text(json.dumps(state).replace("12.0", damage))
        with pytest.raises(BadInputError, match="train_runtime in log_history is"):
            read_log(path)
    path.write_text(json.dumps({**state, "log_history": [{"loss": 4.0}]}))
    with pytest.raises(BadInputError, match="was not finished when this file was written"):
        read_log(path)


def test_of_a_growing_batch_only_the_last_ones_steps_are_read(tmp_path: Path) -> None:
    """Megatron's rampup_batch_size, and the lengths of a curriculum."""
    line = (
        " iteration {n}/ 100 | elapsed time per iteration (ms): {ms} | global batch size: {batch} |"
        " lm loss: 5.0 | actual seqlen: {length} |"
    )
    steps = [(32, 1024)] * 6 + [(64, 1024)] * 6 + [(64, 2048)] * 4
    lines = [
        line.format(n=n + 1, ms=batch * length / 100, batch=batch, length=length)
        for n, (batch, length) in enumerate(steps)
    ]
    log = tmp_path / "console.log"
    log.write_text("\n".join(["  seq_length ...................... 4096", *lines]))
    found = read_log(log)
    assert (found.global_batch, found.seq_len, found.steps) == (64, 2048, 3)
    assert found.step_time_s == pytest.approx(64 * 2048 / 1e5)
    assert "only the 4 logged steps of 64 sequences of 2048 tokens are read" in found.notes[-1]
    log.write_text("\n".join(lines[:6]))
    assert (read_log(log).notes, read_log(log).seq_len) == ((), 1024)


@pytest.mark.parametrize(
    ("total", "each", "batch", "devices", "samples"),
    [
        ("1.04M", "2.04K", "1.02K", None, None),  # 512 devices, 1,024 sequences
        ("62.4K", "7.8K", "256", 8, 256),
        ("999", "125", "999", 8, 999),  # 124.875 each
        ("4.09K", "512", "1024", 8, 1024),
        ("22.8K", "11.4K", "64", 2, 64),
    ],
)
def test_abbreviated_numbers_are_not_taken_for_exact(
    total: str, each: str, batch: str, devices: int | None, samples: int | None, tmp_path: Path
) -> None:
    log = tmp_path / "console.log"
    log.write_text(
        f"iteration: 1 / 9 | elapsed_time_per_iteration_ms: 2.1K | tokens_per_sec: {total} | "
        f"tokens_per_sec_per_gpu: {each} | global_batch_size: {batch} |\n" * 3
    )
    found = read_log(log)
    assert (found.world_size, found.global_batch) == (devices, samples)


@pytest.mark.parametrize(
    ("samples", "rate", "runtime", "epochs", "batch"),
    [
        ("63.181", "0.123", "8103.73", "1", None),  # 512 or 513 or …
        ("15.873", "1.0", "63.0", "1", 16),  # 1,000 samples, 63 steps
        ("14.714", "1.0", "7.0", "1", None),  # 103 samples: 15, 16 or 17
        ("8.0", "1.0", "6.0", "0.5", 8),
        ("'771.4'", "'96.43'", "'0.0622'", "'0.75'", 8),  # version 5 prints four digits
        ("'7716'", "'1.507'", "'3981'", "'1'", None),  # 5,117 to 5,123
    ],
)
def test_the_batch_of_a_trainer_is_read_if_its_rates_determine_it(
    samples: str, rate: str, runtime: str, epochs: str, batch: int | None, tmp_path: Path
) -> None:
    log = tmp_path / "console.log"
    log.write_text(
        f"{{'train_runtime': {runtime}, 'train_samples_per_second': {samples}, "
        f"'train_steps_per_second': {rate}, 'train_loss': 4.1, 'epoch': {epochs}}}"
    )
    assert read_log(log).global_batch == batch


def test_the_batch_of_a_trainer_state_is_a_multiple_of_the_devices(tmp_path: Path) -> None:
    """45 samples in steps of 16: 15 samples a step."""
    last = {"train_runtime": 3.0, "train_samples_per_second": 15.0, "step": 3, "epoch": 1.0}
    state = {"global_step": 3, "train_batch_size": 16, "log_history": [last]}
    path = tmp_path / "trainer_state.json"
    path.write_text(json.dumps(state))
    assert read_log(path).global_batch == 16
    # Of a short run, the time is rounded as well.
    short = {**last, "train_runtime": 0.0622, "train_samples_per_second": 771.831, "step": 6}
    path.write_text(json.dumps({**state, "global_step": 6, "train_batch_size": 4,
                                "log_history": [short]}))  # fmt: skip
    assert read_log(path).global_batch == 8
    path.write_text(json.dumps({**state, "train_batch_size": 5}))
    assert "the batch of 15 is the samples per step" in " ".join(read_log(path).notes)


def test_deepspeeds_micro_batches_are_no_steps(tmp_path: Path) -> None:
    """Before 0.8, it counts micro-batches; long names have no dots behind them."""
    head = (
        "[2022-11-11 10:00:00,000] [INFO] [config.py:1008:print]   "
        "train_batch_size ............. 256\n"
        "[2022-11-11 10:00:00,000] [INFO] [config.py:1008:print]   "
        "train_micro_batch_size_per_gpu  4\n"
        "[2022-11-11 10:00:00,000] [INFO] [config.py:1008:print]   "
        "gradient_accumulation_steps .. 8\n"
        "[2022-11-11 10:00:00,000] [INFO] [config.py:1008:print]   "
        "zero_config .................. stage=1 contiguous_gradients=True\n"
    )
    steps = "".join(
        f"[2022-11-11 10:00:{n:02d},000] [INFO] [timer.py:198:stop] 0/{n * 10}, "
        "RunningAvgSamplesPerSec=3.2, CurrSamplesPerSec=3.2, MemAllocated=6.0GB\n"
        for n in range(1, 20)
    )
    log = tmp_path / "console.log"
    log.write_text(head + steps)
    found = read_log(log)
    assert (found.global_batch, found.micro_batch, found.zero) == (256, 4, 1)
    assert found.clock_step_s == pytest.approx((0.8, 0.8), rel=0.1)  # 0.1 s a micro-batch
    # A restart builds its pipeline before it prints its settings.
    log.write_text(head + steps + "stage=0 layers=6\nstage=3 layers=7\n")
    assert read_log(log).zero == 1


# What a restarted job writes on in the same file, after three steps of another layout and speed.
RESTARTED = {
    "torchtitan": (
        TORCHTITAN.replace("dp_shard=4", "dp_shard=8").replace("tp=2", "tp=1"),
        "tps: 6,012",
        "tps: 9,999",
    ),
    "megatron": (MEGATRON.replace("size ...................... 2", "size ...................... 1"),
                 "820.5", "410.2"),
    "deepspeed": (DEEPSPEED.replace("size ............. 32", "size ............. 64"), "31.25",
                  "99.5"),
}  # fmt: skip


@pytest.mark.parametrize("name", RESTARTED)
def test_of_a_log_with_several_starts_the_last_is_read(name: str, tmp_path: Path) -> None:
    text, values = FOUND[name]
    earlier, *steps = RESTARTED[name]
    assert earlier != text
    earlier, later = lengthen(earlier.replace(*steps)), lengthen(text)
    log = tmp_path / "console.log"
    log.write_text(later)
    expected = read_log(log).model_dump()
    assert {key: expected[key] for key in values if key != "steps"} == pytest.approx(
        {key: value for key, value in values.items() if key != "steps"}
    )
    log.write_text(earlier + later)
    found = read_log(log).model_dump()
    assert found.pop("notes")[-1] == "the log has 2 starts of a run: only start 2 is read."
    assert found == {key: value for key, value in expected.items() if key != "notes"}


def lengthen(text: str) -> str:
    """The log with more steps than a warm-up has, like its last one."""
    return text + f"{text.splitlines()[-1]}\n" * (2 * WARMUP_STEPS)


def test_of_a_log_whose_last_start_is_all_warm_up_the_longest_is_read(tmp_path: Path) -> None:
    log = tmp_path / "console.log"
    first = lengthen(MEGATRON)
    restarted = MEGATRON[: MEGATRON.index("[Rank 0]")].replace("1147.6", "61234.0")
    assert "61234.0" in restarted
    log.write_text(first + restarted)
    found = read_log(log)
    assert found.step_time_s == pytest.approx(0.8205)
    assert found.notes[-1] == "the log has 2 starts of a run: only start 1 is read."


def test_of_a_trainers_log_whose_last_start_is_unfinished_an_earlier_one_is_read(
    tmp_path: Path,
) -> None:
    log = tmp_path / "console.log"
    start = "***** Running training *****\n"
    begun = TRAINER.splitlines()[0] + "\n"
    log.write_text(start + TRAINER + start + begun * (2 * WARMUP_STEPS + 1))
    found = read_log(log)
    assert found.step_time_s == pytest.approx(1 / 2.667)
    assert found.notes[-1] == "the log has 2 starts of a run: only start 1 is read."


def test_evaluations_of_a_start_that_trainer_did_not_end_are_not_in_the_last(
    tmp_path: Path,
) -> None:
    log = tmp_path / "console.log"
    begun = (
        TRAINER.splitlines()[0] + "\n{'eval_loss': '2.0', 'eval_runtime': '2.5', 'epoch': '1'}\n"
    )
    start = "***** Running training *****\n"
    log.write_text(start + begun + start + TRAINER)
    assert read_log(log).step_time_s == pytest.approx(1 / 2.667)


def test_what_is_no_log(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("step 1 went well")
    with pytest.raises(BadInputError, match="it contains no steps of a known trainer"):
        read_log(tmp_path / "notes.txt")
    with pytest.raises(BadInputError, match="cannot read"):
        read_log(tmp_path / "none.log")
    with pytest.raises(BadInputError, match=r"holds neither run\.json"):
        read_log(tmp_path)


def write_state(tmp_path: Path, name: str = "trainer_state.json", **changed: Any) -> Path:
    """A state of 200 steps in 1,000 s; `changed` are keys of it, `last` of its last entry."""
    last = {"train_runtime": 1000.0, "train_samples_per_second": 3.2, "step": 200}
    history = [*changed.pop("earlier", ()), {**last, **changed.pop("last", {})}]
    state = {"epoch": 1.0, "global_step": 200, "max_steps": 200, "train_batch_size": 16}
    path = tmp_path / name
    path.write_text(json.dumps({**state, **changed, "log_history": history}))
    return path


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -3.0, "fast", None, True])
def test_a_time_in_a_trainer_state_that_is_none(tmp_path: Path, value: object) -> None:
    words = rf"in log_history is {re.escape(json.dumps(value))}; it must be a number of seconds"
    with pytest.raises(BadInputError, match=f"train_runtime {words}"):
        read_log(write_state(tmp_path, last={"train_runtime": value}))
    with pytest.raises(BadInputError, match=f"eval_runtime {words}"):
        read_log(write_state(tmp_path, earlier=[{"eval_runtime": value}]))
    with pytest.raises(BadInputError, match=rf"global_step is {re.escape(json.dumps(value))};"):
        read_log(write_state(tmp_path, global_step=value))


def test_evaluations_are_no_training(tmp_path: Path) -> None:
    """Those inside train() are in train_runtime; those of an earlier part and behind it are not."""
    inside = [{"eval_runtime": 30.0, "eval_loss": 2.0, "step": step} for step in range(10, 210, 10)]
    found = read_log(write_state(tmp_path, earlier=inside))
    assert found.step_time_s == 2.0 and found.global_batch == 16
    assert "20 evaluations took 600 s of the 1,000 s" in found.notes[-1]
    named = [{"eval_wiki_runtime": 100.0}, {"eval_code_runtime": 300.0}]
    assert read_log(write_state(tmp_path, earlier=named)).step_time_s == 3.0
    first = [*inside[:4], {"train_runtime": 500.0, "step": 100}, inside[0]]
    assert read_log(write_state(tmp_path, earlier=first)).step_time_s == (1000 - 30) / 100
    assert read_log(write_state(tmp_path)).step_time_s == 5.0
    with pytest.raises(BadInputError, match=r"40 evaluations took 1,200 s, but train_runtime"):
        read_log(write_state(tmp_path, earlier=[*inside, *inside]))
    console = tmp_path / "console.log"
    one = "{'eval_loss': '2.0', 'eval_runtime': '0.75', 'epoch': '1'}\n"
    console.write_text(TRAINER + one + one + TRAINER.replace("'2.667'", "'2'") + one)
    assert read_log(console).step_time_s == pytest.approx((3 - 1.5) / 6)


def test_a_trainer_state_of_any_name(tmp_path: Path) -> None:
    found = read_log(write_state(tmp_path, "run-7.json"))
    assert (found.trainer, found.log, found.micro_batch) == (
        "trainer", f"{tmp_path.name}/run-7.json", 16,
    )  # fmt: skip


def read_text(tmp_path: Path, text: str) -> dict[str, Any]:
    log = tmp_path / "console.log"
    log.write_text(text)
    return read_log(log).model_dump()


def holds(found: dict[str, Any], values: dict[str, Any]) -> bool:
    return {name: found[name] for name in values} == values


def test_validation_is_no_step_of_torchtitan(tmp_path: Path) -> None:
    """Its evaluations are faster than training, and logged in nearly the same words."""
    step = TORCHTITAN.splitlines()[-1]
    validated = re.sub(r"grad_norm:\s+\S+", "", step.replace("step:", "validate step:")).replace(
        "tps: 6,012", "tps: 30,000"
    )
    assert "validate step: 10" in validated
    text = TORCHTITAN + "".join(f"{validated}\n{step}\n" for _ in range(6)) + validated
    assert read_text(tmp_path, text)["tokens_per_s_per_device"] == 6012


def test_what_versions_of_torchtitan_print(tmp_path: Path) -> None:
    older = TORCHTITAN.replace("tps:", "wps:").replace("gradient accumulation steps 1, ", "")
    first = older.replace(older.splitlines()[0], "Building 1-D device mesh with ['dp'], [8]")
    newest = TORCHTITAN.replace(
        "local batch size 2, global batch size 8, gradient accumulation steps 1, sequence length "
        "8192",
        "16384 tokens per DP rank, 65536 tokens per train step, gradient accumulation steps 1, "
        "maximum context length 8192",
    )
    batch = {"seq_len": 8192, "global_batch": 8, "micro_batch": 2, "tokens_per_s_per_device": 6012}
    for text in (older, first, newest):
        assert holds(read_text(tmp_path, text), batch)
    assert holds(read_text(tmp_path, first), {"dp_shard": 8, "world_size": 8})
    options = (
        "Model llama3 8B size: 8,030,261,248 total parameters\nApplied FullAC activation "
        "checkpointing to the model\nFloat8 tensorwise scaled training active\n"
    )
    assert holds(
        read_text(tmp_path, options + TORCHTITAN),
        {"parameters": 8_030_261_248, "checkpointing": "full", "precision": "fp8"},
    )


def test_a_pipeline_of_torchtitan_divides_the_batch_of_a_rank(tmp_path: Path) -> None:
    text = TORCHTITAN.replace("pp=1", "pp=2")
    assert read_text(tmp_path, text)["micro_batch"] is None
    stages = "Using pipeline schedule Interleaved1F1B with 2 microbatches and 8 stages.\n"
    assert holds(
        read_text(tmp_path, stages + text),
        {"micro_batch": 1, "pp_microbatches": 2, "pp_schedule": "interleaved", "virtual_stages": 4},
    )


def test_settings_that_megatron_prints(tmp_path: Path) -> None:
    def setting_line(name: str, value: str) -> str:
        return f"  {name} {'.' * (48 - len(name))} {value}\n"

    text = "".join(
        setting_line(*one)
        for one in (
            ("bf16", "True"), ("sequence_parallel", "False"), ("num_layers", "32"),
            ("hidden_size", "4096"), ("pipeline_model_parallel_size", "4"),
            ("virtual_pipeline_model_parallel_size", "2"),
            ("use_distributed_optimizer", "True"),
        )
    )  # fmt: skip
    assert holds(
        read_text(tmp_path, text + MEGATRON),
        {"precision": "bf16-master", "sequence_parallel": False, "layers": 32, "hidden": 4096,
         "pp": 4, "pp_schedule": "interleaved", "virtual_stages": 2, "zero": 1},
    )  # fmt: skip
    sharded = setting_line("use_megatron_fsdp", "True")
    sharded += setting_line("data_parallel_sharding_strategy", "optim_grads_params") + setting_line(
        "fp8", "hybrid"
    )
    assert holds(read_text(tmp_path, text + sharded + MEGATRON), {"zero": 3, "precision": "fp8"})
    # Before pipelines, in 2020.
    older = MEGATRON.replace("tensor_model_parallel_size ....", "model_parallel_size ...........")
    assert read_text(tmp_path, older)["tp"] == 2


def test_the_devices_of_deepspeed_beside_model_parallelism(tmp_path: Path) -> None:
    """DeepSpeed's world size is that of data parallelism; Megatron-DeepSpeed prints both."""
    settings = "".join(DEEPSPEED.splitlines(keepends=True)[:3]).replace("32", "16")
    arguments, *rest = MEGATRON.partition(" [2025")
    text = f"{arguments}  deepspeed ....................................... True\n{settings}"
    found = read_text(tmp_path, text + "".join(rest))
    assert holds(found, {"trainer": "megatron", "world_size": 16, "tp": 2, "zero": 3})
    parallel = '    "sequence_parallel_size": 4,\n'
    assert read_text(tmp_path, parallel.replace("4", "1") + DEEPSPEED)["world_size"] == 8
    assert read_text(tmp_path, parallel + DEEPSPEED)["world_size"] is None


def test_precision_and_offloading_of_deepspeed(tmp_path: Path) -> None:
    head = "[2025-01-01 00:00:00,000] [INFO] [config.py:1003:print]   "
    low = f"{head}bfloat16_enabled ............. True\n"
    found = read_text(tmp_path, low + DEEPSPEED)
    assert (found["precision"], found["offload_optimizer"]) == ("bf16-master", None)
    text = DEEPSPEED.replace(
        "contiguous_gradients=True",
        "offload_param=None offload_optimizer=DeepSpeedZeroOffloadOptimizerConfig(device=<"
        "OffloadDeviceEnum.cpu: 'cpu'>, nvme_path=None)",
    )
    found = read_text(tmp_path, low + text)
    assert (found["precision"], found["offload_optimizer"]) == ("bf16", "cpu")
    # Before 0.6.6, it has only the mean since the second step.
    older = re.sub(r"RunningAvg\S+ Curr", "", DEEPSPEED)
    assert ", SamplesPerSec=20.25" in older
    assert read_text(tmp_path, older)["samples_per_s"] == 31.25


def test_nanotrons_newer_names_and_its_configuration(tmp_path: Path) -> None:
    """Since March 2025, the lines of steps count tokens as global_batch_size."""
    newer = NANOTRON.replace("elapsed_time", "time").replace("size: 256", "size: 1.05M")
    assert holds(read_text(tmp_path, newer), {"step_time_s": 2.1, "global_batch": None})
    exact = (
        "[INFO]: mbs: 2 | grad_accum: 16 | cp: 1 | sequence_length: 4096 | global_batch_size: 256 "
        "| train_steps: 100\n"
    )
    assert read_text(tmp_path, exact + newer)["global_batch"] == 256
    config = (
        "Config(general=GeneralArgs(), parallelism=ParallelismArgs(dp=4,\n pp=1,\n tp=2,\n"
        " tp_mode=<TensorParallelLinearMode.ALL_REDUCE: 1>,\n recompute_layer=True,\n"
        " tokens=TokensArgs(sequence_length=4096, micro_batch_size=2), zero_stage=1,\n"
        " model=LlamaConfig(hidden_size=2048, num_hidden_layers=24), dtype=torch.bfloat16\n"
    )
    assert holds(
        read_text(tmp_path, config + newer),
        {"tp": 2, "world_size": 8, "zero": 1, "seq_len": 4096, "micro_batch": 2, "layers": 24,
         "checkpointing": "full", "sequence_parallel": False, "precision": "bf16-master"},
    )  # fmt: skip


EVALUATION = "{'eval_loss': '2.0', 'eval_runtime': '0.75', 'epoch': '1'}\n"


def test_results_that_are_printed_twice_are_one_run(tmp_path: Path) -> None:
    """Notebooks show TrainOutput, and scripts a table, after the line of results."""
    result = TRAINER.splitlines()[-1]
    for again in (f"TrainOutput(global_step=8, metrics={result})", "  train_runtime = 0:00:03.00"):
        found = read_text(tmp_path, EVALUATION * 2 + TRAINER + f"{again}\n")
        assert found["step_time_s"] == pytest.approx((3 - 1.5) / 8, rel=1e-3)


def test_a_rate_of_few_digits_is_no_step_time(tmp_path: Path) -> None:
    text = (
        "{'train_runtime': 29130.8404, 'train_samples_per_second': 0.015, "
        "'train_steps_per_second': 0.002, 'epoch': 9.48}\n"
    )
    with pytest.raises(BadInputError, match="a step took 400 to 667 seconds"):
        read_text(tmp_path, text)
    bar = "100%|#####| 50/50 [8:05:30<00:00, 582.62s/it]\n"
    assert read_text(tmp_path, bar + text)["step_time_s"] == pytest.approx(29130.8404 / 50)


def test_what_trainer_says_before_its_first_step(tmp_path: Path) -> None:
    banner = (
        "***** Running training *****\n  Instantaneous batch size per device = 2\n  Total train "
        "batch size (w. parallel, distributed & accumulation) = 16\n  Total optimization steps = "
        "8\n  Number of trainable parameters = 20,971,520\n"
    )
    found = read_text(tmp_path, banner + TRAINER)
    told = {"global_batch": 16, "micro_batch": 2, "trainable_parameters": 20_971_520, "steps": 8}
    assert holds(found, told) and not found["adapters"]
    resumed = read_text(tmp_path, f"{banner}  Continuing training from global step 6\n{TRAINER}")
    assert resumed["step_time_s"] == pytest.approx(3 / 2) and not resumed["notes"]


@pytest.mark.parametrize(
    "line",
    [
        "trainable params: 136,192 || all params: 1,777,224,192 || trainable%: 0.0077",
        "Trainable parameters = 41,943,040/8,000,000,000 (0.52% trained)",
        "Adding lora to: decoder.layers.0.self_attention.linear_qkv",
    ],
)
def test_adapters_are_told(line: str, tmp_path: Path) -> None:
    for text in (TRAINER, DEEPSPEED, MEGATRON):
        assert read_text(tmp_path, f"{line}\n{text}")["adapters"]
        assert not read_text(tmp_path, text)["adapters"]


def test_files_of_results_and_consoles_in_utf16(tmp_path: Path) -> None:
    results = {"epoch": 1.0, "train_runtime": 3.0, "train_steps_per_second": 2.667}
    assert read_text(tmp_path, json.dumps(results, indent=4))["step_time_s"] == pytest.approx(
        3 / 8, 1e-3
    )
    table = "\n".join(f"  {name:24} = {value}" for name, value in results.items())
    text = table.replace("3.0", "0:00:03.00")
    assert read_text(tmp_path, text)["step_time_s"] == pytest.approx(0.375, rel=1e-3)
    log = tmp_path / "console.log"
    log.write_bytes(TORCHTITAN.encode("utf-16"))  # as PowerShell redirects
    assert read_log(log).tokens_per_s_per_device == 6012


def test_prefixes_of_launchers_hide_no_restart(tmp_path: Path) -> None:
    earlier, *steps = RESTARTED["megatron"]
    text = lengthen(earlier.replace(*steps)) + lengthen(MEGATRON)
    found = read_text(tmp_path, "".join(f"[default0]:{line}\n" for line in text.splitlines()))
    assert found["step_time_s"] == pytest.approx(0.8205) and found["tp"] == 2
    assert found["notes"][-1] == "the log has 2 starts of a run: only start 2 is read."


@pytest.mark.timeout(60)
def test_long_lines_take_no_time(tmp_path: Path) -> None:
    long = "a" * 2_000_000 + "\n" + "'train_steps_per_second': " * 100_000 + "\n" + "1/1 " * 100_000
    assert read_text(tmp_path, f"{long}\n{MEGATRON}")["step_time_s"] == pytest.approx(0.8205)


@pytest.mark.slow
def test_what_a_real_trainer_writes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of transformers' Trainer: its state and its console say the same step time."""
    import torch
    import transformers

    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    config = transformers.GPT2Config(
        n_layer=1,
        n_embd=16,
        n_head=2,
        vocab_size=32,
        n_positions=16,
        bos_token_id=0,
        eos_token_id=0,
    )
    rows = [{"input_ids": torch.zeros(8, dtype=torch.int64)} for _ in range(64)]
    for row in rows:
        row["labels"] = row["input_ids"]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"), max_steps=6, per_device_train_batch_size=4,
        gradient_accumulation_steps=2, use_cpu=True, report_to=[], disable_tqdm=True,
        logging_steps=2, save_strategy="no",
    )  # fmt: skip
    trainer = transformers.Trainer(
        transformers.GPT2LMHeadModel(config), arguments, train_dataset=rows
    )
    trainer.train()
    trainer.save_state()
    console = tmp_path / "console.log"
    console.write_text(capfd.readouterr().out)
    found = [read_log(tmp_path / "out"), read_log(console)]
    assert [one.global_batch for one in found] == [8, 8]
    assert {one.trainer for one in found} == {"trainer"}
    assert found[0].step_time_s == pytest.approx(found[1].step_time_s, rel=0.02)


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("torchtitan", "36.56GiB", "1.2.3GiB"),
        ("torchtitan", "tps: 812 ", "tps: 1e999 "),
        ("megatron", "1147.6", "1e999"),
        ("megatron", "1147.6", "1.2.3"),
        ("megatron", "1465.0", "1e999"),
        ("megatron", "seq_length ...................................... 4096",
         f"seq_length ................. {'9' * 5000}"),
        ("deepspeed", "17.5GB", "1e999GB"),
        ("deepspeed", "20.25", "20.2.5"),
        ("nanotron", "4.2K", "4.2.1K"),
        ("nanotron", "62.4K", "0"),
        ("trainer", "21.333", "1e400"),
        ("trainer", "3.0", "1e308"),
        ("trainer", "3.0", "0.0"),
    ],
)  # fmt: skip
def test_damaged_figures_are_passed_over(name: str, right: str, wrong: str, tmp_path: Path) -> None:
    text, values = FOUND[name]
    assert right in text
    log = tmp_path / "console.log"
    log.write_text(text.replace(right, wrong))
    found = read_log(log).model_dump()
    assert found["trainer"] == values["trainer"]
    for key in ("step_time_s", "tokens_per_s_per_device", "samples_per_s"):
        assert found[key] == pytest.approx(values.get(key, found[key]))
