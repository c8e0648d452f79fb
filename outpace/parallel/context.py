"""Context parallelism: long sequences split over ranks, with ring attention.

Liu et al., "Ring Attention with Blockwise Transformers", arXiv 2310.01889: each rank keeps its
queries, and keys and values go round the ring while attention to the last ones is computed. Under
a causal mask a rank with the first tokens would have little to do and one with the last tokens
much; so a sequence is cut into 2N chunks, and rank i has chunks i and 2N−1−i (the "zig-zag" of
Llama 3, arXiv 2407.21783, §3.3.2). All ranks then have equal work at every turn.

Parameters are replicas, and the loss is a sum over each rank's targets: for gradients the ranks of
a sequence are what the ranks of a batch are, so they are exchanged as `ddp` does.

Legend: B batch, S queries, T keys, H query heads, K key/value heads, G = H/K, C width of a head.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from outpace.nn.block import Block, raised
from outpace.nn.loss import LanguageModelObjective
from outpace.nn.masks import Visibility
from outpace.nn.transformer import Transformer
from outpace.parallel.api import Layout, Request
from outpace.parallel.ddp import Replicas
from outpace.parallel.tensors import hollow
from outpace.records.errors import BadInputError

# Rows of scores that are held at once.
_ROWS = 512
_KEYS_VALUES, _THEIR_GRADIENTS = 0, 1  # tags: both are under way at a time


@dataclass(frozen=True)
class Ring:
    """The ranks of one sequence; `rank` is the place of this one among them."""

    group: dist.ProcessGroup
    rank: int
    size: int

    def pass_on(self, tensor: Tensor, tag: int) -> tuple[Tensor, list[dist.Work]]:
        """Begin to send to the next rank, and to receive as much from the one before."""
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
        """What to compute while the keys of this rank, then those before it, are at hand.

        Each rank's part is chunk i, then chunk 2N−1−i. Those of a rank before this one: its first
        chunk lies before both chunks here, its second after both. Of a rank behind: both lie
        before the second chunk here and after the first.
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
    """Which of this rank's queries see which of the keys at hand."""

    queries: slice
    keys: slice
    causal: bool


@dataclass(frozen=True)
class Dropout:
    """Masks that the backward draws again: a function of (seed, turn)."""

    rate: float
    seed: int

    def generator(self, turn: int, device: torch.device) -> torch.Generator | None:
        """For all masks of one turn; None where nothing is dropped."""
        if not self.rate:
            return None
        return torch.Generator(device).manual_seed(self.seed + turn)

    def mask(self, like: Tensor, generator: torch.Generator | None) -> Tensor | None:
        """0 for what is dropped, 1/(1 − rate) for what is kept."""
        if generator is None:
            return None
        drawn = torch.rand(like.shape, generator=generator, device=like.device, dtype=like.dtype)
        return (drawn >= self.rate).to(like.dtype) / (1 - self.rate)


def ring_attention(
    ring: Ring,
    q_BHSC: Tensor,
    k_BKSC: Tensor,
    v_BKSC: Tensor,
    sees: Visibility,
    dropout: float,
) -> Tensor:
    """Attention of this rank's queries to the keys of all ranks. Collective over the ring."""
    # From the CPU's generator, which recomputation of activations sets back.
    drops = Dropout(dropout, int(torch.randint(2**62, ())) if dropout else 0)
    with torch.autocast(q_BHSC.device.type, enabled=False):
        mixed: Tensor = RingAttention.apply(  # type: ignore[no-untyped-call]
            q_BHSC, k_BKSC, v_BKSC, ring, sees.is_causal, drops
        )
    return mixed


class RingAttention(torch.autograd.Function):
    """Sums in fp32 (fp64 for fp64), whatever the operands' dtype."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring, causal: bool, drops: Dropout
    ) -> Tensor:
        """Each turn's attention is merged by its log-sum-exp (Milakov and Gimelshein, 2018)."""
        held = own = torch.stack((k, v))
        wide = raised(q)
        out, lse = torch.zeros_like(wide), wide.new_full(q.shape[:-1], -torch.inf)
        for number, turn in enumerate(ring.turns(causal, q.shape[-2])):
            last = number == ring.size - 1
            coming, works = (held, []) if last else ring.pass_on(held, _KEYS_VALUES)
            keys, values = raised(held[..., turn.keys, :])
            generator = drops.generator(number, q.device)
            part, part_lse = attend(
                wide[..., turn.queries, :], keys, values, turn.causal, drops, generator
            )
            _merge(out[..., turn.queries, :], lse[..., turn.queries], part, part_lse)
            _wait(works)
            held = coming
        mixed = out.to(q.dtype)
        ctx.save_for_backward(q, own, mixed, lse)
        ctx.ring, ctx.causal, ctx.drops = ring, causal, drops
        return mixed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Keys and values go round again, and their gradients one step behind them."""
        q, held, mixed, lse = ctx.saved_tensors
        ring, drops = ctx.ring, ctx.drops
        wide, grad = raised(q), raised(grad)
        delta = (grad * raised(mixed)).sum(-1)
        q_grad = torch.zeros_like(wide)
        sums = torch.zeros_like(raised(held))
        sums_works: list[dist.Work] = []
        for number, turn in enumerate(ring.turns(ctx.causal, q.shape[-2])):
            last = number == ring.size - 1
            coming, works = (held, []) if last else ring.pass_on(held, _KEYS_VALUES)
            rows = turn.queries
            keys, values = raised(held[..., turn.keys, :])
            known = (grad[..., rows, :], lse[..., rows], delta[..., rows])
            generator = drops.generator(number, q.device)
            parts = attend_backward(
                wide[..., rows, :], keys, values, turn.causal, drops, generator, *known
            )
            q_grad[..., rows, :] += parts[0]
            _wait(sums_works)
            sums[..., turn.keys, :] += torch.stack(parts[1:])
            _wait(works)
            held = coming
            # After the last turn they arrive at home.
            sums, sums_works = ring.pass_on(sums, _THEIR_GRADIENTS)
        _wait(sums_works)
        k_grad, v_grad = sums.to(held.dtype)
        return q_grad.to(q.dtype), k_grad, v_grad, None, None, None


def attend(
    q_BHSC: Tensor,
    k_BKTC: Tensor,
    v_BKTC: Tensor,
    causal: bool,
    drops: Dropout,
    generator: torch.Generator | None,
) -> tuple[Tensor, Tensor]:
    """softmax(q·kᵀ/√C)·v and the logarithm of the softmax's denominator, (B, H, S)."""
    out, lse = torch.empty_like(q_BHSC), q_BHSC.new_empty(q_BHSC.shape[:-1])
    for rows, columns in _pieces(q_BHSC.shape[-2], causal):
        q = _by_group(q_BHSC[..., rows, :], k_BKTC.shape[1])
        scores = _scores(q, k_BKTC[..., columns, :], rows if causal else None)
        sums = scores.logsumexp(-1, keepdim=True)
        weights = (scores - sums).exp_()
        mask = drops.mask(weights, generator)
        weights = weights if mask is None else weights.mul_(mask)
        out[..., rows, :] = _by_head(weights @ v_BKTC[..., columns, :], q_BHSC.shape[1])
        lse[..., rows] = _by_head(sums, q_BHSC.shape[1]).squeeze(-1)
    return out, lse


def attend_backward(
    q_BHSC: Tensor,
    k_BKTC: Tensor,
    v_BKTC: Tensor,
    causal: bool,
    drops: Dropout,
    generator: torch.Generator | None,
    grad_BHSC: Tensor,
    lse_BHS: Tensor,
    delta_BHS: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values (Dao et al., arXiv 2205.14135, algorithm 4).

    `lse_BHS` is that of all keys, so that the weights are the true ones; `delta_BHS` is the
    gradient times the output, summed over C.
    """
    heads, groups = q_BHSC.shape[1], k_BKTC.shape[1]
    q_grad, k_grad, v_grad = (torch.zeros_like(x) for x in (q_BHSC, k_BKTC, v_BKTC))
    for rows, columns in _pieces(q_BHSC.shape[-2], causal):
        q, grad = (_by_group(x[..., rows, :], groups) for x in (q_BHSC, grad_BHSC))
        lse, delta = (_by_group(x[..., rows, None], groups) for x in (lse_BHS, delta_BHS))
        k, v = k_BKTC[..., columns, :], v_BKTC[..., columns, :]
        weights = (_scores(q, k, rows if causal else None) - lse).exp_()
        mask = drops.mask(weights, generator)
        weights_grad = grad @ v.mT
        used = weights if mask is None else weights * mask
        v_grad[..., columns, :] += used.mT @ grad
        if mask is not None:
            weights_grad *= mask
        scores_grad = weights.mul_(weights_grad.sub_(delta)) * q.shape[-1] ** -0.5
        q_grad[..., rows, :] = _by_head(scores_grad @ k, heads)
        k_grad[..., columns, :] += scores_grad.mT @ q
    return q_grad, k_grad, v_grad


def _pieces(length: int, causal: bool) -> Iterator[tuple[slice, slice]]:
    """Rows of scores, and the columns that they need."""
    for start in range(0, length, _ROWS):
        stop = min(start + _ROWS, length)
        yield slice(start, stop), slice(0, stop) if causal else slice(None)


def _scores(q_BKRC: Tensor, k_BKTC: Tensor, rows: slice | None) -> Tensor:
    """q·kᵀ/√C for rows that hold G heads each, −∞ for keys behind `rows`."""
    scores: Tensor = (q_BKRC * q_BKRC.shape[-1] ** -0.5) @ k_BKTC.mT
    if rows is not None:
        at = torch.arange(rows.start, rows.stop, device=scores.device)
        behind = at.unsqueeze(1) < torch.arange(rows.stop, device=scores.device)
        scores.unflatten(2, (-1, len(at))).masked_fill_(behind, -torch.inf)
    return scores


def _by_group(x_BHSC: Tensor, groups: int) -> Tensor:
    """(B, H, S, C) to (B, K, G·S, C), so that keys are multiplied with all queries they serve."""
    grouped: Tensor = x_BHSC.unflatten(1, (groups, -1))
    return grouped.flatten(2, 3)


def _by_head(x_BKRC: Tensor, heads: int) -> Tensor:
    """The other way round."""
    parted: Tensor = x_BKRC.unflatten(2, (heads // x_BKRC.shape[1], -1))
    return parted.flatten(1, 2)


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Add attention to other keys, in place."""
    total = torch.logaddexp(lse, part_lse)
    out.mul_((lse - total).exp_().unsqueeze(-1))
    out.addcmul_(part, (part_lse - total).exp_().unsqueeze(-1))
    lse.copy_(total)


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


class PartOfSequence(nn.Module):
    """An objective on this rank's chunks of each sequence."""

    def __init__(self, objective: LanguageModelObjective, ring: Ring) -> None:
        super().__init__()
        self.objective = objective
        self._ring = ring

    @property
    def model(self) -> Transformer:
        """The objective's."""
        return self.objective.model

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """As the objective's, of this rank's targets."""
        outcome: tuple[Tensor, Tensor] = self.objective(self.part_of(batch))
        return outcome

    def part_of(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """This rank's chunks of each sequence, with their positions (S,)."""
        self._check(batch)
        length, ranks = batch["tokens"].shape[1], self._ring.size
        at = torch.arange(length, device=batch["tokens"].device).chunk(2 * ranks)
        positions = torch.cat((at[self._ring.rank], at[2 * ranks - 1 - self._ring.rank]))
        part = {name: tensor[:, positions] for name, tensor in batch.items()}
        return {**part, "positions": positions}

    def _check(self, batch: dict[str, Tensor]) -> None:
        length, spec, ranks = batch["tokens"].shape[1], self.model.spec, self._ring.size
        self.model.check_length(length)
        if length % (2 * ranks):
            raise BadInputError(
                f"strategy cp cuts each sequence into 2 × {ranks} equal chunks, but {length} "
                f"tokens are no multiple of {2 * ranks}. Use --seq-len "
                f"{-(-length // (2 * ranks)) * 2 * ranks}, or fewer ranks."
            )
        windows = [spec.layer_window(layer) for layer in range(spec.layers)]
        for window in windows:
            if window is not None and window < length:
                raise BadInputError(
                    f"strategy cp has no sliding windows yet, but the model's is {window} tokens "
                    f"and a sequence has {length}. Use --seq-len {window} or less, or tp."
                )
        for name, meaning in (("documents", "--document-attention"), ("padding_mask", "padding")):
            if name in batch:
                raise BadInputError(
                    f"strategy cp attends to whole sequences and has no masks yet, so it cannot "
                    f"do {meaning}. Leave it out, or use tp."
                )


class ContextParallel(Replicas):
    """Replicas whose ranks share samples. `hollow` is the model with the attention of one rank."""

    def __init__(self, request: Request, hollow: nn.Module) -> None:
        super().__init__(request)
        self._hollow = hollow

    def whole_model(self, wanted: bool) -> nn.Module | None:
        """The model as it computes without the other ranks of the ring."""
        if wanted:
            self._hollow.load_state_dict(self.model.state_dict(), assign=True)
        return self._hollow if wanted else None


def apply(request: Request) -> Layout:
    """Split sequences over the plan's cp axis."""
    copied = hollow(request.objective.model)  # type: ignore[arg-type]
    group, _ = dist.new_subgroups(request.plan.cp)
    part = share_sequences(request.objective, Ring(group, dist.get_rank(group), group.size()))
    return ContextParallel(replace(request, objective=part), copied)


def share_sequences(objective: nn.Module, ring: Ring) -> PartOfSequence:
    """Have the model attend round the ring, in place. Raises BadInputError for another's model."""
    if not isinstance(objective, LanguageModelObjective):
        raise BadInputError(
            "strategy cp replaces the attention of outpace's own transformers; it does not know "
            "that of a person's own model. Use ddp or zero3."
        )
    for block in objective.model.blocks:
        assert isinstance(block, Block)
        block.attention.mix = partial(ring_attention, ring)
    return PartOfSequence(objective, ring)
