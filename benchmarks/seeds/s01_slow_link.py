"""DP and DDP compared with DDP over a slow link: the time for a number of steps.

    python benchmarks/seeds/s01_slow_link.py            # records results/seeds_slow_link.json
    python benchmarks/seeds/s01_slow_link.py --quick    # small; records nothing

Two processes, with one thread each, run in separate network namespaces on one bridge: once as fast
as the host copies, once limited to 1 Gbit/s. Jobs on the two links take turns, and so do steps of
DP and DDP in the fast ones. Medians of jobs are compared round by round, since all steps of a job
share what differs between starts. Without root or iproute2, the slow link is left out, and the fast
one is the host's own.
"""

import statistics
from collections.abc import Callable
from typing import Any

from claims import FIT, Claim, Experiment, run

MBIT_PER_S = 1000
STEPS, SMALL_BATCH = 200, 4
ROUNDS = 10  # enough that one outlier does not reach the ends of the 95 % interval
# GPT-2's shape with heads of 64 and its vocabulary, at 14 million parameters.
SMALL = {"family": "gpt2", "layers": 10, "hidden": 192, "heads": 3, "vocab": 50257,
         "max_positions": 128}  # fmt: skip
LARGE_STEPS, LARGE_SEQ_LEN = 30, 128
TITLES = {"dp": "DP", "ddp": "DDP"}

CLAIM = Claim(
    document=FIT,
    says="GPT-2, 200 steps of 4 samples per device: DP with NVLink 110 s, DDP with NVLink 101 s, "
    "DDP without NVLink 131 s. So DP is about 10 % slower than DDP, but 15 % faster than "
    "DDP over a slow link.",
    hardware="2 × TITAN RTX with two NVLinks; NCCL_P2P_DISABLE=1 for none",
    figures={
        "steps": 200,
        "seconds": {"DP, fast": 110.5948, "DDP, fast": 101.9003, "DDP, slow": 131.4367},
    },
)


def predict(quick: bool) -> dict[str, Any]:
    """Predict the document's 200 steps: fp32, sequences of 1,024, written scores."""
    from predictions import model, step

    found = {}
    for name, machine, strategy in (
        ("DP, fast", "2x-titan-rtx-nv2", "dp"),
        ("DDP, fast", "2x-titan-rtx-nv2", "ddp"),
        ("DDP, slow", "2x-titan-rtx", "ddp"),
    ):
        plan = {"strategy": strategy, "dp_replicate": 2, "micro_batch": 4}
        found[name] = step(model("gpt2"), machine, plan, 1024, 8)
        found[name]["seconds"] = found[name]["step_s"] * STEPS
    return found


def models(quick: bool) -> dict[str, dict[str, Any]]:
    """Return the models to train, by name: spec, samples of both ranks, length, steps."""
    from outpace.catalog.models import preset

    small = {"model": SMALL, "global_batch": 2 * SMALL_BATCH, "seq_len": 32, "steps": STEPS,
             "rounds": ROUNDS}  # fmt: skip
    if quick:
        tiny = {**SMALL, "layers": 1, "hidden": 64, "heads": 1, "vocab": 512}
        return {"tiny": {**small, "model": tiny, "steps": 4, "rounds": 2}}
    spec = preset("gpt2").model_copy(update={"max_positions": LARGE_SEQ_LEN})
    large = {"model": spec.model_dump(mode="json"), "global_batch": 2, "seq_len": LARGE_SEQ_LEN}
    return {"14M": small, "124M": {**large, "steps": LARGE_STEPS, "rounds": ROUNDS}}


def measure(quick: bool) -> dict[str, Any]:
    """Return each model's table, and the links that were used."""
    from links import why_not

    lacking = why_not()
    return {
        "mbit_per_s": MBIT_PER_S,
        "no_slow_link": lacking,
        "models": {name: table(one, lacking is None) for name, one in models(quick).items()},
    }


def table(course: dict[str, Any], shaped: bool) -> dict[str, Any]:
    """Return the steps of each way, with a job on each link in every round."""
    rows: dict[str, list[list[float]]] = {}
    each = course["steps"] // course["rounds"]
    for number in range(course["rounds"]):
        links = ("fast", "slow") if shaped else ("fast",)
        for link in links if number % 2 == 0 else reversed(links):
            for strategy, seconds in job(course, link, each, shaped).items():
                rows.setdefault(f"{TITLES[strategy]}, {link}", []).append(seconds)
    base = rows["DDP, fast"]
    return {**course, "rows": {name: summed_up(jobs, base) for name, jobs in sorted(rows.items())}}


def job(course: dict[str, Any], link: str, rounds: int, shaped: bool) -> dict[str, list[float]]:
    """Return each step's seconds, for DP and DDP on a fast link and for DDP on a slow one."""
    import contests
    from links import network, start

    strategies = ("dp", "ddp") if link == "fast" else ("ddp",)
    contest = contests.Contest(
        course["model"], course["global_batch"], course["seq_len"],
        {name: {"strategy": name} for name in strategies},
    )  # fmt: skip

    def apart(processes: int, words: list[str]) -> None:
        with network(processes, MBIT_PER_S if link == "slow" else None) as hosts:
            start(hosts, words)

    how: Callable[[int, list[str]], None] = apart if shaped else contests.torchrun
    found = contests.run(contest, 2, rounds, how)
    return {name: one["seconds"] for name, one in found.items()}


def summed_up(jobs: list[list[float]], base: list[list[float]]) -> dict[str, Any]:
    """Summarise all steps, and each job's median relative to the base's job of the same round."""
    from overhead import interval

    medians = [[statistics.median(one) for one in way] for way in (jobs, base)]
    ratio, low, high = interval([a / b for a, b in zip(*medians, strict=True)])
    seconds = [second for one in jobs for second in one]
    return {
        "total_s": sum(seconds), "median_s": statistics.median(seconds), "ratio": ratio,
        "low": low, "high": high, "seconds": jobs,
    }  # fmt: skip


EXPERIMENT = Experiment(
    "slow_link", (CLAIM,), predict, measure,
    instead="Two processes on two cores instead of two GPUs, and a cable of 1 Gbit/s instead of "
            "PCIe. DP is outpace's own, with the communication of torch.nn.DataParallel but "
            "between processes, since threads of one CPU have nothing to send. The document "
            "timed DP only with NVLink; likewise, DP is timed here only with the fast link.",
)  # fmt: skip

if __name__ == "__main__":
    run(EXPERIMENT, __doc__)
