"""`outpace` with another account of memory: python limited.py MODE ARGUMENT …

traced: outpace's own account, as it is. stand-in: by a rough formula. blind: none. hog: none, and
rank 1 takes all that it may in its second step, while rank 0 waits for it in an exchange.
"""

import sys
import time

import torch

from outpace.cli.main import main
from outpace.jobs.memory.trace_worker import AccountSummary, TraceRequest
from outpace.jobs.train import job
from outpace.parallel.layout import Layout
from outpace.planner.model.flops import parameter_count, step_flops
from outpace.records.errors import BadInputError

# Numbers of the hidden width that a block keeps for a token.
KEPT = {"none": 16, "selective": 11, "attention": 3, "full": 1}


class StandIn:
    """Of gpt2's kind on one process."""

    def __call__(self, ask: TraceRequest) -> AccountSummary:
        plan, spec = ask.plan, ask.spec
        tokens = plan.micro_batch * ask.seq_len
        modes = plan.modes(spec.layers)
        numbers = sum(KEPT[mode] for mode in modes) + KEPT["none"] * (modes[0] != "none")
        parameters = parameter_count(spec)
        chunked = plan.loss == "chunked"
        kinds = {
            "weights": 4 * parameters,
            "gradients": 4 * parameters,
            "optimizer state": 8 * parameters,
            "activations": 4 * tokens * spec.hidden * numbers,
            "temporary": 0 if chunked else 16 * tokens * spec.vocab,
        }
        samples = plan.micro_batch * ask.accumulation
        return AccountSummary(
            peak_memory_bytes=sum(kinds.values()),
            needed_bytes=sum(kinds.values()),
            by_kind=kinds,
            step_s=1e-11 * step_flops(spec, ask.seq_len, samples, modes),
        )

    def give_up(self) -> bool:
        return False

    def close(self) -> None:
        """Nothing was started."""


class Blind:
    """Sees nothing."""

    def __call__(self, ask: TraceRequest) -> AccountSummary:
        raise BadInputError("cannot be traced")

    def give_up(self) -> bool:
        return False

    def close(self) -> None:
        """Nothing was started."""


def hog() -> None:
    """Let rank 1 grow in the midst of its second step, slowly enough to be stopped in time."""
    computed = Layout.gradients
    done = []

    def gradients(self, batches, given):
        done.append(1)
        if torch.distributed.get_rank() == 1 and len(done) == 2:
            held = []
            while True:
                held.append(torch.ones(4 << 20))
                time.sleep(0.01)
        return computed(self, batches, given)

    Layout.gradients = gradients


if __name__ == "__main__":
    mode, *arguments = sys.argv[1:]
    if mode == "hog":
        hog()
    if mode != "traced":
        job.Tracer = StandIn if mode == "stand-in" else Blind
    sys.exit(main(arguments))
