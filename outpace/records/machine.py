"""Machine: what there is to train on; Accelerator: what a chip can do, with its source."""

from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from outpace.records.base import Record

Dtype = Literal["fp32", "tf32", "bf16", "fp16", "fp8", "int8"]


class Peak(Record):
    """Dense peak rates of one chip by dtype, FLOP/s, and where they are published."""

    flops_per_s: dict[Dtype, PositiveFloat]
    source: str


Architecture = Literal["volta", "turing", "ampere", "ada", "hopper", "blackwell"]


class Accelerator(Record):
    """One kind of accelerator. `driver_name` is what its driver reports, without the maker."""

    name: str
    driver_name: str
    architecture: Architecture
    memory_bytes: PositiveInt
    memory_bytes_per_s: PositiveFloat
    peak: Peak


class Node(Record):
    """A host with accelerators, as it is sold. `accelerator` is a name in the catalog."""

    name: str
    accelerator: str
    devices: PositiveInt
    source: str


class Device(Record):
    """A device present in a machine. `accelerator` is its catalog name, None if not there."""

    name: str
    memory_bytes: int | None = None
    accelerator: str | None = None


class Machine(Record):
    """The host at hand. Names no user, path or address: records are sent to colleagues."""

    host_cores: PositiveInt
    host_memory_bytes: PositiveInt
    cpu: str
    cpu_features: tuple[str, ...] = ()
    devices: tuple[Device, ...] = ()
    system: str = ""
