"""Proof that a plan computes the same as a single process from the same batches.

The reference is a plain loop over whole global batches: no layout, no micro-batches, no
collectives, torch's own clipping and AdamW. It shares only the model's code with the plan. Every
rank runs the reference, then its part of the plan, and compares tensors.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from outpace.experiment.tolerance import Tolerance
from outpace.nn.lora import adapters, add_adapters
from outpace.nn.loss import IGNORED, LanguageModelObjective
from outpace.nn.mixed_precision import DTYPES, lower_weights, make_mixed
from outpace.nn.model_options import apply_options
from outpace.nn.scratch_files import Scratch
from outpace.nn.transformer import Transformer, stream
from outpace.optim.build import Build, make_optimizer
from outpace.optim.master import master_weights
from outpace.parallel import Layout, LayoutRequest, apply
from outpace.parallel.deferred_init import parts_of
from outpace.parallel.offload import place_optimizer
from outpace.parallel.tensors import whole
from outpace.records.model import ModelSpec
from outpace.records.optimizers import ADAMW, OptimizerName
from outpace.records.plan import Plan
from outpace.records.ranks import Ranks
from outpace.records.settings import TrainSettings
from outpace.training.collective_counter import CollectiveCounter
from outpace.training.step import Stepper
from outpace.training.synthetic import Batch, rank_micro_batches

# Builds an optimizer from parameter groups, as a layout's `make_optimizer` does.
Place = Callable[[list[dict[str, Any]], Build], torch.optim.Optimizer]
# States of AdamW, SGD and Adafactor. KINDS is in the order of a step, so that an error comes before
# its effects.
MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer", "row_var", "col_var", "variance")
KINDS = ("used parameter", "loss", "gradient", "norm", *MOMENTS, "parameter")


LIMIT = 0.05  # far below the norm of every step, so clipping is always active


@dataclass(frozen=True)
class Trial:
    """A training run that is repeated in one process and under each plan to compare the results."""

    spec: ModelSpec
    steps: int = 3
    global_batch: int = 16
    seq_len: int = 16
    lr: float = 1e-2
    clip: float = LIMIT  # 0: no clipping
    padded: bool = True
    seed: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))  # this rank's device

    @property
    def eps(self) -> float:
        """AdamW's ε, so large that rounding errors hardly change parameters.

        A difference Δ in a clipped gradient changes AdamW's step m̂/(√v̂ + ε) by at most 2Δ/ε,
        since m̂ and √v̂ are means of the gradients and change by at most Δ each. With ε = 2 · steps
        · lr · clip, parameters change by at most Δ/clip over all steps. For a gradient that is
        truly zero, Δ is at most clip times the tolerance of the largest gradient, and the largest
        parameters are 1. So a gradient within its tolerance gives a parameter within its tolerance.
        With ε = 1e-8, rounding errors, amplified a million times, would change a key projection's
        bias; and a gradient that is wrong by a constant factor would go unnoticed, because the
        factor cancels in m̂/√v̂.
        """
        return 2 * self.steps * self.lr * LIMIT

    def batches(self) -> list[Batch]:
        """Return one global batch per step. If `padded`, samples have padding of random lengths."""
        drawn = torch.Generator().manual_seed(self.seed)
        shape = (self.global_batch, self.seq_len + 1)
        made = []
        for _ in range(self.steps):
            tokens = torch.randint(0, self.spec.vocab, shape, generator=drawn)
            lengths = torch.randint(1, self.seq_len + 1, (self.global_batch, 1), generator=drawn)
            padded = torch.arange(self.seq_len) >= lengths
            targets = tokens[:, 1:].masked_fill(padded & self.padded, IGNORED)
            batch = {"tokens": tokens[:, :-1].contiguous(), "targets": targets}
            made.append({name: part.to(self.device) for name, part in batch.items()})
        return made

    def objective(self, plan: Plan) -> LanguageModelObjective:
        """Return the model with its loss, in fp32 or fp64 and equal on every rank."""
        dtype = torch.float64 if plan.precision == "fp64" else torch.float32
        model = Transformer(self.spec, self.seed).to(self.device, dtype)
        with torch.no_grad():  # make weights large enough for every submodule to have an effect
            for parameter in model.parameters():
                if parameter.ndim >= 2:
                    parameter.mul_(4)
        add_adapters(model, plan, self.seed)
        self._randomise_adapters(model)
        return LanguageModelObjective(model, plan.loss, DTYPES[plan.precision], plan.compile)

    @torch.no_grad()
    def _randomise_adapters(self, model: Transformer) -> None:
        """Draw random values for LoRA's matrices B, which start at zero.

        While B is zero, A has no gradient and does not affect the output.
        """
        for name, (_, b, _) in adapters(model).items():
            drawn = torch.empty(b.shape, dtype=torch.float32)
            b.copy_(drawn.normal_(0.0, 0.2, generator=stream(self.seed, f"{name}.lora_b")))

    def optimizer(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        place: Place = lambda groups, build: build(groups),
        name: OptimizerName = "adamw-for-loop",
        wide_values: dict[str, Tensor] | None = None,
    ) -> torch.optim.Optimizer:
        """Return the optimizer, by default AdamW as a for-loop, which uses no special kernels.

        With `wide_values`, it updates fp32 copies of the parameters that start from these values.
        """
        settings = TrainSettings(lr=self.lr, clip=self.clip)
        masters = bool(wide_values)
        optimizer = make_optimizer(
            named, name, settings, place, master_weights=masters, wide_values=wide_values
        )
        for group in optimizer.param_groups:
            if name in ADAMW:
                group["eps"] = self.eps
        return optimizer


@dataclass
class Trace:
    """Unsharded tensors of a training run after each step.

    `steps` maps, for each step, a kind to tensors by name: ["gradient"]["blocks.0.mlp.up.weight"].
    """

    steps: list[dict[str, dict[str, Tensor]]] = field(default_factory=list)

    def names(self) -> set[str]:
        """Return the kind and name of each tensor, such as "gradient blocks.0.mlp.up.weight"."""
        return {f"{kind} {name}" for kind, held in self.steps[0].items() for name in held}


def reference(trial: Trial, plan: Plan) -> Trace:
    """Train in one process on whole global batches, and return the tensors of each step."""
    objective = trial.objective(plan)
    mixed = make_mixed(plan.precision, trial.device, True)
    wide_values = lower_weights(objective, mixed)
    parameters = dict(objective.model.named_parameters())
    name: OptimizerName = "adamw-for-loop" if plan.optimizer in ADAMW else plan.optimizer
    optimizer = trial.optimizer(parameters.items(), name=name, wide_values=wide_values)
    trace = Trace()
    for batch in trial.batches():
        used = {name: p.detach().clone() for name, p in parameters.items()}
        with mixed.cast():
            loss_sum, count = objective(batch)
        (loss_sum / count).backward()
        gradients = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
        norm = nn.utils.clip_grad_norm_(parameters.values(), trial.clip or math.inf)
        optimizer.step()
        optimizer.zero_grad()
        held = _step_tensors(used, loss_sum.detach(), count, gradients, norm)
        trace.steps.append({**held, **_gather_state(parameters.items(), optimizer)})
    return trace


def _step_tensors(
    used: dict[str, Tensor],
    loss_sum: Tensor,
    count: Tensor,
    gradients: dict[str, Tensor],
    norm: Tensor,
) -> dict[str, dict[str, Tensor]]:
    return {
        "used parameter": used,
        "loss": {"mean": loss_sum.double() / count, "tokens": count.double()},
        "gradient": gradients,
        "norm": {"before clipping": norm},
    }


def _gather_state(
    named: Iterable[tuple[str, nn.Parameter]], optimizer: torch.optim.Optimizer | None
) -> dict[str, dict[str, Tensor]]:
    """Return unsharded copies of parameters and optimizer moments, by kind and name.

    If the optimizer updates an fp32 copy of a parameter, the result has this copy. It has no 16-bit
    parameters that are trained without such a copy. All ranks must call this function together.
    """
    found: dict[str, dict[str, Tensor]] = {"parameter": {}}
    state = {} if optimizer is None else optimizer.state
    masters = master_weights(optimizer)
    for name, parameter in named:
        held = masters.get(parameter, parameter.detach())
        if held.itemsize > 2 or not parameter.requires_grad:
            found["parameter"][name] = whole(held).clone()
        for kind in MOMENTS:
            if kind in state.get(parameter, {}):
                found.setdefault(kind, {})[name] = whole(state[parameter][kind]).clone()
    return found


def train_under_plan(
    trial: Trial,
    plan: Plan,
    ranks: Ranks,
    control: dist.ProcessGroup,
    wire: CollectiveCounter,
    spoil: Callable[[Layout], None] = lambda layout: None,
) -> Trace:
    """Train under the plan on this rank, and return the unsharded tensors of each step.

    `wire` counts the bytes that the last step communicates; the first step may also communicate
    while it builds buckets. Tests pass `spoil`, which makes the layout wrong.
    """
    device = trial.device
    objective = trial.objective(plan)
    mixed = make_mixed(plan.precision, device, True, fully_shards=plan.fully_shards)
    whole_values = lower_weights(objective, mixed)
    scratch = Scratch()
    apply_options(objective.model, plan, scratch=scratch, device=device)
    layout = apply(LayoutRequest(objective, plan, ranks, device, scratch=scratch))
    place = partial(place_optimizer, layout, plan, scratch)
    wide_values = parts_of(layout, whole_values)
    optimizer = trial.optimizer(layout.named_parameters(), place, plan.optimizer, wide_values)
    spoil(layout)
    seen: dict[str, Tensor] = {}
    use = UsedParameters(wire)
    use.watch(cast(Transformer, layout.model))

    def keep_gradient(name: str, parameter: nn.Parameter) -> None:
        if parameter.grad is not None:
            with wire.pause():
                seen[name] = whole(parameter.grad).clone()

    def keep_gradients() -> None:
        for name, parameter in layout.named_parameters():
            keep_gradient(name, parameter)

    if plan.optimizer_in_backward:
        names = {parameter: name for name, parameter in layout.named_parameters()}
        layout.step_in_backward(
            optimizer, lambda parameter: keep_gradient(names[parameter], parameter)
        )
    stepper = Stepper(
        layout=layout,
        optimizer=optimizer,
        mixed=mixed,
        plan=plan,
        clip=trial.clip,
        device=device,
        control=control,
        expected_targets=trial.global_batch * trial.seq_len,
        targets_known=not trial.padded,
        on_gradients=keep_gradients,
    )
    trace = Trace()
    for step, batch in enumerate(trial.batches(), 1):
        seen.clear()
        use.found.clear()
        stepper.begin()
        with wire if step == trial.steps else nullcontext():
            raw = stepper.run(
                step, trial.lr, rank_micro_batches(batch, plan, ranks.rank), lambda: False
            )
        held = _step_tensors(
            dict(use.found), raw.totals[0], raw.totals[1], dict(seen), raw.grad_norm
        )
        trace.steps.append({**held, **_gather_state(*_checkpoint_parts(layout, optimizer))})
    return trace


def _checkpoint_parts(
    layout: Layout, optimizer: torch.optim.Optimizer
) -> tuple[Iterable[tuple[str, nn.Parameter]], torch.optim.Optimizer | None]:
    """Return the parameters and the optimizer that a checkpoint would save from this rank."""
    model, holder = layout.checkpoint_state(optimizer)
    return (() if model is None else layout.named_parameters()), holder


class UsedParameters:
    """Unsharded copies of parameters, taken in the first forward of a step.

    They have the dtype in which the forward uses them.
    """

    def __init__(self, wire: CollectiveCounter) -> None:
        self.found: dict[str, Tensor] = {}
        self._wire = wire

    def watch(self, model: Transformer) -> None:
        """Copy the parameters that each module itself has, when the module's forward begins."""
        for name, module in model.named_modules():
            if name and next(module.parameters(recurse=False), None) is not None:
                module.register_forward_pre_hook(partial(self._copy_parameters, name))
        last = model.head_transform or model.final_norm
        if last is not None:
            last.register_forward_pre_hook(lambda *_: self._copy_head(model))

    def _copy_parameters(self, name: str, module: nn.Module, _arguments: object) -> None:
        for own, parameter in module.named_parameters(name, recurse=False):
            self._copy(own, parameter)

    def _copy_head(self, model: Transformer) -> None:
        """Copy the head's weights, which the loss reads without calling a module."""
        tied = model.head is None
        self._copy("embed.tokens.weight" if tied else "head.weight", model.head_weight)
        if model.head_bias is not None:
            self._copy("head_bias", model.head_bias)

    def _copy(self, name: str, parameter: nn.Parameter) -> None:
        if name not in self.found:
            with self._wire.pause():
                self.found[name] = whole(parameter.detach()).clone()


@dataclass(frozen=True)
class Difference:
    """A tensor's relative difference from the reference in one step."""

    step: int
    kind: str
    name: str
    relative: float

    def __str__(self) -> str:
        return f"{self.kind} {self.name} (step {self.step})"

    @property
    def cause(self) -> tuple[int, int, float]:
        """Sort key that orders differing tensors by when training computes them.

        Among tensors of the same step and kind, the one with the largest difference comes first.
        """
        return self.step, KINDS.index(self.kind), -self.relative


def differences(expected: Trace, found: Trace, allowed: Tolerance) -> Iterator[Difference]:
    """Yield each tensor's difference between two runs, relative to the tensor's scale.

    The scale is usually the largest value (see Tolerance).
    """
    for number, (wanted, held) in enumerate(zip(expected.steps, found.steps, strict=True), 1):
        for kind, tensors in held.items():
            scales = _scales(kind, wanted[kind], expected.steps[0]["used parameter"], allowed)
            for name, tensor in tensors.items():
                known = wanted[kind].get(name)
                if known is None:
                    yield Difference(
                        number, kind, (f"{name}, which a single process does not have,"), math.inf
                    )
                    continue
                rounded = kind == "used parameter" and tensor.dtype != known.dtype
                apart = _largest_distance(tensor, known, allowed.gathered if rounded else 0.0)
                # `max` ignores NaN, so treat NaN as infinite.
                relative = apart / scales[name] if apart == apart else math.inf
                yield Difference(number, kind, name, relative)


def _largest_distance(tensor: Tensor, known: Tensor, roundoff: float) -> float:
    """Return the largest absolute difference of two tensors, minus the expected rounding error.

    `roundoff` is this error, relative to each value of `tensor`.
    """
    tensor = tensor.to(known.dtype)
    apart = (tensor - known).abs()
    if roundoff:
        apart = (apart - roundoff * tensor.abs()).clamp(min=0)
    return float(apart.max())


def _scales(
    kind: str, known: dict[str, Tensor], initial: dict[str, Tensor], allowed: Tolerance
) -> dict[str, float]:
    """Return the scale of each tensor, by which its difference is divided.

    `Tolerance` defines the scale, which is usually the tensor's largest value.
    """
    if kind == "loss":  # the token count must be exact
        return {"mean": float(known["mean"]), "tokens": 1.0}
    # 4-bit weights are codes, whose largest value means nothing.
    sizes = {
        name: float(tensor.abs().max()) if tensor.is_floating_point() else 1.0
        for name, tensor in known.items()
    }
    least_share = allowed.used if kind == "used parameter" else allowed.held
    if kind in ("parameter", "used parameter") and least_share < 1:
        changes = {n: float((t - initial[n]).abs().max()) for n, t in known.items()}
        largest = max(*changes.values(), least_share * max(sizes.values()))
        least = allowed.floor * largest
        return {n: max(changes[n], least, least_share * size) for n, size in sizes.items()}
    least = allowed.floor * max(sizes.values())
    return {name: max(size, least) for name, size in sizes.items()}
