"""What is suggested for a name that is not known."""

import pytest

from outpace.catalog.models import PRESETS
from outpace.catalog.outlines import OUTLINES
from outpace.records.errors import join_or, nearest_model, readable, suggest

KNOWN = (*PRESETS, *OUTLINES)


@pytest.mark.parametrize(
    "name",
    [
        "mamba-130m",
        "gptj-6b",
        "mixtral-7b",
        "llama-4-8b",
        "mistral-7b-v0.1",
        "olmo-2-7b",
        "llama-3.1-3b",
        "llama-3.3-8b",
        "gpt2-1b",
    ],
)
def test_no_other_model_is_suggested(name: str) -> None:
    assert nearest_model(name, KNOWN) == ""


@pytest.mark.parametrize(
    ("name", "meant"),
    [("lama-3-8b", "llama-3-8b"), ("Llama-3-8B", "llama-3-8b"), ("qwen2.5-7", "qwen2.5-7b"),
     ("gpt-2", "gpt2"), ("llama-3.1-9b", "llama-3.1-8b"), ("qwen3-10B", "qwen3-8b"),
     ("qwen2-500m", "qwen2-0.5b"), ("mixtral-8x7", "mixtral-8x7b")],
)  # fmt: skip
def test_a_slip_is(name: str, meant: str) -> None:
    assert f"Did you mean '{meant}'" in nearest_model(name, KNOWN)


@pytest.mark.parametrize(
    ("part", "meant"),
    [("405b", "'llama-3.1-405b'?"), ("405B", "'llama-3.1-405b'?"), ("405", "'llama-3.1-405b'?"),
     ("8x7b", "'mixtral-8x7b'"), ("llama-405b", "'llama-3.1-405b'?"),
     ("70b", "'llama-2-70b', 'llama-3-70b', 'llama-3.1-70b' or "), ("llama-3.1", "'llama-3.1-8b'"),
     ("qwen", "'qwen2-0.5b'")],
)  # fmt: skip
def test_a_size_or_family_alone_names_the_models_that_have_it(part: str, meant: str) -> None:
    assert f"Did you mean {meant}" in nearest_model(part, KNOWN)


def test_alternatives_are_joined_by_commas_and_or() -> None:
    assert [join_or("abc"[:count]) for count in (1, 2, 3)] == ["a", "a or b", "a, b or c"]
    assert "Did you mean 'loss-a', 'loss-b' or 'loss-c'?" in suggest(
        "loss", ["loss-a", "loss-b", "loss-c"]
    )


def test_a_message_that_holds_a_text_whole_is_cut_in_its_midst():
    said = readable(f"no column {'a' * 3_000_000!r}\nis known. Name it with --label-field.")
    assert len(said) < 2100
    assert said.startswith("no column 'aaa") and said.endswith("Name it with --label-field.")
    assert readable("short\nand plain") == "short\nand plain"
