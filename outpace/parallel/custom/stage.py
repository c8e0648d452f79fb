"""A stage of a custom model: the user's forward, entered at one block and left after another.

Every rank of the pipeline has read the batch, so masks, positions and other arguments of blocks are
available on every stage. The forward only has to call each block once, in order. The block before
the stage's first one returns the received values, and the forward is exited after the stage's last
block. Values that blocks store in attributes are sent along (`block_values`) if other stages read
them.

Parameters that a stage does not have are NaN and take no memory, and blocks of earlier stages
return NaN, so the inspection with the first batch reveals a stage that uses anything it does not
have.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch.utils._pytree import tree_leaves, tree_map

from outpace.parallel.batches import copy_batch, has_changed
from outpace.parallel.blocks import named_blocks, parameters_outside
from outpace.parallel.custom.absent_parameters import AbsentParameters
from outpace.parallel.custom.absent_values import forget_all_but, is_nan, nan_like, nan_of
from outpace.parallel.custom.block_values import (
    Key,
    ReadLog,
    Snapshot,
    UnsentValue,
    can_travel,
    changes,
    get,
    is_constant,
    set_value,
    snapshot,
    split,
)
from outpace.parallel.custom.message import Message, make_sendable, refuse_transforms
from outpace.parallel.custom.stage_failure import EXPLAIN_COPY
from outpace.parallel.layout import Batch
from outpace.parallel.stage_draws import StageDraws
from outpace.parallel.tensors import all_parameters, deep_copy
from outpace.records.errors import BadInputError, first_names


class StageExit(BaseException):
    """An exception that exits a user's forward and carries the output of the stage's last block.

    It does not derive from Exception, so the user's code is unlikely to catch it.
    """

    def __init__(self, output: Any, name: str) -> None:
        super().__init__()
        self.output, self.name = output, name


class CustomStage(nn.Module):
    """A pipeline stage of an objective, which runs the blocks `names[mine.start:mine.stop]`.

    Parameters and buffers are shared with the original objective. `holds_rest`: this stage has the
    real parameters outside of blocks. `in_place`: use the objective itself instead of a copy, for
    losses that hold another reference to the module. `splits`: the schedule computes gradients of
    inputs and of weights in separate backwards. `draws` seeds the random numbers of stage `number`.
    `absent` are the parameters of other stages.
    """

    def __init__(
        self,
        objective: nn.Module,
        names: Sequence[str],
        mine: range,
        holds_rest: bool,
        in_place: bool = False,
        splits: bool = False,
        number: int = 0,
        draws: StageDraws | None = None,
        absent: AbsentParameters | None = None,
    ) -> None:
        super().__init__()
        self._number, self._draws, self._absent = number, draws, absent
        self.objective = objective if in_place else copy_structure(objective)
        self._names, self.mine, self._splits = names, mine, splits
        self.first, self.last = mine.start == 0, mine.stop == len(names)
        self.batches: Sequence[Batch] = ()
        self.leaves: tuple[Key, ...] = ()  # the values that are sent to the next stage
        self.unsent_used: set[Key] = set()  # values that were read although they are not sent here
        self.taken: Message | None = None  # form of the incoming message, found by the inspection
        self.given: Message | None = None
        self.recomputes = False  # whether the user's forward uses checkpointing around blocks
        self.records = False  # whether to record the forms of blocks' outputs
        # Whether this stage depends on random numbers that code outside of blocks draws before its
        # first block (set by an inspection).
        self.reads_early_draws = False
        self._draws_early = self._is_early = self._varies_early_draws = False
        self._borrow: Callable[[int], Any] | None = None
        self._before: Snapshot | None = None
        self._inspects = False
        # whether the forward changes the batch's tensors or entries
        self._writes = self._takes = False
        self._received: Message | None = None
        self._returned: list[Any] = []
        self._next = 0
        self._micro_batch: int | None = None  # the micro-batch whose forward is running
        self._past: dict[int, Message] = {}
        self._recomputing: int | None = None
        blocks = named_blocks(self.objective.model, names)  # type: ignore[arg-type]
        self._kept = [p for number in mine for p in all_parameters(blocks[number])]
        if holds_rest:
            self._kept += parameters_outside(self.objective.model, blocks).values()  # type: ignore[arg-type]
        forget_all_but(self._kept, self.objective, absent)
        self._parts = [
            {f"{name}.{part}": module for part, module in block.named_modules()}
            for name, block in zip(names, blocks, strict=True)
        ]
        _uncompile_around(blocks, self.objective)
        for number, block in enumerate(blocks):
            block.forward = partial(self._run_block, number, block.forward)

    def __deepcopy__(self, memo: dict[int, Any]) -> "CustomStage":
        """Refuse to copy a module that this stage runs."""
        assert self._absent is not None
        raise self._absent.make_refusal(EXPLAIN_COPY)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Return the parameters that this stage has."""
        return iter(self._kept)

    def nan_parameters(self) -> list[str]:
        """Return the names of this stage's parameters that contain NaN."""
        mine = {id(parameter) for parameter in self._kept}
        named = self.objective.model.named_parameters()  # type: ignore[union-attr]
        return [name for name, parameter in named if id(parameter) in mine and is_nan(parameter)]

    def blocks(self) -> list[nn.Module]:
        """Return this stage's blocks."""
        return [next(iter(self._parts[number].values())) for number in self.mine]

    def modules_of(self, blocks: range) -> dict[str, nn.Module]:
        """Return the modules in the blocks with these numbers, by name in the model.

        The name of a block itself ends in a dot.
        """
        return {name: part for number in blocks for name, part in self._parts[number].items()}

    def forward(self, *received: Tensor, number: Tensor) -> Any:
        """Run a micro-batch; return the tensors to send or, on the last stage, the totals."""
        self._micro_batch = micro_batch = int(number)
        message = None
        if self._draws is not None and (self.first or self._draws.shared):
            self._draws.seed(0, micro_batch)
        if not self.first:
            assert self.taken is not None
            message = self._past[micro_batch] = self.taken.replace_tensors(received)
        try:
            output = self.run(self.batches[micro_batch], message)
        finally:
            self._micro_batch = None
        if isinstance(output, Tensor):
            return output
        self._require_known_form(output)
        return tuple(output.flat())

    def _require_known_form(self, message: Message) -> None:
        seen = self.given
        assert seen is not None
        for key, (form, tensors) in message.values.items():
            known, old = seen.values[key]
            if form != known or [t.shape for t in tensors] != [t.shape for t in old]:
                raise BadInputError(
                    f"the value that module {key[0]!r} stores in {key[1]!r} changes its structure "
                    "or shape between micro-batches, but pipeline stages can only send tensors of "
                    "known shapes. Store tensors of one shape, or use zero3."
                )
        name = self._names[self.mine.stop - 1]
        if message.form != seen.form:
            raise BadInputError(
                f"block {name!r} returns a different structure than for the first micro-batch, but "
                "pipeline stages always send the same structure. Return the same number of "
                "tensors each time, and nothing else, or use zero3."
            )
        now, known_forms = (
            [(tuple(t.shape), t.dtype) for t in one.tensors] for one in (message, seen)
        )
        if now != known_forms:
            shape, expected = next(
                pair for pair in zip(now, known_forms, strict=True) if pair[0] != pair[1]
            )
            raise BadInputError(
                f"block {name!r} returns a tensor of shape {shape[0]} ({shape[1]}), but for the "
                f"first micro-batch it was {expected[0]} ({expected[1]}), and pipeline stages "
                "expect the same shape each time. Pad to one shape, divide the blocks differently "
                "(lists of names, one for each stage), or use zero3."
            )

    def run(self, batch: Batch, received: Message | None) -> "Message | Tensor":
        """Run the stage on a micro-batch; return the message to the next stage, or the totals."""
        self._received, self._next, self._returned = received, 0, []
        self._seed_inspection(2 * len(self._names))
        # Other stages of this rank and micro-batches that share memory must see the batch
        # unchanged.
        given = batch
        # Inspections run in training mode, so evaluation always gets a copy.
        if self._inspects or self._writes or self._takes or not self.objective.training:
            given = copy_batch(batch, tensors=self._inspects or self._writes)
        before = copy_batch(given, tensors=False) if self._inspects else None
        try:
            loss_sum, *others = self.objective(given)
        except StageExit as leaving:
            return self._make_message(leaving, received)
        finally:
            self._received = None
            self._has_drawn()
            if self._inspects:
                tensors = [leaf for leaf in tree_leaves(before) if isinstance(leaf, Tensor)]
                self._writes |= any(tensor._version for tensor in tensors)
                self._takes |= has_changed(given, before)
        if self._next < len(self._names):
            raise BadInputError(
                f"the forward ended without calling block {self._names[self._next]!r}. A pipeline "
                "needs blocks that the forward calls exactly once each: list those as `blocks`, "
                "or use zero3."
            )
        return torch.cat([part.to(loss_sum.dtype).view(-1) for part in (loss_sum, *others)])

    def inspect(
        self, batch: Batch, received: Message | None
    ) -> "tuple[Message | Tensor, set[Key], list[Key]]":
        """Run the stage on a micro-batch; find out which values it stores, reads and changes.

        Random numbers have the fixed seeds of inspections. Returns the message with all values that
        blocks store (the totals on the last stage), the keys of the values that earlier stages
        store and this stage reads, and the keys of the buffers outside of blocks that change.
        """
        reads, rest, places = ReadLog(), self._modules_outside_blocks(), self._module_ids()
        mine, others = self.modules_of(self.mine), self.modules_of(range(self.mine.start))
        rest_before = snapshot(rest)
        self._before, self._inspects = snapshot(mine), True
        try:
            with reads.record_reads(() if received is None else received.values, others):
                found = self.run(batch, received)
            moved = [key for key in changes(rest_before, rest) if key[1] in rest[key[0]]._buffers]
            self._refuse_replaced_modules(places)
            self._before = None
            if self._draws_early:
                self.reads_early_draws |= self._depends_on_early_draws(batch, received, found)
        finally:
            self._before, self._inspects = None, False
        return found, reads.found, moved

    def _module_ids(self) -> dict[str, int]:
        model: nn.Module = self.objective.model  # type: ignore[assignment]
        return {name: id(part) for name, part in model.named_modules(remove_duplicate=False)}

    def _refuse_replaced_modules(self, before: Mapping[str, int]) -> None:
        now = self._module_ids()
        moved = [name for name, part in before.items() if now.get(name) != part]
        if moved:
            raise BadInputError(
                f"the forward assigns another module to {first_names(moved)}, but each pipeline "
                "stage has its own copies of the modules, so the saved model would have a "
                "different module in its place. Choose among modules without assigning them: call "
                "self.heads[number] directly."
            )

    def _depends_on_early_draws(
        self, batch: Batch, received: Message | None, output: "Message | Tensor"
    ) -> bool:
        self._varies_early_draws = True
        try:
            again = self.run(batch, received)
        finally:
            self._varies_early_draws = False
        pairs = zip(_output_tensors(output), _output_tensors(again), strict=True)
        return not all(torch.allclose(one, other, 0, 0, equal_nan=True) for one, other in pairs)

    def inspect_whole(self, batch: Batch, borrow: Callable[[int], Any]) -> Tensor:
        """Run all blocks on this rank, as a single process would, and return the totals.

        `borrow(number)` returns a context in which block `number` has its real parameters, from the
        rank that holds them. The outputs of blocks, and values that stages send, are detached from
        the graph of the totals.
        """
        self._borrow, self._inspects = borrow, True
        try:
            with torch.enable_grad():
                found = self.run(batch, None)
        finally:
            self._borrow, self._inspects = None, False
        assert isinstance(found, Tensor)
        return found

    def forget(self, keys: Sequence[Key]) -> None:
        """Set the values `keys`, which earlier blocks store but this stage does not get, to NaN."""
        parts = self.modules_of(range(self.mine.start))
        sent = {*self.modules_of(self.mine).values(), *self._modules_outside_blocks().values()}
        for key in keys:
            if parts[key[0]] not in sent:
                set_value(parts, key, UnsentValue.make(key, self.unsent_used))

    def _modules_outside_blocks(self) -> dict[str, nn.Module]:
        inside = {part for parts in self._parts for part in parts.values()}
        model: nn.Module = self.objective.model  # type: ignore[assignment]
        return {name: part for name, part in model.named_modules() if part not in inside}

    def _seed_inspection(self, number: int) -> None:
        """Seed all generators before a part of the forward, if this is an inspection.

        Each part has a fixed seed, so that it draws the same numbers on all stages. `number`
        identifies the part that follows: 2n is block n, 2n + 1 is the code after it, and twice the
        number of blocks is the code before the first block. This also records whether the part that
        has just ended drew random numbers on which this stage may depend.
        """
        if not self._inspects:
            return
        self._draws_early |= self._has_drawn() and self._is_early
        begins, ends = number == 2 * len(self._names), number % 2 == 1
        early = begins or (ends and number // 2 + 1 < self.mine.start)
        self._is_early = early and not self.first
        seed = number + (
            2 * len(self._names) + 1 if self._is_early and self._varies_early_draws else 0
        )
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        if self._draws is not None:
            self._draws.watch()

    def _has_drawn(self) -> bool:
        return self._inspects and self._draws is not None and self._draws.note()

    def _seed_training_after(self, number: int, micro_batch: int | None) -> None:
        if self._draws is None or micro_batch is None:
            return
        if self._draws.shared:
            self._draws.seed(number + 1, micro_batch)
        elif number + 1 == self.mine.start:
            self._draws.seed(self._number, micro_batch)

    def _make_message(self, leaving: StageExit, received: Message | None) -> Message:
        found = split(leaving.output)
        if found is None or not any(t.is_floating_point() for t in found[1]):
            raise BadInputError(
                f"block {leaving.name!r} returns a {type(leaving.output).__name__}, but pipeline "
                "stages send only tensors, alone or in tuples and dicts. Return the hidden "
                "states from the block, or divide the blocks differently (lists of names, one for "
                "each stage)."
            )
        form, tensors = found
        parts = self.modules_of(self.mine)
        passed = {} if received is None else received.values
        if self._before is not None:
            left = [key for key in changes(self._before, parts) if can_travel(parts, key)]
            self.leaves = (*passed, *left)
        values = {key: passed[key] if key in passed else get(parts, key) for key in self.leaves}
        returned = [] if received is None else received.returned
        handed = make_sendable if self._splits else Tensor.contiguous
        return Message(
            form,
            [handed(tensor) for tensor in tensors],
            {key: (f, [handed(t) for t in some]) for key, (f, some) in values.items()},
            [*returned, *self._returned],
        )

    def _run_block(
        self, number: int, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Run or skip a block, or exit the forward, when the user's forward calls the block."""
        if self._recomputing is not None:
            return self._recompute_block(number, forward, *args, **kwargs)
        self._require_order(number)
        self._seed_inspection(2 * number)
        if self._borrow is not None:
            with self._borrow(number):
                output = self._detach_output(number, forward(*args, **kwargs))
        elif number in self.mine:
            output = forward(*args, **kwargs)
        else:
            output = self._substitute_output(number, self._received, args, kwargs)
        self._seed_training_after(number, self._micro_batch)
        self._seed_inspection(2 * number + 1)
        if self._borrow is not None:
            return output
        if number in self.mine and self.records:
            self._returned.append(tree_map(_strip_data, output))
        if number + 1 == self.mine.stop and not self.last:
            refuse_transforms(self._names[number], output)
            raise StageExit(output, self._names[number])
        return output

    def _detach_output(self, number: int, output: Any) -> Any:
        parts = self._parts[number]
        for key in () if self.taken is None else self.taken.values:
            if key[0] in parts:
                form, tensors = get(parts, key)
                set_value(parts, key, form.join([tensor.detach() for tensor in tensors]))
        return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, output)

    def _recompute_block(
        self, number: int, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        self.recomputes = True
        assert self._recomputing is not None
        if number in self.mine:
            output = forward(*args, **kwargs)
        else:
            received = self._past.get(self._recomputing)
            output = self._substitute_output(number, received, args, kwargs)
        self._seed_training_after(number, self._recomputing)
        return output

    def _substitute_output(
        self, number: int, message: Message | None, args: Any, kwargs: Mapping[str, Any]
    ) -> Any:
        """Return the output of another stage's block, and set the values that the block stores.

        The output and values are those in `message`, or NaN where they were not sent.
        """
        if message is None:
            return nan_like(args, kwargs)
        for key, (form, tensors) in message.values.items():
            if key[0] in self._parts[number]:
                set_value(self._parts[number], key, form.join([t.clone() for t in tensors]))
        if number + 1 == self.mine.start:
            # Cloned because the forward may change it in place.
            return message.form.join([tensor.clone() for tensor in message.tensors])
        if number < len(message.returned):
            device, form = message.tensors[0].device, message.returned[number]
            if isinstance(form, Tensor):
                return nan_of(device, form)
            return tree_map(partial(nan_of, device), form)
        return nan_like(args, kwargs)

    def _require_order(self, number: int) -> None:
        if number < self._next:
            raise BadInputError(
                f"block {self._names[number]!r} is called again, but a pipeline runs each block "
                "once. If the loss calls the module several times, give it all inputs in one call "
                "(torch.cat). If the forward repeats blocks, put all their calls into one larger "
                "module and list that in `blocks`. Or use zero3."
            )
        if number != self._next:
            expected = repr(self._names[self._next]) if self._next < len(self._names) else "no more"
            raise BadInputError(
                f"the forward calls block {self._names[number]!r} where {expected} was expected. "
                "A pipeline needs blocks in the order in which the forward calls them, once "
                "each: list those as `blocks`, or use zero3."
            )
        self._next += 1

    @contextmanager
    def allow_recompute(self, micro_batch: int, done: bool) -> Iterator[None]:
        """Let the backward of a micro-batch recompute activations inside the context.

        `done`: this is the micro-batch's last backward, so its received values are dropped
        afterwards.
        """
        self._recomputing = micro_batch
        try:
            yield
        finally:
            self._recomputing = None
            if done:
                self._past.pop(micro_batch, None)


def _uncompile_around(blocks: Sequence[nn.Module], module: nn.Module) -> None:
    """Disable compilation of modules that contain blocks, because it would trace the stage's code.

    A block that was passed to `torch.compile` stays compiled. One whose `compile()` was called does
    not.
    """
    inside = set(blocks)
    for part in module.modules():
        if not inside & set(part.modules()):
            continue
        part._compiled_call_impl = None
        if isinstance(part, OptimizedModule) and part not in inside:
            part.forward = part._orig_mod.__call__


def copy_structure(module: nn.Module) -> nn.Module:
    """Copy a module and its submodules, but share its parameters and buffers."""
    memo: dict[int, Any] = {id(t): t for t in (*all_parameters(module), *module.buffers())}
    for part in module.modules():
        for value in tree_leaves([v for v in vars(part).values() if not isinstance(v, nn.Module)]):
            if isinstance(value, Tensor) and not value.is_leaf:
                memo.setdefault(id(value), value.detach())  # left by an earlier forward
    return deep_copy(module, memo)


def _output_tensors(found: Message | Tensor) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else found.flat()


def _strip_data(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.detach().to("meta")
    return leaf if is_constant(leaf) else None
