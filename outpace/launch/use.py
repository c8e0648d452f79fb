"""A finished run, put to use: text from it, and its loss on other data."""

from pathlib import Path

from outpace.data.corpus import Corpus, prepare
from outpace.data.loader import Loader
from outpace.data.samples import make_dataset
from outpace.data.tokenizer import Tokenizer, load_tokenizer
from outpace.interop.huggingface import spec_from_hf
from outpace.launch.materials import load_model
from outpace.launch.resolve import DEFAULT_SEQ_LEN, resolve_device
from outpace.nn import generate as generation
from outpace.nn.loss import LanguageModelObjective
from outpace.nn.transformer import Transformer
from outpace.probe.machine import usable_cores
from outpace.records.errors import BadInputError
from outpace.records.measurement import Evaluation
from outpace.records.ranks import Ranks
from outpace.records.run import RunRecord
from outpace.records.settings import TrainSettings
from outpace.train.evaluate import evaluate as measure
from outpace.train.precision import make_mixed
from outpace.train.run_dir import RUN_FILE


def generate(
    run: Path,
    prompt: str,
    *,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    seed: int,
    device: str,
) -> str:
    """Text that the run's model writes after `prompt`, the prompt included.

    Raises BadInputError when the run has no model, no tokenizer, or one that cannot write.
    """
    model, tokenizer = _open(run, device)
    ids = generation.generate(
        model,
        tokenizer.encode(prompt) or [tokenizer.eos_id],
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
        stop_id=tokenizer.eos_id,
    )
    return tokenizer.decode(ids)


def evaluate(
    run: Path,
    data: tuple[str, ...] | None,
    *,
    batches: int | None,
    batch_size: int | None,
    device: str,
    text_field: str | None = None,
) -> Evaluation:
    """Loss, perplexity and tokens/s of the run's model.

    `data` defaults to what the run held out; `batches` to all of it. Raises BadInputError.
    """
    model, tokenizer = _open(run, device)
    record = _record(run)
    settings = record.settings if record else TrainSettings()
    settings = settings.model_copy(update={"text_field": text_field or settings.text_field})
    dataset = make_dataset(
        _held_out(data, settings, tokenizer),
        (record.seq_len if record else None) or min(DEFAULT_SEQ_LEN, model.spec.max_positions),
        objective=model.spec.objective,
        seed=settings.seed,
        document_attention=settings.document_attention,
        tokenizer=tokenizer,
    )
    target = next(model.parameters()).device
    mixed = make_mixed(record.plan.precision if record else "fp32", target, True)
    size = min(batch_size or settings.global_batch, len(dataset))
    steps = len(dataset) // size
    loader = Loader(
        dataset,
        seed=settings.seed,
        global_batch=size,
        micro_batch=size,
        rank=0,
        data_parallel=1,
        start_step=0,
        total_steps=min(batches or steps, steps),
        workers=0,
        pin_memory=False,
        device=target,
    )
    return measure(
        LanguageModelObjective(model, "auto", mixed.dtype),
        loader,
        step=record.total_steps if record else 0,
        mixed=mixed,
        device=target,
        group=None,
    )


def _held_out(
    data: tuple[str, ...] | None, settings: TrainSettings, tokenizer: Tokenizer
) -> Corpus:
    """The data named, whole; else what the run held out."""
    named = data or settings.eval_data
    return prepare(
        named or settings.data,
        weights=None,
        text_field=settings.text_field,
        tokenizer=tokenizer,
        cache_dir=settings.cache_dir or Path.home() / ".cache" / "outpace",
        split="all" if named else "validation",
        eval_fraction=settings.eval_fraction,
        processes=usable_cores(),
    )


def _open(run: Path, device: str) -> tuple[Transformer, Tokenizer]:
    """The exported model of a run directory, or any Hugging Face directory."""
    folder = run / "model" if (run / RUN_FILE).is_file() else run
    if not (folder / "config.json").is_file():
        raise BadInputError(
            f"{run} holds no finished model (no config.json in {folder}). Name the directory of a "
            "run that reached its end, or a Hugging Face directory."
        )
    spec = spec_from_hf(folder)
    model = load_model(folder, spec)
    settings = TrainSettings.parse({"device": device}, "--device")
    return model.to(resolve_device(settings, Ranks())).eval(), load_tokenizer(str(folder))


def _record(run: Path) -> RunRecord | None:
    path = run / RUN_FILE
    return RunRecord.load(path) if path.is_file() else None
