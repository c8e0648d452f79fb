"""Whether a run on a GPU compiles where nobody says; no GPU is needed to decide it."""

import json
import os

import pytest
import torch

from outpace.catalog.accelerators import ACCELERATORS
from outpace.jobs.defaults import resolve_plan
from outpace.jobs.planning.request import PlanQuestion
from outpace.jobs.planning.request import job as planning_job
from outpace.jobs.train.compile_decision import by_times, decide, expected_compile_s
from outpace.jobs.train.context import RunContext
from outpace.nn.compilation import compiler_cache
from outpace.planner.plan import plans
from outpace.records.errors import BadInputError
from outpace.records.machine import Device, Machine
from outpace.records.plan import Plan
from outpace.records.ranks import Ranks
from outpace.records.settings import TrainSettings

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
NO_GPU = Machine(host_cores=2, host_memory_bytes=2**33, cpu="?")
H200 = "H200 SXM"


def asked(**values):
    given = {"model": "gpt2", "seq_len": 1024, "global_batch": 16, "device": "cpu", **values}
    return TrainSettings.parse(given, "test")


def planned(device, ranks=Ranks(), **values):  # noqa: B008
    return resolve_plan(asked(precision="bf16", **values), ranks, device, NO_GPU)


def test_a_gpu_compiles_by_default_and_a_cpu_does_not():
    assert planned(CUDA).compile and not planned(CPU).compile
    assert planned(CPU, compile=True).compile
    assert not planned(CUDA, compile=False).compile
    # What does not go with it is not refused where nobody asked for it.
    assert not planned(CUDA, offload_parameters="disk").compile
    two = Ranks(world_size=2, local_world_size=2)
    assert planned(CUDA, two, strategy="zero3").compile
    assert not planned(CUDA, two, strategy="dp").compile
    assert not planned(CUDA, two, strategy="zbv").compile


def test_it_compiles_where_that_pays_back_within_the_run_and_says_after_how_many_steps():
    for steps, compiles in ((1500, False), (2500, True)):
        found = by_times(0.06, 0.05, 20.0, steps)
        assert found.compile == compiles
        assert "20.00 s once" in found.sentence and "10.0 ms of 60.0 ms" in found.sentence
        assert "2,000 steps" in found.sentence and f"{steps:,}" in found.sentence
        assert ("--no-compile" in found.sentence) == compiles
    assert by_times(0.06, 0.06, 20.0, 2800).compile  # 12 % of a step, as measured, are counted
    # One H200, nothing cached: Llama-3.2-1B took some 49 s.
    assert expected_compile_s(16, "whole") == pytest.approx(49, abs=1)
    assert expected_compile_s(12, "blocks") == expected_compile_s(24, "blocks") < 10


@pytest.mark.parametrize(
    ("settings", "plan", "compiles", "word"),
    [
        ({"measure_only": True}, {}, True, None),
        ({}, {"precision": "fp8"}, True, "float8"),
        ({}, {}, False, "is unknown"),
    ],
)
def test_what_is_decided_without_a_planner(settings, plan, compiles, word):
    made = Plan.parse({"compile": True, "micro_batch": 16, **plan}, "test")
    found = decide(asked(**settings), made, CUDA, NO_GPU, Ranks(), 100, None)
    assert found.compile == compiles
    assert (found.sentence is None) if word is None else (word in found.sentence)
    assert decide(asked(), made, CUDA, NO_GPU, Ranks(), 1000, None).compile


def test_the_planner_is_asked_what_a_step_takes():
    """Of the GPU that is there, by the catalog."""
    gpu = ACCELERATORS[H200]
    device = Device(name="NVIDIA H200", memory_bytes=gpu.memory_bytes, accelerator=gpu.name)
    machine = NO_GPU.model_copy(update={"devices": (device,)})
    made = Plan.parse({"compile": True, "micro_batch": 16, "precision": "bf16"}, "test")
    few, many = (decide(asked(), made, CUDA, machine, Ranks(), steps, 12) for steps in (70, 20_000))
    assert not few.compile and many.compile
    assert "pays off after" in few.sentence and "70" in few.sentence


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"strategy": "tp", "tp": 2},
        {"offload_optimizer": "cpu"},
        {"strategy": "1f1b", "pp": 2, "pp_microbatches": 2, "micro_batch": 8},
    ],
    ids=str,
)
def test_the_time_of_adapters_is_known_where_their_memory_is_not(values):
    gpu = ACCELERATORS[H200]
    device = Device(name="NVIDIA H200", memory_bytes=gpu.memory_bytes, accelerator=gpu.name)
    plan = Plan.parse(
        {"compile": True, "micro_batch": 16, "precision": "bf16", "lora_rank": 8, **values}, "test"
    )
    machine = NO_GPU.model_copy(update={"devices": (device,) * plan.world_size})
    ranks = Ranks(world_size=plan.world_size, local_world_size=plan.world_size)
    found = decide(asked(lora_rank=8), plan, CUDA, machine, ranks, 20_000, 12)
    assert "pays off after" in found.sentence


def test_a_resumed_run_stays_as_it_was(tmp_path, corpus, token_cache):
    from outpace.jobs.train.job import train

    settings = asked(model="outpace-tiny", seq_len=64, global_batch=8, steps=1, eval_batches=1,
                     data=(str(corpus),), cache_dir=token_cache, sample_tokens=0,
                     out=tmp_path / "run")  # fmt: skip
    train(settings, RunContext(command=["test"]))
    path = tmp_path / "run" / "run.json"
    made = Plan.parse({"compile": True}, "test")
    for was in (False, True):
        record = json.loads(path.read_text())
        record["plan"]["compile"] = was
        record.pop("xxh3_128", None)  # changed on purpose
        path.write_text(json.dumps(record))
        again = settings.model_copy(update={"resume": True})
        assert decide(again, made, CPU, NO_GPU, Ranks(), 9, None).compile == was


def test_a_run_goes_by_the_decision_and_says_it(tmp_path, corpus, token_cache, monkeypatch):
    """On a CPU, where a plan is made to compile by default as on a GPU."""
    from outpace.jobs.train import job
    from outpace.training.callbacks import Callback

    class Heard(Callback):
        def __init__(self):
            self.hints = []

        def on_hint(self, sentence):
            self.hints.append(sentence)

    def compiling(*args, **more):
        return resolve_plan(*args, **more).model_copy(update={"compile": True})

    monkeypatch.setattr(job, "resolve_plan", compiling)
    # What others in this process have compiled is none of the run's.
    monkeypatch.setattr("outpace.jobs.train.build.compile_time_s", lambda: 7.0)
    settings = asked(model="outpace-tiny", seq_len=64, global_batch=8, steps=2, eval_batches=1,
                     data=(str(corpus),), cache_dir=token_cache, sample_tokens=0,
                     out=tmp_path / "run")  # fmt: skip
    heard = Heard()
    done = job.train(settings, RunContext(command=["test"], callbacks=[heard]))
    assert any(hint.startswith("compile: no; ") and "2" in hint for hint in heard.hints)
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["plan"]["compile"] is False
    assert done.compile_s == 0 and done.first_step_s > 0


@pytest.mark.parametrize("variable", ["TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"])
def test_what_turns_the_compiler_off_is_heard(tmp_path, corpus, token_cache, monkeypatch, variable):
    """torch compiles nothing then, and says nothing; a run would be called compiled."""
    from outpace.jobs.train import job

    monkeypatch.setenv(variable, "1")
    settings = asked(model="outpace-tiny", seq_len=64, global_batch=8, steps=1, eval_batches=1,
                     data=(str(corpus),), cache_dir=token_cache, sample_tokens=0,
                     out=tmp_path / "run")  # fmt: skip
    asked_for = settings.model_copy(update={"compile": True})
    with pytest.raises(BadInputError, match=f"--compile: the environment has {variable}=1"):
        job.train(asked_for, RunContext(command=["test"]))
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(
        job, "resolve_plan",
        lambda *args, **more: resolve_plan(*args, **more).model_copy(update={"compile": True}),
    )  # fmt: skip
    with job.prepare_run(settings, RunContext(command=["test"])) as ready:
        assert ready.loop.settings.compile is None
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["plan"]["compile"] is False


def test_a_plan_for_gpus_searches_compile_and_one_for_cpus_does_not():
    question = planning_job(PlanQuestion("gpt2", "h200-sxm", devices_per_node=1, global_batch=16))
    assert plans(question).plans[0].plan.compile
    kept = PlanQuestion(
        "gpt2", "h200-sxm", devices_per_node=1, global_batch=16, keep="compile=false"
    )
    assert not plans(planning_job(kept)).plans[0].plan.compile


def test_float8_is_searched_of_models_for_which_it_pays():
    for model, searched in (("gpt2", False), ("llama-3.2-1b", True)):
        question = planning_job(
            PlanQuestion(model, "h200-sxm", devices_per_node=1, vary="precision")
        )
        assert ("fp8" in question.wanted.vary["precision"]) == searched


def test_what_is_compiled_is_kept_unless_the_user_says_where(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "/own")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    with compiler_cache(os.environ, tmp_path, used=False):
        assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
    with compiler_cache(os.environ, tmp_path, used=True):
        assert os.environ["TRITON_CACHE_DIR"] == "/own"
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "inductor")
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
