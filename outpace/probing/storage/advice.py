"""Advice on checkpoints and offloading, from measurements of a disk."""

from collections.abc import Iterator, Sequence

from outpace.probing.timing.gain import gain
from outpace.records.figure import Figure
from outpace.records.probe_results import Advice
from outpace.records.units import show_seconds

# Bytes per billion parameters: fp32 weights with AdamW's two moments, and the moments only.
_CHECKPOINT_BYTES, _MOMENTS_BYTES = 12e9, 8e9
_WORTH = 0.10  # minimum gain to report
_SLOW_FSYNC_S = 0.02


def advice_of(role: str, figures: Sequence[Figure]) -> tuple[Advice, ...]:
    """Return advice on using a disk for checkpoints, offloading or both, from its figures.

    `role` is "checkpoints", "offload" or "checkpoints and offload".
    """
    known = [figure for figure in figures if figure.value is not None]
    found = [*_advise_on_checkpoints(role, known)] if role != "offload" else []
    if "offload" in role:
        found += _advise_on_offloading(role, known)
    return (*found, *_advise_on_streams(role, known), *_advise_on_fsync(role, known))


def _advise_on_checkpoints(role: str, known: Sequence[Figure]) -> Iterator[Advice]:
    write = _fastest(known, "buffered write and fsync")
    read = _fastest(known, "sequential read")
    if write is None:
        return
    text = (
        "A checkpoint takes 12 GB per billion parameters (fp32 weights and AdamW's moments). "
        f"In the directory of {role} it is written in "
        f"{_show_transfer_time(_CHECKPOINT_BYTES, write)} "
        f"({write} through the cache, including fsync)"
    )
    if read is not None:
        text += f" and read in {_show_transfer_time(_CHECKPOINT_BYTES, read)} ({read})"
    text += ". Training continues in the meantime; save less often than that."
    yield Advice(about="storage", text=text, of=tuple(f.key for f in (write, read) if f))


def _advise_on_offloading(role: str, known: Sequence[Figure]) -> Iterator[Advice]:
    read, write = _fastest(known, "sequential read"), _fastest(known, "sequential write")
    if read is None or write is None:
        return
    took = _transfer_s(_MOMENTS_BYTES, read) + _transfer_s(_MOMENTS_BYTES, write)
    yield Advice(
        about="storage",
        text="AdamW's moments on disk (--offload-optimizer disk) are 8 GB per billion "
        f"parameters, read and written in every step: {show_seconds(took)} of each step "
        f"in the directory of {role} ({read} read, {write} written), if memory cannot "
        "cache them.",
        of=(read.key, write.key),
    )


def _advise_on_streams(role: str, known: Sequence[Figure]) -> Iterator[Advice]:
    for verb in ("read", "write"):
        blocks = [f for f in known if f.key.what == f"sequential {verb}"]
        largest = max((f.key.of["block_bytes"] for f in blocks), default=0)
        alike = [f for f in blocks if f.key.has(block_bytes=largest)]
        one = next((f for f in alike if f.key.has(queue=1)), None)
        most = max(alike, key=lambda f: f.value or 0.0, default=None)
        if one is None or most is None or most is one:
            continue
        by = gain(one, most)
        if by is None or by.low < _WORTH:
            continue
        yield Advice(
            about="storage",
            text=f"One stream does not fill the disk of {role}: {most.key.of['queue']} at once "
                 f"{verb} {most}, one alone {one} ({by.value:+.0%}). Ranks that {verb} their "
                 "shares of a checkpoint at the same time get this rate.",
            gain=by.value, low=by.low, high=by.high, of=(one.key, most.key),
        )  # fmt: skip


def _advise_on_fsync(role: str, known: Sequence[Figure]) -> Iterator[Advice]:
    sure = next((f for f in known if f.key.what == "fsync"), None)
    if sure is None or sure.value is None or sure.value < _SLOW_FSYNC_S:
        return
    yield Advice(
        about="storage",
        text=f"Syncing a few KiB to disk takes {show_seconds(sure.value)} in the directory of "
        f"{role}: a checkpoint of many small files waits that long for each file, and a log for "
        "each line that it syncs. A few large files cost less.",
        of=(sure.key,),
    )


def _fastest(known: Sequence[Figure], what: str) -> Figure | None:
    of_it = [figure for figure in known if figure.key.what == what]
    return max(of_it, key=lambda figure: figure.value or 0.0, default=None)


def _transfer_s(nbytes: float, figure: Figure) -> float:
    assert figure.value is not None
    return nbytes / figure.value


def _show_transfer_time(nbytes: float, figure: Figure) -> str:
    return show_seconds(_transfer_s(nbytes, figure))
