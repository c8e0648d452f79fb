"""The baseline: one process, nothing exchanged."""

from outpace.parallel.api import Layout, Request


def apply(request: Request) -> Layout:
    """Use the objective as it is."""
    return Layout(request.objective)
