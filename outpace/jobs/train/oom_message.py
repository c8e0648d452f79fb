"""Message about a memory shortage: what holds memory, and commands that would fit."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from outpace.jobs.memory.fit import SEARCH_BEFORE_S, SEARCH_S, MemoryFit
from outpace.jobs.ranks.oom_guard import Shortage
from outpace.jobs.train.context import Job, RunContext
from outpace.parallel import Layout
from outpace.planner.fit.proposals import Change, Proposal
from outpace.records.errors import OutOfMemoryError
from outpace.records.optimizers import ADAMW
from outpace.records.units import show_bytes
from outpace.training.callbacks import notify
from outpace.training.memory_anatomy import holders

_LARGEST = 4
PYTHON = "python"  # origin of settings passed to outpace.train


class OomMessage:
    """Formats a job's messages about actual and predicted memory shortages."""

    def __init__(self, job: Job, fitting: MemoryFit) -> None:
        self._job = job
        self._fitting = fitting
        self._before_bytes = fitting.held_bytes

    def check_fit(self) -> None:
        """Warn if the plan is predicted not to fit; raise OutOfMemoryError if that is certain."""
        short = self._fitting.shortage(self._job.plan)
        if short is None:
            return
        searching = f"Searching for settings that fit, for at most {SEARCH_BEFORE_S:.0f} s"
        notify(self._job.callbacks, "on_hint", f"{short.sentence}. {searching}")
        notify(self._job.callbacks, "on_stage", "searching for settings that fit in memory")
        text = self.format(short, search_s=SEARCH_BEFORE_S)
        if self._fitting.is_certain(self._job.plan):
            raise OutOfMemoryError(text)
        notify(self._job.callbacks, "on_hint", f"this may run {text}")

    def format(self, short: Shortage, search_s: float = SEARCH_S) -> str:
        """Format the message about a memory shortage, with settings that would fit.

        `search_s`: time limit in seconds of the search for such settings.
        """
        run = self._job.run_dir.path if self._job.run_dir.has_steps else None
        proposals = self._fitting.proposals(self._job.plan, short, run is not None, search_s)
        return format_oom(short, proposals, self._job.context, run)

    def anatomy(
        self, layout: Layout, optimizer: torch.optim.Optimizer, used_bytes: int
    ) -> tuple[str, ...]:
        """List what holds the `used_bytes` of this rank's memory, in lines for the user."""
        return anatomy(layout, optimizer, self._before_bytes, used_bytes)


def anatomy(
    layout: Layout, optimizer: torch.optim.Optimizer | None, before_bytes: int, used_bytes: int
) -> tuple[str, ...]:
    """List memory by kind, and the largest tensors that outlive a step, in lines for the user.

    `before_bytes`: memory in use before the model was built. The rest of `used_bytes` is listed as
    activations and buffers.
    """
    found = holders(layout, optimizer)
    kinds: dict[str, int] = {}
    for kind, _, size in found:
        kinds[kind] = kinds.get(kind, 0) + size
    rest = max(0, used_bytes - before_bytes - sum(kinds.values()))
    kinds["activations and buffers"] = rest
    if before_bytes:
        kinds["the process itself"] = before_bytes
    width = max(map(len, kinds))
    lines = [f"  {kind:<{width}}  {show_bytes(size):>12}" for kind, size in kinds.items()]
    largest = sorted(found, key=lambda holder: -holder[2])[:_LARGEST]
    named = ", ".join(f"{kind} {name} {show_bytes(size)}" for kind, name, size in largest)
    return (*lines, *([f"  largest that outlive a step: {named}"] if named else []))


def format_oom(
    short: Shortage, proposals: Sequence[Proposal], context: RunContext, run: Path | None
) -> str:
    """Format the whole message. `run` is the run to resume; None if nothing was trained."""
    lines = [f"out of memory: {short.sentence}.", *short.anatomy]
    lines += [short.advice] if short.advice else []
    if not proposals:
        return "\n".join([*lines, _format_no_proposals()])
    lines.append("What would fit, cheapest first, as predicted:")
    for number, proposal in enumerate(proposals, 1):
        command = changed_command(context.command, context.origins, proposal.settings, run)
        lines.append(f"{number}. {_format_proposal(proposal)}")
        lines.append(f"   {command}")
    return "\n".join(lines)


def _format_no_proposals() -> str:
    return (
        "No single change, nor any two together, is predicted to fit. Use several: --micro-batch "
        "1, --checkpointing full, --optimizer adamw-8bit, --offload disk; or a smaller --seq-len "
        "or model, or --strategy zero3 on more devices or hosts."
    )


def _format_proposal(proposal: Proposal) -> str:
    what = " and ".join(f"{name.replace('_', '-')} {v}" for name, v in proposal.settings.items())
    takes = f"{show_bytes(proposal.peak_memory_bytes)}, {_format_slowdown(proposal.slowdown)}"
    return f"{what}: {takes}{_format_caution(proposal)}"


def _format_slowdown(slowdown: float | None) -> str:
    if slowdown is None:
        return "step time n/a"
    return f"{abs(slowdown):.0%} {'slower' if slowdown >= 0 else 'faster'}"


def _format_caution(proposal: Proposal) -> str:
    if proposal.exact:
        return ""
    if proposal.settings.get("optimizer", ADAMW[0]) not in ADAMW:
        return " (a different optimizer with its own learning rate: leave out --lr)"
    return " (rounds differently, so the numbers change)"


def changed_command(
    command: Sequence[str], origins: Mapping[str, str], change: Change, run: Path | None
) -> str:
    """Return the changed command, or the changed Python call, ready to paste."""
    values: dict[str, Any] = dict(change)
    if run is not None:
        values = {**values, "out": str(run), "resume": True}
    if PYTHON in origins.values():
        words = [f"{name}={value!r}" for name, value in values.items()]
        return f"outpace.train(…, {', '.join(words)})"
    words = _drop_flags(command, [flag(name) for name in values])
    for name, value in values.items():
        words += [flag(name)] if value is True else [flag(name), str(value)]
    return shlex.join(words)


def flag(name: str) -> str:
    """Return the flag of a setting."""
    return "--" + name.replace("_", "-")


def _drop_flags(command: Sequence[str], flags: Sequence[str]) -> list[str]:
    kept: list[str] = []
    dropping = False
    for word in command:
        if word.startswith("--"):
            dropping = word.partition("=")[0] in flags
        if not dropping:
            kept.append(word)
        elif "=" in word:
            dropping = False
    return kept
