"""What every format has to hold: the same ranks, the same batch, published names, nothing lost."""

import argparse
import json
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

from export_plans import LLAMA, OPTIONS, SEQ_LEN, filled, plan_or_none, requests

from outpace.catalog.models import preset
from outpace.catalog.outlines import OUTLINES
from outpace.catalog.stacks import STACKS
from outpace.cli import options
from outpace.cli.train import _parser
from outpace.interop.export import FORMATS, ExportedPlan, ExportRequest, export_plan, torchtitan
from outpace.interop.export.request import fold_pipeline, hosts
from outpace.planner.pipeline.stages import layers_per_stage
from outpace.records.axes import SPLITS
from outpace.records.errors import BadInputError
from outpace.records.model import ModelSpec
from outpace.records.plan import Plan, PlanFile
from outpace.records.precisions import SHARD_DTYPES

DATA = Path(__file__).parent / "data"
MEGATRON = json.loads((DATA / "megatron_names.json").read_text())["arguments"]
NANOTRON = json.loads((DATA / "nanotron_names.json").read_text())
TORCHTITAN = json.loads((DATA / "torchtitan_names.json").read_text())
ONLY_OURS = ("dp", "ps", "ring", "horovod", "mp")


def emitted(name: str, request: ExportRequest) -> ExportedPlan:
    return export_plan(
        name,
        request.plan,
        request.spec,
        global_batch=request.global_batch,
        seq_len=request.seq_len,
    )


def launched(command: str) -> int:
    """The ranks that a command starts."""
    nodes = re.search(r"--(?:nnodes=|num_nodes )(\d+)", command)
    each = re.search(r"--(?:nproc-per-node=|num_gpus |nproc )(\d+)", command)
    return int(nodes[1] if nodes else 1) * int(each[1] if each else 1)


def megatron_arguments(text: str) -> dict[str, list[str]]:
    """The script's arguments with their values, read as a shell does."""
    command = text[text.rindex("pretrain_gpt.py") :].replace("\\\n", " ")
    found: dict[str, list[str]] = {}
    for word in shlex.split(command)[1:]:
        if word.startswith("--"):
            assert word[2:] not in found, word
            found[word[2:]] = []
        else:
            list(found.values())[-1].append(word)
    return found


def as_said(text: str) -> str:
    """Comments of a text in one line."""
    lines = [line.lstrip("# ").rstrip() for line in text.splitlines() if line.startswith("#")]
    return " ".join(lines).replace("- ", "")


@given(requests(), st.sampled_from(sorted(FORMATS)))
@hypothesis.settings(max_examples=300)
def test_each_format_writes_every_plan(request_: ExportRequest, name: str) -> None:
    written = emitted(name, request_)
    assert written.text.endswith("\n")
    assert written.command
    assert all(sentence.endswith(".") for sentence in written.notes)
    assert set(written.differences) <= set(written.notes)
    if name not in ("deepspeed", "fsdp", "outpace"):
        said = as_said(written.text)
        for sentence in written.notes:
            assert sentence.replace("- ", "") in said
    if name == "outpace":
        return
    if request_.plan.strategy in ONLY_OURS:
        own = [s for s in written.notes if f"strategy {request_.plan.strategy}" in s]
        exact = name in ("deepspeed", "accelerate") and request_.plan.strategy == "mp"
        assert exact or (own and ("nearest" in own[0] or "The export has" in own[0]))


@given(requests())
def test_deepspeed_multiplies_to_the_plan(request_: ExportRequest) -> None:
    plan = request_.plan
    written = emitted("deepspeed", request_)
    config = json.loads(written.text)
    shares = launched(written.command) // (plan.tp * plan.pp * plan.cp)
    assert launched(written.command) == plan.world_size - plan.servers
    assert config["train_batch_size"] == request_.global_batch
    assert request_.global_batch == (
        config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] * shares
    )
    assert config.get("tensor_parallel", {"autotp_size": 1})["autotp_size"] == plan.tp
    assert config.get("sequence_parallel_size", 1) == plan.cp
    assert plan.pp == 1 or config["zero_optimization"]["stage"] < 2
    if plan.precision in SHARD_DTYPES and request_.stage >= 2:
        assert config["communication_data_type"] in ("fp32", plan.compress_gradients)
    assert plan.pp == 1 or any(f"num_stages={plan.pp}" in said for said in written.notes)


@given(requests())
def test_accelerate_multiplies_to_the_plan(request_: ExportRequest) -> None:
    plan = request_.plan
    written = emitted("accelerate", request_)
    config = yaml.safe_load(written.text)
    assert config["num_processes"] == plan.world_size - plan.servers
    kind = config["distributed_type"]
    if kind == "MEGATRON_LM":
        sizes = config["megatron_lm_config"]
        steps = sizes["megatron_lm_num_micro_batches"]
        split = (
            sizes["megatron_lm_tp_degree"]
            * sizes["megatron_lm_pp_degree"]
            * sizes["megatron_lm_context_parallel_size"]
        )
    else:
        sizes = config.get("parallelism_config", {})
        split = sizes.get("parallelism_config_tp_size", 1) * sizes.get(
            "parallelism_config_cp_size", 1
        )
        shards = sizes.get("parallelism_config_dp_shard_size", 0)
        if sizes:
            data = shards * sizes["parallelism_config_dp_replicate_size"]
            assert data * split == config["num_processes"]
        if kind == "DEEPSPEED":
            steps = config["deepspeed_config"]["gradient_accumulation_steps"]
        else:
            found = re.search(r"GRADIENT_ACCUMULATION_STEPS=(\d+)", written.command)
            assert found
            steps = int(found[1])
    assert f"{plan.micro_batch} sample" in " ".join(written.notes)
    assert plan.micro_batch * steps * config["num_processes"] // split == request_.global_batch


@given(requests())
def test_torchtitan_multiplies_to_the_plan(request_: ExportRequest) -> None:
    plan = request_.plan
    written = emitted("torchtitan", request_)
    config = tomllib.loads(filled(written.text))
    degrees = config["parallelism"]
    data = degrees["data_parallel_replicate_degree"] * degrees["data_parallel_shard_degree"]
    others = (
        degrees["context_parallel_degree"]
        * degrees["tensor_parallel_degree"]
        * degrees["pipeline_parallel_degree"]
    )
    assert data * others == launched(written.command) == plan.world_size - plan.servers
    assert config["training"]["global_batch_size"] == request_.global_batch
    assert request_.global_batch == (
        config["training"]["local_batch_size"] * data * request_.accumulation
    )
    if plan.pp > 1:
        microbatch = degrees["pipeline_parallel_microbatch_size"]
        assert config["training"]["local_batch_size"] == microbatch * plan.pp_microbatches
        assert layers_of(degrees, plan.pp) == request_.spec.layers


def layers_of(degrees: dict[str, Any], pp: int) -> int:
    """The layers that torchtitan's stages have, each once."""
    parts = degrees.get("module_fqns_per_model_part")
    if parts is None:
        stages = 1 if degrees["pipeline_parallel_schedule"] in ("GPipe", "1F1B") else 2
        count: int = degrees["pipeline_parallel_layers_per_stage"] * pp * stages
        return count
    modules = [module for part in parts for module in part]
    assert modules[0] == "tok_embeddings"
    assert modules[-2:] == ["norm", "output"]
    assert modules[1:-2] == [f"layers.{index}" for index in range(len(modules) - 3)]
    return len(modules) - 3


@given(requests())
def test_torchtitan_has_published_names(request_: ExportRequest) -> None:
    text = emitted("torchtitan", request_).text
    config = tomllib.loads(filled(text))
    nested = config.pop("quantize", {}).get("linear", {})
    for table, values in {
        **config,
        **{f"quantize.linear.{k}": v for k, v in nested.items()},
    }.items():
        assert set(values) <= set(TORCHTITAN["toml"][table])
    model = config["model"]
    assert model["flavor"] in [*TORCHTITAN["flavors"][model["name"]], "outpace"]
    words = shlex.split(as_said(text).partition("do not read TOML. With these, use: ")[2])
    flags = [word[2:].split(".") for word in words if word.startswith("--") and "." in word[2:]]
    flags = [flag for flag in flags if flag[0] in TORCHTITAN["flags"]]
    assert len(flags) > 8
    for table, name in flags:
        assert name.removeprefix("no-") in TORCHTITAN["flags"][table]
    kind, _, mode = words[-1].partition(":")
    assert mode in TORCHTITAN["flags"][kind]


def test_torchtitan_knows_its_own_models() -> None:
    for name in ("llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b", "qwen3-8b", "qwen3-0.6b"):
        written = export_plan("torchtitan", Plan(), preset(name), global_batch=1, seq_len=128)
        model = tomllib.loads(filled(written.text))["model"]
        assert model["flavor"] == name.rpartition("-")[2].upper()
        assert not any("flavor" in sentence for sentence in written.notes)
    unknown = export_plan("torchtitan", Plan(), LLAMA, global_batch=1, seq_len=64)
    assert any("n_layers=16" in sentence for sentence in unknown.notes)


@pytest.mark.parametrize(
    ("change", "said", "lost"),
    [
        ({"rope_scaling": None}, "RoPEScalingArgs(scaling_factor=1.0, low_freq_factor=1.0", False),
        ({"rope_scaling": {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                           "original_max_positions": 8192}}, "scaling_factor=32.0", False),
        ({"rope_theta": 1e4}, "rope_theta=10000.0", False),
        ({"tied": True}, "tied: torchtitan's Llama has a separate head, 525,336,576", True),
        ({"head_dim": 96}, "head_dim 96: torchtitan's Llama uses dim / n_heads, 128", True),
        ({"qkv_bias": True}, "qkv_bias: torchtitan's matmuls have no biases", True),
        ({"sliding_window": 64}, "sliding_window 64: torchtitan's attention has none", True),
        ({"activation": "gelu"}, "activation gelu", True),
    ],
)  # fmt: skip
def test_torchtitan_is_told_what_its_llama_is_not(
    change: dict[str, Any], said: str, lost: bool
) -> None:
    """Of the dimensions of its 8B, whose rotary scaling and free head are not everyone's."""
    values = {**preset("llama-3.1-8b").model_dump(), **change}
    written = export_plan(
        "torchtitan", Plan(), ModelSpec.model_validate(values), global_batch=1, seq_len=128
    )
    assert tomllib.loads(filled(written.text))["model"]["flavor"] == "outpace"
    assert said in as_said(written.text)
    assert any(said in sentence for sentence in written.differences) == lost


def test_torchtitans_qwen3_ties_and_has_heads_of_any_width() -> None:
    tied = preset("qwen3-8b").model_copy(update={"tied": True, "head_dim": 96})
    written = export_plan("torchtitan", Plan(), tied, global_batch=1, seq_len=128)
    assert "head_dim=96, hidden_dim=12288, enable_weight_tying=True" in as_said(written.text)
    assert written.differences == ()


@given(st.integers(16, 4096).map(lambda n: 8 * n), st.integers(1, 4096).map(lambda n: 8 * n))
def test_torchtitans_formula_gives_the_width(hidden: int, ffn: int) -> None:
    """As its FeedForward reckons (0.2.2): int, times the multiplier, int, up to a multiple."""
    spec = LLAMA.model_copy(update={"hidden": hidden, "ffn": ffn})
    multiple, multiplier = torchtitan._mlp_multiples(spec)
    width = int(multiplier * int(2 * (4 * hidden) / 3))
    assert multiple * ((width + multiple - 1) // multiple) == ffn


@given(requests())
def test_megatron_multiplies_to_the_plan(request_: ExportRequest) -> None:
    plan, spec = request_.plan, request_.spec
    written = emitted("megatron", request_)
    found = {name: values[0] for name, values in megatron_arguments(written.text).items() if values}
    split = (
        int(found["tensor-model-parallel-size"])
        * int(found["pipeline-model-parallel-size"])
        * int(found["context-parallel-size"])
    )
    ranks = launched(written.text)
    assert ranks == plan.world_size - plan.servers
    assert ranks // split == plan.data_parallel
    # Its number of micro-batches is what is left of the global batch.
    per_micro_batch = int(found["micro-batch-size"]) * ranks // split
    assert int(found["global-batch-size"]) == request_.global_batch
    assert request_.global_batch == per_micro_batch * request_.passes
    assert ranks // split % int(found.get("num-distributed-optimizer-instances", 1)) == 0
    assert (int(found["num-layers"]), int(found["hidden-size"])) == (spec.layers, spec.hidden)
    layout = found.get("pipeline-model-parallel-layout")
    if layout is not None:
        repeated = re.sub(r"\(t\*(\d+)\|\)\*(\d+)", lambda m: f"t*{m[1]}|" * int(m[2]), layout)
        counts = [int(part) for part in re.findall(r"t\*(\d+)", repeated)]
        assert tuple(counts) == layers_per_stage(spec, len(counts))
        assert len(counts) % plan.pp == 0
    elif "num-layers-per-virtual-pipeline-stage" in found:
        each = int(found["num-layers-per-virtual-pipeline-stage"])
        assert spec.layers == each * plan.pp * 2
    else:
        assert spec.layers % plan.pp == 0


@pytest.mark.parametrize(
    ("values", "layers"),
    [
        ({"stage_split": "even"}, {"num-layers-per-virtual-pipeline-stage": ["2"]}),
        ({"stage_split": "cost"},
         {"pipeline-model-parallel-layout": ["Et*2|(t*2|)*5,t*3|t*1,L"]}),
        ({"stage_split": "even", "pp_schedule": "1f1b"}, {}),
    ],
)  # fmt: skip
def test_megatron_and_torchtitan_have_the_layers_of_each_stage(
    values: dict[str, Any], layers: dict[str, list[str]]
) -> None:
    spec = LLAMA.model_copy(update={"vocab": 1024})
    plan = Plan(strategy="3d", pp=4, dp_shard=2, zero=1, pp_microbatches=4,
                **{"pp_schedule": "interleaved", **values})  # fmt: skip
    request = ExportRequest(plan, spec, 8, SEQ_LEN)
    written = emitted("megatron", request)
    arguments = megatron_arguments(written.text)
    told = {
        name: value for name, value in arguments.items() if "layout" in name or "virtual" in name
    }
    assert told == layers and written.differences == ()
    parallelism = tomllib.loads(filled(emitted("torchtitan", request).text))["parallelism"]
    equal = "pipeline_parallel_layers_per_stage" in parallelism
    assert equal == (plan.stage_split == "even")


@given(requests())
def test_megatron_has_published_names(request_: ExportRequest) -> None:
    for name, values in megatron_arguments(emitted("megatron", request_).text).items():
        takes = MEGATRON[name]
        assert bool(values) == (takes is not None), name
        if isinstance(takes, list):
            assert set(values) <= set(takes)
        elif takes is not None:
            assert len(values) == 1


@given(requests())
@hypothesis.settings(max_examples=300)
def test_megatron_asserts_nothing_against_it(request_: ExportRequest) -> None:
    """What its validate_args and configs want of these arguments (data/megatron_names.json)."""
    text = emitted("megatron", request_).text
    found = megatron_arguments(text)
    needs = {
        "use-megatron-fsdp": ["use-distributed-optimizer", "no-gradient-accumulation-fusion"],
        "optimizer-cpu-offload": ["use-precision-aware-optimizer", "use-distributed-optimizer"],
        "overlap-param-gather": ["overlap-grad-reduce", "use-distributed-optimizer"],
        "recompute-method": ["recompute-granularity", "recompute-num-layers"],
    }
    for name, others in needs.items():
        assert name not in found or set(others) <= set(found)
    # The traits of its stack (catalog/stacks.json) have parameters gathered during computation.
    sharded = request_.stage > 0 and request_.plan.data_parallel * request_.plan.cp > 1
    assert STACKS["megatron"].overlaps and sharded == ("overlap-param-gather" in found)
    never = [
        ("bf16", "fp16"),
        ("cpu-offloading-num-layers", "recompute-granularity"),
        ("num-layers-per-virtual-pipeline-stage", "pipeline-model-parallel-layout"),
    ]
    for one, other in never:
        assert one not in found or other not in found
    fsdp = "use-megatron-fsdp" in found
    assert fsdp == (found.get("ckpt-format") == ["fsdp_dtensor"])
    assert fsdp == ("CUDA_DEVICE_MAX_CONNECTIONS=1" not in text)
    assert found["optimizer"] != ["muon"] or "use-distributed-optimizer" not in found
    selective = found.get("recompute-granularity") == ["selective"]
    assert selective == ("recompute-modules" in found)


@given(requests())
def test_nanotron_multiplies_to_the_plan_with_published_names(request_: ExportRequest) -> None:
    plan = request_.plan
    written = emitted("nanotron", request_)
    config = yaml.safe_load(written.text)
    sizes, tokens = config["parallelism"], config["tokens"]
    assert launched(written.command) == plan.world_size - plan.servers
    assert launched(written.command) == (
        sizes["dp"] * sizes["pp"] * sizes["tp"] * sizes["context_parallel_size"]
    )
    assert request_.global_batch == (
        tokens["micro_batch_size"] * tokens["batch_accumulation_per_replica"] * sizes["dp"]
    )
    for path, keys in mappings(config):
        if path == "model.model_config":
            (kind,) = [key for key in keys if key.startswith("is_")]
            assert set(keys) <= set(NANOTRON["model_configs"][kind])
        else:
            assert set(keys) <= set(NANOTRON["keys"][path]), path
    values = {**sizes, **config["model"], **config["optimizer"]}
    for key in ("pp_engine", "tp_mode", "dtype", "zero_stage"):
        assert values[key] in NANOTRON["values"][key]


def mappings(value: Any, path: str = "") -> Iterator[tuple[str, list[str]]]:
    """Each mapping's place and keys."""
    if isinstance(value, list):
        for item in value:
            yield from mappings(item, path)
    elif isinstance(value, dict):
        yield path, list(value)
        for key, inner in value.items():
            yield from mappings(inner, f"{path}.{key}".lstrip("."))


@given(requests())
def test_training_arguments_multiply_to_the_plan(request_: ExportRequest) -> None:
    plan = request_.plan
    written = emitted("fsdp", request_)
    values = json.loads(written.text)
    ranks = launched(written.command)
    if plan.pp == 1:
        assert ranks == plan.world_size - plan.servers
    elif ranks < plan.world_size:  # a batch too small for all ranks of the pipeline
        assert any("left out" in sentence for sentence in written.notes)
    sizes = dict(re.findall(r"PARALLELISM_CONFIG_(\w+)_SIZE=(\d+)", written.command))
    split = int(sizes.get("TP", 1)) * int(sizes.get("CP", 1))
    assert split == plan.tp * plan.cp
    if sizes:
        assert ranks == split * int(sizes["DP_REPLICATE"]) * int(sizes["DP_SHARD"])
    assert request_.global_batch == (
        values["per_device_train_batch_size"]
        * values["gradient_accumulation_steps"]
        * (ranks // split)
    )


@given(request_=requests())
def test_outpace_reads_its_own(
    request_: ExportRequest, tmp_path_factory: pytest.TempPathFactory
) -> None:
    plan = request_.plan
    written = emitted("outpace", request_)
    path = tmp_path_factory.getbasetemp() / written.file_name
    path.write_text(written.text)
    assert PlanFile.load(path) == PlanFile.from_plan(plan, request_.seq_len, request_.global_batch)
    words = shlex.split(written.command)
    asked = _parser().read(words[words.index("train") + 1 :])
    assert isinstance(asked, argparse.Namespace)
    settings, _ = options.build({options.COMMAND_LINE: options.from_flags(asked)})
    assert settings.nproc in (None, plan.world_size)
    assert settings.global_batch == request_.global_batch
    for name in set(Plan.model_fields) & set(type(settings).model_fields):
        value = getattr(settings, name)
        if name == "precision" and plan.precision == "fp64":
            continue
        if value is None:  # chosen as in the plan: by its default, or by what else is asked
            assert getattr(plan, name) == Plan.model_fields[name].default, name
        else:
            assert value == getattr(plan, name), name


def test_outpace_trains_the_model_as_it_was_given() -> None:
    """A folder with a preset's dimensions has weights and a tokenizer that a preset has not."""
    for reference in ("some/folder", "own.py:build", "llama-3.1-8b"):
        written = export_plan(
            "outpace", Plan(), preset("llama-3.1-8b"), global_batch=1, seq_len=128,
            reference=reference,
        )  # fmt: skip
        assert f"--model {reference} " in written.command
        assert not any("ModelSpec" in sentence for sentence in written.notes)


@pytest.mark.parametrize("name", FORMATS)
def test_what_a_format_lacks_is_known_before_its_text_is_written(name):
    """A search asks it of hundreds of plans."""
    plan = Plan(strategy="zero3", dp_shard=2, checkpointing="attention")
    written = export_plan(name, plan, LLAMA, global_batch=2, seq_len=SEQ_LEN)
    assert isinstance(written.differences, tuple)
    assert written.written_plan(plan)
    assert "text" not in vars(written)
    assert written.text is written.text


@pytest.mark.parametrize("name", FORMATS)
def test_models_of_which_the_outline_is_known(name: str) -> None:
    """Formats without dimensions hold their plans; outpace's has no command to train."""
    ask = {"global_batch": 8, "seq_len": 64, "reference": "mixtral-8x7b"}
    if name in ("torchtitan", "megatron", "nanotron"):
        said = "Use a format that does not describe the model: deepspeed"
        with pytest.raises(BadInputError, match=said):
            export_plan(name, Plan(), OUTLINES["mixtral-8x7b"], **ask)  # type: ignore[arg-type]
        return
    written = export_plan(name, Plan(strategy="zero3", dp_shard=8, checkpointing="full"),
                   OUTLINES["mixtral-8x7b"], **ask)  # type: ignore[arg-type]  # fmt: skip
    assert written.differences == ()
    if name == "outpace":
        assert written.command.startswith("outpace estimate --model mixtral-8x7b")
        assert any("outpace has no Mixtral" in sentence for sentence in written.notes)
    if name == "fsdp":
        config = json.loads(written.text)["fsdp_config"]
        assert "transformer_layer_cls_to_wrap" not in config


def test_outpace_names_presets() -> None:
    written = export_plan("outpace", Plan(), preset("llama-3.1-8b"), global_batch=1, seq_len=128)
    assert "--model llama-3.1-8b" in written.command
    assert len(written.notes) == 1


@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("strategy", sorted(SPLITS))
def test_no_lever_is_lost(name: str, strategy: str) -> None:
    """Each option changes the text, the command, or what is said that they do not say."""
    base: dict[str, Any] = {"strategy": strategy, "servers": int(strategy == "ps")}
    base |= dict.fromkeys(SPLITS[strategy], 2)
    if "pp" in base and strategy != "mp":
        base["pp_microbatches"] = 4
    for option, values in OPTIONS.items():
        for value in values:
            if option == "sequence_parallel" and base.get("tp", 1) == 1:
                continue
            if option == "bucket_mib" and strategy not in ("ddp", "zero1", "ring"):
                continue
            start = {**base, "checkpointing": "full"} if option == "checkpoint_every" else base
            before, after = plan_or_none(start), plan_or_none({**start, option: value})
            if before is None or after is None:
                continue
            batch = before.samples_per_pass * before.data_parallel * 2
            one, other = (
                emitted(name, ExportRequest(p, LLAMA, batch, SEQ_LEN)) for p in (before, after)
            )
            assert one != other, (option, value)


@pytest.mark.parametrize("name", sorted(set(FORMATS) - {"outpace"}))
@pytest.mark.parametrize(
    ("layers", "said"),
    [
        (("full",) * 8 + ("none",) * 8, "8 of 16 blocks"),
        (("full",) * 8 + ("selective",) * 8, "and others in 16 of 16 blocks"),
    ],
)
def test_blocks_of_their_own_modes_are_said(name: str, layers: tuple[str, ...], said: str) -> None:
    plan = Plan.model_validate({"checkpoint_layers": layers})
    written = export_plan(name, plan, LLAMA, global_batch=1, seq_len=SEQ_LEN)
    assert any(said in sentence for sentence in written.notes)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_what_changes_the_plan_is_told_from_what_does_not(name: str) -> None:
    """A chunked loss is outpace's own; data and learning rate are no part of any plan."""
    plain, chunked = (
        export_plan(name, Plan(loss=loss), LLAMA, global_batch=1, seq_len=SEQ_LEN)  # type: ignore[arg-type]
        for loss in ("auto", "chunked")
    )
    assert plain.differences == () != plain.notes
    described, known = chunked.written_plan(Plan(loss="chunked"))
    assert known and described == Plan(loss="chunked" if name == "outpace" else "auto")
    assert plain.commented == (name not in ("deepspeed", "fsdp", "outpace"))


@pytest.mark.parametrize("name", ["fsdp", "accelerate"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_what_gradients_of_shards_are_reduced_in_is_said(name: str, precision: str) -> None:
    """accelerate's configuration of this plan is DeepSpeed's, where HSDP's is FSDP's."""
    values = {"strategy": "hsdp", "dp_replicate": 2, "dp_shard": 2, "precision": precision}
    request = ExportRequest(Plan.parse(values, "test"), LLAMA, 4, SEQ_LEN)
    said = [s for s in emitted(name, request).notes if "reduce_dtype=torch.float32" in s]
    assert bool(said) == (precision == "bf16")


def test_a_small_batch_leaves_ranks_out() -> None:
    plan = Plan(strategy="gpipe", pp=4, pp_microbatches=1)
    request = ExportRequest(plan, LLAMA, 2, SEQ_LEN)
    assert fold_pipeline(request, 4) == (2, 1, 1)
    assert any("2 of each 4 ranks are left out" in s for s in emitted("fsdp", request).notes)


def test_hosts_have_up_to_eight_ranks() -> None:
    assert [hosts(ranks) for ranks in (1, 8, 12, 16, 17, 4096)] == [
        (1, 1),
        (1, 8),
        (2, 6),
        (2, 8),
        (17, 1),
        (512, 8),
    ]


def test_mistakes_get_sentences() -> None:
    with pytest.raises(BadInputError, match=r"unknown format 'deepsped'.*deepspeed"):
        export_plan("deepsped", Plan(), LLAMA, global_batch=1, seq_len=SEQ_LEN)
    with pytest.raises(BadInputError, match="not a multiple"):
        export_plan("fsdp", Plan(micro_batch=4), LLAMA, global_batch=6, seq_len=SEQ_LEN)
    with pytest.raises(BadInputError, match="stages"):
        deep = Plan(strategy="gpipe", pp=32, pp_microbatches=32)
        export_plan("torchtitan", deep, LLAMA, global_batch=32, seq_len=SEQ_LEN)


def test_a_plan_shares_out_no_experts_by_itself() -> None:
    assert Plan().ep == 1
