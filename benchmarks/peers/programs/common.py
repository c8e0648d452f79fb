"""Code that all peers' programs share: the case's weights and batches, and a line for each step.

A program is called with the case's folder, the number of steps and the file for its lines, under
torchrun if there are several processes. In each step it uses its rank's part of the batch, as all
programs do.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from torch.utils.data import Dataset, Sampler

NAMES = {"tokens": "input_ids", "targets": "labels", "segments": "token_type_ids",
         "padding_mask": "attention_mask"}  # fmt: skip


class Case:
    """A case to train, as a peer needs it."""

    def __init__(self, folder: Path, steps: int, log: Path, device: str) -> None:
        document = json.loads((folder / "case.json").read_text())
        self.folder, self.steps, self.device = folder, steps, device
        self.architecture: str = document["architecture"]
        self.batch: int = document["batch"]
        self.lr: float = document["lr"]
        self.betas: tuple[float, float] = tuple(document["betas"])
        self.clip: float = document["clip"]
        self.bf16: bool = document["precision"] == "bf16"  # otherwise fp32
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.share = self.batch // self.world_size
        self._log = log.open("w", buffering=1) if self.rank == 0 else None

    @property
    def labelled(self) -> bool:
        """Return whether the data are texts with one label each, rather than text."""
        return self.architecture == "AutoModelForSequenceClassification"

    def model(self) -> torch.nn.Module:
        """Return the model with its initial weights in fp32; random ones if the case has none."""
        kind = getattr(transformers, self.architecture)
        where = self.folder / "model"
        if (where / "model.safetensors").is_file():
            model = kind.from_pretrained(where, dtype=torch.float32)
        else:
            with torch.device(self.device):
                model = kind.from_config(transformers.AutoConfig.from_pretrained(where))
        model.config.use_cache = False
        return model.to(self.device).train()

    def data(self) -> "Samples":
        """Return all samples of all steps, in order."""
        return Samples(self.folder / "batches", self.steps * self.batch)

    def order(self) -> "Order":
        """Return this rank's samples, step by step: a data loader's sampler."""
        return Order(self)

    def optimizer(self, model: torch.nn.Module, fused: bool = True) -> torch.optim.Optimizer:
        """Return the optimizer, which is the same for all peers."""
        return torch.optim.AdamW(model.parameters(), lr=self.lr, betas=self.betas,
                                 weight_decay=0.0, fused=fused)  # fmt: skip

    def said(self, loss: float | Tensor) -> None:
        """Report a completed step: rank 0 writes the mean of all ranks' losses."""
        mean = torch.as_tensor(loss, dtype=torch.float32).detach().clone()
        if self.world_size > 1:
            torch.distributed.all_reduce(mean)
        if self._log is not None:
            self._log.write(json.dumps({"loss": mean.item() / self.world_size}) + "\n")

    def end(self) -> None:
        """Exit all ranks together: torch 2.13 may hang if DDP's reducer owns its group last."""
        if self.world_size > 1:
            torch.distributed.barrier()
        sys.stdout.flush()
        os._exit(0)


class Samples(Dataset[dict[str, Tensor]]):
    """Samples by the names that transformers' models use."""

    def __init__(self, folder: Path, count: int) -> None:
        self._values = {
            name: np.load(folder / f"{name}.npy", mmap_mode="r")[:count]
            for name in NAMES
            if (folder / f"{name}.npy").is_file()
        }
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, values in self._values.items():
            own = torch.from_numpy(np.array(values[index]))
            found[NAMES[name]] = own.bool() if name == "padding_mask" else own
        if found["labels"].ndim:  # labels are the next tokens already, unshifted
            found["shift_labels"] = found["labels"]
        return found


class Order(Sampler[int]):
    """This rank's part of each step's batch."""

    def __init__(self, case: Case) -> None:
        first, share = case.rank * case.share, case.share
        self._places = [step * case.batch + first + at
                        for step in range(case.steps) for at in range(share)]  # fmt: skip

    def __iter__(self) -> Any:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def asked(*flags: str) -> tuple[Case, argparse.Namespace]:
    """Return the case from the command line, and which of a program's own flags are set."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("log", type=Path)
    for flag in (*flags, "cuda"):
        parser.add_argument(f"--{flag}", action="store_true")
    arguments = parser.parse_args()
    threads = os.cpu_count() or 1
    torch.set_num_threads(max(threads // int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1))
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    device = "cuda" if arguments.cuda else "cpu"
    return Case(arguments.folder, arguments.steps, arguments.log, device), arguments
