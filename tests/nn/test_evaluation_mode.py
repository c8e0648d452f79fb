import pytest
from torch import nn

from outpace.nn.evaluation_mode import explain_modes


class FrozenNorms(nn.Sequential):
    """Keeps its normalisations in evaluation mode, as detectors do, once train() is called."""

    def train(self, mode=True):
        super().train(mode)
        for part in self.modules():
            if isinstance(part, nn.BatchNorm1d):
                part.eval()
        return self


def test_parts_that_train_would_freeze_are_named_if_it_was_not_called():
    module = FrozenNorms(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert "module.train() would put 1 in evaluation mode" in explain_modes(module)
    assert module[1].training
    assert explain_modes(module.train()) is None and not module[1].training


def test_only_modes_that_differ_from_those_of_train_are_explained():
    """Not parts that the user has frozen."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    module[1].eval()
    assert explain_modes(module) is None and not module[1].training
    assert "evaluation mode, as given" in explain_modes(module.eval())


class FrozenWeights(FrozenNorms):
    """Its train() also freezes the weights of its normalisations."""

    def train(self, mode=True):
        super().train(mode)
        self[1].weight.requires_grad = False
        return self


def test_a_hint_leaves_what_is_trained():
    module = FrozenWeights(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert "would put 1 in evaluation mode" in explain_modes(module)
    assert module[1].weight.requires_grad and module[1].training


def run_training(self, loader):
    raise AssertionError("a hint ran a training")


def run_epochs(self, epochs=3):
    self[0].eval()
    raise AssertionError("a hint ran a training")


def fail_in_training(self, mode=True):
    self[0].eval()
    raise RuntimeError("no adapter is loaded")


@pytest.mark.parametrize("method", [run_training, run_epochs, fail_in_training])
def test_a_method_train_that_sets_no_mode_is_left_alone(method):
    module = type("Own", (nn.Sequential,), {"train": method})(nn.Linear(2, 2))
    assert explain_modes(module) is None and module[0].training
