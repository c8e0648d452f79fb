"""What readers once failed on, as small as it can be: the corpus of the fuzzing."""

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from readers import READERS
from trees import Content, Instead, Link, Tree

_DEEP, _DIGITS, _LONG = b"[" * 50_000, b"9" * 5000, b"x" * 5000
Edit = Callable[[bytes], bytes]


@dataclass(frozen=True)
class Found:
    """Changes to the reader's tree number `of`, and what it `raised`.

    An edit is made to the file whose name ends so; the trees are made when they are asked for.
    """

    reader: str
    raised: str
    changes: Mapping[str, Content | Edit]
    of: int = 0

    @property
    def tree(self) -> Tree:
        """With the changes."""
        tree = dict(READERS[self.reader].trees()[self.of])
        for name, change in self.changes.items():
            if callable(change):
                name = next(known for known in tree if known.endswith(name))
                tree[name] = change(tree[name])  # type: ignore[arg-type]
            else:
                tree[name] = change
        return tree


def _with(**values: Any) -> Edit:
    """Other values at the top of an object."""
    return lambda content: json.dumps({**json.loads(content), **values}).encode()


def _nested() -> Iterator[Found]:
    """Deeper than Python's parsers go, of more digits than int takes, longer than anyone reads."""
    for name, file in (
        ("plan", "plan.json"), ("machine", "machine.json"), ("spec", "model.json"),
        ("model", "config.json"), ("outline", "config.json"), ("adapter", "adapter_config.json"),
        ("report", "comparison.json"), ("runs", "metrics.jsonl"), ("past run", "metrics.jsonl"),
        ("resumed run", "run.json"), ("resumed run", "metrics.jsonl"),
    ):  # fmt: skip
        yield Found(name, "RecursionError", {file: _DEEP + b"\n", "result.json": Instead.GONE})
    for name, file in (("config", "config.toml"), ("experiment", "experiment.toml")):
        yield Found(name, "RecursionError", {file: b"steps = " + _DEEP})
        yield Found(name, "ValueError: over 4300 digits", {file: b"steps = " + _DIGITS})
    both = {"config.toml": b"steps = 1\ntokens = 2\n"}
    yield Found("config", "no file was named", both)
    yield Found("config", "5,000 characters", {"config.toml": b"strategy = '" + _LONG + b"'"})
    yield Found("spec", "5,000 characters", {"model.json": b'{"family": "' + _LONG + b'"}'})
    yield Found("hosts", "50,000 characters", {"hosts": _DEEP + b" x"})
    yield Found("hosts", "ValueError: over 4300 digits", {"hosts": b"a slots=" + _DIGITS})


def _machines() -> Iterator[Found]:
    yield Found("plan", "no file was named", {"plan.json": _with(checkpoint_layers=["full"])}, 2)
    yield Found("machine", "OverflowError", {"machine.json": _with(host_cores=10**400)})
    yield Found("machine", "KeyError: workers", {
        "machine.json": lambda content: content.replace(b'"workers"', b'"others"')})  # fmt: skip
    glued = b"\tGPU0\tGPU1\tCPUAffinity\nGPU0\t X \tPIX\t0\nGPU1\tPIX\t X \t0\n"
    yield Found("topology", "KeyError: CPUAffinity", {"topology.txt": glued})
    longer = b"\tGPU0\tGPU1\nGPU0\t X \tPIX\nGPU1\tPIXXX\n"
    yield Found("topology", "no file was named", {"topology.txt": longer})


def _data() -> Iterator[Found]:
    def index(sequences: int) -> bytes:
        return b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, sequences, 1) + bytes(8)

    yield Found("tokens", "OverflowError", {"tokens.idx": index(2**64 - 1)}, 1)
    yield Found("tokens", "ValueError: an empty file",
                {"tokens.bin": b"", "tokens.idx": index(0)}, 1)  # fmt: skip
    loop = Link("a.txt")
    for name in ("text", "rows"):
        yield Found(name, "OSError: too many levels of symbolic links", {"text/a.txt": loop}, -1)
    large = b'{"text": "a", "label": 1%s}' % (b"0" * 400)
    yield Found("rows", "OverflowError", {"data.jsonl": large})
    for raised, content in (
        ("Exception: Missing [UNK] token", b"[SEP]\na"), ("no file was named", b""),
    ):  # fmt: skip
        yield Found("tokenizer", raised, {"vocab.txt": content}, 4)
    holes = b'{"<|endoftext|>": 0, "a": 4294967294}'
    yield Found("tokenizer", "the process ended: memory for 4 billion tokens",
                {"encoder.json": holes, "vocab.bpe": b""}, 2)  # fmt: skip
    for templates in ([1], [{"name": "default", "template": 1}]):
        config = {"tokenizer_config.json": _with(chat_template=templates)}
        yield Found("tokenizer", f"a template that is no text: {templates}", config, 1)


def _models() -> Iterator[Found]:
    for raised, index in (
        ("RecursionError", _DEEP),
        ("TypeError: int found", b'{"weight_map": {"a": 1}}'),
        ("OSError: file name too long", b'{"weight_map": {"a": "%s"}}' % _LONG),
    ):
        yield Found("model", raised, {
            "model.safetensors": Instead.GONE, "model.safetensors.index.json": index})  # fmt: skip
    yield Found("model", "it built a million layers", {"config.json": _with(n_layer=10**6)})
    yield Found(
        "outline", "it made layers without end", {"config.json": _with(num_hidden_layers=2**64)}, 1
    )
    for raised, values in (
        ("AttributeError", {"alpha_pattern": [1]}),
        ("TypeError", {"alpha_pattern": {"h.0.attn.c_attn": [1]}}),
        ("re.error: bad escape", {"alpha_pattern": {r"\K": 1}}),
        ("OSError: file name too long", {"base_model_name_or_path": "x" * 300}),
        ("RuntimeError: no home directory", {"base_model_name_or_path": "~nobody_at_all/x"}),
    ):
        yield Found("adapter", raised, {"adapter_config.json": _with(**values)})


def _runs() -> Iterator[Found]:
    step = b'{"step": %s, "step_time_s": 1, "samples": 1, "loss": 1}\n'
    for name, raised, lines in (
        ("run", "the process ended: null in pyarrow", b"null\n"),
        ("run", "OverflowError", step % (b"1" + b"0" * 400) + b"{"),
        ("run", "ValueError: NaN to integer", step % b"null"),
        ("resumed run", "OverflowError: infinity to integer", step % b"Infinity"),
        ("past run", "UnicodeDecodeError", b"\xbc" + step % b"1"),
    ):
        yield Found(name, raised, {"metrics.jsonl": lines})
    events = [{"ph": "X", "cat": "user_annotation", "name": "stage 0: F"}]
    yield Found("run", "KeyError: ts", {"trace-rank0.json": _with(traceEvents=events)})
    yield Found("run", "ValueError: no time", {"utilisation/host-0.json": _with(started="x")})
    for raised, line in (("ValidationError", b"{}\n"), ("UnicodeDecodeError", b"\xbc\n")):
        yield Found("resumed run", raised, {"evals.jsonl": line})
    yield Found("report", "IndexError", {"tuning.json": _with(best=9)}, 1)
    yield Found("runs", "RuntimeError: symlink loop", {"note": Link("note")})
    yield Found("report", "IndexError: no plan", {"plans.json": _with(plans=[])}, -1)
    yield Found("checkpoint", "ValueError: no digit", {"step-²/complete.json": b"{}"})
    yield Found("checkpoint", "RecursionError", {"step-2/complete.json": _DEEP})
    for raised, values in (("AttributeError", {"files": []}), ("KeyError", {"splits": {}})):
        yield Found("cache", raised, {"index.json": _with(**values)})


FOUND = (*_nested(), *_machines(), *_data(), *_models(), *_runs())
