"""`outpace merge`."""

import json
from collections.abc import Mapping
from pathlib import Path

from outpace.cli.output import output_place, tell_hint
from outpace.cli.parser import Parser
from outpace.records.errors import BadInputError
from outpace.records.units import show_count

_ABOUT = "Merge an adapter into its base model's weights and write a Hugging Face directory."


def run(argv: list[str], environ: Mapping[str, str]) -> int:
    """Write the merged model and print its folder; returns 0. Raises OutpaceError."""
    arguments = _parser().read(argv)
    if not arguments.source.is_dir():
        raise BadInputError(
            f"{arguments.source}: there is no such directory. Give a run that was trained with "
            "--lora-rank, or an adapter's folder"
        )
    from outpace.jobs.merge_adapter import merge_adapter

    merged = merge_adapter(
        arguments.source,
        arguments.out,
        model=arguments.model,
        base=arguments.base,
        dtype=arguments.dtype,
    )
    if arguments.json:
        values = {"model": str(arguments.out), "parameters": merged.parameters}
        print(json.dumps({**values, "notes": merged.notes}, indent=2))
    else:
        for note in merged.notes:
            tell_hint(note)
        print(
            f"{arguments.out}: {show_count(merged.parameters)} parameters, with the adapter "
            "merged in"
        )
    return 0


def _parser() -> Parser:
    parser = Parser("merge", _ABOUT)
    parser.add_json()
    add = parser.arguments.add_argument
    add("source", type=Path, metavar="RUN_OR_ADAPTER", help="a run, or a folder that peft reads")
    add("--out", type=output_place, required=True, metavar="DIR", help="where to write the model")
    add(
        "--model",
        type=Path,
        default=None,
        metavar="DIR",
        help="Hugging Face directory or run to merge into (default: the one that the adapter "
        "names)",
    )
    add(
        "--base",
        choices=("fp32", "nf4"),
        default=None,
        help="base weights to use: as stored, or as they are after 4-bit quantization "
        "(default: as in training)",
    )
    add(
        "--dtype",
        choices=("fp32", "bf16", "fp16"),
        default="fp32",
        help="data type of the written weights (default: fp32)",
    )
    return parser
