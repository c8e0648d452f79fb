"""Reading a run's steps."""

import json

import numpy as np
import pytest

from outpace.records.errors import BadInputError
from outpace.reporting.data.step_log import read_steps

LINE = {"step": 1, "tokens": None, "loss": 2.5, "step_time_s": 0.5, "grad_norm": float("inf")}


def written(path, *lines):
    path.write_text("".join(lines))
    return path


def line(step):
    return json.dumps({**LINE, "step": step}) + "\n"


def test_columns_have_what_is_known_and_nan_for_the_rest(tmp_path):
    path = written(tmp_path / "metrics.jsonl", *(line(step) for step in range(1, 10_001)))
    steps = read_steps(path)
    assert len(steps) == 10_000
    assert steps["step"].tolist() == list(range(1, 10_001))
    assert steps["loss"].tolist() == [2.5] * 10_000
    assert np.isnan(steps["tokens"]).all() and np.isnan(steps["mfu"]).all()
    assert np.isnan(steps["grad_norm"]).all()  # an overflow is no point of a curve
    assert steps.passed_s[-1] == pytest.approx(5000.0)


def test_a_last_line_that_was_cut_short_is_left_out(tmp_path):
    path = written(tmp_path / "metrics.jsonl", line(1), line(2), line(3)[:20])
    assert read_steps(path)["step"].tolist() == [1, 2]


def test_reading_by_lines_finds_what_reading_at_once_does(tmp_path):
    """What is no JSON of the standard makes the whole file be read line by line."""
    rows = [
        {
            "step": n,
            "step_time_s": 0.5 + 1 / n,
            "loss": 0.1 * n,
            "lr": 1e-7 / n,
            "mfu": None,
            "more": {"a": [n]},
            "tokens": 2**n,
        }
        for n in range(1, 60)
    ]
    lines = [json.dumps(row) + "\n" for row in rows]
    quickly = read_steps(written(tmp_path / "quickly.jsonl", *lines))
    slowly = read_steps(written(tmp_path / "slowly.jsonl", *lines, "{"))
    assert quickly.columns.keys() == slowly.columns.keys()
    for name in quickly.columns:
        assert np.array_equal(quickly[name], slowly[name], equal_nan=True), name


def test_no_file_has_no_steps(tmp_path):
    assert len(read_steps(tmp_path / "metrics.jsonl")) == 0


@pytest.mark.parametrize("lines", [("x\n", line(2), line(3)), ("1\n", line(2)),
                                   ('{"step": "a"}\n',)])  # fmt: skip
def test_what_is_no_step_is_refused_with_the_files_name(tmp_path, lines):
    path = written(tmp_path / "metrics.jsonl", *lines)
    with pytest.raises(BadInputError, match=r"metrics\.jsonl"):
        read_steps(path)


def test_damage_long_before_the_end_is_refused(tmp_path):
    path = written(tmp_path / "metrics.jsonl", "{\n", *(line(step) for step in range(1, 9000)))
    with pytest.raises(BadInputError, match="is damaged: line 1 is not a step"):
        read_steps(path)
