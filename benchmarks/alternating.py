"""Times of several pieces of work that run in turn, A B C, C B A, in one process."""

import time
from collections.abc import Callable, Mapping


def alternating(
    steps: Mapping[str, Callable[[], object]], rounds: int, warmup: int = 2
) -> dict[str, list[float]]:
    """Return the seconds of each step in each round."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        for _ in range(warmup):
            step()
    for number in range(rounds):
        for name in steps if number % 2 == 0 else reversed(steps):
            began = time.perf_counter()
            steps[name]()
            times[name].append(time.perf_counter() - began)
    return times
