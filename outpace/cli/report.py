"""`outpace report`."""

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.cli.output import output_file, write_output
from outpace.cli.parser import Parser
from outpace.records.base import format_path, read_json
from outpace.records.certificate import Certificate
from outpace.records.comparison import Comparison
from outpace.records.errors import BadInputError, escape_controls
from outpace.records.estimate import Plans
from outpace.records.hang_report import HangReport
from outpace.records.machine import Machine
from outpace.records.run import explain_removed_checkpoint, suggest_runs
from outpace.records.tuning import Tuning

if TYPE_CHECKING:
    from outpace.reporting.render.document import Document

_ABOUT = "Write a run, comparison, tuning, plan, probe or certificate as a page that works offline."
_EPILOG = (
    "PATH is the directory of a run or a comparison, or a file: comparison.json, tuning.json, "
    "machine.json of outpace probe, certificate.json of outpace verify, standstill.json of a "
    "run that hung, or the output of outpace plan --json. Several paths make one page, which "
    "begins with the differences between the runs; a probe among the paths predicts the runs."
)
_FORMATS = ("html", "md", "csv", "png")
_RUN = "run.json"
_IN_FOLDERS = ("comparison.json", "tuning.json", "machine.json", "certificate.json")
# Types of records, by a top-level key that only their files have.
_RECORDS: Mapping[str, type[Any]] = {
    "outcomes": Comparison,
    "trials": Tuning,
    "plans": Plans,
    "verdicts": Certificate,
    "host_cores": Machine,
    "ranks": HangReport,
}


@dataclass(frozen=True)
class _Subject:
    """Subject of a report: a record, or the folder of a run (`record` is None)."""

    path: Path
    record: Any | None


@dataclass(frozen=True)
class _Report:
    """A report on one or several results.

    `documents` are its parts, and `content` is the whole, rendered as a page, text or image. `out`
    is the file to which it was written, or None.
    """

    documents: "Sequence[Document]"
    content: str | bytes
    out: Path | None


def run(argv: list[str], environ: Mapping[str, str]) -> int:
    """Write a report; returns 0. Raises BadInputError if there is nothing to report on."""
    arguments = _parser().read(argv)
    kind = _choose_format(arguments.format, arguments.out)
    kept = kind in ("html", "png") or arguments.json
    made = _make_report(arguments.path, arguments.out, kind, arguments.browser, kept)
    if arguments.json:
        print(json.dumps(_summarise(made.documents, made.out, kind), indent=2), flush=True)
    elif made.out is None:
        assert isinstance(made.content, str)
        sys.stdout.write(made.content)
    else:
        for document in made.documents:
            print(*map(escape_controls, document.verdict), sep="\n")
        print(f"report: {made.out}")
    return 0


def write_report(
    paths: Sequence[Path], out: Path | None = None, kind: str | None = None,
    browser: str | None = None,
) -> Path:  # fmt: skip
    """Write a report and return its file. Raises BadInputError if there is nothing to report on."""
    made = _make_report(paths, out, _choose_format(kind, out), browser, kept=True)
    assert made.out is not None
    return made.out


def _make_report(
    paths: Sequence[Path], out: Path | None, kind: str, browser: str | None, kept: bool
) -> "_Report":
    """Make a report on one or several results, and write it to `out`.

    If `out` is None, the report is written only if `kept` is set: next to the result, or to
    ./report.* if there are several.
    """
    subjects = [_read_subject(path) for path in paths]
    program = None
    if kind == "png":
        from outpace.reporting.render.screenshot import find_browser

        program = find_browser(browser)  # if there is none, fail early
    documents = [*_compare_subjects(subjects), *_make_documents(subjects)]
    if out is None and kept:
        alone = len(subjects) == 1
        folder = paths[0] if paths[0].is_dir() else paths[0].parent
        out = folder / f"report.{kind}" if alone else Path(f"report.{kind}")
        if not alone and out.exists():
            raise BadInputError(f"{out} exists already. Choose another file with --out.")
    content = _render(documents, kind, program)
    if out is not None:
        write_output(out, content)
    return _Report(documents, content, out)


def _choose_format(requested: str | None, out: Path | None) -> str:
    """Return the requested format, by default that of the file's suffix, else html."""
    suffix = None if out is None else out.suffix.removeprefix(".").lower()
    if requested is None:
        return suffix if suffix in _FORMATS else "html"
    if suffix in _FORMATS and suffix != requested:
        raise BadInputError(
            f"--format {requested}, but --out {out} ends with .{suffix}. Use only one of them."
        )
    return requested


def _read_subject(path: Path) -> _Subject:
    """Read a run's folder or a result file. Raises BadInputError if `path` is neither."""
    if not path.exists():
        raise BadInputError(
            f"there is no file or folder {format_path(path)}. Give the folder of a run, which "
            "`outpace train` prints at the end (`outpace runs` lists all runs), or a result: "
            f"{', '.join(_IN_FOLDERS)}.{suggest_runs(path)}{explain_removed_checkpoint(path)}"
        )
    if path.is_dir():
        if (path / _RUN).is_file():
            return _Subject(path, None)
        found = [path / name for name in _IN_FOLDERS if (path / name).is_file()]
        if not found:
            raise BadInputError(
                f"{path} holds nothing to report on: none of {_RUN}, {', '.join(_IN_FOLDERS)}. "
                "Give the directory of a training run, a comparison or a tuning run."
            )
        path = found[0]
    elif path.name == _RUN and path.is_file():
        return _Subject(path.parent, None)
    return _Subject(path, _read_record(path))


def _read_record(path: Path) -> Any:
    if path.suffix == ".toml":
        raise BadInputError(
            f"{path} describes an experiment, not its results. Run it first, for example with "
            f"outpace compare {path}, then call outpace report with the directory that it "
            "prints."
        )
    values = read_json(path)
    for name, kind in _RECORDS.items():
        if isinstance(values, dict) and name in values:
            return kind.parse(values, str(path))
    if isinstance(values, dict) and "runs" in values and values.keys() & {"node", "machine"}:
        raise BadInputError(
            f"{path} describes a machine that `outpace calibrate` corrected, and holds no probe "
            f"results. Plan with it: outpace plan --machine {path}. Reports are made from the "
            "machine.json that `outpace probe --out` writes."
        )
    if isinstance(values, dict) and "strategy" in values:
        raise BadInputError(
            f"{path} is a single plan without its alternatives. Save the planner's answer: "
            "outpace plan … --json > plans.json."
        )
    raise BadInputError(
        f"{path} is not a file for a report. Use comparison.json, tuning.json, "
        "machine.json, certificate.json, standstill.json, the output of outpace plan --json, "
        "or a run's directory."
    )


def _compare_subjects(subjects: Sequence[_Subject]) -> "Iterator[Document]":
    """Yield a document that compares the runs, if there are several."""
    runs = [one.path for one in subjects if one.record is None]
    if len(runs) < 2:
        return
    from outpace.experiment.judge import compare_runs
    from outpace.reporting.documents.comparison import comparison_document

    try:
        comparison = compare_runs(runs)
    except BadInputError as error:  # runs that are too short or have no steps
        print(f"outpace: these runs are not compared: {error}", file=sys.stderr)
        return
    yield comparison_document(comparison, Path())


def _make_documents(subjects: Sequence[_Subject]) -> "Iterator[Document]":
    probe = next((one.record for one in subjects if isinstance(one.record, Machine)), None)
    for subject in subjects:
        yield _make_document(subject, probe)


def _make_document(subject: _Subject, probe: Machine | None) -> "Document":
    """Make the document of one subject.

    Documents that can compare with the measured rates of a machine use those of `probe`, if given.
    """
    record, folder = subject.record, subject.path.parent
    if record is None:
        from outpace.reporting.data.run_folder import read_run
        from outpace.reporting.documents.run import run_document

        return run_document(read_run(subject.path), probe)
    if isinstance(record, Comparison):
        from outpace.reporting.documents.comparison import comparison_document

        return comparison_document(record, folder, probe)
    if isinstance(record, Tuning):
        from outpace.reporting.documents.tuning import tuning_document

        return tuning_document(record, folder, probe)
    if isinstance(record, Plans):
        from outpace.reporting.documents.plan import plan_document

        return plan_document(record)
    if isinstance(record, Certificate):
        from outpace.reporting.documents.certificate import certificate_document

        return certificate_document(record)
    if isinstance(record, HangReport):
        from outpace.reporting.documents.hang import hang_document

        return hang_document(record)
    if record.probed is None:
        raise BadInputError(
            f"{subject.path} describes a machine without measurements. Measure it: outpace "
            f"probe --out {subject.path.name}."
        )
    from outpace.reporting.documents.probe import probe_document

    return probe_document(record, record.probed)


def _render(documents: "Sequence[Document]", kind: str, browser: str | None) -> str | bytes:
    if kind in ("md", "csv"):
        from outpace.reporting.render.markdown import markdown, table_csv

        return markdown(documents) if kind == "md" else table_csv(documents)
    from outpace.reporting.page import page

    html = page(documents)
    if browser is None:
        return html
    from outpace.reporting.render.screenshot import picture

    return picture(html, browser, root=os.geteuid() == 0)


def _summarise(documents: "Sequence[Document]", out: Path | None, kind: str) -> dict[str, Any]:
    return {
        "out": None if out is None else str(out),
        "format": kind,
        "reports": [
            {"subject": one.subject, "title": one.title, "verdict": list(one.verdict),
             "facts": dict(one.facts)}
            for one in documents
        ],
    }  # fmt: skip


def _parser() -> Parser:
    parser = Parser("report", _ABOUT, _EPILOG, usage="PATH … [options]")
    parser.add_json()
    add = parser.option
    add("path", "PATH", Path, "what to report on", nargs="+")
    add("--out", "FILE", output_file,
        "file to write (default: report.html next to PATH, or in the current folder for several "
        "paths; standard output for md and csv without --json)")  # fmt: skip
    add("--format", "FORMAT", str,
        "html, md, csv or png (default: by the suffix of --out, else html)", choices=_FORMATS
    )  # fmt: skip
    add("--browser", "PROGRAM", str, "Chromium or Chrome, for png (default: the first on PATH)")
    return parser
