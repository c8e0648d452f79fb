"""A number that depends on a loss's gradient, to detect effects that the loss does not show.

A gradient reversal whose factor grows, or features that are detached until some step, affect
training but not the loss at given weights.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from outpace.parallel.parity.comparison import Projection, square
from outpace.parallel.tensors import all_parameters


class GradientMeasure:
    """A single number that depends on all gradients of a model's trained parameters.

    It is their inner product with random weights plus twice their norm, so it exceeds rounding
    errors even if the inner product cancels.
    """

    def __init__(self, model: nn.Module) -> None:
        parameters = all_parameters(model)
        largest = max((p.numel() for p in parameters), default=1)
        device = parameters[0].device if parameters else torch.device("cpu")
        self._parameters, self._projection = parameters, Projection(largest, device)

    def take(self, loss: Tensor) -> float:
        """Return the measure of a loss's gradients, and free each gradient immediately.

        Nothing is stored in `.grad`, and no post-accumulate hook runs.
        """
        product = torch.zeros((), dtype=torch.float64, device=loss.device)
        squares = torch.zeros_like(product)

        def measure(gradients: Sequence[Tensor | None]) -> tuple[None]:
            for gradient in gradients:
                if gradient is not None:
                    product.add_(self._projection.project(gradient))
                    squares.add_(square(gradient))
            return (None,)

        # The nodes must stay alive: reentrant checkpoints create their graphs in the backward.
        nodes = [get_gradient_edge(p).node for p in self._parameters if p.requires_grad]
        with ExitStack() as stack:
            for node in nodes:
                stack.callback(node.register_prehook(measure).remove)
            for parameter in self._parameters:
                stack.enter_context(_without_accumulation_hooks(parameter))
            loss.backward()
        return float(product + 2 * squares.sqrt())


@contextmanager
def _without_accumulation_hooks(parameter: nn.Parameter) -> Iterator[None]:
    """Disable post-accumulate hooks inside the context, because they would find no gradient."""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    kept = dict(hooks)
    hooks.clear()
    try:
        yield
    finally:
        hooks.update(kept)
