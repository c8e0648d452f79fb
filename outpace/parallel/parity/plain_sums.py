"""Results of the plain module's pass over the first global batch: sums, and all ranks' reports."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from outpace.nn.dtensor import is_spread, local
from outpace.parallel.layout import Batch, Layout
from outpace.parallel.parity.build_difference import BuildDifference
from outpace.parallel.parity.comparison import Projection, Taker, square
from outpace.parallel.parity.cut_difference import CutDifference
from outpace.parallel.parity.kept_state import KeptState, Totals
from outpace.parallel.parity.mixed_samples import MixedDifference
from outpace.parallel.parity.moved_parameters import MovedParameters
from outpace.parallel.parity.plain_copy import ModuleDtypes
from outpace.parallel.tensors import all_parameters, copies


@dataclass(frozen=True)
class PlainReport:
    """A rank's report to other ranks about its run of the module without a strategy.

    - `cut`: differences between a batch and its halves.
    - `state`: state that forwards keep.
    - `by_rank`: how much the loss changes with the rank.

    Names of parameters:

    - `made`: parameters that the forward creates.
    - `written`: parameters that the forward writes to.
    - `spread`: those of `written` that are sharded.
    - `by_samples`: those of `written` whose new values depend on samples.
    - `unseen`: parameters with writes that no observed operator made.
    - `unscaled`: parameters whose gradients do not scale with the loss.
    - `hidden`: parameters that the forward writes to, of modules that are not registered as
      submodules.

    Names of buffers and attributes:

    - `counted`: buffers whose changes depend on samples.
    - `unsure`: buffers whose changes may depend on samples.
    - `moved_back`: buffers that a backward changes and that the loss depends on.
    - `attributes`: attributes whose changes depend on samples.

    Fingerprints by name, or None on a rank without samples:

    - `prints`: those of the parameters that changed.
    - `buffer_prints`: those of the saved buffers that the first micro-batch changed.
    """

    cut: CutDifference
    state: KeptState
    made: Sequence[str]
    written: Sequence[str]
    spread: Sequence[str]
    by_samples: Sequence[str]
    unseen: Sequence[str]
    prints: Mapping[str, int | None] | None
    buffer_prints: Mapping[str, int | None] | None
    counted: Sequence[str]
    attributes: Sequence[str]
    unsure: Sequence[str]
    moved_back: Sequence[str]
    unscaled: Sequence[str]
    by_rank: float
    hidden: Sequence[str]


class PlainSums:
    """This rank's results of running the module without a strategy.

    `sums` begins with the sums of losses, of target counts and of absolute losses. Then it has an
    inner product of each parameter's gradient (see `projection`), and last the number of gradients
    that each parameter got.
    """

    def __init__(self, names: Sequence[str], model: nn.Module, device: torch.device) -> None:
        self.names = list(names)
        largest = max((p.numel() for p in all_parameters(model)), default=1)
        self.projection = Projection(largest, device)
        self.sums = torch.zeros(3 + 2 * len(names), dtype=torch.float64, device=device)
        # This rank's first micro-batch, and its mean loss if a forward can repeat it.
        self.first: tuple[Batch, float | None] | None = None
        self.two: list[tuple[Batch, Totals]] = []  # the first two micro-batches, with their totals
        self.moved: dict[str, Tensor] = {}  # new values of the parameters that the forward changed
        self.written: set[str] = set()  # including writes that changed no value
        self.by_samples: list[str] = []  # of `written`, those whose values depend on samples
        self.unseen: Sequence[str] = ()  # those written without an observed operator
        self.hidden: list[str] = []  # written parameters of modules in plain attributes
        self.buffers: dict[str, Tensor] = {}  # saved buffers that the first micro-batch changed
        self.moved_buffers: set[str] = set()  # the same, including buffers that are not saved
        self.moved_back: dict[str, Tensor] = {}  # saved buffers that only the backward changed
        self.drops = True  # whether forwards draw random numbers, or would if dropout were on
        self.user_backward = False  # whether the first graph has an autograd Function in Python
        self.keeps = False  # whether forwards change attributes, if recorded
        self.in_forward = False  # whether a forward is running
        self.backwards: set[str] = set()  # parameters that a backward in a forward has reached
        self.reports: list[PlainReport] = []  # of all ranks
        self.mixed = MixedDifference()  # equal on all ranks
        self.builds = BuildDifference()  # equal on all ranks, too
        self._taker: Taker | None = None
        self._places = {name: number for number, name in enumerate(names)}
        self._products: list[Tensor | None] = [None] * len(names)
        self._gradients = [0] * len(names)

    @property
    def states(self) -> list[KeptState]:
        """Return the state that forwards keep on each rank that has found any."""
        return [report.state for report in self.reports if report.state.is_any]

    def take_writes(self, watch: MovedParameters) -> None:
        """Record the parameters that forwards have written to, and restore their values."""
        self.unseen = watch.written_unseen()
        self.moved = watch.put_back()
        self.written, self.by_samples = watch.written, sorted(watch.written_by_samples)

    def take(self, name: str, parameter: nn.Parameter) -> None:
        """Add a projection of a parameter's gradient to the sums, and free the gradient.

        Dispatch modes are disabled meanwhile: observing these operators would double the time for
        small gradients.
        """
        if parameter.grad is None:
            return  # a user's hook has set it to None
        if self.in_forward:
            self.backwards.add(name)
        with _disable_current_modes():
            if self._taker is not None:
                self._taker(name, parameter.grad)
            else:
                self._add_product(self._places[name], self.projection.project(parameter.grad))
            parameter.grad = None

    def _add_product(self, place: int, product: Tensor) -> None:
        before = self._products[place]
        self._products[place] = product if before is None else before + product
        self._gradients[place] += 1

    def divert(self, taker: Taker | None) -> None:
        """Pass gradients to a function instead of adding them to the sums; None undoes this."""
        self._taker = taker

    def add_up(self) -> None:
        """Write the collected inner products and numbers of gradients to `sums`."""
        for place, product in enumerate(self._products):
            if product is not None:
                self.sums[3 + place] = product
        made = torch.tensor(self._gradients, dtype=torch.float64, device=self.sums.device)
        self.sums[3 + len(self.names) :] = made

    def count(self, number: int, piece: Batch, loss_sum: Tensor, count: Tensor) -> None:
        """Add the loss and the number of targets of a finished micro-batch to the sums."""
        totals = torch.stack((loss_sum.double(), count.double(), loss_sum.abs().double()))
        self.sums[:3] += totals
        if self.first is None:
            self.first = piece, float(totals[0] / totals[1])
        if len(self.two) < 2:
            self.two.append((piece, (float(totals[0]), float(totals[1]))))


def sum_gradients(
    layout: Layout, plain: PlainSums, holders: Sequence[ModuleDtypes], factor: float, ranks: int
) -> Tensor:
    """Return this rank's share of three sums for each parameter's gradient, (3, names).

    The rows are the projection of the gradient, the sum of its squares, and 1 for a gradient or 0
    for none. The first two are divided by the number of ranks that hold the same values, so that
    adding the results of all ranks counts each value once. `factor` is the ratio of the trained
    module's gradients to those of the module without a strategy.
    """
    named = dict(layout.named_parameters()) if layout.has_sums else {}
    sums = torch.zeros(3, len(plain.names), dtype=torch.float64, device=plain.sums.device)
    for number, name in enumerate(plain.names):
        parameter = named.get(name)
        if parameter is None or parameter.grad is None:
            continue
        held_tensors = sum(name in one.dtypes for one in holders if one.has_sums)
        share = copies(parameter.grad, ranks)
        alike = share if is_spread(parameter.grad) else held_tensors
        product = plain.projection.project_part(parameter.grad, parameter)
        sums[0, number] = product / (alike * factor)
        sums[1, number] = square(local(parameter.grad)) / (alike * factor**2)
        sums[2, number] = 1
    return sums
