"""Check before the first step in a single process: unsaved state, and gradient accumulation."""

from collections.abc import Callable, Sequence

from torch import Tensor

from outpace.nn.compiler_exclusion import has_compiled_parts, run_eagerly
from outpace.parallel.layout import Batch, Layout, StepHooks
from outpace.parallel.parity.cut_difference import compare_accumulated
from outpace.parallel.parity.kept_state import find_kept_state
from outpace.parallel.parity.loss_scale import explain_backwards
from outpace.parallel.parity.state_messages import explain_kept_state, explain_reshaped
from outpace.records.errors import BadInputError
from outpace.records.plan import Plan


class StateCheck:
    """The check of the first batch in a single process (`FirstBatch` is that of several ranks).

    It finds state outside of checkpoints, and losses that change when a batch is accumulated in
    micro-batches. `say` receives warnings. `by_command`: a command started the run, so messages
    refer to its checkpoints instead of `state_dict()`.
    """

    def __init__(self, plan: Plan, say: Callable[[str], None], by_command: bool) -> None:
        self._plan, self._say, self._by_command = plan, say, by_command
        self.resumed = False

    def check(self, layout: Layout, passes: Sequence[Batch], hooks: StepHooks) -> Tensor | None:
        """Run a few samples of the first batch several times, and warn about problems.

        Returns None, because the gradients of the step are not among the results. Raises
        BadInputError for a forward or a loss that itself runs a backward.
        """
        writes = self._plan.offload_parameters != "none"
        with run_eagerly(self._plan.compile or has_compiled_parts(layout.objective)):
            found = find_kept_state(
                layout.objective,
                passes[0],
                StepHooks(hooks.cast),
                alone=True,
                other=passes[1] if len(passes) > 1 else None,
                writes=writes,
            )
            if found.backwards:
                raise BadInputError(explain_backwards(found.backwards))
            cut = None
            if not writes:
                cut = compare_accumulated(
                    layout.objective, self._plan, passes, StepHooks(hooks.cast)
                )
        if cut is not None:
            self._say(cut)
        if found.is_any:
            self._say(explain_kept_state([found], 1, self._by_command, self.resumed))
        if found.reshaped:
            self._say(explain_reshaped(found.reshaped))
        return None
