"""What an experiment says when it is interrupted, and what it leaves behind then."""

import pytest

from outpace.cli import tune
from outpace.cli.experiments import BEGUN, format_interruption

WORDS = ["--model", "outpace-tiny", "--seq-len", "32", "--global-batch", "4", "--nproc", "1",
         "--device", "cpu"]  # fmt: skip


@pytest.mark.parametrize("name", BEGUN)
def test_what_is_kept_can_be_resumed(tmp_path, name):
    assert "nothing was saved" in format_interruption(tmp_path / "out", "tune", "--model", "gpt2")
    (tmp_path / name).write_text("{}")
    assert "--resume" in format_interruption(tmp_path, "tune", "--model", "gpt2")


def test_a_tuning_that_had_not_begun_is_not_in_its_own_way(
    tmp_path, monkeypatch, capsys, corpus, token_cache
):
    """It measures the machine first, for seconds; the same command can be given again."""

    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("outpace.jobs.planning.proposer.rates_to_begin_with", interrupt)
    out = tmp_path / "out"
    words = [*WORDS, "--data", str(corpus), "--cache-dir", str(token_cache), "--out", str(out)]
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            tune.run(words, {})
        assert "nothing was saved" in capsys.readouterr().err
    assert not out.exists()
