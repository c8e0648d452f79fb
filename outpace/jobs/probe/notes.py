"""Notes of a probe, in addition to its figures: misconfigured settings, published peaks."""

from collections.abc import Iterator, Mapping, Sequence

from outpace.probing.doctor.examine import examine
from outpace.probing.hardware.inventory import gather
from outpace.records.figure import Figure
from outpace.records.finding import Examination

_DRIVER_S = 10.0
_GRAVE = ("severe", "high")


def find_misconfiguration(environ: Mapping[str, str]) -> list[str]:
    """Describe outpace doctor's severe and high findings on this host, the costliest first."""
    return finding_notes(examine(gather(environ, timeout_s=_DRIVER_S)))


def finding_notes(examination: Examination) -> list[str]:
    """Describe each finding of severity high or severe, and point to `outpace doctor`.

    Empty if there are no such findings.
    """
    grave = [one for one in examination.findings if one.severity in _GRAVE]
    notes = [f"{one.severity}: {one.what} ({one.seen}). Do: {one.remedy}" for one in grave]
    if not notes:
        return []
    return [*notes, "`outpace doctor` shows what these settings cost, and lists minor findings"]


def peak_notes(figures: Sequence[Figure]) -> Iterator[str]:
    """Yield a note per dtype that compares the best measured matmul with the catalog's peak."""
    peaks = {f.key.of["dtype"]: f for f in figures if (f.key.kind, f.key.what) == _PEAK}
    for best in (f for f in figures if (f.key.kind, f.key.what) == _BEST):
        peak = peaks.get(best.key.of["dtype"])
        if peak is not None and best.value and peak.value:
            yield (
                f"the best {best.key.of['dtype']} matmul ({best}) is "
                f"{best.value / peak.value:.0%} of the catalog's peak ({peak})"
            )


_BEST, _PEAK = ("matmul", "best"), ("matmul", "peak")
