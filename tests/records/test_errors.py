"""What is suggested for a name that is not known."""

import pytest

from outpace.catalog.models import PRESETS
from outpace.catalog.outlines import OUTLINES
from outpace.records.errors import nearest_model

KNOWN = (*PRESETS, *OUTLINES)


@pytest.mark.parametrize(
    "name", ["mamba-130m", "gptj-6b", "mixtral-7b", "llama-4-8b", "mistral-7b-v0.1", "olmo-2-7b"]
)
def test_no_other_model_is_suggested(name: str) -> None:
    assert nearest_model(name, KNOWN) == ""


@pytest.mark.parametrize(
    ("name", "meant"),
    [("lama-3-8b", "llama-3-8b"), ("Llama-3-8B", "llama-3-8b"), ("qwen2.5-7", "qwen2.5-7b"),
     ("gpt-2", "gpt2"), ("mixtral-8x7", "mixtral-8x7b")],
)  # fmt: skip
def test_a_slip_is(name: str, meant: str) -> None:
    assert f"Did you mean '{meant}'" in nearest_model(name, KNOWN)
