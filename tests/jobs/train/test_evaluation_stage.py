"""What is said of an evaluation before it begins."""

from types import SimpleNamespace

import pytest

from outpace.jobs.train.evaluation import evaluation_stage


@pytest.mark.parametrize(
    ("eval_batches", "held_out", "labels", "said"),
    [
        (None, 1000, None, " on 128 samples (for fewer: --eval-batches)"),
        (None, 1000, ("a", "b"), " on 1,000 samples (for fewer: --eval-batches)"),
        (None, 1, None, " on 1 sample (for fewer: --eval-batches)"),
        (2, 1000, None, " on 16 samples"),
        (2, 5, None, " on 5 samples"),
        (0, 1000, None, ""),
        (None, None, None, ""),
    ],
)
def test_its_length_is_said_and_how_to_shorten_it(eval_batches, held_out, labels, said):
    data = None if held_out is None else range(held_out)
    job = SimpleNamespace(
        settings=SimpleNamespace(eval_batches=eval_batches, global_batch=8),
        inputs=SimpleNamespace(eval_data=data, labels=labels),
    )
    assert evaluation_stage(job, "initial") == f"measuring the initial loss{said}"
