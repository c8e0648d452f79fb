"""A layout that was filled later has the weights of one that had them from the start.

Started on each rank with a plan; ranks compare their own parts.
"""

import json
import os
import sys
from functools import partial

import torch

from outpace.jobs.ranks.process_groups import process_groups
from outpace.launch.launcher_env import ranks_from
from outpace.nn.lora import add_adapters, first_value
from outpace.nn.loss import LanguageModelObjective
from outpace.nn.transformer import Transformer, initial_value
from outpace.parallel import LayoutRequest, apply
from outpace.parallel.deferred_init import fill, fills_later
from outpace.parallel.tensors import local
from outpace.planner.model.shapes import parameter_shapes
from outpace.records.model import ModelSpec
from outpace.records.plan import Plan

CPU = torch.device("cpu")


def parts(layout):
    return {name: local(p).detach().clone() for name, p in layout.named_parameters()}


def first(spec, shapes, plan, name):
    adapter = first_value(name, shapes, plan.lora_rank, 5)
    return initial_value(spec, 3, name, shapes[name]) if adapter is None else adapter


def main() -> None:
    spec = ModelSpec.parse(json.loads(sys.argv[1]), "test")
    shapes = parameter_shapes(spec)
    ranks = ranks_from(os.environ)
    with process_groups(ranks, CPU, 60.0):
        for values in json.loads(sys.argv[2]):
            plan = Plan.parse(values, "test")
            assert fills_later(plan), plan
            whole = LanguageModelObjective(add_adapters(Transformer(spec, seed=3), plan, 5))
            at_once = parts(apply(LayoutRequest(whole, plan, ranks, CPU)))
            with torch.device("meta"):
                objective = LanguageModelObjective(add_adapters(Transformer(spec), plan, 5))
            layout = apply(LayoutRequest(objective, plan, ranks, CPU))
            fill(layout, CPU, partial(first, spec, shapes, plan))
            later = parts(layout)
            assert later.keys() == at_once.keys()
            for name, values_ in at_once.items():
                assert torch.equal(values_, later[name]), (plan.strategy, name)
    if ranks.rank == 0:
        print(json.dumps("same"), flush=True)


if __name__ == "__main__":
    main()
