"""The accelerator's loss over a split vocabulary, on real processes."""

from pathlib import Path

import pytest

RANKS = Path(__file__).with_name("vocabulary_ranks.py")


@pytest.mark.gloo
def test_a_split_head_has_the_whole_ones_loss_and_gradients(on_ranks):
    """97 rows over two ranks, each padded by its own; nothing of it waits for the device."""
    said = on_ranks(2, RANKS)
    assert max(said["errors"]["None"]) < 1e-6
    loss, *grads, silent = said["errors"]["torch.bfloat16"]
    assert loss < 2e-4 and silent < 1e-6
    for ours, alone in zip(grads, said["single"]["torch.bfloat16"], strict=True):
        assert ours < 1.3 * alone
    assert said["waits"] == []
