"""The proof that a plan computes what a single process does: same batches, same numbers.

The reference is a plain loop over the whole global batch at once: no layout, no micro-batches, no
exchange, torch's own clipping and AdamW. It shares the model's code with what is proved, and
nothing else. Every rank runs it for itself, then runs its part of the plan, and compares what it
holds.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from outpace.experiment.wire import Wire
from outpace.nn.loss import IGNORED, LanguageModelObjective
from outpace.nn.transformer import Transformer
from outpace.parallel import Layout, Request, apply
from outpace.parallel.tensors import whole
from outpace.records.model import ModelSpec
from outpace.records.plan import Plan
from outpace.records.ranks import Ranks
from outpace.records.settings import TrainSettings
from outpace.train.optimizer import make_optimizer
from outpace.train.precision import make_mixed
from outpace.train.step import Stepper

Batch = dict[str, Tensor]
# Values this much smaller than the largest of their kind may be rounding: the gradient of a key
# projection's bias is truly zero.
FLOOR = 1e-6
# In the order in which a step makes them: what goes wrong first makes the rest wrong.
KINDS = ("used parameter", "loss", "gradient", "norm", "exp_avg", "exp_avg_sq", "parameter")
_DTYPES = {"fp64": torch.float64}


@dataclass(frozen=True)
class Trial:
    """What is trained, alike by the reference and by every plan."""

    spec: ModelSpec
    steps: int = 3
    global_batch: int = 16
    seq_len: int = 16
    lr: float = 1e-2
    clip: float = 0.05  # far below the norm of every step, so that clipping is always active
    seed: int = 0

    def batches(self) -> list[Batch]:
        """A global batch for each step; the ends of samples are padding, unevenly."""
        drawn = torch.Generator().manual_seed(self.seed)
        shape = (self.global_batch, self.seq_len + 1)
        made = []
        for _ in range(self.steps):
            tokens = torch.randint(0, self.spec.vocab, shape, generator=drawn)
            lengths = torch.randint(1, self.seq_len + 1, (self.global_batch, 1), generator=drawn)
            padded = torch.arange(self.seq_len) >= lengths
            targets = tokens[:, 1:].masked_fill(padded, IGNORED)
            made.append({"tokens": tokens[:, :-1].contiguous(), "targets": targets})
        return made

    def objective(self, plan: Plan) -> LanguageModelObjective:
        """The model with its loss, the same on every rank."""
        dtype = _DTYPES.get(plan.precision, torch.float32)
        model = Transformer(self.spec, self.seed).to(dtype)
        with torch.no_grad():  # large enough for every part to matter
            for parameter in model.parameters():
                if parameter.ndim >= 2:
                    parameter.mul_(4)
        return LanguageModelObjective(model, plan.loss)

    def settings(self) -> TrainSettings:
        """For the optimizer, whose for-loop has no kernels of its own."""
        return TrainSettings(optimizer="adamw-for-loop", lr=self.lr, clip=self.clip)


@dataclass
class Trace:
    """Whole tensors after each step, by kind and name: "gradient blocks.0.mlp.up.weight"."""

    steps: list[dict[str, dict[str, Tensor]]] = field(default_factory=list)

    def names(self) -> set[str]:
        """Of everything held after a step."""
        return {f"{kind} {name}" for kind, held in self.steps[0].items() for name in held}


def reference(trial: Trial, plan: Plan) -> Trace:
    """Train on one process, each global batch at once."""
    objective = trial.objective(plan)
    parameters = dict(objective.model.named_parameters())
    optimizer = make_optimizer(parameters.items(), trial.settings())
    trace = Trace()
    for batch in trial.batches():
        used = {name: p.detach().clone() for name, p in parameters.items()}
        loss_sum, count = objective(batch)
        (loss_sum / count).backward()
        gradients = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
        norm = nn.utils.clip_grad_norm_(parameters.values(), trial.clip)
        optimizer.step()
        optimizer.zero_grad()
        held = _step_of(used, loss_sum.detach(), count, gradients, norm)
        trace.steps.append({**held, **_state(parameters.items(), optimizer)})
    return trace


def _step_of(
    used: dict[str, Tensor],
    loss_sum: Tensor,
    count: Tensor,
    gradients: dict[str, Tensor],
    norm: Tensor,
) -> dict[str, dict[str, Tensor]]:
    return {
        "used parameter": used,
        "loss": {"mean": loss_sum / count, "tokens": count.double()},
        "gradient": gradients,
        "norm": {"before clipping": norm},
    }


def _state(
    named: Iterable[tuple[str, nn.Parameter]], optimizer: torch.optim.Optimizer | None
) -> dict[str, dict[str, Tensor]]:
    """Copies of all parameters and of the optimizer's moments, whole. Collective."""
    found: dict[str, dict[str, Tensor]] = {"parameter": {}, "exp_avg": {}, "exp_avg_sq": {}}
    state = {} if optimizer is None else optimizer.state
    for name, parameter in named:
        found["parameter"][name] = whole(parameter.detach()).clone()
        for kind in ("exp_avg", "exp_avg_sq"):
            if parameter in state:
                found[kind][name] = whole(state[parameter][kind]).clone()
    return found


def planned(
    trial: Trial,
    plan: Plan,
    ranks: Ranks,
    control: dist.ProcessGroup,
    wire: Wire,
    spoil: Callable[[Layout], None] = lambda layout: None,
) -> Trace:
    """Train under the plan, this rank's part.

    `wire` counts the last step, since the first may build buckets. `spoil` plants a fault.
    """
    device = torch.device("cpu")
    settings = trial.settings()
    layout = apply(Request(trial.objective(plan), plan, ranks, device))
    optimizer = make_optimizer(layout.named_parameters(), settings, layout.make_optimizer)
    spoil(layout)
    seen: dict[str, Tensor] = {}
    used: dict[str, Tensor] = {}
    _watch_use(layout.model, used, wire)

    def look() -> None:
        with wire.paused():
            for name, parameter in layout.named_parameters():
                if parameter.grad is not None:
                    seen[name] = whole(parameter.grad).clone()

    stepper = Stepper(
        layout=layout,
        optimizer=optimizer,
        mixed=make_mixed(plan.precision, device, True),
        plan=plan,
        clip=trial.clip,
        device=device,
        control=control,
        expected_targets=trial.global_batch * trial.seq_len,
        targets_known=False,
        on_gradients=look,
    )
    trace = Trace()
    for step, batch in enumerate(trial.batches(), 1):
        seen.clear()
        used.clear()
        stepper.begin()
        with wire if step == trial.steps else nullcontext():
            raw = stepper.run(step, trial.lr, shares(batch, plan, ranks.rank), lambda: False)
        held = _step_of(dict(used), raw.totals[0], raw.totals[1], dict(seen), raw.grad_norm)
        trace.steps.append({**held, **_state(*_counting(layout, optimizer))})
    return trace


def _counting(
    layout: Layout, optimizer: torch.optim.Optimizer
) -> tuple[Iterable[tuple[str, nn.Parameter]], torch.optim.Optimizer | None]:
    """This rank's parameters and optimizer, where a checkpoint would have them from it."""
    model, holder = layout.saved(optimizer)
    return (() if model is None else layout.named_parameters()), holder


def _watch_use(model: nn.Module, used: dict[str, Tensor], wire: Wire) -> None:
    """Copy each parameter as a step's first forward finds it: gathered, if it was sharded."""

    def copy(name: str) -> Callable[..., None]:
        def look(module: nn.Module, _arguments: object) -> None:
            for own, parameter in module.named_parameters(name, recurse=False):
                if own not in used:
                    with wire.paused():
                        used[own] = whole(parameter.detach()).clone()

        return look

    for name, module in model.named_modules():
        if next(module.parameters(recurse=False), None) is not None:
            module.register_forward_pre_hook(copy(name))


def shares(batch: Batch, plan: Plan, rank: int) -> list[Batch | None]:
    """A rank's micro-batches of a global batch, in the order in which the loader gives them."""
    size, degree = plan.samples_read, plan.readers
    first = plan.data_rank(rank)
    samples = len(batch["tokens"])
    if first is None:
        return [None] * plan.accumulation(samples)
    begins = range(first * size, samples, degree * size)
    return [{name: part[begin : begin + size] for name, part in batch.items()} for begin in begins]


@dataclass(frozen=True)
class Difference:
    """A tensor of a step, and how far it is from the reference's."""

    step: int
    kind: str
    name: str
    relative: float

    def __str__(self) -> str:
        return f"{self.kind} {self.name} (step {self.step})"

    @property
    def cause(self) -> tuple[int, int, float]:
        """Sorts first what the others may follow from."""
        return self.step, KINDS.index(self.kind), -self.relative


def differences(expected: Trace, found: Trace) -> Iterator[Difference]:
    """Every tensor that `found` holds against the reference's.

    Relative to the largest value in the tensor, at least FLOOR of the largest of its kind.
    """
    for number, (wanted, held) in enumerate(zip(expected.steps, found.steps, strict=True), 1):
        for kind, tensors in held.items():
            largest = max(float(t.abs().max()) for t in wanted[kind].values())
            for name, tensor in tensors.items():
                known = wanted[kind].get(name)
                if known is None:
                    yield Difference(number, kind, f"{name}, which one process has not,", math.inf)
                    continue
                scale = max(float(known.abs().max()), FLOOR * largest)
                apart = float((tensor.to(known.dtype) - known).abs().max())
                # NaN is no difference at all to `max`, so it is made the largest.
                relative = apart / scale if apart == apart else math.inf
                yield Difference(number, kind, name, relative)
