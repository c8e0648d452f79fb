import pytest

from outpace.records.errors import BadInputError
from tests.data.text_files import A, B, C, tokens, write_lines


def test_a_dataset_with_the_fingerprint_of_another_is_another(tmp_path, prepare, ids_of):
    """As `map` gives it where its function reads a file that has changed since."""
    import datasets

    for name, text in (("one", A), ("two", B)):
        found = datasets.Dataset.from_dict({"text": [text]})
        found._fingerprint = "same"
        found.save_to_disk(tmp_path / name)
        assert tokens(prepare(tmp_path / name)) == [ids_of(text)]


def test_saved_datasets_and_folders_for_datasets(tmp_path, prepare, ids_of, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    datasets.disable_progress_bars()
    found = datasets.Dataset.from_dict({"text": [A, "", B]})
    found.save_to_disk(tmp_path / "flat")
    datasets.DatasetDict({"train": found, "test": found.select([2])}).save_to_disk(tmp_path / "two")
    assert tokens(prepare(tmp_path / "flat")) == [ids_of(A, B)]
    assert tokens(prepare(f"hf:{tmp_path / 'two'}")) == [ids_of(A, B)]
    assert prepare(tmp_path / "two").hints == ()  # its validation data are named
    (hint,) = prepare(tmp_path / "two", split="validation", eval_fraction=0.5).hints
    assert "'test' is not. To validate on one, name it: --eval-data hf:" in hint
    assert hint.endswith(f"{tmp_path / 'two'}::test")
    assert prepare(tmp_path / "flat", split="validation", eval_fraction=0.5).hints == ()
    assert tokens(prepare(f"hf:{tmp_path / 'two'}::test")) == [ids_of(B)]
    with pytest.raises(BadInputError, match=r"no split 'dev', but 'train', 'test'"):
        prepare(f"hf:{tmp_path / 'two'}::dev")
    with pytest.raises(BadInputError, match=r"no column 'body', but 'text'"):
        prepare(tmp_path / "flat", text_field="body")
    (tmp_path / "lines").mkdir()
    write_lines(tmp_path / "lines" / "train.jsonl", {"text": A}, {"text": C})
    assert tokens(prepare(f"hf:{tmp_path / 'lines'}")) == [ids_of(A, C)]
    with pytest.raises(BadInputError, match=r"cannot be opened"):
        prepare(f"hf:{tmp_path / 'lines'}:other:nosplit")
    with pytest.raises(BadInputError, match=r"expected hf:NAME"):
        prepare("hf:a:b:c:d")
