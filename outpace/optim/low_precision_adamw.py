"""AdamW with moments in 16, 8 or 4 bits, for 32-bit or 16-bit weights.

Dettmers et al., "8-bit Optimizers via Block-wise Quantization", ICLR 2022, §2: each block of a
moment is divided by its largest magnitude and stored as indices (codes) into a table of 256 values.
Li et al., "Memory Efficient Optimizers with 4-bit States", NeurIPS 2023, §4: the same with tables
of 16 values. The table of the second moment, which is a divisor, has no zero. The tables are
torchao's.

torchao's own optimizers are not used: their states are tensor subclasses that a background save
cannot copy, their blocks span rows and so depend on how a tensor is sharded, their rounding draws
different random numbers on each replica, and they compile each step, even on a CPU. Here, each
block lies within a row. Codes and scales are plain tensors, sharded like the parameter, and have
the same values under any sharding by rows.
"""

import math
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from operator import is_
from typing import Any, Literal

import torch
from torch import Tensor, nn

from outpace.nn.dtensor import as_spread, is_spread, local, splits
from outpace.nn.torchao import torchao_module
from outpace.optim.compiled_step import CompiledStep
from outpace.optim.low_precision_moments import (
    MOMENTS,
    CodeTable,
    Moment,
    Numbers,
    Randomness,
    step_moments,
    step_numbers,
)
from outpace.optim.multi_tensor import group_parameters, has_no_memory, step_counts
from outpace.optim.rounding import Noise, Streams, draw_bits, make_streams
from outpace.optim.state_dtypes import KeepsDtypes
from outpace.planner.memory.optimizer_bytes import COUNTED_VALUES, scale_block_length
from outpace.records.optimizers import Kept


class LowPrecisionAdamW(KeepsDtypes):
    """AdamW that computes in fp32 and stores its moments in the format `kept`.

    bf16 moments and weights are rounded stochastically, because small changes would otherwise be
    lost: for β₂ > 0.998, a second moment decays by a fraction 1 − β₂ per step, which is less than
    half of bf16's last bit, and weights change even less. The random numbers (`noise`) depend on
    the step, which is the group's "number". Compiled kernels and small parameters use counter-based
    random numbers; other parameters use a generator.

    `compiled`: step with kernels that torch.compile generates from the same operations. They may
    round a multiply-add once instead of twice. Small parameters are joined and updated as one, with
    the same results.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        kept: Kept,
        noise: Noise,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        compiled: bool = False,
    ) -> None:
        self._kept: Kept = kept
        self._compiled = CompiledStep(step_moments) if compiled else None
        self._noise = noise
        self._tables: dict[tuple[bool, torch.device], CodeTable] = {}
        self._parts: dict[nn.Parameter, _Part] = {}
        # The key is the first parameter of a group that has a gradient.
        self._stepped: dict[nn.Parameter, _StepParts] = {}
        if kept != "bf16":
            torchao_module("optim.quant_utils", f"--optimizer adamw-{kept}")
        values = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "number": 0}
        super().__init__(groups, values)

    def initial_state(self, parameter: nn.Parameter, group: dict[str, Any]) -> dict[str, Any]:
        state = {"step": torch.zeros((), dtype=torch.float32)}
        for moment in MOMENTS:
            state |= self._initial_moment(parameter, moment)
        return state

    def _initial_moment(self, parameter: nn.Parameter, moment: str) -> dict[str, Tensor]:
        if self._kept == "bf16":
            return {moment: torch.zeros_like(parameter, dtype=torch.bfloat16)}
        here, shape = local(parameter), tuple(parameter.shape)
        length = scale_block_length(shape, self._kept, split=_column_shards(parameter))
        if length is None:
            return {moment: torch.zeros_like(parameter, dtype=torch.float32)}
        *rows, width = here.shape
        packed = 2 if self._kept == "4bit" else 1
        codes = here.new_zeros((*rows, width // packed), dtype=torch.uint8)
        scale = here.new_zeros((*rows, width // length), dtype=torch.float32)
        return {
            moment: as_spread(codes, (*shape[:-1], shape[-1] // packed), parameter),
            f"{moment}_scale": as_spread(scale, (*shape[:-1], shape[-1] // length), parameter),
        }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            stepped = [p for p in group["params"] if p.grad is not None]
            for parameter in stepped:
                if not self.state[parameter]:
                    self.state[parameter].update(self.initial_state(parameter, group))
            if not stepped:
                continue
            known = self._current_step_parts(stepped)
            counts = known.increment_steps()
            gradients = [local(p.grad) for p in stepped]
            numbers: dict[float, Numbers] = {}
            for batch in known.batches(gradients, counts):
                count = counts[batch.places[0]]
                if count not in numbers:
                    numbers[count] = step_numbers(
                        self.state[batch.parts[0].parameter]["step"], group
                    )
                own = [gradients[place] for place in batch.places]
                self._update_batch(batch, own, numbers[count], group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict, and drop references to the old state."""
        super().load_state_dict(state_dict)
        self._parts.clear()
        self._stepped.clear()

    def _current_step_parts(self, stepped: list[nn.Parameter]) -> "_StepParts":
        """Return this rank's parts of the parameters to step.

        The objects of the last step are reused if no tensor has been replaced or moved to other
        memory.
        """
        weights = [local(parameter) for parameter in stepped]
        held = [one for parameter in stepped for one in self.state[parameter].values()]
        known = self._stepped.get(stepped[0])
        if known is None or not known.are_current(weights, held):
            parts = [self._current_part(parameter) for parameter in stepped]
            # The step counts in the states are views of one tensor, so that one operator increments
            # all of them.
            steps_P = torch.stack([self.state[parameter]["step"] for parameter in stepped])
            for parameter, step in zip(stepped, steps_P.unbind(), strict=True):
                self.state[parameter]["step"] = step
            held = [one for parameter in stepped for one in self.state[parameter].values()]
            known = self._stepped[stepped[0]] = _StepParts(parts, steps_P, held)
        return known

    def _current_part(self, parameter: nn.Parameter) -> "_Part":
        state, weight = self.state[parameter], local(parameter)
        part = self._parts.get(parameter)
        if part is None or not part.is_current(weight, state):
            few = weight.numel() <= COUNTED_VALUES.get(weight.device.type, 0)
            part = self._parts[parameter] = _Part(
                parameter,
                # Detached, because joined parts do not require gradients either, and a difference
                # would cause recompilation.
                weight.detach(),
                tuple(self._moment_from_state(state, name) for name in MOMENTS),
                counted=few or self._compiled is not None,
                address=None if has_no_memory(weight) else weight.data_ptr(),
                held=_stored_moments(state),
            )
        return part

    def _update_batch(
        self, batch: "_Batch", gradients: list[Tensor], numbers: "Numbers", group: dict[str, Any]
    ) -> None:
        """Update the parts of parameters in a batch, in place.

        If the batch has several parts or kernels are compiled, tensors are viewed as matrices with
        a row for each quantization block (values that share a scale).
        """
        parts, together = batch.parts, len(batch.parts) > 1
        first = parts[0]
        streams = self._step_streams(batch, group["number"])
        random = [] if first.counted else [self._rounding_generators(part, group) for part in parts]
        constants = (group["betas"], group["eps"])
        if not batch.rows or not (together or self._compiled):
            drawn = random[0] if random else (None, None, None)
            step_moments(first.weight, gradients[0], first.moments, drawn, streams, numbers,
                         *constants)  # fmt: skip
            return
        weight, *held = (torch.cat(each) if together else each[0] for each in batch.rows)
        gradient = _flatten(gradients).view(len(weight), -1)
        left = iter(held)
        moments = tuple(
            (next(left), None if scale is None else next(left), table)
            for _, scale, table in first.moments
        )
        arguments = (
            weight,
            gradient,
            moments,
            _draw_rounding_bits(parts, random) if random else (None, None, None),
            streams,
            numbers,
            *constants,
        )
        if self._compiled is None:
            step_moments(*arguments)
        else:
            self._compiled((first.kind, gradient.dtype, *constants), *arguments)
        if together:
            for into, made in zip(batch.rows, (weight, *held), strict=True):
                torch._foreach_copy_(into, made.split_with_sizes(batch.sizes))

    def _step_streams(self, batch: "_Batch", number: int) -> Streams | None:
        """Return a batch's counter-based random streams for this step.

        Returns None if nothing in the batch is rounded at random, or if generators are used
        instead.
        """
        if not batch.parts[0].counted or not any(batch.parts[0].rounds):
            return None
        if batch.streams is None:
            keys = [self._noise.key(part.parameter) for part in batch.parts]
            sizes = [part.weight.numel() for part in batch.parts]
            batch.streams = make_streams(keys, sizes, batch.parts[0].weight.device)
        keys_P, ends_P, sizes_P = batch.streams
        return keys_P + self._noise.step_key(number), ends_P, sizes_P

    def _rounding_generators(
        self, part: "_Part", group: dict[str, Any]
    ) -> tuple["Randomness", ...]:
        """Return the generators for rounding the moments and the weight; None where not rounded."""
        return tuple(
            self._noise.generator(part.parameter, group["number"], what) if rounds else None
            for what, rounds in zip((*MOMENTS, "weight"), part.rounds, strict=True)
        )

    def _moment_from_state(self, state: dict[str, Tensor], name: str) -> "Moment":
        held = local(state[name])
        if f"{name}_scale" not in state:
            return held, None, None
        return held, local(state[f"{name}_scale"]), self._code_table(name, held.device)

    def _code_table(self, moment: str, device: torch.device) -> CodeTable:
        signed = MOMENTS[moment]
        if (signed, device) not in self._tables:
            bits: Literal[4, 8] = 8 if self._kept == "8bit" else 4
            self._tables[signed, device] = CodeTable(bits, signed, device)
        return self._tables[signed, device]


@dataclass(frozen=True, eq=False)
class _Part:
    """This rank's part of a parameter, and its moments.

    `counted`: random numbers for rounding are counter-based (`random_words`), not drawn from a
    generator. `address` is that of the weight, or None if the weight has no memory. `held` are the
    tensors in the optimizer's state that store the moments.
    """

    parameter: nn.Parameter
    weight: Tensor
    moments: tuple[Moment, ...]
    counted: bool
    address: int | None
    held: tuple[Tensor, ...]

    def is_current(self, weight: Tensor, state: dict[str, Tensor]) -> bool:
        """Return whether the parameter still has this part's weight memory and moments."""
        if self.address is None or self.address != weight.data_ptr():
            return False
        held = _stored_moments(state)
        return len(held) == len(self.held) and all(map(is_, self.held, held))

    @property
    def length(self) -> int:
        """Return the size of quantization blocks, whose values share a scale; 1 if unquantized."""
        scale = self.moments[0][1]
        return 1 if scale is None else self.weight.numel() // scale.numel()

    @cached_property
    def rounds(self) -> tuple[bool, ...]:
        """Return whether each moment and the weight are in bf16 and so rounded at random."""
        kept = (*(moment[0] for moment in self.moments), self.weight)
        return tuple(one.dtype == torch.bfloat16 for one in kept)

    @cached_property
    def is_dense(self) -> bool:
        """Return whether the weight and the stored moments are all contiguous."""
        held = [one for moment in self.moments for one in moment[:2] if one is not None]
        return all(one.is_contiguous() for one in (self.weight, *held))

    @cached_property
    def kind(self) -> Hashable:
        """Return the properties in which parts must agree to be updated together."""
        return (self.length, self.weight.dtype, self.weight.device, self.counted)

    def rows(self) -> list[Tensor]:
        """Return the weight, each moment and its scales (if any), viewed as matrices.

        Each matrix has one row per quantization block.
        """
        count = self.weight.numel() // self.length
        seen = [self.weight.view(count, -1)]
        for held, scale, _ in self.moments:
            seen += [held.view(count, -1)] + ([] if scale is None else [scale.view(-1, 1)])
        return seen


def _stored_moments(state: dict[str, Tensor]) -> tuple[Tensor, ...]:
    return tuple(value for name, value in state.items() if name != "step")


class _StepParts:
    """Parts of the parameters that are stepped, their step counts, and the last step's batches."""

    def __init__(self, parts: list[_Part], steps_P: Tensor, held: list[Tensor]) -> None:
        self._parts = parts
        self._steps_P = steps_P
        self._held = held  # all stored states
        self._addresses = [part.address for part in parts]
        self._given: Any = None
        self._batches: list[_Batch] = []

    def are_current(self, weights: list[Tensor], held: list[Tensor]) -> bool:
        if len(weights) != len(self._parts) or None in self._addresses:
            return False
        if len(held) != len(self._held) or not all(map(is_, held, self._held)):
            return False
        return [weight.data_ptr() for weight in weights] == self._addresses

    def increment_steps(self) -> list[float]:
        return step_counts(self._steps_P.add_(1))

    def batches(self, gradients: list[Tensor], counts: list[float]) -> "list[_Batch]":
        """Return the batches of a step; reuse those of the last step if they are still valid.

        They are valid if each gradient has the same dtype and contiguity as in the last step, and
        if the differences between the parameters' step counts are the same.
        """
        kinds = [(one.dtype, one.is_contiguous()) for one in gradients]
        given = kinds, [count - counts[0] for count in counts]
        if given != self._given:
            dense = [
                (dtype, contiguous and part.is_dense)
                for (dtype, contiguous), part in zip(kinds, self._parts, strict=True)
            ]
            self._given, self._batches = given, _make_batches(self._parts, dense, counts)
        return self._batches


@dataclass
class _Batch:
    """Parts that are updated together; `places` are their positions in the list of all parts."""

    parts: list[_Part]
    places: list[int]
    # views of weights, moments and scales; empty unless all parts are dense
    rows: list[list[Tensor]]
    sizes: list[int]  # rows per part
    streams: Streams | None = None


def _make_batches(
    parts: list[_Part], kinds: list[tuple[torch.dtype, bool]], counts: list[float]
) -> list[_Batch]:
    """Group parts that agree in `_Part.kind`, step count and `kinds` into batches.

    `kinds` has, for each part, its gradient's dtype, and whether both the gradient and the part are
    contiguous; a part that is not gets a separate batch. Parts without elements are left out.
    """
    here = [place for place, part in enumerate(parts) if part.weight.numel()]
    if not here:  # all values are on other ranks
        return []
    sizes = [parts[place].weight.numel() for place in here]
    alike = [
        (parts[place].kind, kinds[place], counts[place]) if kinds[place][1] else None
        for place in here
    ]
    found = []
    for joined in group_parameters(sizes, alike, parts[here[0]].weight.device):
        places = [here[number] for number in joined]
        members = [parts[place] for place in places]
        rows = [part.rows() for part in members] if kinds[places[0]][1] else []
        views = [list(each) for each in zip(*rows, strict=True)]
        lengths = [len(one) for one in views[0]] if views else []
        found.append(_Batch(members, places, views, lengths))
    return found


def _flatten(tensors: list[Tensor]) -> Tensor:
    """Return the values of all tensors as one vector, (n,)."""
    if len(tensors) == 1:
        return tensors[0].view(-1)
    flat: Tensor = torch._utils._flatten_dense_tensors(tensors)
    return flat


def _draw_rounding_bits(
    batch: list[_Part], random: list[tuple[Randomness, ...]]
) -> tuple[Tensor | None, ...]:
    """Draw random bits for rounding each moment and the weight of the parts in a batch.

    Returns matrices with one row per quantization block, or None for a tensor that is not rounded
    at random. `random` has the generators of each part.
    """
    found: list[Tensor | None] = []
    for same in zip(*random, strict=True):
        bits = [
            draw_bits(part.weight.shape, one, part.weight.device).view(-1, part.length)
            for part, one in zip(batch, same, strict=True)
            if isinstance(one, torch.Generator)
        ]
        found.append(torch.cat(bits) if len(bits) > 1 else bits[0] if bits else None)
    return tuple(found)


def _column_shards(parameter: Tensor) -> int:
    """Return the number of ranks over which a parameter's last dimension is sharded."""
    if not is_spread(parameter):
        return 1
    sizes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    return math.prod(size for placed, size in sizes if splits(placed, parameter.ndim - 1))
