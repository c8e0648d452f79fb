"""The tuner against machines that are not what the planner thinks, without running anything."""

from functools import cache

import pytest

from outpace.experiment.trials import Trials
from outpace.experiment.tune import DEFAULT_WHY, Limits, NextTrial, summarise, tune
from outpace.jobs.planning.proposer import Proposer
from outpace.records.measurement import Measurement
from outpace.records.settings import TrainSettings
from outpace.records.tuning import PlanTrial
from outpace.records.utilisation import HostLoad, Load
from outpace.reporting.answers.tuning import disturbance_words


def proposer_of(**more):
    values = {"model": "gpt2", "seq_len": 128, "global_batch": 16, "nproc": 2, **more}
    return Proposer(TrainSettings(**values), dict.fromkeys(values, "command line"))


@pytest.fixture(scope="module")
def proposer():
    """A proposer that is asked once for the same trials, which several tests have."""
    made = proposer_of()
    known = cache(made.proposals)
    made.proposals = lambda trials: known(tuple(trials))
    return made


@pytest.fixture(scope="module")
def first_s(proposer):
    """Return the step time of a proposal's plan as it is predicted before any trial."""
    known = {one.plan.model_dump_json(): one.step_time_s for one in proposer.proposals(())}

    def predicted_s(proposal):
        key = proposal.plan.model_dump_json()
        if key not in known:
            known[key] = proposer.proposal(proposal.plan).step_time_s
        return known[key]

    return predicted_s


def runner(took, code=4):
    """Trials that take what `took` says of a proposal, seconds; None: it fails with `code`."""

    def run(number, chosen):
        one, seconds = chosen.proposal, took(chosen.proposal)
        return PlanTrial(
            number=number, why=chosen.why, title=one.title, plan=one.plan,
            first_predicted_s=chosen.first_s, predicted_s=one.step_time_s, step_time_s=seconds,
            failure=None if seconds else "ended", exit_code=None if seconds else code, took_s=1.0,
            run="r",
        )  # fmt: skip

    return run


def play(proposer, run, limits, before=(), **more):
    def run_final(number, several):
        return [run(at, one).model_copy(update={"raced": True})
                for at, one in enumerate(several, number)]  # fmt: skip

    return tune(proposer, run, run_final, limits, before, **more)


@pytest.mark.parametrize(
    ("machine", "kinds"),
    [
        (1.0, {"tp": 0.875}),
        pytest.param(4.0, {"zero2": 0.8, "ddp": 1.2, "tp": 1.6}, marks=pytest.mark.slow),
    ],
)
def test_few_trials_find_what_is_nearly_the_fastest(proposer, first_s, machine, kinds):
    def took(proposal):
        return machine * kinds.get(proposal.plan.strategy, 1.0) * first_s(proposal)

    ended = play(proposer, runner(took), Limits())
    assert ended.trials[0].why == DEFAULT_WHY and len(ended.trials) <= 8
    all_of_them = [took(one) for one in proposer.proposals(())]
    assert summarise(ended.trials)["step_time_s"] <= 1.03 * min(all_of_them)


@pytest.mark.slow
def test_it_stops_where_nothing_left_can_win(proposer, first_s):
    def took(proposal):  # the planner is right in all
        return first_s(proposal)

    ended = play(proposer, runner(took), Limits(trials=30, within=0.05))
    assert "no remaining plan can be faster by more than 5%" in ended.stopped
    assert len(ended.trials) < 30
    found = summarise(ended.trials)
    assert found["step_time_s"] <= 1.01 * proposer.proposals(())[0].step_time_s
    default_s = ended.trials[found["default"] - 1].step_time_s
    assert found["gain"] == pytest.approx(1 - found["step_time_s"] / default_s)


@pytest.mark.slow
def test_what_only_saves_memory_is_tried_where_nothing_else_fits(proposer, first_s):
    def took(proposal):
        return 2 * first_s(proposal)

    def saves(trial):
        return trial.plan.recomputes or trial.plan.loss == "chunked"

    ended = play(proposer, runner(took), Limits(trials=12))
    assert len(ended.trials) > 3 and not any(map(saves, ended.trials[1:]))
    small = proposer_of(strategy="ddp", micro_batch=8)  # else smaller ones fit without it
    least = min(one.memory_bytes for one in small.proposals(()))

    def tight(proposal):
        return None if proposal.memory_bytes >= least else small.proposal(proposal.plan).step_time_s

    ended = play(small, runner(tight), Limits(trials=20))
    assert any(saves(trial) for trial in ended.trials if trial.step_time_s)


def test_what_some_numbers_of_processes_cannot_do_is_tuned_on_the_others():
    asked = TrainSettings(model="gpt2", seq_len=128, global_batch=16, strategy="single")
    origins = dict.fromkeys(("seq_len", "global_batch", "model", "strategy"), "command line")
    found = Proposer(asked, origins).proposals(())
    assert found and {one.plan.world_size for one in found} == {1}


@pytest.mark.slow
def test_trials_of_adapters_are_compared_as_such():
    """Each proposal trains the adapters that are asked for, and its time is that of adapters."""
    asked = {"lora_rank": 8, "lora_targets": ("q", "v")}
    proposer = proposer_of(nproc=1, micro_batch=8, checkpointing="none", **asked)
    found = proposer.proposals(())
    assert {(one.plan.lora_rank, one.plan.lora_targets) for one in found} == {(8, ("q", "v"))}
    first = proposer.proposal(proposer.default)
    assert first.plan.lora_rank == 8
    whole = proposer.default.model_copy(update={"lora_rank": None, "lora_targets": ("all",)})
    assert first.step_time_s < 0.9 * proposer.proposal(whole).step_time_s
    slow = runner(lambda one: 3 * one.step_time_s)(1, NextTrial(DEFAULT_WHY, first, 1.0))
    learned_s = proposer.proposal(proposer.default, (slow,)).step_time_s
    assert learned_s == pytest.approx(3 * first.step_time_s, rel=0.2)


def test_where_nothing_has_run_yet_the_fastest_is_tried(proposer):
    def took(proposal):
        return None if proposal.plan == proposer.default else proposal.step_time_s

    first, second, *_ = play(proposer, runner(took, code=2), Limits(trials=3)).trials
    assert first.failure
    others = [one for one in proposer.proposals((first,)) if one.plan != proposer.default]
    assert second.plan == others[0].plan


@pytest.mark.parametrize(
    ("code", "trials"),
    [(4, 3), *(pytest.param(code, 10, marks=pytest.mark.slow) for code in (4, -9, 137))],
)
def test_what_is_out_of_memory_is_a_result_and_nothing_larger_is_tried(proposer, code, trials):
    fastest = proposer.proposals(())[0]
    needs, memory_bytes = fastest.memory_bytes, {}

    def took(proposal):
        memory_bytes[proposal.plan.model_dump_json()] = proposal.memory_bytes
        return None if proposal.memory_bytes >= needs else proposal.step_time_s

    ended = play(proposer, runner(took, code), Limits(trials=trials))
    assert any(trial.failure for trial in ended.trials)
    most = float("inf")
    for trial in ended.trials:
        own = memory_bytes[trial.plan.model_dump_json()]
        assert own < most
        most = min(most, own) if trial.failure else most


@pytest.mark.slow
def test_what_fails_in_another_way_says_nothing_of_memory(proposer):
    ended = play(proposer, runner(lambda proposal: None, code=2), Limits(trials=6))
    needs = [proposer.proposal(trial.plan).memory_bytes for trial in ended.trials]
    assert len(needs) == 6
    assert any(need >= min(needs[:at]) for at, need in enumerate(needs) if at)


def test_what_was_spent_before_counts(proposer, first_s):
    def took(proposal):
        return 2 * first_s(proposal)

    first = play(proposer, runner(took), Limits(trials=2)).trials  # of a second each
    ended = play(proposer, runner(took), Limits(budget_s=2.0), first, clock=lambda: 0.0)
    assert ended.trials == first and ended.stopped == "the budget of 2 s is spent"


def test_all_failing_is_said(proposer):
    ended = play(proposer, runner(lambda proposal: None), Limits(trials=3))
    assert summarise(ended.trials) == {
        "best": None, "default": 1, "step_time_s": None, "gain": None
    }  # fmt: skip


def trial_of(proposer, number, why, plan, median_s, quarter_s=None, raced=False):
    chosen = NextTrial(why, proposer.proposal(plan), 1.0)
    one = runner(lambda _: median_s)(number, chosen)
    return one.model_copy(update={"undisturbed_s": quarter_s, "raced": raced})


def test_a_disturbed_trial_is_judged_by_its_quiet_steps(proposer):
    """And what is promised is the median of what was picked."""
    default, other = proposer.default, proposer.default.model_copy(update={"micro_batch": 4})
    trials = [
        trial_of(proposer, 1, DEFAULT_WHY, default, 1.0, 0.9),
        trial_of(proposer, 2, "x", other, 0.95, 0.94),
    ]
    found = summarise(trials)
    assert (found["best"], found["step_time_s"], found["gain"]) == (1, 1.0, 0.0)
    told = [trial.model_copy(update={"undisturbed_s": None}) for trial in trials]
    assert summarise(told)["best"] == 2


def test_those_that_ran_in_turn_decide(proposer):
    """Not what had the machine to itself in a better minute, nor one that failed this time."""
    plans = [proposer.default.model_copy(update={"micro_batch": size}) for size in (8, 4, 2, 1)]
    alone = [
        trial_of(proposer, 1, DEFAULT_WHY, plans[0], 1.2),
        *(trial_of(proposer, n, "x", plan, 1.0) for n, plan in enumerate(plans[1:], 2)),
    ]
    seconds = {5: 1.3, 6: 1.25, 7: None}
    race = [trial_of(proposer, n, "x", plans[n - 4], s, raced=True) for n, s in seconds.items()]
    found = summarise([*alone, *race])
    assert (found["best"], found["step_time_s"]) == (3, 1.25)
    assert found["gain"] == pytest.approx(1 - 1.0 / 1.2)  # the default was not among them
    others = [trial_of(proposer, 7, "x", plans[0], 1.5, raced=True)]
    assert summarise([*alone, *race[:2], *others])["gain"] == pytest.approx(1 - 1.25 / 1.5)
    later = trial_of(proposer, 8, "x", plans[0], 1.1)  # a tuning that went on: all count again
    assert summarise([*alone, *race, later])["best"] == 4


def test_what_was_tried_before_is_not_tried_again(proposer, first_s):
    def took(proposal):
        return 2 * first_s(proposal)

    whole = play(proposer, runner(took), Limits(trials=4))
    rest = play(proposer, runner(took), Limits(trials=4), whole.trials[:2])
    assert rest.trials == whole.trials


def test_predictions_are_nearer_with_every_trial(proposer, first_s):
    def took(proposal):
        return 3 * first_s(proposal)

    ended = play(proposer, runner(took), Limits(trials=4))
    off = [abs(trial.predicted_s / trial.step_time_s - 1) for trial in ended.trials]
    assert off[0] == pytest.approx(2 / 3, abs=0.01) and max(off[2:]) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize(("count", "raced"), [(5, 2), (3, 0), (4, 0), (8, 3)])
def test_the_last_trials_run_in_turn(proposer, count, raced):
    """The fastest, what is close to it, and the default where there is room."""

    def took(proposal):  # others may always win, and never do
        made.append(proposal.plan)
        return 1.0 - 1e-3 * len(set(map(str, made)))

    made = []
    trials = play(proposer, runner(took), Limits(trials=count, within=-9.0)).trials
    alone, last = trials[: count - raced], trials[count - raced :]
    assert not any(trial.raced for trial in alone) and all(trial.raced for trial in last)
    assert {str(one.plan) for one in last} == {str(one.plan) for one in alone[len(alone) - raced :]}


@pytest.mark.slow
def test_a_trial_that_other_work_slowed_is_made_again(proposer, first_s):
    made = []

    def took(proposal):  # the planner is right in all; somebody else was at the machine at first
        made.append(proposal)
        return first_s(proposal) * (2.5 if len(made) == 1 else 1.0)

    ended = play(proposer, runner(took), Limits(trials=20, within=0.05))
    default = [trial for trial in ended.trials if trial.plan == proposer.default]
    assert [one.raced for one in default][:2] == [False, True]
    assert "the baseline of the gain" in default[1].why
    found = summarise(ended.trials)
    by_itself_s = proposer.proposal(proposer.default).step_time_s
    assert found["gain"] == pytest.approx(1 - found["step_time_s"] / by_itself_s)


@pytest.mark.slow
def test_what_fails_when_it_is_run_again_is_not_run_for_ever(proposer):
    def took(proposal):
        return 1.0 if proposal.plan == proposer.default else 0.99

    first = play(proposer, runner(took), Limits(trials=2)).trials
    assert len({str(trial.plan) for trial in first}) == 2
    failing = runner(lambda proposal: None, code=1)
    ended = play(proposer, failing, Limits(trials=9, within=0.9), first)
    assert [trial.raced for trial in ended.trials] == [False, False, True, True]
    assert summarise(ended.trials)["step_time_s"] == 0.99


@pytest.mark.parametrize(("own", "others"), [(0.4, 1.5), (1.8, None)])
def test_a_trial_whose_cores_others_used_says_so(proposer, tmp_path, monkeypatch, own, others):
    load = Load(duration_s=1.0, host=HostLoad(cores=(0.95, 0.95), run_cores=own))
    ended = Measurement.model_construct(
        step_time_s=0.2, tokens_per_s=9.0, samples_per_s=1.0, peak_memory_bytes=1,
        utilisation=(load,),
    )  # fmt: skip
    monkeypatch.setattr("outpace.experiment.trials.train_once", lambda *_, **__: ended)
    monkeypatch.setattr("outpace.experiment.trials.steps_of", lambda _: [])
    monkeypatch.setattr("outpace.experiment.trials.first_quartile", lambda _: 0.2)
    trial = Trials({}, tmp_path).run(1, NextTrial("", proposer.proposals(())[0], 0.1))
    assert trial.other_cores == (others and pytest.approx(others))
    assert ("other processes kept 1.5 cores busy" in disturbance_words(trial)) is bool(others)
