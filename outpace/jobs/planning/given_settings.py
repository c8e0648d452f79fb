"""Plan settings that the user fixes with --keep, parsed and validated."""

from collections.abc import Iterator
from typing import Annotated, Any, get_args

from pydantic import TypeAdapter, ValidationError

from outpace.planner.model.adapters import ADAPTER_NAMES
from outpace.records.base import suggest_choice
from outpace.records.errors import BadInputError, join_or, suggest
from outpace.records.plan import Plan

# Settings that --keep accepts: those that the search decides, and those that all plans share.
KEPT = (
    "strategy", "dp_replicate", "dp_shard", "zero", "tp", "cp", "pp", "ep", "pp_schedule",
    "virtual_stages", "stage_split", "sequence_parallel", "async_tp", "micro_batch",
    "pp_microbatches",
    "checkpointing", "checkpoint_every", "offload_activations", "offload_parameters",
    "offload_optimizer", "precision", "optimizer", "optimizer_in_backward", "loss", "compile",
    "bucket_mib", *ADAPTER_NAMES,
)  # fmt: skip


def split_settings(text: str | None) -> Iterator[tuple[str, str, str | None]]:
    """Yield text, name and value of each setting in "precision=bf16,micro-batch=1".

    The value is None if there is no equals sign.
    """
    for part in (text or "").split(","):
        if part.strip():
            name, equals, value = (word.strip() for word in part.partition("="))
            yield part.strip(), name.replace("-", "_"), value if equals else None


def read_keep(text: str | None) -> dict[str, Any]:
    """Parse "precision=bf16,micro_batch=1" as settings of a plan.

    Raises BadInputError for an unknown setting or an invalid value.
    """
    found: dict[str, Any] = {}
    for part, name, value in split_settings(text):
        if value is None:
            raise BadInputError(
                f"--keep {part}: write setting=value, such as precision=bf16. Settings: "
                f"{', '.join(KEPT)}."
            )
        if name not in KEPT:
            raise BadInputError(
                f"--keep {part}: the planner has no setting {name!r}."
                f"{_suggest_setting(name, value)} Settings: {', '.join(KEPT)}."
            )
        found[name] = parse_value(name, value)
    return found


_FEW_LETTERS = 4  # shorter words are prefixes of too many names


def _suggest_setting(name: str, value: str) -> str:
    """Return ' Did you mean …?' with settings that begin with the name, then similar ones.

    If several begin with it, return only those that accept the value (checkpoint=full rules out
    checkpoint_every).
    """
    start = name if len(name) >= _FEW_LETTERS else f"{name}_"
    begin = [known for known in KEPT if known.startswith(start)]
    begin = [known for known in begin if _accepts_value(known, value)] or begin
    if begin:
        return f" Did you mean {join_or(map(repr, begin))}?"
    return suggest(name, KEPT, "{}={}".format)


def _accepts_value(name: str, value: str) -> bool:
    try:
        parse_value(name, value)
    except BadInputError:
        return False
    return True


def parse_value(name: str, value: str, typed: str | None = None) -> Any:
    """Parse and validate the value of a field of `Plan`.

    `typed`: the option that sets the field, for messages; None means --keep.
    """
    typed = typed or f"--keep {name}={value}"
    known = Plan.model_fields[name]
    annotation: Any = known.annotation
    for bound in known.metadata:
        annotation = Annotated[annotation, bound]
    choices = get_args(known.annotation)
    whole = bool(choices) and all(isinstance(choice, int) for choice in choices)
    parts = value.split("+") if name == "lora_targets" else value
    try:
        given = int(value) if whole else parts
        found = TypeAdapter(annotation).validate_python(given, strict=False)
    except ValidationError as error:
        problem = error.errors()[0]
        remedy = f"{_format_allowed_values(problem)}.{suggest_choice(problem)}"
        raise BadInputError(f"{typed}: {remedy}") from None
    except ValueError:
        allowed = f"one of {', '.join(map(str, choices))}"
        raise BadInputError(f"{typed}: use {allowed}.") from None
    if (name, found) == ("loss", "plain"):
        raise BadInputError(
            "--keep loss=plain: the planner supports loss=auto (chunked when logits are "
            "large) and loss=chunked. Use one of these."
        )
    return found


def _format_allowed_values(problem: Any) -> str:
    kind, bounds = problem["type"], problem.get("ctx", {})
    if kind == "literal_error":
        return f"use one of {bounds['expected'].replace(' or ', ', ').replace(chr(39), '')}"
    if kind in ("int_parsing", "int_type", "int_from_float"):
        return "use a whole number"
    if kind == "greater_than":
        return f"use a whole number of at least {bounds['gt'] + 1}"
    if kind == "greater_than_equal":
        return f"use a whole number of at least {bounds['ge']}"
    if kind in ("bool_parsing", "bool_type"):
        return "use true or false"
    return f"{problem['msg'][0].lower()}{problem['msg'][1:]}"
