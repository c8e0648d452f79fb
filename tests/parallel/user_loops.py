"""Loops of a user's own that read or write parameters between steps, as one process has them."""

import copy

import torch
import torch.distributed as dist
from torch import nn

import outpace
from outpace.experiment.module_verify import plan_for_module
from outpace.records.plan import Plan

STEPS, SAMPLES = 3, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.scale = nn.Parameter(torch.full((6,), 0.5), requires_grad=False)

    def forward(self, x):
        return x + self.scale * self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    """An embedding's matrix that the head shares, four blocks, each with a frozen parameter."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(5, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(5, 6, bias=False)
        self.head.weight = self.stem.weight

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.head.weight


def squares(module, batch):
    return (module(batch[0]) - batch[1]).square().mean()


def batches():
    drawn = torch.Generator().manual_seed(1)
    return [
        tuple(torch.randn(SAMPLES, 5, generator=drawn, dtype=torch.float64) for _ in range(2))
        for _ in range(STEPS)
    ]


class PlainRun:
    """What a loop uses, in one process."""

    is_first = True

    def __init__(self, stack):
        self.module = stack().double()

    def named_parameters(self):
        return list(self.module.named_parameters())

    def make_optimizer(self, groups=None, build=torch.optim.AdamW, lr=0.01, **options):
        return build(groups or self.module.parameters(), lr=lr, **options)

    def backward(self, batch):
        self.module.zero_grad()
        loss = squares(self.module, batch)
        loss.backward()
        return loss.detach()

    @torch.no_grad()
    def evaluate(self, batch):
        self.module.eval()
        loss = squares(self.module, batch)
        self.module.train()
        return loss

    def state(self):
        return self.module.state_dict()


class ParallelRun:
    """The same through `outpace.parallelize`; `by` says whose parameters the loop goes over."""

    def __init__(self, stack, strategy, by="module", size=2, change=None, direct=False, check="on"):
        self.module, self._by, self._direct = stack().double(), by, direct
        plan = plan_for_module(strategy, size, SAMPLES)
        plan = Plan.model_validate({**plan.model_dump(), **(change or {})})
        options = {}
        if strategy == "tp":
            options["layouts"] = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
        blocks = [f"blocks.{n}" for n in range(4)]
        self.model = outpace.parallelize(
            self.module, plan, loss=squares, blocks=blocks, check=check, **options
        )
        self.is_first = dist.get_rank() == 0

    def named_parameters(self):
        held = self.module if self._by == "module" else self.model
        return list(held.named_parameters())

    def make_optimizer(self, groups=None, build=torch.optim.AdamW, lr=0.01, **options):
        if self._direct:
            return build(groups or self.module.parameters(), lr=lr, **options)
        return self.model.make_optimizer(build, groups, lr=lr, **options)

    def backward(self, batch):
        return self.model.forward_backward(self.model.share(batch))

    def evaluate(self, batch):
        return self.model.evaluate(self.model.share(batch))

    def state(self):
        return self.model.state_dict()


class Loop:
    """What a loop does: `begin` before the first step, `step` after each."""

    stack = Stack
    plan = None  # what it needs of a plan

    def train(self, run):
        optimizer = run.make_optimizer()
        self.begin(run.named_parameters(), run.module)
        for batch in batches():
            run.backward(batch)
            self.gradients(run.named_parameters(), run.module)
            optimizer.step()
            optimizer.zero_grad()
            self.step(run.named_parameters(), run.module)
        return self.results()

    def begin(self, named, module):
        """`named` are the parameters that the loop goes over."""

    def gradients(self, named, module):
        """Between backward and step."""

    def step(self, named, module):
        """After each step."""

    def results(self):
        """What it has come to: tensors by name, or a number."""
        return {}


class Plain(Loop):
    """Uses no parameters."""


class Ema(Loop):
    def begin(self, named, module):
        self.kept = {name: p.detach().clone() for name, p in named}

    @torch.no_grad()
    def step(self, named, module):
        for name, p in named:
            self.kept[name].lerp_(p, 0.1)

    def results(self):
        return self.kept


class EmaData(Ema):
    @torch.no_grad()
    def step(self, named, module):
        for name, p in named:
            self.kept[name].mul_(0.9).add_(p.data, alpha=0.1)


class EmaFoldedState(Loop):
    """Copies of a state_dict."""

    def begin(self, named, module):
        self.kept = copy.deepcopy(module.state_dict())

    def step(self, named, module):
        for name, t in module.state_dict().items():
            self.kept[name] = 0.9 * self.kept[name] + 0.1 * t

    def results(self):
        return self.kept


class Decay(Loop):
    @torch.no_grad()
    def step(self, named, module):
        for _, p in named:
            p.mul_(0.9)


class DecayData(Loop):
    def step(self, named, module):
        for _, p in named:
            p.data = p.data * 0.9


class GradientNorm(Loop):
    def begin(self, named, module):
        self.norms = []

    def gradients(self, named, module):
        squares = [p.grad.norm() ** 2 for _, p in named if p.grad is not None]
        self.norms.append(float(sum(squares)) ** 0.5)

    def results(self):
        return self.norms


class ClipGradNorm(GradientNorm):
    def gradients(self, named, module):
        self.norms.append(float(nn.utils.clip_grad_norm_([p for _, p in named], 0.1)))


class ClippingRank0(ClipGradNorm):
    def gradients(self, named, module):
        if not dist.is_initialized() or dist.get_rank() == 0:
            super().gradients(named, module)


class ClipGradValue(Loop):
    def gradients(self, named, module):
        nn.utils.clip_grad_value_([p for _, p in named], 0.01)


class WeightNorm(Loop):
    def begin(self, named, module):
        self.norms = []

    def step(self, named, module):
        self.norms.append(sum(p.norm().item() ** 2 for _, p in named) ** 0.5)

    def results(self):
        return self.norms


class WeightNormRank0(WeightNorm):
    def step(self, named, module):
        if not dist.is_initialized() or dist.get_rank() == 0:
            super().step(named, module)
        else:
            self.norms = None


class Largest(WeightNorm):
    def step(self, named, module):
        self.norms.append(max(float(p.detach().abs().max()) for _, p in named))


class Clamp(Loop):
    def step(self, named, module):
        for _, p in named:
            p.data.clamp_(-0.2, 0.2)


class Spectral(Loop):
    @torch.no_grad()
    def step(self, named, module):
        for _, p in named:
            if p.dim() == 2:
                p.div_(torch.linalg.matrix_norm(p, 2))


class NormLimit(Loop):
    @torch.no_grad()
    def step(self, named, module):
        for _, p in named:
            p.mul_((0.5 / p.norm()).clamp(max=1))


class Target(Loop):
    """A copy of the plain module, which gets the weights in every other step."""

    def begin(self, named, module):
        self.target = Stack().double()
        self.steps = 0

    def step(self, named, module):
        self.steps += 1
        if self.steps % 2 == 0:
            with torch.no_grad():
                held = dict(self.target.named_parameters())
                for name, p in named:
                    held[name].copy_(p)

    def results(self):
        return dict(self.target.named_parameters())


class TargetData(Target):
    def step(self, named, module):
        held = dict(self.target.named_parameters())
        for name, p in named:
            held[name].data.copy_(p.data)


class TargetState(Target):
    def step(self, named, module):
        self.target.load_state_dict(module.state_dict())


class TargetCopy(Target):
    def begin(self, named, module):
        self.target, self.steps = copy.deepcopy(module), 0


class Restore(Loop):
    """Puts the weights of the beginning back: whole tensors into parameters."""

    def begin(self, named, module):
        self.first = {n: p.detach().clone() for n, p in Stack().double().named_parameters()}

    def step(self, named, module):
        for name, p in named:
            p.data.copy_(self.first[name])


class RestoreState(Loop):
    def begin(self, named, module):
        self.first = Stack().double().state_dict()

    def step(self, named, module):
        module.load_state_dict(self.first)


class Walk(Loop):
    """What needs no values: shapes, dtypes, counts, new tensors of the same form, freezing."""

    def gradients(self, named, module):
        for name, p in named:
            assert name and p.shape == p.size() and p.dtype == torch.float64 and p.numel()
            assert p.is_floating_point() and p.device.type == "cpu" and p.dim() and p.is_leaf
            assert not torch.zeros_like(p).any() and str(p)
            if name.endswith("down.bias"):
                p.requires_grad_(False)

    def step(self, named, module):
        module.zero_grad()


class AddGradients(Loop):
    """Decay of the weights by hand, in the gradients."""

    def gradients(self, named, module):
        for _, p in named:
            if p.grad is not None:
                p.grad.add_(p.detach(), alpha=0.1)


LOOPS = {kind.__name__: kind for kind in list(globals().values())
         if isinstance(kind, type) and issubclass(kind, Loop) and kind is not Loop}  # fmt: skip
WRONG = {"ClippingRank0": LOOPS.pop("ClippingRank0")}  # replicas would differ from then on


def train_plain(loop):
    run = PlainRun(loop.stack)
    return loop.train(run), run.state()


def train_parallel(loop, strategy, change=None, **options):
    run = ParallelRun(
        loop.stack, strategy, change={**(loop.plan or {}), **(change or {})}, **options
    )
    return loop.train(run), run.state()
