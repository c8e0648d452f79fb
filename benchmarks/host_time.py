"""Host time of a step: outpace's compared with that of transformers' own eager GPT-2.

    python benchmarks/host_time.py            # records results/host_time.json
    python benchmarks/host_time.py --quick    # a few steps, records nothing
    python benchmarks/host_time.py --only plain,full

A GPU that computes faster than its host gives it work waits for the host, so the step takes as long
as Python and torch's dispatch. Here, almost nothing is left to compute: 12 layers of width 24 and
16 tokens under bf16 autocast on one thread of a CPU. outpace runs as on CUDA: torch's fused
attention, GELU and norms instead of its operators for CPUs, queries, keys and values by one matmul,
the loss for `cuda`, Muon's matrices in batches, SGD as one kernel; what a GPU compiles is eager.
Steps (forward, backward, clipping, optimizer) of both alternate, A B, B A, in one process; with
several ranks, in each of two processes. The process's time on cores is measured, which other load
on the machine disturbs less than wall-clock time. The ratio is the median over pairs, with its 95 %
interval; operators are counted in one step. If transformers lacks an option (selective
checkpointing, low-bit optimizers), it runs a plain step.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from overhead import interval
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from outpace.jobs.ranks.process_groups import process_groups
from outpace.nn import block, kept_matmuls
from outpace.nn.loss import LanguageModelObjective
from outpace.nn.mixed_precision import make_mixed
from outpace.nn.model_options import apply_options
from outpace.nn.transformer import Transformer
from outpace.optim import build
from outpace.optim.build import leave_compiler_out, make_optimizer
from outpace.parallel import LayoutRequest, apply
from outpace.records.axes import fill_axes
from outpace.records.model import ModelSpec
from outpace.records.plan import Plan
from outpace.records.ranks import Ranks
from outpace.records.settings import TrainSettings
from outpace.training.accounting import Costs, Ledger
from outpace.training.step import Stepper

LAYERS, WIDTH, HEADS, TOKENS, VOCAB = 12, 24, 2, 16, 64
LR, CLIP = 1e-3, 1.0
TARGET = 1.2
BOOKKEEPING_MS = 0.2
CPU = torch.device("cpu")
SPEC = {"family": "gpt2", "layers": LAYERS, "hidden": WIDTH, "heads": HEADS, "ffn": 4 * WIDTH,
        "vocab": VOCAB, "max_positions": TOKENS}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """Options of outpace's plan, and of transformers' run to compare."""

    options: dict[str, Any]
    micro_batches: int = 1
    processes: int = 1
    checkpoints: bool = False  # whether transformers checkpoints, too
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW


def _sgd(parameters: Any, lr: float, **_: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9, foreach=False)


CASES = {
    "plain": Case({}),
    "accumulation": Case({}, micro_batches=4),
    "full": Case({"checkpointing": "full"}, checkpoints=True),
    "selective": Case({"checkpointing": "selective"}),
    "adamw-foreach": Case({"optimizer": "adamw-foreach"}),
    "adamw-bf16": Case({"optimizer": "adamw-bf16"}),
    "adamw-8bit": Case({"optimizer": "adamw-8bit"}),
    "adafactor": Case({"optimizer": "adafactor"}),
    "muon": Case({"optimizer": "muon"}),
    "sgd": Case({"optimizer": "sgd"}, optimizer=_sgd),
    "ddp": Case({"strategy": "ddp"}, processes=2),
    "zero3": Case({"strategy": "zero3"}, processes=2),
}


class Operators(TorchDispatchMode):
    """Counts the operators that are dispatched inside the context."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """Choose no operators for CPUs, and step all parameters with the same operators."""
    before, together = block.suits_operator, build.steps_together
    for module in (block, kept_matmuls):
        module.suits_operator = lambda *_: False
    build.steps_together = lambda _: True
    try:
        yield
    finally:
        build.steps_together = together
        for module in (block, kept_matmuls):
            module.suits_operator = before


def batches(count: int) -> list[torch.Tensor]:
    """Return batches of random tokens, (1, S) each."""
    drawn = torch.Generator().manual_seed(0)
    return list(torch.randint(0, VOCAB, (count, 1, TOKENS), generator=drawn))


def make_stepper(case: Case, ranks: Ranks, control: dist.ProcessGroup | None) -> Stepper:
    """Return outpace's step, as in `outpace train`."""
    strategy = case.options.get("strategy", "single")
    plan = Plan.parse(
        {"strategy": strategy, "precision": "bf16", "optimizer": "adamw-fused", "micro_batch": 1,
         **fill_axes(strategy, ranks.world_size, {}), **case.options}, "host_time",
    )  # fmt: skip
    mixed = make_mixed(plan.precision, CPU, False)
    model = Transformer(ModelSpec.parse(SPEC, "host_time"), 0)
    for one in model.blocks:
        one.attention.mix, one.attention.joins = block.fused_attention, True
    objective = LanguageModelObjective(model, "plain", mixed.dtype)
    objective.runs_on = "cuda"
    apply_options(model, plan)
    layout = apply(LayoutRequest(objective, plan, ranks, CPU))
    leave_compiler_out()
    settings = TrainSettings(lr=LR)
    optimizer = make_optimizer(layout.named_parameters(), plan.optimizer, settings)
    targets = TOKENS * case.micro_batches * ranks.world_size
    return Stepper(
        layout=layout, optimizer=optimizer, mixed=mixed, plan=plan, clip=CLIP, device=CPU,
        control=control, expected_targets=targets, targets_known=True,
    )  # fmt: skip


def outpace_step(
    case: Case, ranks: Ranks, control: dist.ProcessGroup | None
) -> Callable[[], object]:
    """Return a function that runs one step and accounts for it."""
    stepper = make_stepper(case, ranks, control)
    given = [{"tokens": one, "targets": one} for one in batches(case.micro_batches)]
    ledger, done = Ledger(Costs(1, TOKENS, None, None, None), 0, 0), 0

    def step() -> None:
        nonlocal done
        done += 1
        stepper.begin()
        ledger.record(stepper.run(done, LR, given, lambda: False))

    return step


def transformers_step(case: Case) -> Callable[[], object]:
    """Return a step of a loop over transformers' GPT-2, as users write it."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model: nn.Module = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB, n_positions=TOKENS, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS,
            resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=0,
            attn_implementation="sdpa",
        )
    )  # fmt: skip
    model.train()
    if case.checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if case.options.get("strategy") == "zero3":
        low = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for one in model.transformer.h:
            fully_shard(one, mp_policy=low)
        fully_shard(model, mp_policy=low)
    elif case.processes > 1:
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    parameters = list(model.parameters())
    fused = {} if case.optimizer is _sgd else {"fused": True}
    optimizer = case.optimizer(parameters, lr=LR, **fused)
    given = batches(case.micro_batches)
    casts = case.options.get("strategy") != "zero3"

    def step() -> None:
        for tokens in given:
            with torch.autocast("cpu", torch.bfloat16, enabled=casts):
                loss = model(input_ids=tokens, labels=tokens).loss
            (loss / len(given)).backward()
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def bookkeeping_step() -> Callable[[], object]:
    """Return a step without gradients, clipping and optimizer: only outpace's own work is left."""
    stepper = make_stepper(Case({}), Ranks(), None)
    totals, norm = torch.ones(2, dtype=torch.float64), torch.ones(())
    layout, optimizer = stepper._layout, stepper._optimizer
    layout.gradients = lambda *_: totals
    layout.clip = lambda *_: norm
    optimizer.step = lambda *_: None
    optimizer.zero_grad = lambda **_: None
    ledger, done = Ledger(Costs(1, TOKENS, None, None, None), 0, 0), 0

    def step() -> None:
        nonlocal done
        done += 1
        stepper.begin()
        ledger.record(stepper.run(done, LR, [], lambda: False))

    return step


def timed(step: Callable[[], object]) -> float:
    """Return the seconds of processor time of a step."""
    began = time.process_time()
    step()
    return time.process_time() - began


def count_operators(step: Callable[[], object]) -> int:
    """Return the number of operators dispatched in one step."""
    with Operators() as operators:
        step()
    return operators.count


def measure(
    case: Case, rounds: int, ranks: Ranks, control: dist.ProcessGroup | None
) -> dict[str, Any]:
    """Measure both in turn."""
    ours, theirs = outpace_step(case, ranks, control), transformers_step(case)
    for step in (ours, theirs):
        for _ in range(5):
            step()
    found: dict[str, Any] = {
        "operators": {"outpace": count_operators(ours), "transformers": count_operators(theirs)}
    }
    pairs = []
    for number in range(rounds):
        if number % 2:
            b, a = timed(theirs), timed(ours)
        else:
            a, b = timed(ours), timed(theirs)
        pairs.append((a, b))
    ratio, low, high = interval([a / b for a, b in pairs])
    return found | {
        "ratio": ratio, "low": low, "high": high, "reached": ratio <= TARGET,
        "median_outpace_s": statistics.median(a for a, _ in pairs),
        "median_transformers_s": statistics.median(b for _, b in pairs),
        "least_outpace_s": min(a for a, _ in pairs),
        "least_transformers_s": min(b for _, b in pairs),
        "pairs_s": pairs,
    }  # fmt: skip


def worker(name: str, rounds: int, out: Path) -> None:
    """Run one rank of a case."""
    from outpace.launch.launcher_env import ranks_from

    torch.set_num_threads(1)
    case, ranks = CASES[name], ranks_from(os.environ) or Ranks()
    with as_on_cuda():
        if case.processes == 1:
            found = measure(case, rounds, ranks, None)
        else:
            with process_groups(ranks, CPU, 300.0) as groups:
                # On one host, DDP uses torch's collective as on CUDA, instead of the CPU's.
                alone = ranks.model_copy(update={"local_world_size": 1})
                found = measure(case, rounds, alone, groups.control)
    if ranks.rank == 0:
        out.write_text(json.dumps(found))


def run_case(name: str, rounds: int) -> dict[str, Any]:
    """Run a case in separate processes."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        inner = [__file__, "--worker", name, "--rounds", str(rounds), "--out", str(out)]
        command = [sys.executable, *inner]
        if CASES[name].processes > 1:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                       f"--nproc-per-node={CASES[name].processes}", *inner]  # fmt: skip
        subprocess.run(command, check=True)
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def measure_bookkeeping(rounds: int) -> dict[str, Any]:
    """Measure each step's seconds without computation."""
    torch.set_num_threads(1)
    step = bookkeeping_step()
    seconds = [timed(step) for _ in range(rounds + 5)][5:]
    median = statistics.median(seconds)
    return {"median_s": median, "reached": median * 1000 <= BOOKKEEPING_MS, "seconds": seconds}


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--only", help="cases, separated by commas; nothing is recorded")
    parser.add_argument("--quick", action="store_true", help="a few steps; nothing is recorded")
    parser.add_argument("--worker", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        worker(asked.worker, asked.rounds, asked.out)
        return
    rounds = 6 if asked.quick else asked.rounds
    cases = {}
    for name in asked.only.split(",") if asked.only else CASES:
        cases[name] = one = run_case(name, rounds)
        print(f"{name:14} {one['ratio']:.2f} ({one['low']:.2f} – {one['high']:.2f}) times, "
              f"{one['median_outpace_s'] * 1000:.1f} ms; operators {one['operators']['outpace']} "
              f"beside {one['operators']['transformers']}", flush=True)  # fmt: skip
    own = measure_bookkeeping(20 * rounds)
    print(f"bookkeeping    {own['median_s'] * 1000:.3f} ms")
    if not (asked.quick or asked.only):
        from recording import save

        shape = {**SPEC, "tokens": TOKENS, "precision": "bf16", "threads": 1}
        targets = {"ratio": TARGET, "bookkeeping_ms": BOOKKEEPING_MS}
        print(save("host_time", {"shape": shape, "rounds": rounds, "targets": targets,
                                 "cases": cases, "bookkeeping": own}))  # fmt: skip


if __name__ == "__main__":
    main()
