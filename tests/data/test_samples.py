import numpy as np
import pytest
import torch

from outpace.data.samples import IGNORED, TokenDataset
from outpace.data.tokenizer_training import train_tokenizer
from outpace.records.errors import BadInputError


@pytest.fixture
def files(tmp_path, library_texts):
    paths = []
    for number, text in enumerate(library_texts):
        paths.append(tmp_path / f"{number}.txt")
        paths[-1].write_text(text[: 6000 * (number + 1)], encoding="utf-8")
    return paths


def dataset_of(corpus, seq_len=32, **changed):
    given = {"objective": "causal", "seed": 1, "document_attention": False, "tokenizer": None}
    return TokenDataset(corpus, seq_len, **(given | changed))


def test_samples_tile_the_stream_and_targets_are_one_further(files, prepare):
    corpus = prepare(files[0])
    stream = corpus.streams[0].read(0, len(corpus.streams[0]))
    dataset = dataset_of(corpus)
    assert len(dataset) == (len(stream) - 1) // 32
    for i in (0, 1, len(dataset) - 1):
        assert dataset[i]["tokens"].tolist() == stream[i * 32 : i * 32 + 32].tolist()
        assert dataset[i]["targets"].tolist() == stream[i * 32 + 1 : i * 32 + 33].tolist()
        assert dataset[i]["tokens"].dtype == torch.int64


def test_a_pass_over_several_sources_uses_every_sample_once(files, prepare):
    dataset = dataset_of(prepare(*files[:3]))
    keys = dataset.locate(5, np.arange(len(dataset)))
    assert len({(s, i) for s, i, _ in keys}) == len(dataset)
    assert {s for s, _, _ in keys} == {0, 1, 2}


def test_weights_are_kept_whatever_the_sizes(files, prepare):
    dataset = dataset_of(prepare(*files[:3], weights=(1.0, 1.0, 2.0)))
    keys = dataset.locate(5, np.arange(4000))
    shares = np.bincount([s for s, _, _ in keys]) / 4000
    np.testing.assert_allclose(shares, [0.25, 0.25, 0.5])
    rare = dataset_of(prepare(*files[:2], weights=(0.0005, 1.0)))
    assert sum(s == 0 for s, _, _ in rare.locate(5, np.arange(100_000))) == 50
    first = [i for s, i, _ in keys if s == 0]
    size = len(set(first))
    assert sorted(first[:size]) == list(range(size))


def test_too_little_data_is_told(files, prepare):
    corpus = prepare(files[0])
    n = len(corpus.streams[0])
    assert len(dataset_of(corpus, n - 1)) == 1
    with pytest.raises(
        BadInputError, match=rf"has {n} tokens, .* sample of {n} \+ 1\. .*--seq-len"
    ):
        dataset_of(corpus, n)


def test_document_numbers_change_exactly_after_end_of_text(tmp_path, prepare, tokenizer):
    (tmp_path / "x.jsonl").write_text('{"text": "a b c"}\n{"text": "d"}\n' * 200)
    dataset = dataset_of(prepare(tmp_path / "x.jsonl"), 37, document_attention=True)
    for i in range(len(dataset)):
        sample = dataset[i]
        ended = (sample["tokens"] == tokenizer.eos_id).long()
        expected = torch.cumsum(ended, 0) - ended
        assert sample["documents"].tolist() == expected.tolist()
        assert sample["documents"].dtype == torch.int32


def test_documents_of_tokens_that_do_not_record_them_end_at_end_of_text(
    tmp_path, prepare, tokenizer
):
    end = tokenizer.eos_id
    path = tmp_path / "x.bin"
    path.write_bytes(np.array([5, 6, end, 7, end, end, 8, 9] * 20, dtype="<u2").tobytes())
    corpus = prepare(path, tokenizer=None)
    dataset = dataset_of(corpus, 10, document_attention=True, tokenizer=tokenizer)
    assert dataset[0]["documents"].tolist() == [0, 0, 0, 1, 1, 2, 3, 3, 3, 3]
    assert dataset[0]["documents"].dtype == torch.int32
    with pytest.raises(BadInputError, match=r"does not record where they begin. Name the --tok"):
        dataset_of(corpus, 10, document_attention=True)


@pytest.fixture
def masked(files, prepare, library_texts):
    tokenizer = train_tokenizer(library_texts, 600, masked=True)
    corpus = prepare(files[-1], tokenizer=tokenizer)
    return dataset_of(corpus, 128, objective="masked", tokenizer=tokenizer), tokenizer


def test_masking_has_bert_shares(masked):
    dataset, tokenizer = masked
    plain = {i: dataset._streams[0].read(i * 128, 128) for i in range(len(dataset))}
    keys = dataset.locate(3, np.arange(1500))
    batch = dataset.__getitems__(keys)
    rows = torch.from_numpy(np.stack([plain[i] for _, i, _ in keys]))
    chosen = batch["targets"] != IGNORED
    assert chosen.float().mean() == pytest.approx(0.15, abs=0.004)
    assert (batch["targets"][chosen] == rows[chosen]).all()
    assert (batch["tokens"][~chosen] == rows[~chosen]).all()
    hidden = (batch["tokens"] == tokenizer.mask_id)[chosen].float().mean()
    kept = (batch["tokens"] == rows)[chosen].float().mean()
    assert hidden == pytest.approx(0.8, abs=0.01)
    assert kept == pytest.approx(0.1, abs=0.01)
    assert not (rows[chosen] == tokenizer.eos_id).any()


def test_masks_follow_the_position(masked):
    dataset, _ = masked
    position, later = 7, 7 + len(dataset)
    one, again, next_pass = (
        dataset.__getitems__([(0, 2, p)])["targets"] for p in (position, position, later)
    )
    assert (one == again).all() and (one != next_pass).any()
    inside = dataset.__getitems__([(0, 5, 1), (0, 2, position)])["targets"][1]
    assert (inside == one[0]).all()


def test_masking_needs_a_mask_token(files, prepare, tokenizer):
    with pytest.raises(BadInputError, match=r"needs a tokenizer with a \[MASK\] token"):
        dataset_of(prepare(files[0]), objective="masked", tokenizer=tokenizer)


def test_a_batch_is_its_samples(files, prepare):
    dataset = dataset_of(prepare(*files[:2]))
    keys = dataset.locate(0, np.arange(9))
    together = dataset.__getitems__(keys)
    for row, key in enumerate(keys):
        assert (dataset.__getitems__([key])["tokens"][0] == together["tokens"][row]).all()
