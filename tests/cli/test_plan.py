"""`outpace plan`."""

import json
import re
import shlex
import subprocess
import sys
import tomllib

import pytest

from outpace.catalog.models import PRESETS
from outpace.cli.export_formats import FORMATS
from outpace.cli.main import main
from outpace.interop.model_writer import write_config
from outpace.records.estimate import Plans
from outpace.records.figure import Figure, Key
from outpace.records.machine import Machine
from outpace.records.plan import Plan, PlanFile
from outpace.records.probe_results import ProbeRecord
from outpace.reporting.terminal.console import Console
from outpace.reporting.terminal.plan import plans_text

pytestmark = pytest.mark.usefixtures("planned_once")
LLAMA = ("plan", "--model=llama-3-8b", "--machine=hgx-h100", "--seq-len=4096",
         "--global-batch=64")  # fmt: skip
TINY = ("plan", "--model=outpace-tiny", "--machine=2x-titan-rtx", "--global-batch=16")
FIGURES = {"step_time_s", "tokens_per_s", "mfu", "hfu", "peak_memory_bytes", "memory", "parts_s",
           "low_s", "high_s", "level"}  # fmt: skip


def said(capsys, *words):
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def shown(capsys, monkeypatch, *words, columns=80):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main([*words]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= columns and "…" not in text
    return " ".join(text.split())


def fastest(answer):
    return next(one for one in answer["plans"] if "fastest" in one["roles"])


def refused(capsys, *words):
    assert main([*words]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "Traceback" not in captured.err
    sentences = captured.err.strip()
    assert sentences.startswith("outpace: ") and "\n" not in sentences
    return sentences


def test_the_document_is_as_it_is_told(capsys):
    answer = said(capsys, *LLAMA, "--tokens=1T", "--price=2.5", "--keep=precision=bf16")
    assert set(answer) >= {"plans", "rejected", "insistences", "considered", "notes", "model"}
    assert len(answer["plans"]) == 5 and answer["considered"] > 10_000
    for one in answer["plans"]:
        assert set(one) >= {"plan", "estimate", "why"} and one["why"]
        assert set(one["estimate"]) >= FIGURES
        assert one["estimate"]["depth"] == "estimate"
        plan = Plan.parse(one["plan"], "the document")
        assert plan.world_size == 8
        assert one["estimate"]["cost"] == pytest.approx(one["estimate"]["time_s"] / 3600 * 8 * 2.5)
    assert all(row["family"] and row["reason"] for row in answer["rejected"])
    assert any("GiB of a device's 79.11 GiB" in row["reason"] for row in answer["rejected"])


def test_a_person_sees_what_is_fastest_and_why(capsys, monkeypatch):
    text = shown(capsys, monkeypatch, *LLAMA, "--tokens=1T", "--price=2.5", "--max-tp=4",
                 "--keep=micro_batch=1")  # fmt: skip
    for part in ("llama-3-8b, 8.03 G parameters",
                 "1 × 8 = 8 devices of 80 GiB, 79.11 GiB of it usable (hgx-h100)", "tokens/s",
                 "MFU", "where the time goes", "a device's memory by kind", "matmuls",
                 "faster than plan ", "slower than the fastest", "Rejected:", "1.00 T tokens:",
                 " days (", ", at a cost of", "max-tp 4: nothing", "micro_batch=1:",
                 "the true time is between", "with 90 %"):  # fmt: skip
        assert part in text, part


def test_what_is_not_known_has_no_column(capsys, monkeypatch, tmp_path):
    path = machine_file(tmp_path / "machine.json")
    text = shown(capsys, monkeypatch, "plan", "--model=outpace-tiny", f"--machine={path}")
    assert "MFU" not in text and "n/a" not in text
    assert "a probe" in text and "a CPU" in text


def machine_file(path, **values):
    key = Key(kind="matmul", what="curve", of={"dtype": "fp32", "m": 512, "n": 512, "k": 512})
    figure = Figure(key=key, unit="FLOP/s", value=80e9, origin="measured")
    probed = ProbeRecord(date="", versions={}, command="", sections=(), quick=True, took_s=1.0,
                    figures=(figure,), fits=(), world_size=1, hosts=1)  # fmt: skip
    made = Machine(host_cores=4, host_memory_bytes=2**34, cpu="a CPU", probed=probed)
    document = {**made.model_dump(mode="json"), **values}
    path.write_text(json.dumps(document))
    return path


def test_one_plan_is_walked_through_and_written(capsys, monkeypatch, tmp_path):
    ranked = said(capsys, *LLAMA)["plans"]
    file = tmp_path / "plan.json"
    text = shown(capsys, monkeypatch, *LLAMA, "--explain=3", f"--out={file}")
    told = " ".join(text.split())
    assert "unsharded: weights gathered from other ranks; temporary: allocated and freed" in told
    assert "(HFU includes recomputation; both count full causal attention, and only" in told
    assert f"Plan 3 of {len(ranked)}" in text and ranked[2]["title"] in text
    for axis, link in ranked[2]["placement"].items():
        assert f"{axis}: {link}" in text and "in a node" in link
    assert "The fullest rank needs" in text and "tokens/s on 8 ranks" in text
    assert PlanFile.load(file).plan == Plan.parse(ranked[2]["plan"], "the document")


def test_what_outpace_does_not_train_is_said_once_above_the_table(capsys, monkeypatch):
    words = ["plan", "--model=mixtral-8x7b", "--machine=hgx-h100", "--nodes=2"]
    text = shown(capsys, monkeypatch, *words)
    assert text.count("outpace has no Mixtral") == 1 and "†" not in text
    line = "outpace has no Mixtral. --emit deepspeed, accelerate or fsdp writes a plan for another"
    assert line in text.partition("tokens/s")[0]


def test_figures_of_three_digits_fit_in_80_columns(capsys, monkeypatch):
    answer = said(capsys, *LLAMA)
    wide = {"mfu": 1.005, "hfu": 1.334, "step_time_s": 0.8888, "tokens_per_s": 888.88e6,
            "peak_memory_bytes": int(188.88 * 2**30)}  # fmt: skip
    for one in answer["plans"]:
        one["estimate"] |= wide
    answer["plans"] *= 3
    Console(width=80).print(plans_text(Plans.parse(answer, "the document")))
    text = capsys.readouterr().out
    assert "HFU also those of recomputation" in " ".join(text.split())
    table = text.partition("memory \n")[2].splitlines()
    rows = [line for line in table if "133.4 %" in line]
    assert len(rows) == 15 and all("100.5 %   133.4 %   188.88 GiB" in line for line in rows)


@pytest.mark.parametrize("option", ["--lora-rank=16", "--base=nf4"])
def test_adapters_of_an_estimate_are_in_its_file(option, capsys):
    error = refused(capsys, "estimate", "--model=gpt2", "--machine=hgx-h100", option)
    assert "outpace estimate has no option" in error and "part of the plan file" in error


QLORA = ["plan", "--model=llama-3.1-8b", "--machine=rtx-4090", "--lora-rank=16", "--base=nf4"]


def test_a_consumer_gpu_trains_an_8b_model_by_adapters(capsys, tmp_path):
    """All weights do not fit, adapters do; the file says what they are, and estimate takes it."""
    file = tmp_path / "plan.json"
    answer = said(capsys, *QLORA, "--lora-targets=q,v", "--lora-alpha=32", f"--out={file}")
    first, own = answer["plans"][0], PlanFile.load(file).plan
    assert own.lora_rank == 16 and own.lora_targets == ("q", "v")
    assert own.base == "nf4" and own.lora_alpha == 32 and own.strategy == "single"
    assert first["estimate"]["peak_memory_bytes"] <= first["estimate"]["memory_bytes"]
    assert "QLoRA 16 on q, v" in first["title"]
    again = said(capsys, "estimate", *QLORA[1:3], f"--plan={file}")
    for name in ("step_time_s", "memory", "mfu"):
        assert again["estimate"][name] == first["estimate"][name]
    whole = refused(capsys, *QLORA[:3], "--keep=offload_parameters=none,offload_optimizer=none")
    assert "does not fit" in whole


def test_adapters_over_eight_gpus_are_replicas_or_shards(capsys):
    words = ["plan", "--model=llama-3.1-8b", "--machine=hgx-h100", "--lora-rank=16"]
    answer = said(capsys, *words)
    strategies = {one["plan"]["strategy"] for one in answer["plans"]}
    assert strategies <= {"ddp", "zero3", "hsdp"} and "ddp" in strategies
    assert "LoRA 16: 41.94 M parameters are trained" in " ".join(answer["notes"])
    assert not answer["insistences"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--keep=tp=2"], "lora_rank 16 with tp 2"),
        (["--keep=offload_optimizer=cpu"], "lora_rank 16 with offload_optimizer cpu"),
        (["--keep=strategy=zero1"], "lora_rank 16 with strategy zero1"),
        (["--trainer=megatron"], "lora_rank 16 with --trainer megatron"),
        (["--lora-targets=w"], "--lora-targets w: use one of"),
        (["--lora-dropout=1"], "--lora-dropout 1.0: input should be less than 1"),
        (["--keep=optimizer=muon"], "lora_rank 16 with optimizer muon"),
        (["--precision=fp64"], "lora_rank 16 with precision fp64"),
        (["--precision=fp8"], "lora_rank 16 with precision fp8"),
        (["--keep=precision=fp8"], "lora_rank 16 with precision fp8"),
        (["--emit=torchtitan"], "configurations for torchtitan do not support adapters"),
        (["--keep=lora_rank=8"], "--lora-rank 16 and --keep lora_rank=8 both set lora_rank"),
        (["--keep=lora-rank=8"], "--lora-rank 16 and --keep lora-rank=8 both set lora_rank"),
        (["--keep=base = nf4"], "--base nf4 and --keep base = nf4 both set base"),
    ],
)
def test_what_does_not_go_with_adapters_is_a_sentence(options, words, capsys):
    assert words in refused(capsys, *QLORA, *options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model=gpt2", "--base=nf4"], "base nf4 has no effect without LoRA. Set lora_rank"),
        (
            ["--model=gpt2", "--keep=lora_targets=all,base=nf4"],
            "base nf4 has no effect without LoRA",
        ),
        (["--model=gpt2", "--keep=lora_alpha=8"], "lora_alpha 8.0 has no effect without LoRA"),
        (["--model=gpt2", "--lora-rank=4", "--lora-targets=gate"], "MLP of gpt2 has no gate"),
        (["--model=mixtral-8x7b", "--lora-rank=4"], "cannot be planned with adapters"),
        (["--model=bert-base", "--lora-rank=4"], "cannot be planned with adapters"),
    ],
)
def test_models_and_settings_without_adapters_are_a_sentence(options, words, capsys):
    assert words in refused(capsys, "plan", "--machine=hgx-h100", *options)


def test_what_does_not_fit_is_told_of_positions_too(capsys):
    words = ["plan", "--model=llama-3.1-8b", "--machine=rtx-3090"]
    error = refused(capsys, *words, "--seq-len=200000")
    assert "sequences of 200000 tokens exceed the model's 131072 positions" in error


def test_scaling_says_where_the_network_takes_over(capsys, monkeypatch):
    words = [*LLAMA[:3], "--network=25Gbit/s", "--global-batch=512", "--compare-nodes=1,2,4,64"]
    rows = said(capsys, *words)["scaling"]
    assert [row["devices"] for row in rows] == [8, 16, 32, 512]
    speed = [row["best"]["estimate"]["tokens_per_s"] for row in rows]
    assert speed == sorted(speed) and speed[3] < 64 * speed[0]
    text = shown(capsys, monkeypatch, *words)
    assert "llama-3-8b, 8.03 G parameters, on nodes like hgx-h100" in text
    assert "global batch 512 in every row" in text and "efficiency" in text
    assert "The network dominates from" in text
    assert "GiB" in text and "memory" in text and "More than 100 %" not in text


def test_more_than_all_of_linear_scaling_is_explained(capsys, monkeypatch):
    """A device of four computes what one recomputes, since it keeps a quarter of the states."""
    words = ["plan", "--model=qwen2.5-7b", "--machine=hgx-h100", "--devices-per-node=1",
             "--network=8xinfiniband-ndr", "--global-batch=64", "--compare-nodes=1,4"]  # fmt: skip
    rows = said(capsys, *words)["scaling"]
    speed = [row["best"]["estimate"]["tokens_per_s"] / row["devices"] for row in rows]
    assert speed[1] > 1.005 * speed[0]
    assert "More than 100 %: since more devices share the states" in shown(
        capsys, monkeypatch, *words
    )


def test_weights_that_wait_on_the_host_bring_adapters_to_mind(capsys, monkeypatch):
    on_one = ["plan", "--model=qwen2.5-7b", "--machine=rtx-3090"]
    told = shown(capsys, monkeypatch, *on_one)
    assert "Adapters need far less memory: plan them with --lora-rank 16" in told
    # Before the plans: what they need, and the precision that they have.
    head = told.split("Recommended")[0]
    assert "Plan 1 needs " in head and "GiB of host memory per node. The host's memory" in head
    assert "--precision bf16-master (bf16 in plans that offload, as here)." in head
    assert "Adapters" not in shown(capsys, monkeypatch, *LLAMA)
    # Where they would be refused they are not proposed.
    told = shown(capsys, monkeypatch, *on_one, "--keep=offload_parameters=cpu")
    assert "Adapters need far less" not in told


def test_a_plan_of_adapters_is_started_on_trained_weights(capsys):
    words = ["plan", "--model=gpt2", "--machine=l4", "--lora-rank=4", "--emit=outpace", "--json"]
    assert main(words) == 0
    assert "--model path/to/hf-model " in json.loads(capsys.readouterr().out)["command"]


def test_a_plan_that_is_not_there_is_not_promised(capsys):
    words = ["plan", "--model=gpt2", "--machine=l4", "--seq-len=16", "--global-batch=1"]
    sentence = refused(capsys, *words, "--explain=2")
    assert (
        "--explain 2: only one plan is listed. There are no others, so use --explain 1." in sentence
    )
    sentence = refused(capsys, *words, "--explain=9")
    assert "List more with --count 9." in sentence


def test_sentences_below_compared_nodes_have_spaces(capsys, monkeypatch):
    text = shown(capsys, monkeypatch, *LLAMA[:3], "--global-batch=64", "--compare-nodes=1,2")
    assert "share of a step. The network" in text


def test_nodes_that_are_compared_have_a_network(capsys):
    """As hgx-h100 alone has none, the same is assumed as for several."""
    words = [*LLAMA[:3], "--global-batch=512", "--compare-nodes=2,4"]
    rows = said(capsys, *words)["scaling"]
    for row in rows:
        alone = said(capsys, *LLAMA[:3], "--global-batch=512", f"--nodes={row['nodes']}")
        assert row["best"]["estimate"] == fastest(alone)["estimate"]


@pytest.mark.slow
def test_what_if_something_were_else(capsys, monkeypatch):
    words = [*LLAMA, "--nodes=2", "--network=10Gbit/s"]
    both = said(capsys, *words, "--what-if=link=400Gbps")
    now, then = (fastest(both[name])["estimate"]["step_time_s"] for name in ("now", "then"))
    assert then < now
    assert "more throughput" in shown(capsys, monkeypatch, *words, "--what-if=link=400Gbps")
    assert "less throughput" in shown(capsys, monkeypatch, *words, "--what-if=memory=16GiB")
    # The same batch on more nodes, though nobody said which.
    more = said(capsys, *LLAMA[:3], "--what-if=nodes=2")
    assert more["now"]["global_batch"] == more["then"]["global_batch"]
    speed = [fastest(more[name])["estimate"]["tokens_per_s"] for name in ("now", "then")]
    assert 1.5 < speed[1] / speed[0] < 2.5
    # As --compare-nodes answers it.
    rows = said(capsys, *LLAMA[:3], "--compare-nodes=1,2")["scaling"]
    first = [fastest(more[name])["plan"] for name in ("now", "then")]
    assert [row["best"]["plan"] for row in rows] == first
    many = shown(capsys, monkeypatch, *LLAMA[:3], "--global-batch=512", "--what-if=nodes=8")
    assert re.search(r"What if nodes=8: [78]\.\d × the throughput\.", many)


def test_less_memory_is_never_more_throughput(capsys, monkeypatch):
    """The recommended plan of less memory is 1.1 % faster than that of more."""
    words = ["plan", "--model=gpt2-medium", "--machine=hgx-a100", "--seq-len=1024",
             "--global-batch=128", "--count=1", "--what-if=memory=22GiB"]  # fmt: skip
    both = said(capsys, *words)
    now, then = (both[name]["plans"][0]["estimate"]["step_time_s"] for name in ("now", "then"))
    assert then < now
    text = shown(capsys, monkeypatch, *words)
    assert "the same throughput" in text or "less throughput" in text
    for name in ("now", "then"):
        assert fastest(both[name])["title"].split(",")[0] in text


def test_a_change_that_decides_whether_it_fits_is_an_answer(capsys, monkeypatch):
    words = ["plan", "--model=llama-3-8b", "--machine=rtx-4090", "--global-batch=4",
             "--keep=offload_optimizer=none"]  # fmt: skip
    text = shown(capsys, monkeypatch, *words, "--what-if=memory=192GiB")
    assert "the model does not fit now, but with memory=192GiB it does." in text
    for head in ("machine", "step", "tokens/s", "fastest plan", "now", "with memory=192GiB"):
        assert head in text
    both = said(capsys, *words, "--what-if=memory=192GiB")
    assert "does not fit" in both["now"]["unfit"] and both["then"]["plans"]
    words = ["plan", "--model=gpt2", "--machine=l4"]
    assert "fits now, but with memory=1GiB it does not" in shown(
        capsys, monkeypatch, *words, "--what-if=memory=1GiB"
    )
    sentence = refused(capsys, "plan", "--model=llama-3.1-405b", "--machine=l4",
                       "--what-if=memory=28GiB")  # fmt: skip
    assert sentence.startswith("outpace: now: llama-3.1-405b")
    assert " Then: llama-3.1-405b" in sentence


def test_plans_that_the_estimate_does_not_tell_apart_are_said_to_be(capsys, monkeypatch):
    plans = said(capsys, *LLAMA)["plans"]
    high = plans[0]["estimate"]["high_s"]
    alike = sum(one["estimate"]["step_time_s"] <= high for one in plans)
    assert alike > 1
    between = "to" if alike > 2 else "and"
    line = (
        f"Plans 1 {between} {alike} are within the 90 % interval of the first: measure before "
        "choosing"
    )
    assert line in shown(capsys, monkeypatch, *LLAMA)
    alone = shown(capsys, monkeypatch, *LLAMA, "--count=1")
    assert "within the 90 % interval" not in alone and "1. recommended" in alone


def test_what_is_offloaded_is_the_hosts_memory(capsys, monkeypatch):
    words = ["plan", "--model=llama-3-8b", "--machine=hgx-h100", "--global-batch=64"]
    words.append("--keep=offload_optimizer=cpu,strategy=zero3")
    one = said(capsys, *words)["plans"][0]["estimate"]
    assert "offloaded" not in one["memory"] and one["host_memory_bytes"] is None
    # Master weights' twin and two moments, 12 bytes a parameter, whatever the ranks; and the
    # gradients of two units that are on their way.
    assert one["host_offloaded_bytes"] == pytest.approx(12 * 8.03e9, rel=0.05)
    text = shown(capsys, monkeypatch, *words)
    assert "GiB of host memory per node; the host's memory is unknown" in text
    known = shown(capsys, monkeypatch, *words, "--machine=dgx-h100")
    assert "GiB of host memory per node; it has 2.00 TiB" in known
    stated = shown(capsys, monkeypatch, *words, "--host-memory=512GiB")
    assert "GiB of host memory per node; it has 512.00 GiB" in stated
    sentence = refused(capsys, *words, "--host-memory=1GiB")
    assert "of a node's 1.00 GiB of host memory" in sentence
    assert "'much' is not a number of bytes" in refused(capsys, *words, "--host-memory=much")
    words[-1] = "--keep=offload_parameters=cpu,strategy=zero3"
    one = said(capsys, *words)["plans"][0]["estimate"]  # gradients lie with their weights
    assert one["host_offloaded_bytes"] == pytest.approx(16 * 8.03e9, rel=0.01)


def test_a_hosts_memory_has_room_for_gradients_and_activations(capsys, tmp_path):
    """8 B parameters, weights and activations on the host of a 24 GB card, with 119.7 GiB there."""
    words = ["plan", "--model=llama-3.1-8b", "--machine=rtx-4090", "--seq-len=512"]
    words.append("--keep=offload_parameters=cpu,micro_batch=1")
    one = said(capsys, *words, "--global-batch=1")["plans"][0]["estimate"]
    assert one["host_offloaded_bytes"] / 2**30 == pytest.approx(119.7, abs=0.1)


def test_a_hosts_memory_limits_what_is_offloaded(capsys):
    words = ["plan", "--model=qwen3-32b", "--global-batch=8", "--seq-len=1024"]
    words.append("--keep=offload_optimizer=cpu,offload_parameters=cpu")
    sentence = refused(capsys, *words, "--machine=4x-a100-slingshot")
    assert "of a node's 256.00 GiB of host memory" in sentence


def test_an_only_kind_is_said_to_be_what_keep_leaves(capsys, monkeypatch):
    words = ["plan", "--model=gpt2", "--machine=l4", "--seq-len=16", "--global-batch=1"]
    text = shown(capsys, monkeypatch, *words, "--keep=micro_batch=1")
    assert "1. recommended, fastest and leanest: the only kind that --keep allows." in text
    text = shown(capsys, monkeypatch, *words)
    assert "1. recommended, fastest and leanest: no other kind of plan was found." in text
    assert "on 1 device of 24 GiB, 21.99 GiB of it usable (l4)" in text
    text = shown(capsys, monkeypatch, *words, "--lora-rank=4")
    assert "no other kind of plan was found." in text


def test_a_reason_compares_with_a_leaner_plan_of_the_same_kind(capsys, monkeypatch):
    text = shown(capsys, monkeypatch, "plan", "--model=gpt2", "--machine=l4")
    assert "% faster than plan 2, which takes" in text
    assert "2. leanest: " in text


def test_every_family_that_can_be_laid_out_has_a_row(capsys):
    words = ["plan", "--model=llama-3-8b", "--machine=dgx-h100", "--global-batch=64"]
    answer = said(capsys, *words)
    rows = {row["family"]: row["reason"] for row in answer["rejected"]}
    assert "(it offloads nothing)" in rows["ring all-reduce"]
    assert "micro-batch" in rows["DDP"] and "micro-batch" in rows["ring all-reduce"]
    kept = said(capsys, *words, "--keep=offload_optimizer=cpu")
    others = {row["family"]: row["reason"] for row in kept["rejected"]}
    assert others["ring all-reduce"] == "cannot be combined with offload_optimizer=cpu"


def test_a_precision_that_is_given_is_not_varied(capsys):
    words = ["plan", "--model=llama-3-8b", "--machine=hgx-h100", "--global-batch=16",
             "--precision=bf16"]  # fmt: skip
    found = said(capsys, *words, "--vary=all", "--max-tp=1", "--keep=micro_batch=1")
    assert {one["plan"]["precision"] for one in found["plans"]} == {"bf16"}
    assert main([*words, "--vary=precision"]) == 2
    assert "--precision bf16 and --vary precision" in capsys.readouterr().err


def test_sequences_beyond_the_models_positions_are_told(capsys):
    words = ["plan", "--model=llama-3-8b", "--machine=hgx-h100", "--count=1"]
    beyond = said(capsys, *words, "--seq-len=8200", "--global-batch=8")["notes"]
    assert any("longer than the 8192 positions of llama-3-8b" in note for note in beyond)
    within = said(capsys, *words, "--seq-len=8192", "--global-batch=8")["notes"]
    assert not any("positions" in note for note in within)


def test_a_folder_is_trained_as_it_was_named(capsys, tmp_path):
    """Though a preset has its dimensions: weights and tokenizer are the folder's."""
    preset = PRESETS["qwen2.5-0.5b"].spec
    write_config(tmp_path, preset, {}, "bfloat16")
    words = ["plan", f"--model={tmp_path}", "--machine=l4", "--emit=outpace", "--count=1"]
    assert f"--model {tmp_path} " in said(capsys, *words)["command"]


def test_dimensions_that_nobody_gave_are_told(capsys, tmp_path):
    given = {"model_type": "llama", "hidden_size": 512, "num_hidden_layers": 4,
             "num_attention_heads": 8, "intermediate_size": 1024, "vocab_size": 1000,
             "max_position_embeddings": 512}  # fmt: skip
    config = tmp_path / "config.json"
    words = ["plan", f"--model={tmp_path}", "--machine=l4"]
    config.write_text(json.dumps(given))
    assert not any("defaults" in note for note in said(capsys, *words)["notes"])
    del given["intermediate_size"], given["vocab_size"]
    config.write_text(json.dumps(given))
    told = "transformers' defaults are used: vocab_size 32000, intermediate_size 11008"
    assert any(told in note for note in said(capsys, *words)["notes"])


def test_the_plan_that_is_written_is_among_those_that_the_format_can_express(capsys):
    words = ["plan", "--model=llama-3.1-8b", "--machine=hgx-h100", "--seq-len=8192",
             "--global-batch=32", "--precision=bf16",
             "--keep=micro_batch=4,strategy=zero3,offload_activations=none"]  # fmt: skip
    listed = said(capsys, *words)["plans"]
    found = said(capsys, *words, "--emit=torchtitan")
    assert listed[0]["plan"]["checkpointing"] == "attention"  # which torchtitan has not
    assert not found["lost"] and found["warning"] is None and found["plan"] == 1
    assert "of the plans that torchtitan can express" in found["why"]
    written = tomllib.loads(found["text"].replace("SET_ME", "1"))
    assert written["parallelism"]["data_parallel_shard_degree"] == 8
    best_s = found["estimate"]["step_time_s"]
    own = said(capsys, *words, "--trainer=torchtitan")["plans"]
    assert best_s == pytest.approx(own[0]["estimate"]["step_time_s"])
    whole = f"{words.pop()},loss=auto,checkpointing=full"  # selective modes do not fit there
    own = said(capsys, *words, whole, "--trainer=torchtitan")["plans"]
    assert best_s == pytest.approx(min(one["estimate"]["step_time_s"] for one in own))
    assert found["estimate"]["peak_memory_bytes"] <= found["estimate"]["memory_bytes"]


def test_a_pipeline_for_megatron_is_one_that_it_can_express(capsys, tmp_path):
    """No ZeRO-3 in a pipeline, no compile, and stages as the script has them."""
    words = ["plan", "--model=llama-3.1-70b", "--machine=hgx-h100", "--nodes=8", "--seq-len=8192",
             "--global-batch=512", "--keep=tp=4,pp=4"]  # fmt: skip
    listed = said(capsys, *words, "--count=3", "--trainer=megatron")["plans"]
    assert len(listed) == 3
    for one in listed:
        assert one["plan"]["zero"] == 1 and not one["plan"]["compile"]
        assert one["estimate"]["peak_memory_bytes"] <= one["estimate"]["memory_bytes"]
    path = tmp_path / "mg.sh"
    assert main([*words, "--count=3", "--emit=megatron", f"--out={path}"]) == 0
    told = capsys.readouterr().err
    assert "WARNING" not in told and "of the plans that megatron can express" in told
    assert "HEAD_NODE=…" in told and "tokens/s" in told and "GiB of 79.11 GiB" in told
    for number, one in enumerate(listed[1:], 2):
        assert re.search(f"# Plan {number}.*: {re.escape(one['title'])}: .* per step, .*GiB", told)
    assert "# Plan 4" not in told


def test_nothing_is_written_where_nothing_that_can_be_expressed_fits(capsys, tmp_path):
    path = tmp_path / "mg.sh"
    words = ["plan", "--model=llama-3.1-70b", "--machine=hgx-h100", "--seq-len=8192",
             "--global-batch=64", "--keep=pp=2", "--emit=megatron"]  # fmt: skip
    error = refused(capsys, *words, f"--out={path}")
    assert "its smallest plan that megatron can express (" in error and "It fits on" in error
    assert not path.exists()


def test_a_plan_that_was_asked_for_is_written_with_what_is_lost(capsys):
    words = ["plan", "--model=llama-3.1-8b", "--machine=hgx-h100", "--seq-len=32768",
             "--global-batch=16", "--keep=compile=false,offload_activations=cpu"]  # fmt: skip
    first = said(capsys, *words, "--emit=torchtitan", "--explain=1")
    assert first["plan"] == 1 and first["lost"]
    for part in ("offload_activations", "As written, a device needs", "does NOT fit"):
        assert part in first["warning"]
    assert first["estimate"]["memory_bytes"] < first["estimate"]["peak_memory_bytes"]


def test_what_is_written_in_the_place_of_the_plan_is_estimated(capsys):
    """DeepSpeed recomputes whole blocks: the time and memory of that, not of the plan's."""
    words = ["plan", "--model=llama-3-8b", "--machine=hgx-h100", "--global-batch=32",
             "--keep=checkpointing=selective,compile=false,loss=auto",
             "--max-tp=1"]  # fmt: skip
    planned = said(capsys, *words)["plans"][0]
    written = said(capsys, *words, "--emit=deepspeed", "--explain=1")
    assert "checkpointing selective in 32 of 32 blocks" in written["warning"]
    assert written["estimate"]["step_time_s"] > 1.1 * planned["estimate"]["step_time_s"]
    assert written["estimate"]["peak_memory_bytes"] < planned["estimate"]["peak_memory_bytes"]


def test_where_no_plan_can_be_expressed_nothing_is_written(capsys, tmp_path):
    path = tmp_path / "tt.toml"
    error = refused(capsys, "plan", "--model=llama-3-8b", "--machine=hgx-h100",
                    "--global-batch=64", "--keep=offload_activations=cpu", "--emit=torchtitan",
                    f"--out={path}")  # fmt: skip
    why = "torchtitan can express no plan with offload_activations=cpu. offload_activations cpu: "
    assert why in error and not path.exists()


def test_a_plan_that_does_not_fit_in_its_trainer_is_said_not_to(capsys):
    """outpace splits large logits into chunks, Megatron does not."""
    words = ["plan", "--model=gpt2", "--machine=l4", "--seq-len=1024", "--global-batch=64",
             "--keep=compile=false,micro_batch=32,checkpointing=none,loss=auto,"
             "offload_activations=none,offload_parameters=none,offload_optimizer=none"]  # fmt: skip
    first = said(capsys, *words)["plans"][0]["estimate"]
    assert first["peak_memory_bytes"] <= first["memory_bytes"]
    found = said(capsys, *words, "--emit=megatron", "--explain=1")
    assert found["estimate"]["peak_memory_bytes"] > found["estimate"]["memory_bytes"]
    assert "does NOT fit when megatron runs it" in found["warning"]


@pytest.mark.parametrize("name", FORMATS)
def test_the_best_is_written_for_every_trainer(name, capsys, tmp_path):
    keep = "tp=8" if name == "nanotron" else "strategy=zero3"  # which nanotron has not
    words = [*LLAMA, f"--keep={keep}", f"--emit={name}"]
    assert main(words) == 0
    captured = capsys.readouterr()
    path = tmp_path / "given name"
    written = said(capsys, *words, f"--out={path}")
    assert captured.out.rstrip() == written["text"].rstrip() != ""
    assert path.read_text() == written["text"] and written["file_name"] == str(path)
    when = "After" if written["edits"] else "As written: "  # with edits to the script that it names
    assert f"# {when}" in captured.err and " per step (" in captured.err
    assert all(f"# To edit first: {edit}" in captured.err for edit in written["edits"])
    assert bool(written["edits"]) == (name in ("accelerate", "fsdp", "torchtitan"))
    # Whose 16 bits are autocast's is not given master weights that nobody asked for.
    assert not [one for one in written["lost"] if "precision" in one]
    if name != "outpace":  # its command has flags
        assert shlex.quote(str(path)) in written["command"]


def test_out_says_where_the_configuration_is(capsys, tmp_path):
    path = tmp_path / "tt.toml"
    assert main([*TINY, "--emit=torchtitan", f"--out={path}"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "" and path.read_text().startswith("# An outpace plan for torchtitan")
    assert f"# Wrote {path}. Start it with: torchrun" in captured.err


def test_nodes_may_stay_idle(capsys, monkeypatch):
    words = [*TINY, "--nodes=3", "--may-idle"]
    answer = said(capsys, *words)
    assert answer["nodes"] == 3 and answer["idle_nodes"] > 0
    used = 3 - answer["idle_nodes"]
    assert {one["plan"]["strategy"] for one in answer["plans"]}
    assert f"{used} of the 3 nodes are used, {answer['idle_nodes']} stay idle" in shown(
        capsys, monkeypatch, *words
    )


def test_without_a_machine_it_is_planned_for_this_one(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = said(capsys, "plan", "--model=outpace-tiny", "--global-batch=4")
    assert found["nodes"] == 1 and found["plans"]
    assert any("planned for this machine" in note for note in found["notes"])
    assert any("were measured for a few seconds" in note for note in found["notes"])
    assert "Choose one with --machine" in refused(
        capsys, "plan", "--model=outpace-tiny", "--network=100Gbit/s"
    )


@pytest.mark.slow
def test_a_model_is_found_by_its_name_on_the_hub(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["plan", "--machine=hgx-h100", "--global-batch=8", "--count=1"]
    for name, preset in (("meta-llama/Llama-3.1-8B", "llama-3.1-8b"), ("qwen/qwen2.5-7b",
                         "qwen2.5-7b"), ("openai-community/gpt2", "gpt2"),
                         ("mistralai/Mistral-7B-v0.1", "mistral-7b"),
                         ("mistralai/Mixtral-8x7B-v0.1", "mixtral-8x7b"),
                         ("Llama-3.1-8B", "llama-3.1-8b"),
                         ("Mixtral 8x7B", "mixtral-8x7b")):  # fmt: skip
        assert said(capsys, *words, f"--model={name}")["model"] == preset
    error = refused(capsys, *words, "--model=meta-llama/Llama-3.1-8B-Instruct")
    assert "`outpace models` lists every model" in error and "hf download meta-llama" in error


def test_a_chip_without_its_form_is_the_boards_and_said_to_be(capsys):
    answer = said(capsys, "plan", "--model=gpt2", "--machine=8 x H100", "--count=1")
    assert answer["machine"] == "8xh100-sxm"
    assert any("H100 SXM, the variant on boards" in note for note in answer["notes"])
    error = refused(capsys, "plan", "--model=gpt2", "--machine=8xa100")
    assert "a100 is sold with 40 GB or 80 GB on boards. Say which" in error


def test_what_lacks_memory_is_told_of_more_cards_in_the_node(capsys):
    words = ["plan", "--model=llama-3.1-8b", "--keep=offload_optimizer=none", "--global-batch=8"]
    for machine in ("rtx-3090", "1xrtx-3090"):
        error = refused(capsys, *words, f"--machine={machine}")
        assert "It fits on 8 devices in one node (--machine 8xrtx-3090), or with" in error
    words = ["plan", "--model=gpt2-xl", "--keep=offload_optimizer=none,offload_parameters=none",
             "--seq-len=1024", "--global-batch=8"]  # fmt: skip
    for machine in ("rtx-3060:12GB", "1 x RTX 3060:12GB"):
        error = refused(capsys, *words, f"--machine={machine}")
        assert "devices in one node (--machine 4xrtx-3060:12gb), or with" in error


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--machine=hgx-h10"], "machine 'hgx-h10' is not in the catalog. Did you mean 'hgx-h100'"),
        (["--machine=laptop"], "has no accelerator from the catalog"),
        (["--machine=nowhere.json"], "nowhere.json"),
        (["--model=llama-3-8c"], "no preset, directory or file named 'llama-3-8c'. Did you mean"),
        (["--nodes=0"], "--nodes: 0 is not at least 1"),
        (["--seq-len=0"], "--seq-len: 0 is not at least 1"),
        (["--model=gpt2", "--seq-len=4096"], "gpt2 has 1024 positions"),
        (["--devices-per-node=9"], "--devices-per-node 9: 2x-titan-rtx has 2"),
        (["--machine=h100", "--devices-per-node=8"],
         "h100-sxm has 1. For nodes with 8, write --machine 8xh100-sxm."),
        (["--machine=hgx-h100", "--devices-per-node=16"],
         "hgx-h100 has 8. Use at most 8, and more --nodes."),
        (["--network=fast"], "link 'fast' is not in the catalog"),
        (["--keep=tpp=2"], "Did you mean 'tp'"),
        (["--keep=tp"], "write setting=value"),
        (["--keep=tp=x"], "--keep tp=x: use a whole number."),
        (["--keep=tp=0"], "--keep tp=0: use a whole number of at least 1."),
        (["--keep=zero=4"], "--keep zero=4: use one of 1, 2, 3."),
        (["--keep=zero=x"], "--keep zero=x: use one of 1, 2, 3."),
        (["--keep=compile=maybe"], "--keep compile=maybe: use true or false."),
        (["--keep=precision=int8"], "--keep precision=int8: use one of fp64, fp32, tf32, bf16, "),
        (["--keep=strategy=zero4"], "Did you mean 'zero1', 'zero2' or 'zero3'?"),
        (["--keep=checkpointing=ful"], "Did you mean 'full'?"),
        (["--machine=4xh1000"], "Did you mean '4xh100'?"),
        (["--keep=dp=2"], "Did you mean 'dp_replicate' or 'dp_shard'?"),
        (["--keep=fsdp=64"], "Did you mean 'strategy=zero3'?"),
        (["--keep=checkpoint=full"], "Did you mean 'checkpointing'?"),
        (["--keep=checkpoint=2"], "Did you mean 'checkpoint_every'?"),
        (["--keep=strategy=ddp", "--global-batch=13"], "Use a global batch of 12 or 14, or"),
        (["--keep=loss=plain"], "Use one of these"),
        (["--keep=tp=3"], "no plan can be laid out: 2 devices and a global batch of 16, with tp=3: "
         "tp 3 does not divide the 2 devices; tp may be 1 or 2 here."),
        (["--keep=micro_batch=3"], "micro_batch 3 does not divide the global batch of 16"),
        (["--keep=checkpointing=none,checkpoint_every=2"], "no plan can be laid out"),
        (["--vary=precison"], "Did you mean 'precision'"),
        (["--vary=micro_batch"], "--vary micro_batch: not a setting that can be varied."),
        (["--vary=compile", "--keep=compile=true"], "use one value or search all"),
        (["--vary=precision", "--precision=fp16"], "use one precision or search all"),
        (["--explain=9"], "--explain 9: "),
        (["--price=3"], "Give that number with --tokens"),
        (["--tokens=0"], "--tokens: 0 is not at least 1"),
        (["--what-if=link=400"], "--what-if link=400: its unit is missing. Write 400Gbit/s or"),
        (["--what-if=inside=fast"], "--what-if inside=fast: link 'fast' is not in the catalog"),
        (["--network=0"], "--network 0: a rate must be a number above 0"),
        (["--what-if=speed=2"], "--what-if speed=2: write link="),
        (["--what-if=memory=-1GiB"], "--what-if memory=-1GiB: "),
        (["--what-if=nodes=0"], "--what-if nodes=0: "),
        (["--what-if=memory=1GiB", "--emit=fsdp"], "--what-if and --emit give different answers"),
        (["--compare-nodes=1,x"], "write numbers of nodes"),
        (["--emit=keras"], "is not one of"),
        (["--model=mixtral-8x7b", "--machine=hgx-h100", "--emit=megatron"],
         "--emit megatron: only the dimensions of mixtral-8x7b are known"),
        (["--trainer=torchtitan", "--emit=megatron"], "planned with megatron's traits"),
        (["--model=llama-3-8b", "--seq-len=8200", "--trained"], "longer than the 8192 positions"),
        (["--model=llama-3-8b", "--machine=hgx-h100", "--seq-len=8200", "--emit=outpace"],
         "longer than the 8192 positions of llama-3-8b"),
        (["--model=mixtral-8x7b", "--trained"], "outpace does not train it"),
        (["--model=llama-3.1-405b"], "does not fit: its smallest plan ("),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_sentence(words, sentence, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert sentence in refused(capsys, *TINY, *words)


def test_nonsense_in_files_is_told(capsys, tmp_path):
    spec = {"family": "llama", "layers": 2, "hidden": 64, "heads": 0, "ffn": 128, "vocab": 512,
            "max_positions": 64}  # fmt: skip
    file = tmp_path / "spec.json"
    file.write_text(json.dumps(spec))
    assert main(["plan", f"--model={file}", "--machine=l4"]) == 2
    problems = capsys.readouterr().err
    assert "heads = 0: Input should be greater than 0" in problems and "Trace" not in problems
    path = machine_file(tmp_path / "machine.json", host_memory_bytes=-5)
    assert "host_memory_bytes" in refused(capsys, "plan", "--model=gpt2", f"--machine={path}")
    device = {"name": "NVIDIA H100 80GB HBM3", "memory_bytes": -1}
    path = machine_file(tmp_path / "machine.json", devices=[device])
    assert "memory_bytes" in refused(capsys, "plan", "--model=gpt2", f"--machine={path}")
    path = machine_file(tmp_path / "machine.json", probed=None)
    assert "outpace probe" in refused(capsys, "plan", "--model=gpt2", f"--machine={path}")
    words = ["plan", "--model=gpt2", f"--machine={path}", "--network=100Gbit/s"]
    assert "has measured links" in refused(capsys, *words)


def test_an_architecture_that_nobody_knows_says_what_is_missing(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "frobnicator", "layers": 3}))
    sentence = refused(capsys, "plan", f"--model={tmp_path}", "--machine=l4")
    assert "frobnicator" in sentence


def test_help_imports_nothing_heavy():
    code = (
        "import sys\nfrom outpace.cli.main import main\n"
        "try:\n    main(['plan', '--help'])\nexcept SystemExit:\n    pass\n"
        "assert not {'numpy', 'pydantic', 'rich', 'torch'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_plans_of_models_without_tokens_speak_of_samples(capsys, monkeypatch, tmp_path):
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "def build():\n"
        "    data = torch.utils.data.TensorDataset(torch.randn(8, 5), torch.randn(8, 5))\n"
        "    layers = [torch.nn.Linear(5, 5) for _ in range(3)]\n"
        "    loss = lambda module, batch: (module(batch[0]) - batch[1]).square().mean()\n"
        "    return torch.nn.Sequential(*layers), loss, data\n"
    )
    words = ("plan", f"--model={tmp_path}/mine.py:build", "--machine=2x-titan-rtx")
    text = shown(capsys, monkeypatch, *words)
    assert "samples/s" in text and "tokens/s" not in text and "sequences of" not in text
    [first, *_] = said(capsys, *words)["plans"]
    estimate = first["estimate"]
    assert estimate["samples_per_s"] == pytest.approx(estimate["tokens_per_s"])
    assert said(capsys, *TINY)["plans"][0]["estimate"]["samples_per_s"] is None


def test_what_offloading_is_made_of_is_told(capsys, monkeypatch):
    keep = "--keep=offload_parameters=cpu,offload_optimizer=cpu,offload_activations=none"
    words = ("plan", "--model=gpt2", "--machine=rtx-4090", keep)
    estimate = said(capsys, *words)["plans"][0]["estimate"]
    parts = {part["what"]: part for part in estimate["offloading"]}
    assert list(parts) == ["weights", "optimizer", "host step"]
    # 8 bytes a parameter: gradients to the host in 4 and weights back in 4, over PCIe 4.0 × 16.
    assert parts["optimizer"]["nbytes"] == pytest.approx(8 * 124_439_808, rel=1e-3)
    offload_s = sum(part["exposed_s"] for part in parts.values())
    assert offload_s == pytest.approx(estimate["parts_s"]["offload_s"])
    text = " ".join(shown(capsys, monkeypatch, *words, "--explain=1").split())
    assert "copies 949.40 MiB of weights, for each micro-batch's forward and backward: 0.0" in text
    assert "offloading copies 949.40 MiB of gradients and new weights: " in text
    assert "the optimizer runs on the host: " in text and "fewer, larger micro-batches" in text
    assert "of activations" not in text


def test_the_optimizer_on_the_host_steps_once(capsys):
    """Also where it and the weights are offloaded: for each of them a step was counted."""
    words = ("plan", "--model=gpt2", "--machine=rtx-4090", "--global-batch=64")
    keep = "--keep=offload_activations=none,offload_optimizer=cpu,compile=false,micro_batch=64"
    state, both = (
        said(capsys, *words, f"{keep},offload_parameters={place}")["plans"][0]
        for place in ("none", "cpu")
    )
    hidden = both["estimate"]["offloading"][0]
    assert hidden["what"] == "weights" and hidden["exposed_s"] == 0
    assert both["estimate"]["parts_s"]["offload_s"] == pytest.approx(
        state["estimate"]["parts_s"]["offload_s"], rel=1e-6
    )
