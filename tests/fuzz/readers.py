"""Every reader of what people and other programs wrote, by its public door."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import documents
import results
import xxhash
from trees import Tree

from outpace.records.errors import BadInputError


@dataclass(frozen=True)
class Reader:
    """`read` takes the folder in which one of the trees lies, broken.

    `code` is what of outpace does the reading: functions by their modules, all of a module where
    none is named. `keeps`: nothing in the folder may be changed.
    """

    name: str
    trees: Callable[[], Sequence[Tree]]
    read: Callable[[Path], object]
    code: Mapping[str, Sequence[str]]
    keeps: bool = True


def _config(folder: Path) -> None:
    from outpace.cli.options import build, from_toml

    path = folder / "config.toml"
    build({str(path): from_toml(path), "run.json": {"steps": 5, "model": "gpt2"}})


def _experiment(folder: Path) -> None:
    from outpace.cli.experiments import from_toml
    from outpace.records.comparison import Experiment

    path = folder / "experiment.toml"
    Experiment.parse(from_toml(path), str(path))


def _spec(folder: Path) -> None:
    from outpace.interop.models import open_model

    (path,) = folder.iterdir() if any(folder.iterdir()) else (folder / "model.json",)
    open_model(str(path))


def _plan(folder: Path) -> None:
    from outpace.cli import estimate

    words = ["--model", "gpt2", "--machine", "hgx-h100", "--json"]
    estimate.run([*words, "--plan", str(folder / "plan.json")], {})


def _machine(folder: Path) -> None:
    from outpace.jobs.planning.request import PlanQuestion, job

    job(PlanQuestion(model="gpt2", machine=str(folder / "machine.json")))


def _hosts(folder: Path) -> None:
    from outpace.records.hosts import parse_hosts, read_hosts

    found = read_hosts(folder / "hosts")
    assert parse_hosts(",".join(f"{one.name}:{one.slots}" for one in found)) == found


def _topology(folder: Path) -> None:
    from outpace.cli import topology

    topology.run(["--from", str(folder / "topology.txt"), "--json"], {})


def _tokens(folder: Path) -> None:
    from outpace.data.corpus import prepare

    told = {**results.prepared(), "tokenizer": None, "cache_dir": folder.with_suffix(".cache")}
    corpus = prepare((str(folder / "tokens.bin"),), **told)
    for stream in corpus.streams:
        stream.read(0, len(stream))
        if stream.document_starts is not None:
            stream.documents(0, len(stream))


def _cache(folder: Path) -> None:
    """What is damaged is made again: whatever there was, the tokens are those of the text."""
    from outpace.data.corpus import prepare

    (data := folder / "data.jsonl").write_bytes(results.texts())
    told = {**results.prepared(), "cache_dir": folder / "cache"}
    (stream,) = prepare((str(data),), **told).streams
    assert stream.read(0, len(stream)).tolist() == _ids()
    stream.documents(0, len(stream))


@cache
def _ids() -> list[int]:
    tokenizer = documents.tokenizer()
    texts = [json.loads(line)["text"] for line in results.texts().splitlines()]
    return [one for text in texts for one in (*tokenizer.encode(text), tokenizer.eos_id)]


def _data(folder: Path) -> Path:
    return next((path for path in folder.iterdir()), folder / "data.jsonl")


def _text(folder: Path) -> None:
    from outpace.data.sources import open_source
    from outpace.data.text import pieces

    for piece in pieces(open_source(str(_data(folder))), "text"):
        piece.text.encode()


def _rows(folder: Path) -> None:
    """As tasks read them: conversations where there are such, else texts with labels."""
    from outpace.data.chat import messages_of
    from outpace.data.classify import columns_of, examples_of
    from outpace.data.rows import fingerprint, read_table

    table = read_table(str(_data(folder)))
    fingerprint(table.rows)
    if {"messages", "conversations", "instruction"} & set(table.columns):
        for row in table.rows:
            messages_of(row)
    else:
        examples_of([table.rows], columns_of(table, None, None))


def _checkpoint(folder: Path) -> None:
    """Without markers they are marked as they are: their contents are looked at, too."""
    from outpace.training.checkpoint import MARKER, newest_intact

    if not any(folder.glob(f"*/{MARKER}")):
        for step in (one for one in folder.glob("step-*") if one.is_dir()):
            (step / MARKER).write_text(json.dumps(_marks(step)))
    found = newest_intact(folder, lambda _: None)
    if found is not None:
        results.saver(folder).load(found, *results.small())


def _marks(folder: Path) -> dict[str, Any]:
    return {
        path.name: {
            "bytes": path.stat().st_size,
            "xxh3_128": xxhash.xxh3_128_hexdigest(path.read_bytes()),
        }
        for path in folder.iterdir()
        if path.is_file()
    }


def _model(folder: Path) -> None:
    from outpace.interop.huggingface import read_weights
    from outpace.interop.models import open_model

    opened = open_model(str(folder))
    if opened.spec is not None:
        read_weights(folder, opened.spec)


def _outline(folder: Path) -> None:
    from outpace.jobs.planning.model_outline import find_outline

    find_outline(str(folder))


def _adapter(folder: Path) -> None:
    from outpace.interop.huggingface import read_weights, spec_from_hf
    from outpace.interop.peft import base_of, merge_into

    with suppress(BadInputError):  # it may name a folder that is not here
        base_of(folder)
    base = folder / "base"
    spec = spec_from_hf(base)
    merge_into(read_weights(base, spec), folder, base)


def _tokenizer(folder: Path) -> None:
    from outpace.data.tokenizer_files import load_tokenizer

    files = list(folder.iterdir())
    found = load_tokenizer(str(files[0] if len(files) == 1 else folder))
    assert isinstance(found.chat_template, str | None)
    found.decode(found.encode("Hello, 12 of\n them: é 中."))


def _report(folder: Path) -> None:
    from outpace.cli import report

    files = list(folder.iterdir())
    alone = len(files) == 1 and not files[0].is_dir()
    report.run([str(files[0] if alone else folder), "--format", "md"], {})


def _runs(folder: Path) -> None:
    from outpace.cli import runs
    from outpace.experiment.past_runs import find_runs

    runs.run([str(folder.parent), "--json"], {})
    find_runs(folder.iterdir())  # what is no folder cannot be looked into


def _shown(folder: Path) -> None:
    from outpace.cli import runs

    runs.run(["show", str(folder), "--json"], {})


def _resumed(folder: Path) -> None:
    from outpace.cli.resume import settings_of
    from outpace.training.run_dir import RunDir

    run = RunDir(folder)
    try:
        settings_of(folder)
    finally:
        run.require_run()
    run.evaluation(5)
    run.continue_from(3, 10, run.history(), lambda _: None)


def _past(folder: Path) -> None:
    """As `outpace compare --runs` takes it, beside itself."""
    from outpace.experiment.finished_runs import arms_of, outcomes_of

    both = [folder, folder / ".." / folder.name]
    experiment = arms_of(both)
    outcomes_of(both, experiment)


_RECORDS = {
    "outpace.records.base": (
        "Record.load",
        "Record.parse",
        "read_json",
        "read_object",
        "explain",
        "_format_problem",
    )
}

READERS: Mapping[str, Reader] = MappingProxyType({
    one.name: one
    for one in (
        Reader("config", documents.configs, _config, {
            "outpace.cli.options": ("from_toml", "convert", "_convert_one", "_split_at_commas",
                                    "build", "_drop_overridden_lengths", "_format_problem",
                                    "shape"),
            "outpace.records.base": ("read_toml",)}),
        Reader("experiment", documents.experiments, _experiment, {
            "outpace.cli.experiments": ("from_toml", "_parse_arm", "_parse_settings",
                                        "_parse_setting", "_cross_with_grid", "_parse_boolean",
                                        "_to_json_value", "_format_arm_name")}),
        Reader("spec", documents.specs, _spec, {
            "outpace.interop.models": ("read_spec",),
            "outpace.records.model": ("ModelSpec._fill_defaults", "ModelSpec._check"),
            "outpace.records.base": ("read_json", "read_object", "read_toml")}),
        Reader("plan", documents.plans, _plan, _RECORDS),
        Reader("machine", documents.machines, _machine, {
            "outpace.planner.calibration.cluster": ("of_probe", "_probed_fabric"),
            "outpace.planner.calibration.probed_device": (
                "ProbeFigures.value_of", "ProbeFigures.matmuls",
                "ProbeFigures.loader_tokens_per_s", "probed_device")}),
        Reader("hosts", documents.hostfiles, _hosts, {
            "outpace.records.hosts": ("read_hosts", "_make_host", "_require_distinct")}),
        Reader("topology", documents.topologies, _topology, {
            "outpace.probing.hardware.nvidia_smi": (
                "parse", "_find_header", "_parse_row", "_parse_last_fields", "_complete_matrix")}),
        Reader("tokens", documents.token_files, _tokens, {
            "outpace.data.stream": ("_open_llmc_file", "megatron_stream"),
            "outpace.data.sources": ("_source_of_file", "_make_source"),
            "outpace.data.file_reader": ("state_of",)}),
        Reader("cache", results.caches, _cache, {
            "outpace.data.shards": ("read_index",),
            "outpace.data.index": ("Index._require_consistent_files",),
            "outpace.data.stream": ("cached_stream",)}, keeps=False),
        Reader("text", documents.tables, _text, {
            "outpace.data.text": ("pieces", "_read_plain_file", "_decode", "_find_border",
                                  "_split_documents", "_split_document"),
            "outpace.data.row": ("checked_text",), "outpace.data.json_rows": ("json_lines",),
            "outpace.data.row_files": ("_read_parquet",)}),
        Reader("rows", documents.tables, _rows, {
            "outpace.data.rows": ("read_table", "_read_files", "fingerprint",
                                  "_serialize", "_to_json_value"),
            "outpace.data.row_files": ("_read_parquet",),
            "outpace.data.json_rows": ("json_list", "json_lines"),
            "outpace.data.delimited_rows": ("read_delimited", "_read_tabs", "_read_csv",
                                            "_has_cola_columns"),
            "outpace.data.chat": ("messages_of",),
            "outpace.data.conversations": ("conversation_of", "_require_list", "_read_turn",
                                           "_read_text", "_quote")}),
        Reader("checkpoint", results.checkpoints, _checkpoint, {
            "outpace.training.checkpoint": (
                "damage", "step_of", "whole_checkpoints", "newest_intact", "_file_checksum",
                "Checkpointer.load")},
               keeps=False),
        Reader("model", documents.models, _model, {
            "outpace.interop.config": ("spec_from_hf", "load_config"),
            "outpace.interop.weights": ("read_weights", "_convert_all", "_index_by_current_name",
                                        "_remove_tied_head", "_require_expected_tensors",
                                        "_stored_shape", "_split_stored"),
            "outpace.interop.weight_files": (
                "open_tensors", "has_weights", "weight_files", "_list_shards", "_open_safetensors",
                "_make_stored_tensor", "_open_bin")}),
        Reader("outline", documents.configs_of_models, _outline, {
            "outpace.interop.outline": (), "outpace.interop.outline_readers": (),
            "outpace.interop.config": ("spec_from_config", "_require_supported_values",
                                       "_read_activation", "_read_gpt2",
                                       "_read_bert", "_read_llama_like", "_read_biases",
                                       "_read_windows", "_read_rope")}),
        Reader("adapter", documents.adapters, _adapter, {
            "outpace.interop.peft": ("read_adapter_config", "base_of", "merge_into", "read_note",
                                     "_read_pairs", "_lora_scale", "_check_alphas",
                                     "_find_directory"),
            "outpace.interop.config": ("read_config",)}),
        Reader("tokenizer", documents.tokenizers, _tokenizer, {
            "outpace.data.tokenizer": ("token_text", "Tokenizer.__init__",
                                       "Tokenizer._find_roles", "_read_templates"),
            "outpace.data.tokenizer_files": ("load_tokenizer", "_load", "_read_config",
                                             "_load_byte_pairs", "_load_word_pieces"),
            "outpace.data.word_cache": ("words_of", "_read_pattern")}),
        Reader("report", results.reported, _report, {
            "outpace.cli.report": ("_read_subject", "_read_record", "_make_document")}),
        Reader("run", results.runs, _report, {
            "outpace.reporting.data.run_folder": (), "outpace.reporting.data.step_log": (
                "read_steps", "_read_with_arrow", "_read_with_json", "_parse_chunks",
                "_parse_without_last", "_to_array"),
            "outpace.reporting.data.chrome_trace": ("measured_timeline", "_read_last_pass",
                                                 "_read_action")}),
        Reader("runs", results.runs, _runs, {
            "outpace.experiment.past_runs": ("find_runs", "read_past_run", "result_of",
                                             "_read_failure", "_figures_of_steps", "latest_steps",
                                             "is_run")}),
        Reader("shown run", results.runs, _shown, {
            "outpace.experiment.past_runs": ("is_run", "checkpoints", "sizes", "_total_bytes")}),
        Reader("resumed run", results.runs, _resumed, {
            "outpace.cli.resume": ("settings_of",),
            "outpace.training.run_dir": ("RunDir.require_run", "RunDir.history",
                                      "RunDir.evaluation", "RunDir.continue_from"),
            "outpace.training.run_log": ()}, keeps=False),
        Reader("past run", results.runs, _past, {
            "outpace.experiment.finished_runs": ("arms_of", "outcomes_of"),
            "outpace.experiment.results": ("steps_of",)}),
    )
})  # fmt: skip
