"""Check before step 1 whether a job fits into memory, and find changes that make it fit."""

import time
from dataclasses import dataclass

import psutil
import torch

from outpace.jobs.defaults import find_in_catalog
from outpace.jobs.memory.plan_costs import Account, JobSite, accounts_to_ask, predictor
from outpace.jobs.memory.trace_worker import TraceRequest
from outpace.jobs.ranks.oom_guard import Shortage, readings
from outpace.planner.fit.cost import Predict, most_bytes
from outpace.planner.fit.proposals import Change, Proposal, kinds_of_change, propose
from outpace.planner.fit.recompute_budget import plan_within
from outpace.probing.hardware.process_memory import anonymous_bytes, find_cgroup, give_back_free
from outpace.records.errors import BadInputError
from outpace.records.machine import Machine
from outpace.records.model import ModelSpec
from outpace.records.plan import AXES, Plan
from outpace.records.ranks import Ranks
from outpace.records.settings import TrainSettings
from outpace.records.units import show_bytes
from outpace.training.precision import default_precision

# Time limits of the search: short when ranks that ran out of memory wait for it, longer before the
# first step.
SEARCH_S, SEARCH_BEFORE_S = 60.0, 180.0


@dataclass(frozen=True)
class Limit:
    """Bytes that a rank may use, and a description of where the limit comes from."""

    bytes: int
    name: str


def limit_of(settings: TrainSettings, ranks: Ranks, device: torch.device) -> Limit:
    """Return the lowest limit of this rank: --memory-limit, the cgroup's, or available memory."""
    limits = _device_limits(device) if device.type == "cuda" else _host_limits(ranks, device)
    if settings.memory_limit is not None:
        limits.append(Limit(settings.memory_limit, "--memory-limit"))
    return min(limits, key=lambda limit: limit.bytes)


def _device_limits(device: torch.device) -> list[Limit]:
    free, _ = torch.cuda.mem_get_info(device)
    return [Limit(free + torch.cuda.memory_reserved(device), "the device's memory")]


def _host_limits(ranks: Ranks, device: torch.device) -> list[Limit]:
    own, share = anonymous_bytes(), ranks.local_world_size
    limits = [Limit(psutil.virtual_memory().available // share + own, "the host's free memory")]
    group = find_cgroup()
    if group is not None:
        (reading,) = readings(None, device, ranks)
        left = max(0, reading.soft_bytes - group.used_bytes())
        limits.append(Limit(left // share + own, reading.limit))
    return limits


def limit_device(limit_bytes: int | None, device: torch.device) -> None:
    """Limit the CUDA allocator's memory; do nothing on a CPU.

    Raises BadInputError on other devices.
    """
    if limit_bytes is None or device.type == "cpu":
        return
    if device.type != "cuda":
        raise BadInputError(
            f"--memory-limit works on a CPU and on CUDA devices, but the device is {device.type}. "
            "Leave out --memory-limit."
        )
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), device)


class MemoryFit:
    """Compares the memory that plans need with the memory of this job's ranks.

    `account` returns a rank's traced memory; without it or `spec`, nothing is predicted.
    `ahead_bytes`: bytes of this process that were prefaulted for training.
    """

    def __init__(
        self,
        settings: TrainSettings,
        ranks: Ranks,
        device: torch.device,
        machine: Machine,
        spec: ModelSpec | None,
        seq_len: int | None,
        account: Account | None,
        ahead_bytes: int = 0,
    ) -> None:
        if device.type == "cpu":
            give_back_free()  # preparing the data leaves cached memory
        self.limit = limit_of(settings, ranks, device)
        self._settings = settings
        self.device = device
        self.machine = machine
        self._spec = spec
        self._seq_len = seq_len
        # On a CPU, the process's own memory counts too, including its libraries.
        self.held_bytes = anonymous_bytes() - ahead_bytes if device.type == "cpu" else 0
        chip = find_in_catalog(machine, device)
        if chip is not None:
            least = min(chip.usable_bytes, self.limit.bytes)
            chip = chip.model_copy(update={"usable_bytes": least})
        self._site = JobSite(device, chip, ranks.local_world_size, self.held_bytes)
        self._account = account
        self._predict: Predict | None = None

    @property
    def predict(self) -> Predict | None:
        """Return a function that predicts a plan's costs on these ranks; None if impossible."""
        if self._account is None or self._spec is None or self._seq_len is None:
            return None
        if self._predict is None:
            self._predict = predictor(
                self._account, self._settings, self._spec, self._seq_len, self._site
            )
        return self._predict

    def trace_requests(self, plan: Plan) -> list[TraceRequest]:
        """Return requests to trace the ranks that may need the most memory; [] if impossible."""
        if self._account is None or self._spec is None or self._seq_len is None:
            return []
        return accounts_to_ask(self._settings, self._spec, plan, self._seq_len, self._site)

    def with_budget(self, plan: Plan) -> Plan:
        """Return the plan, with recomputation chosen to stay within --memory-budget, if set."""
        if self._settings.memory_budget is None:
            return plan
        return self.fit_budget(plan, self._settings.memory_budget)

    def fit_budget(self, plan: Plan, budget_bytes: int) -> Plan:
        """Choose what to recompute within a memory budget. Raises BadInputError if nothing fits."""
        if self.predict is None or self._spec is None:
            raise BadInputError(
                "--memory-budget needs a prediction, which is only available for outpace's "
                "transformers on token data. Use --checkpointing selective or full."
            )
        return plan_within(plan, self._spec, budget_bytes, self.predict)

    def shortage(self, plan: Plan) -> Shortage | None:
        """Return the predicted shortage of memory for a plan, or None.

        It is None if the plan fits or nothing can be predicted. The trace is skipped if a rough
        upper estimate already shows that the plan fits.
        """
        if self.predict is None or self._spec is None or self._seq_len is None:
            return None
        rough = most_bytes(self._spec, self._seq_len, plan)
        if self.held_bytes + rough <= self.limit.bytes:
            return None
        try:
            needed = self.predict(plan).peak_memory_bytes
        except BadInputError:
            return None  # models that cannot be traced are trained regardless
        if needed <= self.limit.bytes:
            return None
        return Shortage(
            0,
            f"a step is predicted to need {show_bytes(needed)} on the rank that needs the most, "
            f"more than the {show_bytes(self.limit.bytes)} of {self.limit.name}",
            needed,
        )

    def is_certain(self, plan: Plan) -> bool:
        """Return whether a plan certainly does not fit, because its tensors alone exceed the limit.

        Always False on devices other than a CPU.
        """
        if self.device.type != "cpu" or self.predict is None:
            return False
        return self.held_bytes + self.predict(plan).tensor_bytes > self.limit.bytes

    def proposals(
        self, plan: Plan, short: Shortage, resumes: bool = False, search_s: float = SEARCH_S
    ) -> list[Proposal]:
        """Return the cheapest changes with which a plan that did not fit should fit.

        If the plan used more memory than predicted, the changes must leave that much more free.
        `resumes`: the run resumes from a checkpoint, so the optimizer may not change. The search
        ends after `search_s` seconds.
        """
        if self.predict is None:
            return []
        try:
            # The failed allocation exceeded the limit, even if it is not counted as used.
            needed = max(short.used_bytes, self.limit.bytes + 1)
            too_low = max(0, needed - self.predict(plan).peak_memory_bytes)
        except BadInputError:
            return []
        until_s = time.monotonic() + search_s
        return propose(
            plan,
            self.limit.bytes - too_low,
            self.predict,
            self.changes(plan, resumes),
            enough=lambda: time.monotonic() > until_s,
        )

    def changes(self, plan: Plan, resumes: bool = False) -> list[list[Change]]:
        """Return changes to settings that the user did not set, one list per kind of change."""
        low = default_precision(self.device, self.machine) == "bf16"
        separate_host = self.device.type != "cpu"
        kinds = kinds_of_change(plan, low_precision=low, separate_host=separate_host)
        fixed = {"optimizer"} if resumes or self._settings.resume else set()
        # the budget already decided what is recomputed
        if self._settings.memory_budget is not None:
            fixed.add("checkpointing")
        if any(getattr(self._settings, axis) is not None for axis in AXES):
            fixed.add("strategy")
        return [kind for kind in kinds if kind and not fixed & set(kind[0])]
