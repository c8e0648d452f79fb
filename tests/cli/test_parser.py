import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.cli.main import main
from outpace.cli.parser import JoinedList, Parser, number_type, read_duration, whole_number
from outpace.records.errors import BadInputError


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("200", 200),
        ("1e6", 10**6),
        ("10M", 10**7),
        ("2B", 2 * 10**9),
        ("1.5k", 1500),
        ("3T", 3 * 10**12),
        ("10_000", 10_000),
        ("-4", -4),
        (" 7 ", 7),
    ],
)
def test_whole_numbers_as_people_write_them(text: str, number: int) -> None:
    assert whole_number(text) == number


@pytest.mark.parametrize("text", ["", "M", "abc", "1.5", "1e-3", "nan", "inf", "infk", "0x10"])
def test_what_is_no_whole_number(text: str) -> None:
    with pytest.raises(ValueError):
        whole_number(text)


@given(st.integers())
def test_every_integer_reads_as_itself(number: int) -> None:
    assert whole_number(str(number)) == number


@given(st.integers(0, 10**6), st.sampled_from([("k", 3), ("M", 6), ("B", 9), ("g", 9), ("T", 12)]))
def test_a_suffix_is_a_power_of_ten(number: int, suffix: tuple[str, int]) -> None:
    letter, zeros = suffix
    assert whole_number(f"{number}{letter}") == number * 10**zeros


def parser() -> Parser:
    made = Parser("paint", "Paints.")
    made.add_json()
    made.arguments.add_argument("--coats", type=number_type(int, 1, 9))
    made.arguments.add_argument("--gloss", type=number_type(float, 0))
    return made


def test_what_is_not_given_is_not_there() -> None:
    assert vars(parser().read([])) == {"json": False}
    assert vars(parser().read(["--coats", "2"])) == {"json": False, "coats": 2}


def test_lists_that_are_given_several_times_are_one() -> None:
    """The last one won, without a word: `plan --keep pp=2 --keep tp=1` kept tp alone."""
    made = parser()
    made.arguments.add_argument("--keep", action=JoinedList, default="a=1")
    assert made.read(["--keep", "b=2", "--keep=c=3,d=4"]).keep == "b=2,c=3,d=4"
    assert made.read(["--keep", "b=2"]).keep == "b=2"
    assert made.read([]).keep == "a=1"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--coat", "2"], "no option '--coat'. Did you mean '--coats'"),
        (["--glos=1"], "no option '--glos'. Did you mean '--gloss'"),
        (["blue"], "no argument 'blue'"),
        (["--coats"], "--coats: expected one argument"),
        (["--coats", "two"], "'two' is not a whole number"),
        (["--coats", "12"], "12 is not at least 1 and at most 9"),
        (["--gloss", "nan"], "nan is not at least 0"),
        (["--gloss", "1e30"], "1e30 is not at least 0 and at most 1e+18"),
        (["--gloss", "inf"], "inf is not a finite number"),
        (["--gloss", "much"], "'much' is not a number"),
    ],
)
def test_bad_arguments_are_sentences(argv: list[str], said: str) -> None:
    with pytest.raises(BadInputError) as caught:
        parser().read(argv)
    assert said in str(caught.value)
    assert "outpace paint --help" in str(caught.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan", "--gpus", "8"], "outpace plan has no option '--gpus'"),
        (["plan", "-m", "gpt2"], "outpace plan has no option '-m'"),
        (["plan", "--nodes", "soon", "--gpus", "8"], "outpace plan has no option '--gpus'"),
        (["generate", "--max_tokens", "9"], "outpace generate has no option '--max_tokens'"),
        (["generate", "--max_tokens=a b"], "outpace generate has no option '--max_tokens'"),
        (["estimate", "--machine_file", "x"], "outpace estimate has no option '--machine_file'"),
        (["merge", "--output", "x"], "outpace merge has no option '--output'"),
        (["network", "--gpus", "8"], "outpace network has no option '--gpus'"),
        (["verify", "--procs", "2", "ddp"], "outpace verify has no option '--procs'"),
        (["launch", "kubernetes", "--img", "x"], "outpace launch kubernetes has no option '--img'"),
        (["plan"], "the following arguments are required: --model"),
    ],
)
def test_an_unknown_option_is_named_before_what_is_missing(words, said, capsys):
    assert main(words) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("word", ["-0.5", "-4", "-a b"])
def test_a_value_may_begin_with_a_dash(word):
    found = Parser("paint", "Paints.")
    found.arguments.add_argument("--shade")
    assert found.read(["--shade", word]).shade == word
    assert found.read(["--shade=--gloss"]).shade == "--gloss"
    found.arguments.add_argument("rest", nargs="*")
    assert found.read(["--", "--gloss"]).rest == ["--gloss"]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("180", 180), ("3m", 180), ("3 min", 180), ("1h30m", 5400), ("2 hours", 7200), ("90s", 90),
        ("250ms", 0.25), ("1.5h", 5400), ("1e3", 1000), ("2d", 172800), ("1m 30s", 90),
    ],
)  # fmt: skip
def test_durations_have_units(text, seconds):
    assert read_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "m", "3x", "three", "-3m", "1.2.3h", "m3", "nan"])
def test_what_is_no_duration_is_refused(text):
    with pytest.raises(ValueError, match="is not a duration"):
        read_duration(text)


@pytest.mark.parametrize(
    "words",
    [
        ["tune", "--budget=soon"], ["compare", "a", "b", "--budget=soon"],
        ["probe", "--budget=soon"], ["watch", "--every=soon"], ["watch", "--for=soon"],
        ["train", "--comm-timeout=soon"], ["train", "--expect-step-time=soon"],
        ["doctor", "--timeout=soon"], ["topology", "--timeout=soon"],
        ["verify", "--time-limit=soon"],
    ],
)  # fmt: skip
def test_every_command_reads_durations_alike(words, capsys):
    assert main(words) == 2
    assert "3m, 1h30m or 250ms" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["inf", "1e308", "nan", "0"])
@pytest.mark.parametrize("command", ["doctor", "topology"])
def test_a_timeout_beyond_clocks_is_refused(command, value, capsys):
    assert main([command, f"--timeout={value}"]) == 2
    assert "argument --timeout: " in capsys.readouterr().err
