"""What torch's launchers tell a process about its place, read from a mapping that is given."""

from collections.abc import Mapping

from outpace.records.errors import BadInputError
from outpace.records.ranks import Ranks

_FIELDS = {
    "RANK": "rank",
    "WORLD_SIZE": "world_size",
    "LOCAL_RANK": "local_rank",
    "LOCAL_WORLD_SIZE": "local_world_size",
}


def ranks_from(environ: Mapping[str, str]) -> Ranks | None:
    """The ranks that torchrun, or a launcher like it, has set; None outside of one.

    RANK and WORLD_SIZE decide; without LOCAL_RANK and LOCAL_WORLD_SIZE one host is assumed.
    Raises BadInputError when they contradict each other or are no numbers.
    """
    given = {name: environ[name] for name in _FIELDS if environ.get(name)}
    if "RANK" not in given and "WORLD_SIZE" not in given:
        return None
    for needed in ("RANK", "WORLD_SIZE"):
        if needed not in given:
            raise BadInputError(
                f"the environment has {' and '.join(sorted(given))} but not {needed}. torchrun "
                "sets both RANK and WORLD_SIZE; unset them to train on one process."
            )
    given.setdefault("LOCAL_RANK", given["RANK"])
    given.setdefault("LOCAL_WORLD_SIZE", given["WORLD_SIZE"])
    numbers = {_FIELDS[name]: _number(name, text) for name, text in given.items()}
    return Ranks.parse(numbers, "environment (RANK, WORLD_SIZE, …)")


def restart_count(environ: Mapping[str, str]) -> int:
    """How often the elastic launcher has started this job anew; 0 at first and outside of one."""
    text = environ.get("TORCHELASTIC_RESTART_COUNT")
    return _number("TORCHELASTIC_RESTART_COUNT", text) if text else 0


def _number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise BadInputError(f"environment: {name} = {text!r} is not a whole number") from None
