"""Text generation with a causal model, one token at a time."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from outpace.nn.cache import KVCache
from outpace.nn.evaluation_mode import evaluation_mode
from outpace.nn.transformer import Transformer
from outpace.records.errors import BadInputError

# Below this, logits divided by the temperature overflow fp32 or saturate exp.
_LEAST_TEMPERATURE = 1e-6


def generate(
    model: Transformer,
    tokens: list[int],
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    stop_ids: Collection[int] = (),
) -> list[int]:
    """Return `tokens` and their continuation, which ends before the first of `stop_ids`.

    Temperatures below 1e-6 select the most likely token. Otherwise, a token is sampled from
    softmax(logits / temperature), among the `top_k` most likely tokens if given. Sampling is on the
    CPU, so equal logits give equal tokens on all devices. When the model's positions are used up,
    generation continues with the latest tokens in half of the positions. Raises BadInputError for
    models that are not causal, an empty prompt, tokens outside the vocabulary, and bad sampling
    values.
    """
    _require_valid_request(model, tokens, max_new_tokens, temperature, top_k)
    generator = torch.Generator("cpu").manual_seed(seed)
    written = list(tokens)
    context, cache = _start_context(model, written, max_new_tokens)
    with _inference_mode(model):
        for left in range(max_new_tokens, 0, -1):
            if cache.length + len(context) > model.spec.max_positions:
                context, cache = _start_context(model, written, left)
            logits_V = _last_logits(model, context, cache)
            token = _sample_token(logits_V, temperature, top_k, generator)
            if token in stop_ids:
                break
            written.append(token)
            context = [token]
    return written


def read_length(tokens: int, positions: int) -> int:
    """Return how many of a text's last tokens to read.

    All are read if the model has enough `positions`. Otherwise as many as half of the positions, so
    that the other half remains for new tokens.
    """
    return tokens if tokens <= positions else max(1, positions // 2)


def _start_context(
    model: Transformer, written: list[int], new_tokens: int
) -> tuple[list[int], KVCache]:
    """Return the last tokens of the text, from which generation starts, and an empty cache.

    The cache has room for these tokens and `new_tokens`, up to the model's positions.
    """
    positions = model.spec.max_positions
    kept = written[-read_length(len(written), positions) :]
    return kept, KVCache(model.spec.layers, min(positions, len(kept) + new_tokens))


def _last_logits(model: Transformer, context: list[int], cache: KVCache) -> Tensor:
    tokens = torch.tensor([context], device=model.head_weight.device)
    hidden_BSD = model(tokens, cache=cache)
    return model.logits(hidden_BSD[0, -1]).float().cpu()


def _sample_token(
    logits_V: Tensor, temperature: float, top_k: int | None, generator: torch.Generator
) -> int:
    if not bool(torch.isfinite(logits_V).all()):
        raise BadInputError(
            "the model's logits are NaN or infinite, so no token can be chosen: its weights are "
            "damaged, or its training diverged. Use another checkpoint."
        )
    if temperature < _LEAST_TEMPERATURE:
        return int(logits_V.argmax())
    scores, ids = logits_V.topk(min(top_k or len(logits_V), len(logits_V)))
    drawn = torch.multinomial((scores / temperature).softmax(0), 1, generator=generator)
    return int(ids[drawn])


@contextmanager
def _inference_mode(model: Transformer) -> Iterator[None]:
    """Disable dropout, gradients, and compilation, since the length changes with each token."""
    with evaluation_mode(model), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        yield


def _require_valid_request(
    model: Transformer, tokens: list[int], count: int, temperature: float, top_k: int | None
) -> None:
    if not model.spec.causal:
        raise BadInputError(
            f"a {model.spec.family} model attends in both directions and cannot generate text; "
            "use a causal model (gpt2, llama, mistral, qwen2, qwen3)"
        )
    if not tokens:
        raise BadInputError("the prompt has no tokens; give at least one")
    worst = max(tokens) if max(tokens) >= model.spec.vocab else min(tokens)
    if not 0 <= worst < model.spec.vocab:
        raise BadInputError(
            f"token {worst} is outside the model's vocabulary of {model.spec.vocab}; "
            "use the tokenizer that the model was trained with"
        )
    if count < 0 or temperature < 0 or (top_k is not None and top_k < 1):
        raise BadInputError(
            f"max_new_tokens {count}, temperature {temperature}, top_k {top_k}: the first two "
            "must be at least 0, and top_k at least 1 (or none)"
        )
