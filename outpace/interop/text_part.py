"""The text part of a multimodal transformers model: its decoder and its head."""

from typing import Any

from torch import Tensor, nn


class TextPart(nn.Module):
    """The language model of a multimodal model `whole`, with its output head.

    Raises AttributeError if `whole` does not expose a language model.
    """

    def __init__(self, whole: Any, config: Any) -> None:
        super().__init__()
        self.config = config
        inner = getattr(whole, "model", whole)
        found = getattr(whole, "language_model", None) or getattr(inner, "language_model", None)
        decoder = found if found is not None else whole.get_decoder()
        if getattr(decoder, "lm_head", None) is not None:  # a language model with its head
            decoder = decoder.get_decoder()
        self.model = decoder
        self.lm_head = whole.get_output_embeddings()

    def get_input_embeddings(self) -> Any:
        """Return the token embedding."""
        return self.model.get_input_embeddings()

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the logits (B, S, V) of tokens (B, S); without a head, the last hidden states."""
        hidden_BSD: Tensor = self.model(input_ids=input_ids)[0]
        if self.lm_head is None:
            return hidden_BSD
        logits_BSV: Tensor = self.lm_head(hidden_BSD)
        return logits_BSV
