"""The record of a job: its run.json, and what is reported before the first step."""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path

import psutil
import torch

from outpace.data.file_kinds import form_of
from outpace.data.hashes import READING
from outpace.data.samples import TokenDataset
from outpace.interop.transformers_trainer_logs import read_trainer_rate
from outpace.interop.user_file import code_fingerprint
from outpace.interop.weight_files import fingerprint
from outpace.jobs.defaults import note_passes
from outpace.jobs.inputs.tasks import name_adapters
from outpace.jobs.train.context import Job
from outpace.nn.torch_versions import VERSION
from outpace.probing.doctor.gpus import read_visible
from outpace.probing.hardware.versions import changes, commit, variables, versions
from outpace.records.errors import BadInputError
from outpace.records.measurement import WARMUP_STEPS, RunInfo
from outpace.records.model import ModelSpec
from outpace.records.plan import POWERSGD_LEAST_START, Plan
from outpace.records.precisions import COMPUTES_IN_FP16, MEANS, PURE
from outpace.records.run import RUN_FILE, RunRecord
from outpace.records.settings import TrainSettings
from outpace.records.strategies import TRAITS, idle_strategy_note
from outpace.records.units import show_count, show_seconds
from outpace.records.version import __version__
from outpace.training.accounting import OPENING_STEPS
from outpace.training.callbacks import notify
from outpace.training.precision import float8_hints, shape_hints
from outpace.training.run_dir import RunDir
from outpace.training.run_lock import lock_run
from outpace.training.schedule import learning_rate, warmup_steps

# Settings that may change on resume although they affect what the run learns or evaluates.
_MAY_CHANGE = (
    "lr", "warmup", "schedule", "min_lr_ratio", "clip", "weight_decay", "eval_batches",
)  # fmt: skip
# Fields of a plan that change what is computed.
_INEXACT = ("precision", "compress_gradients", "powersgd_rank")
# Fields of a plan that change which random numbers a sample gets.
_LAYOUT = ("micro_batch", "world_size", "strategy", "tp", "cp", "pp", "pp_microbatches")
_LARGE_RATE = 0.1  # for AdamW and similar optimizers, whose updates are about this large
# In fewer steps than this, weights hardly move if their earlier rate was at least this many times
# higher.
_FEW_STEPS, _MUCH_HIGHER = 1_000, 5.0
_TOY_PARAMETERS = 1_000_000
_DEV = Path("/dev")  # contains a file per GPU from NVIDIA's driver, and one for all GPUs from AMD's
_HIDING = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
# Up to this many passes, repeated data is about as good as new data (Muennighoff et al., arXiv
# 2305.16264).
_USEFUL_PASSES = 4


def claim(job: Job, record: RunRecord, stack: ExitStack) -> RunRecord:
    """Lock the run's directory on rank 0, check that it can be used, and return the run's record.

    No other training can use the directory until `stack` is closed. A resumed run's record is not
    written yet, since later checks may fail. It keeps its original command and the origins of its
    settings, so that the run can be repeated.
    """
    if not job.settings.resume:
        job.run_dir.require_free()
        job.run_dir.begin(record)
        stack.enter_context(lock_run(job.run_dir.path, 0.0))
        return record
    job.run_dir.require_run()  # also checks that no link leads out of the folder
    # Ranks from before a restart hold the lock until they notice, within this limit, that others
    # are gone.
    stack.enter_context(
        lock_run(
            job.run_dir.path, job.settings.comm_timeout_s,
            lambda sentence: notify(job.callbacks, "on_hint", sentence),
        )
    )  # fmt: skip
    earlier = job.run_dir.require_run()
    _require_same_inputs(earlier, record, job.run_dir)
    _require_same_weight_storage(earlier.plan, record.plan, job.run_dir)
    resumed = {"at": record.started, "command": list(record.command), "ranks": job.plan.world_size}
    kept = {name: earlier.origins.get(name, where) if where == RUN_FILE else where
            for name, where in record.origins.items()}  # fmt: skip
    return record.model_copy(
        update={
            "started": earlier.started, "command": earlier.command, "origins": kept,
            "resumes": (*earlier.resumes, resumed),
        }
    )  # fmt: skip


def _require_same_inputs(earlier: RunRecord, now: RunRecord, run_dir: RunDir) -> None:
    code = (earlier.model_code, now.model_code)
    template = " (its rows, or their text by the chat template)" * (now.settings.task == "chat")
    changed = [
        what
        for what, was, is_now in (
            (_describe_model_change(earlier.model, now.model), earlier.model, now.model),
            ("the code of your model", *(code if all(code) else (None, None))),
            ("the tokenizer", earlier.tokenizer, now.tokenizer),
            (f"the training data{template}", earlier.train_data, now.train_data),
            (f"the validation data{template}", earlier.eval_data, now.eval_data),
            ("the adapters' base model", earlier.base_weights, now.base_weights),
        )
        if was != is_now
    ]
    if not changed:
        return
    why, remedy = f"{changed[0]} has changed since it started", "Restore the original"
    of_data = changed[0].startswith(("the training data", "the validation data"))
    if of_data and earlier.reading != now.reading:
        of = f" (commit {earlier.commit[:8]})" if earlier.commit else ""
        why += (
            ", or this version of outpace reads it differently from the one that started the "
            f"run{of}"
        )
        remedy += ", finish the run with that version"
    raise BadInputError(
        f"the run in {run_dir.path} cannot be resumed: {why}. {remedy}, or start another run from "
        f"its weights with --model {run_dir.path}."
    )


def _describe_model_change(was: ModelSpec | None, now: ModelSpec | None) -> str:
    if was is None or now is None:
        return "the model"
    earlier, later = was.model_dump(), now.model_dump()
    changes = [
        f"{name} was {value}, is now {later[name]}"
        for name, value in earlier.items()
        if later[name] != value
    ]
    return f"the model ({'; '.join(changes)})"


def changed_settings(earlier: RunRecord, job: Job, start_step: int) -> str | None:
    """Describe which settings change when a run is resumed, and how the learning rate changes."""
    before, now = earlier.settings, job.settings
    changes = [
        f"--{name.replace('_', '-')} was {getattr(before, name)}, is {getattr(now, name)}"
        for name in _MAY_CHANGE
        if getattr(before, name) != getattr(now, name)
    ]
    if earlier.total_steps != job.total_steps:
        changes.insert(0, f"the run had {earlier.total_steps} steps, now has {job.total_steps}")
    changes += [
        f"{name} was {getattr(earlier.plan, name)}, is now {getattr(job.plan, name)}"
        for name in _INEXACT
        if getattr(earlier.plan, name) != getattr(job.plan, name)
    ]
    if _uses_dropout(job) and any(
        getattr(earlier.plan, n) != getattr(job.plan, n) for n in _LAYOUT
    ):
        changes.append("micro-batches or ranks differ, so dropout draws other masks")
    for name, version in (("outpace", __version__), ("torch", VERSION)):
        if earlier.versions.get(name, version) != version:
            changes.append(f"{name} was {earlier.versions[name]}, is {version}")
    if not changes:
        return None
    rates = [
        learning_rate(settings, start_step, steps)
        for settings, steps in ((before, earlier.total_steps), (now, job.total_steps))
        if settings.lr is not None
    ]
    said = f"resumed with other settings: {'; '.join(changes)}"
    if len(rates) == 2 and not math.isclose(*rates, rel_tol=1e-6):
        said += (
            f". The learning rate of step {start_step + 1} would have been {rates[0]:.3g}, and "
            f"is {rates[1]:.3g}"
        )
    return said


def _uses_dropout(job: Job) -> bool:
    spec, plan = job.inputs.spec, job.plan
    adapters = job.settings.lora_dropout if plan.lora_rank is not None else 0
    return (0 if spec is None else spec.dropout) > 0 or adapters > 0


def _require_same_weight_storage(earlier: Plan, now: Plan, run_dir: RunDir) -> None:
    was, is_now = earlier.precision, now.precision
    if was != is_now and {was, is_now} & set(PURE):
        raise BadInputError(
            f"--precision {is_now}: the run in {run_dir.path} was trained in {was}, but one of "
            "these precisions keeps weights only in 16 bits, and the other keeps them in fp32. "
            "Leave out --precision to resume, or start another run from its weights with --model "
            f"{run_dir.path}."
        )


def _find_base_weights(job: Job) -> Path | None:
    """Return the directory of the adapters' base weights; None if they are random."""
    opened = job.inputs.opened
    assert opened is not None
    return opened.weights if job.inputs.starts_from_stored(job.settings) else None


def _base_fingerprint(job: Job) -> str | None:
    base = None if job.plan.lora_rank is None else _find_base_weights(job)
    return None if base is None else fingerprint(base)


def run_record(job: Job, threads: int, parameters: int) -> RunRecord:
    """Return the record of everything that determines the run."""
    inputs, (head, dirty) = job.inputs, commit()
    return RunRecord(
        outpace=__version__,
        command=tuple(job.context.command),
        settings=job.settings,
        origins=dict(job.context.origins),
        plan=job.plan,
        identity=job.plan.identity(job.settings.global_batch),
        model=inputs.spec,
        model_code=None if inputs.custom_model is None else code_fingerprint(job.settings.model),
        parameters=parameters,
        total_steps=job.total_steps,
        seq_len=inputs.seq_len,
        tokenizer=inputs.tokenizer.fingerprint if inputs.tokenizer else None,
        train_data=inputs.train_fingerprint,
        eval_data=inputs.eval_fingerprint,
        reading=READING,
        base_weights=_base_fingerprint(job),
        versions=versions(),
        commit=head,
        uncommitted_changes=dirty,
        changes=changes() if dirty else None,
        machine=job.machine,
        device=str(job.device.type),
        threads=threads,
        environment=variables(
            {k: v for k, v in os.environ.items() if k not in job.groups.variables}
        ),
        load_before=psutil.getloadavg()[0],
        started=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _speed_hints(job: Job, parameters: int) -> list[str]:
    hints = []
    if job.device.type != "cpu":  # CPU matmuls do not need such sizes
        hints += shape_hints(job.plan, job.inputs.spec, job.inputs.seq_len or 8)
    hints += float8_hints(job.plan) + _unused_gpu_hints(job)
    slow = job.plan.precision in COMPUTES_IN_FP16 and job.device.type == "cpu"
    if slow and parameters > _TOY_PARAMETERS:
        hints.append(
            "fp16 on a CPU takes over 100 times as long as bf16. Use it only to check "
            "correctness, or use --precision bf16"
        )
    return hints


def _unused_gpu_hints(job: Job) -> list[str]:
    if job.device.type != "cpu" or job.settings.device != "auto":
        return []
    of_amd = torch.version.hip is not None
    maker = "an AMD" if of_amd else "an NVIDIA"
    count = len([*_DEV.glob("kfd" if of_amd else "nvidia[0-9]*")])
    if not count:
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    hiding = [f"{name}={os.environ[name]}" for name in _HIDING if name in os.environ]
    if of_amd and hiding:
        # ROCm, "GPU isolation techniques".
        why = (
            f"{' '.join(hiding)} hides them (set only one of {', '.join(_HIDING)}: the second and "
            "third count only the GPUs that the first leaves)"
        )
    elif of_amd:
        why = "`rocm-smi` shows whether the driver sees any GPU"
    elif torch.version.cuda is None:
        why = f"this torch ({VERSION}) is built without CUDA"
    elif visible is not None and not read_visible(visible.split(","), count):
        why = f"CUDA_VISIBLE_DEVICES={visible} hides them"
    else:
        why = "`outpace doctor` shows whether the driver sees any GPU"
    return [
        f"this host has {maker} GPU, but torch sees none, so the run is on the CPU: {why}. Use "
        "--device cpu if that is intended"
    ]


def _ineffective_setting_hints(
    settings: TrainSettings, plan: Plan, origins: Mapping[str, str]
) -> Iterator[str]:
    plain = all(Path(one).is_file() and form_of(Path(one)) == "text" for one in settings.data)
    alone = plan.world_size == 1 and plan.compress_gradients != "none"
    cases = (
        ("min_lr_ratio", settings.schedule == "constant", "schedule constant keeps --lr"),
        ("beta1", settings.optimizer == "adafactor", "adafactor has no first moment"),
        ("beta2", settings.optimizer == "sgd", "sgd has no second moment"),
        (
            "beta2",
            settings.optimizer == "adafactor",
            "adafactor's decay rate changes with the steps",
        ),
        ("eval_every", settings.eval_batches == 0, "--eval-batches is 0"),
        ("eval_fraction", settings.eval_data is not None, "--eval-data is given"),
        ("text_field", settings.task == "pretrain" and plain, "the data have no fields"),
        ("powersgd_rank", plan.compress_gradients != "powersgd", "gradients are not compressed"),
        ("powersgd_start", plan.compress_gradients != "powersgd", "gradients are not compressed"),
        ("compress_gradients", alone, "one process sends no gradients"),
        ("bucket_mib", not TRAITS[plan.strategy].buckets, f"{plan.strategy} has no buckets"),
        ("offload_dir", "disk" not in _offloads(plan), "nothing is offloaded to a disk"),
        ("save_every", settings.measure_only, "--measure-only saves nothing"),
        ("keep", settings.measure_only, "--measure-only saves nothing"),
    )
    for name, is_idle, why in cases:
        origin = origins.get(name, "default")
        # A plan sets all its fields, so the user may not have chosen them.
        if is_idle and origin not in ("default", RUN_FILE) and not origin.startswith("plan "):
            yield f"--{name.replace('_', '-')} changes nothing in this run: {why}"


def _offloads(plan: Plan) -> tuple[str, str, str]:
    return plan.offload_activations, plan.offload_parameters, plan.offload_optimizer


def _unlikely_setting_hints(settings: TrainSettings, plan: Plan) -> list[str]:
    hints = []
    if (alone := idle_strategy_note(settings.strategy, plan.world_size)) is not None:
        hints.append(f"{alone}. Start several with --nproc N or torchrun")
    if settings.lr is not None and settings.lr > _LARGE_RATE and settings.optimizer != "sgd":
        hints.append(
            f"--lr {settings.lr:g} is large: each step changes weights by about that much, and "
            f"rates above {_LARGE_RATE:g} hardly ever work; 1e-5 to 1e-3 are usual"
        )
    return hints


def _low_learning_rate_hints(job: Job, record: RunRecord, start_step: int) -> list[str]:
    """Warn if a few steps at the default rate will barely move weights trained at a high rate.

    Without a recorded rate, there is no warning: most published weights ended at a low rate, for
    which the default is right.
    """
    settings = job.settings
    chosen = record.origins.get("lr", "default") != "default" or settings.lora_rank is not None
    if start_step or chosen or not job.inputs.starts_from_stored(settings):
        return []
    found, now = _recorded_learning_rate(job), settings.lr or 0.0
    if found is None or job.total_steps > _FEW_STEPS or found[1] < _MUCH_HIGHER * now:
        return []
    where, before = found
    return [
        f"the weights are from {where}, which was trained at a learning rate of {before:g}. This "
        f"run uses {now:g}, the default for stored weights, for {job.total_steps:,} steps: its "
        f"loss may barely move. Set --lr, up to {before:g}, to learn faster"
    ]


def _recorded_learning_rate(job: Job) -> tuple[Path, float] | None:
    opened = job.inputs.opened
    named = (opened.folder if opened is not None else None) or Path(job.settings.model)
    for run in (named, named.parent):
        with suppress(BadInputError):
            before = RunDir(run).require_run().settings
            return None if before.lora_rank is not None else (run, before.lr or 0.0)
    rate = read_trainer_rate(named)
    return None if rate is None else (named, rate)


def run_info(
    job: Job, record: RunRecord, trained: int, start_step: int, placement: Sequence[str]
) -> RunInfo:
    """Describe what is about to be trained, with hints on possible improvements."""
    parameters = record.parameters
    hints = [*job.inputs.hints, *_repetition_hints(job), *placement]
    hints += _speed_hints(job, parameters) + _unlikely_setting_hints(job.settings, job.plan)
    hints += _ineffective_setting_hints(job.settings, job.plan, record.origins)
    hints += _low_learning_rate_hints(job, record, start_step)
    if job.plan.lora_rank is not None:
        form = "frozen" if job.plan.base == "fp32" else "frozen in 4 bits"
        base = _find_base_weights(job)
        weights = "the random weights" if base is None else f"the weights in {base}"
        hints.append(
            f"LoRA trains {show_count(trained)} of {show_count(parameters)} parameters "
            f"({trained / parameters:.2%}); {weights} stay {form}"
        )
        width = None if job.inputs.spec is None else job.inputs.spec.hidden
        if width is not None and job.plan.lora_rank > width:
            asked = name_adapters(job.plan.lora_rank, record.origins)
            hints.append(
                f"{asked} is above the model's width of {width}: its adapters cannot express more "
                f"than those of rank {width}. 8 to 64 are usual"
            )
    level = job.settings.precision
    if level is not None and level in MEANS:
        hints.append(
            f"--precision {level} stands for {job.plan.precision} with {job.plan.optimizer}: "
            f"{MEANS[level]}"
        )
    warmup = warmup_steps(job.settings, job.total_steps)
    if warmup > job.total_steps:
        hints.append(f"--warmup {warmup} is longer than the run's {job.total_steps} steps")
    if job.plan.compress_gradients == "powersgd" and start_step:
        hints.append(
            "checkpoints do not contain the gradient error that PowerSGD carries over, so after "
            f"resuming, it starts again after at least {POWERSGD_LEAST_START} steps that "
            "all-reduce whole gradients"
        )
    if job.device.type == "cpu" and "cpu" in (
        job.plan.offload_parameters, job.plan.offload_optimizer
    ):  # fmt: skip
        hints.append(
            "on a CPU everything is already in host memory, so offloading to it has no benefit "
            "and costs memory. --offload disk frees some"
        )
    if job.ranks.local_world_size % job.plan.tp:
        hints.append(
            f"tp {job.plan.tp} does not divide the {job.ranks.local_world_size} ranks of a "
            "host, so some tensor-parallel groups span hosts, and every layer waits for the network"
        )
    expected_s, left = job.settings.expect_step_time_s, job.total_steps - start_step
    if expected_s is not None and left <= WARMUP_STEPS:
        hints.append(
            f"a step should take {show_seconds(expected_s)}, which cannot be checked: the "
            f"first {WARMUP_STEPS} steps are warm-up, and {left} are left. Use --steps "
            f"{start_step + WARMUP_STEPS + OPENING_STEPS} or more"
        )
    name = job.device.type
    if job.device.type == "cuda":
        name = job.machine.devices[job.device.index or 0].name
    return RunInfo(
        run=str(job.run_dir.path),
        plan=job.plan,
        identity=record.identity,
        model=job.inputs.name,
        parameters=parameters,
        device=name,
        total_steps=job.total_steps,
        start_step=start_step,
        hosts=math.ceil(job.ranks.world_size / job.ranks.local_world_size),
        hints=tuple(hints),
    )


def _repetition_hints(job: Job) -> list[str]:
    data, batch = job.inputs.train_data, job.settings.global_batch
    hints = []
    # much larger batches were already reported
    if batch > len(data) and note_passes(batch, len(data)) is None:
        hints.append(
            f"the global batch of {batch} is larger than the data's {len(data)} samples, so a "
            f"step uses each of them up to {math.ceil(batch / len(data))} times"
        )
    if isinstance(data, TokenDataset) and job.settings.data_weights is not None:
        passes = data.passes(job.total_steps * batch)
        hints += [
            f"{source} is repeated {count:,.0f} times because of its weight; beyond "
            f"{_USEFUL_PASSES} times, new data helps more"
            for source, count in zip(job.settings.data, passes, strict=True)
            if count > _USEFUL_PASSES
        ]
    return hints


def with_earlier_precision(settings: TrainSettings) -> TrainSettings:
    """Return a resumed run's settings with its earlier precision, whatever the default here."""
    if not settings.resume or settings.precision is not None or settings.out is None:
        return settings
    earlier = RunDir(settings.out).require_run()
    return settings.model_copy(update={"precision": earlier.plan.precision})
