"""Rates of this host, measured in a few seconds: fp32 and bf16 matmuls, and memory.

Without measurements by a probe, these rates replace a guess based on vector width, which may be
several times too high or too low. They are measured in a separate process, because the threads of a
math library do not survive a fork.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache, partial

from outpace.records.host_rates import HostRates

_LIMIT_S = 60.0
_WIDTH = 768  # width of matmuls, as in a small model's layers
_ROWS = 256
_COPIED = 1 << 23  # fp32 elements: more than the caches of a few cores hold
_AT_LEAST_S = 0.4


def measure_host_rates(threads: int) -> HostRates | None:
    """Measure the matmul and memory rates of this host with `threads` cores.

    The first result is kept, so that all plans of a process use the same rates. Returns None if the
    measurement fails.
    """
    try:
        return _measure_in_subprocess(threads)
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


@cache
def _measure_in_subprocess(threads: int) -> HostRates:
    """Run `measure_rates` in a separate process. A failure raises an error, so it is not cached."""
    ended = subprocess.run(
        [sys.executable, "-m", __name__, str(threads)],
        capture_output=True, text=True, timeout=_LIMIT_S, check=True,
    )  # fmt: skip
    return HostRates.parse(json.loads(ended.stdout.splitlines()[-1]), "the host's rates")


def measure_rates(threads: int) -> HostRates:
    """Measure the matmul and memory rates of one thread, in this process.

    The matmul rates are multiplied by `threads`; the memory rate is not.
    """
    import torch

    # One thread, timed by its CPU time, which other programs do not affect.
    torch.set_num_threads(1)
    rates = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        x = torch.randn(_ROWS, _WIDTH, dtype=dtype)
        weight = torch.randn(4 * _WIDTH, _WIDTH, dtype=dtype)
        flops = 2.0 * _ROWS * _WIDTH * 4 * _WIDTH
        work = partial(torch.nn.functional.linear, x, weight)
        rates[name] = threads * flops / _least_cpu_s(work)
    source, target = torch.zeros(_COPIED), torch.zeros(_COPIED)
    copy_s = _least_cpu_s(partial(target.copy_, source))
    return HostRates(flops_per_s=rates, memory_bytes_per_s=2.0 * source.nbytes / copy_s)


def _least_cpu_s(work: Callable[[], object]) -> float:
    work()
    best, began = float("inf"), time.thread_time()
    while time.thread_time() - began < _AT_LEAST_S or best == float("inf"):
        started = time.thread_time()
        work()
        best = min(best, time.thread_time() - started)
    return best


if __name__ == "__main__":
    print(measure_rates(int(sys.argv[1])).model_dump_json())
