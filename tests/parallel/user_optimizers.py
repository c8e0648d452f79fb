"""Small optimizers of a user's own, of the kinds that published ones are."""

import torch
from torch.optim import SGD, Optimizer


class Distance(Optimizer):
    """Estimates the distance to the solution from all parameters, as Prodigy does."""

    def __init__(self, params, lr=1.0, start=1e-6):
        super().__init__(params, {"lr": lr, "distance": start, "along": 0.0})

    def _trained(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    yield p, self.state[p]

    @torch.no_grad()
    def step(self, closure=None):
        first = self.param_groups[0]
        distance, along, across = first["distance"], first["along"], 0.0
        for p, state in self._trained():
            if not state:
                state["begin"], state["sum"] = p.detach().clone(), torch.zeros_like(p)
            along += distance * float((p.grad * (state["begin"] - p)).sum())
            state["sum"].add_(p.grad, alpha=distance)
            across += float(state["sum"].abs().sum())
        for p, _ in self._trained():
            p.sub_(p.grad / (p.grad.abs() + 1e-8), alpha=distance * first["lr"])
        for group in self.param_groups:
            group["distance"], group["along"] = max(distance, along / (across or 1.0)), along


class ClippingSGD(SGD):
    """Clips by the norm of all gradients, in its step."""

    def step(self, closure=None):
        gradients = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = sum(float(gradient.norm()) ** 2 for gradient in gradients) ** 0.5
        for gradient in gradients:
            gradient.mul_(min(1.0, 0.1 / norm))
        return super().step(closure)


class Sharpness(Optimizer):
    """Steps by the gradient at the worst point near by, as SAM does, with a closure."""

    def __init__(self, params, lr=0.05, radius=0.05):
        super().__init__(params, {"lr": lr, "radius": radius})
        self.base = SGD(self.param_groups, lr=lr)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure=None):
        assert closure is not None, "a closure is needed"
        held = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in held]).norm()
        before = [p.detach().clone() for p in held]
        for p in held:
            p.add_(p.grad * (self.param_groups[0]["radius"] / (norm + 1e-12)))
        closure()
        for p, values in zip(held, before, strict=True):
            p.copy_(values)
        self.base.step()


class Trust(Optimizer):
    """Scales each parameter's update by its norm, as LARS and LAMB do."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    def ratio(self, p):
        return p.detach().norm() / (p.grad.norm() + 1e-8)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * self.ratio(p) * group["lr"])


class LocalTrust(Trust):
    """Takes a rank's shards for whole parameters."""

    def ratio(self, p):
        held, gradient = (getattr(one, "_local_tensor", one) for one in (p, p.grad))
        return float(held.detach().norm()) / (float(gradient.norm()) + 1e-8)


class Orthogonal(Trust):
    """Orthogonalises each matrix's update, as Muon does."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                update = p.grad / (p.grad.norm() + 1e-7)
                for _ in range(3 if p.dim() == 2 else 0):
                    square = update @ update.mT
                    update = 1.5 * update - 0.5 * square @ update
                p.sub_(update, alpha=group["lr"])


class Slow(Optimizer):
    """Moves slow weights at every second step, as Lookahead does."""

    def __init__(self, params, lr=0.05):
        base = SGD(params, lr=lr)
        super().__init__(base.param_groups, {"lr": lr})
        self.base, self.param_groups, self.steps = base, base.param_groups, 0
        held = [p for group in self.param_groups for p in group["params"]]
        self.slow = [(p, p.detach().clone()) for p in held]

    @torch.no_grad()
    def step(self, closure=None):
        self.base.step()
        self.steps += 1
        for p, values in self.slow if self.steps % 2 == 0 else ():
            values.add_(p - values, alpha=0.5)
            p.copy_(values)


TOGETHER = (Distance, ClippingSGD, Sharpness, torch.optim.LBFGS)
SEPARATE = (Trust, Orthogonal, Slow, SGD, torch.optim.AdamW, torch.optim.NAdam)
