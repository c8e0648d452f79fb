"""A loop as users write it by hand over transformers' models, with which outpace is compared.

It uses autocast in bf16 over fp32 weights, fused AdamW, gradients clipped at 1.0, and the whole
model compiled if requested. With adapters, it uses peft: frozen weights in bf16, adapters in fp32.
"""

import time
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from gpu.check import Check
from gpu.shapes import Shape

LEARNING_RATE, CLIP = 3e-4, 1.0


class HandLoop:
    """A model on the device that is trained on one batch repeatedly."""

    def __init__(
        self, check: Check, shape: Shape, compiled: bool, lora_rank: int | None = None
    ) -> None:
        self._check = check
        self._before_bytes = self._allocated_bytes(peak=False)
        self._began_s = time.perf_counter()
        config = AutoConfig.for_model(**shape.config)
        config.use_cache = False
        frozen = torch.bfloat16 if lora_rank else torch.float32
        with torch.device(check.device):
            model = AutoModelForCausalLM.from_config(config, dtype=frozen)
        self._model = _with_adapters(model, lora_rank) if lora_rank else model
        self._model.train()
        if compiled and check.inductor:
            self._model.compile()
        trained = [one for one in self._model.parameters() if one.requires_grad]
        self._trained = trained
        self._optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, fused=True)
        tokens = torch.randint(0, config.vocab_size, (shape.batch, shape.seq_len + 1),
                               device=check.device)  # fmt: skip
        self._inputs = tokens[:, :-1].contiguous()
        self._targets = tokens[:, 1:].contiguous()

    def warm_up(self, steps: int) -> dict[str, Any]:
        """Compile and warm up; return the time that took, and the memory of a step."""
        if self._check.cuda:
            torch.cuda.reset_peak_memory_stats()
        self.step_time_s(1)
        first_s = time.perf_counter() - self._began_s
        self.step_time_s(steps - 1)
        peak_bytes = self._allocated_bytes(peak=True)
        above = None if peak_bytes is None else peak_bytes - (self._before_bytes or 0)
        return {"to_first_step_s": first_s, "peak_bytes": above}

    def step_time_s(self, steps: int) -> float:
        """Return the seconds per step over `steps` steps, including the device's work."""
        self._wait()
        began_s = time.perf_counter()
        for _ in range(steps):
            self._step()
        self._wait()
        return (time.perf_counter() - began_s) / steps

    def _step(self) -> None:
        with torch.autocast(self._check.device, torch.bfloat16):
            loss = self._model(
                input_ids=self._inputs, labels=self._targets, shift_labels=self._targets
            ).loss
        loss.backward()
        nn.utils.clip_grad_norm_(self._trained, CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def _wait(self) -> None:
        if self._check.cuda:
            torch.cuda.synchronize()

    def _allocated_bytes(self, peak: bool) -> int | None:
        if not self._check.cuda:
            return None
        return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()


def _with_adapters(model: nn.Module, rank: int) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted: nn.Module = get_peft_model(model, config)
    return adapted
