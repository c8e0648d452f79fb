"""Messages about state that a user's module or loss keeps from step to step."""

from collections.abc import Sequence

from outpace.parallel.parity.kept_state import KeptState
from outpace.records.errors import first_names


def explain_reshaped(names: Sequence[str]) -> str:
    """Return a message about saved buffers whose shape a forward changes."""
    return (
        f"the forward changes the shape of {first_names(names)}, which state_dict() contains, so "
        "a checkpoint does not fit a newly built module, and ranks end up with different shapes. "
        "Create the buffer with its full size in __init__, and keep the number of rows in use in "
        "another buffer. If its size changes only in the first forward, run a batch through the "
        "module once. If each forward creates it again, use persistent=False."
    )


def explain_kept_state(
    kept: Sequence[KeptState], data_parallel: int, by_command: bool, resumed: bool = False
) -> str:
    """Return a warning about state that forwards keep from step to step; empty if there is none.

    `kept` is what each rank has found. `by_command`: a command started the run, so refer to its
    checkpoints instead of `state_dict()`. `resumed`: this run was resumed.
    """
    said = []
    states = [one for one in kept if one.found]
    if states:
        names = _names_in(states)
        own = " Each rank keeps its own, computed from its samples." if data_parallel > 1 else ""
        either = _EITHER if all(one.unseen for one in states) else ""
        said.append(
            f"the forward or the loss keeps {name_attributes(names)} from step to step{either}, "
            f"and {_name_affected(states)} depends on it. {CURE} Until then: "
            f"{_explain_unsaved(by_command, resumed, _affect_only_gradient(states))}{own}"
        )
    drawn = sorted({name for one in kept for name in one.generators})
    if drawn:
        said.append(_explain_generators(drawn))
    failure = next((one.failure for one in kept if one.failure), None)
    if failure is not None and not said:
        said.append(
            "it could not be determined whether the forward or the loss keeps state from step to "
            f"step: a second forward of a few samples fails ({failure})."
        )
    return " ".join(said)


def _affect_only_gradient(states: Sequence[KeptState]) -> bool:
    return all(one.of_gradient for one in states)


def _name_affected(states: Sequence[KeptState]) -> str:
    return "the gradient, though not the loss," if _affect_only_gradient(states) else "the loss"


def _explain_unsaved(by_command: bool, resumed: bool, of_gradient: bool) -> str:
    if not by_command:
        does = "trains differently" if of_gradient else "computes different losses"
        return f"state_dict() of the module does not contain it, so a run that loads it {does}."
    this = "this resumed run" if resumed else "a resumed run"
    begins = f"no checkpoint or exported model contains it, so {this} starts with its initial value"
    if of_gradient:
        return f"{begins}, and trains differently from an uninterrupted run."
    differ = "differ from an uninterrupted run's"
    return f"{begins}. Its losses, and those of outpace eval, {differ}."


_EITHER = (
    ", or draws numbers from a generator that outpace does not know: the same samples have a "
    "different loss each time"
)


def _explain_generators(names: Sequence[str]) -> str:
    return (
        f"the forward or the loss draws from {first_names([_strip_model(n) for n in names])}, a "
        "separate generator whose state is in no checkpoint, so a resumed run draws the same "
        "numbers from the start again and is not bitwise equal. Draw from torch's default "
        "generator, which is seeded for each step."
    )


def explain_evaluated_state(found: KeptState) -> str | None:
    """Return a warning if an evaluated model depends on state that is in no file, otherwise None.

    The search for state uses the evaluation data, in training mode.
    """
    if not found.found or found.unseen or found.of_gradient:
        return None
    return (
        f"in training the forward or the loss keeps {name_attributes(found.names)} from step to "
        "step, and the loss depends on it. The model's files do not contain it, so this is the "
        f"loss without the state that training has built up. {CURE}"
    )


def explain_state_after_resume(found: KeptState) -> str:
    """Return a warning about state that makes a resumed run differ, even in a single process."""
    return (
        "The result is right as long as the run is not interrupted, but a resumed run differs, "
        f"even in one process: the forward or the loss keeps {name_attributes(found.names)} from "
        "step to step, the loss depends on it, and the checkpoint does not contain it. "
        f"{CURE.removesuffix('.')}"
    )


def explain_state_apart(found: Sequence[KeptState], strategy: str, ways_out: str) -> str:
    """Return a message about state that would differ by rank, and with it the loss.

    `ways_out` is advice that ends the message.
    """
    states = [one for one in found if one.apart]
    apart = max(one.apart for one in states)
    what = "gradient" if _affect_only_gradient(states) else "loss"
    return (
        f"the forward or the loss keeps {name_attributes(_names_in(states))} from step to step, "
        f"and {_name_affected(states)} depends on it: under strategy {strategy} each rank would "
        f"keep its own, for its own samples, which changes the {what} of the next batch by "
        f"{100 * apart:.2g} %, and no checkpoint contains it. {CURE} {ways_out}"
    )


CURE = (
    "Keep it in a registered buffer of the module (self.register_buffer(name, tensor)), which is "
    "saved, and set to rank 0's values at the start of each step. In one process, get_extra_state "
    "and set_extra_state can save and load values other than tensors."
)


def explain_state_as_cause(found: Sequence[KeptState]) -> str | None:
    """Return a message that names state as the likely cause of a wrong loss or gradient.

    Returns None if no state was found.
    """
    states = [one for one in found if one.found]
    if not states:
        return None
    return (
        f"{_name_affected(states).capitalize()} depends on {name_attributes(_names_in(states))}, "
        "which the forward or the loss keeps from step to step, and which is not the same on the "
        f"ranks as in one process. {CURE}"
    )


def _names_in(states: Sequence[KeptState]) -> list[str]:
    return sorted({name for one in states for name in one.names})


def name_attributes(names: Sequence[str]) -> str:
    """Return a phrase that names the first few attributes."""
    shown = [_strip_model(name) for name in names]
    if not shown:
        return "something that outpace cannot name"
    if any(name.endswith(")") for name in shown):
        return first_names(shown)
    return f"{first_names(shown)} in {'an attribute' if len(names) == 1 else 'attributes'}"


def _strip_model(name: str) -> str:
    return name.removeprefix("model.")
