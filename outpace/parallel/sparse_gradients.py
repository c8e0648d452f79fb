"""Refusal of embeddings with sparse gradients where the strategy or optimizer needs dense ones."""

from torch import nn

from outpace.records.errors import BadInputError, first_names
from outpace.records.strategies import TRAITS, Strategy


def refuse_sparse_gradients(module: nn.Module, strategy: Strategy | None = None) -> None:
    """Raise BadInputError if a trainable embedding has sparse=True.

    `strategy` is given for a training loop of the user, whose optimizer may accept sparse
    gradients. None means that outpace takes the steps; its clipping and its optimizers accept only
    dense gradients.
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
        why = "gradient clipping and outpace's optimizers accept only dense gradients"
        also = ""
        if strategy is not None:
            why = f"strategy {strategy} reduces only dense gradients"
            also = ", or strategy ddp or zero1"
        raise BadInputError(
            f"{first_names(names)} {'has' if len(names) == 1 else 'have'} sparse gradients "
            f"(sparse=True of the embedding), but {why}. Use sparse=False{also}."
        )
