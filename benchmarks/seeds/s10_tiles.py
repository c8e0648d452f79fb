"""Divisibility, and tile and wave quantisation: matmuls whose sizes are slightly off.

    python benchmarks/seeds/s10_tiles.py            # records results/seeds_tiles.json
    python benchmarks/seeds/s10_tiles.py --quick    # small; records nothing

Matmuls of n columns, with n growing in small steps, and the head of GPT-2 with 50,257 outputs and
with larger numbers that are divisible by more, take turns on one thread.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from claims import FIT, THROUGHPUT, Claim, Experiment, run

ROUNDS = 30
ROWS, DEPTH = 384, 512
COLUMNS = tuple(range(256, 353, 4))
ODD = (255, 256, 257, 264, 272)
VOCABULARIES, TOKENS, WIDTH = (50257, 50264, 50304), 128, 768
MACHINE = "a100-sxm-80-gb"
# For an A100: 9 rows of tiles of 256 × 128, of which 12 columns (n = 1536) are one wave of its 108
# multiprocessors.
GPU_ROWS, GPU_DEPTH = 2304, 4096
GPU_COLUMNS = (1024, 1152, 1280, 1408, 1536, 1664, 1792, 1920, 2304)

CLAIMS = (
    Claim(
        document=THROUGHPUT,
        says="The document has only headings here: vector and matrix size divisibility, tile and "
        "wave quantisation, and the number and size of attention heads (each marked XXX).",
        hardware="none; we assume an A100",
        figures={},
    ),
    Claim(
        document=FIT,
        says="To be twice as fast in fp16, every dimension of every tensor has to be a multiple "
        "of 8, and so should the batch, for tensor cores.",
        hardware="none beside the figure",
        figures={"multiple": 8},
    ),
)


def predict(quick: bool) -> dict[str, Any]:
    """Rates of matmuls in bf16 on an A100: over waves, and of heads."""
    from outpace.catalog.node_names import find_node
    from outpace.planner.calibration.cluster import of_catalog

    device = of_catalog(find_node(MACHINE), 1).device
    sizes = [("waves", GPU_ROWS, n, GPU_DEPTH) for n in GPU_COLUMNS]
    sizes += [("heads", 8192, vocab, WIDTH) for vocab in VOCABULARIES]
    return {"rows": [{"of": of, "m": m, "n": n, "k": k, **on_device(device, m, n, k)}
                     for of, m, n, k in sizes]}  # fmt: skip


def on_device(device: Any, m: int, n: int, k: int) -> dict[str, float]:
    """Return the seconds and FLOP/s of a matmul."""
    import numpy as np

    from outpace.planner.hardware.device import matmul_s

    m_, n_, k_ = (np.array([float(size)]) for size in (m, n, k))
    seconds = float(
        matmul_s(device, np.array([device.rate("bf16")]), m_, n_, k_, np.array([2.0]))[0]
    )
    return {"seconds": seconds, "flops_per_s": 2.0 * m * n * k / seconds}


def measure(quick: bool) -> dict[str, Any]:
    """Measure the seconds of each size and of each head; find the sizes at which they jump."""
    import torch

    from outpace.probing.compute.tile_detection import find_tile

    rounds, many = (2, 4) if quick else (ROUNDS, 1)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        columns = timed({n: matmul(ROWS, n, DEPTH) for n in COLUMNS[::many]}, rounds)
        depths = timed({k: matmul(ROWS, 256, k) for k in ODD}, rounds)
        heads = timed({n: matmul(TOKENS, n, WIDTH) for n in VOCABULARIES}, max(2, rounds // 4))
    finally:
        torch.set_num_threads(before)
    steps = find_tile([*columns], [one["median_s"] for one in columns.values()])
    return {
        "rows": ROWS, "depth": DEPTH, "columns": columns, "depths": depths, "tokens": TOKENS,
        "width": WIDTH, "heads": heads, "threads": 1,
        "steps": None if steps is None else vars(steps),
    }  # fmt: skip


def matmul(m: int, n: int, k: int) -> Callable[[], object]:
    """Return a matmul in fp32, ready to run."""
    import torch

    drawn = torch.Generator().manual_seed(0)
    left, right = torch.randn(m, k, generator=drawn), torch.randn(k, n, generator=drawn)
    out = torch.empty(m, n)
    return lambda: torch.mm(left, right, out=out)


def timed(matmuls: dict[int, Callable[[], object]], rounds: int) -> dict[int, dict[str, Any]]:
    """Time matmuls in turn, each relative to the first of its round, for its size."""
    from alternating import alternating
    from overhead import interval

    took = alternating({str(size): call for size, call in matmuls.items()}, rounds)
    first = next(iter(matmuls))
    found = {}
    for size in matmuls:
        seconds: Sequence[float] = took[str(size)]
        pairs = zip(seconds, took[str(first)], strict=True)
        # Above 1: takes longer than its share of the work.
        ratio, low, high = interval([(a / size) / (b / first) for a, b in pairs])
        found[size] = {"median_s": statistics.median(seconds), "seconds": list(seconds),
                       "for_its_work": ratio, "low": low, "high": high}  # fmt: skip
    return found


EXPERIMENT = Experiment(
    "tiles", CLAIMS, predict, measure,
    instead="fp32 on one thread of a CPU, whose tiles are its vector registers; waves need a GPU's "
    "many multiprocessors.",
)  # fmt: skip

if __name__ == "__main__":
    run(EXPERIMENT, __doc__)
