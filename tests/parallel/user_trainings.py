"""Whole training loops of a user's own, with what small projects do around the steps."""

import io
import math
from collections import deque
from functools import partial

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

from tests.parallel.user_loops import Block, Loop, Stack, batches, squares


class DropBlock(Block):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return x + self.scale * self.drop(self.down(torch.tanh(self.up(x))))


class DropStack(Stack):
    """Draws other numbers in each strategy, so it is compared without dropout."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(DropBlock() for _ in range(4))


class NormStack(Stack):
    """The moving averages are those of rank 0's samples, unless its BatchNorm is frozen."""

    def __init__(self):
        super().__init__()
        self.first_norm = nn.BatchNorm1d(6)

    def forward(self, x):
        x = self.first_norm(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.head.weight


class ScaledStack(Stack):
    """Numbers that a loop sets were the class's, or None."""

    factor = 1.0

    def __init__(self):
        super().__init__()
        self.shift = None

    def forward(self, x):
        return super().forward(x) * self.factor + (self.shift or 0.0)


TRAININGS = {}


def loop(stack=Stack, **plan):
    def register(train):
        methods = {"train": lambda self, run: train(run), "stack": stack, "plan": plan}
        TRAININGS[train.__name__] = type(train.__name__, (Loop,), methods)
        return train

    return register


def finish(optimizer):
    optimizer.step()
    optimizer.zero_grad()


def halves(batch):
    return zip(*(part.chunk(2) for part in batch), strict=True)


@loop(micro_batch=1)
def accumulate(run):
    """Adds up gradients of two half batches by hand."""
    optimizer = run.make_optimizer()
    for batch in batches():
        kept = {}
        for half in halves(batch):
            run.backward(half)
            for name, p in run.named_parameters():
                if p.grad is not None:
                    kept[name] = kept.get(name, 0) + p.grad / 2
        for name, p in run.named_parameters():
            p.grad = kept.get(name)
        finish(optimizer)


@loop()
def skip_infinite(run):
    optimizer, losses = run.make_optimizer(), []
    for number, (x, y) in enumerate(batches() + batches()):
        if number == 1:
            x[5] = math.inf
        loss = run.backward((x, y))
        if not loss.isfinite():
            continue
        finish(optimizer)
        losses.append(float(loss))
    return losses


def freezing(pick, begin):
    def train(run):
        optimizer = run.make_optimizer()
        for number, batch in enumerate(batches() + batches()):
            if number in (begin, begin + 2):
                for name, p in run.named_parameters():
                    if pick(name) and not name.endswith("scale"):
                        p.requires_grad_(number > begin)
            run.backward(batch)
            finish(optimizer)

    return train


for _name, _pick, _begin in (
    ("freeze_blocks", lambda name: "blocks.0" in name or "blocks.2" in name, 2),
    ("freeze_biases", lambda name: "bias" in name, 2),
    ("freeze_rest", lambda name: "blocks" not in name, 2),
    ("freeze_at_first", lambda name: "blocks" in name, 0),
):
    _train = freezing(_pick, _begin)
    _train.__name__ = _name
    loop()(_train)


@loop()
def freeze_before_step(run):
    optimizer = run.make_optimizer()
    for number, batch in enumerate(batches()):
        run.backward(batch)
        for name, p in run.named_parameters():
            if number == 1 and "bias" in name:
                p.requires_grad_(False)
        finish(optimizer)


@loop()
def unfreeze(run):
    """Trains what was frozen when it was laid out."""
    optimizer = run.make_optimizer([{"params": [p for _, p in run.named_parameters()]}])
    for number, batch in enumerate(batches()):
        if number == 1:
            for _, p in run.named_parameters():
                p.requires_grad_(True)
        run.backward(batch)
        finish(optimizer)


@loop()
def unfreeze_after_optimizer(run):
    """Unfreezes in turn what is frozen when the optimizer of all parameters is made."""
    later = [p for name, p in run.named_parameters() if name.startswith(("blocks.1", "blocks.3"))]
    trained = [p for p in later if p.requires_grad]
    for p in trained:
        p.requires_grad_(False)
    optimizer = run.make_optimizer()
    for number, batch in enumerate(batches()):
        if number == 1:
            for p in trained:
                p.requires_grad_(True)
        run.backward(batch)
        finish(optimizer)


@loop()
def clip_by_hand(run):
    """By the norm that the loop computes of the gradients it has."""
    optimizer = run.make_optimizer()
    for batch in batches():
        run.backward(batch)
        gradients = [p.grad for _, p in run.named_parameters() if p.grad is not None]
        norm = sum(gradient.norm() ** 2 for gradient in gradients) ** 0.5
        for gradient in gradients:
            gradient.mul_(torch.clamp(0.1 / (norm + 1e-6), max=1.0))
        finish(optimizer)


@loop()
def clip_each(run):
    """Clips each parameter by its own norm; stages have different numbers of gradients."""
    for name, p in run.named_parameters():
        p.requires_grad_(p.requires_grad and not name.startswith("blocks.0"))
    optimizer = run.make_optimizer()
    for batch in batches():
        run.backward(batch)
        for _, p in run.named_parameters():
            nn.utils.clip_grad_norm_(p, 0.01)
        finish(optimizer)


@loop()
def clip_layers(run):
    """Clips the parameters of each layer by their own norm."""
    optimizer = run.make_optimizer()
    for batch in batches():
        run.backward(batch)
        for layer in ("stem", *(f"blocks.{n}" for n in range(4)), "norm", "head"):
            held = [p for name, p in run.named_parameters() if name.startswith(layer)]
            if held:
                nn.utils.clip_grad_norm_(held, 0.01)
        finish(optimizer)


@loop()
def clip_groups(run):
    """Clips each group of the optimizer; the first has one parameter in each half."""
    ends = ("blocks.1.up.weight", "blocks.3.up.weight")
    one = [p for name, p in run.named_parameters() if name in ends]
    rest = [p for name, p in run.named_parameters() if name not in ends]
    optimizer = run.make_optimizer([{"params": one, "weight_decay": 0.1}, {"params": rest}])
    for batch in batches():
        run.backward(batch)
        for group in optimizer.param_groups:
            nn.utils.clip_grad_norm_(group["params"], 0.01)
        finish(optimizer)


def newton(build):
    def train(run):
        optimizer = run.make_optimizer(build=build, lr=0.1, max_iter=3)
        for batch in batches():
            optimizer.step(lambda batch=batch: run.backward(batch))

    return train


for _name, _build in (
    ("lbfgs", torch.optim.LBFGS),
    ("lbfgs_by_partial", partial(torch.optim.LBFGS, history_size=5)),
):
    _train = newton(_build)
    _train.__name__ = _name
    loop()(_train)


@loop()
@torch.no_grad()
def diverged(run):
    """Weights of NaN give a loss of NaN, and no other trouble."""
    spoiled = {p: p.clone() for name, p in run.named_parameters() if name == "stem.weight"}
    for p in spoiled:
        p.fill_(math.nan)
    with torch.enable_grad():
        loss = run.backward(batches()[0])
    for p, before in spoiled.items():
        p.copy_(before)
    return [float(loss.isnan())]


def reload(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    fresh = Stack().double()
    fresh.load_state_dict(torch.load(file, weights_only=False))
    return dict(fresh.named_parameters())


@loop()
def save(run):
    optimizer = run.make_optimizer()
    for batch in batches():
        run.backward(batch)
        finish(optimizer)
    state = run.state()
    return reload(state) if run.is_first else None


@loop()
def save_module(run):
    optimizer = run.make_optimizer()
    for batch in batches():
        run.backward(batch)
        finish(optimizer)
    return reload(run.module.state_dict())


def evaluating(only_first, before):
    def train(run):
        optimizer, losses = run.make_optimizer(), []
        for batch in batches():
            if not before:
                run.backward(batch)
                finish(optimizer)
            if run.is_first or not only_first:
                run.module.eval()
                with torch.no_grad():
                    losses.append(float(squares(run.module, [part[:3] for part in batch])))
                run.module.train()
            if before:
                run.backward(batch)
                finish(optimizer)
        return losses if run.is_first or not only_first else None

    return train


for _name, _only_first, _before in (
    ("eval_first_rank", True, False),
    ("eval_all_ranks", False, False),
    ("eval_before", False, True),
):
    _train = evaluating(_only_first, _before)
    _train.__name__ = _name
    loop()(_train)


@loop()
def block_first_rank(run):
    optimizer = run.make_optimizer()
    for batch in batches():
        run.backward(batch)
        finish(optimizer)
        if run.is_first:
            run.module.blocks[0](torch.zeros(2, 6, dtype=torch.float64))


@loop()
def evaluate_sizes(run):
    optimizer, losses = run.make_optimizer(), []
    for number, batch in enumerate(batches()):
        losses.append(float(run.evaluate([part.repeat(2 - number % 2, 1) for part in batch])))
        run.backward(batch)
        finish(optimizer)
    return losses


@loop(DropStack)
def eval_mode(run):
    optimizer = run.make_optimizer()
    run.module.eval()
    for batch in batches():
        run.backward(batch)
        finish(optimizer)


@loop(DropStack)
def dropout_rate(run):
    """Sets modes, then rates, of dropout modules between steps."""
    optimizer = run.make_optimizer()
    run.module.eval()
    for number, batch in enumerate(batches()):
        if number == 1:
            run.module.train()
            for part in run.module.modules():
                if isinstance(part, nn.Dropout):
                    part.p = 0.0
        run.backward(batch)
        finish(optimizer)


@loop(ScaledStack)
def numbers(run):
    optimizer = run.make_optimizer()
    run.module.factor = 0.5
    for number, batch in enumerate(batches()):
        run.module.shift = number / 4 if number else None
        run.backward(batch)
        finish(optimizer)


@loop(NormStack)
def frozen_batchnorm(run):
    optimizer = run.make_optimizer()
    for batch in batches():
        run.module.train()
        run.module.first_norm.eval()
        run.backward(batch)
        finish(optimizer)


@loop()
def two_optimizers(run):
    large = [p for _, p in run.named_parameters() if p.dim() > 1]
    small = [p for _, p in run.named_parameters() if p.dim() <= 1]
    one = run.make_optimizer([{"params": large}], lr=0.02)
    other = run.make_optimizer([{"params": small}], torch.optim.SGD, lr=0.1, momentum=0.9)
    for number, batch in enumerate(batches()):
        run.backward(batch)
        one.step()
        if number % 2 == 0:
            other.step()
        one.zero_grad()
        other.zero_grad()


@loop()
def two_groups(run):
    """Two groups, each with its own schedule, and a weight decay that changes."""
    blocks = [p for name, p in run.named_parameters() if "blocks" in name]
    rest = [p for name, p in run.named_parameters() if "blocks" not in name]
    optimizer = run.make_optimizer([{"params": blocks, "lr": 0.02}, {"params": rest}], lr=0.005)
    schedule = LambdaLR(optimizer, [lambda step: 0.5**step, lambda step: 1 / (1 + step)])
    rates = []
    for number, batch in enumerate(batches()):
        optimizer.param_groups[1]["weight_decay"] = 0.1 * number
        run.backward(batch)
        finish(optimizer)
        schedule.step()
        rates += schedule.get_last_lr()
    return rates


@loop()
def add_group(run):
    optimizer = run.make_optimizer(
        [{"params": [p for n, p in run.named_parameters() if "blocks" in n]}]
    )
    for number, batch in enumerate(batches()):
        if number == 1:
            rest = [p for name, p in run.named_parameters() if "blocks" not in name]
            optimizer.add_param_group({"params": rest, "lr": 0.02})
        run.backward(batch)
        finish(optimizer)


@loop()
def schedules(run):
    """Three of torch's schedules, one after the other."""
    optimizer = run.make_optimizer()
    cycle = OneCycleLR(optimizer, 0.05, total_steps=4)
    plateau = ReduceLROnPlateau(optimizer, patience=0)
    for batch in batches():
        loss = run.backward(batch)
        finish(optimizer)
        cycle.step()
        plateau.step(-float(loss))
    average = SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    for batch in batches():
        run.backward(batch)
        finish(optimizer)
        average.step()


@loop()
def reload_optimizer(run):
    optimizer = run.make_optimizer()
    for number, batch in enumerate(batches()):
        run.backward(batch)
        finish(optimizer)
        if number == 1:
            state = optimizer.state_dict()
            optimizer = run.make_optimizer()
            optimizer.load_state_dict(state)


def averaging(make):
    def train(run):
        optimizer, average = run.make_optimizer(), make(run)
        for batch in batches():
            run.backward(batch)
            finish(optimizer)
            average.update_parameters(run.module)
        return dict(average.module.named_parameters())

    return train


for _name, _make in (
    ("swa", lambda run: AveragedModel(run.module)),
    ("swa_of_copy", lambda run: AveragedModel(Stack().double())),
    ("ema_of_copy", lambda run: AveragedModel(
        Stack().double(), multi_avg_fn=get_ema_multi_avg_fn(0.9))),
):  # fmt: skip
    _train = averaging(_make)
    _train.__name__ = _name
    loop()(_train)


@loop()
def whole_average(run):
    """An average in whole tensors, of which the loop has one on each rank."""
    optimizer = run.make_optimizer()
    kept = {name: p.detach().clone() for name, p in Stack().double().named_parameters()}
    for batch in batches():
        run.backward(batch)
        finish(optimizer)
        with torch.no_grad():
            for name, p in run.named_parameters():
                kept[name].lerp_(p, 0.1).add_(p, alpha=0.1)
    return {name: kept[name] for name, _ in run.named_parameters()}


@loop()
def last_weights(run):
    """Loads the mean of the last weights."""
    optimizer, last = run.make_optimizer(), deque(maxlen=2)
    for batch in batches():
        run.backward(batch)
        finish(optimizer)
        last.append({name: p.detach().clone() for name, p in run.named_parameters()})
    with torch.no_grad():
        for name, p in run.named_parameters():
            p.copy_(sum(weights[name] for weights in last) / len(last))


def logging(only_first):
    def train(run):
        optimizer, norms = run.make_optimizer(), {}
        for number, batch in enumerate(batches()):
            run.backward(batch)
            if run.is_first or not only_first:
                for name, p in run.named_parameters():
                    if p.grad is not None:
                        norm = p.grad.norm().item()
                        norms[f"{name} {number}"] = torch.tensor(norm, dtype=p.dtype)
            finish(optimizer)
        return norms or None

    return train


for _name, _only_first in (("log_norms", False), ("log_norms_first_rank", True)):
    _train = logging(_only_first)
    _train.__name__ = _name
    loop()(_train)


@loop()
def clip_infinity(run):
    optimizer, norms = run.make_optimizer(), []
    for batch in batches():
        run.backward(batch)
        parameters = [p for _, p in run.named_parameters()]
        norms.append(float(nn.utils.clip_grad_norm_(parameters, 0.01, norm_type=math.inf)))
        finish(optimizer)
    return norms


@loop()
def vector(run):
    optimizer, norms = run.make_optimizer(), []
    for batch in batches():
        run.backward(batch)
        finish(optimizer)
        parameters = [p.detach() for _, p in run.named_parameters()]
        norms.append(float(nn.utils.parameters_to_vector(parameters).norm()))
    return norms


@loop()
def noise(run):
    """Adds the same noise to gradients on all ranks."""
    optimizer = run.make_optimizer()
    for batch in batches():
        run.backward(batch)
        drawn = torch.Generator().manual_seed(7)
        draws = {name: torch.randn(p.shape, generator=drawn, dtype=p.dtype)
                 for name, p in Stack().named_parameters()}  # fmt: skip
        for name, p in run.named_parameters():
            if p.grad is not None:
                p.grad.add_(draws[name], alpha=0.01)
        finish(optimizer)


@loop()
def sharpness(run):
    """Steps with the gradient at perturbed weights (SAM)."""
    optimizer = run.make_optimizer()
    for batch in batches():
        run.backward(batch)
        moves = {name: 0.05 * p.grad for name, p in run.named_parameters() if p.grad is not None}
        for sign in (1, -1):
            with torch.no_grad():
                for name, p in run.named_parameters():
                    if name in moves:
                        p.add_(moves[name], alpha=sign)
            if sign > 0:
                run.backward(batch)
        finish(optimizer)
