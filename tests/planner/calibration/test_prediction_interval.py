"""The interval of a question: of its kind where enough was published, else wider, saying why."""

import json
from dataclasses import replace
from importlib.resources import files

import pytest

from outpace.planner.calibration.prediction_interval import (
    LEAST_COVERAGE,
    LEVEL,
    WORLDS,
    Interval,
    QuestionKind,
    interval,
    kind_name,
)

TABLE = json.loads(files("outpace.catalog").joinpath("residuals.json").read_text())


def kind_of(name):
    """Return the kind that has this name in the table."""
    architecture, model, *narrow = name.split(", ")
    chip = None if architecture == "any chip" else architecture
    if not narrow:
        return QuestionKind(chip, model == "experts")
    software, worlds = narrow[-2:]
    most = next(most for most, named in WORLDS if named == worlds)
    return QuestionKind(chip, model == "experts", narrow[0] == "adapters", software, most)


def test_a_narrow_kind_is_taken_where_there_are_enough_rows_of_it():
    """By software and devices; of other software, that of the chip; adapters have their own."""
    names = [name for name in TABLE["kinds"] if name.count(",") > 1]
    assert names
    for name in names:
        kind, row = kind_of(name), TABLE["kinds"][name]
        assert kind.narrow_name == name and row["rows"] >= 20
        found = interval(False, False, kind)
        assert found[:2] == (row["low"], row["high"])
        assert f"with {kind.software} on {kind.architecture} chips" in found.basis
        other = interval(False, False, replace(kind, software="outpace"))
        assert other == interval(False, False, QuestionKind(kind.architecture, kind.experts))


@pytest.mark.parametrize("experts", [False, True])
def test_a_kind_with_enough_sources_has_its_own(experts):
    wide = [name for name in TABLE["kinds"] if name.count(", ") == 1]
    names = [name for name in wide if name.endswith("experts") == experts]
    for name in names:
        row, architecture = TABLE["kinds"][name], name.split(",")[0]
        assert row["low"] < row["high"]
        if architecture == "any chip":
            continue
        found = interval(False, False, QuestionKind(architecture, experts))
        assert found[:2] == (row["low"], row["high"])
        assert f"{row['rows']} published steps" in found.basis and architecture in found.basis
    assert kind_name(None, experts) in names


def test_a_kind_with_too_few_has_that_of_any_chip_and_says_why():
    assert kind_name("volta", True) not in TABLE["kinds"]
    found = interval(False, False, QuestionKind("volta", True))
    row = TABLE["kinds"][kind_name(None, True)]
    assert found[:2] == (row["low"], row["high"])
    assert "none of them is on volta, so it is wide" in found.basis
    assert "models with experts" in found.basis
    unknown = interval(False, False, QuestionKind())
    assert "dense models on any chip" in unknown.basis


def test_rates_that_steps_put_right_and_rates_that_are_a_guess():
    probed = TABLE["probed"]
    assert interval(True, False, QuestionKind("ampere"))[:2] == (probed["low"], probed["high"])
    low, high, basis, level = interval(False, True, QuestionKind("ampere"))
    assert basis and low == pytest.approx(1 / high) and high > 3 and level == LEVEL
    guess = interval(False, True, QuestionKind("ampere")).explanation
    assert guess == "The 90 % interval is based on no measurement, since the rates are guessed."


def test_why_a_kind_has_none_of_its_own():
    told = {}
    for name, row in TABLE["without_interval"].items():
        architecture, model = name.split(", ")
        assert name not in TABLE["kinds"]
        told[name] = interval(False, False, QuestionKind(architecture, model == "experts")).basis
        steps = "one step" if row["rows"] == 1 else f"{row['rows']} steps"
        assert f"{steps} of {row['sources']} source" in told[name]
        enough = row["coverage"] is not None
        assert ("do not predict each other" in told[name]) == enough
        assert ("are too few" in told[name]) != enough
    assert "2 steps of 1 source on cdna4 are too few" in told["cdna4, dense"]
    assert "89 steps of 3 sources on blackwell do not" in told["blackwell, experts"]


def test_a_level_that_other_sources_do_not_reach_is_told_as_it_is():
    for name, row in TABLE["kinds"].items():
        found = interval(False, False, kind_of(name))
        enough = row["coverage"] >= LEAST_COVERAGE
        assert found.level == (LEVEL if enough else round(row["coverage"], 2)), name
        assert ("The 90 % interval is based on " in found.explanation) == enough
    told = Interval(0.9, 2.6, "102 published steps", 0.83).explanation
    assert "90 %" not in told and "contained 83 % of that source's steps" in told
