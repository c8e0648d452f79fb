"""The document of `outpace memory --plot`: a rank's memory over a step and at its peak."""

from outpace.records.memory import MemoryAccount
from outpace.records.units import show_bytes
from outpace.reporting.render.document import Document, DocumentSection
from outpace.reporting.sections import memory_anatomy


def memory_document(
    account: MemoryAccount, limit_bytes: int | None, model: str, step: str
) -> Document:
    """Draw the memory of a training step; `model` and `step` describe it in the document.

    `limit_bytes` is the device's memory, None if unknown.
    """
    by_kind = {str(kind): size for kind, size in account.peak.by_kind.items()}
    parts = [*memory_anatomy.at_the_peak({account.source: by_kind}, limit_bytes)]
    where, rank = "", "the fullest"
    if account.timeline:  # the planner's formula gives no moments, and only the fullest rank
        parts.insert(0, memory_anatomy.over_a_step(account, limit_bytes))
        where, rank = f", in the {account.peak.location}", str(account.rank)
    return Document(
        "memory", f"Memory of a training step of {model}",
        (f"Tensors take {show_bytes(account.peak_memory_bytes)} at the peak{where}.", step),
        (("rank", f"{rank} of {account.world_size}"), ("source", account.source)),
        (DocumentSection("Memory", tuple(parts)),),
    )  # fmt: skip
