"""`outpace accuracy`: published steps that are nearest to a plan file."""

import json

from outpace.cli.main import main
from outpace.records.plan import Plan, PlanFile


def test_cases_like_a_plan_are_listed(capsys, monkeypatch, tmp_path):
    file = tmp_path / "plan.json"
    plan = Plan(strategy="zero3", dp_shard=2048)
    PlanFile.from_plan(plan, 4096, 2048).save(file)
    words = ["accuracy", f"--like={file}", "--model=llama-3-70b", "--machine=8xh100", "--count=2"]
    assert main([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert len(answer["cases"]) == 2
    assert all("H100" in one["chip"] and one["devices"] > 64 for one in answer["cases"])
    assert any("above" in one for one in answer["extrapolated"])
    monkeypatch.setenv("COLUMNS", "80")
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "Nearest published steps:" in text and "Extrapolated: no measurement" in text
    assert all(one["model"] in text for one in answer["cases"])
    for one in answer["cases"]:
        asked = f"{one['seq_len']:,} tokens × {one['global_batch']:,}, {one['precision']}, "
        assert asked in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 80
    # Without a model and a machine the plan alone is compared.
    assert main(["accuracy", f"--like={file}"]) == 0
    assert "hint: add --model and --machine to compare these as well" in capsys.readouterr().err
    assert main(["accuracy", f"--like={tmp_path / 'none.json'}"]) == 2
    assert "none.json" in capsys.readouterr().err
