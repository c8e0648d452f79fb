"""What a probe says beside its figures, and when it takes a section's figures back."""

from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch

from outpace.jobs.defaults import DEFAULT_SEQ_LEN
from outpace.jobs.probe import job
from outpace.jobs.probe.collectives import overlap_notes
from outpace.jobs.probe.job import _withdraw_if_disturbed
from outpace.jobs.probe.notes import find_misconfiguration, finding_notes, peak_notes
from outpace.jobs.probe.request import ProbeRequest
from outpace.probing.timing.interference import CoreSeconds
from outpace.probing.timing.section import ProbeSection
from outpace.probing.utilisation.gpu_throttling import GpuObservation
from outpace.records.errors import BadInputError
from outpace.records.figure import Figure, Key
from outpace.records.finding import Examination, Finding
from outpace.records.machine import Machine
from outpace.records.probe_results import ProbeRecord
from outpace.records.settings import TrainSettings

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
QUIET, TAKEN = [[CoreSeconds(10.0, 10.0, 0.0, 9.9, 2)]], [[CoreSeconds(10.0, 19.0, 0.0, 10.0, 2)]]
HOT = [GpuObservation("GPU 0", frozenset({"power brake"}))]
SHARED = [GpuObservation("GPU 0", others=1)]


def figure(what, value, kind="matmul", unit="FLOP/s", **of):
    return Figure(
        key=Key(kind=kind, what=what, of=of), unit=unit, value=value, origin="measured",
        low=1.0, high=2.0, rounds=((1.5,),), unstable=None if value else "it drifted",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "device", "hosts", "seen", "why"),
    [
        ("matmul", GPU, QUIET, [], None),
        ("matmul", GPU, QUIET, HOT, "power brake"),
        (
            "collectives",
            GPU,
            QUIET,
            [GpuObservation("GPU 0 of rank 0"), *SHARED],
            "another process",
        ),
        ("memory", GPU, TAKEN, [], None),  # the processor is not what is measured
        ("loader", GPU, TAKEN, HOT, "of the processor time"),
        ("storage", GPU, QUIET, HOT, None),
        ("matmul", CPU, TAKEN, [], "of the processor time"),
    ],
)
def test_a_section_is_withdrawn_for_what_disturbed_what_it_measured(name, device, hosts, seen, why):
    section = ProbeSection(
        (figure("best", 1e12, dtype="bf16"),), notes=("a note",), said=("1 TFLOP/s",)
    )
    found = _withdraw_if_disturbed(name, section, device, hosts, seen)
    if why is None:
        assert found == section
    else:
        assert found.figures[0].value is None and why in found.figures[0].unstable
        assert (found.notes, found.said) == (("a note",), ())  # no word of what is withdrawn


@pytest.mark.parametrize(
    ("given", "tokens"),
    [({}, None), ({"seq_len": 512, "micro_batch": 3}, 1536), ({"seq_len": 512}, 512),
     ({"micro_batch": 2}, 2 * DEFAULT_SEQ_LEN)],
)  # fmt: skip
def test_the_tokens_of_a_models_matmuls_are_those_that_are_given(given, tokens):
    settings = TrainSettings.parse({"model": "gpt2", **given}, "a test")
    assert ProbeRequest(("matmul",), True, settings, "outpace probe").tokens() == tokens


def test_more_tokens_than_a_model_has_positions_are_refused_before_anything_is_measured():
    settings = TrainSettings.parse({"model": "gpt2", "seq_len": 4096}, "a test")
    with pytest.raises(BadInputError, match="1024 positions"):
        ProbeRequest(("matmul",), True, settings, "outpace probe").check()


def hides(value, *times):
    names = ("computing", "all-reduce", "both")
    of = [figure(*one, kind="overlap", unit="s") for one in zip(names, times, strict=True)]
    return overlap_notes([*of, figure("hidden share", value, kind="overlap", unit="ratio")])


def test_times_are_said_where_they_are_figures():
    assert hides(0.5, 1e-3, 2e-3, 2.5e-3) == [
        "overlap: 1 ms of computation and 2 ms of all-reduce take 2.5 ms together: 50% of the "
        "shorter is hidden by the longer"
    ]
    assert hides(0.5, 1e-3, None, 2.5e-3) == ["overlap: 50% of the shorter is hidden by the longer"]
    (unknown,) = hides(None, 1e-3, 2e-3, None)
    assert unknown == "overlap: the hidden share was not stable enough: it drifted"


def finding(severity, what):
    return Finding(check=what, what=what, seen="x=1", remedy="x=0", severity=severity)


def test_grave_findings_are_said_with_their_remedy_and_the_doctors_name():
    findings = (finding("severe", "P2P is off"), finding("low", "few files"))
    notes = finding_notes(Examination(findings=findings, checked=(), not_checked={}))
    assert notes[0] == "severe: P2P is off (x=1). Do: x=0"
    assert len(notes) == 2 and "outpace doctor" in notes[1]
    assert finding_notes(Examination(findings=findings[1:], checked=(), not_checked={})) == []


def test_this_host_is_examined_under_the_given_settings():
    notes = find_misconfiguration({"OMP_NUM_THREADS": "4000"})
    assert any("OMP_NUM_THREADS=4000" in note for note in notes)


def test_the_best_matmul_stands_beside_the_published_peak():
    peak = Figure(key=Key(kind="matmul", what="peak", of={"dtype": "bf16"}), unit="FLOP/s",
                  value=1e15, origin="catalog", source="a datasheet")  # fmt: skip
    best = [figure("best", 7.5e14, dtype="bf16"), figure("best", 5e13, dtype="fp32")]
    (note,) = peak_notes([*best, peak])
    assert "bf16 matmul (750.00 TFLOP/s) is 75% of the catalog's peak (1.00 PFLOP/s)" in note
    assert not list(peak_notes([figure("best", None, dtype="bf16"), peak]))


def test_what_is_published_is_taken_from_one_process_only(monkeypatch, tmp_path):
    """The process that measures ranks writes it into its record as well."""
    published = Figure(
        key=Key(kind="matmul", what="peak", of={"dtype": "bf16"}), unit="FLOP/s", value=2e12,
        origin="catalog", source="a datasheet",
    )  # fmt: skip
    measured = figure("best", 1e12, dtype="bf16")

    def start(nproc, command, on_stop):
        probed = ProbeRecord(
            date="", versions={}, command="", sections=("steps",), quick=True, took_s=1.0,
            figures=(published, measured),
        )  # fmt: skip
        machine = Machine(host_cores=2, host_memory_bytes=1, cpu="", probed=probed)
        machine.save(Path(command[command.index("--out") + 1]))

    monkeypatch.setattr(job.local, "start", start)
    wishes = ProbeRequest(("steps",), True, TrainSettings(), "outpace probe steps", None)
    here = job._ProcessState(wishes, torch.device("cpu"), MagicMock(), None)
    turns = job._probe_in_new_ranks(["steps"], here, 2)
    with pytest.raises(StopIteration) as end:
        while True:
            next(turns)
    assert end.value.value.figures == (measured,)
