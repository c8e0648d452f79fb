"""Forward and backward of one process, replayed as CUDA graphs.

The host launches a step's kernels one by one, which takes a few microseconds each. If kernels are
short, the device waits for the host. A CUDA graph launches a whole forward or backward in one call
(NVIDIA, "CUDA C++ Programming Guide", §CUDA Graphs). Its kernels use the same addresses in every
replay: each batch is copied into the graph's inputs, and the graph writes gradients to fixed
tensors.

Captured work must not wait for the device and must be the same each time, so only outpace's models,
whose shapes are static, are supported. If a pass waits for the device or a capture fails, later
passes are launched kernel by kernel.
"""

import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from outpace.parallel.layout import Batch, Layout, StepHooks, totals_of
from outpace.records.errors import BadInputError

# Passes of a shape before its capture. The first ones warm up compilers, libraries and allocators;
# the last one is checked for waits. Captures therefore fall into a run's first steps, whose times
# are not counted (`records.measurement.WARMUP_STEPS`).
WARMUP_PASSES = 2
# Maximum number of captured shapes; each holds its graphs' memory until the run ends.
MOST_SHAPES = 8


class Recorder(Protocol):
    """Interface for capturing the work of a device, such as `CudaRecorder`."""

    def warm_up(self) -> AbstractContextManager[None]:
        """Return a context in which passes run on the stream that is used to capture them later."""

    def refuse_waits(self) -> AbstractContextManager[None]:
        """Return a context in which waiting for the device raises RuntimeError."""

    def has_room(self) -> bool:
        """Return whether there is enough free device memory to capture graphs."""

    def record(self, work: Callable[[], list[Tensor]]) -> Callable[[], None]:
        """Capture the kernels of `work` without running them; return a function that replays them.

        A replay writes to the tensors that `work` returned. Raises RuntimeError if `work` cannot be
        captured.
        """

    def release(self) -> None:
        """Free the memory of graphs that are no longer referenced."""


class CudaRecorder:
    """Recorder for a CUDA device. Graphs run one at a time, so they share a memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = None

    @contextmanager
    def warm_up(self) -> Iterator[None]:
        """Run the body on the capture stream."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    @contextmanager
    def refuse_waits(self) -> Iterator[None]:
        """Make torch raise an error if the body waits for the device."""
        before = torch.cuda.get_sync_debug_mode()
        _set_sync_debug_mode("error")
        try:
            yield
        finally:
            _set_sync_debug_mode(before)

    def has_room(self) -> bool:
        """Return whether free memory exceeds twice the highest memory use of any pass so far.

        A pass's memory use counts only what it allocates in addition to what is allocated now.
        """
        now_bytes = torch.cuda.memory_allocated(self._device)
        taken_bytes = torch.cuda.max_memory_allocated(self._device) - now_bytes
        free_bytes, _ = torch.cuda.mem_get_info(self._device)
        cached_bytes = torch.cuda.memory_reserved(self._device) - now_bytes
        return free_bytes + cached_bytes > 2 * taken_bytes

    def record(self, work: Callable[[], list[Tensor]]) -> Callable[[], None]:
        """Capture `work`; return a function that queues a replay on the current stream.

        Raises BadInputError if CUDA rejects the captured work, because torch's allocator and
        generators are then unusable in this process.
        """
        graph = torch.cuda.CUDAGraph()
        current, failure = torch.cuda.current_stream(self._device), None
        try:
            # Other threads, such as a loader's, may still allocate memory.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                try:
                    work()
                except RuntimeError as error:
                    failure = error
        except RuntimeError as error:
            raise BadInputError(
                f"CUDA cannot capture the training step ({_first_line(failure or error)}). Use "
                "--no-cuda-graphs."
            ) from error
        finally:
            # Torch 2.11 leaves its own stream set if a capture fails.
            torch.cuda.set_stream(current)
        if failure is not None:
            raise failure
        if self._pool is None:
            self._pool = graph.pool()
        return graph.replay

    def release(self) -> None:
        """Wait for the device, then free the graphs' memory."""
        torch.cuda.synchronize(self._device)
        self._pool = None
        torch.cuda.empty_cache()


def _set_sync_debug_mode(mode: int | str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode(mode)


@dataclass
class CapturedPass:
    """The graphs of a forward and a backward for one input shape, and the tensors that they use."""

    inputs: Mapping[str, Tensor]
    forward: Callable[[], None]
    backward: Callable[[], None]
    totals: Tensor
    gradients: list[tuple[nn.Parameter, Tensor]]
    adds_to: Tensor | None  # the gradient that existed before the pass
    addresses: list[int]  # addresses of the parameters that the graph reads

    def run(self, batch: Mapping[str, Tensor], hooks: StepHooks) -> Tensor:
        """Replay the forward and backward; return their totals, which the next run overwrites."""
        for name, tensor in self.inputs.items():
            tensor.copy_(batch[name])
        self.forward()
        hooks.mark("forward")
        self.backward()
        for parameter, gradient in self.gradients:
            parameter.grad = gradient
        hooks.mark("backward")
        return self.totals


@dataclass
class _Shape:
    """State of one input shape: how many passes ran without a graph, and the captured pass."""

    passes: int = 0
    captured: CapturedPass | None = None


@dataclass
class _PassInCapture:
    """Tensors of a pass while it is being captured.

    `loss` starts the backward, and `outputs` are the totals that the forward returns.
    """

    loss: Tensor | None = None
    outputs: list[Tensor] = field(default_factory=list)


class GraphedLayout(Layout):
    """Layout of a single process that replays passes as CUDA graphs.

    Each input shape is captured after `WARMUP_PASSES` ordinary passes. The first micro-batch of a
    step, which creates gradients, and later ones, which add to them, use different graphs.
    `on_failure` is called once with the reason if passes cannot be captured.
    """

    shares_casts = False  # each graph has its own casts, at its own addresses

    def __init__(
        self,
        objective: nn.Module,
        recorder: Recorder,
        on_failure: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(objective)
        self._recorder = recorder
        self._on_failure = on_failure or warnings.warn
        self._shapes: dict[Hashable, _Shape] = {}
        self._uses_graphs = True

    @property
    def replays(self) -> bool:
        """Return whether any pass has been captured."""
        return any(shape.captured is not None for shape in self._shapes.values())

    def _forward_backward(self, batch: Batch, hooks: StepHooks) -> Tensor:
        held = self._first_gradient()
        if held is not None or not self.replays:
            return self._run_or_replay(batch, hooks, held)
        try:
            return self._run_or_replay(batch, hooks, held)
        except torch.OutOfMemoryError as error:
            self._disable_graphs(error)
        for parameter in self._parameters():
            parameter.grad = None
        return self._run_or_replay(batch, hooks, None)

    def evaluate(self, batch: Batch, hooks: StepHooks) -> Tensor:
        """Evaluate a micro-batch; if memory runs out, free the graphs and retry."""
        if not self.replays:
            return super().evaluate(batch, hooks)
        try:
            return super().evaluate(batch, hooks)
        except torch.OutOfMemoryError as error:
            self._disable_graphs(error)
        return super().evaluate(batch, hooks)

    def _run_or_replay(self, batch: Batch, hooks: StepHooks, held: Tensor | None) -> Tensor:
        """Run a forward and backward, by replaying a graph if possible.

        The graph is captured first if there have been enough warm-up passes. `held` is the first
        gradient that the pass adds to; None if the pass creates the gradients.
        """
        key = self._graph_key(batch, held) if self._uses_graphs else None
        if key is None:
            return super()._forward_backward(batch, hooks)
        shape = self._shapes.setdefault(key, _Shape())
        if (
            shape.captured is None
            and shape.passes >= WARMUP_PASSES
            and self._can_write_gradients(held)
        ):
            shape.captured = self._capture(batch, hooks, held)
        if shape.captured is not None and shape.captured.adds_to is held:
            if shape.captured.addresses == self._parameter_addresses():
                return shape.captured.run(batch, hooks)
            self._disable_graphs("a parameter's memory was replaced (p.data = …)")
            return super()._forward_backward(batch, hooks)
        shape.passes += 1
        with self._recorder.warm_up():
            if shape.passes == WARMUP_PASSES and held is None:
                return self._run_refusing_waits(batch, hooks)
            return super()._forward_backward(batch, hooks)

    def _graph_key(self, batch: Batch, held: Tensor | None) -> Hashable | None:
        """Return the key of the graph for a batch; None if its pass must not be captured.

        For example, a dispatch mode would not see the operators that a graph replays.
        """
        if torch._C._len_torch_dispatch_stack() > 0 or not isinstance(batch, Mapping):
            return None
        if not all(isinstance(tensor, Tensor) for tensor in batch.values()):
            return None
        trained = next((p for p in self._parameters() if p.requires_grad), None)
        if trained is None:
            return None
        shapes = tuple((name, tensor.shape, tensor.dtype) for name, tensor in batch.items())
        key = (shapes, held is None, trained.grad_dtype)
        return key if key in self._shapes or len(self._shapes) < MOST_SHAPES else None

    def _parameter_addresses(self) -> list[int]:
        return [parameter.data_ptr() for parameter in self._parameters()]

    def _first_gradient(self) -> Tensor | None:
        return next((p.grad for p in self._parameters() if p.grad is not None), None)

    def _can_write_gradients(self, held: Tensor | None) -> bool:
        """Return whether a graph can write the gradients of this pass.

        It can if the pass creates them (`held` is None), or if it adds to those that a graph wrote,
        which stay at the same addresses.
        """
        made = [one.captured.gradients[0][1] for one in self._shapes.values() if one.captured]
        return held is None or any(held is gradient for gradient in made)

    def _run_refusing_waits(self, batch: Batch, hooks: StepHooks) -> Tensor:
        """Run a pass that creates gradients, and raise an error inside it if the host would wait.

        Such a pass cannot be captured, so graphs are disabled, and the pass runs again.
        """
        try:
            with self._recorder.refuse_waits():
                return super()._forward_backward(batch, hooks)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._disable_graphs(error)
        for parameter in self._parameters():
            parameter.grad = None
        return super()._forward_backward(batch, hooks)

    def _capture(
        self, batch: Mapping[str, Tensor], hooks: StepHooks, adds_to: Tensor | None
    ) -> CapturedPass | None:
        if not self._recorder.has_room():
            self._disable_graphs("they need more memory than is free")
            return None
        inputs = {name: tensor.clone() for name, tensor in batch.items()}
        addresses = self._parameter_addresses()
        before = [parameter.grad for parameter in self._parameters()]
        work = _PassInCapture()

        def forward() -> list[Tensor]:
            with hooks.cast():
                loss_sum, count = self.module(inputs)
            work.loss = hooks.scale(loss_sum)
            work.outputs = [totals_of(loss_sum.detach(), count)]
            return work.outputs

        def backward() -> list[Tensor]:
            assert work.loss is not None
            work.loss.backward()
            work.loss = None
            return [p.grad for p in self._parameters() if p.grad is not None]

        try:
            replay_forward = self._recorder.record(forward)
            (totals,) = work.outputs
            replay_backward = self._recorder.record(backward)
        except RuntimeError as error:
            work.loss = None
            for parameter, gradient in zip(self._parameters(), before, strict=True):
                parameter.grad = gradient
            self._disable_graphs(error)
            return None
        gradients = [(p, p.grad) for p in self._parameters() if p.grad is not None]
        return CapturedPass(
            inputs, replay_forward, replay_backward, totals, gradients, adds_to, addresses
        )

    def _disable_graphs(self, why: Exception | str) -> None:
        self._uses_graphs = False
        self._shapes.clear()
        self._recorder.release()
        self._on_failure(
            f"CUDA graphs are not used ({_first_line(why)}), so each kernel is launched "
            "separately. Avoid the attempt with --no-cuda-graphs."
        )


def _first_line(why: Exception | str) -> str:
    lines = str(why).strip().splitlines() or [type(why).__name__]
    return lines[0][:200]
