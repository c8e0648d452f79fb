"""Messages about differences that a custom model's tensor-parallel layouts cause."""

from collections.abc import Sequence

from outpace.records.errors import first_names

# Layouts of unsplit modules whose weights, or whose output, get only a part of their gradient.
SUMS_WEIGHTS = "replicated_with_grad_allreduce"
SUMS_OUTPUT = "replicated_with_output_grad_allreduce"

SPLIT_LOSS = (
    "Between a colwise and a rowwise matrix, each rank has a part of the features or heads. A "
    "norm, softmax, mean or sum over features computes something else there, and so does code that "
    "cuts or pairs them (chunk() of one matrix for q, k and v; whole keys of several heads). Split "
    "such a matrix into several, or give it the layout colwise_gather_output and the next one "
    "rowwise_split_input, or leave both out of layouts."
)
_MIXED = (
    "The forward or the loss reads weights of split matrices itself, without calling the matrices. "
    "Leave these matrices out of layouts, or use zero3."
)


def explain_parts(
    parts: Sequence[str], before: bool, tp: int, repeated: Sequence[str] = ()
) -> str | None:
    """Return a message about wrong gradients for which `layouts` of modules are the remedy.

    `parts` are unsplit parameters whose gradients are right once they are summed over ranks.
    `repeated` are those whose gradients are `tp` times too large. `before`: gradients of other
    parameters are wrong, too. If `parts` and `repeated` are empty, neither the gradients of a rank
    nor their sum are right, so layouts do not help, and None is returned.
    """
    if not parts and not repeated:
        return None
    if repeated and not parts:
        return (
            f"Ranks add up the gradient of {first_names(repeated)} {tp} times, since its layout is "
            f'"{SUMS_WEIGHTS}" or "{SUMS_OUTPUT}", but each rank has the whole gradient already '
            "(a colwise matrix after it adds up its input's gradient). Leave it out of layouts."
        )
    if parts and not before:
        return (
            f"Each rank uses {first_names(parts)} for its own heads or features only, so its "
            f"gradient is a part of the whole one. Add to layouts: the modules of these parameters "
            f'(or their own names), each with "{SUMS_WEIGHTS}".'
        )
    return (
        f"Each rank uses what {first_names(parts)} computes for its own heads or features only "
        "(as with keys and values of multi-query attention), so the gradients of that module and "
        "of all modules before it are parts of the whole ones. Give this module the layout "
        f'"{SUMS_OUTPUT}"; or "{SUMS_WEIGHTS}" if its input is split, too (a norm within heads).'
    )


def explain_split_failure(said: str, tp: int) -> str:
    """Return advice about a forward that fails under tensor parallelism with the message `said`."""
    if "DTensor" in said:
        return _MIXED
    return (
        f"After a colwise matrix, each of {tp} ranks has 1/{tp} of the features or heads, up to "
        "the next rowwise matrix. Ranks need whole heads, of keys and values, too. Do not write "
        "their number into the forward (view(…, -1, head_dim), not view(…, heads, head_dim)), and "
        "follow each colwise matrix by a rowwise one without modules, parameters or buffers for "
        "all features in between. Or give matrices the layouts colwise_gather_output and "
        "rowwise_split_input, or leave them out of layouts."
    )
