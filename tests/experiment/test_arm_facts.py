"""What is said to differ between arms, and whether losses must agree."""

import pytest

from outpace.catalog.models import preset
from outpace.experiment.arm_facts import describe_clocks, describe_differences, read_facts
from outpace.experiment.results import Curve, describe_losses, steps_of
from outpace.records.comparison import Arm, Experiment, Outcome
from outpace.records.errors import BadInputError
from outpace.records.machine import Machine
from outpace.records.measurement import Measurement, TimeParts
from outpace.records.plan import Plan
from outpace.records.run import RunRecord
from outpace.records.settings import TrainSettings
from outpace.records.utilisation import DeviceLoad, HostLoad, Load


def record(settings=None, plan=None, **changed):
    plain = RunRecord(
        outpace="0", command=("outpace", "train"), settings=TrainSettings(**settings or {}),
        origins={}, plan=Plan(**plan or {}), identity="", model=None, parameters=1, total_steps=8,
        seq_len=8, train_data="x", eval_data=None, versions={"torch": "2"}, commit="c",
        uncommitted_changes=False, device="cpu", threads=1, started="2026-01-01",
        machine=Machine(host_cores=1, host_memory_bytes=1, cpu="x"),
    )  # fmt: skip
    return plain.model_copy(update=changed)


def told(folder, arms, *records):
    """What differs, of runs of arm a, b, a, b, …"""
    experiment = Experiment(
        arms=tuple(Arm(name=n, **one) for n, one in zip("ab", arms, strict=True))
    )
    outcomes = []
    for number, one in enumerate(records):
        (folder / str(number)).mkdir()
        one.save(folder / str(number) / "run.json")
        outcomes.append(Outcome(arm="ab"[number % 2], round=number, value=1.0, run=str(number)))
    return describe_differences(experiment, read_facts(experiment, folder, outcomes))


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"environment": {"NCCL_ALGO": "Ring"}}, "variables"),
        ({"threads": 2}, "threads a process"),
        ({"uncommitted_changes": True, "changes": "abc"}, "uncommitted changes"),
        ({"total_steps": 4}, "steps"),
    ],
)
def test_what_nobody_asked_for_is_said(tmp_path, changed, name):
    (line,) = told(tmp_path, ({}, {}), record(), record(**changed))
    assert line.startswith(f"{name} differs between arms")


def test_every_run_of_an_arm_is_looked_at(tmp_path):
    later = record(versions={"torch": "3"})
    (line,) = told(tmp_path, ({}, {}), record(), record(), later, later)
    assert line.startswith("versions changed between runs of a and b") and "→" in line


@pytest.mark.parametrize(
    ("arm", "changed"),
    [
        ({"environment": {"NCCL_ALGO": "Ring"}}, {"environment": {"NCCL_ALGO": "Ring"}}),
        ({"settings": {"nproc": 2}}, {"plan": {"strategy": "ddp", "dp_replicate": 2}}),
        # With --tokens for all arms.
        ({"settings": {"global_batch": 8}}, {"settings": {"global_batch": 8}, "total_steps": 16}),
        ({}, {"load_before": 3.0}),
    ],
)
def test_what_was_asked_for_is_not(tmp_path, arm, changed):
    assert told(tmp_path, ({}, arm), record(load_before=0.1), record(**changed)) == []


def measured(clock_hz):
    """A run whose device had this clock, beside one that may not be the run's."""
    devices = tuple(
        DeviceLoad(index=place, name="A", clock_hz=hz, run_memory_bytes=of_run)
        for place, (hz, of_run) in enumerate([(clock_hz, 1), (3e8, 0)])
    )
    load = Load(duration_s=1.0, devices=devices, host=HostLoad(clock_hz=2.6e9))
    unknown = dict.fromkeys(
        ("tokens", "tokens_per_s", "samples_per_s", "model_flops_per_s", "hardware_flops_per_s",
         "mfu", "hfu", "peak_memory_bytes", "first_loss", "final_loss", "train_loss")
    )  # fmt: skip
    return Measurement(
        run="r", steps=8, samples=8, parameters=1, world_size=1, step_time_s=1.0,
        parts=TimeParts(), utilisation=(load,), train_runtime=1.0, train_samples_per_second=1.0,
        train_steps_per_second=1.0, **unknown,
    )  # fmt: skip


@pytest.mark.parametrize(("clock_hz", "lines"), [(1.97e9, 0), (1.7e9, 1)])
def test_clocks_are_kept_and_other_ones_said(tmp_path, clock_hz, lines):
    experiment, outcomes = Experiment(arms=(Arm(name="a"), Arm(name="b"))), []
    for name, hz in (("a", 1.98e9), ("b", clock_hz)):
        (tmp_path / name).mkdir()
        record().save(tmp_path / name / "run.json")
        measured(hz).save(tmp_path / name / "result.json")
        outcomes.append(Outcome(arm=name, round=0, value=1.0, run=name))
    facts = read_facts(experiment, tmp_path, outcomes)
    assert facts["b"]["clock of devices"] == [f"{clock_hz / 1e9:.2f} GHz"]
    assert facts["a"]["clock of cores"] == ["2.60 GHz"]
    assert describe_differences(experiment, facts) == []
    told = describe_clocks(tmp_path, outcomes)
    assert len(told) == lines
    assert all("a: 1.98 GHz; b: 1.70 GHz" in line for line in told)


def curve(factor=1.0, every=8, **of):
    return Curve(record(**of), {every * n: factor * 4.0 for n in range(1, 5)})


def test_losses_must_agree_where_the_same_numbers_are_trained():
    low, spelt = {"plan": {"precision": "bf16"}}, {"settings": {"precision": "fp32"}}
    assert "agree in all steps" in describe_losses({"a": curve(), "b": curve(1.005, **spelt)})
    apart = describe_losses({"a": curve(), "b": curve(1.03, **spelt)})
    assert "LOSSES DISAGREE" in apart and "b and a differ by 3.0%" in apart
    # Both in bf16, whoever said so.
    assert "agree in all" in describe_losses({"a": curve(**low), "b": curve(1.03, **low)})
    other = describe_losses({"a": curve(), "b": curve(1.03, **low), "c": curve(1.2)})
    assert "LOSSES DISAGREE although they must not: c and a" in other
    assert "b and a train differently (precision), so their losses may differ." in other
    assert "The largest difference at a step is 3.00%" in other


def test_dropout_draws_others_where_samples_are_shared_out_otherwise():
    model = preset("gpt2")
    ddp, pipeline = {"dp_replicate": 2, "strategy": "ddp"}, {"pp": 2, "strategy": "gpipe"}
    far = {"a": curve(model=model, plan=ddp), "b": curve(1.03, model=model, plan=pipeline)}
    assert (
        "b and a train differently (draws of dropout), so their losses may differ"
        in describe_losses(far)
    )
    sharded = {"dp_shard": 2, "strategy": "zero3"}
    assert "LOSSES DISAGREE" in describe_losses(
        {**far, "b": curve(1.03, model=model, plan=sharded)}
    )
    still = model.model_copy(update={"dropout": 0.0})
    assert "LOSSES DISAGREE" in describe_losses(
        {"a": curve(model=still, plan=ddp), "b": curve(1.03, model=still, plan=pipeline)}
    )


def test_losses_are_compared_after_the_same_samples():
    half = curve(every=16, settings={"global_batch": 8})
    whole = Curve(record(), {8: 9.0, 16: 4.0, 32: 4.0, 48: 4.0})
    assert "at a step is 0.00%" in describe_losses({"a": half, "b": whole})
    assert describe_losses({"a": curve(every=7), "b": Curve(record(), {1: 2.0})}) is None


@pytest.mark.parametrize("line", ['{"step": 1}', "[1]", '{"step_time_s": "x"}'])
def test_a_line_that_is_no_step_is_refused(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text(line + "\n")
    with pytest.raises(BadInputError, match="line 1, is not a step: it needs step_time_s"):
        steps_of(tmp_path)
