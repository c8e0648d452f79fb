"""A run is resumed from what is left of it, or refused; nothing that was done is written over."""

import json
import shutil
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
import safetensors.torch

from outpace.cli.main import main


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("restored")
    text = folder / "text.txt"
    text.write_text("\n\n".join(f"some words of document number {n}, and more" for n in range(900)))
    return [
        "train", "--model=outpace-tiny", "--seq-len=32", "--global-batch=4", "--save-every=1",
        "--sample-tokens=0", "--eval-batches=1", "--precision=fp32", "--device=cpu",
        f"--data={text}", f"--cache-dir={folder / 'cache'}",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def finished(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 4 steps, with checkpoints of the last two."""
    out = tmp_path_factory.mktemp("finished") / "run"
    assert main([*flags, "--steps=4", f"--out={out}"]) == 0
    return out


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


def contents(run: Path) -> dict[str, bytes]:
    return {str(p.relative_to(run)): p.read_bytes() for p in run.rglob("*") if p.is_file()}


def resume(run: Path, steps: int = 5) -> int:
    return main(["train", "--resume", f"--out={run}", f"--steps={steps}"])


def remove_markers(run: Path) -> None:
    for marker in run.glob("checkpoints/*/complete.json"):
        marker.unlink()


def remove_checkpoints(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")


def leave_metrics_alone(run: Path) -> None:
    """As of a run that was killed, whose checkpoints were lost."""
    for name in ("checkpoints", "model"):
        shutil.rmtree(run / name)
    (run / "result.json").unlink()


def leave_failure_alone(run: Path) -> None:
    leave_metrics_alone(run)
    (run / "metrics.jsonl").unlink()
    failure = {"reason": "interrupted", "ended": "2026-01-01T00:00:00", "checkpoint_step": 2}
    (run / "failure.json").write_text(json.dumps(failure))


def damage_checkpoints(run: Path) -> None:
    for file in run.glob("checkpoints/*/__0_0.distcp"):
        file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (remove_markers, "every checkpoint in"),
        (damage_checkpoints, "every checkpoint in"),
        (remove_checkpoints, "the run finished before"),
        (leave_metrics_alone, "4 steps were completed, with a checkpoint every 1"),
        (leave_failure_alone, "there was one at step 2"),
    ],
)
def test_a_run_is_not_begun_anew_over_its_work(
    run: Path, harm: Callable[[Path], None], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    harm(run)
    before = contents(run)
    assert resume(run) == 2
    error = capsys.readouterr().err
    assert said in error and "another --out" in error
    assert contents(run) == before


def test_another_version_of_torch_is_said(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = json.loads((run / "run.json").read_text())
    record.pop("xxh3_128")  # changed on purpose
    now, record["versions"]["torch"] = record["versions"]["torch"], "2.0.1"
    (run / "run.json").write_text(json.dumps(record))
    assert resume(run) == 0
    assert f"torch was 2.0.1, is {now}" in " ".join(capsys.readouterr().err.split())


def test_a_lost_marker_costs_that_checkpoint_alone(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "checkpoints" / "step-4" / "complete.json").unlink()
    data = (run / "checkpoints" / "step-4" / "__0_0.distcp").read_bytes()
    assert resume(run) == 0
    error = capsys.readouterr().err
    assert "step-4, which is damaged (it has no file complete.json)" in error
    assert "after step 3, 1 step is repeated" in error
    assert (run / "checkpoints-damaged" / "step-4.damaged-1" / "__0_0.distcp").read_bytes() == data
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5]


def test_a_run_killed_before_its_first_checkpoint_begins_anew(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    leave_metrics_alone(run)
    metrics = run / "metrics.jsonl"
    metrics.write_text(first := metrics.read_text().splitlines(keepends=True)[0])
    (run / "checkpoints" / "step-1").mkdir(parents=True)  # what a kill left of it
    (run / "checkpoints" / "step-1" / "unfinished").touch()
    (run / "checkpoints" / "step-1" / "__0_0.distcp").write_bytes(b"half")
    assert resume(run) == 0
    error = capsys.readouterr().err
    assert "no checkpoint yet; starting from step 0" in error and "metrics.jsonl.earlier-1" in error
    assert (run / "metrics.jsonl.earlier-1").read_text() == first
    lines = (run / "evals.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 5]
    assert not (run / "checkpoints-damaged").exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda model: (model / "README.md").write_text("about it"),
        lambda model: ((model / "onnx").mkdir(), (model / "onnx" / "model.onnx").write_text("a")),
        lambda model: (model / "checksums.json").unlink(),  # as advised after a change on purpose
        None,
    ],
)
def test_a_model_to_which_files_were_added_is_kept(
    run: Path, capsys: pytest.CaptureFixture[str], change: Callable[[Path], object] | None
) -> None:
    if change is not None:
        change(run / "model")
    before = contents(run / "model")
    assert resume(run) == 0
    kept = run / "model.earlier-1"
    said = capsys.readouterr().err
    assert (f"is kept as {kept}" in said) is (change is not None)
    assert ("has no checksums.json" in said) is ("checksums.json" not in before)
    assert change is None or contents(kept) == before
    assert kept.exists() is (change is not None)


def test_what_is_asked_is_checked_before_anything_is_cut(run: Path) -> None:
    before = contents(run)
    assert resume(run, steps=4) == 2
    assert resume(run, steps=2) == 2
    assert contents(run) == before


def said_by(capsys: pytest.CaptureFixture[str], code: int, *words: object) -> str:
    capsys.readouterr()
    assert main([*map(str, words)]) == code
    found = capsys.readouterr()
    return found.out + found.err


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x40
    path.write_bytes(data)


def change(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    "harm", [shutil.rmtree, lambda model: flip(model / "model.safetensors"),
             lambda model: (model / "config.json").unlink()],
)  # fmt: skip
def test_a_lost_model_is_written_again_from_the_checkpoint(
    run: Path, harm: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(run)
    harm(run / "model")
    assert f"outpace train --resume {run}" in said_by(capsys, 2, "eval", "--run", run)
    said = said_by(capsys, 0, "train", "--resume", f"--out={run}", "--json")
    assert json.loads(said[said.index("{\n") : said.rindex("}") + 1])["steps"] == 4
    again = ("run.json", "evals.jsonl", "utilisation/host-0.json")  # with other times
    after = contents(run)
    assert [name for name in before if name not in again and after.get(name) != before[name]] == []
    assert len((run / "evals.jsonl").read_text().splitlines()) == 2
    assert said_by(capsys, 2, "train", "--resume", f"--out={run}")  # nothing is left to do


def test_a_changed_run_is_not_taken_for_the_one_that_was(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = json.loads((run / "run.json").read_text())["settings"]
    change(run / "run.json", settings={**settings, "seed": 1})
    before = contents(run)
    for words in (
        ["train", "--resume", f"--out={run}", "--steps=5"],
        ["train", "--resume", f"--out={run}", "--steps=5", "--print-config"],
        ["eval", "--run", run],
        ["generate", "x", "--run", run],
    ):
        assert "its checksum does not match" in said_by(capsys, 2, *words)
    for words in (["report", run, "--format=md"], ["runs", "show", run], ["runs", run.parent]):
        assert "checksum" in said_by(capsys, 0, *words)
    assert contents(run) == before


def test_a_changed_result_is_shown_with_that_said(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(run / "result.json", final_loss=0.5)
    assert "its checksum does not match" in said_by(capsys, 0, "report", run, "--format=md")
    change(run / "result.json", step_time_s=-1)
    assert "step_time_s" in said_by(capsys, 2, "report", run, "--format=md")


def test_a_report_without_metrics_does_not_deny_what_was_done(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "metrics.jsonl").unlink()
    said = said_by(capsys, 0, "report", run, "--format=md")
    assert "4 steps" in said and "metrics.jsonl holds none of them" in said


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_weights_that_are_no_numbers_are_named(
    run: Path, tmp_path: Path, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run / "model" / "model.safetensors"
    weights = safetensors.torch.load_file(path)
    name = max(weights, key=lambda one: weights[one].numel())
    weights[name].view(-1)[3] = float(value)
    safetensors.torch.save_file(weights, path, metadata={"format": "pt"})
    (run / "model" / "checksums.json").unlink()
    for words in (
        ["eval", "--run", run],
        ["generate", "x", "--run", run],
        ["train", "--model", run, f"--out={tmp_path / 'other'}"],
    ):
        said = said_by(capsys, 2, *words)
        assert f"{name} holds 1 values that are NaN or infinite" in said


def test_random_weights_beside_adapters_are_written_again(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    lora = ["--lora-rank=2", "--init=random", "--steps=2"]
    assert main([*flags, *lora, f"--out={run}"]) == 0
    weights = (run / "base" / "model.safetensors").read_bytes()
    (run / "base" / "config.json").unlink()
    assert str(run / "base.damaged-1") in said_by(
        capsys, 0, "train", "--resume", f"--out={run}", "--steps=3"
    )
    assert (run / "base" / "model.safetensors").read_bytes() == weights
    assert said_by(capsys, 0, "eval", "--run", run, "--batches=1")


def test_a_checkpoint_of_another_run_is_refused(
    run: Path, flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started = json.loads((run / "run.json").read_text())["started"]
    while datetime.now(UTC).isoformat(timespec="seconds") == started:
        time.sleep(0.05)
    other = tmp_path / "other"
    assert main([*flags, "--steps=6", "--seed=7", f"--out={other}"]) == 0
    shutil.copytree(other / "checkpoints" / "step-6", run / "checkpoints" / "step-6")
    before = contents(run)
    assert resume(run, 8) == 2
    said = capsys.readouterr().err
    assert "step-6 was saved by another run" in said and f"was started at {started}" in said
    assert contents(run) == before
    shutil.rmtree(run / "checkpoints" / "step-6")
    assert resume(run) == 0
