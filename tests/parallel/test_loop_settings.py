"""Copies of a module get what a loop sets on it."""

import torch
from torch import nn

from outpace.parallel.loop_settings import LoopSettings


class Scaled(nn.Module):
    scale = 1.0  # of the class
    shift: float | None

    def __init__(self):
        super().__init__()
        self.inner = nn.Dropout(0.5)
        self.shift = None

    def forward(self, x):
        return x * self.scale + (self.shift or 0.0)


def test_numbers_that_were_none_or_of_the_class_reach_copies():
    module, copied = Scaled(), Scaled()
    settings = LoopSettings(module, [copied])
    module.scale, module.shift, module.inner.p = 2.0, 3.0, 0.0
    module.inner.eval()
    settings.apply()
    assert copied(torch.ones(())) == 5.0
    assert copied.inner.p == 0.0 and not copied.inner.training
    settings.note()
    module.shift = None
    settings.apply()
    assert copied(torch.ones(())) == 2.0


def test_flags_that_torch_sets_on_modules_do_not():
    module, copied = Scaled(), Scaled()
    settings = LoopSettings(module, [copied])
    module._distribute_module_applied = True
    module.register_full_backward_hook(lambda *_: None)
    settings.apply()
    assert "_distribute_module_applied" not in vars(copied)
    assert copied._is_full_backward_hook is None
