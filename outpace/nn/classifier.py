"""A transformer that classifies whole texts, with its loss and metrics.

Legend: B batch, S sequence, D hidden width, C classes.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outpace.nn.block import Linear, to_fp32
from outpace.nn.loss import IGNORED
from outpace.nn.model_part import AbsentModule
from outpace.nn.random_values import fill_normal
from outpace.nn.transformer import INIT_STD, Transformer
from outpace.records.model import ModelSpec

# How tensor parallelism splits the blocks (Shoeybi et al., arXiv 1909.08053, §3).
_TP_PLAN: Mapping[str, str] = {
    **{f"backbone.blocks.*.attention.{name}": "colwise" for name in "qkv"},
    "backbone.blocks.*.attention.out": "rowwise",
    **{f"backbone.blocks.*.mlp.{name}": "colwise" for name in ("up", "gate")},
    "backbone.blocks.*.mlp.down": "rowwise",
    **{
        f"backbone.blocks.*.attention.{name}_norm": "replicated_with_grad_allreduce"
        for name in "qk"
    },
}


def initial_value(seed: int, name: str, shape: Sequence[int]) -> Tensor:
    """Draw a weight that only classifiers have: N(0, 0.02) from its own stream; biases are 0."""
    value = torch.zeros(shape, dtype=torch.float32, device="cpu")
    return value if name.endswith("bias") else fill_normal(value, seed, name, INIT_STD)


class Classifier(nn.Module):
    """A transformer whose head over the vocabulary is replaced by a linear layer over classes.

    Encoders classify by their first token, [CLS], through a pooler with tanh (Devlin et al., arXiv
    1810.04805, §4.1, as in BertForSequenceClassification). Decoders classify by their last token,
    the only one that sees all others (Radford et al. 2018, GPT, §3.2;
    GPT2ForSequenceClassification). Modules are taken from `model`, and new weights drawn from
    `seed`.
    """

    def __init__(self, model: Transformer, classes: int, seed: int = 0) -> None:
        super().__init__()
        spec = model.spec
        self.spec: ModelSpec = spec
        if model.head_transform is not None:
            model.head_transform = AbsentModule()  # type: ignore[assignment]
        model.head = model.head_bias = None
        self.backbone = model
        self.pooler = None if spec.causal else Linear(spec.hidden, spec.hidden)
        self.dropout = nn.Dropout(0.0 if spec.causal else spec.dropout)
        self.classifier = Linear(spec.hidden, classes, bias=not spec.causal)
        if not self.classifier.weight.is_meta:
            self._init_new_weights(seed)

    @torch.no_grad()
    def _init_new_weights(self, seed: int) -> None:
        for name, parameter in self.named_parameters():
            if not name.startswith("backbone."):
                parameter.copy_(initial_value(seed, name, parameter.shape))

    @property
    def tp_plan(self) -> Mapping[str, str]:
        """Return how tensor parallelism splits each matrix, by name."""
        return _TP_PLAN

    @property
    def classes(self) -> int:
        """Return the number of classes."""
        return self.classifier.out_features

    def forward(
        self,
        tokens_BS: Tensor,
        segments_BS: Tensor | None = None,
        padding_mask_BS: Tensor | None = None,
        last_B: Tensor | None = None,
    ) -> Tensor:
        """Return scores (B, C). `last_B`: positions of the samples' last tokens, for decoders."""
        batch, length = tokens_BS.shape
        if self.pooler is not None or last_B is None:
            last_B = tokens_BS.new_full((batch,), length - 1 if self.pooler is None else 0)
        hidden_B1D = self.backbone(tokens_BS, None, segments_BS, padding_mask_BS, read_B=last_B)
        read_BD = hidden_B1D[:, 0]
        if self.pooler is not None:
            read_BD = torch.tanh(self.pooler(read_BD))
        scores_BC: Tensor = self.classifier(self.dropout(read_BD))
        return scores_BC


class ClassificationObjective(nn.Module):
    """A classifier with its loss, for a strategy to wrap.

    In evaluation mode, `forward` also returns the values named in `sums`. From their totals over
    samples and ranks, `metrics` computes accuracy and F1.
    """

    def __init__(self, model: Classifier) -> None:
        super().__init__()
        self.model = model
        # With two classes, F1 is the second class's, as in GLUE; with more, the mean over classes.
        self._counted = range(model.classes) if model.classes > 2 else range(1, 2)
        self.sums = (
            "correct",
            *(f"{what}_{c}" for c in self._counted for what in ("predicted", "actual", "both")),
        )

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Return the sum of losses in nats (fp32 or fp64, with gradient) and of samples (int64).

        `batch` has `tokens` (B, S) and `targets` (B,), which are −100 for ignored samples; for an
        encoder also `segments` and `padding_mask` (B, S), for a decoder `last` (B,).
        """
        scores_BC = to_fp32(
            self.model(
                batch["tokens"], batch.get("segments"), batch.get("padding_mask"), batch.get("last")
            )
        )
        targets_B = batch["targets"]
        loss_sum = F.cross_entropy(scores_BC, targets_B, ignore_index=IGNORED, reduction="sum")
        count = (targets_B != IGNORED).sum()
        if self.training:
            return loss_sum, count
        return loss_sum, count, self._sum_matches(scores_BC, targets_B)

    def _sum_matches(self, scores_BC: Tensor, targets_B: Tensor) -> Tensor:
        """Return the values named in `sums`, (K,), in that order."""
        valid_B = targets_B != IGNORED
        predicted_B = scores_BC.argmax(-1)
        parts = [((predicted_B == targets_B) & valid_B).sum()]
        for number in self._counted:
            said_B, is_B = (predicted_B == number) & valid_B, targets_B == number
            parts += [said_B.sum(), is_B.sum(), (said_B & is_B).sum()]
        return torch.stack(parts)

    def metrics(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        """Compute accuracy, and F1 = 2·both / (predicted + actual), from sums over all samples."""
        scores = []
        for number in self._counted:
            either = sums[f"predicted_{number}"] + sums[f"actual_{number}"]
            scores.append(2 * sums[f"both_{number}"] / either if either else 0.0)
        return {"accuracy": sums["correct"] / max(count, 1), "f1": sum(scores) / len(scores)}
