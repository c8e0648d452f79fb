"""The end of a run: exporting the model, generating a sample, and writing the result."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from outpace.data.chat import ChatFormat
from outpace.data.corpus import unigram_entropy
from outpace.data.padded_batches import PaddedDataset
from outpace.data.tokenizer import Tokenizer
from outpace.data.tokenizer_files import load_tokenizer
from outpace.interop.classifier import write_classifier
from outpace.interop.custom_model import write_custom_model
from outpace.interop.huggingface import write_model
from outpace.interop.origin import tokenizer_writer
from outpace.interop.peft import write_adapter
from outpace.jobs.inputs.model import DrawingPlace, initial_model
from outpace.jobs.train.context import Job
from outpace.nn.classifier import Classifier
from outpace.nn.generate import generate
from outpace.nn.transformer import Transformer
from outpace.parallel.rank_objects import gather_objects
from outpace.records.measurement import Evaluation, Measurement
from outpace.records.precisions import MASTERS
from outpace.training.callbacks import notify
from outpace.training.loop import Loop
from outpace.training.run_dir import RESULT_FILE

SAMPLE_PROMPT = "def "
PROMPT_TOKENS = 6
_SEARCHED_TOKENS = 128  # of held-out text, for a prompt of whole words


def finish(
    job: Job,
    loop: Loop,
    parameters: int,
    initial: Evaluation | None,
    final: Evaluation | None,
    train_s: float,
    seen: Mapping[str, Any],
) -> Measurement:
    """Export, sample and summarise. Rank 0 writes; all ranks get the measurement. Collective.

    `seen`: fields measured outside the loop. Once the measurement is written, the run is complete
    and a signal no longer ends it.
    """
    job.doing.begin("writing the model")
    if job.plan.precision in MASTERS:
        loop.layout.raise_weights(loop.optimizer)
    model = loop.layout.whole_model(job.ranks.rank == 0)
    parts = gather_objects(loop.ledger.median_parts(), job.groups.control)
    seen = {**seen, "parts_by_rank": tuple(parts)}

    def sum_up() -> Measurement:
        assert model is not None
        if final is not None:
            notify(job.callbacks, "on_eval", final, True)
        if not job.settings.measure_only:
            notify(job.callbacks, "on_stage", "writing the model")
            _write_trained_model(job, model)
        if loop.start_step == job.total_steps:
            before = job.run_dir.history().measurement
            if before is not None and before.steps == job.total_steps:
                notify(
                    job.callbacks,
                    "on_hint",
                    f"wrote {job.run_dir.model} again; no steps were left to run",
                )
                loop.stop.disarm()
                return before
        sample = _generate_sample(job, model)
        measurement = _build_measurement(job, loop, parameters, initial, final, train_s, sample)
        measurement = measurement.model_copy(update=seen)
        loop.stop.disarm()
        measurement.save(job.run_dir.path / RESULT_FILE)
        return measurement

    measurement = job.groups.run_on_rank_0(sum_up)
    loop.stop.disarm()
    job.groups.run_on_rank_0(lambda: notify(job.callbacks, "on_end", measurement))
    return measurement


def _write_trained_model(job: Job, model: nn.Module) -> None:
    tokenizer, directory = job.inputs.tokenizer, job.run_dir.model
    if isinstance(model, Classifier):
        assert tokenizer is not None and job.inputs.labels is not None
        written = _with_max_length(job, tokenizer)
        write_classifier(directory, model, model.state_dict(), job.inputs.labels, written.save)
        return
    if isinstance(model, Transformer):
        save, origin = _tokenizer_writer_and_origin(job)
        if job.plan.lora_rank is not None:
            base, ends = _base_weights_folder(job), _stop_ids(job)
            write_adapter(directory, model, job.plan, base, save, ends)
            return
        dtype = model.head_weight.dtype  # 16-bit weights stay 16-bit
        write_model(
            directory, model.spec, model.state_dict(), save, dtype, origin=origin,
            stop_ids=_stop_ids(job),
        )  # fmt: skip
        return
    save = None if tokenizer is None else tokenizer.save
    write_custom_model(directory, model, job.settings.model, save)


def _tokenizer_writer_and_origin(job: Job) -> tuple[Callable[[Path], None] | None, Path | None]:
    """Return a function that writes the run's tokenizer, and the folder whose settings to keep.

    Either may be None. A tokenizer's files are copied from its folder (converted if their format is
    old, and with the chat template used in training if they have none), and so are the model's if
    the data are already tokens. With any other tokenizer, nothing from the model's folder is kept.
    """
    tokenizer, opened = job.inputs.tokenizer, job.inputs.opened
    folder = None if opened is None else opened.folder
    own = None if opened is None else opened.tokenizer
    if tokenizer is None:
        return (None if own is None or folder is None else tokenizer_writer(own)), folder
    for source, origin in ((own, folder), (Path(job.settings.tokenizer or ""), None)):
        if source is None or not source.is_dir() or source == Path():
            continue
        theirs = load_tokenizer(str(source))
        if theirs.fingerprint == tokenizer.fingerprint:
            new = tokenizer.chat_template if theirs.chat_template is None else None
            return tokenizer_writer(source, new), origin
    return _with_max_length(job, tokenizer).save, None


def _with_max_length(job: Job, tokenizer: Tokenizer) -> Tokenizer:
    spec = job.inputs.spec
    return tokenizer if spec is None else tokenizer.with_length(spec.max_positions)


def _stop_ids(job: Job) -> tuple[int, ...]:
    """Return the ids of tokens that end a generated answer.

    Empty unless the model was trained to answer.
    """
    tokenizer = job.inputs.tokenizer
    if tokenizer is None or not isinstance(job.inputs.train_data, PaddedDataset):
        return ()
    return (ChatFormat(tokenizer).stop_id,)


def _base_weights_folder(job: Job) -> Path:
    """Return the directory of the adapters' base weights; random ones are written first."""
    opened, settings = job.inputs.opened, job.settings
    assert opened is not None and job.inputs.spec is not None
    if job.inputs.starts_from_stored(settings):
        assert opened.weights is not None
        return opened.weights
    drawn = initial_model(opened, job.inputs.spec, settings, DrawingPlace())
    write_model(job.run_dir.base, drawn.spec, drawn.state_dict(), None)
    return job.run_dir.base


def _sample_prompt(job: Job, tokenizer: Tokenizer) -> list[int]:
    """Return the prompt of the sample: the first held-out words, or `def ` for Python source."""
    corpus = job.inputs.eval_corpus
    if corpus is None or job.settings.data == ("stdlib",):
        return tokenizer.encode(SAMPLE_PROMPT) or [tokenizer.eos_id]
    stream = corpus.streams[0]
    ids = stream.read(0, min(_SEARCHED_TOKENS, len(stream))).tolist()
    begins = stream.document_starts is not None and stream.start in stream.document_starts
    while ids and ids[0] == tokenizer.eos_id:
        ids.pop(0)
        begins = True
    first = ids[: ids.index(tokenizer.eos_id)] if tokenizer.eos_id in ids else ids
    return whole_words(first, tokenizer, begins) or [tokenizer.eos_id]


def whole_words(ids: Sequence[int], tokenizer: Tokenizer, begins: bool) -> list[int]:
    """Return a few tokens that begin and end at word boundaries, if words start with spaces.

    `begins`: whether the first token starts a text, rather than continuing a word.
    """
    starts = [at for at, one in enumerate(ids) if tokenizer.decode([one])[:1].isspace()]
    begin = 0 if begins or not starts else starts[0]
    end = next((at for at in starts if at >= begin + PROMPT_TOKENS), begin + PROMPT_TOKENS)
    return list(ids[begin:end])


def _generate_sample(job: Job, model: nn.Module) -> str | None:
    tokenizer, count = job.inputs.tokenizer, job.settings.sample_tokens
    if tokenizer is None or count == 0 or not isinstance(model, Transformer):
        return None
    if not model.spec.causal:
        return None
    prompt, stop_ids = _sample_prompt(job, tokenizer), {tokenizer.eos_id}
    held_out = job.inputs.eval_data
    if isinstance(held_out, PaddedDataset):
        prompt = held_out.first_prompt()
        stop_ids.add(ChatFormat(tokenizer).stop_id)
    ids = generate(
        model,
        prompt,
        max_new_tokens=count,
        temperature=0.8,
        top_k=50,
        seed=job.settings.seed,
        stop_ids=stop_ids,
    )
    cut = len(ids) - len(prompt) == count
    return tokenizer.decode(ids, cut=cut).lstrip(" ")


def _build_measurement(
    job: Job,
    loop: Loop,
    parameters: int,
    initial: Evaluation | None,
    final: Evaluation | None,
    train_s: float,
    sample: str | None,
) -> Measurement:
    ledger = loop.ledger
    costs, step_time_s = ledger.costs, ledger.median_step_time_s()
    steps = job.total_steps - loop.start_step
    corpus = job.inputs.eval_corpus
    last = ledger.steady[-1] if ledger.steady else None

    def fraction_of_peak(name: str) -> float | None:
        peak, flops_per_s = costs.peak_flops_per_s, ledger.rate(name)
        return None if peak is None or flops_per_s is None else flops_per_s / peak

    return Measurement(
        run=str(job.run_dir.path),
        task=job.settings.task,
        steps=job.total_steps,
        tokens=ledger.tokens,
        samples=ledger.samples,
        parameters=parameters,
        world_size=job.plan.world_size,
        strategy=job.plan.strategy,
        device=job.device.type,
        step_time_s=step_time_s,
        tokens_per_s=ledger.rate("tokens"),
        samples_per_s=ledger.rate("samples"),
        model_flops_per_s=ledger.rate("model_flops"),
        hardware_flops_per_s=ledger.rate("hardware_flops"),
        mfu=fraction_of_peak("model_flops"),
        hfu=fraction_of_peak("hardware_flops"),
        peak_memory_bytes=max(ledger.peak_memory_by_rank, default=None),
        peak_memory_by_rank=ledger.peak_memory_by_rank,
        parts=ledger.median_parts(),
        first_loss=ledger.first_loss,
        final_loss=last.loss if last else None,
        initial_eval=initial,
        final_eval=final,
        unigram_entropy=unigram_entropy(corpus) if corpus is not None else None,
        sample=sample,
        skipped_steps=ledger.skipped_steps,
        cache_freed_bytes=ledger.median_cache_freed_bytes(),
        step_time_check=ledger.check_step_time(job.settings.expect_step_time_s),
        start_step=loop.start_step,
        train_runtime=train_s,
        train_samples_per_second=steps * costs.samples / train_s,
        train_steps_per_second=steps / train_s,
        train_loss=ledger.loss_sum / job.total_steps,
    )
