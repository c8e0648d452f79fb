"""The race: outpace and a peer train the same, are seen from outside, and judged alike."""

import dataclasses
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(autouse=True)
def _found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of benchmarks/ import each other by name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.syspath_prepend(str(BENCHMARKS / "peers"))


@pytest.mark.slow
def test_outpace_and_a_plain_loop_train_the_same(tmp_path):
    import cases
    import entrants
    import race

    plain = next(peer for peer in entrants.PEERS[""] if peer.name == "plain loop")
    broken = dataclasses.replace(plain, name="broken", flags=("no-such-flag",))
    found = race.run(
        race.Heat(cases.TINY["tiny"], 1), tmp_path, "bf16", counted=2, rounds=1,
        peers=(plain, broken),
        python_of=lambda name, folder: Path(sys.executable),  # which has what these need
    )  # fmt: skip
    ours, theirs = found["entrants"]["outpace"], found["entrants"]["plain loop"]
    for one in (ours, theirs):
        (run,) = one["runs"]
        assert len(run["steps_s"]) == race.WARMUP + 2 and one["same_losses"]
        assert 0 < one["first_step_s"] <= run["steps_s"][-1]
        assert 100 << 20 < one["rank_bytes"] <= one["peak_bytes"]
    assert "no-such-flag" in found["entrants"]["broken"]["failure"]
    assert found["model_flops"] > 6 * 2 * 12 * 64**2 * 4 * 64  # of the blocks' matrices alone


@pytest.mark.slow
def test_a_case_is_laid_down_once_and_anew_where_it_is_another(tmp_path):
    import cases

    folder, tiny = tmp_path / "case", cases.TINY["tiny"]

    def laid(case):
        cases.write(case, folder, 1, "fp32")
        return (folder / "case.json").stat().st_mtime_ns, (folder / "tokens.bin").stat().st_mtime_ns

    first = laid(tiny)
    assert laid(tiny) == first
    slower = dataclasses.replace(tiny, lr=tiny.lr / 2)
    wider = dataclasses.replace(slower, config={**tiny.config, "n_embd": 128})
    for case in (slower, wider):
        before, first = first, laid(case)
        assert all(new > old for new, old in zip(first, before, strict=True))


def test_who_computes_something_else_is_not_counted():
    import race

    losses = (6.0, 5.9, 5.8)
    assert race.same(losses, losses) and race.same((6.01, 5.95, 5.7), losses)
    assert not race.same((6.1, 5.9, 5.8), losses)  # the first is of the same weights
    assert not race.same((6.0, 5.9), losses)


def test_a_run_that_took_no_step_is_a_failure():
    import cases
    import race
    import watching

    failed = watching.Seen((), (), 0, 0, 1, "no such flag")
    whole = watching.Seen(tuple(range(4)), (6.0, 5.9, 5.8, 5.7), 1, 1, 0, "")
    found = {"plain loop": [failed], "outpace": [whole]}
    rows = race.judged(race.Heat(cases.TINY["tiny"], 1), found)["entrants"]
    assert rows["plain loop"]["failure"] == "no such flag" and not rows["outpace"]["same_losses"]


def test_the_loss_to_reach_is_one_of_those_who_compute_the_same():
    import cases
    import race
    import watching

    def seen(*losses):
        return [watching.Seen(tuple(range(len(losses))), losses, 1, 1, 0, "")]

    heat = race.Heat(cases.TINY["tiny"], 2)
    found = {"plain loop": seen(6.0, 5.9, 5.8, 5.0), "outpace": seen(6.0, 5.9, 5.8, 5.1),
             "twice": seen(12.0, 11.8, 11.6, 10.0)}  # fmt: skip
    judged = race.judged(heat, found)
    assert judged["target_loss"] == 5.1
    reached = {name: row["loss_reached_s"] for name, row in judged["entrants"].items()}
    assert reached == {"plain loop": 3, "outpace": 3, "twice": None}
    assert not judged["entrants"]["twice"]["same_losses"]


@pytest.mark.slow
def test_in_turn_each_takes_its_steps_and_waits_for_the_others(tmp_path):
    import cases
    import entrants
    import finals
    import race

    heat = race.Heat(cases.TINY["tiny"], 1)
    plain = [peer for peer in entrants.PEERS[""] if peer.name == "plain loop"]
    turns, steps = 2, 3
    count = race.WARMUP + turns * (steps + finals.SPARE + 20)  # a tiny step is over soon
    cases.write(heat.case, tmp_path / "case", count, "fp32")
    lines = race.commands(heat, tmp_path, tmp_path / "case", count, plain,
                          lambda name, folder: Path(sys.executable))  # fmt: skip
    race.clear(tmp_path)
    seen = []

    def before():
        seen.append({name: log.read_bytes().count(b"\n") for name, (_, log) in lines.items()})

    took, losses = finals.take_turns(lines, turns, steps, before)
    assert [len(turn) for turns in took.values() for turn in turns] == [steps] * 4
    # Tiny steps may end between two looks, and then take nothing.
    assert all(0 < sum(map(sum, turns)) < 60 for turns in took.values())
    first, second = seen
    assert all(race.WARMUP <= first[name] <= second[name] - steps for name in lines)
    shortest = min(map(len, losses.values()))
    ours, theirs = (losses[name][:shortest] for name in ("outpace", "plain loop"))
    assert race.same(ours, theirs)


def test_finalists_are_the_fastest_that_there_is_room_for():
    import finals

    def one(tokens_per_s, rank_bytes, same=True):
        return {"tokens_per_s": tokens_per_s, "rank_bytes": rank_bytes, "same_losses": same}

    recorded = {"processes": 2, "entrants": {
        "outpace": one(9.0, 10), "slow": one(1.0, 10), "second": one(2.0, 10),
        "best": one(3.0, 10), "wrong": one(4.0, 10, same=False), "broken": {"failure": "no"},
    }}  # fmt: skip
    assert finals.finalists(recorded, 1000) == ["best", "second"]
    assert finals.finalists(recorded, 59) == ["best"]  # 0.85 of it are 50, and three take 60
    assert finals.finalists(recorded, 80, more_bytes=10) == ["best"]
    assert finals.finalists(recorded, 1) == ["best"]  # one at least


STAND = {
    "machine": {"host_cores": 2, "cpu": "a processor", "devices": []},
    "versions": {"torch": "2.13.0", "python": "3.11"}, "date": "2026-11-22", "commit": "0",
    "uncommitted_changes": False, "command": ["python", "x.py"],
}  # fmt: skip


def test_the_tables_say_what_was_reached():
    from figures_performance import beside, peers, targets

    def one(tokens_per_s, **more):
        return {"tokens_per_s": tokens_per_s, "step_time_s": 100 / tokens_per_s,
                "rank_bytes": 2**30, "first_step_s": 5.0, "loss_reached_s": 9.0,
                "same_losses": True, **more}  # fmt: skip

    entrants = {
        "outpace": one(120.0, first_step_s=3.0), "plain loop": one(100.0), "Trainer": one(80.0),
        "wrong": one(500.0, same_losses=False), "broken": {"failure": "no"},
    }  # fmt: skip
    heat = {"case": "a", "title": "small", "processes": 1, "kind": "", "precision": "bf16",
            "entrants": entrants, "cannot": {"Lightning": "refuses"}, "model_flops": 60.0,
            "best_product_flops_per_s": 100.0, **STAND,
            "environments": {"torch": {"torch": "2.13.0", "transformers": "5.0"}}}  # fmt: skip
    result = {"heats": {"a-1": heat}}
    assert beside(heat, "tokens_per_s") == pytest.approx(1.2)
    said = targets(result)
    assert "1.20 × plain loop |" in said and "0.720, **not" not in said
    assert "| 0.720 |" in said  # 60 FLOP in 100/120 s, of 100 FLOP/s
    assert "0.60 × |" in said
    # Two processes stand beside one only where the machine was as fast.
    for rate, shown in ((95.0, True), (50.0, False)):
        two = {**heat, "processes": 2, "best_product_flops_per_s": rate}
        assert ("2 processes ≥" in targets({"heats": {"a-1": heat, "a-2": two}})) == shown
    shown = peers(result)
    assert "**(a) small, 1 process, bf16** (2026-11-22, best matmul 0 GFLOP/s)" in shown
    assert "| **outpace** | 120 | 1.00 | 1,024 MiB | 3.0 s | 9.0 s |" in shown
    assert "With torch 2.13.0, transformers 5.0." in shown and "`python x.py`" in shown
    assert "wrong (other losses)" in shown and "| broken | failed |" in shown
    assert "| Lightning | refuses |" in shown


def test_the_table_of_finals_says_what_was_reached():
    from figures_finals import finals

    final = {
        "case": "a", "title": "small", "processes": 2, "kind": "", "precision": "bf16",
        "model_flops": 72.0, "best_products_flops_per_s": [100.0, None, 100.0],
        "turns_s": {
            "outpace": [[1.0, 1.0, 9.0], [2.0], [1.0]], "plain loop": [[1.2], [2.4], [1.3]],
            "Trainer": [[1.3], [2.6], [1.1]], "outpace on one process": [[0.9], [1.9], [0.9]],
            "wrong": [[0.1], [0.1], [0.1]],
        },
        "same_losses": {"outpace": True, "plain loop": True, "Trainer": True,
                        "outpace on one process": True, "wrong": False},
        "first_steps_s": {"outpace": [3.0, 9.0, 3.0], "Trainer": [6.0, 5.0, 5.0]}, **STAND,
    }  # fmt: skip
    said = finals({"heats": {"a-2": final}})
    # What changed for all in the second turn changes nothing; nor does one step of a turn.
    assert "| 1.20 × plain loop (1.20 – 1.30) |" in said  # Trainer was faster in one turn only
    assert "| 0.720 (0.720 – 0.720) |" in said
    assert "0.60 × (3.0 s and 5.0 s) |" in said
    assert "0.900 × (0.900 – 0.950), **not reached** |" in said
    alone = {**final, "same_losses": {"outpace": True}}
    assert "best peer's" not in finals({"heats": {"a-2": alone}})
