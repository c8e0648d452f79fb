"""The table of model families: whole, and transformers has what it names."""

from typing import get_args

import pytest

from outpace.records.errors import BadInputError
from outpace.records.model import ModelSpec
from outpace.records.model_families import FAMILY_TRAITS, Family

SIZES = {"layers": 1, "hidden": 8, "heads": 2, "vocab": 16, "max_positions": 16}


def test_each_family_is_declared_once_in_the_order_of_its_names():
    assert tuple(FAMILY_TRAITS) == get_args(Family)


@pytest.mark.parametrize("family", [["gpt2"], {"name": "gpt2"}, 2, "gpt9"])
def test_no_family_is_a_sentence(family):
    with pytest.raises(BadInputError, match="family"):
        ModelSpec.parse({"family": family, **SIZES}, "test")


@pytest.mark.parametrize("name", FAMILY_TRAITS)
def test_its_defaults_determine_a_model(name):
    spec = ModelSpec.parse({"family": name, **SIZES}, "test")
    assert {key: getattr(spec, key) for key in FAMILY_TRAITS[name].defaults} == {
        **FAMILY_TRAITS[name].defaults
    }


@pytest.mark.parametrize("name", FAMILY_TRAITS)
def test_transformers_has_its_config_with_these_settings(name):
    import transformers

    traits = FAMILY_TRAITS[name]
    config = getattr(transformers, traits.config)()
    assert config.model_type == name
    for setting in (*traits.dropouts, *(bias for bias in traits.biases)):
        assert hasattr(config, setting)
    assert hasattr(config, "head_dim") == (traits.has_head_dim and traits.form == "llama")
    assert hasattr(config, "sliding_window") == (
        traits.form == "llama" and traits.windows != "none"
    )
