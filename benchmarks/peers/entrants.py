"""The entrants: outpace and its alternatives, each with its best flags."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
OURS = "outpace"
# Environment variables of all processes of a run.
ENVIRONMENT: Mapping[str, str] = {
    "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "DS_ACCELERATOR": "cpu",
    "DS_BUILD_OPS": "0",
}  # fmt: skip


@dataclass(frozen=True)
class Peer:
    """A program of `programs/`, in an environment, with its flags."""

    name: str
    environment: str
    program: str
    flags: tuple[str, ...] = ()

    def command(self, python: Path, processes: int, case: Path, steps: int, log: Path) -> list[str]:
        """Return the command for one process, or for several by torchrun."""
        launcher = [str(python)]
        if processes > 1 or self.environment == "deepspeed":
            launcher += ["-m", "torch.distributed.run", "--standalone",
                         f"--nproc-per-node={processes}"]  # fmt: skip
        program = str(HERE / "programs" / f"{self.program}.py")
        flags = [f"--{flag}" for flag in self.flags]
        return [*launcher, program, str(case), str(steps), str(log), *flags]


_PLAIN = (
    Peer("plain loop", "torch", "plain"),
    Peer("plain loop, compiled", "torch", "plain", ("compile",)),
    Peer("Trainer", "trainer", "trainer"),
    Peer("Trainer, compiled", "trainer", "trainer", ("compile",)),
    Peer("accelerate", "accelerate", "accelerate_loop"),
    Peer("Lightning", "lightning", "lightning_loop"),
    Peer("DeepSpeed ZeRO-1", "deepspeed", "deepspeed_loop"),
)
# By kind of training: the peers that support it, and why others do not.
PEERS: Mapping[str, tuple[Peer, ...]] = {
    "": _PLAIN,
    "zero3": (
        Peer("plain loop, fully_shard", "torch", "plain", ("zero3",)),
        Peer("DeepSpeed ZeRO-3", "deepspeed", "deepspeed_loop", ("zero3",)),
    ),
    "offload": (
        Peer("plain loop, fully_shard, offloaded", "torch", "plain", ("zero3", "offload")),
        Peer("DeepSpeed ZeRO-3, offloaded", "deepspeed", "deepspeed_loop", ("zero3", "offload")),
    ),
}
CANNOT: Mapping[str, Mapping[str, str]] = {
    "zero3": {
        "Trainer": "its FSDP silently becomes DDP on a CPU",
        "accelerate": "its FSDP silently becomes DDP on a CPU",
        "Lightning": "refuses FSDP on a CPU",
    },
    "offload": {
        "Trainer": "its FSDP silently becomes DDP on a CPU",
        "accelerate": "its FSDP silently becomes DDP on a CPU",
        "Lightning": "refuses FSDP on a CPU",
    },
}
# Options of outpace in addition to the case's own settings.
OWN_SETTINGS: Mapping[str, tuple[str, ...]] = {
    "": (),
    "zero3": ("--strategy", "zero3"),
    "offload": ("--strategy", "zero3", "--offload", "cpu"),
}


def own_command(config: Path, processes: int, kind: str, steps: int, out: Path) -> list[str]:
    """Return outpace's command, with the settings in `config`."""
    return [sys.executable, "-m", "outpace", "train", "--config", str(config), "--nproc",
            str(processes), "--steps", str(steps), "--out", str(out), "--json",
            *OWN_SETTINGS[kind]]  # fmt: skip
