"""One rank of the tests of pipelines of custom modules, one trap each.

python tests/parallel/forked.py 2 tests/parallel/custom_pipeline_ranks.py CASE …

A case is ENTRY:STRATEGY of `zoo.pipelines`, or of some of the zoo's other files; `all` is each of
the former's MODULES. In fp32 over three steps of SGD with momentum and clipping: the
loss and every gradient of each step, and the state after each, against one process that takes the
micro-batches one after the other. Rank 0 prints by case how far they are apart, or what each rank
refused.
"""

import itertools
import json
import sys
import traceback

import torch
import torch.distributed as dist
from torch import nn
from zoo import data_parallel, pipelines, shares, traps

import outpace
from outpace.interop.custom_model import CustomModel, CustomObjective
from outpace.parallel.batches import cut
from outpace.parallel.tensors import whole
from outpace.records.axes import SPLITS
from outpace.records.errors import BadInputError

SAMPLES, STEPS, CLIP, MICRO_BATCHES = 8, 3, 0.5, 4


def plan_for(strategy):
    size = dist.get_world_size()
    (axis,) = SPLITS[strategy]
    if axis != "pp":
        each = SAMPLES if axis == "tp" else SAMPLES // size
        return outpace.Plan(strategy=strategy, micro_batch=each, **{axis: size})
    count = 1 if strategy == "mp" else MICRO_BATCHES
    each = SAMPLES // count
    return outpace.Plan(strategy=strategy, micro_batch=each, pp_microbatches=count, pp=size)


def apart(found, expected):
    distance = float((found - expected).abs().max()) / max(1.0, float(expected.abs().max()))
    return distance if distance == distance else float("inf")  # no maximum forgets NaN then


class Alone:
    """One process, which takes the parts of a batch one after the other."""

    def __init__(self, module, loss, parts):
        self.module, self.parts = module, parts
        self.objective = CustomObjective(CustomModel(module, loss))
        self.optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)

    def backward(self, batch):
        self.optimizer.zero_grad()
        totals = torch.zeros(2)
        for part in cut(batch, self.parts):
            loss_sum, count = self.objective(part)
            loss_sum.backward()
            totals += torch.stack((loss_sum.detach(), count.to(loss_sum.dtype)))
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad /= totals[1]
        return totals[0] / totals[1]


def compare(case):
    name, strategy = case.split(":")
    files = (
        pipelines.MODULES,
        pipelines.REFUSED,
        data_parallel.RUNNING,
        traps.MODULES,
        shares.MODULES,
    )
    entries = itertools.chain(*files)
    entry = next(one for one in entries if one.__name__ == name)
    plan = plan_for(strategy)
    module, own_loss, draw = entry(3)
    alone = Alone(*entry(3)[:2], plan.pp_microbatches)
    laid = outpace.parallelize(module, plan, loss=own_loss)
    optimizer = laid.make_optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    drawn, worst = torch.Generator().manual_seed(5), {}
    for _ in range(2):  # before the first step, as outpace train does
        laid.evaluate(laid.share(draw(torch.Generator().manual_seed(4), SAMPLES)))

    def see(kind, found, wanted):
        worst[kind] = max(worst.get(kind, 0.0), apart(found, wanted))

    for step in range(STEPS):
        batch = draw(drawn, SAMPLES)
        total = alone.backward(batch)
        see("loss", laid.forward_backward(laid.share(batch)), total)
        gradients = {own: p.grad for own, p in alone.module.named_parameters()}
        for own, parameter in laid.named_parameters():
            if (parameter.grad is None) != (gradients[own] is None):
                worst.setdefault("lost or made up", []).append(own)
            elif parameter.grad is not None:
                see("gradient", whole(parameter.grad), gradients[own])
        see("norm", laid.clip_grad_norm(CLIP), nn.utils.clip_grad_norm_(
            alone.module.parameters(), CLIP))  # fmt: skip
        optimizer.step()
        alone.optimizer.step()
        state = laid.state_dict()
        if state is not None:
            assert set(state) == set(alone.module.state_dict())
            for own, tensor in alone.module.state_dict().items():
                see("state", state[own], tensor)
        if step == 1:
            evaluated = laid.evaluate(laid.share(batch))
            alone.module.eval()
            with torch.no_grad():
                totals = torch.stack([torch.stack([t.float() for t in alone.objective(part)])
                                      for part in cut(batch, alone.parts)]).sum(0)  # fmt: skip
            see("evaluation", evaluated, totals[0] / totals[1])
            alone.module.train()
    return {"worst": worst}


def cases():
    """Those asked for; `all` stands for each entry of MODULES."""
    for case in sys.argv[1:]:
        entry, strategy = case.split(":")
        names = [one.__name__ for one in pipelines.MODULES] if entry == "all" else [entry]
        yield from (f"{name}:{strategy}" for name in names)


def main():
    dist.init_process_group("gloo")
    found = {}
    for case in cases():
        try:
            found[case] = compare(case)
        except BadInputError as refused:
            found[case] = {"refused": str(refused)}
        except Exception:
            print(traceback.format_exc(), file=sys.stderr)
            raise
    told = [None] * dist.get_world_size()
    dist.all_gather_object(told, found)
    if dist.get_rank() == 0:
        print(json.dumps({case: [one[case] for one in told] for case in found}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
