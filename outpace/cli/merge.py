"""`outpace merge`."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from outpace.cli.output import output_place, require_folder_place, tell_hint
from outpace.cli.parser import Parser
from outpace.records.errors import BadInputError
from outpace.records.units import show_count

if TYPE_CHECKING:
    from outpace.jobs.merge_adapter import MergedModel

_ABOUT = "Merge an adapter into its base model's weights and write a Hugging Face directory."


def run(argv: list[str], environ: Mapping[str, str]) -> int:
    """Write the merged model and print its folder; returns 0. Raises OutpaceError."""
    arguments = _parser().read(argv)
    merged = _merge(arguments)
    if arguments.json:
        print(merged.model_dump_json(indent=2))
    else:
        for note in merged.notes:
            tell_hint(note)
        print(
            f"{merged.model}: {show_count(merged.parameters)} parameters, with the adapter "
            "merged in"
        )
    return 0


def answer(argv: list[str]) -> "MergedModel":
    """Merge as the command line `argv` says, and return the merged model.

    Raises BadInputError if an argument is invalid.
    """
    return _merge(_parser().read(argv))


def _merge(arguments: argparse.Namespace) -> "MergedModel":
    require_folder_place(arguments.out)
    if not arguments.source.is_dir():
        raise BadInputError(
            f"{arguments.source}: there is no such directory. Give a run that was trained with "
            "--lora-rank, or an adapter's folder"
        )
    from outpace.jobs.merge_adapter import merge_adapter

    return merge_adapter(
        arguments.source,
        arguments.out,
        model=arguments.model,
        base=arguments.base,
        dtype=arguments.dtype,
    )


def _parser() -> Parser:
    parser = Parser("merge", _ABOUT)
    parser.add_json()
    add = parser.option
    add("source", "RUN_OR_ADAPTER", Path, "a run trained with LoRA, or a PEFT adapter's folder")
    add("--out", "DIR", output_place, "folder for the merged model", required=True)
    add("--model", "DIR", Path,
        "Hugging Face directory or run to merge into (default: the one that the adapter names)"
    )  # fmt: skip
    add("--base", None, str,
        "base weights to merge into: as stored, or rounded by 4-bit quantization (default: as in "
        "training)", choices=("fp32", "nf4"))  # fmt: skip
    add("--dtype", None, str,
        "data type of the written weights (default: fp32)",
        default="fp32", choices=("fp32", "bf16", "fp16"))  # fmt: skip
    return parser
