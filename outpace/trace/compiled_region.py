"""Tracing of compiled forwards, with the tensors that Inductor's kernels would allocate.

AOTAutograd traces the forward with Inductor's decompositions, and its partitioner decides what the
forward saves and the backward recomputes (min-cut rematerialization; Horace He, "Min-cut optimal(*)
recomputation with AOTAutograd", 2022). No kernel is compiled: the two graphs run node by node under
fake tensors. Fusion is modelled by one rule: an elementwise result is written to memory only if the
graph returns it, or if an operator that is not fused (a matmul, attention) reads it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from outpace.nn.compilation import CompiledForward
from outpace.records.plan import Plan
from outpace.trace.allocation_tracer import AllocationTracer

_ATEN, _PRIMS = torch.ops.aten, torch.ops.prims
# Operators that Inductor fuses like pointwise ones, but that torch does not tag as pointwise.
_POINTWISE = frozenset(
    {_ATEN.clone, _ATEN._to_copy, _ATEN.embedding, _ATEN.cat, _ATEN.expand, _ATEN.full,
     _ATEN.full_like, _ATEN.where, _ATEN.select_scatter, _ATEN.slice_scatter, _ATEN.gather,
     _ATEN.index, _ATEN.arange, _ATEN.scalar_tensor, _PRIMS.convert_element_type, _PRIMS.iota}
)  # fmt: skip
_REDUCTIONS = frozenset(
    {_ATEN.sum, _ATEN.mean, _ATEN.var_mean, _ATEN.amax, _ATEN.amin, _ATEN.any, _ATEN.all}
)

_TENSOR = object()  # placeholder for tensors among arguments


def trace_compiled(model: nn.Module, plan: Plan, watch: AllocationTracer) -> None:
    """Make a model's compiled forwards run the graphs that the compiler would build.

    Do nothing if blocks are recomputed (which uses the same memory when compiled), if saved tensors
    are offloaded, under tensor or context parallelism, or in fp8: the forwards then run eagerly.
    """
    if (
        plan.recomputes
        or plan.offload_activations != "none"
        or plan.tp > 1
        or plan.cp > 1
        or plan.precision == "fp8"
    ):
        return
    for module in model.modules():
        if isinstance(module.forward, CompiledForward):
            module.forward = _PartitionedForward(module, module.forward.eager, watch)


class _PartitionedForward:
    """Forward that runs the forward and backward graphs that the compiler would build."""

    def __init__(
        self, module: nn.Module, forward: Callable[..., Any], watch: AllocationTracer
    ) -> None:
        self._module, self._forward, self._watch = module, forward, watch
        self._graphs: dict[Any, Callable[..., Any]] = {}
        self._counts = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        leaves, shape = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        key = tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else id(leaf)
                    for leaf in leaves)  # fmt: skip
        named = (*self._module.named_parameters(), *self._module.named_buffers())
        tensors_by_name: dict[str, Tensor] = dict(named)
        with self._watch.ignore():
            if key not in self._graphs:
                self._graphs[key] = self._build_graphs(leaves, shape)
                # The first call builds the graphs and keeps its arguments alive, so pass copies.
                self._counts = False
                self._graphs[key](tensors_by_name, [_empty_copy(tensor) for tensor in tensors])
            self._counts = True
            return self._graphs[key](tensors_by_name, tensors)

    def _build_graphs(self, leaves: Sequence[Any], shape: Any) -> Callable[..., Any]:
        """Return a function that runs the module's forward and backward graphs.

        Its arguments are the module's tensors by name, and the tensors among the inputs `leaves`.
        """
        from torch._functorch.aot_autograd import aot_function
        from torch._functorch.partitioners import min_cut_rematerialization_partition
        from torch._inductor.decomposition import select_decomp_table

        # The function outlives this call, so it must not hold tensors.
        places = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]

        def run(tensors_by_name: dict[str, Tensor], tensors: Sequence[Tensor]) -> Any:
            given = iter(tensors)
            all_leaves = [next(given) if leaf is _TENSOR else leaf for leaf in places]
            args, kwargs = tree_unflatten(all_leaves, shape)
            with _replace_forward(self._module, self._forward):
                return torch.func.functional_call(self._module, tensors_by_name, args, kwargs)

        return aot_function(
            run,
            fw_compiler=self._make_runner,
            bw_compiler=self._make_runner,
            partition_fn=min_cut_rematerialization_partition,
            decompositions=select_decomp_table(),
        )

    def _make_runner(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Return a function that runs a graph on a list of inputs and clears the list."""
        written = frozenset(node for node in gm.graph.nodes if _is_written_to_memory(node))

        def run(inputs: list[Any]) -> Any:
            nodes = _NodeInterpreter(
                gm, written if self._counts else frozenset(), self._watch, inputs
            )
            return nodes.run()

        run._boxed_call = True  # type: ignore[attr-defined]
        return run


def _empty_copy(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor).requires_grad_(tensor.requires_grad)


@contextmanager
def _replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    before = module.forward
    module.forward = forward
    try:
        yield
    finally:
        module.forward = before


class _NodeInterpreter(fx.Interpreter):
    """Interpreter of a graph that counts memory only for the results of the nodes in `written`.

    Fused kernels do not write other results to memory. The list of inputs is cleared, so that each
    input is freed after its last use.
    """

    def __init__(
        self,
        graph: fx.GraphModule,
        written: frozenset[fx.Node],
        watch: AllocationTracer,
        inputs: list[Any],
    ) -> None:
        super().__init__(graph)
        self._written, self._watch = written, watch
        self._inputs = list(reversed(inputs))
        inputs.clear()

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._inputs.pop()

    def run_node(self, n: fx.Node) -> Any:
        with self._watch.ignore(n not in self._written), torch.no_grad():
            return super().run_node(n)


def _is_written_to_memory(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    packet = getattr(node.target, "overloadpacket", None)
    if packet is None:
        return False  # one of several outputs
    if not _is_pointwise(node):
        return True
    return any(_reads_from_memory(user) for user in _list_readers(node))


def _list_readers(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes that read a node's values, including through views."""
    for user in node.users:
        if _is_view(user):
            yield from _list_readers(user)
        yield user


def _reads_from_memory(user: fx.Node) -> bool:
    if user.op == "output":
        return True
    packet = getattr(user.target, "overloadpacket", None)
    fused = packet is None or _is_pointwise(user) or packet in _REDUCTIONS or _is_view(user)
    return not fused


def _is_pointwise(node: fx.Node) -> bool:
    target: Any = node.target
    packet = getattr(target, "overloadpacket", None)
    return packet in _POINTWISE or torch.Tag.pointwise in getattr(target, "tags", ())


def _is_view(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return False
    returns = [one for one in schema.returns if one.alias_info is not None]
    return bool(returns) and not schema.is_mutable
