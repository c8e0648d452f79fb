"""Conditions on runs."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from outpace.cli.run_filters import condition_of
from outpace.experiment.past_runs import PastRunFolder
from outpace.records.past_run import PastRun

NUMBERS = st.floats(-1e6, 1e6)


def run(**figures):
    return PastRunFolder(Path("r"), PastRun(path="r", state="done", **figures))


@given(NUMBERS, NUMBERS)
def test_an_order_and_its_opposite_part_what_is_known(loss, bound):
    def holds(sign):
        return condition_of(f"final_loss {sign} {bound!r}").is_met(run(final_loss=loss))

    assert holds("<") != holds(">=") and holds(">") != holds("<=")
    assert holds("=") == (holds("<=") and holds(">="))
    assert holds("<") == (loss < bound)


@given(st.none() | NUMBERS, st.none() | NUMBERS)
def test_equal_and_not_equal_part_all_runs(loss, wanted):
    word = "none" if wanted is None else repr(wanted)
    equal, other = (condition_of(f"final_loss{sign}{word}").is_met(run(final_loss=loss))
                    for sign in ("=", "!="))  # fmt: skip
    assert equal == (loss == wanted) and other != equal


def test_what_is_not_known_is_neither_more_nor_less():
    assert not any(condition_of(f"mfu{sign}0.4").is_met(run()) for sign in ("<", "<=", ">", ">="))


def test_numbers_and_sizes_are_written_as_everywhere():
    assert condition_of("tokens_per_s>=10k").is_met(run(tokens_per_s=10_000.0))
    assert condition_of("steps=1e3").is_met(run(steps=1000))
    assert condition_of("peak_memory_bytes<=1.5GiB").is_met(run(peak_memory_bytes=3 * 2**29))
    assert not condition_of("peak_memory_bytes<1GiB").is_met(run(peak_memory_bytes=2**30))
