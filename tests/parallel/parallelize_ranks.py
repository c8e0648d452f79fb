"""One rank of the tests of parallelize; rank 0 prints how far each case is from one process.

python tests/parallel/forked.py 2 tests/parallel/parallelize_ranks.py CASE …

A case is MODEL:STRATEGY[:bf16]. MODEL is one of MODELS below. In float64, or in fp32 under autocast
to bf16, over two steps with two micro-
batches each and clipping active: gradients, norm, loss, parameters and buffers after each step.
"""

import copy
import json
import sys
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

import outpace
from outpace.parallel.batchnorm import batch_norms
from outpace.parallel.tensors import whole
from outpace.records.axes import SPLITS

SAMPLES, STEPS, MICRO_BATCHES, CLIP = 8, 2, 2, 0.1


class Mlp(nn.Module):
    """Plain attributes, no list, no two layers alike; LayerNorm in the middle."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.norm = nn.LayerNorm(10)
        self.across = nn.Linear(10, 7)
        self.down = nn.Linear(7, 3)

    def forward(self, x):
        return self.down(torch.tanh(self.across(self.norm(torch.tanh(self.up(x))))))


def cnn():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True),
        nn.Conv2d(4, 5, 3, stride=2), nn.BatchNorm2d(5, momentum=None), nn.Tanh(),
        nn.Flatten(), nn.Linear(45, 3),
    )  # fmt: skip


def llama(layers=3, **changes):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
        use_cache=False, **changes,
    )  # fmt: skip
    return in_float64(LlamaForCausalLM(config))


def in_float64(model):
    """transformers' norms compute in fp32 whatever they are given; torch's do not."""
    for name, part in list(model.named_modules()):
        if type(part).__name__.endswith("RMSNorm"):
            norm = nn.RMSNorm(part.weight.shape, part.variance_epsilon)
            model.set_submodule(name, norm)
    return model


def squares(module, batch):
    inputs, targets = batch
    return (module(inputs) - targets).square().mean()


def vectors(drawn):
    return (
        torch.randn(SAMPLES, 6, generator=drawn, dtype=torch.float64),
        torch.randn(SAMPLES, 3, generator=drawn, dtype=torch.float64),
    )


def images(drawn):
    return (
        torch.randn(SAMPLES, 2, 9, 9, generator=drawn, dtype=torch.float64) * 3 + 1,
        torch.randn(SAMPLES, 3, generator=drawn, dtype=torch.float64),
    )


def tokens(drawn):
    numbers = torch.randint(40, (SAMPLES, 13), generator=drawn)
    lengths = torch.randint(1, 13, (SAMPLES, 1), generator=drawn)
    targets = numbers[:, 1:].masked_fill(torch.arange(12) >= lengths, -100)
    return {"tokens": numbers[:, :-1], "targets": targets}


def qwen():
    """Its norms of queries and keys see a part of the heads."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, head_dim=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32, use_cache=False,
    )  # fmt: skip
    return in_float64(Qwen3ForCausalLM(config))


MODELS = {
    "mlp": (
        Mlp,
        squares,
        vectors,
        {
            "blocks": ["up", "norm", "across", "down"],
            "layouts": {"up": "replicate", "across": "rowwise_split_input"},
        },
    ),
    "qwen": (qwen, None, tokens, {}),
    "cnn": (cnn, squares, images, {"blocks": [str(n) for n in range(8)]}),
    "cnn_synchronised": (cnn, squares, images, {"sync_batchnorm": True}),
    "llama": (llama, None, tokens, {}),
    "deep_llama": (lambda: llama(5), None, tokens, {}),
    "llama_tied": (lambda: llama(tie_word_embeddings=True), None, tokens, {}),
}


def plan_for(strategy, size, precision):
    splits = SPLITS[strategy]
    axes = dict.fromkeys(splits[:-1], 2) | {splits[-1]: size // 2 ** (len(splits) - 1)}
    pipeline = "pp" in axes
    shares = axes.get("dp_replicate", 1) * axes.get("dp_shard", 1)
    each = SAMPLES // shares // (1 if strategy == "tp" else MICRO_BATCHES)
    if pipeline:
        axes["pp_microbatches"], each = (1, 4) if strategy == "mp" else (4, SAMPLES // 4)
    return outpace.Plan(strategy=strategy, micro_batch=each, precision=precision, **axes)


def micro_batches(batch, plan, norms):
    """What one process puts through at once, to have the same statistics."""
    if not norms:
        return [batch]
    if plan.pp > 1:
        return [tuple(t[b : b + plan.micro_batch] for t in batch)
                for b in range(0, SAMPLES, plan.micro_batch)]  # fmt: skip
    # A micro-batch of every replica.
    shares = plan.data_parallel
    return [
        tuple(torch.cat([s[b : b + plan.micro_batch] for s in t.chunk(shares)]) for t in batch)
        for b in range(0, SAMPLES // shares, plan.micro_batch)
    ]


class Alone:
    """The same training in one process, as a plain loop."""

    def __init__(self, module, loss, plan):
        self.module, self.loss, self.plan = module, loss, plan
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        self.norms = batch_norms(module)
        self.inputs = {name: [] for name in self.norms}
        if plan.pp > 1:
            for name, part in self.norms.items():
                part.register_forward_hook(
                    lambda _, x, y, name=name: self.inputs[name].append(x[0])
                )

    def step(self, batch):
        before = {name: copy.deepcopy(part) for name, part in self.norms.items()}
        parts = micro_batches(batch, self.plan, self.norms)
        total = 0.0
        for part in parts:
            loss = self._mean(part) / len(parts)
            loss.backward()
            total += loss.detach()
        gradients = {name: p.grad.clone() for name, p in self.module.named_parameters()}
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.plan.pp > 1:
            self._move_averages(before)
        return total, norm, gradients

    def _mean(self, batch):
        with torch.autocast("cpu", torch.bfloat16, enabled=self.plan.precision == "bf16"):
            return self._computed_mean(batch)

    def _computed_mean(self, batch):
        if self.loss is not None:
            return self.loss(self.module, batch)
        logits = self.module(batch["tokens"]).logits
        return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())

    @torch.no_grad()
    def _move_averages(self, before):
        """Huang et al. 2018, §2.3: the averages of a plain BatchNorm over the mini-batch."""
        for name, part in self.norms.items():
            before[name].train()(torch.cat(self.inputs[name]))
            self.inputs[name].clear()
            for kept, moved in zip(part.buffers(), before[name].buffers(), strict=True):
                kept.copy_(moved)


def in_dtype(batch, dtype):
    return tree_map(lambda t: t.to(dtype) if t.is_floating_point() else t, batch)


def apart(found, expected, floor):
    scale = max(float(expected.abs().max()), floor, 1e-300)
    return float((found.to(expected.dtype) - expected).abs().max()) / scale


def compare(case):
    name, strategy, precision = [*case.split(":"), "fp64"][:3]
    make, loss, draw, options = MODELS[name]
    plan = plan_for(strategy, dist.get_world_size(), precision)
    wide = torch.float64 if precision == "fp64" else torch.float32
    torch.manual_seed(3)
    module = make().to(wide)
    alone = Alone(copy.deepcopy(module), loss, plan)
    if dist.get_rank():  # rank 0's weights count
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(1)
    expected_names = set(module.state_dict())
    laid = outpace.parallelize(module, plan, loss=loss, **options)
    optimizer = laid.make_optimizer(torch.optim.AdamW, lr=0.01)
    drawn = torch.Generator().manual_seed(5)
    worst = {}

    def see(kind, found, expected, floor=0.0):
        worst[kind] = max(worst.get(kind, 0.0), apart(found, expected, floor))

    for _ in range(STEPS):
        batch = in_dtype(draw(drawn), wide)
        total, norm, gradients = alone.step(batch)
        see("loss", laid.forward_backward(laid.share(batch)), total)
        # Some gradients are truly zero, such as a bias's before a BatchNorm.
        floor = (1e-6 if wide == torch.float64 else 0.1) * max(
            float(g.abs().max()) for g in gradients.values()
        )
        for own, parameter in laid.named_parameters():
            see("gradient", whole(parameter.grad), gradients[own], floor)
        see("norm", laid.clip_grad_norm(CLIP), norm)
        optimizer.step()
        optimizer.zero_grad()
        state = laid.state_dict()
        if state is not None:
            assert set(state) == expected_names, set(state) ^ expected_names
            for own, tensor in alone.module.state_dict().items():
                see("state", state[own], tensor)
    batch = in_dtype(draw(drawn), wide)
    alone.module.eval()
    with torch.no_grad():
        see("evaluation", laid.evaluate(laid.share(batch)), alone._mean(batch))
    held = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel()
               for _, p in laid.named_parameters())  # fmt: skip
    said = [None] * dist.get_world_size()
    dist.all_gather_object(said, (worst, held))
    kinds = {kind for one, _ in said for kind in one}
    return {
        "worst": {kind: max(one.get(kind, 0.0) for one, _ in said) for kind in kinds},
        "held": [held for _, held in said],
        "all": sum(p.numel() for p in alone.module.parameters()),
    }


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {}
    for case in sys.argv[1:]:
        found[case] = compare(case)
    if dist.get_rank() == 0:
        print(json.dumps(found))
    with suppress(Exception):
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
