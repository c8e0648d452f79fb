"""`outpace estimate`."""

import json

import pytest

from outpace.cli.main import main

# Of torch itself, where its sharded optimizer is imported.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
    pytest.mark.usefixtures("planned_once"),
]
TINY = ("--model=outpace-tiny", "--machine=2x-titan-rtx", "--seq-len=64", "--global-batch=16")


def said(capsys, *words):
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys, *words):
    assert main([*words]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "Traceback" not in captured.err
    assert captured.err.startswith("outpace: ") and captured.err.count("\n") == 1
    return captured.err


@pytest.fixture
def plan_file(tmp_path):
    def write(**values):
        given = {"strategy": "ddp", "dp_replicate": 2, "micro_batch": 2, **values}
        file = tmp_path / "plan.json"
        file.write_text(json.dumps(given))
        return f"--plan={file}"

    return write


def test_a_plan_that_was_written_is_estimated_as_it_was_ranked(capsys, tmp_path):
    words = [*TINY, "--keep=precision=fp32"]
    file = tmp_path / "best.json"
    ranked = said(capsys, "plan", *words)["plans"][0]
    assert main(["plan", *words, f"--out={file}"]) == 0
    capsys.readouterr()
    found = said(capsys, "estimate", *TINY, f"--plan={file}")
    assert found["plan"] == ranked["plan"] and found["identity"] == ranked["identity"]
    for name in ("step_time_s", "tokens_per_s", "peak_memory_bytes", "parts_s"):
        assert found["estimate"][name] == ranked["estimate"][name]


def test_a_plan_is_estimated_for_the_length_and_batch_that_it_was_made_for(capsys, tmp_path):
    file = tmp_path / "best.json"
    words = [*TINY, "--seq-len=96", "--global-batch=24"]
    assert main(["plan", *words, f"--out={file}"]) == 0
    capsys.readouterr()
    at = [word for word in TINY if not word.startswith(("--seq-len", "--global-batch"))]
    own = said(capsys, "estimate", *at, f"--plan={file}")
    assert own["estimate"] == said(capsys, "estimate", *words, f"--plan={file}")["estimate"]
    other = said(capsys, "estimate", *at, f"--plan={file}", "--seq-len=48")
    assert other["estimate"]["peak_memory_bytes"] < own["estimate"]["peak_memory_bytes"]


def test_a_person_sees_whether_it_fits(capsys, monkeypatch, plan_file):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["estimate", *TINY, plan_file()]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert "DDP 2, micro-batch 2" in text and "  fits: " in text and "(estimate)" in text
    large = ["--model=llama-3-8b", "--machine=2x-titan-rtx", "--seq-len=64", "--global-batch=16"]
    assert main(["estimate", *large, plan_file()]) == 0
    assert "does NOT fit: " in capsys.readouterr().out


def test_without_a_batch_it_is_the_one_that_help_names(capsys, plan_file):
    """4 for each device, as outpace plan takes; more where the plan divides by another number."""
    words = [word for word in TINY if "batch" not in word]
    found = said(capsys, "estimate", *words, plan_file(micro_batch=2))
    assert found["identity"].startswith("global batch 8 = micro-batch 2 × accumulation 2")
    found = said(capsys, "estimate", *words, plan_file(micro_batch=3))
    assert found["identity"].startswith("global batch 12 = micro-batch 3 × accumulation 2")
    assert main(["estimate", "--help"]) == 0
    assert "(default: the plan's, else 4 per device)" in " ".join(capsys.readouterr().out.split())


def test_a_trace_replaces_the_formula(capsys, plan_file):
    file = plan_file(precision="fp32")
    formula = said(capsys, "estimate", *TINY, file)["estimate"]
    traced = said(capsys, "estimate", *TINY, file, "--depth=trace")["estimate"]
    assert traced["depth"] == "trace" and traced["step_time_s"] == formula["step_time_s"]
    assert 0.7 < traced["peak_memory_bytes"] / formula["peak_memory_bytes"] < 1.4
    assert traced["memory"] != formula["memory"]


def test_plan_estimate_and_memory_count_against_one_capacity(capsys, plan_file):
    words = ["--model=outpace-tiny", "--machine=rtx-4090", "--seq-len=32", "--global-batch=2",
             plan_file(strategy="single", dp_replicate=1, precision="bf16")]  # fmt: skip
    formula = said(capsys, "estimate", *words)["estimate"]
    traced = said(capsys, "estimate", *words, "--depth=trace")["estimate"]
    memory = said(capsys, "memory", *words)
    assert memory["device_memory_bytes"] == traced["memory_bytes"] == formula["memory_bytes"]
    needed = memory["reserved_memory_bytes"] + memory["library_memory_bytes"]
    assert needed == traced["peak_memory_bytes"]


def test_a_module_of_your_own_is_traced_too(capsys, plan_file, tmp_path):
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "def build():\n"
        "    data = torch.utils.data.TensorDataset(torch.randn(8, 64), torch.randn(8, 64))\n"
        "    layers = [torch.nn.Linear(64, 64) for _ in range(2)]\n"
        "    loss = lambda module, batch: (module(batch[0]) - batch[1]).square().mean()\n"
        "    return torch.nn.Sequential(*layers), loss, data\n"
    )
    words = ["estimate", f"--model={tmp_path}/mine.py:build", "--machine=2x-titan-rtx",
             "--global-batch=8", "--depth=trace"]  # fmt: skip
    traced = said(capsys, *words, plan_file(precision="fp32"))["estimate"]
    assert traced["depth"] == "trace"
    assert traced["memory"]["weights"] == pytest.approx(2 * (64 * 64 + 64) * 4, rel=0.1)
    stages = {"strategy": "gpipe", "dp_replicate": 1, "pp": 2, "pp_microbatches": 2}
    staged = said(capsys, *words, plan_file(precision="fp32", **stages))["estimate"]
    assert staged["depth"] == "trace"
    assert staged["memory"]["weights"] == pytest.approx((64 * 64 + 64) * 4, rel=0.1)


@pytest.mark.parametrize(
    ("values", "words", "sentence"),
    [
        ({"dp_replicate": 4}, [], "is for 4 devices, but 1 × 2 = 2 are requested"),
        ({"micro_batch": 3}, [], "is not a multiple of"),
        ({"strategy": "zero3"}, [], "strategy zero3 splits dp_shard"),
        ({"tp": 0}, [], "tp"),
        ({"micro_batch": 2**64}, [], "should be less than or equal to 4294967296"),
        ({"colour": "red"}, [], "colour"),
        ({"strategy": "3d", "dp_replicate": 1, "pp": 2, "pp_microbatches": 1}, [], "1f1b"),
        ({"checkpoint_layers": ["full"]}, [], "checkpoint_layers has 1 modes"),
        ({"strategy": "3d", "dp_replicate": 1, "dp_shard": 2, "zero": 1}, ["--depth=trace"],
         "--depth trace runs the model as outpace trains it, but zero 1"),
        ({}, ["--model=mixtral-8x7b", "--depth=trace"], "runs the model as outpace trains it"),
        ({}, ["--machine=foo"], "machine 'foo' is not in the catalog"),
        ({}, ["--plan=nowhere.json"], "nowhere.json"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_one_sentence(values, words, sentence, capsys, plan_file):
    assert sentence in refused(capsys, "estimate", *TINY, plan_file(**values), *words)
