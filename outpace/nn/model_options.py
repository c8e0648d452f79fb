"""Options of any model with repeated blocks: float8, checkpointing, torch.compile, offloading.

All of them change the model in place and keep parameter names. Float8 replaces modules, so it comes
first; then checkpointing, so that the compiler sees what is recomputed. Offloading comes last,
since its saved-tensor hooks are outside a compiled block.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from outpace.nn.attention import attention
from outpace.nn.block import Block
from outpace.nn.compilation import compile_forwards
from outpace.nn.fp8 import apply_fp8
from outpace.nn.kept_matmuls import can_keep_matmuls, keep_matmuls
from outpace.nn.offload import DiskStore, HostStore, offload_activations, require_place
from outpace.nn.recomputed_buffers import BufferKeeper
from outpace.nn.scratch_files import Scratch
from outpace.nn.torch_versions import without_saved_tensor_hooks
from outpace.records.compiled import compiled_region
from outpace.records.errors import BadInputError
from outpace.records.plan import Checkpointing, Plan

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def find_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a model.

    Blocks are the members of a ModuleList, or of a Sequential or numbered ModuleDict (as in
    torchtitan's models) in which a class repeats. Among several containers, the one whose most
    common class has the most parameters is used. ModuleDicts with other keys hold heads, towers or
    tasks, and are ignored. Members without a forward, such as lists, are replaced by their
    children. Raises BadInputError if there are no blocks.
    """
    found: list[nn.Module] = []
    for container in module.modules():
        if isinstance(container, nn.ModuleList) or _is_sequential_container(container):
            blocks = _most_common_members(container)
            least = 1 if isinstance(container, nn.ModuleList) else 2
            if len(blocks) >= least and _parameter_count(blocks) > _parameter_count(found):
                found = blocks
    if not found:
        raise BadInputError(
            f"{type(module).__name__} has no repeated blocks: checkpointing and compilation work "
            "on the members of an nn.ModuleList or nn.Sequential. Put the model's layers into "
            "one, or use neither option"
        )
    return [block for member in found for block in _expand_lists(member)]


def _is_sequential_container(container: nn.Module) -> bool:
    if isinstance(container, nn.ModuleDict):
        return all(re.fullmatch(r"\D*\d+", name) for name in container)
    return isinstance(container, nn.Sequential)


def _most_common_members(container: nn.Module) -> list[nn.Module]:
    members = [child for child in container.children() if _expand_lists(child)]
    # Each module with a parametrization has its own class.
    kinds = [type_before_parametrizations(child) for child in members]
    commonest = Counter(kinds).most_common(1)
    return [c for c, kind in zip(members, kinds, strict=True) if kind is commonest[0][0]]


def _expand_lists(module: nn.Module) -> list[nn.Module]:
    """Return a module that has parameters, or the children of one without a forward (lists)."""
    if not _parameter_count([module]):
        return []
    if type(module).forward is not nn.Module.forward or "forward" in vars(module):
        return [module]
    return [part for child in module.children() for part in _expand_lists(child)]


def _parameter_count(modules: list[nn.Module]) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def apply_checkpointing(
    module: nn.Module,
    mode: Checkpointing | Sequence[Checkpointing],
    blocks: Sequence[nn.Module] | None = None,
    by_policy: bool = False,
) -> None:
    """Make blocks recompute their activations in the backward instead of keeping them.

    `mode` is one mode for all blocks, or a sequence with one mode per block. `blocks` are detected
    by default.

    "full" keeps only a block's input (Chen et al., arXiv 1604.06174). "attention" also keeps the
    output of fused attention. "selective" also keeps the outputs of matmuls, and recomputes the
    cheap operators between them. (Korthikanti et al., arXiv 2205.05198, §5, recompute attention;
    here its output is kept, because fused attention stores no scores.) Recomputation draws the same
    random numbers. For outpace's blocks, "selective" needs no policy that is called for each
    operator (`kept_matmuls`); `by_policy` uses one anyway, for offloading, which must see all saved
    tensors.
    """
    if mode == "none":
        return
    blocks = blocks or find_blocks(module)
    modes = [mode] * len(blocks) if isinstance(mode, str) else mode
    for block, own in zip(blocks, modes, strict=True):
        if own != "none":
            keeper = BufferKeeper(block)
            kept = (
                keeper.change_once if keeper.has_buffers and not isinstance(block, Block) else None
            )
            checkpointed = partial(
                _run_checkpointed, block.forward, _checkpoint_arguments(own, block), kept
            )
            alone = own == "selective" and not by_policy
            if alone and isinstance(block, Block) and not _has_dropout(block):
                checkpointed = partial(_keep_matmuls_or_checkpoint, block, checkpointed)
            block.forward = checkpointed


def _checkpoint_arguments(mode: Checkpointing, block: nn.Module) -> dict[str, Any]:
    """Return the keyword arguments of torch's checkpoint for one block.

    outpace's blocks repeat exactly the same computation, and draw random numbers only for dropout,
    so shapes need not be compared, nor generator states kept without dropout.
    """
    options: dict[str, Any] = {}
    if isinstance(block, Block):
        options = {"preserve_rng_state": _has_dropout(block), "determinism_check": "none"}
    if mode == "full":
        return options
    kept = _ATTENTION if mode == "attention" else _SELECTED
    contexts = {"context_fn": partial(_selective_contexts, kept)}
    return {**options, **contexts, **without_saved_tensor_hooks()}


def _has_dropout(block: Block) -> bool:
    if block.attention.spec.dropout > 0:
        return True
    rates = [getattr(part, "dropout", None) for part in block.modules()]  # of adapters
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


def _run_checkpointed(
    forward: Callable[..., Any],
    options: dict[str, Any],
    change_once: Callable[[Callable[..., Any]], Callable[..., Any]] | None,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    if change_once is not None and not torch.compiler.is_compiling():
        forward = change_once(forward)
    if not torch.compiler.is_compiling():
        args, kwargs = _without_caches(args, kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)


def _without_caches(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Drop key/value caches, because recomputation would append to them a second time."""
    given = (*args, *kwargs.values())
    if not any(_is_kv_cache(value) for value in given):
        return args, kwargs
    kept = {name: None if _is_kv_cache(value) else value for name, value in kwargs.items()}
    if kept.get("use_cache"):
        kept["use_cache"] = False
    return tuple(None if _is_kv_cache(value) else value for value in args), kept


def _is_kv_cache(value: Any) -> bool:
    if value is None or isinstance(value, torch.Tensor):
        return False
    kinds = type(value).__mro__
    return any(k.__name__ == "Cache" and k.__module__.startswith("transformers.") for k in kinds)


def _keep_matmuls_or_checkpoint(
    block: Block, checkpointed: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    if torch.is_grad_enabled() and not kwargs and can_keep_matmuls(block, *args):
        return keep_matmuls(block, *args)
    return checkpointed(*args, **kwargs)


def _selective_contexts(kept: frozenset[Any]) -> Contexts:
    def choose(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator in kept:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    contexts: Contexts = create_selective_checkpoint_contexts(choose)
    return contexts


# Without batched matmuls: if attention is not fused, they compute the scores (B, H, S, S), whose
# memory checkpointing must free.
_MATMULS = frozenset({torch.ops.aten.mm.default, torch.ops.aten.addmm.default})
_ATTENTION = frozenset(
    {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        # Visible only if compiled together with surrounding code; compiled alone, it is recomputed.
        torch.ops.higher_order.flex_attention,
        attention.overload,
    }
)
# One set for all blocks, since the compiler distinguishes sets by identity.
_SELECTED = _ATTENTION | _MATMULS


def apply_options(
    module: nn.Module,
    plan: Plan,
    blocks: Sequence[nn.Module] | None = None,
    scratch: Scratch | None = None,
    on_failure: Callable[[str], None] | None = None,
    device: torch.device | None = None,
) -> None:
    """Apply a plan's options to a model's blocks: fp8, checkpointing, compilation, offloading.

    Options only work if applied in this order. `scratch` stores tensors that are offloaded to disk
    (None: in the system's temporary directory). `on_failure` is called with the reason if the
    compiler fails on the model. `device` is the one that computes (None: that of the parameters,
    which may be on the meta device or in host memory until the model is laid out).
    """
    if plan.precision == "fp8":
        apply_fp8(blocks or find_blocks(module))
    if plan.recomputes:
        blocks = blocks or find_blocks(module)
        by_policy = plan.offload_activations != "none" and not plan.compile
        apply_checkpointing(module, plan.modes(len(blocks)), blocks, by_policy=by_policy)
    if plan.compile:
        whole = compiled_region(plan) == "whole"
        compile_forwards([module] if whole else blocks or find_blocks(module), on_failure)
    if plan.offload_activations != "none":
        on_disk = plan.offload_activations == "disk"
        device = device or next(module.parameters()).device
        require_place(plan.offload_activations, device)
        place = DiskStore(scratch or Scratch()) if on_disk else HostStore(device)
        offload_activations(blocks or find_blocks(module), place)
