"""The transformer, built from a ModelSpec: GPT-2, Llama, Mistral, Qwen and BERT in one.

Legend: B batch, S sequence, D hidden width, V vocabulary.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outpace.nn.block import Block, Linear, activate, make_norm
from outpace.nn.cache import KVCache
from outpace.nn.kernels import takes_blocks
from outpace.nn.masks import Visibility, positions_in_documents, visibility
from outpace.nn.random_values import fill_normal, stream_key
from outpace.nn.rotary import rotary_tables
from outpace.records.errors import BadInputError
from outpace.records.model import ModelSpec

INIT_STD = 0.02


class Embedding(nn.Embedding):
    """nn.Embedding that the model's `reset_parameters(seed)` initialises."""

    def reset_parameters(self) -> None:
        """Leave the memory uninitialised, because the model draws the values."""


class Embeddings(nn.Module):
    """Embeddings of tokens and, if the spec has them, of positions and segments, with a norm."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.tokens = Embedding(spec.vocab, spec.hidden)
        self.positions = (
            Embedding(spec.max_positions, spec.hidden) if spec.positions == "learned" else None
        )
        self.segments = Embedding(spec.segments, spec.hidden) if spec.segments else None
        self.norm = None if spec.norm_first else make_norm(spec)
        self.dropout = nn.Dropout(spec.dropout)

    def forward(self, tokens_BS: Tensor, positions: Tensor, segments_BS: Tensor | None) -> Tensor:
        """Map (B, S) token numbers and (S,) or (B, S) positions to (B, S, D)."""
        x_BSD: Tensor = self.tokens(tokens_BS)
        if self.segments is not None:
            if segments_BS is None:
                segments_BS = torch.zeros_like(tokens_BS)
            x_BSD = x_BSD + self.segments(segments_BS)
        if self.positions is not None:
            x_BSD = x_BSD + self.positions(positions)
        if self.norm is not None:
            x_BSD = self.norm(x_BSD)
        dropped: Tensor = self.dropout(x_BSD)
        return dropped


class HeadTransform(nn.Module):
    """BERT's layer before the prediction of masked tokens (Devlin et al., arXiv 1810.04805)."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.dense = Linear(spec.hidden, spec.hidden)
        self.norm = make_norm(spec)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Map (B, S, D) to (B, S, D)."""
        transformed: Tensor = self.norm(activate(self.spec, self.dense(x_BSD)))
        return transformed


@torch.no_grad()
def fill_initial(parameter: Tensor, spec: ModelSpec, seed: int, name: str) -> Tensor:
    """Fill a parameter with its initial value in place, and return it.

    Weights are N(0, 0.02), drawn from a stream per parameter, so they do not depend on device, rank
    or order. Biases are 0 and norms 1. In pre-norm models, projections into the residual stream are
    divided by √(2·layers) (Radford et al. 2019, §2.3).
    """
    if name.endswith("bias"):
        return parameter.zero_()
    if "norm" in name:
        return parameter.fill_(1.0)
    into_stream = name.endswith(("attention.out.weight", "mlp.down.weight"))
    std = INIT_STD
    if into_stream and spec.norm_first:
        std /= math.sqrt(2 * spec.layers)
    return fill_normal(parameter, seed, name, std)


def initial_value(
    spec: ModelSpec, seed: int, name: str, shape: Sequence[int], device: torch.device | None = None
) -> Tensor:
    """Return a parameter's initial value (see `fill_initial`) in fp32, by default on the CPU."""
    room = torch.empty(shape, dtype=torch.float32, device=device or "cpu")
    return fill_initial(room, spec, seed, name)


def drawn_transformer(
    spec: ModelSpec, seed: int, device: torch.device, dtype: torch.dtype
) -> "Transformer":
    """Return a transformer with random weights, drawn on `device` in `dtype`."""
    if device.type == "cpu" and dtype == torch.float32:
        return Transformer(spec, seed)  # not via the meta device, whose `empty_like` loads sympy
    with torch.device("meta"):
        structure = Transformer(spec)
    model = structure.to(dtype).to_empty(device=device)
    model.reset_parameters(seed)
    return model


class Transformer(nn.Module):
    """A transformer with its head.

    Weights are a pure function of (spec, seed), drawn in fp32. On the meta device, none are drawn:
    allocate memory with `to_empty` and call `reset_parameters`, or load a state dict with
    `assign=True`. `blocks_of_masks`: whether to use block masks if the device has a (compiled)
    kernel for them; otherwise, masks are S × S. `runs_on`: the device type to optimize for, by
    default that of the tensors.
    """

    head_bias: nn.Parameter | None
    blocks_of_masks = True
    runs_on: str | None = None

    def __init__(self, spec: ModelSpec, seed: int = 0) -> None:
        super().__init__()
        self.spec = spec
        self.embed = Embeddings(spec)
        self.blocks = nn.ModuleList(Block(spec) for _ in range(spec.layers))
        self.final_norm = make_norm(spec) if spec.norm_first else None
        self.head_transform = None if spec.norm_first else HeadTransform(spec)
        self.head = None if spec.tied else Linear(spec.hidden, spec.vocab, bias=False)
        bias = None if spec.norm_first else nn.Parameter(torch.zeros(spec.vocab))
        self.register_parameter("head_bias", bias)
        if not self.embed.tokens.weight.is_meta:
            self.reset_parameters(seed)

    @torch.no_grad()
    def reset_parameters(self, seed: int) -> None:
        """Set all weights to their initial values, in place."""
        for name, parameter in self.named_parameters():
            fill_initial(parameter, self.spec, seed, name)

    @property
    def head_weight(self) -> nn.Parameter:
        """Return the head's weight (V, D); if tied, that of the token embedding."""
        owner = self.embed.tokens if self.head is None else self.head
        weight: nn.Parameter = owner.weight  # type: ignore[assignment]
        return weight

    def forward(
        self,
        tokens_BS: Tensor,
        documents_BS: Tensor | None = None,
        segments_BS: Tensor | None = None,
        padding_mask_BS: Tensor | None = None,
        cache: KVCache | None = None,
        positions: Tensor | None = None,
        read_B: Tensor | None = None,
    ) -> Tensor:
        """Return hidden states (B, S, D), ready for `logits`.

        `documents_BS`: the document number of each token; attention stays within a document, and
        positions count from its start. `padding_mask_BS`: True for real tokens. `cache`: keys and
        values of previous tokens, which is extended. `positions`: (S,) or (B, S), if they do not
        start at 0, or if `tokens_BS` are hidden states of a shard of the sequence. `read_B`: the
        only position of each sample whose hidden state is needed; the last block then returns
        (B, 1, D). Raises BadInputError for sequences longer than the model's positions.
        """
        past = 0 if cache is None else cache.length
        length = tokens_BS.shape[1] if positions is None else positions.shape[-1]
        self.check_length(past + length)
        if positions is None:
            positions = torch.arange(past, past + length, device=tokens_BS.device)
        if documents_BS is not None:
            positions = positions_in_documents(documents_BS)
        x_BSD = self.embed(tokens_BS, positions, segments_BS)
        rotary = rotary_tables(self.spec, positions) if self.spec.positions == "rotary" else None
        lengths = (length, past + length)
        # Not in generation, where nothing is compiled because the length changes with each token.
        by_blocks = cache is None and self._uses_block_masks(tokens_BS.device)
        seen = self._visibility_by_window(
            lengths, documents_BS, padding_mask_BS, tokens_BS.device, by_blocks
        )
        for index, block in enumerate(self.blocks):
            layer_cache = None if cache is None else cache.layers[index]
            sees = seen[self.spec.layer_window(index)]
            if read_B is None or index + 1 < self.spec.layers:
                x_BSD = block(x_BSD, sees, rotary, layer_cache)
            else:
                x_BSD = block(x_BSD, sees, rotary, layer_cache, read_B)
        last = self.final_norm if self.head_transform is None else self.head_transform
        hidden_BSD: Tensor = x_BSD if last is None else last(x_BSD)
        return hidden_BSD

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits of the next (or masked) token, (…, V), from hidden states (…, D)."""
        return F.linear(hidden, self.head_weight, self.head_bias)

    def _visibility_by_window(
        self,
        lengths: tuple[int, int],
        documents_BS: Tensor | None,
        padding_mask_BS: Tensor | None,
        device: torch.device,
        by_blocks: bool,
    ) -> dict[int | None, Visibility]:
        windows = {self.spec.layer_window(index) for index in range(self.spec.layers)}
        causal = self.spec.causal
        given = documents_BS, padding_mask_BS
        return {
            window: visibility(*lengths, causal, window, *given, device, by_blocks)
            for window in windows
        }

    def _uses_block_masks(self, device: torch.device) -> bool:
        dropout = self.spec.dropout if self.training else 0.0
        kind = self.runs_on or device.type
        return self.blocks_of_masks and takes_blocks(kind, self.spec.head_dim, dropout)

    def check_length(self, length: int) -> None:
        """Raise BadInputError for a sequence longer than the model's positions."""
        if length > self.spec.max_positions:
            raise BadInputError(
                f"a sequence of {length} tokens is longer than the model's "
                f"{self.spec.max_positions} positions; use at most {self.spec.max_positions}"
            )


def use_dense_masks(module: nn.Module) -> None:
    """Make all transformers in a module use S × S masks, which need no compiler."""
    for part in module.modules():
        if isinstance(part, Transformer):
            part.blocks_of_masks = False


def stream(seed: int, name: str) -> torch.Generator:
    """Return the random generator of a parameter, seeded by `seed` and `name`."""
    return torch.Generator("cpu").manual_seed(stream_key(seed, name) % (1 << 64) >> 1)
