"""The end of a run's metrics, and what lies in its folder."""

import pytest

from outpace.experiment.past_runs import checkpoints, field_names, field_owner, latest_steps, sizes
from outpace.records.errors import BadInputError
from outpace.records.measurement import StepRecord


def line(step: int) -> str:
    known = {"step": step, "samples": step, "skipped_steps": 0, "loss": 2.0, "lr": 1e-3,
             "grad_norm": 1.0, "samples_per_s": 1.0, "step_time_s": 1.0}  # fmt: skip
    parts = dict.fromkeys(
        (f"{part}_s" for part in ("data", "forward", "backward", "optimizer", "communication",
                                  "other")), 0.0)  # fmt: skip
    unknown = dict.fromkeys(
        ("tokens", "tokens_per_s", "model_flops_per_s", "hardware_flops_per_s", "mfu",
         "peak_memory_bytes", "loss_scale"))  # fmt: skip
    return StepRecord(**known, **parts, **unknown).model_dump_json() + "\n"


@pytest.mark.parametrize("steps", [0, 1, 70, 3000])
@pytest.mark.parametrize("torn", ["", '{"step": 99'])
def test_the_newest_whole_lines_are_read_however_long_the_file_is(tmp_path, steps, torn):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(line(step) for step in range(1, steps + 1)) + torn)
    found = [one.step for one in latest_steps(path)]
    assert found == list(range(1, steps + 1))[-len(found) :] if found else steps == 0
    assert len(found) >= min(steps, 70)
    assert len(found) < 1000


def test_where_nothing_is_written_there_are_no_steps_and_what_is_none_is_said(tmp_path):
    assert latest_steps(tmp_path / "metrics.jsonl") == []
    (tmp_path / "metrics.jsonl").write_text(line(1) + "[]\n")
    with pytest.raises(BadInputError, match=r"metrics\.jsonl"):
        latest_steps(tmp_path / "metrics.jsonl")


def test_only_whole_checkpoints_count_newest_first(tmp_path):
    for name in ("step-9", "step-10", "step-11", "step-x"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        if name != "step-11":
            (tmp_path / "checkpoints" / name / "complete.json").write_text("{}")
    assert [path.name for path in checkpoints(tmp_path)] == ["step-10", "step-9"]
    (tmp_path / "checkpoints" / "step-9" / "part").write_bytes(b"x" * 100)
    (tmp_path / "run.json").write_text("{}")
    assert sizes(tmp_path) == {"checkpoints": 3 * 2 + 100, "run.json": 2}


def test_every_name_that_is_offered_has_an_owner():
    assert all(field_owner(name) is not None for name in field_names())
    assert field_owner("machine") is None and field_owner("origins") is None
