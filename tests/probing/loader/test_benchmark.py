import json
import os
import time
from contextlib import ExitStack
from itertools import chain
from statistics import median
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import Dataset, get_worker_info

from outpace.data.corpus import read_documents
from outpace.data.tokenizer_training import train_tokenizer
from outpace.probing.loader import benchmark as loader_room
from outpace.probing.loader.advice import advise, cheapest
from outpace.probing.loader.benchmark import _LoaderBench, probe_loader
from outpace.probing.loader.dataset import LoaderData, prepare_input
from outpace.probing.loader.tokenise import tokenise_figures
from outpace.probing.timing.interleave import run_turns
from outpace.probing.timing.measure import WrongResultError
from outpace.records.errors import BadInputError
from outpace.records.figure import Figure, Key

SLEEP_S = 5e-3


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    monkeypatch.setattr(loader_room, "usable_cores", lambda: 2)


@pytest.fixture(scope="module")
def texts():
    found = []
    for text in read_documents(("stdlib",), "text", "all", 0.05):
        found.append(text)
        if sum(map(len, found)) > 400_000:
            break
    return found


@pytest.fixture(scope="module")
def tokenizer(texts):
    return train_tokenizer(texts[:10], 600)


@pytest.fixture
def jsonl(tmp_path, texts):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"body": text}) + "\n" for text in texts))
    return str(path)


def rate(section, what="samples", **of):
    """In the median of samples, whether or not that is sure enough for a figure."""
    (found,) = [f for f in section.figures if f.key.what == what and f.key.has(**of)]
    return median(chain(*found.rounds))


@pytest.mark.slow
def test_a_persons_text_is_loaded_and_tokenised(jsonl, tokenizer):
    shares = []
    data = LoaderData((jsonl,), "body", tokenizer, seq_len=32, micro_batch=4)
    before, children = dict(os.environ), set(psutil.Process().children())
    section = run_turns(probe_loader(data, True, 0.5, shares.append))
    assert dict(os.environ) == before
    assert set(psutil.Process().children()) <= children
    keys = {str(f.key) for f in section.figures}
    assert len(keys) == len(section.figures)
    assert {f.key.of["workers"] for f in section.figures if f.key.has(loader="outpace")} == {
        0, 1, 2,
    }  # fmt: skip
    assert {f.key.of["prefetch"] for f in section.figures if f.key.has(loader="torch")} == {2, 4}
    samples, tokens = (
        rate(section, what, loader="outpace", workers=1) for what in ("samples", "tokens")
    )
    assert tokens == pytest.approx(32 * samples)
    assert rate(section, "tokens", processes=1) < rate(section, "bytes", processes=1)
    assert shares == sorted(shares)
    assert any("CUDA" in note for note in section.notes)
    assert "loader: timed on data.jsonl" in section.notes  # and not the folder
    assert section.advice or any("not steady enough" in note for note in section.notes)


class Slow(Dataset):
    """Takes time, and no processor's."""

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        time.sleep(SLEEP_S)
        return torch.tensor([float(index)]) + torch.rand(1)


def test_what_is_timed_is_making_batches_not_emptying_queues():
    section = run_turns(probe_loader(LoaderData(dataset=Slow(), micro_batch=2), True, 0.1))
    rates = [rate(section, loader="outpace", workers=workers) for workers in (0, 1, 2)]
    # Two workers cannot make more than this, and a queue that was full would have given it. How
    # much less they make depends on what else the cores do.
    for workers, found in enumerate(rates):
        assert 0 < found * SLEEP_S <= 1.05 * max(1, workers), rates
    assert not any(f.key.what == "tokens" or f.key.kind == "tokenise" for f in section.figures)
    assert "loader: timed on your own data set, 1000 samples of Slow" in section.notes


class OfItsWorker(Dataset):
    """What it gives depends on who asks."""

    def __init__(self, located):
        if located:
            self.locate = lambda seed, positions: (positions % 100).tolist()

    def __len__(self):
        return 100

    def __getitem__(self, index):
        return torch.tensor([index, 0 if get_worker_info() is None else 1])

    def __getitems__(self, keys):
        return [self[key] for key in keys]


def test_other_samples_with_workers_are_found_out():
    def data(located):
        return LoaderData(dataset=OfItsWorker(located), micro_batch=2)

    before = set(psutil.Process().children())  # a fork server of other tests
    with pytest.raises(WrongResultError, match="differs from the one loaded without workers"):
        run_turns(probe_loader(data(located=True), True, 0.1))
    assert set(psutil.Process().children()) <= before
    section = run_turns(probe_loader(data(located=False), True, 0.1))
    assert any("different samples with workers" in note for note in section.notes)


def test_tokens_are_loaded_as_they_are(tmp_path):
    path = tmp_path / "train.bin"
    ids = np.arange(10_000, dtype="<u2")
    ids.tofile(path)
    ready = prepare_input(LoaderData((str(path),), seq_len=50), tmp_path, quick=True)
    batch = ready.tokens.__getitems__(ready.tokens.locate(0, np.arange(3)))
    assert batch["tokens"].shape == (3, 50)
    assert (batch["targets"] == batch["tokens"] + 1).all()
    assert ready.as_text is None and ready.texts == ()


def test_text_becomes_the_tokens_that_training_reads(tmp_path, jsonl, tokenizer, texts):
    data = LoaderData((jsonl,), "body", tokenizer, seq_len=64, document_attention=True)
    ready = prepare_input(data, tmp_path, quick=True)
    row = [*ready.tokens[0]["tokens"].tolist(), int(ready.tokens[0]["targets"][-1])]
    assert row == tokenizer.encode(texts[0])[:65]
    assert len(ready.tokens) * 64 >= 1 << 24  # more than a cache holds
    first = ready.as_text[0]
    assert first["tokens"].tolist()[:8] == row[:8]
    assert 0.7 * 64 < ready.as_text.mean_tokens <= 64


@pytest.mark.parametrize("sources", [("no/such/data",), ()])
def test_bad_data_is_refused(tmp_path, sources):
    with pytest.raises(BadInputError):
        prepare_input(LoaderData(sources), tmp_path, quick=True)


def test_tokenising_is_timed_on_text_that_was_not_seen(texts, tokenizer, monkeypatch):
    seen = []
    real = type(tokenizer).encode_batch

    def noted(self, part):
        seen.append((self, part))
        return real(self, part)

    monkeypatch.setattr(type(tokenizer), "encode_batch", noted)
    figures = run_turns(tokenise_figures(texts, tokenizer, [1], True, 0.1))
    assert [f.key.what for f in figures] == ["tokens", "bytes"]
    assert all(len(f.rounds) >= 5 for f in figures)
    # The last sample: a new memory, a first part, and another that is timed.
    (memory, first), (same, timed) = seen[-2:]
    assert memory is same and not set(first) & set(timed)
    assert [part for words, part in seen if words is memory] == [first, timed]


def figure(value, noise=0.01, **of):
    bounds = {"low": value * (1 - noise), "high": value * (1 + noise)} if value else {}
    rounds = tuple((value * (1 + noise * place),) for place in (-1, 1, 0, -0.5, 0.5, 0))
    return Figure(
        key=Key(kind="loader", what="tokens", of={"loader": "outpace", "pin": "no", **of}),
        unit="tokens/s", value=value, origin="measured", rounds=rounds, level=0.95, **bounds,
    )  # fmt: skip


def unsure(**of):
    return figure(1e9, **of).model_copy(update={"value": None, "unstable": "it drifted"})


def test_the_cheapest_setting_that_cannot_be_told_from_the_best():
    alone, one, two, four = (
        figure(value, workers=workers, prefetch=2)
        for workers, value in ((0, 1e6), (1, 1.9e6), (2, 3.95e6), (4, 4e6))
    )
    assert cheapest([four, two, one, alone]) is two
    assert cheapest([four, unsure(workers=2, prefetch=2), one]) is four
    assert cheapest([unsure(workers=0)]) is None
    eager = figure(4e6, workers=2, prefetch=8)
    assert cheapest([eager, two]) is two


@pytest.mark.parametrize(
    ("device", "quick", "torchs", "pinned"),
    [
        ("cpu", True, {(2, 2), (2, 4)}, 0),
        ("cpu", False, {(n, p) for n in (1, 2) for p in (2, 1, 4, 8)}, 0),
        ("cuda", True, {(2, 2), (2, 4)}, 2),
        ("cuda", False, {(n, p) for n in (1, 2) for p in (2, 1, 4, 8)}, 3 + 8),
    ],
)
def test_settings_are_crossed_in_a_full_probe(device, quick, torchs, pinned):
    ready = SimpleNamespace(as_text=None)
    bench = _LoaderBench(ready, 1, torch.device(device), quick, ExitStack())
    found = bench.settings()
    assert len({str(one.key("samples")) for one in found}) == len(found)
    plain = [one for one in found if not one.pin]
    assert {(one.workers, one.prefetch) for one in plain if one.loader == "torch"} == torchs
    assert len(found) - len(plain) == pinned


def test_prefetching_is_judged_with_the_workers_that_are_best():
    def loaded(value, workers, prefetch):
        return figure(value, loader="torch", workers=workers, prefetch=prefetch)

    slow = [loaded(value, 1, prefetch) for value, prefetch in ((1e6, 2), (1.5e6, 4))]
    fast = [loaded(value, 2, prefetch) for value, prefetch in ((3e6, 2), (4e6, 4))]
    (advice,) = advise(slow + fast)
    assert "4 prefetched batches per worker load 4.00 Mtokens/s, 2 load 3.00" in advice.text


def test_advice_names_the_flag():
    rates = ((0, 1e6), (1, 1.9e6), (2, 4e6))
    figures = [figure(value, workers=workers) for workers, value in rates]
    (workers,) = advise(figures)
    assert "Recommended: --workers 2" in workers.text and workers.gain == pytest.approx(3.0)
    assert "up to 10.00 ktokens/s" in workers.text


def test_advice_on_pinned_memory_names_its_flag():
    figures = [figure(value, workers=0, pin=pin) for value, pin in ((1e6, "no"), (2e6, "yes"))]
    (pinning,) = [one for one in advise(figures) if "pinned" in one.text]
    assert pinning.text.endswith("from pageable: --pin-memory.")
