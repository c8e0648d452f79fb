"""`outpace probe`, from the command line to machine.json."""

import json

import pytest

from outpace.catalog.references import references
from outpace.cli.main import main
from outpace.cli.probe import SECTIONS, _parse_sections, _parser
from outpace.records.machine import Machine


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["matmull"], "no section 'matmull'. Did you mean 'matmul'"),
        (["memory", "--out", "nowhere/machine.json"], "there is no folder"),
        (["matmul", "--model", "gpt3-176b"], "no preset, directory or file"),
        (["memory", "--device", "cuda"], "no CUDA device is visible"),
        (["memory", "--budget", "0"], "not at least 0.1"),
        (["storage", "--checkpoint-dir", "nowhere/at/all"], "nowhere/at/all"),
    ],
)
def test_bad_input_is_refused_with_what_is_allowed(arguments, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["probe", "--quick", *arguments]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.json"))


OWN = """
import torch
from torch import nn

class Waves(torch.utils.data.Dataset):
    def __len__(self):
        return 777

    def __getitem__(self, index):
        return {"x": torch.full((4,), float(index))}

def build():
    return nn.Linear(4, 4), lambda module, batch: module(batch["x"]).sum(), Waves()
"""


def test_the_data_set_of_ones_own_model_is_what_is_loaded(tmp_path, capsys):
    own, out = tmp_path / "own.py", tmp_path / "machine.json"
    own.write_text(OWN)
    loader = ["probe", "loader", "--quick", "--budget", "1", "--model", f"{own}:build"]
    assert main([*loader, "--out", str(out)]) == 0
    assert "timed on your own data set, 777 samples of Waves" in capsys.readouterr().out
    figures = Machine.load(out).probed.figures
    # Neither tokens nor text: how many a sample has is not known.
    assert {(f.key.kind, f.key.what) for f in figures} == {("loader", "samples"),
                                                           ("loader", "start")}  # fmt: skip
    assert main([*loader, "--data", str(tmp_path)]) == 2
    assert "own.py:build comes with its own data set" in capsys.readouterr().err
    assert main(["probe", "matmul", "--quick", "--model", f"{own}:build"]) == 2
    assert "outpace probe loader" in capsys.readouterr().err


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Sections that need no other process, kept as a record."""
    out = tmp_path_factory.mktemp("probe") / "machine.json"
    sections = ["matmul", "memory", "storage", "loader"]
    assert main(["probe", *sections, "--quick", "--budget", "8", "--model", "outpace-tiny",
                 "--out", str(out)]) == 0  # fmt: skip
    return out


@pytest.mark.slow
def test_the_record_has_every_sample_and_says_whence_each_figure_is(kept):
    probed = Machine.load(kept).probed
    assert probed.sections == ("matmul", "memory", "storage", "loader")
    assert {"matmul", "memory", "storage", "loader", "tokenise"} <= {
        figure.key.kind for figure in probed.figures
    }
    for figure in probed.figures:
        assert figure.origin == "measured"
        assert figure.rounds
        assert all(sample > 0 for samples in figure.rounds for sample in samples)
        assert (figure.value is None) == (figure.unstable is not None)
    keys = [figure.key for figure in probed.figures]
    assert len(set(keys)) == len(keys)
    assert probed.versions["torch"]
    assert probed.date


@pytest.mark.slow
def test_it_names_no_path_of_the_machine(kept, tmp_path):
    text = kept.read_text()
    assert str(kept.parent) not in text
    assert str(tmp_path.parent) not in text
    assert "…/machine.json" in text


@pytest.mark.slow
def test_what_is_shown_fits_a_terminal_and_says_where_it_is_kept(kept, capsys):
    from outpace.reporting.terminal.probe import show_machine

    show_machine(Machine.load(kept), kept, width=100)
    shown = capsys.readouterr().out
    assert "Matmuls" in shown
    assert "Storage" in shown
    assert "a repeat" in shown
    *lines, where = shown.splitlines()
    assert max(map(len, lines)) <= 100
    assert where == f"saved in {kept}"


@pytest.mark.slow
@pytest.mark.gloo
def test_ranks_of_a_launcher_measure_together(on_ranks, tmp_path):
    out = tmp_path / "machine.json"
    on_ranks(2, "outpace", "probe", "memory", "allreduce", "--quick", "--budget", "6",
             "--out", str(out), "--json")  # fmt: skip
    probed = Machine.load(out).probed
    assert (probed.world_size, probed.hosts) == (2, 1)
    (fit,) = [fit for fit in probed.fits if fit.axis == "all"]
    assert (fit.collective, fit.ranks, fit.backend) == ("all-reduce", 2, "gloo")
    assert any("4 nodes" in note for note in probed.notes)
    # Rank 0's own, in turns with what all measure.
    copies = [f for f in probed.figures if (f.key.kind, f.key.what) == ("memory", "copy")]
    assert copies and all(len(figure.rounds) >= 5 for figure in copies)


@pytest.mark.gloo
@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.slow
def test_steps_of_one_rank_and_of_all_are_what_the_planner_goes_by(nproc, tmp_path, capsys):
    out = tmp_path / "machine.json"
    assert main(["probe", "matmul", "memory", "steps", "--nproc", str(nproc), "--quick",
                 "--budget", "3", "--out", str(out)]) == 0  # fmt: skip
    assert "Steps of small training runs" in capsys.readouterr().out
    figures = [f for f in Machine.load(out).probed.figures if f.key.kind == "step"]
    for ranks in {1, nproc}:
        names = [f.key.of["reference"] for f in figures if f.key.has(ranks=ranks)]
        assert names == [*references(ranks, "cpu", quick=True)]
    assert all(min(f.samples) > 0 and f.unit == "s" for f in figures)
    assert main(["plan", "--model", "gpt2", "--machine", str(out), "--devices-per-node",
                 str(nproc), "--seq-len", "64", "--global-batch", "4"]) == 0  # fmt: skip
    assert "rates are fitted to" in capsys.readouterr().out.replace("\n", " ")


def test_help_names_all_sections(capsys):
    assert main(["probe", "--help"]) == 0
    shown = capsys.readouterr().out
    assert all(section in shown for section in SECTIONS)


def test_without_a_section_all_are_measured():
    assert _parse_sections(_parser().read([]).section) == _parse_sections(["all"])
    assert {*_parse_sections([]), "allreduce"} == {*SECTIONS}


@pytest.mark.usefixtures("small_arrays")
def test_json_is_the_record(capsys):
    assert main(["probe", "memory", "--quick", "--budget", "1", "--json"]) == 0
    assert Machine.parse(json.loads(capsys.readouterr().out), "stdout").probed.quick
