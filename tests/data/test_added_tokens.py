"""Tokens that a folder names beside tokenizer.json have the ids that transformers gives them."""

import json

import pytest
import transformers

from outpace.data.tokenizer_files import load_tokenizer
from outpace.records.errors import BadInputError

TEXT = "a river <tool> <image> <|stop|> end<|endoftext|> x <pad>"


def entry(content, **more):
    flags = dict.fromkeys(("special", "lstrip", "rstrip", "normalized", "single_word"), False)
    return {"content": content, **flags, **more}


@pytest.fixture
def folder(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    return tmp_path, json.loads((tmp_path / "tokenizer_config.json").read_text())


LISTED = {"added_tokens_decoder": {"600": entry("river"), "601": entry("<|stop|>", special=True)}}
CASES = {
    "listed": (LISTED, {}),
    "other properties": (
        {"added_tokens_decoder": {"0": entry("<|endoftext|>", special=True, rstrip=True)}}, {},
    ),
    "a file of its own": ({}, {"added_tokens.json": {"river": 600, "<|stop|>": 601}}),
    "a file that a list replaces": (LISTED, {"added_tokens.json": {"x": 602}}),
    "additional": ({"additional_special_tokens": ["<tool>", "<image>"]}, {}),
    "extra": ({"extra_special_tokens": {"image_token": "<image>"}}, {}),
    "behind a list": ({**LISTED, "extra_special_tokens": ["<tool>"]}, {}),
    "behind a role": ({"pad_token": "<pad>", "additional_special_tokens": ["<tool>"]}, {}),
    "listed and additional": (
        {
            "added_tokens_decoder": {"600": entry("river", special=True, lstrip=True)},
            "additional_special_tokens": ["river"],
        },
        {},
    ),
    "named and additional": (
        {"extra_special_tokens": {"a": "<image>"}, "additional_special_tokens": ["<tool>"]}, {},
    ),
    "in the map": ({}, {"special_tokens_map.json": {"additional_special_tokens": ["<tool>"]}}),
    "in the map and beside it": (
        {"additional_special_tokens": ["<image>"]},
        {"special_tokens_map.json": {"additional_special_tokens": ["<tool>"]}},
    ),
    "a letter as a special token": ({"additional_special_tokens": ["v"]}, {}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_ids_are_those_of_transformers(folder, case):
    directory, config = folder
    more, files = CASES[case]
    (directory / "tokenizer_config.json").write_text(json.dumps({**config, **more}))
    for name, values in files.items():
        (directory / name).write_text(json.dumps(values))
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    found = load_tokenizer(str(directory))
    assert found.encode(TEXT) == theirs(TEXT, add_special_tokens=False)["input_ids"]
    assert (found.vocab_size > 600) == any(number >= 600 for number in found.encode(TEXT))
    found.save(directory / "saved")
    again = transformers.AutoTokenizer.from_pretrained(directory / "saved")
    assert again(TEXT, add_special_tokens=False)["input_ids"] == found.encode(TEXT)


def test_of_older_folders_the_map_names_the_roles(folder):
    directory, config = folder
    ends = {"eos_token": "e", "bos_token": "o"}
    (directory / "special_tokens_map.json").write_text(json.dumps(ends))
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    assert load_tokenizer(str(directory)).eos_token == theirs.eos_token == "e"
    stop = {"added_tokens_decoder": {"0": entry("<|endoftext|>", special=True)}}
    (directory / "tokenizer_config.json").write_text(json.dumps({**config, **stop}))
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    assert load_tokenizer(str(directory)).eos_token == theirs.eos_token == "<|endoftext|>"


@pytest.mark.parametrize("place", ["tokenizer_config.json", "added_tokens.json", "tokenizer.json"])
def test_ids_that_a_token_would_not_get_are_refused(folder, place):
    directory, config = folder
    if place == "tokenizer_config.json":
        config |= {"added_tokens_decoder": {"700": entry("river")}}
        (directory / place).write_text(json.dumps(config))
    elif place == "added_tokens.json":
        (directory / place).write_text(json.dumps({"river": 700}))
    else:
        stored = json.loads((directory / place).read_text())
        stored["added_tokens"].append({"id": 700, **entry("river")})
        (directory / place).write_text(json.dumps(stored))
    with pytest.raises(BadInputError, match=rf"{place} gives the token 'river' the id 700, but .*"):
        load_tokenizer(str(directory))
