"""What a run wrote is read back, cut where it is resumed, and never lost."""

import errno
import json
import shutil
from pathlib import Path

import pytest

from outpace.records.base import temporary_name
from outpace.records.errors import BadInputError
from outpace.records.measurement import Evaluation, StepRecord
from outpace.records.run import RunRecord
from outpace.training.run_dir import (
    EVALS_FILE,
    METRICS_FILE,
    RESULT_FILE,
    TOKEN_PREFIX,
    MetricsWriter,
    RunDir,
)

STEP = StepRecord(
    step=1, tokens=8, samples=1, loss=2.5, lr=1e-3, grad_norm=1.0, step_time_s=0.1, data_s=0.0,
    forward_s=0.05, backward_s=0.05, optimizer_s=0.0, communication_s=0.0, other_s=0.0,
    tokens_per_s=80.0, samples_per_s=10.0, model_flops_per_s=None, hardware_flops_per_s=None,
    mfu=None, peak_memory_bytes=None, loss_scale=None, skipped_steps=0,
)  # fmt: skip


def evaluation(step: int) -> Evaluation:
    return Evaluation(step=step, loss=2.0, perplexity=7.4, tokens=8, tokens_per_s=80.0)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Of 8 steps, evaluated before the first, after the fourth and the last."""
    run = RunDir(tmp_path)
    writer = MetricsWriter(run)
    for step in range(1, 9):
        writer.on_step(STEP.model_copy(update={"step": step}))
    for step in (0, 4, 8):
        writer.on_eval(evaluation(step), False)
    writer.close()
    return run


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_bytes().splitlines()]


def resumed(run: RunDir, step: int, total: int = 10) -> list[str]:
    said: list[str] = []
    run.continue_from(step, total, run.history(), said.append)
    return said


def change_line(path: Path, number: int, line: bytes) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    lines[number - 1] = line + b"\n"
    path.write_bytes(b"".join(lines))


def test_steps_after_the_checkpoint_are_done_again_and_that_is_said(run: RunDir) -> None:
    assert resumed(run, 6) == ["after step 6, 2 steps are repeated"]
    assert steps_in(run.path / METRICS_FILE) == [1, 2, 3, 4, 5, 6]
    assert steps_in(run.path / EVALS_FILE) == [0, 4]
    assert resumed(run, 6) == []


@pytest.mark.parametrize(
    "line",
    [
        b'{"stfp":3}',
        b"",
        b"\0" * 300,
        b"[]",
        STEP.model_copy(update={"step": 10**30}).model_dump_json().encode(),
        STEP.model_copy(update={"step": 7}).model_dump_json().encode(),
        STEP.model_copy(update={"step": 1}).model_dump_json().encode(),
        STEP.model_copy(update={"step": 3}).model_dump_json().encode()[:-9],
    ],
)
def test_one_bad_line_costs_no_good_one(run: RunDir, line: bytes) -> None:
    path = run.path / METRICS_FILE
    change_line(path, 3, line)
    before = path.read_bytes()
    (said,) = resumed(run, 8)
    aside = run.path / f"{METRICS_FILE}.damaged-1"
    assert (
        f"{path}: line 3 is not a valid step" in said
        and str(aside) in said
        and "7 readable lines" in said
    )
    assert aside.read_bytes() == before
    assert steps_in(path) == [1, 2, 4, 5, 6, 7, 8]
    change_line(path, 2, b"{")
    resumed(run, 8)
    assert aside.read_bytes() == before
    assert (run.path / f"{METRICS_FILE}.damaged-2").exists()


def test_a_line_with_another_figure_is_not_believed(run: RunDir) -> None:
    path = run.path / METRICS_FILE
    line = path.read_bytes().splitlines()[2]
    change_line(path, 3, line.replace(b'"loss":2.5', b'"loss":2.4'))
    (said,) = resumed(run, 8)
    assert f"{path}: line 3 was changed since outpace wrote it" in said and ".damaged-1" in said
    assert steps_in(path) == [1, 2, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("lost", [1, 2, 40])
def test_a_last_line_that_a_kill_cut_short_is_written_anew(run: RunDir, lost: int) -> None:
    path = run.path / METRICS_FILE
    path.write_bytes(path.read_bytes()[:-lost])
    said = resumed(run, 8)
    assert said == ([] if lost == 1 else [f"{path} lacks step 8, which the run had completed"])
    assert path.read_bytes().endswith(b"}\n")
    assert steps_in(path) == [1, 2, 3, 4, 5, 6, 7, *([8] if lost == 1 else [])]


@pytest.mark.parametrize("name", [METRICS_FILE, EVALS_FILE, RESULT_FILE])
def test_a_folder_in_a_files_place_is_kept(run: RunDir, name: str) -> None:
    path = run.path / name
    path.unlink(missing_ok=True)
    (path / "inner").mkdir(parents=True)
    assert any(f"{path}.damaged-1" in one for one in resumed(run, 8))
    assert not path.is_dir() and (run.path / f"{name}.damaged-1" / "inner").is_dir()


def test_what_is_evaluated_again_is_there_once(run: RunDir) -> None:
    resumed(run, 8, total=8)  # ended between its last evaluation and its result
    assert steps_in(run.path / EVALS_FILE) == [0, 4]


def test_a_run_that_begins_again_keeps_what_it_had_written(run: RunDir) -> None:
    metrics, evals = ((run.path / name).read_bytes() for name in (METRICS_FILE, EVALS_FILE))
    said = resumed(run, 0)
    assert all("earlier-1" in one for one in said) and len(said) == 2
    assert not (run.path / METRICS_FILE).exists() and not (run.path / EVALS_FILE).exists()
    assert (run.path / f"{METRICS_FILE}.earlier-1").read_bytes() == metrics
    assert (run.path / f"{EVALS_FILE}.earlier-1").read_bytes() == evals


def test_before_the_first_step_only_the_evaluation_is_done_again(run: RunDir) -> None:
    (run.path / METRICS_FILE).write_bytes(b"")
    (run.path / EVALS_FILE).write_text(evaluation(0).model_dump_json() + "\n")
    assert resumed(run, 0) == []
    assert steps_in(run.path / EVALS_FILE) == []


def test_a_run_that_cannot_begin_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = RunRecord.model_construct()
    little = shutil.disk_usage(tmp_path)._replace(free=2 << 20)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: little)
        with pytest.raises(BadInputError, match=r"has 2\.0 MiB left, but a run needs 16 MiB"):
            RunDir(tmp_path / "new").begin(record)
    assert not (tmp_path / "new").exists()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(RunRecord, "save", full)
    with pytest.raises(BadInputError, match=r"cannot write to .+new: No space left"):
        RunDir(tmp_path / "new").begin(record)
    assert not (tmp_path / "new").exists()
    (tmp_path / "old").mkdir()
    with pytest.raises(BadInputError, match="No space left"):
        RunDir(tmp_path / "old").begin(record)
    assert (tmp_path / "old").is_dir()  # it was the user's


def test_no_step_is_cut_where_the_disk_is_too_full_to_resume(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    little = shutil.disk_usage(run.path)._replace(free=2 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: little)
    with pytest.raises(BadInputError, match=r"has 2\.0 MiB left"):
        resumed(run, 4)
    assert steps_in(run.path / METRICS_FILE) == [*range(1, 9)]


def test_a_full_disk_is_named_by_its_file(run: RunDir) -> None:
    (run.path / METRICS_FILE).unlink()
    (run.path / METRICS_FILE).symlink_to("/dev/full")
    writer = MetricsWriter(run)
    with pytest.raises(OSError, match="No space left") as raised:
        writer.on_step(STEP)
    assert raised.value.filename == str(run.path / METRICS_FILE)
    writer.close()


def test_what_a_kill_left_half_written_is_removed(run: RunDir) -> None:
    half = run.path / temporary_name(run.model)
    half.mkdir()
    (half / "model.safetensors").touch()
    (run.path / temporary_name(run.path / RESULT_FILE)).touch()
    (old := run.path / f"{temporary_name(run.model)}.old").mkdir()
    (old / "config.json").touch()
    (lock := run.path / f"{TOKEN_PREFIX}lock").touch()
    resumed(run, 6)
    left = {path.name for path in run.path.iterdir()}
    assert left == {METRICS_FILE, EVALS_FILE, "model", lock.name}
    assert (run.model / "config.json").is_file()  # of an export that was to take its place
