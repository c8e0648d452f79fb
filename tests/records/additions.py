"""An optimizer, a strategy and a model family that outpace does not have, added in a folder.

    python tests/records/additions.py FOLDER estimate|train

Files of outpace that had to know are copied there, changed, and imported in place of those of the
package; what was tried is written to standard output as JSON.
"""

import importlib.util
import json
import multiprocessing
import os
import socket
import sys
from collections.abc import Mapping
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[2] / "outpace"
NEW = ""  # what a file that is new begins as

# By kind of addition and file: the places that change, each as (what stands there, what will).
Edits = Mapping[str, list[tuple[str, str]]]
OPTIMIZER: Edits = {
    "records/optimizers.py": [
        ('"adafactor", "muon", "sgd",\n]', '"adafactor", "muon", "sgd", "lion",\n]'),
        (
            "OPTIMIZER_TRAITS: Mapping[OptimizerName, OptimizerTraits] = {",
            "OPTIMIZER_TRAITS: Mapping[OptimizerName, OptimizerTraits] = {\n"
            '    "lion": OptimizerTraits(\n'
            "        52, Operators(5, 5), StepTensors(1.0, 1.0, 1.0), moments=1, exact=True,\n"
            "        lr_factor=0.1,\n"
            "    ),",
        ),
    ],
    "optim/build.py": [
        (
            '    if name == "adafactor":',
            '    if name == "lion":\n'
            "        from outpace.optim.lion import Lion\n\n"
            '        return Lion(groups, {"lr": lr, "betas": betas})\n'
            '    if name == "adafactor":',
        )
    ],
    "optim/lion.py": [
        (
            NEW,
            '''"""Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023)."""

import torch

from outpace.optim.state_dtypes import KeepsDtypes


class Lion(KeepsDtypes):
    """Steps by the sign of a momentum."""

    @torch.no_grad()
    def step(self, closure=None):
        """Step each parameter that has a gradient."""
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if not self.state[parameter]:
                    self.state[parameter] = self.initial_state(parameter, group)
                average = self.state[parameter]["exp_avg"]
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(group["lr"] * average.lerp(parameter.grad, 1 - first).sign_())
                average.lerp_(parameter.grad, 1 - second)

    def initial_state(self, parameter, group):
        """Return a parameter's state before its first step."""
        return {"exp_avg": torch.zeros_like(parameter)}
''',
        )
    ],
}
STRATEGY: Edits = {
    "records/strategies.py": [
        ('"cp", "3d",\n]', '"cp", "3d", "late",\n]'),
        (
            "TRAITS: Mapping[Strategy, StrategyTraits] = {",
            "TRAITS: Mapping[Strategy, StrategyTraits] = {\n"
            '    "late": StrategyTraits(\n'
            '        module="late", family="DDP", axes=("dp_replicate",),\n'
            '        title="late all-reduce", shares_buffers=True,\n'
            "    ),",
        ),
    ],
    "parallel/late.py": [
        (
            NEW,
            '''"""Replicas that add up their gradients one by one, after the backward."""

import torch.distributed as dist

from outpace.parallel.layout import Layout, LayoutRequest


class Late(Layout):
    """Replicas whose gradients are reduced when all of them are there."""

    def gradients(self, batches, hooks):
        """Run forward and backward, and add gradients up."""
        totals = super().gradients(batches, hooks)
        for gradient in self.local_gradients():
            dist.all_reduce(gradient)
        return totals


def apply(request: LayoutRequest) -> Layout:
    """Use the objective as it is: every rank draws it from the same seed."""
    return Late(request.objective)
''',
        )
    ],
    "planner/communication/volume.py": [
        ('    "ddp": _count_ddp,', '    "ddp": _count_ddp,\n    "late": _count_ddp,')
    ],
}
FAMILY: Edits = {
    "records/model_families.py": [
        ('"qwen3", "bert"]', '"qwen3", "bert", "ministral"]'),
        (
            "FAMILY_TRAITS: Mapping[Family, FamilyTraits] = {",
            "FAMILY_TRAITS: Mapping[Family, FamilyTraits] = {\n"
            '    "ministral": FamilyTraits(\n'
            '        "Ministral", {**_LLAMA_LIKE, "norm_eps": 1e-5}, windows="all"\n'
            "    ),",
        ),
    ],
    "interop/outline_readers.py": [
        (
            '        "mistral": ("Mistral", _read_llama_like),',
            '        "mistral": ("Mistral", _read_llama_like),\n'
            '        "ministral": ("Ministral", _read_llama_like),',
        )
    ],
}
ADDITIONS: Mapping[str, Edits] = {
    "optimizer": OPTIMIZER, "strategy": STRATEGY, "family": FAMILY,
}  # fmt: skip
SPEC = {
    "family": "ministral", "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 64,
    "vocab": 512, "max_positions": 128, "sliding_window": 16,
}  # fmt: skip


class Finder(MetaPathFinder):
    """Finds the changed modules by their names in the package."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self.files = files

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Return the spec of a changed module, None of any other."""
        file = self.files.get(fullname)
        return file and importlib.util.spec_from_file_location(fullname, file)


def write(folder: Path) -> dict[str, Path]:
    """Write the changed files; return them by their modules' names."""
    files = {}
    for edits in ADDITIONS.values():
        for name, changes in edits.items():
            new = changes[0][0] == NEW
            text = "" if new else (PACKAGE / name).read_text("utf-8")
            for before, after in changes:
                if not new and text.count(before) != 1:
                    raise SystemExit(f"{name} has {before!r} {text.count(before)} times")
                text = after if new else text.replace(before, after)
            file = folder / name.replace("/", "_")
            file.write_text(text, "utf-8")
            files["outpace." + name.removesuffix(".py").replace("/", ".")] = file
    return files


def estimate(folder: Path) -> dict[str, Any]:
    """Ask the planner, the exports and the settings about all three."""
    import outpace
    from outpace.interop.export import FORMATS, export_plan
    from outpace.planner.communication.volume import step_traffic
    from outpace.records.plan import Plan

    spec = outpace.ModelSpec.parse(SPEC, "test")
    path = folder / "ministral.json"
    path.write_text(spec.model_dump_json())
    values = {"dp_replicate": 8, "micro_batch": 4, "precision": "fp32"}
    found: dict[str, Any] = {}
    for name, more in {
        "ddp": {"strategy": "ddp"}, "late": {"strategy": "late"},
        "sgd": {"strategy": "ddp", "optimizer": "sgd"},
        "lion": {"strategy": "ddp", "optimizer": "lion"},
    }.items():  # fmt: skip
        plan = Plan.parse({**values, **more}, "test")
        planned = outpace.estimate(path, plan, "hgx-h100", seq_len=64, global_batch=32)
        written = [export_plan(format, plan, spec, global_batch=32, seq_len=64)
                   for format in FORMATS]  # fmt: skip
        found[name] = {
            "title": planned.title,
            "memory": planned.estimate.memory,
            "step_s": planned.estimate.step_time_s,
            "notes": [note for one in written for note in one.notes],
            "traffic": step_traffic(plan, spec, global_batch=32, seq_len=64, rank=0).bytes_by_kind,
        }
    best = outpace.plan(path, "hgx-h100", seq_len=64, global_batch=64)
    found["best"] = best.plans[0].title
    settings = outpace.TrainSettings.parse({"strategy": "late", "optimizer": "lion"}, "test")
    found["settings"] = settings.model_dump(mode="json", include={"strategy", "optimizer"})
    return found


def train_rank(rank: int, port: int, settings: dict[str, Any]) -> None:
    """Train as one of two ranks."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    import outpace

    outpace.train(progress=False, **settings)


def train(folder: Path) -> dict[str, Any]:
    """Train the family by the optimizer, on one rank and under both strategies on two."""
    import torch
    import transformers

    import outpace
    from outpace.interop.models import open_model
    from outpace.jobs.inputs.model import load_model

    path = folder / "ministral.json"
    path.write_text(outpace.ModelSpec.parse(SPEC, "test").model_dump_json())
    data = folder / "text.txt"
    data.write_text("".join(f"the number {i} comes before {i + 1}\n" for i in range(4000)))
    common = {
        "model": str(path), "data": str(data), "seq_len": 64, "steps": 4, "global_batch": 4,
        "lr": 3e-3, "warmup": 0,
        "optimizer": "lion", "cache_dir": str(folder / "cache"), "device": "cpu", "threads": 1,
        "precision": "fp32", "compile": False, "sample_tokens": 0, "eval_batches": 1,
    }  # fmt: skip
    outpace.train(progress=False, out=str(folder / "single"), **common)
    for strategy in ("ddp", "late"):
        settings = {**common, "strategy": strategy, "out": str(folder / strategy)}
        context = multiprocessing.get_context("fork")
        with socket.socket() as held:  # no other program is given its port; rank 0 may listen there
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(("127.0.0.1", 0))
            places = [(rank, held.getsockname()[1], settings) for rank in range(2)]
            ranks = [context.Process(target=train_rank, args=place) for place in places]
            for process in ranks:
                process.start()
            for process in ranks:
                process.join()
                if process.exitcode:
                    raise SystemExit(f"a rank under {strategy} ended with {process.exitcode}")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "late/model")
    ids = torch.arange(32)[None]
    opened = open_model(str(folder / "late"), folder / "cache")
    ours = load_model(opened, opened.spec)
    return {
        "losses": {
            name: [
                json.loads(line)["loss"]
                for line in (folder / name / "metrics.jsonl").read_text().splitlines()
            ]
            for name in ("single", "ddp", "late")
        },
        "class": type(model).__name__,
        "difference": float((model(ids).logits - ours.logits(ours(ids))).abs().max()),
    }


if __name__ == "__main__":
    place = Path(sys.argv[1])
    sys.meta_path.insert(0, Finder(write(place)))
    print(json.dumps({"estimate": estimate, "train": train}[sys.argv[2]](place)))
