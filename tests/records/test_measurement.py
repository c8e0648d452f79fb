"""Parts of a step that are shown beside its time."""

import random

import pytest

from outpace.records.measurement import PARTS, TimeParts

NAMES = tuple(f"{part}_s" for part in PARTS)


def columns(steps: list[dict[str, float]]) -> dict[str, list[float]]:
    return {name: [step.get(name, 0.0) for step in steps] for name in NAMES}


def test_parts_add_up_to_the_step_of_median_length() -> None:
    """Medians of the parts would not: what is long in one step is short in another."""
    draw = random.Random(0)
    steps = []
    for _ in range(41):
        forward = draw.uniform(0.1, 0.9)
        steps.append({"forward_s": forward, "backward_s": 1.1 - forward + draw.uniform(0, 0.1),
                      "communication_s": 4.0 if draw.random() < 0.1 else 0.0})  # fmt: skip
    lengths = sorted(sum(step.values()) for step in steps)
    found = TimeParts.of_steps(columns(steps))
    assert found.total_s == pytest.approx(lengths[20])
    assert found.communication_s == 0 and found.forward_s == pytest.approx(0.5, abs=0.15)


def test_parts_of_equal_steps_are_theirs_and_of_none_nothing() -> None:
    step = {"data_s": 0.25, "forward_s": 0.5, "other_s": 0.125}
    assert TimeParts.of_steps(columns([step])) == TimeParts(**step)
    assert TimeParts.of_steps(columns([step, step])) == TimeParts(**step)
    assert TimeParts.of_steps(columns([])) == TimeParts() == TimeParts.of_steps(columns([{}]))
