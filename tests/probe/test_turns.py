"""Parts that take turns each get as many as they want, in their order, and give what they found."""

import pytest

from outpace.probe.turns import finished, together


def part(name, turns, log):
    for number in range(turns):
        log.append(f"{name}{number}")
        if number + 1 < turns:
            yield
    return name


def test_parts_take_turns_and_their_findings_keep_their_order():
    log = []
    assert finished(together(part("a", 3, log), part("b", 1, log), part("c", 2, log))) == [
        "a", "b", "c",
    ]  # fmt: skip
    assert log == ["a0", "b0", "c0", "a1", "c1", "a2"]


def test_parts_may_have_parts_and_none_is_nothing():
    log = []
    inner = together(part("a", 2, log), part("b", 2, log))
    assert finished(together(inner, part("c", 2, log))) == [["a", "b"], "c"]
    assert log == ["a0", "b0", "c0", "a1", "b1", "c1"]
    assert finished(together()) == []


def test_what_one_raises_ends_them_all():
    def broken():
        yield
        raise ValueError("no disk")

    log = []
    with pytest.raises(ValueError, match="no disk"):
        finished(together(part("a", 9, log), broken()))
    assert log == ["a0", "a1"]
