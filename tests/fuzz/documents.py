"""Valid trees of files for each reader, small, always the same, made when first asked for."""

import io
import json
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from trees import Link, Tree, toml

from outpace.data.word_cache import PATTERNS
from outpace.records.base import Record
from outpace.records.machine import Device, Machine
from outpace.records.plan import Plan

TOPOLOGIES = Path(__file__).parents[1] / "probing" / "topologies"
ROWS: tuple[dict[str, Any], ...] = tuple(
    {"text": f"The {n}th of a few short texts: é, 中.", "label": n % 2, "n": n} for n in range(6)
)
SETTINGS = {
    "model": "gpt2", "global-batch": 16, "steps": 10, "lr": 1e-3, "data": ["a.txt", "b"],
    "micro_batch": "auto", "memory-limit": "8GiB", "compile": True, "strategy": "zero3",
    "lora-targets": "q,v", "lora-rank": 4, "betas": 0.9, "out": "runs/x",
}  # fmt: skip


def files_of(folder: Path) -> Tree:
    """What lies in a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def of_record(record: Record) -> bytes:
    """As `Record.save` writes it."""
    return record.model_dump_json(indent=1).encode()


@cache
def configs() -> Sequence[Tree]:
    """Of `outpace train --config`."""
    plain = {name: value for name, value in SETTINGS.items() if name != "betas"}
    others = ({"steps": 1, "tokens": 2}, {"micro-batch": 1, "micro_batch": 2}, {"steps": 10})
    return [{"config.toml": toml(one)} for one in (plain, *others)]


@cache
def experiments() -> Sequence[Tree]:
    """Of `outpace compare`."""
    arms = {"arm": [{"strategy": "ddp", "bucket-mib": 1}, {"name": "b", "environment": {"A": 1}}],
            "common": {"model": "gpt2", "compile": "on", "lora-targets": "q,v"},
            "rounds": 3, "price": 2.5}  # fmt: skip
    grid = {"grid": {"strategy": ["ddp", "zero3"], "micro_batch": [1, 2], "A_B": ["x", "y"]},
            "within": 0.1}  # fmt: skip
    command = {"arm": [{"command": "true"}, {"command": "false"}], "metric": "([0-9.]+)"}
    return [{"experiment.toml": toml(one)} for one in (arms, grid, command)]


LLAMA: Mapping[str, Any] = {
    "family": "llama", "layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2, "ffn": 24, "vocab": 32,
    "max_positions": 64, "rope_theta": 5e5, "sliding_window": 8, "window_layers": [1],
    "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_positions": 32},
}  # fmt: skip
GPT2: Mapping[str, Any] = {
    "family": "gpt2", "layers": 1, "hidden": 16, "heads": 2, "vocab": 32, "max_positions": 16,
}  # fmt: skip


@cache
def specs() -> Sequence[Tree]:
    """Of `--model`."""
    return [
        {"model.json": json.dumps(LLAMA).encode()},
        {"model.json": json.dumps(GPT2).encode()},
        {"model.toml": toml(LLAMA)},
        {"model.json": b'{"model_type": "gpt2"}'},
        *(
            {"model.json": json.dumps({**LLAMA, **change}).encode()}
            for change in ({"hidden": 15}, {"kv_heads": 3}, {"head_dim": 3})
        ),
    ]


@cache
def plans() -> Sequence[Tree]:
    """Of `outpace estimate --plan`, for 8 devices."""
    found = (
        Plan(strategy="zero3", dp_shard=8, micro_batch=2, checkpointing="full", precision="bf16"),
        Plan(strategy="3d", tp=2, pp=2, dp_shard=2, pp_microbatches=4, precision="bf16"),
        Plan(strategy="ddp", dp_replicate=8, checkpoint_layers=("full",) * 12),
    )
    strange = json.dumps({"strategy": "ddp", **dict.fromkeys("abcdefghij", 1)}).encode()
    return [*({"plan.json": of_record(one)} for one in found), {"plan.json": strange},
            {"plan.json": Link("/dev/zero")}]  # fmt: skip


@cache
def hostfiles() -> Sequence[Tree]:
    """Of `--hostfile`."""
    lines = b"# two hosts\na slots=4\nme@b.example slots=2 max_slots=4\n\nc max-slots=2\n"
    return [{"hosts": lines}, {"hosts": b"a\n"}, {"hosts": b"a slots = 8"}]


@cache
def topologies() -> Sequence[Tree]:
    """Of `outpace topology --from`: those in the tests, from many machines."""
    return [{"topology.txt": path.read_bytes()} for path in sorted(TOPOLOGIES.glob("*.txt"))]


@cache
def token_files() -> Sequence[Tree]:
    """nanoGPT's and Megatron's."""
    ids = np.arange(40, dtype="<u2")
    sizes = np.array([10, 30], "<i4")
    head = b"MMIDIDX\0\0" + (1).to_bytes(8, "little") + bytes([8])
    counts = np.array([2, 3], "<u8").tobytes() + sizes.tobytes()
    places = np.array([0, 20], "<i8").tobytes() + np.array([0, 1, 2], "<i8").tobytes()
    return [
        {"tokens.bin": ids.tobytes()},
        {"tokens.bin": ids.tobytes(), "tokens.idx": head + counts + places},
    ]


def _parquet(rows: Sequence[Mapping[str, Any]], **options: Any) -> bytes:
    import pyarrow
    from pyarrow import parquet

    out = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(list(rows)), out, **options)
    return out.getvalue()


# So often that a text is handed on in pieces.
_LONG = 90_000


@cache
def tables() -> Sequence[Tree]:
    """Data of texts and of rows, in every form that is read."""
    lines = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)
    cells = [
        ["sentence1", "sentence2", "label"],
        ['one "word"', "two, or three", "1"],
        ["a", "", "0"],
    ]
    long = json.dumps({"text": "A line.\nMore words " * _LONG}).encode()
    cola = b"gj04\t1\t\tIt is so.\ngj04\t0\t*\tSo is.\n"
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    pairs = [{"messages": turns}, {"conversations": [{"from": "gpt", "value": "x"}]},
             {"instruction": "a", "input": "b", "output": "c", "system": "d"},
             {"prompt": "a", "completion": "b"}, {"instruction": "a", "output": "c"},
             {"messages": [{"role": "assistant", "tool_calls": [{"name": "f"}]}]}]  # fmt: skip
    spaced = json.dumps({"text": "A line \nand 1 2 3 " * _LONG}).encode()
    whole = json.dumps({"text": "x" * 19 * _LONG}).encode()
    words = json.dumps({"text": "more words " * 2 * _LONG}).encode()
    return [
        {"data.jsonl": lines},
        {"data.json": json.dumps(ROWS).encode()},
        {"data.jsonl": b"".join(json.dumps(pair).encode() + b"\n" for pair in pairs)},
        {"data.parquet": _parquet(ROWS, compression="none", use_dictionary=False)},
        {"data.parquet": _parquet(ROWS)},
        {"data.csv": "\n".join(",".join(f'"{c}"' if "," in c else c for c in row)
                               for row in cells).encode()},
        {"data.tsv": "\n".join("\t".join(row) for row in cells).encode()},
        {"data.tsv": cola},
        {"data.csv": b"text,label\n\na,1\n"},
        {"data.jsonl": b'{"text": "a"}\n{"text": ""}\n'},
        {"data.jsonl": b'{"instruction": "a"}\n'},
        {"data.parquet": _parquet([{"other": 1}])},
        *({"data.jsonl": lines + b"\n" + one} for one in (long, spaced, whole, words)),
        {"data.txt": b"A line.\nMore words " * _LONG},
        {"text/a.txt": "Some text.\nAnd more — é.\n".encode() * 3, "text/b.txt": b"x"},
    ]  # fmt: skip


@cache
def tokenizer() -> Any:
    """A byte-level one."""
    from outpace.data.tokenizer_training import train_tokenizer

    library = Path(sysconfig.get_path("stdlib"))
    return train_tokenizer([(library / "heapq.py").read_text(encoding="utf-8")], 320)


# How Qwen 2's cuts texts.
_QWEN2: Mapping[str, Any] = {"type": "Sequence", "pretokenizers": [
    {"type": "Split", "pattern": {"Regex": PATTERNS[1]}, "behavior": "Isolated", "invert": False},
    {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
]}  # fmt: skip


@cache
def tokenizers() -> Sequence[Tree]:
    """In every form that is read."""
    with tempfile.TemporaryDirectory() as name:
        tokenizer().save(Path(name))
        whole = files_of(Path(name))
    told = json.loads(whole["tokenizer.json"])  # type: ignore[arg-type]
    model = told["model"]
    vocab = json.dumps(model["vocab"]).encode()
    merges = "\n".join(["#version: 0.2", *(" ".join(pair) for pair in model["merges"])]).encode()
    config = {"eos_token": {"content": "<|endoftext|>"}, "model_max_length": 64, "chat_template": [
        {"name": "default", "template": "{{ messages[0]['content'] }}"}]}  # fmt: skip
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                  "use_regex": True}  # fmt: skip
    split = _QWEN2["pretokenizers"][0]
    cuts: list[Any] = [
        None, {**byte_level, "add_prefix_space": True},
        {"type": "Sequence", "pretokenizers": [split, split, byte_level]},
        {"type": "Sequence", "pretokenizers": [
            {**split, "invert": True}, {**byte_level, "use_regex": False}]},
    ]  # fmt: skip
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    pieces = "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "##b", "hello"]).encode()
    return [
        {**whole, "chat_template.jinja": b"{% for m in messages %}{{ m.content }}{% endfor %}"},
        {"tokenizer.json": whole["tokenizer.json"],
         "tokenizer_config.json": json.dumps(config).encode()},
        {"encoder.json": vocab, "vocab.bpe": merges},
        {"vocab.json": vocab, "merges.txt": merges,
         "tokenizer_config.json": b'{"tokenizer_class": "GPT2Tokenizer"}'},
        {"vocab.txt": pieces},
        {"tokenizer.json": json.dumps({**told, "pre_tokenizer": _QWEN2}).encode()},
        {"tokenizer_config.json": b"{}"},
        {"vocab.txt": pieces, "README.md": b"word pieces"},
        {"tokenizer_config.json": json.dumps(own).encode(), "own.py": b"raise SystemExit"},
        *({"tokenizer.json": json.dumps({**told, "pre_tokenizer": cut}).encode()} for cut in cuts),
    ]  # fmt: skip


def model_of(spec: Mapping[str, Any], most_bytes: int) -> Tree:
    """A Hugging Face directory."""
    from outpace.interop.huggingface import write_model
    from outpace.nn.transformer import Transformer
    from outpace.records.model import ModelSpec

    found = ModelSpec.parse(dict(spec), "a test")
    with tempfile.TemporaryDirectory() as name:
        weights = Transformer(found, seed=1).state_dict()
        write_model(Path(name) / "m", found, weights, None, max_shard_bytes=most_bytes)
        return files_of(Path(name) / "m")


@cache
def models() -> Sequence[Tree]:
    """One file, sharded, of a form of outpace's own, and of torch's pickles."""
    import torch
    from safetensors.torch import load, save

    plain = {name: value for name, value in LLAMA.items() if "window" not in name}
    gpt2, llama = model_of(GPT2, 2**30), model_of(plain, 4000)
    out = io.BytesIO()
    bert = {**GPT2, "family": "bert", "segments": 2}
    own = {**GPT2, "heads": 4, "kv_heads": 2}
    weights = load(gpt2["model.safetensors"])  # type: ignore[arg-type]
    torch.save(weights, out)
    name, table = "transformer.wte.weight", weights["transformer.wte.weight"]
    others = (
        {**weights, "lm_head.weight": table.clone()},
        {**weights, "lm_head.weight": table + 1},
        {**weights, name: table[:3].clone()},
        {**weights, name: table.int()},
        {**weights, "more": table.clone()},
        {key: value for key, value in weights.items() if key != name},
    )
    no_family = {**gpt2, "config.json": b'{"model_type": "t5"}'}
    return [
        gpt2, llama, model_of(bert, 2**30), model_of({**bert, "tied": False}, 2**30),
        model_of(own, 2**30), no_family, {**gpt2, "config.json": b"{}"},
        *({**gpt2, "model.safetensors": save(one)} for one in others),
        {"config.json": gpt2["config.json"], "pytorch_model.bin": out.getvalue()},
    ]  # fmt: skip


@cache
def configs_of_models() -> Sequence[Tree]:
    """config.json of every architecture that can be planned for, as transformers has it."""
    from transformers import AutoConfig

    from outpace.interop.outline_readers import READERS

    found = []
    for family in READERS:
        values = AutoConfig.for_model(family).to_diff_dict()
        found.append({"config.json": json.dumps({**values, "model_type": family}).encode()})
    of = dict(zip(READERS, found, strict=True))
    for family, change in (
        ("gpt2", {"activation_function": "relu"}), ("bert", {"hidden_act": "relu"}),
        ("bert", {"is_decoder": True}), ("gpt2", {"add_cross_attention": True, "n_inner": 9}),
        ("opt", {"word_embed_proj_dim": 512}), ("opt", {"do_layer_norm_before": False}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}),
        ("vit", {"image_size": [32, 32], "patch_size": 64}),
        ("vit", {"image_size": [32, 32, 32]}),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5,
                   "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                   "original_max_position_embeddings": 8192}}),
        ("llama", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
        ("llama", {"quantization_config": {"quant_method": "gptq", "bits": 4}}),
        ("opt", {"hidden_size": 770}), ("bert", {"hidden_size": 770}),
        ("qwen3", {"layer_types": ["chunked_attention"] * 32}),
        ("qwen3", {"layer_types": ["sliding_attention"] * 3, "num_hidden_layers": 3,
                   "sliding_window": 9, "use_sliding_window": True}),
    ):  # fmt: skip
        values = json.loads(of[family]["config.json"])
        found.append({"config.json": json.dumps({**values, **change}).encode()})
    spec = {"model_type": "outpace", "spec": GPT2}
    return [*found, {"config.json": json.dumps(spec).encode()}, {"config.json": b"{}"}]


@cache
def adapters() -> Sequence[Tree]:
    """Of PEFT, beside the weights of a small GPT-2, which are in base/."""
    import torch
    from safetensors.torch import save

    from outpace.interop.weight_files import fingerprint

    base = {f"base/{name}": content for name, content in model_of(GPT2, 2**30).items()}
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": "base",
              "alpha_pattern": {"h.0.attn.c_attn": 8}, "use_rslora": True}  # fmt: skip
    prefix = "base_model.model.transformer.h.0.attn.c_attn"
    halves = {f"{prefix}.lora_A.weight": torch.ones(2, 16),
              f"{prefix}.lora_B.weight": torch.ones(48, 2)}  # fmt: skip
    tree = {**base, "adapter_config.json": json.dumps(config).encode(),
            "adapter_model.safetensors": save(halves)}  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        for file, content in model_of(GPT2, 2**30).items():
            (Path(name) / file).write_bytes(content)  # type: ignore[arg-type]
        note = {"base": "nf4", "fingerprint": fingerprint(Path(name))}
    dora = {"adapter_config.json": json.dumps({**config, "use_dora": True}).encode()}
    half = save({f"{prefix}.lora_A.weight": torch.ones(2, 16)})
    other = save({"head.weight": torch.ones(2, 16)})
    return [
        tree, {**tree, "outpace.json": json.dumps(note).encode()},
        {**tree, "outpace.json": json.dumps({**note, "fingerprint": "x"}).encode()},
        {**tree, **dora}, {**tree, "adapter_model.safetensors": half},
        {**tree, "adapter_model.safetensors": other},
    ]  # fmt: skip


MACHINE = Machine(
    host_cores=2, host_memory_bytes=2**34, cpu="a processor", cpu_features=("avx2", "avx512f")
)


def _figure(kind: str, what: str, value: float, unit: str = "s", **of: Any) -> Any:
    from outpace.records.figure import Figure, Key

    return Figure(
        key=Key(kind=kind, what=what, of=of), unit=unit, value=value, origin="measured",
        low=0.9 * value, high=1.1 * value, level=0.95, rounds=((value,),) * 2,
    )  # fmt: skip


@cache
def probed_machine() -> Machine:
    """As `outpace probe` writes it, with a few figures of each kind that planning reads."""
    from outpace.records.probe_results import Advice, LinkFit, ProbeRecord

    of = {"axis": "all", "backend": "gloo", "device": "cpu", "ranks": 2}
    sides = [dict.fromkeys("mnk", 2**power) for power in (6, 8, 10)]
    figures = (
        *(
            _figure("matmul", "curve", 1e9 * one["m"], "FLOP/s", dtype="fp32", **one)
            for one in sides
        ),
        _figure("matmul", "best", 1e12, "FLOP/s", dtype="fp32", **sides[-1]),
        _figure("memory", "copy", 1e10, "B/s", bytes=2**26),
        _figure("loader", "tokens", 1e6, "tokens/s", loader="outpace", workers=1),
        _figure("all-reduce", "time", 1e-3, bytes=2**20, **of),
    )
    fit = LinkFit(
        collective="all-reduce", axis="all", backend="gloo", device="cpu", ranks=2,
        latency=_figure("all-reduce", "latency", 1e-4, **of),
        bandwidth=_figure("all-reduce", "bandwidth", 1e9, "B/s", **of), residual=0.02,
    )  # fmt: skip
    probed = ProbeRecord(
        date="2026-11-22", versions={"torch": "2.13.0"}, command="outpace probe --quick",
        sections=("matmul", "memory", "collectives"), quick=True, took_s=30.0, world_size=2,
        figures=figures, fits=(fit,),
        advice=(Advice(about="heads", text="25 heads of 64 → 20 of 80", gain=0.03),),
    )  # fmt: skip
    return MACHINE.model_copy(update={"probed": probed})


@cache
def machines() -> Sequence[Tree]:
    """Of `outpace plan --machine`: of processors, and of an accelerator."""
    whole = probed_machine()
    assert whole.probed is not None
    cards = [Device(name=name, memory_bytes=85 * 10**9) for name in ("NVIDIA H100 80GB HBM3", "?")]
    none = whole.probed.model_copy(update={"figures": ()})
    shaky = [one.model_copy(update={"value": None, "unstable": "it drifted"})
             for one in whole.probed.figures]  # fmt: skip
    steps = (*shaky, _figure("step", "time", 0.1, reference="gpt-small", ranks=1, device="cpu"))
    return [
        {"machine.json": of_record(one)}
        for one in (
            whole, *(whole.model_copy(update={"devices": (card,)}) for card in cards), MACHINE,
            whole.model_copy(update={"probed": none}),
            whole.model_copy(update={"probed": none.model_copy(update={"figures": steps})}),
        )
    ]  # fmt: skip
