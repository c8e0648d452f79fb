"""Options that the user did not give, and their default values."""

from collections.abc import Mapping


def default_words(defaults: Mapping[str, str]) -> str:
    """Return a sentence on options and their defaults, after a space; '' if there are none."""
    if not defaults:
        return ""
    options = ", ".join(f"{option} {value}" for option, value in defaults.items())
    return f" By default: {options}."
