import pytest

from outpace.catalog.models import PRESETS, preset
from outpace.planner.model.flops import parameter_count
from outpace.records.errors import BadInputError
from outpace.records.model import RopeScaling

# All parameters with the head, tied ones once, as the published checkpoints hold them.
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "qwen2-0.5b": 494_032_768,
    "qwen2-1.5b": 1_543_714_304,
    "qwen2-7b": 7_615_616_512,
    "qwen2-72b": 72_706_203_648,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "bert-base": 109_514_298,  # the encoder without its pooler, and the masked-LM head
    "bert-large": 335_174_458,
}


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_parameters_are_the_published(name, count):
    assert parameter_count(preset(name)) == count


def test_gpt3_is_table_2_1():
    # Brown et al., arXiv 2005.14165, tables 2.1 and D.1: 96 layers of 12,288, 96 heads of 128,
    # 174.6 billion parameters.
    spec = preset("gpt3-175b")
    assert spec.head_dim == 128
    assert parameter_count(spec) == pytest.approx(174.6e9, rel=0.0005)


def test_what_no_parameter_shows_is_published_too():
    blend = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_positions": 8192}
    assert preset("llama-3-8b").rope_scaling is None
    assert preset("llama-3.1-8b").rope_scaling == RopeScaling(factor=8.0, **blend)
    assert preset("llama-3.2-1b").rope_scaling == RopeScaling(factor=32.0, **blend)
    assert preset("llama-2-7b").rope_theta == 10_000 and preset("llama-3-8b").rope_theta == 500_000
    assert preset("mistral-7b").sliding_window == 4096
    assert preset("mistral-7b-v0.3").sliding_window is None
    assert preset("gpt2").dropout == preset("bert-base").dropout == 0.1
    assert preset("qwen3-0.6b").qk_norm and not preset("qwen2-7b").qk_norm
    assert preset("qwen2-7b").norm_eps == 1e-6 and preset("qwen2-72b").norm_eps == 1e-5
    assert not preset("bert-base").causal


def test_every_preset_names_its_source():
    assert all(entry.source for entry in PRESETS.values())
    assert parameter_count(preset("outpace-small")) < 5e6
    with pytest.raises(TypeError):
        PRESETS["mine"] = PRESETS["gpt2"]


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(BadInputError, match=r"no model preset 'gpt2-x1'.*'gpt2-xl'"):
        preset("gpt2-x1")
