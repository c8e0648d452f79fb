"""Parts that take turns each get as many as they want, in their order, and give what they found."""

from contextlib import contextmanager, nullcontext

import pytest

from outpace.probing.timing.interleave import interleave_turns, run_turns, wrap_turns


def part(name, turns, log):
    try:
        for number in range(turns):
            log.append(f"{name}{number}")
            if number + 1 < turns:
                yield
    finally:
        log.append(f"{name} ended")
    return name


def test_parts_take_turns_and_their_findings_keep_their_order():
    log = []
    assert run_turns(interleave_turns(part("a", 3, log), part("b", 1, log), part("c", 2, log))) == [
        "a", "b", "c",
    ]  # fmt: skip
    assert [one for one in log if "ended" not in one] == ["a0", "b0", "c0", "a1", "c1", "a2"]


def test_parts_may_have_parts_and_none_is_nothing():
    log = []
    inner = interleave_turns(part("a", 2, log), part("b", 2, log))
    assert run_turns(interleave_turns(inner, part("c", 2, log))) == [["a", "b"], "c"]
    assert [one for one in log if "ended" not in one] == ["a0", "b0", "c0", "a1", "b1", "c1"]
    assert run_turns(interleave_turns()) == []


def test_what_one_raises_ends_them_all():
    def broken():
        yield
        raise ValueError("no disk")

    log = []
    with pytest.raises(ValueError, match="no disk") as raised:
        run_turns(interleave_turns(wrap_turns(part("a", 9, log), nullcontext), broken()))
    assert log == ["a0", "a1", "a ended"]  # though the error still holds all frames
    assert raised.tb is not None


def test_each_turn_is_within_a_context_of_its_own():
    log = []

    @contextmanager
    def within():
        log.append("(")
        yield
        log.append(")")

    assert run_turns(wrap_turns(part("a", 2, log), within)) == "a"
    assert log == ["(", "a0", ")", "(", "a1", "a ended", ")"]
