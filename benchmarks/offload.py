"""The time cost of each kind of offloading, and the memory that remains.

    python benchmarks/offload.py                        # all cases; records results/offload.json
    python benchmarks/offload.py --quick [--case NAME]  # a small model; records nothing

Time: one process trains with and without the option, alternating step by step (A B B A); the result
is the ratio of each pair. Memory: each case in a fresh process after three steps, from
/proc/self/status: anonymous and resident, between steps and at the end of a forward.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

# Options to compare: those of the plain plan, and those of the other.
CASES: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "optimizer-cpu": ({}, {"offload_optimizer": "cpu"}),
    "optimizer-disk": ({}, {"offload_optimizer": "disk"}),
    "parameters-cpu": ({}, {"offload_parameters": "cpu"}),
    "parameters-disk": ({}, {"offload_parameters": "disk"}),
    "activations-disk": ({}, {"offload_activations": "disk"}),
    "activations-disk-checkpointed": (
        {"checkpointing": "full"},
        {"checkpointing": "full", "offload_activations": "disk"},
    ),
    "all-disk": (
        {},
        {
            "offload_optimizer": "disk",
            "offload_parameters": "disk",
            "offload_activations": "disk",
        },
    ),
    "empty-cache": ({}, {"empty_cache": "true"}),
}
SHAPES = {
    False: {"layers": 8, "hidden": 512, "ffn": 1536, "vocab": 8192, "batch": 4, "seq_len": 256},
    True: {"layers": 2, "hidden": 128, "ffn": 384, "vocab": 512, "batch": 2, "seq_len": 64},
}
PAIRS, QUICK_PAIRS = 16, 4


def contender(options: dict[str, str], quick: bool, groups):
    """Return a plan on one process, ready to run steps."""
    from strategy_run import StrategyRun

    from outpace.records.model import ModelSpec
    from outpace.records.plan import Plan
    from outpace.training.synthetic import SyntheticTraining

    shape = dict(SHAPES[quick])
    batch, seq_len = shape.pop("batch"), shape.pop("seq_len")
    described = {"family": "llama", "heads": 8, "kv_heads": 8, "max_positions": seq_len, **shape}
    spec = ModelSpec.parse(described, "benchmark")
    plan = Plan.parse({"micro_batch": batch, **options}, "benchmark")
    return StrategyRun(plan, SyntheticTraining(spec, batch, seq_len), groups)


def time_case(case: str, quick: bool) -> None:
    """Print the pairs of seconds, with and without the option, in a separate process."""
    import torch

    from outpace.jobs.ranks.process_groups import process_groups
    from outpace.records.ranks import Ranks

    plain, moved = CASES[case]
    with process_groups(Ranks(), torch.device("cpu"), 60.0) as groups:
        without, with_lever = contender(plain, quick, groups), contender(moved, quick, groups)
        pairs = []
        for number in range(QUICK_PAIRS if quick else PAIRS):
            if number % 2:
                a, b = with_lever.step(), without.step()
            else:
                b, a = without.step(), with_lever.step()
            pairs.append((a.seconds, b.seconds))
    print(json.dumps(pairs))


def weigh(options: dict[str, str], quick: bool) -> None:
    """Print the memory in use, and the bytes of parameters, in a separate process."""
    import torch

    from outpace.jobs.ranks.process_groups import process_groups
    from outpace.records.ranks import Ranks

    seen: dict[str, int] = {}
    with process_groups(Ranks(), torch.device("cpu"), 60.0) as groups:
        held = contender(options, quick, groups)
        layout = held._stepper._layout

        def look(*_: object) -> None:
            seen["anonymous_after_forward_bytes"] = status("RssAnon")

        layout.module.register_forward_hook(look)
        held.step()
        seen["anonymous_bytes"], seen["resident_bytes"] = status("RssAnon"), status("VmRSS")
        seen["parameter_bytes"] = sum(p.nbytes for _, p in layout.named_parameters())
    print(json.dumps(seen))


def status(field: str) -> int:
    """Return the bytes in a line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def inner(*words: str):
    """Print the results of this program in another process."""
    # glibc keeps freed memory except for large pieces, which would hide what is freed.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, __file__, *words]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment)
    return json.loads(done.stdout)


def run_case(case: str, quick: bool) -> dict:
    """Return the cost of one option, with all measurements."""
    from overhead import interval

    flags = ["--quick"] if quick else []
    pairs = inner("--time", case, *flags)
    ratio, low, high = interval([a / b for a, b in pairs])
    return {
        "plain": CASES[case][0],
        "levers": CASES[case][1],
        "step_time_ratio": ratio,
        "low": low,
        "high": high,
        "median_step_s": statistics.median(a for a, _ in pairs),
        "median_plain_step_s": statistics.median(b for _, b in pairs),
        "memory": inner("--weigh", json.dumps(CASES[case][1]), *flags),
        "plain_memory": inner("--weigh", json.dumps(CASES[case][0]), *flags),
        "pairs_s": pairs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=CASES, help="one case; nothing is recorded")
    parser.add_argument("--quick", action="store_true", help="a small model; nothing is recorded")
    parser.add_argument("--time", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--weigh", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.time:
        time_case(arguments.time, arguments.quick)
        return
    if arguments.weigh:
        weigh(json.loads(arguments.weigh), arguments.quick)
        return
    from recording import save

    cases = {}
    for case in [arguments.case] if arguments.case else CASES:
        cases[case] = run_case(case, arguments.quick)
        said = {key: value for key, value in cases[case].items() if key != "pairs_s"}
        print(case, json.dumps(said, indent=1), flush=True)
    if not arguments.quick and arguments.case is None:
        print(save("offload", {"shape": SHAPES[False], "cases": cases}))


if __name__ == "__main__":
    main()
