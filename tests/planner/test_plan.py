"""The planner's answer: what is said of plans, of nodes that stay idle, and where nothing fits."""

import re
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outpace.catalog.node_names import find_node
from outpace.jobs.memory.query import question as memory_question
from outpace.jobs.planning.request import PlanQuestion, job
from outpace.planner import plan_search
from outpace.planner.explain.axis_links import axis_links
from outpace.planner.explain.reasons import explain_plan
from outpace.planner.model.adapters import AdapterSettings
from outpace.planner.model.outline_flops import forward_flops, step_flops
from outpace.planner.plan import plans, throughput
from outpace.planner.plan_estimate import estimate_plan
from outpace.planner.search.alternatives import add_plans
from outpace.planner.search.plan_choice import CROWDED, LEAN, ROOMY
from outpace.records.errors import BadInputError
from outpace.records.plan import Plan
from outpace.records.settings import TrainSettings
from outpace.records.units import show_bytes, show_seconds

DEFAULTS = dict.fromkeys(TrainSettings.model_fields, "default")


def asked(model, machine="hgx-h100", **values):
    return job(PlanQuestion(model=model, machine=machine, **values))


@cache
def answered(model, machine="hgx-h100", **values):
    """The answer to a question that several tests ask."""
    return plans(asked(model, machine, **values))


def best(question):
    """Tokens/s of the fastest plan; 0 where there is none."""
    try:
        return plans(question).plan_for("fastest").estimate.tokens_per_s
    except BadInputError:
        return 0.0


def step_s(answer):
    return answer.plan_for("fastest").estimate.step_time_s


def fastest_step_s(question):
    return step_s(plans(replace(question, count=5)))


def test_an_answer_adds_up():
    question = asked("llama-3-8b", seq_len=4096, global_batch=64, tokens=10**12, price=2.0)
    answer = plans(question)
    others = [p for p in answer.plans if not p.roles]
    took = [p.estimate.step_time_s for p in others]
    assert took == sorted(took) and took[0] > answer.plan_for("fastest").estimate.step_time_s
    assert len({p.title.split(", micro-batch")[0] for p in others}) == len(others) > 1
    for planned in answer.plans:
        said = planned.estimate
        assert sum(said.parts_s.values()) == pytest.approx(said.step_time_s)
        assert said.peak_memory_bytes == pytest.approx(sum(said.memory.values()), abs=2)
        assert (
            said.peak_memory_bytes <= said.memory_bytes < answer.nominal_memory_bytes and said.fits
        )
        assert said.low_s < said.step_time_s < said.high_s
        assert said.tokens_per_s == pytest.approx(64 * 4096 / said.step_time_s)
        flops = 3 * forward_flops(question.outline, 4096, 64)
        assert said.mfu == pytest.approx(flops / said.step_time_s / 8 / 989.5e12, rel=1e-3)
        assert said.mfu <= said.hfu < 1
        assert said.time_s == pytest.approx(10**12 / said.tokens_per_s)
        assert said.cost == pytest.approx(said.time_s / 3600 * 8 * 2.0)
        assert "global batch 64 = " in planned.identity
    assert answer.rejected and answer.idle_nodes == 0


def test_the_first_plan_is_the_simplest_of_those_as_fast():
    """As an expert would run it: the fastest and the leanest are beside it, for what they are."""
    answer = plans(asked("llama-3.1-8b", keep="compile=False", seq_len=8192, global_batch=8))
    first, fast, lean = (answer.plan_for(role) for role in ("recommended", "fastest", "leanest"))
    assert answer.plans[0] is first and first.why.startswith("recommended: ")
    assert (
        fast.estimate.step_time_s < first.estimate.step_time_s <= LEAN * fast.estimate.step_time_s
    )
    assert "slower than the fastest, which leaves only" in first.why
    room = first.estimate.memory_bytes - first.estimate.peak_memory_bytes
    assert room > 0.1 * first.estimate.memory_bytes
    assert room > fast.estimate.memory_bytes - fast.estimate.peak_memory_bytes
    assert first.plan.offload_activations == "none" and first.plan.strategy == "zero3"
    assert lean.estimate.peak_memory_bytes <= min(
        one.estimate.peak_memory_bytes for one in answer.plans
    )
    assert lean.estimate.step_time_s <= 1.1 * fast.estimate.step_time_s
    assert throughput(asked("llama-3.1-8b", keep="compile=False", seq_len=8192, global_batch=8),
                      1).plan == fast.plan  # fmt: skip


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_first_plan_is_one_that_the_trainer_trains(nodes):
    """Thirty samples are no multiple of eight ranks: what is fastest, outpace does not train."""
    answer = plans(asked("llama-3-8b", nodes=nodes, global_batch=30))
    first, fast = answer.plans[0], answer.plan_for("fastest")
    assert first.roles[0] == "recommended" and first.untrained is None
    assert fast.untrained is not None and "which outpace does not train" in first.why
    devices = 8 * nodes
    said = f"Global batch 30 is not a multiple of the {devices} devices"
    assert any(said in note and "--global-batch 32" in note for note in answer.notes)
    assert not any("is not a multiple" in note for note in plans(asked("llama-3-8b")).notes)


def test_a_short_list_has_plans_that_need_less_memory_than_those_as_fast():
    answer = plans(asked("llama-3-8b", "rtx-4090", keep="lora_rank=16"))
    assert len(answer.plans) > 2
    for one in answer.plans:
        if not one.roles:
            quicker = [
                other.estimate.peak_memory_bytes for other in answer.plans
                if other.estimate.step_time_s < one.estimate.step_time_s
            ]  # fmt: skip
            assert one.estimate.peak_memory_bytes <= 0.95 * min(quicker)


def test_adapters_are_told_what_weights_in_four_bits_would_save():
    wanted = {"seq_len": 2048, "global_batch": 4}
    answer = plans(asked("llama-3-8b", "rtx-4090", keep="lora_rank=16", **wanted))
    (told,) = [note for note in answer.notes if note.startswith("With --base nf4")]
    packed = plans(asked("llama-3-8b", "rtx-4090", keep="lora_rank=16,base=nf4", **wanted))
    one = packed.plans[0].estimate
    assert show_bytes(one.peak_memory_bytes) in told and show_seconds(one.step_time_s) in told
    assert not any(note.startswith("With --base nf4") for note in packed.notes)


def test_the_fastest_does_not_depend_on_how_many_plans_are_listed():
    """With fewer micro-batches than ranks, pipelines are not taken for faster than they are."""
    wanted = {"nodes": 4, "seq_len": 4096, "global_batch": 8}
    answers = [plans(asked("llama-3-70b", "hgx-h200", count=n, **wanted)) for n in (1, 3, 8)]
    first, *others = [one.plan_for("recommended") for one in answers]
    assert all(other.plan == first.plan for other in others)
    took = [min(one.estimate.step_time_s for one in answer.plans) for answer in answers[1:]]
    assert took[0] == took[1] <= first.estimate.step_time_s


def test_the_fastest_comes_first_if_plans_with_more_memory_free_need_an_axis_more():
    """A zero-bubble pipeline leaves 11 % free, ZeRO-3 with recomputation 7 %."""
    wanted = {"seq_len": 1024, "global_batch": 32}
    first = plans(asked("gpt2-xl", "4xrtx-3090", **wanted)).plans[0]
    assert first.roles == ("recommended", "fastest") and first.plan.strategy == "zero3"
    share = first.estimate.peak_memory_bytes / first.estimate.memory_bytes
    assert ROOMY < share <= CROWDED
    other = plans(asked("gpt2-xl", "4xrtx-3090", keep="pp=4", **wanted)).plan_for("recommended")
    assert other.estimate.peak_memory_bytes <= ROOMY * other.estimate.memory_bytes
    assert other.estimate.step_time_s <= LEAN * first.estimate.step_time_s
    # What is as simple and leaves memory free still comes before the fastest.
    wanted = {"seq_len": 1024, "global_batch": 16, "precision": "bf16"}
    first = plans(asked("gpt2-xl", "4xrtx-3090", **wanted)).plans[0]
    assert first.roles == ("recommended",) and first.plan.strategy == "zero2"
    assert first.estimate.peak_memory_bytes <= ROOMY * first.estimate.memory_bytes


SECONDS = {"µs": 1e-6, "ms": 1e-3, "s": 1.0}


def seconds_of(words):
    """Seconds before each of " more for", " less for" in a sentence, with their signs."""
    found = re.findall(r"([0-9.]+) (µs|ms|s) (more|less) for", words)
    return [float(n) * SECONDS[unit] * (1 if way == "more" else -1) for n, unit, way in found]


@pytest.mark.parametrize(
    ("model", "machine", "count", "values"),
    [
        ("llama-3-8b", "hgx-h100", 5, {"seq_len": 4096, "global_batch": 64}),
        ("llama-3.1-8b", "hgx-h100", 4, {"seq_len": 8192, "global_batch": 8}),
        ("gpt2-xl", "8xrtx-3090", 5, {"global_batch": 64}),
        ("gpt2-xl", "8xrtx-3090", 1, {"global_batch": 64}),
    ],
)
def test_reasons_name_plans_that_are_listed_and_add_up(model, machine, count, values):
    answer = answered(model, machine, count=count, **values)
    fastest = answer.plan_for("fastest") if count > 1 else None
    for one in answer.plans:
        for number, layout in re.findall(r"plan (\d)(?: \((.*?)\))?", one.why):
            other = answer.plans[int(number) - 1]
            assert other is not one and (layout or other.title).split(", ")[0] in other.title
        assert "next (" not in one.why or ", not listed)" in one.why
        if fastest is None or not (gaps := seconds_of(one.why)):
            continue
        if one is not fastest:
            more_s = one.estimate.step_time_s - fastest.estimate.step_time_s
        else:
            others = [other.estimate.step_time_s for other in answer.plans if other is not one]
            more_s = min(others) - one.estimate.step_time_s
        within = 0.02 * (abs(gaps[0]) + more_s)
        assert abs(sum(gaps) - more_s) <= within, one.why


def test_nothing_is_offloaded_where_a_plan_as_fast_keeps_all_on_the_device():
    answer = answered("gpt2-xl", "8xrtx-3090", count=5, global_batch=64)
    first = answer.plan_for("recommended").plan
    assert first.offload_activations == first.offload_parameters == first.offload_optimizer
    assert first.offload_optimizer == "none" and first.pp == first.tp == 1


def test_what_offloads_gains_more_than_a_tenth_or_comes_second():
    """Where memory suffices without: the fastest is beside it, for what it is."""
    wanted = {"seq_len": 8192, "global_batch": 512, "nodes": 16, "keep": "tp=1,pp=1,cp=1"}
    answer = answered("llama-3-70b", "dgx-h100", **wanted)
    first, fast = (answer.plan_for(role) for role in ("recommended", "fastest"))
    assert fast.plan.offload_activations == "cpu" and first.plan.offload_activations == "none"
    assert first.estimate.step_time_s <= LEAN * fast.estimate.step_time_s
    assert "slower than the fastest, which offloads activations" in first.why


def test_a_host_of_unknown_memory_is_offloaded_to_only_if_nothing_else_fits():
    wanted = {"seq_len": 8192, "global_batch": 512, "nodes": 16, "keep": "tp=1,pp=1,cp=1"}
    known = asked("llama-3-70b", "dgx-h100", **wanted)
    answer = plans(on_host_of(known, None))
    for planned in answer.plans:
        assert planned.estimate.host_offloaded_bytes == 0
    (told,) = [note for note in answer.notes if "--host-memory" in note]
    assert "is not known, so no plan offloads" in told
    there = answered("llama-3-70b", "dgx-h100", **wanted)
    assert not [note for note in there.notes if "--host-memory" in note]
    # Asked for, or where nothing else fits, the host is taken to have enough.
    kept = on_host_of(asked("llama-3-70b", "dgx-h100", **wanted | {
        "keep": "tp=1,pp=1,cp=1,offload_activations=cpu"}), None)  # fmt: skip
    assert plans(kept).plans[0].plan.offload_activations == "cpu"
    # No plan may offload, so the host's memory does not matter.
    nothing = ",".join(
        f"offload_{name}=none" for name in ("activations", "parameters", "optimizer")
    )
    kept = on_host_of(asked("llama-3-70b", "dgx-h100", **wanted | {
        "keep": f"tp=1,pp=1,cp=1,{nothing}"}), None)  # fmt: skip
    assert not [note for note in plans(kept).notes if "--host-memory" in note]
    single = answered("llama-3.1-8b", "rtx-4090", seq_len=2048, global_batch=4)
    assert single.plans[0].estimate.host_offloaded_bytes > 0
    (told,) = [note for note in single.notes if "--host-memory" in note]
    assert "nothing fits without offloading, so the host is assumed to have enough" in told


def test_a_further_offload_gains_more_than_a_tenth_or_comes_second():
    """8 B parameters on 24 GB: optimizer and parameters have to be offloaded, activations not."""
    answer = answered("llama-3.1-8b", "rtx-4090", seq_len=2048, global_batch=4)
    first, fast = (answer.plan_for(role) for role in ("recommended", "fastest"))
    assert fast.plan.offload_activations == "cpu" and first.plan.offload_activations == "none"
    assert first.plan.offload_parameters == first.plan.offload_optimizer == "cpu"
    assert first.estimate.step_time_s <= LEAN * fast.estimate.step_time_s
    assert first.why.endswith("slower than the fastest, which also offloads activations")
    # Most of so small a batch's step is the host's optimizer, and a larger batch spreads it.
    assert any("larger --global-batch" in note for note in answer.notes)
    more = plans(asked("llama-3.1-8b", "rtx-4090", seq_len=2048, global_batch=64))
    ratio = more.plans[0].estimate.tokens_per_s / answer.plans[0].estimate.tokens_per_s
    assert ratio > 2 and not [note for note in more.notes if "larger --global-batch" in note]


def test_what_expert_parallelism_takes_is_told_if_no_listed_plan_has_it():
    wanted = {"seq_len": 4096, "global_batch": 64, "count": 2}
    keep = "tp=1,cp=1,pp=1"
    answer = plans(asked("qwen3-30b-a3b", "hgx-h100", keep=keep, **wanted))
    assert {one.plan.ep for one in answer.plans} == {1}
    (told,) = [note for note in answer.notes if note.startswith("Expert parallelism: ")]
    divided = [
        plans(asked("qwen3-30b-a3b", "hgx-h100", keep=f"{keep},ep={ep}", **wanted))
        for ep in (2, 4, 8)
    ]
    assert any("1.1 times as long on one rank, 1.9 times" in note for note in answer.notes)
    fastest = min(step_s(one) for one in divided)
    assert f"{fastest / step_s(answer):.2f} times the fastest" in told
    for one in divided:
        assert not [note for note in one.notes if note.startswith("Expert parallelism: ")]


def test_options_that_contradict_each_other_are_named_with_what_goes_with_them():
    """Every pair of them, also where --precision gives one."""

    def reason(keep, **words):
        with pytest.raises(BadInputError) as caught:
            plans(asked("gpt2", "rtx-4090", seq_len=1024, global_batch=4, keep=keep, **words))
        return str(caught.value)

    said = reason("precision=bf16-pure,optimizer=adafactor")
    assert "1 device and a global batch of 4" in said and "product of the axes" not in said
    assert "precision=bf16-pure and optimizer=adafactor contradict each other" in said
    assert "optimizer may be adamw-bf16, adamw-8bit or adamw-4bit" in said
    said = reason("optimizer=adafactor,compile=false", precision="bf16-pure")
    assert "optimizer=adafactor and precision=bf16-pure contradict each other" in said
    said = reason("optimizer=adafactor,offload_optimizer=cpu,optimizer_in_backward=true")
    assert "optimizer=adafactor and offload_optimizer=cpu contradict each other" in said
    assert "offload_optimizer=cpu and optimizer_in_backward=True contradict each other" in said
    assert "optimizer=adafactor and optimizer_in_backward" not in said
    said = reason("checkpointing=none,checkpoint_every=2")
    assert "checkpointing=none and checkpoint_every=2 contradict each other" in said


def test_options_that_another_trainer_may_have_do_not_contradict_each_other():
    """Megatron trains in fp8 with tensor parallelism."""
    with pytest.raises(BadInputError) as caught:
        plans(asked("llama-3-8b", nodes=1, keep="tp=8", precision="fp8", trainer="megatron"))
    said = str(caught.value)
    assert "outpace does not predict tp=8 and precision=fp8 together" in said
    assert "contradict" not in said and "With tp=8, precision may be fp32, tf32, bf16" in said


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"keep": "optimizer=adamw-8bit"}, "It fits without optimizer=adamw-8bit, by offloading"),
        ({"keep": "precision=bf16-pure"}, "It fits without precision=bf16-pure, by offloading"),
        ({"precision": "bf16-master"}, "It fits with --precision bf16, by offloading"),
    ],
)
def test_an_option_that_prevents_offloading_is_named_where_nothing_else_fits(words, sentence):
    with pytest.raises(BadInputError) as caught:
        plans(asked("llama-3.2-1b", "rtx-4070:12GB", seq_len=2048, global_batch=4, **words))
    assert sentence in str(caught.value) and "cannot be offloaded here" in str(caught.value)


def test_adapters_that_do_not_fit_are_told_of_a_base_of_four_bits_first():
    keep = "lora_rank=16"
    with pytest.raises(BadInputError, match="It fits with --base nf4, or on 8 devices"):
        plans(asked("llama-3.1-8b", "rtx-4070", seq_len=2048, global_batch=4, keep=keep))
    fine = asked("llama-3.1-8b", "rtx-4070", seq_len=2048, global_batch=4, keep=f"{keep},base=nf4")
    assert plans(fine).plans[0].estimate.fits


def test_a_plan_that_offloads_stands_beside_small_states_that_do_not():
    wanted = {"seq_len": 2048, "global_batch": 4}
    answer = plans(asked("llama-3.2-1b", "rtx-4070:12GB", **wanted))
    (told,) = [note for note in answer.notes if note.startswith("Without offloading, --keep ")]
    keep = told.removeprefix("Without offloading, --keep ").split()[0]
    assert "optimizer_in_backward=true" in keep and "change the results of training" in told
    (small, *_) = plans(asked("llama-3.2-1b", "rtx-4070:12GB", keep=keep, **wanted)).plans
    assert small.estimate.host_offloaded_bytes == 0
    assert step_s(answer) > 1.5 * small.estimate.step_time_s
    kept = plans(asked("llama-3.2-1b", "rtx-4070:12GB", keep="offload_optimizer=cpu", **wanted))
    assert not [note for note in kept.notes if note.startswith("Without offloading, --keep ")]


def test_a_published_step_that_is_faster_in_fewer_bits_is_noted():
    wanted = {"nodes": 4, "seq_len": 4096, "global_batch": 32, "keep": "tp=8,pp=4"}
    (told,) = [note for note in plans(asked("llama-3-70b", **wanted)).notes if "published step of"
               in note]  # fmt: skip
    assert "Megatron-Bridge (3.16 s) is faster than the fastest plan" in told
    assert told.endswith("because its matmuls are in fp8; the plan's are in bf16.")


def test_a_leaner_plan_is_beside_one_that_fills_memory():
    """The fastest of those that leave a tenth of it free, if the recommended one does not."""
    job = asked("llama-3.1-8b", "rtx-4090", seq_len=1024, global_batch=4,
                keep="lora_rank=16,base=nf4,compile=false,micro_batch=4")  # fmt: skip
    need = max(one.estimate.peak_memory_bytes for one in plans(job).plans)
    device = replace(job.cluster.device, memory_bytes=round(need / 0.95))
    answer = plans(replace(job, cluster=replace(job.cluster, device=device)))
    assert answer.plans[0].estimate.peak_memory_bytes > ROOMY * device.memory_bytes
    fast, lean = answer.plan_for("fastest"), answer.plan_for("with headroom")
    assert answer.plan_for("leanest") is None
    assert fast.estimate.peak_memory_bytes > 0.94 * device.memory_bytes
    assert lean.estimate.peak_memory_bytes < 0.9 * device.memory_bytes
    assert "the fastest that leaves 10.0 % of a device free; " in lean.why
    assert "  " not in lean.why


def test_a_recommended_plan_leaves_memory_free_and_may_be_the_leanest(monkeypatch):
    """No plan with headroom is beside it, nor a leanest one that needs more."""
    job = asked("llama-3.1-8b", "rtx-4090", keep="lora_rank=16", seq_len=2048, global_batch=4)
    real = plan_search._find_simulated_alternatives
    first, fast = plans(job).plans[:2]
    assert first.roles == ("recommended",) and fast.roles == ("fastest",)
    assert first.estimate.peak_memory_bytes <= ROOMY * first.estimate.memory_bytes
    assert "slower than the fastest, which leaves only" in first.why

    def none_leaner(job, found):
        return replace(real(job, found), leanest=found.fastest, roomier=False)

    monkeypatch.setattr(plan_search, "_find_simulated_alternatives", none_leaner)
    first, fast = plans(job).plans[:2]
    assert first.roles == ("recommended", "leanest") and fast.roles == ("fastest",)


def test_a_plan_that_takes_as_long_as_the_fastest_is_not_slower():
    wanted = {"keep": "lora_rank=16", "seq_len": 2048, "global_batch": 4}
    job = asked("llama-3.1-8b", "rtx-4090", **wanted)
    _, found = plan_search.search_nodes(job)
    twin = found.columns.select([found.fastest])
    found = add_plans(job.question, found, twin, job.checked_bytes)
    for role in ("leanest", "with headroom"):
        place = len(found.columns) - 1
        why = explain_plan(job, found, place, (role,), [found.fastest, place])
        assert why.endswith("; as fast as the fastest")


def test_a_leaner_pipeline_that_simulates_faster_becomes_the_fastest(monkeypatch):
    """Only the simulation of alternatives shows it; none is then faster than the fastest."""
    real, names = plan_search._find_simulated_alternatives, []

    def find(job, found):
        found = real(job, found)
        if not names:
            names.append(found.leanest)
            step_s = found.times.step_s[found.leanest] - found.times.step_s[found.fastest]
            found.times.products_s[found.leanest] -= step_s + 1e-3
        return found

    monkeypatch.setattr(plan_search, "_find_simulated_alternatives", find)
    question = asked("gpt2-xl", "4xrtx-3090", global_batch=16, keep="compile=false")
    answer = plans(question)
    fast = answer.plan_for("fastest")
    assert fast.estimate.step_time_s == min(one.estimate.step_time_s for one in answer.plans)
    assert not any("-" in re.sub(r"[^ ]-[^ ]", "", one.why) for one in answer.plans)


def test_a_mac_keeps_scores_and_neither_compiles_nor_offloads():
    keep = "micro_batch=8,checkpointing=none,compile=false"
    given = {"seq_len": 1024, "global_batch": 8}
    answer, other = (answered("gpt2", machine, **given, keep=keep)
                     for machine in ("m4-max:64GB", "rtx-4090"))  # fmt: skip
    # 12 layers of 12 heads keep softmax's result, dropout's mask, and its result: 5 bytes in bf16.
    kept, fused = (one.plans[0].estimate.memory["activations"] for one in (answer, other))
    assert kept - fused == pytest.approx(12 * 12 * 8 * 1024**2 * 5, rel=0.01)
    free = answered("gpt2", "m4-max:64GB", **given)
    assert not any(one.plan.compile for one in free.plans)
    assert not any("compile" in note or "--host-memory" in note for note in free.notes)
    with pytest.raises(BadInputError, match="so a Mac trains alone"):
        asked("gpt2", "m4-max:64GB", nodes=2)


@pytest.mark.parametrize(("seconds", "faster"), [(1 - 1e-13, []), (0.999, [1])])
def test_a_plan_is_not_faster_than_itself(seconds, faster):
    """Simulated among others, the same plan's time differs in its last digits."""
    question = asked("gpt2", "rtx-4090", global_batch=16, seq_len=256)
    found = plan_search.search_plans(question)
    times = SimpleNamespace(step_s=np.array([1.0, seconds]))
    pair = replace(found, times=times, ranked=np.array([0]), simplest=1, leanest=0)
    assert list(plan_search._faster_alternatives(pair)) == faster


def test_what_does_not_fit_is_told_what_to_change_first():
    never = "offload_activations=none,offload_parameters=none,offload_optimizer=none"
    long = asked("llama-3.1-8b", "4xrtx-4090", seq_len=131072, global_batch=4, keep=never)
    with pytest.raises(
        BadInputError, match=r"It fits on 8 .*, or with adapters \(--lora-rank 16\)"
    ):
        plans(replace(long, wanted=replace(long.wanted, seq_len=2048)))
    long = asked("llama-3.1-8b", "rtx-4090", seq_len=65536, global_batch=1,
                 keep="lora_rank=16,base=nf4")  # fmt: skip
    with pytest.raises(BadInputError) as caught:
        plans(long)
    length = int(re.search(r" with --seq-len (\d+)", str(caught.value))[1])
    assert plans(replace(long, wanted=replace(long.wanted, seq_len=length))).plans
    with pytest.raises(BadInputError):
        plans(replace(long, wanted=replace(long.wanted, seq_len=2 * length)))


@pytest.mark.slow
def test_alternatives_that_simulation_shows_to_be_slow_give_way_to_the_next(monkeypatch):
    question, real = asked("gpt2-xl", "8xrtx-3090", global_batch=64), plan_search.simulate_pipelines
    assert plans(question).plan_for("leanest").plan.pp > 1

    def slower(model, columns, times, places):
        found = real(model, columns, times, places)
        bubbles = found.bubble_s + (columns.pp > 1) * found.step_s
        return replace(found, bubble_s=bubbles)

    monkeypatch.setattr(plan_search, "simulate_pipelines", slower)
    fast, lean = (plans(question).plan_for(role) for role in ("fastest", "leanest"))
    assert fast.plan.pp == lean.plan.pp == 1
    assert lean.estimate.peak_memory_bytes < fast.estimate.peak_memory_bytes
    assert lean.estimate.step_time_s <= 1.1 * fast.estimate.step_time_s


def test_pipelines_that_wait_do_not_hide_what_is_faster():
    """Closed forms took ten kinds of pipelines to be faster than they are once simulated."""
    host = 2**41  # unknown, it decides what may offload
    question = asked("llama-3-70b", nodes=128, global_batch=1024, count=1, host_memory=host)
    kept = replace(question, wanted=replace(question.wanted, keep={"pp": 1}))
    fastest = [fastest_step_s(one) for one in (question, kept)]
    assert fastest[0] <= fastest[1] * (1 + 1e-9)


def test_a_plan_is_estimated_the_same_when_it_is_given():
    question = asked("llama-3-8b", nodes=2, global_batch=64)
    first = plans(question).plans[0]
    again = estimate_plan(question, first.plan)
    assert again.estimate.step_time_s == pytest.approx(first.estimate.step_time_s)
    assert again.identity == first.identity
    assert again.title == first.title and again.title.endswith(", compiled")
    other = first.plan.model_copy(update={"optimizer": "adamw-8bit", "precision": "fp16"})
    assert estimate_plan(question, other).title == f"{first.title}, adamw-8bit, fp16"


@pytest.mark.slow
@settings(max_examples=5, suppress_health_check=[HealthCheck.too_slow])
@given(
    model=st.sampled_from(["outpace-tiny", "gpt2", "llama-3-8b"]),
    machine=st.sampled_from(["hgx-h100", "2x-titan-rtx", "l4", "4x-gtx-1080-ti"]),
    network=st.sampled_from([None, "1Gbit/s", "100Gbit/s"]),
    nodes=st.integers(1, 6),
    batch=st.sampled_from([1, 6, 16, 64]),
)
def test_doubling_the_machine_never_lowers_the_best_where_ranks_may_stay_idle(
    model, machine, network, nodes, batch
):
    question = asked(model, machine, nodes=nodes, network=network, global_batch=batch, seq_len=256)
    idle = replace(question, idle=True)
    assert best(idle.with_nodes(2 * nodes)) >= best(idle) * (1 - 1e-9)
    assert best(idle) >= best(question)


@pytest.mark.parametrize(
    ("machine", "nodes", "plan", "links"),
    [
        ("hgx-h100", 1, {"strategy": "zero3", "dp_shard": 8}, {"dp_shard": "NVLink 4, in a node"}),
        ("hgx-h100", 4, {"strategy": "3d", "pp": 2, "tp": 4, "dp_shard": 4, "pp_microbatches": 4},
         {"pp": "network, 2 nodes, 8 groups share a node's cards",
          "dp_shard": "network, 2 nodes with 2 ranks each, 4 groups share a node's cards",
          "tp": "NVLink 4, in a node"}),
        ("hgx-h100", 2, {"strategy": "ddp", "dp_replicate": 16},
         {"dp_replicate": "network, 2 nodes with 8 ranks each"}),
        ("2x-titan-rtx", 1, {"strategy": "tp", "tp": 2}, {"tp": "PCIe 3 x8, in a node"}),
        ("l4", 1, {}, {}),
    ],
)  # fmt: skip
def test_every_axis_lies_on_a_link(machine, nodes, plan, links):
    question = asked("gpt2", machine, nodes=nodes, global_batch=64, seq_len=256)
    made = Plan.parse(plan, "test")
    assert list(axis_links(question.cluster, made).items()) == list(links.items())
    assert estimate_plan(question, made).placement == links


def test_experts_lie_on_links_too():
    question = asked("mixtral-8x7b", nodes=4, global_batch=64)
    made = Plan(strategy="3d", dp_shard=32, ep=8, zero=1)
    assert axis_links(question.cluster, made)["ep"] == "NVLink 4, in a node"


def test_what_is_varied_is_searched_and_said():
    free = answered("llama-3-8b", global_batch=64)
    varied = plans(asked("llama-3-8b", global_batch=64, vary="precision,compile"))
    first = varied.plans[0]
    assert first.plan.precision == "fp8" and first.title.split(", ")[-2:] == ["fp8", "compiled"]
    assert first.estimate.step_time_s < free.plans[0].estimate.step_time_s
    assert {planned.plan.precision for planned in free.plans} == {"bf16-master"}
    assert not any("Not searched" in note for note in free.notes)


@pytest.mark.parametrize(
    ("machine", "autocast", "precision"),
    [("h200-sxm", False, "bf16-master"), ("h200-sxm", True, "bf16"), ("4x-v100", False, "fp32"),
     ("4x-v100", True, "fp16")],
)  # fmt: skip
def test_a_gpu_is_planned_for_in_what_is_trained_there(machine, autocast, precision):
    """As `outpace memory` and `outpace train` resolve it; other trainers have autocast."""
    wanted = asked("gpt2", machine, autocast=autocast).wanted
    assert wanted.precision == precision
    if not autocast:
        settings = TrainSettings.parse({"model": "gpt2"}, "test")
        node = find_node(machine)
        question_of_memory = memory_question(settings, DEFAULTS, node, 1)
        assert question_of_memory.plan.precision == precision


def test_what_offloads_is_planned_without_master_weights():
    """They do not go with offloading: such plans are in what training takes then, by autocast."""
    answer = plans(asked("llama-3-8b", "h100-sxm", devices_per_node=1, global_batch=2, count=9))
    assert answer.plans, "8 B parameters on one H100 fit where the optimizer is offloaded"
    for planned in answer.plans:
        plan = planned.plan
        away = {plan.offload_parameters, plan.offload_optimizer} != {"none"}
        assert away and plan.precision == "bf16"
    small = plans(asked("gpt2", "h200-sxm", devices_per_node=1, keep="offload_optimizer=cpu"))
    assert {planned.plan.precision for planned in small.plans} == {"bf16"}
    with pytest.raises(BadInputError):  # as asked, or not at all
        plans(asked("llama-3-8b", "h100-sxm", devices_per_node=1, precision="bf16-master"))


def test_what_would_gain_is_said_where_it_is_asked_for():
    question = replace(asked("llama-3-8b", global_batch=64), hints=True)
    (told,) = [note for note in plans(question).notes if "Not searched" in note]
    assert "fp8 would be 1." in told and "--vary precision" in told
    varied = plans(asked("llama-3-8b", global_batch=64, vary="precision")).plan_for("fastest")
    gain = plans(question).plan_for("fastest").estimate.step_time_s / varied.estimate.step_time_s
    said = float(told.split("fp8 would be ")[1].split()[0])
    assert 1 < said <= gain + 0.005
    decided = replace(asked("llama-3-8b", global_batch=64, keep="precision=bf16,compile=false,"
                            "optimizer=adamw-fused"), hints=True)  # fmt: skip
    assert not any("Not searched" in note for note in plans(decided).notes)


def test_optimizers_are_varied_that_go_with_the_precision():
    for precision, first in (("bf16", "adamw-fused"), ("bf16-pure", "adamw-bf16")):
        question = asked("gpt2", "l4", vary="optimizer", precision=precision, seq_len=256)
        assert question.wanted.vary["optimizer"][0] == first
        assert plans(question).plans[0].plan.optimizer in question.wanted.vary["optimizer"]


def test_nodes_that_cannot_be_used_stay_idle_and_are_told():
    question = asked("gpt2", nodes=5, global_batch=64, seq_len=512, network="1Gbit/s")
    with_all = plans(question) if best(question) else None
    answer = plans(replace(question, idle=True))
    assert answer.nodes == 5 and 0 < answer.idle_nodes < 5
    used = 5 - answer.idle_nodes
    assert {p.plan.world_size for p in answer.plans} == {8 * used}
    if with_all is not None:
        assert answer.plans[0].estimate.step_time_s < with_all.plans[0].estimate.step_time_s
    scaled = throughput(replace(question, idle=True), 5)
    assert scaled.estimate == answer.plan_for("fastest").estimate


def test_any_half_of_the_nodes_is_looked_at():
    """Three of six: no power of two, and the batch is no multiple of it."""
    keep = "pp=3,tp=1,cp=1,dp_replicate=1,dp_shard=1"
    question = asked("gpt2", "l4", nodes=6, global_batch=16, seq_len=256, keep=keep)
    assert best(question) == 0
    answer = plans(replace(question, idle=True))
    assert answer.idle_nodes == 3 and answer.plans[0].plan.pp == 3


@pytest.mark.slow
def test_what_is_infeasible_names_the_fewest_nodes_that_do():
    question = asked("llama-3-70b", "dgx-a100", seq_len=4096, keep="offload_optimizer=none")
    with pytest.raises(BadInputError) as caught:
        plans(question)
    sentence = str(caught.value)
    assert "70.55 G parameters) does not fit" in sentence
    assert "of a device's 79.25 GiB. It fits on" in sentence
    nodes = int(sentence.split("It fits on ")[1].split()[0])

    def fits(count):
        other = question.with_nodes(count)
        world = other.wanted.world
        batch = -(-question.wanted.global_batch // world) * world
        return best(replace(other, wanted=replace(other.wanted, global_batch=batch))) > 0

    assert nodes > 1 and fits(nodes) and not fits(nodes - 1)


@pytest.mark.parametrize(
    ("model", "keep", "words", "sentence"),
    [
        ("qwen2.5-1.5b", "tp=4", {},
         "tp 4 does not divide the 2 key and value heads of qwen2.5-1.5b; tp may be 1 or 2 here"),
        ("gpt2-xl", "tp=2", {}, "tp 2 does not divide the 25 heads of gpt2-xl; tp may be 1 here"),
        ("llama-3-8b", "tp=16", {"nodes": 2}, "tp 16 is more than the devices of a node, 8"),
        ("llama-3-8b", "tp=4", {"max_tp": 2}, "tp 4 is more than --max-tp, 2"),
        ("llama-3-8b", "tp=3", {}, "tp 3 does not divide the 8 devices; tp may be 1, 2, 4 or 8"),
        ("llama-3-8b", "ep=2", {}, "ep 2: llama-3-8b has no experts; ep may be 1 here"),
        ("mixtral-8x7b", "ep=16", {"nodes": 2}, "ep 16 does not divide the 8 experts of mixtral"),
        ("llama-3-8b", "pp=64", {"nodes": 8}, "pp 64 is more than the 32 layers of llama-3-8b"),
        ("llama-3-8b", "cp=8", {"seq_len": 2048}, "cp 8 leaves fewer than 1024 of 2048 tokens"),
        ("llama-3-8b", "cp=4", {"seq_len": 8188}, "cp 4 splits sequences into 8 parts, but"),
        ("llama-3-8b", "tp=4,pp=4", {}, "tp 4 × pp 4 = 16 does not divide the 8 devices"),
        ("llama-3-8b", "dp_shard=3", {}, "dp_shard 3 does not divide the 8 devices"),
        ("llama-3-8b", "pp=8,pp_microbatches=3", {},
         "pp_microbatches 3 does not divide the global batch of 32"),
        ("llama-3-8b", "micro_batch=8,pp_microbatches=8", {},
         "micro_batch 8 × pp_microbatches 8 = 64 does not divide the global batch of 32"),
        ("llama-3-8b", "strategy=interleaved,virtual_stages=5", {},
         "no plan can have virtual_stages=5; virtual_stages may be 1, 2, 4 or 8 here"),
        ("llama-3-8b", "strategy=hsdp,dp_replicate=8", {},
         "strategy=hsdp and dp_replicate=8 contradict each other"),
    ],
)  # fmt: skip
def test_the_reason_is_the_reason(model, keep, words, sentence):
    """With the model's number, and what is allowed instead."""
    with pytest.raises(BadInputError) as caught:
        plans(asked(model, keep=keep, **words))
    said = str(caught.value)
    assert f": {sentence}" in said and "no plan can be laid out: " in said
    assert "multiply" not in said


def test_what_never_fits_asks_for_other_devices():
    with pytest.raises(BadInputError, match=r"Use devices with more memory, or a smaller model"):
        plans(asked("llama-3.1-405b", "4x-gtx-1080-ti", keep="strategy=ddp", seq_len=4096))


@pytest.mark.parametrize(
    ("model", "seq_len"),
    [("mistral-7b", 131072), ("gemma-2-9b", 131072), ("phi-3-mini", 131072),
     ("llama-3.1-8b", 131072)],
)  # fmt: skip
def test_no_device_computes_more_than_it_can(model, seq_len):
    """Neither by windows, which reach less than the sequence, nor by long attention."""
    answer = plans(asked(model, seq_len=seq_len, global_batch=8))
    assert answer.plans
    for planned in answer.plans:
        assert 0.1 < planned.estimate.mfu <= planned.estimate.hfu < 1


@pytest.mark.parametrize(("mode", "attention"), [("full", True), ("attention", False)])
def test_hfu_counts_what_checkpointed_blocks_repeat_and_no_head(mode, attention):
    """Neither the head, nor a block's last matmul, nor, of "attention", attention itself."""
    question = asked("llama-3.2-1b", machine="rtx-4090", seq_len=2048, global_batch=4)
    plan = Plan(micro_batch=4, precision="bf16", checkpointing=mode)
    said = estimate_plan(question, plan).estimate
    outline = question.outline
    head = 2 * 2048 * outline.table_width * outline.outputs
    last = sum(2 * 2048 * outline.hidden * s.mlp.width * s.layers for s in outline.stacks)
    again = forward_flops(outline, 2048, 1, attention=attention) - head - last
    ratio = 1 + again / (3 * forward_flops(outline, 2048, 1))
    assert said.hfu / said.mfu == pytest.approx(ratio) and ratio < 4 / 3 - 0.03


@pytest.mark.parametrize(
    ("options", "leaves_out"),
    [
        ({"lora_rank": 8, "lora_targets": ("q", "v")}, True),
        ({"lora_rank": 8, "lora_targets": ("down",)}, False),
        ({"lora_rank": 8, "lora_targets": ("q",), "base": "nf4"}, False),
        ({"precision": "fp8"}, False),  # keeps operands when it computes a matmul
        ({"precision": "fp8", "compile": True}, True),
    ],
)
def test_hfu_counts_the_last_matmul_where_the_step_time_does(options, leaves_out):
    question = asked("llama-3.2-1b", devices_per_node=1, seq_len=2048, global_batch=4)
    plan = Plan(**{"micro_batch": 4, "precision": "bf16", "checkpointing": "full"} | options)
    said = estimate_plan(question, plan).estimate
    outline = question.outline
    adapters = AdapterSettings.from_plan(plan)
    trained = None if adapters is None else adapters.trained_parameters(outline)
    head = 2 * 2048 * outline.table_width * outline.outputs
    last = sum(2 * 2048 * outline.hidden * s.mlp.width * s.layers for s in outline.stacks)
    again = forward_flops(outline, 2048, 1) - head - leaves_out * last
    ratio = 1 + 4 * again / step_flops(outline, 2048, 4, trained)
    assert said.hfu / said.mfu == pytest.approx(ratio)
    repeats_all = replace(question, stack=question.stack.model_copy(update={"stops_early": False}))
    others_s = estimate_plan(repeats_all, plan).estimate.parts_s["products_s"]
    assert (said.parts_s["products_s"] < others_s) is (leaves_out and not plan.compile)


def test_what_nobody_trains_is_not_planned_for_as_trained():
    with pytest.raises(BadInputError, match="mixtral-8x7b can be planned, but outpace does not"):
        plans(asked("mixtral-8x7b", trained=True))
    answer = plans(asked("llama-3-8b", trained=True, nodes=2, global_batch=64))
    assert not any(planned.untrained for planned in answer.plans)


@pytest.mark.parametrize("keep", ["precision=fp32", "tp=8", "micro_batch=1,checkpointing=full"])
def test_what_is_insisted_on_costs_what_it_costs(keep):
    free = answered("llama-3-8b", global_batch=64)
    held = plans(asked("llama-3-8b", global_batch=64, keep=keep))
    names = [one.setting for one in held.insistences]
    assert names == keep.split(",")
    if len(names) == 1:
        both = (one.plan_for("fastest").estimate.step_time_s for one in (held, free))
        slower = next(both) / next(both) - 1
        assert held.insistences[0].slowdown == pytest.approx(slower) and slower > 0.01


def test_the_width_of_tensor_parallelism_may_be_held_down():
    (row,) = plans(asked("llama-3-8b", global_batch=8, max_tp=1)).insistences
    assert row.setting == "max-tp 1" and row.slowdown >= 0


def test_a_plan_for_another_batch_is_refused():
    with pytest.raises(BadInputError, match="is not a multiple of"):
        estimate_plan(asked("gpt2", global_batch=9), Plan(strategy="ddp", dp_replicate=8))


def on_host_of(question, host_bytes):
    return replace(question, cluster=replace(question.cluster, host_bytes=host_bytes))


def test_a_host_that_is_too_small_passes_plans_over():
    """With all of a host's memory but a byte the best is another, that offloads no more."""
    question = asked("llama-3-8b", "2x-titan-rtx", global_batch=8, seq_len=1024)
    free = plans(question).plans[0].estimate
    assert free.host_memory_bytes is None and free.host_offloaded_bytes > 2**30
    tight = on_host_of(question, free.host_offloaded_bytes - 1)
    for planned in plans(tight).plans:
        assert planned.estimate.host_offloaded_bytes < free.host_offloaded_bytes
        assert planned.estimate.fits and planned.estimate.step_time_s >= free.step_time_s
    enough = on_host_of(question, free.host_offloaded_bytes)
    assert plans(enough).plans[0].estimate.step_time_s == free.step_time_s


def test_a_disk_takes_no_host_memory():
    question = asked("llama-3-8b", global_batch=64, keep="strategy=zero3,offload_optimizer=disk")
    found = plans(question).plans[0].estimate
    assert found.host_offloaded_bytes == 0 < found.disk_offloaded_bytes


def test_mfu_without_the_masked_half_of_attention_is_told_for_long_sequences():
    def notes(model, **values):
        answer = answered(model, **values)
        told = [note for note in answer.notes if note.startswith("MFU counts")]
        return answer.plans[0].estimate.mfu, told

    mfu, [told] = notes("llama-3-8b", seq_len=32768, global_batch=8)
    # A layer of 4096, 8 of 32 heads for keys and values, and an MLP of 14336; a head of 128256.
    weights = 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 128256 * 4096
    attention = 32 * 4096 * 32768 * 2
    share = attention / 2 / (weights + attention)
    assert told.endswith(f"is {100 * mfu * (1 - share):.1f} % instead of {100 * mfu:.1f} %.")
    assert not notes("llama-3-8b", seq_len=2048, global_batch=64)[1]
    assert not notes("mistral-7b", seq_len=32768, global_batch=8)[1]  # windows of 4,096
