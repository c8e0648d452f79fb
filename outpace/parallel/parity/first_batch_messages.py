"""Messages about a module's forward, from the check of the first batch."""

from collections.abc import Sequence

from outpace.parallel.parity.mixed_samples import MixedDifference
from outpace.records.errors import first_names

BY_THEMSELVES = "its samples are computed one by one"
SWAPPED = "ranks swap some of their samples"

WAYS_OUT = {
    True: "Use another --strategy (outpace verify --model says which are equal to one process), or "
    "--check off to train anyway.",
    False: "Use another strategy (outpace.verify says which are equal to one process), or "
    'parallelize(…, check="off") to train anyway.',
}


def explain_gradient_cut(mixed: MixedDifference) -> str:
    """Return a warning that splitting the batch changes gradients but not the loss."""
    return (
        f"the gradient of the first batch changes when {BY_THEMSELVES}, as ranks and micro-batches "
        f"split it, though the loss does not ({first_names(mixed.names)}: by "
        f"{100 * mixed.gradient:.2g} %). So one process with the whole batch trains differently: "
        "the module decides something for all samples of a batch at once (a branch or a detach by "
        "the first sample, a mask over all samples, a gradient that is clipped or centred in the "
        "backward). To train the same, decide for each sample separately, and clip gradients in "
        "the step."
    )


def explain_hidden(names: Sequence[str]) -> str:
    """Return a message about a forward that writes to parameters of an unregistered module."""
    return (
        f"the module's forward changes the values of {first_names(names)}, which belong to a "
        "module in a plain attribute: no checkpoint contains them, and each micro-batch changes "
        "them again. Register that module (self.teacher = …, or an nn.ModuleList), and change its "
        "values between steps."
    )


def explain_moved_buffers(names: Sequence[str]) -> str:
    """Return a message about buffers that training depends on and each rank updates separately."""
    what, it = ("a buffer", "it") if len(names) == 1 else ("buffers", "them")
    return (
        f"the forward updates {first_names(names)}, {what} on which the loss or its gradient "
        "depends, now or some steps later. Ranks and micro-batches see parts of the batch, so one "
        "process with the whole batch would train differently: each rank updates its own copy, "
        f"each step begins with rank 0's copy, and each micro-batch updates {it} once. Sum what "
        f"updates {it} over the ranks (torch.distributed.all_reduce in the forward), and use one "
        "micro-batch per step."
    )


def explain_repeated_writes(names: Sequence[str], count: int) -> str:
    """Return a message about a forward that writes to parameters in each micro-batch."""
    return (
        f"the forward writes to {first_names(names)}, and this plan runs it {count} times per "
        "step, whereas one process with the whole batch runs it once. Values that change with each "
        f"write (an EMA teacher, a decay) change {count} times as often. Change parameters between "
        "steps, or use one micro-batch per step (a larger micro-batch, no pipeline). If writing "
        "twice is the same as writing once (clipped weights), nothing needs to be done."
    )


def explain_draws(alike: bool) -> str:
    """Return a message about a forward that draws random numbers.

    `alike`: the generators of all data-parallel ranks are in the same state.
    """
    numbers = (
        "the same numbers for different samples, since the ranks' generators are in one state "
        "(seed them with plan.data_rank(rank) added)"
        if alike
        else "numbers of its own"
    )
    return (
        "the forward or the loss draws random numbers (a mask, noise, a time step, dropout of your "
        f"own), not counting torch's dropout. Each rank and micro-batch draws {numbers}, so one "
        "process with the whole batch trains with other numbers. To train with the same ones, draw "
        "them in the data set, or from a generator seeded by each sample; otherwise, these numbers "
        "differ as those of dropout do."
    )


def explain_new_parameters(names: Sequence[str]) -> str:
    """Return a message about a forward that creates parameters, which no optimizer updates."""
    return (
        f"the forward creates {first_names(names)}, which did not exist before, so no optimizer "
        f"would update {'it' if len(names) == 1 else 'them'}. Create "
        f"{'it' if len(names) == 1 else 'them'} in __init__, or run a batch through the module "
        "once before you use it here."
    )


def explain_moved_back(names: Sequence[str], strategy: str) -> str:
    """Return a message about a backward that changes buffers on which the loss depends."""
    return (
        "the module's backward (a hook on a gradient, or a custom autograd Function) changes "
        f"{first_names(names)}, on which its loss depends, but under strategy {strategy} it would "
        "see gradients of parts of the batch, with another scale and at other times. Change "
        f"{'it' if len(names) == 1 else 'them'} between steps instead, using values that are the "
        "same on all ranks."
    )
