"""A block of a transformer: attention and MLP around a residual stream.

Legend: B batch, S queries, T keys, D hidden width, H query heads, K key/value heads, C head width.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outpace.nn.attention import attention
from outpace.nn.cache import LayerCache
from outpace.nn.dtensor import is_spread
from outpace.nn.gelu import gelu_tanh
from outpace.nn.kernels import attend_by, attend_by_blocks, choose_kernel, suits_flash
from outpace.nn.masks import Visibility, at_places
from outpace.nn.norms import RMSNorm, suits_operator
from outpace.nn.recomputed_tensors import remake_operands
from outpace.nn.rotary import Tables, rotate, tables_at
from outpace.records.model import ModelSpec

# Queries (B, H, S, C), keys and values (B, K, T, C), visibility, dropout → (B, H, S, C).
Mixing = Callable[[Tensor, Tensor, Tensor, Visibility, float], Tensor]


class Linear(nn.Linear):
    """nn.Linear without values of its own: the model's `reset_parameters(seed)` draws them."""

    def reset_parameters(self) -> None:
        """Leave the memory uninitialised, because the model draws the values."""


def is_plain(module: nn.Module) -> bool:
    """Return whether a module is exactly a `Linear`: no subclass, not sharded, no hooks."""
    hooked = module._forward_hooks or module._forward_pre_hooks
    return type(module) is Linear and not hooked and not is_spread(module.weight)


def joined_weight(layers: Sequence[nn.Linear]) -> Tensor:
    """Concatenate the weights of linear layers into one matrix (out, in)."""
    weights: list[Tensor] = [layer.weight for layer in layers]
    return torch.cat(weights) if len(weights) > 1 else weights[0]


def joined_matmul(x: Tensor, layers: Sequence[nn.Linear]) -> Tensor:
    """Apply several linear layers to `x` by one matmul, and return their concatenated outputs.

    Joining copies the weights, but the far larger `x` and its gradient are then read and written
    only once.
    """
    biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
    bias = torch.cat(biases) if len(biases) > 1 else biases[0] if biases else None
    return F.linear(x, joined_weight(layers), bias)


def joined_linear(x: Tensor, layers: Sequence[nn.Linear]) -> tuple[Tensor, ...]:
    """Apply several linear layers to `x` by one matmul; return the output of each.

    The backward joins the weights again instead of keeping the joined copy. Otherwise, the copies
    of all blocks would be in memory at the same time, unsharded even if the weights are sharded.
    """
    if torch.compiler.is_compiling() or not (x.requires_grad and torch.is_grad_enabled()):
        return split_matmul(joined_matmul(x, layers), layers)
    rows = joined_matmul(x.flatten(0, -2), layers)
    dtype = rows.dtype
    remake_operands(rows, None, lambda: joined_weight(layers).to(dtype).t())
    return split_matmul(rows.view(*x.shape[:-1], -1), layers)


def split_matmul(matmul: Tensor, layers: Sequence[nn.Linear]) -> tuple[Tensor, ...]:
    """Split the joined matmul of several layers into each layer's output."""
    return torch.split(matmul, [len(layer.weight) for layer in layers], dim=-1)


def make_norm(spec: ModelSpec) -> nn.LayerNorm | nn.RMSNorm:
    """Build the spec's norm over the hidden width."""
    kind = nn.LayerNorm if spec.norm == "layernorm" else RMSNorm
    return kind(spec.hidden, eps=spec.norm_eps)


def activate(spec: ModelSpec, x: Tensor) -> Tensor:
    """Apply the spec's activation function."""
    if spec.activation == "silu":
        return F.silu(x)
    low = x.dtype in (torch.bfloat16, torch.float16) and x.requires_grad
    if low and spec.activation == "gelu_tanh" and suits_operator(x):
        value: Tensor = gelu_tanh(x)[0]
        return value
    return F.gelu(x, approximate="tanh" if spec.activation == "gelu_tanh" else "none")


def to_autocast_dtype(x: Tensor) -> Tensor:
    """Return `x` in autocast's dtype if autocast is on.

    Autocast casts an activation for each matmul that reads it. Casting before several matmuls makes
    a single copy, the only one that autograd saves.
    """
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return x
    return x.to(torch.get_autocast_dtype(kind))


def to_fp32(x: Tensor) -> Tensor:
    """Cast `x` to fp32 if its dtype is narrower."""
    return x if x.dtype == torch.float64 else x.float()


def fused_attention(
    q_BHSC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, sees: Visibility, dropout: float
) -> Tensor:
    """Compute softmax(q·kᵀ/√C)·v with torch's kernels."""
    if sees.blocks is not None:
        if q_BHSC.dtype != torch.float64:
            mixed_BHSC = attend_by_blocks(q_BHSC, k_BKTC, v_BKTC, sees.blocks)
            if mixed_BHSC is not None:
                return mixed_BHSC
        sees = sees.as_mask()
    kernel = choose_kernel(
        q_BHSC.device.type,
        q_BHSC.dtype,
        q_BHSC.shape[2],
        q_BHSC.shape[1] != k_BKTC.shape[1],
        sees.mask is not None,
        suits_flash(q_BHSC.shape[3], dropout),
    )
    return attend_by(kernel, q_BHSC, k_BKTC, v_BKTC, sees.mask, sees.is_causal, dropout)


def suited_attention(
    q_BHSC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, sees: Visibility, dropout: float
) -> Tensor:
    """Compute attention as `fused_attention` does, by outpace's own kernel where it is faster.

    That is for bf16 on a CPU, with several queries and without dropout or block masks.
    """
    on_cpu = q_BHSC.device.type == "cpu" and q_BHSC.dtype == torch.bfloat16
    if on_cpu and sees.blocks is None and dropout == 0 and q_BHSC.shape[2] > 1:
        mixed: Tensor = attention(q_BHSC, k_BKTC, v_BKTC, sees.mask, sees.is_causal)
        return mixed
    return fused_attention(q_BHSC, k_BKTC, v_BKTC, sees, dropout)


class HeadNorm(nn.RMSNorm):
    """nn.RMSNorm of each head, with the weight cast to the dtype of the input.

    The input is fp32 even if weights are 16-bit, and torch's fused kernel needs equal dtypes.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Map (…, C) to (…, C)."""
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Multi-head attention, with grouped queries if the spec has fewer key/value heads.

    Vaswani et al., arXiv 1706.03762, §3.2.2; grouped queries: Ainslie et al., arXiv 2305.13245.
    `mix` computes the attention-weighted sums of values; a strategy may replace it. `joins`:
    whether a single matmul computes queries, keys and values together, instead of three (None: on
    accelerators only).
    """

    mix: Mixing
    joins: bool | None = None

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.mix = suited_attention
        query_width, kv_width = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.q = Linear(spec.hidden, query_width, bias=spec.qkv_bias)
        self.k = Linear(spec.hidden, kv_width, bias=spec.qkv_bias)
        self.v = Linear(spec.hidden, kv_width, bias=spec.qkv_bias)
        self.out = Linear(query_width, spec.hidden, bias=spec.out_bias)
        if spec.qk_norm:
            self.q_norm = HeadNorm(spec.head_dim, eps=spec.norm_eps)
            self.k_norm = HeadNorm(spec.head_dim, eps=spec.norm_eps)

    def forward(
        self,
        x_BSD: Tensor,
        sees: Visibility,
        rotary: Tables | None,
        cache: LayerCache | None,
        read_B: Tensor | None = None,
    ) -> Tensor:
        """Map (B, S, D) to (B, S, D), or with `read_B`, to (B, 1, D) at one position per sample."""
        x_BSD = to_autocast_dtype(x_BSD)
        asking = x_BSD
        if read_B is not None:
            asking, sees = at_places(x_BSD, read_B), sees.of_queries(read_B, x_BSD.shape[1])
        if read_B is None and self.can_join(x_BSD):
            q, k, v = joined_linear(x_BSD, (self.q, self.k, self.v))
        else:
            q, k, v = self.q(asking), self.k(x_BSD), self.v(x_BSD)
        out: Tensor = self.out(self.mix_values(q, k, v, sees, rotary, cache, read_B))
        return out

    def can_join(self, x: Tensor) -> bool:
        """Return whether one matmul may replace three: plain layers without adapters or hooks."""
        wanted = x.device.type not in ("cpu", "meta") if self.joins is None else self.joins
        return wanted and all(is_plain(part) for part in (self.q, self.k, self.v))

    def mix_values(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sees: Visibility,
        rotary: Tables | None,
        cache: LayerCache | None = None,
        read_B: Tensor | None = None,
    ) -> Tensor:
        """Attend with projected q (B, S, H·C) and k, v (B, S, K·C); return (B, S, H·C)."""
        q_BHSC, k_BKSC, v_BKSC = self._split_heads(q), self._split_heads(k), self._split_heads(v)
        dtype = v_BKSC.dtype
        if self.spec.qk_norm:
            q_BHSC, k_BKSC = self.q_norm(to_fp32(q_BHSC)), self.k_norm(to_fp32(k_BKSC))
        if rotary is not None:
            its = rotary if read_B is None else tables_at(rotary, read_B)
            q_BHSC, k_BKSC = rotate(q_BHSC, its), rotate(k_BKSC, rotary)
        k_BKTC, v_BKTC = k_BKSC.to(dtype), v_BKSC
        if cache is not None:
            k_BKTC, v_BKTC = cache.extend(k_BKTC, v_BKTC)
        dropout = self.spec.dropout if self.training else 0.0
        mixed_BHSC = self.mix(q_BHSC.to(dtype), k_BKTC, v_BKTC, sees, dropout)
        return mixed_BHSC.transpose(1, 2).flatten(2)

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.spec.head_dim).transpose(1, 2)


class MLP(nn.Module):
    """down(act(up(x))), or gated: down(act(gate(x)) × up(x)) (Shazeer, arXiv 2002.05202, eq. 5)."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.up = Linear(spec.hidden, spec.ffn, bias=spec.mlp_bias)
        if spec.gated:
            self.gate = Linear(spec.hidden, spec.ffn, bias=spec.mlp_bias)
        self.down = Linear(spec.ffn, spec.hidden, bias=spec.mlp_bias)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Map (B, S, D) to (B, S, D)."""
        x_BSD = to_autocast_dtype(x_BSD)
        if self.spec.gated:
            inner = activate(self.spec, self.gate(x_BSD)) * self.up(x_BSD)
        else:
            inner = activate(self.spec, self.up(x_BSD))
        out: Tensor = self.down(inner)
        return out


class Block(nn.Module):
    """Attention and MLP, each added to the residual stream.

    With `norm_first` (pre-norm), each reads a normalised copy (Radford et al. 2019, GPT-2, §2.3);
    otherwise (post-norm), each sum is normalised (Vaswani et al., §3.1; BERT).
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.norm_first = spec.norm_first
        self.attention_norm = make_norm(spec)
        self.attention = Attention(spec)
        self.mlp_norm = make_norm(spec)
        self.mlp = MLP(spec)
        self.dropout = nn.Dropout(spec.dropout)

    def forward(
        self,
        x_BSD: Tensor,
        sees: Visibility,
        rotary: Tables | None = None,
        cache: LayerCache | None = None,
        read_B: Tensor | None = None,
    ) -> Tensor:
        """Map (B, S, D) to (B, S, D), or with `read_B`, to (B, 1, D) at one position per sample."""
        normed = self.attention_norm(x_BSD) if self.norm_first else x_BSD
        attended = self.dropout(self.attention(normed, sees, rotary, cache, read_B))
        if read_B is not None:
            x_BSD = at_places(x_BSD, read_B)
        if self.norm_first:
            x_BSD = x_BSD + attended
            fed: Tensor = x_BSD + self.dropout(self.mlp(self.mlp_norm(x_BSD)))
            return fed
        x_BSD = self.attention_norm(x_BSD + attended)
        summed: Tensor = self.mlp_norm(x_BSD + self.dropout(self.mlp(x_BSD)))
        return summed
