"""A certificate prints as a line per plan."""

from outpace.records.certificate import ParityVerdict


def verdict(**fields: object) -> ParityVerdict:
    return ParityVerdict.model_validate(
        {
            "strategy": "zero3", "mesh": "dp 2", "precision": "fp64", "passed": True,
            "worst_relative_difference": 2e-15, "worst_tensor": "0.weight", "tolerance": 1e-9,
        }
        | fields
    )  # fmt: skip


def test_equal_plan_prints_difference_and_tolerance() -> None:
    assert str(verdict()) == "zero3: equal (largest relative difference 2.0e-15, tolerance 1.0e-09)"


def test_different_plan_prints_tensor_and_cause() -> None:
    differs = verdict(passed=False, worst_relative_difference=None, cause="the loss is a sum")
    assert str(differs) == (
        "zero3: differs in 0.weight (largest relative difference not finite, tolerance 1.0e-09): "
        "the loss is a sum"
    )


def test_refused_plan_prints_the_reason() -> None:
    refused = verdict(passed=False, refused=True, worst_tensor=None, reason="it has one block")
    assert str(refused) == "zero3: refused: it has one block"
