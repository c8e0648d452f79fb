"""Inspection of a custom model's pipeline with the first batch.

One forward through all stages shows the structure of the messages between them, which attributes
blocks set, where these are read, and which buffers outside of blocks change. The last stage's rank
also computes the whole forward of the first micro-batch, borrowing the parameters of one block at a
time. If the losses differ, the forward or the loss uses something from blocks that is not sent.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from outpace.parallel.blocks import named_blocks
from outpace.parallel.custom.absent_values import is_nan
from outpace.parallel.custom.block_values import Key
from outpace.parallel.custom.message import Message, bytes_of, receive, refuse_dtypes, send
from outpace.parallel.custom.stage import CustomStage
from outpace.parallel.custom.stage_checkpoints import without_reentry
from outpace.parallel.custom.stage_failure import (
    explain_cut_graph,
    explain_failure,
    explain_known,
    explain_writes_outside,
)
from outpace.parallel.layout import Batch, StepHooks
from outpace.parallel.parity.comparison import difference, micro_loss_tolerance
from outpace.parallel.parity.module_state import preserve_state
from outpace.parallel.parity.moved_parameters import keep_values
from outpace.parallel.parity.user_collectives import NoCollectives
from outpace.parallel.rank_objects import gather_objects
from outpace.parallel.tensors import graph_nodes, parameter_like
from outpace.records.errors import BadInputError


@dataclass
class StageFindings:
    """Findings of the inspection about one stage.

    `shares_draws`: the stage depends on random numbers that earlier code outside of blocks draws.
    """

    left: tuple[Key, ...] = ()  # values that its own blocks store
    read: tuple[Key, ...] = ()  # values of earlier stages that it reads
    moved: tuple[Key, ...] = ()  # buffers outside of blocks that change
    nan: tuple[Key, ...] = ()  # those of `moved` that became NaN
    shares_draws: bool = False


class PipelineInspection:
    """Runs of a micro-batch through a pipeline that find out what stages send each other.

    `inspect` and `settle_buffers` are collective.
    """

    def __init__(
        self,
        stages: Mapping[int, CustomStage],
        ranks_of: Sequence[int],
        names: Sequence[str],
        parts: Sequence[range],
        held: nn.Module,
        group: dist.ProcessGroup,
        device: torch.device,
        strategy: str,
    ) -> None:
        self._strategy = strategy
        self._stages, self._ranks_of, self._names, self._parts = stages, ranks_of, names, parts
        self._held, self._group, self._at = held, group, device
        self._rank = dist.get_rank(group)
        self.taken = self._alone = self.shares_draws = False
        self._moving: tuple[Key, ...] = ()
        held_parts = dict(held.named_modules())
        self._holders = [
            (held_parts[name.rstrip(".")], part)
            for stage in stages.values()
            for name, part in stage.modules_of(stage.mine).items()
            if part._buffers
        ]
        # Changing buffers outside of blocks; the last stage's values are kept.
        self.buffers: tuple[str, ...] = ()
        self.loss_dtype = torch.float32

    def inspect(self, batch: Batch, hooks: StepHooks) -> None:
        """Find out what each stage receives and sends.

        Raises BadInputError on all ranks if any stage fails.
        """
        if self._alone:
            return
        taken: dict[int, Message | None] = {}
        outputs: dict[int, Message | Tensor | None] = {}
        found: dict[int, StageFindings] = {}
        error: Exception | None = None
        with self._preserve_training_state():
            try:
                self._inspect_stages(batch, hooks, taken, outputs, found)
            except Exception as raised:
                error = raised
        seen = self._gather_findings(found, error, (batch, hooks))
        self.shares_draws |= any(one.shares_draws for one in seen.values())
        self._gather_findings({}, self._route_values(seen, taken, outputs), None)
        if not self.taken:
            self._require_same_loss(batch, hooks, outputs)
            self.taken = True

    def learn_alone(self, whole: Mapping[int, CustomStage], batch: Batch, hooks: StepHooks) -> None:
        """Configure stages as `inspect` does, by running all of them on this rank alone.

        `whole` maps numbers to all stages, of a model whose tensors have no values. So losses are
        not compared with those of a single process.
        """
        taken: dict[int, Message | None] = {}
        outputs: dict[int, Message | Tensor | None] = {}
        found: dict[int, StageFindings] = {}
        output: Message | Tensor | None = None
        for number, stage in whole.items():
            assert not isinstance(output, Tensor)
            taken[number] = output
            with torch.no_grad(), without_reentry(always=True):
                output, found[number] = self._run_stage(stage, batch, hooks, output)
            outputs[number] = output
        unsendable = self._route_values(found, taken, outputs)
        if unsendable is not None:
            raise unsendable
        self.taken = self._alone = True

    @contextmanager
    def _preserve_training_state(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(without_reentry(always=True))
            for stage in self._stages.values():
                stack.enter_context(preserve_state(stage.objective, self._at))
            stack.enter_context(keep_values(self._held.named_parameters()))
            yield

    def _inspect_stages(
        self,
        batch: Batch,
        hooks: StepHooks,
        taken: dict[int, Message | None],
        outputs: dict[int, Message | Tensor | None],
        found: dict[int, StageFindings],
    ) -> None:
        """Run the micro-batch through this rank's stages, and record what they receive and send.

        Fills, by stage number, `taken` with received messages, `outputs` with messages to send (or
        totals) and `found` with findings. If a stage fails, the stages after it are told, and the
        error is raised at the end.
        """
        output: Message | Tensor | None = None
        error: Exception | None = None
        ranks = self._ranks_of
        for number, stage in self._stages.items():
            if number and ranks[number - 1] != self._rank:
                output = receive(self._at, self._group, ranks[number - 1])
            assert not isinstance(output, Tensor)
            taken[number] = output
            if number and output is None:
                outputs[number] = None
            else:
                try:
                    outputs[number], found[number] = self._inspect_stage(
                        stage, number, batch, hooks, output
                    )
                except Exception as raised:
                    outputs[number], error = None, error or raised
            output = outputs[number]
            if not stage.last and ranks[number + 1] != self._rank:
                assert not isinstance(output, Tensor)
                send(output, self._group, ranks[number + 1])
        if error is not None:
            raise error

    def _inspect_stage(
        self, stage: CustomStage, number: int, batch: Batch, hooks: StepHooks, taken: Message | None
    ) -> tuple["Message | Tensor", StageFindings]:
        diverged = bool(stage.nan_parameters())
        output, found = self._run_stage(stage, batch, hooks, taken)
        if not diverged:
            self._refuse_nan_output(number, stage, taken, output)
        model: nn.Module = stage.objective.model  # type: ignore[assignment]
        buffers = {key: model.get_submodule(key[0])._buffers[key[1]] for key in found.moved}
        nan = tuple(key for key, buffer in buffers.items() if buffer is not None and is_nan(buffer))
        return output, replace(found, nan=nan)

    def _run_stage(
        self, stage: CustomStage, batch: Batch, hooks: StepHooks, taken: Message | None
    ) -> tuple["Message | Tensor", StageFindings]:
        """Run a stage on a micro-batch; return its output and findings.

        The values of the output are not checked.
        """
        stage.records = True
        try:
            with hooks.cast(), NoCollectives(self._strategy):
                output, read, moved = stage.inspect(batch, taken)
        finally:
            stage.records = False
        passed = () if taken is None else tuple(taken.values)
        left = tuple(key for key in stage.leaves if key not in passed)
        draws = stage.reads_early_draws
        return output, StageFindings(left, tuple(sorted(read)), tuple(moved), shares_draws=draws)

    def _refuse_nan_output(
        self,
        number: int,
        stage: CustomStage,
        taken: Message | None,
        output: "Message | Tensor",
    ) -> None:
        made = [output[:1]] if isinstance(output, Tensor) else output.tensors
        if any(map(is_nan, made)) and not (taken and any(map(is_nan, taken.tensors))):
            written = stage.nan_parameters()
            if written:
                raise BadInputError(explain_writes_outside(written))
            blocks = ", ".join(self._names[n] for n in self._parts[number])
            raise BadInputError(
                f"stage {number} (blocks {blocks}) turns its input into NaN. If a single process "
                "does so for a part of the batch (a mean over no target), return (sum, count) "
                "from the loss. Otherwise, the forward needs something besides the previous "
                "block's output (an earlier block's output, or parameters outside of all "
                "blocks), or the loss uses all parameters. Move what it needs into blocks, divide "
                "the blocks differently (lists of names, one for each stage), or use zero3 (ddp if "
                "it uses a block's parameters outside of that block)."
            )

    def _gather_findings(
        self,
        found: dict[int, StageFindings],
        error: Exception | None,
        micro_batch: tuple[Batch, StepHooks] | None,
    ) -> dict[int, StageFindings]:
        """Gather the findings of all stages; raise on every rank if any rank has an `error`.

        If the cause of the error is unknown, a single process runs `micro_batch` (a batch and its
        hooks) for comparison, unless this is None. Collective.
        """
        refused = str(error) if isinstance(error, BadInputError) else None
        failed = None
        if error is not None and refused is None:
            failed = _describe_error(error), explain_cut_graph(error), explain_known(error)
        told = gather_objects((found, refused, failed), self._group)
        if refused is not None:
            assert error is not None
            raise error
        refusal = next((text for _, text, _ in told if text is not None), None)
        failures = [(rank, one) for rank, (_, _, one) in enumerate(told) if one is not None]
        if refusal is None and failures and micro_batch is not None:
            rank, (said, refusal, known) = failures[0]
            alone = refusal is None and self._single_process_error(*micro_batch) == said
            refusal = refusal or (None if alone else known)
            refusal = refusal or explain_failure(
                rank, said, alone, micro_batch[0], self._strategy != "mp"
            )
        if refusal is not None:
            raise BadInputError(refusal) from error
        return {number: seen for one, _, _ in told for number, seen in one.items()}

    def _single_process_error(self, batch: Batch, hooks: StepHooks) -> str | None:
        """Return a single process's error on a micro-batch; None if it succeeds. Collective."""
        said = None
        if self._ranks_of[-1] == self._rank:
            made = self._run_single_process(batch, hooks)
            said = None if isinstance(made, Tensor) else _describe_error(made)
        else:
            self._send_blocks_to_last_stage()
        failure: str | None = self._broadcast_from_last(said)
        return failure

    def _require_same_loss(
        self, batch: Batch, hooks: StepHooks, outputs: Mapping[int, "Message | Tensor | None"]
    ) -> None:
        last = len(self._parts) - 1
        refusal: str | None = None
        if self._ranks_of[last] != self._rank:
            self._send_blocks_to_last_stage()
            if self._broadcast_from_last(None):
                self._send_blocks_to_last_stage()
        else:
            staged = outputs[last]
            assert isinstance(staged, Tensor)
            whole = self._single_process_totals(batch, hooks)
            inside = None if whole is None else _find_borrowed_parameter(whole)
            differs = whole is not None and _difference(staged, whole) > self._loss_tolerance(hooks)
            # A forward that draws different numbers each time cannot be compared.
            if self._broadcast_from_last(differs):
                again = self._single_process_totals(batch, hooks)
                if whole is not None and again is not None:
                    apart, repeated = (_difference(staged, whole), _difference(whole, again))
                    refusal = _explain_difference(staged, whole) if apart > 2 * repeated else None
            if refusal is None and inside is not None:
                refusal = (
                    f"as a pipeline, the loss would lose a part of {inside}'s gradient: {_ADVICE}"
                )
        refusal = self._broadcast_from_last(refusal)
        if refusal is not None:
            raise BadInputError(refusal)

    def _broadcast_from_last(self, value: Any) -> Any:
        values = [value]
        dist.broadcast_object_list(values, group=self._group, group_src=self._ranks_of[-1])
        return values[0]

    def _loss_tolerance(self, hooks: StepHooks) -> float:
        with hooks.cast():
            low = torch.is_autocast_enabled(self._at.type)
        sizes = [p.itemsize for p in self._held.parameters() if p.is_floating_point()]
        return micro_loss_tolerance(min(sizes, default=4), low)

    def _single_process_totals(self, batch: Batch, hooks: StepHooks) -> Tensor | None:
        made = self._run_single_process(batch, hooks)
        return made if isinstance(made, Tensor) else None

    def _run_single_process(self, batch: Batch, hooks: StepHooks) -> Tensor | Exception:
        """Run all blocks on the last stage's rank; return the totals, or the error.

        Other ranks must call `_send_blocks_to_last_stage` at the same time.
        """
        stage = self._stages[len(self._parts) - 1]
        lent = iter(range(len(self._names)))

        @contextmanager
        def borrow(number: int) -> Iterator[None]:
            assert next(lent) == number
            if number in stage.mine:
                yield
                return
            parts = stage.modules_of(range(number, number + 1))
            with _borrow_tensors(self._names[number], parts, self._receive_tensors(number)):
                yield

        found: Tensor | Exception
        with self._preserve_training_state(), hooks.cast():
            try:
                found = stage.inspect_whole(batch, borrow)
            except Exception as error:
                found = error
                for number in lent:  # receive what other ranks still send
                    if number not in stage.mine:
                        self._receive_tensors(number)
        return found

    def _receive_tensors(self, number: int) -> list["_NamedTensor"]:
        """Receive a block's parameters and buffers from the rank that runs the block.

        The sender first sends their names, shapes and dtypes, because a forward may have replaced
        buffers.
        """
        source = self._owner_rank(number)
        if source == self._rank:
            return _parameters_and_buffers(named_blocks(self._held, [self._names[number]])[0])
        told: list[Any] = [None]
        dist.recv_object_list(told, group=self._group, group_src=source)
        received = []
        for part, attribute, shape, dtype in told[0]:
            tensor = torch.empty(shape, dtype=dtype, device=self._at)
            dist.recv(bytes_of(tensor), group=self._group, group_src=source)
            received.append((part, attribute, tensor))
        return received

    def _send_blocks_to_last_stage(self) -> None:
        to = self._ranks_of[-1]
        for number, name in enumerate(self._names):
            if self._owner_rank(number) == self._rank:
                held = _parameters_and_buffers(named_blocks(self._held, [name])[0])
                forms = [(part, attribute, t.shape, t.dtype) for part, attribute, t in held]
                dist.send_object_list([forms], group=self._group, group_dst=to)
                for _, _, tensor in held:
                    whole = tensor.detach().contiguous()
                    dist.send(bytes_of(whole), group=self._group, group_dst=to)

    def _owner_rank(self, number: int) -> int:
        stage = next(stage for stage, part in enumerate(self._parts) if number in part)
        return self._ranks_of[stage]

    def _route_values(
        self,
        seen: Mapping[int, StageFindings],
        taken: Mapping[int, Message | None],
        outputs: Mapping[int, "Message | Tensor | None"],
    ) -> BadInputError | None:
        """Make each stage send the values that later stages read.

        Stages between the one that stores a value and its last reader pass it on. Returns an error
        if one of this rank's stages cannot send its values.
        """
        unsendable: BadInputError | None = None
        ends = {key: max((s for s in seen if key in seen[s].read), default=0)
                for stage in seen.values() for key in stage.left}  # fmt: skip
        owner = {key: number for number, stage in seen.items() for key in stage.left}
        through = [
            tuple(key for key in owner if owner[key] <= stage < ends[key])
            for stage in range(len(self._parts))
        ]
        for number, stage in self._stages.items():
            stage.leaves = through[number]
            output, received = outputs[number], taken[number]
            stage.given = output.select(through[number]) if isinstance(output, Message) else None
            if stage.given is not None:
                name = self._names[self._parts[number].stop - 1]
                unsendable = unsendable or refuse_dtypes(stage.given, name)
            stage.taken = None if received is None else received.select(through[number - 1])
            if isinstance(output, Tensor):
                self.loss_dtype = output.dtype
            arrived = () if not number else through[number - 1]
            stage.forget([key for key in owner if owner[key] < number and key not in arrived])
        self._separate_buffers(seen)
        return unsendable

    def _separate_buffers(self, seen: Mapping[int, StageFindings]) -> None:
        """Give each stage separate copies of the buffers outside of blocks that change.

        The last stage's copies are valid, because it computes everything outside of blocks with
        real parameters, whereas middle stages have NaN parameters there.
        """
        last = len(self._parts) - 1
        moved = {key: number for number in sorted(seen) for key in seen[number].moved}
        for key, number in moved.items():
            if number != last or key in seen[last].nan:
                raise BadInputError(
                    f"buffer {'.'.join(filter(None, key))} is outside of the pipeline's blocks "
                    f"and changes between blocks, on stage {number}, depending on values that no "
                    "single stage has. Include its module in the blocks, or use zero3."
                )
        if self.buffers or not moved:
            return
        for number, stage in self._stages.items():
            if number != last:
                for key in moved:
                    module = self._submodule(stage, key[0])
                    buffer = module._buffers[key[1]]
                    module._buffers[key[1]] = None if buffer is None else buffer.clone()
        self._moving = tuple(moved)
        self.buffers = tuple(".".join(filter(None, key)) for key in moved)

    def _submodule(self, stage: CustomStage, name: str) -> nn.Module:
        model: nn.Module = stage.objective.model  # type: ignore[assignment]
        return model.get_submodule(name)

    @torch.no_grad()
    def settle_buffers(self) -> None:
        """Copy the buffers of this rank's stages to its model after a step.

        Changing buffers outside of blocks get the last stage's values on all ranks.
        """
        for held, running in self._holders:
            for name, buffer in running._buffers.items():
                held._buffers[name] = buffer  # the forward may have assigned another tensor
        last = len(self._parts) - 1
        for name, attribute in self._moving:
            holder = self._held.get_submodule(name)
            if last in self._stages:
                running = self._submodule(self._stages[last], name)
                holder._buffers[attribute] = running._buffers[attribute]
            buffer = holder._buffers[attribute]
            assert buffer is not None
            dist.broadcast(buffer, group=self._group, group_src=self._ranks_of[-1])
            if 0 in self._stages and last:
                self._submodule(self._stages[0], name)._buffers[attribute] = buffer.clone()


def _describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _mean_losses(*totals: Tensor) -> list[float]:
    return [float(one[0] / one[1]) for one in (made.detach().double() for made in totals)]


def _difference(one: Tensor, other: Tensor) -> float:
    return difference(*_mean_losses(one, other))


_ADVICE = (
    "the forward or the loss uses something from blocks that is not sent between stages (values "
    "that hooks collect inside of blocks, lists that blocks append to, router logits, all "
    "parameters). Let blocks return it or store it in an attribute (self.aux = …), or use zero3 or "
    "ddp."
)


def _explain_difference(staged: Tensor, whole: Tensor) -> str:
    a, b = _mean_losses(staged, whole)
    return (
        f"as a pipeline, the loss of the first micro-batch is {a:.6g}, but a single process with "
        f"the same weights computes {b:.6g}: {_ADVICE}"
    )


def _find_borrowed_parameter(totals: Tensor) -> str | None:
    """Return the name of a parameter that a loss uses outside of its block; None if there is none.

    `totals` come from `inspect_whole`, which borrows a block's parameters from another rank only
    while the block runs, and detaches block outputs. So if a borrowed parameter is in the graph of
    `totals`, the loss uses it in another way than through what its block returns and stores.
    """
    lent = (
        getattr(getattr(node, "variable", None), "lent_as", None) for node in graph_nodes(totals)
    )
    return next((name for name in lent if name is not None), None)


_NamedTensor = tuple[str, str, Tensor]  # module name within a block, attribute name, value


def _parameters_and_buffers(block: nn.Module) -> list[_NamedTensor]:
    return [
        (place, name, tensor)
        for place, part in block.named_modules()
        for register in (part._parameters, part._buffers)
        for name, tensor in register.items()
        if tensor is not None
    ]


@contextmanager
def _borrow_tensors(
    name: str, parts: Mapping[str, nn.Module], lent: Sequence[_NamedTensor]
) -> Iterator[None]:
    inside = dict(next(iter(parts.values())).named_modules())
    before = {part: dict(part._buffers) for part in inside.values()}
    parameters: list[tuple[nn.Module, str, Any]] = []
    for place, attribute, tensor in lent:
        part = inside[place]
        old = part._parameters.get(attribute)
        if old is None:
            part._buffers[attribute] = tensor
            continue
        parameter = parameter_like(tensor.detach(), old)
        parameter.lent_as = f"{name} ({attribute} of a {type(part).__name__})"  # type: ignore[attr-defined]
        parameters.append((part, attribute, old))
        setattr(part, attribute, parameter)  # RNNs keep a second reference to their weights
    try:
        yield
    finally:
        for part, attribute, old in parameters:
            setattr(part, attribute, old)
        for part, buffers in before.items():
            part._buffers.clear()
            part._buffers.update(buffers)
