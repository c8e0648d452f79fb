"""outpace from a Python program."""

import doctest
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from html import escape
from pathlib import Path

import pytest
import torch
from torch import nn

import outpace
from outpace import api
from outpace.records.units import show_bytes, show_seconds

TINY = {
    "seq_len": 32,
    "global_batch": 8,
    "steps": 3,
    "eval_batches": 1,
    "sample_tokens": 0,
    "precision": "fp32",
    "device": "cpu",
    "progress": False,
}


class Steps(outpace.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.stages: list[str] = []

    def on_stage(self, message: str) -> None:
        self.stages.append(message)

    def on_step(self, record: outpace.StepRecord) -> None:
        self.losses.append(record.loss)


def test_train_returns_a_measurement_and_tells_callbacks(
    corpus: Path, token_cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = Steps()
    result = outpace.train(
        model="outpace-tiny",
        data=corpus,
        cache_dir=token_cache,
        out=tmp_path / "run",
        callbacks=[steps],
        **TINY,
    )
    assert isinstance(result, outpace.Measurement)
    assert len(steps.losses) == 3
    for which in ("initial", "final"):
        assert f"measuring the {which} loss on 8 samples" in steps.stages
    assert result.final_loss == steps.losses[-1]
    assert capsys.readouterr() == ("", "")
    origins = json.loads(Path(result.run, "run.json").read_text())["origins"]
    assert origins["steps"] == "python"
    assert origins["lr"] == "default"

    evaluation = outpace.evaluate(result.run, [corpus], batches=1, device="cpu")
    assert evaluation.loss > 0
    text = outpace.generate(result.run, "def ", max_new_tokens=4, device="cpu")
    assert text.startswith("def ")


def test_a_live_module_is_trained(corpus: Path, token_cache: Path, tmp_path: Path) -> None:
    class Bigrams(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(512, 512)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.table(tokens)
            return logits

    model = Bigrams()
    before = model.table.weight.detach().clone()
    outpace.train(model=model, data=[corpus], cache_dir=token_cache, out=tmp_path / "run", **TINY)
    assert not torch.equal(before, model.table.weight)


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"stepps": 3}, "no keyword 'stepps'. Did you mean 'steps'"),
        ({"steps": "many"}, "outpace.train: steps: 'many' is not a whole number"),
        ({"schedule": "cosin"}, "Did you mean 'cosine'"),
        ({"steps": 3, "epochs": 2}, "give one of steps, tokens, epochs"),
        ({"steps": -1}, "python: steps -1"),
        ({"resume": True}, "Give its directory"),
        ({"nproc": 2, "model": nn.Linear(1, 1)}, "cannot use a module of this one"),
        ({"nproc": 2, "callbacks": [Steps()]}, "cannot call callbacks of this one"),
    ],
)
def test_mistakes_are_sentences(keywords: dict[str, object], said: str) -> None:
    with pytest.raises(outpace.BadInputError) as caught:
        outpace.train(**keywords)  # type: ignore[arg-type]
    assert said in str(caught.value)


@pytest.mark.gloo
def test_two_processes_from_python(
    corpus: Path, token_cache: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = {**TINY, "nproc": 2, "out": str(tmp_path / "run"), "cache_dir": token_cache}
    result = outpace.train(model="outpace-tiny", data=str(corpus), **settings)
    assert capfd.readouterr() == ("", "")
    assert result.world_size == 2
    assert result.run == str(tmp_path / "run")
    with pytest.raises(outpace.BadInputError, match="already holds a run"):
        outpace.train(model="outpace-tiny", data=str(corpus), **settings)


SCRIPT = """
import multiprocessing, sys
multiprocessing.set_start_method(sys.argv[1])
import outpace
outpace.train("outpace-tiny", sys.argv[2], seq_len=32, global_batch=4, steps=2, workers=1,
              device="cpu", threads=1, sample_tokens=0, comm_timeout_s=8, out=sys.argv[3],
              cache_dir=sys.argv[4])
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_script_without_a_main_guard_is_told_of_it(method, tmp_path):
    (tmp_path / "text.txt").write_text("river stone paper lamp green\n\n" * 400)
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py", method, "text.txt", "run", "cache"], cwd=tmp_path,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "--workers 1: " in done.stderr
    assert f"started by {method!r}, which runs a script again" in done.stderr
    assert 'under `if __name__ == "__main__":`. Use fewer workers' in done.stderr
    assert "bootstrapping" not in done.stderr


@pytest.mark.usefixtures("small_arrays", "short_trials")
def test_the_examples_of_the_functions_are_true(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("corpus.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = doctest.DocTestFinder(exclude_empty=True).find(api, globs={"outpace": outpace})
    shown = {one.name.removeprefix("outpace.api."): one for one in found if one.examples}
    named = [name for name, module in outpace._PUBLIC.items() if module == "outpace.api"]
    assert set(shown) >= {*named, "probe", "report"}
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    said = io.StringIO()
    for name in sorted(shown, key=lambda name: shown[name].lineno or 0):
        runner.run(shown[name], out=said.write, clear_globs=False)
    assert runner.summarize(verbose=False).failed == 0, said.getvalue()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: outpace.plan("gpt2", "rtx-4090", seq_len=-1), "--seq-len: -1 is not at least 1"),
        (lambda: outpace.plan("gpt2", "rtx-4090", trainer="x"), "not one of outpace, torchtitan"),
        (lambda: outpace.plan("gpt2", "rtx-4090", price=2.0), "training on a number of tokens"),
        (lambda: outpace.network("gpt2", "hgx-h100", plan="no.json"), "no.json"),
        (lambda: outpace.network("gpt2", "hgx-h100", node=3), "Did you mean '--nodes'"),
        (lambda: outpace.memory("gpt2", "rtx-4090", seqlen=3), "Did you mean '--seq-len'"),
        (lambda: outpace.estimate("gpt2", {}, "rtx-4090"), "Pass an outpace.Plan"),  # type: ignore[arg-type]
        (lambda: outpace.evaluate("x", task="talk"), "evaluate: task: 'talk' is not one of"),  # type: ignore[arg-type]
        (lambda: outpace.merge("nowhere", "out"), "nowhere: there is no such directory."),
        (lambda: outpace.merge(".", "out", dtype="fp8"), "--dtype: 'fp8' is not one of fp32, bf16"),
        (lambda: outpace.topology(nvlink="9"), "not in the catalog"),
        (outpace.report, "pass a run"),
    ],
)  # fmt: skip
def test_mistakes_in_questions_are_sentences(call: Callable[[], object], said: str) -> None:
    with pytest.raises(outpace.BadInputError, match=re.escape(said)):
        call()


def test_a_plan_is_estimated_for_the_length_and_batch_that_are_given(tmp_path: Path) -> None:
    found = outpace.plan("gpt2", "rtx-4090", seq_len=512, global_batch=24)
    best = found.plans[0]
    again = outpace.estimate("gpt2", best.plan, "rtx-4090", seq_len=512, global_batch=24)
    assert again.estimate.step_time_s == pytest.approx(best.estimate.step_time_s)


def test_a_notebook_shows_the_plans_of_an_answer() -> None:
    found = outpace.plan("gpt2", "rtx-4090", seq_len=512, global_batch=24)
    html = found._repr_html_()
    for one in found.plans:
        estimate = one.estimate
        for shown in (show_seconds(estimate.step_time_s), show_bytes(estimate.peak_memory_bytes)):
            assert f"<td>{shown}</td>" in html
        assert escape(one.title) in html and escape(one.why) in html
    assert html.count("<details open>") == 1 and html.count("<table>") == html.count("</table>")


def test_a_plan_has_the_scale_and_dropout_of_its_adapters() -> None:
    asked = {"lora_rank": 8, "lora_alpha": 32.0, "lora_dropout": 0.1}
    plan = outpace.plan("gpt2", "rtx-4090", seq_len=128, count=1, **asked).plans[0].plan
    assert {name: getattr(plan, name) for name in asked} == asked
