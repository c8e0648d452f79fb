"""Detection of tiles, waves and thread blocks, from how time grows with size.

A matmul is computed tile by tile. Its time rises in steps as wide as a tile, and sizes between two
multiples waste time on unused results (tile quantisation). A device with s multiprocessors computes
s tiles at a time, so the last, partly filled wave costs as much as a full one (wave quantisation).
The threads of a CPU divide blocks among them in the same way. NVIDIA, "Matrix Multiplication
Background User's Guide", §§ "Tile Quantization" and "Wave Quantization".
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Widths in libraries, in ascending order: vector registers, blocks of them, GPU tiles.
TILES = (2, 4, 6, 8, 12, 14, 16, 24, 32, 48, 64, 96, 128, 192, 256)
GPU_TILES = ((64, 64), (128, 64), (64, 128), (128, 128), (256, 128), (128, 256), (256, 256))
# Steps explain a curve if their residual is at most this fraction of a straight line's.
_EXPLAINS = 0.5
# A smaller tile has all the steps of a larger one, so the larger one must fit clearly better.
_CLEARLY = 0.85


@dataclass(frozen=True)
class TileSteps:
    """Steps of the time at multiples of `tile`.

    `explained` is the fraction of the deviations from a straight line that the steps explain.
    `rise` is the height of a step, relative to the time at the smallest size.
    """

    tile: int
    explained: float
    rise: float


def find_tile(sizes: Sequence[int], seconds: Sequence[float]) -> TileSteps | None:
    """Return the steps in a sweep with small increments; None if there are none.

    A sweep must contain at least two steps to identify a tile.
    """
    n, t = np.asarray(sizes, dtype=float), np.asarray(seconds, dtype=float)
    if len(n) < 6:
        return None
    line = _residual(n, t)
    tried = [
        (tile, *_fit_line(np.ceil(n / tile), t))
        for tile in TILES
        if n.max() - n.min() >= 2 * tile and np.diff(np.sort(n)).min() * 2 <= tile
    ]
    found = _pick_tile([(tile, left) for tile, left, slope in tried if slope > 0])
    if found is None or line == 0 or found[1] > _EXPLAINS * line:
        return None
    slope = next(slope for tile, _, slope in tried if tile == found[0])
    return TileSteps(found[0], 1 - found[1] / line, slope / float(t[np.argmin(n)]))


def find_waves(
    columns: Sequence[int], seconds: Sequence[float], rows: int, multiprocessors: int
) -> tuple[tuple[int, int], float] | None:
    """Return the tile size whose waves explain a sweep's times, and the explained fraction.

    The sweep has one matmul per number of columns. A wave is as many tiles as the GPU has
    multiprocessors; each further wave takes as long as the first. Returns None if no tile size fits
    much better than a straight line.
    """
    n, t = np.asarray(columns, dtype=float), np.asarray(seconds, dtype=float)
    if len(n) < 6:
        return None

    def waves(high: int, wide: int) -> np.ndarray:
        tiles = np.ceil(rows / high) * np.ceil(n / wide)
        return np.asarray(np.ceil(tiles / multiprocessors))

    tried = [((high, wide), _residual(waves(high, wide), t)) for high, wide in GPU_TILES
             if len(set(waves(high, wide))) > 2]  # fmt: skip
    line = _residual(n, t)
    best = min(tried, key=lambda one: one[1], default=None)
    if best is None or line == 0 or best[1] > _EXPLAINS * line:
        return None
    return best[0], 1 - best[1] / line


def find_threads(
    sizes: Sequence[int], alone_s: Sequence[float], together_s: Sequence[float], threads: int
) -> tuple[int, float] | None:
    """Return the width of the blocks that threads divide among them, and the explained fraction.

    `alone_s` and `together_s` are the times of the sizes with one thread and with all. Each width
    is fitted to their ratio, because threads are idle if the blocks cannot be divided evenly. Steps
    due to tiles occur in both times and cancel out. Returns None if no width fits much better than
    a straight line.
    """
    n = np.asarray(sizes, dtype=float)
    sooner = np.asarray(alone_s, dtype=float) / np.asarray(together_s, dtype=float)
    if len(n) < 6 or threads < 2:
        return None

    def busy(wide: int) -> np.ndarray:
        blocks = np.ceil(n / wide)
        return np.asarray(blocks / threads / np.ceil(blocks / threads))

    tried = [(wide, *_fit_line(busy(wide), sooner)) for wide in (1, *TILES)
             if n.max() - n.min() >= 2 * wide * threads]  # fmt: skip
    line = _residual(n, sooner)
    found = _pick_tile([(wide, left) for wide, left, slope in tried if slope > 0])
    if found is None or line == 0 or found[1] > _EXPLAINS * line:
        return None
    return found[0], 1 - found[1] / line


def _pick_tile(tried: Sequence[tuple[int, float]]) -> tuple[int, float] | None:
    """Return the largest tile that fits clearly better than all smaller ones."""
    chosen: tuple[int, float] | None = None
    for tile, left in tried:
        if chosen is None or left < _CLEARLY * chosen[1]:
            chosen = (tile, left)
    return chosen


def _residual(x: np.ndarray, t: np.ndarray) -> float:
    return _fit_line(x, t)[0]


def _fit_line(x: np.ndarray, t: np.ndarray) -> tuple[float, float]:
    """Fit a straight line to t(x) by least squares; return the residual and the slope."""
    design = np.stack([np.ones_like(x), x], axis=1)
    solved, *_ = np.linalg.lstsq(design, t, rcond=None)
    return float(((t - design @ solved) ** 2).sum()), float(solved[1])


def next_multiple(size: int, of: int) -> int:
    """Return the smallest multiple of `of` that is at least `size`."""
    return -(-size // of) * of
