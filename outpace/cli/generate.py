"""`outpace generate`."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from outpace.cli.parser import Parser, number_type
from outpace.records.errors import BadInputError


def run(argv: list[str], environ: Mapping[str, str]) -> int:
    """Print the continuation of a text; returns 0. Raises OutpaceError."""
    arguments = _parser().read(argv)
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    if not arguments.run.is_dir():
        raise BadInputError(
            f"--run {arguments.run}: there is no such directory; give the one that "
            "`outpace train` named at its end"
        )
    from outpace.launch import use

    text = use.generate(
        arguments.run,
        prompt,
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        seed=arguments.seed,
        device=arguments.device,
        chat=arguments.chat,
    )
    if arguments.json:
        print(json.dumps({"run": str(arguments.run), "prompt": prompt, "text": text}, indent=2))
    else:
        print(text)
    return 0


def _parser() -> Parser:
    parser = Parser("generate", "Continue a text with the model of a run.")
    parser.add_json()
    add = parser.arguments.add_argument
    add("prompt", metavar="TEXT", help="the text to go on from; - reads it from standard input")
    add("--run", type=Path, required=True, metavar="DIR", help="directory of a run")
    add(
        "--max-new-tokens",
        type=number_type(int, 1),
        default=100,
        metavar="N",
        help="tokens to add (default: 100)",
    )
    add(
        "--temperature",
        type=number_type(float, 0),
        default=0.8,
        metavar="X",
        help="0 takes the likeliest token, 1 samples as the model says (default: 0.8)",
    )
    add(
        "--top-k",
        type=number_type(int, 1),
        default=None,
        metavar="N",
        help="sample among the N likeliest tokens only (default: all)",
    )
    add(
        "--seed",
        type=number_type(int, 0),
        default=0,
        metavar="N",
        help="of the sampling (default: 0)",
    )
    add(
        "--chat",
        action="store_true",
        default=False,
        help="TEXT is what a user says: answer it, by the tokenizer's chat template",
    )
    add_device(parser)
    return parser


def add_device(parser: Parser) -> None:
    """Add --device."""
    parser.arguments.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda", "mps"),
        default="auto",
        help="where to compute (default: auto)",
    )
