"""Request for a probe: what to measure, on which device, and for how long."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from outpace.data.tokenizer_files import load_tokenizer
from outpace.interop.custom_model import build_custom_model
from outpace.interop.models import OpenedModel, open_model
from outpace.jobs.defaults import resolve_seq_len
from outpace.probing.loader.dataset import LoaderData
from outpace.records.errors import BadInputError
from outpace.records.model import ModelSpec
from outpace.records.probe_results import SectionName
from outpace.records.settings import TrainSettings

# Seconds per section, quick and full: all sections together take at most 60 s and 10 minutes.
SECONDS: Mapping[SectionName, tuple[float, float]] = MappingProxyType(
    {
        "matmul": (9, 120), "memory": (4, 45), "storage": (4, 40), "loader": (7, 45),
        "allreduce": (8, 90), "collectives": (11, 135), "steps": (7, 150),
    }
)  # fmt: skip
BETWEEN_RANKS: tuple[SectionName, ...] = ("allreduce", "collectives", "steps")


@dataclass(frozen=True)
class ProbeRequest:
    """Request for a probe; `settings` determine device, model, data and directories.

    `within_s`: time for all sections; None: the default. `environ`: environment variables to check
    for settings that cost speed, along with the host; None if the launching process checks them.
    """

    sections: tuple[SectionName, ...]
    quick: bool
    settings: TrainSettings
    command: str
    within_s: float | None = None
    environ: Mapping[str, str] | None = None

    def budget_s(self, section: SectionName) -> float:
        """Return the time budget of one section in seconds."""
        usual = {name: SECONDS[name][0 if self.quick else 1] for name in self.sections}
        if self.within_s is None:
            return usual[section]
        return self.within_s * usual[section] / sum(usual.values())

    def local_sections(self) -> tuple[SectionName, ...]:
        """Return the sections that one process measures alone."""
        return tuple(name for name in self.sections if name not in BETWEEN_RANKS)

    def rank_sections(self) -> tuple[SectionName, ...]:
        """Return the sections that need several processes."""
        return tuple(name for name in self.sections if name in BETWEEN_RANKS)

    def check(self) -> None:
        """Raise BadInputError for invalid input, before anything is measured."""
        if "matmul" in self.sections:
            self.tokens()
            self.spec()
        if "storage" in self.sections:
            self.directories()

    def spec(self) -> ModelSpec:
        """Return the spec of the model for which sizes are recommended.

        Raises BadInputError for a custom model.
        """
        spec = open_model(self.settings.model).spec
        if spec is None:
            raise BadInputError(
                f"--model {self.settings.model}: the dimensions of a custom model are unknown. "
                "Pass a preset, a Hugging Face directory or a spec file; `outpace probe loader` "
                "measures a custom model's data set."
            )
        return spec

    def tokens(self) -> int | None:
        """Return a process's tokens per step; None if --seq-len and --micro-batch are both missing.

        If only one is given, the other is training's default sequence length, or one sample.
        """
        size, said = self.settings.micro_batch, self.settings.seq_len
        if not isinstance(size, int) and said is None:
            return None
        seq_len = resolve_seq_len(self.settings, self.spec().max_positions)
        return seq_len * (size if isinstance(size, int) else 1)

    def directories(self) -> dict[str, Path]:
        """Return the directories whose storage is measured, by purpose (checkpoints, offload).

        Raises BadInputError if one does not exist.
        """
        scratch = self.settings.offload_dir or Path(tempfile.gettempdir())
        places = {"checkpoints": self.settings.out or Path(), "offload": scratch}
        for role, place in places.items():
            if not place.is_dir():
                raise BadInputError(
                    f"cannot measure {place} for {role}: it is not a directory. Create it first, "
                    "or pass another one on the same disk."
                )
        return places

    def loader(self) -> LoaderData:
        """Return the data as training would load it.

        Raises BadInputError if the model or tokenizer cannot be read.
        """
        settings = self.settings
        opened = open_model(settings.model)
        reference = settings.tokenizer or opened.tokenizer
        masked = opened.spec is not None and opened.spec.objective == "masked"
        size = settings.micro_batch
        return LoaderData(
            sources=settings.data,
            text_field=settings.text_field,
            tokenizer=load_tokenizer(str(reference)) if reference else None,
            objective="masked" if masked else "causal",
            micro_batch=size if isinstance(size, int) else LoaderData.micro_batch,
            seq_len=settings.seq_len or LoaderData.seq_len,
            dataset=_custom_dataset(opened, settings),
        )


def _custom_dataset(opened: OpenedModel, settings: TrainSettings) -> Any | None:
    """Return a custom model's own data set, if it has one.

    Raises BadInputError if --data is given as well.
    """
    if opened.build is None:
        return None
    dataset = build_custom_model(opened.build).dataset
    if dataset is not None and settings.data != LoaderData.sources:
        raise BadInputError(f"{opened.name} comes with its own data set. Leave --data out.")
    return dataset
