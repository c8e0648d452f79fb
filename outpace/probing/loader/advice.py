"""Choice of loader settings: the cheapest of those that are about as fast as the fastest."""

from collections.abc import Iterator, Sequence

from outpace.probing.timing.gain import Gain, gain
from outpace.records.figure import Figure, Key
from outpace.records.probe_results import Advice
from outpace.records.units import show_count, show_seconds

# A worker is worthwhile if exposed loading takes a larger fraction of a step than this.
_SHOWN = 0.01
_WORTH = 0.05
# Settings within this fraction of the fastest count as equally fast, even if the difference is
# certain.
_ALIKE = 0.02


def advise(figures: Sequence[Figure]) -> tuple[Advice, ...]:
    """Return advice on loader settings and tokenization, from the figures of a probe."""
    unit = "tokens" if any(f.key.what == "tokens" for f in figures) else "samples"
    rates = [f for f in figures if f.key.kind == "loader" and f.key.what == unit]
    own = [f for f in rates if f.key.has(loader="outpace", pin="no")]
    return (
        *_advise_on_workers(own),
        *_advise_on_prefetch([f for f in rates if f.key.has(loader="torch", pin="no")]),
        *_advise_on_pinning([f for f in rates if f.key.has(loader="outpace")], cheapest(own)),
        *_compare_with_text(own, [f for f in rates if f.key.has(loader="text")]),
        *_advise_on_tokenising(
            [f for f in figures if f.key.kind == "tokenise" and f.key.what == "bytes"]
        ),
    )


def cheapest(figures: Sequence[Figure]) -> Figure | None:
    """Return the figure of the fastest loader setting, or of a cheaper one that is about as fast.

    A setting with fewer workers is cheaper; of those, one with less prefetching. Returns None if no
    figure has a value.
    """
    known = [f for f in figures if f.value is not None]
    if not known:
        return None
    best = max(known, key=lambda f: f.value or 0.0)

    def cost(figure: Figure) -> tuple[int, int]:
        return int(figure.key.of["workers"]), int(figure.key.of.get("prefetch", 0))

    def as_fast(figure: Figure) -> bool:
        by = gain(figure, best)
        return by is not None and not (by.is_certain and by.value > _ALIKE)

    return min([best, *filter(as_fast, known)], key=cost)


def _advise_on_workers(rates: Sequence[Figure]) -> Iterator[Advice]:
    alone = next((f for f in rates if f.key.of["workers"] == 0 and f.value), None)
    best = cheapest(rates)
    if best is None:
        return
    text = f"Recommended: {_flag(best)}, with {best} per training process"
    text += ", as fast as any number of workers." if best.key.of["workers"] == 0 else "."
    if alone is not None and alone is not best:
        text += f" Without workers, it is {alone}."
    if alone is not None and alone.value is not None:
        limit = show_count(_SHOWN * alone.value, alone.unit)
        text += f" Without workers loading is at most 1 % of a step up to {limit} of training"
        one = next((f for f in rates if f.key.of["workers"] and f.value), None)
        text += "." if one is None else f"; above that rate, {_flag(one)} hides it up to {one}."
    by = None if alone is None or alone is best else gain(alone, best)
    yield Advice(about="loader", text=text, of=_known_keys(best, alone), **_gain_fields(by))


def _advise_on_prefetch(rates: Sequence[Figure]) -> Iterator[Advice]:
    """Advise on prefetching with torch's DataLoader, at its best number of workers.

    outpace's loader always prefetches two batches.
    """
    best = cheapest(rates)
    if best is None:
        return
    rates = [f for f in rates if f.key.has(workers=best.key.of["workers"])]
    usual = next((f for f in rates if f.key.of.get("prefetch") == 2), None)
    if usual is None or usual.value is None or best.value is None:
        return
    count, by = best.key.of["prefetch"], gain(usual, best)
    if int(count) <= 2 or by is None or not by.is_certain or by.value < _WORTH:
        yield Advice(
            about="loader",
            text="Prefetching more than 2 batches per worker is not faster: leave it at 2.",
            of=_known_keys(*rates),
        )
        return
    yield Advice(
        about="loader",
        text=f"{count} prefetched batches per worker load {best}, 2 load {usual}. Set this as "
        "prefetch_factor in your own DataLoader; outpace's is 2.",
        of=_known_keys(best, usual), **_gain_fields(by),
    )  # fmt: skip


def _advise_on_pinning(rates: Sequence[Figure], recommended: Figure | None) -> Iterator[Advice]:
    """Compare pinned with pageable memory, without workers and with the recommended workers."""
    counts = (0, 0 if recommended is None else recommended.key.of["workers"])
    for pinned in (f for f in rates if f.key.has(pin="yes") and f.value):
        workers = pinned.key.of["workers"]
        if workers not in counts:
            continue
        other = next((f for f in rates if f.key.has(pin="no", workers=workers) and f.value), None)
        if other is None or pinned.value is None or other.value is None:
            continue
        by = gain(other, pinned)
        if by is None:
            continue
        sure = by.is_certain or by.high < 0
        advised = "--pin-memory" if by.value > 0 else "--no-pin-memory"
        yield Advice(
            about="loader",
            text=f"With {workers} workers, batches reach the device at {pinned} from pinned "
                 f"memory, at {other} from pageable: "
            + (f"{advised}." if sure else "no certain difference."),
            of=_known_keys(pinned, other), **_gain_fields(by),
        )  # fmt: skip


def _compare_with_text(rates: Sequence[Figure], text: Sequence[Figure]) -> Iterator[Advice]:
    prepared, written = cheapest(rates), cheapest(text)
    if prepared is None or written is None or not prepared.value or not written.value:
        return
    yield Advice(
        about="loader",
        text=f"A DataLoader that tokenises as it loads gives {written} at best (num_workers="
        f"{written.key.of['workers']}); prepared tokens, as outpace uses in training, are loaded "
        f"{prepared.value / written.value:.0f} times as fast.",
        of=_known_keys(prepared, written),
    )


def _advise_on_tokenising(rates: Sequence[Figure]) -> Iterator[Advice]:
    best = max((f for f in rates if f.value), key=lambda f: f.value or 0.0, default=None)
    if best is None or best.value is None:
        return
    count = best.key.of["processes"]
    yield Advice(
        about="tokenisation",
        text=f"Tokenizing takes {show_seconds(1000000000.0 / best.value)} per GB of text with "
        f"{count} process{'' if count == 1 else 'es'} ({best}), once: tokens are cached.",
        of=_known_keys(best),
    )


def _gain_fields(by: Gain | None) -> dict[str, float]:
    return {} if by is None else {"gain": by.value, "low": by.low, "high": by.high}


def _flag(figure: Figure) -> str:
    return f"--workers {figure.key.of['workers']}"


def _known_keys(*figures: Figure | None) -> tuple[Key, ...]:
    return tuple(figure.key for figure in figures if figure is not None)
