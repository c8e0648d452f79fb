"""`outpace train --plan`: the planner's pick is trained, and what a person said is kept."""

import json

import pytest
import torch

from outpace.cli.main import main
from outpace.jobs.inputs.tasks import NOT_CLASSIFY
from outpace.jobs.planning import auto_plan
from outpace.jobs.planning.auto_plan import apply_settings_plan, question
from outpace.jobs.planning.proposer import Proposer
from outpace.planner.plan import plans
from outpace.probing.hardware.machine import identify
from outpace.records.errors import BadInputError
from outpace.records.figure import Figure, Key
from outpace.records.machine import Machine
from outpace.records.memory import MemoryAccount
from outpace.records.plan import Plan, PlanFile
from outpace.records.probe_results import ProbeRecord
from outpace.records.ranks import Ranks
from outpace.records.settings import TrainSettings
from outpace.training.precision import default_precision

# Of torch itself, where its sharded optimizer is imported.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
TINY = {"model": "outpace-tiny", "seq_len": 32, "global_batch": 8, "steps": 2, "eval_batches": 2,
        "sample_tokens": 8, "device": "cpu"}  # fmt: skip


@pytest.fixture(autouse=True)
def _empty(tmp_path, monkeypatch):
    """No machine.json but what a test puts there."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def train(corpus, token_cache, tmp_path, capfd):
    """Runs the command; its exit code, its record with what --json printed, what it said."""

    def run(*words, out="run", **values):
        given = {**TINY, "data": corpus, "cache_dir": token_cache, "out": tmp_path / out, **values}
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
        code = main(["train", *flags, *words])
        record = tmp_path / out / "run.json"
        printed, told = capfd.readouterr()
        found = json.loads(record.read_text()) if code == 0 else {}
        if "--json" in words:
            found["printed"] = json.loads(printed)
        return code, found, " ".join(told.split())

    return run


def picked(**values):
    """The settings that --plan gives, where each is from, and what was said."""
    said: list[str] = []
    given = {**TINY, "plan": "auto", **values}
    origins = dict.fromkeys(given, "command line")
    settings = TrainSettings.parse(given, "test")
    found, told = apply_settings_plan(settings, origins, None, said.append)
    return found, told, said


@pytest.mark.gloo
def test_the_planners_pick_is_trained_and_what_was_said_is_kept(train):
    code, record, said = train("--plan=auto", "--nproc=2", "--micro-batch=2", "--json")
    assert code == 0 and record["printed"]["steps"] == 2
    assert record["command"][:2] == ["outpace", "train"] and "--plan=auto" in record["command"]
    assert "outpace: plan: " in said and "micro-batch 2" in said and "considered" in said
    assert record["plan"]["micro_batch"] == 2
    plan = Plan.parse(record["plan"], "the record")
    assert plan.world_size == 2
    code, further, said = train("--resume", steps=3)
    assert code == 0 and "from step 2" in said and "2 processes" in said
    assert further["command"] == record["command"] and len(further["resumes"]) == 1
    changed = {"resume": "command line", "plan": "default"}
    assert further["origins"] == record["origins"] | changed


@pytest.mark.gloo
@pytest.mark.slow
def test_a_plan_of_a_file_is_trained(train, tmp_path):
    Plan(strategy="zero3", dp_shard=2, micro_batch=4, checkpointing="full").save(
        tmp_path / "plan.json"
    )
    code, record, _ = train("--plan=plan.json")
    assert code == 0 and record["plan"]["strategy"] == "zero3"
    assert record["plan"]["checkpointing"] == "full" and record["plan"]["dp_shard"] == 2
    code, _, said = train("--plan=plan.json", "--nproc=3", out="other")
    assert code == 2 and "--plan plan.json is for 2 processes, but there are 3" in said
    code, _, said = train("--plan=plan.json", "--micro-batch=2", out="other")
    assert code == 2 and "--micro-batch 2, but --plan plan.json has 4" in said


def test_a_small_memory_gets_a_plan_that_needs_less():
    batch = {"nproc": 1, "global_batch": 512, "seq_len": 64}
    free, _, _ = picked(**batch)
    limit = auto_plan.anonymous_bytes() + 24 * 2**20
    held, _, _ = picked(**batch, memory_limit=limit)
    # Fewer samples at once, or blocks that are computed again.
    assert held.memory_limit == limit and held.micro_batch <= free.micro_batch
    assert (held.micro_batch, held.checkpointing) != (free.micro_batch, free.checkpointing)


def test_less_than_the_process_itself_needs_is_told():
    with pytest.raises(BadInputError, match="a process already uses"):
        picked(nproc=1, memory_limit=2**20)


@pytest.mark.parametrize(
    "words",
    [{"micro_batch": 2, "compile": False, "optimizer": "adamw-for-loop"},
     {"strategy": "zero3", "precision": "fp32", "checkpointing": "full"}],
)  # fmt: skip
def test_what_a_person_says_is_kept(words):
    found, told, _ = picked(nproc=2, **words)
    for name, value in words.items():
        assert getattr(found, name) == value and told[name] == "command line"
    assert found.plan is None and found.nproc == 2
    assert "plan auto" in told.values()


@pytest.mark.slow
def test_what_does_not_fit_when_traced_is_passed_over(monkeypatch):
    real, asked = auto_plan.fullest, []

    def fullest(plan, model, job, dropout=None):
        account: MemoryAccount = real(plan, model, job, dropout)
        asked.append(plan)
        if len(asked) < 3:
            return account.model_copy(update={"reserved_bytes": 2**50})
        return account

    monkeypatch.setattr(auto_plan, "fullest", fullest)
    found, _, said = picked(nproc=2)
    over = [line for line in said if line.startswith("skipped: ")]
    assert len(over) == 2 and "when traced (the formula gives" in over[0]
    assert any(line.startswith("plan: ") for line in said)
    assert found.strategy == asked[2].strategy

    monkeypatch.setattr(auto_plan, "fullest", lambda *_: real(*_).model_copy(
        update={"reserved_bytes": 2**50}))  # fmt: skip
    with pytest.raises(BadInputError, match="none of the planner's choices fits"):
        picked(nproc=2)


def probe(path, rate, **values):
    key = Key(kind="matmul", what="curve", of={"dtype": "fp32", "m": 512, "n": 512, "k": 512})
    figure = Figure(key=key, unit="FLOP/s", value=rate, origin="measured")
    probed = ProbeRecord(date="", versions={}, command="", sections=(), quick=True, took_s=1.0,
                    figures=(figure,), fits=(), world_size=1, hosts=1)  # fmt: skip
    here = identify(lambda name, memory: None)
    here.model_copy(update={"probed": probed, **values}).save(path)


def test_a_probe_of_this_machine_is_used(tmp_path):
    default = default_precision(torch.device("cpu"), identify(lambda name, memory: None))
    _, _, said = picked(nproc=1)
    assert "guessed rates" in said[0] and "note: " in said[1]
    probe(tmp_path / "machine.json", 1e9)
    found, _, said = picked(nproc=1)
    assert "probed rates" in said[0] and found.precision == default
    probe(tmp_path / "machine.json", 1e9, cpu="another one")
    _, _, said = picked(nproc=1)
    assert "guessed rates" in said[0]


def test_tensor_parallelism_stays_inside_a_host(tmp_path):
    """Where all is one host the planner may split layers over all of its ranks."""
    spec = {"family": "gpt2", "layers": 2, "hidden": 64, "heads": 4, "vocab": 512,
            "max_positions": 64}  # fmt: skip
    (tmp_path / "four.json").write_text(json.dumps(spec))
    given = {**TINY, "model": "four.json", "plan": "auto", "strategy": "tp"}
    origins = dict.fromkeys(given, "command line")
    settings = TrainSettings.parse(given, "test")
    one = Ranks(world_size=4, local_world_size=4)
    assert apply_settings_plan(settings, origins, one, print)[0].tp == 4
    apart = Ranks(world_size=4, local_world_size=2)
    with pytest.raises(BadInputError, match="no plan can be laid out"):
        apply_settings_plan(settings, origins, apart, print)
    with pytest.raises(BadInputError, match="3 of 4 ranks are on this host"):
        apply_settings_plan(settings, origins, Ranks(world_size=4, local_world_size=3), print)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"lora_rank": 4, "offload_optimizer": "disk"}, "lora_rank 4 with offload_optimizer disk"),
        ({"lora_rank": 4, "optimizer": "muon"}, "lora_rank 4 with optimizer muon"),
        ({"global_batch": 7, "nproc": 2, "strategy": "ddp"}, "no plan can be laid out"),
        ({"nproc": 2, "pp_schedule": "zb"}, "no plan can be laid out"),
        ({"plan": "nowhere.json"}, "nowhere.json"),
    ],
)
def test_what_cannot_be_planned_is_a_sentence(values, sentence):
    with pytest.raises(BadInputError, match=sentence):
        picked(**values)


def test_a_file_with_adapters_trains_adapters(tmp_path):
    """Settings of adapters come from the file, as its axes do."""
    plan = Plan(lora_rank=4, lora_targets=("q", "v"), base="nf4", micro_batch=2)
    file = tmp_path / "plan.json"
    PlanFile.from_plan(plan, 32, 8).save(file)
    found, _, _ = picked(plan=str(file))
    assert found.lora_rank == 4 and found.lora_targets == ("q", "v") and found.base == "nf4"
    with pytest.raises(BadInputError, match=r"--lora-rank 8, but --plan .* has 4"):
        picked(plan=str(file), lora_rank=8)


def test_the_planners_pick_has_the_adapters_that_are_asked_for():
    found, _, _ = picked(lora_rank=4, base="nf4", nproc=1)
    assert found.lora_rank == 4 and found.base == "nf4"


def test_a_classifier_is_planned_without_a_head_over_the_vocabulary():
    found, told, _ = picked(task="classify", nproc=2)
    assert found.plan is None and found.nproc == 2 and told["strategy"] == "plan auto"
    assert found.strategy not in NOT_CLASSIFY
    jobs = {
        task: question(
            TrainSettings.parse({**TINY, "task": task}, "test"),
            {},
            identify(lambda name, memory: None),
            2,
        )
        for task in ("pretrain", "classify")
    }
    times = {task: plans(job).plans[0].estimate.step_time_s for task, job in jobs.items()}
    assert times["classify"] < times["pretrain"]
    for values in ({"strategy": "cp"}, {"strategy": "3d"}):
        with pytest.raises(BadInputError, match="no plan can be laid out"):
            picked(task="classify", nproc=2, **values)


def test_a_plan_that_nobody_trains_is_refused(tmp_path):
    Plan(strategy="3d", dp_shard=2, pp=2, pp_microbatches=2, zero=1).save(tmp_path / "plan.json")
    with pytest.raises(BadInputError, match="outpace cannot train it: zero 1"):
        picked(plan="plan.json")


@pytest.mark.parametrize(
    "given",
    [{"loss": "plain"}, {"offload": "disk", "strategy": "single", "nproc": 1}, {"precision": "O0"},
     {"dp_shard": -1, "nproc": 2, "strategy": "zero3"}],
    ids=str,
)  # fmt: skip
def test_what_is_given_agrees_with_the_plans_that_are_proposed_for_it(given, tmp_path):
    """Else each trial of outpace tune would be refused by what the plan says."""
    asked = TrainSettings.parse({**TINY, **given}, "test")
    origins = {**dict.fromkeys(TrainSettings.model_fields, "default"),
               **dict.fromkeys({**TINY, **given}, "command line")}  # fmt: skip
    for proposal in Proposer(asked, origins).proposals(())[:20]:
        proposal.plan.save(tmp_path / "plan.json")
        trial = asked.model_copy(update={"plan": str(tmp_path / "plan.json"), "nproc": None})
        found, _ = apply_settings_plan(trial, {**origins, "plan": "command line"}, None, print)
        if "loss" in given:
            assert found.loss == "plain"
        if "offload" in given:
            assert found.offload_optimizer == found.offload_parameters == "disk"


def test_a_plan_brings_the_length_and_the_batch_that_it_was_made_for(tmp_path):
    """Else `train --plan` trains at 256 tokens what was tuned at 1,024."""
    path = tmp_path / "plan.json"
    PlanFile.from_plan(Plan(strategy="single", micro_batch=2), 48, 6).save(path)
    assert PlanFile.load(path).plan == Plan(strategy="single", micro_batch=2)
    asked = TrainSettings.parse({"model": TINY["model"], "plan": str(path)}, "test")
    origins = dict.fromkeys(TrainSettings.model_fields, "default")
    found, told = apply_settings_plan(asked, {**origins, "plan": "command line"}, None, print)
    assert (found.seq_len, found.global_batch) == (48, 6)
    assert told["seq_len"] == told["global_batch"] == f"plan {path}"
    other = asked.model_copy(update={"seq_len": 32})
    found, told = apply_settings_plan(
        other, {**origins, "plan": "command line", "seq_len": "command line"}, None, print
    )
    assert (found.seq_len, found.global_batch) == (32, 6) and told["seq_len"] == "command line"


def test_a_damaged_tuning_beside_a_plan_does_not_stop_a_training(tmp_path):
    Plan(strategy="single", micro_batch=8).save(tmp_path / "plan.json")
    (tmp_path / "tuning.json").write_text('{"trials": 3')
    said: list[str] = []
    asked = TrainSettings.parse({**TINY, "plan": str(tmp_path / "plan.json")}, "test")
    found, _ = apply_settings_plan(asked, dict.fromkeys(TINY, "command line"), None, said.append)
    assert found.expect_step_time_s is None and "is not checked" in said[0]


def test_what_rests_on_a_guess_is_said_to_be_far_off():
    settings = TrainSettings.parse(TINY, "test")
    host = Machine(host_cores=2, host_memory_bytes=2**33, cpu="?")
    one = plans(auto_plan.question(settings, {}, host, 1)).plans[0].estimate
    assert one.high_s / one.step_time_s == pytest.approx(one.step_time_s / one.low_s)
    assert one.high_s > 3 * one.step_time_s  # a deviation of the rates
