"""`outpace calibrate`."""

import json
from pathlib import Path

import pytest

from outpace.catalog.accelerators import find_accelerator
from outpace.cli.main import main
from outpace.jobs.machine_file import find_probe
from outpace.jobs.planning.request import PlanQuestion, job
from outpace.probing.hardware.machine import identify

# torchtitan 0.2, components/metrics.py, train.py and parallel_dims.py.
LOG = """\
[titan] 2025-11-01 10:00:00 - root - INFO - Building device mesh with parallelism: pp=1, \
dp_replicate=1, dp_shard=8, cp=1, tp=1, ep=1, etp=1
[titan] 2025-11-01 10:00:01 - root - INFO - Trainer is initialized with local batch size 1, global \
batch size 8, gradient accumulation steps 1, sequence length 4096, total steps 1000 (warmup 200)
[titan] 2025-11-01 10:00:02 - root - INFO - step:  1  loss: 12.2691  grad_norm:  1.9000  memory: \
36.56GiB(38.50%)  tps: 812  tflops: 40.10  mfu: 4.01%
[titan] 2025-11-01 10:00:09 - root - INFO - step: 10  loss: 10.2691  grad_norm:  1.9000  memory: \
47.50GiB(50.06%)  tps: 4,096  tflops: 248.10  mfu: 25.01%
"""
WORDS = ("--model=llama-3-8b", "--machine=hgx-h100", "--layout=strategy=zero3,checkpointing=full")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "titan.log"
    path.write_text(LOG)
    return path


def told(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, float]]:
    assert main(["calibrate", *words, "--json"]) == 0
    rows: list[dict[str, float]] = json.loads(capsys.readouterr().out)
    return rows


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["calibrate", *words]) == 2
    return " ".join(capsys.readouterr().err.split())


def test_the_next_plan_starts_from_what_was_measured(
    capsys: pytest.CaptureFixture[str], log: Path, tmp_path: Path
) -> None:
    out, plan = tmp_path / "machine.json", tmp_path / "plan.json"
    (row,) = told(capsys, str(log), *WORDS, f"--out={out}")
    assert row["step_time_s"] == pytest.approx(1.0)  # 8 × 4,096 tokens at 8 × 4,096 a second
    assert abs(row["after"]) < 0.02 < 0.2 < abs(row["before"])
    assert row["peak_memory_bytes"] == int(47.5 * 2**30)
    plan.write_text(
        json.dumps({"strategy": "zero3", "dp_shard": 8, "micro_batch": 1, "precision": "bf16",
                    "checkpointing": "full", "seq_len": 4096, "global_batch": 8})
    )  # fmt: skip
    words = ["estimate", "--model=llama-3-8b", f"--plan={plan}", "--json"]
    assert main([*words, f"--machine={out}"]) == 0
    corrected = json.loads(capsys.readouterr().out)["estimate"]["step_time_s"]
    assert main([*words, "--machine=hgx-h100"]) == 0
    whole = json.loads(capsys.readouterr().out)["estimate"]
    published = whole["step_time_s"]
    assert (published, corrected) == pytest.approx((row["before_s"], row["after_s"]))
    # What torchtitan tells is its allocator's, without CUDA's context and NCCL's buffers.
    assert row["memory_kind"] == "reserved"
    assert (
        whole["peak_memory_bytes"] - whole["memory"]["allocator and libraries"]
        < (row["planned_memory_bytes"])
    )
    assert row["planned_memory_bytes"] < whole["peak_memory_bytes"] - 2**30
    # Another log of the same machine is added to the first.
    other = tmp_path / "other.log"
    other.write_text(LOG.replace("4,096  tflops", "4,196  tflops"))
    told(capsys, str(other), WORDS[0], f"--machine={out}", WORDS[2], f"--out={out}")
    names = [f"{tmp_path.name}/{name}.log" for name in ("titan", "other")]
    assert [run["log"] for run in json.loads(out.read_text())["runs"]] == names
    # The same name with another batch is another run; the same run again replaces the first.
    again = (str(other), WORDS[0], f"--machine={out}", WORDS[2], f"--out={out}")
    text = other.read_text()
    larger = text.replace("global batch size 8", "global batch size 16")
    other.write_text(larger.replace("10:00:09", "10:00:18"))
    told(capsys, *again)
    other.write_text(text)
    told(capsys, *again)
    runs = json.loads(out.read_text())["runs"]
    assert [(run["log"], run["global_batch"]) for run in runs] == [
        (names[0], 8), (names[1], 16), (names[1], 8)
    ]  # fmt: skip
    # A console's log of another run has the same name in another folder.
    second = tmp_path / "second" / "other.log"
    second.parent.mkdir()
    second.write_text(text)
    told(capsys, str(second), *again[1:])
    assert [run["log"] for run in json.loads(out.read_text())["runs"]][2:] == [
        names[1], "second/other.log"
    ]  # fmt: skip
    # Runs of two networks, or of other numbers of devices, are not one machine's.
    said = refusal(capsys, *again, "--network=8xinfiniband-hdr")
    assert "used the default network of the machine" in said
    assert "had 8. Leave out --devices-per-node" in refusal(capsys, *again, "--devices-per-node=4")


def test_what_it_says(capsys: pytest.CaptureFixture[str], log: Path, tmp_path: Path) -> None:
    out = tmp_path / "machine.json"
    assert main(["calibrate", str(log), *WORDS, f"--out={out}"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "titan.log (torchtitan, ZeRO-3" in text and "measured 1.00 s a step" in text
    assert "memory, reserved: measured 47.50 GiB" in text and "memory is not corrected" in text
    assert "outpace plan --machine" in text


def test_a_run_of_outpace(capsys: pytest.CaptureFixture[str], run: Path) -> None:
    (row,) = told(capsys, str(run), f"--model={run}", "--machine=l4")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    times = [json.loads(line)["step_time_s"] for line in lines]
    assert row["trainer"] == "outpace" and min(times) <= row["step_time_s"] <= max(times)
    assert abs(row["after"]) < abs(row["before"])
    said = refusal(capsys, str(run), "--model=gpt2", "--machine=l4")
    assert "Pass the model that was trained" in said


def test_what_no_flag_supplies(
    capsys: pytest.CaptureFixture[str], log: Path, tmp_path: Path
) -> None:
    assert "which machine are the logs from?" in refusal(capsys, str(log), WORDS[0])
    said = refusal(capsys, str(log), *WORDS, "--nodes=2")
    assert "its layout has 8 devices, but 2 × 8 = 16 devices are requested" in said
    log.write_text("\n".join(line for line in LOG.splitlines() if "step:" in line))
    said = refusal(capsys, str(log), *WORDS[:2], "--layout=strategy=zero3,dp_shard=8")
    assert "titan.log does not state the number of tokens per sequence. Pass --seq-len" in said
    notes = log.with_name("notes.txt")
    notes.write_text("step 1 went well")
    assert "write settings of a plan as name=value" in refusal(
        capsys, str(log), *WORDS[:2], "--layout=sharding"
    )
    assert "no steps of a known trainer" in refusal(capsys, str(notes), *WORDS)


# Megatron-LM's arguments (_print_args) of a mixture of experts on 16 devices.
MEGATRON = """\
  expert_model_parallel_size ...................... 8
  expert_tensor_parallel_size ..................... 1
  micro_batch_size ................................ 1
  pipeline_model_parallel_size .................... 2
  recompute_granularity ........................... full
  seq_length ...................................... 2048
  tensor_model_parallel_size ...................... 1
  use_distributed_optimizer ....................... True
  world_size ...................................... 16
 iteration       10/    1000 | elapsed time per iteration (ms): 9147.6 | global batch size:    64 |
 iteration       20/    1000 | elapsed time per iteration (ms): 4820.5 | global batch size:    64 |
[Rank 0] (after 10 iterations) memory (MB) | allocated: 1464.0 | max allocated: 41465.0 |
"""


def test_a_layout_as_megatron_prints_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log, out = tmp_path / "run.log", tmp_path / "machine.json"
    log.write_text(MEGATRON)
    words = (str(log), "--model=mixtral-8x7b", "--machine=hgx-h100", "--nodes=2", f"--out={out}")
    (row,) = told(capsys, *words)
    assert row["memory_kind"] == "allocated" and row["notes"] == []
    (run,) = json.loads(out.read_text())["runs"]
    wanted = {"strategy": "3d", "dp_shard": 8, "pp": 2, "ep": 8, "zero": 1,
              "checkpointing": "full", "pp_microbatches": 8}  # fmt: skip
    assert {name: run["plan"].get(name) for name in wanted} == wanted
    log.write_text(MEGATRON.replace("True", "False").replace("full", "selective"))
    (row,) = told(capsys, *words)
    whole, selective = row["notes"]
    assert "the plan shards them (ZeRO-1)" in whole and "the plan recomputes none" in selective


def write_state(folder: Path, runtime_s: float, **changed: object) -> str:
    """A trainer_state.json of 200 steps of 16 sequences."""
    last = {"train_runtime": runtime_s, "train_samples_per_second": 3200 / runtime_s, "step": 200}
    state = {"global_step": 200, "max_steps": 200, "log_history": [last], **changed}
    path = folder / "trainer_state.json"
    path.write_text(json.dumps(state))
    return str(path)


CARD = ("--model=llama-3.2-1b", "--machine=hgx-a100", "--devices-per-node=1", "--seq-len=1024")


def test_a_step_that_no_such_device_can_do(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """MFU by hand: 6 × 1.24 G weights × 16,384 tokens in 1 ms are 390 times 312 TFLOP/s."""
    out = tmp_path / "machine.json"
    words = (*CARD, "--layout=checkpointing=full", f"--out={out}")
    said = refusal(capsys, write_state(tmp_path, 0.2, train_batch_size=16), *words)
    times = float(said.partition("would need ")[2].split()[0])
    assert times == pytest.approx(6 * 1.236e9 * 16384 / 1e-3 / 312e12, rel=0.05)
    assert "peak of A100" in said and "--model" in said and "resumed" in said
    assert not out.exists()
    # A step of just less than the peak is taken.
    possible = write_state(tmp_path, 200 * 1e-3 * times * 1.05, train_batch_size=16)
    (row,) = told(capsys, possible, *words)
    assert row["step_time_s"] == pytest.approx(1e-3 * times * 1.05) and out.exists()


def test_a_layout_that_does_not_fit(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "machine.json"
    state = write_state(tmp_path, 2000.0, train_batch_size=1)
    words = (state, "--model=llama-3.1-8b", "--machine=rtx-4090", "--seq-len=512", f"--out={out}")
    said = refusal(capsys, *words)
    assert "llama-3.1-8b in this layout does not fit" in said
    assert "LoRA" in said and "quantized" in said and "--model" in said
    assert "Such runs cannot correct a machine yet. Did it use recomputation" in said
    said = refusal(capsys, *words, "--layout=lora_rank=16,base=nf4,checkpointing=full")
    assert "a run with adapters (lora_rank) or frozen weights cannot correct a machine" in said
    assert "Pass the log of a run that trained" in said
    assert not out.exists()


def test_more_memory_than_the_device_has(capsys: pytest.CaptureFixture[str], log: Path) -> None:
    log.write_text(LOG.replace("47.50GiB", "147.50GiB"))
    said = refusal(capsys, str(log), *WORDS)
    assert "the run used 147.50 GiB of a device's memory" in said and "--machine" in said


def test_what_is_assumed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A Trainer's console does not say its batch size per device; its state does."""
    console = tmp_path / "console.log"
    console.write_text(
        "{'train_runtime': '200.0', 'train_samples_per_second': '16.0', "
        "'train_steps_per_second': '1.0', 'train_loss': '4.1', 'epoch': '1'}\n"
    )
    said = refusal(capsys, str(console), *CARD)
    assert "of the 16 sequences per step each of 1 data-parallel rank processed at once" in said
    assert "Pass --layout micro_batch=N" in said
    layout = "--layout=micro_batch=16,checkpointing=full"
    (row,) = told(capsys, str(console), *CARD, layout)
    assert row["assumed"] == {"precision": "bf16", "optimizer": "adamw-fused"}
    state = write_state(tmp_path, 200.0, train_batch_size=16)
    (other,) = told(capsys, state, *CARD, "--layout=checkpointing=full")
    assert (other["before_s"], other["assumed"]) == (row["before_s"], row["assumed"])
    assert main(["calibrate", state, *CARD, "--layout=checkpointing=full,optimizer=sgd"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "assumed, because the log does not say: precision=bf16. Change it with --layout" in text


@pytest.mark.parametrize(
    ("batch", "seq_len", "step"), [("32", "4096", "4.00 s"), ("8", "1024", "250.0 ms")]
)
def test_a_batch_that_the_logs_own_clock_contradicts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, batch: str, seq_len: str, step: str
) -> None:
    """8 devices at 4,096 tokens a second; 90 steps in 91 s, and the last ten with an evaluation."""
    head, _, steps = (line.split("\n")[0] for line in LOG.split("[titan] ")[1:4])
    lines = [f"[titan] {head}"]
    for number, time in ((1, "10:00:09"), (50, "10:00:58"), (91, "10:01:40"), (101, "10:05:00")):
        line = steps.replace("10:00:02", time).replace("step:  1", f"step: {number}")
        lines.append(f"[titan] {line.replace('tps: 812', 'tps: 4,096')}")
    log, out = tmp_path / "titan.log", tmp_path / "machine.json"
    log.write_text("\n".join(lines) + "\n")
    words = (str(log), *WORDS[:2], f"--out={out}")
    layout = "--layout=strategy=zero3,checkpointing=full,micro_batch=1"
    said = refusal(capsys, *words, layout, f"--global-batch={batch}", f"--seq-len={seq_len}")
    assert f"sequences of {seq_len} tokens takes {step}, but by the log's clock it took" in said
    assert "--global-batch" in said and not out.exists()
    (row,) = told(capsys, *words, layout, "--global-batch=8", "--seq-len=4096")
    assert row["step_time_s"] == pytest.approx(1.0)


def test_flags_that_contradict_the_log(
    capsys: pytest.CaptureFixture[str], log: Path, run: Path, tmp_path: Path
) -> None:
    state = write_state(tmp_path, 200.0, train_batch_size=16)
    said = refusal(capsys, state, *CARD, "--layout=micro_batch=4")
    assert "says micro_batch=16, but you gave micro_batch=4 with --layout" in said
    assert "16 sequences per step, but you gave --global-batch 32" in refusal(
        capsys, state, *CARD, "--global-batch=32"
    )
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"strategy": "zero3", "dp_shard": 4}))
    for words, texts in {
        (*WORDS[:2], "--layout=dp_shard=4"): ("dp_shard=8", "you gave dp_shard=4 with --layout"),
        (*WORDS[:2], f"--plan={plan}"): ("dp_shard=8", "you gave dp_shard=4 with --plan"),
        (*WORDS, "--seq-len=2048"): ("sequences of 4096 tokens", "--seq-len 2048"),
    }.items():
        said = refusal(capsys, str(log), *words)
        assert all(text in said for text in texts), said
    said = refusal(capsys, str(run), f"--model={run}", "--machine=l4", "--precision=fp16")
    assert "precision=fp32, but you gave --precision fp16" in said


def test_its_file_is_no_probe_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is often named machine.json, too, which the planner reads where no machine is named."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "machine.json").write_text(json.dumps({"node": "hgx-h100", "runs": []}))
    notes = job(PlanQuestion("outpace-tiny", None, precision="fp32")).cluster.notes
    assert any("outpace calibrate" in note and "--machine machine.json" in note for note in notes)
    assert find_probe(identify(find_accelerator)) is None


def test_a_probe_without_matmuls_is_ignored_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["probe", "memory", "--quick", "--budget", "1", "--out", "machine.json"]) == 0
    assert find_probe(identify(find_accelerator)) is None
    notes = job(PlanQuestion("outpace-tiny", None, precision="fp32")).cluster.notes
    assert any("has no matmuls" in note for note in notes)


def test_a_log_of_another_model_or_of_adapters(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    log = tmp_path / "run.log"
    words = (str(log), "--model=mixtral-8x7b", "--machine=hgx-h100", "--nodes=2")
    for name, value, said in (
        ("num_layers", 24, "a model with 24 layers, but --model mixtral-8x7b has 32"),
        ("hidden_size", 2048, "a hidden size of 2048, but --model mixtral-8x7b has 4096"),
    ):
        log.write_text(f"  {name} {'.' * 40} {value}\n{MEGATRON}")
        assert said in refusal(capsys, *words)
    log.write_text(f"  num_layers {'.' * 38} 32\n{MEGATRON}")
    told(capsys, *words)
    log.write_text(f"trainable params: 9 || all params: 900 || trainable%: 1.0\n{MEGATRON}")
    assert "a run with adapters (lora_rank) or frozen weights" in refusal(capsys, *words)
    size = "Model llama3 8B size: {} total parameters\n"
    log.write_text(size.format("8,030,261,248") + LOG)
    told(capsys, str(log), *WORDS)
    log.write_text(size.format("1,235,814,400") + LOG)
    assert "a model with 1,235,814,400 parameters" in refusal(capsys, str(log), *WORDS)


def test_what_trainer_trained(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Under FSDP, Trainer counts the weights of one rank (transformers#40463)."""
    log = tmp_path / "run.log"
    result = "{'train_runtime': 300.0, 'train_steps_per_second': 0.5, 'epoch': 1.0}\n"
    words = (str(log), "--model=llama-3-8b", "--machine=hgx-h100", "--seq-len=2048",
             "--layout=strategy=zero3,dp_shard=8,micro_batch=1,checkpointing=full")  # fmt: skip
    banner = "Total train batch size (w. parallel) = 8\nNumber of trainable parameters = {}\n"
    for count in ("8,030,261,248", "1,003,782,656"):
        log.write_text(banner.format(count) + result)
        assert told(capsys, *words)[0]["step_time_s"] == pytest.approx(2.0)
    log.write_text(banner.format("20,971,520") + result)
    assert "adapters (lora_rank) or frozen weights" in refusal(capsys, *words)


def test_a_precision_that_the_log_contradicts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    log = tmp_path / "run.log"
    log.write_text(f"  bf16 {'.' * 44} True\n  fp8 {'.' * 45} hybrid\n{MEGATRON}")
    words = (str(log), "--model=mixtral-8x7b", "--machine=hgx-h100", "--nodes=2")
    for flag in ("--precision=bf16", "--layout=precision=bf16"):
        said = refusal(capsys, *words, flag)
        assert "says precision=fp8, but you gave " in said
    # bf16-master differs only in how the weights are stored.
    log.write_text(log.read_text().replace("hybrid", "None"))
    told(capsys, *words, "--precision=bf16")
