"""Errors of `outpace memory`'s trace compared with two real steps.

    python benchmarks/memory_accuracy.py            # records results/memory_accuracy.json
    python benchmarks/memory_accuracy.py --only gpt2-full,bert-ddp      # some cases, not recorded
    python benchmarks/memory_accuracy.py --device cuda          # results/memory_accuracy_gpu.json

Each case is a command in fresh processes, and the traced peak is compared with the most that
torch's allocator had allocated: on a CPU `outpace memory --measure`; on GPUs three steps of
`outpace train --memory`, where that is `max_memory_allocated`, without cases that need a CPU or
more devices than there are. The list was fixed before any measurement.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from recording import save

# Wide models have few tokens and many weights; the others have few weights and many tokens.
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"family": "gpt2", "layers": 4, "hidden": 512, "heads": 8, "vocab": 8192},
    "llama": {"family": "llama", "layers": 4, "hidden": 512, "heads": 8, "kv_heads": 4,
              "vocab": 8192, "tied": True},
    "qwen3": {"family": "qwen3", "layers": 4, "hidden": 512, "heads": 8, "kv_heads": 4,
              "vocab": 8192},
    "bert": {"family": "bert", "layers": 4, "hidden": 512, "heads": 8, "vocab": 8192},
    "deep": {"family": "llama", "layers": 10, "hidden": 256, "heads": 8, "kv_heads": 8,
             "vocab": 4096},
    "wide": {"family": "gpt2", "layers": 2, "hidden": 384, "heads": 6, "vocab": 50257},
}  # fmt: skip
_TOKENS = "--seq-len 512 --micro-batch 4"
_FEW = "--seq-len 64 --micro-batch 1"
_PIPE = "--seq-len 512 --micro-batch 2 --pp-microbatches 4"
_MORE = "--seq-len 512 --micro-batch 8"

# Model and options of each case, by name.
CASES: dict[str, tuple[str, str]] = {
    # families and losses
    "gpt2": ("gpt2", _TOKENS),
    "llama": ("llama", _TOKENS),
    "qwen3": ("qwen3", _TOKENS),
    "bert": ("bert", _TOKENS),
    "wide": ("wide", _FEW),
    "gpt2-plain-loss": ("gpt2", f"{_TOKENS} --loss plain"),
    "qwen3-plain-loss": ("qwen3", f"{_TOKENS} --loss plain"),
    # strategies
    "gpt2-ddp": ("gpt2", f"{_TOKENS} --strategy ddp --nproc 2"),
    "bert-ddp": ("bert", f"{_TOKENS} --strategy ddp --nproc 2"),
    "wide-ring": ("wide", f"{_FEW} --strategy ring --nproc 2"),
    "wide-zero1": ("wide", f"{_FEW} --strategy zero1 --nproc 2"),
    "llama-zero2": ("llama", f"{_TOKENS} --strategy zero2 --nproc 2"),
    "wide-zero2": ("wide", f"{_FEW} --strategy zero2 --nproc 2"),
    "qwen3-zero3": ("qwen3", f"{_TOKENS} --strategy zero3 --nproc 2"),
    "deep-zero3-4": ("deep", f"{_MORE} --strategy zero3 --nproc 4"),
    "gpt2-hsdp": ("gpt2", f"{_TOKENS} --strategy hsdp --nproc 4"),
    "deep-gpipe": ("deep", f"{_PIPE} --strategy gpipe --nproc 2"),
    "deep-1f1b": ("deep", f"{_PIPE} --strategy 1f1b --nproc 2"),
    "deep-interleaved": ("deep", f"{_PIPE} --strategy interleaved --nproc 2"),
    "llama-tp": ("llama", f"{_MORE} --strategy tp --nproc 2"),
    "llama-cp": ("llama", f"{_MORE} --strategy cp --nproc 2"),
    "llama-3d": ("llama", f"{_MORE} --strategy 3d --nproc 4 --tp 2 --dp-shard 2"),
    "wide-dp": ("wide", f"{_FEW} --strategy dp --nproc 2"),
    "wide-ps": ("wide", f"{_FEW} --strategy ps --nproc 3"),
    # recomputation
    "gpt2-full": ("gpt2", f"{_MORE} --checkpointing full"),
    "deep-zero3-full": ("deep", f"{_MORE} --checkpointing full --strategy zero3 --nproc 2"),
    "llama-selective": ("llama", f"{_TOKENS} --checkpointing selective"),
    "gpt2-ddp-selective": ("gpt2", f"{_TOKENS} --checkpointing selective --nproc 2"),
    "qwen3-attention": ("qwen3", f"{_MORE} --checkpointing attention"),
    "deep-attention": ("deep", f"{_MORE} --checkpointing attention"),
    "deep-every-2": ("deep", f"{_TOKENS} --checkpointing full --checkpoint-every 2"),
    "deep-zero2-every-3": (
        "deep",
        f"{_TOKENS} --checkpointing full --checkpoint-every 3 --strategy zero2 --nproc 2",
    ),
    "gpt2-layers": ("gpt2", f"{_TOKENS} --checkpoint-layers full,selective,attention,none"),
    "llama-layers": ("llama", f"{_TOKENS} --checkpoint-layers full,full,none,none"),
    # precision
    "gpt2-bf16": ("gpt2", f"{_TOKENS} --precision bf16"),
    "qwen3-zero3-bf16": ("qwen3", f"{_TOKENS} --precision bf16 --strategy zero3 --nproc 2"),
    "bert-bf16-pure": ("bert", f"{_MORE} --precision bf16-pure"),
    "wide-bf16-pure": ("wide", f"{_FEW} --precision bf16-pure --optimizer adamw-8bit --loss plain"),
    "wide-fp16": ("wide", f"{_FEW} --precision fp16"),
    "wide-ddp-fp16": ("wide", f"{_FEW} --precision fp16 --nproc 2"),
    # optimizers
    "wide-foreach": ("wide", f"{_FEW} --optimizer adamw-foreach"),
    "wide-zero2-foreach": ("wide", f"{_FEW} --optimizer adamw-foreach --strategy zero2 --nproc 2"),
    "wide-for-loop": ("wide", f"{_FEW} --optimizer adamw-for-loop"),
    "wide-ddp-for-loop": ("wide", f"{_FEW} --optimizer adamw-for-loop --nproc 2"),
    "gpt2-8bit": ("gpt2", f"{_TOKENS} --optimizer adamw-8bit"),
    "llama-zero3-8bit": ("llama", f"{_TOKENS} --optimizer adamw-8bit --strategy zero3 --nproc 2"),
    "bert-4bit": ("bert", f"{_TOKENS} --optimizer adamw-4bit"),
    "gpt2-ddp-4bit": ("gpt2", f"{_TOKENS} --optimizer adamw-4bit --nproc 2"),
    "wide-adamw-bf16": ("wide", f"{_FEW} --optimizer adamw-bf16"),
    "gpt2-zero2-adamw-bf16": (
        "gpt2",
        f"{_TOKENS} --optimizer adamw-bf16 --strategy zero2 --nproc 2",
    ),
    "llama-adafactor": ("llama", f"{_TOKENS} --optimizer adafactor"),
    "qwen3-zero3-adafactor": (
        "qwen3",
        f"{_TOKENS} --optimizer adafactor --strategy zero3 --nproc 2",
    ),
    "llama-muon": ("llama", f"{_TOKENS} --optimizer muon"),
    "gpt2-zero3-muon": ("gpt2", f"{_TOKENS} --optimizer muon --strategy zero3 --nproc 2"),
    "bert-sgd": ("bert", f"{_TOKENS} --optimizer sgd"),
    "gpt2-ddp-sgd": ("gpt2", f"{_TOKENS} --optimizer sgd --nproc 2"),
    "gpt2-in-backward": ("gpt2", f"{_TOKENS} --optimizer-in-backward --clip 0"),
    "wide-in-backward": ("wide", f"{_FEW} --optimizer-in-backward --clip 0"),
    # offloading
    "gpt2-states-disk": ("gpt2", f"{_TOKENS} --offload-optimizer disk"),
    "llama-zero3-states-disk": (
        "llama",
        f"{_TOKENS} --offload-optimizer disk --strategy zero3 --nproc 2",
    ),
    "wide-states-cpu": ("wide", f"{_FEW} --offload-optimizer cpu"),
    "gpt2-ddp-states-cpu": ("gpt2", f"{_TOKENS} --offload-optimizer cpu --nproc 2"),
    "gpt2-all-disk": ("gpt2", f"{_TOKENS} --offload disk"),
    "qwen3-zero3-all-disk": ("qwen3", f"{_TOKENS} --offload disk --strategy zero3 --nproc 2"),
    "llama-parameters-cpu": ("llama", f"{_TOKENS} --offload-parameters cpu"),
    "gpt2-zero3-parameters-cpu": (
        "gpt2",
        f"{_TOKENS} --offload-parameters cpu --strategy zero3 --nproc 2",
    ),
    "wide-activations-disk": ("wide", f"{_FEW} --offload-activations disk"),
    "deep-ddp-activations-disk": ("deep", f"{_MORE} --offload-activations disk --nproc 2"),
    # adapters
    "gpt2-lora": ("gpt2", f"{_TOKENS} --lora-rank 8"),
    "llama-zero3-lora": ("llama", f"{_TOKENS} --lora-rank 8 --strategy zero3 --nproc 2"),
    "gpt2-nf4": ("gpt2", f"{_TOKENS} --lora-rank 8 --base nf4"),
    "llama-ddp-nf4": ("llama", f"{_TOKENS} --lora-rank 8 --base nf4 --nproc 2"),
    # collectives and accumulation
    "wide-ddp-compress-bf16": ("wide", f"{_FEW} --compress-gradients bf16 --nproc 2"),
    "gpt2-ddp-powersgd": ("gpt2", f"{_TOKENS} --compress-gradients powersgd --nproc 2"),
    "llama-accumulate": ("llama", f"{_TOKENS} --global-batch 12"),
    "wide-ddp-accumulate": ("wide", f"{_FEW} --global-batch 6 --nproc 2"),
}
LEAST_BYTES = 300 * 2**20
TARGET_MEAN, TARGET_WORST = 0.02, 0.05


def document(name: str, words: list[str]) -> dict[str, Any]:
    """Return the document that a command prints with --json. Raises RuntimeError if it fails."""
    command = [sys.executable, "-m", "outpace", *words, "--json"]
    environ = {**os.environ, "KINETO_LOG_LEVEL": "5"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr.strip()[-500:]}")
    printed: dict[str, Any] = json.loads(done.stdout)
    return printed


def words_of(name: str, folder: Path) -> list[str]:
    """Return the options of a case, with its model in a file."""
    model, asked = CASES[name]
    spec = folder / f"{model}.json"
    spec.write_text(json.dumps({"max_positions": 512, **MODELS[model]}))
    precision = [] if "--precision" in asked else ["--precision", "fp32"]
    return [*asked.split(), *precision, "--model", str(spec)]


def as_shown(name: str, words: list[str]) -> list[str]:
    """Return a command with its model's description instead of files of this run."""
    hidden = {"--out": "RUN", "--model": json.dumps(MODELS[CASES[name][0]])}
    hidden |= dict.fromkeys(("--data", "--eval-data"), "DATA")
    shown = [hidden.get(before, word) for before, word in zip(["", *words], words, strict=False)]
    return ["outpace", *shown]


def run_on_cpu(name: str, folder: Path) -> dict[str, Any]:
    """Compare two real steps with their trace. Raises RuntimeError."""
    words = ["memory", "--measure", *words_of(name, folder)]
    said = document(name, words)
    measured = said["measured"]
    return {
        "command": as_shown(name, words),
        "traced_bytes": said["peak_memory_bytes"],
        "measured_bytes": measured["allocated_bytes"],
        "error": said["relative_error"],
        "resident_bytes": measured["resident_bytes"],
        "reserved_bytes": measured["reserved_bytes"],
        "unseen_bytes": measured["unseen_bytes"],
        "peak_at": said["peak_at"]["where"],
        "rank": said["rank"],
    }


def run_in_training(name: str, folder: Path, device: str) -> dict[str, Any]:
    """Compare three steps of a run with their trace by the device's rules. Raises RuntimeError."""
    words = words_of(name, folder)
    data = ["--data", "stdlib"]
    if "--lora-rank" in words:  # adapters need stored weights, which have no tokenizer
        weights = stored(words[words.index("--model") + 1])
        words[words.index("--model") + 1] = str(weights)
        data = ["--data", str(weights / "train.bin"), "--eval-data", str(weights / "train.bin")]
    if "--global-batch" not in words:
        words += ["--global-batch", str(document(name, ["memory", *words])["global_batch"])]
    run = folder / name
    words = ["train", "--memory", "--device", device, *data, "--steps", "3", *words,
             "--eval-batches", "1", "--sample-tokens", "0", "--out", str(run)]  # fmt: skip
    document(name, words)
    use = json.loads((run / "memory.json").read_text())
    traced, measured = use["traced"], use["measured"]
    seen = measured["allocated_bytes"] or peak_of(measured)
    return {
        "command": as_shown(name, words),
        "traced_bytes": peak_of(traced),
        "measured_bytes": seen,
        "error": peak_of(traced) / seen - 1,
        "resident_bytes": measured["resident_bytes"],
        "traced_reserved_bytes": traced["reserved_bytes"],
        "reserved_bytes": measured["reserved_bytes"],
        "unseen_bytes": measured["unseen_bytes"],
        "rank": traced["rank"],
    }


def peak_of(account: dict[str, Any]) -> int:
    """Return the bytes in use at an account's peak."""
    kinds = account["peak"]["by_kind"]
    return sum(size for kind, size in kinds.items() if kind != "offloaded")


def stored(spec_file: str) -> Path:
    """Write a model's random weights as a Hugging Face directory, with random tokens in it."""
    import numpy as np

    from outpace.interop.huggingface import write_model
    from outpace.nn.transformer import Transformer
    from outpace.records.model import ModelSpec

    spec = ModelSpec.parse(json.loads(Path(spec_file).read_text()), spec_file)
    folder = Path(spec_file).with_suffix(".weights")
    if not folder.exists():
        write_model(folder, spec, Transformer(spec).state_dict(), None)
        tokens = np.random.default_rng(0).integers(0, spec.vocab, 200_000, dtype=np.uint16)
        tokens.tofile(folder / "train.bin")
    return folder


def run_case(name: str, folder: Path, device: str) -> dict[str, Any]:
    """Run a case in the way that suits the device. Raises RuntimeError."""
    return run_on_cpu(name, folder) if device == "cpu" else run_in_training(name, folder, device)


def possible(name: str, device: str) -> bool:
    """Return whether a device can run a case at all."""
    if device == "cpu":
        return True
    import torch

    words = CASES[name][1].split()
    processes = int(words[words.index("--nproc") + 1]) if "--nproc" in words else 1
    on_cpu = "--offload-activations" in words
    return processes <= torch.cuda.device_count() and not on_cpu


def _line(name: str, row: dict[str, Any]) -> str:
    traced, measured = (row[f"{key}_bytes"] / 2**20 for key in ("traced", "measured"))
    return f"{name:28} {traced:8.1f} MiB traced {measured:8.1f} measured {row['error']:+.2%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="names, comma-separated")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    arguments = parser.parse_args()
    names = arguments.only.split(",") if arguments.only else list(CASES)
    left_out = [name for name in names if not possible(name, arguments.device)]
    names = [name for name in names if name not in left_out]
    rows: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            try:
                row = rows[name] = run_case(name, Path(folder), arguments.device)
            except RuntimeError as error:
                failed[name] = str(error)
                print(failed[name], flush=True)
                continue
            print(_line(name, row), flush=True)
    errors = [abs(row["error"]) for row in rows.values()]
    small = [name for name, row in rows.items() if row["measured_bytes"] < LEAST_BYTES]
    summary = {
        "mean_absolute_error": statistics.fmean(errors),
        "worst_error": max(errors),
        "target_mean": TARGET_MEAN,
        "target_worst": TARGET_WORST,
        "cases": len(rows),
        "below_300_mib": small,
        "failed": failed,
        "left_out": left_out,
    }
    print(json.dumps(summary, indent=1))
    if not arguments.only:
        suffix = "" if arguments.device == "cpu" else "_gpu"
        print(save(f"memory_accuracy{suffix}", {**summary, "rows": rows}))


if __name__ == "__main__":
    main()
