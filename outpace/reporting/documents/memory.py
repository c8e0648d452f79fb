"""The document of `outpace memory --plot`: a rank's memory over a step and at its peak."""

from outpace.records.memory import MemoryAccount, MemoryUse
from outpace.records.units import show_bytes
from outpace.reporting.render.document import Document, DocumentSection
from outpace.reporting.sections import memory_anatomy


def memory_document(account: MemoryAccount, limit_bytes: int | None) -> Document:
    """Draw one account; `limit_bytes` is the device's memory, None if unknown."""
    use = MemoryUse(measured=account) if account.source == "measured" else MemoryUse(traced=account)
    peak = account.peak
    charts = (
        memory_anatomy.over_a_step(account, limit_bytes),
        memory_anatomy.at_the_peak(memory_anatomy.peak_by_source(use), limit_bytes),
    )
    return Document(
        "memory", "Memory of a training step",
        (f"Tensors take {show_bytes(account.peak_memory_bytes)} at the peak, in the "
         f"{peak.location}.",),
        (("rank", f"{account.rank} of {account.world_size}"), ("source", account.source)),
        (DocumentSection("Memory", charts),),
    )  # fmt: skip
