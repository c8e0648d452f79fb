"""Context parallelism: long sequences split over ranks, with ring attention.

Liu et al., "Ring Attention with Blockwise Transformers", arXiv 2310.01889: each rank keeps its
queries, and keys and values travel around the ring. Each transfer overlaps with the attention to
the keys received before. Under a causal mask, a rank with the first tokens would have little work
and a rank with the last tokens much, so a sequence is split into 2N chunks, and rank i has chunks i
and 2N−1−i (the "zig-zag" of Llama 3, arXiv 2407.21783, §3.3.2). All ranks then have equal work in
every turn.

Parameters are replicated, and each rank sums the loss over its targets. Gradients are reduced as in
`ddp`: the sum is the same whether ranks have different samples or different tokens.

Legend: B batch, S queries, T keys, H query heads, K key/value heads, G = H/K, C width of a head.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from outpace.nn.block import Block, to_fp32
from outpace.nn.loss import LanguageModelObjective
from outpace.nn.masks import Visibility
from outpace.nn.transformer import Transformer
from outpace.parallel.ddp import Replicas
from outpace.parallel.layout import Layout, LayoutRequest
from outpace.parallel.ring_kernels import Dropout, RingKernel, choose_ring_kernel
from outpace.parallel.tensors import meta_copy
from outpace.records.errors import BadInputError

_KEYS_VALUES, _THEIR_GRADIENTS = 0, 1  # tags: both are in flight at the same time


@dataclass(frozen=True)
class SequenceRing:
    """The `size` ranks that share a sequence; `rank` is this process's position among them.

    `runs_on`: the device type to choose kernels for, if tensors are on another one (in a trace).
    """

    group: dist.ProcessGroup
    rank: int
    size: int
    runs_on: str | None = None

    def pass_on(self, tensor: Tensor, tag: int) -> tuple[Tensor, list[dist.Work]]:
        """Start sending a tensor to the next rank and receiving one from the previous rank.

        Returns the tensor that is being received, and the works to wait for.
        """
        received = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, tensor, group=self.group, tag=tag, group_peer=after),
                dist.P2POp(dist.irecv, received, group=self.group, tag=tag, group_peer=before),
            ]
        )
        return received, works

    def turns(self, causal: bool, length: int) -> Iterator["Turn"]:
        """Yield the attention to compute in each turn around the ring.

        In the first turn, this rank's queries attend to its keys; in each later turn, to the keys
        of another rank. Each sequence has 2N chunks for N ranks, and rank i has chunks i and
        2N−1−i. Causal attention is only to keys that precede the query. Of a lower rank's chunks,
        the first precedes both chunks of this rank, and the second follows both. Both chunks of a
        higher rank lie between the two chunks of this rank, so only the queries of the second
        attend to them.
        """
        everything, half = slice(None), length // 2
        for number in range(self.size):
            owner = (self.rank - number) % self.size
            if owner == self.rank:
                yield Turn(everything, everything, causal)
            elif not causal:
                yield Turn(everything, everything, False)
            elif owner < self.rank:
                yield Turn(everything, slice(0, half), False)
            else:
                yield Turn(slice(half, None), everything, False)


@dataclass(frozen=True)
class Turn:
    """The attention of one turn: slices of this rank's queries and of the keys they attend to."""

    queries: slice
    keys: slice
    causal: bool


def ring_attention(
    ring: SequenceRing,
    q_BHSC: Tensor,
    k_BKSC: Tensor,
    v_BKSC: Tensor,
    sees: Visibility,
    dropout: float,
) -> Tensor:
    """Return the attention of this rank's queries to all ranks' keys. Collective over the ring."""
    # Drawn from the CPU's generator, whose state checkpointing restores to recompute activations.
    drops = Dropout(dropout, int(torch.randint(2**62, ())) if dropout else 0)
    kernel = choose_ring_kernel(q_BHSC, drops, ring.runs_on)
    with torch.autocast(q_BHSC.device.type, enabled=False):
        mixed: Tensor = RingAttention.apply(  # type: ignore[no-untyped-call]
            q_BHSC, k_BKSC, v_BKSC, ring, sees.is_causal, kernel
        )
    return mixed


class RingAttention(torch.autograd.Function):
    """Attention of this rank's queries to the keys of all ranks, which travel around the ring.

    Sums over turns are in fp32, or in fp64 for fp64 inputs.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        ring: SequenceRing,
        causal: bool,
        kernel: RingKernel,
    ) -> Tensor:
        """Merge the turns' outputs by their log-sum-exps (Milakov and Gimelshein, 2018)."""
        held = own = torch.stack((k, v))
        out = torch.zeros_like(to_fp32(q))
        lse = out.new_full(q.shape[:-1], -torch.inf)
        for number, turn in enumerate(ring.turns(causal, q.shape[-2])):
            last = number == ring.size - 1
            coming, works = (held, []) if last else ring.pass_on(held, _KEYS_VALUES)
            keys, values = held[..., turn.keys, :]
            rows = turn.queries
            part, part_lse = kernel.forward(number, q[..., rows, :], keys, values, turn.causal)
            _merge_attention(out[..., rows, :], lse[..., rows], part, part_lse)
            _wait_for_all(works)
            held = coming
        mixed = out.to(q.dtype)
        ctx.save_for_backward(q, own, mixed, lse)
        ctx.ring, ctx.causal, ctx.kernel = ring, causal, kernel
        return mixed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Send keys and values around the ring again; their gradients follow one turn later.

        Each turn computes the gradients of the keys and values that this rank has in the turn. For
        this, it uses the attention's output and log-sum-exp over the keys of all ranks.
        """
        q, held, mixed, lse = ctx.saved_tensors
        ring, kernel = ctx.ring, ctx.kernel
        q_grad = torch.zeros_like(to_fp32(q))
        sums = torch.zeros_like(to_fp32(held))
        sums_works: list[dist.Work] = []
        for number, turn in enumerate(ring.turns(ctx.causal, q.shape[-2])):
            last = number == ring.size - 1
            coming, works = (held, []) if last else ring.pass_on(held, _KEYS_VALUES)
            rows = turn.queries
            keys, values = held[..., turn.keys, :]
            known = (grad[..., rows, :], mixed[..., rows, :], lse[..., rows])
            parts = kernel.backward(number, q[..., rows, :], keys, values, turn.causal, *known)
            q_grad[..., rows, :] += parts[0]
            _wait_for_all(sums_works)
            for whole, part in zip(sums, parts[1:], strict=True):
                whole[..., turn.keys, :] += part
            _wait_for_all(works)
            held = coming
            # After the last turn, gradients are back on the rank of their keys and values.
            sums, sums_works = ring.pass_on(sums, _THEIR_GRADIENTS)
        _wait_for_all(sums_works)
        k_grad, v_grad = sums.to(held.dtype)
        return q_grad.to(q.dtype), k_grad, v_grad, None, None, None


def _merge_attention(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge the attention to further keys into `out` and its log-sum-exp `lse`, in place."""
    total = torch.logaddexp(lse, part_lse)
    out.mul_((lse - total).exp_().unsqueeze(-1))
    out.addcmul_(part, (part_lse - total).exp_().unsqueeze(-1))
    lse.copy_(total)


def _wait_for_all(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


class PartOfSequence(nn.Module):
    """An objective that runs the model on this rank's chunks of each sequence."""

    def __init__(self, objective: LanguageModelObjective, ring: SequenceRing) -> None:
        super().__init__()
        self.objective = objective
        self._ring = ring

    @property
    def model(self) -> Transformer:
        """The objective's model."""
        return self.objective.model

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the sum of losses and the number of targets in this rank's chunks."""
        outcome: tuple[Tensor, Tensor] = self.objective(self.part_of(batch))
        return outcome

    def part_of(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's chunks of each sequence, with their positions (S,)."""
        self._require_supported(batch)
        length, ranks = batch["tokens"].shape[1], self._ring.size
        at = torch.arange(length, device=batch["tokens"].device).chunk(2 * ranks)
        positions = torch.cat((at[self._ring.rank], at[2 * ranks - 1 - self._ring.rank]))
        part = {name: tensor[:, positions] for name, tensor in batch.items()}
        return {**part, "positions": positions}

    def _require_supported(self, batch: dict[str, Tensor]) -> None:
        length, spec, ranks = batch["tokens"].shape[1], self.model.spec, self._ring.size
        self.model.check_length(length)
        if length % (2 * ranks):
            raise BadInputError(
                f"strategy cp splits each sequence into 2 × {ranks} equal chunks, but {length} "
                f"tokens are not a multiple of {2 * ranks}. Use --seq-len "
                f"{-(-length // (2 * ranks)) * 2 * ranks}, or fewer ranks."
            )
        windows = [spec.layer_window(layer) for layer in range(spec.layers)]
        for window in windows:
            if window is not None and window < length:
                raise BadInputError(
                    "strategy cp does not support sliding windows yet, but the model's window is "
                    f"{window} tokens and a sequence has {length}. Use --seq-len {window} or "
                    "less, or tp."
                )
        for name, meaning in (("documents", "--document-attention"), ("padding_mask", "padding")):
            if name in batch:
                raise BadInputError(
                    f"strategy cp does not support {meaning} yet, because its attention has no "
                    f"masks. Leave out {meaning}, or use tp."
                )


class ContextParallel(Replicas):
    """Replicas that each process a part of every sequence.

    `meta_copy` is the model on the meta device, with its original attention.
    """

    def __init__(self, request: LayoutRequest, meta_copy: nn.Module) -> None:
        super().__init__(request)
        self._meta_model = meta_copy

    def whole_model(self, wanted: bool) -> nn.Module | None:
        """Return the model with its original attention if it is `wanted`, otherwise None."""
        if wanted:
            self._meta_model.load_state_dict(self.model.state_dict(), assign=True)
        return self._meta_model if wanted else None


def apply(request: LayoutRequest) -> Layout:
    """Replicate the model, and split each sequence over the ranks of the plan's cp axis."""
    copied = meta_copy(request.objective.model)  # type: ignore[arg-type]
    group, _ = dist.new_subgroups(request.plan.cp)
    part = share_sequences(
        request.objective, SequenceRing(group, dist.get_rank(group), group.size())
    )
    return ContextParallel(replace(request, objective=part), copied)


def share_sequences(objective: nn.Module, ring: SequenceRing) -> PartOfSequence:
    """Replace the model's attention with ring attention, in place.

    Returns an objective for this rank's chunks of each sequence. Raises BadInputError for a custom
    model.
    """
    if not isinstance(objective, LanguageModelObjective):
        raise BadInputError(
            "strategy cp replaces the attention of outpace's transformers and cannot replace that "
            "of a custom model. Use ddp or zero3."
        )
    ring = replace(ring, runs_on=objective.runs_on)
    for block in objective.model.blocks:
        assert isinstance(block, Block)
        block.attention.mix = partial(ring_attention, ring)
    return PartOfSequence(objective, ring)
