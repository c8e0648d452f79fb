"""One rank of the tests of collectives.

python tests/parallel/forked.py SIZE tests/jobs/probe/collectives_ranks.py WHAT
    probe N ONLY   rank 0 prints what a quick probe found, of N nodes of equal size
    spoil          each collective in turn gives something wrong on rank 1: what each rank says
    die DIR HOW    in an all-reduce rank 2 dies or hangs, or all fail: what they say is in DIR/RANK
    beside SIZE S  the figure of an all-reduce, and rates of a plain loop by hand, for S seconds
"""

import json
import os
import sys
import time
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist

from outpace.jobs.probe.collectives import probe_collectives
from outpace.jobs.ranks.process_groups import process_groups
from outpace.launch.launcher_env import ranks_from
from outpace.nn import torch_versions
from outpace.probing.collectives.buffers import Buffers
from outpace.probing.collectives.cases import AxisPlace, case, check_again
from outpace.probing.collectives.groups import axes_of, nodes_of
from outpace.probing.timing.interleave import run_turns
from outpace.probing.timing.link_model import COLLECTIVES
from outpace.probing.timing.measure import Effort, HostClock, WrongResultError, measure
from outpace.probing.timing.rank_clock import RanksClock
from outpace.records.errors import OutpaceError
from outpace.records.ranks import Ranks

CPU = torch.device("cpu")
# Of the groups; and for how long a rank hangs, until after the others have looked who is alive.
LIMIT_S, HANG_S = 3.0, 9.0


def place(groups):
    ranks = groups.ranks
    nodes = nodes_of([(rank, ranks.world_size) for rank in range(ranks.world_size)])
    buffers = Buffers(CPU, ranks.rank)
    return AxisPlace(
        axes_of(nodes)[0], dist.group.WORLD, groups.control, ranks.rank, "gloo", buffers
    )


def probe(groups, only):
    told = []
    only = None if only == "-" else only
    found = run_turns(probe_collectives(groups, CPU, True, 5.0, told.append, only))
    return {
        "figures": [json.loads(figure.model_dump_json()) for figure in found.figures],
        "fits": [json.loads(fit.model_dump_json()) for fit in found.fits],
        "advice": [one.text for one in found.advice],
        "notes": list(found.notes),
        "said": list(found.said),
        "told": told,
    }


CALLS = {
    "all-reduce": (dist, "all_reduce"), "all-gather": (torch_versions, "all_gather_single"),
    "broadcast": (dist, "broadcast"), "reduce-scatter": (torch_versions, "reduce_scatter_single"),
    "all-to-all": (dist, "all_to_all_single"), "send/recv": (dist, "batch_isend_irecv"),
}  # fmt: skip


def spoiled(original):
    """Its result is wrong in its last element, by little."""

    def call(*given, **more):
        if isinstance(given[0], list):  # of operations: what is received
            for work in original(*given):
                work.wait()
            next(one for one in given[0] if one.op is dist.irecv).tensor[-1] += 0.01
            return []
        done = original(*given, **more)
        given[0][-1] += 0.01
        return done

    return call


def stale(original):
    """It does what it should elsewhere, and leaves what an earlier call gave."""

    def elsewhere(one):
        return dist.P2POp(one.op, one.tensor.clone(), one.peer, group=one.group)

    def call(first, *given, **more):
        if isinstance(first, list):
            return original([elsewhere(one) for one in first])
        return original(first.clone(), *given, **more)

    return call


def spoil(groups):
    """For each collective: what all ranks say of it when only rank 1 gets something wrong.

    "after": where rank 1's values are wrong only after all was timed.
    """
    clock = RanksClock(HostClock(), groups.control)
    effort = Effort(0.1, rounds=1, sample_s=1e-4, most_samples=1)
    said = {}
    for which in ("nothing", *COLLECTIVES):
        for name, (owner, attribute) in CALLS.items():
            original = getattr(owner, attribute)
            if which == name and groups.ranks.rank == 1:
                setattr(owner, attribute, spoiled(original))
            try:
                here = place(groups)
                cases = [case(name, here, 300_000)]
                run_turns(measure(cases, clock, effort))
                check_again(cases, here.buffers)
                if which == "nothing":
                    if groups.ranks.rank == 1:
                        setattr(owner, attribute, stale(original))
                    check_again(cases, here.buffers)
            except WrongResultError as error:
                said.setdefault("after" if which == "nothing" else which, {})[name] = str(error)
            finally:
                setattr(owner, attribute, original)
    everyone = [None] * groups.ranks.world_size
    dist.all_gather_object(everyone, said, group=groups.control)
    return everyone


def die(groups, folder, how):
    """At its 30th all-reduce rank 2 ends at once, as the kernel ends a process, or sleeps.

    Or all ranks fail in it, with what is no failure of communication.
    """
    original, calls = dist.all_reduce, [0]

    def deadly(*given, **more):
        calls[0] += 1
        if calls[0] == 30:
            if how == "fail":
                raise RuntimeError("the backend cannot do this")
            time.sleep(HANG_S if how == "hang" else 0)
            os._exit(9)
        return original(*given, **more)

    if groups.ranks.rank == 2 or how == "fail":
        dist.all_reduce = deadly
    begin_s = time.monotonic()
    try:
        run_turns(probe_collectives(groups, CPU, True, 5.0))
        text = "nothing"
    except (OutpaceError, RuntimeError) as error:
        text = f"{type(error).__name__}: {error}"
    said = {"text": text, "after_s": time.monotonic() - begin_s}
    (Path(folder) / str(groups.ranks.rank)).write_text(json.dumps(said), encoding="utf-8")


class Counting(RanksClock):
    """Remembers how many calls it timed last."""

    def seconds(self, call, count):
        self.count = count
        return super().seconds(call, count)


def beside(groups, size, budget_s):
    """The figure that is measured of an all-reduce, and a plain loop by hand after each round.

    Both of as many calls: ranks that share cores begin apart, which few calls feel more than many.
    """
    here, by_hand = place(groups), []
    clock = Counting(HostClock(), groups.control)
    x = torch.empty(int(size) // 4)

    def loop(_):
        x.normal_()
        dist.all_reduce(x)
        dist.barrier()
        begin_s = time.perf_counter()
        calls = min(clock.count, 40)  # summed further, values would overflow
        for _ in range(calls):
            dist.all_reduce(x)
        slowest = torch.tensor([time.perf_counter() - begin_s], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        by_hand.append(slowest.item() / calls)

    effort = Effort(float(budget_s), rounds=8, most_samples=10_000)
    one = case("all-reduce", here, int(size))
    (figure,) = run_turns(measure([one], clock, effort, loop))
    del by_hand[0]  # while warming up
    pairs = list(zip(chain.from_iterable(figure.rounds), by_hand, strict=True))
    said = {"figure": json.loads(figure.model_dump_json()), "by_hand_s": by_hand}
    return {**said, "half_width": half_width(pairs)}


def half_width(pairs):
    """Of the interval that holds the median ratio in 99 of 100 cases, by order statistics."""
    ratios = sorted(ours / plain for ours, plain in pairs)
    away = int(2.58 * len(ratios) ** 0.5 / 2) + 1
    middle = len(ratios) // 2
    return (ratios[min(middle + away, len(ratios) - 1)] - ratios[max(0, middle - away)]) / 2


def main() -> None:
    torch.set_num_threads(1)
    ranks = ranks_from(os.environ)
    what, *rest = sys.argv[1:]
    if what == "probe":
        local = ranks.world_size // int(rest.pop(0))
        ranks = Ranks(rank=ranks.rank, world_size=ranks.world_size,
                      local_rank=ranks.rank % local, local_world_size=local)  # fmt: skip
    with process_groups(ranks, CPU, LIMIT_S if "hang" in rest else 600.0) as groups:
        said = {"probe": probe, "spoil": spoil, "die": die, "beside": beside}[what](groups, *rest)
    if ranks.rank == 0 and said is not None:
        print(json.dumps(said))


if __name__ == "__main__":
    main()
