"""`outpace train --task chat` and `--task classify`, from the data to the exported model."""

import io
import json
import shutil

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from outpace.cli.main import main
from outpace.data.paraphrases import paraphrases
from outpace.data.tokenizer_files import load_tokenizer
from outpace.data.tokenizer_training import train_tokenizer
from outpace.jobs import inference
from outpace.jobs.inputs import tasks
from outpace.jobs.inputs.inputs import gather
from outpace.jobs.train.context import RunContext
from outpace.jobs.train.job import prepare_run, train
from outpace.records.errors import BadInputError
from outpace.records.plan import Plan
from outpace.records.settings import TrainSettings

COMMON = {"precision": "fp32", "device": "cpu", "schedule": "constant", "lr": 3e-3, "warmup": 5}
SPEC = {"layers": 2, "hidden": 32, "heads": 2, "vocab": 512, "max_positions": 64}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    for family in ("bert", "llama"):
        (folder / f"{family}.json").write_text(json.dumps({"family": family, **SPEC}))
    glue = folder / "glue"
    glue.mkdir()
    for split, name, count in (("train", "train", 60), ("validation", "dev", 20)):
        pairs = [row.values for row in paraphrases(split)][:count]
        lines = ["\t".join(map(str, pair.values())) for pair in pairs]
        (glue / f"{name}.tsv").write_text("\n".join(["\t".join(pairs[0]), *lines, ""]))
    talks = [
        {"prompt": f"{a} and {b}", "completion": f"is {a + b}"} for a in range(2) for b in range(4)
    ]
    (folder / "talk.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    return folder


def asked(home, **more):
    family = more.pop("family", "bert")
    values = {
        "model": str(home / f"{family}.json"), "cache_dir": home / "cache", **COMMON, **more,
    }  # fmt: skip
    return TrainSettings.parse(values, "test")


def run(settings, **more):
    return train(settings, RunContext(**more))


def losses(out):
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def classified(home):
    """A run that learnt the generated pairs, by a model whose [SEP] token sees all."""
    out = home / "classified"
    settings = asked(home, task="classify", family="llama", steps=40, global_batch=32, out=out)
    return settings, run(settings)


def test_the_generated_pairs_are_learnt_beyond_the_baseline(classified):
    settings, measured = classified
    labels = [row.values["label"] for row in paraphrases("validation")]
    baseline = sum(labels) / len(labels)
    final = measured.final_eval
    assert final.tokens == len(labels), "each held-out pair once"
    assert final.sums["actual_1"] == sum(labels)
    assert final.metrics["accuracy"] > baseline + 0.1
    assert final.metrics["f1"] > 2 * baseline / (1 + baseline) + 0.05
    logged = json.loads((settings.out / "evals.jsonl").read_text().splitlines()[-1])
    assert logged["metrics"] == final.metrics
    again = inference.evaluate(
        settings.out, None, batches=None, batch_size=50, device="cpu", on_hint=print
    )
    assert again.metrics == final.metrics
    assert again.loss == pytest.approx(final.loss, rel=1e-5)


def test_transformers_scores_pairs_as_the_run_does(classified):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    settings, measured = classified
    folder = settings.out / "model"
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    pairs = [row.values for row in paraphrases("validation")]
    texts = ([p["sentence1"] for p in pairs], [p["sentence2"] for p in pairs])
    with torch.no_grad():
        said = model(**tokenizer(*texts, padding=True, return_tensors="pt")).logits
    truth = torch.tensor([pair["label"] for pair in pairs])
    loss = torch.nn.functional.cross_entropy(said, truth)
    assert float(loss) == pytest.approx(measured.final_eval.loss, rel=1e-5)
    right = int((said.argmax(-1) == truth).sum())
    assert right == measured.final_eval.sums["correct"]


@pytest.mark.parametrize("padding", ["dynamic", "fixed"])
def test_padding_changes_the_work_but_not_the_losses(home, padding):
    out = home / padding
    settings = asked(
        home, task="classify", data=[str(home / "glue")], steps=2, global_batch=8, micro_batch=4,
        seq_len=48, out=out, eval_batches=1, padding=padding, checkpointing="full",
    )  # fmt: skip
    other = home / ("fixed" if padding == "dynamic" else "dynamic")
    measured = run(settings)
    if other.is_dir():
        assert losses(out) == pytest.approx(losses(other), rel=1e-4)
        result = json.loads((other / "result.json").read_text())
        assert measured.tokens == result["tokens"]


def test_costs_are_of_the_samples_that_a_step_has(home):
    settings = asked(
        home,
        task="classify",
        data=[str(home / "glue")],
        steps=2,
        global_batch=8,
        out=home / "costs",
    )
    with prepare_run(settings, RunContext()) as ready:
        batches = next(iter(ready.loop.steps))
        costs = ready.loop.ledger.costs_of(1)
        real = sum(int(batch["padding_mask"].sum()) for batch in batches)
        assert costs.tokens == real
        assert costs.model_flops < costs.hardware_flops


def test_a_task_resumes_as_if_it_had_not_stopped(home):
    for task, more in (
        ("classify", {"data": [str(home / "glue")]}),
        ("chat", {"family": "llama", "data": [str(home / "talk.jsonl")]}),
    ):
        values = {"task": task, "global_batch": 8, "eval_batches": 1, "sample_tokens": 2, **more}
        run(asked(home, steps=4, out=home / f"{task}-whole", **values))
        out = home / f"{task}-parts"
        run(asked(home, steps=2, out=out, **values))
        run(asked(home, steps=4, out=out, resume=True, **values))
        assert losses(out) == losses(home / f"{task}-whole")


@pytest.mark.parametrize("given", ["numbers", "names", "others", "several labels"])
def test_a_stored_classifier_keeps_its_layer_over_its_own_classes(home, tmp_path, given):
    names = ("neg", "neu", "pos")
    rows = [{"text": f"a text of class {n % 3}", "label": n % 3} for n in range(24)]
    config = transformers.BertConfig(
        vocab_size=300, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=32, id2label=dict(enumerate(names)),
        label2id={name: n for n, name in enumerate(names)},
    )  # fmt: skip
    if given == "several labels":
        config.problem_type = "multi_label_classification"
    stored = transformers.BertForSequenceClassification(config)
    stored.save_pretrained(tmp_path / "in")
    train_tokenizer([row["text"] for row in rows], 300, masked=True).save(tmp_path / "in")
    labels = {"numbers": range(3), "others": ("aa", "mm", "zz")}.get(given, names)
    lines = [json.dumps({**row, "label": labels[row["label"]]}) for row in rows]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    settings = asked(
        home, task="classify", data=[str(tmp_path / "data.jsonl")], steps=1, global_batch=4,
        seq_len=16, out=tmp_path / "run",
    ).model_copy(update={"model": str(tmp_path / "in")})  # fmt: skip
    with prepare_run(settings, RunContext()) as ready:
        weight = ready.loop.layout.objective.model.classifier.weight
        kept = torch.equal(weight, stored.classifier.weight)
        assert kept == (given in ("numbers", "names"))
        inputs = ready.job.inputs
        assert inputs.labels == (("aa", "mm", "zz") if given == "others" else names)
        said = " ".join(inputs.hints)
        assert ("replaced by a new one" in said) == (given in ("others", "several labels"))
        assert ("1 = neu" in said) == (given == "numbers")


@pytest.mark.parametrize("plan", [None, Plan()])
def test_only_a_training_tells_of_a_template_that_is_saved(home, plan):
    settings = asked(
        home, task="chat", family="llama", data=[str(home / "talk.jsonl")], global_batch=4
    )
    said = " ".join(gather(settings, None, home / "cache", 1, (), plan).hints)
    assert "no chat template, so outpace's is used" in said
    assert ("saved with the model" in said) == (plan is not None)


@pytest.mark.parametrize("most", [48, 64])
def test_lengths_are_shared_by_the_ranks_of_tensor_parallelism(home, most):
    settings = asked(
        home, task="chat", family="llama", data=[str(home / "talk.jsonl")], seq_len=most,
        global_batch=4,
    )  # fmt: skip
    plan = Plan(strategy="tp", tp=3)
    found = gather(settings, None, home / "cache", 1, (), plan)
    lengths = {found.train_data.padded_length(n) for n in range(1, found.seq_len + 1)}
    assert not any(length % 3 for length in lengths) and max(lengths) >= found.seq_len
    assert found.seq_len == (48 if most == 48 else 63), "there are 64 positions"


@pytest.fixture(scope="module")
def chatted(home):
    """A run that learnt sums from conversations."""
    settings = asked(
        home, task="chat", family="llama", data=[str(home / "talk.jsonl")], steps=30, lr=1e-2,
        global_batch=8, out=home / "chat", eval_data=[str(home / "talk.jsonl")],
    )  # fmt: skip
    return settings, run(settings)


def test_a_conversation_is_learnt_and_answered(chatted):
    settings, measured = chatted
    assert measured.task == "chat" and measured.final_eval.loss < measured.initial_eval.loss / 3
    assert "is " in measured.sample
    said = inference.generate(
        settings.out, "1 and 2", max_new_tokens=8, temperature=0.0, top_k=None, seed=0,
        device="cpu", chat=True, on_hint=print,
    )  # fmt: skip
    assert said.startswith("is ") and "assistant" not in said
    again = inference.evaluate(
        settings.out, None, batches=None, batch_size=None, device="cpu", on_hint=print
    )
    assert again.loss == pytest.approx(measured.final_eval.loss, rel=1e-5)


def test_base_adapter_and_merged_models_are_evaluated_on_conversations(home, chatted):
    settings, measured = chatted
    talk = (str(home / "talk.jsonl"),)
    own = {"batches": None, "batch_size": 8, "device": "cpu", "on_hint": print}
    base = inference.evaluate(
        settings.out / "model", talk, **own
    )  # that they are chats is found out
    assert base.loss == pytest.approx(measured.final_eval.loss, rel=1e-5)
    assert base.seq_len == 64 and base.left_over_tokens == 0
    other = home / "other.jsonl"
    other.write_text((home / "talk.jsonl").read_text().replace("is ", "was "))
    tuned = asked(
        home, task="chat", model=str(settings.out), data=[str(other)], eval_data=list(talk),
        steps=6, lr=5e-2, lora_rank=2, global_batch=8, out=home / "tuned",
    )  # fmt: skip
    final = run(tuned).final_eval
    merged = home / "merged"
    assert main(["merge", str(tuned.out), f"--out={merged}"]) == 0
    for folder in (tuned.out, tuned.out / "model", merged):
        found = inference.evaluate(folder, talk, task="chat", **own)
        assert found.loss == pytest.approx(final.loss, rel=1e-4)
        assert found.tokens == base.tokens
    assert abs(final.loss - base.loss) > 1e-3 * base.loss


@pytest.mark.parametrize("task", ["chat", "classify"])
def test_null_characters_in_rows_are_said(home, tmp_path, task):
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
    rows = rows if task == "chat" else [{"text": "a", "label": 0}, {"text": "b", "label": 1}]
    spoilt = json.loads(json.dumps(rows[0]).replace('"a"', '"a\\u0000"'))
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in (*rows * 4, spoilt)))
    source = tasks.read_source(asked(home, task=task, data=[str(path)]))
    (hint,) = source.hints
    assert hint.startswith("1 rows have NUL characters") and f"line {4 * len(rows) + 1})" in hint


def test_skipped_lines_are_named_and_those_of_a_csv_refused(home, tmp_path):
    table, path = "text\tlabel\na\t0\nb\nc\t1\nd\n", tmp_path / "rows.tsv"
    path.write_text(table)
    source = tasks.read_source(asked(home, task="classify", data=[str(path)]))
    (hint,) = source.hints
    assert hint.startswith("2 lines have fewer columns than their header and were skipped")
    assert f"(first {path}, line 3; {path}, line 5)" in hint
    path = tmp_path / "rows.csv"
    path.write_text(table.replace("\t", ","))
    with pytest.raises(BadInputError, match=r"rows\.csv, line 3 has 1 columns"):
        tasks.read_source(asked(home, task="classify", data=[str(path)]))


def test_what_may_be_meant_otherwise_is_said(home, tmp_path):
    """Other columns of labels and texts, labels that differ in capitals, samples without a text."""
    path = tmp_path / "rows.jsonl"
    rows = [
        {"sentence": f"a {n}", "text": "b", "label": ("Pos", "pos ", "neg")[n % 3], "labels": n % 2}
        for n in range(24)
    ]
    rows[0]["sentence"] = " "
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked_for = {"task": "classify", "data": [str(path)], "steps": 1, "global_batch": 4}

    def said(out, **more):
        settings = asked(home, **asked_for, out=tmp_path / out, **more)
        with prepare_run(settings, RunContext()) as ready:
            return " ".join(ready.job.inputs.hints)

    told = said("a")
    assert (
        "labels are read from 'label', not from 'labels'; choose others with --label-field" in told
    )
    assert (
        "texts are read from 'sentence', not from 'text'; choose others with --text-fields" in told
    )
    assert "labels 'Pos' and 'pos' differ only in capitals, spaces, invisible characters" in told
    assert "1 of 24 samples have a label and no text" in told
    told = said("b", label_field="labels", text_fields=["text"])
    assert "read from" not in told and "differ in" not in told and "no text" not in told


def test_conversations_are_gone_on_with(home, chatted, capsys, monkeypatch):
    run_, greedy = f"--run={chatted[0].out}", ["--temperature=0", "--max-new-tokens=6"]
    capsys.readouterr()
    assert main(["generate", run_, "--chat", "1 and 2", *greedy]) == 0
    alone = capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.StringIO("1 and 2\n\n2 and 2\n"))
    assert main(["generate", run_, "--chat", *greedy]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and lines[0] == alone.strip("\n")
    file = home / "asked.jsonl"
    talk = [{"role": "system", "content": "add"}, {"role": "user", "content": "1 and 2"}]
    rows = [{"messages": [*talk, {"role": "assistant", "content": "is 9"}]}, {"messages": talk}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["generate", run_, f"--conversations={file}", *greedy]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert main(["generate", run_, "1 and 2", "--system=add", *greedy]) == 0
    assert first == second == capsys.readouterr().out.strip("\n")


def test_the_exported_tokenizer_has_the_template(chatted):
    from transformers import AutoTokenizer

    talk = [{"role": "user", "content": "2 and 2"}, {"role": "assistant", "content": "is 4"}]
    tokenizer = AutoTokenizer.from_pretrained(chatted[0].out / "model")
    encoded = tokenizer.apply_chat_template(
        talk, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, mask = encoded["input_ids"], encoded["assistant_masks"]
    learnt = [i for i, mine in zip(ids, mask, strict=True) if mine]
    assert tokenizer.decode(learnt) == f"is 4{tokenizer.eos_token}"


def test_what_adapters_are_trained_beside_costs_no_gradients(home, chatted):
    flops = []
    for adapters in ({}, {"lora_rank": 2}):
        settings = asked(
            home, task="chat", data=[str(home / "talk.jsonl")], steps=1, global_batch=8,
            out=home / "adapters", **adapters,
        )  # fmt: skip
        settings = settings.model_copy(update={"model": str(chatted[0].out)})
        with prepare_run(settings, RunContext()) as ready:
            flops.append(ready.loop.ledger.costs_of(1).model_flops)
        shutil.rmtree(home / "adapters", ignore_errors=True)
    assert 0.6 < flops[1] / flops[0] < 0.8


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"task": "chat", "data": ["talk.jsonl"]}, "predicts masked tokens and cannot generate"),
        ({"task": "chat", "family": "llama"}, "needs conversations. Give them with --data"),
        ({"task": "classify", "data": ["talk.jsonl"]}, "no known column of text"),
        ({"task": "classify", "padding": "fixed", "strategy": "dp"}, "strategy dp computes a loss"),
        ({"task": "classify", "seq_len": 3}, "leaves no room for the texts"),
        (
            {"task": "classify", "tokens": 100, "steps": None},
            "task classify does not support tokens",
        ),
        ({"task": "classify", "memory_budget": "1MiB"}, "needs a prediction"),
        ({"padding": "fixed"}, "samples of task pretrain all have seq_len"),
        ({"label_field": "x"}, "apply to task classify"),
    ],
)
def test_what_a_task_cannot_do_is_refused(home, values, said):
    values = dict(values)
    if "data" in values:
        values["data"] = [str(home / name) for name in values["data"]]
    with pytest.raises(BadInputError, match=said):
        run(asked(home, **{"steps": 1, "out": home / "refused", **values}))
    assert not (home / "refused").exists()


@pytest.mark.gloo
@pytest.mark.parametrize(
    "strategies",
    [("ddp",), pytest.param(("zero1", "zero3", "gpipe", "tp"), marks=pytest.mark.slow)],
    ids=["ddp", "others"],
)
def test_ranks_agree_with_one_process(home, on_ranks, strategies):
    flags = [
        "--task=classify", f"--data={home / 'glue'}", f"--model={home / 'bert.json'}",
        "--steps=2", "--global-batch=8",
        "--seq-len=48", "--eval-batches=3", "--precision=fp32", "--device=cpu", "--lr=3e-3",
        "--warmup=5", "--schedule=constant", f"--cache-dir={home / 'cache'}", "--json",
    ]  # fmt: skip
    alone = asked(
        home, task="classify", data=[str(home / "glue")], steps=2, global_batch=8, seq_len=48,
        eval_batches=3, out=home / f"alone-{strategies[0]}",
    )  # fmt: skip
    one = run(alone)
    for strategy in strategies:
        out = home / strategy
        said = on_ranks(2, "outpace", "train", *flags, f"--strategy={strategy}", f"--out={out}")
        assert losses(out) == pytest.approx(losses(alone.out), rel=1e-5)
        assert said["final_eval"]["sums"] == one.final_eval.sums
        assert said["final_eval"]["loss"] == pytest.approx(one.final_eval.loss, rel=1e-5)


def test_rows_that_are_learnt_and_held_out_are_said(home, tmp_path):
    """Repeated rows across the two files, rows that are all alike, and the same file twice."""
    talks = [{"prompt": f"a {n}", "completion": "b"} for n in range(6)]
    paths = [tmp_path / name for name in ("train.jsonl", "held.jsonl", "alike.jsonl")]
    for path, rows in zip(paths, (talks, [*talks[4:], {"prompt": "c", "completion": "d"}],
                                  talks[:1] * 8), strict=True):  # fmt: skip
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    train, held, alike = map(str, paths)

    def hints(data, eval_data=None):
        more = {} if eval_data is None else {"eval_data": [eval_data]}
        settings = asked(home, task="chat", data=[data], steps=1, global_batch=2, family="llama",
                         out=tmp_path / f"out{len(list(tmp_path.iterdir()))}", **more)  # fmt: skip
        with prepare_run(settings, RunContext()) as ready:
            return " ".join(ready.job.inputs.hints)

    assert "2 of 3 rows held out for validation are also among the training rows" in hints(
        train, held
    )
    assert "are also among the training rows" in hints(alike)
    assert "among those" not in hints(train)
    told = hints(train, train)
    assert "the validation rows are also training rows" in told and "among" not in told


def test_what_is_evaluated_is_said_and_counted_once(home, chatted, tmp_path):
    """An evaluation said nothing of how it read its data."""
    path = tmp_path / "long.jsonl"
    rows = [{"prompt": "a " * 500, "completion": "b"}, {"prompt": "a", "completion": "b"}] * 2
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = []
    inference.evaluate(chatted[0].out, (str(path),), batches=None, batch_size=None, device="cpu",
                       on_hint=told.append)  # fmt: skip
    assert any(hint.startswith("2 of 4 conversations are longer") for hint in told)
    assert not any("validate" in hint for hint in told)


def test_a_layer_over_classes_that_would_be_drawn_is_not_evaluated(home, classified, tmp_path):
    """Its loss and accuracy were those of random numbers."""
    settings, _ = classified

    def refused(model, label):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(
            json.dumps({"sentence1": "a", "sentence2": "b", "label": label(n)}) + "\n"
            for n in range(8)
        ))  # fmt: skip
        with pytest.raises(BadInputError) as caught:
            inference.evaluate(model, (str(path),), batches=None, batch_size=None, device="cpu",
                               task="classify", on_hint=print)  # fmt: skip
        return str(caught.value)

    def changed(name, **values):
        folder = shutil.copytree(settings.out / "model", tmp_path / name)
        (folder / "checksums.json").unlink(missing_ok=True)
        config = json.loads((folder / "config.json").read_text()) | values
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    whole = settings.out / "model"
    assert "has the classes 0, 1, but the data has the labels x, y" in refused(
        whole, lambda n: "xy"[n % 2]
    )
    base = changed("base", architectures=["LlamaForCausalLM"])
    assert "has no classifier" in refused(base, lambda n: n % 2)
    other = changed("other", label2id={"0": 1, "1": 0})
    assert "contradicts itself: label2id has 0 as class 1" in refused(other, lambda n: n % 2)
    lacking = changed("lacking")
    tensors = load_file(lacking / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if "score" not in n},
              lacking / "model.safetensors", metadata={"format": "pt"})  # fmt: skip
    assert "the classification layer would be random" in refused(lacking, lambda n: n % 2)


def test_token_ids_beyond_the_tokenizer_beside_the_model_are_said(home, classified, tmp_path):
    """Its embedding is longer than the tokenizer, so that no id is refused: another's ids."""
    model = classified[0].out / "model"
    tokens = load_tokenizer(str(model)).vocab_size

    def hints(largest):
        path = tmp_path / f"{largest}.bin"
        np.array([1, 2, 3, largest] * 500, dtype=np.uint16).tofile(path)
        folder = wide_model(model, tokens + 64, tmp_path / f"wide{largest}")
        settings = TrainSettings.parse(
            {**COMMON, "model": str(folder), "data": [str(path)], "seq_len": 16, "steps": 1,
             "cache_dir": str(home / "cache")},
            "test",
        )  # fmt: skip
        return " ".join(gather(settings, None, home / "cache", 1, ()).hints)

    said = hints(tokens + 9)
    assert f"the data has token ids up to {tokens + 9}, but the model's tokenizer" in said
    assert f"the model's tokenizer has {tokens} tokens" in said
    assert "another tokenizer" not in hints(tokens - 1)


def wide_model(model, vocab, folder):
    """A language model of `model`'s family with its tokenizer, and more tokens than that has."""
    config = transformers.AutoConfig.from_pretrained(model, vocab_size=vocab)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (model / name).is_file():
            shutil.copy(model / name, folder)
    return folder


TALK = "".join(
    json.dumps({"prompt": f"{a} and {b}", "completion": f"is {a + b}"}) + "\n"
    for a in range(2)
    for b in range(4)
)


def materials_of(home, folder, **more):
    settings = asked(home, data=[str(folder)], steps=1, global_batch=2, **more)
    return gather(settings, None, home / "cache", 1, ())


def test_answers_without_an_end_are_said(home, tmp_path):
    """A model learns to stop only where a template writes a special token behind answers."""
    talk = tmp_path / "talk.jsonl"
    talk.write_text(TALK)
    body = "{% for m in messages %}{{ m.role + ': ' + m.content }}END\n{% endfor %}"
    body += "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    for end, told in (("", True), ("{{ eos_token }}", False)):
        tokenizer = train_tokenizer(["user assistant is and"] * 9, 400)
        changed = tokenizer.replace(tokenizer.inner, {"chat_template": body.replace("END", end)})
        changed.save(tmp_path / "tokenizer")
        found = materials_of(home, talk, task="chat", family="llama",
                             tokenizer=str(tmp_path / "tokenizer"))  # fmt: skip
        assert ("does not learn where to stop" in " ".join(found.hints)) is told


TOOLS = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
BODY = "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}\n{% endfor %}"
ASK = "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"


@pytest.mark.parametrize("changed", ["nothing", "bos", "tool_use", "order of keys"])
def test_all_that_writes_a_conversation_belongs_to_the_data(home, tmp_path, changed):
    """A run that is resumed compares this fingerprint, so it learned other text unnoticed."""

    def fingerprint(change):
        change = change if change == changed else None
        tool = dict.fromkeys("ba" if change == "order of keys" else "ab", 1)
        rows = [{**json.loads(line), "tools": [tool]} for line in TALK.splitlines()]
        (tmp_path / "talk.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        begin = "{{ bos_token }}" + TOOLS
        templates = {"default": BODY + ASK, "tool_use": begin + BODY + ASK}
        if change == "tool_use":
            templates["tool_use"] = f"is{templates['tool_use']}"
        plain = train_tokenizer(["user assistant is and"] * 9, 400, masked=True)
        roles = {"bos_token": "[SEP]" if change == "bos" else "[CLS]"}
        named = [{"name": name, "template": text} for name, text in templates.items()]
        plain.replace(plain.inner, {**roles, "chat_template": named}).save(tmp_path / "tokenizer")
        found = materials_of(home, tmp_path / "talk.jsonl", task="chat", family="llama",
                             tokenizer=str(tmp_path / "tokenizer"))  # fmt: skip
        return found.train_fingerprint, found.eval_fingerprint

    first, second = fingerprint(None), fingerprint(changed)
    assert (first == second) is (changed == "nothing")
    assert changed == "nothing" or not set(first) & set(second)


def test_the_side_on_which_texts_are_cut_belongs_to_the_data(home, tmp_path):
    found = []
    for side in ("right", "left"):
        plain = train_tokenizer(["one two three four"] * 9, 400)
        plain.replace(plain.inner, {"truncation_side": side}).save(tmp_path / "tokenizer")
        inputs = materials_of(home, home / "glue", task="classify", family="llama", seq_len=8,
                              tokenizer=str(tmp_path / "tokenizer"))  # fmt: skip
        found.append(inputs.train_fingerprint)
    assert found[0] != found[1]


def test_files_that_a_folder_holds_beside_its_splits_are_said(home, tmp_path):
    for name in ("train", "dev", "test", "more"):
        (tmp_path / f"{name}.jsonl").write_text(TALK)
    found = " ".join(materials_of(home, tmp_path, task="chat", family="llama").hints)
    assert "train.jsonl and dev.jsonl are read; more.jsonl is left out" in found
    (tmp_path / "more.jsonl").unlink()
    assert "left out" not in " ".join(
        materials_of(home, tmp_path, task="chat", family="llama").hints
    )


def test_weights_that_are_not_read_are_not_replaced_by_random_ones(home, chatted, tmp_path):
    """In parts without an index, in another format, or in a folder below: it drew new ones."""
    model = tmp_path / "model"
    shutil.copytree(chatted[0].out / "model", model)
    (model / "checksums.json").unlink(missing_ok=True)
    whole = (model / "model.safetensors").rename(tmp_path / "whole")
    text = tmp_path / "a.jsonl"
    text.write_text('{"text": "a and b is c and d is e"}\n' * 40)

    def hints(**more):
        settings = {**COMMON, "model": str(model), "data": [str(text)], "seq_len": 8, "steps": 1}
        parsed = TrainSettings.parse({**settings, "cache_dir": str(home / "cache"), **more}, "test")
        return " ".join(gather(parsed, None, home / "cache", 1, ()).hints)

    (model / "original").mkdir()
    for name in ("model-00001-of-00002.safetensors", "tf_model.h5", "model.fp16.safetensors",
                 "original/consolidated.00.pth", "half/pytorch_model-00001-of-00002.bin",
                 "llama.bin"):  # fmt: skip
        (model / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(whole, model / name)
        with pytest.raises(BadInputError, match=f"has weights in {name}"):
            hints()
        assert "random" not in hints(init="random")
        (model / name).unlink()
    (model / "optimizer.pt").touch()  # of a trainer, beside the weights
    (model / "data").mkdir()  # and tokens, as nanoGPT's
    for name in ("data/train.bin", "data/shakespeare.bin", "val.bin", "fineweb_train_000001.bin"):
        (model / name).touch()
    assert "has no weights: the model starts with random ones" in hints()


def test_stored_weights_with_another_tokenizer_are_said(home, chatted, tmp_path):
    own = chatted[0].out / "model"
    train_tokenizer(["completely other words"] * 9, 300).save(tmp_path / "other")
    text = tmp_path / "a.jsonl"
    text.write_text('{"text": "a and b is c and d is e"}\n' * 40)
    for tokenizer, told in ((tmp_path / "other", True), (own, False)):
        settings = TrainSettings.parse(
            {**COMMON, "model": str(own), "tokenizer": str(tokenizer), "data": [str(text)],
             "seq_len": 8, "steps": 1, "cache_dir": str(home / "cache")},
            "test",
        )  # fmt: skip
        found = " ".join(gather(settings, None, home / "cache", 1, ()).hints)
        assert ("the stored weights learned other tokens for them" in found) is told


def test_files_that_are_trained_and_validated_on_are_said(home, chatted, tmp_path):
    rows = '{"text": "a and b is c and d is e"}\n' * 40
    for name in ("a.jsonl", "copy.jsonl"):
        (tmp_path / name).write_text(rows)
    (tmp_path / "other.jsonl").write_text(rows.replace("is e", "is f"))  # of the same size
    for name, told in (("a.jsonl", True), ("copy.jsonl", True), ("other.jsonl", False)):
        settings = TrainSettings.parse(
            {**COMMON, "model": str(chatted[0].out / "model"), "data": [str(tmp_path / "a.jsonl")],
             "eval_data": [str(tmp_path / name)], "seq_len": 8, "steps": 1,
             "cache_dir": str(home / "cache")},
            "test",
        )  # fmt: skip
        found = " ".join(gather(settings, None, home / "cache", 1, ()).hints)
        assert (f"{name} of --eval-data is also in --data" in found) is told
        twice = {**settings.model_dump(), "data": (*settings.data, str(tmp_path / name))}
        found = " ".join(gather(TrainSettings(**twice), None, home / "cache", 1, ()).hints)
        assert (f"{name} is in --data more than once" in found) is told


@pytest.mark.parametrize("own_data", [True, False])
def test_a_custom_module_in_evaluation_mode_is_told(home, own_data):
    def build():
        module = torch.nn.Sequential(torch.nn.Embedding(8192, 4), torch.nn.Linear(4, 8192)).eval()
        data = torch.utils.data.TensorDataset(torch.zeros(8, 4, dtype=torch.long))
        return (module, lambda m, b: m(b[0]).mean(), data) if own_data else module

    (home / "plain.txt").write_text("words of a text\n" * 500)
    given = {} if own_data else {"data": (str(home / "plain.txt"),), "seq_len": 8}
    settings = TrainSettings(**given)
    hints = gather(settings, build, home / "cache", 1, ()).hints
    assert any("in evaluation mode, as given" in hint for hint in hints)
