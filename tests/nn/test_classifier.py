"""The classifier's scores and its metrics."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outpace.nn.classifier import ClassificationObjective, Classifier
from outpace.nn.loss import IGNORED
from outpace.nn.transformer import Transformer
from outpace.records.model import ModelSpec


def spec_of(family):
    values = {"family": family, "layers": 1, "hidden": 16, "heads": 2, "vocab": 30}
    return ModelSpec.parse({**values, "max_positions": 16}, "test")


def objective_of(family, classes=2):
    return ClassificationObjective(Classifier(Transformer(spec_of(family)), classes)).eval()


def f1(said, true, number):
    """Of one class, by precision and recall."""
    hits = sum(s == t == number for s, t in zip(said, true, strict=True))
    if not hits:
        return 0.0
    precision, recall = hits / said.count(number), hits / true.count(number)
    return 2 * precision * recall / (precision + recall)


@pytest.mark.parametrize("classes", [2, 3])
@given(data=st.data())
def test_metrics_are_those_of_precision_and_recall(classes, data):
    pairs = data.draw(
        st.lists(st.tuples(*[st.integers(0, classes - 1)] * 2), min_size=1, max_size=12)
    )
    said, true = (list(part) for part in zip(*pairs, strict=True))
    objective = objective_of("bert", classes)
    scores = torch.nn.functional.one_hot(torch.tensor([*said, 0]), classes).float()
    # The sums of two ranks, the second with a sample that does not count.
    targets, half = torch.tensor([*true, IGNORED]), len(pairs) // 2
    parts = [
        objective._sum_matches(scores[a:b], targets[a:b]) for a, b in ((0, half), (half, None))
    ]
    sums = dict(zip(objective.sums, sum(parts).tolist(), strict=True))
    found = objective.metrics(sums, len(pairs))
    counted = range(classes) if classes > 2 else (1,)
    expected = sum(f1(said, true, number) for number in counted) / len(counted)
    right = sum(s == t for s, t in pairs) / len(pairs)
    assert found == pytest.approx({"accuracy": right, "f1": expected})


@pytest.mark.parametrize("family", ["bert", "llama", "gpt2"])
def test_padding_changes_no_score(family):
    objective, tokens = objective_of(family), torch.randint(30, (2, 5))
    padded = torch.cat((tokens, torch.zeros(2, 3, dtype=torch.int64)), dim=1)
    mask, last = torch.arange(8).expand(2, 8) < 5, torch.tensor([4, 4])
    causal = objective.model.spec.causal
    alone = objective.model(tokens)
    among = objective.model(padded, None, None if causal else mask, last if causal else None)
    torch.testing.assert_close(among, alone, rtol=0, atol=1e-6)
    assert not torch.equal(objective.model(padded), alone), "the mask or the place matters"


FAMILIES = {
    "bert": {},
    "gpt2": {},
    "llama": {"heads": 4, "kv_heads": 2},
    "mistral": {"sliding_window": 3},
    "qwen3": {},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_nobody_reads_changes_neither_scores_nor_gradients(family):
    """The last block computes one place of each sample, as if it had computed all."""
    values = {"family": family, "layers": 2, "hidden": 16, "heads": 2, "vocab": 30}
    spec = ModelSpec.parse({**values, "max_positions": 16, **FAMILIES[family]}, "test")
    model = Classifier(Transformer(spec), 2).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    tokens, lengths = torch.randint(30, (3, 8)), torch.tensor([8, 5, 1])
    if spec.causal:
        scores, whole = model(tokens, last_B=lengths - 1), model.backbone(tokens)
        read = whole[torch.arange(3), lengths - 1]
    else:
        mask, segments = torch.arange(8) < lengths.unsqueeze(1), torch.randint(2, (3, 8))
        scores = model(tokens, segments, mask)
        whole = model.backbone(tokens, None, segments, mask)
        read = torch.tanh(model.pooler(whole[:, 0]))
    expected = model.classifier(read)
    torch.testing.assert_close(scores, expected)
    grads, wanted = (
        torch.autograd.grad(made.square().sum(), list(model.parameters()))
        for made in (scores, expected)
    )
    torch.testing.assert_close(grads, wanted)


def test_every_parameter_has_a_gradient_and_weights_follow_the_seed():
    for family in ("bert", "llama", "gpt2"):
        objective = objective_of(family).train()
        batch = {"tokens": torch.randint(30, (3, 4)), "targets": torch.tensor([0, 1, IGNORED])}
        loss_sum, count = objective(batch)
        loss_sum.backward()
        assert int(count) == 2
        assert all(p.grad is not None for p in objective.parameters())
    one, two, other = (
        Classifier(Transformer(spec_of("bert"), s), 2, s).state_dict() for s in (1, 1, 2)
    )
    assert all(torch.equal(one[name], two[name]) for name in one)
    matrices = [name for name, tensor in one.items() if tensor.ndim > 1]
    assert not any(torch.equal(one[name], other[name]) for name in matrices)
    drawn = [one[name].flatten()[:8] for name in matrices]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(drawn, 2))
