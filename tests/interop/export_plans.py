"""Plans of all kinds, for what every format has to hold."""

from typing import Any

from hypothesis import strategies as st
from pydantic import ValidationError

from outpace.interop.export import ExportRequest
from outpace.records.axes import SPLITS
from outpace.records.model import ModelSpec
from outpace.records.plan import Plan

SEQ_LEN = 64
LLAMA = ModelSpec(
    family="llama", layers=16, hidden=64, heads=8, kv_heads=8, vocab=128, max_positions=128
)
SPECS = [
    LLAMA,
    LLAMA.model_copy(update={"layers": 18, "tied": True, "kv_heads": 4}),
    ModelSpec(family="gpt2", layers=17, hidden=64, heads=8, vocab=101, max_positions=64),
    ModelSpec(family="bert", layers=16, hidden=64, heads=8, vocab=101, max_positions=64),
    ModelSpec(
        family="qwen3", layers=16, hidden=64, heads=8, head_dim=16, vocab=101, max_positions=64
    ),
    ModelSpec(
        family="mistral",
        layers=16,
        hidden=64,
        heads=8,
        kv_heads=2,
        vocab=101,
        max_positions=64,
        sliding_window=32,
    ),
]
# Fields beside the axes and the batch, each with values that are not its default.
OPTIONS: dict[str, list[Any]] = {
    "sequence_parallel": [False],
    "precision": [
        "bf16",
        "bf16-master",
        "tf32",
        "fp16",
        "fp64",
        "bf16-pure",
        "fp16-master",
        "fp16-pure",
        "fp8",
    ],
    "checkpointing": ["full", "selective", "attention"],
    "checkpoint_every": [2, 3],
    "offload_activations": ["cpu", "disk"],
    "offload_parameters": ["cpu", "disk"],
    "offload_optimizer": ["cpu", "disk"],
    "empty_cache": [True],
    "compile": [True],
    "optimizer": ["adamw-foreach", "adamw-8bit", "adamw-bf16", "adafactor", "muon", "sgd"],
    "optimizer_in_backward": [True],
    "loss": ["chunked"],
    "compress_gradients": ["bf16", "powersgd"],
    "bucket_mib": [50],
    "lora_rank": [8],
}


def plan_or_none(values: dict[str, Any]) -> Plan | None:
    """The plan with these values, None where they do not go together."""
    try:
        return Plan(**values)
    except ValidationError:
        return None


@st.composite
def requests(draw: st.DrawFn) -> ExportRequest:
    """A plan of any strategy with a few options, a model and a batch that it divides."""
    strategy = draw(st.sampled_from(sorted(SPLITS)))
    values: dict[str, Any] = {"strategy": strategy, "micro_batch": draw(st.integers(1, 4))}
    for axis in SPLITS[strategy]:
        values[axis] = draw(st.sampled_from([1, 2, 4] if strategy == "3d" else [2, 3, 4]))
    if strategy == "ps":
        values["servers"] = draw(st.integers(1, 2))
    if values.get("pp", 1) > 1:
        values["pp_microbatches"] = 1 if strategy == "mp" else draw(st.integers(1, 3)) * 8
        if strategy == "3d":
            schedules = ["gpipe", "1f1b", "interleaved", "loopedbfs"]
            values["pp_schedule"] = draw(st.sampled_from(schedules))
    for name in draw(st.lists(st.sampled_from(sorted(OPTIONS)), max_size=3, unique=True)):
        values[name] = draw(st.sampled_from(OPTIONS[name]))
    plan = plan_or_none(values)
    while plan is None:  # the options do not go together: without the last
        values.popitem()
        plan = plan_or_none(values)
    batch = plan.samples_per_pass * plan.data_parallel * draw(st.integers(1, 3))
    return ExportRequest(plan, draw(st.sampled_from(SPECS)), batch, SEQ_LEN)


def filled(text: str) -> str:
    """A configuration with a person's numbers and names in the place of what stops a trainer."""
    for key, value in {
        "hf_assets_path": '"assets"', "dataset": '"c4"', "lr": "3e-4", "steps": "1000",
        "warmup_steps": "100",
    }.items():  # fmt: skip
        text = text.replace(f"\n{key} = SET_ME", f"\n{key} = {value}")
    for key, number in {
        "train_steps": "1000", "weight_decay": "0.1", "learning_rate": "3.0e-4",
        "lr_warmup_steps": "100", "min_decay_lr": "3.0e-5",
    }.items():  # fmt: skip
        text = text.replace(f" {key}: SET_ME", f" {key}: {number}")
    return text
