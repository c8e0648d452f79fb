"""Memory accounts computed in a separate process while a job runs.

A trace creates a process group, which is impossible in a process that already has one, and its
memory must not count as this process's. Run as a program, this module answers each line of input
with one line of output.
"""

import json
import subprocess
import sys
from typing import IO, Any, Literal

from outpace.catalog.efficiency import has_fused_attention
from outpace.records.base import Record
from outpace.records.errors import BadInputError
from outpace.records.hardware import Accelerator
from outpace.records.interpreter import PYTHON
from outpace.records.memory import Kind, MemoryAccount
from outpace.records.model import ModelSpec
from outpace.records.plan import Plan
from outpace.records.settings import TrainSettings


class TraceRequest(Record):
    """A request for one rank's memory on one device. `settings` determine the optimizer."""

    spec: ModelSpec
    plan: Plan
    seq_len: int
    accumulation: int
    rank: int
    settings: TrainSettings
    accelerator: Accelerator | None  # None: a CPU
    ranks_per_host: int
    whole: bool = False


def require_traced_kernels(accelerator: Accelerator | None) -> None:
    """Raise BadInputError for a device whose kernels differ from those that a trace can run."""
    if accelerator is not None and not has_fused_attention(accelerator):
        raise BadInputError(
            f"{accelerator.name}: a trace runs the kernels for CUDA and CPUs, but kernels for "
            "Apple's GPUs keep different tensors. To estimate memory, use `outpace plan`, or "
            "`outpace estimate` without --depth."
        )


class AccountSummary(Record):
    """A rank's memory and estimated step time, for choosing between plans.

    `step_s` is None if unknown.
    """

    peak_memory_bytes: int
    needed_bytes: int
    by_kind: dict[Kind, int]
    step_s: float | None


class Tracer:
    """Traces plans in a process that starts with the first request and ends on `close`."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def __call__(self, ask: TraceRequest) -> AccountSummary:
        """Trace one rank's memory. Raises BadInputError for a plan that cannot be applied."""
        return AccountSummary.model_validate(self._request(ask))

    def trace_timeline(self, ask: TraceRequest) -> MemoryAccount:
        """Return one rank's account with its full memory timeline.

        Raises BadInputError if the step cannot be traced.
        """
        return MemoryAccount.model_validate(self._request(ask.model_copy(update={"whole": True})))

    def _request(self, ask: TraceRequest) -> dict[str, Any]:
        if self._process is not None and self._process.poll() is not None:
            self.close()
        if self._process is None:
            self._process = subprocess.Popen(
                [*PYTHON, "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                start_new_session=True,  # Ctrl-C is for the training process
            )
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None and answers is not None
        try:
            requests.write(ask.model_dump_json() + "\n")
            requests.flush()
            line = answers.readline()
        except OSError:
            line = ""
        if not line:
            self.close()
            raise BadInputError(
                "the plan's memory could not be traced: the tracing process ended, perhaps because "
                "it ran out of memory"
            )
        answer: dict[str, Any] = json.loads(line)
        if "refused" in answer:
            raise BadInputError(answer["refused"])
        return answer

    def give_up(self) -> bool:
        """Kill the tracing process, from another thread, so that pending calls fail.

        Returns False if no process runs.
        """
        process = self._process
        if process is None or process.poll() is not None:
            return False
        process.kill()
        process.wait()
        return True

    def close(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def serve(requests: IO[str], answers: IO[str]) -> None:
    """Trace one rank for each line of `requests`, and write the result as a line to `answers`.

    Requests are `TraceRequest`s in JSON, and results are JSON objects.
    """
    for line in requests:
        answers.write(json.dumps(_answer_request(TraceRequest.model_validate_json(line))) + "\n")
        answers.flush()


def account_of(ask: TraceRequest) -> MemoryAccount:
    """Trace one rank in this process. Raises BadInputError for a plan that cannot be applied."""
    # Loaded here to save 30 MiB in processes that only send requests.
    from outpace.trace.account import account

    return account(
        ask.spec,
        ask.plan,
        seq_len=ask.seq_len,
        accumulation=ask.accumulation,
        rank=ask.rank,
        settings=ask.settings,
        accelerator=ask.accelerator,
        ranks_per_host=ask.ranks_per_host,
    )


def time_of(ask: TraceRequest) -> float | None:
    """Return the step time in seconds that the planner predicts for a request; None if unknown."""
    from outpace.jobs.memory.step_time import step_time_s  # loaded here, too

    device: Literal["cpu", "cuda"] = "cpu" if ask.accelerator is None else "cuda"
    try:
        return step_time_s(
            ask.settings, ask.spec, ask.plan, ask.seq_len, ask.ranks_per_host, device
        )
    except BadInputError:
        return None  # memory alone is useful, too


def _answer_request(ask: TraceRequest) -> dict[str, Any]:
    try:
        found = account_of(ask)
    except Exception as error:  # plans that cannot be traced are not proposed
        return {"refused": str(error) or type(error).__name__}
    if ask.whole:
        return found.model_dump(mode="json")
    return {
        "peak_memory_bytes": found.peak_memory_bytes,
        "needed_bytes": found.needed_bytes,
        "by_kind": found.peak.by_kind,
        "step_s": time_of(ask),
    }


if __name__ == "__main__":
    serve(sys.stdin, sys.stdout)
