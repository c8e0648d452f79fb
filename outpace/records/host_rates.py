"""HostRates: rates of all cores of a host together, measured in a few seconds."""

from pydantic import Field, PositiveFloat

from outpace.records.base import Record


class HostRates(Record):
    """Rates of all cores that may be used together."""

    flops_per_s: dict[str, PositiveFloat] = Field(description="FLOP/s of matmuls, by dtype")
    memory_bytes_per_s: PositiveFloat = Field(description="bytes read and written")
