"""`outpace eval`."""

from collections.abc import Mapping
from typing import get_args

from outpace.cli.generate import add_device, add_model, require_run
from outpace.cli.output import tell_hint
from outpace.cli.parser import Parser, number_type
from outpace.records.settings import DEFAULT_SEQ_LEN, Task


def run(argv: list[str], environ: Mapping[str, str]) -> int:
    """Print loss, perplexity and speed of a run's model on text; returns 0. Raises OutpaceError."""
    arguments = _parser().read(argv)
    require_run(arguments.run)
    from outpace.jobs import inference

    evaluation = inference.evaluate(
        arguments.run,
        tuple(arguments.data) if arguments.data else None,
        batches=arguments.batches,
        batch_size=arguments.batch_size,
        device=arguments.device,
        text_field=arguments.text_field,
        task=arguments.task,
        seq_len=arguments.seq_len,
        on_hint=tell_hint,
    )
    if arguments.json:
        print(evaluation.model_dump_json(indent=2))
        return 0
    from outpace.reporting.terminal.console import Console
    from outpace.reporting.terminal.summary import evaluation_table

    Console().print(evaluation_table(evaluation))
    return 0


def _parser() -> Parser:
    parser = Parser(
        "eval", "Measure the loss and perplexity of a run, a model or an adapter on held-out data."
    )
    parser.add_json()
    add = parser.option
    add_model(parser)
    add("--task", "NAME", str,
        f"{', '.join(get_args(Task))} (default: the run's task, or chat if --data holds "
        "conversations)", choices=get_args(Task))  # fmt: skip
    add("--data", None, str,
        "text to evaluate on, as for outpace train (default: the run's held-out data)",
        nargs="+", action="extend")  # fmt: skip
    add("--batches", "N", number_type(int, 1),
        "stop after this many batches (default: all the data)")  # fmt: skip
    add("--batch-size", "N", number_type(int, 1),
        "samples per batch (default: the run's global batch)")  # fmt: skip
    add("--seq-len", "N", number_type(int, 1),
        f"tokens per sample (default: the run's; else {DEFAULT_SEQ_LEN}, or the model's positions "
        "if fewer)")  # fmt: skip
    add("--text-field", "FIELD", str,
        "key of the text in .jsonl, .parquet and datasets (default: the run's)")  # fmt: skip
    add_device(parser)
    return parser
