"""One rank of the tests of custom modules under strategies that reduce gradients over ranks.

python tests/parallel/forked.py 2 tests/parallel/data_parallel_ranks.py CASE …

A case is ENTRY:STRATEGY[:OPTION…], of `zoo.data_parallel`. Options: `accumulate` (two micro-batches
a rank), `checkpointing`. In fp32 over three steps of AdamW with weight decay and clipping: the loss
and every gradient of each step, and the state after each, against one process with the whole batch.
Rank 0 prints by case how far they are apart, or what was refused.
"""

import json
import sys
import traceback

import torch
import torch.distributed as dist
from torch import nn
from zoo.data_parallel import MODULES, REFUSED, RUNNING

import outpace
from outpace.parallel.tensors import whole
from outpace.records.axes import SPLITS
from outpace.records.errors import BadInputError

SAMPLES, STEPS, CLIP = 8, 3, 0.5
OPTIONS = {"checkpointing": {"checkpointing": "full"}}


def plan_for(strategy, options):
    size = dist.get_world_size()
    axes = (
        dict.fromkeys(SPLITS[strategy], 2) if strategy == "hsdp" else {SPLITS[strategy][-1]: size}
    )
    each = SAMPLES // size // (2 if "accumulate" in options else 1)
    changes = {k: v for option in options for k, v in OPTIONS.get(option, {}).items()}
    return outpace.Plan(strategy=strategy, micro_batch=each, **axes, **changes)


def apart(found, expected):
    found, expected = (t.detach().to(torch.complex128) for t in (found, expected))
    distance = float((found - expected).abs().max()) / max(1.0, float(expected.abs().max()))
    return distance if distance == distance else float("inf")  # no maximum forgets NaN then


def with_first_buffers(loss, alone, batch, shares):
    """The mean of the shares' losses, each from the same buffers, of which the first's are kept."""

    def put(buffers):
        for name, buffer in buffers.items():
            part, _, leaf = name.rpartition(".")
            alone.get_submodule(part)._buffers[leaf] = buffer.clone()

    before = {name: buffer.clone() for name, buffer in alone.named_buffers()}
    losses, kept = [], None
    for share in zip(*(tensor.chunk(shares) for tensor in batch), strict=True):
        put(before)
        losses.append(loss(alone, share))
        kept = kept or {name: buffer.clone() for name, buffer in alone.named_buffers()}
    put(kept)
    return sum(losses) / shares


def gradients_of(laid, alone):
    """Pairs of gradients, found and expected; raises AssertionError where only one has one."""
    expected = {own: p.grad for own, p in alone.named_parameters()}
    for own, parameter in laid.named_parameters():
        found, wanted = parameter.grad, expected[own]
        assert (found is None) == (wanted is None), own
        if found is not None:
            yield whole(found), wanted


def compare(case):
    name, strategy, *options = case.split(":")
    entry = next(one for one in (*MODULES, *RUNNING, *REFUSED) if one.__name__ == name)
    module, loss, draw = entry(3)
    alone, _, _ = entry(3)
    expected = torch.optim.AdamW(alone.parameters(), lr=0.01, weight_decay=0.1)
    if dist.get_rank():  # rank 0's values count
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                tensor.add_(1)
    laid = outpace.parallelize(module, plan_for(strategy, options), loss=loss)
    optimizer = laid.make_optimizer(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
    drawn, worst = torch.Generator().manual_seed(5), {}

    def see(kind, found, wanted):
        worst[kind] = max(worst.get(kind, 0.0), apart(found, wanted))

    for _ in range(STEPS):
        batch = draw(drawn, SAMPLES)
        expected.zero_grad()
        if entry in RUNNING:
            total = with_first_buffers(loss, alone, batch, dist.get_world_size())
        else:
            total = loss(alone, batch)
        total.backward()
        see("loss", laid.forward_backward(laid.share(batch)), total)
        for found, wanted in gradients_of(laid, alone):
            see("gradient", found, wanted)
        see("norm", laid.clip_grad_norm(CLIP), nn.utils.clip_grad_norm_(alone.parameters(), CLIP))
        optimizer.step()
        expected.step()
        state = laid.state_dict()
        if state is not None:
            assert set(state) == set(alone.state_dict())
            for own, tensor in alone.state_dict().items():
                see("state", state[own], tensor)
        evaluated = laid.evaluate(laid.share(batch))
        alone.eval()
        see("evaluation", evaluated, loss(alone, batch))
        alone.train()
    said = [None] * dist.get_world_size()
    dist.all_gather_object(said, worst)
    return {kind: max(one.get(kind, 0.0) for one in said) for kind in said[0]}


def main():
    dist.init_process_group("gloo")
    found = {}
    for case in sys.argv[1:]:
        try:
            found[case] = compare(case)
        except BadInputError as refused:
            found[case] = {"refused": str(refused)}
        except Exception:
            found[case] = {"failed": traceback.format_exc()[-1500:]}
    dist.barrier()
    if dist.get_rank() == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
