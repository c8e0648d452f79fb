"""`outpace memory`, and `outpace train --memory`."""

import json
import shlex
import shutil
import subprocess
import sys

import pytest

from outpace.catalog.models import preset
from outpace.cli.main import main
from outpace.planner.model.flops import parameter_count
from outpace.records.plan import Plan, PlanFile
from outpace.records.units import show_bytes
from outpace.reporting.render.screenshot import BROWSERS

# Of torch itself, where its sharded optimizer is imported.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
FORMULA = ("memory", "--model=phi-2", "--machine=hgx-h100")
TINY = ("memory", "--model=outpace-tiny", "--seq-len=32")


def test_the_anatomy_adds_up_to_the_peak_and_is_drawn(capsys, tmp_path):
    words = [*TINY, "--precision=bf16", "--json", f"--plot={tmp_path / 'm.html'}"]
    assert main(words) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["peak_memory_bytes"] == sum(said["anatomy_bytes"].values()) > 0
    assert said["anatomy_bytes"]["weights"] > 0
    drawn = (tmp_path / "m.html").read_text()
    peak = show_bytes(said["peak_memory_bytes"])
    assert f"Tensors take {peak} at the peak" in drawn
    assert "of outpace-tiny" in drawn and "sequences of 32 tokens; single, bf16" in drawn
    assert all(f'"name":"{kind}"' in drawn for kind in ("weights", "optimizer state"))


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, BROWSERS)), reason="kaleido draws by Chromium")
@pytest.mark.parametrize(
    ("suffix", "begin"), [(".png", b"\x89PNG"), (".svg", b"<svg"), (".pdf", b"%PDF")]
)
def test_memory_is_drawn_as_a_picture(tmp_path, suffix, begin):
    path = tmp_path / f"m{suffix}"
    words = ["--machine=rtx-4090", f"--plot={path}"]
    done = subprocess.run(
        [sys.executable, "-m", "outpace", *TINY, *words],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert path.read_bytes().startswith(begin)


def test_a_chart_that_cannot_be_written_is_refused_before_the_trace(capsys, tmp_path, monkeypatch):
    asked = ["memory", "--model=no/such-model"]  # which would be refused by the trace
    assert main([*asked, f"--plot={tmp_path / 'm.jpeg'}"]) == 2
    assert "Use .html, which any browser shows" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "kaleido", None)
    assert main([*asked, f"--plot={tmp_path / 'm.svg'}"]) == 2
    assert "pip install 'outpace[plot]'" in capsys.readouterr().err


def test_what_is_offloaded_is_shown_and_in_no_sum(capsys, tmp_path):
    words = ["--seq-len=256", "--offload-optimizer=disk", f"--plot={tmp_path / 'm.html'}"]
    assert main([*TINY, *words]) == 0
    shown = capsys.readouterr().out
    said = " ".join(shown.split())
    assert "offloaded" in said and "not included in the sum" in said
    assert shown.replace("\n", "").endswith(f"plot: {tmp_path / 'm.html'}")
    assert (tmp_path / "m.html").exists()
    assert main([*TINY, *words, "--json"]) == 0
    anatomy = json.loads(capsys.readouterr().out)["traced"]["peak"]["by_kind"]
    assert anatomy["offloaded"] > 0


def test_a_name_on_the_hub_is_taken_for_its_dimensions(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = ["memory", "--model=openai-community/gpt2", "--seq-len=16", "--precision=fp32"]
    assert main([*asked, "--json"]) == 0
    weights = json.loads(capsys.readouterr().out)["anatomy_bytes"]["weights"]
    assert weights == 4 * parameter_count(preset("gpt2"))
    (tmp_path / "openai-community" / "gpt2").mkdir(parents=True)  # a folder comes first
    assert main(asked) == 2


OWN = """
import torch
from torch import nn

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 3
    def __getitem__(self, index):
        return torch.ones(16), torch.tensor(1)

def entropy(module, batch):
    return nn.functional.cross_entropy(module(batch[0]), batch[1])

def build():
    module = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
    return {"module": module, "loss": entropy, "dataset": Data()}
"""


def test_a_module_of_your_own_is_traced_on_samples_of_its_data(capsys, tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    words = ["memory", f"--model={tmp_path}/mine.py:build", "--precision=fp32"]
    assert main([*words, "--nproc=2", "--strategy=zero2", "--global-batch=16", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["seq_len"] is None and said["world_size"] == 2
    assert said["peak_memory_bytes"] == sum(said["anatomy_bytes"].values())
    numbers = 16 * 64 + 64 + 64 * 4 + 4
    assert said["anatomy_bytes"]["weights"] == pytest.approx(numbers * 4 / 2, rel=0.1)


@pytest.mark.gloo
@pytest.mark.slow
def test_the_rank_that_is_asked_for_is_measured(capfd):
    words = ["--measure", "--nproc=2", "--strategy=ps", "--json", "--rank=1"]
    assert main([*TINY, *words]) == 0
    said = json.loads(capfd.readouterr().out)
    assert said["rank"] == said["measured"]["rank"] == 1


@pytest.mark.slow
def test_seventy_billion_parameters_on_a_node(capsys, tmp_path):
    words = ["--model=llama-3-70b", "--machine=hgx-h100", "--nodes=8", "--strategy=zero3",
             "--seq-len=4096", "--checkpointing=full"]  # fmt: skip
    assert main(["memory", *words, "--json", f"--plot={tmp_path / 'm.html'}"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["world_size"] == 64
    assert said["anatomy_bytes"]["weights"] == pytest.approx(70.55e9 * 4 / 64, rel=0.01)
    assert said["peak_memory_bytes"] == sum(said["anatomy_bytes"].values())
    assert '"name":"weights"' in (tmp_path / "m.html").read_text()


def test_a_model_that_is_only_planned_for_is_answered_by_the_formula(capsys):
    words = ["--model=mixtral-8x7b", "--machine=8xh100", "--strategy=zero3"]
    assert main(["memory", *words, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["traced"]["source"] == "estimated" and said["world_size"] == 8
    assert said["peak_memory_bytes"] == sum(said["anatomy_bytes"].values()) > 46e9 * 4 / 8
    assert said["peak_at"] is said["rank"] is None


def test_the_formula_draws_its_peak_and_names_no_rank(capsys, tmp_path):
    page = tmp_path / "m.html"
    assert main([*FORMULA, "--strategy=1f1b", f"--plot={page}"]) == 0
    assert "The fullest rank of 8" in capsys.readouterr().out
    drawn = page.read_text()
    assert '"name":"weights"' in drawn and "estimated" in drawn and "the fullest of 8" in drawn
    assert "Memory over a step" not in drawn
    assert main([*FORMULA, "--rank=7"]) == 2
    assert "only covers the fullest rank. Leave --rank out." in capsys.readouterr().err


def test_what_does_not_fit_is_followed_by_a_command_that_is_answered(capsys):
    words = ["--model=phi-2", "--machine=rtx-4090", "--strategy=single", "--json"]
    assert main(["memory", *words]) == 0
    command = json.loads(capsys.readouterr().out)["next_command"]
    assert main(shlex.split(command)[1:]) == 0
    assert "phi-2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--machine=foo"], "machine 'foo' is not in the catalog. It has"),
        (["--rank=3"], "--rank 3: the plan has ranks 0 to 0."),
        (
            ["--nproc=3", "--tp=2"],
            "tp 2: the number of processes must be 2, but there are 3. Start 2 (--nproc 2)",
        ),
        (["--measure", "--machine=hgx-h100"], "--measure runs on this host"),
        (["--measure", "--device=cuda"], "to measure on a GPU, use outpace train --memory"),
        (["--nodes=2"], "--nodes 2 needs a machine. Name it with --machine"),
        (["--nproc=2", "--machine=hgx-h100"], "Set the number of machines with --nodes"),
        (["--machine=RTX 4090", "--offload-activations=disk"], "is for training on the CPU"),
        (["--machine=dgx-a100", "--precision=fp8"], "which A100 SXM 80 GB does not have"),
    ],
)
def test_what_cannot_be_is_a_sentence(words, sentence, capsys):
    assert main([*TINY, *words]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(("--nproc=1",), marks=pytest.mark.slow),
        pytest.param(("--nproc=2", "--strategy=zero3"), marks=pytest.mark.gloo),
    ],
)
def test_a_run_shows_its_memory_traced_and_measured(strategy, train_flags, tmp_path, capfd):
    out = tmp_path / "run"
    assert main(["train", *train_flags, "--memory", *strategy, f"--out={out}"]) == 0
    use = json.loads((out / "memory.json").read_text())
    # A trainer has a scalar or two that a trace has not.
    measured, traced = (use[name]["peak"]["by_kind"] for name in ("measured", "traced"))
    assert measured == pytest.approx(traced, abs=64)
    assert use["measured"]["peak"]["step"] == 3
    assert use["measured"]["resident_bytes"] > 0
    said = capfd.readouterr().err
    assert said.count("memory at the peak") == 2
    assert "The trace is off by" in said


def test_the_command_that_plans_keeps_the_precision_and_the_optimizer():
    from outpace.cli import memory
    from outpace.jobs.memory.query import question
    from outpace.jobs.planning.model_outline import find_outline

    def command(*chosen):
        words = ["--model=gpt2", "--machine=rtx-4090", "--seq-len=128", *chosen]
        arguments = memory._parser().read(words)
        settings, origins, node = memory._read_options(arguments)
        asked = question(settings, origins, node, 1, find_outline)
        return memory._plan_command(asked, arguments, origins)

    kept = command("--precision=bf16-pure", "--optimizer=adamw-4bit")
    assert kept.endswith(" --precision bf16-pure --keep optimizer=adamw-4bit --trained")
    assert command().endswith("--seq-len 128 --trained")


@pytest.mark.slow
def test_what_does_not_fit_names_the_command_that_finds_what_does(capsys):
    words = ["--model=llama-3.2-1b", "--machine=rtx-4090", "--seq-len=512", "--micro-batch=64"]
    assert main(["memory", *words]) == 0
    said = " ".join(capsys.readouterr().out.split())
    command = "outpace plan --model llama-3.2-1b --machine rtx-4090 --seq-len 512 --trained"
    assert "too much" in said and f"To find what fits, run {command}" in said
    assert main([*command.split()[1:], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plans"][0]["estimate"]["memory_bytes"]
    assert main(["memory", *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["next_command"] == command
    assert main(["memory", *words[:-1], "--micro-batch=1", "--json"]) == 0
    fitting = json.loads(capsys.readouterr().out)
    assert fitting["fits"] and fitting["next_command"] is None
    huge = ["--machine=rtx-4090", "--micro-batch=200000", "--lora-rank=8"]
    assert main([*TINY, *huge]) == 0
    adapters = " ".join(capsys.readouterr().out.split())
    assert "outpace plan" in adapters and "--lora-rank 8 --base fp32" in adapters
    assert "--lora-targets all --trained" in adapters
    assert main([*TINY, "--precision=fp32"]) == 0
    assert "what fits" not in capsys.readouterr().out


def test_what_was_not_asked_for_is_named_before_the_figures(capsys):
    assert main(["memory", "--model=outpace-tiny", "--micro-batch=2"]) == 0
    head = " ".join(capsys.readouterr().out.split()).split("memory at the peak")[0]
    assert "By default: --seq-len 256 (outpace plan uses at most 2048), --global-batch 2" in head
    assert "--precision" in head and "--micro-batch" not in head
    assert main(["plan", "--model=outpace-tiny", "--machine=rtx-4090", "--global-batch=8"]) == 0
    head = " ".join(capsys.readouterr().out.split()).split("step")[0]
    assert "By default: --seq-len 256 (outpace train and memory use 256), --precision" in head
    assert "--global-batch" not in head


def test_a_strategy_that_splits_nothing_is_said_with_what_would(capsys):
    words = ["memory", "--model=outpace-tiny", "--seq-len=16", "--strategy=gpipe"]
    assert main([*words, "--json"]) == 0
    (hint,) = json.loads(capsys.readouterr().out)["hints"]
    assert hint.startswith("--strategy gpipe on one process splits nothing: these are")
    assert hint.endswith("Use several with --nproc N.")
    assert main([*words, "--nproc=2"]) == 0
    assert "splits nothing" not in " ".join(capsys.readouterr().out.split())
    assert main([*words[:-1], "--strategy=zero3", "--machine=rtx-4090"]) == 0
    assert "several with --nodes N, or another" in " ".join(capsys.readouterr().out.split())


def test_a_plan_file_is_what_is_traced(capsys, tmp_path):
    file = tmp_path / "plan.json"
    plan = Plan(strategy="ddp", dp_replicate=2, micro_batch=2, checkpointing="full",
                precision="bf16", optimizer="adamw-fused")  # fmt: skip
    PlanFile.from_plan(plan, 16, 8).save(file)
    words = ["memory", "--model=outpace-tiny", f"--plan={file}"]
    assert main([*words, "--machine=2x-rtx-4090", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["seq_len"], said["global_batch"], said["world_size"]) == (16, 8, 2)
    assert said["plan"] == plan.model_dump(mode="json")
    for other, sentence in (
        (["--machine=RTX 4090"], "is for 2 devices, but 1 × 1 = 1 are requested"),
        (["--plan=auto"], "--plan auto: `outpace memory` does not choose plans"),
        (["--plan=nosuch.json"], "nosuch.json"),
        (["--micro-batch=4"], "--micro-batch 4, but --plan"),
    ):
        assert main([*words, *other]) == 2
        assert sentence in capsys.readouterr().err
