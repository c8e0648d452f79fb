"""Machine: what there is to train on."""

from pydantic import Field, PositiveInt

from outpace.records.base import Record
from outpace.records.probed import Probed
from outpace.records.topology import Topology


class Device(Record):
    """A device present in a machine. `accelerator` is its catalog name, None if not there."""

    name: str
    memory_bytes: PositiveInt | None = None
    accelerator: str | None = None


class Machine(Record):
    """The host at hand. Names no user, path or address: records are sent to colleagues."""

    host_cores: PositiveInt
    host_memory_bytes: PositiveInt
    cpu: str
    cpu_features: tuple[str, ...] = ()
    devices: tuple[Device, ...] = ()
    system: str = ""
    topology: Topology | None = Field(
        default=None,
        description="links between devices, by the driver's numbers; None where it tells of none",
    )
    probed: Probed | None = Field(default=None, description="what outpace probe measured")
