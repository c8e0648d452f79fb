"""Options that the user did not give, and their default values."""

from collections.abc import Mapping


def default_words(defaults: Mapping[str, str]) -> str:
    """Return ' By default: …' with options and their defaults; '' if there are none."""
    if not defaults:
        return ""
    options = ", ".join(f"{option} {value}" for option, value in defaults.items())
    return f" By default: {options}."
