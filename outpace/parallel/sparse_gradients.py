"""Embeddings with sparse gradients, which most strategies and optimizers refuse."""

from torch import nn

from outpace.records.errors import BadInputError, first_names
from outpace.records.strategies import TRAITS, Strategy


def refuse_sparse_gradients(module: nn.Module, strategy: Strategy | None = None) -> None:
    """Raise BadInputError for a trained embedding with sparse=True.

    `strategy` is set for a user's own loop, whose optimizer may accept sparse gradients. It is None
    for outpace's steps, whose clipping and optimizers do not.
    """
    if strategy is not None and TRAITS[strategy].takes_sparse_gradients:
        return
    names = [
        f"{name}.weight" if name else "weight"
        for name, part in module.named_modules()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag)
        and part.sparse
        and part.weight.requires_grad
    ]
    if names:
        why = "clipping and the optimizers accept only dense ones"
        also = ""
        if strategy is not None:
            why = f"strategy {strategy} adds up only dense ones"
            also = ", or strategy ddp or zero1"
        raise BadInputError(
            f"{first_names(names)} {'has' if len(names) == 1 else 'have'} sparse gradients "
            f"(sparse=True of the embedding), but {why}. Use sparse=False{also}."
        )
