"""Machine: the devices, hosts and links to train on."""

from typing import ClassVar

from pydantic import Field, PositiveInt

from outpace.records.base import Record, entry
from outpace.records.probe_results import ProbeRecord
from outpace.records.topology import Topology


class Device(Record):
    """A device of a machine. `accelerator` is its name in the catalog, None if it has no entry."""

    name: str
    memory_bytes: PositiveInt | None = None
    accelerator: str | None = None


class Machine(Record):
    """A host's hardware, without users, paths or addresses, since records are shared."""

    has_checksum: ClassVar[bool] = True

    host_cores: PositiveInt = Field(le=2**24)
    host_memory_bytes: PositiveInt = Field(lt=2**63)
    cpu: str
    cpu_features: tuple[str, ...] = ()
    devices: tuple[Device, ...] = ()
    system: str = ""
    topology: Topology | None = entry(
        "links between devices, numbered as by the driver; None if it reports none"
    )
    probed: ProbeRecord | None = entry("results of outpace probe")

    def differences(self, other: "Machine") -> tuple[str, ...]:
        """Return the names of properties that affect speed and differ from another machine's."""
        names = tuple(device.name for device in self.devices)
        theirs = tuple(device.name for device in other.devices)
        compared = {"cpu": (self.cpu, other.cpu), "host_cores": (self.host_cores, other.host_cores),
                    "devices": (names, theirs)}  # fmt: skip
        return tuple(name for name, (own, its) in compared.items() if own != its)
