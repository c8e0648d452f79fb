"""`outpace generate`."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.cli.output import tell_hint
from outpace.cli.parser import Parser, number_type
from outpace.records.errors import BadInputError, shorten
from outpace.records.run import explain_removed_checkpoint, suggest_runs
from outpace.records.settings import MOST_SEED

if TYPE_CHECKING:
    from outpace.data.conversations import Message
    from outpace.jobs.inference import Writer


def run(argv: list[str], environ: Mapping[str, str]) -> int:
    """Continue a text, or answer in a conversation, and print the result; returns 0.

    Raises OutpaceError.
    """
    arguments = _parser().read(argv)
    _check_arguments(arguments)
    from outpace.jobs import inference

    sampling = inference.Sampling(
        arguments.max_new_tokens, arguments.temperature, arguments.top_k, arguments.seed
    )
    writer = inference.Writer(arguments.run, sampling, arguments.device, on_hint=tell_hint)
    begin = inference.system_message(arguments.system)
    if arguments.conversations is not None:
        for talk in writer.questions(arguments.conversations):
            messages = _prepend_system(begin, talk.messages)
            _print_answer(arguments, messages[-1]["content"], writer.answer(messages, talk.tools))
        return 0
    if arguments.prompt is None:
        return _answer_lines(writer, begin)
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    if arguments.chat or arguments.system is not None:
        text = writer.answer([*begin, {"role": "user", "content": prompt}])
    else:
        text = writer.continue_text(prompt)
    _print_answer(arguments, prompt, text)
    return 0


def _prepend_system(system: "Sequence[Message]", messages: "Sequence[Message]") -> "list[Message]":
    """Put the system message of --system before a conversation.

    Raises BadInputError if the conversation has a system message already.
    """
    if system and messages[0]["role"] == "system":
        raise BadInputError(
            "--system: a conversation in the file already has a system message, "
            f"{shorten(str(messages[0]['content']), 60)!r}. Leave one of the two out."
        )
    return [*system, *messages]


def _check_arguments(arguments: argparse.Namespace) -> None:
    require_run(arguments.run)
    if arguments.prompt is None and arguments.conversations is None:
        if not arguments.chat:
            raise BadInputError(
                "outpace generate needs a TEXT to continue. Without one, use --chat to start a "
                "conversation, or --conversations FILE to answer those in a file."
            )
        if arguments.json:
            raise BadInputError(
                "--chat without a TEXT starts a conversation, and --json prints a single "
                "answer. Give a TEXT, or leave --json out."
            )
    if arguments.prompt is not None and arguments.conversations is not None:
        raise BadInputError("both a TEXT and --conversations were given. Use only one of them.")


def require_run(run: Path) -> None:
    """Raise BadInputError if the run's directory does not exist."""
    if not run.is_dir():
        raise BadInputError(
            f"--run {run}: there is no such directory. Give the one that `outpace train` printed "
            f"at the end.{suggest_runs(run)}{explain_removed_checkpoint(run)}"
        )


def _print_answer(arguments: argparse.Namespace, prompt: Any, text: str) -> None:
    if arguments.json:
        print(json.dumps({"run": str(arguments.run), "prompt": prompt, "text": text}, indent=2))
    else:
        print(text)


def _answer_lines(writer: "Writer", system: "Sequence[Message]") -> int:
    """Answer each line of standard input, given the conversation so far; return 0 at its end."""
    interactive = sys.stdin.isatty()
    if interactive:
        print("Type your message; press Ctrl-D to end the conversation.", file=sys.stderr)
    messages = list(system)
    while True:
        if interactive:
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return 0
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line.strip()})
        text = writer.answer(messages)
        messages.append({"role": "assistant", "content": text})
        print(text, flush=True)


def _parser() -> Parser:
    parser = Parser("generate", "Continue a text with the model of a run, or chat with it.")
    parser.add_json()
    add = parser.option
    add("prompt", "TEXT", str, "the text to continue; - reads it from standard input", nargs="?")
    add_model(parser)
    add("--max-new-tokens", "N", number_type(int, 1),
        "number of tokens to generate (default: 100)", default=100)  # fmt: skip
    add("--temperature", "X", number_type(float, 0),
        "0 always picks the likeliest token; 1 samples from the model's distribution "
        "(default: 0.8)", default=0.8)  # fmt: skip
    add("--top-k", "N", number_type(int, 1), "sample among the N likeliest tokens (default: all)")
    add("--seed", "N", number_type(int, 0, MOST_SEED),
        "random seed of the sampling (default: 0)", default=0)  # fmt: skip
    parser.switch("--chat",
        "answer TEXT as a user's message, with the tokenizer's chat template; without TEXT, start "
        "a conversation, one message per line")  # fmt: skip
    add("--system", "TEXT", str, "system message at the start of the conversation; implies --chat")
    add("--conversations", "FILE", Path,
        "answer the last question of each conversation in a .jsonl file")  # fmt: skip
    add_device(parser)
    return parser


def add_model(parser: Parser) -> None:
    """Add the option --run, for a run's directory, and its alias --model, as in `outpace train`."""
    parser.arguments.add_argument(
        "--run",
        "--model",
        dest="run",
        type=Path,
        required=True,
        metavar="DIR",
        help="directory of a run, of a Hugging Face model, or of an adapter",
    )


def add_device(parser: Parser) -> None:
    """Add --device."""
    parser.option("--device", None, str,
        "device to compute on (default: auto)", default="auto",
        choices=("auto", "cpu", "cuda", "mps"))  # fmt: skip
