"""What is written for tools that can be installed here is loaded by these tools themselves."""

import dataclasses
import json
import re
import shlex
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import given

sys.path.insert(0, str(Path(__file__).parent))

from export_plans import LLAMA, SEQ_LEN, filled, requests

from outpace.interop.export import ExportRequest, export_plan
from outpace.records.plan import Plan

FEW = hypothesis.settings(max_examples=60)


def write_export(name: str, request: ExportRequest, folder: Path) -> tuple[Path, str]:
    """The file of a format, and its command."""
    found = export_plan(
        name,
        request.plan,
        request.spec,
        global_batch=request.global_batch,
        seq_len=request.seq_len,
    )
    path = folder / found.file_name
    path.write_text(found.text, encoding="utf-8")
    return path, found.command


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emitted")


@given(request_=requests())
@FEW
def test_accelerate_launches_it(request_: ExportRequest, folder: Path) -> None:
    """Its launcher reads the file as it does before it starts processes."""
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    path, command = write_export("accelerate", request_, folder)
    config = load_config_from_file(str(path))
    assert config.num_processes == request_.workers
    command = re.sub(r'"\$\{MACHINE_RANK:\?[^}]*\}"', "0", command)
    words = shlex.split(command.replace(path.name, str(path)))
    asked = launch_command_parser().parse_args(words[words.index("launch") + 1 :])
    known = set(vars(asked))
    for table in ("fsdp_config", "deepspeed_config", "megatron_lm_config", "parallelism_config"):
        assert set(getattr(config, table)) <= known
    arguments, _, _ = _validate_launch_command(asked)
    assert arguments.num_processes == request_.workers
    assert arguments.use_fsdp == (config.distributed_type.value == "FSDP")
    assert arguments.use_deepspeed == (config.distributed_type.value == "DEEPSPEED")
    assert arguments.use_megatron_lm == (config.distributed_type.value == "MEGATRON_LM")


@given(request_=requests())
@FEW
def test_accelerate_builds_its_plugins(request_: ExportRequest, folder: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import DynamoBackend, FullyShardedDataParallelPlugin

    path, _ = write_export("accelerate", request_, folder)
    config = load_config_from_file(str(path))
    plan = request_.plan
    sizes = {
        name.removeprefix("parallelism_config_"): size
        for name, size in config.parallelism_config.items()
        if name.endswith("_size")
    }
    if sizes:
        built = ParallelismConfig(**sizes)
        assert built.total_size == request_.workers
        assert built.data_parallel_size == plan.data_parallel
    if config.fsdp_config:
        values = {name.removeprefix("fsdp_"): v for name, v in config.fsdp_config.items()}
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=values["version"],
            reshard_after_forward=values["reshard_after_forward"],
            cpu_offload=values["offload_params"],
            activation_checkpointing=values["activation_checkpointing"],
            auto_wrap_policy=values["auto_wrap_policy"].lower(),
            state_dict_type=values["state_dict_type"],
        )
        assert plugin.fsdp_version == 2
        assert not sizes or built.dp_shard_enabled or built.cp_enabled
    if config.dynamo_config:
        assert DynamoBackend(config.dynamo_config["dynamo_backend"]) == DynamoBackend.INDUCTOR


@given(request_=requests())
@FEW
def test_the_trainer_takes_it(request_: ExportRequest, folder: Path) -> None:
    from accelerate.parallelism_config import ParallelismConfig
    from transformers import HfArgumentParser, TrainingArguments

    path, command = write_export("fsdp", request_, folder)
    values: dict[str, Any] = json.loads(path.read_text())
    # No device with bf16 or fp16 is here; the Trainer asks for one as it is told.
    asked = {**json.loads(path.read_text()), "bf16": False, "fp16": False, "use_cpu": True}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.compile's TF32, and of devices
        (arguments,) = HfArgumentParser(TrainingArguments).parse_dict(asked)
    assert set(values) <= {field.name for field in dataclasses.fields(TrainingArguments)}
    assert arguments.gradient_accumulation_steps == values["gradient_accumulation_steps"]
    if values.get("fsdp"):
        assert arguments.fsdp_plugin_args["fsdp_version"] == 2
        known = {"version", "reshard_after_forward", "cpu_offload", "activation_checkpointing"}
        known |= {"auto_wrap_policy", "transformer_layer_cls_to_wrap", "state_dict_type"}
        assert set(values["fsdp_config"]) <= known
    sizes = re.findall(r"PARALLELISM_CONFIG_(\w+_SIZE)=(\d+)", command)
    if sizes:
        ParallelismConfig(**{name.lower(): int(size) for name, size in sizes})


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_trainer_takes_16_bits(precision: str, folder: Path) -> None:
    from transformers import TrainingArguments

    plan = Plan.model_validate({"strategy": "zero3", "dp_shard": 2, "precision": precision})
    path, _ = write_export("fsdp", ExportRequest(plan, LLAMA, 2, SEQ_LEN), folder)
    arguments = TrainingArguments(**json.loads(path.read_text()), use_cpu=True)
    assert arguments.mixed_precision == precision


def filled_by_the_trainer(path: Path, command: str, world_size: int) -> dict[str, Any]:
    """The JSON as transformers' Trainer hands it to DeepSpeed, with the command's arguments."""
    from transformers import HfArgumentParser, TrainingArguments
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    @dataclasses.dataclass
    class Arguments(TrainingArguments):
        """Of a rank among others."""

        @property
        def world_size(self) -> int:  # type: ignore[override]
            return world_size

    words = shlex.split(command)
    words = words[words.index("train.py") + 1 :]
    assert words[:2] == ["--deepspeed", path.name]
    # No device with bf16 or fp16 is here; the Trainer asks for one as it is told.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.compile's TF32, and of devices
        half = words.index("--fp16") if "--fp16" in words else None
        given = words[2:] if half is None else words[2:half] + words[half + 2 :]
        (arguments,) = HfArgumentParser(Arguments).parse_args_into_dataclasses(
            [*given, "--output_dir", "trainer_output", "--learning_rate", "3e-4",
             "--weight_decay", "0.05", "--use_cpu", "True"]
        )  # fmt: skip
    arguments.fp16 = half is not None
    config = HfTrainerDeepSpeedConfig(json.loads(path.read_text()))
    config.trainer_config_process(arguments)
    assert config.mismatches == []
    values: dict[str, Any] = config.config
    return values


@given(request_=requests())
@FEW
def test_deepspeed_parses_it(request_: ExportRequest, folder: Path) -> None:
    pytest.importorskip(
        "deepspeed", reason="deepspeed is not installed: pip install -c constraints.txt '.[emit]'"
    )
    import deepspeed.comm
    from deepspeed.runtime.config import DeepSpeedConfig

    path, command = write_export("deepspeed", request_, folder)
    plan = request_.plan
    values = filled_by_the_trainer(path, command, plan.data_parallel)
    assert values["optimizer"]["params"]["lr"] == 3e-4
    assert values["optimizer"]["params"]["weight_decay"] == 0.05
    assert "auto" not in json.dumps(values).replace("autotp_size", "").replace("autoep_size", "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deepspeed.comm, "get_rank", lambda: 0)
        config = DeepSpeedConfig(values, mpu=_Shares(plan.data_parallel))
    assert config.train_batch_size == request_.global_batch
    assert config.world_size == plan.data_parallel
    stage = config.zero_config.stage
    assert stage >= min(request_.stage, 1 if plan.pp > 1 else 3)
    assert config.zero_config.overlap_comm == (stage > 0)
    assert config.zero_config.gather_16bit_weights_on_model_save == (stage == 3)
    assert config.tensor_parallel_config.autotp_size in (0, plan.tp)
    assert config.bfloat16_config.enabled == (plan.precision[:4] in ("bf16", "fp8"))
    assert config.float16_config.enabled == plan.precision.startswith("fp16")
    assert config.optimizer_name
    # Keys that it does not know it passes over: they are looked for in its sources.
    sources = Path(deepspeed.__file__).parent / "runtime"
    names = ("config.py", "constants.py", "precision_config.py")
    names += ("activation_checkpointing/config.py", "tensor_parallel/config.py")
    known = "".join((sources / name).read_text() for name in names)
    for key in [*values, *values.get("activation_checkpointing", {})]:
        assert f'"{key}"' in known or f"'{key}'" in known or key == "data_parallel_size"
    fields = type(config.zero_config).model_fields
    aliases = {field.alias for field in fields.values()}
    assert set(values["zero_optimization"]) <= {*fields, *aliases}


@given(request_=requests())
@FEW
def test_torchtitan_parses_it(request_: ExportRequest, folder: Path) -> None:
    """Its ConfigManager reads the file as it does at the start, once a person has filled it in."""
    manager = pytest.importorskip(
        "torchtitan.config", reason="no torchtitan: pip install '.[emit]'", exc_type=ImportError
    )
    path, _ = write_export("torchtitan", request_, folder)
    words = ["--job.config_file", str(path)]
    with pytest.raises(tomllib.TOMLDecodeError):
        manager.ConfigManager().parse_args(words)
    path.write_text(filled(path.read_text()))
    config = manager.ConfigManager().parse_args(words)
    assert config.training.steps == 1000 and config.optimizer.lr == 3e-4
    assert config.lr_scheduler.warmup_steps == 100
    assert config.training.global_batch_size == request_.global_batch
    assert config.parallelism.tensor_parallel_degree == request_.plan.tp
    assert config.checkpoint.enable


def test_a_shell_stops_at_what_is_not_set(folder: Path) -> None:
    plan = Plan(strategy="zero1", dp_shard=16)
    path, command = write_export("megatron", ExportRequest(plan, LLAMA, 16, SEQ_LEN), folder)
    given: dict[str, str] = {}
    for name in re.findall(r"(\w+)=…", command):
        ended = subprocess.run(["sh", path], env=given, capture_output=True, text=True, check=False)
        assert ended.returncode == 2 and f"{name}: set it to" in ended.stderr
        given[name] = "1e-4"
    assert set(given) == {"HEAD_NODE", "DATA_PATH", "TOKENIZER", "LR", "TRAIN_ITERS",
                          "WARMUP_ITERS", "SAVE", "SAVE_INTERVAL"}  # fmt: skip
    started = path.read_text().replace("torchrun", "echo")
    ended = subprocess.run(["sh", "-c", started], env=given, capture_output=True, text=True,
                           check=True)  # fmt: skip
    assert "--lr 1e-4" in ended.stdout and "$" not in ended.stdout


@pytest.mark.parametrize("name", ["torchtitan", "nanotron", "accelerate", "fsdp", "deepspeed"])
def test_a_shell_stops_without_the_address_of_the_first_host(name: str, folder: Path) -> None:
    plan = Plan(strategy="ddp", dp_replicate=16)
    _, command = write_export(name, ExportRequest(plan, LLAMA, 16, SEQ_LEN), folder)
    names = re.findall(r"\$\{?(\w+)", command)
    assert bool(names) == (name != "deepspeed")  # its launcher has a file of hosts
    given: dict[str, str] = {}
    for name in names:
        ended = subprocess.run(
            ["sh", "-c", f": {command}"], env=given, capture_output=True, text=True, check=False
        )
        assert ended.returncode == 2 and f"{name}: set it to" in ended.stderr
        given[name] = "0"


def test_numbers_that_nobody_chose_are_in_no_file(folder: Path) -> None:
    """Neither learning rate, length nor weight decay; where a trainer needs one, it stops."""
    for name in ("torchtitan", "deepspeed", "megatron", "nanotron", "fsdp", "accelerate"):
        path, command = write_export(name, ExportRequest(Plan(), LLAMA, 1, SEQ_LEN), folder)
        text = path.read_text() + command
        for value in ("0.001", "1e-3", " 70", "mock", "c4_test"):
            assert value not in "".join(
                line for line in text.splitlines() if not line.startswith("#")
            ), (name, value)


class _Shares:
    """As many data-parallel ranks as a plan has, for a single process."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def get_data_parallel_world_size(self) -> int:
        return self._ranks
