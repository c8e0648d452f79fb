"""HostRates: matmul and memory rates of a host, measured in a few seconds."""

from pydantic import Field, PositiveFloat

from outpace.records.base import Record


class HostRates(Record):
    """Matmul rates of all cores that the process may use, and the memory rate of one thread."""

    flops_per_s: dict[str, PositiveFloat] = Field(description="FLOP/s of matmuls, by dtype")
    memory_bytes_per_s: PositiveFloat = Field(description="bytes read and written")
