"""Tries every option under strategies on two ranks, and prints what each came to, a line each.

python tests/parallel/options.py OPTION[,OPTION ...] [STRATEGY ...]

A line is JSON: strategy, option, and either `apart`, the worst difference from what it must equal,
or `refused`, the sentence, or `crashed`. (What accumulation, clipping, tied weights and unequal
stages come to, `outpace verify` says: they are always part of it.)
"""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import torch
import torch.distributed as dist
from forked import world
from runs import CPU, SPEC, Run, alone, apart, loss_of, plan_of

from outpace.experiment.parity import Trial
from outpace.jobs.ranks.process_groups import Groups
from outpace.parallel import Layout, StepHooks
from outpace.records.errors import BadInputError
from outpace.records.plan import Strategy
from outpace.training.evaluate import evaluate
from outpace.training.synthetic import rank_micro_batches

DROPS = SPEC.model_copy(update={"dropout": 0.2})
PLAIN = Trial(SPEC, steps=2)
WITH_DROPOUT = Trial(DROPS, steps=2)


def equals_one_process(name: str, steps: int = 2, **options: Any) -> float:
    """The worst difference of weights and moments from a single process without the option."""
    known, plan = alone(replace(PLAIN, steps=steps)), plan_of(name, **options)

    def train(groups: Groups) -> float:
        run = Run(PLAIN, plan, groups)
        for number in range(1, steps + 1):
            run.step(number)
        return apart(run.held(), known[-1].held)

    return max(world(2, train))


def compiled(name: str) -> float:
    """As above; raises where the compiler has made no graph of a block."""
    plan = plan_of(name, compile=True)
    known = alone(PLAIN)

    def train(groups: Groups) -> tuple[float, int, dict[str, int]]:
        run = Run(PLAIN, plan, groups)
        for number in (1, 2):
            run.step(number)
        seen = torch._dynamo.utils.counters
        return (
            apart(run.held(), known[-1].held),
            seen["stats"]["unique_graphs"],
            seen["graph_break"],
        )

    found = world(plan.world_size, train)
    print([(graphs, breaks) for _, graphs, breaks in found], file=sys.stderr)
    assert any(graphs for _, graphs, _ in found), "nothing was compiled"
    return max(worst for worst, _, _ in found)


def low(name: str, precision: str) -> float:
    """The worst relative difference of losses from a single process in the same precision."""
    known = alone(PLAIN, precision=precision)
    plan = plan_of(name, precision=precision)

    def train(groups: Groups) -> float:
        run = Run(PLAIN, plan, groups)
        losses = []
        for number in (1, 2):
            raw = run.step(number)
            assert not raw.figures().skipped
            losses.append(loss_of(raw))
        return max(abs(loss / one.loss - 1) for loss, one in zip(losses, known, strict=True))

    return max(world(2, train))


def overflow(name: str) -> float:
    """0 where an infinite gradient on one rank makes all ranks skip, and the next step is done."""
    plan = plan_of(name, precision="fp16")

    def train(bad: int, groups: Groups) -> tuple[bool, bool, float]:
        def spoil(layout: Layout) -> None:
            computed = layout.gradients

            def gradients(batches: Any, hooks: StepHooks) -> torch.Tensor:
                if groups.ranks.rank == bad and not calls:
                    scale = hooks.scale
                    hooks = replace(hooks, scale=lambda loss: scale(loss) * float("inf"))
                calls.append(1)
                return computed(batches, hooks)

            layout.gradients = gradients  # type: ignore[method-assign]

        calls: list[int] = []
        run = Run(PLAIN, plan, groups, spoil)
        before = run.held()
        first = run.step(1)
        same = all(torch.equal(t, before[n]) for n, t in run.held().items() if n in before)
        assert same or not first.figures().skipped, "a skipped step has changed something"
        second = run.step(2)
        assert run.mixed.scaler is not None
        return first.figures().skipped, second.figures().skipped, run.mixed.scaler.get_scale()

    skips = []
    for bad in (0, 1):
        found = world(2, partial(train, bad))
        assert len(set(found)) == 1, f"ranks do not agree when rank {bad} overflows: {found}"
        assert not found[0][1], "the step after was skipped too"
        skips.append(found[0][0])
    assert any(skips), "no overflow was noticed"
    return 0.0


def dropout(name: str) -> float:
    """How far apart ranks end that hold the same weights. Refuses masks that are all alike."""
    plan = plan_of(name)

    def train(groups: Groups) -> tuple[dict[str, torch.Tensor], list[float]]:
        run = Run(WITH_DROPOUT, plan, groups)
        losses = [loss_of(run.step(number)) for number in (1, 2)]
        return run.held(), losses

    found = world(2, train)
    worst = 0.0
    for held, losses in found[1:]:
        worst = max(worst, apart(held, found[0][0]))
        assert losses == found[0][1] or abs(losses[0] / found[0][1][0] - 1) < 1e-12
    known = [step.loss for step in alone(PLAIN)]
    assert found[0][1] != known, "nothing was dropped"
    return worst


def recomputed_dropout(name: str) -> float:
    """The worst difference that recomputing activations makes to a run with dropout."""

    def train(checkpointing: str, groups: Groups) -> dict[str, torch.Tensor]:
        run = Run(WITH_DROPOUT, plan_of(name, checkpointing=checkpointing), groups)
        for number in (1, 2):
            run.step(number)
        return run.held()

    plan_of(name, checkpointing="full")
    kept, again = (world(2, partial(train, mode)) for mode in ("none", "full"))
    return max(apart(one, other) for one, other in zip(again, kept, strict=True))


def evaluation(name: str) -> float:
    """The relative difference of the held-out loss from a single process's; dropout is off."""
    plan = plan_of(name)

    def measure(of: str, groups: Groups) -> float:
        run = Run(WITH_DROPOUT, plan_of(of), groups)
        steps = [
            rank_micro_batches(batch, run.plan, groups.ranks.rank) for batch in PLAIN.batches()
        ]
        return evaluate(
            run.layout, steps, step=0, mixed=run.mixed, device=CPU, group=groups.control
        ).loss

    (one,) = world(1, partial(measure, "single"))
    return max(abs(loss / one - 1) for loss in world(plan.world_size, partial(measure, name)))


def export(name: str) -> float:
    """The worst difference of the exported model's weights, after a step, from one process's."""
    known = alone(replace(PLAIN, steps=1))[0].held

    def train(groups: Groups) -> float:
        run = Run(PLAIN, plan_of(name), groups)
        run.step(1)
        model = run.layout.whole_model(groups.ranks.rank == 0)
        dist.barrier(groups.control)
        if model is None:
            return 0.0
        weights = {f"model.{n}": t for n, t in model.state_dict().items()}
        assert weights.keys() == {n for n in known if n.startswith("model.")}
        tokens = PLAIN.batches()[0]["tokens"][:1]
        assert bool(torch.isfinite(model.double()(tokens)).all())  # it computes, too
        return apart(weights, known)

    return max(world(2, train))


OPTIONS: Mapping[str, Callable[[str], float]] = {
    "checkpointing selective": partial(equals_one_process, checkpointing="selective"),
    "checkpointing full": partial(equals_one_process, checkpointing="full"),
    "checkpointing some": partial(
        equals_one_process, checkpointing="attention", checkpoint_every=2
    ),
    "loss chunked": partial(equals_one_process, loss="chunked"),
    "bf16": partial(low, precision="bf16"),
    "fp16": partial(low, precision="fp16"),
    "overflow": overflow,
    "dropout": dropout,
    "recomputed dropout": recomputed_dropout,
    "evaluation": evaluation,
    "export": export,
    "compile": compiled,
    "offload activations": partial(equals_one_process, offload_activations="disk"),
    "offload parameters": partial(equals_one_process, offload_parameters="cpu"),
    "offload parameters disk": partial(equals_one_process, offload_parameters="disk"),
    "offload optimizer": partial(equals_one_process, offload_optimizer="cpu"),
    "offload optimizer disk": partial(equals_one_process, offload_optimizer="disk"),
}
# Horovod is not of torch; "servers" is ps where the servers step the optimizer.
STRATEGIES = (
    "servers",
    *(name for name in get_args(Strategy) if name not in ("single", "horovod")),
)


def tried(strategy: str, option: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = {
            "apart": OPTIONS[option](strategy if strategy == "single" else f"{strategy}@2")
        }
    except BadInputError as error:
        found = {"refused": str(error)}
    except RuntimeError as error:
        sentence = str(error).rpartition("BadInputError: ")
        found = {"refused": sentence[2].strip()} if sentence[1] else {"crashed": str(error)}
    return {"strategy": strategy, "option": option, **found}


def main() -> None:

    options = list(OPTIONS) if sys.argv[1] == "all" else sys.argv[1].split(",")
    for strategy in sys.argv[2:] or STRATEGIES:
        for option in options:
            print(json.dumps(tried(strategy, option)), flush=True)


if __name__ == "__main__":
    main()
